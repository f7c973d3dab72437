"""Scanners find what is dirty, jump away from each other, and sleep when there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.lowlevel

import perco
from perco.errors import Corruption
from perco.notify.workers import WorkerHandle
from perco.storage import NOTIFY, ScanPage, ScanRequest
from tests.component.notify.kit import (
    LONG_S,
    OPTIONS,
    HoldingStore,
    Web,
    client,
    get,
    memory,
    nothing_is_left,
    notified,
    put,
    run_seeded,
    settle,
    until,
)
from tests.support.places import local_of

Txn = perco.Transaction
Change = perco.Change[Any, Any]


def tours(worker: WorkerHandle) -> int:
    return sum(counters.tours for counters in worker.scanner_statistics())


# ---------------------------------------------------------------- sleeping


@pytest.mark.parametrize("scanners", [1, 4])
async def test_scanners_sleep_when_there_is_nothing(web: Web, scanners: int) -> None:  # N8
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(scanners=scanners) as worker:
        await trio.sleep(LONG_S)
        before = tours(worker)
        assert before <= 2 * scanners
        await trio.sleep(LONG_S)
        assert tours(worker) == before
        await put(db, web.body, "a", "hello")
        await settle(db)
        await trio.sleep(1.0)  # a waiter in another process is told before the scanners here end their tours
        after = tours(worker)
        assert before <= after < before + 10 * scanners
        await trio.sleep(LONG_S)
        assert tours(worker) == after


async def test_a_damaged_store_is_not_searched_again_at_once(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:  # N8
    """A scanner lets a row go because a later one is damaged, and so wakes itself."""
    web.counting(web.body, id="count")
    looked = 0

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(scanners=1) as worker:
        [scanner] = worker.scanners

        async def tour(nursery: trio.Nursery) -> None:
            nonlocal looked
            looked += 1
            assert looked < 50
            worker._worker.waking.again = True
            raise Corruption("docs", "a row cannot be read")

        monkeypatch.setattr(scanner, "_tour", tour)
        await put(db, web.body, "a", "hello")
        await trio.sleep(10.0)
        assert 2 <= looked <= 11


async def test_scanners_sleep_while_a_run_takes_its_time(web: Web) -> None:  # N8
    go_on = trio.Event()

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        await go_on.wait()

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "hello")
        await put(db, web.body, "z", "hello")
        await trio.sleep(10.0)
        before = tours(worker)
        await trio.sleep(LONG_S)
        assert tours(worker) == before, "rows that are held are no reason to look again"
        go_on.set()
        await settle(db)


async def test_scanners_sleep_over_what_they_may_not_touch(web: Web) -> None:  # N8, N10
    web.counting(web.body, id="count")
    async with client(memory(), web.schema) as first:
        await put(first, web.body, "a", "hello")
        async with client(local_of(first), Web().schema) as db, db.worker() as worker:
            await trio.sleep(10.0)
            before = tours(worker)
            await trio.sleep(LONG_S)
            assert tours(worker) == before


async def test_a_failing_run_is_looked_for_when_it_is_due_and_not_before(web: Web) -> None:  # N6, N8
    @web.observe(web.body, id="failing")
    async def failing(txn: Txn, change: Change) -> None:
        raise ZeroDivisionError

    rare = perco.WorkerOptions(scanners=1, backoff=perco.options.BackoffOptions(first_s=100.0, max_s=100.0))
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=rare) as worker:
        await put(db, web.body, "a", "hello")
        await until(lambda: worker.statistics()["failing"].failures)
        before = tours(worker)
        await trio.sleep(LONG_S)
        runs = worker.statistics()["failing"].runs
        assert LONG_S / 100 <= runs <= LONG_S / 50 + 1
        assert tours(worker) - before <= 3 * runs


class WritesBehindStore(HoldingStore):
    """When a scanner's last page has been read, empty, and before it sees it, something is written there."""

    write: Callable[[], Any] | None = None

    async def scan(self, request: ScanRequest) -> ScanPage:
        page = await self._inner.scan(request)
        if self.write is not None and request.queries[0].group == NOTIFY and not page.rows:
            write, self.write = self.write, None
            await write()
        return page


@pytest.mark.parametrize("scanners", [1, 3])
async def test_a_wake_between_the_look_and_the_sleep_is_not_lost(web: Web, scanners: int) -> None:  # N8
    seen = web.counting(web.body, id="count")
    async with client(memory(), web.schema, sweeping=False) as first:
        for places in range(12):
            store = WritesBehindStore(local_of(first).store, lambda _: False)
            async with client(local_of(first), web.schema, store=store) as db:
                await settle(db)

                async def write() -> None:
                    async with db.transaction() as txn:
                        for key in ("a", "k", "z"):
                            txn.set(web.body, key, "hello")

                store.write = write
                async with db.worker(scanners=scanners):
                    await until(lambda: store.write is None)  # noqa: B023
                    await settle(db)
            assert len(seen) == 3 * (places + 1)


@pytest.mark.parametrize("seed", range(60))
def test_no_wake_is_lost_however_tasks_are_scheduled(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:  # N8
    """Changes come one by one, each as soon as the one before it was handled: just when scanners fall asleep."""

    async def main() -> None:
        web = Web()
        handled = 0

        @web.observe(web.body, id="count")
        async def count(txn: Txn, change: Change) -> None:
            nonlocal handled
            txn.set(web.size, change.key, len(change.value))
            handled += 1

        options = perco.Options(seed=seed)
        scanners = 1 + seed % 3
        async with (
            perco.open("memory:", web.schema, options=options) as db,
            db.worker(scanners=scanners, concurrency=3 + seed % 2),
        ):
            for n in range(40):
                await put(db, web.body, "akz"[n % 3], "hello")
                for _ in range((seed + n) % 7):
                    await trio.lowlevel.checkpoint()
                if n % 4 == seed % 4:
                    with trio.fail_after(LONG_S):
                        while notified(db):
                            await trio.lowlevel.checkpoint()
            with trio.fail_after(LONG_S):
                await db.wait_idle()
            assert handled >= 10
            assert nothing_is_left(db)

    run_seeded(monkeypatch, seed, main)


# ---------------------------------------------------------------- meeting


def meeting(web: Web, slow: str) -> tuple[set[str], trio.Event]:
    """An observer that stays on some rows until it may go on."""
    seen: set[str] = set()
    go_on = trio.Event()

    @web.observe(web.body, id="count")
    async def count(txn: Txn, change: Change) -> None:
        seen.add(change.key)
        if change.key.startswith(slow):
            await go_on.wait()
        await web.add(txn, "runs")

    return seen, go_on


async def load(db: perco.Database, web: Web, keys: list[str]) -> None:
    async with db.transaction() as txn:
        for key in keys:
            txn.set(web.body, key, "hello")


@pytest.mark.parametrize("seed", range(8))
def test_a_scanner_that_meets_another_jumps_and_nothing_is_passed_by(  # N8
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        web = Web()
        seen, go_on = meeting(web, "q")
        keys = [f"{letter}{n}" for letter in "aq" for n in range(10)]
        async with perco.open("memory:", web.schema, options=perco.Options(seed=seed)) as db:
            await load(db, web, keys)
            async with db.worker(concurrency=24, scanners=2) as worker:
                await until(lambda: len(seen) == 20)
                for _ in range(5):
                    await load(db, web, [f"r{n}" for n in range(10)])
                    await until(lambda: not any(row.startswith(b"r") for row, _ in notified(db)))
                met, teleports = (
                    sum(getattr(counters, name) for counters in worker.scanner_statistics())
                    for name in ("met", "teleports")
                )
                assert met >= teleports
                assert met > 0
                go_on.set()
                await settle(db)
            assert await get(db, web.count, "runs") == 20 + 50

    run_seeded(monkeypatch, seed, main)


async def test_scanners_do_teleport(web: Web) -> None:  # N8
    seen, go_on = meeting(web, "q")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await load(db, web, [f"q{n:03}" for n in range(100)])
        async with db.worker(concurrency=1000, scanners=4) as worker:
            await until(lambda: len(seen) == 100)
            loaded = 100
            # Where one read brings all rows, one scanner may claim them all: the others have none to jump from.
            while not sum(counters.teleports for counters in worker.scanner_statistics()) and loaded < 1000:
                await load(db, web, [f"q{n:03}" for n in range(loaded, loaded + 20)])
                loaded += 20
                await until(lambda: len(seen) == loaded)  # noqa: B023
            assert sum(counters.teleports for counters in worker.scanner_statistics()) > 0
            assert sum(counters.claims for counters in worker.scanner_statistics()) == loaded
            go_on.set()
            await settle(db)


async def test_with_teleporting_off_they_walk_on(web: Web) -> None:  # N8
    seen, go_on = meeting(web, "q")
    walking = perco.WorkerOptions(concurrency=200, scanners=4, teleport=False)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await load(db, web, [f"q{n:03}" for n in range(100)])
        async with db.worker(options=walking) as worker:
            await until(lambda: len(seen) == 100)
            assert sum(counters.teleports for counters in worker.scanner_statistics()) == 0
            assert sum(counters.met for counters in worker.scanner_statistics()) > 0
            go_on.set()
            await settle(db)


async def test_work_is_shared_among_the_scanners(web: Web) -> None:  # N8
    seen = set()

    @web.observe(web.body, id="note")
    async def note(txn: Txn, change: Change) -> None:
        seen.add(change.key)
        await trio.sleep(0.01)
        txn.set(web.note, change.key, "seen")

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await load(db, web, [f"{letter}{n:03}" for letter in "aiq" for n in range(100)])
        async with db.worker(concurrency=8, scanners=4) as worker:
            await settle(db)
            claims = [counters.claims for counters in worker.scanner_statistics()]
    assert len(seen) == 300
    assert min(claims) > 20


async def test_one_scanner_with_all_slots_taken_does_not_stop_the_others(web: Web) -> None:  # N6, N8
    seen, go_on = meeting(web, "q")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await load(db, web, [f"q{n}" for n in range(3)])
        async with db.worker(concurrency=4, scanners=2):
            await until(lambda: len(seen) == 3)
            await load(db, web, [f"a{n:02}" for n in range(30)])
            await until(lambda: len(seen) == 33)
            go_on.set()
            await settle(db)
        assert len(seen) == 33
        assert nothing_is_left(db)


async def test_pages_of_one_row_find_all_rows(web: Web) -> None:  # N8
    seen = web.counting(web.body, id="count")
    small = perco.WorkerOptions(page_rows=1, scanners=2, concurrency=4)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await load(db, web, [f"{letter}{n}" for letter in "aiq" for n in range(7)])
        async with db.worker(options=small):
            await settle(db)
    assert len(seen) == 21


async def test_a_worker_of_a_store_without_observers_sleeps(web: Web) -> None:  # N8
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "hello")
        await settle(db)
        await trio.sleep(1.0)  # the first sweep ends, after which there is a tour
        before = tours(worker)
        await trio.sleep(LONG_S)
        assert tours(worker) == before
        assert worker.statistics() == {}
