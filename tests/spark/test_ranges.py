"""Key ranges, and their parts."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, strategies as st

import perco
from perco.errors import UsageError
from perco.spark.ranges import Range, between, cut, of_options

TEXTS = perco.Table("texts", key=perco.TEXT)
NUMBERS = perco.Table("numbers", key=perco.INT64)
BINARY = perco.Table("binary", key=perco.BYTES)
DAYS = perco.Table("days", key=perco.DATE)
MOMENTS = perco.Table("moments", key=perco.TIMESTAMP)
SUMS = perco.Table("sums", key=perco.DECIMAL(6, 2))
PAIRS = perco.Table("pairs", key=perco.Tuple(perco.TEXT, perco.INT64))


def leaves(range: Range, row: bytes) -> bool:
    return row >= range.low and (range.high is None or row < range.high)


def test_options_are_keys_of_the_table() -> None:
    assert of_options(TEXTS, "a", "c", None) == (b"a", b"c")
    assert of_options(TEXTS, None, None, "ab") == (b"ab", b"ac")
    assert of_options(BINARY, "00ff", None, None) == (b"\x00\xff", None)
    assert of_options(NUMBERS, "-1", None, None).low == NUMBERS.row(-1)
    assert of_options(DAYS, "2026-03-01", None, None).low == DAYS.row(date(2026, 3, 1))
    assert of_options(MOMENTS, None, "2026-03-01T01:00+01:00", None).high == MOMENTS.row(
        datetime(2026, 3, 1, tzinfo=UTC)
    )
    assert of_options(SUMS, "-1.5", None, None).low == SUMS.row(Decimal("-1.50"))
    table: perco.Table[Any]
    for table, start, said in (
        (DAYS, "today", "dates, such as"),
        (MOMENTS, "2026-03-01T01:00", "with an offset"),
        (SUMS, "x", r"decimal\(6,2\), such as"),
        (SUMS, "1.234", r"decimal\(6,2\), such as"),
    ):
        with pytest.raises(UsageError, match=f"'{start}' is not a key of table .*{said}"):
            of_options(table, start, None, None)
    for table, start in ((NUMBERS, "x"), (BINARY, "xx"), (PAIRS, "a")):
        with pytest.raises(UsageError):
            of_options(table, start, None, None)


@given(st.binary(max_size=3), st.none() | st.binary(max_size=3), st.sets(st.binary(max_size=3)), st.binary(max_size=4))
def test_each_row_is_in_one_part(low: bytes, high: bytes | None, starts: set[bytes], row: bytes) -> None:
    whole = Range(low, high)
    parts = cut(whole, list(starts))
    assert sum(leaves(part, row) for part in parts) == leaves(whole, row)
    assert not any(part.empty for part in parts)


@given(st.binary(max_size=12), st.binary(max_size=12), st.integers(1, 9))
def test_a_space_is_cut_evenly(one: bytes, other: bytes, parts: int) -> None:
    first, last = sorted((one, other))
    cuts = between(first, last, parts)
    assert cuts == sorted(set(cuts))
    assert len(cuts) < parts
    assert all(first < at <= last for at in cuts)


def test_numbers_that_follow_each_other_are_cut_well() -> None:
    rows = [TEXTS.row(f"k{n:06}") for n in range(1000)]
    cuts = between(rows[0], rows[-1], 4)
    shares = [sum(low <= row < high for row in rows) for low, high in zip([b"", *cuts], [*cuts, b"\xff"], strict=True)]
    assert min(shares) > 100
