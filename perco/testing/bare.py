"""A store without any optional capability, for tests: single rows only, and every call is awaited.

    BareStore(local)    replaces a `LocalStore`, which holds the rows; all calls go through `SingleRows`

perco requires no more of a store than this, which is the least that a distributed store offers. A `FaultyRowStore`
between `BareStore` and `SingleRows` loses, delays and repeats messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from perco.schema.catalogue import Catalogue
from perco.storage import (
    LocalRowStore,
    Mutation,
    ReadRequest,
    RowCells,
    RowStore,
    ScanPage,
    ScanRequest,
    Tablet,
    Verdict,
)
from perco.storage.bare import Bare
from perco.tablets.local import LocalStore


class SingleRows:
    """The rows of a server that offers neither groups, nor write floors, nor cell counts.

    Args:
        rows: the store that holds them.
        latency_s: returns how long the next call takes, in seconds.
    """

    groups = False
    once = False
    logs = True
    near = False
    chaining = None
    deferring = None
    prompt = None

    calls: int

    def __init__(self, rows: LocalRowStore, latency_s: Callable[[], float] = lambda: 0.0) -> None:
        self._rows, self._latency_s = rows, latency_s
        self.calls = 0

    def tablets_here(self) -> Sequence[Tablet]:
        return ()

    def locate(self, table: str, row: bytes) -> int:
        return self._rows.locate(table, row)

    def bounds(self, table: str) -> list[bytes]:
        return self._rows.bounds(table)

    async def _under_way(self) -> None:
        self.calls += 1
        await trio.sleep(self._latency_s())

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        """Read each row as of a moment of its own."""
        out: list[RowCells] = []
        for request in requests:
            await self._under_way()
            out += await self._rows.read([request])
        return out

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        await self._under_way()
        return await self._rows.read_first(requests, bytes_max)

    async def scan(self, request: ScanRequest) -> ScanPage:
        await self._under_way()
        return await self._rows.scan(request)

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        """Apply the mutations one after the other. The call can be cancelled only before the first one is sent
        (T10)."""
        await trio.lowlevel.checkpoint_if_cancelled()
        for mutation in mutations:  # an error here means that nothing was sent
            self._rows.locate(mutation.table, mutation.rows[0][0])
        out: list[Verdict] = []
        with trio.CancelScope(shield=True):
            for mutation in mutations:
                assert len(mutation.rows) == 1, "this store has no groups"
                await self._under_way()
                out += await self._rows.apply([mutation])
        return out


class BareStore:
    """The backend of a store without any optional capability. It must be made in a trio task.

    Args:
        local: the store that holds the rows.
        below: the row store that every call goes through; by default `SingleRows` over `local`.
        late_s: see `Bare`.

    Attributes:
        rows: the stored rows, for inspection.
    """

    store: Bare
    rows: LocalRowStore
    path: Path | None
    forked: bool

    readonly = False
    threaded = False
    remote = False
    owner_alive = False
    term = b""
    local = None

    def __init__(self, local: LocalStore, below: RowStore | None = None, *, late_s: float = 0.0) -> None:
        self._local, self.rows = local, local.store
        self.path, self.forked = None, False
        self.store = Bare(SingleRows(local.store) if below is None else below, local.store.tables, late_s)

    def check(self) -> None:
        self._local.check()

    async def adapt(self, catalogue: Catalogue) -> None:
        """Make the tables and groups that a catalogue names."""
        await self._local.adapt(catalogue)

    def where(self) -> tuple[str, str]:
        return self._local.where()

    def write_from_thread(self, mutation: Mutation) -> None:
        raise NotImplementedError("there is no thread")

    def clear_dead_readers(self) -> None:
        """Do nothing: no other process reads the rows."""

    def expire(self, after_s: float) -> None:
        """Do nothing: there is no disk to wait for."""

    async def aclose(self) -> None:
        await self._local.aclose()
