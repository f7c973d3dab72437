"""Faults in signals, switched on one at a time: the simulation must find each of them (N5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from perco.notify import idle, waiting, working
from perco.protocol import claim, commit, mutations
from perco.protocol.mutations import Intent
from perco.protocol.records import BARE, SIGNAL, Cellref, Lock, observer_of
from perco.storage import NOTIFY, PENDING, TS_MAX, Mutation
from perco.txn import driver, transaction
from tests.testing.mutants import Mutant, changed, without_writes

SIGNALS: dict[str, Mutant] = {}
SIGNALS_SLOW: dict[str, Mutant] = {}  # under these, runs loop until the simulation gives up
SIGNALS_HARMLESS: dict[str, Mutant] = {}


def mutant(name: str, *, slow: bool = False) -> Any:
    return lambda function: (SIGNALS_SLOW if slow else SIGNALS).setdefault(name, function)


def harmless(name: str) -> Any:
    return lambda function: SIGNALS_HARMLESS.setdefault(name, function)


def _but(kind: int, function: str, patch: pytest.MonkeyPatch) -> None:
    """A function of mutations.py leaves out the intents of a kind."""
    right = getattr(mutations, function)

    def without(header: Any, part: Sequence[Intent], *more: Any, **how: Any) -> Mutation:
        left = [intent for intent in part if intent.kind != kind or observer_of(intent.column)]
        return right(header, left or part, *more, **how)  # type: ignore[no-any-return]

    patch.setattr(mutations, function, without)


@mutant("N5 a prewrite puts no pending entries")
def not_pending(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "prewrite", lambda mutation: without_writes(mutation, PENDING))


@mutant("N5 a prewrite puts a signal's notify cells at once, at start_ts")
def final_at_start(patch: pytest.MonkeyPatch) -> None:
    right = mutations.prewrite

    def prewrite(header: Any, part: Sequence[Intent], *, again: bool) -> Mutation:
        mutation = right(header, part, again=again)
        rows = {intent.row: [] for intent in part}  # type: ignore[var-annotated]
        for intent in part:
            if intent.kind == SIGNAL and intent.observers:
                rows[intent.row] += mutations._final(intent, header, header.start_ts)
        return mutation._replace(rows=[(row, checks, [*writes, *rows[row]]) for row, checks, writes in mutation.rows])

    patch.setattr(mutations, "prewrite", prewrite)


@mutant("N5 a one-step commit raises no signals")
def one_step_silent(patch: pytest.MonkeyPatch) -> None:
    _but(SIGNAL, "one_step", patch)


@mutant("N5 a signal gets no notify cells in phase two")
def phase_two_forgets(patch: pytest.MonkeyPatch) -> None:
    _final_without(patch, lambda intent: bool(intent.observers))


def _final_without(patch: pytest.MonkeyPatch, left_out: Any) -> None:
    right = mutations._final

    def final(intent: Intent, header: Any, commit_ts: int) -> Any:
        return [] if intent.kind == SIGNAL and left_out(intent) else right(intent, header, commit_ts)

    patch.setattr(mutations, "_final", final)


@mutant("N5 a roll-forward loses the signal")
def roll_forward_loses(patch: pytest.MonkeyPatch) -> None:
    right = mutations.roll_forward

    def roll_forward(cell: Cellref, start_ts: int, lock: Lock, commit_ts: int) -> Mutation:
        mutation = right(cell, start_ts, lock, commit_ts)
        return without_writes(mutation, NOTIFY) if lock.kind == SIGNAL else mutation

    patch.setattr(mutations, "roll_forward", roll_forward)


@mutant("N5 a dead client's pending signal is rolled forward instead of back")
def dead_made_final(patch: pytest.MonkeyPatch) -> None:
    right = mutations.roll_back_secondary

    def roll_back(cell: Cellref, start_ts: int, lock: Lock) -> Mutation:
        if lock.kind == SIGNAL and lock.observers:
            return mutations.roll_forward(cell, start_ts, lock, start_ts + 1)
        return right(cell, start_ts, lock)

    patch.setattr(mutations, "roll_back_secondary", roll_back)


@mutant("N5 a pending signal is rolled forward without asking its primary")
def made_final_unasked(patch: pytest.MonkeyPatch) -> None:
    async def resolve(self: driver.Driver, cell: Cellref, start_ts: int, lock: Lock) -> int | None:
        if lock.kind == SIGNAL and lock.observers:
            await self.store.apply([mutations.roll_forward(cell, start_ts, lock, start_ts + 1)])
            return start_ts + 1
        return await right(self, cell, start_ts, lock)

    right = driver.Driver.resolve
    patch.setattr(driver.Driver, "resolve", resolve)


@mutant("N5 a bare primary leaves no trace")
def no_trace(patch: pytest.MonkeyPatch) -> None:
    right = mutations._final
    patch.setattr(mutations, "_final", lambda intent, *more: [] if intent.kind == BARE else right(intent, *more))


@mutant("N2 a run for a signal removes notify cells newer than its start")
def removes_newer(patch: pytest.MonkeyPatch) -> None:
    async def commit(
        self: working.Claims, txn: transaction.Transaction, table: str, ack: int, handled: Sequence[Any]
    ) -> None:
        for row, _ in handled:
            [[newest]] = await self._engine.driver.store.read([(table, row, [(NOTIFY, ack, 0, TS_MAX, 100)])])
            covers = tuple(ts for ts, _ in newest)
            if txn._signals is not None and (table, row, ack) in txn._signals:
                seen = txn._signals[table, row, ack]
                txn._signals[table, row, ack] = seen._replace(covers=tuple(ts for ts in covers if ts <= txn.start_ts))
                await self.tidy(table, ack, [(row, covers)])
        await right(self, txn, table, ack, handled)

    right = working.Claims.commit
    patch.setattr(working.Claims, "commit", commit)


@mutant("N5 a run for a signal removes its notify cells before it commits")
def removes_before(patch: pytest.MonkeyPatch) -> None:
    right = working.Claims.claim_signal

    async def claim(self: working.Claims, txn: Any, observer: Any, table: str, row: bytes, ack: int) -> Any:
        claimed = await right(self, txn, observer, table, row, ack)
        if not isinstance(claimed, bool):
            await self.tidy(table, ack, [(row, claimed[0].covers)])
        return claimed

    patch.setattr(working.Claims, "claim_signal", claim)


@mutant("N5 a run for a signal leaves the notify cells that it saw", slow=True)
def removes_nothing(patch: pytest.MonkeyPatch) -> None:
    async def tidy(self: working.Claims, table: str, ack: int, seen: Any) -> None:
        return

    _final_without(patch, lambda intent: bool(intent.covers))
    patch.setattr(working.Claims, "tidy", tidy)


@mutant("N7 the idle check ignores pending signals")
def not_counted(patch: pytest.MonkeyPatch) -> None:
    """They do not count as observed commits, nor when the store looks for waiting work."""
    right, right_entries = driver.Driver.commit, idle.Idle.entries

    async def commit(self: driver.Driver, commit: commit.Commit, *, observed: bool, version: int) -> int:
        told = any(intent.observers and intent.kind != SIGNAL for part in commit._parts for intent in part)
        ack = bool(observer_of(commit.header.primary.column))
        return await right(self, commit, observed=told or ack, version=version)

    patch.setattr(driver.Driver, "commit", commit)
    patch.setattr(idle.Idle, "entries", lambda self, group: 0 if group == PENDING else right_entries(self, group))
    waits = tuple(query._replace(to_ts=0) if query.group == PENDING else query for query in waiting._WAITING)
    patch.setattr(waiting, "_WAITING", waits)


# ------------------------------------------------------------ harmless changes


@harmless("a run for a signal does not wait for another run's pending removal")
def not_waited_for(patch: pytest.MonkeyPatch) -> None:
    right = claim.signal_queries

    def queries(ack: int, ts: int) -> Any:
        return [right(ack, ts)[0], (PENDING, ack, 0, 0, 1)]

    patch.setattr(working, "signal_queries", queries)
