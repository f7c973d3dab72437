"""Walks the write records of a tablet, many cells at a time, for readers beside the owner that want columns, not rows.

S3  A walk reads a bounded number of cells in one view, because a view pins the pages that the owner frees meanwhile.
P4  A walk of rows that a split has moved to another tablet raises TabletSplit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, NamedTuple

import lmdb

from perco.storage.cells import LOCK, WRITE
from perco.storage.keys import TAIL_BYTES, escape, unescape
from perco.storage.lmdb_engine import LmdbEngine
from perco.storage.tablet import Tablet

_pack: Final = struct.Struct(">IQ").pack
_INVERT: Final = (1 << 64) - 1


class Walked(NamedTuple):
    """Some rows of a tablet, as of one view.

    Attributes:
        cells: all their write records, (key, record), in key order.
        next: the row at which to continue; None: there are no more rows.
        locks: the keys of all locks in these rows, and in rows between them.
        value: returns the value in a data group, given the group, a cell's prefix and column as in its key, and the
            transaction's start_ts; None if it is not there. Valid while the view is.
    """

    cells: list[tuple[bytes, bytes]]
    next: bytes | None
    locks: list[bytes]
    value: Callable[[str, bytes, int], bytes | None]


def engine_of(tablet: Tablet) -> LmdbEngine | None:
    """The environment of a tablet that is open in this process; None: it has none, or its files are damaged."""
    engine: LmdbEngine | None = getattr(tablet, "engine", None)
    return engine


@contextmanager
def walked(engine: LmdbEngine, start: bytes, stop: bytes | None, cells: int) -> Iterator[Walked | None]:
    """The rows from `start` up to but excluding `stop`, as many as fit into `cells` cells; None: the first row alone
    has more cells. The view ends with the block.

    Raises: TabletSplit, Corruption, Unavailable.
    """
    engine._open_groups([group for group in (WRITE, LOCK) if group not in engine._dbs])
    end = None if stop is None else escape(stop)
    try:
        with engine._begin() as txn:
            engine._check_stop(txn, start, stop, whole=True)

            def value(group: str, cell: bytes, start_ts: int) -> bytes | None:
                if group not in engine._dbs:
                    return None
                found: bytes | None = txn.get(cell + struct.pack(">Q", _INVERT - start_ts), None, engine._dbs[group])
                return found

            found = _cells(txn, engine, WRITE, escape(start), cells + 1, values=True)
            after: bytes | None = None
            if len(found) > cells:
                after = found[-1][0][:-TAIL_BYTES]
                while found and found[-1][0].startswith(after):
                    found.pop()
            if end is not None and (after is None or after >= end):
                after = None
                while found and found[-1][0] >= end:
                    found.pop()
            elif after is not None and not found:
                yield None
                return
            limit = end if after is None else after
            locks = []
            for key in _cells(txn, engine, LOCK, escape(start), None, values=False):
                if limit is not None and key >= limit:
                    break
                locks.append(key)
            yield Walked(found, None if after is None else unescape(after), locks, value)
    except lmdb.Error as error:
        raise engine._unreadable(error) from error


def _cells(txn: Any, engine: LmdbEngine, group: str, key: bytes, count: int | None, *, values: bool) -> Any:
    if group not in engine._dbs:
        return []
    cursor = txn.cursor(engine._dbs[group])
    if not cursor.set_range(key):
        return []
    found = cursor.iternext(True, values)
    return found if count is None else list(islice(found, count))
