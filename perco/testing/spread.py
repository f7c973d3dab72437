"""Tablet servers of a simulated store: processes that the product starts, obeys and kills, over the simulation's disk.

`TabletServers` is the product's: it starts a server's process again when that ends, and kills one that is not heard of.
Here a process is one of the simulation's, and the socket between the two a connection of its network.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import trio
import trio.lowlevel

from perco.rpc.addresses import Address
from perco.rpc.channel import WireOptions
from perco.serve.children import Child
from perco.serve.processes import ProcessOptions, TabletServers
from perco.serve.tablets import TabletServer, serve
from perco.storage import BatchOptions, LmdbOptions, Mutation, Tablet
from perco.storage.call import Call
from perco.storage.tablet import Resubmit
from perco.testing.disk import Befalls, Disk, DiskTablet, MemoryEnvironment
from perco.testing.network import Network
from perco.testing.processes import Process, Processes
from perco.txn.background import Background

ADDRESS: Final = Address(None, "localhost", 100)  # of the owner
_TIMEOUT_S: Final = 5.0


def name_at(port: int) -> str:
    """Of whoever serves at a port."""
    return f"tablets at {port}"


class World(Befalls, Protocol):
    """What the simulation is to them."""

    disk: Disk
    network: Network
    kernel: Processes

    def another(self, name: str) -> Any:
        """A process of that name, that begins now."""
        ...


class _Child:
    """A process, as its parent has it."""

    def __init__(self, kernel: Processes, process: Process, pid: int) -> None:
        self._kernel, self._process, self.pid = kernel, process, pid

    async def wait(self) -> None:
        await self._process.gone()

    def kill(self) -> None:
        self._kernel.kill(self._process)

    def close(self) -> None:
        """Nothing is kept of it."""


class Servers(TabletServers):
    """Of one owner."""

    def __init__(self, world: World, owner: Process, options: ProcessOptions, wire: WireOptions, seed: int) -> None:
        super().__init__(
            Path("/nowhere"),
            options,
            wire=wire,
            lmdb=LmdbOptions(),
            batch=BatchOptions(),
            commit_timeout_s=_TIMEOUT_S,
            seed=seed,
        )
        self._world, self._owner = world, owner
        self.children: list[Process] = []

    def tablet(
        self,
        table: str,
        number: int,
        start: bytes,
        stop: bytes | None,
        groups: Sequence[str],
        resubmit: Resubmit,
    ) -> Any:
        reader = MemoryEnvironment(self._world.disk, f"{table}-{number}", readonly=True)
        return self.add(table, number, start, stop, groups, reader, resubmit)

    async def _begin(self, number: int) -> tuple[trio.abc.Stream, Child]:
        world = self._world
        await trio.sleep(world.pause_s(self._owner))
        if self._owner.dead:
            raise OSError("the dead start no processes")
        name = f"{self._owner.name}.t{number}.{len(self.children)}"
        process = world.another(name)
        self.children.append(process)
        ours, theirs = world.network.pair(self._owner, process, local=True)
        world.kernel.start(process, lambda: _serve(world, process, theirs, self._wire))
        return ours, _Child(world.kernel, process, len(self.children))


class _Server(TabletServer):
    """Listens in the simulation's network."""

    network: Network

    @asynccontextmanager
    async def listening(
        self, address: Address, token: bytes | None = None, tls: tuple[str, str] | None = None, *, ours: bool = False
    ) -> AsyncIterator[Address]:
        stop = self.network.listen(name_at(address.port), lambda stream: self.connection(stream, token, address))
        try:
            yield address
        finally:
            stop()
            with trio.move_on_after(1.0, shield=True):
                await self._drain()


async def _serve(world: World, process: Any, stream: trio.abc.Stream, wire: WireOptions) -> None:
    """What such a process does."""
    background = Background()

    async def opened(table: str, number: int, start: bytes, groups: Sequence[str], floor: int) -> tuple[Tablet, int]:
        await trio.sleep(world.pause_s(process))
        engine = MemoryEnvironment(world.disk, f"{table}-{number}")
        epoch = engine.take_over()
        return DiskTablet(table, start, engine, BatchOptions(), _never, process, world, process.noise, floor), epoch

    server = _Server(background, wire, opened)
    server.network = world.network
    if not await serve(server, background, stream, _TIMEOUT_S):
        world.kernel.kill(process)  # F4: as `os._exit` does
        await trio.lowlevel.checkpoint()
    await background.aclose()


def _never(mutations: Sequence[Mutation], call: Call) -> None:
    raise AssertionError("a client's call goes on with the client")
