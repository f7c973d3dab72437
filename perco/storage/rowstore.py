"""The interface between the protocol and storage. A row store offers `read`, `scan` and `apply`, each over many rows;
it has no notion of a lock.

    read(requests)    -> cells     newest (or oldest) n cells of columns within a timestamp range, one atomic
                                   snapshot per row
    scan(request)     -> page      cells of the rows of a key range, in key order, resumable
    apply(mutations)  -> verdicts  per mutation: check, then write, atomically

All layers above work with any implementation of this interface, and with wrappers around one. `LocalRowStore`
implements it over tablets in this process, in LMDB or in memory.

P1  A row lies in one tablet. When a tablet is split, the rows move to the new tablet in one step of the loop, while no
    mutation of them is queued.
P3  If the rows of a mutation do not lie in one tablet (any more), the mutation fails with TabletSplit, and writes none
    of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Protocol

import trio

from perco.errors import TabletSplit, UsageError
from perco.storage.call import Call, Then
from perco.storage.cells import (
    SEEKS_FEW,
    Failed,
    Mutation,
    Query,
    ReadRequest,
    RowCells,
    ScanPage,
    ScanRequest,
    Verdict,
)
from perco.storage.handover import Handover
from perco.storage.tablet import Tablet
from perco.storage.walking import Leaves, Parts, Space, leaves_of, parts_of

# Reads do not wait for anything, so after this many, other tasks get a turn. A scan that takes few seeks counts as some
# reads, and each row that it finds as one. Before any other scan, other tasks get a turn.
_READS_PER_CHECKPOINT = 64
_READS_PER_SCAN = 4
_FIRST, _FIRST_MAX = 4, 256  # requests of a `read_in_parts` that are sent together: at first, and at most


class Chaining(Protocol):
    """A store whose calls continue on the loop: when their verdicts are in, `then` decides which mutations to send
    next."""

    @property
    def queues(self) -> bool:
        """Whether verdicts arrive later, not at once."""
        ...

    async def apply_then(self, mutations: Sequence[Mutation], then: Then | None) -> list[Verdict]: ...
    def apply_behind(self, mutations: Sequence[Mutation], then: Then) -> None: ...


class Deferring(Protocol):
    """A store that gathers mutations, and can wait to construct a mutation until its batch has been closed."""

    async def apply_late(
        self, table: str, row: bytes, size: int, make: Callable[[], Mutation | None]
    ) -> Verdict | None: ...


class Prompt(Protocol):
    """A store that answers without an await, and takes mutations without a task that waits for them."""

    def find_row(self, table: str, row: bytes, queries: Sequence[Query]) -> RowCells: ...
    def find_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]: ...
    def find_page(self, request: ScanRequest) -> ScanPage: ...
    def find_leaves(
        self, table: str, start: bytes, stop: bytes | None, cells: int, space: Space | None = None
    ) -> Leaves | None:
        """The leaves with the rows from `start` on, up to `stop` or the end of the tablet: more than `cells` cells, if
        there are so many and they do not take too many pages. None: the tablet has no file. `space`: where to.

        Raises: Corruption; TabletSplit; Unavailable, also if another file is just taking the place of the tablet's.
        """
        ...

    def find_parts(self, table: str, start: bytes, stop: bytes | None, least: int) -> Parts | None:
        """Where to cut the rows from `start` up to `stop`, which lie in one tablet: the tablet has at least so many
        parts, if it has enough cells. None: it has no file. Raises: as `find_leaves`."""
        ...

    def submit(self, mutations: Sequence[Mutation], call: Call) -> None: ...


class RowReads(Protocol):
    """The operations of a row store that only read."""

    @property
    def prompt(self) -> Prompt | None: ...
    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]: ...
    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        """Like `read`, but only for the first requests, at least one: it stops once the values found have `bytes_max`
        bytes in total. A remote store instead stops when a message is full."""
        ...

    async def scan(self, request: ScanRequest) -> ScanPage: ...
    def bounds(self, table: str) -> list[bytes]:
        """The first row of each tablet of a table, in order."""
        ...


class RowStore(RowReads, Protocol):
    """Atomic operations on single rows, and nothing more. Its attributes say what else a store offers.

    Attributes:
        groups: whether the rows of one mutation are all or nothing (S1). A store without groups is only ever given
            mutations of one row.
        once: whether a mutation takes effect at most once. If it may take effect twice, perco does not commit in one
            step (C6).
        logs: whether its tables can keep logs of their changes (E1), which a scan with `log` reads.
        near: whether it reads rows in this process, without asking a server.
        chaining, deferring, prompt: see `Chaining`, `Deferring`, `Prompt`; None: the store does not offer it.
    """

    @property
    def groups(self) -> bool: ...
    @property
    def once(self) -> bool: ...
    @property
    def logs(self) -> bool: ...
    @property
    def near(self) -> bool: ...
    @property
    def chaining(self) -> Chaining | None: ...
    @property
    def deferring(self) -> Deferring | None: ...
    def tablets_here(self) -> Sequence[Tablet]:
        """The tablets that this process has open; none if other processes have them."""
        ...

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        """The verdict of each mutation, in order. Except for bugs, this raises only if nothing was sent: UsageError,
        SessionEnded, a cancellation."""
        ...

    def locate(self, table: str, row: bytes) -> int:
        """The tablet that holds a row, as a number: rows with the same number may form a group."""
        ...


class OwnerStore(RowStore, Protocol):
    """A row store with the further methods that its owner needs."""

    def tables(self) -> list[str]: ...
    async def raise_floor(self, ts: int, *, wait: bool) -> None:
        """From now on, refuse mutations that name a timestamp below `ts` (T13). With `wait`, return only when no such
        mutation that was sent earlier can still take effect."""
        ...

    async def look(self, tables: Collection[str], groups: Sequence[str], *, again: bool = False) -> None:
        """Find out how many cells there are, if the store does not count them; with `again`, even if the count is
        known."""
        ...

    def count(self, table: str, group: str) -> int:
        """How many cells a group of a table has, as far as is known."""
        ...

    def knows(self, table: str, group: str) -> bool:
        """Whether `count` is exact at this moment; otherwise a look is needed."""
        ...


def read_first_of(
    requests: Sequence[ReadRequest], bytes_max: int, tablet_of: Callable[[str, bytes], Tablet | None]
) -> list[RowCells] | None:
    """Cells of the first rows, until their values have `bytes_max` bytes; None: one of these rows has no tablet."""
    out: list[RowCells] = []
    size = 0
    for table, row, queries in requests:
        if size >= bytes_max:
            break
        tablet = tablet_of(table, row)
        if tablet is None:
            return None
        found = tablet.read(row, queries)
        out.append(found)
        size += sum(len(value) for cells in found for _, value in cells)
    return out


async def read_in_parts(
    read: Callable[[Sequence[ReadRequest]], Awaitable[list[RowCells]]], requests: Sequence[ReadRequest], bytes_max: int
) -> list[RowCells]:
    """`RowStore.read_first` of a store whose reads take a round trip: a few requests first, then as many as are likely
    to fit."""
    out: list[RowCells] = []
    size = 0
    while len(out) < len(requests) and (size < bytes_max or not out):
        more = _FIRST if not out else max(1, (bytes_max - size) * len(out) // max(size, 1))
        for found in await read(requests[len(out) : len(out) + min(more, _FIRST_MAX)]):
            if out and size >= bytes_max:
                break
            out.append(found)
            size += sum(len(value) for cells in found for _, value in cells)
    if not requests:
        await trio.lowlevel.checkpoint()
    return out


def scan_within(tablet: Tablet, end: bytes | None, request: ScanRequest) -> ScanPage:
    """A page of a scan within a tablet, which holds the rows before `end`. The next page begins in the neighbouring
    tablet, if the range continues there."""
    if request.reverse:
        page = tablet.scan(request._replace(start=max(request.start, tablet.start)))
        ended = page.next is None and tablet.start > request.start
        return ScanPage(page.rows, tablet.start) if ended else page
    inside = end is None or (request.stop is not None and request.stop <= end)
    page = tablet.scan(request if inside else request._replace(stop=end))
    return ScanPage(page.rows, end) if page.next is None and not inside else page


class LocalRowStore:
    """A row store over tablets in this process."""

    handover: Handover

    groups = True
    once = True
    logs = True
    near = True
    deferring = None

    @property
    def chaining(self) -> Chaining:
        return self

    @property
    def prompt(self) -> Prompt:
        return self

    def tablets_here(self) -> Sequence[Tablet]:
        return self.tablets()

    def __init__(self) -> None:
        self.handover = Handover()
        # First rows, and tablets. The lists are replaced, never changed: other threads read them too.
        self._tables: dict[str, tuple[list[bytes], list[Tablet]]] = {}
        self._numbers: dict[int, int] = {}
        self._reads = 0
        self._queues = False  # whether tablets queue mutations, which can then still be withdrawn

    def add_table(self, table: str, tablets: Iterable[Tablet]) -> None:
        """Register a table; its tablets cover all rows from the empty one on."""
        ordered = sorted(tablets, key=lambda tablet: tablet.start)
        assert ordered, f"table {table} has no tablet"
        assert ordered[0].start == b"", f"no tablet of {table} holds its smallest rows"
        for tablet in ordered:
            self._number(tablet)
        self._tables[table] = [tablet.start for tablet in ordered], ordered
        self._queues = all(tablet.queues for tablet in ordered)

    def _number(self, tablet: Tablet) -> None:
        self._numbers[id(tablet)] = len(self._numbers)

    def add_split(self, tablet: Tablet, other: Tablet) -> None:
        """Give to the tablet `other` the rows of a tablet at or above `other.start` (P1)."""
        starts, tablets = self._tables[tablet.table]
        at = tablets.index(tablet) + 1
        assert tablet.start < other.start
        assert at == len(starts) or other.start < starts[at]
        self._number(other)
        self._tables[tablet.table] = [*starts[:at], other.start, *starts[at:]], [*tablets[:at], other, *tablets[at:]]

    def stop_of(self, tablet: Tablet) -> bytes | None:
        """The first row after those of a tablet; None: the tablet is the last of its table."""
        starts, tablets = self._tables[tablet.table]
        at = tablets.index(tablet) + 1
        return starts[at] if at < len(starts) else None

    async def raise_floor(self, ts: int, *, wait: bool) -> None:
        """Make every tablet refuse mutations that name a timestamp below `ts` (T13). When this returns, with or without
        `wait`, no mutation that was admitted earlier is still in flight. A table that is added later needs another
        call."""
        raised: set[Tablet] = set()
        while left := [tablet for tablet in self.tablets() if tablet not in raised]:  # they may be split meanwhile
            for tablet in left:
                await tablet.raise_floor(ts)
            raised.update(left)

    def tablets(self) -> list[Tablet]:
        return [tablet for _, tablets in self._tables.values() for tablet in tablets]

    def tables(self) -> list[str]:
        return list(self._tables)

    async def look(self, tables: Collection[str], groups: Sequence[str], *, again: bool = False) -> None:
        """Do nothing: tablets count their cells themselves."""

    def count(self, table: str, group: str) -> int:
        """See `OwnerStore.count`."""
        return sum(tablet.entries(group) for tablet in self._tables[table][1]) if table in self._tables else 0

    def knows(self, table: str, group: str) -> bool:
        """Always true: tablets count their cells."""
        return True

    def _of(self, table: str) -> tuple[list[bytes], list[Tablet]]:
        found = self._tables.get(table)
        if found is None:
            raise UsageError(f"there is no table {table!r} in this store; declare it in the schema")
        return found

    def tablet(self, table: str, row: bytes) -> Tablet:
        starts, tablets = self._tables.get(table) or self._of(table)
        return tablets[0] if len(tablets) == 1 else tablets[bisect_right(starts, row) - 1]

    def _tablet_of(self, mutation: Mutation) -> Tablet | None:
        """The tablet that has the mutation's rows; None: they lie in different tablets (P3)."""
        starts, tablets = self._tables.get(mutation.table) or self._of(mutation.table)
        if len(tablets) == 1:
            return tablets[0]
        rows = mutation.rows
        at = bisect_right(starts, rows[0][0])
        if len(rows) > 1 and any(bisect_right(starts, row[0]) != at for row in rows):
            return None
        return tablets[at - 1]

    def locate(self, table: str, row: bytes) -> int:
        return self._numbers[id(self.tablet(table, row))]

    def bounds(self, table: str) -> list[bytes]:
        return self._of(table)[0]

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

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        """See `RowStore.read_first`."""
        await trio.lowlevel.checkpoint()
        return self.find_first(requests, bytes_max)

    def find_row(self, table: str, row: bytes, queries: Sequence[Query]) -> RowCells:
        """Like `read` of one row, but without an await."""
        return self.tablet(table, row).read(row, queries)

    def find_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        """Like `read_first`, but without an await."""
        found = read_first_of(requests, bytes_max, self.tablet)
        assert found is not None, "all tablets are here"
        return found

    def find_leaves(
        self, table: str, start: bytes, stop: bytes | None, cells: int, space: Space | None = None
    ) -> Leaves | None:
        tablet = self.tablet(table, start)
        return leaves_of(tablet, start, stop, self.stop_of(tablet), cells, space)

    def find_parts(self, table: str, start: bytes, stop: bytes | None, least: int) -> Parts | None:
        return parts_of(self.tablet(table, start), start, stop, least)

    async def scan(self, request: ScanRequest) -> ScanPage:
        """A page of rows, from one state of one tablet; a page ends at its tablet's end."""
        self._reads += _READS_PER_SCAN  # first: a scan that fails counts, too
        if self._reads > _READS_PER_CHECKPOINT or request.seeks_max > SEEKS_FEW:
            self._reads = 0
            await trio.lowlevel.checkpoint()
        page = self.find_page(request)
        self._reads += len(page.rows)
        return page

    def find_page(self, request: ScanRequest) -> ScanPage:
        """Like `scan`, but without an await."""
        starts, tablets = self._of(request.table)
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
        """Apply mutations; returns their verdicts, in order. A call is cancelled before any mutation is sent, or not at
        all (T10)."""
        return await self.apply_then(mutations, None)

    # A KeyboardInterrupt between `submit` and the wait would leave behind a call whose task is gone.
    @trio.lowlevel.enable_ki_protection
    async def apply_then(self, mutations: Sequence[Mutation], then: Then | None) -> list[Verdict]:
        """Like `apply`, but `then` may decide, on the loop, which mutations to send next, before the task is woken.

        Returns the verdicts of the last mutations sent. Tablets that do not queue never call `then`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()  # T10: `submit` may close the batch at once
        call = Call(trio.lowlevel.current_task(), len(mutations), then)
        self.submit(mutations, call)
        del mutations  # while this waits, the queue holds them as long as they are needed
        if call.waiting:
            await trio.lowlevel.wait_task_rescheduled(call.abort)  # delivers a pending cancellation by itself
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
        return call.verdicts  # type: ignore[return-value]

    def apply_behind(self, mutations: Sequence[Mutation], then: Then) -> None:
        """Apply mutations for which no task waits: `then` gets the verdicts on the loop, and may send more. `then` must
        not raise. Call this only if tablets queue mutations.
        """
        assert self._queues
        call = Call(None, len(mutations), then)
        self.submit(mutations, call)
        if not call.waiting:  # P3: there was no tablet for any of them
            call.resubmitted(self.submit)

    @property
    def queues(self) -> bool:
        """Whether verdicts come later, from a writer's thread."""
        return self._queues

    def submit(self, mutations: Sequence[Mutation], call: Call) -> None:
        """Hand mutations to their tablets."""
        if len(mutations) == 1 and (only := self._tablet_of(mutations[0])) is not None:
            only.submit(mutations[0], call, 0)
            return
        # Every tablet is found before anything is submitted: an error here means that nothing was sent.
        tablets = [self._tablet_of(mutation) for mutation in mutations]
        for index, mutation in enumerate(mutations):
            tablet = tablets[index]
            if tablet is None:
                call.answer(index, Failed(TabletSplit(mutation.table)))
            else:
                tablet.submit(mutation, call, index)

    def submit_held(self, held: Sequence[tuple[Mutation, Call, int]]) -> None:
        """Pass on the mutations that a tablet held while it was split."""
        for mutation, call, index in held:
            tablet = self._tablet_of(mutation)
            if tablet is None:
                call.arrived(index, Failed(TabletSplit(mutation.table)), self.submit)
            else:
                tablet.submit(mutation, call, index)

    async def aclose(self) -> None:
        """Commit all queued mutations, then close. A call may continue in another tablet, so all tablets are drained
        before the first one is closed."""
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
            self.handover.completing.close()
