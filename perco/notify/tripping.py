"""Trips observers whose runs all fail, and tells of it: in the log, and in the store (N14)."""

from __future__ import annotations

import contextlib
import logging

import trio

from perco.errors import SessionEnded, StoreError
from perco.notify.backoff import Backoff
from perco.notify.breakers import BreakerOptions, Breakers, Trip, note_trip
from perco.notify.failing import fields
from perco.protocol.failed import describe
from perco.txn.engine import Engine

log: logging.Logger = logging.getLogger("perco.observer")


class Tripping:
    """Loop thread only."""

    def __init__(self, engine: Engine, breakers: Breakers, backoff: Backoff, options: BreakerOptions) -> None:
        self._engine, self._breakers, self._backoff, self._options = engine, breakers, backoff, options

    def failed(self, id: str, number: int, error: BaseException) -> None:
        """Count a failed run of an observer."""
        trips = self._breakers.failed(number, trio.current_time())
        if number not in self._breakers.tripped:
            return
        if trips:
            log.error(
                "observer %s is tripped: its last %d runs have failed; from now on one run is tried every %g s",
                *(id, self._options.failures, self._options.trial_s),
                extra=fields(id),
            )
        trip = Trip(self._engine.oracle.wall_ms(), self._options.trial_s, describe(error))
        self._engine.background.spawn(lambda: self._note(number, trip))

    def succeeded(self, id: str, number: int) -> bool:
        """Note a run of an observer that has committed. Returns whether it may run on the rows that it was held back
        from."""
        if not self._breakers.succeeded(number):
            return False
        log.warning("observer %s is no longer tripped: a run has succeeded", id, extra=fields(id))
        self._backoff.end_pauses(number, trio.current_time())
        self._engine.background.spawn(lambda: self._note(number, None))
        return True

    async def _note(self, number: int, trip: Trip | None) -> None:
        with contextlib.suppress(StoreError, SessionEnded):  # the next trial notes it again
            await note_trip(self._engine.driver.store, number, trip)
