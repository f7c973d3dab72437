"""Reads the pages of a table's files in the executors, and makes Arrow columns of them.

A read of rows makes the owner, and then the executor, decode every cell. If an executor is on the owner's machine, it
reads the files of the tablets itself, as `perco.open(folder, readonly=True)` does, and leaves the owner alone:

- The driver pins the snapshot, and tells the tasks the folder and its own `Host`. The owner notes the clock when it
  makes the pin, so readers beside it see all commits up to the pin's timestamp (O3, C4).
- A task reads the files only if it runs on the same host, and finds that pin in the folder: then the folder is the
  store in which the pin was made. The pin's random name is the proof.
- A task walks its range, some thousand cells in each view of LMDB, because a view pins pages (S3). It parses the pages
  itself (`perco/txn/columnar.py`). Where a lock is in the way, it reads these rows as a snapshot does: it waits for the
  lock's transaction (T9). After each step, it checks that the versions were still kept (G5), and that the owner is
  still the same (T9).

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
from perco.arrow.columns import Columns
from perco.clock.pins import pins_in
from perco.database.inside import inside
from perco.errors import PercoError, PercoWarning
from perco.rpc import addresses
from perco.serve.opening import SOCKET, open
from perco.spark import types
from perco.spark.ranges import Range
from perco.spark.store import Store
from perco.storage.pages import PageDamaged
from perco.txn.columnar import Pages
from perco.txn.snapshot import Snapshot

Send = Callable[[pa.RecordBatch], Awaitable[None]]

_CELLS_FIRST: Final = 2_000  # in one view, at first
_CELLS_MAX: Final = 50_000  # in one view; a row with more is read by itself
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


async def left_s(db: perco.Database, pin: str, ts: int) -> float:
    """How many seconds are left of the lease of a pin at a timestamp, by what the folder has."""
    parts = inside(db)
    ends = [found.expires_ms for found in await pins_in(parts.store) if (found.name, found.ts) == (pin, ts)]
    return (ends[0] - parts.oracle.wall_ms()) / 1000 if ends else 0.0


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
        known = inside(db).known
        fields = types.fields_of(table, columns, key, schema, lambda column: known.bind(column).column)
        self._db, self._table, self._ts, self._by_rows = db, table, ts, rows
        self._columns = Columns(table.key, fields, ts)
        self._cells = _CELLS_FIRST
        self.left = range

    async def run(self, send: Send) -> None:
        """Send the rows of the range, in batches. A batch is sent only after it has been checked; rows that have been
        sent are no part of `left`.

        Raises: NoPages, PercoError, PageDamaged, ValueError if the walk cannot go on.
        """
        async with self._db.snapshot(ts=self._ts) as snap:
            pages = Pages(snap, self._table, self._columns, self._cells, _CELLS_MAX)
            while self.left is not None:
                page = await pages.page(*self.left)
                batches = [] if page.batch is None else [page.batch]
                if page.batch is None:

                    async def keep(batch: pa.RecordBatch, kept: list[pa.RecordBatch] = batches) -> None:
                        kept.append(batch)

                    await self._by_rows(snap, Range(self.left.low, page.next or self.left.high), keep)
                await self._check(pages)
                self.left = None if page.next is None else Range(page.next, self.left.high)
                for each in batches:
                    if each.num_rows:
                        await send(each)
                await trio.lowlevel.checkpoint()

    async def _check(self, pages: Pages) -> None:
        """G5, T9: check that the rows read before this call were complete. Raises: SnapshotTooOld, OwnerChanged."""
        await pages.still_kept()


def warn(error: Exception, how: str) -> None:
    """Say in the executor's log why a range is read in a slower way."""
    warnings.warn(f"perco reads {how}: {error}", PercoWarning, stacklevel=2)


FALLS_BACK: Final = (PercoError, Elsewhere, PageDamaged, ValueError)
