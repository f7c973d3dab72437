"""Scans, for threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from perco.blocks import BlockingOnly
from perco.txn.row import Row
from perco.txn.scan import Scan as _Scan

if TYPE_CHECKING:
    from pyarrow import RecordBatch, RecordBatchReader, Schema

K = TypeVar("K")


class Scan(BlockingOnly, Generic[K]):
    """An iterator over rows, which are fetched in pages. A loop may leave it at any point."""

    _write = "for row in snap.scan(...):"

    def __init__(self, of: _Scan[K], settle: Callable[[], None], fetch: Callable[[Any], None]) -> None:
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

    def to_batches(self, *, key: str | Sequence[str] = "key", packed: bool = False) -> Batches:
        """The remaining rows as Arrow record batches: see `perco.Snapshot.scan` and its `to_batches`."""
        self._settle()
        return Batches(self._of.to_batches(key=key, packed=packed), self._settle, self._fetch)

    def to_arrow(self, *, key: str | Sequence[str] = "key", packed: bool = False) -> RecordBatchReader:
        """The remaining rows as a `pyarrow.RecordBatchReader`, for polars, pandas, DuckDB and others. Any thread may
        read from it. `key`, `packed`: see `to_batches`."""
        batches = self.to_batches(key=key, packed=packed)
        return batches._of.reader_of(batches)


class Batches(BlockingOnly):
    """An iterator over Arrow record batches with the remaining rows of a scan.

    Attributes: `schema`: of the batches, a `pyarrow.Schema`.
    """

    _write = "for batch in snap.scan(...).to_batches():"

    def __init__(self, of: Any, settle: Callable[[], None], fetch: Callable[[Any], None]) -> None:
        self._of, self._settle, self._fetch = of, settle, fetch
        self.schema: Schema = of.schema
        self._lock = threading.Lock()

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> RecordBatch:
        with self._lock:
            return self._next()

    def _next(self) -> RecordBatch:
        while True:
            batch = self._of.take()
            if batch is not None:
                return batch
            if self._of.ended:
                raise StopIteration
            self._settle()
            self._fetch(self._of)
