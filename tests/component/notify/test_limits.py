"""Slow observers leave room, and limits of their own hold; runs ask to be run later, and observers give changes up."""

from __future__ import annotations

import logging
import math
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import trio

import perco
from perco.errors import UsageError
from perco.notify.failing import asked_by
from perco.notify.room import Room
from perco.protocol.records import ack_of
from perco.schema.manner import Limits
from tests.component.notify.kit import OPTIONS, Web, get, nothing_is_left, put, settle, until

Txn = perco.Transaction
Change = perco.Change[Any, Any]
SLOW_S = 2.0


class Slow:
    """An observer that calls a slow service."""

    def __init__(self, web: Web, id: str = "slow", column: Any = None, **how: Any) -> None:
        self.column = web.body if column is None else column
        self.running = self.most = self.done = 0
        self.ended: list[float] = []

        @web.observe(self.column, id=id, **how)
        async def observe(txn: Txn, change: Change) -> None:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await trio.sleep(SLOW_S)
            finally:
                self.running -= 1
            self.done += 1
            self.ended.append(trio.current_time())


class Fast:
    """An observer whose delay is measured."""

    def __init__(self, web: Web, **how: Any) -> None:
        self.at: dict[str, float] = {}

        @web.observe(web.size, id="fast", **how)
        async def observe(txn: Txn, change: Change) -> None:
            self.at[change.key] = trio.current_time()
            txn.set(web.count, change.key, change.value)


async def load(db: perco.Database, rows: int, *hogs: Slow) -> None:
    """Changes for slow observers, in rows of their own."""
    for low in range(0, rows, 100):
        async with db.transaction() as txn:
            for n in range(low, min(rows, low + 100)):
                for which, hog in enumerate(hogs):
                    txn.set(hog.column, f"{'amz'[n % 3]}{n:04}/{which}", "slow")


@pytest.mark.parametrize("slow", [1, 2, 3])
async def test_slow_observers_leave_room_for_others(web: Web, slow: int) -> None:  # N13
    """A thousand changes of an observer that takes two seconds for each; a fast one is run at once."""
    columns = [web.body, web.note, web.docs.column("more", perco.TEXT)]
    hogs, fast = [Slow(web, f"slow {n}", columns[n]) for n in range(slow)], Fast(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await load(db, 1000, *hogs)
        await until(lambda: sum(hog.running for hog in hogs) > 40)
        delays, together = [], []
        for n in range(20):
            began = trio.current_time()
            await put(db, web.size, f"fast {n}", n)
            await until(lambda n=n: f"fast {n}" in fast.at)  # type: ignore[misc]
            delays.append(fast.at[f"fast {n}"] - began)
            await trio.sleep(0.7)
            together.append([hog.running for hog in hogs])
        assert max(delays) < 0.1
        places = worker._worker.options.concurrency
        assert max(map(sum, together)) < places, "one place at least is free"
        shares = [median(running) for running in zip(*together, strict=True)]
        assert max(shares) - min(shares) <= 4, "they share the others"
        assert min(shares) >= {1: 48, 2: 26, 3: 18}[slow]
        await settle(db)
        assert [hog.done for hog in hogs] == [1000] * slow
        assert nothing_is_left(db)


async def test_runs_of_a_slow_observer_do_not_end_together(web: Web) -> None:  # N13
    slow, fast = Slow(web), Fast(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await load(db, 480, slow)
        await put(db, web.size, "fast", 1)
        await settle(db)
        assert (slow.done, len(fast.at)) == (480, 1)
    ended = sorted(slow.ended)
    assert sum(after - before < 0.003 for before, after in pairwise(ended[:48])) > 40, "nobody knew that it is slow"
    assert sum(after - before < 0.003 for before, after in pairwise(ended[48:])) <= 10
    assert ended[-1] - ended[0] < 9.5 * SLOW_S, "it is not much slower for that"


async def test_runs_that_wait_for_their_turn_do_not_begin_in_a_worker_that_drains(web: Web) -> None:  # N13
    slow, _ = Slow(web), Fast(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await load(db, 480, slow)
        await until(lambda: len(slow.ended) == 48)
        await until(lambda: 10 <= slow.running <= 20)  # the others wait a few milliseconds for their turn
        await worker._worker.drain()
    assert 58 <= slow.done <= 72


async def test_a_program_with_one_observer_uses_all_places(web: Web) -> None:  # N13
    slow = Slow(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await load(db, 200, slow)
        await settle(db)
    assert (slow.most, slow.done) == (64, 200)


async def test_it_leaves_no_room_for_lower_priorities(web: Web) -> None:  # N13
    slow, low = Slow(web, priority=1), Slow(web, "low", web.note)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await load(db, 200, slow, low)
        await settle(db)
    assert (slow.most, low.most, slow.done, low.done) == (64, 48, 200, 200)


@pytest.mark.parametrize(("places", "most"), [(1, 1), (2, 1), (3, 2), (4, 3), (8, 6)])
async def test_few_places(web: Web, places: int, most: int) -> None:  # N13
    slow, fast = Slow(web), Fast(web)
    few = perco.WorkerOptions(concurrency=places, scanners=min(places, 2))
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=few):
        await load(db, 30, slow)
        await put(db, web.size, "fast", 1)
        await settle(db)
    assert (slow.most, slow.done, len(fast.at)) == (most, 30, 1)


async def test_a_limit_of_its_own(web: Web) -> None:
    slow, other = Slow(web, concurrency=3), Slow(web, "other", web.note)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        began = trio.current_time()
        await load(db, 60, slow, other)
        await settle(db)
        assert trio.current_time() - began == pytest.approx(60 / 3 * SLOW_S, rel=0.1), "its places are always taken"
    assert (slow.most, slow.done, other.done) == (3, 60, 60)
    assert other.most > 10


async def test_a_run_that_takes_too_long_is_cancelled_and_has_failed(web: Web) -> None:
    began: list[float] = []

    @web.observe(web.body, id="hangs", timeout_s=5, attempts=3)
    async def hangs(txn: Txn, change: Change) -> None:
        began.append(trio.current_time())
        txn.set(web.note, change.key, "of a cancelled run")
        await trio.sleep(4.0 if change.value == "short" else math.inf)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "long")
        await put(db, web.body, "b", "short")
        await settle(db)
        [failed] = await db.failed()
        assert failed.key == "a"
        assert failed.attempts == 3
        assert "'hangs' was cancelled after timeout_s=5" in failed.error
        assert await get(db, web.note, "a") is None
        assert await get(db, web.note, "b") == "of a cancelled run"
        assert worker.statistics()["hangs"].failures == 3
    assert len(began) == 4


async def test_pauses_of_its_own(web: Web) -> None:  # N6
    began: dict[str, list[float]] = {"mine": [], "default": []}

    def fails(id: str, column: Any, **how: Any) -> None:
        @web.observe(column, id=id, attempts=5, **how)
        async def fail(txn: Txn, change: Change) -> None:
            began[id].append(trio.current_time())
            raise ValueError(id)

    fails("mine", web.body, backoff_s=(10, 30))
    fails("default", web.note)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "bad")
        await put(db, web.note, "a", "bad")
        await settle(db)
    pauses = {id: [later - earlier for earlier, later in pairwise(times)] for id, times in began.items()}
    bounds = {"mine": [10.0, 20.0, 30.0, 30.0], "default": [0.1, 0.2, 0.4, 0.8]}
    for id, most in bounds.items():
        assert all(0.5 * bound <= pause <= bound + 0.1 for pause, bound in zip(pauses[id], most, strict=True))


async def test_an_observer_that_becomes_slow_leaves_room(web: Web) -> None:  # N13
    """Its runs have been quick, and now its service hangs."""
    hangs, running = False, 0

    @web.observe(web.body, id="calls")
    async def calls(txn: Txn, change: Change) -> None:
        nonlocal running
        running += 1
        await trio.sleep(100.0 if hangs else 0.01)
        running -= 1

    fast = Fast(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        for key in "abc":
            await put(db, web.body, key, "quick")
        await settle(db)
        hangs = True
        for n in range(60):
            await put(db, web.body, f"hangs {n}", "slow")
            await trio.sleep(0.02)
        assert running == 48
        began = trio.current_time()
        await put(db, web.size, "fast", 1)
        await until(lambda: "fast" in fast.at)
        assert fast.at["fast"] - began < 0.1
        await settle(db)


@pytest.mark.parametrize("in_nursery", [False, True])
async def test_an_observer_asks_to_be_run_later(web: Web, caplog: pytest.LogCaptureFixture, in_nursery: bool) -> None:
    """It has not failed, however often it asks, and nothing of these runs stays."""
    began: list[float] = []

    async def refused() -> None:
        raise perco.Retry(after_s=30, reason="the service is busy")

    @web.observe(web.body, id="asks", attempts=2)
    async def asks(txn: Txn, change: Change) -> None:
        began.append(trio.current_time())
        txn.set(web.note, change.key, f"by run {len(began)}, attempt {change.attempt}")
        if len(began) <= 5 and in_nursery:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(refused)
        elif len(began) <= 5:
            await refused()

    with caplog.at_level(logging.INFO, logger="perco.observer"):
        async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
            await put(db, web.body, "a", "hello")
            await until(lambda: len(began) == 2)
            assert await get(db, web.note, "a") is None
            assert not await db.is_idle()
            await settle(db)
            assert await get(db, web.note, "a") == "by run 6, attempt 1"
            assert await db.failed() == []
            counted = worker.statistics()["asks"]
            assert (counted.runs, counted.later, counted.failures, counted.commits) == (6, 5, 0, 1)
            assert nothing_is_left(db)
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert pauses == pytest.approx([30.0] * 5, abs=0.1)
    assert "observer asks on docs['a']: again in 30 s: the service is busy" in caplog.text


async def test_a_newer_change_does_not_shorten_the_wait(web: Web) -> None:
    began: list[tuple[float, str]] = []

    @web.observe(web.body, id="asks")
    async def asks(txn: Txn, change: Change) -> None:
        began.append((trio.current_time(), change.value))
        if len(began) == 1:
            raise perco.Retry(10)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "old")
        await until(lambda: began)
        await put(db, web.body, "a", "new")
        await settle(db)
    [(first, _), (second, seen)] = began
    assert (second - first, seen) == (pytest.approx(10.0, abs=0.1), "new")


async def test_an_observer_gives_a_change_up(web: Web) -> None:
    runs: list[str] = []

    @web.observe(web.body, id="judges", attempts=0)
    async def judges(txn: Txn, change: Change) -> None:
        runs.append(change.key)
        txn.set(web.note, change.key, change.value)
        if change.value == "damaged":
            raise perco.GiveUp("the image is damaged")

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "damaged")
        await put(db, web.body, "b", "fine")
        await settle(db)
        assert sorted(runs) == ["a", "b"]
        [failed] = await db.failed()
        assert (failed.key, failed.attempts, failed.error) == ("a", 1, "GiveUp: the image is damaged")
        assert "raise perco.GiveUp" in failed.traceback
        assert await get(db, web.note, "a") is None
        assert worker.statistics()["judges"].given_up == 1
        await put(db, web.body, "a", "mended")
        await settle(db)
        assert await db.failed() == []
        assert await get(db, web.note, "a") == "mended"


def test_a_place_that_is_released_says_whether_a_row_was_passed() -> None:  # N13: then a scanner looks again
    room, limits = Room(4), Limits()
    row = [ack_of(1, 7)]
    for _ in range(3):
        assert room.has(7, limits, 0.0, alone=False)
        room.take(row)
    assert not room.crowded
    assert not room.has(7, limits, 0.0, alone=False)
    assert room.crowded
    assert [room.release(row) for _ in range(3)] == [True, False, False]
    assert room.has(7, limits, 0.0, alone=False)


def test_how_far_apart_runs_begin() -> None:  # N13
    room = Room(64)

    def waits(number: int, pace: float, now: float, *, alone: bool = False) -> list[float]:
        room.runs(number, 1, now - pace)
        room.ran(number, 1, now)
        return [round(room.wait_s(number, now, alone=alone), 6) for _ in range(4)]

    assert room.wait_s(1, 0.0, alone=False) == 0, "nothing is known of it"
    assert waits(1, 0.1, 0.0) == [0, 0, 0, 0], "it is quick"
    assert waits(2, 2.0, 0.0) == [0, 0.004, 0.008, 0.012]
    assert room.wait_s(2, 0.010, alone=False) == pytest.approx(0.006)
    assert room.wait_s(2, 9.0, alone=False) == 0
    assert waits(3, 0.256, 0.0) == [0, 0.001, 0.002, 0.003], "all together wait for a quarter of a run at most"
    assert waits(4, 2.0, 0.0, alone=True) == [0, 0, 0, 0]
    room.runs(5, 1, -2.0)
    room.ran(5, 1, 0.0, calls=16)  # N20: many quick runs that shared a transaction
    assert [room.wait_s(5, 0.0, alone=False) for _ in range(4)] == [0, 0, 0, 0]


def test_a_request_is_one_error_alone() -> None:
    later, up = perco.Retry(1), perco.GiveUp("no")
    assert asked_by(ExceptionGroup("", [ExceptionGroup("", [later])])) is later
    assert asked_by(up) is up
    assert asked_by(ExceptionGroup("", [later, ValueError()])) is None
    assert asked_by(ValueError()) is None


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"concurrency": True}, "concurrency is True"),
        ({"attempts": -1}, "attempts is -1"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": math.inf}, "timeout_s is inf"),
        ({"timeout_s": "5"}, "timeout_s is a number of seconds"),
        ({"backoff_s": 5}, "backoff_s is a pair"),
        ({"backoff_s": (5, 1)}, "the first is not longer"),
        ({"backoff_s": (0, 1)}, "both are above 0"),
        ({"backoff_s": (1, math.inf)}, "both are above 0"),
        ({"backoff_s": ("1", 2)}, "backoff_s"),
    ],
)
def test_limits_that_are_none(web: Web, how: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        web.observe(web.body, id="x", **how)


@pytest.mark.parametrize("after", [-1, math.inf, math.nan, "soon", 1e9])
def test_a_wait_that_is_none(after: Any) -> None:
    with pytest.raises(UsageError):
        perco.Retry(after)
