"""Encodes keys and values as bytes. Types are checked, and nothing is ever unpickled.

Every codec has a stable `name`. The catalogue stores it, so that a column is never read with a codec other than the one
with which it was written. A codec may be used for keys if its bytes sort as the values do (`ordered`).
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, Generic, TypeVar, overload

import msgpack

from perco.errors import Corruption, UsageError

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


class Codec(Generic[T]):
    """A named pair of functions. The catalogue stores `name`: if you change the format, change the name, too.

    Args:
        name: stable, at most 60 characters.
        encode: value -> bytes; raises TypeError or ValueError for a value that it does not accept.
        decode: bytes -> value; raises ValueError for bytes that it did not write.
        ordered: True if the bytes sort as the values do, and a decoded value encodes to the same bytes, as keys need.
    """

    name: str
    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]
    ordered: bool

    __slots__ = ("decode", "encode", "name", "ordered")

    def __init__(
        self, name: str, encode: Callable[[T], bytes], decode: Callable[[bytes], T], *, ordered: bool = False
    ) -> None:
        if not 0 < len(name) <= 60:
            raise UsageError(f"a codec's name has 1 to 60 characters, not {len(name)}")
        self.name, self.encode, self.decode, self.ordered = name, encode, decode, ordered

    def __repr__(self) -> str:
        return f"Codec({self.name})"


def _bytes(value: bytes) -> bytes:
    if type(value) is not bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"expected bytes, got {type(value).__name__}")
        return bytes(value)
    return value


def _text(value: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"expected str, got {type(value).__name__}")
    return value.encode()  # surrogates raise UnicodeEncodeError, a ValueError


_INT64: Final = struct.Struct(">Q")
_OFFSET: Final = 1 << 63


def _int64(value: int) -> bytes:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected int, got {type(value).__name__}")
    if not -_OFFSET <= value < _OFFSET:
        raise ValueError(f"{value} does not fit 64 bits")
    return _INT64.pack(value + _OFFSET)


def _to_int64(data: bytes) -> int:
    if len(data) != 8:
        raise _wrong_size(8, data)
    return int.from_bytes(data, "big") - _OFFSET


_FLOAT64: Final = struct.Struct(">d")


def _float64(value: float) -> bytes:
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise TypeError(f"expected float, got {type(value).__name__}")
    try:
        return _FLOAT64.pack(value)
    except (OverflowError, struct.error) as error:
        raise ValueError(f"{value!r:.40} is too large for a float") from error


def _to_float64(data: bytes) -> float:
    if len(data) != 8:
        raise _wrong_size(8, data)
    value: float = _FLOAT64.unpack(data)[0]
    return value


def _wrong_size(size: int, data: bytes) -> ValueError:
    return ValueError(f"expected {size} bytes, found {len(data)}")


def _bool(value: bool) -> bytes:
    if not isinstance(value, bool):
        raise TypeError(f"expected bool, got {type(value).__name__}")
    return b"\x01" if value else b"\x00"


def _to_bool(data: bytes) -> bool:
    if data not in (b"\x00", b"\x01"):
        raise ValueError("expected one byte, 0 or 1")
    return data == b"\x01"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _to_json(data: bytes) -> Any:
    return json.loads(data)


def _msgpack(value: Any) -> bytes:
    try:
        return msgpack.packb(value)  # type: ignore[no-any-return]
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _to_msgpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, use_list=False, strict_map_key=False)
    except (TypeError, msgpack.UnpackException) as error:  # TypeError: a map as the key of a map
        raise ValueError(str(error)) from error


_DAYS: Final = struct.Struct(">I")
_DAY_OFFSET: Final = 1 << 31
_DAY_0: Final = date(1970, 1, 1).toordinal()
_TIME_0: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICRO: Final = timedelta(microseconds=1)
_MICROS: Final = range(
    (datetime.min.replace(tzinfo=UTC) - _TIME_0) // _MICRO, (datetime.max.replace(tzinfo=UTC) - _TIME_0) // _MICRO + 1
)


def _date(value: date) -> bytes:
    if not isinstance(value, date) or isinstance(value, datetime):
        raise TypeError(f"expected datetime.date, got {type(value).__name__}")
    return _DAYS.pack(value.toordinal() - _DAY_0 + _DAY_OFFSET)


def _to_date(data: bytes) -> date:
    if len(data) != 4:
        raise _wrong_size(4, data)
    try:
        return date.fromordinal(int.from_bytes(data, "big") - _DAY_OFFSET + _DAY_0)
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _timestamp(value: datetime) -> bytes:
    if not isinstance(value, datetime):
        raise TypeError(f"expected datetime.datetime, got {type(value).__name__}")
    if value.utcoffset() is None:
        raise ValueError(
            f"{value} has no time zone: give value.replace(tzinfo=datetime.UTC) if it is a time in UTC, "
            "value.astimezone() if it is local time"
        )
    micros = (value - _TIME_0) // _MICRO
    if micros not in _MICROS:
        raise ValueError(f"{value} is outside the years 1 to 9999 in UTC")
    return _INT64.pack(micros + _OFFSET)


def _to_timestamp(data: bytes) -> datetime:
    micros = _to_int64(data)
    if micros not in _MICROS:
        raise ValueError("a time outside the years 1 to 9999")
    return _TIME_0 + timedelta(microseconds=micros)


BYTES: Final[Codec[bytes]] = Codec("bytes", _bytes, bytes, ordered=True)
TEXT: Final[Codec[str]] = Codec("text", _text, bytes.decode, ordered=True)
INT64: Final[Codec[int]] = Codec("int64", _int64, _to_int64, ordered=True)
FLOAT64: Final[Codec[float]] = Codec("float64", _float64, _to_float64)
BOOL: Final[Codec[bool]] = Codec("bool", _bool, _to_bool)
JSON: Final[Codec[Any]] = Codec("json", _json, _to_json)
MSGPACK: Final[Codec[Any]] = Codec("msgpack", _msgpack, _to_msgpack)
DATE: Final[Codec[date]] = Codec("date", _date, _to_date, ordered=True)
TIMESTAMP: Final[Codec[datetime]] = Codec("timestamp", _timestamp, _to_timestamp, ordered=True)
"""A moment in microseconds. Takes a `datetime` with a time zone; returns it in UTC."""

_PRECISION_MAX: Final = 38  # decimal digits that fit 16 bytes with their sign; also Spark's limit
SHORT_DECIMAL: Final = 18  # digits that fit 8 bytes; decimals with more have 16


class DecimalCodec(Codec[Decimal]):
    """Exact decimal numbers of at most `precision` digits, `scale` of them after the point. They sort by value."""

    precision: int
    scale: int

    __slots__ = ("precision", "scale")

    def __init__(self, precision: int, scale: int) -> None:
        self.precision, self.scale = precision, scale
        size = 8 if precision <= SHORT_DECIMAL else 16
        offset, limit = 1 << (8 * size - 1), 10**precision

        def encode(value: Decimal) -> bytes:
            if not isinstance(value, Decimal | int) or isinstance(value, bool):
                raise TypeError(f"expected decimal.Decimal, got {type(value).__name__}")
            return (_unscaled(Decimal(value), precision, scale) + offset).to_bytes(size, "big")

        def decode(data: bytes) -> Decimal:
            if len(data) != size:
                raise ValueError(f"expected {size} bytes, found {len(data)}")
            number = int.from_bytes(data, "big") - offset
            if abs(number) >= limit:
                raise ValueError(f"a number of more than {precision} digits")
            return Decimal(f"{number}E-{scale}")

        super().__init__(f"decimal({precision},{scale})", encode, decode, ordered=True)


def _unscaled(value: Decimal, precision: int, scale: int) -> int:
    """value * 10**scale. Raises: ValueError if that is not exact, or too large. (Arithmetic of `Decimal` rounds to the
    digits of the program's context.)"""
    if not value.is_finite():
        raise ValueError(f"{value} is not a number")
    if not value:
        return 0
    if value.adjusted() >= precision - scale:
        raise ValueError(f"{value} has more than {precision - scale} digits before the point")
    sign, digits, exponent = value.as_tuple()
    number, shift = int("".join(map(str, digits))), int(exponent) + scale
    if shift < 0:
        number, rest = divmod(number, 10**-shift) if -shift <= len(digits) else (0, 1)
        if rest:
            raise ValueError(f"{value} has more than {scale} digits after the point: round it first")
    else:
        number *= 10**shift
    return -number if sign else number


_decimal: Final = functools.cache(DecimalCodec)


def DECIMAL(precision: int, scale: int = 0) -> DecimalCodec:
    """The codec of exact decimal numbers: `perco.DECIMAL(12, 2)` takes up to ten digits before the point and two after
    it. It takes a `decimal.Decimal` or an int, and returns a `Decimal` with `scale` digits after the point. It rounds
    nothing: a number with more digits is a ValueError. Keys of it sort by value.

    Args:
        precision: the number of digits, 1 to 38.
        scale: how many of them are after the point.

    Raises: UsageError.
    """
    for name, number, least, most in (("precision", precision, 1, _PRECISION_MAX), ("scale", scale, 0, precision)):
        if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
            raise UsageError(f"DECIMAL({precision!r}, {scale!r}): {name} is a whole number from {least} to {most}")
    return _decimal(precision, scale)


_END: Final = b"\x00\x01"  # sorts before whatever a longer part has in its place, an escaped zero byte included


def _escape(part: bytes) -> bytes:
    return part.replace(b"\x00", b"\x00\xff") + _END


def _split(data: bytes, parts: int) -> list[bytes]:
    *pieces, rest = data.split(_END)  # a zero byte of a part is followed by 0xff, so the ends are unambiguous
    if len(pieces) > parts or (rest and len(pieces) == parts):
        raise ValueError("more parts than the tuple has")
    if len(pieces) < parts:
        raise ValueError("a tuple's part has no end")
    if data.count(b"\x00") == parts:  # those of the ends: there is nothing to unescape
        return pieces
    return [_unescaped(piece) if b"\x00" in piece else piece for piece in pieces]


def _unescaped(piece: bytes) -> bytes:
    if piece.count(b"\x00") != piece.count(b"\x00\xff"):
        raise ValueError("a tuple's part has a zero byte that is not escaped")
    return piece.replace(b"\x00\xff", b"\x00")


class TupleCodec(Codec[T]):
    """Keys of several parts, which sort as tuples do."""

    parts: tuple[Codec[Any], ...]

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Codec[Any], ...]) -> None:
        for part in parts:
            if not isinstance(part, Codec):
                raise UsageError(
                    f"a tuple key has codecs as parts, as in perco.Tuple(perco.TEXT, perco.INT64), not {part!r}"
                )
            if not part.ordered:
                raise UsageError(f"{part.name} does not keep order and cannot be part of a key")
        self.parts = parts

        def encode(value: Any) -> bytes:
            if not isinstance(value, tuple) or len(value) != len(parts):
                raise TypeError(f"expected a tuple of {len(parts)}, got {value!r}")
            return b"".join(_escape(part.encode(item)) for part, item in zip(parts, value, strict=True))

        def decode(data: bytes) -> Any:
            pieces = _split(data, len(parts))
            return tuple([part.decode(piece) for part, piece in zip(parts, pieces, strict=True)])

        super().__init__(f"tuple({','.join(part.name for part in parts)})", encode, decode, ordered=True)

    def part_prefix(self, value: tuple[Any, ...]) -> bytes:
        """The common prefix, in stored form, of all keys that begin with these parts."""
        if not isinstance(value, tuple) or len(value) > len(self.parts):
            raise TypeError(f"expected a tuple of at most {len(self.parts)}, got {value!r}")
        return b"".join(_escape(part.encode(item)) for part, item in zip(self.parts, value, strict=False))


@overload
def Tuple(first: Codec[A], second: Codec[B], /) -> TupleCodec[tuple[A, B]]: ...
@overload
def Tuple(first: Codec[A], second: Codec[B], third: Codec[C], /) -> TupleCodec[tuple[A, B, C]]: ...
@overload
def Tuple(*parts: Codec[Any]) -> TupleCodec[tuple[Any, ...]]: ...
def Tuple(*parts: Codec[Any]) -> TupleCodec[Any]:
    """An order-preserving key of several parts: `perco.Tuple(perco.TEXT, perco.INT64)`."""
    if not 2 <= len(parts) <= 8:
        raise UsageError("a tuple key has 2 to 8 parts")
    return TupleCodec(parts)


_BY_NAME: Final[dict[str, Codec[Any]]] = {
    codec.name: codec for codec in (BYTES, TEXT, INT64, FLOAT64, BOOL, JSON, MSGPACK, DATE, TIMESTAMP)
}
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
_PARTS: Final = re.compile(rf"(?:{_DECIMAL.pattern}|[^,]+)(?:,|$)")


def own_codec(name: str) -> Codec[Any] | None:
    """The codec of perco's own with that name, unless it is a tuple's."""
    codec = _BY_NAME.get(name)
    if codec is not None:
        return codec
    decimal = _DECIMAL.fullmatch(name)
    if decimal is None:
        return None
    precision, scale = int(decimal[1]), int(decimal[2])
    return DECIMAL(precision, scale) if 1 <= precision <= _PRECISION_MAX and scale <= precision else None


def is_own(codec: Codec[Any]) -> bool:
    """Whether a codec is one of perco's own for values, so that every process has it."""
    return _BY_NAME.get(codec.name) is codec or type(codec) is DecimalCodec


def codec_named(name: str) -> Codec[Any]:
    """The codec of that name; for a codec that only the user's program defines, one of that name that returns bytes."""
    if (own := own_codec(name)) is not None:
        return own
    if name.startswith("tuple(") and name.endswith(")"):
        parts = [own_codec(found[0].removesuffix(",")) for found in _PARTS.finditer(name[6:-1])]
        if all(part is not None and part.ordered for part in parts):
            return TupleCodec(tuple(part for part in parts if part is not None))
    return Codec(name, _bytes, bytes, ordered=True)


def written(value: date | Decimal) -> str:
    """A date, time or decimal as text: in ISO form, times in UTC with a Z; a decimal with all of its digits."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime) and value.utcoffset() is not None:
        micros = (value - _TIME_0) // _MICRO
        if micros in _MICROS:
            return f"{(_TIME_0 + timedelta(microseconds=micros)).replace(tzinfo=None).isoformat()}Z"
    return value.isoformat()


def encoded(codec: Codec[T], value: T, where: object, part: str) -> bytes:
    """Encode a value; errors name its place.

    Raises: TypeError, ValueError.
    """
    try:
        data = codec.encode(value)
    except TypeError as error:
        if inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()  # otherwise Python also warns that it was never awaited
            raise TypeError(f"{part}{where}: got {value!r}; did you forget `await`?") from None
        raise TypeError(f"{part}{where}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{part}{where}: {error}") from None
    if type(data) is not bytes:
        raise TypeError(f"{part}{where}: its codec returned {type(data).__name__}; it must return bytes")
    return data


def decoded(codec: Codec[T], data: bytes, column: Any, key: object) -> T:
    """Decode the value of a cell of a `Column`. Raises: Corruption, with the cell, if it does not decode."""
    try:
        return codec.decode(data)
    except (ValueError, struct.error) as error:
        raise Corruption("value", f"not {codec.name}: {error}", (column.table.name, key, column.name)) from error


def decoded_key(codec: Codec[T], row: bytes, table: str) -> T:
    """Decode a row's key. Raises: Corruption if it does not decode."""
    try:
        return codec.decode(row)
    except (ValueError, struct.error) as error:
        raise Corruption(f"table {table!r}, row {row!r}", f"its key is not {codec.name}: {error}") from error
