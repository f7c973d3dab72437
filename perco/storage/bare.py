"""Supplies the write floors and cell counts that an owner needs, over a store that has neither.

    Bare(store, late_s)    floors and counts over any `RowStore`; all of the owner's calls go through it

T13 If a store has no floors, the owner sends no mutations below the floor. When it raises the floor, it waits until no
    mutation that it has already sent below the new floor can still take effect, and no copy of such a mutation. It is
    not enough to wait for unanswered mutations: a second copy of a prewrite that was answered long ago could still
    arrive. A process does not know which mutations a former owner of the store has sent, so it begins as if they had
    been sent just now.
N7  If a store does not count its cells, this class searches the store to count them. The count of a group is valid
    until the next mutation that writes to the group is sent. It is not valid at all if such a mutation may take effect
    during the search: one in flight, or one that was not answered, as long as it may still arrive.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from itertools import product

import trio

from perco.storage.cells import (
    TS_MAX,
    Mutation,
    NoReply,
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

_CELLS = 1 << 16  # cells that one query of a search returns for a row

Sent = tuple[float, int]  # until when a call may take effect, and the smallest timestamp that it names
Where = tuple[str, str]  # a table, and one of its groups


class Bare:
    """Loop thread only.

    Args:
        store: a store to which only this process sends mutations.
        tables: returns the names of its tables now.
        late_s: for how many seconds after the end of a call its mutations, or copies of them, may still take effect.
            Create this object only when a former owner can no longer send anything.
        former_s: the same, counted from now, for mutations of a former owner that may still be in flight.
    """

    chaining = None
    deferring = None
    prompt = None

    floor: int

    def __init__(
        self, store: RowStore, tables: Callable[[], list[str]], late_s: float, *, former_s: float | None = None
    ) -> None:
        self._store, self._tables, self._late_s = store, tables, late_s
        first_s = late_s if former_s is None else former_s
        self.floor = 0
        self._calls: dict[int, tuple[int, set[Where]]] = {}  # in flight: smallest timestamp named, and what is written
        self._number = 0  # of the last call
        self._sent: deque[Sent] = deque([(trio.current_time() + first_s, 0)])  # by calls that have ended
        self._ended = trio.Event()
        self._unanswered: deque[tuple[float, set[Where]]] = deque()  # (until when it may take effect, what it writes)
        self._sends: Counter[Where] = Counter()  # how many calls that write to a group have been made
        self._found: dict[Where, tuple[int, int]] = {}  # `_sends` before the search (-1: not valid), and cells
        self._looking = trio.Lock()

    @property
    def groups(self) -> bool:
        return self._store.groups

    @property
    def once(self) -> bool:
        return self._store.once

    @property
    def logs(self) -> bool:
        return self._store.logs

    @property
    def near(self) -> bool:
        return self._store.near

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

    # A KeyboardInterrupt before the end would leave the call in `_calls` for good.
    @trio.lowlevel.enable_ki_protection
    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        """Apply mutations. Those below the floor are refused, and not sent (T13)."""
        verdicts: list[Verdict] = [Refused(0, -1)] * len(mutations)
        sent = []
        for index, mutation in enumerate(mutations):
            assert self._store.groups or len(mutation.rows) == 1, "S1: this store has no groups"
            if mutation.floor_ts is None or mutation.floor_ts >= self.floor:
                sent.append(index)
        if not sent:
            await trio.lowlevel.checkpoint()
            return verdicts
        number = self._number = self._number + 1
        lowest = min((ts for i in sent if (ts := mutations[i].floor_ts) is not None), default=TS_MAX)
        writes = {(mutations[i].table, write[0]) for i in sent for row in mutations[i].rows for write in row[2]}
        self._sends.update(writes)
        self._calls[number] = lowest, writes
        answered = False
        try:
            told = await self._store.apply([mutations[i] for i in sent])
            answered = not any(isinstance(verdict, NoReply) for verdict in told)
        finally:
            del self._calls[number]
            self._note_sent(lowest, None if answered else writes)
            self._ended.set()
            self._ended = trio.Event()
        for index, verdict in zip(sent, told, strict=True):
            verdicts[index] = verdict
        return verdicts

    def _note_sent(self, lowest: int, unanswered: set[Where] | None) -> None:
        """Note the mutations of a call that has just ended, and forget those that can no longer take effect."""
        now = trio.current_time()
        while self._sent and self._sent[0][0] <= now:
            self._sent.popleft()
        if lowest < TS_MAX:
            self._sent.append((now + self._late_s, lowest))
        if unanswered is not None:
            self._unanswered.append((now + self._late_s, unanswered))

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

    async def look(self, tables: Collection[str], groups: Sequence[str], *, again: bool = False) -> None:
        """See `OwnerStore.look`."""
        if again:
            for where in product(tables, groups):
                self._found[where] = -1, self.count(*where)
        for where in product(tables, groups):
            if self.knows(*where):
                continue
            async with self._looking:  # tasks that wait for the same search share it
                if not self.knows(*where):
                    before = -1 if self._may_change(where) else self._sends[where]
                    self._found[where] = before, await self._cells(*where)

    def count(self, table: str, group: str) -> int:
        """See `OwnerStore.count`: as of the last look."""
        return self._found.get((table, group), (-1, 0))[1]

    def knows(self, table: str, group: str) -> bool:
        """See `OwnerStore.knows`."""
        found = self._found.get((table, group))
        return found is not None and found[0] == self._sends[table, group]

    def _may_change(self, where: Where) -> bool:
        """Whether a mutation that writes there, and that was sent earlier, may still take effect."""
        now = trio.current_time()
        while self._unanswered and self._unanswered[0][0] <= now:
            self._unanswered.popleft()
        unanswered = (writes for _, writes in self._unanswered)
        return any(where in writes for writes in (*(writes for _, writes in self._calls.values()), *unanswered))

    async def _cells(self, table: str, group: str) -> int:
        return (await self._cells_of(table, (group,)))[0]

    async def _cells_of(self, table: str, groups: Sequence[str]) -> list[int]:
        """How many cells there are in each of these groups. All cells of a row are counted as of one moment."""
        found, start = [0] * len(groups), b""
        queries = tuple(ScanQuery(group, None, 0, TS_MAX, _CELLS, values=False) for group in groups)
        while True:
            page = await self._store.scan(ScanRequest(table, start, None, queries))
            for _, cells in page.rows:
                found = [count + len(each) for count, each in zip(found, cells, strict=True)]
            if page.next is None:
                return found
            start = page.next
