"""The failed list: changes whose observer failed too often, as values. Pure.

    group failed, column of the acknowledgement, at the change's timestamp
        -> root, depth, path, attempts, error, traceback, wall time

N6  A change waits (it has a notify cell), has failed (it is on the list), or is acknowledged; it is never in two of
    these states. Each transition is one mutation of the row. The mutation names exact timestamps, and checks that the
    row has not changed since it was read. The list has at most one entry for each row and observer: a later failure
    replaces the entry. Acknowledgements check the list, too (`mutations.py`), so none commits for a change that was
    given up since its run began.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgpack

from perco.errors import Corruption
from perco.protocol.records import ATTEMPTS_MAX, Cellref, pack_cause, unpack_cause
from perco.storage import ABSENT, FAILED_LIST, LOCK, NOTIFY, PENDING, PRESENT, TS_MAX, WRITE, Check, Mutation, Write

ERROR_CHARS: Final = 500
TRACEBACK_CHARS: Final = 8000
_FRAMES: Final = 50  # of each traceback, the last ones
_LEFT_OUT: Final = "\n... {} characters are left out here ...\n"


class FailedCell(NamedTuple):
    """A cell of the failed list.

    Attributes:
        root, depth, path: as in the notify cell that this cell replaces (N9).
        attempts: how many runs failed; 0: the observer never ran for the change.
        error: the error of the last run, in one line; `traceback`: its traceback, or "".
        wall_ms: the oracle's wall time when the change was given up, in milliseconds.
    """

    root: int
    depth: int
    path: bytes
    attempts: int
    error: str
    traceback: str
    wall_ms: int

    def pack(self) -> bytes:
        cause = pack_cause(self.root, self.depth, self.path, min(self.attempts, ATTEMPTS_MAX))
        return msgpack.packb([cause, self.error, self.traceback, self.wall_ms])  # type: ignore[no-any-return]


def unpack_failed(value: bytes) -> FailedCell:
    """A cell of the failed list. Raises: Corruption."""
    try:
        cause, error, text, wall_ms = msgpack.unpackb(value)
        root, depth, path, attempts = unpack_cause(cause)
        if [type(error), type(text), type(wall_ms)] != [str, str, int] or wall_ms < 0:
            raise ValueError("a field that no failed change has")
    except (ValueError, TypeError, msgpack.UnpackException, Corruption) as bad:
        raise Corruption("failed group", f"not a failed change: {value[:16].hex()}") from bad
    return FailedCell(root, depth, path, attempts, error, text, wall_ms)


# ------------------------------------------------------------------ errors as text


def describe(error: BaseException) -> str:
    """An exception in one line, of bounded length, that can be encoded as UTF-8."""
    try:
        said = str(error)
    except Exception as worse:  # the exception is the user's
        said = f"(its text cannot be shown: {type(worse).__name__})"
    lines = said.split("\n", 1)
    text = f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__
    text += " ..." if len(lines) > 1 else ""
    return _clean(text if len(text) <= ERROR_CHARS else text[: ERROR_CHARS - 3] + "...")


def describe_wholly(error: BaseException) -> str:
    """The traceback of an exception, of bounded length: only the beginning and the end of a long one."""
    try:
        text = "".join(traceback.format_exception(error, limit=-_FRAMES))
    except Exception as worse:  # the exception is the user's, and so are its notes and causes
        text = f"(the traceback cannot be shown: {type(worse).__name__})"
    if len(text) > TRACEBACK_CHARS:
        head, tail = TRACEBACK_CHARS // 4, TRACEBACK_CHARS - TRACEBACK_CHARS // 4
        text = text[:head] + _LEFT_OUT.format(len(text) - TRACEBACK_CHARS) + text[-tail:]
    return _clean(text)


def _clean(text: str) -> str:
    """Escape lone surrogates, which come from file names and damaged text."""
    return text.encode("utf-8", "backslashreplace").decode()


# ------------------------------------------------------------------ mutations


def count_attempt(ack: Cellref, ts: int, cause: bytes) -> Mutation:
    """Rewrite the notify cell at `ts` with `cause`, which has the new number of failed attempts."""
    return _of(ack, [(PRESENT, NOTIFY, ack.column, ts, ts)], [(NOTIFY, ack.column, ts, cause)])


def give_up(ack: Cellref, start_ts: int, covers: Sequence[int], before: int, ts: int, cell: FailedCell) -> Mutation:
    """Move a waiting change to the failed list.

    Args:
        start_ts: the start_ts of the run that failed. The mutation is refused if another run has committed an
            acknowledgement since then, because that run may have seen the same changes.
        covers: the timestamps of the notify cells that the failed run saw.
        before: the timestamp of the entry that is already on the list; 0: there is none.
        ts: the timestamp of the newest change that is given up.
    """
    column = ack.column
    assert 0 < ts <= start_ts, "N2"
    assert before <= ts, "N6: the newest of what is given up"
    checks: list[Check] = [(PRESENT, NOTIFY, column, seen, seen) for seen in covers]
    checks += [(ABSENT, LOCK, column, 0, TS_MAX), (ABSENT, WRITE, column, start_ts, TS_MAX)]
    checks += [(ABSENT, PENDING, column, 0, TS_MAX), _listed(column, before)]
    writes: list[Write] = [(NOTIFY, column, seen, None) for seen in covers]
    if before and before != ts:
        writes.append((FAILED_LIST, column, before, None))
    writes.append((FAILED_LIST, column, ts, cell.pack()))
    return _of(ack, checks, writes)


def put_back(ack: Cellref, ts: int, cell: FailedCell) -> Mutation:
    """Let a failed change wait again, at its old timestamp, with no attempts counted."""
    cause = pack_cause(cell.root, cell.depth, cell.path)
    writes: list[Write] = [(FAILED_LIST, ack.column, ts, None), (NOTIFY, ack.column, ts, cause)]
    return _of(ack, [*_unlocked(ack.column), _listed(ack.column, ts)], writes)


def forget(ack: Cellref, ts: int) -> Mutation:
    """Remove a failed change from the list, because a newer change waits and its run will cover both."""
    checks = [*_unlocked(ack.column), _listed(ack.column, ts)]
    return _of(ack, checks, [(FAILED_LIST, ack.column, ts, None)])


def _unlocked(column: int) -> list[Check]:
    """Check that no run that would remove the change is about to commit."""
    return [(ABSENT, LOCK, column, 0, TS_MAX), (ABSENT, PENDING, column, 0, TS_MAX)]


def _listed(column: int, ts: int) -> Check:
    if ts:
        return (PRESENT, FAILED_LIST, column, ts, ts)
    return (ABSENT, FAILED_LIST, column, 0, TS_MAX)


def _of(ack: Cellref, checks: Sequence[Check], writes: Sequence[Write]) -> Mutation:
    row: Any = (ack.row, tuple(checks), tuple(writes))
    return Mutation(ack.table, (row,))
