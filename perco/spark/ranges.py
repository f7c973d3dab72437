"""Key ranges: made from options, and cut into parts. Rows are compared in stored form, which sorts like the keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

import perco
from perco.errors import UsageError
from perco.schema.codecs import DecimalCodec
from perco.txn.scan import range_of

_PARSERS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    perco.DATE.name: (date.fromisoformat, "dates, such as 2026-03-01"),
    perco.TIMESTAMP.name: (datetime.fromisoformat, "times with an offset, such as 2026-03-01T12:00:00Z"),
}
_DIGITS: Final = 8  # how many bytes after the common prefix of two rows measure the distance between them


class Range(NamedTuple):
    """Rows from `low` up to but excluding `high`; None: up to the end of the table."""

    low: bytes = b""
    high: bytes | None = None

    def within(self, other: Range) -> Range:
        highs = [high for high in (self.high, other.high) if high is not None]
        return Range(max(self.low, other.low), min(highs, default=None))

    @property
    def empty(self) -> bool:
        return self.high is not None and self.low >= self.high


def of_options(table: perco.Table[Any], start: str | None, stop: str | None, prefix: str | None) -> Range:
    """The range that the options select. Raises: UsageError for a value that is not a key of the table."""

    def key(name: str, text: str | None) -> Any:
        if text is None:
            return None
        if table.key.name == perco.TEXT.name:
            return text
        if table.key.name == perco.INT64.name:
            try:
                return int(text)
            except ValueError:
                raise UsageError(
                    f"{name}={text!r} is not a key of table {table.name!r}: its keys are numbers"
                ) from None
        if table.key.name == perco.BYTES.name:
            try:
                return bytes.fromhex(text)
            except ValueError:
                raise UsageError(
                    f"{name}={text!r} is not a key of table {table.name!r}: its keys are bytes; give them in hex"
                ) from None
        if table.key.name in _PARSERS or isinstance(table.key, DecimalCodec):
            parse, such = _PARSERS.get(table.key.name, (Decimal, f"{table.key.name}, such as 12.50"))
            try:
                table.row(value := parse(text))
            except (ValueError, InvalidOperation):
                raise UsageError(f"{name}={text!r} is not a key of table {table.name!r}: its keys are {such}") from None
            return value
        raise UsageError(f"{name}= needs a table whose keys have one part; for {table.name!r} filter the key's fields")

    return Range(*range_of(table, key("start", start), key("stop", stop), key("prefix", prefix)))


def cut(whole: Range, starts: Sequence[bytes]) -> list[Range]:
    """The parts of a range, cut at `starts`."""
    at = [whole.low, *(start for start in sorted(starts) if start > whole.low)]
    ends: list[bytes | None] = [*at[1:], None]
    parts = (Range(low, high).within(whole) for low, high in zip(at, ends, strict=True))
    return [part for part in parts if not part.empty]


def between(first: bytes, last: bytes, parts: int) -> list[bytes]:
    """Up to `parts - 1` rows that cut the range from `first` to `last` into equal parts, as if its rows were evenly
    distributed."""
    common = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))

    def number(row: bytes) -> int:
        return int.from_bytes(row[common : common + _DIGITS].ljust(_DIGITS, b"\0"), "big")

    low, high = number(first), number(last)
    cuts = {low + (high - low) * n // parts for n in range(1, parts)} - {low}
    return [first[:common] + n.to_bytes(_DIGITS, "big").rstrip(b"\0") for n in sorted(cuts)]
