"""The owner's side of tablet servers: it starts them, says which tablets they have, and takes those over when one ends.

The owner reads all tablets itself, beside their writers (LMDB's readers and its writer never wait for each other), and
sends its writes to the tablet's server.

F1 F4  A server that ends, or is silent for `silence_s`, is killed, and has ended, before another one opens its
       tablets.
F2     A call that a server answers with `NOT_HERE` was not done: it is repeated where the tablet is by then.
F3     Servers are told of sessions: of a session's end before the floor is raised, over the same connection.
T13    A tablet is opened with the floor that it must have; `raise_floor` returns when the server that has it by then
       has raised it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import trio

from perco.errors import PercoError, TabletSplit, TransactionClosed, Unavailable, UsageError
from perco.options import check_options
from perco.rpc.addresses import Address
from perco.rpc.channel import Silent, WireOptions
from perco.rpc.framing import WireError
from perco.rpc.link import Link, LostError
from perco.serve.children import Child, Command, Mould
from perco.serve.messages import (
    DROPPED,
    LOST,
    NOBODY,
    NOT_HERE,
    NOTIFIED,
    QUIET,
    Method,
    Order,
    TabletIs,
    TabletsOf,
    hello,
    read_welcome,
    unpack_verdict,
)
from perco.serve.tablets import Serving, control
from perco.storage import (
    BatchOptions,
    Failed,
    LmdbEngine,
    LmdbOptions,
    Mutation,
    NoReply,
    Query,
    RowCells,
    ScanPage,
    ScanRequest,
    Tablet,
    TabletStatistics,
    Verdict,
)
from perco.storage.call import Call
from perco.storage.folder import tablet_path
from perco.storage.tablet import Resubmit
from perco.txn.background import Background

log = logging.getLogger("perco.serve")

_YOUNG_S: Final = 5.0  # a server that ends sooner is not started again at once
_PAUSE_S, _PAUSE_MAX_S = 0.2, 5.0
_STOP_S: Final = 10.0
_SERVERS_MAX: Final = 64
_BROKEN: Final = (OSError, WireError, Silent, trio.BrokenResourceError, trio.ClosedResourceError)
_MOULD_S: Final = 5.0
_MAIN: Final = "from perco.serve.tablets import main; main()"
_CLOSED: Final = "the store that this belongs to has been closed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOptions:
    """Attributes:
    servers: tablet servers, each a process.
    silence_s: one that is not heard of for so long is killed, and its tablets are taken over, in seconds.
    timeout_s: how long what is to be written waits for a server to have its tablet.
    mould: what makes them; None: each is a Python of its own.
    """

    servers: int = 2
    silence_s: float = 2.0
    timeout_s: float = 30.0
    mould: Mould | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.servers > _SERVERS_MAX:
            raise UsageError(f"ProcessOptions: servers is {self.servers}; there may be {_SERVERS_MAX}")


class Reader(Protocol):
    """A tablet that a server writes to, read by the owner beside it."""

    def read(self, row: bytes, queries: Sequence[Query]) -> RowCells: ...
    def scan(self, request: ScanRequest) -> ScanPage: ...
    def entries(self, group: str) -> int: ...
    def groups(self) -> list[str]: ...
    def has_from(self, row: bytes) -> bool: ...
    def close(self) -> None: ...
    def forget(self) -> None: ...
    def used_bytes(self) -> int: ...
    def live_bytes(self) -> int: ...


class ServedTablet:
    """A tablet that a tablet server has open, for the owner. Loop thread only, but `submit_from_thread`."""

    queues = True

    def __init__(
        self,
        servers: TabletServers,
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
        self.server: TabletProcess | None = None  # which it has been given to
        self.epoch = 0
        self.floor = 0
        self.placed = trio.Event()  # set when that has it open
        self.resting = False  # nobody is to have it yet: one is closing it, or could not open it a moment ago
        self.failures = 0
        self.begun = False  # servers may have it
        self.cut_at: bytes | None = None  # its rows from there on are about to be another one's (P1)
        self._split = 0  # the number of the last split, in all orders that concern it
        self._copied_by: TabletProcess | None = None  # while it is being split
        self._gone = trio.Event()  # set while no server answers for rows that are another one's (P1)
        self._gone.set()
        self._servers, self._reader, self._resubmit = servers, reader, resubmit
        self._token = trio.lowlevel.current_trio_token()
        self.failure: PercoError | None = None  # why it could not be opened last
        self._pending = 0
        self._idle: trio.Event | None = None
        self._open = True
        self._mutations = 0

    # ------------------------------------------------------------ reading, beside its server

    def read(self, row: bytes, queries: Sequence[Query]) -> RowCells:
        return self._reader.read(row, queries)

    def scan(self, request: ScanRequest) -> ScanPage:
        return self._reader.scan(request)

    def entries(self, group: str) -> int:
        return self._reader.entries(group)

    def groups(self) -> list[str]:
        """The locality groups that are there, whoever made them."""
        return self._reader.groups()

    # ------------------------------------------------------------ writing, through it

    def submit(self, mutation: Mutation, call: Call, index: int) -> None:
        """Have a mutation applied; `call` is answered and woken when it has been."""
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
        """It was split while this waited. The other one begins when the servers have let go of its rows (P1)."""
        first = mutation.rows[0][0]
        while True:
            for tablet in self._servers.tablets:
                if tablet.table == self.table and tablet.holds(first):
                    if all(tablet.holds(row) for row, _, _ in mutation.rows):
                        return await tablet._applied(mutation)
                    return Failed(TabletSplit(self.table))  # P3
            await self._servers.a_moment()

    def holds(self, row: bytes) -> bool:
        """Whether a row lies in it."""
        return self.start <= row and (self.stop is None or row < self.stop)

    async def _ordered(self, order: Order, *more: Any) -> Any:
        """Call its present server. Raises: Unavailable, if none has it for too long."""
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
        """For a while, and not when all has been told to end."""
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
        """As `LmdbTablet.submit_from_thread`; but it goes over the loop."""
        self._token.run_sync_soon(self._submit_all, mutations, done)

    def _submit_all(self, mutations: Sequence[Mutation], done: Callable[[Sequence[Verdict]], None]) -> None:
        call = Call(None, len(mutations), done)
        for index, mutation in enumerate(mutations):
            self.submit(mutation, call, index)

    def expire(self, after_s: float) -> None:
        """Its server looks after its disk."""

    async def raise_floor(self, ts: int) -> None:
        """See `LmdbTablet.raise_floor`."""
        self.floor = max(self.floor, ts)  # first: whoever opens it now begins with that
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
        """See `LmdbTablet.copy_from`; by its server, which keeps it until then."""
        self._split += 1
        with self._patient():
            self._copied_by = await self._where()
        if self._copied_by is None:
            raise self._nobody()
        return int(await self._by_the_same(Order.COPY, self._split, row, stop, str(path), groups))

    async def cut(self, row: bytes) -> None:
        """See `LmdbTablet.cut`. A server that opens it now has it up to there only (P1)."""
        self.cut_at = row
        await self._by_the_same(Order.CUT, self._split, row)

    async def _by_the_same(self, order: Order, *more: Any) -> Any:
        """Raises: Unavailable, where its server has died, or lost it, since it began to copy."""
        server = self._copied_by
        with suppress(LostError):
            if server is not None and self.server is server and self.placed.is_set():
                answer = await server.link.call(order, (self.table, self.number, *more), again=True)
                if answer is not NOT_HERE:
                    return answer
        raise Unavailable(f"the tablet server that was splitting a tablet of {self.table} has died")

    @property
    def is_splitting(self) -> bool:
        """It is not moved meanwhile."""
        return self._copied_by is not None

    @property
    def end(self) -> bytes | None:
        """Up to where a server may have it."""
        return self.stop if self.cut_at is None else self.cut_at

    def let_go(self) -> list[tuple[Mutation, Call, int]]:
        """Nothing is held here; its server answers what it has held."""
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
        """Until no server answers for the rows that it has let go of (P1)."""
        await self._gone.wait()

    async def uncut(self) -> None:
        """See `LmdbTablet.uncut`."""
        was_splitting = self.is_splitting
        self.cut_at, self._copied_by = None, None
        if was_splitting:
            with suppress(Unavailable):  # it ends
                await self._ordered(Order.UNCUT, self._split, self.stop)

    def statistics(self) -> TabletStatistics:
        """Of what went through this process."""
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
        """From now on what is submitted fails, at once."""
        self._open = False

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self.close()

    def close(self) -> None:
        """Close it; nobody reads it any more."""
        self._reader.close()

    def end_views(self) -> None:
        """None outlives a call."""

    def forget(self) -> None:
        """In a forked child: it is its parent's (S5)."""
        self._reader.forget()


@dataclass(eq=False)
class TabletProcess:
    """A tablet server, from its start to its end."""

    number: int
    link: Link
    process: Child | None
    tablets: list[ServedTablet] = field(default_factory=list)
    ports: dict[Address, int] = field(default_factory=dict)  # where it listens beside the owner
    open: bool = False  # it has answered, and may be given tablets
    ended: trio.Event = field(default_factory=trio.Event)  # it surely does nothing any more

    @property
    def pid(self) -> int:
        """0: it is none of its own."""
        return self.process.pid if self.process is not None else 0


@dataclass(frozen=True, slots=True)
class _Listening:
    """Where the owner serves, and how."""

    address: Address
    token: bytes
    certificate: str
    key: str


class TabletServers:
    """All of a store's. Loop thread only.

    Attributes:
        all: those that run, by number.
        background: their tasks; it outlives the store's, which are served by them to their end.
        on_moved: called when tablets have.
        told: called with what servers say (`NOTIFIED`, `QUIET`).
        deaths, moves: how often a server has ended, and a tablet has moved, on the whole.
    """

    def __init__(
        self,
        folder: Path,
        options: ProcessOptions,
        *,
        wire: WireOptions,
        lmdb: LmdbOptions,
        batch: BatchOptions,
        commit_timeout_s: float,
        seed: int | None = None,
    ) -> None:
        self.options = options
        self.background = Background()
        self.all: dict[int, TabletProcess] = {}
        self.tablets: list[ServedTablet] = []
        self.on_moved: Callable[[], None] = lambda: None
        self.told: Callable[[int], None] = lambda what: None
        self.deaths = self.moves = 0
        self.ready = trio.Event()  # set when all have come
        self._inherited = -1
        self._folder, self._wire, self._lmdb = folder, wire, lmdb
        self._serving = Serving(
            folder=str(folder.absolute()),
            owner=os.getpid(),
            wire=asdict(wire),
            lmdb=asdict(lmdb),
            batch=asdict(batch),
            timeout_s=commit_timeout_s,
        )
        self._rng = random.Random(seed)
        self._sessions: set[str] = set()
        self._listening: list[_Listening] = []
        self._balancing = trio.Lock()
        self.ending = False
        self.waits: set[trio.CancelScope] = set()  # for a server to have a tablet
        self._mould = options.mould

    # ------------------------------------------------------------ processes

    def start(self, inherited: int) -> None:
        """Start them all; what is asked for waits until they have.

        Args:
            inherited: a descriptor that they keep open (F4).
        """
        self._inherited = inherited
        for number in range(1, self.options.servers + 1):
            self.background.start(lambda number=number: self._keep(number), f"tablets-{number}")  # type: ignore[misc]

    async def _keep(self, number: int) -> None:
        """A server under that number, and another one when it ends."""
        pause_s = _PAUSE_S
        while not self.ending:
            began = trio.current_time()
            try:
                await self._live(number)
            except OSError as error:  # no descriptors, no processes: later perhaps
                log.error("tablet server %d cannot be started: %s", number, error)
            if self.ending:
                return
            if trio.current_time() - began > _YOUNG_S:
                pause_s = _PAUSE_S
                continue
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _live(self, number: int) -> None:
        """One of its lives. Raises: OSError."""
        stream, process = await self._begin(number)
        try:
            await self.serve_by(number, stream, process)
        finally:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(_STOP_S if self.ending else 0):
                    await process.wait()
                process.kill()
                await process.wait()
                process.close()
                self.died(number)

    async def _begin(self, number: int) -> tuple[trio.abc.Stream, Child]:
        """Start a process, with a stream to it; a simulation has processes of its own. Raises: OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await self._started(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return trio.SocketStream(trio.socket.from_stdlib_socket(ours)), process

    async def _started(self, descriptor: int) -> Child:
        how = json.dumps(asdict(self._serving))
        given = [descriptor, *([self._inherited] if self._inherited >= 0 else [])]
        if self._mould is not None:
            try:
                with trio.fail_after(_MOULD_S):
                    return await self._mould.copy(how, given)
            except (OSError, trio.TooSlowError) as error:
                self._mould = None  # its copy, should it come late, finds the socket closed
                what = str(error) or f"no answer within {_MOULD_S:g} s"
                raise OSError(f"what copies them has failed ({what}); the next ones are made without it") from error
        return Command([sys.executable, "-c", _MAIN, str(descriptor), how], pass_fds=given)

    async def serve_by(self, number: int, stream: trio.abc.Stream, process: Child | None = None) -> None:
        """Have a server at the other end of a stream serve tablets, until it ends."""

        async def connect() -> trio.abc.Stream:
            return stream

        link = Link(
            f"tablet server {number}",
            connect,
            lambda: hello(b"", "the owner", ()),
            self._welcomed,
            lambda what, value: self._told(server, what, value),
            control(self._wire, self.options.silence_s),
            self._rng,
        )
        server = self.all[number] = TabletProcess(number, link, process)

        async def begin() -> None:
            await link.connected.wait()
            await self._begun(server)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(begin)
            try:
                await link.once()
                lost = "it closed the connection"
            except (*_BROKEN, PercoError) as error:
                lost = str(error)
            if not self.ending:
                log.warning("tablet server %d (process %d) is lost: %s", number, server.pid, lost)
            nursery.cancel_scope.cancel()

    def _told(self, server: TabletProcess, what: int, value: Any) -> None:
        if what != DROPPED:
            self.told(what)
            return
        table, number = value
        for tablet in [t for t in server.tablets if (t.table, t.number) == (table, number) and t.placed.is_set()]:
            server.tablets.remove(tablet)
            self._unplace(tablet)
            self._place(tablet)

    @staticmethod
    def _welcomed(message: Any) -> bool:
        read_welcome(message)
        return True

    async def _begun(self, server: TabletProcess) -> None:
        """A server has come: it is told what it has to know, and gets tablets."""
        server.link.tell(Order.SESSIONS, (tuple(self._sessions), ()))
        try:
            for at in self._listening:
                await self._listen(server, at)
        except LostError:
            return
        except PercoError as error:
            self._give_up(server, error)
            return
        server.open = True
        if sum(other.open for other in self.all.values()) == self.options.servers:
            self.ready.set()
        self._place_all()
        self.background.start(self.balance, "balance")

    @staticmethod
    def _give_up(server: TabletProcess, error: PercoError) -> None:
        """Another one may do better."""
        log.error("tablet server %d (process %d): %s", server.number, server.pid, error)
        if server.process is not None:
            server.process.kill()

    def died(self, number: int) -> None:
        """F1: it has ended; whoever is there takes over what it had."""
        server = self.all.pop(number, None)
        if server is None:
            return
        server.open = False
        server.ended.set()
        if self.ending:
            return
        self.deaths += 1
        tablets, server.tablets = server.tablets, []
        for tablet in tablets:
            self._unplace(tablet)
        self._place_all()

    # ------------------------------------------------------------ tablets

    def tablet(
        self,
        table: str,
        number: int,
        start: bytes,
        stop: bytes | None,
        groups: Sequence[str],
        resubmit: Resubmit,
    ) -> Tablet:
        """See `Elsewhere`."""
        path = tablet_path(self._folder, table, number)
        reader = LmdbEngine(path, groups, self._lmdb, readonly=True, lock=True)
        return self.add(table, number, start, stop, groups, reader, resubmit)

    def add(
        self,
        table: str,
        number: int,
        start: bytes,
        stop: bytes | None,
        groups: Sequence[str],
        reader: Reader,
        resubmit: Resubmit,
    ) -> ServedTablet:
        """A tablet, read by this process with `reader`."""
        return ServedTablet(self, table, number, start, stop, groups, reader, resubmit)

    def begin(self, tablet: Tablet) -> None:
        """A tablet that is recorded may be given to servers."""
        assert isinstance(tablet, ServedTablet)
        if not tablet.begun:
            tablet.begun = True
            self.tablets.append(tablet)
            self._place(tablet)

    def begin_after(self, tablet: Tablet, other: Tablet) -> None:
        """The same, when the one whose rows it has got has let go of them (P1)."""
        assert isinstance(tablet, ServedTablet)

        async def begin() -> None:
            await tablet.gone()
            if not self.ending:
                self.begin(other)
                self.on_moved()

        self.background.spawn(begin)

    def abandon(self, tablet: Tablet) -> None:
        """One that has not begun."""
        assert isinstance(tablet, ServedTablet)
        assert not tablet.begun
        tablet.close()

    def _place_all(self) -> None:
        for tablet in self.tablets:
            if tablet.server is None and not tablet.resting:
                self._place(tablet)

    def _place(self, tablet: ServedTablet) -> None:
        """Let the server that has fewest have it."""
        open = [server for server in self.all.values() if server.open]
        if open:
            self._give(tablet, min(open, key=lambda server: len(server.tablets)))

    def _give(self, tablet: ServedTablet, server: TabletProcess) -> None:
        server.tablets.append(tablet)
        tablet.server = server
        self.background.spawn(lambda: self._opened(tablet, server))

    async def _opened(self, tablet: ServedTablet, server: TabletProcess) -> None:
        order = tablet.table, tablet.number, tablet.start, tablet.end, tablet.all_groups, tablet.floor
        try:
            tablet.epoch = await server.link.call(Order.OPEN, order, again=False)
        except LostError:
            return
        except PercoError as error:
            if tablet.server is server:
                log.error("tablet server %d: %s", server.number, error)
                server.tablets.remove(tablet)
                tablet.server, tablet.failure = None, error
                tablet.resting = True
                self.background.start(lambda: self._place_later(tablet), "place")
            return
        if tablet.server is server:
            tablet.failure, tablet.failures = None, 0
            tablet.placed.set()
            self.on_moved()
            self.told(NOTIFIED)  # N8: what its former server wanted to say

    async def _place_later(self, tablet: ServedTablet) -> None:
        """It could not be opened; other tablets can."""
        await trio.sleep(min(_PAUSE_S * 2**tablet.failures, _PAUSE_MAX_S))
        tablet.failures += 1
        tablet.resting = False
        if tablet.server is None:
            self._place(tablet)

    def _unplace(self, tablet: ServedTablet) -> None:
        tablet.server = None
        if tablet.placed.is_set():  # else whoever waits goes on waiting for the same
            tablet.placed = trio.Event()
        self.moves += 1

    async def a_moment(self) -> None:
        """Before a tablet is looked for again."""
        await trio.sleep(_PAUSE_S / 10)

    async def balance(self) -> None:
        """Move tablets until no server has two more than another."""
        if self._balancing.statistics().tasks_waiting:
            return  # who waits looks at all of it
        async with self._balancing:
            while not self.ending:
                open = [server for server in self.all.values() if server.open]
                if len(open) < 2:
                    return
                most, least = (pick(open, key=lambda server: len(server.tablets)) for pick in (max, min))
                if len(most.tablets) - len(least.tablets) < 2:
                    return
                movable = [tablet for tablet in most.tablets if not tablet.is_splitting]
                if not movable:
                    return
                tablet = movable[-1]
                with trio.move_on_after(_STOP_S):
                    await tablet.placed.wait()
                if tablet.server is most and tablet.placed.is_set() and least.open and not tablet.is_splitting:
                    await self.move(tablet, least)

    async def move(self, tablet: ServedTablet, to: TabletProcess) -> None:
        """From the server that has it to another one; what is asked for meanwhile waits."""
        former = tablet.server
        assert former is not None, "what nobody has is placed, not moved"
        assert tablet.placed.is_set(), "F1: it is closed after it was opened"
        former.tablets.remove(tablet)
        self._unplace(tablet)
        tablet.resting = True
        try:
            await former.link.call(Order.CLOSE, (tablet.table, tablet.number), again=False)
        except LostError:
            await former.ended.wait()  # F1
        except PercoError as error:
            self._give_up(former, error)  # F1: it may still write
            await former.ended.wait()
        finally:
            tablet.resting = False
        if to.open and self.all.get(to.number) is to:
            self._give(tablet, to)
        else:
            self._place(tablet)

    def placement(self) -> dict[str, list[tuple[bytes, int]]]:
        """The first row, and the number of the server (NOBODY: none), of all tablets, by table."""
        found: dict[str, list[tuple[bytes, int]]] = {}
        for tablet in self.tablets:
            found.setdefault(tablet.table, []).append((tablet.start, tablet.server.number if tablet.server else NOBODY))
        return {table: sorted(tablets) for table, tablets in found.items()}

    async def servers(self) -> list[TabletsOf]:
        """All of them, and the tablets that they have, as they tell it."""
        found = []
        for server in list(self.all.values()):
            told: dict[tuple[str, int], TabletStatistics] = {}
            with suppress(LostError, PercoError):
                for number, *more in await server.link.call(Order.STATISTICS, None, again=False):
                    statistics = TabletStatistics(*more)
                    told[statistics.table, number] = statistics
            tablets = []
            for tablet in sorted(server.tablets, key=lambda tablet: (tablet.table, tablet.number)):
                of = told.get((tablet.table, tablet.number)) or tablet.statistics()
                numbers = of.batches, of.mutations, of.queued, of.used_bytes
                tablets.append(TabletIs(tablet.table, tablet.number, tablet.start, tablet.stop, tablet.epoch, *numbers))
            addresses = [str(address.beside(server.number, port)) for address, port in server.ports.items()]
            found.append(TabletsOf(server.number, server.pid, addresses, tablets))
        return sorted(found)

    # ------------------------------------------------------------ clients

    def session_began(self, ticket: str) -> None:
        """F3."""
        self._sessions.add(ticket)
        self._tell(Order.SESSIONS, ((ticket,), ()))

    def session_ended(self, ticket: str) -> None:
        """F3: before what it holds is let go of."""
        self._sessions.discard(ticket)
        self._tell(Order.SESSIONS, ((), (ticket,)))

    def session_held(self, ticket: str) -> None:
        """R10."""
        self._tell(Order.EXCUSE, ticket)

    def _tell(self, order: Order, arguments: Any) -> None:
        for server in self.all.values():
            server.link.tell(order, arguments)

    async def listen(self, address: Address, token: bytes | None, certificate: str, key: str) -> None:
        """Servers listen beside the owner: at the same path with their number, or at the ports that follow."""
        at = _Listening(address, token or b"", certificate, key)
        self._listening.append(at)
        for server in list(self.all.values()):
            if server.open:
                try:
                    await self._listen(server, at)
                except LostError:
                    continue
                except PercoError as error:
                    self._give_up(server, error)

    async def _listen(self, server: TabletProcess, at: _Listening) -> None:
        beside = at.address.beside(server.number, at.address.port + server.number)
        ours = beside.path is not None and beside.path.parent == self._folder
        server.ports[at.address] = await server.link.call(
            Order.LISTEN,
            (str(beside.path or ""), beside.host, beside.port, beside.tls, ours, at.token, at.certificate, at.key),
            again=False,
        )

    def ports(self, address: Address) -> dict[int, int]:
        """By server, the number (of a socket), or the port, where it listens beside that address."""
        found = {}
        for number, server in self.all.items():
            if address in server.ports:
                found[number] = server.ports[address] or number
        return found

    # ------------------------------------------------------------ the end

    async def aclose(self) -> None:
        """Have them answer what was asked for, and end."""
        with trio.CancelScope(shield=True):
            self.ending = True
            for scope in list(self.waits):
                scope.cancel()

            async def stop(server: TabletProcess) -> None:
                with suppress(LostError, PercoError), trio.move_on_after(_STOP_S):
                    await server.link.call(Order.STOP, None, again=False)

            async with trio.open_nursery() as nursery:
                for server in list(self.all.values()):
                    if server.link.connected.is_set() and not server.link.closed:
                        nursery.start_soon(stop, server)
                    elif server.process is not None:
                        server.process.kill()
            await self.background.aclose()


def on_news(notified: Callable[[], None], quiet: Callable[[], None]) -> Callable[[int], None]:
    """Reactions to messages of the tablet servers (N7, N8)."""
    acts = {NOTIFIED: notified, QUIET: quiet}

    def told(what: int) -> None:
        act = acts.get(what)
        if act is not None:
            act()

    return told
