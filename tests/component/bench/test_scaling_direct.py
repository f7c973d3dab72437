"""The model of direct clients finds what made the points, and ends where the server has no time left."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness import Report
from bench.scaling_direct import (
    DRAWN,
    FITTED,
    HELD_OUT,
    STAMPS,
    WAIT_S,
    Figures,
    Found,
    Load,
    Model,
    _project,
    _tell,
    fitted,
)

MADE = Model(
    request=60.0, stamp=2.0, session=100.0, each=600.0, asking=80.0, reads=1.1, writes=2.0, draws=2000 // 64 / 1000
)


def round_of(load: Load, *, slower: float = 1.0) -> Found:
    """As the model says, with fewer requests if more are in flight."""
    clients, in_flight = load
    transactions, draws, seconds = 1000, max(2000 // in_flight, 20), 2.0
    each = draws / transactions
    client_s = slower * transactions * MADE.client_us(each) / 1e6
    one = Figures(seconds, transactions, client_s, draws, 1100, 2000)
    server_us = clients * (transactions * MADE.server_us(each) + seconds * MADE.session)
    return Found([one] * clients, slower * server_us / 1e6)


def test_the_model_that_made_the_points_is_found() -> None:
    found = fitted({load: [round_of(load)] for load in FITTED}, MADE.session)
    for name in ("request", "stamp", "each", "asking", "reads", "writes", "draws"):
        assert getattr(found, name) == pytest.approx(getattr(MADE, name)), name


def test_no_cost_comes_out_below_0() -> None:
    """Of a server that seems to do less for more requests."""
    plain = {load: round_of(load) for load in FITTED}
    rounds = {load: [replace(one, server_s=len(one.clients) / one.draws)] for load, one in plain.items()}
    found = fitted(rounds, 0.0)
    assert min(found.request, found.stamp) == 0
    assert max(found.request, found.stamp) > 0


def test_clients_add_up_until_the_server_has_no_time_left() -> None:
    rates = [MADE.all_clients(n) for n in (1, 2, 10, 100, DRAWN)]
    assert rates[1] == pytest.approx(2 * rates[0])
    assert rates[-1] == pytest.approx(MADE.of_server(DRAWN))
    assert rates[-1] < 1e6 / (STAMPS * MADE.stamp)
    assert MADE.of_server(10**6) == 0  # sessions alone take all of its time


def test_batches_move_the_limit() -> None:
    alone, shared = (MADE.of_server(100, batching=batching) for batching in (False, True))
    assert alone == pytest.approx((1e6 - 100 * MADE.session) / MADE.server_us(STAMPS))
    assert shared > 10 * alone
    left = 1e6 - 100 * (MADE.session + MADE.request / WAIT_S)
    assert shared == pytest.approx(left / (STAMPS * MADE.stamp))


def test_nodes_are_counted_by_reads_and_conditional_writes() -> None:
    assert replace(MADE, reads=1.0, writes=0.0).nodes(17_000 * 3) == 3
    assert replace(MADE, reads=0.0, writes=1.0).nodes(17_000 * 14_000 / 31_000 - 1) == 1


def test_loads_that_were_held_out_tell_how_wrong_the_model_is() -> None:
    rounds = {load: [round_of(load)] for load in FITTED} | {load: [round_of(load, slower=2.0)] for load in HELD_OUT}
    report, said = Report("scaling", "power"), list[Any]()
    run: Any = SimpleNamespace(table=lambda *told: said.append(told), say=said.append)
    model = fitted(rounds, MADE.session)
    _tell(run, report, rounds, model)
    _project(run, report, model)
    assert report.figures["direct_model_error_fitted"] == pytest.approx(0, abs=1e-6)
    assert report.figures["direct_model_error"] == pytest.approx(0.5)
    assert report.missed
    assert len(said) == 2
