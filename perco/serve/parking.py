"""Parks the store's writers for a client that takes a backup (B1), for half a second at most."""

from __future__ import annotations

from functools import partial
from typing import Any

import trio

from perco.database.parts import Parts
from perco.errors import PercoError, Unavailable
from perco.serve.sessions import Session
from perco.tablets.backend import Backend
from perco.tablets.parking import PARKED_MAX_S, parked


class _Hold:
    """The writers, parked for a session. `whole`: they were parked until it said that they may go on."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.parked, self.over, self.ended = trio.Event(), trio.Event(), trio.Event()
        self.whole = False
        self.error: PercoError | None = None


class Parking:
    """Answers clients' calls. Loop thread only."""

    def __init__(self, backend: Backend, parts: Parts) -> None:
        self._backend, self._parts = backend, parts
        self._hold: _Hold | None = None

    async def park(self, session: Session, _: Any) -> tuple[int, int]:
        """Returns, as of the moment: the last timestamp that was handed out; and one up to which no commit in one step
        is in progress (C4)."""
        if self._hold is not None:
            raise Unavailable("parking the writers", remedy="Another backup is just beginning. Try again.")
        hold = self._hold = _Hold(session)
        self._parts.background.spawn(partial(self._keep, hold))
        await hold.parked.wait()
        if hold.error is not None:
            raise hold.error
        last = self._parts.oracle.last
        entered = self._parts.driver.entered.up_to(last)
        return last, min((entry.commit_ts - 1 for entry in entered), default=last)

    async def _keep(self, hold: _Hold) -> None:
        try:
            async with parked(self._backend.local):
                hold.parked.set()
                with trio.move_on_after(PARKED_MAX_S / 2):
                    await hold.over.wait()
                    hold.whole = True
        except PercoError as error:
            hold.error = error
        finally:
            self._hold = None
            hold.parked.set()
            hold.ended.set()

    async def go_on(self, session: Session, _: Any) -> bool:
        """Returns whether the writers were parked until now."""
        hold = self._hold
        if hold is None or hold.session is not session:
            await trio.lowlevel.checkpoint()
            return False
        hold.over.set()
        await hold.ended.wait()
        return hold.whole
