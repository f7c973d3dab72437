"""Scans, for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from perco.blocks import AsyncOnly
from perco.errors import UsageError
from perco.txn.row import Row
from perco.txn.scan import Scan as _Scan

if TYPE_CHECKING:
    from pyarrow import RecordBatch, RecordBatchReader, Schema

K = TypeVar("K")


class Scan(AsyncOnly, Generic[K]):
    """An asynchronous iterator over rows, which are fetched in pages. A loop may leave it at any point."""

    _write = "async for row in snap.scan(...):` or `await snap.scan(...).all()"

    def __init__(self, of: _Scan[K], fetch: Callable[[Any], Awaitable[Any]]) -> None:
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

    def to_batches(self, *, key: str | Sequence[str] = "key", packed: bool = False) -> Batches:
        """The remaining rows as Arrow record batches: see `perco.Snapshot.scan` and its `to_batches`."""
        return Batches(self._of.to_batches(key=key, packed=packed), self._fetch)

    def to_arrow(self, *, key: str | Sequence[str] = "key", packed: bool = False) -> RecordBatchReader:
        """The remaining rows as a `pyarrow.RecordBatchReader`, for polars, pandas, DuckDB and others. It waits for the
        loop: use it in another thread, as in `await asyncio.to_thread(reader.read_all)`. `key`, `packed`: see
        `to_batches`."""
        batches = self.to_batches(key=key, packed=packed)
        return batches._of.reader_of(batches._in_threads())


class Batches(AsyncOnly):
    """An asynchronous iterator over Arrow record batches with the remaining rows of a scan.

    Attributes: `schema`: of the batches, a `pyarrow.Schema`.
    """

    _write = "async for batch in snap.scan(...).to_batches():"

    def __init__(self, of: Any, fetch: Callable[[Any], Awaitable[Any]]) -> None:
        self._of, self._fetch = of, fetch
        self.schema: Schema = of.schema

    def __aiter__(self) -> Batches:
        return self

    async def __anext__(self) -> RecordBatch:
        batch = await self._next()
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def _next(self) -> RecordBatch | None:
        while True:
            batch = self._of.take()
            if batch is not None:
                return batch
            if self._of.ended:
                return None
            await self._fetch(self._of)

    def _in_threads(self) -> Iterator[RecordBatch]:
        """The batches, for other threads than that of the loop."""
        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def pull() -> Iterator[RecordBatch]:
            while True:
                if threading.get_ident() == thread:
                    raise UsageError(
                        "this RecordBatchReader waits for the loop, which waits for it: use it in another thread, as "
                        "in `await asyncio.to_thread(reader.read_all)`; or write `async for batch in "
                        "snap.scan(...).to_batches():`"
                    )
                batch = asyncio.run_coroutine_threadsafe(self._next(), loop).result()
                if batch is None:
                    return
                yield batch

        return pull()
