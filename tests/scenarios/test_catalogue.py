"""The catalogue moves while transactions are under way: no change may miss a new observer (N10)."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from tests.support.faults import faulty, gated
from tests.support.places import declare


class Shop:
    """A schema of its own for each test: observers are added to it."""

    def __init__(self) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
        self.n = self.docs.column("n", perco.INT64)
        self.other = self.docs.column("other", perco.INT64)
        self.schema = perco.Schema(self.docs)

    async def observe(self, db: perco.Database, id: str, *, backfill: bool = True) -> None:
        @self.schema.observe(self.n, id=id, backfill=backfill)
        async def _(txn: perco.Transaction, change: perco.Change[str, int]) -> None: ...

        await declare(db)
        await db.backfill()


async def write(shop: Shop, db: perco.Database, *keys: str) -> None:
    async with db.transaction() as txn:
        for key in keys:
            txn.set(shop.n, key, 1)


async def test_an_observer_registered_between_prewrite_and_commit() -> None:  # N10
    shop = Shop()
    async with perco.open("memory:", shop.schema) as db:
        gate = await gated(db, "prewrite", made=True)
        txn = await db.begin()
        txn.set(shop.n, "k", 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_change, txn)
            await gate.reached()
            await shop.observe(db, "new", backfill=False)
            gate.open()
        assert txn.outcome == "aborted"
        assert await db.pending() == 0
        await write(shop, db, "k")
        assert await db.pending() == 1


async def expect_change(txn: perco.Transaction) -> None:
    with pytest.raises(perco.errors.CatalogueChanged) as caught:
        await txn.commit()
    assert caught.value.start_ts == txn.start_ts


@pytest.mark.parametrize("where", ["memory:", "folder"])
@pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")
async def test_an_observer_registered_between_set_and_commit(tmp_path: Path, where: str) -> None:  # N10
    """The write was noted when the column had no observer."""
    shop = Shop()
    url = str(tmp_path / "store") if where == "folder" else where
    async with perco.open(url, shop.schema, options=perco.Options(durability="process")) as db:
        txn = await db.begin()
        txn.set(shop.n, "k", 1)
        await shop.observe(db, "new")
        await expect_change(txn)
        txn = await db.begin()  # begun before, but its first write comes after
        await shop.observe(db, "newer")
        txn.set(shop.n, "k", 1)
        await txn.commit()
        assert await db.pending() == 2


async def test_run_does_it_again_by_itself(autojump_clock: trio.testing.MockClock) -> None:  # N10 T11
    shop = Shop()
    async with perco.open("memory:", shop.schema) as db:
        tried = 0

        async def body(txn: perco.Transaction) -> None:
            nonlocal tried
            tried += 1
            txn.set(shop.n, "k", tried)
            if tried == 1:
                await shop.observe(db, "new")

        await db.run(body)
        assert tried == 2
        assert await db.pending() == 1


async def test_a_transaction_that_only_reads_does_not_mind() -> None:  # N10
    shop = Shop()
    async with perco.open("memory:", shop.schema) as db:
        await write(shop, db, "k")
        async with db.transaction() as txn:
            assert await txn.get(shop.n, "k") == 1
            await shop.observe(db, "new")
            assert await txn.get(shop.n, "k") == 1
        assert txn.outcome == "committed"


async def test_what_is_there_is_notified_once_though_the_writer_is_not_done() -> None:  # N10 T9
    """Its primary has committed, the others' locks stand: they are there as much as the primary is."""
    shop = Shop()
    async with perco.open("memory:", shop.schema) as db:
        gate = await gated(db, "commit", skip=1)
        await write(shop, db, "a", "b", "z")  # in two tablets
        await gate.reached()
        await shop.observe(db, "new")
        gate.open()
        await trio.testing.wait_all_tasks_blocked()
        assert await db.pending() == 3


@pytest.mark.parametrize("kind", ["commit", "one step"])
async def test_what_commits_while_an_observer_is_registered_is_notified(kind: str) -> None:  # N10 C4
    """Its commit timestamp is drawn before the registration, its record written after."""
    shop = Shop()
    async with perco.open("memory:", shop.schema) as db:
        gate = await gated(db, kind)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, shop, db, "a", "z")
            await gate.reached()
            nursery.start_soon(shop.observe, db, "new")
            await trio.testing.wait_all_tasks_blocked()
            gate.open()
        await trio.testing.wait_all_tasks_blocked()
        assert await db.pending() == 2


async def test_the_catalogue_survives_and_is_compared() -> None:  # N10
    from tests.support.machines import Machine

    shop = Shop()
    machine = Machine(shop.schema)
    async with machine.opened() as db:
        version = inside(db).catalogue.version
    async with machine.opened() as db:
        assert inside(db).catalogue.version == version
    other = perco.Table("docs", key=perco.TEXT, splits=["m"])
    other.column("n", perco.TEXT)
    machine.schema = perco.Schema(other)
    with pytest.raises(perco.errors.SchemaMismatch, match="int64"):
        async with machine.opened():
            pass
    machine.schema = perco.Schema(perco.Table("docs"))
    with pytest.raises(perco.errors.SchemaMismatch, match="keys of text"):
        async with machine.opened():
            pass


async def test_declaring_twice_at_once_adds_once() -> None:  # N10
    shop = Shop()
    async with perco.open("memory:", shop.schema) as db:
        store = faulty(db)
        fresh = shop.docs.column("fresh", perco.INT64)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(declare, db)
            nursery.start_soon(declare, db)
        async with db.transaction() as txn:
            txn.set(fresh, "k", 1)
        assert store.log
        numbers = [entry.number for entry in inside(db).catalogue.tables["docs"].columns.values()]
        assert sorted(numbers) == [1, 2, 3]
