"""`spark.readStream.format("perco")`: the changes of a table, from its log.

    offset     a timestamp: all that committed at or below it has been read. While the stream begins with a snapshot,
               also the row up to which the snapshot has been read
    batch      the changes between two offsets, whole transactions; the same rows each time it is read (E5)
    partition  some tablets of the table or, if there are too few, a piece of the batch's time in one of them

Spark keeps the offsets in the checkpoint. If a query fails, the next one reads the batch again that was not committed
yet. So each change comes exactly once to a sink that takes each batch once.

The reader on the driver pins the offset from which Spark may read again. It renews the pin as long as the query runs,
and moves it on with each batch. The pin's name is in the offsets, so a query that goes on from the checkpoint takes the
pin over.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import pyarrow as pa
import trio
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

import perco
from perco.database.inside import inside
from perco.errors import HistoryGone, SnapshotTooOld, Unavailable, UsageError, WriteUnknown
from perco.history import slices
from perco.spark import changed, ranges
from perco.spark.partition import one_error
from perco.spark.ranges import Range
from perco.spark.store import Store, in_task
from perco.spark.streaming import Loop, streamed
from perco.spark.workers import working
from perco.txn.snapshot import scan_between

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
else:
    try:
        from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
    except ImportError:  # PySpark 4.1: a batch has all that there is
        ReadLimit = ReadMaxRows = None
        SupportsTriggerAvailableNow = object

BOUNDED: Final = ReadMaxRows is not None  # whether Spark lets a source bound a batch
ROWS: Final = 100_000  # changed in a batch, unless `maxRows` says otherwise
NOW: Final = "now"
SNAPSHOT: Final = "snapshot"
_HEARTBEAT_S: Final = 60.0  # the offset advances at least this often, even if nothing changes
_WAIT_S: Final = 0.1  # how long a look at the log waits for changes
_POLL_S: Final = 0.01
_ROWS_PER_PART: Final = 10_000
_TAKEOVERS: Final = 20  # attempts to take over a pin that tasks take over at the same time


class Following(NamedTuple):
    """The table that a stream reads, and its options.

    Attributes:
        since: SNAPSHOT: first the table as it is, then its changes; NOW: what changes from now on; a timestamp or a
            time: what has changed since.
        rows: how many rows may change in a batch. `partitions`: at least so many, if that is possible.
        lease_s: for how many seconds after its end a query holds the changes from which it would go on.
    """

    store: Store
    table: str
    key: str
    since: int | datetime | str
    rows: int
    partitions: int
    net: bool
    preimages: bool
    lease_s: float


class Frames(Protocol):
    """Reads rows of the table as of a timestamp."""

    def columns_of(self, table: perco.Table[Any]) -> list[perco.Column[Any, Any]]: ...
    async def spans(
        self, db: perco.Database, table: perco.Table[Any], whole: Range, ts: int, pin: str
    ) -> Sequence[InputPartition]: ...
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]: ...


class Offset(NamedTuple):
    """Where a stream is.

    Attributes:
        ts: all that committed at or below it has been read; None: not known yet, see `begin`.
        row: of the snapshot at `ts`, only the rows before this one have been read, in hex; None: all.
        stream: the stream's name.
        begin: NOW or SNAPSHOT, until the first batch has decided on the timestamp.
    """

    ts: int | None = None
    row: str | None = None
    stream: str | None = None
    begin: str | None = None

    @classmethod
    def of(cls, table: str, offset: dict[str, Any]) -> Offset:
        """Raises: UsageError, if the offset is not that of a stream of the table."""
        found = offset.get("table")
        if found != table:
            raise UsageError(
                f"this checkpoint belongs to a stream of table {found!r}, not of {table!r}: give each stream a "
                "checkpointLocation of its own"
            )
        return cls(**{name: value for name, value in offset.items() if name != "table"})

    def packed(self, table: str) -> dict[str, Any]:
        return {"table": table} | {name: value for name, value in self._asdict().items() if value is not None}


class Part(InputPartition):
    """The changes that one task reads: those of the rows in a range, with commit_ts in (since, upto]."""

    range: Range
    since: int
    upto: int

    def __init__(self, range: Range, since: int, upto: int) -> None:
        super().__init__(None)
        self.range, self.since, self.upto = range, since, upto


class SnapshotPart(InputPartition):
    """The rows of the snapshot that one task reads, as of a timestamp."""

    span: InputPartition
    ts: int

    def __init__(self, span: InputPartition, ts: int) -> None:
        super().__init__(None)
        self.span, self.ts = span, ts


def must_be_logged(db: perco.Database, table: perco.Table[Any]) -> None:
    """Raises: UsageError, if the table keeps no log."""
    db.changes(table)


@contextmanager
def _explained() -> Iterator[None]:
    """Adds to an error about lost history what to do with the stream."""
    try:
        yield
    except HistoryGone as error:
        error.add_note(
            "This stream cannot go on from its checkpoint: changes that it has not read are gone. Start it with a new "
            "checkpointLocation: it then begins with a snapshot of the table. A stream that does not run holds its "
            "changes for `lease` seconds, and the table keeps them for perco.Keep(seconds=...)."
        )
        raise


class Hold:
    """The stream's pin."""

    def __init__(self, db: perco.Database, table: str, lease_s: float) -> None:
        self._db, self._table, self._lease_s = db, table, lease_s
        self._pinned: tuple[str, int] | None = None
        self._alone = trio.Lock()

    @staticmethod
    def name(stream: str) -> str:
        return f"spark stream {stream}"

    async def move(self, stream: str, ts: int) -> None:
        """Hold the changes after a timestamp, and no longer those before.

        Raises: HistoryGone; UsageError for the future.
        """
        oracle = inside(self._db).oracle
        async with self._alone:
            if self._pinned != (stream, ts):
                if ts > oracle.last and ts > await oracle.newest():
                    raise UsageError(
                        f"this stream is at timestamp {ts}, and the store's timestamps so far are 1 to {oracle.last}. "
                        "It is another store, or an older copy: start the stream with a new checkpointLocation"
                    )
                await self._put(stream, ts)
                self._pinned = stream, ts

    async def keep(self) -> None:
        """Renew the pin for ever."""
        while True:
            await trio.sleep(self._lease_s / 3)
            async with self._alone:
                if self._pinned is not None:
                    try:
                        await self._put(*self._pinned)
                    except (Unavailable, WriteUnknown, HistoryGone):
                        self._pinned = None  # the next batch makes the pin again, or says what is gone

    async def _put(self, stream: str, ts: int) -> None:
        oracle = inside(self._db).oracle
        name, owner = self.name(stream), f"spark: the stream of {self._table}"
        for left in reversed(range(_TAKEOVERS)):
            standing = await oracle.pins.find(name)
            over = None if standing is None else standing.id
            try:
                await oracle.pins.put(name, owner, ts, self._lease_s, secrets.token_hex(8), over)
                break
            except UsageError:  # a task that reads the snapshot has taken it over meanwhile
                if not left:
                    raise
            except SnapshotTooOld as error:
                raise HistoryGone(ts, await oracle.cut(self._table), self._table) from error
        cut = await oracle.cut(self._table)
        if cut > ts:
            raise HistoryGone(ts, cut, self._table)


class _Driver:
    """The reader's part on the driver, which has the store open for as long as the query runs."""

    def __init__(self, following: Following, frames: Frames) -> None:
        self._of, self._frames = following, frames
        self._stream = secrets.token_hex(4)
        self._last: Offset | None = None
        self._rows: tuple[int, int, int] | None = None  # since, upto, and how many rows changed between them
        self._upto: int | None = None
        self._advanced = 0.0

    async def run(self, ready: Callable[[], None]) -> None:
        async with self._of.store.joining() as db, trio.open_nursery() as nursery:
            self._db, self._parts = db, inside(db)
            self._table = db.schema.tables[self._of.table]
            must_be_logged(db, self._table)
            self._columns = self._frames.columns_of(self._table)
            self._hold = Hold(db, self._table.name, self._of.lease_s)
            self._advanced = trio.current_time()
            nursery.start_soon(self._hold.keep)
            ready()
            await trio.sleep_forever()

    async def initial(self) -> Offset:
        since = self._of.since
        if isinstance(since, datetime):
            since, _ = await self._parts.oracle.at(since.timestamp())
        return Offset(since) if isinstance(since, int) else Offset(begin=since)

    async def prepare(self) -> None:
        """From now on, go no further than the present."""
        self._upto = await self._present()

    async def _present(self, held: str | None = None) -> int:
        """A frontier (E2), which the pin of stream `held` then holds."""
        async with self._db.snapshot() as snap:
            ts = (await slices.reached(self._parts.engine, self._table, snap.start_ts)).ts
            if held is not None:
                await self._hold.move(held, ts)
        return ts

    async def latest(self, start: Offset | None, rows_max: int | None) -> Offset:
        """The end of the next batch; the start, if there is none.

        Args: `start`: None: Spark does not say.
        """
        self._last = await self._latest(start or self._last, rows_max, told=start is not None)
        return self._last

    async def _latest(self, start: Offset | None, rows_max: int | None, *, told: bool) -> Offset:
        if start is None:
            return Offset(await self._present(), stream=self._stream)
        if start.ts is None:  # a batch without rows, which notes where the stream begins
            ts = self._upto or await self._present(self._stream)
            whole = start.begin == NOW or rows_max is None
            return Offset(ts, None if whole else "", self._stream)
        self._stream = start.stream or self._stream
        await self._hold.move(self._stream, start.ts)
        if start.row is not None:
            return await self._further(start, start.ts, bytes.fromhex(start.row), rows_max)
        if self._upto is None and not await self._news(start.ts):
            return start
        end = await slices.reached(self._parts.engine, self._table, start.ts, rows_max, self._upto)
        self._rows = start.ts, end.ts, end.rows
        self._advanced = trio.current_time()
        return Offset(end.ts, stream=self._stream)

    async def _further(self, start: Offset, ts: int, low: bytes, rows_max: int | None) -> Offset:
        """The end of a batch of the snapshot."""
        if rows_max is not None:
            async with self._db.snapshot(ts=ts) as snap:
                rows = 0
                async for row in scan_between(snap, self._table, low, None, columns=self._columns, limit=rows_max + 1):
                    rows += 1
                    if rows > rows_max:
                        return start._replace(row=self._table.row(row.key).hex())
        return start._replace(row=None)

    async def _news(self, since: int) -> bool:
        """Wait a moment for changes; or until the offset should advance without any."""
        until, pause_s = trio.current_time() + _WAIT_S, _POLL_S
        while trio.current_time() < self._advanced + _HEARTBEAT_S:
            if await slices.has_news(self._parts.engine, self._table, since):
                return True
            if trio.current_time() >= until:
                return False
            await trio.sleep(pause_s)
            pause_s *= 2
        return True

    async def plan(self, start: Offset, end: Offset) -> list[InputPartition]:
        assert end.ts is not None, "`latest` has decided on it"
        self._stream = start.stream or end.stream or self._stream
        await self._hold.move(self._stream, end.ts if start.ts is None else start.ts)
        if start.begin == NOW:
            return []
        if start.ts is None or start.row is not None:
            whole = Range(bytes.fromhex(start.row or ""), None if end.row is None else bytes.fromhex(end.row))
            if whole.empty:
                return []
            spans = await self._frames.spans(self._db, self._table, whole, end.ts, Hold.name(self._stream))
            return [SnapshotPart(span, end.ts) for span in spans]
        tablets = ranges.cut(Range(), self._parts.place.store.bounds(self._table.name))
        if self._rows is None or self._rows[:2] != (start.ts, end.ts):  # a batch that is read again
            wanted = len(tablets)
        else:
            wanted = -(-self._rows[2] // _ROWS_PER_PART)
        return list(parts_of(tablets, start.ts, end.ts, wanted, self._of))

    async def committed(self, end: Offset) -> None:
        if end.ts is not None:
            await self._hold.move(end.stream or self._stream, end.ts)


def parts_of(tablets: list[Range], since: int, upto: int, wanted: int, of: Following) -> Iterator[Part]:
    """Divide the changes of a table in (since, upto] into about `wanted` parts, but at least `of.partitions`: tablets,
    several of them in a part if there are too many, and cut by time if there are too few. Net changes are not cut by
    time, since a part needs all changes of its rows. `wanted` 0: there are no changes."""
    if not wanted:
        return
    wanted = max(wanted, of.partitions)
    count = min(wanted, len(tablets))
    pieces = 1 if of.net else -(-wanted // count)
    for n in range(count):
        own = tablets[len(tablets) * n // count : len(tablets) * (n + 1) // count]
        cuts = [since + (upto - since) * piece // pieces for piece in range(pieces + 1)]
        for after, until in itertools.pairwise(cuts):
            if after < until:
                yield Part(Range(own[0].low, own[-1].high), after, until)


class PercoStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the batches of a stream on the driver, and reads one partition in each task."""

    def __init__(self, following: Following, schema: StructType, frames: Frames) -> None:
        self._of, self._schema, self._frames = following, schema, frames
        self._running: tuple[_Driver, Loop] | None = None

    def _driver(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the part on the driver; there is none in a task."""
        with _explained(), one_error():
            if self._running is None:
                driver = _Driver(self._of, self._frames)
                self._running = driver, Loop(driver.run)
            driver, loop = self._running
            return loop.call(method, driver, *args)

    def initialOffset(self) -> dict[str, Any]:
        return self._packed(self._driver(_Driver.initial))

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._of.rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._driver(_Driver.prepare)

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Before PySpark 4.2, Spark passes nothing."""
        rows_max = getattr(limit, "max_rows", None)  # None: ReadAllAvailable
        return self._packed(self._driver(_Driver.latest, None if start is None else self._offset(start), rows_max))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        planned: list[InputPartition] = self._driver(_Driver.plan, self._offset(start), self._offset(end))
        return planned

    def commit(self, end: dict[str, Any]) -> None:
        self._driver(_Driver.committed, self._offset(end))

    def stop(self) -> None:
        """The pin stays until its lease ends, for a query that goes on."""
        if self._running is not None:
            self._running[1].close()
            self._running = None

    def _offset(self, offset: dict[str, Any]) -> Offset:
        return Offset.of(self._of.table, offset)

    def _packed(self, offset: Offset) -> dict[str, Any]:
        return offset.packed(self._of.table)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, SnapshotPart):
            for rows in self._frames.read(partition.span):
                yield changed.inserted(rows, partition.ts, self._schema)
        elif isinstance(partition, Part):
            with _explained(), working():
                yield from streamed(lambda send: self._read(partition, send))

    async def _read(self, part: Part, send: Callable[[pa.RecordBatch], Any]) -> None:
        with one_error():
            async with in_task(self._of.store, self._of.store.joining()) as db:
                table = db.schema.tables[self._of.table]
                columns = self._frames.columns_of(table)
                made = changed.Batches(table, self._of.key, self._schema)
                net = changed.Net(table) if self._of.net else None
                stream = slices.Slice(inside(db).engine, table, columns, part.since, part.upto, *part.range)
                async for changes in stream:
                    for row in changes.rows:
                        if net is not None:
                            net.add(changes.commit_ts, row)
                            continue
                        for batch in made.add(changes.commit_ts, row, preimages=self._of.preimages):
                            await send(batch)
                for commit_ts, row in net.taken() if net is not None else ():
                    for batch in made.add(commit_ts, row, preimages=self._of.preimages):
                        await send(batch)
                for batch in made.taken():
                    await send(batch)
