"""Each step for a signal, as mutations on one row (N5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from perco.errors import Corruption
from perco.protocol import mutations
from perco.protocol.commit import MARKER_CHECK, Commit, State
from perco.protocol.mutations import Header, Intent
from perco.protocol.records import (
    BARE,
    SIGNAL,
    Cellref,
    ack_of,
    bare_column,
    is_bare,
    observed_column,
    observer_of,
    pack_proof,
    signal_of,
    unpack_lock,
    unpack_proof,
)
from perco.protocol.recovery import Aborted, Committed, Locked, Nothing, judge, primary_queries
from perco.storage import APPLIED, NOTIFY, PENDING, ROLLBACK, TRACE, WRITE, MemoryTablet, Mutation, Refused
from perco.storage.engine import MemoryBatch
from perco.storage.row import check_and_write, read_row

GROWN = 3 << 16
BARE_ = bare_column(GROWN)
ACK = ack_of(GROWN, 7)
PRIMARY = Cellref("t", b"r", BARE_)
HEADER = Header(5, PRIMARY, 0, 0, "me")
RAISED = Intent("t", b"r", GROWN, SIGNAL, b"", (7, 9))
PART = [Intent("t", b"r", BARE_, BARE), RAISED]


class Row(NamedTuple):
    tablet: MemoryTablet

    def apply(self, mutation: Mutation) -> object:
        batch = MemoryBatch(self.tablet.engine)
        verdict = check_and_write(batch, mutation, 0)
        batch.commit()
        return verdict

    def cells(self, group: str, *columns: int) -> list[tuple[int, int]]:
        """(column, ts)."""
        queries = [(group, column, 0, 1 << 50, 99) for column in columns]
        found = read_row(self.tablet.engine, b"r", queries)
        return [(column, ts) for column, cells in zip(columns, found, strict=True) for ts, _ in cells]

    def judged(self) -> object:
        return judge(PRIMARY, 5, read_row(self.tablet.engine, b"r", primary_queries(PRIMARY, 5)))


@pytest.fixture
def row() -> Row:
    return Row(MemoryTablet("t", b""))


def header(start_ts: int) -> Header:
    return HEADER._replace(start_ts=start_ts)


def test_columns_and_their_bare_ones() -> None:
    assert (is_bare(BARE_), is_bare(GROWN), is_bare(ACK)) == (True, False, False)
    assert bare_column(ACK) == BARE_, "a run's removal has the same"
    assert (signal_of(BARE_), signal_of(ACK), observer_of(BARE_), observed_column(BARE_)) == (GROWN, ACK, 0, BARE_)


def test_pending_then_final(row: Row) -> None:
    assert row.apply(mutations.prewrite(HEADER, PART, again=False)) is APPLIED
    assert row.cells(PENDING, GROWN, BARE_) == [(GROWN, 5), (BARE_, 5)]
    assert row.cells(NOTIFY, ack_of(GROWN, 7), ack_of(GROWN, 9)) == []
    assert isinstance(row.judged(), Locked)
    assert row.apply(mutations.commit(HEADER, PART, 8)) is APPLIED
    assert row.cells(PENDING, GROWN, BARE_) == []
    assert row.cells(NOTIFY, ack_of(GROWN, 7), ack_of(GROWN, 9)) == [(ack_of(GROWN, 7), 8), (ack_of(GROWN, 9), 8)]
    assert row.cells(TRACE, BARE_) == [(BARE_, 5)]
    assert row.judged() == Committed(8)
    assert row.cells(WRITE, GROWN, BARE_) == []


def test_nothing_keeps_a_signal_out(row: Row) -> None:
    for start_ts in (5, 3, 9):
        assert row.apply(mutations.prewrite(header(start_ts), PART, again=False)) is APPLIED
    assert row.apply(mutations.commit(header(9), PART, 12)) is APPLIED
    assert row.apply(mutations.one_step(header(4), PART, 13)) is APPLIED
    assert row.apply(mutations.commit(header(3), PART, 14)) is APPLIED
    assert row.cells(NOTIFY, ACK) == [(ACK, 14), (ACK, 13), (ACK, 12)]


def test_made_final_only_if_it_is_still_pending(row: Row) -> None:  # T8
    row.apply(mutations.prewrite(HEADER, PART, again=False))
    assert row.apply(mutations.release(HEADER, PART, marker=True)) is APPLIED
    assert row.apply(mutations.commit(HEADER, PART, 8)) == Refused(0, 0)
    assert row.apply(mutations.commit(HEADER, [RAISED], 8)) == Refused(0, 0)
    assert (row.cells(NOTIFY, ACK), row.cells(PENDING, GROWN, BARE_)) == ([], [])
    assert row.judged() == Aborted()


def test_a_stranger_makes_it_final_or_removes_it(row: Row) -> None:  # N1
    entry = mutations.prewrite(HEADER, [RAISED], again=False).rows[0][2][0][3]
    assert entry is not None
    lock, cell = unpack_lock(entry, 5), Cellref("t", b"r", GROWN)
    assert (lock.kind, lock.primary, lock.observers) == (SIGNAL, PRIMARY, (7, 9))
    row.apply(mutations.prewrite(HEADER, [RAISED], again=False))
    assert row.apply(mutations.roll_forward(cell, 5, lock, 8)) is APPLIED
    assert row.apply(mutations.roll_forward(cell, 5, lock, 8)) == Refused(0, 0)
    assert (row.cells(NOTIFY, ACK), row.cells(PENDING, GROWN)) == ([(ACK, 8)], [])
    row.apply(mutations.prewrite(header(6), [RAISED], again=False))
    assert row.apply(mutations.roll_back_secondary(cell, 6, lock)) is APPLIED
    assert (row.cells(NOTIFY, ACK), row.cells(PENDING, GROWN)) == ([(ACK, 8)], [])


@pytest.mark.parametrize("one_step", [True, False])
def test_a_marker_refuses_its_own_bare_primary_and_no_other(row: Row, *, one_step: bool) -> None:  # T5, T7
    def send(start_ts: int) -> object:
        if one_step:
            return row.apply(mutations.one_step(header(start_ts), PART, start_ts + 1))
        return row.apply(mutations.prewrite(header(start_ts), PART, again=False))

    assert row.judged() == Nothing()
    assert row.apply(mutations.put_marker(PRIMARY, 5)) is APPLIED
    assert row.judged() == Aborted()
    refused = send(5)
    assert refused == Refused(0, 0)
    assert send(6) is APPLIED
    commit = Commit(HEADER, [PART])
    assert isinstance(refused, Refused)
    assert commit.refused_cell(0, refused) == (PART[0], MARKER_CHECK)


def test_a_marker_is_refused_by_the_pending_primary_and_by_its_trace_and_by_no_other(row: Row) -> None:  # T5 (b)
    row.apply(mutations.prewrite(HEADER, PART, again=False))
    assert row.apply(mutations.put_marker(PRIMARY, 5)) == Refused(0, 0)
    row.apply(mutations.commit(HEADER, PART, 8))
    assert row.apply(mutations.put_marker(PRIMARY, 5)) == Refused(0, 1)
    assert row.apply(mutations.put_marker(PRIMARY, 4)) is APPLIED
    assert row.cells(ROLLBACK, BARE_) == [(BARE_, 4)]


def test_the_primary_of_the_dead_is_rolled_back_under_its_check(row: Row) -> None:  # T5 (a)
    row.apply(mutations.prewrite(HEADER, PART, again=False))
    judged = row.judged()
    assert isinstance(judged, Locked)
    assert judged.lock.kind == BARE
    assert row.apply(mutations.roll_back_primary(PRIMARY, 5, judged.lock)) is APPLIED
    assert row.judged() == Aborted()


@pytest.mark.parametrize("one_step", [True, False])
def test_what_a_run_has_seen_goes_with_its_commit_at_exactly_its_timestamps(row: Row, *, one_step: bool) -> None:  # N2
    for start_ts in (2, 3, 6):
        row.apply(mutations.one_step(header(start_ts), PART, start_ts + 1))
    seen = [PART[0], Intent("t", b"r", ACK, SIGNAL, b"", (), (4, 3))]
    if one_step:
        assert row.apply(mutations.one_step(HEADER, seen, 8)) is APPLIED
    else:
        assert row.apply(mutations.prewrite(HEADER, seen, again=False)) is APPLIED
        assert row.cells(NOTIFY, ACK) == [(ACK, 7), (ACK, 4), (ACK, 3)]
        assert row.apply(mutations.commit(HEADER, seen, 8)) is APPLIED
    assert row.cells(NOTIFY, ACK) == [(ACK, 7)]
    with pytest.raises(AssertionError, match="N2"):
        mutations.one_step(HEADER, [seen[1]._replace(covers=(6,))], 8)


@pytest.mark.parametrize(
    ("markers", "value"), [([(5, b"")], pack_proof(8)), ([], pack_proof(5)), ([], b"junk"), ([], b"\x05" + bytes(8))]
)
def test_a_trace_that_contradicts_is_corruption(markers: Sequence[tuple[int, bytes]], value: bytes) -> None:  # T5, T1
    with pytest.raises(Corruption):
        judge(PRIMARY, 5, [[], markers, [(5, value)]])
    assert unpack_proof(pack_proof(8)) == 8


def test_only_what_is_written_or_bare_leads() -> None:  # T12
    with pytest.raises(AssertionError, match="T1, N5"):
        Commit(HEADER._replace(primary=Cellref("t", b"r", GROWN)), [[RAISED]])
    commit = Commit(HEADER, [PART], one_step=True)
    assert commit.state is State.DRAW
    assert commit.cells == [("t", b"r", -5)], "C2: entered under a name of its own, so that no other waits for it"
