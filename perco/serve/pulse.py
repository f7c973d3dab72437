"""A client's pulse: the connection over which a thread speaks for the client while its event loop is held.

R10 While a client's loop is held (blocked by code that does not yield), the client reports this over a second
    connection, its pulse. As long as it does so, its session counts as heard from (R7), and its other connections, to
    the owner and to tablet servers, are not treated as silent (R2). When the loop runs again, only those other
    connections count, so half-open ones end as usual. A pulse begins no session, and a session has at most one pulse.

No I/O here: `PulseThread` sends and receives over a plain socket, a simulation over a stream in memory.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Final

from perco.clock.loopwatch import Held
from perco.errors import Unavailable
from perco.rpc.channel import WireOptions
from perco.rpc.framing import GREETING_BYTES_MAX, FrameDecoder, Message, WireError, frame, packed
from perco.serve.messages import PULSE, hello, read_welcome

_PAUSES_MAX: Final = 5  # the pause between two connections is doubled at most this many times


class Pulse:
    """One client's pulse, for one thread, or task, at a time. `now` is the time on the caller's clock, in seconds.

        wants(held, now) -> connect -> send begin(now) -> received(data, now), send say(held, now) -> ... -> over(held)

    Args:
        token: returns the server's token.
        session: the client's session.
        wire: a message is sent every `heartbeat_s`; a server that is silent for `silence_s` counts as gone.
    """

    def __init__(self, token: Callable[[], bytes], session: str, wire: WireOptions, rng: random.Random) -> None:
        self._hello: Callable[[], Message] = lambda: hello(token(), session, (), pulse=True)
        self._wire, self._rng = wire, rng
        self._decoder = FrameDecoder(GREETING_BYTES_MAX)
        self._welcome = False  # the server has greeted back
        self._told = False  # the server knows that the loop is held
        self._heard = self._say_at = 0.0
        self._failures = 0
        self._not_before = 0.0  # no new connection is tried before this time

    def wants(self, held: Held | None, now: float) -> bool:
        """Whether to connect now."""
        return held is not None and now >= self._not_before

    def begin(self, now: float) -> bytes:
        """Record that the connection has been made. Returns the bytes to send first."""
        self._decoder = FrameDecoder(GREETING_BYTES_MAX)
        self._welcome = self._told = False
        self._heard = self._say_at = now
        return frame([packed(self._hello())])

    def received(self, data: bytes, now: float) -> None:
        """Handle bytes from the server; b"": the server has ended the connection.

        Raises: WireError; or the server's refusal of the pulse: Unavailable, if the server does not know the
        session.
        """
        if not data:
            raise WireError("the server has ended the connection")
        self._heard = now
        for messages in self._decoder.feed(data):
            if not self._welcome and messages:
                read_welcome(messages[0])
                self._welcome = True
                self._failures = 0

    def say(self, held: Held | None, now: float) -> bytes:
        """The bytes to send now; b"": nothing yet.

        Raises: Unavailable, if the server is silent.
        """
        if now - self._heard > self._wire.silence_s:
            raise Unavailable(f"nothing heard for {self._wire.silence_s:g} s")
        if not self._welcome or (held is not None and now < self._say_at):
            return b""
        self._say_at = now + self._wire.heartbeat_s
        self._told = held is not None
        seconds, where = (held.seconds, held.where) if held is not None else (0.0, "")
        return frame([packed((0, PULSE, (os.getpid(), seconds, where)))])

    def over(self, held: Held | None) -> bool:
        """Whether to close the connection: the loop runs again, and the server does not believe that it is held."""
        return held is None and not self._told

    def failed(self, now: float) -> None:
        """Record that the connection is lost: the next one is tried after a random pause."""
        pause_s = self._wire.heartbeat_s * 2 ** (min(self._failures, _PAUSES_MAX) - 2)
        self._failures += 1
        self._not_before = now + min(pause_s, self._wire.silence_s / 2) * self._rng.uniform(0.5, 1.0)
