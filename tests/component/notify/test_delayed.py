"""Observers that wait for others like it, and those that come before others."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.notify import worker
from perco.notify.options import WorkerOptions
from perco.protocol import claim
from perco.protocol.claim import COVERS_MAX
from tests.component.notify.kit import LONG_S, OPTIONS, Web, client, get, memory, nothing_is_left, put, settle, until
from tests.support.everywhere import owning

Change = perco.Change[Any, Any]
WALL = 1_700_000_000.0


class Clock:
    """A wall clock that goes with trio's, and can be set."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return WALL + trio.current_time() + self.ahead


class Delayed(Web):
    """An observer with a delay; `runs`: (when, the change)."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.runs: list[tuple[float, Change]] = []

        @self.observe(self.body, id="later", **how)
        async def later(txn: perco.Transaction, change: Change) -> None:
            self.runs.append((trio.current_time(), change))
            await self.add(txn, str(change.key))

    def moments(self) -> list[float]:
        return [at for at, _ in self.runs]


# ---------------------------------------------------------------- delays


async def test_scanners_that_ask_the_store_when_an_observer_is_due_keep_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """N13: while one asks, another one may take the observer's last place."""
    due, web, running, most = worker.Worker.due, Web(), 0, 0

    async def ask(self: Any, *args: Any) -> float:
        await trio.sleep(0.01)  # as long as a store elsewhere may take
        return await due(self, *args)

    @web.observe(web.body, id="one", concurrency=1, delay_s=1.0)
    async def one(txn: perco.Transaction, change: Change) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(1.0)
        running -= 1

    monkeypatch.setattr(worker.Worker, "due", ask)
    async with client(memory(), web.schema) as db:
        for key in ("a", "b", "i", "j", "y", "z"):
            await put(db, web.body, key, "text")
        async with db.worker(scanners=4):
            await settle(db)
    assert most == 1


async def test_a_change_runs_after_its_delay() -> None:
    web = Delayed(delay_s=10.0)
    async with client(memory(), web.schema) as db, db.worker():
        began = trio.current_time()
        await put(db, web.body, "a", "one")
        await settle(db)
    assert began + 10.0 <= web.moments()[0] <= began + 11.0
    assert len(web.runs) == 1


async def test_changes_within_the_delay_are_one_run() -> None:  # N4
    web = Delayed(delay_s=10.0)
    async with client(memory(), web.schema) as db, db.worker() as worker:
        for number in range(8):
            await put(db, web.body, "a", f"number {number}")
            last = trio.current_time()
            await trio.sleep(5.0)
        await settle(db)
        assert worker.statistics()["later"].collapsed == 7
        assert nothing_is_left(db)
    assert [change.value for _, change in web.runs] == ["number 7"]
    assert last + 10.0 <= web.moments()[0] <= last + 11.0


async def test_a_row_that_changes_for_ever_still_runs() -> None:
    web = Delayed(delay_s=10.0, max_delay_s=30.0)
    async with client(memory(), web.schema) as db, db.worker():
        for number in range(80):
            await put(db, web.body, "a", f"number {number}")
            await trio.sleep(5.0)
        assert 400 / 30 - 3 <= len(web.runs) <= 400 / 30 + 1
        gaps = [later - before for before, later in zip(web.moments(), web.moments()[1:], strict=False)]
        assert all(29.0 <= gap <= 37.0 for gap in gaps), gaps  # the first change after a run begins the next wait
        await settle(db)
    assert web.runs[-1][1].value == "number 79"


async def test_without_a_longest_delay_it_is_ten_times_the_delay() -> None:
    web = Delayed(delay_s=2.0)
    assert web.schema.observers["later"].manner.max_delay_s == 20.0


async def test_more_changes_than_a_run_takes_with_it_wait_as_long() -> None:  # N2
    web = Delayed(delay_s=10.0, max_delay_s=100.0)
    async with client(memory(), web.schema) as db, db.worker():
        for number in range(2 * COVERS_MAX):
            await put(db, web.body, "a", f"{number}")
        last = trio.current_time()
        await trio.sleep(10.5)
        assert len(web.runs) == 1
        assert web.moments()[0] >= last + 10.0
        await put(db, web.body, "a", "new")
        again = trio.current_time()
        await settle(db)
    assert [change.value for _, change in web.runs] == [str(2 * COVERS_MAX - 1), "new"]
    assert again + 10.0 <= web.moments()[1] <= again + 12.0


async def test_others_on_the_same_column_do_not_wait() -> None:  # N11
    web = Delayed(delay_s=10.0)
    at_once: list[float] = []

    @web.observe(web.body, id="now")
    async def now(txn: perco.Transaction, change: Change) -> None:
        at_once.append(trio.current_time())

    async with client(memory(), web.schema) as db, db.worker():
        began = trio.current_time()
        await put(db, web.body, "a", "one")
        await until(lambda: at_once)
        assert at_once[0] < began + 1.0
        assert web.runs == []
        await settle(db)
    assert len(web.runs) == len(at_once) == 1


async def test_a_retry_does_not_run_early_for_a_newer_change() -> None:
    """A conflict makes it run again, and by then there is a newer change: that one's delay counts."""
    web = Web()
    runs: list[tuple[float, Change]] = []
    written: list[float] = []

    @web.observe(web.body, id="later", delay_s=10.0)
    async def later(txn: perco.Transaction, change: Change) -> None:
        runs.append((trio.current_time(), change))
        txn.set(web.note, change.key, "seen")
        if len(runs) == 1:
            await put(db, web.note, change.key, "in its way")
            await put(db, web.body, change.key, "newer")
            written.append(trio.current_time())

    async with client(memory(), web.schema) as db, db.worker():
        await put(db, web.body, "a", "old")
        await settle(db)
    assert [change.value for _, change in runs] == ["old", "newer"]
    assert runs[1][0] >= written[0] + 10.0


async def test_waiting_waits_for_delayed_changes_too() -> None:  # N7
    web = Delayed(delay_s=50.0)
    async with client(memory(), web.schema) as db, db.worker():
        ts = await put(db, web.body, "a", "one")
        with pytest.raises(perco.NotIdle, match="later"):
            await db.wait_idle(timeout=40.0)
        with pytest.raises(perco.NotIdle, match="later"):
            await db.wait_for(ts, timeout=5.0)
        assert not await db.is_idle()
        await db.wait_for(ts, timeout=LONG_S)
        assert len(web.runs) == 1
        assert await db.is_idle()


async def test_what_waited_before_a_restart_has_waited_already() -> None:  # O3
    local, wall = memory(), Clock()
    options = perco.Options(seed=1, wall=wall)
    first, second = Delayed(delay_s=100.0), Delayed(delay_s=100.0)
    async with client(local, first.schema, options=options) as db, db.worker():
        await put(db, first.body, "a", "one")
        began = trio.current_time()
        await inside(owning(db)).oracle.note()
        await trio.sleep(60.0)
    async with client(local, second.schema, options=options) as db, db.worker():
        await settle(db)
    assert first.runs == []
    assert began + 100.0 <= second.moments()[0] <= began + 102.0


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0])
async def test_a_wall_clock_that_jumps_within_a_process_changes_nothing(jump_s: float) -> None:
    web, wall = Delayed(delay_s=100.0), Clock()
    async with client(memory(), web.schema, options=perco.Options(seed=1, wall=wall)) as db, db.worker():
        await put(db, web.body, "a", "one")
        began = trio.current_time()
        await trio.sleep(10.0)
        wall.ahead = jump_s
        await inside(owning(db)).oracle.note()
        await settle(db)
    assert began + 100.0 <= web.moments()[0] <= began + 102.0


@pytest.mark.parametrize(("jump_s", "low", "high"), [(-86400.0, 100.0, 162.0), (86400.0, 60.0, 62.0)])
async def test_a_wall_clock_that_jumps_between_processes_neither_starves_nor_holds_for_long(
    jump_s: float, low: float, high: float
) -> None:
    local, wall = memory(), Clock()
    options = perco.Options(seed=1, wall=wall)
    first, second = Delayed(delay_s=100.0), Delayed(delay_s=100.0)
    async with client(local, first.schema, options=options) as db, db.worker():
        await put(db, first.body, "a", "one")
        began = trio.current_time()
        await inside(owning(db)).oracle.note()
        await trio.sleep(60.0)
    wall.ahead = jump_s
    async with client(local, second.schema, options=options) as db, db.worker():
        await settle(db)
    assert began + low <= second.moments()[0] <= began + high


async def test_a_delay_may_change_with_the_program() -> None:
    """It is in the catalogue, and no transaction runs again for that."""
    local = memory()
    first, second = Delayed(delay_s=100.0), Delayed(delay_s=5.0, priority=3)
    async with client(local, first.schema) as db:
        assert inside(db).catalogue.observers["later"].manner == perco.schema.schema.Manner(
            delay_s=100.0, max_delay_s=1000.0
        )
        txn = await db.begin()
        txn.set(first.body, "a", "one")
        async with client(local, second.schema, beside=db) as other:
            manner = inside(other).catalogue.observers["later"].manner
            assert (manner.delay_s, manner.max_delay_s, manner.priority) == (5.0, 50.0, 3)
            assert inside(other).catalogue.binds == inside(db).catalogue.binds < inside(other).catalogue.version
        await txn.commit()
    async with client(local, second.schema) as db, db.worker():
        began = trio.current_time()
        await settle(db)
    assert began <= second.moments()[0] <= began + 6.0


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"delay_s": "a"}, "delay_s is a number of seconds"),
        ({"delay_s": None}, "delay_s is a number of seconds"),
        ({"delay_s": -1.0}, "delay_s must be from 0"),
        ({"delay_s": float("nan")}, "delay_s must be from 0"),
        ({"delay_s": float("inf")}, "delay_s must be from 0"),
        ({"delay_s": 5.0, "max_delay_s": 4.0}, "max_delay_s at least delay_s"),
        ({"delay_s": 5.0, "max_delay_s": []}, "max_delay_s is a number of seconds"),
        ({"max_delay_s": 4.0}, "max_delay_s bounds delay_s"),
        ({"priority": "a"}, "priority is an int"),
        ({"priority": 1.5}, "priority is an int"),
        ({"priority": True}, "priority is an int"),
        ({"priority": 1001}, "priority is an int from -1000 to 1000"),
    ],
)
def test_delays_and_priorities_that_are_none(how: dict[str, Any], words: str) -> None:
    with pytest.raises(perco.UsageError, match=words):
        Delayed(**how)


# ---------------------------------------------------------------- priorities


class Ranked(Web):
    """Three observers of different priority; `order`: whose runs committed, in order."""

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__()
        self.order: list[str] = []
        self.seconds = seconds
        for id, column, priority in (("low", self.note, -5), ("middle", self.size, 0), ("high", self.body, 7)):
            self.observe(column, id=id, priority=priority)(self._runs(id))

    def _runs(self, id: str) -> Any:
        async def run(txn: perco.Transaction, change: Change) -> None:
            await trio.sleep(self.seconds)
            self.order.append(id)

        return run

    async def fill(self, db: perco.Database, rows: int) -> None:
        async with db.transaction() as txn:
            for number in range(rows):
                for letter in "aiq":
                    key = f"{letter}{number:03}"
                    txn.set(self.body, key, "text")
                    txn.set(self.size, key, number)
                    txn.set(self.note, key, "note")


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_what_waits_is_run_in_the_order_of_priority(concurrency: int) -> None:
    web = Ranked()
    async with client(memory(), web.schema) as db:
        await web.fill(db, 20)
        async with db.worker(concurrency=concurrency, scanners=1):
            await settle(db)
    assert len(web.order) == 180
    assert set(web.order[:50]) == {"high"}
    place = {id: sum(at for at, each in enumerate(web.order) if each == id) / 60 for id in ("high", "middle", "low")}
    assert place["high"] < place["middle"] < place["low"]


async def test_a_change_of_high_priority_does_not_wait_for_what_was_there_before() -> None:
    web = Ranked()
    async with client(memory(), web.schema) as db:
        async with db.transaction() as txn:
            for number in range(300):
                txn.set(web.note, f"a{number:03}", "note")
        async with db.worker(options=WorkerOptions(concurrency=2, scanners=1)):
            await trio.sleep(20.5)
            before = len(web.order)
            await put(db, web.body, "z", "text")
            await until(lambda: "high" in web.order)
            assert web.order.index("high") - before <= 8, "rather than all of them"
            await settle(db)


async def test_lower_ones_do_not_starve() -> None:
    """A higher one that never comes to rest leaves them their share."""
    web = Web()
    low: list[str] = []
    high = 0

    @web.observe(web.body, id="high", priority=9)
    async def restless(txn: perco.Transaction, change: Change) -> None:
        nonlocal high
        high += 1
        await trio.sleep(0.1)
        txn.set(web.body, change.key, f"{high}")

    @web.observe(web.note, id="low")
    async def patient(txn: perco.Transaction, change: Change) -> None:
        await trio.sleep(0.1)
        low.append(change.key)

    async with client(memory(), web.schema) as db:
        async with db.transaction() as txn:
            for number in range(10):
                txn.set(web.body, f"a{number}", "text")
                txn.set(web.note, f"z{number}", "note")
        async with db.worker(options=WorkerOptions(concurrency=1, scanners=1)):
            await until(lambda: len(low) == 10)
    assert sorted(low) == [f"z{number}" for number in range(10)]
    assert high > len(low), "and it is still ahead"


async def test_without_priorities_nothing_is_toured_by_them(web: Web) -> None:
    web.counting(web.body, id="one")
    web.counting(web.note, id="two")
    async with client(memory(), web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "text")
        await settle(db)
        assert [scanner._level for scanner in worker.scanners] == [None] * 4
        assert not worker._worker.delays
        assert len(worker._worker.levels) == 1
        assert await get(db, web.count, "one/a") == 1


async def test_what_is_left_of_many_changes_is_not_run_for_when_the_newest_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # N3, N6
    few = 8
    for module in (claim, worker):
        monkeypatch.setattr(module, "COVERS_MAX", few)
    web, first, gate, attempts = Web(), trio.Event(), trio.Event(), list[int]()

    @web.observe(web.body, id="later", delay_s=10.0)
    async def later(txn: perco.Transaction, change: Change) -> None:
        attempts.append(change.attempt)
        if not first.is_set():
            first.set()
            await gate.wait()
        else:
            raise ZeroDivisionError

    async with client(memory(), web.schema) as db, db.worker(options=WorkerOptions(attempts=2)):
        for number in range(4 * few):
            await put(db, web.body, "a", f"number {number}")
        await first.wait()
        last = await put(db, web.body, "a", "during the run")
        gate.set()
        assert await db.wait_idle(timeout=LONG_S) == 1
        assert attempts == [1, 1, 2]
        assert [found.commit_ts for found in await db.failed()] == [last]
        assert nothing_is_left(db)
