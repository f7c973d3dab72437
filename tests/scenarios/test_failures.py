"""The blocks raise the body's error, as it is; or they tell that a task of the store's own died."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from tests.support.faults import faulty, gated

docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
n = docs.column("n", perco.INT64)
seen = docs.column("seen", perco.INT64)


def schema() -> perco.Schema:
    made = perco.Schema(docs)

    @made.observe(n, id="count")
    async def count(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        txn.set(seen, change.key, 1)

    return made


class MineError(Exception):
    pass


# ------------------------------------------------------------ nothing comes wrapped


@asynccontextmanager
async def in_open() -> AsyncIterator[None]:
    async with perco.open("memory:", schema()):
        yield


@asynccontextmanager
async def in_transaction() -> AsyncIterator[None]:
    async with perco.open("memory:", schema()) as db, db.transaction() as txn:
        txn.set(n, "k", 1)
        yield


@asynccontextmanager
async def in_snapshot() -> AsyncIterator[None]:
    async with perco.open("memory:", schema()) as db, db.snapshot() as snap:
        assert await snap.get(n, "k") is None
        yield


@asynccontextmanager
async def in_attempts() -> AsyncIterator[None]:
    async with perco.open("memory:", schema()) as db:
        async for attempt in db.attempts():
            async with attempt as txn:
                txn.set(n, "k", 1)
                yield


@asynccontextmanager
async def in_worker() -> AsyncIterator[None]:
    async with perco.open("memory:", schema()) as db, db.worker():
        async with db.transaction() as txn:
            txn.set(n, "k", 1)
        await db.wait_idle()
        yield


BLOCKS = [in_open, in_transaction, in_snapshot, in_attempts, in_worker]
Block = Callable[[], AbstractAsyncContextManager[None]]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("error", [MineError("mine"), KeyboardInterrupt(), perco.Unavailable("mine"), OSError(5, "io")])
async def test_what_the_body_raises_comes_out_as_it_is(block: Block, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        async with block():
            raise error
    assert caught.value is error


@pytest.mark.parametrize("block", BLOCKS)
async def test_a_group_that_the_body_raises_comes_out_as_that_group(block: Block) -> None:
    group = ExceptionGroup("two", [MineError("one"), OSError("two")])
    with pytest.raises(ExceptionGroup) as caught:
        async with block():
            raise group
    assert caught.value.exceptions == group.exceptions


@pytest.mark.parametrize("block", BLOCKS)
async def test_a_cancellation_goes_through(block: Block) -> None:
    with trio.CancelScope() as scope:
        async with block():
            scope.cancel()
            await trio.lowlevel.checkpoint()
        raise AssertionError("unreachable")
    assert scope.cancelled_caught


async def test_an_error_in_the_body_and_a_conflict_do_not_mix() -> None:
    async with perco.open("memory:", schema()) as db:
        with pytest.raises(MineError):  # noqa: PT012
            async with db.transaction() as txn:
                txn.set(n, "k", 1)
                raise MineError
        assert txn.outcome == "aborted"
        with pytest.raises(perco.WriteConflict) as caught:  # noqa: PT012
            async with db.transaction() as txn:
                txn.set(n, "k", 1)
                await db.run(put)
        assert caught.value.__context__ is None or not isinstance(caught.value.__context__, MineError)


async def put(txn: perco.Transaction) -> None:
    for key in ("a", "i", "k", "q"):
        txn.set(n, key, 2)


# ------------------------------------------------------------ a task of the store's own dies


async def test_a_failure_in_the_background_cancels_the_body() -> None:
    cleaned = False
    with pytest.raises(perco.errors.BackgroundFailure, match="MineError") as caught:  # noqa: PT012
        async with perco.open("memory:", schema()) as db:
            store = faulty(db)
            await db.run(put)  # phase two is still to come
            store.dead = MineError("the store is broken")
            try:
                await trio.sleep_forever()
            finally:
                cleaned = True
    assert cleaned
    assert isinstance(caught.value.__cause__, MineError)


async def test_a_failed_store_refuses_what_comes_after() -> None:
    with pytest.raises(perco.errors.BackgroundFailure):  # noqa: PT012
        async with perco.open("memory:", schema()) as db:
            store = faulty(db)
            await db.run(put)
            store.dead = MineError("the store is broken")
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
                for use in (db.begin, db.snapshot_at, lambda: db.run(put)):
                    with pytest.raises(perco.errors.BackgroundFailure):
                        await use()
            await trio.sleep_forever()


async def test_what_the_body_raises_itself_goes_before_a_failure() -> None:
    with pytest.raises(MineError, match="mine"):  # noqa: PT012
        async with perco.open("memory:", schema()) as db:
            store = faulty(db)
            await db.run(put)
            store.dead = OSError("the store is broken")
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            raise MineError("mine")


async def test_a_failure_is_told_though_the_body_had_ended() -> None:
    """It is noticed at the end of the block at the latest."""
    with pytest.raises(perco.errors.BackgroundFailure):  # noqa: PT012
        async with perco.open("memory:", schema()) as db:
            store = faulty(db)
            await db.run(put)
            store.dead = MineError("the store is broken")
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()


async def test_a_failure_while_closing_is_told() -> None:
    with pytest.raises(perco.errors.BackgroundFailure):  # noqa: PT012
        async with perco.open("memory:", schema()) as db:
            store = faulty(db)
            await db.run(put)
            store.dead = MineError("the store is broken")


async def test_a_failure_outside_does_not_touch_other_stores() -> None:
    async with perco.open("memory:", schema()) as good:
        with pytest.raises(perco.errors.BackgroundFailure):  # noqa: PT012
            async with perco.open("memory:", schema()) as bad:
                store = faulty(bad)
                await bad.run(put)
                store.dead = MineError("the store is broken")
                await trio.sleep_forever()
        await good.run(put)
        async with good.snapshot() as snap:
            assert await snap.get(n, "k") == 2


async def test_what_was_committed_before_a_failure_is_safe(tmp_path: Path) -> None:  # T1 S2
    from tests.support.machines import CrashedError, Machine

    machine = Machine(perco.Schema(docs))
    async with machine.crashing(3, made=True) as (db, _):
        await db.run(put)
        await trio.testing.wait_all_tasks_blocked()
        failure = inside(db).background.failure()
        assert failure is not None
        assert isinstance(failure.__cause__, CrashedError)
    async with machine.opened() as db, db.snapshot() as snap:
        assert await snap.get_many(n, ["a", "i", "k", "q"]) == dict.fromkeys("aikq", 2)


# ------------------------------------------------------------ left open


@pytest.mark.parametrize("where", ["memory:", "folder"])
@pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")
async def test_what_was_left_open_is_closed_with_its_store(tmp_path: Path, where: str) -> None:
    url = str(tmp_path / "store") if where == "folder" else where
    async with perco.open(url, schema(), options=perco.Options(durability="process")) as db:
        snap, txn, scan = await db.snapshot_at(), await db.begin(), (await db.snapshot_at()).scan(docs)
        txn.set(n, "k", 1)
    for use in (lambda: snap.get(n, "k"), lambda: snap.get_many(n, ["k"]), lambda: anext(scan), txn.commit):
        with pytest.raises(perco.errors.TransactionClosed):
            await use()
    assert txn.outcome == "aborted"


async def test_an_event_that_raises_before_the_commit_aborts_it() -> None:
    def event(name: str) -> None:
        if name == armed:
            raise MineError(name)

    armed = ""
    async with perco.open("memory:", schema(), options=perco.Options(on_event=event)) as db:
        armed = "prewrite"
        with pytest.raises(MineError):
            await db.run(put)
        armed = ""
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") is None


async def test_a_reader_that_waits_is_woken_when_the_store_fails() -> None:
    """Nothing hangs: the body is cancelled wherever it is."""
    with pytest.raises(perco.errors.BackgroundFailure):  # noqa: PT012
        async with perco.open("memory:", schema()) as db:
            gate = await gated(db, "commit", skip=1)
            await db.run(put)
            await gate.reached()
            inside(db).background.spawn(fail)
            try:
                await trio.sleep_forever()
            finally:
                gate.open()


async def fail() -> None:
    raise MineError("in the background")
