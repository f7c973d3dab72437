"""What a read at S sees."""

from __future__ import annotations

import pytest

from perco.errors import Corruption
from perco.protocol.records import ACK, DELETE, PUT, PUT_DATA, pack_record
from perco.protocol.snapshot import NEVER, Blocked, InData, Missing, Value, data_query, look, queries_for
from perco.storage import LOCK, WRITE

COLUMN = 1 << 16


def test_nothing_written_is_missing() -> None:
    assert look([], []) is NEVER
    assert NEVER.commit_ts == 0


def test_a_short_value_is_in_its_record() -> None:
    assert look([], [(9, pack_record(PUT, 5, b"value"))]) == Value(9, b"value")
    assert look([], [(9, pack_record(PUT, 5, b""))]) == Value(9, b"")


def test_a_long_value_is_looked_up_at_the_start() -> None:
    seen = look([], [(9, pack_record(PUT_DATA, 5, b"data:raw"))])
    assert seen == InData(9, 5, "data:raw")
    assert isinstance(seen, InData)
    assert data_query(seen, COLUMN) == ("data:raw", COLUMN, 5, 5, 1)


@pytest.mark.parametrize("kind", [DELETE, ACK])
def test_what_was_deleted_is_missing_and_says_since_when(kind: int) -> None:
    seen = look([], [(9, pack_record(kind, 5, b""))])
    assert isinstance(seen, Missing)
    assert seen.commit_ts == 9


def test_a_lock_is_neither_skipped_nor_passed_by() -> None:  # T9
    record = (9, pack_record(PUT, 5, b"old"))
    assert look([(10, b"lock")], [record]) == Blocked(10, b"lock")
    assert look([(10, b"lock")], []) == Blocked(10, b"lock")
    assert look([(10, b"lock")], [record], settled=11) == Blocked(10, b"lock")


def test_a_settled_lock_is_passed_by() -> None:  # T9
    assert look([(10, b"lock")], [(9, pack_record(PUT, 5, b"old"))], settled=10) == Value(9, b"old")


def test_only_locks_at_or_below_the_snapshot_are_asked_for() -> None:  # T9
    assert queries_for(COLUMN, 7) == ((LOCK, COLUMN, 0, 7, 1), (WRITE, COLUMN, 0, 7, 1))


@pytest.mark.parametrize("value", [b"\x00" * 9, b"\x05" * 9, b"\x03", b"\x02\x00\x00", b"", b"\x01\x00\x00"])
def test_bytes_that_are_no_record_are_corruption(value: bytes) -> None:
    with pytest.raises(Corruption):
        look([], [(9, value)])


def test_a_data_group_that_is_no_name_is_corruption() -> None:
    with pytest.raises(Corruption):
        look([], [(9, pack_record(PUT_DATA, 5, b"\xff\xfe"))])
