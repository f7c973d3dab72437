"""Figures computed from measured loads and runs, and the test of whether both ways are equal."""

from __future__ import annotations

import pytest

from perco.crossover.batching import Ran
from perco.crossover.keeping import Load
from perco.crossover.measuring import Found
from perco.views.checking import Checked, Difference


def load(per_s: float, cores: float, seconds: float = 10.0) -> Load:
    count = int(per_s * seconds)
    return Load(per_s, tuple(0.001 * n for n in range(1, count + 1)), seconds, cores * seconds, 0.1)


def found() -> Found:
    runs = [[Ran(n, 1.0 + 0.01 * n, 0.5 + 0.008 * n) for n in (100, 200, 400)] for _ in range(2)]
    return Found(
        sampled=500,
        rows=400,
        idle=0.01,
        saturated=load(500, 0.9),
        quiet=[load(50, each) for each in (0.06, 0.07, 0.2)],
        judged=[load(300, each) for each in (0.5, 0.6, 0.55)],
        runs=runs,
        checked=Checked(1),
    )


def test_the_costs_of_a_larger_data_set() -> None:
    costs = found().costs(100_000)
    assert costs.curve.points == ((0.0, 0.01), (50.0, 0.07), (300.0, 0.55), (500.0, 0.9))
    assert [point[1] for point in costs.low.points] == [0.01, 0.06, 0.5, 0.9]
    assert [point[1] for point in costs.high.points] == [0.01, 0.2, 0.6, 0.9]
    assert (costs.rows, costs.measured) == (100_000, 400)
    assert costs.run_s == pytest.approx(1001.0)
    assert (costs.run_cpu_s, costs.run_cpu_low, costs.run_cpu_high) == pytest.approx((800.5, 800.5, 800.5))


def test_the_rate_that_was_asked_for_is_on_the_curve() -> None:
    one = found()
    one.asked = [load(100, 0.3)]
    assert one.costs(1000).curve.cores_at(100.0) == pytest.approx(0.3)


def test_rounds_of_the_batch_that_differ_widen_what_a_run_may_take() -> None:
    one = found()
    one.runs[1] = [Ran(run.rows, run.seconds, 1.5 * run.cpu_s) for run in one.runs[1]]
    costs = one.costs(100_000)
    assert costs.run_cpu_s == pytest.approx(1.25 * 800.5)
    assert costs.run_cpu_low < costs.run_cpu_s < costs.run_cpu_high


def test_percentiles() -> None:
    found = [load(10, 0.1, 10.0).delay_s(share) for share in (0.0, 0.5, 0.99, 1.0)]
    assert found == pytest.approx([0.001, 0.051, 0.1, 0.1])


def test_both_ways_are_equal_only_if_nothing_differs() -> None:
    assert found().equal
    unlike = Checked(1, count=2, differences=[Difference("totals", "sums", "x", {"sum": 2}, {"sum": 1}, None)])
    for name, value, said in (
        ("checked", unlike, "of the observers' rows, 2 differ"),
        ("rebuilt", unlike, "of the batch's rows, 2 differ"),
        ("strays", 1, "1 of the source rows differ"),
    ):
        one = found()
        setattr(one, name, value)
        assert not one.equal
        [told] = one.differences
        assert told.startswith(said)
        assert (value == 1) != told.endswith("such as sums['x']: {'sum': 1} instead of {'sum': 2}")
    one = found()
    one.checked = None
    assert not one.equal
