"""The reads of a serializable transaction, to be repeated at its commit. Pure.

A single cell is kept with the version that was seen of it. A scan is kept as the part of its range that was read, with
a digest of the versions in that part. That part is read again as a whole, so new rows in its gaps are found as well.

T14 The history of serializable transactions and snapshots is serializable, in the order of commit timestamps. A
    serializable transaction takes its locks, draws commit_ts, and *then* repeats its reads at commit_ts. The result is
    final: every transaction that commits below commit_ts already has its locks in place (T2), and validation fails if
    it finds a lock of a transaction whose outcome is not known. If the reads were repeated before the draw, another
    transaction could commit between the two.

    A snapshot at S, or a transaction that began at S and wrote nothing, is not validated: it sees exactly the
    transactions with a commit_ts up to S, so its place in that order is right after them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, TypeAlias

from perco.errors import TooLarge, UsageError
from perco.protocol.records import Cellref
from perco.storage import LOCK, WRITE, Cell, Query, ScanQuery, ScanRequest

Isolation: TypeAlias = Literal["snapshot", "serializable"]

UNDECIDED: Final = -1  # instead of a version: there is a lock of a transaction whose outcome is not known

_HEAD: Final = struct.Struct(">I")
_VERSION: Final = struct.Struct(">IQ")


def is_serializable(isolation: str) -> bool:
    """Whether `isolation` is "serializable". Raises: UsageError if it is neither "serializable" nor "snapshot"."""
    if isolation not in ("snapshot", "serializable"):
        raise UsageError(f'isolation is "snapshot" or "serializable", not {isolation!r}')
    return isolation == "serializable"


class Range:
    """The extent of one scan: the rows from `low` up to `high` (None: to the end), and a digest of their versions."""

    table: str
    columns: tuple[int, ...]
    reverse: bool
    rows: int

    __slots__ = ("_digest", "_from", "_to", "columns", "high", "low", "reverse", "rows", "table")

    def __init__(self, table: str, columns: Sequence[int], low: bytes, high: bytes | None, *, reverse: bool) -> None:
        self.table, self.columns, self.reverse = table, tuple(dict.fromkeys(columns)), reverse
        self._from, self._to = low, high
        self.low: bytes | None = high if reverse else low  # None: a reverse scan from the end that has read nothing yet
        self.high: bytes | None = high if reverse else low
        self.rows = 0  # how many rows with a version were added
        self._digest = blake2b(digest_size=16)

    def took(self, row: bytes, versions: Iterable[tuple[int, int]]) -> None:
        """Add the next row, with (column, commit_ts) of the version seen in each column; commit_ts 0: never written."""
        self.passed(row if self.reverse else row + b"\x00")
        self.add(row, versions)

    def passed(self, row: bytes | None) -> None:
        """Record that everything was read up to a row or, in reverse, from that row on; None: the whole range."""
        if self.reverse:
            self.low = self._from if row is None else row
        else:
            self.high = self._to if row is None else row

    def add(self, row: bytes, versions: Iterable[tuple[int, int]]) -> None:
        """Add a row and its versions to the digest."""
        packed = b"".join([_VERSION.pack(column, ts) for column, ts in versions if ts])
        if packed:
            self.rows += 1
            self._digest.update(_HEAD.pack(len(row)) + row + _HEAD.pack(len(packed)) + packed)

    def again(self) -> Range:
        """The range that was read, with an empty digest, to read it a second time."""
        assert self.low is not None
        return Range(self.table, self.columns, self.low, self.high, reverse=self.reverse)

    def same(self, other: Range) -> bool:
        """Whether the same rows and versions were added to both."""
        return self.rows == other.rows and self._digest.digest() == other._digest.digest()

    def first_page(self, ts: int, rows_max: int) -> ScanRequest | None:
        """A request for the first page of this range at a timestamp; None: the scan has read nothing."""
        if self.low is None or self.low == self.high:
            return None
        queries = (ScanQuery(LOCK, self.columns, 0, ts), ScanQuery(WRITE, self.columns, 0, ts))
        return ScanRequest(self.table, self.low, self.high, queries, self.reverse, rows_max)


class Reads:
    """Everything that one transaction has read. The number of entries is limited: each cell and each scan is one."""

    __slots__ = ("_max", "cells", "ranges")

    def __init__(self, reads_max: int) -> None:
        self._max = reads_max
        self.cells: dict[Cellref, int] = {}
        self.ranges: list[Range] = []

    def note(self, table: str, row: bytes, column: int, commit_ts: int) -> None:
        """Note the version that was seen of a cell; 0: the cell was never written."""
        self.cells[Cellref(table, row, column)] = commit_ts
        self._bounded()

    def begin(self, table: str, columns: Sequence[int], low: bytes, high: bytes | None, *, reverse: bool) -> Range:
        """Note the beginning of a scan; the caller adds each row that the scan reads to the returned range."""
        scanned = Range(table, columns, low, high, reverse=reverse)
        self.ranges.append(scanned)
        self._bounded()
        return scanned

    def _bounded(self) -> None:
        size = len(self.cells) + len(self.ranges)
        if size > self._max:
            remedy = "Read less in one transaction, or use scans: each counts as one."
            raise TooLarge("cells and ranges read by one serializable transaction", size, self._max, remedy)


class Stale(NamedTuple):
    """Cells and ranges that are not, or may not be, as they were read. Only the first ones that were found."""

    cells: tuple[Cellref, ...]
    ranges: tuple[Range, ...]


def queries_at(columns: Iterable[int], ts: int) -> list[Query]:
    """Queries for the versions of a row at a timestamp: for each column, locks, then records."""
    return [query for column in columns for query in ((LOCK, column, 0, ts, 1), (WRITE, column, 0, ts, 1))]


def version_at(
    ts: int, own: int, locks: Sequence[Cell], writes: Sequence[Cell], known: Callable[[int], int | None]
) -> int:
    """The newest version of a cell at `ts`: its commit_ts, 0 for none, or UNDECIDED.

    Args:
        own: start_ts of the transaction that reads; its own lock is not a conflict.
        known: returns the outcome of a transaction: commit_ts, 0 for aborted, None if it is not known.
    """
    if locks and locks[0][0] != own:
        fate = known(locks[0][0])
        if fate is None:
            return UNDECIDED
        if 0 < fate <= ts:
            return fate  # its record is about to take the lock's place
    return writes[0][0] if writes else 0
