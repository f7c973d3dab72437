"""A single call of Bigtable decides, and finds, the same as the row store's own definition."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from perco.bigtable import filters
from perco.bigtable.keys import place_of, qualifier
from perco.bigtable.reading import Places, chosen, shape_of, shared
from perco.storage import ABSENT, APPLIED, DATA, PRESENT, TS_MAX, Check, Mutation, Query, Refused, RowCells
from tests.component.storage.stores import TABLE, open_store

Cell = tuple[str, int, int]
CELLS: list[Cell] = [
    ("lock", 1, 3),
    ("lock", 1, 5),
    ("lock", 2, 5),
    ("failed", 1, 5),
    ("failed", 1, 6),
    ("notify", 1, 7),
]
CHECKS: dict[str, list[Check]] = {
    "absent": [(ABSENT, "lock", 1, 4, TS_MAX), (ABSENT, "failed", 1, 0, 5)],
    "one": [(PRESENT, "lock", 1, 5, 5)],
    "several": [(PRESENT, "lock", 1, 5, 5), (PRESENT, "lock", 2, 5, 5), (PRESENT, "notify", 1, 7, 7)],
    "mixture of one": [(ABSENT, "lock", 1, 0, TS_MAX), (PRESENT, "failed", 1, 5, 5)],
    "mixture": [(ABSENT, "lock", 1, 0, 4), (PRESENT, "failed", 1, 5, 5), (PRESENT, "notify", 1, 7, 7)],
    "mixture of many": [
        (ABSENT, "lock", 1, 0, 4),
        (ABSENT, "lock", 2, 0, TS_MAX),
        (PRESENT, "failed", 1, 5, 5),
        (PRESENT, "failed", 1, 6, 6),
        (PRESENT, "notify", 1, 7, 7),
    ],
}


def holds(row: Sequence[Cell], check: Check) -> bool:
    kind, group, column, low, high = check
    there = any((group, column) == cell[:2] and low <= cell[2] <= high for cell in row)
    return there == (kind == PRESENT)


@pytest.mark.parametrize("kind", ["bigtable", "bigtable model"])
@pytest.mark.parametrize("name", CHECKS)
async def test_a_predicate_decides_as_the_checks_do_on_every_row(name: str, kind: str) -> None:  # S1
    checks = CHECKS[name]
    rows = [row for size in range(len(CELLS) + 1) for row in itertools.combinations(CELLS, size)]
    keys = [bytes([97 + number // 26, 97 + number % 26]) for number in range(len(rows))]
    async with open_store(kind, Path()) as store:
        puts = [
            Mutation(TABLE, [(key, [], [(*cell, b"v") for cell in row])])
            for key, row in zip(keys, rows, strict=True)
            if row
        ]
        assert await store.apply(puts) == [APPLIED] * len(puts)
        tries = [Mutation(TABLE, [(key, checks, [(DATA, 9, 1, b"made")])]) for key in keys]
        verdicts = await store.apply(tries)
    told = [verdict is APPLIED for verdict in verdicts]
    assert all(verdict is APPLIED or isinstance(verdict, Refused) for verdict in verdicts)
    assert told == [all(holds(row, check) for check in checks) for row in rows]
    assert 0 < sum(told) < len(rows)


# ------------------------------------------------------------ reads that share a call

Row = dict[tuple[str, int], dict[int, bytes]]
TIMES = range(1, 13)
spans = st.tuples(st.integers(0, 12), st.one_of(st.integers(0, 12), st.just(TS_MAX)))


@st.composite
def rows_and_requests(draw: st.DrawFn) -> tuple[Row, list[list[Query]]]:
    """A row with most of its versions, and requests for the same columns as of several moments."""
    row: Row = {}
    for column in (1, 2):
        gone = draw(st.sets(st.sampled_from(TIMES), max_size=4))
        row["data", column] = {ts: bytes([ts]) for ts in TIMES if ts not in gone}
    asked = draw(st.lists(st.tuples(st.sampled_from([1, 1, 2]), st.sampled_from([1, 2, -1])), min_size=1, max_size=3))
    count = draw(st.integers(1, 3))
    return row, [[("data", column, *draw(spans), n) for column, n in asked] for _ in range(count)]


def found(row: Row, query: Query) -> list[tuple[int, bytes]]:
    """As a row store answers."""
    group, column, low, high, n = query
    cells = sorted(((ts, v) for ts, v in row.get((group, column), {}).items() if low <= ts <= high), reverse=n > 0)
    return cells[: abs(n)]


def answered(row: Row, asked: Sequence[Query]) -> Places:
    """As Bigtable answers to the filter of these queries: of a column the newest n cells, or all."""
    assert filters.reading(asked) is not None or not [query for query in asked if query[2] <= query[3]]
    places: Places = {}
    for group, column, low, high, n in asked:
        for ts, value in found(row, (group, column, low, high, n if n > 0 else -99)):
            places.setdefault((place_of(group)[0], qualifier(group, column)), {})[ts] = value
    return places


_FULL: Row = {("data", 1): {ts: bytes([ts]) for ts in TIMES}}


@given(rows_and_requests())
@example((_FULL, [[("data", 1, 0, 12, 1)], [("data", 1, 0, 6, 1)]]))  # too many newer versions are between them
@example((_FULL, [[("data", 1, 0, 12, 1), ("data", 1, 0, 4, 1)], [("data", 1, 0, 6, 1), ("data", 1, 0, 3, 1)]]))
def test_requests_that_share_a_call_find_what_they_ask_for_or_ask_alone(given: tuple[Row, list[list[Query]]]) -> None:
    row, wanted = given
    by_shape = defaultdict(list)
    for queries in wanted:
        by_shape[shape_of(queries)].append(queries)
    for sharing in by_shape.values():
        asked = shared(sharing)
        places = answered(row, asked)
        for queries in sharing:
            got = chosen(places, queries, asked)
            expected: RowCells = [found(row, query) for query in queries]
            assert got is None or got == expected
            if len(sharing) == 1:
                assert got == expected, "a request that is alone is always answered"
