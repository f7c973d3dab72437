"""Leaves of the tree of a tablet's write records, for readers that make columns of them: the pages as they are in the
tablet's file, of which the reader parses thousands at a time (`pages.py` has the format). Readers beside the owner, and
the owner for its clients, take them from here.

S3  A view pins the pages that the owner frees meanwhile, so none of them changes before it ends. Only a bounded number
    of pages is read in one view.
P4  A reader beside the owner that asks for rows which a split has moved to another tablet gets TabletSplit.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import lmdb

from perco.errors import Corruption, Unavailable
from perco.storage import lmdb_native
from perco.storage.cells import LOCK, WRITE
from perco.storage.keys import TAIL_BYTES, escape, past_row, unescape
from perco.storage.lmdb_engine import LmdbEngine
from perco.storage.pages import NO_ROOT, PageDamaged, Tree, boundaries, last_key, leaf_numbers, tree_of
from perco.storage.tablet import Tablet

_CELL_BYTES: Final = 60  # that a short cell takes
_PAGES_MAX: Final = 1024  # of one view
_LOCKS_MAX: Final = 10_000
_LOWER_AT: Final = 6  # in units of two bytes, in a page: where the places of its cells end
_HEAD: Final = 16  # where they begin; each takes two bytes


class Leaves(NamedTuple):
    """Leaves that follow each other in a tree of write records, as of one moment, and the locks of their rows.

    Attributes:
        page: bytes of a leaf.
        numbers: of the leaves, which each of them also has in its head.
        data: the leaves, one after the other. The first ones may begin with cells before those that were asked for. In
            a `Space`, they are valid until the next leaves are read into it.
        more: whether there are cells after them in the tablet.
        locks: the keys of all locks, up to the rows of the last cell.
        stop: the first row after those of the tablet; None: it is the table's last one.
    """

    page: int
    numbers: list[int]
    data: bytes | memoryview
    more: bool
    locks: list[bytes]
    stop: bytes | None


class Space:
    """Memory for the leaves that one reader takes, view after view. The kernel takes longer to hand out new memory for
    each view than to read the leaves into it."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def of(self, size: int) -> memoryview:
        """So many bytes."""
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(self._memory)[:size]


class Parts(NamedTuple):
    """Where a tablet can be cut into parts of about the same size.

    Attributes: `rows`: the first ones of the parts; `cells`: the number of cells of a part, about.
    """

    rows: list[bytes]
    cells: int


def leaves_of(
    tablet: Tablet, start: bytes, stop: bytes | None, end: bytes | None, cells: int, space: Space | None = None
) -> Leaves | None:
    """See `Prompt.find_leaves`. `end`: the first row after those of the tablet."""
    with _viewed(tablet, start, end if stop is None or (end is not None and end < stop) else stop) as view:
        if view is None:
            return None
        txn, engine, file, tree, high = view
        memory = (space or Space()).of(_PAGES_MAX * engine.page_bytes)
        numbers, data, more = _leaves(file, engine.page_bytes, tree, start, cells, memory)
        past = last_key(data, engine.page_bytes)[:-TAIL_BYTES] if more else None if high is None else escape(high)
        locks = [] if LOCK not in engine._dbs else _locks(txn, engine._dbs[LOCK], start, past, inclusive=more)
        return Leaves(engine.page_bytes, numbers, bytes(data) if space is None else data, more, locks, end)


def parts_of(tablet: Tablet, start: bytes, stop: bytes | None, least: int) -> Parts | None:
    """See `Prompt.find_parts`."""
    with _viewed(tablet, start, stop) as view:
        if view is None:
            return None
        txn, engine, file, tree, high = view
        keys = boundaries(file, engine.page_bytes, tree, least)
        entries = int(txn.stat(engine._dbs[WRITE])["entries"]) if WRITE in engine._dbs else 0
        rows = [row for row in dict.fromkeys(unescape(key[:-TAIL_BYTES]) for key in keys) if row > start]
        return Parts(rows if high is None else [row for row in rows if row < high], entries // (len(keys) + 1))


class _View(NamedTuple):
    txn: Any
    engine: LmdbEngine
    file: int
    tree: Tree
    high: bytes | None


@contextmanager
def _viewed(tablet: Tablet, start: bytes, high: bytes | None) -> Iterator[_View | None]:
    """The tree of a tablet's write records, and what pins its pages; None: the tablet has no file."""
    engine = getattr(tablet, "engine", None)
    if not isinstance(engine, LmdbEngine):
        yield None
        return
    file = engine.file_of_view()
    try:
        engine._open_groups([group for group in (WRITE, LOCK) if group not in engine._dbs])
        with engine._begin() as txn:
            if engine.readonly:
                engine._check_stop(txn, start, high, whole=True)
            with txn.cursor() as names:
                tree = tree_of(names.value()) if names.set_key(WRITE.encode()) else Tree(0, NO_ROOT)
            yield _View(txn, engine, file, tree, high)
    except PageDamaged as error:
        raise Corruption(str(engine.path), str(error)) from error
    except lmdb.Error as error:
        raise engine._unreadable(error) from error
    finally:
        os.close(file)


def _leaves(
    file: int, size: int, tree: Tree, start: bytes, cells: int, memory: memoryview
) -> tuple[list[int], memoryview, bool]:
    left = chain.from_iterable(leaf_numbers(file, size, tree, escape(start)))
    numbers: list[int] = []
    found = 0
    while found <= cells and len(numbers) < _PAGES_MAX:
        left_over = cells + 1 - found
        guess = left_over * len(numbers) // found if found > 0 else left_over * _CELL_BYTES // size
        some = list(islice(left, min(1 + guess, _PAGES_MAX - len(numbers))))
        if not some:
            break
        part = memory[len(numbers) * size : (len(numbers) + len(some)) * size]
        _read(file, size, some, part)
        numbers += some
        found += _cells(part, size)
    return numbers, memory[: len(numbers) * size], next(left, None) is not None


def _read(file: int, size: int, numbers: list[int], into: memoryview) -> None:
    """Read the pages with these numbers; those that lie side by side are read at once. Raises: PageDamaged."""
    native = lmdb_native.leaves()
    if native is not None:
        whole = native.pages(file, size, array("Q", numbers), into)
    else:
        whole, first = True, 0
        for n, number in enumerate(numbers, 1):
            if n == len(numbers) or numbers[n] != number + 1:
                some = into[first * size : n * size]
                whole = whole and os.preadv(file, [some], numbers[first] * size) == len(some)
                first = n
    if not whole:
        raise PageDamaged(f"the file ends before page {max(numbers)}")


def _cells(data: memoryview, size: int) -> int:
    """The number of cells that the heads of the pages state; the parser checks it."""
    return sum(data.cast("H")[_LOWER_AT :: size // 2]) // 2 - len(data) // size * (_HEAD // 2)


def _locks(txn: Any, locks: Any, start: bytes, past: bytes | None, *, inclusive: bool) -> list[bytes]:
    """The keys of locks from a row up to this prefix of another; `inclusive`: with those of that row. Raises:
    Unavailable."""
    end, found = past_row(past) if past is not None and inclusive else past, []
    with txn.cursor(locks) as cursor:
        for key in cursor.iternext(True, False) if cursor.set_range(escape(start)) else ():
            if end is not None and key >= end:
                break
            found.append(key)
            if len(found) > _LOCKS_MAX:
                raise Unavailable(f"more than {_LOCKS_MAX} undecided writes are in the way")
    return found
