"""Decides whether an observer must run for a row. Pure.

N2  A run with start_ts T removes only notify cells of its own observer, only those that it saw, and only those at or
    below T.
N3  An acknowledgement is an ordinary cell. Only the pointer in its newest record counts: the start_ts of the run that
    committed the record. An observer must run if and only if the newest record of the observed cell is newer than that
    pointer. A run reads both at T under T9, and writes the acknowledgement (T7), so at most one run commits per change
    and version of the observer. An acknowledgement names the version of the observer that made it;
    acknowledgements by lower versions do not count.
N4  Many writes may collapse into one run, which sees the newest value.
N5  A signal has neither a value nor an acknowledgement: its observer must run if and only if there is a notify cell.
    The notify cells that a run saw may stay for a while after the run's commit, together with a pending entry for their
    removal. The next run waits for the removal, so that one signal does not get two runs.
N6  A run sees the failed list's entry for its row and observer, and removes the entry if it commits. When the changes
    of a run are given up, so are all changes up to its start_ts, even if the run covers only some of them: a change
    that is older than a failed one gets no run.
N9  A run gives the changes that it makes the earliest root (commit_ts of the transaction that began the chain) of the
    changes that collapse into it, so that no wait for that root ends too soon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from perco.errors import Corruption
from perco.protocol.records import ACK, DEPTH_MAX, ack_version, pack_cause, unpack_cause, unpack_record
from perco.protocol.snapshot import Blocked
from perco.storage import FAILED_LIST, LOCK, NOTIFY, PENDING, WRITE, Cell, Query

COVERS_MAX: Final = 512  # notify cells that one run covers; if there are more, the row is examined again


def claim_queries(column: int, ack: int, ts: int) -> list[Query]:
    """Queries for the row, as of the run's start_ts."""
    return [
        (NOTIFY, ack, 0, ts, COVERS_MAX),
        (LOCK, ack, 0, ts, 1),
        (WRITE, ack, 0, ts, 1),
        (LOCK, column, 0, ts, 1),
        (WRITE, column, 0, ts, 1),
        (FAILED_LIST, ack, 0, ts, 1),
    ]


def signal_queries(ack: int, ts: int) -> list[Query]:
    """Queries for the row, as of the run's start_ts, for an observer of a signal."""
    return [(NOTIFY, ack, 0, ts, COVERS_MAX), (PENDING, ack, 0, ts, 1), (FAILED_LIST, ack, 0, ts, 1)]


class Run(NamedTuple):
    """The observer must run.

    Attributes:
        covers: the timestamps of the notify cells that the run sees.
        root, depth, path: the cause of the changes that the run will make (N9); its own observer is not in the path.
        collapsed: the number of changes that collapse into the run, minus one.
        pointer: the start_ts to which the acknowledgement points; 0: there is no acknowledgement that counts.
        attempts: how many runs have failed for these changes (N6).
        cause: the run's own cause, for its acknowledgement.
        removes: the timestamps of the notify cells that the run's commit removes: `covers`, and then the negative
            timestamp of the failed change, if there is one (N6).
        failed: the failed change, (ts, value), or None.
        raised: the timestamp of the newest covered notify cell with this root; for a signal, when it was raised.
    """

    covers: tuple[int, ...]
    root: int
    depth: int
    collapsed: int
    pointer: int = 0
    path: bytes = b""
    attempts: int = 0
    cause: bytes = b""
    removes: tuple[int, ...] = ()
    failed: Cell | None = None
    raised: int = 0


@dataclass(frozen=True, slots=True)
class Handled:
    """Earlier runs have handled every change that was seen: only remove these notify cells."""

    covers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InTheWay:
    """A lock at or below start_ts, at the acknowledgement (`ack`) or at the observed cell; for a signal: the pending
    removal by another run."""

    ack: bool
    lock: Blocked


@dataclass(frozen=True, slots=True)
class Gone:
    """There is nothing to do: another run has done it."""


def decide(cells: Sequence[Sequence[Cell]], start_ts: int, version: int = 1) -> Run | Handled | Gone | InTheWay:
    """Decide whether to run, only remove notify cells, or do nothing; InTheWay: a lock must be settled first (T9).

    `version`: the observer's version. The observer runs again for changes that only a lower version has acknowledged.

    Raises: Corruption for a notify cell or an acknowledgement that does not decode.
    """
    notified, ack_locks, acks, locks, writes, failed = cells
    if not notified:
        return Gone()
    if ack_locks or locks:
        return InTheWay(ack=bool(ack_locks), lock=Blocked(*(ack_locks or locks)[0]))
    covers = tuple([ts for ts, _ in notified])
    assert covers[0] <= start_ts, "N2"  # the newest comes first
    pointer = 0
    if acks:
        record = unpack_record(acks[0][1])
        if record.kind != ACK:
            raise Corruption("write group", f"N3: an ack is expected here, not a record of kind {record.kind}")
        if version == 1 or ack_version(record.body) >= version:
            pointer = record.start_ts
    newest = writes[0][0] if writes else 0
    if newest <= pointer or covers[0] <= pointer:
        return Handled(covers)
    if failed and covers[0] < failed[0][0]:
        return Handled(covers)  # N6: left over: these changes were given up together with a newer one
    return _run(covers, notified, pointer, failed[0] if failed else None)


def decide_signal(cells: Sequence[Sequence[Cell]], start_ts: int) -> Run | Gone | InTheWay:
    """Decide for an observer of a signal, from the cells that `signal_queries` asks for (N5).

    Raises: Corruption for a notify cell that does not decode.
    """
    notified, removals, failed = cells
    if not notified:
        return Gone()
    if removals:
        return InTheWay(ack=True, lock=Blocked(*removals[0]))
    covers = tuple([ts for ts, _ in notified])
    assert covers[0] <= start_ts, "N2"
    return _run(covers, notified, 0, failed[0] if failed else None)


def _run(covers: tuple[int, ...], notified: Sequence[Cell], pointer: int, failed: Cell | None) -> Run:
    cause = notified[0][1]
    root, depth, path, attempts = unpack_cause(cause)
    fresh, raised = 1, covers[0]
    if len(notified) > 1:
        fresh = sum(ts > pointer for ts, _ in notified)
        found = [unpack_cause(value) for _, value in notified]
        root = min(one[0] for one in found)
        raised = next(ts for ts, one in zip(covers, found, strict=True) if one[0] == root)
        _, depth, path, _ = max(found, key=lambda one: one[1])
        attempts = max(one[3] for one in found)
        cause = pack_cause(root, depth, path, attempts)
    removes = covers if failed is None else (*covers, -failed[0])
    depth = depth + 1 if depth < DEPTH_MAX else depth
    return Run(covers, root, depth, fresh - 1 if fresh else 0, pointer, path, attempts, cause, removes, failed, raised)
