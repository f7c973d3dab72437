"""How transactions are stored as cells.

    group      at          value
    data       start_ts    a value that is too long for the record; users' groups are named data:NAME
    lock       start_ts    Lock: an undecided (or not yet settled) write of the transaction that began at start_ts
    write      commit_ts   Record: "committed; the write was made by the transaction that began at start_ts"
    rollback   start_ts    a marker: the transaction that began at start_ts will never commit (T5)
    notify     commit_ts   Cause: this change waits for an observer; one cell per observer (N1, N11)
    failed     commit_ts   a change that was given up, one per row and observer (N6); see `failed.py`
    pending    start_ts    Lock of kind SIGNAL: the notify cells to put or remove once its transaction commits (N5);
                           in a bare column, Lock of kind BARE: a bare primary
    shared     start_ts    Lock of kind READ: a cell that an undecided transaction has read under a lock (T14)
    trace      commit_ts   what a shared lock leaves: "committed; read by the transaction that began at start_ts"
               start_ts    in a bare column: commit_ts of a transaction that has written nothing

Column numbers: the catalogue numbers a table's columns from 1. In the store, a column is `number << 16`, and the
acknowledgement (ack) by its observer `o` is the column `number << 16 | o` (N3): an ordinary transactional cell without
data, next to the cell that it acknowledges. A notify cell for observer `o` has the same column number. Above all these
numbers, each signal has a *bare* column, for the primaries of transactions that raise signals and write nothing. One
bare column may hold many primaries, each at its own start_ts, so they never conflict (N5).

N1  A lock holds everything that another client needs to roll it forward: primary, kind, short value, observers; an
    acknowledgement's lock also lists the notify cells that its commit removes (N2).
N5  A pending entry has the form of a lock and names the primary, but blocks no other transaction. In a signal's column,
    it lists the observers to notify; in an observer's column, it lists the notify cells that the observer's run has
    seen. In that column, the run's commit also leaves a record of kind ACK, with the run's cause. No decision depends
    on that record.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import msgpack

from perco.errors import Corruption
from perco.storage import DATA, ROW_BYTES_MAX, TS_MAX
from perco.storage.cells import COLUMN_MAX

SHORT_VALUE_BYTES: Final = 256  # up to this length, a value is in the lock and in the record, so a read saves a seek

# What a lock or a record does to its cell.
PUT: Final = 1  # the value is in the record
PUT_DATA: Final = 2  # the value is in a data group, at start_ts; the record names the group
DELETE: Final = 3
ACK: Final = 4
READ: Final = 5  # nothing: the cell was read under a lock; in the shared and trace groups
SIGNAL: Final = 6  # nothing: notify cells are put for a signal, or removed after a run; in the pending group (N5)
BARE: Final = 7  # nothing: the cell is a bare primary; in the pending and trace groups

_RECORD: Final = struct.Struct(">BQ")
_pack_record = _RECORD.pack
RECORD_HEAD: Final = _RECORD.size
_DATA: Final = DATA.encode()
_DATA_OF: Final = _DATA + b":"


_BARE: Final = 1 << 31  # the columns of the catalogue are below it


def column_of(number: int) -> int:
    """The store's column for a column of the catalogue."""
    return number << 16


def ack_of(column: int, observer: int) -> int:
    """The store's column for the acknowledgement by an observer of `column`, and for its notify cells."""
    return column | observer


def observer_of(column: int) -> int:
    return column & 0xFFFF


def observed_column(column: int) -> int:
    return column & ~0xFFFF


ACK_HEAD_BYTES: Final = 4


def ack_head(version: int) -> bytes:
    """The beginning of an acknowledgement's body: the version of its observer (N3); the cause follows (N9)."""
    return version.to_bytes(ACK_HEAD_BYTES, "big")


def ack_version(body: bytes) -> int:
    """The version of the observer that made an acknowledgement, from its body. Raises: Corruption."""
    if not body:
        return 1
    if len(body) < ACK_HEAD_BYTES:
        raise Corruption("write group", f"not the version of an observer: {body[:16].hex()}")
    return int.from_bytes(body[:ACK_HEAD_BYTES], "big")


def raised_head(version: int, raised: int) -> bytes:
    """The beginning of the record of a run for a signal, before the cause: the observer's version, and the timestamp at
    which the signal was raised (N5)."""
    return ack_head(version) + raised.to_bytes(8, "big")


def cause_of_run(body: bytes, *, signal: bool) -> tuple[int, tuple[int, int, bytes, int]] | None:
    """The cause in the record of a run (N9): when the signal was raised (0: the run was not for a signal), and the
    cause as `unpack_cause` returns it. None: the record has no cause.

    Raises: Corruption.
    """
    head = ACK_HEAD_BYTES + 8 * signal
    if len(body) <= head:
        return None
    return int.from_bytes(body[ACK_HEAD_BYTES:head], "big"), unpack_cause(body[head:])


def bare_column(signal: int) -> int:
    """The bare column of a signal, given the signal's column or the column of one of its observers."""
    return _BARE | observed_column(signal)


def signal_of(column: int) -> int:
    """The signal's column, given its bare column; any other column is returned as it is."""
    return column & ~_BARE


def is_bare(column: int) -> bool:
    """Whether a column is bare."""
    return column >= _BARE


class Record(NamedTuple):
    """A committed write: kind, the transaction's start_ts, and the short value or the name of the data group."""

    kind: int
    start_ts: int
    body: bytes


def pack_record(kind: int, start_ts: int, body: bytes) -> bytes:
    return _pack_record(kind, start_ts) + body


def unpack_record(value: bytes) -> Record:
    if len(value) < RECORD_HEAD or not PUT <= value[0] <= ACK:
        raise Corruption("write group", f"not a write record: {value[:16].hex()}")
    return Record(value[0], int.from_bytes(value[1:9], "big"), value[9:])


def data_group(body: bytes) -> str:
    """The data group that a record or lock of kind PUT_DATA names.

    Raises: Corruption.
    """
    if body != _DATA and not body.startswith(_DATA_OF):
        raise Corruption("write group", f"not the name of a data group: {body[:16].hex()}")
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Corruption("write group", f"not the name of a data group: {body[:16].hex()}") from error


def pack_trace(start_ts: int) -> bytes:
    """The value of a trace: a record that writes nothing."""
    return _pack_record(READ, start_ts)


def unpack_trace(value: bytes) -> int:
    """The start_ts of the transaction that read."""
    if len(value) != RECORD_HEAD or value[0] != READ:
        raise Corruption("trace group", f"not a trace: {value[:16].hex()}")
    return int.from_bytes(value[1:9], "big")


def pack_proof(commit_ts: int) -> bytes:
    """The value of a bare primary's trace; the trace is stored at the transaction's start_ts."""
    return _pack_record(BARE, commit_ts)


def unpack_proof(value: bytes) -> int:
    """The commit_ts of the transaction that began at the trace's timestamp."""
    if len(value) != RECORD_HEAD or value[0] != BARE:
        raise Corruption("trace group", f"not a bare primary's trace: {value[:16].hex()}")
    return int.from_bytes(value[1:9], "big")


class Cellref(NamedTuple):
    """A cell of a table, without a version."""

    table: str
    row: bytes
    column: int


class Lock(NamedTuple):
    """The contents of a lock (N1).

    `body`: as in Record. `observers`: the numbers of the observers to notify when the lock is replaced with a record.
    `covers`: the timestamps of the notify cells that a run's commit removes (N2); a negative one is the timestamp of
    the failed change that it removes (N6). `root`, `depth`, `path`: the cause of the change (N9); root 0: this
    transaction itself. `token`: the token of the transaction (L3).
    """

    kind: int
    primary: Cellref
    body: bytes
    observers: tuple[int, ...]
    covers: tuple[int, ...]
    root: int
    depth: int
    token: str
    path: bytes = b""


_packer = msgpack.Packer(use_bin_type=True)
_WALL_AT: Final = 6  # the index, after kind and primary, of a wall time, in locks stored by an earlier version (L1)


def pack_lock(lock: tuple[Any, ...]) -> bytes:
    """Pack a Lock, or a plain tuple of the same fields (the hot path)."""
    return _packer.pack(lock)  # type: ignore[no-any-return]


def unpack_lock(value: bytes, start_ts: int = TS_MAX) -> Lock:
    """The lock of the transaction that began at `start_ts`."""
    try:
        kind, primary, *rest = msgpack.unpackb(value, use_list=False, max_bin_len=1 << 20)
        if len(rest) > _WALL_AT and type(rest[_WALL_AT]) is int:
            del rest[_WALL_AT]
        lock = Lock(kind, Cellref(*primary), *rest)
        if not _is_sound(lock, start_ts):
            raise ValueError("a field that no lock has")
        return lock
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException, Corruption) as error:
        raise Corruption("lock group", f"not a lock: {value[:16].hex()}") from error


def _is_sound(lock: Lock, start_ts: int) -> bool:
    kind, primary, body, observers, covers, root, depth, token, path = lock
    sound = (
        [type(part) for part in primary] == [str, bytes, int]
        and [type(part) for part in (body, observers, covers, token, path)] == [bytes, tuple, tuple, str, bytes]
        and all(type(number) is int for number in (kind, *observers, *covers, root, depth))
        and PUT <= kind <= BARE
        and len(primary.row) <= ROW_BYTES_MAX
        and 0 <= primary.column <= COLUMN_MAX
        and 0 <= root <= TS_MAX
        and all(0 < abs(ts) <= start_ts for ts in covers)  # N2
        and all(0 < number <= 0xFFFF for number in observers)
        and 0 <= depth <= DEPTH_MAX
        and len(path) <= _PATH_MOST
        and len(path) % 2 == 0
    )
    if sound and kind == PUT_DATA:
        data_group(body)
    return sound


_CAUSE: Final = struct.Struct(">QHH")
_pack_cause = _CAUSE.pack
_unpack_cause = _CAUSE.unpack_from
CAUSE_BYTES: Final = _CAUSE.size  # besides the path
DEPTH_MAX: Final = 0xFFFF  # also written for greater depths
ATTEMPTS_MAX: Final = 0xFFFF
_PATH_BYTES: Final = 64  # the last 32 observers of a chain
_MARK: Final = b"\x00\x00"  # in place of an observer's number: after it comes a trace context
CONTEXT_BYTES: Final = 26
_PATH_MOST: Final = _PATH_BYTES + len(_MARK) + CONTEXT_BYTES


def pack_cause(root: int, depth: int, path: bytes = b"", attempts: int = 0) -> bytes:
    """The value of a notify cell (N9).

    Args:
        root: commit_ts of the transaction from outside that began the chain.
        depth: how many observers the chain has gone through; `path`: the numbers of the last of them, two bytes each,
            and perhaps a trace context (`with_context`).
        attempts: how many runs have failed for the change (N6).
    """
    return _pack_cause(root, attempts, depth) + path


def unpack_cause(value: bytes) -> tuple[int, int, bytes, int]:
    """(root, depth, path, attempts), as they were packed."""
    if not CAUSE_BYTES <= len(value) <= CAUSE_BYTES + _PATH_MOST or len(value) % 2:
        raise Corruption("notify group", f"not a cause: {value[:16].hex()}")
    root, attempts, depth = _unpack_cause(value)
    return root, depth, value[CAUSE_BYTES:], attempts


def longer(path: bytes, step: bytes) -> bytes:
    """The path after one more observer; `step`: its number, in two bytes."""
    end = _steps_end(path)
    return (path[:end] + step)[-_PATH_BYTES:] + path[end:]


def observers_on(path: bytes) -> list[int]:
    """The numbers on a path, the last one at the end."""
    return [int.from_bytes(path[at : at + 2], "big") for at in range(0, _steps_end(path), 2)]


def with_context(path: bytes, context: bytes) -> bytes:
    """The path with a trace context, of CONTEXT_BYTES, which replaces the one that it may have; b"": none."""
    steps = path[: _steps_end(path)]
    return steps + _MARK + context if context else steps


def context_on(path: bytes) -> bytes:
    """The trace context that a path carries; b"": none, or none that is one."""
    context = path[_steps_end(path) + len(_MARK) :]
    return context if len(context) == CONTEXT_BYTES else b""


def _steps_end(path: bytes) -> int:
    """Where the observers on a path end. No observer has the number 0."""
    for at in range(0, len(path), 2):
        if path[at : at + 2] == _MARK:
            return at
    return len(path)
