"""A client may die between any two mutations, and messages of the dead may still arrive: all or nothing, always.

Every mutation made is followed by `rows.check`: T1, T3, T5, T7 and T12 hold in between as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, event, given, strategies as st

from perco.protocol.commit import Commit
from perco.protocol.mutations import Header, Intent
from perco.protocol.records import DELETE, PUT, PUT_DATA, Cellref
from perco.storage import APPLIED, LOCK, Mutation, NoReply, Refused
from tests.support.rows import Rows, leftovers, memory_store
from tests.support.stepping import STEPS_MAX, Steps, commit_steps, crash, recovery_steps, run, sweep_steps

BALANCE, NAME = 1 << 16, 2 << 16
OPENING, TRANSFER, LATER = 1, 10, 50  # start timestamps
TOTAL = 600

ACCOUNTS = [
    Cellref("north", b"alice", BALANCE),
    Cellref("north", b"bob", BALANCE),
    Cellref("north", b"mallory", BALANCE),
    Cellref("south", b"alice", BALANCE),
    Cellref("south", b"quentin", BALANCE),
    Cellref("south", b"zoe", BALANCE),
]
# From the first two, all of the third (which is closed), to the others; one of them in a value of 300 bytes. A column
# that had no value gets one.
AFTER = {
    ACCOUNTS[0]: b"40",
    ACCOUNTS[1]: b"50",
    ACCOUNTS[2]: None,
    ACCOUNTS[3]: b"160".ljust(300),
    ACCOUNTS[4]: b"250",
    ACCOUNTS[5]: b"100",
}
CHANGED = ACCOUNTS[:5]


def header(start_ts: int, primary: Cellref) -> Header:
    return Header(start_ts, primary, 0, 0, "token")


def put(cell: Cellref, value: bytes | None) -> Intent:
    if value is None:
        return Intent(*cell, DELETE)
    if len(value) > 256:
        return Intent(*cell, PUT_DATA, b"data", (), (), value)
    return Intent(*cell, PUT, value)


class Counter:
    """The oracle: a number."""

    def __init__(self, last: int) -> None:
        self.last = last

    def draw(self) -> int:
        self.last += 1
        return self.last


def opened(*, groups: bool) -> Rows:
    """A bank whose six accounts hold a hundred each."""
    rows = Rows(memory_store(groups=groups))
    parts = rows.parts([put(cell, b"100") for cell in ACCOUNTS])
    run(commit_steps(Commit(header(OPENING, ACCOUNTS[0]), parts), rows, Counter(OPENING).draw), rows)
    rows.applied = 0
    return rows


def transfer(rows: Rows, clock: Counter) -> Steps:
    intents = [put(cell, AFTER[cell]) for cell in CHANGED]
    intents.append(put(Cellref("south", b"alice", NAME), b"Alice"))
    return commit_steps(Commit(header(TRANSFER, CHANGED[0]), rows.parts(intents)), rows, clock.draw)


def outcome(rows: Rows) -> bool:
    """Whether the transfer was made; asserts that it was made wholly or not at all, and cleared away."""
    assert not rows.locks()
    assert not leftovers(rows)
    values = {cell: rows.value(cell) for cell in ACCOUNTS}
    assert sum(int(value or 0) for value in values.values()) == TOTAL
    named = rows.value(Cellref("south", b"alice", NAME))
    made = values == AFTER
    assert made or set(values.values()) == {b"100"}
    assert named == (b"Alice" if made else None)
    return made


def steps_of(rows: Rows) -> int:
    return len(run(transfer(rows, Counter(TRANSFER)), rows))


@pytest.fixture(params=[True, False], ids=["groups", "rows"])
def groups(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


STEPS = {True: 8, False: 10}  # prewrites, the primary, the secondaries: by tablet, or by row
CRASHES = [(groups, n, made) for groups in (True, False) for n in range(STEPS[groups]) for made in (False, True)]


def crashed(groups: bool, after: int, made: bool) -> tuple[Rows, list[Mutation]]:
    """A bank in which a transfer stopped after so many mutations, and what had been sent."""
    rows = opened(groups=groups)
    sent = crash(transfer(rows, Counter(TRANSFER)), rows, after, made=made)
    assert sent is not None, "it ended before that step"
    return rows, sent


def primary_decided(groups: bool, after: int, made: bool) -> bool:
    """Whether the primary's commit had been made: the step after all prewrites."""
    parts = len(opened(groups=groups).parts([put(cell, b"") for cell in CHANGED]))
    return (after, made) >= (parts, True)


def test_the_sweep_covers_every_step(groups: bool) -> None:
    assert steps_of(opened(groups=groups)) == STEPS[groups]


def test_without_a_crash_it_is_made(groups: bool) -> None:
    rows = opened(groups=groups)
    steps_of(rows)
    assert outcome(rows)


@pytest.mark.parametrize(("groups", "after", "made"), CRASHES)
def test_a_crash_at_any_step_is_all_or_nothing(groups: bool, after: int, made: bool) -> None:  # T1 T3 T5
    rows, _ = crashed(groups, after, made)
    run(sweep_steps(rows), rows)
    assert outcome(rows) == primary_decided(groups, after, made)


@pytest.mark.parametrize(("groups", "after", "made"), CRASHES)
def test_recovering_one_cell_decides_for_all(groups: bool, after: int, made: bool) -> None:  # T5
    """The fate is the same whichever lock is met first; the others follow it."""
    rows, _ = crashed(groups, after, made)
    locks = len(rows.locks())
    fates = set()
    for first in range(locks):
        rows, _ = crashed(groups, after, made)
        cell, start_ts, lock = rows.locks()[first]
        steps = recovery_steps(start_ts, cell, lock, rows)
        try:
            mutation = next(steps)
            while True:
                mutation = steps.send(rows.apply(mutation))
        except StopIteration as end:
            fates.add(end.value > 0)
        run(sweep_steps(rows), rows)
        fates.add(outcome(rows))
    assert len(fates) <= 1


@pytest.mark.parametrize(("groups", "after", "made"), CRASHES)
def test_a_recovery_that_crashes_at_any_step_is_recovered(groups: bool, after: int, made: bool) -> None:  # T5 T6 T8
    for second, then_made in itertools.product(range(64), (False, True)):
        rows, _ = crashed(groups, after, made)
        again = crash(sweep_steps(rows), rows, second, made=then_made)
        run(sweep_steps(rows), rows)
        assert outcome(rows) == primary_decided(groups, after, made)
        if again is None:
            return
    raise AssertionError("recovery never ended")


@pytest.mark.parametrize(("groups", "after", "made"), CRASHES)
def test_what_arrives_late_changes_nothing(groups: bool, after: int, made: bool) -> None:  # T5 T6 T7
    """After a recovery every message of the dead client arrives once more: forwards, then backwards."""
    rows, sent = crashed(groups, after, made)
    run(sweep_steps(rows), rows)
    before = outcome(rows)
    for mutation in [*sent, *reversed(sent)]:
        rows.apply(mutation)
    run(sweep_steps(rows), rows)
    assert outcome(rows) == before == primary_decided(groups, after, made)


def test_a_marker_refuses_the_prewrite_that_comes_late(groups: bool) -> None:  # T5
    """Prewrites go in parallel: the primary's may be the last to arrive, when a reader has rolled back a secondary."""
    rows = opened(groups=groups)
    commit = Commit(header(TRANSFER, CHANGED[0]), rows.parts([put(cell, AFTER[cell]) for cell in CHANGED]))
    primary, *others = commit.prewrites()
    for mutation in others:
        assert rows.apply(mutation) is APPLIED
    run(sweep_steps(rows), rows)
    assert isinstance(rows.apply(primary), Refused)
    commit.prewrites_told([NoReply("lost"), *[APPLIED] * len(others)])
    [again] = commit.prewrites()
    assert isinstance(rows.apply(again), Refused)
    assert sum(int(rows.value(cell) or 0) for cell in ACCOUNTS) == TOTAL


@pytest.mark.parametrize("chosen", [frozenset(c) for n in range(6) for c in itertools.combinations(range(5), n)])
def test_any_part_of_the_prewrites_may_have_arrived(chosen: frozenset[int], groups: bool) -> None:  # T5 T7
    """... and the rest may come after the recovery, after which a recovery finds them."""
    rows = opened(groups=groups)
    commit = Commit(header(TRANSFER, CHANGED[0]), rows.parts([put(cell, AFTER[cell]) for cell in CHANGED]))
    prewrites = commit.prewrites()
    for i, mutation in enumerate(prewrites):
        if i in chosen:
            rows.apply(mutation)
    run(sweep_steps(rows), rows)
    for i, mutation in enumerate(prewrites):
        if i not in chosen:
            rows.apply(mutation)
    run(sweep_steps(rows), rows)
    values = [rows.value(cell) for cell in ACCOUNTS]
    assert values == [b"100"] * len(ACCOUNTS)
    assert not rows.locks()


@pytest.mark.parametrize(("groups", "after", "made"), CRASHES)
def test_a_writer_settles_what_it_meets(groups: bool, after: int, made: bool) -> None:  # T7
    """Another client that only writes gets through, and the cells that it did not touch are settled as they were."""
    rows, _ = crashed(groups, after, made)
    clock = Counter(LATER)
    commit = Commit(header(LATER, ACCOUNTS[1]), rows.parts([put(ACCOUNTS[1], b"7"), put(ACCOUNTS[3], b"8")]))
    run(commit_steps(commit, rows, clock.draw), rows)
    assert commit.commit_ts > LATER
    run(sweep_steps(rows), rows)
    assert (rows.value(ACCOUNTS[1]), rows.value(ACCOUNTS[3])) == (b"7", b"8")
    through = primary_decided(groups, after, made)
    for cell in (ACCOUNTS[0], ACCOUNTS[2], ACCOUNTS[4]):
        assert rows.value(cell) == (AFTER[cell] if through else b"100")


# ------------------------------------------------------------ lost replies


def with_faults(steps: Steps, rows: Rows, faults: Sequence[str]) -> tuple[int, int]:
    """Run a client; the n-th mutation meets the n-th fault. Returns (what it returned, how many faults fired)."""
    late: list[Mutation] = []
    fired = 0
    try:
        mutation = next(steps)
        for fault in itertools.chain(faults, itertools.repeat("", STEPS_MAX)):
            if fault:
                fired += 1
            if fault == "lost":
                mutation = steps.send(NoReply("lost before it arrived"))
            elif fault == "late":
                late.append(mutation)
                mutation = steps.send(NoReply("on its way"))
            elif fault == "no reply":
                rows.apply(mutation)
                mutation = steps.send(NoReply("its reply was lost"))
            elif fault == "twice":
                rows.apply(mutation)
                mutation = steps.send(rows.apply(mutation))
            elif fault == "now":
                for delayed in late:
                    rows.apply(delayed)
                late.clear()
                mutation = steps.send(rows.apply(mutation))
            else:
                mutation = steps.send(rows.apply(mutation))
    except StopIteration as end:
        for delayed in late:
            rows.apply(delayed)
        return end.value, fired
    raise AssertionError("it goes round in circles")


@pytest.mark.parametrize("fault", ["lost", "no reply", "late", "twice"])
@pytest.mark.parametrize(("groups", "at"), [(groups, n) for groups in (True, False) for n in range(STEPS[groups])])
def test_a_lost_reply_is_never_an_abort(groups: bool, fault: str, at: int) -> None:  # T4 T6
    """The client is told what happened, even if a mutation of any step is lost, delayed or made twice."""
    rows = opened(groups=groups)
    commit_ts, fired = with_faults(transfer(rows, Counter(TRANSFER)), rows, [""] * at + [fault])
    assert fired == 1
    assert commit_ts > TRANSFER, "nothing stood in the way, so it must get through"
    run(sweep_steps(rows), rows)
    assert outcome(rows)


FAULTS = st.lists(st.sampled_from(["", "lost", "no reply", "late", "twice", "now"]), max_size=25)


@given(groups=st.booleans(), faults=FAULTS, recovery=FAULTS)
def test_any_faults_leave_all_or_nothing(groups: bool, faults: list[str], recovery: list[str]) -> None:  # T4 T5 T6
    rows = opened(groups=groups)
    commit_ts, fired = with_faults(transfer(rows, Counter(TRANSFER)), rows, faults)
    assert commit_ts > TRANSFER
    event(f"{fired} faults")
    for cell, start_ts, lock in rows.locks():
        with_faults(recovery_steps(start_ts, cell, lock, rows), rows, recovery)
    run(sweep_steps(rows), rows)
    assert outcome(rows)


@given(
    groups=st.booleans(),
    after=st.integers(0, 7),
    made=st.booleans(),
    late=st.lists(st.integers(0, 9), max_size=12),
    recovery=FAULTS,
)
def test_the_dead_may_speak_while_others_recover(
    groups: bool, after: int, made: bool, late: list[int], recovery: list[str]
) -> None:  # T5 T6 T7 T8
    """Copies of a dead client's messages arrive between the steps of a recovery that loses replies itself."""
    rows = opened(groups=groups)
    sent = crash(transfer(rows, Counter(TRANSFER)), rows, after, made=made)
    assume(sent is not None)
    assert sent is not None
    for at in late:
        for cell, start_ts, lock in rows.locks()[:1]:
            with_faults(recovery_steps(start_ts, cell, lock, rows), rows, recovery)
        if at < len(sent):
            rows.apply(sent[at])
    run(sweep_steps(rows), rows)
    made_it = outcome(rows)
    assert made_it == primary_decided(groups, after, made)


def test_reads_that_met_a_lock_see_no_part(groups: bool) -> None:  # T9
    """At every step a fresh reader either finds a lock in its way or sees the whole."""
    rows = opened(groups=groups)
    steps = transfer(rows, Counter(TRANSFER))
    mutation = next(steps)
    seen = set()
    for _ in range(20):
        locked = {cell for cell, _, _ in rows.locks()}
        free = {cell: rows.value(cell) for cell in CHANGED if cell not in locked}
        if len(free) == len(CHANGED):
            seen.add(tuple(free.values()))
        elif {rows.value(cell) == AFTER[cell] for cell in free} == {True, False}:
            raise AssertionError("part old, part new, and the rest locked")
        try:
            mutation = steps.send(rows.apply(mutation))
        except StopIteration:
            break
    assert tuple(rows.value(cell) for cell in CHANGED) in {tuple(AFTER[cell] for cell in CHANGED)} | seen
    assert rows.read("north", b"alice", [(LOCK, BALANCE, 0, 1 << 50, 1)]) == [[]]
