"""Does this row need this observer? The answer for every state of a row, and for every schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import assume, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from perco.protocol import claim, mutations
from perco.protocol.claim import Gone, Handled, InTheWay, Run, claim_queries, decide
from perco.protocol.mutations import Header, Intent
from perco.protocol.records import ACK, PUT, Cellref, ack_of, column_of, pack_cause, pack_record
from perco.storage import APPLIED, FAILED_LIST, LOCK, NOTIFY, WRITE, Cell, Mutation, Verdict
from perco.storage.engine import MemoryEngine
from perco.storage.keys import cell_key, escape
from perco.storage.row import check_and_write, read_row

COLUMN = column_of(1)
TWO = (1, 2)  # numbers of the observers of the column
START = 100


def cells(
    *notified: int,
    ack: tuple[int, int] | None = None,
    newest: int | None = None,
    ack_lock: int | None = None,
    lock: int | None = None,
    failed: int | None = None,
    causes: dict[int, tuple[int, int]] | None = None,
) -> list[list[Cell]]:
    """What `claim_queries` find: notify cells at these timestamps, ack (commit_ts, the run's start_ts), ..."""
    causes = causes or {}
    return [
        [(ts, pack_cause(*causes.get(ts, (ts, 0)))) for ts in sorted(notified, reverse=True)],
        [] if ack_lock is None else [(ack_lock, b"ack's")],
        [] if ack is None else [(ack[0], pack_record(ACK, ack[1], b""))],
        [] if lock is None else [(lock, b"cell's")],
        [] if newest is None else [(newest, pack_record(PUT, newest - 1, b"v"))],
        [] if failed is None else [(failed, b"failed")],
    ]


RUNS = {
    "the first change": (cells(5, newest=5), (5,), 0),
    "a second change after an acknowledged one": (cells(20, ack=(10, 7), newest=20), (20,), 0),
    # The run that began at 7 could not see it, although it committed later.
    "a change made during the last run": (cells(8, ack=(10, 7), newest=8), (8,), 0),
    "five changes at once": (cells(5, 6, 7, 8, 9, newest=9), (9, 8, 7, 6, 5), 4),
    "old cells beside a new one do not count as collapsed": (cells(5, 6, 20, ack=(10, 7), newest=20), (20, 6, 5), 0),
    "two new ones beside an old one": (cells(5, 20, 21, ack=(10, 7), newest=21), (21, 20, 5), 1),
    # Registered with what was there already, or the notify cell of the newest write is gone.
    "an old notify cell and a newer write": (cells(5, newest=50), (5,), 0),
    "a change at the very start": (cells(START, newest=START), (START,), 0),
}


@pytest.mark.parametrize(("found", "covers", "collapsed"), RUNS.values(), ids=RUNS)
def test_an_observer_runs_for_a_change_newer_than_the_pointer(  # N3, N4
    found: list[list[Cell]], covers: tuple[int, ...], collapsed: int
) -> None:
    verdict = decide(found, START)
    assert isinstance(verdict, Run)
    assert verdict.covers == covers
    assert verdict.collapsed == collapsed


OTHERS = {
    "nothing was notified": (cells(), Gone()),
    "somebody else has acknowledged it": (cells(ack=(10, 7), newest=5), Gone()),
    "a write without a notify cell is nobody's business": (cells(newest=5), Gone()),
    "no notify cell, so a lock is not in the way": (cells(lock=50, ack_lock=60), Gone()),
    "the pointer covers it": (cells(5, ack=(10, 7), newest=5), Handled((5,))),
    "the pointer covers all of them": (cells(5, 6, 2, ack=(10, 7), newest=6), Handled((6, 5, 2))),
    "a notify cell without a write": (cells(5), Handled((5,))),
}


@pytest.mark.parametrize(("found", "verdict"), OTHERS.values(), ids=OTHERS)
def test_an_observer_does_not_run_for_what_an_earlier_run_saw(  # N3
    found: list[list[Cell]], verdict: Gone | Handled
) -> None:
    assert decide(found, START) == verdict


LOCKED = {
    "a twin is committing": (cells(5, newest=5, ack_lock=90), True, 90, b"ack's"),
    "a writer is committing": (cells(5, newest=5, lock=91), False, 91, b"cell's"),
    "both: the ack first, it may make the rest needless": (
        cells(5, newest=5, ack_lock=90, lock=91),
        True,
        90,
        b"ack's",
    ),
    "even if all seems handled": (cells(5, newest=5, ack=(10, 7), lock=91), False, 91, b"cell's"),
}


@pytest.mark.parametrize(("found", "ack", "start_ts", "lock"), LOCKED.values(), ids=LOCKED)
def test_a_lock_must_be_settled_before_one_can_tell(  # N3 under T9
    found: list[list[Cell]], ack: bool, start_ts: int, lock: bytes
) -> None:
    verdict = decide(found, START)
    assert isinstance(verdict, InTheWay)
    assert verdict.ack is ack
    assert verdict.lock == (start_ts, lock)


def test_only_what_was_there_at_the_start_is_asked_for() -> None:  # N2
    queries = claim_queries(COLUMN, ack_of(COLUMN, 2), START)
    assert {(low, high) for _, _, low, high, _ in queries} == {(0, START)}
    assert [(group, column) for group, column, *_ in queries] == [
        (NOTIFY, COLUMN | 2),
        (LOCK, COLUMN | 2),
        (WRITE, COLUMN | 2),
        (LOCK, COLUMN),
        (WRITE, COLUMN),
        (FAILED_LIST, COLUMN | 2),
    ]


def test_a_notify_cell_after_the_start_is_never_covered() -> None:  # N2
    with pytest.raises(AssertionError, match="N2"):
        decide(cells(START + 1, newest=5), START)


CAUSES = [
    pytest.param({5: (5, 0)}, 5, 1, id="from outside"),
    pytest.param({5: (3, 4)}, 3, 5, id="one link further"),
    # A task that waits for the root at 2 must not be told before this run is through.
    pytest.param({5: (4, 1), 9: (2, 7)}, 2, 8, id="the earliest root, the greatest depth"),
    pytest.param({5: (2, 7), 9: (9, 0)}, 2, 8, id="whichever is newer"),
]


@pytest.mark.parametrize(("causes", "root", "depth"), CAUSES)
def test_the_cause_travels_along(causes: dict[int, tuple[int, int]], root: int, depth: int) -> None:  # N9
    verdict = decide(cells(*causes, newest=max(causes), causes=causes), START)
    assert isinstance(verdict, Run)
    assert (verdict.root, verdict.depth) == (root, depth)


def test_so_many_cells_and_no_more_go_with_one_run() -> None:  # N2, N4
    engine = MemoryEngine()
    many = claim.COVERS_MAX + 10
    for ts in range(1, many + 1):
        engine.put(NOTIFY, *_cell(ack_of(COLUMN, 1), ts, pack_cause(ts, 0)))
        engine.put(WRITE, *_cell(COLUMN, ts, pack_record(PUT, ts, b"")))
    verdict = decide(read_row(engine, b"r", claim_queries(COLUMN, ack_of(COLUMN, 1), many)), many)
    assert isinstance(verdict, Run)
    assert verdict.covers == tuple(range(many, 10, -1))
    assert verdict.collapsed == claim.COVERS_MAX - 1


def _cell(column: int, ts: int, value: bytes) -> tuple[bytes, bytes]:
    return cell_key(escape(b"r"), column, ts), value


# ---------------------------------------------------------------- every schedule


@dataclass(slots=True)
class Attempt:
    """A run that is under way, and how far."""

    observer: int
    start_ts: int
    covers: tuple[int, ...]
    collapsed: int
    pointer: int
    seen: int
    root: int
    held: bool = False

    def intent(self) -> Intent:
        return Intent("t", b"r", ack_of(COLUMN, self.observer), ACK, b"", (), self.covers)

    def header(self) -> Header:
        primary = Cellref("t", b"r", ack_of(COLUMN, self.observer))
        return Header(self.start_ts, primary, self.root, 1, "token")


@dataclass(slots=True)
class Handling:
    """Which changes each committed run took with it: those within (pointer, start_ts]."""

    runs: list[tuple[int, int]] = field(default_factory=list)
    collapsed: int = 0


class OneRow(RuleBasedStateMachine):
    """Writers, and any number of runs of two observers, in any order, over one row of the real store.

    N2, N3, N4, N11: in every schedule, each change is in exactly one committed run of each observer, which saw the
    newest value; and at the end no notify cell is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine = MemoryEngine()
        self.ts = 0
        self.changes: list[int] = []
        self.writing: tuple[Header, Intent] | None = None
        self.attempts: list[Attempt] = []
        self.tidying: list[tuple[int, tuple[int, ...]]] = []
        self.handled = {observer: Handling() for observer in TWO}

    def draw(self) -> int:
        self.ts += 1
        return self.ts

    def apply(self, mutation: Mutation) -> Verdict:
        return check_and_write(self.engine, mutation, 0)

    @initialize()
    def begin(self) -> None:
        self.write()

    # ------------------------------------------------------------ writers

    @rule()
    def prewrite_change(self) -> None:
        start_ts = self.draw()
        header = Header(start_ts, Cellref("t", b"r", COLUMN), 0, 0, "token")
        intent = Intent("t", b"r", COLUMN, PUT, b"v", TWO)
        if self.apply(mutations.prewrite(header, [intent], again=False)) is APPLIED:
            assert self.writing is None, "T7: two locks on one cell"
            self.writing = header, intent

    @precondition(lambda self: self.writing)
    @rule()
    def commit_change(self) -> None:
        assert self.writing is not None
        header, intent = self.writing
        commit_ts = self.draw()
        assert self.apply(mutations.commit(header, [intent], commit_ts)) is APPLIED
        self.changes.append(commit_ts)
        self.writing = None

    @rule()
    def write(self) -> None:
        if self.writing is None:
            self.prewrite_change()
        self.commit_change()

    # ------------------------------------------------------------ runs

    @rule(observer=st.sampled_from(TWO))
    def begin_run(self, observer: int) -> None:
        start_ts = self.draw()
        ack = ack_of(COLUMN, observer)
        found = read_row(self.engine, b"r", claim_queries(COLUMN, ack, start_ts))
        match decide(found, start_ts):
            case Run(covers, root, _, collapsed):
                pointer = max((start for _, start in self.handled[observer].runs), default=0)
                seen = max(ts for ts in self.changes if ts <= start_ts)
                assert root == min(covers)
                self.attempts.append(Attempt(observer, start_ts, covers, collapsed, pointer, seen, root))
            case Handled(covers):
                self.tidying.append((ack, covers))
            case Gone():
                unseen = [ts for ts in self.changes if self._run_of(observer, ts) is None]
                assert not unseen, "N1: a change without a notify cell that no run has seen"

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def prewrite_run(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        assume(not attempt.held)
        verdict = self.apply(mutations.prewrite(attempt.header(), [attempt.intent()], again=False))
        if verdict is APPLIED:
            attempt.held = True
        else:
            self.attempts.remove(attempt)

    @precondition(lambda self: any(attempt.held for attempt in self.attempts))
    @rule()
    def commit_run(self) -> None:
        held = [attempt for attempt in self.attempts if attempt.held]
        for attempt in held:
            self._commit(attempt)

    @precondition(lambda self: any(attempt.held for attempt in self.attempts))
    @rule()
    def abort_run(self) -> None:
        attempt = next(attempt for attempt in self.attempts if attempt.held)
        released = mutations.release(attempt.header(), [attempt.intent()], marker=True)
        assert self.apply(released) is APPLIED
        self.attempts.remove(attempt)

    @precondition(lambda self: self.tidying)
    @rule(data=st.data())
    def tidy(self, data: st.DataObject) -> None:
        ack, covers = self.tidying.pop(data.draw(st.integers(0, len(self.tidying) - 1)))
        self.apply(Mutation("t", ((b"r", (), tuple((NOTIFY, ack, ts, None) for ts in covers)),)))

    def _commit(self, attempt: Attempt) -> None:
        commit_ts = self.draw()
        assert self.apply(mutations.commit(attempt.header(), [attempt.intent()], commit_ts)) is APPLIED
        self.attempts.remove(attempt)
        handling = self.handled[attempt.observer]
        newer = [start for _, start in handling.runs if start > attempt.pointer]
        assert not newer, "N3: the pointer moved between this run's read and its commit"
        assert attempt.seen == max(ts for ts in self.changes if ts <= attempt.start_ts), "N4: it saw the newest"
        handling.runs.append((attempt.pointer, attempt.start_ts))
        handling.collapsed += attempt.collapsed

    def _run_of(self, observer: int, change: int) -> tuple[int, int] | None:
        found = [run for run in self.handled[observer].runs if run[0] < change <= run[1]]
        assert len(found) <= 1, "N3: more than one run for a change"
        return found[0] if found else None

    def teardown(self) -> None:
        if self.writing is not None:
            self.commit_change()
        for attempt in [attempt for attempt in self.attempts if attempt.held]:
            self._commit(attempt)
        self.attempts.clear()
        for observer in TWO:
            for _ in range(len(self.changes) + 2):
                self.begin_run(observer)
                for attempt in list(self.attempts):
                    assert self.apply(mutations.prewrite(attempt.header(), [attempt.intent()], again=False)) is APPLIED
                    self._commit(attempt)
                while self.tidying:
                    ack, covers = self.tidying.pop()
                    self.apply(Mutation("t", ((b"r", (), tuple((NOTIFY, ack, ts, None) for ts in covers)),)))
            for change in self.changes:
                assert self._run_of(observer, change) is not None, f"{change} was never seen by {observer}"
            handling = self.handled[observer]
            assert len(handling.runs) + handling.collapsed == len(self.changes)  # N4
        assert self.engine.entries(NOTIFY) == 0


OneRow.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestEverySchedule = OneRow.TestCase
