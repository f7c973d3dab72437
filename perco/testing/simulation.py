"""A store, its clients and observers, and all that can go wrong, from one seed: the same seed is the same run.

By the seed the store is embedded, its processes one after the other (`embedded.py`), or served: what ships, an owner
and clients over connections that break (`served.py`). What both have in common is in `runs.py`.

The clock is virtual and trio's choice of the next task is seeded, so a run takes no longer than it computes. All that a
run could do without is a choice of its `Plan`: noted, replayed, left out (`shrink.py`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
from collections.abc import Iterator
from typing import Final

import trio
from trio._core import _run as scheduler

from perco.testing.embedded import Embedded
from perco.testing.plan import Plan
from perco.testing.processes import EndlessError
from perco.testing.runs import (
    Outcome as Outcome,
    Run,
    SimulationOptions as SimulationOptions,
    processes_of,
)
from perco.testing.served import Served

_LOOKS_MAX: Final = 1_000_000  # at the clock; a usual run takes a tenth of that
_LOOKS_EACH: Final = 50_000  # between two collections of garbage


class _Clock(trio.abc.Clock):
    """Jumps to the next deadline when no task can run: nothing comes from outside. A run that goes round in circles
    without a call of the store is told by how often the clock is looked at."""

    def __init__(self, looks: int) -> None:
        self._looks = self._left = looks
        self._now = 0.0

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        self._left -= 1
        if self._left % _LOOKS_EACH == 0:
            gc.collect()
        if self._left < 0:
            raise EndlessError(f"{self._looks} looks at the clock have not brought the run to its end")
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if self.current_time() < deadline < math.inf:
            self._now = deadline
        return 0.0


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """What is dropped in a circle of references tells of its end when it is collected: at moments which are
    the same in each run, not when Python likes to."""
    on = gc.isenabled()
    gc.disable()
    gc.collect()
    freezes = not gc.get_freeze_count()  # a process that makes many runs does it once
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if on:
            gc.enable()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """trio's scheduler chooses by the seed."""
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    state = scheduler._r.getstate()
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    scheduler._r.seed(seed)
    log = logging.getLogger("perco")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)  # observers that meet a full disk say so each time
    try:
        yield
    finally:
        log.setLevel(level)
        scheduler._r.setstate(state)
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]


def run_plan(plan: Plan, options: SimulationOptions | None = None) -> Outcome:
    """One run, in a trio loop of its own, in virtual time. Raises what no run may raise: an assertion, a bug."""
    with _collected(), seeded(plan.seed + (plan.salt << 32)):
        options = options or SimulationOptions()
        simulation: Run = (Embedded if processes_of(plan, options) == 1 else Served)(plan, options)
        try:
            return trio.run(simulation.run, clock=_Clock(_LOOKS_MAX))
        except BaseException:
            if isinstance(simulation, Served):
                simulation.kernel.discard()
            raise


def simulate(seed: int, options: SimulationOptions | None = None) -> Outcome:
    """Run one seed. Raises as `run_plan`."""
    return run_plan(Plan(seed), options)
