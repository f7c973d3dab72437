"""M1: the writes between two rows make them equal, and cover only cells that differ."""

from __future__ import annotations

from hypothesis import given, strategies as st

from perco.copying.difference import Cells, Digest, halves, in_parts, writes_between

keys = st.tuples(st.sampled_from(["data", "lock", "data:raw"]), st.integers(0, 2), st.integers(0, 3))
rows = st.dictionaries(keys, st.binary(max_size=3))
tables = st.dictionaries(st.binary(max_size=3), rows, max_size=3)


@given(rows, rows)
def test_a_row_becomes_equal(source: Cells, target: Cells) -> None:  # M1
    row = dict(target)
    writes = writes_between(source, target)
    for group, column, ts, value in writes:
        if value is None:
            del row[group, column, ts]
        else:
            assert row.get((group, column, ts)) != value
            row[group, column, ts] = value
    assert row == source
    assert len({write[:3] for write in writes}) == len(writes)


@given(st.lists(st.integers(0, 1 << 19), max_size=1000))
def test_no_part_is_too_large_and_none_is_empty(sizes: list[int]) -> None:
    writes = [("data", 0, ts, b"x" * size if size else None) for ts, size in enumerate(sizes)]
    parts = list(in_parts(writes))
    assert [write for part in parts for write in part] == writes
    for part in parts:
        assert 0 < len(part) <= 256
        assert sum(len(write[3] or b"") for write in part) <= 1 << 20


@given(
    st.dictionaries(st.binary(max_size=3), rows, max_size=3), st.dictionaries(st.binary(max_size=3), rows, max_size=3)
)
def test_digests_are_equal_for_equal_tables_only(one: dict[bytes, Cells], other: dict[bytes, Cells]) -> None:
    def digest(table: dict[bytes, Cells]) -> str:
        found = Digest()
        for row in table:
            for cell, value in table[row].items():  # a row may come in parts, in any order
                found.add(row, {cell: value})
        return found.hex()

    def alike(table: dict[bytes, Cells]) -> dict[bytes, Cells]:
        return {row: cells for row, cells in table.items() if cells}

    assert (digest(one) == digest(other)) == (alike(one) == alike(other))


@given(st.dictionaries(keys, st.just(b""), min_size=1), st.integers(0, 2), st.integers(3, 5))
def test_a_range_is_divided_until_all_cells_in_it_have_one_timestamp(cells: Cells, low: int, high: int) -> None:
    ranges, found = [(low, high)], []
    while ranges:
        low, high = ranges.pop()
        inside = {cell: b"" for cell in cells if low <= cell[2] <= high}
        divided = halves(inside, low, high) if len(inside) > 1 else None
        if divided is None:
            assert len({ts for _, _, ts in inside}) <= 1
            found += list(inside)
        else:
            assert low <= divided[0] < high
            assert divided[1] == divided[0] + 1
            ranges += [(low, divided[0]), (divided[1], high)]
    assert len(found) == len(set(found))
