"""The failed list, as users see it: `db.failed`, `db.replay_failed`, `db.drop_failed`.

N3  Drop acknowledges a failed change without a run. The acknowledgement is an ordinary one, made by a transaction that
    began when there was no newer change. If a run is still due, for a newer change or of a higher version of the
    observer, an acknowledgement would suppress it. In that case, drop only takes the change off the list.
N6  A failed change stays on the list until it is replayed or dropped, or until a run for a newer change commits.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import trio

from perco.errors import Corruption, TransientError, Unavailable, UsageError
from perco.notify.failing import names_on
from perco.notify.worker import Worker
from perco.protocol.claim import claim_queries
from perco.protocol.failed import FailedCell, forget, put_back, unpack_failed
from perco.protocol.mutations import Intent
from perco.protocol.records import ACK, Cellref, ack_head, ack_of, column_of, observed_column, observer_of, pack_cause
from perco.protocol.snapshot import Blocked
from perco.schema.entries import ObserverEntry
from perco.schema.lost import unknown_if_lost
from perco.storage import (
    APPLIED,
    FAILED_LIST,
    LOCK,
    TS_MAX,
    Cell,
    Failed,
    Mutation,
    NoReply,
    ScanQuery,
    ScanRequest,
)
from perco.txn import runs
from perco.txn.beginning import begin
from perco.txn.engine import Engine
from perco.txn.keeping import Keeper

_PAGE_ROWS: Final = 128  # rows whose changes are replayed or dropped at once
_CELLS_PER_ROW: Final = 1 << 16
_TRIES: Final = 64
_UNREADABLE: Final = FailedCell(1, 0, b"", 0, "(its record cannot be read: run perco check)", "", 0)


@dataclass(frozen=True, slots=True)
class FailedChange:
    """A change that was given up, after too many failures of its observer.

    Attributes:
        observer, table, column, key: the observer, and the cell that it observed.
        commit_ts: of the change; if several were given up together, of the newest.
        attempts: how many runs failed; 0: the observer was not run, because the chain was too long.
        error: of the last run, in one line; `traceback`: its traceback.
        cause: commit timestamp of the transaction that began the chain, which was not an observer's run (N9).
        chain: ids of the observers whose runs led to the change (only the most recent ones, if there are many); () if
            there were none.
        wall: when it was given up, seconds since 1970.
    """

    observer: str
    table: str
    column: str
    key: Any
    commit_ts: int
    attempts: int
    error: str
    traceback: str
    cause: int
    chain: tuple[str, ...]
    wall: float


class Listed(NamedTuple):
    """A cell of the failed list."""

    ack: Cellref
    ts: int
    cell: FailedCell


class FailedList:
    """Reads the failed list, and takes changes off it. Loop thread only.

    `worker`: returns the worker that runs in this process, if any.
    """

    def __init__(self, engine: Engine, keeper: Keeper, worker: Callable[[], Worker | None]) -> None:
        self._engine, self._keeper, self._worker = engine, keeper, worker

    async def changes(
        self, observer: str | None = None, *, key: Any = None, limit: int | None = 1000
    ) -> list[FailedChange]:
        """See `Database.failed`."""
        self._engine.usable(writing=False)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise UsageError(f"limit is {limit!r}; it is a number of changes, at least 1, or None for all")
        found: list[FailedChange] = []
        async with aclosing(self.listed(observer, key)) as pages:
            async for page in pages:
                found += [self._told(listed) for listed in page]
                if limit is not None and len(found) >= limit:
                    return found[:limit]
        return found

    async def replay(self, observer: str | None = None, *, key: Any = None) -> int:
        """See `Database.replay_failed`."""
        self._engine.usable(writing=True)
        return await self._for_each(observer, key, self.replay_one)

    async def drop(self, observer: str, *, key: Any = None) -> int:
        """See `Database.drop_failed`."""
        self._engine.usable(writing=True)
        if observer is None:
            raise UsageError("drop_failed takes the id of an observer, not None: a dropped change cannot be replayed")
        return await self._for_each(observer, key, self.drop_one)

    # ------------------------------------------------------------ reading

    async def listed(self, observer: str | None, key: Any) -> AsyncGenerator[list[Listed], None]:
        """The failed list, page by page."""
        await self._keeper.catch_up()
        if observer is None:
            if key is not None:
                raise UsageError("key= names a row of an observer's table: name the observer too")
            for table in sorted({entry.table for entry in self._engine.known.catalogue.observers.values()}):
                async with aclosing(self._pages(table, None, b"", None)) as pages:
                    async for page in pages:
                        yield page
            return
        entry = self._engine.known.catalogue.observers.get(observer) if isinstance(observer, str) else None
        if entry is None:
            known = ", ".join(map(repr, self._engine.known.catalogue.observers)) or "none"
            raise UsageError(f"there is no observer {observer!r} in this store; there are: {known}")
        column = self._engine.known.catalogue.tables[entry.table].columns[entry.column]
        ack = ack_of(column_of(column.number), entry.number)
        row = None if key is None else self._engine.known.schema.tables[entry.table].row(key)
        stop = None if row is None else row + b"\x00"
        async with aclosing(self._pages(entry.table, ack, row or b"", stop)) as pages:
            async for page in pages:
                yield page

    async def _pages(
        self, table: str, ack: int | None, start: bytes | None, stop: bytes | None
    ) -> AsyncGenerator[list[Listed], None]:
        query = ScanQuery(FAILED_LIST, None, 0, TS_MAX, _CELLS_PER_ROW)
        while start is not None:
            page = await self._engine.driver.store.scan(ScanRequest(table, start, stop, (query,), rows_max=_PAGE_ROWS))
            found = []
            for row, [cells] in page.rows:
                for column, ts, value in cells:
                    if ack in (None, column):
                        found.append(Listed(Cellref(table, row, column), ts, self._unpacked(table, row, column, value)))
            if found:
                yield found
            start = page.next

    def _unpacked(self, table: str, row: bytes, column: int, value: bytes) -> FailedCell:
        try:
            return unpack_failed(value)
        except Corruption as error:
            self._engine.driver.note_damage(self._engine.driver.at(Cellref(table, row, column), error))
            return _UNREADABLE

    def _entry_of(self, ack: int) -> ObserverEntry | None:
        entries = self._engine.known.catalogue.observers.values()
        return next((entry for entry in entries if entry.number == observer_of(ack)), None)

    def _waits_besides(self, ack: int, ts: int, notified: Sequence[Cell]) -> bool:
        """Whether a higher version of the observer was, or will be, notified of a change on which a lower version
        failed (N10)."""
        entry = self._entry_of(ack)
        to_come = entry is not None and not entry.ready and ts < (entry.at or TS_MAX)
        return to_come or bool(notified and notified[0][0] > ts)

    def _told(self, listed: Listed) -> FailedChange:
        (table, row, column), ts, cell = listed
        number = observer_of(column)
        found = ((id, entry) for id, entry in self._engine.known.catalogue.observers.items() if entry.number == number)
        id = next(found, (f"#{number}", None))[0]
        name = self._engine.known.catalogue.column_name(table, observed_column(column))
        chain = tuple(names_on(self._engine, cell.path))
        wall = cell.wall_ms / 1000
        return FailedChange(
            id,
            self._engine.known.catalogue.title(table),
            name,
            self._engine.known.key_of(table, row),
            ts,
            cell.attempts,
            cell.error,
            cell.traceback,
            cell.root,
            chain,
            wall,
        )

    # ------------------------------------------------------------ changing

    async def _for_each(self, observer: str | None, key: Any, do: Callable[[Listed], Awaitable[bool]]) -> int:
        """Apply `do` to the listed changes, page by page, and to all changes of a page concurrently. Returns how
        often `do` returned True."""
        done = 0
        failures: list[Exception] = []

        async def one(listed: Listed) -> None:
            nonlocal done
            try:
                left = await do(listed)
                done += left
            except Exception as error:  # raised below, so that the nursery does not wrap it in a group
                failures.append(error)

        async with aclosing(self.listed(observer, key)) as pages:
            async for page in pages:
                async with trio.open_nursery() as nursery:
                    for listed in page:
                        nursery.start_soon(one, listed)
                if failures:
                    raise failures[0]
        return done

    async def replay_one(self, listed: Listed) -> bool:
        with self._engine.driver.observing():  # N7
            done = await self._leave(listed, put_back(listed.ack, listed.ts, listed.cell))
            worker = self._worker()
            if done and worker is not None:
                worker.backoff.succeeded(listed.ack)
        return done

    async def _leave(self, listed: Listed, mutation: Mutation) -> bool:
        """Apply the mutation that takes a change off the list. Returns False if the change was no longer there.

        Raises: WriteUnknown, if a reply was lost and the store could not be reached afterwards (T4).
        """
        ack, ts, _ = listed
        where = self._engine.known.catalogue.column_name(ack.table, ack.column)
        with unknown_if_lost(f"{where}: removing a change from the failed list") as lost:
            for _ in range(_TRIES):
                [verdict] = await self._engine.driver.store.apply([mutation])
                if verdict is APPLIED:
                    return True
                if isinstance(verdict, Failed):
                    raise verdict.error
                if isinstance(verdict, NoReply):
                    lost.reason = verdict.reason
                queries = ((FAILED_LIST, ack.column, ts, ts, 1), (LOCK, ack.column, 0, TS_MAX, 1))
                [[there, locks]] = await self._engine.driver.store.read([(ack.table, ack.row, queries)])
                if not there:
                    return isinstance(verdict, NoReply)  # the mutation may have taken effect after all
                if locks:  # a run's: either the run is dead, or it may be about to commit and remove the change
                    await self._engine.driver.clear(ack, Blocked(*locks[0]))
            raise Unavailable(f"{where}: other transactions kept changing its failed change")

    async def drop_one(self, listed: Listed) -> bool:
        for failed in range(_TRIES):
            if failed:
                await trio.sleep(self._engine.retry.delay_s(failed, self._engine.random))
            try:
                dropped = await self._try_to_drop(listed)
            except TransientError:
                continue
            if dropped is not None:
                return dropped
        raise Unavailable("a failed change could not be dropped: other transactions kept writing its row")

    async def _try_to_drop(self, listed: Listed) -> bool | None:
        """Try once. Returns whether the change was dropped; None: a lock was in the way, and has been settled."""
        (table, row, ack), ts, cell = listed
        column, driver = observed_column(ack), self._engine.driver
        txn = await begin(self._engine, None)
        runs.under(txn, self._engine.known.catalogue.binds)
        try:
            await driver.past_cells(((table, row, ack), (table, row, column)), txn.start_ts)  # C4
            [cells] = await driver.store.read([(table, row, claim_queries(column, ack, txn.start_ts))])
            notified, ack_locks, _, locks, writes, failed = cells
            if not failed or failed[0][0] != ts:
                return False
            if ack_locks or locks:
                txn.discard()
                in_the_way = Cellref(table, row, ack if ack_locks else column)
                await driver.clear(in_the_way, Blocked(*(ack_locks or locks)[0]))
                return None
            if not writes or writes[0][0] > ts or self._waits_besides(ack, ts, notified):
                txn.discard()
                return await self._leave(listed, forget(listed.ack, ts))
            covers = tuple([seen for seen, _ in notified])  # older notify cells are removed with the failed change
            entry = self._entry_of(ack)
            head, cause = ack_head(entry.version if entry else 1), pack_cause(cell.root, cell.depth, cell.path)
            runs.acknowledge(txn, Intent(table, row, ack, ACK, head + cause, (), (*covers, -ts)))
            await txn.commit()
            return True
        finally:
            txn.discard()
