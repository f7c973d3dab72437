"""Tablets in LMDB are compacted while they are written to, while others read beside, while the process dies (P6)."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
import perco.aio
import perco.sync
from perco.check.check import check
from perco.database.inside import inside
from perco.errors import StoreFull
from perco.storage import LmdbEngine, LmdbTablet, folder as folders, splitting as copying
from perco.storage.folder import Folder
from tests.acceptance.cli.stores import Owner, started
from tests.integration.storage.test_splits import KEYS, SCHEMA, TOTAL, docs, fill, move, n, opened, tablet_of, whole

ROOT = Path(perco.__file__).parents[1]


async def wear(db: perco.Database, rounds: int = 20) -> None:
    """Fill the file with versions that nobody can read any more."""

    async def all_of_it(txn: perco.Transaction) -> None:
        for key in KEYS:
            txn.set(n, key, await txn.get(n, key) or 0)

    for _ in range(rounds):
        await db.run(all_of_it)
    await inside(db).oracle.note()
    await db.vacuum()


WORN = perco.Schema(docs, keep=perco.Keep(seconds=0))


def file_of(db: perco.Database) -> Path:
    return tablet_of(db).engine.path / "data.mdb"


async def test_space_is_given_back(tmp_path: Path) -> None:
    async with opened(tmp_path / "s", WORN) as db:
        await db.run(fill)
        await wear(db)
        before = file_of(db).stat().st_size
        [done] = await db.compact(docs)
        assert (done.table, done.row, done.before) == ("docs", b"", before)
        assert done.after == file_of(db).stat().st_size < before // 3
        assert tablet_of(db).engine.path == tmp_path / "s" / "tablets" / "docs-0"
        assert sorted(os.listdir(tmp_path / "s" / "tablets")) == ["_perco-0", "docs-0"]
        await db.run(move, random.Random(1))
        async with db.snapshot() as snap:
            assert sum([row[n] async for row in snap.scan(docs)]) == TOTAL
    async with opened(tmp_path / "s", WORN) as db, db.snapshot() as snap:
        assert sum([row[n] async for row in snap.scan(docs)]) == TOTAL


async def test_a_table_that_nobody_has_written_to_stays_as_short_as_it_is(tmp_path: Path) -> None:
    """The first write to a file allocates a megabyte ahead: a new file would be longer than the old one."""
    async with opened(tmp_path / "s") as db:
        before, engine = file_of(db).stat().st_size, tablet_of(db).engine
        [done] = await db.compact(docs)
        assert (done.before, done.after, done.paused_s) == (before, before, 0)
        assert file_of(db).stat().st_size == before
        assert tablet_of(db).engine is engine


async def test_while_it_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # P2 P6
    monkeypatch.setattr(copying, "_CELLS", 50)
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        moved = 0

        async def mover(seed: int, stop: trio.Event) -> None:
            nonlocal moved
            rng = random.Random(seed)
            while not stop.is_set():
                await db.options(attempts=1000).run(move, rng)
                moved += 1

        async with db.snapshot() as old:
            for round in range(4):
                before = moved
                async with trio.open_nursery() as nursery:
                    stop = trio.Event()
                    for seed in range(8):
                        nursery.start_soon(mover, 100 * round + seed, stop)
                    while moved < before + 10:
                        await trio.lowlevel.checkpoint()
                    at, engine = moved, tablet_of(db).engine
                    assert len(await db.compact()) == round + 1
                    assert tablet_of(db).engine is not engine
                    assert moved > at, "they went on meanwhile"
                    stop.set()
                await whole(db)
                await db.split(docs, 50 + 90 * round)
            assert sum([row[n] async for row in old.scan(docs)]) == TOTAL
            assert all([row[n] == 10 async for row in old.scan(docs)]), "a snapshot reads on in the new files"


async def test_a_reader_beside_finds_the_new_files(tmp_path: Path) -> None:  # P6
    """The owner is another process: one process does not open a folder twice."""
    argv = [sys.executable, "-m", "tests.integration.storage.compacting", str(tmp_path / "s"), "when told"]
    async with started(argv) as process:
        owner = Owner(process)
        assert await owner.tell("fill") == "fill"
        async with perco.open(tmp_path / "s", readonly=True) as db:
            table = db.schema.tables["docs"]
            column: Any = table.columns["n"]

            async def values() -> list[int]:
                async with db.snapshot() as snap:
                    return [row[column] async for row in snap.scan(table)]

            assert await values() == [10] * len(KEYS)
            async with db.snapshot() as old:
                opened_before = tablet_of(db).engine
                assert await owner.tell("compact") == "compact"
                assert await owner.tell("add") == "add"
                assert [row[column] async for row in old.scan(table)] == [10] * len(KEYS)
                assert tablet_of(db).engine is opened_before
            assert await values() == [11] * len(KEYS)
            assert tablet_of(db).engine is not opened_before
        assert await owner.tell("quit") == "quit"


async def test_a_client_has_it_done(tmp_path: Path) -> None:
    async with opened(tmp_path / "s") as owner:
        await owner.run(fill)
        argv = [sys.executable, "-m", "tests.integration.storage.compacting", str(tmp_path / "s"), "when told"]
        async with started(argv) as process:
            client = Owner(process)
            engine = tablet_of(owner).engine
            assert await client.tell("compact") == "compact"
            assert tablet_of(owner).engine is not engine
            assert await client.tell("add") == "add"
            assert await client.tell("quit") == "quit"
        async with owner.snapshot() as snap:
            assert [row[n] async for row in snap.scan(docs)] == [11] * len(KEYS)


def test_from_blocking_code_and_from_asyncio(tmp_path: Path) -> None:
    schema = perco.Schema(docs)

    async def on_asyncio() -> list[perco.Compacted]:
        async with perco.aio.open(tmp_path / "s", schema) as db:
            return await db.compact("docs")

    with perco.sync.open(tmp_path / "s", schema) as db:
        with db.transaction() as txn:
            txn.set(n, 1, 1)
        [one] = db.compact(docs)
    [other] = asyncio.run(on_asyncio())
    assert (one.table, one.row) == (other.table, other.row) == ("docs", b"")
    assert one.after <= one.before


# ------------------------------------------------------------------ what cannot be


async def test_a_store_in_memory_is_refused() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        with pytest.raises(perco.UsageError, match="has no files"):
            await db.compact()


async def test_wrong_tables_are_told(tmp_path: Path) -> None:
    async with opened(tmp_path / "s") as db:
        with pytest.raises(perco.UsageError, match="there are: docs"):
            await db.compact("other")
        with pytest.raises(perco.UsageError, match="takes a table"):
            await db.compact(7)  # type: ignore[arg-type]


async def test_a_disk_without_room_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        real = os.statvfs(tmp_path)
        full = os.statvfs_result((*real[:3], 10, 10, *real[5:]))
        asked: list[object] = []
        monkeypatch.setattr(os, "statvfs", lambda path: asked.append(path) or full)
        with pytest.raises(StoreFull, match=r"compacting it needs \d+ MiB for a while, but only 0 MiB are free"):
            await db.compact()
        assert asked
        monkeypatch.undo()
        assert sorted(os.listdir(tmp_path / "s" / "tablets")) == ["_perco-0", "docs-0"]
        await whole(db)


@pytest.mark.parametrize("where", ["begin", "copy", "cut", "place"])
async def test_what_fails_leaves_it_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    fired: list[str] = []

    def fails(*_: object) -> None:
        fired.append(where)
        raise StoreFull("here", "no space left")

    owner, name = {
        "begin": (Folder, "begin_next"),
        "copy": (copying.Copying, "step"),
        "cut": (copying.Copying, "finish"),
        "place": (Folder, "place_next"),
    }[where]
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            with pytest.raises(StoreFull, match="no space left"):
                await db.compact()
        assert fired == [where]
        assert sorted(os.listdir(tmp_path / "s" / "tablets")) == ["_perco-0", "docs-0"]
        await db.run(move, random.Random(1))
        await db.compact()
        await whole(db)


async def test_new_files_that_cannot_be_opened_end_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count by then, so nothing may be written to the old ones; the next process that opens the store has them."""
    place, fired = Folder.place_next, 0

    def placed(self: Folder, table: str, number: int) -> Path:
        nonlocal fired
        place(self, table, number)
        fired += 1
        raise OSError("too many open files")

    monkeypatch.setattr(Folder, "place_next", placed)

    async def write_and_compact() -> None:
        async with opened(tmp_path / "s") as db:
            await db.run(fill)
            async with trio.open_nursery() as nursery:
                for seed in range(4):
                    nursery.start_soon(db.options(attempts=1000).run, move, random.Random(seed))
                await db.compact()

    with trio.fail_after(60), pytest.raises((perco.errors.BackgroundFailure, ExceptionGroup)):
        await write_and_compact()
    assert fired == 1
    monkeypatch.undo()
    async with opened(tmp_path / "s") as db:
        assert sorted(os.listdir(tmp_path / "s" / "tablets")) == ["_perco-0", "docs-0"]
        await whole(db)


async def test_cancelled_it_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = copying.Copying.step
    steps = 0
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        with trio.CancelScope() as scope:

            def step(self: copying.Copying) -> bool:
                nonlocal steps
                steps += 1
                trio.from_thread.run_sync(scope.cancel)
                return real(self)

            with monkeypatch.context() as patched:
                patched.setattr(copying.Copying, "step", step)
                await db.compact()
        assert scope.cancelled_caught
        assert steps
        assert sorted(os.listdir(tmp_path / "s" / "tablets")) == ["_perco-0", "docs-0"]
        await db.run(move, random.Random(1))
        await whole(db)


# ------------------------------------------------------------------ power loss


async def test_the_new_files_are_on_disk_before_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: cells, then the folder that holds them, then the name; the old files go after that."""
    told: list[str] = []

    def tells(word: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def telling(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            path = str(args[0]) if args else ""
            told.append(word + Path(path).suffix if word in ("sync", "rename", "remove") else word)
            return result

        return telling

    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        monkeypatch.setattr(LmdbEngine, "sync", tells("cells", LmdbEngine.sync))
        monkeypatch.setattr(folders, "_sync_folder", tells("sync", folders._sync_folder))
        monkeypatch.setattr(Path, "rename", tells("rename", Path.rename))
        monkeypatch.setattr(shutil, "rmtree", tells("remove", shutil.rmtree))
        monkeypatch.setattr(LmdbTablet, "replace", tells("replace", LmdbTablet.replace))
        await db.compact()
    at = told.index("rename.new")
    assert told[at - 2 : at + 3] == ["cells", "sync.new", "rename.new", "sync", "replace"]
    assert told[at + 3 : at + 6] == ["remove", "rename.next", "sync"]


# ------------------------------------------------------------------ killed


async def killed(folder: Path, step: str, when: str) -> int:
    """How many transactions of the process that died were acknowledged."""
    argv = [sys.executable, "-m", "tests.integration.storage.compacting", str(folder), "killed", step, when]
    done = await trio.run_process(argv, capture_stdout=True, check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    words = done.stdout.split()
    assert words[0] == b"filled"
    return words.count(b"added")


STEPS = ["begin_next", "copy_from", "cut", "place_next", "replace", "uncut", "rmtree", "settle_next"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_killed_at_each_step(tmp_path: Path, step: str, when: str) -> None:  # P6
    """A kill leaves the old files or the new ones, and nothing that was acknowledged is lost."""
    acknowledged = await killed(tmp_path / "s", step, when)
    async with opened(tmp_path / "s") as db:
        assert sorted(os.listdir(tmp_path / "s" / "tablets")) == ["_perco-0", "docs-0"], "no space is lost"
        async with db.snapshot() as snap:
            values = [row[n] async for row in snap.scan(docs)]
        assert len(values) == len(KEYS)
        assert acknowledged <= values[0] - 10 <= acknowledged + 1
        assert len(set(values)) == 1
        assert not (await check(inside(db).driver.store, ts=await inside(db).oracle.draw())).findings
        await db.compact()
        assert sorted(os.listdir(tmp_path / "s" / "tablets")) == ["_perco-0", "docs-0"]
        async with db.snapshot() as snap:
            assert [row[n] async for row in snap.scan(docs)] == values


async def test_a_reader_without_an_owner_reads_what_counts(tmp_path: Path) -> None:
    """Killed after the new files are the valid ones and before the old ones are gone: both are there."""
    done = await trio.run_process(
        [
            sys.executable,
            "-m",
            "tests.integration.storage.compacting",
            str(tmp_path / "s"),
            "killed",
            "rmtree",
            "before",
        ],
        capture_stdout=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path / "s" / "tablets")) == ["_perco-0", "docs-0", "docs-0.next"]
    async with perco.open(tmp_path / "s", readonly=True) as db:
        assert tablet_of(db).engine.path.name == "docs-0.next"
        assert not (await check(inside(db).driver.store, ts=await inside(db).oracle.draw())).errors
        # As an owner goes on, which then replaces them once more: the new files have the path that those had.
        at = tmp_path / "s" / "tablets"
        shutil.rmtree(at / "docs-0")
        (at / "docs-0.next").rename(at / "docs-0")
        before = tablet_of(db).engine
        assert not (await check(inside(db).driver.store, ts=await inside(db).oracle.draw())).errors
        assert tablet_of(db).engine is before
        shutil.copytree(at / "docs-0", at / "docs-0.new")
        (at / "docs-0.new").rename(at / "docs-0.next")
        assert not (await check(inside(db).driver.store, ts=await inside(db).oracle.draw())).errors
        assert tablet_of(db).engine is not before
