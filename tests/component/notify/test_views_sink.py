"""Sinks: a sink ends with the newest rows, even if rows are delivered late, twice, or by a process that died (V11)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import perco
from perco import views
from perco.views.sinking import run_sink
from tests.component.notify.kit import client, memory, put, settle, work_and_die
from tests.component.notify.test_views import change
from tests.support.graphs import write
from tests.support.places import local_of


class Outside:
    """A sink that keeps its promises. `deliveries`: what it was given; `broken`: how many calls are still to fail."""

    def __init__(self) -> None:
        self.deliveries: list[list[views.Delivered]] = []
        self.bad: set[Any] = set()
        self.there: dict[Any, views.Delivered] = {}

    def deliver(self, rows: list[views.Delivered]) -> None:
        self.deliveries.append(rows)
        if any(row.key in self.bad for row in rows):
            raise OSError("the other side is away")
        for row in rows:
            if row.key not in self.there or row.version > self.there[row.key].version:
                self.there[row.key] = row

    def rows(self) -> Iterator[views.Delivered]:
        return (row for row in self.there.values() if row.values is not None)

    @property
    def values(self) -> dict[Any, Any]:
        return {row.key: row.values for row in self.rows()}


class Prices:
    """A table of two columns, and a sink of one or both."""

    def __init__(self, *, both: bool = True, version: int = 1, outside: Outside | None = None, **how: Any) -> None:
        self.items = perco.Table("items", key=perco.TEXT)
        self.price = self.items.column("price", perco.INT64)
        self.name = self.items.column("name", perco.TEXT)
        self.views = views.Views(perco.Schema(self.items))
        self.outside = Outside() if outside is None else outside
        columns = [self.price, self.name] if both else [self.price]
        self.sinking = self.views.sink(*columns, id="shop", to=self.outside, version=version, **{"threads": 0, **how})


async def stored(db: perco.Database, prices: Prices) -> dict[Any, Any]:
    async with db.snapshot() as snap:
        return {row.key: row.values() async for row in snap.scan(prices.items, columns=prices.sinking.columns)}


@pytest.mark.parametrize("both", [False, True])
async def test_a_sink_follows_its_table(both: bool) -> None:  # V11
    prices = Prices(both=both)
    async with client(memory(), prices.views.schema) as db, db.worker():
        for number in range(5):
            await write(db, [(prices.price, f"i{number}", number), (prices.name, f"i{number}", "x")])
        await settle(db)
        await put(db, prices.price, "i1", 10)
        await write(db, [(prices.price, "i2", None), (prices.name, "i2", None)])
        await settle(db)
        assert prices.outside.values == await stored(db, prices)
        assert len(prices.outside.there) == 5  # removed rows were delivered, too
        async with db.snapshot() as snap:
            checked = await views.check(prices.views, snap)
        assert (checked.equal, checked.rows) == (True, {"shop": 4})


async def test_one_change_of_several_columns_is_delivered_once() -> None:
    prices = Prices()
    async with client(memory(), prices.views.schema) as db, db.worker(concurrency=1):
        await write(db, [(prices.price, "a", 1), (prices.name, "a", "x")])
        await settle(db)
    assert [len(rows) for rows in prices.outside.deliveries] == [1]


async def test_an_old_delivery_that_arrives_late_changes_nothing() -> None:  # V11
    prices = Prices(both=False)
    async with perco.open("memory:", prices.views.schema) as db:
        old = await put(db, prices.price, "a", 1)
        slow = await db.begin()
        new = await put(db, prices.price, "a", 2)
        async with db.transaction() as txn:
            await run_sink(prices.sinking, txn, change("a", new))
        await run_sink(prices.sinking, slow, change("a", old))
        slow.discard()
    assert [rows[0].values for rows in prices.outside.deliveries] == [{"price": 2}, {"price": 1}]
    assert prices.outside.values == {"a": {"price": 2}}


async def test_rows_that_fail_do_not_hold_up_others() -> None:
    prices = Prices(both=False)
    prices.outside.bad.add("i3")
    options = perco.WorkerOptions(attempts=2, concurrency=16)
    async with client(memory(), prices.views.schema) as db:
        await write(db, [(prices.price, f"i{number}", number) for number in range(8)])
        async with db.worker(options=options):
            await db.wait_idle()
            assert len(prices.outside.values) == 7
            [failed] = await db.failed()
            assert (failed.key, "the other side is away" in failed.error) == ("i3", True)
            prices.outside.bad.clear()
            await db.replay_failed()
            await settle(db)
            assert prices.outside.values == await stored(db, prices)


async def test_many_changes_share_a_delivery_of_bounded_size() -> None:
    prices = Prices(both=False, batch=10)
    async with client(memory(), prices.views.schema) as db:
        await write(db, [(prices.price, f"i{number}", number) for number in range(60)])
        async with db.worker(concurrency=20):
            await settle(db)
    sizes = [len(rows) for rows in prices.outside.deliveries]
    assert 1 < max(sizes) <= 10  # the size of a batch depends on the store and the machine
    assert sum(sizes) >= 60  # a run that conflicts delivers its row again


async def test_a_new_sink_and_a_new_version_get_all_rows() -> None:
    prices = Prices()
    async with client(memory(), perco.Schema(prices.items)) as db:
        await write(db, [(prices.price, "a", 1), (prices.name, "b", "x")])
        local = local_of(db)
    async with client(local, prices.views.schema) as db, db.worker():
        await settle(db)
        assert prices.outside.values == {"a": {"price": 1}, "b": {"name": "x"}}
    empty = Prices(version=2)
    async with client(local, empty.views.schema) as db, db.worker():
        await settle(db)
    assert empty.outside.values == prices.outside.values


async def test_a_sink_that_somebody_has_changed_is_found_and_rebuilt() -> None:
    prices = Prices()
    async with client(memory(), prices.views.schema) as db:
        async with db.worker():
            await write(db, [(prices.price, f"i{number}", number) for number in range(4)])
            await settle(db)
        there = prices.outside.there
        there["i0"] = there["i0"]._replace(values={"price": 99})
        del there["i1"]
        there["stray"] = views.Delivered("stray", {"price": 1}, 1)
        async with db.snapshot() as snap:
            checked = await views.check(prices.views, snap)
        assert [(each.view, each.key, each.expected, each.found) for each in checked.differences] == [
            ("shop", "i0", {"price": 0}, {"price": 99}),
            ("shop", "i1", {"price": 1}, {}),
            ("shop", "stray", {}, {"price": 1}),
        ]
        [done] = await views.rebuild(prices.views, db, "shop")
        assert (done.view, done.owners, done.strays) == ("shop", 4, 1)
        assert prices.outside.values == await stored(db, prices)


@pytest.mark.parametrize("seed", range(8))
async def test_whoever_dies_the_sink_ends_with_the_newest_rows(seed: int) -> None:  # V11
    outside, rng = Outside(), random.Random(seed)
    prices = Prices(outside=outside, batch=rng.choice([1, 3]))
    died = 0
    async with client(memory(), prices.views.schema, sweeping=False) as first:
        for life in range(8):
            async with client(local_of(first), prices.views.schema) as writer:
                for _ in range(6):
                    key = rng.choice("abc")
                    value = rng.choice([None, rng.randrange(100)])
                    await write(writer, [(rng.choice([prices.price, prices.price]), key, value)])
            died += await work_and_die(first, prices.views.schema, rng, 4, one_step=life % 2 == 0)
        local = local_of(first)
    assert died >= 2
    async with client(local, prices.views.schema) as db, db.worker():
        await settle(db)
        assert outside.values == await stored(db, prices)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"to": 5}, "to= takes a function of a list of rows"),
        ({"batch": 0}, "batch is a number from 1"),
        ({"threads": -1}, "threads is a number from 0"),
        ({"id": "shop"}, "two views, cached functions or sinks"),
    ],
)
def test_what_cannot_be_a_sink_is_told(how: Any, message: str) -> None:
    prices = Prices()
    with pytest.raises(perco.UsageError, match=message):
        prices.views.sink(prices.price, **{"id": "other", "to": print, **how})
