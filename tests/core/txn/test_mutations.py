"""Each step of the protocol against a row of a memory tablet: what refuses it, and what it leaves."""

from __future__ import annotations

import pytest

from perco.protocol import mutations
from perco.protocol.commit import FLOOR_CHECK, LOCK_CHECK, MARKER_CHECK, WRITE_CHECK
from perco.protocol.mutations import Header, Intent
from perco.protocol.records import (
    ACK,
    DELETE,
    PUT,
    PUT_DATA,
    Cellref,
    Lock,
    ack_of,
    pack_cause,
    pack_record,
    unpack_record,
)
from perco.storage import APPLIED, DATA, LOCK, NOTIFY, ROLLBACK, TS_MAX, WRITE, Mutation, Refused
from tests.support.rows import Rows, memory_store

CELL = Cellref("north", b"row", 1 << 16)
START = 10


@pytest.fixture
def rows() -> Rows:
    return Rows(memory_store())


def header(start_ts: int = START) -> Header:
    return Header(start_ts, CELL, 0, 0, "token")


def prewrite(start_ts: int = START, *, again: bool = False, intent: Intent | None = None) -> Mutation:
    return mutations.prewrite(header(start_ts), [intent or Intent(*CELL, PUT, b"v")], again=again)


def commit(start_ts: int, commit_ts: int, intent: Intent | None = None) -> Mutation:
    return mutations.commit(header(start_ts), [intent or Intent(*CELL, PUT, b"v")], commit_ts)


def written(rows: Rows, start_ts: int, commit_ts: int) -> None:
    assert rows.apply(prewrite(start_ts)) is APPLIED
    assert rows.apply(commit(start_ts, commit_ts)) is APPLIED


def lock(kind: int = PUT, body: bytes = b"v") -> Lock:
    return Lock(kind, CELL, body, (), (), 0, 0, "token")


def state(rows: Rows) -> dict[str, list[int]]:
    return {group: [ts for _, ts, _ in rows.cells(group)] for group in (LOCK, WRITE, ROLLBACK, DATA)}


# ------------------------------------------------------------ T7


def test_a_later_record_refuses_a_prewrite(rows: Rows) -> None:  # T7
    written(rows, 11, 12)
    assert rows.apply(prewrite()) == Refused(0, WRITE_CHECK)


def test_a_record_at_exactly_start_ts_refuses_it(rows: Rows) -> None:  # T7
    written(rows, 9, START)
    assert rows.apply(prewrite()) == Refused(0, WRITE_CHECK)


def test_an_earlier_record_does_not(rows: Rows) -> None:  # T7
    written(rows, 8, 9)
    assert rows.apply(prewrite()) is APPLIED


@pytest.mark.parametrize("other", [START - 1, START + 1])
def test_a_foreign_lock_refuses_it_whether_older_or_newer(rows: Rows, other: int) -> None:  # T7
    assert rows.apply(prewrite(other)) is APPLIED
    assert rows.apply(prewrite()) == Refused(0, LOCK_CHECK)
    assert isinstance(rows.apply(prewrite(again=True)), Refused)
    assert state(rows)[LOCK] == [other]


def test_a_marker_at_exactly_start_ts_refuses_it(rows: Rows) -> None:  # T5 T7
    rows.apply(mutations.put_marker(CELL, START))
    assert rows.apply(prewrite()) == Refused(0, MARKER_CHECK)
    assert rows.apply(prewrite(again=True)) == Refused(0, MARKER_CHECK)


@pytest.mark.parametrize("other", [START - 1, START + 1])
def test_anothers_marker_does_not(rows: Rows, other: int) -> None:  # T7
    rows.apply(mutations.put_marker(CELL, other))
    assert rows.apply(prewrite()) is APPLIED


def test_an_other_column_does_not_matter(rows: Rows) -> None:  # T7
    written(rows, 11, 12)
    assert rows.apply(prewrite(intent=Intent("north", b"row", 2 << 16, PUT, b"v"))) is APPLIED
    assert rows.apply(prewrite(intent=Intent("north", b"rows", 1 << 16, PUT, b"v"))) is APPLIED


def test_a_floor_above_it_refuses_it(rows: Rows) -> None:  # T13
    tablet = rows.store.tablet("north", b"row")
    tablet.floor = START + 1  # type: ignore[attr-defined]
    for mutation in (prewrite(), prewrite(again=True), mutations.put_marker(CELL, START)):
        assert rows.apply(mutation) == Refused(0, FLOOR_CHECK)
    assert rows.apply(prewrite(START + 1)) is APPLIED


def test_one_refused_cell_refuses_the_whole_part(rows: Rows) -> None:  # S1 T7
    written(rows, 11, 12)
    part = [Intent("north", b"rat", 1 << 16, PUT, b"v"), Intent(*CELL, PUT, b"v")]
    assert rows.apply(mutations.prewrite(header(), part, again=False)) == Refused(1, WRITE_CHECK)
    assert state(rows)[LOCK] == []


# ------------------------------------------------------------ T6


def test_a_second_prewrite_has_the_effect_of_one(rows: Rows) -> None:  # T6
    assert rows.apply(prewrite()) is APPLIED
    before = list(rows.cells(LOCK))
    assert rows.apply(prewrite(again=True)) is APPLIED
    assert list(rows.cells(LOCK)) == before


def test_a_second_prewrite_that_does_not_know_of_the_first_is_refused_and_harms_nothing(rows: Rows) -> None:  # T6
    rows.apply(prewrite())
    assert rows.apply(prewrite()) == Refused(0, LOCK_CHECK)
    assert state(rows)[LOCK] == [START]


def test_a_second_commit_is_refused_and_changes_nothing(rows: Rows) -> None:  # T6 T8
    written(rows, START, 12)
    before = state(rows)
    assert isinstance(rows.apply(commit(START, 12)), Refused)
    assert state(rows) == before


# ------------------------------------------------------------ T8


def steps(start_ts: int) -> dict[str, Mutation]:
    part = [Intent(*CELL, PUT, b"v")]
    return {
        "commit": mutations.commit(header(start_ts), part, 99),
        "roll forward": mutations.roll_forward(CELL, start_ts, lock(), 99),
        "roll back the primary": mutations.roll_back_primary(CELL, start_ts, lock()),
        "roll back a secondary": mutations.roll_back_secondary(CELL, start_ts, lock()),
        "release": mutations.release(header(start_ts), part, marker=True),
        "release a secondary": mutations.release(header(start_ts), part, marker=False),
    }


@pytest.mark.parametrize("step", list(steps(START)))
def test_nobody_touches_a_lock_that_is_not_there(rows: Rows, step: str) -> None:  # T8
    mutation = steps(START)[step]
    assert isinstance(rows.apply(mutation), Refused)
    assert state(rows) == {LOCK: [], WRITE: [], ROLLBACK: [], DATA: []}
    rows.apply(prewrite(START - 1))  # nor one of another transaction
    assert isinstance(rows.apply(mutation), Refused)
    assert state(rows)[LOCK] == [START - 1]


@pytest.mark.parametrize("step", list(steps(START)))
def test_with_the_lock_there_it_is_done(rows: Rows, step: str) -> None:  # T8
    rows.apply(prewrite())
    assert rows.apply(steps(START)[step]) is APPLIED
    after = state(rows)
    assert after[LOCK] == []
    assert after[WRITE] == ([99] if step in ("commit", "roll forward") else [])
    assert after[ROLLBACK] == ([START] if step in ("roll back the primary", "release") else [])


# ------------------------------------------------------------ T5


def test_a_marker_is_not_put_past_the_lock_or_the_record(rows: Rows) -> None:  # T5b
    rows.apply(prewrite())
    assert isinstance(rows.apply(mutations.put_marker(CELL, START)), Refused)
    rows.apply(commit(START, 12))
    assert isinstance(rows.apply(mutations.put_marker(CELL, START)), Refused)
    assert state(rows)[ROLLBACK] == []


def test_a_marker_is_put_beside_others_locks_and_earlier_records(rows: Rows) -> None:  # T5b
    written(rows, 7, 8)
    rows.apply(prewrite(START + 1))
    assert rows.apply(mutations.put_marker(CELL, START)) is APPLIED


def test_after_a_marker_nothing_of_it_can_be_made(rows: Rows) -> None:  # T5
    rows.apply(mutations.put_marker(CELL, START))
    for mutation in (prewrite(), prewrite(again=True), *steps(START).values()):
        assert isinstance(rows.apply(mutation), Refused)
    assert rows.apply(mutations.put_marker(CELL, START)) is APPLIED  # T6
    assert state(rows) == {LOCK: [], WRITE: [], ROLLBACK: [START], DATA: []}


def test_a_long_value_lies_at_start_ts_and_goes_with_a_rollback(rows: Rows) -> None:  # T5
    intent = Intent(*CELL, PUT_DATA, b"data", (), (), b"long" * 100)
    rows.apply(prewrite(intent=intent))
    assert list(rows.cells(DATA)) == [(CELL, START, b"long" * 100)]
    rows.apply(mutations.roll_back_primary(CELL, START, lock(PUT_DATA, b"data")))
    assert state(rows)[DATA] == []
    rows.apply(prewrite(20, intent=intent))
    rows.apply(mutations.release(header(20), [intent], marker=True))
    assert state(rows)[DATA] == []


# ------------------------------------------------------------ what is left behind


def test_a_record_points_at_the_start(rows: Rows) -> None:  # T1
    rows.apply(prewrite(intent=Intent(*CELL, DELETE)))
    rows.apply(commit(START, 12, Intent(*CELL, DELETE)))
    [(cell, commit_ts, value)] = list(rows.cells(WRITE))
    assert (cell, commit_ts) == (CELL, 12)
    assert unpack_record(value) == (DELETE, START, b"")
    assert rows.value(CELL) is None


def test_a_record_never_lies_at_or_below_its_start() -> None:  # T2
    with pytest.raises(AssertionError):
        commit(START, START)


def test_the_mutation_that_makes_the_record_notifies(rows: Rows) -> None:  # N1 N11
    intent = Intent(*CELL, PUT, b"v", (1, 2))
    rows.apply(prewrite(intent=intent))
    assert list(rows.cells(NOTIFY)) == []
    rows.apply(commit(START, 12, intent))
    cause = pack_cause(12, 0)
    assert list(rows.cells(NOTIFY)) == [
        (CELL._replace(column=ack_of(CELL.column, 1)), 12, cause),
        (CELL._replace(column=ack_of(CELL.column, 2)), 12, cause),
    ]


def test_a_rollback_notifies_nobody(rows: Rows) -> None:  # N1
    intent = Intent(*CELL, PUT, b"v", (1, 2))
    rows.apply(prewrite(intent=intent))
    rows.apply(mutations.release(header(), [intent], marker=True))
    assert list(rows.cells(NOTIFY)) == []


def test_an_ack_removes_what_its_run_saw_and_nothing_newer(rows: Rows) -> None:  # N2
    observed = Intent(*CELL, PUT, b"v", (1,))
    for start_ts, commit_ts in ((2, 3), (4, 5), (20, 21)):
        rows.apply(prewrite(start_ts, intent=observed))
        rows.apply(commit(start_ts, commit_ts, observed))
    ack = CELL._replace(column=ack_of(CELL.column, 1))
    intent = Intent(*ack, ACK, b"", (), (3, 5))
    head = Header(START, ack, 3, 1, "token")
    rows.apply(mutations.prewrite(head, [intent], again=False))
    rows.apply(mutations.commit(head, [intent], 12))
    assert [ts for _, ts, _ in rows.cells(NOTIFY)] == [21]
    with pytest.raises(AssertionError, match="N2"):
        mutations.commit(head, [intent._replace(covers=(START + 1,))], 12)


def test_a_record_is_the_smallest_above_start_ts_on_its_primary(rows: Rows) -> None:  # T1
    written(rows, 2, 3)
    written(rows, START, 12)
    written(rows, 13, 14)
    [[(commit_ts, value)]] = rows.read("north", b"row", [(WRITE, CELL.column, START, TS_MAX, -1)])
    assert commit_ts == 12
    assert value == pack_record(PUT, START, b"v")
