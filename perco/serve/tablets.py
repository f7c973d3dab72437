"""A tablet server: a process that has some of a served store's tablets open, for its owner and for clients.

It reads and applies, and knows nothing of transactions. The owner starts it, says which tablets it has, and kills it
when it falls silent. Clients ask the owner for everything else: timestamps, sessions, rows for their observers.

    python -m perco.serve.tablets FD HOW        the socket over which the owner speaks to it; `Serving` in JSON

F1  Opening a tablet for writing raises its epoch, so that a process that had it before writes nothing any more.
F2  For a row that it does not have (any more) it does nothing and answers `NOT_HERE`: then asking elsewhere is safe.
F3  It serves clients that show the ticket of a session with the owner. When that ends, or lets go of anything, the
    owner says that the ticket is void before anything is collected that could have been read with it (R5, G2).
F4  It ends with its owner: the socket closes, and the kernel kills it if it is stopped. Until then it keeps the
    owner's lock on the folder, so no other process can own the folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import trio

from perco.errors import PercoError, SessionEnded, StoreError, Unavailable
from perco.rpc.addresses import Address
from perco.rpc.channel import Channel, Silent, WireOptions
from perco.rpc.framing import Message, WireError
from perco.rpc.peer import Peer
from perco.serve.children import die_with
from perco.serve.door import Door
from perco.serve.messages import (
    DROPPED,
    LOST,
    NOT_HERE,
    NOTIFIED,
    QUIET,
    Method,
    Order,
    pack_verdict,
    read_hello,
    read_mutations,
    read_scan,
    welcome,
)
from perco.storage import (
    NOTIFY,
    BatchOptions,
    Failed,
    LmdbEngine,
    LmdbOptions,
    LmdbTablet,
    Mutation,
    ScanRequest,
    Tablet,
    Verdict,
)
from perco.storage.call import Call
from perco.storage.folder import tablet_path
from perco.storage.handover import Handover
from perco.storage.lmdb_engine import Fenced, NotHere
from perco.storage.rowstore import read_first_of, scan_within
from perco.txn.background import Background

log = logging.getLogger("perco.serve")

_NOTICED_S: Final = 2.0
_OWNER_SILENCE_S: Final = 60.0  # its end is noticed at once


@dataclass(eq=False, slots=True)
class Held:
    """A tablet that this server has: its rows go from `tablet.start` to before `stop` (None: to the end). `cut`: what
    lies from there on is not written to any more, for it is about to be another tablet's (P1)."""

    tablet: Tablet
    number: int
    stop: bytes | None
    cut: bytes | None = None
    void: int = 0  # splits up to this one are not to be
    acting: trio.CancelScope | None = None  # while it is copied from, or cut
    alone: trio.Lock = field(default_factory=trio.Lock)  # one of these at a time


class Tablets:
    """Those that are here, by table and row."""

    def __init__(self) -> None:
        self._starts: dict[str, list[bytes]] = {}
        self._held: dict[str, list[Held]] = {}

    def add(self, held: Held) -> None:
        table = held.tablet.table
        starts, all_of_it = self._starts.setdefault(table, []), self._held.setdefault(table, [])
        at = bisect_left(starts, held.tablet.start)
        starts.insert(at, held.tablet.start)
        all_of_it.insert(at, held)

    def remove(self, held: Held) -> None:
        table = held.tablet.table
        at = self._held[table].index(held)
        del self._starts[table][at], self._held[table][at]

    def every(self) -> list[Held]:
        return [held for tablets in self._held.values() for held in tablets]

    def numbered(self, table: str, number: int) -> Held | None:
        return next((held for held in self._held.get(table, ()) if held.number == number), None)

    def of(self, table: str, row: bytes) -> Held | None:
        """The tablet with a row, if it is here."""
        starts = self._starts.get(table)
        if not starts:
            return None
        at = bisect_right(starts, row) - 1
        if at < 0:
            return None
        held = self._held[table][at]
        return held if held.stop is None or row < held.stop else None

    def scanned(self, request: ScanRequest) -> Held | None:
        """The tablet in which a scan begins."""
        if not request.reverse:
            return self.of(request.table, request.start)
        tablets = self._held.get(request.table, [])
        for held in reversed(tablets):
            if request.stop is None:
                return held if held.stop is None else None
            if held.tablet.start < request.stop:
                return held if held.stop is None or request.stop <= held.stop else None
        return None


class _NotHereError(Exception):
    """An order for a tablet that this server does not have."""


class TabletServer(Door[str]):
    """Loop thread only.

    Args:
        opened: opens a tablet for writing: (table, number, first row, groups, floor) -> (it, its epoch).
    """

    def __init__(
        self,
        background: Background,
        options: WireOptions,
        opened: Callable[[str, int, bytes, Sequence[str], int], Awaitable[tuple[Tablet, int]]],
    ) -> None:
        super().__init__(background, options)
        self.tablets = Tablets()
        self.stopping = trio.Event()
        self._opened = opened
        self._sessions: set[str] = set()
        self._owner: Peer | None = None
        self._news: set[int] = set()  # for the owner
        self._listening = AsyncExitStack()
        self._asked: dict[int, Callable[[Peer, int, Any], None]] = {
            Method.READ: self._read,
            Method.SCAN: self._scan,
            Method.APPLY: self._apply,
        }
        self._ordered: dict[int, Callable[[Any], Awaitable[Any]]] = {
            Order.OPEN: self._open,
            Order.CLOSE: self._close,
            Order.GROUPS: self._groups,
            Order.FLOOR: self._floor,
            Order.REPACK: self._repack,
            Order.LISTEN: self._listen,
            Order.STATISTICS: self._statistics,
            Order.MIDDLE: self._middle,
            Order.COPY: self._copy,
            Order.CUT: self._cut,
            Order.UNCUT: self._uncut,
            Order.LET_GO: self._let_go,
            Order.REMOVE: self._remove,
            Order.STOP: self._stop,
        }

    # ------------------------------------------------------------ owner and clients

    async def obey(self, stream: trio.abc.Stream) -> None:
        """Follow the owner's orders until it is gone. Raises: as `Channel.run`."""
        channel = Channel(stream, control(self._options, _OWNER_SILENCE_S))
        read_hello(await channel.greeting(alone=True))
        await channel.greet(welcome(True, True, {}))
        stop = self._background.start(self._flusher.run, "flusher")
        self._owner = Peer(channel, self._options, self._order, "the owner")
        try:
            await self._owner.run()
        finally:
            self._owner = None
            stop()

    def _let_in(self, name: str, held: Sequence[int]) -> tuple[str, Message]:
        if name not in self._sessions:  # F3
            raise Unavailable("the store's owner has not told this tablet server of that client")
        return name, welcome(False, True, {})

    def _noticed(self, error: PercoError) -> int:
        return logging.DEBUG if isinstance(error, Unavailable) else logging.WARNING  # it was quicker than the owner

    def _begun(self, peer: Peer, who: str) -> None:
        """Its calls come."""

    def _ended(self, peer: Peer, who: str) -> None:
        """Nothing is kept for it."""

    def _replaces(self, name: str) -> bool:
        return False

    def _handle(self, peer: Peer, id: int, method: int, arguments: Any) -> None:
        if self._serving.get(peer) not in self._sessions:  # F3
            raise SessionEnded("the store's owner has ended this client's session")
        asked = self._asked.get(method)
        if asked is None:
            raise WireError(f"there is no method {method} of a tablet server")
        _reading(asked, peer, id, arguments, method)

    def _order(self, peer: Peer, id: int, method: int, arguments: Any) -> None:
        if method == Order.SESSIONS:
            self._told_sessions(*arguments)
            return
        if method == Order.EXCUSE:
            self._excuse(arguments)
            return
        ordered = self._ordered.get(method)
        if ordered is None:
            _reading(self._asked[method], peer, id, arguments, method)
            return

        async def run() -> None:
            try:
                peer.reply(id, await ordered(arguments))
            except _NotHereError:
                peer.reply(id, NOT_HERE)
            except Exception as error:
                peer.fail(id, error)
            if self.stopping.is_set():
                peer.channel.close_soon()

        self._background.spawn(run)

    # ------------------------------------------------------------ rows

    def _read(self, peer: Peer, id: int, requests: Any) -> None:
        found = read_first_of(requests, self._options.part_bytes, self._tablet_of)
        peer.reply(id, NOT_HERE if found is None else found)

    def _tablet_of(self, table: str, row: bytes) -> Tablet | None:
        held = self.tablets.of(table, row)
        return held.tablet if held is not None else None

    def _scan(self, peer: Peer, id: int, packed: Any) -> None:
        request = read_scan(packed)
        held = self.tablets.scanned(request)
        if held is None:
            peer.reply(id, NOT_HERE)
            return
        page = scan_within(held.tablet, held.stop, request)
        peer.reply(id, (page.rows, page.next))

    def _apply(self, peer: Peer, id: int, packed: Any) -> None:
        mutations = read_mutations(packed)
        found = [self._of_all_rows(mutation) for mutation in mutations]
        if None in found:  # F2: before anything is queued
            peer.reply(id, NOT_HERE)
            return
        notify = [
            write for mutation in mutations for _, _, writes in mutation.rows for write in writes if write[0] == NOTIFY
        ]
        notifies = any(write[3] is not None for write in notify)

        def told(verdicts: Sequence[Verdict]) -> None:
            packed = [pack_verdict(verdict) for verdict in verdicts]
            peer.reply(id, packed)
            if notify:
                self._tell(NOTIFIED if notifies else QUIET)
            if LOST in packed:
                for held, verdict in zip(found, verdicts, strict=True):
                    if isinstance(verdict, Failed) and isinstance(verdict.error, Fenced) and held is not None:
                        self._drop(held)

        call = Call(None, len(mutations), told)
        for index, (mutation, held) in enumerate(zip(mutations, found, strict=True)):
            assert held is not None
            held.tablet.submit(mutation, call, index)
        if not call.waiting:  # memory answers at once
            told(call.verdicts)  # type: ignore[arg-type]

    def _of_all_rows(self, mutation: Mutation) -> Held | None:
        found = {id(held): held for held in (self.tablets.of(mutation.table, row) for row, _, _ in mutation.rows)}
        [first, *others] = found.values()
        if first is not None and first.cut is not None and any(row >= first.cut for row, _, _ in mutation.rows):
            return None  # P1
        return None if others else first

    def _tell(self, what: int) -> None:
        """The owner; several things at once (N7, N8)."""
        if not self._news:
            trio.lowlevel.current_trio_token().run_sync_soon(self._tell_now)
        self._news.add(what)

    def _tell_now(self) -> None:
        news, self._news = self._news, set()
        if self._owner is not None:
            self._owner.push(NOTIFIED if NOTIFIED in news else QUIET, None)

    # ------------------------------------------------------------ what the owner orders

    def _told_sessions(self, began: Iterable[str], ended: Iterable[str]) -> None:
        self._sessions.update(began)
        gone = set(ended)
        self._sessions -= gone
        for peer, name in list(self._serving.items()):
            if name in gone:
                peer.channel.close_soon()

    def _excuse(self, ticket: str) -> None:
        """R10: the loop of that session's client is held."""
        for peer, name in self._serving.items():
            if name == ticket:
                peer.channel.excuse()

    async def _open(self, order: Any) -> int:
        table, number, start, stop, groups, floor = order
        tablet, epoch = await self._opened(table, number, start, groups, floor)
        self.tablets.add(Held(tablet, number, stop))
        return epoch

    def _held(self, table: str, number: int) -> Held:
        held = self.tablets.numbered(table, number)
        if held is None:
            raise _NotHereError
        return held

    async def _close(self, which: Any) -> bool:
        held = self._held(*which)
        self.tablets.remove(held)  # F2: nothing more is queued
        await _end(held)
        return True

    def _drop(self, held: Held) -> None:
        """F1: somebody else has it."""
        if held in self.tablets.every():
            log.warning("a tablet of %s has been taken over by another process", held.tablet.table)
            self.tablets.remove(held)
            self._background.spawn(lambda: self._dropped(held))

    async def _dropped(self, held: Held) -> None:
        await _end(held)
        if self._owner is not None:
            self._owner.push_each(DROPPED, (held.tablet.table, held.number))

    async def _groups(self, order: Any) -> bool:
        table, number, groups = order
        await self._held(table, number).tablet.add_groups(groups)
        return True

    async def _floor(self, order: Any) -> bool:
        table, number, ts = order
        await self._held(table, number).tablet.raise_floor(ts)
        return True

    async def _repack(self, order: Any) -> tuple[bytes | None, bool]:
        table, number, group, start, skip = order
        return await self._held(table, number).tablet.repack(group, start, skip)

    # ------------------------------------------------------------ splitting

    async def _middle(self, order: Any) -> tuple[bytes | None]:
        table, number, stop = order
        return (await self._held(table, number).tablet.middle(stop),)  # None alone would be `NOT_HERE`

    async def _copy(self, order: Any) -> int:
        table, number, split, row, stop, path, groups = order
        held = self._held(table, number)
        return int(await _act(held, split, lambda: held.tablet.copy_from(row, stop, Path(path), groups)))

    async def _cut(self, order: Any) -> bool:
        table, number, split, row = order
        held = self._held(table, number)

        async def cut() -> None:
            held.cut = row
            try:
                await held.tablet.cut(row)
            except BaseException:
                held.cut = None
                raise

        await _act(held, split, cut)
        return True

    async def _uncut(self, order: Any) -> bool:
        table, number, split, stop = order
        held = self._held(table, number)
        async with _no_more(held, split):
            held.cut, held.stop = None, stop
            await held.tablet.uncut()
        return True

    async def _let_go(self, order: Any) -> bool:
        table, number, row = order
        held = self._held(table, number)
        held.cut, held.stop = None, row
        _answer_held(held)
        return True

    async def _remove(self, order: Any) -> bool:
        table, number, row = order
        return await self._held(table, number).tablet.remove_from(row)

    async def _statistics(self, _: Any) -> list[Any]:
        return [(held.number, *astuple(held.tablet.statistics())) for held in self.tablets.every()]

    async def _listen(self, order: Any) -> int:
        path, host, port, secure, ours, token, certificate, key = order
        tls = (certificate, key) if secure else None
        wanted = Address(Path(path) if path else None, host, port, secure)
        try:
            listening = self.listening(wanted, token or None, tls, ours=ours)
            return (await self._listening.enter_async_context(listening)).port
        except StoreError as error:
            if path:
                raise
            log.warning("%s: taking another port", error)
        listening = self.listening(wanted._replace(port=0), token or None, tls)
        return (await self._listening.enter_async_context(listening)).port

    async def _stop(self, _: Any) -> None:
        """What was asked for is answered first."""
        await self._listening.aclose()
        for held in self.tablets.every():
            await self._close((held.tablet.table, held.number))
        self.stopping.set()


def _reading(asked: Callable[[Peer, int, Any], None], peer: Peer, id: int, arguments: Any, method: int) -> None:
    try:
        asked(peer, id, arguments)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise WireError(f"method {method}: arguments that do not read: {error}") from error


async def _act(held: Held, split: int, act: Callable[[], Awaitable[Any]]) -> Any:
    """A step of a split, unless it is not to be. Orders take tasks of their own, so a later one may come first."""
    async with held.alone:
        if split > held.void:
            with trio.CancelScope() as held.acting:
                return await act()
    raise Unavailable(f"a tablet of {held.tablet.table!r} is not to be split after all")


@contextlib.asynccontextmanager
async def _no_more(held: Held, split: int) -> AsyncIterator[None]:
    """Splits up to that one do nothing any more, and nothing of them is under way."""
    held.void = max(held.void, split)
    if held.acting is not None:
        held.acting.cancel()
    async with held.alone:
        yield


def _answer_held(held: Held) -> None:
    """Send callers that were held during the cut elsewhere (F2)."""
    gone = Failed(NotHere(f"a tablet of {held.tablet.table!r} was split"))
    for _, call, index in held.tablet.let_go():
        call.arrived(index, gone, _resubmit)


async def _end(held: Held) -> None:
    async with _no_more(held, sys.maxsize):
        if held.cut is None:
            await held.tablet.uncut()
        else:
            _answer_held(held)  # P1: what it would still write may not be in the copy
    tablet = held.tablet
    await tablet.drain()
    tablet.refuse()
    await tablet.aclose()


# ------------------------------------------------------------------ the process


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """How a tablet server serves.

    Attributes:
        folder, owner: the store's, and the process that has it open.
        wire, lmdb, batch: options, as they are.
        timeout_s: how long a disk that does not answer is waited for (T10).
    """

    folder: str
    owner: int
    wire: dict[str, Any]
    lmdb: dict[str, Any]
    batch: dict[str, Any]
    timeout_s: float


def control(wire: WireOptions, silence_s: float) -> WireOptions:
    """Options of the connection between an owner and a tablet server: a stopped side is noticed after `silence_s`."""
    return replace(wire, heartbeat_s=min(silence_s, _NOTICED_S) / 8, silence_s=silence_s)


async def serve(server: TabletServer, background: Background, stream: trio.abc.Stream, timeout_s: float) -> bool:
    """Obey the owner at the other end of a stream until it is gone, or orders the end; returns which."""

    async def watch_disk() -> None:
        while True:
            await trio.sleep(timeout_s / 4)
            for held in server.tablets.every():
                held.tablet.expire(timeout_s)

    background.start(watch_disk, "disk")
    with contextlib.suppress(OSError, WireError, Silent, trio.BrokenResourceError, trio.ClosedResourceError):
        await server.obey(stream)
    return server.stopping.is_set()


async def _serve(descriptor: int, serving: Serving) -> None:
    background = Background()
    server = TabletServer(background, WireOptions(**serving.wire), _Opener(serving).open)
    background.on_failure.append(lambda: _failed(background))
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=descriptor)))
    if not await serve(server, background, stream, serving.timeout_s):
        os._exit(1)  # F4: nobody has been told of what is not committed by now
    await background.aclose()


def _failed(background: Background) -> None:
    """Of a bug: the owner starts another one."""
    log.critical("a tablet server failed", exc_info=background.failure())
    os._exit(1)


class _Opener:
    """Opens tablets of a folder."""

    def __init__(self, serving: Serving) -> None:
        self._folder = Path(serving.folder)
        self._lmdb, self._batch = LmdbOptions(**serving.lmdb), BatchOptions(**serving.batch)
        self._handover = Handover()
        self._one = trio.CapacityLimiter(1)

    async def open(
        self, table: str, number: int, start: bytes, groups: Sequence[str], floor: int
    ) -> tuple[Tablet, int]:
        """Beside the loop, for it waits for the disk; one at a time."""

        def take_over() -> tuple[LmdbEngine, int]:
            engine = LmdbEngine(tablet_path(self._folder, table, number), groups, self._lmdb, readonly=False, lock=True)
            try:
                engine.clear_dead_readers()
                return engine, engine.take_over()
            except BaseException:
                engine.close()
                raise

        with trio.CancelScope(shield=True):
            engine, epoch = await trio.to_thread.run_sync(take_over, limiter=self._one)
        try:
            return LmdbTablet(table, start, engine, self._batch, _resubmit, self._handover, floor), epoch
        except BaseException:
            engine.close()
            raise


def _resubmit(mutations: Sequence[Mutation], call: Call) -> None:
    raise AssertionError("a client's call goes on with the client")


def run(descriptor: int, how: str) -> None:
    """As `main`; in a copy of the owner's process."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the owner, who says what to do
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trio.run(_serve, descriptor, Serving(**json.loads(how)))


def main() -> None:
    """See the module."""
    how = json.loads(sys.argv[2])
    die_with(how["owner"])
    run(int(sys.argv[1]), sys.argv[2])


if __name__ == "__main__":
    main()
