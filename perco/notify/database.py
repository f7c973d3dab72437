"""`perco.open`: a store with its observers.

N7  *Idle*: at one moment no notify cell, pending signal or lock of an observed cell existed anywhere. In one process a
    counter on the loop tells: while no observed write, signal, removal or recovery is under way (`Fates.observed` is 0)
    and no orphaned lock is left (`Sweeper.clean`), no notify cell can appear, so one look at all tablets proves it. A
    lock of an observed cell that cannot be read may be a notification: the store is not idle, and waiting ends with an
    error. Nor is it idle while a run is under way here: another run may have removed its notify cells (N5).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import trio

from perco.errors import (
    Corruption,
    NotIdle,
    ReadOnly,
    SchemaMismatch,
    StoreError,
    Unavailable,
    UsageError,
    async_block,
    must_be_number,
)
from perco.notify.failing import AwaitsAsyncio
from perco.notify.observers import Observers
from perco.notify.scanner import Scanner, ScannerCounters
from perco.notify.worker import ObserverCounters, Watch, Worker, WorkerOptions, too_old
from perco.storage import LOCK, NOTIFY, PENDING, SHARED, TS_MAX, ReadRequest, ScanCell, ScanQuery, ScanRequest
from perco.txn import catalogue as catalogues
from perco.txn.client import Options
from perco.txn.local import LocalStore
from perco.txn.records import Cellref, ack_of, column_of, observed_column, observer_of, signal_of, unpack_cause
from perco.txn.schema import Schema
from perco.txn.sweeper import ANY_COLUMN, Sweeper

_LOOKS_APART_S = 0.02
_AGAIN_S = 0.5  # between two looks whether those who work elsewhere are still there
_CELLS_PER_ROW = 1 << 12
_NOTHING_RUNS = (
    "changes wait for observers and nothing runs them; wait inside `async with db.worker():`, or start a worker in "
    "another process"
)
# All that is not handled.
_WAITING = tuple(ScanQuery(group, None, 0, TS_MAX, _CELLS_PER_ROW) for group in (LOCK, PENDING, NOTIFY))


class Database(Observers):
    """An open store. Made by `perco.open`; use it inside that block only."""

    _tells_s = math.inf  # how long to spend, past a deadline, on asking what waits

    def __init__(self, local: LocalStore, schema: Schema, options: Options) -> None:
        super().__init__(local, schema, options)
        self._looked: trio.Event | None = None  # set when something has changed; None: nobody waits
        self.driver.quiet = self._look_again
        self.watch_elsewhere: Callable[[int], Watch] | None = None  # runs in other processes, where they are told of
        self.busy_elsewhere: Callable[[], bool] | None = None
        # Observers that other processes run; None: some may be about to come. Where the store is not served: absent.
        self.works_elsewhere: Callable[[], Collection[str] | None] | None = None
        self.sweeper = Sweeper(local.store, self.driver, self._look_again)
        self.made_here = False  # the store was empty when it was opened: there is no former owner

    # ------------------------------------------------------------ observers

    @async_block("async with db.worker():")
    async def worker(
        self, *, concurrency: int = 64, scanners: int | None = None, options: WorkerOptions | None = None
    ) -> AsyncIterator[WorkerHandle]:
        """Run the schema's observers while the block lasts.

        Args:
            concurrency: observer runs in flight.
            scanners: tasks that look for work; by default 4, or as many as there may be runs in flight.
            options: all of the above and more in one; never more scanners than runs in flight.
        """
        self.usable(writing=True)
        if self._worker is not None:
            raise UsageError("this store already has a worker; raise its concurrency instead of adding another")
        if options is not None and not isinstance(options, WorkerOptions):
            raise UsageError(f"options= takes perco.WorkerOptions(...), not {options!r}")
        chosen = WorkerOptions(concurrency=concurrency) if options is None else options
        chosen = replace(chosen, scanners=min(chosen.scanners, chosen.concurrency) if scanners is None else scanners)
        if not 1 <= chosen.scanners <= chosen.concurrency:
            raise UsageError("a worker has at least one scanner, and at least as many runs in flight as scanners")
        late = set(self.schema.observers) - set(self.catalogue.observers)
        if late:
            raise SchemaMismatch(
                f"observers were declared after the store was opened: {', '.join(sorted(late))}. "
                "Declare them all, then open it."
            )
        for observer in self.schema.observers.values():
            needs: Callable[[Database], object] | None = getattr(observer.function, "perco_needs", None)
            if needs is not None:  # a configuration error does not count as an attempt
                try:
                    needs(self)
                except UsageError as error:
                    raise UsageError(f"observer {observer.id!r} cannot run here: {error}") from None
            version = self.catalogue.observers[observer.id].version
            if version > observer.version:
                raise SchemaMismatch(too_old(observer, version))
        worker = Worker(self, catalogues.registered(self.schema, self.catalogue), chosen)
        handle = WorkerHandle(worker, [self._scanner(worker, i, chosen) for i in range(chosen.scanners)])
        self._worker = worker
        notified = self.driver.on_notified
        notified.append(worker.wake_up)
        stops: list[Callable[[], None]] = []
        try:
            await self._worker_begins()
            stops += [self.background.start(scanner.run, f"scanner-{scanner.number}") for scanner in handle.scanners]
            yield handle
        finally:
            for stop in stops:
                stop()
            with trio.CancelScope(shield=True):
                for scanner in handle.scanners[: len(stops)]:
                    await scanner.ended.wait()
            notified.remove(worker.wake_up)
            self._worker = None
            await self._worker_ended()

    async def _worker_begins(self) -> None:
        """Before its scanners start; in a process that is not the store's owner, this is where that is told."""

    async def _worker_ended(self) -> None:
        """The same, afterwards."""

    def _scanner(self, worker: Worker, number: int, options: WorkerOptions) -> Scanner:
        slots = options.concurrency // options.scanners + (number < options.concurrency % options.scanners)
        return Scanner(worker, number, slots, self._observed_tables)

    def _observed_tables(self) -> list[str]:
        return sorted({entry.table for entry in self.catalogue.observers.values()})

    # ------------------------------------------------------------ waiting

    def _look_again(self) -> None:
        if self._looked is not None:
            self._looked.set()
            self._looked = None

    async def pending(self) -> int:
        """How many changes, and pending signals (N5), wait for observers. `waiting` tells for which.

        Raises: Unavailable, in a client.
        """
        self.usable(writing=False)
        await trio.lowlevel.checkpoint()
        return self.pending_now()

    def pending_now(self) -> int:
        """`pending` of this process's tablets: how many notify cells and pending signals there are."""
        return self._entries(PENDING) + self._entries(NOTIFY)  # in this order: these become those

    def _entries(self, group: str) -> int:
        tables = set(self._observed_tables())
        return sum(tablet.entries(group) for tablet in self.local.store.tablets() if tablet.table in tables)

    def works(self) -> list[str]:
        """Ids of the observers that run here."""
        return [observer.id for observer in self._worker.observers.values()] if self._worker is not None else []

    def locked_observed(self) -> bool:
        """Whether a lock stands in a table that is observed: it may be of an observed cell, and another process's.

        Locks that cannot be settled do not count. They never go; `_stuck` tells whether one may be a notification (N7).
        """
        locks = self._entries(LOCK)
        return locks > 0 and locks > self._stuck_locks()

    def _stuck_locks(self) -> int:
        """How many of the locks that stand there cannot be settled."""
        tables = set(self._observed_tables())
        stuck = [(cell, ts) for cell, ts in self.sweeper.stuck if cell.table in tables and cell.column != ANY_COLUMN]
        requests = [(cell.table, cell.row, ((LOCK, cell.column, ts, ts, 1),)) for cell, ts in stuck]
        return sum(bool(cells) for [cells] in self.local.store.find_first(requests, sys.maxsize))

    def sweep_pending(self) -> None:
        """Let the sweeper settle pending entries that nobody else will, since no reader ever meets a signal (N5)."""
        if self._settled() and not self.fates.observed and self._entries(PENDING):
            self.driver.orphaned.set()

    async def changed(self) -> None:
        """Until something has that may have made the store idle."""
        if self._looked is None:
            self._looked = trio.Event()
        await self._looked.wait()

    async def is_idle(self) -> bool:
        """Whether nothing is left to observe, at this moment (N7). `wait_idle` waits for it.

        Raises: ReadOnly for a folder that was opened with readonly=True; Unavailable, in a client.
        """
        self._observed_here()
        await trio.lowlevel.checkpoint()
        return self.idle_now()

    def idle_now(self) -> bool:
        """`is_idle`, as the store's owner sees it."""
        busy = (self._worker is not None and self._worker.busy) or (
            self.busy_elsewhere is not None and self.busy_elsewhere()
        )
        return self._settled() and not self.fates.observed and not busy and not self.pending_now() and not self._stuck()

    def _stuck(self) -> Corruption | None:
        """Why a lock of an observed cell can be neither settled nor understood, if there is one: it may be a
        notification (N1)."""
        if not self.sweeper.stuck:
            return None
        observed = self._observed_cells() | {(table, ANY_COLUMN) for table in self._observed_tables()}
        observed |= {(table, column) for table in self._observed_tables() for column in self.catalogue.signals(table)}
        for (cell, _), error in self.sweeper.stuck.items():
            told = (cell.table, cell.column), (cell.table, observed_column(signal_of(cell.column)))
            if told[0] in observed or (told[1] in observed and told[1][1] in self.catalogue.signals(cell.table)):
                return error
        return None

    def _observed_cells(self) -> set[tuple[str, int]]:
        """(table, column in the store) of all columns that have observers."""
        tables, observers = self.catalogue.tables, self.catalogue.observers.values()
        return {(o.table, column_of(tables[o.table].columns[o.column].number)) for o in observers}

    def _observed_columns(self, table: str) -> set[int]:
        """The columns in the store of a table's observed columns, and of their acks."""
        observed = {column for of, column in self._observed_cells() if of == table}
        return observed | {ack_of(column, o.number) for column in observed for o in self.catalogue.observers.values()}

    def _settled(self) -> bool:
        """Whether nothing that was there before is still to be found: locks that were left behind (N1, N7), changes
        that a new observer has not been told of (N10)."""
        return self._swept() and not self.driver.orphaned.is_set() and not self.backfilling.left

    def _swept(self) -> bool:
        """Whether no orphaned lock is left. Before the first sweep that is sure where no lock stands at all, if the
        writers of all tablets are in this process: then what a dead one wrote last is visible by now."""
        if self.sweeper.clean or not self.sweeper.first or not self.fates.alone:
            return self.sweeper.clean
        groups = (LOCK, SHARED, PENDING)
        return not any(tablet.entries(group) for tablet in self.local.store.tablets() for group in groups)

    async def wait_idle(self, *, timeout: float | None = None) -> int:
        """Until no change waits for an observer anywhere (N7). An observer that fails keeps it waiting until the change
        is given up: in tests give a `timeout`, in seconds, or allow few attempts (`WorkerOptions.attempts`).

        Returns how many changes are on the failed list, for which nobody waits (N6; `db.failed`).
        Raises: UsageError if nothing could ever run them, or if observers that are left await asyncio on trio; NotIdle
        past the timeout, with what waits for whom; Corruption if all that is left is what cannot be read: a lock that
        may be a notification, or cells on which observers fail.
        """
        self._observed_here()
        async with self._deadline(timeout, "the store did not become idle"):
            await trio.lowlevel.checkpoint()  # here, for nothing may come between the last look and the return
            while not self.idle_now():
                self.background.check()
                if self._looked is None:
                    self._looked = trio.Event()
                looked = self._looked  # before the look, lest its news be missed
                await self._check_readable()
                await self._check_served()
                # Those who work elsewhere may come and go without a word.
                again_s = math.inf if self.works_elsewhere is None else _AGAIN_S
                if self.idle_now():
                    break
                self.sweep_pending()
                with trio.move_on_after(again_s):
                    await looked.wait()
                await trio.sleep(_LOOKS_APART_S)  # waiting shall not cost more than working
        return self.failed_now()

    async def wait_for(self, ts: int, *, timeout: float | None = None) -> None:
        """Until every observer has run for all that was committed, from outside, at or before `ts` (N7, N9).

        Args:
            ts: a commit timestamp: of `txn.commit_ts`, or what `await txn.commit()` returned.
            timeout: seconds.

        Raises: UsageError if nothing could ever run them, or for a timestamp that is still to come; NotIdle past the
        timeout, with what waits for whom; Corruption if all that is left are cells that cannot be read, one of which
        may go back to `ts` or before.
        """
        self._observed_here()
        async with self._deadline(timeout, f"not all that was committed up to {ts} has been observed"):
            await self._must_be_past(ts)
            await trio.lowlevel.checkpoint()
            while not self.idle_now():
                self.background.check()
                if await self._none_up_to(ts):
                    return
                await self._check_served()
                self.sweep_pending()
                await trio.sleep(_LOOKS_APART_S)

    async def _must_be_past(self, ts: int) -> None:
        """Raises UsageError for a timestamp that nobody has committed at yet."""
        if isinstance(ts, bool) or not isinstance(ts, int):
            raise UsageError(f"wait_for takes a timestamp, an int as in txn.commit_ts, not {ts!r}")
        if ts > self.oracle.last and ts > await self.oracle.newest():
            raise UsageError(f"nothing has been committed at {ts} yet: timestamps so far are 1 to {self.oracle.last}")

    def _observed_here(self) -> None:
        """Raises ReadOnly beside the owner: observers run in its process."""
        self.usable(writing=False)
        if self.local.readonly:
            raise ReadOnly(
                "this store was opened with readonly=True: nothing is observed here. Wait in the process that runs "
                "the worker, or with `perco wait`."
            )

    @contextlib.asynccontextmanager
    async def _deadline(self, timeout: float | None, what: str) -> AsyncIterator[None]:
        if timeout is None:
            yield
            return
        must_be_number("timeout", timeout)
        with trio.move_on_after(timeout) as scope:
            yield
        if scope.cancelled_caught:
            failures = self._worker.last_failures if self._worker is not None else {}
            what = f"{what} within {timeout:g} s"
            waiting = None
            with trio.move_on_after(self._tells_s), contextlib.suppress(Unavailable):
                waiting = await self.waiting()
            counts = None if waiting is None else {id: count for id, count in waiting.items() if count}
            raise NotIdle(what, counts, failures)

    async def none_up_to(self, ts: int) -> bool:
        """One look for `wait_for`."""
        return self.idle_now() or await self._none_up_to(ts)

    async def _none_up_to(self, ts: int) -> bool:
        """Whether nothing whose root cause committed at or before `ts` waits for an observer, or is about to (N7, N9).

        Notify cells, and locks of observed cells and signals, which become such (N1, N5). One look lies: a run may
        carry its cause from where we have not looked to where we have; so a look does not count if any such run was
        under way.
        """
        if self.driver.entered.up_to(ts) or self.backfilling.left:
            return False  # C4, N10: its notify cells are not visible yet
        watches = [self._worker.watch(ts)] if self._worker is not None else []
        if self.watch_elsewhere is not None:
            watches.append(self.watch_elsewhere(ts))
        try:
            damage: Corruption | AwaitsAsyncio | None = None
            for table in self._observed_tables():
                start: bytes | None = b""
                while start is not None:
                    page = await self.driver.store.scan(ScanRequest(table, start, None, _WAITING))
                    for row, found in page.rows:
                        if any(len(cells) == _CELLS_PER_ROW for cells in found):
                            # One after the other: a lock becomes a notify cell, never the other way.
                            found = [
                                await self.row_cells(table, row, query.group, cells)
                                for query, cells in zip(_WAITING, found, strict=True)
                            ]
                        locks, pending, notified = found
                        try:
                            if self._oldest_cause(table, row, notified, [*locks, *pending]) <= ts:
                                return False
                        except (Corruption, AwaitsAsyncio) as error:
                            damage = error  # unless something else is still to be waited for
                    start = page.next
            if any(watch.moved for watch in watches):
                return False
            if damage is not None:
                raise damage
            return True
        finally:
            for watch in watches:
                watch.end()

    async def row_cells(self, table: str, row: bytes, group: str, found: list[ScanCell]) -> list[ScanCell]:
        """All cells of a group in a row, now. `found`: some of them."""
        cells: list[ScanCell] = []
        for column in sorted({column for column, _, _ in found} | self._observed_columns(table)):
            below = TS_MAX
            while True:
                request: ReadRequest = (table, row, [(group, column, 0, below, _CELLS_PER_ROW)])
                [[versions]] = await self.driver.store.read([request])
                cells += [(column, ts, value) for ts, value in versions]
                if len(versions) < _CELLS_PER_ROW:
                    break
                below = versions[-1][0] - 1
        return cells

    def _oldest_cause(self, table: str, row: bytes, notified: Sequence[ScanCell], locks: Sequence[ScanCell]) -> int:
        """The smallest root cause that a row's notify cells carry, or its locks of observed cells would leave.

        Raises: Corruption where that cannot be read, or where observers fail on what cannot be.
        """
        observed = self._observed_cells()
        oldest = TS_MAX
        for column, commit_ts, value in notified:
            damage = self._worker.damage(table, row, column, commit_ts) if self._worker is not None else None
            if damage is not None:
                raise damage.again()
            try:
                oldest = min(oldest, unpack_cause(value)[0])
            except Corruption as error:
                raise self.driver.at(Cellref(table, row, column), error) from error
        for column, start_ts, value in locks:
            if (table, column) in observed:
                cell = Cellref(table, row, column)
                stuck = self.sweeper.stuck.get((cell, start_ts))
                if stuck is not None:
                    raise stuck.again()
                lock = self.driver.lock_at(cell, start_ts, value)
                if lock.observers:
                    oldest = min(oldest, lock.root or start_ts)
        return oldest

    def unreadable_now(self) -> Corruption | None:
        """Why this store does not become idle before it is repaired, as far as its locks tell (N7)."""
        return None if self.fates.observed or not self._settled() else self._stuck()

    async def _check_readable(self) -> None:
        """Waiting for what will never be read would never end (N7). Raises: Corruption if nothing else is left."""
        if not self.fates.observed and self._settled():
            await self._must_be_readable(self._stuck())

    async def _must_be_readable(self, last: Corruption | AwaitsAsyncio | None) -> None:
        """Raises Corruption, or UsageError, if nothing is left but a lock that is `last`, and what this worker cannot
        run for."""
        worker = self._worker
        if last is None and (worker is None or not worker.damaged):
            return
        async with contextlib.aclosing(self._notified()) as cells:
            async for cell in cells:
                last = worker.damage(*cell) if worker is not None else None
                if last is None:
                    return
        if last is not None:
            raise last.again()

    async def _check_served(self) -> None:
        """Waiting without anybody who works would never end. Raises: UsageError, SchemaMismatch."""
        if self.backfilling.left and not self.config.backfill.on:
            raise UsageError(
                f"observers wait to be told of what is there: {', '.join(self.catalogue.unready())}. In the background "
                "that is turned off: call `await db.backfill()`."
            )
        if self.fates.observed or not self._settled():
            return
        elsewhere = () if self.works_elsewhere is None else self.works_elsewhere()
        if elsewhere is None:
            return
        worker = self._worker
        running = set(elsewhere) | (set(self.schema.observers) if worker is not None else set())
        if not running and worker is None:
            raise UsageError(_NOTHING_RUNS)
        if set(self.catalogue.observers) - running or self.catalogue.paused() or (worker and worker.superseded):
            self._check_run({id for id, count in (await self.waiting(readable=True)).items() if count}, running)

    def _check_run(self, waiting: Collection[str], running: Collection[str]) -> None:
        """Check that some program runs one of the observers that changes wait for. `running`: those of programs with a
        worker.

        Raises: UsageError, SchemaMismatch.
        """
        if not waiting:
            return
        if not running and self._worker is None:
            raise UsageError(_NOTHING_RUNS)
        paused, superseded = self.catalogue.paused(), self._worker.superseded if self._worker is not None else {}
        if any(id in running and id not in paused and id not in superseded for id in waiting):
            return
        for id in superseded.keys() & waiting:
            raise SchemaMismatch(too_old(self.schema.observers[id], superseded[id]))
        if paused & set(waiting):
            names = ", ".join(map(repr, sorted(paused & set(waiting))))
            raise UsageError(
                f"changes wait for observers that are paused: {names}. Resume them: await db.resume(...), or "
                "`perco resume`."
            )
        raise UsageError(
            f"changes wait for observers that no running program has: {', '.join(sorted(waiting))}. Add them to the "
            "schema, or start a program that has them."
        )

    async def unserved(self) -> set[str]:
        """Ids of the store's observers that this program's schema lacks (N10)."""
        self.usable(writing=False)
        return set((await catalogues.load(self.driver.store)).observers) - set(self.schema.observers)

    async def waiting(self, *, readable: bool = False) -> dict[str, int]:
        """How many changes wait for each observer, by id: one look over the notify cells.

        Args:
            readable: without those that no observer can run for, for cells that cannot be read.
        """
        self.usable(writing=False)
        await self._catch_up()
        names = {entry.number: id for id, entry in self.catalogue.observers.items()}
        counts = dict.fromkeys(self.catalogue.observers, 0)
        async for table, row, column, ts in self._notified():
            if readable and self._worker is not None and self._worker.damage(table, row, column, ts) is not None:
                continue
            id = names.get(observer_of(column), f"#{observer_of(column)}")
            counts[id] = counts.get(id, 0) + 1
        return counts

    async def _notified(self) -> AsyncGenerator[tuple[str, bytes, int, int], None]:
        """(table, row, ack column, ts) of every notify cell."""
        for table in self._observed_tables():
            start: bytes | None = b""
            while start is not None:
                page = await self.driver.store.scan(ScanRequest(table, start, None, _WAITING[-1:]))
                for row, [notified] in page.rows:
                    if len(notified) == _CELLS_PER_ROW:
                        notified = await self.row_cells(table, row, NOTIFY, notified)
                    for column, ts, _ in notified:
                        yield table, row, column, ts
                start = page.next

    # ------------------------------------------------------------ the catalogue

    async def declare(self) -> None:
        """Record the schema and make what it needs; new observers are notified of what is there in the background."""
        found: list[int] = []
        await self._adopt(await catalogues.declare(self.driver.store, self.schema, found.append))
        self.made_here = self.made_here or not found[0]
        await self.local.raise_floor(self.oracle.holds.watermark)  # T13: what an earlier process published
        await self._take_over()
        self.backfilling.wake()

    async def _take_over(self) -> None:
        self.forget_bounds()
        await self.oracle.announce(self.catalogue.binds)

    # ------------------------------------------------------------ tasks

    async def note_time(self) -> None:
        """Note the clock while timestamps are drawn (O3)."""
        while True:
            await trio.sleep(self.config.oracle.note_period_s)
            await self.note_now()

    async def note_now(self) -> None:
        """Note the clock, unless the store cannot say what is visible by now: then the next time."""
        with contextlib.suppress(StoreError, Corruption):
            await self.oracle.note(self.driver.visible)

    async def watch_disk(self) -> None:
        """Nobody waits for a disk longer than `commit_timeout_s` (T10)."""
        timeout_s = self.config.commit.commit_timeout_s
        while True:
            await trio.sleep(timeout_s / 4)
            for tablet in self.local.store.tablets():
                tablet.expire(timeout_s)

    async def aclose(self) -> None:
        """End what runs, write what is queued, let go of the folder.

        In a task of its own: a KeyboardInterrupt comes out when that has ended, a second one at once.
        """
        ended = trio.Event()
        failed: list[BaseException] = []
        trio.lowlevel.spawn_system_task(self._close, ended, failed, name="perco-close")
        with trio.CancelScope(shield=True):
            try:
                await ended.wait()
            except KeyboardInterrupt:
                await ended.wait()
                raise
        if failed:
            raise failed[0]

    async def _close(self, ended: trio.Event, failed: list[BaseException]) -> None:
        try:
            await self._end()
        except Exception as error:
            failed.append(error)
        finally:
            ended.set()

    async def _end(self) -> None:
        with trio.CancelScope(shield=True):
            await self.heartbeat.aclose()
            await self.background.aclose()
            if not self.local.readonly:
                await self.note_now()
            await self.local.aclose()


class WorkerHandle:
    """A running worker: its statistics."""

    def __init__(self, worker: Worker, scanners: list[Scanner]) -> None:
        self._worker, self.scanners = worker, scanners

    def statistics(self) -> dict[str, ObserverCounters]:
        """Counters of each observer since the worker began, by id."""
        return self._worker.statistics()

    def scanner_statistics(self) -> list[ScannerCounters]:
        """Counters of each scanner."""
        return [scanner.counters for scanner in self.scanners]

    def on_run(self, function: Callable[[str, Any, float], None]) -> None:
        """Call a function after each committed run: (observer id, key, seconds)."""
        self._worker.on_run = function
