"""`perco.aio` does what `perco` does, from tasks of asyncio's; and says so where it cannot."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import traceback
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
import perco.aio
import perco.sync
from perco.aio import guest
from perco.aio.guest import Guests
from perco.database.inside import inside
from perco.storage import Mutation
from tests.support.faults import TWO_PHASES, FaultyRowStore, use

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
title = docs.column("title", perco.TEXT)
grown = docs.signal("grown")
SCHEMA = perco.Schema(docs)

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs

Body = Callable[[perco.aio.Database], Awaitable[Any]]


def over(body: Body, schema: perco.Schema = SCHEMA, options: perco.Options | None = None) -> Any:
    """What a body does with an open store."""

    async def main() -> Any:
        async with perco.aio.open("memory:", schema, options=options) as db:
            return await body(db)

    return asyncio.run(main())


async def bump(txn: perco.aio.Transaction, key: str, by: int = 1) -> int:
    value = (await txn.get(n, key) or 0) + by
    txn.set(n, key, value)
    return value


async def read(db: perco.aio.Database, key: str) -> int | None:
    async with db.snapshot() as snap:
        return await snap.get(n, key)


async def forever(_: Any, begun: asyncio.Event) -> None:
    begun.set()
    await trio.sleep_forever()


async def waiting(db: perco.aio.Database) -> asyncio.Task[None]:
    """A task in a call that waits."""
    begun = asyncio.Event()
    task = asyncio.create_task(db._port.ask(forever, (db._of, begun), {}))
    await begun.wait()
    return task


# ------------------------------------------------------------------ transactions


def test_a_function_runs_in_a_transaction_and_its_value_comes_back() -> None:
    async def body(db: perco.aio.Database) -> None:
        assert await db.run(bump, "a", by=2) == 2
        assert await db.run(bump, "a") == 3
        assert await read(db, "a") == 3

    over(body)


def test_what_was_set_first_is_seen_by_what_is_read_later_in_the_same_transaction() -> None:
    async def body(db: perco.aio.Database) -> None:
        async with db.transaction() as txn:
            txn.set(n, "b", 1)
            txn.set(n, "a", 2)
            txn.delete(n, "b")
            assert await txn.get_many(n, ["a", "b"]) == {"a": 2, "b": None}
            assert [row.key async for row in txn.scan(docs)] == ["a"]
            assert (await txn.row(docs, "a", [n]))[n] == 2
            assert txn.outcome == "open"
        assert txn.outcome == "committed"
        assert await db.outcome(txn.token) == txn.commit_ts > txn.start_ts

    over(body)


def test_a_conflict_runs_the_function_again_with_fresh_reads() -> None:  # T11
    async def body(db: perco.aio.Database) -> None:
        seen: list[int | None] = []

        async def slow(txn: perco.aio.Transaction) -> int:
            seen.append(await txn.get(n, "a"))
            txn.set(title, "a", "of an attempt")
            if len(seen) < 3:
                await asyncio.create_task(db.run(bump, "a"))
            return await bump(txn, "a", by=10)

        assert await db.run(slow) == 12
        assert seen == [None, 1, 2]

    over(body)


def test_after_the_last_attempt_the_conflict_comes_out_with_the_callers_line() -> None:
    async def body(db: perco.aio.Database) -> None:
        async def always(txn: perco.aio.Transaction) -> None:
            await bump(txn, "a")
            await db.run(bump, "a")

        with pytest.raises(perco.WriteConflict, match="Gave up after 2 attempts") as caught:
            await db.options(attempts=2).run(always)
        told = "".join(traceback.format_tb(caught.value.__traceback__))
        assert "await db.options(attempts=2).run(always)" in told

    over(body)


def test_what_a_function_raises_comes_out_as_it_is_and_nothing_is_written() -> None:
    mistake = ZeroDivisionError("mine")

    async def body(db: perco.aio.Database) -> None:
        async def fails(txn: perco.aio.Transaction) -> None:
            txn.set(n, "a", 1)
            raise mistake

        with pytest.raises(ZeroDivisionError) as caught:
            await db.run(fails)
        assert caught.value is mistake
        assert await read(db, "a") is None
        assert db.statistics().live_transactions == 0

    over(body)


def test_attempts_end_by_themselves_once_one_has_committed() -> None:
    async def body(db: perco.aio.Database) -> None:
        tried = 0
        async for attempt in db.attempts():
            async with attempt as txn:
                tried += 1
                value = await txn.get(n, "a") or 0
                if tried == 1:
                    await db.run(bump, "a")
                txn.set(n, "a", value + 1)
        assert tried == 2
        assert await read(db, "a") == 2
        with pytest.raises(perco.UsageError, match="async with attempt as txn"):
            async for _ in db.attempts():
                pass

    over(body)


def test_a_transaction_of_ones_own_is_committed_or_discarded() -> None:
    async def body(db: perco.aio.Database) -> None:
        txn = await db.begin(isolation="serializable")
        assert txn.isolation == "serializable"
        txn.set(n, "a", 1)
        txn.signal(grown, "a")
        assert await txn.commit() == txn.commit_ts
        txn = await db.begin()
        txn.set(n, "a", 2)
        txn.discard()
        assert (await read(db, "a"), txn.outcome) == (1, "aborted")
        with pytest.raises(perco.errors.TransactionClosed):
            txn.set(n, "a", 3)

    over(body)


def test_mistakes_are_told_where_they_are_made() -> None:
    async def body(db: perco.aio.Database) -> None:
        async with db.transaction() as txn:
            with pytest.raises(TypeError, match="None means absent"):
                txn.set(n, "a", None)
            with pytest.raises(TypeError):
                txn.set(n, "a", "one")
            with pytest.raises(perco.UsageError, match="limit is -1"):
                txn.scan(docs, limit=-1)
            with pytest.raises(perco.UsageError, match="async for row in"):
                iter(txn.scan(docs))
        with pytest.raises(perco.UsageError, match=r"async with db\.transaction"):
            db.transaction().__enter__()
        with pytest.raises(perco.UsageError, match=r"async with db\.snapshot"):
            db.snapshot().__enter__()
        with pytest.raises(perco.UsageError, match="`async def` function"):
            await db.run(lambda txn: None)
        with pytest.raises(perco.UsageError, match="`async def` function"):
            await db.run(5)

    over(body)


def test_past_the_timeout_the_next_read_says_so_and_so_does_the_commit() -> None:
    async def body(db: perco.aio.Database) -> None:
        for touch in False, True:

            async def late(txn: perco.aio.Transaction, touch: bool) -> None:
                txn.set(n, "a", 1)
                if touch:
                    await txn.get(n, "a")

            with pytest.raises(perco.Unavailable, match="did not finish within"):
                await db.options(timeout=0.0).run(late, touch)
        assert await read(db, "a") is None
        assert await db.options(timeout=60.0).run(bump, "a") == 1

    over(body)


def test_past_the_timeout_what_a_function_waits_for_is_cancelled_and_it_says_so() -> None:
    """It is the front's own timer that is let run out: a store's calls have theirs on the store's loop."""

    async def body(db: perco.aio.Database) -> None:
        ended: list[str] = []

        async def stuck(txn: perco.aio.Transaction) -> None:
            txn.set(n, "a", 1)
            run_out(txn)
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("function")

        with pytest.raises(perco.Unavailable, match="Nothing was written") as caught:
            await db.options(timeout=600).run(stuck)
        assert caught.value.commit_ts == 0
        with pytest.raises(perco.Unavailable, match="Nothing was written"):  # noqa: PT012
            async for attempt in db.options(timeout=600).attempts():
                async with attempt as txn:
                    await stuck(txn)
        assert ended == ["function", "function"]
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        assert await read(db, "a") is None
        assert db.statistics().live_transactions == 0

    over(body)


def run_out(txn: perco.aio.Transaction) -> None:
    """Let the timer of a transaction's function run out, as soon as that waits."""
    assert txn._limit is not None
    asyncio.get_running_loop().call_soon(txn._limit._expire)


@pytest.mark.parametrize("lingers", [False, True])
def test_past_the_timeout_a_commit_that_was_sent_is_waited_for(lingers: bool) -> None:  # T10
    async def body(db: perco.aio.Database) -> None:
        under_way: list[perco.aio.Transaction] = []
        fired = 0

        async def after(mutation: Mutation) -> None:
            nonlocal fired
            if under_way:
                [txn] = under_way
                assert txn._limit is not None
                txn._limit._expire()
                fired += 1
                await trio.lowlevel.checkpoint()

        async def committed(txn: perco.aio.Transaction) -> int:
            txn.set(n, "a", 1)
            under_way.append(txn)
            ts = await txn.commit()
            under_way.clear()
            if lingers:
                await asyncio.Event().wait()
            return ts

        use(db._of, FaultyRowStore(inside(db._of).driver.store, after=after))
        if lingers:
            with pytest.raises(perco.Unavailable, match="had committed") as caught:
                await db.options(timeout=600).run(committed)
            assert caught.value.commit_ts
        else:
            assert await db.options(timeout=600).run(committed)
        assert fired == 1
        assert await read(db, "a") == 1

    over(body)


def test_a_cancellation_from_outside_stays_one_past_the_timeout() -> None:  # T10
    async def body(db: perco.aio.Database) -> None:
        reached = asyncio.Event()

        async def stuck(txn: perco.aio.Transaction) -> None:
            run_out(txn)
            reached.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(db.options(timeout=600).run(stuck))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    over(body)


# ------------------------------------------------------------------ reading


def test_snapshots_scans_and_pins() -> None:
    async def body(db: perco.aio.Database) -> None:
        async with db.transaction() as txn:
            for i in range(600):  # three pages
                txn.set(n, f"{i:03}", i)
        async with db.snapshot() as snap:
            await db.run(bump, "000")
            assert [row[n] async for row in snap.scan(docs)] == list(range(600))
            assert [row.key for row in await snap.scan(docs, reverse=True, limit=2).all()] == ["599", "598"]
            assert snap.start_ts >= txn.commit_ts
        past = await db.snapshot_at(ts=txn.commit_ts)
        assert await past.get(n, "000") == 0
        past.end()
        async with db.pin("export", lease_s=60) as pin:
            await pin.renew(90)
            assert [(p.name, p.ts) for p in await db.pins()] == [("export", pin.pin.ts)]
        assert await db.pins() == []
        with pytest.raises(perco.errors.SnapshotTooOld):
            async with db.snapshot(at=datetime.now(UTC) - timedelta(days=9)):
                raise AssertionError
        assert isinstance(await db.vacuum(), perco.VacuumResult)

    over(body)


def test_a_scan_sees_what_the_transaction_writes_ahead_of_it() -> None:
    async def body(db: perco.aio.Database) -> None:
        async with db.transaction() as txn:
            for i in range(300):
                txn.set(n, f"{i:03}", i)
        async with db.transaction() as txn:
            seen = []
            async for row in txn.scan(docs):
                seen.append(row.key)
                if row.key == "100":
                    txn.set(n, "1005", 1)
                    txn.delete(n, "101")
            assert len(seen) == 300
            assert "1005" in seen

    over(body)


# ------------------------------------------------------------------ tasks


def test_many_tasks_lose_no_update() -> None:
    async def body(db: perco.aio.Database) -> None:
        async def work() -> None:
            for _ in range(5):
                await db.run(bump, "a")

        await asyncio.gather(*[work() for _ in range(40)])
        assert await read(db, "a") == 200
        assert db.statistics().live_transactions == 0

    over(body)


def test_no_call_waits_for_one_that_waits_and_each_can_be_cancelled() -> None:
    async def body(db: perco.aio.Database) -> None:
        tasks = [await waiting(db) for _ in range(3)]
        assert await db.run(bump, "a") == 1
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [asyncio.CancelledError] * 3
        assert await db.run(bump, "a") == 2

    over(body)


def test_a_timeout_of_asyncios_cancels_the_call() -> None:
    async def body(db: perco.aio.Database) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await db._port.ask(forever, (db._of, asyncio.Event()), {})
        assert await db.run(bump, "a") == 1

    over(body)


def test_a_task_that_is_cancelled_in_a_transaction_writes_nothing_and_holds_nothing() -> None:  # T10
    async def body(db: perco.aio.Database) -> None:
        reached = asyncio.Event()

        async def stuck(txn: perco.aio.Transaction) -> None:
            await bump(txn, "a")
            reached.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(db.run(stuck))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await read(db, "a") is None
        assert db.statistics().live_transactions == 0

    over(body)


def test_cancelled_just_before_its_commit_a_transaction_is_discarded_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # T10, G1
    kept: list[perco.aio.Transaction] = []

    async def body(db: perco.aio.Database) -> None:
        async def cancels_itself(txn: perco.aio.Transaction) -> None:
            kept.append(txn)
            await bump(txn, "a")
            task = asyncio.current_task()
            assert task is not None
            monkeypatch.setattr(guest, "_LINGERS", 0)
            await txn.get(n, "a")
            task.cancel()  # comes out of the next await: the commit's, whose call is in the queue by then
            monkeypatch.setattr(Guests, "_submit", lambda self, call: self.queue.append(call) or monkeypatch.undo())

        task = asyncio.create_task(db.run(cancels_itself))
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert not inside(db._of).oracle.holds.open
        assert kept[0].outcome == "aborted"
        assert await read(db, "a") is None

    over(body)


def test_cancelled_when_it_met_another_one_it_is_not_told_of_a_loop_that_was_left() -> None:
    async def body(db: perco.aio.Database) -> None:
        fired = 0

        async def meets(txn: perco.aio.Transaction) -> None:
            await bump(txn, "a")
            async with db.transaction() as other:
                await bump(other, "a")
            txn.set(title, "mine", "x")

        async def after(mutation: Mutation) -> None:
            nonlocal fired
            if len(mutation.rows) == 2:  # that of `meets`, refused
                fired += 1
                tasks[0].cancel()
                await trio.lowlevel.cancel_shielded_checkpoint()

        use(db._of, FaultyRowStore(inside(db._of).driver.store, after=after))
        tasks = [asyncio.create_task(db.run(meets))]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            await asyncio.gather(*tasks, return_exceptions=True)
            assert tasks[0].cancelled()
            tasks.clear()
            gc.collect()
        assert fired == 1
        assert not found
        assert await read(db, "a") == 1

    over(body)


class CancelAtStep(trio.abc.Instrument):
    """Cancels a task of asyncio's just before the n-th time that a call goes on."""

    def __init__(self, task: asyncio.Task[Any], number: int) -> None:
        self.task, self.number, self.steps = task, number, 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task.name == "perco-call":
            self.steps += 1
            if self.steps == self.number:
                self.task.cancel()


def test_cancelled_at_any_step_it_did_not_happen_or_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:  # T10
    """A commit in two phases over three tablets."""
    monkeypatch.setattr(guest, "_LINGERS", 0)  # steps are the call's own
    table = perco.Table("three", key=perco.TEXT, splits=["h", "p"])
    cell = table.column("n", perco.INT64)
    notes: list[str] = []

    async def commit(txn: perco.aio.Transaction) -> int:
        try:
            return await txn.commit()
        except asyncio.CancelledError as error:
            notes[:] = getattr(error, "__notes__", [])
            raise

    async def cancelled_at(db: perco.aio.Database, number: int) -> tuple[str, bool]:
        txn = await db.begin()
        for key in "a", "i", "q":
            txn.set(cell, key, number)
        task = asyncio.create_task(commit(txn))
        notes.clear()
        instrument = CancelAtStep(task, number)
        trio.lowlevel.add_instrument(instrument)
        [ended] = await asyncio.gather(task, return_exceptions=True)
        trio.lowlevel.remove_instrument(instrument)
        async with db.snapshot() as snap:
            found = set((await snap.get_many(cell, ["a", "i", "q"])).values())
        if txn.outcome == "committed":
            assert found == {number}
            assert ended == txn.commit_ts or str(txn.commit_ts) in notes[0]
        else:
            assert txn.outcome in ("open", "aborted")  # open: cancelled before it began to commit
            assert number not in found
            assert isinstance(ended, asyncio.CancelledError)
            assert not notes
        outcome = txn.outcome
        txn.discard()
        return outcome, isinstance(ended, int)

    async def pause(_: Mutation) -> None:
        await trio.lowlevel.checkpoint()

    async def body(db: perco.aio.Database) -> list[str]:
        use(db._of, FaultyRowStore(inside(db._of).driver.store, before=pause, after=pause))
        outcomes = []
        for number in range(1, 200):
            outcome, through = await cancelled_at(db, number)
            outcomes.append(outcome)
            if through:
                return outcomes
        raise AssertionError("it never ended")

    outcomes = over(body, perco.Schema(table), TWO_PHASES)
    assert outcomes == sorted(outcomes, key=["open", "aborted", "committed"].index)
    assert outcomes.count("aborted") > 2
    assert outcomes.count("committed") > 2  # some of them cancelled, and told by a note


def test_an_operation_cancelled_at_any_step_did_not_happen_or_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """T10. The cancellation comes at each step of the operation in turn."""
    monkeypatch.setattr(guest, "_LINGERS", 0)  # steps are the call's own

    async def add(db: perco.aio.Database, notes: list[str]) -> int:
        try:
            return await db.add(n, "a", 1)
        except asyncio.CancelledError as error:
            notes += getattr(error, "__notes__", [])
            raise

    async def cancelled_at(db: perco.aio.Database, number: int) -> tuple[bool, bool]:
        """Whether it was carried out, and whether it returned."""
        was = await read(db, "a") or 0
        notes: list[str] = []
        task = asyncio.create_task(add(db, notes))
        instrument = CancelAtStep(task, number)
        trio.lowlevel.add_instrument(instrument)
        [ended] = await asyncio.gather(task, return_exceptions=True)
        trio.lowlevel.remove_instrument(instrument)
        now = await read(db, "a") or 0
        if isinstance(ended, asyncio.CancelledError):
            told = [f"perco: the operation under way has been carried out, and gave {was + 1}"]
            assert notes == (told if now == was + 1 else [])
        else:
            assert ended == was + 1
        return now == was + 1, ended == was + 1

    async def pause(_: Mutation) -> None:
        await trio.lowlevel.checkpoint()

    async def body(db: perco.aio.Database) -> list[tuple[bool, bool]]:
        use(db._of, FaultyRowStore(inside(db._of).driver.store, before=pause, after=pause))
        found = []
        for number in range(1, 200):
            found.append(await cancelled_at(db, number))
            if found[-1][1]:
                return found
        raise AssertionError("it never ended")

    found = over(body)
    assert found == sorted(found)
    assert (False, False) in found
    assert (True, False) in found


def test_context_variables_are_the_callers_own() -> None:
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who")

    async def body(db: perco.aio.Database) -> None:
        async def named(txn: perco.aio.Transaction) -> str:
            await txn.get(n, "a")
            return who.get()

        async def task(name: str) -> str:
            who.set(name)
            return await db.run(named)

        assert await asyncio.gather(*[task(f"{i}") for i in range(5)]) == [f"{i}" for i in range(5)]

    over(body)


# ------------------------------------------------------------------ opening and closing


def test_two_stores_share_a_guest_run_and_end_in_any_order() -> None:
    async def main() -> None:
        first, second = perco.aio.open("memory:", SCHEMA), perco.aio.open("memory:", SCHEMA)
        a, b = await first.__aenter__(), await second.__aenter__()
        assert first._host is second._host
        await a.run(bump, "a")
        await first.__aexit__(None, None, None)
        assert await b.run(bump, "a") == 1
        third = perco.aio.open("memory:", SCHEMA)
        await asyncio.gather(second.__aexit__(None, None, None), third.__aenter__())
        await third.__aexit__(None, None, None)
        async with perco.aio.open("memory:", SCHEMA) as db:  # the guest run has ended, and begins anew
            assert await db.run(bump, "a") == 1

    asyncio.run(main())
    asyncio.run(main())  # and on another loop


def test_a_closed_store_says_so_and_ends_what_waits() -> None:
    async def main() -> None:
        async with perco.aio.open("memory:", SCHEMA) as db:
            task = await waiting(db)
            txn = await db.begin()
        with pytest.raises(perco.errors.TransactionClosed):
            await task
        uses: list[Coroutine[Any, Any, Any]] = [
            db.run(bump, "a"),
            db.wait_idle(),
            db.begin(),
            txn.get(n, "a"),
            txn.commit(),
        ]
        for one in uses:
            with pytest.raises(perco.errors.TransactionClosed):
                await one
        txn.discard()

    asyncio.run(main())


def test_an_opening_that_fails_raises_what_it_met() -> None:
    async def main() -> None:
        with pytest.raises(perco.UsageError, match="begins empty"):
            async with perco.aio.open("memory:", readonly=True):
                raise AssertionError
        block = perco.aio.open("memory:", SCHEMA)
        async with block:
            with pytest.raises(perco.UsageError, match="entered only once"):
                await block.__aenter__()

    asyncio.run(main())


def test_what_the_block_raises_comes_out_as_it_is() -> None:
    mistake = KeyError("mine")

    async def body(_: perco.aio.Database) -> None:
        raise mistake

    with pytest.raises(KeyError) as caught:
        over(body)
    assert caught.value is mistake


def test_a_background_failure_reaches_every_caller_and_the_block() -> None:
    async def die() -> None:
        raise ZeroDivisionError

    async def body(db: perco.aio.Database) -> None:
        task = await waiting(db)
        inside(db._of).background.spawn(die)
        with pytest.raises(perco.errors.BackgroundFailure):
            await task
        with pytest.raises(perco.errors.BackgroundFailure):
            await db.run(bump, "a")

    with pytest.raises(perco.errors.BackgroundFailure) as caught:
        over(body)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_store_that_is_left_open_is_closed_by_the_end_of_the_program_loop(tmp_path: Path) -> None:
    async def main() -> None:
        db = await perco.aio.open(tmp_path / "s", SCHEMA).__aenter__()
        gc.collect()
        assert await db.run(bump, "a") == 1

    for _ in range(2):
        asyncio.run(main())
        with perco.sync.open(tmp_path / "s", SCHEMA) as db, db.transaction() as txn:  # nobody owns it
            assert txn.get(n, "a") == 1
            txn.delete(n, "a")


def test_a_store_whose_loop_was_just_closed_is_closed_by_the_next_opening(tmp_path: Path) -> None:
    async def begin() -> None:
        db = await perco.aio.open(tmp_path / "s", SCHEMA).__aenter__()
        assert await db.run(bump, "a") == 1

    async def go_on() -> None:
        async with perco.aio.open(tmp_path / "s", SCHEMA) as db:
            assert await db.run(bump, "a") == 2

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    with pytest.warns(ResourceWarning, match="loop was closed with a perco store open"):
        asyncio.run(go_on())


def test_who_is_not_a_task_of_the_loop_is_told() -> None:
    async def body(db: perco.aio.Database) -> None:
        loop = asyncio.get_running_loop()
        async with db.transaction() as txn:

            def elsewhere() -> None:
                with pytest.raises(perco.UsageError, match="from other threads"):
                    asyncio.run(_awaited(db.run(bump, "a")))
                with pytest.raises(perco.UsageError, match="from other threads"):
                    txn.set(n, "a", 1)
                with pytest.raises(perco.UsageError, match=r"runs on asyncio.*perco\.open"):
                    trio.run(lambda: db.pins())
                assert asyncio.run_coroutine_threadsafe(db.run(bump, "b"), loop).result(60) == 1

            await asyncio.to_thread(elsewhere)

        async def of_trio(_: Any) -> None:
            with pytest.raises(perco.UsageError, match=r"this task runs on the store's own trio loop"):
                await db.pins()

        await db._port.ask(of_trio, (db._of,), {})
        with pytest.raises(perco.UsageError, match=r"perco\.aio\.open"):
            async with perco.open("memory:", SCHEMA):
                raise AssertionError

    over(body)


async def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await coroutine


def test_on_trio_it_says_what_to_open_instead() -> None:
    async def main() -> None:
        with pytest.raises(perco.UsageError, match=r"on trio use perco\.open"):
            async with perco.aio.open("memory:", SCHEMA):
                raise AssertionError

    trio.run(main)


# ------------------------------------------------------------------ observers


def test_observers_of_trio_of_asyncio_and_of_threads_work_side_by_side() -> None:
    schema = perco.Schema(docs)
    gate: list[asyncio.Future[str]] = []
    threads: list[int] = []

    @schema.observe(n, id="asyncio")
    @perco.aio.observer
    async def on_asyncio(txn: perco.aio.Transaction, change: perco.Change[str, int]) -> None:
        gate.append(asyncio.get_running_loop().create_future())
        asyncio.get_running_loop().call_soon(gate[-1].set_result, "asyncio")
        txn.set(title, change.key, await gate[-1] + str(await txn.get(n, change.key)))

    @schema.observe(n, id="trio")
    async def on_trio(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        await trio.lowlevel.checkpoint()
        txn.set(title, f"{change.key}-trio", "trio")

    @schema.observe(n, id="thread")
    @perco.sync.observer
    def in_thread(txn: perco.sync.Transaction, change: perco.Change[str, int]) -> None:
        threads.append(threading.get_ident())
        txn.set(title, f"{change.key}-thread", str(txn.get(n, change.key)))

    async def body(db: perco.aio.Database) -> None:
        async with db.worker(concurrency=8) as worker:
            await db.run(bump, "a")
            assert await db.wait_idle(timeout=60) == 0
            assert await db.is_idle()
            assert {id: one.commits for id, one in worker.statistics().items()} == dict.fromkeys(
                ("asyncio", "trio", "thread"), 1
            )
            async with db.snapshot() as snap:
                found = await snap.get_many(title, ["a", "a-trio", "a-thread"])
            assert found == {"a": "asyncio1", "a-trio": "trio", "a-thread": "1"}

    over(body, schema)
    assert threads
    assert threading.get_ident() not in threads


def test_an_observer_of_asyncio_that_fails_is_given_up_and_one_that_waits_ends_with_the_worker() -> None:
    schema = perco.Schema(docs)
    began, ended = asyncio.Event(), []

    @schema.observe(n, id="observer")
    @perco.aio.observer
    async def observer(txn: perco.aio.Transaction, change: perco.Change[str, int]) -> None:
        if change.key == "fails":
            raise ZeroDivisionError("by nothing")
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            ended.append(change.key)

    async def body(db: perco.aio.Database) -> None:
        async with db.worker(options=perco.WorkerOptions(attempts=1)):
            await db.run(bump, "fails")
            assert await db.wait_idle(timeout=60) == 1
            [failed] = await db.failed()
            assert failed.error == "ZeroDivisionError: by nothing"
            assert "raise ZeroDivisionError" in failed.traceback
            await db.run(bump, "waits")
            await began.wait()
        assert ended == ["waits"]
        assert await db.waiting() == {"observer": 1}

    over(body, schema)


def test_a_plain_function_under_the_decorator_for_async_ones_is_told_at_once() -> None:
    with pytest.raises(perco.UsageError, match=r"is a plain one: decorate it with @perco\.sync\.observer"):

        @perco.aio.observer
        def fetch(txn: perco.aio.Transaction, change: perco.Change[str, int]) -> None:
            raise AssertionError


async def test_an_observer_of_asyncio_is_refused_by_other_workers_before_it_runs() -> None:
    schema = perco.Schema(docs)

    @schema.observe(n, id="fetch")
    @perco.aio.observer
    async def observer(txn: perco.aio.Transaction, change: perco.Change[str, int]) -> None:
        raise AssertionError

    async with perco.open("memory:", schema) as db:
        async with db.transaction() as txn:
            txn.set(n, "a", 1)
        with pytest.raises(perco.UsageError, match=r"'fetch' cannot run here: .* not opened with perco\.aio\.open"):
            async with db.worker(options=perco.WorkerOptions(attempts=1)):
                raise AssertionError
        assert (await db.waiting(), await db.failed_count()) == ({"fetch": 1}, 0)
        with pytest.raises(perco.UsageError, match="no worker runs them"):  # it has left no worker
            await db.wait_idle()


def test_an_observer_that_awaits_asyncio_without_saying_so_uses_up_no_attempt() -> None:
    schema = perco.Schema(docs)

    @schema.observe(n, id="fetch")
    async def observer(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        await asyncio.get_running_loop().create_future()  # there is a loop, but trio runs this

    async def body(db: perco.aio.Database) -> None:
        async with db.worker(options=perco.WorkerOptions(attempts=1)):
            await db.run(bump, "a")
            told = r"'fetch' awaits asyncio, .* Decorate it with @perco\.aio\.observer\. Its changes wait"
            with pytest.raises(perco.UsageError, match=told):
                await db.wait_idle(timeout=60)
            assert (await db.waiting(), await db.failed_count()) == ({"fetch": 1}, 0)

    over(body, schema)


def test_what_nobody_awaits_is_told_by_the_name_that_users_know() -> None:
    async def body(db: perco.aio.Database) -> None:
        async with db.transaction() as txn, db.snapshot() as snap:
            calls = {
                "Database.run": [db.run(bump, "a"), db._of.run(bump, "a"), db._of.options(timeout=9).run(bump, "a")],
                "Database.wait_idle": [db.wait_idle(), db._of.wait_idle()],
                "Database.vacuum": [db.vacuum(), db._of.vacuum()],
                "Database.pause": [db.pause("x"), db._of.pause("x")],
                "Database.failed": [db.failed(), db._of.failed()],
                "Database.begin": [db.begin(), db._of.begin()],
                "Snapshot.get": [snap.get(n, "a"), snap._of.get(n, "a")],
                "Transaction.commit": [txn.commit(), txn._of.commit()],
            }
            for name, made in calls.items():
                for one in made:
                    assert one.__qualname__ == name  # type: ignore[attr-defined]
                    one.close()

    over(body)


def test_it_works_under_uvloop_too(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with perco.aio.open(tmp_path / "s", SCHEMA, options=perco.Options(durability="process")) as db:
            await asyncio.gather(*[db.run(bump, "a") for _ in range(20)])
            assert await read(db, "a") == 20
            task = await waiting(db)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    uvloop.run(main())
