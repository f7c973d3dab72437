"""The store of `perco ui`, opened for reading. A process can open a folder only once, so all requests share it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

import perco
from perco.database.inside import inside
from perco.errors import PercoError, Unavailable
from perco.schema import catalogue as catalogues
from perco.schema.catalogue import schema_of

_GRACE_S: Final = 1.0  # how long requests that read may go on when the store has to be closed


class Shelf:
    """Opens a store when the first request needs it. Closes it when its catalogue has changed, to open it again, and
    while an action has the store open to write. Loop thread only."""

    def __init__(self, store: str) -> None:
        self.store = store
        self._db: perco.Database | None = None
        self._failed: PercoError | None = None  # why the store could not be opened, or why it was closed
        self._readers: set[trio.CancelScope] = set()
        self._gate = trio.Lock()  # held while the store is opened or closed, and during an action
        self._wanted, self._unwanted, self._changed = trio.Event(), trio.Event(), trio.Event()

    async def run(self) -> None:
        """Hold the store open, from when it is wanted until it is unwanted, again and again. It runs in one task,
        because the block that opens a store has to end in the task in which it began."""
        while True:
            await self._wanted.wait()
            self._wanted, self._unwanted, self._failed = trio.Event(), trio.Event(), None
            try:
                async with perco.open(self.store, readonly=True) as db:
                    self._db = db
                    self._tell()
                    await self._unwanted.wait()
                    self._db = None
            except PercoError as error:
                self._failed = error
            finally:
                self._db = None
                self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[perco.Database]:
        """The store, with its newest catalogue. Raises: as `perco.open`; Unavailable, if an action needed the store
        meanwhile."""
        async with self._gate:
            db = await self._open()
            version = (await catalogues.load(inside(db).driver.store)).version
            if version != inside(db).catalogue.version:
                await self._close()
                db = await self._open()
            scope = trio.CancelScope()
            self._readers.add(scope)
        try:
            with scope:
                yield db
        finally:
            self._readers.discard(scope)
            self._tell()
        if scope.cancelled_caught:
            raise Unavailable("the store was closed for an action of this page, or because its schema has changed")

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[perco.Database]:
        """The store, opened to write: as a client of its owner or, if it has none, as its owner. Raises: as
        `perco.open`."""
        async with self._gate:
            db = await self._open()
            schema = schema_of(await catalogues.load(inside(db).driver.store))
            await self._close()
            options = perco.Options(vacuum=perco.options.VacuumOptions(on=False))
            async with perco.open(self.store, schema, options=options) as db:
                yield db

    async def _open(self) -> perco.Database:
        while self._db is None:
            changed, self._failed = self._changed, None
            self._wanted.set()
            await changed.wait()
            if self._failed is not None:
                raise self._failed
        return self._db

    async def _close(self) -> None:
        """Close the store. Requests that read it for long are cancelled."""
        with trio.move_on_after(_GRACE_S):
            while self._readers:
                await self._changed.wait()
        for scope in self._readers:
            scope.cancel()
        while self._readers:
            await self._changed.wait()
        self._unwanted.set()
        while self._db is not None:
            await self._changed.wait()
