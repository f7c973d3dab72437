"""Columns that are filled with the converted values of others: `schema.convert` (N19)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from tests.component.notify.kit import client, get, memory, put, settle

pytestmark = pytest.mark.usefixtures("autojump_clock")


class Shop:
    """Prices in cents; `version`: of the conversion to euros; 0: there is none."""

    def __init__(self, version: int = 1, factor: float = 100.0) -> None:
        self.goods = perco.Table("goods", key=perco.TEXT, splits=["m"])
        self.cents = self.goods.column("cents", perco.INT64)
        self.euros = self.goods.column("euros", perco.FLOAT64)
        self.schema = perco.Schema(self.goods, keep=perco.Keep(seconds=0))
        self.seen: list[int] = []
        if version:

            @self.schema.convert(self.cents, self.euros, id="euros", version=version)
            def to_euros(cents: int) -> float | None:
                self.seen.append(cents)
                return cents / factor if cents >= 0 else None

    async def all(self, db: perco.Database) -> dict[str, float]:
        async with db.snapshot() as snap:
            return {row.key: row[self.euros] async for row in snap.scan(self.goods, columns=[self.euros])}


async def test_what_is_there_and_what_comes_is_converted() -> None:  # N19
    local, old, new = memory(), Shop(0), Shop()
    async with client(local, old.schema) as db:
        for key, cents in {"a": 100, "b": 250, "x": -1}.items():
            await put(db, old.cents, key, cents)
    async with client(local, new.schema) as db, db.worker():
        await settle(db)
        assert await new.all(db) == {"a": 1.0, "b": 2.5}
        await put(db, new.cents, "a", 300)
        await put(db, new.cents, "b", None)
        await put(db, new.cents, "c", 400)
        await settle(db)
        assert await new.all(db) == {"a": 3.0, "c": 4.0}
        await put(db, new.cents, "c", -1)
        await settle(db)
        assert await new.all(db) == {"a": 3.0}
    assert sorted(new.seen) == [-1, -1, 100, 250, 300, 400]


async def test_a_newer_value_of_a_program_stays() -> None:  # N19
    local, old, new = memory(), Shop(0), Shop()
    async with client(local, old.schema) as db:
        for key in "abc":
            await put(db, old.cents, key, 100)
        await put(db, old.euros, "a", 7.0)  # later than the change
        await put(db, old.euros, "b", 8.0)
        await put(db, old.cents, "b", 200)  # now the source is newer
    async with client(local, new.schema) as db:
        await put(db, new.euros, "c", 9.0)
        async with db.worker():
            await settle(db)
        assert await new.all(db) == {"a": 7.0, "b": 2.0, "c": 9.0}


async def test_a_program_may_change_or_delete_what_was_converted() -> None:  # N19
    local, first = memory(), Shop()
    async with client(local, first.schema) as db:
        for key in "abcd":
            await put(db, first.cents, key, 100)
        async with db.worker():
            await settle(db)
        await put(db, first.euros, "a", 7.0)
        await put(db, first.euros, "b", None)
        await db.vacuum()  # which removes what is left of the delete
    again = Shop(2, factor=10.0)
    async with client(local, again.schema) as db, db.worker():
        await settle(db)
        assert await again.all(db) == {"a": 7.0, "c": 10.0, "d": 10.0}, "a higher version converts again"
        await put(db, again.cents, "a", 50)
        await put(db, again.cents, "b", 60)
        await settle(db)
        assert await again.all(db) == {"a": 5.0, "b": 6.0, "c": 10.0, "d": 10.0}, "the source is newer"


async def test_a_value_that_cannot_be_converted_is_on_the_failed_list(caplog: pytest.LogCaptureFixture) -> None:  # N6
    caplog.set_level("CRITICAL", "perco.observer")
    table = perco.Table("goods", key=perco.TEXT)
    text, number = table.column("text", perco.TEXT), table.column("number", perco.INT64)
    schema = perco.Schema(table)
    schema.convert(text, number, id="numbers")(int)
    async with client(memory(), schema) as db:
        await put(db, text, "a", "12")
        await put(db, text, "b", "twelve")
        async with db.worker(options=perco.WorkerOptions(attempts=1)):
            with trio.fail_after(1000):
                assert await db.wait_idle() == 1
        assert await get(db, number, "a") == 12
        [failed] = await db.failed()
        assert (failed.observer, failed.key) == ("numbers", "b")
        assert "invalid literal for int()" in failed.error


async def test_then_the_old_column_goes_and_the_new_one_gets_its_name() -> None:  # N17, N18, N19
    local, shop = memory(), Shop()
    async with client(local, shop.schema) as db:
        await put(db, shop.cents, "a", 100)
        async with db.worker():
            await settle(db)
        await db.drop_observer("euros")
        await db.drop_column("goods", "cents")
    table = perco.Table("goods", key=perco.TEXT, splits=["m"])
    price = table.column("cents", perco.FLOAT64, was="euros")
    async with client(local, perco.Schema(table)) as db:
        assert await get(db, price, "a") == 1.0
        await db.vacuum()
        assert await get(db, price, "a") == 1.0
        assert sorted(inside(db).catalogue.tables["goods"].columns) == ["_converted euros", "cents"], (
            "of `euros`, which is `cents` now"
        )


def test_mistakes() -> None:
    shop, other = Shop(), Shop(0)
    wrong: Any = None
    for source, target, function, text in (
        (shop.cents, shop.cents, int, "would convert goods.cents from itself, over and over"),
        (shop.cents, shop.euros, int, "conversion 'x': goods.euros is filled from goods.cents already"),
        (shop.euros, shop.cents, int, "would convert goods.cents from itself, over and over"),
        (
            shop.cents,
            other.euros,
            int,
            "conversion 'x' takes two columns of one table, not goods.cents and goods.euros",
        ),
        (shop.cents, wrong, int, "takes two columns of one table"),
        (other.cents, other.euros, wrong, "conversion 'x' takes a plain function of a value, not None"),
    ):
        with pytest.raises(perco.UsageError, match=text):
            (other if function is None else shop).schema.convert(source, target, id="x")(function)
    note = shop.goods.column("note", perco.FLOAT64)
    with pytest.raises(perco.UsageError, match="there are two observers with the id 'euros'"):
        shop.schema.convert(shop.cents, note, id="euros")(float)


async def test_a_target_that_is_dropped_and_made_again_is_filled_again() -> None:  # N19, N17
    local, shop = memory(), Shop()
    async with client(local, shop.schema) as db:
        await put(db, shop.cents, "a", 450)
        async with db.worker():
            await settle(db)
        assert await db.drop_observer("euros") == {"euros": 0}
        await db.drop_column("goods", "euros")
    again = Shop(factor=10.0)
    async with client(local, again.schema) as db, db.worker():
        await settle(db)
        assert await again.all(db) == {"a": 45.0}


async def test_another_conversion_into_the_same_column_replaces_what_the_first_one_gave() -> None:  # N19
    local, shop = memory(), Shop()
    async with client(local, shop.schema) as db:
        await put(db, shop.cents, "a", 450)
        async with db.worker():
            await settle(db)
        await db.drop_observer("euros")
    other = Shop(0)
    other.schema.convert(other.cents, other.euros, id="another")(lambda cents: cents / 10)
    async with client(local, other.schema) as db, db.worker():
        await settle(db)
        assert await other.all(db) == {"a": 45.0}


async def test_a_value_that_is_written_with_its_source_stays() -> None:  # N19
    """As programs do that write both columns, during a deploy."""
    shop = Shop()
    async with client(memory(), shop.schema) as db, db.worker():
        async with db.transaction() as txn:
            txn.set(shop.cents, "a", 450)
            txn.set(shop.euros, "a", 4.5025)
        await settle(db)
        assert await shop.all(db) == {"a": 4.5025}
        await put(db, shop.cents, "a", 500)
        await settle(db)
        assert await shop.all(db) == {"a": 5.0}


async def test_a_higher_version_converts_what_a_lower_one_could_not() -> None:  # N19
    def program(version: int, base: int) -> tuple[perco.Schema, Any, Any]:
        table = perco.Table("goods", key=perco.TEXT)
        text, number = table.column("text", perco.TEXT), table.column("number", perco.INT64)
        schema = perco.Schema(table, keep=perco.Keep(seconds=0))

        @schema.convert(text, number, id="numbers", version=version)
        def to_number(value: str) -> int | None:
            try:
                return int(value, base)
            except ValueError:
                return None

        return schema, text, number

    local, (first, text, number) = memory(), program(1, 10)
    async with client(local, first) as db:
        async with db.worker():
            await put(db, text, "a", "4")
            await settle(db)
            await put(db, text, "a", "0x10")
            await settle(db)
        assert await get(db, number, "a") is None
        await db.vacuum()
    second, _, number = program(2, 0)
    async with client(local, second) as db, db.worker():
        await settle(db)
        assert await get(db, number, "a") == 16
