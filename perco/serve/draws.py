"""Timestamps that a server draws for its clients.

O1  While the server does not know whether it still owns the store, it hands out no timestamp: calls wait.
G1  From the draw on, the client's session holds the start timestamps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from perco.database.local import LocalOwner
from perco.database.parts import Parts
from perco.errors import SessionEnded, StoreLocked, Unavailable
from perco.rpc.peer import Peer
from perco.serve.messages import DRAWS_MAX
from perco.serve.sessions import Session, Sessions
from perco.tablets.backend import sure

_SURE_S: Final = 30.0  # how long a call waits for this process to be sure that it owns the store


class Draws:
    """Loop thread only. `fail`: answers a call with an error."""

    def __init__(
        self, parts: Parts, owner: LocalOwner, sessions: Sessions, fail: Callable[[Peer, int, Exception], None]
    ) -> None:
        self._parts, self._owner, self._sessions, self._fail = parts, owner, sessions, fail

    def draw(self, session: Session, peer: Peer, id: int, wanted: Any) -> None:
        starts, others = wanted
        if type(starts) is not int or type(others) is not int or min(starts, others) < 0:
            raise TypeError("two counts of timestamps are expected, each 0 or more")
        if not 0 < starts + others <= DRAWS_MAX:
            raise ValueError("the number of timestamps is out of range")
        draw, drawn = self._parts.oracle.draw_nowait, [0]
        try:
            self._owner.backend.check()  # O1; if this process does not know whether it owns the store, the call waits
            drawn = [draw() for _ in range(starts + others)]
        except Unavailable:
            pass
        except StoreLocked as error:
            self._fail(peer, id, error)
            return
        if not drawn[-1]:  # some must wait: these are 0, and they come last
            self._draw_rest(session, peer, id, starts, others, [ts for ts in drawn if ts])
            return
        self._drawn(session, peer, id, starts, drawn)

    def one(self, session: Session, peer: Peer) -> int:
        """A start timestamp that goes along with another answer; 0: there is none at the moment."""
        try:
            self._owner.backend.check()  # O1
        except (Unavailable, StoreLocked):
            return 0
        ts = 0 if session.ended or peer.ended else self._parts.oracle.draw_nowait()
        if ts:
            self._sessions.begin(session, ts)
        return ts

    async def one_later(self, session: Session) -> int:
        """Like `one`, but waits for the timestamp. The session may have ended meanwhile: then the caller lets go of the
        timestamp. Raises: StoreLocked, Unavailable."""
        await sure(self._owner.backend.check, _SURE_S)
        ts = await self._parts.oracle.draw()
        self._sessions.begin(session, ts)
        try:
            await sure(self._owner.backend.check, _SURE_S)  # O1: the draw may have outlasted the lease
        except BaseException:
            self.take_back(session, ts)
            raise
        return ts

    def take_back(self, session: Session, ts: int) -> None:
        """The client does not get a timestamp that was drawn for it."""
        self._sessions.done(session, (ts,))

    def _draw_rest(self, session: Session, peer: Peer, id: int, starts: int, others: int, drawn: list[int]) -> None:
        async def run() -> None:
            try:
                await sure(self._owner.backend.check, _SURE_S)
                while len(drawn) < starts + others:
                    drawn.append(await self._parts.oracle.draw())
                await sure(self._owner.backend.check, _SURE_S)  # O1: the draw may have outlasted the lease
                self._drawn(session, peer, id, starts, drawn)
            except Exception as error:
                self._fail(peer, id, error)

        self._parts.background.spawn(run)

    def _drawn(self, session: Session, peer: Peer, id: int, starts: int, drawn: list[int]) -> None:
        if session.ended or peer.ended:  # the answer would be lost, and the timestamps would be held forever
            peer.fail(id, SessionEnded())
            return
        for ts in drawn[:starts]:
            self._sessions.begin(session, ts)
        oracle = self._parts.oracle
        peer.reply(id, (drawn, oracle.catalogue_version, oracle.wall_ms(), oracle.last))
