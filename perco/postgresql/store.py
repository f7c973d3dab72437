"""Opens a store on PostgreSQL: its tables, and the claim by which this process owns it.

One process owns the store. It draws the timestamps, and it alone writes; its transactions commit as those over a folder
do. Others reach the store through it, at an address that it serves.
"""

from __future__ import annotations

import os
import secrets
import warnings
import weakref
from pathlib import Path
from typing import Final

import trio

from perco.errors import FormatUnknown, PercoWarning, StoreError, TransactionClosed, Unavailable, UsedAfterFork
from perco.postgresql.address import Place
from perco.postgresql.arrays import int8, number, texts
from perco.postgresql.connection import Connection, Lost, Refusal
from perco.postgresql.lease import Lease, command, locked, now
from perco.postgresql.options import PostgresqlOptions
from perco.postgresql.rows import Fence, PostgresqlRows
from perco.postgresql.statements import FORMAT
from perco.schema.catalogue import SYSTEM_TABLE, Catalogue
from perco.storage import PROTOCOL_GROUPS, Mutation
from perco.storage.bare import Bare

_CLOSED: Final = "the store that this belongs to has been closed"
_LOOKS: Final = 10  # at the owner's row, while its lease may hold
_PRIVILEGE: Final = "42501"


class _Counted(Bare):
    """`Bare` over a store that counts cells by itself, in one statement."""

    _store: PostgresqlRows

    async def raise_floor(self, ts: int, *, wait: bool) -> None:
        """See `OwnerStore.raise_floor`."""
        await super().raise_floor(ts, wait=wait)
        if wait:
            await self._store.settle()

    async def _cells(self, table: str, group: str) -> int:
        await self._store.settle()
        return await self._store.count(table, group)


_stores: weakref.WeakSet[PostgresqlStore] = weakref.WeakSet()


def _after_fork() -> None:
    """Mark the parent's stores: their connections are the parent's, and so is the lease."""
    for store in list(_stores):
        store.forked = True


os.register_at_fork(after_in_child=_after_fork)


class PostgresqlStore:
    """The rows of a store that this process owns. Made by `open`; loop thread only."""

    store: Bare
    forked: bool
    _rows = PostgresqlRows

    path: Path | None = None
    readonly = False
    threaded = False
    remote = True
    owner_alive = False
    term = b""
    local = None

    def __init__(self, rows: PostgresqlRows, options: PostgresqlOptions) -> None:
        self.rows, self._options = rows, options
        rows.renew, rows.usable, rows.check = self._renew, self._usable, self.check
        self.store = _Counted(rows, rows.tables, 0.0)
        self._token = secrets.token_hex(8)
        self._lease: Lease | None = None
        self._closed = False
        self._renewing = trio.Lock()
        self.forked = False
        _stores.add(self)

    @classmethod
    async def open(cls, url: str, options: PostgresqlOptions, *, durable: bool) -> PostgresqlStore:
        """Claim the store, which is made if there is none.

        Raises: StoreLocked, if another process owns it; FormatUnknown, Unavailable, UsageError, StoreError.
        """
        place = Place(url)
        store = cls(cls._rows(place, options, durable=durable, fence=Fence(place.prefix)), options)
        try:
            async with store.rows.pool.connection() as connection:
                await store._make(connection)
                if durable and await connection.run([(store.rows.statements.syncs, [])]) != [[(b"\x01",)]]:
                    warnings.warn(
                        f"{place.shown} runs with fsync=off: it loses acknowledged commits when its machine stops. If "
                        'that is intended, pass perco.Options(durability="process")',
                        PercoWarning,
                        stacklevel=6,
                    )
                await store._claim(connection)
                await store._add(connection, [(SYSTEM_TABLE, group) for group in PROTOCOL_GROUPS])
        except Lost as lost:
            await store.aclose()
            raise Unavailable(f"{place.shown} cannot be reached: {lost.said}") from lost
        except Refusal as refusal:
            await store.aclose()
            raise store.rows.told(refusal) from refusal
        except BaseException:
            with trio.CancelScope(shield=True):
                await store.aclose()
            raise
        return store

    # ------------------------------------------------------------ opening

    async def _make(self, connection: Connection) -> None:
        """Make the tables, if they are not there. Raises: FormatUnknown, StoreError."""
        statements, shown = self.rows.statements, self.rows.pool.place.shown
        [there] = await connection.run([(statements.there, [])])
        if there == [(b"\x00",)]:
            try:
                await connection.execute(statements.tables())
            except Refusal as refusal:
                if refusal.sqlstate == _PRIVILEGE:
                    raise StoreError(
                        f"{shown}: its tables cannot be made: {refusal.said}. Have them made once by a role that may: "
                        "open the store as that role."
                    ) from refusal
                [there] = await connection.run([(statements.there, [])])
                if there == [(b"\x00",)]:  # else another process has made them meanwhile
                    raise
        found, _, _, _ = await self._owner(connection)
        if found != FORMAT:
            raise FormatUnknown(shown, f"format {found}", f"format {FORMAT}")

    async def _owner(self, connection: Connection) -> tuple[int, str, int, str]:
        """The format; the owner's token, its renewals, and its command."""
        [[(found, token, renewals, told)]] = await connection.run([(self.rows.statements.look, [])])
        return number(found), token.decode(), number(renewals), told.decode()

    async def _claim(self, connection: Connection) -> None:
        """Become the owner, once the last one has not renewed its lease for its whole length (O1).

        Raises: StoreLocked, if it does.
        """
        lease_s = self._options.lease_s
        _, token, renewals, told = await self._owner(connection)
        seen = now()
        while True:
            if not token or now() - seen >= lease_s:
                before = now()
                _, claimed = await connection.run(
                    [
                        (self.rows.statements.wait_for_others, [self.rows.fence.lock]),
                        (
                            self.rows.statements.claim,
                            [self._token.encode(), command().encode(), token.encode(), int8(renewals)],
                        ),
                    ]
                )
                if claimed:
                    self.rows.fence.term = number(claimed[0][0])
                    self._lease = Lease(self.rows.pool.place, self._token, lease_s, before)
                    self._lease.start()
                    return
            await trio.sleep(lease_s / _LOOKS)
            _, holder, renewed, told = await self._owner(connection)
            if (holder, renewed) != (token, renewals):
                if holder:
                    raise locked(self.rows.pool.place, told)
                token, renewals, seen = holder, renewed, now()

    async def _renew(self) -> None:
        """Begin a new term: when this returns, nothing that was sent under an earlier one can take effect (O1)."""
        fence = self.rows.fence
        async with self._renewing:
            if fence.term or fence.deposed is not None:
                return  # another task has begun it while we waited
            async with self.rows.pool.connection() as connection:
                try:
                    _, found = await connection.run(
                        [
                            (self.rows.statements.wait_for_others, [self.rows.fence.lock]),
                            (self.rows.statements.next_term, [self._token.encode()]),
                        ]
                    )
                except Refusal as refusal:
                    raise self.rows.told(refusal) from refusal
            if found:
                fence.term = number(found[0][0])
            else:
                _, _, _, told = await self._look()
                fence.deposed = locked(self.rows.pool.place, told)

    async def _look(self) -> tuple[int, str, int, str]:
        async with self.rows.pool.connection() as connection:
            return await self._owner(connection)

    # ------------------------------------------------------------ tables and groups

    async def adapt(self, catalogue: Catalogue) -> None:
        """Give numbers to the tables and groups that a catalogue names. Raises: Unavailable."""
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
        """Raises UsedAfterFork, TransactionClosed; StoreLocked, if another process owns the store; Unavailable, if this
        process cannot be sure that it still does (O1)."""
        self._usable()
        if self.rows.fence.deposed is not None:
            raise self.rows.fence.deposed
        lease = self._lease
        if lease is not None and lease.deposed is not None:
            self.rows.fence.deposed = lease.deposed
            raise lease.deposed
        if lease is not None and now() > lease.until:
            raise Unavailable(
                f"{self.rows.pool.place.shown} has not renewed this process's lease for {self._options.lease_s:g} s"
                + (f": {lease.said}" if lease.said else "")
            )

    def _usable(self) -> None:
        if self.forked:
            raise UsedAfterFork(self.rows.pool.place.shown)
        if self._closed:
            raise TransactionClosed(_CLOSED)

    def write_from_thread(self, mutation: Mutation) -> None:
        raise NotImplementedError("there is no thread that writes")

    def clear_dead_readers(self) -> None:
        """Do nothing: a reader that dies holds nothing."""

    def expire(self, after_s: float) -> None:
        """Do nothing: each call has a limit of its own."""

    async def aclose(self) -> None:
        if self._lease is not None and not self.forked:
            await trio.to_thread.run_sync(self._lease.end)
        self._closed = True
        self.rows.pool.close()
