"""Filters as key ranges: they leave all that passes, and nothing else where they say so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

import perco
from perco.errors import UsageError
from perco.spark.ranges import Range, between, cut, of_filter, of_options

TEXTS = perco.Table("texts", key=perco.TEXT)
NUMBERS = perco.Table("numbers", key=perco.INT64)
BINARY = perco.Table("binary", key=perco.BYTES)
PAIRS = perco.Table("pairs", key=perco.Tuple(perco.TEXT, perco.INT64))
KINDS = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, In, StringStartsWith]
WORDS = st.text(st.sampled_from("ab\x00\u00e9\U0001f600"), max_size=4)


def passes(filter: Any, key: Any) -> bool:
    match filter:
        case EqualTo() | EqualNullSafe():
            return bool(key == filter.value)
        case GreaterThan():
            return bool(key > filter.value)
        case GreaterThanOrEqual():
            return bool(key >= filter.value)
        case LessThan():
            return bool(key < filter.value)
        case LessThanOrEqual():
            return bool(key <= filter.value)
        case In():
            return key in filter.value
        case StringStartsWith():
            return bool(key.startswith(filter.value))
    raise AssertionError(filter)


def leaves(range: Range, row: bytes) -> bool:
    return row >= range.low and (range.high is None or row < range.high)


@given(st.sampled_from(KINDS), st.lists(WORDS, min_size=1, max_size=3), st.lists(WORDS, max_size=20))
def test_a_filter_of_text_keys(kind: type[Filter], values: list[str], keys: list[str]) -> None:
    filter = kind(("key",), tuple(values) if kind is In else values[0])  # type: ignore[call-arg]
    found = of_filter(TEXTS, "key", filter)
    assert found is not None
    for key in [*keys, *values]:  # in Spark strings compare as their bytes do, as Python's do by code points
        if passes(filter, key):
            assert leaves(found[0], TEXTS.row(key))
        elif found[1]:
            assert not leaves(found[0], TEXTS.row(key))


@given(st.sampled_from(KINDS[:-1]), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3))
def test_a_filter_of_number_keys(kind: type[Filter], values: list[int]) -> None:
    filter = kind(("key",), tuple(values) if kind is In else values[0])  # type: ignore[call-arg]
    found = of_filter(NUMBERS, "key", filter)
    assert found is not None
    for key in {k for v in values for k in (v - 1, v, v + 1) if -(2**63) <= k < 2**63}:
        assert leaves(found[0], NUMBERS.row(key)) or not passes(filter, key)
        assert passes(filter, key) or not found[1] or not leaves(found[0], NUMBERS.row(key))


@pytest.mark.parametrize(
    "filter",
    [
        EqualTo(("body",), "a"),
        StringContains(("key",), "a"),
        Not(EqualTo(("key",), "a")),
        EqualTo(("key", "x"), "a"),
        EqualTo(("key",), 1),
        EqualTo(("key",), "x" * 500),
        In(("key",), ()),
        IsNotNull(("body",)),
    ],
)
def test_what_says_nothing_of_a_range_is_left_to_spark(filter: Filter) -> None:
    assert of_filter(TEXTS, "key", filter) is None


def test_keys_are_never_null() -> None:
    assert of_filter(PAIRS, "key", IsNotNull(("key",))) == (Range(), True)
    assert of_filter(PAIRS, "key", EqualTo(("key",), {"_1": "a", "_2": 1})) is None


def test_options_are_keys_of_the_table() -> None:
    assert of_options(TEXTS, "a", "c", None) == (b"a", b"c")
    assert of_options(TEXTS, None, None, "ab") == (b"ab", b"ac")
    assert of_options(BINARY, "00ff", None, None) == (b"\x00\xff", None)
    assert of_options(NUMBERS, "-1", None, None).low == NUMBERS.row(-1)
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
