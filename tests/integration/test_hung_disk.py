"""A disk that does not answer: nobody waits for it longer than `commit_timeout_s`, and when it does, all is well."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.storage import LmdbTablet, Mutation
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)
IMPATIENT = perco.Options(commit=perco.options.CommitOptions(commit_timeout_s=0.2, one_step=False))
IN_ONE_STEP = perco.Options(commit=perco.options.CommitOptions(commit_timeout_s=0.2))

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")


class HungDisk:
    """The writer of a table stands before its n-th commit until `answer` is called."""

    def __init__(self, db: perco.Database, nth: int, row: bytes = b"") -> None:
        tablet = local_of(db).store.tablet("docs", row)
        assert isinstance(tablet, LmdbTablet)
        self._commit: Callable[..., Any] = tablet.engine.commit
        self._left = nth
        self._answers = threading.Event()
        self.hung = False
        tablet.engine.commit = self.commit  # type: ignore[method-assign]
        tablet.engine.stay_slow()  # the extension would not come by there

    def commit(self, mutations: Sequence[Mutation], *args: Any) -> Any:
        self._left -= 1
        if not self._left:
            self.hung = True
            self._answers.wait()
        return self._commit(mutations, *args)

    def answer(self) -> None:
        self._answers.set()

    def __enter__(self) -> HungDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.answer()  # a failed test must not hang as well


@pytest.mark.parametrize(("options", "nth"), [(IMPATIENT, 2), (IN_ONE_STEP, 1)], ids=["after the prewrite", "one step"])
async def test_a_commit_that_the_disk_keeps_is_unknown_and_can_be_asked_after(
    tmp_path: Path, options: perco.Options, nth: int
) -> None:  # T4 T10 C3
    async with perco.open(tmp_path / "s", SCHEMA, options=options) as db:
        with HungDisk(db, nth) as disk:
            txn = await db.begin()
            txn.set(n, "k", 1)
            with pytest.raises(perco.CommitUnknown) as caught:
                await txn.commit()
            assert disk.hung
            assert txn.outcome == "unknown"
            async with db.snapshot() as snap:
                with pytest.raises(perco.Unavailable):  # its lock or entry is in the way, and nobody can settle it now
                    await snap.get(n, "k")
            disk.answer()
            assert await db.outcome(caught.value.token) > 0
            async with db.snapshot() as snap:
                assert await snap.get(n, "k") == 1
    async with perco.open(tmp_path / "s", SCHEMA) as db, db.snapshot() as snap:
        assert await snap.get(n, "k") == 1


async def test_a_prewrite_that_the_disk_keeps_fails_and_leaves_nothing_in_the_way(tmp_path: Path) -> None:  # T5 T10
    async with perco.open(tmp_path / "s", SCHEMA, options=IMPATIENT) as db:
        with HungDisk(db, 1) as disk:
            txn = await db.begin()
            txn.set(n, "k", 1)
            with pytest.raises(perco.Unavailable, match="the disk has not answered"):
                await txn.commit()
            assert disk.hung
            assert txn.outcome == "aborted"
            disk.answer()
            async with db.transaction() as later:
                assert await later.get(n, "k") is None
                later.set(n, "k", 2)
            async with db.snapshot() as snap:
                assert await snap.get(n, "k") == 2
            assert await db.outcome(txn.token) == 0


async def test_what_queues_behind_a_hung_batch_was_never_sent(tmp_path: Path) -> None:  # T10
    async with perco.open(tmp_path / "s", SCHEMA, options=IMPATIENT) as db:
        with HungDisk(db, 1) as disk:
            refused: list[perco.Unavailable] = []

            async def write(key: str) -> None:
                with pytest.raises(perco.Unavailable) as caught:
                    async with db.transaction() as txn:
                        txn.set(n, key, 1)
                refused.append(caught.value)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write, "first")
                while not disk.hung:
                    await trio.lowlevel.checkpoint()
                for i in range(20):
                    nursery.start_soon(write, f"later {i}")
            assert len(refused) == 21
            disk.answer()
            async with db.transaction() as txn:
                txn.set(n, "after", 1)
            async with db.snapshot() as snap:
                assert [row.key async for row in snap.scan(docs)] == ["after"]


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_vacuum_on_a_hung_disk_ends_and_does_its_work_when_it_answers(
    tmp_path: Path, cancelled: bool
) -> None:  # T10 T13
    impatient = perco.options.CommitOptions(commit_timeout_s=1000 if cancelled else 0.2)
    options = perco.Options(commit=impatient, vacuum=perco.options.VacuumOptions(on=False))
    async with perco.open(tmp_path / "s", perco.Schema(docs, keep=perco.Keep(seconds=0)), options=options) as db:
        async with db.transaction() as txn:
            txn.set(n, "k", 1)
        with HungDisk(db, 1) as disk:
            tablet = local_of(db).store.tablet("docs", b"")
            assert isinstance(tablet, LmdbTablet)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(local_of(db).store.apply, [Mutation("docs", ((b"x", (), (("data", 1, 1, b"v"),)),))])
                while not disk.hung:
                    await trio.lowlevel.checkpoint()
                if cancelled:
                    async with trio.open_nursery() as vacuuming:
                        vacuuming.start_soon(db.vacuum)
                        while not tablet._chores:
                            await trio.lowlevel.checkpoint()
                        vacuuming.cancel_scope.cancel()
                else:
                    with pytest.raises(perco.Unavailable, match="the disk has not answered"):
                        await db.vacuum()
                assert not tablet._chores
                assert not tablet.floor
                disk.answer()
            watermark = (await db.vacuum()).watermark
            assert tablet.floor == watermark > 0


async def test_what_a_continuation_raises_is_its_tasks_and_nobody_elses(tmp_path: Path) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    async with perco.open(tmp_path / "s", SCHEMA) as db:
        store, column = local_of(db).store, inside(db).known.bind(n).column
        mutation = Mutation("docs", ((b"x", (), (("data", column, 1, b"v"),)),))
        with pytest.raises(ZeroDivisionError):
            await store.apply_then([mutation], broken)
        async with db.transaction() as txn:
            txn.set(n, "k", 1)
