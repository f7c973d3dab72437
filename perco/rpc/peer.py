"""A server's side of one connection: calls come in frames, replies leave in frames.

R3  At most `calls_max` calls of a connection are worked at, and at most `waiting_bytes_max` of replies wait for it:
    then nothing more is read from it until that is less. Others do not notice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import trio

from perco.errors import BackgroundFailure, PercoError, TooLarge
from perco.rpc.channel import Channel, WireOptions
from perco.rpc.crossing import pack_error
from perco.rpc.framing import Message, WireError
from perco.rpc.link import ERROR, OK, PUSH

log = logging.getLogger("perco.serve")


class Peer:
    """Loop thread only.

    Args:
        handle: told each call: (peer, id, method, arguments). It answers with `reply` or `fail`, at once or later; id
            0: it wants no answer. What it raises is the answer.
    """

    def __init__(
        self, channel: Channel, options: WireOptions, handle: Callable[[Peer, int, int, Any], None], name: str
    ) -> None:
        self.channel, self.name = channel, name
        self._options, self._handle = options, handle
        self.calls = 0  # under way
        self.ended = False
        self._fewer: trio.Event | None = None
        self._full: trio.Event | None = None

    def reply(self, id: int, value: Any) -> None:
        """The answer to a call."""
        self._answer(id, OK, value)

    def fail(self, id: int, error: Exception) -> None:
        """The same, an error."""
        if not isinstance(error, PercoError):
            log.error("a call of %s failed", self.name, exc_info=error)
            error = BackgroundFailure(f"the server failed, which is a bug in perco: {type(error).__name__}: {error}")
        self._answer(id, ERROR, pack_error(error))

    def push(self, what: int, value: Any) -> None:
        """Something that was not asked for."""
        if not self.ended:
            self.channel.send((what, PUSH, value))

    def _answer(self, id: int, status: int, value: Any) -> None:
        if not id:
            return
        self.calls -= 1
        if self._fewer is not None and self.calls < self._options.calls_max:
            self._fewer.set()
            self._fewer = None
        if self.ended:
            return
        try:
            self.channel.send((id, status, value))
        except TooLarge as error:
            self.channel.send((id, ERROR, pack_error(error)))

    async def run(self) -> None:
        """Until the connection ends. Raises: as `Channel.run`."""
        try:
            await self.channel.run(self._received, self._pause)
        finally:
            self.ended = True

    def _received(self, messages: list[Message]) -> None:
        handle = self._handle
        for message in messages:
            try:
                id, method, arguments = message
            except ValueError as error:
                raise WireError(f"a call that does not read: {str(message)[:40]}") from error
            if type(id) is not int or type(method) is not int:
                raise WireError(f"a call that does not read: {str(message)[:40]}")
            if id:
                self.calls += 1
            try:
                handle(self, id, method, arguments)
            except WireError:
                raise
            except Exception as error:
                self.fail(id, error)

    def _pause(self) -> trio.Event | None:
        if self.calls >= self._options.calls_max:
            self._fewer = self._fewer or trio.Event()
            return self._fewer
        if self.channel.waiting_bytes > self._options.waiting_bytes_max:
            return self.channel.drain()
        return None
