"""`perco.sync.open`: a store on a loop in a thread of its own."""

from __future__ import annotations

import atexit
import os
import threading

import trio

from perco.blocks import BlockingOnly
from perco.database.inside import inside
from perco.database.options import Options
from perco.errors import UsageError
from perco.schema.schema import Schema
from perco.serve import opening as engine
from perco.sync.database import Database
from perco.sync.threads import Threads, closed


class open(BlockingOnly):
    """Open a store for blocking code: `with perco.sync.open("folder/", schema) as db:`. Arguments and errors are
    those of `perco.open`.

    The store runs in a thread of its own. When the block ends, calls of other threads that still wait raise
    TransactionClosed, except commits that have been sent. A store that is left open is closed when the
    program ends.
    """

    _write = "with perco.sync.open(...) as db:`, or in asynchronous code `async with perco.aio.open(...) as db:"

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
        self._ready = threading.Event()
        self._db: Database | None = None
        self._portal: Threads | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._stop: trio.Event | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Database:
        if self._thread is not None:
            raise UsageError("a store's block can be entered only once; call perco.sync.open(...) again")
        self._thread = threading.Thread(target=self._run, name="perco-loop", daemon=True)
        try:
            self._thread.start()
            self._ready.wait()
        except BaseException:
            self._close()
            raise
        if self._db is None:
            self._thread.join()
            assert self._error is not None
            raise self._error
        atexit.register(self._close)
        return self._db

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close()
        atexit.unregister(self._close)
        if error is None and self._error is not None:
            raise self._error

    def _close(self) -> None:
        """End the loop, and wait for its end. A first KeyboardInterrupt is raised after that, a second one at once."""
        thread = self._thread
        if thread is None or thread.ident is None or (self._portal is not None and self._portal.forked):
            return
        self._ready.wait()  # also set if the loop has failed to open the store
        try:
            if self._token is not None:
                self._token.run_sync_soon(self._end)
        except trio.RunFinishedError:
            pass
        try:
            thread.join()
        except KeyboardInterrupt:
            thread.join()
            raise

    # ------------------------------------------------------------ the loop's thread

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            self._error = error
        finally:
            if self._portal is not None:  # however the loop has ended, no caller may go on waiting for it
                self._portal.closed = self._portal.closed or closed
                self._portal.waking.end()
                self._portal.refuse()
            self._ready.set()

    async def _main(self) -> None:
        self._stop = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        async with self._open as db:
            portal = self._portal = Threads(str(os.fspath(self._url)))
            portal.lead()
            self._db = Database(portal, db)
            self._ready.set()
            try:
                await self._stop.wait()
            finally:
                await portal.aclose(lambda: inside(db).background.failure() or closed())

    def _end(self) -> None:
        assert self._stop is not None
        self._stop.set()
