"""Commit and recovery driven one mutation at a time, so that a test can stop them between any two.

Each generator yields the next mutation and wants its verdict sent; it reads at once. A client that crashed is a
generator that is not resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from perco.protocol import commit as core
from perco.protocol.commit import Commit, State
from perco.protocol.records import Cellref, Lock, unpack_lock
from perco.protocol.recovery import Recovery, Step, primary_queries
from perco.storage import APPLIED, LOCK, SHARED, TS_MAX, Failed, Mutation, Verdict
from tests.support.rows import Rows

Steps = Generator[Mutation, Verdict, int]
STEPS_MAX = 1000  # more than that is going round in circles


def commit_steps(commit: Commit, rows: Rows, draw: Callable[[], int]) -> Steps:
    """Returns commit_ts, or 0. Every foreign lock it meets is dead: it settles it."""
    header = commit.header
    while True:
        match commit.state:
            case State.PREWRITE:
                verdicts = []
                for mutation in commit.prewrites():
                    verdicts.append((yield mutation))
                commit.prewrites_told(verdicts)
            case State.BLOCKED:
                for part, refused in commit.refusals:
                    intent, found = commit.refused_cell(part, refused)
                    cell = Cellref(intent.table, intent.row, intent.column)
                    if found not in (core.LOCK_CHECK, core.SHARED_CHECK):
                        commit.give_up()
                        break
                    group = LOCK if found == core.LOCK_CHECK else SHARED
                    [locks] = rows.read(cell.table, cell.row, [(group, cell.column, 0, TS_MAX, 1 << 10)])
                    for start_ts, lock in locks:
                        if start_ts == header.start_ts:
                            commit.echoed(part)
                            continue
                        yield from recovery_steps(start_ts, cell, unpack_lock(lock), rows)
                else:
                    commit.retry()
            case State.DRAW:
                commit.drawn(draw())
            case State.COMMIT:
                commit.primary_told((yield commit.primary_commit()))
            case State.ASK:
                recovery = Recovery(header.start_ts, header.primary, ())
                recovery.asked(_primary(rows, header.primary, header.start_ts), alive=False)
                if recovery.step is Step.ROLL_PRIMARY:
                    commit.asked(None)
                elif recovery.step is Step.MARK:
                    recovery.decided((yield recovery.decision()))
                if recovery.fate is not None:
                    commit.asked(recovery.fate)
            case State.COMMITTED:
                for mutation in commit.secondaries():
                    yield mutation
                return commit.commit_ts
            case State.RELEASE:
                releases = commit.releases()
                if releases and commit.primary_held and (yield releases.pop(0)) is not APPLIED:
                    yield from _decide(Recovery(header.start_ts, header.primary, ()), rows)
                for mutation in releases:
                    yield mutation
                commit.released()
            case State.ABORTED:
                return 0


def recovery_steps(start_ts: int, cell: Cellref, lock: Lock, rows: Rows) -> Steps:
    """Settles a dead transaction's lock; returns its fate."""
    recovery = Recovery(start_ts, lock.primary, [(cell, lock)])
    yield from _decide(recovery, rows)
    verdicts = []
    for mutation in recovery.clearing():
        verdicts.append((yield mutation))
    recovery.cleared(verdicts)
    assert recovery.fate is not None
    return recovery.fate


def sweep_steps(rows: Rows) -> Generator[Mutation, Verdict, None]:
    """Settles every lock there is, shared ones too; all of them are dead."""
    for cell, start_ts, lock in [*rows.locks(), *rows.shared()]:
        if any(at == start_ts and where == cell for where, at, _ in [*rows.locks(), *rows.shared()]):
            yield from recovery_steps(start_ts, cell, lock, rows)


def _primary(rows: Rows, primary: Cellref, start_ts: int) -> list[list[tuple[int, bytes]]]:
    return rows.read(primary.table, primary.row, primary_queries(primary, start_ts))


def _decide(recovery: Recovery, rows: Rows) -> Generator[Mutation, Verdict, None]:
    while recovery.fate is None:
        recovery.asked(_primary(rows, recovery.primary, recovery.start_ts), alive=False)
        if recovery.step in (Step.ROLL_PRIMARY, Step.MARK):
            verdict = yield recovery.decision()
            assert not isinstance(verdict, Failed)
            recovery.decided(verdict)


def run(steps: Generator[Mutation, Verdict, object], rows: Rows) -> list[Mutation]:
    """To the end, with nothing going wrong; returns what was sent."""
    sent: list[Mutation] = []
    try:
        mutation = next(steps)
        while True:
            sent.append(mutation)
            assert len(sent) < STEPS_MAX, "it goes round in circles"
            mutation = steps.send(rows.apply(mutation))
    except StopIteration:
        return sent


def crash(steps: Generator[Mutation, Verdict, object], rows: Rows, after: int, *, made: bool) -> list[Mutation] | None:
    """Run so many mutations, then drop the client with the next one sent: `made` or lost on the way.

    Returns what was sent; None if it ended before that.
    """
    sent: list[Mutation] = []
    try:
        mutation = next(steps)
        while True:
            sent.append(mutation)
            if len(sent) > after:
                if made:
                    rows.apply(mutation)
                return sent
            mutation = steps.send(rows.apply(mutation))
    except StopIteration:
        return None
