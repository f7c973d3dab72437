"""A client's session with the owner of a database, for tests of the client's rows alone."""

from __future__ import annotations

from perco.errors import SessionEnded
from perco.tablets.backend import Tickets


class Session:
    """Gives the client a ticket when asked."""

    def __init__(self, tickets: Tickets, ticket: str) -> None:
        self.tickets, self.ticket, self.asked, self.ended = tickets, ticket, 0, False

    async def ask(self) -> str:
        self.asked += 1
        if self.ended:
            raise SessionEnded("the owner has ended it")
        await self.tickets.admit(self.ticket)
        return self.ticket

    def end(self) -> None:
        """The owner ends it. The client does not know."""
        self.tickets.end(self.ticket)
        self.ended = True
