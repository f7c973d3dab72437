"""`perco.spark.bulk_load`: fills whole tables from data frames, in one step (P7).

Spark sorts the rows by key. Each task writes its part to a file of the store's folder (`SortedFile`); the owner of the
store then makes all files tablets at once. So the executors have to be on the machine that has the folder. A task that
fails, or runs twice, leaves a file that is not used: the driver publishes those of the attempts that Spark has counted.
"""

from __future__ import annotations

import functools
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import trio
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, StructType

import perco
from perco.database.inside import inside
from perco.errors import UsageError
from perco.schema.codecs import TupleCodec
from perco.spark import types
from perco.spark.failing import error_of, reason_first
from perco.spark.ledger import KeyNotUnique
from perco.spark.sink import must_fit
from perco.spark.store import Store, described, serve
from perco.tablets.loading import BulkLoad, Published
from perco.tablets.sorting import Layout, SameRow, SortedFile

_SORTED_BY_SPARK: Final = {  # as perco sorts them
    each.name for each in (perco.TEXT, perco.BYTES, perco.INT64, perco.DATE, perco.TIMESTAMP)
}
_ROW: Final = "perco row"  # the column of keys as stored, for other codecs
_WRITTEN: Final = "first binary, name string, rows bigint, cells bigint, error string"
_OFFSET: Final = 1 << 63
_pack_int: Final = struct.Struct(">Q").pack
_pack_float: Final = struct.Struct(">d").pack


@dataclass(frozen=True, slots=True)
class BulkLoaded:
    """The result of a bulk load.

    Attributes:
        ts: the timestamp of its commit.
        rows: how many rows it has, by table.
        tablets: how many tablets were made.
        seconds: how long it took; `paused_s`: how long writes to these tables waited.
    """

    ts: int
    rows: dict[str, int]
    tablets: int
    seconds: float
    paused_s: float

    def __str__(self) -> str:
        told = ", ".join(f"{rows} rows of {table}" for table, rows in self.rows.items())
        return f"{told}, in {self.tablets} tablets at {self.ts}, in {self.seconds:.1f} s"


def bulk_load(
    frames: Mapping[perco.Table[Any] | str, DataFrame],
    store: str | os.PathLike[str] | Store,
    *,
    schema: perco.Schema | None = None,
    key: str = "key",
    partitions: int | None = None,
) -> BulkLoaded:
    """Fill whole tables from data frames: all rows appear in one step, or none.

        perco.spark.bulk_load({app.docs: spark.read.parquet("docs/")}, "store/", schema=app.schema, key="url")

    The tables must be empty. Observers are notified of all rows. The store can be used meanwhile. The executors must be
    on the machine that has the store's folder; to load from other machines, into a database, or into a table that has
    rows, use `load` or `frame.write`.

    Args:
        frames: for each table, a frame: a column of keys, and columns of the table by their names. Null: no cell.
        store: a folder, which is served during the call; or an address, or a `Store`.
        schema: the schema to open the store with; by default the store's own.
        key: the name of the frames' column of keys.
        partitions: the number of tablets that each table gets, at most; by default, Spark's parallelism. Each is
            written by one task.

    Raises: UsageError if a table is not empty, or the store takes no bulk loads; SchemaMismatch if a frame does not
    fit; KeyNotUnique if two rows of a frame have one key; TaskFailed if a task fails for good; the errors of
    `perco.open`. Nothing has then been loaded.
    """
    if not isinstance(frames, Mapping) or not all(isinstance(frame, DataFrame) for frame in frames.values()):
        raise UsageError("bulk_load takes data frames by tables, such as {app.docs: frame}")
    if not frames:
        raise UsageError("bulk_load takes at least one frame")
    if schema is not None and not isinstance(schema, perco.Schema):
        raise UsageError(f"schema= takes a perco.Schema, not {schema!r}")
    began = time.perf_counter()
    spark = next(iter(frames.values())).sparkSession
    parts = partitions or spark.sparkContext.defaultParallelism
    named = {table.name if isinstance(table, perco.Table) else table: frame for table, frame in frames.items()}

    async def main(reached: Store) -> BulkLoaded:
        if schema is not None:
            async with reached.open(schema):
                pass
        async with reached.joining() as db:
            for table in list(named):
                if table not in db.schema.tables:
                    known = ", ".join(sorted(db.schema.tables)) or "none"
                    raise UsageError(f"there is no table {table!r} to load into; there are: {known}")
                must_fit(db.schema.tables[table], key, named[table].schema)
                frame, name = named.pop(table), db.schema.tables[table].name  # N18: as the store calls it
                if name in named:
                    raise UsageError(f"there are two frames for table {name!r}, which is also called {table!r}")
                named[name] = frame
            rows: dict[str, int] = {}

            def write(load: BulkLoad) -> dict[str, list[tuple[bytes, str]]]:
                files = {}
                for table, frame in named.items():
                    layout = Layout.of(inside(db).catalogue, table)
                    writing = _Writing(load, layout, db.schema.tables[table], key, frame.schema)
                    with described(spark, f"perco.spark.bulk_load: table {table!r}"):
                        files[table], rows[table] = _written(writing, frame, parts)
                return files

            done = await published(db, list(named), write)
            return BulkLoaded(done.ts, rows, done.tablets, time.perf_counter() - began, done.paused_s)

    with serve(store, spark) as reached, reason_first():
        return trio.run(main, reached)


async def published(
    db: perco.Database,
    tables: Sequence[str],
    write: Callable[[BulkLoad], dict[str, list[tuple[bytes, str]]]],
    build: str = "",
) -> Published:
    """Begin a bulk load, have its files written, in a thread, and publish them. `build`: the build of views to which it
    belongs."""
    owner = inside(db).owner
    load = await owner.begin_load(tables, build)
    try:
        files = await trio.to_thread.run_sync(write, load)
        return await owner.publish_load(load.id, files)
    finally:
        with trio.CancelScope(shield=True), suppress(perco.PercoError):
            await owner.end_load(load.id)


def _written(writing: _Writing, frame: DataFrame, parts: int) -> tuple[list[tuple[bytes, str]], int]:
    """The files of a frame's rows, in the order of the rows; and the number of rows."""
    table, key = writing.table, writing.key
    by = key
    if not {part.name for part in _parts(table.key)} <= _SORTED_BY_SPARK:
        by = _ROW
        schema = StructType([*frame.schema.fields]).add(_ROW, "binary", nullable=False)
        frame = frame.mapInArrow(functools.partial(_with_rows, table, key, writing.given[key]), schema)
    frame = frame.repartitionByRange(parts, by).sortWithinPartitions(by)
    found = frame.mapInArrow(writing, _WRITTEN).collect()
    for each in found:
        if each["error"]:
            raise error_of(each["error"], each["name"])
    files = sorted((bytes(each["first"]), each["name"]) for each in found)
    return files, sum(each["rows"] for each in found)


def _parts(codec: perco.Codec[Any]) -> Sequence[perco.Codec[Any]]:
    return codec.parts if isinstance(codec, TupleCodec) else (codec,)


# ------------------------------------------------------------------ on the executors


def _with_rows(
    table: perco.Table[Any], key: str, given: DataType, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = _keys(table, given, batch.column(key))
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, pa.array(rows, pa.binary())], names=[*batch.schema.names, _ROW]
        )


def _keys(table: perco.Table[Any], given: DataType, column: Any) -> Sequence[bytes]:
    """Keys as stored. `given`: their type in the frame. Raises: UsageError."""
    if column.null_count:
        raise UsageError(f"a row of table {table.name!r} cannot be loaded: its key is null")
    make = types.writing(table.key, given)
    try:
        if table.key.name in (perco.TEXT.name, perco.BYTES.name):
            return list(values_of(table.key, given, column))  # type: ignore[arg-type]  # none is null
        return [table.row(key if make is None else make(key)) for key in types.values(column)]
    except (TypeError, ValueError) as error:
        raise UsageError(f"a key of table {table.name!r} is wrong: {error}") from error


def values_of(codec: perco.Codec[Any], given: DataType, column: Any) -> Iterable[bytes | None]:
    """The values of an Arrow column, as stored. `given`: their type in the frame."""
    if codec.name == perco.TEXT.name:
        column.validate(full=True)  # a cast to a string in Spark may give what is no UTF-8
        return column.cast(pa.binary()).to_pylist()  # type: ignore[no-any-return]
    if codec.name == perco.BYTES.name:
        return column.to_pylist()  # type: ignore[no-any-return]
    if codec.name == perco.INT64.name:
        return [None if value is None else _pack_int(value + _OFFSET) for value in column.to_pylist()]
    if codec.name == perco.FLOAT64.name:
        return [None if value is None else _pack_float(value) for value in column.to_pylist()]
    if codec.name == perco.BOOL.name:
        return [None if value is None else b"\x01" if value else b"\x00" for value in column.to_pylist()]
    make, encode = types.writing(codec, given), codec.encode
    return [None if each is None else encode(each if make is None else make(each)) for each in types.values(column)]


class _Writing:
    """Writes the rows of a partition, which are in order, to a file. Sent to the tasks."""

    def __init__(self, load: BulkLoad, layout: Layout, table: perco.Table[Any], key: str, schema: StructType) -> None:
        self.load, self.layout, self.table, self.key = load, layout, table, key
        self.given = {field.name: field.dataType for field in schema}

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self.load.check()
        context = TaskContext.get()
        name = f"{context.partitionId()}-{context.taskAttemptId()}" if context is not None else "0"
        file: SortedFile | None = None
        try:
            for batch in batches:
                if file is None and batch.num_rows:
                    name = f"{_folder_name(self.table.name)}-{name}"
                    file = SortedFile(Path(self.load.path) / name, self.layout, self.load.ts)
                if file is not None:
                    self._put(file, batch)
            if file is None or not file.rows:
                return
            file.finish()
            yield _record(file.first, name, file.rows, file.cells, None)
            file = None
        except (UsageError, KeyNotUnique) as error:  # not raised: Spark would run the task again, in vain
            yield _record(b"", str(error), 0, 0, type(error).__name__)
        finally:
            if file is not None:
                file.abandon()

    def _put(self, file: SortedFile, batch: pa.RecordBatch) -> None:
        values = {name: self._values(name, batch) for name in batch.schema.names if name not in (self.key, _ROW)}
        if _ROW in batch.schema.names:
            rows: Sequence[bytes] = batch.column(_ROW).to_pylist()
        else:
            rows = _keys(self.table, self.given[self.key], batch.column(self.key))
        try:
            file.put_all(rows, values)
        except SameRow as same:
            key = self.table.key.decode(same.row)
            raise KeyNotUnique(
                f"several rows of the frame for table {self.table.name!r} have the key {key!r}: keep one of each, "
                f"as after dropDuplicates([{self.key!r}]). Nothing has been loaded",
                {repr(key): 2},
            ) from None

    def _values(self, name: str, batch: pa.RecordBatch) -> Iterable[bytes | None]:
        try:
            return values_of(self.table.columns[name].codec, self.given[name], batch.column(name))
        except (TypeError, ValueError) as error:
            raise UsageError(f"a value of column {name!r} of table {self.table.name!r} is wrong: {error}") from error


def _folder_name(table: str) -> str:
    return "".join(each if each.isascii() and each.isalnum() else "_" for each in table)[:60]


def _record(first: bytes, name: str, rows: int, cells: int, error: str | None) -> pa.RecordBatch:
    """A file that a task has written; or the class of its error, and, as the name, the error's message."""
    values: list[tuple[Any, pa.DataType]] = [
        *((first, pa.binary()), (name, pa.string()), (rows, pa.int64()), (cells, pa.int64()), (error, pa.string()))
    ]
    arrays = [pa.array([value], type) for value, type in values]
    return pa.RecordBatch.from_arrays(arrays, names=["first", "name", "rows", "cells", "error"])
