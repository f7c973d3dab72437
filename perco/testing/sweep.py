"""A crash sweep: every step of a scenario meets every fault, alone and in pairs; what is left must be whole.

A *scenario* says what the first process does, what every later one does, and what must hold at the end. A *step* is a
mutation, of whichever process: they are numbered through, so a *schedule*, a few faults at steps, replays exactly. A
run without faults tells the steps there are; a run with one fault tells the steps that may meet a second.

    CRASH_BEFORE, CRASH_AFTER   the process dies, the mutation made or not; another recovers
    LOSE_REQUEST, LOSE_REPLY    its process is told that nobody knows
    PAUSE_BEFORE, PAUSE_AFTER   the process stands still, is taken for dead by another, which recovers and goes on; then
                                it wakes up
    REPEAT                      made, and once more before a later step, or after everything
    DELAY                       taken for lost, it arrives before a later step, or after everything

Of the last two there is one fault for each moment of arrival that anybody can tell from the next one: before a step, if
from there to the following step something is read that the late mutation writes, or something is written that it writes
or checks (`Watched`). A mutation of a process that died may arrive as well: that takes a pair.

In a scenario with `one_step`, or that `vacuums`, a process has the store to itself, as whoever commits in one step or
removes old versions has: nobody takes it for dead while it lives (C2), so it never stands still. A commit in one step
goes to tablets of its own process, once, and ends with it (C6). With a vacuum, the oracle's bound, the published
watermark and pins are steps as well, and end with their process too; and so do the floors of tablets.

At the end: no lock is left, `check` is clean, no timestamp was handed out twice (O1), and what the scenario says.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Final, NamedTuple

import trio
import trio.testing

from perco.errors import BackgroundFailure
from perco.notify.database import Database
from perco.notify.worker import WorkerOptions
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
from perco.testing.faults import FaultyRowStore, kind_of, use
from perco.testing.machine import CrashedError, Machine
from perco.testing.simulation import seeded
from perco.txn.backfill import BackfillOptions
from perco.txn.catalogue import SYSTEM_TABLE
from perco.txn.check import CheckOptions, check
from perco.txn.client import Options
from perco.txn.schema import Schema
from perco.txn.timestamps import Timestamps

_WALL: Final = 1_700_000_000.0
_HOUR_S: Final = 3600.0  # of virtual time: what has not ended by then never does
_STEPS_MAX: Final = 1000  # in one run; a usual one makes a few dozen
END: Final = -1  # arrives after everything


class Kind(Enum):
    CRASH_BEFORE = "dies before"
    CRASH_AFTER = "dies after"
    LOSE_REQUEST = "its request is lost"
    LOSE_REPLY = "its reply is lost"
    PAUSE_BEFORE = "stands still before"
    PAUSE_AFTER = "stands still after"
    REPEAT = "is repeated"
    DELAY = "is late"


LATE: Final = (Kind.REPEAT, Kind.DELAY)
PAUSES: Final = (Kind.PAUSE_BEFORE, Kind.PAUSE_AFTER)
_ONE_STEP: Final = "one step"


class Fault(NamedTuple):
    """At the step of that number; `arrives`: before which later step, of a late one."""

    step: int
    kind: Kind
    arrives: int = END

    def __str__(self) -> str:
        when = ""
        if self.kind in LATE:
            when = " until the end" if self.arrives == END else f" until {self.arrives}"
        return f"{self.step} {self.kind.name}{when}"


Schedule = tuple[Fault, ...]


class Step(NamedTuple):
    """Which process, from 0, sent what (`kind_of`)."""

    process: int
    kind: str

    def kinds(self, *, alone: bool) -> list[Kind]:
        """What it can meet; `alone`: its process has the store to itself."""
        never = (*PAUSES, Kind.REPEAT) if self.kind == _ONE_STEP else PAUSES if alone else ()
        return [kind for kind in Kind if kind not in never]

    @property
    def name(self) -> str:
        return f"{'first' if self.process == 0 else 'later'} {self.kind}"


class Scenario:
    """What is swept. One object lives for one run; it may note in itself what processes were told.

    Attributes: `name`; `groups`, whether the store has groups (S1); `one_step`, whether processes commit in one step
    where they can; `vacuums`, whether they remove old versions; `backwards`, whether mutations sent together arrive in
    reverse; `before`, the schema that `prepare` has, if it is of an older program.
    """

    name: ClassVar[str] = ""
    groups: ClassVar[bool] = True
    one_step: ClassVar[bool] = False
    vacuums: ClassVar[bool] = False
    backwards: ClassVar[bool] = False
    schema: Schema
    before: Schema | None = None

    async def prepare(self, db: Database) -> None:
        """What is there before, made without faults. The default: nothing."""

    async def first(self, db: Database) -> None:
        """What is swept: what the first process does."""
        raise NotImplementedError

    async def meet(self, db: Database) -> None:
        """What those do that come after it, before anything else has settled what it left. The default: nothing."""

    async def later(self, db: Database) -> None:
        """What they do after that, and after everything has been settled and observed. The default: nothing."""

    async def verify(self, db: Database) -> None:
        """Asserts what must hold at the end; nothing goes wrong any more."""
        raise NotImplementedError


async def observe(db: Database) -> None:
    """Run the schema's observers until nothing waits for them, and no lock is left over."""
    options = WorkerOptions(concurrency=2, scanners=1, outputs=False)
    if db.schema.observers:
        async with db.worker(options=options):
            await db.wait_idle(timeout=_HOUR_S)
    while not db.sweeper.clean:  # noqa: ASYNC110
        await trio.sleep(0.5)


@dataclass(slots=True)
class Result:
    """Of one run: the steps that were made, the faults that fired, and what was wrong with the end; `moments`, by
    the step of a late fault that arrived last: before which steps it would have made a difference."""

    schedule: Schedule
    alone: bool = False
    steps: list[Step] = field(default_factory=list)
    fired: list[Fault] = field(default_factory=list)
    problem: str = ""
    moments: dict[int, list[int]] = field(default_factory=dict)


class Watched:
    """A late mutation that has not arrived. Between two steps that do not touch what it touches, it makes no difference
    when it does: it commutes with them, and with whatever was read."""

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
        """Whether one of the two reads or writes what the other one writes."""
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
    """Notes what is handed out, by whichever process."""

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
    """What a process sees of the store."""

    def __init__(self, store: RowStore, process: _Process) -> None:
        super().__init__(store, looking=process.awake)
        self._process = process
        if process.run.scenario.backwards:
            self.shuffle = list.reverse

    async def _apply(self, mutation: Mutation) -> Verdict:
        process = self._process
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
    """From its opening of the store to its end or death; meanwhile it may stand still."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.died = False
        self.stopped = trio.Event()  # it died, ended, or stands still: the next may come
        self.ended = trio.Event()
        self._awake = trio.Event()
        self._awake.set()
        self._scope = trio.CancelScope()
        self._store: _Store | None = None
        self.db: Database | None = None

    async def live(self) -> None:
        run = self.run
        try:
            async with run.opened(self.number) as db:
                self.db = db
                self._store = _Store(db.driver.store, self)
                use(db, self._store)
                if run.scenario.vacuums:
                    db.oracle._store = db.oracle.pins._store = self._store
                try:
                    with self._scope:
                        await _work(run.scenario, db, first=self.number == 0)
                except* CrashedError:
                    assert self.died
                except* BackgroundFailure as failures:  # its background died first
                    if not self.died or not all(_only_crashed(each.__cause__) for each in failures.exceptions):
                        raise
            failure = db.background.failure()
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
        """Until it is woken, or dies; whatever its tasks ask of the store waits as well. Two of them may stand still at
        once, and one may die while another stands still."""
        if self.died:
            return
        if not self.paused:
            self._awake = trio.Event()
        self.stopped.set()
        with trio.CancelScope(shield=True):
            await self._wait()

    async def _wait(self) -> None:
        with trio.move_on_after(_HOUR_S):  # else a run that nobody wakes would go on for ever, for it is shielded
            await self._awake.wait()
            return
        self.run.result.problem = f"process {self.number} stands still, and nobody woke it"
        raise AssertionError(self.run.result.problem)

    async def wake(self) -> None:
        """Until it has ended, or stands still again."""
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
    db.background.start(db.sweeper.run, "sweeper")
    if first:
        await scenario.first(db)
        return
    await observe(db)
    await scenario.later(db)
    await observe(db)


class _Late(NamedTuple):
    arrives: int
    process: _Process
    mutation: Mutation
    step: int


class Run:
    """One schedule, carried out."""

    def __init__(self, scenario: Scenario, schedule: Schedule) -> None:
        self.scenario = scenario
        self.result = Result(schedule, scenario.one_step or scenario.vacuums)
        self.machine = Machine(scenario.schema, groups=scenario.groups, one_step=scenario.one_step)
        self._faults = {fault.step: fault for fault in schedule}
        self._late: list[_Late] = []
        self._handed_out: list[int] = []
        self._standing: list[_Process] = []
        self._watched: dict[int, Watched] = {}  # by the step, what arrives last
        self._noted: set[Tablet] = set()
        self._note_touches(self.machine.store)

    def _note_touches(self, store: LocalRowStore) -> None:
        """Of whatever goes through the store, by whichever process: reads look at their end, in one go."""

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
        """Of each tablet, when its floor rises."""
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
        count = db._entries

        def counts(group: str) -> int:
            self._touched(lambda watched: watched.counted_by(group))
            return count(group)

        db._entries = counts  # type: ignore[method-assign]

    def _touched(self, does: Callable[[Watched], bool]) -> None:
        """Something is done that may touch what is late."""
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
        """One after the other, until one that came after the first has ended and nothing is under way any more."""
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
            db.background.start(db.sweeper.run, "sweeper")
            await observe(db)
            assert not self.machine.locks(), f"{self.machine.locks()} locks are left"
            await self.scenario.verify(db)
            result = await check(self.machine.store, ts=db.oracle.last, options=CheckOptions(pause_s=0.0))
            assert result.clean, "\n".join(map(str, result.findings))

    @asynccontextmanager
    async def opened(self, number: int) -> AsyncIterator[Database]:
        """The store, for a process. One that lives beside another, which stands still, shares the oracle with it."""
        wall, backfill = lambda: _WALL + trio.current_time(), BackfillOptions(share=1.0, page_rows=2)
        if self.scenario.vacuums:
            for tablet in self.machine.store.tablets():
                tablet.floor = 0  # its process has ended, and with it what it had in memory
        async with self.machine.opened(Options(seed=number, wall=wall, backfill=backfill)) as db:
            beside = self._standing[-1].db if self._standing else None
            if beside is not None:
                db.oracle = db.driver.oracle = beside.oracle
            else:
                db.oracle._timestamps = _Noting(db.oracle._timestamps.bound, self._handed_out)
            self._note_counts(db)
            self._note_floors()
            yield db

    async def step(self, process: _Process, mutation: Mutation) -> Fault | None:
        """A mutation is about to be made; what arrives before it arrives. Returns what it meets."""
        number = len(self.result.steps)
        assert number < _STEPS_MAX, "it goes round in circles"
        self.result.steps.append(Step(process.number, kind_of(mutation)))
        fault = self._faults.pop(number, None)
        self._arrive(number)
        if fault is not None:
            self.result.fired.append(fault)
            if fault.kind in LATE:
                self._late.append(_Late(fault.arrives, process, mutation, number))
                if fault.arrives == END:
                    self._watched[number] = Watched(mutation)
        return fault

    def _arrive(self, step: int, *, everything: bool = False) -> None:
        self._deliver([late for late in self._late if everything or late.arrives == step])

    def _own_arrive(self, process: _Process) -> None:
        """What a process has queued for its own tablets is made when it closes, and is gone when it dies (C6)."""
        own = [late for late in self._late if late.process is process and self._is_own(late.mutation)]
        self._deliver(own, made=not process.died)

    def _is_own(self, mutation: Mutation) -> bool:
        """The oracle and whoever vacuums have the system table to themselves."""
        return kind_of(mutation) == _ONE_STEP or (self.scenario.vacuums and mutation.table == SYSTEM_TABLE)

    def _deliver(self, due: list[_Late], *, made: bool = True) -> None:
        """At once: nobody's turn comes sooner or later by it, so the run goes on as without it but for what it does."""
        self._late = [late for late in self._late if late not in due]
        for late in due:
            self._watched.pop(late.step, None)
        for late in due if made else ():
            call = Call(None, 1)
            self.machine.store.submit([late.mutation], call)
            assert not call.waiting, "a memory store answers at once"


def run(make: Callable[[], Scenario], schedule: Schedule = ()) -> Result:
    """Carry out one schedule, in a trio loop of its own, in virtual time; the same schedule is the same run."""
    with seeded(0):
        one = Run(make(), schedule)
        try:
            trio.run(one.main, clock=trio.testing.MockClock(autojump_threshold=0))
        except Exception as error:
            one.result.problem = one.result.problem or "".join(traceback.format_exception(error)).strip()
    return one.result


def next_faults(result: Result, *, least: int = 0) -> Iterator[Schedule]:
    """All schedules with one more fault, at a later step than those of a run, from `least` on; a late one arrives
    last."""
    schedule = result.schedule
    after = schedule[-1].step + 1 if schedule else 0
    for step in range(max(after, least), len(result.steps)):
        for kind in result.steps[step].kinds(alone=result.alone):
            yield (*schedule, Fault(step, kind))


def arrivals(result: Result) -> list[Schedule]:
    """Of a run in which the newest fault is a late one, and arrived last: each earlier moment of its arrival that
    makes a difference."""
    *others, last = result.schedule
    return [(*others, last._replace(arrives=step)) for step in result.moments.get(last.step, ())]


def deeper(
    make: Callable[[], Scenario], result: Result, *, moments: int | None = None, least: int = 0
) -> Iterator[Result]:
    """All runs with one more fault than a run had, from the step `least` on; a late one arrives last, and before each
    step, or the first few."""
    for schedule in next_faults(result, least=least):
        one = run(make, schedule)
        yield one
        for moment in arrivals(one)[:moments]:
            yield run(make, moment)


@dataclass(slots=True)
class Report:
    """What a sweep did: `runs`, of how many faults each; `met`, which fault met which step, and `possible`, which could
    have; `wrong`, the runs that ended badly."""

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
        """Which fault met which step how often."""
        lines = [" " * 16 + "".join(f"{kind.name:>14}" for kind in Kind)]
        lines += [f"{name:16}" + "".join(f"{self.met[name, kind]:>14}" for kind in Kind) for name in self.steps()]
        return "\n".join(lines)

    def empty(self) -> list[str]:
        """Steps that never met a fault that they could have met."""
        return sorted(f"{name} x {kind.name}" for name, kind in self.possible if not self.met[name, kind])


def singles(make: Callable[[], Scenario], *, moments: int | None = None) -> Report:
    """No fault, then every fault at every step; late ones before every later step, or the first few, and last."""
    report = Report()
    dry = run(make)
    report.add(dry)
    if not dry.problem:
        for result in deeper(make, dry, moments=moments):
            report.add(result)
    return report


def pairs(make: Callable[[], Scenario], first: Schedule) -> Iterator[Result]:
    """A first fault, with every second one at every later step. A late second one arrives at its first moment, or last.

    A late first one arrives before the second; or after it, when it meets what the second has brought about, which is
    why these moments are those of the run with both; or right before it, when all that was done until then has been
    done.
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
    """What to call `pairs` with to have them all."""
    return list(next_faults(run(make)))


def sample(make: Callable[[], Scenario], pairs: int, rng: random.Random) -> Report:
    """So many pairs, drawn; of late ones, at any moment of arrival."""
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


def again(schedule: Schedule) -> str:
    """A schedule as the command takes it."""
    return ",".join(f"{fault.step}:{fault.kind.name}:{fault.arrives}" for fault in schedule)


def parse(text: str) -> Schedule:
    """The schedule that `again` wrote."""
    out = []
    for part in text.split(","):
        step, kind, arrives = part.split(":")
        out.append(Fault(int(step), Kind[kind], int(arrives)))
    return tuple(out)
