"""Claims changes: finds out, in the run's own transaction, whether and why an observer must run.

N2  A run removes the notify cells that it has seen, and no others.
N3  The acknowledgement is the run's primary; if runs share a transaction, the first one's is (N20).
N20 Several rows can be claimed in one transaction.
N5  A signal has no acknowledgement: the run's commit removes the notify cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
from perco.schema.schema import Observer
from perco.storage import FAILED_LIST, NOTIFY, Failed, Mutation, Query, RowCells
from perco.txn import runs
from perco.txn.driver import Driver
from perco.txn.engine import Engine
from perco.txn.prefetch import Ahead, Raw
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
        driver, start_ts, column = self._engine.driver, txn.start_ts, observed_column(ack)
        both, entered = ((table, row, ack), (table, row, column)), driver.entered.cells
        if both[0] in entered or both[1] in entered:
            await driver.past_cells(both, start_ts)  # C4
        ahead = runs.ahead_of(txn)
        queries = claim_queries(column, ack, start_ts)
        cells, read = await self._read(runs.driver_of(txn), ahead, table, row, column, queries, start_ts)
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
                await self.tidy(table, row, ack, covers)
                return True
        assert isinstance(verdict, Run)
        if len(verdict.covers) == COVERS_MAX:
            verdict = await self.with_older(verdict, Cellref(table, row, ack))
        seen = await driver.finish(table, row, column, start_ts, there)
        if ahead is not None:
            ahead.keep(table, row, column, seen)
        del cells  # a run may take a long time
        runs.acknowledge(txn, self.ack(table, row, ack, verdict))
        runs.observed(txn, (table, row, column), seen)
        return verdict, seen

    async def claim_many(
        self, txn: Transaction, observer: Observer, table: str, rows: Sequence[bytes], ack: int
    ) -> list[tuple[bytes, Run, Value | Missing]]:
        """Like `claim`, for several rows, with one read, and without the acknowledgements (N20). Leaves out the rows
        for which this is not enough: a lock is in the way, an earlier run has handled the changes, or many wait."""
        driver, start_ts, column = self._engine.driver, txn.start_ts, observed_column(ack)
        if driver.entered.cells:
            await driver.past_cells([(table, row, each) for row in rows for each in (ack, column)], start_ts)  # C4
        queries = claim_queries(column, ack, start_ts)
        found = await runs.driver_of(txn).reads.read([(table, row, queries) for row in rows])
        claimed: list[tuple[bytes, Run, Value | Missing]] = []
        for row, cells in zip(rows, found, strict=True):
            try:
                verdict = decide(cells, start_ts, observer.version)
                there = look(cells[3], cells[4])
            except Corruption:
                continue  # the row's own run says so
            if type(verdict) is Run and len(verdict.covers) < COVERS_MAX:
                claimed.append((row, verdict, await driver.finish(table, row, column, start_ts, there)))
        return claimed

    async def claim_signals(
        self, txn: Transaction, table: str, rows: Sequence[bytes], ack: int
    ) -> list[tuple[bytes, Run, Value | Missing]]:
        """Like `claim_many`, for a signal."""
        queries = signal_queries(ack, txn.start_ts)
        found = await runs.driver_of(txn).reads.read([(table, row, queries) for row in rows])
        claimed: list[tuple[bytes, Run, Value | Missing]] = []
        for row, cells in zip(rows, found, strict=True):
            try:
                verdict = decide_signal(cells, txn.start_ts)
            except Corruption:
                continue  # the row's own run says so
            if type(verdict) is Run and len(verdict.covers) < COVERS_MAX:
                claimed.append((row, verdict, Missing(verdict.covers[0])))
        return claimed

    def signal(self, table: str, row: bytes, ack: int, version: int, run: Run) -> Intent:
        """The intent of a signal that a run handles (N5). `version`: of the observer."""
        return Intent(table, row, ack, SIGNAL, raised_head(version, run.raised) + run.cause, (), run.removes)

    def ack(self, table: str, row: bytes, ack: int, run: Run) -> Intent:
        """The acknowledgement of a run."""
        head = self._marks[observer_of(ack)][0]
        return Intent(table, row, ack, ACK, head + run.cause, (), run.removes)

    async def claim_signal(
        self, txn: Transaction, observer: Observer, table: str, row: bytes, ack: int
    ) -> tuple[Run, Value | Missing] | bool:
        """Like `claim`, but for a signal: a run can see only that the signal was raised, and when (N5)."""
        driver, start_ts = self._engine.driver, txn.start_ts
        cell = Cellref(table, row, ack)
        ahead, queries = runs.ahead_of(txn), signal_queries(ack, start_ts)
        cells, _ = await self._read(runs.driver_of(txn), ahead, table, row, ack, queries, start_ts)
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
        runs.handle(txn, self.signal(table, row, ack, observer.version, verdict))
        return verdict, Missing(verdict.covers[0])

    async def _read(
        self, driver: Driver, ahead: Ahead | None, table: str, row: bytes, column: int, queries: list[Query], ts: int
    ) -> tuple[RowCells, Raw | None]:
        """Read the cells of a row that a claim needs. With `ahead`, also read the cells that the observer is likely to
        read in this row, and also return the observed cell, in the form that `ahead` takes."""
        if ahead is None:
            [cells] = await driver.reads.read([(table, row, queries)])
            return cells, None
        ahead.begin_read()
        plan = driver.not_entered(table, ahead.plan(table, row, (column,)), ts)
        [(plan, found)] = await driver.read_plans(table, [plan], ts, queries)
        cells, more = found[: len(queries)], found[len(queries) :]
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

    async def tidy(self, table: str, row: bytes, ack: int, covers: tuple[int, ...]) -> None:
        """Remove the notify cells that an earlier run has handled; or, after a run for a signal, the notify cells, and
        the failed change, that this run has seen (N2). `covers`: their timestamps; a failed change's is negative."""
        await self.tidy_all(table, ack, [(row, covers)])

    async def tidy_all(self, table: str, ack: int, seen: Iterable[tuple[bytes, tuple[int, ...]]]) -> None:
        """The same for several rows. `seen`: each with its `covers`."""
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
