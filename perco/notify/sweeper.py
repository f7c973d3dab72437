"""Settles locks that transactions left behind, because their process died or because the disk was full.

L1  When a store is opened, all its locks are dead. Later, a lock is dead if its start_ts is not in the live set.
N1  The lock on an observed cell stands for the pending notification: when the lock is rolled forward, the notify cells
    are put. So the cell's observers run even if no transaction reads the cell.
N5  Pending entries are settled, too: they are replaced with notify cells if their transaction has committed, and
    removed once its primary has been rolled back.
N8  Workers look everywhere after a sweep: it finds no lock of a commit that was made, although its answer was lost.
N7  A lock stays, and is reported once, if it or its primary is unreadable; all others are settled. Such a lock may
    stand for a notification, so it is kept in `stuck`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from perco.errors import Corruption, StoreError
from perco.protocol.records import Cellref
from perco.storage import LOCK, PENDING, SHARED, TS_MAX, OwnerStore, ScanQuery, ScanRequest
from perco.txn.driver import Driver

ANY_COLUMN: Final = -1  # instead of a stuck lock's column: there may be locks in any column
_RETRY_S = 1.0
_RETRY_MAX_S = 30.0
_WIDTH: Final = 32


@dataclass(slots=True)
class Swept:
    """The result of one sweep.

    Attributes: `settled`, the number of locks; `stuck`, locks that could not be settled because of damage, and why.
    """

    settled: int = 0
    stuck: dict[tuple[Cellref, int], Corruption] = field(default_factory=dict)


class Sweeper:
    """One per opened store."""

    first: bool
    clean: bool
    again: bool
    settled: int

    def __init__(self, store: OwnerStore, driver: Driver) -> None:
        self._store, self._driver = store, driver
        self.swept: Callable[[], None] = lambda: None  # called after each sweep
        self.clean = False  # N7: no orphaned lock is left anywhere, except those that are stuck
        self.first = True  # no sweep has ended yet: each lock that was left behind is still in a tablet
        self.again = False  # another sweep was needed: a mutation was taken for lost, and may come late
        self.settled = 0
        self.stuck: dict[tuple[Cellref, int], Corruption] = {}  # as of the last sweep

    async def run(self) -> None:
        """Sweep once, and then whenever locks were left behind. After a failure, try again, with growing pauses."""
        delay = _RETRY_S
        while True:
            self._driver.orphaned = trio.Event()
            try:
                await self._sweep()
            except StoreError:
                self.first, self.again = False, True
                await trio.sleep(delay)
                delay = min(2 * delay, _RETRY_MAX_S)
                continue
            self.first = False
            if self._driver.orphaned.is_set():
                self.again = True
                await trio.sleep(delay)
                delay = min(2 * delay, _RETRY_MAX_S)
                continue
            delay = _RETRY_S
            self.clean = True
            self._driver.notified()  # N8: a commit whose answer was lost may have been made before the sweep came to it
            self.swept()
            await self._driver.orphaned.wait()
            self.clean, self.again = False, True

    async def _sweep(self) -> None:
        stuck: dict[tuple[Cellref, int], Corruption] = {}
        self.settled += await self._driver.settle_left(stuck)
        swept = await sweep(self._store, self._driver, lambda cell, start_ts: False)
        self.settled += swept.settled
        self.stuck = {**stuck, **swept.stuck}


async def sweep(store: OwnerStore, driver: Driver, spared: Callable[[Cellref, int], bool]) -> Swept:
    """Settle every dead lock, except those for which `spared` returns True."""
    swept = Swept()
    for table in store.tables():
        for group in (LOCK, SHARED, PENDING):
            start: bytes | None = b""
            while start is not None:
                query = ScanQuery(group, None, 0, TS_MAX, 1 << 20)
                try:
                    page = await store.scan(ScanRequest(table, start, None, (query,)))
                except Corruption as error:  # an unreadable key: the rows after it cannot be found
                    driver.note_damage(error)
                    swept.stuck[Cellref(table, start, ANY_COLUMN), 0] = error.again()
                    break
                found = [
                    (Cellref(table, row, column), start_ts, value)
                    for row, [locks] in page.rows
                    for column, start_ts, value in locks
                ]
                # If each call takes a round trip, several locks are settled concurrently.
                width = 1 if store.prompt is not None else _WIDTH
                for at in range(0, len(found), width):
                    left = [
                        (cell, start_ts, value)
                        for cell, start_ts, value in found[at : at + width]
                        if not driver.fates.alive(start_ts) and not spared(cell, start_ts)
                    ]
                    if len(left) == 1:
                        await _settle(driver, *left[0], swept)
                    elif left:
                        await _settle_together(driver, left, swept)
                start = page.next
    return swept


async def _settle_together(driver: Driver, left: Sequence[tuple[Cellref, int, bytes]], swept: Swept) -> None:
    """Settle these locks concurrently. Raises: the first error, once all attempts have ended."""
    failed: list[Exception] = []

    async def settle(cell: Cellref, start_ts: int, packed: bytes) -> None:
        try:
            await _settle(driver, cell, start_ts, packed, swept)
        except Exception as error:  # raised below, so that the nursery does not wrap it in a group
            failed.append(error)

    async with trio.open_nursery() as nursery:
        for each in left:
            nursery.start_soon(settle, *each)
    if failed:
        raise failed[0]


async def _settle(driver: Driver, cell: Cellref, start_ts: int, packed: bytes, swept: Swept) -> None:
    try:
        await driver.resolve(cell, start_ts, driver.lock_at(cell, start_ts, packed))
        swept.settled += 1
    except Corruption as error:
        driver.note_damage(error)
        swept.stuck[cell, start_ts] = error.again()
