"""Reading a folder's files directly, *beside* the process that owns the folder.

A reader beside the owner can neither draw timestamps nor settle locks. It reads at the newest note of the clock (a
stored timestamp with its wall time; at most a second old while the owner writes). If there is no owner, it reads at
the oracle's durable bound, because no transaction at or below the bound can commit any more.

O3  The reader's timestamps do not go back when a new owner takes over: it waits until that owner has noted the clock.
G5  The owner does not know of the reader, so every read looks at the table's cut (the oldest timestamp at which the
    table can be read), which the owner has published.
T9  Like any other reader, the reader encounters locks. If the outcome of a lock's transaction is decided, the reader
    answers from the lock (S4). If not, and the owner is alive, it waits. If there is no owner, the transaction is
    dead and can never commit, so the reader ignores the lock. When another owner takes over, the snapshots taken
    before that end (`PastSnapshot`). The reason: if an owner is killed, its last batch may be on disk but not yet
    visible to readers beside it. The whole batch becomes visible when the next owner takes over, and may then lie in
    the past of a snapshot that was taken in between.
P5  The owner may split tablets. A read of rows that have moved raises TabletSplit; the next snapshot finds the rows.
P6  The owner may replace the files of a tablet. The old files hold all earlier commits, and nothing later. So the
    reader looks for new files after it has chosen a timestamp, and while it waits for a lock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from perco.clock.oracle import Oracle, OracleOptions, durable_bound, newest_note, published
from perco.errors import Corruption, UsageError
from perco.protocol.records import Cellref
from perco.protocol.recovery import Recovery, primary_queries
from perco.protocol.snapshot import Blocked, Seen
from perco.schema.catalogue import load, newest_version
from perco.tablets.local import LocalStore
from perco.txn.driver import Driver
from perco.txn.resolver import from_lock

_POLL_S = 0.01


class BesideOracle(Oracle):
    """Returns the newest timestamp that a reader may use; issues no timestamps."""

    def __init__(self, local: LocalStore, options: OracleOptions, wall: Callable[[], float]) -> None:
        super().__init__(local.store, options, wall)
        self._local = local
        self._newest = 0
        self._catalogue = 0

    @property
    def last(self) -> int:
        return self._newest

    async def draw(self) -> int:
        newest = await self._look()
        while newest < self._newest:  # a new owner has taken over, and has not noted the clock yet
            await trio.sleep(_POLL_S)
            newest = await self._look()
        self._newest = newest
        self._local.find_moved()  # P6: after the timestamp was chosen; old and new files have all earlier writes
        await self._find_splits()
        return newest

    async def _find_splits(self) -> None:
        """P5: open the tablets that have been added since the last call."""
        version = await newest_version(self._store)
        if version != self._catalogue:
            await self._local.adapt(await load(self._store))
            self._catalogue = version

    async def _look(self) -> int:
        # Read the bound first: an owner that starts after this read issues timestamps above the bound.
        bound = await durable_bound(self._store)
        if not self._local.owner_alive:
            return bound
        note = await newest_note(self._store)
        return note[0] if note else 0

    async def cut(self, table: str) -> int:
        return (await published(self._store))[2].get(table, 0)

    async def note(self, visible: Callable[[int], Awaitable[None]] | None = None) -> None:
        raise UsageError("a reader notes nothing")


class BesideDriver(Driver):
    """A driver that reads and never writes."""

    def __init__(self, local: LocalStore, *args: Any) -> None:
        super().__init__(local.store, *args)
        self._local = local

    async def _past(self, cell: Cellref, ts: int, blocked: Blocked) -> Seen:
        start_ts = blocked.start_ts
        lock = self.lock_at(cell, start_ts, blocked.lock)
        owned = self._local.owner_alive  # before the primary is read: to a later owner, the transaction is dead
        queries = primary_queries(lock.primary, start_ts)
        try:
            [cells] = await self.store.read([(lock.primary.table, lock.primary.row, queries)])
        except UsageError as error:
            raise self.at(cell, Corruption("lock group", f"its primary cannot be read: {error}")) from error
        recovery = Recovery(start_ts, lock.primary, ())
        try:
            recovery.asked(cells, alive=owned)
        except Corruption as error:
            raise self.at(lock.primary, error) from error
        if recovery.fate is None and owned:
            await trio.sleep(_POLL_S)
            self._local.find_moved()
            return await self._look_again(cell, ts, -1)
        if recovery.fate and recovery.fate <= ts:
            return from_lock(lock, start_ts, recovery.fate)
        return await self._look_again(cell, ts, start_ts)
