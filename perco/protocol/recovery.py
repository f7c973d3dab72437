"""Decides the outcome of a transaction, and what to do with a lock that it left. Works on values only; no I/O.

    judge(primary's cells)  -> Committed(ts) | Aborted | Locked(lock) | Nothing

    Recovery:  ASK --committed--> FORWARD --> SETTLED
                |  --aborted----> BACK -----> SETTLED
                |  --locked, alive--> WAIT
                |  --locked, dead---> ROLL_PRIMARY --applied--> BACK       refused: ASK
                '--nothing, dead----> MARK ---------applied--> BACK        refused: ASK

T1  If the primary has a write record that points at start_ts, the transaction has committed. If it has another record
    at or above start_ts, the transaction has aborted: its lock would have prevented that record (T7).
N5  No other transaction uses a bare primary: only the transaction's own trace means that it has committed, and only its
    own marker that it has aborted.
T4  The transaction's marker, or another transaction's record at or above start_ts, means that it has aborted. Its own
    lock means that it is undecided. After old versions have been collected, only the transaction's own record, its
    marker, or our own decision is proof (`conclusive`).
T5  The primary is settled first: (a) with its lock, if that is there, or (b) with a marker. Only then do the
    secondaries follow (c).
T13 No marker can be put below the floor, and none is needed, because a late prewrite is refused, too. So if the
    primary is read again after the refusal and still holds nothing of the transaction, the transaction did not commit.
T8  Each step checks that the lock is still there; if the step is refused, the primary is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from perco.errors import Corruption, Unavailable
from perco.protocol import mutations
from perco.protocol.records import Cellref, Lock, is_bare, unpack_lock, unpack_proof, unpack_record
from perco.storage import (
    APPLIED,
    LOCK,
    PENDING,
    ROLLBACK,
    TRACE,
    TS_MAX,
    WRITE,
    Cell,
    Failed,
    Mutation,
    NoReply,
    Query,
    Refused,
    Verdict,
)

_LOST_MAX: Final = 16  # decisions without a reply, before the recovery is given up


class Committed(NamedTuple):
    commit_ts: int


class Aborted(NamedTuple):
    pass


class Locked(NamedTuple):
    lock: Lock


class Nothing(NamedTuple):
    """The primary holds nothing of the transaction: it was never locked, or its prewrite has yet to arrive (T5 b)."""


Judgement: TypeAlias = Committed | Aborted | Locked | Nothing


def primary_queries(primary: Cellref, start_ts: int) -> list[Query]:
    """Queries for the primary: its lock, its marker, and the oldest record at or above start_ts (T1); for a bare
    one: its pending entry, its marker, and its trace (N5)."""
    if is_bare(primary.column):
        return [(group, primary.column, start_ts, start_ts, 1) for group in (PENDING, ROLLBACK, TRACE)]
    return [
        (LOCK, primary.column, start_ts, start_ts, 1),
        (ROLLBACK, primary.column, start_ts, start_ts, 1),
        (WRITE, primary.column, start_ts, TS_MAX, -1),
    ]


def judge(primary: Cellref, start_ts: int, cells: Sequence[Sequence[Cell]]) -> Judgement:
    """Judge a transaction by its primary's cells, which are in the order of `primary_queries`.

    Raises: Corruption for cells that do not decode, or that contradict each other.
    """
    locks, markers, records = cells
    if records and is_bare(primary.column):
        commit_ts = unpack_proof(records[0][1])
        if markers:
            raise Corruption("trace group", f"T5: transaction {start_ts} committed here, and was rolled back")
        if commit_ts <= start_ts:
            raise Corruption("trace group", f"T1: transaction {start_ts} committed at {commit_ts}, before its start")
        return Committed(commit_ts)
    if records:
        commit_ts, value = records[0]
        if unpack_record(value).start_ts == start_ts:
            if markers:
                raise Corruption("write group", f"T5: transaction {start_ts} committed here, and was rolled back")
            if commit_ts == start_ts:
                raise Corruption("write group", f"T1: transaction {start_ts} committed at its own start")
            return Committed(commit_ts)
    if markers:
        return Aborted()
    if locks:
        return Locked(unpack_lock(locks[0][1], start_ts))
    return Aborted() if records else Nothing()


class Step(Enum):
    ASK = "ask"
    WAIT = "wait"
    ROLL_PRIMARY = "roll primary"
    MARK = "mark"
    FORWARD = "forward"
    BACK = "back"
    SETTLED = "settled"


class Recovery:
    """Settles the locks that one transaction left on some cells, after deciding its primary."""

    start_ts: int
    primary: Cellref
    commit_ts: int
    conclusive: bool
    step: Step

    def __init__(self, start_ts: int, primary: Cellref, found: Sequence[tuple[Cellref, Lock]]) -> None:
        self.start_ts, self.primary = start_ts, primary
        self._found = found
        self._lock: Lock | None = None
        self.commit_ts = 0
        self.failure: Exception | None = None
        self._lost = 0
        self._floored = False  # T13
        self.conclusive = False
        self.step = Step.ASK

    @property
    def asker(self) -> Cellref:
        """The cell of the first lock that was found, which names the primary; without a lock, the primary itself."""
        return self._found[0][0] if self._found else self.primary

    @property
    def fate(self) -> int | None:
        """The outcome: commit_ts, 0 for aborted, None while undecided."""
        if self.step in (Step.FORWARD, Step.BACK, Step.SETTLED):
            return self.commit_ts
        return None

    def asked(self, cells: Sequence[Sequence[Cell]], *, alive: bool) -> None:
        """States ASK and WAIT: take the primary's cells, and whether the transaction's client is alive (L1, L2).

        Raises: Corruption as `judge` does.
        """
        assert self.step in (Step.ASK, Step.WAIT)
        self.conclusive = bool(cells[1])
        match judge(self.primary, self.start_ts, cells):
            case Committed(commit_ts):
                self.commit_ts = commit_ts
                self.conclusive = True
                self.step = Step.FORWARD
            case Aborted():
                self.step = Step.BACK
            case Locked(lock):
                self._lock = lock
                self.step = Step.WAIT if alive else Step.ROLL_PRIMARY
            case Nothing():
                self.step = Step.WAIT if alive else Step.BACK if self._floored else Step.MARK

    def decision(self) -> Mutation:
        """States ROLL_PRIMARY and MARK: the mutation that decides the transaction's outcome (T5 a, b)."""
        if self.step is Step.ROLL_PRIMARY:
            assert self._lock is not None
            return mutations.roll_back_primary(self.primary, self.start_ts, self._lock)
        assert self.step is Step.MARK
        return mutations.put_marker(self.primary, self.start_ts)

    def decided(self, verdict: Verdict) -> None:
        if verdict is APPLIED:
            self.conclusive = True
            self.step = Step.BACK
        elif isinstance(verdict, Failed):
            self.failure = verdict.error
            self.step = Step.ASK
        else:
            self._lost += isinstance(verdict, NoReply)
            self._floored = self._floored or (isinstance(verdict, Refused) and verdict.check < 0)
            if self._lost >= _LOST_MAX:
                self.failure = Unavailable("the store does not answer")
            self.step = Step.ASK  # T5: refused, or unknown: read the primary again

    def clearing(self) -> list[Mutation]:
        """States FORWARD and BACK: settle the cells that were found; the primary is decided."""
        assert self.step in (Step.FORWARD, Step.BACK)
        out = []
        for cell, lock in self._found:
            assert lock.primary == self.primary
            if self.step is Step.FORWARD:
                out.append(mutations.roll_forward(cell, self.start_ts, lock, self.commit_ts))
            elif cell != self.primary or self._lock is None:
                out.append(mutations.roll_back_secondary(cell, self.start_ts, lock))
        return out

    def cleared(self, verdicts: Sequence[Verdict]) -> None:
        """Take the verdicts on `clearing()`. Refused: the cell was settled elsewhere meanwhile (T6, T8)."""
        for verdict in verdicts:
            if isinstance(verdict, Failed):
                self.failure = verdict.error
            elif isinstance(verdict, NoReply):
                self.failure = TimeoutError(verdict.reason)
        self.step = Step.SETTLED
