"""Keys, values and moments as text and as JSON.

On the command line, the codec determines how a key or value is written:

    text       as it is
    bytes      as text, or hex:00ff
    int64      a number
    float64    a number
    bool       true or false
    date       2026-03-01
    timestamp  2026-03-01T12:00:00.5Z, or with another offset, as in 2026-03-01T13:00:00.5+01:00; printed in UTC
    decimal    a number, such as 12.50
    json       JSON
    msgpack    JSON
    tuple      a JSON array of its parts; every part but a number of int64 is a string, written as above

In JSON output, bytes are {"hex": "00ff"}, so that they cannot be mistaken for text; floats that JSON cannot express
are {"float": "nan"}; dates, timestamps and decimals are strings; maps whose keys are not text are
{"pairs": [[key, value], ...]}.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from perco.errors import UsageError
from perco.schema.codecs import Codec, DecimalCodec, TupleCodec, written

_HEX: Final = "hex:"
_FORMS: Final = ({"hex"}, {"float"}, {"pairs"})  # keys of maps that stand for something else


def parse_key(codec: Codec[Any], text: str) -> Any:
    """A key from the command line.

    Raises: UsageError.
    """
    if isinstance(codec, TupleCodec):
        return _fitting(codec, _parts(codec, text, exact=True), text, "key")
    return parse_value(codec, text, "key")


def parse_prefix(codec: Codec[Any], text: str) -> Any:
    """The beginning of keys: text, bytes, or a JSON array of the first parts of a tuple."""
    if isinstance(codec, TupleCodec):
        return _parts(codec, text, exact=False)
    return parse_value(codec, text, "prefix")


def _parts(codec: TupleCodec[Any], text: str, *, exact: bool) -> tuple[Any, ...]:
    kinds = [part.name for part in codec.parts]
    items = _json(text, f"key (an array of {', '.join(kinds)})")
    if not isinstance(items, list) or len(items) > len(kinds) or (exact and len(items) < len(kinds)):
        raise UsageError(f"the key {text!r} should be a JSON array of {len(kinds)} parts: {', '.join(kinds)}")
    out: list[Any] = []
    for part, item in zip(codec.parts, items, strict=False):
        if type(item) is int and part.name == "int64":
            out.append(item)
        elif type(item) is str and part.name != "int64":
            out.append(parse_value(part, item, "key"))
        else:
            raise UsageError(f"the key's part {item!r} should be {part.name}")
    return tuple(out)


def parse_value(codec: Codec[Any], text: str, what: str = "value") -> Any:
    """A value from the command line.

    Raises: UsageError.
    """
    if codec.name in ("json", "msgpack"):
        return _fitting(codec, _json(text, what), text, what)
    parse = Decimal if isinstance(codec, DecimalCodec) else _PARSERS.get(codec.name, _bytes)
    try:
        value = parse(text)
    except (ValueError, KeyError, InvalidOperation):
        raise UsageError(f"the {what} {text!r} is not {_described(codec)}") from None
    return _fitting(codec, value, text, what)


def _fitting(codec: Codec[Any], value: Any, text: str, what: str) -> Any:
    """The value, if the codec accepts it. Raises: UsageError."""
    try:
        codec.encode(value)
    except (ValueError, TypeError) as error:
        raise UsageError(f"the {what} {text!r} is not {codec.name}: {error}") from None
    return value


def _described(codec: Codec[Any]) -> str:
    if isinstance(codec, DecimalCodec):
        return "a decimal number, such as 12.50"
    return _DESCRIBED.get(codec.name, "bytes: write it as text, or as hex: and pairs of hexadecimal digits")


def is_number(codec: Codec[Any]) -> bool:
    return isinstance(codec, DecimalCodec) or codec.name in ("int64", "float64")


def _bytes(text: str) -> bytes:
    if text.startswith(_HEX):
        return bytes.fromhex(text[len(_HEX) :])
    return text.encode(errors="surrogateescape")  # as the shell passed them


_DESCRIBED: Final = {
    "int64": "a whole number",
    "float64": "a number",
    "bool": "true or false",
    "date": "a date, such as 2026-03-01",
    "timestamp": "a time, such as 2026-03-01T12:00:00Z",
}
_PARSERS: Final[dict[str, Callable[[str], Any]]] = {
    "text": str,
    "int64": int,
    "float64": float,
    "bool": lambda text: {"true": True, "false": False}[text],
    "date": date.fromisoformat,
    "timestamp": datetime.fromisoformat,
}


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"the {what} {text!r} is not JSON: {error}") from None


def parse_moment(text: str) -> datetime:
    """A wall time: "90s", "5m", "2h", "1d" ago, or in ISO form; without an offset, in the time zone of this machine.

    Raises: UsageError.
    """
    ago = re.fullmatch(r"(\d+)\s*([smhd])", text.strip())
    try:
        if ago:
            seconds = int(ago[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[ago[2]]
            return datetime.now(UTC) - timedelta(seconds=seconds)
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise UsageError(
            f"{text!r} is not a time: write 90s, 5m, 2h or 1d (ago), 2026-03-01T12:00 or 2026-03-01T12:00:00+01:00"
        ) from None


def plain(value: Any) -> Any:
    """A value as JSON can express it; see the module's docstring."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, date | Decimal):
        return written(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: plain(item) for key, item in value.items()}
        return {"pairs": [[plain(key), plain(item)] for key, item in value.items()]}
    return value


def exact(codec: Codec[Any], value: Any) -> Any:
    """Like `plain`, but `from_plain` gives the same value again, whatever it is: a map that looks like one of the forms
    above is written as pairs."""
    if codec.name == "json":
        return value
    return _exact(value) if codec.name == "msgpack" else plain(value)


def _exact(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and value.keys() not in _FORMS:
            return {key: _exact(item) for key, item in value.items()}
        return {"pairs": [[_exact(key), _exact(item)] for key, item in value.items()]}
    return plain(value)


def shown(value: Any, width: int = 0) -> str:
    """A value in readable form. With `width`, in one line; if it is longer, it is cut, and its length is added."""
    if isinstance(value, bytes):
        text = _shown_bytes(value)
    elif isinstance(value, str | date | Decimal):
        text = value if isinstance(value, str) else written(value)
    else:
        text = json.dumps(plain(value), ensure_ascii=False)
    if not width:
        return text
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[: width + 1])
    if len(text) <= width and len(line) <= width:
        return line
    size = f"{len(value)} bytes" if isinstance(value, bytes) else f"{len(text)} characters"
    return f"{line[:width]}... ({size})"


def _shown_bytes(value: bytes) -> str:
    """Bytes as one may type them on the command line: as text if they are text, else as hex."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return _HEX + value.hex()
    readable = all(character.isprintable() or character in "\n\t" for character in text)
    return text if readable and not text.startswith(_HEX) else _HEX + value.hex()


def from_plain(codec: Codec[Any], value: Any) -> Any:
    """A key or value from JSON as `plain` makes it.

    Raises: UsageError if the codec does not accept it.
    """
    try:
        found = _from_plain(codec, value)
        codec.encode(found)
    except (ValueError, TypeError, KeyError, InvalidOperation) as error:
        raise UsageError(f"{json.dumps(value)[:80]} is not {codec.name}: {error}") from None
    return found


def _from_plain(codec: Codec[Any], value: Any) -> Any:
    if isinstance(codec, TupleCodec):
        if not isinstance(value, list):
            raise TypeError("expected an array")
        return tuple(_from_plain(part, item) for part, item in zip(codec.parts, value, strict=True))
    if codec.name == "json":
        return value
    if codec.name == "msgpack":
        return _unplain(value)
    if codec.name == "float64" and isinstance(value, int):
        return float(value)
    if isinstance(codec, DecimalCodec):
        return Decimal(value) if isinstance(value, str | int) and not isinstance(value, bool) else value
    if codec.name in ("date", "timestamp") and isinstance(value, str):
        return _PARSERS[codec.name](value)
    return _unplain(value) if isinstance(value, dict) else value


def _unplain(value: Any) -> Any:
    match value:
        case list():
            return [_unplain(item) for item in value]
        case {"hex": str(digits)} if len(value) == 1:
            return bytes.fromhex(digits)
        case {"float": str(number)} if len(value) == 1:
            return float(number)
        case {"pairs": list(pairs)} if len(value) == 1:
            return {_key_of(key): _unplain(item) for key, item in pairs}
        case dict():
            return {key: _unplain(item) for key, item in value.items()}
    return value


def _key_of(value: Any) -> Any:
    found = _unplain(value)
    return tuple(found) if isinstance(found, list) else found
