"""Returns space to the file system: rewrites the files of tablets without their free pages.

LMDB reuses free pages, but never makes a file shorter. A compaction copies a tablet's cells into a new file, in key
order and with full pages, while reads and writes go on; then the new file replaces the old one.

P6  If the process is stopped at any moment, either the old files or the new ones are valid, and hold every acknowledged
    write. Writes to the tablet wait while the files are replaced; reads do not.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from perco.errors import UsageError
from perco.schema.catalogue import SYSTEM_TABLE
from perco.schema.schema import Table
from perco.storage import LmdbTablet, Tablet
from perco.tablets.local import LocalStore
from perco.tablets.splitter import Splitter
from perco.txn.background import Background

log: logging.Logger = logging.getLogger("perco.compact")


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of compacting a tablet.

    Attributes:
        table: the tablet's table.
        row: its first row, as stored.
        before, after: bytes of its file.
        seconds: how long it took.
        paused_s: how long writes to it waited.
    """

    table: str
    row: bytes
    before: int
    after: int
    seconds: float
    paused_s: float


def what_to_compact(table: Table[Any] | str | None) -> str | None:
    """The name of the table to compact; None: all tables. Raises: UsageError."""
    if isinstance(table, Table):
        return table.name
    if not (table is None or isinstance(table, str)):
        raise UsageError("compact takes a table, or its name, or nothing for all of them")
    return table


class Compactor:
    """One per opened store. Compacts one tablet at a time, and none while a tablet is being split."""

    def __init__(self, local: LocalStore, background: Background, splitter: Splitter) -> None:
        self._local, self._background, self._splitter = local, background, splitter
        self._under_way: Tablet | None = None

    async def compact(self, table: str | None) -> list[Compacted]:
        """Compact the tablets of a table, or all tablets, each in a task of its own. A caller that is cancelled waits
        until the tablet under way has been compacted, or its compaction has been given up without a change.

        Raises: UsageError if the store cannot be compacted; StoreFull, Unavailable: earlier tablets stay compacted.
        """
        tables = [name for name in self._local.store.tables() if name != SYSTEM_TABLE]
        if table is not None and table not in tables:
            known = ", ".join(sorted(tables)) or "none"
            raise UsageError(f"there is no table {table!r} in this store; there are: {known}")
        done: list[Compacted] = []
        for name in tables if table is None else [table]:
            for start in list(self._local.store.bounds(name)):
                done.append(await self._background.apart(partial(self._one, name, start), "compact"))
        return done

    def progress(self) -> tuple[str, int, int] | None:
        """The tablet under way: its table, how many cells have been copied, and how many there are; None: there is
        none."""
        tablet = self._under_way
        if not isinstance(tablet, LmdbTablet):
            return None
        return tablet.table, tablet.copied(), sum(map(tablet.entries, tablet.groups()))

    async def _one(self, table: str, start: bytes) -> Compacted:
        async with self._splitter.alone():
            began = trio.current_time()
            tablet: Tablet = self._local.store.tablet(table, start)
            self._under_way = tablet
            try:
                before, after, paused_s = await self._local.compact(tablet)
            finally:
                self._under_way = None
            seconds = trio.current_time() - began
            log.info("a tablet of %s was compacted: %d to %d bytes", table, before, after)
            return Compacted(table, start, before, after, seconds, paused_s)
