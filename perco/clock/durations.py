"""Counts durations in buckets, for metrics."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS_S: Final = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class Durations:
    """How often durations fell into each bucket.

    Attributes:
        counts: for each bound in `BOUNDS_S`, how many durations were at most that long, and longer than the bound
            before; the last one counts those that were longer than all bounds.
        total_s: the sum of the durations, in seconds.
    """

    counts: list[int]
    total_s: float

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def note(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def add(self, other: Durations) -> None:
        """Add what another one has counted."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total_s += other.total_s

    def cumulative(self) -> list[int]:
        """For each bucket, how many durations were in it or in one below it."""
        total, found = 0, []
        for count in self.counts:
            total += count
            found.append(total)
        return found


class Timings:
    """How long the operations of a store took.

    Attributes:
        commits: of transactions that committed.
        reads: of rows by their keys; rows that are read together count once.
        scans: of pages of rows.
    """

    commits: Durations
    reads: Durations
    scans: Durations

    __slots__ = ("commits", "reads", "scans")

    def __init__(self) -> None:
        self.commits, self.reads, self.scans = Durations(), Durations(), Durations()
