"""One view of a tablet's files for readers beside the owner that make columns, not rows: the tree of the write group,
whose pages they read themselves (`pages.py` has the format), and the locks.

S3  A view pins the pages that the owner frees meanwhile, so none of them changes before the view ends. A reader reads a
    bounded number of cells in one view.
P4  A view of rows that a split has moved to another tablet raises TabletSplit.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import lmdb

from perco.errors import Unavailable
from perco.storage.cells import LOCK, WRITE
from perco.storage.keys import escape
from perco.storage.lmdb_engine import LmdbEngine
from perco.storage.pages import NO_ROOT, Tree, tree_of
from perco.storage.tablet import Tablet

_INVERT: Final = (1 << 64) - 1
_EMPTY: Final = Tree(0, NO_ROOT)


class View(NamedTuple):
    """A tablet as of one moment. Everything is valid while the view is.

    Attributes:
        file: the descriptor of the tablet's file.
        page: bytes of one of its pages.
        tree: the tree of the write group.
        locks: returns the keys of all locks in the rows from one up to, but excluding, another; None: up to the end.
        value: returns the value in a data group, given the group, a cell's prefix and column as in its key, and the
            transaction's start_ts; None if it is not there.
    """

    file: int
    page: int
    tree: Tree
    locks: Callable[[bytes, bytes | None], list[bytes]]
    value: Callable[[str, bytes, int], bytes | None]


def engine_of(tablet: Tablet) -> LmdbEngine | None:
    """The environment of a tablet that is open in this process; None: it has none, or its files are damaged."""
    engine: LmdbEngine | None = getattr(tablet, "engine", None)
    return engine


@contextmanager
def viewed(engine: LmdbEngine, start: bytes, stop: bytes | None) -> Iterator[View]:
    """View a tablet that a process beside the owner has open, to read the rows from `start` up to but excluding `stop`.

    Raises: TabletSplit; Corruption; Unavailable, also if another file has just taken the place of the tablet's.
    """
    engine._open_groups([group for group in (WRITE, LOCK) if group not in engine._dbs])
    file = os.open(engine.path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if engine.replaced_by(file):
            raise Unavailable(f"{engine.path}: the file has been replaced")
        with engine._begin() as txn:
            engine._check_stop(txn, start, stop, whole=True)

            def locks(low: bytes, high: bytes | None) -> list[bytes]:
                if LOCK not in engine._dbs:
                    return []
                end, found = None if high is None else escape(high), []
                with txn.cursor(engine._dbs[LOCK]) as cursor:
                    for key in cursor.iternext(True, False) if cursor.set_range(escape(low)) else ():
                        if end is not None and key >= end:
                            break
                        found.append(key)
                return found

            def value(group: str, cell: bytes, start_ts: int) -> bytes | None:
                if group not in engine._dbs:
                    return None
                found: bytes | None = txn.get(cell + struct.pack(">Q", _INVERT - start_ts), None, engine._dbs[group])
                return found

            with txn.cursor() as names:
                tree = tree_of(names.value()) if names.set_key(WRITE.encode()) else _EMPTY
            yield View(file, engine.page_bytes, tree, locks, value)
    except lmdb.Error as error:
        raise engine._unreadable(error) from error
    finally:
        os.close(file)
