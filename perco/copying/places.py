"""Opens the stores of a copy: as their owner, without a schema and without background tasks, or beside their owner."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import trio

from perco.bigtable import address as bigtable
from perco.copying.marker import Marker, catalogue_below, marker_of
from perco.database.inside import inside
from perco.database.options import Options
from perco.errors import Unavailable, UsageError
from perco.postgresql import address as postgresql
from perco.rpc import addresses
from perco.schema.catalogue import Catalogue
from perco.serve.opening import visiting
from perco.storage import RowStore
from perco.tablets.backend import Backend
from perco.tablets.local import LocalStore


def is_folder(url: str) -> bool:
    """Whether `url` is the path of a store on this machine."""
    return "://" not in url


def must_be_two_places(source: str, target: str) -> None:
    """Raises: UsageError, if one of the two cannot be copied or be a copy, if both are the same place, or if one is a
    folder inside the other."""
    for url in (source, target):
        if url == "memory:" or addresses.is_address(url):
            what = "a served store" if addresses.is_address(url) else "a store in memory"
            raise UsageError(
                f"{url}: {what} can be neither the source nor the target of a copy; give a folder, postgresql://... or "
                "bigtable://..."
            )
    if shown(source) == shown(target):
        raise UsageError(f"{shown(source)} cannot be copied to itself")
    if is_folder(source) and is_folder(target):
        one, other = Path(shown(source)), Path(shown(target))
        if one in other.parents or other in one.parents:
            raise UsageError(f"{one} and {other}: one folder lies in the other; copy to a separate folder")


def shown(url: str) -> str:
    """A place as messages show it. A folder has one name, whatever links lead to it."""
    if postgresql.is_postgresql(url):
        return postgresql.Place(url).shown
    if bigtable.is_bigtable(url):
        return bigtable.Place(url).shown
    return os.path.realpath(os.path.expanduser(url))


async def look(url: str, options: Options) -> None:
    """Look for a store, without making one. Raises: UsageError, if there is none; what opening it raises."""
    if postgresql.is_postgresql(url):
        from perco.postgresql import admin  # imported only by programs that need it

        if not await admin.has_tables(url):
            raise UsageError(f"there is no store at {shown(url)}")
    elif is_folder(url):
        _must_be_there(url)
        async with _files(url, options) as local:
            await must_have_catalogue(local.store, url)


def _must_be_there(url: str) -> None:
    if not os.path.isdir(shown(url)):
        raise UsageError(f"there is no store at {url}")


async def must_have_catalogue(store: RowStore, url: str) -> tuple[Marker | None, Catalogue]:
    """The marker and the catalogue of a source. Raises: UsageError, if no program has made the store."""
    marker, catalogue = await marker_of(store), await catalogue_below(store)
    if marker is None and not catalogue.version:
        raise UsageError(f"there is no store at {shown(url)}")
    return marker, catalogue


@asynccontextmanager
async def owned(url: str, options: Options, nursery: trio.Nursery) -> AsyncIterator[Backend]:
    """Open a store as its owner. A task of the nursery raises an error once another process owns the store.

    Raises: StoreLocked, if another process owns it; what opening raises.
    """
    backend: Backend
    watch: Callable[[], Awaitable[None]] = trio.sleep_forever
    if postgresql.is_postgresql(url):
        from perco.postgresql.store import PostgresqlStore

        on_postgresql = await PostgresqlStore.open(url, options.postgresql, durable=True)
        backend, watch = on_postgresql, on_postgresql.watch
    elif bigtable.is_bigtable(url):
        from perco.bigtable.store import BigtableStore

        on_bigtable = await BigtableStore.open(url, options.bigtable)
        backend, watch = on_bigtable, on_bigtable.watch
    else:
        backend = LocalStore(
            shown(url), durable=True, readonly=False, accept_loss=False, lmdb=options.lmdb, batch=options.batch
        )
    watching = trio.CancelScope()

    async def run() -> None:
        with watching:
            await watch()

    nursery.start_soon(run)
    try:
        yield backend
    finally:
        watching.cancel()
        with trio.CancelScope(shield=True):
            await backend.aclose()


@asynccontextmanager
async def _files(url: str, options: Options) -> AsyncIterator[LocalStore]:
    """Open a folder for reading, beside its owner if it has one."""
    local = LocalStore(
        shown(url), durable=True, readonly=True, accept_loss=False, lmdb=options.lmdb, batch=options.batch
    )
    try:
        yield local
    finally:
        with trio.CancelScope(shield=True):
            await local.aclose()


@asynccontextmanager
async def beside(source: str, through: str | None, options: Options) -> AsyncIterator[tuple[RowStore, Catalogue]]:
    """Open for reading a store that another process has open: from a folder's files, or through its server. Yields the
    row store and its catalogue, without tables whose tablets do not exist yet.

    Raises: Unavailable, UsageError; what opening raises.
    """
    if through is None and is_folder(source):
        async with _files(source, options) as local:
            catalogue = await catalogue_below(local.store)
            await local.adapt(catalogue)
            there = set(local.store.tables())
            tables = {name: entry for name, entry in catalogue.tables.items() if name in there}
            yield local.store, replace(catalogue, tables=tables)
        return
    try:
        async with visiting(through or source) as db:
            yield inside(db).driver.store, inside(db).catalogue
    except Unavailable as error:
        if through is not None:
            raise
        raise Unavailable(
            f"{shown(source)} is in use, and cannot be read beside its owner: {error}",
            remedy="With --through, give the address at which it is served, or stop the process that uses it.",
        ) from error
