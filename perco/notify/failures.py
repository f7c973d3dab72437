"""The failed list, as users see it: `db.failed`, `db.replay_failed`, `db.drop_failed`.

N3  To drop a failed change is to acknowledge it without a run: an ordinary ack, by a transaction that began when there
    was no newer change. If there is one, or a higher version of the observer is to run for what is there, that waits
    for a run of its own, which an ack would take from it: then the failed one only leaves the list.
N6  A failed change stays on the list until it is replayed, dropped, or a newer change's run has committed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import trio

from perco.errors import Corruption, TransientError, Unavailable, UsageError
from perco.naming import told_as
from perco.notify.claim import claim_queries
from perco.notify.failing import names_on
from perco.notify.worker import Worker
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
from perco.txn.catalogue import ObserverEntry, unknown_if_lost
from perco.txn.client import Client, Options
from perco.txn.failed import FailedCell, forget, put_back, unpack_failed
from perco.txn.local import LocalStore
from perco.txn.mutations import Intent
from perco.txn.records import ACK, Cellref, ack_head, ack_of, column_of, observed_column, observer_of, pack_cause
from perco.txn.schema import Schema
from perco.txn.snapshot import Blocked

_PAGE_ROWS: Final = 128  # that are replayed or dropped at once
_CELLS_PER_ROW: Final = 1 << 16
_TRIES: Final = 64
_UNREADABLE: Final = FailedCell(1, 0, b"", 0, "(what is stored of it cannot be read: run perco check)", "", 0)


@dataclass(frozen=True, slots=True)
class FailedChange:
    """A change that was given up, after too many failures of its observer.

    Attributes:
        observer, table, column, key: whose, and of what.
        commit_ts: of the change, the newest if several are given up.
        attempts: runs that failed; 0: none was made, for the chain was too long.
        error: the last one's, in a line; `traceback`: its traceback.
        cause: commit timestamp of the transaction from outside that began the chain (N9).
        chain: ids of the observers, the last of them, through which it came about; () if from outside.
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


@told_as("Database")
class Failures(Client):
    """A client that knows the failed list."""

    def __init__(self, local: LocalStore, schema: Schema, options: Options) -> None:
        super().__init__(local, schema, options)
        self._worker: Worker | None = None

    async def failed_count(self) -> int:
        """How many changes are on the failed list.

        Raises: Unavailable, in a client.
        """
        self.usable(writing=False)
        await trio.lowlevel.checkpoint()
        return self.failed_now()

    def failed_now(self) -> int:
        """`failed_count` of this process's tablets."""
        return sum(tablet.entries(FAILED_LIST) for tablet in self.local.store.tablets())

    async def failed(
        self, observer: str | None = None, *, key: Any = None, limit: int | None = 1000
    ) -> list[FailedChange]:
        """Changes that were given up, by table and key.

        Args:
            observer: only its changes; `key`: only that of this row.
            limit: at most so many; None: all.

        Raises: UsageError for an observer that the store does not have.
        """
        self.usable(writing=False)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise UsageError(f"limit is {limit!r}; it is a number of changes, at least 1, or None for all")
        found: list[FailedChange] = []
        async with aclosing(self.listed(observer, key)) as pages:
            async for page in pages:
                found += [self._told(listed) for listed in page]
                if limit is not None and len(found) >= limit:
                    return found[:limit]
        return found

    async def replay_failed(self, observer: str | None = None, *, key: Any = None) -> int:
        """Let changes that were given up wait for their observers again; returns how many.

        Args:
            observer, key: as for `failed`; all by default.

        Raises: UsageError for an observer that the store does not have; ReadOnly; StoreFull.
        """
        self.usable(writing=True)
        return await self._for_each(observer, key, self._replay)

    async def drop_failed(self, observer: str, *, key: Any = None) -> int:
        """Take changes that were given up for acknowledged: their observer never runs for them. Returns how many.

        Args:
            observer: whose; `key`: only that of this row.

        Raises: UsageError for an observer that the store does not have; ReadOnly; StoreFull; CommitUnknown.
        """
        self.usable(writing=True)
        if observer is None:
            raise UsageError("drop_failed takes the id of an observer: what is dropped is never run")
        return await self._for_each(observer, key, self._drop)

    # ------------------------------------------------------------ reading

    async def listed(self, observer: str | None, key: Any) -> AsyncGenerator[list[Listed], None]:
        """The failed list, page by page."""
        await self._catch_up()
        if observer is None:
            if key is not None:
                raise UsageError("key= is of an observer's row: name the observer too")
            for table in sorted({entry.table for entry in self.catalogue.observers.values()}):
                async with aclosing(self._pages(table, None, b"", None)) as pages:
                    async for page in pages:
                        yield page
            return
        entry = self.catalogue.observers.get(observer) if isinstance(observer, str) else None
        if entry is None:
            known = ", ".join(map(repr, self.catalogue.observers)) or "none"
            raise UsageError(f"there is no observer {observer!r} in this store; there are: {known}")
        ack = ack_of(column_of(self.catalogue.tables[entry.table].columns[entry.column].number), entry.number)
        row = None if key is None else self.schema.tables[entry.table].row(key)
        stop = None if row is None else row + b"\x00"
        async with aclosing(self._pages(entry.table, ack, row or b"", stop)) as pages:
            async for page in pages:
                yield page

    async def _pages(
        self, table: str, ack: int | None, start: bytes | None, stop: bytes | None
    ) -> AsyncGenerator[list[Listed], None]:
        query = ScanQuery(FAILED_LIST, None, 0, TS_MAX, _CELLS_PER_ROW)
        while start is not None:
            page = await self.driver.store.scan(ScanRequest(table, start, stop, (query,), rows_max=_PAGE_ROWS))
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
            self.driver.note_damage(self.driver.at(Cellref(table, row, column), error))
            return _UNREADABLE

    def _entry_of(self, ack: int) -> ObserverEntry | None:
        entries = self.catalogue.observers.values()
        return next((entry for entry in entries if entry.number == observer_of(ack)), None)

    def _waits_besides(self, ack: int, ts: int, notified: Sequence[Cell]) -> bool:
        """Whether a higher version is told, or is still to be, of what a lower one has failed for (N10)."""
        entry = self._entry_of(ack)
        to_come = entry is not None and not entry.ready and ts < (entry.at or TS_MAX)
        return to_come or bool(notified and notified[0][0] > ts)

    def _told(self, listed: Listed) -> FailedChange:
        (table, row, column), ts, cell = listed
        number = observer_of(column)
        found = ((id, entry) for id, entry in self.catalogue.observers.items() if entry.number == number)
        id = next(found, (f"#{number}", None))[0]
        name = self.catalogue.column_name(table, observed_column(column))
        chain = tuple(names_on(self, cell.path))
        wall = cell.wall_ms / 1000
        return FailedChange(
            id,
            table,
            name,
            self._key(table, row),
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
        """Apply `do` to the listed changes, page by page, all of a page at once; returns for how many it succeeded."""
        done = 0
        failures: list[Exception] = []

        async def one(listed: Listed) -> None:
            nonlocal done
            try:
                left = await do(listed)
                done += left
            except Exception as error:  # raised below, without the group of the nursery
                failures.append(error)

        async with aclosing(self.listed(observer, key)) as pages:
            async for page in pages:
                async with trio.open_nursery() as nursery:
                    for listed in page:
                        nursery.start_soon(one, listed)
                if failures:
                    raise failures[0]
        return done

    async def _replay(self, listed: Listed) -> bool:
        with self.driver.observing():  # N7
            done = await self._leave(listed, put_back(listed.ack, listed.ts, listed.cell))
            if done and self._worker is not None:
                self._worker.backoff.succeeded(listed.ack)
        return done

    async def _leave(self, listed: Listed, mutation: Mutation) -> bool:
        """Make the mutation that takes a change from the list. Returns False if somebody else has done so.

        Raises: WriteUnknown, if a reply was lost and the store could not be reached afterwards (T4).
        """
        ack, ts, _ = listed
        where = self.catalogue.column_name(ack.table, ack.column)
        with unknown_if_lost(f"{where}: a change was to leave the failed list") as lost:
            for _ in range(_TRIES):
                [verdict] = await self.driver.store.apply([mutation])
                if verdict is APPLIED:
                    return True
                if isinstance(verdict, Failed):
                    raise verdict.error
                if isinstance(verdict, NoReply):
                    lost.reason = verdict.reason
                queries = ((FAILED_LIST, ack.column, ts, ts, 1), (LOCK, ack.column, 0, TS_MAX, 1))
                [[there, locks]] = await self.driver.store.read([(ack.table, ack.row, queries)])
                if not there:
                    return isinstance(verdict, NoReply)  # it may have arrived after all
                if locks:  # a run is about to commit, and may take it along; or it is dead
                    await self.driver.clear(ack, Blocked(*locks[0]))
            raise Unavailable(f"{where}: others kept changing its failed change")

    async def _drop(self, listed: Listed) -> bool:
        for failed in range(_TRIES):
            if failed:
                await trio.sleep(self.config.retry.delay_s(failed, self.random))
            try:
                dropped = await self._try_to_drop(listed)
            except TransientError:
                continue
            if dropped is not None:
                return dropped
        raise Unavailable("a failed change could not be dropped: others kept writing its row")

    async def _try_to_drop(self, listed: Listed) -> bool | None:
        """Returns None: what was in the way has been settled."""
        (table, row, ack), ts, cell = listed
        column, driver = observed_column(ack), self.driver
        txn = await self.begin()
        txn._version = self.catalogue.binds  # N10
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
            covers = tuple([seen for seen, _ in notified])  # what is older than the failed change goes with it
            entry = self._entry_of(ack)
            head, cause = ack_head(entry.version if entry else 1), pack_cause(cell.root, cell.depth, cell.path)
            txn._ack = Intent(table, row, ack, ACK, head + cause, (), (*covers, -ts))
            await txn.commit()
            return True
        finally:
            txn.discard()
