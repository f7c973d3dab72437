"""The model finds what made the points, and ends at the owner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness import Report
from bench.scaling import FITTED, HELD_OUT, MANY, TABLETS, Model, _fit, busy, fitted, predicted


def test_the_model_that_made_the_points_is_found() -> None:
    made = Model(0.002, 0.0005, 0.0001)
    found = fitted({n: made.per_s(n) for n in (1, 16, 256)})
    assert (found.cycle, found.commit, found.each) == pytest.approx((made.cycle, made.commit, made.each))
    assert found.per_s(64) == pytest.approx(made.per_s(64))


def test_a_few_rows_lie_in_few_tablets() -> None:
    assert busy(1) == pytest.approx(1)
    assert 2 < busy(4) < 3
    assert TABLETS - busy(64) < 1e-6


def test_servers_add_up_until_the_owner_has_no_time_left() -> None:
    model, owner_s, server_s = Model(0.002, 0.0005, 0.0002), 0.00001, 0.0001
    rates = [predicted(model, owner_s, server_s, n) for n in (1, 2, 5, 10, 100, 1000)]
    assert rates == sorted(rates)
    assert rates[1] == pytest.approx(2 * rates[0])
    assert rates[-1] < 1 / owner_s
    assert rates[0] == pytest.approx(MANY / (model.cycle + TABLETS * model.commit + server_s * MANY))


def test_no_time_comes_out_below_0() -> None:
    """Of points from a noisy machine, to which the best line starts below 0."""
    found = fitted({1: 96.0, 4: 97.0, 32: 302.0, 256: 708.0})
    assert found.cycle == 0
    assert min(found.commit, found.each) > 0


def test_loads_that_were_held_out_tell_how_wrong_the_model_is() -> None:
    made = Model(0.002, 0.0005, 0.0001)
    wrong = HELD_OUT[-1]
    rates = {n: made.per_s(n) * (1.5 if n == wrong else 1) for n in (*FITTED, *HELD_OUT)}

    def round_at(rate: float) -> Any:
        return SimpleNamespace(per_s=rate, owner_s=0.01, servers_s=0.1, load=SimpleNamespace(calls=1000))

    report = Report("scaling", "power")
    said: list[Any] = []
    run: Any = SimpleNamespace(table=lambda *told: said.append(told), say=said.append)
    model, _, _ = _fit(run, report, {(1, n): [round_at(rate)] for n, rate in rates.items()})
    assert model.cycle == pytest.approx(made.cycle)  # the points held out had no part in the fit
    assert report.figures["model_error_fitted"] == pytest.approx(0)
    assert report.figures["model_error"] == pytest.approx(1 / 3)
    assert report.figures[f"model_error_{HELD_OUT[0]}"] == pytest.approx(0)
    assert report.figures[f"model_error_{FITTED[0]}_from_the_others"] != pytest.approx(0)
    assert "largest error 0 % where it was fitted, 33 % where it was held out" in said[0][0]
