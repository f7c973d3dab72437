"""The row store of a direct client. The owner gives the client timestamps and a ticket; without a ticket, the store
accepts no mutation from it.

F3  Every read and mutation shows the ticket of the session that it began in. The rows refuse it once the owner has
    ended that session, whether or not this client knows about that yet.
R5  Once the session of a transaction has ended, the transaction's reads raise SessionEnded, and its mutations fail.
N8  The owner cannot see notify cells that come and go: this client reports them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import trio

from perco.errors import PercoError
from perco.rpc.link import Link
from perco.serve.messages import NOTIFIED, QUIET, Method
from perco.serve.remote_rows import RemoteRowStore
from perco.storage import (
    NOTIFY,
    Failed,
    Mutation,
    ReadRequest,
    Refused,
    RowCells,
    RowStore,
    ScanPage,
    ScanRequest,
    Verdict,
)

_STALLED_S: Final = 1.0  # the server has stalled if calls wait, and it has said nothing for this long
_LOOK_S: Final = 0.5  # between two looks for the server that owns the store: if this one has stalled
_LOOK_MAX_S: Final = 3.0  # otherwise


class TicketRows(RowStore, Protocol):
    """The rows of a store, reached with a ticket."""

    async def adopt(self, tables: Sequence[str]) -> None:
        """Find out what the store has for these tables. Raises: Unavailable."""
        ...

    def session_ended(self) -> None:
        """Let reads that have begun raise SessionEnded, and mutations that have not been sent fail."""
        ...

    def greeted(self, ticket: str) -> None:
        """Note that the server has greeted with this ticket. Drop any other ticket: the next call asks for a new
        one."""
        ...

    async def served_at(self) -> str:
        """Where the store's owner serves now; "": nowhere. Raises: Unavailable."""
        ...

    async def sample(self, table: str, pieces: int) -> list[bytes]:
        """The first rows of pieces of a table, for tasks that read it side by side: at least so many, each about as
        large, if the database can tell; else [b""]. Raises: Unavailable."""
        ...

    def close(self) -> None: ...


class DirectRowStore(RemoteRowStore):
    """See the module.

    Args:
        reach: makes the rows. Its argument is a function that asks the owner for the ticket.
    """

    rows: TicketRows
    groups: bool
    once: bool
    spread: bool
    alone: bool

    def __init__(
        self,
        link: Link,
        reach: Callable[[Callable[[], Awaitable[str]]], TicketRows],
        patience_s: float,
        rng: random.Random,
    ) -> None:
        super().__init__(link, _nowhere, patience_s, rng)
        self.rows = reach(self._ticket)
        self.spread, self.alone = True, False

    async def _ticket(self) -> str:
        return str(await self._link.call(Method.TICKET, None, again=True, held=True))

    def greeted(self, info: dict[str, Any]) -> None:
        """See `RemoteRowStore.greeted`. The rows themselves state what they offer. A server that does not have this
        store cannot give a ticket for it, so no transaction commits with that server's timestamps."""
        self.groups, self.once = self.rows.groups, self.rows.once
        self.rows.greeted(info["ticket"])
        self._link.tell(Method.NEWS, NOTIFIED)  # N8: what was told since the last greeting may be lost

    def lost(self) -> None:
        super().lost()
        self.rows.session_ended()

    def close(self) -> None:
        self.rows.close()

    async def sample(self, table: str, pieces: int) -> list[bytes]:
        """See `TicketRows.sample`."""
        return await self.rows.sample(table, pieces)

    async def refresh(self) -> None:
        await super().refresh()
        await self.rows.adopt(self.tables())

    async def follow(self, is_here: Callable[[str], bool]) -> None:
        """Leave a server once another one owns the store, if the former one does not end the connection: because it was
        stopped, because its host was lost, or because it does not know that it has lost the store. `is_here`: whether
        the present connection leads to an address."""
        looked = trio.current_time()
        while True:
            await trio.sleep(_LOOK_S * self._rng.uniform(0.5, 1.5))
            now = trio.current_time()
            if now < looked + (_LOOK_S if self._link.stalled_s() > _STALLED_S else _LOOK_MAX_S):
                continue
            looked = now
            with suppress(PercoError):
                found = await self.rows.served_at()
                if found and not is_here(found):
                    self._link.leave()

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        return await self.rows.read(requests)

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        """See `RowStore.read_first`."""
        return await self.rows.read_first(requests, bytes_max)

    async def scan(self, request: ScanRequest) -> ScanPage:
        return await self.rows.scan(request)

    @trio.lowlevel.enable_ki_protection
    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        verdicts = await self.rows.apply(mutations)
        notify = [
            write[3] is not None
            for mutation, verdict in zip(mutations, verdicts, strict=True)
            if not isinstance(verdict, Refused | Failed)
            for _, _, writes in mutation.rows
            for write in writes
            if write[0] == NOTIFY
        ]
        if notify:
            self._link.tell(Method.NEWS, NOTIFIED if any(notify) else QUIET)
        return verdicts


def _nowhere(number: int, port: int) -> Link:
    raise AssertionError("the rows are not with tablet servers")
