"""`df.write.format("perco")`: writes the cells of a data frame, several rows in each transaction.

`append` sets the cells for which the frame has values; `overwrite` also deletes the cells for which the frame has null.
Both keep rows and cells that are not in the frame: nothing is truncated.

A row takes effect once, even if Spark runs a task again or twice at once, because the row's transaction also writes a
mark of the ledger. Otherwise, a repeated task could put back a value that has been changed since. A micro-batch of
a stream, too, takes effect once, even if Spark writes it again: the ledger has the number of the last batch that was
written.

If several rows have one key, only one of them takes effect: for the others, its mark looks like that of an earlier
attempt. The driver detects this when all tasks have ended. The attempts whose results Spark kept have processed each
row of the frame once, and each key has one mark. So if there are more rows than marks, some rows share keys. An attempt
that Spark discarded cannot cause a false alarm, because it only adds marks. If no row was skipped, each row has written
a mark of its own, so perco does not count the marks.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import trio
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

import perco
from perco.errors import SchemaMismatch, UsageError
from perco.schema.schema import Table
from perco.spark import ledger as ledgers, types
from perco.spark.failing import FailedRow, RowRefused, report
from perco.spark.ledger import LEDGER, KeyNotUnique, Ledger, marks_before, surely
from perco.spark.partition import one_error, short, size_of
from perco.spark.store import Store, in_task
from perco.spark.workers import working

_EVERY: Final = ("table", "url", "path", "key", "failures_max")
OPTIONS: Final = (*_EVERY, "job", "batch", "failures_to")
STREAM_OPTIONS: Final = (*_EVERY, "nulls")
QUERY: Final = "sql.streaming.queryId"  # Spark sets this property on the jobs of a stream
_BATCH: Final = "streaming.sql.batchId"
_ROWS: Final = 100  # in a transaction, at most
_BYTES: Final = 1 << 20  # in a transaction, except for a larger row
_CONCURRENCY: Final = 16
_ATTEMPTS: Final = 50
_SKIPPED_KEPT: Final = 1000  # keys of skipped rows that a task remembers, to name shared keys
_WROTE_KEPT: Final = 10_000  # keys of written rows that a task remembers, for the same purpose
_FAILED_KEPT: Final = 1000  # failed rows that a task reports
_NAMED: Final = 5  # how many shared keys an error names


@dataclass
class Written(WriterCommitMessage):
    """A task's result.

    Attributes:
        rows, skipped: the number of rows written; the number of rows skipped, because another attempt had written them,
            or had written another row with the same key.
        ledger: None: the whole batch had taken effect before.
        again: how many rows were skipped, by key as text, for the first thousand keys.
        both: those of these keys for which this attempt also wrote a row.
        failed: the number of rows that cannot be written; failures: the first of them.
        stopped: whether the task stopped early, because there were too many.
    """

    rows: int
    skipped: int
    ledger: Ledger | None = None
    again: dict[str, int] = field(default_factory=dict)
    both: set[str] = field(default_factory=set)
    failed: int = 0
    failures: list[FailedRow] = field(default_factory=list)
    stopped: bool = False


class _Tally:
    """Counts of the rows that a task wrote and skipped, and that failed, and some of their keys.

    Attributes: `full`, whether more rows have failed than may fail.
    """

    def __init__(self, failures_max: int) -> None:
        self.rows = self.skipped = self.failed = 0
        self.full = False
        self._failures_max = failures_max
        self._failures: list[FailedRow] = []
        self._wrote: set[Any] = set()
        self._skipped: dict[Any, str] = {}
        self._again: Counter[Any] = Counter()

    def add(self, wrote: list[Any], skipped: list[tuple[Any, Any]]) -> None:
        """Count rows. `wrote`: the mark's key for each row written; `skipped`: for each row skipped, the mark's key and
        the row's own key."""
        self.rows += len(wrote)
        self.skipped += len(skipped)
        if len(self._wrote) < _WROTE_KEPT:
            self._wrote.update(wrote)
        for at, key in skipped:
            if at not in self._skipped:
                if len(self._skipped) >= _SKIPPED_KEPT:
                    continue
                self._skipped[at] = repr(key)
            self._again[at] += 1

    def fail(self, error: RowRefused) -> None:
        self.failed += 1
        self.full = self.failed > self._failures_max
        if len(self._failures) < _FAILED_KEPT:
            self._failures.append(FailedRow.of(error))

    def result(self, ledger: Ledger) -> Written:
        told = self._skipped
        again = {told[at]: count for at, count in self._again.items()}
        both = {name for at, name in told.items() if at in self._wrote}
        return Written(self.rows, self.skipped, ledger, again, both, self.failed, self._failures, self.full)


class Sink:
    """The destination of a frame's rows. A plain value, which is sent to the tasks.

    Rows that cannot be written do not fail their task, because Spark would run it again, in vain. Tasks report them,
    and the driver decides.

    Args: `failures_max`: how many rows may fail; `failures_to`: the file that has them afterwards, or "".
    """

    store: Store
    table: str
    key: str

    def __init__(
        self,
        store: Store,
        table: str,
        key: str,
        schema: StructType,
        *,
        overwrite: bool,
        failures_max: int = 0,
        failures_to: str = "",
    ) -> None:
        self.store, self.table, self.key, self._overwrite = store, table, key, overwrite
        self._schema, self._failures_max, self._failures_to = schema, failures_max, failures_to

    async def declare(self, schema: StructType) -> None:
        """Check that the frame fits the table, and declare the ledger and the table's column of marks. Raises:
        SchemaMismatch, UsageError if the frame does not fit; the errors of `perco.open`."""
        async with self.store.joining() as db:  # with the store's own schema: the frame's columns must exist already
            table = _table(db, self.table)
            must_fit(table, self.key, schema)
            ledgers.taken_in(table)
        async with self.store.open(perco.Schema(table, LEDGER)):
            pass

    async def write(self, db: perco.Database, ledger: Ledger | None, batches: Iterator[pa.RecordBatch]) -> Written:
        """Write a task's rows. `ledger`: None if all rows have been written before."""
        if ledger is None:
            return Written(0, await trio.to_thread.run_sync(_counted, batches))
        tally = _Tally(self._failures_max)
        cells = Cells(_table(db, self.table), self.key, self._schema, overwrite=self._overwrite)
        send, receive = trio.open_memory_channel[Any](0)
        with one_error():
            async with trio.open_nursery() as nursery, send:
                async with receive:
                    for _ in range(_CONCURRENCY):
                        nursery.start_soon(_take, db, ledger, cells, receive.clone(), tally)
                while not tally.full and (batch := await trio.to_thread.run_sync(next, batches, None)) is not None:
                    for some in _pieces(batch):
                        await send.send(some)
        return tally.result(ledger)

    async def check(self, db: perco.Database, written: list[Written]) -> None:
        """Check a write whose tasks have all ended. Raises: UsageError, if too many rows have failed; KeyNotUnique."""
        rows = [row for each in written for row in each.failures]
        failed, stopped = sum(each.failed for each in written), any(each.stopped for each in written)
        report(self.table, failed, rows, self._failures_max, self._failures_to, stopped)
        await _must_be_unique(db, self.key, written)


async def _take(
    db: perco.Database,
    ledger: Ledger,
    cells: Cells,
    receive: trio.MemoryReceiveChannel[list[dict[str, Any]]],
    tally: _Tally,
) -> None:
    retrying = db.options(attempts=_ATTEMPTS)
    async with receive:
        async for rows in receive:
            while rows and not tally.full:
                try:
                    tally.add(*await surely(retrying, _put, db, ledger, cells, rows))
                    break
                except RowRefused as error:
                    tally.fail(error)
                    rows = [row for row in rows if row is not error.row]


async def _put(
    txn: perco.Transaction, db: perco.Database, ledger: Ledger, cells: Cells, rows: list[dict[str, Any]]
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Write some rows; returns the arguments of `_Tally.add`."""
    keyed = [(cells.key_of(row), row) for row in rows]
    marks = [ledger.mark(db, key if ledger.beside else cells.table.row(key)) for key, _ in keyed]
    found = await marks_before(txn, ledger, marks)
    wrote: list[Any] = []
    skipped: list[tuple[Any, Any]] = []
    for (key, row), mark in zip(keyed, marks, strict=True):
        at = mark[1]
        if ledger.has(found[at]):
            skipped.append((at, key))
            continue
        found[at] = written = await ledger.marked(txn, found[at])
        txn.set(*mark, written)
        cells.put(txn, key, row)
        wrote.append(at)
    return wrote, skipped


async def _must_be_unique(db: perco.Database, key: str, written: list[Written]) -> None:
    """Check the keys of a write whose tasks have all ended. Raises: KeyNotUnique."""
    skipped = sum(each.skipped for each in written)
    ledger = next((each.ledger for each in written if each.ledger is not None), None)
    if not skipped or ledger is None:
        return
    rows = skipped + sum(each.rows for each in written)
    marks = await ledgers.taken(db, ledger)
    if marks is None or rows <= marks:
        return
    left_out = rows - marks
    shared = _shared(written, every=left_out == skipped)
    remedy = (
        f"Write one row of each key, as after dropDuplicates([{key!r}]) (of a stream, in foreachBatch). The rows that "
        f"were written stay{'' if ledger.beside else ', even if this batch is written again'}"
    )
    if not shared:
        raise KeyNotUnique(
            f"the key is not unique: {left_out} of {rows} rows have the key of another row, and have not been written. "
            "Tasks of this write ran more than once, so perco does not know which keys these are; "
            f"groupBy({key!r}).count().filter('count > 1') shows them. {remedy}",
            {},
        )
    name, count = next(iter(shared.items()))
    least = "" if left_out == skipped == sum(sum(each.again.values()) for each in written) else "at least "
    raise KeyNotUnique(
        f"the key is not unique: {least}{count} rows have the key {short(name)}, and only one of them has been written "
        f"({left_out} of {rows} rows have been left out). {remedy}",
        shared,
    )


def _shared(written: list[Written], *, every: bool) -> dict[str, int]:
    """Some keys that several rows share, each with the number of its rows, as far as it is known.

    Args: `every`: whether each skipped row shares its key with another row. If not, some rows were skipped because an
    earlier attempt had written them. Then a key counts as shared only if the attempts that Spark kept had at least two
    rows of it.
    """
    again: Counter[str] = Counter()
    both: set[str] = set()
    for each in written:
        again.update(each.again)
        both |= each.both
    counts = ((name, count + (every or name in both)) for name, count in again.most_common())
    return dict(itertools.islice(((name, count) for name, count in counts if count > 1), _NAMED))


def _counted(batches: Iterator[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


class PercoWriter(DataSourceArrowWriter):
    """Writes a frame. Spark creates the writer on the driver, and sends it to the tasks.

    Args: `job`, `batch`: of a micro-batch, which Spark may repeat; "" and 0 for a write that Spark makes once.
    """

    def __init__(self, sink: Sink, schema: StructType, job: str = "", batch: int = 0) -> None:
        self._sink, self._named, self._job, self._batch = sink, bool(job), job or f"write {secrets.token_hex(8)}", batch
        self._ledger = trio.run(self._begin, schema)

    async def _begin(self, schema: StructType) -> Ledger | None:
        await self._sink.declare(schema)
        async with self._sink.store.joining() as db:
            if self._named:
                return await ledgers.begin_batch(db, self._job, self._batch, self._sink.table)
            return await ledgers.begin(db, self._job, self._sink.table)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        if not self._named and micro_batch() is not None:
            raise UsageError(
                "this frame is a micro-batch of a stream, which Spark writes again after a failure: older values would "
                "replace newer ones. Give .option('job', NAME).option('batch', batch_id) to have it written once; or "
                "let the stream write, with stream.writeStream.format('perco')"
            )
        return _run(self._write, iterator)

    async def _write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        async with in_task(self._sink.store, self._sink.store.joining()) as db:
            return await self._sink.write(db, self._ledger, batches)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Raises: UsageError, if too many rows have failed; KeyNotUnique. In these cases, Spark calls `abort`."""
        trio.run(self._end, [each for each in messages if isinstance(each, Written)])

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        if not self._named:  # a named write may be repeated; the repetition finds its marks
            trio.run(functools.partial(self._end, [], check=False))

    async def _end(self, written: list[Written], *, check: bool = True) -> None:
        async with self._sink.store.joining() as db:
            if check:
                await self._sink.check(db, written)
            if self._named:
                await ledgers.end_batch(db, self._job, self._batch)
            else:
                await ledgers.acknowledge(db, self._job)


class PercoStreamWriter(DataSourceStreamArrowWriter):
    """Writes a stream, each of its micro-batches once. Spark creates one writer to write a batch, and another one to
    commit the batch.

    A stream is identified by the id of its query, which is in its checkpoint. Spark passes the id and the batch number
    to the tasks.
    """

    def __init__(self, sink: Sink, schema: StructType) -> None:
        self._sink = sink
        trio.run(sink.declare, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _run(self._write, iterator)

    async def _write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        found = micro_batch()
        if found is None:
            raise UsageError(
                "this Spark does not tell tasks which micro-batch they write, so perco cannot write each batch once"
            )
        query, batch = found
        async with in_task(self._sink.store, self._sink.store.joining()) as db:
            ledger = await ledgers.begin_batch(db, f"stream {query} {self._sink.table}", batch, self._sink.table)
            return await self._sink.write(db, ledger, batches)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Raises: UsageError, if too many rows have failed; KeyNotUnique. In these cases, the batch stays open, and a
        repetition finds its marks."""
        trio.run(self._end, [each for each in messages if isinstance(each, Written)], batchId)

    async def _end(self, written: list[Written], batch: int) -> None:
        async with self._sink.store.joining() as db:
            await self._sink.check(db, written)
            for job in {each.ledger.job for each in written if each.ledger is not None}:
                await ledgers.end_batch(db, job, batch)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Keep the marks: Spark repeats the batch, and the repetition finds them."""


def micro_batch() -> tuple[str, int] | None:
    """The query's id and the number of this task's micro-batch; None: the task has no micro-batch."""
    context = TaskContext.get()
    if context is None:
        return None
    query, batch = context.getLocalProperty(QUERY), context.getLocalProperty(_BATCH)
    return None if query is None or batch is None else (query, int(batch))


def _run(function: Callable[..., Awaitable[Written]], batches: Iterator[pa.RecordBatch]) -> Written:
    with working():
        return trio.run(function, batches)


class Cells:
    """Writes the cells of a frame's rows."""

    table: Table[Any]

    def __init__(self, table: perco.Table[Any], key: str, schema: StructType, *, overwrite: bool) -> None:
        self.table, self._key, self._overwrite = table, key, overwrite
        self._make_key = types.writing(table.key, schema[key].dataType)
        self._columns: list[tuple[str, perco.Column[Any, Any], Callable[[Any], Any] | None]] = [
            (each.name, table.columns[each.name], types.writing(table.columns[each.name].codec, each.dataType))
            for each in schema
            if each.name != key
        ]

    def key_of(self, row: dict[str, Any]) -> Any:
        """The table's key for a row. Raises: RowRefused."""
        key = row[self._key]
        try:
            if key is None:
                raise UsageError("its key is null")
            key = key if self._make_key is None else self._make_key(key)
            self.table.row(key)
        except (perco.PercoError, TypeError, ValueError) as error:
            raise self._cannot(row, error) from error
        return key

    def put(self, txn: perco.Transaction, key: Any, row: dict[str, Any]) -> None:
        """Write the cells of a row. Raises: RowRefused."""
        try:
            for name, column, make in self._columns:
                value = row[name]
                if value is not None:
                    txn.set(column, key, value if make is None else make(value))
                elif self._overwrite:
                    txn.delete(column, key)
        except (perco.UsageError, TypeError, ValueError) as error:
            raise self._cannot(row, error) from error

    def _cannot(self, row: dict[str, Any], error: Exception) -> RowRefused:
        message = f"a row of table {self.table.name!r} cannot be written, {error}: {str(row)[:300]}"
        return RowRefused(message, row, row[self._key])


def _table(db: perco.Database, name: str) -> perco.Table[Any]:
    if name not in db.schema.tables:
        raise UsageError(f"there is no table {name!r} to write to; there are: {', '.join(sorted(db.schema.tables))}")
    return db.schema.tables[name]


def must_fit(table: perco.Table[Any], key: str, schema: StructType) -> None:
    """Check that a frame's columns fit the table. Raises: SchemaMismatch, UsageError."""
    names = schema.fieldNames()
    if key not in names:
        raise UsageError(f"the frame has no column {key!r} for the table's key; name it with .option('key', ...)")
    for part in schema:
        if part.name != key and part.name not in table.columns:
            raise SchemaMismatch(f"table {table.name!r} has no column {part.name!r}; it has {', '.join(table.columns)}")
        codec = table.key if part.name == key else table.columns[part.name].codec
        types.must_write(f"{table.name}.{part.name}", codec, part.dataType)


def _pieces(batch: pa.RecordBatch) -> Iterator[list[dict[str, Any]]]:
    """The rows of a batch, in pieces that fit into a transaction; a row that is too large for that is alone."""
    rows = max(1, min(_ROWS, _BYTES * batch.num_rows // max(1, batch.nbytes)))
    for at in range(0, batch.num_rows, rows):
        some: list[dict[str, Any]] = []
        size = 0
        piece = batch.slice(at, rows)
        for each in zip(*map(types.values, piece.columns), strict=True):
            row = dict(zip(piece.schema.names, each, strict=True))
            here = size_of(each)  # some rows may be much larger than most
            if some and size + here > _BYTES:
                yield some
                some, size = [], 0
            some.append(row)
            size += here
        yield some
