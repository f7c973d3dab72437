"""`perco.open`: which store it is, and which process owns it.

`memory:` is in this process. A folder is opened by this process, if no other has it open: its *owner*, which listens on
a socket in the folder; else this one becomes a client of that. At `unix:PATH`, `tcp://HOST:PORT` and `tls://HOST:PORT`
somebody serves.
"""

from __future__ import annotations

import os
import shlex
import ssl
import warnings
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

import trio

from perco.errors import (
    AsyncOnly,
    Corruption,
    PercoWarning,
    SchemaMismatch,
    SessionEnded,
    StoreError,
    StoreLocked,
    Unavailable,
    UsageError,
)
from perco.notify.database import Database
from perco.rpc import addresses
from perco.rpc.addresses import Address
from perco.serve import tokens
from perco.serve.beating import PulseThread
from perco.serve.database import RemoteDatabase, open_served
from perco.serve.processes import ProcessOptions, TabletServers
from perco.serve.pulse import Pulse
from perco.serve.server import Server
from perco.storage.folder import shared_by_owner
from perco.txn import catalogue as catalogues
from perco.txn.beside import BesideDriver, BesideOracle
from perco.txn.client import Options
from perco.txn.local import LocalStore
from perco.txn.schema import Schema

SOCKET = "socket"
PEM = "-----BEGIN "
_AGAIN_S = 0.02  # between two looks for an owner that has just begun, or is ending


class open(AsyncOnly):
    """Open a store: `async with perco.open("folder/", schema) as db:`.

    Args:
        url: a folder, made if there is none; if another process has it open, this one becomes its client, over a
            socket in the folder. In production run `perco serve`, an owner that does nothing else: while an observer
            that computes, or a call that blocks, holds the owner's loop, all others wait. Or "memory:", or the address
            of a served store: "unix:PATH", "tcp://HOST:PORT", "tls://HOST:PORT".
        schema: tables, columns and observers. May be left out when reading only: then the store's own is used, and
            `db.schema.tables["docs"].columns["body"]` gives its columns.
        options: see `Options`.
        readonly: read the files while another process may own the folder.
        accept_loss: open a folder that refuses with NeedsCheck. Of no meaning for a client: the folder is open.
        token: that of a server on TCP; by default the environment's PERCO_TOKEN, or that of a server of the same user
            on this machine.

    Raises: StoreLocked, FormatUnknown, UnsuitableFolder, NeedsCheck, SchemaMismatch, UsageError; of a served store
    Unavailable, WrongToken, VersionMismatch.

    Exceptions of the block propagate unchanged. If one of the store's own tasks dies, the block is cancelled and raises
    BackgroundFailure.
    """

    _write = "async with perco.open(...) as db:`, or in blocking code `with perco.sync.open(...) as db:"

    def __init__(
        self,
        url: str | os.PathLike[str],
        schema: Schema | None = None,
        *,
        options: Options | None = None,
        readonly: bool = False,
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
        self._token = (os.environ.get("PERCO_TOKEN", "") if token is None else token).encode()
        self._db: Database | None = None
        self._scope = trio.CancelScope()
        self._serving = AsyncExitStack()
        self.server: Server | None = None  # of the owner of a folder
        self.processes: ProcessOptions | None = None  # set before: its tablets are open in others
        self.damaged: dict[Path, Corruption] = {}  # set before: tablets that must not be opened, and why
        self.tablet_servers: TabletServers | None = None  # which these are

    async def __aenter__(self) -> Database:
        if not trio.lowlevel.in_trio_task():  # another loop may have a trio run for its guest
            raise UsageError("perco.open runs on trio: call trio.run(main); under asyncio write perco.aio.open")
        db = self._db = await self._open()
        db.background.on_failure.append(self._scope.cancel)
        self._scope.__enter__()
        return db

    async def _open(self) -> Database:
        text = os.fspath(self._url)
        if addresses.is_address(text):
            address = addresses.parse(text)
            self._token = self._token or tokens.find(address)
            try:
                return await self._connect(address)
            except OSError as error:
                raise _unreached(address, error) from error
        options = self._options
        if self.processes is not None:
            self.tablet_servers = self._servers()
        deadline = trio.current_time() + options.wire.connect_s
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
            except StoreLocked as locked:
                path = _absolute(text)
                if not options.shared or not shared_by_owner(path) or trio.current_time() > deadline:
                    raise
                try:
                    return await self._connect(Address(path / SOCKET), path)
                except OSError:
                    del locked  # it has just begun, or is ending
                await trio.sleep(_AGAIN_S)
        return await self._begin(local, options)

    async def _begin(self, local: LocalStore, options: Options) -> Database:
        """Prepare the database; if that fails, close what is open by then."""
        try:
            return await self._prepare(local, options)
        except BaseException:
            with trio.CancelScope(shield=True):
                if self._db is not None:
                    await self._db.aclose()
                else:
                    await local.aclose()
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

    async def _visit(self) -> RemoteDatabase:
        """Never as the owner."""
        text = os.fspath(self._url)
        if addresses.is_address(text):
            address = addresses.parse(text)
            self._token = self._token or tokens.find(address)
            try:
                return await self._connect(address)
            except OSError as error:
                raise _unreached(address, error) from error
        path = _absolute(text)
        if not path.is_dir():
            raise UsageError(f"there is no store at {text}")
        try:
            return await self._connect(Address(path / SOCKET), path)
        except OSError as error:
            raise Unavailable(
                f"no process has {text} open, or it is open to one process alone",
                remedy=f"Start `{_serve(text)}` first.",
            ) from error

    async def _connect(self, address: Address, folder: Path | None = None) -> RemoteDatabase:
        trust = _trust(self._options.wire.ca_file) if address.tls else None
        with trio.move_on_after(self._options.wire.connect_s) as scope:  # who is away altogether is told at once
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
        except SessionEnded as error:  # as if it had ended before
            raise ConnectionAbortedError("the store's owner ended while the store was opened") from error

    async def _prepare(self, local: LocalStore, options: Options) -> Database:
        if self._readonly:
            return await _beside(local, self._schema, options)
        assert self._schema is not None
        db = self._db = Database(local, self._schema, options)
        if self.tablet_servers is not None:
            db.fates.not_alone()
            self.tablet_servers.background.on_failure.append(self._scope.cancel)
            self.tablet_servers.start(local.lock_file())
        await db.oracle.start()
        await db.declare()
        # O3: all that was ever committed, for those who read beside nobody and now read beside us. Not before every
        # tablet is open: LMDB shows readers the last batch of a writer that died when the next one has begun.
        await db.note_now()
        db.background.start(db.sweeper.run, "sweeper")
        db.background.start(db.note_time, "clock")
        if options.vacuum.on:
            db.background.start(db.vacuuming.in_background, "vacuum")
        db.background.start(db.splitting.in_background, "splitter")
        if db.local.store.queues:
            db.background.start(db.watch_disk, "disk")
        if local.threaded:
            db.heartbeat.start()
        if options.shared and local.path is not None:
            await self._share(db, local.path)
        return db

    async def _share(self, db: Database, path: Path) -> None:
        """Let other processes of this user in, over a socket in the folder."""
        self.server = Server(db, self._options.wire, self.tablet_servers)
        await self._serving.enter_async_context(self.server.keeping())
        socket = Address(_absolute(path) / SOCKET)
        try:
            await self._serving.enter_async_context(self.server.listening(socket, ours=True))  # the folder is
        except StoreError as error:  # a file system without sockets, or without space: the store itself works
            warnings.warn(
                f"{error}: other processes cannot use the store beside this one. perco.Options(shared=False) says that "
                "none shall",
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
            await db.aclose()
        finally:
            swallowed = bool(self._scope.__exit__(kind, error, trace)) and error is not None
        stopped = db.background.stopped
        if stopped is not None and (error is None or swallowed):
            raise stopped
        failure = db.background.failure()
        if failure is None and self.tablet_servers is not None:
            failure = self.tablet_servers.background.failure()
        if failure is not None and (error is None or swallowed):
            raise failure
        assert not swallowed, "only a failure cancels the block"


class joining(open):
    """As `open`, of a store that somebody serves, under its own catalogue: for programs that write to tables which
    another has declared.

    Raises: Unavailable, where nobody does; as `open`.
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


def _serve(folder: str | Path) -> str:
    return f"perco serve {shlex.quote(str(folder))}"


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()


@asynccontextmanager
async def visiting(url: str | os.PathLike[str], *, token: str | None = None) -> AsyncIterator[RemoteDatabase]:
    """A client of whoever has a folder open, or serves at an address; never its owner.

    Raises: Unavailable, where nobody does; as `open`.
    """
    opened = open(url, readonly=True, token=token)
    db = await opened._visit()
    try:
        yield db
    finally:
        with trio.CancelScope(shield=True):
            await db.aclose()


@asynccontextmanager
async def offline(url: str | os.PathLike[str], *, accept_loss: bool = False) -> AsyncIterator[Database]:
    """The owner's database, nothing running in it, under the store's own catalogue: for repairs. Raises: as `open`."""
    options = Options()
    local = LocalStore(
        url, durable=True, readonly=False, accept_loss=accept_loss, lmdb=options.lmdb, batch=options.batch
    )
    try:
        catalogue = await catalogues.load(local.store)
        await local.adapt(catalogue)
        db = Database(local, catalogues.schema_of(catalogue), options)
        db.catalogue = catalogue
        await db._take_over()
        await db.oracle.start()
        yield db
    finally:
        with trio.CancelScope(shield=True):
            await local.aclose()


async def _beside(local: LocalStore, schema: Schema | None, options: Options) -> Database:
    """A database that only reads, from its owner's catalogue and notes."""
    catalogue = await catalogues.load(local.store)
    borrowed = schema is None
    if schema is None:
        schema = catalogues.schema_of(catalogue)
    elif catalogue.declare(schema) is not catalogue:
        raise SchemaMismatch("the store does not have all that the schema declares; open it once for writing")
    await local.adapt(catalogue)
    db = Database(local, schema, options)
    db.catalogue, db._borrowed = catalogue, borrowed
    db.oracle = BesideOracle(local, options.oracle, options.wall)
    db.driver = BesideDriver(local, db.oracle, db.fates, options.commit, db.background, None)
    db.driver.name = db.name_of
    await db._take_over()
    return db
