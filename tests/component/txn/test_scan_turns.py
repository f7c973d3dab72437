"""How often a task that only scans gives way to others."""

from __future__ import annotations

from pathlib import Path

import pytest

import perco
from perco.database.inside import inside
from perco.storage.cells import SEEKS_FEW, ScanPage, ScanRequest
from tests.support.turns import turns_of_others

table = perco.Table("rows", key=perco.INT64)
word = table.column("word", perco.TEXT)
rare = table.column("rare", perco.TEXT)
ROWS = 4 * SEEKS_FEW


@pytest.mark.parametrize("where", ["memory", "lmdb"])
@pytest.mark.parametrize("reverse", [False, True])
async def test_scans_that_walk_far_and_find_nothing_give_way(where: str, reverse: bool, tmp_path: Path) -> None:
    async with perco.open("memory:" if where == "memory" else tmp_path / "store", perco.Schema(table)) as db:
        async with db.transaction() as txn:
            for key in range(ROWS):
                txn.set(word, key, "word")
        async with db.snapshot() as snap:

            async def scans() -> None:
                for _ in range(20):
                    assert await snap.scan(table, columns=[rare], limit=1, reverse=reverse).all() == []

            assert await turns_of_others(scans) >= 15


async def test_the_first_page_of_a_scan_takes_few_seeks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with perco.open("memory:", perco.Schema(table)) as db:
        async with db.transaction() as txn:
            for key in range(ROWS):
                txn.set(word, key, "word")
        asked: list[ScanRequest] = []
        store = inside(db).store
        scan = store.scan

        async def noted(request: ScanRequest) -> ScanPage:
            asked.append(request)
            return await scan(request)

        monkeypatch.setattr(store, "scan", noted)
        async with db.snapshot() as snap:
            assert len(await snap.scan(table).all()) == ROWS
    first, *others = asked
    assert first.seeks_max == SEEKS_FEW
    assert others
    assert all(each.seeks_max > SEEKS_FEW and each.rows_max == 256 for each in others)
