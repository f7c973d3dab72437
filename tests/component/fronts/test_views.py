"""Views over `perco.sync` and `perco.aio`: the functions run on the store's loop, the check on the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import perco
import perco.aio
import perco.sync
from perco import views

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs

docs = perco.Table("docs", key=perco.TEXT)
body = docs.column("body", perco.TEXT)
letters = perco.Table("letters", key=perco.Tuple(perco.TEXT, perco.TEXT))
n = letters.column("n", perco.INT64)
totals = perco.Table("totals", key=perco.TEXT)
total = totals.column("total", perco.INT64)
VIEWS = views.Views(perco.Schema(docs, letters, totals))


@VIEWS.each(body, id="count", into=letters)
def count(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
    text = doc[body] or ""
    for letter in set(text):
        yield views.Put(letters, (letter, doc.key), {n: text.count(letter)})


@VIEWS.group(n, id="total", by=views.prefix(1), into=totals, keep=[views.sum(n)])
def add(letter: str, rows: views.Group[tuple[str, str]]) -> Iterator[views.Put[Any]]:
    yield views.Put(totals, letter, {total: rows.sum(n)})


def test_blocking_code_has_views() -> None:
    with perco.sync.open("memory:", VIEWS.schema) as db, db.worker():
        with db.transaction() as txn:
            txn.set(body, "a", "sees")
            txn.set(body, "b", "ease")
        with db.snapshot(fresh="total", timeout=60) as snap:
            assert {row.key: row[total] for row in snap.scan(totals)} == {"a": 1, "e": 4, "s": 3}
        db.wait_for(snap.start_ts, views=["count", "total"], timeout=60)
        fresh = db.freshness("total")["total"]
        assert (fresh.ts >= snap.start_ts, fresh.waiting, fresh.failed, fresh.lag_s) == (True, 0, 0, 0.0)
        with db.snapshot() as snap:
            assert views.check_blocking(VIEWS, snap).equal
        with db.transaction() as txn:
            txn.set(total, "x", 1)
        with db.snapshot() as snap:
            assert views.check_blocking(VIEWS, snap).count == 1
            assert [each.strays for each in views.diff_blocking(VIEWS, snap)] == [0, 1]
            [reason] = views.why_blocking(VIEWS, snap, totals, "e")
            assert (reason.same, [each.key for each in reason.inputs]) == (True, [("e", "a"), ("e", "b")])
        assert [each.strays for each in views.rebuild_blocking(VIEWS, db)] == [0, 1]
        assert views.accept_blocking(VIEWS, db) == []


def test_blocking_code_drops_a_view() -> None:  # V15
    with perco.sync.open("memory:", VIEWS.schema) as db:
        with db.transaction() as txn:
            txn.set(body, "a", "sees")
        with db.worker(), db.snapshot(fresh="total", timeout=60):
            pass
        assert views.would_drop_blocking(VIEWS, db, "total").rows == {"totals": 2}
        assert views.drop_blocking(VIEWS, db, "total").rows == {"totals": 2}
        assert db.drop_observer(["count: body"]) == {"count: body": 0}
        with db.snapshot() as snap:
            assert list(snap.scan(totals)) == []


def test_asyncio_has_views() -> None:
    async def main() -> None:
        async with perco.aio.open("memory:", VIEWS.schema) as db, db.worker():
            async with db.transaction() as txn:
                txn.set(body, "a", "sees")
            async with db.snapshot(fresh="total", timeout=60) as snap:
                assert {row.key: row[total] async for row in snap.scan(totals)} == {"e": 2, "s": 2}
            await db.wait_for(snap.start_ts, views=["count", "total"], timeout=60)
            fresh = (await db.freshness("total"))["total"]
            assert (fresh.ts >= snap.start_ts, fresh.waiting, fresh.failed, fresh.lag_s) == (True, 0, 0, 0.0)
            async with db.snapshot() as snap:
                assert (await views.check(VIEWS, snap)).equal
            async with db.transaction() as txn:
                txn.set(total, "x", 1)
            async with db.snapshot() as snap:
                assert (await views.check(VIEWS, snap)).count == 1
                assert [each.strays for each in await views.diff(VIEWS, snap)] == [0, 1]
                [reason] = await views.why(VIEWS, snap, totals, "e")
                assert (reason.same, [each.key for each in reason.inputs]) == (True, [("e", "a")])
            assert [each.strays for each in await views.rebuild(VIEWS, db)] == [0, 1]
            assert await views.accept(VIEWS, db) == []

    asyncio.run(main())


def test_asyncio_drops_a_view() -> None:  # V15
    async def main() -> None:
        async with perco.aio.open("memory:", VIEWS.schema) as db:
            async with db.transaction() as txn:
                txn.set(body, "a", "sees")
            async with db.worker(), db.snapshot(fresh="total", timeout=60):
                pass
            assert (await views.would_drop(VIEWS, db, "total")).rows == {"totals": 2}
            assert (await views.drop(VIEWS, db, "total")).rows == {"totals": 2}
            assert await db.drop_observer(["count: body"]) == {"count: body": 0}
            async with db.snapshot() as snap:
                assert [row async for row in snap.scan(totals)] == []

    asyncio.run(main())
