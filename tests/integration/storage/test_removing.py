"""Dropped columns of a store in a folder: the log of changes, and what a later process finds (N17)."""

from __future__ import annotations

from pathlib import Path

import perco
from perco.check.check import CheckOptions, check
from perco.database.inside import inside
from perco.storage import TS_MAX, WRITE, ScanQuery, ScanRequest
from tests.support.places import local_of


def program(*columns: str) -> tuple[perco.Schema, list[perco.Column[str, str]]]:
    table = perco.Table("docs", key=perco.TEXT, changes=True)
    return perco.Schema(table), [table.column(name, perco.TEXT, group=name) for name in columns]


async def logged(db: perco.Database) -> set[int]:
    """The columns of which the log has entries, by number."""
    request = ScanRequest("docs", b"", None, (ScanQuery(WRITE, None, 0, TS_MAX, 0),), False, 1000, log=b"")
    return {column >> 16 for _, [[(column, _, _)]] in (await local_of(db).store.scan(request)).rows}


async def test_with_a_record_goes_its_entry_in_the_log(tmp_path: Path) -> None:  # N17, E1
    schema, columns = program("body", "note")
    async with perco.open(tmp_path / "store", schema) as db:
        for i in range(50):
            async with db.transaction() as txn:
                for column in columns:
                    txn.set(column, f"key {i}", "x" * (10 + 1000 * (i % 2)))
        await db.drop_column("docs", "body")
        assert await logged(db) == {1, 2}
    schema, [note] = program("note")
    async with perco.open(tmp_path / "store", schema) as db:  # a later process removes the cells
        assert (await db.vacuum()).removed.dropped == 50 + 50 + 25
        assert await logged(db) == {2}
        found = [row.after async for changes in db.changes("docs", since=0) for row in changes.rows]
        assert len(found) == 50
        assert all(set(after) == {"note"} for after in found)
        assert not (await check(local_of(db).store, options=CheckOptions(pause_s=0.0))).findings
    async with perco.open(tmp_path / "store", schema) as db:
        assert inside(db).catalogue.tables["docs"].gone[1].clean
        async with db.snapshot() as snap:
            assert len([row[note] async for row in snap.scan(note.table)]) == 50
