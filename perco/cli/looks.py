"""One look at what still waits for observers: notify cells, and locks of observed cells (N7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import perco
from perco.storage import LOCK, NOTIFY, TS_MAX, WRITE, ScanCell, ScanQuery, ScanRequest
from perco.txn import catalogue as catalogues
from perco.txn.catalogue import Catalogue
from perco.txn.records import observer_of, unpack_cause, unpack_lock

_CELLS = 1 << 16


@dataclass(frozen=True, slots=True)
class Look:
    """What waits: changes for each observer, by id, and locks that will notify one.

    `marks`: write records of each tablet of an observed table. A notification ends, and another begins, only with a
    write record: two looks that find nothing and the same marks have proved that nothing stood between them.
    """

    version: int
    marks: tuple[int, ...]
    waiting: dict[str, int] = field(default_factory=dict)
    locks: int = 0

    @property
    def changes(self) -> int:
        return sum(self.waiting.values())

    @property
    def empty(self) -> bool:
        return not self.changes and not self.locks


async def look(db: perco.Database, until_ts: int | None = None) -> Look:
    """Look at every observed table; `until_ts`: only for what was caused at or before it."""
    catalogue = await catalogues.load(db.driver.store)
    if catalogue.version != db.catalogue.version:
        await db.local.adapt(catalogue)
        db.catalogue = catalogue
    observed = {entry.table for entry in catalogue.observers.values()} & set(db.local.store.tables())
    marks = tuple(tablet.entries(WRITE) for tablet in db.local.store.tablets() if tablet.table in observed)
    names = {entry.number: id for id, entry in catalogue.observers.items()}
    counts: Counter[str] = Counter(dict.fromkeys(catalogue.observers, 0))
    locks = 0
    for table in sorted(observed):
        async for _, ts, value in _cells(db, table, LOCK):
            lock = unpack_lock(value)
            locks += bool(lock.observers) and (until_ts is None or (lock.root or ts) <= until_ts)
        async for column, _, value in _cells(db, table, NOTIFY):
            if until_ts is None or unpack_cause(value)[0] <= until_ts:
                number = observer_of(column)
                counts[names.get(number, f"#{number}")] += 1
    return Look(catalogue.version, marks, dict(counts), locks)


async def _cells(db: perco.Database, table: str, group: str) -> AsyncIterator[ScanCell]:
    start: bytes | None = b""
    while start is not None:
        page = await db.driver.store.scan(ScanRequest(table, start, None, (ScanQuery(group, None, 0, TS_MAX, _CELLS),)))
        for _, [cells] in page.rows:
            for cell in cells:
                yield cell
        start = page.next


def observed_by(catalogue: Catalogue, table: str, column: str) -> list[str]:
    """Ids of a column's observers."""
    return [id for id, entry in catalogue.observers.items() if (entry.table, entry.column) == (table, column)]
