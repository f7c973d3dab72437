"""A crash sweep: every fault hits every step of a scenario, alone and in pairs. The store must be whole afterwards.

A *scenario* says what the first process does, what every later process does, and what must hold at the end. A *step* is
a mutation of any process. Steps are numbered across processes, so a *schedule* (a few faults, each at a step) can be
replayed exactly. A run without faults shows which steps there are. A run with one fault shows the steps that a second
fault can hit.

    CRASH_BEFORE, CRASH_AFTER   the process dies before or after the mutation is made; another process recovers
    LOSE_REQUEST, LOSE_REPLY    the process gets no reply, and does not know whether the mutation was made
    PAUSE_BEFORE, PAUSE_AFTER   the process is paused; another process takes it for dead, recovers and goes on; then the
                                paused process wakes up
    REPEAT                      the mutation is made, and made once more before a later step, or after everything
    DELAY                       the mutation is taken for lost, and arrives before a later step, or after everything

For REPEAT and DELAY, there is one fault for each moment of arrival that makes a difference. Two moments, before a step
and before the next step, differ if the step reads something that the mutation writes, or writes something that the
mutation writes or checks (`Watched`). A late mutation may also arrive after its process has died; this takes a pair of
faults.

In a scenario with `one_step` or `vacuums`, a process has the store to itself, as one-step commits and vacuums require.
No other process presumes it dead while it is alive (C2), so it is never paused. A one-step commit goes to tablets of
its own process, once. If it is late, it is made at the latest when its process closes the store; if its process dies
before that, it is lost (C6). With `vacuums`, writes of the oracle's bound, of the published watermark and of pins are
steps, too, and are lost in the same way. The write floors of tablets end with their process.

At the end, no lock may be left, `check` must be clean, no timestamp may have been handed out twice (O1), and `verify`
must pass.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

import trio
import trio.testing

from perco.check.check import CheckOptions, check
from perco.clock.timestamps import Timestamps
from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.database.options import Options
from perco.errors import BackgroundFailure
from perco.notify.backfill import BackfillOptions
from perco.notify.options import WorkerOptions
from perco.schema.catalogue import SYSTEM_TABLE
from perco.schema.schema import Schema
from perco.storage import (
    LocalRowStore,
    Mutation,
    NoReply,
    ReadRequest,
    RowCells,
    RowStore,
    ScanPage,
    ScanRequest,
    Verdict,
)
from perco.storage.call import Call
from perco.storage.tablet import Tablet
from perco.testing.bare import SingleRows
from perco.testing.faults import FaultyRowStore, kind_of, use
from perco.testing.machine import CrashedError, Machine
from perco.testing.schedules import END, LATE, ONE_STEP, Fault, Kind, Schedule, Step
from perco.testing.simulation import seeded

_WALL: Final = 1_700_000_000.0
LATE_S: Final = 60.0  # how long a message to a bare store may be in flight, in seconds
_HOUR_S: Final = 3600.0  # virtual time; a run that has not ended by then never ends
_STEPS_MAX: Final = 1000  # in one run; a usual run makes a few dozen


class Scenario:
    """A scenario to sweep. Each run has an object of its own, which may store the replies that processes got.

    Attributes: `name`; `groups`, whether the store has groups (S1); `bare`, whether it has no optional capability
    (`bare.py`); `one_step`, whether processes commit in one step where they can; `vacuums`, whether they remove old
    versions; `backwards`, whether mutations that are sent together arrive in reverse order; `before`, the schema for
    `prepare`, if that is the schema of an older program.
    """

    name: ClassVar[str] = ""
    groups: ClassVar[bool] = True
    bare: ClassVar[bool] = False
    one_step: ClassVar[bool] = False
    vacuums: ClassVar[bool] = False
    backwards: ClassVar[bool] = False
    schema: Schema
    before: Schema | None = None

    async def prepare(self, db: Database) -> None:
        """Write the initial data, without faults. The default: nothing."""

    async def first(self, db: Database) -> None:
        """Do the work under test, in the first process."""
        raise NotImplementedError

    async def meet(self, db: Database) -> None:
        """Do the work of each later process, before anything has settled the locks that the first process left. The
        default: nothing."""

    async def later(self, db: Database) -> None:
        """Do the rest of that work, after everything has been settled and observed. The default: nothing."""

    async def verify(self, db: Database) -> None:
        """Assert what must hold at the end, when no more faults occur."""
        raise NotImplementedError


def bare(make: type[Scenario]) -> type[Scenario]:
    """The scenario on a store without any optional capability."""
    more = {"name": f"{make.name}, bare", "bare": True, "groups": False, "one_step": False}
    return type(f"Bare{make.__name__}", (make,), more)


async def observe(db: Database) -> None:
    """Run the schema's observers until no change waits for them and no lock is left."""
    options = WorkerOptions(concurrency=2, scanners=1, outputs=False)
    if db.schema.observers:
        async with db.worker(options=options):
            await db.wait_idle(timeout=_HOUR_S)
    while not local_owner(db).sweeper.clean:  # noqa: ASYNC110
        await trio.sleep(0.5)


@dataclass(slots=True)
class Result:
    """The result of one run: the steps that were made, the faults that fired, and what was wrong at the end; `moments`:
    for the step of each late fault that arrived after everything, the later steps before which an arrival would have
    made a difference."""

    schedule: Schedule
    alone: bool = False
    steps: list[Step] = field(default_factory=list)
    fired: list[Fault] = field(default_factory=list)
    problem: str = ""
    moments: dict[int, list[int]] = field(default_factory=dict)


class Watched:
    """A late mutation that has not arrived yet. It commutes with steps and reads that do not touch what it touches: it
    makes no difference whether it arrives before or after them."""

    has_floor: bool

    def __init__(self, mutation: Mutation) -> None:
        self._table = mutation.table
        self.has_floor = mutation.floor_ts is not None
        self._checks = {row: {(check[1], check[2]) for check in checks} for row, checks, _ in mutation.rows}
        self._writes = {row: {(write[0], write[1]) for write in writes} for row, _, writes in mutation.rows}

    def read_by(self, request: ReadRequest) -> bool:
        table, row, queries = request
        writes = self._writes.get(row, ()) if table == self._table else ()
        return any((query[0], query[1]) in writes for query in queries)

    def scanned_by(self, request: ScanRequest) -> bool:
        if request.table != self._table:
            return False
        groups = {query.group for query in request.queries}
        return any(
            request.start <= row and (request.stop is None or row < request.stop) and group in groups
            for row, writes in self._writes.items()
            for group, _ in writes
        )

    def counted_by(self, group: str) -> bool:
        return any(group == written for writes in self._writes.values() for written, _ in writes)

    def met_by(self, mutation: Mutation) -> bool:
        """Whether one of the two checks or writes what the other one writes."""
        if mutation.table != self._table:
            return False
        for row, checks, writes in mutation.rows:
            mine = self._writes.get(row, set())
            if any((check[1], check[2]) in mine for check in checks):
                return True
            mine = mine | self._checks.get(row, set())
            if any((write[0], write[1]) in mine for write in writes):
                return True
        return False


class _Noting(Timestamps):
    """Notes the timestamps that any process hands out."""

    __slots__ = ("_noted",)

    def __init__(self, bound: int, noted: list[int]) -> None:
        super().__init__(bound)
        self._noted = noted

    def draw(self) -> int:
        ts = super().draw()
        if ts:
            assert not self._noted or ts > self._noted[-1], f"O1: {ts} comes after {self._noted[-1]}"
            self._noted.append(ts)
        return ts


class _Store(FaultyRowStore):
    """The store as a process sees it."""

    def __init__(self, store: RowStore, process: _Process) -> None:
        super().__init__(store, looking=process.awake)
        self._process = process
        scenario = process.run.scenario
        self.opening = scenario.bare  # mutations sent while the store is being opened are not steps
        self._swept_system = not scenario.bare or scenario.vacuums  # else no fault hits the oracle
        if scenario.backwards:
            self.shuffle = list.reverse

    async def _apply(self, mutation: Mutation) -> Verdict:
        process = self._process
        if self.opening or (mutation.table == SYSTEM_TABLE and not self._swept_system):
            return await self._make(mutation)
        await process.awake()
        self._alive()
        fault = await process.run.step(process, mutation)
        match fault.kind if fault is not None else None:
            case None:
                return await self._make(mutation)
            case Kind.CRASH_BEFORE:
                process.die()
                self._alive()
            case Kind.CRASH_AFTER:
                await self._make(mutation)
                process.die()
                self._alive()
            case Kind.PAUSE_BEFORE:
                await process.pause()
                self._alive()
                return await self._make(mutation)
            case Kind.PAUSE_AFTER:
                verdict = await self._make(mutation)
                await process.pause()
                self._alive()
                return verdict
            case Kind.LOSE_REPLY:
                await self._make(mutation)
            case Kind.REPEAT:
                return await self._make(mutation)
        return NoReply(str(fault))


class _Process:
    """A process, from the moment when it opens the store until it ends or dies. Meanwhile it may be paused."""

    run: Run
    number: int
    ended: trio.Event
    stopped: trio.Event
    died: bool

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.died = False
        self.stopped = trio.Event()  # it has died, ended, or been paused: the next process may start
        self.ended = trio.Event()
        self._awake = trio.Event()
        self._awake.set()
        self._scope = trio.CancelScope()
        self._store: _Store | None = None
        self.db: Database | None = None

    async def live(self) -> None:
        run = self.run
        if run.scenario.bare:
            self._store = _Store(SingleRows(run.machine.store), self)
        try:
            async with run.opened(self.number, self._store) as db:
                self.db = db
                if self._store is not None:
                    self._store.opening = False
                    inside(db).oracle._store = inside(db).oracle.pins._store = local_owner(db).store
                else:
                    self._store = _Store(inside(db).driver.store, self)
                    use(db, self._store)
                    if run.scenario.vacuums:
                        inside(db).oracle._store = inside(db).oracle.pins._store = self._store
                try:
                    with self._scope:
                        await _work(run.scenario, db, first=self.number == 0)
                except* CrashedError:
                    assert self.died
                except* BackgroundFailure as failures:  # the process's background died first
                    if not self.died or not all(_only_crashed(each.__cause__) for each in failures.exceptions):
                        raise
            failure = inside(db).background.failure()
            if failure is not None and not (self.died and _only_crashed(failure.__cause__)):
                raise failure
        finally:
            self.ended.set()
            self.stopped.set()

    @property
    def paused(self) -> bool:
        return not self._awake.is_set()

    async def awake(self) -> None:
        if self.paused:
            await self._wait()
        else:
            await trio.lowlevel.checkpoint()

    async def pause(self) -> None:
        """Pause the process until it is woken or dies. Meanwhile, all calls of its tasks to the store wait. Two tasks
        may pause the process at once, and it may die in one task while another pauses it."""
        if self.died:
            return
        if not self.paused:
            self._awake = trio.Event()
        self.stopped.set()
        with trio.CancelScope(shield=True):
            await self._wait()

    async def _wait(self) -> None:
        with trio.move_on_after(_HOUR_S):  # else the wait, which is shielded, would last forever without a wake-up
            await self._awake.wait()
            return
        self.run.result.problem = f"process {self.number} stands still, and nobody woke it"
        raise AssertionError(self.run.result.problem)

    async def wake(self) -> None:
        """Wake the process, and wait until it has ended or is paused again."""
        if not self.ended.is_set():
            self.stopped = trio.Event()
            self._awake.set()
            await self.stopped.wait()

    def die(self) -> None:
        assert self._store is not None
        self.died = True
        self._store.dead = CrashedError()
        self._scope.cancel()
        self._awake.set()
        self.stopped.set()


def _only_crashed(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.split(CrashedError)[1] is None
    return isinstance(error, CrashedError)


async def _work(scenario: Scenario, db: Database, *, first: bool) -> None:
    if not first:
        await scenario.meet(db)
    inside(db).background.start(local_owner(db).sweeper.run, "sweeper")
    if first:
        await scenario.first(db)
        return
    await observe(db)
    await scenario.later(db)
    await observe(db)


class _Late(NamedTuple):
    sent: float
    arrives: int
    process: _Process
    mutation: Mutation
    step: int


class Run:
    """One run of a scenario under a schedule."""

    result: Result
    machine: Machine

    def __init__(self, scenario: Scenario, schedule: Schedule) -> None:
        self.scenario = scenario
        self.result = Result(schedule, scenario.one_step or scenario.vacuums)
        self.machine = Machine(
            scenario.schema,
            groups=scenario.groups,
            one_step=scenario.one_step,
            bare_s=LATE_S if scenario.bare else None,
        )
        self._faults = {fault.step: fault for fault in schedule}
        self._late: list[_Late] = []
        self._handed_out: list[int] = []
        self._standing: list[_Process] = []
        self._watched: dict[int, Watched] = {}  # by step, the late mutations that arrive after everything
        self._noted: set[Tablet] = set()
        self._note_touches(self.machine.store)

    def _note_touches(self, store: LocalRowStore) -> None:
        """Note everything that goes through the store, from any process. A read is noted as a whole, when it ends."""

        def looking(read: Callable[..., Awaitable[list[RowCells]]]) -> Callable[..., Awaitable[list[RowCells]]]:
            async def reads(requests: Sequence[ReadRequest], *bytes_max: int) -> list[RowCells]:
                found = await read(requests, *bytes_max)
                self._touched(lambda watched: any(map(watched.read_by, requests)))
                return found

            return reads

        find_page, submit = store.find_page, store.submit

        def finds(request: ScanRequest) -> ScanPage:
            page = find_page(request)
            self._touched(lambda watched: watched.scanned_by(request))
            return page

        def submits(mutations: Sequence[Mutation], call: Call) -> None:
            self._touched(lambda watched: any(map(watched.met_by, mutations)))
            submit(mutations, call)

        store.read, store.read_first = looking(store.read), looking(store.read_first)  # type: ignore
        store.find_page, store.submit = finds, submits  # type: ignore[method-assign]

    def _note_floors(self) -> None:
        """Note when the floor of a tablet rises."""
        for tablet in set(self.machine.store.tablets()) - self._noted:
            self._noted.add(tablet)
            raise_floor = tablet.raise_floor

            async def raises(
                ts: int, tablet: Tablet = tablet, raise_floor: Callable[[int], Awaitable[None]] = raise_floor
            ) -> None:
                rises = ts > tablet.floor
                await raise_floor(ts)
                if rises:
                    self._touched(lambda watched: watched.has_floor)

            tablet.raise_floor = raises  # type: ignore[method-assign]

    def _note_counts(self, db: Database) -> None:
        count = local_owner(db).idle.entries

        def counts(group: str) -> int:
            self._touched(lambda watched: watched.counted_by(group))
            return count(group)

        local_owner(db).idle.entries = counts  # type: ignore[method-assign]

    def _touched(self, does: Callable[[Watched], bool]) -> None:
        """For each late mutation, note a moment if `does` says that what was just done touches the mutation."""
        last = len(self.result.steps) - 1
        for step, watched in self._watched.items():
            if last > step and does(watched):
                moments = self.result.moments.setdefault(step, [])
                if not moments or moments[-1] != last:
                    moments.append(last)

    async def main(self) -> Result:
        with trio.fail_after(_HOUR_S * 10):
            async with self.machine.opened(Options(seed=0), schema=self.scenario.before) as db:
                await self.scenario.prepare(db)
            async with trio.open_nursery() as nursery:
                await self._processes(nursery)
            await self._end()
        return self.result

    async def _processes(self, nursery: trio.Nursery) -> None:
        """Run processes one after the other, until a later one than the first has ended and nothing is in flight."""
        number = 0
        while True:
            process = _Process(self, number)
            nursery.start_soon(process.live)
            await process.stopped.wait()
            number += 1
            if process.paused:
                self._standing.append(process)
                continue
            await process.ended.wait()
            self._own_arrive(process)
            if process.died:
                continue
            if self._standing:
                for standing in self._standing:
                    await standing.wake()
                self._standing = [standing for standing in self._standing if standing.paused]
            elif self._late:
                self._arrive(len(self.result.steps), everything=True)
            elif number > 1:
                return

    async def _end(self) -> None:
        async with self.opened(len(self.result.steps)) as db:
            inside(db).background.start(local_owner(db).sweeper.run, "sweeper")
            await observe(db)
            assert not self.machine.locks(), f"{self.machine.locks()} locks are left"
            await self.scenario.verify(db)
            result = await check(self.machine.store, ts=inside(db).oracle.last, options=CheckOptions(pause_s=0.0))
            assert result.clean, "\n".join(map(str, result.findings))

    @asynccontextmanager
    async def opened(self, number: int, below: RowStore | None = None) -> AsyncIterator[Database]:
        """Open the store for a process. If another process is paused meanwhile, the two share an oracle. `below`: see
        `Machine.opened`."""
        wall, backfill = lambda: _WALL + trio.current_time(), BackfillOptions(share=1.0, page_rows=2)
        if self.scenario.vacuums:
            for tablet in self.machine.store.tablets():
                tablet.floor = 0  # the tablet's process has ended, and its memory is gone
        options = Options(seed=number, wall=wall, backfill=backfill)
        async with self.machine.opened(options, below=below) as db:
            beside = self._standing[-1].db if self._standing else None
            if beside is not None:
                inside(db).engine.oracle = inside(db).driver.oracle = inside(beside).oracle
            else:
                inside(db).oracle._timestamps = _Noting(inside(db).oracle._timestamps.bound, self._handed_out)
            self._note_counts(db)
            self._note_floors()
            yield db

    async def step(self, process: _Process, mutation: Mutation) -> Fault | None:
        """Note a mutation that is about to be made, and deliver what arrives before it. Returns the mutation's
        fault."""
        number = len(self.result.steps)
        assert number < _STEPS_MAX, "it goes round in circles"
        self.result.steps.append(Step(process.number, kind_of(mutation)))
        fault = self._faults.pop(number, None)
        self._arrive(number)
        if fault is not None:
            self.result.fired.append(fault)
            if fault.kind in LATE:
                self._late.append(_Late(trio.current_time(), fault.arrives, process, mutation, number))
                if fault.arrives == END:
                    self._watched[number] = Watched(mutation)
        return fault

    def _arrive(self, step: int, *, everything: bool = False) -> None:
        self._deliver([late for late in self._late if everything or late.arrives == step])

    def _own_arrive(self, process: _Process) -> None:
        """Make the mutations that a process has queued for its own tablets, if it has ended; drop them, if it has died
        (C6)."""
        own = [late for late in self._late if late.process is process and self._is_own(late.mutation)]
        self._deliver(own, made=not process.died)

    def _is_own(self, mutation: Mutation) -> bool:
        """Whether a mutation is queued for its process's own tablets. With `vacuums`, mutations of the system table
        are, too."""
        if self.scenario.bare:
            return False
        return kind_of(mutation) == ONE_STEP or (self.scenario.vacuums and mutation.table == SYSTEM_TABLE)

    def _deliver(self, due: list[_Late], *, made: bool = True) -> None:
        """Deliver these mutations at once. The delivery does not shift the times at which tasks run, so only the
        effect of the mutations changes the run."""
        self._late = [late for late in self._late if late not in due]
        for late in due:
            self._watched.pop(late.step, None)
        if self.scenario.bare:  # a message is not in flight forever
            due = [late for late in due if trio.current_time() < late.sent + LATE_S]
        for late in due if made else ():
            call = Call(None, 1)
            self.machine.store.submit([late.mutation], call)
            assert not call.waiting, "a memory store answers at once"


def run(make: Callable[[], Scenario], schedule: Schedule = ()) -> Result:
    """Run one schedule, in its own trio loop, in virtual time; the same schedule gives the same run."""
    with seeded(0):
        one = Run(make(), schedule)
        try:
            trio.run(one.main, clock=trio.testing.MockClock(autojump_threshold=0))
        except Exception as error:
            one.result.problem = one.result.problem or "".join(traceback.format_exception(error)).strip()
    return one.result


def next_faults(result: Result, *, least: int = 0) -> Iterator[Schedule]:
    """Yields all schedules that add a fault to a run's schedule, at a later step, not before `least`. A late fault
    arrives after everything."""
    schedule = result.schedule
    after = schedule[-1].step + 1 if schedule else 0
    for step in range(max(after, least), len(result.steps)):
        for kind in result.steps[step].kinds(alone=result.alone):
            yield (*schedule, Fault(step, kind))


def arrivals(result: Result) -> list[Schedule]:
    """More schedules for a run whose last fault is a late one that arrived after everything: in each of them, this
    fault arrives at an earlier moment that makes a difference."""
    *others, last = result.schedule
    return [(*others, last._replace(arrives=step)) for step in result.moments.get(last.step, ())]


def deeper(
    make: Callable[[], Scenario], result: Result, *, moments: int | None = None, least: int = 0
) -> Iterator[Result]:
    """Make all runs with one more fault than a run had, at the step `least` or later. For a late fault, there is a run
    in which it arrives after everything, and one for each earlier moment that makes a difference, or for the first
    `moments` of them."""
    for schedule in next_faults(result, least=least):
        one = run(make, schedule)
        yield one
        for moment in arrivals(one)[:moments]:
            yield run(make, moment)


@dataclass(slots=True)
class Report:
    """The result of a sweep: `runs`, how many runs there were, by the number of faults; `met`, how often each fault hit
    each step; `possible`, the faults that could have hit each step; `wrong`, the runs that ended badly."""

    runs: Counter[int] = field(default_factory=Counter)
    met: Counter[tuple[str, Kind]] = field(default_factory=Counter)
    possible: set[tuple[str, Kind]] = field(default_factory=set)
    wrong: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.runs[len(result.schedule)] += 1
        for step in set(result.steps):
            self.possible.update((step.name, kind) for kind in step.kinds(alone=result.alone))
        for fault in result.fired:
            self.met[result.steps[fault.step].name, fault.kind] += 1
        if not result.problem and tuple(result.fired) != result.schedule:
            result.problem = f"not every fault fired, only {result.fired}"
        if result.problem:
            self.wrong.append(result)

    def merge(self, other: Report) -> None:
        self.runs += other.runs
        self.met += other.met
        self.possible |= other.possible
        self.wrong += other.wrong

    def steps(self) -> list[str]:
        return sorted({name for name, _ in self.met})

    def table(self) -> str:
        """How often each fault hit each step."""
        lines = [" " * 16 + "".join(f"{kind.name:>14}" for kind in Kind)]
        lines += [f"{name:16}" + "".join(f"{self.met[name, kind]:>14}" for kind in Kind) for name in self.steps()]
        return "\n".join(lines)

    def empty(self) -> list[str]:
        """Steps, each with a fault that could have hit it but never did."""
        return sorted(f"{name} x {kind.name}" for name, kind in self.possible if not self.met[name, kind])


def singles(make: Callable[[], Scenario], *, moments: int | None = None) -> Report:
    """Run without a fault, then with every fault at every step. Late faults arrive as in `deeper`."""
    report = Report()
    dry = run(make)
    report.add(dry)
    if not dry.problem:
        for result in deeper(make, dry, moments=moments):
            report.add(result)
    return report


def pairs(make: Callable[[], Scenario], first: Schedule) -> Iterator[Result]:
    """Run one first fault with each possible second fault, at each later step. A late second fault arrives at its first
    moment, or after everything.

    A late first fault arrives at an earlier moment than the second fault; or immediately before the second fault; or
    after the second fault. In the last case, the first fault encounters the effects of the second, so its moments are
    those of the run with both faults.
    """
    alone = run(make, first)
    [fault] = first
    sooner = alone.moments.get(fault.step, [])
    for moment in sooner:
        yield from deeper(make, run(make, (fault._replace(arrives=moment),)), moments=1, least=moment)
    for result in deeper(make, alone, moments=1):
        yield result
        if fault.kind in LATE:
            second = result.schedule[-1]
            moments = {moment for moment in result.moments.get(fault.step, ()) if moment > second.step}
            if second.step not in sooner:
                moments.add(second.step)
            for moment in sorted(moments):
                yield run(make, (fault._replace(arrives=moment), second))


def firsts(make: Callable[[], Scenario]) -> list[Schedule]:
    """The first faults of all pairs: their `pairs`, taken together, are all pairs."""
    return list(next_faults(run(make)))


def sample(make: Callable[[], Scenario], pairs: int, rng: random.Random) -> Report:
    """Run the given number of random pairs of faults. A late fault arrives before a random later step, or after
    everything."""
    report = Report()
    dry = run(make)
    while report.runs[2] < pairs:
        result = dry
        for _ in range(2):
            schedules = list(next_faults(result))
            if not schedules:
                break  # the first fault was at the very last step
            result = run(make, rng.choice(schedules))
            *others, last = result.schedule
            later = range(last.step + 1, len(result.steps))
            if last.kind in LATE and later and rng.random() < 0.8:
                result = run(make, (*others, last._replace(arrives=rng.choice(later))))
        report.add(result)
    return report
