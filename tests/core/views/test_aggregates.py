"""Sums are exact and do not depend on the order of additions; orders are total (V4)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

import perco
from perco import views
from perco.schema.codecs import FLOAT64, INT64
from perco.views.aggregates import Sum, Tally, Total, order_key, tallied

T = perco.Table("t", key=perco.TEXT)
N, X, S = T.column("n", perco.INT64), T.column("x", perco.FLOAT64), T.column("s", perco.TEXT)
SUMS = (Sum(N), Sum(X))

ints = st.integers(-(2**63), 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
members = st.lists(st.tuples(st.none() | ints, st.none() | st.floats()))


@given(st.lists(finite))
def test_a_sum_of_floats_is_rounded_once(numbers: list[float]) -> None:
    total = Total()
    for number in numbers:
        total.add(FLOAT64, number, 1)
    try:
        expected = math.fsum(numbers)
    except OverflowError:  # of a partial sum: fsum gives up, though the sum may be finite
        return
    assert total.value(FLOAT64) == expected


@given(members, members)
def test_what_is_added_and_taken_away_leaves_no_trace(
    stay: list[tuple[int, float]], go: list[tuple[int, float]]
) -> None:
    found = tallied(SUMS, [*go, *stay])
    for values in go:
        found.change(SUMS, values, -1)
    assert found == tallied(SUMS, reversed(stay))


@given(members, members)
def test_deltas_add_up_and_survive_storage(first: list[tuple[int, float]], second: list[tuple[int, float]]) -> None:
    found = Tally.unpack(tallied(SUMS, first).pack())
    found.merge(Tally.unpack(tallied(SUMS, second).pack()))
    assert found == tallied(SUMS, [*first, *second])


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([math.inf, 1.0], math.inf),
        ([-math.inf, 1e300], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, math.inf], math.nan),
        ([1.7e308, 1.7e308], math.inf),
        ([-1.7e308, -1.7e308], -math.inf),
        ([5e-324, 5e-324], 1e-323),
        ([], 0.0),
    ],
)
def test_a_sum_of_what_is_no_finite_number(numbers: list[float], expected: float) -> None:
    (total,) = tallied([Sum(X)], [[number] for number in numbers]).totals
    assert repr(total.value(FLOAT64)) == repr(expected)


def test_a_sum_of_integers_is_not_bounded() -> None:
    (total,) = tallied([Sum(N)], [[2**63 - 1]] * 3).totals
    assert total.value(INT64) == 3 * (2**63 - 1)


@given(finite, finite)
def test_floats_sort_as_their_order_keys(a: float, b: float) -> None:
    assert (order_key(FLOAT64, a) < order_key(FLOAT64, b)) == (a < b)


@pytest.mark.parametrize("make", [views.sum, views.largest, views.smallest])
def test_a_column_without_numbers_or_order_is_refused(make: object) -> None:
    json = perco.Table("other").column("j", perco.JSON)
    with pytest.raises(perco.UsageError, match=r"other\.j"):
        make(json)  # type: ignore[operator]


@pytest.mark.parametrize("n", [0, -1, True, "3", 10_001])
def test_how_many_is_a_number_of_members(n: object) -> None:
    with pytest.raises(perco.UsageError, match="n is a number of members"):
        views.largest(N, n)  # type: ignore[arg-type]
