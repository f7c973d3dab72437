"""Checks the system table (the catalogue's versions, the clock's notes, the watermark), and the locality groups.

O1  No note and no watermark is above the oracle's durable bound, above which no timestamp was ever handed out.
O3  Notes hold wall times, which rise with the timestamps.
G1  The watermark decodes, and no table's cut (the oldest timestamp at which the table can be read) is above it.
N10 Every version of the catalogue decodes, and so does the progress of backfills. All locality groups are in the
    catalogue.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from perco.check import repairs
from perco.check.examine import Finding
from perco.clock.oracle import CLOCK_ROW, durable_bound, published
from perco.errors import Corruption
from perco.notify.backfill import noted
from perco.schema.catalogue import CATALOGUE_ROW, SYSTEM_TABLE, Catalogue, load
from perco.storage import DATA, PROTOCOL_GROUPS, TS_MAX, Query, RowStore


async def of_system(store: RowStore, cells_max: int) -> AsyncIterator[Finding]:
    """All findings in the system table; `cells_max`: how many cells are read at once."""
    async for ts, value in _versions(store, CATALOGUE_ROW, cells_max):
        try:
            version = Catalogue.unpack(value).version
        except Corruption as error:
            yield Finding("error", "N10", "catalogue", f"version {ts}: {error.what}")
            continue
        if version != ts:
            yield Finding("error", "N10", "catalogue", f"version {version} is in the cell of version {ts}")
    for entry in (await load(store)).observers.values():
        try:
            await noted(store, entry)
        except Corruption as error:
            drop = repairs.drop_backfill_note(entry.number)
            yield Finding("warning", "N10", "backfill", f"observer #{entry.number}: {error.what}", None, 0, drop)
    notes: Notes | None = None
    async for ts, value in _versions(store, CLOCK_ROW, cells_max):
        notes = notes or Notes(await durable_bound(store))  # read after the newest note, so it is above the note
        if (finding := notes.next(ts, value)) is not None:
            yield finding
    try:
        _, watermark, cuts = await published(store)
    except Corruption as error:
        yield Finding("error", "G1", "watermark", error.what)
        return
    bound = await durable_bound(store)  # read after the watermark, so it is above the watermark
    highest = max(cuts.values(), default=0)
    if watermark > bound:
        yield Finding("error", "O1", "watermark", f"{watermark} is above the bound, {bound}")
    elif highest > watermark:
        yield Finding("error", "G1", "watermark", f"a table is cut at {highest}, above the watermark, {watermark}")


async def _versions(store: RowStore, row: bytes, cells_max: int) -> AsyncIterator[tuple[int, bytes]]:
    """Every version of a cell of the system table, newest first."""
    high = TS_MAX
    while True:
        query: Query = (DATA, 0, 0, high, cells_max)
        [[cells]] = await store.read([(SYSTEM_TABLE, row, [query])])
        for cell in cells:
            yield cell
        if len(cells) < cells_max or not cells[-1][0]:
            return
        high = cells[-1][0] - 1


class Notes:
    """O1, O3: each note holds a wall time, none is above the bound, and wall times rise with the timestamps.

    If two notes contradict each other, it is not known which of them is wrong, so the repair deletes both.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._newer = (TS_MAX, TS_MAX)

    def next(self, ts: int, value: bytes) -> Finding | None:
        """The fault of the note at `ts`, if it has one; notes come newest first."""
        if len(value) != 8:
            return _of_note("O3", f"the note at {ts} is not a wall time", ts)
        if ts > self._bound:
            return _of_note("O1", f"the note at {ts} is above the bound, {self._bound}", ts)
        wall_ms = int.from_bytes(value, "big")
        (newer, newer_ms), self._newer = self._newer, (ts, wall_ms)
        if wall_ms > newer_ms:
            return _of_note("O3", f"the note at {ts} has a later wall time than the one at {newer}", newer, ts)
        return None


def _of_note(invariant: str, what: str, *drops: int) -> Finding:
    return Finding("error", invariant, "clock", what, None, 0, repairs.drop_notes(*drops))


Groups = tuple[str, bytes, list[str]]  # a tablet's table, its first row, the locality groups in it


def groups_of(store: RowStore) -> list[Groups]:
    """The groups of all tablets that this process has open."""
    return [(tablet.table, tablet.start, tablet.groups()) for tablet in store.tablets_here()]


def strange_groups(found: Sequence[Groups], catalogue: Catalogue) -> Iterator[Finding]:
    """N10: groups that are missing from the catalogue, which must have been read after `found`."""
    for table, start, groups in found:
        if table not in catalogue.tables and table != SYSTEM_TABLE:
            what = f"there is a tablet from {start!r} on, but the catalogue has no such table"
            yield Finding("error", "N10", table, what)
            continue
        known = {*PROTOCOL_GROUPS, *(catalogue.all_groups(table) if table != SYSTEM_TABLE else ())}
        for group in sorted(set(groups) - known):
            what = f"the tablet from {start!r} on has a group {group!r}, which the catalogue does not have"
            yield Finding("error", "N10", table, what)
