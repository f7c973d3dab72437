"""Verifies stored data: does what lies in the tablets obey the protocol?

`examine.py` says what is wrong with the cells of one row. `check` reads a store page by page, asks the rows that others
point at, and collects what they find.

It may run inside the owner or beside it. A row is read from one state of its tablet, but two rows are not, and the
catalogue and the oracle's bound move on. So whatever looks wrong is looked at again, with everything read afresh, and
counts only if it still stands with the same cells.

What is verified, under the invariant's number:

T1  All records of a transaction have one commit timestamp; where a lock still names its primary, the primary has one.
T2  start_ts < commit_ts; a record or lock of a long value has its data.
T3  No record of a transaction whose primary is still locked, or that was rolled back (a marker stands somewhere).
T5  No marker beside a lock or record of the same transaction; no data without lock or record (a warning).
T7  One lock on a cell; no record above it; records of a cell do not overlap.
T8  A committed cell is not locked by the same transaction. T12: all its locks name one primary.
N1  Locks decode. A change of an observed column that no run has seen has its notify cell, else it is lost.
N2  An ack's lock is its transaction's primary and covers nothing newer than itself. N3: acks point at the past.
N9  Notify cells say what caused them. N10: columns and observers are in the catalogue.
O1  Nothing is above the oracle's durable bound. O3: the clock's notes rise together.

A lock whose transaction is decided is no error: phase two is on its way, or its client died and the next to meet it
settles it. It is a note, "unsettled".
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import trio

from perco.errors import Corruption, UsageError
from perco.storage import (
    DATA,
    LOCK,
    NOTIFY,
    ROLLBACK,
    TS_MAX,
    WRITE,
    Query,
    RowStore,
    ScanCell,
    ScanQuery,
    ScanRequest,
)
from perco.txn.catalogue import SYSTEM_TABLE, Catalogue, ObserverEntry, load
from perco.txn.examine import GROUPS, Book, Finding, Image, Rec, examine, lock_of, unnotified
from perco.txn.oracle import durable_bound
from perco.txn.records import (
    PUT_DATA,
    RECORD_HEAD,
    Cellref,
    Lock,
    observer_of,
    unpack_record,
)
from perco.txn.recovery import Aborted, Committed, Judgement, Locked, Nothing, judge, primary_queries

_POOL_MAX: Final = 256  # changes kept for each observer of which it may have been too young to be told


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """Attributes:
    looks: how often something suspicious is looked at again before it is reported.
    pause_s: between two of those looks.
    findings_max: findings and notes that are kept; further ones are counted.
    tracked_max: transactions remembered at a time; of more, an even sample of them is compared (T1, T3).
    row_cells, data_cells: cells of a row and group that are read at once; a row with more is read in parts.
    """

    looks: int = 3
    pause_s: float = 0.01
    findings_max: int = 1000
    tracked_max: int = 1_000_000
    row_cells: int = 4096
    data_cells: int = 32


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check saw.

    Attributes:
        ts: what was committed at or before this timestamp has been covered.
        findings: errors and warnings first; then notes.
        dropped: findings beyond `CheckOptions.findings_max`, not looked at again.
        tables, rows, cells, locks, records, markers, notifications: what was read. Waiting notifications are cells.
        unsettled: locks whose transaction is decided.
        again: rows that were looked at again.
        sampled: every so many'th transaction was compared over all its cells (T1, T3); 1: all of them.
        seconds: how long it took.
    """

    ts: int
    findings: tuple[Finding, ...]
    dropped: int
    tables: int
    rows: int
    cells: int
    locks: int
    records: int
    markers: int
    notifications: int
    unsettled: int
    again: int
    sampled: int
    seconds: float

    @property
    def errors(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings) + self.dropped

    @property
    def warnings(self) -> int:
        return sum(finding.severity == "warning" for finding in self.findings)

    @property
    def clean(self) -> bool:
        """Neither errors nor warnings."""
        return not self.errors and not self.warnings


@dataclass(slots=True)
class Progress:
    """How far a check has come: told after every page. The same object every time."""

    table: str = ""
    tables: int = 0
    rows: int = 0
    cells: int = 0
    locks: int = 0
    records: int = 0
    markers: int = 0
    notifications: int = 0
    unsettled: int = 0
    again: int = 0


# ------------------------------------------------------------------ a whole store


async def check(
    store: RowStore,
    *,
    ts: int = 0,
    options: CheckOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> CheckResult:
    """Verify all that a store holds; reads only.

    Args:
        ts: what a reader may ask for now, to be named in the result: all that was committed at or before it is covered.
        options: see `CheckOptions`.
        progress: called after every page.

    Raises: Corruption if not even the catalogue can be read.
    """
    return await _Check(store, options or CheckOptions(), progress or (lambda _: None)).run(ts)


class _Sample(dict[int, tuple[int, Cellref]]):
    """What is remembered of transactions: all of them, or, beyond a limit, every n'th by start_ts."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.every, self._limit = 1, limit

    def note(self, number: int, other: int, cell: Cellref) -> int:
        """Remember `other` for a number, unless something is; returns what is then."""
        if number % self.every:
            return other
        found = self.setdefault(number, (other, cell))
        if len(self) > self._limit:
            self.every *= 2
            for key in [key for key in self if key % self.every]:
                del self[key]
        return found[0]


@dataclass(slots=True)
class _Pool:
    """Changes that an observer was not told of, maybe because they are older than it; `since`: it surely is older."""

    since: int = TS_MAX
    suspects: list[tuple[int, str, bytes]] = field(default_factory=list)  # a heap: the newest changes

    def suspect(self, ts: int, table: str, row: bytes) -> None:
        push = heapq.heappush if len(self.suspects) < _POOL_MAX else heapq.heappushpop
        push(self.suspects, (ts, table, row))


class _Check:
    """One run over a store."""

    def __init__(self, store: RowStore, options: CheckOptions, progress: Callable[[Progress], None]) -> None:
        self._store, self._options, self._tell = store, options, progress
        self._seen = Progress()
        self._problems: list[Finding] = []
        self._notes: list[Finding] = []
        self._dropped = 0
        self._groups: dict[str, tuple[str, ...]] = {}  # of each table, as they were when the check began
        self._primaries: dict[int, tuple[Cellref, Cellref]] = {}  # start_ts -> its primary, and a lock that says so
        self._rolled_back = _Sample(options.tracked_max)
        self._starts = _Sample(options.tracked_max)
        self._commits = _Sample(options.tracked_max)
        self._pools: dict[int, _Pool] = {}
        self._fates: dict[tuple[int, Cellref], Judgement | None] = {}
        self._book = Book(Catalogue(), 0, frozenset())

    async def run(self, ts: int) -> CheckResult:
        began = trio.current_time()
        await self._refresh()
        for table in self._book.catalogue.tables:
            try:
                self._store.locate(table, b"")
            except UsageError:
                continue  # declared, and not made yet
            self._groups[table] = (DATA, *self._book.catalogue.groups(table))
        await self._system()
        for table in self._groups:
            await self._survey(table)
        for table in self._groups:
            await self._table(table)
        await self._late_losses()
        seen = self._seen
        return CheckResult(
            ts,
            (*sorted(self._problems, key=lambda finding: finding.severity), *self._notes),
            self._dropped,
            seen.tables,
            seen.rows,
            seen.cells,
            seen.locks,
            seen.records,
            seen.markers,
            seen.notifications,
            seen.unsettled,
            seen.again,
            max(self._starts.every, self._commits.every, self._rolled_back.every),
            trio.current_time() - began,
        )

    async def _refresh(self) -> None:
        """The catalogue and the bound as they are now."""
        catalogue = await load(self._store)
        bound = await durable_bound(self._store)
        replayed = self._book.replayed
        if catalogue.version != self._book.catalogue.version:
            replayed = frozenset(
                [entry.number for id, entry in catalogue.observers.items() if await self._was_replayed(id, entry)]
            )
        self._book = Book(catalogue, bound, replayed)

    async def _was_replayed(self, id: str, entry: ObserverEntry) -> bool:
        """Whether an observer was registered to run for what was there before: then it was not ready at first."""
        query: Query = (DATA, 0, entry.since, entry.since, 1)
        [[cells]] = await self._store.read([(SYSTEM_TABLE, b"catalogue", [query])])
        try:
            first = Catalogue.unpack(cells[0][1]).observers.get(id) if cells else None
        except Corruption:
            return False  # reported by `_system`
        return first is not None and not first.ready

    def _report(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            if len(self._problems) < self._options.findings_max:
                self._problems.append(finding)
            else:
                self._dropped += 1

    # ------------------------------------------------------------ reading

    async def _pages(
        self, table: str, queries: tuple[ScanQuery, ...]
    ) -> AsyncIterator[list[tuple[bytes, list[list[ScanCell]]]]]:
        """A table's rows, by the page. Where keys do not decode, a finding, and the rest is not read."""
        start: bytes | None = b""
        while start is not None:
            try:
                page = await self._store.scan(ScanRequest(table, start, None, queries))
            except Corruption as error:
                self._report([Finding("error", "S1", table, f"from {start!r} on it cannot be read: {error}")])
                return
            yield page.rows
            start = page.next

    async def _survey(self, table: str) -> None:
        """Locks name primaries, markers name the dead: known before any record is read (T1, T3)."""
        n = self._options.row_cells
        queries = (ScanQuery(LOCK, None, 0, TS_MAX, n), ScanQuery(ROLLBACK, None, 0, TS_MAX, n))
        async for rows in self._pages(table, queries):
            for row, (locks, markers) in rows:
                for column, start_ts, value in locks:
                    lock = lock_of(value)
                    if lock is not None and len(self._primaries) < self._options.tracked_max:
                        self._primaries.setdefault(start_ts, (lock.primary, Cellref(table, row, column)))
                for column, start_ts, _ in markers:
                    self._rolled_back.note(start_ts, 0, Cellref(table, row, column))

    async def _table(self, table: str) -> None:
        options, seen = self._options, self._seen
        seen.table = table
        limits = [(group, options.row_cells) for group in GROUPS]
        limits += [(group, options.data_cells) for group in self._groups[table]]
        queries = tuple(ScanQuery(group, None, 0, TS_MAX, n) for group, n in limits)
        async for rows in self._pages(table, queries):
            self._fates.clear()  # what is asked from here on is newer than these rows
            for row, found in rows:
                cells = {group: part for (group, _), part in zip(limits, found, strict=True)}
                if any(len(part) >= n for (_, n), part in zip(limits, found, strict=True)):
                    here = {column for part in found for column, _, _ in part}
                    cells = await self._whole(table, row, here)
                await self._row(Image(table, row, cells), cells)
            self._tell(seen)
        seen.tables += 1

    async def _whole(self, table: str, row: bytes, columns: Iterable[int]) -> dict[str, list[ScanCell]]:
        """All cells of a row: the newest of every column from one state of it, older ones by and by."""
        options = self._options
        known = sorted({*columns, *self._book.columns(table)})
        wanted = [(group, column, options.row_cells) for group in GROUPS for column in known]
        wanted += [(group, column, options.data_cells) for group in self._groups[table] for column in known]
        queries: list[Query] = [(group, column, 0, TS_MAX, n) for group, column, n in wanted]
        [found] = await self._store.read([(table, row, queries)])
        out: dict[str, list[ScanCell]] = {group: [] for group in (*GROUPS, *self._groups[table])}
        for (group, column, n), newest in zip(wanted, found, strict=True):
            cells = newest
            while True:
                out[group] += [(column, ts, _needed(group, value)) for ts, value in cells]
                if len(cells) < n or not cells[-1][0]:
                    break
                older: Query = (group, column, 0, cells[-1][0] - 1, n)
                [[cells]] = await self._store.read([(table, row, [older])])
        return out

    # ------------------------------------------------------------ rows

    async def _row(self, image: Image, cells: Mapping[str, list[ScanCell]]) -> None:
        seen = self._seen
        seen.rows += 1
        seen.cells += sum(map(len, cells.values()))
        seen.locks += len(cells[LOCK])
        seen.records += len(cells[WRITE])
        seen.markers += len(cells[ROLLBACK])
        seen.notifications += len(cells[NOTIFY])
        await self._note_unsettled(image)
        self._pool(image)
        suspicions = await self._suspicions(image)
        if not suspicions:
            return
        if len(self._problems) >= self._options.findings_max:
            self._dropped += len(suspicions)
            return
        self._report(await self._standing(image.table, image.row, image.columns(), suspicions))

    async def _standing(
        self, table: str, row: bytes, columns: Iterable[int], suspicions: list[Finding], number: int = 0
    ) -> list[Finding]:
        """Those suspicions that still stand, with the same cells, whenever the row is looked at again."""
        self._seen.again += 1
        for look in range(self._options.looks):
            if look:
                await trio.sleep(self._options.pause_s)
            await self._refresh()
            self._fates.clear()
            image = Image(table, row, await self._whole(table, row, columns))
            still = set(await self._suspicions(image, number))
            suspicions = [finding for finding in suspicions if finding in still]
            if not suspicions:
                break
        return suspicions

    async def _suspicions(self, image: Image, number: int = 0) -> list[Finding]:
        """What looks wrong; `number`: an observer all of whose losses count, not only the sure ones."""
        book, table, row = self._book, image.table, image.row
        found = list(examine(image, book))
        found += [loss.finding for loss in unnotified(image, book) if loss.sure or loss.number == number]
        for column, locks in image.locks.items():
            for start_ts, lock in locks:
                if lock is not None and not book.strange(table, column):
                    found += await self._of_primary(Cellref(table, row, column), start_ts, lock)
        for column, records in image.records.items():
            for record in records:
                found += await self._of_transaction(Cellref(table, row, column), record)
        return found

    # ------------------------------------------------------------ what other rows say

    async def _judge(self, start_ts: int, primary: Cellref) -> Judgement | None:
        """What the primary says of a transaction; None: it says nothing that can be understood."""
        key = (start_ts, primary)
        if key not in self._fates:
            self._fates[key] = await self._ask(start_ts, primary)
        return self._fates[key]

    async def _ask(self, start_ts: int, primary: Cellref) -> Judgement | None:
        if primary.table not in self._groups:
            return None
        [cells] = await self._store.read([(primary.table, primary.row, primary_queries(primary, start_ts))])
        _, markers, records = cells
        try:
            if markers and records and unpack_record(records[0][1]).start_ts == start_ts:
                return None  # T5: reported where it stands
            return judge(start_ts, cells)
        except (Corruption, ValueError):
            return None

    async def _note_unsettled(self, image: Image) -> None:
        for column, locks in image.locks.items():
            for start_ts, lock in locks:
                if lock is None:
                    continue
                fate = await self._judge(start_ts, lock.primary)
                if not isinstance(fate, Committed | Aborted):
                    continue
                self._seen.unsettled += 1
                if len(self._notes) < self._options.findings_max:
                    told = f"committed at {fate.commit_ts}" if isinstance(fate, Committed) else "rolled back"
                    where = self._book.where(image.table, image.row, column)
                    what = f"unsettled: transaction {start_ts} was {told}, and its lock is still there"
                    self._notes.append(Finding("note", "T3", where, what))

    def _error(self, invariant: str, cell: Cellref, what: str) -> list[Finding]:
        return [Finding("error", invariant, self._book.where(*cell), what)]

    async def _of_primary(self, cell: Cellref, start_ts: int, lock: Lock) -> list[Finding]:
        """A lock against the primary that it names (T12)."""
        primary = lock.primary
        if primary.table not in self._book.catalogue.tables:
            what = f"the lock of transaction {start_ts} names a primary in table {primary.table!r}, which is not there"
            return self._error("N1", cell, what)
        fate = await self._judge(start_ts, primary)
        if isinstance(fate, Locked) and fate.lock.primary != primary:
            what = f"the lock of transaction {start_ts} names {self._name(primary)} as primary, which names another"
            return self._error("T12", cell, what)
        return []

    async def _of_transaction(self, cell: Cellref, record: Rec) -> list[Finding]:
        """A record against all else that is known of its transaction (T1, T3)."""
        ts, _, start_ts, _ = record
        known = self._starts.note(start_ts, ts, cell)
        if known != ts:
            return self._error("T1", cell, f"transaction {start_ts} committed at {known} and at {ts}")
        other = self._commits.note(ts, start_ts, cell)
        if other != start_ts:
            return self._error("O1", cell, f"transactions {other} and {start_ts} both committed at {ts}")
        if start_ts in self._primaries and (what := await self._against_primary(cell, record)):
            return self._error("T3", cell, what)
        if start_ts in self._rolled_back:
            marked = self._rolled_back[start_ts][1]
            if marked != cell and await self._stands(ROLLBACK, marked, start_ts):
                what = f"transaction {start_ts} committed at {ts}, and was rolled back: {self._name(marked)}"
                return self._error("T3", cell, what)
        return []

    async def _against_primary(self, cell: Cellref, record: Rec) -> str:
        """Why a record cannot be, by what its transaction's primary says; or ""."""
        start_ts, ts = record.start_ts, record.ts
        primary, said_by = self._primaries[start_ts]
        if primary == cell:
            return ""
        if not await self._stands(LOCK, said_by, start_ts):
            del self._primaries[start_ts]  # settled meanwhile; what the primary said may since be collected
            return ""
        fate = await self._judge(start_ts, primary)
        name = self._name(primary)
        match fate:
            case Locked():
                return f"transaction {start_ts} committed here at {ts}, and its primary {name} is still locked"
            case Aborted():
                return f"transaction {start_ts} committed here at {ts}, and its primary {name} was rolled back"
            case Nothing():
                return f"transaction {start_ts} committed here at {ts}, and its primary {name} has no record"
            case Committed(commit_ts) if commit_ts != ts:
                return f"transaction {start_ts} committed here at {ts}, and its primary {name} at {commit_ts}"
            case _:
                return ""

    async def _stands(self, group: str, cell: Cellref, ts: int) -> bool:
        query: Query = (group, cell.column, ts, ts, 1)
        [[cells]] = await self._store.read([(cell.table, cell.row, [query])])
        return bool(cells)

    def _name(self, cell: Cellref) -> str:
        return self._book.where(*cell)

    # ------------------------------------------------------------ observers and what was there before them (N1)

    def _pool(self, image: Image) -> None:
        """Note what tells since when an observer has been there, and what it was not told of."""
        book = self._book
        for column, records in image.records.items():
            if observer_of(column):
                self._since(observer_of(column), min(record.start_ts for record in records))
        for column, cells in image.notify.items():
            if observer_of(column) not in book.replayed:  # else they may be for what was there before
                self._since(observer_of(column), min(ts for ts, _ in cells))
        for loss in unnotified(image, book):
            if not loss.sure:
                self._pools.setdefault(loss.number, _Pool()).suspect(loss.ts, image.table, image.row)

    def _since(self, number: int, ts: int) -> None:
        pool = self._pools.setdefault(number, _Pool())
        pool.since = min(pool.since, ts)

    async def _late_losses(self) -> None:
        for number, pool in self._pools.items():
            for ts, table, row in sorted(pool.suspects):
                if ts <= pool.since:
                    continue
                image = Image(table, row, await self._whole(table, row, ()))
                losses = [loss.finding for loss in unnotified(image, self._book) if loss.number == number]
                if losses:
                    self._report(await self._standing(table, row, image.columns(), losses, number))

    # ------------------------------------------------------------ the system table

    async def _system(self) -> None:
        """The catalogue's versions, and the clock's notes against the bound (O1, O3)."""
        async for ts, value in self._versions(b"catalogue"):
            try:
                version = Catalogue.unpack(value).version
            except Corruption as error:
                self._report([Finding("error", "N10", "catalogue", f"version {ts}: {error.what}")])
                continue
            if version != ts:
                self._report([Finding("error", "N10", "catalogue", f"version {version} stands at {ts}")])
        newer = (TS_MAX, TS_MAX)
        async for ts, value in self._versions(b"clock"):
            wall_ms = int.from_bytes(value, "big")
            if newer[0] == TS_MAX:
                bound = await durable_bound(self._store)  # read after the note, so above it
                if ts > bound:
                    self._report([Finding("error", "O1", "clock", f"the note at {ts} is above the bound, {bound}")])
            if len(value) != 8:
                self._report([Finding("error", "O3", "clock", f"the note at {ts} is not a wall time")])
                continue
            if wall_ms > newer[1]:
                what = f"the note at {ts} has a later wall time than the one at {newer[0]}"
                self._report([Finding("error", "O3", "clock", what)])
            newer = (ts, wall_ms)

    async def _versions(self, row: bytes) -> AsyncIterator[tuple[int, bytes]]:
        """Every version of a cell of the system table, newest first."""
        high = TS_MAX
        while True:
            query: Query = (DATA, 0, 0, high, self._options.row_cells)
            [[cells]] = await self._store.read([(SYSTEM_TABLE, row, [query])])
            for cell in cells:
                yield cell
            if len(cells) < self._options.row_cells or not cells[-1][0]:
                return
            high = cells[-1][0] - 1


def _needed(group: str, value: bytes) -> bytes:
    """What the check needs of a value: a row read in parts may have a great many."""
    if group in (LOCK, NOTIFY):
        return value
    if group == WRITE:
        return value if value[:1] == bytes([PUT_DATA]) else value[:RECORD_HEAD]
    return b""
