"""The owner's side of clients that read and write a store on PostgreSQL by themselves.

Each has a ticket, which its session with the owner gives it: a row of PREFIX_sessions. PostgreSQL makes a client's
mutation only if the row is there, and a client asks for it after each read.

F3   When a session has ended, its row is removed before the watermark can rise: after that nothing that the session has
     sent can take effect, and nothing that it reads counts.
T13  The floor is in the store. Once `raise_floor` has returned, no client's mutation below it can take effect.
O1   A new owner removes all tickets of the former one before it begins.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from perco.errors import PercoError, SessionEnded, Unavailable
from perco.postgresql.arrays import int8
from perco.postgresql.connection import Connection, Lost, Refusal, Rows, Statement
from perco.postgresql.rows import YES, PostgresqlRows, lock_of

log: logging.Logger = logging.getLogger("perco.serve")

_BRIEFLY: Final = b"1s"
_TIMEOUT: Final = "55P03"
_LOOKS: Final = 10
_AGAIN_S: Final = 0.2


async def alone(
    rows: PostgresqlRows, connection: Connection, lock: bytes, statement: Statement, parameters: list[bytes]
) -> Rows:
    """Run a statement that changes a term, once no transaction of an earlier term is under way: none that shares this
    lock. One that goes on for long is ended: its process may have been stopped, or its host lost, in the middle of
    sending it. Raises: Refusal, Lost, Unavailable."""
    statements = rows.statements
    for _ in range(_LOOKS):
        try:
            *_, found = await connection.run(
                [(statements.briefly, [_BRIEFLY]), (statements.wait_for_others, [lock]), (statement, parameters)]
            )
            return found
        except Refusal as refusal:
            if refusal.sqlstate != _TIMEOUT:
                raise
        await connection.run([(statements.end_holders, [lock])])
    raise Unavailable(f"{rows.pool.place.shown}: transactions of an earlier owner do not end")


class Tickets:
    """Loop thread only."""

    def __init__(self, rows: PostgresqlRows) -> None:
        self._rows = rows
        self._known: set[str] = set()  # those that may have a row
        self._ended: set[str] = set()  # those whose row has to go
        self._one = trio.Lock()
        self._floor = 0
        self.on_gone: Callable[[], None] = lambda: None  # a session that wrote by itself has ended for good

    async def admit(self, ticket: str) -> None:
        """Let the client that shows this ticket in. Raises: SessionEnded, Unavailable, StoreLocked."""
        self._known.add(ticket)  # before the first await: `end` must know it
        async with self._one:
            if ticket in self._ended or ticket not in self._known:  # it ended meanwhile, and may be removed already
                raise SessionEnded("the server has ended this client's session")
            await self._talk(lambda connection: self._insert(connection, ticket))

    async def _insert(self, connection: Connection, ticket: str) -> None:
        rows = self._rows
        fence, statements = rows.fence, rows.statements
        token = fence.token.encode()
        *_, ours = await connection.run(
            [
                (statements.durably, []),
                (statements.hold, [fence.lock]),  # a new owner waits, and then removes it
                (statements.admit, [ticket.encode(), token]),
                (statements.still, [token]),
            ]
        )
        if ours != YES:
            raise self._not_ours()

    def end(self, ticket: str) -> None:
        """The session of this ticket has ended. `settle` removes it."""
        if ticket in self._known:
            self._ended.add(ticket)

    async def settle(self) -> None:
        """F3: return when nothing that an ended session has sent can take effect any more. Raises: Unavailable."""
        while self._ended:
            async with self._one:
                for ticket in list(self._ended):
                    await self._talk(lambda connection, ticket=ticket: self._remove(connection, ticket))  # type: ignore
                    self._known.discard(ticket)
                    self._ended.discard(ticket)
            self.on_gone()

    async def _remove(self, connection: Connection, ticket: str) -> None:
        rows = self._rows
        lock = lock_of(rows.statements.prefix, ticket)
        await alone(rows, connection, lock, rows.statements.dismiss, [ticket.encode()])

    async def run(self) -> None:
        """Remove the tickets of sessions that have ended."""
        while True:
            await trio.sleep(_AGAIN_S)
            try:
                await self.settle()
            except PercoError as error:
                log.info("tickets of ended sessions cannot be removed yet: %s", error)

    async def raise_floor(self, ts: int, *, wait: bool) -> None:
        """T13: for the clients; see `OwnerStore.raise_floor`. Raises: Unavailable, StoreLocked."""
        await self.settle()
        if ts > self._floor:
            await self._talk(lambda connection: self._raise(connection, ts))
            self._floor = ts
        if wait:
            for ticket in list(self._known):
                lock = lock_of(self._rows.statements.prefix, ticket)
                await self._talk(lambda connection, lock=lock: self._wait_for(connection, lock))  # type: ignore[misc]

    async def _wait_for(self, connection: Connection, lock: bytes) -> None:
        """Wait for what a client has under way, however long it takes: if the client is dead, its session ends."""
        statements = self._rows.statements
        for _ in range(_LOOKS):
            try:
                await connection.run([(statements.briefly, [_BRIEFLY]), (statements.wait_for_others, [lock])])
                return
            except Refusal as refusal:
                if refusal.sqlstate != _TIMEOUT:
                    raise
        raise Unavailable(f"{self._rows.pool.place.shown}: a client's mutation takes long")

    async def _raise(self, connection: Connection, ts: int) -> None:
        token = self._rows.fence.token.encode()
        *_, found = await connection.run(
            [(self._rows.statements.durably, []), (self._rows.statements.raise_floor, [int8(ts), token])]
        )
        if not found:
            raise self._not_ours()

    def _not_ours(self) -> Unavailable:
        return Unavailable(f"{self._rows.pool.place.shown} is no longer the server's: another process owns it")

    async def clear(self, connection: Connection) -> None:
        """O1: remove the tickets of a former owner, each once nothing is under way with it. Raises: Refusal, Lost."""
        [found] = await connection.run([(self._rows.statements.tickets, [])])
        for (ticket,) in found:
            await self._remove(connection, ticket.decode())

    async def _talk(self, what: Callable[[Connection], Awaitable[object]]) -> None:
        """Run a short exchange on a connection of the pool; once more, if the connection breaks: each can be repeated.

        Raises: Unavailable; what the store's `told` makes of a refusal."""
        rows = self._rows
        for last in (False, True):
            try:
                async with rows.pool.connection() as connection:
                    await what(connection)
                return
            except Lost as lost:
                if last:
                    raise Unavailable(f"{rows.pool.place.shown} cannot be reached: {lost.said}") from lost
            except Refusal as refusal:
                raise rows.told(refusal) from refusal
