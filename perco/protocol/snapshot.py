"""Decides what a read at S sees, as a pure function of the cells found.

    look(locks, writes) -> Missing | Value | InData | Blocked

T9  A read at S that finds a lock with start_ts <= S neither skips it nor returns without the cell: it is `Blocked`
    until the outcome of the lock's transaction is known. A lock above S cannot matter: that transaction's commit_ts
    will be above S, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from perco.protocol.records import ACK, DELETE, PUT, PUT_DATA, RECORD_HEAD, data_group, unpack_record
from perco.storage import LOCK, WRITE, Cell, Query


class Missing:
    """The cell has no value: it was never written, or was deleted. `commit_ts` 0: never written."""

    commit_ts: int

    __slots__ = ("commit_ts",)

    def __init__(self, commit_ts: int = 0) -> None:
        self.commit_ts = commit_ts

    def __repr__(self) -> str:
        return f"Missing({self.commit_ts})"


class Value(NamedTuple):
    commit_ts: int
    value: bytes


class InData(NamedTuple):
    """The value is stored in a data group, at start_ts."""

    commit_ts: int
    start_ts: int
    group: str


class Blocked(NamedTuple):
    """An undecided lock: (its start_ts, its packed Lock)."""

    start_ts: int
    lock: bytes


Seen: TypeAlias = Missing | Value | InData | Blocked
NEVER: Final = Missing()


def queries_for(column: int, ts: int) -> tuple[Query, Query]:
    """Queries for one cell of a row at `ts`: locks first, newest write second."""
    return (LOCK, column, 0, ts, 1), (WRITE, column, 0, ts, 1)


def plain(locks: Sequence[Cell], writes: Sequence[Cell]) -> bytes | None:
    """The hot path of `look`: the value, if no lock is in the way and the record holds it, else None."""
    if locks or not writes:
        return None
    record = writes[0][1]
    return record[RECORD_HEAD:] if len(record) >= RECORD_HEAD and record[0] == PUT else None


def look(locks: Sequence[Cell], writes: Sequence[Cell], settled: int = -1) -> Seen:
    """One cell as a read sees it; `settled`: start_ts of a lock whose outcome is known and already accounted for."""
    if locks and locks[0][0] != settled:
        return Blocked(*locks[0])  # T9
    if not writes:
        return NEVER
    commit_ts, value = writes[0]
    if len(value) >= RECORD_HEAD and value[0] == PUT:
        return Value(commit_ts, value[RECORD_HEAD:])
    return _look_further(commit_ts, value)


def _look_further(commit_ts: int, value: bytes) -> Seen:
    kind, start_ts, body = unpack_record(value)
    if kind == PUT_DATA:
        return InData(commit_ts, start_ts, data_group(body))
    if kind in (DELETE, ACK):
        return Missing(commit_ts)
    return Value(commit_ts, body)


def data_query(seen: InData, column: int) -> Query:
    return (seen.group, column, seen.start_ts, seen.start_ts, 1)
