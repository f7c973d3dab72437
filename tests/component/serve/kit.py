"""A store in memory, whoever owns it, and clients of it; connections that break and clients that fall silent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import trio
import trio.testing

import perco
from perco.database.database import Database
from perco.database.inside import close, inside
from perco.rpc.channel import WireOptions
from perco.serve.client import open_served, remote_owner
from perco.serve.server import Server
from perco.testing.machine import Machine

BATCH = perco.options.BatchOptions()
WIRE = WireOptions(heartbeat_s=1.0, silence_s=3.0, lease_s=4.0, patience_s=20.0, connect_s=2.0)


class Place:
    """`served` is a process that owns the store and serves it; `client` one that asks it."""

    def __init__(
        self, schema: perco.Schema, *, wire: WireOptions = WIRE, batch: perco.options.BatchOptions = BATCH
    ) -> None:
        self.schema, self.wire, self.batch = schema, wire, batch
        self.prefetch = perco.options.PrefetchOptions()
        self.retry = perco.options.RetryOptions()
        self.transaction = perco.options.TransactionOptions()
        self.machine = Machine(schema)
        self.server: Server | None = None
        self.owner: Database | None = None
        self._streams: list[trio.abc.Stream] = []

    @asynccontextmanager
    async def served(self, *, sweeper: bool = True) -> AsyncIterator[Database]:
        """While the block lasts; afterwards another may own it."""
        async with self.machine.opened(perco.Options(wire=self.wire), sweeper=sweeper) as owner:
            server = Server(owner, self.wire)
            async with server.keeping():
                self.server, self.owner = server, owner
                try:
                    yield owner
                finally:
                    self.server = self.owner = None
                    await self.break_connections()

    async def _connect(self, number: int, port: int) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        server, owner = self.server, self.owner
        if server is None or owner is None:
            raise ConnectionRefusedError("nobody serves")
        ours, theirs = trio.testing.memory_stream_pair()
        self._streams += [ours, theirs]

        async def serve() -> None:
            await server.connection(theirs, None)

        inside(owner).background.start(serve, "connection")
        return ours

    async def break_connections(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            await trio.aclose_forcefully(stream)

    @asynccontextmanager
    async def client(self, schema: perco.Schema | None = None, seed: int | None = None) -> AsyncIterator[Database]:
        """A process that has the store open."""
        options = perco.Options(
            wire=self.wire,
            batch=self.batch,
            seed=seed,
            prefetch=self.prefetch,
            retry=self.retry,
            transaction=self.transaction,
        )
        db = await open_served("the place", self._connect, schema or self.schema, options, self.wire, b"")
        try:
            yield db
        finally:
            await close(db)

    @asynccontextmanager
    async def clients(self, count: int) -> AsyncIterator[list[Database]]:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.client(seed=seed)) for seed in range(count)]

    @asynccontextmanager
    async def client_after_owner(self) -> AsyncIterator[Database]:
        """A client whose owner is gone."""
        async with AsyncExitStack() as stack:
            async with self.served():
                db = await stack.enter_async_context(self.client())
            yield db


async def vanish(db: Database) -> None:
    """The client's process dies: nothing is said, nothing comes back."""
    with trio.CancelScope(shield=True):
        await remote_owner(db)._connections.aclose()


def quick(options: WireOptions, **more: float) -> WireOptions:
    return replace(options, **more)  # type: ignore[arg-type]
