"""Tables, columns and observers, declared once in Python.

    docs     = perco.Table("docs", key=perco.TEXT)
    contents = docs.column("contents", perco.BYTES, group="raw")    # in a locality group of its own
    rank     = docs.column("rank", perco.FLOAT64)
    grown    = docs.signal("grown")                                 # cannot be written, only raised
    schema   = perco.Schema(docs)

    @schema.observe(contents, id="parse")
    async def parse(txn, change): ...

A declaration is a plain value: it may be used with many stores. A store keeps its own record of the declaration, with
each column's number and observers, in the catalogue (`catalogue.py`). The two are compared when the store is opened
(N10).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, get_args, overload
from urllib.parse import quote

from perco.errors import SchemaMismatch, TooLarge, UsageError
from perco.protocol.reads import Isolation, is_serializable
from perco.protocol.retention import Keep
from perco.schema import converting, schedules
from perco.schema.codecs import BYTES, MSGPACK, TEXT, TIMESTAMP, Codec, encoded
from perco.schema.manner import Limits, Manner, limits_of, manner_of
from perco.schema.names import HasNames, Named, Tables, earlier_names, must_be_name
from perco.schema.schedules import Due, Missed, Schedule, Times
from perco.schema.stated import must_be_codec, must_convert, must_keep, must_observe
from perco.storage import ROW_BYTES_MAX

K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W")
T = TypeVar("T")

_QUOTED_MAX = 240  # the name of a tablet's folder is the table's quoted name and a number


def _must_declare(id: str, column: object, version: object, backfill: object) -> None:
    if not isinstance(column, Column | Signal):
        raise UsageError(f"observer {id!r} takes a column or a signal, as made by Table.column, not {column!r}")
    must_be_name("observer", id)
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= _VERSION_MAX:
        raise UsageError(f"observer {id!r}: version is {version!r}; it is an int of at least 1, and only goes up")
    if not isinstance(backfill, bool):
        raise UsageError(f"observer {id!r}: backfill is True or False, not {backfill!r}")


def _named_cell(id: str, written: object) -> tuple[str, str]:
    if not isinstance(written, Column | Signal):
        raise UsageError(f"observer {id!r}: writes= takes a list of columns and signals, not {written!r}")
    return written.table.name, written.name


class Column(HasNames, Generic[K, V]):
    """A column of a table: typed by the table's key and its own codec. Made by `Table.column`."""

    table: Table[K]
    name: str
    codec: Codec[V]
    group: str | None
    was: tuple[str, ...]

    __slots__ = ("codec", "group", "name", "table", "was")

    def __init__(
        self, table: Table[K], name: str, codec: Codec[V], group: str | None, was: tuple[str, ...] = ()
    ) -> None:
        self.table, self.name, self.codec, self.group, self.was = table, name, codec, group, was

    def __repr__(self) -> str:
        return f"{self.table.title}.{self.name}"

    if not TYPE_CHECKING:

        def __iter__(self) -> None:
            raise UsageError(f"columns are given as a list: [{self!r}], not {self!r}")


class Signal(HasNames, Generic[K]):
    """A column that cannot be written, only raised: `txn.signal(grown, key)`. Made by `Table.signal`.

    It has no value and no versions, so raising it never conflicts (N5).
    """

    table: Table[K]
    name: str
    was: tuple[str, ...]

    __slots__ = ("name", "table", "was")

    def __init__(self, table: Table[K], name: str, was: tuple[str, ...] = ()) -> None:
        self.table, self.name, self.was = table, name, was

    def __repr__(self) -> str:
        return f"{self.table.title}.{self.name}"


class Table(Generic[K]):
    """A table: rows in the byte order of their keys.

    Args:
        name: at most 64 characters.
        was: the name, or the names, the oldest first, that the table had before (N18). The store keeps it under the
            oldest one. Programs that still declare an earlier name go on using the same table.
        key: an ordered codec: BYTES, TEXT, INT64, DATE, TIMESTAMP, DECIMAL(...), Tuple(...).
        splits: keys at which the table is divided into tablets when it is made; each tablet has a writer of its own.
        keep: how long its old versions are kept; None: as last declared or, if never declared, as the schema says.
        changes: keep a log of its changes, for `db.changes` (E1). This is decided when the table is made.

    Attributes:
        name: the oldest of its names, by which the store knows it.
        title: the newest of its names.
    """

    name: str
    title: str
    was: tuple[str, ...]
    splits: tuple[bytes, ...]
    keep: Keep | None
    changes: bool

    @overload
    def __init__(
        self: Table[bytes],
        name: str,
        *,
        splits: Sequence[bytes] = (),
        keep: Keep | None = None,
        changes: bool = False,
        was: str | Sequence[str] = (),
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        *,
        key: Codec[K],
        splits: Sequence[K] = (),
        keep: Keep | None = None,
        changes: bool = False,
        was: str | Sequence[str] = (),
    ) -> None: ...
    def __init__(
        self,
        name: str,
        *,
        key: Codec[Any] = BYTES,
        splits: Sequence[Any] = (),
        keep: Keep | None = None,
        changes: bool = False,
        was: str | Sequence[str] = (),
    ) -> None:
        self.title = must_be_name("table", name)
        self.was = earlier_names(f"table {name!r}", name, was)
        self.name = self.was[0] if self.was else name
        if len(quote(self.name, safe="")) > _QUOTED_MAX:
            raise UsageError(f"table {name!r}: its name is too long for a folder name once it is percent-encoded")
        must_be_codec(f"the key of table {name!r}", key)
        if not key.ordered:
            raise UsageError(f"table {name!r}: {key.name} does not keep order and cannot be a key")
        self.key: Codec[K] = key
        self.columns: dict[str, Column[K, Any]] = Named(f"column of table {name!r} named")
        self.signals: dict[str, Signal[K]] = Named(f"signal of table {name!r} named")
        self.hidden: dict[str, Column[K, Any]] = {}  # perco's own columns: read only on request
        if isinstance(splits, str | bytes):
            raise UsageError(f"table {name!r}: splits= takes a list of keys, such as [{splits!r}], not {splits!r}")
        self.splits = tuple(sorted({self.row(split) for split in splits} - {b""}))
        self.keep = must_keep(f"table {name!r}", keep)
        if not isinstance(changes, bool):
            raise UsageError(f"table {name!r} takes changes=True or changes=False, not {changes!r}")
        self.changes = changes

    def column(
        self, name: str, codec: Codec[V], *, group: str | None = None, was: str | Sequence[str] = ()
    ) -> Column[K, V]:
        """Declare a column.

        Args:
            group: a locality group of their own for its long values.
            was: the name, or the names, the oldest first, that the column had before: if the store has it under one
                of them, it is renamed (N18). Programs that still declare an earlier name go on using the same column.

        Raises: UsageError for a name that is already in use.
        """
        must_be_name("column", name)
        must_be_codec(f"column {name!r} of table {self.name!r}", codec)
        before = self._must_be_new(name, was)
        if group is not None:
            must_be_name("group", group)
        column: Column[K, V] = Column(self, name, codec, group, before)
        self.columns[name] = column
        return column

    def hide(self, name: str, codec: Codec[V]) -> Column[K, V]:
        """Declare a column of perco's own, once; its name begins with "_", and scans return it only on request."""
        assert name.startswith("_"), "names of others do not"
        return self.hidden.get(name) or self.hidden.setdefault(name, Column(self, name, codec, None))

    def signal(self, name: str, *, was: str | Sequence[str] = ()) -> Signal[K]:
        """Declare a signal: a column that cannot be written, only raised (N5).

        Its observers run some time after the transaction that raised it has committed, at least once; many signals of
        one row may collapse into one run. Transactions that raise the same signal never conflict over it. So instead of
        writing one hot cell in many transactions, raise a signal in each of them, and let the signal's observer write
        the cell.

        Args:
            was: its earlier names, as for a column.

        Raises: UsageError for a name that is already in use.
        """
        must_be_name("signal", name)
        signal: Signal[K] = Signal(self, name, self._must_be_new(name, was))
        self.signals[name] = signal
        return signal

    def _must_be_new(self, name: str, was: str | Sequence[str]) -> tuple[str, ...]:
        """The column's earlier names. Raises: UsageError if one of its names is another column's, too."""
        before = earlier_names(f"column {name!r} of table {self.name!r}", name, was)
        columns: list[Column[Any, Any] | Signal[Any]] = [*self.columns.values(), *self.signals.values()]
        for column in columns:
            if column.name == name:
                raise UsageError(f"table {self.name!r} has two columns named {name!r}")
            if both := {name, *before} & {column.name, *column.was}:
                raise UsageError(
                    f"table {self.name!r}: {min(both)!r} is a name of column {column.name!r} and, earlier or now, of "
                    f"column {name!r}"
                )
        return before

    def row(self, key: K) -> bytes:
        """The key in stored form.

        Raises: TooLarge over 400 bytes; TypeError or ValueError for a key that the codec does not accept.
        """
        row = encoded(self.key, key, self, "key of ")
        if len(row) > ROW_BYTES_MAX:
            what, remedy = f"key of table {self.name!r}", "Use a digest of it as the key."
            raise TooLarge(what, len(row), ROW_BYTES_MAX, remedy, "bytes")
        return row

    def __repr__(self) -> str:
        return f"Table({self.title!r})"


@dataclass(frozen=True, slots=True)
class Change(Generic[K, V]):
    """The change that an observer runs for.

    Attributes:
        key: the key of the changed row.
        value: the newest value as of the run's start; None if it was deleted, and for a signal. Many writes may
            collapse into one run (N4).
        commit_ts: of the newest write, or of the transaction that raised the signal last.
        attempt: 1 for the first run for this change, then 2 ... after conflicts and failures.
        cause: the commit timestamp of the transaction that began the chain (N9); no observer's run begins a chain.
        depth: the observer's place in the chain: 1 if that transaction made the change.
    """

    key: K
    value: V | None
    commit_ts: int
    attempt: int
    cause: int
    depth: int = 1


_VERSION_MAX: Final = (1 << 32) - 1  # it is stored in every ack

DueFunction = Callable[[Any, Due], Awaitable[None]]  # Any: a perco.Transaction
ObserverFunction = Callable[[Any, "Change[K, V]"], Awaitable[None]]  # Any: a perco.Transaction


@dataclass(frozen=True, slots=True)
class Code:
    """The code behind an observer, if perco is to warn of a change of it without a new version.

    Attributes:
        of: its name in that message, such as "view 'totals'".
        fingerprint: returns its fingerprint; "": unknown.
    """

    of: str
    fingerprint: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Observer:
    """A registered observer. The store records `id`: you may rename the function, but never change the id.

    Attributes:
        was: its earlier ids (N18).
        told: a transaction that makes a change may do the observer's work, and not notify it (V12).
        view: the id of the view, or of the sink, that it keeps; "": it is written by hand.
        writes: (table, column) of all columns and signals that others may observe and that its runs may write; None:
            any (V14).
    """

    id: str
    column: Column[Any, Any] | Signal[Any]
    function: Callable[[Any, Change[Any, Any]], Awaitable[None]]
    backfill: bool
    isolation: Isolation | None
    version: int = 1
    manner: Manner = Manner()
    code: Code | None = None
    told: bool = False
    view: str = ""
    writes: frozenset[tuple[str, str]] | None = None
    limits: Limits = Limits()
    was: tuple[str, ...] = ()


class Schema:
    """The tables and observers that a program uses.

    Args:
        keep: how long old versions are kept in tables without a `keep` of their own; None: as last declared, initially
            one day.
    """

    keep: Keep | None

    def __init__(self, *tables: Table[Any], keep: Keep | None = None) -> None:
        self.keep = must_keep("a schema", keep)
        self.tables: dict[str, Table[Any]] = Tables("table")
        for table in tables:
            if not isinstance(table, Table):
                raise UsageError(f"perco.Schema takes tables, each as an argument, not {type(table).__name__}")
            for other in self.tables.values():
                if both := {table.title, *table.was} & {other.title, *other.was}:
                    of = "two tables" if table.title == other.title else f"tables {other.title!r} and {table.title!r}"
                    raise UsageError(f"the schema has {of}, both of which are, or were, named {min(both)!r}")
            self.tables[table.title] = table
        self.observers: dict[str, Observer] = {}
        self.schedules: dict[str, Schedule] = {}
        self._conversions: dict[Column[Any, Any], Column[Any, Any]] = {}  # by target, its source

    def must_suit(self, *, logs: bool) -> None:
        """Raise UsageError if a table is to keep a log of its changes, and the store keeps no `logs` (E1)."""
        for table in self.tables.values():
            if table.changes and not logs:
                raise UsageError(
                    f"table {table.name!r}: changes=True needs a store in a folder or in memory; this store keeps no "
                    "logs of changes"
                )

    @overload
    def observe(
        self,
        column: Column[K, V],
        *,
        id: str,
        version: int = 1,
        backfill: bool = True,
        delay_s: float = 0.0,
        max_delay_s: float | None = None,
        priority: int = 0,
        isolation: Isolation | None = None,
        writes: Iterable[Column[Any, Any] | Signal[Any]] | None = None,
        concurrency: int | None = None,
        attempts: int | None = None,
        timeout_s: float | None = None,
        rate: float | None = None,
        backoff_s: tuple[float, float] | None = None,
        batch: int = 1,
        was: str | Sequence[str] = (),
    ) -> Callable[[ObserverFunction[K, V]], ObserverFunction[K, V]]: ...
    @overload
    def observe(
        self,
        column: Signal[K],
        *,
        id: str,
        version: int = 1,
        backfill: bool = True,
        delay_s: float = 0.0,
        max_delay_s: float | None = None,
        priority: int = 0,
        isolation: Isolation | None = None,
        writes: Iterable[Column[Any, Any] | Signal[Any]] | None = None,
        concurrency: int | None = None,
        attempts: int | None = None,
        timeout_s: float | None = None,
        rate: float | None = None,
        backoff_s: tuple[float, float] | None = None,
        batch: int = 1,
        was: str | Sequence[str] = (),
    ) -> Callable[[ObserverFunction[K, None]], ObserverFunction[K, None]]: ...
    def observe(
        self,
        column: Column[Any, Any] | Signal[Any],
        *,
        id: str,
        version: int = 1,
        backfill: bool = True,
        delay_s: float = 0.0,
        max_delay_s: float | None = None,
        priority: int = 0,
        isolation: Isolation | None = None,
        writes: Iterable[Column[Any, Any] | Signal[Any]] | None = None,
        concurrency: int | None = None,
        attempts: int | None = None,
        timeout_s: float | None = None,
        rate: float | None = None,
        backoff_s: tuple[float, float] | None = None,
        batch: int = 1,
        was: str | Sequence[str] = (),
    ) -> Callable[[Any], Any]:
        """Run a function, in a transaction, after each change of a column, or each signal.

        Several observers may observe one column; deletes count as changes; changes may collapse (N4). The store records
        `id`. For a change of a column, at most one run commits (N3); for a signal, at least one (N5).

        Args:
            version: from 1. Raise it when the function has changed and must run again for changes that it has already
                handled.
            backfill: when the observer, or a higher version of it, is registered, run it also for the existing data; a
                signal never has any.
            delay_s: seconds; a run begins no earlier than this long after the change, and a newer change restarts the
                wait.
            max_delay_s: the longest such wait, for a row that keeps changing; by default ten times `delay_s`.
            priority: if more changes wait than can run at once, those of a higher priority come first; those of lower
                priorities still get a share.
            isolation: of its transactions, "snapshot" or "serializable" (T14); by default as in `TransactionOptions`.
            writes: the columns that its runs write, and the signals that they raise; a run that writes another one
                fails. Waits for views leave out observers on which none of these views depends (V14).
            concurrency: at most so many of its runs are in flight in a worker at a time.
            attempts: how many of its runs may fail for a change before the change is moved to the failed list; 0: any
                number; by default as in `WorkerOptions`.
            timeout_s: seconds; a run that takes longer is cancelled, and has failed. A `perco.sync.observer` cannot be
                stopped: its run fails when the function returns.
            rate: at most so many of its runs begin per second, in all workers together (N15).
            backoff_s: the first and the longest pause after a failed run, in seconds; each pause is twice as long as
                the one before. By default as in `BackoffOptions`.
            batch: the most changes, or signals, that may share a transaction, if they wait at the same time (N20). The
                function is still called once for each of them, one after the other, with the same transaction.
            was: the id, or the ids, that the observer had before: it is renamed, and keeps what waits for it (N18).

        The function may raise `perco.Retry`, to be run later, and `perco.GiveUp`.
        """
        if isolation is not None:
            is_serializable(isolation)
        _must_declare(id, column, version, backfill)
        manner = manner_of(id, delay_s, max_delay_s, priority)
        before = self._must_be_new(id, was)
        if self.tables.get(column.table.name) is not column.table:
            raise SchemaMismatch(f"observer {id!r}: table {column.table.name!r} is not in this schema")

        limits = limits_of(id, concurrency, attempts, timeout_s, rate, backoff_s, batch)
        written = None if writes is None else frozenset(_named_cell(id, each) for each in writes)

        def register(function: ObserverFunction[Any, Any]) -> ObserverFunction[Any, Any]:
            must_observe(id, function)
            first = (id, column, function, backfill, isolation, version, manner)
            self.observers[id] = Observer(*first, writes=written, limits=limits, was=before)
            return function

        return register

    def convert(
        self, source: Column[K, V], target: Column[K, W], *, id: str, version: int = 1, attempts: int | None = None
    ) -> Callable[[Callable[[V], W | None]], Callable[[V], W | None]]:
        """Fill a column with the converted values of another one of the same table: the existing ones, in the
        background, and each change from then on. `@schema.convert(cents, euros, id="euros")` above a plain function of
        a value.

        It registers an observer, which workers run, with this id and version: it counts in `waiting` and `lag`, and can
        be paused and dropped. A change of the target by a program stays, if it is newer than the source's (N19).
        docs/evolving.md says how to change a column's codec with it.

        Args:
            version: raise it when the function, or the target, has changed: all values are converted again.
            attempts: as for `observe`. The function may raise `perco.GiveUp` for a value that it can never convert.

        Raises: UsageError for columns of different tables.
        """
        if not isinstance(source, Column) or not isinstance(target, Column) or source.table is not target.table:
            raise UsageError(f"conversion {id!r} takes two columns of one table, not {source!r} and {target!r}")
        if target in self._conversions:
            raise UsageError(f"conversion {id!r}: {target!r} is filled from {self._conversions[target]!r} already")
        at: Column[Any, Any] | None = source
        while at is not None:
            if at is target:
                raise UsageError(f"conversion {id!r} would convert {target!r} from itself, over and over")
            at = self._conversions.get(at)
        self._conversions[target] = source
        mark = target.table.hide(converting.mark_of(target.first_name), MSGPACK)

        def register(function: Callable[[V], W | None]) -> Callable[[V], W | None]:
            run = converting.observer(target, mark, version, must_convert(id, function))
            self.observe(source, id=id, version=version, writes=[target, mark], attempts=attempts)(run)
            return function

        return register

    def _must_be_new(self, id: str, was: str | Sequence[str]) -> tuple[str, ...]:
        """The earlier ids of a new observer. Raises: UsageError if one of its ids is another observer's, too."""
        before = earlier_names(f"observer {id!r}", id, was)
        if id in self.observers:
            raise UsageError(f"there are two observers with the id {id!r}")
        for other in self.observers.values():
            if both := {id, *before} & {other.id, *other.was}:
                raise UsageError(f"{min(both)!r} is an id of observer {other.id!r} and, earlier or now, of {id!r}")
        return before

    def every(
        self,
        *,
        id: str,
        seconds: float = 0,
        minutes: float = 0,
        hours: float = 0,
        days: float = 0,
        missed: Missed = "last",
        version: int = 1,
        attempts: int | None = None,
        timeout_s: float | None = None,
    ) -> Callable[[DueFunction], DueFunction]:
        """Run a function, in a transaction, once in every period: `async def function(txn, due)`, with a `perco.Due`.

        Workers run it, as an observer with this id. It is due at multiples of the period since 1970, in UTC; at the
        first such moment after a worker has seen it first. For each moment, at most one run commits, whatever dies
        (N3).

        Args:
            seconds, minutes, hours, days: their sum is the period, from a second to 366 days.
            missed: if no worker ran for a while, or a run took longer than the period, run it for the "last" moment
                only, or for "all" of them, one after the other.
            version, attempts, timeout_s: as for `observe`.
        """
        times = schedules.every(id, seconds=seconds, minutes=minutes, hours=hours, days=days)
        return self._schedule(id, times, missed, version, attempts, timeout_s)

    def cron(
        self,
        expression: str,
        *,
        id: str,
        zone: str = "UTC",
        missed: Missed = "last",
        version: int = 1,
        attempts: int | None = None,
        timeout_s: float | None = None,
    ) -> Callable[[DueFunction], DueFunction]:
        """Like `every`, but for the moments of a cron expression, such as "30 3 * * MON-FRI".

        Needs the extra `schedule`.

        Args:
            zone: a time zone's name, such as "Europe/Berlin".
        """
        return self._schedule(id, schedules.cron(id, expression, zone), missed, version, attempts, timeout_s)

    def _schedule(
        self, id: str, times: Times, missed: Missed, version: int, attempts: int | None, timeout_s: float | None
    ) -> Callable[[DueFunction], DueFunction]:
        must_be_name("schedule", id)
        if missed not in get_args(Missed):
            raise UsageError(f"schedule {id!r}: missed is {missed!r}; it is 'last' or 'all'")
        table = self.tables.get(schedules.TABLE) or Table(schedules.TABLE, key=TEXT)
        if schedules.HANDLED not in table.hidden and schedules.TABLE in self.tables:
            raise UsageError(f"schedules need the table name {schedules.TABLE!r}, which this schema uses for another")
        if id in self.observers:
            raise UsageError(f"there are two observers with the id {id!r}")
        handled = table.hide(schedules.HANDLED, TIMESTAMP)
        self.tables[schedules.TABLE] = table
        column = table.column(id, TIMESTAMP)
        observe = self.observe(column, id=id, version=version, backfill=False, attempts=attempts, timeout_s=timeout_s)

        def register(function: DueFunction) -> DueFunction:
            must_observe(id, function)

            async def run(txn: Any, change: Change[str, datetime]) -> None:
                if change.value is None:
                    return  # it was deleted
                txn.set(handled, change.key, change.value)  # first, because the function may commit
                await function(txn, Due(id, change.value.astimezone(times.zone), change.attempt))

            if hasattr(function, "perco_needs"):
                run.perco_needs = function.perco_needs  # type: ignore[attr-defined]
            observe(run)
            self.schedules[id] = Schedule(id, column, handled, times, missed)
            return function

        return register


def must_be_table(table: Table[K]) -> Table[K]:
    """Returns the table. Raises: UsageError for anything else, such as a table's name."""
    if not isinstance(table, Table):
        raise UsageError(f"expected a perco.Table, not {table!r}; db.schema.tables has them by name")
    return table
