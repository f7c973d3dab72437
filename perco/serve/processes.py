"""The owner's side of tablet servers: starts them, gives them tablets, and gives a dead server's tablets to others.

The owner reads all tablets itself while servers write to them (LMDB's readers and its writer never wait for each
other), and sends each write to the server that has the tablet.

F1 F4  If a server ends, or is silent for `silence_s`, the owner kills it, and waits for its end before another server
       opens its tablets.
F2     A server that answers a call with `NOT_HERE` has done nothing, so the owner repeats the call at the server that
       has the tablet by then.
F3     The owner notifies the servers when sessions begin and end. It reports the end of a session before it orders the
       servers to raise the floor, over the same connection.
T13    A server opens a tablet with the floor that the tablet must have. `raise_floor` returns once the tablet's floor
       is raised at the server that has the tablet, even if the tablet has moved to that server since the call.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import trio

from perco.errors import PercoError
from perco.rpc.addresses import Address
from perco.rpc.channel import Silent, WireOptions
from perco.rpc.framing import WireError
from perco.rpc.link import Link, LostError
from perco.serve.children import Child, Command
from perco.serve.messages import (
    DROPPED,
    NOBODY,
    NOTIFIED,
    QUIET,
    Order,
    TabletIs,
    TabletsOf,
    hello,
    read_welcome,
)
from perco.serve.placing import ProcessOptions
from perco.serve.served_tablet import Reader, ServedTablet, TabletProcess
from perco.serve.tablets import Serving, control
from perco.storage import (
    BatchOptions,
    LmdbEngine,
    LmdbOptions,
    Tablet,
    TabletStatistics,
)
from perco.storage.folder import tablet_path
from perco.storage.tablet import Resubmit
from perco.txn.background import Background

log: logging.Logger = logging.getLogger("perco.serve")

_YOUNG_S: Final = 5.0  # a server that ends sooner is not started again at once
_PAUSE_S, _PAUSE_MAX_S = 0.2, 5.0
_STOP_S: Final = 10.0
_BROKEN: Final = (OSError, WireError, Silent, trio.BrokenResourceError, trio.ClosedResourceError)
_MOULD_S: Final = 5.0
_MAIN: Final = "from perco.serve.tablets import main; main()"


@dataclass(frozen=True, slots=True)
class _Listening:
    """An address at which the owner serves, with its secrets."""

    address: Address
    token: bytes
    certificate: str
    key: str


class TabletServers:
    """All tablet servers of a store. Loop thread only.

    Attributes:
        all: the servers that run, by number.
        background: the tasks that look after the servers; it outlives the store's own tasks, which need the servers to
            the end.
        on_moved: called when tablets have moved.
        told: called with the servers' messages (`NOTIFIED`, `QUIET`).
        deaths, moves: how many servers have ended, and how many times tablets have moved, in total.
    """

    background: Background
    ready: trio.Event
    deaths: int
    moves: int
    ending: bool

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
        self.ready = trio.Event()  # set when all servers are open
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
        self.waits: set[trio.CancelScope] = set()  # of tasks that wait until a tablet has a server
        self._mould = options.mould

    # ------------------------------------------------------------ processes

    def start(self, inherited: int) -> None:
        """Start all servers; calls to their tablets wait until they run.

        Args:
            inherited: a descriptor that they keep open (F4).
        """
        self._inherited = inherited
        for number in range(1, self.options.servers + 1):
            self.background.start(lambda number=number: self._keep(number), f"tablets-{number}")  # type: ignore[misc]

    async def _keep(self, number: int) -> None:
        """Keep a server running under that number: start another one when it ends."""
        pause_s = _PAUSE_S
        while not self.ending:
            began = trio.current_time()
            try:
                await self._live(number)
            except OSError as error:  # no descriptors or processes are left: try again later
                log.error("tablet server %d cannot be started: %s", number, error)
            if self.ending:
                return
            if trio.current_time() - began > _YOUNG_S:
                pause_s = _PAUSE_S
                continue
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _live(self, number: int) -> None:
        """Run one server process from its start to its end. Raises: OSError."""
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
        """Start a process, with a stream to it; simulations override this. Raises: OSError."""
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
                self._mould = None  # a copy that comes too late finds the socket closed
                what = str(error) or f"no answer within {_MOULD_S:g} s"
                raise OSError(
                    f"the process that makes tablet servers failed ({what}); the next ones start without it"
                ) from error
        return Command([sys.executable, "-c", _MAIN, str(descriptor), how], pass_fds=given)

    async def serve_by(self, number: int, stream: trio.abc.Stream, process: Child | None = None) -> None:
        """Have the server at the other end of a stream serve tablets, until it ends."""

        async def connect() -> trio.abc.Stream:
            return stream

        link = Link(
            f"tablet server {number}",
            connect,
            lambda: hello(b"", "the owner", ()),
            self._welcomed,
            lambda what, value: self._told(server, what, value),
            control(self._wire, self.options.silence_s, self.options.starts_s),
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
        """Tell a new server what it must know, and give it tablets."""
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
        """Log a server's error, and kill the server: another one may do better."""
        log.error("tablet server %d (process %d): %s", server.number, server.pid, error)
        if server.process is not None:
            server.process.kill()

    def died(self, number: int) -> None:
        """F1: a server has ended: give its tablets to the others."""
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
        """A tablet that this process reads with `reader`."""
        return ServedTablet(self, table, number, start, stop, groups, reader, resubmit)

    def begin(self, tablet: Tablet) -> None:
        """Let servers have a tablet that the catalogue has recorded."""
        assert isinstance(tablet, ServedTablet)
        if not tablet.begun:
            tablet.begun = True
            self.tablets.append(tablet)
            self._place(tablet)

    def begin_after(self, tablet: Tablet, other: Tablet) -> None:
        """Let servers have `other`, once no server answers for its rows as part of `tablet` (P1)."""
        assert isinstance(tablet, ServedTablet)

        async def begin() -> None:
            await tablet.gone()
            if not self.ending:
                self.begin(other)
                self.on_moved()

        self.background.spawn(begin)

    def abandon(self, tablet: Tablet) -> None:
        """Close a tablet that servers have not been allowed to have."""
        assert isinstance(tablet, ServedTablet)
        assert not tablet.begun
        tablet.close()

    def _place_all(self) -> None:
        for tablet in self.tablets:
            if tablet.server is None and not tablet.resting:
                self._place(tablet)

    def _place(self, tablet: ServedTablet) -> None:
        """Give a tablet to the server that has the fewest tablets."""
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
            self.told(NOTIFIED)  # N8: the former server may have ended before it reported notify cells

    async def _place_later(self, tablet: ServedTablet) -> None:
        """After a pause, try again to place a tablet that could not be opened."""
        await trio.sleep(min(_PAUSE_S * 2**tablet.failures, _PAUSE_MAX_S))
        tablet.failures += 1
        tablet.resting = False
        if tablet.server is None:
            self._place(tablet)

    def _unplace(self, tablet: ServedTablet) -> None:
        tablet.server = None
        if tablet.placed.is_set():  # otherwise tasks go on waiting for the same event
            tablet.placed = trio.Event()
        self.moves += 1

    async def a_moment(self) -> None:
        """Pause before the next search for a tablet."""
        await trio.sleep(_PAUSE_S / 10)

    async def balance(self) -> None:
        """Move tablets until no server has two more than another."""
        if self._balancing.statistics().tasks_waiting:
            return  # the call that waits looks at all tablets
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
        """Move a tablet from its server to another one; calls wait meanwhile."""
        former = tablet.server
        assert former is not None, "a tablet without a server is placed, not moved"
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
        """By table: the first row of each tablet, and the number of its server (NOBODY: none)."""
        found: dict[str, list[tuple[bytes, int]]] = {}
        for tablet in self.tablets:
            found.setdefault(tablet.table, []).append((tablet.start, tablet.server.number if tablet.server else NOBODY))
        return {table: sorted(tablets) for table, tablets in found.items()}

    async def servers(self) -> list[TabletsOf]:
        """All servers, and the tablets that they have, as they report them."""
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
        """F3: tell the servers that a session has begun."""
        self._sessions.add(ticket)
        self._tell(Order.SESSIONS, ((ticket,), ()))

    def session_ended(self, ticket: str) -> None:
        """F3: tell the servers that a session has ended, before anything that it holds is released."""
        self._sessions.discard(ticket)
        self._tell(Order.SESSIONS, ((), (ticket,)))

    def session_held(self, ticket: str) -> None:
        """R10: have the servers let the session's connections be silent for another `silence_s`."""
        self._tell(Order.EXCUSE, ticket)

    def _tell(self, order: Order, arguments: Any) -> None:
        for server in self.all.values():
            server.link.tell(order, arguments)

    async def listen(self, address: Address, token: bytes | None, certificate: str, key: str) -> None:
        """Have servers listen beside the owner: at its path with their number appended, or at the ports that follow its
        port."""
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
        """By server number: the port at which the server listens beside an address; for a Unix socket, the server's
        number."""
        found = {}
        for number, server in self.all.items():
            if address in server.ports:
                found[number] = server.ports[address] or number
        return found

    # ------------------------------------------------------------ the end

    async def aclose(self) -> None:
        """Have the servers answer calls in flight, and exit."""
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
    """A function that reacts to the messages of tablet servers, or of direct clients (N7, N8)."""
    acts = {NOTIFIED: notified, QUIET: quiet}

    def told(what: int) -> None:
        act = acts.get(what)
        if act is not None:
            act()

    return told
