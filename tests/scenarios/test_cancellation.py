"""Cancelled means that it did not happen: at every await of a commit (T10)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.storage import LOCK, Mutation
from tests.support.faults import TWO_PHASES, Fault, FaultyRowStore, faulty, gated, on, use
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)
KEYS = ["a", "i", "q"]

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope just before the n-th time that this task goes on."""

    def __init__(self, scope: trio.CancelScope, number: int) -> None:
        self.task, self.scope, self.number, self.steps = trio.lowlevel.current_task(), scope, number, 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.steps += 1
            if self.steps == self.number:
                self.scope.cancel()


async def settled(db: perco.Database) -> int:
    """Wait for what runs in the background; how many locks stand."""
    while inside(db).background.crowd:
        await inside(db).background.change()
    return sum(tablet.entries(LOCK) for tablet in local_of(db).store.tablets())


async def values(db: perco.Database) -> set[int | None]:
    async with db.snapshot() as snap:
        return set((await snap.get_many(n, KEYS)).values())


async def cancelled_at(db: perco.Database, number: int, keys: list[str], value: int) -> tuple[perco.Transaction, bool]:
    """Commit, cancelled before its n-th step. Whether it came so far."""
    txn = await db.begin()
    for key in keys:
        txn.set(n, key, value)
    with trio.CancelScope() as scope:
        instrument = CancelAtStep(scope, number)
        trio.lowlevel.add_instrument(instrument)
        try:
            commit_ts = await txn.commit()
        finally:
            trio.lowlevel.remove_instrument(instrument)
        assert commit_ts == txn.commit_ts > txn.start_ts
    assert txn.outcome == ("aborted" if scope.cancelled_caught else "committed")
    return txn, instrument.steps >= number


async def sweep(db: perco.Database, keys: list[str]) -> list[str]:
    """Cancel a commit before its first step, its second, and so on; returns the outcomes."""
    outcomes = []
    for number in range(1, 200):
        before = await values(db)
        txn, came = await cancelled_at(db, number, keys, number)
        assert await settled(db) == 0
        if txn.outcome == "committed":
            assert (await values(db)) - before == {number}
            assert await db.outcome(txn.token) == txn.commit_ts
        else:
            assert await values(db) == before
            assert await db.outcome(txn.token) == 0
        outcomes.append(txn.outcome)
        if not came:
            return outcomes
    raise AssertionError("it never ended")


@pytest.mark.parametrize("one_step", [False, True], ids=["two phases", "one step"])
@pytest.mark.parametrize("keys", [KEYS, KEYS[:1]], ids=["three tablets", "one cell"])
async def test_cancelled_at_any_step_it_did_not_happen_or_is_reported(keys: list[str], one_step: bool) -> None:  # T10
    """Memory engine, with a place to stop before and after each mutation is made."""
    async with perco.open("memory:", SCHEMA, options=None if one_step else TWO_PHASES) as db:
        prewrites = len(keys) - one_step

        async def pause(_: Mutation) -> None:
            await trio.lowlevel.checkpoint()

        use(db, FaultyRowStore(inside(db).driver.store, before=pause, after=pause))
        outcomes = await sweep(db, keys)
        committed = outcomes.index("committed")
        assert outcomes == ["aborted"] * committed + ["committed"] * (len(outcomes) - committed)
        assert committed > 2 * prewrites, "every prewrite is a chance to be cancelled"
        assert len(outcomes) - committed > 1
        assert len(outcomes) > 2 * prewrites + 1


@pytest.mark.parametrize("keys", [KEYS, KEYS[:1]], ids=["three tablets", "one cell"])
async def test_cancelled_at_any_step_over_lmdb(tmp_path: Path, keys: list[str]) -> None:  # T10
    """A queued mutation is taken back; one in a closed batch is waited for."""
    async with perco.open(tmp_path / "store", SCHEMA, options=perco.Options(durability="process")) as db:
        outcomes = await sweep(db, keys)
        assert "committed" in outcomes


async def test_cancelled_before_it_begins_nothing_is_sent() -> None:  # T10
    async with perco.open("memory:", SCHEMA, options=TWO_PHASES) as db:
        store = faulty(db)
        txn = await begin(db, 1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await txn.commit()
        assert scope.cancelled_caught
        assert txn.outcome == "aborted"
        await trio.testing.wait_all_tasks_blocked()
        assert [kind for kind in store.log if kind == "prewrite"] == []
        assert await values(db) == {None}


async def in_scope(scope: trio.CancelScope, function: Callable[[], Awaitable[object]]) -> None:
    with scope:
        await function()


async def begin(db: perco.Database, value: int) -> perco.Transaction:
    txn = await db.begin()
    for key in KEYS:
        txn.set(n, key, value)
    return txn


async def test_cancelled_while_the_commit_is_on_its_way_it_is_reported() -> None:  # T10
    async with perco.open("memory:", SCHEMA, options=TWO_PHASES) as db:
        gate = await gated(db, "commit", made=True)
        txn, scope = await begin(db, 1), trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_scope, scope, txn.commit)
            await gate.reached()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert txn.outcome == "unknown"  # it has not come back
            gate.open()
        assert txn.outcome == "committed"
        assert not scope.cancelled_caught
        assert await values(db) == {1}


async def test_cancelled_just_before_the_commit_is_sent_its_locks_go() -> None:  # T10
    async with perco.open("memory:", SCHEMA, options=TWO_PHASES) as db:
        gate = await gated(db, "commit")
        txn, scope = await begin(db, 1), trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_scope, scope, txn.commit)
            await gate.reached()
            assert sum(tablet.entries(LOCK) for tablet in local_of(db).store.tablets()) == 3
            scope.cancel()
        assert scope.cancelled_caught
        assert txn.outcome == "aborted"
        assert await settled(db) == 0
        assert await db.outcome(txn.token) == 0
        assert await values(db) == {None}


async def test_others_wait_until_a_cancelled_ones_locks_are_gone() -> None:  # T9 T10
    async with perco.open("memory:", SCHEMA, options=TWO_PHASES) as db:
        gate = await gated(db, "commit")
        txn, scope = await begin(db, 1), trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_scope, scope, txn.commit)
            await gate.reached()
            back = await gated_release(db)
            scope.cancel()
            await back.reached()
            async with trio.open_nursery() as inner:
                found: list[set[int | None]] = []

                async def read() -> None:
                    found.append(await values(db))

                inner.start_soon(read)
                await trio.testing.wait_all_tasks_blocked()
                assert not found
                back.open()
            assert found == [{None}]


async def gated_release(db: perco.Database):  # type: ignore[no-untyped-def]
    return await gated(db, "rollback")


async def test_cancelled_while_it_asks_it_still_learns_its_outcome() -> None:  # T4 T10
    """The reply to the commit was lost, and the scope is cancelled: it asks all the same."""
    async with perco.open("memory:", SCHEMA, options=TWO_PHASES) as db:
        store = faulty(db, on("commit", Fault.LOSE_REPLY))
        txn, scope = await begin(db, 1), trio.CancelScope()

        async def cancel(mutation: Mutation) -> None:
            if len(store.log) == 4:
                scope.cancel()

        store.after = cancel
        await in_scope(scope, txn.commit)
        assert store.fired[Fault.LOSE_REPLY] == 1
        assert scope.cancel_called
        assert txn.outcome == "committed"
        assert await values(db) == {1}


@pytest.mark.parametrize("one_step", [False, True])
async def test_cancelled_while_the_store_is_silent_the_outcome_is_unknown(
    autojump_clock: trio.testing.MockClock, one_step: bool
) -> None:  # T10 C6
    """Not Cancelled, which would mean that it did not happen: CommitUnknown, after commit_timeout."""
    options = perco.Options(commit=perco.options.CommitOptions(commit_timeout_s=5, one_step=one_step))
    async with perco.open("memory:", SCHEMA, options=options) as db:
        store = faulty(db, on("one step" if one_step else "commit", Fault.LOSE_REPLY))
        txn = await begin(db, 1)

        async def deaf(mutation: Mutation) -> None:
            store.deaf = len(store.log) == 4 - one_step

        store.after = deaf
        with trio.move_on_after(1), pytest.raises(perco.CommitUnknown) as caught:
            await txn.commit()
        assert txn.outcome == "unknown"
        store.deaf = False
        assert await db.outcome(caught.value.token) > txn.start_ts
        assert await values(db) == {1}


async def test_cancelled_while_it_waits_for_another_it_lets_go() -> None:  # T7 T10
    async with perco.open("memory:", SCHEMA, options=TWO_PHASES) as db:
        gate = await gated(db, "commit")
        first, second, scope = await db.begin(), await begin(db, 2), trio.CancelScope()
        first.set(n, "q", 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.commit)
            await gate.reached()
            nursery.start_soon(in_scope, scope, second.commit)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert second.outcome == "aborted"
            assert sum(tablet.entries(LOCK) for tablet in local_of(db).store.tablets()) == 1
            gate.open()
        assert await values(db) == {None, 1}


async def test_a_body_that_is_cancelled_commits_nothing() -> None:  # T10
    async with perco.open("memory:", SCHEMA, options=TWO_PHASES) as db:
        with trio.CancelScope() as scope:
            async with db.transaction() as txn:
                txn.set(n, "a", 1)
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert txn.outcome == "aborted"
        with trio.CancelScope() as scope:
            async for attempt in db.attempts():
                async with attempt as txn:
                    txn.set(n, "a", 1)
                    scope.cancel()
        assert scope.cancelled_caught
        assert txn.outcome == "aborted"
        assert await values(db) == {None}


async def test_a_deadline_around_a_commit_is_a_cancellation(autojump_clock: trio.testing.MockClock) -> None:  # T10
    async with perco.open("memory:", SCHEMA, options=TWO_PHASES) as db:

        async def slow(mutation: Mutation) -> None:
            await trio.sleep(1)

        use(db, FaultyRowStore(inside(db).driver.store, before=slow))
        txn = await begin(db, 1)
        with pytest.raises(trio.TooSlowError), trio.fail_after(2.5):
            await txn.commit()
        assert txn.outcome == "aborted"
        await trio.sleep(60)
        assert await values(db) == {None}
        txn = await begin(db, 2)
        with trio.fail_after(4.5):
            await txn.commit()
        assert await values(db) == {2}


async def test_closing_the_store_finishes_phase_two() -> None:  # T3 T10
    """Short tasks are finished, although the block that closes the store was cancelled."""
    with trio.CancelScope() as scope:
        async with perco.open("memory:", SCHEMA, options=TWO_PHASES) as db:
            await (await begin(db, 1)).commit()
            scope.cancel()
    assert sum(tablet.entries(LOCK) for tablet in local_of(db).store.tablets()) == 0
