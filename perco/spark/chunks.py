"""Chunks: rows of a partition that share one mark. This module decides how rows are cut, and what a mark says; it reads
and writes nothing.

If a partition gives the same rows in the same order whenever it is read, a row is identified by its number. So the rows
are cut into *chunks*, and a chunk has one mark, whose key is the partition and the number of the chunk's first row:

    run | digest | low, high | ...     the rows low <= n < high of the chunk have taken effect in this run

The cuts depend on the rows alone: not on Arrow batches, and not on the attempts. So all attempts at a row read and
write one cell, even if one of them takes the chunk as a whole and another one takes a row of it; the store decides
between them (T7). The digest is that of all rows of the partition up to the end of the chunk. If rows are missing,
added or moved before a mark, its digest shows it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from perco.errors import PercoError
from perco.spark.keys import packed

RUN_BYTES: Final = 12
_DIGEST_BYTES: Final = 16
_HEAD_BYTES: Final = RUN_BYTES + _DIGEST_BYTES
_SPAN: Final = struct.Struct(">II")


class FrameChanged(PercoError):
    """A partition has other rows than in an earlier attempt or call, so perco cannot tell which of them have taken
    effect. The rows that were loaded stay."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Attributes:
    partition: the number of the partition.
    first: the number of the first row in the partition.
    rows: the rows.
    digest: of all rows of the partition, up to the last one of this chunk.
    """

    partition: int
    first: int
    rows: list[Any]
    digest: bytes


def cut(partition: int, rows: Iterator[Any], most: int, size: int) -> Iterator[Chunk]:
    """Chunks of `most` rows; a chunk ends earlier if its rows have `size` bytes.

    Raises: UsageError for a row with a value that has no digest.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES)
    some: list[Any] = []
    first = length = 0
    for row in rows:
        data = packed(row)
        digest.update(data)
        some.append(row)
        length += len(data)
        if len(some) == most or length >= size:
            yield Chunk(partition, first, some, digest.digest())
            first += len(some)
            some, length = [], 0
    if some:
        yield Chunk(partition, first, some, digest.digest())


class ChunkMark:
    """The mark of a chunk: the rows of it that a run has taken.

    Attributes: `spans`, pairs [low, high) of numbers of rows, counted from the chunk's first row, in order.
    """

    run: bytes
    digest: bytes
    spans: list[tuple[int, int]]

    __slots__ = ("digest", "run", "spans")

    def __init__(self, run: bytes, digest: bytes, spans: list[tuple[int, int]]) -> None:
        self.run, self.digest, self.spans = run, digest, spans

    @classmethod
    def decode(cls, data: bytes) -> ChunkMark:
        return cls(data[:RUN_BYTES], data[RUN_BYTES:_HEAD_BYTES], [*_SPAN.iter_unpack(data[_HEAD_BYTES:])])

    def encode(self) -> bytes:
        return b"".join([self.run, self.digest, *itertools.starmap(_SPAN.pack, self.spans)])

    @property
    def rows(self) -> int:
        """How many rows have been taken."""
        return sum(high - low for low, high in self.spans)

    def has(self, row: int) -> bool:
        return any(low <= row < high for low, high in self.spans)

    def add(self, row: int) -> None:
        """Add a row that has not been taken before."""
        spans = self.spans
        if spans and spans[-1][1] == row:  # the next row, as nearly always
            spans[-1] = (spans[-1][0], row + 1)
            return
        joined: list[tuple[int, int]] = []
        for low, high in sorted([*spans, (row, row + 1)]):
            if joined and joined[-1][1] == low:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        self.spans = joined


def must_be_same(job: str, chunk: Chunk, mark: ChunkMark) -> None:
    """Raises: FrameChanged if a mark is not that of the chunk's rows."""
    if mark.digest != chunk.digest:
        raise changed(job, chunk.partition, f"in its first {chunk.first + len(chunk.rows)} rows")


def changed(job: str, partition: int, where: str) -> FrameChanged:
    return FrameChanged(
        f"partition {partition} has other rows than before, {where}, so perco cannot tell which rows job {job!r} has "
        "loaded. chunks=True needs a frame whose tasks give the same rows in the same order whenever they run: load "
        "the frame as it was; or acknowledge the job, remove the rows that it has loaded, write the frame to files, "
        "and load these files. Or give key= instead of chunks=True"
    )
