"""Where the transactions of a test run: the same test bodies over every way in which a store can be reached.

    owner     in the process that owns the store
    folder    in a client of the owner, over the Unix socket in the folder
    tls       in a client of the owner, over TCP and TLS, with the store's token
    tablets   in a client of a store whose tablets are with two tablet servers
    bare      in the process that owns a store without any capability: single rows only, and every call is awaited
    postgresql, bigtable
              in the process that owns a store on a PostgreSQL server, on a Bigtable emulator
    direct, bigtable_direct
              in a client of such a process, which reads and writes the rows by itself

The owner of a deployment is real, and so are its server, sockets, certificates and sessions; it shares the process and
the loop of the test, so time may be virtual. Tablet servers run in that loop too, over tablets in memory.
A client's `local.store.tablets()` are the owner's: a test counts there the cells that are stored.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from zlib import crc32

import pytest
import trio
import trustme

import perco
from perco.database.database import Database
from perco.database.inside import close, inside, local_owner
from perco.database.making import make
from perco.postgresql.options import PostgresqlOptions
from perco.rpc import addresses
from perco.rpc.addresses import Address
from perco.rpc.channel import WireOptions
from perco.serve.client import make_client, remote_owner
from perco.serve.opening import SOCKET, _trust, open as opened
from perco.serve.placing import ProcessOptions
from perco.serve.processes import TabletServers
from perco.serve.server import Server
from perco.tablets.backend import Tickets
from perco.tablets.local import LocalStore
from perco.testing.bare import BareStore, SingleRows
from perco.testing.faults import FaultyRowStore
from tests.support import bigtable, postgresql
from tests.support.left_out import LEFT_OUT, LeftOut
from tests.support.places import local_of, rows_of
from tests.support.spread import MemoryServers

OWNER, FOLDER, TLS, TABLETS, BARE = "owner", "folder", "tls", "tablets", "bare"
POSTGRESQL, DIRECT = "postgresql", "direct"
BIGTABLE, BIGTABLE_DIRECT = "bigtable", "bigtable_direct"
DEPLOYMENTS: Final = (OWNER, FOLDER, TLS, TABLETS, BARE, POSTGRESQL, DIRECT, BIGTABLE, BIGTABLE_DIRECT)
CLIENTS: Final = (FOLDER, TLS, TABLETS, DIRECT, BIGTABLE_DIRECT)
_ON_BIGTABLE: Final = (BIGTABLE, BIGTABLE_DIRECT)
_ON_POSTGRESQL: Final = (POSTGRESQL, DIRECT)

_TOKEN: Final = b"a token that only the tests know"
_SERVERS: Final = 2
ROOT: Final = Path(__file__).parents[1]

over = OWNER  # which one the test that is running runs over; `running_over` sets it


@contextlib.contextmanager
def running_over(deployment: str) -> Any:
    """While the block lasts, a test opens its stores over that deployment."""
    global over
    before, plain = over, perco.open
    over = deployment
    if deployment == BARE:
        perco.open = _Bare  # type: ignore[misc]
    elif deployment == POSTGRESQL:
        perco.open = _Postgresql  # type: ignore[misc]
    elif deployment == BIGTABLE:
        perco.open = _Bigtable  # type: ignore[misc]
    elif deployment != OWNER:
        perco.open = Opened  # type: ignore[misc, assignment]
    try:
        with contextlib.ExitStack() as stack:
            if deployment in _ON_POSTGRESQL:
                stack.enter_context(postgresql.real_time())
            elif deployment in _ON_BIGTABLE:
                stack.enter_context(bigtable.real_time())
            yield
    finally:
        over, perco.open = before, plain  # type: ignore[misc]


@functools.cache
def _certificates() -> tuple[str, str]:
    """The file of a certificate for 127.0.0.1 and its key; and, in PEM, the authority that it is checked with."""
    authority = trustme.CA()
    handle, name = tempfile.mkstemp(suffix=".pem")
    os.close(handle)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(name)
    return name, authority.cert_pem.bytes().decode()


class _Client(opened):
    """A client of a server in this process. No thread watches its loop (R10): while that is joined, virtual time
    would go on.

    `store`: a wrapper, through which all that it does goes from its beginning on.
    """

    store: Any = None
    reach: Any = None  # makes the rows of a client that reads and writes them by itself

    async def _connect(self, address: Address) -> Database:
        trust = _trust(self._options.wire.ca_file) if address.tls else None

        def connect(number: int, port: int) -> Awaitable[trio.abc.Stream]:
            return addresses.connect(address.beside(number, port) if number else address, trust)

        assert self._schema is not None
        db = make_client(
            *(self._schema, self._options, self._options.wire, str(address), connect, _TOKEN), reach=self.reach
        )
        if self.store is not None:
            through(db, self.store)
        try:
            await remote_owner(db).begin_link()
        except BaseException:
            with trio.CancelScope(shield=True):
                await close(db)
            raise
        return db


class Door:
    """Where an owner is reached, over the deployment of the test."""

    def __init__(self, owner: Database, server: Server, address: Address) -> None:
        self.owner, self.server, self.address = owner, server, address

    @asynccontextmanager
    async def client(
        self, schema: perco.Schema, options: perco.Options, *, store: Any = None, mortal: bool = False
    ) -> AsyncIterator[Database]:
        """One more client, as `perco.open` of the address makes it.

        Args:
            store: a wrapper, through which all that it does goes.
            mortal: the errors that its background tasks die of are not told: the test may have let them die.
        """
        if self.address.tls:
            options = replace(options, wire=replace(options.wire, ca_file=_certificates()[1]))
        client = _Client(str(self.address), schema, options=options, token=_TOKEN.decode())
        client.store = store
        if over == DIRECT:
            client.reach = functools.partial(postgresql.client_rows, self.owner)
        elif over == BIGTABLE_DIRECT:
            client.reach = functools.partial(bigtable.client_rows, self.owner)
        if not mortal:
            async with client as db:
                yield self._looked_into(db)
            return
        db = await client._open()
        try:
            yield self._looked_into(db)
        finally:
            await close(db)

    @asynccontextmanager
    async def opened(self, options: perco.Options, *, sweeping: bool) -> AsyncIterator[Door]:
        """As `Place.opened`, of a store whose owner lives on."""
        yield self

    def _looked_into(self, db: Database) -> Database:
        local_of(db).store.tablets = rows_of(self.owner).tablets
        db.owner = self.owner  # type: ignore[attr-defined]
        local_of(db).place = getattr(local_of(self.owner), "place", self)
        return db


@asynccontextmanager
async def served(
    owner: Database, wire: WireOptions, servers: MemoryServers | None, tickets: Tickets | None = None
) -> AsyncIterator[Door]:
    """The owner is served as the deployment says, while the block lasts."""
    server = Server(owner, wire, servers, tickets)
    with contextlib.ExitStack() as files:
        if over == TLS:
            address = Address(
                None, "127.0.0.1", 0, True
            )  # a name is looked up in a thread, which virtual time does not see
        else:
            folder = local_of(owner).path or Path(files.enter_context(tempfile.TemporaryDirectory(prefix="perco-")))
            address = Address(folder.absolute() / SOCKET)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(server.keeping())
            bound = await stack.enter_async_context(
                server.listening(address, _TOKEN, (_certificates()[0], "") if over == TLS else None, ours=over != TLS)
            )
            yield Door(owner, server, bound)


class _Owner(opened):
    """Of a folder, or of memory; with tablet servers in this process if that is the deployment."""

    def _servers(self) -> TabletServers:
        assert self.processes is not None
        return MemoryServers(self.processes, self._options.wire)


class _Bare(opened):
    """As the owner of a store without any capability, whose rows are in what was asked for."""

    async def _open(self) -> Database:
        if self._readonly or addresses.is_address(os.fspath(self._url)):
            return await super()._open()
        options = self._options
        local = LocalStore(
            self._url,
            durable=options.durability == "power",
            readonly=False,
            accept_loss=self._accept_loss,
            lmdb=options.lmdb,
            batch=options.batch,
        )
        return await self._begin(bare(local), options)


class _Postgresql(opened):
    """As the owner of a store on PostgreSQL, in place of the folder or the memory that was asked for."""

    async def _open(self) -> Database:
        text = os.fspath(self._url)
        if self._readonly or addresses.is_address(text):
            return await super()._open()
        url = postgresql.fresh() if text == "memory:" else postgresql.address_of(text)
        backend = await postgresql.DividedStore.open(url, PostgresqlOptions(), durable=False)
        backend.store.tablets = backend.rows.tablets  # type: ignore[attr-defined]
        tickets = self.tickets = backend.let_clients_in() if over == DIRECT else None
        db = await self._begin(backend, self._options)
        if tickets is not None:
            inside(db).background.start(tickets.run, "tickets")
        return db


class _Bigtable(opened):
    """As the owner of a store on Bigtable, in place of the folder or the memory that was asked for."""

    async def _open(self) -> Database:
        text = os.fspath(self._url)
        if self._readonly or addresses.is_address(text):
            return await super()._open()
        url = bigtable.fresh() if text == "memory:" else bigtable.address_of(text)
        options = bigtable.permits() if over == BIGTABLE_DIRECT else bigtable.QUICK
        backend = await bigtable.DividedStore.open(url, options)
        backend.store.tablets = backend.rows.tablets  # type: ignore[attr-defined]
        tickets = self.tickets = backend.let_clients_in() if over == BIGTABLE_DIRECT else None
        db = await self._begin(backend, self._options)
        if tickets is not None:
            inside(db).background.start(tickets.run, "tickets")
        return db


def bare(local: LocalStore, below: Any = None) -> BareStore:
    """A store with a look into its rows, which are those of `local`; it has no capability, or is in a database.
    `below`: a wrapper that everything goes through."""
    rows: Any = local.store if over in (POSTGRESQL, BIGTABLE) else SingleRows(local.store)
    if isinstance(below, FaultyRowStore):
        below._store = rows
        below.groups = rows.groups
    elif below is not None:
        below._inner = rows
    backend = BareStore(local, below or rows)
    backend.store.tablets = local.store.tablets  # type: ignore[attr-defined]
    return backend


class Opened:
    """In the place of `perco.open`: a client of an owner that opens what was asked for."""

    def __init__(self, url: str | os.PathLike[str], schema: perco.Schema | None = None, **more: Any) -> None:
        self._url, self._schema, self._more = url, schema, more
        self._direct = bool(more.get("readonly")) or schema is None
        self._plain = opened(url, schema, **more)  # says what is wrong with the arguments
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Database:
        if self._direct:
            return await self._plain.__aenter__()
        assert self._schema is not None
        options = self._more.get("options") or perco.Options()
        # The owner knows the schema's tables from the client alone.
        own = replace(options, shared=False, on_event=None)
        owned = {DIRECT: _Postgresql, BIGTABLE_DIRECT: _Bigtable}.get(over, _Owner)
        opening = owned(self._url, perco.Schema(), **{**self._more, "options": own})
        if over == TABLETS:
            opening.processes = ProcessOptions(servers=_SERVERS)
        async with AsyncExitStack() as stack:
            owner = await stack.enter_async_context(opening)
            servers = opening.tablet_servers
            assert servers is None or isinstance(servers, MemoryServers)
            door = await stack.enter_async_context(served(owner, options.wire, servers, opening.tickets))
            db = await stack.enter_async_context(door.client(self._schema, options))
            self._stack = stack.pop_all()
        return db

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        if self._direct:
            return await self._plain.__aexit__(kind, error, trace)
        return await self._stack.__aexit__(kind, error, trace)


class Place:
    """A store in memory that outlives its owners; a process that opens it joins the owner, if there is one, or starts
    one."""

    def __init__(self, local: LocalStore, servers: MemoryServers | None) -> None:
        self.local, self._servers = local, servers
        self._door: Door | None = None
        self._sweeping = 0
        self._stop_sweeping: Callable[[], None] = lambda: None
        self._began = False

    @asynccontextmanager
    async def opened(self, options: perco.Options, *, sweeping: bool) -> AsyncIterator[Door]:
        """While the block lasts. The block that began first is the owner's life, and ends last."""
        async with AsyncExitStack() as stack:
            if self._door is None:
                self._door = await stack.enter_async_context(self._owned(options))
                stack.callback(setattr, self, "_door", None)
            self._sweep(self._door.owner, sweeping)
            stack.callback(self._sweep, self._door.owner, -sweeping)
            yield self._door

    @asynccontextmanager
    async def _owned(self, options: perco.Options) -> AsyncIterator[Door]:
        backend: Any = self.local
        tickets: Any = None
        if over in (DIRECT, BIGTABLE_DIRECT):
            backend = (postgresql if over == DIRECT else bigtable).DirectBackend(backend)
            tickets = await backend.let_clients_in()
        owner = make(backend, perco.Schema(), replace(options, shared=False, on_event=None))
        if tickets is not None:
            inside(owner).fates.not_alone()
            inside(owner).background.start(tickets.run, "tickets")
        if self._servers is not None:
            inside(owner).fates.not_alone()
            if not self._began:
                self._servers.start(-1)  # they outlive owners, as their tablets do; the end of the loop is theirs
                self._began = True
        try:
            await inside(owner).oracle.start()
            await local_owner(owner).declare()
            async with served(owner, options.wire, self._servers, tickets) as door:
                yield door
        finally:
            await inside(owner).background.aclose()

    def _sweep(self, owner: Database, more: int) -> None:
        before, self._sweeping = self._sweeping, self._sweeping + more
        if self._sweeping and not before:
            self._stop_sweeping = inside(owner).background.start(local_owner(owner).sweeper.run, "sweeper")
        elif before and not self._sweeping:
            self._stop_sweeping()


def place() -> Place:
    """An empty store in memory, over the deployment of the test; or in a database."""
    servers = None
    if over in (*_ON_POSTGRESQL, *_ON_BIGTABLE):
        rows: Any = bigtable.LocalRows() if over in _ON_BIGTABLE else postgresql.LocalRows()
        rows.place = Place(rows, None)
        return rows.place  # type: ignore[no-any-return]
    if over == TABLETS:
        servers = MemoryServers(ProcessOptions(servers=_SERVERS), WireOptions())
    config = perco.Options()
    local = LocalStore(
        "memory:",
        durable=True,
        readonly=False,
        accept_loss=False,
        lmdb=config.lmdb,
        batch=config.batch,
        elsewhere=servers,
    )
    made = Place(local, servers)
    local.place = made  # type: ignore[attr-defined]
    return made


def owning(db: Any) -> Database:
    """The owner's database: this one, or that of the owner that it is a client of."""
    return getattr(db, "owner", db)  # type: ignore[no-any-return]


def through(db: Database, store: Any) -> None:
    """From now on all that the client does goes through a wrapper, which is put round the client's own row store."""
    own = local_of(db).store
    if isinstance(store, FaultyRowStore):
        store._store = own
    else:
        store._inner = own
    local_of(db).store = store
    inside(db).driver.store = inside(db).driver.reads = store


# ------------------------------------------------------------------ which tests run over which


def _named(config: pytest.Config) -> list[str]:
    chosen = config.getoption("--over")
    return list(DEPLOYMENTS) if chosen == "all" else chosen.split(",")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """For the conftest of a suite: its tests run over those that `--over` names."""
    names = _named(metafunc.config)
    if unknown := set(names) - set(DEPLOYMENTS):
        raise pytest.UsageError(f"--over: {', '.join(sorted(unknown))}? There are {', '.join(DEPLOYMENTS)}; all")
    metafunc.parametrize("deployment", names, indirect=True)


@pytest.fixture(autouse=True)
def deployment(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where what the test opens is reached."""
    with running_over(request.param):
        yield request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For the same: pytest reports tests that are left out as deselected."""
    names, each = _named(config), int(config.getoption("--each"))
    left = [item for item in items if reason_for(item) is not None or not is_chosen(item, names, each)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def is_chosen(item: pytest.Item, names: Sequence[str], each: int) -> bool:
    """Whether a test runs over its deployment, if each test runs over so many of those named. The name of the test
    decides over which, so that it is always the same ones; 0: over all."""
    spec = getattr(item, "callspec", None)
    if not each or spec is None or "deployment" not in spec.params:
        return True
    over = spec.params["deployment"]
    others = "-".join(part for part in spec.id.split("-") if part != over)
    name = f"{item.path.relative_to(ROOT).as_posix()}::{item.function.__name__}[{others}]"  # type: ignore[attr-defined]
    return (crc32(name.encode()) + names.index(over)) % len(names) < each


def reason_for(item: pytest.Item) -> LeftOut | None:
    """Why a test is not run over its deployment, if it is not."""
    spec = getattr(item, "callspec", None)
    if spec is None or (over := spec.params.get("deployment", OWNER)) == OWNER:
        return None
    path = item.path.relative_to(ROOT).as_posix()
    function, id = item.function.__name__, spec.id  # type: ignore[attr-defined]
    return next((left for left in LEFT_OUT if over in left.over and left.names(path, function, id)), None)
