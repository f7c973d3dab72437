"""The token that a client on TCP must present: a random string in a file in the store's folder. Only the store's user
can read this file.

Clients that the same user runs on the same machine find the token by the server's port, in another folder of that user.
All other clients must be given the token.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from perco.errors import UnsuitableFolder
from perco.rpc.addresses import Address

TOKEN_FILE: Final = "token"
_BYTES: Final = 24


def token_of(folder: Path) -> bytes:
    """Return the store's token; make one if there is none yet.

    Raises: UnsuitableFolder, if other users can read the token, or if it is empty, or cannot be made or read.
    """
    path = folder / TOKEN_FILE
    try:
        with contextlib.suppress(FileExistsError):
            _write(path, secrets.token_hex(_BYTES).encode())
        if path.stat().st_mode & 0o077:
            raise UnsuitableFolder(str(path), "other users can read the store's token: chmod 600 it, or delete it")
        token = path.read_bytes().strip()
    except OSError as error:
        raise UnsuitableFolder(str(path), f"the store's token cannot be used: {error.strerror or error}") from error
    if not token:
        raise UnsuitableFolder(str(path), "the store's token is empty; delete the file, and a new one is made")
    return token


def _write(path: Path, token: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, token)
    finally:
        os.close(handle)


def _known(address: Address) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "perco" / "tokens" / str(address.port)


@contextlib.contextmanager
def told(address: Address, token: bytes) -> Iterator[None]:
    """While the block lasts, let programs of this user `find` the token of the server at an address."""
    path = _known(address)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        _write(path, token)
    except OSError:  # the home directory cannot be written to: clients must be given the token
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find(address: Address) -> bytes:
    """The token of the server at an address, if this user runs that server on this machine; otherwise b""."""
    if address.path is not None or not address.on_this_host:
        return b""
    try:
        return _known(address).read_bytes().strip()
    except OSError:
        return b""
