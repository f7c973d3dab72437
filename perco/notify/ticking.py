"""Notifies the observers of schedules when they are due.

N16 A schedule has a row in the table SCHEDULES, with the newest moment of which its observer was notified. Workers
    write the next moment there when it has come, in a transaction that reads the one before. So one of them notifies
    the observer of each moment, and the acknowledgement (N3) lets one run commit for it. With `missed="all"`, the next
    moment is not written before the one before it has been handled, or given up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import trio

from perco.errors import BackgroundFailure, PercoError, TransactionClosed, TransientError
from perco.schema.schedules import Schedule
from perco.storage import NOTIFY, TS_MAX
from perco.txn.beginning import begin
from perco.txn.engine import Engine

log: logging.Logger = logging.getLogger("perco.observer")

_MOST_S: Final = 60.0  # between two looks at the clock, which may have been set
_AGAIN_S: Final = 1.0  # after a failure
# Between two looks whether a moment has been handled, while more are due: the first pause, which doubles, and the
# longest.
_BEHIND_S, _BEHIND_MOST_S = 0.05, 5.0
_LEAST_S: Final = 0.001


class Ticker:
    """Loop thread only."""

    def __init__(self, engine: Engine, schedules: Sequence[Schedule]) -> None:
        self._engine, self._schedules = engine, schedules
        self._behind: dict[str, float] = {}  # by id: the last pause, while more moments are due

    async def run(self) -> None:
        """Notify observers until cancelled."""
        while True:
            pause_s = _MOST_S
            for schedule in self._schedules:
                if not self._is_ours(schedule):
                    continue
                try:
                    pause_s = min(pause_s, await self._tick(schedule))
                except (BackgroundFailure, TransactionClosed):
                    raise
                except PercoError as error:  # also an unknown outcome: the next look finds out
                    if not isinstance(error, TransientError):
                        log.warning("schedule %s: %s", schedule.id, error)
                    pause_s = min(pause_s, _AGAIN_S)
            await trio.sleep(pause_s)

    def _is_ours(self, schedule: Schedule) -> bool:
        """Whether the store has the schedule in this program's version (N10): a newer one may have other moments."""
        entry = self._engine.known.catalogue.observers.get(schedule.id)
        return entry is not None and entry.version <= self._engine.known.schema.observers[schedule.id].version

    def _now(self) -> datetime:
        return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=self._engine.oracle.wall_ms())

    async def _tick(self, schedule: Schedule) -> float:
        """Notify the observer if the next moment has come. Returns how many seconds to wait before the next look."""
        id, times = schedule.id, schedule.times
        txn = await begin(self._engine, None, "schedules")
        try:
            due = await txn.get(schedule.due, id)
            handled = await txn.get(schedule.handled, id)
            now = self._now()
            if due is None and handled is None:
                txn.set(schedule.handled, id, now)
                await txn.commit()
                return self._until(times.after(now))
            before = max(moment for moment in (due, handled) if moment is not None)
            moment = times.last(now) if schedule.missed == "last" else times.after(before)
            if not before < moment <= now:
                return self._until(times.after(max(before, now)))
            if schedule.missed == "all" and await self._waits(schedule):
                self._behind[id] = min(2 * self._behind.get(id, _BEHIND_S / 2), _BEHIND_MOST_S)
                return self._behind[id]
            self._behind.pop(id, None)
            txn.set(schedule.due, id, moment)
            await txn.commit()
            return self._until(times.after(moment))
        finally:
            txn.discard()

    def _until(self, moment: datetime) -> float:
        return max((moment - self._now()).total_seconds(), _LEAST_S)

    async def _waits(self, schedule: Schedule) -> bool:
        """Whether the moment that was written last still waits for its observer: it has neither been handled nor given
        up."""
        bound = self._engine.known.bind(schedule.due)
        queries = [(NOTIFY, ack, 0, TS_MAX, 1) for ack in bound.acks]
        [found] = await self._engine.driver.store.read([(bound.table, schedule.due.table.row(schedule.id), queries)])
        return any(found)
