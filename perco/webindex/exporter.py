"""Hands documents to the search index, many at a time.

Dozens of observers run at once, and each waits until its document is durable in SQLite. Documents that arrive while a
transaction of SQLite is being synced go into the next one: group commit, in a thread, so that the loop keeps running.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

import perco
from perco.webindex.search import ExportRow, SearchIndex

_ROWS_MAX = 500  # in one transaction of SQLite
_FORGET_EVERY = 64  # transactions


class _Batch:
    __slots__ = ("done", "error", "rows")

    def __init__(self) -> None:
        self.rows: list[ExportRow] = []
        self.done = False
        self.error: Exception | None = None


class Exporter:
    """Writes to one search index, once it is connected to it."""

    forgotten: int
    rows: int
    transactions: int

    def __init__(self, on_export: Callable[[int], None] | None = None) -> None:
        self._index: SearchIndex | None = None
        self._on_export = on_export
        self._open = _Batch()
        self._turn = trio.Lock()
        self._oldest: Callable[[], Awaitable[int]] | None = None
        self.rows = self.transactions = self.forgotten = 0

    def connect(self, index: SearchIndex, oldest: Callable[[], Awaitable[int]] | None = None) -> None:
        """Set the index that documents go to from now on.

        Args:
            oldest: the smallest version that any process may still export; documents deleted before it are forgotten
                now and then.
        """
        self._index, self._oldest = index, oldest

    async def put(self, row: ExportRow) -> None:
        """Export a row; returns when it is durable in the index.

        Raises: SearchIndexError if SQLite could not take it; then it may be put again.
        """
        if self._index is None:
            raise RuntimeError("connect the exporter to a search index before its observers run")
        if len(self._open.rows) >= _ROWS_MAX:
            self._open = _Batch()
        batch = self._open
        batch.rows.append(row)
        async with self._turn:  # in the order of arrival: the first to get it writes the whole batch
            if not batch.done:
                await self._write(self._index, batch)
        if batch.error is not None:
            raise batch.error

    async def _write(self, index: SearchIndex, batch: _Batch) -> None:
        if batch is self._open:
            self._open = _Batch()
        with trio.CancelScope(shield=True):  # the others of the batch wait for it
            try:
                await trio.to_thread.run_sync(index.export, batch.rows)
                if self._oldest is not None and self.transactions % _FORGET_EVERY == 0:
                    with suppress(perco.Unavailable, perco.errors.SessionEnded):  # of a served store: forget later
                        self.forgotten += await trio.to_thread.run_sync(index.forget, await self._oldest())
            except Exception as error:
                batch.error = error
            batch.done = True
        self.rows += len(batch.rows)
        self.transactions += 1
        if self._on_export is not None and batch.error is None:
            self._on_export(len(batch.rows))
