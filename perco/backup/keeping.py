"""Looks after backups: lists them, verifies them, removes old ones.

B2  A backup is removed only together with all backups that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from perco.backup.layout import PAGES, Index, Manifest, Used, digest
from perco.backup.places import Folder, Place, chain_of
from perco.backup.restoring import index_of
from perco.errors import Corruption, UsageError

Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Kept:
    """A backup in a list. `error`: why it cannot be used; "": it is complete, as far as manifests tell."""

    name: str
    manifest: Manifest | None
    error: str


def kept_in(place: Place) -> list[Kept]:
    """All backups, the oldest first."""
    found: list[Kept] = []
    for name in place.names():
        try:
            chain = chain_of(place, name)
        except Corruption as error:
            found.append(Kept(name, None, str(error)))
        else:
            found.append(Kept(name, chain[-1], ""))
    return found


def verify(place: Place, name: str, tell: Tell = lambda done: None) -> int:
    """Read all that a backup needs, and compare the digests. Returns how many bytes that were. `tell`: called with the
    bytes so far.

    Raises: Corruption.
    """
    chain = chain_of(place, name)
    done = 0
    for tablet in chain[-1].tablets:
        used = Used()
        for manifest in chain:
            for files in manifest.tablets:
                if (files.table, files.number) == (tablet.table, tablet.number):
                    index, used = index_of(place, manifest, files, used)
                    for size in _pages(place, manifest, f"{files.name}{PAGES}", index):
                        done += size
                        tell(done)
        if used.state() != tablet.state:
            raise Corruption(f"{place.path}, backup {name}", f"table {tablet.table!r}: the digest of its pages differs")
    return done


def _pages(place: Place, manifest: Manifest, file: str, index: Index) -> Iterator[int]:
    at = 0
    with place.open(manifest.name, file) as part:
        for number, count, wanted in index.stored:
            data = part.read(at, count * index.page)
            if digest(data) != wanted:
                where = f"{place.path}, backup {manifest.name}, {file}"
                raise Corruption(where, f"page {number}, at byte {at}, is not what was written: its digest differs")
            at += len(data)
            yield len(data)


def prune(folder: Folder, keep: int) -> list[str]:
    """Remove old backups: all but the newest `keep`, and those that these need. Returns the names of the removed.

    Raises: UsageError, StoreLocked, Corruption.
    """
    if keep < 1:
        raise UsageError("at least one backup is kept; to remove all, remove the folder")
    with folder.locked():
        names = folder.names()
        needed = {each.name for name in names[-keep:] for each in chain_of(folder, name)}
        gone = [name for name in names if name not in needed]
        for name in reversed(gone):  # the ones that need others first
            folder.remove(name)
    return gone
