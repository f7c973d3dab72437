"""A memory store that outlives the databases opened on it, as a folder outlives processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import trio
import trio.testing

from perco.notify.database import Database
from perco.storage import LOCK, PENDING, SHARED, BatchOptions, LmdbOptions, LocalRowStore
from perco.testing.faults import FaultyRowStore, use
from perco.txn.client import Options
from perco.txn.local import LocalStore
from perco.txn.schema import Schema


class CrashedError(Exception):
    """What a client meets that is to be thought of as dead."""


class Machine:
    """Holds the store; `opened` is a process that opens it, `crash` what ends one."""

    def __init__(self, schema: Schema, *, groups: bool = True, one_step: bool = True) -> None:
        self.schema, self._one_step = schema, one_step
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
        """How many locks stand, in any table, shared ones and pending entries included."""
        groups = (LOCK, SHARED, PENDING)
        return sum(tablet.entries(group) for tablet in self.store.tablets() for group in groups)

    @asynccontextmanager
    async def opened(
        self,
        options: Options | None = None,
        *,
        sweeper: bool = False,
        schema: Schema | None = None,
        prepare: Callable[[Database], None] = lambda db: None,
    ) -> AsyncIterator[Database]:
        """A database on the store, as after a restart. Ends what it runs, and leaves the store.

        `schema`: another than the machine's. `prepare` may change the database before it does anything.
        """
        options = options or Options()
        if not self._one_step:
            options = replace(options, commit=replace(options.commit, one_step=False))
        db = Database(self._local, schema or self.schema, options)
        prepare(db)
        try:
            await db.oracle.start()
            await db.declare()
            if sweeper:
                db.background.start(db.sweeper.run, "sweeper")
            yield db
            assert not db.driver.damaged, db.driver.damaged
        finally:
            await db.background.aclose()

    @asynccontextmanager
    async def crashing(
        self, number: int, *, made: bool, options: Options | None = None
    ) -> AsyncIterator[tuple[Database, FaultyRowStore]]:
        """A database whose process dies at its mutation of that number, made or not."""
        async with self.opened(options) as db:
            store = FaultyRowStore(db.driver.store)

            async def die(_: object) -> None:
                if len(store.log) == number + made:
                    store.dead = CrashedError()

            store.before = die
            yield db, use(db, store)

    async def swept(self) -> int:
        """Open it with a sweeper, and wait until no lock is left; returns how many it settled."""
        async with self.opened(sweeper=True) as db:
            while not db.sweeper.clean:
                await trio.testing.wait_all_tasks_blocked()
            assert not db.driver.damaged, db.driver.damaged
            return db.sweeper.settled
