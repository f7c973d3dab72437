"""Faults in what holds observers back, and in schedules, each with the component test that must find it."""

from __future__ import annotations

from typing import Any, Final

import pytest
import trio

from perco.notify.backoff import Backoff
from perco.notify.breakers import Breakers
from perco.notify.rates import Rates
from perco.notify.room import Room
from perco.notify.ticking import Ticker
from perco.storage import FAILED_LIST, TS_MAX
from tests.testing.mutants_components import by

_LIMITS: Final = "tests/component/notify/test_limits.py"
_HOLDING: Final = "tests/component/notify/test_holding_back.py"
_SCHEDULES: Final = "tests/component/notify/test_schedules.py"


@by(f"{_LIMITS}::test_slow_observers_leave_room_for_others", "N13 a slow observer may take all places")
def no_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "has", lambda self, number, limits, now, *, alone: self._taken < self._places)


@by(f"{_LIMITS}::test_a_program_with_one_observer_uses_all_places", "N13 an observer leaves room although it is alone")
def room_for_nobody(patch: pytest.MonkeyPatch) -> None:
    right = Room.has
    patch.setattr(
        Room, "has", lambda self, number, limits, now, *, alone: right(self, number, limits, now, alone=False)
    )


@by(f"{_LIMITS}::test_runs_of_a_slow_observer_do_not_end_together", "N13 runs of a slow observer begin together")
def together(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "wait_s", lambda self, number, now, *, alone: 0.0)


@by(f"{_HOLDING}::test_an_outage_costs_changes_few_attempts", "N14 an observer is never tripped")
def never_tripped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Breakers, "failed", lambda self, number, now: False)


@by(f"{_HOLDING}::test_an_outage_costs_changes_few_attempts", "N14 an observer stays tripped after a run has succeeded")
def stays_tripped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Breakers, "succeeded", lambda self, number: False)


@by(f"{_HOLDING}::test_one_success_begins_the_count_anew", "N14 failures count although runs have succeeded meanwhile")
def all_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Breakers, "succeeded", lambda self, number: self.tripped.pop(number, None) is not None)


@by(f"{_HOLDING}::test_an_outage_costs_changes_few_attempts", "N14 trials go on with the same row")
def same_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Breakers, "pause_s", lambda self, number, backoff: 0.0)


@by(f"{_HOLDING}::test_an_outage_costs_changes_few_attempts", "N14 rows wait on after a run has succeeded")
def wait_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Backoff, "end_pauses", lambda self, number, now: None)


@by(f"{_HOLDING}::test_two_workers_share_a_rate", "N15 each worker has the rate for itself")
def own_rate(patch: pytest.MonkeyPatch) -> None:
    async def moved_on(self: Any, number: int, count: int, apart_us: float) -> int:
        await trio.lowlevel.checkpoint()
        first = max(getattr(self, "_next_us", 0), self._epoch_us + int(trio.current_time() * 1e6))
        self._next_us = first + int(count * apart_us)
        return int(first)

    patch.setattr(Rates, "_moved_on", moved_on)


@by(f"{_HOLDING}::test_repeated_runs_count", "N15 runs that are repeated after a conflict do not count")
def free_repeats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rates, "wait_s", lambda self, number: 0.0)


@by(f"{_HOLDING}::test_a_rate_holds_over_all_rows", "N15 a moment is used for any number of runs")
def used_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rates, "take", lambda self, acks: None)


@by(
    f"{_SCHEDULES}::test_a_run_that_takes_longer_than_the_period",
    "N16 the next moment is written before the one before is handled",
)
def too_early(patch: pytest.MonkeyPatch) -> None:
    async def waits(self: Any, schedule: Any) -> bool:
        return False

    patch.setattr(Ticker, "_waits", waits)


@by(
    f"{_SCHEDULES}::test_a_moment_that_is_given_up_does_not_stop_the_schedule[owner-all]",
    "N16 a schedule waits for a moment that was given up",
)
def stuck(patch: pytest.MonkeyPatch) -> None:
    right = Ticker._waits

    async def waits(self: Any, schedule: Any) -> bool:
        bound = self._engine.known.bind(schedule.due)
        row = schedule.due.table.row(schedule.id)
        queries = [(FAILED_LIST, ack, 0, TS_MAX, 1) for ack in bound.acks]
        [failed] = await self._engine.driver.store.read([(bound.table, row, queries)])
        return any(failed) or await right(self, schedule)

    patch.setattr(Ticker, "_waits", waits)
