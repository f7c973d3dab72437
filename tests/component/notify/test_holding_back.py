"""Observers that are tripped because all their runs fail, observers with a rate, and workers for a part of them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.errors import NotIdle, UsageError
from perco.notify.breakers import Breakers, Trip, note_trip, trips_in
from perco.notify.rates import Rates, rate_row
from perco.options import BreakerOptions
from perco.protocol.records import ack_of
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import DATA, TS_MAX, Mutation
from tests.component.notify.kit import OPTIONS, Web, get, nothing_is_left, put, settle, until

Txn = perco.Transaction
Change = perco.Change[Any, Any]
TRIPS = perco.WorkerOptions(attempts=16, breaker=BreakerOptions(failures=10, trial_s=60))


class Service:
    """An observer whose service may be down."""

    def __init__(self, web: Web, **how: Any) -> None:
        self.down = True
        self.called: list[float] = []

        @web.observe(web.body, id="calls", **how)
        async def calls(txn: Txn, change: Change) -> None:
            self.called.append(trio.current_time())
            if self.down:
                raise ConnectionError("the service is down")
            txn.set(web.note, change.key, change.value)


async def write(db: perco.Database, web: Web, rows: int) -> None:
    async with db.transaction() as txn:
        for n in range(rows):
            txn.set(web.body, f"{'amz'[n % 3]}{n:04}", "hello")


# ------------------------------------------------------------------ tripped


async def test_an_outage_costs_changes_few_attempts(web: Web, caplog: pytest.LogCaptureFixture) -> None:  # N14
    service, other = Service(web), web.counting(web.size, id="other")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=TRIPS) as worker:
        await write(db, web, 200)
        await until(lambda: len(service.called) >= 10)
        await trio.sleep(1)
        burst = len(service.called)
        assert burst < 10 + worker._worker.options.concurrency, "those in flight when it was tripped"
        [calls, _] = await db.observers()
        assert (calls.id, calls.tripped) == ("calls", "ConnectionError: the service is down")
        hour = trio.current_time()
        await trio.sleep(3600)
        trials = service.called[burst:]
        assert len(trials) == pytest.approx(60, abs=2), "one trial a minute"
        assert all(later - earlier >= 60 for earlier, later in pairwise(trials))
        await put(db, web.size, "other", 1)
        await until(lambda: other)
        assert trio.current_time() - hour < 3601, "other observers run"
        assert await db.failed_count() == 0
        assert (await db.waiting())["calls"] == 200
        service.down = False
        await settle(db)
        assert trio.current_time() - hour < 3600 + 150
        assert await db.failed() == []
        assert await get(db, web.note, "z0002") == "hello"
        assert (await db.observers())[0].tripped == ""
        assert nothing_is_left(db)
    assert (
        "observer calls is tripped: its last 10 runs have failed; from now on one run is tried every 60 s"
        in caplog.text
    )
    assert "observer calls is no longer tripped" in caplog.text
    assert caplog.text.count("is tripped") == 1


async def test_one_success_begins_the_count_anew(web: Web) -> None:  # N14
    runs: list[str] = []

    @web.observe(web.body, id="picky")
    async def picky(txn: Txn, change: Change) -> None:
        runs.append(change.key)
        if change.value == "bad":
            raise RuntimeError(change.key)

    options = perco.WorkerOptions(attempts=3, breaker=BreakerOptions(failures=4, trial_s=1e6))
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=options):
        for n in range(10):  # each of these fails three times
            await put(db, web.body, f"bad {n}", "bad")
            await settle(db)
            await put(db, web.body, f"good {n}", "good")
            await settle(db)
        assert len(await db.failed()) == 10
        assert len(runs) == 40


async def test_requests_do_not_trip(web: Web, caplog: pytest.LogCaptureFixture) -> None:  # N14
    answers = iter([perco.Retry(1)] * 20 + [perco.GiveUp("no")] * 20)

    @web.observe(web.body, id="asks")
    async def asks(txn: Txn, change: Change) -> None:
        if (error := next(answers, None)) is not None:
            raise error

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=TRIPS):
        await write(db, web, 40)
        await settle(db)
        assert await db.failed_count() == 20
    assert "is tripped" not in caplog.text


async def test_a_worker_that_never_trips(web: Web) -> None:
    service = Service(web, attempts=2)
    never = perco.WorkerOptions(breaker=BreakerOptions(failures=0))
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=never):
        await write(db, web, 150)
        await settle(db)
        assert await db.failed_count() == 150
    assert len(service.called) == 300


def test_a_breaker_tries_one_row_at_a_time() -> None:  # N14
    breakers, row = Breakers(BreakerOptions(failures=2, trial_s=10)), [ack_of(1, 7)]
    assert [breakers.failed(7, 0.0), breakers.failed(7, 1.0)] == [False, True]
    assert not breakers.may_run(7, 10.9)
    assert breakers.may_run(7, 11.0)
    assert breakers.may_run(8, 0.0)
    assert breakers.next_due(5.0) == 11.0
    breakers.take(row)
    assert not breakers.may_run(7, 12.0), "the trial is under way"
    breakers.release(row)
    assert breakers.may_run(7, 12.0), "it has ended without a run that failed"
    breakers.take(row)
    assert not breakers.failed(7, 13.0), "it is tripped already"
    breakers.release(row)
    assert not breakers.may_run(7, 22.0)
    breakers.take(row)
    assert breakers.succeeded(7)
    breakers.release(row)
    assert breakers.may_run(7, 23.0)
    assert breakers.next_due(0.0) == math.inf
    assert not breakers.failed(7, 24.0)


async def test_the_note_of_a_worker_that_died_expires(web: Web) -> None:
    Service(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        store, now = inside(db).driver.store, inside(db).engine.oracle.wall_ms()
        await note_trip(store, 1, Trip(now, 60.0, "down"))
        assert await trips_in(store, now + 239_000) == {1: Trip(now, 60.0, "down")}
        assert await trips_in(store, now + 241_000) == {}
        await note_trip(store, 1, None)
        assert await trips_in(store, now) == {}


async def test_few_rows_take_turns_in_trials(web: Web) -> None:  # N14
    """One trial a minute, also if only two rows wait; and what asked for a pause has it."""
    service = Service(web)
    asked: list[str] = []

    @web.observe(web.note, id="asks")
    async def asks(txn: Txn, change: Change) -> None:
        asked.append(change.key)
        if change.value == "later":
            raise perco.Retry(5000)
        if change.value == "bad":
            raise RuntimeError("bad")

    quick = perco.WorkerOptions(attempts=0, breaker=BreakerOptions(failures=4, trial_s=60))
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=quick):
        await write(db, web, 2)
        await put(db, web.note, "later", "later")
        await until(lambda: len(service.called) >= 4)
        began = len(service.called)
        await trio.sleep(1200)
        assert len(service.called) - began == pytest.approx(20, abs=2)
        assert len(asked) == 1
        service.down = False
        await trio.sleep(130)
        assert (await db.waiting())["calls"] == 0
        for n in range(4):
            await put(db, web.note, f"bad {n}", "bad")
        await until(lambda: len(asked) > 5)
        await put(db, web.note, "good", "good")
        for n in range(4):
            await put(db, web.note, f"bad {n}", "good")
        await trio.sleep(300)
        assert (await db.waiting())["asks"] == 1
        assert asked.count("later") == 1, "it has the pause that it asked for"


async def test_chains_that_are_too_long_do_not_trip(web: Web) -> None:  # N9, N14
    @web.observe(web.body, id="first")
    async def first(txn: Txn, change: Change) -> None:
        txn.set(web.note, change.key, change.value)

    web.counting(web.note, id="second")
    short = perco.WorkerOptions(chain_max=1, breaker=BreakerOptions(failures=5, trial_s=600))
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=short):
        await write(db, web, 50)
        await db.wait_idle(timeout=100)
        assert await db.failed_count() == 50


# ------------------------------------------------------------------ rates


async def test_a_rate_holds_although_rows_have_slower_observers(web: Web) -> None:  # N15
    """The observers of a row run one after the other, so a run may begin long after its moment was reserved."""
    gate, called = trio.Event(), list[float]()

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        await gate.wait()

    @web.observe(web.body, id="limited", rate=1)
    async def limited(txn: Txn, change: Change) -> None:
        called.append(trio.current_time())

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        for n in range(40):
            await put(db, web.body, f"{n:02}", "hello")
            await trio.sleep(0.7)  # so that a moment is free for every other row
        gate.set()
        await settle(db)
    assert len(called) == 40
    must_hold(called, 1)


async def test_a_moment_that_was_not_used_can_be_used(web: Web) -> None:  # N15
    Service(web, rate=1)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        rates, row = Rates(inside(db).engine, {1: 1.0}, lambda: None), [ack_of(1, 1)]
        await until(lambda: rates.may_run(1, trio.current_time()))
        rates.take(row)
        assert not rates.may_run(1, trio.current_time())
        rates.give_back(row, trio.current_time())
        assert rates.may_run(1, trio.current_time())


async def test_a_worker_that_drains_begins_no_run(web: Web) -> None:
    gate = trio.Event()
    seen = web.counting(web.size, id="other")

    @web.observe(web.body, id="hangs")
    async def hangs(txn: Txn, change: Change) -> None:
        await gate.wait()

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "hello")
        await until(lambda: worker.statistics()["hangs"].running)
        assert not await worker.drain(timeout=5)
        await put(db, web.size, "b", 1)
        await trio.sleep(10)
        assert seen == []
        gate.set()
        assert await worker.drain()
        assert worker.statistics()["hangs"].commits == 1
        assert (await db.waiting()) == {"hangs": 0, "other": 1}


async def test_a_run_that_waits_for_its_rate_holds_neither_row_nor_drain(web: Web) -> None:  # N15
    opened: list[perco.Database] = []
    called: list[float] = []

    @web.observe(web.body, id="rare", rate=0.01)
    async def rare(txn: Txn, change: Change) -> None:
        called.append(trio.current_time())
        if len(called) == 1:
            await put(opened[0], web.count, "shared", 1)
        txn.set(web.count, "shared", 2)

    other = web.counting(web.size, id="other")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        opened.append(db)
        await put(db, web.body, "a", "hello")
        await until(lambda: worker.statistics()["rare"].conflicts)
        await put(db, web.size, "a", 1)
        at = trio.current_time()
        await until(lambda: other)
        assert trio.current_time() - at < 1
        assert await worker.drain(timeout=1)
        assert len(called) == 1
        with pytest.raises(UsageError, match="timeout is -1"):
            await worker.drain(timeout=-1)


@pytest.mark.parametrize("rate", [0.05, 2, 10, 300])
async def test_a_rate_holds_over_all_rows(web: Web, rate: float) -> None:  # N15
    service, other = Service(web, rate=rate), web.counting(web.size, id="other")
    service.down, rows = False, max(int(rate * 3), 4)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await write(db, web, rows)
        await until(lambda: len(service.called) > 1, timeout=1e6)
        at = trio.current_time()
        await put(db, web.size, "other", 1)
        await until(lambda: other)
        assert trio.current_time() - at < 0.2
        await db.wait_idle(timeout=1e6)
        assert nothing_is_left(db)
    must_hold(service.called, rate)
    took = service.called[-1] - service.called[0]
    assert took <= rows / rate * 1.2 + 1, "and the rate is used"


def must_hold(called: list[float], rate: float) -> None:
    most = 0.0
    for first, began in enumerate(called):
        for count, at in enumerate(called[first:], 1):
            most = max(most, count - rate * (at - began))
    assert most <= max(rate, 1) + 2, "at most a second's worth, or two runs, at once"


async def test_repeated_runs_count(web: Web) -> None:  # N15
    """Another transaction writes the cell that the run writes, again and again."""
    called: list[float] = []
    opened: list[perco.Database] = []

    @web.observe(web.body, id="conflicts", rate=5)
    async def conflicts(txn: Txn, change: Change) -> None:
        called.append(trio.current_time())
        if len(called) <= 30:
            await put(opened[0], web.count, "shared", len(called))
        txn.set(web.count, "shared", -1)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        opened.append(db)
        await put(db, web.body, "a", "hello")
        await settle(db)
        counted = worker.statistics()["conflicts"]
    assert (counted.commits, counted.conflicts) == (1, 30)
    must_hold(called, 5)


@pytest.mark.parametrize("late", [False, True])
async def test_two_workers_share_a_rate(web: Web, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:  # N15
    """Both reserve moments in the same row of the store; none is reserved twice, also if both have read the row before
    one of them writes it."""
    Service(web, rate=10)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        engine, used = inside(db).engine, list[float]()
        apply = engine.driver.store.apply

        async def later(mutations: Any) -> Any:
            await trio.sleep(0.001)
            return await apply(mutations)

        if late:
            monkeypatch.setattr(engine.driver.store, "apply", later)
        both = [Rates(engine, {1: 10.0}, lambda: None) for _ in range(2)]

        async def use(rates: Rates) -> None:
            for _ in range(50):
                while wait_s := rates.wait_s(1):  # noqa: ASYNC110
                    await trio.sleep(wait_s)
                used.append(trio.current_time())

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for rates in both:
                nursery.start_soon(use, rates)
        assert trio.current_time() - began == pytest.approx(10, abs=1.5)
        must_hold(used, 10)


async def test_a_clock_that_was_set_back_does_not_stop_an_observer(web: Web) -> None:
    service = Service(web, rate=10)
    service.down = False
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        [number] = [entry.number for entry in inside(db).catalogue.observers.values()]
        for value in b"rubbish", (inside(db).engine.oracle.wall_ms() + 86_400_000) * 1000:
            packed = value if isinstance(value, bytes) else b"\xcf" + value.to_bytes(8, "big")
            [[cells]] = await inside(db).driver.store.read(
                [(SYSTEM_TABLE, rate_row(number), ((DATA, 0, 1, TS_MAX, 1),))]
            )
            version = cells[0][0] + 1 if cells else 1
            put_it = Mutation(SYSTEM_TABLE, ((rate_row(number), (), ((DATA, 0, version, packed),)),))
            await inside(db).driver.store.apply([put_it])
            async with db.worker():
                await write(db, web, 3)
                await db.wait_idle(timeout=10)
    assert len(service.called) == 6


@pytest.mark.parametrize(
    ("rate", "why"),
    [(0, "rate is 0"), (-1, "rate is -1"), ("5", "rate is a number"), (1e9, "rate is 1000000000"), (math.nan, "rate")],
)
def test_rates_that_are_none(web: Web, rate: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        web.observe(web.body, id="x", rate=rate)


# ------------------------------------------------------------------ a part of the observers


async def test_a_worker_for_a_part_of_the_observers(web: Web) -> None:
    seen = {id: web.counting(web.body, id=id) for id in "abc"}
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await put(db, web.body, "x", "hello")
        async with db.worker(options=perco.WorkerOptions(only=["a", "b"], without=["b"])) as worker:
            assert list(worker.statistics()) == ["a"]
            with pytest.raises(UsageError, match="no running program has: b, c"):
                await settle(db)
            assert await db.waiting() == {"a": 0, "b": 1, "c": 1}
        async with db.worker(options=perco.WorkerOptions(without=["a"])):
            await settle(db)
            with pytest.raises(UsageError, match="a process runs observer 'c'"):
                await db.drop_observer("c")
        assert nothing_is_left(db)
    assert {id: len(changes) for id, changes in seen.items()} == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"only": ["x"]}, "only: the schema has no observer 'x'; there are: 'a'"),
        ({"without": ["x"]}, "without: the schema has no observer 'x'"),
        ({"without": ["a"]}, "leave this worker no observer"),
        ({"only": []}, "leave this worker no observer"),
        ({"only": "a"}, "only takes a list of observer ids"),
        ({"without": [1]}, "without takes a list of observer ids"),
    ],
)
async def test_parts_that_are_none(web: Web, how: dict[str, Any], why: str) -> None:
    web.counting(web.body, id="a")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        with pytest.raises(UsageError, match=why):
            async with db.worker(options=perco.WorkerOptions(**how)):
                pass


async def test_a_wait_that_ends_says_why_nothing_runs(web: Web) -> None:
    Service(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=TRIPS):
        await write(db, web, 20)
        with pytest.raises(NotIdle, match="the service is down"):
            await db.wait_idle(timeout=100)
