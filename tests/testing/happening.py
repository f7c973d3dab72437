"""What must happen in the simulation, in any of some runs: another draw in the engine moves it to another seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import pytest

from perco.testing.simulation import Outcome, SimulationOptions, simulate

RUNS_MAX: Final = 60


def runs_until(
    happened: Mapping[str, Callable[[Sequence[Outcome]], bool]],
    options: SimulationOptions,
    first: Iterable[int],
    runs_max: int = RUNS_MAX,
) -> list[Outcome]:
    """Runs seeds until everything has happened; fails with what has not in `runs_max` runs, or if a run goes wrong.

    `first`: seeds in which it happened when this was written; they save time.
    """
    seeds = dict.fromkeys([*first, *range(runs_max)])
    outcomes: list[Outcome] = []
    for seed in list(seeds)[:runs_max]:
        outcomes.append(simulate(seed, options))
        assert outcomes[-1].problems == [], f"seed {seed}"
        if all(has(outcomes) for has in happened.values()):
            return outcomes
    never = [what for what, has in happened.items() if not has(outcomes)]
    pytest.fail(f"in {runs_max} runs these did not happen: {', '.join(never)}")
