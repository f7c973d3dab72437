"""Decides when a change is due, for observers with a delay.

A run of an observer with a delay is due `delay_s` after the newest change that it would see, or `max_delay_s` after the
oldest change that no run has seen, whichever comes first. So the observer also runs on a row that never stops changing
(N4).

The store does not record when each timestamp was handed out. For a timestamp handed out after the worker began, this
process uses the moment when it first saw a notify cell at or above that timestamp. For an earlier timestamp, it uses
the notes of the clock, each of which holds a timestamp and a wall time (O3): the first note at or above a timestamp was
made after the timestamp was handed out. Either moment may be too late, but never too early. So no run begins too early,
measured by the clock that gave the moment. The error is bounded: once a worker has seen a change, it waits for at most
the delay, measured by the monotonic clock, whatever the wall clock does. If the wall clock was set forward, changes
from before the worker began are due sooner; if it was set back, they wait for at most one more delay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from perco.notify.rowlocks import CELLS_PER_ROW
from perco.protocol.claim import COVERS_MAX, Run
from perco.schema.manner import Manner
from perco.storage import NOTIFY, TS_MAX, Query, RowStore, ScanCell

_MARKS_MAX: Final = 4096
_REMEMBERED_MAX: Final = 100_000

_Key = tuple[str, bytes, int]  # table, row, acknowledgement column


class Delays:
    """Delays of one observer. Times are readings of the caller's monotonic clock, in seconds.

    Args:
        manner: states the observer's delays.
        last: every timestamp up to this one was handed out before `now`; higher ones are handed out later.
        wall_ms: the wall time now.
        noted: returns the wall time, in ms, of the first note of the clock at or above a timestamp, if there is one.
    """

    def __init__(
        self, manner: Manner, last: int, now: float, wall_ms: int, noted: Callable[[int], Awaitable[int | None]]
    ) -> None:
        self._manner = manner
        self._first, self._began, self._wall_ms, self._noted = last, now, wall_ms, noted
        # Marks: all timestamps up to `_upto[i]` had been handed out by the moment `_by[i]`. Timestamps first seen
        # within one step share a mark, whose moment is the end of the step. Marks older than any wait are dropped.
        self._step_s = manner.max_delay_s / _MARKS_MAX
        self._upto: list[int] = []
        self._by: list[float] = []
        self._before: dict[int, float] = {}  # for timestamps up to `_first`: a moment by which each had been handed out
        self._held: dict[_Key, float] = {}

    def _see(self, ts: int, now: float) -> None:
        """Record that a timestamp was seen."""
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
        """A moment by which `ts` had been handed out. Each call returns the same moment, unless it is so long ago that
        no wait can still depend on it."""
        if ts > self._first:
            at = bisect_left(self._upto, ts)
            assert at < len(self._upto), "only timestamps that `_see` has noted"
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
        """When a run is due for changes from `oldest` to `newest`."""
        self._see(newest, now)
        delay_s, max_delay_s = self._manner.delay_s, self._manner.max_delay_s
        return min(await self._since(newest) + delay_s, await self._since(oldest) + max_delay_s)

    def hold(self, key: _Key, until: float) -> None:
        """Record that a row must wait longer than its notify cells suggested."""
        self._held[key] = until
        if len(self._held) > _REMEMBERED_MAX:
            del self._held[next(iter(self._held))]

    def held(self, key: _Key, now: float) -> float:
        """The time until which a row must wait, as noted by `hold`; 0: it need not wait."""
        until = self._held.get(key)
        if until is None:
            return 0.0
        if until <= now:
            del self._held[key]
            return 0.0
        return until


async def due_on(store: RowStore, delays: Delays, key: _Key, cells: Sequence[ScanCell], now: float) -> float:
    """When an observer is due on a row, according to these notify cells of the row; a moment in the past means now."""
    held = delays.held(key, now)
    if held:
        return held
    table, row, ack = key
    stamps = [ts for column, ts, _ in cells if column == ack]
    if not stamps or len(cells) >= CELLS_PER_ROW:  # there may be more of them
        queries: list[Query] = [(NOTIFY, ack, 0, TS_MAX, 1), (NOTIFY, ack, 0, TS_MAX, -1)]
        [found] = await store.read([(table, row, queries)])
        stamps = [ts for each in found for ts, _ in each]
        if not stamps:
            return now
    return await delays.due(stamps[0], stamps[-1], now)


async def too_early(store: RowStore, delays: Delays, key: _Key, verdict: Run) -> bool:
    """Whether a run comes too early: it would see a change that is not due. Then the row is held until it is."""
    now = trio.current_time()
    oldest = min((ts for ts in verdict.covers if ts > verdict.pointer), default=verdict.covers[0])
    if len(verdict.covers) == COVERS_MAX:
        table, row, ack = key
        [[cells]] = await store.read([(table, row, ((NOTIFY, ack, verdict.pointer + 1, oldest, -1),))])
        oldest = cells[0][0] if cells else oldest
    due = await delays.due(verdict.covers[0], oldest, now)
    if due > now:
        delays.hold(key, due)
    return due > now
