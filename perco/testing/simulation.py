"""A store, its clients and observers, and all that can go wrong, from one seed: the same seed is the same run.

Processes open one memory store, one after the other. In each, clients append to lists, readers take snapshots, and a
worker keeps what is derived from the lists up to date, through a chain of observers and two that share a column.
Between them and the store lies a network (`faults.py`) that delays, loses, repeats and reorders, also beyond the death
of the sender; the disk is full now and then; the wall clock jumps; a process dies before or after any mutation. At the
end the last process comes up with nothing going wrong, and then

    no lock is left, and `check` finds nothing                           (T1 - T8, N1, N2)
    all that the clients saw and did is snapshot isolation               (T2, T9, T11)
    what is derived is what the lists say, and nobody waits any more     (N1, N3, N7, N11)
    every observer committed at most once per change                     (N3)
    as many faults fired as a run has to have, or the run counts as failed

The clock is virtual and trio's choice of the next task is seeded, so a run takes no longer than it computes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import trio
import trio.testing
from trio._core import _run as scheduler

from perco.errors import CommitUnknown, PercoError, StoreError, TransientError
from perco.notify.backoff import BackoffOptions
from perco.notify.database import Database
from perco.notify.worker import WorkerOptions
from perco.storage import LocalRowStore, Mutation
from perco.testing.faults import Fault, FaultyRowStore, kind_of, use
from perco.testing.history import FAIL, OK, UNKNOWN, Ops, record
from perco.testing.isolation import check as check_history
from perco.testing.machine import CrashedError, Machine
from perco.txn.check import CheckOptions, check as check_store
from perco.txn.client import Options
from perco.txn.codecs import INT64, MSGPACK, TEXT
from perco.txn.driver import CommitOptions
from perco.txn.fates import Fates
from perco.txn.schema import Change, Column, Schema, Table
from perco.txn.transaction import Transaction

_WALL: Final = 1_700_000_000.0
_LIVES_MAX: Final = 60  # a run that has not had its share of everything by then is a failure
_CALLS_MAX: Final = 100_000  # of the store, in one run; a usual one makes a tenth of that
_TRIES_MAX: Final = 50  # transactions for each commit that a run has to have
_HOUR_S: Final = 3600.0
FAULTS: Final = (Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.DELAY, Fault.REPEAT, Fault.ECHO, Fault.FAIL)
_ONCE: Final = tuple(fault for fault in FAULTS if fault not in (Fault.REPEAT, Fault.ECHO))
CRASHES: Final = ("CRASH_BEFORE", "CRASH_AFTER")
# What is sent. (Removing notify cells by itself comes only after more than 512 changes of one cell: it has own tests.)
STEPS: Final = ("one step", "prewrite", "commit", "marker", "rollback")
_RARE: Final = {"marker": 0.5, "rollback": 0.1}  # how often at least these meet a fault, or are the process's last


def faults_of(step: str) -> Sequence[Fault]:
    """What can befall a step: a commit in one step is handed to a tablet of the same process, once (C6)."""
    return _ONCE if step == "one step" else FAULTS


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationOptions:
    """What a run has to have had before it may end.

    Attributes:
        clients, keys: how many append at once, and to how many lists.
        commits, runs: committed transactions of clients, and observer runs.
        faults, kinds: faults that fired, and of how many kinds.
    """

    clients: int = 5
    keys: int = 6
    commits: int = 200
    runs: int = 20
    faults: int = 5
    kinds: int = 3


@dataclass(slots=True)
class Outcome:
    """What happened under a seed.

    `mistaken`: how often the living were taken for dead; `fired`: faults by (step, fault); `problems`: what is wrong,
    [] if nothing is; `digest`: of all that was sent and seen, for comparing two runs.
    """

    seed: int
    committed: int = 0
    failed: int = 0
    unknown: int = 0
    runs: int = 0
    lives: int = 0
    jumps: int = 0
    mistaken: int = 0
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


class _Hasty(Fates):
    """Takes the living for dead now and then, as others do when a lease runs out: safe, only slow (L2)."""

    __slots__ = ("_rate", "_rng", "mistaken")

    exact = False

    def __init__(self, rng: random.Random, rate: float) -> None:
        super().__init__()
        self._rng, self._rate = rng, rate
        self.mistaken = 0

    def alive(self, start_ts: int) -> bool:
        if super().alive(start_ts) and self._rng.random() < self._rate:
            self.mistaken += 1
            return False
        return super().alive(start_ts)


class World:
    """The schema: lists, and what observers derive of them."""

    def __init__(self, keys: int) -> None:
        self.keys = [f"k{i}" for i in range(keys)]
        lists = Table("lists", key=TEXT, splits=[self.keys[keys // 3], self.keys[2 * keys // 3]])
        derived = Table("derived", key=TEXT, splits=[self.keys[keys // 2]])
        self.values: Column[str, Any] = lists.column("values", MSGPACK)
        self.length = derived.column("length", INT64)
        self.twice = derived.column("twice", INT64)
        self.last = lists.column("last", INT64)
        self.handled = derived.column("handled", MSGPACK)  # the changes that committed runs of one observer were for
        self.schema = Schema(lists, derived)
        self.schema.observe(self.values, id="length")(self._length)
        self.schema.observe(self.values, id="last")(self._last)
        self.schema.observe(self.length, id="twice")(self._twice)

    async def _length(self, txn: Transaction, change: Change[str, Any]) -> None:
        txn.set(self.length, change.key, len(change.value or []))
        txn.set(self.handled, change.key, [*(await txn.get(self.handled, change.key) or ()), change.commit_ts])

    async def _last(self, txn: Transaction, change: Change[str, Any]) -> None:
        seen = await txn.get(self.values, change.key) or [0]
        txn.set(self.last, change.key, seen[-1])

    async def _twice(self, txn: Transaction, change: Change[str, int]) -> None:
        txn.set(self.twice, change.key, 2 * (await txn.get(self.length, change.key) or 0))


class Simulation:
    """One run."""

    def __init__(self, seed: int, options: SimulationOptions) -> None:
        self._options = options
        self._rng = random.Random(f"simulation {seed}")
        self.outcome = Outcome(seed)
        self.world = World(options.keys)
        self.machine = Machine(self.world.schema, groups=self._rng.random() < 0.7)
        _bounded(self.machine.store, _CALLS_MAX)
        self._rate = self._rng.choice((0.004, 0.01, 0.03, 0.08))  # faults per mutation
        self._hasty = self._rng.choice((0.0, 0.05, 0.5))  # how often the living are taken for dead
        self._slow = self._rng.choice((0.0, 0.2, 0.6))  # messages that take their time
        self._late: list[Mutation] = []  # messages that arrive when they like
        self._ahead = 0.0  # of the wall clock
        self._count = 0
        self._digest = hashlib.sha256()

    async def run(self) -> Outcome:
        with record() as self._recorder:
            while not self.outcome.enough(self._options):
                if self.outcome.lives >= _LIVES_MAX:
                    self._problem(f"after {_LIVES_MAX} lives not everything has happened: {self.outcome}")
                    break
                await self._live()
            await self._end()
        for one in self._recorder.transactions:
            self._digest.update(one.line().encode())
        self.outcome.digest = self._digest.hexdigest()
        return self.outcome

    def _problem(self, text: str) -> None:
        self.outcome.problems.append(text)

    # ------------------------------------------------------------ a process

    def _open(self) -> contextlib.AbstractAsyncContextManager[Database]:
        options = Options(
            wall=lambda: _WALL + trio.current_time() + self._ahead,
            seed=self._rng.getrandbits(32),
            commit=CommitOptions(one_step=self._rng.random() < 0.6),
        )
        return self.machine.opened(options, sweeper=True)

    async def _live(self) -> None:
        """A process from its start to its death."""
        self.outcome.lives += 1
        rng = self._rng
        dies_at, made = rng.randint(5, 600), rng.random() < 0.5
        if rng.random() < 0.3:
            self._ahead += rng.choice((-_HOUR_S, _HOUR_S, 0.5))
            self.outcome.jumps += 1
        dies_in = rng.choice((*STEPS, None))  # or else wherever it is by then
        async with self._open() as db:
            died = trio.Event()
            store = FaultyRowStore(db.driver.store, self._plan, looking=self._wait)

            async def before(mutation: Mutation) -> None:
                await self._wait()
                if not made and due(mutation):
                    die(mutation, "CRASH_BEFORE")

            async def after(mutation: Mutation) -> None:
                self._digest.update(repr(mutation).encode())
                if made and due(mutation):
                    die(mutation, "CRASH_AFTER")

            def due(mutation: Mutation) -> bool:
                return len(store.log) >= dies_at and dies_in in (None, kind_of(mutation))

            def die(mutation: Mutation, how: str) -> None:
                if store.dead is None:
                    store.dead = CrashedError()
                    self.outcome.fired[kind_of(mutation), how] += 1
                    died.set()

            store.before, store.after, store.shuffle = before, after, rng.shuffle
            store.late = self._late
            use(db, store)
            fates = db.fates = db.driver.fates = _Hasty(random.Random(rng.getrandbits(64)), self._hasty)
            with contextlib.suppress(CrashedError):
                await self._work(db, store, died)
        self.outcome.mistaken += fates.mistaken
        # What a process has queued for its own tablets ends with it (C6).
        self._late[:] = [mutation for mutation in self._late if kind_of(mutation) != "one step"]

    def _plan(self, mutation: Mutation, _: int) -> Fault | None:
        kind = kind_of(mutation)
        if self._rng.random() >= max(self._rate, _RARE.get(kind, 0.0)):
            return None
        fault = self._rng.choice(faults_of(kind))
        self.outcome.fired[kind, fault.name] += 1
        return fault

    async def _wait(self) -> None:
        if self._rng.random() < self._slow:
            await trio.sleep(self._rng.choice((0.0, 0.0, 0.001, 0.02)))

    async def _work(self, db: Database, store: FaultyRowStore, died: trio.Event) -> None:
        backoff = BackoffOptions(first_s=0.01, max_s=0.1)
        # Without row locks several runs are for the same change: at most one of them may commit (N3).
        row_locks = self._rng.random() < 0.5
        worker = WorkerOptions(concurrency=6, scanners=3, backoff=backoff, row_locks=row_locks)
        stopping = False
        try:
            async with db.worker(options=worker) as handle, trio.open_nursery() as nursery:
                for i in range(self._options.clients):
                    nursery.start_soon(self._client, db, store, f"c{i}", random.Random(self._rng.getrandbits(64)))
                nursery.start_soon(self._network, random.Random(self._rng.getrandbits(64)))
                before = 0
                while not died.is_set() and not self.outcome.enough(self._options):
                    with trio.move_on_after(0.05):
                        await died.wait()
                    commits = sum(each.commits for each in handle.statistics().values())
                    self.outcome.runs += commits - before
                    before = commits
                stopping = True
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            rest = group.split((CrashedError, trio.Cancelled))[1]
            if rest is not None or not (died.is_set() or stopping):
                raise

    async def _network(self, rng: random.Random) -> None:
        """Old messages arrive, of this process and of dead ones."""
        while True:
            await trio.sleep(rng.choice((0.001, 0.01, 0.1)))
            if self._late:
                await self.machine.store.apply([self._late.pop(rng.randrange(len(self._late)))])

    # ------------------------------------------------------------ what clients do

    async def _client(self, db: Database, store: FaultyRowStore, name: str, rng: random.Random) -> None:
        while store.dead is None:
            await self._transaction(db, store, name, rng)
            await trio.sleep(rng.choice((0.0, 0.001, 0.005)))

    async def _transaction(self, db: Database, store: FaultyRowStore, name: str, rng: random.Random) -> None:
        """One try, recorded. What a process did that died before it could tell is unknown."""
        ops, begin = Ops(), trio.current_time()
        if len(self._recorder.transactions) > _TRIES_MAX * self._options.commits:
            raise EndlessError("far too many transactions do not commit")
        txn: Transaction | None = None
        try:
            async with db.transaction() as txn:
                if rng.random() < 0.3:
                    await self._read(txn, ops, rng)
                else:
                    await self._append(txn, ops, rng)
        except (TransientError, StoreError, CommitUnknown, CrashedError):
            pass
        except PercoError:  # the background of a dead process has failed too
            if store.dead is None:
                raise
        finally:
            status = FAIL
            if txn is not None:
                status = {"committed": OK, "unknown": UNKNOWN}.get(txn.outcome, FAIL)
                if store.dead is not None and status == FAIL and txn.token:
                    status = UNKNOWN
            self._recorder.add(name, begin, trio.current_time(), status, ops.made)
            self.outcome.committed += status == OK
            self.outcome.failed += status == FAIL
            self.outcome.unknown += status == UNKNOWN

    async def _read(self, txn: Transaction, ops: Ops, rng: random.Random) -> None:
        values = self.world.values
        if rng.random() < 0.5:
            found = {row.key: row[values] async for row in txn.scan(values.table, columns=[values])}
        else:
            found = await txn.get_many(values, self.world.keys)
        for key in self.world.keys:
            ops.read(key, found.get(key) or [])

    async def _append(self, txn: Transaction, ops: Ops, rng: random.Random) -> None:
        values = self.world.values
        for key in rng.sample(self.world.keys, rng.randint(1, 3)):
            seen = await txn.get(values, key) or []
            ops.read(key, seen)
            if rng.random() < 0.7:
                self._count += 1
                ops.append(key, self._count)
                txn.set(values, key, [*seen, self._count])
            if rng.random() < 0.2:
                await trio.sleep(rng.choice((0.0, 0.003)))

    # ------------------------------------------------------------ the end

    async def _end(self) -> None:
        """Everything comes to rest, and is looked at."""
        world = self.world
        for mutation in self._late:
            await self.machine.store.apply([mutation])
        async with self._open() as db:
            async with db.worker(options=WorkerOptions(concurrency=6, scanners=2)):
                with trio.move_on_after(_HOUR_S) as scope:
                    await db.wait_idle()
                if scope.cancelled_caught:
                    self._problem("N7: the observers do not come to rest")
            while not db.sweeper.clean:
                await trio.testing.wait_all_tasks_blocked()
            if self.machine.locks():
                self._problem(f"L1: {self.machine.locks()} locks are left")
            begin = trio.current_time()
            derivatives: tuple[Column[str, Any], ...] = (world.length, world.twice, world.last)
            async with db.snapshot() as snap:
                found = await snap.get_many(world.values, world.keys)
                lists = {key: list(value or ()) for key, value in found.items()}
                for key, value in lists.items():
                    derived = [await snap.get(column, key) for column in derivatives]
                    wanted: list[int | None] = [len(value), 2 * len(value), value[-1]] if value else [None] * 3
                    handled = await snap.get(world.handled, key) or ()
                    if len(set(handled)) != len(handled):
                        self._problem(f"N3: an observer committed twice for one change of {key}: {handled}")
                    if derived != wanted:
                        self._problem(f"N1: {key} has {len(value)} values; derived are {derived}, not {wanted}")
            ops = [("r", key, value) for key, value in lists.items()]
            await trio.sleep(1.0)  # what ended at the same moment is before this in real time
            self._recorder.add("end", begin + 0.5, trio.current_time(), OK, ops)
            result = await check_store(self.machine.store, options=CheckOptions(pause_s=0.0))
            self.outcome.problems += [f"check: {finding}" for finding in result.findings]
        report = check_history(self._recorder.transactions)
        self.outcome.problems += [f"{anomaly.name}: {anomaly.text}" for anomaly in report.anomalies]


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


def simulate(seed: int, options: SimulationOptions | None = None) -> Outcome:
    """Run one seed, in a trio loop of its own, in virtual time."""
    with seeded(seed):
        simulation = Simulation(seed, options or SimulationOptions())
        return trio.run(simulation.run, clock=trio.testing.MockClock(autojump_threshold=0))
