"""Messages over one stream, in both directions; all waiting messages leave in one frame.

    send(message)  ->  waiting  ->  one frame  ->  stream
    stream  ->  frames  ->  `run`'s `received(messages)`

Messages that are queued while a frame is on its way leave in the next frame. Without load, a message leaves at once;
under load, frames grow up to `frame_messages`, and both ends work at the same time: one on this frame, the other on the
next. No message waits here for others to join it: delay windows come earlier (`storage/batching.py`).

R2  Both sides send an empty frame when they have had nothing else to send for `heartbeat_s`. A side that hears nothing
    for `silence_s` treats the connection as dead, so half-open connections end.
R3  A side that does not read holds up only its own connection, which ends after `silence_s`. The number of messages
    that wait for it is limited, because the number of its calls is limited (`peer.py`).
R10 If a side says in another way that it is alive but cannot read, its connection does not end (`excuse`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from perco.errors import TooLarge, UsageError
from perco.rpc.framing import (
    GREETING_BYTES_MAX,
    HEAD_BYTES,
    MESSAGES_MAX,
    FrameDecoder,
    Message,
    WireError,
    frame,
    packed,
    packer,
)
from perco.settings import check_options

_RECEIVE_BYTES = 64 * 1024
_NO_SOCKET = -1
_PACKED_BYTES = 64 * 1024
_REMEDY = "Ask for less at a time, or write less to one tablet in a transaction."
_GREETING_BYTES_MAX = GREETING_BYTES_MAX + HEAD_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class WireOptions:
    """Attributes:
    message_bytes_max: the largest call or reply: a value of 8 MiB fits, with its overhead.
    frame_bytes: a frame is sent as soon as it holds this many bytes; data that is too long for one message is sent in
        several.
    frame_messages: a frame is also sent as soon as it holds this many messages. The other side works on them while the
        next frame is on its way; with one large frame for all, one of the two processes would always wait.
    heartbeat_s: a side sends something at least this often; silence_s: after a silence of this length, the other side
        treats the connection as dead.
    calls_max: calls of one connection in flight at a server; at this limit, the server reads no more calls until some
        have been answered.
    waiting_bytes_max: bytes of replies that wait for one connection; above this limit, too, the server neither begins
        nor reads further calls of the connection.
    connect_s: how long connecting and the greeting may take.
    patience_s: how long a call waits for a server that is away, before Unavailable.
    lease_s: how long a client that is not heard from keeps what it holds: its snapshots, locks and claims.
    connections_max: connections that a server serves at a time.
    ca_file: a file with the certificates against which a tls:// server's certificate is checked, or these certificates
        as PEM; "": the system's.
    """

    message_bytes_max: int = 24 << 20
    frame_bytes: int = 1 << 20
    frame_messages: int = 32
    heartbeat_s: float = 2.0
    silence_s: float = 10.0
    calls_max: int = 4096
    waiting_bytes_max: int = 32 << 20
    connect_s: float = 5.0
    patience_s: float = 10.0
    lease_s: float = 10.0
    connections_max: int = 1024
    ca_file: str = ""

    @property
    def part_bytes(self) -> int:
        """If data is too long for one message, each part ends once it has this many bytes. A message has room for this
        many bytes and one more value of 8 MiB."""
        return self.message_bytes_max // 3

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 < self.heartbeat_s < self.silence_s:
            what = (
                f"heartbeat_s is {self.heartbeat_s:g}; it must be above 0, and less than silence_s ({self.silence_s:g})"
            )
            raise UsageError(f"WireOptions: {what}")
        if self.frame_bytes > self.message_bytes_max:
            raise UsageError(
                f"WireOptions: frame_bytes is {self.frame_bytes}; it must be at most message_bytes_max "
                f"({self.message_bytes_max})"
            )


class Flusher:
    """Flushes many channels after all tasks that are ready have run, so that all replies that follow from one LMDB
    commit leave in one frame per connection. `run` is a task of its own."""

    def __init__(self) -> None:
        self._due: list[Channel] = []
        self._wake = trio.Event()

    def soon(self, channel: Channel) -> None:
        self._due.append(channel)
        self._wake.set()

    async def run(self) -> None:
        """Flush until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            due, self._due = self._due, []
            for channel in due:
                channel.flush()


class Silent(Exception):
    """Nothing was heard from the other side for too long, or it has not accepted the data sent to it."""


class Channel:
    """Messages over a stream. Loop thread only. `send` may be called at any time; `run` lasts until the other side
    closes the connection or is silent, or the connection breaks.

    A channel reads and writes a socket directly, as soon as the socket is ready, because waiting by way of the stream
    would cost more than the messages. If a socket does not accept all data at once, a task writes the rest; this task
    also writes all data for a stream that is not a socket.

    Args:
        flush_soon: called when a message waits; must ensure that `flush` is called soon. None: the channel sends by
            itself.
        maps: whether messages after the greeting may contain maps of msgpack (dicts).
    """

    closed: trio.Event
    heard: float

    def __init__(
        self,
        stream: trio.abc.Stream,
        options: WireOptions,
        flush_soon: Callable[[Channel], None] | None = None,
        *,
        maps: bool = True,
    ) -> None:
        self._stream, self._options, self._flush_soon, self._maps = stream, options, flush_soon, maps
        self._socket = stream.socket.fileno() if isinstance(stream, trio.SocketStream) else _NO_SOCKET
        self.leaving: Callable[[], None] | None = None  # called before a frame leaves; may call `send_first`
        self._waiting: deque[bytes] = deque()
        self._rest: bytes | memoryview = b""  # the part of a frame that the socket has not accepted
        self._bytes = 0  # waiting, or being sent
        self._wake = trio.Event()
        self._running = self._receiving = self._flushing = False
        self._listening = False  # while we wait for data; otherwise, incoming data stays in the socket
        self._early: list[list[Message]] = []  # frames that arrived right after the greeting
        self._closing = False
        self._failed: OSError | None = None
        self._drained: trio.Event | None = None
        self._taking: trio.CancelScope | None = None  # while a send waits for the other side
        self._decoder = FrameDecoder(_GREETING_BYTES_MAX)
        self._pack = packer()
        self.heard = self._said = trio.current_time()
        self.closed = trio.Event()  # nothing is sent or received any more

    # ------------------------------------------------------------ the greeting

    async def greet(self, message: Message) -> None:
        """Send one message, before `run`."""
        await self._stream.send_all(frame([packed(message)]))

    async def greeting(self, *, alone: bool) -> Message:
        """The other side's first message. It must be small, because that side is not known yet. `alone`: no other
        message may come before the answer.

        Raises: WireError; trio.BrokenResourceError at the end of the stream.
        """
        while True:
            data = await self._stream.receive_some(_GREETING_BYTES_MAX)
            if not data:
                raise trio.BrokenResourceError("the connection ended before a greeting")
            frames = list(self._decoder.feed(data))
            if frames:
                if len(frames[0]) != 1 or (alone and (len(frames) != 1 or self._decoder.inside)):
                    raise WireError("more than a greeting")
                self._early = frames[1:]
                return frames[0][0]

    # ------------------------------------------------------------ both directions

    def send(self, message: Message) -> None:
        """Queue a message. Raises: TooLarge."""
        data = self._pack(message)
        if len(data) > self._options.message_bytes_max:
            raise TooLarge("a call or its reply", len(data), self._options.message_bytes_max, _REMEDY, "bytes")
        if len(data) > _PACKED_BYTES:
            self._pack = packer()  # the old one keeps the memory of its largest message
        self._waiting.append(data)
        self._bytes += len(data)
        if self._receiving:
            self._flushing = True  # once the received frame has been handled
            return
        if self._flush_soon is not None:
            if not self._flushing:
                self._flushing = True
                self._flush_soon(self)
            return
        self._wake.set()

    def send_first(self, message: Message) -> None:
        """Queue a small message before those that wait; called by `leaving`."""
        data = self._pack(message)
        self._waiting.appendleft(data)
        self._bytes += len(data)

    def wake(self) -> None:
        """Send a frame soon, because `leaving` has something to send."""
        if self._flush_soon is None:
            self._wake.set()
        elif not self._flushing:
            self._flushing = True
            if not self._receiving:
                self._flush_soon(self)

    def excuse(self) -> None:
        """R10: the other side is known to be alive; from now on it may be silent for `silence_s` again."""
        self.heard = trio.current_time()
        if self._taking is not None:
            self._taking.deadline = self.heard + self._options.silence_s

    @property
    def waiting_bytes(self) -> int:
        """Bytes of messages that the socket has not accepted yet."""
        return self._bytes

    def drain(self) -> trio.Event:
        """An event that is set once at most half of `waiting_bytes_max` wait, or the channel has ended."""
        if self._drained is None:
            self._drained = trio.Event()
        return self._drained

    def close_soon(self) -> None:
        """Send the waiting messages, then end."""
        self._closing = True
        self._wake.set()

    async def run(self, received: Callable[[list[Message]], None], pause: Callable[[], trio.Event | None]) -> None:
        """Exchange messages until the stream ends.

        Args:
            received: called with the messages of each frame.
            pause: called before more is read; returns an event to wait for first, or None.

        Raises: WireError, Silent, trio.BrokenResourceError, trio.ClosedResourceError.
        """
        self._decoder.max, self._decoder.maps = self._options.message_bytes_max + HEAD_BYTES, self._maps
        self._running = True
        failure: list[BaseException] = []

        async def guarded(work: Callable[[], object], scope: trio.CancelScope) -> None:
            try:
                await work()  # type: ignore[misc]
            except (WireError, Silent, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                failure.append(error)
            scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(guarded, self._write, nursery.cancel_scope)
                nursery.start_soon(guarded, self._watch, nursery.cancel_scope)
                await guarded(lambda: self._read(received, pause), nursery.cancel_scope)
        finally:
            self._running = False
            self.closed.set()
            self._set_drained()
        if failure:
            raise failure[0]

    async def _read(self, received: Callable[[list[Message]], None], pause: Callable[[], trio.Event | None]) -> None:
        early, self._early = self._early, []
        await self._work(early, received)
        while True:
            while (wait := pause()) is not None:
                await wait.wait()
            self.heard = trio.current_time()  # the time in which we did not read is not the other side's silence
            self._listening = True
            data = await self._receive()
            self._listening = False
            if not data:
                return
            self.heard = trio.current_time()
            await self._work(self._decoder.feed(data), received)

    async def _work(self, frames: Iterable[list[Message]], received: Callable[[list[Message]], None]) -> None:
        for messages in frames:
            if not messages:
                continue
            self._receiving = True
            try:
                received(messages)
            finally:
                self._receiving = False
            if self._flushing:
                self.flush()
            await trio.lowlevel.checkpoint()  # so that other tasks run between frames

    async def _receive(self) -> bytes | bytearray:
        if self._socket == _NO_SOCKET:
            return await self._stream.receive_some(_RECEIVE_BYTES)
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return os.read(self._socket, _RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError(f"the connection broke: {error}") from error

    async def _watch(self) -> None:
        """R2: send heartbeats, and end a silent connection. The silence is checked twice, because a process that was
        suspended has not yet read the data that arrived meanwhile."""
        options, before = self._options, -1.0
        while True:
            await trio.sleep(min(options.heartbeat_s, options.silence_s) / 4)
            now = trio.current_time()
            if now - self._said >= options.heartbeat_s and not self._waiting:
                self._wake.set()
            if self._listening and now - self.heard > options.silence_s:
                if self.heard == before:
                    raise Silent(f"nothing heard for {options.silence_s:g} s")
                before = self.heard

    def flush(self) -> None:
        """Send the waiting messages, as far as the socket accepts them at once."""
        self._flushing = False
        if self._socket == _NO_SOCKET or self._rest or not self._running:
            self._wake.set()
            return
        if self.leaving is not None:
            self.leaving()
        while self._waiting:
            data = self._frame()
            self._rest = self._send_now(data)
            self._sent(len(data) - len(self._rest))
            if self._rest:
                self._wake.set()
                return

    def _frame(self) -> bytes:
        self._bytes += HEAD_BYTES
        return frame(self._take())

    def _send_now(self, data: bytes | memoryview) -> bytes | memoryview:
        """Write to the socket. Returns the data that the socket did not accept."""
        try:
            sent = os.write(self._socket, data)
        except BlockingIOError:
            return data
        except OSError as error:
            self._failed = error  # for `_send`, which raises it
            return data
        return b"" if sent == len(data) else memoryview(data)[sent:]

    def _sent(self, size: int) -> None:
        self._said = trio.current_time()
        self._bytes -= size
        if self._drained is not None and self._bytes <= self._options.waiting_bytes_max // 2:
            self._set_drained()

    def _set_drained(self) -> None:
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    async def _write(self) -> None:
        while True:
            if not self._waiting and not self._rest:
                if self._closing:
                    return
                await self._wake.wait()
            self._wake = trio.Event()
            if self.leaving is not None:
                self.leaving()
            data = self._rest or self._frame()
            self._rest = data  # so that `flush` sends nothing meanwhile
            await self._send(data)
            self._rest = b""
            self._sent(len(data))

    async def _send(self, data: bytes | memoryview) -> None:
        """Send all of the data.

        Raises: Silent, if a socket accepts none of the data for too long, or another stream takes too long to accept
            all of it.
        """
        silence_s = self._options.silence_s
        if self._socket == _NO_SOCKET:
            with trio.move_on_after(silence_s) as self._taking:
                await self._stream.send_all(data)
            if self._taking.cancelled_caught:
                raise Silent(f"the other side has accepted no data for {silence_s:g} s")
            return
        silent = False
        while True:
            left = self._send_now(data)
            if self._failed is not None:
                raise trio.BrokenResourceError(f"the connection broke: {self._failed}") from self._failed
            if not left:
                await trio.lowlevel.checkpoint()
                return
            if silent and len(left) == len(data):  # tried once more: this process may have been suspended
                raise Silent(f"the other side has accepted no data for {silence_s:g} s")
            data = left
            with trio.move_on_after(silence_s) as self._taking:
                await trio.lowlevel.wait_writable(self._socket)
            silent = self._taking.cancelled_caught

    def _take(self) -> list[bytes]:
        """Take as many of the waiting messages as one frame may hold."""
        waiting, frame_bytes = self._waiting, self._options.frame_bytes
        messages_max = min(self._options.frame_messages, MESSAGES_MAX)
        taken: list[bytes] = []
        size = 0
        while waiting and len(taken) < messages_max and (not taken or size + len(waiting[0]) <= frame_bytes):
            taken.append(waiting.popleft())
            size += len(taken[-1])
        return taken
