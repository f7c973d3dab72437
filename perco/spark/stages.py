"""The parts of `perco.spark.build` that run in Spark's tasks.

Between the stages, a row is (table, row, cells): the table's number, the key as stored, and the cells, packed: names of
columns and values as stored, in turn. All of it is Arrow, from the JVM to here and back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
import pyarrow as pa
import trio
from pyspark import TaskContext

import perco
from perco.database.inside import inside
from perco.errors import UsageError
from perco.naming import named
from perco.schema import building
from perco.spark.ranges import Range
from perco.spark.store import WHERE, Store, in_task
from perco.spark.streaming import streamed
from perco.tablets.loading import BulkLoad
from perco.tablets.sorting import Layout, SortedFile
from perco.txn.inside import write_encoded
from perco.txn.row import Row
from perco.txn.snapshot import scan_between
from perco.views import Put, Views
from perco.views.batch import inputs_of, owned
from perco.views.cached import find
from perco.views.compiled import CoGrouped, Components, Copies, Each, Grouped, Joined, View, parts_of
from perco.views.folding import counted
from perco.views.memory import Given, Where, fill, given, laters
from perco.views.running import packed_memory

ROWS: Final = "t int, row binary, cells binary"
KEYED: Final = "g binary, side int, row binary, cells binary"
WRITTEN: Final = "t int, first binary, name string, rows bigint"
_ROWS: Final = pa.schema([("t", pa.int32()), ("row", pa.binary()), ("cells", pa.binary())])
_KEYED: Final = pa.schema([("g", pa.binary()), ("side", pa.int32()), ("row", pa.binary()), ("cells", pa.binary())])
_WRITTEN: Final = pa.schema([("t", pa.int32()), ("first", pa.binary()), ("name", pa.string()), ("rows", pa.int64())])
_BATCH_ROWS: Final = 4096
_BATCH_BYTES: Final = 4 << 20
_MEMORIES: Final = 500  # written in one transaction
_ATTEMPTS: Final = 50

Cells = dict[str, bytes]
Record = tuple[int, bytes, bytes]
_unpack = msgpack.unpackb
_pack = msgpack.packb


@dataclass(frozen=True, slots=True)
class Program:
    """The data that all stages share. A plain value.

    Attributes:
        views: the program's views, or their name, "module:name".
        store: the store.
        ts: the timestamp at which the sources are read.
        numbers: the tables' numbers, by name.
        build: the id of the build; `observers`: the ids of its observers.
    """

    views: Views | str
    store: Store
    ts: int
    numbers: Mapping[str, int]
    build: str = ""
    observers: tuple[str, ...] = ()

    def declared(self) -> Views:
        """The views. Raises: UsageError."""
        if isinstance(self.views, Views):
            return self.views
        found = named(self.views, "MODULE:NAME, such as app:v", WHERE)
        if not isinstance(found, Views):
            raise UsageError(f"{self.views!r} names {found!r}, and not the views of a program (perco.views.Views)")
        return found


class Which(NamedTuple):
    """A view of a program; or the view that keeps the copies that it reads."""

    id: str
    copier: bool = False

    def of(self, views: Views) -> View:
        view = views.declared[self.id]
        if not self.copier:
            return view
        assert isinstance(view, Grouped | Joined | Components)
        assert isinstance(view.copier, Each)
        return view.copier


# ------------------------------------------------------------ rows


def row_of(columns: Sequence[perco.Column[Any, Any]], row: bytes, cells: Mapping[str, bytes]) -> Row[Any] | None:
    """Some columns of a row; None if it has no value in any of them."""
    values = {each: (None if (v := cells.get(each.name)) is None else each.codec.decode(v), 0) for each in columns}
    if all(value is None for value, _ in values.values()):
        return None
    return Row(columns[0].table.key.decode(row), values)


def unpacked(cells: bytes) -> Cells:
    flat = _unpack(cells)
    return dict(zip(flat[::2], flat[1::2], strict=True))


def packed(cells: Iterable[tuple[str, bytes]]) -> bytes:
    flat: list[Any] = []
    for each in cells:
        flat += each
    return _pack(flat)  # type: ignore[no-any-return]


def _batches(records: Iterable[tuple[Any, ...]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    made: list[tuple[Any, ...]] = []
    size = 0
    for record in records:
        made.append(record)
        size += len(record[-1])
        if len(made) >= _BATCH_ROWS or size >= _BATCH_BYTES:
            yield _batch(made, schema)
            made, size = [], 0
    if made:
        yield _batch(made, schema)


def _batch(made: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*made, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)], schema=schema
    )


def _records(batches: Iterable[pa.RecordBatch], *names: str) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)


# ------------------------------------------------------------ stages


@dataclass(frozen=True, slots=True)
class Read:
    """Reads ranges of a table: the input has their numbers."""

    program: Program
    table: str
    columns: tuple[str, ...]
    ranges: Sequence[Range]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for (number,) in _records(batches, "id"):
            some = streamed(functools.partial(self._read, number))
            yield from _batches(itertools.chain.from_iterable(some), _ROWS)

    async def _read(self, number: int, send: Any) -> None:
        program = self.program
        async with in_task(program.store, program.store.joining()) as db:
            table = db.schema.tables[self.table]
            columns = [table.columns[name] for name in self.columns]
            t, made = program.numbers[self.table], []
            async with db.snapshot(ts=program.ts) as snap:
                async for row in scan_between(snap, table, *self.ranges[number], columns=columns):
                    cells = [(c.name, c.codec.encode(v)) for c in columns if (v := row[c]) is not None]
                    made.append((t, table.row(row.key), packed(cells)))
                    if len(made) == _BATCH_ROWS:
                        await send(made)
                        made = []
            await send(made)


@dataclass(frozen=True, slots=True)
class Merge:
    """Makes one row of all with the same key, which follow each other: several views have written columns of it."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _batches(self._merged(batches), _ROWS)

    @staticmethod
    def _merged(batches: Iterator[pa.RecordBatch]) -> Iterator[Record]:
        for (t, row), some in itertools.groupby(_records(batches, "t", "row", "cells"), key=lambda each: each[:2]):
            yield t, row, merged(str(t), row, [cells for _, _, cells in some])


def merged(table: str, row: bytes, parts: Sequence[bytes]) -> bytes:
    """The cells of a row, of which several stages have given some. Raises: UsageError if two gave the same column."""
    if len(parts) == 1:
        return parts[0]
    cells: Cells = {}
    for part in parts:
        for name, value in unpacked(part).items():
            if name in cells:
                raise UsageError(
                    f"two owners give row {row!r:.200} of table {table!r} (column {name!r}): a row has one owner"
                )
            cells[name] = value
    return packed(cells.items())


@dataclass(frozen=True, slots=True)
class Sort:
    """Gives rows the keys by which a view needs them together: groups, or keys of a join."""

    program: Program
    which: Which
    side: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        view = self.which.of(self.program.declared())
        return _batches(self._keyed(view, batches), _KEYED)

    def _keyed(self, view: View, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
        columns = inputs_of(view)[self.side]
        for stored, cells in _records(batches, "row", "cells"):
            row = row_of(columns, stored, unpacked(cells))
            if row is not None and (group := self._group(view, stored, row)) is not None:
                yield group, self.side, stored, cells

    def _group(self, view: View, stored: bytes, row: Row[Any]) -> bytes | None:
        if isinstance(view, Joined) and self.side == 0:
            key = view.key_of_left(row)
            return b"n" + stored if key is None else b"k" + view.key.encode(key)
        copies = _copies_of(view, self.side)
        key = copies.key_of(row)
        if key is None:
            return None
        return b"k" + view.key.encode(key) if isinstance(view, Joined) else view.table.row(key)


def _copies_of(view: View, side: int) -> Copies:
    if isinstance(view, CoGrouped):
        return view.sides[side].rows
    assert isinstance(view, Grouped | Joined)
    return view.members if isinstance(view, Grouped) else view.rights


@dataclass(frozen=True, slots=True)
class Derive:
    """Calls a view's function, and gives what its runs would write: its rows, their marks, and the owners' memories.

    The input is rows of a single table or, with `keyed`, what `Sort` has given, sorted.
    """

    program: Program
    which: Which
    keyed: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        view = self.which.of(self.program.declared())
        return _batches(self._derived(view, batches), _ROWS)

    def _derived(self, view: View, batches: Iterator[pa.RecordBatch]) -> Iterator[Record]:
        for batch in batches if not self.keyed else [None]:
            inputs = self._groups(view, batches) if batch is None else self._single(view, batch)
            late: list[tuple[Any, Any, dict[Where, Given]]] = []
            for rows in inputs:
                for owner, gave in _given(view, rows):
                    if any(each.later for each in gave.values()):
                        late.append((owner, rows, gave))
                    else:
                        yield from self._written(view, owner, rows, gave)
                if len(late) >= _BATCH_ROWS:
                    yield from self._late(view, late)
                    late = []
            yield from self._late(view, late)

    def _single(self, view: View, batch: pa.RecordBatch) -> Iterator[list[list[Row[Any]]]]:
        (columns,) = inputs_of(view)
        for stored, cells in _records([batch], "row", "cells"):
            row = row_of(columns, stored, unpacked(cells))
            if row is not None:
                yield [[row]]

    @staticmethod
    def _groups(view: View, batches: Iterator[pa.RecordBatch]) -> Iterator[list[list[Row[Any]]]]:
        inputs = inputs_of(view)
        records = _records(batches, "g", "side", "row", "cells")
        for _, some in itertools.groupby(records, key=lambda each: each[0]):
            rows: list[list[Row[Any]]] = [[] for _ in inputs]
            for _, side, stored, cells in some:
                row = row_of(inputs[side], stored, unpacked(cells))
                assert row is not None
                rows[side].append(row)
            yield rows

    def _late(self, view: View, late: list[tuple[Any, Any, dict[Where, Given]]]) -> Iterator[Record]:
        """Find the values of cached functions, in the store or by calls; the store keeps them (V10)."""
        if not late:
            return
        rows = [each for _, _, gave in late for each in gave.values()]
        program, views = self.program, self.program.declared()

        async def main() -> None:
            async with in_task(program.store, program.store.open(views.schema)) as db:
                fill(rows, await db.options(attempts=_ATTEMPTS).run(_find, rows))

        trio.run(main)
        for owner, inputs, gave in late:
            yield from self._written(view, owner, inputs, gave)

    def _written(
        self, view: View, owner: Any, rows: list[list[Row[Any]]], gave: Mapping[Where, Given]
    ) -> Iterator[Record]:
        numbers, stored = self.program.numbers, view.table.row(owner)
        for (name, row), each in gave.items():
            cells = [(column.name, data) for column, data in each.data.items()]
            if (mark := view.owned.get(each.table)) is not None:
                cells.append((mark.name, stored))
            yield numbers[name], row, packed(cells)
        kept: list[tuple[str, bytes]] = []
        seen_ts = self.program.ts if view.several and isinstance(view, Each | Joined) else 0
        if gave or seen_ts:
            kept.append((view.memory.name, packed_memory(view, gave, seen_ts)))
        if isinstance(view, Grouped):
            value, orders = counted(view, rows[0])
            kept.append((view.kept.name, value))
            for column, place, ordered in orders:
                table = column.table
                yield numbers[table.name], table.row(place), packed([(column.name, column.codec.encode(ordered))])
        if kept:
            yield numbers[view.table.name], stored, packed(kept)


async def _find(txn: perco.Transaction, rows: list[Given]) -> Any:
    return await find(txn, laters(rows), compute=True)


def _given(view: View, rows: list[list[Row[Any]]]) -> Iterator[tuple[Any, dict[Where, Given]]]:
    """The owners that these rows have, each with the cells that it gives."""
    lefts = {view.table.row(row.key): row for row in rows[0]} if isinstance(view, Joined) else {}
    for owner, puts in owned(view, *rows):
        try:
            made = puts()
            if isinstance(view, Joined) and view.lefts is not None:
                key = view.key_of_left(lefts[view.table.row(owner)])
                if key is not None:
                    place = (*parts_of(view.key, key), *parts_of(view.table.key, owner))
                    made = [Put(view.lefts.left.table, place, {view.lefts.left: True}), *made]
            yield owner, given(view.id, made, view.writes)
        except Exception as error:
            error.add_note(f"view {view.id!r}, for {view.table.name}[{owner!r}]")
            raise


@dataclass(frozen=True, slots=True)
class Label:
    """Gives the rows of a view of components: the input is nodes and labels, as stored."""

    program: Program
    which: Which

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _batches(self._labelled(batches), _ROWS)

    def _labelled(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Record]:
        view = self.which.of(self.program.declared())
        assert isinstance(view, Components)
        decode, derive = view.table.key.decode, Derive(self.program, self.which, False)
        for stored, label in _records(batches, "node", "label"):
            node = decode(stored)
            gave = given(view.id, view.gives(node, decode(label)), view.writes)
            yield from derive._written(view, node, [], gave)


# ------------------------------------------------------------ writing


@dataclass(frozen=True, slots=True)
class Write:
    """Writes sorted rows to files of a bulk load."""

    load: BulkLoad
    layouts: Mapping[int, Layout]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self.load.check()
        context = TaskContext.get()
        attempt = f"{context.partitionId()}-{context.taskAttemptId()}" if context is not None else "0"
        records = _records(batches, "t", "row", "cells")
        for t, some in itertools.groupby(records, key=lambda each: each[0]):
            layout, name = self.layouts[t], f"{t}-{attempt}"
            file = SortedFile(Path(self.load.path) / name, layout, self.load.ts)
            try:
                for row, same in itertools.groupby(some, key=lambda each: each[1]):
                    cells = unpacked(merged(layout.table, row, [cells for _, _, cells in same]))
                    file.put(row, list(cells.items()))
                file.finish()
            except BaseException:
                file.abandon()
                raise
            yield _batch([(t, file.first, name, file.rows)], _WRITTEN)


@dataclass(frozen=True, slots=True)
class Overlay:
    """Writes cells into tables that have other rows, in transactions; gives how many rows."""

    program: Program
    names: Mapping[int, str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        count = trio.run(self._write, batches)
        yield pa.RecordBatch.from_pydict({"rows": pa.array([count], pa.int64())})

    async def _write(self, batches: Iterator[pa.RecordBatch]) -> int:
        count = 0
        records = _records(batches, "t", "row", "cells")
        async with in_task(self.program.store, self.program.store.joining()) as db:
            retrying = db.options(attempts=_ATTEMPTS)
            while some := list(itertools.islice(records, _MEMORIES)):
                await retrying.run(self._put, db, some)
                count += len(some)
        return count

    async def _put(self, txn: perco.Transaction, db: perco.Database, some: list[Record]) -> None:
        # N10: the end of a build binds. A transaction of a task that Spark has given up cannot commit afterwards: it
        # runs again, and finds that the build has ended.
        building.must_go_on(inside(db).catalogue, self.program.observers, self.program.build)
        for t, row, cells in some:
            table = db.schema.tables[self.names[t]]
            columns = {**table.columns, **table.hidden}
            for name, value in unpacked(cells).items():
                write_encoded(txn, columns[name], row, value)
