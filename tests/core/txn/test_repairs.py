"""A repair is made only while what was found still holds; else it writes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from perco.check import check, repairs
from perco.check.repairs import REMEDIES, Repair
from perco.protocol.records import PUT, Cellref, Lock, ack_of, pack_cause, pack_lock, pack_record
from perco.storage import (
    APPLIED,
    DATA,
    LOCK,
    NOTIFY,
    ROLLBACK,
    WRITE,
    MemoryTablet,
    Mutation,
    Refused,
    ScanQuery,
    ScanRequest,
    Verdict,
    Write,
)

CELL = Cellref("north", b"row", 1 << 16)
COLUMN = CELL.column
ACK_COLUMN = ack_of(COLUMN, 3)
START, COMMIT = 10, 20
HELD = Lock(PUT, CELL, b"v", (), (), 0, 0, "token")

lock: Write = (LOCK, COLUMN, START, pack_lock(HELD))
record: Write = (WRITE, COLUMN, COMMIT, pack_record(PUT, START, b"v"))
later: Write = (WRITE, COLUMN, 30, pack_record(PUT, 25, b"w"))
marker: Write = (ROLLBACK, COLUMN, START, b"")
data: Write = (DATA, COLUMN, START, b"long")
told: Write = (NOTIFY, ACK_COLUMN, 30, pack_cause(30, 0))
ack: Write = (WRITE, ACK_COLUMN, 40, pack_record(PUT, 35, b""))
running: Write = (LOCK, ACK_COLUMN, 35, pack_lock(HELD))


class Row:
    """One row of a memory tablet, whatever stands in it."""

    def __init__(self, writes: Sequence[Write]) -> None:
        self._tablet = MemoryTablet(CELL.table, b"")
        assert self.apply(Mutation(CELL.table, ((CELL.row, (), writes),))) is APPLIED

    def apply(self, mutation: Mutation) -> Verdict:
        verdicts: list[Verdict] = []

        class Answer:
            def answer(self, index: int, verdict: Verdict) -> None:
                verdicts.append(verdict)

        self._tablet.submit(mutation, Answer(), 0)  # type: ignore[arg-type]
        return verdicts[0]

    def there(self) -> set[tuple[str, int, int]]:
        groups = (LOCK, WRITE, ROLLBACK, DATA, NOTIFY)
        queries = tuple(ScanQuery(group, None, n=99) for group in groups)
        rows = self._tablet.scan(ScanRequest(CELL.table, b"", None, queries)).rows
        found = rows[0][1] if rows else [[] for _ in groups]
        return {(group, column, ts) for group, cells in zip(groups, found, strict=True) for column, ts, _ in cells}


def places(*writes: Write) -> set[tuple[str, int, int]]:
    return {write[:3] for write in writes}


DROP_DATA = repairs.drop_data(CELL, DATA, START, superseded=False)
DROP_OLD_DATA = repairs.drop_data(CELL, DATA, START, superseded=True)
ROLL_BACK = repairs.roll_back_beside_marker(CELL, START, HELD)
DROP_LOCK = repairs.drop_lock(CELL, START, beside=WRITE, at=COMMIT)
DROP_MARKER = repairs.drop_marker(CELL, START, COMMIT)
NOTIFY_AGAIN = repairs.notify(CELL, ACK_COLUMN, 30, 0)
DROP_NOTIFICATION = repairs.drop_notification(CELL, ACK_COLUMN, 30, 0)
TELL_INSTEAD = repairs.drop_notification(CELL, ACK_COLUMN, 30, COMMIT)
GIVE_CAUSE = repairs.give_cause(CELL.table, CELL.row, ACK_COLUMN, 30)
DROP_STRAYS = repairs.drop_stray_notifications(CELL.table, CELL.row, ACK_COLUMN, [30])
instead: Write = (NOTIFY, ACK_COLUMN, COMMIT, b"")


@pytest.mark.parametrize(
    ("repair", "before", "after"),
    [
        (DROP_DATA, [data], []),
        (DROP_OLD_DATA, [data, later], [later]),
        (ROLL_BACK, [lock, marker], [marker]),
        (DROP_LOCK, [lock, record], [record]),
        (DROP_MARKER, [marker, record], [record]),
        (NOTIFY_AGAIN, [later], [later, told]),
        (DROP_NOTIFICATION, [told], []),
        (TELL_INSTEAD, [record, told], [record, instead]),
        (GIVE_CAUSE, [told], [told]),
        (DROP_STRAYS, [told], []),
    ],
)
def test_it_does_what_it_says(repair: Repair, before: Sequence[Write], after: Sequence[Write]) -> None:
    row = Row(before)
    assert row.apply(repair.mutation) is APPLIED
    assert row.there() == places(*after)


@pytest.mark.parametrize(
    ("repair", "before"),
    [
        pytest.param(DROP_DATA, [data, lock], id="data, locked meanwhile"),
        pytest.param(DROP_DATA, [data, record], id="data, committed meanwhile"),
        pytest.param(DROP_OLD_DATA, [data, lock, later], id="old data, locked"),
        pytest.param(ROLL_BACK, [marker], id="a lock that is gone"),
        pytest.param(ROLL_BACK, [lock], id="a lock whose marker is gone"),
        pytest.param(DROP_LOCK, [lock], id="a lock whose record is gone"),
        pytest.param(DROP_LOCK, [record], id="a lock that is gone, beside its record"),
        pytest.param(DROP_MARKER, [marker], id="a marker whose record is gone"),
        pytest.param(NOTIFY_AGAIN, [], id="a change that was collected"),
        pytest.param(NOTIFY_AGAIN, [later, ack], id="acknowledged meanwhile"),
        pytest.param(NOTIFY_AGAIN, [later, running], id="about to be acknowledged"),
        pytest.param(DROP_NOTIFICATION, [told, later], id="the change came"),
        pytest.param(DROP_NOTIFICATION, [told, lock], id="the change may come"),
        pytest.param(TELL_INSTEAD, [told], id="the change to be told instead was collected"),
        pytest.param(GIVE_CAUSE, [], id="a notification without a cause that was handled"),
        pytest.param(DROP_STRAYS, [], id="a notification that is gone"),
    ],
)
def test_it_is_refused_where_that_no_longer_holds(repair: Repair, before: Sequence[Write]) -> None:
    row = Row(before)
    assert isinstance(row.apply(repair.mutation), Refused)
    assert row.there() == places(*before)


def test_every_invariant_that_check_reports_has_a_remedy() -> None:
    listed = set(re.findall(r"\b[GLNOST]\d+\b", check.__doc__ or ""))
    assert listed <= set(REMEDIES)
    assert len(listed) > 10
