"""Scans: rows in key order, page by page, as a snapshot sees them.

T9  Whatever a scan meets, it answers as point reads would, or waits; never a part.
T14 A serializable transaction notes of a scan how far it was taken; it is read again at commit.
C4  What commits in one step has no locks to meet: the memory of entered cells is asked.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from perco.errors import AsyncOnly, Corruption, UsageError
from perco.storage import LOCK, WRITE, ScanPage, ScanQuery, ScanRequest
from perco.txn.catalogue import Bound
from perco.txn.codecs import TupleCodec, decoded_key
from perco.txn.reads import Range
from perco.txn.records import Cellref
from perco.txn.schema import Column, Table
from perco.txn.snapshot import InData, Missing, Seen, Value, look

if TYPE_CHECKING:
    from perco.txn.transaction import Row, Snapshot

K = TypeVar("K")

_ROWS_PER_READ = 256
_ROWS_AT_FIRST = 16  # whose long values are read before it is known how long they are
_BYTES_PER_PAGE = 4 << 20  # of long values, and what goes beyond that with the row that reaches it


def range_of(table: Table[Any], start: Any, stop: Any, prefix: Any) -> tuple[bytes, bytes | None]:
    """[low, high) of rows."""
    low = b"" if start is None else table.row(start)
    high = None if stop is None else table.row(stop)
    if prefix is not None:
        codec = table.key
        begins = codec.part_prefix(prefix) if isinstance(codec, TupleCodec) else codec.encode(prefix)
        if codec.name == "int64":
            raise UsageError(f"table {table.name!r}: numbers have no prefix; use start and stop")
        low = max(low, begins)
        after = _after_prefix(begins)
        high = after if high is None else high if after is None else min(high, after)
    return low, high


def _after_prefix(prefix: bytes) -> bytes | None:
    """The smallest row after all that begin with `prefix`; None: there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


class Scan(AsyncOnly, Generic[K]):
    """An asynchronous iterator over rows. A plain object: left half-way, there is nothing to close."""

    _write = "async for row in snap.scan(...):` or `await snap.scan(...).all()"

    def __init__(
        self,
        snapshot: Snapshot,
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
        # The page: its rows in key order, those before (or against the order, from) `_at` taken; what was found in it.
        self._rows: list[bytes] = []
        self._at = 0
        self._found: dict[tuple[bytes, int], Value | Missing] = {}
        self._span: tuple[bytes, bytes | None] = (low, low)
        self._last: bytes | None = None  # the row that was taken last
        self._range: Range | None = None  # what has been taken in all, of a serializable transaction (T14)
        self._noted = 0  # own writes that have been looked at
        self._long = self._long_rows = 0  # bytes of long values so far, and rows in which they were looked for

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
        """Whether there is no page to come."""
        return self._ended or self._left == 0

    def take(self) -> Row[K] | None:
        """The next row of the page that was fetched; None: there is no other in it."""
        while self._left != 0:
            row = self._next_row()
            if self._range is not None:
                self._taken(self._range, row)
            if row is None:
                break
            key = decoded_key(self._table.key, row, self._table.name)
            # Only now: the transaction may have written the row since it was fetched.
            got = self._snapshot._assemble(key, row, self._columns, self._bounds, self._found)
            if any(column in got for column in self._columns):
                if self._left is not None:
                    self._left -= 1
                return got
        return None

    async def all(self) -> list[Row[K]]:
        """The rest of the rows as a list."""
        return [row async for row in self]

    def _taken(self, taken: Range, row: bytes | None) -> None:
        """A row was taken; None: all of the page was."""
        if row is None:
            taken.passed(None if self._ended else self._high if self._reverse else self._low)
            return
        versions = []
        for column in taken.columns:
            seen = self._found.get((row, column))
            versions.append((column, 0 if seen is None else seen.commit_ts))
        taken.took(row, versions)

    def _next_row(self) -> bytes | None:
        """The next row of the page, own rows written meanwhile included; None: fetch another page."""
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
        """Whether a row written meanwhile belongs to the page, is still to come, and is not there yet."""
        low, high = self._span
        if row < low or (high is not None and row >= high) or not any(b.column == column for b in self._bounds):
            return False
        if self._last is not None and (row >= self._last if self._reverse else row <= self._last):
            return False
        at = bisect_left(self._rows, row)
        return at == len(self._rows) or self._rows[at] != row

    async def fetch(self) -> None:
        """The next page; moves the range on."""
        snapshot = self._snapshot
        if not snapshot._open:
            raise snapshot._closed()
        ts = snapshot.start_ts
        columns = tuple(bound.column for bound in self._bounds)
        request = ScanRequest(
            self._table.name,
            self._low,
            self._high,
            (ScanQuery(LOCK, columns, 0, ts), ScanQuery(WRITE, columns, 0, ts)),
            self._reverse,
            _ROWS_PER_READ if self._left is None else min(max(self._left, 16), _ROWS_PER_READ),
        )
        if snapshot._reads is not None and self._range is None:
            self._range = snapshot._reads.begin(self._table.name, columns, self._low, self._high, reverse=self._reverse)
        driver = snapshot._driver
        for entry in driver.entered.within(self._table.name, self._low, self._high, columns, ts):
            await driver.past(entry)  # C4
        page = await driver.reads.scan(request)
        seen: dict[tuple[bytes, int], Seen] = {}
        for row, (locks, writes) in page.rows:
            by_column = {column: ([], []) for column in columns}  # type: ignore[var-annotated]
            for column, at, value in locks:
                by_column[column][0].append((at, value))
            for column, at, value in writes:
                by_column[column][1].append((at, value))
            try:
                for column, (l, w) in by_column.items():  # noqa: E741
                    seen[row, column] = look(l, w)
            except Corruption as error:
                raise driver.at(Cellref(self._table.name, row, column), error) from error
        page = await self._finish(page, seen)
        self._rows = sorted({row for row, _ in page.rows} | self._own_rows(page.next))
        self._at, self._last, self._noted = 0, None, len(snapshot._writes)
        self._span = (self._low, self._high)
        if page.next is not None:
            self._span = (page.next, self._high) if self._reverse else (self._low, page.next)
        self._move(page.next)

    async def _finish(self, page: ScanPage, seen: dict[tuple[bytes, int], Seen]) -> ScanPage:
        """Read what is not in the records. A page whose long values are too many ends before those that are left."""
        finish, table = self._snapshot._finish, self._table.name
        if not any(type(each) is InData for each in seen.values()):
            self._found = await finish(table, seen)
            return page
        self._found = {}
        done = size = 0
        while done < len(page.rows):
            if size >= _BYTES_PER_PAGE:
                row = page.rows[done][0]
                return ScanPage(page.rows[:done], row + b"\x00" if self._reverse else row)
            rows = _ROWS_AT_FIRST
            if self._long_rows:
                rows = max((_BYTES_PER_PAGE - size) * self._long_rows // max(self._long, 1), 1)
            some = page.rows[done : done + rows]
            wanted = {(row, bound.column) for row, _ in some for bound in self._bounds}
            found = await finish(table, {where: each for where, each in seen.items() if where in wanted})
            bytes_here = sum(len(each.value) for each in found.values() if isinstance(each, Value))
            self._found |= found
            self._long += bytes_here
            self._long_rows += len(some)
            size += bytes_here
            done += len(some)
        return page

    def _own_rows(self, next_row: bytes | None) -> set[bytes]:
        """Rows of the page's range that the transaction itself has written."""
        writes = self._snapshot._writes
        if not writes:
            return set()
        low, high = self._low, self._high
        if next_row is not None:
            low, high = (next_row, high) if self._reverse else (low, next_row)
        columns = {bound.column for bound in self._bounds}
        return {
            row
            for table, row, column in writes
            if table == self._table.name and column in columns and low <= row and (high is None or row < high)
        }

    def _move(self, next_row: bytes | None) -> None:
        if next_row is None:
            self._ended = True
        elif self._reverse:
            self._high = next_row
        else:
            self._low = next_row
