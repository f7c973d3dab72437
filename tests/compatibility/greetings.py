"""`python -m tests.compatibility.greetings FILE`: records how the installed perco greets, as client and as server.

It is run once for each version of the wire protocol, and its file is kept: `greetings-VERSION.json`. It needs only the
commands of perco, so it can also record an older version (PYTHONPATH=...).
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_COMMAND = [sys.executable, "-m", "perco"]
_SECONDS_MAX = 60


def recorded() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        hello = _said_by_a_client(f"{folder}/listening")
        return {"hello": hello.hex(), "welcome": _answered_by_a_server(f"{folder}/store", hello).hex()}


def _said_by_a_client(path: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.settimeout(_SECONDS_MAX)
        listening.bind(path)
        listening.listen()
        client = subprocess.Popen([*_COMMAND, "status", f"unix:{path}"], stdout=subprocess.DEVNULL)
        try:
            while True:  # it first looks whether anybody listens
                with listening.accept()[0] as connection:
                    if connection.recv(1, socket.MSG_PEEK):
                        return frame(connection)
        finally:
            client.kill()
            client.wait()


def _answered_by_a_server(store: str, hello: bytes) -> bytes:
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*_COMMAND, "serve", store], **quiet) as server:  # type: ignore[call-overload]
        try:
            assert server.stdout is not None
            found = re.search(r"at unix:(\S+)", server.stdout.readline())
            assert found is not None
            return answer(found[1], hello)
        finally:
            server.kill()


def answer(path: str, hello: bytes) -> bytes:
    """The answer of a server to a greeting."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECONDS_MAX)
        connection.connect(path)
        connection.sendall(hello)
        return frame(connection)


def frame(connection: socket.socket) -> bytes:
    """The next frame: four bytes with the length of what follows, and that."""
    head = _exactly(connection, 4)
    return head + _exactly(connection, int.from_bytes(head, "big"))


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        some = connection.recv(size - len(found))
        assert some, "the other side has closed the connection"
        found += some
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(recorded(), indent=1) + "\n")
