"""The simulation of an embedded store: processes open one store in memory, one process after the other.

In each process, clients run the workloads of `workloads.py`, and a worker keeps derived data up to date. The network
between the process and the store (`faults.py`) delays, loses, repeats and reorders mutations, even after their sender
has died. Now and then the disk is full. A process may die before or after any mutation; then the next one starts.
Sometimes a live transaction is presumed dead, and other transactions break its locks.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any, Final

import trio

from perco.clock.oracle import Oracle, OracleOptions
from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.database.options import Options
from perco.errors import SchemaMismatch, StoreError
from perco.notify.backfill import BackfillOptions
from perco.protocol.records import Cellref, Lock
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import LocalRowStore, Mutation, RowStore
from perco.testing.bare import SingleRows
from perco.testing.faults import Fault, FaultyRowStore, kind_of, start_ts_of, use
from perco.testing.machine import CrashedError, Machine
from perco.testing.plan import Plan
from perco.testing.processes import EndlessError
from perco.testing.runs import TICK_S, TIME_MAX_S, Run, SimulationOptions, program
from perco.testing.world import World
from perco.txn.driver import CommitOptions, Driver
from perco.txn.fates import Fates
from perco.txn.prefetch import PrefetchOptions
from perco.txn.snapshot import Snapshot

_CALLS_MAX: Final = 200_000  # calls of the store in one run; a usual run makes a tenth as many
FAULTS: Final = tuple(
    fault.name for fault in (Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.DELAY, Fault.REPEAT, Fault.ECHO, Fault.FAIL)
)
_ONCE: Final = tuple(fault for fault in FAULTS if fault not in ("REPEAT", "ECHO"))
CRASHES: Final = ("CRASH_BEFORE", "CRASH_AFTER")
# The steps that are sent. (A step that only removes notify cells is rare, and has its own tests.)
STEPS: Final = (
    *("one step", "prewrite", "commit", "roll forward", "marker", "rollback", "bound", "clock"),
    *("catalogue", "notify", "vacuum", "give up", "replay"),
)
# The lowest rate of faults at these steps. (`_RARELY_DIES`: the rate at which their sender dies.)
_RARE: Final = {
    "roll forward": 0.3,
    "marker": 0.5,
    "rollback": 0.1,
    "bound": 0.05,
    "clock": 0.05,
    "catalogue": 0.15,
    "notify": 0.1,
    "vacuum": 0.05,
    "give up": 0.1,
    "replay": 0.1,
}
LATE_S: Final = 0.5  # how long a message to a bare store may be in flight, in seconds
_BARE_OFTEN: Final = 0.5  # the share of stores without groups that have no other capability either
_RARELY_DIES: Final = {
    "catalogue": 0.05,
    "notify": 0.02,
    "bound": 0.01,
    "clock": 0.01,
    "vacuum": 0.01,
    "roll forward": 0.02,
}


def faults_of(step: str) -> tuple[str, ...]:
    """The faults that can hit a step. A one-step commit has fewer: it is sent once, to a tablet of its own process
    (C6)."""
    if step == "one step":
        return (*_ONCE, *CRASHES)
    if step == "bound":  # the process's own oracle never gets the answer to an echo
        return (*(fault for fault in FAULTS if fault != "ECHO"), *CRASHES)
    return (*FAULTS, *CRASHES)


def _bounded(store: LocalRowStore, calls: int) -> None:
    """Make the store raise after this many calls. (A limit of time would not end a task that never sleeps: virtual time
    does not pass for it.)"""
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


class _Hasty(Fates):
    """Now and then presumes a live transaction dead, as happens when a lease expires. This is safe, and costs only time
    (L2)."""

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


_resolving: ContextVar[bool] = ContextVar("resolving", default=False)


def _step_of(mutation: Mutation) -> str:
    kind = kind_of(mutation)
    return "roll forward" if kind == "commit" and _resolving.get() else kind


def _tell_apart(driver: Driver) -> None:
    """Mark the mutations that this driver sends while it settles another transaction's lock."""
    right = driver.resolve

    async def resolve(cell: Cellref, start_ts: int, lock: Lock) -> int | None:
        before = _resolving.set(True)
        try:
            return await right(cell, start_ts, lock)
        finally:
            _resolving.reset(before)

    setattr(driver, "resolve", resolve)  # noqa: B010


class _Actor:
    """One life of a process: its pauses, its death, and the network between it and the store."""

    def __init__(self, run: Embedded, name: str) -> None:
        self.name, self._run = name, run
        plan = run.plan
        self.rng, self._chances, self._noise = plan.random(name), plan.random(name, "chances"), plan.noise(name)
        self.died = trio.Event()
        self.dies_at, self.dies_in = 1 << 40, ""
        self._sent = 0
        self._seen: Counter[str] = Counter()
        self._befalls: dict[int, str] = {}  # faults, by the identity of a mutation in flight
        rows = SingleRows(run.machine.store) if run.bare else run.machine.store
        store = FaultyRowStore(rows, self._fault, before=self._before, after=self._after)
        store.looking, store.shuffle, store.late = self.step, self._noise.shuffle, run.late
        self.store = store

    @property
    def dead(self) -> bool:
        return self.store.dead is not None

    def die(self) -> None:
        self.store.dead = CrashedError()
        self.died.set()

    async def step(self) -> None:
        """Let time pass; raise if the process is dead."""
        doing = program.get()
        rng = self._noise if doing is None else doing.delays
        if rng.random() < self._run.slow:
            await trio.sleep(rng.choice((0.0, 0.0, 0.001, 0.02)))
        if self.store.dead is not None:
            raise self.store.dead

    def name_of(self, kind: str, mutation: Mutation) -> str:
        """The name of a step: its process, its transaction, its row, and how often the process has made this step."""
        row = mutation.rows[0][0].decode(errors="replace")
        name = f"{self.name}: {kind}"
        if mutation.table != SYSTEM_TABLE:
            name = f"{name} of {self._run.owner_of(start_ts_of(mutation))} in {mutation.table} {row}"
        self._seen[name] += 1
        return f"{name} #{self._seen[name]}"

    def _chance(self, kind: str) -> str:
        """Draw the fault of a step; "": no fault."""
        rng, run = self._chances, self._run
        if (self._sent >= self.dies_at and self.dies_in in ("", kind)) or rng.random() < _RARELY_DIES.get(kind, 0.0):
            return rng.choice(CRASHES)
        rare = _RARE.get(kind, 0.0)
        if rng.random() >= max(run.rate, rare):
            return ""
        fault = rng.choice(_ONCE if kind == "one step" else FAULTS)
        # The process's own oracle never gets the answer to an echo, from which it would infer a second oracle (O1).
        return "LOSE_REPLY" if fault == "ECHO" and kind == "bound" else fault

    async def _before(self, mutation: Mutation) -> None:
        await self.step()
        self._sent += 1
        kind = _step_of(mutation)
        choice = self._run.plan.choose(self.name_of(kind, mutation), lambda: self._chance(kind), trio.current_time())
        if choice:
            self._run.outcome.fired[kind, choice] += 1
            if choice == "CRASH_BEFORE":
                self.die()
            else:
                self._befalls[id(mutation)] = choice

    def _fault(self, mutation: Mutation, _: int) -> Fault | None:
        what = self._befalls.get(id(mutation))
        if what is None or what == "CRASH_AFTER":
            return None
        self._run.sent[id(mutation)] = trio.current_time()
        return Fault[self._befalls.pop(id(mutation))]

    async def _after(self, mutation: Mutation) -> None:
        self._run.digest.update(repr(mutation).encode())
        if self._befalls.pop(id(mutation), "") == "CRASH_AFTER":
            self.die()


class Embedded(Run):
    """One run of an embedded store."""

    machine: Machine
    bare: bool

    def __init__(self, plan: Plan, options: SimulationOptions) -> None:
        super().__init__(plan, options)
        self.bare = not self.groups and plan.random("bare").random() < _BARE_OFTEN
        self.machine = Machine(self._world(late=False).schema, groups=self.groups, bare_s=LATE_S if self.bare else None)
        _bounded(self.machine.store, _CALLS_MAX)
        self.late: list[Mutation] = []  # late messages, which may arrive at any time
        self.sent: dict[int, float] = {}  # when messages with a fault were sent, by their identity

    async def _processes(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._network, self.plan.noise("network"))
            for life in self._lives("p0"):
                name = f"p0.{life}"
                begins = self.plan.choose(f"life {name}", self._begins, trio.current_time())
                await self._live("p0", name, late=begins == "late")
            nursery.cancel_scope.cancel()
        while self.late:
            await self._deliver(self.late.pop(0))

    @contextlib.asynccontextmanager
    async def _last(self, world: World, options: Options) -> AsyncIterator[tuple[Database, RowStore]]:
        async with self.machine.opened(options, sweeper=True, schema=world.schema) as db:
            yield db, self.machine.store

    async def _verify(self, snap: Snapshot, world: World) -> None:
        await trio.lowlevel.checkpoint()

    def _locks(self) -> int:
        return self.machine.locks()

    async def _live(self, process: str, name: str, *, late: bool) -> None:
        """Run a process from its start to its death."""
        self.outcome.lives += 1
        self._jump(process, name)
        actor = _Actor(self, name)
        rng = actor.rng
        actor.dies_at, actor.dies_in = rng.randint(5, 600), rng.choice((*STEPS[:5], ""))  # "": in any step
        registered = self.growth.registered
        naps = self.plan.noise(name, "naps") if "napping" in self.kinds else None
        failures = self.plan.noise(name, "failures") if "failing" in self.kinds else None
        grown = self.growth.of(name, self.outcome.committed, trio.current_time())
        world = self._world(late=late, naps=naps, failures=failures, grown=grown)
        self._renewed |= late
        # A vacuum may be the first to encounter the locks that earlier processes have left (G2).
        sweeps_at = rng.choice((0.0, 0.05, 0.2)) if self._vacuums else 0.0
        ahead = "mirrored" in self.kinds and rng.random() < 0.8
        options = Options(
            wall=self._wall(process),
            seed=rng.getrandbits(32),
            oracle=OracleOptions(range_size=rng.choice((40, 300, 3000)), note_period_s=0.1),
            commit=CommitOptions(one_step=rng.random() < 0.6),
            prefetch=PrefetchOptions(cache=ahead, predict=ahead),
            backfill=BackfillOptions(share=1.0, page_rows=8),
        )
        fates = _Hasty(self.plan.noise(name, "hasty"), self._hasty)

        def prepare(db: Database) -> None:
            _tell_apart(inside(db).driver)
            if not self.bare:  # else everything goes through `actor.store` from the beginning
                use(db, actor.store)
                inside(db).engine.oracle = inside(db).driver.oracle = Oracle(actor.store, options.oracle, options.wall)
            inside(db).engine.fates = inside(db).driver.fates = fates

        try:
            opened = self.machine.opened(
                options,
                sweeper=not sweeps_at,
                schema=world.schema,
                prepare=prepare,
                below=actor.store if self.bare else None,
            )
            async with opened as db:
                if self.growth.has_gone_back(registered, inside(db).catalogue):
                    self._problem(f"N10: the catalogue went back: version {registered} had been registered")
                if self.growth.is_older(grown, inside(db).catalogue):
                    self._is_left_alone(db)
                    return
                self.growth.registered = max(self.growth.registered, grown)
                await self._work(db, world, actor, sweeps_at)
        except (CrashedError, StoreError):
            pass  # the process may have died while it opened the store
        except SchemaMismatch:
            if grown >= self.growth.latest:
                raise
            self.growth.refused += 1  # a newer program has opened the store before
        self.outcome.mistaken += fates.broken
        if self.bare:
            return
        # When a process dies, everything that it or its oracle has queued for its own tablets is lost (C6).
        ends = [m.table == SYSTEM_TABLE or kind_of(m) == "one step" for m in self.late]
        self.late[:] = [mutation for mutation, end in zip(self.late, ends, strict=True) if not end]

    async def _work(self, db: Database, world: World, actor: _Actor, sweeps_at: float) -> None:
        worker = self._worker_options(actor.rng)
        clients = self._options.clients
        busy = [clients]
        stopping = False
        try:
            async with db.worker(options=worker) as handle, trio.open_nursery() as nursery:
                for i in range(clients):
                    nursery.start_soon(self._client, db, world, actor, f"{actor.name} c{i}", busy)
                if "failing" in self.kinds:
                    nursery.start_soon(self._tend, db, actor)
                if self._vacuums:
                    nursery.start_soon(self._vacuum, db, actor)
                if sweeps_at:
                    nursery.start_soon(self._sweep_from, db, sweeps_at)
                inside(db).background.start(local_owner(db).note_time, "clock")
                before = 0, 0
                while not actor.died.is_set() and not self._over(actor, busy):
                    if trio.current_time() > TIME_MAX_S:
                        raise EndlessError(f"after {TIME_MAX_S} s not everything has happened: {self.outcome}")
                    with trio.move_on_after(TICK_S):
                        await actor.died.wait()
                    before = self._count_runs(handle, before)
                stopping = True
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            rest = group.split((CrashedError, trio.Cancelled))[1]
            if rest is not None or not (actor.died.is_set() or stopping):
                raise

    async def _sweep_from(self, db: Database, seconds: float) -> None:
        await trio.sleep(seconds)
        inside(db).background.start(local_owner(db).sweeper.run, "sweeper")

    async def _network(self, rng: random.Random) -> None:
        """Deliver the late messages of live and dead processes."""
        while True:
            await trio.sleep(rng.choice((0.001, 0.01, 0.1)))
            if self.late:
                await self._deliver(self.late.pop(rng.randrange(len(self.late))))

    async def _deliver(self, mutation: Mutation) -> None:
        """Deliver a late message. A message to a bare store is lost if it has been in flight for too long."""
        if self.bare and trio.current_time() >= self.sent[id(mutation)] + LATE_S:
            return
        self.outcome.late += 1
        await self.machine.store.apply([mutation])
