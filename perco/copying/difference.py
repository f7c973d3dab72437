"""Compares the cells of a row in two stores. Pure.

M1  After the writes of `writes_between` the row of the target has the cells of the source, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

from perco.storage import ScanCell, Write

Cells: TypeAlias = dict[tuple[str, int, int], bytes]  # (group, column, ts) -> value

_WRITES_MAX: Final = 256  # in one mutation
_BYTES_MAX: Final = 1 << 20


def cells_of(groups: Sequence[str], found: Sequence[Sequence[ScanCell]]) -> Cells:
    """The cells of a row that a scan has found, with a list for each group."""
    return {
        (group, column, ts): value for group, cells in zip(groups, found, strict=True) for column, ts, value in cells
    }


def writes_between(source: Cells, target: Cells) -> list[Write]:
    """The writes that make a target's row equal to the source's (M1)."""
    gone: list[Write] = [(*cell, None) for cell in target.keys() - source.keys()]
    return gone + [(*cell, value) for cell, value in source.items() if target.get(cell) != value]


def in_parts(writes: Iterable[Write]) -> Iterator[list[Write]]:
    """The writes in lists that are short enough for one mutation. Between two of them the row is not
    whole, but no program reads it yet."""
    part: list[Write] = []
    size = 0
    for write in writes:
        length = len(write[3] or b"")
        if part and (len(part) == _WRITES_MAX or size + length > _BYTES_MAX):
            yield part
            part, size = [], 0
        part.append(write)
        size += length
    if part:
        yield part


class Digest:
    """A digest of the rows of a table, in the order of their keys: equal for equal cells in any store."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self.cells = 0

    def add(self, row: bytes, cells: Cells) -> None:
        """Rows without cells do not count."""
        for (group, column, ts), value in sorted(cells.items()):
            head = (len(row), row, len(group), group.encode(), column, ts, len(value))
            self._hash.update(b"%d %b %d %b %d %d %d " % head + value)
        self.cells += len(cells)

    def hex(self) -> str:
        return self._hash.hexdigest()
