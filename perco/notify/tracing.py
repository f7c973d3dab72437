"""What a row's values came from, and all that followed from the same cause, as a tree. Reads only.

N9  An ack says what it was caused by. So two passes over the write records of a store tell a chain's runs, and what
    each has written: the cells with its commit timestamp. Nothing is kept for this besides; it takes as long as reading
    all write records does. What has been collected, or has been written again since, is missing: then a run is shown
    with the observers that it came through.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from perco.errors import Corruption
from perco.notify.failing import names_on
from perco.storage import TS_MAX, WRITE, ScanCell, ScanQuery, ScanRequest
from perco.txn.client import Client
from perco.txn.records import (
    ACK,
    ACK_HEAD_BYTES,
    Cellref,
    observed_column,
    observer_of,
    unpack_cause,
    unpack_record,
)

_CELLS: Final = 1 << 16  # of a row
RUNS_MAX: Final = 10_000
_WRITES_MAX: Final = 100_000

Name = tuple[str, Any, str]  # table, key, column


@dataclass(slots=True)
class Traced:
    """A transaction, and the runs that followed from it.

    Attributes:
        commit_ts: of the transaction.
        observer: whose run it was; None: it came from outside.
        on: the cell that it observed, None from outside.
        depth, attempts: of a run.
        through: the observers between what it hangs below here and itself, where these have left no trace.
        writes: the cells that have its timestamp, up to now.
        runs: what followed.
        asked: it wrote the row that was asked for.
    """

    commit_ts: int
    observer: str | None = None
    on: Name | None = None
    depth: int = 0
    attempts: int = 0
    through: tuple[str, ...] = ()
    writes: list[Name] = field(default_factory=list)
    runs: list[Traced] = field(default_factory=list)
    asked: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    cell: Cellref  # the ack
    commit_ts: int
    start_ts: int
    root: int
    depth: int
    path: bytes
    attempts: int


async def trace(
    client: Client, table: str, row: bytes, tell: Callable[[int], None] = lambda rows: None
) -> list[Traced]:
    """The trees of causes that the newest values of a row belong to, the newest first; [] for a row without any.

    Args:
        tell: called with the number of rows read so far.
    """
    return await _Tracing(client, table, row, tell).run()


class _Tracing:
    def __init__(self, client: Client, table: str, row: bytes, tell: Callable[[int], None]) -> None:
        self._client, self._table, self._row, self._tell = client, table, row, tell
        self._read = 0

    async def run(self) -> list[Traced]:
        asked = {ts for _, ts, _ in await self._newest() if ts}
        if not asked:
            return []
        writers = {run.commit_ts: run async for run in self._runs(lambda run: run.commit_ts in asked)}
        roots = {writers[ts].root if ts in writers else ts for ts in asked}
        runs = []
        async for run in self._runs(lambda run: run.root in roots):
            runs.append(run)
            if len(runs) >= RUNS_MAX:
                break
        writes = await self._writes({*roots, *(run.commit_ts for run in runs)})
        return [self._tree(root, [run for run in runs if run.root == root], writes) for root in sorted(roots)[::-1]]

    async def _newest(self) -> list[ScanCell]:
        """The newest record of each column of the row that was asked for."""
        found: dict[int, ScanCell] = {}
        async for _, cells in self._rows(self._table, self._row, self._row + b"\x00"):
            for cell in cells:
                if not observer_of(cell[0]):
                    found.setdefault(cell[0], cell)
        return list(found.values())

    async def _rows(
        self, table: str, start: bytes | None, stop: bytes | None
    ) -> AsyncIterator[tuple[bytes, list[ScanCell]]]:
        query = ScanQuery(WRITE, None, 0, TS_MAX, _CELLS)
        while start is not None:
            page = await self._client.driver.store.scan(ScanRequest(table, start, stop, (query,)))
            for row, [cells] in page.rows:
                yield row, cells
            self._read += len(page.rows)
            self._tell(self._read)
            start = page.next

    async def _runs(self, wanted: Callable[[_Run], bool]) -> AsyncIterator[_Run]:
        for table in sorted({entry.table for entry in self._client.catalogue.observers.values()}):
            async for row, cells in self._rows(table, b"", None):
                for column, ts, value in cells:
                    if observer_of(column) and (run := _run_of(Cellref(table, row, column), ts, value)) and wanted(run):
                        yield run

    async def _writes(self, stamps: set[int]) -> dict[int, list[Cellref]]:
        """The cells that were written at these timestamps."""
        found: dict[int, list[Cellref]] = {ts: [] for ts in stamps}
        count = 0
        for table in self._client.local.store.tables():
            if table not in self._client.catalogue.tables:
                continue
            async for row, cells in self._rows(table, b"", None):
                for column, ts, _ in cells:
                    if ts in found and not observer_of(column) and count < _WRITES_MAX:
                        found[ts].append(Cellref(table, row, column))
                        count += 1
        return found

    def _tree(self, root: int, runs: list[_Run], writes: dict[int, list[Cellref]]) -> Traced:
        name = self._client.name_of
        by_commit = {root: Traced(root)} | {run.commit_ts: self._traced(run) for run in runs}
        written: dict[Cellref, list[int]] = {}
        for ts in by_commit:
            for cell in writes[ts]:
                written.setdefault(cell, []).append(ts)
                by_commit[ts].writes.append(name(cell))
                by_commit[ts].asked |= (cell.table, cell.row) == (self._table, self._row)
        for run in sorted(runs, key=lambda run: run.commit_ts):
            observed = run.cell._replace(column=observed_column(run.cell.column))
            seen = [ts for ts in written.get(observed, ()) if ts <= run.start_ts]
            parent = by_commit[max(seen)] if seen else by_commit[root]
            if not seen:
                by_commit[run.commit_ts].through = tuple(names_on(self._client, run.path))
            parent.runs.append(by_commit[run.commit_ts])
        return by_commit[root]

    def _traced(self, run: _Run) -> Traced:
        numbers = {entry.number: id for id, entry in self._client.catalogue.observers.items()}
        number = observer_of(run.cell.column)
        on = self._client.name_of(run.cell._replace(column=observed_column(run.cell.column)))
        observer = numbers.get(number, f"#{number}")
        return Traced(run.commit_ts, observer, on, run.depth + 1, run.attempts + 1)


def _run_of(cell: Cellref, ts: int, value: bytes) -> _Run | None:
    try:
        kind, start_ts, body = unpack_record(value)
        if kind != ACK or len(body) <= ACK_HEAD_BYTES:
            return None
        root, depth, path, attempts = unpack_cause(body[ACK_HEAD_BYTES:])
    except Corruption:
        return None  # `perco check` tells of it
    return _Run(cell, ts, start_ts, root, depth, path, attempts)
