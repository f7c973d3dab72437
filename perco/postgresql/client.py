"""The rows of a store on PostgreSQL for a direct client, which reads and writes them itself, with a ticket from the
owner.

O1  A client has a term of its own. After it has lost a connection, it begins the next term as soon as nothing that it
    sent before can take effect (T4). Other clients do not wait for that.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from perco.errors import TransactionClosed, Unavailable, UsedAfterFork
from perco.postgresql.address import Place
from perco.postgresql.arrays import number
from perco.postgresql.connection import Connection, Lost, Refusal
from perco.postgresql.fence import Fence
from perco.postgresql.options import PostgresqlOptions
from perco.postgresql.rows import PostgresqlRows
from perco.postgresql.statements import Statements
from perco.postgresql.tickets import alone
from perco.storage.lease import CLOSED

_NO_TABLE: Final = "42P01"
_NO_TABLES: Final = (_NO_TABLE, "42703")  # there is no store yet, or another version made it


class ClientRows(PostgresqlRows):
    """Loop thread only.

    Args:
        ticket: asks the owner for this client's ticket. Raises: PercoError.
    """

    renew: Callable[[], Awaitable[None]]
    wait_out: Callable[[bytes], Awaitable[None]]
    usable: Callable[[], None]

    def __init__(
        self,
        place: Place,
        options: PostgresqlOptions,
        *,
        durable: bool,
        ticket: Callable[[], Awaitable[str]],
    ) -> None:
        super().__init__(place, options, durable=durable, fence=Fence(place.prefix, ""), client=True)
        self.renew, self.wait_out, self.usable = self._renew, self._wait_out, self._usable
        self._process, self._closed = os.getpid(), False
        self._ticket = ticket
        self._renewing = trio.Lock()

    def _usable(self) -> None:
        if os.getpid() != self._process:
            raise UsedAfterFork(self.pool.place.shown)
        if self._closed:
            raise TransactionClosed(CLOSED)

    def close(self) -> None:
        self._closed = True
        if os.getpid() == self._process:  # in a forked child, the connections are the parent's
            super().close()

    def session_ended(self) -> None:
        """See `TicketRows.session_ended`."""
        self.fence.session += 1
        self.fence.term = 0

    async def _renew(self) -> None:
        """Begin a new term, under the present ticket. Raises: Lost, PercoError."""
        fence = self.fence
        async with self._renewing:
            if fence.term:
                return  # another task has begun it meanwhile
            connection = await Connection.open(self.pool.place)  # the pool's connections may be busy
            try:
                if not await self._next_term(connection):
                    fence.take(self.pool.place.prefix, await self._ticket())
                    # If this fails, the owner has ended the new ticket already, and the caller tries again.
                    await self._next_term(connection)
            except Refusal as refusal:
                raise self.told(refusal) from refusal
            finally:
                connection.close()

    async def _next_term(self, connection: Connection) -> bool:
        """Begin a new term under the ticket. Returns whether the ticket is valid."""
        fence = self.fence
        if not fence.token:
            return False
        found = await alone(self, connection, fence.lock, self.statements.next_term, [fence.token.encode()])
        if found:
            fence.term = number(found[0][0])
        return bool(found)

    async def _wait_out(self, lock: bytes) -> None:
        """T4: return once no transaction that was sent under the former ticket with this lock is under way."""
        connection = await Connection.open(self.pool.place)
        try:
            await alone(self, connection, lock, self.statements.briefly, [b"1s"])
        except Refusal as refusal:
            raise self.told(refusal) from refusal
        finally:
            connection.close()

    def greeted(self, ticket: str) -> None:
        """See `TicketRows.greeted`."""
        if ticket != self.fence.token:
            self.fence.take(self.pool.place.prefix, "")

    async def adopt(self, tables: Sequence[str]) -> None:
        """See `TicketRows.adopt`."""
        wanted = set(tables)
        found = await self._ask(self.statements.groups, [])
        spaces = {(table.decode(), group.decode()): number(space) for space, table, group in found}
        self.add({where: space for where, space in spaces.items() if where[0] in wanted})

    async def sample(self, table: str, pieces: int) -> list[bytes]:
        """See `TicketRows.sample`. PostgreSQL cannot sample keys."""
        await trio.lowlevel.checkpoint()
        return [b""]

    async def served_at(self) -> str:
        """See `TicketRows.served_at`."""
        try:
            async with self.pool.connection() as connection:
                return await _address(connection, self.statements)
        except Lost as lost:
            raise _unreached(self.pool.place, lost) from lost
        except Refusal as refusal:
            raise self.told(refusal) from refusal


async def address_of(place: Place) -> str:
    """The address at which the store's owner serves direct clients, or last served them; "": none.

    Raises: Unavailable.
    """
    return await _served_at(place) or ""


async def exists(place: Place) -> bool:
    """Whether a process has made the store. Raises: Unavailable."""
    return await _served_at(place) is not None


async def _served_at(place: Place) -> str | None:
    """As `address_of`; None: there is no store. Raises: Unavailable."""
    try:
        connection = await Connection.open(place)
        try:
            return await _address(connection, Statements(place.prefix))
        finally:
            connection.close()
    except Refusal as refusal:
        if refusal.sqlstate in _NO_TABLES:
            return None if refusal.sqlstate == _NO_TABLE else ""
        raise Unavailable(f"{place.shown} refuses: {refusal}", remedy="The message is PostgreSQL's.") from refusal
    except Lost as lost:
        raise _unreached(place, lost) from lost


async def _address(connection: Connection, statements: Statements) -> str:
    [row] = await connection.run([(statements.address, [])])
    return row[0][0].decode() if row else ""


def _unreached(place: Place, lost: Lost) -> Unavailable:
    return Unavailable(f"{place.shown} cannot be reached: {lost.said}")
