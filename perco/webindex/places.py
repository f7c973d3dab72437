"""Where a web index is: a folder with the search index, and the rows, in the same folder or at an address."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import trio

import perco
from perco.webindex.index import WebIndex

SEARCH_FILE = "search.sqlite"
ROWS_FILE = "rows"  # with the address of the rows, if they are not in the folder
_HOME = "search folder"  # a row that names the folder of the search index; only if the rows are elsewhere


def search_path(store: Path) -> Path:
    """The file of a store's search index."""
    return store / SEARCH_FILE


def rows_of(store: Path) -> str:
    """What `perco.open` takes to open the rows: an address, or the folder."""
    try:
        return (store / ROWS_FILE).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return str(store)


def rows_for(store: Path, address: str) -> str:
    """As `rows_of`, after a check that the rows are at `address`, or will be for a new folder; "" accepts any place.

    Raises: UsageError if the rows are elsewhere.
    """
    rows = rows_of(store)
    if not address or address == rows:
        return rows
    if ":" not in address:
        raise perco.UsageError(
            f"{address} is not an address: --rows takes postgresql://..., bigtable://..., or that of a served store"
        )
    if rows != str(store) or (store / "tablets").exists():
        where = "there" if rows == str(store) else f"at {rows}"
        raise perco.UsageError(f"{store} has its rows {where}; name another folder for a new search index")
    return address


async def keep(db: perco.Database, index: WebIndex, store: Path, address: str) -> None:
    """Record the address of the rows in the folder, and record this folder in the rows: all processes of one web index
    export to the search index of one folder.

    Raises: UsageError if another folder is recorded in the rows.
    """
    ours = f"{socket.gethostname()}:{await trio.Path(store).absolute()}"
    async for attempt in db.attempts():
        async with attempt as txn:
            home = await txn.get(index.sources, _HOME)
            if home is None:
                txn.set(index.sources, _HOME, ours)
    if home not in (None, ours):
        raise perco.UsageError(
            f"the documents of {address} go to the search index in {home}: use that folder, on that host. If it is "
            f'gone, run `perco delete {shlex.quote(address)} crawls "{_HOME}" sources`, and then this command again.'
        )
    try:
        await trio.Path(store).mkdir(parents=True, exist_ok=True)
        await trio.Path(store / ROWS_FILE).write_text(f"{address}\n", encoding="utf-8")
    except OSError as error:
        raise perco.UsageError(f"{store} cannot be written: {error.strerror}; name another folder") from None


def looking(store: Path, schema: perco.Schema) -> perco.open:
    """Open the rows to read them; with no worker."""
    rows = rows_of(store)
    if rows == str(store):
        return perco.open(store, schema, readonly=True)
    return perco.open(rows, schema)
