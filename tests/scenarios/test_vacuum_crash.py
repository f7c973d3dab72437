"""A vacuum may end anywhere, and its messages may be lost, repeated and late: nothing that can be read is lost, no
observer runs twice, and the next one finishes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.check.check import CheckOptions, check
from perco.database.inside import inside
from perco.storage import LOCK, NOTIFY, ROLLBACK, SHARED, TS_MAX, WRITE, Mutation, ScanQuery, ScanRequest
from tests.support.faults import Fault, FaultyRowStore, use
from tests.support.machines import CrashedError, Machine

KEYS = ["a", "b", "c", "i", "k", "q", "z"]  # in three tablets
LONG = "x" * 300
EPOCH = 1e9


@dataclass
class World:
    """A store with all that a vacuum meets, and what a reader sees of it."""

    machine: Machine
    n: Any
    long: Any
    runs: list[tuple[str, int]]
    seen: dict[int, list[Any]] = field(default_factory=dict)  # by timestamp

    async def look(self, db: perco.Database, ts: int) -> list[Any]:
        async with db.snapshot(ts=ts) as snap:
            rows = [(row.key, row[self.n], row[self.long]) async for row in snap.scan(self.n.table)]
            assert await snap.get_many(self.n, KEYS) == {
                key: next((n for k, n, _ in rows if k == key), None) for key in KEYS
            }
        return rows


async def made() -> World:
    docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
    n, long = docs.column("n", perco.INT64), docs.column("long", perco.TEXT)
    schema = perco.Schema(docs, keep=perco.Keep(seconds=0))
    runs: list[tuple[str, int]] = []

    @schema.observe(n, id="seen")
    async def seen(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        runs.append((change.key, change.commit_ts))

    world = World(Machine(schema, one_step=False), n, long, runs)
    machine = world.machine

    async def put(db: perco.Database, value: int | None, *keys: str) -> None:
        async with db.transaction() as txn:
            for key in keys:
                if value is None:
                    txn.delete(n, key)
                    txn.delete(long, key)
                else:
                    txn.set(n, key, value)
                    txn.set(long, key, f"{value}{LONG}")

    options = perco.Options(seed=1, wall=lambda: EPOCH + trio.current_time())
    async with machine.opened(options, sweeper=True) as db:
        async with db.worker():
            for i in range(3):
                await put(db, i, "a", "b", "i", "q", "z")
                await inside(db).oracle.note()
                await trio.sleep(1)
            await put(db, None, "b", "z")
            await db.wait_idle(timeout=100)
            await put(db, 7, "z")
            await db.wait_idle(timeout=100)
        await put(db, None, "i")  # nobody has observed that yet
    # Clients that died: before the primary's commit, and after it.
    for number, keys in {1: "aq", 3: "ckz"}.items():
        async with machine.crashing(number, made=True) as (db, store):
            with contextlib.suppress(CrashedError):
                await put(db, 10 + number, *keys)
            await trio.testing.wait_all_tasks_blocked()
            assert store.dead is not None
    return world


async def oldest_kept(world: World) -> None:
    """What a reader sees at and above the watermark that the vacuum will publish: the last timestamp there is."""
    async with world.machine.opened() as db:
        ts = inside(db).oracle.last
        world.seen = {ts: await world.look(db, ts)}


async def vacuumed(world: World, store: FaultyRowStore | None = None, db: perco.Database | None = None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if db is None:
            db = await stack.enter_async_context(world.machine.opened())
        if store is not None:
            inside(db).oracle._store = use(db, store)
        with contextlib.suppress(CrashedError, perco.PercoError):
            await db.vacuum()


def cells(machine: Machine, group: str) -> list[tuple[bytes, int, int]]:
    out = []
    for tablet in machine.store.tablets():
        if tablet.table == "docs":
            query = ScanQuery(group, None, 0, TS_MAX, 1 << 20)
            request = ScanRequest("docs", tablet.start, None, (query,), False, 1 << 20, 1 << 30, 1 << 30)
            for row, [found] in tablet.scan(request).rows:
                out += [(row, column, ts) for column, ts, _ in found]
    return out


async def whole(world: World) -> None:
    """Another process finishes it: all is right, and as small as it can be."""
    machine = world.machine
    async with machine.opened() as db:
        for ts, rows in world.seen.items():
            if ts >= inside(db).oracle.holds.oldest():
                assert await world.look(db, ts) == rows, f"at {ts}"
        await db.vacuum()
    async with machine.opened(sweeper=True) as db:
        newest = await world.look(db, inside(db).oracle.last)
        [before] = world.seen.values()
        assert [row for row in newest if row[0] in "bi"] == [row for row in before if row[0] in "bi"]
        before_runs = list(world.runs)
        async with db.worker():
            await db.wait_idle(timeout=100)
        again = [run for run in world.runs[len(before_runs) :] if run in before_runs]
        assert not again, f"observers ran twice: {again}"
        await db.vacuum()
        assert not (await db.vacuum()).removed.cells
        result = await check(machine.store, options=CheckOptions(pause_s=0.0))
        assert result.clean, result.findings
        # One record for every value and one ack for every observed cell; nothing of "b" and "i", which were deleted.
        assert {row for row, _, _ in cells(machine, WRITE)} == {b"a", b"c", b"k", b"q", b"z"}
        assert len(cells(machine, WRITE)) == 15
        assert len(cells(machine, "data")) == 5
        for group in (LOCK, SHARED, ROLLBACK, NOTIFY):
            assert not cells(machine, group), group


async def steps() -> int:
    world = await made()
    await oldest_kept(world)
    store = FaultyRowStore(world.machine.store)
    await vacuumed(world, store)
    await whole(world)
    return len(store.log)


STEPS = 13  # of the vacuum of that store: watermark, recoveries, tablets, notes


async def test_the_sweep_knows_all_steps(autojump_clock: Any) -> None:
    assert await steps() == STEPS


@pytest.mark.parametrize("made_it", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(STEPS))
async def test_a_vacuum_that_dies_is_finished_by_the_next(number: int, made_it: bool, autojump_clock: Any) -> None:
    # G2, G3, G4: crash before and after every mutation
    world = await made()
    await oldest_kept(world)
    async with world.machine.crashing(number, made=made_it) as (db, store):
        await vacuumed(world, store, db)
        assert len(store.log) == number + made_it
    await whole(world)


FAULTS = [Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.DELAY, Fault.REPEAT, Fault.ECHO, Fault.FAIL]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("number", range(STEPS))
async def test_a_message_of_a_vacuum_is_lost_or_late(number: int, fault: Fault, autojump_clock: Any) -> None:  # T6
    world = await made()
    await oldest_kept(world)

    def plan(_: Mutation, at: int) -> Fault | None:
        return fault if at == number else None

    store = FaultyRowStore(world.machine.store, plan)
    await vacuumed(world, store)
    assert store.fired[fault] == 1
    if number % 2:
        await store.deliver_late()
    await whole(world)
    await store.deliver_late()  # too late, for any mutation
    await whole(world)
