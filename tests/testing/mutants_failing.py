"""Faults in giving up, replaying and dropping, switched on one at a time: the simulation must find each (N6)."""

from __future__ import annotations

from typing import Any

import pytest

from perco.history import vacuum
from perco.notify import failing, failures
from perco.protocol import claim, mutations, retention
from perco.protocol.mutations import Intent
from perco.protocol.records import ACK, ack_head, observed_column, pack_cause
from perco.storage import ABSENT, FAILED_LIST, NOTIFY, TS_MAX, Mutation
from perco.txn.beginning import begin
from tests.testing.mutants import Mutant, without_writes

FAILING: dict[str, Mutant] = {}


def mutant(name: str) -> Any:
    return lambda function: FAILING.setdefault(name, function)


def _but(group: str, mutation: Mutation, *, put: bool) -> Mutation:
    """The mutation without what it puts into a group, or without what it removes from it."""
    rows = [
        (row, checks, [write for write in writes if write[0] != group or (write[3] is not None) != put])
        for row, checks, writes in mutation.rows
    ]
    return mutation._replace(rows=rows)


@mutant("N6 a change that is given up keeps its notify cells")
def still_waiting(patch: pytest.MonkeyPatch) -> None:
    right = failing.give_up
    patch.setattr(failing, "give_up", lambda *args: _but(NOTIFY, right(*args), put=False))


@mutant("N6 a change that is given up is not put on the failed list")
def not_listed(patch: pytest.MonkeyPatch) -> None:
    right = failing.give_up
    patch.setattr(failing, "give_up", lambda *args: _but(FAILED_LIST, right(*args), put=True))


@mutant("N6 a change that is given up leaves an earlier entry on the failed list")
def twice(patch: pytest.MonkeyPatch) -> None:
    right = failing.give_up
    patch.setattr(failing, "give_up", lambda *args: _but(FAILED_LIST, right(*args), put=False))


@mutant("N6 a change is given up without checks")
def unchecked(patch: pytest.MonkeyPatch) -> None:
    right = failing.give_up

    def give_up(*args: Any) -> Mutation:
        mutation = right(*args)
        return mutation._replace(rows=[(row, (), writes) for row, _, writes in mutation.rows])

    patch.setattr(failing, "give_up", give_up)


@mutant("N6 a run commits for a change that was given up meanwhile")
def ack_unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mutations, "_as_seen", lambda ack, covers: (ABSENT, FAILED_LIST, ack, TS_MAX, TS_MAX))


@mutant("N6 a run that commits does not remove the failed change from the list")
def not_dropped(patch: pytest.MonkeyPatch) -> None:
    right = mutations._notify

    def notify(*args: Any) -> Any:
        return [write for write in right(*args) if write[0] != FAILED_LIST]

    patch.setattr(mutations, "_notify", notify)


@mutant("N6 a replayed change stays on the failed list")
def replayed_and_listed(patch: pytest.MonkeyPatch) -> None:
    right = failures.put_back
    patch.setattr(failures, "put_back", lambda *args: without_writes(right(*args), FAILED_LIST))


@mutant("N6 a replayed change gets no notify cell")
def replayed_and_gone(patch: pytest.MonkeyPatch) -> None:
    right = failures.put_back
    patch.setattr(failures, "put_back", lambda *args: without_writes(right(*args), NOTIFY))


@mutant("N3 a drop acknowledges newer changes too")
def drops_too_much(patch: pytest.MonkeyPatch) -> None:
    async def try_to_drop(self: failures.FailedList, listed: failures.Listed) -> bool:
        (table, row, ack), ts, cell = listed
        txn = await begin(self._engine, None)
        try:
            queries = claim.claim_queries(observed_column(ack), ack, txn.start_ts)
            [cells] = await self._engine.driver.store.read([(table, row, queries)])
            if not cells[5] or cells[5][0][0] != ts:
                return False
            entry = self._entry_of(ack)
            head = ack_head(entry.version if entry else 1)
            cause = head + pack_cause(cell.root, cell.depth, cell.path)
            covers = tuple(seen for seen, _ in cells[0])
            txn._acks = [Intent(table, row, ack, ACK, cause, (), (*covers, -ts))]
            await txn.commit()
            return True
        finally:
            txn.discard()

    patch.setattr(failures.FailedList, "_try_to_drop", try_to_drop)


@mutant("N6 a drop acknowledges nothing")
def drops_no_ack(patch: pytest.MonkeyPatch) -> None:
    async def drop(self: failures.FailedList, listed: failures.Listed) -> bool:
        return await self._leave(listed, failures.forget(listed.ack, listed.ts))

    patch.setattr(failures.FailedList, "drop_one", drop)


@mutant("G3 a delete marker is removed while its column has a failed change")
def marker_gone(patch: pytest.MonkeyPatch) -> None:
    right_request, right_mutation = vacuum.Vacuum._request, retention.Waste._mutation

    def request(self: vacuum.Vacuum, *args: Any) -> Any:
        found = right_request(self, *args)
        queries = tuple(q._replace(from_ts=TS_MAX) if q.group == FAILED_LIST else q for q in found.queries)
        return found._replace(queries=queries)

    def mutation(self: retention.Waste, checks: Any, writes: Any) -> Mutation:
        return right_mutation(self, [check for check in checks if check[1] != FAILED_LIST], writes)

    patch.setattr(vacuum.Vacuum, "_request", request)
    patch.setattr(retention.Waste, "_mutation", mutation)
