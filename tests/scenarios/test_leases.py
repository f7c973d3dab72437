"""Two processes on one store: each has only hearsay of the life of the other's transactions (L1, L2)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside, local_owner
from perco.protocol.records import Lock
from perco.testing.machine import Machine
from perco.txn.fates import Fates
from tests.support.faults import Fault, faulty, gated, on

docs = perco.Table("docs", key=perco.TEXT, splits=["h"])
n = docs.column("n", perco.INT64)


class Told(Fates):
    """Of the other process's transactions it knows what it is told."""

    __slots__ = ("asked", "living")

    exact = alone = False

    def __init__(self) -> None:
        super().__init__()
        self.living = True
        self.asked: list[Lock] = []

    async def lives_elsewhere(self, start_ts: int, lock: Lock) -> bool:
        await trio.lowlevel.checkpoint()
        self.asked.append(lock)
        return self.living


@asynccontextmanager
async def two() -> AsyncIterator[tuple[perco.Database, perco.Database, Told]]:
    machine = Machine(perco.Schema(docs), one_step=False)
    async with machine.opened() as db, machine.opened() as other:
        told = inside(other).engine.fates = inside(other).driver.fates = Told()
        inside(other).engine.oracle = inside(other).driver.oracle = inside(db).oracle
        yield db, other, told


async def put(db: perco.Database, key: str, value: int) -> None:
    async with db.transaction() as txn:
        txn.set(n, key, value)


async def test_a_lock_of_the_living_elsewhere_is_looked_at_again_until_it_is_gone(
    autojump_clock: trio.testing.MockClock,
) -> None:  # L1, T9
    async with two() as (db, other, told), trio.open_nursery() as nursery:
        gate = await gated(db, "commit")
        nursery.start_soon(put, db, "a", 1)
        await gate.reached()
        snap = await other.snapshot_at()
        began = trio.current_time()

        async def later() -> None:
            await trio.sleep(5)
            gate.open()

        nursery.start_soon(later)
        assert await snap.get(n, "a") == 1  # its commit_ts was drawn before the snapshot: there is no answer without it
        assert trio.current_time() >= began + 5
        assert len(told.asked) > 5
        assert told.asked[0].token == inside(db).engine.lease_token
        async with other.snapshot() as snap:
            assert await snap.get(n, "a") == 1
    assert inside(other).driver.counters.rolled_back == 0


async def test_a_lock_of_the_dead_elsewhere_is_broken_and_its_owner_meets_that(
    autojump_clock: trio.testing.MockClock,
) -> None:  # L2
    async with two() as (db, other, told), trio.open_nursery() as nursery:
        gate = await gated(db, "commit")
        told.living = False
        met = trio.Event()

        async def write() -> None:
            with pytest.raises(perco.errors.RolledBack):
                await put(db, "a", 1)
            met.set()

        nursery.start_soon(write)
        await gate.reached()
        await put(other, "a", 2)  # T7: it settles what is in its way
        gate.open()
        await met.wait()
        async with other.snapshot() as snap:
            assert await snap.get(n, "a") == 2


async def test_a_writer_lets_go_before_it_waits_for_the_living_elsewhere(
    autojump_clock: trio.testing.MockClock,
) -> None:  # T7
    async with two() as (db, other, _), trio.open_nursery() as nursery:
        gate = await gated(db, "commit")
        nursery.start_soon(put, db, "a", 1)
        await gate.reached()
        refused = trio.Event()

        async def write_both() -> None:
            txn = await other.begin()
            txn.set(n, "a", 2)
            txn.set(n, "z", 2)
            with pytest.raises(perco.WriteConflict):
                await txn.commit()
            refused.set()

        nursery.start_soon(write_both)
        with trio.move_on_after(3):
            await trio.sleep_forever()
        assert not refused.is_set()
        async with db.snapshot() as snap:
            assert await snap.get(n, "z") is None  # nothing is locked while it waits
        gate.open()
    assert refused.is_set()


async def test_who_is_taken_for_dead_on_a_full_disk_is_not_read_around(
    autojump_clock: trio.testing.MockClock,
) -> None:  # L2, S4
    """The lock could not be broken; so its owner, who lives, commits, with a timestamp that was drawn before ours."""
    async with two() as (db, other, told), trio.open_nursery() as nursery:
        gate = await gated(db, "commit")
        nursery.start_soon(put, db, "a", 1)
        await gate.reached()  # commit_ts has been drawn
        told.living = False
        store = faulty(other, on("rollback", Fault.FAIL))
        async with other.snapshot() as snap:
            with pytest.raises(perco.errors.StoreFull):
                await snap.get(n, "a")
            assert store.fired[Fault.FAIL] == 1
            gate.open()
            await trio.testing.wait_all_tasks_blocked()
            assert await snap.get(n, "a") == 1


async def test_who_has_not_heard_of_a_new_observer_runs_again_with_it(
    autojump_clock: trio.testing.MockClock,
) -> None:  # N10
    """Another process registers an observer: the first transaction that is told so aborts, and the next one knows."""
    seen: list[str] = []
    async with two() as (db, other, _):
        schema = perco.Schema(docs)

        @schema.observe(n, id="count")
        async def count(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
            seen.append(change.key)

        inside(other).known.schema = schema
        await local_owner(other).declare()
        txn = await db.begin()
        txn.set(n, "a", 1)
        with pytest.raises(perco.errors.CatalogueChanged):
            await txn.commit()
        await put(db, "a", 1)
        assert await db.pending() == 1
        async with other.worker() as worker:
            ran = trio.Event()
            worker.on_run(lambda *_: ran.set())
            await ran.wait()
    assert seen == ["a"]
