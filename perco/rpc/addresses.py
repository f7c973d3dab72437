"""Where a server listens: `unix:PATH`, `tcp://HOST:PORT`, `tls://HOST:PORT`, and the socket in a store's folder.

The address of a Unix socket can hold a path of at most 107 bytes. A socket whose path has more than 100 bytes is
reached through a descriptor of its folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import trio

from perco.errors import StoreError, UsageError

_UNIX_BYTES_MAX: Final = 100
_BACKLOG: Final = 128


class Address(NamedTuple):
    """`path` of a Unix socket, or `host` and `port`; `tls`: over TLS."""

    path: Path | None
    host: str = ""
    port: int = 0
    tls: bool = False

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"

    @property
    def on_this_host(self) -> bool:
        """Whether no other host can reach it: a Unix socket, or loopback."""
        if self.path is not None or self.host == "localhost":
            return True
        return self.host == "::1" or (self.host.startswith("127.") and self.host.count(".") == 3)

    def beside(self, number: int, port: int = 0) -> Address:
        """The address of the tablet server with this number, if its owner listens at this address: a path that ends in
        the number, or `port` on the same host."""
        if self.path is None:
            return self._replace(port=port)
        return self._replace(path=self.path.with_name(f"{self.path.name}-{number}"))


NOWHERE: Final = Address(None)


def is_address(text: str) -> bool:
    """Whether `text` is the address of a server, not the path of a folder."""
    return text.startswith(("unix:", "tcp://", "tls://"))


def parse(text: str) -> Address:
    """Parse an address. Raises: UsageError."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path:
            raise UsageError("unix: needs the path of a socket: unix:/run/perco.sock")
        return Address(Path(path).expanduser())
    if not is_address(text):
        raise UsageError(f"{text!r}: write unix:PATH, tcp://HOST:PORT or tls://HOST:PORT")
    tls = text.startswith("tls://")
    rest = text.removeprefix("tls://").removeprefix("tcp://").rstrip("/")
    host, colon, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise UsageError(f"{text!r}: write tcp://HOST:PORT, such as tcp://localhost:7420")
    return Address(None, host, int(port), tls)


async def connect(address: Address, trust: ssl.SSLContext | None = None) -> trio.abc.Stream:
    """A stream to the server that listens at an address; `trust`: the certificates that TLS accepts. Raises: OSError,
    including ssl.SSLError."""
    if address.path is not None:
        with _short(address.path) as path:
            return await trio.open_unix_socket(path)
    try:
        stream = await trio.open_tcp_stream(address.host, address.port)
    except OSError as error:
        raise _plainly(error) from error
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not address.tls:
        return stream
    secured = trio.SSLStream(stream, trust or ssl.create_default_context(), server_hostname=address.host)
    try:
        await secured.do_handshake()
    except trio.BrokenResourceError as error:
        await trio.aclose_forcefully(stream)
        raise OSError(f"no TLS with {address}: {error.__cause__ or error}") from error
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return secured


def _plainly(error: OSError) -> OSError:
    """The failures of all attempts to connect, as one error: a refusal, if there was one."""
    met = error.__cause__
    all = met.exceptions if isinstance(met, BaseExceptionGroup) else (met,)
    numbers = [each.errno for each in all if isinstance(each, OSError) and each.errno]
    if not numbers:
        return error
    number = errno.ECONNREFUSED if errno.ECONNREFUSED in numbers else numbers[0]
    return OSError(number, os.strerror(number))


def unreached(address: Address, error: OSError) -> tuple[str, str]:
    """The reason why no server was reached at an address, in words, and the remedy; "": try again."""
    if isinstance(error, socket.gaierror):
        return f"the host of {address} is not known ({error.strerror})", "Is the address right?"
    if isinstance(error, ConnectionRefusedError | FileNotFoundError):
        why = "connection refused" if isinstance(error, ConnectionRefusedError) else "there is no such socket"
        return f"nothing listens at {address} ({why})", "Is `perco serve` running at this address?"
    return f"no server answers at {address}: {error.strerror or error}", ""


def dial(address: Address, trust: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    """Like `connect`, but for a thread: returns a blocking socket. Raises: OSError."""
    if address.path is None:
        made = socket.create_connection((address.host, address.port), timeout_s)
    else:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout_s)
        if address.path is not None:
            with _short(address.path) as path:
                made.connect(path)
        else:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.tls:
            made = (trust or ssl.create_default_context()).wrap_socket(made, server_hostname=address.host)
    except BaseException:
        made.close()
        raise
    return made


_listening: weakref.WeakSet[trio.SocketListener] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the parent's listeners in a child, which must not be reached at its parent's address."""
    for listener in list(_listening):
        with contextlib.suppress(OSError):
            os.close(listener.socket.fileno())


os.register_at_fork(after_in_child=_after_fork)


@asynccontextmanager
async def listening(
    address: Address, *, ours: bool = False
) -> AsyncIterator[tuple[Address, list[trio.SocketListener]]]:
    """Listen at an address while the block lasts. Yields the address, with the actual port in place of port 0.

    `ours`: no other process may serve at that path, so any file there is removed. Otherwise, a socket file is removed
    only if the server that made it is dead. Only the user who owns the socket file may connect (0600).

    Raises: StoreError if a process listens there already, or the address cannot be used; UsageError.
    """
    if address.path is None:
        try:
            listeners = await trio.open_tcp_listeners(address.port, host=address.host, backlog=_BACKLOG)
        except OSError as error:
            raise _not_ours(address, error) from error
        bound = address._replace(port=listeners[0].socket.getsockname()[1])
        try:
            _listening.update(listeners)
            yield bound, listeners
        finally:
            for listener in listeners:
                await listener.aclose()
        return
    listener = _unix_listener(address, address.path, ours=ours)
    try:
        _listening.add(listener)
        yield address, [listener]
    finally:
        with contextlib.suppress(OSError):
            address.path.unlink()
        await listener.aclose()


def _unix_listener(address: Address, path: Path, *, ours: bool) -> trio.SocketListener:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if ours:
            path.unlink(missing_ok=True)
        else:
            _put_away_stale(address, path)
        with _short(path) as name:
            before = os.umask(0o177)  # the file is 0600 from its first moment on
            try:
                made.bind(name)
            finally:
                os.umask(before)
        made.listen(_BACKLOG)
        made.setblocking(False)
        return trio.SocketListener(trio.socket.from_stdlib_socket(made))
    except OSError as error:
        made.close()
        raise _not_ours(address, error) from error
    except BaseException:
        made.close()
        raise


def _put_away_stale(address: Address, path: Path) -> None:
    """Remove a socket that a dead server left at the path."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise UsageError(f"{path} exists and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, _short(path) as name:
        probe.setblocking(False)
        try:
            probe.connect(name)
        except BlockingIOError:
            pass  # a busy server listens there
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
    raise StoreError(f"another process listens at {address} already; stop it, or choose another address")


def _not_ours(address: Address, error: OSError) -> StoreError:
    if error.errno == errno.EADDRINUSE:
        return StoreError(f"another process listens at {address} already; stop it, or choose another port")
    return StoreError(f"cannot listen at {address}: {error.strerror or error}")


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for a socket's path that is short enough for an address."""
    if len(os.fsencode(path)) <= _UNIX_BYTES_MAX:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
