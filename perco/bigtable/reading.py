"""Combines requests into calls, and finds the cells of each request in the answer. Pure.

Requests of the same shape share a call, even if their timestamps differ; in that case, the call reads a few more
versions. If the call may have left out versions that a request needs, that request gets a call of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from perco.bigtable.chunks import ReadCell, ReadRow
from perco.bigtable.keys import DATA_FAMILY, MICROS, column_of, place_of, qualifier
from perco.storage import Query, RowCells, ScanCell, ScanQuery

_SPARE: Final = 3  # how many more versions to read if requests for different timestamps share a call

Shape: TypeAlias = tuple[tuple[str, int, int, int, int], ...]  # (group, column, n, low, high) of each query
Places: TypeAlias = dict[tuple[str, bytes], dict[int, bytes]]  # (family, qualifier) -> timestamp -> value


def by_place(row: ReadRow) -> Places:
    """The cells of a row, by place. Several filters may have let the same cell through, some without its value."""
    out: Places = {}
    cell: ReadCell
    for cell in row.cells:
        there = out.setdefault((cell.family, cell.name), {})
        ts = cell.micros // MICROS
        if cell.value or ts not in there:
            there[ts] = cell.value
    return out


def shape_of(queries: Sequence[Query]) -> Shape:
    """The shape of a request; requests of the same shape share a call. If a request asks for one column twice, its
    timestamps are part of its shape, because it would otherwise be unknown which versions the call left out."""
    where = {query[:2] for query in queries}
    if len(where) == len(queries):
        return tuple((group, column, n, 0, 0) for group, column, _, _, n in queries)
    return tuple((group, column, n, low, high) for group, column, low, high, n in queries)


def shared(requests: Sequence[Sequence[Query]]) -> list[Query]:
    """Queries that serve requests of the same shape. If the timestamps of the requests differ, the queries ask for a
    few more, older versions."""
    first = requests[0]
    out: list[Query] = []
    for k, (group, column, _, _, n) in enumerate(first):
        lows = {queries[k][2] for queries in requests}
        highs = {queries[k][3] for queries in requests}
        out.append((group, column, min(lows), max(highs), n if n < 0 or len(highs) == 1 else n + _SPARE))
    return out


def chosen(places: Places, wanted: Sequence[Query], asked: Sequence[Query]) -> RowCells | None:
    """The cells of one request (`wanted`) among those that its call (`asked`) has found; None: the call may have left
    some of them out."""
    out: RowCells = []
    for (group, column, low, high, n), (_, _, _, asked_high, limit) in zip(wanted, asked, strict=True):
        found = places.get((place_of(group)[0], qualifier(group, column)), {})
        cells = sorted(((ts, value) for ts, value in found.items() if low <= ts <= high), reverse=n > 0)
        if 0 < limit <= len(found) and len(cells) < n and high != asked_high:
            return None
        out.append(cells[: abs(n)])
    return out


def scanned(places: Places, query: ScanQuery) -> list[ScanCell]:
    family, tag = place_of(query.group)
    if query.columns is not None:
        columns = [(column, qualifier(query.group, column)) for column in query.columns]
    else:
        columns = sorted(
            (column_of(tag, name), name)
            for there, name in places
            if there == family and name.startswith(tag) and (family != DATA_FAMILY or _is_of(tag, name))
        )
    out: list[ScanCell] = []
    for column, name in columns:
        found = places.get((family, name), {})
        cells = sorted((ts for ts in found if query.from_ts <= ts <= query.to_ts), reverse=True)
        if query.columns is not None:
            cells = cells[: query.n]
        out += [(column, ts, found[ts] if query.values else b"") for ts in cells]
    return out if query.columns is not None else out[: query.n]


def _is_of(tag: bytes, name: bytes) -> bool:
    """Whether a qualifier of the data family belongs to the group with that tag: if so, only the four bytes of the
    column follow the tag."""
    return len(name) == len(tag) + 4
