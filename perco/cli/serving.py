"""`perco serve`: a store's owner that runs nothing of its own."""

from __future__ import annotations

import os
import signal
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import trio

import perco
from perco.cli.screen import FINE
from perco.errors import StoreLocked, UsageError
from perco.rpc import addresses
from perco.serve import tokens
from perco.serve.database import RemoteDatabase
from perco.serve.opening import SOCKET
from perco.storage import owner


async def serve(
    store: str, listen: list[str], durability: str, connections: int, certificate: Path | None, key: Path | None
) -> int:
    """Until SIGTERM or SIGINT; then what was asked for is answered."""
    if addresses.is_address(store) or store == "memory:":
        raise UsageError(
            f"perco serve takes the folder of a store, not {store!r}; where it listens is said by --listen"
        )
    wanted = [addresses.parse(text) for text in listen]
    tls = _certificate(certificate, key)
    wire = perco.WireOptions(connections_max=connections)
    opening = perco.open(store, perco.Schema(), options=perco.Options(durability=durability, wire=wire))
    async with opening as db, AsyncExitStack() as stack:
        path = _absolute(store)
        server = opening.server
        if isinstance(db, RemoteDatabase) or server is None:
            raise StoreLocked(str(path), *owner(path))
        token = tokens.token_of(path)
        at = [f"unix:{path / SOCKET}"]
        for address in wanted:
            word = None if address.path is not None else token
            bound = await stack.enter_async_context(server.listening(address, word, tls if address.tls else None))
            if word is not None and bound.on_this_host:
                stack.enter_context(tokens.told(bound, token))
            at.append(str(bound))
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            print(f"serving {store} at {', '.join(at)} (process {os.getpid()})", flush=True)
            if any(address.path is None for address in wanted):
                print(f"clients on TCP say the token in {path / tokens.TOKEN_FILE}", flush=True)
            async for _ in signals:
                break
        print("ending: what was asked for is answered first", flush=True)
    return FINE


def _absolute(store: str) -> Path:
    return Path(store).expanduser().absolute()


def _certificate(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if certificate is None and key is None:
        return None
    if certificate is None:
        raise UsageError("--tls-key goes with --tls-cert")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise UsageError(f"the certificate {certificate} cannot be used: {error}") from error
    return context
