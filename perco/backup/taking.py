"""Takes a backup of a store in a folder, beside the process that owns it.

    taken = await take("web/", "backups/", BackupOptions(), tell)

This process opens the tablets' files for reading, and asks the owner to park its writers. Meanwhile it begins a read
transaction in each tablet, which takes microseconds, and finds out which tablets there are. Then the writers go on, and
this process copies the pages that those transactions see; the owner does not reuse them before the transactions end
(S3). If no process has the store open, this one owns it until the transactions have begun.

B1  All read transactions begin while all writers are parked (`parking.py`), or while this process owns the store.
B2, B3  See `layout.py`. A page in use is stored unless the base has a page with its number and its digest.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import trio

from perco.backup.chains import base_for_more, indexes_of
from perco.backup.layout import INDEX, MANIFEST, PAGES, Index, Manifest, TabletFiles, Used, digest
from perco.backup.owners import Moment, Owner, Parked
from perco.backup.places import (
    FILE_SUFFIX,
    FileMaking,
    Folder,
    FolderMaking,
    Making,
    Place,
    absolute,
    make_folder,
)
from perco.clock.oracle import BOUND_ROW
from perco.errors import (
    BackupDamaged,
    Corruption,
    StoreError,
    Unavailable,
    UnsuitableFolder,
    UsageError,
    must_be_number,
)
from perco.schema.catalogue import CATALOGUE_ROW, SYSTEM_TABLE, Catalogue
from perco.schema.marker import MARKER_TS, refusal, unpack_marker
from perco.storage import DATA, LOCK, PENDING, SHARED, TS_MAX
from perco.storage.folder import tablet_path
from perco.storage.identity import identity_of
from perco.storage.keys import cell_key, escape, split_key
from perco.storage.pages import PageDamaged, Unit
from perco.storage.pinned import PinnedFile

log: logging.Logger = logging.getLogger("perco.backup")

_TRIES: Final = 8
_TOLD_BYTES: Final = 8 << 20  # between two reports
_SLICE_S: Final = 0.05  # the work between two pauses


@dataclass(frozen=True, kw_only=True, slots=True)
class BackupOptions:
    """How a backup is taken.

    Attributes:
        full: store every page, even if the folder has backups of this store.
        bytes_per_s: how fast pages are read, at most, while another process has the store open; 0: no limit.
    """

    full: bool = False
    bytes_per_s: int = 64 << 20

    def __post_init__(self) -> None:
        must_be_number("bytes_per_s", self.bytes_per_s)


@dataclass(slots=True)
class Progress:
    """`done`, `total`: bytes of pages that have been read, and that there are about; `stored`: of those, how many are
    new."""

    done: int = 0
    total: int = 0
    stored: int = 0


Tell = Callable[[Progress], None]


async def take(store: str, to: str, options: BackupOptions, tell: Tell = lambda progress: None) -> Manifest:
    """Take a backup.

    Args:
        store: the store's folder.
        to: a folder of backups, made if there is none; or a path that ends with .tar, for a file with one full backup.
        tell: called periodically.

    Raises: UsageError, UnsuitableFolder, FormatUnknown, CopiedWhileOpen, NeedsCheck, StoreFull, StoreLocked,
    Unavailable, Corruption.
    """
    source, target = absolute(store), absolute(to)
    if target == source or source in target.parents:
        raise UsageError(f"{target} lies in the store: a backup there would be lost with it")
    owner = Owner(source)
    owner.look()
    with ExitStack() as stack:
        folder = None if target.name.endswith(FILE_SUFFIX) else make_folder(target)
        if folder is not None:
            stack.enter_context(folder.locked())
        pinned = stack.enter_context(await _pinned(source, owner.parked))
        taken = time.time()
        making: Making
        if folder is None:
            base: list[Manifest] = []
            name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(taken))}-1"
            making = FileMaking(target, name)
        else:
            base = [] if options.full else _base_of(folder, pinned)
            name = folder.next_name(taken)
            making = FolderMaking(folder, name)
        try:
            moment, bound = pinned.moment, pinned.newest(BOUND_ROW)[0]
            job = _Job(pinned, making, folder, base, _Pace(0 if owner.alone else options.bytes_per_s), tell)
            files = await job.run()
            manifest = Manifest(
                name,
                base[-1].name if base else "",
                pinned.store,
                str(source),
                min(moment.settled, bound, pinned.oldest_lock() - 1),
                min(moment.last, bound),
                bound,
                taken,
                version("perco"),
                tuple(files),
            )
            with making.file(MANIFEST) as file:
                file.write(manifest.pack())
            making.finish()
        except BaseException:
            making.abandon()
            raise
        return manifest
    raise AssertionError


def _base_of(folder: Folder, pinned: _Pinned) -> list[Manifest]:
    """The newest backup of this store, and those below it; empty: there is none, or it is damaged."""
    for name in reversed(folder.names()):
        try:
            chain = base_for_more(folder, name)
        except BackupDamaged as error:
            log.warning("the last backup is damaged, so this one is full: %s: %s", error.where, error.what)
            return []
        sizes = {(files.table, files.number): files.page for files in chain[-1].tablets}
        if chain[-1].store == pinned.store:
            same = all(sizes.get(where, each.file.page) == each.file.page for where, each in pinned.tablets.items())
            return chain if same else []  # a file that was rewritten on another machine has other pages
        raise UsageError(
            f"{folder.path} has backups of another store, which was at {chain[-1].path}. Give each store a folder of "
            "its own for its backups"
        )
    return []


# ------------------------------------------------------------ one state of all tablets


class _Tablet(NamedTuple):
    table: str
    number: int
    file: PinnedFile


class _Pinned:
    """Read transactions in all tablets of a store, as of one moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tablets: dict[tuple[str, int], _Tablet] = {}
        self.moment = Moment(0, 0)
        self.catalogue = Catalogue()
        self.store = ""

    def __enter__(self) -> _Pinned:
        return self

    def __exit__(self, *_: object) -> None:
        for tablet in self.tablets.values():
            tablet.file.close()

    def open(self, table: str, number: int) -> bool:
        """Open a tablet's file, unless the newest of its files is open. Returns whether there is one."""
        path = tablet_path(self.path, table, number)
        known = self.tablets.get((table, number))
        try:
            if known is not None:
                if known.file.inode == (path / "data.mdb").stat().st_ino:
                    return True
                self.tablets.pop((table, number)).file.close()
            self.tablets[table, number] = _Tablet(table, number, PinnedFile(path))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UnsuitableFolder(str(path), error.strerror or str(error)) from error
        return True

    def open_all(self, catalogue: Catalogue) -> None:
        for table, number in _tablets_of(catalogue):
            self.open(table, number)

    def begin(self) -> bool:
        """Begin all transactions. Returns whether the files that are open are all that the catalogue has, as of these
        transactions."""
        for tablet in self.tablets.values():
            tablet.file.begin()
        self.catalogue = self._read_catalogue()
        wanted = _tablets_of(self.catalogue)
        for where in wanted:
            path = tablet_path(self.path, *where) / "data.mdb"
            there = path.stat().st_ino if path.exists() else 0
            if where in self.tablets and there != self.tablets[where].file.inode:
                return False  # it has been compacted meanwhile (P6)
            if where not in self.tablets and there:
                return False
        for where in self.tablets.keys() - set(wanted):
            self.tablets.pop(where).file.close()
        return True

    def end(self) -> None:
        for tablet in self.tablets.values():
            tablet.file.end()

    def _read_catalogue(self) -> Catalogue:
        system = self.tablets[SYSTEM_TABLE, 0]
        prefix = escape(CATALOGUE_ROW)
        for key, value in system.file.cells(DATA, cell_key(prefix, 0, TS_MAX)):
            row, _, ts = split_key(key)
            if row != prefix:
                break
            if ts == MARKER_TS:
                kind, other, _ = unpack_marker(value)
                raise StoreError(f"{self.path} {refusal(kind, other)}: it is not backed up")
            return Catalogue.unpack(value)
        return Catalogue()

    def newest(self, row: bytes) -> tuple[int, bytes]:
        """The newest cell of a row of the system table: its timestamp and its value; (0, b"") if there is none."""
        system, prefix = self.tablets[SYSTEM_TABLE, 0], escape(row)
        for key, value in system.file.cells(DATA, cell_key(prefix, 0, TS_MAX)):
            found, _, ts = split_key(key)
            return (ts, value) if found == prefix else (0, b"")
        return 0, b""

    def oldest_lock(self) -> int:
        """The oldest start timestamp of a transaction that has a lock or a pending entry; TS_MAX: there is none."""
        oldest = TS_MAX
        for tablet in self.tablets.values():
            for group in (LOCK, SHARED, PENDING):
                for key, _ in tablet.file.cells(group, b""):
                    oldest = min(oldest, split_key(key)[2])
        return oldest


def _tablets_of(catalogue: Catalogue) -> list[tuple[str, int]]:
    found = [(name, number) for name, entry in catalogue.tables.items() for number, _, _ in entry.tablets()]
    return [(SYSTEM_TABLE, 0), *found]


async def _pinned(path: Path, parked: Parked) -> _Pinned:
    """Begin the transactions (B1). Raises: UsageError, Unavailable, Corruption."""
    pinned = _Pinned(path)
    try:
        if not pinned.open(SYSTEM_TABLE, 0):
            raise UsageError(f"there is no store at {path}")
        for _ in range(_TRIES):
            pinned.tablets[SYSTEM_TABLE, 0].file.begin()
            catalogue = pinned._read_catalogue()
            pinned.end()
            pinned.open_all(catalogue)  # outside of the moment, because it takes milliseconds
            try:
                async with parked() as moment:
                    whole = pinned.begin()
                    pinned.moment = moment
            except Unavailable:
                pinned.end()
                continue
            if whole:
                if not pinned.catalogue.version:
                    raise UsageError(f"there is no store at {path}")
                pinned.store = identity_of(path).id
                return pinned
            pinned.end()
    except BaseException:
        pinned.__exit__()
        raise
    pinned.__exit__()
    raise Unavailable("taking one state of all tablets", remedy="The store's owner is very busy. Try again.")


# ------------------------------------------------------------ the pages


class _Pace:
    """Keeps to a number of bytes a second; 0: as fast as it can."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s, self._bytes = bytes_per_s, 0
        self._began = self._paused = trio.current_time()

    async def read(self, size: int) -> None:
        """Wait, after so many bytes have been read."""
        self._bytes += size
        now = trio.current_time()
        ahead_s = self._bytes / self._bytes_per_s - (now - self._began) if self._bytes_per_s else 0.0
        if ahead_s > _SLICE_S or now - self._paused > _SLICE_S:
            await trio.sleep(max(0.0, ahead_s))
            self._paused = trio.current_time()


class _Job:
    """Stores the pages of all tablets."""

    def __init__(
        self, pinned: _Pinned, making: Making, folder: Place | None, base: list[Manifest], pace: _Pace, tell: Tell
    ) -> None:
        self._pinned, self._making, self._folder, self._base = pinned, making, folder, base
        self._pace, self._tell = pace, tell
        self._progress = Progress(total=sum(each.file.total * each.file.page for each in pinned.tablets.values()))
        self._told = 0

    async def run(self) -> list[TabletFiles]:
        names: set[str] = set()
        return [await self._one(tablet, _name_of(tablet, names)) for tablet in self._pinned.tablets.values()]

    async def _one(self, tablet: _Tablet, name: str) -> TabletFiles:
        pinned = tablet.file
        total = pinned.total
        index, before, now = Index(pinned.page, total, pinned.meta), self._used(tablet), Used()
        for used in (before, now):
            used.grow(total)
        count = 0
        with self._making.file(f"{name}{PAGES}") as file:
            try:
                for found in pinned.units():
                    for unit in found:
                        count += 1
                        known = digest(unit.data)
                        now.put(unit.number, known)
                        if before.get(unit.number) != known:
                            file.write(unit.data)
                            index.stored.append((unit.number, len(unit.data) // pinned.page, known))
                            self._progress.stored += len(unit.data)
                    await self._read(found)
            except PageDamaged as error:
                raise Corruption(
                    str(tablet_path(self._pinned.path, tablet.table, tablet.number)), str(error)
                ) from error
            size = file.size
        index.gone = [number for number in before.numbers() if now.get(number) is None]
        packed = index.pack()
        with self._making.file(f"{name}{INDEX}") as file:
            file.write(packed)
        stored = len(index.stored)
        return TabletFiles(
            *(tablet.table, tablet.number, name, pinned.page, count, stored, size + len(packed)),
            *(digest(packed).hex(), now.state()),
        )

    async def _read(self, found: list[Unit]) -> None:
        size = sum(len(unit.data) for unit in found)
        self._progress.done += size
        if self._progress.done - self._told >= _TOLD_BYTES:
            self._told = self._progress.done
            self._tell(self._progress)
        await self._pace.read(size)

    def _used(self, tablet: _Tablet) -> Used:
        """The pages that the base has of a tablet."""
        used = Used()
        if self._folder is not None:
            for _, _, index in indexes_of(self._folder, self._base, tablet.table, tablet.number):
                used.apply(index)
        return used


def _name_of(tablet: _Tablet, names: set[str]) -> str:
    """A name for a tablet's files, which says which tablet it is as far as file names can."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", tablet.table)[:80]
    name = f"{plain}-{tablet.number}"
    while name in names:
        name += "_"
    names.add(name)
    return name
