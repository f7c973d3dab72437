"""Reads the pages of a table's files in the executors, and makes Arrow columns of them.

A read of rows makes the owner, and then the executor, decode every cell. If an executor is on the owner's machine, it
reads the files of the tablets itself, as `perco.open(folder, readonly=True)` does, and leaves the owner alone:

- The driver pins the snapshot, and tells the tasks the folder and its own `Host`. The owner notes the clock when it
  makes the pin, so readers beside it see all commits up to the pin's timestamp (O3, C4).
- A task reads the files only if it runs on the same host, and finds that pin in the folder: then the folder is the
  store in which the pin was made. The pin's random name is the proof.
- A task walks its range, some thousand cells in each view of LMDB, because a view pins pages (S3). It parses the pages
  itself (`leaves.py`). Where a lock is in the way, it reads these rows as a snapshot does: it waits for the lock's
  transaction (T9). After each step, it checks that the versions were still kept (G5), and that the owner is still the
  same (T9).

Elsewhere, the owner of a folder sends the pages as they are, which costs it a tenth of what rows do, and the executor
walks them in the same way; the owner holds the versions of its client's snapshot. If anything is in the way, such as a
tablet that is split while it is read, the task reads the rest of its range row by row.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import trio

import perco
from perco.clock.pins import pins_in
from perco.database.inside import inside
from perco.errors import Corruption, OwnerChanged, PercoError, PercoWarning, SnapshotTooOld
from perco.rpc import addresses
from perco.serve.opening import SOCKET, open
from perco.serve.remote_rows import RemoteRowStore
from perco.spark.columns import Columns, Long
from perco.spark.leaves import first_row, walk
from perco.spark.ranges import Range
from perco.spark.store import Store
from perco.storage.keys import escape
from perco.storage.pages import PageDamaged
from perco.storage.walking import Leaves
from perco.txn.snapshot import Snapshot

Send = Callable[[pa.RecordBatch], Awaitable[None]]

_CELLS_FIRST: Final = 2_000  # in one view, at first
_CELLS_MAX: Final = 50_000  # in one view; a row with more is read by itself
_BATCH_BYTES: Final = 8 << 20  # long values in a batch, unless one row has more
_CELLS_BY_ROW: Final = 500  # in a page that is read row by row
_LONG_AT_ONCE: Final = 1_000  # values of data groups
_POLL_S: Final = 0.01
_NOTED_S: Final = 5.0  # how long to wait for the owner's note of the clock


class Host(NamedTuple):
    """Tells a machine from others. LMDB's readers and writer must share memory, and see each other's process ids."""

    boot: str
    processes: str

    @classmethod
    def here(cls) -> Host | None:
        """This machine; None: it does not say."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(boot, os.readlink("/proc/self/ns/pid"))
        except OSError:
            return None


class Beside(NamedTuple):
    """What tasks need to read a folder's files: the folder, and the host on which its owner runs."""

    folder: str
    host: Host


def beside(store: Store) -> Beside | None:
    """Where the files are, if the store's owner runs on this machine and has them in a folder; else None."""
    folder = store.folder
    if not folder and addresses.is_address(store.url):
        path = addresses.parse(store.url).path
        folder = str(path.parent) if path is not None and path.name == SOCKET else ""
    elif not folder and os.path.isdir(store.url):
        folder = store.url
    host = Host.here()
    if not folder or host is None or not os.path.isdir(folder) or sys.byteorder != "little":  # as `leaves.py` reads it
        return None
    return Beside(os.path.abspath(folder), host)


class Elsewhere(Exception):
    """The files cannot be read here; the message says why."""


class NoPages(Exception):
    """The tablet is in no file of the process that has been asked."""


@asynccontextmanager
async def opened(place: Beside, pin: str, ts: int) -> AsyncIterator[perco.Database]:
    """Open the folder beside its owner, once all that has committed up to `ts` can be read there.

    Raises: Elsewhere; the errors of `perco.open`.
    """
    if Host.here() != place.host:
        raise Elsewhere("this executor is on another machine than the store's owner")
    async with open(place.folder, readonly=True) as db:
        parts = inside(db)
        if not parts.place.owner_alive:
            raise Elsewhere("no process has the folder open")
        with trio.move_on_after(_NOTED_S):
            while await parts.oracle.draw() < ts:  # noqa: ASYNC110 - the owner, another process, notes the clock
                await trio.sleep(_POLL_S)
        if parts.oracle.last < ts:
            raise Elsewhere("the owner has not noted the clock")
        if not any(found.name == pin and found.ts == ts for found in await pins_in(parts.store)):
            raise Elsewhere("this folder does not have the snapshot's pin")
        yield db


class Walk:
    """A walk over a range of a table, in its files beside the owner or in the pages that the owner sends.

    Attributes: `left`, the part of the range that has not been read.
    """

    left: Range | None

    def __init__(
        self,
        db: perco.Database,
        table: perco.Table[Any],
        columns: list[perco.Column[Any, Any]],
        key: str,
        schema: Any,
        range: Range,
        ts: int,
        rows: Callable[[Snapshot, Range, Send], Awaitable[None]],
    ) -> None:
        """`rows`: reads a range row by row, for where the walk does not."""
        parts = inside(db)
        self._parts, self._db, self._table, self._ts, self._by_rows = parts, db, table, ts, rows
        bounds = {column.name: parts.known.bind(column).column for column in columns}
        by_name = {column.name: column for column in columns}
        named = [None if name == key else (by_name[name], bounds[name]) for name in schema.names]
        self._columns = Columns(table, named, schema, ts)
        self._here = parts.owner.is_here
        self._term = parts.place.term if self._here else 0
        self._cells = _CELLS_FIRST
        self.left = range

    async def run(self, send: Send) -> None:
        """Send the rows of the range, in batches. A batch is sent only after it has been checked; rows that have been
        sent are no part of `left`.

        Raises: NoPages, PercoError, PageDamaged, ValueError if the walk cannot go on.
        """
        async with self._db.snapshot(ts=self._ts) as snap:
            while self.left is not None:
                rest, batch = await self._page(self.left)
                batches = [] if batch is None else [batch]
                if batch is None:

                    async def keep(batch: pa.RecordBatch, kept: list[pa.RecordBatch] = batches) -> None:
                        kept.append(batch)

                    await self._by_rows(snap, Range(self.left.low, rest.low if rest else self.left.high), keep)
                await self._check()
                self.left = rest
                for each in batches:
                    if each.num_rows:
                        await send(each)
                await trio.lowlevel.checkpoint()

    async def _check(self) -> None:
        """G5, T9: check that the rows read beside the owner before this call were complete. (For its clients, the owner
        holds the versions that their snapshots need; R5.) Raises: SnapshotTooOld, OwnerChanged."""
        if not self._here:
            return
        if self._parts.place.term != self._term:
            raise OwnerChanged(self._ts)
        cut = await self._parts.oracle.cut(self._table.name)
        if self._ts < cut:
            raise SnapshotTooOld(self._ts, cut, self._table.name)

    async def _page(self, range: Range) -> tuple[Range | None, pa.RecordBatch | None]:
        """The rest of the range after the next page, and the page; None: it has to be read row by row.

        Raises: as `run`.
        """
        grown = False  # the first row needs so many cells: with fewer, this would begin again and again
        while True:
            leaves = await self._leaves(range)
            page = walk(leaves, range.low, range.high, self._cells)
            if page is None:  # not even the first row fits
                if self._cells >= _CELLS_MAX:
                    past = max(first_row(leaves, range.low), range.low) + b"\0"
                    return None if range.high is not None and past >= range.high else Range(past, range.high), None
                self._cells, grown = min(self._cells * 4, _CELLS_MAX), True
                continue
            rest = None if page.next is None else Range(page.next, range.high)
            if leaves.locks and self._blocked(leaves.locks, page.next):
                if not grown and len(page.cells.begins) > _CELLS_BY_ROW < self._cells:
                    self._cells = _CELLS_BY_ROW
                    continue
                return rest, None
            found = self._columns.find(page.cells)
            long = [] if found is None else await self._long(found.long, len(found.begins) == 1)
            if long is None:
                if grown:
                    return rest, None
                self._cells = max(self._cells // 4, 1)
                continue
            self._cells = max(min(self._cells * 2, _CELLS_MAX), 1)
            return rest, self._columns.batch(found, long)

    async def _leaves(self, range: Range) -> Leaves:
        found: Leaves | None = None
        store, asked = self._parts.store, (self._table.name, range.low, range.high)
        if store.prompt is not None:
            found = store.prompt.find_leaves(*asked, self._cells)
        elif isinstance(store, RemoteRowStore):
            found = await store.leaves(*asked, self._ts, self._cells)
        if found is None:
            raise NoPages
        return found

    def _blocked(self, locks: list[bytes], next: bytes | None) -> bool:
        end = None if next is None else escape(next)
        return self._columns.blocked([key for key in locks if end is None or key < end])

    async def _long(self, wanted: list[Long], one_row: bool) -> list[bytes] | None:
        """Values that data groups have. They are read after the page: no version that it needs is collected meanwhile,
        as `_check` finds out. None: they are too many bytes for a batch of several rows. Raises: Corruption."""
        found: list[bytes] = []
        size = 0
        while len(found) < len(wanted):
            requests = [
                (self._table.name, row, ((group, column, ts, ts, 1),))
                for group, row, column, ts in wanted[len(found) : len(found) + _LONG_AT_ONCE]
            ]
            for [cells] in await self._parts.store.read_first(requests, _BATCH_BYTES):
                if not cells:
                    raise Corruption("data group", "a value is missing")
                found.append(cells[0][1])
                size += len(found[-1])
            if size > _BATCH_BYTES and not one_row:
                return None
        return found


def warn(error: Exception, how: str) -> None:
    """Say in the executor's log why a range is read in a slower way."""
    warnings.warn(f"perco reads {how}: {error}", PercoWarning, stacklevel=2)


FALLS_BACK: Final = (PercoError, Elsewhere, PageDamaged, ValueError)
