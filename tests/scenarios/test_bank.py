"""Fluo's StochasticBankIT, small: many transfers at random over a store that loses, delays and repeats at random.

The total never changes, whoever looks, whenever. A seed fixes everything: the transfers, the faults, and the order of
tasks; a failure names it.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable

import pytest
import trio
import trio.testing

import perco
from perco.check.check import CheckOptions, check
from perco.database.inside import inside
from perco.storage import ROLLBACK, WRITE, Mutation
from tests.support import bank
from tests.support.everywhere import owning
from tests.support.faults import Fault, FaultyRowStore, Plan, kind_of, use
from tests.support.machines import CrashedError, Machine


@pytest.fixture(params=[11, 22, 33])
def seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tasks are scheduled in an order that hangs on the seed alone."""
    run = trio._core._run  # type: ignore[attr-defined]
    monkeypatch.setattr(run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    monkeypatch.setattr(run, "_r", random.Random(request.param))
    return int(request.param)


def at_random(rng: random.Random, share: float) -> Plan:
    """Prewrites, commits and rollbacks meet faults at random; the store's own rows do not."""
    faults = [Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.DELAY, Fault.REPEAT]

    def plan(mutation: Mutation, number: int) -> Fault | None:
        if kind_of(mutation) == "other" or rng.random() > share:
            return None
        return rng.choice(faults)

    return plan


async def deliver(store: FaultyRowStore, rng: random.Random) -> None:
    while True:
        await trio.sleep(rng.uniform(0, 0.02))
        await store.deliver_late()


async def verify(db: perco.Database, rng: random.Random, found: list[int]) -> None:
    """Look again and again, in every way of reading, now and in the past."""
    while True:
        await trio.sleep(rng.uniform(0, 0.004))
        ts = (
            None
            if rng.random() < 0.5
            else rng.randint(max(found[0], inside(db).oracle.last - 50), inside(db).oracle.last)
        )
        async with db.snapshot(ts=ts) as snap:
            by_get = await bank.total_by_get(snap)
            by_scan = await bank.total_by_scan(snap, reverse=rng.random() < 0.5)
        assert by_get == by_scan == bank.TOTAL, snap.start_ts
        found.append(snap.start_ts)


FAULTS = (Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.DELAY, Fault.REPEAT)


async def transfer(
    db: perco.Database,
    rng: random.Random,
    times: int,
    unknown: list[str],
    enough: Callable[[], bool] = lambda: True,
) -> None:
    """So many times at least, and until it is enough."""
    for i in itertools.count():
        if i >= times and enough():
            return
        await trio.sleep(rng.uniform(0, 0.01))
        try:
            await bank.at_random(db, rng)
        except perco.CommitUnknown as error:
            unknown.append(error.token)


def slow(db: perco.Database, plan: Plan, rng: random.Random) -> FaultyRowStore:
    """Every mutation takes its time, on the way there and on the way back."""

    async def pause(mutation: Mutation) -> None:
        if kind_of(mutation) != "other":
            await trio.sleep(rng.uniform(0, 0.002))

    return use(db, FaultyRowStore(inside(db).driver.store, plan, before=pause, after=pause))


def options(seed: int) -> perco.Options:
    return perco.Options(
        seed=seed,
        commit=perco.options.CommitOptions(commit_timeout_s=0.02),
        retry=perco.options.RetryOptions(attempts=1000),
    )


@pytest.mark.parametrize("groups", [True, False], ids=["groups", "rows"])
async def test_the_total_never_changes(autojump_clock: trio.testing.MockClock, seed: int, groups: bool) -> None:
    """T1 T3 T4 T5 T6 T7 T9, all at once; `pytest -k` with the seed in brackets runs it again."""
    rng = random.Random(seed)
    machine = Machine(bank.SCHEMA, groups=groups)
    unknown: list[str] = []
    async with machine.opened(options(seed), sweeper=True) as db:
        await db.run(bank.opening)
        found = [inside(db).oracle.last]
        store = slow(db, at_random(rng, 0.1), rng)

        def enough() -> bool:
            return db.statistics().counters.conflicts > 15 and all(store.fired[fault] > 3 for fault in FAULTS)

        async with trio.open_nursery() as looking:
            looking.start_soon(deliver, store, rng)
            looking.start_soon(verify, db, rng, found)
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(transfer, db, rng, 7, unknown, enough)
            looking.cancel_scope.cancel()
        for token in unknown:
            await db.outcome(token)
        await store.deliver_late()
        counters = db.statistics().counters
    assert len(found) > 15, "nobody looked"
    assert counters.commits > 30 - len(unknown)
    assert counters.conflicts > 15
    assert all(store.fired[fault] > 3 for fault in FAULTS)
    await machine.swept()
    assert not machine.locks()
    async with machine.opened() as db, db.snapshot() as snap:
        assert await bank.total_by_get(snap) == await bank.total_by_scan(snap) == bank.TOTAL


@pytest.mark.parametrize("groups", [True, False], ids=["groups", "rows"])
async def test_the_total_never_changes_while_a_vacuum_runs(
    autojump_clock: trio.testing.MockClock, seed: int, groups: bool
) -> None:
    """G1 G2 G3 G5 T13, and Fluo's testVerifyAfterGC: everything that is not needed any more goes, all the time."""
    rng = random.Random(seed)
    schema = perco.Schema(bank.north, bank.south, keep=perco.Keep(seconds=0))
    machine = Machine(schema, groups=groups)
    unknown: list[str] = []
    too_old: list[perco.errors.SnapshotTooOld] = []

    async def look(db: perco.Database, found: list[int]) -> None:
        while True:
            try:
                await verify(db, rng, found)
            except perco.errors.SnapshotTooOld as error:
                too_old.append(error)

    async def vacuum(db: perco.Database) -> None:
        while True:
            await trio.sleep(rng.uniform(0, 0.01))
            with contextlib.suppress(perco.StoreError):  # it meets the same faults
                await db.vacuum()

    async with machine.opened(options(seed), sweeper=True) as db:
        await db.run(bank.opening)
        found = [inside(db).oracle.last]
        store = slow(db, at_random(rng, 0.1), rng)
        async with trio.open_nursery() as looking:
            looking.start_soon(deliver, store, rng)
            looking.start_soon(look, db, found)
            looking.start_soon(vacuum, db)
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(transfer, db, rng, 7, unknown)
            looking.cancel_scope.cancel()
        vacuum = owning(db).statistics().vacuum
        removed, runs = vacuum.removed, vacuum.runs
        for token in unknown:
            with contextlib.suppress(perco.CommitUnknown):
                await db.outcome(token)
        await store.deliver_late()
    assert runs > 10
    assert removed.versions > 30
    assert removed.data > 10
    assert len(found) > 15, "nobody looked"
    assert too_old, "nobody looked at what had gone"
    await machine.swept()
    async with machine.opened() as db:
        await db.vacuum()
        async with db.snapshot() as snap:
            assert await bank.total_by_get(snap) == await bank.total_by_scan(snap) == bank.TOTAL
            accounts = [await snap.get(*account) for account in bank.ACCOUNTS]
        standing = sum(balance is not None for balance in accounts)
        assert sum(tablet.entries(WRITE) for tablet in machine.store.tablets()) == standing
        assert not any(tablet.entries(ROLLBACK) for tablet in machine.store.tablets())
        result = await check(machine.store, options=CheckOptions(pause_s=0.0))
        assert result.clean, result.findings


async def test_clients_that_die_do_not_change_the_total(autojump_clock: trio.testing.MockClock, seed: int) -> None:
    """T1 T5: one client after the other dies at some mutation, with transfers under way; the next one goes on."""
    rng = random.Random(seed)
    machine = Machine(bank.SCHEMA, groups=seed % 2 == 0)
    async with machine.opened() as db:
        await db.run(bank.opening)
    died = left = 0
    for _ in range(16):
        async with machine.crashing(rng.randint(0, 60), made=rng.random() < 0.5, options=options(seed)) as (db, store):
            try:
                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(transfer, db, rng, 3, [])
            except* (CrashedError, perco.errors.BackgroundFailure):
                pass
            died += store.dead is not None
            await trio.testing.wait_all_tasks_blocked()
        left += machine.locks()
        async with machine.opened() as db, db.snapshot() as snap:
            assert await bank.total_by_get(snap) == await bank.total_by_scan(snap) == bank.TOTAL
    assert died > 8
    assert left > 10
    await machine.swept()
    assert not machine.locks()


async def test_the_same_seed_gives_the_same_history(autojump_clock: trio.testing.MockClock, seed: int) -> None:
    async def history() -> list[str]:
        rng = random.Random(seed)
        trio._core._run._r.seed(seed)  # type: ignore[attr-defined]
        machine = Machine(bank.SCHEMA)
        async with machine.opened(options(seed)) as db:
            await db.run(bank.opening)
            store = slow(db, at_random(rng, 0.1), rng)
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(transfer, db, rng, 5, [])
            return [*store.log, str(inside(db).oracle.last)]

    assert await history() == await history()
