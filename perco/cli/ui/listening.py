"""Where the page of `perco ui` is served, the token that it needs, and its link.

`perco serve --ui` binds the socket itself, and has a child process serve the page on it: another child can take over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import trio

from perco.cli.screen import complain
from perco.errors import UsageError
from perco.rpc import addresses
from perco.rpc.addresses import Address
from perco.serve.children import Command

log: logging.Logger = logging.getLogger("perco.store")

TOKEN: Final = "PERCO_UI_TOKEN"
_SOCKET: Final = "PERCO_UI_SOCKET"  # environment variable of a child: the descriptor on which it serves the page
_PARENT: Final = "PERCO_UI_PARENT"
_TOKEN_BYTES: Final = 24
_TOKEN_LEAST: Final = 16
_BACKLOG: Final = 64
_AGAIN_S: Final = 1.0
_AGAIN_MOST_S: Final = 30.0
_ENDS_S: Final = 5.0
_REFUSED: Final = 2  # exit code of a command that cannot begin, and has said why


class Listening:
    """A socket on which the page is served. Close it in the end.

    Attributes:
        token: what requests must present; "": nothing.
        url: the link to the page, with the token.
    """

    token: str
    url: str
    listener: socket.socket
    port: int

    def __init__(self, listen: str, *, tls: bool, open_to_all: bool = False) -> None:
        """Bind the socket, or take the one that the parent of this process has bound. Raises: UsageError."""
        address = _parsed(listen)
        self.token = _token(address, tls=tls, open_to_all=open_to_all)
        given = os.environ.pop(_SOCKET, "")
        self.listener = socket.socket(fileno=int(given)) if given else _bound(address)
        self.port: int = self.listener.getsockname()[1]
        shown = str(address._replace(port=self.port)).partition("://")[2]
        query = f"?token={self.token}" if self.token else ""
        self.url = f"{'https' if tls else 'http'}://{shown}/{query}"

    def close(self) -> None:
        self.listener.close()


def must_be_certificate(certificate: Path | None, key: Path | None) -> None:
    """Check the files for TLS, before anything begins. Raises: UsageError."""
    if certificate is None:
        if key is not None:
            raise UsageError("--tls-key needs --tls-cert")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key or certificate)
    except (OSError, ValueError) as error:
        raise UsageError(f"the certificate {certificate} cannot be used: {error.strerror or error}") from error  # type: ignore[union-attr]


def parent() -> int | None:
    """The process for which this one serves the page, and which it must not outlive."""
    given = os.environ.get(_PARENT, "")
    return int(given) if given else None


def chosen_token() -> str:
    """The token that the environment gives, or a new one."""
    return os.environ.get(TOKEN, "") or secrets.token_urlsafe(_TOKEN_BYTES)


async def keep_page(
    listening: Listening, store: str, tls: tuple[str, str] | None, token: bytes, more: Sequence[str]
) -> None:
    """Have a child process serve the page of a store, and start another one if it dies, until this is cancelled.

    Args:
        tls: files of a certificate and its key ("": in the same file).
        token: for the store's server, if `store` is an address.
        more: further arguments of `perco ui`.

    No error leaves this: the page is not worth the store.
    """
    number = listening.listener.fileno()
    options: Sequence[str] = () if tls is None else ("--tls-cert", tls[0], *(("--tls-key", tls[1]) if tls[1] else ()))
    command = [sys.executable, "-m", "perco", "ui", store, "--listen", f"localhost:{listening.port}", *options, *more]
    environment = {**os.environ, TOKEN: listening.token, _SOCKET: str(number), _PARENT: str(os.getpid())}
    if token:
        environment["PERCO_TOKEN"] = token.decode()
    pause_s = _AGAIN_S
    try:
        while True:
            began = trio.current_time()
            try:
                code = await _served(command, environment, number)
            except OSError as error:
                how = f"cannot be started ({error.strerror or error})"
            else:
                if code == _REFUSED:
                    _say("the page is not served any more; its process has said why")
                    return
                how = f"ended with exit code {code}"
            _say(f"the process of the page {how}; another one starts in {pause_s:g} s")
            await trio.sleep(pause_s)
            lived = trio.current_time() - began
            pause_s = _AGAIN_S if lived > 2 * _AGAIN_MOST_S else min(2 * pause_s, _AGAIN_MOST_S)
    finally:
        listening.close()


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        complain(message)


async def _served(command: Sequence[str], environment: Mapping[str, str], number: int) -> int:
    """Have a process serve the page until it ends; returns its exit code. Raises: OSError."""
    process = Command(command, environment=environment, pass_fds=[number])
    try:
        return await process.wait()
    finally:
        await _ended(process)


async def _ended(process: Command) -> None:
    """Make sure that the process has ended."""
    process.terminate()
    with trio.move_on_after(_ENDS_S, shield=True):
        await process.wait()
        return
    process.kill()
    with trio.CancelScope(shield=True):
        await process.wait()


def _parsed(listen: str) -> Address:
    try:
        address = addresses.parse(f"tcp://{listen}")
        assert address.path is None
    except UsageError:
        raise UsageError(f"the page is served at HOST:PORT, such as localhost:7430, not at {listen!r}") from None
    return address


def _token(address: Address, *, tls: bool, open_to_all: bool) -> str:
    if not address.on_this_host and not tls:
        raise UsageError(
            "an address of the page that other hosts can reach needs TLS: give --tls-cert, or listen on localhost "
            "behind a proxy that has TLS"
        )
    if open_to_all:
        if not address.on_this_host:
            raise UsageError("--no-token is for an address that only this host can reach")
        return ""
    token = chosen_token()
    if len(token) < _TOKEN_LEAST or not (token.isascii() and token.replace("-", "").replace("_", "").isalnum()):
        raise UsageError(f"{TOKEN}: give at least {_TOKEN_LEAST} letters, digits, - and _")
    return token


def _bound(address: Address) -> socket.socket:
    try:
        [(family, kind, protocol, _, where), *_] = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"cannot listen at {address.host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"the page cannot be served at {address.host}:{address.port}: {error.strerror or error}; port 0 takes any "
            "free port"
        ) from error
    return listener
