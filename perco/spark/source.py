"""`spark.read.format("perco")` and `df.write.format("perco")`: tables as data frames, each read at one timestamp.

    perco.spark.register(spark, store)
    docs = spark.read.format("perco").option("table", "docs").option("columns", "title,rank").load()
    docs.show()

A frame is a snapshot as of the moment at which it was loaded, however often it is used; load it again to see later
changes. A pin holds the snapshot, and tasks renew the pin's lease while they read. A frame has the rows that have a
value in any of its columns. A partition is a tablet, or a part of one.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, ClassVar, Final

import pyarrow as pa
import trio
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

import perco
from perco.arrow.fields import Field
from perco.arrow.rows import RowBatch
from perco.database.inside import inside
from perco.errors import SchemaMismatch, UsageError, must_be_number
from perco.spark import changed, cutting, direct, ranges, sink, types
from perco.spark.asked import BY_ROWS, FEED, FILES, OF_CHANGES, OF_FRAMES, Asked, number, one_of, since_of
from perco.spark.direct import Beside, Walk
from perco.spark.following import BOUNDED, ROWS, Following, PercoStreamReader, must_be_logged
from perco.spark.partition import one_error
from perco.spark.ranges import Range
from perco.spark.store import Store, in_task, reached
from perco.spark.streaming import streamed
from perco.spark.workers import working
from perco.txn.columnar import NoPages
from perco.txn.snapshot import scan_between

_ZONE: Final = "spark.sql.session.timeZone"
_LEASE_S: Final = 600.0
_FRESH, _STALE = 0.9, 0.5  # of a lease: between these, a task renews a pin
_CHANCE: Final = random.SystemRandom()  # forked workers share the seed of `random`
_OF_SPARK: Final = ("checkpointlocation", "queryname")  # options of a stream that are for Spark
_MARKS: Final = "_marks_perco"  # an attribute that marks Spark's class as patched by perco


def register(
    spark: SparkSession,
    store: str | os.PathLike[str] | Store | None = None,
    *,
    lease_s: float = _LEASE_S,
) -> None:
    """Register `format("perco")` with a session.

    Args:
        store: the default store, for frames without a `url`. Spark sends the store's token in the closures of
            jobs; no plan has it. If the executors are on this machine, `store` may be a folder that a process of this
            machine has open.
        lease_s: for how many seconds a frame's snapshot is held after a task has last renewed it. A task that reads
            files renews it only if a part of this time is over, at most half.
    """
    must_be_number("lease_s", lease_s)
    if not 0 < lease_s < float("inf"):
        raise UsageError(f"lease_s is {lease_s}: a number of seconds above 0")
    if store is not None and not isinstance(store, Store):
        store = reached(store) or Store(url=os.fspath(store))
    known, zone, cores = store, str(spark.conf.get(_ZONE)), _cores(spark)

    class Source(PercoSource):  # in no module, so that Spark sends the class itself, attributes included
        _store = known
        _lease_s = lease_s
        _zone = zone
        _cores = cores

    spark.dataSource.register(Source)
    _mark_streams(type(spark.readStream))


def _cores(spark: SparkSession) -> int:
    """How many tasks Spark runs at a time; 1 for Spark Connect, which does not say."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except PySparkException:
        return 1


def _mark_streams(reader: Any) -> None:
    """Make `readStream.format("perco")` set an option. Spark asks a Python source for its schema without saying whether
    it reads a frame or a stream."""
    if hasattr(reader, _MARKS):
        return
    chosen = reader.format

    @functools.wraps(chosen)
    def format(self: Any, source: str) -> Any:
        made = chosen(self, source)
        if isinstance(source, str) and source.lower() == PercoSource.name():
            made.option(FEED, "true")
        return made

    reader.format = format
    setattr(reader, _MARKS, True)


class PercoSource(DataSource):
    """The data source; see the module. `register` registers it with a session."""

    _store: ClassVar[Store | None] = None
    _lease_s: ClassVar[float] = _LEASE_S
    _zone: ClassVar[str] = "UTC"
    _cores: ClassVar[int] = 1
    _planned: list[Span] | None = None

    @classmethod
    def name(cls) -> str:
        return "perco"

    @property
    def _follows(self) -> bool:
        return str(self.options.get(FEED, "")).lower() == "true"

    def schema(self) -> StructType:
        if self._follows:
            return self._schema_of_stream()
        asked = Asked(self.options, self._store, OF_FRAMES, self._zone)

        async def main() -> StructType:
            async with asked.store.reading() as db:
                table = asked.table_of(db)
                found = types.schema_of(table, asked.key, asked.columns_of(table))
                # Spark asks the reader for its partitions in another process, which would have to open the store again.
                self._planned = await PercoReader(asked, found, self._lease_s, None, self._cores).plan(db)
                return found

        with working():
            return trio.run(main)

    def reader(self, schema: StructType) -> DataSourceReader:
        if self._follows:
            raise UsageError("readChangeFeed is for spark.readStream; with trigger(availableNow=True), it ends")
        asked = Asked(self.options, self._store, OF_FRAMES, self._zone)
        if self._planned is None and asked.ts is None and asked.at is None:
            raise UsageError(
                "a frame with a schema of its own needs ts or at: otherwise each query reads as of its own moment"
            )
        planned, self._planned = self._planned, None  # each task gets a copy of this source: without all partitions
        return PercoReader(asked, schema, self._lease_s, planned, self._cores)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        asked = Asked(self.options, self._store, sink.OPTIONS)
        to = asked.sink(schema, overwrite)
        return sink.PercoWriter(to, schema, asked.job, asked.batch)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        options = {name: self.options[name] for name in self.options if name.lower() not in _OF_SPARK}
        asked = Asked(options, self._store, sink.STREAM_OPTIONS)
        return sink.PercoStreamWriter(asked.sink(schema, overwrite or asked.nulls == "delete"), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if not self._follows:
            raise UsageError("a stream of a table's changes needs .option('readChangeFeed', 'true')")
        asked, following = self._followed()
        frame = changed.frame_of(schema, asked.key)
        return PercoStreamReader(following, schema, PercoReader(asked, frame, following.lease_s, None))

    def _followed(self) -> tuple[Asked, Following]:
        options = {name.lower(): self.options[name] for name in self.options}
        asked = Asked(options, self._store, OF_CHANGES)
        rows = number("maxRows", options.get("maxrows"))
        if rows is not None and not BOUNDED:
            raise UsageError("maxRows needs PySpark 4.2 or newer: before, Spark does not ask a source for a part")
        return asked, Following(
            asked.store,
            asked.table,
            asked.key,
            since_of(options, self._zone),
            rows or ROWS,
            asked.partitions or 1,
            one_of("net", options.get("net"), "false", "true") == "true",
            one_of("preimages", options.get("preimages"), "false", "true") == "true",
            number("lease", options.get("lease")) or self._lease_s,
        )

    def _schema_of_stream(self) -> StructType:
        asked, _ = self._followed()

        async def main() -> StructType:
            async with asked.store.joining() as db:
                table = asked.table_of(db)
                must_be_logged(db, table)
                return changed.schema_of(types.schema_of(table, asked.key, asked.columns_of(table)))

        return trio.run(main)


async def _moment_of(db: perco.Database, asked: Asked, lease_s: float) -> tuple[int, str]:
    """The timestamp to read at, and the name of the pin that holds it. The name is "" for a folder that no process has
    open: it needs no pin, because nothing is removed from it."""
    if inside(db).place.readonly:
        async with db.snapshot(ts=asked.ts, at=asked.at) as snap:
            return snap.start_ts, ""
    name = f"spark {secrets.token_hex(8)}"
    async with db.pin(name, lease_s=lease_s, ts=asked.ts, at=asked.at, owner=_owner(asked), keep=True) as pin:
        return pin.start_ts, name


def _owner(asked: Asked) -> str:
    return f"spark: {asked.table} (process {os.getpid()})"


class Span(InputPartition):
    """The rows that one task reads: those of a range, at a timestamp that the named pin holds."""

    range: Range
    ts: int
    pin: str
    beside: Beside | None

    def __init__(self, range: Range, ts: int, pin: str, beside: Beside | None) -> None:
        super().__init__(None)
        self.range, self.ts, self.pin, self.beside = range, ts, pin, beside


async def _starts_of(db: perco.Database, table: perco.Table[Any], pieces: int) -> list[bytes]:
    """The rows at which to cut a table: the first rows of its tablets, or those that a database proposes
    (`TicketRows.sample`)."""
    store = inside(db).place.store
    sample: Callable[[str, int], Awaitable[list[bytes]]] | None = getattr(store, "sample", None)
    return store.bounds(table.name) if sample is None else await sample(table.name, pieces)


class PercoReader(DataSourceReader):
    """Plans the read of a frame on the driver, and reads one partition in each task.

    Args:
        planned: the partitions, if they were planned when the frame was loaded.
        cores: how many tasks run at a time.
    """

    def __init__(
        self, asked: Asked, schema: StructType, lease_s: float, planned: list[Span] | None = None, cores: int = 1
    ) -> None:
        self._asked, self._schema, self._lease_s, self._planned, self._cores = asked, schema, lease_s, planned, cores

    def __getstate__(self) -> dict[str, Any]:
        """The state that Spark sends to each task."""
        return {**self.__dict__, "_planned": None}

    def partitions(self) -> list[Span]:
        with working():
            return trio.run(self._partitions) if self._planned is None else self._planned

    async def _partitions(self) -> list[Span]:
        async with self._asked.store.reading() as db:
            return await self.plan(db)

    async def plan(self, db: perco.Database) -> list[Span]:
        """Choose the timestamp of a frame, pin it, and divide the frame among tasks."""
        asked = self._asked
        table = asked.table_of(db)
        self.columns_of(table)
        whole = ranges.of_options(table, asked.start, asked.stop, asked.prefix)
        ts, pin = await _moment_of(db, asked, self._lease_s)
        return [] if whole.empty else await self.spans(db, table, whole, ts, pin)

    async def spans(self, db: perco.Database, table: perco.Table[Any], whole: Range, ts: int, pin: str) -> list[Span]:
        """Divide a range of the table, as of a timestamp that a pin holds, among tasks."""
        asked = self._asked
        parts = ranges.cut(whole, await _starts_of(db, table, asked.partitions or 1))
        place = direct.beside(asked.store) if pin else None
        few = self._cores > 1 and len(parts) < 2 * self._cores  # of two tablets, one may have all cells
        if asked.partitions is None and place is not None and few:
            parts = await self._even(db, place, table, ts, parts)
        elif len(parts) < (asked.partitions or 1):
            parts = await self._finer(db, table, ts, parts, asked.partitions or 1)
        files = place if asked.read == FILES else None
        return [Span(part, ts, pin, files) for part in parts]

    async def _even(
        self, db: perco.Database, place: Beside, table: perco.Table[Any], ts: int, parts: list[Range]
    ) -> list[Range]:
        """Parts for all cores, if the table is large enough."""
        try:
            found = await cutting.even(place, table.name, parts, self._cores)
        except direct.FALLS_BACK as error:
            direct.warn(error, "with fewer tasks")
            return parts
        return await self._finer(db, table, ts, parts, self._cores) if found is None else found

    async def _finer(
        self, db: perco.Database, table: perco.Table[Any], ts: int, parts: list[Range], wanted: int
    ) -> list[Range]:
        each = -(-wanted // len(parts))
        out = []
        async with db.snapshot(ts=ts) as snap:
            for part in parts:
                ends = []
                for reverse in (False, True):
                    scan = scan_between(snap, table, *part, limit=1, reverse=reverse)
                    ends += [table.row(row.key) async for row in scan]
                out += ranges.cut(part, ranges.between(ends[0], ends[1], each)) if ends else []
        return out

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, Span):  # else it is Spark's own: `partitions` has returned none
            with working():
                yield from streamed(lambda send: self._read(partition, send))

    async def _read(self, span: Span, send: Any) -> None:
        with one_error():
            await self._read_span(span, send)

    async def _read_span(self, span: Span, send: Any) -> None:
        left: Range | None = span.range
        if span.beside is not None:
            left = await self._read_files(span, span.beside, send)
        if left is None:
            return
        async with self._served() as db, trio.open_nursery() as nursery:
            if span.pin:
                await nursery.start(self._renew, db, span)
            if self._asked.read != BY_ROWS:
                left = await self._walk(db, span, left, send, "row by row")
            if left is not None:
                async with db.snapshot(ts=span.ts) as snap:
                    await self._rows(db, snap, left, send)
            nursery.cancel_scope.cancel()

    def _served(self) -> AbstractAsyncContextManager[perco.Database]:
        return in_task(self._asked.store, self._asked.store.reading())

    async def _read_files(self, span: Span, place: Beside, send: Any) -> Range | None:
        """Read a range from the files, as far as that is possible; returns the rest."""
        left: Range | None = span.range
        async with AsyncExitStack() as stack:
            try:
                db = await stack.enter_async_context(direct.opened(place, span.pin, span.ts))
            except direct.FALLS_BACK as error:
                direct.warn(error, "through the store's owner")
                return left
            nursery = await stack.enter_async_context(trio.open_nursery())
            await nursery.start(self._hold, db, span)
            left = await self._walk(db, span, span.range, send, "through the store's owner")
            nursery.cancel_scope.cancel()
        return left

    async def _hold(self, db: perco.Database, span: Span, task_status: Any) -> None:
        """Hold the frame's pin while files are read: like `_renew`, but connect to the store's owner only once a part
        of the lease is over. Most tasks end before that. Each task waits for another part, so that one of them renews
        the pin for all."""
        started = False
        async with AsyncExitStack() as stack:
            served: perco.Database | None = None
            while True:
                least_s = self._lease_s * _CHANCE.uniform(_STALE, _FRESH)
                while (wait_s := await direct.left_s(db, span.pin, span.ts) - least_s) > 0:
                    if not started:
                        task_status.started()
                        started = True
                    await trio.sleep(wait_s)
                if served is None:
                    served = await stack.enter_async_context(self._served())
                await self._renew_once(served, span)

    async def _walk(self, db: perco.Database, span: Span, range: Range, send: Any, instead: str) -> Range | None:
        """Read the pages of a range, as far as that is possible; returns the rest."""
        table = self._asked.table_of(db)
        columns = self.columns_of(table)
        rows = functools.partial(self._rows, db)
        walk = Walk(db, table, columns, self._asked.key, self._schema, range, span.ts, rows)
        try:
            await walk.run(send)
        except NoPages:
            pass  # nothing is wrong: such stores have none
        except direct.FALLS_BACK as error:
            direct.warn(error, instead)
        return walk.left

    async def _rows(self, db: perco.Database, snap: perco.Snapshot, range: Range, send: Any) -> None:
        """Read a range row by row."""
        table = self._asked.table_of(db)
        columns = self.columns_of(table)
        batch = Batch(table, columns, self._asked.key, self._schema)
        async for row in scan_between(snap, table, *range, columns=columns):
            batch.add(row)
            if batch.full:
                await send(batch.taken())
        if batch.rows:
            await send(batch.taken())

    async def _renew(self, db: perco.Database, span: Span, task_status: Any) -> None:
        """Hold the frame's pin, which all of its tasks share."""
        await self._renew_once(db, span)
        task_status.started()
        while True:
            await trio.sleep(self._lease_s * _CHANCE.uniform(1 - _FRESH, 1 - _STALE))
            await self._renew_once(db, span)

    async def _renew_once(self, db: perco.Database, span: Span) -> None:
        """Restart the pin's lease: take the pin over from the task that has last done so."""
        try:
            async with db.pin(span.pin, lease_s=self._lease_s, ts=span.ts, owner=_owner(self._asked), keep=True):
                pass
        except UsageError:
            if not any((pin.name, pin.ts) == (span.pin, span.ts) for pin in await db.pins()):
                raise
            # Another task has taken it over between two steps of this one, which has just restarted the lease.

    def columns_of(self, table: perco.Table[Any]) -> list[perco.Column[Any, Any]]:
        """The columns of the frame, which may be fewer than the options name, and in another order."""
        names = [name for name in self._schema.fieldNames() if name != self._asked.key]
        missing = [name for name in names if name not in table.columns]
        if missing:
            raise SchemaMismatch(
                f"table {table.name!r} has no column {missing[0]!r}; it has {', '.join(table.columns)}"
            )
        columns = [table.columns[name] for name in names]
        types.schema_of(table, self._asked.key, columns)
        for field in self._schema:
            codec = table.key if field.name == self._asked.key else table.columns[field.name].codec
            types.must_read(f"{table.name}.{field.name}", codec, field.dataType)
        return columns


class Batch(RowBatch):
    """Collects the rows of a frame."""

    def __init__(
        self, table: perco.Table[Any], columns: list[perco.Column[Any, Any]], key: str, schema: StructType
    ) -> None:
        super().__init__(types.fields_of(table, columns, key, schema))

    def convert(self, field: Field, value: Any, key: Any) -> Any:
        try:
            return super().convert(field, value, key)
        except ValueError as error:
            raise SchemaMismatch(
                f"{field.column!r} of key {key!r} does not fit the frame's schema: {error}; read the column as a "
                "string, and convert it with from_json"
            ) from error
