"""When a change is due whose observer waits for others like it.

An observer with a delay runs no earlier than `delay_s` after the newest change that the run sees, and no later than it
must: `max_delay_s` after the oldest that no run has seen, so a row that changes for ever still runs (N4).

How long ago was a timestamp given out? Nobody notes that for each. This process knows when it saw a notify cell first:
by then the timestamp had been given out. For what was there when its worker began, the notes of the clock tell (O3):
the first note at or above a timestamp was made after it. Both err to the late side, so a run is never too early by the
clock that they were read from; by how much they err is bounded, for from the moment that it has seen a change a worker
waits at most the delay, by the monotonic clock, whatever the wall clock does. A wall clock that was set forward makes
what was there when a worker begins due sooner; one that was set back makes it wait for at most the delay once more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable
from typing import Final

from perco.txn.schema import Manner

_MARKS_MAX: Final = 4096
_REMEMBERED_MAX: Final = 100_000

_Key = tuple[str, bytes, int]  # table, row, ack column


class Delays:
    """Of one observer. Times are the caller's monotonic clock, in seconds.

    Args:
        manner: the observer's.
        last: every timestamp up to this one was given out before `now`; above it, each comes later.
        wall_ms: the wall time now.
        noted: asks for the wall time, in ms, of the first note of the clock at or above a timestamp, if there is one.
    """

    def __init__(
        self, manner: Manner, last: int, now: float, wall_ms: int, noted: Callable[[int], Awaitable[int | None]]
    ) -> None:
        self._manner = manner
        self._first, self._began, self._wall_ms, self._noted = last, now, wall_ms, noted
        # Marks: all timestamps up to the one had been given out by the moment at the same place of the other. Those met
        # within a step share a mark, at its end; what is older than any wait needs none.
        self._step_s = manner.max_delay_s / _MARKS_MAX
        self._upto: list[int] = []
        self._by: list[float] = []
        self._before: dict[int, float] = {}  # of timestamps that were there when it began
        self._held: dict[_Key, float] = {}

    def _see(self, ts: int, now: float) -> None:
        """A timestamp was met."""
        upto, by = self._upto, self._by
        if ts <= (upto[-1] if upto else self._first):
            return
        if by and now <= by[-1]:
            upto[-1] = ts
            return
        upto.append(ts)
        by.append(now + self._step_s)
        if len(upto) > 2 * _MARKS_MAX:
            del upto[:_MARKS_MAX], by[:_MARKS_MAX]

    async def _since(self, ts: int) -> float:
        """A moment by which it had been given out, the same at every call; or, if it was long ago, one long ago."""
        if ts > self._first:
            at = bisect_left(self._upto, ts)
            assert at < len(self._upto), "only of what was met"
            return self._by[at]
        found = self._before.get(ts)
        if found is None:
            wall_ms = await self._noted(ts)
            ago_s = 0.0 if wall_ms is None else max(self._wall_ms - wall_ms, 0) / 1000
            if len(self._before) >= _REMEMBERED_MAX:
                del self._before[next(iter(self._before))]
            found = self._before[ts] = self._began - ago_s
        return found

    async def due(self, newest: int, oldest: int, now: float) -> float:
        """When changes from `oldest` to `newest` are to be run."""
        self._see(newest, now)
        delay_s, max_delay_s = self._manner.delay_s, self._manner.max_delay_s
        return min(await self._since(newest) + delay_s, await self._since(oldest) + max_delay_s)

    def hold(self, key: _Key, until: float) -> None:
        """It turned out that a row waits longer than its notify cells made one think."""
        self._held[key] = until
        if len(self._held) > _REMEMBERED_MAX:
            del self._held[next(iter(self._held))]

    def held(self, key: _Key, now: float) -> float:
        """Until when, or 0."""
        until = self._held.get(key)
        if until is None:
            return 0.0
        if until <= now:
            del self._held[key]
            return 0.0
        return until
