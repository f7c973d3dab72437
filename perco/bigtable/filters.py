"""Expresses the checks of mutations, and the requests of reads, as filters of Bigtable. Pure.

S1  CheckAndMutateRow checks one predicate, whether a filter lets any cell of the row through, and then writes, all in
    one atomic step. The checks that cells are *absent* become a filter for these cells, and the mutation writes if the
    filter finds nothing. Checks that k cells are *present* become a filter that lets a cell through only if it has
    found k of them. A mixture is counted in the same way, within one family. A filter returns cells in the order of
    their qualifiers, and the cells that must be absent come before those that must be present. So if the first k cells
    found are the k that must be present, no cell that must be absent was found.

perco never uses the filters `condition` and `sink`, because they are not atomic. Nor does it use patterns (regular
expressions), because those would need escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from perco.bigtable.keys import HINT_NAME, PROTOCOL_FAMILY, all_columns, all_hinted, micros, place_of, qualifier
from perco.bigtable.wire import types
from perco.errors import UsageError
from perco.storage import ABSENT, LOCK, PRESENT, TS_MAX, Check, Query, ScanQuery

FILTER_BYTES_MAX: Final = 20_000  # Bigtable accepts 20 480
_CELLS_MAX: Final = (1 << 31) - 1


class Predicate(NamedTuple):
    """A filter, and `writes_if_found`: whether the mutation writes if the filter lets a cell through, or if it lets no
    cell through."""

    filter: Any
    writes_if_found: bool


def predicate(checks: Sequence[Check]) -> Predicate | None:
    """The predicate of a row's checks; None: there are none.

    Raises: UsageError, if Bigtable has no predicate for such checks.
    """
    absent = dict.fromkeys(check[1:] for check in checks if check[0] == ABSENT and check[3] <= check[4])
    present = dict.fromkeys(check[1:] for check in checks if check[0] == PRESENT)
    if not present:
        return Predicate(_checked(_interleaved([_cells(*each) for each in absent])), False) if absent else None
    wanted = [_cells(*each) for each in present]
    k = len(wanted)
    if not absent:
        if k == 1:
            return Predicate(wanted[0], True)
        found = [_interleaved(wanted), types().RowFilter(cells_per_row_offset_filter=k - 1)]
        return Predicate(_checked(_chained(found)), True)
    if any(_excludes(each, other) for each in absent for other in present):
        return Predicate(types().RowFilter(block_all_filter=True), True)  # these checks can never hold together
    families = {place_of(group)[0] for group, *_ in (*absent, *present)}
    last = max(_position(group, column, low) for group, column, low, _ in absent)
    first = min(_position(group, column, ts) for group, column, ts, _ in present)
    if len(families) > 1 or last > first:
        raise UsageError("Bigtable cannot check in one step that some of these cells are absent and others present")
    both = _interleaved([*(_cells(*each) for each in absent), *wanted])
    parts = [both, types().RowFilter(cells_per_row_limit_filter=k), _interleaved(wanted)]
    if k > 1:
        parts.append(types().RowFilter(cells_per_row_offset_filter=k - 1))
    return Predicate(_checked(_chained(parts)), True)


def _excludes(absent: tuple[str, int, int, int], present: tuple[str, int, int, int]) -> bool:
    """Whether the cell that must be present is among those that must be absent."""
    return absent[:2] == present[:2] and absent[2] <= present[2] <= absent[3]


def _position(group: str, column: int, ts: int) -> tuple[bytes, int]:
    """The sort key of a cell within its row: by qualifier, then the newest first."""
    return qualifier(group, column), -ts


def _checked(made: Any) -> Any:
    if made.ByteSize() > FILTER_BYTES_MAX:
        raise UsageError(
            f"a transaction checks too many cells of one row for one call of Bigtable: {made.ByteSize()} bytes, at "
            f"most {FILTER_BYTES_MAX}. Write fewer columns of a row in one transaction"
        )
    return made


def _cells(group: str, column: int, low: int, high: int) -> Any:
    """A filter for the cells of a column with timestamps in [low, high]."""
    name = qualifier(group, column)
    return _chained(_within(group, (name, name), low, high))


@lru_cache(maxsize=4096)
def _columns(group: str, first: bytes, last: bytes) -> Any:
    names = {"family_name": place_of(group)[0], "start_qualifier_closed": first, "end_qualifier_closed": last}
    return types().RowFilter(column_range_filter=names)


def _within(group: str, names: tuple[bytes, bytes], low: int, high: int) -> list[Any]:
    parts = [_columns(group, *names)]
    if low > 0 or high < TS_MAX:
        stamps = types().RowFilter()
        stamps.timestamp_range_filter.start_timestamp_micros = micros(low)
        if high < TS_MAX:
            stamps.timestamp_range_filter.end_timestamp_micros = micros(high + 1)  # exclusive; 0 would mean no end
        parts.append(stamps)
    return parts


def _chained(parts: list[Any]) -> Any:
    """A chain of filters, or the filter itself if there is only one: Bigtable refuses a chain of fewer than two."""
    if len(parts) == 1:
        return parts[0]
    made = types().RowFilter()
    made.chain.filters.extend(parts)
    return made


def _interleaved(parts: list[Any]) -> Any:
    """An interleave of filters, or the only filter itself: Bigtable refuses an interleave of fewer than two."""
    if len(parts) == 1:
        return parts[0]
    made = types().RowFilter()
    made.interleave.filters.extend(parts)
    return made


def reading(queries: Sequence[Query]) -> Any:
    """A filter that lets all cells of these queries through, and perhaps others; None: the queries ask for nothing."""
    row_filter = types().RowFilter
    parts = []
    queries = [query for query in dict.fromkeys(queries) if query[4] and query[2] <= query[3]]
    if not queries:
        return None
    for group, column, low, high, n in queries:
        name = qualifier(group, column)
        part = _within(group, (name, name), low, high)
        if n > 0:  # n < 0 asks for the oldest cells; there is no filter for these, so all are read
            part.append(row_filter(cells_per_column_limit_filter=min(n, _CELLS_MAX)))
        parts.append(_chained(part))
    made = _interleaved(parts)
    if made.ByteSize() <= FILTER_BYTES_MAX:
        return made
    return _wider([(group, column, low, high) for group, column, low, high, _ in queries])


def _wider(parts: Sequence[tuple[str, int, int, int]]) -> Any:
    """A filter with one range of columns and timestamps for each group, if a part for each query would be too long."""
    ranges: dict[str, tuple[int, int, int, int]] = {}
    for group, column, low, high in parts:
        first, last, oldest, newest = ranges.get(group, (column, column, low, high))
        ranges[group] = min(first, column), max(last, column), min(oldest, low), max(newest, high)
    return _checked(
        _interleaved(
            [
                _chained(_within(group, (qualifier(group, first), qualifier(group, last)), oldest, newest))
                for group, (first, last, oldest, newest) in ranges.items()
            ]
        )
    )


def hints() -> Any:
    """A filter for the hints about rows."""
    after = HINT_NAME[:-1] + bytes([HINT_NAME[-1] + 1])
    names = {"family_name": PROTOCOL_FAMILY, "start_qualifier_closed": HINT_NAME, "end_qualifier_open": after}
    return types().RowFilter(column_range_filter=names)


def scanning_hinted(queries: Sequence[ScanQuery]) -> Any:
    """Like `scanning`, but if a row has a lock, or a cell that hints lead to, the filter also lets one cell of each of
    these two kinds through, without its value. Locks matter here because a lock may be replaced by a cell that hints
    lead to, even long after the mutation that put the lock (N1)."""
    row_filter = types().RowFilter
    first, last = all_hinted()
    names = {"family_name": PROTOCOL_FAMILY, "start_qualifier_closed": first, "end_qualifier_closed": last}
    any_cell = [
        row_filter(column_range_filter=names),
        row_filter(cells_per_row_limit_filter=1),
        row_filter(strip_value_transformer=True),
    ]
    asked = scanning(queries)
    assert asked is not None
    locks = [_columns(LOCK, *all_columns(LOCK)), *any_cell[1:]]
    return _checked(_interleaved([asked, _chained(any_cell), _chained(locks)]))


def scanning(queries: Iterable[ScanQuery]) -> Any:
    """A filter that lets all cells of a scan's queries through, and perhaps others; None: the queries ask for
    nothing."""
    row_filter = types().RowFilter
    parts: list[Any] = []
    flat: list[tuple[str, int, int, int]] = []
    whole: list[Any] = []  # filters for whole groups
    for query in queries:
        if not query.n or query.from_ts > query.to_ts:
            continue
        limit = min(query.n, _CELLS_MAX)
        without = [] if query.values else [row_filter(strip_value_transformer=True)]
        if query.columns is None:
            part = _within(query.group, all_columns(query.group), query.from_ts, query.to_ts)
            whole.append(_chained([*part, row_filter(cells_per_row_limit_filter=limit), *without]))
            continue
        for column in query.columns:
            name = qualifier(query.group, column)
            part = _within(query.group, (name, name), query.from_ts, query.to_ts)
            parts.append(_chained([*part, row_filter(cells_per_column_limit_filter=limit), *without]))
            flat.append((query.group, column, query.from_ts, query.to_ts))
    if not parts and not whole:
        return None
    made = _interleaved([*whole, *parts])
    if made.ByteSize() <= FILTER_BYTES_MAX:
        return made
    return _checked(_interleaved([*whole, _wider(flat)]))
