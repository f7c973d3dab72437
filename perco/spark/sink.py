"""`df.write.format("perco")`: cells of a data frame, some rows to a transaction.

`append` sets the cells that the frame has values for; `overwrite` also deletes those for which it has null. Cells that
the frame does not have, and rows, stay in both: nothing is truncated.

A row takes effect once, though Spark runs a task again or twice at a time: a mark of the ledger lies beside its cells.
Else a task that is run again could put a value back that somebody has changed since. Of two rows of one key one takes
effect.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import trio
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import ByteType, DataType, DoubleType, FloatType, IntegerType, LongType, ShortType, StructType

import perco
from perco.errors import SchemaMismatch, UsageError
from perco.spark import ledger as ledgers, types
from perco.spark.ledger import LEDGER, Ledger, Watch, surely
from perco.spark.partition import one_error
from perco.spark.store import Store
from perco.tuning import collecting_less

OPTIONS: Final = ("table", "url", "path", "key")
_ROWS: Final = 100  # in a transaction
_BYTES: Final = 1 << 20
_CONCURRENCY: Final = 16
_ATTEMPTS: Final = 50
_WIDER: Final[dict[type[DataType], DataType]] = {  # what is stored as something wider
    ByteType: LongType(),
    ShortType: LongType(),
    IntegerType: LongType(),
    FloatType: DoubleType(),
}


@dataclass
class Written(WriterCommitMessage):
    """What a task has written: rows, and those that had been before."""

    rows: int
    skipped: int


class PercoWriter(DataSourceArrowWriter):
    """Writes a frame. Made where the driver plans, and sent to the tasks."""

    def __init__(self, store: Store, table: str, key: str, schema: StructType, *, overwrite: bool) -> None:
        self._store, self._table, self._key, self._overwrite = store, table, key, overwrite
        self._names = schema.fieldNames()
        self._ledger = trio.run(self._begin, schema)

    async def _begin(self, schema: StructType) -> Ledger:
        async with self._store.joining() as db:  # it is served, and what is to be written can be
            table = _table(db, self._table)
            _must_fit(table, self._key, schema)
            ledgers.taken_in(table)
            schema_of = perco.Schema(table, LEDGER)
        async with self._store.open(schema_of) as db:
            return await ledgers.begin(db, f"write {secrets.token_hex(8)}", table.name)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        with collecting_less():
            return trio.run(self._write, iterator)

    async def _write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        written = Written(0, 0)
        async with self._store.joining() as db:
            cells = Cells(_table(db, self._table), self._key, self._names, overwrite=self._overwrite)
            watch = Watch(db, self._ledger)
            send, receive = trio.open_memory_channel[Any](0)
            with one_error():
                async with trio.open_nursery() as nursery, send:
                    async with receive:
                        for _ in range(_CONCURRENCY):
                            nursery.start_soon(self._take, db, cells, watch, receive.clone(), written)
                    while (batch := await trio.to_thread.run_sync(next, batches, None)) is not None:
                        for some in _pieces(batch):
                            await send.send(some)
        return written

    async def _take(
        self,
        db: perco.Database,
        cells: Cells,
        watch: Watch,
        receive: trio.MemoryReceiveChannel[list[dict[str, Any]]],
        written: Written,
    ) -> None:
        retrying = db.options(attempts=_ATTEMPTS)
        async with receive:
            async for rows in receive:
                done = await surely(retrying, self._put, cells, watch, rows)
                written.rows += done
                written.skipped += len(rows) - done

    async def _put(self, txn: perco.Transaction, cells: Cells, watch: Watch, rows: list[dict[str, Any]]) -> int:
        ledger, marks = self._ledger, ledgers.taken_in(cells.table)
        keyed = [(cells.key_of(row), row) for row in rows]
        found = await watch.all_before(marks, [key for key, _ in keyed])
        done = 0
        for key, row in keyed:
            if not ledger.has(found[key]):
                found[key] = mark = await ledger.marked(txn, found[key])
                txn.set(marks, key, mark)
                cells.put(txn, key, row)
                done += 1
        return done

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        trio.run(self._end)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        trio.run(self._end)

    async def _end(self) -> None:
        async with self._store.joining() as db:
            await ledgers.acknowledge(db, self._ledger.job)


class Cells:
    """Sets the cells of a row of the frame."""

    def __init__(self, table: perco.Table[Any], key: str, names: list[str], *, overwrite: bool) -> None:
        self.table, self._key, self._overwrite = table, key, overwrite
        self._make_key = types.writing(table.key)
        self._columns: list[tuple[str, perco.Column[Any, Any], Callable[[Any], Any] | None]] = [
            (name, table.columns[name], types.writing(table.columns[name].codec)) for name in names if name != key
        ]

    def key_of(self, row: dict[str, Any]) -> Any:
        """Raises: UsageError, with the row."""
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
        """Raises: UsageError, with the row."""
        try:
            for name, column, make in self._columns:
                value = row[name]
                if value is not None:
                    txn.set(column, key, value if make is None else make(value))
                elif self._overwrite:
                    txn.delete(column, key)
        except (perco.UsageError, TypeError, ValueError) as error:
            raise self._cannot(row, error) from error

    def _cannot(self, row: dict[str, Any], error: Exception) -> UsageError:
        return UsageError(f"a row of table {self.table.name!r} cannot be written, {error}: {str(row)[:300]}")


def _table(db: perco.Database, name: str) -> perco.Table[Any]:
    if name not in db.schema.tables:
        raise UsageError(f"there is no table {name!r} to write to; there are: {', '.join(sorted(db.schema.tables))}")
    return db.schema.tables[name]


def _must_fit(table: perco.Table[Any], key: str, schema: StructType) -> None:
    """Raises: SchemaMismatch, UsageError."""
    names = schema.fieldNames()
    if key not in names:
        raise UsageError(f"the frame has no column {key!r} for the table's key; name it with .option('key', ...)")
    for field in schema:
        if field.name != key and field.name not in table.columns:
            raise SchemaMismatch(
                f"table {table.name!r} has no column {field.name!r}; it has {', '.join(table.columns)}"
            )
        codec = table.key if field.name == key else table.columns[field.name].codec
        wanted = types.spark_type(codec)
        given = _WIDER.get(type(field.dataType), field.dataType)
        if isinstance(wanted, StructType):
            fits = isinstance(given, StructType) and [f.dataType for f in given] == [f.dataType for f in wanted]
        else:
            fits = given == wanted
        if not fits:
            raise SchemaMismatch(
                f"{table.name}.{field.name} takes {wanted.simpleString()}, and the frame has "
                f"{field.dataType.simpleString()}; cast it before writing"
            )


def _pieces(batch: pa.RecordBatch) -> Iterator[list[dict[str, Any]]]:
    """Its rows, so many at a time that they fit into a transaction; one alone that is larger."""
    rows = max(1, min(_ROWS, _BYTES * batch.num_rows // max(1, batch.nbytes)))
    for at in range(0, batch.num_rows, rows):
        some: list[dict[str, Any]] = []
        size = 0
        for row in batch.slice(at, rows).to_pylist():  # some may be much larger than most
            here = sum(len(value) for value in row.values() if isinstance(value, str | bytes))
            if some and size + here > _BYTES:
                yield some
                some, size = [], 0
            some.append(row)
            size += here
        yield some
