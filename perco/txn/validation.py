"""Repeats, at commit_ts, the reads of a serializable transaction (T14); `reads.py` interprets what they find.

T7  The transaction holds locks meanwhile, so nothing here waits for other transactions: neither for their locks, nor
    for their one-step commits. Those transactions may be waiting for our locks.
C4  Before each read, the validation checks the memory of entered cells: an entry at or below commit_ts fails the
    validation, as a lock does.
"""

from __future__ import annotations

from collections.abc import Sequence

from perco.protocol.reads import UNDECIDED, Range, Reads, Stale, queries_at, version_at
from perco.protocol.records import Cellref
from perco.storage import ReadRequest, RowStore, ScanCell
from perco.txn.entered import Entered
from perco.txn.fates import Fates

_ROWS_PER_READ = 256


class Validation:
    """The validation of a transaction that holds its locks and has drawn its commit_ts."""

    def __init__(self, store: RowStore, fates: Fates, entered: Entered, start_ts: int, commit_ts: int) -> None:
        self._store, self._fates, self._entered = store, fates, entered
        self._start_ts, self._commit_ts = start_ts, commit_ts

    async def run(self, reads: Reads) -> Stale | None:
        """The first cells or the first range found to have changed since they were read; None: nothing has changed."""
        rows: dict[tuple[str, bytes], list[int]] = {}
        for table, row, column in reads.cells:
            rows.setdefault((table, row), []).append(column)
        wanted = list(rows.items())
        for at in range(0, len(wanted), _ROWS_PER_READ):
            stale = await self._cells(wanted[at : at + _ROWS_PER_READ], reads)
            if stale:
                return Stale(tuple(stale), ())
        for scanned in reads.ranges:
            if not await self._is_as_read(scanned):
                return Stale((), (scanned,))
        return None

    async def _cells(self, wanted: Sequence[tuple[tuple[str, bytes], list[int]]], reads: Reads) -> list[Cellref]:
        """Those cells of some rows that have changed since they were read."""
        ts = self._commit_ts
        cells_of = [Cellref(table, row, column) for (table, row), columns in wanted for column in columns]
        if self._entered.among(cells_of, ts):
            return [cell for cell in cells_of if self._entered.among([cell], ts)]
        requests: list[ReadRequest] = [(table, row, queries_at(columns, ts)) for (table, row), columns in wanted]
        stale = []
        for ((table, row), columns), cells in zip(wanted, await self._store.read(requests), strict=True):
            for i, column in enumerate(columns):
                cell = Cellref(table, row, column)
                locks, writes = cells[2 * i], cells[2 * i + 1]
                if version_at(ts, self._start_ts, locks, writes, self._fates.known) != reads.cells[cell]:
                    stale.append(cell)
        return stale

    async def _is_as_read(self, scanned: Range) -> bool:
        request = scanned.first_page(self._commit_ts, _ROWS_PER_READ)
        if request is None:
            return True
        now = scanned.again()
        while True:
            if self._entered.within(request.table, request.start, request.stop, scanned.columns, self._commit_ts):
                return False
            page = await self._store.scan(request)
            for row, (locks, writes) in page.rows:
                versions = self._versions(scanned.columns, locks, writes)
                if any(version == UNDECIDED for _, version in versions):
                    return False
                now.add(row, versions)
            if now.rows > scanned.rows:
                return False
            if page.next is None:
                break
            request = request._replace(stop=page.next) if scanned.reverse else request._replace(start=page.next)
        return now.same(scanned)

    def _versions(
        self, columns: Sequence[int], locks: Sequence[ScanCell], writes: Sequence[ScanCell]
    ) -> list[tuple[int, int]]:
        ts, own, known = self._commit_ts, self._start_ts, self._fates.known
        held = {column: [(at, value)] for column, at, value in locks}
        newest = {column: [(at, value)] for column, at, value in writes}
        return [
            (column, version_at(ts, own, held.get(column, ()), newest.get(column, ()), known)) for column in columns
        ]
