"""The rows of a scan as Arrow record batches.

A scan of rows makes Python objects of each cell. Where the store has its cells in pages of files, in this process or in
the owner, columns are made of thousands of cells at once (`perco/arrow`). A scan of rows does the rest: rows with a
lock in the way, damaged pages, stores without pages, a transaction's own writes, reverse and limited scans.

G5  The versions that a page needs are still kept after it has been read; the check is the snapshot's.
T9  Rows with a lock in the way are read row by row: the lock's transaction is waited for, or settled.
T14 A serializable transaction notes how far it has read a scan; so it reads row by row.
C4  One-step commits that are in progress leave no locks: pages are read when those up to the timestamp have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
import trio

from perco.arrow.columns import Columns, Long
from perco.arrow.fields import fields_of
from perco.arrow.leaves import first_row
from perco.arrow.rows import RowBatch
from perco.blocks import AsyncOnly
from perco.errors import Corruption, TabletSplit, Unavailable, UsageError
from perco.schema.catalogue import Bound
from perco.schema.schema import Column, Table
from perco.storage.keys import escape
from perco.storage.pages import PageDamaged
from perco.storage.walking import Leaves, Space
from perco.txn.reader import Reader
from perco.txn.row import Row

_CELLS_FIRST: Final = 2_000  # in one view, at first
_CELLS_MAX: Final = 16_000  # in one view: some 10 ms, in which the loop does nothing else
_CELLS_BY_ROW: Final = 500  # in a page that is read row by row
_BATCH_BYTES: Final = 8 << 20  # long values in a batch, unless one row has more
_LONG_AT_ONCE: Final = 1_000  # values of data groups
_ROWS_AFTER_FAILURE: Final = 10_000  # to read row by row before pages are tried again


class NoPages(Exception):
    """The rows are in no file of the process that has been asked."""


class Page(NamedTuple):
    """The first rows of a range.

    Attributes:
        batch: None: they have to be read row by row.
        next: where the rest of the range begins; None: there is no rest.
    """

    batch: pa.RecordBatch | None
    next: bytes | None


class Pages:
    """Makes batches of a table's columns from the pages of its files, as a snapshot sees them.

    Attributes: `cells`: how many cells the next view may have. It grows up to `most`.
    """

    def __init__(self, snap: Reader, table: Table[Any], columns: Columns, cells: int = 0, most: int = 0) -> None:
        self._snap, self._table, self._columns = snap, table.name, columns
        self._most, self._space = most or _CELLS_MAX, Space()
        self.cells: int = min(cells or _CELLS_FIRST, self._most)

    async def page(self, low: bytes, high: bytes | None) -> Page:
        """The next page of the range [`low`, `high`); None: up to the table's end. Use the page only after
        `still_kept`.

        Raises: NoPages; PercoError, PageDamaged, ValueError if it cannot be read in this way.
        """
        grown = False  # the first row needs so many cells: with fewer, this would begin again and again
        while True:
            leaves = await self._leaves(low, high)
            page = self._columns.take(leaves, low, high, self.cells)
            if page is None:  # not even the first row fits
                row = first_row(leaves, low)
                if self.cells >= self._most and row >= low:
                    past = row + b"\0"
                    return Page(None, None if high is not None and past >= high else past)
                # If all of these cells come before the range, more are needed, whatever the limit is.
                self.cells = self.cells * 4 if row < low else min(self.cells * 4, self._most)
                grown = True
                continue
            if leaves.locks and self._blocked(leaves.locks, page.next):
                if not grown and page.cells > _CELLS_BY_ROW < self.cells:
                    self.cells = _CELLS_BY_ROW
                    continue
                return Page(None, page.next)
            found = page.found
            long = [] if found is None else await self._long(found.long, len(found.prefixes) == 1)
            if long is None:
                if grown:
                    return Page(None, page.next)
                self.cells = max(self.cells // 4, 1)
                continue
            self.cells = max(min(self.cells * 2, self._most), 1)
            return Page(self._columns.batch(found, long), page.next)

    async def still_kept(self) -> None:
        """G5, T9: check that the pages read before this call were complete. Raises: SnapshotTooOld, OwnerChanged."""
        await self._snap._still_kept(self._table, None)

    async def _leaves(self, low: bytes, high: bytes | None) -> Leaves:
        driver, ts = self._snap._driver, self._snap.start_ts
        for entry in driver.entered.within(self._table, low, high, self._columns.numbers, ts):
            await driver.past(entry)  # C4
        store = driver.reads
        ask: Callable[..., Awaitable[Leaves | None]] | None = getattr(store, "leaves", None)  # of another process
        found: Leaves | None = None
        if store.prompt is not None:
            await trio.lowlevel.checkpoint()
            found = store.prompt.find_leaves(self._table, low, high, self.cells, self._space)
        elif ask is not None:
            found = await ask(self._table, low, high, ts, self.cells)
        if found is None:
            raise NoPages
        return found

    def _blocked(self, locks: list[bytes], next: bytes | None) -> bool:
        end = None if next is None else escape(next)
        return self._columns.blocked([key for key in locks if end is None or key < end])

    async def _long(self, wanted: list[Long], one_row: bool) -> list[bytes] | None:
        """Values that data groups have. They are read after the page: if the vacuum has removed a version that it needs
        meanwhile, `still_kept` finds out. None: they are too many bytes for a batch of several rows. Raises:
        Corruption."""
        found: list[bytes] = []
        size = 0
        while len(found) < len(wanted):
            requests = [
                (self._table, row, ((group, column, ts, ts, 1),))
                for group, row, column, ts in wanted[len(found) : len(found) + _LONG_AT_ONCE]
            ]
            for [cells] in await self._snap._driver.reads.read_first(requests, _BATCH_BYTES):
                if not cells:
                    raise Corruption("data group", "a value is missing")
                found.append(cells[0][1])
                size += len(found[-1])
            if size > _BATCH_BYTES and not one_row:
                return None
        return found


class Rows(Protocol):
    """A `Scan`, of which this module must not know: it is what makes `Batches`."""

    _snapshot: Reader
    _table: Table[Any]
    _columns: Sequence[Column[Any, Any]]
    _bounds: Sequence[Bound]
    _low: bytes
    _high: bytes | None
    _left: int | None
    _reverse: bool
    _rows: list[bytes]
    _at: int
    _last: bytes | None
    _span: tuple[bytes, bytes | None]

    @property
    def ended(self) -> bool: ...
    def take(self) -> Row[Any] | None: ...
    async def fetch(self) -> None: ...
    def between(self, low: bytes, high: bytes | None, limit: int | None) -> Rows: ...


class Batches(AsyncOnly):
    """An asynchronous iterator over Arrow record batches with the remaining rows of a scan.

    Attributes: `schema`: of the batches, a `pyarrow.Schema`.
    """

    schema: pa.Schema

    _write = "async for batch in snap.scan(...).to_batches():"

    def __init__(self, scan: Rows, key: str | Sequence[str], packed: bool) -> None:
        self._snap, self._of = scan._snapshot, scan
        numbers = [bound.column for bound in scan._bounds]
        fields = fields_of(scan._table, scan._columns, numbers, key, packed)
        self._rows = RowBatch(fields)
        self.schema = self._rows.schema
        self._fields = fields
        self._pages: Pages | None = None  # made with the first page: until then, there may be no timestamp
        self._by_row = False  # the rows are in no file that could be asked
        self._scan: Rows | None = None  # reads row by row; what comes after it begins at `_low`
        self._last: Any = None  # the key of the row that was read last in this way
        self._low: bytes | None = b""
        self._high: bytes | None = scan._high
        self._ready: pa.RecordBatch | None = None
        self._busy = trio.Lock()
        snap = self._snap
        if scan._left is not None or scan._reverse or snap._writes or snap._reads is not None:
            self._scan, self._low = scan, None  # T14: it goes on with the range that it has begun
        elif scan._last is not None:
            self._low = scan._last + b"\0"
        elif not scan._rows or scan._at < len(scan._rows):  # no row of its page has been taken
            self._low = scan._span[0]
        else:
            self._low = None if scan.ended else scan._low
        if self._low is not None and self._high is not None and self._low >= self._high:
            self._low = None

    def __aiter__(self) -> Batches:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        batch = await self._next()
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def _next(self) -> pa.RecordBatch | None:
        while True:
            batch = self.take()
            if batch is not None:
                return batch
            if self.ended:
                return None
            await self.fetch()

    @property
    def ended(self) -> bool:
        """Whether no further batch is to be fetched, or taken."""
        return self._low is None and self._scan is None and self._ready is None

    def take(self) -> pa.RecordBatch | None:
        """The batch that has been fetched; None: fetch another one."""
        batch, self._ready = self._ready, None
        return batch

    async def fetch(self) -> None:
        """Fetch the next batch, if there is one, and none has been fetched that is still to be taken."""
        await self._snap._draw()  # before it waits for anything else (T11)
        async with self._busy:
            await self._fetch()

    async def _fetch(self) -> None:
        while self._ready is None and not self.ended:
            if not self._snap._open:
                raise self._snap._closed()
            batch = await (self._page() if self._scan is None else self._from(self._scan))
            if batch is not None and batch.num_rows:
                self._ready = batch

    async def _page(self) -> pa.RecordBatch | None:
        """The next page; None: nothing has been read, but `_scan` may be set."""
        low, snap = self._low, self._snap
        assert low is not None
        if self._by_row or snap._writes:
            self._scan, self._low = self._of.between(low, self._high, None), None
            return None
        if self._pages is None:
            columns = Columns(self._of._table.key, self._fields, snap.start_ts)
            self._pages = Pages(snap, self._of._table, columns)
        page: Page | None = None
        try:
            page = await self._pages.page(low, self._high)
        except NoPages:
            self._by_row = True
            return None
        except (PageDamaged, Corruption, ValueError, TabletSplit, Unavailable):
            pass  # row by row, a while; if these rows cannot be read either, the scan says why
        await self._pages.still_kept()
        if page is None:
            self._scan, self._low = self._of.between(low, self._high, _ROWS_AFTER_FAILURE), None
            return None
        if page.batch is None:
            self._scan = self._of.between(low, page.next or self._high, None)
        self._low = page.next
        return page.batch

    async def _from(self, scan: Rows) -> pa.RecordBatch | None:
        """A batch of the next rows of a scan."""
        rows = self._rows
        while not rows.full:
            row = scan.take()
            if row is not None:
                rows.add(row)
                self._last = row.key
            elif not scan.ended:
                await scan.fetch()
            else:
                self._scan = None
                if scan is not self._of and scan._left == 0:  # there may be more rows: try pages again
                    past = self._of._table.row(self._last) + b"\0"
                    self._low = None if self._high is not None and past >= self._high else past
                break
        return rows.taken() if rows.rows else None

    def reader(self) -> pa.RecordBatchReader:
        """The batches, for other threads than the loop's."""
        return self.reader_of(self._in_threads(trio.lowlevel.current_trio_token(), threading.get_ident()))

    def reader_of(self, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.schema, batches)

    def _in_threads(self, loop: trio.lowlevel.TrioToken, thread: int) -> Iterator[pa.RecordBatch]:
        while True:
            if threading.get_ident() == thread:
                raise UsageError(
                    "this RecordBatchReader waits for the loop, which waits for it: use it in another thread, as in "
                    "`await trio.to_thread.run_sync(reader.read_all)`; or write `async for batch in "
                    "snap.scan(...).to_batches():`"
                )
            batch = trio.from_thread.run(self._next, trio_token=loop)
            if batch is None:
                return
            yield batch
