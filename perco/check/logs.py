"""Checks that the logs of changes agree with the write records (E1).

Each entry of a log must have its write record, and each write record above the table's cut must have its entry. The
log is read after the records, so a record that is written meanwhile may have an entry that is not missed. An entry
without its record is examined only above the cut, because the vacuum removes records first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable

from perco.check.examine import Finding
from perco.check.image import Book
from perco.clock.oracle import published
from perco.protocol.records import Cellref
from perco.storage import TS_MAX, WRITE, RowStore, ScanCell, ScanQuery, ScanRequest
from perco.storage.cells import is_logged
from perco.storage.keys import escape, log_key

_ENTRIES = 1024  # in a page


class Logs:
    """Counts the write records that must have an entry, and compares them with the logs. `cuts`: of the tables, when
    the check began."""

    def __init__(self, store: RowStore, cuts: dict[str, int]) -> None:
        self._store, self._cuts = store, cuts
        self._records: Counter[str] = Counter()

    def note(self, table: str, records: Iterable[ScanCell]) -> None:
        """Count the records of a row."""
        cut = self._cuts.get(table, 0)
        self._records[table] += sum(ts > cut and is_logged(column) for column, ts, _ in records)

    async def findings(self, table: str, book: Book) -> AsyncIterator[Finding]:
        """The faults of a table's logs. Raises: Corruption."""
        cut, entries = self._cuts.get(table, 0), 0
        bare: list[tuple[bytes, int, int]] = []
        low: bytes | None = b""
        while low is not None:
            start = low
            bounds = [bound for bound in self._store.bounds(table) if bound > start]
            low = bounds[0] if bounds else None
            request = ScanRequest(table, start, low, (ScanQuery(WRITE, None, cut + 1, TS_MAX, 1),), log=b"")
            request = request._replace(rows_max=_ENTRIES)
            while (page := await self._store.scan(request)).rows:
                if page.next is not None:  # the tablet has been split meanwhile
                    low = page.next
                    request = request._replace(stop=low)
                for row, [[(column, ts, value)]] in page.rows:
                    if row >= start and (low is None or row < low):
                        entries += 1
                        if not value:
                            bare.append((row, column, ts))
                [last, [[(column, ts, _)]]] = page.rows[-1]
                request = request._replace(log=log_key(escape(last), column, ts))
        _, _, cuts = await published(self._store)
        if cuts.get(table, 0) != cut:
            return  # a vacuum has removed some of them meanwhile
        for row, column, ts in bare:
            cell = Cellref(table, row, column)
            yield Finding(
                "error", "E1", book.where(*cell), f"the log has an entry at {ts}, without a write record", cell
            )
        if entries < self._records[table]:
            what = f"its logs have {entries} entries, and there are {self._records[table]} write records above the cut"
            yield Finding("error", "E1", table, what)
