"""The first and last members of a group in the order of a value, kept from change to change. No I/O.

An ordered index has all members, but a deleted row stays in it until its history is removed, and every scan passes it.
So a group remembers the members at both ends of the order, a few more than its function reads, and changes this list as
members change. It reads the index only when the list has become too short.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgpack

from perco.views.aggregates import Ordered, Sum, Tally

_SPARE: Final = 4  # a list has up to so many times the members that the function reads
_CHANGED_MAX: Final = 1000


class Entry(NamedTuple):
    """A member in an order: the stored forms of its value's order key, of its key, and of its value."""

    order: bytes
    member: bytes
    value: bytes

    @property
    def at(self) -> tuple[bytes, bytes]:
        return self.order, self.member


@dataclass(slots=True)
class Top:
    """One end of an order: the first `size` members or, with `last`, the last ones.

    Attributes:
        entries: in ascending order, whichever end it is.
        edge: every member that is not in the list lies beyond this place; None: the list has all members.
    """

    size: int
    last: bool
    entries: list[Entry] = field(default_factory=list)
    edge: tuple[bytes, bytes] | None = None

    def change(self, member: bytes, new: Entry | None) -> None:
        """A member has another value, or (None) no value any more."""
        self.entries = [each for each in self.entries if each.member != member]
        if new is not None and not self._is_beyond(new.at):
            insort(self.entries, new)
            if len(self.entries) > self.room:
                del self.entries[0 if self.last else -1]
                self.edge = self.entries[0 if self.last else -1].at

    def fill(self, entries: Iterable[Entry]) -> None:
        """Begin again with the first (last) `room` members of the index, or with all if it has fewer."""
        self.entries = sorted(entries)
        self.edge = None
        if len(self.entries) >= self.room:
            self.edge = self.entries[0 if self.last else -1].at

    @property
    def room(self) -> int:
        return _SPARE * self.size

    @property
    def is_short(self) -> bool:
        """Whether members that the function reads may be missing."""
        return self.edge is not None and len(self.entries) < self.size

    def best(self) -> list[Entry]:
        """The first `size` members in order or, with `last`, the last ones, the last one first."""
        return self.entries[: -self.size - 1 : -1] if self.last else self.entries[: self.size]

    def _is_beyond(self, at: tuple[bytes, bytes]) -> bool:
        return self.edge is not None and (at < self.edge if self.last else at > self.edge)


@dataclass(slots=True)
class Kept:
    """The aggregates of a group: its tally, and the ends of its orders, by the names of their columns.

    Attributes:
        known: False if nothing usable was stored though the group may have members: it was kept in another shape.
    """

    shape: str
    tally: Tally
    tops: dict[tuple[str, bool], Top]
    known: bool = True

    @classmethod
    def of(cls, stored: bytes | None, shape: str, sums: Sequence[Sum], orders: Iterable[Ordered]) -> Kept:
        """As it was stored; None: nothing yet."""
        tops = {}
        for order in orders:
            for last, size in (False, order.first), (True, order.last):
                if size:
                    tops[order.column.first_name, last] = Top(size, last)
        kept = cls(shape, Tally.empty(sums), tops)
        if stored is None:
            return kept
        there, packed, parts = msgpack.unpackb(stored, use_list=False)
        if there != shape:
            kept.known = False
            return kept
        kept.tally = Tally.unpack(packed)
        for name, last, entries, edge in parts:
            kept.tops[name, last].entries, kept.tops[name, last].edge = [Entry(*each) for each in entries], edge
        return kept

    def pack(self) -> bytes | None:
        """As stored; None: nothing needs to be."""
        if self.tally.is_nothing():
            return None
        parts = [(name, last, top.entries, top.edge) for (name, last), top in self.tops.items()]
        return pack_kept(self.shape, self.tally.pack(), parts)


def pack_kept(shape: str, tally: bytes, tops: Sequence[Any]) -> bytes:
    """The stored form of a `Kept`."""
    packed: bytes = msgpack.packb([shape, tally, tops])
    return packed


@dataclass(slots=True)
class Delta:
    """The additions of one or more transactions to a group's tally, and the members that they have changed.

    Attributes:
        shape: which aggregates it is for (`Grouped.shape`).
        changed: members in stored form; None: too many to be listed.
    """

    shape: str
    tally: Tally
    changed: set[bytes] | None = field(default_factory=set)

    def merge(self, other: Delta) -> None:
        self.tally.merge(other.tally)
        if self.changed is not None:
            self.changed = None if other.changed is None else self.changed | other.changed
        if self.changed is not None and len(self.changed) > _CHANGED_MAX:
            self.changed = None

    def pack(self) -> bytes:
        changed = None if self.changed is None else sorted(self.changed)
        packed: bytes = msgpack.packb([self.shape, self.tally.pack(), changed])
        return packed

    @classmethod
    def unpack(cls, stored: bytes) -> Delta:
        shape, tally, changed = msgpack.unpackb(stored, use_list=False)
        return cls(shape, Tally.unpack(tally), None if changed is None else set(changed))
