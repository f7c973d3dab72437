"""The fate of a lock's transaction, judged from its primary; and the mutations that settle it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from perco.errors import Corruption, StoreFull, Unavailable
from perco.protocol.mutations import Header, Intent, prewrite
from perco.protocol.records import PUT, PUT_DATA, Cellref, Lock, pack_lock, pack_record
from perco.protocol.recovery import Aborted, Committed, Locked, Nothing, Recovery, Step, judge, primary_queries
from perco.storage import ABSENT, APPLIED, LOCK, PRESENT, ROLLBACK, TS_MAX, WRITE, Failed, NoReply, Refused

START = 5
PRIMARY, SECONDARY = Cellref("t", b"p", 1 << 16), Cellref("t", b"s", 1 << 16)
LOCKED = Lock(PUT, PRIMARY, b"v", (), (), 0, 0, "token")
LOCK_CELL = (START, pack_lock(LOCKED))
OWN = (9, pack_record(PUT, START, b"v"))
OTHERS = (9, pack_record(PUT, 7, b"w"))
MARKER = (START, b"")


@pytest.mark.parametrize(
    ("locks", "markers", "records", "expected"),
    [
        ([], [], [OWN], Committed(9)),  # T1
        ([], [], [OTHERS], Aborted()),  # a later writer was let in, past no lock: T7
        ([], [MARKER], [], Aborted()),
        ([], [MARKER], [OTHERS], Aborted()),
        ([LOCK_CELL], [], [], Locked(LOCKED)),
        ([], [], [], Nothing()),
    ],
)
def test_the_primary_tells_the_fate(locks: list, markers: list, records: list, expected: object) -> None:  # T1 T4
    assert judge(PRIMARY, START, [locks, markers, records]) == expected


def test_the_record_is_looked_at_before_the_lock() -> None:  # L1
    assert judge(PRIMARY, START, [[LOCK_CELL], [], [OWN]]) == Committed(9)


def test_a_marker_beside_its_own_record_is_corruption() -> None:  # T5
    with pytest.raises(Corruption, match="T5"):
        judge(PRIMARY, START, [[], [MARKER], [OWN]])


def test_a_commit_at_its_own_start_is_corruption() -> None:  # T1
    with pytest.raises(Corruption, match="T1"):
        judge(PRIMARY, START, [[], [], [(START, OWN[1])]])


@pytest.mark.parametrize("optimized", [[], ["-O"]])
def test_it_is_corruption_without_assertions_too(optimized: list[str]) -> None:  # T5, T1
    damaged = [[], [MARKER], [OWN]], [[], [], [(START, OWN[1])]], [[], [], [(9, b"junk")]], [[(START, b"x")], [], []]
    program = f"""
from perco.errors import Corruption
from perco.protocol.records import Cellref
from perco.protocol.recovery import judge
for cells in {damaged!r}:
    try:
        judge(Cellref(*{tuple(PRIMARY)!r}), {START}, cells)
    except Corruption:
        continue
    raise SystemExit("judged")
"""
    subprocess.run([sys.executable, *optimized, "-c", program], check=True)


def test_one_seek_finds_the_record() -> None:  # T1
    """The oldest record at or above start_ts: only the transaction's own can be the first past its lock."""
    assert primary_queries(PRIMARY, START) == [
        (LOCK, PRIMARY.column, START, START, 1),
        (ROLLBACK, PRIMARY.column, START, START, 1),
        (WRITE, PRIMARY.column, START, TS_MAX, -1),
    ]


def test_bytes_that_are_no_record_stop_it() -> None:
    with pytest.raises(Corruption):
        judge(PRIMARY, START, [[], [], [(9, b"\x07nonsense")]])


def found(cell: Cellref = SECONDARY) -> Recovery:
    return Recovery(START, PRIMARY, [(cell, LOCKED)])


def test_a_live_owner_is_left_alone() -> None:  # L1 L2
    for cells in ([[LOCK_CELL], [], []], [[], [], []]):
        recovery = found()
        recovery.asked(cells, alive=True)
        assert recovery.step is Step.WAIT
        assert recovery.fate is None


def test_a_live_owner_that_has_committed_is_rolled_forward_all_the_same() -> None:  # L1
    recovery = found()
    recovery.asked([[], [], [OWN]], alive=True)
    assert recovery.step is Step.FORWARD
    assert recovery.fate == 9


def test_rolled_forward_under_the_check_that_the_lock_is_there() -> None:  # T8
    recovery = found()
    recovery.asked([[], [], [OWN]], alive=False)
    [mutation] = recovery.clearing()
    [(row, checks, writes)] = mutation.rows
    assert row == SECONDARY.row
    assert list(checks) == [(PRESENT, LOCK, SECONDARY.column, START, START)]
    assert (WRITE, SECONDARY.column, 9, pack_record(PUT, START, b"v")) in writes
    assert (LOCK, SECONDARY.column, START, None) in writes


def test_a_dead_primary_is_rolled_back_first_with_a_marker() -> None:  # T5a T8
    recovery = found()
    recovery.asked([[LOCK_CELL], [], []], alive=False)
    assert recovery.step is Step.ROLL_PRIMARY
    assert recovery.fate is None
    mutation = recovery.decision()
    [(row, checks, writes)] = mutation.rows
    assert row == PRIMARY.row
    assert list(checks) == [(PRESENT, LOCK, PRIMARY.column, START, START)]
    assert (ROLLBACK, PRIMARY.column, START, b"") in writes
    recovery.decided(APPLIED)
    assert recovery.fate == 0
    [mutation] = recovery.clearing()
    [(row, checks, writes)] = mutation.rows
    assert row == SECONDARY.row
    assert list(checks) == [(PRESENT, LOCK, SECONDARY.column, START, START)]
    assert list(writes) == [(LOCK, SECONDARY.column, START, None)]  # T5c: no marker


def test_where_no_lock_is_a_marker_keeps_it_from_coming_late() -> None:  # T5b T13
    recovery = found()
    recovery.asked([[], [], []], alive=False)
    assert recovery.step is Step.MARK
    mutation = recovery.decision()
    [(row, checks, writes)] = mutation.rows
    assert row == PRIMARY.row
    assert set(checks) == {(ABSENT, LOCK, PRIMARY.column, START, START), (ABSENT, WRITE, PRIMARY.column, START, TS_MAX)}
    assert list(writes) == [(ROLLBACK, PRIMARY.column, START, b"")]
    assert mutation.floor_ts == START


@pytest.mark.parametrize("cells", [[[LOCK_CELL], [], []], [[], [], []]])
@pytest.mark.parametrize("verdict", [Refused(0, 0), NoReply("lost")])
def test_refused_or_lost_the_primary_is_read_again(cells: list, verdict: Refused | NoReply) -> None:  # T5 T6
    recovery = found()
    recovery.asked(cells, alive=False)
    recovery.decided(verdict)
    assert recovery.step is Step.ASK
    recovery.asked([[], [], [OWN]], alive=False)
    assert recovery.fate == 9


def test_the_primary_itself_is_cleared_by_the_decision() -> None:  # T5a
    recovery = found(PRIMARY)
    recovery.asked([[LOCK_CELL], [], []], alive=False)
    recovery.decided(APPLIED)
    assert recovery.clearing() == []


def test_a_long_value_goes_with_its_lock() -> None:  # T5
    lock = LOCKED._replace(kind=PUT_DATA, body=b"data:raw")
    recovery = Recovery(START, PRIMARY, [(SECONDARY, lock)])
    recovery.asked([[], [MARKER], []], alive=False)
    [mutation] = recovery.clearing()
    assert ("data:raw", SECONDARY.column, START, None) in mutation.rows[0][2]


def test_an_unwritable_store_leaves_the_fate_open() -> None:  # S4
    recovery = found()
    recovery.asked([[LOCK_CELL], [], []], alive=False)
    recovery.decided(Failed(StoreFull("here", "full")))
    assert recovery.fate is None
    assert isinstance(recovery.failure, StoreFull)


def test_a_store_that_never_answers_is_given_up() -> None:
    recovery = found()
    for _ in range(1000):
        if recovery.failure is not None:
            break
        recovery.asked([[LOCK_CELL], [], []], alive=False)
        recovery.decided(NoReply("lost"))
    assert isinstance(recovery.failure, Unavailable)
    assert recovery.fate is None


def test_a_known_fate_stands_although_it_could_not_be_written() -> None:  # S4
    for verdict in (Failed(StoreFull("here", "full")), NoReply("lost"), Refused(0, 0)):
        recovery = found()
        recovery.asked([[], [], [OWN]], alive=False)
        recovery.cleared([verdict])
        assert recovery.fate == 9
        assert (recovery.failure is None) == isinstance(verdict, Refused)


def test_all_that_a_stranger_needs_is_in_the_lock() -> None:  # N1
    """Rolled forward from its lock, a cell is what its own commit would have made of it."""
    from perco.protocol.mutations import commit
    from perco.protocol.records import unpack_lock

    header = Header(START, PRIMARY, 3, 2, "token")
    intent = Intent(*SECONDARY, PUT_DATA, b"data:raw", (1, 7), (2, 4), b"long")
    [(_, _, writes)] = prewrite(header, [intent], again=False).rows
    packed = next(value for group, _, _, value in writes if group == LOCK)
    assert packed is not None
    recovery = Recovery(START, PRIMARY, [(SECONDARY, unpack_lock(packed))])
    recovery.asked([[], [], [OWN]], alive=False)
    [mutation] = recovery.clearing()
    assert mutation == commit(header, [intent], 9)


def test_below_the_floor_no_trace_means_no_commit_and_no_marker_is_needed() -> None:  # T13
    recovery = Recovery(START, PRIMARY, [(SECONDARY, LOCKED)])
    recovery.asked([[], [], []], alive=False)
    recovery.decided(Refused(0, -1))
    assert recovery.step is Step.ASK, "it may have committed between the look and the floor: the primary is read again"
    recovery.asked([[], [], []], alive=False)
    assert recovery.step is Step.BACK
    assert recovery.fate == 0
    assert not recovery.conclusive, "without a lock in hand, it cannot be told from a collected one (T4)"
    assert [mutation.rows[0][0] for mutation in recovery.clearing()] == [SECONDARY.row]


def test_a_commit_that_came_before_the_floor_is_rolled_forward() -> None:  # T13
    recovery = Recovery(START, PRIMARY, [(SECONDARY, LOCKED)])
    recovery.asked([[], [], []], alive=False)
    recovery.decided(Refused(0, -1))
    recovery.asked([[], [], [OWN]], alive=False)
    assert (recovery.step, recovery.fate, recovery.conclusive) == (Step.FORWARD, 9, True)
