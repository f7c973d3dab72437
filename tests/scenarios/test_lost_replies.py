"""Replies to what the store writes for itself are lost: nobody is told that nothing was written (T4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import perco
from perco.clock.oracle import BOUND_ROW, CLOCK_ROW
from perco.database.inside import inside, local_owner
from perco.notify.backfill import BACKFILL_ROW
from perco.schema import catalogue as catalogues
from perco.schema.catalogue import CATALOGUE_ROW, SYSTEM_TABLE
from perco.storage import Mutation, ReadRequest, RowCells
from perco.testing.faults import Plan
from tests.support.faults import Fault, FaultyRowStore, use
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.INT64)
n, twice = docs.column("n", perco.INT64), docs.column("twice", perco.INT64)
LOST = [Fault.LOSE_REQUEST, Fault.LOSE_REPLY]


def to(row: bytes, fault: Fault, *, times: int = 1, wanted: Callable[[Mutation], bool] = lambda _: True) -> Plan:
    """The first mutations of a row of the system table meet the fault."""
    left = [times]

    def plan(mutation: Mutation, number: int) -> Fault | None:
        if mutation.table == SYSTEM_TABLE and mutation.rows[0][0] == row and left[0] and wanted(mutation):
            left[0] -= 1
            return fault
        return None

    return plan


async def put(db: perco.Database, count: int) -> None:
    for key in range(count):
        async with db.transaction() as txn:
            txn.set(n, key, key)


def removes(mutation: Mutation) -> bool:
    return all(value is None for *_, value in mutation.rows[0][2])


@pytest.mark.parametrize("fault", LOST)
async def test_a_vacuum_says_that_it_may_have_removed_old_notes(fault: Fault) -> None:
    wall = [1e9]
    options = perco.Options(wall=lambda: wall[0], vacuum=perco.options.VacuumOptions(on=False))
    async with perco.open("memory:", perco.Schema(docs, keep=perco.Keep(seconds=0)), options=options) as db:
        for _ in range(4):
            await put(db, 1)
            wall[0] += 10
            await inside(db).oracle.note()
        store = use(db, FaultyRowStore(inside(db).driver.store, to(CLOCK_ROW, fault, wanted=removes)))
        with pytest.raises(perco.errors.WriteUnknown, match=r"it may or may not have been done .* safe to do it again"):
            await db.vacuum()
        assert store.fired[fault] == 1
        await db.vacuum()
        removed = db.statistics().vacuum.removed.notes
        assert removed == (0 if fault is Fault.LOSE_REPLY else 3), "it was done, or is done now"


@pytest.mark.parametrize("fault", LOST)
async def test_a_backfill_says_that_it_may_have_noted_how_far_it_is(fault: Fault) -> None:
    async def observe(txn: perco.Transaction, change: perco.Change[int, int]) -> None:
        txn.set(twice, change.key, 2 * (change.value or 0))

    options = perco.Options(backfill=perco.options.BackfillOptions(on=False, page_rows=2))
    later = perco.Schema(docs)
    later.observe(n, id="double")(observe)
    async with perco.open("memory:", perco.Schema(docs), options=options) as db:
        await put(db, 7)
        inside(db).known.schema = later
        await local_owner(db).declare()
        store = inside(db).driver.store = FaultyRowStore(inside(db).driver.store, to(BACKFILL_ROW, fault))
        with pytest.raises(perco.errors.WriteUnknown, match="the progress note"):
            await db.backfill()
        assert store.fired[fault] == 1
        [done] = await db.backfill()
        assert done.done
        async with db.worker():
            await db.wait_idle()
        async with db.snapshot() as snap:
            assert [row[twice] async for row in snap.scan(docs, columns=[twice])] == [2 * i for i in range(7)]


@pytest.mark.parametrize("fault", LOST)
async def test_a_change_of_the_catalogue_is_read_back(fault: Fault) -> None:  # N10
    async with perco.open("memory:", perco.Schema(docs)) as db:
        before = await catalogues.load(local_of(db).store)
        other = perco.Table("others", key=perco.TEXT)
        other.column("n", perco.INT64)
        store = FaultyRowStore(local_of(db).store, to(CATALOGUE_ROW, fault))
        after = await catalogues.declare(store, perco.Schema(docs, other))
        assert store.fired[fault] == 1
        assert after.version == before.version + 1, "once"
        assert await catalogues.load(local_of(db).store) == after


async def test_a_change_of_the_catalogue_of_which_nobody_hears_says_so() -> None:
    async with perco.open("memory:", perco.Schema(docs)) as db:
        store = FaultyRowStore(local_of(db).store, to(CATALOGUE_ROW, Fault.LOSE_REQUEST, times=1000))
        other = perco.Table("others", key=perco.TEXT)
        with pytest.raises(perco.errors.WriteUnknown, match="a change of the catalogue"):
            await catalogues.declare(store, perco.Schema(docs, other))
        assert store.fired[Fault.LOSE_REQUEST] > 1


class Gone(FaultyRowStore):
    """The first write of a row arrives, its reply does not, and from then on nobody answers."""

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        if self.fired[Fault.LOSE_REPLY]:
            raise perco.Unavailable("the server was not reached")
        return await super().read(requests)


async def test_a_change_of_the_catalogue_whose_server_has_gone_says_that_it_may_be_made() -> None:  # N10
    async with perco.open("memory:", perco.Schema(docs)) as db:
        before = await catalogues.load(local_of(db).store)
        other = perco.Table("others", key=perco.TEXT)
        store = Gone(local_of(db).store, to(CATALOGUE_ROW, Fault.LOSE_REPLY))
        with pytest.raises(perco.errors.WriteUnknown, match="a change of the catalogue") as caught:
            await catalogues.declare(store, perco.Schema(docs, other))
        assert "othing was written" not in str(caught.value)
        assert (await catalogues.load(local_of(db).store)).version == before.version + 1, "it was"


async def test_a_replay_whose_server_has_gone_says_that_it_may_be_made() -> None:  # N6
    schema = perco.Schema(docs)
    bad = [True]

    @schema.observe(n, id="double")
    async def double(txn: perco.Transaction, change: perco.Change[int, int]) -> None:
        if bad:
            raise ValueError("not yet")
        txn.set(twice, change.key, 2 * (change.value or 0))

    async with perco.open("memory:", schema) as db:
        await put(db, 1)
        async with db.worker(options=perco.WorkerOptions(attempts=1)):
            await db.wait_idle()
        assert await db.failed_count() == 1
        right = inside(db).driver.store
        left = [Fault.LOSE_REPLY]
        store = inside(db).driver.store = Gone(right, lambda mutation, number: left.pop() if left else None)
        with pytest.raises(
            perco.errors.WriteUnknown, match=r"n@double: .* may or may not have been done .* safe to do it again"
        ) as caught:
            await db.replay_failed()
        assert "othing was written" not in str(caught.value)
        assert store.fired[Fault.LOSE_REPLY] == 1
        inside(db).driver.store = right
        assert await db.failed_count() == 0, "it was"
        bad.clear()
        async with db.worker():
            await db.wait_idle()
        async with db.snapshot() as snap:
            assert await snap.get(twice, 0) == 0


async def test_a_range_of_timestamps_is_read_back_and_else_none_of_it_is_given() -> None:  # O1
    options = perco.Options(oracle=perco.options.OracleOptions(range_size=2))
    async with perco.open("memory:", perco.Schema(docs), options=options) as db:
        right = inside(db).oracle._store
        for fault in LOST:
            while inside(db).oracle.draw_nowait():
                pass
            last = inside(db).oracle.last
            store = inside(db).oracle._store = FaultyRowStore(right, to(BOUND_ROW, fault))
            if fault is Fault.LOSE_REQUEST:
                with pytest.raises(perco.Unavailable, match=r"there are no timestamps: .* Nothing was written"):
                    await db.begin()
                assert inside(db).oracle.last == last
            # In a store that may take effect late, the range that is there may be a former oracle's.
            skipped = 0 if right.once or fault is Fault.LOSE_REQUEST else options.oracle.range_size
            assert await inside(db).oracle.draw() == last + skipped + 1
            assert store.fired[fault] == 1
