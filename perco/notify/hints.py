"""N8: Rows on which notify cells have just become visible.

Scanners find all work without hints. But if a slow observer has many changes, a tour passes all of its rows, and a
change of a quick observer waits for most of a tour, or for the pause after one. So while tours pass many rows, this
process's own commits also say where they have made notify cells visible. If another process owns the store, that
process says so, too, of all commits that it writes: of none in a store with tablet servers, or in a database whose
clients are direct. A hint may be lost, or come too early or too late: a tour finds the row then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

from perco.notify.rowlocks import Elsewhere
from perco.txn.engine import Engine
from perco.txn.resolver import Hint

MOST: Final = 256  # hints that wait for a scanner; if there are more, all are dropped
_LINGER_S: Final = 1.0  # how long hints are still wanted after the last long tour


class Hints:
    """The hints that wait for a worker's scanners. Loop thread only.

    Args:
        elsewhere: the other processes, if there are any.
        may_run: whether an observer, by its number, may run now. Hints for others are left out, because the slow
            observer's own changes would keep scanners busy.

    Attributes: `on`: whether hints are wanted now.
    """

    on: bool

    def __init__(
        self, engine: Engine, elsewhere: Callable[[], Elsewhere | None], may_run: Callable[[int], bool]
    ) -> None:
        self._engine, self._elsewhere, self._may_run = engine, elsewhere, may_run
        self._rows: deque[tuple[str, bytes]] = deque()
        self._waiting = trio.lowlevel.ParkingLot()
        self._sleeping: dict[trio.CancelScope, list[bool]] = {}
        self._until = 0.0
        self._periods = 0  # in each of which all hints were given, if they were wanted
        self._toured = False  # in this period, a tour has begun and ended
        self.on = False

    def hear(self, hints: Iterable[Hint]) -> None:
        """Take note of rows, and end the pauses and the sleep of scanners."""
        found = [(table, row) for table, row, numbers in hints if any(map(self._may_run, numbers))]
        if not found:
            return
        if len(self._rows) + len(found) > MOST:  # a tour is cheaper now, and finds them all
            self._rows.clear()
            self._anew()
            return
        self._rows.extend(found)
        self._waiting.unpark_all()
        for scope, told in self._sleeping.items():
            told.append(True)
            scope.cancel()

    def begin_tour(self) -> int:
        """A tour begins. Returns what `toured` needs."""
        return self._periods

    def toured(self, begun: int, *, long: bool) -> None:
        """Note that a scanner has ended a tour, and whether that passed many rows: hints are wanted from then on, until
        no tour has been long for a while. `begun`: what `begin_tour` returned; -1: it was broken off."""
        now = trio.current_time()
        if long:
            self._until = now + _LINGER_S
        wanted = now < self._until
        if wanted != self.on:
            self.on = wanted
            self._rows.clear()
            self._anew()
            self._listen()
        elif begun == self._periods:
            self._toured = True

    def _anew(self) -> None:
        """Only tours that begin from now on find all rows of which there is no hint."""
        self._toured = False
        self._periods += 1

    def end(self) -> None:
        """No hints are wanted any more."""
        if self.on:
            self.on = False
            self._listen()

    def _listen(self) -> None:
        """Begin, or end, to be told."""
        hints = self._engine.driver.hints
        (hints.append if self.on else hints.remove)(self.hear)
        if (elsewhere := self._elsewhere()) is not None:
            elsewhere.wants_hints(self.on)

    @property
    def of_all(self) -> bool:
        """Whether hints are given now, of all commits: one process writes them all. Then tours need not hurry past rows
        whose observers have no room, which would keep the loop busy. They hurry until a tour has ended that began when
        hints were already wanted, because earlier changes have no hint."""
        return self.on and self._toured and self._engine.fates.alone

    def __bool__(self) -> bool:
        """Whether a hint waits."""
        return bool(self._rows)

    def take(self) -> tuple[str, bytes]:
        """The oldest hint."""
        return self._rows.popleft()

    @contextmanager
    def ending(self, scope: trio.CancelScope) -> Iterator[list[bool]]:
        """A block in which a hint cancels a scope. Yields a list that is not empty once one has."""
        told = self._sleeping[scope] = []
        try:
            yield told
        finally:
            del self._sleeping[scope]

    async def pause(self, seconds: float) -> None:
        """Sleep, but not beyond the next hint."""
        if self._rows or seconds <= 0:
            await trio.lowlevel.checkpoint()
            return
        with trio.move_on_after(seconds):
            await self._waiting.park()
