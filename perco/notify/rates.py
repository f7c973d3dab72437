"""Limits how many runs of an observer begin per second, over all workers of a store.

N15 In any span of time, the runs of an observer with `rate=` that begin are at most that rate times the span, and two
    seconds' worth or three runs more, over all workers whose programs state that rate.

A worker reserves moments, each for one run. The system table has a row for each such observer, `rate/` and its number,
with the moment after the last one reserved, in microseconds since 1970. To reserve moments is to move this one on, by
a conditional mutation, as far as the rate demands. So no clock decides how many moments there are. A worker loses a
moment that it does not use soon.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgpack
import trio

from perco.errors import Corruption, SessionEnded, StoreError
from perco.protocol.records import observer_of
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import ABSENT, APPLIED, DATA, TS_MAX, Failed, Mutation, Write
from perco.txn.engine import Engine

log: logging.Logger = logging.getLogger("perco.observer")

_AHEAD_S: Final = 0.5  # a reservation is of so many seconds, but of at least one moment
_MOST: Final = 1000  # moments of a reservation
_KEPT_S: Final = 1.0  # how long a moment can be used, or as long as it takes until the next one; and how long after
# that a run may begin: the row may have other observers, which run first
_TICK_S: Final = 0.05  # how often scanners look for rows while runs wait for moments
_TRIES: Final = 16
_AWAY_S: Final = 1.0  # between two attempts if the store does not answer
_CLOCK_S, _WORKERS = 60, 100  # if more is reserved than so many workers could want, a clock was wrong


def rate_row(number: int) -> bytes:
    """The system table's row about the rate of an observer."""
    return b"rate/%d" % number


class Rates:
    """The moments that a worker has reserved. Loop thread only.

    Args:
        per_s: the rates of the observers that have one, by number.
        wake: called when moments have been reserved.
    """

    def __init__(self, engine: Engine, per_s: Mapping[int, float], wake: Callable[[], None]) -> None:
        self._engine, self._per_s, self._wake = engine, per_s, wake
        # The wall time at which the monotonic clock was 0. It is read once: if the wall clock is set, nothing happens.
        self._epoch_us = int(engine.oracle.wall_ms() * 1e3 - trio.current_time() * 1e6)
        self._moments: dict[int, deque[float]] = {number: deque() for number in per_s}
        self._kept_s = {number: max(_KEPT_S, 1 / each) for number, each in per_s.items()}
        self._reserving: set[int] = set()
        self._again_at: dict[int, float] = {}  # after a failed reservation
        self._lacking: set[int] = set()  # observers that could have run, but had no moment

    def may_run(self, number: int, now: float) -> bool:
        """Whether a run of an observer may begin now. If not, moments for it are reserved."""
        moments = self._moments.get(number)
        if moments is None:
            return True
        while moments and moments[0] < now - self._kept_s[number]:
            moments.popleft()
        if moments and moments[0] <= now:
            return True
        self._lacking.add(number)
        if not moments and number not in self._reserving and now >= self._again_at.get(number, now):
            self._reserving.add(number)
            self._engine.background.spawn(lambda: self._reserve(number))
        return False

    def take(self, acks: Iterable[int]) -> None:
        """Use a moment of each of these observers."""
        for number in map(observer_of, acks):
            if moments := self._moments.get(number):
                moments.popleft()

    def give_back(self, acks: Iterable[int], now: float) -> None:
        """Return the moments of runs that have not begun."""
        for number in map(observer_of, acks):
            if number in self._moments:
                self._moments[number].appendleft(now)

    @property
    def is_lacking(self) -> bool:
        """Whether an observer has lacked a moment since the last `next_due`."""
        return bool(self._lacking)

    def wait_s(self, number: int) -> float:
        """Use a moment for a run that is repeated, and return 0; if there is none now, how long to wait for one."""
        moments = self._moments.get(number)
        if moments is None:
            return 0.0
        now = trio.current_time()
        if self.may_run(number, now):
            moments.popleft()
            return 0.0
        return moments[0] - now if moments else 1 / self._per_s[number]

    def is_fresh(self, number: int, taken_at: float) -> bool:
        """Whether a moment that was used at `taken_at` still counts for a run that begins now, or another one is there
        and has been used."""
        if number not in self._moments or trio.current_time() - taken_at <= _KEPT_S:
            return True
        return not self.wait_s(number)

    def next_due(self) -> float:
        """When an observer that has lacked a moment since the last call can run, or when to ask again for one."""
        lacking, self._lacking = self._lacking, set()
        soonest = trio.current_time() + _TICK_S
        due = [max(self._moments[number][0], soonest) for number in lacking if self._moments[number]]
        return min(due + [self._again_at[number] for number in lacking if number in self._again_at], default=math.inf)

    # ------------------------------------------------------------------ reserving

    async def _reserve(self, number: int) -> None:
        per_s = self._per_s[number]
        count = max(1, min(math.ceil(per_s * _AHEAD_S), _MOST))
        first_us = None
        try:
            first_us = await self._moved_on(number, count, 1e6 / per_s)
        except (StoreError, SessionEnded, Corruption) as error:
            log.warning("the runs of an observer with a rate wait: %s", error)
        finally:
            self._reserving.discard(number)
        if first_us is None:
            self._again_at[number] = trio.current_time() + _AWAY_S
        else:
            self._again_at.pop(number, None)
            began = (first_us - self._epoch_us) / 1e6
            self._moments[number].extend(began + i / per_s for i in range(count))
        self._wake()

    async def _moved_on(self, number: int, count: int, apart_us: float) -> int | None:
        """Reserve moments in the store. Returns the first one; None if other workers were faster again and again, or
        the answer was lost."""
        store, row = self._engine.driver.store, rate_row(number)
        for _ in range(_TRIES):
            [[cells]] = await store.read([(SYSTEM_TABLE, row, ((DATA, 0, 1, TS_MAX, 1),))])
            version, next_us = (cells[0][0], _decoded(cells[0][1])) if cells else (0, 0)
            now_us = self._epoch_us + int(trio.current_time() * 1e6)
            if next_us > now_us + 1e6 * _CLOCK_S + _WORKERS * count * apart_us:
                next_us = 0
            first_us = max(next_us, now_us)
            value = msgpack.packb(first_us + math.ceil(count * apart_us))
            writes: tuple[Write, ...] = ((DATA, 0, version + 1, value),)
            if version:
                writes += ((DATA, 0, version, None),)
            check = (ABSENT, DATA, 0, version + 1, TS_MAX)
            [verdict] = await store.apply([Mutation(SYSTEM_TABLE, ((row, (check,), writes),))])
            if verdict is APPLIED:
                return first_us
            if isinstance(verdict, Failed):
                raise verdict.error
        return None


def _decoded(value: bytes) -> int:
    """The moment in a row; 0 if it cannot be read: then the rate begins again."""
    try:
        found: Any = msgpack.unpackb(value)
    except ValueError:
        return 0
    return found if isinstance(found, int) else 0
