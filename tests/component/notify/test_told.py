"""A scanner that a commit wakes looks at the commit's rows alone, if no scanner is on a tour (N8); time is virtual."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.errors import Corruption, Unavailable
from perco.notify.scanner import Scanner
from perco.notify.sweeper import Sweeper
from perco.notify.waking import _TOLD_MAX
from perco.notify.workers import WorkerHandle
from perco.protocol.claim import COVERS_MAX
from perco.storage import APPLIED, NOTIFY, Mutation, ScanPage, ScanRequest
from tests.component.notify.kit import (
    LONG_S,
    OPTIONS,
    Web,
    get,
    local_of,
    nothing_is_left,
    notified,
    put,
    settle,
    tablets_cells,
)
from tests.component.serve.kit import Place
from tests.support import everywhere
from tests.support.faults import Fault, faulty, on

Txn = perco.Transaction
Change = perco.Change[Any, Any]


@pytest.fixture(autouse=True)
def _owner() -> None:
    if everywhere.over in everywhere.CLIENTS:
        pytest.skip("a client shares the rows with other processes, and the owner wakes it")


def counted(worker: WorkerHandle) -> tuple[int, int]:
    """How many tours there were, and how many rows scanners were told of."""
    counters = worker.scanner_statistics()
    return sum(each.tours for each in counters), sum(each.told for each in counters)


@pytest.mark.parametrize("scanners", [1, 4])
async def test_a_chain_of_observers_runs_without_a_tour(web: Web, scanners: int) -> None:
    @web.observe(web.body, id="sizes")
    async def sizes(txn: Txn, change: Change) -> None:
        txn.set(web.size, f"z{change.key}", len(change.value or ""))  # in another tablet

    @web.observe(web.size, id="notes")
    async def notes(txn: Txn, change: Change) -> None:
        txn.set(web.note, change.key, str(change.value))

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(scanners=scanners) as worker:
        await trio.sleep(1.0)
        before, told = counted(worker)
        for key in "akz":
            await put(db, web.body, key, "hello")
            await trio.sleep(1.0)
            assert await get(db, web.note, f"z{key}") == "5"
        await settle(db)
        after = counted(worker)
        assert after[0] == before
        assert after[1] - told >= 6


async def test_rows_of_a_commit_that_writes_many_are_found_by_a_tour(web: Web) -> None:
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await trio.sleep(1.0)
        before = counted(worker)
        async with db.transaction() as txn:
            for n in range(_TOLD_MAX + 1):
                txn.set(web.body, f"a{n}", "hello")  # of one tablet
        await settle(db)
        after = counted(worker)
        assert after[0] > before[0]
        assert await get(db, web.count, f"count/a{_TOLD_MAX}") == 1


@pytest.mark.parametrize("scanners", [1, 2])
async def test_a_row_that_changes_during_its_run_runs_again(web: Web, scanners: int) -> None:
    began, go_on = trio.Event(), trio.Event()
    seen: list[str] = []

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        seen.append(change.value or "")
        began.set()
        await go_on.wait()
        txn.set(web.size, change.key, len(change.value or ""))

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(scanners=scanners) as worker:
        await trio.sleep(1.0)
        before, _ = counted(worker)
        await put(db, web.body, "a", "first")
        await began.wait()
        await put(db, web.body, "a", "the second")
        await trio.sleep(10.0)
        assert seen == ["first"]
        go_on.set()
        await settle(db)
        assert seen[-1] == "the second"
        assert await get(db, web.size, "a") == len("the second")
        assert counted(worker)[0] == before
        assert nothing_is_left(db)


async def comes_late(db: perco.Database, cell: tuple[str, bytes, int, int, bytes]) -> None:
    """A mutation puts a notify cell that has been put, and handled, before; nobody is told."""
    table, row, column, ts, value = cell
    late = Mutation(table, ((row, (), ((NOTIFY, column, ts, value),)),))
    assert await inside(db).driver.store.apply([late]) == [APPLIED]


@pytest.mark.parametrize("wait_for", [False, True])
async def test_a_wait_finds_what_came_late(web: Web, wait_for: bool) -> None:
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        ts = await put(db, web.body, "a", "hello")
        [cell] = tablets_cells(local_of(db).store, NOTIFY)
        async with db.worker():
            await settle(db)
            inside(db).driver.leave_orphans()
            await trio.sleep(1.0)
            await comes_late(db, cell)
            with trio.fail_after(LONG_S):
                await (db.wait_for(ts) if wait_for else db.wait_idle())
            assert nothing_is_left(db)
        assert await get(db, web.count, "count/a") == 1


async def test_where_mutations_may_come_late_the_next_change_makes_a_tour(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await put(db, web.body, "a", "hello")
        [cell] = tablets_cells(local_of(db).store, NOTIFY)
        async with db.worker():
            await settle(db)
            await trio.sleep(1.0)
            for once, left in (True, 1), (False, 0):
                monkeypatch.setattr(type(inside(db).driver.store), "once", once)
                await comes_late(db, cell)
                await put(db, web.body, "z", f"hello {once}")
                await trio.sleep(1.0)
                assert len(notified(db)) == left


async def test_more_changes_of_a_row_than_a_run_covers(web: Web) -> None:
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for n in range(4 * COVERS_MAX + 3):  # those that the run does not cover are more than one claim removes, too
            await put(db, web.body, "a", f"value {n}")
        async with db.worker(scanners=1):
            await trio.sleep(10.0)
            assert nothing_is_left(db)
            assert await get(db, web.count, "count/a") == 1  # the rest has been handled by then


async def test_a_row_for_which_its_observer_had_no_room_runs_later(web: Web) -> None:  # N13
    go_on, running, most, ran = trio.Event(), 0, 0, []

    @web.observe(web.body, id="narrow", concurrency=1)
    async def narrow(txn: Txn, change: Change) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.wait()
        running -= 1
        ran.append(change.key)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await trio.sleep(1.0)
        for key in "akz":
            await put(db, web.body, key, "hello")
        await trio.sleep(1.0)
        assert counted(worker)[1] >= 3
        go_on.set()
        await settle(db)
        assert sorted(ran) == ["a", "k", "z"]
        assert most == 1


async def test_when_a_breaker_closes_the_rows_that_it_held_back_are_looked_at(web: Web) -> None:  # N14
    trial, go_on = trio.Event(), trio.Event()
    failures_max, failures, ran = 2, 0, []

    @web.observe(web.body, id="calls", backoff_s=(0.5, 0.5))
    async def calls(txn: Txn, change: Change) -> None:
        nonlocal failures
        if failures < failures_max:
            failures += 1
            raise OSError("the service is down")
        trial.set()
        await go_on.wait()
        ran.append(change.key)

    options = perco.WorkerOptions(breaker=perco.options.BreakerOptions(failures=failures_max, trial_s=60.0))
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=options):
        await put(db, web.body, "a", "hello")
        await trial.wait()
        for key in "kyz":  # held back, as long as the trial runs
            await put(db, web.body, key, "hello")
        await trio.sleep(1.0)
        go_on.set()
        await trio.sleep(1.0)
        assert sorted(ran) == ["a", "k", "y", "z"]


async def test_a_run_that_asks_for_a_later_one_has_it(web: Web) -> None:  # N6
    asked: list[float] = []
    ran: list[float] = []

    @web.observe(web.body, id="later")
    async def later(txn: Txn, change: Change) -> None:
        if not asked:
            asked.append(trio.current_time())
            raise perco.Retry(after_s=60.0)
        ran.append(trio.current_time())

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await trio.sleep(1.0)
        await put(db, web.body, "a", "hello")
        await trio.sleep(LONG_S)
        assert 60.0 <= ran[0] - asked[0] < 70.0


@pytest.mark.parametrize("error", [Unavailable("away"), Corruption("a cell", "unreadable")])
async def test_a_row_that_cannot_be_looked_at_is_found_by_a_tour(
    web: Web, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.counting(web.body, id="count")
    follow, fired = Scanner._follow_hint, 0

    async def fails(self: Scanner, *args: Any) -> None:
        nonlocal fired
        if not fired:
            fired += 1
            raise error
        await follow(self, *args)

    monkeypatch.setattr(Scanner, "_follow_hint", fails)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await trio.sleep(1.0)
        before, _ = counted(worker)
        async with db.transaction() as txn:
            for key in ("a", "b", "c"):  # the others are not looked at, either
                txn.set(web.body, key, "hello")
        await settle(db)
        assert fired == 1
        assert counted(worker)[0] > before
        for key in "abc":
            assert await get(db, web.count, f"count/{key}") == 1


async def test_an_observer_that_a_client_has_resumed_runs(web: Web) -> None:  # N10
    web.counting(web.body, id="count")
    place = Place(web.schema)
    async with place.served() as owner, place.client() as db, owner.worker():
        await db.pause("count")
        await put(owner, web.body, "a", "hello")
        await trio.sleep(1.0)
        assert await get(owner, web.count, "count/a") is None
        await db.resume("count")
        await put(owner, web.body, "b", "hello")
        await settle(owner)
        assert await get(owner, web.count, "count/a") == await get(owner, web.count, "count/b") == 1


async def test_all_observers_of_a_row_run(web: Web) -> None:
    for number, column in enumerate((web.body, web.size, web.body)):
        web.counting(column, id=f"count {number}")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await trio.sleep(1.0)
        before, _ = counted(worker)
        async with db.transaction() as txn:
            txn.set(web.body, "a", "hello")
            txn.set(web.size, "a", 5)
        await settle(db)
        for number in range(3):
            assert await get(db, web.count, f"count {number}/a") == 1
        assert counted(worker)[0] == before


async def test_a_scanner_whose_places_are_taken_is_not_told(web: Web) -> None:
    go_on = trio.Event()
    began: list[str] = []

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        began.append(change.key)
        if change.value == "long":
            await go_on.wait()

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(concurrency=6, scanners=2):
        await trio.sleep(1.0)
        for number in range(12):
            key = f"r{number}"
            await put(db, web.body, key, "long" if number in (0, 2, 4) else "short")  # scanners take turns
            await trio.sleep(0.5)
            assert key in began, "there are places, of one scanner or the other"
        go_on.set()
        await settle(db)


async def test_what_waits_for_its_rate_is_run_though_other_rows_come(web: Web) -> None:  # N15
    ran: list[str] = []

    @web.observe(web.body, id="limited", rate=1)
    async def limited(txn: Txn, change: Change) -> None:
        ran.append(change.key)

    @web.observe(web.size, id="narrow", concurrency=1)
    async def narrow(txn: Txn, change: Change) -> None:
        await trio.sleep(100.0)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(scanners=1):
        await trio.sleep(1.0)
        async with db.transaction() as txn:
            for number in range(10):
                txn.set(web.body, f"a{number}", "x")
        for number in range(8):
            await trio.sleep(0.1)
            await put(db, web.size, f"z{number}", number)  # but for the first, no run begins there now
        await trio.sleep(12.0)
        assert len(ran) == 10


@pytest.mark.parametrize("scanners", [1, 4])
async def test_after_one_priority_is_gone_rows_are_looked_at_for_the_other(web: Web, scanners: int) -> None:
    high = web.counting(web.body, id="high", priority=1)
    web.counting(web.size, id="low")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(scanners=scanners):
        await put(db, web.size, "q", 1)
        await trio.sleep(1.0)
        await db.pause("low")
        await trio.sleep(1.0)
        for key in "akz":
            await put(db, web.body, key, "x")
            await trio.sleep(1.0)
        assert [change.key for change in high] == ["a", "k", "z"]


async def test_one_observer_is_paused_and_another_resumed_at_once(web: Web) -> None:  # N10
    first = web.counting(web.body, id="first")
    web.counting(web.size, id="second")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(scanners=1):
        await db.pause("first")
        await put(db, web.body, "a", "x")
        await trio.sleep(1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(db.resume, "first")
            nursery.start_soon(db.pause, "second")
        await trio.sleep(1.0)
        assert [change.key for change in first] == ["a"]


async def test_rows_for_which_there_was_no_room_are_run_when_others_are_paused(web: Web) -> None:  # N13
    go_on, began = trio.Event(), set()

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        began.add(change.key)
        await go_on.wait()

    web.counting(web.size, id="other")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(concurrency=8, scanners=1):
        await trio.sleep(1.0)
        for number in range(8):
            await put(db, web.body, f"r{number}", "x")
            await trio.sleep(0.1)
        assert len(began) == 6
        await db.pause("other")
        await trio.sleep(1.0)
        assert len(began) == 8
        go_on.set()


async def test_a_run_from_before_a_breaker_tripped_closes_it_for_all_rows(web: Web) -> None:  # N14
    ran, go_on = [], trio.Event()

    @web.observe(web.body, id="calls", attempts=1)
    async def calls(txn: Txn, change: Change) -> None:
        if change.value == "fails":
            raise OSError("the service is down")
        if change.value == "long":
            await go_on.wait()
        ran.append(change.key)

    options = perco.WorkerOptions(breaker=perco.options.BreakerOptions(failures=2, trial_s=600.0))
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=options):
        await trio.sleep(1.0)
        for key, value in (("long", "long"), ("a", "fails"), ("b", "fails"), ("c", "x"), ("d", "x")):
            await put(db, web.body, key, value)
            await trio.sleep(0.5)
        assert not ran
        go_on.set()
        await trio.sleep(1.0)
        assert sorted(ran) == ["c", "d", "long"]


async def test_after_a_tour_that_met_damage_each_change_makes_another(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for key in "amz":
            await put(db, web.body, key, "x")
        store = inside(db).driver.store
        scan = store.scan

        async def scanned(request: ScanRequest) -> ScanPage:
            if request.start <= b"m" < (request.stop or b"\xff") and request.table == "docs":
                raise Corruption("a key", "unreadable")
            return await scan(request)

        monkeypatch.setattr(store, "scan", scanned)
        async with db.worker(scanners=1):
            for number in range(30):
                await put(db, web.body, f"a{number}", "x")
                await trio.sleep(2.5)
            assert {"a", "z"} <= {change.key for change in seen}


async def test_rows_of_observers_that_do_not_run_here_wake_nobody(web: Web) -> None:
    web.counting(web.body, id="mine")
    web.counting(web.size, id="others")
    options = perco.WorkerOptions(only=["mine"])
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=options) as worker:
        await trio.sleep(1.0)
        before = counted(worker)
        for number in range(5):
            await put(db, web.size, "a", number)
        await trio.sleep(1.0)
        assert counted(worker) == before


async def test_when_it_is_time_for_a_tour_no_more_rows_are_followed(web: Web) -> None:
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await trio.sleep(1.0)
        it = worker.scanners[0]
        it.worker.waking.told.append(("docs", b"a"))
        async with trio.open_nursery() as nursery:
            assert not await it._follow_told(nursery, trio.current_time())
            it.worker.waking.told.append(("docs", b"a"))
            assert await it._follow_told(nursery, trio.current_time() + 1.0)
        assert it.counters.told == 1


@pytest.mark.parametrize("seed", range(24))
def test_a_free_row_is_run_at_once_while_there_are_places(seed: int) -> None:
    """Found with other seeds: a scanner whose places were taken was told of rows, and the others slept."""
    rng = random.Random(seed)

    async def main() -> None:
        docs = perco.Table("docs", key=perco.TEXT, splits=rng.choice([(), ("h", "p")]))
        body, raised = docs.column("body", perco.INT64), docs.signal("raised")
        schema = perco.Schema(docs)
        longest, places, scanners = rng.choice((1, 5, 50)), rng.choice((4, 8, 16)), rng.choice((1, 2, 4))
        by_signal = rng.random() < 0.3
        waiting: dict[str, float] = {}  # since when; inf: as long as the row's run is under way
        running: set[str] = set()
        wrong: list[tuple[str, float]] = []

        @schema.observe(raised if by_signal else body, id="o")
        async def o(txn: Txn, change: Change) -> None:
            late = trio.current_time() - waiting.pop(change.key, math.inf)
            if change.key in running or late > 0.5:
                wrong.append((change.key, late))
            running.add(change.key)
            await trio.sleep(rng.choice((0, 0.01, rng.random() * longest)))
            running.discard(change.key)
            if change.key in waiting:
                waiting[change.key] = trio.current_time()

        options = replace(OPTIONS, seed=seed, commit=perco.options.CommitOptions(one_step=rng.random() < 0.7))
        async with (
            perco.open("memory:", schema, options=options) as db,
            db.worker(concurrency=places, scanners=scanners),
        ):
            await trio.sleep(1.0)
            for number in range(200):
                await trio.sleep(rng.choice((0, 0.01, 0.1, 1, 3)))
                free = places - len(running) - len(waiting)
                if free <= 0:
                    continue
                rows = [f"{first}{at}" for first in "abhmpz" for at in range(5)]
                async with db.transaction() as txn:
                    for key in rng.sample(rows, min(free, rng.choice((1, 1, 2, 5)))):
                        txn.set(body, key, number)
                        if by_signal:
                            txn.signal(raised, key)
                        waiting.setdefault(key, trio.current_time())
                        if key in running:
                            waiting[key] = math.inf
            await db.wait_idle(timeout=100 * longest + 60)
        assert not wrong

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_a_commit_whose_answer_was_lost_and_that_is_made_before_the_sweep_is_found(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secondary's commit arrives late: after the worker has looked, and before the sweeper does."""
    web.counting(web.body, id="count")
    right = Sweeper._sweep
    late: list[int] = []

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await trio.sleep(1.0)

        async def sweep(self: Sweeper) -> None:
            await trio.sleep(1.0)
            late.append(await store.deliver_late())
            await right(self)

        monkeypatch.setattr(Sweeper, "_sweep", sweep)
        store = faulty(db, on(["commit"], Fault.DELAY))
        async with db.transaction() as txn:
            txn.set(web.note, "a", "the primary")
            txn.set(web.note, "b", "the most cells are in its tablet")
            txn.set(web.body, "z", "hello")
        await settle(db)
        assert store.fired == {Fault.DELAY: 1}
        assert late == [1]
        assert await get(db, web.count, "count/z") == 1
