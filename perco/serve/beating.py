"""A client's heartbeat thread. It watches the loop and, while the loop is held, sends messages over the pulse, a plain
socket (R10)."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import replace

from perco.clock.loopwatch import HeartbeatOptions, Held, LoopWatch
from perco.errors import PercoError
from perco.rpc.channel import WireOptions
from perco.rpc.framing import WireError
from perco.serve.pulse import Pulse

log: logging.Logger = logging.getLogger("perco.serve")

_RECEIVE_BYTES = 64 * 1024


class PulseThread(LoopWatch):
    """One client's heartbeat thread; it runs from the client's first greeting until the client closes.

    Args:
        dial: connects, within the given number of seconds. Raises: OSError.
    """

    pulse: Pulse

    join_s: float | None = 0.5  # not longer, because the thread may be connecting

    def __init__(
        self, options: HeartbeatOptions, wire: WireOptions, pulse: Pulse, dial: Callable[[float], socket.socket]
    ) -> None:
        # The server must hear a pulse before it treats the client as silent.
        soon = min(options.held_s, wire.heartbeat_s / 2), min(options.tick_s, wire.heartbeat_s / 4)
        super().__init__(replace(options, held_s=soon[0], tick_s=soon[1]))
        self.pulse, self._dial, self._connect_s = pulse, dial, wire.connect_s
        self._socket: socket.socket | None = None

    def _meanwhile(self, now: float, held: Held | None) -> None:
        pulse = self.pulse
        try:
            if self._socket is None:
                if not pulse.wants(held, now):
                    return
                self._socket = self._dial(self._connect_s)
                self._socket.setblocking(False)
                self._socket.sendall(pulse.begin(time.monotonic()))
                return
            self._receive(self._socket, now)
            if not pulse.over(held):
                self._socket.sendall(pulse.say(held, now))
            if pulse.over(held):
                self._close()
        except (OSError, WireError, PercoError) as error:
            log.info("no pulse, while the event loop is blocked: %s", error)
            self._close()
            pulse.failed(now)

    def _receive(self, connection: socket.socket, now: float) -> None:
        try:
            while True:
                self.pulse.received(connection.recv(_RECEIVE_BYTES), now)
        except (BlockingIOError, ssl.SSLWantReadError):
            return

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ended(self) -> None:
        self._close()
