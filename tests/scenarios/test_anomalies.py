"""What snapshot isolation forbids, and the one anomaly that it allows."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

import perco

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
text = docs.column("text", perco.TEXT)
SCHEMA = perco.Schema(docs)


async def set_all(db: perco.Database, **values: int) -> int:
    async with db.transaction() as txn:
        for key, value in values.items():
            txn.set(n, key, value)
    return txn.commit_ts


async def test_lost_update_one_of_two_must_retry() -> None:  # T7
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, k=0)
        t1, t2 = await db.begin(), await db.begin()
        assert await t1.get(n, "k") == await t2.get(n, "k") == 0
        t1.set(n, "k", 1)
        t2.set(n, "k", 2)
        commit_ts = await t1.commit()
        with pytest.raises(perco.WriteConflict) as caught:
            await t2.commit()
        assert caught.value.cells == (("docs", "k", "n"),)
        assert caught.value.other_ts == commit_ts
        assert caught.value.start_ts == t2.start_ts
        assert (t1.outcome, t2.outcome) == ("committed", "aborted")
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") == 1


async def test_of_two_blind_writers_the_second_conflicts_too() -> None:  # T7
    async with perco.open("memory:", SCHEMA) as db:
        t1, t2 = await db.begin(), await db.begin()
        for txn in (t1, t2):
            txn.set(n, "k", txn.start_ts)
        await t2.commit()
        with pytest.raises(perco.WriteConflict):
            await t1.commit()


async def test_overlapping_transactions_on_different_cells_both_commit() -> None:  # T7
    """Conflicts are by cell, not by row."""
    async with perco.open("memory:", SCHEMA) as db:
        t1, t2 = await db.begin(), await db.begin()
        t1.set(n, "k", 1)
        t2.set(text, "k", "two")
        await t1.commit()
        await t2.commit()
        async with db.snapshot() as snap:
            row = await snap.row(docs, "k")
            assert (row[n], row[text]) == (1, "two")


async def test_a_delete_conflicts_as_a_write_does() -> None:  # T7
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, k=0)
        t1, t2 = await db.begin(), await db.begin()
        t1.delete(n, "k")
        t2.set(n, "k", 2)
        await t1.commit()
        with pytest.raises(perco.WriteConflict):
            await t2.commit()


async def test_write_skew_is_allowed() -> None:  # T14
    """Two doctors on call, each sees the other and goes home. Snapshot isolation lets both.

    A program that cannot accept this makes both write a cell in common.
    """
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, alice=1, zoe=1)
        t1, t2 = await db.begin(), await db.begin()
        assert sum((await t1.get_many(n, ["alice", "zoe"])).values()) == 2  # type: ignore[arg-type]
        assert sum((await t2.get_many(n, ["alice", "zoe"])).values()) == 2  # type: ignore[arg-type]
        t1.set(n, "alice", 0)
        t2.set(n, "zoe", 0)
        await t1.commit()
        await t2.commit()
        async with db.snapshot() as snap:
            assert await snap.get_many(n, ["alice", "zoe"]) == {"alice": 0, "zoe": 0}


async def test_a_cell_in_common_prevents_write_skew() -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, alice=1, zoe=1)
        t1, t2 = await db.begin(), await db.begin()
        for txn, who in ((t1, "alice"), (t2, "zoe")):
            assert await txn.get(n, "alice") == await txn.get(n, "zoe") == 1
            txn.set(n, who, 0)
            txn.set(text, "shift", who)
        await t1.commit()
        with pytest.raises(perco.WriteConflict):
            await t2.commit()


async def test_a_snapshot_never_changes() -> None:  # T2 T9
    """Not by writes, nor by new rows, nor by deletes: read in every way, before and after."""
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, a=1, b=2, n=3, z=4)

        async def everything(snap: perco.Snapshot) -> list[object]:
            return [
                [await snap.get(n, key) for key in "abcnz"],
                await snap.get_many(n, list("abcnz")),
                [(row.key, row[n], row.commit_ts(n)) async for row in snap.scan(docs, columns=[n])],
                [(row.key, row[n]) async for row in snap.scan(docs, columns=[n], reverse=True)],
                [repr(await snap.row(docs, key)) for key in "abcnz"],
            ]

        async with db.snapshot() as snap, db.transaction() as reader:
            before, before_too = await everything(snap), await everything(reader)
            assert before == before_too
            async with db.transaction() as txn:
                txn.set(n, "a", 100)
                txn.set(n, "c", 100)
                txn.delete(n, "b")
                txn.delete(n, "z")
            assert await everything(snap) == await everything(reader) == before
            async with db.transaction() as txn:
                txn.set(n, "b", 200)
                txn.delete(n, "a")
            assert await everything(snap) == await everything(reader) == before
        async with db.snapshot() as snap:
            assert await snap.get_many(n, list("abcnz")) == {"a": None, "b": 200, "c": 100, "n": 3, "z": None}


async def test_what_is_not_committed_is_not_read() -> None:  # T1
    async with perco.open("memory:", SCHEMA) as db:
        txn = await db.begin()
        txn.set(n, "k", 1)
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") is None
        txn.discard()
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") is None
            assert [row async for row in snap.scan(docs)] == []


async def test_what_was_acknowledged_is_read_by_all_that_begin_later() -> None:  # O1 T2
    async with perco.open("memory:", SCHEMA) as db:
        for i in range(5):
            commit_ts = await set_all(db, k=i)
            async with db.snapshot() as snap:
                assert snap.start_ts > commit_ts
                assert await snap.get(n, "k") == i


async def test_reads_are_repeatable_and_never_skewed() -> None:  # T9
    """A reader between two cells that are always written together sees them equal."""
    async with perco.open("memory:", SCHEMA, options=perco.Options(seed=1)) as db:
        await set_all(db, a=0, z=0)
        checked = 0

        async def write() -> None:
            for i in range(40):
                await set_all(db, a=i, z=i)
                await trio.lowlevel.checkpoint()

        async def read() -> None:
            nonlocal checked
            for _ in range(40):
                async with db.snapshot() as snap:
                    a = await snap.get(n, "a")
                    await trio.lowlevel.checkpoint()
                    assert a == await snap.get(n, "z")
                    assert a == await snap.get(n, "a")
                checked += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            nursery.start_soon(read)
        assert checked == 40


async def test_a_transaction_that_reads_and_does_not_write_never_conflicts() -> None:  # T7
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, k=0)
        async with db.transaction() as txn:
            assert await txn.get(n, "k") == 0
            await set_all(db, k=1)
            assert await txn.get(n, "k") == 0
        assert (txn.outcome, txn.commit_ts, txn.token) == ("committed", 0, "")


async def test_many_increments_of_few_cells_lose_none(autojump_clock: trio.testing.MockClock) -> None:  # T7 T11
    """Fluo's CollisionIT without observers: 20 tasks, 5 rows, exact counts at the end."""
    async with perco.open("memory:", SCHEMA, options=perco.Options(seed=7)) as db:
        rng = random.Random(11)
        expected = dict.fromkeys("amnyz", 0)

        async def increment(txn: perco.Transaction, key: str) -> None:
            value = await txn.get(n, key) or 0
            await trio.sleep(0.001)
            txn.set(n, key, value + 1)

        async def load(keys: list[str]) -> None:
            for key in keys:
                await db.options(attempts=10_000).run(increment, key)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                keys = [rng.choice("amnyz") for _ in range(20)]
                for key in keys:
                    expected[key] += 1
                nursery.start_soon(load, keys)
        async with db.snapshot() as snap:
            assert await snap.get_many(n, expected) == expected
        assert db.statistics().counters.conflicts > 100
        assert db.statistics().counters.commits == 400
