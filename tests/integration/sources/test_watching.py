"""A watched folder: changes that the operating system tells of reach the table, beside passes over the whole folder.

A test always waits for news from the source; passes over the whole folder, but for the first, are an hour
away.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import perco
from perco.sources import Folder, FolderOptions, Skipped, Synced, noticing
from perco.sources.folder import _AHEAD_BYTES, _Turns

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning:perco")  # tmpfs

RARELY = FolderOptions(interval_s=3600, rescan_s=3600)
WAIT_S = 120.0  # a test that waits so long has failed


def happened(kind: str, path: str, to: str = "", *, is_directory: bool = False) -> SimpleNamespace:
    """An event of watchdog."""
    return SimpleNamespace(event_type=kind, src_path=path, dest_path=to, is_directory=is_directory)


class Notes:
    def __init__(self, path: Path, options: FolderOptions = RARELY, **how: Any) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self.files = perco.Table("files", key=perco.TEXT)
        self.text = self.files.column("text", perco.TEXT)
        self.schema = perco.Schema(self.files)
        self.source = Folder(path, self.text, options=options, **how)

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text)

    def there(self) -> dict[str, str | None]:
        return {
            path.relative_to(self.path).as_posix(): path.read_text() for path in self.path.rglob("*") if path.is_file()
        }

    async def stored(self, db: perco.Database) -> dict[str, str | None]:
        async with db.snapshot() as snap:
            return {row.key: row[self.text] async for row in snap.scan(self.files, columns=[self.text])}

    @asynccontextmanager
    async def watched(self, db: perco.Database) -> AsyncIterator[Callable[[], Any]]:
        """Gives a function that waits until the table is as the folder is. The first pass has ended."""
        send, told = trio.open_memory_channel[Synced](1000)

        async def equal() -> None:
            with trio.fail_after(WAIT_S):
                while await self.stored(db) != self.there():
                    await told.receive()

        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await self.source.watch(db, told=send.send_nowait)

            nursery.start_soon(watch)
            await told.receive()
            yield equal
            nursery.cancel_scope.cancel()


async def test_what_the_system_tells_of_reaches_the_table_without_a_pass(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    notes.write("a", "one")
    notes.write("old/b", "two")
    async with perco.open("memory:", notes.schema) as db, notes.watched(db) as equal:
        assert await notes.stored(db) == {"a": "one", "old/b": "two"}
        notes.write("a", "other")  # in its place
        await equal()
        (tmp_path / "new").write_text("three")
        os.replace(tmp_path / "new", notes.path / "a")  # from outside, over the old one
        await equal()
        notes.write("deep/er/c", "four")  # in new folders
        await equal()
        (notes.path / "old").rename(notes.path / "renamed")
        await equal()
        (notes.path / "renamed").rename(tmp_path / "outside")
        await equal()
        (tmp_path / "outside").rename(notes.path / "back")  # a folder with files that are older than it
        await equal()
        (notes.path / "a").unlink()
        shutil.rmtree(notes.path / "deep")
        await equal()
        assert await notes.stored(db) == {"back/b": "two"}


@pytest.mark.parametrize("seed", range(6))
async def test_any_changes_reach_the_table(tmp_path: Path, seed: int) -> None:
    rng, notes = random.Random(seed), Notes(tmp_path / "notes")
    folders = ["", "x/", "x/y/", "z/"]
    async with perco.open("memory:", notes.schema) as db, notes.watched(db) as equal:
        for turn in range(60):
            files = sorted(notes.there())
            what = rng.choice(["write", "write", "write", "remove", "move", "move folder", "remove folder"])
            name = f"{rng.choice(folders)}{rng.choice('abc')}"
            new = not (notes.path / name).parent.exists()
            if what == "write":
                notes.write(name, f"{turn}")
            elif what == "remove" and files:
                (notes.path / rng.choice(files)).unlink()
            elif what == "move" and files:
                (notes.path / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(notes.path / rng.choice(files), notes.path / name)
            elif what == "move folder" and (notes.path / "x").is_dir() and not (notes.path / "w").exists():
                (notes.path / "x").rename(notes.path / "w")
            elif what == "remove folder":
                shutil.rmtree(notes.path / rng.choice("xzw"), ignore_errors=True)
            # watchdog loses sight of a folder that is renamed, or goes, the moment it was made or renamed
            if new or "folder" in what or rng.random() < 0.2:
                await equal()
        await equal()


async def test_only_what_the_folder_takes_is_taken_also_by_notices(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes", match="*.md")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/c.md").write_text("not in the folder")
    (notes.path / "link").symlink_to(tmp_path / "outside")
    async with perco.open("memory:", notes.schema) as db:
        async with db.transaction() as txn:
            txn.set(notes.text, "d.md", "a row of the program's own")
        names = ["a.txt", ".b.md", ".git/b.md", "a.md"]
        for name in names:
            notes.write(name, "text")
        paths = {str(notes.path / name) for name in [*names, "link", "link/c.md", "d.md", "", ".git"]}
        synced = await notes.source._sync_some(db, dict.fromkeys(paths), _Turns())
        assert (synced.added, synced.removed) == (1, 0)
        assert await notes.stored(db) == {"a.md": "text", "d.md": "a row of the program's own"}


async def test_a_name_that_is_no_key_is_skipped(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    path = os.path.join(os.fsencode(notes.path), b"\xff")
    notes.write(os.fsdecode(b"\xff"), "text")
    async with perco.open("memory:", notes.schema) as db:
        synced = await notes.source._sync_some(db, {os.fsdecode(path): None}, _Turns())
        assert [skipped.kept for skipped in synced.skipped] == [True]
        os.unlink(path)
        assert await notes.source._sync_some(db, {os.fsdecode(path): None}, _Turns()) == Synced()
        assert await notes.stored(db) == {}


# ------------------------------------------------------------------ passes and notices take turns


async def test_a_pass_does_not_remove_a_file_that_came_after_its_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes(tmp_path / "notes")
    notes.write("gone", "one")
    turns = _Turns()
    async with perco.open("memory:", notes.schema) as db:
        await notes.source.sync(db)
        (notes.path / "gone").unlink()
        listed = notes.source._listed

        def later() -> Any:
            files = listed()
            notes.write("late", "two")
            trio.from_thread.run(notes.source._sync_some, db, {str(notes.path / "late"): None}, turns)
            return files

        monkeypatch.setattr(notes.source, "_listed", later)
        synced = await notes.source._sync(db, turns)
        assert await notes.stored(db) == {"late": "two"}
        assert synced.removed == 1


async def test_a_pass_that_has_read_a_file_does_not_overwrite_what_was_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes(tmp_path / "notes")
    notes.write("a", "old")
    turns = _Turns()
    read_all = notes.source._read_all
    async with perco.open("memory:", notes.schema) as db, trio.open_nursery() as nursery:
        ended = trio.Event()

        async def notice() -> None:
            await notes.source._sync_some(db, {str(notes.path / "a"): None}, turns)
            ended.set()

        async def ends_or_waits_for_its_turn() -> None:
            nursery.start_soon(notice)
            while not (ended.is_set() or turns.lock.statistics().tasks_waiting):
                await trio.lowlevel.checkpoint()

        def read_and_change(files: Any) -> Any:
            read = read_all(files)
            monkeypatch.setattr(notes.source, "_read_all", read_all)
            notes.write("a", "new")
            trio.from_thread.run(ends_or_waits_for_its_turn)
            return read

        monkeypatch.setattr(notes.source, "_read_all", read_and_change)
        await notes.source._sync(db, turns)
        await ended.wait()
        assert await notes.stored(db) == {"a": "new"}


@pytest.mark.parametrize("overtaken_by", ["a pass", "a removal", "a notice"])
async def test_what_was_read_ahead_is_not_written_if_somebody_has_read_files_since(
    tmp_path: Path, overtaken_by: str
) -> None:
    notes, turns = Notes(tmp_path / "notes"), _Turns()
    notes.write("a", "old")
    notes.write("b", "other")
    path = str(notes.path / "a")
    async with perco.open("memory:", notes.schema) as db:
        await notes.source.sync(db)
        ahead = notes.source._read_ahead(turns, path)
        assert ahead is not None
        if overtaken_by == "a removal":
            (notes.path / "a").unlink()
        else:
            notes.write("a", "new")
        if overtaken_by == "a notice":
            await notes.source._sync_some(db, {path: None}, turns)
        else:
            await notes.source._sync(db, turns)
        await notes.source._sync_some(db, {path: ahead}, turns)
        assert await notes.stored(db) == notes.there()


@pytest.mark.parametrize("who", ["a notice", "a removal", "a pass"])
async def test_what_is_read_ahead_while_somebody_reads_in_a_turn_is_not_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    notes, turns = Notes(tmp_path / "notes"), _Turns()
    source, path, found = notes.source, notes.path / "a", []
    reads = {"a notice": "_look_and_read", "a removal": "_gone", "a pass": "_read_all"}[who]
    right = getattr(source, reads)

    def late(given: Any) -> Any:
        os.replace(tmp_path / "old", path)
        found.append(source._read_ahead(turns, str(path)))
        if who == "a removal":
            path.unlink()
        else:
            os.replace(tmp_path / "new", path)
        return right(given)

    notes.write("a", "first")
    (tmp_path / "old").write_text("old")
    (tmp_path / "new").write_text("new")
    async with perco.open("memory:", notes.schema) as db:
        await source.sync(db)
        monkeypatch.setattr(source, reads, late)
        if who == "a notice":
            await source._sync_some(db, {str(path): None}, turns)
        elif who == "a removal":
            await source._remove(db, ["a"], turns, Synced())
        else:
            os.link(tmp_path / "new", tmp_path / "same")
            os.replace(tmp_path / "same", path)  # the pass lists the file that it will find
            await source._sync(db, turns)
        monkeypatch.setattr(source, reads, right)
        [ahead] = found
        assert ahead is not None
        written: list[Any] = []
        write = source._write

        async def noted(db: perco.Database, changes: Any, synced: Synced) -> None:
            written.extend(change.content for change in changes)
            await write(db, changes, synced)

        monkeypatch.setattr(source, "_write", noted)
        await source._sync_some(db, {str(path): ahead}, turns)
        assert "old" not in written
        assert await notes.stored(db) == notes.there()


async def test_a_file_in_the_place_of_a_folder_removes_the_rows_of_the_folder(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    notes.write("d/a", "one")
    notes.write("d/b/c", "two")
    (tmp_path / "d").write_text("file")
    async with perco.open("memory:", notes.schema) as db, notes.watched(db) as equal:
        (notes.path / "d").rename(tmp_path / "away")
        (tmp_path / "d").rename(notes.path / "d")
        await equal()
        assert await notes.stored(db) == {"d": "file"}


def test_a_file_that_becomes_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    notes.write("a", "one")
    [file] = notes.source._listed()
    (notes.path / "a").unlink()
    os.mkfifo(notes.path / "a")
    assert notes.source._read(file) == Skipped("a", "it has changed while it was read", True)


async def test_small_files_are_read_ahead_and_others_are_not(tmp_path: Path) -> None:
    notes, turns = Notes(tmp_path / "notes", match="*.txt"), _Turns()
    notes.write("small.txt", "one")
    notes.write("large.txt", "x" * (_AHEAD_BYTES + 1))
    notes.write("other.md", "two")
    found = {
        name: notes.source._read_ahead(turns, str(notes.path / name))
        for name in ("small.txt", "large.txt", "other.md", "missing.txt", "small.txt/below.txt", "../notes/../a.txt")
    }
    assert [name for name, ahead in found.items() if ahead is not None] == ["small.txt"]


async def test_a_small_file_that_was_replaced_is_read_by_the_thread_that_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes(tmp_path / "notes")
    notes.write("a", "one")
    async with perco.open("memory:", notes.schema) as db, notes.watched(db) as equal:
        monkeypatch.setattr(notes.source, "_look_and_read", None)  # a turn that reads files itself would fail
        (tmp_path / "new").write_text("two")
        os.replace(tmp_path / "new", notes.path / "a")
        await equal()


async def test_what_waits_having_been_read_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    notices = noticing.Notices(lambda path: path)
    for n in range(3 * noticing._AHEAD_MAX):
        notices.dispatch(happened("closed", f"{n}"))
    taken = await notices.take()
    assert len(taken) == 3 * noticing._AHEAD_MAX
    assert sum(each is not None for each in taken.values()) == noticing._AHEAD_MAX
    notices.dispatch(happened("moved", "next", "moved"))
    assert await notices.take() == {"next": "next", "moved": "moved"}


async def test_only_what_a_change_leaves_is_read_ahead(caplog: pytest.LogCaptureFixture) -> None:
    def ahead(path: str) -> str:
        if path == "odd":
            raise ZeroDivisionError
        return path

    notices = noticing.Notices(ahead)
    for kind, path in [("closed", "a"), ("modified", "a"), ("modified", "b"), ("closed", "b"), ("created", "odd")]:
        notices.dispatch(happened(kind, path))
    notices.dispatch(happened("moved", "c", "d", is_directory=True))
    assert await notices.take() == {"a": None, "b": "b", "odd": None, "c/": None, "d/": None}
    assert [record.getMessage() for record in caplog.records] == ["a file could not be read ahead"]


# ------------------------------------------------------------------ without notices


async def test_without_watchdog_there_are_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noticing, "INSTALLED", False)
    notes = Notes(tmp_path / "notes", FolderOptions(interval_s=0.001, rescan_s=3600))
    async with perco.open("memory:", notes.schema) as db:
        await _follow_one_file(notes, db)


async def _follow_one_file(notes: Notes, db: perco.Database) -> None:
    async with notes.watched(db) as equal:
        notes.write("a", "one")
        await equal()


async def test_if_the_system_cannot_tell_there_are_passes_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(observer: Any) -> None:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr("watchdog.observers.api.BaseObserver.start", start)
    notes = Notes(tmp_path / "notes", FolderOptions(interval_s=0.001, rescan_s=3600))
    async with perco.open("memory:", notes.schema) as db:
        with pytest.warns(perco.errors.PercoWarning, match="limit reached.*max_user_watches"):
            await _follow_one_file(notes, db)


async def test_a_folder_that_goes_away_ends_the_watch_and_keeps_its_rows(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes", FolderOptions(rescan_s=0.001))
    notes.write("a", "one")
    first = True
    async with perco.open("memory:", notes.schema) as db:

        def told(synced: Synced) -> None:
            nonlocal first
            if first:
                notes.path.rename(tmp_path / "elsewhere")
            first = False

        with pytest.raises(perco.UsageError, match="there is no folder"):
            await notes.source.watch(db, told=told)
        assert await notes.stored(db) == {"a": "one"}
        with pytest.raises(perco.UsageError, match="there is no folder"):
            await notes.source.watch(db)


async def test_what_the_caller_raises_when_told_comes_out(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    async with perco.open("memory:", notes.schema) as db:

        def told(synced: Synced) -> None:
            if synced.added:
                raise KeyError("the program's own")
            notes.write("a", "one")

        with pytest.raises(KeyError, match="the program's own"):
            await notes.source.watch(db, told=told)
