"""Reads the pages of an LMDB file without LMDB: which are in use, which are free, and whether they are consistent.

LMDB trusts its files: a damaged one can make it abort the process, or write over pages that are in use. This module
reads the same bytes and trusts none of them. Checks use it, and it shows where a file's space has gone. It does not
look at the meaning of cells, nor at their order, which a walk with LMDB's own cursors verifies.

Format (mdb.c of LMDB 0.9, 64 bits): two meta pages, of which the newer valid one counts. It points to the tree of free
pages and to the tree of the named databases. Each named database is a tree of its own, too. Values that are
too long for a page are on consecutive pages of their own.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

_META: Final = struct.Struct("=16xII16x")  # magic, version
_TREE: Final = struct.Struct("=IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_TREES_AT: Final = 40  # in a meta page: free pages, then named databases; then the last page, and the transaction
_TAIL_AT: Final = _TREES_AT + 2 * _TREE.size
_TAIL: Final = struct.Struct("=QQ")
_PAGE: Final = struct.Struct("=QHHHH")  # number, pad, flags, lower, upper
_NODE: Final = struct.Struct(
    "=HHHH"
)  # size of the value or lower bits of a page (2), flags or upper bits, size of the key
_POINTER: Final = struct.Struct("=HHH")  # to a page below, of a branch's node
_NUMBER: Final = struct.Struct("=Q")
_FLAGS_AT: Final = 4  # in a node

_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_BRANCH: Final = 1
_LEAF: Final = 2
_OVERFLOW: Final = 4
_KINDS: Final = 0x6F  # bits of a page's flags that determine how the page is read
_BIG: Final = 1  # flags of a leaf's node
_SUBTREE: Final = 2
NO_ROOT: Final = (1 << 64) - 1
_DEPTH_MAX: Final = 32
_NUMBERS: Final = 1 << 48  # of pages; a branch has so many bits for one
_KEY_MAX: Final = 511
_METAS: Final = 2
_STEPS: Final = 256  # pages between two yields


class PageDamaged(Exception):
    """A page is impossible; the message says which page, and why."""


class Tree(NamedTuple):
    """A tree of cells: how many pages lie between its root and a leaf, both included, and the number of the root."""

    depth: int
    root: int


def tree_of(packed: bytes) -> Tree:
    """The tree of a named database, from its value in the list of names. Raises: PageDamaged."""
    if len(packed) != _TREE.size:
        raise PageDamaged(f"the head of a tree has {len(packed)} bytes")
    _, _, depth, _, _, _, _, root = _TREE.unpack(packed)
    if not (0 < depth <= _DEPTH_MAX and root < _NUMBERS if root != NO_ROOT else depth == 0):
        raise PageDamaged(f"page {root} is the root of a tree of depth {depth}")
    return Tree(depth, root)


def leaf_numbers(file: int, size: int, tree: Tree, start: bytes) -> Iterator[list[int]]:
    """The numbers of a tree's leaves from the one in which `start` belongs, in order, some at a time.

    Args:
        file: the file's descriptor.
        size: bytes of a page.

    Raises: PageDamaged.
    """
    if tree.root == NO_ROOT:
        return
    left = [(tree.root, tree.depth, start)]
    while left:
        page, level, low = left.pop()
        if level == 1:
            yield [page]
            continue
        keys, below = _branch(page, os.pread(file, size, page * size), size, keyed=bool(low))
        first = bisect_right(keys, low, lo=1) - 1 if low else 0  # a branch's first key stands for the least of all
        if level == 2:
            yield below[first:]
        else:
            left += [(below[n], level - 1, low if n == first else b"") for n in range(len(below) - 1, first - 1, -1)]


def boundaries(file: int, size: int, tree: Tree, least: int) -> list[bytes]:
    """Keys that divide a tree into parts of about the same size: at least so many parts, if the tree has the leaves.
    Raises: PageDamaged."""
    if tree.root == NO_ROOT:
        return []
    parts = [(b"", tree.root)]
    for _ in range(tree.depth - 1):
        if len(parts) >= least:
            break
        finer: list[tuple[bytes, int]] = []
        for first, page in parts:
            keys, below = _branch(page, os.pread(file, size, page * size), size)
            finer += zip([first, *keys[1:]], below, strict=True)  # a branch's own first key says nothing
        parts = finer
    return [key for key, _ in parts[1:]]


def last_key(leaves: bytes | memoryview, size: int) -> bytes:
    """The key of the last cell of leaves that lie one after the other. Raises: PageDamaged."""
    data = bytes(leaves[-size:])
    page = int(_PAGE.unpack_from(data)[0])
    key = _key(page, data, size, _places(page, data, size)[-1])
    if not key:
        raise PageDamaged(f"page {page}: a cell has no key")
    return key


def _branch(page: int, data: bytes, size: int, *, keyed: bool = True) -> tuple[list[bytes], list[int]]:
    """The keys of a branch, and the pages to which it leads. `keyed`: whether the keys are wanted."""
    if len(data) != size or _PAGE.unpack_from(data)[0] != page:
        raise PageDamaged(f"page {page} has another page's number")
    if _PAGE.unpack_from(data)[2] & _KINDS != _BRANCH:
        raise PageDamaged(f"page {page} is of another kind than its place in the tree says")
    places = _places(page, data, size)
    keys = [_key(page, data, size, place) for place in places] if keyed else []
    return keys, [low | high << 16 | top << 32 for low, high, top in map(partial(_POINTER.unpack_from, data), places)]


def _key(page: int, data: bytes, size: int, place: int) -> bytes:
    length = _NODE.unpack_from(data, place)[3]
    at = place + _NODE.size
    if length > _KEY_MAX or at + length > size:
        raise PageDamaged(f"page {page}: a key is longer than it can be")
    return data[at : at + length]


@dataclass(slots=True)
class Pages:
    """The use of a file's pages, as of one transaction.

    Attributes:
        size: bytes of a page.
        total: pages ever used, the two meta pages included.
        trees: the pages in use, by named database; "" stands for the list of their names.
        free: reusable pages, including those that older readers may still read.
        free_list: pages that the list of free pages takes.
    """

    size: int
    total: int
    trees: dict[str, int] = field(default_factory=dict)
    free: int = 0
    free_list: int = 0

    @property
    def used(self) -> int:
        """Pages of all trees of cells, and the meta pages; without free pages and their list."""
        return _METAS + sum(self.trees.values())

    @property
    def lost(self) -> int:
        """Pages that are neither in use nor free: they will never be used again."""
        return self.total - self.used - self.free - self.free_list


def survey(file: int, size: int, transaction: int) -> Iterator[Pages]:
    """Walk the pages of a file as of a transaction, which a reader must keep open meanwhile. Yields the result so far
    now and then, and the whole result last.

    Args:
        file: the file's descriptor.
        size: bytes of a page.

    Raises: PageDamaged; LookupError if both meta pages already belong to other transactions.
    """
    meta = meta_page(file, size, transaction)
    last, _ = _TAIL.unpack_from(meta, _TAIL_AT)
    if (last + 1) * size > os.fstat(file).st_size:
        raise PageDamaged(f"the file is cut short: {last + 1} pages are in use")
    walk = _Walk(file, size, last)
    found = walk.found
    yield found
    named: list[tuple[str, bytes]] = []
    for _ in walk.tree("", meta[_TREES_AT + _TREE.size : _TAIL_AT], named):
        yield found
    for name, tree in named:
        for _ in walk.tree(name, tree, None):
            yield found
    for _ in walk.free(meta[_TREES_AT : _TREES_AT + _TREE.size]):
        yield found
    yield found


def meta_page(file: int, size: int, transaction: int) -> bytes:
    """The meta page of a transaction. Raises: LookupError if two later transactions have committed."""
    for number in range(_METAS):
        page = os.pread(file, size, number * size)
        valid = len(page) == size and _META.unpack_from(page) == (_MAGIC, _VERSION)
        if valid and _TAIL.unpack_from(page, _TAIL_AT)[1] == transaction:
            return page
    raise LookupError(f"no meta page of transaction {transaction}")


class _Walk:
    """A walk over a file's pages, which checks that each has at most one use: in one tree, or free."""

    def __init__(self, file: int, size: int, last: int) -> None:
        self.found = Pages(size, last + 1)
        self._file, self._size, self._last = file, size, last
        self._seen = bytearray(last + 1)

    def tree(self, name: str, packed: bytes, named: list[tuple[str, bytes]] | None) -> Iterator[None]:
        """Walk the pages of a tree; `named` collects the trees that it names."""
        _, _, depth, branches, leaves, overflows, entries, root = _TREE.unpack(packed)
        counts = [0, 0, 0]
        cells = 0
        for page, data in self._pages(root, depth):
            counts[0 if data is None else 1] += 1
            if data is not None:
                for flags, key, value in self._nodes(page, data):
                    cells += 1
                    if flags & _BIG:
                        counts[2] += self._long(value)
                    if flags & _SUBTREE and named is not None:
                        named.append(_named(page, key, value))
                    elif flags & _SUBTREE or (named is not None and flags & ~_BIG):
                        raise PageDamaged(f"page {page}: a cell has impossible flags")
            if not sum(counts[:2]) % _STEPS:
                yield
        self.found.trees[name] = sum(counts)
        if (branches, leaves, overflows, entries) != (*counts, cells):
            raise PageDamaged(f"group {name!r} has {cells} cells in {sum(counts)} pages, and its head says {entries}")

    def free(self, packed: bytes) -> Iterator[None]:
        """Walk the list of free pages: for each transaction's number, the pages that it freed."""
        _, _, depth, _, _, _, _, root = _TREE.unpack(packed)
        before = 0
        for page, data in self._pages(root, depth, least=1):
            self.found.free_list += 1
            for flags, key, value in self._nodes(page, data) if data is not None else ():
                if len(key) != _NUMBER.size or (number := _NUMBER.unpack(key)[0]) <= before:
                    raise PageDamaged(f"page {page}: the list of free pages is out of order")
                before = number
                self._take_free(page, self._value(page, flags, value))
            yield

    def _value(self, page: int, flags: int, value: bytes) -> bytes:
        if not flags & _BIG:
            return value
        first = _NUMBER.unpack_from(value)[0]
        count = self._long(value)
        self.found.free_list += count
        return os.pread(self._file, count * self._size - _PAGE.size, first * self._size + _PAGE.size)

    def _take_free(self, page: int, packed: bytes) -> None:
        count = _NUMBER.unpack_from(packed)[0] if len(packed) >= _NUMBER.size else 0
        if not 0 < (count + 1) * _NUMBER.size <= len(packed):
            raise PageDamaged(f"page {page}: the list of free pages is cut short")
        numbers = struct.unpack_from(f"={count}Q", packed, _NUMBER.size)
        for number in numbers:
            self._take(number, 1, "is on the list of free pages, and")
        if any(one <= other for one, other in pairwise(numbers)):
            raise PageDamaged(f"page {page}: free pages are out of order")
        self.found.free += count

    def _pages(self, root: int, depth: int, least: int = 2) -> Iterator[tuple[int, bytes | None]]:
        """Every page of a tree: its number and, if it is a leaf, its contents."""
        if root == NO_ROOT:
            if depth:
                raise PageDamaged(f"a tree of depth {depth} has no root")
            return
        if not 0 < depth <= _DEPTH_MAX:
            raise PageDamaged(f"page {root} is the root of a tree of depth {depth}")
        left = [(root, depth)]
        while left:
            page, level = left.pop()
            data = self._read(page)
            kind = _PAGE.unpack_from(data)[2] & _KINDS
            if kind != (_BRANCH if level > 1 else _LEAF):
                raise PageDamaged(f"page {page} is of another kind than its place in the tree says")
            if kind == _LEAF:
                yield page, data
                continue
            _, below = _branch(page, data, self._size)
            if len(below) < least:
                raise PageDamaged(f"page {page} leads to {len(below)} pages")
            left += [(child, level - 1) for child in reversed(below)]
            yield page, None

    def _read(self, page: int) -> bytes:
        self._take(page, 1, "is in use, and")
        data = os.pread(self._file, self._size, page * self._size)
        if len(data) != self._size or _PAGE.unpack_from(data)[0] != page:
            raise PageDamaged(f"page {page} has another page's number")
        return data

    def _take(self, page: int, count: int, what: str) -> None:
        if not (page >= _METAS and page + count <= self._last + 1):
            raise PageDamaged(f"page {page} is referred to, and the file ends at page {self._last}")
        if any(self._seen[page : page + count]):
            raise PageDamaged(f"page {page} {what} has another use already")
        self._seen[page : page + count] = b"\1" * count

    def _nodes(self, page: int, data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
        """Each node of a leaf: flags, key, and value; for a long value, its first page and its size instead."""
        for place in _places(page, data, self._size):
            low, high, flags, length = _NODE.unpack_from(data, place)
            at = place + _NODE.size + length
            size = low | high << 16
            end = at + (_NUMBER.size if flags & _BIG else size)
            if not 0 < length <= _KEY_MAX or end > self._size:
                raise PageDamaged(f"page {page}: a cell is longer than its page")
            more = _NUMBER.pack(size) if flags & _BIG else b""
            yield flags, data[at - length : at], data[at:end] + more

    def _long(self, value: bytes) -> int:
        """How many pages a long value takes."""
        page, size = struct.unpack("=QQ", value)
        self._take(page, 1, "is of a long value, and")
        head = os.pread(self._file, _PAGE.size, page * self._size)
        number, _, flags, low, high = _PAGE.unpack(head)
        count = low | high << 16
        if number != page or flags & _KINDS != _OVERFLOW or count < 1 or count * self._size - _PAGE.size < size:
            raise PageDamaged(f"page {page} is not the first one of a long value of {size} bytes")
        if count > 1:
            self._take(page + 1, count - 1, "is of a long value, and")
        return int(count)


def _places(page: int, data: bytes, size: int) -> tuple[int, ...]:
    """The offsets of a page's nodes."""
    _, _, _, lower, upper = _PAGE.unpack_from(data)
    if not _PAGE.size <= lower <= upper <= size or lower % 2:
        raise PageDamaged(f"page {page}: its header is impossible")
    places: tuple[int, ...] = struct.unpack_from(f"={(lower - _PAGE.size) // 2}H", data, _PAGE.size)
    if not places or min(places) < upper or max(places) + _NODE.size > size:
        raise PageDamaged(f"page {page}: a cell lies outside of it")
    return places


def _named(page: int, key: bytes, value: bytes) -> tuple[str, bytes]:
    if len(value) != _TREE.size:
        raise PageDamaged(f"page {page}: the head of a group has {len(value)} bytes")
    return key.decode(errors="replace"), value


# ------------------------------------------------------------ every page in use, with its bytes


class Unit(NamedTuple):
    """A page or, for a long value, all of its pages. `number`: of the first one."""

    number: int
    data: bytes


def pages_of(meta: bytes) -> int:
    """How many pages a file has, as of the transaction of a meta page: those in use, and free ones."""
    return int(_TAIL.unpack_from(meta, _TAIL_AT)[0]) + 1


def units(file: int, size: int, meta: bytes) -> Iterator[list[Unit]]:
    """Every page in use as of a meta page, except the meta pages: some units at a time. The list of free pages is in
    use, too. A reader must keep the transaction open meanwhile, so that none of these pages is written to (S3).

    Args:
        file: the file's descriptor.
        size: bytes of a page.

    Raises: PageDamaged.
    """
    taking = _Taking(file, size, pages_of(meta))
    named: list[bytes] = []
    yield from taking.tree(meta[_TREES_AT : _TREES_AT + _TREE.size], None)
    yield from taking.tree(meta[_TREES_AT + _TREE.size : _TAIL_AT], named)
    for tree in named:
        yield from taking.tree(tree, None)


class _Taking:
    """Reads the pages of trees. Unlike `_Walk`, it reads no cell, except for those that lead to further pages."""

    def __init__(self, file: int, size: int, total: int) -> None:
        self._file, self._size, self._total = file, size, total
        self._left = total  # more pages than that are not in use: their references form a circle

    def tree(self, packed: bytes, named: list[bytes] | None) -> Iterator[list[Unit]]:
        """The pages of a tree. `named`: collects the trees that it names."""
        _, _, depth, _, _, _, _, root = _TREE.unpack(packed)
        if root == NO_ROOT:
            return
        if not 0 < depth <= _DEPTH_MAX:
            raise PageDamaged(f"page {root} is the root of a tree of depth {depth}")
        left = [([root], depth)]
        while left:
            numbers, level = left.pop()
            found = self._pages(numbers, _BRANCH if level > 1 else _LEAF)
            yield found
            if level > 1:
                left += [(_branch(*unit, self._size)[1], level - 1) for unit in reversed(found)]
                continue
            if long := [self._long(*value) for unit in found for value in self._marked(unit, _BIG, _NUMBER)]:
                yield long
            if named is not None:
                named += [_TREE.pack(*tree) for unit in found for tree in self._marked(unit, _SUBTREE, _TREE)]

    def _pages(self, numbers: Sequence[int], kind: int) -> list[Unit]:
        """The pages with these numbers; those that lie side by side are read at once."""
        size, found, n = self._size, [], 0
        while n < len(numbers):
            first, last = numbers[n], n + 1
            while last < len(numbers) and numbers[last] == numbers[last - 1] + 1:
                last += 1
            data = self._read(first, last - n)
            for at in range(0, len(data), size):
                page = data[at : at + size]
                number, _, flags, _, _ = _PAGE.unpack_from(page)
                if number != first + at // size or flags & _KINDS != kind:
                    raise PageDamaged(f"page {first + at // size} is not what its place in the tree says")
                found.append(Unit(number, page))
            n = last
        return found

    def _read(self, first: int, count: int) -> bytes:
        self._left -= count
        if not (first >= _METAS and first + count <= self._total and self._left >= 0):
            raise PageDamaged(f"page {first} is referred to, and the file has {self._total} pages in all")
        data = os.pread(self._file, count * self._size, first * self._size)
        if len(data) != count * self._size:
            raise PageDamaged(f"the file ends before page {first + count}")
        return data

    def _marked(self, unit: Unit, flag: int, value: struct.Struct) -> Iterator[tuple[int, ...]]:
        """The values of the cells in a leaf that have this flag."""
        page, data = unit
        for place in _places(page, data, self._size):
            if data[place + _FLAGS_AT] & flag:
                at = place + _NODE.size + _NODE.unpack_from(data, place)[3]
                if at + value.size > self._size:
                    raise PageDamaged(f"page {page}: a cell is longer than its page")
                yield value.unpack_from(data, at)

    def _long(self, first: int) -> Unit:
        """The pages of a long value."""
        number, _, flags, low, high = _PAGE.unpack_from(self._read(first, 1))
        count = low | high << 16
        if number != first or flags & _KINDS != _OVERFLOW or count < 1:
            raise PageDamaged(f"page {first} is not the first one of a long value")
        self._left += 1
        return Unit(first, self._read(first, count))


def meta_pages(meta: bytes) -> list[bytes]:
    """Both meta pages of a file that has the pages of this transaction only."""
    _, transaction = _TAIL.unpack_from(meta, _TAIL_AT)
    made = []
    for number in range(_METAS):
        page = bytearray(meta)
        _NUMBER.pack_into(page, 0, number)
        # LMDB reads the page with the newer transaction, and its next commit writes the other one.
        _NUMBER.pack_into(page, _TAIL_AT + _NUMBER.size, transaction - ((transaction & 1) != number))
        made.append(bytes(page))
    return made


def last_transaction(path: Path) -> int:
    """The last transaction of a file, as its meta pages say; 0: neither of them is valid. Raises: OSError."""
    with open(path, "rb") as file:
        first = file.read(_TAIL_AT + _TAIL.size)
        size = _TREE.unpack_from(first, _TREES_AT)[0] if len(first) == _TAIL_AT + _TAIL.size else 0
        file.seek(size)
        metas = [first, file.read(_TAIL_AT + _TAIL.size)]
    whole = [meta for meta in metas if len(meta) == _TAIL_AT + _TAIL.size]
    valid = [meta for meta in whole if _META.unpack_from(meta) == (_MAGIC, _VERSION)]
    return max((int(_TAIL.unpack_from(meta, _TAIL_AT)[1]) for meta in valid), default=0)
