"""Opens a store on PostgreSQL: makes its tables if there are none, and claims the store, so that this process owns it.

One process owns the store, and draws the timestamps. Without direct clients, only the owner writes, and its
transactions commit in the same way as in a store in a folder; other processes reach the store through the owner, at an
address that it serves. Direct clients read and write the rows themselves, with tickets from the owner.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Collection, Sequence
from itertools import product
from typing import Final

import trio

from perco.errors import Corruption, PercoWarning, Unavailable
from perco.postgresql.address import Place
from perco.postgresql.admin import make_tables
from perco.postgresql.arrays import int8, number, texts
from perco.postgresql.connection import Connection, Lost, Refusal, Rows, Statement
from perco.postgresql.fence import Fence
from perco.postgresql.lease import PostgresqlLease
from perco.postgresql.options import PostgresqlOptions
from perco.postgresql.rows import PostgresqlRows
from perco.postgresql.tickets import Tickets, alone
from perco.schema.catalogue import SYSTEM_TABLE, Catalogue
from perco.storage import PROTOCOL_GROUPS
from perco.storage.bare import Bare
from perco.storage.lease import LeasedStore, command, locked, now

_FLAG: Final = (b"\x00", b"\x01")
_LOOKS: Final = 10  # how often to look at the owner's row within the length of a lease


class Counted(Bare):
    """`Bare` over a store that counts its cells in one statement. `tickets`: the tickets of direct clients, which also
    write; None: there are no direct clients."""

    _store: PostgresqlRows
    tickets: Tickets | None = None

    async def raise_floor(self, ts: int, *, wait: bool) -> None:
        """See `OwnerStore.raise_floor`."""
        # The clients' floor comes first: below its own floor, this process rolls back without a marker, so clients must
        # not be able to prewrite there (T13).
        if self.tickets is not None:
            await self.tickets.raise_floor(ts, wait=wait)
        await super().raise_floor(ts, wait=wait)
        if wait:
            await self._store.settle()

    async def look(self, tables: Collection[str], groups: Sequence[str], *, again: bool = False) -> None:
        """See `OwnerStore.look`. This process does not notice the writes of direct clients, so every look counts all
        cells again, as of one moment (N7)."""
        if self.tickets is None:
            await super().look(tables, groups, again=again)
            return
        wanted = list(product(tables, groups))
        async with self._looking:  # one look at a time, so that no look overwrites the counts of a later one
            before = {where: -1 if self._may_change(where) else self._sends[where] for where in wanted}
            await self._store.settle()
            for where, count in (await self._store.counts(wanted)).items():
                self._found[where] = before[where], count

    async def _cells(self, table: str, group: str) -> int:
        await self._store.settle()
        return (await self._store.counts([(table, group)]))[table, group]


class PostgresqlStore(LeasedStore):
    """The rows of a store that this process owns. Made by `open`; loop thread only."""

    store: Counted
    rows: PostgresqlRows
    _rows = PostgresqlRows

    def __init__(self, rows: PostgresqlRows, options: PostgresqlOptions, *, durable: bool) -> None:
        super().__init__(rows.pool.place.shown, options.lease_s)
        self.rows, self._options, self._durable = rows, options, durable
        rows.renew, rows.usable, rows.check = self._renew, self._usable, self.check
        self.store = Counted(rows, rows.tables, 0.0)
        self._tickets = Tickets(rows)
        self._token = rows.fence.token
        self._renewing = trio.Lock()

    @classmethod
    async def open(
        cls, url: str, options: PostgresqlOptions, *, durable: bool, direct: bool = False
    ) -> PostgresqlStore:
        """Make the store if there is none, and claim it. `direct`: keep the published address, at which clients find
        the server; otherwise clear it.

        Raises: StoreLocked, if another process owns it; FormatUnknown, Unavailable, UsageError, StoreError.
        """
        place = Place(url)
        fence = Fence(place.prefix, secrets.token_hex(8))
        store = cls(cls._rows(place, options, durable=durable, fence=fence), options, durable=durable)
        try:
            async with store.rows.pool.connection() as connection:
                await make_tables(connection, place)
                if durable and await connection.run([(store.rows.statements.syncs, [])]) != [[(b"\x01",)]]:
                    warnings.warn(
                        f"{place.shown} runs with fsync=off: it loses acknowledged commits when its machine stops. If "
                        'that is intended, pass perco.Options(durability="process")',
                        PercoWarning,
                        stacklevel=6,
                    )
                await store._claim(connection, direct=direct)
                await store._add(connection, [(SYSTEM_TABLE, group) for group in PROTOCOL_GROUPS])
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await store.aclose()
            if isinstance(error, Lost):
                raise Unavailable(f"{place.shown} cannot be reached: {error.said}") from error
            if isinstance(error, Refusal):
                raise store.rows.told(error) from error
            raise
        return store

    # ------------------------------------------------------------ opening

    async def _owner(self, connection: Connection) -> tuple[str, int, str]:
        """The owner's token, the number of its renewals, and its command. Raises: Corruption."""
        [row] = await connection.run([(self.rows.statements.look, [])])
        if not row:
            raise Corruption(self.rows.pool.place.shown, f"{self.rows.statements.prefix}_owner has lost its row")
        [(token, renewals, told)] = row
        return token.decode(), number(renewals), told.decode()

    async def _claim(self, connection: Connection, *, direct: bool) -> None:
        """Become the owner as soon as the last owner has not renewed its lease for the whole length of the lease (O1).

        Raises: StoreLocked, if the last owner renews its lease; Unavailable.
        """
        lease_s, statements = self._options.lease_s, self.rows.statements
        holder, renewals, told = await self._owner(connection)
        seen = now()
        while True:
            if not holder or now() - seen >= lease_s:
                before = now()
                claimed = await self._alone(
                    connection,
                    statements.claim,
                    [self._token.encode(), command().encode(), holder.encode(), int8(renewals), _FLAG[direct]],
                )
                if claimed:
                    self.rows.fence.term = number(claimed[0][0])
                    self._lease = PostgresqlLease(self.rows.pool.place, self._token, lease_s, before)
                    self._lease.start()
                    await self._tickets.clear(connection)
                    return
            await trio.sleep(lease_s / _LOOKS)
            now_holder, renewed, told = await self._owner(connection)
            if now_holder and now_holder == holder and renewed != renewals:
                raise locked(self.rows.pool.place.shown, told)
            if now_holder != holder:  # another process has claimed the store, and perhaps died since
                holder, renewals, seen = now_holder, renewed, now()

    async def _alone(self, connection: Connection, statement: Statement, parameters: list[bytes]) -> Rows:
        return await alone(self.rows, connection, self.rows.fence.lock, statement, parameters)

    async def _renew(self) -> None:
        """Begin a new term. When this returns, nothing that was sent under an earlier term can take effect (O1)."""
        fence = self.rows.fence
        async with self._renewing:
            if fence.term or fence.deposed is not None:
                return  # another task has begun it meanwhile
            connection = await Connection.open(self.rows.pool.place)  # the pool's connections may be busy
            try:
                found = await self._alone(connection, self.rows.statements.next_term, [self._token.encode()])
                if found:
                    fence.term = number(found[0][0])
                    return
                _, _, told = await self._owner(connection)
                fence.deposed = locked(self.rows.pool.place.shown, told)
            except Refusal as refusal:
                raise self.rows.told(refusal) from refusal
            finally:
                connection.close()

    def let_clients_in(self) -> Tickets:
        """Admit direct clients, with tickets, from now on. Call this before anything is committed, because direct
        clients do not see the entries in this process's memory (C4)."""
        self.store.tickets = self._tickets
        return self._tickets

    async def serve_at(self, address: str) -> None:
        """Publish the address at which this owner serves clients. Raises: StoreLocked, Unavailable."""
        try:
            async with self.rows.pool.connection() as connection:
                parameters = [address.encode(), self._token.encode()]
                statements = self.rows.statements
                *_, found = await connection.run([(statements.durably, []), (statements.serve_at, parameters)])
        except Lost as lost:
            raise Unavailable(f"{self.rows.pool.place.shown} cannot be reached: {lost.said}") from lost
        except Refusal as refusal:
            raise self.rows.told(refusal) from refusal
        if not found:
            raise locked(self.rows.pool.place.shown, "")

    # ------------------------------------------------------------ tables and groups

    async def adapt(self, catalogue: Catalogue) -> None:
        """Assign numbers to the tables and groups that a catalogue names. Raises: Unavailable."""
        wanted = [(name, group) for name in catalogue.tables for group in (*PROTOCOL_GROUPS, *catalogue.groups(name))]
        if all(self.rows.has(table, group) for table, group in wanted):
            return
        try:
            async with self.rows.pool.connection() as connection:
                await self._add(connection, wanted)
        except Lost as lost:
            raise Unavailable(f"{self.rows.pool.place.shown} cannot be reached: {lost.said}") from lost
        except Refusal as refusal:
            raise self.rows.told(refusal) from refusal

    async def _add(self, connection: Connection, wanted: list[tuple[str, str]]) -> None:
        statements = self.rows.statements
        tables, groups = zip(*wanted, strict=True)
        await connection.run([(statements.add_groups, [texts(tables), texts(groups)])])
        [found] = await connection.run([(statements.groups, [])])
        spaces = {(table.decode(), group.decode()): number(space) for space, table, group in found}
        self.rows.add({key: spaces[key] for key in wanted})

    # ------------------------------------------------------------ the owner's calls

    def check(self) -> None:
        """See `LeasedStore.check`."""
        self._usable()
        if self.rows.fence.deposed is None and self._lease is not None:
            self.rows.fence.deposed = self._lease.deposed
        if self.rows.fence.deposed is not None:
            raise self.rows.fence.deposed
        super().check()

    def where(self) -> tuple[str, str]:
        """The address, without a password; and the mark of its durability (S2)."""
        return self.rows.pool.place.shown, "" if self._durable else "since this boot"

    async def aclose(self) -> None:
        self._closed = True
        if self.forked:
            return  # the connections and the lease are the parent's
        if self._lease is not None:
            await trio.to_thread.run_sync(self._lease.end)
        self.rows.close()
