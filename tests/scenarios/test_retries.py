"""Running it again: what is retried, how often, for how long; and what the caller is told."""

from __future__ import annotations

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from tests.support.faults import Fault, Gate, faulty, gated, on

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)


async def overtake(db: perco.Database, value: int) -> None:
    """Another transaction writes what somebody has read and is about to write."""
    async with db.transaction() as txn:
        txn.set(n, "k", value)


async def test_a_retry_runs_the_function_again_with_a_new_start(autojump_clock: trio.testing.MockClock) -> None:  # T11
    async with perco.open("memory:", SCHEMA) as db:
        starts, read = [], []

        async def add_one(txn: perco.Transaction, by: int, *, times: int) -> str:
            starts.append(txn.start_ts)
            value = await txn.get(n, "k") or 0
            read.append(value)
            if len(starts) <= times:
                await overtake(db, 100 * len(starts))
                txn.set(n, f"only in attempt {len(starts)}", 1)
            txn.set(n, "k", value + by)
            return f"attempt {len(starts)}"

        assert await db.run(add_one, 1, times=3) == "attempt 4"
        assert starts == sorted(set(starts))
        assert len(starts) == 4
        assert read == [0, 100, 200, 300]
        async with db.snapshot() as snap:
            assert {row.key: row[n] async for row in snap.scan(docs)} == {"k": 301}  # nothing of a failed attempt


async def test_attempts_without_a_function(autojump_clock: trio.testing.MockClock) -> None:  # T11
    async with perco.open("memory:", SCHEMA) as db:
        tried = 0
        async for attempt in db.attempts():
            async with attempt as txn:
                tried += 1
                value = await txn.get(n, "k") or 0
                if tried < 3:
                    await overtake(db, tried)
                txn.set(n, "k", value + 10)
        assert tried == 3
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") == 12


@pytest.mark.parametrize("attempts", [1, 2, 5])
async def test_after_the_last_attempt_the_conflict_comes_out(
    autojump_clock: trio.testing.MockClock, attempts: int
) -> None:  # T11
    async with perco.open("memory:", SCHEMA) as db:
        tried = 0

        async def body(txn: perco.Transaction) -> None:
            nonlocal tried
            tried += 1
            txn.set(n, "k", -1)
            await overtake(db, tried)

        with pytest.raises(perco.WriteConflict) as caught:
            await db.options(attempts=attempts).run(body)
        assert tried == attempts
        assert caught.value.cells == (("docs", "k", "n"),)
        gave_up = f"Gave up after {attempts} attempt{'s' if attempts > 1 else ''};"
        assert gave_up in str(caught.value)
        assert "Run it again" not in str(caught.value), "db.run has done so"
        tried = 0
        with pytest.raises(perco.WriteConflict, match=gave_up):  # noqa: PT012
            async for attempt in db.options(attempts=attempts).attempts():
                async with attempt as txn:
                    await body(txn)
        assert tried == attempts
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") == attempts


async def test_at_least_one_attempt_is_needed() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        with pytest.raises(perco.UsageError, match="at least 1"):
            db.options(attempts=0)


async def test_a_timeout_ends_a_body_that_hangs_and_nothing_happened(autojump_clock: trio.testing.MockClock) -> None:
    """T10: the deadline passes before the commit is sent."""
    async with perco.open("memory:", SCHEMA) as db:

        async def hang(txn: perco.Transaction) -> None:
            txn.set(n, "k", 1)
            await trio.sleep_forever()

        began = trio.current_time()
        with pytest.raises(perco.Unavailable, match=r"within 2\.5 s"):
            await db.options(timeout=2.5).run(hang)
        assert trio.current_time() - began == pytest.approx(2.5)
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") is None


async def test_a_timeout_ends_the_attempts(autojump_clock: trio.testing.MockClock) -> None:  # T10 T11
    async with perco.open("memory:", SCHEMA) as db:
        tried = 0

        async def body(txn: perco.Transaction) -> None:
            nonlocal tried
            tried += 1
            txn.set(n, "k", -1)
            await overtake(db, tried)
            await trio.sleep(1)

        with pytest.raises(perco.Unavailable, match=r"in \d+ attempts .* WriteConflict") as caught:
            await db.options(timeout=10, attempts=10_000).run(body)
        assert 5 <= tried <= 10
        assert isinstance(caught.value.__cause__, perco.WriteConflict)
        tried = 0
        with pytest.raises(perco.Unavailable, match=r"in \d+ attempts .* WriteConflict") as caught:  # noqa: PT012
            async for attempt in db.options(timeout=10, attempts=10_000).attempts():
                async with attempt as txn:
                    await body(txn)
        assert 5 <= tried <= 11
        assert isinstance(caught.value.__cause__, perco.WriteConflict)


async def test_a_timeout_ends_a_block_that_hangs(autojump_clock: trio.testing.MockClock) -> None:  # T10
    async with perco.open("memory:", SCHEMA) as db:
        began = trio.current_time()
        with pytest.raises(perco.Unavailable, match=r"within 2\.5 s.* Nothing was written"):  # noqa: PT012
            async for attempt in db.options(timeout=2.5).attempts():
                async with attempt as txn:
                    txn.set(n, "k", 1)
                    await trio.sleep_forever()
        assert trio.current_time() - began == pytest.approx(2.5)
        assert db.statistics().live_transactions == 0
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") is None


async def test_past_the_timeout_what_nobody_knows_is_not_told_as_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:  # T4
    async with perco.open("memory:", SCHEMA) as db:

        async def swallowed(txn: perco.Transaction) -> None:
            txn.set(n, "k", 1)
            txn._open, txn.outcome = False, "unknown"  # as after a CommitUnknown that the function catches
            await trio.sleep_forever()

        with pytest.raises(perco.CommitUnknown):
            await db.options(timeout=2.5).run(swallowed)


async def test_one_try_is_told_to_run_again() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        with pytest.raises(perco.WriteConflict, match=r"this transaction wrote nothing\. Run it again"):  # noqa: PT012
            async with db.transaction() as txn:
                txn.set(n, "k", -1)
                await overtake(db, 1)


async def test_a_timeout_while_the_commit_is_on_its_way_reports_the_commit(
    autojump_clock: trio.testing.MockClock,
) -> None:  # T10
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "commit", made=True)

        async def later() -> None:
            await trio.sleep(10)
            gate.open()

        async def body(txn: perco.Transaction) -> str:
            txn.set(n, "k", 1)
            return "done"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            assert await db.options(timeout=2).run(body) == "done"
        assert trio.current_time() >= 10
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") == 1


async def test_a_deadline_outside_is_the_callers_own(autojump_clock: trio.testing.MockClock) -> None:  # T10
    async with perco.open("memory:", SCHEMA) as db:

        async def hang(txn: perco.Transaction) -> None:
            await trio.sleep_forever()

        with pytest.raises(trio.TooSlowError), trio.fail_after(1):
            await db.options(timeout=50).run(hang)


async def test_what_the_function_raises_comes_out_and_discards_its_writes() -> None:  # T11
    async with perco.open("memory:", SCHEMA) as db:
        tried = 0

        async def fail(txn: perco.Transaction) -> None:
            nonlocal tried
            tried += 1
            txn.set(n, "k", 1)
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await db.run(fail)
        assert tried == 1
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") is None


async def test_an_unknown_outcome_is_never_run_again(autojump_clock: trio.testing.MockClock) -> None:  # T4 T11
    options = perco.Options(commit=perco.options.CommitOptions(commit_timeout_s=3, one_step=False))
    async with perco.open("memory:", SCHEMA, options=options) as db:
        store = faulty(db, on("commit", Fault.LOSE_REQUEST, times=1 << 30))
        tried = 0

        async def body(txn: perco.Transaction) -> None:
            nonlocal tried
            tried += 1
            txn.set(n, "k", tried)

        with pytest.raises(perco.CommitUnknown):
            await db.run(body)
        assert tried == 1
        store.plan = on("commit", Fault.LOSE_REQUEST, times=1 << 30)
        with pytest.raises(perco.CommitUnknown):  # noqa: PT012
            async for attempt in db.attempts():
                async with attempt as txn:
                    await body(txn)
        assert tried == 2


async def test_a_full_store_is_not_retried() -> None:  # S4
    async with perco.open("memory:", SCHEMA) as db:
        store = faulty(db, on(["prewrite", "one step"], Fault.FAIL))
        with pytest.raises(perco.errors.StoreFull):
            await db.run(put_one)
        assert store.fired[Fault.FAIL] == 1
        await db.run(put_one)


async def put_one(txn: perco.Transaction) -> None:
    txn.set(n, "k", 1)


async def test_a_timeout_after_the_commit_does_not_say_that_nothing_was_written(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def commit_and_linger(txn: perco.Transaction) -> None:
        txn.set(n, "k", 1)
        await txn.commit()
        await trio.sleep(10)

    async def linger(txn: perco.Transaction) -> None:
        await trio.sleep(10)

    async with perco.open("memory:", SCHEMA) as db:
        with pytest.raises(perco.Unavailable, match="do not run it again") as caught:
            await db.options(timeout=1).run(commit_and_linger)
        assert caught.value.commit_ts > 0
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") == 1
        with pytest.raises(perco.Unavailable, match="Nothing was written") as caught:
            await db.options(timeout=1).run(linger)
        assert caught.value.commit_ts == 0


async def test_an_attempt_that_is_not_used_is_told() -> None:
    """Else the loop would go on for ever, without ever giving way."""
    async with perco.open("memory:", SCHEMA) as db:
        with pytest.raises(perco.UsageError, match="async with attempt as txn"):
            async for _ in db.attempts():
                pass
        attempt = await anext(db.attempts())
        with pytest.raises(AttributeError, match="async with attempt as txn"):
            attempt.set(n, "k", 1)


@pytest.mark.parametrize("how", ["break in the block", "break after it", "return"])
async def test_who_leaves_the_attempts_although_theirs_met_another_is_warned(how: str) -> None:
    """Python does not tell the block how it was left, so nothing can be raised."""
    async with perco.open("memory:", SCHEMA) as db:

        async def leave(*, early: bool) -> None:
            async for attempt in db.attempts():
                async with attempt as txn:
                    txn.set(n, "k", 1)
                    if early:
                        await overtake(db, 7)
                    if how == "return":
                        return
                    if how == "break in the block":
                        break
                break

        await leave(early=False)  # committed: no warning, which would be an error here
        with pytest.warns(perco.errors.PercoWarning, match="nothing was written"):
            await leave(early=True)
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") == 7


async def test_who_leaves_the_attempts_with_an_error_is_not_warned(autojump_clock: trio.testing.MockClock) -> None:
    async with perco.open("memory:", SCHEMA) as db:
        with pytest.raises(KeyError):  # noqa: PT012
            async for attempt in db.attempts():
                async with attempt as txn:
                    txn.set(n, "k", 1)
                    raise KeyError
        with trio.move_on_after(1) as scope:  # cancelled between two attempts
            async for attempt in db.options(attempts=10_000).attempts():
                async with attempt as txn:
                    txn.set(n, "k", 1)
                    await overtake(db, 7)
        assert scope.cancelled_caught


async def test_a_function_that_commits_by_itself_can_tell_when(autojump_clock: trio.testing.MockClock) -> None:  # T11
    async with perco.open("memory:", SCHEMA) as db:
        tried = 0

        async def body(txn: perco.Transaction) -> int:
            nonlocal tried
            tried += 1
            txn.set(n, "k", tried)
            if tried < 3:
                await overtake(db, -tried)
            return await txn.commit()

        ts = await db.run(body)
        assert tried == 3
        async with db.snapshot(ts=ts) as snap:
            assert await snap.get(n, "k") == 3
        async with db.snapshot(ts=ts - 1) as snap:
            assert await snap.get(n, "k") == -2


async def test_a_transaction_committed_by_hand_is_not_run_again() -> None:  # T11
    """The function commits, and what it does afterwards conflicts: it must not happen twice."""
    async with perco.open("memory:", SCHEMA) as db:
        commits = 0

        async def body(txn: perco.Transaction) -> None:
            nonlocal commits
            txn.set(n, f"k{commits}", 1)
            await txn.commit()
            commits += 1
            inner = await db.begin()
            await overtake(db, commits)
            inner.set(n, "k", 1)
            await inner.commit()

        with pytest.raises(perco.WriteConflict):
            await db.options(attempts=3).run(body)
        assert commits == 1
        with pytest.raises(perco.WriteConflict):  # noqa: PT012
            async for attempt in db.options(attempts=3).attempts():
                async with attempt as txn:
                    await body(txn)
        assert commits == 2


async def test_a_transaction_rolled_back_by_another_is_run_again() -> None:  # T5 T11
    """RolledBack is transient: a marker stands at its start_ts."""
    async with perco.open("memory:", SCHEMA) as db:
        gate: Gate = await gated(db, "prewrite")
        tried: list[perco.Transaction] = []

        async def body(txn: perco.Transaction) -> None:
            tried.append(txn)
            txn.set(n, "k", len(tried))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(db.run, body)
            await gate.reached()
            [txn] = tried
            inside(db).fates._live.pop(txn.start_ts)  # somebody takes it for dead
            assert await db.outcome(txn.token) == 0
            gate.open()
        assert len(tried) == 2
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") == 2


async def test_the_wait_between_attempts_grows_and_is_bounded() -> None:
    import random

    retry = perco.options.RetryOptions(backoff_s=0.01, backoff_max_s=0.5)
    rng = random.Random(1)
    delays = [[retry.delay_s(failed, rng) for _ in range(200)] for failed in range(1, 12)]
    assert all(0 <= delay <= 0.5 for some in delays for delay in some)
    assert max(delays[0]) <= 0.02
    assert max(delays[-1]) > 0.4
    assert retry.delay_s(10_000, rng) <= 0.5
