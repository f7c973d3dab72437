"""The changes of tables, for asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from perco.blocks import AsyncOnly
from perco.history.changes import Changes, ChangeStream as _ChangeStream


class ChangeStream(AsyncOnly):
    """An asynchronous iterator over `Changes`: see `perco.ChangeStream`. A loop may leave it at any point."""

    _write = "async for changes in db.changes(...):"

    def __init__(self, of: _ChangeStream, fetch: Callable[[_ChangeStream], Awaitable[Any]]) -> None:
        self._of, self._fetch = of, fetch

    @property
    def frontier(self) -> int:
        """Every transaction that committed at or below this timestamp has been returned, and none above it."""
        return self._of.frontier

    def __aiter__(self) -> ChangeStream:
        return self

    async def __anext__(self) -> Changes:
        while True:
            changes = self._of.take()
            if changes is not None:
                return changes
            if self._of.ended:
                raise StopAsyncIteration
            await self._fetch(self._of)
