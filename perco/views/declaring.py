"""Derived tables that a program declares once, and the observers that keep them.

    v = views.Views(schema)

    @v.each(body, id="index", into=postings)                      # a source row -> rows of `postings`
    def index(doc):
        for word, n in Counter(doc[body].split()).items():
            yield views.Put(postings, (word, doc.key), {count: n})

    @v.group(count, id="totals", by=views.prefix(1), into=words)  # all rows with one word -> a row of `words`
    def totals(word, rows):
        yield views.Put(words, word, {total: rows.sum(count)})

`wiring.py` says to which tables, signals and observers a view compiles.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, TypeVar

from perco.errors import UsageError
from perco.schema.codecs import BYTES, Codec
from perco.schema.manner import must_be_batch
from perco.schema.schema import Change, Code, Column, Schema, Signal, Table
from perco.txn.row import Row
from perco.txn.transaction import Transaction
from perco.views import batch as batches, wiring
from perco.views.aggregates import Aggregate
from perco.views.batch import Rows
from perco.views.cached import BATCH_MAX, THREADS_MAX, Cached
from perco.views.code import fingerprint
from perco.views.compiled import Each, First, Grouped, Joined, Owners, Prefix, Teller, View
from perco.views.joining import run_key
from perco.views.rows import Group, Put
from perco.views.running import run_cogroup, run_each, run_group, run_teller
from perco.views.sinking import BATCH_MAX as SINK_BATCH_MAX, Delivered, Sink, Sinking, must_be_sink, run_sink

K = TypeVar("K")
G = TypeVar("G")
R = TypeVar("R")
V = TypeVar("V", bound=Owners | Teller)
A = TypeVar("A")
W = TypeVar("W")

EachFunction = Callable[[Row[K]], Iterable[Put[Any]]]
GroupFunction = Callable[[G, Group[K]], Iterable[Put[Any]]]
Into = Table[Any] | Column[Any, Any] | Sequence[Table[Any] | Column[Any, Any]]

JoinFunction = Callable[[Row[K], Row[R] | None], Iterable[Put[Any]]]
CoGroupFunction = Callable[..., Iterable[Put[Any]]]

MEMBERS_MAX: Final = 100_000
MATCHES_MAX: Final = 10_000
NODES_MAX: Final = 100_000


class Views:
    """The views of a program: they add tables and observers to the schema that is given.

    Declare a view after the views that it reads from. Open stores with `views.schema`, as ever.

    Args:
        schema: the tables that the views read and write.
        batch: how many runs of a view may share a transaction, if changes wait (N20). Use it for short functions that
            call no `cached` function: the runs of a batch follow each other, so they would not share its calls. It does
            not concern sinks.

    Raises: UsageError.

    Attributes:
        schema: the schema, with all that the views compile to.
        declared: the views, by id, in the order of their declaration.
        cached_functions, sinks: what `cached` and `sink` have made, by id.
    """

    schema: Schema
    declared: dict[str, View]
    cached_functions: dict[str, Cached[Any, Any]]
    sinks: dict[str, Sinking]

    def __init__(self, schema: Schema, *, batch: int = 1) -> None:
        if not isinstance(schema, Schema):
            raise UsageError(f"Views takes a perco.Schema, not {schema!r}")
        must_be_batch("Views", batch)
        self.schema = schema
        self.declared, self.cached_functions, self.sinks = {}, {}, {}
        self._readers: dict[Column[Any, Any], str] = {}
        self._writers: dict[Column[Any, Any], Owners] = {}
        self._codes: dict[str, str] = {}
        self._batch = batch

    def each(
        self, *columns: Column[K, Any], id: str, into: Into, version: int = 1
    ) -> Callable[[EachFunction[K]], EachFunction[K]]:
        """A view whose function takes one source row and gives rows: `function(row) -> Iterable[Put]`.

        The function must be pure: it depends on the row's key and these columns only. It runs again after each change
        of one of the columns. The rows that it no longer gives are deleted; those that it gives again unchanged are not
        written. It is not called for a row in which none of the columns has a value: such a row gives nothing.

        Args:
            columns: of one table; the row that the function gets has these.
            id: recorded in the store, as an observer's is; never change it. At most 40 characters.
            into: the tables, or the single columns, that the function gives. A column belongs to one view.
            version: raise it when the function has changed: it then runs again for all source rows.

        Raises: UsageError.
        """
        self._must_read(id, columns)
        outputs = self._must_write(id, into)

        def register(function: EachFunction[K]) -> EachFunction[K]:
            wiring.must_be_plain(id, function)
            view = wiring.each(id, version, columns, outputs, function)
            self._declare(view, columns)
            self._observe_each(view)
            return function

        return register

    def group(
        self,
        *columns: Column[K, Any],
        id: str,
        by: Prefix | Callable[[Row[K]], Any],
        into: Into,
        key: Codec[Any] | None = None,
        keep: Sequence[Aggregate] = (),
        first: int | None = None,
        members_max: int = MEMBERS_MAX,
        version: int = 1,
    ) -> Callable[[GroupFunction[Any, K]], GroupFunction[Any, K]]:
        """A view whose function takes a group of source rows and gives rows: `function(group, rows) -> Iterable[Put]`.

        The function must be pure. It is not called for a group without members: such a group gives nothing.

        Without `keep`, a run reads all members. With it, a run costs the same for a group of ten and one of a million:
        count and sums are kept by deltas, and the smallest and largest members are read from an ordered index.

        Args:
            columns: of one table. A row is a member if at least one of them has a value.
            by: `views.prefix(n)`, or a pure function of the row that returns the group's key; None: no group.
            into: see `each`.
            key: the codec of the group's key. By default, that of the prefix's parts, or of the only table in `into`.
            keep: `views.count()`, `views.sum(column)`, `views.smallest(column, n)`, `views.largest(column, n)`.
            first: the function gets at most so many members, the first ones by their keys; not together with `keep`.
            members_max: without `keep`, the run for a group of more members fails, unless `first` limits them.
            version: raise it when the function, `by` or `keep` has changed: it then runs again for all groups.
            id: see `each`.

        Raises: UsageError.
        """
        source = self._must_read(id, columns)
        outputs = self._must_write(id, into)
        codec = wiring.group_codec(id, source, by, key, outputs)
        wiring.kept(id, columns, keep)
        wiring.must_be_count(id, "members_max", members_max)
        if first is not None:
            wiring.must_be_count(id, "first", first)
            if keep:
                raise UsageError(f"view {id!r} keeps aggregates, so its function reads no members: leave out first=")

        def register(function: GroupFunction[Any, K]) -> GroupFunction[Any, K]:
            wiring.must_be_plain(id, function)
            view = wiring.grouped(id, version, columns, by, codec, outputs, keep, members_max, first, function)
            self._declare(view, columns)
            self._observe_copier(view)
            self._observe(view.changed, view.id, view, run_group)
            return function

        return register

    def join(
        self,
        left: Column[K, Any] | Sequence[Column[K, Any]],
        right: Column[R, Any] | Sequence[Column[R, Any]],
        *,
        id: str,
        on: Callable[[Row[K]], Any] | None = None,
        to: Callable[[Row[R]], Any] | None = None,
        into: Into,
        key: Codec[Any] | None = None,
        how: Literal["inner", "left"] = "inner",
        matches_max: int = MATCHES_MAX,
        version: int = 1,
    ) -> Callable[[JoinFunction[K, R]], JoinFunction[K, R]]:
        """A view whose function takes a left and a right row with the same key: `function(left, right)`.

        The function must be pure. The left row is the owner of the rows that its pairs give. A change of a left row
        costs one run. A change of a right row costs one run for each left row with its key.

        Args:
            left, right: columns of one table each; the tables may be the same.
            on: a pure function of the left row that returns its key; None: it matches nothing. By default, the left
                row's own key.
            to: the same for the right row. By default, the right row's own key.
            into: see `each`.
            key: the codec of the keys. By default, that of the right table's keys; with `to`, it must be given.
            how: "inner", or "left": `function(left, None)` is called for a left row without any match.
            matches_max: the run for a left row with more matches fails.
            id, version: see `each`.

        Raises: UsageError.
        """
        columns, rights = wiring.listed(left), wiring.listed(right)
        self._must_read(id, columns)
        source = self._must_read(id, rights)
        outputs = self._must_write(id, into)
        if not (on is None or callable(on)) or not (to is None or callable(to)):
            raise UsageError(f"view {id!r}: on= and to= take functions of a row, not {on!r} and {to!r}")
        if key is None and to is not None:
            raise UsageError(f"view {id!r}: name the codec of what to= returns with key=")
        if key is not None:
            wiring.must_be_key(id, key)
        if on is None and (source.key if key is None else key).name != columns[0].table.key.name:
            raise UsageError(
                f"view {id!r}: the keys of {columns[0].table!r} are not of the same kind as those of the join: "
                "say with on= which key a left row has"
            )
        if how not in ("inner", "left"):
            raise UsageError(f"view {id!r}: how= is 'inner' or 'left', not {how!r}")
        wiring.must_be_count(id, "matches_max", matches_max)

        def register(function: JoinFunction[K, R]) -> JoinFunction[K, R]:
            wiring.must_be_plain(id, function)
            codec = source.key if key is None else key
            view = wiring.joined(id, version, columns, rights, on, to, codec, how, outputs, matches_max, function)
            self._declare(view, [*columns, *rights])
            self._observe_copier(view)
            self._observe_each(view)
            self._observe(view.again, f"{view.id}: again", view, run_each)
            if (lefts := view.lefts or view.unused) is not None:
                self._observe(lefts.changed, f"{view.id}: keys", view, run_key)
            return function

        return register

    def cogroup(
        self,
        *sides: Column[Any, Any] | Sequence[Column[Any, Any]] | First,
        id: str,
        into: Into,
        key: Codec[Any] | None = None,
        rows_max: int = MATCHES_MAX,
        version: int = 1,
    ) -> Callable[[CoGroupFunction], CoGroupFunction]:
        """A view whose function takes a key and the rows of several tables that have it: `function(key, *found)`.

        For each side, the function gets the row with the key, or None. If the keys of the side's table only *begin*
        with the key, it gets a list of rows, in the order of their keys. All rows are read where they are. It is not
        called for a key for which no side has any rows. The key is the owner of what the function gives; the function
        must be pure.

        Args:
            sides: columns of one table each. `views.first(n, column, ...)`: at most n rows of the list.
            key: the codec of the keys. By default, that of the first side's table.
            rows_max: the run for a key with more rows of a side fails, unless `views.first` limits them.
            into, id, version: see `each`.

        Raises: UsageError.
        """
        read = [side if isinstance(side, First) else wiring.listed(side) for side in sides]
        tables = [self._must_read(id, side.columns if isinstance(side, First) else side) for side in read]
        if len(read) < 2 or len(set(tables)) < len(tables):
            raise UsageError(f"view {id!r}: a cogroup has two or more sides, each of another table")
        outputs = self._must_write(id, into)
        wiring.must_be_count(id, "rows_max", rows_max)
        if key is not None:
            wiring.must_be_key(id, key)

        def register(function: CoGroupFunction) -> CoGroupFunction:
            wiring.must_be_plain(id, function)
            codec = tables[0].key if key is None else key
            view = wiring.cogrouped(id, version, read, codec, outputs, rows_max, function)
            self._declare(view, view.columns)
            for side in view.sides:
                self._observe_teller(side.teller)
            self._observe(view.changed, view.id, view, run_cogroup)
            return function

        return register

    def components(
        self, *links: Column[Any, Any], id: str, into: Column[K, Any], nodes_max: int = NODES_MAX, version: int = 1
    ) -> None:
        """A view of connected components: all nodes that links connect, directly or through others, get one label.

        The label is the smallest of these nodes, in the order of the keys of `into`'s table. A node is in the view for
        as long as it has a link. A link from a node to itself makes it a component of its own, unless it has others.

        A link that is added costs what the part costs whose label changes: the one with the larger label. A link that
        is removed costs about twice what the smaller of the two parts costs that it leaves, or a search for another
        path between its ends, and what the part costs whose label changes. Removals within one component run one after
        another.

        Args:
            links: columns of one table. A row is a link if at least one of them has a value. The keys begin with the
                two nodes.
            into: the column that gets the label, in a table whose rows are the nodes.
            nodes_max: a run that has to read more nodes fails. (A label is two cells of at most 100 000 of a run.)
            id, version: see `each`.

        Raises: UsageError.
        """
        source = self._must_read(id, links)
        if not isinstance(into, Column):
            raise UsageError(f"view {id!r}: into= takes the column of the labels, not {into!r}")
        self._must_write(id, into)
        wiring.must_be_links(id, source, into)
        wiring.must_be_count(id, "nodes_max", nodes_max, "nodes")
        view = wiring.components(id, version, links, into, nodes_max)
        self._declare(view, links)
        self._observe_each(view.copier)

    def cached(
        self, *, id: str, gives: Codec[W], version: int = 1, batch: int = 64, threads: int = 1
    ) -> Callable[[Callable[[list[A]], Sequence[W]]], Cached[A, W]]:
        """A slow function, such as an embedding, whose values the store keeps: `function(arguments) -> values`.

        Call the result with one argument, in the function of a view, and give what it returns as the value of a column.
        The value is computed once for each argument, by whichever run needs it first. Several runs share a call. If a
        call fails, its arguments are tried in smaller lists, so that only the runs of those that fail are repeated.

        The function should be pure. If it is not, all rows still have the same value for one argument. It runs in a
        thread, and must not use the store.

        Args:
            id: as of a view.
            gives: the codec of the values, that of the column which takes them.
            version: raise it, and those of the views that call the function, when the function has changed.
            batch: the largest number of arguments of a call.
            threads: how many calls a process makes at a time; 0: on the loop, for a function that is fast.

        Raises: UsageError.
        """
        self._must_be_id(id)
        if not isinstance(gives, Codec):
            raise UsageError(f"{id}: gives= takes a codec, such as perco.BYTES, not {gives!r}")
        for name, number, least, most in (
            ("version", version, 1, (1 << 32) - 1),
            ("batch", batch, 1, BATCH_MAX),
            ("threads", threads, 0, THREADS_MAX),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
                raise UsageError(f"{id}: {name} is a number from {least} to {most}, not {number!r}")
        name = f"{id}.results"
        if name in self.schema.tables:
            raise UsageError(f"{id!r} needs the table name {name!r}, which the schema has already")

        def register(function: Callable[[list[A]], Sequence[W]]) -> Cached[A, W]:
            if not callable(function) or inspect.iscoroutinefunction(function):
                raise UsageError(f"{id!r} takes a plain function of a list of arguments, not {function!r}")
            table = Table(name, key=BYTES)
            results = table.column("value", gives)
            self.schema.tables[name] = table
            cached = self.cached_functions[id] = Cached(id, version, function, batch, threads, results)
            return cached

        return register

    def sink(
        self,
        *columns: Column[K, Any],
        id: str,
        to: Sink | Callable[[list[Delivered]], object],
        batch: int = 500,
        threads: int = 1,
        version: int = 1,
    ) -> Sinking:
        """Keep the rows of a table up to date outside the store: in a SQLite file, another database, a search index.

        Each change of a row delivers the row, as of the run's snapshot. A delivery may be repeated, and may come after
        a newer one. So a sink takes a row only if its `version` is newer than that of the row it has (V11). Then it
        ends with the newest rows, whatever dies.

        Args:
            columns: of one table, which may be the table of a view. Rows have these.
            to: a function of a list of `views.Delivered`, or an object with such a method `deliver`, like
                `views.SqliteTable`. It returns when the rows are durable. If it raises, the rows are delivered again,
                in smaller lists. It runs in a thread. With a method `rows`, `perco views check` compares the sink.
            batch: the largest number of rows of a delivery.
            threads: how many deliveries a process makes at a time; 0: on the loop, for a function that is fast.
            id, version: see `each`. A new version delivers all rows again.

        Raises: UsageError.
        """
        table = self._must_read(id, columns)
        for name, number, least, most in (("batch", batch, 1, SINK_BATCH_MAX), ("threads", threads, 0, THREADS_MAX)):
            if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
                raise UsageError(f"sink {id!r}: {name} is a number from {least} to {most}, not {number!r}")
        where = must_be_sink(id, to)
        bind = getattr(where, "bind", None)
        if bind is not None:
            bind(table, columns)
        seen = table.hide(f"_sunk {id}", BYTES) if len(columns) > 1 else None
        sinking = self.sinks[id] = Sinking(id, version, table, columns, seen, where, batch, threads)
        for column in columns:
            name = id if len(columns) == 1 else f"{id}: {column.first_name}"

            @self.schema.observe(column, id=name, version=version)
            async def observe(txn: Transaction, change: Change[Any, Any]) -> None:
                await run_sink(sinking, txn, change)

            self.schema.observers[name] = replace(self.schema.observers[name], view=id, writes=frozenset())

        return sinking

    def build(
        self, sources: Mapping[Table[Any], Rows], *, results: batches.Results | None = None
    ) -> dict[Table[Any], dict[Any, dict[Column[Any, Any], Any]]]:
        """The definition itself: the rows of the views, given all rows of the tables that they read (V7).

        Args:
            sources: by table and key, the values by column. Columns that a view writes must not be among them.
            results: values of cached functions; they are called for what is missing here.

        Returns the rows of all tables that views write, in the same form and in the order of their keys: only columns
        that views write, and values as a store would return them.

        Raises: UsageError for a row with two owners, and for sources that are not tables of the schema; whatever the
        functions raise.
        """
        for table, rows in sources.items():
            if self.schema.tables.get(table.name) is not table:
                raise UsageError(f"build: {table!r} is not in the schema of these views")
            for column in frozenset[Column[Any, Any]]().union(*rows.values()):
                if column in self._writers:
                    raise UsageError(
                        f"build: {column!r} is what view {self._writers[column].id!r} gives, and no source"
                    )
        return batches.build(self.declared.values(), sources, results or {})

    def chosen(self, id: str | None) -> list[View]:
        """The view with an id; None: all, in the order of their declaration. Raises: UsageError if there is none."""
        if id is None:
            return list(self.declared.values())
        if id not in self.declared:
            known = ", ".join(map(repr, self.declared)) or "none"
            what = "is a sink, which gives no rows" if id in self.sinks else "is not declared"
            raise UsageError(f"view {id!r} {what}; there are: {known}")
        return [self.declared[id]]

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """For a function that declares several views: if it raises, none of them is declared."""
        mine = (self.declared, self.cached_functions, self.sinks, self._readers, self._writers, self._codes)
        dicts: list[dict[Any, Any]] = [*mine, self.schema.tables, self.schema.observers]
        before = [dict(each) for each in dicts]
        try:
            yield
        except BaseException:
            for each, old in zip(dicts, before, strict=True):
                each.clear()
                each.update(old)
            raise

    def take_up(self, id: str, table: Table[Any]) -> None:
        """Add a table that a view needs to the schema. Raises: UsageError if there is one with its name."""
        if table.name in self.schema.tables:
            raise UsageError(f"view {id!r} needs the table name {table.name!r}, which the schema has already")
        self.schema.tables[table.name] = table

    def fingerprint(self, id: str) -> str:
        """Of a view's declaration, its functions, and what these name (`code.py` says what it covers): 32 hex digits;
        "" if the source of a function cannot be read."""
        if id not in self._codes:
            self._codes[id] = fingerprint(*self.declared[id].made_of)
        return self._codes[id]

    def observers(self, id: str) -> list[str]:
        """The ids of a view's observers."""
        mine = f"view {id!r}"
        return [o.id for o in self.schema.observers.values() if o.code is not None and o.code.of == mine]

    @property
    def sources(self) -> dict[Table[Any], frozenset[Column[Any, Any]]]:
        """The columns that views read and no view writes, by table."""
        out: dict[Table[Any], set[Column[Any, Any]]] = {}
        for column in self._readers.keys() - self._writers.keys():
            out.setdefault(column.table, set()).add(column)
        return {table: frozenset(columns) for table, columns in out.items()}

    # ------------------------------------------------------------ checks

    def _must_read(self, id: str, columns: Sequence[object]) -> Table[Any]:
        self._must_be_id(id)
        if not columns:
            raise UsageError(f"view {id!r} names no columns to read")
        tables = set()
        for column in columns:
            if not isinstance(column, Column):
                raise UsageError(f"view {id!r} reads columns, as made by Table.column, not {column!r}")
            tables.add(column.table)
        if len(tables) != 1:
            names = ", ".join(sorted(table.name for table in tables))
            raise UsageError(f"view {id!r} reads columns of one table, not of {names}")
        (table,) = tables
        if self.schema.tables.get(table.name) is not table:
            raise UsageError(f"view {id!r}: table {table.name!r} is not in this schema")
        return table

    def _must_be_id(self, id: str) -> None:
        wiring.must_be_id(id)
        if id in self.declared or id in self.cached_functions or id in self.sinks:
            raise UsageError(f"there are two views, cached functions or sinks with the id {id!r}")

    def _must_write(self, id: str, into: Into) -> dict[Table[Any], frozenset[Column[Any, Any]]]:
        found: dict[Table[Any], set[Column[Any, Any]]] = {}
        for each in into if isinstance(into, list | tuple) else [into]:
            if isinstance(each, Table):
                found.setdefault(each, set()).update(each.columns.values())
            elif isinstance(each, Column):
                found.setdefault(each.table, set()).add(each)
            else:
                raise UsageError(f"view {id!r}: into= takes tables and columns, not {each!r}")
        for table in found:
            if self.schema.tables.get(table.name) is not table:
                raise UsageError(f"view {id!r}: table {table.name!r} is not in this schema")
        if not any(found.values()):
            raise UsageError(f"view {id!r}: into= names no column")
        outputs = {table: frozenset(columns) for table, columns in found.items()}
        self._must_be_free(id, outputs)
        return outputs

    def _must_be_free(self, id: str, outputs: Mapping[Table[Any], Iterable[Column[Any, Any]]]) -> None:
        for columns in outputs.values():
            for column in columns:
                if column in self._writers:
                    raise UsageError(f"views {self._writers[column].id!r} and {id!r} both write {column!r}")
                if column in self._readers:
                    raise UsageError(
                        f"view {id!r} writes {column!r}, which view {self._readers[column]!r} reads: declare {id!r} "
                        "first; views cannot form a cycle"
                    )

    def _declare(self, view: View, columns: Iterable[Column[Any, Any]]) -> None:
        """Take a view up, with the tables of its own. Nothing is taken up if an error is raised."""
        own = wiring.own_tables(view)
        if view.id in self.declared:
            raise UsageError(f"there are two views with the id {view.id!r}")
        for column in columns:
            if column in view.outputs.get(column.table, ()):
                raise UsageError(f"view {view.id!r} reads {column!r} and writes it; views cannot form a cycle")
        self._must_be_free(view.id, view.outputs)
        for table in own:
            if table.name in self.schema.tables:
                raise UsageError(f"view {view.id!r} needs the table name {table.name!r}, which the schema has already")
        for table in own:
            self.schema.tables[table.name] = table
        view.writers = self._writers
        for column in columns:
            self._readers.setdefault(column, view.id)
        for written in view.outputs.values():
            for column in written:
                self._writers[column] = view
        self.declared[view.id] = view

    # ------------------------------------------------------------ observers

    def _observe_each(self, view: Each | Joined) -> None:
        for column in view.columns:
            self._observe(column, f"{view.id}: {column.first_name}", view, run_each)

    def _observe_copier(self, view: Grouped | Joined) -> None:
        copier = view.copier
        if isinstance(copier, Each):
            self._observe_each(copier)
        else:
            self._observe_teller(copier)

    def _observe_teller(self, teller: Teller) -> None:
        for column in teller.columns:
            id = teller.observer(column)
            self._observe(column, id, teller, run_teller)
            self.schema.observers[id] = replace(self.schema.observers[id], told=True)
        writers = {w.id: w for column in teller.columns if (w := self._writers.get(column)) is not None}
        for writer in writers.values():
            writer.tellers.setdefault(teller.rows.source, []).append(teller)

    def _observe(
        self,
        on: Column[Any, Any] | Signal[Any],
        id: str,
        view: V,
        run: Callable[[V, Transaction, Any], Awaitable[None]],
    ) -> None:
        async def observe(txn: Transaction, change: Change[Any, Any]) -> None:
            await run(view, txn, change)

        self.schema.observe(on, id=id, version=view.version, batch=self._batch)(observe)
        tells = view.tells if isinstance(view, Each | Teller) else None
        owner: Any = view if tells is None else tells
        code = Code(f"view {owner.id!r}", partial(self.fingerprint, owner.id))
        writes = wiring.written(owner)
        self.schema.observers[id] = replace(self.schema.observers[id], code=code, view=owner.id, writes=writes)
