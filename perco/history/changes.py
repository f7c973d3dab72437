"""The changes of tables, transaction by transaction, in the order of their commit timestamps.

    frontier:  draw R, settle all that may commit at or below R, then read the logs up to R
    merge:     `protocol/changes.py` puts the logs of all tablets together

E1  A tablet's log has an entry for each write record of its tables' columns, from the same mutation as the record
    (`storage/row.py`).
E2  The *frontier* R is drawn. After that, every one-step commit at or below R that is entered in memory ends (C4), and
    every lock with start_ts below R is settled. Only then are the logs read. So no entry at or below R can appear
    later: a lock that is placed after the draw gets its commit_ts above R (T2).
E3  A reader gets every transaction up to the frontier once, whole, and in order.
E4  After the logs have been read, the table's cut is read. The cut is raised before anything is removed (G2). So if the
    cut is not above the timestamp up to which the reader has everything, no entry and no older value was missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import trio

from perco.blocks import AsyncOnly
from perco.clock.lost import SKIPPED, lost_at
from perco.errors import (
    Corruption,
    HistoryGone,
    ReadOnly,
    SessionEnded,
    TabletSplit,
    TimelineLost,
    Unavailable,
    UsageError,
)
from perco.protocol.changes import Long, Merge, Source, Taken, value_of
from perco.protocol.records import PUT_DATA, Cellref, column_of
from perco.protocol.snapshot import Blocked
from perco.schema.catalogue import SYSTEM_TABLE
from perco.schema.codecs import decoded, decoded_key
from perco.schema.schema import Column, Table, must_be_table
from perco.storage import LOCK, TS_MAX, WRITE, ReadRequest, ScanPage, ScanQuery, ScanRequest
from perco.storage.cells import is_logged
from perco.txn.beginning import begin_snapshot
from perco.txn.engine import Engine

_POLL_S, _POLL_MAX_S = 0.01, 0.1  # between two looks at the logs, while nothing is written
_FRONTIER_S: Final = 1.0  # the frontier advances at least this often, even if nothing is written
_BYTES_PER_READ: Final = 4 << 20
_LOCKS: Final = 1 << 16
_ROUNDS_MAX: Final = 16  # passes over the locks, before a step is given up
_LONG: Final = bytes([PUT_DATA])
_Values = dict[tuple[str, bytes, int, Long], bytes | None]  # long values, by their cells
_LONG_AT_ONCE: Final = 64  # long values of transactions that are read together, unless a single one has more


class RowChange(NamedTuple):
    """What a transaction changed in one row.

    Attributes:
        table: the table's name; `key`: the row's key.
        before, after: by the name of each column that the transaction wrote, the value before the transaction and after
            it; None: no value.
    """

    table: str
    key: Any
    before: dict[str, Any]
    after: dict[str, Any]


class Changes(NamedTuple):
    """What one transaction changed in the tables that are followed.

    Attributes:
        commit_ts: the transaction's commit timestamp. To go on after this transaction, pass it as `since`.
        rows: in the order of the tables as they were given, then of the keys.
    """

    commit_ts: int
    rows: tuple[RowChange, ...]


class ChangeStream(AsyncOnly):
    """An asynchronous iterator over `Changes`. A loop may leave it at any point: there is nothing to close."""

    _entries = 512  # of a log, in a page
    _versions = 2  # of a cell that come with its entry
    _write = "async for changes in db.changes(...):"

    def __init__(
        self, engine: Engine, tables: Sequence[Table[Any] | str], since: int | datetime | None, follow: bool
    ) -> None:
        engine.usable(writing=False)
        self._engine, self._follow = engine, follow
        self._tables = [_logged(engine, table) for table in tables]
        if not self._tables:
            raise UsageError("db.changes takes the tables to follow, such as db.changes(docs)")
        self._since = _must_be_since(since)
        if engine.place.readonly:
            raise ReadOnly(
                "this store was opened with readonly=True beside its owner, and then it is not known which commits are "
                "complete: to read its changes, open it without that option"
            )
        self._began = False
        self._frontier = self._since if isinstance(self._since, int) else 0
        self._merge: Merge | None = None
        self._ready: deque[Changes] = deque()
        self._reached = self._frontier  # the frontier, once all that is ready has been taken
        self._stepped_at = 0.0
        self._ended = False
        self._turn = trio.Lock()  # E3: also if several tasks take from the stream, each transaction comes once

    @property
    def frontier(self) -> int:
        """Every transaction that committed at or below this timestamp has been returned, and none above it. To resume,
        pass it as `since`, in this program or in a later one."""
        return self._frontier

    def __aiter__(self) -> ChangeStream:
        return self

    async def __anext__(self) -> Changes:
        while True:
            changes = self.take()
            if changes is not None:
                return changes
            if self.ended:
                raise StopAsyncIteration
            await self.fetch()

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be fetched; never, with `follow`."""
        return self._ended

    def take(self) -> Changes | None:
        """The next transaction that has been fetched; None: fetch more."""
        if not self._ready:
            return None
        changes = self._ready.popleft()
        self._frontier = changes.commit_ts if self._ready else self._reached
        return changes

    # ------------------------------------------------------------ reading

    async def fetch(self) -> None:
        """Fetch some transactions, if there are any; with `follow`, first wait for a while if there are none."""
        async with self._turn:
            self._engine.usable(writing=False)
            if not self._ready and not self._ended:
                await self._fetch_some()

    async def _fetch_some(self) -> None:
        if not self._began:
            await self._begin()
        if self._merge is None and self._stepped_at:
            await self._wait()
        try:
            await self._fetch()
        except (SessionEnded, TabletSplit):  # R5, P4: the next call begins with a new frontier
            self._merge = None
        except BaseException:  # transactions taken from the logs have not been returned
            self._merge = None
            raise

    async def _begin(self) -> None:
        """Find out where to begin."""
        oracle, since = self._engine.oracle, self._since
        if since is None:
            snap = await begin_snapshot(self._engine)
            snap.end()
            since = snap.start_ts
        elif isinstance(since, datetime):
            since, _ = await oracle.at(since.timestamp())
        elif since > oracle.last and since > await oracle.newest():
            raise UsageError(f"there are no changes since {since}: timestamps so far are 1 to {oracle.last}")
        if oracle.last > SKIPPED:  # else the store has never been restored
            lost = await lost_at(self._engine.driver.store, SYSTEM_TABLE, since)
            if lost is not None:
                raise TimelineLost(since, lost.after, lost.before)
        self._frontier = self._reached = since
        self._began = True

    async def _fetch(self) -> None:
        merge = self._merge
        if merge is None:
            merge = await self._step()
        for source in merge.hungry():
            await self._fill(merge, source)
        taken: list[Taken] = []
        long = 0
        while long < _LONG_AT_ONCE and (found := merge.take()) is not None:
            taken.append(found)
            for _, entry in found.entries:
                long += (entry.record[:1] == _LONG) + (entry.before[:1] == _LONG)
        taken = await self._completed(taken)
        values = await self._long_values(taken)
        await self._must_be_kept()
        self._merge = None if merge.over else merge
        self._make(taken, values)
        if merge.over:
            self._reached, self._stepped_at = merge.frontier, trio.current_time() or 1e-9
            self._ended = not self._follow
        if not self._ready:
            self._frontier = self._reached

    async def _must_be_kept(self) -> None:
        """E4: check that nothing above what has been returned was removed before it was read."""
        for table in self._tables:
            cut = await self._engine.oracle.cut(table.name)
            if cut > self._frontier:
                raise HistoryGone(self._frontier, cut, table.name)

    async def _step(self) -> Merge:
        """E2: draw a frontier, settle what may commit at or below it, and return where to read the logs."""
        engine, after = self._engine, self._frontier
        snap = await begin_snapshot(engine)
        try:
            frontier = snap.start_ts
            await engine.driver.visible(frontier)
            for table in self._tables:
                await self._settle(table.name, frontier)
        finally:
            snap.end()
        sources = []
        for number, table in enumerate(self._tables):
            starts = engine.driver.reads.bounds(table.name)
            sources += [Source(number, low, high) for low, high in zip(starts, [*starts[1:], None], strict=True)]
        return Merge(sources, after, frontier)

    async def _settle(self, table: str, frontier: int) -> None:
        """E2: settle locks with start_ts below the frontier, until a pass finds none. A single pass is not enough: the
        mutation that settles a lock may be lost (S4). Raises: Unavailable."""
        for _ in range(_ROUNDS_MAX):
            if not await self._locks_found(table, frontier):
                return
        raise Unavailable(
            f"there are locks in table {table!r} that cannot be settled, so its changes cannot be read now"
        )

    async def _locks_found(self, table: str, frontier: int) -> int:
        driver = self._engine.driver
        query = ScanQuery(LOCK, None, 0, TS_MAX, _LOCKS)
        start: bytes | None = b""
        found = 0
        while start is not None:
            page = await driver.reads.scan(ScanRequest(table, start, None, (query,)))
            for row, [locks] in page.rows:
                for column, start_ts, packed in locks:
                    if start_ts < frontier and is_logged(column):
                        found += 1
                        await driver.clear(Cellref(table, row, column), Blocked(start_ts, packed))
            start = page.next
        return found

    async def _fill(self, merge: Merge, source: Source) -> None:
        """Read a page of a source's log."""
        request = self._request(source, self._frontier, merge.frontier, self._versions, self._entries)
        page = await self._engine.driver.reads.scan(request)
        if page.next is not None and (source.high is None or page.next < source.high):
            merge.sources.append(source.divide(page.next))  # its tablet has been split meanwhile
        full = len(page.rows) >= request.rows_max or _size(page) >= request.bytes_max
        source.fill(page.rows, full=full)

    def _request(self, source: Source, after: int, upto: int, n: int, entries: int) -> ScanRequest:
        query = ScanQuery(WRITE, None, after + 1, upto, n)
        table = self._tables[source.table].name
        return ScanRequest(table, source.low, source.high, (query,), False, entries, log=source.position)

    async def _completed(self, taken: list[Taken]) -> list[Taken]:
        """The transactions, with the entries that make their rows."""
        return taken

    async def _long_values(self, taken: Sequence[Taken]) -> _Values:
        """The values that are not in their records; None for one that is missing."""
        wanted: dict[tuple[str, bytes, int, Long], None] = {}
        for transaction in taken:
            for table, entry in transaction.entries:
                for record in (entry.record, entry.before):
                    if record[:1] == _LONG and isinstance(value := value_of(record), Long):
                        wanted[self._tables[table].name, entry.row, entry.column, value] = None
        keys = list(wanted)
        found: _Values = {}
        while len(found) < len(keys):
            requests: list[ReadRequest] = [
                (table, row, ((long.group, column, long.start_ts, long.start_ts, 1),))
                for table, row, column, long in keys[len(found) :]
            ]
            for key, [cells] in zip(
                keys[len(found) :],
                await self._engine.driver.reads.read_first(requests, _BYTES_PER_READ),
                strict=False,
            ):
                found[key] = cells[0][1] if cells else None
        return found

    # ------------------------------------------------------------ values

    def _columns(self, table: Table[Any]) -> dict[int, Column[Any, Any]]:
        """The declared columns of a table, by the numbers that the store's cells use."""
        known = self._engine.known
        for column in table.columns.values():
            known.must_be_column(column)  # N17: it may have been dropped
        columns = known.catalogue.tables[table.name].columns
        return {column_of(columns[name].number): column for name, column in table.columns.items()}

    def _make(self, taken: Sequence[Taken], values: _Values) -> None:
        """Decode transactions, and make them ready."""
        tables = [(table, table.title, self._columns(table)) for table in self._tables]
        ready = self._ready
        for commit_ts, entries in taken:
            rows: list[RowChange] = []
            last = -1, b""
            for number, (_, at, cell, record, before) in entries:
                table, title, columns = tables[number]
                column = columns.get(cell)
                if column is None:
                    continue  # a column of perco's own, or one that this program does not declare
                if not record:
                    what = f"the log has an entry at {commit_ts}, and there is no write record"
                    raise self._engine.driver.at(Cellref(table.name, at, cell), Corruption("", what))
                if last != (number, at):
                    last = number, at
                    key = decoded_key(table.key, at, table.name)
                    old: dict[str, Any] = {}
                    new: dict[str, Any] = {}
                    rows.append(RowChange(title, key, old, new))
                name = column.name
                old[name] = self._value(before, column, key, at, cell, values) if before else None
                new[name] = self._value(record, column, key, at, cell, values)
            if rows:
                ready.append(Changes(commit_ts, tuple(rows)))
            self._reached = commit_ts  # E3: also if the next one cannot be read

    def _value(self, record: bytes, column: Column[Any, Any], key: Any, row: bytes, cell: int, values: _Values) -> Any:
        value = value_of(record)
        if value.__class__ is bytes:  # the hot path
            return decoded(column.codec, value, column, key)
        if not isinstance(value, Long):
            return None
        found = values[column.table.name, row, cell, value]
        if found is None:
            error = Corruption("", f"the value written at {value.start_ts} is missing")
            raise self._engine.driver.at(Cellref(column.table.name, row, cell), error)
        return decoded(column.codec, found, column, key)

    # ------------------------------------------------------------ waiting

    async def _wait(self) -> None:
        """Wait until a log has an entry above the frontier, or until the frontier should advance without one."""
        until, pause_s = self._stepped_at + _FRONTIER_S, _POLL_S
        while trio.current_time() < until:
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)
            try:
                if await self._any_news():
                    return
            except (SessionEnded, TabletSplit):
                return

    async def _any_news(self) -> bool:
        reads = self._engine.driver.reads
        for number, table in enumerate(self._tables):
            starts = reads.bounds(table.name)
            for low, high in zip(starts, [*starts[1:], None], strict=True):
                page = await reads.scan(self._request(Source(number, low, high), self._frontier, TS_MAX, 0, 1))
                if page.rows:
                    return True
        return False


def _size(page: ScanPage) -> int:
    return sum(len(value) for _, [cells] in page.rows for _, _, value in cells)


def _logged(engine: Engine, table: Table[Any] | str) -> Table[Any]:
    """A table that keeps a log. Raises: UsageError."""
    known = engine.known.schema.tables[table] if isinstance(table, str) else must_be_table(table)
    entry = engine.known.catalogue.tables.get(known.name)
    if entry is None:
        raise UsageError(f"{known!r} is not in the schema that this store was opened with")
    if not entry.changes:
        raise UsageError(
            f"table {known.name!r} keeps no log of its changes; it must be declared with changes=True when it is made"
        )
    return known


def _must_be_since(since: object) -> int | datetime | None:
    if isinstance(since, datetime) and since.tzinfo is None:
        raise UsageError("since= needs an aware datetime: datetime.now(timezone.utc), or .astimezone()")
    if since is None or isinstance(since, datetime):
        return since
    if isinstance(since, bool) or not isinstance(since, int) or since < 0:
        raise UsageError(f"since= takes a timestamp, an int as in txn.commit_ts, or a datetime, not {since!r}")
    return since
