"""The folder source: a table equals the files of a folder, whatever happens to these."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
import perco.aio
import perco.sync
from perco import views
from perco.sources import Folder, FolderOptions, Skipped, Synced, folder

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs


class Notes:
    def __init__(self, path: Path, **how: Any) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self.files = perco.Table("files", key=perco.TEXT)
        self.text = self.files.column("text", perco.TEXT)
        self.schema = perco.Schema(self.files)
        self.source = Folder(path, self.text, **how)

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text)

    async def stored(self, db: perco.Database) -> dict[str, str | None]:
        async with db.snapshot() as snap:
            return {row.key: row[self.text] async for row in snap.scan(self.files)}


def counts(synced: Synced) -> tuple[int, int, int, int, int]:
    return synced.added, synced.changed, synced.removed, synced.same, synced.read


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old at once."""
    monkeypatch.setattr(folder, "_FRESH_NS", 0)


@pytest.mark.usefixtures("settled")
async def test_the_table_follows_the_folder(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes", match=["*.md", "plans/*"])
    for name, text in {
        "a.md": "one",
        "plans/b.txt": "two",
        "c.txt": "no",
        ".hidden.md": "no",
        "deep/er/d.md": "",
    }.items():
        notes.write(name, text)
    async with perco.open(tmp_path / "s", notes.schema) as db:
        assert counts(await notes.source.sync(db)) == (3, 0, 0, 0, 3)
        assert await notes.stored(db) == {"a.md": "one", "plans/b.txt": "two", "deep/er/d.md": ""}
        assert counts(await notes.source.sync(db)) == (0, 0, 0, 3, 0)
        notes.write("a.md", "other")
        (tmp_path / "notes/plans").rename(tmp_path / "notes/plans2")
        notes.write("plans/new.txt", "three")
        assert counts(await notes.source.sync(db)) == (1, 1, 1, 1, 2)
        assert await notes.stored(db) == {"a.md": "other", "plans/new.txt": "three", "deep/er/d.md": ""}
    async with perco.open(tmp_path / "s", notes.schema) as db:  # another process reads no file that is the same
        os.utime(tmp_path / "notes/a.md", (1, 1))
        before = db.statistics().last_ts
        synced = await notes.source.sync(db)
        assert counts(synced) == (0, 0, 0, 3, 1)
        assert not synced.anything
        assert db.statistics().last_ts > before


async def test_a_file_that_was_just_written_is_read_again(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    notes.write("a", "one")
    async with perco.open("memory:", notes.schema) as db:
        assert counts(await notes.source.sync(db)) == (1, 0, 0, 0, 1)
        stat = (tmp_path / "notes/a").stat()
        notes.write("a", "two")  # of the same size, and, on a coarse clock, at the same time
        os.utime(tmp_path / "notes/a", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert counts(await notes.source.sync(db)) == (0, 1, 0, 0, 1)
        assert await notes.stored(db) == {"a": "two"}
        (tmp_path / "notes/a").unlink()
        assert counts(await notes.source.sync(db)) == (0, 0, 1, 0, 0)
        assert await notes.stored(db) == {}


@pytest.mark.usefixtures("settled")
async def test_what_cannot_be_taken_is_told_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes(tmp_path / "notes", options=FolderOptions(bytes_max=10))
    for name in ("large", "binary", "locked", "moving", "long" * 60 + "/" + "path" * 60, "fine"):
        notes.write(name, "text")
    (tmp_path / "notes/link").symlink_to(tmp_path / "notes/fine")
    os.mkfifo(tmp_path / "notes/pipe")
    async with perco.open("memory:", notes.schema) as db:
        assert [each.reason.split(":")[0] for each in (await notes.source.sync(db)).skipped] == ["its path is no key"]
        assert set(await notes.stored(db)) == {"large", "binary", "locked", "moving", "fine"}
        notes.write("large", "more than ten bytes")
        (tmp_path / "notes/binary").write_bytes(b"\xff\xfe")
        notes.write("locked", "next")
        notes.write("moving", "next")
        right = open

        def opened(path: str, mode: str, **how: Any) -> Any:
            if path.endswith("locked"):
                raise PermissionError(13, "Permission denied")
            if path.endswith("moving"):
                (tmp_path / "notes/moving").write_text("later")
            return right(path, mode, **how)

        monkeypatch.setattr(folder, "open", opened, raising=False)
        skipped = {each.key: each for each in (await notes.source.sync(db)).skipped}
        assert skipped["large"] == Skipped("large", "it has more than 10 bytes", False)
        assert skipped["binary"] == Skipped("binary", "it is not UTF-8 text", False)
        assert skipped["locked"] == Skipped("locked", "it cannot be read: Permission denied", True)
        assert skipped["moving"] == Skipped("moving", "it has changed while it was read", True)
        assert await notes.stored(db) == {"locked": "text", "moving": "text", "fine": "text"}
        monkeypatch.undo()
        monkeypatch.setattr(folder, "_FRESH_NS", 0)
        await notes.source.sync(db)
        assert await notes.stored(db) == {"locked": "next", "moving": "later", "fine": "text"}
        (tmp_path / "notes").rename(tmp_path / "away")
        with pytest.raises(perco.UsageError, match=r"there is no folder .*: its rows stay as they are"):
            await notes.source.sync(db)
        assert len(await notes.stored(db)) == 3


@pytest.mark.usefixtures("settled")
async def test_folders_share_a_table_by_prefix_and_rows_of_others_stay(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "one", prefix="one:")
    two = Folder(tmp_path / "two", notes.text, prefix="two:")
    (tmp_path / "two").mkdir()
    notes.write("a", "1")
    (tmp_path / "two/a").write_text("2")
    async with perco.open("memory:", notes.schema) as db:
        async with db.transaction() as txn:
            txn.set(notes.text, "mine", "3")
            txn.set(notes.text, "one:mine", "4")
        for source in (notes.source, two):
            await source.sync(db)
        (tmp_path / "two/a").unlink()
        for source in (notes.source, two):
            await source.sync(db)
        assert await notes.stored(db) == {"mine": "3", "one:a": "1", "one:mine": "4"}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("seed", range(5))
async def test_random_changes_and_passes_that_are_cut_off(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(folder, "_ROWS_AT_ONCE", 3)
    notes = Notes(tmp_path / "notes")
    names = [f"{part}/{name}" for part in ("x", "y", "z/w") for name in "abcd"]
    async with perco.open("memory:", notes.schema) as db:
        for _ in range(12):
            for _ in range(rng.randrange(8)):
                name, path = rng.choice(names), tmp_path / "notes" / rng.choice(names)
                match rng.randrange(4):
                    case 0:
                        path.unlink(missing_ok=True)
                    case 1 if (tmp_path / "notes" / name).exists():
                        path.parent.mkdir(parents=True, exist_ok=True)
                        (tmp_path / "notes" / name).replace(path)
                    case _:
                        notes.write(name, str(rng.random()))
            with trio.move_on_after(rng.choice([0.0, 0.002, 0.01])):
                await notes.source.sync(db)
        await notes.source.sync(db)
        found = {
            str(path.relative_to(tmp_path / "notes")): path.read_text()
            for path in (tmp_path / "notes").rglob("*")
            if path.is_file()
        }
        assert await notes.stored(db) == found


async def test_a_view_follows_a_watched_folder(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes", options=FolderOptions(interval_s=0.01))
    words = perco.Table("words", key=perco.Tuple(perco.TEXT, perco.TEXT))
    there = words.column("there", perco.BOOL)
    notes.schema = perco.Schema(notes.files, words)
    made = views.Views(notes.schema)

    @made.each(notes.text, id="words", into=words)
    def split(file: perco.Row[str]) -> Iterator[views.Put[Any]]:
        for word in set((file[notes.text] or "").split()):
            yield views.Put(words, (word, file.key), {there: True})

    passes = trio.Event()
    notes.write("a", "one two")
    async with perco.open("memory:", made.schema) as db, db.worker(), trio.open_nursery() as nursery:

        def told(synced: Synced) -> None:
            if synced.changed:
                passes.set()
            elif not passes.is_set():
                notes.write("a", "two three")

        async def watch() -> None:
            await notes.source.watch(db, told=told)

        nursery.start_soon(watch)
        with trio.fail_after(60):
            await passes.wait()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await db.wait_idle(timeout=60)
            async with db.snapshot() as snap:
                assert [row.key async for row in snap.scan(words)] == [("three", "a"), ("two", "a")]
                assert (await views.check(made, snap)).equal


def test_blocking_code_and_asyncio_have_it(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    notes.write("a", "one")
    with perco.sync.open("memory:", notes.schema) as db:
        assert counts(notes.source.sync_blocking(db)) == (1, 0, 0, 0, 1)

    async def main() -> None:
        async with perco.aio.open("memory:", notes.schema) as db:
            assert counts(await notes.source.sync(db)) == (1, 0, 0, 0, 1)
            seen = asyncio.Event()
            task = asyncio.create_task(notes.source.watch(db, told=lambda synced: seen.set()))
            await asyncio.wait_for(seen.wait(), 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


async def test_bytes_are_taken_as_they_are(tmp_path: Path) -> None:
    table = perco.Table("files", key=perco.TEXT)
    data = table.column("data", perco.BYTES)
    (tmp_path / "a").write_bytes(b"\xff\x00")
    source = Folder(tmp_path, data, match="?")
    async with perco.open("memory:", perco.Schema(table)) as db:
        await source.sync(db)
        async with db.snapshot() as snap:
            assert await snap.get(data, "a") == b"\xff\x00"


def test_what_is_no_source_is_told() -> None:
    table, other = perco.Table("t", key=perco.TEXT), perco.Table("o", key=perco.INT64)
    for column in (table.column("n", perco.INT64), other.column("t", perco.TEXT), "text"):
        with pytest.raises(perco.UsageError, match="a Folder takes a column of TEXT or BYTES"):
            Folder(".", column)  # type: ignore[arg-type, type-var]
    with pytest.raises(perco.UsageError, match="interval_s"):
        FolderOptions(interval_s=-1)
