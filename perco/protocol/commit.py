"""Two-phase commit as a value: no I/O, no clock, no tasks.

`state` says which step is next; pass its result to the matching method. `driver.py` performs the steps.

    PREWRITE --all held--> DRAW --drawn--> COMMIT --applied--> COMMITTED (then: `secondaries`)
       |  '--refused--> BLOCKED              |  '--no reply, refused--> ASK --record--> COMMITTED
       |                 |  '--retry--.      |                           '--marker----> RELEASE
       '<----------------'------------'      '<---own lock still there---'
       '--give_up--> RELEASE --> ABORTED

A *part* is the cells that one mutation writes: the transaction's cells in one tablet if the store has groups (S1),
otherwise its cells in one row. The primary is the first cell of the first part.

T1  Committed if and only if the primary holds a write record that points at start_ts.
T2  commit_ts is drawn after every prewrite is stored and acknowledged.
T3  No secondary gets its record before the primary has it, except in one group with it.
T4  A lost reply is never taken for an abort: the primary is read.
T6  Every step is idempotent. If a step is sent twice, the second reply may be a refusal; then the primary is read.
T12 The primary is chosen before the first prewrite and does not change; it is written, or bare (N5).
T14 In a serializable transaction, `drawn` leads to VALIDATE, and VALIDATE leads to COMMIT or RELEASE. If validation
    came before the draw, other transactions could commit between the two. The result of a validation is final: it is
    not repeated when COMMIT is sent again.
C1  *In one step*: the primary's part is not prewritten; one mutation checks it and writes its records. If that is the
    whole transaction, PREWRITE is skipped. Otherwise the other parts are prewritten first (C7, last agent), and DRAW,
    COMMIT and phase two follow as usual. The mutation is never sent twice (C6), so a refusal means that nothing was
    written.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from perco.errors import Corruption, Unavailable
from perco.protocol import mutations
from perco.protocol.mutations import Header, Intent
from perco.protocol.reads import Reads
from perco.protocol.records import ACK, BARE, READ, SIGNAL
from perco.storage import APPLIED, Failed, Mutation, NoReply, Refused, Verdict


class State(Enum):
    PREWRITE = "prewrite"
    BLOCKED = "blocked"
    DRAW = "draw"
    VALIDATE = "validate"
    COMMIT = "commit"
    ASK = "ask"
    RELEASE = "release"
    COMMITTED = "committed"
    ABORTED = "aborted"


_HELD: Final = 1
_MAYBE: Final = 2  # sent; it is not known whether it was applied
_NONE: Final[frozenset[int]] = frozenset()
_NOWHERE: Final[list[tuple[str, bytes, int]]] = []
_LOST_MAX: Final = 16  # rounds with a lost reply, before the commit is given up

# The check that refused a prewrite (T7, T13).
FLOOR_CHECK: Final = -1
WRITE_CHECK: Final = 0
MARKER_CHECK: Final = 1
LOCK_CHECK: Final = mutations.LOCK_CHECK
SHARED_CHECK: Final = LOCK_CHECK + 1
TRACE_CHECK: Final = LOCK_CHECK + 2
LISTED_CHECK: Final = mutations.CHECKS_PER_CELL  # only for an acknowledgement: the failed list (N6)


class Commit:
    """The commit of one transaction. `reads`: the reads that a serializable transaction must validate (T14)."""

    header: Header
    reads: Reads | None
    one_step: bool
    cells: list[tuple[str, bytes, int]]
    maybe_sent: bool
    commit_ts: int

    __slots__ = (
        "_again",
        "_lost",
        "_parts",
        "_sent",
        "_standing",
        "_to_hold",
        "cells",
        "commit_ts",
        "failure",
        "header",
        "maybe_sent",
        "one_step",
        "reads",
        "refusals",
        "state",
    )

    def __init__(
        self,
        header: Header,
        parts: Sequence[Sequence[Intent]],
        reads: Reads | None = None,
        *,
        one_step: bool = False,
    ) -> None:
        assert reads is None or not one_step, "T14: the locks must be held while the reads are repeated"
        assert parts, "a transaction without writes has nothing to commit"
        first = parts[0][0]
        assert first[:3] == header.primary, "T12: the primary leads"
        assert first[3] < READ or first[3] == BARE, "T1, N5: the primary gets a record, or a trace"
        self.header = header
        self.reads = reads
        self._parts = parts
        self._standing = [0] * len(parts)
        self._to_hold = len(parts) - one_step  # how many parts are prewritten
        self._again: frozenset[int] = _NONE  # parts of the last round that may have been applied before (T6)
        self._sent: Sequence[int] = ()
        self.one_step = one_step
        # The cells that are entered in memory during a one-step commit (C2): the cells that the commit writes, or its
        # bare primary, which no other transaction uses (N5).
        self.cells = _NOWHERE
        if one_step and first[3] == BARE:
            self.cells = [(first.table, first.row, -header.start_ts)]
        elif one_step:
            self.cells = [intent[:3] for intent in parts[0] if intent[3] < READ]
        self.state = State.DRAW if one_step and len(parts) == 1 else State.PREWRITE
        self.commit_ts = 0
        self.refusals: Sequence[tuple[int, Refused]] = ()  # (part, refusal by one of its checks)
        self.failure: Exception | None = None  # why the commit was given up, if the store failed
        self.maybe_sent = False  # a request to commit may have arrived (T4)
        self._lost = 0  # rounds of prewrites in which a reply was lost

    def notified(self, first: int = 0, last: int | None = None) -> list[tuple[str, bytes, tuple[int, ...]]]:
        """The rows on which these of its parts notify observers: (table, row, their numbers) of each cell."""
        return [
            (intent.table, intent.row, intent.observers)
            for part in self._parts[first:last]
            for intent in part
            if intent.observers
        ]

    # ------------------------------------------------------------ PREWRITE

    def prewrites(self) -> list[Mutation]:
        """State PREWRITE: a mutation for each part that is not locked yet; they may be sent in parallel."""
        assert self.state is State.PREWRITE
        standing = self._standing
        sent: Sequence[int]
        if not self._sent:  # the first round
            sent = range(self.one_step, len(standing))
        else:
            sent = [i for i, stands in enumerate(standing) if stands != _HELD and i >= self.one_step]
            self._again = frozenset(i for i in sent if standing[i] == _MAYBE)
        self._sent = sent
        out = []
        for i in sent:
            out.append(mutations.prewrite(self.header, self._parts[i], again=i in self._again))
            standing[i] = _MAYBE
        return out

    def prewrites_told(self, verdicts: Sequence[Verdict]) -> None:
        """Process the verdicts on `prewrites()`, in the same order."""
        refusals: Sequence[tuple[int, Refused]] = ()
        lost = False
        for i, verdict in zip(self._sent, verdicts, strict=True):
            if verdict is APPLIED:
                self._standing[i] = _HELD
            elif isinstance(verdict, Refused):
                self._standing[i] = 0
                refusals = (*refusals, (i, verdict))
            elif isinstance(verdict, Failed):
                self._standing[i] = _MAYBE if i in self._again else 0
                self.failure = verdict.error
            else:
                lost = True  # T4: send again; our own lock is then not a conflict (T6)
        self.refusals = refusals
        if self.failure is not None:
            self.state = State.RELEASE
        elif refusals:
            self.state = State.BLOCKED
        elif not lost:
            self.state = State.DRAW
        else:
            self._lost += 1
            if self._lost >= _LOST_MAX:
                self.failure = Unavailable("the store does not answer")
                self.state = State.RELEASE

    def refused_cell(self, part: int, refused: Refused) -> tuple[Intent, int]:
        """The cell whose check refused a part, and that check: one of the constants `..._CHECK`."""
        if refused.check < 0:
            return self._parts[part][0], FLOOR_CHECK
        rows: dict[bytes, list[Intent]] = {}
        for intent in self._parts[part]:
            rows.setdefault(intent.row, []).append(intent)
        check = refused.check
        twice = part in self._again  # then a write has two checks for locks: below ours, and above ours
        for intent in list(rows.values())[refused.row]:
            if intent.kind == SIGNAL:
                continue  # a signal has no checks
            if intent.kind == BARE:
                if check < mutations.CHECKS_PER_BARE:
                    return intent, MARKER_CHECK
                check -= mutations.CHECKS_PER_BARE
                continue
            writes = intent.kind < READ
            of_write = mutations.CHECKS_PER_ACK if intent.kind == ACK else mutations.CHECKS_PER_CELL
            checks = of_write + twice if writes else mutations.CHECKS_PER_READ
            if check < checks:
                return intent, check - (twice and writes and check > LOCK_CHECK)
            check -= checks
        raise AssertionError(f"no cell of the part has {refused}")

    def echoed(self, part: int) -> None:
        """State BLOCKED: our own lock refused this part: an earlier prewrite succeeded; its reply was lost (T6)."""
        assert self.state is State.BLOCKED
        self._standing[part] = _MAYBE

    def retry(self) -> None:
        """State BLOCKED: the locks in the way have been settled; send the refused parts again (T7)."""
        assert self.state is State.BLOCKED
        self.state = State.PREWRITE if self._standing.count(_HELD) < self._to_hold else State.DRAW

    def give_up(self) -> None:
        """Decide to release everything, before the primary's commit is sent (T7, T10)."""
        assert self.state in (State.PREWRITE, State.BLOCKED, State.DRAW, State.VALIDATE, State.COMMIT), self.state
        self.state = State.RELEASE

    # ------------------------------------------------------------ DRAW, COMMIT, ASK

    def drawn(self, commit_ts: int) -> None:
        """State DRAW: take the commit timestamp, which was drawn after all prewrites were acknowledged (T2)."""
        assert self.state is State.DRAW
        assert self._standing.count(_HELD) == self._to_hold, "T2: every prewrite was acknowledged"
        assert commit_ts > self.header.start_ts
        self.commit_ts = commit_ts
        self.state = State.COMMIT if self.reads is None else State.VALIDATE

    def sent_in_one_step(self, commit_ts: int) -> None:
        """State DRAW: another process has drawn `commit_ts`, and sent the mutation that decides. 0: the reply of that
        process was lost, and the timestamp with it."""
        assert self.state is State.DRAW
        assert self.one_step
        assert not commit_ts or commit_ts > self.header.start_ts
        self.commit_ts = commit_ts
        self.state = State.COMMIT

    @property
    def primary_part(self) -> Sequence[Intent]:
        """The cells that one mutation writes together with the primary."""
        return self._parts[0]

    def validated(self) -> None:
        """State VALIDATE: at commit_ts, everything is as it was read (T14). Otherwise call `give_up`."""
        assert self.state is State.VALIDATE
        self.state = State.COMMIT

    def primary_commit(self) -> Mutation:
        """State COMMIT: the mutation that decides the outcome."""
        assert self.state is State.COMMIT
        if self.one_step:
            return mutations.one_step(self.header, self._parts[0], self.commit_ts)
        return mutations.commit(self.header, self._parts[0], self.commit_ts)

    def primary_told(self, verdict: Verdict) -> None:
        if verdict is APPLIED:
            self.state = State.COMMITTED
        elif isinstance(verdict, Failed):
            self.failure = verdict.error
            self.state = State.RELEASE
        elif self.one_step and isinstance(verdict, Refused):
            self.refusals = ((0, verdict),)
            self.state = State.BLOCKED
        else:
            assert isinstance(verdict, Refused | NoReply)
            self.maybe_sent = True
            self.state = State.ASK  # T4, T6: a refusal may be due to our own earlier success

    def asked(self, fate: int | None) -> None:
        """State ASK: take the outcome that was read from the primary: commit_ts, 0 for aborted, None for "our lock is
        still there"."""
        assert self.state is State.ASK
        if fate is None:
            assert not self.one_step, "C6: never sent twice"
            self.state = State.COMMIT
        elif fate:
            self._recognize(fate)
            self.state = State.COMMITTED
        else:
            self.ruled_out()
            self.state = State.RELEASE

    # ------------------------------------------------------------ RELEASE, COMMITTED

    def releases(self) -> list[Mutation]:
        """State RELEASE: a mutation for each locked part; the primary's first (T5), then the others in parallel."""
        assert self.state is State.RELEASE
        return [
            mutations.release(self.header, part, marker=i == 0)
            for i, part in enumerate(self._parts)
            if self._standing[i]
        ]

    def releases_by_cell(self, group: int) -> list[Mutation]:
        """`releases()[group]` as a mutation for each cell, once the primary has been decided."""
        held = [part for part, standing in zip(self._parts, self._standing, strict=True) if standing]
        return [mutations.release(self.header, [intent], marker=False) for intent in held[group]]

    @property
    def holds_any(self) -> bool:
        return any(self._standing)

    @property
    def primary_held(self) -> bool:
        return bool(self._standing[0])

    def released(self) -> None:
        self.state = State.ABORTED

    def ruled_out(self) -> None:
        """The primary has been rolled back: a request to commit that arrives later has no effect (T4, T5)."""
        self.maybe_sent = False

    def committed_after_all(self, fate: int) -> None:
        """State RELEASE: a request to commit that seemed lost had arrived (T4)."""
        assert self.state is State.RELEASE
        self._recognize(fate)
        self.state = State.COMMITTED

    def _recognize(self, fate: int) -> None:
        if not self.commit_ts:
            self.commit_ts = fate
        if fate != self.commit_ts:
            what = f"T1: only transaction {self.header.start_ts} commits by this record, at {self.commit_ts}"
            raise Corruption("write group", what)

    @property
    def has_secondaries(self) -> bool:
        return len(self._parts) > 1

    def secondaries(self) -> list[Mutation]:
        """State COMMITTED: the mutations of phase two; no caller waits for them (S2)."""
        assert self.state is State.COMMITTED, "T3: the primary first"
        return [mutations.commit(self.header, part, self.commit_ts) for part in self._parts[1:]]

    def secondaries_by_cell(self, group: int) -> list[Mutation]:
        """`secondaries()[group]` as a mutation for each cell."""
        return [mutations.commit(self.header, [intent], self.commit_ts) for intent in self._parts[1 + group]]
