"""A store in memory whose tablets are with tablet servers, and clients of both, all in one loop."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import trio
import trio.testing

import perco
from perco.database.database import Database
from perco.database.inside import close, inside
from perco.rpc.channel import WireOptions
from perco.serve.client import open_served
from perco.serve.opening import open as opened
from perco.serve.placing import ProcessOptions
from perco.serve.server import Server
from tests.component.serve.kit import BATCH, WIRE
from tests.support.places import local_of
from tests.support.spread import MemoryServers


class Spread:
    """Its owner, and what clients need to reach it and its tablet servers."""

    def __init__(self, owner: Database, server: Server, servers: MemoryServers, wire: WireOptions) -> None:
        self.owner, self.server, self.servers, self.wire = owner, server, servers, wire
        self._streams: list[trio.abc.Stream] = []
        self.reachable = True  # the owner is

    async def _connect(self, number: int, port: int) -> trio.abc.Stream:
        if number:
            return await self.servers.connect(number)
        await trio.lowlevel.checkpoint()
        if not self.reachable:
            raise ConnectionRefusedError("the owner is not reached")
        ours, theirs = trio.testing.memory_stream_pair()
        self._streams += [ours, theirs]

        async def serve() -> None:
            await self.server.connection(theirs, None)

        inside(self.owner).background.start(serve, "connection")
        return ours

    async def break_connections(self) -> None:
        """Those with the owner."""
        streams, self._streams = self._streams, []
        for stream in streams:
            await trio.aclose_forcefully(stream)

    @asynccontextmanager
    async def client(
        self, schema: perco.Schema, seed: int | None = None, batch: perco.options.BatchOptions = BATCH
    ) -> AsyncIterator[Database]:
        options = perco.Options(wire=self.wire, batch=batch, seed=seed)
        db = await open_served("the place", self._connect, schema, options, self.wire, b"")
        try:
            yield db
        finally:
            await close(db)

    @asynccontextmanager
    async def clients(self, schema: perco.Schema, count: int) -> AsyncIterator[list[Database]]:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.client(schema, seed)) for seed in range(count)]


class _Opened(opened):
    def _servers(self) -> MemoryServers:
        assert self.processes is not None
        servers = MemoryServers(self.processes, self._options.wire)
        servers.slow = True
        return servers


@asynccontextmanager
async def spread(servers: int, *, wire: WireOptions = WIRE) -> AsyncIterator[Spread]:
    """While the block lasts."""
    opening = _Opened("memory:", perco.Schema(), options=perco.Options(wire=wire, shared=False))
    opening.processes = ProcessOptions(servers=servers)
    async with opening as owner:
        assert isinstance(opening.tablet_servers, MemoryServers)
        server = Server(owner, wire, opening.tablet_servers)
        async with server.keeping():
            await opening.tablet_servers.ready.wait()
            place = Spread(owner, server, opening.tablet_servers, wire)
            try:
                yield place
            finally:
                place.reachable = False
                await place.break_connections()
            assert not place.servers.open_twice


class Chaos:
    """What befalls them, from a seed; counts what it did."""

    def __init__(self, place: Spread, rng: random.Random) -> None:
        self._place, self._rng = place, rng
        self.done: dict[str, int] = {"kill": 0, "move": 0, "break": 0, "vacuum": 0, "split": 0}
        self.failed_splits = 0
        self._splitting: str | None = None

    async def run(self) -> None:
        """Until cancelled."""
        acts = {"kill": self._kill, "move": self._move, "break": self._break, "vacuum": self._vacuum}
        acts["split"] = self._split
        while True:
            for name in self._rng.sample(list(acts), len(acts)):
                await trio.sleep(self._rng.uniform(0.0, 0.4))
                self.done[name] += bool(await acts[name]())

    async def _kill(self) -> bool:
        servers = self._place.servers
        alive = sorted(number for number in servers.here if servers.streams[number])
        if not alive:
            return False
        await servers.kill(self._rng.choice(alive))
        return True

    async def _move(self) -> bool:
        servers = self._place.servers
        open = [server for server in servers.all.values() if server.open]
        tablets = [tablet for tablet in servers.tablets if tablet.placed.is_set() and not tablet.is_splitting]
        ways = [(tablet, to) for tablet in tablets for to in open if tablet.server is not to]
        if not ways:
            return False
        tablet, to = self._rng.choice(ways)
        with trio.CancelScope(shield=True):
            await servers.move(tablet, to)
        return True

    async def _split(self) -> bool:
        """Begun, while all else happens; counted when it is done."""
        owner = self._place.owner
        [table] = inside(owner).catalogue.tables
        row = perco.INT64.encode(self._rng.choice((-3, -2, -1, 1, 3, 5, 7, 9, 11)))
        if self._splitting is not None or row in local_of(owner).store.bounds(table):
            return False
        self._splitting = table

        async def split() -> None:
            try:
                await owner.split(table, row)
                self.done["split"] += 1
            except (perco.Unavailable, perco.UsageError):
                self.failed_splits += 1
            finally:
                self._splitting = None

        inside(owner).background.spawn(split)
        return False

    async def _break(self) -> bool:
        await self._place.break_connections()
        return True

    async def _vacuum(self) -> bool:
        with trio.CancelScope(shield=True):
            await self._place.owner.vacuum()
        return True
