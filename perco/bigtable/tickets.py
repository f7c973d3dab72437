"""The owner's side of clients that read and write a store on Bigtable by themselves.

Each has a ticket, which its session with the owner gives it, and a row of the table that says so. A client asks that
row, and the owner's, for permission, which lasts for `call_s` (`client.py`).

F3   When a session has ended, its ticket ends. `call_s` and `late_s` later, nothing that the session has sent can take
     effect, and nothing that it reads counts; until then the watermark's deletions wait.
T13  The floor is in the owner's row. Once `raise_floor` has returned, no client's mutation below it can take effect.
O1   Tickets of a former owner are not good. Its clients' permits may last on, so a new owner waits as for that owner's
     own mutations.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final

import trio

from perco.bigtable import owner_row
from perco.bigtable.owner_row import Holder
from perco.bigtable.rows import BigtableRows
from perco.errors import PercoError, SessionEnded

log: logging.Logger = logging.getLogger("perco.serve")

_AGAIN_S: Final = 0.2


class _Ticket:
    """Of a session that asked for it. `ended`: its row must say so; `ended_at`: when it did, in trio's time."""

    def __init__(self) -> None:
        self.ended = False
        self.ended_at = math.inf


class Tickets:
    """Loop thread only.

    Args:
        owner: the claim of this process.
    """

    on_gone: list[Callable[[], None]]

    def __init__(self, rows: BigtableRows, owner: Holder) -> None:
        self._rows, self._token = rows, owner.token
        self._lasts_s = owner.lasts_s  # what a client does with a permit
        self._all: dict[str, _Ticket] = {}  # those that may have a row
        self._settling = trio.Lock()
        self._floor = 0
        self._told_at = -math.inf  # when the last floor was in the store
        self.on_gone = []

    async def admit(self, ticket: str) -> None:
        """Let the client that shows this ticket in. Raises: SessionEnded, Unavailable, StoreLocked."""
        known = self._all.setdefault(ticket, _Ticket())  # before the first await: `end` must find it
        await self._rows.put([owner_row.admit(self._rows.place, ticket, self._token)])
        self._rows.check()  # else the ticket is void, and the client waits for the next owner
        if known.ended:
            raise SessionEnded()

    def end(self, ticket: str) -> None:
        """The session of this ticket has ended. `settle` ends the ticket."""
        if (known := self._all.get(ticket)) is not None:
            known.ended = True

    async def settle(self) -> None:
        """Return when the ticket of each session that has ended is no longer good. Raises: Unavailable."""
        async with self._settling:
            ended = [(name, each) for name, each in self._all.items() if each.ended and each.ended_at == math.inf]
            await self._rows.put([owner_row.dismiss(self._rows.place, name) for name, _ in ended])
            for _, each in ended:
                each.ended_at = trio.current_time()
        if ended:
            self._tell()  # it may not have told of notify cells

    async def run(self) -> None:
        """End the tickets of sessions that have ended, and call those in `on_gone`; again once nothing that was sent
        with them can take effect any more, when their rows are removed."""
        cleared = False
        while True:
            await trio.sleep(_AGAIN_S)
            try:
                if not cleared:
                    await self._clear()
                    cleared = True
                await self.settle()
                await self._forget()
            except PercoError as error:
                log.info("tickets of sessions that have ended cannot be removed yet: %s", error)

    async def _forget(self) -> None:
        now = trio.current_time()
        gone = [name for name, each in self._all.items() if each.ended_at + self._lasts_s <= now]
        await self._rows.put([owner_row.forget(self._rows.place, name) for name in gone])
        for name in gone:
            del self._all[name]
        if gone:
            self._tell()

    def _tell(self) -> None:
        for act in self.on_gone:
            act()

    async def _clear(self) -> None:
        """Remove the rows of tickets that former owners gave."""
        names = [name for name in await self._rows.tickets() if name not in self._all]
        await self._rows.put([owner_row.forget(self._rows.place, name) for name in names])

    async def raise_floor(self, ts: int, *, wait: bool) -> None:
        """T13: for the clients; see `OwnerStore.raise_floor`. Raises: Unavailable, StoreLocked."""
        if wait:
            await self.settle()
        if ts > self._floor:
            await self._rows.put([owner_row.raise_floor(self._rows.place, ts)])
            self._floor, self._told_at = ts, trio.current_time()
        if wait and self._all:
            last = max((each.ended_at for each in self._all.values() if each.ended_at < math.inf), default=-math.inf)
            await trio.sleep_until(max(self._told_at, last) + self._lasts_s)
