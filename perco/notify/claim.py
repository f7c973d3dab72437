"""Does this row need this observer? Pure.

N2  A run with start_ts T removes notify cells of its own observer only, only those it saw, only with timestamp <= T.
N3  The ack is an ordinary cell whose newest record points at the start_ts of the run that committed it: *the pointer is
    the ack*. Run if and only if the newest record of the observed cell is newer than the pointer. Both are read at T
    under T9, and the ack is the run's primary: so at most one run commits per change and version of the observer. An
    ack says which version made it; those of a lower one no longer count.
N4  Many writes may collapse into one run, which sees the newest.
N5  A signal has neither value nor ack: run if and only if a notify cell stands. What another run has seen may stand for
    a while after it has committed; a pending removal says so, and is waited for, lest one signal be run for twice.
N9  The cause travels along: the earliest root of what is collapsed, so that nobody who waits for it is told too soon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from perco.errors import Corruption
from perco.storage import LOCK, NOTIFY, PENDING, WRITE, Cell, Query
from perco.txn.records import ACK, ack_version, unpack_cause, unpack_record
from perco.txn.snapshot import Blocked

COVERS_MAX: Final = 512  # notify cells that one run takes with it; what is left asks for another look


def claim_queries(column: int, ack: int, ts: int) -> list[Query]:
    """What to read of the row at the run's start_ts."""
    return [
        (NOTIFY, ack, 0, ts, COVERS_MAX),
        (LOCK, ack, 0, ts, 1),
        (WRITE, ack, 0, ts, 1),
        (LOCK, column, 0, ts, 1),
        (WRITE, column, 0, ts, 1),
    ]


def signal_queries(ack: int, ts: int) -> list[Query]:
    """The same for an observer of a signal."""
    return [(NOTIFY, ack, 0, ts, COVERS_MAX), (PENDING, ack, 0, ts, 1)]


@dataclass(frozen=True, slots=True)
class Run:
    """The observer must run. `covers`: the notify cells that its commit removes; `collapsed`: changes beyond one;
    `pointer`: up to where it has seen the cell already."""

    covers: tuple[int, ...]
    root: int
    depth: int
    collapsed: int
    pointer: int = 0


@dataclass(frozen=True, slots=True)
class Handled:
    """Every change seen was handled by an earlier run: only remove these notify cells."""

    covers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InTheWay:
    """A lock at or below start_ts on the ack, or else on the observed cell; of a signal: another run's removal."""

    ack: bool
    lock: Blocked


@dataclass(frozen=True, slots=True)
class Gone:
    """There is nothing to do: somebody else has done it."""


def decide(cells: Sequence[Sequence[Cell]], start_ts: int, version: int = 1) -> Run | Handled | Gone | InTheWay:
    """Run, tidy up, or nothing; InTheWay where a lock must be settled before one can tell (T9).

    `version`: of the observer; what a lower one has acknowledged is to be run again.

    Raises: Corruption for a notify cell or an ack that does not decode.
    """
    notified, ack_locks, acks, locks, writes = cells
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
    if newest <= pointer:
        return Handled(covers)
    root, depth = unpack_cause(notified[0][1])
    fresh = 0
    for ts, cause in notified:
        fresh += ts > pointer
        one_root, one_depth = unpack_cause(cause)
        root, depth = min(root, one_root), max(depth, one_depth)
    return Run(covers, root, depth + 1, max(fresh - 1, 0), pointer)


def decide_signal(cells: Sequence[Sequence[Cell]], start_ts: int) -> Run | Gone | InTheWay:
    """The same for an observer of a signal, of the cells that `signal_queries` asks for (N5).

    Raises: Corruption for a notify cell that does not decode.
    """
    notified, removals = cells
    if not notified:
        return Gone()
    if removals:
        return InTheWay(ack=True, lock=Blocked(*removals[0]))
    covers = tuple([ts for ts, _ in notified])
    assert covers[0] <= start_ts, "N2"
    causes = [unpack_cause(cause) for _, cause in notified]
    root, depth = min(root for root, _ in causes), max(depth for _, depth in causes)
    return Run(covers, root, depth + 1, len(covers) - 1)
