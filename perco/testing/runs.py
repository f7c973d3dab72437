"""The common part of all runs of the simulation: what must happen in them, what their clients do, and how they end.

When no more faults occur, a last process opens the store. Then these conditions must hold:

    no lock is left, and `check` finds nothing                           (T1 - T8, N1, N2)
    the history of all clients satisfies snapshot isolation, or is       (T2, T9, T11, O1, O2)
    serializable, if all their transactions are                          (T14)
    the conditions on every snapshot held                                (T1, T9, T15)
    derived data match the data, and no change waits any more            (N1, N3, N7, N10, N11)
    every observer committed at most once per change                     (N3)
    as many faults fired as a run must have
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from _hashlib import HASH
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import trio

from perco.check.check import CheckOptions, check as check_store
from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.database.options import Options
from perco.errors import CommitUnknown, PercoError, SnapshotTooOld, StoreError, TransientError
from perco.notify.backfill import BackfillOptions
from perco.notify.backoff import BackoffOptions
from perco.notify.options import WorkerOptions
from perco.notify.worker import Worker
from perco.notify.workers import WorkerHandle
from perco.protocol.retention import Keep
from perco.schema.catalogue import registered
from perco.storage import RowStore
from perco.testing.faults import FaultyRowStore, use
from perco.testing.growth import GROWN, Growth
from perco.testing.history import FAIL, OK, UNKNOWN, Ops, Recorder, record
from perco.testing.isolation import check as check_history
from perco.testing.machine import CrashedError
from perco.testing.plan import Plan
from perco.testing.processes import EndlessError
from perco.testing.workloads import (
    BATCHED_OFTEN,
    COUNTING_OFTEN,
    FAILING_OFTEN,
    FOLLOWED_OFTEN,
    KINDS,
    MIRRORED_OFTEN,
    OFTEN,
    SIGNALS_OFTEN,
    Clients,
)
from perco.testing.world import World
from perco.txn.inside import drawn
from perco.txn.running import Retrying
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction

_WALL: Final = 1_700_000_000.0
LIVES_MAX: Final = 60  # a run has failed if not enough has happened after so many lives
_TRIES_MAX: Final = 50  # transactions, at most, for each commit that a run must have
TIME_MAX_S: Final = 300.0  # virtual time; a usual run takes a few seconds
_HOUR_S: Final = 3600.0
TICK_S: Final = 0.05
LOCAL: Final = "local"  # the stores of a run: embedded or served, as the seed decides
BIGTABLE: Final = "bigtable"


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationOptions:
    """The size of a run, and what must have happened in it before it may end.

    Attributes:
        clients, keys: how many clients, at least, act at once, and on how many lists.
        commits, runs: how many transactions of clients, and observer runs, must have committed.
        faults, kinds: how many faults, and of how many kinds, must have fired.
        processes: how many processes with clients run at once; None: one or several, as the seed decides.
        store: `LOCAL`, or `BIGTABLE` with direct clients.
        views: whether the program has a random graph of views (`viewed.py`).
    """

    clients: int = 5
    keys: int = 6
    commits: int = 200
    runs: int = 20
    faults: int = 5
    kinds: int = 3
    processes: int | None = None
    store: str = LOCAL
    views: bool = False


@dataclass(slots=True)
class Outcome:
    """The outcome of a seed's run.

    `runs`: how many observer runs have committed, and `batched`: how many of them shared a transaction; `lives`: how
    many lives the `processes` had; `terms`: how many owners there were, one after the other; `servers`:
    how many tablet servers were started; `pins`, `splits`, `waits`: how many pins, splits and waits for observers were
    completed; `operations`: how many operations on single cells were carried out;
    `followed`: how many transactions the follower of changes got; `fresh`, `compared`, `dropped`: how many
    waits for views were completed, how often all views were compared with the batch build before the end, and how many
    drops of a view were completed; `mistaken`: how often a live transaction was presumed dead; `grown`: the highest
    version of the observer that was added; `refused`: how often an older program with a lower version left it alone;
    `fired`: how often each fault fired, by (step, fault); `problems`: what is wrong, [] if nothing is; `digest`: of
    everything that was sent and seen, for comparing two runs.
    """

    seed: int
    processes: int = 0
    committed: int = 0
    failed: int = 0
    unknown: int = 0
    runs: int = 0
    batched: int = 0
    lives: int = 0
    jumps: int = 0
    terms: int = 0
    late: int = 0
    removed: int = 0
    mistaken: int = 0
    servers: int = 0
    pins: int = 0
    splits: int = 0
    waits: int = 0
    operations: int = 0
    followed: int = 0
    fresh: int = 0
    compared: int = 0
    dropped: int = 0
    grown: int = 0
    refused: int = 0
    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    digest: str = ""

    def enough(self, options: SimulationOptions) -> bool:
        """Whether everything that must happen has happened often enough."""
        kinds = {fault for _, fault in self.fired}
        return (
            self.committed >= options.commits
            and self.runs >= options.runs
            and self.fired.total() >= options.faults
            and len(kinds) >= options.kinds
        )


@dataclass(slots=True)
class Program:
    """The program that a client's task runs: its name and its random delays."""

    name: str
    delays: random.Random


program: ContextVar[Program | None] = ContextVar("program", default=None)


T = TypeVar("T")


class Noted:
    """The newest transaction of a client."""

    def __init__(self, clients: Clients, ran: Callable[[int], None]) -> None:
        self.txn: Transaction | None = None
        self._clients, self._ran = clients, ran
        self._answered = clients.answered

    def note(self, txn: Transaction) -> None:
        """Note a transaction that has its timestamp."""
        self.txn = txn
        self._ran(txn.start_ts)
        self._clients.begun(self._answered, txn.start_ts)

    async def run(self, made: Retrying, function: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run a function as `db.options(...).run` does. Its first read may draw the timestamp."""

        async def attempt(txn: Transaction) -> T:
            self.txn = txn
            result = await function(txn)
            await drawn(txn)  # the steps of the commit are named after the timestamp
            self.note(txn)
            return result

        return await made.run(attempt)

    @contextlib.asynccontextmanager
    async def __call__(self, manager: AbstractAsyncContextManager[Transaction]) -> AsyncIterator[Transaction]:
        async with manager as txn:
            self.note(txn)
            yield txn


class Actor(Protocol):
    """A process, as its clients' tasks see it."""

    name: str
    rng: random.Random

    @property
    def dead(self) -> bool: ...


class Run(ABC):
    """One run."""

    plan: Plan
    outcome: Outcome
    growth: Growth
    count: int
    kinds: frozenset[str]
    groups: bool
    rate: float
    slow: float
    digest: HASH

    _metered = False  # whether there are meters

    def __init__(self, plan: Plan, options: SimulationOptions) -> None:
        self.plan, self._options = plan, options
        rng = plan.random("run")
        self.outcome = Outcome(plan.seed)
        self.kinds = frozenset(kind for kind in KINDS if rng.random() < OFTEN.get(kind, 0.5))
        if plan.random("signals").random() < SIGNALS_OFTEN:
            self.kinds |= {"signals", "waits"}  # N7: waits cover pending signals
        if plan.random("failing").random() < FAILING_OFTEN:
            self.kinds |= {"failing", "napping"}  # N6: a run gives up a change while a slow run goes on
        if plan.random("mirrored").random() < MIRRORED_OFTEN:
            self.kinds |= {"mirrored"}
        if plan.random("counting").random() < COUNTING_OFTEN:
            self.kinds |= {"counting"}
        followed = plan.random("followed")
        if options.store == LOCAL and followed.random() < FOLLOWED_OFTEN:
            self.kinds |= {"followed"}
            if followed.random() < 0.6:  # otherwise, the vacuum removes most changes before they are read (E4)
                self.kinds -= {"vacuum"}
        self.growth = Growth(plan, options.commits)
        if self.growth.active:
            self.kinds |= {"journal"}
        if "locks" in self.kinds:
            self.kinds -= {"serializable"}
        self.count = self.outcome.processes = options.processes or rng.choice((1, 1, 2, 3))
        if self.count == 1 and options.store == LOCAL and plan.random("batched").random() < BATCHED_OFTEN:
            self.kinds |= {"batched"}  # N20: only the owner's runs share transactions
        if "failing" in self.kinds:
            self.kinds -= {"waits"}
        self._vacuums = "vacuum" in self.kinds
        self._keep = Keep(seconds=0) if self._vacuums else None
        self.groups = rng.random() < 0.7 or "batched" in self.kinds
        self.rate = rng.choice((0.004, 0.01, 0.03, 0.08))  # faults per mutation, or per message
        self.slow = rng.choice((0.0, 0.1, 0.4))  # the share of slow messages
        self._hasty = rng.choice((0.0, 0.05, 0.5))  # how often live transactions are presumed dead
        self._late_from = (
            rng.randint(20, 160) * options.commits // 200
        )  # the number of commits after which a process starts with the late schema
        self._ahead: Counter[str] = Counter()  # how far each machine's wall clock is ahead, in seconds
        self._renewed = False  # a process has started with the late schema
        self._owners: dict[int, str] = {}
        self._again_s = 0.0  # a client's pause after the store could not be reached, or written to
        self._unreached = 0  # transactions that such a pause followed
        self.digest = hashlib.sha256()
        self._clients = Clients(self.kinds, self._problem)
        self._clients.is_run = self._owners.__contains__
        if options.views:
            from perco.testing.viewed import ViewClients  # only here: other runs do without the modules of views

            self._clients.viewing = ViewClients(plan.seed, self._problem)
        self._recorder: Recorder  # while the run goes on

    async def run(self) -> Outcome:
        with record() as self._recorder:
            await self._processes()
            self.outcome.waits, self.outcome.followed = self._clients.waits, self._clients.follower.taken
            self.outcome.operations = self._clients.counting.done.total()
            await self._end()
        if (viewing := self._clients.viewing) is not None:
            self.outcome.fresh, self.outcome.compared = viewing.waited, viewing.compared
            self.outcome.dropped = viewing.dropped
        for one in self._recorder.transactions:
            self.digest.update(one.line().encode())
        self.outcome.digest = self.digest.hexdigest()
        return self.outcome

    @abstractmethod
    async def _processes(self) -> None:
        """Run the processes until enough of everything has happened."""

    @abstractmethod
    def _last(self, world: World, options: Options) -> AbstractAsyncContextManager[tuple[Database, RowStore]]:
        """Open the last process, with a sweeper, when no more faults occur. Yields its database and its row store."""

    @abstractmethod
    async def _verify(self, snap: Snapshot, world: World) -> None:
        """Check further conditions, once the run has come to rest."""

    @abstractmethod
    def _locks(self) -> int:
        """How many locks there are."""

    def _world(
        self,
        *,
        late: bool,
        naps: random.Random | None = None,
        failures: random.Random | None = None,
        grown: int = 0,
    ) -> World:
        return World(
            self._options.keys,
            late=late,
            ran=self._ran,
            keep=self._keep,
            naps=naps,
            signals="signals" in self.kinds,
            failing="failing" in self.kinds,
            failures=failures,
            grown=grown,
            metered=self._metered,
            followed="followed" in self.kinds,
            counting="counting" in self.kinds,
            batched="batched" in self.kinds,
            declare=self._clients.viewing.declare if self._clients.viewing is not None else None,
        )

    def _problem(self, text: str) -> None:
        if len(self.outcome.problems) < 20:
            self.outcome.problems.append(text)

    def _ran(self, start_ts: int, name: str) -> None:
        self._owners[start_ts] = name

    def owner_of(self, start_ts: int) -> str:
        """The name, for use in the names of steps, of the client or observer run whose transaction has this start
        timestamp."""
        return self._owners.get(start_ts, "somebody")

    def _count_runs(self, handle: WorkerHandle, before: tuple[int, int]) -> tuple[int, int]:
        """Add the runs of a worker since the last look. `before`: what that look returned."""
        counters = handle.statistics().values()
        now = sum(each.commits for each in counters), sum(each.batched for each in counters)
        self.outcome.runs += now[0] - before[0]
        self.outcome.batched += now[1] - before[1]
        return now

    # ------------------------------------------------------------ lives

    def _wall(self, machine: str) -> Callable[[], float]:
        return lambda: _WALL + trio.current_time() + self._ahead[machine]

    def _jump(self, machine: str, life: str) -> None:
        rng = self.plan.random(life, "jump")
        chance = lambda: str(rng.choice((-_HOUR_S, _HOUR_S, 0.5))) if rng.random() < 0.3 else ""  # noqa: E731
        jump = self.plan.choose(f"jump of the clock of {life}", chance, trio.current_time())
        if jump:
            self._ahead[machine] += float(jump)  # type: ignore[assignment]
            self.outcome.jumps += 1

    def _lives(self, process: str) -> Iterator[int]:
        if self.plan.replays:
            yield from self.plan.numbers(f"life {process}.")
            return
        life = 0
        while not self.outcome.enough(self._options):
            if self.outcome.lives >= LIVES_MAX:
                self._problem(f"after {LIVES_MAX} lives not everything has happened: {self.outcome}")
                return
            yield life
            life += 1

    def _begins(self) -> str:
        late = "late" in self.kinds and (self._renewed or self.outcome.committed >= self._late_from)
        return "late" if late else "begins"

    def _is_left_alone(self, db: Database) -> None:
        """Check that the worker of an older program would leave an observer alone of which the store has a higher
        version (N10). The worker does not begin: the program ends here."""
        engine, catalogue = inside(db).engine, inside(db).catalogue
        worker = Worker(engine, registered(engine.known.schema, catalogue), WorkerOptions(outputs=False))
        if GROWN not in worker.superseded or catalogue.observers[GROWN].number in worker.observers:
            self._problem("N10: an older program runs observers of which the store has a higher version")
        self.growth.refused += 1

    def _worker_options(self, rng: random.Random) -> WorkerOptions:
        # Without row locks, several runs may be for the same change; at most one of them may commit (N3).
        concurrency = rng.choice((2, 6)) if "napping" in self.kinds else 6
        failing = "failing" in self.kinds
        return WorkerOptions(
            concurrency=concurrency,
            scanners=1 if "batched" in self.kinds else concurrency // 2,
            backoff=BackoffOptions(first_s=0.01, max_s=0.1),
            row_locks=rng.random() < 0.5 or "batched" in self.kinds,
            attempts=2 if failing else 16,
            outputs=failing,
        )

    def _over(self, actor: Actor, busy: list[int]) -> bool:
        if self.plan.replays:
            return not busy[0]
        wanted = "late" in self.kinds and not self._renewed and self.outcome.committed >= self._late_from
        wanted |= self.growth.wanted(self.outcome.committed)
        return self.outcome.enough(self._options) or (wanted and actor.name.startswith("p0."))

    async def _tend(self, db: Database, actor: Actor) -> None:
        """Replay and drop changes on which observers have failed (N6)."""
        while True:
            await trio.sleep(actor.rng.choice((0.02, 0.1)))
            try:
                await self._clients.tend(db, actor.rng)
            except (StoreError, TransientError, CommitUnknown):
                pass
            except PercoError:  # the background of a dead process has failed too
                if not actor.dead:
                    raise

    async def _vacuum(self, db: Database, actor: Actor) -> None:
        """Remove old versions repeatedly (G1 - G5)."""
        pauses_s = actor.rng.choice(((0.0, 0.01, 0.05), (0.01, 0.05, 0.2)))
        while True:
            await trio.sleep(actor.rng.choice(pauses_s))
            try:
                self.outcome.removed += (await db.vacuum()).removed.cells
            except (StoreError, TransientError):
                pass
            except PercoError:  # the background of a dead process has failed too
                if not actor.dead:
                    raise

    # ------------------------------------------------------------ clients

    async def _client(self, db: Database, world: World, actor: Actor, client: str, busy: list[int]) -> None:
        plan = self.plan
        left = iter(plan.numbers(f"txn {client} #")) if plan.replays else iter(range(1 << 30))
        for number in left:
            if actor.dead:
                break
            name = f"{client} #{number}"
            plan.choose(f"txn {name}", lambda: "begins", trio.current_time())
            rng = plan.random(name)
            program.set(Program(name, plan.noise(name)))
            await self._transaction(db, world, actor, name, rng)
            await trio.sleep(rng.choice((0.0, 0.001, 0.005)))
        await trio.sleep(1.0)  # so that its background work can end
        busy[0] -= 1

    async def _transaction(self, db: Database, world: World, actor: Actor, name: str, rng: random.Random) -> None:
        """Run and record one attempt. Its outcome is unknown if the process died before the reply."""
        ops, begin = Ops(), trio.current_time()
        if len(self._recorder.transactions) - self._unreached > _TRIES_MAX * self._options.commits:
            raise EndlessError("far too many transactions do not commit")
        began = Noted(self._clients, lambda start_ts: self._ran(start_ts, name))
        try:
            await self._clients.act(db, world, ops, rng, began)
        except StoreError:
            self._unreached += 1
            if self._again_s:
                await trio.sleep(self._again_s)
        except (TransientError, CommitUnknown, SnapshotTooOld, CrashedError):
            pass
        except PercoError:  # the background of a dead process has failed too
            if not actor.dead:
                raise
        finally:
            status, txn = FAIL, began.txn
            if txn is not None:
                status = {"committed": OK, "unknown": UNKNOWN}.get(txn.outcome, FAIL)
                if actor.dead and status == FAIL and txn.token:
                    status = UNKNOWN
                self._clients.ended(txn, status)
            self._recorder.add(name, begin, trio.current_time(), status, ops.made)
            self.outcome.committed += status == OK
            self.outcome.failed += status == FAIL
            self.outcome.unknown += status == UNKNOWN

    # ------------------------------------------------------------ the end

    async def _end(self) -> None:
        """Let everything come to rest, and check it."""
        world = self._world(late="late" in self.kinds, grown=self.growth.latest)
        self.outcome.grown, self.outcome.refused = self.growth.latest, self.growth.refused
        # If the backfill took only a share of real time, every run of the seed would be different.
        options = Options(wall=self._wall("the end"), seed=0, backfill=BackfillOptions(share=1.0))
        noise = self.plan.noise("the end")

        async def slowly() -> None:
            await trio.sleep(noise.choice((0.0, 0.01)))

        async with self._last(world, options) as (db, store):
            viewing, viewed = self._clients.viewing, world.viewed
            if viewing is not None and viewed is not None:
                await viewing.end(db, viewed)
            use(db, FaultyRowStore(inside(db).driver.store, looking=slowly))  # N7: slow reads make `wait_idle` wait
            async with db.worker(options=WorkerOptions(concurrency=6, scanners=2, outputs=False)):
                with trio.move_on_after(_HOUR_S) as scope:
                    await db.wait_idle()
                if scope.cancelled_caught:
                    self._problem("N7: the observers do not come to rest")
                if "failing" in self.kinds:
                    await self._end_failing(db, store)
            while not local_owner(db).sweeper.clean:  # noqa: ASYNC110
                await trio.sleep(0.01)
            if self._locks():
                self._problem(f"L1: {self._locks()} locks are left")
            if self._vacuums:
                self.outcome.removed += (await db.vacuum()).removed.cells
            begin = trio.current_time()
            async with db.snapshot() as snap:
                lists = await self._clients.verify(snap, world)
                if viewing is not None and viewed is not None:
                    await viewing.verify(db, snap, viewed)
                await self._verify(snap, world)
            if "followed" in self.kinds:
                await self._clients.follower.verify(db, world)
            ops = [("r", key, value) for key, value in lists.items()]
            await trio.sleep(1.0)  # so that transactions that ended at the same moment come before the read
            self._recorder.add("end", begin + 0.5, trio.current_time(), OK, ops)
            result = await check_store(store, options=CheckOptions(pause_s=0.0))
            self.outcome.problems += [f"check: {finding}" for finding in result.findings]
        serializable = "serializable" in self.kinds
        report = check_history(self._recorder.transactions, serializable=serializable)
        self.outcome.problems += [f"{anomaly.name}: {anomaly.text}" for anomaly in report.anomalies]

    async def _end_failing(self, db: Database, store: RowStore) -> None:
        """Check that failed changes are neither lost nor listed twice, and that their replay succeeds (N6)."""
        result = await check_store(store, options=CheckOptions(pause_s=0.0))
        self.outcome.problems += [f"check: {finding}" for finding in result.findings]
        if result.failed != await db.replay_failed():
            self._problem(f"N6: {result.failed} changes had failed, and not all were replayed")
        with trio.move_on_after(_HOUR_S) as scope:
            left = await db.wait_idle()
            if left:
                self._problem(f"N6: {left} changes have failed again")
        if scope.cancelled_caught:
            self._problem("N7: the observers do not come to rest once all has been replayed")


def processes_of(plan: Plan, options: SimulationOptions) -> int:
    """How many processes with clients a run has at once; 1: the store is embedded."""
    rng = plan.random("run")
    for _ in KINDS:
        rng.random()
    return options.processes or rng.choice((1, 1, 2, 3))
