"""Claims changes: finds out, in the run's own transaction, whether and why an observer must run.

N2  A run removes the notify cells that it has seen, and no others.
N3  The acknowledgement is the run's primary; if runs share a transaction, the first one's is (N20).
N20 Several rows can be claimed in one transaction.
N5  A signal has no acknowledgement: the run's commit removes the notify cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from perco.errors import Corruption
from perco.protocol.claim import (
    COVERS_MAX,
    Gone,
    Handled,
    InTheWay,
    Run,
    claim_queries,
    decide,
    decide_signal,
    signal_queries,
)
from perco.protocol.mutations import Intent
from perco.protocol.records import (
    ACK,
    SIGNAL,
    Cellref,
    observed_column,
    observer_of,
    raised_head,
    unpack_cause,
)
from perco.protocol.snapshot import Missing, Value, look
from perco.schema.schema import Observer, Signal
from perco.storage import FAILED_LIST, NOTIFY, Failed, Mutation, Query, RowCells
from perco.txn import runs
from perco.txn.engine import Engine
from perco.txn.prefetch import Raw
from perco.txn.transaction import Transaction

_CAUSES_PER_READ = 1024


class Claims:
    """Loop thread only. `marks`: for each observer, by its number: the head of its acknowledgements (N3), and its step
    in the paths of chains (N9)."""

    def __init__(self, engine: Engine, marks: Mapping[int, tuple[bytes, bytes]]) -> None:
        self._engine, self._marks = engine, marks

    async def claim(
        self, txn: Transaction, observer: Observer, table: str, row: bytes, ack: int
    ) -> tuple[Run, Value | Missing] | bool:
        """Returns why the observer must run, and what it observes. If it need not run, returns True if nothing is left
        to do, and False if a lock was in the way: then claim again."""
        column, ahead = observed_column(ack), runs.ahead_of(txn)
        cells, read = await self._read(txn, table, row, column, partial(claim_queries, column, ack), (ack, column))
        driver, start_ts = self._engine.driver, txn.start_ts
        try:
            cell = Cellref(table, row, ack)
            verdict = decide(cells, start_ts, observer.version)
            cell = Cellref(table, row, column)
            there = look(cells[3], cells[4]) if ahead is None or read is None else ahead.look(table, column, read)
        except Corruption as error:
            raise driver.at(cell, error) from error
        if ahead is not None and type(verdict) is not Run:
            ahead.drop()
        match verdict:
            case Gone():
                return True
            case InTheWay(on_ack, lock):
                txn.discard()
                await driver.clear(Cellref(table, row, ack if on_ack else column), lock)
                return False
            case Handled(covers):
                txn.discard()
                await self.tidy(table, ack, [(row, covers)])
                return True
        assert isinstance(verdict, Run)
        if len(verdict.covers) == COVERS_MAX:
            verdict = await self.with_older(verdict, Cellref(table, row, ack))
        seen = await driver.finish(table, row, column, start_ts, there)
        if ahead is not None:
            ahead.keep(table, row, column, seen)
        del cells  # a run may take a long time
        self.handle(txn, observer, table, row, ack, verdict, seen)
        return verdict, seen

    async def claim_many(
        self, txn: Transaction, observer: Observer, table: str, rows: Sequence[bytes], ack: int
    ) -> list[tuple[bytes, Run, Value | Missing]]:
        """Like `claim` or `claim_signal`, for several rows, with one read, and without `handle` (N20). Leaves out the
        rows for which this is not enough: a lock is in the way, an earlier run has handled the changes, or many
        wait."""
        driver, start_ts, column = self._engine.driver, txn.start_ts, observed_column(ack)
        signals = isinstance(observer.column, Signal)
        if driver.entered.cells and not signals:
            await driver.past_cells([(table, row, each) for row in rows for each in (ack, column)], start_ts)  # C4
        queries = signal_queries(ack, start_ts) if signals else claim_queries(column, ack, start_ts)
        found = await runs.driver_of(txn).reads.read([(table, row, queries) for row in rows])
        claimed: list[tuple[bytes, Run, Value | Missing]] = []
        for row, cells in zip(rows, found, strict=True):
            try:
                verdict = decide_signal(cells, start_ts) if signals else decide(cells, start_ts, observer.version)
                there = None if signals else look(cells[3], cells[4])
            except Corruption:
                continue  # the row's own run says so
            if type(verdict) is Run and len(verdict.covers) < COVERS_MAX:
                if there is None:
                    seen: Value | Missing = Missing(verdict.covers[0])
                else:
                    seen = await driver.finish(table, row, column, start_ts, there)
                claimed.append((row, verdict, seen))
        return claimed

    def handle(
        self, txn: Transaction, observer: Observer, table: str, row: bytes, ack: int, run: Run, seen: Value | Missing
    ) -> None:
        """Let the transaction handle what a run has claimed: acknowledge the changes (N3), or remove the signal's
        notify cells (N5)."""
        if isinstance(observer.column, Signal):
            body = raised_head(observer.version, run.raised) + run.cause
            runs.handle(txn, Intent(table, row, ack, SIGNAL, body, (), run.removes))
            return
        head = self._marks[observer_of(ack)][0]
        runs.acknowledge(txn, Intent(table, row, ack, ACK, head + run.cause, (), run.removes))
        runs.observed(txn, (table, row, observed_column(ack)), seen)

    async def commit(self, txn: Transaction, table: str, ack: int, handled: Iterable[tuple[bytes, Run]]) -> None:
        """Commit the transaction of runs. N5: runs for signals that write, raise and lock nothing leave no record."""
        if runs.only_handles(txn):
            runs.handled(txn)
            await self.tidy(table, ack, [(row, run.removes) for row, run in handled])
        else:
            await txn.commit()

    async def claim_signal(
        self, txn: Transaction, observer: Observer, table: str, row: bytes, ack: int
    ) -> tuple[Run, Value | Missing] | bool:
        """Like `claim`, but for a signal: a run can see only that the signal was raised, and when (N5)."""
        cell, ahead = Cellref(table, row, ack), runs.ahead_of(txn)
        cells, _ = await self._read(txn, table, row, ack, partial(signal_queries, ack), ())
        driver, start_ts = self._engine.driver, txn.start_ts
        try:
            verdict = decide_signal(cells, start_ts)
        except Corruption as error:
            raise driver.at(cell, error) from error
        if ahead is not None and type(verdict) is not Run:
            ahead.drop()
        match verdict:
            case Gone():
                return True
            case InTheWay(_, lock):
                txn.discard()
                await driver.clear(cell, lock)
                return False
        assert isinstance(verdict, Run)
        if len(verdict.covers) == COVERS_MAX:
            verdict = await self.with_older(verdict, cell)
        seen = Missing(verdict.covers[0])
        self.handle(txn, observer, table, row, ack, verdict, seen)
        return verdict, seen

    async def _read(
        self,
        txn: Transaction,
        table: str,
        row: bytes,
        column: int,
        queries_at: Callable[[int], list[Query]],
        committed: Iterable[int],
    ) -> tuple[RowCells, Raw | None]:
        """Read the cells of a row that a claim needs. With a read-ahead, also read the cells that the observer is
        likely to read in this row, and also return the observed cell, in the form that `ahead` takes.

        Args:
            queries_at: the claim's queries at a timestamp.
            committed: those of the columns in which commits may be under way (C4).
        """
        ahead, starts, found = runs.ahead_of(txn), runs.starts(txn), None
        if ahead is None:
            if starts and (cells := await runs.draw_and_read(txn, table, row, queries_at(0))):
                return cells, None
            driver, ts = runs.driver_of(txn), txn.start_ts
            if driver.entered.cells:  # C4
                await driver.past_cells([(table, row, each) for each in committed], ts)
            [cells] = await driver.reads.read([(table, row, queries_at(ts))])
            return cells, None
        ahead.begin_read()
        plan, before = ahead.plan(table, row, (column,)), queries_at(0)
        if starts:
            found = await runs.draw_and_read(txn, table, row, [*before, *plan.queries(0)[2:]])
        if found is None:
            driver, ts = runs.driver_of(txn), txn.start_ts
            if driver.entered.cells:  # C4
                await driver.past_cells([(table, row, each) for each in committed], ts)
            plan = driver.not_entered(table, plan, ts)
            [(plan, found)] = await driver.read_plans(table, [plan], ts, queries_at(ts))
        cells, more = found[: len(before)], found[len(before) :]
        first = cells[3:5] if len(cells) > 4 else ([], [])  # a signal has no lock and no record to look at
        [(_, read)] = ahead.took(table, plan, [*first, *more])
        return cells, read

    async def with_older(self, run: Run, ack: Cellref) -> Run:
        """The run, completed with the notify cells that it sees but does not remove: the run also has their causes
        (N9), and their failed attempts count as its own (N6)."""
        root, attempts, below = run.root, run.attempts, run.covers[-1]
        while True:
            query = (NOTIFY, ack.column, 0, below - 1, _CAUSES_PER_READ)
            [[cells]] = await self._engine.driver.store.read([(ack.table, ack.row, (query,))])
            if not cells:
                return run._replace(root=root, attempts=attempts)
            try:
                for _, value in cells:
                    cause = unpack_cause(value)
                    root, attempts = min(root, cause[0]), max(attempts, cause[3])
            except Corruption as error:
                raise self._engine.driver.at(ack, error) from error
            below = cells[-1][0]

    async def tidy(self, table: str, ack: int, seen: Iterable[tuple[bytes, tuple[int, ...]]]) -> None:
        """Remove the notify cells that earlier runs have handled; or, after runs for signals, the notify cells and the
        failed changes that these have seen (N2). `seen`: by row, their timestamps; a failed change's is negative."""
        driver = self._engine.driver
        mutations = []
        for row, covers in seen:
            writes = tuple((NOTIFY, ack, ts, None) if ts > 0 else (FAILED_LIST, ack, -ts, None) for ts in covers)
            mutations.append(Mutation(table, ((row, (), writes),), None, True))
        with driver.observing(()):
            verdicts = await driver.store.apply(mutations)
        for verdict in verdicts:
            if isinstance(verdict, Failed):
                raise verdict.error
