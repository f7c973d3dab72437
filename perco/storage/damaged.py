"""Tablets with damaged files: which ones can be read, and a stand-in for those that cannot.

A damaged file may do more than return wrong data: LMDB aborts the process that reads an impossible page. So `perco
check` reads the files in a process of its own, which announces each file before it reads it (see
`perco.cli.containing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from perco.errors import Corruption
from perco.storage.call import Call
from perco.storage.cells import Failed, Mutation, RowCells, ScanPage, ScanRequest
from perco.storage.lmdb_engine import LmdbEngine
from perco.storage.lmdb_options import LmdbOptions
from perco.storage.tablet import MemoryTablet

_CELLS: Final = 5_000  # cells read from one view, because a view pins pages while another process writes
_BYTES: Final = 4 << 20


class DamagedTablet(MemoryTablet):
    """A stand-in for a tablet whose file cannot be read: every call raises `Corruption`."""

    def __init__(self, table: str, start: bytes, why: Corruption) -> None:
        super().__init__(table, start)
        self._why = why

    def read(self, row: bytes, queries: Sequence[tuple[str, int, int, int, int]]) -> RowCells:
        raise self._why.again()

    def scan(self, request: ScanRequest) -> ScanPage:
        raise self._why.again()

    def submit(self, mutation: Mutation, call: Call, index: int) -> None:
        call.answer(index, Failed(self._why.again()))


def verify(path: Path, *, lock: bool) -> Iterator[None]:
    """Check that the pages of a tablet's file are consistent, and that its cells can be found. Yields now and then.

    Raises: Corruption at the first damaged page or cell.
    """
    engine = LmdbEngine(path, (), LmdbOptions(), readonly=True, lock=lock)
    try:
        for _ in engine.survey():
            yield
        for group in engine.groups():
            key: bytes | None = b""
            while key is not None:
                key = engine.verify_from(group, key or b"\0", _CELLS, _BYTES)
                yield
    finally:
        engine.close()
