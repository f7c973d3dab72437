"""`python -m tests.testing.mortality`: prints how many seeds each mutant survives, for the table in docs/testing.md.

The seeds of T14's mutants are those of `serializable_runs.py`; all others are seeds of the simulation.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import pytest

from perco.testing.plan import Plan
from perco.testing.shrink import fails
from tests.support.unlaned import without_lanes
from tests.testing.mutants import MUTANTS, SLOW
from tests.testing.mutants_ahead import AHEAD
from tests.testing.mutants_batches import BATCHES
from tests.testing.mutants_changes import CHANGES
from tests.testing.mutants_direct import DIRECT
from tests.testing.mutants_failing import FAILING
from tests.testing.mutants_growing import GROWING
from tests.testing.mutants_one_step import ONE_STEP
from tests.testing.mutants_serializable import LOCKS, SERIALIZABLE
from tests.testing.mutants_served import SERVED
from tests.testing.mutants_signals import SIGNALS, SIGNALS_SLOW
from tests.testing.seeds import options_for
from tests.testing.serializable_runs import Mode, seeds_to_anomaly

SEEDS_MAX = 200  # a mutant must die within this many
ALL = {
    **MUTANTS,
    **SLOW,
    **ONE_STEP,
    **SIGNALS,
    **SIGNALS_SLOW,
    **SERIALIZABLE,
    **LOCKS,
    **FAILING,
    **BATCHES,
    **GROWING,
    **AHEAD,
    **SERVED,
    **DIRECT,
    **CHANGES,
}


def death(name: str, first: int = 0, seconds: float = float("inf")) -> tuple[int, str]:
    """(seeds until it is found, how it is found); 0: it is not found within `SEEDS_MAX` seeds, or within that time."""
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        without_lanes(patch)  # the faults are in what the lanes hand over to
        ALL[name](patch)
        if name in SERIALIZABLE or name in LOCKS:
            mode: Mode = "serializable" if name in SERIALIZABLE else "mixed"
            return seeds_to_anomaly(mode, range(first, first + SEEDS_MAX)) or 0, "not serializable"
        for number in range(1, SEEDS_MAX + 1):
            if time.monotonic() - began > seconds:
                return 0, ""
            seed = first + number - 1
            how = fails(Plan(seed), options_for(name, seed))
            if how:
                return number, how
    return 0, ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.testing.mortality", description=__doc__)
    parser.add_argument("--trials", type=int, default=3, help="of each mutant, from different seeds (default: 3)")
    parser.add_argument("--only", default="", help="mutants whose names begin so")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each trial, at most")
    given = parser.parse_args(arguments)
    names = [name for name in ALL if name.startswith(given.only)]
    survived = 0
    medians = []
    with ProcessPoolExecutor(max_tasks_per_child=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        trials = {
            name: [pool.submit(death, name, trial * SEEDS_MAX, given.seconds) for trial in range(given.trials)]
            for name in names
        }
        for name, found in trials.items():
            results = [trial.result() for trial in found]
            median = statistics.median(number or SEEDS_MAX + 1 for number, _ in results)
            medians.append(median)
            survived += median > SEEDS_MAX
            told = f"{median:g}" if median <= SEEDS_MAX else "not found"
            if missed := sum(not number for number, _ in results):
                told += f"; not within {SEEDS_MAX} in {missed} of {len(results)} trials"
            how = next((how.splitlines()[0][:100] for number, how in results if number), "")
            print(f"| {name} | {told} | {how} |", flush=True)
    print(f"{len(names)} mutants, {survived} not found; the median of the medians is {statistics.median(medians):g}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
