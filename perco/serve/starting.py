"""Draws a start timestamp for a client's transaction, and makes its first read, in one call.

C4  The read waits for one-step commits below the timestamp, as every read does: they drew theirs, and were entered,
    before it was drawn.
G1  The session holds the timestamp from the draw on. If the read fails, the client gets no timestamp, and the session
    lets go of it.
O1  While the server does not know whether it still owns the store, it hands out no timestamp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perco.database.parts import Parts
from perco.errors import SessionEnded
from perco.rpc.framing import WireError
from perco.rpc.peer import Peer
from perco.serve.draws import Draws
from perco.serve.messages import UNREADABLE
from perco.serve.rows import Rows
from perco.serve.sessions import Session
from perco.storage import ReadRequest, RowCells
from perco.txn.entered import Entry


class Starts:
    """Loop thread only. `fail`: answers a call with an error."""

    def __init__(
        self,
        parts: Parts,
        draws: Draws,
        rows: Rows,
        fail: Callable[[Peer, int, Exception], None],
    ) -> None:
        self._parts, self._draws, self._rows, self._fail = parts, draws, rows, fail

    def start(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        """Draw and read at once if possible: then no commit can come in between."""
        ts = self._draws.one(session, peer)
        try:
            requests = at(asked, ts)
            entries = self._rows.entered(None, requests) if ts and self._parts.driver.entered.cells else ()
            if ts and not entries and (found := self._rows.find_now(requests)) is not None:
                self._reply(session, peer, id, ts, found)
                return
        except BaseException:
            self._draws.take_back(session, ts)
            raise
        self._parts.background.spawn(lambda: self._later(session, peer, id, asked, ts, entries))

    async def _later(
        self, session: Session, peer: Peer, id: int, asked: Any, ts: int, entries: Sequence[Entry]
    ) -> None:
        try:
            if not ts:
                ts = await self._draws.one_later(session)
                entries = self._rows.entered(None, at(asked, ts))
            for entry in entries:
                await self._parts.driver.past(entry)
            await peer.room()
            found = await self._rows.find(at(asked, ts))
            if session.ended:
                raise SessionEnded
            self._reply(session, peer, id, ts, found)
        except BaseException as error:
            self._draws.take_back(session, ts)
            if isinstance(error, UNREADABLE):
                peer.refuse(WireError(f"a first read that cannot be decoded: {error}"))
            elif isinstance(error, Exception):
                self._fail(peer, id, error)
            else:
                raise

    def _reply(self, session: Session, peer: Peer, id: int, ts: int, found: list[RowCells]) -> None:
        oracle = self._parts.oracle
        if not peer.reply(id, (ts, oracle.catalogue_version, oracle.wall_ms(), found)):
            self._draws.take_back(session, ts)  # otherwise, it would be held forever


def at(asked: Any, ts: int) -> list[ReadRequest]:
    """The requests at a timestamp."""
    return [
        (table, row, [(group, column, from_ts, to_ts or ts, most) for group, column, from_ts, to_ts, most in queries])
        for table, row, queries in asked
    ]
