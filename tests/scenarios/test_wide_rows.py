"""Many columns of one row in one transaction: a store without groups gets them in several mutations."""

from __future__ import annotations

from typing import Any

import pytest

import perco

WIDE = 300

docs = perco.Table("docs", key=perco.TEXT)
columns = [docs.column(f"c{number}", perco.INT64) for number in range(WIDE)]
SCHEMA = perco.Schema(docs)


async def values(db: Any, key: str) -> list[int | None]:
    async with db.snapshot() as snap:
        row = await snap.row(docs, key, columns)
        return [row[column] for column in columns]


@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
async def test_all_columns_of_a_row_change_together(isolation: str) -> None:  # T1 T12 S1
    async with perco.open("memory:", SCHEMA) as db:
        for number in range(2):
            async with db.transaction(isolation=isolation) as txn:
                for column in columns:
                    txn.set(column, "a", number)
            assert await values(db, "a") == [number] * WIDE


async def test_of_two_that_write_one_of_many_columns_one_commits() -> None:  # T7
    async with perco.open("memory:", SCHEMA) as db:
        first, second = await db.begin(), await db.begin()
        for column in columns:
            first.set(column, "a", 1)
        second.set(columns[-1], "a", 2)
        await second.commit()
        with pytest.raises(perco.WriteConflict):
            await first.commit()
        assert await values(db, "a") == [None] * (WIDE - 1) + [2]


async def test_many_columns_are_read_under_a_lock() -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            for column in columns:
                assert await txn.get(column, "a", lock=True) is None
            txn.set(columns[0], "a", 1)
        assert await values(db, "a") == [1] + [None] * (WIDE - 1)
