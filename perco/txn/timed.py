"""Measures how long reads take, for metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from perco.clock.durations import Durations, Timings
from perco.storage import Prompt, ReadRequest, RowCells, RowReads, ScanPage, ScanRequest

T = TypeVar("T")


class TimedReads:
    """The reads of a row store, measured.

    Attributes: `leaves`: that of the store, if it has one (`columnar.py`).
    """

    leaves: Any

    def __init__(self, store: RowReads, timings: Timings) -> None:
        self._store, self._timings = store, timings
        self.leaves = getattr(store, "leaves", None)

    @property
    def prompt(self) -> Prompt | None:
        return self._store.prompt

    def bounds(self, table: str) -> list[bytes]:
        return self._store.bounds(table)

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        began = time.perf_counter()
        found = await self._store.read(requests)
        _note(self._timings.reads, began)
        return found

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        began = time.perf_counter()
        found = await self._store.read_first(requests, bytes_max)
        _note(self._timings.reads, began)
        return found

    async def scan(self, request: ScanRequest) -> ScanPage:
        began = time.perf_counter()
        found = await self._store.scan(request)
        _note(self._timings.scans, began)
        return found


async def timed(reading: Awaitable[T], timings: Timings) -> T:
    """The result of a read. Notes how long the read took."""
    began = time.perf_counter()
    found = await reading
    _note(timings.reads, began)
    return found


def _note(durations: Durations, began: float) -> None:
    durations.note(time.perf_counter() - began)
