"""A tablet's file as of one transaction, beside the process that writes to it.

S3  The transaction pins its pages: the owner does not write to them before it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import lmdb

from perco.errors import Corruption
from perco.storage.lmdb_engine import PidTaken, is_pid_taken
from perco.storage.pages import Unit, meta_page, pages_of, units

_MAP_BYTES: Final = 1 << 40  # of address space only: the owner's map may grow
_DBS_MAX: Final = 256


class PinnedFile:
    """Open until `close`. The methods that read need a transaction.

    Attributes:
        inode: the number of the file, which tells it from one that has taken its place.
        page: bytes of a page.
        meta: the meta page of the transaction.
    """

    inode: int
    page: int
    meta: bytes

    def __init__(self, path: Path) -> None:
        """`path`: the tablet's folder. Raises: FileNotFoundError; Corruption."""
        self._path = path
        self._txn: Any = None
        self._file = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._env: Any = lmdb.open(str(path), map_size=_MAP_BYTES, readonly=True, max_dbs=_DBS_MAX, readahead=False)
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, lmdb.Error):
                if is_pid_taken(error):
                    raise PidTaken(path) from error
                raise Corruption(str(path), f"LMDB cannot open it: {error}") from error
            raise
        self.inode, self.page, self.meta = os.fstat(self._file).st_ino, int(self._env.stat()["psize"]), b""

    def begin(self) -> None:
        """Begin a transaction: the newest one. Raises: Corruption."""
        try:
            self._txn = self._env.begin()
            self.meta = meta_page(self._file, self.page, self._txn.id())
        except (lmdb.Error, LookupError) as error:
            raise Corruption(str(self._path), str(error)) from error

    def end(self) -> None:
        """End the transaction, if there is one."""
        if self._txn is not None:
            self._txn.abort()
        self._txn = None

    def close(self) -> None:
        self.end()
        self._env.close()
        os.close(self._file)

    def cells(self, group: str, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The cells of a group, from a key on. Raises: Corruption."""
        try:
            db = self._env.open_db(group.encode(), txn=self._txn, create=False)
            with self._txn.cursor(db) as cursor:
                if cursor.set_range(key):
                    yield from cursor.iternext(True, True)
        except lmdb.NotFoundError:
            return
        except lmdb.Error as error:
            raise Corruption(str(self._path), str(error)) from error

    @property
    def total(self) -> int:
        """How many pages the file has, free ones included."""
        return pages_of(self.meta)

    def units(self) -> Iterator[list[Unit]]:
        """See `pages.units`. Raises: PageDamaged."""
        return units(self._file, self.page, self.meta)
