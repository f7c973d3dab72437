"""A client of a served store without an event loop: a thread and a connection per request, as in the paper.

It speaks perco's wire protocol and performs perco's steps: timestamp, read, commit in one step. Each step is a
`sendall` and `recv`s in the caller's own thread. No portal, no queue, no second thread: nothing that a
thread-per-request program would not do. It has one kind of transaction, a read-modify-write of a cell of a table with
one tablet.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import Any

from perco.protocol.mutations import Header, Intent
from perco.protocol.records import PUT, RECORD_HEAD, Cellref
from perco.rpc.crossing import unpack_error
from perco.rpc.framing import FrameDecoder, frame, packer
from perco.rpc.link import OK, PUSH
from perco.serve.messages import TOLD, Method, hello, read_welcome
from perco.storage import LOCK, WRITE

_FRAME_BYTES_MAX = 1 << 24


class BlockingClient:
    """A client for one thread. `close` it."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._decoder = FrameDecoder(_FRAME_BYTES_MAX)
        self._heard: list[Any] = []
        self._pack = packer()
        session = secrets.token_hex(16)
        self._token = session[:16]
        self._next = 0
        self._socket.sendall(frame([self._pack(hello(b"", session, ()))]))
        _, _, self._info = read_welcome(self._receive())
        self._version = self._info["version"]

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> Any:
        """The next message."""
        while not self._heard:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the server has closed the connection")
            for messages in self._decoder.feed(data):
                self._heard += messages
        return self._heard.pop(0)

    def fileno(self) -> int:
        """The file descriptor of its socket."""
        return self._socket.fileno()

    def say(self, method: int, arguments: Any) -> None:
        """Send a call, and do not wait for its answer."""
        self._next += 1
        self._socket.sendall(frame([self._pack((self._next, method, arguments))]))

    def heard(self) -> Any:
        """The answer to the last `say`. Raises: the error that the server answers with."""
        id, status, value = self._receive()
        while status == PUSH:
            id, status, value = self._receive()
        assert id == self._next
        if status != OK:
            raise unpack_error(value)
        return value

    def call(self, method: int, arguments: Any) -> Any:
        """Send a call, and wait for its answer."""
        self.say(method, arguments)
        return self.heard()

    def _over(self, start_ts: int) -> None:
        self._socket.sendall(frame([self._pack((0, int(Method.DONE), (start_ts,)))]))

    def modify(self, table: str, row: bytes, column: int, change: Callable[[bytes | None], bytes]) -> int:
        """One durable read-modify-write; how many attempts it took."""
        attempts = 0
        while True:
            attempts += 1
            (start_ts,), self._version, _, _ = self.call(Method.DRAW, (1, 0))
            queries = (LOCK, column, 0, start_ts, 1), (WRITE, column, 0, start_ts, 1)
            [[locks, writes]] = self.call(Method.READ, ((table, row, queries),))
            if not locks:
                old = writes[0][-1][RECORD_HEAD:] if writes else None
                header = Header(start_ts, Cellref(table, row, column), 0, 0, self._token)
                intents = (Intent(table, row, column, PUT, change(old)),)
                what, *told = self.call(Method.COMMIT, (header, intents, self._version))
                if what == TOLD and told[0] == 0:
                    self._over(start_ts)
                    return attempts
            self._over(start_ts)
