"""Columns and tables that are dropped: `db.drop_column`, `db.drop_table` (N17)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco import views
from perco.check.check import CheckOptions, check
from perco.database.inside import inside
from perco.errors import CatalogueChanged, SchemaMismatch
from perco.history import dropped
from perco.schema import catalogue as catalogues
from perco.schema.removing import without_table
from perco.storage import DATA, WRITE
from tests.component.notify.kit import (
    LONG_S,
    StoppedError,
    StoppingStore,
    client,
    get,
    memory,
    put,
    settle,
    tablets_cells,
)
from tests.support.everywhere import owning
from tests.support.places import local_of

pytestmark = pytest.mark.usefixtures("autojump_clock")
LONG = "x" * 5000
KEYS = ["a", "b", "m", "z"]


class Shop:
    """A program; `without`: the columns that it does not declare any more."""

    def __init__(self, *without: str, key: Any = perco.TEXT, observed: str = "") -> None:
        self.goods = perco.Table("goods", key=key, splits=["h"] if key is perco.TEXT else [])
        self.columns: dict[str, perco.Column[Any, Any]] = {
            name: self.goods.column(name, perco.TEXT, group=group)
            for name, group in {"name": None, "text": None, "image": "images"}.items()
            if name not in without
        }
        self.stock = perco.Table("stock", key=perco.TEXT)
        self.count = self.stock.column("count", perco.INT64)
        self.schema = perco.Schema(self.goods, self.stock)
        if "sold" not in without:
            self.sold = self.goods.signal("sold")
        if observed:

            @self.schema.observe(self.columns[observed], id="watch")
            async def watch(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
                txn.set(self.count, change.key, len(change.value or ""))

    def __getitem__(self, name: str) -> perco.Column[Any, Any]:
        return self.columns[name]

    async def fill(self, db: perco.Database) -> None:
        async def write(txn: perco.Transaction) -> None:
            for key in KEYS:
                for name, column in self.columns.items():
                    txn.set(column, key, LONG if name == "image" or key == "m" else f"{name} of {key}")

        await db.run(write)


def cells_of(db: perco.Database, number: int) -> set[str]:
    """The groups in which a column of `goods` has cells."""
    store = local_of(db).store
    return {
        group
        for group in (WRITE, DATA, "data:images")
        for table, _, column, _, _ in tablets_cells(store, group)
        if table == "goods" and column >> 16 == number
    }


def number_of(db: perco.Database, column: str) -> int:
    return inside(db).catalogue.tables["goods"].columns[column].number


async def well(db: perco.Database) -> None:
    found = await check(local_of(db).store, options=CheckOptions(pause_s=0.0))
    assert not found.findings


async def test_the_vacuum_removes_the_values_and_nothing_else() -> None:  # N17
    local, old, new = memory(), Shop(), Shop("text", "image")
    async with client(local, old.schema) as db:
        await old.fill(db)
        numbers = {name: number_of(db, name) for name in old.columns}
    async with client(local, new.schema) as db:
        await db.drop_column("goods", ["text", "image"])
        assert cells_of(db, numbers["image"]) == {WRITE, "data:images"}
        done = await db.vacuum()
        assert done.removed.dropped >= 4 + 1 + 4 + 4, "the records, and the values apart from them"
        assert cells_of(db, numbers["text"]) == cells_of(db, numbers["image"]) == set()
        for key in KEYS:
            assert await get(db, new["name"], key) == (LONG if key == "m" else f"name of {key}")
        assert all(gone.clean for gone in inside(owning(db)).catalogue.tables["goods"].gone.values())
        assert (await db.vacuum()).removed.dropped == 0
        await well(db)


async def test_a_store_is_whole_before_the_vacuum_has_been_there() -> None:  # N17
    local, old = memory(), Shop()
    async with client(local, old.schema) as db:
        await old.fill(db)
        async with db.transaction() as txn:
            txn.signal(old.sold, "a")
        await db.drop_column("goods", ["text", "image", "sold"])
        await well(db)
        await db.drop_table("goods")
        await well(db)


async def test_a_program_that_still_declares_a_dropped_column_is_told_where_it_uses_it() -> None:  # N17
    local, shop = memory(), Shop()
    async with client(local, shop.schema) as db:
        await shop.fill(db)
        await db.drop_column("goods", "text")
        told = r"goods\.text has been dropped, and this program still declares"
        with pytest.raises(SchemaMismatch, match=told):
            await get(db, shop["text"], "a")
        with pytest.raises(SchemaMismatch, match=told):
            await put(db, shop["text"], "a", "new")
        assert await get(db, shop["name"], "a") == "name of a"
        await db.drop_column("goods", "text")  # once more: nothing happens
        with pytest.raises(perco.UsageError, match="no column 'colour' in table 'goods'; there are: 'name', 'image'"):
            await db.drop_column("goods", "colour")
        with pytest.raises(perco.UsageError, match="no table 'bads' in this store; there are: 'goods', 'stock'"):
            await db.drop_table("bads")


async def test_a_column_that_is_declared_again_is_another_one() -> None:  # N17
    local, old = memory(), Shop()
    async with client(local, old.schema) as db:
        await old.fill(db)
        before = number_of(db, "image")
        await db.drop_column("goods", ["image", "sold"])  # those with the highest numbers
    again = Shop()
    async with client(local, again.schema) as db:
        assert number_of(db, "image") > before
        assert await get(db, again["image"], "a") is None
        await put(db, again["image"], "a", "new")
        await db.vacuum()
        assert await get(db, again["image"], "a") == "new"
        assert cells_of(db, before) == set()
        await well(db)


async def test_a_transaction_that_began_before_a_drop_does_not_commit_after_it() -> None:  # N17, N10
    local, shop = memory(), Shop()
    async with client(local, shop.schema) as db:
        number = number_of(db, "text")
        txn = await db.begin()
        txn.set(shop["text"], "a", "late")
        txn.set(shop["name"], "a", "late")
        await db.drop_column("goods", "text")
        with pytest.raises(CatalogueChanged):
            await txn.commit()
        await db.vacuum()
        assert cells_of(db, number) == set()
        assert await get(db, shop["name"], "a") is None


async def test_readers_that_began_before_a_drop_keep_the_values() -> None:  # N17, G1
    local, shop = memory(), Shop()
    async with client(local, shop.schema) as db:
        await shop.fill(db)
        number = number_of(db, "text")
        async with db.snapshot() as snap:
            assert await snap.get(shop["text"], "a") == "text of a"
            await db.drop_column("goods", "text")
            assert (await db.vacuum()).removed.dropped == 0
            assert cells_of(db, number) == {WRITE, DATA}
        assert (await db.vacuum()).removed.dropped > 0
        assert cells_of(db, number) == set()


@pytest.mark.parametrize("first", ["text", "name"])
async def test_what_a_dead_client_left_locked_is_settled_before_its_primary_goes(first: str) -> None:  # N17, G2
    """It may have committed at its primary, in the dropped column, and have left its other cells locked."""
    outcomes = set()
    for left in range(1, 8):
        local, shop = memory(), Shop()
        store = StoppingStore(local.store)
        with contextlib.suppress(StoppedError, BaseExceptionGroup):
            async with client(local, shop.schema, store=store, sweeping=False) as doomed:
                store.left = left
                async with doomed.transaction() as txn:
                    txn.set(shop[first], "a", "written")
                    txn.set(shop["name"], "z", "written")
                    txn.set(shop.count, "q", 7)
        async with client(local, shop.schema, sweeping=False) as db:
            await db.drop_column("goods", "text")
            await db.vacuum()
            found = await get(db, shop["name"], "z"), await get(db, shop.count, "q")
            assert found in ((None, None), ("written", 7))
            outcomes.add(found)
            await well(db)
    assert len(outcomes) == 2, "it died before and after its commit"


async def test_a_drop_is_refused_while_observers_need_the_column() -> None:  # N17
    local, shop = memory(), Shop(observed="text")
    async with client(local, shop.schema) as db:
        refused = r"observer 'watch' observes goods\.text: drop it first"
        with pytest.raises(perco.UsageError, match=refused):
            await db.drop_column("goods", ["image", "text"])
        with pytest.raises(perco.UsageError, match=refused):
            await db.drop_table("goods")
        assert "image" in inside(db).catalogue.tables["goods"].columns, "nothing was dropped"
        await shop.fill(db)
        async with db.worker():
            await settle(db)
        number = number_of(db, "text")
        await db.drop_observer("watch")
        await db.drop_column("goods", "text")
        with trio.fail_after(LONG_S):
            while cells_of(db, number):  # acknowledgements are among them
                await db.vacuum()
                await trio.sleep(1)  # a client reports late which reads have ended
        assert await get(db, shop.count, "a") == len("text of a")
        await well(db)


async def test_a_table_goes_and_its_name_can_be_used_again() -> None:  # N17
    local, shop, other = memory(), Shop(), Shop(key=perco.INT64)
    async with client(local, shop.schema) as db:
        await shop.fill(db)
        await put(db, shop.count, "a", 7)
        await db.drop_table("goods")
        await db.drop_table("goods")  # once more: nothing happens
        with pytest.raises(SchemaMismatch, match="has been dropped"):
            await get(db, shop["name"], "a")
    with pytest.raises(SchemaMismatch, match=r"'goods' was dropped, and had keys of text.*\(perco vacuum\)"):
        async with client(local, other.schema):
            pass
    async with client(local, perco.Schema(shop.stock)) as db:
        assert (await db.vacuum()).removed.dropped > 0
        assert await get(db, shop.count, "a") == 7
    async with client(local, other.schema) as db:
        await put(db, other["name"], 3, "three")
        async with db.snapshot() as snap:
            assert [(row.key, row[other["name"]]) async for row in snap.scan(other.goods)] == [(3, "three")]
        await well(db)


async def test_a_table_with_the_same_keys_can_be_made_again_at_once() -> None:  # N17
    local, shop, again = memory(), Shop(), Shop()
    async with client(local, shop.schema) as db:
        await shop.fill(db)
        await db.drop_table("goods")
    async with client(local, again.schema) as db:
        async with db.snapshot() as snap:
            assert [row async for row in snap.scan(again.goods)] == []
        await put(db, again["name"], "a", "new")
        await db.vacuum()
        async with db.snapshot() as snap:
            assert [(row.key, row[again["name"]]) async for row in snap.scan(again.goods)] == [("a", "new")]
        assert inside(db).catalogue.keep_of("goods") == perco.Keep(), "as before it was dropped"
        await well(db)


async def test_a_removal_that_was_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:  # N17
    local, shop = memory(), Shop()
    right, calls = dropped._apply, 0

    async def apply(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise perco.Unavailable("interrupted")
        return await right(*arguments)

    monkeypatch.setattr(dropped, "_apply", apply)
    monkeypatch.setattr(dropped, "_PAGE_ROWS", 1)
    async with client(local, shop.schema) as db:
        await shop.fill(db)
        number = number_of(db, "text")
        await db.drop_column("goods", "text")
        with pytest.raises(perco.Unavailable, match="interrupted"):
            await db.vacuum()
        assert cells_of(db, number) == {WRITE, DATA}
        assert not inside(owning(db)).catalogue.tables["goods"].gone[number].clean
        await db.vacuum()
        assert cells_of(db, number) == set()


async def test_many_versions_of_a_value_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:  # N17
    local, shop = memory(), Shop()
    monkeypatch.setattr(dropped, "_CELLS", 3)
    async with client(local, shop.schema) as db:
        for i in range(10):
            await put(db, shop["text"], "a", f"version {i}")
        number = number_of(db, "text")
        await db.drop_column("goods", "text")
        assert (await db.vacuum()).removed.dropped == 10
        assert cells_of(db, number) == set()


async def test_a_drop_is_announced_before_its_timestamp_is_drawn() -> None:  # N17, N10
    """The vacuum may come before the task that has changed the catalogue announces it."""
    local, shop = memory(), Shop()
    async with client(local, shop.schema) as mine:
        db = owning(mine)
        parts = inside(db)
        parts.known.adopt(await catalogues.change(parts.driver.store, lambda of: without_table(of, "goods")))
        binds = parts.catalogue.binds
        assert parts.oracle.catalogue_version < binds
        await db.vacuum()
        assert parts.oracle.catalogue_version == binds
        assert all(gone.at for gone in parts.catalogue.tables["goods"].gone.values())


async def test_a_vacuum_ends_even_if_all_replies_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:  # N17
    local, shop = memory(), Shop()
    monkeypatch.setattr(dropped, "_CELLS", 3)

    async def lose(*_: Any) -> int:
        return 1

    async with client(local, shop.schema) as db:
        for i in range(10):
            await put(db, shop["text"], "a", f"version {i}")
        number = number_of(db, "text")
        await db.drop_column("goods", "text")
        with monkeypatch.context() as patch, trio.fail_after(LONG_S):
            patch.setattr(dropped, "_apply", lose)
            assert (await db.vacuum()).left > 0
        assert cells_of(db, number) == {WRITE}
        assert not inside(owning(db)).catalogue.tables["goods"].gone[number].clean
        await db.vacuum()
        assert cells_of(db, number) == set()


async def test_two_programs_see_a_drop_while_they_run() -> None:  # N17, N10
    local, shop, other = memory(), Shop(), Shop()
    async with client(local, shop.schema) as db, client(local, other.schema, beside=db) as beside:
        await shop.fill(db)
        await db.drop_column("goods", "text")
        with trio.fail_after(LONG_S):
            with pytest.raises(SchemaMismatch, match="has been dropped"):
                await put(beside, other["text"], "a", "new")
        await put(beside, other["name"], "a", "new")


@pytest.mark.parametrize("codec", [perco.INT64, perco.FLOAT64], ids=["the same codec", "another codec"])
async def test_a_program_that_runs_on_does_not_take_another_column_for_its_own(codec: Any) -> None:  # N17
    local = memory()

    def program(codec: Any) -> tuple[perco.Schema, perco.Column[Any, Any]]:
        table = perco.Table("goods", key=perco.TEXT)
        return perco.Schema(table), table.column("price", codec)

    (old, price), (new, other) = program(perco.INT64), program(codec)
    async with client(local, old) as running:
        await put(running, price, "a", 450)
        async with client(local, old, beside=running) as db:
            await db.drop_column("goods", "price")
        async with client(local, new, beside=running) as db:
            await put(db, other, "a", codec.decode(codec.encode(4)))
            told = r"goods\.price has been dropped, and this program still declares it"
            with pytest.raises(SchemaMismatch, match=told):
                await put(running, price, "a", 451)
            with pytest.raises(SchemaMismatch, match=told):
                await get(running, price, "a")
            assert await get(db, other, "a") == 4


async def test_a_program_that_runs_on_does_not_write_keys_of_another_codec() -> None:  # N17
    local, old, new = memory(), Shop(), Shop(key=perco.INT64)
    async with client(local, old.schema) as running:
        async with client(local, perco.Schema(old.stock), beside=running) as db:
            await db.drop_table("goods")
            await db.vacuum()
        async with client(local, new.schema, beside=running) as db:
            await put(db, new["name"], 3, "three")
            with pytest.raises(SchemaMismatch, match="has been dropped"):
                await put(running, old["name"], "abc", "new")
            async with db.snapshot() as snap:
                assert [row.key async for row in snap.scan(new.goods)] == [3]


async def test_what_a_view_or_a_conversion_needs_is_not_dropped() -> None:  # N17, V15, N19
    goods, totals = perco.Table("goods", key=perco.TEXT), perco.Table("totals", key=perco.TEXT)
    kind, size = goods.column("kind", perco.TEXT), goods.column("size", perco.INT64)
    price = goods.column("price", perco.FLOAT64)
    total, note = totals.column("total", perco.INT64), totals.column("note", perco.TEXT)
    schema = perco.Schema(goods, totals)
    schema.convert(size, price, id="prices")(float)
    declared = views.Views(schema)

    @declared.group(
        kind,
        size,
        by=lambda row: row[kind],
        key=perco.TEXT,
        id="sums",
        into=[total],
        keep=[views.sum(size), views.largest(size, 1)],
    )
    def sums(key: str, rows: Any) -> Any:
        yield views.Put(totals, key, {total: rows.sum(size)})

    async with client(memory(), schema) as db:
        for table, column in (("totals", "total"), ("goods", "price")):
            with pytest.raises(perco.UsageError, match=rf"writes {table}\.{column}: drop it first"):
                await db.drop_column(table, column)
        for table in "totals", *(name for name in inside(db).catalogue.tables if name.startswith("sums.")):
            with pytest.raises(perco.UsageError, match=r"drop it first"):
                await db.drop_table(table)
        hidden = [name for name in inside(db).catalogue.tables["totals"].columns if name.startswith("_")]
        for name in hidden:
            with pytest.raises(perco.UsageError, match="there is no column"):
                await db.drop_column("totals", name)
        await db.drop_column("totals", "note")
        assert note.name not in inside(db).catalogue.tables["totals"].columns


async def test_an_id_of_a_dropped_observer_of_a_dropped_column_is_used_again() -> None:  # N12, N17
    local, first, second = memory(), Shop(observed="text"), Shop("text", observed="name")
    async with client(local, first.schema) as db:
        await db.drop_observer("watch")
        await db.drop_column("goods", "text")
        await db.vacuum()
    async with client(local, second.schema) as db:
        await put(db, second["name"], "a", "waits")
        assert await db.drop_observer("watch") == {"watch": 1}
        await db.drop_column("goods", "name")


async def test_an_empty_table_costs_the_vacuum_nothing() -> None:  # N17
    local, shop = memory(), Shop()
    async with client(local, shop.schema) as db:
        await shop.fill(db)
        await db.drop_table("goods")
        cuts: dict[str, int] = {"goods": 0}
        with trio.fail_after(LONG_S):
            while "goods" in cuts:
                cuts = (await db.vacuum()).cuts
                await trio.sleep(1)
        assert "stock" in cuts


async def test_writes_of_programs_that_run_side_by_side_all_count() -> None:  # N17
    def program(*written: str, version: int = 1) -> perco.Schema:
        table = perco.Table("goods", key=perco.TEXT)
        columns = {name: table.column(name, perco.TEXT) for name in ("text", "note", "image")}
        schema = perco.Schema(table)
        writes = [columns[name] for name in written] if written else None

        @schema.observe(columns["text"], id="watch", writes=writes, version=version)
        async def watch(txn: perco.Transaction, change: perco.Change[str, str]) -> None: ...

        return schema

    local = memory()
    for written in ("note", "image"), ("image",), ():
        async with client(local, program(*written)) as db:
            for column in "note", "image":
                with pytest.raises(perco.UsageError, match=rf"observer 'watch' writes goods\.{column}: drop it first"):
                    await db.drop_column("goods", column)
    async with client(local, program("image", version=2)) as db:
        await db.drop_column("goods", "note")
