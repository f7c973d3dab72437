"""The columns of a record batch: the table's key, or the parts of its key, and columns of the table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from perco.arrow.types import Make, arrow_type, as_stored, reading
from perco.errors import UsageError
from perco.schema.codecs import Codec, TupleCodec
from perco.schema.schema import Column, Table


class Field(NamedTuple):
    """A column of a batch.

    Attributes:
        name, type, nullable: in the batch. A key is never null.
        codec: of the values as they are stored.
        make: converts a value of the codec for Arrow; None: the value is as it should be.
        column: the column of the table, and `number`, its number in the store, which is not 0; None and 0 for the key.
        part: which part of the key; None: all of it, or it is a column.
    """

    name: str
    type: pa.DataType
    codec: Codec[Any]
    make: Make | None
    column: Column[Any, Any] | None = None
    number: int = 0
    part: int | None = None
    nullable: bool = True


def schema_of(fields: Sequence[Field]) -> pa.Schema:
    return pa.schema([pa.field(each.name, each.type, each.nullable) for each in fields])


def fields_of(
    table: Table[Any],
    columns: Sequence[Column[Any, Any]],
    numbers: Sequence[int],
    key: str | Sequence[str],
    packed: bool = False,
) -> list[Field]:
    """The key, then the columns.

    Args:
        key: the name of the key's column. The parts of a key have columns of their own: `key` followed by _1, _2, ...,
            unless it gives their names.
        packed: MSGPACK values as they are stored.

    Raises: UsageError if two columns would have one name, or the names are not as many as the key's parts.
    """
    codec = table.key
    if isinstance(codec, TupleCodec):
        count = len(codec.parts)
        names = [f"{key}_{n}" for n in range(1, count + 1)] if isinstance(key, str) else list(key)
        if len(names) != count:
            raise UsageError(f"the key of table {table.name!r} has {count} parts, and key= gives {len(names)} names")
        found = [
            Field(name, arrow_type(of), of, reading(of), part=n, nullable=False)
            for n, (name, of) in enumerate(zip(names, codec.parts, strict=True))
        ]
    elif isinstance(key, str):
        found = [Field(key, arrow_type(codec), codec, reading(codec), nullable=False)]
    else:
        raise UsageError(f"the key of table {table.name!r} has one part: key= is its name, a str")
    for column, number in zip(columns, numbers, strict=True):
        of = column.codec
        type, make = (pa.binary(), of.encode) if packed and as_stored(of) else (arrow_type(of), reading(of))
        found.append(Field(column.name, type, of, make, column, number))
    names = [each.name for each in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two columns would be named {twice!r}; name the key's with key=")
    return found
