"""Dropped columns of a store in a folder: the log of changes, and what a later process finds (N17)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
from perco.check.check import CheckOptions, check
from perco.database.inside import inside
from perco.errors import SchemaMismatch
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


async def test_a_bulk_load_that_began_before_a_drop_is_not_published(tmp_path: Path) -> None:  # N17, P7
    schema, [body, note] = program("body", "note")
    async with perco.open(tmp_path / "store", schema) as db:
        begun, dropped = trio.Event(), trio.Event()

        def rows() -> Iterator[tuple[str, dict[Any, Any]]]:
            trio.from_thread.run_sync(begun.set)
            yield "a", {body: "x", note: "y"}
            trio.from_thread.run(dropped.wait)
            yield "b", {body: "x", note: "y"}

        async def drop() -> None:
            await begun.wait()
            await db.drop_column("docs", "body")
            await db.vacuum()
            dropped.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drop)
            with pytest.raises(perco.UsageError, match="columns of these tables were dropped since the load began"):
                await db.bulk_load({note.table: rows()})
        async with db.snapshot() as snap:
            assert [row.key async for row in snap.scan(note.table, columns=[note])] == []
        assert not (await check(local_of(db).store, options=CheckOptions(pause_s=0.0))).findings


async def test_a_table_that_is_made_again_may_have_a_log(tmp_path: Path) -> None:  # N17, E1
    plain = perco.Table("docs", key=perco.TEXT)
    text = plain.column("body", perco.TEXT)
    async with perco.open(tmp_path / "store", perco.Schema(plain)) as db:
        async with db.transaction() as txn:
            txn.set(text, "a", "old")
        await db.drop_table("docs")
    schema, [body] = program("body")
    with pytest.raises(SchemaMismatch, match="was made without changes=True"):  # its records are still there
        async with perco.open(tmp_path / "store", schema):
            pass
    async with perco.open(tmp_path / "store", perco.Schema(perco.Table("other"))) as db:
        await db.vacuum()
    async with perco.open(tmp_path / "store", schema) as db:
        async with db.snapshot() as snap:
            since = snap.start_ts
        async with db.transaction() as txn:
            txn.set(body, "b", "new")
        found = [row.key async for changes in db.changes("docs", since=since) for row in changes.rows]
        assert found == ["b"]
        assert not (await check(local_of(db).store, options=CheckOptions(pause_s=0.0))).findings


async def test_changes_of_a_column_that_was_dropped_are_an_error(tmp_path: Path) -> None:  # N17, E3
    schema, [body, _] = program("body", "note")
    async with perco.open(tmp_path / "store", schema) as db:
        async with db.transaction() as txn:
            txn.set(body, "a", "x")
        await db.drop_column("docs", "body")
        with pytest.raises(SchemaMismatch, match=r"docs\.body has been dropped"):
            async for _ in db.changes("docs", since=0):
                pass
