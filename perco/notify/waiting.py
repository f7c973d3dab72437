"""Finds the changes that wait for observers, by reading the rows, and checks whether a wait for them can end.

N7  A change that is not handled yet has a notify cell, a pending signal, or a lock on an observed cell.
N9  Every notify cell carries the root cause of its chain.
V14 A view is fresh up to a timestamp if no change that was caused at or before it waits for an observer concerned, is
    in a run of one, or is on the failed list for one.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Final

import trio

from perco.clock.oracle import note_from
from perco.errors import Corruption, NotIdle, SchemaMismatch, Unavailable, UsageError, must_be_number
from perco.notify.concerned import Concerned, Freshness, Watch, all_but, concerned_with
from perco.notify.failing import AwaitsAsyncio, too_old
from perco.notify.worker import Worker
from perco.protocol.failed import unpack_failed
from perco.protocol.records import Cellref, ack_of, column_of, observer_of, unpack_cause
from perco.schema.entries import ObserverEntry
from perco.storage import FAILED_LIST, LOCK, NOTIFY, PENDING, TS_MAX, ReadRequest, ScanCell, ScanQuery, ScanRequest
from perco.txn.engine import Engine
from perco.txn.keeping import Keeper

_CELLS_PER_ROW: Final = 1 << 12
NOTHING_RUNS: Final = (
    "changes wait for observers and no worker runs them; wait inside the block of `db.worker()`, or start a worker in "
    "another process"
)
_DROPPED: Final = " (dropped)"  # after the id of an observer
# The queries for all changes that are not handled (N7), and for those that were given up (N6).
_WAITING: Final = tuple(
    ScanQuery(group, None, 0, TS_MAX, _CELLS_PER_ROW) for group in (LOCK, PENDING, NOTIFY, FAILED_LIST)
)


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
        self.watch_elsewhere: Callable[[Concerned], Watch] | None = None

    def observed_tables(self) -> list[str]:
        """The tables that have observers."""
        return self._engine.known.catalogue.observed_tables()

    def _observers(self) -> Collection[ObserverEntry]:
        return self._engine.known.catalogue.observers.values()

    def observed_cells(self, concerned: Concerned | None = None) -> set[tuple[str, int]]:
        """(table, column in the store) of all columns that have observers, or that have one of those concerned."""
        tables, observers = self._engine.known.catalogue.tables, self._observers()
        if concerned is not None and not concerned.every:
            observers = [o for o in observers if o.number in concerned]
        return {(o.table, column_of(tables[o.table].columns[o.column].number)) for o in observers}

    def _observing(self, table: str, column: int) -> list[int]:
        """Numbers of the observers of a column of the store."""
        columns = self._engine.known.catalogue.tables[table].columns
        mine = [o for o in self._observers() if o.table == table]
        return [o.number for o in mine if column_of(columns[o.column].number) == column]

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

    async def concerned_with(self, views: str | Iterable[str]) -> Concerned:
        """The observers concerned with these views (V14). Raises: UsageError for an unknown view."""
        ids = [views] if isinstance(views, str) else list(views)
        if not ids or not all(isinstance(id, str) for id in ids):
            raise UsageError(f"views are named by their ids, as in ['totals'], not {views!r}")
        await self._keeper.catch_up()
        known = self._engine.known
        return concerned_with(known.catalogue, known.schema, ids)

    async def freshness_of(
        self,
        views: str | Iterable[str] | None,
        ask: Callable[[Sequence[Sequence[int]]], Awaitable[list[Freshness]]],
    ) -> dict[str, Freshness]:
        """How fresh views are, by id (V14). `ask`: as `freshness`, perhaps of another process."""
        schema = self._engine.known.schema
        if views is None:
            views = sorted({observer.view for observer in schema.observers.values() if observer.view})
        ids = [views] if isinstance(views, str) else list(views)
        withouts = [sorted((await self.concerned_with(id)).without) for id in ids]
        return dict(zip(ids, await ask(withouts), strict=True)) if ids else {}

    @contextlib.contextmanager
    def _watching(self, concerned: Concerned) -> Iterator[list[Watch]]:
        """Watch the runs in flight, here and in other processes, while the block lasts (N7)."""
        worker = self._worker()
        watches = [worker.watch(concerned)] if worker is not None else []
        if self.watch_elsewhere is not None:
            watches.append(self.watch_elsewhere(concerned))
        try:
            yield watches
        finally:
            for watch in watches:
                watch.end()

    def _bounds(self, ts: int, without: Iterable[int] | None) -> tuple[int, Concerned]:
        """The newest root cause for which `none_up_to` waits, and the observers."""
        catalogue = self._engine.known.catalogue
        concerned = all_but(catalogue, without or ())
        if without is not None:
            # N10: a view learns of data that is older than its registration by the backfill, which may give a change
            # that followed from an earlier one a later cause.
            ts = max(ts, *(catalogue.observers[id].at for id in concerned.ids), 0)
        return ts, concerned

    async def none_up_to(self, ts: int, without: Iterable[int] | None = None) -> dict[str, int] | None:
        """Whether no change with a root cause at or before `ts` waits for an observer or is about to wait (N7, N9).

        It looks at notify cells, and at locks on observed cells and pending signals, which become notify cells (N1,
        N5). A look may miss a cause: a run may carry the cause from a row that has not been looked at yet to one that
        has. So a look does not count if such a run was in flight meanwhile.

        Args:
            without: for a wait for views: the numbers of observers that are not concerned (V14).

        Returns None if such a change waits. Otherwise, returns how many of these changes are on the failed list, by
        observer.

        Raises: UsageError if a job is building what an observer concerned derives; Corruption or AwaitsAsyncio if all
        that waits cannot be read, or cannot run.
        """
        catalogue = self._engine.known.catalogue
        ts, concerned = self._bounds(ts, without)
        building = [repr(id) for id in sorted(concerned.ids) if catalogue.observers[id].building]
        if building and without is not None:
            raise UsageError(
                f"a job is building what these observers derive: {', '.join(building)}. Wait for its end or, if it was "
                "given up, resume them: await db.resume(...), or `perco resume`."
            )
        if self._engine.driver.entered.up_to(ts) or not concerned.ids.isdisjoint(catalogue.unready()):
            return None  # C4, N10: some notify cells are not visible yet
        damage: Corruption | AwaitsAsyncio | None = None
        failed: Counter[int] = Counter()
        observed = self.observed_cells(concerned)
        with self._watching(concerned) as watches:
            async with contextlib.aclosing(self._rows(concerned.tables)) as rows:
                async for table, row, (locks, pending, notified, given_up) in rows:
                    try:
                        waits = [cell for cell in notified if observer_of(cell[0]) in concerned]
                        held = [cell for cell in (*locks, *pending) if (table, cell[0]) in observed]
                        if self._oldest_cause(table, row, waits, held, concerned) <= ts:
                            return None
                    except (Corruption, AwaitsAsyncio) as error:
                        damage = error  # raised if nothing else waits
                    for column, _, value in given_up:
                        if observer_of(column) in concerned and self._root_of_failed(table, row, column, value) <= ts:
                            failed[observer_of(column)] += 1
            if any(watch.oldest <= ts for watch in watches):
                return None
        if damage is not None:
            raise damage
        return {self._name(number): count for number, count in failed.items()}

    async def freshness(self, withouts: Sequence[Iterable[int]]) -> list[Freshness]:
        """For the observers that are concerned with each of several views: how far they have come (V14).

        Only the owner knows all runs in flight, so clients ask it.

        Args:
            withouts: for each view, the numbers of the observers that are not concerned.
        """
        engine, catalogue = self._engine, self._engine.known.catalogue
        # A reader beside the owner knows the newest note of the clock (O3).
        newest = await engine.oracle.draw() if engine.place.readonly else engine.oracle.last
        entered = min((entry.commit_ts for entry in engine.driver.entered.up_to(newest)), default=TS_MAX)  # C4
        views, observed = [all_but(catalogue, without) for without in withouts], self.observed_cells()
        causes: dict[int, int] = {}  # by observer: the oldest root cause
        waiting: Counter[int] = Counter()
        failed: Counter[int] = Counter()
        with contextlib.ExitStack() as stack:
            watches = [stack.enter_context(self._watching(view)) for view in views]
            tables = sorted(set[str]().union(*(view.tables for view in views)))
            async with contextlib.aclosing(self._rows(tables)) as rows:
                async for table, row, (locks, pending, notified, given_up) in rows:
                    held = [cell for cell in (*locks, *pending) if (table, cell[0]) in observed]
                    for number, root in self._causes(table, row, notified, held):
                        causes[number] = min(root, causes.get(number, TS_MAX))
                    waiting.update(observer_of(column) for column, _, _ in notified)
                    for column, _, value in given_up:
                        number, root = observer_of(column), self._root_of_failed(table, row, column, value)
                        causes[number] = min(root, causes.get(number, TS_MAX))
                        failed[number] += 1
            found = []
            for view, watched in zip(views, watches, strict=True):
                roots = [root for number, root in causes.items() if number in view]
                oldest = min([entered, *roots, *(watch.oldest for watch in watched)])
                ts = min(newest, oldest - 1)
                entries = [entry for id, entry in catalogue.observers.items() if id in view.ids]
                if any(not entry.ready or ts < entry.at for entry in entries):
                    ts = 0  # N10: the observer has not run for all data that was there when it was registered
                waits, fails = (sum(each[number] for number in each if number in view) for each in (waiting, failed))
                found.append((ts, waits, fails, oldest))
        return [Freshness(ts, waits, fails, await self._age_s(oldest)) for ts, waits, fails, oldest in found]

    async def _age_s(self, ts: int) -> float:
        """How many seconds ago a timestamp was issued; 0.0 if no note of the clock is at or above it (O3)."""
        wall_ms = await note_from(self._engine.driver.store, ts) if ts < TS_MAX else None
        return 0.0 if wall_ms is None else max(self._engine.oracle.wall_ms() - wall_ms, 0) / 1000

    async def _rows(self, tables: Iterable[str]) -> AsyncGenerator[tuple[str, bytes, list[list[ScanCell]]], None]:
        """(table, row, its locks, pending signals, notify cells and failed changes) of every row that has any."""
        for table in tables:
            start: bytes | None = b""
            while start is not None:
                page = await self._engine.driver.store.scan(ScanRequest(table, start, None, _WAITING))
                for row, found in page.rows:
                    cells = [list(each) for each in found]
                    if any(len(each) == _CELLS_PER_ROW for each in cells):
                        # Read one group after the other, the notify cells after the locks: a lock may become a notify
                        # cell, but a notify cell never becomes a lock. A notify cell may become a failed change, and
                        # a failed change may become a notify cell: so those that were there before count, too (N6).
                        before = cells[-1]
                        cells = [
                            await self.row_cells(table, row, query.group, each)
                            for query, each in zip(_WAITING, cells, strict=True)
                        ]
                        cells[-1] = list(dict.fromkeys([*before, *cells[-1]]))
                    yield table, row, cells
                start = page.next

    def _root_of_failed(self, table: str, row: bytes, column: int, value: bytes) -> int:
        """The root cause of a change on the failed list; 0 if it cannot be read."""
        try:
            return unpack_failed(value).root
        except Corruption as error:
            self._engine.driver.note_damage(self._engine.driver.at(Cellref(table, row, column), error))
            return 0

    def _name(self, number: int) -> str:
        entries = self._engine.known.catalogue.observers.items()
        return next((id for id, entry in entries if entry.number == number), f"#{number}")

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

    def _causes(
        self, table: str, row: bytes, notified: Sequence[ScanCell], locks: Sequence[ScanCell]
    ) -> Iterator[tuple[int, int]]:
        """(observer, root cause) of a row's notify cells, and of those that its locks on observed cells would become;
        0 for a cause that cannot be read."""
        for column, _, value in notified:
            yield observer_of(column), _root(value)
        for column, start_ts, value in locks:
            try:
                lock = self._engine.driver.lock_at(Cellref(table, row, column), start_ts, value)
            except Corruption:  # it may notify any observer of the column
                yield from ((number, 0) for number in self._observing(table, column))
                continue
            for number in lock.observers:
                yield number, lock.root or start_ts

    def _oldest_cause(
        self,
        table: str,
        row: bytes,
        notified: Sequence[ScanCell],
        locks: Sequence[ScanCell],
        concerned: Concerned,
    ) -> int:
        """The smallest root cause in these notify cells of a row, and in those that these locks on observed cells would
        become for the observers concerned.

        Raises: Corruption if a cause cannot be read; Corruption or AwaitsAsyncio if the observer cannot run for a
        change.
        """
        worker, oldest = self._worker(), TS_MAX
        for column, commit_ts, value in notified:
            damage = worker.unrunnable.why(Cellref(table, row, column), commit_ts) if worker is not None else None
            if damage is not None:
                raise damage.again()
            try:
                oldest = min(oldest, unpack_cause(value)[0])
            except Corruption as error:
                raise self._engine.driver.at(Cellref(table, row, column), error) from error
        for column, start_ts, value in locks:
            cell = Cellref(table, row, column)
            stuck = self._stuck().get((cell, start_ts))
            if stuck is not None:
                raise stuck.again()
            lock = self._engine.driver.lock_at(cell, start_ts, value)
            if any(number in concerned for number in lock.observers):
                oldest = min(oldest, lock.root or start_ts)
        return oldest

    async def must_be_readable(self, last: Corruption | AwaitsAsyncio | None) -> None:
        """Raises Corruption or UsageError if all that is left are changes for which this worker cannot run the
        observer, and perhaps a damaged lock, whose error is `last`."""
        worker = self._worker()
        if last is None and (worker is None or not worker.unrunnable):
            return
        async with contextlib.aclosing(self._notified()) as cells:
            async for table, row, column, ts, _ in cells:
                last = worker.unrunnable.why(Cellref(table, row, column), ts) if worker is not None else None
                if last is None:
                    return
        if last is not None:
            raise last.again()

    async def must_be_run(
        self, running: Collection[str], up_to: tuple[int, Iterable[int] | None] | None = None
    ) -> None:
        """Check that some program runs one of the observers for which changes wait.

        Args:
            running: the observers of programs with a worker, as far as the owner knows.
            up_to: the arguments of `none_up_to`: only the changes for which it waits count. Otherwise, all changes
                count, also those for observers that are being dropped (N12).

        Raises: UsageError, SchemaMismatch.
        """
        counts = await self.counts(readable=True, up_to=up_to)
        self.check_run({id for id, count in counts.items() if count}, running)

    def check_run(self, waiting: Collection[str], running: Collection[str]) -> None:
        """Check that some program runs one of these observers. `running`: as for `must_be_run`; the owner may have
        forgotten this process for a moment.

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
        if dropped := [id.removesuffix(_DROPPED) for id in sorted(waiting) if id.endswith(_DROPPED)]:
            raise UsageError(
                f"changes wait for observers that are being dropped: {', '.join(dropped)}. If it was interrupted, "
                "repeat the drop: await db.drop_observer(...), `perco observers --drop` or `perco views drop`."
            )
        raise UsageError(
            f"changes wait for observers that no running program has: {', '.join(sorted(waiting))}. Add them to the "
            "schema, or start a program that has them."
        )

    async def counts(
        self, *, readable: bool = False, up_to: tuple[int, Iterable[int] | None] | None = None
    ) -> dict[str, int]:
        """How many changes wait for each observer, by id, counted in one pass over the notify cells.

        Args:
            readable: leave out changes for which this worker cannot run the observer (see `Worker.damage`).
            up_to: see `must_be_run`.
        """
        self._engine.usable(writing=False)
        await self._keeper.catch_up()
        catalogue = self._engine.known.catalogue
        names = {number: tombstone.id + _DROPPED for number, tombstone in catalogue.dropped.items()}
        names.update({entry.number: id for id, entry in catalogue.observers.items()})
        worker = self._worker()
        counts = dict.fromkeys(self._engine.known.catalogue.observers, 0)
        bound, concerned = (TS_MAX, None) if up_to is None else self._bounds(*up_to)
        async for table, row, column, ts, value in self._notified():
            if concerned is not None and (observer_of(column) not in concerned or _root(value) > bound):
                continue
            if readable and worker is not None and worker.unrunnable.why(Cellref(table, row, column), ts) is not None:
                continue
            id = names.get(observer_of(column), f"#{observer_of(column)}")
            counts[id] = counts.get(id, 0) + 1
        return counts

    async def _notified(self) -> AsyncGenerator[tuple[str, bytes, int, int, bytes], None]:
        """(table, row, acknowledgement column, ts, value) of every notify cell."""
        for table in self.observed_tables():
            async with contextlib.aclosing(self.cells_of(table, NOTIFY)) as cells:
                async for row, (column, ts, value) in cells:
                    yield table, row, column, ts, value

    async def cells_of(self, table: str, group: str) -> AsyncGenerator[tuple[bytes, ScanCell], None]:
        """(row, cell) of every cell of a group of a table, such as NOTIFY."""
        query = ScanQuery(group, None, 0, TS_MAX, _CELLS_PER_ROW)
        start: bytes | None = b""
        while start is not None:
            page = await self._engine.driver.store.scan(ScanRequest(table, start, None, (query,)))
            for row, [cells] in page.rows:
                if len(cells) == _CELLS_PER_ROW:
                    cells = await self.row_cells(table, row, group, cells)
                for cell in cells:
                    yield row, cell
            start = page.next


def _root(cause: bytes) -> int:
    """The root cause in the value of a notify cell; 0 if it cannot be read."""
    try:
        return unpack_cause(cause)[0]
    except Corruption:
        return 0
