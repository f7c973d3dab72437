"""Accepts connections: greets clients, admits them or turns them away, and passes on their calls.

The subclasses decide which clients to admit, and which calls these clients may make: `Server` for a store's owner, and
`TabletServer`.
"""

from __future__ import annotations

import hmac
import logging
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, TypeVar

import trio

from perco.errors import PercoError, Unavailable, UsageError
from perco.rpc import addresses
from perco.rpc.addresses import NOWHERE, Address
from perco.rpc.channel import Channel, Flusher, Silent, WireOptions
from perco.rpc.framing import Message, WireError
from perco.rpc.peer import Peer
from perco.serve.messages import Hello, check_version, read_hello, turned_away, wrong_token
from perco.txn.background import Background

log: logging.Logger = logging.getLogger("perco.serve")

_DRAIN_S: Final = 10.0

Who = TypeVar("Who")


async def can_listen(address: Address, tls: tuple[str, str] | None) -> None:
    """Check that a server could listen at an address now. Raises: as `Door.listening`."""
    _secured(address, tls)
    async with addresses.listening(address):
        pass


def _secured(address: Address, tls: tuple[str, str] | None) -> ssl.SSLContext | None:
    if (tls is None) if address.tls else not address.on_this_host:
        if address.tls:
            raise UsageError(f"{address}: TLS needs a certificate and its key (--tls-cert, --tls-key)")
        raise UsageError(
            f"{address} can be reached from elsewhere: give a certificate and its key (--tls-cert, --tls-key), or "
            "listen on localhost, or on a Unix socket"
        )
    return _certified(*tls) if tls is not None and address.tls else None


def _certified(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key or None)
    except OSError as error:
        raise UsageError(f"the certificate {certificate} cannot be used: {error}") from error
    return context


class Door(ABC, Generic[Who]):
    """Loop thread only. `Who`: the record that the server keeps of a client."""

    def __init__(self, background: Background, options: WireOptions) -> None:
        self._background, self._options = background, options
        self._connections = 0
        self._pulses = 0  # connections of clients' pulses
        self._flusher = Flusher()
        self._draining = False
        self._serving: dict[Peer, Who] = {}

    @abstractmethod
    def _let_in(self, name: str, held: Sequence[int], number: int) -> tuple[Who, Message] | None:
        """Greet a client whose token is right. None: the client has sent a later greeting, over another connection.
        Raises: PercoError, the reason for turning the client away."""

    def _let_in_pulse(self, name: str, channel: Channel) -> tuple[Callable[[list[Message]], None], Message]:
        """Greet a client's pulse (R10). Returns (the function to call with the pulse's messages, the greeting).

        Raises: PercoError, the reason for turning the pulse away.
        """
        raise UsageError("a tablet server takes no pulses; they are for the store's owner")

    def _pulse_ended(self, name: str, channel: Channel) -> None:
        """Called when a pulse's connection has ended."""

    @abstractmethod
    def _begun(self, peer: Peer, who: Who, number: int) -> bool:
        """Called when a client has been greeted, before its first call. `number`: of its greeting. Returns False if the
        client has sent a later one meanwhile."""

    @abstractmethod
    def _ended(self, peer: Peer, who: Who) -> None:
        """Called when a client's connection has ended."""

    @abstractmethod
    def _handle(self, peer: Peer, id: int, method: int, arguments: Any) -> None:
        """Handle a call; see `Peer`."""

    @abstractmethod
    def _replaces(self, name: str) -> bool:
        """Whether that client already has a connection, which the new one will replace."""

    @asynccontextmanager
    async def listening(
        self,
        address: Address,
        token: bytes | None = None,
        tls: tuple[str, str] | None = None,
        *,
        ours: bool = False,
    ) -> AsyncIterator[Address]:
        """Serve clients at an address while the block lasts; when it ends, calls in flight are answered first. Yields
        the bound address.

        Args:
            token: clients must present it; None: every client that reaches the socket is admitted.
            tls: files of a certificate and its key, for an address with TLS.
            ours: no other program can serve at that path: a file there is replaced.

        Raises: StoreError if it cannot listen; UsageError for a certificate that cannot be used.
        """
        if token is None and address.path is None:
            raise UsageError(f"{address}: a server on a port needs the store's token")
        secure = _secured(address, tls)
        async with addresses.listening(address, ours=ours) as (bound, listeners):

            async def handle(stream: trio.abc.Stream) -> None:
                if secure is not None:
                    stream = trio.SSLStream(stream, secure, server_side=True)
                await self.connection(stream, token, bound)

            async def serve() -> None:
                async with trio.open_nursery() as nursery:
                    await trio.serve_listeners(handle, list(listeners), handler_nursery=nursery)

            stop = self._background.start(serve, f"server-{bound}")
            try:
                yield bound
            finally:
                with trio.move_on_after(_DRAIN_S, shield=True):
                    await self._drain()
                stop()

    async def _drain(self) -> None:
        """Wait until all calls are answered, and close the connections."""
        self._draining = True
        try:
            self._end_waits()
            for peer in list(self._serving):
                await peer.answered()
                peer.channel.close_soon()
                await peer.channel.closed.wait()
        finally:
            self._draining = False

    def _noticed(self, error: PercoError) -> int:
        """The log level of the message that a client was turned away."""
        return logging.WARNING

    def _end_waits(self) -> None:
        """Answer at once the calls that wait for something."""

    async def connection(self, stream: trio.abc.Stream, token: bytes | None, at: Address = NOWHERE) -> None:
        """Serve one connection until it ends. `at`: the address at which it came in. Raises nothing."""
        self._connections += 1
        try:
            async with stream:
                await self._talk(Channel(stream, self._options, self._flusher.soon, maps=False), token, at)
        except (OSError, WireError, Silent, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            level = logging.WARNING if isinstance(error, WireError) else logging.INFO
            log.log(level, "a connection ended: %s", error or type(error).__name__)
        except Exception:
            log.exception("a connection ended: this is a bug in perco")  # other connections are not affected
        finally:
            self._connections -= 1

    async def _talk(self, channel: Channel, wanted: bytes | None, at: Address) -> None:
        with trio.move_on_after(self._options.connect_s) as scope:
            said = read_hello(await channel.greeting(alone=True))
            try:
                self._check(said, wanted)
                if said.pulse:
                    hear, welcome = self._let_in_pulse(said.session, channel)
                else:
                    let_in = self._let_in(said.session, said.held, said.number)
                    if let_in is None:
                        return
                    who, welcome = let_in
            except PercoError as error:
                log.log(self._noticed(error), "a client was refused: %s", error)
                await channel.greet(turned_away(error))
                return
            await channel.greet(welcome)
        if scope.cancelled_caught:
            return
        if said.pulse:
            self._pulses += 1
            try:
                await channel.run(hear, lambda: None)
            finally:
                self._pulses -= 1
                self._pulse_ended(said.session, channel)
            return
        peer = Peer(channel, self._options, self._handle, said.session)
        peer.at = at
        if not self._begun(peer, who, said.number):
            return
        self._serving[peer] = who
        try:
            await peer.run()
        finally:
            self._serving.pop(peer, None)  # absent if its client already has another connection
            self._ended(peer, who)

    def _check(self, said: Hello, wanted: bytes | None) -> None:
        """Check a client's version and token, and whether there is room for its connection. Raises: VersionMismatch,
        WrongToken, Unavailable."""
        mismatch = check_version(said.version)
        if mismatch is not None:
            raise mismatch
        if wanted is not None and not hmac.compare_digest(said.token, wanted):
            raise wrong_token(bool(said.token))
        if said.pulse:
            return  # R10: the limit does not count pulses
        if self._connections - self._pulses - self._replaces(said.session) > self._options.connections_max:
            raise Unavailable(
                f"this server has {self._options.connections_max} connections already; close some, or allow more "
                "(WireOptions.connections_max, perco serve --connections)"
            )
