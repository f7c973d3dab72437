"""The cells on which transactions conflict most."""

from __future__ import annotations

from heapq import nlargest
from typing import Final

from perco.protocol.records import Cellref

_MOST: Final = 512


class Contended:
    """Counts conflicts by cell. If there are too many cells, those with the fewest conflicts are forgotten, so the
    count of a cell is a lower bound."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Cellref, int] = {}

    def note(self, cell: Cellref) -> None:
        """Count a conflict."""
        counts = self._counts
        if cell not in counts and len(counts) >= _MOST:
            self._counts = counts = dict(self.most(_MOST // 2))
        counts[cell] = counts.get(cell, 0) + 1

    def most(self, count: int) -> list[tuple[Cellref, int]]:
        """The cells with the most conflicts, and how many these are."""
        return nlargest(count, self._counts.items(), key=lambda found: found[1])
