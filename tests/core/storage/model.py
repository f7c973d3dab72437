"""A row store as a plain dict, the naive way: what `perco.storage.row` is compared with. And what to ask of both."""

from __future__ import annotations

from hypothesis import HealthCheck, settings, strategies as st

from perco.storage import (
    ABSENT,
    APPLIED,
    PRESENT,
    Cell,
    Check,
    Mutation,
    Query,
    Refused,
    RowCells,
    RowMutation,
    ScanCell,
    ScanQuery,
    ScanRequest,
    Verdict,
    Write,
)
from perco.storage.cells import COLUMN_MAX, ScanRow

TABLE = "t"
# However loaded the machine is, a test says the same.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
GROUPS = ("data", "lock", "write")


class Model:
    """Cells of one table: {(row, group, column, ts): value}."""

    def __init__(self, floor: int = 0) -> None:
        self.cells: dict[tuple[bytes, str, int, int], bytes] = {}
        self.floor = floor

    def apply(self, mutation: Mutation) -> Verdict:
        if mutation.floor_ts is not None and mutation.floor_ts < self.floor:
            return Refused(0, -1)
        for i, (row, checks, _) in enumerate(mutation.rows):
            for j, (kind, group, column, low, high) in enumerate(checks):
                there = any(key[:3] == (row, group, column) and low <= key[3] <= high for key in self.cells)
                if there != (kind == PRESENT):
                    return Refused(i, j)
        for row, _, writes in mutation.rows:
            for group, column, ts, value in writes:
                self.cells.pop((row, group, column, ts), None)
                if value is not None:
                    self.cells[row, group, column, ts] = value
        return APPLIED

    def versions(self, row: bytes, group: str, column: int, low: int, high: int, n: int) -> list[Cell]:
        found = [
            (key[3], value)
            for key, value in self.cells.items()
            if key[:3] == (row, group, column) and low <= key[3] <= high
        ]
        return sorted(found, reverse=True)[:n] if n >= 0 else sorted(found)[:-n]

    def read(self, row: bytes, queries: list[Query]) -> RowCells:
        return [self.versions(row, *query) for query in queries]

    def scan(self, request: ScanRequest) -> list[ScanRow]:
        """All pages of a scan in one."""
        rows = sorted({key[0] for key in self.cells}, reverse=request.reverse)
        out = []
        for row in rows:
            if row >= request.start and (request.stop is None or row < request.stop):
                cells = [self._scan_row(row, query) for query in request.queries]
                if any(cells):
                    out.append((row, cells))
        return out

    def _scan_row(self, row: bytes, query: ScanQuery) -> list[ScanCell]:
        low, high = query.from_ts, query.to_ts
        if query.columns is not None:
            return [
                (column, ts, value)
                for column in query.columns
                for ts, value in self.versions(row, query.group, column, low, high, query.n)
            ]
        columns = sorted({key[2] for key in self.cells if key[:2] == (row, query.group)})
        return [
            (column, ts, value)
            for column in columns
            for ts, value in self.versions(row, query.group, column, low, high, 1 << 30)
        ][: query.n]


# Few of everything, so that a query often finds something; rows that are each other's prefixes, or dense in zeros.
rows = st.sampled_from(
    [b"", b"\x00", b"\x00\x00", b"a", b"a\x00", b"a\x00\x01", b"a\x01", b"ab", b"b", b"\xff", b"\xff\xff"]
    + [b"\x00" * n for n in (31, 32, 33, 400)]
)
columns = st.sampled_from([0, 1, 2, COLUMN_MAX])
timestamps = st.integers(1, 9)
groups = st.sampled_from(GROUPS)
ranges = st.tuples(st.integers(0, 10), st.integers(0, 10))  # empty where the second is the smaller one
values = st.binary(max_size=3)


@st.composite
def checks(draw: st.DrawFn) -> Check:
    group, column = draw(groups), draw(columns)
    if draw(st.booleans()):
        ts = draw(timestamps)
        return (draw(st.sampled_from([ABSENT, PRESENT])), group, column, ts, ts)
    return (ABSENT, group, column, *draw(ranges))


writes: st.SearchStrategy[Write] = st.tuples(groups, columns, timestamps, st.none() | values)


def row_mutations(rows: st.SearchStrategy[bytes]) -> st.SearchStrategy[RowMutation]:
    return st.tuples(rows, st.lists(checks(), max_size=2), st.lists(writes, max_size=4))


def mutations(rows: st.SearchStrategy[bytes]) -> st.SearchStrategy[Mutation]:
    some = st.lists(row_mutations(rows), min_size=1, max_size=3)
    return st.builds(Mutation, st.just(TABLE), some, st.none() | st.integers(0, 10), st.booleans())


@st.composite
def queries(draw: st.DrawFn) -> Query:
    return (draw(groups), draw(columns), *draw(ranges), draw(st.integers(-3, 3)))


@st.composite
def scan_queries(draw: st.DrawFn) -> ScanQuery:
    chosen = draw(st.none() | st.lists(columns, unique=True, max_size=3).map(tuple))
    return ScanQuery(draw(groups), chosen, *draw(ranges), draw(st.integers(0, 3)))


@st.composite
def scan_requests(draw: st.DrawFn) -> ScanRequest:
    return ScanRequest(
        TABLE,
        draw(rows),
        draw(st.none() | rows),
        tuple(draw(st.lists(scan_queries(), max_size=3))),
        reverse=draw(st.booleans()),
        rows_max=draw(st.integers(1, 3)),
        bytes_max=draw(st.integers(1, 6)),
        seeks_max=draw(st.integers(1, 20)),
    )
