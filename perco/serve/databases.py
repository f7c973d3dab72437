"""Stores in databases, as `perco.open` sees them: how a process becomes the owner, where the owner serves clients, and
how a client reaches the rows.

A program imports the modules for a database only if it opens a store there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeAlias

from perco.bigtable.address import Place as BigtablePlace, is_bigtable
from perco.database.options import Options
from perco.errors import TransactionClosed, Unavailable
from perco.postgresql.address import Place as PostgresqlPlace, is_postgresql
from perco.serve.direct import TicketRows
from perco.tablets.backend import Backend, Tickets

AskTicket: TypeAlias = Callable[[], Awaitable[str]]


class Doorkeeper(Tickets, Protocol):
    """The tickets for a store in a database."""

    async def run(self) -> None:
        """Run until cancelled: void the tickets of sessions that have ended."""
        ...


class Owned(Backend, Protocol):
    """A store in a database that this process owns."""

    def let_clients_in(self) -> Doorkeeper:
        """Let direct clients in, with tickets. Call it before anything is committed (C4)."""
        ...

    async def serve_at(self, address: str) -> None:
        """Publish the address at which this process serves clients. Raises: StoreLocked, Unavailable."""
        ...

    async def watch(self) -> None:
        """Raise an error once another process owns the store."""
        ...


class Remote(Protocol):
    """A store in a database.

    Attributes: `shown`, the store's address, without a password; `own`, the option `own` for its kind of database.
    """

    shown: str
    own: bool | None

    def claim(self, *, direct: bool) -> Awaitable[Owned]:
        """Become the owner. `direct`: keep the published address of the server, for clients; otherwise, clear it.

        Raises: StoreLocked, FormatUnknown, Unavailable, UsageError, StoreError."""
        ...

    async def address(self) -> str:
        """The address at which the owner serves direct clients, or last served them; "": there is none.

        Raises: Unavailable."""
        ...

    async def exists(self) -> bool:
        """Whether a process has made the store. Raises: Unavailable."""
        ...

    def rows(self, ticket: AskTicket) -> TicketRows:
        """The store's rows, for a direct client."""
        ...


class _Postgresql:
    def __init__(self, url: str, options: Options) -> None:
        self._url, self._options, self._place = url, options, PostgresqlPlace(url)
        self.shown, self.own = self._place.shown, options.postgresql.own
        self._durable = options.durability == "power"

    def claim(self, *, direct: bool) -> Awaitable[Owned]:
        from perco.postgresql.store import PostgresqlStore

        return PostgresqlStore.open(self._url, self._options.postgresql, durable=self._durable, direct=direct)

    async def address(self) -> str:
        from perco.postgresql.client import address_of

        return await address_of(self._place)

    async def exists(self) -> bool:
        from perco.postgresql.client import exists

        return await exists(self._place)

    def rows(self, ticket: AskTicket) -> TicketRows:
        from perco.postgresql.client import ClientRows

        return ClientRows(self._place, self._options.postgresql, durable=self._durable, ticket=ticket)


class _Bigtable:
    def __init__(self, url: str, options: Options) -> None:
        self._url, self._options, self._place = url, options, BigtablePlace(url)
        self.shown, self.own = self._place.shown, options.bigtable.own
        self._rows: TicketRows | None = None

    def claim(self, *, direct: bool) -> Awaitable[Owned]:
        from perco.bigtable.store import BigtableStore

        return BigtableStore.open(self._url, self._options.bigtable, direct=direct)

    async def address(self) -> str:
        from perco.bigtable.client import address_of

        if self._rows is not None:
            with suppress(TransactionClosed):  # the client could not be opened, so its rows are closed
                return await self._rows.served_at()  # over channels that are open
            self._rows = None
        return await address_of(self._place, self._options.bigtable)

    async def exists(self) -> bool:
        from perco.bigtable.client import exists

        return await exists(self._place, self._options.bigtable)

    def rows(self, ticket: AskTicket) -> TicketRows:
        from perco.bigtable.client import ClientRows

        self._rows = ClientRows(self._place, self._options.bigtable, ticket=ticket)
        return self._rows


def remote_store(url: str, options: Options) -> Remote | None:
    """The store with that address; None: it is not in a database. Raises: UsageError."""
    if is_postgresql(url):
        return _Postgresql(url, options)
    if is_bigtable(url):
        return _Bigtable(url, options)
    return None


def is_database(url: str) -> bool:
    """Whether this is the address of a store whose rows are in a database."""
    return is_postgresql(url) or is_bigtable(url)


def no_owner(store: Remote) -> Unavailable:
    """The error for a process that may only be a client, if no process serves the store."""
    return Unavailable(
        f"no process lets clients read and write {store.shown}",
        remedy="Start `perco serve URL --direct --listen ADDRESS` with this address.",
    )
