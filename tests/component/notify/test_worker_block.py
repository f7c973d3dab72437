"""`async with db.worker()`: how it begins, how it ends, and what comes out of it."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.lowlevel

import perco
from perco.database.inside import inside
from perco.storage import NOTIFY, Failed, Mutation
from tests.component.notify.kit import (
    LONG_S,
    OPTIONS,
    HoldingStore,
    Web,
    client,
    get,
    locks,
    memory,
    nothing_is_left,
    notified,
    put,
    run_seeded,
    settle,
    tablets_cells,
    until,
)
from tests.support.places import local_of

Txn = perco.Transaction
Change = perco.Change[Any, Any]


# ---------------------------------------------------------------- what is told


async def test_a_worker_without_observers_says_so(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "hello")
        await settle(db)
    [record] = [record for record in caplog.records if record.name == "perco.observer"]
    assert record.levelname == "WARNING"
    assert "the schema declares no observers" in record.getMessage()


# ---------------------------------------------------------------- what comes out


async def test_an_exception_in_the_block_comes_out_as_it_is(web: Web) -> None:
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await put(db, web.body, "a", "hello")
        with pytest.raises(ZeroDivisionError) as raised:
            await leave_with(db, ZeroDivisionError("mine"))
        assert raised.value.args == ("mine",)
        async with db.worker():
            await settle(db)


async def leave_with(db: perco.Database, error: Exception) -> None:
    async with db.worker():
        await trio.lowlevel.checkpoint()
        raise error


async def test_an_exception_comes_out_of_open_and_worker_in_one_line(web: Web) -> None:
    web.counting(web.body, id="count")

    async def both() -> None:
        async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
            await put(db, web.body, "a", "hello")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await both()


class Weird(BaseException):
    """Of somebody who knows what it means."""


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, Weird])
async def test_what_ends_a_program_comes_out_of_the_block_as_it_is(web: Web, kind: type[BaseException]) -> None:
    @web.observe(web.body, id="exiting")
    async def exiting(txn: Txn, change: Change) -> None:
        raise kind(3)

    async def run() -> None:
        async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
            await put(db, web.body, "a", "hello")
            await trio.sleep_forever()

    with pytest.raises(kind) as raised:
        await run()
    assert raised.value.args == (3,)


async def test_what_a_listener_raises_is_logged_and_no_more(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    ran = web.counting(web.body, id="count")

    def listener(*_: object) -> None:
        raise ZeroDivisionError

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        worker.on_run(listener)
        await put(db, web.body, "a", "hello")
        await settle(db)
    assert len(ran) == 1
    assert "on_run" in caplog.text


async def test_an_observers_exception_does_not_come_out(web: Web) -> None:  # N6
    @web.observe(web.body, id="failing")
    async def failing(txn: Txn, change: Change) -> None:
        raise ZeroDivisionError

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        async with db.worker():
            await put(db, web.body, "a", "hello")
            await trio.sleep(LONG_S)
        assert await get(db, web.body, "a") == "hello"


async def test_a_group_of_exceptions_from_an_observers_own_nursery_is_a_failure(web: Web) -> None:  # N6
    async def child() -> None:
        raise ZeroDivisionError

    times = 0

    @web.observe(web.body, id="nursery")
    async def nursery(txn: Txn, change: Change) -> None:
        nonlocal times
        times += 1
        if times == 1:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "hello")
        await settle(db)
        assert worker.statistics()["nursery"].failures == 1


async def test_a_store_that_breaks_its_word_ends_the_block_with_the_cause(web: Web) -> None:
    """A bug below, not an observer's: the block is cancelled, and BackgroundFailure comes out, unwrapped."""
    web.counting(web.body, id="count")

    async def scan(request: Any) -> Any:
        raise AssertionError("broken")

    async def breaks() -> None:
        async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
            await settle(db)
            local_of(db).store.scan = scan  # type: ignore[method-assign]
            await put(db, web.body, "a", "hello")
            await trio.sleep_forever()

    with pytest.raises(perco.errors.BackgroundFailure) as raised:
        await breaks()
    assert "broken" in "".join(str(error) for error in flat(raised.value.__cause__))


def flat(error: BaseException | None) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in flat(each)]
    return [error] if error is not None else []


# ---------------------------------------------------------------- how it ends


async def test_the_end_of_the_block_cancels_what_runs(web: Web) -> None:  # T10
    cancelled = began = 0

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        nonlocal cancelled, began
        began += 1
        txn.set(web.size, change.key, 1)
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled += 1
            raise

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for key in ("a", "k", "z"):
            await put(db, web.body, key, "hello")
        async with db.worker() as worker:
            await until(lambda: began == 3)
            assert worker.statistics()["slow"].running == 3
        assert cancelled == 3
        assert worker.statistics()["slow"].running == 0
        assert locks(db) == []
        assert len(notified(db)) == 3, "their changes wait for the next worker"
        assert await get(db, web.size, "a") is None


@pytest.mark.parametrize("turns", [*range(60), 80, 100, 150, 200])
def test_a_block_that_is_cancelled_at_any_turn_leaves_nothing_half_done(  # T10, N2
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        web = Web()

        @web.observe(web.body, id="measure")
        async def measure(txn: Txn, change: Change) -> None:
            await web.add(txn, f"runs/{change.key}")
            txn.set(web.size, "z" + change.key, len(change.value))
            await trio.lowlevel.checkpoint()

        @web.observe(web.size, id="sum")
        async def add(txn: Txn, change: Change) -> None:
            await web.add(txn, "sum", change.value)

        async with perco.open("memory:", web.schema, options=perco.Options(seed=turns)) as db:
            for key in ("a", "i", "q"):
                await put(db, web.body, key, "hello")
            with trio.CancelScope() as scope:
                async with db.worker(concurrency=3, scanners=2):
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
            assert scope.cancelled_caught
            # Its own locks are let go of in the background.
            await until(lambda: not inside(db).fates.live() and not inside(db).fates.observed and locks(db) == [])
            async with db.worker():
                await settle(db)
            assert [await get(db, web.count, f"runs/{key}") for key in "aiq"] == [1] * 3
            assert await get(db, web.count, "sum") == 15
            assert nothing_is_left(db)

    run_seeded(monkeypatch, turns, main)


async def test_a_run_whose_commit_has_been_sent_is_finished(web: Web) -> None:  # T10
    seen = web.counting(web.body, id="count")

    def commits_the_ack(mutation: Mutation) -> bool:
        return any(write[0] == NOTIFY and write[3] is None for _, _, writes in mutation.rows for write in writes)

    async with client(memory(), web.schema, sweeping=False) as first:
        store = HoldingStore(local_of(first).store, commits_the_ack, replies=True)
        async with client(local_of(first), web.schema, store=store) as db:
            await put(db, web.body, "a", "hello")
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def let_go() -> None:
                    await store.held.wait()
                    await trio.sleep(10.0)
                    store.let_go()

                async with db.worker():
                    await store.held.wait()
            assert await get(db, web.count, "count/a") == 1
            assert nothing_is_left(db)
            async with db.worker():
                await settle(db)
    assert len(seen) == 1


async def test_a_worker_may_follow_another(web: Web) -> None:
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for n in range(5):
            async with db.worker() as worker:
                await put(db, web.body, "a", str(n))
                await settle(db)
                assert worker.statistics()["count"].commits == 1, "counts are of this worker"
        assert len(seen) == 5


# ---------------------------------------------------------------- how it begins


async def test_one_worker_at_a_time(web: Web) -> None:
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        with pytest.raises(perco.UsageError, match="already has a worker"):
            async with db.worker():
                pass


@pytest.mark.parametrize(("concurrency", "scanners"), [(0, 0), (1, 2), (4, 0), (0, 1)])
async def test_impossible_numbers_are_refused(web: Web, concurrency: int, scanners: int) -> None:
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        with pytest.raises(perco.UsageError, match="at least"):
            async with db.worker(concurrency=concurrency, scanners=scanners):
                pass
        async with db.worker(concurrency=1, scanners=1):
            pass


async def test_one_run_at_a_time_is_asked_for_without_a_word_about_scanners(web: Web) -> None:
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        async with db.worker(concurrency=1) as handle:
            assert len(handle.scanners) == 1
        async with db.worker(options=perco.WorkerOptions(concurrency=2)) as handle:
            assert len(handle.scanners) == 2
        for wrong in ["a", 1.5, True, []]:
            with pytest.raises(perco.UsageError, match=r"concurrency is .* an int of at least 1"):
                async with db.worker(concurrency=wrong):  # type: ignore[arg-type]
                    pass


async def test_a_closed_store_has_no_worker(web: Web) -> None:
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        pass
    with pytest.raises(perco.errors.TransactionClosed):
        async with db.worker():
            pass
    with pytest.raises(perco.errors.TransactionClosed):
        await db.wait_idle()
    with pytest.raises(perco.errors.TransactionClosed):
        await db.wait_for(1)


# ---------------------------------------------------------------- what it tells


async def test_each_committed_run_is_told(web: Web) -> None:
    @web.observe(web.body, id="measure")
    async def measure(txn: Txn, change: Change) -> None:
        await trio.sleep(2.0)
        if change.attempt < 3:
            raise ZeroDivisionError

    events: list[str] = []
    options = perco.Options(seed=1, on_event=events.append)
    told: list[tuple[str, Any]] = []
    async with perco.open("memory:", web.schema, options=options) as db, db.worker() as worker:
        worker.on_run(lambda id, key, seconds: told.append((id, key)))
        await put(db, web.body, "a", "hello")
        await settle(db)
        counted = worker.statistics()["measure"]
        assert told == [("measure", "a")]
        assert events.count("ack") == 1
        assert (counted.runs, counted.failures, counted.commits, counted.conflicts) == (3, 2, 1, 0)
        assert counted.seconds == pytest.approx(2.0)


async def test_statistics_do_not_change_in_the_hand(web: Web) -> None:
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        before = worker.statistics()
        await put(db, web.body, "a", "hello")
        await settle(db)
        assert before["count"].commits == 0
        assert worker.statistics()["count"].commits == 1


async def test_a_tidying_that_fails_is_made_later(web: Web) -> None:  # N2, S4
    """Cells of changes that were handled are removed some day; nothing is run for them."""
    seen = web.counting(web.body, id="count")

    failed_at: list[float] = []

    class FullStore(HoldingStore):
        async def apply(self, mutations: Any) -> Any:
            if len(failed_at) < 3 and any(map(self._holds, mutations)):
                failed_at.append(trio.current_time())
                return [Failed(perco.errors.StoreFull("here", "for a while"))] * len(mutations)
            return await self._inner.apply(mutations)

    def only_removes(mutation: Mutation) -> bool:
        return all(write[0] == NOTIFY and write[3] is None for _, _, writes in mutation.rows for write in writes)

    async with client(memory(), web.schema, sweeping=False) as first:
        commit_ts = await put(first, web.body, "a", "hello")
        [(_, row, column, ts, value)] = tablets_cells(local_of(first).store, NOTIFY)
        async with client(local_of(first), web.schema) as db, db.worker():
            await settle(db)
        again = Mutation("docs", ((row, (), ((NOTIFY, column, ts, value),)),))
        await local_of(first).store.apply([again])
        assert notified(first) == [(b"a", commit_ts)]
        store = FullStore(local_of(first).store, only_removes)
        async with client(local_of(first), web.schema, store=store) as db, db.worker():
            await settle(db)
            assert len(set(failed_at)) == 3, "not at once again"
            assert nothing_is_left(db)
    assert len(seen) == 1
