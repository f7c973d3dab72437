"""What the owner of a store needs, above a store that offers single rows only.

    Bare(store, late_s)    floors and counts over any `RowStore`; all of the owner's calls go through it

T13 A store without floors: what is below the floor is not sent any more, and what was sent is waited for, until neither
    it nor a copy of it can take effect. It is not enough to wait for what was not answered: a second copy of a prewrite
    that was answered long ago could still arrive.
    A process cannot know what a former owner of the store has sent, so it begins as if that had been sent just now.
N7  A store that does not count its cells is searched for them. What was found holds until the next mutation of the
    table is sent; what is found while one is in flight does not hold at all.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

import trio

from perco.storage.cells import (
    TS_MAX,
    Mutation,
    ReadRequest,
    Refused,
    RowCells,
    ScanPage,
    ScanQuery,
    ScanRequest,
    Verdict,
)
from perco.storage.rowstore import RowStore
from perco.storage.tablet import Tablet

_CELLS = 1 << 16  # of a row, in one query of a look

Sent = tuple[float, int]  # until when it may take effect, and the smallest timestamp that it names


class Bare:
    """Loop thread only.

    Args:
        store: a store to which only this process sends mutations. None of them is about several rows.
        tables: returns the names of its tables now.
        late_s: for how long after a call has ended its mutations, or copies of them, may still take effect, in seconds.
    """

    groups = False
    once = False
    chaining = None
    deferring = None
    prompt = None

    floor: int

    def __init__(self, store: RowStore, tables: Callable[[], list[str]], late_s: float) -> None:
        self._store, self._tables, self._late_s = store, tables, late_s
        self.floor = 0
        self._calls: dict[int, tuple[int, Counter[str]]] = {}  # in flight: the smallest timestamp, mutations by table
        self._number = 0  # of calls, so far
        self._sent: deque[Sent] = deque([(trio.current_time() + late_s, 0)])  # by calls that have ended
        self._ended = trio.Event()
        self._sends: Counter[str] = Counter()  # by table, how many mutations were ever sent
        self._found: dict[tuple[str, str], tuple[int, int]] = {}  # by table and group: sends before the look, cells

    def tables(self) -> list[str]:
        return self._tables()

    def tablets_here(self) -> Sequence[Tablet]:
        return ()

    def locate(self, table: str, row: bytes) -> int:
        return self._store.locate(table, row)

    def bounds(self, table: str) -> list[bytes]:
        return self._store.bounds(table)

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        return await self._store.read(requests)

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        return await self._store.read_first(requests, bytes_max)

    async def scan(self, request: ScanRequest) -> ScanPage:
        return await self._store.scan(request)

    # ------------------------------------------------------------ floors

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        """Apply mutations of one row each. Those below the floor are refused, and not sent (T13)."""
        verdicts: list[Verdict] = [Refused(0, -1)] * len(mutations)
        sent = []
        for index, mutation in enumerate(mutations):
            assert len(mutation.rows) == 1, "S1: this store has no groups"
            if mutation.floor_ts is None or mutation.floor_ts >= self.floor:
                sent.append(index)
        if not sent:
            await trio.lowlevel.checkpoint()
            return verdicts
        number = self._number = self._number + 1
        lowest = min((ts for i in sent if (ts := mutations[i].floor_ts) is not None), default=TS_MAX)
        by_table = Counter(mutations[i].table for i in sent)
        self._sends.update(by_table)
        self._calls[number] = lowest, by_table
        try:
            told = await self._store.apply([mutations[i] for i in sent])
        finally:
            del self._calls[number]
            self._note_sent(lowest)
            self._ended.set()
            self._ended = trio.Event()
        for index, verdict in zip(sent, told, strict=True):
            verdicts[index] = verdict
        return verdicts

    def _note_sent(self, lowest: int) -> None:
        """Note what a call that has just ended has sent, and forget what cannot take effect any more."""
        now = trio.current_time()
        while self._sent and self._sent[0][0] <= now:
            self._sent.popleft()
        self._sent.append((now + self._late_s, lowest))

    async def raise_floor(self, ts: int, *, wait: bool) -> None:
        """See `OwnerStore.raise_floor`."""
        await trio.lowlevel.checkpoint()
        self.floor = max(self.floor, ts)
        if not wait:
            return
        while any(lowest < ts for lowest, _ in self._calls.values()):
            await self._ended.wait()
        until = max((until for until, lowest in self._sent if lowest < ts), default=-math.inf)
        if until > trio.current_time():
            await trio.sleep_until(until)

    # ------------------------------------------------------------ counts

    async def look(self, tables: Collection[str], groups: Sequence[str]) -> None:
        """See `OwnerStore.look`."""
        for table in tables:
            for group in groups:
                if self.count(table, group) is None:
                    before = -1 if self._in_flight(table) else self._sends[table]
                    self._found[table, group] = before, await self._cells(table, group)

    def count(self, table: str, group: str) -> int | None:
        """See `OwnerStore.count`."""
        sends, cells = self._found.get((table, group), (-1, 0))
        return cells if sends == self._sends[table] else None

    def _in_flight(self, table: str) -> bool:
        return any(by_table[table] for _, by_table in self._calls.values())

    async def _cells(self, table: str, group: str) -> int:
        found, start = 0, b""
        query = ScanQuery(group, None, 0, TS_MAX, _CELLS, values=False)
        while True:
            page = await self._store.scan(ScanRequest(table, start, None, (query,)))
            found += sum(len(cells) for _, [cells] in page.rows)
            if page.next is None:
                return found
            start = page.next
