"""Verifies that stored data obey the protocol.

`examine.py` checks the cells of one row, `across.py` compares rows. `check` reads a store page by page, and collects
their findings.

A check may run in the owner, in a reader beside the owner, or in a client. A row is read as of one state of its tablet,
but two rows may be read as of different states, and the catalogue and the oracle's bound change meanwhile. So every
finding is checked again, with everything read again, and counts only if it still holds for the same cells.

The check verifies, for each invariant:

T1  All records of a transaction have one commit timestamp; if a lock still names the primary, the primary has a record
    at that timestamp, too.
T2  start_ts < commit_ts; a record or lock of a long value has its data.
T3  There is no record of a transaction whose primary is still locked, or that was rolled back (some cell has its
    marker).
T5  There is no marker beside a lock or record of the same transaction, and no data without a lock or record (a
    warning).
T7  A cell has at most one lock, and no record at or above it; the transactions of its records do not overlap.
T8  A committed cell is not locked by the same transaction. T12: all locks of a transaction name one primary.
T14 A shared lock is of kind READ, and its cell has no exclusive lock and no record at or above the shared lock; a trace
    overlaps no write.
N1  Locks decode. A change of an observed column that no run has seen has a notify cell (otherwise the notification is
    lost); a notify cell has its change (a warning).
N2  An acknowledgement's lock names an acknowledgement of its observer as primary, and covers nothing newer than itself.
    N3: acknowledgements point at the past.
N5  A pending entry decodes, belongs to a signal or to a run for a signal, and names only observers of that signal. A
    signal's column has no records, locks or data; the column of its observer has records, which may overlap.
N6  Failed changes decode. There is at most one for a row and observer, and it is neither waiting nor acknowledged.
N9  Notify cells name their cause. N10: columns, observers and locality groups are in the catalogue.
E1  Each entry of a log of changes has its write record, and each record above the table's cut has its entry.
O1  Nothing is above the oracle's durable bound. O3: the wall times of the clock's notes rise with their timestamps.
G1  The watermark decodes, and no table's cut is above it. G3, G4: cells that no reader needs any more count as waste.

A lock that a dead client has left behind is not an error, because the next transaction that finds it settles it. It is
reported as a note: "unsettled" if its transaction is decided (T3: phase two is on its way, or the client died),
"orphan" if the transaction is undecided and its client is gone (L1).
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

import trio

from perco.check.across import Across
from perco.check.examine import Finding, examine, unnotified
from perco.check.image import GROUPS, Book, Image, Rec, lock_of
from perco.check.logs import Logs
from perco.check.system import Groups, groups_of, of_system, strange_groups
from perco.clock.oracle import durable_bound, published
from perco.errors import Corruption, TooLarge, UsageError
from perco.protocol.records import ACK, BARE, PUT_DATA, READ, RECORD_HEAD, SIGNAL, Cellref, Lock, ack_of, observer_of
from perco.protocol.recovery import Aborted, Committed, Locked, Nothing
from perco.protocol.retention import waste_of
from perco.schema.catalogue import Catalogue, load
from perco.settings import check_options
from perco.storage import (
    DATA,
    FAILED_LIST,
    LOCK,
    NOTIFY,
    PENDING,
    ROLLBACK,
    SHARED,
    TRACE,
    TS_MAX,
    WRITE,
    Cell,
    Query,
    RowStore,
    ScanCell,
    ScanQuery,
    ScanRequest,
)

_LOCKS: Final = (LOCK, SHARED, PENDING)
_TOLD: Final = (bytes([PUT_DATA]), bytes([ACK]))  # kinds of records whose body is examined
_POOL_MAX: Final = 256  # for each observer, how many changes are kept that may be older than the observer


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """Attributes:
    looks: how often a suspicious place is checked again before it is reported.
    pause_s: seconds between two of those checks.
    findings_max: findings and notes that are kept; further ones are only counted.
    tracked_max: transactions remembered at a time; if there are more, an even sample is compared (T1, T3).
    row_cells, data_cells: cells of a row and group that are read at once; a row with more is read in parts.
    """

    looks: int = 3
    pause_s: float = 0.01
    findings_max: int = 1000
    tracked_max: int = 1_000_000
    row_cells: int = 4096
    data_cells: int = 32

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(slots=True)
class Counts:
    """Counts of the data that a check has read.

    Attributes:
        tables, rows, cells, locks, records, markers, notifications: how many; `notifications` are notify cells.
        failed: changes on the failed list.
        unsettled: locks whose transaction is decided.
        orphans: locks whose transaction is undecided, and whose client is gone.
        waste: cells below the watermark that no reader can see any more: a vacuum is running, or was interrupted.
        again: rows that were checked again.
    """

    tables: int = 0
    rows: int = 0
    cells: int = 0
    locks: int = 0
    records: int = 0
    markers: int = 0
    notifications: int = 0
    failed: int = 0
    unsettled: int = 0
    orphans: int = 0
    waste: int = 0
    again: int = 0


@dataclass(slots=True, kw_only=True)
class CheckResult(Counts):
    """The result of a check.

    Attributes:
        ts: the check covers all commits at or before this timestamp.
        findings: errors and warnings first; then notes.
        dropped: findings beyond `CheckOptions.findings_max`, which were not checked again.
        sampled: n, if one transaction in n was compared over all its cells (T1, T3); 1: all of them.
        seconds: how long it took.
    """

    ts: int
    findings: tuple[Finding, ...]
    dropped: int = 0
    sampled: int = 1
    seconds: float = 0.0

    @property
    def errors(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings) + self.dropped

    @property
    def warnings(self) -> int:
        return sum(finding.severity == "warning" for finding in self.findings)

    @property
    def clean(self) -> bool:
        """Whether there are neither errors nor warnings."""
        return not self.errors and not self.warnings


@dataclass(slots=True)
class Progress(Counts):
    """The progress of a check, and the table that it has reached; reported after every page, as the same object each
    time."""

    table: str = ""


# ------------------------------------------------------------------ a whole store


async def check(
    store: RowStore,
    *,
    ts: int = 0,
    alive: Callable[[int], bool] = lambda start_ts: True,
    options: CheckOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
    told: Collection[tuple[str, bytes]] = (),
    groups: Callable[[], Awaitable[list[Groups]]] | None = None,
) -> CheckResult:
    """Verify all data of a store; reads only.

    Args:
        ts: a timestamp that can be read now. The result repeats it: the check covers all commits at or before it.
        alive: whether the client of the transaction that began at a timestamp may still be there (L1).
        options: see `CheckOptions`.
        progress: called after every page.
        told: the tables and first rows of tablets that are known to be unreadable.
        groups: returns the locality groups of each tablet; for a store whose tablets are in another process. Long
            values are not fetched from that process, because the check only needs to know that they exist.

    Raises: Corruption if not even the catalogue can be read; Unavailable, SessionEnded if tablets are elsewhere.
    """
    return await _Check(store, alive, options or CheckOptions(), progress or (lambda _: None), told, groups).run(ts)


@dataclass(slots=True)
class _Pool:
    """Changes that an observer was not notified of, and that may be older than the observer; `since`: a timestamp at
    which the observer certainly existed."""

    since: int = TS_MAX
    suspects: list[tuple[int, str, bytes]] = field(default_factory=list)  # a heap: the newest changes

    def suspect(self, ts: int, table: str, row: bytes) -> None:
        push = heapq.heappush if len(self.suspects) < _POOL_MAX else heapq.heappushpop
        push(self.suspects, (ts, table, row))


class _Check:
    """One run over a store."""

    def __init__(
        self,
        store: RowStore,
        alive: Callable[[int], bool],
        options: CheckOptions,
        progress: Callable[[Progress], None],
        told: Collection[tuple[str, bytes]],
        groups: Callable[[], Awaitable[list[Groups]]] | None,
    ) -> None:
        self._store, self._alive, self._options, self._tell = store, alive, options, progress
        self._ask_groups = groups
        self._seen = Progress()
        self._problems: list[Finding] = []
        self._notes: list[Finding] = []
        self._dropped = 0
        self._groups: dict[str, tuple[str, ...]] = {}  # of each table, as they were when the check began
        self._across = Across(store, (), options.tracked_max)
        self._pools: dict[int, _Pool] = {}
        self._unread = set(told)  # tablets that cannot be read to their end
        self._watermark = 0
        self._cuts: dict[str, int] = {}
        self._book = Book(Catalogue(), 0)
        self._logs = Logs(store, {})

    async def run(self, ts: int) -> CheckResult:
        began = trio.current_time()
        await self._refresh()
        for table in self._book.catalogue.tables:
            try:
                self._store.locate(table, b"")
            except UsageError:
                continue  # declared, but not made yet
            self._groups[table] = (DATA, *self._book.catalogue.groups(table))
        self._across = Across(self._store, self._groups, self._options.tracked_max)
        async for finding in of_system(self._store, self._options.row_cells):
            self._report([finding])
        with contextlib.suppress(Corruption):  # reported by `of_system`
            _, self._watermark, self._cuts = await published(self._store)
        self._logs = Logs(self._store, self._cuts)
        groups = groups_of(self._store) if self._ask_groups is None else await self._ask_groups()
        await self._refresh()  # the catalogue names a group before it is made
        self._report(strange_groups(groups, self._book.catalogue))
        for table in self._groups:
            await self._survey(table)
        for table in self._groups:
            await self._table(table)
        await self._late_losses()
        return CheckResult(
            ts=ts,
            findings=(*sorted(self._problems, key=lambda finding: finding.severity), *self._notes),
            dropped=self._dropped,
            sampled=self._across.sampled,
            seconds=trio.current_time() - began,
            **{each.name: getattr(self._seen, each.name) for each in fields(Counts)},
        )

    async def _refresh(self) -> None:
        """Read the catalogue and the bound again."""
        catalogue = await load(self._store)
        bound = await durable_bound(self._store)
        self._book = Book(catalogue, bound)

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
        """A table's rows, page by page. A key that does not decode is a finding; the rest of its tablet is skipped."""
        start: bytes | None = b""
        while start is not None:
            try:
                page = await self._store.scan(ScanRequest(table, start, None, queries))
            except Corruption as error:
                self._unreadable(table, start, error)
                start = next((bound for bound in self._store.bounds(table) if bound > start), None)
                continue
            yield page.rows
            start = page.next

    def _unreadable(self, table: str, start: bytes, error: Corruption) -> None:
        """Report an unreadable tablet once, although two passes read it."""
        first = max(bound for bound in self._store.bounds(table) if bound <= start)
        if (table, first) not in self._unread:
            self._unread.add((table, first))
            what = f"the tablet from {first!r} on cannot be read from {start!r} on: {error.where}: {error.what}"
            self._report([Finding("error", "S1", table, what)])

    async def _survey(self, table: str) -> None:
        """Note primaries from locks, and rolled-back transactions from markers, before any record is read (T1, T3)."""
        n = self._options.row_cells
        queries = tuple(ScanQuery(group, None, 0, TS_MAX, n) for group in (*_LOCKS, ROLLBACK))
        async for rows in self._pages(table, queries):
            for row, (*found, markers) in rows:
                for group, locks in zip(_LOCKS, found, strict=True):
                    for column, start_ts, value in locks:
                        lock = lock_of(value)
                        if lock is not None:
                            self._across.locked(group, Cellref(table, row, column), start_ts, lock)
                for column, start_ts, _ in markers:
                    self._across.marked(Cellref(table, row, column), start_ts)

    async def _table(self, table: str) -> None:
        options, seen = self._options, self._seen
        seen.table = table
        limits = [(group, options.row_cells) for group in GROUPS]
        limits += [(group, options.data_cells) for group in self._groups[table]]
        queries = tuple(ScanQuery(group, None, 0, TS_MAX, n, self._fetched(table, group)) for group, n in limits)
        async for rows in self._pages(table, queries):
            self._across.forget_fates()
            for row, found in rows:
                cells = {group: part for (group, _), part in zip(limits, found, strict=True)}
                try:
                    if any(len(part) >= n for (_, n), part in zip(limits, found, strict=True)):
                        here = {column for part in found for column, _, _ in part}
                        cells = await self._whole(table, row, here)
                    await self._row(Image(table, row, cells), cells)
                except Corruption as error:
                    self._unreadable(table, row, error)
            self._tell(seen)
        seen.tables += 1
        if self._book.catalogue.tables[table].changes and not any(there == table for there, _ in self._unread):
            self._report([finding async for finding in self._logs.findings(table, self._book)])

    async def _whole(self, table: str, row: bytes, columns: Iterable[int]) -> dict[str, list[ScanCell]]:
        """All cells of a row: first the newest of every column, as of one state of the row; then older ones."""
        options = self._options
        known = sorted({*columns, *self._book.columns(table)})
        wanted = [(group, column, options.row_cells) for group in GROUPS for column in known]
        wanted += [(group, column, options.data_cells) for group in self._groups[table] for column in known]
        queries: list[Query] = [(group, column, 0, TS_MAX, n) for group, column, n in wanted]
        found = await self._cells(table, row, queries)
        out: dict[str, list[ScanCell]] = {group: [] for group in (*GROUPS, *self._groups[table])}
        for (group, column, n), newest in zip(wanted, found, strict=True):
            cells = newest
            while True:
                out[group] += [(column, ts, _needed(group, value)) for ts, value in cells]
                if len(cells) < n or not cells[-1][0]:
                    break
                older: Query = (group, column, 0, cells[-1][0] - 1, n)
                [cells] = await self._cells(table, row, [older])
        return out

    def _fetched(self, table: str, group: str) -> bool:
        """Whether values of a group are read. Long values are not read over a socket."""
        return self._ask_groups is None or group not in self._groups[table]

    async def _cells(self, table: str, row: bytes, queries: Sequence[Query]) -> list[list[Cell]]:
        """Cells of a row, as of one state of the row; as of several states only if they do not fit into a message."""
        if self._ask_groups is None:
            [found] = await self._store.read([(table, row, queries)])
            return found
        asked = tuple(
            ScanQuery(group, (column,), low, high, n, self._fetched(table, group))
            for group, column, low, high, n in queries
        )
        try:
            page = await self._store.scan(ScanRequest(table, row, row + b"\x00", asked))
        except TooLarge:
            if len(queries) == 1:
                raise
            half = len(queries) // 2
            return [*await self._cells(table, row, queries[:half]), *await self._cells(table, row, queries[half:])]
        cells = page.rows[0][1] if page.rows else [[] for _ in queries]
        return [[(ts, value) for _, ts, value in each] for each in cells]

    # ------------------------------------------------------------ rows

    async def _row(self, image: Image, cells: Mapping[str, list[ScanCell]]) -> None:
        seen = self._seen
        seen.rows += 1
        seen.cells += sum(map(len, cells.values()))
        seen.locks += sum(len(cells[group]) for group in _LOCKS)
        seen.records += len(cells[WRITE])
        self._logs.note(image.table, cells[WRITE])
        seen.markers += len(cells[ROLLBACK])
        seen.notifications += len(cells[NOTIFY])
        seen.failed += len(cells[FAILED_LIST])
        await self._note_locks(image)
        self._note_waste(image, cells)
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
        """The suspicions that still hold, for the same cells, each time that the row is read again."""
        self._seen.again += 1
        for look in range(self._options.looks):
            if look:
                await trio.sleep(self._options.pause_s)
            await self._refresh()
            self._across.forget_fates()
            image = Image(table, row, await self._whole(table, row, columns))
            before = set(suspicions)
            suspicions = [finding for finding in await self._suspicions(image, number) if finding in before]
            if not suspicions:
                break
        return suspicions

    async def _suspicions(self, image: Image, number: int = 0) -> list[Finding]:
        """Possible faults in a row; `number`: an observer whose uncertain lost notifications count, too."""
        book, table, row = self._book, image.table, image.row
        found = list(examine(image, book))
        found += [loss.finding for loss in unnotified(image, book) if loss.sure or loss.number == number]
        for column, locks in (*image.locks.items(), *image.shared.items(), *image.pending.items()):
            for start_ts, lock in locks:
                if lock is not None and not book.strange(table, column):
                    found += await self._across.of_lock(book, Cellref(table, row, column), start_ts, lock)
        for column, records in image.records.items():
            for record in records:
                found += await self._across.of_record(book, Cellref(table, row, column), record)
        for column, proofs in image.proofs.items():
            for start_ts, ts in proofs:
                if ts:
                    found += await self._across.of_record(
                        book, Cellref(table, row, column), Rec(ts, BARE, start_ts, "")
                    )
        for column, traces in image.traces.items():
            for ts, start_ts in traces:
                if start_ts:
                    found += await self._across.of_record(
                        book, Cellref(table, row, column), Rec(ts, READ, start_ts, "")
                    )
        return found

    # ------------------------------------------------------------ locks that were left behind

    async def _note_locks(self, image: Image) -> None:
        for group, column, locks in (
            *((LOCK, *item) for item in image.locks.items()),
            *((SHARED, *item) for item in image.shared.items()),
            *((PENDING, *item) for item in image.pending.items()),
        ):
            for start_ts, lock in locks:
                cell = Cellref(image.table, image.row, column)
                what = await self._of_left(start_ts, lock) if lock is not None else ""
                if what and await self._across.stands(group, cell, start_ts):
                    self._seen.orphans += what.startswith("orphan")
                    self._seen.unsettled += what.startswith("unsettled")
                    if len(self._notes) < self._options.findings_max:
                        invariant = "L1" if what.startswith("orphan") else "T3"
                        self._notes.append(Finding("note", invariant, self._book.where(*cell), what, cell, start_ts))

    def _note_waste(self, image: Image, cells: Mapping[str, list[ScanCell]]) -> None:
        """G3, G4: count the cells that the last vacuum left, or that the current one has not reached."""
        cut, book = self._cuts.get(image.table, 0), self._book
        if image.broken or not 0 < cut <= self._watermark:
            return
        observed = book.observed(image.table)
        waste = waste_of(
            image.table,
            image.row,
            [cell for cell in cells[WRITE] if cell[1] <= cut],
            [cell for cell in cells[ROLLBACK] if cell[1] < self._watermark],
            [cell for cell in cells[TRACE] if cell[1] < self._watermark],
            {*image.notify, *image.failed},
            cut=cut,
            watermark=self._watermark,
            versions=book.catalogue.keep_of(image.table).versions,
            acks_of=lambda column: [ack_of(at, number) for at, number in observed if at == column],
        )
        self._seen.waste += len(waste.ends) + sum(map(len, waste.units))

    async def _of_left(self, start_ts: int, lock: Lock) -> str:
        """Why a lock counts as left behind, or "". The lock may have gone meanwhile: the caller checks again after
        this."""
        what = "its pending entry" if lock.kind >= SIGNAL else "its lock"
        match await self._across.judge(start_ts, lock.primary):
            case Committed(commit_ts):
                return f"unsettled: transaction {start_ts} was committed at {commit_ts}, and {what} is still there"
            case Aborted():
                return f"unsettled: transaction {start_ts} was rolled back, and {what} is still there"
            case Locked() | Nothing() if not self._alive(start_ts):
                return f"orphan: transaction {start_ts} is undecided, and its client is gone"
        return ""

    # ------------------------------------------------------------ observers and data older than them (N1)

    def _pool(self, image: Image) -> None:
        """Note by when each observer certainly existed, and the changes that it was not notified of."""
        book = self._book
        for column, records in image.records.items():
            if observer_of(column):
                self._since(observer_of(column), min(record.start_ts for record in records))
        for column, cells in image.notify.items():
            if not book.whole(observer_of(column)):  # else the notify cells may be for older data
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


def _needed(group: str, value: bytes) -> bytes:
    """The part of a value that the check needs: a row read in parts may have very many values."""
    if group in (LOCK, NOTIFY, PENDING, SHARED, TRACE, FAILED_LIST):
        return value
    if group == WRITE:
        return value if value[:1] in _TOLD else value[:RECORD_HEAD]
    return b""
