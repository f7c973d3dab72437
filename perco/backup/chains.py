"""Reads a tablet's pages from a backup and from those that it needs (B2).

B4  The digest of each page is compared, and that of all pages of the tablet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perco.backup.layout import INDEX, PAGES, Index, Manifest, TabletFiles, Used, digest
from perco.backup.places import Folder, Place, chain_of
from perco.errors import BackupDamaged


def indexes_of(
    place: Place, chain: Sequence[Manifest], table: str, number: int
) -> Iterator[tuple[Manifest, TabletFiles, Index]]:
    """A tablet's index in each backup of a chain that has the tablet. Raises: BackupDamaged."""
    for manifest in chain:
        for files in manifest.tablets:
            if (files.table, files.number) == (table, number):
                with place.open(manifest.name, f"{files.name}{INDEX}") as part:
                    data = part.read(0, part.size)
                where = f"{place.path}, backup {manifest.name}, {files.name}{INDEX}"
                yield manifest, files, Index.unpack(where, data, files.index)


def restorable(folder: Folder, name: str) -> list[Manifest]:
    """A backup's chain, of which all manifests are there, and no check has found one damaged. Raises: BackupDamaged."""
    chain = chain_of(folder, name)
    for manifest in chain:
        if why := folder.mark_of(manifest.name):
            raise BackupDamaged(f"{folder.path}, backup {manifest.name}", f"it was found damaged ({why})")
    return chain


def base_for_more(folder: Folder, name: str) -> list[Manifest]:
    """`restorable`, for a new backup to be based on: the files are there, too, and their indexes are right. Their pages
    are not read. Raises: BackupDamaged."""
    chain = restorable(folder, name)
    for tablet in chain[-1].tablets:
        for manifest, files, index in indexes_of(folder, chain, tablet.table, tablet.number):
            with folder.open(manifest.name, f"{files.name}{PAGES}") as part:
                if part.size != (wanted := files.size - len(index.pack())):
                    where = f"{folder.path}, backup {manifest.name}, {files.name}{PAGES}"
                    raise BackupDamaged(where, f"it has {part.size} bytes, and was written with {wanted}")
    return chain


def pages_of(place: Place, chain: Sequence[Manifest], tablet: TabletFiles) -> Iterator[tuple[Index, int, bytes]]:
    """The pages of a tablet: those of the full backup first, each to be replaced with later ones of the same number.
    Yields also the index in the backup that they are in. Raises: BackupDamaged, at the end also for what is missing."""
    used = Used()
    for manifest, files, index in indexes_of(place, chain, tablet.table, tablet.number):
        used.apply(index)
        where, at = f"{place.path}, backup {manifest.name}, {files.name}{PAGES}", 0
        with place.open(manifest.name, f"{files.name}{PAGES}") as part:
            for number, count, wanted in index.stored:
                data = part.read(at, count * index.page)
                if digest(data) != wanted:
                    raise BackupDamaged(where, f"the page at byte {at} is not what was written: its digest differs")
                yield index, number, data
                at += len(data)
    if used.state() != tablet.state:
        raise BackupDamaged(f"{place.path}, table {tablet.table!r}", "the digest of its pages differs")
