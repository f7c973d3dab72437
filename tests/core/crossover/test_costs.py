"""From which rate on a batch costs less, for costs that are known."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from perco.crossover.costs import Costs, Curve, Line
from perco.errors import UsageError

ROWS = 1_000_000
IDLE, CHANGE = 0.01, 0.001  # cores; seconds of CPU time


def curve(factor: float = 1.0) -> Curve:
    """Of observers of which each change costs the same, up to 500 a second."""
    return Curve.through(IDLE * factor, [(rate, (IDLE + CHANGE * rate) * factor) for rate in (500.0, 50.0, 100.0)])


def costs(run_s: float = 10.0, run_cpu_s: float = 10.0) -> Costs:
    return Costs(
        rows=ROWS,
        measured=10_000,
        curve=curve(),
        low=curve(0.9),
        high=curve(1.1),
        run_s=run_s,
        run_cpu_s=run_cpu_s,
        run_cpu_low=0.8 * run_cpu_s,
        run_cpu_high=1.2 * run_cpu_s,
    )


def test_the_line_is_found() -> None:
    found = Line.through((n, 0.5 + 0.002 * n) for n in (250, 500, 1000))
    assert (found.fixed, found.per_row) == pytest.approx((0.5, 0.002))
    assert found.at(100_000) == pytest.approx(200.5)
    assert found.doubt == pytest.approx(0.0)


def test_no_run_takes_less_than_nothing() -> None:
    steep = Line.through([(100, 1.0), (200, 4.0)])
    assert steep.fixed == 0.0
    assert steep.per_row == pytest.approx(0.018)  # the best line through nothing
    falling = Line.through([(100, 2.0), (200, 1.0)])
    assert (falling.fixed, falling.per_row) == (1.5, 0.0)


def test_runs_that_differ_by_chance_leave_a_doubt() -> None:
    found = Line.through([(100, 1.0), (100, 1.2), (200, 2.0), (200, 2.2)])
    assert (found.fixed, found.per_row) == pytest.approx((0.1, 0.01))
    assert found.doubt == pytest.approx(0.0014142, rel=1e-4)  # sqrt(0.04 / 2 / 10 000)


def test_one_size_makes_no_line() -> None:
    with pytest.raises(UsageError, match="two numbers of rows"):
        Line.through([(100, 1.0), (100, 1.1)])


def test_the_crossover_is_where_both_cost_the_same() -> None:
    found = costs().against(100.0)  # a tenth of a core
    assert found.batch_cores == pytest.approx(0.1)
    assert found.crossover_per_s == pytest.approx(90.0)
    assert costs().share_of(found) == pytest.approx(90 * 100 / ROWS)
    assert found.crossover_low == pytest.approx((0.08 / 1.1 - IDLE) / CHANGE)
    assert found.crossover_high == pytest.approx((0.12 / 0.9 - IDLE) / CHANGE)
    assert costs().share_per_h(90.0) == pytest.approx(0.324)


def test_there_may_be_no_crossover() -> None:
    assert costs().share_of(costs().against()) is None
    assert costs().against().crossover_per_s is None  # a whole core, of which observers at most use a half
    rare = costs().against(86400.0)
    assert (rare.crossover_per_s, costs().share_of(rare)) == (0.0, 0.0)  # an idle worker uses more


def test_a_change_waits_for_the_next_run_and_for_its_end() -> None:
    back_to_back = costs().against()
    assert (back_to_back.batch_median_s, back_to_back.batch_worst_s) == (15.0, 20.0)
    assert back_to_back.back_to_back
    hourly = costs().against(3600.0)
    assert (hourly.batch_median_s, hourly.batch_worst_s) == (1810.0, 3610.0)
    assert costs().against(costs().within(3600.0)).batch_worst_s == 3600.0


def test_what_a_batch_cannot_do_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot begin every 9 s"):
        costs().against(9.0)
    with pytest.raises(UsageError, match="cannot show every change within 19 s"):
        costs().within(19.0)


def test_the_interval_of_the_same_cost() -> None:
    same = costs().same_cost_s(90.0)
    assert same == pytest.approx(100.0)
    assert same is not None
    assert costs().against(same).crossover_per_s == pytest.approx(90.0)
    assert costs().same_cost_s(501.0) is None  # not sustained
    assert costs(run_s=1000.0).same_cost_s(90.0) is None  # it would have to run more often than it can


def test_a_rate_above_the_saturation_is_not_sustained() -> None:
    assert curve().saturation == 500.0
    assert curve().cores_at(500.0) == pytest.approx(0.51)
    assert curve().cores_at(501.0) is None


def test_several_measurements_of_a_rate_count_once_and_more_changes_never_cost_less() -> None:
    found = Curve.through(0.01, [(10.0, 0.3), (10.0, 0.2), (10.0, 0.9), (20.0, 0.1)])
    assert found.points == ((0.0, 0.01), (10.0, 0.3), (20.0, 0.3))


@given(
    st.floats(0, 1),
    st.dictionaries(st.integers(1, 1000), st.floats(0.001, 1), min_size=1, max_size=5),
    st.floats(0, 8),
)
def test_at_the_crossover_observers_use_as_many_cores(idle: float, measured: dict[int, float], cores: float) -> None:
    found = Curve.through(idle, [(float(rate), each) for rate, each in measured.items()])
    rate = found.rate_at(cores)
    if rate is None:
        assert (found.cores_at(found.saturation) or 0.0) <= cores
    elif rate:
        assert found.cores_at(rate) == pytest.approx(cores)
    else:
        assert found.points[0][1] >= cores
