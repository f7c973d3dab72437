"""`perco serve`: an owner that serves a store, and runs no observers."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import trio

import perco
from perco import metrics
from perco.cli import systemd
from perco.cli.keeping import keep
from perco.cli.screen import FINE, complain, is_new, tell_new
from perco.cli.signals import asked_on_trio
from perco.cli.ui import command as page_command, listening
from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import StoreLocked, Unavailable, UsageError
from perco.rpc import addresses
from perco.rpc.addresses import Address
from perco.serve import tablets, tokens
from perco.serve.children import Mould, die_with
from perco.serve.client import is_client
from perco.serve.databases import is_database
from perco.serve.door import can_listen
from perco.serve.opening import SOCKET
from perco.serve.placing import ProcessOptions
from perco.serve.processes import TabletServers
from perco.serve.server import Server
from perco.storage import owner

_KEEPER: Final = "PERCO_KEEPER"  # environment variable of an owner: the process id of its supervisor
_READY: Final = "PERCO_READY"  # ... and a descriptor to write to when the store is served
_AGAIN_S: Final = 0.1
_START_S: Final = 30.0
_TOKEN_BYTES: Final = 24
_STANDBY_S: Final = 0.5
_ANY: Final = ("0.0.0.0", "::")
_OWN: Final = "in PERCO_TOKEN; if it is not set here, programs of this user on this host find a token automatically"


class Also(NamedTuple):
    """Further duties of a server. `direct`: it lets direct clients in; `standby`: it waits for its turn; `advertise`:
    the address for clients; `metrics`, `ui`: where it serves its metrics, and has its page served; `logs`: options of
    the page's process."""

    direct: bool
    standby: bool
    advertise: str
    metrics: str | None
    ui: str | None
    logs: Sequence[str] = ()


def is_kept() -> bool:
    """Whether this process is an owner that a supervisor restarts."""
    return os.environ.get(_KEEPER) == str(os.getppid())


def mould() -> Mould | None:
    """The `Mould` that makes tablet servers; call this before a loop runs."""
    die_with(int(os.environ[_KEEPER]))
    return Mould(tablets.run) if Mould.possible else None


async def serve(
    store: str,
    listen: list[str],
    durability: str,
    connections: int,
    certificate: Path | None,
    key: Path | None,
    processes: int,
    mould: Mould | None,
    also: Also,
) -> int:
    """Serve a store until SIGTERM or SIGINT; then answer the requests in progress, and end."""
    if addresses.is_address(store) or store == "memory:":
        raise UsageError(f"perco serve takes a store's folder or database, not {store!r}; for its address: --listen")
    wanted = [addresses.parse(text) for text in listen]
    remote = is_database(store)
    _must_make_sense(store, also)
    own = _own_token(wanted, processes, also) if remote else b""
    listening.must_be_certificate(certificate, key)
    page = _page(also.ui, tls=certificate is not None)
    if processes > 1 and not is_kept():
        _free(page)  # the owner's process binds it
        return await _kept()
    tls = (str(certificate), str(key or "")) if certificate is not None else None
    wire = perco.options.WireOptions(connections_max=connections)
    opening = perco.open(store, perco.Schema(), options=perco.Options(durability=durability, wire=wire))
    opening.leads, opening.direct = remote, also.direct
    if processes > 1:
        opening.processes = ProcessOptions(servers=processes, mould=mould)
    if (made := is_new(store)) or remote:
        await _must_be_bindable(wanted, _absolute(store), tls)
    async with AsyncExitStack() as stack:
        stack.callback(_free, page)
        signals = stack.enter_context(asked_on_trio(kept=is_kept()))
        db = await _opened(stack, opening, signals, standby=also.standby)
        if db is None:
            return FINE
        path = _absolute(store)
        server = opening.server
        if is_client(db) or server is None:
            raise StoreLocked(str(path), *owner(path))
        at = [] if remote else [f"unix:{path / SOCKET}"]
        at += await _listening(stack, server, wanted, own or tokens.token_of(path), tls)
        if opening.owned is not None and also.direct:
            await opening.owned.serve_at(str(addresses.parse(also.advertise or _reached_at(at))))
        if opening.tablet_servers is not None:
            await _started(opening.tablet_servers)
        measured = metrics.serve(db, also.metrics) if also.metrics is not None else ""
        helped = f", {processes} tablet servers" if processes > 1 else ""
        print(f"serving {opening.shown or store} at {', '.join(at)} (process {os.getpid()}{helped})", flush=True)
        if made:
            tell_new(store)
        if any(address.path is None for address in wanted):
            print(f"clients on TCP must present the token {_OWN if remote else _in_folder(path)}", flush=True)
        if measured:
            print(f"metrics at {measured}", flush=True)
        if page is not None:
            seen = await _beside(stack, server) if remote else str(path)
            _keep(db, partial(listening.keep_page, page, seen, tls, own, also.logs), page)
        if is_kept() and (told := os.environ.pop(_READY, "")):
            os.write(int(told), b"1")
            os.close(int(told))
        inside(db).background.start(systemd.told, "systemd")
        await signals.wait()
        systemd.tell("STOPPING=1")
        print("shutting down: requests in progress are answered first", flush=True)
    return FINE


async def _listening(
    stack: AsyncExitStack,
    server: Server,
    wanted: list[Address],
    token: bytes,
    tls: tuple[str, str] | None,
) -> list[str]:
    """Listen at addresses until the stack is closed; returns the addresses that clients use."""
    at = []
    for address in wanted:
        word = None if address.path is not None else token
        bound = await stack.enter_async_context(server.listening(address, word, tls))
        if word is not None and bound.on_this_host:
            stack.enter_context(tokens.told(bound, token))
        at.append(str(bound))
    return at


def _page(listen: str | None, *, tls: bool) -> listening.Listening | None:
    """Where the page is to be served. Raises: UsageError; but an owner that was started again goes on without it."""
    if listen is None:
        return None
    try:
        return listening.Listening(listen, tls=tls)
    except UsageError as error:
        if not is_kept():
            raise
        complain(f"the page is not served: {error}")
        return None


async def _kept() -> int:
    """Run the owner as a child process, which is started again if it dies."""
    command = [sys.executable, "-m", "perco", *sys.argv[1:]]
    environment = {**os.environ, _KEEPER: str(os.getpid()), listening.TOKEN: listening.chosen_token()}
    return await keep([command], "the store's owner", again_s=_AGAIN_S, ready=_READY, environment=environment)


def _free(page: listening.Listening | None) -> None:
    if page is not None:
        page.close()


def _keep(db: Database, run: Callable[[], Awaitable[None]], page: listening.Listening) -> None:
    inside(db).background.start(run, "ui")
    print(f"page at {page.url}", flush=True)


async def _beside(stack: AsyncExitStack, server: Server) -> str:
    """An address at which the process of the page reaches a server whose store has no folder, until the stack is
    closed: a socket of this user alone."""
    folder = stack.enter_context(TemporaryDirectory(prefix="perco-ui-"))
    bound = await stack.enter_async_context(server.listening(Address(Path(folder) / SOCKET), None, None))
    return str(bound)


def _must_make_sense(store: str, also: Also) -> None:
    """Check the options. Raises: UsageError."""
    if also.ui is not None and not page_command.is_installed():
        raise UsageError(page_command.MISSING)
    if also.metrics is not None:
        metrics.must_be_possible(also.metrics)
    if also.standby and not is_database(store):
        raise UsageError("--standby is for a store on PostgreSQL or Bigtable")
    if (also.direct or also.advertise) and not is_database(store):
        raise UsageError("--direct and --advertise are for a store on PostgreSQL or Bigtable")


async def _must_be_bindable(wanted: list[Address], folder: Path, tls: tuple[str, str] | None) -> None:
    """Check, before the store is opened, that the addresses can be bound. Otherwise an address that cannot be bound
    could leave an empty store behind, or take the store from a server that works. Raises: as `can_listen`."""
    for address in wanted:
        if address.path is None or not address.path.absolute().is_relative_to(folder):
            await can_listen(address, tls)


async def _started(servers: TabletServers) -> None:
    with trio.move_on_after(_START_S) as waiting:
        await servers.ready.wait()
    if waiting.cancelled_caught:
        complain(f"not all tablet servers have started within {_START_S:g} s; this program keeps trying")


async def _opened(stack: AsyncExitStack, opening: perco.open, asked: trio.Event, *, standby: bool) -> Database | None:
    """Open the store; with `standby`, wait while another process owns it, or while it cannot be reached. Returns None
    if this process was asked to end."""
    told = ""
    while True:
        try:
            return await stack.enter_async_context(opening)
        except (StoreLocked, Unavailable) as error:
            if not standby:
                raise
            if isinstance(error, StoreLocked):
                said = f"standing by: {error.path} is in use by {error.command}"
            else:
                said = f"standing by: {error.what}"
            if said != told:
                print(said, flush=True)
                systemd.tell(f"READY=1\nSTATUS={said}")
                told = said
        systemd.tell("WATCHDOG=1")
        with trio.move_on_after(_STANDBY_S):
            await asked.wait()
            return None


def _reached_at(listening: list[str]) -> str:
    """The address for clients: the first that other hosts can reach or, if there is none, the first."""
    parsed = [addresses.parse(text) for text in listening]
    for address in [*(each for each in parsed if not each.on_this_host), *parsed]:
        if address.path is None and address.host in _ANY:
            return str(address._replace(host=os.uname().nodename))
        return str(address if address.path is None else address._replace(path=address.path.absolute()))
    raise AssertionError("it listens somewhere")


def _own_token(wanted: list[Address], processes: int, also: Also) -> bytes:
    """The token of a server whose store has no folder: PERCO_TOKEN or, if that is not set, a new token, which only
    clients of this user on this host find. Raises: UsageError if PERCO_TOKEN is not set and other hosts can reach the
    server, or if another option does not fit."""
    if processes > 1:
        raise UsageError("--processes is for a store in a folder; a database has no tablet servers")
    if not wanted:
        raise UsageError(
            "a store in a database has no folder for a socket: say where to listen, as in --listen unix:PATH"
        )
    if also.advertise and not also.direct:
        raise UsageError("--advertise needs --direct")
    if also.advertise:
        addresses.parse(also.advertise)
    given = os.environ.get("PERCO_TOKEN", "")
    if not given and not all(address.on_this_host for address in wanted):
        raise UsageError("clients on other hosts need a token: set PERCO_TOKEN here, and give it to them")
    return (given or secrets.token_hex(_TOKEN_BYTES)).encode()


def _in_folder(path: Path) -> str:
    return f"in {path / tokens.TOKEN_FILE}"


def _absolute(store: str) -> Path:
    return Path(store).expanduser().absolute()
