"""Runs a task over the Arrow batches of a data frame, which Spark passes to Python faster than rows.

A row is a `pyspark.sql.Row` with the values that `DataFrame.rdd` gives: a time is the local time of the executor's
machine, a struct is a `Row`. So a loader, and a key that is made from a row, do not depend on the way the rows came.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as compute
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    Row,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

_SAME: Final = (  # their values are the same in Arrow
    *(BinaryType, BooleanType, ByteType, DateType, DecimalType, DoubleType, FloatType, IntegerType, LongType),
    *(ShortType, StringType, TimestampNTZType),
)
_SORTED: Final = (BinaryType, DateType, IntegerType, LongType, StringType)
_TIME: Final = TimestampType()
_BATCH_BYTES: Final = 16 << 20  # of a batch that Spark makes, unless the user has set another limit
_ROWS: Final = 100  # that are made from a batch at once, unless a group has more
_MAX_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"

T = TypeVar("T")


def over_arrow(frame: Any, task: Callable[[int, Batches], list[T]]) -> Callable[[], list[T]] | None:
    """The function that runs `task(partition, batches)` for each partition of a frame, and returns what the tasks
    return. None: the frame has to be read as rows: it is an RDD, or has columns that Arrow cannot carry, or Spark lacks
    a library for this."""
    if not isinstance(frame, DataFrame) or not can_be_arrow(frame.schema):
        return None
    schema = frame.schema

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        results = task(context.partitionId(), Batches(schema, batches))
        yield pa.record_batch([pa.array([pickle.dumps(each) for each in results], pa.binary())], ["result"])

    try:
        mapped = frame.mapInArrow(run, "result binary")
    except ImportError:  # Spark asks for pandas here, although nothing in this needs it
        return None

    def collect() -> list[T]:
        with _small_batches(frame.sparkSession):
            return [pickle.loads(row[0]) for row in mapped.collect()]

    return collect


@contextmanager
def _small_batches(spark: SparkSession) -> Iterator[None]:
    """Limit the bytes of Spark's Arrow batches, which are in the memory of the JVM and of the task."""
    if spark.conf.get(_MAX_BYTES, None) is not None:  # the user has set it
        yield
        return
    spark.conf.set(_MAX_BYTES, _BATCH_BYTES)
    try:
        yield
    finally:
        spark.conf.unset(_MAX_BYTES)


def can_be_arrow(schema: StructType) -> bool:
    """Whether the rows of a frame can be made from Arrow. Spark's other types, and columns that share a name, can only
    be had as rows."""
    return _is_known(schema)


def _is_known(type: DataType) -> bool:
    if isinstance(type, StructType):
        return len(set(type.names)) == len(type.names) and all(_is_known(field.dataType) for field in type)
    if isinstance(type, ArrayType):
        return _is_known(type.elementType)
    if isinstance(type, MapType):
        return _is_known(type.keyType) and _is_known(type.valueType)
    return isinstance(type, TimestampType) or type.__class__ in _SAME


class Batches:
    """A partition's Arrow batches, and the rows in them."""

    def __init__(self, schema: StructType, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._names = schema.names
        self._makes = [_make(field.dataType) for field in schema]
        self._sorts = [field.dataType.__class__ in _SORTED for field in schema]
        self._times = [isinstance(field.dataType, TimestampType) for field in schema]

    def groups(self, rows: int, size: int, sort: str | None = None) -> Iterator[list[Row]]:
        """Lists of at most `rows` rows, of `size` bytes if the rows of a batch have about the same size; at least one
        row. `sort`: the column to sort the rows of each batch by, if its type has an order: a transaction that writes
        neighboring rows touches fewer pages of the store.
        """
        at = self._names.index(sort) if sort in self._names else -1
        for batch in self._batches:
            whole = batch if at < 0 or not self._sorts[at] else batch.take(compute.sort_indices(batch.column(at)))
            most = max(1, size * whole.num_rows // max(1, whole.nbytes))
            count = min(rows, most)
            step = count * max(1, min(_ROWS, most) // count)  # made at once, since a slice costs more than a row
            for low in range(0, whole.num_rows, step):
                made = self._rows(whole.slice(low, step))
                for first in range(0, len(made), count):
                    yield made[first : first + count]

    def rows(self) -> Iterator[Row]:
        """All rows, in their order."""
        for batch in self._batches:
            for low in range(0, batch.num_rows, _ROWS):
                yield from self._rows(batch.slice(low, _ROWS))

    def _rows(self, batch: pa.RecordBatch) -> list[Row]:
        """The rows of a batch."""
        columns = []
        for column, make, time in zip(batch.columns, self._makes, self._times, strict=True):
            values = _micros(column).to_pylist() if time else column.to_pylist()
            columns.append(values if make is None else [None if v is None else make(v) for v in values])
        return rows_of(self._names, zip(*columns, strict=True) if columns else [()] * batch.num_rows)


def rows_of(names: list[str], values: Any) -> list[Row]:
    """Rows with these names, of tuples of values."""
    rows = []
    for each in values:
        row = tuple.__new__(Row, each)
        row.__fields__ = names
        rows.append(row)
    return rows


def _micros(column: pa.Array) -> pa.Array:
    return column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())


def _make(type: DataType) -> Callable[[Any], Any] | None:
    """The function that makes a value of `DataFrame.rdd` from a value that pyarrow gives; None: they are the same. A
    time at the top is given in microseconds, a time inside another value as a `datetime`."""
    if isinstance(type, TimestampType):
        return _local
    if isinstance(type, StructType):
        names, makes = type.names, [_make_inside(field.dataType) for field in type]
        return lambda value: rows_of(names, [[make(value[name]) for name, make in zip(names, makes, strict=True)]])[0]
    if isinstance(type, ArrayType):
        inner = _make_inside(type.elementType)
        return lambda value: [inner(each) for each in value]
    if isinstance(type, MapType):
        of_key, of_value = _make_inside(type.keyType), _make_inside(type.valueType)
        return lambda value: {of_key(key): of_value(each) for key, each in value}
    return None


def _make_inside(type: DataType) -> Callable[[Any], Any]:
    make = _inner_time if isinstance(type, TimestampType) else _make(type)
    return lambda value: value if value is None or make is None else make(value)


def _local(micros: int) -> Any:
    return _TIME.fromInternal(micros)


def _inner_time(value: Any) -> Any:
    return _TIME.fromInternal(_TIME.toInternal(value))
