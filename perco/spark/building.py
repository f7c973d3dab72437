"""`perco.spark.build`: makes the tables of views with a Spark job, beside the live store.

The job makes what the observers' runs would have written, memories included, so the first change afterwards is
incremental. It proceeds in this order:

    1. The program's schema is declared; the observers of its views are registered, and paused (`schema/building.py`).
    2. The sources are read as of a timestamp that is drawn afterwards. Each view is computed from their rows, and from
       those of the views before it.
    3. The derived tables are published in one step (P7).
    4. Cells in rows of other tables, such as memories of source rows, are written in transactions.
    5. The observers are resumed. Changes that were committed after the timestamp of step 2 wait for them.

If it is interrupted before step 3, nothing has been built, and another call begins again. If it is interrupted later,
another call rebuilds the views row by row (`perco.views.rebuild`), which does not rely on memories; until then, the
observers cannot be resumed. A build has an id, which the catalogue has for each of its observers. Another build, or
the end of this one, replaces it: requests that a task of this build sends afterwards have no effect.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import trio
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession, functions

import perco
from perco.database.inside import inside
from perco.errors import UsageError
from perco.protocol.records import ack_of, column_of
from perco.schema import building
from perco.schema.catalogue import raise_for
from perco.spark import ranges
from perco.spark.bulk import published
from perco.spark.failing import reason_first
from perco.spark.partition import one_error
from perco.spark.ranges import Range
from perco.spark.stages import (
    KEYED,
    ROWS,
    WRITTEN,
    Derive,
    Label,
    Merge,
    Overlay,
    Program,
    Read,
    Sort,
    Which,
    Write,
)
from perco.spark.store import Store, serve
from perco.storage import APPLIED, NOTIFY, Mutation, ScanQuery, ScanRequest
from perco.tablets.loading import BulkLoad
from perco.tablets.sorting import Layout
from perco.txn.snapshot import scan_between
from perco.views import Views, rebuild
from perco.views.batch import inputs_of
from perco.views.compiled import Components, Each, Grouped, Joined, View
from perco.views.components import labels
from perco.views.wiring import own_tables

_LEASE_S: Final = 60.0
_PIN: Final = "build "  # a build that is under way has a pin of that name, followed by its id
_PAGE: Final = 1000
_LABELLED: Final = "node binary, label binary"


@dataclass(frozen=True, slots=True)
class Built:
    """The result of a build.

    Attributes:
        views: the ids of the views.
        ts: the timestamp at which the sources were read; `published_ts`: the one of the derived rows.
        rows: how many rows each derived table has.
        written: how many rows of other tables got cells, such as memories, in transactions.
        rebuilt: True if an earlier build was interrupted after its rows had been published, so that the views were
            rebuilt row by row.
        seconds: how long it took.
    """

    views: tuple[str, ...]
    ts: int
    published_ts: int
    rows: dict[str, int]
    written: int
    rebuilt: bool
    seconds: float

    def __str__(self) -> str:
        if self.rebuilt:
            return f"an interrupted build of {', '.join(self.views)} was completed in {self.seconds:.1f} s"
        told = ", ".join(f"{rows} rows of {table}" for table, rows in self.rows.items())
        return f"{told}, as of {self.ts}, in {self.seconds:.1f} s"


def build(
    views: Views | str,
    spark: SparkSession,
    store: str | os.PathLike[str] | Store,
    *,
    partitions: int | None = None,
) -> Built:
    """Make the tables of views that no observer has begun to make, with a Spark job.

        perco.spark.build("app:v", spark, "store/")

    The store can be used meanwhile; changes wait until the tables exist, and observers then keep them up to date.
    The executors must be on the machine that has the store's folder, and must have the program's modules. Cached
    functions are called by the executors, and the store keeps their results.

    Args:
        views: the program's views, or "module:name" of them.
        store: a folder, which is served during the call; or an address, or a `Store`.
        partitions: the number of parts into which the work is divided; by default, Spark's parallelism.

    Raises: UsageError if the views have been built already, or the store takes no bulk loads; TaskFailed if a task
    fails for good; the errors of `perco.open`.
    """
    found = Program(views, Store(url=""), 0, {}).declared()
    if not found.declared:
        raise UsageError("these views declare none: there is nothing to build")
    began = time.perf_counter()
    with serve(store, spark) as reached, reason_first():
        job = _Job(found, _name_of(views, found), spark, reached, partitions or spark.sparkContext.defaultParallelism)
        return trio.run(job.run, began)


def _name_of(views: Views | str, found: Views) -> Views | str:
    """How tasks find the views: by name if a module has them, because functions refer to the module's tables."""
    if isinstance(views, str):
        return views
    for module_name, module in list(sys.modules.items()):
        if module_name == "__main__" or module is None:
            continue
        for name, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
            if value is found:
                return f"{module_name}:{name}"
    return found


class _Job:
    """One build."""

    def __init__(self, views: Views, name: Views | str, spark: SparkSession, store: Store, parts: int) -> None:
        self._views, self._name, self._spark, self._store, self._parts = views, name, spark, store, parts
        self._ids = [id for view in views.declared for id in views.observers(view)]
        self._build_id = secrets.token_hex(8)
        self._made: list[DataFrame] = []  # persisted
        self._read: dict[str, DataFrame] = {}  # by table, its rows in the store
        self._outputs: list[tuple[set[str], DataFrame]] = []  # what each view writes: columns as "table.column"
        self._keep = StorageLevel.MEMORY_AND_DISK

    async def run(self, began: float) -> Built:
        async with self._store.joining() as db:
            await self._must_be_possible(db)
            catalogue = inside(db).catalogue
            earlier = building.under_way(catalogue, self._ids)
            if alive := {pin.name for pin in await db.pins() if pin.name.removeprefix(_PIN) in earlier}:
                raise UsageError(
                    "another build of these views is under way, or was killed less than a minute ago: wait until its "
                    f"pin has expired ({', '.join(sorted(alive))}; `perco pins` lists it)"
                )
            if not earlier and (found := await self._derived(db)):
                raise UsageError(
                    f"table {found[0]!r} has derived rows already, such as {found[1]!r}: observers have made them. "
                    "perco.views.check and `perco views check` say whether they are right; perco.views.rebuild makes "
                    "them anew"
                )
            schema, build = self._views.schema, self._build_id
            complete = building.must_be_completed(catalogue, self._ids)
            await inside(db).observers.change(lambda catalogue: building.begin(catalogue, schema, self._ids, build))
        try:
            with one_error():
                async with self._store.joining() as db, self._pinned(db) as ts:
                    if complete or await self._derived(db):
                        return await self._complete(db, ts, began)
                    return await self._build(db, ts, began)
        except Exception as error:
            error.add_note(
                "perco: the observers of these views are paused. Call perco.spark.build again; or, if no rows have "
                "been published yet, resume them (`perco observers STORE --resume ID`): then they make the views"
            )
            raise

    async def _must_be_possible(self, db: perco.Database) -> None:
        """Raises: UsageError if the store takes no bulk loads, or this process does not see its folder."""
        owner = inside(db).owner
        try:
            probe = await owner.begin_load([])
            try:
                probe.check()
            finally:
                await owner.end_load(probe.id)
        except UsageError as error:
            raise UsageError(
                f"perco.spark.build publishes rows by a bulk load, which is not possible: {error}"
            ) from None
        await inside(db).keeper.catch_up()

    async def _build(self, db: perco.Database, ts: int, began: float) -> Built:
        names = sorted(table.name for table in db.schema.tables.values())
        numbers = {name: number for number, name in enumerate(names)}
        program = Program(self._name, self._store, ts, numbers, self._build_id, tuple(self._ids))
        sources = await self._ranges(db, ts)
        try:
            await trio.to_thread.run_sync(self._derive, program, sources)
            return await self._publish(db, program, began)
        finally:
            await trio.to_thread.run_sync(self._forget)

    @asynccontextmanager
    async def _pinned(self, db: perco.Database) -> Any:
        """Hold the timestamp at which the sources are read."""
        name = f"{_PIN}{self._build_id}"
        async with db.pin(name, lease_s=_LEASE_S, owner="perco.spark.build") as pin, trio.open_nursery() as nursery:

            async def renew() -> None:
                while True:
                    await trio.sleep(_LEASE_S / 3)
                    await pin.renew()

            nursery.start_soon(renew)
            yield pin.start_ts
            nursery.cancel_scope.cancel()

    # ------------------------------------------------------------ what is there

    def _written(self) -> dict[str, set[str]]:
        """The columns that views write, by table, without memories."""
        out: dict[str, set[str]] = {}
        for view in self._views.declared.values():
            for table, columns in view.outputs.items():
                out.setdefault(table.name, set()).update(column.name for column in columns)
            for table in own_tables(view):
                out.setdefault(table.name, set()).update(table.columns, table.hidden)
        return out

    async def _derived(self, db: perco.Database) -> tuple[str, Any] | None:
        """A derived row that is there, if there is any: its table and its key."""
        async with db.snapshot() as snap:
            for name, columns in self._written().items():
                if name in db.schema.tables and (found := await _first(snap, db.schema.tables[name], columns)):
                    return name, found[0]
        return None

    async def _ranges(self, db: perco.Database, ts: int) -> dict[str, list[Range]]:
        """For each table that views read, the ranges in which it is read."""
        read = {column.table.name for view in self._all() for columns in inputs_of(view) for column in columns}
        out = {}
        store = inside(db).place.store
        async with db.snapshot(ts=ts) as snap:
            for name in sorted(read):
                table = db.schema.tables[name]
                parts = ranges.cut(Range(), store.bounds(name))
                if len(parts) < self._parts:
                    ends = []
                    for reverse in (False, True):
                        scan = scan_between(snap, table, b"", None, limit=1, reverse=reverse)
                        ends += [table.row(row.key) async for row in scan]
                    starts = ranges.between(ends[0], ends[1], self._parts) if ends else []
                    parts = ranges.cut(Range(), sorted({*starts, *store.bounds(name)}))
                out[name] = parts
        return out

    def _all(self) -> Iterator[View]:
        """All views, each after the one that keeps its copies."""
        for which in self._order():
            yield which.of(self._views)

    def _order(self) -> Iterator[Which]:
        for id, view in self._views.declared.items():
            if isinstance(view, Grouped | Joined | Components) and isinstance(view.copier, Each):
                yield Which(id, copier=True)
            yield Which(id)

    # ------------------------------------------------------------ computing (in a thread)

    def _derive(self, program: Program, sources: dict[str, list[Range]]) -> None:
        """Plan and compute all views."""
        for which in self._order():
            view = which.of(self._views)
            inputs = [self._input(program, columns, sources) for columns in inputs_of(view)]
            if isinstance(view, Components):
                frame = self._labels(view, inputs[0]).mapInArrow(Label(program, which), ROWS)
            elif isinstance(view, Each):
                frame = inputs[0].mapInArrow(Derive(program, which, False), ROWS)
            else:
                keyed: DataFrame | None = None
                for side, rows in enumerate(inputs):
                    some = rows.mapInArrow(Sort(program, which, side), KEYED)
                    keyed = some if keyed is None else keyed.unionAll(some)
                assert keyed is not None
                together = keyed.repartition(self._parts, "g").sortWithinPartitions("g", "side", "row")
                frame = together.mapInArrow(Derive(program, which, True), ROWS)
            frame = self._kept(frame)
            columns = {f"{table.name}.{c.name}" for table, columns in view.writes.items() for c in columns}
            self._outputs.append((columns, frame))

    def _kept(self, frame: DataFrame) -> DataFrame:
        self._made.append(frame.persist(self._keep))
        return frame

    def _input(
        self, program: Program, columns: Sequence[perco.Column[Any, Any]], sources: dict[str, list[Range]]
    ) -> DataFrame:
        """The rows of a table with the columns that a view reads: from the store, and from the views before it."""
        table = columns[0].table.name
        names = {f"{table}.{column.name}" for column in columns}
        parts = []
        derived: set[str] = set()
        for written, frame in self._outputs:
            if names & written:
                parts.append(frame.where(functions.col("t") == program.numbers[table]))
                derived |= names & written
        if names - derived:
            parts.insert(0, self._source(program, table, sources[table]))
        if len(parts) == 1:
            return parts[0]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.unionAll(part)
        return whole.repartition(self._parts, "row").sortWithinPartitions("row").mapInArrow(Merge(), ROWS)

    def _source(self, program: Program, table: str, spans: list[Range]) -> DataFrame:
        """The rows of a table with all columns that views read of the store: it is read once."""
        if table not in self._read:
            views = self._views
            names = {column.name for column in views.sources.get(views.schema.tables[table], ())}
            numbered = self._spark.range(0, len(spans), 1, len(spans))
            frame = numbered.mapInArrow(Read(program, table, tuple(sorted(names)), spans), ROWS)
            self._read[table] = frame.persist(self._keep)
        return self._read[table]

    def _labels(self, view: Components, links: DataFrame) -> DataFrame:
        """All nodes and their labels. The driver computes them: it needs memory for all links."""
        decode, row = view.links.key.decode, view.table.row
        found = labels(view, (decode(bytes(each["row"])) for each in links.select("row").toLocalIterator()))
        made = [(bytearray(row(node)), bytearray(row(label))) for node, label in found]
        return self._spark.createDataFrame(made, _LABELLED).repartition(self._parts)

    def _forget(self) -> None:
        for frame in (*self._made, *self._read.values()):
            frame.unpersist()

    # ------------------------------------------------------------ writing

    async def _publish(self, db: perco.Database, program: Program, began: float) -> Built:
        names = {number: table for table, number in program.numbers.items()}
        whole = self._made[0]
        for frame in self._made[1:]:
            whole = whole.unionAll(frame)
        bulk = await self._empty(db, program)
        # The row with the empty key cannot be in a file of a bulk load.
        in_bulk = functions.col("t").isin([program.numbers[table] for table in bulk]) & (functions.length("row") > 0)
        rows: dict[str, int] = {}

        def write(load: BulkLoad) -> dict[str, list[tuple[bytes, str]]]:
            silent = frozenset(self._ids)
            layouts = {program.numbers[t]: Layout.of(inside(db).catalogue, t, silent=silent) for t in bulk}
            order = whole.where(in_bulk).repartitionByRange(self._parts, "t", "row").sortWithinPartitions("t", "row")
            files: dict[str, list[tuple[bytes, str]]] = {table: [] for table in bulk}
            for each in order.mapInArrow(Write(load, layouts), WRITTEN).collect():
                table = names[each["t"]]
                files[table].append((bytes(each["first"]), each["name"]))
                rows[table] = rows.get(table, 0) + each["rows"]
            return {table: sorted(some) for table, some in files.items()}

        build = self._build_id
        done = await published(db, sorted(bulk), write, build)
        published_ts = done.ts if done.tablets else 0
        await inside(db).observers.change(lambda catalogue: building.publish(catalogue, build, max(done.ts, 1)))

        def overlay() -> int:
            left = whole.where(~in_bulk)
            return sum(each["rows"] for each in left.mapInArrow(Overlay(program, names), "rows bigint").collect())

        written = await trio.to_thread.run_sync(overlay)
        await inside(db).keeper.renew()
        building.must_go_on(inside(db).catalogue, self._ids, build)
        for id in self._ids:
            await _forget_waiting(db, id, program.ts)
        await self._resume(db, (program.ts, published_ts))
        seconds = time.perf_counter() - began
        return Built(tuple(self._views.declared), program.ts, published_ts, rows, written, False, seconds)

    async def _empty(self, db: perco.Database, program: Program) -> set[str]:
        """The derived tables that take a bulk load: those that have no rows, and one tablet."""
        out = set()
        owner = inside(db).owner
        for name in self._written():
            with suppress(UsageError):
                probe = await owner.begin_load([name])
                await owner.end_load(probe.id)
                out.add(name)
        return out

    async def _resume(self, db: perco.Database, built: tuple[int, int]) -> None:
        await inside(db).observers.change(lambda catalogue: building.end(catalogue, self._ids, self._build_id, built))

    async def _complete(self, db: perco.Database, ts: int, began: float) -> Built:
        """Complete a build that was interrupted after its publication."""
        opened: AbstractAsyncContextManager[perco.Database] = self._store.open(self._views.schema)
        async with opened as known:
            done = await rebuild(self._views, known)
            await self._resume(known, (ts, 0))
        rows = {each.view: each.owners for each in done}
        seconds = time.perf_counter() - began
        return Built(tuple(self._views.declared), 0, 0, rows, 0, True, seconds)


async def _first(snap: perco.Snapshot, table: perco.Table[Any], names: set[str]) -> list[Any]:
    """The key of the first row with any of these columns; none: there is no row."""
    every = {**table.columns, **table.hidden}
    columns = [every[name] for name in sorted(names) if name in every]  # the store may not know all yet
    return [row.key for row in await snap.scan(table, columns=columns, limit=1).all()] if columns else []


async def _forget_waiting(db: perco.Database, id: str, ts: int) -> None:
    """Remove the notify cells of an observer up to a timestamp. No run of it is under way, and none begins (N2)."""
    store, catalogue = inside(db).store, inside(db).catalogue
    entry = catalogue.observers[id]
    ack = ack_of(column_of(catalogue.tables[entry.table].columns[entry.column].number), entry.number)
    start: bytes | None = b""
    while start is not None:
        query = ScanQuery(NOTIFY, (ack,), 0, ts)
        page = await store.scan(ScanRequest(entry.table, start, None, (query,), False, _PAGE))
        gone = [
            Mutation(entry.table, ((row, (), tuple((NOTIFY, c, at, None) for c, at, _ in found)),))
            for row, (found,) in page.rows
            if found
        ]
        for verdict in await store.apply(gone) if gone else ():
            if verdict is not APPLIED:
                raise_for(verdict, f"notifications of observer {id!r}")
        start = page.next
