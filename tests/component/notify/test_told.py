"""A scanner that a commit wakes looks at the commit's rows alone, if no scanner is on a tour (N8); time is virtual."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import perco
from perco.errors import Corruption, Unavailable
from perco.notify.scanner import Scanner
from perco.notify.worker import _TOLD_MAX
from perco.notify.workers import WorkerHandle
from perco.protocol.claim import COVERS_MAX
from tests.component.notify.kit import LONG_S, OPTIONS, Web, get, nothing_is_left, put, settle
from tests.component.serve.kit import Place
from tests.support import everywhere

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
