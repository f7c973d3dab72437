"""The owner's side of direct clients of a store on PostgreSQL.

Each client gets a ticket with its session. The ticket is a row of PREFIX_sessions. PostgreSQL applies a client's
mutation only if this row is there, and after each read, the client asks whether the row is still there.

F3   When a session has ended, its ticket's row is removed before the watermark can rise. After that, nothing that the
     session has sent can take effect, and nothing that it reads counts.
T13  The floor is in the store. Once `raise_floor` with `wait` has returned, no client's mutation below the floor can
     take effect.
O1   A new owner removes all tickets of the former owner before it begins.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from perco.errors import PercoError, SessionEnded, Unavailable
from perco.postgresql.arrays import int8
from perco.postgresql.connection import Connection, Lost, Refusal, Rows, Statement
from perco.postgresql.fence import lock_of
from perco.postgresql.rows import YES, PostgresqlRows

log: logging.Logger = logging.getLogger("perco.serve")

_BRIEFLY: Final = b"1s"
_TIMEOUT: Final = "55P03"
_NOT_ALLOWED: Final = "42501"
_PATIENTLY: Final = b"10s"
_LOOKS: Final = 10
_TRIES: Final = 5
_AT_ONCE: Final = 2  # tickets removed at the same time, at most; the pool's other connections are for reads
_AGAIN_S: Final = 0.2
T = TypeVar("T")


async def alone(
    rows: PostgresqlRows, connection: Connection, lock: bytes, statement: Statement, parameters: list[bytes]
) -> Rows:
    """Run a statement that begins or ends a term (its number is named in each transaction in which an owner or a direct
    client writes; see `fence.py`), once no transaction of an earlier term is under way. Such a transaction holds `lock`
    in shared mode. If it holds the lock for more than a second, its backend is terminated: the process may have been
    stopped, or its host lost, before it had sent the whole transaction. Raises: Refusal, Lost, Unavailable."""
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
        try:
            await connection.run([(statements.end_holders, [lock])])
        except Refusal as refusal:
            if refusal.sqlstate != _NOT_ALLOWED:
                raise
            raise Unavailable(
                f"{rows.pool.place.shown}: a transaction of a process that may be dead is in the way, and this "
                f"process may not end it: {refusal.said}",
                remedy="Let all processes connect as one role, or grant them pg_signal_backend.",
            ) from refusal
    raise Unavailable(f"{rows.pool.place.shown}: transactions of a process that may be dead do not end")


class _Ticket:
    """The ticket of a session that asked for one. `ended`: the session has ended, and the ticket's row must be
    removed."""

    def __init__(self) -> None:
        self.ended = False
        self.lock = trio.Lock()  # held by the task that makes or removes the ticket's row


class Tickets:
    """Loop thread only."""

    def __init__(self, rows: PostgresqlRows) -> None:
        self._rows = rows
        self._all: dict[str, _Ticket] = {}  # the tickets that may have a row
        self._floor = 0
        self.on_gone: list[Callable[[], None]] = []  # to be called when a direct client's session has ended for good

    async def admit(self, ticket: str) -> None:
        """Admit the client that presents this ticket. Raises: SessionEnded, Unavailable, StoreLocked."""
        known = self._all.setdefault(ticket, _Ticket())  # before the first await: `end` must find it
        async with known.lock:
            for _ in range(_TRIES):
                if known.ended:
                    raise SessionEnded()
                await self._rows.settle()
                if await self._talk(lambda connection: self._insert(connection, ticket)):
                    return
        raise Unavailable(f"{self._rows.pool.place.shown} does not accept a ticket")

    async def _insert(self, connection: Connection, ticket: str) -> bool:
        """Insert the ticket's row. Returns whether the row is there now; False: the store has another term. In that
        case, and after a lost connection, this process begins a new term. Doing so shows whether this process still
        owns the store, and stops a late insert from bringing back a ticket that was removed."""
        fence, statements = self._rows.fence, self._rows.statements
        shown = fence.shown()
        try:
            *_, there = await connection.run(
                [
                    (statements.durably, []),
                    (statements.hold, [shown.lock]),  # a new owner waits for this lock, and then removes the row
                    (statements.admit, [ticket.encode(), shown.token, int8(shown.term)]),
                    (statements.is_there, [ticket.encode()]),
                ]
            )
        except Lost:
            fence.lapse(shown)
            raise
        if there != YES:
            fence.lapse(shown)
        return there == YES

    def end(self, ticket: str) -> None:
        """Record that the session of this ticket has ended. `settle` then removes the ticket."""
        if (known := self._all.get(ticket)) is not None:
            known.ended = True

    async def settle(self) -> None:
        """F3: return once nothing that a session sent before it ended can still take effect.

        Raises: Unavailable, if this is not certain for one of the sessions; the tickets of the others are removed.
        """
        ended = [(ticket, known) for ticket, known in self._all.items() if known.ended]
        if not ended:
            return
        errors: list[PercoError] = []
        limit = trio.CapacityLimiter(_AT_ONCE)

        async def remove(ticket: str, known: _Ticket) -> None:
            async with limit, known.lock:
                try:
                    if ticket in self._all:
                        await self._talk(lambda connection: self._remove(connection, ticket))
                        del self._all[ticket]
                except PercoError as error:
                    errors.append(error)

        async with trio.open_nursery() as nursery:
            for each in ended:
                nursery.start_soon(remove, *each)
        if len(errors) < len(ended):
            for act in self.on_gone:
                act()
        if errors:
            raise errors[0]

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
        """T13: raise the floor for the clients; see `OwnerStore.raise_floor`. Raises: Unavailable, StoreLocked."""
        if wait:
            await self.settle()
        if ts > self._floor:
            await self._talk(lambda connection: self._raise(connection, ts))
            self._floor = ts
        if wait:
            for ticket in list(self._all):
                lock = lock_of(self._rows.statements.prefix, ticket)
                await self._talk(lambda connection, lock=lock: self._wait_for(connection, lock))  # type: ignore[misc]

    async def _wait_for(self, connection: Connection, lock: bytes) -> None:
        """Wait, for ten seconds at most, until the transactions that a client has under way have ended. Transactions
        that the client sends meanwhile wait, too. If the client is dead, its session ends; `run` then terminates its
        transactions, and the wait ends."""
        statements = self._rows.statements
        await connection.run([(statements.briefly, [_PATIENTLY]), (statements.wait_for_others, [lock])])

    async def _raise(self, connection: Connection, ts: int) -> None:
        token = self._rows.fence.token.encode()
        *_, found = await connection.run(
            [(self._rows.statements.durably, []), (self._rows.statements.raise_floor, [int8(ts), token])]
        )
        if not found:
            raise Unavailable(f"{self._rows.pool.place.shown} is owned by another process now")

    async def clear(self, connection: Connection) -> None:
        """O1: remove the tickets of former owners, each as soon as no transaction that names it is under way. Raises:
        Refusal, Lost, Unavailable."""
        [found] = await connection.run([(self._rows.statements.tickets, [])])
        for (ticket,) in found:
            await self._remove(connection, ticket.decode())

    async def _talk(self, what: Callable[[Connection], Awaitable[T]]) -> T:
        """Run a short exchange on a connection of the pool. If the connection breaks, repeat the exchange once, which
        does no harm.

        Raises: Unavailable; for a refusal, the error that the store's `told` returns."""
        rows = self._rows
        for last in (False, True):
            try:
                async with rows.pool.connection() as connection:
                    return await what(connection)
            except Lost as lost:
                if last:
                    raise Unavailable(f"{rows.pool.place.shown} cannot be reached: {lost.said}") from lost
            except Refusal as refusal:
                raise rows.told(refusal) from refusal
        raise AssertionError("the second attempt returns or raises")
