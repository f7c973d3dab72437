"""How far observers lag behind: how many changes wait for each, and since when.

To count the changes of each observer, this module reads all notify cells. If few wait, each call reads them. If many
wait, a background task reads them again and again, at a pace that leaves the loop to others, and calls answer at once
with what it has found last. The ages of the oldest changes go on meanwhile. The task ends when no call has come for a
while.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple

import trio

from perco.clock.oracle import note_from
from perco.errors import Corruption, PercoError
from perco.notify.waiting import Waiting
from perco.protocol.records import observer_of, unpack_cause
from perco.storage import FAILED_LIST, NOTIFY, TS_MAX, OwnerStore
from perco.txn.engine import Engine

log: logging.Logger = logging.getLogger("perco.observer")

_FEW: Final = 2000  # changes; up to so many, each call counts them
_SHARE: Final = 0.05  # of the loop's time that the task takes
_PIECE: Final = 256  # cells between two pauses
_PAUSE_MOST_S: Final = 0.02  # so that a million changes are counted in two minutes, even while the loop is busy
_LEAST_S: Final = 1.0  # between two counts of the task
_UNASKED_S: Final = 300.0  # then the task ends


@dataclass(frozen=True, slots=True)
class Lag:
    """How far an observer lags behind.

    Attributes:
        waiting: how many changes wait for it.
        oldest_s: how long ago the oldest cause of these changes was committed, in seconds, exact to about a second; 0.0
            if none waits.
        failing: how many of these changes have had a failed run; `attempts`: the most failed runs of one of them.
        failed: how many of its changes are on the failed list.
        workers: how many processes run it.
        counted_s: how many seconds ago the changes were counted.
    """

    waiting: int = 0
    oldest_s: float = 0.0
    failing: int = 0
    attempts: int = 0
    failed: int = 0
    workers: int = 0
    counted_s: float = 0.0


class Tally:
    """Counts the changes that wait for each observer, by number.

    Attributes:
        waiting: how many changes; `failing`: how many of them have had a failed run.
        attempts: the most failed runs of one of them.
        causes: the oldest root cause of them (N9).
    """

    def __init__(self) -> None:
        self.waiting: Counter[int] = Counter()
        self.failing: Counter[int] = Counter()
        self.attempts: dict[int, int] = {}
        self.causes: dict[int, int] = {}

    def add(self, number: int, root: int, attempts: int) -> None:
        """Count a change that an observer waits for: its root cause, and how many runs for it have failed."""
        self.waiting[number] += 1
        if root < self.causes.get(number, TS_MAX):
            self.causes[number] = root
        if attempts:
            self.failing[number] += 1
            self.attempts[number] = max(attempts, self.attempts.get(number, 0))


class _Count(NamedTuple):
    """A completed count, by observers' numbers.

    Attributes:
        at: when it began, by the monotonic clock.
        cells: how many cells were counted.
        since_ms: the wall time of the oldest cause.
    """

    at: float
    cells: int
    tally: Tally
    since_ms: dict[int, int]
    failed: Counter[int]


class Lags:
    """Counts waiting changes. Loop thread only.

    Args:
        workers: returns how many processes run each observer, by id.
    """

    def __init__(
        self, engine: Engine, waiting: Waiting, store: OwnerStore, workers: Callable[[], Awaitable[dict[str, int]]]
    ) -> None:
        self._engine, self._waiting, self._store, self._workers = engine, waiting, store, workers
        self._last: _Count | None = None
        self._asked_at = 0.0
        self._stop: Callable[[], None] | None = None  # ends the task; None: it does not run
        self._counting = trio.Lock()

    async def lag(self) -> dict[str, Lag]:
        """The lag of each observer, by id."""
        self._asked_at = trio.current_time()
        if self._stop is None:
            await self._once()
        assert self._last is not None, "counted just now, or by the task"
        if self._stop is None and self._last.cells > _FEW:
            self._stop = self._engine.background.start(self._again_and_again, "lag")
        return self._of(self._last, await self._workers())

    def _of(self, count: _Count, workers: dict[str, int]) -> dict[str, Lag]:
        now_ms, counted_s = self._engine.oracle.wall_ms(), max(trio.current_time() - count.at, 0.0)
        found, tally = {}, count.tally
        for id, entry in self._engine.known.catalogue.observers.items():
            number = entry.number
            found[id] = Lag(
                tally.waiting[number],
                max(now_ms - count.since_ms.get(number, now_ms), 0) / 1000,
                tally.failing[number],
                tally.attempts.get(number, 0),
                count.failed[number],
                workers.get(id, 0),
                counted_s,
            )
        return found

    def _tables(self) -> Iterable[str]:
        return set(self._waiting.observed_tables()) & set(self._store.tables())

    async def _again_and_again(self) -> None:
        try:
            while trio.current_time() - self._asked_at < _UNASKED_S:
                await trio.sleep(_LEAST_S)
                try:
                    async with self._counting:
                        self._last = await self._count(_Pace())
                except PercoError as error:  # also damage: the next call that counts by itself raises it
                    log.warning("waiting changes cannot be counted now: %s", error)
                    continue
                if self._last.cells <= _FEW:
                    return
        finally:
            self._stop = None

    async def _once(self) -> None:
        """Count now; calls at the same time share a count."""
        asked_at = trio.current_time()
        async with self._counting:
            if self._last is None or self._last.at < asked_at:
                self._last = await self._count(None)

    async def _count(self, pace: _Pace | None) -> _Count:
        tally, failed = Tally(), Counter[int]()
        seen, at = 0, trio.current_time()
        for table in sorted(self._tables()):
            async with aclosing(self._waiting.cells_of(table, NOTIFY)) as cells:
                async for _, (column, ts, value) in cells:
                    tally.add(observer_of(column), *_cause(ts, value))
                    seen += 1
                    if pace is not None and not seen % _PIECE:
                        await pace.pause()
            if self._store.count(table, FAILED_LIST) or self._store.prompt is None:
                async with aclosing(self._waiting.cells_of(table, FAILED_LIST)) as cells:
                    async for _, (column, _, _) in cells:
                        failed[observer_of(column)] += 1
                        seen += 1
                        if pace is not None and not seen % _PIECE:
                            await pace.pause()
        store = self._engine.driver.store
        now_ms = self._engine.oracle.wall_ms()
        since = {number: await note_from(store, root) or now_ms for number, root in tally.causes.items()}  # O3
        return _Count(at, seen, tally, since, failed)


class _Pace:
    """Pauses for so long that the work between pauses takes a small share of the time."""

    def __init__(self) -> None:
        self._went_on = trio.current_time()

    async def pause(self) -> None:
        took_s = trio.current_time() - self._went_on  # other tasks may have had a part of it
        await trio.sleep(min(took_s * (1 / _SHARE - 1), _PAUSE_MOST_S))
        self._went_on = trio.current_time()


def _cause(ts: int, value: bytes) -> tuple[int, int]:
    """The root cause of a notify cell and its failed attempts; of a cell that cannot be read, the change itself."""
    try:
        root, _, _, attempts = unpack_cause(value)
    except Corruption:
        return ts, 0
    return root, attempts
