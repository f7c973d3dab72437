"""Traces the causes of a row's values, and everything that followed from the same causes, as trees. Only reads.

N9  The acknowledgement of a run records its cause, and so does the record that a run for a signal leaves (N5). One pass
    over the write records of a store finds the runs of a chain, and what each of them wrote: the cells with its commit
    timestamp. The pass knows only at its end which runs belong to the chain, so it keeps the records that it reads:
    whole pages up to a bound, and of all further pages only the timestamps (12 bytes for each record, 28 for each
    acknowledgement). Afterwards, it reads again those few of the further pages that belong to the tree. The store keeps
    no data just for this. Cells that have been collected, or written again since, are missing from the tree. If the
    cause of a run is missing, the run is shown with the observers that led to it.
N20 If several runs shared a transaction, all that it wrote has its commit timestamp. So a row that it wrote belongs to
    the trees of all these runs. In a tree, each run has a node; the first one has the writes, and what followed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from perco.clock.oracle import published
from perco.errors import Corruption
from perco.notify.failing import names_on
from perco.protocol.records import (
    ACK,
    Cellref,
    cause_of_run,
    observed_column,
    observer_of,
    unpack_record,
)
from perco.storage import TS_MAX, WRITE, ScanCell, ScanPage, ScanQuery, ScanRequest
from perco.txn.engine import Engine

_CELLS: Final = 1 << 16  # read from one row
RUNS_MAX: Final = 10_000
_WRITES_MAX: Final = 100_000
_KEPT_CELLS: Final = 1 << 17  # records in the pages that are kept whole

Name = tuple[str, Any, str]  # table, key, column


@dataclass(slots=True)
class Traced:
    """A transaction, and the runs that followed from it.

    Attributes:
        commit_ts: of the transaction.
        observer: the observer that ran in the transaction; None: it was not an observer's run.
        on: the cell that the run observed, or the signal for which it ran; None: it was not an observer's run.
        depth, attempts: of a run: its place in the chain, from 1, and its number of attempts.
        through: the observers between its parent in this tree and itself whose runs have left no trace.
        writes: the cells that still have a write record at its commit timestamp.
        runs: the runs that followed.
        asked: whether it wrote the row that is being traced.
        signal: whether `on` is a signal.
        unsure: whether runs may be missing: none is known, but the record of a run for a signal may have been collected
            (G4).
        also: what further runs observed that shared the transaction (N20). They have nodes of their own, but what
            the transaction wrote, and the runs that followed, belong to the first node.
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
    signal: bool = False
    unsure: bool = False
    also: list[Name] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Run:
    cell: Cellref  # of the acknowledgement, or of the record that a run for a signal left
    commit_ts: int
    start_ts: int
    root: int
    depth: int
    path: bytes
    attempts: int
    raised: int  # of a run for a signal: the timestamp at which the signal was raised; else 0


async def trace(
    engine: Engine, table: str, row: bytes, tell: Callable[[int], None] = lambda rows: None
) -> list[Traced]:
    """The trees to which the newest values of a row belong, the newest tree first; [] if the row has no values.

    Args:
        tell: called with the number of rows read so far.
    """
    return await _Tracing(engine, table, row, tell).run()


class _Page(NamedTuple):
    """A page of write records: [start, stop) of a table. `rows` is None if it must be read again."""

    table: str
    start: bytes
    stop: bytes | None
    rows: list[tuple[bytes, list[ScanCell]]] | None


class _Index:
    """An index of all write records of a store: which page has which timestamps, and which runs have which root."""

    def __init__(self) -> None:
        self.pages: list[_Page] = []
        self._kept = 0  # cells in pages that are kept whole
        self._stamps, self._on = array("Q"), array("I")  # of each record: its timestamp, its page
        self._runs, self._roots = array("Q"), array("Q")  # of each acknowledgement: its timestamp, its root

    def add(self, table: str, start: bytes, page: ScanPage, runs: Sequence[_Run]) -> None:
        """Add the next page, and the runs whose acknowledgements are in it."""
        stamps = [ts for _, [cells] in page.rows for _, ts, _ in cells]
        self._stamps.extend(stamps)
        self._on.extend([len(self.pages)] * len(stamps))
        self._runs.extend([run.commit_ts for run in runs])
        self._roots.extend([run.root for run in runs])
        self._kept += len(stamps)
        rows = [(row, cells) for row, [cells] in page.rows] if self._kept <= _KEPT_CELLS else None
        self.pages.append(_Page(table, start, page.next, rows))

    def roots(self, stamps: set[int]) -> set[int]:
        """The roots of the transactions at these timestamps. A transaction that was not a run is its own root, and one
        that several runs shared has those of all of them (N20)."""
        found = [(ts, root) for ts, root in zip(self._runs, self._roots, strict=True) if ts in stamps]
        return {root for _, root in found} | (stamps - {ts for ts, _ in found})

    def runs(self, roots: set[int]) -> set[int]:
        """The commit timestamps of the runs that had one of these roots, at most RUNS_MAX."""
        found = (ts for ts, root in zip(self._runs, self._roots, strict=True) if root in roots)
        return set(islice(found, RUNS_MAX))

    def pages_with(self, stamps: set[int]) -> list[_Page]:
        """The pages with a record at one of these timestamps."""
        found = {page for ts, page in zip(self._stamps, self._on, strict=True) if ts in stamps}
        return [self.pages[number] for number in sorted(found)]


class _Tracing:
    def __init__(self, engine: Engine, table: str, row: bytes, tell: Callable[[int], None]) -> None:
        self._engine, self._table, self._row, self._tell = engine, table, row, tell
        catalogue = engine.known.catalogue
        self._signals = {(name, column) for name in catalogue.tables for column in catalogue.signals(name)}
        self._observers = {entry.number: id for id, entry in catalogue.observers.items()}
        self._read = 0

    async def run(self) -> list[Traced]:
        asked = await self._newest()
        if not asked:
            return []
        index = await self._index()
        roots = index.roots(asked)
        stamps = roots | index.runs(roots)
        runs: list[_Run] = []
        writes: dict[int, list[Cellref]] = {ts: [] for ts in stamps}
        left = _WRITES_MAX
        for page in index.pages_with(stamps):
            rows = page.rows if page.rows is not None else await self._again(page)
            runs += [run for run in self._runs(page.table, rows) if run.commit_ts in stamps - roots]
            for row, cells in rows:
                for column, ts, _ in cells:
                    if ts in writes and not observer_of(column) and left:
                        writes[ts].append(Cellref(page.table, row, column))
                        left -= 1
        cut = await self._cut()
        by_root: dict[int, list[_Run]] = {root: [] for root in roots}
        for run in runs:
            if run.root in by_root:  # otherwise, it only shared the transaction of one that has such a root
                by_root[run.root].append(run)
        trees = [self._tree(root, by_root[root], writes) for root in sorted(roots, reverse=True)]
        for tree in trees:
            tree.unsure = tree.commit_ts <= cut and not tree.runs
        return trees

    async def _cut(self) -> int:
        """The timestamp below which records of runs for signals may have been collected; 0: none can have been."""
        observed = {(entry.table, entry.column) for entry in self._engine.known.catalogue.observers.values()}
        tables = self._engine.known.catalogue.tables
        signalled = {table for table, column in observed if tables[table].columns[column].is_signal}
        cuts = (await published(self._engine.driver.store))[2]
        return max((cuts.get(table, 0) for table in signalled), default=0)

    async def _newest(self) -> set[int]:
        """The commit timestamp of the newest value of each column in the traced row."""
        found: dict[int, int] = {}
        start: bytes | None = self._row
        while start is not None:
            page = await self._page(self._table, start, self._row + b"\x00")
            for _, [cells] in page.rows:
                for column, ts, _ in cells:
                    if not observer_of(column):
                        found.setdefault(column, ts)
            start = page.next
        return set(found.values())

    async def _index(self) -> _Index:
        """Read all write records of the store once, and index them."""
        index = _Index()
        for table in self._engine.known.catalogue.tables:
            start: bytes | None = b""
            while start is not None:
                page = await self._page(table, start, None)
                index.add(table, start, page, list(self._runs(table, [(row, cells) for row, [cells] in page.rows])))
                start = page.next
        return index

    async def _again(self, page: _Page) -> list[tuple[bytes, list[ScanCell]]]:
        rows: list[tuple[bytes, list[ScanCell]]] = []
        start: bytes | None = page.start
        while start is not None:
            found = await self._page(page.table, start, page.stop)
            rows += [(row, cells) for row, [cells] in found.rows]
            start = found.next
        return rows

    async def _page(self, table: str, start: bytes, stop: bytes | None) -> ScanPage:
        query = ScanQuery(WRITE, None, 0, TS_MAX, _CELLS)
        page = await self._engine.driver.store.scan(ScanRequest(table, start, stop, (query,)))
        self._read += len(page.rows)
        self._tell(self._read)
        return page

    def _runs(self, table: str, rows: Sequence[tuple[bytes, list[ScanCell]]]) -> Iterator[_Run]:
        for row, cells in rows:
            for column, ts, value in cells:
                if observer_of(column):
                    signal = (table, observed_column(column)) in self._signals
                    if run := _run_of(Cellref(table, row, column), ts, value, signal=signal):
                        yield run

    def _tree(self, root: int, runs: list[_Run], writes: dict[int, list[Cellref]]) -> Traced:
        name = self._engine.known.name_of
        by_commit = {root: Traced(root)}
        each: list[tuple[_Run, Traced]] = []
        for run in sorted(runs, key=lambda run: run.commit_ts):
            traced = self._traced(run)
            shared = by_commit.setdefault(run.commit_ts, traced)
            if shared is not traced and traced.on is not None:
                shared.also.append(traced.on)
            each.append((run, traced))
        written: dict[Cellref, list[int]] = {}
        for ts in by_commit:
            for cell in writes[ts]:
                written.setdefault(cell, []).append(ts)
                by_commit[ts].writes.append(name(cell))
                by_commit[ts].asked |= (cell.table, cell.row) == (self._table, self._row)
        for run, traced in each:
            parent = by_commit.get(run.raised) if run.raised else None
            if not run.raised:
                observed = run.cell._replace(column=observed_column(run.cell.column))
                parent = by_commit.get(max((ts for ts in written.get(observed, ()) if ts <= run.start_ts), default=0))
            if parent is None:
                parent = by_commit[root]
                traced.through = tuple(names_on(self._engine, run.path))
            parent.runs.append(traced)
        return by_commit[root]

    def _traced(self, run: _Run) -> Traced:
        number = observer_of(run.cell.column)
        on = self._engine.known.name_of(run.cell._replace(column=observed_column(run.cell.column)))
        observer = self._observers.get(number, f"#{number}")
        return Traced(run.commit_ts, observer, on, run.depth + 1, run.attempts + 1, signal=bool(run.raised))


def _run_of(cell: Cellref, ts: int, value: bytes, *, signal: bool) -> _Run | None:
    try:
        kind, start_ts, body = unpack_record(value)
        found = cause_of_run(body, signal=signal) if kind == ACK else None
    except Corruption:
        return None  # `perco check` reports it
    if found is None:
        return None
    raised, (root, depth, path, attempts) = found
    return _Run(cell, ts, start_ts, root, depth, path, attempts, raised)
