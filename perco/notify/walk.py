"""Where a scanner begins, and the pages of dirty rows that it walks."""

from __future__ import annotations

import random
from typing import NamedTuple

from perco.notify.rowlocks import Dirty
from perco.storage import ScanCell


class Place(NamedTuple):
    """A tablet's row range."""

    table: str
    low: bytes
    high: bytes | None


class Walk:
    """A page of dirty rows.

    Attributes:
        claims, before: how many rows the scanner had claimed by its last jump, and by the moment at which it read this
            page.
        taken: rows for which the scanner has a slot and this process's lock, but no claim yet.
        stale_from: where to continue reading, if the rest of the page is stale.
    """

    __slots__ = ("before", "claims", "rows", "stale_from", "table", "taken")

    table: str
    rows: list[tuple[bytes, list[ScanCell]]]
    claims: int
    before: int
    taken: list[Dirty]
    stale_from: bytes | None

    def __init__(self, table: str, rows: list[tuple[bytes, list[ScanCell]]], claims: int, before: int) -> None:
        self.table, self.rows, self.claims, self.before = table, rows, claims, before
        self.taken = []
        self.stale_from = None

    def is_stale(self, claims: int, most: int) -> bool:
        """Whether other scanners may have run the page's rows meanwhile, because this scanner has claimed many rows
        since it read the page."""
        return claims - self.before >= most


def random_row(first: bytes, last: bytes, rng: random.Random) -> bytes:
    """A random key between two others, roughly uniform: the bytes after their common prefix are read as a fraction."""
    if first >= last:
        return first
    common = 0
    while common < len(first) and first[common] == last[common]:
        common += 1
    low = int.from_bytes(first[common : common + 7].ljust(7, b"\x00"), "big")
    high = int.from_bytes(last[common : common + 7].ljust(7, b"\x00"), "big")
    row = first[:common] + rng.randint(low, high).to_bytes(7, "big")
    return min(max(row, first), last)
