"""Compares the cells of a row in two stores. Pure.

M1  After the writes of `writes_between`, the row of the target has the cells of the source, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

from perco.storage import ScanCell, Write

Cells: TypeAlias = dict[tuple[str, int, int], bytes]  # (group, column, ts) -> value

WRITES_MAX: Final = 256  # in one mutation
BYTES_MAX: Final = 1 << 20
_DIGEST_BYTES: Final = 16


def cells_of(groups: Sequence[str], found: Sequence[Sequence[ScanCell]]) -> Cells:
    """The cells that a scan has found in a row. `found`: a list for each group."""
    return {
        (group, column, ts): value for group, cells in zip(groups, found, strict=True) for column, ts, value in cells
    }


def writes_between(source: Cells, target: Cells) -> list[Write]:
    """The writes that make a target's row equal to the source's (M1)."""
    gone: list[Write] = [(*cell, None) for cell in target.keys() - source.keys()]
    return gone + [(*cell, value) for cell, value in source.items() if target.get(cell) != value]


def in_parts(writes: Iterable[Write]) -> Iterator[list[Write]]:
    """The writes in lists that are short enough for one mutation. Between two of the mutations, the row is
    incomplete, but no program reads it yet."""
    part: list[Write] = []
    size = 0
    for write in writes:
        length = len(write[3] or b"")
        if part and (len(part) == WRITES_MAX or size + length > BYTES_MAX):
            yield part
            part, size = [], 0
        part.append(write)
        size += length
    if part:
        yield part


def halves(cells: Cells, low: int, high: int) -> tuple[int, int] | None:
    """Divide timestamps from `low` to `high` so that about half of the cells are in each part. Returns the last
    timestamp of the lower part, and the first one of the upper part. None: all cells have the same timestamp."""
    stamps = sorted(ts for _, _, ts in cells if low <= ts <= high)
    middle = stamps[(len(stamps) - 1) // 2]
    if middle == high:
        middle = max((ts for ts in stamps if ts < high), default=high)
    return None if middle == high else (middle, middle + 1)


class Digest:
    """A digest of the cells of a table, the same in whatever order they are added: the sum of the cells' hashes.

    Attributes: `cells`: how many were added.
    """

    cells: int

    def __init__(self) -> None:
        self._sum = 0
        self.cells = 0

    def add(self, row: bytes, cells: Cells) -> None:
        """Add the cells of a row. A row without cells adds nothing."""
        for (group, column, ts), value in cells.items():
            head = b"%d %b %d %b %d %d " % (len(row), row, len(group), group.encode(), column, ts)
            self._sum += int.from_bytes(blake2b(head + value, digest_size=_DIGEST_BYTES).digest(), "big")
        self.cells += len(cells)

    def hex(self) -> str:
        return f"{self._sum % (1 << 8 * _DIGEST_BYTES):0{2 * _DIGEST_BYTES}x}"
