"""The Spark and Arrow types of columns.

    TEXT string   BYTES binary   INT64 bigint   FLOAT64 double   BOOL boolean   JSON, MSGPACK string, of JSON
    DATE date     TIMESTAMP timestamp           DECIMAL(p, s) decimal(p,s)
    a key of several parts: a struct of _1, _2, ...   codecs of the user's own: binary, as stored

MSGPACK has more types than JSON: its bytes are read as base64 text, and text that Spark writes stays text. A frame may
also have structs, arrays and maps for JSON and MSGPACK (`trees.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import (
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
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import perco
from perco.arrow import types as arrow
from perco.arrow.fields import Field
from perco.arrow.types import TREES
from perco.errors import SchemaMismatch, UsageError
from perco.schema.codecs import DecimalCodec, TupleCodec
from perco.spark import trees

_TYPES: Final[dict[str, DataType]] = {
    perco.TEXT.name: StringType(),
    perco.BYTES.name: BinaryType(),
    perco.INT64.name: LongType(),
    perco.FLOAT64.name: DoubleType(),
    perco.BOOL.name: BooleanType(),
    perco.JSON.name: StringType(),
    perco.MSGPACK.name: StringType(),
    perco.DATE.name: DateType(),
    perco.TIMESTAMP.name: TimestampType(),
}
_WIDER: Final[dict[type[DataType], DataType]] = {  # types that are stored as wider ones
    ByteType: LongType(),
    ShortType: LongType(),
    IntegerType: LongType(),
    FloatType: DoubleType(),
}
_CODECS: Final[dict[type[DataType], str]] = {DateType: "perco.DATE", TimestampType: "perco.TIMESTAMP"}


def spark_type(codec: perco.Codec[Any]) -> DataType:
    if isinstance(codec, TupleCodec):
        parts = enumerate(codec.parts, start=1)
        return StructType([StructField(f"_{n}", spark_type(part), nullable=False) for n, part in parts])
    if isinstance(codec, DecimalCodec):
        return DecimalType(codec.precision, codec.scale)
    return _TYPES.get(codec.name, BinaryType())


def arrow_type(codec: perco.Codec[Any], wanted: DataType | None = None) -> pa.DataType:
    """The Arrow type of a column. `wanted`: its type in a frame that has a schema of its own."""
    if wanted is not None and is_parsed(codec, wanted):
        return trees.arrow_of(wanted)
    return arrow.arrow_type(codec)


def schema_of(table: perco.Table[Any], key: str, columns: Sequence[perco.Column[Any, Any]]) -> StructType:
    """The schema of a frame: first the table's key, under the name `key` and never null, then the columns, which may be
    null. Raises: UsageError."""
    if key in {column.name for column in columns}:
        raise UsageError(
            f"table {table.name!r} has a column {key!r}: choose another name for the key's with .option('key', ...)"
        )
    fields = [StructField(key, spark_type(table.key), nullable=False)]
    return StructType([*fields, *(StructField(column.name, spark_type(column.codec)) for column in columns)])


def fields_of(
    table: perco.Table[Any],
    columns: Sequence[perco.Column[Any, Any]],
    key: str,
    schema: StructType,
    number: Callable[[perco.Column[Any, Any]], int] = lambda column: 0,
) -> list[Field]:
    """The columns of a frame's batches. `number`: gives the number of a column in the store, for those who need it."""
    by_name = {column.name: column for column in columns}
    fields = []
    for field in schema:
        column = by_name.get(field.name) if field.name != key else None
        codec = table.key if column is None else column.codec
        type, make = arrow_type(codec, field.dataType), reading(codec, field.dataType)
        at = 0 if column is None else number(column)
        fields.append(Field(field.name, type, codec, make, column, at, nullable=field.nullable))
    return fields


def is_parsed(codec: perco.Codec[Any], wanted: DataType) -> bool:
    """Whether JSON values become structs, arrays or maps, because the frame's schema says so."""
    return codec.name in TREES and isinstance(wanted, trees.NESTED)


def must_read(what: str, codec: perco.Codec[Any], wanted: DataType) -> None:
    """Check the type that a frame's schema gives a column. Raises: SchemaMismatch."""
    known = spark_type(codec)
    if wanted == known:
        return
    says = f"{what} is {known.simpleString()}, and the frame's schema says {wanted.simpleString()}"
    if codec.name not in TREES:
        same = wanted.simpleString() == known.simpleString()
        raise SchemaMismatch(f"{says}; {'declare its fields as NOT NULL' if same else 'cast it after reading'}")
    if not isinstance(wanted, trees.NESTED):
        raise SchemaMismatch(f"{says}; it has JSON: string, struct, array or map")
    if found := trees.problem(wanted):
        raise SchemaMismatch(f"{says}; {found}")


def must_write(what: str, codec: perco.Codec[Any], given: DataType) -> None:
    """Check the type of a frame's column that is to be written. Raises: SchemaMismatch."""
    wanted, wider = spark_type(codec), _WIDER.get(type(given), given)
    if isinstance(wanted, StructType):
        fits = isinstance(wider, StructType) and [f.dataType for f in wider] == [f.dataType for f in wanted]
    elif isinstance(wanted, DecimalType) and isinstance(wider, DecimalType):
        before = wider.precision - wider.scale
        fits = wider.scale <= wanted.scale and before <= wanted.precision - wanted.scale
    else:
        fits = wider == wanted
    if fits:
        return
    takes = f"{what} takes {wanted.simpleString()}, and the frame has {given.simpleString()}"
    if codec.name in TREES and isinstance(given, trees.NESTED):
        if found := trees.problem(given):
            raise SchemaMismatch(f"{what} takes JSON, and the frame has {given.simpleString()}: {found}")
    elif codec.name in TREES:
        raise SchemaMismatch(f"{takes}; it takes a string of JSON, a struct, an array or a map")
    elif isinstance(given, trees.NESTED) and not isinstance(wanted, StructType):
        raise SchemaMismatch(f"{takes}; use to_json, or a column of perco.JSON")
    else:
        own = f"perco.DECIMAL({given.precision}, {given.scale})" if isinstance(given, DecimalType) else None
        own = own or _CODECS.get(type(given))
        raise SchemaMismatch(f"{takes}; cast it before writing{f', or declare the column as {own}' if own else ''}")


def reading(codec: perco.Codec[Any], wanted: DataType | None = None) -> Callable[[Any], Any] | None:
    """The function that converts a value of perco for Arrow; None: none is needed.

    Args: `wanted`: the type in a frame that has a schema of its own. Then the function may raise ValueError.
    """
    if wanted is not None and is_parsed(codec, wanted):
        parse = trees.reading(wanted)
        return lambda value: None if value is None else parse(value)
    return arrow.reading(codec)


def writing(codec: perco.Codec[Any], given: DataType) -> Callable[[Any], Any] | None:
    """The function that converts a value of Spark, one of `values`, for perco; None: none is needed. It raises
    ValueError for what is no value of the codec."""
    if isinstance(codec, TupleCodec):
        assert isinstance(given, StructType)
        inner = [writing(part, field.dataType) for part, field in zip(codec.parts, given, strict=True)]
        return lambda value: tuple(
            part if make is None else make(part) for make, part in zip(inner, _readable(value).values(), strict=True)
        )
    if codec.name in TREES:
        if not isinstance(given, trees.NESTED):
            return json.loads
        tree = trees.writing(given, binary=codec.name == perco.MSGPACK.name)
        return lambda value: tree(_readable(value))
    return _readable if codec.name in (perco.DATE.name, perco.TIMESTAMP.name) else None


class Unreadable:
    """Stands for a value that Python cannot express, such as a date after the year 9999."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __repr__(self) -> str:
        return f"({self._reason})"


def _readable(value: Any) -> Any:
    if isinstance(value, Unreadable):
        raise ValueError(str(value))
    return value


def values(column: pa.Array) -> list[Any]:
    """The values of an Arrow column of a frame, times in UTC; `Unreadable` for a value that Python cannot express."""
    if (utc := _in_utc(column.type)) != column.type:
        column = column.cast(utc)
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except (OverflowError, ValueError):
        return [_value(each) for each in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (OverflowError, ValueError) as error:
        return Unreadable(f"a date or time that is outside the years 1 to 9999: {error}")


def _in_utc(type: pa.DataType) -> pa.DataType:
    """The type with UTC in place of other time zones, whose names Python may not know. The values are the same."""
    if pa.types.is_timestamp(type):
        return pa.timestamp(type.unit, "UTC" if type.tz else None)
    if pa.types.is_struct(type):
        return pa.struct([each.with_type(_in_utc(each.type)) for each in type])
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(_in_utc(type.value_type)))
    if pa.types.is_map(type):
        return pa.map_(type.key_field, type.item_field.with_type(_in_utc(type.item_type)))
    return type
