"""A memory store that outlives the databases opened on it, as a folder outlives processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import trio.testing

import perco
from perco.storage import LOCK, LocalRowStore
from perco.txn.local import LocalStore
from tests.support.faults import FaultyRowStore, use
from tests.support.rows import Rows


class CrashedError(Exception):
    """What a client meets that is to be thought of as dead."""


class Machine:
    """Holds the store; `opened` is a process that opens it, `crash` what ends one."""

    def __init__(self, schema: perco.Schema, *, groups: bool = True) -> None:
        self.schema = schema
        self._local = LocalStore(
            "memory:",
            durable=True,
            readonly=False,
            accept_loss=False,
            lmdb=perco.LmdbOptions(),
            batch=perco.BatchOptions(),
        )
        self._local.store.groups = groups  # type: ignore[misc]

    @property
    def store(self) -> LocalRowStore:
        return self._local.store

    @property
    def rows(self) -> Rows:
        return Rows(self.store)

    def locks(self) -> int:
        """How many locks stand, in any table."""
        return sum(tablet.entries(LOCK) for tablet in self.store.tablets())

    @asynccontextmanager
    async def opened(
        self, options: perco.Options | None = None, *, sweeper: bool = False
    ) -> AsyncIterator[perco.Database]:
        """A database on the store, as after a restart. Ends what it runs, and leaves the store."""
        db = perco.Database(self._local, self.schema, options or perco.Options())
        await db.oracle.start()
        await db.declare()
        if sweeper:
            db.background.start(db.sweeper.run, "sweeper")
        try:
            yield db
        finally:
            await db.background.aclose()

    @asynccontextmanager
    async def crashing(
        self, number: int, *, made: bool, options: perco.Options | None = None
    ) -> AsyncIterator[tuple[perco.Database, FaultyRowStore]]:
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
            return db.sweeper.settled
