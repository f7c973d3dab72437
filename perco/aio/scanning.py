"""Scans, for asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from perco.blocks import AsyncOnly
from perco.txn.row import Row
from perco.txn.scan import Scan as _Scan

K = TypeVar("K")


class Scan(AsyncOnly, Generic[K]):
    """An asynchronous iterator over rows, which are fetched in pages. A loop may leave it at any point."""

    _write = "async for row in snap.scan(...):` or `await snap.scan(...).all()"

    def __init__(self, of: _Scan[K], fetch: Callable[[_Scan[K]], Awaitable[Any]]) -> None:
        self._of, self._fetch = of, fetch

    def __aiter__(self) -> Scan[K]:
        return self

    async def __anext__(self) -> Row[K]:
        while True:
            row = self._of.take()
            if row is not None:
                return row
            if self._of.ended:
                raise StopAsyncIteration
            await self._fetch(self._of)

    async def all(self) -> list[Row[K]]:
        """The remaining rows, as a list."""
        return [row async for row in self]
