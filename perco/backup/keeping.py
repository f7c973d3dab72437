"""Looks after backups: lists them, verifies them, removes old ones.

B2  A backup is removed only together with all backups that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from perco.backup.chains import pages_of, restorable
from perco.backup.layout import Manifest
from perco.backup.places import Folder, Place, chain_of
from perco.errors import BackupDamaged, UsageError

_TOLD_BYTES: Final = 4 << 20  # between two reports

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
            chain = restorable(place, name) if isinstance(place, Folder) else chain_of(place, name)
        except BackupDamaged as error:
            found.append(Kept(name, None, str(error)))
        else:
            found.append(Kept(name, chain[-1], ""))
    return found


def verify(place: Place, name: str, tell: Tell = lambda done: None) -> int:
    """Read all that a backup needs, and compare the digests. Returns how many bytes that were. In a folder, the result
    is noted, so that no later backup is based on a damaged one. `tell`: called with the bytes so far.

    Raises: BackupDamaged.
    """
    try:
        done = _verified(place, name, tell)
    except BackupDamaged as error:
        if isinstance(place, Folder):
            try:
                place.mark(name, error.what)
            except OSError as failure:
                error.add_note(f"this could not be noted in the folder: {failure}")
        raise
    if isinstance(place, Folder) and place.mark_of(name):
        place.mark(name, "")
    return done


def _verified(place: Place, name: str, tell: Tell) -> int:
    chain = chain_of(place, name)
    done = told = 0
    for tablet in chain[-1].tablets:
        for _, _, data in pages_of(place, chain, tablet):
            done += len(data)
            if done - told >= _TOLD_BYTES:
                tell(done)
                told = done
    return done


def prune(folder: Folder, keep: int) -> list[str]:
    """Remove old backups: keep the newest `keep`, and those that these need. Damaged ones do not count; they go, too,
    once they are older than those that are kept. Returns the names of the removed.

    Raises: UsageError, StoreLocked.
    """
    if keep < 1:
        raise UsageError("at least one backup is kept; to remove all, remove the folder")
    with folder.locked():
        good = [each.name for each in kept_in(folder) if not each.error]
        kept = good[-keep:]
        needed = {each.name for name in kept for each in chain_of(folder, name)}
        names = folder.names()
        older = names[: names.index(kept[0])] if kept else []
        gone = [name for name in names if name not in needed and (name in good or name in older)]
        for name in reversed(gone):  # the ones that need others first
            folder.remove(name)
    return gone
