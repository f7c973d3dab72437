"""Looks for events in simulated runs. No test names the one seed that shows an event, because each change of the engine
gives its random draws to other events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from perco.testing.simulation import Outcome, SimulationOptions, simulate

RUNS_MAX: Final = 60


def never_seen(
    events: Mapping[str, Callable[[Sequence[Outcome]], bool]],
    options: SimulationOptions,
    first: Iterable[int],
    runs_max: int = RUNS_MAX,
) -> list[str]:
    """Runs seeds until each event has been seen. Returns the events that `runs_max` runs did not show.

    Args:
        events: by name: whether these runs show the event. More runs must not undo it.
        first: seeds to begin with, to save time: some that showed the events when the test was written.

    Raises: AssertionError if a run goes wrong.
    """
    outcomes: list[Outcome] = []
    left = list(events)
    for seed in list(dict.fromkeys([*first, *range(runs_max)]))[:runs_max]:
        outcomes.append(simulate(seed, options))
        assert outcomes[-1].problems == [], f"seed {seed}"
        left = [name for name in left if not events[name](outcomes)]
        if not left:
            break
    return left
