"""Notifies a new observer, or a new version of one, of existing data: page by page, while reads and writes go on.

N10 The registration is announced first: from then on, every timestamp comes with the new version of the catalogue. Then
    a timestamp is drawn and recorded: `ObserverEntry.at`. A transaction that draws its commit_ts later finds the
    observer in the catalogue, and notifies it. So the backfill only covers earlier commits: it reads each row as of
    `at`, and if the observed cell has a value there, puts a notify cell.
N2  The notify cell is put at `at`, not at the commit timestamp of the change. Only a run that has seen the notify cell
    may remove it. Such a run began after `at`, so it uses the catalogue that has the registration. A run of a lower
    version cannot remove the notify cell: neither a run in flight, nor a run in a process that does not have the new
    catalogue yet.
N3  For a higher version of an observer, a notify cell is also put for each delete that a lower version has
    acknowledged.
C4  The backfill first waits for the one-step commits at or below `at`.

Progress is noted after each page, once the page's notify cells are stored. So a notify cell may be put twice, which
changes nothing, but none is left out. The backfill holds no snapshot open, and needs no old versions: if the version at
`at` has been collected, there is a newer one, whose commit has notified the observer. If a backfill is interrupted, the
next process continues it; several processes may do so at once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgpack
import trio

from perco.errors import Corruption, StoreError
from perco.notify.dropping import remove_changes
from perco.protocol.records import Cellref, ack_of, column_of, pack_cause
from perco.protocol.snapshot import Blocked, Missing, look
from perco.schema.catalogue import SYSTEM_TABLE, Catalogue, raise_for
from perco.schema.entries import ObserverEntry
from perco.settings import check_options
from perco.storage import (
    ABSENT,
    APPLIED,
    DATA,
    FAILED_LIST,
    LOCK,
    NOTIFY,
    TS_MAX,
    WRITE,
    Mutation,
    Refused,
    RowStore,
    ScanCell,
    ScanQuery,
    ScanRequest,
    ScanRow,
)
from perco.txn.background import Background
from perco.txn.driver import Driver

log: logging.Logger = logging.getLogger("perco.backfill")

BACKFILL_ROW: Final = b"backfill"
_RETRY_S, _RETRY_MAX_S = 1.0, 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BackfillOptions:
    """Attributes:
    on: notify new observers of existing data in the background, as soon as the store is open.
    share: the part of the loop's time that the backfill may take in the background; 1: it yields, but does not pause.
    page_rows: how many rows to read at a time; progress is noted after each page.
    """

    on: bool = True
    share: float = 0.2
    page_rows: int = 256

    def __post_init__(self) -> None:
        check_options(self)


class Noted(NamedTuple):
    """Progress of the backfill for the registration at `at`. Rows below `next` are done; `rows`: how many rows were
    read; `notified`: how many notify cells were put."""

    at: int
    next: bytes
    rows: int
    notified: int


@dataclass(frozen=True, slots=True)
class BackfillProgress:
    """Progress of an observer's backfill.

    Attributes: `id` and `version` of the observer; `table` that it observes; `rows` read so far; `notified`: changes
    of which the observer was notified so far; `done`: whether the backfill is complete.
    """

    id: str
    version: int
    table: str
    rows: int
    notified: int
    done: bool


async def noted(store: RowStore, entry: ObserverEntry) -> Noted:
    """Progress of an observer's backfill, as last noted. Raises: Corruption."""
    [[cells]] = await store.read([(SYSTEM_TABLE, BACKFILL_ROW, [(DATA, entry.number, 1, 1, 1)])])
    found = unpack_noted(cells[0][1]) if cells else None
    return found if found is not None and found.at == entry.at else Noted(entry.at, b"", 0, 0)


def unpack_noted(value: bytes) -> Noted:
    """Raises: Corruption."""
    try:
        found = Noted(*msgpack.unpackb(value))
        if [type(part) for part in found] != [int, bytes, int, int] or min(found.at, found.rows, found.notified) < 0:
            raise ValueError("a field has an impossible value")
        return found
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Corruption("backfill", f"its progress cannot be decoded: {error}") from error


async def progress_of(store: RowStore, catalogue: Catalogue) -> list[BackfillProgress]:
    """Progress of all observers' backfills, as last noted. If a backfill is done, its counts are 0."""
    out = []
    for id, entry in catalogue.observers.items():
        far = Noted(0, b"", 0, 0)
        if not entry.ready and entry.at:
            with contextlib.suppress(Corruption):  # `perco check` reports it; the backfill starts from the beginning
                far = await noted(store, entry)
        out.append(BackfillProgress(id, entry.version, entry.table, far.rows, far.notified, entry.ready))
    return out


class Backfill:
    """One per opened store; one run at a time.

    `change` makes the next version of the catalogue, and announces it.
    """

    again: bool

    def __init__(
        self,
        driver: Driver,
        background: Background,
        options: BackfillOptions,
        catalogue: Callable[[], Catalogue],
        change: Callable[[Callable[[Catalogue], Catalogue]], Awaitable[None]],
    ) -> None:
        self.options = options
        self.failure: Exception | None = None  # of the last try in the background
        self.again = False  # a try has failed: notify cells that it put may come late
        self._driver, self._background, self._catalogue, self._change = driver, background, catalogue, change
        self._alone = trio.Lock()
        self._running = False
        self._worked = 0.0  # seconds of the loop's time since the last pause

    @property
    def left(self) -> bool:
        """Whether some observer has not been notified of all existing data yet."""
        return bool(self._catalogue().unready())

    def wake(self) -> None:
        """Start the backfill in the background, if there is something to do and `BackfillOptions.on` is set."""
        if self.options.on and not self._running and self.left:
            self._running = True
            self._background.start(self._in_background, "backfill")

    async def _in_background(self) -> None:
        pause_s = _RETRY_S
        try:
            while self.left:
                try:
                    await self.run(share=self.options.share)
                    self.failure = None
                except (StoreError, Corruption) as error:
                    if type(error) is not type(self.failure):
                        log.warning("could not notify observers of existing data, trying again: %s", error)
                    self.failure = error
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _RETRY_MAX_S)
        finally:
            self._running = False

    async def run(
        self, *, share: float = 1.0, tell: Callable[[BackfillProgress], None] | None = None
    ) -> list[BackfillProgress]:
        """Run until all observers are ready. Returns the progress of each observer that was not ready before.

        Args:
            share: the part of the loop's time that the backfill may take.
            tell: called with the observer's progress after every page.

        Raises: StoreError if the store cannot be written to, Unavailable if no answer came.
        """
        done: dict[str, BackfillProgress] = {}
        async with self._alone:
            self._worked = 0.0
            while ids := self._catalogue().unready():
                try:
                    progress = await self._observer(ids[0], share, tell or (lambda _: None))
                except StoreError:
                    self.again = True
                    raise
                if progress is not None:
                    done[progress.id] = progress
        return list(done.values())

    async def _observer(
        self, id: str, share: float, tell: Callable[[BackfillProgress], None]
    ) -> BackfillProgress | None:
        """Run the backfill of one observer. If the observer has no timestamp yet, only draw and record one. Returns
        None if the catalogue has changed: the caller must then look at the catalogue again."""
        driver, store = self._driver, self._driver.store
        entry = self._catalogue().observers[id]
        if not entry.at:
            # N10: a transaction that draws its commit_ts after this finds the observer in the catalogue.
            await driver.oracle.announce(self._catalogue().binds)
            at = await driver.oracle.draw()
            await self._change(lambda catalogue: catalogue.began_at(id, entry.version, at))
            return None
        await driver.visible(entry.at)  # C4
        try:
            far = await noted(store, entry)
        except Corruption as error:
            driver.note_damage(error)
            far = Noted(entry.at, b"", 0, 0)
        queries = self._queries(entry)
        start: bytes | None = far.next
        while start is not None:
            began = time.perf_counter()
            page = await store.scan(ScanRequest(entry.table, start, None, queries, False, self.options.page_rows))
            self._worked += time.perf_counter() - began
            put = await self._notify(id, entry, page.rows)
            far = Noted(entry.at, page.next or b"", far.rows + len(page.rows), far.notified + put)
            if page.next is not None:
                await self._note(entry, far)
            start = page.next
            tell(BackfillProgress(id, entry.version, entry.table, far.rows, far.notified, False))
            await self._give_way(share)
            known = self._catalogue()
            now = known.observers.get(id)
            if now is None or now.number != entry.number:  # N12: cells of this page may have come after the removal
                await remove_changes(driver, known, entry.number)
                return None
            if now.at != entry.at:
                return None  # a higher version was registered meanwhile
        await self._change(lambda catalogue: catalogue.made_ready(id, entry.at))
        driver.notified()
        return BackfillProgress(id, entry.version, entry.table, far.rows, far.notified, True)

    def _queries(self, entry: ObserverEntry) -> tuple[ScanQuery, ...]:
        number = column_of(self._catalogue().tables[entry.table].columns[entry.column].number)
        queries = (ScanQuery(LOCK, (number,), 0, entry.at), ScanQuery(WRITE, (number,), 0, entry.at))
        if entry.version == 1:
            return queries
        return *queries, ScanQuery(WRITE, (ack_of(number, entry.number),), 0, TS_MAX)

    async def _notify(self, id: str, entry: ObserverEntry, rows: list[ScanRow]) -> int:
        """Put the notify cells for a page of rows; returns how many."""
        began = time.perf_counter()
        number = column_of(self._catalogue().tables[entry.table].columns[entry.column].number)
        ack = ack_of(number, entry.number)
        mutations = []
        for row, found in rows:
            commit_ts = await self._change_of(entry, row, number, found)
            if commit_ts:
                assert commit_ts <= entry.at
                put = (NOTIFY, ack, entry.at, pack_cause(commit_ts, 0))
                # N6: this mutation may take effect late, or twice. If the change has been given up meanwhile, the
                # observer must not be notified of it again.
                given_up = (ABSENT, FAILED_LIST, ack, entry.at, entry.at)
                mutations.append(Mutation(entry.table, ((row, (given_up,), (put,)),)))
        self._worked += time.perf_counter() - began
        if mutations:
            with self._driver.observing():
                for verdict in await self._driver.store.apply(mutations):
                    if verdict is not APPLIED and not isinstance(verdict, Refused):  # the page is not done
                        raise_for(verdict, f"notifications for observer {id!r}")
        return len(mutations)

    async def _change_of(
        self, entry: ObserverEntry, row: bytes, number: int, found: Sequence[Sequence[ScanCell]]
    ) -> int:
        """The timestamp of the change of which a row's observer must be notified; 0: there is none.

        If the observed cell is locked, the lock is settled first (T9): if it does not list the new observer, its
        transaction does not notify the observer.
        """
        locks, writes, *acks = found
        try:
            seen = look([cell[1:] for cell in locks], [cell[1:] for cell in writes])
            if isinstance(seen, Blocked):
                seen = await self._driver.finish(entry.table, row, number, entry.at, seen)
        except Corruption as error:  # runs fail until the cell is repaired; the backfill goes on
            self._driver.note_damage(self._driver.at(Cellref(entry.table, row, number), error))
            return writes[0][1] if writes else 0
        if isinstance(seen, Missing) and not any(acks):
            return 0
        return seen.commit_ts

    async def _note(self, entry: ObserverEntry, far: Noted) -> None:
        """Record that a page is done; this replaces the previous note. A note that takes effect late, or twice, does no
        harm: the rows that it covers are done."""
        put = (DATA, entry.number, 1, msgpack.packb(far))
        [verdict] = await self._driver.store.apply([Mutation(SYSTEM_TABLE, ((BACKFILL_ROW, (), (put,)),))])
        if verdict is not APPLIED:
            raise_for(verdict, "the progress note of the backfill")

    async def _give_way(self, share: float) -> None:
        """Pause for long enough that the backfill takes no more than its share of the loop's time."""
        pause_s, self._worked = self._worked * (1 / share - 1), 0.0
        await trio.sleep(pause_s)
