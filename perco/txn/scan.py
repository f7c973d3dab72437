"""Scans: rows in key order, page by page, as a snapshot sees them.

T9  A scan answers as point reads would, or waits; it never returns a partial result.
T14 A serializable transaction notes how far it has read each scan, and repeats the scan that far at commit.
C4  One-step commits leave no locks: a scan looks for entries in `Entered` first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from perco.blocks import AsyncOnly
from perco.errors import Corruption, UsageError
from perco.protocol.reads import Range
from perco.protocol.records import Cellref
from perco.protocol.snapshot import NEVER, InData, Missing, Seen, Value, look
from perco.schema.catalogue import Bound
from perco.schema.codecs import TupleCodec, decoded_key
from perco.schema.schema import Column, Table
from perco.storage import LOCK, WRITE, Cell, ReadRequest, RowCells, ScanQuery, ScanRequest
from perco.storage.cells import SEEKS_FEW, SEEKS_MAX
from perco.txn.own_rows import OwnRows
from perco.txn.reader import Cells, Reader
from perco.txn.row import Row, has_values

if TYPE_CHECKING:
    from pyarrow import RecordBatchReader

    from perco.txn.columnar import Batches

K = TypeVar("K")

_ROWS_PER_READ = 256
_NO_CELLS: Cells = {}
_BYTES_PER_PAGE = 4 << 20  # of values that are not in their records; the last row may exceed it


def range_of(table: Table[Any], start: Any, stop: Any, prefix: Any) -> tuple[bytes, bytes | None]:
    """The range [low, high) of rows."""
    low = b"" if start is None else table.row(start)
    high = None if stop is None else table.row(stop)
    if prefix is not None:
        codec = table.key
        if codec.name == "int64":
            raise UsageError(f"table {table.name!r}: numbers have no prefix; use start= and stop= (--start, --stop)")
        try:
            begins = codec.part_prefix(prefix) if isinstance(codec, TupleCodec) else codec.encode(prefix)
        except TypeError as error:
            example = ", as in prefix=('x',)" if isinstance(codec, TupleCodec) else ""
            raise TypeError(f"prefix of table {table.name!r}: {error}{example}") from None
        low = max(low, begins)
        after = _after_prefix(begins)
        high = after if high is None else high if after is None else min(high, after)
    return low, high


def _after_prefix(prefix: bytes) -> bytes | None:
    """The smallest row after all rows that begin with `prefix`; None: there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def _columnar() -> ModuleType:
    """The module that needs pyarrow and numpy. Raises: UsageError."""
    try:
        from perco.txn import columnar
    except ModuleNotFoundError as error:
        raise UsageError(f"Arrow needs {error.name}: pip install 'perco[arrow]'") from error
    return columnar


class Scan(AsyncOnly, Generic[K]):
    """An asynchronous iterator over rows. A loop may leave it half-way: there is nothing to close."""

    _write = "async for row in snap.scan(...):` or `await snap.scan(...).all()"

    def __init__(
        self,
        snapshot: Reader,
        table: Table[K],
        columns: Sequence[Column[K, Any]],
        bounds: Sequence[Bound],
        low: bytes,
        high: bytes | None,
        limit: int | None,
        reverse: bool,
    ) -> None:
        self._snapshot, self._table, self._columns, self._bounds = snapshot, table, columns, bounds
        self._low, self._high, self._reverse = low, high, reverse
        self._left = limit
        self._ended = high is not None and high <= low  # nothing is left to fetch
        # The fetched page: its rows in key order, and what was found in them. The rows before `_at` have been taken (a
        # reverse scan pops the rows that it takes).
        self._rows: list[bytes] = []
        self._at = 0
        self._found: dict[bytes, Cells] = {}
        self._span: tuple[bytes, bytes | None] = (low, low)
        self._last: bytes | None = None  # the row that was taken last
        self._range: Range | None = None  # what has been taken, in a serializable transaction (T14)
        self._noted = len(snapshot._writes)  # own writes that the page has taken into account
        # Scanned rows that are not in the page yet, in the scan's order, and the row at which the scan goes on.
        self._seen: list[tuple[bytes, dict[int, Seen]]] = []
        self._fresh = True  # whether no page has been read
        self._plain = False  # whether all values of these rows are known
        self._next: bytes | None = None

    def __aiter__(self) -> Scan[K]:
        return self

    async def __anext__(self) -> Row[K]:
        while True:
            row = self.take()
            if row is not None:
                return row
            if self.ended:
                raise StopAsyncIteration
            await self.fetch()

    @property
    def ended(self) -> bool:
        """Whether no further page is to be fetched."""
        return self._ended or self._left == 0

    def take(self) -> Row[K] | None:
        """The next row of the fetched page; None: the page has no more rows."""
        while self._left != 0:
            row = self._next_row()
            if self._range is not None:
                self._taken(self._range, row)
            if row is None:
                break
            key = decoded_key(self._table.key, row, self._table.name)
            # Only now, because the transaction may have written the row since the page was fetched.
            got = self._snapshot._assemble(key, row, self._columns, self._bounds, self._found.get(row, _NO_CELLS))
            if has_values(got):
                if self._left is not None:
                    self._left -= 1
                return got
        return None

    async def all(self) -> list[Row[K]]:
        """The remaining rows, as a list."""
        return [row async for row in self]

    def to_batches(self, *, key: str | Sequence[str] = "key", packed: bool = False) -> Batches:
        """The remaining rows as Arrow record batches: `async for batch in snap.scan(...).to_batches()`.

        JSON and MSGPACK values are strings of JSON; values of codecs of your own are binary, as stored.

        Args:
            key: the name of the key's column. The parts of a key of several have columns of their own: `key_1`,
                `key_2`, ..., or the names that a list gives.
            packed: MSGPACK values are binary, as stored: JSON cannot express all of them.

        Raises: UsageError: also if pyarrow and numpy are missing (`pip install 'perco[arrow]'`).
        """
        batches: Batches = _columnar().Batches(self, key, packed)
        return batches

    def to_arrow(self, *, key: str | Sequence[str] = "key", packed: bool = False) -> RecordBatchReader:
        """The remaining rows as a `pyarrow.RecordBatchReader`, for polars, pandas, DuckDB and others. It waits for the
        loop: use it in another thread, as in `await trio.to_thread.run_sync(reader.read_all)`. `key`, `packed`: see
        `to_batches`.

        Raises: as `to_batches`.
        """
        return self.to_batches(key=key, packed=packed).reader()

    def between(self, low: bytes, high: bytes | None, limit: int | None) -> Scan[K]:
        """Another scan of the same columns, over the rows in [`low`, `high`), in ascending order."""
        return Scan(self._snapshot, self._table, self._columns, self._bounds, low, high, limit, False)

    def _taken(self, taken: Range, row: bytes | None) -> None:
        """Record that a row was taken; None: that the whole page was."""
        if row is None:
            taken.passed(None if self._ended else self._high if self._reverse else self._low)
            return
        found = self._found.get(row, _NO_CELLS)
        taken.took(row, [(column, found.get(column, NEVER).commit_ts) for column in taken.columns])

    def _next_row(self) -> bytes | None:
        """The next row of the page, including rows that the transaction wrote meanwhile; None: fetch another page."""
        writes = self._snapshot._writes
        if len(writes) != self._noted:
            for table, row, column in islice(reversed(writes), len(writes) - self._noted):
                if table == self._table.name and self._is_ahead(row, column):
                    insort(self._rows, row, self._at if not self._reverse else 0)
            self._noted = len(writes)
        if self._reverse:
            self._last = self._rows.pop() if self._rows else None
        else:
            self._last = self._rows[self._at] if self._at < len(self._rows) else None
            self._at += self._last is not None
        return self._last

    def _is_ahead(self, row: bytes, column: int) -> bool:
        """Whether a row written meanwhile is in the page's range, not yet passed, and not yet listed."""
        low, high = self._span
        if row < low or (high is not None and row >= high) or not any(b.column == column for b in self._bounds):
            return False
        if self._last is not None and (row >= self._last if self._reverse else row <= self._last):
            return False
        at = bisect_left(self._rows, row)
        return at == len(self._rows) or self._rows[at] != row

    async def fetch(self) -> None:
        """Fetch the next page, and move the range past it."""
        snapshot = self._snapshot
        if not snapshot._open:
            raise snapshot._closed()
        if snapshot._starts:
            await snapshot._draw()
        if not self._seen:
            await self._look()
        failure: Corruption | None = None
        try:
            self._found = await self._finish()
        except Corruption as error:
            failure = error  # an error for removed old versions takes precedence
        await snapshot._still_kept(self._table.name, failure)
        next_row = self._next
        if self._seen:
            [next_row, _] = self._seen[0]
            next_row += b"\x00" if self._reverse else b""
        own = self._own_rows(next_row)
        self._rows = sorted({*self._found, *own}) if own or self._reverse else list(self._found)
        self._at, self._last, self._noted = 0, None, len(snapshot._writes)
        self._span = (self._low, self._high)
        if next_row is not None:
            self._span = (next_row, self._high) if self._reverse else (self._low, next_row)
        self._move(next_row)

    async def _look(self) -> None:
        """Scan the next rows. `_finish` reads the values that are not in their records."""
        snapshot, table = self._snapshot, self._table.name
        driver, ts = snapshot._driver, snapshot.start_ts
        columns = tuple(bound.column for bound in self._bounds)
        quick = self._fresh and driver.reads.prompt is not None  # most scans end on their first page
        self._fresh = False
        request = ScanRequest(
            table,
            self._low,
            self._high,
            (ScanQuery(LOCK, columns, 0, ts), ScanQuery(WRITE, columns, 0, ts)),
            self._reverse,
            _ROWS_PER_READ if self._left is None else min(max(self._left, 16), _ROWS_PER_READ),
            seeks_max=SEEKS_FEW if quick else SEEKS_MAX,
        )
        if snapshot._reads is not None and self._range is None:
            self._range = snapshot._reads.begin(table, columns, self._low, self._high, reverse=self._reverse)
        for entry in driver.entered.within(table, self._low, self._high, columns, ts):
            await driver.past(entry)  # C4
        page = await driver.reads.scan(request)
        seen: list[tuple[bytes, dict[int, Seen]]] = []
        plain = True
        for row, (locks, writes) in page.rows:
            cells: dict[int, Seen] = {}
            for column, at, value in locks:
                cells[column] = look(((at, value),), ())  # T9
                plain = False
            for column, at, value in writes:
                if column in cells:
                    continue
                try:
                    cells[column] = each = look((), ((at, value),))
                except Corruption as error:
                    raise driver.at(Cellref(table, row, column), error) from error
                if type(each) is InData:
                    plain = False
            seen.append((row, cells))
        self._seen, self._plain, self._next = seen, plain, page.next

    async def _finish(self) -> dict[bytes, Cells]:
        """The next scanned rows, with their values: as many rows as a page holds, at least one."""
        if self._plain:
            whole, self._seen = self._seen, []
            return dict(whole)  # type: ignore[arg-type]
        snapshot, table = self._snapshot, self._table.name
        driver, ts = snapshot._driver, snapshot.start_ts
        requests: list[ReadRequest] = [
            (table, row, ((each.group, column, each.start_ts, each.start_ts, 1),))
            for row, seen in self._seen
            for column, each in seen.items()
            if type(each) is InData
        ]
        values: list[RowCells] = []
        if requests:
            with suppress(Corruption):  # if a group does not exist, the error is raised below, with the cell
                values = await driver.reads.read_first(requests, _BYTES_PER_PAGE)
        out: dict[bytes, Cells] = {}
        size = done = read = 0
        for row, seen in self._seen:
            if done and size >= _BYTES_PER_PAGE:
                break
            if done and requests and read + sum(type(each) is InData for each in seen.values()) > len(values):
                break
            found_here: Cells = {}
            for column, each in seen.items():
                if type(each) is Value or type(each) is Missing:
                    found_here[column] = each
                    continue
                cells: list[Cell] = []
                if type(each) is InData and read < len(values):
                    [cells] = values[read]
                    read += 1
                if cells:
                    found: Value | Missing = Value(each.commit_ts, cells[0][1])  # type: ignore[union-attr]
                else:
                    found = await driver.finish(table, row, column, ts, each)
                found_here[column] = found
                if type(found) is Value:
                    size += len(found.value)
            out[row] = found_here
            done += 1
        self._seen = self._seen[done:]
        return out

    def _own_rows(self, next_row: bytes | None) -> list[bytes]:
        """Rows of the page's range that the transaction itself has written."""
        snapshot = self._snapshot
        if not snapshot._writes:
            return []
        low, high = self._low, self._high
        if next_row is not None:
            low, high = (next_row, high) if self._reverse else (low, next_row)
        if snapshot._own_rows is None:
            snapshot._own_rows = OwnRows()
        columns = {bound.column for bound in self._bounds}
        return snapshot._own_rows.within(snapshot._writes, self._table.name, columns, low, high)

    def _move(self, next_row: bytes | None) -> None:
        if next_row is None:
            self._ended = True
        elif self._reverse:
            self._high = next_row
        else:
            self._low = next_row
