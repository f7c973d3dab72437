"""How far observers lag behind: counted anew if few changes wait, in the background if many do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.notify import lagging
from perco.storage import NOTIFY, Mutation
from tests.component.notify.kit import Web, client, memory, put, settle, until

Txn = perco.Transaction


def options(**how: Any) -> perco.Options:
    """A clock that goes on in virtual time, and is noted once a second."""
    return perco.Options(
        seed=4711,
        wall=lambda: 1e9 + trio.current_time(),
        backfill=perco.options.BackfillOptions(on=False),
        oracle=perco.options.OracleOptions(note_period_s=1.0),
        **how,
    )


async def test_the_lag_of_each_observer(web: Web) -> None:
    web.counting(web.body, id="a")
    web.counting(web.body, id="b")

    @web.observe(web.size, id="fails")
    async def fails(txn: Txn, change: perco.Change[str, int]) -> None:
        raise ValueError(change.key)

    async with perco.open("memory:", web.schema, options=options()) as db:
        assert db.statistics().lag == {}
        assert await db.lag() == {id: perco.Lag() for id in ("a", "b", "fails")}
        await put(db, web.body, "x", "hello")
        await put(db, web.size, "x", 1)
        await trio.sleep(100)
        await put(db, web.body, "y", "hello")
        lag = await db.lag()
        assert [(id, each.waiting, each.workers) for id, each in lag.items()] == [
            ("a", 2, 0),
            ("b", 2, 0),
            ("fails", 1, 0),
        ]
        told = db.statistics().lag
        assert {id: replace(each, counted_s=0.0) for id, each in told.items()} == lag
        assert told["a"].counted_s > 0
        assert lag["a"].oldest_s == pytest.approx(100, abs=2)
        assert lag["fails"].oldest_s == pytest.approx(100, abs=2)
        part = perco.WorkerOptions(only=["a", "fails"], attempts=3)
        async with db.worker(options=part) as worker:
            await until(lambda: worker.statistics()["fails"].failures == 2)
            lag = await db.lag()
            assert (lag["fails"].failing, lag["fails"].attempts, lag["fails"].failed) == (1, 2, 0)
            assert {id: each.workers for id, each in lag.items()} == {"a": 1, "b": 0, "fails": 1}
            await until(lambda: worker.statistics()["fails"].given_up)
        lag = await db.lag()
        assert lag["a"] == perco.Lag()
        assert (lag["fails"].waiting, lag["fails"].failed) == (0, 1)
        assert lag["b"].waiting == 2


async def test_the_age_is_that_of_the_cause(web: Web) -> None:
    """An observer that writes what another one observes passes on how old the change is."""

    @web.observe(web.body, id="first")
    async def first(txn: Txn, change: perco.Change[str, str]) -> None:
        await trio.sleep(50)
        txn.set(web.note, change.key, change.value)

    web.counting(web.note, id="second")
    async with perco.open("memory:", web.schema, options=options()) as db:
        await put(db, web.body, "x", "hello")
        async with db.worker(options=perco.WorkerOptions(only=["first"])) as worker:
            await until(lambda: worker.statistics()["first"].commits)
            lag = await db.lag()
            assert lag["second"].waiting == 1
            assert lag["second"].oldest_s == pytest.approx(50, abs=2)


async def test_many_changes_are_counted_in_the_background(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lagging, "_FEW", 10)
    monkeypatch.setattr(lagging, "_PIECE", 4)
    web.counting(web.body, id="a")
    async with perco.open("memory:", web.schema, options=options()) as db:
        for n in range(30):
            await put(db, web.body, f"{n:02}", "hello")
        first = await db.lag()
        assert (first["a"].waiting, first["a"].counted_s) == (30, pytest.approx(0, abs=0.1))
        for n in range(30, 50):
            await put(db, web.body, f"{n:02}", "hello")
        await trio.sleep(5)
        later = await db.lag()
        assert later["a"].waiting == 50
        assert later["a"].counted_s < 3
        assert later["a"].oldest_s == pytest.approx(5, abs=2)
        lags = inside(db).owner._lags
        assert lags._stop is not None
        await trio.sleep(lagging._UNASKED_S + 10)
        assert lags._stop is None, "nobody asks"
        await db.lag()
        async with db.worker():
            await settle(db)
        await trio.sleep(10)
        assert lags._stop is None, "few wait"
        assert (await db.lag())["a"] == perco.Lag()


async def test_calls_at_the_same_time_share_a_count(web: Web) -> None:
    web.counting(web.body, id="a")
    async with perco.open("memory:", web.schema, options=options()) as db:
        await put(db, web.body, "x", "hello")
        lags, found = inside(db).owner._lags, list[dict[str, perco.Lag]]()
        counts, count = 0, lags._count

        async def counted(pace: Any) -> Any:
            nonlocal counts
            counts += 1
            await trio.sleep(1)
            return await count(pace)

        lags._count = counted

        async def ask() -> None:
            found.append(await db.lag())

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
        assert counts <= 2
        assert [each["a"].waiting for each in found] == [1] * 5


async def test_a_cell_that_cannot_be_read_counts(web: Web) -> None:
    web.counting(web.body, id="a")
    async with client(memory(), web.schema) as db:
        [ack] = inside(db).known.bind(web.body).acks
        await inside(db).driver.store.apply([Mutation("docs", ((b"x", (), ((NOTIFY, ack, 5, b"rubbish"),)),))])
        assert (await db.lag())["a"].waiting == 1
