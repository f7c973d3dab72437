"""The owner's side of a store that this process has open: the components that run once per store, not in every process.

N7  The owner determines whether the store is idle.
O3  While timestamps are being drawn, the owner stores notes of the clock: a timestamp with its wall time.
T13 Before anything is written, the write floor that an earlier process has published is in force everywhere.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import trio

from perco.clock.heartbeat import Heartbeat
from perco.clock.loopwatch import LoopStatistics
from perco.database.options import Options
from perco.database.owner import Now
from perco.errors import Corruption, StoreError, UsageError
from perco.history.vacuum import Vacuum
from perco.history.vacuumed import VacuumResult, VacuumStatistics
from perco.notify.backfill import Backfill, BackfillProgress
from perco.notify.concerned import Freshness
from perco.notify.idle import Idle
from perco.notify.lagging import Lag, Lags
from perco.notify.sweeper import Sweeper
from perco.notify.waiting import Waiting
from perco.notify.workers import Workers
from perco.schema import catalogue as catalogues, codes
from perco.storage import OwnerStore, Tablet
from perco.tablets.backend import Backend
from perco.tablets.compactor import Compacted, Compactor
from perco.tablets.loading import BulkLoad, BulkLoads, Files, Published
from perco.tablets.local import LocalStore
from perco.tablets.splitter import Split, Splitter
from perco.txn.engine import Engine
from perco.txn.keeping import Keeper

_AGAIN_S: Final = 0.1
_NO_TABLETS: Final = "perco does not divide this store's tables into tablets; there is nothing to split or to compact"


class LocalOwner:
    """Loop thread only.

    Attributes:
        made_here: True if the store was empty when it was opened, so that there is no former owner.
    """

    sweeper: Sweeper
    idle: Idle
    made_here: bool

    backend: Backend
    heartbeat: Heartbeat
    vacuuming: Vacuum
    backfilling: Backfill

    is_here = True

    def __init__(
        self,
        engine: Engine,
        keeper: Keeper,
        waiting: Waiting,
        workers: Workers,
        sweeper: Sweeper,
        backend: Backend,
        options: Options,
    ) -> None:
        self._engine, self._keeper, self._waiting, self._options = engine, keeper, waiting, options
        self._workers = workers
        self.backend, self.sweeper = backend, sweeper
        known, background = engine.known, engine.background
        self.heartbeat = Heartbeat(options.heartbeat, backend.write_from_thread, options.wall, engine.lease_token)
        self.vacuuming = Vacuum(
            backend, engine.driver, options.vacuum, lambda: known.catalogue, keeper.change, options.on_event
        )
        self.backfilling = Backfill(engine.driver, background, options.backfill, lambda: known.catalogue, keeper.change)
        self._splitter: Splitter | None = None
        self._compactor: Compactor | None = None
        self._loads: BulkLoads | None = None
        if (local := backend.local) is not None:
            self._splitter = Splitter(local, background, options.split, lambda: known.catalogue, keeper.adopt)
            self._compactor = Compactor(local, background, self._splitter)
            notified = engine.driver.notified
            self._loads = BulkLoads(local, self._splitter, background, engine.oracle, keeper.adopt, notified)
        self._lags = Lags(engine, waiting, backend.store, self._running)
        self.idle = Idle(engine, waiting, backend.store, sweeper, self.backfilling, workers.running_here)
        self.made_here = False
        keeper.on_renewed = self._renewed
        engine.driver.quiet = self.idle.look_again
        sweeper.swept = self.idle.look_again

    def _renewed(self) -> None:
        """A newer catalogue is known, perhaps because a client has changed it: this process's worker may have to run
        observers that were paused (N10)."""
        self.backfilling.wake()
        if (worker := self._workers.running_here()) is not None:
            worker.renew()

    @property
    def store(self) -> OwnerStore:
        """The store itself, without a batching window (D3)."""
        return self.backend.store

    @property
    def local(self) -> LocalStore:
        """The store's tablets and its folder, for commands that inspect them. Raises: UsageError if there is none."""
        if self.backend.local is None:
            raise UsageError("the rows of this store are not in a folder on this machine")
        return self.backend.local

    @property
    def splitting(self) -> Splitter:
        """The splitter. Raises: UsageError, if perco does not divide this store's tables into tablets."""
        if self._splitter is None:
            raise UsageError(_NO_TABLETS)
        return self._splitter

    @property
    def compacting(self) -> Compactor:
        """The compactor. Raises: as `splitting`."""
        if self._compactor is None:
            raise UsageError(_NO_TABLETS)
        return self._compactor

    @property
    def loads(self) -> BulkLoads:
        """The bulk loads. Raises: UsageError, if the store is in a database."""
        if self._loads is None:
            raise UsageError("a bulk load makes files, and this store is in a database: load in transactions")
        return self._loads

    # ------------------------------------------------------------ the beginning and the end

    async def declare(self) -> None:
        """Record the schema, and create what it needs; the background task notifies new observers of existing data."""
        found: list[int] = []
        engine = self._engine
        await self._keeper.adopt(await catalogues.declare(engine.driver.store, engine.known.schema, found.append))
        codes.tell_changed(engine.known.catalogue, engine.known.schema)
        self.made_here = self.made_here or not found[0]
        await self.store.raise_floor(engine.oracle.holds.watermark, wait=False)  # T13
        await self._keeper.announce()
        self.backfilling.wake()

    def start(self) -> None:
        """Start the background tasks."""
        background, options = self._engine.background, self._options
        background.start(self.sweeper.run, "sweeper")
        background.start(self.note_time, "clock")
        if options.vacuum.on:
            background.start(self.vacuuming.in_background, "vacuum")
        if self._splitter is not None:
            background.start(self._splitter.in_background, "splitter")
        if self.backend.threaded:
            background.start(self.watch_disk, "disk")
            self.heartbeat.start()

    async def aclose(self) -> None:
        """Stop background tasks, write queued mutations, release the folder."""
        with trio.CancelScope(shield=True):
            await self.heartbeat.aclose()
            await self._engine.background.aclose()
            if not self.backend.readonly:
                await self.note_now()
            await self.backend.aclose()

    async def note_time(self) -> None:
        """Note the clock while timestamps are being drawn (O3)."""
        while True:
            await trio.sleep(self._options.oracle.note_period_s)
            await self.note_now()

    async def note_now(self) -> None:
        """Note the clock, unless the store cannot tell which commits are visible."""
        with contextlib.suppress(StoreError, Corruption):
            await self._engine.oracle.note(self._engine.driver.visible)

    async def watch_disk(self) -> None:
        """Fail calls that have waited for a disk longer than `commit_timeout_s` (T10)."""
        timeout_s = self._options.commit.commit_timeout_s
        while True:
            await trio.sleep(timeout_s / 4)
            self.backend.expire(timeout_s)

    # ------------------------------------------------------------ the methods of `Owner`

    async def vacuum(self, progress: Callable[[VacuumResult], None] | None) -> VacuumResult:
        return await self.vacuuming.run(tell=progress)

    async def backfill(self, progress: Callable[[BackfillProgress], None] | None) -> list[BackfillProgress]:
        return await self.backfilling.run(tell=progress)

    async def split(self, table: str, row: bytes | None) -> Split:
        return await self.splitting.split(table, row)

    async def compact(self, table: str | None) -> list[Compacted]:
        return await self.compacting.compact(table)

    async def folder_and_id(self) -> tuple[str, str]:
        await trio.lowlevel.checkpoint()
        where, _ = self.backend.where()
        if where == "memory:":
            raise UsageError("a memory: store has no files, so it cannot be backed up")
        return where, self.backend.local.id if self.backend.local is not None else ""

    async def begin_load(self, tables: Sequence[str], build: str = "") -> BulkLoad:
        return await self.loads.begin(tables, build)

    async def publish_load(self, id: str, files: Files) -> Published:
        return await self.loads.publish(id, files)

    async def end_load(self, id: str) -> None:
        await self.loads.end(id)

    async def now(self) -> Now:
        await trio.lowlevel.checkpoint()
        return Now(await self.idle.look(), self.idle.pending(), self.idle.failed())

    async def wait_idle(self) -> int:
        return await self.idle.wait_idle()

    async def wait_for(self, ts: int, without: Sequence[int] | None) -> dict[str, int]:
        return await self.idle.wait_for(ts, without)

    async def freshness(self, withouts: Sequence[Sequence[int]]) -> list[Freshness]:
        return await self._waiting.freshness(withouts)

    async def lag(self) -> dict[str, Lag]:
        return await self._lags.lag()

    async def workers_now(self) -> dict[str, int]:
        await trio.lowlevel.checkpoint()
        elsewhere: Collection[str] = ()
        while self.idle.works_elsewhere is not None:
            told = self.idle.works_elsewhere()
            if told is not None:
                elsewhere = told
                break
            await trio.sleep(_AGAIN_S)  # the workers of a former owner may be about to connect
        counts = Counter(dict(elsewhere) if isinstance(elsewhere, Mapping) else {})
        if (worker := self._workers.running_here()) is not None:
            counts.update(worker.works()[0])
        return dict(counts)

    async def _running(self) -> dict[str, int]:
        """How many processes run each observer, as far as is known at this moment."""
        await trio.lowlevel.checkpoint()
        elsewhere = self.idle.works_elsewhere() if self.idle.works_elsewhere is not None else None
        counts = Counter(dict(elsewhere) if isinstance(elsewhere, Mapping) else {})
        counts.update(self.idle.works())
        return dict(counts)

    def tablets(self) -> Sequence[Tablet]:
        return self.store.tablets_here()

    def statistics(self) -> tuple[LoopStatistics, VacuumStatistics]:
        return self.heartbeat.statistics(), self.vacuuming.statistics()
