"""Splits tablets that have become large: each half has a writer and a file of its own, and can have a tablet server of
its own.

P1  Each row lies in one tablet, and its writes go to that tablet only. While a tablet is cut, writes to the moving rows
    wait; reads, and writes to the rows that stay, do not.
P2  The new tablet holds exactly the cells that the old tablet held in the moving rows at the cut.
P3  A mutation whose rows now lie in two tablets fails with TabletSplit, and the transaction runs again; locks are
    settled cell by cell.
P4  A split proceeds in this order: the new tablet is complete and on disk; the catalogue records it; reads and writes
    of its rows go to it; these rows are removed from the old tablet. If the process ends after the record but before
    the removal is complete, the removal continues when the store is opened again.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from perco.errors import Corruption, StoreError, Unavailable, UsageError, WriteUnknown
from perco.schema.catalogue import Catalogue, change, load
from perco.schema.codecs import codec_named
from perco.schema.schema import Table
from perco.settings import check_options
from perco.storage import ROW_BYTES_MAX, WRITE, Tablet
from perco.tablets.local import LocalStore
from perco.txn.background import Background

log: logging.Logger = logging.getLogger("perco.split")

_AGAIN_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitOptions:
    """When tablets are split.

    Attributes:
        on: split them in the background.
        bytes_max: a tablet whose cells take more than this many bytes of its file is split in the middle.
        period_s: how often the sizes are checked, in seconds.
        share: the part of the time that the removal of moved rows from the old tablets may take.
    """

    on: bool = True
    bytes_max: int = 1 << 30
    period_s: float = 10.0
    share: float = 0.2

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Split:
    """The result of a split.

    Attributes:
        table: the tablet's table.
        row: the first row of the new tablet, as stored.
        tablet: the number of the new tablet.
        cells: how many cells the new tablet got.
        seconds: how long it took.
        paused_s: how long writes to the new tablet's rows waited.
    """

    table: str
    row: bytes
    tablet: int
    cells: int
    seconds: float
    paused_s: float


def where_to_split(table: Table[Any] | str, key: Any) -> tuple[str, bytes | None]:
    """The name of the table to split, and the row of the key. Raises: UsageError."""
    if isinstance(table, Table):
        return table.name, None if key is None else table.row(key)
    if not isinstance(table, str) or not (key is None or isinstance(key, bytes)):
        raise UsageError("split takes a table and a key of it, or a table's name and a row in bytes")
    return table, key


class Splitter:
    """One per opened store; one split at a time. `adopt`: adopts a version of the catalogue."""

    splits: int

    def __init__(
        self,
        local: LocalStore,
        background: Background,
        options: SplitOptions,
        catalogue: Callable[[], Catalogue],
        adopt: Callable[[Catalogue], Awaitable[None]],
    ) -> None:
        self.options = options
        self.splits = 0  # since the store was opened
        self.failure: Exception | None = None  # of the last pass in the background
        self.on_split: list[Callable[[], None]] = []
        self._local, self._background, self._catalogue, self._adopt = local, background, catalogue, adopt
        self._alone, self._clearing = trio.Lock(), trio.Lock()
        self._left: list[tuple[Tablet, bytes]] = []  # tablets that still hold moved rows, and the first of these rows
        self._more = trio.Event()
        self._not_before: dict[Tablet, int] = {}  # the size at which a tablet with a single row is checked again

    async def split(self, table: str, row: bytes | None) -> Split:
        """Split a tablet at a row. If `row` is None, split the table's largest tablet in the middle.

        The split runs in a task of its own: a caller that is cancelled or interrupted waits for its end. The tablet has
        then been split, or is unchanged.

        Raises: UsageError if the tablet cannot be split there; StoreFull, Unavailable.
        """
        self._check(table, row)

        async def act() -> Split:
            async with self._alone:
                return await self._split_at(table, row)

        return await self._background.apart(act, "split")

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold off splits, and the removal of moved rows, while the block lasts."""
        async with self._alone, self._clearing:
            yield

    def _check(self, table: str, row: bytes | None) -> None:
        entry = self._catalogue().tables.get(table)
        if entry is None:
            known = ", ".join(sorted(self._catalogue().tables)) or "none"
            raise UsageError(f"there is no table {table!r} in this store; there are: {known}")
        if row is None:
            return
        if not isinstance(row, bytes) or len(row) > ROW_BYTES_MAX:
            raise UsageError(f"a row is at most {ROW_BYTES_MAX} bytes, not {row!r:.100}")
        try:
            codec_named(entry.key).decode(row)
        except (ValueError, struct.error) as error:
            raise UsageError(f"{row!r:.100} is not a key of {table!r}, whose keys are {entry.key}: {error}") from error

    async def _split_at(self, table: str, row: bytes | None) -> Split:
        store = self._local.store
        if row is None:
            tablets = [tablet for tablet in store.tablets() if tablet.table == table]
            if any(map(self._has_left, tablets)):
                await self.clear()  # otherwise, rows that have moved would count
            largest = max(tablets, key=lambda tablet: (tablet.live_bytes(), tablet.entries(WRITE)))
            row = await self._middle(largest)
            if row is None:
                raise UsageError(f"the largest tablet of {table!r} cannot be split: it holds one row, or none")
        if store.tablet(table, row).start == row:
            raise UsageError(f"a tablet of {table!r} begins at that key already")
        return await self._split(table, row)

    async def _middle(self, tablet: Tablet) -> bytes | None:
        if self._has_left(tablet):
            await self.clear()  # otherwise, rows that have moved would count
        return await tablet.middle(self._local.store.stop_of(tablet))

    def _has_left(self, tablet: Tablet) -> bool:
        return any(each is tablet for each, _ in self._left)

    async def _split(self, table: str, row: bytes) -> Split:
        began = trio.current_time()
        tablet = self._local.store.tablet(table, row)
        # Use the stored catalogue: this process may not have adopted the version of the last split yet.
        number = (await load(self._local.store)).with_split(table, row).tables[table].added[row]
        recorded: list[Catalogue] = []

        async def record() -> None:
            recorded.append(await self._recorded(table, row, number))

        cells, paused_s = await self._local.split(table, row, number, record)
        self.splits += 1
        self._left.append((tablet, row))
        self._more.set()
        log.info("a tablet of %s was split: %d cells, writes waited for %.0f ms", table, cells, 1000 * paused_s)
        for tell in self.on_split:
            tell()
        await self._adopt(recorded[0])
        return Split(table, row, number, cells, trio.current_time() - began, paused_s)

    async def _recorded(self, table: str, row: bytes, number: int) -> Catalogue:
        """P4: record a split; returns the catalogue with the split. Raises: StoreError, if the split is certainly not
        recorded."""
        store = self._local.store

        def step(catalogue: Catalogue) -> Catalogue:
            after = catalogue.with_split(table, row)
            assert after.tables[table].added[row] == number, "P4: only splits number tablets"
            return after

        while True:
            try:
                return await change(store, step)
            except (Unavailable, WriteUnknown):  # the record may have been written
                await trio.sleep(_AGAIN_S)
            except StoreError:
                if row not in (await load(store)).tables[table].splits:
                    raise

    # ------------------------------------------------------------ in the background

    async def in_background(self) -> None:
        """Remove moved rows and split large tablets, periodically. Failures are retried."""
        acts: list[Callable[[], Awaitable[None]]] = [
            partial(self._find_left, set()),
            partial(self.clear, share=self.options.share),
            self._split_large,
        ]
        while True:
            failure: Exception | None = None
            for act in acts:
                try:
                    await act()
                except (StoreError, Corruption) as error:
                    failure = error
            if failure is not None and type(failure) is not type(self.failure):
                log.warning("a tablet could not be split, or cleared: %s", failure)
            self.failure = failure
            with trio.move_on_after(self.options.period_s):
                await self._more.wait()
            self._more = trio.Event()

    async def _find_left(self, looked: set[Tablet]) -> None:
        """P4: find moved rows that an earlier process has left."""
        store = self._local.store
        failure: Exception | None = None
        for tablet in store.tablets():
            stop = store.stop_of(tablet)
            if stop is None or tablet in looked:
                continue
            try:
                if tablet.has_from(stop) and not self._has_left(tablet):
                    self._left.append((tablet, stop))
                looked.add(tablet)
            except (StoreError, Corruption) as error:
                failure = error
        if failure is not None:
            raise failure

    async def clear(self, *, share: float = 1.0) -> None:
        """Remove moved rows from their old tablets now. (The background task does this, too.)

        Args:
            share: the part of the time that the removal may take.

        Raises: StoreFull, Unavailable; the next call removes the rows that are left.
        """
        failure: Exception | None = None
        async with self._clearing:
            for tablet, row in list(self._left):
                try:
                    more = True
                    while more:
                        began = trio.current_time()
                        more = await tablet.remove_from(row)
                        took_s = trio.current_time() - began
                        await trio.sleep(took_s / share - took_s)
                    self._left.remove((tablet, row))
                except (StoreError, Corruption) as error:  # go on with other tablets
                    failure = error
        if failure is not None:
            raise failure

    async def _split_large(self) -> None:
        if not self.options.on:
            return
        tables = self._catalogue().tables
        failure: Exception | None = None
        for tablet in self._local.store.tablets():
            try:
                size = tablet.live_bytes()
                least = max(self.options.bytes_max, self._not_before.get(tablet, 0))
                if tablet.table not in tables or size <= least or self._has_left(tablet):
                    continue
                async with self._alone:
                    row = await self._middle(tablet)
                    if row is not None:
                        await self._split(tablet.table, row)
                        self._more.set()  # the tablet may still be large without the moved rows
                        continue
                self._not_before[tablet] = 2 * size
                log.info("a tablet of %s is large, and is one row: it cannot be split", tablet.table)
            except (StoreError, Corruption) as error:
                failure = error
        if failure is not None:
            raise failure
