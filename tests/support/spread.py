"""Tablet servers in this process, over tablets of memory and streams in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import trio
import trio.testing

import perco
from perco.errors import UnsuitableFolder
from perco.rpc.addresses import NOWHERE
from perco.rpc.channel import Silent, WireOptions
from perco.rpc.framing import WireError
from perco.serve.placing import ProcessOptions
from perco.serve.processes import TabletServers
from perco.serve.served_tablet import ServedTablet
from perco.serve.tablets import TabletServer
from perco.storage import LOG, MemoryTablet, Query, RowCells, ScanPage, ScanRequest, Tablet
from perco.storage.engine import MemoryEngine
from perco.storage.row import read_row, scan_rows
from perco.storage.tablet import Resubmit
from perco.txn.background import Background


class Beside:
    """An engine of memory, read by the owner."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine

    def read(self, row: bytes, queries: Sequence[Query]) -> RowCells:
        return read_row(self._engine, row, queries)

    def scan(self, request: ScanRequest) -> ScanPage:
        return scan_rows(self._engine, request)

    def entries(self, group: str) -> int:
        return self._engine.entries(group)

    def groups(self) -> list[str]:
        return self._engine.groups()

    def used_bytes(self) -> int:
        return 0

    def live_bytes(self) -> int:
        return 0

    def has_from(self, row: bytes) -> bool:
        return self._engine.has_from(row)

    def close(self) -> None:
        """Nothing is open."""

    def forget(self) -> None:
        """A child has its own copy."""


class _Tablet(MemoryTablet):
    """Takes its time to be closed."""

    closed: Callable[[], object]
    copied: Callable[[int, MemoryEngine], None]
    drain_s = 0.0
    _into, _stop = 0, None

    async def copy_from(self, row: bytes, stop: bytes | None, path: Path, groups: Sequence[str]) -> int:
        self._into, self._stop = int(path.name.rpartition("-")[2]), stop
        await trio.sleep(self.drain_s)
        copy = self.engine.copy_from(row)
        return sum(map(copy.entries, copy.groups()))

    async def cut(self, row: bytes) -> None:
        await trio.sleep(self.drain_s)
        copy = self.engine.copy_from(row)
        if self._stop is not None:
            copy.remove_from(self._stop)
        self.copied(self._into, copy)
        await trio.sleep(self.drain_s)

    async def drain(self) -> bool:
        await trio.sleep(self.drain_s)
        return await super().drain()

    async def aclose(self) -> None:
        await super().aclose()
        self.closed()


class MemoryServers(TabletServers):
    """`here`: the servers that live, by number; `slow`: to open, to close, to die takes a while, or not."""

    slow = False
    starts_s = 0.0  # for a server to begin

    def __init__(self, options: ProcessOptions, wire: WireOptions) -> None:
        config = perco.Options()
        super().__init__(
            Path("nowhere"),
            options,
            wire=wire,
            lmdb=config.lmdb,
            batch=config.batch,
            commit_timeout_s=config.commit.commit_timeout_s,
            seed=0,
        )
        self.here: dict[int, TabletServer] = {}
        self.backgrounds: dict[int, Background] = {}
        self.engines: dict[tuple[str, int], MemoryEngine] = {}
        self.open_by: dict[tuple[str, int], int] = {}
        self.open_twice: list[tuple[str, int]] = []  # F1: there must be none
        self.unopenable: set[tuple[str, int]] = set()
        self.epochs: dict[tuple[str, int], int] = {}
        self.streams: dict[int, list[trio.abc.Stream]] = {}

    def tablet(
        self,
        table: str,
        number: int,
        start: bytes,
        stop: bytes | None,
        groups: Sequence[str],
        resubmit: Resubmit,
    ) -> ServedTablet:
        engine = self.engines.setdefault((table, number), MemoryEngine())
        engine.logs = engine.logs or LOG in groups
        return self.add(table, number, start, stop, groups, Beside(engine), resubmit)

    async def _live(self, number: int) -> None:
        ours, theirs = trio.testing.memory_stream_pair()
        self.streams[number] = [ours, theirs]
        background = self.backgrounds[number] = Background()

        async def opened(table: str, of: int, start: bytes, groups: Sequence[str], floor: int) -> tuple[Tablet, int]:
            await trio.sleep(self._slow(0.1))
            if (table, of) in self.unopenable:
                raise UnsuitableFolder(table, "it is a brick")
            if (table, of) in self.open_by:
                self.open_twice.append((table, of))
            self.open_by[table, of] = number
            self.epochs[table, of] = self.epochs.get((table, of), 0) + 1
            tablet = _Tablet(table, start, self.engines[table, of], floor)
            tablet.drain_s = self._slow(0.2)
            tablet.closed = lambda: self.open_by.pop((table, of), None)
            tablet.copied = lambda into, engine: self.engines.__setitem__((table, into), engine)
            return tablet, self.epochs[table, of]

        self.here[number] = server = TabletServer(background, self._wire, opened)

        async def obey() -> None:
            if self.starts_s:
                await trio.sleep(self.starts_s)
            with suppress(OSError, WireError, Silent, trio.BrokenResourceError, trio.ClosedResourceError):
                await server.obey(theirs)

        background.start(obey, f"tablets-{number}")
        try:
            await self.serve_by(number, ours)
        finally:
            with trio.CancelScope(shield=True):
                await background.aclose()
                await trio.sleep(self._slow(0.3))  # it takes a while to die
                del self.here[number]
                self.open_by = {tablet: by for tablet, by in self.open_by.items() if by != number}
                self.died(number)

    def _slow(self, seconds: float) -> float:
        return self._rng.choice((0.0, seconds)) if self.slow else 0.0

    async def _begun(self, server: object) -> None:
        server.ports[NOWHERE] = server.number  # type: ignore[attr-defined]
        await super()._begun(server)  # type: ignore[arg-type]

    async def kill(self, number: int) -> None:
        """A server dies, with all its connections."""
        streams, self.streams[number] = self.streams[number], []
        for stream in streams:
            await trio.aclose_forcefully(stream)

    async def connect(self, number: int) -> trio.abc.Stream:
        """A client's connection to a server."""
        await trio.lowlevel.checkpoint()
        server = self.here.get(number)
        if server is None or not self.streams[number]:
            raise ConnectionRefusedError("it is dead")
        ours, theirs = trio.testing.memory_stream_pair()
        self.streams[number] += [ours, theirs]

        async def serve() -> None:
            await server.connection(theirs, None)

        self.backgrounds[number].start(serve, "connection")
        return ours
