"""The owner's side of direct clients of a store on Bigtable.

Each client gets a ticket with its session, and each ticket has a row in the table. To get a permit, which lasts for
`call_s`, a client reads its ticket's row and the owner's row (`client.py`).

F3   When a session has ended, the owner ends the session's ticket. Once `call_s` plus `late_s` have passed since the
     ticket ended, nothing that the session has sent can take effect, and nothing that it reads counts. Until then, the
     vacuum waits.
T13  The floor is in the owner's row. Once `raise_floor` with `wait` has returned, no client's mutation below the floor
     can take effect.
O1   Tickets of a former owner are void, but the permits of its clients may not have expired. So a new owner waits
     until they have expired, as it waits for the former owner's own mutations.
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
    """The ticket of a session that asked for one. `ended`: the session has ended, and the ticket's row must say so;
    `ended_at`: when Bigtable had acknowledged that, in trio's time."""

    def __init__(self) -> None:
        self.ended = False
        self.ended_at = math.inf


class Tickets:
    """Loop thread only.

    Args:
        owner: the cell of this process's claim in the owner's row.
    """

    on_gone: list[Callable[[], None]]

    def __init__(self, rows: BigtableRows, owner: Holder) -> None:
        self._rows, self._token = rows, owner.token
        self._lasts_s = owner.lasts_s  # for this long after a permit is issued, mutations under it may take effect
        self._all: dict[str, _Ticket] = {}  # the tickets that may have a row
        self._settling = trio.Lock()
        self._floor = 0
        self._told_at = -math.inf  # when Bigtable had acknowledged the last floor
        self.on_gone = []

    async def admit(self, ticket: str) -> None:
        """Admit the client that presents this ticket. Raises: SessionEnded, Unavailable, StoreLocked."""
        known = self._all.setdefault(ticket, _Ticket())  # before the first await: `end` must find it
        await self._rows.put([owner_row.admit(self._rows.place, ticket, self._token)])
        self._rows.check()  # else the ticket is void, and the client waits for the next owner
        if known.ended:
            raise SessionEnded()

    def end(self, ticket: str) -> None:
        """Record that the session of this ticket has ended. `settle` then ends the ticket."""
        if (known := self._all.get(ticket)) is not None:
            known.ended = True

    async def settle(self) -> None:
        """End the tickets of all sessions that have ended. Raises: Unavailable."""
        async with self._settling:
            ended = [(name, each) for name, each in self._all.items() if each.ended and each.ended_at == math.inf]
            await self._rows.put([owner_row.dismiss(self._rows.place, name) for name, _ in ended])
            for _, each in ended:
                each.ended_at = trio.current_time()
        if ended:
            self._tell()  # their clients may not have reported the notify cells that they put

    async def run(self) -> None:
        """End the tickets of sessions that have ended, and call the functions in `on_gone`. Once nothing that was sent
        with these tickets can take effect, remove their rows, and call the functions again."""
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
        """Note the tickets of former owners as ended: their clients may have died, and mutations that those clients
        have sent may still take effect.

        Raises: Unavailable; StoreLocked, if another process owns the store: the tickets found may be that process's."""
        found = await self._rows.tickets()
        self._rows.check()
        for name in found:
            if name not in self._all:
                self._all[name] = former = _Ticket()
                former.ended, former.ended_at = True, trio.current_time()

    async def raise_floor(self, ts: int, *, wait: bool) -> None:
        """T13: raise the floor for the clients; see `OwnerStore.raise_floor`. Raises: Unavailable, StoreLocked."""
        if wait:
            await self.settle()
        if ts > self._floor:
            await self._rows.put([owner_row.raise_floor(self._rows.place, ts)])
            self._floor, self._told_at = ts, trio.current_time()
        if wait and self._all:
            last = max((each.ended_at for each in self._all.values() if each.ended_at < math.inf), default=-math.inf)
            await trio.sleep_until(max(self._told_at, last) + self._lasts_s)
