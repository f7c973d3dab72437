"""Hands documents to the search index, many at a time.

Dozens of observers run at once, and each waits until its document is durable in SQLite. Documents that arrive while an
SQLite transaction is being synced go into the next transaction (group commit). The transactions run in a thread, so
that the loop keeps running.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

import perco
from perco.webindex.search import ExportRow, SearchIndex

_ROWS_MAX = 500  # in one SQLite transaction
_FORGET_EVERY = 64  # SQLite transactions


class _Batch:
    __slots__ = ("done", "error", "rows")

    def __init__(self) -> None:
        self.rows: list[ExportRow] = []
        self.done = False
        self.error: Exception | None = None


class Exporter:
    """Writes to the search index that it was last connected to."""

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
            oldest: returns the smallest version that any process may still export. Now and then, the exporter makes
                the index forget the documents that were deleted before that version.
        """
        self._index, self._oldest = index, oldest

    async def put(self, row: ExportRow) -> None:
        """Export a row; returns when it is durable in the index.

        Raises: SearchIndexError if SQLite could not store the row; the caller may then put it again.
        """
        if self._index is None:
            raise RuntimeError("connect the exporter to a search index before its observers run")
        if len(self._open.rows) >= _ROWS_MAX:
            self._open = _Batch()
        batch = self._open
        batch.rows.append(row)
        async with self._turn:  # granted in the order of arrival; the first holder writes the whole batch
            if not batch.done:
                await self._write(self._index, batch)
        if batch.error is not None:
            raise batch.error

    async def _write(self, index: SearchIndex, batch: _Batch) -> None:
        if batch is self._open:
            self._open = _Batch()
        with trio.CancelScope(shield=True):  # the other rows of the batch wait for this
            try:
                await trio.to_thread.run_sync(index.export, batch.rows)
                if self._oldest is not None and self.transactions % _FORGET_EVERY == 0:
                    with suppress(perco.Unavailable, perco.errors.SessionEnded):  # the owner is away: forget later
                        self.forgotten += await trio.to_thread.run_sync(index.forget, await self._oldest())
            except Exception as error:
                batch.error = error
            batch.done = True
        self.rows += len(batch.rows)
        self.transactions += 1
        if self._on_export is not None and batch.error is None:
            self._on_export(len(batch.rows))
