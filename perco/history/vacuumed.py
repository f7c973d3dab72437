"""The results of vacuums."""

from __future__ import annotations

from dataclasses import dataclass, field

from perco.clock.holds import Holder
from perco.protocol.retention import Removed


@dataclass(slots=True)
class VacuumResult:
    """The result of a vacuum; while it runs, its progress.

    Attributes:
        watermark: versions needed by reads at or above it were left alone.
        cuts: for each table, the oldest timestamp at which it can be read from now on.
        holder: the hold that kept the watermark from advancing.
        table: the table that the vacuum has reached.
        rows: rows that were examined.
        locks: locks that were in the way and have been settled.
        removed: cells, by kind.
        corrupt: rows that do not decode and were left alone: `perco check` says what is wrong with them.
        blocked: rows where a delete marker stays until its observers have run.
        left: mutations whose reply was lost; the next vacuum examines their rows again.
        repacked: how often half-empty pages were repacked, a thousand cells at a time.
        held_up: places of locks that do not decode; nothing that the oldest of them may need was removed.
        seconds: how long the vacuum took.
    """

    watermark: int = 0
    cuts: dict[str, int] = field(default_factory=dict)
    holder: Holder = Holder("retention", 0)
    table: str = ""
    rows: int = 0
    locks: int = 0
    removed: Removed = field(default_factory=Removed)
    corrupt: int = 0
    blocked: int = 0
    left: int = 0
    repacked: int = 0
    held_up: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class VacuumStatistics:
    """Statistics since the store was opened.

    Attributes:
        watermark: a reader that began at or above this timestamp can still read everything that it may need.
        holder: the hold that kept the watermark from advancing in the last run.
        runs: how often the whole store was vacuumed.
        removed: cells, by kind.
        failure: the error of the last run in the background, if that run failed; failed runs are retried.
    """

    watermark: int
    holder: Holder
    runs: int
    removed: Removed
    failure: Exception | None
