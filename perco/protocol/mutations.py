"""Each step of the protocol as row mutations: which checks, then which writes. Pure; nothing is decided here.

T5  (a) The primary's lock is there: check it, delete lock and data, put the marker. (b) It is not there: check that
    there is neither a lock at start_ts nor a write record at or above start_ts, put the marker. (c) A secondary: check
    the lock, delete lock and data.
T7  A prewrite is refused by a write record at or above start_ts, by a marker at exactly start_ts, and by another
    transaction's lock. The prewrite of a write is also refused by any shared lock, and by a trace at or above start_ts
    (T14).
T8  Commit, roll-forward and rollback check that the lock with that start_ts is still there; the one exception is
    T5 (b).
T13 Mutations that must not take effect late carry start_ts, which the tablet compares with its floor.
T14 A shared lock is refused like an exclusive one, but other shared locks and traces do not refuse it. Commit replaces
    it with a trace.
C5  A one-step commit is refused by everything that refuses a prewrite (T7, T13).
N1  The mutation that replaces the lock of an observed cell with its record, or writes the record without a lock (C1),
    also puts a notify cell for each observer.
N2  The mutation that commits an acknowledgement removes the notify cells that its run saw, at exactly their timestamps.
N5  A signal is put as a pending entry, without a check, so it never conflicts. The mutation that makes the signal final
    checks that the entry is still there. In the same way, a run for a signal removes the notify cells that it saw, and
    leaves a record of its cause (N9). A bare primary is refused only by its own marker (T5), and leaves a trace at its
    start_ts.
N6  An acknowledgement commits only if the failed list still has what its run saw there for the row and observer:
    nothing, or one failed change, which the same mutation removes.
N20 In a transaction that several runs share, each cell carries the cause of the run that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from perco.protocol.records import (
    ACK,
    BARE,
    DELETE,
    PUT,
    PUT_DATA,
    READ,
    SHORT_VALUE_BYTES,
    SIGNAL,
    Cellref,
    Lock,
    ack_of,
    is_bare,
    pack_cause,
    pack_lock,
    pack_proof,
    pack_record,
    pack_trace,
)
from perco.storage import (
    ABSENT,
    FAILED_LIST,
    LOCK,
    NOTIFY,
    PENDING,
    PRESENT,
    ROLLBACK,
    SHARED,
    TRACE,
    TS_MAX,
    WRITE,
    Check,
    Mutation,
    Write,
)


class Cause(NamedTuple):
    """The cause of a change (N9). `root`: the commit timestamp at which the chain began; 0: it begins with this
    transaction; `depth`: the number of observers in the chain so far; `path`: the last of them."""

    root: int
    depth: int
    path: bytes

    def with_another(self, other: Cause) -> Cause:
        """The cause of a change that has two: the earlier root, and the longer chain."""
        longer = self if self.depth >= other.depth else other
        return Cause(min(self.root, other.root), longer.depth, longer.path)


class Intent(NamedTuple):
    """A cell that a transaction writes. Kind READ: a cell that it has read under a lock; SIGNAL: a signal that it
    raises (N5); BARE: its bare primary, a cell of its own, if it writes no other cell.

    `body`: the short value, or the data group's name; for a run, the contents of its acknowledgement (N9). `data`: the
    long value, to be put into that group. `cause`: the cause of this write, if several runs share the transaction
    (N20); None: the header has it.
    """

    table: str
    row: bytes
    column: int
    kind: int
    body: bytes = b""
    observers: tuple[int, ...] = ()
    covers: tuple[int, ...] = ()
    data: bytes | None = None
    cause: Cause | None = None


def write_of(table: str, row: bytes, column: int, data: bytes | None, group: str, observers: tuple[int, ...]) -> Intent:
    """The intent to write a cell: `data` None removes its value. `group`: where the column's long values are."""
    if data is None:
        return Intent(table, row, column, DELETE, b"", observers)
    if len(data) <= SHORT_VALUE_BYTES:
        return Intent(table, row, column, PUT, data, observers)
    return Intent(table, row, column, PUT_DATA, group.encode(), observers, (), data)


_CELL_BYTES: Final = 64  # size of a cell, besides its row and value


def bytes_of(part: Sequence[Intent]) -> int:
    """The approximate size of a part's cells in a message."""
    return sum(_CELL_BYTES + len(intent.row) + len(intent.body) + len(intent.data or b"") for intent in part)


class Header(NamedTuple):
    """The fields that are the same in all locks of a transaction."""

    start_ts: int
    primary: Cellref
    root: int
    depth: int
    token: str
    path: bytes = b""


# The checks in a first prewrite or a one-step commit: write record, marker, lock; for a write, also shared locks and
# traces.
CHECKS_PER_CELL: Final = 5
CHECKS_PER_ACK: Final = 6  # and the failed list (N6)
CHECKS_PER_READ: Final = 3
CHECKS_PER_BARE: Final = 1  # for its marker
LOCK_CHECK: Final = 2

_Cell = tuple[bytes, Sequence[Check], Sequence[Write]]


def _by_row(cells: Sequence[_Cell]) -> Sequence[_Cell]:
    """One entry for each row, in the order of first mention, with the checks and writes of all its cells (S1)."""
    if len(cells) == 1 or len({cell[0] for cell in cells}) == len(cells):
        return cells
    rows: dict[bytes, tuple[bytes, list[Check], list[Write]]] = {}
    for row, checks, writes in cells:
        entry = rows.get(row)
        if entry is None:
            entry = rows[row] = (row, [], [])
        entry[1].extend(checks)
        entry[2].extend(writes)
    return list(rows.values())


def prewrite(header: Header, part: Sequence[Intent], *, again: bool) -> Mutation:
    """Lock every cell of a part. `again`: the part may be locked already, so our own lock is not a conflict (T6)."""
    start_ts, primary, token = header.start_ts, header.primary, header.token
    cells: list[_Cell] = []
    for _, row, column, kind, body, observers, covers, data, cause in part:
        root, depth, path = (header.root, header.depth, header.path) if cause is None else cause
        checks: tuple[Check, ...] = (
            (ABSENT, WRITE, column, start_ts, TS_MAX),  # T7
            (ABSENT, ROLLBACK, column, start_ts, start_ts),
            (ABSENT, LOCK, column, 0, TS_MAX),
            (ABSENT, SHARED, column, 0, TS_MAX),  # T14
            (ABSENT, TRACE, column, start_ts, TS_MAX),
        )
        if kind == ACK:
            checks = (*checks, _as_seen(column, covers))
        if kind >= READ:
            if kind == READ:
                cells.append((row, checks[:CHECKS_PER_READ], ((SHARED, column, start_ts, _shared(header)),)))
            else:
                entry = pack_lock((kind, primary, body, observers, covers, root, depth, token, path))
                cells.append((row, _unmarked(kind, column, start_ts), ((PENDING, column, start_ts, entry),)))
            continue
        if again:
            but_ours = (ABSENT, LOCK, column, 0, start_ts - 1), (ABSENT, LOCK, column, start_ts + 1, TS_MAX)
            checks = (*checks[:LOCK_CHECK], *but_ours, *checks[LOCK_CHECK + 1 :])
        lock = pack_lock((kind, primary, body, observers, covers, root, depth, token, path))
        writes: tuple[Write, ...] = ((LOCK, column, start_ts, lock),)
        if data is not None:
            writes = (*writes, (body.decode(), column, start_ts, data))
        cells.append((row, checks, writes))
    return Mutation(part[0].table, _by_row(cells), start_ts)


def commit(header: Header, part: Sequence[Intent], commit_ts: int) -> Mutation:
    """Replace every lock of a part with its write record (T8, N1, N2)."""
    start_ts = header.start_ts
    assert commit_ts > start_ts
    cells: list[_Cell] = []
    for intent in part:
        _, row, column, kind, body, observers, covers, _, _ = intent
        if kind >= READ:
            if kind == READ:
                cells.append(_leave_trace(row, column, start_ts, commit_ts))
            else:
                pending = PENDING, column, start_ts, None
                cells.append((row, (_held(column, start_ts, kind),), (pending, *_final(intent, header, commit_ts))))
            continue
        writes: tuple[Write, ...] = (
            (LOCK, column, start_ts, None),
            (WRITE, column, commit_ts, pack_record(kind, start_ts, body)),
        )
        if observers or covers:
            writes = (*writes, *_notify(intent, header, commit_ts))
        cells.append((row, ((PRESENT, LOCK, column, start_ts, start_ts),), writes))
    return Mutation(part[0].table, _by_row(cells), None, True)


def _shared(header: Header) -> bytes:
    _, primary, root, depth, token, path = header
    return pack_lock((READ, primary, b"", (), (), root, depth, token, path))


def _leave_trace(row: bytes, column: int, start_ts: int, commit_ts: int) -> _Cell:
    """Replace a shared lock with its trace (T8, T14)."""
    writes = (SHARED, column, start_ts, None), (TRACE, column, commit_ts, pack_trace(start_ts))
    return row, ((PRESENT, SHARED, column, start_ts, start_ts),), writes


def one_step(header: Header, part: Sequence[Intent], commit_ts: int) -> Mutation:
    """Check the cells as a prewrite does, and write records and notify cells at once, without locks (C1, C5)."""
    start_ts = header.start_ts
    assert commit_ts > start_ts
    cells: list[_Cell] = []
    by_column: dict[int, tuple[Check, ...]] = {}  # a batch's transaction has many cells of few columns (N20)
    for intent in part:
        _, row, column, kind, body, observers, covers, data, _ = intent
        checks = by_column.get(column)
        if checks is None:
            checks = by_column[column] = (
                (ABSENT, WRITE, column, start_ts, TS_MAX),  # T7
                (ABSENT, ROLLBACK, column, start_ts, start_ts),
                (ABSENT, LOCK, column, 0, TS_MAX),
                (ABSENT, SHARED, column, 0, TS_MAX),  # T14
                (ABSENT, TRACE, column, start_ts, TS_MAX),
            )
        if kind >= READ:
            if kind == READ:
                cells.append((row, checks[:CHECKS_PER_READ], ((TRACE, column, commit_ts, pack_trace(start_ts)),)))
            else:
                cells.append((row, _unmarked(kind, column, start_ts), _final(intent, header, commit_ts)))
            continue
        if kind == ACK:
            checks = (*checks, _as_seen(column, covers))
        writes: tuple[Write, ...] = ((WRITE, column, commit_ts, pack_record(kind, start_ts, body)),)
        if data is not None:
            writes = (*writes, (body.decode(), column, start_ts, data))
        if observers or covers:
            writes = (*writes, *_notify(intent, header, commit_ts))
        cells.append((row, checks, writes))
    return Mutation(part[0].table, cells if len(cells) == 1 else _by_row(cells), start_ts)


def _unmarked(kind: int, column: int, start_ts: int) -> tuple[Check, ...]:
    """A signal has no checks; a bare primary is refused only by its own marker (N5, T5)."""
    return () if kind == SIGNAL else ((ABSENT, ROLLBACK, column, start_ts, start_ts),)


def _final(intent: Intent, header: Header, commit_ts: int) -> list[Write]:
    """The final cells of a pending entry (N5): a signal's notify cells; a run's removals and the record of its cause;
    or a bare primary's trace."""
    if intent.kind == BARE:
        return [(TRACE, intent.column, header.start_ts, pack_proof(commit_ts))]
    writes = _notify(intent, header, commit_ts)
    if intent.body:
        writes.append((WRITE, intent.column, commit_ts, pack_record(ACK, header.start_ts, intent.body)))
    return writes


def roll_forward(cell: Cellref, start_ts: int, lock: Lock, commit_ts: int) -> Mutation:
    """Commit one cell on behalf of another client: the lock holds everything that this needs (N1)."""
    intent = Intent(cell.table, cell.row, cell.column, lock.kind, lock.body, lock.observers, lock.covers)
    header = Header(start_ts, lock.primary, lock.root, lock.depth, lock.token, lock.path)
    return commit(header, [intent], commit_ts)


def _notify(intent: Intent, header: Header, commit_ts: int) -> list[Write]:
    """Put notify cells for the observers of a cell (N1, N5), or remove those that a run has seen (N2, N6)."""
    column = intent.column
    writes: list[Write] = []
    if intent.observers:
        root, depth, path = intent.cause or (header.root, header.depth, header.path)
        cause = pack_cause(root or commit_ts, depth, path)
        for observer in intent.observers:
            writes.append((NOTIFY, ack_of(column, observer), commit_ts, cause))
    for seen_ts in intent.covers:
        assert seen_ts <= header.start_ts, "N2: a run removes only what it saw"
        writes.append((NOTIFY, column, seen_ts, None) if seen_ts > 0 else (FAILED_LIST, column, -seen_ts, None))
    return writes


def _as_seen(ack: int, covers: tuple[int, ...]) -> Check:
    """Check that the failed list is as the run saw it (N6). If the run saw a failed change, the last of `covers`
    is the negative timestamp of that change."""
    failed_ts = -covers[-1] if covers else 0
    if failed_ts > 0:
        return (PRESENT, FAILED_LIST, ack, failed_ts, failed_ts)
    return (ABSENT, FAILED_LIST, ack, 0, TS_MAX)


def release(header: Header, part: Sequence[Intent], *, marker: bool) -> Mutation:
    """Release a part whose locks we hold: T5 (a), with the marker, if the part has the primary, else T5 (c)."""
    start_ts = header.start_ts
    cells: list[_Cell] = []
    for _, row, column, kind, body, _, _, _, _ in part:
        writes: list[Write] = []
        _clear(writes, column, start_ts, kind, body)
        if marker and column == header.primary.column and row == header.primary.row:
            writes.append((ROLLBACK, column, start_ts, b""))
        cells.append((row, (_held(column, start_ts, kind),), writes))
    return Mutation(part[0].table, _by_row(cells), None, True)


def roll_back_primary(primary: Cellref, start_ts: int, lock: Lock) -> Mutation:
    """Roll back a primary that is locked: T5 (a)."""
    column = primary.column
    writes: list[Write] = []
    _clear(writes, column, start_ts, lock.kind, lock.body)
    writes.append((ROLLBACK, column, start_ts, b""))
    return _one(primary, [_held(column, start_ts, lock.kind)], writes)


def put_marker(primary: Cellref, start_ts: int) -> Mutation:
    """T5 (b): put the primary's marker; after that, a late prewrite of the primary is refused (T7)."""
    column = primary.column
    checks: list[Check] = [
        (ABSENT, LOCK, column, start_ts, start_ts),
        (ABSENT, WRITE, column, start_ts, TS_MAX),
    ]
    if is_bare(column):
        checks = [(ABSENT, group, column, start_ts, start_ts) for group in (PENDING, TRACE)]
    return _one(primary, checks, [(ROLLBACK, column, start_ts, b"")], floor_ts=start_ts)


def roll_back_secondary(cell: Cellref, start_ts: int, lock: Lock) -> Mutation:
    """Roll back a secondary: T5 (c)."""
    writes: list[Write] = []
    _clear(writes, cell.column, start_ts, lock.kind, lock.body)
    return _one(cell, [_held(cell.column, start_ts, lock.kind)], writes)


def _held(column: int, start_ts: int, kind: int) -> Check:
    """Check that a lock of this kind is still there (T8)."""
    return (PRESENT, group_of(kind), column, start_ts, start_ts)


def group_of(kind: int) -> str:
    """The group that holds locks of a kind."""
    return LOCK if kind < READ else SHARED if kind == READ else PENDING


def _clear(writes: list[Write], column: int, start_ts: int, kind: int, body: bytes) -> None:
    writes.append((group_of(kind), column, start_ts, None))
    if kind == PUT_DATA:
        writes.append((body.decode(), column, start_ts, None))


def _one(cell: Cellref, checks: list[Check], writes: list[Write], floor_ts: int | None = None) -> Mutation:
    return Mutation(cell.table, ((cell.row, checks, writes),), floor_ts, True)
