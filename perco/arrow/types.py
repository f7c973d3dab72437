"""The Arrow types of columns and keys.

    TEXT string   BYTES binary   INT64 int64   FLOAT64 double   BOOL bool   JSON, MSGPACK string, of JSON
    DATE date32   TIMESTAMP timestamp[us, UTC]   DECIMAL(p, s) decimal128(p, s)
    a key of several parts: a struct of _1, _2, ...   codecs of the user's own: binary, as stored

MSGPACK has more types than JSON: its bytes are read as base64 text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from perco.schema.codecs import (
    BOOL,
    BYTES,
    DATE,
    FLOAT64,
    INT64,
    JSON,
    MSGPACK,
    TEXT,
    TIMESTAMP,
    Codec,
    DecimalCodec,
    TupleCodec,
)

Make = Callable[[Any], Any]

_TYPES: Final[dict[str, pa.DataType]] = {
    TEXT.name: pa.string(),
    BYTES.name: pa.binary(),
    INT64.name: pa.int64(),
    FLOAT64.name: pa.float64(),
    BOOL.name: pa.bool_(),
    JSON.name: pa.string(),
    MSGPACK.name: pa.string(),
    DATE.name: pa.date32(),
    TIMESTAMP.name: pa.timestamp("us", "UTC"),
}
TREES: Final = (JSON.name, MSGPACK.name)


def arrow_type(codec: Codec[Any]) -> pa.DataType:
    """The type of a column's values."""
    if isinstance(codec, TupleCodec):
        parts = enumerate(codec.parts, start=1)
        return pa.struct([pa.field(f"_{n}", arrow_type(part), nullable=False) for n, part in parts])
    if isinstance(codec, DecimalCodec):
        return pa.decimal128(codec.precision, codec.scale)
    return _TYPES.get(codec.name, pa.binary())


def as_stored(codec: Codec[Any]) -> bool:
    """Whether JSON, or another Arrow type, cannot express all values of a codec: binary can, as they are stored."""
    return codec.name == MSGPACK.name


def reading(codec: Codec[Any]) -> Make | None:
    """The function that converts a value of perco for Arrow; None: none is needed."""
    if isinstance(codec, TupleCodec):
        inner = [reading(part) for part in codec.parts]
        return lambda value: {
            f"_{n}": part if make is None else make(part)
            for n, (make, part) in enumerate(zip(inner, value, strict=True), start=1)
        }
    if codec.name in TREES:
        return to_json
    return None if codec.name in _TYPES or isinstance(codec, DecimalCodec) else codec.encode


def to_json(value: Any) -> str:
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
