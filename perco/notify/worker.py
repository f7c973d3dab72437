"""Runs observers: one transaction per run (or per batch of runs, N20), with the acknowledgement as its primary.

N2  The mutation that commits the acknowledgement removes the notify cells that the run saw.
N3  At most one run commits per change: the run's own transaction reads and writes the acknowledgement.
N5  A run for a signal has no acknowledgement. Its commit removes the notify cells that it saw, and leaves a record of
    its cause. If it writes no cell, raises no signal and locks nothing, the notify cells are removed afterwards, and no
    record is left.
N6  A failing observer keeps its notification, waits longer each time, and has a bounded share of the worker. The same
    holds for an observer that encounters an unreadable cell. A change for which the observer's own function fails too
    often is given up (`protocol/failed.py`).
    An observer that asks for a later run (`Retry`) has not failed, and one that gives up (`GiveUp`) is not run again.
    Neither counts for its breaker (N14).
N9  A change whose chain of observers is over the limit is given up.
N10 Notify cells of observers that this program does not have, or has in a lower version than the store's, are left
    alone. A run belongs to the catalogue under which it began: if a higher version of the observer was registered
    before the run drew its commit timestamp, the run aborts, and is not repeated here.
V14 A run of an observer that says what it writes (`writes=`) writes nothing else.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import trio

from perco.clock.durations import Durations
from perco.clock.oracle import note_from
from perco.errors import (
    ChainTooLong,
    CommitUnknown,
    Corruption,
    GiveUp,
    Retry,
    StoreError,
    TransientError,
    UsageError,
)
from perco.notify.backoff import Backoff
from perco.notify.breakers import Breakers
from perco.notify.concerned import Concerned, Watch, must_be_declared
from perco.notify.delays import Delays, due_on, too_early
from perco.notify.failing import (
    AwaitsAsyncio,
    FailureLog,
    ObserverFailedError,
    Unrunnable,
    asked_by,
    awaits_asyncio,
    fields,
    note_failure,
    too_long,
    too_old,
    where_of,
)
from perco.notify.given import change_of, in_time
from perco.notify.hints import Hints
from perco.notify.options import ObserverCounters, WorkerOptions
from perco.notify.outputs import Outputs
from perco.notify.rates import Rates
from perco.notify.room import Room
from perco.notify.rowlocks import Elsewhere, RowLocks
from perco.notify.tripping import Tripping
from perco.notify.waking import Waking
from perco.notify.working import Claims
from perco.protocol.claim import COVERS_MAX, Run
from perco.protocol.records import (
    Cellref,
    ack_head,
    ack_of,
    longer,
    observer_of,
)
from perco.schema.catalogue import Bound
from perco.schema.schema import Observer, Signal
from perco.storage import ScanCell
from perco.txn import runs
from perco.txn.beginning import begin_run
from perco.txn.engine import Engine
from perco.txn.resolver import Hint
from perco.txn.transaction import Transaction
from perco.txn.turns import Turn

log: logging.Logger = logging.getLogger("perco.observer")


class Worker:
    """Runs the observers of one program on one store."""

    engine: Engine
    options: WorkerOptions
    rows: RowLocks
    backoff: Backoff
    counters: dict[str, ObserverCounters]
    failure_log: FailureLog
    outputs: Outputs | None
    hints: Hints
    waking: Waking

    def __init__(self, engine: Engine, observers: Mapping[int, Observer], options: WorkerOptions) -> None:
        self.engine, self.options = engine, options
        self.declared: dict[int, Observer] = dict(observers)
        self.observers: dict[int, Observer] = {}  # the declared observers that may run
        self.superseded: dict[str, int] = {}  # by id: the store's version, if it is higher than this program's
        self._binds = -1  # `binds` of the catalogue with which `observers` was compared
        self.delays: dict[int, Delays] = {}  # of those observers that have one
        self.levels: list[frozenset[int]] = []  # sets of observers of the same priority, the highest priority first
        self._alone: frozenset[int] = frozenset()  # the observer of the highest priority, if it is one (N13)
        self.elsewhere: Elsewhere | None = None  # set if other processes run observers, too
        self.renew()
        oracle, now = engine.oracle, trio.current_time()
        for number, observer in observers.items():
            if observer.manner.delay_s:
                self.delays[number] = Delays(observer.manner, oracle.last, now, oracle.wall_ms(), self._noted)
        self.rows = RowLocks()
        self.backoff = Backoff(options.backoff, engine.random)
        self.counters = {observer.id: ObserverCounters() for observer in observers.values()}
        self.hints = Hints(engine, lambda: self.elsewhere, self.may_run)
        self.waking = Waking(options.scanners)
        self.failure_log = FailureLog()
        self.last_failures: dict[str, tuple[int, str, BaseException]] = {}  # by observer: count, row, error
        self.unrunnable: Unrunnable = Unrunnable(options.backoff.remembered_max)
        self.durations: dict[str, Durations] | None = None  # of committed runs, for metrics
        self.on_run: Callable[[str, Any, float], None] | None = None
        self._roots: dict[int, tuple[int, int]] = {}  # of the runs in flight, by start_ts: root cause, observer
        self._watches: set[Watch] = set()
        self._failing = 0
        self.room: Room = Room(options.concurrency)
        self.breakers: Breakers = Breakers(options.breaker)
        self._tripping = Tripping(engine, self.breakers, self.backoff, options.breaker)
        rates = {number: observer.limits.rate for number, observer in observers.items() if observer.limits.rate}
        self.rates: Rates | None = Rates(engine, rates, self.wake_up) if rates else None
        self._drained: trio.Event | None = None  # no runs begin any more; set when none is in flight
        self._failing_max = max(1, int(options.concurrency * options.failing_share))
        self.chain_max: int = options.chain_max or 1 << 62
        self.outputs = Outputs(engine.driver.store, engine.background, observers) if options.outputs else None
        self._marks = {n: (ack_head(observer.version), n.to_bytes(2, "big")) for n, observer in observers.items()}
        self.claims: Claims = Claims(engine, self._marks)

    def renew(self) -> None:
        """Adopt the engine's catalogue: observers that are paused, or of which the store has a higher version, do not
        run here (N10)."""
        catalogue = self.engine.known.catalogue
        self._binds = catalogue.binds
        before, self.observers = self.observers, {}
        for number, observer in self.declared.items():
            entry = catalogue.observers.get(observer.id)
            if entry is None or entry.number != number:
                continue  # N12: it was dropped
            if entry.version > observer.version:
                if observer.id not in self.superseded:
                    log.error("%s", too_old(observer, entry.version))
                self.superseded[observer.id] = entry.version
            elif not entry.paused:
                self.observers[number] = observer
        if before.keys() - self.observers.keys():
            self.engine.driver.quiet()  # N7: waiting tasks look again
        if self.observers.keys() != before.keys():
            self.engine.driver.notified()  # the others may have more room, too (N13)
        if self.elsewhere is not None:
            self.elsewhere.works(*self.works())
        by_priority: dict[int, set[int]] = {}
        for number, observer in self.observers.items():
            by_priority.setdefault(observer.manner.priority, set()).add(number)
        self.levels = [frozenset(by_priority[priority]) for priority in sorted(by_priority, reverse=True)]
        highest = self.levels[0] if self.levels else frozenset()
        self._alone = highest if len(highest) == 1 else frozenset()

    def notified(self, where: Collection[Hint] | None) -> None:
        """Notify cells have become visible, on these rows; None: anywhere (N8)."""
        if where is None:
            self.wake_up()
            return
        here = self.observers.keys()
        rows = {(table, row): None for table, row, numbers in where if not (numbers and here.isdisjoint(numbers))}
        told_all = self.elsewhere is None and self.engine.driver.store.once  # otherwise, more may have come late
        if rows and not (told_all and len(self.levels) <= 1 and self.waking.tell(rows)):
            self.wake_up()

    @property
    def is_plain(self) -> bool:
        """Whether the end of a run makes no other change due: none has failed, is delayed, or waits for its observer's
        rate, and no other process runs observers."""
        if self.backoff.rows or self.breakers.tripped or self.delays:
            return False
        return self.rates is None and self.elsewhere is None and self.options.row_locks

    def wake_up(self) -> None:
        """Have a scanner look for work everywhere (N8)."""
        self.waking.wake_up()

    def pass_on(self) -> None:
        """Have another scanner look for work, here or in another process, because one has found more than it may
        run."""
        if not self.waking and self.elsewhere is not None:
            self.elsewhere.full()
        self.wake_up()

    def works(self) -> tuple[list[str], list[str]]:
        """Ids of the observers that this worker has, and of those that it may run."""
        runs = [observer.id for observer in self.observers.values()] if self._drained is None else []
        return [observer.id for observer in self.declared.values()], runs

    async def sleep(self, until: float) -> bool:
        """Let a scanner sleep until there may be work; see `Waking.sleep`."""
        if self.waking.again:
            await trio.lowlevel.checkpoint()
            return True
        if self.elsewhere is not None:
            (self.elsewhere.full if self.room.crowded else self.elsewhere.sleeps)()  # others may have room
        return await self.waking.sleep(until, self.hints)

    async def look_at_catalogue(self) -> None:
        """Adopt the changes that another process has made to the catalogue (N10)."""
        engine = self.engine
        if engine.oracle.catalogue_version > engine.known.catalogue.binds:
            await engine.renew()
        if engine.known.catalogue.binds != self._binds:
            self.renew()

    async def committed(self) -> None:
        """Wait for the runs that are committing now, but not for those that have not begun to commit."""
        for start_ts in list(self._roots):
            await self.engine.fates.wait(start_ts)

    @property
    def busy(self) -> bool:
        """Whether runs are in flight."""
        return bool(self._roots)

    def watch(self, concerned: Concerned) -> Watch:
        """Note from now on, until the watch's `end`, the oldest cause that runs of the observers concerned carry."""
        watch = Watch(concerned, self._watches)
        for root, number in self._roots.values():
            if number in concerned:
                watch.saw(root)
        return watch

    def claimable(self, table: str, row: bytes, ack: int, now: float) -> bool:
        """Whether this worker may run the observer on the row now (N6, N10, N13 - N15)."""
        number = observer_of(ack)
        observer = self.observers.get(number)
        if observer is None or self._drained is not None or not self._has_room(number, observer, now):
            return False
        if self.backoff.rows:
            key = (table, row, ack)
            if self.backoff.waits(key, now) or (self.backoff.attempts(key) and self._failing >= self._failing_max):
                return False
        return self._may_begin(number, now)

    def _may_begin(self, number: int, now: float) -> bool:
        """Whether neither its breaker nor its rate holds an observer back (N14, N15)."""
        if self.breakers.tripped and not self.breakers.may_run(number, now):
            return False
        return self.rates is None or self.rates.may_run(number, now)

    def may_run(self, number: int) -> bool:
        """Whether an observer may run on a row that has not failed (N13 - N15)."""
        now, observer = trio.current_time(), self.observers.get(number)
        return observer is not None and self._has_room(number, observer, now) and self._may_begin(number, now)

    def _has_room(self, number: int, observer: Observer, now: float) -> bool:
        return self.room.has(number, observer.limits, now, alone=number in self._alone)

    def may_run_any(self, table: str, level: frozenset[int] | None) -> bool:
        """Whether an observer of a table, of those in `level`, may run on a row that has not failed (N13 - N15)."""
        return any(
            (level is None or number in level) and self.may_run(number)
            for number, observer in self.observers.items()
            if observer.column.table.name == table
        )

    @property
    def holds_back(self) -> bool:
        """Whether changes wait for an observer that is tripped, or has used up its rate (N14, N15)."""
        return bool(self.breakers.tripped) or (self.rates is not None and self.rates.is_lacking)

    def next_due(self, since: float) -> float:
        """When a run may begin that was not due at the beginning of a tour, or had to wait for its observer's rate."""
        failed = self.backoff.next_due(since)
        due = min(math.inf if failed is None else failed, self.breakers.next_due(since))
        return due if self.rates is None else min(due, self.rates.next_due())

    async def due(self, table: str, row: bytes, ack: int, cells: list[ScanCell], now: float) -> float:
        """When an observer is due on a row, according to these notify cells of the row; a moment in the past means
        now."""
        delays = self.delays.get(observer_of(ack))
        if delays is None:
            return now
        return await due_on(self.engine.driver.store, delays, (table, row, ack), cells, now)

    async def _noted(self, ts: int) -> int | None:
        return await note_from(self.engine.driver.store, ts)

    def acks(self, table: str) -> list[int]:
        """The acknowledgement columns of all observers that this worker could run on a row of a table."""
        return [
            ack_of(self._bound(observer).column, number)
            for number, observer in self.observers.items()
            if observer.column.table.name == table
        ]

    def _bound(self, observer: Observer) -> Bound:
        column, known = observer.column, self.engine.known
        return known.bind_signal(column) if isinstance(column, Signal) else known.bind(column)

    def has_failed(self, table: str, row: bytes, acks: list[int]) -> bool:
        """Whether a run of one of these observers on the row has failed before."""
        return bool(self.backoff.rows) and any(self.backoff.attempts((table, row, ack)) for ack in acks)

    def begin_row(self, table: str, row: bytes, acks: list[int]) -> bool:
        """Returns whether one of these observers has failed on the row before. If so, the row counts as failing until
        `end_row` (N6). A scanner calls this before it asks the server for the row, because it asks for many rows at
        once."""
        failing = self.has_failed(table, row, acks)
        self._failing += failing
        self.room.take(acks)
        if self.breakers.tripped:
            self.breakers.take(acks)
        if self.rates is not None:
            self.rates.take(acks)
        return failing

    def end_row(self, acks: list[int], *, failing: bool, ran: bool = True) -> bool:
        """Returns whether this makes room for a row that scanners may have skipped. `ran`: a runner had the row."""
        full = self._failing >= self._failing_max
        self._failing -= failing
        self.breakers.release(acks)
        if self.rates is not None and not ran:
            self.rates.give_back(acks, trio.current_time())
        passed = self.room.release(acks)
        if self._drained is not None and self.room.is_empty:
            self._drained.set()
        return passed or (failing and full)

    async def drain(self) -> None:
        """Begin no more runs, and wait for those in flight."""
        if self._drained is None:
            self._drained = trio.Event()
            if self.elsewhere is not None:
                self.elsewhere.works(*self.works())  # N8: others are woken instead
            if self.room.is_empty:
                self._drained.set()
        await self._drained.wait()

    def may_go_on(self, ack: int, claimed_at: float) -> bool:
        """Whether another observer may run now on a row that was claimed at that time: not if the worker is draining,
        nor if the moment that was reserved for the run is long past (N15)."""
        if self._drained is not None:
            return False
        return self.rates is None or self.rates.is_fresh(observer_of(ack), claimed_at)

    def wait_s(self, ack: int) -> float:
        """How long to wait before a run, in seconds (N13)."""
        number = observer_of(ack)
        return self.room.wait_s(number, trio.current_time(), alone=number in self._alone)

    async def run(self, table: str, row: bytes, ack: int) -> None:
        """Run an observer on a row, several times if necessary, until a run (here or elsewhere) has handled the
        changes, or until the observer must wait (N6)."""
        observer = self.observers.get(observer_of(ack))
        if observer is None:
            return  # N10: paused or superseded since the row was claimed
        counters = self.counters[observer.id]
        key = Cellref(table, row, ack)
        conflicts = 0
        turn: Turn | None = None  # made at the first conflict
        counters.running += 1
        try:
            while True:
                seen_ts = self.engine.oracle.last
                try:
                    done = await self._try(observer, counters, table, row, ack, conflicts)
                    if done is None:
                        return
                    if done:
                        self.succeeded(key)
                        return
                    continue
                except (TransientError, CommitUnknown) as error:  # if unknown, the next attempt finds out (N3)
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
                    turn = Turn(self.engine.lines, self.engine.retry.turn_s)
                if turn.met(met_on):
                    await trio.sleep(self.engine.retry.delay_s(turn.lost, self.engine.random))
                if self.rates is not None and (wait_s := self.rates.wait_s(observer_of(ack))):
                    self.backoff.later(key, trio.current_time(), wait_s)
                    return
                await turn.take()
        except StoreError as error:
            self._tell(logging.WARNING, observer, table, row, error)
            self._failed(observer, counters, key, error, seen_ts)
        except Corruption as error:
            self.engine.driver.note_damage(error)
            self._failed(observer, counters, key, error.again(), seen_ts)
        except Retry as asked:
            counters.later += 1
            self.unrunnable.forget(key)
            self.backoff.later(key, trio.current_time(), asked.after_s)
            self._tell(logging.INFO, observer, table, row, asked)
        except ObserverFailedError as failed:
            wrong = awaits_asyncio(self.engine, observer, failed.error)
            failed.error = wrong or failed.error
            self.failure_log.failed(observer.id, where_of(self.engine, table, row), failed)
            self._failed(observer, counters, key, failed.error, seen_ts, 0 if wrong else failed.attempts)
            if wrong is not None:
                return
            attempts = observer.limits.attempts
            if await note_failure(self.engine, key, failed, self.options.attempts if attempts is None else attempts):
                counters.given_up += 1
                self.failure_log.given_up(observer.id, where_of(self.engine, table, row))
                self.backoff.succeeded(key)
        finally:
            counters.running -= 1

    def _failed(
        self,
        observer: Observer,
        counters: ObserverCounters,
        key: Cellref,
        error: BaseException,
        seen_ts: int,
        attempts: int = 0,
    ) -> None:
        """Note a failed run. `seen_ts`: the run has seen all notify cells up to this timestamp. `attempts`: how often
        it has failed, according to the store."""
        counters.failures += 1
        self.last_failures[observer.id] = counters.failures, where_of(self.engine, *key[:2]), error
        least_s = 0.0
        if attempts and not isinstance(error, GiveUp | ChainTooLong | Corruption):
            self._tripping.failed(observer.id, observer_of(key[2]), error)
            least_s = self.breakers.pause_s(observer_of(key[2]), self.backoff)
        self.backoff.failed(key, trio.current_time(), attempts, least_s, observer.limits.backoff_s)
        if isinstance(error, Corruption | AwaitsAsyncio):
            self.unrunnable.note(key, seen_ts, error)
            self.engine.driver.quiet()  # N7: waiting tasks look again
        else:
            self.unrunnable.forget(key)

    def _tell(self, level: int, observer: Observer, table: str, row: bytes, what: BaseException) -> None:
        where = where_of(self.engine, table, row)
        log.log(level, "observer %s on %s: %s", observer.id, where, what, extra=fields(observer.id, where))

    async def _try(
        self, observer: Observer, counters: ObserverCounters, table: str, row: bytes, ack: int, conflicts: int
    ) -> bool | None:
        """Make one run. Returns whether everything that it saw has been handled; None: the observer must run later."""
        txn = await begin_run(self.engine, observer.isolation, observer.id, first=not conflicts)
        try:
            return await self._run_in(txn, observer, counters, table, row, ack, conflicts)
        finally:
            runs.ended(txn)

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
        engine, number, starts = self.engine, observer_of(ack), runs.starts(txn)
        if not await self.enters(txn, observer, number):
            return True
        claim = self.claims.claim_signal if isinstance(observer.column, Signal) else self.claims.claim
        claimed = await claim(txn, observer, table, row, ack)
        if isinstance(claimed, bool):
            if claimed:
                self.wake_up()  # there may be more notify cells than a claim reads
            return claimed
        if starts and not await self.enters(txn, observer, number):  # the version came with the timestamp
            return True
        verdict, seen = claimed
        if self.delays:
            delays = self.delays.get(number)
            if delays is not None and await too_early(engine.driver.store, delays, (table, row, ack), verdict):
                return None
        path = self.caused(txn, number, verdict)
        if verdict.depth > self.chain_max:
            chain = too_long(engine, where_of(self.engine, table, row), verdict, path, self.options.chain_max)
            raise ObserverFailedError(chain, txn.start_ts, verdict)
        attempt = 1 + conflicts + max(verdict.attempts, self.backoff.attempts((table, row, ack)))
        if self.elsewhere is not None and not await self.elsewhere.carries((table, row), verdict.root):
            return None
        if engine.spans is not None:
            engine.spans.run(txn, observer, row, verdict, attempt)
        counters.runs += 1
        began = self.begins(txn, number, verdict.root)
        try:
            try:
                change = change_of(observer, row, seen, attempt, verdict)
                await (in_time(observer, txn, change) if observer.limits.timeout_s else observer.function(txn, change))
                if txn.outcome == "aborted":
                    raise UsageError("an observer may commit its transaction, but not discard it")
                if observer.writes is not None and not observer.view:
                    must_be_declared(observer, engine.known.catalogue, runs.written(txn))
            except (TransientError, CommitUnknown, StoreError):
                raise
            except Exception as error:  # an error of the user's code, not of perco (N6)
                asked = asked_by(error)
                if isinstance(asked, Retry):
                    raise asked from None
                raise ObserverFailedError(asked or error, txn.start_ts, verdict) from error
            counters.seconds += trio.current_time() - began
            if txn.outcome == "open":
                await self.claims.commit(txn, table, ack, [(row, verdict)])
        finally:
            self.over(txn, number)
        if len(verdict.covers) == COVERS_MAX:
            self.wake_up()  # there are more notify cells than one run covers
        self.committed_runs(txn, number, observer.id, [(change.key, verdict)], trio.current_time() - began)
        return True

    def succeeded(self, key: Cellref) -> None:
        """The changes that waited for an observer on a row have been handled."""
        self.backoff.succeeded(key)
        self.unrunnable.forget(key)

    async def enters(self, txn: Transaction, observer: Observer, number: int) -> bool:
        """Let a run commit only under the present catalogue. Returns False if the observer was paused or superseded
        meanwhile (N10)."""
        binds = self.engine.known.catalogue.binds
        if self.engine.oracle.catalogue_version > binds or binds != self._binds:
            await self.look_at_catalogue()
        runs.under(txn, self._binds)
        return self.observers.get(number) is observer

    def caused(self, txn: Transaction, number: int, run: Run) -> bytes:
        """Note what causes the changes that a run makes from now on (N9). Returns the path."""
        path = longer(run.path, self._marks[number][1])
        runs.caused(txn, run.root, run.depth, path)
        return path

    def begins(self, txn: Transaction, number: int, root: int) -> float:
        """The function is about to be called. Returns when. `root`: the oldest cause that the transaction carries."""
        self._roots[txn.start_ts] = root, number
        for watch in self._watches:
            if number in watch.concerned:
                watch.saw(root)
        began = trio.current_time()
        self.room.runs(number, txn.start_ts, began)
        return began

    def over(self, txn: Transaction, number: int, calls: int = 1) -> None:
        """The transaction of a run, or of so many, has ended."""
        self.room.ran(number, txn.start_ts, trio.current_time(), calls)
        del self._roots[txn.start_ts]
        if not self._roots:
            self.engine.driver.quiet()

    def committed_runs(
        self, txn: Transaction, number: int, id: str, handled: Sequence[tuple[Any, Run]], seconds: float
    ) -> None:
        """The transaction of some runs has committed. `handled`: their keys, and why they ran; `seconds`: of each."""
        counters = self.counters[id]
        counters.commits += len(handled)
        counters.collapsed += sum(run.collapsed for _, run in handled)
        if self.breakers.failures and self._tripping.succeeded(id, number):
            self.wake_up()
        if self.outputs is not None:
            self.outputs.note_run(number, txn)
        if self.durations is None and self.engine.on_event is None and self.on_run is None:
            return
        for key, _ in handled:
            if self.durations is not None:
                self.durations[id].note(seconds)
            if self.engine.on_event is not None:
                self.engine.on_event("ack")
            if self.on_run is not None:
                self._tell_of_run(self.on_run, id, key, seconds)

    @staticmethod
    def _tell_of_run(listener: Callable[[str, Any, float], None], id: str, key: Any, seconds: float) -> None:
        try:
            listener(id, key, seconds)
        except Exception:  # the listener has failed, not the observer, whose run has committed
            log.exception("the function given to on_run raised")

    def statistics(self) -> dict[str, ObserverCounters]:
        """The counters, by observer id."""
        return {id: replace(counters) for id, counters in self.counters.items()}
