"""Repairs of damage: each is one mutation of one row, which checks that the finding still holds. Pure.

No repair guesses: if a repair would need a guess, the damage is only reported, and the cells stay as they are.
`REMEDIES` says what a person can do in that case.

T5  Data without a lock or record belong to a dead transaction. The repair checks that there is still no lock. If a
    later record was seen, no lock can have come and gone meanwhile (T7); otherwise, the repair also checks that there
    is still no record. A lock beside its transaction's own marker is rolled back as in T5 (c).
T1  A record means that its transaction has committed, even if there is a marker beside it. The marker is deleted; the
    record refuses everything that the marker would have refused (T7).
T8  A lock beside its transaction's own record is no longer needed, and is deleted.
N1  If an observer has not acknowledged a change and has no notification of it, the notification is written again. A
    notification of a change that is not there is deleted.
N5  Observers of a signal may run once more than necessary, but must never miss a signal. So if a pending entry of a
    signal cannot be read, all of the signal's observers are notified; if a run's entry, which says which
    notify cells the run removes, cannot be read, it is deleted, and those notify cells stay.
N6  A change is taken off the failed list if the list has a newer one for its row and observer, or if the change also
    waits or is acknowledged. If its entry cannot be read, the change waits again.
N9  A notification that does not say what caused it gets the earliest possible cause, so that no wait for a cause ends
    too soon.
N10 A notify cell in a column that its observer does not observe is deleted, because no observer ever runs for it.
O3  The clock's notes (the wall times of timestamps) can be deleted: a missing note only makes `at=` less precise near
    the note's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from perco.protocol.mutations import roll_back_secondary
from perco.protocol.records import Cellref, Lock, ack_of, observed_column, pack_cause
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import (
    ABSENT,
    DATA,
    FAILED_LIST,
    LOCK,
    NOTIFY,
    PENDING,
    PRESENT,
    ROLLBACK,
    TS_MAX,
    WRITE,
    Check,
    Mutation,
    Write,
)

_EARLIEST: Final = pack_cause(1, 0)

REMEDIES: Final = {
    "E1": "the changes of this table cannot be followed in full: copy its rows into a new table",
    "G1": "restore the whole folder from one copy",
    "G3": "the next vacuum removes it",
    "G4": "the next vacuum removes it",
    "L1": "opening the store settles it, and so does --repair",
    "N1": "restore a copy: it is not known what the lock would have committed",
    "N2": "a bug, or a damaged lock: opening the store settles it the way its transaction ended",
    "N3": "the observer may skip changes of this cell: restore a copy, or write the cell's row under another key",
    "N5": "restore a copy: it is not known which observers the transaction would have notified",
    "N6": "perco failed drop, or replay",
    "N9": "restore a copy",
    "N10": "the catalogue is older than this cell: restore the whole folder from one copy",
    "O1": "the oracle's bound is older than this: restore the whole folder from one copy, of one moment",
    "O3": "restore a copy",
    "S1": "the tablet's file is damaged: restore a copy",
    "T1": "the outcome that it recorded is lost: restore a copy, or write the cell again",
    "T2": "its value is lost: restore a copy, or write the cell again",
    "T3": "only a part of a transaction is there: restore a copy, or write all that it wrote again",
    "T5": "restore a copy",
    "T7": "an update was lost: restore a copy, or compare the versions (perco get --versions) and write the cell again",
    "T8": "restore a copy",
    "T14": "a read was not protected: restore a copy, or check whether what was written from it still holds",
    "T12": "the locks of one transaction disagree: restore a copy; opening the store settles each by what it says",
}
TWICE: Final = "a transaction is there twice: restore a copy, or compare the cells that both wrote"  # T1


class Repair(NamedTuple):
    """A repair's effect, in words, and the mutation that makes it."""

    what: str
    mutation: Mutation


def _of_row(what: str, table: str, row: bytes, checks: Sequence[Check], writes: Sequence[Write]) -> Repair:
    return Repair(what, Mutation(table, ((row, tuple(checks), tuple(writes)),)))


def drop_data(cell: Cellref, group: str, ts: int, *, superseded: bool) -> Repair:
    """T5: delete data. `superseded`: a record at or above `ts` was seen, so no lock at `ts` can have come and gone
    since (T7)."""
    table, row, column = cell
    checks: list[Check] = [(ABSENT, LOCK, column, ts, ts)]
    if not superseded:
        checks.append((ABSENT, WRITE, column, ts, TS_MAX))
    return _of_row("delete the data", table, row, checks, [(group, column, ts, None)])


def roll_back_beside_marker(cell: Cellref, start_ts: int, lock: Lock) -> Repair:
    """T5 (c): roll back a lock; the proof is the marker of the lock's own transaction."""
    [(row, checks, writes)] = roll_back_secondary(cell, start_ts, lock).rows
    proof: Check = (PRESENT, ROLLBACK, cell.column, start_ts, start_ts)
    return _of_row("roll the lock back", cell.table, row, [*checks, proof], writes)


def drop_lock(cell: Cellref, start_ts: int, *, beside: str, at: int, group: str = LOCK) -> Repair:
    """Delete a lock, because its own transaction's record (T8), trace (T8; a committed read lock leaves one) or marker
    (T5) is in the same cell. That proof is at timestamp `at` in group `beside`."""
    table, row, column = cell
    checks: list[Check] = [(PRESENT, group, column, start_ts, start_ts), (PRESENT, beside, column, at, at)]
    return _of_row("delete the lock", table, row, checks, [(group, column, start_ts, None)])


def drop_marker(cell: Cellref, start_ts: int, commit_ts: int) -> Repair:
    """T1: delete a marker beside a record of the same transaction, because the record counts."""
    table, row, column = cell
    checks: list[Check] = [(PRESENT, WRITE, column, commit_ts, commit_ts)]
    return _of_row("delete the marker", table, row, checks, [(ROLLBACK, column, start_ts, None)])


def notify(cell: Cellref, ack: int, ts: int, acked: int) -> Repair:
    """N1: notify the observer of the change at `ts`; `acked`: the timestamp of its newest acknowledgement, 0: none."""
    table, row, column = cell
    checks: list[Check] = [
        (PRESENT, WRITE, column, ts, ts),
        (ABSENT, LOCK, ack, ts, TS_MAX),  # no run that sees the change is about to commit
        (ABSENT, WRITE, ack, acked + 1, TS_MAX),
    ]
    return _of_row("write the notification again", table, row, checks, [(NOTIFY, ack, ts, _EARLIEST)])


def drop_notification(cell: Cellref, ack: int, ts: int, instead: int) -> Repair:
    """N1: delete a notify cell, because there is no change at or above `ts`, and none can come there any more.
    `instead`: if not 0, the observer is notified of the change at this timestamp."""
    table, row, column = cell
    checks: list[Check] = [(ABSENT, WRITE, column, ts, TS_MAX), (ABSENT, LOCK, column, 0, ts)]
    writes: list[Write] = [(NOTIFY, ack, ts, None)]
    if instead:
        checks.append((PRESENT, WRITE, column, instead, instead))
        writes.append((NOTIFY, ack, instead, _EARLIEST))
    return _of_row("delete the notification", table, row, checks, writes)


def settle_pending(cell: Cellref, start_ts: int, observers: Sequence[int]) -> Repair:
    """N5: settle a pending entry that cannot be read. `observers`: the observers to notify of the signal; (): a run's
    entry, which was to remove notify cells."""
    table, row, column = cell
    writes: list[Write] = [(PENDING, column, start_ts, None)]
    writes += [(NOTIFY, ack_of(column, number), start_ts, _EARLIEST) for number in observers]
    what = "notify its observers" if observers else "delete the pending entry"
    return _of_row(what, table, row, [(PRESENT, PENDING, column, start_ts, start_ts)], writes)


def give_cause(table: str, row: bytes, ack: int, ts: int) -> Repair:
    """N9: give the earliest cause to a notification that does not say what caused it."""
    checks: list[Check] = [(PRESENT, NOTIFY, ack, ts, ts)]
    return _of_row("give it the earliest cause", table, row, checks, [(NOTIFY, ack, ts, _EARLIEST)])


def drop_stray_notifications(table: str, row: bytes, column: int, timestamps: Sequence[int]) -> Repair:
    """N10: delete notify cells in a column that their observer does not observe."""
    checks: list[Check] = [(PRESENT, NOTIFY, column, ts, ts) for ts in timestamps]
    writes: list[Write] = [(NOTIFY, column, ts, None) for ts in timestamps]
    return _of_row("delete the notification", table, row, checks, writes)


def drop_failed(ack: Cellref, ts: int, *, beside: tuple[str, int] | None) -> Repair:
    """N6: delete an entry of the failed list. `beside`: a cell (group, ts) of the same column that proves the entry
    unnecessary; None: its change is not there."""
    table, row, column = ack
    checks: list[Check] = [(PRESENT, FAILED_LIST, column, ts, ts), (ABSENT, LOCK, column, 0, TS_MAX)]
    if beside is not None:
        checks.append((PRESENT, beside[0], column, beside[1], beside[1]))
    else:
        observed = observed_column(column)
        checks += [(ABSENT, WRITE, observed, ts, TS_MAX), (ABSENT, LOCK, observed, 0, ts)]
    return _of_row("delete the failed change", table, row, checks, [(FAILED_LIST, column, ts, None)])


def put_back(ack: Cellref, ts: int) -> Repair:
    """N6: let a failed change wait again, with the earliest cause (N9)."""
    table, row, column = ack
    checks: list[Check] = [(PRESENT, FAILED_LIST, column, ts, ts), (ABSENT, LOCK, column, 0, TS_MAX)]
    writes: list[Write] = [(FAILED_LIST, column, ts, None), (NOTIFY, column, ts, _EARLIEST)]
    return _of_row("let it wait again", table, row, checks, writes)


def drop_backfill_note(number: int) -> Repair:
    """N10: delete the note of a backfill's progress, so that the backfill starts over and repeats its notifications."""
    row = (b"backfill", ((PRESENT, DATA, number, 1, 1),), ((DATA, number, 1, None),))
    return Repair("delete the note of its progress", Mutation(SYSTEM_TABLE, (row,)))


def drop_notes(*timestamps: int) -> Repair:
    """O3: delete notes of the clock."""
    checks: list[Check] = [(PRESENT, DATA, 0, ts, ts) for ts in timestamps]
    writes: list[Write] = [(DATA, 0, ts, None) for ts in timestamps]
    what = "delete the note" if len(timestamps) == 1 else "delete both notes"
    return _of_row(what, SYSTEM_TABLE, b"clock", checks, writes)
