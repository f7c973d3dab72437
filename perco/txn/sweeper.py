"""Settles locks that nobody is going to clear: what a dead process left behind, what a full disk made us leave.

L1  When a store is opened all its locks are dead; later, all whose start_ts is not in the live set.
N1  The lock of an observed cell is the pending notification: rolling it forward puts the notify cells. So nobody has
    to read a cell for its observers to run.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from perco.errors import StoreError
from perco.storage import LOCK, SHARED, TS_MAX, LocalRowStore, ScanQuery, ScanRequest
from perco.txn.driver import Driver
from perco.txn.records import Cellref, unpack_lock

_RETRY_S = 1.0
_RETRY_MAX_S = 30.0


class Sweeper:
    """One per opened store."""

    def __init__(self, store: LocalRowStore, driver: Driver, swept: Callable[[], None]) -> None:
        self._store, self._driver, self._swept = store, driver, swept
        self.clean = False  # N7: no orphaned lock is left anywhere
        self.settled = 0

    async def run(self) -> None:
        """Sweep once, then whenever something was left behind; after a failure again, with growing pauses."""
        delay = _RETRY_S
        while True:
            self._driver.orphaned = trio.Event()
            try:
                await self._sweep()
            except StoreError:
                await trio.sleep(delay)
                delay = min(2 * delay, _RETRY_MAX_S)
                continue
            if self._driver.orphaned.is_set():
                await trio.sleep(delay)
                delay = min(2 * delay, _RETRY_MAX_S)
                continue
            delay = _RETRY_S
            self.clean = True
            self._swept()
            await self._driver.orphaned.wait()
            self.clean = False

    async def _sweep(self) -> None:
        self.settled += await self._driver.settle_left()
        self.settled += await sweep(self._store, self._driver, lambda cell, start_ts: False)


async def sweep(store: LocalRowStore, driver: Driver, spared: Callable[[Cellref, int], bool]) -> int:
    """Settle every dead lock that is not to be spared; returns how many those were."""
    settled = 0
    for table in store.tables():
        for group in (LOCK, SHARED):
            start: bytes | None = b""
            while start is not None:
                query = ScanQuery(group, None, 0, TS_MAX, 1 << 20)
                page = await store.scan(ScanRequest(table, start, None, (query,)))
                for row, [locks] in page.rows:
                    for column, start_ts, value in locks:
                        cell = Cellref(table, row, column)
                        if not driver.fates.alive(start_ts) and not spared(cell, start_ts):
                            await driver.resolve(cell, start_ts, unpack_lock(value))
                            settled += 1
                start = page.next
    return settled
