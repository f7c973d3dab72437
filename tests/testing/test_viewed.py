"""Views in the simulation: whatever happens, the derived tables are what the batch build makes of their sources."""

from __future__ import annotations

import pytest

from perco.schema.schema import Schema
from perco.testing.simulation import SimulationOptions, simulate
from perco.testing.viewed import Viewed
from tests.testing.happening import never_seen

SEEDS = range(10)  # in four of them, several processes run at once
HALF = SimulationOptions(views=True, commits=100)  # half as long as the runs of the command


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_goes_wrong(seed: int) -> None:  # V1 to V10, V12 to V15
    outcome = simulate(seed, HALF)
    assert outcome.problems == []
    assert outcome.runs >= 20


def test_what_makes_views_hard_happens() -> None:
    missing = never_seen(
        {
            "waits for views were completed": lambda runs: sum(run.fresh for run in runs) >= 5,
            "all views were compared while clients went on": lambda runs: sum(run.compared for run in runs) >= 3,
            "views got new versions": lambda runs: max(run.grown for run in runs) == 2,
            "a view was dropped": lambda runs: sum(run.dropped for run in runs) >= 1,
            "a tablet split": lambda runs: sum(run.splits for run in runs) >= 1,
            "processes died": lambda runs: any(run.lives > 3 * run.processes for run in runs),
            "one process and several": lambda runs: {1, 2} <= {run.processes for run in runs},
        },
        HALF,
        first=(45, 22),
    )
    assert missing == []


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
