"""Searches that land where they must not, as over damaged pages: a scan ends with Corruption, and does not go round."""

from __future__ import annotations

import pytest

from perco.errors import Corruption
from perco.storage import ScanQuery, ScanRequest
from perco.storage.engine import Cursor, MemoryEngine
from perco.storage.keys import cell_key, escape
from perco.storage.lmdb_view import goes_on
from perco.storage.row import scan_rows


class Misled:
    """A cursor whose searches always end at the first key."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.key, self.value, self.item = cursor.key, cursor.value, cursor.item
        self.next, self.prev, self.last = cursor.next, cursor.prev, cursor.last

    def set_range(self, key: bytes) -> bool:
        return self._cursor.set_range(b"")


class MisledView:
    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine
        self.get = engine.get

    def cursor(self, group: str) -> Cursor:
        return Misled(self._engine.cursor(group))


@pytest.mark.parametrize(("from_ts", "to_ts"), [(0, 5), (20, 30)])
def test_a_search_that_goes_back_ends_the_scan(from_ts: int, to_ts: int) -> None:
    engine = MemoryEngine()
    engine.put("data", cell_key(escape(b"a"), 1, 10), b"value")
    query = ScanQuery("data", None, from_ts, to_ts, 100)
    with pytest.raises(Corruption, match="a search for it ends before it"):
        scan_rows(MisledView(engine), ScanRequest("t", b"", None, (query,)))


@pytest.mark.parametrize(
    ("reverse", "next", "is_step"),
    [(False, b"c", True), (False, b"b", False), (False, b"a", False), (True, b"c", True), (True, b"m", False)],
)
def test_each_page_is_a_step(reverse: bool, next: bytes, is_step: bool) -> None:
    query = ScanQuery("data", None)
    assert goes_on(ScanRequest("t", b"b", b"m", (query,), reverse), next) is is_step
