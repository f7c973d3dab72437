"""Views of keys with the rows of several tables, which are read where they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import perco
from perco import views
from perco.views import running
from tests.component.notify.kit import OPTIONS, client, get, memory, put, settle
from tests.component.notify.test_views import change, in_transaction, overlapped
from tests.support.places import local_of


class Shop:
    """Customers, what they have ordered, and a line about each."""

    def __init__(
        self, *, version: int = 1, first: int | None = None, rows_max: int = 1000, by_view: bool = False
    ) -> None:
        self.names = perco.Table("names", key=perco.TEXT)
        self.name, self.town = self.names.column("name", perco.TEXT), self.names.column("town", perco.TEXT)
        self.orders = perco.Table("orders", key=perco.Tuple(perco.TEXT, perco.INT64))
        self.sum, self.seen = self.orders.column("sum", perco.INT64), self.orders.column("seen", perco.INT64)
        self.lines = perco.Table("lines", key=perco.TEXT)
        self.line = self.lines.column("line", perco.TEXT)
        self.views = views.Views(perco.Schema(self.names, self.orders, self.lines))
        self.schema = self.views.schema
        self.calls: list[str] = []
        if by_view:
            self.derived()
        orders = self.seen if by_view else self.sum

        @self.views.cogroup(
            [self.name, self.town],
            views.first(first, orders) if first else orders,
            id="line",
            into=self.lines,
            rows_max=rows_max,
            version=version,
        )
        def line(key: str, name: Any, some: Any) -> Iterator[views.Put[Any]]:
            self.calls.append(key)
            who = "?" if name is None else f"{name[self.name]} of {name[self.town]}"
            yield views.Put(self.lines, key, {self.line: f"{who}: {[row[orders] for row in some]}"})

    def derived(self) -> None:
        """The orders that the view reads are what another view gives."""

        @self.views.each(self.sum, id="seen", into=self.seen)
        def seen(row: perco.Row[Any]) -> Iterator[views.Put[Any]]:
            yield views.Put(self.orders, row.key, {self.seen: (row[self.sum] or 0) * 2})

    async def check(self, db: perco.Database) -> None:
        async with db.snapshot() as snap:
            found = await views.check(self.views, snap)
        assert found.equal, found.differences


async def test_it_follows_all_sides() -> None:
    shop = Shop()
    async with perco.open("memory:", shop.schema, options=OPTIONS) as db, db.worker():
        await put(db, shop.sum, ("ann", 2), 20)
        await settle(db)
        assert await get(db, shop.line, "ann") == "?: [20]"
        await put(db, shop.name, "ann", "Ann")
        await put(db, shop.sum, ("ann", 1), 10)
        await put(db, shop.town, "bob", "Bern")
        await settle(db)
        assert await get(db, shop.line, "ann") == "Ann of None: [10, 20]"
        assert await get(db, shop.line, "bob") == "None of Bern: []"
        await put(db, shop.name, "ann", None)
        await put(db, shop.sum, ("ann", 2), None)
        await put(db, shop.town, "bob", None)
        await settle(db)
        assert await get(db, shop.line, "ann") == "?: [10]"
        assert await get(db, shop.line, "bob") is None
        await shop.check(db)


async def test_the_runs_of_other_views_tell_it_themselves() -> None:  # V12
    shop = Shop(by_view=True)
    async with perco.open("memory:", shop.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, shop.sum, ("ann", 1), 10)
        await settle(db)
        assert await get(db, shop.line, "ann") == "?: [20]"
        assert worker.statistics()["line: orders: seen"].commits == 0
        assert worker.statistics()["line"].commits == 1
        await shop.check(db)


async def test_runs_of_one_key_cannot_overlap() -> None:  # V2
    shop = Shop()
    view: Any = shop.views.declared["line"]

    async def run(txn: perco.Transaction) -> None:
        await running.run_cogroup(view, txn, change("ann"))

    async with client(memory(), shop.schema) as db:
        await put(db, shop.name, "ann", "Ann")

        async def meanwhile() -> None:
            await put(db, shop.name, "ann", None)
            await in_transaction(db, run)

        with pytest.raises(perco.WriteConflict):
            await overlapped(db, run, meanwhile)
        assert await get(db, shop.line, "ann") is None


async def test_it_may_read_the_first_rows_only() -> None:
    shop = Shop(first=2, rows_max=1)
    async with perco.open("memory:", shop.schema, options=OPTIONS) as db, db.worker():
        for number in (3, 1, 2):
            await put(db, shop.sum, ("ann", number), number)
        await settle(db)
        assert await get(db, shop.line, "ann") == "?: [1, 2]"
        await shop.check(db)


async def test_too_many_rows_are_an_error_that_says_what_to_do() -> None:
    shop = Shop(rows_max=2)
    view: Any = shop.views.declared["line"]
    async with perco.open("memory:", shop.schema, options=OPTIONS) as db:
        for number in range(3):
            await put(db, shop.sum, ("ann", number), number)
        with pytest.raises(perco.UsageError, match=r"orders has more than 2 rows for 'ann'.*raise rows_max"):
            await in_transaction(db, lambda txn: running.run_cogroup(view, txn, change("ann")))
        async with db.snapshot() as snap:
            [diff] = await views.diff(shop.views, snap)
        assert (diff.failed, "orders has 3 rows for it" in str(diff.failures[0].error)) == (1, True)


async def test_a_new_version_runs_for_all_keys() -> None:
    async with client(memory(), Shop().schema) as db:
        shop = Shop()
        async with db.worker():
            await settle(db)
        local = local_of(db)
    async with client(local, shop.schema) as db, db.worker():
        await put(db, shop.name, "ann", "Ann")
        await put(db, shop.sum, ("bob", 1), 1)
        await settle(db)
    newer = Shop(version=2)
    async with client(local, newer.schema) as db, db.worker():
        await settle(db)
        assert sorted(set(newer.calls)) == ["ann", "bob"]
        await newer.check(db)


async def test_why_a_row_is_what_it_is_and_a_rebuild_of_it() -> None:
    shop = Shop()
    async with perco.open("memory:", shop.schema, options=OPTIONS) as db, db.worker():
        await put(db, shop.name, "ann", "Ann")
        await put(db, shop.sum, ("ann", 1), 10)
        await settle(db)
        async with db.snapshot() as snap:
            [reason] = await views.why(shop.views, snap, shop.lines, "ann")
        assert (reason.owner, reason.same) == ("ann", True)
        assert [(each.table, each.key) for each in reason.inputs] == [("names", "ann"), ("orders", ("ann", 1))]
        await put(db, shop.line, "ann", "wrong")
        await put(db, shop.line, "eve", "a stray")
        async with db.snapshot() as snap:
            [diff] = await views.diff(shop.views, snap)
        assert (diff.changed, diff.strays) == (1, 1)
        [done] = await views.rebuild(shop.views, db)
        assert (done.owners, done.mended, done.strays) == (1, 1, 1)
        await shop.check(db)


def test_what_does_not_fit_is_refused() -> None:
    shop = Shop()
    other = perco.Table("other", key=perco.INT64)
    cell = other.column("cell", perco.INT64)
    v = views.Views(perco.Schema(shop.names, shop.orders, other))
    for sides, says in (
        ([shop.name], "two or more sides, each of another table"),
        ([shop.name, shop.town], "two or more sides, each of another table"),
        ([shop.name, cell], "do not begin with a key of the kind"),
        ([views.first(2, shop.name), shop.sum], "leave out views.first"),
        ([shop.name, views.first(2)], "names no columns to read"),
    ):
        with pytest.raises(perco.UsageError, match=says):
            v.cogroup(*sides, id="x", into=shop.seen)(lambda key, *found: ())  # type: ignore[arg-type]
    with pytest.raises(perco.UsageError, match="a number of rows, at least 1"):
        views.first(0, shop.sum)
    assert not v.declared
