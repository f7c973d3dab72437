"""Random graphs of views, random changes of their sources, and the comparison of what is stored with the batch build.

    graph = Graph(7)                                     the same for the same seed
    async with perco.open("store", graph.views.schema) as db, db.worker():
        ...                                              write `graph.changes(rng, state)`, and let nothing wait
        async with db.snapshot() as snap:
            assert not await graph.differences(snap)     V7

A higher `version` of a graph declares some of its views in a new version, which compute something else. A graph
`without` some views declares the others, as a program does before these are dropped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final, TypeVar

from perco import views
from perco.schema.codecs import FLOAT64, INT64, TEXT, Tuple
from perco.schema.schema import Column, Schema, Table
from perco.txn.row import Row
from perco.txn.snapshot import Snapshot
from perco.views import Views

KEY: Final = Tuple(TEXT, TEXT)
WORDS: Final = ("", "a", "b", "ab", "bca", "cc")
FLOATS: Final = (0.0, -0.0, 0.1, -2.5, 1e300, -1e300, 5e-324, 3.3, float("inf"))
_CHANGED: Final = 0.6  # the share of views that a higher version of the graph changes

Values = dict[Column[Any, Any], Any]
State = dict[Table[Any], dict[Any, Values]]
T = TypeVar("T")


class Shape:
    """A table of the shape that all tables of a graph have. `split`: it begins with two tablets."""

    table: Table[tuple[str, str]]
    n: Column[tuple[str, str], int]
    x: Column[tuple[str, str], float]
    s: Column[tuple[str, str], str]

    def __init__(self, name: str, *, split: bool = False) -> None:
        self.table = Table(name, key=KEY, splits=[("b", "")] if split else [])
        self.n = self.table.column("n", INT64)
        self.x = self.table.column("x", FLOAT64)
        self.s = self.table.column("s", TEXT)


class Graph:
    """Two source tables, and some views over them and over each other.

    Args:
        seed: the same seed gives the same graph.
        schema: to which the tables and views are added; None: a schema of their own.
        most: of the views that are not components or cogroups, at most so many.
        version: of the graph; each higher one changes some of the views, and raises their versions.
        without: ids of views that are not declared.
        split: the tables begin with two tablets each.

    Attributes:
        sources: the tables that no view writes.
        derived: the tables that views write, by the ids of the views, also those that are not declared.
        made, kinds: which views there are, in words.
    """

    sources: list[Shape]
    derived: dict[str, Table[Any]]
    made: list[str]
    kinds: set[str]
    version: int
    views: Views

    def __init__(
        self,
        seed: int,
        *,
        schema: Schema | None = None,
        most: int = 5,
        version: int = 1,
        without: Collection[str] = (),
        split: bool = False,
    ) -> None:
        self._seed, self.version, self._without = seed, version, frozenset(without)
        rng = random.Random(seed)
        self.sources = [Shape("left", split=split), Shape("right", split=split)]
        shapes = [Shape(f"t{number}", split=split) for number in range(rng.randrange(1, most + 1))]
        batch = random.Random(f"{seed} batch").choice([1, 3, 16])
        self.views = views.Views(Schema() if schema is None else schema, batch=batch)
        for shape in (*self.sources, *shapes):
            self.views.take_up("the graph", shape.table)
        self.derived = {}
        self.made = []
        self.kinds = set()
        self._cached = random.Random(f"{seed} cached")
        self._more = random.Random(f"{seed} more")

        @self.views.cached(id="shout", gives=TEXT, batch=self._cached.randrange(1, 4), threads=0)
        def shout(words: list[str]) -> list[str]:
            return [f"{word}!" for word in words]

        self._shout = shout
        parts = random.Random(f"{seed} parts")
        for shape in shapes:
            earlier = [*self.sources, *shapes[: shapes.index(shape)]]
            # The newest table is read more often: chains grow long.
            source = earlier[-1] if rng.random() < 0.6 else rng.choice(earlier)
            kind = rng.random()
            if kind < 0.35:
                self._each(rng, source, shape)
            elif kind < 0.75:
                self._group(rng, source, shape)
            else:
                self._join(rng, source, rng.choice(earlier), shape)
        if parts.random() < 0.5:
            self._components(parts, parts.choice([*self.sources, *shapes]))
        if parts.random() < 0.6:
            self._cogroup(parts, parts.sample([*self.sources, *shapes], 2 if len(shapes) == 1 else 3))
        self.fingerprint()

    # ------------------------------------------------------------ versions

    def version_of(self, id: str) -> int:
        """The version of a view in this version of the graph."""
        return 1 + len(self._changes_of(id))

    def fingerprint(self) -> None:
        """Give the views fingerprints that say what they are. Those of their functions would cover all of perco, in
        which the functions are: it takes seconds to compute them, and a run would depend on all that code."""
        for id in self.views.declared:
            of = f"{self._seed} {id} {self.version_of(id)}".encode()
            self.views._codes[id] = blake2b(of, digest_size=16).hexdigest()

    def _changes_of(self, id: str) -> list[int]:
        """The versions of the graph that have changed a view."""
        later = range(2, self.version + 1)
        return [each for each in later if random.Random(f"{self._seed} {id} changed {each}").random() < _CHANGED]

    def _drawn(
        self, id: str, rngs: Iterable[random.Random], draw: Callable[..., tuple[list[Any], T]]
    ) -> tuple[list[Any], T, int]:
        """The columns that a view reads, what else was drawn for it, and what its present version adds to numbers.

        A new version reads what the earlier ones did, and more: a column that a view reads no more leaves an observer.
        """
        columns, rest = draw(*rngs)
        changes = self._changes_of(id)
        for change in changes:
            more, rest = draw(*[random.Random(f"{self._seed} {id} {number} {change}") for number, _ in enumerate(rngs)])
            columns = [*columns, *(column for column in more if column not in columns)]
        return columns, rest, len(changes)

    def _declares(self, id: str, into: Table[Any]) -> bool:
        self.derived[id] = into
        return id not in self._without

    # ------------------------------------------------------------ the views

    def _each(self, rng: random.Random, source: Shape, into: Shape) -> None:
        def draw(rng: random.Random, cached: random.Random) -> tuple[list[Any], tuple[bool, int, bool]]:
            columns: list[Any] = rng.choice(
                [[source.s], [source.n], [source.s, source.n], [source.n, source.x, source.s]]
            )
            return columns, (rng.random() < 0.5, rng.choice([1, 2, 3]), cached.random() < 0.5)

        id = f"each {into.table.name}"
        columns, (fan_out, modulus, slow), newer = self._drawn(id, (rng, self._cached), draw)
        self._note("fan out" if fan_out else "each", source, columns)
        if not self._declares(id, into.table):
            return

        @self.views.each(*columns, id=id, into=into.table, version=self.version_of(id))
        def each(row: Row[Any]) -> Iterator[views.Put[Any]]:
            found = {column.name: row[column] for column in columns}
            n, s = found.get("n") or 0, found.get("s") or ""
            owner = "/".join(row.key)
            if n % modulus:
                return
            for part in sorted(set(s)) if fan_out else [s]:
                value: Any = self._shout(part) if slow and part else part or None
                into_row: Values = {into.n: n + len(s) + newer, into.x: found.get("x"), into.s: value}
                yield views.Put(into.table, (part, owner), into_row)

    def _group(self, rng: random.Random, source: Shape, into: Shape) -> None:
        def draw(rng: random.Random, more: random.Random) -> tuple[list[Any], tuple[bool, bool, int | None]]:
            columns: list[Any] = rng.choice([[source.n], [source.n, source.s], [source.n, source.x, source.s]])
            return columns, (rng.random() < 0.6, rng.random() < 0.5, more.choice([None, 1, 3]))

        id = f"group {into.table.name}"
        columns, (keep, by_prefix, first), newer = self._drawn(id, (rng, self._more), draw)
        how = f"{'kept' if keep else 'first' if first else 'whole'} by {'prefix' if by_prefix else 'value'}"
        self._note(how, source, columns)
        if not self._declares(id, into.table):
            return
        kept: list[Any] = [views.sum(source.n), views.smallest(source.n, 2), views.largest(source.n, 3)]
        if source.x in columns:
            kept += [views.sum(source.x), views.largest(source.x, 2)]

        def by(row: Row[Any]) -> str | None:
            value = row[columns[-1]]
            return None if value is None else str(value)[:1]

        @self.views.group(
            *columns,
            id=id,
            by=views.prefix(1) if by_prefix else by,
            key=None if by_prefix else TEXT,
            into=into.table,
            keep=kept if keep else (),
            first=None if keep else first,
            version=self.version_of(id),
        )
        def group(key: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            members = rows.count() if keep else len(list(rows))
            top = [key for key, _ in (*rows.smallest(source.n, 2), *rows.largest(source.n, 3))]
            x: float | None = None
            if source.x in columns:
                x = rows.sum(source.x) + sum(value for _, value in rows.largest(source.x, 2))
                x = None if x != x else x
            text = "+".join("/".join(each) for each in top)
            values: Values = {into.n: (members * 7 + rows.sum(source.n)) % 1000 + newer, into.s: text[:60], into.x: x}
            yield views.Put(into.table, (text[:1], key), values)

    def _join(self, rng: random.Random, left: Shape, right: Shape, into: Shape) -> None:
        columns: list[Any] = rng.choice([[left.s], [left.n, left.s]])
        rights: list[Any] = rng.choice([[right.s], [right.s, right.n]])
        outer, by_key = rng.random() < 0.5, rng.random() < 0.4
        both = by_key and self._more.random() < 0.5
        id = f"join {into.table.name}"
        newer = self.version_of(id) - 1
        outer ^= newer % 2 == 1
        how = f"join by {'both keys' if both else 'key' if by_key else 'value'}{', left' if outer else ''}"
        self._note(how, left, columns)
        if not self._declares(id, into.table):
            return

        def on(row: Row[Any]) -> Any:
            value = row[left.s]
            if value is None:
                return None
            return (value[:1], "1") if by_key else value[newer : newer + 1]

        def to(row: Row[Any]) -> Any:
            value = row[right.s]
            return None if value is None else value[-1:]

        @self.views.join(
            columns,
            rights,
            id=id,
            on=None if both else on,
            to=None if by_key else to,
            key=None if by_key else TEXT,
            into=into.table,
            how="left" if outer else "inner",
            version=self.version_of(id),
        )
        def join(one: Row[Any], other: Row[Any] | None) -> Iterator[views.Put[Any]]:
            n = (one[left.n] if left.n in columns else None) or 0
            if other is None:
                yield views.Put(into.table, ("alone", "/".join(one.key)), {into.n: n})
                return
            if right.n in rights:
                n += other[right.n] or 0
            key = "/".join(one.key), "/".join(other.key)
            yield views.Put(into.table, key, {into.n: n % 1000 + newer, into.s: (other[right.s] or "")[:3]})

    def _components(self, rng: random.Random, links: Shape) -> None:
        """The parts of a graph whose links are the rows of a table, and how many nodes each has."""
        nodes, sizes = Table("nodes", key=TEXT), Table("sizes", key=TEXT)
        label, size = nodes.column("label", TEXT), sizes.column("size", INT64)
        for table in (nodes, sizes):
            self.views.take_up("parts", table)
        columns: list[Any] = rng.choice([[links.s], [links.n, links.s]])
        self._note("components", links, columns)
        if self._declares("parts", nodes):
            self.views.components(*columns, id="parts", into=label, version=self.version_of("parts"))
        newer = self.version_of("sizes") - 1
        if not self._declares("sizes", sizes):
            return

        @self.views.group(label, id="sizes", by=lambda row: row[label], into=sizes, version=newer + 1)
        def count(part: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            yield views.Put(sizes, part, {size: rows.count() + newer})

    def _cogroup(self, rng: random.Random, sides: list[Shape]) -> None:
        """The rows of several tables with the same key, or the same first part of it."""
        many = rng.random() < 0.6
        table = Table("together", key=KEY)
        n, s = table.column("n", INT64), table.column("s", TEXT)
        self.views.take_up("together", table)
        wanted: list[Any] = [[side.s, side.n] if rng.random() < 0.5 else side.s for side in sides]
        if many and rng.random() < 0.5:
            wanted[0] = views.first(2, sides[0].s)
        for side in sides:
            self._note(f"cogroup of {'many' if many else 'single rows'}", side, [side.s])
        newer = self.version_of("together") - 1
        if not self._declares("together", table):
            return

        @self.views.cogroup(*wanted, id="together", into=table, key=TEXT if many else None, version=newer + 1)
        def together(key: Any, *found: Any) -> Iterator[views.Put[Any]]:
            rows = [(side, row) for side, there in zip(sides, found, strict=True) for row in _listed(there)]
            text = "+".join(f"{side.table.name} {'/'.join(row.key)} {row[side.s]}" for side, row in rows)
            where = (key, "many") if many else key
            yield views.Put(table, where, {n: len(rows) + newer, s: text[:80]})

    def _note(self, kind: str, source: Shape, columns: Iterable[Any]) -> None:
        direct = source not in self.sources
        self.kinds.add(f"{kind} of a {'view' if direct else 'source'}")
        self.made.append(f"{kind} of {source.table.name} {[column.name for column in columns]}")

    # ------------------------------------------------------------ changes

    def changes(self, rng: random.Random, state: State) -> list[tuple[Column[Any, Any], Any, Any]]:
        """The writes of one transaction; `state` is what the sources hold once it has committed."""
        out = []
        for _ in range(rng.randrange(1, 4)):
            shape = rng.choice(self.sources)
            key = rng.choice(WORDS[1:]), str(rng.randrange(4))
            rows = state.setdefault(shape.table, {})
            row = rows.setdefault(key, {})
            if rng.random() < 0.2:
                new: Values = dict.fromkeys((shape.n, shape.x, shape.s))
            else:
                new = {shape.n: rng.choice([None, *range(-3, 12)]), shape.x: rng.choice([None, *FLOATS])}
                new[shape.s] = rng.choice([None, *WORDS])
                new = {column: new[column] for column in new if rng.random() < 0.7}
            for column, value in new.items():
                row[column] = value
                out.append((column, key, value))
        return out

    # ------------------------------------------------------------ the comparison

    async def held(self, snap: Snapshot) -> State:
        """The rows of the sources."""
        found: State = {}
        for table in (shape.table for shape in self.sources):
            async for row in snap.scan(table):
                values = {table.columns[name]: value for name, value in row.values().items()}
                found.setdefault(table, {})[row.key] = values
        return found

    async def differences(self, snap: Snapshot, state: State | None = None) -> list[str]:
        """Which rows are not what the batch build makes of the sources, value for value; nothing may wait (V7). The
        tables of views that are not declared must be empty (V15).

        Args:
            state: what the sources must hold; None: whatever they do hold.
        """
        held = await self.held(snap)
        built = self.views.build(held if state is None else state)
        right = built if state is None else {**built, **state}
        out = []
        for table in (*(shape.table for shape in self.sources if state is not None), *self.derived.values()):
            wanted = {key: shown for key, values in right.get(table, {}).items() if (shown := _shown(values))}
            found = {row.key: _shown(row.values()) async for row in snap.scan(table)}
            for key in sorted(found.keys() | wanted.keys()):
                if found.get(key) != wanted.get(key):
                    out.append(f"V7: {table.name} {key} is {found.get(key)}, not {wanted.get(key)}")
        return out


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [] if found is None else [found]


def _shown(values: Mapping[Any, Any]) -> dict[str, str]:
    """The values that are there, by name, in a form that tells 0.0 from -0.0."""
    return {getattr(column, "name", column): repr(value) for column, value in values.items() if value is not None}
