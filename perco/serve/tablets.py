"""A tablet server: a process that has some of a served store's tablets open, for its owner and for clients.

A tablet server reads rows and applies mutations; it does not know about transactions. The owner starts it, decides
which tablets it has, and kills it when it falls silent. Clients ask the owner for everything else: timestamps,
sessions, claims on rows for their observers.

    python -m perco.serve.tablets FD HOW        FD: the socket over which the owner gives orders; HOW: `Serving` in JSON

F1  Opening a tablet for writing raises its epoch, so a process that had opened it before can no longer write to it.
F2  If the server is asked for a row that it does not have (any more), it does nothing and answers `NOT_HERE`. It is
    then safe to ask another server.
F3  The server serves only clients that present the ticket of a session with the owner. If the session ends, or releases
    anything, the owner declares the ticket void, before the vacuum removes anything that could have been read with the
    ticket (R5, G2).
F4  The server ends with its owner: the socket closes and, even if the server is stopped (SIGSTOP), the kernel kills it.
    Until then, the server keeps the owner's lock on the folder, so no other process can own the folder.
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
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple, dataclass, replace
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
from perco.serve.held_tablet import Held, NotHereError, Tablets, act, answer_held, end_held, no_more, resubmit
from perco.serve.messages import (
    DROPPED,
    LOST,
    NOT_HERE,
    NOTIFIED,
    QUIET,
    UNREADABLE,
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
    Tablet,
    Verdict,
)
from perco.storage.call import Call
from perco.storage.fencing import Fenced
from perco.storage.folder import tablet_path
from perco.storage.handover import Handover
from perco.storage.rowstore import read_first_of, scan_within
from perco.txn.background import Background

log: logging.Logger = logging.getLogger("perco.serve")

_NOTICED_S: Final = 2.0
_OWNER_SILENCE_S: Final = 60.0  # long, because the owner's end is noticed at once


class TabletServer(Door[str]):
    """Loop thread only.

    Args:
        opened: opens a tablet for writing: (table, number, first row, groups, floor) -> (the tablet, its epoch).
    """

    tablets: Tablets
    stopping: trio.Event

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
        self._news: set[int] = set()  # messages for the owner
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
        """Follow the owner's orders until the owner is gone. Raises: as `Channel.run`."""
        channel = Channel(stream, control(self._options, _OWNER_SILENCE_S, _OWNER_SILENCE_S))
        read_hello(await channel.greeting(alone=True))
        await channel.greet(welcome(True, True, {}))
        stop = self._background.start(self._flusher.run, "flusher")
        self._owner = Peer(channel, self._options, self._order, "the owner")
        try:
            await self._owner.run()
        finally:
            self._owner = None
            stop()

    def _let_in(self, name: str, held: Sequence[int], number: int) -> tuple[str, Message]:
        if name not in self._sessions:  # F3
            raise Unavailable("the store's owner has not announced that client to this tablet server")
        return name, welcome(False, True, {})

    def _noticed(self, error: PercoError) -> int:
        # Unavailable: the client's greeting came before the owner's announcement of its session.
        return logging.DEBUG if isinstance(error, Unavailable) else logging.WARNING

    def _begun(self, peer: Peer, who: str, number: int) -> bool:
        return True  # nothing depends on the order of a client's greetings

    def _ended(self, peer: Peer, who: str) -> None:
        """Nothing is kept for a client."""

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
            except NotHereError:
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
        if not call.waiting:  # a tablet in memory answers at once
            told(call.verdicts)  # type: ignore[arg-type]

    def _of_all_rows(self, mutation: Mutation) -> Held | None:
        found = {id(held): held for held in (self.tablets.of(mutation.table, row) for row, _, _ in mutation.rows)}
        [first, *others] = found.values()
        if first is not None and first.cut is not None and any(row >= first.cut for row, _, _ in mutation.rows):
            return None  # P1
        return None if others else first

    def _tell(self, what: int) -> None:
        """Notify the owner; messages that wait are merged into one (N7, N8)."""
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
        """R10: let the connections of a session's client be silent for `silence_s` again, because the client is known
        to be alive."""
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
            raise NotHereError
        return held

    async def _close(self, which: Any) -> bool:
        held = self._held(*which)
        self.tablets.remove(held)  # F2: nothing more is queued
        await end_held(held)
        return True

    def _drop(self, held: Held) -> None:
        """F1: close a tablet that another process has taken over."""
        if held in self.tablets.every():
            log.warning("a tablet of %s has been taken over by another process", held.tablet.table)
            self.tablets.remove(held)
            self._background.spawn(lambda: self._dropped(held))

    async def _dropped(self, held: Held) -> None:
        await end_held(held)
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
        return (await self._held(table, number).tablet.middle(stop),)  # None alone would mean `NOT_HERE`

    async def _copy(self, order: Any) -> int:
        table, number, split, row, stop, path, groups = order
        held = self._held(table, number)
        return int(await act(held, split, lambda: held.tablet.copy_from(row, stop, Path(path), groups)))

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

        await act(held, split, cut)
        return True

    async def _uncut(self, order: Any) -> bool:
        table, number, split, stop = order
        held = self._held(table, number)
        async with no_more(held, split):
            held.cut, held.stop = None, stop
            await held.tablet.uncut()
        return True

    async def _let_go(self, order: Any) -> bool:
        table, number, row = order
        held = self._held(table, number)
        held.cut, held.stop = None, row
        answer_held(held)
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
        """Answer calls in flight, close all tablets, and stop."""
        await self._listening.aclose()
        for held in self.tablets.every():
            await self._close((held.tablet.table, held.number))
        self.stopping.set()


def _reading(asked: Callable[[Peer, int, Any], None], peer: Peer, id: int, arguments: Any, method: int) -> None:
    try:
        asked(peer, id, arguments)
    except UNREADABLE as error:
        raise WireError(f"method {method}: arguments that cannot be decoded: {error}") from error


# ------------------------------------------------------------------ the process


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """The configuration of a tablet server.

    Attributes:
        folder, owner: the store's folder, and the id of the process that has it open.
        wire, lmdb, batch: options, as dictionaries.
        timeout_s: how long to wait for a disk that does not answer (T10).
    """

    folder: str
    owner: int
    wire: dict[str, Any]
    lmdb: dict[str, Any]
    batch: dict[str, Any]
    timeout_s: float


def control(wire: WireOptions, silence_s: float, starts_s: float) -> WireOptions:
    """Options of the connection between an owner and a tablet server: a stopped side is noticed after `silence_s`, one
    that does not greet after `starts_s`."""
    connect_s = max(wire.connect_s, starts_s)
    return replace(wire, heartbeat_s=min(silence_s, _NOTICED_S) / 8, silence_s=silence_s, connect_s=connect_s)


async def serve(server: TabletServer, background: Background, stream: trio.abc.Stream, timeout_s: float) -> bool:
    """Obey the owner at the other end of a stream. Returns False when the owner is gone; True when the owner has
    ordered the server to stop."""

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
        os._exit(1)  # F4: nothing that is still uncommitted has been acknowledged
    await background.aclose()


def _failed(background: Background) -> None:
    """Exit after a bug: the owner starts another server."""
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
        """Open a tablet in a thread, because this waits for the disk; one tablet at a time."""

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
            return LmdbTablet(table, start, engine, self._batch, resubmit, self._handover, floor), epoch
        except BaseException:
            engine.close()
            raise


def run(descriptor: int, how: str) -> None:
    """Like `main`, but in a copy of the owner's process."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the owner, which stops the servers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trio.run(_serve, descriptor, Serving(**json.loads(how)))


def main() -> None:
    """See the module."""
    how = json.loads(sys.argv[2])
    die_with(how["owner"])
    run(int(sys.argv[1]), sys.argv[2])


if __name__ == "__main__":
    main()
