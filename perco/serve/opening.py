"""`perco.open`: opens a store, as its owner or as a client of the owner.

`memory:` is a store in this process; the rows of `postgresql://...` and `bigtable://...` are in a database. If no other
process has a folder open, this one becomes its *owner*, and listens on a socket in the folder; otherwise it becomes a
client of the owner. `unix:PATH`, `tcp://HOST:PORT` and `tls://HOST:PORT` are addresses of served stores.
"""

from __future__ import annotations

import os
import shlex
import ssl
import warnings
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

import trio

from perco.blocks import AsyncOnly
from perco.database.database import Database
from perco.database.inside import close, inside, local_owner
from perco.database.making import make, make_beside, offline as offline
from perco.database.options import Options
from perco.errors import Corruption, PercoWarning, SessionEnded, StoreError, StoreLocked, Unavailable, UsageError
from perco.rpc import addresses
from perco.rpc.addresses import Address
from perco.schema.schema import Schema
from perco.serve import tokens
from perco.serve.beating import PulseThread
from perco.serve.client import open_served, remote_owner
from perco.serve.databases import Owned, Remote, no_owner, remote_store
from perco.serve.placing import ProcessOptions
from perco.serve.processes import TabletServers
from perco.serve.pulse import Pulse
from perco.serve.server import Server
from perco.storage.folder import is_store, shared_by_owner
from perco.storage.lmdb_engine import PidTaken
from perco.tablets.backend import Backend, Tickets
from perco.tablets.local import LocalStore

SOCKET = "socket"
PEM = "-----BEGIN "
_LOOK_S = 0.5  # between two looks for the process that serves a store in a database
_AGAIN_S = 0.02  # between two attempts, while an owner is starting or ending


class open(AsyncOnly):
    """Open a store: `async with perco.open("folder/", schema) as db:`.

    Args:
        url: a folder, which is created if there is none. If another process has it open, this process becomes a client
            of that process, over a socket in the folder. In production, run `perco serve`, an owner that does nothing
            else, because all clients wait while an observer that computes, or a call that blocks, holds the owner's
            loop. Or "memory:". Or a database: "postgresql://USER@HOST/DATABASE?prefix=NAME", or
            "bigtable://PROJECT/INSTANCE?prefix=NAME" with a table that `perco bigtable init` has made. This process
            then owns the store; if another process serves the store for direct clients (`perco serve --direct`), this
            process becomes a direct client instead. Or the address of a served store: "unix:PATH", "tcp://HOST:PORT",
            "tls://HOST:PORT".
        schema: tables, columns and observers. With `readonly`, it may be left out: perco then uses the store's own
            schema, whose columns are, for example, `db.schema.tables["docs"].columns["body"]`.
        options: see `Options`.
        readonly: only read; in a folder, read the files directly, even if another process owns them. (If the owner runs
            in another container and has the same PID, read through it: LMDB identifies processes by their PIDs.)
        create: False: raise UsageError if there is no store yet, for example because of a mistake in the path, instead
            of making an empty one. No effect with `readonly`, or with the address of a served store.
        accept_loss: open a folder in spite of NeedsCheck. No effect in a client: the folder is open already.
        token: the token of a server on TCP; by default the environment's PERCO_TOKEN, or the token of a server that the
            same user runs on this machine.

    Raises: StoreLocked, FormatUnknown, UnsuitableFolder, NeedsCheck, SchemaMismatch, UsageError; for a served store
    Unavailable, WrongToken, VersionMismatch.

    Exceptions of the block propagate unchanged. If one of the store's own tasks fails, the block is cancelled and
    raises BackgroundFailure.
    """

    shown: str

    _write = "async with perco.open(...) as db:`, or in blocking code `with perco.sync.open(...) as db:"

    def __init__(
        self,
        url: str | os.PathLike[str],
        schema: Schema | None = None,
        *,
        options: Options | None = None,
        readonly: bool = False,
        create: bool = True,
        accept_loss: bool = False,
        token: str | None = None,
    ) -> None:
        if not isinstance(url, str) and not (isinstance(url, os.PathLike) and isinstance(os.fspath(url), str)):
            raise UsageError(f"perco.open takes a folder or an address as text or as a pathlib.Path, not {url!r}")
        if schema is None and not readonly:
            raise UsageError("perco.open needs a schema to write; to look at a store, open it with readonly=True")
        if schema is not None and not isinstance(schema, Schema):
            raise UsageError(f"perco.open takes a perco.Schema of tables, not {type(schema).__name__}")
        if options is not None and not isinstance(options, Options):
            raise UsageError(f"options= takes perco.Options(...), not {type(options).__name__}")
        if token is not None and not isinstance(token, str):
            raise UsageError(f"token= takes the token of a server as text, not {type(token).__name__}")
        self._url, self._schema, self._options = url, schema, options or Options()
        self._readonly, self._accept_loss = readonly, accept_loss
        self._must_exist = not create and not readonly  # a program that only reads makes none anyway
        self._token = (os.environ.get("PERCO_TOKEN", "") if token is None else token).encode()
        self._db: Database | None = None
        self._scope = trio.CancelScope()
        self._serving = AsyncExitStack()
        self.server: Server | None = None  # once opened: if this process owns the store and shares it
        self.processes: ProcessOptions | None = None  # set before entry, if tablet servers are to have the tablets open
        self.damaged: dict[Path, Corruption] = {}  # set before entry: tablets that must not be opened, and why
        self.tablet_servers: TabletServers | None = None  # with `processes`, once opened
        self.leads = False  # set before entry: open the store only as its owner
        self.direct = False  # set before entry, with `leads`: let direct clients in
        self.tickets: Tickets | None = None  # with `direct`, once opened
        self.shown = ""  # once opened: the address of a database, without a password
        self.owned: Owned | None = None  # once opened: the store in a database that this process owns

    async def __aenter__(self) -> Database:
        if not trio.lowlevel.in_trio_task():  # trio may run as a guest of another loop
            raise UsageError("perco.open runs on trio: call trio.run(main); under asyncio write perco.aio.open")
        db = self._db = await self._open()
        inside(db).background.on_failure.append(self._scope.cancel)
        self._scope.__enter__()
        return db

    async def _open(self) -> Database:
        text = os.fspath(self._url)
        if addresses.is_address(text):
            return await self._reach(addresses.parse(text))
        if (stored := remote_store(text, self._options)) is not None:
            return await self._open_remote(stored)
        options = self._options
        if self._must_exist and (text == "memory:" or not is_store(_absolute(text))):
            raise _no_store(text)
        if self.processes is not None:
            self.tablet_servers = self._servers()
        deadline = trio.current_time() + options.wire.connect_s
        away: Unavailable | None = None  # why the owner could not be reached, although this process waited for it
        while True:
            try:
                local = LocalStore(
                    self._url,
                    durable=options.durability == "power",
                    readonly=self._readonly,
                    accept_loss=self._accept_loss,
                    lmdb=options.lmdb,
                    batch=options.batch,
                    shared=options.shared,
                    elsewhere=self.tablet_servers,
                    damaged=self.damaged,
                )
                break
            except PidTaken:
                path = _absolute(text)
                if not self._readonly or not shared_by_owner(path):
                    raise
                with suppress(OSError):  # the owner has this process's PID: read through it
                    return await self._connect(Address(path / SOCKET), path)
                raise
            except StoreLocked as locked:
                path = _absolute(text)
                if away is not None:
                    raise away from locked
                if not options.shared or not shared_by_owner(path) or trio.current_time() > deadline:
                    raise
                try:
                    return await self._connect(Address(path / SOCKET), path)
                except Unavailable as error:
                    away = error  # if the owner has ended meanwhile, this process may become the owner
                except OSError:
                    await trio.sleep(_AGAIN_S)  # the owner is starting, or ending
                del locked
        return await self._begin(local, options)

    async def _open_remote(self, remote: Remote) -> Database:
        """Open a store in a database as its owner or, if another process serves it for direct clients, as a direct
        client."""
        options = self._options
        began = trio.current_time()
        deadline = began + (0 if self._readonly else options.wire.connect_s)
        store: Owned | None = None
        if self._must_exist and not await remote.exists():
            raise _no_store(remote.shown)
        while store is None:
            locked: StoreLocked | None = None
            at = "" if self.leads else await remote.address()
            if self.leads or (remote.own is not False and not self._readonly and (remote.own or not at)):
                try:
                    store = await remote.claim(direct=self.direct)
                    break
                except StoreLocked as error:
                    if self.leads:
                        raise
                    locked, at = error, await remote.address()
            if at:
                try:
                    return await self._join_remote(remote, at)
                except (StoreLocked, Unavailable):  # the server is about to lose the store, or has just lost it
                    if trio.current_time() > began + options.wire.patience_s:
                        raise
                await trio.sleep(_LOOK_S)
                continue
            if locked is not None:
                raise locked
            if trio.current_time() > deadline:
                raise no_owner(remote)
            await trio.sleep(_LOOK_S)
        self.shown, self.owned = remote.shown, store
        tickets = self.tickets = store.let_clients_in() if self.direct else None
        db = await self._begin(store, options)
        inside(db).background.start(store.watch, "lease")
        if tickets is not None:
            inside(db).background.start(tickets.run, "tickets")
        return db

    async def _join_remote(self, remote: Remote, at: str) -> Database:
        """Become a direct client. Raises: Unavailable, WrongToken, VersionMismatch; SchemaMismatch."""
        from perco.serve.direct import DirectRowStore

        options, wire, given = self._options, self._options.wire, self._token
        address = addresses.parse(at)

        def trust() -> ssl.SSLContext | None:
            return _trust(wire.ca_file) if address.tls else None

        async def connect(number: int, port: int) -> trio.abc.Stream:
            nonlocal address
            found = await remote.address()  # another process may own the store by now
            if not found:
                raise OSError(f"no process serves {remote.shown}")
            address = addresses.parse(found)
            return await addresses.connect(address, trust())

        def pulsing(pulse: Pulse) -> PulseThread:
            return PulseThread(options.heartbeat, wire, pulse, lambda s: addresses.dial(address, trust(), s))

        try:
            db = await open_served(
                *(remote.shown, connect, self._schema, options, wire, lambda: given or tokens.find(address)),
                readonly=self._readonly,
                pulsing=pulsing,
                remedy=f"Start `perco serve {shlex.quote(remote.shown)} --direct`.",
                reach=remote.rows,
            )
        except SessionEnded as error:
            raise Unavailable(f"the server of {remote.shown} ended while the store was opened") from error
        store = remote_owner(db).store
        assert isinstance(store, DirectRowStore)
        inside(db).background.start(lambda: store.follow(lambda found: addresses.parse(found) == address), "follow")
        return db

    async def _begin(self, backend: Backend, options: Options) -> Database:
        """Prepare the database; if that fails, close what is open by then."""
        try:
            return await self._prepare(backend, options)
        except BaseException:
            with trio.CancelScope(shield=True):
                if self._db is not None:
                    await close(self._db)
                else:
                    await backend.aclose()
            raise

    def _servers(self) -> TabletServers:
        options = self._options
        assert self.processes is not None
        return TabletServers(
            _absolute(os.fspath(self._url)),
            self.processes,
            wire=options.wire,
            lmdb=replace(options.lmdb, sync=options.durability == "power"),
            batch=options.batch,
            commit_timeout_s=options.commit.commit_timeout_s,
            seed=options.seed,
        )

    async def _visit(self) -> Database:
        """Open the store as a client, never as its owner."""
        text = os.fspath(self._url)
        if addresses.is_address(text):
            return await self._reach(addresses.parse(text))
        if (stored := remote_store(text, self._options)) is not None:
            if not (at := await stored.address()):
                raise no_owner(stored)
            return await self._join_remote(stored, at)
        path = _absolute(text)
        if not path.is_dir():
            raise _no_store(text)
        try:
            return await self._connect(Address(path / SOCKET), path)
        except OSError as error:
            raise Unavailable(
                f"no process has {text} open, or the process that has it does not share it",
                remedy=f"Start `{_serve(text)}` first.",
            ) from error

    async def _reach(self, address: Address) -> Database:
        """Connect to the address that the program gave. Raises: Unavailable, and the errors of `_connect`."""
        self._token = self._token or tokens.find(address)
        try:
            return await self._connect(address)
        except OSError as error:
            raise _unreached(address, error) from error

    async def _connect(self, address: Address, folder: Path | None = None) -> Database:
        trust = _trust(self._options.wire.ca_file) if address.tls else None
        with trio.move_on_after(self._options.wire.connect_s) as scope:  # if no server is there, fail now
            stream = await addresses.connect(address, trust)
            await trio.aclose_forcefully(stream)
        if scope.cancelled_caught:
            raise OSError(f"not within {self._options.wire.connect_s:g} s")

        def connect(number: int, port: int) -> Awaitable[trio.abc.Stream]:
            return addresses.connect(address.beside(number, port) if number else address, trust)

        def pulsing(pulse: Pulse) -> PulseThread:
            return PulseThread(self._options.heartbeat, wire, pulse, partial(addresses.dial, address, trust))

        wire = self._options.wire
        remedy = "" if folder is None else f"Start `{_serve(folder)}`, or open the folder in a process that stays."
        try:
            return await open_served(
                *(str(address), connect, self._schema, self._options, wire, self._token),
                readonly=self._readonly,
                pulsing=pulsing,
                remedy=remedy,
            )
        except SessionEnded as error:  # as if the owner had ended before
            raise ConnectionAbortedError("the store's owner ended while the store was opened") from error

    async def _prepare(self, backend: Backend, options: Options) -> Database:
        if self._readonly:
            assert backend.local is not None
            return await make_beside(backend.local, self._schema, options)
        assert self._schema is not None
        db = self._db = make(backend, self._schema, options)
        parts, owner = inside(db), local_owner(db)
        if self.tickets is not None:
            parts.fates.not_alone()
        if self.tablet_servers is not None:
            parts.fates.not_alone()
            self.tablet_servers.background.on_failure.append(self._scope.cancel)
            assert backend.local is not None
            self.tablet_servers.start(backend.local.lock_file())
        await parts.oracle.start()
        await owner.declare()
        # O3: readers that opened the folder when it had no owner wait for a note of the clock that covers all commits
        # so far. Every tablet must be open first: LMDB shows readers a dead writer's last batch once the next writer
        # begins.
        await owner.note_now()
        owner.start()
        if options.shared and (backend.path is not None or backend.remote):
            await self._share(db, backend.path)
        return db

    async def _share(self, db: Database, path: Path | None) -> None:
        """Serve other processes of this user, over a socket in the folder. A store without a folder is served only
        where the program says."""
        self.server = Server(db, self._options.wire, self.tablet_servers, self.tickets)
        await self._serving.enter_async_context(self.server.keeping())
        if path is None:
            return
        socket = Address(_absolute(path) / SOCKET)
        try:
            await self._serving.enter_async_context(self.server.listening(socket, ours=True))  # the folder is ours
        except StoreError as error:  # a file system without sockets, or without space: the store itself works
            warnings.warn(
                f"{error}: other processes cannot use the store while this one has it open. If that is "
                "intended, pass perco.Options(shared=False)",
                PercoWarning,
                stacklevel=5,
            )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        db = self._db
        assert db is not None
        swallowed = False
        try:
            with trio.CancelScope(shield=True):
                await self._serving.aclose()
            await close(db)
        finally:
            swallowed = bool(self._scope.__exit__(kind, error, trace)) and error is not None
        background = inside(db).background
        stopped = background.stopped
        if stopped is not None and (error is None or swallowed):
            raise stopped
        failure = background.failure()
        if failure is None and self.tablet_servers is not None:
            failure = self.tablet_servers.background.failure()
        if failure is not None and (error is None or swallowed):
            raise failure
        assert not swallowed, "only a failure cancels the block"


class joining(open):
    """Like `open`, but only as a client of a process that serves the store, and with the store's own catalogue: for
    programs that write to tables that another program has declared.

    Raises: Unavailable, if no process serves the store; otherwise as `open`.
    """

    def __init__(
        self, url: str | os.PathLike[str], *, options: Options | None = None, token: str | None = None
    ) -> None:
        super().__init__(url, readonly=True, options=options, token=token)
        self._readonly = False

    async def _open(self) -> Database:
        return await self._visit()


def _trust(ca_file: str) -> ssl.SSLContext:
    try:
        if ca_file.startswith(PEM):
            return ssl.create_default_context(cadata=ca_file)
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise UsageError(f"ca_file {ca_file!r} cannot be used: {error}") from error


def _unreached(address: Address, error: OSError) -> Unavailable:
    what, remedy = addresses.unreached(address, error)
    return Unavailable(what, remedy=remedy)


def _no_store(where: str) -> UsageError:
    return UsageError(f"there is no store at {where}")


def _serve(folder: str | Path) -> str:
    return f"perco serve {shlex.quote(str(folder))}"


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()


@asynccontextmanager
async def visiting(url: str | os.PathLike[str], *, token: str | None = None) -> AsyncIterator[Database]:
    """Open a store as a client of the process that has a folder open, or serves at an address; never as the owner.

    Raises: Unavailable, if there is no such process; otherwise as `open`.
    """
    opened = open(url, readonly=True, token=token)
    db = await opened._visit()
    try:
        yield db
    finally:
        with trio.CancelScope(shield=True):
            await close(db)
