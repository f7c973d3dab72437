"""A server's side of one connection: calls come in frames, replies leave in frames.

R3  Of each kind of message that a server pushes, only the newest waits for a client that does not read. At most
    `calls_max` calls of a connection are in flight. While more than `waiting_bytes_max` bytes of replies wait for a
    connection, the server begins no further call of this connection, looks up no rows for calls that have begun
    (`room`), and reads nothing more from the connection. Other connections are not affected.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from perco.errors import BackgroundFailure, PercoError, TooLarge
from perco.rpc.addresses import NOWHERE
from perco.rpc.channel import Channel, WireOptions
from perco.rpc.crossing import pack_error
from perco.rpc.framing import Message, WireError
from perco.rpc.link import ERROR, OK, PUSH

log: logging.Logger = logging.getLogger("perco.serve")


class Peer:
    """A server's side of one connection. Loop thread only.

    Args:
        handle: called for each call with (peer, id, method, arguments). It answers with `reply` or `fail`, at once or
            later; id 0: no answer is wanted. If it raises an exception, that is the answer.
    """

    channel: Channel
    name: str
    ended: bool
    calls: int

    def __init__(
        self, channel: Channel, options: WireOptions, handle: Callable[[Peer, int, int, Any], None], name: str
    ) -> None:
        self.channel, self.name = channel, name
        self.at = NOWHERE  # the address to which the client has connected
        self._options, self._handle = options, handle
        self.calls = 0  # in flight
        self.ended = False
        self._backlog: deque[Message] = deque()  # calls that were received, and have not begun
        self._working = False
        self._fewer: trio.Event | None = None
        self._turn = trio.Lock()  # of tasks that wait for room
        self._pushes: dict[int, Any] = {}  # not yet sent
        channel.leaving = self._leaving
        self._answered: trio.Event | None = None

    def reply(self, id: int, value: Any) -> bool:
        """Answer a call. Returns whether the answer is sent: not if it is too large, if it cannot be packed, or if no
        caller waits for it."""
        return self._answer(id, OK, value)

    def fail(self, id: int, error: Exception) -> None:
        """Answer a call with an error."""
        if not isinstance(error, PercoError):
            log.error("a call of %s failed", self.name, exc_info=error)
            error = _bug(error)
        self._answer(id, ERROR, pack_error(error))

    def leave_open(self, id: int) -> None:
        """End a call without an answer: its caller repeats it over another connection."""
        self._answer(id, None, None)

    def push(self, what: int, value: Any) -> None:
        """Push a message; it replaces a message of its kind that has not been sent yet."""
        if not self.ended:
            self._pushes[what] = value
            self.channel.wake()

    def push_each(self, what: int, value: Any) -> None:
        """Push a message of a kind whose messages must all arrive."""
        if not self.ended:
            self.channel.send((what, PUSH, value))

    def _leaving(self) -> None:
        """Called before a frame leaves: put the pushes first in it."""
        if self._pushes:
            pushes, self._pushes = self._pushes, {}
            for what, value in pushes.items():
                self.channel.send_first((what, PUSH, value))

    async def room(self) -> None:
        """Wait, in turn, until there is room for a long answer. The task that calls it must await nothing else before
        it has answered."""
        if not self._turn.locked() and self.channel.waiting_bytes <= self._options.waiting_bytes_max:
            return
        async with self._turn:
            if self.channel.waiting_bytes > self._options.waiting_bytes_max and not self.ended:
                await self.channel.drain().wait()

    async def answered(self) -> None:
        """Wait until no call is in flight, and none waits to begin."""
        while self.calls or (self._backlog and not self.ended):
            if self._answered is None:
                self._answered = trio.Event()
            await self._answered.wait()

    def refuse(self, error: WireError) -> None:
        """End the connection, because of a call that cannot be decoded."""
        log.warning("%s: %s", self.name, error)
        self._end()
        self.channel.close_soon()

    def _answer(self, id: int, status: int | None, value: Any) -> bool:
        """End a call. `status`: None, if nothing is sent. Returns whether the value is sent."""
        sent = False
        if not id:
            return sent
        self.calls -= 1
        if not self.calls:
            self._look_again()
        if self.ended:
            return sent
        if status is not None:
            try:
                self.channel.send((id, status, value))
                sent = True
            except TooLarge as error:
                self.channel.send((id, ERROR, pack_error(error)))
            except (TypeError, ValueError, OverflowError) as error:
                log.error("an answer to %s cannot be sent", self.name, exc_info=error)
                self.channel.send((id, ERROR, pack_error(_bug(error))))
        if self._backlog:
            self._go_on()
        return sent

    def _go_on(self) -> None:
        """Begin calls of the backlog, now that the limits allow more in flight. A WireError ends the connection."""
        try:
            self._work()
        except WireError as error:
            self.refuse(error)

    def _end(self) -> None:
        self.ended = True
        self._backlog.clear()
        self._look_again()

    def _look_again(self) -> None:
        """Wake the tasks that wait in `answered`."""
        if self._answered is not None:
            self._answered.set()
            self._answered = None

    async def run(self) -> None:
        """Serve until the connection ends. Raises: as `Channel.run`."""
        try:
            await self.channel.run(self._received, self._pause)
        finally:
            self._end()

    def _received(self, messages: list[Message]) -> None:
        for message in messages:
            if len(message) != 3 or type(message[0]) is not int or type(message[1]) is not int:
                raise WireError(f"a call that cannot be decoded: {str(message)[:40]}")
        self._backlog.extend(messages)
        self._work()

    def _work(self) -> None:
        """Begin calls of the backlog, as far as the limits of calls in flight and of waiting replies allow."""
        if self._working:
            return  # called while `handle` gives an answer at once
        self._working = True
        backlog, handle, channel = self._backlog, self._handle, self.channel
        calls_max, bytes_max = self._options.calls_max, self._options.waiting_bytes_max
        try:
            while backlog and self.calls < calls_max and channel.waiting_bytes <= bytes_max:
                id, method, arguments = backlog.popleft()
                if id:
                    self.calls += 1
                try:
                    handle(self, id, method, arguments)
                except WireError:
                    raise
                except Exception as error:
                    self.fail(id, error)
        finally:
            self._working = False
        if not backlog and not self.calls:
            self._look_again()
        if self._fewer is not None and (not backlog or self.calls < calls_max):
            self._fewer.set()
            self._fewer = None

    def _pause(self) -> trio.Event | None:
        if self._backlog and not self.ended:
            self._work()  # the client may have read answers since
        if self.channel.waiting_bytes > self._options.waiting_bytes_max:
            return self.channel.drain()
        if self._backlog:
            if self._fewer is None:
                self._fewer = trio.Event()
            return self._fewer
        return None


def _bug(error: Exception) -> BackgroundFailure:
    text = str(error).encode("utf-8", "backslashreplace").decode()
    return BackgroundFailure(f"the server failed, which is a bug in perco: {type(error).__name__}: {text}")
