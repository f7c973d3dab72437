"""Fluo's scenarios of garbage collection, and its busy ones, while old versions go: a bank, and collisions.

testVerifyAfterGC has not run in Fluo for years; CollisionIT and StochasticBankIT collect at their ends only.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import trio
import trio.testing

import perco
from perco.check.check import CheckOptions, check
from perco.database.inside import inside, local_owner
from perco.protocol.records import observer_of
from perco.storage import DATA, LOCK, NOTIFY, ROLLBACK, TS_MAX, WRITE, LocalRowStore, ScanQuery, ScanRequest
from tests.scenarios.test_bank import at_random, deliver, options, seed as seed, slow, transfer
from tests.support import bank
from tests.support.everywhere import owning
from tests.support.faults import Fault
from tests.support.machines import Machine
from tests.support.places import local_of

AT_ONCE = perco.Keep(seconds=0)


def cells(store: LocalRowStore, table: str, group: str) -> Counter[tuple[bytes, int]]:
    """How many versions there are of each cell of a group."""
    found: Counter[tuple[bytes, int]] = Counter()
    for tablet in store.tablets():
        if tablet.table == table:
            query = ScanQuery(group, None, 0, TS_MAX, 1 << 20)
            request = ScanRequest(table, tablet.start, None, (query,), False, 1 << 20, 1 << 30, 1 << 30)
            for row, [here] in tablet.scan(request).rows:
                found.update((row, column) for column, _, _ in here)
    return found


async def verify(db: perco.Database, rng: random.Random, looks: list[int]) -> None:
    """The total, in every way of reading; and what is stored, while others write and a vacuum removes."""
    while True:
        await trio.sleep(rng.uniform(0, 0.004))
        async with db.snapshot() as snap:
            by_get = await bank.total_by_get(snap)
            await trio.sleep(rng.uniform(0, 0.01))  # the vacuum goes on meanwhile
            assert by_get == await bank.total_by_scan(snap, reverse=rng.random() < 0.5) == bank.TOTAL
        result = await check(local_of(db).store, alive=inside(db).fates.alive, options=CheckOptions(pause_s=0.001))
        assert result.clean, result.findings
        looks.append(result.waste)


async def collect(db: perco.Database, rng: random.Random) -> None:
    while True:
        await trio.sleep(rng.uniform(0, 0.02))
        await db.vacuum()


@pytest.mark.parametrize("groups", [True, False], ids=["groups", "rows"])
async def test_the_total_never_changes_while_old_versions_go(
    autojump_clock: trio.testing.MockClock, seed: int, groups: bool
) -> None:
    """G1 G2 G3 G4 G5 T4 T5 T13 (testVerifyAfterGC, StochasticBankIT): over a store that loses, delays and repeats."""
    rng = random.Random(seed)
    machine = Machine(perco.Schema(bank.north, bank.south, keep=AT_ONCE), groups=groups)
    unknown: list[str] = []
    looks: list[int] = []
    async with machine.opened(options(seed), sweeper=True) as db:
        await db.run(bank.opening)
        store = slow(db, at_random(rng, 0.1), rng)
        async with trio.open_nursery() as looking:
            looking.start_soon(deliver, store, rng)
            looking.start_soon(verify, db, rng, looks)
            looking.start_soon(collect, db, rng)
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(transfer, db, rng, 7, unknown)
            looking.cancel_scope.cancel()
        await store.deliver_late()
        removed = local_owner(owning(db)).vacuuming.removed
        assert removed.versions > 50
        assert removed.data > 10
        assert removed.rollbacks
    assert len(looks) > 5
    assert any(looks), "a check met a vacuum under way"
    assert all(store.fired[fault] > 5 for fault in (Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.DELAY, Fault.REPEAT))
    await machine.swept()
    async with machine.opened() as db:
        async with db.snapshot() as snap:
            assert await bank.total_by_get(snap) == await bank.total_by_scan(snap) == bank.TOTAL
        async with db.transaction() as txn:  # so that all that was there is below the watermark
            txn.set(bank.notes, "end", "end")
        await trio.testing.wait_all_tasks_blocked()
        await db.vacuum()
        async with db.snapshot() as snap:
            assert await bank.total_by_get(snap) == await bank.total_by_scan(snap) == bank.TOTAL
        for table in ("north", "south"):
            assert set(cells(machine.store, table, WRITE).values()) == {1}, "G3"
            assert set(cells(machine.store, table, DATA).values()) <= {1}, "T2"
            assert not cells(machine.store, table, ROLLBACK), "G4 (testRolledBackDataIsDropped)"
            assert not cells(machine.store, table, LOCK)
        result = await check(machine.store)
        assert (result.findings, result.waste) == ((), 0)


async def test_collisions_end_with_exact_counts_and_one_version_of_each_cell(
    autojump_clock: trio.testing.MockClock, seed: int
) -> None:
    """N3 N4 G3 G4 (CollisionIT): 20 loaders on five rows, an observer that totals, a vacuum; nothing is left over."""
    docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
    size, counted = docs.column("size", perco.INT64), docs.column("counted", perco.INT64)
    schema = perco.Schema(docs, keep=AT_ONCE)

    @schema.observe(size, id="total")
    async def total(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        before = await txn.get(counted, change.key) or 0
        txn.set(counted, change.key, change.value or 0)
        txn.set(counted, "total", (await txn.get(counted, "total") or 0) + (change.value or 0) - before)

    async def add(txn: perco.Transaction, key: str) -> None:
        txn.set(size, key, (await txn.get(size, key) or 0) + 1)

    rng = random.Random(seed)
    async with perco.open("memory:", schema, options=perco.Options(seed=seed)) as db:

        async def loader(number: int) -> None:
            for n in range(10):
                await db.run(add, "adhpz"[(number + n) % 5])

        async with db.worker() as worker, trio.open_nursery() as collecting:
            collecting.start_soon(collect, db, rng)
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(loader, number)
            await db.wait_idle(timeout=1000.0)
            collecting.cancel_scope.cancel()
            done = worker.statistics()["total"]
            assert done.commits + done.collapsed == 200
        assert db.statistics().counters.conflicts, "they did collide"
        async with db.snapshot() as snap:
            assert list((await snap.get_many(size, list("adhpz"))).values()) == [40] * 5
            assert await snap.get(counted, "total") == 200
        async with db.transaction() as txn:
            txn.set(counted, "end", 1)
        await trio.testing.wait_all_tasks_blocked()
        await db.vacuum()
        records = cells(local_of(db).store, "docs", WRITE)
        assert set(records.values()) == {1}, "of each cell the newest, of each ack as well"
        assert sum(bool(observer_of(column)) for _, column in records) == 5
        for group in (LOCK, ROLLBACK, NOTIFY):
            assert not cells(local_of(db).store, "docs", group)
        result = await check(local_of(db).store)
        assert (result.findings, result.waste) == ((), 0)
