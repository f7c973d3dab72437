"""Values for perco from the columns of Arrow and Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
from pyarrow import types

from perco.arrow.types import TREES, arrow_type
from perco.errors import UsageError
from perco.schema.codecs import MSGPACK, Codec


def batches_of(kind: str, file: str, rows: int) -> Iterator[pa.RecordBatch]:
    """The batches of a file, of at most so many rows. Raises: UsageError."""
    try:
        if kind == "parquet":
            with parquet.ParquetFile(file) as opened:
                yield from opened.iter_batches(batch_size=rows)
            return
        with pa.memory_map(file) as mapped, pa.ipc.open_file(mapped) as opened:
            for n in range(opened.num_record_batches):
                batch = opened.get_batch(n)
                for low in range(0, batch.num_rows, rows):
                    yield batch.slice(low, rows)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{file} cannot be read as {kind}: {error}") from error


def values_of(file: str, batch: pa.RecordBatch, name: str, codec: Codec[Any]) -> list[Any]:
    """The values of a column; None for a null. Raises: UsageError if they do not fit the codec."""
    if batch.schema.names.count(name) > 1:
        raise UsageError(f"{file} has several columns {name!r}")
    column = batch.column(name)
    try:
        if codec.name in TREES or not _is_known(codec):
            return [None if value is None else _made(codec, value) for value in column.to_pylist()]
        wanted = arrow_type(codec)
        if column.type != wanted and not _fits(column.type, wanted):
            raise TypeError("perco converts only what cannot change a value; convert the column first")
        values: list[Any] = (column if column.type == wanted else column.cast(wanted)).to_pylist()
        for value in values:
            if value is not None:
                codec.encode(value)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"{file}: column {name!r} of {column.type} does not fit {codec.name}: {error}") from None
    return values


def _fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether all values of one type that a (safe) cast to another accepts stay what they are."""
    if types.is_dictionary(given):
        given = given.value_type
    if types.is_null(given) or given == wanted:
        return True
    if types.is_int64(wanted):
        return bool(types.is_integer(given))
    if types.is_float64(wanted):
        return bool(types.is_floating(given))
    if types.is_decimal(wanted):
        return bool(types.is_integer(given) or types.is_decimal(given))
    if types.is_timestamp(wanted):
        return bool(types.is_timestamp(given) and given.tz)
    if types.is_string(wanted):
        return bool(types.is_large_string(given) or types.is_string_view(given))
    if types.is_binary(wanted):
        return bool(types.is_large_binary(given) or types.is_binary_view(given) or types.is_fixed_size_binary(given))
    return bool(types.is_date(wanted) and types.is_date(given))


def _is_known(codec: Codec[Any]) -> bool:
    return arrow_type(codec) != pa.binary() or codec.name == "bytes"


def _made(codec: Codec[Any], value: Any) -> Any:
    if codec.name in TREES and isinstance(value, str):
        return json.loads(value)
    if isinstance(value, bytes) and codec.name != "json":
        return codec.decode(value)  # as stored
    if codec.name == MSGPACK.name or codec.name == "json":
        codec.encode(value)
        return value
    raise TypeError(f"expected bytes, as stored, got {type(value).__name__}")
