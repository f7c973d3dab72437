"""Looks after backups: lists them, verifies them, removes old ones.

B2  A backup is removed only together with all backups that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from perco.backup.chains import pages_of
from perco.backup.layout import Manifest
from perco.backup.places import Folder, Place, chain_of
from perco.errors import Corruption, UsageError

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
    done = told = 0
    for tablet in chain[-1].tablets:
        for _, _, data in pages_of(place, chain, tablet):
            done += len(data)
            if done - told >= _TOLD_BYTES:
                tell(done)
                told = done
    return done


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
