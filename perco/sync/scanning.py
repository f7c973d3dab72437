"""Scans, for threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from perco.blocks import BlockingOnly
from perco.txn.row import Row
from perco.txn.scan import Scan as _Scan

K = TypeVar("K")


class Scan(BlockingOnly, Generic[K]):
    """An iterator over rows, which are fetched in pages. A loop may leave it at any point."""

    _write = "for row in snap.scan(...):"

    def __init__(self, of: _Scan[K], settle: Callable[[], None], fetch: Callable[[_Scan[K]], None]) -> None:
        self._of, self._settle, self._fetch = of, settle, fetch

    def __iter__(self) -> Scan[K]:
        return self

    def __next__(self) -> Row[K]:
        while True:
            self._settle()
            row = self._of.take()
            if row is not None:
                return row
            if self._of.ended:
                raise StopIteration
            self._fetch(self._of)

    def all(self) -> list[Row[K]]:
        """The remaining rows, as a list."""
        return list(self)
