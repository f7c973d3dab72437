"""A consistent view of an LMDB environment, to read from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perco.errors import Corruption
from perco.storage.cells import (
    LOG,
    ScanRequest,
)
from perco.storage.engine import Cursor


def goes_on(request: ScanRequest, next: bytes) -> bool:
    if request.reverse:
        return request.stop is None or next < request.stop
    return next > request.start


class _Cursors(dict[str, Any]):
    """The cursors of one transaction, by group, each opened on first use."""

    __slots__ = ("_dbs", "_txn")

    def __init__(self, txn: Any, dbs: dict[str, Any]) -> None:
        self._txn, self._dbs = txn, dbs

    def __missing__(self, group: str) -> Any:
        cursor = self[group] = self._txn.cursor(self._dbs[group])
        return cursor


class Groups(dict[str, Any]):
    """LMDB's databases by locality group. Only damaged cells can name a group that was never made."""

    __slots__ = ()

    def __missing__(self, group: str) -> Any:
        raise Corruption("", f"there is no locality group {group!r}")


class LmdbView:
    """A transaction of LMDB as a `View` or `Batch`."""

    __slots__ = ("_dbs", "_txn", "cursor", "logs")

    def __init__(self, txn: Any, dbs: dict[str, Any]) -> None:
        self._txn, self._dbs = txn, dbs
        self.logs: bool = LOG in dbs  # E1
        self.cursor: Callable[[str], Cursor] = _Cursors(txn, dbs).__getitem__  # saves a Python frame at every seek

    def get(self, group: str, key: bytes) -> bytes | None:
        value: bytes | None = self._txn.get(key, None, self._dbs[group])
        return value

    def put(self, group: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, True, True, False, self._dbs[group])

    def delete(self, group: str, key: bytes) -> None:
        self._txn.delete(key, b"", self._dbs[group])
