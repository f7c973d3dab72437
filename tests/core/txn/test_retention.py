"""The part of a row's history that goes: random histories of writes, deletes, long values, rollbacks and observer runs,
cut at random. Reads above the cut see what they saw, no observer runs again, and no version that could go is left."""

from __future__ import annotations

import pytest
from hypothesis import event, given, strategies as st

from perco.errors import UsageError
from perco.protocol.claim import Gone, Handled, Run, claim_queries, decide
from perco.protocol.records import ACK, DELETE, PUT, PUT_DATA, pack_cause, pack_record, pack_trace
from perco.protocol.retention import Keep, Removed, Waste, is_lean, waste_of
from perco.protocol.snapshot import InData, Missing, Value, data_query, look, queries_for
from perco.storage import (
    APPLIED,
    DATA,
    NOTIFY,
    ROLLBACK,
    TRACE,
    TS_MAX,
    WRITE,
    Applied,
    Mutation,
    Refused,
    ScanCell,
    ScanQuery,
    ScanRequest,
    Write,
)
from perco.storage.engine import MemoryBatch, MemoryEngine
from perco.storage.row import check_and_write, read_row, scan_rows

A, B = 1 << 16, 2 << 16  # A is observed by 1 and 2, B by nobody
ACKS = {A: (A | 1, A | 2), B: ()}
ROW = b"row"
LONG = b"x" * 300


class History:
    """One row, written as transactions and observer runs would."""

    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self.last = 0

    def apply(self, mutation: Mutation) -> Applied | Refused:
        batch = MemoryBatch(self.engine)
        verdict = check_and_write(batch, mutation, 0)
        batch.commit()
        return verdict

    def make(self, *writes: Write) -> None:
        assert self.apply(Mutation("t", ((ROW, (), writes),))) is APPLIED

    def draw(self) -> int:
        self.last += 1
        return self.last

    def write(self, column: int, kind: int) -> None:
        start_ts, commit_ts = self.draw(), self.draw()
        body = b"data" if kind == PUT_DATA else b"%d" % commit_ts if kind == PUT else b""
        writes: list[Write] = [(WRITE, column, commit_ts, pack_record(kind, start_ts, body))]
        if kind == PUT_DATA:
            writes.append((DATA, column, start_ts, b"%d" % commit_ts + LONG))
        writes += [(NOTIFY, ack, commit_ts, pack_cause(commit_ts, 0)) for ack in ACKS[column]]
        self.make(*writes)

    def roll_back(self, column: int) -> None:
        self.make((ROLLBACK, column, self.draw(), b""))

    def read_under_lock(self, column: int) -> None:
        start_ts, commit_ts = self.draw(), self.draw()
        self.make((TRACE, column, commit_ts, pack_trace(start_ts)))

    def decide(self, ack: int, ts: int) -> Run | Handled | Gone:
        verdict = decide(read_row(self.engine, ROW, claim_queries(A, ack, ts)), ts)
        assert isinstance(verdict, Run | Handled | Gone)
        return verdict

    def observe(self, ack: int) -> None:
        start_ts = self.draw()
        verdict = self.decide(ack, start_ts)
        if isinstance(verdict, Run):
            commit_ts = self.draw()
            gone: list[Write] = [(NOTIFY, ack, ts, None) for ts in verdict.covers]
            self.make((WRITE, ack, commit_ts, pack_record(ACK, start_ts, b"")), *gone)

    def seen(self, column: int, ts: int) -> bytes | None:
        locks, writes = read_row(self.engine, ROW, queries_for(column, ts))
        seen = look(locks, writes)
        if isinstance(seen, InData):
            [[(_, value)]] = read_row(self.engine, ROW, [data_query(seen, column)])
            return value
        return seen.value if isinstance(seen, Value) else None

    def everything(self, cut: int) -> list[tuple[bytes | None, ...]]:
        """All that can be read from the cut on."""
        return [(self.seen(A, ts), self.seen(B, ts)) for ts in range(cut, self.last + 2)]

    def to_run(self) -> list[bool]:
        """Whether each observer would run now."""
        return [isinstance(self.decide(ack, self.last + 1), Run) for ack in ACKS[A]]

    def cells(self, group: str, to_ts: int = TS_MAX, n: int = 1000) -> list[ScanCell]:
        query = ScanQuery(group, None, 0, to_ts, n)
        rows = scan_rows(self.engine, ScanRequest("t", b"", None, (query,))).rows
        return rows[0][1][0] if rows else []

    def waste(self, cut: int, watermark: int, versions: int = 1, n: int = 1000) -> Waste:
        records = self.cells(WRITE, cut, n)
        waste = self.waste_in(records, cut, watermark, versions, n)
        if is_lean(records):
            assert not [write for unit in waste.units for write in unit if write[0] not in (ROLLBACK, TRACE)]
            assert not waste.ends
        return waste

    def waste_in(self, records: list[ScanCell], cut: int, watermark: int, versions: int, n: int) -> Waste:
        return waste_of(
            "t",
            ROW,
            records,
            self.cells(ROLLBACK, watermark - 1) if watermark else [],
            self.cells(TRACE, watermark - 1) if watermark else [],
            {column for column, _, _ in self.cells(NOTIFY)},
            cut=cut,
            watermark=watermark,
            versions=versions,
            acks_of=ACKS.__getitem__,
            more=len(records) == n,
        )

    def vacuum(self, cut: int, watermark: int, versions: int = 1, n: int = 1000) -> Removed:
        """As the driver does it: in parts of `n` cells, until there is nothing left to do."""
        removed = Removed()
        while True:
            waste = self.waste(cut, watermark, versions, n)
            mutations = waste.mutations(n)
            for mutation in mutations:
                assert self.apply(mutation) is APPLIED
                removed.add_of(mutation)
            if len(self.cells(WRITE, cut, n)) < n and not mutations:
                return removed
            if not mutations:
                n *= 2


_OPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from([A, B]), st.sampled_from([PUT, PUT, PUT_DATA, DELETE])),
        st.tuples(st.just("observe"), st.sampled_from(ACKS[A]), st.just(0)),
        st.tuples(st.sampled_from(["rollback", "read"]), st.sampled_from([A, B]), st.just(0)),
    ),
    max_size=25,
)


def written(ops: list[tuple[str, int, int]]) -> History:
    history = History()
    for what, column, kind in ops:
        match what:
            case "write":
                history.write(column, kind)
            case "observe":
                history.observe(column)
            case "read":
                history.read_under_lock(column)
            case _:
                history.roll_back(column)
    return history


@given(_OPS, st.integers(0, 60), st.integers(0, 60), st.integers(1, 3), st.sampled_from([2, 3, 5, 1000]))
def test_reads_above_the_cut_are_unchanged_and_nothing_superfluous_is_left(  # G3 G4
    ops: list[tuple[str, int, int]], cut: int, more: int, versions: int, n: int
) -> None:
    history = written(ops)
    cut = min(cut, history.last)
    watermark = min(cut + more, history.last)
    before, to_run, notified = history.everything(cut), history.to_run(), history.cells(NOTIFY)
    removed = history.vacuum(cut, watermark, versions, n)
    event(f"removed {min(removed.cells, 9)}")
    assert history.everything(cut) == before
    assert history.to_run() == to_run
    assert history.cells(NOTIFY) == notified
    # Nothing that could go is left.
    assert not [ts for group in (ROLLBACK, TRACE) for _, ts, _ in history.cells(group) if ts < watermark]
    for column in (A, B):
        below = [value for at, _, value in history.cells(WRITE, cut) if at == column]
        waits = any(at in ACKS[column] for at, _, _ in notified)
        assert len(below) <= versions
        assert not any(value[0] == DELETE for value in below[1:])
        if below and below[0][0] == DELETE:
            assert waits
            assert len(below) == 1
        for ack in ACKS[column]:
            acks = [ts for at, ts, _ in history.cells(WRITE, cut) if at == ack]
            assert len(acks) <= (1 if below or waits else 0)
    wanted = {int.from_bytes(value[1:9], "big") for _, _, value in history.cells(WRITE) if value[0] == PUT_DATA}
    assert {ts for _, ts, _ in history.cells(DATA)} == wanted
    # And a second one finds nothing.
    assert not history.vacuum(cut, watermark, versions, n).cells


@given(_OPS, st.integers(0, 60), st.data())
def test_later_runs_do_what_they_would_have_done(  # G4: no observer runs twice for a change, and none misses one
    ops: list[tuple[str, int, int]], cut: int, data: st.DataObject
) -> None:
    later = data.draw(_OPS)
    with_vacuum, without = written(ops), written(ops)
    with_vacuum.vacuum(min(cut, with_vacuum.last), with_vacuum.last)
    for what, column, kind in later:
        for history in (with_vacuum, without):
            match what:
                case "write":
                    history.write(column, kind)
                case "observe":
                    history.observe(column)
                case "read":
                    history.read_under_lock(column)
                case _:
                    history.roll_back(column)
        assert with_vacuum.last == without.last, "a run began in one of them only"
        assert with_vacuum.to_run() == without.to_run()


@given(_OPS, st.integers(0, 60), st.integers(0, 60), st.data())
def test_late_copies_of_an_older_vacuum_do_no_harm(  # twins
    ops: list[tuple[str, int, int]], cut: int, more: int, data: st.DataObject
) -> None:
    history = written(ops)
    first = min(cut, history.last)
    late = history.waste(first, first).mutations(4)
    for what, column, kind in data.draw(_OPS):
        if what == "write":
            history.write(column, kind)
        elif what == "observe":
            history.observe(column)
    second = min(first + more, history.last)
    history.vacuum(second, second)
    before, to_run = history.everything(second), history.to_run()
    for mutation in reversed(late):
        history.apply(mutation)
    assert history.everything(second) == before
    assert history.to_run() == to_run


def test_a_delete_marker_waits_for_its_observers() -> None:  # G3
    history = History()
    history.write(A, PUT)
    history.write(A, PUT)
    history.write(A, DELETE)
    waste = history.waste(history.last, history.last)
    assert waste.blocked
    history.vacuum(history.last, history.last)
    assert [value[0] for _, _, value in history.cells(WRITE)] == [DELETE]
    history.observe(A | 1)
    assert history.waste(history.last, history.last).blocked, "the other one has not seen it"
    history.observe(A | 2)
    removed = history.vacuum(history.last, history.last)
    assert not history.cells(WRITE), "the acks go with it"
    assert (removed.versions, removed.acks) == (1, 2)


def test_a_notify_cell_that_came_in_between_refuses() -> None:  # G3: checked where it is written
    history = History()
    history.write(A, PUT)
    history.write(A, DELETE)
    for ack in ACKS[A]:
        history.observe(ack)
    waste = history.waste(history.last, history.last)
    [mutation] = waste.mutations(100)
    history.make((NOTIFY, A | 2, history.draw(), pack_cause(1, 0)))
    assert isinstance(history.apply(mutation), Refused)
    assert len(history.cells(WRITE)) == 4
    for mutation in waste.without_ends().mutations(100):
        assert history.apply(mutation) is APPLIED
    assert [value[0] for _, _, value in history.cells(WRITE)] == [DELETE, ACK, ACK]


def test_a_delete_marker_stays_while_older_cells_may_be_out_of_sight() -> None:  # G3, trap 20
    history = History()
    for _ in range(5):
        history.write(B, PUT)
    history.write(B, DELETE)
    waste = history.waste(history.last, history.last, n=3)
    assert not waste.ends
    assert [write[2] for unit in waste.units for write in unit] == [10, 8]


def test_an_ack_whose_cell_has_gone_goes_too() -> None:  # G4, trap 19: fluo#280
    history = History()
    history.write(A, DELETE)
    history.observe(A | 1)
    history.observe(A | 2)
    history.vacuum(2, 2)  # below the acks
    assert [value[0] for _, _, value in history.cells(WRITE)] == [ACK, ACK]
    history.vacuum(history.last, history.last)
    assert not history.cells(WRITE)


def test_the_version_at_the_cut_and_the_marker_at_the_watermark_stay() -> None:  # trap 17
    history = History()
    history.write(B, PUT)  # 1, 2
    history.write(B, PUT)  # 3, 4
    history.roll_back(B)  # 5
    history.vacuum(4, 5)
    assert [ts for _, ts, _ in history.cells(WRITE)] == [4]
    assert [ts for _, ts, _ in history.cells(ROLLBACK)] == [5]
    history = History()
    history.write(B, PUT)
    history.write(B, PUT)
    history.vacuum(3, 3)
    assert [ts for _, ts, _ in history.cells(WRITE)] == [4, 2]


def test_a_record_and_its_long_value_go_in_one_mutation() -> None:  # T2
    history = History()
    for _ in range(6):
        history.write(B, PUT_DATA)
    for mutation in history.waste(history.last, history.last).mutations(3):
        [(_, _, writes)] = mutation.rows
        records = [ts for group, _, ts, _ in writes if group == WRITE]
        assert [ts for group, _, ts, _ in writes if group == DATA] == [ts - 1 for ts in records]


@pytest.mark.parametrize(
    "bad", [{"seconds": -1}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"versions": 0}]
)
def test_what_cannot_be_kept_is_an_error(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Keep(**bad)  # type: ignore[arg-type]


def test_missing_is_missing_whether_its_marker_stands_or_not() -> None:
    history = History()
    history.write(B, DELETE)
    assert isinstance(look(*read_row(history.engine, ROW, queries_for(B, 9))), Missing)
    history.vacuum(2, 2)
    assert look(*read_row(history.engine, ROW, queries_for(B, 9))).commit_ts == 0  # type: ignore[union-attr]
