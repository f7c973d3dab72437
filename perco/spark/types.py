"""The Spark and Arrow types of columns.

    TEXT string   BYTES binary   INT64 bigint   FLOAT64 double   BOOL boolean   JSON, MSGPACK string, of JSON
    a key of several parts: a struct of _1, _2, ...   codecs of the user's own: binary, as stored

MSGPACK has more types than JSON: its bytes are read as base64 text, and text that Spark writes stays text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

import perco
from perco.errors import UsageError
from perco.schema.codecs import TupleCodec

_TYPES: Final[dict[str, tuple[DataType, pa.DataType]]] = {
    perco.TEXT.name: (StringType(), pa.string()),
    perco.BYTES.name: (BinaryType(), pa.binary()),
    perco.INT64.name: (LongType(), pa.int64()),
    perco.FLOAT64.name: (DoubleType(), pa.float64()),
    perco.BOOL.name: (BooleanType(), pa.bool_()),
    perco.JSON.name: (StringType(), pa.string()),
    perco.MSGPACK.name: (StringType(), pa.string()),
}
_OTHER: Final = (BinaryType(), pa.binary())
_TREES: Final = (perco.JSON.name, perco.MSGPACK.name)


def spark_type(codec: perco.Codec[Any]) -> DataType:
    if isinstance(codec, TupleCodec):
        parts = enumerate(codec.parts, start=1)
        return StructType([StructField(f"_{n}", spark_type(part), nullable=False) for n, part in parts])
    return _TYPES.get(codec.name, _OTHER)[0]


def arrow_type(codec: perco.Codec[Any]) -> pa.DataType:
    if isinstance(codec, TupleCodec):
        parts = enumerate(codec.parts, start=1)
        return pa.struct([pa.field(f"_{n}", arrow_type(part), nullable=False) for n, part in parts])
    return _TYPES.get(codec.name, _OTHER)[1]


def schema_of(table: perco.Table[Any], key: str, columns: Sequence[perco.Column[Any, Any]]) -> StructType:
    """The schema of a frame: first the table's key, under the name `key` and never null, then the columns, which may be
    null. Raises: UsageError."""
    if key in {column.name for column in columns}:
        raise UsageError(
            f"table {table.name!r} has a column {key!r}: choose another name for the key's with .option('key', ...)"
        )
    fields = [StructField(key, spark_type(table.key), nullable=False)]
    return StructType([*fields, *(StructField(column.name, spark_type(column.codec)) for column in columns)])


def reading(codec: perco.Codec[Any]) -> Callable[[Any], Any] | None:
    """The function that converts a value of perco for Arrow; None: none is needed."""
    if isinstance(codec, TupleCodec):
        inner = [reading(part) for part in codec.parts]
        return lambda value: {
            f"_{n}": part if make is None else make(part)
            for n, (make, part) in enumerate(zip(inner, value, strict=True), start=1)
        }
    if codec.name in _TREES:
        return _to_json
    return None


def writing(codec: perco.Codec[Any]) -> Callable[[Any], Any] | None:
    """The function that converts a value of Spark for perco; None: none is needed."""
    if isinstance(codec, TupleCodec):
        inner = [writing(part) for part in codec.parts]
        return lambda value: tuple(
            part if make is None else make(part) for make, part in zip(inner, value.values(), strict=True)
        )
    if codec.name in _TREES:
        return json.loads
    return None


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_as_json)
    except TypeError:  # keys that JSON cannot express
        return json.dumps(_with_text_keys(value), ensure_ascii=False, default=_as_json)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            each
            if isinstance(each, str)
            else _as_json(each)
            if isinstance(each, bytes)
            else str(each): _with_text_keys(inner)
            for each, inner in value.items()
        }
    return [_with_text_keys(each) for each in value] if isinstance(value, list | tuple) else value


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} cannot be shown as JSON")
