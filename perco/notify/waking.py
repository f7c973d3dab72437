"""N8: Wakes the scanners of a worker, one at a time: for a tour of the store, or to look at some rows.

A commit that notifies observers says on which rows. If no scanner is on a tour, one of those that sleep looks at these
rows, and then sleeps again: no tour is needed, because nothing else has changed. If a scanner is on a tour, it may have
passed these rows already, so another tour is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

import trio

from perco.notify.hints import Hints

_TOLD_MAX: Final = 16  # rows that one scanner looks at instead of a tour, which finds many rows at a time


class Waking:
    """Loop thread only.

    Args:
        scanners: how many there are.

    Attributes:
        again: there was a wake-up while no scanner slept: the next one to end a tour makes another tour.
        told: rows that a scanner was woken for.
        broken_off: the newest tour to end has met an unreadable key, so it has not seen all rows.
    """

    again: bool
    told: deque[tuple[str, bytes]]
    broken_off: bool

    def __init__(self, scanners: int) -> None:
        self.again = self.broken_off = False
        self.told = deque()
        self._scanners = scanners
        self._asleep = trio.lowlevel.ParkingLot()
        self._follower: trio.lowlevel.Task | None = None  # that scanner, until it sleeps again, or begins a tour

    def __bool__(self) -> bool:
        """Whether a scanner sleeps."""
        return bool(self._asleep)

    def wake_up(self) -> None:
        """Have a scanner tour the store: one that sleeps or, if none does, the next one to end its tour."""
        if self._asleep:
            self._asleep.unpark()
        else:
            self.again = True

    def tell(self, rows: Collection[tuple[str, bytes]]) -> bool:
        """Have a scanner look at some rows. Returns False if a tour is needed."""
        if self.again or self.broken_off or len(self.told) + len(rows) > _TOLD_MAX:
            return False
        if len(self._asleep) + (self._follower is not None) < self._scanners:
            return False  # one is on a tour
        self.told.extend(rows)
        if self._follower is None:
            [self._follower] = self._asleep.unpark()
        return True

    @property
    def follows(self) -> bool:
        """Whether this task is the scanner that was woken for the rows in `told`."""
        return self._follower is trio.lowlevel.current_task()

    def followed(self) -> None:
        """The scanner that was woken for some rows has looked at all of them, or begins a tour, which finds them."""
        self._follower = None
        self.told.clear()

    async def sleep(self, until: float, hints: Hints) -> bool:
        """Let a scanner sleep until it is woken, or until a given time. Returns False if only a hint has come, or if it
        was woken for some rows (`follows`)."""
        with trio.move_on_at(until) as scope, hints.ending(scope) as hinted:
            await self._asleep.park()
        return not (self.follows or (scope.cancelled_caught and hinted))
