"""Tablet servers of a simulated store: processes that perco starts, gives orders to and kills, on the simulated disk.

`TabletServers` is production code: it restarts a server's process when the process ends, and kills a process that is
silent. Here, the processes are simulated, and a connection of the simulated network replaces the socket between owner
and server.
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
from perco.serve.placing import ProcessOptions
from perco.serve.processes import TabletServers
from perco.serve.tablets import TabletServer, serve
from perco.storage import BatchOptions, LmdbOptions, Mutation, Tablet
from perco.storage.call import Call
from perco.storage.tablet import Resubmit
from perco.testing.disk import Befalls, Disk, DiskTablet, MemoryEnvironment
from perco.testing.network import Network
from perco.testing.processes import Process, Processes
from perco.txn.background import Background

ADDRESS: Final = Address(None, "localhost", 100)  # the owner's
_TIMEOUT_S: Final = 5.0


def name_at(port: int) -> str:
    """The name of the tablet server at a port."""
    return f"tablets at {port}"


class World(Befalls, Protocol):
    """The simulation, as tablet servers see it."""

    disk: Disk
    network: Network
    kernel: Processes

    def another(self, name: str) -> Any:
        """A new process of that name."""
        ...


class _Child:
    """A process, as its parent sees it."""

    def __init__(self, kernel: Processes, process: Process, pid: int) -> None:
        self._kernel, self._process, self.pid = kernel, process, pid

    async def wait(self) -> None:
        await self._process.gone()

    def kill(self) -> None:
        self._kernel.kill(self._process)

    def close(self) -> None:
        """Nothing to do: no resources are held for it."""


class Servers(TabletServers):
    """The tablet servers of one owner."""

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
        reader = MemoryEnvironment(self._world.disk, f"{table}-{number}", groups, readonly=True)
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
    """A tablet server that listens in the simulated network."""

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
    """The main task of a tablet server's process."""
    background = Background()

    async def opened(table: str, number: int, start: bytes, groups: Sequence[str], floor: int) -> tuple[Tablet, int]:
        await trio.sleep(world.pause_s(process))
        engine = MemoryEnvironment(world.disk, f"{table}-{number}", groups)
        epoch = engine.take_over()
        return DiskTablet(table, start, engine, BatchOptions(), _never, process, world, process.noise, floor), epoch

    server = _Server(background, wire, opened)
    server.network = world.network
    if not await serve(server, background, stream, _TIMEOUT_S):
        world.kernel.kill(process)  # F4: as `os._exit` does
        await trio.lowlevel.checkpoint()
    await background.aclose()


def _never(mutations: Sequence[Mutation], call: Call) -> None:
    raise AssertionError("the client continues its own calls")
