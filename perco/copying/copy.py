"""Copies a whole store while it is in use; at the end, the copy can replace it.

    copied = await copy("web/", "postgresql://db/shop?prefix=web", CopyOptions(), tell)

Passes make the target equal to the source, row by row. While another process has the source open, a pass reads each row
as of a different moment, so the target is not a consistent store yet. For the last pass, this process is the source's
owner, and no other process writes. After that pass, the target equals the source as of one moment, including the
timestamps, the history and all changes that wait for observers.

M1  A pass writes only what differs, so an interrupted copy continues where it stopped.
M2  The target has a marker until the digests of all tables are equal to the source's. Until then, no program can open
    the target. The last pass also empties tables and groups that earlier passes have made and the source does not have.
M3  The source gets its marker before the target loses its own, so at no moment can programs open both. The new store
    draws timestamps above all that the old one has drawn (O1), because the bound is copied like all other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import trio

from perco.clock.heartbeat import LEASE_ROW
from perco.copying import places
from perco.copying.marker import Marker, catalogue_below, complete, marker_of, put_marker, refused
from perco.copying.passes import FLOOR, Pass, Sums, digest_of, tasks
from perco.database.options import Options
from perco.errors import (
    SessionEnded,
    StoreError,
    StoreLocked,
    TabletSplit,
    Unavailable,
    UsageError,
    must_be_number,
)
from perco.schema.catalogue import CATALOGUE_ROW, SYSTEM_TABLE, Catalogue, schema_of
from perco.schema.entries import TableEntry
from perco.schema.marker import COPYING, MOVED
from perco.storage import PROTOCOL_GROUPS, RowStore
from perco.tablets.backend import Backend

# Rows of the system table that belong to a place and not to the data: which process owns it, which files there are.
_OWN_ROWS: Final = (LEASE_ROW, b"format")
_OWN_PREFIX: Final = b"made/"
_SPLITS: Final = 16  # a copy without `wait` fails after more splits of tablets than this
_STORES: Final = Options()

READING: Final = "reading"
WAITING: Final = "waiting for late mutations"
VERIFYING: Final = "verifying"

Tell = Callable[[str, str, Sums], None]


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How a store is copied.

    Attributes:
        through: the address at which the source is served, to read it while it is in use; not needed for a folder.
        wait: go on with passes until no other process has the source open; then finish.
        every_s: seconds between two passes.
        switch: once the copy is complete, keep programs out of the source, and tell them where it has moved.
        replace: the target may be an unfinished copy of another store, or a store that has moved.
        moved: the source may be a store that has moved: copy what it held when it moved.
    """

    through: str | None = None
    wait: bool = False
    every_s: float = 5.0
    switch: bool = False
    replace: bool = False
    moved: bool = False

    def __post_init__(self) -> None:
        must_be_number("every_s", self.every_s)


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of `copy`.

    Attributes:
        source, target: the two stores, as messages show them.
        used_by: the process that has the source open, so the copy is not complete; "" if it is complete.
        passes: how many passes were made; `sums`: the sums of the last one.
        digests: the digest of each table, the same in both stores, if the copy is complete; `_perco` is perco's own
            table.
        moved: programs cannot open the source any more.
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
    passed: Callable[[Copied, str], None] = lambda copied, trouble: None,
    *,
    stores: Options = _STORES,
) -> Copied:
    """Copy a store: from a folder, `postgresql://` or `bigtable://` to another of these. If another process has the
    source open, make one pass or, with `options.wait`, repeat passes until that process has closed it.

    Args:
        tell: called periodically with the current phase, the table and the sums so far.
        passed: called after each pass of `options.wait`, with an error that ended it early, or "".
        stores: how both stores are opened.

    Raises: UsageError, StoreLocked (for the target), StoreError, Unavailable, Corruption.
    """
    places.must_be_two_places(source, target)
    await places.look(source, stores)
    async with tasks() as nursery, AsyncExitStack() as stack:
        copying: _Copying | None = None
        splits = 0

        async def begun() -> _Copying:
            nonlocal copying
            if copying is None:  # only now: if the source cannot be copied, nothing is made
                there = await stack.enter_async_context(places.owned(target, stores, nursery))
                copying = _Copying(there, places.shown(source), places.shown(target), options, tell)
            return copying

        while True:
            async with AsyncExitStack() as attempt:
                try:
                    here = await attempt.enter_async_context(places.owned(source, stores, nursery))
                except StoreLocked as locked:
                    used_by = _user(locked)
                else:
                    marker, catalogue = await places.must_have_catalogue(here.store, source)
                    return await (await begun()).finish(here, marker, catalogue)
            one = await begun()
            trouble = ""
            try:
                async with places.beside(source, options.through, stores) as (store, catalogue):
                    await one.catch_up(store, catalogue)
            except (TabletSplit, SessionEnded, Unavailable) as error:
                splits += isinstance(error, TabletSplit)
                if not options.wait and (not isinstance(error, TabletSplit) or splits > _SPLITS):
                    raise
                trouble = str(error)
            if not options.wait and not trouble:
                return one.told(used_by)
            if options.wait:
                passed(one.told(used_by), trouble)
                await trio.sleep(options.every_s)


def _user(locked: StoreLocked) -> str:
    """The process that has a store open."""
    if locked.pid is None or str(locked.pid) in locked.command.split():
        return locked.command or "another process"
    return f"process {locked.pid} ({locked.command or 'unknown command'})"


class _Copying:
    """A copy in progress. Loop thread only. `source`, `shown`: the source and the target, as messages show them."""

    def __init__(self, target: Backend, source: str, shown: str, options: CopyOptions, tell: Tell) -> None:
        self._target, self._source, self._shown, self._options, self._tell = target, source, shown, options, tell
        self._passes = 0
        self._sums = Sums()
        self._moved = False

    def told(self, used_by: str = "", digests: dict[str, str] | None = None) -> Copied:
        return Copied(self._source, self._shown, used_by, self._passes, self._sums, digests or {}, self._moved)

    async def catch_up(self, store: RowStore, catalogue: Catalogue) -> tuple[Catalogue, Catalogue]:
        """Make one pass over all tables. Returns two catalogues: the one that the target will get, and one with every
        table that the target has, including tables that the source lacks."""
        placed, every = await self._prepare(catalogue)
        self._passes += 1
        one = Pass(store, self._target.store, partial(self._tell, READING))
        self._sums = one.sums
        for table in every.tables:
            await one.table(table, _groups(catalogue, table), _groups(every, table))
        return placed, every

    async def finish(self, source: Backend, marker: Marker | None, catalogue: Catalogue) -> Copied:
        """Make the last pass, as the owner of both stores; verify it, and switch."""
        await self._must_be_usable(marker)
        await source.adapt(catalogue)
        self._tell(WAITING, self._source, self._sums)
        await source.store.raise_floor(1, wait=True)  # no mutation of a former owner can still take effect (T13)
        placed, every = await self.catch_up(source.store, catalogue)
        target = self._target.store
        # The sums do not count the system table: the user did not write it.
        own = Pass(source.store, target, lambda table, sums: None)
        await own.table(SYSTEM_TABLE, PROTOCOL_GROUPS, PROTOCOL_GROUPS, _stays)
        self._sums.unsure += own.sums.unsure
        self._tell(WAITING, self._shown, self._sums)
        await target.raise_floor(FLOOR, wait=True)
        digests = await self._verified(source.store, catalogue, every)
        if self._options.switch or self._moved:
            await put_marker(source.store, Marker(MOVED, self._shown, catalogue))  # M3
        self._moved = self._moved or self._options.switch or marker is not None
        await complete(target, placed)
        return self.told(digests=digests)

    async def _must_be_usable(self, marker: Marker | None) -> None:
        """Raises: StoreError, if the source cannot be copied."""
        if marker is None:
            return
        if marker.kind == MOVED:
            theirs = await marker_of(self._target.store)
            if marker.other == self._shown and theirs is not None and theirs.is_copy_of(self._source):
                self._moved = True  # a switch was interrupted right before its end (M3)
                return
            if self._options.moved:
                return
            raise StoreError(
                f"{refused(self._source, marker)}. To copy what it had when it moved, add --moved; all later "
                f"writes are in {marker.other}"
            )
        raise StoreError(f"{refused(self._source, marker)}: it cannot be copied")

    async def _prepare(self, catalogue: Catalogue) -> tuple[Catalogue, Catalogue]:
        """Make the target's tables, under a marker (M2). Returns two catalogues: the one that the target will get, with
        the target's own tablets, and one with every table that has been made in the target.

        Raises: UsageError, if the target is already a store, or a copy of another source.
        """
        target = self._target.store
        marker = await marker_of(target)
        former = await catalogue_below(target) if marker is None or marker.kind == MOVED else marker.catalogue
        if marker is None and former.version:
            raise UsageError(f"there is a store at {self._shown} already: copy to a new place")
        if marker is not None and marker.other != self._source and not self._options.replace:
            raise UsageError(
                f"{refused(self._shown, marker)}. Copy to a new place, or add --replace to discard what is in it"
            )
        schema_of(catalogue).must_suit(logs=target.logs)
        placed, every = _placed(catalogue, former)
        await put_marker(target, Marker(COPYING, self._source, every))  # first: later passes keep these tablets
        await self._target.adapt(every)
        return placed, every

    async def _verified(self, source: RowStore, catalogue: Catalogue, every: Catalogue) -> dict[str, str]:
        """Check that the digests of all tables are equal in both stores; returns them. Raises: StoreError, if they are
        not."""
        digests = {}
        for table in (*every.tables, SYSTEM_TABLE):
            skip = _stays if table == SYSTEM_TABLE else _none
            tell = partial(self._verifying, table)
            tell(0)
            mine = await digest_of(source, table, _groups(catalogue, table), skip, tell)
            theirs = await digest_of(self._target.store, table, _groups(every, table), skip, tell)
            if mine.hex() != theirs.hex():
                raise StoreError(
                    f"table {table!r} of {self._shown} is not equal to the source's, although no program writes to "
                    "either. Run the command again; if that does not help, run `perco check` on the source"
                )
            if table in catalogue.tables or table == SYSTEM_TABLE:
                digests[table] = mine.hex()
        return digests

    def _verifying(self, table: str, cells: int) -> None:
        self._tell(VERIFYING, table, Sums(cells=cells))


def _none(row: bytes) -> bool:
    return False


def _stays(row: bytes) -> bool:
    """Whether a row of the system table is not copied: it belongs to its place, or it is the catalogue's, which is
    written last."""
    return row == CATALOGUE_ROW or row in _OWN_ROWS or row.startswith(_OWN_PREFIX)


def _groups(catalogue: Catalogue, table: str) -> Sequence[str]:
    """The groups of a table; none, if there is no such table."""
    if table == SYSTEM_TABLE:
        return PROTOCOL_GROUPS
    return (*PROTOCOL_GROUPS, *catalogue.groups(table)) if table in catalogue.tables else ()


def _placed(catalogue: Catalogue, former: Catalogue) -> tuple[Catalogue, Catalogue]:
    """Two catalogues for a target that already has the tables of `former`. In the first, those tables keep their
    tablets, and the other tables get the source's boundaries. The second also has the tables and columns that only
    `former` has, because earlier passes may have written cells in their groups."""
    tables, every = {}, dict(former.tables)
    for name, entry in catalogue.tables.items():
        known = former.tables.get(name)
        if known is None:
            tables[name] = every[name] = replace(entry, added={})
            continue
        tables[name] = replace(entry, splits=known.splits, added=known.added)
        gone = {
            f"{column} of before": replace(each, names=())
            for column, each in known.columns.items()
            if each.group not in _own(entry)
        }
        every[name] = replace(tables[name], columns={**entry.columns, **gone})
    return replace(catalogue, tables=tables), replace(catalogue, tables=every)


def _own(entry: TableEntry) -> set[str]:
    return {column.group for column in entry.columns.values()}
