"""Recognizes a folder that is a plain copy of a store, before any of its data is read.

    identity     the store's id, and the number of this file (its inode), which no copy keeps
    closed       exists while no process has the store open, if the last one closed it cleanly: for each tablet, the
                 last transaction of its file

I1  A folder whose `identity` has another file's number is a copy. If `closed` is there, and names the last transaction
    of every tablet, the copy was made while no process had the store open: it is whole. It becomes a store of its own,
    with a new id. Any other copy may mix pages of different moments, and is not opened.
"""

from __future__ import annotations

import os
import secrets
import warnings
from pathlib import Path
from typing import Final, NamedTuple

from perco.errors import CopiedWhileOpen, PercoWarning
from perco.storage.pages import last_transaction

_IDENTITY: Final = "identity"
_CLOSED: Final = "closed"
_NEW: Final = ".new"
_ID_BYTES: Final = 16


class Identity(NamedTuple):
    """`id`: the store's; "": it has none yet. `copied`: the folder is a copy of that store. `whole`: the copy was made
    while the store was closed."""

    id: str
    copied: bool
    whole: bool

    @property
    def is_torn(self) -> bool:
        """Whether the folder is a copy that may mix pages of different moments."""
        return self.copied and not self.whole


def identity_of(folder: Path) -> Identity:
    """Raises: OSError."""
    try:
        with open(folder / _IDENTITY, errors="replace") as file:
            id, number, *_ = [*file.read().split(), "", ""]
            here = os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return Identity("", False, False)
    copied = number != str(here)
    return Identity(id, copied, copied and _was_closed(folder))


def must_be_whole(folder: Path) -> str:
    """The id of a store that is about to be read. Raises: CopiedWhileOpen, OSError."""
    found = identity_of(folder)
    if found.is_torn:
        raise CopiedWhileOpen(str(folder))
    return found.id


def identify(folder: Path) -> str:
    """The id of a store that is about to be written to; a new one, for a new store and for a copy. From now on, the
    store is not closed. Raises: OSError."""
    id, copied, _ = identity_of(folder)
    if not id or copied:
        former, id = id, put_identity(folder)
        if former:
            text = f"{folder} is a copy of store {former}: from now on, it is a store of its own, {id}"
            warnings.warn(text, PercoWarning, stacklevel=5)
    # If the power fails now, and `closed` is back, nothing has been written, or the tablets have other transactions.
    (folder / _CLOSED).unlink(missing_ok=True)
    return id


def put_identity(folder: Path, id: str = "") -> str:
    """Give a folder an id: a new one, by default. Returns it. Raises: OSError."""
    id = id or secrets.token_hex(_ID_BYTES)
    new = folder / f"{_IDENTITY}{_NEW}"
    with open(new, "w") as file:
        file.write(f"{id}\n{os.fstat(file.fileno()).st_ino}\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _IDENTITY)
    return id


def mark_closed(folder: Path, tablets: list[Path]) -> None:
    """Note that the store has been closed. Raises: OSError."""
    new = folder / f"{_CLOSED}{_NEW}"
    new.write_text("".join(f"{last_transaction(path / 'data.mdb')} {path.name}\n" for path in sorted(tablets)))
    new.replace(folder / _CLOSED)


def _was_closed(folder: Path) -> bool:
    try:
        lines = (folder / _CLOSED).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return False
    told = {name: number for number, _, name in (line.partition(" ") for line in lines)}
    there = {path.parent.name: str(last_transaction(path)) for path in folder.glob("tablets/*/data.mdb")}
    return told == there
