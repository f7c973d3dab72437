"""The benchmark of changes, on a few rows: it follows what it writes; no figure of it is judged here."""

from __future__ import annotations

import perco
from bench.changes import Bank, Cells, _take_all, _write


async def test_what_is_written_is_read() -> None:
    cells = Cells(changes=True, tablets=4)
    async with perco.open("memory:", cells.schema) as db:
        assert await _write(db, cells.n, 200, 0) > 0
        assert min(await _take_all(db, cells.table, 200)) > 0


def test_money_is_in_two_tables_that_keep_logs() -> None:
    assert all(table.changes for table in Bank().schema.tables.values())
