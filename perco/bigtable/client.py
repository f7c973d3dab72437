"""The rows of a store on Bigtable for a direct client, which reads and writes them itself, with a ticket from the
owner.

Unlike PostgreSQL, Bigtable cannot check a client's ticket on each mutation. So a client acts on a *permit*. To get it,
the client reads the owner's row and its own ticket's row. It may then send mutations for `call_s`, measured on its own
clock from the moment at which it began to read. Its calls also end within that time. The owner states `call_s` and
`late_s`; a client uses its own `call_s` if that is shorter.

F3  A read counts only if the ticket was still valid after the cells were read: the permit had not expired, or the
    client has since renewed the permit for the same ticket. No mutation of a row is sent without a permit; hints may be
    removed at any time (N7). So once `call_s` plus `late_s` have passed since a ticket ended, no mutation sent under
    that ticket can take effect.
R5  A read raises SessionEnded if its session ends before the read does.
R7  A client never sends a mutation of an earlier session in a later one.
T13 A permit names the floor, and the client sends no mutation below the floor. So once `call_s` plus `late_s` have
    passed since the owner raised the floor, no mutation below the new floor can take effect.
O1  A permit is valid only under the owner that issued the ticket. The next owner removes nothing until all permits have
    expired.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import trio

from perco.bigtable.address import Place
from perco.bigtable.options import BigtableOptions
from perco.bigtable.owner_row import Notice
from perco.bigtable.repeating import Repeating, pause_of
from perco.bigtable.rows import Attempt, BigtableRows, turns
from perco.errors import PercoError, SessionEnded, TransactionClosed, Unavailable, UsedAfterFork
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import Failed, Mutation, Refused, Verdict
from perco.storage.lease import CLOSED, now


class Permit(NamedTuple):
    """The right to act under a ticket until `until`, by the clock of `now()`. `renew_at`: when to renew the permit;
    `floor`: the write floor that applies."""

    ticket: str
    floor: int
    renew_at: float
    until: float


class ClientRows(BigtableRows):
    """Loop thread only.

    Args:
        ticket: asks the owner for this client's ticket. Raises: PercoError.
    """

    def __init__(self, place: Place, options: BigtableOptions, *, ticket: Callable[[], Awaitable[str]]) -> None:
        super().__init__(place, options)
        self._ask_for = ticket
        self._ticket = ""  # the present ticket; "": the client has to ask for one
        self._permit = Permit("", 0, 0.0, 0.0)
        self._session = 0  # how many sessions of this client have ended
        self._renewing = trio.Lock()
        self._looked = False  # whether the store's format has been checked
        self._process, self._closed = os.getpid(), False
        self.usable: Callable[[], None] = self._usable
        self.check: Callable[[], None] = self._usable

    def _usable(self) -> None:
        if os.getpid() != self._process:
            raise UsedAfterFork(self.place.shown)
        if self._closed:
            raise TransactionClosed(CLOSED)

    def close(self) -> None:
        """See `TicketRows.close`."""
        self._closed = True
        if os.getpid() == self._process:  # in a forked child, the channels are the parent's
            self.calls.close()

    # ------------------------------------------------------------ sessions and permits

    def session_ended(self) -> None:
        """See `TicketRows.session_ended`."""
        self._session += 1
        self._ticket = ""

    def greeted(self, ticket: str) -> None:
        """See `TicketRows.greeted`."""
        if ticket != self._ticket:
            self._ticket = ""

    async def served_at(self) -> str:
        """See `TicketRows.served_at`."""
        return (await self.notice()).address

    async def adopt(self, tables: Sequence[str]) -> None:
        """See `TicketRows.adopt`."""
        for table in (SYSTEM_TABLE, *tables):
            self.add(table, ())
        if not self._looked:
            await self.must_have_format()
            await self.look_backwards()
            self._looked = True
        else:
            await trio.lowlevel.checkpoint()

    def _has(self, table: str, group: str) -> bool:
        return table in self._tables  # the catalogue names the groups of each table

    def _must_be_in(self, session: int) -> None:
        """Raises: SessionEnded, UsedAfterFork, TransactionClosed."""
        self._usable()
        if session != self._session:
            raise SessionEnded()

    def _must_go_on(self, session: int, permit: Permit) -> None:
        """Check the session and the permit; called before each mutation is sent. The check uses `now()`, because trio's
        clock does not count the time for which the machine was suspended.

        Raises: as `_must_be_in`; Unavailable."""
        self._must_be_in(session)
        if now() >= permit.until:
            raise Unavailable(f"{self.place.shown}: this process was held up for too long")

    async def _permitted(self, session: int) -> Permit:
        """A permit that does not have to be renewed yet. Raises: SessionEnded, Unavailable."""
        await trio.lowlevel.checkpoint()
        if not self._is_fresh():
            with trio.move_on_after(self._options.call_s):
                async with self._renewing:
                    attempt = 0
                    while not self._is_fresh():
                        self._must_be_in(session)
                        if not await self._renew():
                            await trio.sleep(pause_of(attempt))
                            attempt += 1
        self._must_be_in(session)
        if not self._is_fresh():
            raise Unavailable(f"the owner of {self.place.shown} gives no ticket that the store accepts")
        return self._permit

    def _is_fresh(self) -> bool:
        permit = self._permit
        return bool(self._ticket) and permit.ticket == self._ticket and now() < permit.renew_at

    async def _renew(self) -> bool:
        """Ask the store for a permit under the present ticket; if there is no ticket, ask the owner for one first.
        Returns whether the store accepts the ticket."""
        if not self._ticket:
            self._ticket = await self._ask_for()
        ticket, asked = self._ticket, now()
        told = await self.notice(ticket)
        if told.admitted:
            call_s = min(self._options.call_s, told.holder.call_s)
            self.hints.keep_to(told.holder.late_s, told.holder.lasts_s)
            self._permit = Permit(ticket, told.floor, asked + call_s / 2, asked + call_s)
        elif ticket == self._ticket:
            self._ticket = ""
        return told.admitted

    # ------------------------------------------------------------ reads and mutations

    async def _ask(self, calls: Sequence[Any]) -> list[Any]:
        session = self._session
        self._usable()
        permit = await self._permitted(session)
        while True:
            answers = await super()._ask(calls)
            self._must_be_in(session)
            if permit.ticket == self._permit.ticket and now() < self._permit.until:
                return answers
            before, permit = permit, await self._permitted(session)
            if permit.ticket == before.ticket:
                return answers  # the ticket is valid now, so it was valid when the cells were read (F3)

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        """See `BigtableRows.apply`. Mutations below the floor are refused without being sent (T13)."""
        session = self._session
        await trio.lowlevel.checkpoint_if_cancelled()
        self._usable()
        self._must_fit(mutations)
        try:
            permit = await self._permitted(session)
        except PercoError as error:
            return [Failed(error) for _ in mutations]
        sent = [i for i, each in enumerate(mutations) if each.floor_ts is None or each.floor_ts >= permit.floor]
        verdicts: list[Verdict | None] = [Refused(0, -1)] * len(mutations)
        for index in sent:
            verdicts[index] = None
        until = min(now() + self._options.call_s, permit.until)
        attempt = Attempt(until, partial(self._must_go_on, session, permit))
        await self._apply_all(mutations, turns(mutations, sent), verdicts, attempt)
        return verdicts  # type: ignore[return-value]

    def _acknowledge(self, sent: Sequence[int], verdicts: list[Verdict | None]) -> None:
        """Do nothing: every acknowledgement counts, even if another process owns the store by now, because the records
        in the rows decide the outcome."""


async def address_of(place: Place, options: BigtableOptions) -> str:
    """The address at which the store's owner serves direct clients, or last served them; "": none.

    Raises: Unavailable.
    """
    return (await _notice(place, options)).address


async def exists(place: Place, options: BigtableOptions) -> bool:
    """Whether a process has made the store. Raises: Unavailable."""
    return (await _notice(place, options)).holder.number > 0


async def _notice(place: Place, options: BigtableOptions) -> Notice:
    asking = Repeating(place, options)
    try:
        return await asking.notice()
    finally:
        await asking.calls.aclose()
