"""Reads a table's files in the executors, beside the store's owner, and makes Arrow columns of them.

A served read sends every row through the owner. If an executor is on the owner's machine, it can read the files of the
tablets itself, as `perco.open(folder, readonly=True)` does, and leave the owner alone:

- The driver pins the snapshot, and tells the tasks the folder and its own `Host`. The owner notes the clock when it
  makes the pin, so readers beside it see all commits up to the pin's timestamp (O3, C4).
- A task reads the files only if it runs on the same host, and finds that pin in the folder: then the folder is the
  store in which the pin was made. The pin's random name is the proof.
- A task walks its range, some thousand cells in each view of LMDB, because a view pins pages (S3). It reads the pages
  itself (`leaves.py`). Where a lock is in
  the way, it reads these rows as a snapshot beside the owner does: it waits for the lock's transaction (T9). After each
  page, it checks that the versions were still kept (G5), and that the owner is still the same (T9).

If anything is in the way, such as a tablet that is split while it is read, the task reads the rest of its range through
the owner.
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
from perco.database.inside import inside, local_owner
from perco.errors import OwnerChanged, PercoError, PercoWarning, SnapshotTooOld, Unavailable
from perco.rpc import addresses
from perco.serve.opening import SOCKET, open
from perco.spark.columns import Columns, TooMuch
from perco.spark.leaves import walk
from perco.spark.ranges import Range
from perco.spark.store import Store
from perco.storage.pages import PageDamaged
from perco.storage.walking import engine_of, viewed
from perco.txn.snapshot import Snapshot

Send = Callable[[pa.RecordBatch], Awaitable[None]]

_CELLS_FIRST: Final = 2_000  # in one view, at first
_CELLS_MAX: Final = 50_000
_BATCH_BYTES: Final = 8 << 20  # long values in a batch, unless one row has more
_CELLS_BY_ROW: Final = 500  # in a page that is read row by row
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
    """A walk over a range of a table, beside its owner.

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
        self._term = parts.place.term
        local = local_owner(db).backend.local
        assert local is not None, "the folder is open in this process"
        self._local = local
        self._cells = _CELLS_FIRST
        self.left = range

    async def run(self, send: Send) -> None:
        """Send the rows of the range, in batches. A batch is sent only after it has been checked; what has been sent is
        no part of `left`.

        Raises: PercoError, ValueError if the walk cannot go on.
        """
        async with self._db.snapshot(ts=self._ts) as snap:
            while self.left is not None:
                rest, batch = self._page(self.left)
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
        """G5, T9: what has been read before this call was complete. Raises: SnapshotTooOld, OwnerChanged."""
        if self._parts.place.term != self._term:
            raise OwnerChanged(self._ts)
        cut = await self._parts.oracle.cut(self._table.name)
        if self._ts < cut:
            raise SnapshotTooOld(self._ts, cut, self._table.name)

    def _page(self, range: Range) -> tuple[Range | None, pa.RecordBatch | None]:
        """The rest of the range after the next page, and the page; None: it has to be read row by row.

        Raises: TabletSplit, Corruption, Unavailable.
        """
        store = self._local.store
        tablet = store.tablet(self._table.name, range.low)
        engine = engine_of(tablet)
        if engine is None:
            raise Unavailable("a tablet has no files here")
        stop = store.stop_of(tablet)
        end = range.high if stop is None or (range.high is not None and range.high <= stop) else stop
        while True:
            with viewed(engine, range.low, end) as view:
                page = walk(view, range.low, end, self._cells)
                if page is None:  # one row may have more cells
                    self._cells *= 4
                    continue
                after = page.next if page.next is not None else end if end != range.high else None
                rest = Range(after, range.high) if after is not None else None
                locks = view.locks(range.low, end if page.next is None else page.next)
                if locks and self._columns.blocked(locks):
                    if len(page.cells.begins) > _CELLS_BY_ROW < self._cells:
                        self._cells = _CELLS_BY_ROW
                        continue
                    return rest, None
                try:
                    batch = self._columns.batch(page.cells, view.value, _BATCH_BYTES)
                except TooMuch:
                    self._cells = max(self._cells // 4, 1)
                    continue
            self._cells = max(min(self._cells * 2, _CELLS_MAX), 1)
            return rest, batch


def warn(error: Exception) -> None:
    """Say in the executor's log why a range is read through the owner after all."""
    warnings.warn(f"perco reads through the store's owner: {error}", PercoWarning, stacklevel=2)


FALLS_BACK: Final = (PercoError, Elsewhere, PageDamaged, ValueError)
