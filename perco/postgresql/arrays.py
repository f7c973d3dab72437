"""Encodes arrays in PostgreSQL's binary format, as parameters of prepared statements; decodes numbers from results."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

BOOL: Final = 16
BYTEA: Final = 17
INT8: Final = 20
INT4: Final = 23
TEXT: Final = 25
BOOLS: Final = 1000
BYTEAS: Final = 1001
INT8S: Final = 1016
INT4S: Final = 1007
TEXTS: Final = 1009

_head = struct.Struct(">iiiii").pack  # dimensions, whether there are nulls, the elements' type, length, first index
_size = struct.Struct(">i").pack
_NULL: Final = _size(-1)


def int4(value: int) -> bytes:
    return value.to_bytes(4, "big", signed=True)


def int8(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)


def number(value: bytes) -> int:
    """Decode an int4 or an int8 of a result."""
    return int.from_bytes(value, "big", signed=True)


def int4s(values: Sequence[int]) -> bytes:
    return _fixed(INT4, "i", 4, values)


def int8s(values: Sequence[int]) -> bytes:
    return _fixed(INT8, "q", 8, values)


def bools(values: Sequence[bool]) -> bytes:
    return _fixed(BOOL, "?", 1, values)


def _fixed(type: int, code: str, size: int, values: Sequence[int]) -> bytes:
    if not values:
        return _EMPTY[type]
    flat = [size] * (2 * len(values))
    flat[1::2] = values
    return _head(1, 0, type, len(values), 1) + struct.pack(f">{('i' + code) * len(values)}", *flat)


def byteas(values: Sequence[bytes | None]) -> bytes:
    """An array of bytea; None becomes null."""
    return _variable(BYTEA, values)


def texts(values: Sequence[str]) -> bytes:
    return _variable(TEXT, [value.encode() for value in values])


def _variable(type: int, values: Sequence[bytes | None]) -> bytes:
    if not values:
        return _EMPTY[type]
    parts = [_head(1, 1, type, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts.append(_size(len(value)))
            parts.append(value)
    return b"".join(parts)


_EMPTY: Final = {type: struct.pack(">iii", 0, 0, type) for type in (BOOL, BYTEA, INT4, INT8, TEXT)}
