"""Finds the cells in the leaves of an LMDB tree, thousands of pages at a time, without an object for each cell.

A cursor makes three Python objects of a cell, which cost more than all else that a columnar read does. Here numpy reads
the pages themselves, while a view pins them. Format: `perco/storage/pages.py`. The checks are those of a walk there: an
impossible page raises PageDamaged, before anything of it is used.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from itertools import chain, islice
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perco.storage.keys import TAIL_BYTES, escape, unescape
from perco.storage.pages import PageDamaged, leaf_numbers
from perco.storage.walking import View

_HEAD, _NODE = 16, 8  # bytes before the places of a page's nodes; of a node before its key
_FLAGS, _LOWER, _UPPER = 5, 6, 7  # of a page's head, in units of two bytes
_KINDS, _LEAF = 0x6F, 2
_KEY_MIN, _KEY_MAX = TAIL_BYTES + 2, 511
_AT_ONCE: Final = 256  # pages
_CELL_BYTES: Final = 60  # that a short cell takes

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


class Cells(NamedTuple):
    """Cells in key order, as places in a buffer: where a key begins and ends, and where its value does."""

    buffer: Bytes
    begins: Places
    ends: Places  # of keys; there the values begin
    stops: Places

    def key(self, n: int) -> bytes:
        return self.buffer[self.begins[n] : self.ends[n]].tobytes()

    def prefix(self, n: int) -> bytes:
        """The escaped row."""
        return self.buffer[self.begins[n] : self.ends[n] - TAIL_BYTES].tobytes()

    def value(self, n: int) -> bytes:
        return self.buffer[self.ends[n] : self.stops[n]].tobytes()

    def between(self, first: int, stop: int) -> Cells:
        return Cells(self.buffer, self.begins[first:stop], self.ends[first:stop], self.stops[first:stop])


class Walked(NamedTuple):
    """All cells of some rows.

    Attributes:
        next: the row at which to continue; None: there are no more rows in the range.
    """

    cells: Cells
    next: bytes | None


def walk(view: View, start: bytes, stop: bytes | None, count: int) -> Walked | None:
    """The rows from `start` up to but excluding `stop`, as many as fit into `count` cells, or fewer. None: not even the
    first row does.

    Raises: PageDamaged; Corruption for a key that no row has.
    """
    numbers = chain.from_iterable(leaf_numbers(view.file, view.page, view.tree, escape(start)))
    pages, found = [], 0
    while found <= count and (
        some := list(islice(numbers, min(_AT_ONCE, 1 + (count + 1 - found) * _CELL_BYTES // view.page)))
    ):
        pages.append(_read(view.file, view.page, some))
        found += int(_counts(pages[-1]).sum())
    if not pages:
        return Walked(Cells(np.empty(0, np.uint8), *(np.empty(0, np.int64),) * 3), None)
    cells = _cells(np.concatenate(pages))
    first, total, after = bisect_left(range(found), escape(start), key=cells.key), found, None
    if found > first + count or next(numbers, None) is not None:
        after = cells.prefix(min(first + count, found - 1))
        total = bisect_left(range(found), after, key=cells.key)
    end = None if stop is None else escape(stop)
    if end is not None and (after is None or after >= end):
        after = None
        total = bisect_left(range(total), end, key=cells.key)
    elif after is not None and (total <= first or after <= escape(start)):
        return None
    return Walked(cells.between(first, max(first, total)), None if after is None else unescape(after))


def _read(file: int, size: int, numbers: list[int]) -> Bytes:
    """Leaves, a row of bytes for each. Raises: PageDamaged."""
    data, n = bytearray(), 0
    while n < len(numbers):
        last = n + 1
        while last < len(numbers) and numbers[last] == numbers[last - 1] + 1:
            last += 1
        data += os.pread(file, (last - n) * size, numbers[n] * size)
        n = last
    if len(data) != len(numbers) * size:
        raise PageDamaged(f"the file ends before page {max(numbers)}")
    pages = np.frombuffer(data, np.uint8).reshape(len(numbers), size)
    heads = pages.view(np.uint16)[:, : _HEAD // 2]
    _need(pages.view(np.uint64)[:, 0] == np.array(numbers, np.uint64), "a page has another page's number")
    _need((heads[:, _FLAGS] & _KINDS) == _LEAF, "a page is of another kind than its place in the tree says")
    lower, upper = heads[:, _LOWER], heads[:, _UPPER]
    _need((lower > _HEAD) & (lower <= upper) & (upper <= size) & (lower % 2 == 0), "a page's header is impossible")
    return pages


def _counts(pages: Bytes) -> Places:
    return (pages.view(np.uint16)[:, _LOWER].astype(np.int64) - _HEAD) // 2


def _cells(pages: Bytes) -> Cells:
    """All cells of leaves. Raises: PageDamaged."""
    size, counts = pages.shape[1], _counts(pages)
    halves = pages.view(np.uint16).ravel()
    firsts = np.cumsum(counts) - counts  # of a page's cells
    page = np.arange(len(pages)) * size
    slots = np.arange(int(counts.sum())) + np.repeat(page // 2 + _HEAD // 2 - firsts, counts)
    places = halves[slots].astype(np.int64)
    upper = np.repeat(pages.view(np.uint16)[:, _UPPER], counts)
    inside = (places >= upper) & (places + _NODE + _KEY_MIN <= size) & (places % 2 == 0)
    _need(inside, "a cell lies outside of its page")
    at = places + np.repeat(page, counts)
    half = at // 2
    _need((halves[half + 1] == 0) & (halves[half + 2] == 0), "a write record is longer than one can be")
    lengths = halves[half + 3].astype(np.int64)
    _need((lengths >= _KEY_MIN) & (lengths <= _KEY_MAX), "a key is too short or too long for a cell")
    begins = at + _NODE
    ends = begins + lengths
    stops = ends + halves[half]
    _need(places + (stops - at) <= size, "a cell is longer than its page")
    return Cells(pages.ravel(), begins, ends, stops)


def _need(holds: NDArray[np.bool_], what: str) -> None:
    if not bool(holds.all()):
        raise PageDamaged(what)
