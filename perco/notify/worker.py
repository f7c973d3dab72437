"""Runs observers: one transaction per run, its ack the primary.

N2  The mutation that commits the ack removes the notify cells that the run saw.
N3  At most one run commits per change: the ack is read and written by the run's own transaction.
N5  A run for a signal has no ack that decides: its commit removes the notify cells that it saw, and leaves a record of
    its cause. If it writes nothing, they are removed afterwards, and no record is left.
N6  A failing observer keeps its notification, waits longer each time, and has a bounded share of the worker. So does
    one that meets an unreadable cell. A change for which its own function fails too often is given up
    (`txn/failed.py`).
N9  A chain of observers that is longer than it may be is given up.
N10 Notify cells of observers that this program does not have, or has in a lower version than the store's, are left
    alone. A run belongs to the catalogue that it was begun under: if a higher version was registered before its commit
    timestamp was drawn, it aborts, and is not run again here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from perco.errors import CommitUnknown, Corruption, StoreError, TransientError, UsageError
from perco.notify.backoff import Backoff, BackoffOptions
from perco.notify.claim import (
    COVERS_MAX,
    Gone,
    Handled,
    InTheWay,
    Run,
    claim_queries,
    decide,
    decide_signal,
    signal_queries,
)
from perco.notify.delays import Delays
from perco.notify.failing import (
    AwaitsAsyncio,
    FailureLog,
    ObserverFailedError,
    awaits_asyncio,
    note_failure,
    too_long,
)
from perco.notify.outputs import Outputs
from perco.notify.rowlocks import Elsewhere, RowLocks
from perco.options import check_options
from perco.storage import FAILED_LIST, NOTIFY, TS_MAX, Failed, Mutation, Query, RowCells, ScanCell
from perco.txn.catalogue import Bound
from perco.txn.client import Client
from perco.txn.codecs import decoded, decoded_key
from perco.txn.driver import Driver
from perco.txn.mutations import Intent
from perco.txn.oracle import note_from
from perco.txn.prefetch import Ahead, Raw
from perco.txn.records import (
    ACK,
    SIGNAL,
    Cellref,
    ack_head,
    ack_of,
    longer,
    observed_column,
    observer_of,
    raised_head,
    unpack_cause,
)
from perco.txn.schema import Change, Column, Observer, Signal
from perco.txn.snapshot import Missing, Value, look
from perco.txn.transaction import Transaction
from perco.txn.turns import Turn

CELLS_PER_ROW = 4096  # notify cells that a scanner reads of a row
_CAUSES_PER_READ = 1024

log = logging.getLogger("perco.observer")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """Attributes:
    concurrency: runs in flight, over all scanners.
    scanners: tasks that look for work, each with its share of the runs.
    conflicts_max: conflicts that a run meets before it waits its turn again.
    page_rows: rows of notify cells read at a time.
    failing_share: the part of the runs that those which failed before may take.
    attempts: runs of an observer that may fail for a change, by an error of its own, before the change is moved to the
        failed list; 0: it is never given up. Counted in the store, so across restarts.
    chain_max: how many observers, each set off by the one before it, a chain may have; 0: any number.
    outputs: note in the store into which columns each observer writes, once for each: for `db.observers()` and
        `perco observers --graph`.
    """

    concurrency: int = 64
    scanners: int = 4
    conflicts_max: int = 16
    page_rows: int = 64
    failing_share: float = 0.25
    teleport: bool = True
    row_locks: bool = True
    attempts: int = 16
    chain_max: int = 100
    outputs: bool = True
    backoff: BackoffOptions = field(default_factory=BackoffOptions)

    def __post_init__(self) -> None:
        check_options(self, zero=("attempts", "chain_max"))


def too_old(observer: Observer, version: int) -> str:
    """What is to be said of an observer of which the store has a higher version."""
    return (
        f"observer {observer.id!r} is version {version} in this store, and version {observer.version} in this program, "
        "which leaves its changes alone: they wait for a program that has the newer one. To go back to what the older "
        f"one did, declare that as version {version + 1}."
    )


def _change(observer: Observer, row: bytes, seen: Value | Missing, attempt: int, run: Run) -> Change[Any, Any]:
    column = observer.column
    table = column.table
    key = decoded_key(table.key, row, table.name)
    value = None
    if isinstance(column, Column) and isinstance(seen, Value):
        value = decoded(column.codec, seen.value, column, key)
    return Change(key, value, seen.commit_ts, attempt, run.root, run.depth)


@dataclass(slots=True)
class ObserverCounters:
    """Counters of one observer since the worker was started.

    `runs`: begun; `commits`: acknowledged changes; `collapsed`: changes beyond one that a commit took with it (N4);
    `conflicts`, `failures`: runs that did not commit; `given_up`: changes that were moved to the failed list (N6);
    `running`: now; `seconds`: spent in its function.
    """

    runs: int = 0
    commits: int = 0
    collapsed: int = 0
    conflicts: int = 0
    failures: int = 0
    given_up: int = 0
    running: int = 0
    seconds: float = 0.0


class Watch:
    """Whether a run that carries a cause at or before `ts` was under way while somebody looked (N7)."""

    __slots__ = ("_watches", "moved", "ts")

    def __init__(self, ts: int, moved: bool, watches: set[Watch]) -> None:
        self.ts, self.moved, self._watches = ts, moved, watches
        watches.add(self)

    def end(self) -> None:
        self._watches.discard(self)


class Worker:
    """The observers of one program on one store."""

    def __init__(self, client: Client, observers: Mapping[int, Observer], options: WorkerOptions) -> None:
        self.client, self.options = client, options
        self._declared = dict(observers)
        self.observers: dict[int, Observer] = {}  # those of them that may run
        self.superseded: dict[str, int] = {}  # by id: the store has a higher version than this program
        self._binds = -1  # the catalogue that `observers` was compared with
        self.delays: dict[int, Delays] = {}  # of those observers that have one
        self.levels: list[frozenset[int]] = []  # observers of the same priority, the highest first
        self.elsewhere: Elsewhere | None = None  # where other processes run observers, too
        self.renew()
        oracle, now = client.oracle, trio.current_time()
        for number, observer in observers.items():
            if observer.manner.delay_s:
                self.delays[number] = Delays(observer.manner, oracle.last, now, oracle.wall_ms(), self._noted)
        self.rows = RowLocks()
        self.backoff = Backoff(options.backoff, client.random)
        self.counters = {observer.id: ObserverCounters() for observer in observers.values()}
        self.again = False  # woken when nobody slept: whoever ends a tour next makes another
        self._asleep = trio.lowlevel.ParkingLot()
        self.failure_log = FailureLog()
        self.last_failures: dict[str, tuple[int, str, BaseException]] = {}  # by observer: how often, where, what
        # N7: what fails for cells that cannot be read, or awaits asyncio: the newest change that is known to, and why.
        self.damaged: dict[tuple[str, bytes, int], tuple[int, Corruption | AwaitsAsyncio]] = {}
        self.on_run: Callable[[str, Any, float], None] | None = None
        self._roots: dict[int, int] = {}  # of the runs under way, by their start_ts
        self._watches: set[Watch] = set()
        self._failing = 0
        self._failing_max = max(1, int(options.concurrency * options.failing_share))
        self._chain_max = options.chain_max or 1 << 62
        self.outputs = Outputs(client.driver.store, client.background, observers) if options.outputs else None
        # What an observer puts in front of its acks' causes (N3), and on the path of what it causes (N9).
        self._marks = {n: (ack_head(observer.version), n.to_bytes(2, "big")) for n, observer in observers.items()}

    def renew(self) -> None:
        """The catalogue has changed: leave observers alone that are paused, or of which the store has a higher version
        now (N10)."""
        catalogue = self.client.catalogue
        self._binds = catalogue.binds
        before, self.observers = self.observers, {}
        for number, observer in self._declared.items():
            entry = catalogue.observers[observer.id]
            if entry.version > observer.version:
                if observer.id not in self.superseded:
                    log.error("%s", too_old(observer, entry.version))
                self.superseded[observer.id] = entry.version
            elif not entry.paused:
                self.observers[number] = observer
        if before.keys() - self.observers.keys():
            self.client.driver.quiet()  # N7: whoever waits shall look who runs it
        elif self.observers.keys() - before.keys():
            self.client.driver.notified()
        if self.elsewhere is not None:
            self.elsewhere.works(*self.works())
        by_priority: dict[int, set[int]] = {}
        for number, observer in self.observers.items():
            by_priority.setdefault(observer.manner.priority, set()).add(number)
        self.levels = [frozenset(by_priority[priority]) for priority in sorted(by_priority, reverse=True)]

    def wake_up(self) -> None:
        """There may be work: a scanner that sleeps looks, or else the first that ends its tour (N8)."""
        if self._asleep:
            self._asleep.unpark()
        else:
            self.again = True

    def pass_on(self) -> None:
        """A scanner has found more than it may run: another one looks, here or in another process."""
        if not self._asleep and self.elsewhere is not None:
            self.elsewhere.full()
        self.wake_up()

    def works(self) -> tuple[list[str], list[str]]:
        """Ids of the observers that this worker has, and of those that it may run."""
        return [observer.id for observer in self._declared.values()], [o.id for o in self.observers.values()]

    async def sleep(self, until: float | None) -> None:
        """A scanner's, until there may be work, or until a time."""
        if self.again:
            await trio.lowlevel.checkpoint()
            return
        if self.elsewhere is not None:
            self.elsewhere.sleeps()
        with trio.move_on_at(float("inf") if until is None else until):
            await self._asleep.park()

    async def look_at_catalogue(self) -> None:
        """Take over what another process has changed in it (N10)."""
        client = self.client
        if client.oracle.catalogue_version > client.catalogue.binds:
            await client.reload()
        if client.catalogue.binds != self._binds:
            self.renew()

    async def committed(self) -> None:
        """Until those runs that are committing now have; what has not drawn its commit timestamp is not waited for."""
        for start_ts in list(self._roots):
            await self.client.fates.wait(start_ts)

    def damage(self, table: str, row: bytes, ack: int, ts: int) -> Corruption | AwaitsAsyncio | None:
        """Why the observer cannot run for a change, if cells cannot be read, or it awaits asyncio."""
        found = self.damaged.get((table, row, ack))
        return found[1] if found is not None and ts <= found[0] else None

    @property
    def busy(self) -> bool:
        """Whether runs are under way."""
        return bool(self._roots)

    def watch(self, ts: int) -> Watch:
        """Notes from now on, until its `end`, whether a run carries a cause at or before `ts`."""
        return Watch(ts, any(root <= ts for root in self._roots.values()), self._watches)

    def claimable(self, table: str, row: bytes, ack: int, now: float) -> bool:
        """Whether this worker may run it now (N6, N10)."""
        if observer_of(ack) not in self.observers:
            return False
        if not self.backoff.rows:
            return True
        key = (table, row, ack)
        if self.backoff.waits(key, now):
            return False
        return not self.backoff.attempts(key) or self._failing < self._failing_max

    async def due(self, table: str, row: bytes, ack: int, cells: list[ScanCell], now: float) -> float:
        """When it is to be run, as far as these notify cells of the row tell; a moment that has passed: now."""
        delays = self.delays.get(observer_of(ack))
        if delays is None:
            return now
        held = delays.held((table, row, ack), now)
        if held:
            return held
        stamps = [ts for column, ts, _ in cells if column == ack]
        if not stamps or len(cells) >= CELLS_PER_ROW:  # there are more of them
            queries: list[Query] = [(NOTIFY, ack, 0, TS_MAX, 1), (NOTIFY, ack, 0, TS_MAX, -1)]
            [found] = await self.client.driver.store.read([(table, row, queries)])
            stamps = [ts for each in found for ts, _ in each]
            if not stamps:
                return now
        return await delays.due(stamps[0], stamps[-1], now)

    async def _noted(self, ts: int) -> int | None:
        return await note_from(self.client.driver.store, ts)

    async def _waits(self, delays: Delays, table: str, row: bytes, ack: int, verdict: Run) -> bool:
        """Whether the run comes too early: it would see a change that is not due."""
        now = trio.current_time()
        oldest = min((ts for ts in verdict.covers if ts > verdict.pointer), default=verdict.covers[0])
        if len(verdict.covers) == COVERS_MAX:
            query: Query = (NOTIFY, ack, verdict.pointer + 1, oldest, -1)
            [[cells]] = await self.client.driver.store.read([(table, row, (query,))])
            oldest = cells[0][0] if cells else oldest
        due = await delays.due(verdict.covers[0], oldest, now)
        if due > now:
            delays.hold((table, row, ack), due)
        return due > now

    def acks(self, table: str) -> list[int]:
        """All that this worker could run in a row of a table."""
        return [
            ack_of(self._bound(observer).column, number)
            for number, observer in self.observers.items()
            if observer.column.table.name == table
        ]

    def _bound(self, observer: Observer) -> Bound:
        column = observer.column
        return self.client.bind_signal(column) if isinstance(column, Signal) else self.client.bind(column)

    def begin_row(self, table: str, row: bytes, acks: list[int]) -> bool:
        """Whether one of these has failed before: then the row counts among the failing until `end_row` (N6)."""
        failing = bool(self.backoff.rows) and any(self.backoff.attempts((table, row, ack)) for ack in acks)
        self._failing += failing
        return failing

    def end_row(self, *, failing: bool) -> None:
        self._failing -= failing

    async def run(self, table: str, row: bytes, ack: int) -> None:
        """An observer on a row, until it is acknowledged, handled by somebody else, or has to wait (N6)."""
        observer = self.observers.get(observer_of(ack))
        if observer is None:
            return  # N10: since the row was claimed
        counters = self.counters[observer.id]
        key = (table, row, ack)
        conflicts = 0
        turn: Turn | None = None  # once it has met others
        counters.running += 1
        try:
            while True:
                seen_ts = self.client.oracle.last
                try:
                    done = await self._try(observer, counters, table, row, ack, conflicts)
                    if done is None:
                        return
                    if done:
                        self.backoff.succeeded(key)
                        self.damaged.pop(key, None)
                        return
                    continue
                except (TransientError, CommitUnknown) as error:  # unknown: the ack says whether it has run (N3)
                    counters.conflicts += 1
                    conflicts += 1
                    if conflicts >= self.options.conflicts_max:
                        self.backoff.failed(key, trio.current_time())
                        return
                    met_on = error.met_on if isinstance(error, TransientError) else ()
                finally:
                    if turn is not None:
                        turn.leave()
                if turn is None:
                    turn = Turn(self.client.lines, self.client.config.retry.turn_s)
                if turn.met(met_on):
                    await trio.sleep(self.client.config.retry.delay_s(turn.lost, self.client.random))
                await turn.take()
        except StoreError as error:
            log.warning("observer %s on %s: %s", observer.id, self._where(table, row), error)
            self._failed(observer, counters, key, error, seen_ts)
        except Corruption as error:
            self.client.driver.note_damage(error)
            self._failed(observer, counters, key, error.again(), seen_ts)
        except ObserverFailedError as failed:
            wrong = awaits_asyncio(self.client, observer, failed.error)
            if wrong is not None:
                failed.error = wrong
                self.failure_log.failed(observer.id, self._where(table, row), failed)
                self._failed(observer, counters, key, wrong, seen_ts)
                return
            self.failure_log.failed(observer.id, self._where(table, row), failed)
            self._failed(observer, counters, key, failed.error, seen_ts, failed.attempts)
            if await note_failure(self.client, Cellref(*key), failed, self.options.attempts):
                counters.given_up += 1
                self.failure_log.given_up(observer.id, self._where(table, row))
                self.backoff.succeeded(key)
        finally:
            counters.running -= 1

    def _failed(
        self,
        observer: Observer,
        counters: ObserverCounters,
        key: tuple[str, bytes, int],
        error: BaseException,
        seen_ts: int,
        attempts: int = 0,
    ) -> None:
        """`seen_ts`: the run has seen all notify cells up to it. `attempts`: how often it failed, as the store says."""
        counters.failures += 1
        self.last_failures[observer.id] = counters.failures, self._where(*key[:2]), error
        self.backoff.failed(key, trio.current_time(), attempts)
        if isinstance(error, Corruption | AwaitsAsyncio):
            self.damaged[key] = seen_ts, error.again()
            if len(self.damaged) > self.options.backoff.remembered_max:
                del self.damaged[next(iter(self.damaged))]
            self.client.driver.quiet()  # N7: whoever waits shall look
        else:
            self.damaged.pop(key, None)

    def _where(self, table: str, row: bytes) -> str:
        """A row, for people."""
        try:
            return f"{table}[{self.client.schema.tables[table].key.decode(row)!r}]"
        except ValueError:
            return f"{table}[{row!r}]"

    async def _try(
        self, observer: Observer, counters: ObserverCounters, table: str, row: bytes, ack: int, conflicts: int
    ) -> bool | None:
        """One run; whether there is nothing left to do for what was seen. None: it is to be run later."""
        txn = await self.client._begin_as(observer.id, observer.isolation)
        try:
            return await self._run_in(txn, observer, counters, table, row, ack, conflicts)
        finally:
            txn.discard()  # G1: however it ends, it keeps no versions any longer

    async def _run_in(
        self,
        txn: Transaction,
        observer: Observer,
        counters: ObserverCounters,
        table: str,
        row: bytes,
        ack: int,
        conflicts: int,
    ) -> bool | None:
        client, start_ts = self.client, txn.start_ts
        if client.oracle.catalogue_version > client.catalogue.binds or client.catalogue.binds != self._binds:
            await self.look_at_catalogue()
        number = observer_of(ack)
        if self.observers.get(number) is not observer:
            return True  # N10: it is another's by now
        txn._version = self._binds
        claim = self._claim_signal if isinstance(observer.column, Signal) else self._claim
        claimed = await claim(txn, observer, table, row, ack)
        if isinstance(claimed, bool):
            return claimed
        verdict, seen = claimed
        if self.delays:
            delays = self.delays.get(number)
            if delays is not None and await self._waits(delays, table, row, ack, verdict):
                return None
        txn._root, txn._depth = verdict.root, verdict.depth
        txn._path = longer(verdict.path, self._marks[number][1])
        if verdict.depth > self._chain_max:
            chain = too_long(client, self._where(table, row), verdict, txn._path, self.options.chain_max)
            raise ObserverFailedError(chain, start_ts, verdict)
        attempt = 1 + conflicts + verdict.attempts
        if self.backoff.rows:
            attempt += max(self.backoff.attempts((table, row, ack)) - verdict.attempts, 0)
        counters.runs += 1
        self._roots[start_ts] = verdict.root
        for watch in self._watches:
            watch.moved |= verdict.root <= watch.ts
        began = trio.current_time()
        try:
            try:
                change = _change(observer, row, seen, attempt, verdict)
                await observer.function(txn, change)
                if txn.outcome == "aborted":
                    raise UsageError("an observer may commit its transaction, but not discard it")
            except (TransientError, CommitUnknown, StoreError):
                raise
            except Exception as error:  # the user's code: its failure is not ours (N6)
                raise ObserverFailedError(error, start_ts, verdict) from error
            counters.seconds += trio.current_time() - began
            if txn.outcome == "open":
                await self._commit(txn, table, row, ack, verdict)
        finally:
            del self._roots[start_ts]
            if not self._roots:
                client.driver.quiet()
        counters.commits += 1
        counters.collapsed += verdict.collapsed
        if self.outputs is not None:
            known = self.outputs.seen[number]
            for into, _, written in txn._writes if txn._signals is None else (*txn._writes, *txn._signals):
                if (into, written) not in known:
                    self.outputs.note(number, into, written)
        if client.config.on_event is not None:
            client.config.on_event("ack")
        if self.on_run is not None:
            try:
                self.on_run(observer.id, change.key, trio.current_time() - began)
            except Exception:  # a listener's failure is not the observer's: it has committed
                log.exception("the function given to on_run raised")
        return True

    async def _claim(
        self, txn: Transaction, observer: Observer, table: str, row: bytes, ack: int
    ) -> tuple[Run, Value | Missing] | bool:
        """Why the observer must run, and what it observes; or whether there is nothing left to do."""
        driver, start_ts, column = self.client.driver, txn.start_ts, observed_column(ack)
        if driver.entered.cells:
            await driver.past_cells(((table, row, ack), (table, row, column)), start_ts)  # C4
        ahead = txn._ahead
        cells, read = await self._read_claim(
            txn._driver, ahead, table, row, column, claim_queries(column, ack, start_ts), start_ts
        )
        try:
            cell = Cellref(table, row, ack)
            verdict = decide(cells, start_ts, observer.version)
            cell = Cellref(table, row, column)
            there = look(cells[3], cells[4]) if ahead is None or read is None else ahead.look(table, column, read)
        except Corruption as error:
            raise driver.at(cell, error) from error
        if ahead is not None and type(verdict) is not Run:
            ahead.drop()
        match verdict:
            case Gone():
                return True
            case InTheWay(on_ack, lock):
                txn.discard()
                await driver.clear(Cellref(table, row, ack if on_ack else column), lock)
                return False
            case Handled(covers):
                txn.discard()
                await self._tidy(table, row, ack, covers)
                return True
        assert isinstance(verdict, Run)
        if len(verdict.covers) == COVERS_MAX:
            verdict = await self._with_older(verdict, Cellref(table, row, ack))
        seen = await driver.finish(table, row, column, start_ts, there)
        if ahead is not None:
            ahead.keep(table, row, column, seen)
        del cells  # a run may wait long
        txn._ack = Intent(table, row, ack, ACK, self._marks[observer_of(ack)][0] + verdict.cause, (), verdict.removes)
        txn._known = ((table, row, column), seen)  # the function will want it: it is not read twice
        if txn._reads is not None:
            txn._reads.note(table, row, column, seen.commit_ts)  # T14: the change tells it
        return verdict, seen

    async def _claim_signal(
        self, txn: Transaction, observer: Observer, table: str, row: bytes, ack: int
    ) -> tuple[Run, Value | Missing] | bool:
        """The same for a signal: there is nothing to see but that it was raised, and when (N5)."""
        driver, start_ts = self.client.driver, txn.start_ts
        cell = Cellref(table, row, ack)
        cells, _ = await self._read_claim(
            txn._driver, txn._ahead, table, row, ack, signal_queries(ack, start_ts), start_ts
        )
        try:
            verdict = decide_signal(cells, start_ts)
        except Corruption as error:
            raise driver.at(cell, error) from error
        if txn._ahead is not None and type(verdict) is not Run:
            txn._ahead.drop()
        match verdict:
            case Gone():
                return True
            case InTheWay(_, lock):
                txn.discard()
                await driver.clear(cell, lock)
                return False
        assert isinstance(verdict, Run)
        if len(verdict.covers) == COVERS_MAX:
            verdict = await self._with_older(verdict, cell)
        body = raised_head(observer.version, verdict.raised) + verdict.cause
        txn._signals = {(table, row, ack): Intent(table, row, ack, SIGNAL, body, (), verdict.removes)}
        return verdict, Missing(verdict.covers[0])

    async def _read_claim(
        self, driver: Driver, ahead: Ahead | None, table: str, row: bytes, column: int, queries: list[Query], ts: int
    ) -> tuple[RowCells, Raw | None]:
        """Read the cells that a claim needs of its row, and those that the observer is likely to read there; then the
        observed cell is returned too, in the form that `ahead` takes."""
        if ahead is None:
            [cells] = await driver.store.read([(table, row, queries)])
            return cells, None
        ahead.begin_read()
        plan = driver.not_entered(table, ahead.plan(table, row, (column,)), ts)
        [(plan, found)] = await driver.read_plans(table, [plan], ts, queries)
        cells, more = found[: len(queries)], found[len(queries) :]
        first = cells[3:5] if len(cells) > 4 else ([], [])  # of a signal there is no lock and no record to look at
        [(_, read)] = ahead.took(table, plan, [*first, *more])
        return cells, read

    async def _commit(self, txn: Transaction, table: str, row: bytes, ack: int, run: Run) -> None:
        """A run's transaction; N5: one that writes, raises and locks nothing leaves nothing, not even that it was."""
        signals = txn._signals if txn._ack is None else None
        if signals is not None and len(signals) == 1 and not txn._writes and txn._locked is None:
            txn.discard()
            await self._tidy(table, row, ack, run.removes)
        else:
            await txn.commit()

    async def _with_older(self, run: Run, ack: Cellref) -> Run:
        """A run that may see more than it takes with it: the causes of that are its causes too (N9), and what has
        failed for that, has failed for the same (N6)."""
        root, attempts, below = run.root, run.attempts, run.covers[-1]
        while True:
            query = (NOTIFY, ack.column, 0, below - 1, _CAUSES_PER_READ)
            [[cells]] = await self.client.driver.store.read([(ack.table, ack.row, (query,))])
            if not cells:
                return run._replace(root=root, attempts=attempts)
            try:
                for _, value in cells:
                    cause = unpack_cause(value)
                    root, attempts = min(root, cause[0]), max(attempts, cause[3])
            except Corruption as error:
                raise self.client.driver.at(ack, error) from error
            below = cells[-1][0]

    async def _tidy(self, table: str, row: bytes, ack: int, covers: tuple[int, ...]) -> None:
        """Remove what waits, or has failed, of what an earlier run has seen, or of signals that this one has (N2)."""
        driver = self.client.driver
        writes = tuple((NOTIFY, ack, ts, None) if ts > 0 else (FAILED_LIST, ack, -ts, None) for ts in covers)
        with driver.observing():
            [verdict] = await driver.store.apply([Mutation(table, ((row, (), writes),), None, True)])
        if isinstance(verdict, Failed):
            raise verdict.error

    def statistics(self) -> dict[str, ObserverCounters]:
        """By observer id."""
        return {id: replace(counters) for id, counters in self.counters.items()}
