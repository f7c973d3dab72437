"""Finds the cells in the leaves of an LMDB tree, thousands of pages at a time, without an object for each cell. Pure.

A cursor makes three Python objects of a cell, which cost more than all else that a columnar read does. Here numpy
parses the pages that `perco/storage/walking.py` finds (format: `perco/storage/pages.py`). An impossible page raises
PageDamaged, before anything of it is used. Where perco's C extension is used, it makes columns of the pages at once
(`Columns.take`). This module then only says what is wrong with a page, and reads more columns than the extension takes.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from perco.storage.keys import TAIL_BYTES, escape, unescape
from perco.storage.pages import PageDamaged
from perco.storage.walking import Leaves

_HEAD, _NODE = 16, 8  # bytes before the places of a page's nodes; of a node before its key
_FLAGS, _LOWER, _UPPER = 5, 6, 7  # of a page's head, in units of two bytes
_KINDS, _LEAF = 0x6F, 2
_KEY_MIN, _KEY_MAX = TAIL_BYTES + 2, 511
_WORD: Final = 8
# A node's head as a number: the value's size, then bits that only long values and values of other kinds have, then the
# key's size.
_SIZE, _LONG, _KEY_AT = np.uint64(0xFFFF), np.uint64(0xFFFF_FFFF << 16), np.uint64(48)

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]
T = TypeVar("T", np.uint32, np.uint64)


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


def walk(leaves: Leaves, start: bytes, stop: bytes | None, count: int) -> Walked | None:
    """The rows from `start` up to but excluding `stop`, or the end of the tablet, as many as fit into `count` cells, or
    fewer. None: `count` has to be greater.

    Raises: PageDamaged; Corruption for a key that no row has.
    """
    further, end = end_of(leaves, stop)
    if not leaves.numbers:
        return Walked(Cells(np.empty(0, np.uint8), *(np.empty(0, np.int64),) * 3), further)
    cells = _cells(_checked(leaves))
    found, low = len(cells.begins), escape(start)
    first, total, after = bisect_left(range(found), low, key=cells.key), found, b""
    if found > first + count or leaves.more:
        after = cells.prefix(min(first + count, found - 1))
        total = bisect_left(range(found), after, key=cells.key)
    if end and (not after or after >= end):
        total, after = bisect_left(range(total), end, key=cells.key), b""
    elif after and (total <= first or after <= low):
        return None
    return Walked(cells.between(first, max(first, total)), unescape(after) if after else further)


def end_of(leaves: Leaves, stop: bytes | None) -> tuple[bytes | None, bytes]:
    """Where a range that goes on in the next tablet does so, and the prefix before which it ends in this one; b"": the
    end of the tablet."""
    if leaves.stop is not None and (stop is None or leaves.stop < stop):
        return leaves.stop, escape(leaves.stop)
    return None, b"" if stop is None else escape(stop)


def first_row(leaves: Leaves, start: bytes) -> bytes:
    """The first row from `start` on that has cells in these leaves, or their last row. Raises: as `walk`."""
    cells = _cells(_checked(leaves))
    found = len(cells.begins)
    return unescape(cells.prefix(min(bisect_left(range(found), escape(start), key=cells.key), found - 1)))


def windows(buffer: Bytes, type: type[T]) -> NDArray[T]:
    """The number that begins at each byte of a buffer."""
    return np.ndarray((max(0, len(buffer) - np.dtype(type).itemsize + 1),), type, buffer, strides=(1,))


def _checked(leaves: Leaves) -> Bytes:
    """The leaves, a row of bytes for each. Raises: PageDamaged."""
    size, numbers = leaves.page, leaves.numbers
    _need(len(leaves.data) == len(numbers) * size and size % _WORD == 0, "leaves are missing")
    pages = np.frombuffer(leaves.data, np.uint8).reshape(len(numbers), size)
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
    buffer = pages.ravel()
    firsts = np.cumsum(counts) - counts  # of a page's cells
    page = np.arange(len(pages)) * size
    slots = np.arange(int(counts.sum())) + np.repeat(page // 2 + _HEAD // 2 - firsts, counts)
    places = buffer.view(np.uint16).take(slots).astype(np.int64)
    upper = np.repeat(pages.view(np.uint16)[:, _UPPER], counts)
    _need(
        (places >= upper) & (places + _NODE + _KEY_MIN <= size) & (places & 1 == 0), "a cell lies outside of its page"
    )
    at = places + np.repeat(page, counts)
    nodes = windows(buffer, np.uint64)[at]
    _need(nodes & _LONG == 0, "a write record is longer than one can be")
    lengths = (nodes >> _KEY_AT).view(np.int64)
    _need((lengths >= _KEY_MIN) & (lengths <= _KEY_MAX), "a key is too short or too long for a cell")
    begins = at + _NODE
    ends = begins + lengths
    sizes = (nodes & _SIZE).view(np.int64)
    taken = _NODE + lengths + sizes
    _need(places + taken <= size, "a cell is longer than its page")
    used = np.add.reduceat(taken, firsts)
    _need(used <= size - pages.view(np.uint16)[:, _UPPER].astype(np.int64), "cells of a page overlap")
    stops = ends + sizes
    return Cells(buffer, begins, ends, stops)


def _need(holds: NDArray[np.bool_] | bool, what: str) -> None:
    if not np.all(holds):
        raise PageDamaged(what)
