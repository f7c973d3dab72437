"""The seam. A row store offers `read`, `scan` and `apply`, each over many rows; it never learns what a lock is.

    read(requests)    -> cells     newest (or oldest) n cells of columns within a timestamp range, one atomic
                                   snapshot per row
    scan(request)     -> page      the same over a key range, in key order, resumable
    apply(mutations)  -> verdicts  per mutation: check, then write, atomically

Everything above works over anything that keeps this contract; wrappers stack on it. `LocalRowStore` is the one over
tablets in this process, of LMDB or of memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Protocol

import trio

from perco.errors import UsageError
from perco.storage.call import Call, Then
from perco.storage.cells import Mutation, ReadRequest, RowCells, ScanPage, ScanRequest, Verdict
from perco.storage.handover import Handover
from perco.storage.tablet import Tablet

# A task that only ever meets data in memory gives way to others this often.
_READS_PER_CHECKPOINT = 64


class RowStore(Protocol):
    """Atomic single rows, and nothing more.

    Attribute `groups`: whether the rows of one mutation are all or nothing (S1). A store without groups is only ever
    given mutations of one row.
    """

    groups: bool

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]: ...
    async def scan(self, request: ScanRequest) -> ScanPage: ...
    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]: ...
    def locate(self, table: str, row: bytes) -> int:
        """The tablet that holds a row, as a number: rows with the same number may form a group."""
        ...

    def bounds(self, table: str) -> list[bytes]:
        """The first row of each tablet of a table, in order."""
        ...


def scan_within(tablet: Tablet, end: bytes | None, request: ScanRequest) -> ScanPage:
    """A page of what lies in a tablet, which holds the rows before `end`; the next one begins in its neighbour, if the
    range goes on there."""
    if request.reverse:
        page = tablet.scan(request._replace(start=max(request.start, tablet.start)))
        ended = page.next is None and tablet.start > request.start
        return ScanPage(page.rows, tablet.start) if ended else page
    inside = end is None or (request.stop is not None and request.stop <= end)
    page = tablet.scan(request if inside else request._replace(stop=end))
    return ScanPage(page.rows, end) if page.next is None and not inside else page


class LocalRowStore:
    """Tablets in this process."""

    groups = True

    def __init__(self) -> None:
        self.handover = Handover()
        self._tables: dict[str, list[Tablet]] = {}
        self._starts: dict[str, list[bytes]] = {}
        self._numbers: dict[int, int] = {}
        self._reads = 0
        self._queues = False  # whether tablets queue what they are given, so that it can still be taken back

    def add_table(self, table: str, tablets: Iterable[Tablet]) -> None:
        """Make a table known; its tablets cover all rows from the empty one on."""
        ordered = sorted(tablets, key=lambda tablet: tablet.start)
        assert ordered, f"table {table} has no tablet"
        assert ordered[0].start == b"", f"no tablet of {table} holds its smallest rows"
        for tablet in ordered:
            self._numbers[id(tablet)] = len(self._numbers)
        self._tables[table] = ordered
        self._queues = all(tablet.queues for tablet in ordered)
        self._starts[table] = [tablet.start for tablet in ordered]

    async def raise_floor(self, ts: int) -> None:
        """Every tablet refuses mutations that name a timestamp below `ts` (T13). When this returns, none of those that
        were let in before is still under way. Who adds a table later raises it again."""
        for tablet in self.tablets():
            await tablet.raise_floor(ts)

    def tablets(self) -> list[Tablet]:
        return [tablet for tablets in self._tables.values() for tablet in tablets]

    def tables(self) -> list[str]:
        return list(self._tables)

    def tablet(self, table: str, row: bytes) -> Tablet:
        tablets = self._tables.get(table)
        if tablets is None:
            raise UsageError(f"there is no table {table!r} in this store; declare it in the schema")
        if len(tablets) == 1:
            return tablets[0]
        return tablets[bisect_right(self._starts[table], row) - 1]

    def _tablet_of(self, mutation: Mutation) -> Tablet:
        table, rows = mutation.table, mutation.rows
        tablet = self.tablet(table, rows[0][0])
        if len(rows) > 1 and len(self._starts[table]) > 1 and any(self.tablet(table, r[0]) is not tablet for r in rows):
            raise UsageError(f"the rows of one mutation lie in different tablets of {table!r}: see RowStore.locate")
        return tablet

    def locate(self, table: str, row: bytes) -> int:
        return self._numbers[id(self.tablet(table, row))]

    def bounds(self, table: str) -> list[bytes]:
        return self._starts[table]

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        """Cells of rows; each row from one state of its tablet, taken after this call began."""
        self._reads += 1
        if self._reads >= _READS_PER_CHECKPOINT:
            self._reads = 0
            await trio.lowlevel.checkpoint()
        out = []
        for table, row, queries in requests:
            out.append(self.tablet(table, row).read(row, queries))
        return out

    async def scan(self, request: ScanRequest) -> ScanPage:
        """A page of rows, from one state of one tablet; a page ends at its tablet's end."""
        await trio.lowlevel.checkpoint()
        tablets, starts = self._tables.get(request.table), self._starts.get(request.table)
        if tablets is None or starts is None:
            raise UsageError(f"there is no table {request.table!r} in this store; declare it in the schema")
        if request.stop is not None and request.stop <= request.start:
            return ScanPage([], None)
        if request.reverse:
            at = len(starts) - 1
            if request.stop is not None:
                at = max(bisect_right(starts, request.stop) - 1, 0)
                if starts[at] == request.stop:  # the stop is not part of the range
                    at -= 1
        else:
            at = bisect_right(starts, request.start) - 1
        return scan_within(tablets[at], starts[at + 1] if at + 1 < len(starts) else None, request)

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        """Verdicts in the order of the mutations. T10: cancelled before it was sent, or not at all."""
        return await self.apply_then(mutations, None)

    # A KeyboardInterrupt between `submit` and the wait would leave a call behind whose task is gone.
    @trio.lowlevel.enable_ki_protection
    async def apply_then(self, mutations: Sequence[Mutation], then: Then | None) -> list[Verdict]:
        """As `apply`, and `then` may decide what to send next, on the loop, before the task is woken.

        Returns the verdicts of what was sent last. Tablets that do not queue never call `then`.
        """
        if not self._queues:
            await trio.lowlevel.checkpoint_if_cancelled()
        call = Call(trio.lowlevel.current_task(), len(mutations), then)
        self.submit(mutations, call)
        del mutations  # while this waits, the queue holds them as long as they are needed
        if call.waiting:
            await trio.lowlevel.wait_task_rescheduled(call.abort)  # delivers a pending cancellation by itself
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
        return call.verdicts  # type: ignore[return-value]

    def apply_behind(self, mutations: Sequence[Mutation], then: Then) -> None:
        """Apply mutations that nobody waits for: `then` is told on the loop, and may send more. It must not raise.

        Only where tablets queue.
        """
        assert self._queues
        self.submit(mutations, Call(None, len(mutations), then))

    @property
    def queues(self) -> bool:
        """Whether verdicts come later, from a writer's thread."""
        return self._queues

    def submit(self, mutations: Sequence[Mutation], call: Call) -> None:
        """Hand mutations to their tablets."""
        if len(mutations) == 1:
            self._tablet_of(mutations[0]).submit(mutations[0], call, 0)
            return
        # Every tablet is found before anything is submitted: an error here means that nothing was sent.
        tablets = [self._tablet_of(mutation) for mutation in mutations]
        for index, mutation in enumerate(mutations):
            tablets[index].submit(mutation, call, index)

    async def aclose(self) -> None:
        """Commit all that is queued, then close. A call may go on from one tablet to another: so all are drained before
        the first is closed."""
        with trio.CancelScope(shield=True):
            busy = True
            while busy:
                busy = False
                for tablet in self.tablets():
                    busy |= await tablet.drain()
            for tablet in self.tablets():
                tablet.refuse()
            for tablet in self.tablets():
                await tablet.aclose()
