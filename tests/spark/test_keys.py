"""The keys by which inputs are known."""

from __future__ import annotations

import datetime
import decimal
import pickle
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pyspark.sql import Row

from perco.errors import UsageError
from perco.spark.keys import chosen, digest_of, key_of

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.datetimes()
    | st.timedeltas()
    | st.uuids()
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner), max_leaves=8
)


@given(VALUES)
def test_a_value_that_has_been_sent_has_the_same_bytes(value: Any) -> None:
    assert key_of(pickle.loads(pickle.dumps(value))) == key_of(value)


@given(st.lists(VALUES, min_size=2, max_size=2))
def test_values_that_differ_have_other_bytes(values: list[Any]) -> None:
    one, other = values
    same = repr(one) == repr(other)
    assert same or key_of(one) != key_of(other) or one == other


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_the_order_of_a_map_does_not_matter(value: dict[str, int]) -> None:
    assert key_of(dict(reversed(value.items()))) == key_of(value)


def test_kinds_are_told_apart() -> None:
    alike = ["1", 1, b"1", 1.5, True, decimal.Decimal(1), None, datetime.date(2026, 1, 1), ["1"], Row(a="1")]
    assert len({key_of(each) for each in alike}) == len(alike)
    assert key_of(bytearray(b"1")) == key_of(b"1")  # as Spark has what is binary


def test_what_is_written_as_text_is_no_text() -> None:
    assert key_of(10**25) != key_of(["int", str(10**25)])
    assert key_of(decimal.Decimal("1.0")) != key_of(["Decimal", "1.0"])
    once, again = (datetime.datetime(2026, 10, 25, 2, 30, fold=fold) for fold in (0, 1))
    assert key_of(once) != key_of(again)


def test_names_of_a_row_count() -> None:
    assert digest_of(Row(a=1, b=2)) != digest_of(Row(a=1, c=2))


def test_what_has_no_bytes_wants_a_key() -> None:
    with pytest.raises(UsageError, match=r"object does not identify .* give key="):
        key_of([1, object()])


def test_a_key_is_a_column_or_what_a_function_says() -> None:
    row = Row(url="a", n=None)
    assert chosen("url")(row) == chosen(lambda row: row.url)(row) == key_of("a")
    with pytest.raises(UsageError, match="no column 'uri'"):
        chosen("uri")(row)
    for null in ("n", lambda row: None):
        with pytest.raises(UsageError, match="key of an input is null"):
            chosen(null)(row)
