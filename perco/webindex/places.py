"""Where a web index is: the search index is in a folder; the rows are in the same folder, or at an address.

If the rows are at an address, the folder and the rows name each other: the folder has a file with the address and a
number, and the rows have the same number. So perco never uses a search index with rows that it was not made from: not
after a backup of the folder was restored, not after the rows were dropped and loaded again, and not after another
folder took this folder's place.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import trio

import perco
from perco.webindex.index import WebIndex

SEARCH_FILE: Final = "search.sqlite"
ROWS_FILE: Final = "rows"
IN_FOLDER: Final = 1  # `Rows.home` of every web index whose rows are in its folder
_HOME: Final = "search folder"  # the row that names the folder, if the rows are not in it
_AGAIN: Final = 20  # how many times to look at the folder's file while another process may be writing it
_AGAIN_S: Final = 0.1
_SCHEMES: Final = ("postgresql://", "bigtable://", "tcp://", "tls://", "unix:")


@dataclass(frozen=True, slots=True)
class Rows:
    """Attributes: `address`: what `perco.open` takes; `home`: the number that the rows and the folder both have."""

    address: str
    home: int

    @property
    def shown(self) -> str:
        """The address without a password."""
        return re.sub(r"(//[^:/@]*):[^/@]*@", r"\1@", self.address)


def search_path(store: Path) -> Path:
    """The file of a store's search index."""
    return store / SEARCH_FILE


def rows_of(store: Path) -> Rows:
    """Where the rows of a web index are. Raises: UsageError."""
    path = store / ROWS_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        text = ""
    if not text:
        return Rows(str(store), IN_FOLDER)
    try:
        found = json.loads(text)
        return Rows(str(found["address"]), int(found["home"]))
    except (ValueError, KeyError, TypeError) as error:
        raise perco.UsageError(f"{path} does not say where the rows are ({error}); remove it, and add --rows") from None


def rows_for(store: Path, address: str) -> Rows:
    """Like `rows_of`, but requires that the rows are at `address`; a new folder gets this address, and a new number.
    "" accepts any place.

    Raises: UsageError if the rows are elsewhere, or cannot be at this address.
    """
    rows = rows_of(store)
    if address.startswith("unix:"):
        address = f"unix:{Path(address.removeprefix('unix:')).absolute()}"
    if not address or address == rows.address:
        return rows
    new = Rows(address, _number())
    if not address.startswith(_SCHEMES):
        raise perco.UsageError(
            f"{new.shown} cannot be the place of the rows: --rows takes postgresql://..., bigtable://..., or the "
            "address of a served store"
        )
    if rows.home != IN_FOLDER or (store / "tablets").exists():
        where = "there" if rows.home == IN_FOLDER else f"at {rows.shown}"
        raise perco.UsageError(f"{store} has its rows {where}; name another folder for a new search index")
    return new


def _number() -> int:
    return 2 + secrets.randbelow((1 << 31) - 2)


@asynccontextmanager
async def opened(
    rows: Rows, schema: perco.Schema, options: perco.Options | None = None
) -> AsyncIterator[perco.Database]:
    """Open the rows. Raises: as `perco.open`; UsageError if another process has the database open for itself."""
    async with AsyncExitStack() as stack:
        try:
            db = await stack.enter_async_context(perco.open(rows.address, schema, options=options))
        except perco.errors.StoreLocked as error:
            if rows.home == IN_FOLDER:
                raise
            raise perco.UsageError(
                f"{error}. To let several processes use these rows, serve them first: "
                f"perco serve {shlex.quote(rows.shown)} --direct --standby"
            ) from None
        yield db


@asynccontextmanager
async def looking(store: Path, schema: perco.Schema) -> AsyncIterator[perco.Database]:
    """Open the rows for reading, without a worker."""
    rows = rows_of(store)
    if rows.home == IN_FOLDER:
        async with perco.open(store, schema, readonly=True) as db:
            yield db
    else:
        async with opened(rows, schema) as db:
            yield db


async def keep(db: perco.Database, index: WebIndex, store: Path, rows: Rows, *, take_over: bool) -> Rows:
    """Make the folder and the rows name each other; returns the rows with the number that both have.

    Raises: UsageError if the rows name another folder and this one is not to take over, or if the folder cannot be
    written.
    """
    async with db.snapshot() as snap:
        named: Any = await snap.get(index.sources, _HOME)
    if named is None or take_over:
        await trio.to_thread.run_sync(_writable, store)  # before the rows name the folder
        ours = [_number(), f"{socket.gethostname()}:{await trio.Path(store).absolute()}"]
        async for attempt in db.attempts():
            async with attempt as txn:
                named = await txn.get(index.sources, _HOME)
                if named is None or take_over:
                    txn.set(index.sources, _HOME, ours)
                    named = ours
        if named is ours:
            rows = replace(rows, home=ours[0])
            await trio.to_thread.run_sync(_write, store, rows)
            return rows
    for _ in range(_AGAIN):
        found = await trio.to_thread.run_sync(rows_of, store)
        if found == replace(rows, home=named[0]):
            return found
        if found.address != rows.address:
            break
        await trio.sleep(_AGAIN_S)  # another process may have made the rows name the folder, but not written its file
    raise perco.UsageError(
        f"the documents of {rows.shown} go to the search index in {named[1]}. Use that folder, on that host; or stop "
        f"its processes, and let {store} take its place with --take-over"
    )


def _writable(store: Path) -> None:
    """Make the folder, and check that it can be written to. Raises: UsageError."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        path = store / f"{ROWS_FILE}.new"
        path.touch(mode=0o600)
        path.unlink()
    except OSError as error:
        raise perco.UsageError(f"{store} cannot be written to: {error.strerror}; name another folder") from None


def _write(store: Path, rows: Rows) -> None:
    """Write the folder's file so that only its owner can read it, because an address may have a password."""
    path = store / f"{ROWS_FILE}.{os.getpid()}"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump({"address": rows.address, "home": rows.home}, file)
        file.flush()
        os.fsync(file.fileno())
    path.replace(store / ROWS_FILE)
