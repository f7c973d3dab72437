"""Looks for notify cells and hands rows to the worker.

N8  A scanner starts at a random key of a random tablet and walks on from there, around the whole store. When it finds a
    row on which another scanner runs observers, it teleports: it jumps to a new random place, so that scanners never
    clump behind a slow row. In each round, a scanner first clears the wake flag, then tours the whole store, and only
    then sleeps. A wake-up is sent only after the notify cells are visible. A wake-up wakes one scanner; a scanner that
    finds more than it may run wakes the next. A scanner skips changes that are not due yet, and wakes when the first of
    them is due.
    If a commit wakes a scanner while no other scanner is on a tour, that scanner looks only at the commit's rows. When
    a row's lock is released, a scanner looks at the row again if one has passed it meanwhile.

If observers have different priorities, a scanner first tours the store for the highest priority, and then for each
lower one, as far as the share of that priority allows. It repeats this until no tour was cut short. Lower priorities
give way: when a slot becomes free during a tour for a lower priority, the scanner first looks again for work of higher
priorities, but only a few times in succession.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from perco.errors import Corruption, SessionEnded, Unavailable
from perco.notify.rowlocks import (
    CELLS_PER_ROW,
    CLAIMED,
    FREE,
    HELD,
    Dirty,
    Elsewhere,
    columns_of,
    newest_of,
    oldest_root,
)
from perco.notify.runners import Ready, Runners
from perco.notify.walk import Place, Walk, random_row
from perco.notify.worker import Worker
from perco.protocol.records import observer_of
from perco.storage import NOTIFY, TS_MAX, ScanCell, ScanPage, ScanQuery, ScanRequest, ScanRow

log: logging.Logger = logging.getLogger("perco.store")

_AWAY_S = 1.0  # between two looks at a store that does not answer, or that is damaged
_CROWDED_S = 0.02  # the longest pause between two tours that pass rows of slow observers
_PASSING_PAUSE = 3  # after a page of rows that were all passed: so many times as long as the page took, but at least
_PASSING_S = 0.005  # so long
_HINTS_MAX = 16  # hints that are followed between two pages of a tour
_INSTEAD_MAX = 16  # further rows that a scanner asks for, in case other processes have the first ones
_FURTHER_DOWN = 0.25  # the chance that a scanner goes on to lower priorities while a higher one has more to do
_WAYS_GIVEN_MAX = 3  # how often in succession a lower priority gives way to a higher one


@dataclass(slots=True)
class ScannerCounters:
    """`tours`, `teleports`; `told`: rows for which the scanner was woken, and which it looked at without a tour;
    `claims`: rows handed to runners; `met`: how often the scanner encountered another one; `asked`: calls that asked a
    server for rows; `refused`: calls that got none, because other processes had them."""

    tours: int = 0
    told: int = 0
    teleports: int = 0
    claims: int = 0
    met: int = 0
    asked: int = 0
    refused: int = 0


class Scanner:
    """One task that looks for work; it may have `slots` runs in flight."""

    worker: Worker
    number: int
    counters: ScannerCounters
    ended: trio.Event

    def __init__(self, worker: Worker, number: int, slots: int, tables: Callable[[], list[str]]) -> None:
        self.worker, self.number = worker, number
        self.counters = ScannerCounters()
        self.ended = trio.Event()
        self.position: tuple[str, bytes] | None = None
        self._most = slots
        self._slots = trio.Semaphore(slots)
        self._runners = Runners(worker, self._slots)
        self._tables = tables
        self._due = math.inf  # when the first change that this tour skipped is due
        self._passed = 0  # rows skipped, because no observer may run there now
        self._level: frozenset[int] | None = None  # the observers of the priority that it tours for
        self._share = math.inf  # rows that it may still claim
        self._given = 0  # how often it has given way in succession
        self._rng = random.Random(worker.engine.random.getrandbits(64))

    async def run(self) -> None:
        """Look for work until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    self.worker.waking.again = False  # clear, then look, then sleep
                    began, begun = trio.current_time(), self.worker.hints.begin_tour()
                    self._due, self._passed = math.inf, 0
                    try:
                        await self._tour(nursery)
                        self.worker.waking.broken_off = False
                    except Corruption as error:  # an unreadable key: the rows after it cannot be found
                        self.worker.engine.driver.note_damage(error)
                        self.worker.waking.broken_off = True  # the next change makes a tour, which begins elsewhere
                        begun = -1
                        await trio.sleep(_AWAY_S)  # but it probably ends here, too
                    except (Unavailable, SessionEnded) as error:  # R6: the connection to the server was lost
                        log.warning("%s; looking again", error)
                        await trio.sleep(_AWAY_S)
                        continue
                    long = self._passed > self.worker.options.page_rows
                    self.worker.hints.toured(begun, long=long)
                    if long:  # many rows wait: leave half the time to others
                        if self._due < math.inf or self.worker.holds_back:
                            await self._pause(nursery, trio.current_time() - began)
                        elif self.worker.room.crowded:
                            await self._pause(nursery, min(trio.current_time() - began, _CROWDED_S))
                    until = min(self._due, self.worker.next_due(began))
                    await self._follow_hints(nursery)
                    while not await self.worker.sleep(until):
                        if not self.worker.waking.follows:
                            await self._follow_hints(nursery)
                        elif not await self._follow_told(nursery, until):
                            break
                        until = min(until, self._due, self.worker.next_due(began))
        finally:
            self.ended.set()

    async def _pause(self, nursery: trio.Nursery, seconds: float) -> None:
        """Sleep, and meanwhile follow hints."""
        hints, until = self.worker.hints, trio.current_time() + seconds
        while (left := until - trio.current_time()) > 0:
            if not self._slots.value:
                await trio.sleep(left)
            elif hints:
                await self._follow_hints(nursery)
            else:
                await hints.pause(left)
        await trio.lowlevel.checkpoint()

    async def _follow_hints(self, nursery: trio.Nursery) -> None:
        """Run observers on rows with new notify cells, out of turn; only those of the highest priority. Only on a few
        rows, so that hints do not hold up tours: of many changes, tours find more at a time."""
        levels, hints = self.worker.levels, self.worker.hints
        if not hints or not self._slots.value:
            return
        tour = self._level, self._share, self._passed, self.position
        self._level, self._share = levels[0] if len(levels) > 1 else None, math.inf
        try:
            for _ in range(_HINTS_MAX):
                if not hints or not self._slots.value:
                    break
                await self._follow_hint(nursery, *hints.take())
        except (Corruption, Unavailable, SessionEnded) as error:
            log.debug("a hint was lost: %s", error)  # a tour finds the row, or meets the error
        finally:
            self._level, self._share, self._passed, self.position = tour

    async def _follow_told(self, nursery: trio.Nursery, until: float) -> bool:
        """Run observers on the rows for which this scanner was woken. Returns False if a tour is needed: because this
        scanner has no free place, and others may have one, or because it is time for a tour (`until`)."""
        worker, waking = self.worker, self.worker.waking
        self._level, self._share = None, math.inf
        try:
            while waking.told:
                if trio.current_time() >= min(until, self._due):
                    return False
                if not self._slots.value:
                    worker.pass_on()
                    return False
                await self._follow_hint(nursery, *waking.told.popleft())
                self.counters.told += 1
        except (Corruption, Unavailable, SessionEnded) as error:
            log.debug("a row was not looked at: %s", error)  # a tour finds the row, or meets the error
            return False
        finally:
            waking.followed()
        return True

    async def _follow_hint(self, nursery: trio.Nursery, table: str, row: bytes) -> None:
        page = await self._page(Place(table, row, row + b"\x00"), 1, cells=CELLS_PER_ROW)
        claims = self.counters.claims
        walk = Walk(table, [(row, cells) for row, [cells] in page.rows], claims, claims)
        try:
            await self._walk_page(nursery, walk)
        finally:
            for dirty in walk.taken:
                self._let_go(table, dirty)

    def _places(self) -> list[Place]:
        store = self.worker.engine.driver.store
        places = []
        for table in self._tables():
            starts = store.bounds(table)
            for low, high in zip(starts, [*starts[1:], None], strict=True):
                places.append(Place(table, low, high))
        return places

    async def _tour(self, nursery: trio.Nursery) -> None:
        """Walk the whole store once, from a random place. After a teleport, start again, from another random place."""
        self.counters.tours += 1
        await self.worker.look_at_catalogue()
        if len(self.worker.levels) > 1:
            await self._tour_by_priority(nursery)
            return
        self._level, self._share = None, math.inf
        while await self._ride(nursery):
            self.counters.teleports += 1

    async def _tour_by_priority(self, nursery: trio.Nursery) -> None:
        """Tour the store completely for the highest level, and for each lower level as far as its share allows; repeat
        until no level was cut short.

        The share is a quarter of the number of rows that the scanner skipped on its tour for the highest level, but at
        least its number of slots. After a level that was cut short, the scanner goes on to lower levels only one time
        in four, at random.
        """
        cut = True
        while cut:
            cut, passed, share = False, self._passed, math.inf
            for depth, level in enumerate(self.worker.levels):
                if depth == 1:
                    share = max(self._most, (self._passed - passed) // 4)
                self._level, self._share = level, share
                while await self._ride(nursery) and self._share > 0:
                    self.counters.teleports += 1
                if self._share <= 0:
                    cut = True
                    if self._rng.random() >= _FURTHER_DOWN:
                        break
            await trio.lowlevel.checkpoint()

    async def _ride(self, nursery: trio.Nursery) -> bool:
        """Walk around the whole store. Returns whether the scanner ended the ride early."""
        claims = self.counters.claims
        for place in await self._ahead():
            if await self._walk(nursery, place, claims):
                return True
        return False

    async def _ahead(self) -> list[Place]:
        """The places to walk, in order. The first one is a random place or, if that has no notify cells, the next place
        that has some; places skipped on the way are left out. The first place begins at a random key; its part before
        that key comes last."""
        places = self._places()
        at = self._rng.randrange(len(places)) if places else 0
        places = places[at:] + places[:at]
        while places:
            place = places.pop(0)
            row = await self._random_row(place)
            if row is not None:
                skipped = [Place(place.table, place.low, row)] if row > place.low else []
                return [Place(place.table, row, place.high), *places, *skipped]
        return []

    async def _random_row(self, place: Place) -> bytes | None:
        """The row at which to begin in a place; None: the place has no notify cells."""
        page = await self._page(place, self.worker.options.page_rows)
        if page.next is None:
            return self._rng.choice(self._free(place.table, page) or page.rows)[0] if page.rows else None
        last = await self._page(place, 1, reverse=True)
        if not page.rows or not last.rows:
            return place.low
        return random_row(page.rows[0][0], last.rows[0][0], self._rng)

    def _free(self, table: str, page: ScanPage) -> list[ScanRow]:
        """The rows of a page that no scanner has, as far as is known."""
        elsewhere, held, now = self.worker.elsewhere, self.worker.rows, trio.current_time()
        if elsewhere is None:
            return page.rows
        return [
            (row, found)
            for row, found in page.rows
            if held.holder(table, row) is None and not elsewhere.waits((table, row), newest_of(found[0]), now)
        ]

    async def _page(self, place: Place, rows: int, *, reverse: bool = False, cells: int = 1) -> ScanPage:
        """The first dirty rows of a place; with `reverse`, the last. `cells`: how many of each row."""
        query = ScanQuery(NOTIFY, None, 0, TS_MAX, cells)
        request = ScanRequest(place.table, place.low, place.high, (query,), reverse, rows)
        return await self.worker.engine.driver.store.scan(request)

    async def _walk(self, nursery: trio.Nursery, place: Place, claims: int) -> bool:
        """Claim the dirty rows of a place in order. Returns whether the ride ends here, because the scanner teleports
        from a row that another scanner has, gives way to a higher priority, or has used up its share.

        `claims`: how many rows the scanner had claimed at its last jump. It teleports only if it has claimed a row
        since then. Otherwise, a jump gains nothing: the scanner has only just jumped to a random place, and if few rows
        are dirty, other scanners may have all of them.
        """
        query = ScanQuery(NOTIFY, None, 0, TS_MAX, CELLS_PER_ROW)
        start: bytes | None = place.low
        while start is not None:
            request = ScanRequest(place.table, start, place.high, (query,), False, self.worker.options.page_rows)
            await self._follow_hints(nursery)
            began = trio.current_time()
            page = await self.worker.engine.driver.store.scan(request)
            passed = self._passed
            walk = Walk(place.table, self._ready_rows(page), claims, self.counters.claims)
            try:
                if await self._walk_page(nursery, walk):
                    return True
            finally:
                for dirty in walk.taken:  # not claimed: the scanner teleports, or is cancelled
                    self._let_go(walk.table, dirty)
            start = page.next if walk.stale_from is None else walk.stale_from
            passed_all = 0 < len(page.rows) == self._passed - passed
            if start is not None and passed_all and not self.worker.may_run_any(place.table, self._level):
                self._passed += self.worker.options.page_rows  # and perhaps many more
                return False
            if passed_all and self.worker.hints.of_all:
                await self._pause(nursery, max(_PASSING_S, _PASSING_PAUSE * (trio.current_time() - began)))
        return False

    def _ready_rows(self, page: ScanPage) -> list[tuple[bytes, list[ScanCell]]]:
        """The rows of a page, but for those whose observers may run on no row now: they are passed, all at once, since
        a slow observer may have many."""
        rows = [(row, cells) for row, [cells] in page.rows]
        acks = {cell[0] for _, cells in rows for cell in cells}
        level, may_run = self._level, self.worker.may_run
        ready = {ack for ack in acks if (level is None or observer_of(ack) in level) and may_run(observer_of(ack))}
        if len(ready) < len(acks):
            left = [
                (row, cells)
                for row, cells in rows
                if len(cells) == CELLS_PER_ROW or any(cell[0] in ready for cell in cells)
            ]
            self._passed += len(rows) - len(left)
            return left
        return rows

    async def _walk_page(self, nursery: trio.Nursery, walk: Walk) -> bool:
        worker, table = self.worker, walk.table
        for at, (row, cells) in enumerate(walk.rows):
            self.position = (table, row)
            waited = bool(worker.delays) or len(cells) == CELLS_PER_ROW
            acks = await self._wanted_now(table, row, cells) if waited else self._wanted(table, row, columns_of(cells))
            if not acks:
                self._passed += 1
                continue
            holder = worker.rows.holder(table, row)
            if holder is not None:
                worker.rows.passed(table, row)
            if holder == self.number:
                continue
            if holder is not None or self._is_elsewhere(table, row, cells):
                if await self._claim(nursery, walk, at):
                    return True
                self.counters.met += 1
                if self._jumps(walk):
                    return True
                continue
            if self._slots.value:
                self._slots.acquire_nowait()
            else:
                if await self._claim(nursery, walk, at):
                    return True
                if walk.is_stale(self.counters.claims, self._most) and worker.elsewhere is not None:
                    walk.stale_from = row
                    return False
                worker.pass_on()  # another process may be able to run what this one cannot
                await self._slots.acquire()
                waited = True
                if self._gives_way():
                    self._slots.release()
                    return True
            if waited:  # other scanners may have run this row, or begun as many failed rows as are allowed at once
                now = trio.current_time()
                acks = [ack for ack in acks if worker.claimable(table, row, ack, now)]
            if not acks or not self._takes(table, row):
                self._slots.release()
                continue
            alone = worker.elsewhere is None
            told = (0, 0) if alone else (newest_of(cells), oldest_root(cells, acks))
            walk.taken.append(Dirty(row, acks, *told, worker.begin_row(table, row, acks)))
            last = alone or len(walk.taken) >= self._share
            if last and (await self._claim(nursery, walk, at + 1) or self._share <= 0):
                return True
        return await self._claim(nursery, walk, len(walk.rows))

    async def _claim(self, nursery: trio.Nursery, walk: Walk, at: int) -> bool:
        """Claim the taken rows, across all processes, and hand them to runners. Returns whether the scanner teleports,
        because another process has a row. `at`: the index of the page's next row."""
        elsewhere = self.worker.elsewhere
        if elsewhere is not None:
            return await self._claim_elsewhere(elsewhere, nursery, walk, at)
        for dirty in walk.taken:
            self._begin(nursery, walk.table, dirty)
        walk.taken = []
        return False

    async def _claim_elsewhere(self, elsewhere: Elsewhere, nursery: trio.Nursery, walk: Walk, at: int) -> bool:
        """Like `_claim`, but asks the owner. It also asks for later rows of the page, so that it rarely gets no row at
        all."""
        worker, table = self.worker, walk.table
        while walk.taken:
            instead = await self._instead(walk, at)
            wanted = [*walk.taken, *instead]
            self.counters.asked += 1
            states = await elsewhere.take(table, wanted, len(walk.taken), halts=worker.options.teleport)
            tried, walk.taken = walk.taken, []
            left = 0  # slots to release
            for dirty, state in zip(tried, states[: len(tried)], strict=True):
                if state == CLAIMED:
                    self._begin(nursery, table, dirty)
                elif state == FREE and not self._jumps(walk):
                    walk.taken.append(dirty)
                else:
                    left += 1
                    self._unlock(table, dirty)
            now = trio.current_time()
            for dirty, state in zip(instead, states[len(tried) :], strict=True):
                if state != CLAIMED:
                    continue
                # Another scanner of this process may have run the row meanwhile, and the run may have failed (N6).
                acks = [ack for ack in dirty.acks if worker.claimable(table, dirty.row, ack, now)]
                if acks and self._takes(table, dirty.row):
                    failing = worker.begin_row(table, dirty.row, acks)
                    self._begin(nursery, table, dirty._replace(acks=acks, failing=failing))
                    left -= 1
                elif worker.rows.holder(table, dirty.row) is None:  # otherwise, that scanner runs or releases it
                    elsewhere.let_go((table, dirty.row))
            assert left >= 0, "no more rows are given than there are slots"
            for _ in range(left):
                self._slots.release()
            if HELD in states:
                self.counters.met += 1
                self.counters.refused += CLAIMED not in states
                if self._jumps(walk):
                    return True
        return False

    async def _instead(self, walk: Walk, at: int) -> list[Dirty]:
        """Further rows of the page to ask for, in case other processes have the first ones."""
        found: list[Dirty] = []
        most = _INSTEAD_MAX  # claims on rows further on in a page mostly succeed
        for row, cells in walk.rows[at : at + most]:
            if self.worker.rows.holder(walk.table, row) is None and not self._is_elsewhere(walk.table, row, cells):
                acks = await self._wanted_now(walk.table, row, cells)
                # N6: from the moment at which a scanner asks for a failed row, the row counts towards the limit of
                # failing rows. So no failed row is asked for here, because these further rows may not be needed.
                if acks and not self.worker.has_failed(walk.table, row, acks):
                    found.append(Dirty(row, acks, newest_of(cells), oldest_root(cells, acks)))
        return found

    def _begin(self, nursery: trio.Nursery, table: str, dirty: Dirty) -> None:
        """Hand a row to the next runner."""
        self.counters.claims += 1
        self._share -= 1
        self._runners.hand(nursery, Ready(table, dirty.row, dirty.acks, dirty.failing))

    def _takes(self, table: str, row: bytes) -> bool:
        """Lock the row in this process. Returns False if another scanner has it."""
        return not self.worker.options.row_locks or self.worker.rows.take(table, row, self.number)

    def _let_go(self, table: str, dirty: Dirty) -> None:
        """Release the lock and the slot of a row that this scanner does not run."""
        self._unlock(table, dirty)
        self._slots.release()

    def _unlock(self, table: str, dirty: Dirty) -> None:
        """Release the row's lock, but keep the slot."""
        if self.worker.end_row(dirty.acks, failing=dirty.failing, ran=False):
            self.worker.wake_up()  # a scanner that skipped other failed rows because of this one looks again
        if self.worker.options.row_locks:
            self.worker.rows.release(table, dirty.row)
            if self.worker.elsewhere is not None:
                self.worker.elsewhere.let_go((table, dirty.row))

    def _is_elsewhere(self, table: str, row: bytes, cells: list[ScanCell]) -> bool:
        """Whether another process has the row, as far as is known."""
        elsewhere = self.worker.elsewhere
        if elsewhere is None:
            return False
        until = elsewhere.waits((table, row), newest_of(cells), trio.current_time())
        if until:
            self._due = min(self._due, until)
        return bool(until)

    def _jumps(self, walk: Walk) -> bool:
        """Whether the scanner teleports, after it has encountered another one."""
        return self.worker.options.teleport and self.counters.claims > walk.claims

    def _wanted(self, table: str, row: bytes, acks: Iterable[int]) -> list[int]:
        """Those of a row's acknowledgement columns whose observers may run now, if they are due."""
        level, claimable, now = self._level, self.worker.claimable, trio.current_time()
        if level is not None:
            acks = [ack for ack in acks if observer_of(ack) in level]
        return [ack for ack in acks if claimable(table, row, ack, now)]

    async def _wanted_now(self, table: str, row: bytes, cells: list[ScanCell]) -> list[int]:
        """The acknowledgement columns for which a row has notify cells, and whose observers may run now. Reads what the
        notify cells do not tell."""
        worker, now = self.worker, trio.current_time()
        # If there are as many cells as a scan reads, those of further observers may have been cut off (N11).
        all_read = len(cells) < CELLS_PER_ROW
        acks = self._wanted(table, row, columns_of(cells) if all_read else await self._waiting(table, row))
        if not worker.delays:
            return acks
        due = []
        for ack in acks:
            at = await worker.due(table, row, ack, cells, now)
            if at <= now:
                due.append(ack)
            else:
                self._due = min(self._due, at)
        return due

    def _gives_way(self) -> bool:
        """Whether to look for work of a higher priority before using a slot that has just become free."""
        levels = self.worker.levels  # changed, or empty, if observers were paused meanwhile
        if self._level is None or not levels or self._level is levels[0]:
            return False
        self._given += 1
        if self._given <= _WAYS_GIVEN_MAX:
            self._share = 0
            return True
        self._given = 0
        return False

    async def _waiting(self, table: str, row: bytes) -> list[int]:
        """The acknowledgement columns for which a row has notify cells."""
        acks = self.worker.acks(table)
        [found] = await self.worker.engine.driver.store.read(
            [(table, row, [(NOTIFY, ack, 0, TS_MAX, 1) for ack in acks])]
        )
        return [ack for ack, cells in zip(acks, found, strict=True) if cells]
