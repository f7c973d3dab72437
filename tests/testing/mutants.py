"""Faults in the protocol itself, switched on one at a time: the simulation has to find each of them.

Each is a function of a `pytest.MonkeyPatch` that breaks one rule. `HARMLESS` are changes that break none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perco.errors import RolledBack
from perco.notify import claim, worker
from perco.storage import LOCK, NOTIFY, ROLLBACK, WRITE, Mutation, NoReply
from perco.txn import commit, driver, mutations, oracle, snapshot, timestamps, transaction

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Mutant] = {}
HARMLESS: dict[str, Mutant] = {}


def mutant(name: str) -> Callable[[Mutant], Mutant]:
    def note(function: Mutant) -> Mutant:
        MUTANTS[name] = function
        return function

    return note


def harmless(name: str) -> Callable[[Mutant], Mutant]:
    def note(function: Mutant) -> Mutant:
        HARMLESS[name] = function
        return function

    return note


def changed(
    patch: pytest.MonkeyPatch, function: str, change: Callable[[Mutation], Mutation], module: Any = mutations
) -> None:
    """What a function of mutations.py gives is changed."""
    right = getattr(module, function)
    patch.setattr(module, function, lambda *args, **kwargs: change(right(*args, **kwargs)))


def without_checks(mutation: Mutation, group: str | None = None) -> Mutation:
    rows = [
        (row, [check for check in checks if group is not None and check[1] != group], writes)
        for row, checks, writes in mutation.rows
    ]
    return mutation._replace(rows=rows)


def without_writes(mutation: Mutation, group: str) -> Mutation:
    rows = [(row, checks, [write for write in writes if write[0] != group]) for row, checks, writes in mutation.rows]
    return mutation._replace(rows=rows)


# ------------------------------------------------------------ timestamps


@mutant("O1 the bound is never made durable")
def bound(patch: pytest.MonkeyPatch) -> None:
    async def make_durable(self: oracle.Oracle, bound: int) -> None:
        self._timestamps.extend(bound)

    patch.setattr(oracle.Oracle, "_make_durable", make_durable)


@mutant("O1 a restart goes on below the bound")
def restart(patch: pytest.MonkeyPatch) -> None:
    right = timestamps.Timestamps.__init__

    def below(self: timestamps.Timestamps, bound: int) -> None:
        right(self, bound)
        self.last = max(bound - 9_990, 0)

    patch.setattr(timestamps.Timestamps, "__init__", below)


@mutant("T2 commit_ts is drawn before the prewrites")
def early(patch: pytest.MonkeyPatch) -> None:
    right = driver.Driver.commit
    drawn = commit.Commit.drawn

    async def first(self: driver.Driver, commit: commit.Commit, **how: Any) -> int:
        early_ts[id(commit)] = self.oracle.draw_nowait()
        return await right(self, commit, **how)

    early_ts: dict[int, int] = {}
    patch.setattr(driver.Driver, "commit", first)
    patch.setattr(
        commit.Commit, "drawn", lambda self, commit_ts: drawn(self, early_ts.pop(id(self), commit_ts) or commit_ts)
    )


# ------------------------------------------------------------ commit


@mutant("T3 the secondaries first")
def secondaries_first(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.primary_commit

    def last_part(self: commit.Commit) -> Mutation:
        if len(self._parts) > 1 and not self.maybe_sent:
            return mutations.commit(self.header, self._parts[-1], self.commit_ts)
        return right(self)

    def secondaries(self: commit.Commit) -> list[Mutation]:
        return [mutations.commit(self.header, part, self.commit_ts) for part in self._parts[:-1]]

    patch.setattr(commit.Commit, "primary_commit", last_part)
    patch.setattr(commit.Commit, "secondaries", secondaries)


@mutant("T4 a lost reply to the primary's commit is taken for an abort")
def lost(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.primary_told

    def told(self: commit.Commit, verdict: Any) -> None:
        if isinstance(verdict, NoReply):
            self.state = commit.State.ABORTED
            raise RolledBack(self.header.start_ts)
        right(self, verdict)

    patch.setattr(commit.Commit, "primary_told", told)


@mutant("T7 a newer record is no conflict")
def record(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "prewrite", lambda mutation: without_checks(mutation, WRITE))


@mutant("T7 a lock is no conflict")
def lock(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "prewrite", lambda mutation: without_checks(mutation, LOCK))


@mutant("T7 a marker is no conflict")
def marker(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "prewrite", lambda mutation: without_checks(mutation, ROLLBACK))


@mutant("T8 commits without the check")
def commit_unchecked(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "commit", without_checks)


@mutant("T8 rolls back without the check")
def rollback_unchecked(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "roll_back_primary", without_checks)
    changed(patch, "roll_back_secondary", without_checks)


# ------------------------------------------------------------ recovery


@mutant("T5 no marker")
def no_marker(patch: pytest.MonkeyPatch) -> None:
    for name in ("put_marker", "roll_back_primary", "release"):
        changed(patch, name, lambda mutation: without_writes(mutation, ROLLBACK))


@mutant("T5 the marker is put without its check")
def marker_unchecked(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "put_marker", without_checks)


# ------------------------------------------------------------ reading


def _blind(locks: Any, writes: Any, settled: int = -1) -> Any:
    return snapshot.look((), writes)


@mutant("T9 reads skip locks")
def skip(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transaction, "plain", lambda locks, writes: snapshot.plain((), writes))
    patch.setattr(transaction, "look", _blind)


@mutant("T9 a reader that has waited for a lock does not look again")
def stale(patch: pytest.MonkeyPatch) -> None:
    async def finish(self: driver.Driver, table: str, row: bytes, column: int, ts: int, seen: Any) -> Any:
        if type(seen) is snapshot.Blocked:
            queries = [(WRITE, column, 0, ts, 1)]
            [[writes]] = await self.store.read([(table, row, queries)])
            seen = snapshot.look((), writes)
        return await right(self, table, row, column, ts, seen)

    right = driver.Driver.finish
    patch.setattr(driver.Driver, "finish", finish)


# ------------------------------------------------------------ observers


@mutant("N1 a stranger's roll-forward leaves no notify cell")
def roll_forward(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "roll_forward", lambda mutation: without_writes(mutation, NOTIFY))


@mutant("N1 secondaries leave no notify cell")
def no_secondary_notify(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.secondaries
    patch.setattr(
        commit.Commit, "secondaries", lambda self: [without_writes(mutation, NOTIFY) for mutation in right(self)]
    )


@mutant("N2 a notify cell goes without a run")
def without_a_run(patch: pytest.MonkeyPatch) -> None:
    right = claim.decide

    def decide(cells: Any, start_ts: int) -> Any:
        verdict = right(cells, start_ts)
        return claim.Handled(verdict.covers) if isinstance(verdict, claim.Run) and start_ts % 7 == 0 else verdict

    patch.setattr(worker, "decide", decide)


@mutant("N3 the ack is compared by its commit_ts")
def ack_by_commit(patch: pytest.MonkeyPatch) -> None:
    right = claim.decide

    def decide(cells: Any, start_ts: int) -> Any:
        notified, ack_locks, acks, locks, writes = cells
        if acks and writes and writes[0][0] <= acks[0][0] and notified and not ack_locks and not locks:
            return claim.Handled(tuple(ts for ts, _ in notified))
        return right(cells, start_ts)

    patch.setattr(worker, "decide", decide)


# ------------------------------------------------------------ what breaks nothing


@harmless("the secondaries in another order")
def order(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.secondaries
    patch.setattr(commit.Commit, "secondaries", lambda self: list(reversed(right(self))))
    patch.setattr(
        commit.Commit,
        "secondaries_by_cell",
        lambda self, group: [
            mutations.commit(self.header, [intent], self.commit_ts) for intent in list(reversed(self._parts[1:]))[group]
        ],
    )


@harmless("markers on secondaries too")
def markers(patch: pytest.MonkeyPatch) -> None:
    right = mutations.roll_back_secondary

    def marked(cell: Any, start_ts: int, lock: Any) -> Mutation:
        [(row, checks, writes)] = right(cell, start_ts, lock).rows
        return Mutation(cell.table, ((row, checks, [*writes, (ROLLBACK, cell.column, start_ts, b"")]),), None, True)

    patch.setattr(mutations, "roll_back_secondary", marked)
