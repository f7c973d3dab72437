"""JSON values as Spark's structs, arrays and maps, and the other way round.

    struct, map with string keys  an object     array   an array     binary  a string of base64; bytes in MSGPACK
    date  "2026-03-01"            timestamp  "2026-03-01T12:00:00Z", in UTC; timestamp_ntz the same, without Z
    decimal  "12.50", a string, because a number of JSON is read as a float

A null is a null. An object of a map is sorted by key, so that equal maps are written as the same bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import pyarrow as pa
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
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

import perco
from perco.schema.codecs import written

NESTED: Final = (StructType, ArrayType, MapType)
_BITS: Final[dict[type[DataType], int]] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
_ARROW: Final[dict[type[DataType], pa.DataType]] = {
    StringType: pa.string(),
    BinaryType: pa.binary(),
    BooleanType: pa.bool_(),
    ByteType: pa.int8(),
    ShortType: pa.int16(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    FloatType: pa.float32(),
    DoubleType: pa.float64(),
    DateType: pa.date32(),
    TimestampType: pa.timestamp("us", "UTC"),
    TimestampNTZType: pa.timestamp("us"),
}
_SHOWN: Final = 60  # characters of a value, in an error

Make = Callable[[Any], Any]


def problem(type: DataType) -> str | None:
    """Why values of this type, or of one inside it, are no JSON values; None: they are."""
    if isinstance(type, StructType):
        if len(set(type.names)) < len(type.names):
            return f"{type.simpleString()} has two fields of one name"
        return next((found for field in type if (found := problem(field.dataType))), None)
    if isinstance(type, ArrayType):
        return problem(type.elementType)
    if isinstance(type, MapType):
        if not isinstance(type.keyType, StringType):
            return f"{type.simpleString()} has keys that are not strings; cast them"
        return problem(type.valueType)
    return None if type.__class__ in _ARROW or isinstance(type, DecimalType) else f"{type.simpleString()} is not known"


def arrow_of(type: DataType) -> pa.DataType:
    """The Arrow type in which Spark takes values of a type without a `problem`."""
    if isinstance(type, StructType):
        return pa.struct([pa.field(each.name, arrow_of(each.dataType), each.nullable) for each in type])
    if isinstance(type, ArrayType):
        return pa.list_(pa.field("element", arrow_of(type.elementType), type.containsNull))
    if isinstance(type, MapType):
        return pa.map_(pa.string(), pa.field("value", arrow_of(type.valueType), type.valueContainsNull))
    if isinstance(type, DecimalType):
        return pa.decimal128(type.precision, type.scale)
    return _ARROW[type.__class__]


# ------------------------------------------------------------------ to JSON


def writing(type: DataType, *, binary: bool) -> Make:
    """The function that makes a JSON value of what `pyarrow` gives for a value of Spark. `binary`: leave bytes as they
    are, for MSGPACK."""
    make = _writing(type, binary)
    return (lambda value: value) if make is None else make


def _writing(type: DataType, binary: bool) -> Make | None:
    if isinstance(type, StructType):
        fields = [(field.name, _or_none(_writing(field.dataType, binary))) for field in type]
        return lambda value: {name: make(value[name]) for name, make in fields}
    if isinstance(type, ArrayType):
        of = _or_none(_writing(type.elementType, binary))
        return lambda value: [of(each) for each in value]
    if isinstance(type, MapType):
        of = _or_none(_writing(type.valueType, binary))
        return lambda value: {key: of(each) for key, each in sorted(value, key=lambda pair: pair[0])}
    if isinstance(type, DateType | TimestampType | TimestampNTZType | DecimalType):
        return written
    return _base64 if isinstance(type, BinaryType) and not binary else None


def _or_none(make: Make | None) -> Make:
    return lambda value: value if value is None or make is None else make(value)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


# ------------------------------------------------------------------ from JSON


def reading(type: DataType) -> Make:
    """The function that makes what `pyarrow` takes for a value of this type, from a JSON value that is not null. It
    raises ValueError for a JSON value that is none."""
    if isinstance(type, StructType):
        fields = [(field.name, _nullable(field.dataType, field.nullable)) for field in type]
        return lambda value: _fields(fields, _a(dict, type, value))
    if isinstance(type, ArrayType):
        of = _nullable(type.elementType, type.containsNull)
        return lambda value: [of(each) for each in _a((list, tuple), type, value)]
    if isinstance(type, MapType):
        of = _nullable(type.valueType, type.valueContainsNull)
        return lambda value: [(_a(str, type, key), of(each)) for key, each in _a(dict, type, value).items()]
    if isinstance(type, StringType):
        return lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(type, BooleanType):
        return lambda value: _a(bool, type, value)
    if isinstance(type, FloatType | DoubleType):
        return lambda value: float(_number((int, float), type, value))
    if isinstance(type, DecimalType):
        codec = perco.DECIMAL(type.precision, type.scale)
        return lambda value: codec.decode(codec.encode(_decimal(type, value)))
    if isinstance(type, BinaryType):
        return lambda value: value if isinstance(value, bytes) else _from_base64(_a(str, type, value))
    if isinstance(type, DateType):
        return lambda value: date.fromisoformat(_a(str, type, value))
    if isinstance(type, TimestampType | TimestampNTZType):
        zoned = isinstance(type, TimestampType)
        return lambda value: _moment(type, value, zoned)
    limit = 1 << (_BITS[type.__class__] - 1)
    return lambda value: _whole(type, value, limit)


def _fields(fields: list[tuple[str, Make]], value: dict[Any, Any]) -> dict[str, Any]:
    return {name: make(value.get(name)) for name, make in fields}


def _nullable(type: DataType, nullable: bool) -> Make:
    make = reading(type)

    def read(value: Any) -> Any:
        if value is not None:
            return make(value)
        if not nullable:
            raise _is_not(type, value)
        return None

    return read


def _is_not(type: DataType, value: Any) -> ValueError:
    return ValueError(f"{str(value)[:_SHOWN]!r} is no {type.simpleString()}")


def _a(kind: Any, type: DataType, value: Any) -> Any:
    if not isinstance(value, kind):
        raise _is_not(type, value)
    return value


def _number(kind: Any, type: DataType, value: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _is_not(type, value)
    return value


def _whole(type: DataType, value: Any, limit: int) -> int:
    if not -limit <= _number(int, type, value) < limit:
        raise _is_not(type, value)
    return int(value)


def _decimal(type: DataType, value: Any) -> Decimal:
    try:
        return Decimal(value if isinstance(value, str) else repr(_number((int, float), type, value)))
    except InvalidOperation:
        raise _is_not(type, value) from None


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _moment(type: DataType, value: Any, zoned: bool) -> datetime:
    moment = datetime.fromisoformat(_a(str, type, value))
    if (moment.utcoffset() is not None) != zoned:
        raise _is_not(type, value)
    return moment
