"""A store, its clients and observers, and all that can go wrong, from one seed: the same seed is the same run.

Processes share one memory store: by the seed either one after the other, as the embedded store has it, or several at
once, with leases, over two coordinators (`cluster.py`). In each, clients do what `workloads.py` says, and a worker
keeps what is derived up to date. Between them and the store lies a network (`faults.py`) that delays, loses, repeats
and reorders, also beyond the death of the sender; the disk is full now and then; wall clocks jump; processes and
coordinators die before or after any mutation, and come back, or stand still while others break their locks. At the end
a last process comes up with nothing going wrong, and then

    no lock is left, and `check` finds nothing                           (T1 - T8, N1, N2)
    all that the clients saw and did is snapshot isolation, or           (T2, T9, T11, O1, O2)
    serializable, where all of them are                                  (T14)
    what must hold in every snapshot held                                (T1, T9, T15)
    what is derived is what the data say, and nobody waits any more      (N1, N3, N7, N10, N11)
    every observer committed at most once per change                     (N3)
    as many faults fired as a run has to have, or the run counts as failed

The clock is virtual and trio's choice of the next task is seeded, so a run takes no longer than it computes. All that a
run could do without is a choice of its `Plan`: noted, replayed, left out (`shrink.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import trio
import trio.testing
from trio._core import _run as scheduler

from perco.errors import CommitUnknown, PercoError, SchemaMismatch, SnapshotTooOld, StoreError, TransientError
from perco.notify.backoff import BackoffOptions
from perco.notify.database import Database
from perco.notify.worker import WorkerOptions
from perco.storage import LocalRowStore, Mutation
from perco.testing.cluster import (
    REFRESH_S,
    Coordinator,
    LeasedFates,
    RemoteOracle,
    ask_one_of,
)
from perco.testing.faults import Fault, FaultyRowStore, kind_of, start_ts_of, use
from perco.testing.growth import Growth
from perco.testing.history import FAIL, OK, UNKNOWN, Ops, record
from perco.testing.isolation import check as check_history
from perco.testing.machine import CrashedError, Machine
from perco.testing.plan import Plan
from perco.testing.workloads import FAILING_OFTEN, KINDS, MIRRORED_OFTEN, OFTEN, SIGNALS_OFTEN, Clients, World
from perco.txn.backfill import BackfillOptions
from perco.txn.catalogue import SYSTEM_TABLE
from perco.txn.check import CheckOptions, check as check_store
from perco.txn.client import Options
from perco.txn.driver import CommitOptions, Driver
from perco.txn.fates import Fates
from perco.txn.oracle import Oracle, OracleOptions
from perco.txn.prefetch import PrefetchOptions
from perco.txn.records import Cellref, Lock
from perco.txn.retention import Keep
from perco.txn.transaction import Transaction

_WALL: Final = 1_700_000_000.0
_LIVES_MAX: Final = 60  # a run that has not had its share of everything by then is a failure
_CALLS_MAX: Final = 200_000  # of the store, in one run; a usual one makes a tenth of that
_LOOKS_MAX: Final = 2_000_000  # at the clock; a usual run takes a twentieth of that
_TRIES_MAX: Final = 50  # transactions for each commit that a run has to have
_TIME_MAX_S: Final = 300.0  # virtual; a usual run takes a few
_HOUR_S: Final = 3600.0
_TICK_S: Final = 0.05
FAULTS: Final = tuple(
    fault.name for fault in (Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.DELAY, Fault.REPEAT, Fault.ECHO, Fault.FAIL)
)
_ONCE: Final = tuple(fault for fault in FAULTS if fault not in ("REPEAT", "ECHO"))
CRASHES: Final = ("CRASH_BEFORE", "CRASH_AFTER")
PAUSE: Final = "PAUSE"
# What is sent. (Removing notify cells by itself is rare: it has own tests.)
STEPS: Final = (
    *("one step", "prewrite", "commit", "roll forward", "marker", "rollback", "refresh", "bound", "lease", "clock"),
    *("catalogue", "notify", "vacuum", "give up", "replay"),
)
# How often at least these meet something, and whether that is the death of who sent it.
_RARE: Final = {
    "roll forward": 0.3,
    "marker": 0.5,
    "rollback": 0.1,
    "refresh": 0.04,
    "bound": 0.05,
    "lease": 0.05,
    "clock": 0.05,
    "catalogue": 0.15,
    "notify": 0.1,
    "vacuum": 0.05,
    "give up": 0.1,
    "replay": 0.1,
}
_RARELY_DIES: Final = {
    "catalogue": 0.05,
    "notify": 0.02,
    "bound": 0.01,
    "clock": 0.01,
    "lease": 0.01,
    "refresh": 0.005,
    "vacuum": 0.01,
    "roll forward": 0.02,
}


def faults_of(step: str) -> tuple[str, ...]:
    """What can befall a step: a commit in one step is handed to a tablet of the same process, once (C6)."""
    if step == "one step":
        return (*_ONCE, *CRASHES)  # and a process that is alone is not paused: nobody would notice
    return (*FAULTS, *CRASHES) if step == "vacuum" else (*FAULTS, *CRASHES, PAUSE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationOptions:
    """What a run has to have had before it may end.

    Attributes:
        clients, keys: how many act at once, at the least, and on how many lists.
        commits, runs: committed transactions of clients, and observer runs.
        faults, kinds: faults that fired, and of how many kinds.
        processes: at once; None: by the seed, one or several.
    """

    clients: int = 5
    keys: int = 6
    commits: int = 200
    runs: int = 20
    faults: int = 5
    kinds: int = 3
    processes: int | None = None


@dataclass(slots=True)
class Outcome:
    """What happened under a seed.

    `lives` of `processes`; `terms`: how often a coordinator took over; `mistaken`: how often the living were taken for
    dead, or for dead by their leases; `grown`: the highest version of an observer that was added; `refused`: how often
    an older program wanted to run a lower one; `waits`: how often observers were waited for, and nothing was missing;
    `fired`: faults by (step, fault); `problems`: what is wrong, [] if nothing is; `digest`: of all that was sent and
    seen, for comparing two runs.
    """

    seed: int
    processes: int = 0
    committed: int = 0
    failed: int = 0
    unknown: int = 0
    runs: int = 0
    lives: int = 0
    jumps: int = 0
    terms: int = 0
    late: int = 0
    removed: int = 0
    mistaken: int = 0
    waits: int = 0
    grown: int = 0
    refused: int = 0
    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    digest: str = ""

    def enough(self, options: SimulationOptions) -> bool:
        """Whether everything has happened often enough."""
        kinds = {fault for _, fault in self.fired}
        return (
            self.committed >= options.commits
            and self.runs >= options.runs
            and self.fired.total() >= options.faults
            and len(kinds) >= options.kinds
        )


class EndlessError(Exception):
    """A run does not come to its end: something goes round in circles."""


def _bounded(store: LocalRowStore, calls: int) -> None:
    """From so many calls on the store raises: virtual time does not pass for those who never sleep."""
    left = calls

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise EndlessError(f"{calls} calls of the store have not brought the run to its end")
            return function(*args, **kwargs)

        return call

    for name in ("read", "scan", "apply", "apply_then"):
        setattr(store, name, counted(getattr(store, name)))


def _turning(clock: trio.testing.MockClock, looks: int) -> None:
    """The same for those who go round in circles without a call of the store, by how often the clock is looked at."""
    left = looks
    right = clock.current_time

    def current_time() -> float:
        nonlocal left
        left -= 1
        if left < 0:
            raise EndlessError(f"{looks} looks at the clock have not brought the run to its end")
        return right()

    setattr(clock, "current_time", current_time)  # noqa: B010


class _Hasty(Fates):
    """Takes the living for dead now and then, as others do when a lease runs out: safe, only slow (L2)."""

    __slots__ = ("_rate", "_rng", "broken")

    exact = False

    def __init__(self, rng: random.Random, rate: float) -> None:
        super().__init__()
        self._rng, self._rate = rng, rate
        self.broken = 0

    def alive(self, start_ts: int) -> bool:
        if super().alive(start_ts) and self._rng.random() < self._rate:
            self.broken += 1
            return False
        return super().alive(start_ts)


@dataclass(slots=True)
class _Program:
    """What a client's task is doing."""

    name: str
    delays: random.Random


_program: ContextVar[_Program | None] = ContextVar("program", default=None)
_resolving: ContextVar[bool] = ContextVar("resolving", default=False)


def _step_of(mutation: Mutation) -> str:
    kind = kind_of(mutation)
    return "roll forward" if kind == "commit" and _resolving.get() else kind


def _tell_apart(driver: Driver) -> None:
    """What this driver sends while it settles another's lock is known as such."""
    right = driver.resolve

    async def resolve(cell: Cellref, start_ts: int, lock: Lock) -> int | None:
        before = _resolving.set(True)
        try:
            return await right(cell, start_ts, lock)
        finally:
            _resolving.reset(before)

    setattr(driver, "resolve", resolve)  # noqa: B010


class _Actor:
    """A life of a process or of a coordinator: a network between it and the store, its death, its pauses."""

    def __init__(self, run: Simulation, name: str) -> None:
        self.name, self._run = name, run
        plan = run.plan
        self.rng, self._chances, self._noise = plan.random(name), plan.random(name, "chances"), plan.noise(name)
        self.died = trio.Event()
        self.dies_at, self.dies_in = 1 << 40, ""
        self._sent = 0
        self._still_until = 0.0
        self._woken = trio.Event()
        self._seen: Counter[str] = Counter()
        self._befalls: dict[int, str] = {}  # by the identity of a mutation that is under way
        store = FaultyRowStore(run.machine.store, self._fault, before=self._before, after=self._after)
        store.looking, store.shuffle, store.late = self.step, self._noise.shuffle, run.late
        self.store = store

    @property
    def dead(self) -> bool:
        return self.store.dead is not None

    def die(self) -> None:
        self.store.dead = CrashedError()
        self.died.set()
        self._woken.set()

    def wake(self) -> None:
        """It stands still no longer."""
        self._still_until = 0.0
        self._woken.set()

    async def step(self) -> None:
        """Time passes; one that stands still stays here, one that is dead goes no further."""
        program = _program.get()
        rng = self._noise if program is None else program.delays
        if rng.random() < self._run.slow:
            await trio.sleep(rng.choice((0.0, 0.0, 0.001, 0.02)))
        await self._still()
        if self.store.dead is not None:
            raise self.store.dead

    async def _still(self) -> None:
        while trio.current_time() < self._still_until:
            self._woken = trio.Event()
            with trio.move_on_at(self._still_until):
                await self._woken.wait()

    def pause(self, seconds: float) -> None:
        self._still_until = max(self._still_until, trio.current_time() + seconds)

    def name_of(self, kind: str, mutation: Mutation) -> str:
        """What a step is called: whose, where, and how often it was made."""
        row = mutation.rows[0][0].decode(errors="replace")
        name = f"{self.name}: {kind}"
        if mutation.table != SYSTEM_TABLE:
            name = f"{name} of {self._run.owner_of(start_ts_of(mutation))} in {mutation.table} {row}"
        self._seen[name] += 1
        return f"{name} #{self._seen[name]}"

    def _chance(self, kind: str) -> str:
        """What befalls a step."""
        rng, run = self._chances, self._run
        if (self._sent >= self.dies_at and self.dies_in in ("", kind)) or rng.random() < _RARELY_DIES.get(kind, 0.0):
            return rng.choice(CRASHES)
        rare = _RARE.get(kind, 0.0)
        if run.processes > 1 and rng.random() < 0.002 + rare / 20:
            return f"{PAUSE} {rng.choice((0.2, 0.6, 1.5))}"
        if rng.random() >= max(run.rate, rare):
            return ""
        fault = rng.choice(_ONCE if kind == "one step" else FAULTS)
        # An oracle in the process itself cannot meet its own echo, which it would take for a second oracle (O1).
        return "LOSE_REPLY" if fault == "ECHO" and kind == "bound" and run.processes == 1 else fault

    async def _before(self, mutation: Mutation) -> None:
        await self.step()
        self._sent += 1
        kind = _step_of(mutation)
        choice = self._run.plan.choose(self.name_of(kind, mutation), lambda: self._chance(kind), trio.current_time())
        if choice:
            what, _, seconds = choice.partition(" ")
            self._run.outcome.fired[kind, what] += 1
            if what == PAUSE:
                self.pause(float(seconds))
                await self._still()
            elif what == "CRASH_BEFORE":
                self.die()
            else:
                self._befalls[id(mutation)] = what

    def _fault(self, mutation: Mutation, _: int) -> Fault | None:
        what = self._befalls.get(id(mutation))
        if what is None or what == "CRASH_AFTER":
            return None
        return Fault[self._befalls.pop(id(mutation))]

    async def _after(self, mutation: Mutation) -> None:
        self._run.digest.update(repr(mutation).encode())
        if self._befalls.pop(id(mutation), "") == "CRASH_AFTER":
            self.die()
        await self._still()

    async def ask(self, what: str, argument: Any) -> Any:
        """A question to whoever serves, over a network that loses some."""
        run = self._run

        async def send(number: int) -> Any:
            await self.step()
            name = f"{self.name} asks: {what}"
            self._seen[name] += 1
            lost = run.plan.choose(f"{name} #{self._seen[name]}", self._lost, trio.current_time())
            if lost:
                run.outcome.fired["ask", lost] += 1
            if lost == "LOSE_REQUEST":
                await trio.sleep_forever()
            other, coordinator = run.coordinators[number]
            try:
                reply = await coordinator.serve(what, argument, other.step)
            except CrashedError:
                if self.dead:
                    raise
                await trio.sleep_forever()  # nobody is there
            if lost == "LOSE_REPLY":
                await trio.sleep_forever()
            await self.step()
            return reply

        return await ask_one_of(len(run.coordinators), what, send)

    def _lost(self) -> str:
        return self._chances.choice(("LOSE_REQUEST", "LOSE_REPLY")) if self._chances.random() < self._run.rate else ""


class _Noted:
    """The transaction that a client has begun last."""

    def __init__(self, ran: Callable[[int], None]) -> None:
        self.txn: Transaction | None = None
        self._ran = ran

    def note(self, txn: Transaction) -> None:
        self.txn = txn
        self._ran(txn.start_ts)

    @contextlib.asynccontextmanager
    async def __call__(
        self, manager: contextlib.AbstractAsyncContextManager[Transaction]
    ) -> AsyncIterator[Transaction]:
        async with manager as txn:
            self.note(txn)
            yield txn


class Simulation:
    """One run."""

    def __init__(self, plan: Plan, options: SimulationOptions) -> None:
        self.plan, self._options = plan, options
        rng = plan.random("run")
        self.outcome = Outcome(plan.seed)
        self.kinds = frozenset(kind for kind in KINDS if rng.random() < OFTEN.get(kind, 0.5))
        if plan.random("signals").random() < SIGNALS_OFTEN:
            self.kinds |= {"signals"}
        if plan.random("failing").random() < FAILING_OFTEN:
            self.kinds |= {"failing", "napping"}  # N6: one gives up while another's run takes its time
        if plan.random("mirrored").random() < MIRRORED_OFTEN:
            self.kinds |= {"mirrored"}
        self.growth = Growth(plan)
        if self.growth.active:
            self.kinds |= {"journal"}
        if "locks" in self.kinds:
            self.kinds -= {"serializable"}
        self.processes = options.processes or rng.choice((1, 1, 2, 3))
        if self.processes > 1 or "failing" in self.kinds:  # nobody of them knows what all the others are waiting for
            self.kinds -= {"waits"}
        self.outcome.processes = self.processes
        # Where processes are several, nobody of them knows who still reads what.
        self._vacuums = "vacuum" in self.kinds and self.processes == 1
        self._keep = Keep(seconds=0) if self._vacuums else None
        world = self._world(late=False)
        self.machine = Machine(world.schema, groups=rng.random() < 0.7)
        _bounded(self.machine.store, _CALLS_MAX)
        self.rate = rng.choice((0.004, 0.01, 0.03, 0.08))  # faults per mutation
        self.slow = rng.choice((0.0, 0.1, 0.4))  # messages that take their time
        self._hasty = rng.choice((0.0, 0.05, 0.5))  # how often the living are taken for dead
        self._late_from = rng.randint(20, 160)  # commits, until a process comes up that has more in its schema
        self.late: list[Mutation] = []  # messages that arrive when they like
        self.coordinators: list[tuple[_Actor, Coordinator]] = []
        self._ahead: Counter[str] = Counter()  # of the wall clocks, in seconds
        self._renewed = False  # somebody has come up with the late schema
        self._owners: dict[int, str] = {}
        self.digest = hashlib.sha256()
        self._clients = Clients(self.kinds, self._problem)

    async def run(self) -> Outcome:
        with record() as self._recorder:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._network, self.plan.noise("network"))
                if self.processes > 1:
                    names = ["o0", "o1"]
                    for name in names:
                        self._enlist(name, 0)
                    for i, name in enumerate(names):
                        nursery.start_soon(self._coordinate, i, name)
                async with trio.open_nursery() as lives:
                    for i in range(self.processes):
                        lives.start_soon(self._process, i)
                nursery.cancel_scope.cancel()
            self.outcome.terms += sum(coordinator.terms for _, coordinator in self.coordinators)
            self.outcome.waits = self._clients.waits
            await self._end()
        for one in self._recorder.transactions:
            self.digest.update(one.line().encode())
        self.outcome.digest = self.digest.hexdigest()
        return self.outcome

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
        )

    def _problem(self, text: str) -> None:
        if len(self.outcome.problems) < 20:
            self.outcome.problems.append(text)

    def _ran(self, start_ts: int, name: str) -> None:
        self._owners[start_ts] = name

    def owner_of(self, start_ts: int) -> str:
        """Whose transaction began then, as names of steps have it."""
        return self._owners.get(start_ts, "somebody")

    # ------------------------------------------------------------ processes

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
            if self.outcome.lives >= _LIVES_MAX:
                self._problem(f"after {_LIVES_MAX} lives not everything has happened: {self.outcome}")
                return
            yield life
            life += 1

    async def _process(self, number: int) -> None:
        """A process, from one life to the next."""
        process = f"p{number}"
        for life in self._lives(process):
            name = f"{process}.{life}"
            begins = self.plan.choose(f"life {name}", self._begins, trio.current_time())
            await self._live(process, name, late=begins == "late")
            if self.processes > 1:
                await trio.sleep(self.plan.random(name, "gone").choice((0.0, 0.05, 0.5)))

    def _begins(self) -> str:
        late = "late" in self.kinds and (self._renewed or self.outcome.committed >= self._late_from)
        return "late" if late else "begins"

    async def _live(self, process: str, name: str, *, late: bool) -> None:
        """A process from its start to its death."""
        self.outcome.lives += 1
        self._jump(process, name)
        actor = _Actor(self, name)
        rng = actor.rng
        actor.dies_at, actor.dies_in = rng.randint(5, 600), rng.choice((*STEPS[:5], ""))  # in "": wherever it is
        registered = self.growth.registered
        naps = self.plan.noise(name, "naps") if "napping" in self.kinds else None
        failures = self.plan.noise(name, "failures") if "failing" in self.kinds else None
        grown = self.growth.of(name, self.outcome.committed, trio.current_time())
        world = self._world(late=late, naps=naps, failures=failures, grown=grown)
        self._renewed |= late
        # A vacuum may be the first to meet the locks that others have left (G2).
        sweeps_at = rng.choice((0.0, 0.05, 0.2)) if self._vacuums else 0.0
        ahead = "mirrored" in self.kinds and rng.random() < 0.8
        options = Options(
            wall=self._wall(process),
            seed=rng.getrandbits(32),
            oracle=OracleOptions(range_size=rng.choice((40, 300, 3000))),
            commit=CommitOptions(one_step=rng.random() < 0.6),
            prefetch=PrefetchOptions(cache=ahead, predict=ahead),
            backfill=BackfillOptions(share=1.0, page_rows=8),
        )
        fates: list[_Hasty | LeasedFates] = []

        def prepare(db: Database) -> None:
            use(db, actor.store)
            _tell_apart(db.driver)
            if self.processes > 1:
                oracle: Oracle = RemoteOracle(actor.store, options.oracle, actor.ask, db.background.spawn)
                assert isinstance(oracle, RemoteOracle)
                fates.append(LeasedFates(oracle, db.lease_token))
            else:
                oracle = Oracle(actor.store, options.oracle, options.wall)
                fates.append(_Hasty(self.plan.noise(name, "hasty"), self._hasty))
            db.oracle = db.driver.oracle = oracle
            db.fates = db.driver.fates = fates[0]

        try:
            opened = self.machine.opened(options, sweeper=not sweeps_at, schema=world.schema, prepare=prepare)
            async with opened as db:
                if self.growth.has_gone_back(registered, db.catalogue):
                    self._problem(f"N10: the catalogue went back: version {registered} had been registered")
                if self.growth.is_older(grown, db.catalogue):
                    await self._refuse(db)
                    return
                self.growth.registered = max(self.growth.registered, grown)
                await self._work(db, world, actor, sweeps_at)
        except (CrashedError, StoreError):
            pass  # it may not even have come up
        except SchemaMismatch:
            if grown >= self.growth.latest:
                raise
            self.growth.refused += 1  # a newer program was faster
        finally:
            actor.wake()
        self.outcome.mistaken += sum(each.broken for each in fates)
        if self.processes == 1:  # what a process has queued for its own tablets, and its oracle, ends with it (C6)
            ends = [m.table == SYSTEM_TABLE or kind_of(m) == "one step" for m in self.late]
            self.late[:] = [mutation for mutation, end in zip(self.late, ends, strict=True) if not end]

    async def _refuse(self, db: Database) -> None:
        """It is an older program than one that has been there (N10)."""
        try:
            async with db.worker():
                self._problem("N10: an older program runs observers of which the store has a higher version")
        except SchemaMismatch:
            self.growth.refused += 1

    async def _work(self, db: Database, world: World, actor: _Actor, sweeps_at: float) -> None:
        rng = actor.rng
        backoff = BackoffOptions(first_s=0.01, max_s=0.1)
        # Without row locks several runs are for the same change: at most one of them may commit (N3).
        concurrency = rng.choice((2, 6)) if "napping" in self.kinds else 6
        failing = "failing" in self.kinds
        worker = WorkerOptions(
            concurrency=concurrency,
            scanners=concurrency // 2,
            backoff=backoff,
            row_locks=rng.random() < 0.5,
            attempts=2 if failing else 16,
            outputs=failing,
        )
        clients = -(-self._options.clients // self.processes)
        busy = [clients]
        stopping = False
        try:
            async with db.worker(options=worker) as handle, trio.open_nursery() as nursery:
                for i in range(clients):
                    nursery.start_soon(self._client, db, world, actor, f"{actor.name} c{i}", busy)
                nursery.start_soon(self._refresh, db, actor)
                if failing:
                    nursery.start_soon(self._tend, db, actor)
                if self.processes > 1:
                    nursery.start_soon(self._renew, db, actor)
                if self._vacuums:
                    nursery.start_soon(self._vacuum, db, actor)
                if sweeps_at:
                    nursery.start_soon(self._sweep_from, db, sweeps_at)
                before = 0
                while not actor.died.is_set() and not self._over(actor, busy):
                    if trio.current_time() > _TIME_MAX_S:
                        raise EndlessError(f"after {_TIME_MAX_S} s not everything has happened: {self.outcome}")
                    with trio.move_on_after(_TICK_S):
                        await actor.died.wait()
                    commits = sum(each.commits for each in handle.statistics().values())
                    self.outcome.runs += commits - before
                    before = commits
                stopping = True
                actor.wake()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            rest = group.split((CrashedError, trio.Cancelled))[1]
            if rest is not None or not (actor.died.is_set() or stopping):
                raise

    def _over(self, actor: _Actor, busy: list[int]) -> bool:
        if self.plan.replays:
            return not busy[0]
        wanted = "late" in self.kinds and not self._renewed and self.outcome.committed >= self._late_from
        wanted |= self.growth.wanted(self.outcome.committed)
        return self.outcome.enough(self._options) or (wanted and actor.name.startswith("p0."))

    async def _refresh(self, db: Database, actor: _Actor) -> None:
        """Keep locks fresh (L1); and find what others have left."""
        while True:
            await trio.sleep(REFRESH_S / 2)
            await actor.step()
            for mutation in db.driver.refreshes(db.oracle.wall_ms(), int(REFRESH_S * 500)):
                await actor.store.apply([mutation])
            if self.processes > 1:
                db.driver.notified()
                if actor.rng.random() < 0.2:
                    db.driver.orphaned.set()

    async def _renew(self, db: Database, actor: _Actor) -> None:
        """Keep the process's lease (L1); now and then it is lost."""
        assert isinstance(db.oracle, RemoteOracle)
        number = 0
        while True:
            number += 1
            rng = actor.rng
            chance = lambda: "LOST" if rng.random() < 0.03 else ""  # noqa: B023, E731
            if self.plan.choose(f"{actor.name}: lease of the process #{number}", chance, trio.current_time()):
                self.outcome.fired["renewal", "LOST"] += 1
                await trio.sleep(1.0)
            with contextlib.suppress(StoreError):
                await db.oracle.renew(db.lease_token)
            await trio.sleep(REFRESH_S)

    async def _tend(self, db: Database, actor: _Actor) -> None:
        """Replay and drop what observers have failed for (N6)."""
        while True:
            await trio.sleep(actor.rng.choice((0.02, 0.1)))
            try:
                await self._clients.tend(db, actor.rng)
            except (StoreError, TransientError, CommitUnknown):
                pass
            except PercoError:  # the background of a dead process has failed too
                if not actor.dead:
                    raise

    async def _sweep_from(self, db: Database, seconds: float) -> None:
        await trio.sleep(seconds)
        db.background.start(db.sweeper.run, "sweeper")

    async def _vacuum(self, db: Database, actor: _Actor) -> None:
        """Remove old versions again and again (G1 - G5)."""
        pauses_s = actor.rng.choice(((0.0, 0.01, 0.05), (0.01, 0.05, 0.2)))
        while True:
            await trio.sleep(actor.rng.choice(pauses_s))
            try:
                self.outcome.removed += (await db.vacuum()).removed.cells
            except StoreError:
                pass
            except PercoError:  # the background of a dead process has failed too
                if not actor.dead:
                    raise

    # ------------------------------------------------------------ coordinators, network

    def _enlist(self, name: str, life: int) -> tuple[_Actor, Coordinator]:
        """A new life of a coordinator."""
        actor = _Actor(self, f"{name}.{life}")
        self._jump(name, actor.name)
        rng = self.plan.random(actor.name, "coordinator")
        options = OracleOptions(range_size=rng.choice((40, 300)))
        coordinator = Coordinator(actor.name, actor.store, options, self._wall(name), rng)
        entry = actor, coordinator
        number = int(name[1:])
        self.coordinators[number : number + 1] = [entry]
        return entry

    async def _coordinate(self, number: int, name: str) -> None:
        """A coordinator, from one life to the next; it stands still now and then."""
        life = 0
        while True:
            actor, coordinator = self.coordinators[number]
            with contextlib.suppress(CrashedError):
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(coordinator.run)
                        nursery.start_soon(self._stand_still, actor)
                        await actor.died.wait()
                        nursery.cancel_scope.cancel()
                except BaseExceptionGroup as group:
                    if group.split((CrashedError, trio.Cancelled))[1] is not None:
                        raise
            await trio.sleep(self.plan.random(actor.name, "gone").choice((0.05, 0.3)))
            self.outcome.terms += coordinator.terms
            life += 1
            self._enlist(name, life)

    async def _stand_still(self, actor: _Actor) -> None:
        rng = self.plan.random(actor.name, "still")
        number = 0
        while True:
            await trio.sleep(0.15)
            number += 1
            chance = lambda: f"{PAUSE} {rng.choice((0.2, 0.6, 1.5))}" if rng.random() < 0.08 else ""  # noqa: E731
            still = self.plan.choose(f"{actor.name} stands still #{number}", chance, trio.current_time())
            if still:
                self.outcome.fired["coordinator", PAUSE] += 1
                actor.pause(float(still.split()[1]))

    async def _network(self, rng: random.Random) -> None:
        """Old messages arrive, of the living and of the dead."""
        while True:
            await trio.sleep(rng.choice((0.001, 0.01, 0.1)))
            if self.late:
                self.outcome.late += 1
                await self.machine.store.apply([self.late.pop(rng.randrange(len(self.late)))])

    # ------------------------------------------------------------ clients

    async def _client(self, db: Database, world: World, actor: _Actor, client: str, busy: list[int]) -> None:
        plan = self.plan
        left = iter(plan.numbers(f"txn {client} #")) if plan.replays else iter(range(1 << 30))
        for number in left:
            if actor.dead:
                break
            name = f"{client} #{number}"
            plan.choose(f"txn {name}", lambda: "begins", trio.current_time())
            rng = plan.random(name)
            _program.set(_Program(name, plan.noise(name)))
            await self._transaction(db, world, actor, name, rng)
            await trio.sleep(rng.choice((0.0, 0.001, 0.005)))
        await trio.sleep(1.0)  # what it has begun behind it may end
        busy[0] -= 1

    async def _transaction(self, db: Database, world: World, actor: _Actor, name: str, rng: random.Random) -> None:
        """One try, recorded. What a process did that died before it could tell is unknown."""
        ops, begin = Ops(), trio.current_time()
        if len(self._recorder.transactions) > _TRIES_MAX * self._options.commits:
            raise EndlessError("far too many transactions do not commit")
        began = _Noted(lambda start_ts: self._ran(start_ts, name))
        try:
            await self._clients.act(db, world, ops, rng, began)
        except (TransientError, StoreError, CommitUnknown, SnapshotTooOld, CrashedError):
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
        """Everything comes to rest, and is looked at."""
        for mutation in self.late:
            await self.machine.store.apply([mutation])
        world = self._world(late="late" in self.kinds, grown=self.growth.latest)
        self.outcome.grown, self.outcome.refused = self.growth.latest, self.growth.refused
        # A share of real time would make of each run another one.
        options = Options(wall=self._wall("the end"), seed=0, backfill=BackfillOptions(share=1.0))
        noise = self.plan.noise("the end")

        async def slowly() -> None:
            await trio.sleep(noise.choice((0.0, 0.01)))

        def prepare(db: Database) -> None:
            use(db, FaultyRowStore(db.driver.store, looking=slowly))  # N7: there is something to wait for

        async with self.machine.opened(options, sweeper=True, schema=world.schema, prepare=prepare) as db:
            async with db.worker(options=WorkerOptions(concurrency=6, scanners=2, outputs=False)):
                with trio.move_on_after(_HOUR_S) as scope:
                    await db.wait_idle()
                if scope.cancelled_caught:
                    self._problem("N7: the observers do not come to rest")
                if "failing" in self.kinds:
                    await self._end_failing(db)
            while not db.sweeper.clean:  # noqa: ASYNC110
                await trio.sleep(0.01)
            if self.machine.locks():
                self._problem(f"L1: {self.machine.locks()} locks are left")
            if self._vacuums:
                self.outcome.removed += (await db.vacuum()).removed.cells
            begin = trio.current_time()
            async with db.snapshot() as snap:
                lists = await self._clients.verify(snap, world)
            ops = [("r", key, value) for key, value in lists.items()]
            await trio.sleep(1.0)  # what ended at the same moment is before this in real time
            self._recorder.add("end", begin + 0.5, trio.current_time(), OK, ops)
            result = await check_store(self.machine.store, options=CheckOptions(pause_s=0.0))
            self.outcome.problems += [f"check: {finding}" for finding in result.findings]
        serializable = "serializable" in self.kinds
        report = check_history(self._recorder.transactions, serializable=serializable)
        self.outcome.problems += [f"{anomaly.name}: {anomaly.text}" for anomaly in report.anomalies]

    async def _end_failing(self, db: Database) -> None:
        """What is on the failed list is neither lost nor there twice; replayed, nothing fails any more (N6)."""
        result = await check_store(self.machine.store, options=CheckOptions(pause_s=0.0))
        self.outcome.problems += [f"check: {finding}" for finding in result.findings]
        if result.failed != await db.replay_failed():
            self._problem(f"N6: {result.failed} changes had failed, and not all were replayed")
        with trio.move_on_after(_HOUR_S) as scope:
            left = await db.wait_idle()
            if left:
                self._problem(f"N6: {left} changes have failed again")
        if scope.cancelled_caught:
            self._problem("N7: the observers do not come to rest once all has been replayed")


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """trio's scheduler chooses by the seed."""
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    state = scheduler._r.getstate()
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    scheduler._r.seed(seed)
    log = logging.getLogger("perco")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)  # observers that meet a full disk say so each time
    try:
        yield
    finally:
        log.setLevel(level)
        scheduler._r.setstate(state)
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]


def run_plan(plan: Plan, options: SimulationOptions | None = None) -> Outcome:
    """One run, in a trio loop of its own, in virtual time. Raises what no run may raise: an assertion, a bug."""
    with seeded(plan.seed + (plan.salt << 32)):
        simulation = Simulation(plan, options or SimulationOptions())
        clock = trio.testing.MockClock(autojump_threshold=0)
        _turning(clock, _LOOKS_MAX)
        return trio.run(simulation.run, clock=clock)


def simulate(seed: int, options: SimulationOptions | None = None) -> Outcome:
    """Run one seed. Raises as `run_plan`."""
    return run_plan(Plan(seed), options)
