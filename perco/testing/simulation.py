"""Simulates a store, its clients and observers, and everything that can go wrong. The same seed gives the same run.

The seed decides whether the store is embedded or served. An embedded store has one process after the other
(`embedded.py`). A served store runs the production code of an owner and its clients, over connections that break
(`served.py`). If the options ask for it, the store is on Bigtable, with direct clients (`direct.py`). `runs.py` is the
part that all of these share.

The clock is virtual, so a run takes only the time spent computing, and trio's choice of the next task is seeded.
Everything that a run can do without is a choice in its `Plan`: it can be noted, replayed, and left out (`shrink.py`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import trio
from trio._core import _run as scheduler

from perco.notify import failing
from perco.protocol.failed import describe
from perco.testing.embedded import Embedded
from perco.testing.plan import Plan
from perco.testing.processes import EndlessError
from perco.testing.runs import (
    BIGTABLE as BIGTABLE,
    LOCAL as LOCAL,
    Outcome as Outcome,
    Run,
    SimulationOptions as SimulationOptions,
    processes_of,
)
from perco.testing.served import Served

_LOOKS_MAX: Final = 1_000_000  # looks at the clock; a usual run makes a tenth as many
_LOOKS_EACH: Final = 50_000  # looks between two garbage collections


class _Clock(trio.abc.Clock):
    """A clock that jumps to the next deadline when no task can run: there is nothing outside to wait for. It counts how
    often tasks look at it, and so detects a run that loops without calling the store."""

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
    """Collect garbage at the same moments in each run, not when Python chooses to. These are the moments at which
    objects in reference cycles are finalized."""
    on = gc.isenabled()
    gc.disable()
    gc.collect()
    freezes = not gc.get_freeze_count()  # else a process that makes many runs has done it already
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
    """Make the seed decide what trio's scheduler chooses."""
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    state = scheduler._r.getstate()
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    scheduler._r.seed(seed)
    log = logging.getLogger("perco")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)  # observers log each full disk
    try:
        yield
    finally:
        log.setLevel(level)
        scheduler._r.setstate(state)
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]


def _no_places() -> Any:
    """Keep tracebacks out of the failed list: they would make a run depend on the folder that perco is installed in,
    and on line numbers, because the sizes of cells decide what fits into a batch."""
    return mock.patch.object(failing, "describe_wholly", describe)


def _run_of(plan: Plan, options: SimulationOptions) -> Run:
    if options.store == BIGTABLE:
        from perco.testing.direct import Direct  # only here: other runs do without the modules of Bigtable

        return Direct(plan, options)
    return (Embedded if processes_of(plan, options) == 1 else Served)(plan, options)


def run_plan(plan: Plan, options: SimulationOptions | None = None) -> Outcome:
    """Make one run, in its own trio loop, in virtual time. Raises: any error that a run must not raise, for example an
    AssertionError."""
    with _collected(), _no_places(), seeded(plan.seed + (plan.salt << 32)):
        options = options or SimulationOptions()
        simulation = _run_of(plan, options)
        try:
            return trio.run(simulation.run, clock=_Clock(_LOOKS_MAX))
        except BaseException:
            if isinstance(simulation, Served):
                simulation.kernel.discard()
            raise


def simulate(seed: int, options: SimulationOptions | None = None) -> Outcome:
    """Run one seed. Raises: as `run_plan`."""
    return run_plan(Plan(seed), options)
