"""Decides, in the owner, whether a store is idle.

N7  *Idle*: there was one moment at which no notify cell, pending signal or lock on an observed cell existed anywhere.
    Within a process, a counter helps to find it. No notify cell can appear while two conditions hold: no observed
    write, signal, removal or recovery is in flight (`Fates.observed` is 0), and no orphaned lock is left
    (`Sweeper.clean`). At such a time, one look at all tablets proves that the store is idle. An unreadable lock on an
    observed cell may stand for a notification, so a store that has one is not idle, and a wait ends with an error. The
    store is not idle either while this process has a run in flight, because another run may have removed that run's
    notify cells (N5).
    If a store does not count its cells, `Idle.look` searches the store to count them.
N8  Notify cells may appear without a wake-up, if a mutation was taken for lost and came late. A task that waits finds
    them, and has workers look everywhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import trio

from perco.errors import Corruption, UsageError
from perco.notify.backfill import Backfill
from perco.notify.concerned import all_but
from perco.notify.sweeper import ANY_COLUMN, Sweeper
from perco.notify.waiting import NOTHING_RUNS, Waiting
from perco.notify.worker import Worker
from perco.protocol.records import observed_column, signal_of
from perco.storage import FAILED_LIST, LOCK, NOTIFY, PENDING, SHARED, OwnerStore, ReadRequest
from perco.txn.engine import Engine

_LOOKS_APART_S: Final = 0.02
_SEARCHES_APART_S: Final = 0.05  # if the store does not count its cells, and so has to be searched
_AGAIN_S: Final = 0.5  # between two checks that other processes still have workers, and between repeated searches


class Idle:
    """Loop thread only.

    Attributes:
        busy_elsewhere: whether another process has a run in flight.
        works_elsewhere: returns the observers that other processes run, or None if their workers may be about to
            connect. If the store is not served, this attribute and `busy_elsewhere` are None.
        claimed_elsewhere: returns how many rows other processes have ever claimed. If no process writes directly, the
            attribute is None.
    """

    def __init__(
        self,
        engine: Engine,
        waiting: Waiting,
        store: OwnerStore,
        sweeper: Sweeper,
        backfill: Backfill,
        worker: Callable[[], Worker | None],
    ) -> None:
        self._engine, self._waiting, self._store = engine, waiting, store
        self._sweeper, self._backfill, self._worker = sweeper, backfill, worker
        self._looked: trio.Event | None = None  # set when something has changed; None: no task waits
        # Whether the last search is valid: there was nothing to settle when it began (so no mutation of a former owner
        # was left) and nothing when it ended, and no claim or run of another process interfered.
        self._trusted = False
        self._again_at = -math.inf  # when a search may next count cells again that an earlier one found
        self._woken_at = -math.inf  # when a wait has last had workers look everywhere
        self._begun = self._done = 0  # numbers of searches: the last one begun, and the last one completed
        self._searching: trio.Event | None = None  # set when the search under way has ended
        self._stuck_found = 0  # locks that cannot be settled, as of the last look
        self.busy_elsewhere: Callable[[], bool] | None = None
        self.works_elsewhere: Callable[[], Collection[str] | None] | None = None
        self.claimed_elsewhere: Callable[[], int] | None = None

    @property
    def looks_apart_s(self) -> float:
        """How long to wait between two looks, in seconds."""
        return _LOOKS_APART_S if self._store.prompt is not None else _SEARCHES_APART_S

    def look_again(self) -> None:
        if self._looked is not None:
            self._looked.set()
            self._looked = None

    async def changed(self) -> None:
        """Wait for a change that may have made the store idle."""
        await self.watch().wait()

    def pending(self) -> int:
        """How many notify cells and pending signals there are (N5)."""
        return self.entries(PENDING) + self.entries(NOTIFY)  # in this order: pending signals become notify cells

    def entries(self, group: str) -> int:
        """How many cells the group has in observed tables; see `OwnerStore.count`."""
        return sum(self._store.count(table, group) for table in set(self._waiting.observed_tables()))

    async def look(self) -> bool:
        """Whether the store is idle. If the store does not count its cells, first search it to count them."""
        if self._store.prompt is None:
            await self._search()
        return self.now()

    async def _search(self) -> None:
        """Wait for the end of a search that began after this call; concurrent calls share a search."""
        wanted = self._begun + 1
        while self._done < wanted:
            if self._searching is not None:
                await self._searching.wait()
                continue
            searching = self._searching = trio.Event()
            number = self._begun = self._begun + 1
            try:
                await self._search_once()
                self._done = number
            finally:
                self._searching = None
                searching.set()

    async def _search_once(self) -> None:
        tables = list(dict.fromkeys(self._waiting.observed_tables()))
        settled = self._settled()
        # The store may have applied a late copy of an earlier mutation, which removed cells that a search had found.
        now = trio.current_time()
        stale = not self._store.once and self.pending() > 0 and now >= self._again_at
        again = settled and (stale or not self._trusted)
        if again:
            self._again_at = now + _AGAIN_S
        claimed = self._claimed()
        await self._store.look(self._store.tables(), (FAILED_LIST,), again=again)
        await self._store.look(tables, self._wanted(), again=again)
        if stuck := self._stuck_locks(tables):
            self._stuck_found = sum(bool(cells) for [cells] in await self._store.read(stuck))
        else:
            self._stuck_found = 0
        # A run of another process, which the search did not see, may have ended meanwhile, and left notify cells.
        self._trusted = settled and self._settled() and claimed == self._claimed()

    def _claimed(self) -> tuple[int, bool]:
        """How many rows have ever been claimed by other processes that write directly, and whether another process has
        a run in flight."""
        if self.claimed_elsewhere is None:
            return 0, False
        return self.claimed_elsewhere(), self.busy_elsewhere is not None and self.busy_elsewhere()

    def _wanted(self) -> Sequence[str]:
        """The groups of observed tables whose counts are required; locks are required only if clients write, too."""
        return (PENDING, NOTIFY) if self.busy_elsewhere is None else (PENDING, NOTIFY, LOCK)

    def _sure(self) -> bool:
        """Whether all required counts are known at this moment. The count of failed changes is one of them, because a
        run may have removed a failed change since they were counted."""
        if self._store.prompt is not None:
            return True
        wanted = [(table, group) for table in self._waiting.observed_tables() for group in self._wanted()]
        wanted += [(table, FAILED_LIST) for table in self._store.tables()]
        return self._trusted and all(self._store.knows(*where) for where in wanted)

    def watch(self) -> trio.Event:
        """The event of the next change that may make the store idle. Call this before a look, so that no change is
        missed."""
        if self._looked is None:
            self._looked = trio.Event()
        return self._looked

    def works(self) -> list[str]:
        """Ids of the observers that run here."""
        worker = self._worker()
        return [observer.id for observer in worker.observers.values()] if worker is not None else []

    def locked_observed(self) -> bool:
        """Whether an observed table has a lock: it may be on an observed cell, and a transaction of another process may
        have put it there.

        Locks that cannot be settled stay, so they do not count here; `_stuck` finds out whether one of them may stand
        for a notification (N7).
        """
        locks, prompt = self.entries(LOCK), self._store.prompt
        if not locks:
            return False
        if prompt is None:
            return locks > self._stuck_found
        found = prompt.find_first(self._stuck_locks(set(self._waiting.observed_tables())), sys.maxsize)
        return locks > sum(bool(cells) for [cells] in found)

    def _stuck_locks(self, tables: Collection[str]) -> list[ReadRequest]:
        """The requests that read those locks of these tables that cannot be settled."""
        stuck = [(cell, ts) for cell, ts in self._sweeper.stuck if cell.table in tables and cell.column != ANY_COLUMN]
        return [(cell.table, cell.row, ((LOCK, cell.column, ts, ts, 1),)) for cell, ts in stuck]

    def sweep_pending(self) -> None:
        """Wake the sweeper if there are pending entries: no reader looks at them, so no other task settles them
        (N5)."""
        if not self._settled() or self._engine.fates.observed:
            return
        # A store that may apply a mutation twice may have applied a late copy of a prewrite since the last sweep.
        copied = not self._store.once and self.busy_elsewhere is not None and self.locked_observed()
        if self.entries(PENDING) or copied:
            self._engine.driver.orphaned.set()

    def _wake_workers(self) -> None:
        """Have workers look everywhere, if mutations may come late, and changes wait although nothing is in flight that
        would wake them (N8)."""
        if self._store.once and not (self._sweeper.again or self._backfill.again):
            return
        now = trio.current_time()
        if self._engine.fates.observed or not self._settled() or self._busy() or now < self._woken_at + _AGAIN_S:
            return
        if self.entries(NOTIFY):
            self._woken_at = now
            self._engine.driver.notified()

    def _busy(self) -> bool:
        """Whether a run is in flight, here or in another process."""
        worker = self._worker()
        return (worker is not None and worker.busy) or (self.busy_elsewhere is not None and self.busy_elsewhere())

    def now(self) -> bool:
        """Whether the store is idle at this moment."""
        return (
            self._settled()
            and not self._engine.fates.observed
            and not self._busy()
            and self._sure()
            and not self.pending()
            and not self._stuck()
        )

    def _stuck(self) -> Corruption | None:
        """The error about a lock on an observed cell that can be neither settled nor decoded, if there is such a lock:
        it may stand for a notification (N1)."""
        if not self._sweeper.stuck:
            return None
        signals, tables = self._engine.known.catalogue.signals, self._waiting.observed_tables()
        observed = self._waiting.observed_cells() | {(table, ANY_COLUMN) for table in tables}
        observed |= {(table, column) for table in tables for column in signals(table)}
        for (cell, _), error in self._sweeper.stuck.items():
            told = (cell.table, cell.column), (cell.table, observed_column(signal_of(cell.column)))
            if told[0] in observed or (told[1] in observed and told[1][1] in signals(cell.table)):
                return error
        return None

    def _settled(self) -> bool:
        """Whether no hidden work is left: neither locks that were left behind (N1, N7), nor existing data of which a
        new observer has not been notified (N10)."""
        return self._swept() and not self._engine.driver.orphaned.is_set() and not self._backfill.left

    def _swept(self) -> bool:
        """Whether no orphaned lock is left. Before the first sweep, this is certain only if there is no lock at all and
        the writers of all tablets are in this process: then everything that a dead process wrote is already visible."""
        if self._sweeper.clean or not self._sweeper.first or not self._engine.fates.alone:
            return self._sweeper.clean
        there = [(table, group) for table in self._store.tables() for group in (LOCK, SHARED, PENDING)]
        return all(self._store.knows(*where) and not self._store.count(*where) for where in there)

    async def wait_idle(self) -> int:
        """Wait until the store is idle. Returns how many changes are on the failed list.

        Raises: UsageError, SchemaMismatch, Corruption if the store would never become idle.
        """
        await trio.lowlevel.checkpoint()  # here, because no other task may run between the last look and the return
        self._again_at = -math.inf
        while not await self.look():
            self._engine.background.check()
            looked = self.watch()
            await self._check_readable()
            await self._check_served()
            # Workers of other processes may come and go without an event.
            # Cells that the store does not count may change without an event, too.
            again_s = math.inf if self.works_elsewhere is None and self._store.prompt is not None else _AGAIN_S
            if await self.look():
                break
            self.sweep_pending()
            self._wake_workers()
            with trio.move_on_after(again_s):
                await looked.wait()
            await trio.sleep(self.looks_apart_s)  # so that the wait does not cost more than the work itself
        return self.failed()

    async def wait_for(self, ts: int, without: Iterable[int] | None = None) -> dict[str, int]:
        """Wait until no waiting change has a root cause that committed at or before `ts`. Raises: as `wait_idle`.

        Args:
            without: for a wait for views: the numbers of observers that are not concerned (V14).

        Returns: as `none_up_to`.
        """
        await trio.lowlevel.checkpoint()
        while (failed := await self.none_up_to(ts, without)) is None:
            self._engine.background.check()
            await self._check_served((ts, without))
            self.sweep_pending()
            self._wake_workers()
            await trio.sleep(self.looks_apart_s)
        return failed

    async def none_up_to(self, ts: int, without: Iterable[int] | None = None) -> dict[str, int] | None:
        """One look for `wait_for`. Returns: as `Waiting.none_up_to`."""
        entries = self._engine.known.catalogue.observers.values()
        if await self.look() and (without is None or (not self.failed() and all(entry.ready for entry in entries))):
            return {}
        return await self._waiting.none_up_to(ts, without)

    def unreadable(self) -> Corruption | None:
        """The reason why this store cannot become idle before its locks are repaired, if there is one (N7)."""
        return None if self._engine.fates.observed or not self._settled() else self._stuck()

    async def _check_readable(self) -> None:
        """Check that the wait can end (N7). Raises: Corruption or UsageError if no change is left whose observer can
        run."""
        if not self._engine.fates.observed and self._settled():
            await self._waiting.must_be_readable(self._stuck())

    async def _check_served(self, up_to: tuple[int, Iterable[int] | None] | None = None) -> None:
        """Check that some worker runs the observers for which changes wait. `up_to`: as for `Waiting.must_be_run`.

        Raises: UsageError, SchemaMismatch.
        """
        catalogue = self._engine.known.catalogue
        concerned = all_but(catalogue, (up_to[1] if up_to is not None else None) or ())
        unready = [id for id in catalogue.unready() if id in concerned.ids]
        if unready and not self._backfill.options.on:
            raise UsageError(
                f"observers have not been notified of existing data: {', '.join(unready)}. The background backfill is "
                "turned off: call `await db.backfill()`."
            )
        if self._engine.fates.observed or not self._settled() or not self._sure():
            return
        elsewhere = () if self.works_elsewhere is None else self.works_elsewhere()
        if elsewhere is None:
            return
        worker = self._worker()
        running = set(elsewhere) | (set(worker.works()[0]) if worker is not None else set())
        if not running and worker is None and concerned.every:
            raise UsageError(NOTHING_RUNS)
        dropping = any(not tombstone.clean for tombstone in catalogue.dropped.values())  # N12
        if concerned.ids - running or dropping or catalogue.paused() or (worker and worker.superseded):
            await self._waiting.must_be_run(running, up_to)

    def failed(self) -> int:
        """How many changes are on the failed list."""
        return sum(self._store.count(table, FAILED_LIST) for table in self._store.tables())
