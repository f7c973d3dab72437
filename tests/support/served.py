"""`perco.open` as a client sees it: the store's owner and a client of it in one process, over a stream in memory.

What runs over the embedded store runs over the wire, too: fixtures put `ServedOpen` in the place of `perco.open`.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

import trio
import trio.testing

import perco
from perco.notify.database import Database
from perco.rpc.channel import WireOptions
from perco.serve.database import open_served
from perco.serve.opening import open as opened
from perco.serve.processes import ProcessOptions, TabletServers
from perco.serve.server import Server
from tests.support.spread import MemoryServers


class _Spread(opened):
    """Its tablets are with tablet servers."""

    def _servers(self) -> TabletServers:
        assert self.processes is not None
        return MemoryServers(self.processes, self._options.wire)


class ServedOpen:
    """As `perco.open` of a folder or of memory. `servers`: tablet servers that have its tablets."""

    servers = 0

    def __init__(self, url: str | os.PathLike[str], schema: perco.Schema | None = None, **more: Any) -> None:
        self._arguments = url, schema, more
        self._direct = bool(more.get("readonly")) or schema is None
        self._inner = opened(url, schema, **more)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Database:
        url, schema, more = self._arguments
        if self._direct:
            return await self._inner.__aenter__()
        assert schema is not None
        options = more.get("options") or perco.Options()
        # The owner knows the schema's tables from the client alone.
        opening = (_Spread if self.servers else opened)(
            url, perco.Schema(), **{**more, "options": replace(options, shared=False, on_event=None)}
        )
        if self.servers:
            opening.processes = ProcessOptions(servers=self.servers)
        owner = await self._stack.enter_async_context(opening)
        server = Server(owner, options.wire, opening.tablet_servers)
        await self._stack.enter_async_context(server.keeping())

        async def connect(number: int, port: int) -> trio.abc.Stream:
            if number:
                assert isinstance(opening.tablet_servers, MemoryServers)
                return await opening.tablet_servers.connect(number)
            ours, theirs = trio.testing.memory_stream_pair()

            async def serve() -> None:
                await server.connection(theirs, None)

            owner.background.start(serve, "connection")
            await trio.lowlevel.checkpoint()
            return ours

        self._db = await open_served("memory", connect, schema, options, options.wire, b"")
        self._db.owner, self._db.servers = owner, opening.tablet_servers  # type: ignore[attr-defined]
        return self._db

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        if self._direct:
            return await self._inner.__aexit__(kind, error, trace)
        with trio.CancelScope(shield=True):
            await self._db.aclose()
        await self._stack.__aexit__(None, None, None)
        failure = self._db.background.failure()
        if failure is not None and error is None:
            raise failure
        return None


class SpreadOpen(ServedOpen):
    """Over two tablet servers."""

    servers = 2


__all__ = ["ServedOpen", "SpreadOpen", "WireOptions"]
