"""A sample of the source rows of views. No I/O.

Rows are drawn by a hash of the first part of their keys, and those with the same first part by a hash of the whole key.
So the sample has all orders of a customer, or none, and the customer too, if the keys of both tables begin with the
customer: groups by a prefix and cogroups are as large in the sample as in the whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from perco.errors import UsageError
from perco.schema.schema import Column, Table
from perco.views.compiled import parts_of
from perco.views.declaring import Views

ROWS_LEAST: Final = 100
"""With fewer rows, what a row costs the batch is lost in what a run costs."""

_HASH_BYTES: Final = 8

Values = dict[Column[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row of a table that views read.

    Attributes:
        values: by column; only columns that views read and no view writes, and only those that have a value.
    """

    table: Table[Any]
    key: Any
    values: Values


class Sampler:
    """Takes all rows, and keeps `size` of them: the same ones for the same seed, in whatever order they come.

    Attributes:
        taken: how many rows it has been given.
    """

    taken: int

    def __init__(self, size: int, seed: int = 0) -> None:
        self._size, self._salt = size, seed.to_bytes(8, "big", signed=True)
        self._kept: list[tuple[int, int, int, SourceRow]] = []  # a heap, the row with the largest hashes first
        self.taken = 0

    def add(self, row: SourceRow) -> None:
        """Take a row."""
        self.taken += 1
        parts = parts_of(row.table.key, row.key)
        whole = row.table.name.encode() + b"\0" + row.table.row(row.key)
        item = -self._hash(repr(parts[0]).encode()), -self._hash(whole), -self.taken, row
        if len(self._kept) < self._size:
            heapq.heappush(self._kept, item)
        elif item[:2] > self._kept[0][:2]:
            heapq.heapreplace(self._kept, item)

    def _hash(self, data: bytes) -> int:
        return int.from_bytes(blake2b(data, digest_size=_HASH_BYTES, key=self._salt).digest(), "big")

    def rows(self) -> list[SourceRow]:
        """The sample. Its beginning is a smaller sample."""
        return [row for *_, row in sorted(self._kept, key=lambda item: item[:2], reverse=True)]


def must_be_enough(views: Views, rows: Iterable[SourceRow]) -> list[SourceRow]:
    """The rows. Raises: UsageError if they are too few to measure with."""
    found = list(rows)
    if not found:
        names = ", ".join(sorted(table.name for table in views.sources)) or "none"
        raise UsageError(f"there are no source rows: the views read tables {names}, and these have no values")
    if len(found) < ROWS_LEAST:
        raise UsageError(
            f"{len(found)} source rows are too few: at least {ROWS_LEAST} are needed to tell what a row costs the "
            "batch from what a run costs"
        )
    return found
