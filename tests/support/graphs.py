"""Random graphs of views, random changes of their sources, and the comparison of a store with the batch build."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import perco
from perco import views

KEY = perco.Tuple(perco.TEXT, perco.TEXT)
WORDS = ("", "a", "b", "ab", "bca", "cc")
FLOATS = (0.0, -0.0, 0.1, -2.5, 1e300, -1e300, 5e-324, 3.3, float("inf"))

Values = dict[perco.Column[Any, Any], Any]
State = dict[perco.Table[Any], dict[Any, Values]]


class Shape:
    """A table of the shape that all tables of a graph have."""

    def __init__(self, name: str) -> None:
        self.table = perco.Table(name, key=KEY)
        self.n = self.table.column("n", perco.INT64)
        self.x = self.table.column("x", perco.FLOAT64)
        self.s = self.table.column("s", perco.TEXT)


class Graph:
    """Two source tables, and some views over them and over each other; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.sources = [Shape("left"), Shape("right")]
        shapes = [Shape(f"t{number}") for number in range(rng.randrange(1, 6))]
        self.views = views.Views(perco.Schema(*(shape.table for shape in (*self.sources, *shapes))))
        self.made: list[str] = []
        self.kinds: set[str] = set()
        self._cached = random.Random(f"{seed} cached")
        self._more = random.Random(f"{seed} more")

        @self.views.cached(id="shout", gives=perco.TEXT, batch=self._cached.randrange(1, 4), threads=0)
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

    def _each(self, rng: random.Random, source: Shape, into: Shape) -> None:
        columns = rng.choice([[source.s], [source.n], [source.s, source.n], [source.n, source.x, source.s]])
        fan_out, modulus = rng.random() < 0.5, rng.choice([1, 2, 3])
        slow = self._cached.random() < 0.5

        @self.views.each(*columns, id=f"each {into.table.name}", into=into.table)
        def each(row: perco.Row[Any]) -> Iterator[views.Put[Any]]:
            found = {column.name: row[column] for column in columns}
            n, s = found.get("n") or 0, found.get("s") or ""
            owner = "/".join(row.key)
            if n % modulus:
                return
            for part in sorted(set(s)) if fan_out else [s]:
                value: Any = self._shout(part) if slow and part else part or None
                yield views.Put(into.table, (part, owner), {into.n: n + len(s), into.x: found.get("x"), into.s: value})

        self._note(rng, "fan out" if fan_out else "each", source, columns)

    def _group(self, rng: random.Random, source: Shape, into: Shape) -> None:
        columns = rng.choice([[source.n], [source.n, source.s], [source.n, source.x, source.s]])
        keep = rng.random() < 0.6
        by_prefix = rng.random() < 0.5
        first = self._more.choice([None, 1, 3])
        kept: list[Any] = [views.sum(source.n), views.smallest(source.n, 2), views.largest(source.n, 3)]
        if source.x in columns:
            kept += [views.sum(source.x), views.largest(source.x, 2)]

        def by(row: perco.Row[Any]) -> str | None:
            value = row[columns[-1]]
            return None if value is None else str(value)[:1]

        @self.views.group(
            *columns,
            id=f"group {into.table.name}",
            by=views.prefix(1) if by_prefix else by,
            key=None if by_prefix else perco.TEXT,
            into=into.table,
            keep=kept if keep else (),
            first=None if keep else first,
        )
        def group(key: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            members = rows.count() if keep else len(list(rows))
            top = [key for key, _ in (*rows.smallest(source.n, 2), *rows.largest(source.n, 3))]
            x: float | None = None
            if source.x in columns:
                x = rows.sum(source.x) + sum(value for _, value in rows.largest(source.x, 2))
                x = None if x != x else x
            text = "+".join("/".join(each) for each in top)
            values: Values = {into.n: (members * 7 + rows.sum(source.n)) % 1000, into.s: text[:60], into.x: x}
            yield views.Put(into.table, (text[:1], key), values)

        self._note(
            rng,
            f"{'kept' if keep else 'first' if first else 'whole'} by {'prefix' if by_prefix else 'value'}",
            source,
            columns,
        )

    def _join(self, rng: random.Random, left: Shape, right: Shape, into: Shape) -> None:
        columns, rights = rng.choice([[left.s], [left.n, left.s]]), rng.choice([[right.s], [right.s, right.n]])
        outer, by_key = rng.random() < 0.5, rng.random() < 0.4
        both = by_key and self._more.random() < 0.5

        def on(row: perco.Row[Any]) -> Any:
            value = row[left.s]
            if value is None:
                return None
            return (value[:1], "1") if by_key else value[:1]

        def to(row: perco.Row[Any]) -> Any:
            value = row[right.s]
            return None if value is None else value[-1:]

        @self.views.join(
            columns,
            rights,
            id=f"join {into.table.name}",
            on=None if both else on,
            to=None if by_key else to,
            key=None if by_key else perco.TEXT,
            into=into.table,
            how="left" if outer else "inner",
        )
        def join(one: perco.Row[Any], other: perco.Row[Any] | None) -> Iterator[views.Put[Any]]:
            n = (one[left.n] if left.n in columns else None) or 0
            if other is None:
                yield views.Put(into.table, ("alone", "/".join(one.key)), {into.n: n})
                return
            if right.n in rights:
                n += other[right.n] or 0
            key = "/".join(one.key), "/".join(other.key)
            yield views.Put(into.table, key, {into.n: n % 1000, into.s: (other[right.s] or "")[:3]})

        self._note(
            rng,
            f"join by {'both keys' if both else 'key' if by_key else 'value'}{', left' if outer else ''}",
            left,
            columns,
        )

    def _components(self, rng: random.Random, links: Shape) -> None:
        """The parts of a graph whose links are the rows of a table, and how many nodes each has."""
        nodes, sizes = perco.Table("nodes", key=perco.TEXT), perco.Table("sizes", key=perco.TEXT)
        label, size = nodes.column("label", perco.TEXT), sizes.column("size", perco.INT64)
        for table in (nodes, sizes):
            self.views.take_up("parts", table)
        columns = rng.choice([[links.s], [links.n, links.s]])
        self.views.components(*columns, id="parts", into=label)

        @self.views.group(label, id="sizes", by=lambda row: row[label], into=sizes)
        def count(part: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            yield views.Put(sizes, part, {size: rows.count()})

        self._note(rng, "components", links, columns)

    def _cogroup(self, rng: random.Random, sides: list[Shape]) -> None:
        """The rows of several tables with the same key, or the same first part of it."""
        many = rng.random() < 0.6
        table = perco.Table("together", key=KEY)
        n, s = table.column("n", perco.INT64), table.column("s", perco.TEXT)
        self.views.take_up("together", table)
        wanted: list[Any] = [[side.s, side.n] if rng.random() < 0.5 else side.s for side in sides]
        if many and rng.random() < 0.5:
            wanted[0] = views.first(2, sides[0].s)

        @self.views.cogroup(*wanted, id="together", into=table, key=perco.TEXT if many else None)
        def together(key: Any, *found: Any) -> Iterator[views.Put[Any]]:
            rows = [(side, row) for side, there in zip(sides, found, strict=True) for row in _listed(there)]
            text = "+".join(f"{side.table.name} {'/'.join(row.key)} {row[side.s]}" for side, row in rows)
            where = (key, "many") if many else key
            yield views.Put(table, where, {n: len(rows), s: text[:80]})

        for side in sides:
            self._note(rng, f"cogroup of {'many' if many else 'single rows'}", side, [side.s])

    def _note(self, rng: random.Random, kind: str, source: Shape, columns: Iterable[Any]) -> None:
        direct = source not in self.sources
        self.kinds.add(f"{kind} of a {'view' if direct else 'source'}")
        self.made.append(f"{kind} of {source.table.name} {[column.name for column in columns]}")

    def changes(self, rng: random.Random, state: State) -> list[tuple[perco.Column[Any, Any], Any, Any]]:
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


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [] if found is None else [found]


async def write(db: perco.Database, changes: Iterable[tuple[perco.Column[Any, Any], Any, Any]]) -> None:
    """One transaction."""

    async def body(txn: perco.Transaction) -> None:
        for column, key, value in changes:
            if value is None:
                txn.delete(column, key)
            else:
                txn.set(column, key, value)

    await db.run(body)


async def stored(db: perco.Database, graph: views.Views) -> dict[perco.Table[Any], dict[Any, Values]]:
    """The store's rows of all tables and columns that the views write."""
    out: dict[perco.Table[Any], dict[Any, Values]] = {}
    async with db.snapshot() as snap:
        for view in graph.declared.values():
            for table, columns in view.outputs.items():
                rows = out.setdefault(table, {})
                async for row in snap.scan(table, columns=list(columns)):
                    rows.setdefault(row.key, {}).update({each: row[each] for each in columns if row[each] is not None})
    return out


async def check_equal(db: perco.Database, graph: views.Views, state: State) -> None:
    """V7: the store has what the batch build makes of the sources, value for value."""
    expected, found = graph.build(state), await stored(db, graph)
    assert found.keys() == expected.keys()
    for table, rows in expected.items():
        plain = {key: {column.name: repr(value) for column, value in values.items()} for key, values in rows.items()}
        there = {key: {column.name: repr(value) for column, value in v.items()} for key, v in found[table].items()}
        assert there == plain, table
