"""Encodes keys and values as bytes. Types are checked, and nothing is ever unpickled.

Every codec has a stable `name`. The catalogue stores it, so that a column is never read with a codec other than the one
with which it was written. A codec may be used for keys if its bytes sort as the values do (`ordered`).
"""

from __future__ import annotations

import inspect
import json
import struct
from collections.abc import Callable
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
    return int(_exactly(_INT64, data)) - _OFFSET


_FLOAT64: Final = struct.Struct(">d")


def _float64(value: float) -> bytes:
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise TypeError(f"expected float, got {type(value).__name__}")
    try:
        return _FLOAT64.pack(value)
    except (OverflowError, struct.error) as error:
        raise ValueError(str(error)) from error


def _to_float64(data: bytes) -> float:
    return float(_exactly(_FLOAT64, data))


def _exactly(form: struct.Struct, data: bytes) -> Any:
    if len(data) != form.size:
        raise ValueError(f"expected {form.size} bytes, found {len(data)}")
    return form.unpack(data)[0]


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


BYTES: Final[Codec[bytes]] = Codec("bytes", _bytes, bytes, ordered=True)
TEXT: Final[Codec[str]] = Codec("text", _text, bytes.decode, ordered=True)
INT64: Final[Codec[int]] = Codec("int64", _int64, _to_int64, ordered=True)
FLOAT64: Final[Codec[float]] = Codec("float64", _float64, _to_float64)
BOOL: Final[Codec[bool]] = Codec("bool", _bool, _to_bool)
JSON: Final[Codec[Any]] = Codec("json", _json, _to_json)
MSGPACK: Final[Codec[Any]] = Codec("msgpack", _msgpack, _to_msgpack)

_END: Final = b"\x00\x01"  # sorts before whatever a longer part has in its place, an escaped zero byte included


def _escape(part: bytes) -> bytes:
    return part.replace(b"\x00", b"\x00\xff") + _END


def _split(data: bytes, parts: int) -> list[bytes]:
    *pieces, rest = data.split(_END)  # a zero byte of a part is followed by 0xff, so the ends are unambiguous
    if len(pieces) > parts or (rest and len(pieces) == parts):
        raise ValueError("more parts than the tuple has")
    if len(pieces) < parts:
        raise ValueError("a tuple's part has no end")
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
            return tuple(part.decode(piece) for part, piece in zip(parts, pieces, strict=True))

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
    codec.name: codec for codec in (BYTES, TEXT, INT64, FLOAT64, BOOL, JSON, MSGPACK)
}


def codec_named(name: str) -> Codec[Any]:
    """The codec of that name; for a codec that only the user's program defines, one of that name that returns bytes."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith("tuple(") and name.endswith(")"):
        parts = [_BY_NAME.get(part) for part in name[6:-1].split(",")]
        if all(part is not None and part.ordered for part in parts):
            return TupleCodec(tuple(part for part in parts if part is not None))
    return Codec(name, _bytes, bytes, ordered=True)


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
