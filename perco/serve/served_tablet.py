"""A tablet that a tablet server has, as the store's owner sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import trio

from perco.errors import PercoError, TabletSplit, TransactionClosed, Unavailable
from perco.rpc.addresses import Address
from perco.rpc.link import Link, LostError
from perco.serve.children import Child
from perco.serve.messages import (
    LOST,
    NOT_HERE,
    Method,
    Order,
    unpack_verdict,
)
from perco.serve.placing import ProcessOptions
from perco.storage import (
    Failed,
    Mutation,
    NoReply,
    Query,
    RowCells,
    ScanPage,
    ScanRequest,
    TabletStatistics,
    Verdict,
)
from perco.storage.call import Call
from perco.storage.tablet import Resubmit
from perco.txn.background import Background

_CLOSED: Final = "the store that this belongs to has been closed"


class Reader(Protocol):
    """Reads a tablet in the owner while a server writes to it."""

    def read(self, row: bytes, queries: Sequence[Query]) -> RowCells: ...
    def scan(self, request: ScanRequest) -> ScanPage: ...
    def entries(self, group: str) -> int: ...
    def groups(self) -> list[str]: ...
    def has_from(self, row: bytes) -> bool: ...
    def close(self) -> None: ...
    def forget(self) -> None: ...
    def used_bytes(self) -> int: ...
    def live_bytes(self) -> int: ...


class Servers(Protocol):
    """The part of `TabletServers` that a tablet uses."""

    background: Background
    options: ProcessOptions
    tablets: list[ServedTablet]
    waits: set[trio.CancelScope]
    ending: bool

    async def a_moment(self) -> None: ...


class ServedTablet:
    """The owner's view of a tablet that a tablet server has open. Loop thread only, except `submit_from_thread`."""

    table: str
    number: int
    start: bytes
    placed: trio.Event
    floor: int
    all_groups: list[str]
    on_written: Callable[[float], object] | None = None
    on_queued: Callable[[float], object] | None = None

    queues = True

    def __init__(
        self,
        servers: Servers,
        table: str,
        number: int,
        start: bytes,
        stop: bytes | None,
        groups: Sequence[str],
        reader: Reader,
        resubmit: Resubmit,
    ) -> None:
        self.table, self.number, self.start, self.stop = table, number, start, stop
        self.all_groups = list(groups)
        self.server: TabletProcess | None = None  # the server to which the tablet was given
        self.epoch = 0
        self.floor = 0
        self.placed = trio.Event()  # set while that server has the tablet open
        self.resting = False  # no server may have the tablet yet: one is closing it, or has just failed to open it
        self.failures = 0
        self.begun = False  # servers are allowed to have the tablet
        self.cut_at: bytes | None = None  # rows from there on are about to move to another tablet (P1)
        self._split = 0  # the number of the last split; its orders carry it
        self._copied_by: TabletProcess | None = None  # during a split: the server that copies the rows
        self._gone = trio.Event()  # set while no server answers for rows that this tablet has given away (P1)
        self._gone.set()
        self._servers, self._reader, self._resubmit = servers, reader, resubmit
        self._token = trio.lowlevel.current_trio_token()
        self.failure: PercoError | None = None  # why no server could open the tablet the last time
        self._pending = 0
        self._idle: trio.Event | None = None
        self._open = True
        self._mutations = 0

    # ------------------------------------------------------------ reading, without its server

    def read(self, row: bytes, queries: Sequence[Query]) -> RowCells:
        return self._reader.read(row, queries)

    def scan(self, request: ScanRequest) -> ScanPage:
        return self._reader.scan(request)

    def entries(self, group: str) -> int:
        return self._reader.entries(group)

    def groups(self) -> list[str]:
        """The locality groups that exist, whichever process made them."""
        return self._reader.groups()

    # ------------------------------------------------------------ writing, through its server

    def submit(self, mutation: Mutation, call: Call, index: int) -> None:
        """Have a mutation applied by the tablet's server; `call` then gets the verdict, and is woken."""
        if not self._open:
            call.answer(index, Failed(TransactionClosed(_CLOSED)))
            return
        call.taken = True  # T10
        self._pending += 1

        async def run() -> None:
            verdict: Verdict = NoReply("the server's owner failed")
            try:
                verdict = await self._applied(mutation)
            finally:
                self._mutations += 1
                call.arrived(index, verdict, self._resubmit)
                self._pending -= 1
                if not self._pending and self._idle is not None:
                    self._idle.set()

        self._servers.background.spawn(run)

    async def _applied(self, mutation: Mutation) -> Verdict:
        with self._patient():
            while True:
                if self.stop is not None and any(row >= self.stop for row, _, _ in mutation.rows):
                    return await self._applied_by_another(mutation)
                server = await self._where()
                try:
                    answer = await server.link.call(Method.APPLY, (mutation,), again=False)
                except LostError as error:
                    return NoReply(str(error))
                except PercoError as error:
                    return Failed(error) if isinstance(error, Unavailable) else NoReply(str(error))
                if answer is not NOT_HERE and answer[0] != LOST:
                    return unpack_verdict(answer[0])
                await self._servers.a_moment()
        return Failed(self._nobody())

    async def _applied_by_another(self, mutation: Mutation) -> Verdict:
        """Apply a mutation to the tablet to which a split has moved the mutation's rows, once servers are
        allowed to have that tablet (P1)."""
        first = mutation.rows[0][0]
        while True:
            for tablet in self._servers.tablets:
                if tablet.table == self.table and tablet.holds(first):
                    if all(tablet.holds(row) for row, _, _ in mutation.rows):
                        return await tablet._applied(mutation)
                    return Failed(TabletSplit(self.table))  # P3
            await self._servers.a_moment()

    def holds(self, row: bytes) -> bool:
        """Whether a row lies in this tablet."""
        return self.start <= row and (self.stop is None or row < self.stop)

    async def _ordered(self, order: Order, *more: Any) -> Any:
        """Send an order to the server that has this tablet. Raises: Unavailable, if the tablet has been
        without a server for too long."""
        with self._patient():
            while True:
                server = await self._where()
                with suppress(LostError):
                    answer = await server.link.call(order, (self.table, self.number, *more), again=False)
                    if answer is not NOT_HERE:
                        return answer
                await self._servers.a_moment()
        raise self._nobody()

    async def _where(self) -> TabletProcess:
        while self.server is None or not self.placed.is_set():
            await self.placed.wait()
        return self.server

    @contextmanager
    def _patient(self) -> Iterator[None]:
        """Bound a wait by `timeout_s`; if the servers are ending, do not wait."""
        servers = self._servers
        deadline = -math.inf if servers.ending else trio.current_time() + servers.options.timeout_s
        with trio.CancelScope(deadline=deadline) as scope:
            servers.waits.add(scope)
            try:
                yield
            finally:
                servers.waits.discard(scope)

    def _nobody(self) -> Unavailable:
        because = f" ({self.failure})" if self.failure is not None else ""
        return Unavailable(f"no tablet server has tablet {self.number} of {self.table}{because}")

    def submit_from_thread(self, mutations: Sequence[Mutation], done: Callable[[Sequence[Verdict]], None]) -> None:
        """Like `LmdbTablet.submit_from_thread`, but through the loop."""
        self._token.run_sync_soon(self._submit_all, mutations, done)

    def _submit_all(self, mutations: Sequence[Mutation], done: Callable[[Sequence[Verdict]], None]) -> None:
        call = Call(None, len(mutations), done)
        for index, mutation in enumerate(mutations):
            self.submit(mutation, call, index)

    def expire(self, after_s: float) -> None:
        """Nothing to do: the server itself watches the disk."""

    async def raise_floor(self, ts: int) -> None:
        """See `LmdbTablet.raise_floor`."""
        self.floor = max(self.floor, ts)  # first: a server that opens the tablet from now on begins with this floor
        await self._ordered(Order.FLOOR, ts)

    async def repack(self, group: str, start: bytes, skip: int) -> tuple[bytes | None, bool]:
        """See `LmdbTablet.repack`."""
        after, worth = await self._ordered(Order.REPACK, group, start, skip)
        return after, worth

    async def add_groups(self, groups: Sequence[str]) -> None:
        """See `LmdbTablet.add_groups`."""
        self.all_groups += [group for group in groups if group not in self.all_groups]
        if self.begun:
            await self._ordered(Order.GROUPS, groups)

    # ------------------------------------------------------------ splitting

    def live_bytes(self) -> int:
        """See `LmdbTablet.live_bytes`."""
        return self._reader.live_bytes()

    def has_from(self, row: bytes) -> bool:
        """See `LmdbTablet.has_from`."""
        return self._reader.has_from(row)

    async def middle(self, stop: bytes | None) -> bytes | None:
        """See `LmdbTablet.middle`."""
        found: bytes | None
        [found] = await self._ordered(Order.MIDDLE, stop)
        return found

    async def remove_from(self, row: bytes) -> bool:
        """See `LmdbTablet.remove_from`."""
        await self._gone.wait()
        return bool(await self._ordered(Order.REMOVE, row))

    async def copy_from(self, row: bytes, stop: bytes | None, path: Path, groups: Sequence[str]) -> int:
        """See `LmdbTablet.copy_from`. The tablet's server makes the copy, and keeps the tablet until the split is
        over."""
        self._split += 1
        with self._patient():
            self._copied_by = await self._where()
        if self._copied_by is None:
            raise self._nobody()
        return int(await self._by_the_same(Order.COPY, self._split, row, stop, str(path), groups))

    async def cut(self, row: bytes) -> None:
        """See `LmdbTablet.cut`. A server that opens the tablet from now on gets only the rows before `row` (P1)."""
        self.cut_at = row
        await self._by_the_same(Order.CUT, self._split, row)

    async def _by_the_same(self, order: Order, *more: Any) -> Any:
        """Send an order to the server that began to copy. Raises: Unavailable, if it has ended, or lost the tablet,
        since then."""
        server = self._copied_by
        with suppress(LostError):
            if server is not None and self.server is server and self.placed.is_set():
                answer = await server.link.call(order, (self.table, self.number, *more), again=True)
                if answer is not NOT_HERE:
                    return answer
        raise Unavailable(f"the tablet server that was splitting a tablet of {self.table} has died")

    @property
    def is_splitting(self) -> bool:
        """Whether this tablet is being split; meanwhile it is not moved to another server."""
        return self._copied_by is not None

    @property
    def end(self) -> bytes | None:
        """The first row that a server of this tablet must not have; None: the server may have all rows to the end."""
        return self.stop if self.cut_at is None else self.cut_at

    def let_go(self) -> list[tuple[Mutation, Call, int]]:
        """Give up the rows from the cut on. Returns []: the server answers the calls that it held back."""
        self.stop, self.cut_at, self._copied_by = self.cut_at, None, None
        stop, self._gone = self.stop, trio.Event()

        async def tell() -> None:
            while not self._servers.ending:
                with suppress(Unavailable):
                    await self._ordered(Order.LET_GO, stop)
                    break
            self._gone.set()

        self._servers.background.spawn(tell)
        return []

    async def gone(self) -> None:
        """Wait until no server answers for the rows that this tablet has given away (P1)."""
        await self._gone.wait()

    async def uncut(self) -> None:
        """See `LmdbTablet.uncut`."""
        was_splitting = self.is_splitting
        self.cut_at, self._copied_by = None, None
        if was_splitting:
            with suppress(Unavailable):  # no server has the tablet, or all are ending
                await self._ordered(Order.UNCUT, self._split, self.stop)

    def statistics(self) -> TabletStatistics:
        """Count the mutations that went through this process."""
        used = self._reader.used_bytes()
        return TabletStatistics(self.table, self.start, 0, self._mutations, 0, 0, self._pending, used, 0)

    # ------------------------------------------------------------ the end

    async def drain(self) -> bool:
        """Wait until all that was submitted has been answered; returns whether there was anything."""
        busy = False
        while self._pending:
            busy = True
            self._idle = trio.Event()
            await self._idle.wait()
        return busy

    def refuse(self) -> None:
        """From now on, mutations that are submitted fail at once."""
        self._open = False

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self.close()

    def close(self) -> None:
        """Close the reader: this tablet is not read any more."""
        self._reader.close()

    def end_views(self) -> None:
        """Nothing to do: no view outlives a call."""

    def forget(self) -> None:
        """In a forked child: the environment belongs to its parent (S5)."""
        self._reader.forget()


@dataclass(eq=False)
class TabletProcess:
    """A tablet server, from its start to its end."""

    number: int
    link: Link
    process: Child | None
    tablets: list[ServedTablet] = field(default_factory=list)
    ports: dict[Address, int] = field(default_factory=dict)  # the owner's address -> this server's own port
    open: bool = False  # it has answered, and may be given tablets
    ended: trio.Event = field(default_factory=trio.Event)  # it certainly does nothing any more

    @property
    def pid(self) -> int:
        """The process id; 0: the server is not a process of its own."""
        return self.process.pid if self.process is not None else 0
