"""Opening and closing: work under way is finished, and a call that fails half-way can be tried again."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.storage import LmdbEngine, LmdbTablet
from perco.tablets.local import LocalStore
from tests.integration.test_hung_disk import HungDisk

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)


async def test_a_commit_over_two_tablets_is_finished_before_the_first_of_them_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task outlives the block. After the slower prewrite it goes on to the tablet that has nothing left to do."""
    outcomes: list[int] = []

    async def commit(db: perco.Database) -> None:
        async with db.transaction() as txn:
            for key in ("a", "b", "z"):  # the primary is in the first tablet
                txn.set(n, key, 1)
        outcomes.append(txn.commit_ts)

    closing = trio.Event()
    drain = LmdbTablet.drain

    async def draining(self: LmdbTablet) -> bool:
        if self.start == b"m":  # the first tablet has nothing to do, and would have been closed by now
            closing.set()
        return await drain(self)

    monkeypatch.setattr(LmdbTablet, "drain", draining)

    async def answer(disk: HungDisk) -> None:
        await closing.wait()
        disk.answer()

    async with trio.open_nursery() as nursery, perco.open(tmp_path / "s", SCHEMA) as db:
        disk = HungDisk(db, 1, b"z")
        nursery.start_soon(commit, db)
        while not disk.hung:
            await trio.lowlevel.checkpoint()
        nursery.start_soon(answer, disk)
    async with perco.open(tmp_path / "s", SCHEMA) as db, db.snapshot() as snap:
        assert await snap.get_many(n, ["a", "b", "z"]) == {"a": 1, "b": 1, "z": 1}
    assert outcomes[0] > 0


def test_ctrl_c_between_queueing_and_waiting_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed = False
    submit = LmdbTablet.submit

    def interrupting(self: LmdbTablet, *args: Any) -> None:
        nonlocal armed
        submit(self, *args)
        if armed and self.table == "docs":
            armed = False
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LmdbTablet, "submit", interrupting)

    async def write(db: perco.Database) -> None:
        async with db.transaction() as txn:
            txn.set(n, "k", 1)

    caught = 0

    async def main() -> None:
        nonlocal armed, caught
        async with perco.open(tmp_path / "s", SCHEMA) as db:
            try:
                async with trio.open_nursery() as nursery:
                    armed = True
                    nursery.start_soon(write, db)
            except* KeyboardInterrupt:
                caught += 1
            await write(db)  # a call whose task is gone would have ended the loop by now
            async with db.snapshot() as snap:
                assert await snap.get(n, "k") == 1

    trio.run(main)
    assert caught == 1


async def test_an_opening_that_fails_at_a_tablet_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 0

    class Failing(LmdbEngine):
        def __init__(self, path: Path, *args: Any, **kwargs: Any) -> None:
            nonlocal failures
            if path.name == "docs-1" and not failures:
                failures += 1
                raise perco.errors.UnsuitableFolder(str(path), "too many open files")
            super().__init__(path, *args, **kwargs)

    monkeypatch.setattr("perco.tablets.local.LmdbEngine", Failing)
    with pytest.raises(perco.errors.UnsuitableFolder) as caught:  # whose traceback keeps what was opened alive
        async with perco.open(tmp_path / "s", SCHEMA):
            pass
    assert failures == 1
    assert caught.value.__traceback__ is not None
    async with perco.open(tmp_path / "s", SCHEMA) as db, db.transaction() as txn:
        txn.set(n, "k", 1)


async def test_a_schema_that_no_folder_can_hold_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    async with perco.open(tmp_path / "s", SCHEMA) as db, db.transaction() as txn:
        txn.set(n, "k", 1)
    with pytest.raises(perco.UsageError, match="too long"):
        perco.Table("表" * 30)
    many = perco.Table("many")
    for i in range(123):
        many.column(f"c{i}", perco.BYTES, group=f"g{i}")
    with pytest.raises(perco.errors.SchemaMismatch, match="122 locality groups"):
        async with perco.open(tmp_path / "s", perco.Schema(docs, many)):
            pass
    async with perco.open(tmp_path / "s", SCHEMA) as db, db.snapshot() as snap:
        assert await snap.get(n, "k") == 1


def test_an_interrupt_while_it_closes_comes_out_when_it_has_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the folder would stay claimed by this process, and its writers would run on."""
    close = LocalStore.aclose

    async def interrupted(self: LocalStore) -> None:
        signal.raise_signal(signal.SIGINT)
        await trio.lowlevel.checkpoint()
        await close(self)

    async def write() -> None:
        async with perco.open(tmp_path / "store", SCHEMA) as db:
            async with db.transaction() as txn:
                txn.set(n, "a", 1)
            monkeypatch.setattr(LocalStore, "aclose", interrupted)

    async def read() -> int | None:
        async with perco.open(tmp_path / "store", SCHEMA) as db, db.snapshot() as snap:
            return await snap.get(n, "a")

    with pytest.raises(KeyboardInterrupt):
        trio.run(write)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("perco")]
    monkeypatch.undo()
    assert trio.run(read) == 1
