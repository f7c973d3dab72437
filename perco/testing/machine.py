"""A memory store that outlives the databases opened on it, as a folder outlives processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import trio
import trio.testing

from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.database.making import make
from perco.database.options import Options
from perco.schema.schema import Schema
from perco.storage import LOCK, PENDING, SHARED, BatchOptions, LmdbOptions, LocalRowStore, RowStore
from perco.tablets.backend import Backend
from perco.tablets.local import LocalStore
from perco.testing.bare import BareStore
from perco.testing.faults import FaultyRowStore, use


class CrashedError(Exception):
    """The error that a process gets from its store once the process counts as dead."""


class Machine:
    """Holds a store. `opened` acts as a process that opens the store, `crashing` as a process that dies.

    Args:
        groups: whether the store writes all rows of a mutation or none (S1, `RowStore.groups`).
        bare_s: if given, the store has no optional capability (`bare.py`), and messages to it are in flight for at most
            this many seconds.
    """

    schema: Schema

    def __init__(
        self, schema: Schema, *, groups: bool = True, one_step: bool = True, bare_s: float | None = None
    ) -> None:
        self.schema, self._one_step, self._bare_s = schema, one_step, bare_s
        self._local = LocalStore(
            "memory:",
            durable=True,
            readonly=False,
            accept_loss=False,
            lmdb=LmdbOptions(),
            batch=BatchOptions(),
        )
        self._local.store.groups = groups

    @property
    def store(self) -> LocalRowStore:
        return self._local.store

    def locks(self) -> int:
        """How many locks there are in all tables, including read locks and stored pending entries (N5)."""
        groups = (LOCK, SHARED, PENDING)
        return sum(tablet.entries(group) for tablet in self.store.tablets() for group in groups)

    def _backend(self, below: RowStore | None) -> Backend:
        """The backend of a process that opens the store."""
        return self._local if self._bare_s is None else BareStore(self._local, below, late_s=self._bare_s)

    @asynccontextmanager
    async def opened(
        self,
        options: Options | None = None,
        *,
        sweeper: bool = False,
        schema: Schema | None = None,
        prepare: Callable[[Database], None] = lambda db: None,
        below: RowStore | None = None,
    ) -> AsyncIterator[Database]:
        """Open a database on the store, as after a restart. At the end, stop the database's tasks, but keep the store.

        Args:
            schema: one to use in place of the machine's.
            prepare: may change the database before it does anything.
            below: the row store that all calls go through, if the store is bare.
        """
        options = options or Options()
        if not self._one_step:
            options = replace(options, commit=replace(options.commit, one_step=False))
        db = make(self._backend(below), schema or self.schema, options)
        prepare(db)
        try:
            await inside(db).oracle.start()
            await local_owner(db).declare()
            if sweeper:
                inside(db).background.start(local_owner(db).sweeper.run, "sweeper")
            yield db
            assert not inside(db).driver.damaged, inside(db).driver.damaged
        finally:
            await inside(db).background.aclose()

    @asynccontextmanager
    async def crashing(
        self, number: int, *, made: bool, options: Options | None = None
    ) -> AsyncIterator[tuple[Database, FaultyRowStore]]:
        """Open a database whose process dies before mutation `number` (from 0) or, if `made`, before the next one."""
        async with self.opened(options) as db:
            store = FaultyRowStore(inside(db).driver.store)

            async def die(_: object) -> None:
                if len(store.log) == number + made:
                    store.dead = CrashedError()

            store.before = die
            yield db, use(db, store)

    async def swept(self) -> int:
        """Open the store with a sweeper, and wait until no lock is left. Returns how many locks the sweeper settled."""
        async with self.opened(sweeper=True) as db:
            while not local_owner(db).sweeper.clean:
                await trio.testing.wait_all_tasks_blocked()
            assert not inside(db).driver.damaged, inside(db).driver.damaged
            return local_owner(db).sweeper.settled
