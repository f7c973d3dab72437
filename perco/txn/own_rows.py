"""The rows that a transaction has written, in key order, for its scans to merge with the pages of the store. Pure.

Each write is looked at only once, however many scans and pages there are. So if a program writes while it scans, each
row costs the same, however many rows were written before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any, Final

_CHUNK: Final = 512  # rows in a list; a list of twice as many is split


class SortedRows:
    """A sorted set of rows, in lists of bounded length, so `add` shifts the rows of one list only."""

    __slots__ = ("_chunks", "_firsts")

    def __init__(self) -> None:
        self._chunks: list[list[bytes]] = [[]]
        self._firsts: list[bytes] = [b""]  # a lower bound of each list, above all rows of the list before it

    def add(self, row: bytes) -> None:
        at = bisect_right(self._firsts, row) - 1
        chunk = self._chunks[at]
        i = bisect_left(chunk, row)
        if i < len(chunk) and chunk[i] == row:
            return
        chunk.insert(i, row)
        if len(chunk) >= 2 * _CHUNK:
            self._chunks.insert(at + 1, chunk[_CHUNK:])
            self._firsts.insert(at + 1, chunk[_CHUNK])
            del chunk[_CHUNK:]

    def between(self, low: bytes, high: bytes | None) -> Iterator[bytes]:
        """The rows in [low, high), in order; None: to the end."""
        at = bisect_right(self._firsts, low) - 1
        i = bisect_left(self._chunks[at], low)
        for chunk in islice(self._chunks, at, None):
            for row in islice(chunk, i, None):
                if high is not None and row >= high:
                    return
                yield row
            i = 0


class OwnRows:
    """The rows of all writes that `within` has seen, by table."""

    __slots__ = ("_noted", "_tables")

    def __init__(self) -> None:
        self._tables: dict[str, SortedRows] = {}
        self._noted = 0  # writes that have been looked at

    def within(
        self,
        writes: dict[tuple[str, bytes, int], Any],
        table: str,
        columns: Collection[int],
        low: bytes,
        high: bytes | None,
    ) -> list[bytes]:
        """The rows in [low, high) of a table with a write in one of the columns, in order. `writes`: always the same
        dict, from which nothing is ever removed."""
        if len(writes) != self._noted:
            for written, row, _ in islice(reversed(writes), len(writes) - self._noted):
                rows = self._tables.get(written)
                if rows is None:
                    rows = self._tables[written] = SortedRows()
                rows.add(row)
            self._noted = len(writes)
        own = self._tables.get(table)
        if own is None:
            return []
        return [row for row in own.between(low, high) if any((table, row, column) in writes for column in columns)]
