"""Restores a store from a backup, into a new folder.

    restored = await restore("backups/", "web-again/", RestoreOptions(at=ts), tell)

B4  The new store appears, under its name, when it is whole and on disk. The digest of every page is verified.
B5  Its oracle goes on far above every timestamp that the store can have handed out since the backup (O1). So a sink,
    or a reader of changes, that remembers a timestamp never meets it again with another meaning.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import trio

from perco.backup.chains import indexes_of, pages_of
from perco.backup.layout import Index, Manifest, TabletFiles
from perco.backup.places import Place, absolute, chain_of, open_place, sync_folder, unwritable
from perco.backup.trimming import trim
from perco.clock.lost import SKIPPED, Lost, lost_row
from perco.clock.oracle import bound_row, durable_bound
from perco.errors import UsageError
from perco.schema.catalogue import SYSTEM_TABLE, raise_for
from perco.storage import APPLIED, BatchOptions, LmdbOptions, Mutation
from perco.storage.folder import make_store, tablet_path
from perco.storage.pages import meta_pages
from perco.tablets.local import LocalStore

_TOLD_BYTES: Final = 4 << 20  # between two reports
_MAKING: Final = ".restoring"
TIMESTAMPS_PER_S: Final = 1_000_000
"""The new store skips `SKIPPED` timestamps, and so many more for each second since the backup. A bulk load skips 2^31
(P7), and there are 2^53 in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreOptions:
    """Which state of the store to restore.

    Attributes:
        name: of the backup; "": the newest.
        at: restore the store as of this timestamp, or aware time, which the backup's history has; None: as it was at
            the moment of the backup.
    """

    name: str = ""
    at: int | datetime | None = None

    def __post_init__(self) -> None:
        naive = isinstance(self.at, datetime) and self.at.tzinfo is None
        if naive or isinstance(self.at, bool) or not isinstance(self.at, int | datetime | None):
            raise UsageError(f"a store is restored as of a timestamp, or of an aware datetime, not {self.at!r}")


Tell = Callable[[int, int], None]
"""Called with the bytes that have been written, and those that there are in all."""


async def restore(backups: str, store: str, options: RestoreOptions, tell: Tell = lambda done, total: None) -> Manifest:
    """Restore a backup into a new folder. Returns what the backup is.

    Raises: UsageError, FormatUnknown, Corruption, StoreFull, UnsuitableFolder.
    """
    place, target = open_place(backups), absolute(store)
    chain = chain_of(place, chosen(place, options.name))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists: a backup is restored into a new folder. Move the old store away first")
    making = target.with_name(target.name + _MAKING)
    try:
        shutil.rmtree(making, ignore_errors=True)  # of a process that was stopped
        making.mkdir(parents=True)
        await trio.to_thread.run_sync(_write, place, chain, making, tell, abandon_on_cancel=False)
        manifest = chain[-1]
        at, kept = options.at, manifest.at
        if isinstance(at, datetime) and at.timestamp() >= manifest.time:
            at = kept  # the clock's notes may not reach up to the backup (O3)
        if at is not None:
            kept = await trim(str(making), at, manifest.at)
        await _settle(making, manifest, kept)
        os.rename(making, target)  # it may replace an empty folder
        sync_folder(target.parent)
    except OSError as error:
        shutil.rmtree(making, ignore_errors=True)
        raise unwritable(making, error) from error
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    return chain[-1]


async def _settle(making: Path, manifest: Manifest, kept: int) -> None:
    """Have the new store go on above all timestamps of the old one (B5). `kept`: the last one that it has kept."""
    local = LocalStore(
        str(making), durable=True, readonly=False, accept_loss=False, lmdb=LmdbOptions(), batch=BatchOptions()
    )
    try:
        old = await durable_bound(local.store)
        new = old + SKIPPED + int(max(0.0, time.time() - manifest.time) * TIMESTAMPS_PER_S)
        rows = (bound_row(old, new), lost_row(Lost(kept, new, manifest.store)))
        [verdict] = await local.store.apply([Mutation(SYSTEM_TABLE, rows, None, True)])
        if verdict is not APPLIED:
            raise_for(verdict, "the restored store's timestamps")
    finally:
        with trio.CancelScope(shield=True):
            await local.aclose()


def chosen(place: Place, name: str) -> str:
    """The name of a backup; of the newest, for "". Raises: UsageError: there is none."""
    names = place.names()
    if not names:
        raise UsageError(f"there is no finished backup in {place.path}")
    if name and name not in names:
        raise UsageError(f"there is no backup {name!r} in {place.path}; there are: {', '.join(names)}")
    return name or names[-1]


def _write(place: Place, chain: list[Manifest], making: Path, tell: Tell) -> None:
    total = sum(manifest.size for manifest in chain)
    done = told = 0
    make_store(making)
    for tablet in chain[-1].tablets:
        path = tablet_path(making, tablet.table, tablet.number)
        path.mkdir(parents=True)
        writing = TabletWriting(place, chain, tablet, path / "data.mdb")
        for size in writing.steps():
            done += size
            if done - told >= _TOLD_BYTES:
                trio.from_thread.check_cancelled()
                tell(done, total)
                told = done
        sync_folder(path)
    sync_folder(making / "tablets")
    sync_folder(making)


class TabletWriting:
    """Puts a tablet's file together from the backups that have its pages."""

    def __init__(self, place: Place, chain: list[Manifest], tablet: TabletFiles, path: Path) -> None:
        self._place, self._chain, self._tablet, self._path = place, chain, tablet, path

    def steps(self) -> Iterator[int]:
        """Do it; yields how many bytes each page had. Raises: Corruption, OSError."""
        with open(self._path, "xb", buffering=0) as file:
            for index, number, data in pages_of(self._place, self._chain, self._tablet):
                os.pwrite(file.fileno(), data, number * index.page)
                yield len(data)
            *_, (_, _, last) = indexes_of(self._place, self._chain, self._tablet.table, self._tablet.number)
            self.finish(file.fileno(), last)

    def finish(self, file: int, last: Index) -> None:
        """Write the meta pages; sync. Raises: OSError."""
        os.ftruncate(file, last.total * last.page)
        for number, page in enumerate(meta_pages(last.meta)):
            os.pwrite(file, page, number * last.page)
        os.fsync(file)
