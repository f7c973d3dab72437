"""Keeps a table equal to the files of a folder: files that are new, changed, renamed or gone.

A pass lists the folder, and compares each file's size, times and inode with what a hidden column of its row says. Only
files that differ are read, and only those whose content differs are written. So a pass over an unchanged folder reads
no file and writes nothing, also after a restart.

A file that was changed a moment before it was looked at may change again without a trace in its times. Its state is
not noted then, so the next pass reads it again.

`watch` also looks at single paths, where the operating system says that something has changed, while a pass may be
under way. The files that a pass has listed may have changed by the time it writes. So both take turns: in its turn,
each looks once more at the files that it reads or whose rows it removes, and writes. So the last one that writes has
also looked last. A small file is read ahead, by the thread that hears of its change, because a switch to another thread
takes longer than reading it. If files have been read in a turn meanwhile, the file is read again.
"""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgpack
import trio

import perco.aio
import perco.aio.calling
import perco.sync
import perco.sync.calling
from perco.database.database import Database
from perco.errors import PercoError, UsageError
from perco.schema.codecs import BYTES, TEXT
from perco.schema.schema import Column, Table
from perco.settings import check_options
from perco.sources.noticing import Notices, noticed
from perco.txn.transaction import Transaction

V = TypeVar("V", str, bytes)
G = TypeVar("G")
T = TypeVar("T")

_ROWS_AT_ONCE: Final = 1000  # in a transaction
_BYTES_AT_ONCE: Final = 8 << 20  # in a transaction, unless one file has more
_AHEAD_BYTES: Final = 64 << 10  # of a file that is read ahead
_FRESH_NS: Final = 2_000_000_000  # a file that was changed no longer ago than this may change again unnoticed


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderOptions:
    """Attributes:
    bytes_max: larger files are skipped.
    interval_s: how often `watch` looks at the whole folder, in seconds, if the operating system does not tell it of
        changes.
    rescan_s: how often, in seconds, if it does. A shorter time finds changes earlier that the system does not report,
        such as those that another machine makes in a shared folder.
    hidden: also take files and folders whose names begin with a dot.
    """

    bytes_max: int = 16 << 20
    interval_s: float = 1.0
    rescan_s: float = 60.0
    hidden: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that was not taken. Attributes: `key`: of its row; `reason`; `kept`: the row, if any, stays as it was."""

    key: str
    reason: str
    kept: bool


@dataclass(slots=True)
class Synced:
    """The result of a pass: how many rows it added, changed and removed, and how many files are as they were.

    Attributes: `read`: files that were read; `skipped`: those that were not taken.
    """

    added: int = 0
    changed: int = 0
    removed: int = 0
    same: int = 0
    read: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def anything(self) -> bool:
        """Whether the table has changed."""
        return bool(self.added or self.changed or self.removed)


class _Stamp(NamedTuple):
    """The properties that show a change of a file."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int

    def packed(self) -> bytes:
        data: bytes = msgpack.packb(self)
        return data


class _File(NamedTuple):
    key: str
    path: str
    stamp: _Stamp
    fresh: bool


class _Change(NamedTuple):
    """`content` None: the row goes, with its state. `state`: the packed stamp; "": read the file again in the next
    pass."""

    key: str
    content: Any
    state: bytes | None


class _Ahead(NamedTuple):
    """A change of a file that was read ahead of a turn. `reads`: the number of `_Turns.reads` before that."""

    change: _Change
    reads: int


class _Turns:
    """Whose turn it is to look at files and to write. `reads`: how many looks at files have ended, in all turns."""

    def __init__(self) -> None:
        self.lock = trio.Lock()
        self.reads = 0

    async def look(self, function: Callable[[G], T], given: G) -> T:
        """Call a function that looks at files, in a thread. The caller has the turn."""
        found = await trio.to_thread.run_sync(function, given)
        self.reads += 1  # not before: what is read ahead until then may be older
        return found


class Folder(Generic[V]):
    """The files of a folder, as the source of a column.

        files = perco.Table("files", key=perco.TEXT)
        text = files.column("text", perco.TEXT)
        source = sources.Folder("notes", text, match=["*.md", "*.txt"])
        ...
        await source.sync(db)                # once
        await source.watch(db)               # again and again, until it is cancelled

    A row's key is the path of its file below the folder, with "/": "plans/next.md". Symbolic links are not followed.
    A row that the folder did not write is left alone. Several folders may feed one table, if each has its own `prefix`.

    Args:
        path: of the folder.
        content: a column of TEXT (UTF-8) or BYTES, in a table whose keys are TEXT.
        match: patterns of the names, or of the paths below the folder, that are taken: "*.md", "plans/*".
        prefix: the beginning of the rows' keys.
        options: limits.

    Declare it before the store is opened: it adds a hidden column to the table.

    Raises: UsageError.
    """

    path: Path
    content: Column[str, V]
    prefix: str
    options: FolderOptions

    def __init__(
        self,
        path: str | os.PathLike[str],
        content: Column[str, V],
        *,
        match: str | Sequence[str] = "*",
        prefix: str = "",
        options: FolderOptions | None = None,
    ) -> None:
        if not isinstance(content, Column) or content.codec not in (TEXT, BYTES) or content.table.key is not TEXT:
            raise UsageError(
                f"a Folder takes a column of TEXT or BYTES, of a table whose keys are TEXT, not {content!r}"
            )
        self.path, self.prefix = Path(path), prefix
        self.content = content
        self.options = FolderOptions() if options is None else options
        self._match = [match] if isinstance(match, str) else list(match)
        self._table: Table[str] = content.table
        self._state: Column[str, bytes] = content.table.hide(f"_file {prefix}", BYTES)

    async def sync(self, db: Database | perco.aio.Database) -> Synced:
        """Look at the folder once, and bring the table up to date. `sync_blocking` is the same for blocking code.

        A file that cannot be read is skipped, and its row stays as it was. So is a file that changes while it is read;
        the next pass takes it. A file that is too large, or no UTF-8 though the column is TEXT, has no row.

        Raises: UsageError if the folder is not there: its rows are not removed, since it may only be unmounted;
        whatever `Database.run` raises: the rows written by then are there, and the next pass goes on.
        """
        if isinstance(db, perco.aio.Database):
            return await perco.aio.calling.ask_for(db, self._sync)
        return await self._sync(db)

    def sync_blocking(self, db: perco.sync.Database) -> Synced:
        """`sync` for blocking code. Raises: as `sync`."""
        return perco.sync.calling.ask_for(db, self._sync)

    async def watch(
        self, db: Database | perco.aio.Database, *, told: Callable[[Synced], object] = lambda synced: None
    ) -> None:
        """Follow the folder until it is cancelled. In blocking code, call `sync_blocking` in a loop.

        If watchdog is installed (`pip install 'perco[watch]'`), the operating system reports each change, and `watch`
        looks only at the paths that it names. A pass over the whole folder finds what has changed before, and then,
        every `FolderOptions.rescan_s`, what the system did not report. Without watchdog, there is such a pass every
        `FolderOptions.interval_s`.

        Args:
            told: called after each pass, and each look at paths that the system has named.

        Raises: as `sync`.
        """
        if isinstance(db, perco.aio.Database):
            await perco.aio.calling.ask_for(db, self._watch, told)
        else:
            await self._watch(db, told)

    async def _watch(self, db: Database, told: Callable[[Synced], object]) -> None:
        turns = _Turns()
        errors: list[Exception] = []

        async def until_it_fails(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except Exception as error:
                errors.append(error)
                nursery.cancel_scope.cancel()

        await trio.to_thread.run_sync(self._must_be_there)
        nursery: trio.Nursery
        ahead = partial(self._read_ahead, turns)
        async with noticed(self.path, ahead) as notices, trio.open_nursery() as nursery:
            every_s = self.options.interval_s if notices is None else self.options.rescan_s
            nursery.start_soon(until_it_fails, partial(self._sync_every, every_s, db, turns, told))
            if notices is not None:
                nursery.start_soon(until_it_fails, partial(self._follow, db, notices, turns, told))
        if errors:
            raise errors[0]

    async def _sync_every(self, seconds: float, db: Database, turns: _Turns, told: Callable[[Synced], object]) -> None:
        while True:
            told(await self._sync(db, turns))
            await trio.sleep(seconds)

    async def _follow(
        self, db: Database, notices: Notices[_Ahead], turns: _Turns, told: Callable[[Synced], object]
    ) -> None:
        while True:
            synced = await self._sync_some(db, await notices.take(), turns)
            if synced.anything or synced.skipped:
                told(synced)

    # ------------------------------------------------------------ a pass

    async def _sync(self, db: Database, turns: _Turns | None = None) -> Synced:
        turns = turns or _Turns()
        synced = Synced()
        files = {file.key: file for file in await trio.to_thread.run_sync(self._listed)}
        gone: list[str] = []
        async with db.snapshot() as snap:
            async for row in snap.scan(self._table, prefix=self.prefix or None, columns=[self._state]):
                file = files.get(row.key)
                if file is None:
                    gone.append(row.key)
                elif row[self._state] == file.stamp.packed():
                    del files[row.key]
                    synced.same += 1
                if len(gone) == _ROWS_AT_ONCE:
                    await self._remove(db, gone, turns, synced)
                    gone = []
        await self._remove(db, gone, turns, synced)
        for some in _portions(files.values()):
            async with turns.lock:
                await self._take(db, await turns.look(self._read_all, some), synced)
        return synced

    async def _sync_some(self, db: Database, paths: dict[str, _Ahead | None], turns: _Turns) -> Synced:
        """Look at these files, and at all files below these folders."""
        synced = Synced()
        async with turns.lock:
            ahead: list[_Change | Skipped] = [
                each.change for each in paths.values() if each is not None and each.reads == turns.reads
            ]
            if len(ahead) == len(paths):
                await self._take(db, ahead, synced)
                return synced
            files, others, read, rest = await turns.look(self._look_and_read, paths)
            await self._take(db, read, synced)
            for some in rest:
                await self._take(db, await turns.look(self._read_all, some), synced)
        listed = {file.key for file in files}
        gone: list[str] = []
        async with db.snapshot() as snap:
            for key in others:  # no files any more, or folders
                if await snap.get(self._state, key) is not None:
                    gone.append(key)
                rows = snap.scan(self._table, prefix=f"{key}/", columns=[self._state])
                gone += [row.key async for row in rows if row.key not in listed]
        for start in range(0, len(gone), _ROWS_AT_ONCE):
            await self._remove(db, gone[start : start + _ROWS_AT_ONCE], turns, synced)
        return synced

    async def _take(self, db: Database, read: list[_Change | Skipped], synced: Synced) -> None:
        """Write what was read of files."""
        changes: list[_Change] = []
        for each in read:
            synced.read += 1
            if isinstance(each, _Change):
                changes.append(each)
                continue
            synced.skipped.append(each)
            if not each.kept:
                changes.append(_Change(each.key, None, None))
        await self._write(db, changes, synced)

    async def _remove(self, db: Database, keys: list[str], turns: _Turns, synced: Synced) -> None:
        """Remove the rows of files that are not there."""
        if keys:
            async with turns.lock:
                gone = await turns.look(self._gone, keys)
                await self._write(db, [_Change(key, None, None) for key in gone], synced)

    async def _write(self, db: Database, changes: list[_Change], synced: Synced) -> None:
        if changes:
            added, changed, removed, same = await db.run(self._put, changes)
            synced.added, synced.changed = synced.added + added, synced.changed + changed
            synced.removed, synced.same = synced.removed + removed, synced.same + same

    async def _put(self, txn: Transaction, changes: list[_Change]) -> tuple[int, int, int, int]:
        """Write changes. Returns how many rows are new, changed, gone and the same."""
        there = await txn.get_many(self.content, [change.key for change in changes])
        states = await txn.get_many(self._state, [change.key for change in changes])
        counts = [0, 0, 0, 0]
        for key, content, state in changes:
            if content is None:
                counts[2] += there[key] is not None
            else:
                counts[0 if there[key] is None else 3 if there[key] == content else 1] += 1
            _set(txn, self.content, key, there[key], content)
            _set(txn, self._state, key, states[key], state)
        return counts[0], counts[1], counts[2], counts[3]

    # ------------------------------------------------------------ files; called in threads

    def _must_be_there(self) -> None:
        if not self.path.is_dir():
            raise UsageError(f"there is no folder {str(self.path)!r}: its rows stay as they are")

    def _listed(self) -> list[_File]:
        """All files that match. Raises: UsageError if the folder is not there."""
        self._must_be_there()
        return self._files(self._walk(str(self.path), ""))

    def _files(self, found: Iterable[tuple[str, str, _Stamp]]) -> list[_File]:
        now = time.time_ns()
        return [
            _File(self.prefix + below, path, stamp, now - max(stamp.modified_ns, stamp.changed_ns) < _FRESH_NS)
            for below, path, stamp in found
        ]

    def _read_ahead(self, turns: _Turns, path: str) -> _Ahead | None:
        """Read the file at a path, if it is there, matches and is small. In watchdog's thread."""
        reads = turns.reads
        try:
            found = self._one(self._below(path))
        except (OSError, ValueError):  # who looks in its turn says why
            return None
        if found is None or found[2].size > _AHEAD_BYTES:
            return None
        change = self._read(*self._files([found]))
        return _Ahead(change, reads) if isinstance(change, _Change) else None

    def _look_and_read(
        self, paths: Iterable[str]
    ) -> tuple[list[_File], list[str], list[_Change | Skipped], Iterator[list[_File]]]:
        """The results of `_look`, the first portion of the files as read, and the other portions. One thread does both,
        because the switch to a thread takes longer than reading a file. Raises: as `_listed`."""
        files, others = self._look(paths)
        portions = _portions(files)
        return files, others, self._read_all(next(portions, [])), portions

    def _look(self, paths: Iterable[str]) -> tuple[list[_File], list[str]]:
        """The files that match, of those at these paths or below; and the keys of paths at which there is no file that
        matches. Raises: as `_listed`."""
        self._must_be_there()
        found: dict[str, tuple[str, str, _Stamp]] = {}
        others: list[str] = []
        for path in paths:
            below = self._below(path)
            if below == ".":
                continue  # changes in the folder have notices of their own
            if (file := self._one(below)) is not None:
                found[below] = file
            if file is None or path.endswith(os.sep):  # a file may have taken a folder's place
                if self._no_key(self.prefix + below) is None:
                    others.append(self.prefix + below)
                place = path.rstrip(os.sep)
                if self._may_be(below) and os.path.isdir(place) and not os.path.islink(place):
                    found |= {each[0]: each for each in self._walk(place, f"{below}/")}
        return self._files(found.values()), others

    def _gone(self, keys: list[str]) -> list[str]:
        """Those of these rows that have no file."""
        self._must_be_there()
        return [key for key in keys if self._one(key[len(self.prefix) :]) is None]

    def _below(self, path: str) -> str:
        """The path below the folder, with "/"; ".": the folder itself. Raises: ValueError for one that is elsewhere."""
        root = f"{self.path}{os.sep}"
        if path.startswith(root) and os.sep == "/":  # a quarter of the time of the general way
            return path[len(root) :].rstrip("/") or "."
        return Path(path).relative_to(self.path).as_posix()

    def _one(self, below: str) -> tuple[str, str, _Stamp] | None:
        """The file at this path below the folder, if `_walk` would find it."""
        if not self._matches(below.rpartition("/")[2], below) or not self._may_be(below):
            return None
        path = os.path.join(self.path, below)
        try:
            stat = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (below, path, _stamp(stat)) if S_ISREG(stat.st_mode) else None

    def _may_be(self, below: str) -> bool:
        """Whether the folders on the way to a path are walked, and its own name is taken."""
        parts = below.split("/")
        if not self.options.hidden and any(part.startswith(".") for part in parts):
            return False
        return not any(os.path.islink(os.path.join(self.path, *parts[:n])) for n in range(1, len(parts)))

    def _walk(self, folder: str, below: str) -> Iterator[tuple[str, str, _Stamp]]:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            return  # it went meanwhile
        for entry in entries:
            if entry.name.startswith(".") and not self.options.hidden:
                continue
            path = f"{below}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(entry.path, f"{path}/")
            elif self._matches(entry.name, path):
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if S_ISREG(stat.st_mode):
                    yield path, entry.path, _stamp(stat)

    def _matches(self, name: str, path: str) -> bool:
        return any(fnmatch.fnmatchcase(name, each) or fnmatch.fnmatchcase(path, each) for each in self._match)

    def _read_all(self, files: list[_File]) -> list[_Change | Skipped]:
        return [self._read(file) for file in files]

    def _no_key(self, key: str) -> str | None:
        """Why a path cannot be the key of a row, if it cannot."""
        try:
            self._table.row(key)
        except (PercoError, ValueError) as error:
            return str(error)
        return None

    def _read(self, file: _File) -> _Change | Skipped:
        if file.stamp.size > self.options.bytes_max:
            return Skipped(file.key, f"it has more than {self.options.bytes_max} bytes", False)
        if (reason := self._no_key(file.key)) is not None:
            return Skipped(file.key, f"its path is no key: {reason}", True)
        try:
            with open(file.path, "rb", opener=_open) as opened:
                data = opened.read(self.options.bytes_max + 1)
                stat = os.fstat(opened.fileno())
        except OSError as error:
            return Skipped(file.key, f"it cannot be read: {error.strerror}", True)
        if (stat.st_size, stat.st_mtime_ns, stat.st_ino) != (file.stamp.size, file.stamp.modified_ns, file.stamp.inode):
            return Skipped(file.key, "it has changed while it was read", True)
        content: Any = data
        if self.content.codec is TEXT:
            try:
                content = data.decode()
            except UnicodeDecodeError:
                return Skipped(file.key, "it is not UTF-8 text", False)
        return _Change(file.key, content, b"" if file.fresh else file.stamp.packed())


def _open(path: str, flags: int) -> int:
    """Open a file, and never wait: it may have become a named pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _stamp(stat: os.stat_result) -> _Stamp:
    return _Stamp(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def _portions(files: Iterable[_File]) -> Iterator[list[_File]]:
    """Files that are read and written together."""
    some: list[_File] = []
    size = 0
    for file in files:
        if some and (len(some) == _ROWS_AT_ONCE or size + file.stamp.size > _BYTES_AT_ONCE):
            yield some
            some, size = [], 0
        some.append(file)
        size += file.stamp.size
    if some:
        yield some


def _set(txn: Transaction, column: Column[str, Any], key: str, there: Any, value: Any) -> None:
    if value is None and there is not None:
        txn.delete(column, key)
    elif value is not None and value != there:
        txn.set(column, key, value)
