"""Copies a whole store, while it is in use, and in the end takes its place.

    copied = await copy("web/", "postgresql://db/shop?prefix=web", CopyOptions(), tell)

Passes make the target equal to the source, row by row. While another process has the source open, what a pass finds is
the work of many moments, so the target is not a store yet. The last pass is made by the source's owner, which is then
this process. No other process writes, so the target is the source as of one moment, with its timestamps, its history
and all changes that wait for observers.

M1  A pass writes only what differs, so an interrupted copy continues where it was, and a late pass is a short one.
M2  The target has a marker until the digests of all tables are equal to the source's. No program can open it before.
M3  The source gets its marker before the target loses its own: at no moment can programs open both. The new store draws
    timestamps above all that the old one has drawn (O1): the bound is copied like all other rows.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import trio

from perco.bigtable import address as bigtable
from perco.bigtable.address import is_bigtable
from perco.clock.heartbeat import LEASE_ROW
from perco.copying.marker import COPYING, MOVED, Marker, catalogue_below, complete, marker_of, put_marker, refused
from perco.copying.passes import FLOOR, Pass, Sums, digest_of, tasks
from perco.database.inside import inside
from perco.database.options import Options
from perco.errors import StoreError, StoreLocked, Unavailable, UsageError, must_be_number
from perco.postgresql import address as postgresql
from perco.postgresql.address import is_postgresql
from perco.rpc import addresses
from perco.schema.catalogue import CATALOGUE_ROW, SYSTEM_TABLE, Catalogue
from perco.serve.opening import visiting
from perco.storage import PROTOCOL_GROUPS, RowStore
from perco.tablets.backend import Backend
from perco.tablets.local import LocalStore

# Rows of the system table that belong to a place and not to the data: which process owns it, which files there are.
_OWN_ROWS: Final = (LEASE_ROW, b"format")
_OWN_PREFIX: Final = b"made/"

_STORES: Final = Options()

READING: Final = "reading"
WAITING: Final = "waiting until no mutation can be late, of"
COMPARING: Final = "verifying"

Tell = Callable[[str, str, Sums], None]


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How a store is copied.

    Attributes:
        through: the address at which the source is served, to read it while it is in use; not needed for a folder.
        wait: go on with passes until no other process has the source open; then finish.
        every_s: seconds between two passes.
        switch: once the copy is complete, keep programs out of the source, and tell them where it has moved.
    """

    through: str | None = None
    wait: bool = False
    every_s: float = 5.0
    switch: bool = False

    def __post_init__(self) -> None:
        must_be_number("every_s", self.every_s)


@dataclass(frozen=True, slots=True)
class Copied:
    """What `copy` has done.

    Attributes:
        source, target: the two stores, as messages show them.
        used_by: the process that has the source open: the copy is not complete; "": it is.
        passes: how many were made; `sums`: of the last one.
        digests: of each table in both stores, if the copy is complete.
        moved: the source tells programs to open the target.
    """

    source: str
    target: str
    used_by: str
    passes: int
    sums: Sums
    digests: dict[str, str]
    moved: bool


async def copy(
    source: str,
    target: str,
    options: CopyOptions,
    tell: Tell = lambda phase, table, sums: None,
    *,
    stores: Options = _STORES,
) -> Copied:
    """Copy a store: from a folder, `postgresql://` or `bigtable://` to another of these. If another process has the
    source open, make one pass, or passes until it has not (`options.wait`).

    Args:
        tell: called after each page, with what is being done, the table, and what was done so far.
        stores: how both stores are opened.

    Raises: UsageError, StoreLocked (for the target), StoreError, Unavailable, Corruption.
    """
    for url in (source, target):
        _must_be_place(url)
    _must_be_there(source)
    _must_differ(source, target)
    async with _owned(target, stores) as there:
        copying = _Copying(there, options, tell)
        while True:
            try:
                async with _owned(source, stores) as here:
                    return await copying.finish(here)
            except StoreLocked as locked:
                used_by = locked.command or "another process"
            async with _beside(source, options.through, stores) as (store, shown, catalogue):
                await copying.catch_up(store, shown, catalogue)
            if not options.wait:
                return copying.told(shown, used_by)
            await trio.sleep(options.every_s)


class _Copying:
    """A copy on its way to one target. Loop thread only."""

    def __init__(self, target: Backend, options: CopyOptions, tell: Tell) -> None:
        self._target, self._options, self._tell = target, options, tell
        self._passes = 0
        self._sums = Sums()

    def told(self, source: str, used_by: str = "", digests: dict[str, str] | None = None) -> Copied:
        moved = not used_by and self._options.switch
        return Copied(source, self._target.where()[0], used_by, self._passes, self._sums, digests or {}, moved)

    async def catch_up(self, store: RowStore, shown: str, catalogue: Catalogue) -> Catalogue:
        """Make one pass over all tables. Returns the catalogue for the target."""
        placed = await self._prepare(shown, catalogue)
        self._passes += 1
        one = Pass(store, self._target.store, lambda table, sums: self._tell(READING, table, sums))
        self._sums = one.sums
        for table in catalogue.tables:
            await one.table(table, _groups(catalogue, table))
        return placed

    async def finish(self, source: Backend) -> Copied:
        """Make the last pass, as the owner of both stores; verify it, and switch."""
        shown, target = source.where()[0], self._target.store
        await self._must_be_usable(source)
        catalogue = await catalogue_below(source.store)
        if not catalogue.version:
            raise UsageError(f"there is no store at {shown}")
        await source.adapt(catalogue)
        placed = await self.catch_up(source.store, shown, catalogue)
        last = Pass(source.store, target, lambda table, sums: None, self._sums)
        await last.table(SYSTEM_TABLE, PROTOCOL_GROUPS, _stays)
        self._tell(WAITING, self._target.where()[0], self._sums)
        await target.raise_floor(FLOOR, wait=True)
        digests = await self._verified(source.store, catalogue)
        if self._options.switch:
            await put_marker(source.store, Marker(MOVED, self._target.where()[0], catalogue))  # M3
        await complete(target, placed)
        return self.told(shown, digests=digests)

    async def _must_be_usable(self, source: Backend) -> None:
        """Raises: UsageError, StoreError, if the source cannot be copied."""
        marker = await marker_of(source.store)
        if marker is None or (marker.kind == MOVED and marker.other == self._target.where()[0]):
            return  # the latter: a run was interrupted right before the end (M3)
        raise refused(source.where()[0], marker)

    async def _prepare(self, source: str, catalogue: Catalogue) -> Catalogue:
        """Make the target's tables, under a marker (M2). Returns the catalogue for the target: it has tablets of its
        own.

        Raises: UsageError, if it is a store, or a copy of another one.
        """
        target, shown = self._target.store, self._target.where()[0]
        marker = await marker_of(target)
        former = await catalogue_below(target) if marker is None or marker.kind == MOVED else marker.catalogue
        if marker is None and former.version:
            raise UsageError(f"there is a store at {shown} already: copy to a new place")
        if marker is not None and marker.other != source:
            raise UsageError(f"{refused(shown, marker)}. Copy to a new place")
        placed = _placed(catalogue, former)
        await put_marker(target, Marker(COPYING, source, placed))  # first: these tablets, and no others, are made now
        await self._target.adapt(placed)
        return placed

    async def _verified(self, source: RowStore, catalogue: Catalogue) -> dict[str, str]:
        """The digests of all tables, which are equal in both stores. Raises: StoreError, if they are not."""
        digests = {}
        for table in (*catalogue.tables, SYSTEM_TABLE):
            groups, skip = _groups(catalogue, table), _stays if table == SYSTEM_TABLE else _none
            tell = partial(self._compared, table)
            found = []
            for store in (source, self._target.store):
                digest = await digest_of(store, table, groups, skip, tell)
                found.append(digest.hex())
            if found[0] != found[1]:
                raise StoreError(
                    f"table {table!r} of {self._target.where()[0]} is not equal to the source's, although no "
                    "program writes to either. Run the command again; if that does not help, one of the stores is "
                    "damaged: run `perco check` on the source"
                )
            digests[table] = found[0]
        return digests

    def _compared(self, table: str, cells: int) -> None:
        self._tell(COMPARING, table, Sums(cells=cells))


def _none(row: bytes) -> bool:
    return False


def _stays(row: bytes) -> bool:
    """Whether a row of the system table belongs to its place. The catalogue's is written last."""
    return row == CATALOGUE_ROW or row in _OWN_ROWS or row.startswith(_OWN_PREFIX)


def _groups(catalogue: Catalogue, table: str) -> Sequence[str]:
    return PROTOCOL_GROUPS if table == SYSTEM_TABLE else (*PROTOCOL_GROUPS, *catalogue.groups(table))


def _placed(catalogue: Catalogue, former: Catalogue) -> Catalogue:
    """The catalogue for a place in which the tables of `former` have been made: their tablets stay as they are. Others
    get tablets where the source has them."""
    tables = {}
    for name, entry in catalogue.tables.items():
        known = former.tables.get(name)
        splits, added = (entry.splits, {}) if known is None else (known.splits, known.added)
        tables[name] = replace(entry, splits=splits, added=added)
    return replace(catalogue, tables=tables)


# ------------------------------------------------------------ the two stores


def _must_be_place(url: str) -> None:
    if url == "memory:" or addresses.is_address(url):
        what = "a served store" if addresses.is_address(url) else "a store in memory"
        raise UsageError(
            f"{url}: {what} cannot be copied or be a copy; give its folder, postgresql://... or bigtable://..."
        )


def _must_be_there(url: str) -> None:
    """Raises: UsageError, if a folder is not: its owner would make it."""
    if "://" not in url and not Path(url).expanduser().is_dir():
        raise UsageError(f"there is no store at {url}")


def _must_differ(source: str, target: str) -> None:
    """Raises: UsageError, if both are the same place, as far as their addresses tell."""
    one, other = (url if "://" in url else os.path.realpath(os.path.expanduser(url)) for url in (source, target))
    if one == other or _shown(source) == _shown(target):
        raise UsageError(f"{_shown(source)} cannot be copied to itself")


def _shown(url: str) -> str:
    """A place as messages show it."""
    if is_postgresql(url):
        return postgresql.Place(url).shown
    if is_bigtable(url):
        return bigtable.Place(url).shown
    return str(Path(url).expanduser().absolute())


@asynccontextmanager
async def _owned(url: str, options: Options) -> AsyncIterator[Backend]:
    """A store as its owner has it open, without a schema and without background tasks.

    Raises: StoreLocked, if another process owns it; what opening raises.
    """
    backend: Backend
    if is_postgresql(url):
        from perco.postgresql.store import PostgresqlStore  # only by programs that need it

        backend = await PostgresqlStore.open(url, options.postgresql, durable=True)
    elif is_bigtable(url):
        from perco.bigtable.store import BigtableStore

        backend = await BigtableStore.open(url, options.bigtable)
    else:
        backend = LocalStore(
            url, durable=True, readonly=False, accept_loss=False, lmdb=options.lmdb, batch=options.batch
        )
    try:
        if isinstance(backend, LocalStore):
            yield backend
            return
        async with tasks() as nursery:
            nursery.start_soon(backend.watch)
            yield backend
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await backend.aclose()


@asynccontextmanager
async def _beside(source: str, through: str | None, options: Options) -> AsyncIterator[tuple[RowStore, str, Catalogue]]:
    """A store that another process has open, to read it: the files of a folder, or through its server.

    Raises: Unavailable, UsageError; what opening raises.
    """
    if through is None and "://" not in source:
        local = LocalStore(
            source,
            durable=True,
            readonly=True,
            accept_loss=False,
            lmdb=options.lmdb,
            batch=options.batch,
        )
        try:
            catalogue = await _made(local)
            yield local.store, local.where()[0], catalogue
        finally:
            with trio.CancelScope(shield=True):
                await local.aclose()
        return
    try:
        async with visiting(through or source) as db:
            yield inside(db).driver.store, _shown(source), inside(db).catalogue
    except Unavailable as error:
        if through is not None:
            raise
        raise UsageError(
            f"{_shown(source)} is in use and cannot be read beside its owner ({error}). Give the address at which "
            "it is served with --through, or stop the process that uses it"
        ) from error


async def _made(local: LocalStore) -> Catalogue:
    """The catalogue of a store that is read beside its owner, as far as there are tablets for it."""
    marker = await marker_of(local.store)
    if marker is not None:
        raise refused(local.where()[0], marker)
    catalogue = await catalogue_below(local.store)
    await local.adapt(catalogue)
    there = set(local.store.tables())
    return replace(catalogue, tables={name: entry for name, entry in catalogue.tables.items() if name in there})
