"""The row store of a direct client. The owner gives the client timestamps and a ticket; without a ticket, the store
accepts no mutation from the client.

F3  Every read or mutation is made under the ticket of the session in which it began. Once the owner has ended that
    session, the call is refused, whether or not this client already knows that the session has ended.
R5  Once the session of a transaction has ended, the transaction's reads raise SessionEnded, and its mutations fail.
N8  The owner cannot see which notify cells this client puts and removes, so the client reports that it has done so.
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

_STALLED_S: Final = 1.0  # the server has stalled if calls wait, and nothing was heard from it for this long
_LOOK_S: Final = 0.5  # between two looks for the store's owner, if the present server has stalled
_LOOK_MAX_S: Final = 3.0  # the same, if it has not stalled


class TicketRows(RowStore, Protocol):
    """The rows of a store, reached with a ticket."""

    async def adopt(self, tables: Sequence[str]) -> None:
        """Find out what the store has for these tables. Raises: Unavailable."""
        ...

    def session_ended(self) -> None:
        """Let reads that have begun raise SessionEnded, and mutations that have not been sent fail."""
        ...

    def greeted(self, ticket: str) -> None:
        """Note the ticket in the server's greeting. If the rows have another ticket, drop that one: the next call asks
        for a new ticket."""
        ...

    async def served_at(self) -> str:
        """The address at which the store's owner serves now; "": there is none. Raises: Unavailable."""
        ...

    async def sample(self, table: str, pieces: int) -> list[bytes]:
        """Divide a table, for tasks that read it in parallel, into at least `pieces` pieces of about the same size, if
        the database can tell where to divide the table. Returns the first row of each piece; [b""], if the database
        cannot tell. Raises: Unavailable."""
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
    logs: bool
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
        """See `RemoteRowStore.greeted`. The rows, not the server, state what the store offers. A server that does not
        have this store cannot give a ticket for it, so no transaction commits with that server's timestamps."""
        self.groups, self.once, self.logs = self.rows.groups, self.rows.once, self.rows.logs
        self.rows.greeted(info["ticket"])
        self._link.tell(Method.NEWS, NOTIFIED)  # N8: reports since the last greeting may be lost

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
        """Leave the present server once another process owns the store. Perhaps the former owner does not end the
        connection: it may be stopped, its host may be lost, or it may not know that it has lost the store.
        `is_here`: whether an address is the one to which the present connection leads."""
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
