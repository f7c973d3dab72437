"""One pass over a store: makes the rows of another one equal to its own.

M1  A pass reads each range of rows in both stores and writes what differs. So it can be started again at any time,
    and it writes nothing if all is equal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import trio

from perco.copying.difference import Cells, Digest, cells_of, in_parts, writes_between
from perco.errors import Unavailable
from perco.storage import APPLIED, Failed, Mutation, NoReply, RowStore, ScanQuery, ScanRequest

_ALL: Final = (1 << 30) - 1  # cells of a group in a row
_ROWS: Final = 1024  # of a page
_AHEAD: Final = 4  # pages that have been read and not written yet
_TRIES: Final = 16
_AGAIN_S: Final = 0.1  # after a lost reply; doubled each time
FLOOR: Final = 2  # once the target has raised its floor to this, no mutation of a pass can still take effect (T13)

Rows: TypeAlias = list[tuple[bytes, Cells]]
Page: TypeAlias = tuple[bytes, "bytes | None", Rows]  # from a row on, up to another; None: to the end


@asynccontextmanager
async def tasks() -> AsyncIterator[trio.Nursery]:
    """A nursery that raises the error of a task, or of its block, and not a group of it."""
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
    """How many rows and cells were compared, how many cells were written or deleted; `unsure`: replies that were lost,
    each to a mutation that was then sent again."""

    rows: int = 0
    cells: int = 0
    written: int = 0
    deleted: int = 0
    unsure: int = 0

    @property
    def changed(self) -> int:
        return self.written + self.deleted


@dataclass(slots=True)
class Pass:
    """A pass from one store to another. `tell`: called after each page, with the table's name.

    `skip`: rows that are left as they are in the target.
    """

    source: RowStore
    target: RowStore
    tell: Callable[[str, Sums], None]
    sums: Sums = field(default_factory=Sums)

    async def table(self, name: str, groups: Sequence[str], skip: Callable[[bytes], bool] = lambda row: False) -> None:
        """Make a table of the target equal. Raises: StoreError, Corruption."""
        send, receive = trio.open_memory_channel[Page](_AHEAD)
        async with tasks() as nursery:
            nursery.start_soon(self._read, name, groups, send)
            async for page in receive:
                await self._bring_up(name, groups, page, skip)
                self.tell(name, self.sums)

    async def _read(self, name: str, groups: Sequence[str], send: trio.MemorySendChannel[Page]) -> None:
        start: bytes | None = b""
        async with send:
            while start is not None:
                first = start
                rows, start = await rows_from(self.source, name, groups, first, None)
                await send.send((first, start, rows))

    async def _bring_up(self, name: str, groups: Sequence[str], page: Page, skip: Callable[[bytes], bool]) -> None:
        start, stop, rows = page
        there: dict[bytes, Cells] = {}
        after: bytes | None = start
        while after is not None:
            found, after = await rows_from(self.target, name, groups, after, stop)
            there.update(found)
        mutations = []
        for row, cells in rows:
            self.sums.rows += 1
            self.sums.cells += len(cells)
            mutations += self._of_row(name, row, cells, there.pop(row, {}), skip)
        for row, former in there.items():
            mutations += self._of_row(name, row, {}, former, skip)
        await self._apply(mutations)

    def _of_row(
        self, name: str, row: bytes, cells: Cells, former: Cells, skip: Callable[[bytes], bool]
    ) -> list[Mutation]:
        if skip(row):
            return []
        writes = writes_between(cells, former)
        deleted = sum(write[3] is None for write in writes)
        self.sums.deleted += deleted
        self.sums.written += len(writes) - deleted
        return [Mutation(name, ((row, (), part),), FLOOR - 1, True) for part in in_parts(writes)]

    async def _apply(self, mutations: list[Mutation]) -> None:
        """Send them until each is made: to make one twice does no harm (M1). Raises: Unavailable, StoreError."""
        pause_s = _AGAIN_S
        for _ in range(_TRIES):
            if not mutations:
                return
            verdicts = await self.target.apply(mutations)
            left: list[Mutation] = []
            for mutation, verdict in zip(mutations, verdicts, strict=True):
                if isinstance(verdict, Failed):
                    raise verdict.error
                if verdict is not APPLIED:
                    assert isinstance(verdict, NoReply), "mutations without checks are not refused"
                    left.append(mutation)
            if left:
                self.sums.unsure += len(left)
                await trio.sleep(pause_s)
                pause_s *= 2
            mutations = left
        if mutations:
            raise Unavailable("the target of the copy does not answer")


async def rows_from(
    store: RowStore, table: str, groups: Sequence[str], start: bytes, stop: bytes | None
) -> tuple[Rows, bytes | None]:
    """A page of a range of a table, and where the next one begins; None: it was the last."""
    queries = tuple(ScanQuery(group, None, n=_ALL) for group in groups)
    page = await store.scan(ScanRequest(table, start, stop, queries, rows_max=_ROWS))
    return [(row, cells_of(groups, found)) for row, found in page.rows], page.next


async def digest_of(
    store: RowStore,
    table: str,
    groups: Sequence[str],
    skip: Callable[[bytes], bool] = lambda row: False,
    tell: Callable[[int], None] = lambda cells: None,
) -> Digest:
    """The digest of a table. `tell`: called after each page, with the number of cells so far."""
    digest = Digest()
    start: bytes | None = b""
    while start is not None:
        rows, start = await rows_from(store, table, groups, start, None)
        for row, cells in rows:
            if not skip(row):
                digest.add(row, cells)
        tell(digest.cells)
    return digest
