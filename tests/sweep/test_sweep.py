"""Crash, lost, late and repeated at every step: nothing is lost, nothing is half done, nothing is handled twice.

`python -m tests.sweep --pairs` goes through every two of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import trio

from perco.clock import oracle
from perco.clock.holds import Holder
from perco.clock.pins import Pins
from perco.database import local
from perco.notify.batches import Batches
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import LOCK, Mutation, RowStore
from perco.storage.bare import Bare
from perco.storage.tablet import MemoryTablet
from perco.testing import schedules, sweep
from perco.testing.machine import Machine
from perco.testing.schedules import PAUSES, Fault, Kind
from perco.testing.sweep import Report, Scenario
from tests.sweep.scenarios import (
    SCENARIOS,
    Batched,
    BatchedInOneStep,
    Delete,
    Growing,
    GrowingInOneStep,
    Load,
    ObserverRun,
    OnlySignalling,
    Read,
    ReadLocked,
    Serializable,
    SignallingInOneStep,
    Swept,
    TwoTablets,
    Undone,
    Vacuumed,
    VacuumedObserver,
    VacuumedPinned,
)
from tests.sweep.viewing import Grouped, GroupedInPlace, JoinedViews
from tests.testing.mutants import MUTANTS, Mutant
from tests.testing.mutants_serializable import LOCKS, SERIALIZABLE
from tests.testing.mutants_viewed import VIEWED

PAIRS = 20  # of each scenario, drawn; `make sweep` goes through all
MOMENTS = 2  # at which a late one arrives, besides after everything; over a store of single rows, half as many
ids = [make().name for make in SCENARIOS]


def clean(report: Report) -> None:
    assert not report.wrong, f"{schedules.again(report.wrong[0].schedule)}: {report.wrong[0].problem}"


@pytest.mark.parametrize("make", SCENARIOS, ids=ids)
def test_every_fault_at_every_step(make: Callable[[], Scenario]) -> None:  # T1 T4 T5 T6 T7 T8 N1 N2 N3 O1
    dry = sweep.run(make)
    report = sweep.singles(make, moments=MOMENTS // 2 if make().name.endswith(", bare") else MOMENTS)
    clean(report)
    assert report.runs[0] == 1
    wanted = Counter((dry.steps[fault.step].name, fault.kind) for [fault] in sweep.next_faults(dry))
    assert all(report.met[cell] >= times for cell, times in wanted.items())
    assert report.met.total() == report.runs[1] > wanted.total(), "late ones at several moments"
    assert wanted.total() >= 5 * len(dry.steps)


@pytest.mark.parametrize("make", [Batched, BatchedInOneStep])
def test_the_runs_of_these_scenarios_share_transactions(
    make: type[Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:  # N20
    shared: list[int] = []
    run = Batches._run

    async def noted(self: Batches, txn: Any, observer: Any, table: str, claimed: Any, ack: int) -> Any:
        shared.append(len(claimed))
        return await run(self, txn, observer, table, claimed, ack)

    monkeypatch.setattr(Batches, "_run", noted)
    sweep.run(make)
    assert 2 in shared


@pytest.mark.parametrize("make", [Swept, Delete, ObserverRun])
def test_every_fault_at_every_step_of_a_recovery(make: Callable[[], Scenario]) -> None:  # T4 T5 T6 T8
    """The first process dies, before each of its steps; then all that recovers it meets a fault as well."""
    report, wanted = Report(), set()
    dry = sweep.run(make)
    for step in range(sum(step.process == 0 for step in dry.steps)):
        dies = (Fault(step, Kind.CRASH_BEFORE),)
        recovered = sweep.run(make, dies)
        assert recovered.fired == list(dies)
        wanted |= {(recovered.steps[second.step].name, second.kind) for _, second in sweep.next_faults(recovered)}
        for result in sweep.pairs(make, dies):
            report.add(result)
    clean(report)
    assert wanted <= set(report.met)
    assert {"later rollback", "later commit"} <= set(report.steps())
    assert len(wanted) >= 2 * len(Kind)
    assert report.runs[2] > 50


@pytest.mark.parametrize("make", SCENARIOS, ids=ids)
def test_two_faults(make: Callable[[], Scenario]) -> None:
    report = sweep.sample(make, PAIRS, random.Random(2010))
    clean(report)
    assert report.runs[2] == PAIRS


def test_a_late_prewrite_of_the_dead_meets_a_marker() -> None:  # T5
    """The primary's prewrite is on its way when its process dies; a recovery that dies itself has put the marker."""
    report = Report()
    on_its_way = sweep.run(TwoTablets, (Fault(0, Kind.DELAY, 3), Fault(1, Kind.CRASH_AFTER)))
    for result in sweep.deeper(TwoTablets, on_its_way):
        report.add(result)
    clean(report)
    assert "later marker" in report.steps()
    assert not [cell for cell in report.empty() if cell.startswith("later marker")]


@pytest.mark.parametrize("first", PAUSES)
@pytest.mark.parametrize("second", [*PAUSES, Kind.CRASH_BEFORE, Kind.CRASH_AFTER])
def test_one_task_stands_still_and_another_meets_something_else(first: Kind, second: Kind) -> None:
    """Observer runs of one process commit side by side: they wake up with it, or die with it."""
    steps = sweep.run(OnlySignalling).steps
    together = 0
    for number in range(len(steps) - 1):
        if steps[number].process == steps[number + 1].process == 0:
            result = sweep.run(OnlySignalling, (Fault(number, first), Fault(number + 1, second)))
            assert not result.problem
            together += [result.steps[fault.step].process for fault in result.fired] == [0, 0]
    assert together > 0


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (Growing, "0:CRASH_BEFORE:-1,1:PAUSE_BEFORE:-1"),  # N7: it woke up when another had told its observers
    ],
)
def test_what_pairs_have_found(make: Callable[[], Scenario], schedule: str) -> None:
    result = sweep.run(make, schedules.parse(schedule))
    assert not result.problem, result.problem
    assert result.fired == list(result.schedule)


def noting(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """All cells at the end of each run from now on."""
    contents: list[object] = []

    class Noting(sweep.Run):
        async def _end(self) -> None:
            contents.append(
                [
                    (tablet.table, tablet.start, group, dict(tablet.engine._group(group).values))
                    for tablet in self.machine.store.tablets()
                    if isinstance(tablet, MemoryTablet)
                    for group in tablet.groups()
                ]
            )
            await super()._end()

    monkeypatch.setattr(sweep, "Run", Noting)
    return contents


def compare(make: Callable[[], Scenario], schedule: schedules.Schedule, contents: list[object]) -> tuple[int, int]:
    """Of a schedule that ends with a late fault: whenever it arrives, the run is as with the next of its moments, to
    the cell. Returns how many were left out, and how many moments told apart."""
    *others, late = schedule
    last = sweep.run(make, schedule)
    assert not last.problem
    contents.clear()
    moments = last.moments.get(late.step, [])
    assert all(moment > late.step for moment in moments)
    ends: dict[int, tuple[list[schedules.Step], object]] = {}

    def end_of(step: int) -> tuple[list[schedules.Step], object]:
        if step not in ends:
            result = sweep.run(make, (*others, late._replace(arrives=step)))
            assert not result.problem
            ends[step] = result.steps, contents.pop()
        return ends[step]

    left_out = 0
    for step in range(late.step + 1, max(moments, default=0) + 1):
        like = next(moment for moment in moments if moment >= step)
        assert end_of(step) == end_of(like), f"{late} arrives before {step}, not {like}"
        left_out += step != like
    for step in range(max(moments, default=late.step) + 1, len(last.steps)):
        steps, _ = end_of(step)
        assert steps == last.steps[: len(steps)], f"{late} arrives before {step}, not after everything"
        left_out += 1
    return left_out, sum(end_of(one) != end_of(next_one) for one, next_one in pairwise(moments))


@pytest.mark.parametrize(
    ("make", "every"), [(ObserverRun, 1), (SignallingInOneStep, 1), (GrowingInOneStep, 4), (Vacuumed, 3)]
)
def test_a_moment_that_is_left_out_is_like_the_next_one(
    make: Callable[[], Scenario], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutation that arrives one step earlier, between steps that do not touch it, changes nothing. `every`: of a
    long scenario, one schedule in so many is compared."""
    contents = noting(monkeypatch)
    schedules = [schedule for schedule in sweep.firsts(make) if schedule[0].kind in sweep.LATE][::every]
    compared = [compare(make, schedule, contents) for schedule in schedules]
    assert sum(left_out for left_out, _ in compared) > 5
    assert sum(told_apart for _, told_apart in compared) > 0, "otherwise all of them could be left out"


def test_it_makes_a_difference_whether_what_is_late_comes_before_the_floor_is_raised() -> None:  # T13
    def moments(floor_ts: int | None) -> dict[int, list[int]]:
        run = sweep.Run(Vacuumed(), ())
        run._note_floors()
        late = Mutation(SYSTEM_TABLE, ((b"row", (), ((LOCK, 1, 7, b""),)),), floor_ts)
        run._watched[0] = sweep.Watched(late)
        for floor in (8, 8, 9):
            run.result.steps.append(schedules.Step(0, "prewrite"))
            run.result.steps.append(schedules.Step(0, "vacuum"))
            trio.run(partial(run.machine.store.raise_floor, floor, wait=True))
        return run.result.moments

    assert moments(7) == {0: [1, 5]}
    assert moments(None) == {}


@pytest.mark.parametrize("make", [Swept])
def test_pairs_leave_out_no_moment_of_a_first_fault_that_is_told_apart(
    make: Callable[[], Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the first arrives, before the second, between the two or after it: `pairs` has had a run like that."""
    contents = noting(monkeypatch)
    seconds = (Kind.CRASH_BEFORE, Kind.CRASH_AFTER, Kind.PAUSE_AFTER)
    real, had = sweep.run, dict[tuple[Fault, ...], list[tuple[list[schedules.Step], object]]]()

    def without_moments(schedule: schedules.Schedule) -> tuple[Fault, ...]:
        return tuple(fault._replace(arrives=sweep.END) for fault in schedule)

    def run(make: Callable[[], Scenario], schedule: schedules.Schedule = ()) -> sweep.Result:
        result = real(make, schedule)
        assert not result.problem
        had.setdefault(without_moments(schedule), []).append((result.steps, contents.pop()))
        return result

    compared = 0
    for first in [schedule for schedule in sweep.firsts(make) if schedule[0].kind in sweep.LATE]:
        contents.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweep, "run", run)
            for _ in sweep.pairs(make, first):
                pass
        [fault] = first
        for moment in range(fault.step + 1, len(real(make, first).steps) + 2):
            alone = real(make, (fault._replace(arrives=moment),))
            for schedule in sweep.next_faults(alone):
                if schedule[1].kind not in seconds:
                    continue
                result, cells = real(make, schedule), contents.pop()
                likes = had[without_moments(schedule)]
                # One process more settles the mutation that arrives last.
                assert any(
                    (steps, there) == (result.steps, cells) or steps[: len(result.steps)] == result.steps != steps
                    for steps, there in likes
                ), schedules.again(schedule)
                compared += 1
    assert compared > 50


def test_a_schedule_is_the_same_run_every_time() -> None:
    schedule = (Fault(1, Kind.DELAY, 9), Fault(6, Kind.CRASH_AFTER))
    one, two = (sweep.run(ObserverRun, schedule) for _ in range(2))
    assert one == two
    assert one.problem == ""
    assert one.fired == list(schedule)
    assert schedules.parse(schedules.again(schedule)) == schedule


# ------------------------------------------------------------ a sweep that finds nothing must be able to


def test_a_fault_that_cannot_fire_is_a_problem() -> None:
    report = Report()
    report.add(sweep.run(TwoTablets, (Fault(500, Kind.CRASH_AFTER),)))
    assert "not every fault fired" in report.wrong[0].problem


def test_a_lock_that_is_left_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "locks", lambda self: 1)
    assert "1 locks are left" in sweep.run(TwoTablets).problem


FORGETFUL: dict[str, Mutant] = {}  # the next process that opens the store lacks knowledge


def forgets(name: str) -> Callable[[Mutant], Mutant]:
    def note(function: Mutant) -> Mutant:
        FORGETFUL[name] = function
        return function

    return note


@forgets("T13 a store without floors waits for nothing that was sent")
def hasty_floor(patch: pytest.MonkeyPatch) -> None:
    right = Bare.raise_floor

    async def raise_floor(self: Bare, ts: int, *, wait: bool) -> None:
        await right(self, ts, wait=False)

    patch.setattr(Bare, "raise_floor", raise_floor)


@forgets("T13 a store without floors waits only for what it has sent itself")
def no_former_owner(patch: pytest.MonkeyPatch) -> None:
    right = Bare.__init__

    def init(self: Bare, store: RowStore, tables: Callable[[], list[str]], late_s: float) -> None:
        right(self, store, tables, late_s)
        self._sent.clear()

    patch.setattr(Bare, "__init__", init)


@forgets("G2 the watermark is not durable")
def no_watermark(patch: pytest.MonkeyPatch) -> None:
    published = oracle.published
    publish = oracle.Oracle.publish

    async def only_in_memory(self: oracle.Oracle, keep_s: Mapping[str, float]) -> Holder:
        async def is_so(store: RowStore) -> tuple[int, int, dict[str, int]]:
            return 1, self.holds.watermark, dict(self.holds.cuts)

        patch.setattr(oracle, "published", is_so)
        try:
            return await publish(self, keep_s)
        finally:
            patch.setattr(oracle, "published", published)

    patch.setattr(oracle.Oracle, "publish", only_in_memory)


@forgets("T13 the floor is not raised again")
def no_floor(patch: pytest.MonkeyPatch) -> None:
    declare = local.LocalOwner.declare

    async def stays(ts: int, *, wait: bool) -> None:
        await trio.lowlevel.checkpoint()

    async def without(self: local.LocalOwner) -> None:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(self.store, "raise_floor", stays)
            await declare(self)

    patch.setattr(local.LocalOwner, "declare", without)


@forgets("T15 pins are not read")
def no_pins(patch: pytest.MonkeyPatch) -> None:
    async def load(self: Pins) -> None:
        await trio.lowlevel.checkpoint()

    patch.setattr(Pins, "load", load)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("T2 commit_ts is drawn before the prewrites", Read),
        ("T3 a secondary commits before the primary", Swept),
        ("T4 a lost reply to the primary's commit is taken for an abort", Swept),
        ("T5 a rollback leaves no marker", Swept),
        ("T7 a prewrite ignores newer records", Swept),
        ("T7 a prewrite ignores rollback markers", Swept),
        ("T8 a commit does not check the lock", Swept),
        ("T9 reads skip locks", Read),
        ("N1 a roll-forward leaves no notify cell", Load),
        ("N2 a notify cell is removed without a run", Load),
        ("G1 the watermark passes an active transaction", Vacuumed),
        ("G2 collection deletes without settling locks first", Vacuumed),
        ("G2 collection settles locks and deletes versions one table at a time", VacuumedObserver),
        ("G3 a delete marker is removed while its column has a notify cell", VacuumedObserver),
        ("G3 a delete marker is removed, but not the versions that it hides", Vacuumed),
        ("G4 the newest ack is removed too", VacuumedObserver),
        ("G2 the watermark is not durable", Vacuumed),
        ("T13 the floor is never raised", Undone),
        ("T13 a store without floors waits for nothing that was sent", sweep.bare(Undone)),
        ("T14 nothing is validated", Serializable),
        ("T14 a shared lock is granted despite a newer record", ReadLocked),
        ("T14 a writer ignores traces", ReadLocked),
        ("T15 pins are not read", VacuumedPinned),
        ("V1 an owner's memory is written in a transaction of its own", Grouped),
        ("V3 a group that a member leaves is not signalled", Grouped),
        ("V8 a change of a right row does not signal its key", JoinedViews),
        ("V12 a run keeps the observers from running, and does not tell", GroupedInPlace),
    ],
)
def test_a_mutant_dies_of_one_fault(name: str, make: Callable[[], Scenario], monkeypatch: pytest.MonkeyPatch) -> None:
    (MUTANTS | SERIALIZABLE | LOCKS | VIEWED | FORGETFUL)[name](monkeypatch)
    dry = sweep.run(make)
    assert dry.problem or any(result.problem for result in sweep.deeper(make, dry, moments=1))


@pytest.mark.parametrize(
    ("name", "make", "found_last"),
    [
        ("T13 the floor is not raised again", Undone, "2:REPEAT:11,9:CRASH_AFTER:-1"),
        (
            "T13 a store without floors waits only for what it has sent itself",
            sweep.bare(Undone),
            "2:REPEAT:10,6:CRASH_AFTER:-1",
        ),
    ],
)
def test_a_mutant_dies_of_what_arrives_after_a_restart(
    name: str, make: Callable[[], Scenario], found_last: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # T13
    assert not sweep.run(make, schedules.parse(found_last)).problem
    FORGETFUL[name](monkeypatch)
    if sweep.run(make, schedules.parse(found_last)).problem:
        return  # by what found it last, for haste
    firsts = [first for first in sweep.firsts(make) if first[0].kind is Kind.REPEAT]
    assert any(result.problem for first in firsts for result in sweep.pairs(make, first))
