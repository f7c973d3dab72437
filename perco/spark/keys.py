"""The keys of a job's inputs, as bytes that are the same in every attempt of a task."""

from __future__ import annotations

import datetime
import decimal
import math
import uuid
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

import msgpack

from perco.errors import UsageError

_BYTES: Final = 16
_PLAIN: Final = (str, bool, type(None))
_WRITTEN: Final = (decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, uuid.UUID)  # as `str` writes them


def key_of(value: Any) -> bytes:
    """Encode a key or a whole row. Equal values of the same types give equal bytes, in every process.

    Raises: UsageError for a value of any other type.
    """
    packed: bytes = msgpack.packb(_plain(value))
    return packed


def digest_of(row: Any) -> bytes:
    """The digest of a key or a whole row."""
    return blake2b(key_of(row), digest_size=_BYTES).digest()


def packed(row: Any) -> bytes:
    """Encode a row faster than `key_of`, for comparison with the same row in the same frame: names of columns are left
    out, and the entries of a map keep their order.

    Raises: UsageError for a value that `key_of` refuses.
    """
    data: bytes = msgpack.packb(row, default=_plain)
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float("nan") if math.isnan(value) else value
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 64 else _tagged("int", str(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, tuple | list):  # a pyspark Row is a tuple
        names = getattr(value, "__fields__", None)
        plain = [_plain(each) for each in value]
        return plain if names is None else _tagged("row", list(names), plain)
    if isinstance(value, dict):
        items = [(_plain(key), _plain(each)) for key, each in value.items()]
        return _tagged("map", sorted(items, key=lambda item: msgpack.packb(item[0])))
    if isinstance(value, _WRITTEN):
        return _tagged(type(value).__name__, str(value), getattr(value, "fold", 0))
    raise UsageError(
        f"a value of type {type(value).__name__} does not identify its input: give key=, a column's name "
        "or a function of the row"
    )


def valued(key: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function that returns a row's key: the value of a column, or the result of the user's function."""
    if callable(key):
        return lambda row: _given(key(row), row)
    return lambda row: _given(_column(row, key), row)


def _tagged(*parts: Any) -> msgpack.ExtType:
    """A value that differs from every plain value."""
    return msgpack.ExtType(1, msgpack.packb(parts))


def chosen(key: str | Callable[[Any], Any]) -> Callable[[Any], bytes]:
    """The function that returns a row's key as bytes."""
    value = valued(key)
    return lambda row: key_of(value(row))


def _column(row: Any, name: str) -> Any:
    try:
        return row[name]
    except (KeyError, ValueError, TypeError, IndexError):
        raise UsageError(f"there is no column {name!r} in {str(row)[:200]}; key= names one, or is a function") from None


def _given(key: Any, row: Any) -> Any:
    if key is None:
        raise UsageError(f"the key of an input is null: {str(row)[:200]}")
    return key
