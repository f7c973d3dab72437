"""Runs of one observer on several rows that share a transaction.

N20 If an observer declares a `batch`, and several of its changes wait in one tablet, up to so many of its runs share a
    transaction: one read claims their rows, the function is called for one change after the other, and one commit makes
    all writes visible, with an acknowledgement for each row. The cells that a call writes carry the cause of its
    change; if two calls write a cell, it carries the earlier root, and the longer chain. So each change is handled by
    one run (N3), and no wait for one of the causes ends too soon (N7). Signals share transactions in the same way: the
    commit removes the notify cells that each call saw (N5).
    If the function fails for one of the changes, or if the transaction conflicts, nothing of it becomes visible, and
    each change gets a run of its own, which counts (N6). Changes that have failed before, that are not due, or whose
    claim meets a lock, also get their own runs; so does one whose observed cell another call of the batch has written.
    After a failure, fewer runs share a transaction, and then more again, step by step. If the worker drains, the
    observer is paused, or the calls so far have written much, no further calls begin.

A call in a batch waits for those before it. So a batch is only faster if the store's rows are `near`: elsewhere, each
read is a round trip to a server, and each run has a transaction of its own. It also has one if transactions are traced,
because a span belongs to one run, and if scanners do not lock rows, because they might then put a row into a batch
twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import trio

from perco.errors import CommitUnknown, Corruption, StoreError, TransientError, UsageError
from perco.notify.concerned import must_be_declared
from perco.notify.delays import too_early
from perco.notify.failing import ObserverFailedError, where_of
from perco.notify.given import change_of, in_time
from perco.notify.worker import Worker
from perco.protocol.claim import Run
from perco.protocol.records import Cellref, observed_column, observer_of
from perco.protocol.snapshot import Missing, Value
from perco.schema.schema import Observer
from perco.txn import runs
from perco.txn.beginning import begin
from perco.txn.inside import size_of
from perco.txn.transaction import Transaction

_PART: Final = 4  # of what a transaction may write, its calls use one part before the last of them begins
_LESS: Final = 2  # a batch that fails divides the size of the next ones by this

Claimed = tuple[bytes, Run, Value | Missing]  # the row, why the observer runs, and what it observes


class CallFailed(Exception):
    """An observer's function has failed for a change of a batch; its own run reports the error."""


class Batches:
    """The batches of one scanner's runners. Loop thread only."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._sizes: dict[int, int] = {}  # by observer, if its runs may share transactions: how many of them
        if worker.engine.driver.store.near and worker.options.row_locks:
            self._sizes = {n: each.limits.batch for n, each in worker.declared.items() if each.limits.batch > 1}

    def __bool__(self) -> bool:
        """Whether runs of any observer may share transactions."""
        return bool(self._sizes) and self._worker.engine.spans is None

    def size(self, ack: int) -> int:
        """How many runs of an observer may share a transaction now."""
        return self._sizes.get(observer_of(ack), 1)

    async def run_all(self, table: str, rows: Sequence[bytes], ack: int) -> Sequence[bytes]:
        """Run an observer on rows, in as few transactions as may be now. Returns the rows that need a run of their
        own."""
        left: list[bytes] = []
        at = 0
        while at < len(rows):
            size = self.size(ack)
            if size == 1 or (at and not self._worker.may_go_on(ack, math.inf)):
                return [*left, *rows[at:]]
            left += await self.run(table, rows[at : at + size], ack)
            at += size
        return left

    async def run(self, table: str, rows: Sequence[bytes], ack: int) -> Sequence[bytes]:
        """Run an observer on rows, whose locks the caller holds. Returns the rows that need a run of their own."""
        worker, number = self._worker, observer_of(ack)
        observer = worker.observers.get(number)
        if observer is None:
            return ()  # N10: paused or superseded since the rows were claimed
        counters = worker.counters[observer.id]
        counters.running += len(rows)
        try:
            left = await self._try(observer, table, rows, ack)
        except (CallFailed, TransientError, CommitUnknown, StoreError, Corruption):
            pass  # the rows' own runs find out what is wrong, and report and count it
        else:
            self._sizes[number] = min(self._sizes[number] + 1, observer.limits.batch)
            return left
        finally:
            counters.running -= len(rows)
        self._sizes[number] = max(self._sizes[number] // _LESS, 1)
        return rows

    def succeeded(self, ack: int) -> None:
        """A run with a transaction of its own has not failed."""
        if self._sizes.get(number := observer_of(ack)) == 1:
            self._sizes[number] = 2

    async def _try(self, observer: Observer, table: str, rows: Sequence[bytes], ack: int) -> Sequence[bytes]:
        worker = self._worker
        txn = await begin(worker.engine, observer.isolation, observer.id, traced=False, first=True)
        try:
            if not await worker.enters(txn, observer, observer_of(ack)):
                return ()
            claimed = await worker.claims.claim_many(txn, observer, table, rows, ack)
            claimed = [each for each in claimed if await self._may_share(table, each[0], ack, each[1])]
            done = await self._run(txn, observer, table, claimed, ack) if claimed else ()
        finally:
            runs.ended(txn)
        return [row for row in rows if row not in done]

    async def _may_share(self, table: str, row: bytes, ack: int, run: Run) -> bool:
        worker = self._worker
        assert worker.elsewhere is None, "N20: in clients, runs do not share a transaction"
        if run.attempts or run.depth > worker.chain_max:
            return False
        delays = worker.delays.get(observer_of(ack))
        return delays is None or not await too_early(worker.engine.driver.store, delays, (table, row, ack), run)

    async def _run(
        self, txn: Transaction, observer: Observer, table: str, claimed: Sequence[Claimed], ack: int
    ) -> set[bytes]:
        """Call the function for each change, and commit. Returns the rows whose changes are handled."""
        worker, number, counters = self._worker, observer_of(ack), self._worker.counters[observer.id]
        runs.share(txn)
        began = worker.begins(txn, number, min(run.root for _, run, _ in claimed))
        handled: dict[bytes, tuple[Any, Run]] = {}
        try:
            for row, run, seen in claimed:
                if runs.has_written(txn, (table, row, observed_column(ack))):
                    continue  # the run sees what this transaction does not know yet
                if handled and not self._may_call(txn, observer, ack):
                    break
                worker.caused(txn, number, run)
                worker.claims.handle(txn, observer, table, row, ack, run, seen)
                handled[row] = await self._call(txn, observer, table, row, run, seen), run
                if txn.outcome != "open":
                    break  # the function has committed: the other changes are not acknowledged
            seconds = trio.current_time() - began
            try:
                self._check(observer, txn)
            except UsageError as error:
                self._failed(observer, txn, table, row, run, error)
            if txn.outcome == "open":
                await worker.claims.commit(txn, table, ack, [(row, run) for row, (_, run) in handled.items()])
        finally:
            worker.over(txn, number, max(len(handled), 1))
        counters.seconds += seconds
        counters.runs += len(handled)
        counters.batched += len(handled) if len(handled) > 1 else 0
        if worker.backoff.rows or worker.unrunnable:
            for row in handled:
                worker.succeeded(Cellref(table, row, ack))
        each_s = (trio.current_time() - began) / len(handled)
        worker.committed_runs(txn, number, observer.id, list(handled.values()), each_s)
        return set(handled)

    def _may_call(self, txn: Transaction, observer: Observer, ack: int) -> bool:
        """Whether the function may be called for another change. A transaction that is already large has room for what
        one call may write, but not for that of many."""
        worker, limits = self._worker, self._worker.engine.limits
        cells, size = size_of(txn)
        if cells * _PART > limits.cells_max or size * _PART > limits.bytes_max:
            return False
        # An observer with batches has no rate, so it does not matter when the rows were claimed.
        return worker.observers.get(observer_of(ack)) is observer and worker.may_go_on(ack, math.inf)

    async def _call(
        self, txn: Transaction, observer: Observer, table: str, row: bytes, run: Run, seen: Value | Missing
    ) -> Any:
        """Call the function for a change; returns the key. Raises: CallFailed; TransientError, CommitUnknown,
        StoreError."""
        key = None
        try:
            change = change_of(observer, row, seen, 1, run)
            key = change.key
            await (in_time(observer, txn, change) if observer.limits.timeout_s else observer.function(txn, change))
            if txn.outcome not in ("open", "committed"):
                raise UsageError("an observer may commit its transaction, but not discard it")
        except (TransientError, CommitUnknown, StoreError):
            raise
        except Exception as error:
            self._failed(observer, txn, table, row, run, error)
        return key

    def _failed(self, observer: Observer, txn: Transaction, table: str, row: bytes, run: Run, error: Exception) -> None:
        """A call has failed. If its function had committed by then, no other run will report the error, so it is
        reported here. Raises: CallFailed if it had not."""
        if txn.outcome != "committed":
            raise CallFailed from error
        worker = self._worker
        worker.counters[observer.id].failures += 1
        failed = ObserverFailedError(error, txn.start_ts, run)
        worker.failure_log.failed(observer.id, where_of(worker.engine, table, row), failed)

    def _check(self, observer: Observer, txn: Transaction) -> None:
        """Raises: UsageError if it has written what it does not declare (V14)."""
        if observer.writes is not None and not observer.view:
            must_be_declared(observer, self._worker.engine.known.catalogue, runs.written(txn))
