"""One pass: makes the rows of the target equal to those of the source.

M1  A pass reads both stores in the order of their rows, and writes what differs. So it can be started again at any
    time, and it writes nothing if both stores are equal. Its memory is bounded: some pages of each store, and a part of
    a row that has more cells than fit in a page.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from perco.copying.difference import BYTES_MAX, Cells, Digest, cells_of, halves, in_parts, writes_between
from perco.errors import Unavailable
from perco.storage import APPLIED, TS_MAX, Failed, Mutation, NoReply, RowStore, ScanQuery, ScanRequest

_CELLS: Final = 1024  # read at once from one group of a row
_ALL: Final = 1 << 30
_ROWS: Final = 1024  # in a page
_AHEAD: Final = 2  # pages that have been read but not used yet
_TOLD: Final = 10_000  # cells between two reports
_TOGETHER: Final = 128  # mutations in one call
_TRIES: Final = 24
_AGAIN_S: Final = 0.1  # after a mutation that may not have been applied; doubled each time
_AGAIN_MAX_S: Final = 5.0
FLOOR: Final = 2  # once the target has raised its floor to this, no mutation of a pass can still take effect (T13)

Skip = Callable[[bytes], bool]


@asynccontextmanager
async def tasks() -> AsyncIterator[trio.Nursery]:
    """A nursery that raises the first error of a task or of its block, without the exception group."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@dataclass(slots=True)
class Sums:
    """How many rows and cells were compared, how many cells were written or deleted; `unsure`: mutations that may not
    have been applied, and were sent again."""

    rows: int = 0
    cells: int = 0
    written: int = 0
    deleted: int = 0
    unsure: int = 0

    @property
    def changed(self) -> int:
        return self.written + self.deleted


class Rows:
    """The rows of a table in order, read ahead by a task of the nursery. `groups`: empty if the store lacks the
    table; then there are no rows."""

    def __init__(self, nursery: trio.Nursery, store: RowStore, table: str, groups: Sequence[str]) -> None:
        self._store, self._table, self._groups = store, table, groups
        self._send, self._receive = trio.open_memory_channel[list[tuple[bytes, Cells, bool]]](_AHEAD)
        self._page: list[tuple[bytes, Cells, bool]] = []
        nursery.start_soon(self._read)

    async def _read(self) -> None:
        queries = tuple(ScanQuery(group, None, n=_CELLS) for group in self._groups)
        start: bytes | None = b"" if self._groups else None
        async with self._send:
            while start is not None:
                page = await self._store.scan(ScanRequest(self._table, start, None, queries, rows_max=_ROWS))
                start = page.next
                if page.rows:
                    await self._send.send([self._row(row, found) for row, found in page.rows])

    def _row(self, row: bytes, found: list[list[tuple[int, int, bytes]]]) -> tuple[bytes, Cells, bool]:
        return row, cells_of(self._groups, found), any(len(cells) >= _CELLS for cells in found)

    async def next(self) -> tuple[bytes, Cells, bool] | None:
        """The next row, its cells, and whether there may be more cells in it; None at the end."""
        if not self._page:
            try:
                self._page = (await self._receive.receive())[::-1]
            except trio.EndOfChannel:
                return None
        return self._page.pop()


async def part_of(
    store: RowStore, table: str, groups: Sequence[str], row: bytes, low: int, high: int, n: int
) -> tuple[Cells, bool]:
    """The cells of a row with timestamps from `low` to `high`, and whether there may be more than `n` in a group."""
    if not groups:
        return {}, False
    queries = tuple(ScanQuery(group, None, low, high, n) for group in groups)
    request = ScanRequest(table, row, row + b"\0", queries, rows_max=1, bytes_max=_ALL, seeks_max=_ALL)
    page = await store.scan(request)
    found = page.rows[0][1] if page.rows else [[] for _ in groups]
    return cells_of(groups, found), any(len(cells) >= n for cells in found)


async def in_ranges(
    stores: Sequence[tuple[RowStore, Sequence[str]]],
    table: str,
    row: bytes,
    use: Callable[[list[Cells]], Awaitable[None]],
) -> None:
    """Call `use` for each part of a row with many cells. A part is, for each store, the row's cells in one range of
    timestamps."""
    ranges = [(0, TS_MAX)]
    while ranges:
        low, high = ranges.pop()
        parts, full = [], False
        for store, groups in stores:
            cells, more = await part_of(store, table, groups, row, low, high, _CELLS)
            parts.append(cells)
            full = full or more
        if full:
            divided = halves({cell: b"" for cells in parts for cell in cells}, low, high)
            if divided is not None:
                ranges += [(divided[1], high), (low, divided[0])]
                continue
            parts = [(await part_of(store, table, groups, row, low, high, _ALL))[0] for store, groups in stores]
        await use(parts)


@dataclass(slots=True)
class Pass:
    """A pass from one store to another. `tell`: called periodically, with the table's name.

    If a store does not have a table, the `groups` of that table are empty.
    """

    source: RowStore
    target: RowStore
    tell: Callable[[str, Sums], None]
    sums: Sums = field(default_factory=Sums)
    _mutations: list[Mutation] = field(default_factory=list)
    _bytes: int = 0

    async def table(
        self, name: str, groups: Sequence[str], target_groups: Sequence[str], skip: Skip = lambda row: False
    ) -> None:
        """Make the target's table equal to the source's. `groups`: the groups of the source's table; `target_groups`:
        the groups of the target's table; `skip`: returns whether to leave a row as it is. Raises: StoreError,
        Corruption."""
        async with tasks() as nursery:
            mine = Rows(nursery, self.source, name, groups)
            theirs = Rows(nursery, self.target, name, target_groups)
            one, other = await mine.next(), await theirs.next()
            while one is not None or other is not None:
                row = min(each[0] for each in (one, other) if each is not None)
                cells: Cells = {}
                former: Cells = {}
                wide = False
                if one is not None and one[0] == row:
                    _, cells, wide = one
                    one = await mine.next()
                if other is not None and other[0] == row:
                    _, former, more = other
                    wide = wide or more
                    other = await theirs.next()
                if skip(row):
                    continue
                self.sums.rows += 1
                if self.sums.rows % _ROWS == 0:
                    self.tell(name, self.sums)
                if not wide:
                    await self._bring_up(name, row, cells, former)
                    continue

                async def use(parts: list[Cells], row: bytes = row) -> None:
                    await self._bring_up(name, row, *parts)

                await in_ranges([(self.source, groups), (self.target, target_groups)], name, row, use)
            await self._apply()
            self.tell(name, self.sums)

    async def _bring_up(self, name: str, row: bytes, cells: Cells, former: Cells) -> None:
        self.sums.cells += len(cells)
        writes = writes_between(cells, former)
        deleted = sum(write[3] is None for write in writes)
        self.sums.deleted += deleted
        self.sums.written += len(writes) - deleted
        for part in in_parts(writes):
            self._mutations.append(Mutation(name, ((row, (), part),), FLOOR - 1, True))
            self._bytes += sum(len(write[3] or b"") for write in part)
            if len(self._mutations) >= _TOGETHER or self._bytes >= 4 * BYTES_MAX:
                await self._apply()

    async def _apply(self) -> None:
        """Send the collected mutations until each has been applied. Applying one twice does no harm (M1). Raises:
        Unavailable, StoreError."""
        mutations, self._mutations, self._bytes = self._mutations, [], 0
        pause_s, said = _AGAIN_S, ""
        for _ in range(_TRIES):
            if not mutations:
                return
            verdicts = await self.target.apply(mutations)
            left: list[Mutation] = []
            for mutation, verdict in zip(mutations, verdicts, strict=True):
                if verdict is APPLIED:
                    continue
                if isinstance(verdict, Failed) and not isinstance(verdict.error, Unavailable):
                    raise verdict.error
                assert isinstance(verdict, Failed | NoReply), "mutations without checks are not refused"
                said = verdict.reason if isinstance(verdict, NoReply) else str(verdict.error)
                left.append(mutation)
            if left:
                self.sums.unsure += len(left)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_MAX_S)
            mutations = left
        if mutations:
            raise Unavailable(f"the target of the copy does not answer: {said}")


async def digest_of(
    store: RowStore,
    table: str,
    groups: Sequence[str],
    skip: Skip = lambda row: False,
    tell: Callable[[int], None] = lambda cells: None,
) -> Digest:
    """The digest of a table. `tell`: called periodically, with the number of cells so far."""
    digest = Digest()
    async with tasks() as nursery:
        rows = Rows(nursery, store, table, groups)
        told = 0
        while (found := await rows.next()) is not None:
            row, cells, wide = found
            if skip(row):
                continue
            if not wide:
                digest.add(row, cells)
            else:

                async def use(parts: list[Cells], row: bytes = row) -> None:
                    digest.add(row, parts[0])

                await in_ranges([(store, groups)], table, row, use)
            if digest.cells - told > _TOLD:
                told = digest.cells
                tell(told)
    return digest
