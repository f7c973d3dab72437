"""The aggregates that a group keeps: the count, exact sums, and the members in the order of a value. No I/O.

A group of a million members must not read a million rows for each change. So the transaction that changes a member also
writes what the change adds to the group's count and sums (a delta), and moves the member's row in an ordered index.

V4  Sums do not depend on the order of additions: integers are exact, and so are the sums of floats, which are added as
    integers in units of the smallest float and rounded once, when they are read. So a sum that was kept by deltas
    equals the sum over all members, bit for bit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from perco.errors import UsageError
from perco.schema.codecs import FLOAT64, INT64, Codec
from perco.schema.schema import Column

_UNIT: Final = 1074  # the smallest positive float is 2 ** -1074


@dataclass(frozen=True, slots=True)
class Count:
    """The number of members."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of a column over the members that have a value there: INT64 or FLOAT64."""

    column: Column[Any, Any]


@dataclass(frozen=True, slots=True)
class Ordered:
    """The members in the order of a column's value: the first `first` and the last `last` of them are read."""

    column: Column[Any, Any]
    first: int = 0
    last: int = 0


Aggregate = Count | Sum | Ordered


def count() -> Count:
    """Keep the number of members: `rows.count()`."""
    return Count()


def sum(column: Column[Any, Any]) -> Sum:
    """Keep the sum of a column: `rows.sum(column)`. Raises: UsageError unless the column is of INT64 or FLOAT64."""
    if column.codec not in (INT64, FLOAT64):
        raise UsageError(f"views.sum takes a column of perco.INT64 or perco.FLOAT64; {column!r} is {column.codec.name}")
    return Sum(column)


def smallest(column: Column[Any, Any], n: int = 1) -> Ordered:
    """Keep the members in the order of a column: `rows.smallest(column, n)` reads the first n.

    Raises: UsageError unless the column's codec keeps order or is FLOAT64.
    """
    return Ordered(sortable("smallest", column), first=few("smallest", n))


def largest(column: Column[Any, Any], n: int = 1) -> Ordered:
    """Keep the members in the order of a column: `rows.largest(column, n)` reads the last n, the largest first.

    Raises: UsageError unless the column's codec keeps order or is FLOAT64.
    """
    return Ordered(sortable("largest", column), last=few("largest", n))


_READ_MAX: Final = 10_000


def few(what: str, n: int) -> int:
    """Raises: UsageError unless n is a number of members."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _READ_MAX:
        raise UsageError(f"views.{what}: n is a number of members from 1 to {_READ_MAX}, not {n!r}")
    return n


def sortable(what: str, column: Column[Any, Any]) -> Column[Any, Any]:
    """Raises: UsageError unless the column's values have an order."""
    codec = column.codec
    if codec is not FLOAT64 and not codec.ordered:
        raise UsageError(f"views.{what}: {column!r} is {codec.name}, which does not keep order")
    return column


# ------------------------------------------------------------------ order


def order_codec(codec: Codec[Any]) -> Codec[Any]:
    """The codec of the keys that sort as this codec's values do."""
    return INT64 if codec is FLOAT64 else codec


def order_key(codec: Codec[Any], value: Any) -> Any:
    """The value as a key of `order_codec`. A float becomes the integer of its bits, in the floats' total order."""
    if codec is not FLOAT64:
        return value
    (bits,) = struct.unpack(">q", struct.pack(">d", value + 0.0))  # + 0.0: no negative zero
    return bits if bits >= 0 else -(bits & 0x7FFF_FFFF_FFFF_FFFF)


# ------------------------------------------------------------------ exact sums


@dataclass(slots=True)
class Total:
    """An exact sum. `units`: of integers, or of floats in units of 2 ** -1074; the rest counts what is no number."""

    units: int = 0
    nans: int = 0
    infinities: int = 0
    negative: int = 0  # negative infinities

    def add(self, codec: Codec[Any], value: Any, sign: int) -> None:
        if value is None:
            return
        if codec is INT64:
            self.units += sign * value
        elif math.isfinite(value):
            top, bottom = float(value).as_integer_ratio()
            self.units += sign * (top << _UNIT) // bottom
        elif math.isnan(value):
            self.nans += sign
        elif value > 0:
            self.infinities += sign
        else:
            self.negative += sign

    def merge(self, other: Total) -> None:
        self.units += other.units
        self.nans += other.nans
        self.infinities += other.infinities
        self.negative += other.negative

    def value(self, codec: Codec[Any]) -> Any:
        """The sum as a value of its column's type; for floats, rounded once (as `math.fsum` does)."""
        if codec is INT64:
            return self.units
        if self.nans or (self.infinities and self.negative):
            return math.nan
        if self.infinities or self.negative:
            return math.inf if self.infinities else -math.inf
        try:
            return self.units / (1 << _UNIT)
        except OverflowError:
            return math.inf if self.units > 0 else -math.inf

    def packed(self) -> tuple[bytes, int, int, int, int]:
        shift = (self.units & -self.units).bit_length() - 1 if self.units else 0
        units = self.units >> shift
        size = units.bit_length() // 8 + 1
        return units.to_bytes(size, "big", signed=True), shift, self.nans, self.infinities, self.negative

    @classmethod
    def unpacked(cls, stored: Sequence[Any]) -> Total:
        units, shift, nans, infinities, negative = stored
        return cls(int.from_bytes(units, "big", signed=True) << shift, nans, infinities, negative)


@dataclass(slots=True)
class Tally:
    """A group's count and sums, or what a transaction adds to them. `totals`: in the order of the view's sums."""

    members: int = 0
    totals: list[Total] = field(default_factory=list)

    @classmethod
    def empty(cls, sums: Sequence[Sum]) -> Tally:
        return cls(0, [Total() for _ in sums])

    def change(self, sums: Sequence[Sum], values: Sequence[Any] | None, sign: int) -> None:
        """Add (sign 1) or take away (-1) a member with these values of the summed columns; None: no member."""
        if values is None:
            return
        self.members += sign
        for total, each, value in zip(self.totals, sums, values, strict=True):
            total.add(each.column.codec, value, sign)

    def merge(self, other: Tally) -> None:
        self.members += other.members
        for mine, theirs in zip(self.totals, other.totals, strict=True):
            mine.merge(theirs)

    def is_nothing(self) -> bool:
        return not self.members and all(total == Total() for total in self.totals)

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([self.members, [total.packed() for total in self.totals]])
        return packed

    @classmethod
    def unpack(cls, stored: bytes) -> Tally:
        members, totals = msgpack.unpackb(stored, use_list=False)
        return cls(members, [Total.unpacked(total) for total in totals])


def tallied(sums: Sequence[Sum], members: Iterable[Sequence[Any]]) -> Tally:
    """The count and the sums over all members; each is given as its values of the summed columns."""
    found = Tally.empty(sums)
    for values in members:
        found.change(sums, values, 1)
    return found
