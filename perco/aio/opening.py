"""`perco.aio.open`: a store on a trio run that is the guest of the caller's loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator

import trio

from perco.aio.database import Database
from perco.aio.guest import Guests, Host, closed, must_be_on
from perco.blocks import AsyncOnly
from perco.database.inside import inside
from perco.database.options import Options
from perco.errors import UsageError
from perco.schema.schema import Schema
from perco.serve import opening as engine


class open(AsyncOnly):
    """Open a store for asyncio: `async with perco.aio.open("folder/", schema) as db:`. Arguments and errors are
    those of `perco.open`.

    When the block ends, calls of other tasks that still wait raise TransactionClosed, except commits that have been
    sent. A store that is left open is closed at the end of `asyncio.run`. If the loop is closed in another way, the
    store is closed by the next `perco.aio.open` in the loop's thread, or when the program ends.
    """

    _write = "async with perco.aio.open(...) as db:"

    def __init__(
        self,
        url: str | os.PathLike[str],
        schema: Schema | None = None,
        *,
        options: Options | None = None,
        readonly: bool = False,
        create: bool = True,
        accept_loss: bool = False,
        token: str | None = None,
    ) -> None:
        self._open = engine.open(
            url, schema, options=options, readonly=readonly, create=create, accept_loss=accept_loss, token=token
        )
        self._url = url
        self._host: Host | None = None
        self._db: Database | None = None
        self._error: BaseException | None = None
        self._stop = trio.Event()
        self._open_until: AsyncGenerator[None, None] | None = None

    async def __aenter__(self) -> Database:
        loop = must_be_on(None)
        if self._host is not None:
            raise UsageError("a store's block can be entered only once; call perco.aio.open(...) again")
        host = self._host = await Host.of(loop)
        host.stores[self] = self._stop
        self._ready: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        trio.lowlevel.spawn_system_task(self._main, host, name="perco-aio")
        self._open_until = self._until_closed()
        try:
            await anext(self._open_until)  # asyncio.run closes asynchronous generators that are left open
            await self._ready
        except BaseException:
            await self._open_until.aclose()
            raise
        if self._db is None:
            await self._open_until.aclose()
            assert self._error is not None
            raise self._error
        return self._db

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._open_until is not None
        await self._open_until.aclose()
        if error is None and self._error is not None:
            raise self._error

    async def _until_closed(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self._close()

    async def _close(self) -> None:
        """Close the store. A first cancellation is raised when the store has been closed, a second one at once."""
        assert self._host is not None
        self._stop.set()
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            await asyncio.shield(self._ended)
            raise
        finally:
            await self._host.leave(self)

    # ------------------------------------------------------------ the guest run

    async def _main(self, host: Host) -> None:
        try:
            async with self._open as db:
                portal = Guests(str(os.fspath(self._url)), host.loop, inside(db).engine)
                portal.lead()
                self._db = Database(portal, db)
                _tell(self._ready)
                try:
                    await self._stop.wait()
                finally:
                    await portal.aclose(lambda: inside(db).background.failure() or closed())
        except Exception as error:
            self._error = error
        finally:
            _tell(self._ready)
            _tell(self._ended)


def _tell(future: asyncio.Future[None]) -> None:
    if not future.done() and not future.get_loop().is_closed():
        future.set_result(None)
