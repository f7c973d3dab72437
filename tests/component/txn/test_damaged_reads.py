"""Reads of a cell whose record is damaged, with a newer lock above it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import perco
from perco.database.inside import inside
from perco.protocol.mutations import Header, Intent, commit, prewrite
from perco.protocol.records import PUT, Cellref
from perco.storage import APPLIED, WRITE, Mutation

table = perco.Table("rows", key=perco.TEXT)
word = table.column("word", perco.TEXT)


async def by_get(snap: perco.Snapshot) -> Any:
    return await snap.get(word, "b")


async def by_get_many(snap: perco.Snapshot) -> Any:
    return (await snap.get_many(word, ["a", "b"]))["b"]


async def by_row(snap: perco.Snapshot) -> Any:
    return (await snap.row(table, "b"))[word]


async def by_scan(snap: perco.Snapshot) -> Any:
    return {row.key: row[word] async for row in snap.scan(table)}["b"]


async def by_scan_backwards(snap: perco.Snapshot) -> Any:
    return {row.key: row[word] async for row in snap.scan(table, reverse=True, limit=2)}["b"]


READS = [by_get, by_get_many, by_row, by_scan, by_scan_backwards]


@pytest.mark.parametrize("read", READS)
async def test_a_lock_is_settled_before_the_record_below_it_is_looked_at(
    read: Callable[[perco.Snapshot], Awaitable[Any]],
) -> None:  # T9
    async with perco.open("memory:", perco.Schema(table)) as db:
        within = inside(db)
        async with db.transaction() as txn:
            txn.set(word, "a", "old")
            txn.set(word, "b", "old")
        column = within.known.bind(word).column
        damaged = Mutation("rows", ((b"b", (), ((WRITE, column, txn.commit_ts, b"\xee"),)),))
        intents = [Intent("rows", row, column, PUT, b"new") for row in (b"a", b"b")]
        header = Header(await within.oracle.draw(), Cellref("rows", b"a", column), 0, 0, "")
        locks = [prewrite(header, [each], again=False) for each in intents]
        # The process dies after it has committed the primary.
        assert await within.store.apply([damaged, *locks]) == [APPLIED] * 3
        assert await within.store.apply([commit(header, intents[:1], await within.oracle.draw())]) == [APPLIED]
        async with db.snapshot() as snap:
            assert await read(snap) == "new"


@pytest.mark.parametrize("read", READS)
async def test_a_damaged_record_is_told_with_its_cell(read: Callable[[perco.Snapshot], Awaitable[Any]]) -> None:
    async with perco.open("memory:", perco.Schema(table)) as db:
        async with db.transaction() as txn:
            txn.set(word, "a", "old")
            txn.set(word, "b", "old")
        column = inside(db).known.bind(word).column
        damaged = Mutation("rows", ((b"b", (), ((WRITE, column, txn.commit_ts, b"\xee"),)),))
        assert await inside(db).store.apply([damaged]) == [APPLIED]
        async with db.snapshot() as snap:
            with pytest.raises(perco.errors.Corruption, match=r"rows\['b'\]\.word"):
                await read(snap)
