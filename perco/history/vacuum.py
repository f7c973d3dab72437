"""Removes old versions that no reader needs any more, page by page, while reads and writes go on.

`retention.py` decides which cells of a row can be removed, and `holds.py` up to which timestamp. This module removes
them, using only the row store.

G2  There are four steps: publish the watermark and the cuts, durably; raise the floor in every tablet (T13); settle
    every lock with start_ts strictly below the watermark; delete. Each step finishes everywhere before the next begins
    anywhere. If all steps were done tablet by tablet, half a transaction could be lost: its primary's record would be
    removed while a secondary's lock is still there. A lock that does not decode, or whose primary does not decode,
    stays; nothing is collected above its start_ts.
S4  The vacuum may use the reserve of a full disk, for mutations that are small enough.

A vacuum can be interrupted anywhere, and any process can begin the next one, whose watermark is at least as high.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import msgpack
import trio

from perco.clock.holds import Holder
from perco.clock.oracle import BOUND_ROW, CLOCK_ROW, Oracle, raise_for
from perco.errors import Corruption, StoreError, StoreFull, Unavailable, UsageError
from perco.history import dropped
from perco.history.vacuumed import VacuumResult, VacuumStatistics
from perco.protocol.records import Cellref, ack_of, column_of
from perco.protocol.retention import Removed, Waste, is_lean, waste_of
from perco.protocol.snapshot import Blocked
from perco.schema.catalogue import CATALOGUE_ROW, SYSTEM_TABLE, Catalogue
from perco.settings import check_options
from perco.storage import (
    APPLIED,
    DATA,
    FAILED_LIST,
    LOCK,
    LOG,
    NOTIFY,
    PENDING,
    ROLLBACK,
    SHARED,
    TRACE,
    TS_MAX,
    WRITE,
    Failed,
    Mutation,
    Refused,
    RowStore,
    ScanPage,
    ScanQuery,
    ScanRequest,
    ScanRow,
    Verdict,
    Write,
)
from perco.storage.keys import escape, log_key
from perco.tablets.backend import Backend
from perco.txn.driver import Driver

log: logging.Logger = logging.getLogger("perco.vacuum")

VACUUM_ROW: Final = b"vacuum"
_ROUNDS_MAX = 16  # passes over all locks, before the vacuum gives up
_SYSTEM_CELLS = 32  # removed at once: they must fit the reserve
_LOOSE_MIN = 1000
_TRIMMED = 512  # entries of a log, removed in one write transaction
_REMOVED_AT_ONCE = 2048  # cells, in one write transaction
_SLICE_MIN_S, _SLICE_MAX_S = 0.002, 0.02  # of the loop's time, for a page
_CREDIT_MAX_S = 0.1  # at most this much waiting shortens a later pause
_LOOKS_APART = 4000  # cells skipped after a search for half-empty pages that found none
_CRAMPED_CELLS = 4  # removed from a row at a time on a full disk: what the reserve has room for


@dataclass(frozen=True, kw_only=True, slots=True)
class VacuumOptions:
    """Attributes:
    on: remove old versions in the background.
    period_s: seconds between two checks for old versions.
    share: the part of the loop's time that the vacuum may take in the background; 1: it yields, but never pauses.
    page_rows: rows that are read at a time; up to 16 times as many, if other tasks keep the loop busy.
    row_cells: cells of a row that are read at a time.
    """

    on: bool = True
    period_s: float = 30.0
    share: float = 0.2
    page_rows: int = 128
    row_cells: int = 1024

    def __post_init__(self) -> None:
        check_options(self)
        if not self.period_s > 0:
            raise UsageError(f"VacuumOptions: period_s is {self.period_s}; it must be above 0")
        if not 0 < self.share <= 1:
            raise UsageError(f"VacuumOptions: share is {self.share}; it must be above 0 and at most 1")


class Vacuum:
    """One per opened store; one run at a time."""

    removed: Removed
    runs: int
    holder: Holder

    def __init__(
        self,
        backend: Backend,
        driver: Driver,
        options: VacuumOptions,
        catalogue: Callable[[], Catalogue],
        change: dropped.Change,
        event: Callable[[str], None] | None,
    ) -> None:
        self.options = options
        self.removed = Removed()  # since the store was opened
        self.runs = 0
        self.holder = Holder("retention", 0)
        self.failure: Exception | None = None  # of the last run in the background
        self._backend, self._driver, self._event = backend, driver, event
        self._catalogue, self._change = catalogue, change
        self._alone = trio.Lock()
        self._done: tuple[int, dict[str, int]] | None = None  # the watermark and cuts of the last complete run
        self._told: bytes = b""
        self._loose: dict[str, int] = {}  # cells removed from each table since its pages were last repacked
        self._share = 1.0
        self._rows = options.page_rows
        self._worked = self._waited = 0.0  # since the last pause: our time on the loop, and our waits for it
        self._result = VacuumResult()
        self._limit = TS_MAX  # G2: start_ts of the oldest lock that cannot be settled because of damage
        self._tell: Callable[[VacuumResult], None] = lambda _: None

    @property
    def _store(self) -> RowStore:
        return self._driver.store

    @property
    def _oracle(self) -> Oracle:
        return self._driver.oracle

    async def in_background(self) -> None:
        """Run periodically, if there may be anything to remove. Failures are retried."""
        while True:
            await trio.sleep(self.options.period_s)
            try:
                await self.run(share=self.options.share, moved_only=True)
                self.failure = None
            except (StoreError, Corruption) as error:
                if type(error) is not type(self.failure):
                    log.warning("old versions could not be removed: %s", error)
                self.failure = error

    def statistics(self) -> VacuumStatistics:
        """Counts since the store was opened."""
        return VacuumStatistics(
            self._oracle.holds.watermark, self.holder, self.runs, replace(self.removed), self.failure
        )

    async def run(
        self,
        *,
        share: float = 1.0,
        moved_only: bool = False,
        tell: Callable[[VacuumResult], None] | None = None,
    ) -> VacuumResult:
        """Vacuum the whole store once.

        Args:
            share: the part of the loop's time that the vacuum may take.
            moved_only: only if the watermark or a cut has moved since the last complete run.
            tell: called after every page, with the result so far.

        Raises: StoreFull if not even the reserve is enough; Unavailable if locks cannot be settled.
        """
        async with self._alone:
            self._share, self._tell = share, tell or (lambda _: None)
            began = trio.current_time()
            self._rows, self._worked, self._waited = self.options.page_rows, 0.0, 0.0
            self._result = result = VacuumResult()
            self._limit = TS_MAX
            await dropped.date(self._driver, self._catalogue(), self._change)
            await self._publish()
            if moved_only and self._done == (result.watermark, result.cuts):
                return result
            self._done = None
            await self._backend.store.raise_floor(result.watermark, wait=True)  # T13
            self._backend.clear_dead_readers()
            self._step("floor")
            await self._settle_locks()
            self._step("locks")
            for table in result.cuts:
                before = result.removed.cells
                await self._collect(table)
                await self._trim_log(table)
                await self._remove_dropped(table)
                await self._repack(table, result.removed.cells - before)
            await self._collect_system()
            self._step("vacuum")
            result.table = ""
            result.seconds = trio.current_time() - began
            self.runs += 1
            if not result.left:
                self._done = result.watermark, result.cuts
            return result

    def _step(self, name: str) -> None:
        if self._event is not None:
            self._event(name)

    async def _publish(self) -> None:
        """Publish the watermark and the cuts: G1, and the first step of G2."""
        catalogue, holds = self._catalogue(), self._oracle.holds
        keep_s = {table: catalogue.keep_of(table).seconds for table in self._tables()}
        least = max((dropped.needed(catalogue, table) for table in keep_s), default=0)
        self._result.holder = await self._oracle.publish(keep_s, least=least)
        self.holder = self._result.holder
        self._result.watermark = holds.watermark
        self._result.cuts = {table: holds.cuts[table] for table in keep_s}
        await self._tell_others()
        self._step("watermark")

    async def _tell_others(self) -> None:
        """Record what holds the watermark back, for processes that inspect the store from outside."""
        if not self._backend.threaded:
            return
        told = msgpack.packb([*self.holder, min(self._oracle.holds.open, default=0)])
        if told != self._told:
            value = msgpack.packb([self._oracle.wall_ms(), told])
            row = (VACUUM_ROW, (), ((DATA, 0, 1, value),))
            [verdict] = await self._backend.store.apply([Mutation(SYSTEM_TABLE, (row,), None, True)])
            if verdict is APPLIED:  # otherwise the next vacuum tries again
                self._told = told

    def _tables(self) -> list[str]:
        made = set(self._backend.store.tables())
        return [name for name, entry in self._catalogue().tables.items() if name in made and not entry.is_empty()]

    # ------------------------------------------------------------ locks

    async def _settle_locks(self) -> None:
        """Settle locks until a full scan finds none below the watermark; no new ones can appear (T13)."""
        for _ in range(_ROUNDS_MAX):
            if not await self._locks_found():
                return
        raise Unavailable("the vacuum ended before it removed anything: there are locks that it cannot settle")

    async def _locks_found(self) -> int:
        found = 0
        for table, group in product(self._tables(), (LOCK, SHARED, PENDING)):
            query = ScanQuery(group, None, 0, TS_MAX, 1 << 16)
            start: bytes | None = b""
            while start is not None:
                page = await self._store.scan(ScanRequest(table, start, None, (query,)))
                for row, [locks] in page.rows:
                    for column, start_ts, packed in locks:
                        if start_ts < self._result.watermark:  # at the watermark, its transaction may be alive
                            found += await self._settled(Cellref(table, row, column), Blocked(start_ts, packed))
                start = page.next
                await self._give_way()
        return found

    async def _settled(self, cell: Cellref, blocked: Blocked) -> bool:
        """Settle a lock. Returns False if the lock cannot be settled and limits the vacuum."""
        try:
            await self._driver.clear(cell, blocked)
        except Corruption as error:
            self._driver.note_damage(error)
            self._limit = min(self._limit, blocked.start_ts)
            if error.where not in self._result.held_up:
                self._result.held_up += (error.where,)
            return False
        self._result.locks += 1
        return True

    # ------------------------------------------------------------ rows

    async def _collect(self, table: str) -> None:
        self._result.table = table
        start: bytes | None = b""
        wastes: list[Waste] = []
        cells = 0
        while start is not None:
            page = await self._page(self._request(table, start, None, self.options.row_cells))
            began = time.perf_counter()
            crowded = []
            for found in page.rows:
                self._result.rows += 1
                records, markers, traces, *_ = found[1]
                if not markers and not traces and len(records) < self.options.row_cells and is_lean(records):
                    continue
                try:
                    waste, more = self._waste(table, found, self.options.row_cells)
                except Corruption:
                    self._result.corrupt += 1
                    continue
                if more:
                    crowded.append(found[0])
                else:
                    wastes.append(waste)
                    cells += len(waste.units) + len(waste.ends)
            start = page.next
            self._worked += time.perf_counter() - began
            if cells >= _REMOVED_AT_ONCE or start is None:
                if not await self._remove(wastes):
                    crowded += [waste.row for waste in wastes]
                wastes, cells = [], 0
            for row in crowded:
                await self._collect_row(table, row)
            self._tell(self._result)
            await self._give_way()

    async def _trim_log(self, table: str) -> None:
        """Remove the log's entries at or below the table's cut (E4): no reader may ask for them any more."""
        if not self._catalogue().tables[table].changes:
            return
        cut, _ = self._limits(table)
        starts = self._store.bounds(table)
        for low, high in zip(starts, [*starts[1:], None], strict=True):
            request = ScanRequest(table, low, high, (ScanQuery(WRITE, None, 0, cut, 0),), False, _TRIMMED, log=b"")
            while (page := await self._store.scan(request)).rows:
                [last, [[(column, ts, _)]]] = page.rows[-1]
                request = request._replace(log=log_key(escape(last), column, ts))
                removals: dict[bytes, list[Write]] = {}
                for row, [[(column, ts, _)]] in page.rows:
                    if row >= low and (high is None or row < high):
                        removals.setdefault(row, []).append((LOG, column, ts, None))
                rows = [(row, (), writes) for row, writes in removals.items()]
                groups = [rows] if self._store.groups else [[row] for row in rows]
                mutations = [Mutation(table, group, None, True) for group in groups if group]
                for verdict in await self._store.apply(mutations):
                    if verdict is not APPLIED:  # the next vacuum removes them
                        self._result.left += 1
                    else:
                        self._result.removed.log += len(rows) if self._store.groups else 1
                await self._give_way()

    async def _remove_dropped(self, table: str) -> None:
        """Remove the cells of dropped columns, once no reader may ask for them (N17)."""
        if not (numbers := dropped.due(self._catalogue(), table, self._limits(table)[1])):
            return

        async def give_way(count: int) -> None:
            self._result.removed.dropped += count
            self.removed.dropped += count
            self._tell(self._result)
            await self._give_way()

        catalogue = self._catalogue()
        self._result.left += await dropped.remove(self._driver, catalogue, table, numbers, self._change, give_way)

    def _request(self, table: str, start: bytes, stop: bytes | None, cells: int) -> ScanRequest:
        cut, watermark = self._limits(table)
        queries = (
            ScanQuery(WRITE, None, 0, cut, cells),
            ScanQuery(ROLLBACK, None, 0, max(watermark - 1, 0), cells),
            ScanQuery(TRACE, None, 0, max(watermark - 1, 0), cells),
            ScanQuery(NOTIFY, None, 0, TS_MAX, cells),
            ScanQuery(FAILED_LIST, None, 0, TS_MAX, cells),
        )
        return ScanRequest(table, start, stop, queries, False, self._rows, seeks_max=8 * self._rows)

    def _limits(self, table: str) -> tuple[int, int]:
        """The limits for versions, and for markers and traces: cut and watermark, or the start_ts of an older lock."""
        return min(self._result.cuts[table], self._limit), min(self._result.watermark, self._limit)

    def _waste(self, table: str, found: ScanRow, cells: int) -> tuple[Waste, bool]:
        """The cells of a row that can be removed, and whether the row has more cells than were read."""
        row, (records, markers, traces, *waiting) = found
        catalogue = self._catalogue()
        cut, watermark = self._limits(table)
        more = len(records) == cells
        waste = waste_of(
            table,
            row,
            records,
            markers,
            traces,
            {column for there in waiting for column, _, _ in there},
            cut=cut,
            watermark=watermark,
            versions=catalogue.keep_of(table).versions,
            acks_of=_acks(catalogue, table),
            more=more,
        )
        return waste, more or cells in (len(markers), len(traces))

    async def _collect_row(self, table: str, row: bytes) -> None:
        """Collect one row in parts, because it has more cells than are read at once, or the disk is full."""
        cells = _CRAMPED_CELLS
        while True:
            page = await self._store.scan(self._request(table, row, row + b"\x00", cells))
            if not page.rows:
                return
            try:
                waste, more = self._waste(table, page.rows[0], cells)
            except Corruption:
                self._result.corrupt += 1
                return
            mutations = waste.mutations(cells)
            left = self._result.left
            if mutations and not await self._apply(mutations, [waste] * len(mutations)):
                if cells == _CRAMPED_CELLS:
                    raise StoreFull(f"table {table!r}", "old versions could not be removed, not even with the reserve")
                cells = _CRAMPED_CELLS
                continue
            if not more or self._result.left > left:
                return
            cells = min(2 * cells, self.options.row_cells) if mutations else 2 * cells
            await self._give_way()

    async def _remove(self, wastes: Sequence[Waste]) -> bool:
        """Remove waste. Returns False if there was no space for some of it."""
        mutations, of = [], []
        for waste in wastes:
            self._result.blocked += waste.blocked
            for mutation in waste.mutations(self.options.row_cells):
                mutations.append(mutation)
                of.append(waste)
        return not mutations or await self._apply(mutations, of)  # one write transaction for all of them

    async def _apply(self, mutations: Sequence[Mutation], of: Sequence[Waste]) -> bool:
        room = True
        refused = []
        began = time.perf_counter()
        verdicts = await self._store.apply(mutations)
        self._waited += time.perf_counter() - began  # other tasks had the loop
        for mutation, waste, verdict in zip(mutations, of, verdicts, strict=True):
            if isinstance(verdict, Refused):  # G3: a notify cell has been put meanwhile
                self._result.blocked += 1
                refused += waste.without_ends().mutations(self.options.row_cells)
            else:
                room &= self._count(mutation, verdict)
        for mutation, verdict in zip(refused, await self._store.apply(refused) if refused else (), strict=True):
            room &= self._count(mutation, verdict)
        return room

    def _count(self, mutation: Mutation, verdict: Verdict) -> bool:
        """Count what a mutation removed. Returns False if there was no space for it."""
        if verdict is APPLIED:
            for removed in (self._result.removed, self.removed):
                removed.add_of(mutation)
            return True
        if isinstance(verdict, Failed):
            if isinstance(verdict.error, StoreFull):
                return False
            if isinstance(verdict.error, Corruption):
                self._result.corrupt += 1
                return True
            raise verdict.error
        self._result.left += 1
        return True

    # ------------------------------------------------------------ pages

    async def _repack(self, table: str, removed: int) -> None:
        """Repack half-empty pages, once half as many cells have been removed as are left."""
        tablets = [tablet for tablet in self._backend.store.tablets_here() if tablet.table == table]
        if not tablets:
            return
        loose = self._loose[table] = self._loose.get(table, 0) + removed
        if loose < max(sum(tablet.entries(WRITE) for tablet in tablets) // 2, _LOOSE_MIN):
            return
        self._loose[table] = 0
        groups = {WRITE, DATA, *self._catalogue().all_groups(table)}
        for tablet, group in product(tablets, sorted(groups)):
            start: bytes | None = b""
            skip = 0
            while start is not None:
                start, worth = await tablet.repack(group, start, skip)
                self._result.repacked += worth
                skip = 0 if worth else _LOOKS_APART
                await self._give_way()

    # ------------------------------------------------------------ system rows

    async def _collect_system(self) -> None:
        """Remove each note of the clock that is older than the newest note at or below every cut (O3), and superseded
        system rows."""
        self._result.table = SYSTEM_TABLE
        oldest = min(self._result.cuts.values(), default=self._result.watermark)
        await self._oracle.pins.drop_expired()
        await self._oracle.pins.erase(self._result.watermark)
        notes = await self._collect_versions(CLOCK_ROW, oldest)
        system = await self._collect_versions(CATALOGUE_ROW, TS_MAX)
        system += await self._collect_versions(BOUND_ROW, TS_MAX)
        gone = Removed(notes=notes, system=system)
        self._result.removed.add(gone)
        self.removed.add(gone)

    async def _collect_versions(self, row: bytes, at: int) -> int:
        """Remove the versions older than the newest one at or below `at`, the oldest first; returns how many."""
        store = self._store
        [[newest]] = await store.read([(SYSTEM_TABLE, row, [(DATA, 0, 0, at, 1)])])
        removed = low = 0
        while newest and low < newest[0][0]:
            query = (DATA, 0, low, newest[0][0] - 1, -_SYSTEM_CELLS)
            [[cells]] = await store.read([(SYSTEM_TABLE, row, [query])])
            if not cells:
                break
            low = cells[-1][0] + 1
            gone = tuple((DATA, 0, ts, None) for ts, _ in cells)
            if gone:
                [verdict] = await store.apply([Mutation(SYSTEM_TABLE, ((row, (), gone),), None, True)])
                if verdict is not APPLIED:
                    raise_for(verdict, f"removing old versions of {row.decode()}")
                removed += len(gone)
            await self._give_way()
        return removed

    # ------------------------------------------------------------ leaving time to other tasks

    async def _page(self, request: ScanRequest) -> ScanPage:
        """Scan a page, neither of so many rows that other tasks wait long, nor of so few that we yield too often."""
        began = time.perf_counter()
        await trio.lowlevel.checkpoint()
        turn = time.perf_counter() - began  # the time that other tasks took
        page = await self._store.scan(request)
        worked = max(time.perf_counter() - began - 2 * turn, _SLICE_MIN_S / 8)
        self._worked += worked
        self._waited += 2 * turn
        wanted = slice_s(turn, self._share)
        rows = int(self._rows * min(max(wanted / worked, 0.5), 2.0))
        self._rows = min(max(rows, self.options.page_rows), 16 * self.options.page_rows)
        return page

    async def _give_way(self) -> None:
        """Pause for long enough that the vacuum takes no more than its share of the loop's time."""
        pause_s = self._worked * (1 / self._share - 1) - self._waited
        self._worked = 0.0
        self._waited = min(max(-pause_s, 0.0), _CREDIT_MAX_S)
        if pause_s > 0:  # else others have had their time; yielding to a busy loop may take as long as a page
            began = time.perf_counter()
            await trio.sleep(pause_s)
            self._waited = min(max(time.perf_counter() - began - pause_s, 0.0), _CREDIT_MAX_S)


def slice_s(turn_s: float, share: float) -> float:
    """How long to work on a page to use the whole share, given that other tasks get two turns of the loop per page. If
    the vacuum worked for less, it would yield more often than it must, and fall behind the writers."""
    return min(max(2 * turn_s * share / max(1 - share, 0.01), _SLICE_MIN_S), _SLICE_MAX_S)


def _acks(catalogue: Catalogue, table: str) -> Callable[[int], Sequence[int]]:
    """A function that returns the acknowledgement columns of all observers of a column of a table."""
    columns = catalogue.tables[table].columns
    found: dict[int, list[int]] = {}
    for observer in catalogue.observers.values():
        if observer.table == table:
            column = column_of(columns[observer.column].number)
            found.setdefault(column, []).append(ack_of(column, observer.number))
    return lambda column: found.get(column, ())
