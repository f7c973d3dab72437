"""Finds the changes that wait for observers, by reading the rows, and checks whether a wait for them can end.

N7  A change that is not handled yet has a notify cell, a pending signal, or a lock on an observed cell.
N9  Every notify cell carries the root cause of its chain.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Final

import trio

from perco.errors import Corruption, NotIdle, SchemaMismatch, Unavailable, UsageError, must_be_number
from perco.notify.failing import AwaitsAsyncio
from perco.notify.worker import Watch, Worker, too_old
from perco.protocol.records import Cellref, ack_of, column_of, observer_of, unpack_cause
from perco.schema.catalogue import ObserverEntry
from perco.storage import LOCK, NOTIFY, PENDING, TS_MAX, ReadRequest, ScanCell, ScanQuery, ScanRequest
from perco.txn.engine import Engine
from perco.txn.keeping import Keeper

_CELLS_PER_ROW: Final = 1 << 12
NOTHING_RUNS: Final = (
    "changes wait for observers and no worker runs them; wait inside `async with db.worker():`, or start a worker in "
    "another process"
)
# The queries for all changes that are not handled (N7).
_WAITING: Final = tuple(ScanQuery(group, None, 0, TS_MAX, _CELLS_PER_ROW) for group in (LOCK, PENDING, NOTIFY))


class Waiting:
    """Loop thread only.

    Attributes:
        tells_s: how long to spend, after a deadline has passed, on counting the changes that still wait, which the
            error reports.
        watch_elsewhere: watches runs in other processes; set only in the owner of a store that is served.
    """

    def __init__(
        self,
        engine: Engine,
        keeper: Keeper,
        worker: Callable[[], Worker | None],
        stuck: Callable[[], Mapping[tuple[Cellref, int], Corruption]],
        *,
        tells_s: float = math.inf,
    ) -> None:
        """
        Args:
            stuck: returns the locks that can be neither settled nor decoded, by cell and start timestamp.
        """
        self._engine, self._keeper, self._worker, self._stuck = engine, keeper, worker, stuck
        self.tells_s = tells_s
        self.watch_elsewhere: Callable[[int], Watch] | None = None

    def observed_tables(self) -> list[str]:
        """The tables that have observers."""
        return self._engine.known.catalogue.observed_tables()

    def _observers(self) -> Collection[ObserverEntry]:
        return self._engine.known.catalogue.observers.values()

    def observed_cells(self) -> set[tuple[str, int]]:
        """(table, column in the store) of all columns that have observers."""
        tables, observers = self._engine.known.catalogue.tables, self._observers()
        return {(o.table, column_of(tables[o.table].columns[o.column].number)) for o in observers}

    def _observed_columns(self, table: str) -> set[int]:
        """The store's numbers of a table's observed columns, and of their acknowledgement columns."""
        observed = {column for of, column in self.observed_cells() if of == table}
        return observed | {
            ack_of(column, o.number) for column in observed for o in self._engine.known.catalogue.observers.values()
        }

    async def must_be_past(self, ts: int) -> None:
        """Raises UsageError for a timestamp at which no transaction can have committed yet."""
        if isinstance(ts, bool) or not isinstance(ts, int):
            raise UsageError(f"wait_for takes a timestamp, an int as in txn.commit_ts, not {ts!r}")
        if ts > self._engine.oracle.last and ts > await self._engine.oracle.newest():
            raise UsageError(
                f"nothing has been committed at {ts} yet: timestamps so far are 1 to {self._engine.oracle.last}"
            )

    @contextlib.asynccontextmanager
    async def deadline(self, timeout: float | None, what: str) -> AsyncIterator[None]:
        if timeout is None:
            yield
            return
        must_be_number("timeout", timeout)
        with trio.move_on_after(timeout) as scope:
            yield
        if scope.cancelled_caught:
            failures = worker.last_failures if (worker := self._worker()) is not None else {}
            what = f"{what} within {timeout:g} s"
            waiting = None
            with trio.move_on_after(self.tells_s), contextlib.suppress(Unavailable):
                waiting = await self.counts()
            counts = None if waiting is None else {id: count for id, count in waiting.items() if count}
            raise NotIdle(what, counts, failures)

    async def none_up_to(self, ts: int) -> bool:
        """Whether no change with a root cause at or before `ts` waits for an observer or is about to wait (N7, N9).

        It looks at notify cells, and at locks on observed cells and pending signals, which become notify cells (N1,
        N5). A look may miss a cause: a run may carry the cause from a row that has not been looked at yet to one that
        has. So a look does not count if such a run was in flight meanwhile.
        """
        if self._engine.driver.entered.up_to(ts) or self._engine.known.catalogue.unready():
            return False  # C4, N10: some notify cells are not visible yet
        worker = self._worker()
        watches = [worker.watch(ts)] if worker is not None else []
        if self.watch_elsewhere is not None:
            watches.append(self.watch_elsewhere(ts))
        try:
            damage: Corruption | AwaitsAsyncio | None = None
            for table in self.observed_tables():
                start: bytes | None = b""
                while start is not None:
                    page = await self._engine.driver.store.scan(ScanRequest(table, start, None, _WAITING))
                    for row, found in page.rows:
                        if any(len(cells) == _CELLS_PER_ROW for cells in found):
                            # Read one group after the other, the notify cells last: a lock may become a notify cell,
                            # but a notify cell never becomes a lock.
                            found = [
                                await self.row_cells(table, row, query.group, cells)
                                for query, cells in zip(_WAITING, found, strict=True)
                            ]
                        locks, pending, notified = found
                        try:
                            if self._oldest_cause(table, row, notified, [*locks, *pending]) <= ts:
                                return False
                        except (Corruption, AwaitsAsyncio) as error:
                            damage = error  # raised if nothing else waits
                    start = page.next
            if any(watch.moved for watch in watches):
                return False
            if damage is not None:
                raise damage
            return True
        finally:
            for watch in watches:
                watch.end()

    async def row_cells(self, table: str, row: bytes, group: str, found: list[ScanCell]) -> list[ScanCell]:
        """All cells of a group in a row, now. `found`: some of them."""
        cells: list[ScanCell] = []
        for column in sorted({column for column, _, _ in found} | self._observed_columns(table)):
            below = TS_MAX
            while True:
                request: ReadRequest = (table, row, [(group, column, 0, below, _CELLS_PER_ROW)])
                [[versions]] = await self._engine.driver.store.read([request])
                cells += [(column, ts, value) for ts, value in versions]
                if len(versions) < _CELLS_PER_ROW:
                    break
                below = versions[-1][0] - 1
        return cells

    def _oldest_cause(self, table: str, row: bytes, notified: Sequence[ScanCell], locks: Sequence[ScanCell]) -> int:
        """The smallest root cause in a row's notify cells, and in the notify cells that its locks on observed cells
        would become.

        Raises: Corruption if a cause cannot be read; Corruption or AwaitsAsyncio if the observer cannot run for a
        change.
        """
        observed, worker = self.observed_cells(), self._worker()
        oldest = TS_MAX
        for column, commit_ts, value in notified:
            damage = worker.damage(table, row, column, commit_ts) if worker is not None else None
            if damage is not None:
                raise damage.again()
            try:
                oldest = min(oldest, unpack_cause(value)[0])
            except Corruption as error:
                raise self._engine.driver.at(Cellref(table, row, column), error) from error
        for column, start_ts, value in locks:
            if (table, column) in observed:
                cell = Cellref(table, row, column)
                stuck = self._stuck().get((cell, start_ts))
                if stuck is not None:
                    raise stuck.again()
                lock = self._engine.driver.lock_at(cell, start_ts, value)
                if lock.observers:
                    oldest = min(oldest, lock.root or start_ts)
        return oldest

    async def must_be_readable(self, last: Corruption | AwaitsAsyncio | None) -> None:
        """Raises Corruption or UsageError if all that is left are changes for which this worker cannot run the
        observer, and perhaps a damaged lock, whose error is `last`."""
        worker = self._worker()
        if last is None and (worker is None or not worker.damaged):
            return
        async with contextlib.aclosing(self._notified()) as cells:
            async for cell in cells:
                last = worker.damage(*cell) if worker is not None else None
                if last is None:
                    return
        if last is not None:
            raise last.again()

    def check_run(self, waiting: Collection[str], running: Collection[str]) -> None:
        """Check that some program runs one of the observers for which changes wait. `running`: the observers of
        programs with a worker, as far as the owner knows: it may have forgotten this process for a moment.

        Raises: UsageError, SchemaMismatch.
        """
        if not waiting:
            return
        worker = self._worker()
        if not running and worker is None:
            raise UsageError(NOTHING_RUNS)
        running = {*running, *(worker.works()[1] if worker is not None else ())}
        paused, superseded = self._engine.known.catalogue.paused(), worker.superseded if worker is not None else {}
        if any(id in running and id not in paused and id not in superseded for id in waiting):
            return
        for id in superseded.keys() & waiting:
            raise SchemaMismatch(too_old(self._engine.known.schema.observers[id], superseded[id]))
        if paused & set(waiting):
            names = ", ".join(map(repr, sorted(paused & set(waiting))))
            raise UsageError(
                f"changes wait for observers that are paused: {names}. Resume them: await db.resume(...), or "
                "`perco resume`."
            )
        raise UsageError(
            f"changes wait for observers that no running program has: {', '.join(sorted(waiting))}. Add them to the "
            "schema, or start a program that has them."
        )

    async def counts(self, *, readable: bool = False) -> dict[str, int]:
        """How many changes wait for each observer, by id, counted in one pass over the notify cells.

        Args:
            readable: leave out changes for which this worker cannot run the observer (see `Worker.damage`).
        """
        self._engine.usable(writing=False)
        await self._keeper.catch_up()
        names = {entry.number: id for id, entry in self._engine.known.catalogue.observers.items()}
        worker = self._worker()
        counts = dict.fromkeys(self._engine.known.catalogue.observers, 0)
        async for table, row, column, ts in self._notified():
            if readable and worker is not None and worker.damage(table, row, column, ts) is not None:
                continue
            id = names.get(observer_of(column), f"#{observer_of(column)}")
            counts[id] = counts.get(id, 0) + 1
        return counts

    async def _notified(self) -> AsyncGenerator[tuple[str, bytes, int, int], None]:
        """(table, row, acknowledgement column, ts) of every notify cell."""
        for table in self.observed_tables():
            start: bytes | None = b""
            while start is not None:
                page = await self._engine.driver.store.scan(ScanRequest(table, start, None, _WAITING[-1:]))
                for row, [notified] in page.rows:
                    if len(notified) == _CELLS_PER_ROW:
                        notified = await self.row_cells(table, row, NOTIFY, notified)
                    for column, ts, _ in notified:
                        yield table, row, column, ts
                start = page.next
