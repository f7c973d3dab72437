"""Looks for notify cells and hands rows to the worker.

N8  A scanner starts at a random key of a random tablet and walks on from there, round the whole store. When it meets a
    row on which another scanner runs observers it teleports: it jumps to a new random place, as no bus can, so that
    scanners never clump behind a slow row. It sleeps when a whole tour found nothing: clear the wake flag, look, sleep;
    the wake comes after the notify cells are visible.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import trio

from perco.notify.worker import Worker
from perco.storage import NOTIFY, TS_MAX, ScanQuery, ScanRequest

_CELLS_PER_ROW = 4096
_TELEPORTS_PER_TOUR = 4  # then the tour is finished all the same, so that nothing is passed by


class Place(NamedTuple):
    """A tablet's row range."""

    table: str
    low: bytes
    high: bytes | None


@dataclass(slots=True)
class ScannerCounters:
    """`tours`, `teleports`, `claims`: rows handed over; `met`: rows found held by another scanner."""

    tours: int = 0
    teleports: int = 0
    claims: int = 0
    met: int = 0


def random_row(first: bytes, last: bytes, rng: random.Random) -> bytes:
    """A key between two, about evenly: they are read as fractions after what they have in common."""
    if first >= last:
        return first
    common = 0
    while common < len(first) and first[common] == last[common]:
        common += 1
    low = int.from_bytes(first[common : common + 7].ljust(7, b"\x00"), "big")
    high = int.from_bytes(last[common : common + 7].ljust(7, b"\x00"), "big")
    row = first[:common] + rng.randint(low, high).to_bytes(7, "big")
    return min(max(row, first), last)


class Scanner:
    """One task that looks for work; it may have `slots` runs in flight."""

    def __init__(self, worker: Worker, number: int, slots: int, tables: Callable[[], list[str]]) -> None:
        self.worker, self.number = worker, number
        self.counters = ScannerCounters()
        self.ended = trio.Event()
        self.position: tuple[str, bytes] | None = None
        self._slots = trio.Semaphore(slots)
        self._tables = tables
        self._rng = random.Random(worker.client.random.getrandbits(64))

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    if self.worker.wake.is_set():
                        self.worker.wake = trio.Event()  # clear, then look, then sleep
                    wake, began = self.worker.wake, trio.current_time()
                    if not await self._tour(nursery):
                        await self._sleep(wake, began)
        finally:
            self.ended.set()

    async def _sleep(self, wake: trio.Event, began: float) -> None:
        """Until woken, or until something that waited when the tour began may be tried again (N6)."""
        due = self.worker.backoff.next_due(began)
        with trio.move_on_at(float("inf") if due is None else due):
            await wake.wait()

    def _places(self) -> list[Place]:
        store = self.worker.client.driver.store
        places = []
        for table in self._tables():
            starts = store.bounds(table)
            for low, high in zip(starts, [*starts[1:], None], strict=True):
                places.append(Place(table, low, high))
        return places

    async def _tour(self, nursery: trio.Nursery) -> bool:
        """Walk the whole store once from a random place; whether anything was claimed."""
        self.counters.tours += 1
        teleports = claimed = 0
        while True:
            ahead = await self._random_tour()
            met = False
            for place in ahead:
                found, met = await self._walk(nursery, place, teleports < _TELEPORTS_PER_TOUR)
                claimed += found
                if met:
                    break
            if not met:
                return claimed > 0
            teleports += 1
            self.counters.teleports += 1

    async def _random_tour(self) -> list[Place]:
        """All places, beginning at a random key of a random one, and what was skipped of that one at the end."""
        places = self._places()
        if not places:
            return []
        at = self._rng.randrange(len(places))
        place = places[at]
        row = await self._random_row(place)
        return [
            Place(place.table, row, place.high),
            *places[at + 1 :],
            *places[:at],
            *([Place(place.table, place.low, row)] if row > place.low else []),
        ]

    async def _random_row(self, place: Place) -> bytes:
        first = await self._edge(place, reverse=False)
        if first is None:
            return place.low
        last = await self._edge(place, reverse=True)
        return random_row(first, last if last is not None else first, self._rng)

    async def _edge(self, place: Place, *, reverse: bool) -> bytes | None:
        """The first or last dirty row of a place."""
        query = ScanQuery(NOTIFY, None, 0, TS_MAX, 1)
        request = ScanRequest(place.table, place.low, place.high, (query,), reverse, 1)
        page = await self.worker.client.driver.store.scan(request)
        return page.rows[0][0] if page.rows else None

    async def _walk(self, nursery: trio.Nursery, place: Place, may_teleport: bool) -> tuple[int, bool]:
        """Claim the dirty rows of a place in order. Returns (claimed, met another scanner)."""
        worker, me = self.worker, self.number
        query = ScanQuery(NOTIFY, None, 0, TS_MAX, _CELLS_PER_ROW)
        claimed = 0
        start: bytes | None = place.low
        while start is not None:
            request = ScanRequest(place.table, start, place.high, (query,), False, worker.options.page_rows)
            page = await worker.client.driver.store.scan(request)
            for row, [cells] in page.rows:
                self.position = (place.table, row)
                now = trio.current_time()
                acks = list(dict.fromkeys(c for c, _, _ in cells))
                if len(cells) == _CELLS_PER_ROW:  # one observer's cells may hide another's (N11)
                    acks = await self._waiting(place.table, row)
                acks = [ack for ack in acks if worker.claimable(place.table, row, ack, now)]
                if not acks:
                    continue
                holder = worker.rows.holder(place.table, row)
                if holder == me:
                    continue
                if holder is not None:
                    self.counters.met += 1
                    if worker.options.teleport and may_teleport:
                        return claimed, True
                await self._slots.acquire()
                now = trio.current_time()  # others may have been faster while this one waited
                acks = [ack for ack in acks if worker.claimable(place.table, row, ack, now)]
                if not acks or (worker.options.row_locks and not worker.rows.take(place.table, row, me)):
                    self._slots.release()
                    continue
                claimed += 1
                self.counters.claims += 1
                failing = worker.begin_row(place.table, row, acks)
                nursery.start_soon(self._run_row, place.table, row, acks, failing)
            start = page.next
        return claimed, False

    async def _waiting(self, table: str, row: bytes) -> list[int]:
        """The acks for which a row has notify cells."""
        acks = self.worker.acks(table)
        [found] = await self.worker.client.driver.store.read(
            [(table, row, [(NOTIFY, ack, 0, TS_MAX, 1) for ack in acks])]
        )
        return [ack for ack, cells in zip(acks, found, strict=True) if cells]

    async def _run_row(self, table: str, row: bytes, acks: list[int], failing: bool) -> None:
        try:
            await self.worker.run_row(table, row, acks, failing=failing)
        finally:
            if self.worker.options.row_locks:
                self.worker.rows.release(table, row)
            self._slots.release()
            self.worker.wake_up()  # whoever passed this row by looks again
