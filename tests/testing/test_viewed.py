"""Views in the simulation: whatever happens, the derived tables are what the batch build makes of their sources."""

from __future__ import annotations

import pytest

from perco.schema.schema import Schema
from perco.testing.simulation import SimulationOptions, simulate
from perco.testing.viewed import Viewed

SEEDS = range(10)  # in four of them, several processes run at once
HALF = SimulationOptions(views=True, commits=100)  # half as long as the runs of the command


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_goes_wrong(seed: int) -> None:  # V1 to V10, V12 to V15
    outcome = simulate(seed, HALF)
    assert outcome.problems == []
    assert outcome.runs >= 20


def test_what_makes_views_hard_happens() -> None:
    outcomes = [simulate(seed, HALF) for seed in (24, 32, 44, 48, 66)]
    assert sum(each.fresh for each in outcomes) >= 5, "waits for views were completed"
    assert sum(each.compared for each in outcomes) >= 3, "all views were compared while clients went on"
    assert max(each.grown for each in outcomes) == 2, "views got new versions"
    assert sum(each.dropped for each in outcomes) >= 1
    assert sum(each.splits for each in outcomes) >= 1
    assert sum(each.lives for each in outcomes) > 3 * len(outcomes), "processes died"
    assert {each.processes for each in outcomes} == {1, 3}


def test_the_graphs_are_of_all_kinds() -> None:
    kinds = set().union(*(Viewed(seed, Schema(), 1).graph.kinds for seed in range(16)))
    assert {kind.partition(" ")[0] for kind in kinds} == {
        *("each", "fan", "kept", "whole", "first", "join", "components", "cogroup"),
    }
    assert len(kinds) > 20


@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_seed_is_the_same_run(processes: int) -> None:
    options = SimulationOptions(views=True, processes=processes, commits=60)
    assert simulate(processes, options) == simulate(processes, options)
