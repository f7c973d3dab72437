"""The changes of tables, for threads."""

from __future__ import annotations

from collections.abc import Callable

from perco.blocks import BlockingOnly
from perco.history.changes import Changes, ChangeStream as _ChangeStream


class ChangeStream(BlockingOnly):
    """An iterator over `Changes`: see `perco.ChangeStream`. A loop may leave it at any point."""

    _write = "for changes in db.changes(...):"

    def __init__(self, of: _ChangeStream, fetch: Callable[[_ChangeStream], None]) -> None:
        self._of, self._fetch = of, fetch

    @property
    def frontier(self) -> int:
        """Every transaction that committed at or below this timestamp has been returned, and none above it."""
        return self._of.frontier

    def __iter__(self) -> ChangeStream:
        return self

    def __next__(self) -> Changes:
        while True:
            changes = self._of.take()
            if changes is not None:
                return changes
            if self._of.ended:
                raise StopIteration
            self._fetch(self._of)
