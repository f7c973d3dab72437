"""The model finds what made the points, and ends at the owner."""

from __future__ import annotations

import pytest

from bench.scaling import MANY, TABLETS, Model, busy, fitted, predicted


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
