"""Questions to a store - is it idle, what waits, what is paused - have one answer in every process (R9)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio

import perco
from perco.cli import waiting
from perco.cli.looks import Look
from perco.clock.loopwatch import HeartbeatOptions, Held, LoopWatch
from perco.database.inside import inside, local_owner
from perco.rpc.link import BACK_S
from perco.serve.client import remote_owner
from tests.component.serve.kit import Place

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)


@SCHEMA.observe(n, id="fails")
async def fails(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    if change.value == 13:
        raise ValueError("thirteen")


async def put(txn: perco.Transaction, *keys: str, value: int = 1) -> None:
    for key in keys:
        txn.set(n, key, value)


@pytest.fixture
def place() -> Place:
    return Place(SCHEMA)


async def answers(db: perco.Database) -> dict[str, Any]:
    return {
        "is_idle": await db.is_idle(),
        "pending": await db.pending(),
        "failed_count": await db.failed_count(),
        "waiting": await db.waiting(),
        "paused": await db.paused(),
        "unserved": await db.unserved(),
    }


async def test_a_client_is_told_what_the_owner_is(place: Place) -> None:  # R9
    async with place.served() as owner, place.clients(2) as (one, two):

        async def same() -> dict[str, Any]:
            told = await answers(owner)
            assert await answers(one) == await answers(two) == told
            return told

        assert (await same())["is_idle"] is True
        await one.run(put, "a", "b")
        told = await same()
        assert (told["is_idle"], told["pending"], told["waiting"]) == (False, 2, {"fails": 2})
        await two.pause("fails")
        assert (await same())["paused"] == {"fails"}
        await owner.resume("fails")
        await owner.run(put, "a", value=13)
        async with one.worker(options=perco.WorkerOptions(attempts=1)):
            await owner.wait_idle(timeout=60)
        told = await same()
        assert (told["is_idle"], told["pending"], told["failed_count"]) == (True, 0, 1)


async def test_an_observer_declared_by_another_client_is_asked_about_by_its_id(place: Place) -> None:  # R9 N10
    more = perco.Schema(docs)

    @more.observe(n, id="later")
    async def later(txn: perco.Transaction, change: perco.Change[str, int]) -> None: ...

    async with place.served() as owner, place.client() as one, place.client(more) as two:
        await two.run(put, "a")
        for db in (owner, one, two):
            assert await db.waiting() == {"fails": 1, "later": 1}
            assert await db.failed("later") == []
        assert [await db.unserved() for db in (owner, one, two)] == [{"later"}, {"later"}, {"fails"}]


@pytest.mark.parametrize("paused", [False, True])
async def test_who_waits_for_what_nobody_runs_is_told_the_same(place: Place, paused: bool) -> None:  # R9 N7
    more = perco.Schema(docs)

    @more.observe(n, id="nobody's")
    async def never(txn: perco.Transaction, change: perco.Change[str, int]) -> None: ...

    async with place.served() as owner, place.clients(2) as (one, two):
        async with place.client(more):
            pass
        if paused:
            await two.pause("fails")
        ts = await owner.run(committed, "a")
        async with one.worker():
            told = set()
            for db in owner, one, two:
                for wait in db.wait_idle, lambda db=db: db.wait_for(ts):
                    with pytest.raises(perco.UsageError) as caught:
                        await wait()
                    told.add(str(caught.value))
        [said] = told
        assert "are paused: 'fails'" in said if paused else "no running program has: nobody's" in said


async def test_a_client_counts_its_own_worker_though_a_new_server_does_not_know_of_it_yet(place: Place) -> None:  # N7
    async with place.served(), place.client() as db:
        waiting = remote_owner(db).waiting
        with pytest.raises(perco.UsageError, match="no running program has"):
            waiting.check_run({"fails"}, {"another": 1})
        async with db.worker():
            waiting.check_run({"fails"}, {"another": 1})
            with pytest.raises(perco.UsageError, match="no running program has: nobody's"):
                waiting.check_run({"nobody's"}, {"another": 1})


async def committed(txn: perco.Transaction, key: str) -> int:
    txn.set(n, key, 1)
    return await txn.commit()


async def test_the_owner_waits_for_what_a_client_is_about_to_commit(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:  # N7
    prewritten, go_on = trio.Event(), trio.Event()
    async with place.served() as owner, place.client() as db, trio.open_nursery() as nursery:
        commit = inside(db).driver._in_one_step

        async def held_up(*args: Any) -> None:
            prewritten.set()
            await go_on.wait()
            await commit(*args)

        monkeypatch.setattr(inside(db).driver, "_in_one_step", held_up)
        nursery.start_soon(db.run, put, "a", "z")  # in two tablets: a lock stands in one of them
        await prewritten.wait()
        seen = [await owner.is_idle(), await db.is_idle()]
        go_on.set()
        assert seen == [False, False], "its lock becomes a notify cell"


async def test_where_nothing_runs_observers_everybody_is_told_the_same(place: Place) -> None:  # R9
    async def told(ts: int, *dbs: perco.Database, timeout: float | None = None) -> set[str]:
        said = set()

        async def one(wait: Callable[..., Awaitable[Any]]) -> None:
            with pytest.raises((perco.UsageError, perco.NotIdle)) as caught:
                await wait(timeout=timeout)
            said.add(type(caught.value).__name__)

        async with trio.open_nursery() as nursery:
            for db in dbs:
                nursery.start_soon(one, db.wait_idle)
                nursery.start_soon(one, partial(db.wait_for, ts))
        return said

    soon = BACK_S - 0.5  # a client asks again before that
    async with place.served() as owner, place.client() as db:
        ts = await owner.run(committed, "a")
        assert await told(ts, owner, db, timeout=soon) == {"UsageError"}, "the store is new: nobody was away"
    async with place.served() as owner, place.client() as db:
        assert await told(ts, owner, db, timeout=soon) == {"NotIdle"}, "a former owner's workers may find this one"
        assert await told(ts, owner, db) == {"UsageError"}, "they had their time"


async def test_a_store_that_was_just_opened_is_idle_if_nothing_is_in_it(place: Place) -> None:  # N7
    async with place.served() as owner:
        assert await owner.is_idle()
        async with place.client() as db:
            assert await db.is_idle()


async def test_an_owner_whose_loop_was_held_says_who_waited(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    async with place.served() as owner:
        assert local_owner(owner).heartbeat.on_held is not None
        local_owner(owner).heartbeat.on_held(Held(5.0, "app.py:3 observer"))
        assert not caplog.records, "nobody waited"
        async with place.client():
            local_owner(owner).heartbeat.on_held(Held(0.3, "app.py:3 observer"))
            assert not caplog.records
            local_owner(owner).heartbeat.on_held(Held(5.0, "app.py:3 observer"))
    [record] = caplog.records
    assert "blocked for 5.0 s (app.py:3 observer)" in record.getMessage()
    assert "perco serve" in record.getMessage()
    assert local_owner(owner).heartbeat.on_held is None


async def test_the_watch_of_a_loop_tells_who_held_it() -> None:
    watch, told = LoopWatch(HeartbeatOptions()), []
    watch.on_held = told.append
    watch._seen["app.py:3 observer"] += 1
    watch._note(2.0)
    assert told == [Held(2.0, "app.py:3 observer")]


async def test_a_wait_from_outside_asks_the_owner_whether_the_store_is_idle(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:  # N7
    """A client's own looks may miss a change that moves from a row not looked at yet to one already looked at."""
    async with place.served() as owner, place.client() as db:
        empty = await waiting.look(db)
        assert empty.empty

        async def misses(db: perco.Database, until_ts: int | None = None) -> Look:
            return empty

        monkeypatch.setattr(waiting, "look", misses)
        await owner.run(put, "a")
        with trio.move_on_after(5) as scope:
            await waiting._until_idle(db, None)
        assert scope.cancelled_caught
        async with owner.worker():
            assert await waiting._until_idle(db, None) == ("", empty)
