"""Faults in runs that share a transaction: the simulation, or a component test, must find each (N20)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from perco.notify.batches import Batches, CallFailed
from perco.notify.worker import Worker
from perco.notify.working import Claims
from perco.protocol.mutations import Intent
from perco.txn import runs, transaction
from perco.txn.transaction import Transaction
from tests.testing.mutants import Mutant
from tests.testing.mutants_components import by

BATCHES: dict[str, Mutant] = {}

_TESTS: Final = "tests/component/notify/test_batches.py"


def mutant(name: str) -> Any:
    return lambda function: BATCHES.setdefault(name, function)


@mutant("N20 only the first change of a batch is acknowledged")
def one_acknowledged(patch: pytest.MonkeyPatch) -> None:
    right = runs.acknowledge

    def acknowledge(txn: Transaction, ack: Intent) -> None:
        if txn._acks is None:
            right(txn, ack)

    patch.setattr(runs, "acknowledge", acknowledge)


@by(
    f"{_TESTS}::test_each_signal_of_a_batch_is_handled_by_its_call[owner-True]",
    "N20 only the last signal of a batch is handled",
)
def one_handled(patch: pytest.MonkeyPatch) -> None:
    right = runs.handle

    def handle(txn: Transaction, signal: Intent) -> None:
        txn._signals = None
        right(txn, signal)

    patch.setattr(runs, "handle", handle)


@by(
    f"{_TESTS}::test_each_signal_of_a_batch_is_handled_by_its_call[owner-False]",
    "N20 of the signals of a batch that writes nothing, one is removed",
)
def one_removed(patch: pytest.MonkeyPatch) -> None:
    right = Claims.tidy

    async def tidy(self: Claims, table: str, ack: int, seen: Any) -> None:
        await right(self, table, ack, [*seen][:1])

    patch.setattr(Claims, "tidy", tidy)


@by(
    f"{_TESTS}::test_a_change_that_fails_leaves_the_others_alone[owner-raises]",
    "N20 a change whose call has failed is acknowledged with the others",
)
def failed_with_others(patch: pytest.MonkeyPatch) -> None:
    right = Batches._call

    async def call(self: Batches, txn: Transaction, observer: Any, table: str, row: bytes, *more: Any) -> Any:
        try:
            return await right(self, txn, observer, table, row, *more)
        except CallFailed:
            return observer.column.table.key.decode(row)

    patch.setattr(Batches, "_call", call)


@by(
    f"{_TESTS}::test_consequences_have_the_causes_that_they_would_have_had_alone[owner]",
    "N20 the changes of a batch carry the cause of its last call",
)
def last_cause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transaction, "_with_causes", lambda intents, causes: intents)


@by(
    f"{_TESTS}::test_a_cell_that_two_calls_write_carries_the_earlier_cause[owner]",
    "N20 a cell that two calls of a batch write carries the cause of the second",
)
def second_cause(patch: pytest.MonkeyPatch) -> None:
    def caused(self: Transaction, causes: Any, where: Any) -> None:
        causes[where] = transaction.Cause(self._root, self._depth, self._path)

    patch.setattr(Transaction, "_caused", caused)


@by(
    f"{_TESTS}::test_a_change_whose_cell_another_call_has_written_runs_by_itself[owner]",
    "N20 a call gets a value that another call of its batch has replaced",
)
def replaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runs, "has_written", lambda txn, cell: False)


@by(
    f"{_TESTS}::test_a_conflict_is_left_to_runs_of_their_own[owner]",
    "N20 the changes of a batch that has failed are left",
)
def left(patch: pytest.MonkeyPatch) -> None:
    right = Batches.run

    async def run(self: Batches, table: str, rows: Sequence[bytes], ack: int) -> Sequence[bytes]:
        found = await right(self, table, rows, ack)
        return () if found is rows else found

    patch.setattr(Batches, "run", run)


@by(
    f"{_TESTS}::test_a_function_that_commits_ends_its_batch[owner]",
    "N20 changes after the call that has committed count as handled",
)
def all_handled(patch: pytest.MonkeyPatch) -> None:
    right = Batches._run

    async def run(self: Batches, txn: Any, observer: Any, table: str, claimed: Any, ack: int) -> set[bytes]:
        await right(self, txn, observer, table, claimed, ack)
        return {row for row, _, _ in claimed}

    patch.setattr(Batches, "_run", run)


@by(
    f"{_TESTS}::test_no_call_of_a_batch_begins_once_the_worker_drains_or_the_observer_is_paused[owner-drain-False]",
    "N20 calls of a batch begin while the worker drains",
)
def goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Batches, "_may_call", lambda self, txn, observer, ack: True)


@by(
    f"{_TESTS}::test_a_change_that_was_put_off_is_forgotten_once_a_batch_has_handled_it[owner]",
    "N20 a change that a batch has handled still counts as put off",
)
def not_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "succeeded", lambda self, key: None)
