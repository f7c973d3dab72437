"""Operations on one cell, each a transaction in one call."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.errors import TooLarge
from perco.schema.codecs import Codec

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
share = docs.column("share", perco.FLOAT64)
price = docs.column("price", perco.DECIMAL(10, 2))
title = docs.column("title", perco.TEXT)
body = docs.column("body", perco.BYTES, group="raw")
tags = docs.column("tags", perco.MSGPACK)
own: perco.Codec[str] = Codec("own", lambda value: value.upper().encode(), lambda data: data.decode().lower())
named = docs.column("named", own)
json = docs.column("json", perco.JSON)
copied = docs.column("copied", perco.INT64)


def schema() -> perco.Schema:
    made = perco.Schema(docs)

    @made.observe(n, id="copy")
    async def copy(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        if change.value is None:
            txn.delete(copied, change.key)
        else:
            txn.set(copied, change.key, change.value)

    return made


async def value(db: perco.Database, column: perco.Column[str, Any], key: str = "a") -> Any:
    async with db.snapshot() as snap:
        return await snap.get(column, key)


async def test_put_and_delete(autojump_clock: trio.testing.MockClock) -> None:
    async with perco.open("memory:", schema()) as db:
        first = await db.put(n, "a", 5)
        second = await db.put(n, "a", 6)
        assert 0 < first < second
        async with db.snapshot(ts=first) as snap:
            assert await snap.get(n, "a") == 5
        assert await value(db, n) == 6
        assert await db.delete(n, "a") > second
        assert await value(db, n) is None
        await db.delete(n, "a")  # of nothing
        with pytest.raises(TypeError, match="use delete"):
            await db.put(n, "a", None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"value of docs\.n"):
            await db.put(n, "a", "text")  # type: ignore[arg-type]
        assert await value(db, n) is None


@pytest.mark.parametrize(
    ("column", "old", "wrong", "new"),
    [(n, 1, 2, 3), (title, "a", "b", "c"), (tags, {"x": (1,)}, {"x": ()}, 3), (named, "a", "b", "c")],
    ids=["n", "title", "tags", "named"],
)
async def test_put_if(
    column: perco.Column[str, Any], old: Any, wrong: Any, new: Any, autojump_clock: trio.testing.MockClock
) -> None:
    async with perco.open("memory:", schema()) as db:
        assert await db.put_if(column, "a", old, expected=wrong) == 0
        assert await value(db, column) is None
        put = await db.put_if(column, "a", old, expected=None)
        assert put
        assert await db.put_if(column, "a", wrong, expected=None) == 0
        assert await db.put_if(column, "a", wrong, expected=wrong) == 0
        assert await value(db, column) == old
        assert await db.put_if(column, "a", new, expected=old) > put
        assert await value(db, column) == new
        if column is tags:  # lists and tuples are the same to MSGPACK
            assert await db.put_if(tags, "a", [1], expected=new)
            assert await db.put_if(tags, "a", new, expected=[1])
        assert await db.put_if(column, "a", None, expected=new)
        assert await value(db, column) is None


async def test_add(autojump_clock: trio.testing.MockClock) -> None:
    async with perco.open("memory:", schema()) as db:
        assert [await db.add(n, "a", by) for by in (3, 4, -10)] == [3, 7, -3]
        summed = await db.add(share, "a", 1)
        assert (summed, type(summed)) == (1.0, float)
        assert await db.add(share, "a", 0.5) == 1.5
        assert await db.add(share, "a", math.inf) == math.inf
        assert await db.add(price, "a", Decimal("1.10")) == Decimal("1.10")
        assert await db.add(price, "a", Decimal("-0.20")) == Decimal("0.90")
        assert await db.add(tags, "a", 2) == 2
        await db.put(tags, "a", "many")
        for column, by, error in (
            (tags, 1, TypeError),
            (n, 0.5, TypeError),
            (n, 1 << 63, ValueError),
            (price, Decimal("0.001"), ValueError),
            (title, "x", TypeError),
        ):
            before = await value(db, column)
            with pytest.raises(error):
                await db.add(column, "a", by)  # type: ignore[misc]
            assert await value(db, column) == before


async def test_a_sum_that_no_float_can_hold(autojump_clock: trio.testing.MockClock) -> None:
    async with perco.open("memory:", schema()) as db:
        with pytest.raises(ValueError, match="is too large for a float"):
            await db.add(share, "a", 10**400)
        await db.put(json, "a", 10**400)
        with pytest.raises(ValueError, match="too large"):
            await db.add(json, "a", 0.5)
        assert await value(db, json) == 10**400


async def test_append(autojump_clock: trio.testing.MockClock) -> None:
    async with perco.open("memory:", schema()) as db:
        for part in ("a", "b", "c" * 1000, "d"):
            await db.append(title, "a", part)
            await db.append(body, "a", part.encode())
            await db.append(tags, "a", [part])
        assert await value(db, title) == "ab" + "c" * 1000 + "d"
        assert await value(db, body) == b"ab" + b"c" * 1000 + b"d"
        assert await value(db, tags) == ("a", "b", "c" * 1000, "d")
        with pytest.raises(TypeError, match="append takes"):
            await db.append(n, "a", 1)
        with pytest.raises(TypeError, match="no str fits"):
            await db.append(tags, "a", "x")


async def test_a_value_that_is_too_long_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async with perco.open("memory:", schema()) as db:
        await db.put(body, "a", b"x" * (8 << 20))
        with pytest.raises(TooLarge):
            await db.append(body, "a", b"x")
        with pytest.raises(TooLarge):
            await db.put(body, "a", b"x" * ((8 << 20) + 1))
        with pytest.raises(TooLarge):
            await db.put(n, "k" * 401, 1)
        assert len(await value(db, body)) == 8 << 20


async def test_each_call_is_counted_once_however_many_there_are(autojump_clock: trio.testing.MockClock) -> None:  # T2
    async with perco.open("memory:", schema()) as db:
        sums: list[int] = []

        async def some() -> None:
            for _ in range(10):
                sums.append(await db.add(n, "a", 1))

        async def others(txn: perco.Transaction) -> None:
            txn.set(n, "a", (await txn.get(n, "a") or 0) + 1)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(some)
                nursery.start_soon(db.run, others)
        assert await value(db, n) == 88
        assert len(set(sums)) == 80


async def test_one_of_many_wins(autojump_clock: trio.testing.MockClock) -> None:  # T2
    async with perco.open("memory:", schema()) as db:
        won: list[str] = []

        async def try_it(name: str) -> None:
            if await db.put_if(title, "leader", name, expected=None):
                won.append(name)

        async with trio.open_nursery() as nursery:
            for i in range(10):
                nursery.start_soon(try_it, f"node {i}")
        assert won == [await value(db, title, "leader")]


async def test_observers_run_for_operations(autojump_clock: trio.testing.MockClock) -> None:  # N1
    async with perco.open("memory:", schema()) as db, db.worker():
        for by in (1, 2):
            await db.add(n, "a", by)
            await db.wait_idle()
            assert await value(db, copied) == await value(db, n)
        ts = await db.put(n, "b", 7)
        await db.wait_for(ts)
        assert await value(db, copied, "b") == 7
        await db.put_if(n, "b", 8, expected=7)
        await db.wait_idle()
        assert await value(db, copied, "b") == 8
        await db.delete(n, "b")
        await db.wait_idle()
        assert await value(db, copied, "b") is None


async def test_a_store_that_is_closed_takes_no_operation(autojump_clock: trio.testing.MockClock) -> None:
    async with perco.open("memory:", schema()) as db:
        await db.put(n, "a", 1)
    with pytest.raises(perco.errors.TransactionClosed):
        await db.put(n, "a", 1)
