"""A PostgreSQL server for the tests of a process, started when the first of them needs it; each test has tables of its
own. Time may be virtual: it stands still while a call to the server is in flight."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from bench.against import postgres
from bench.against.postgres import NoPostgresError, Server, server
from perco.database.inside import inside
from perco.postgresql.address import Place
from perco.postgresql.client import ClientRows
from perco.postgresql.connection import Connection, libpq
from perco.postgresql.fence import Fence
from perco.postgresql.options import PostgresqlOptions
from perco.postgresql.rows import PostgresqlRows
from perco.postgresql.store import Counted, PostgresqlStore
from perco.postgresql.tickets import Tickets
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import PROTOCOL_GROUPS
from perco.testing.bare import BareStore
from tests.support.divided import Divided, Stored
from tests.support.realtime import held, waited_for

_numbers = itertools.count()
_of_folders: dict[str, str] = {}


def running() -> Server:
    """The server of this process. Skips the test if PostgreSQL is not installed. If the server has ended by itself, the
    test that finds out fails with the end of its log, and later tests get another one."""
    found, log = _running()
    if not Path(f"/proc/{found.pid}/exe").exists():  # there is none of a process that has ended, but is not reaped
        _running.cache_clear()
        _link.cache_clear()
        raise AssertionError(f"the PostgreSQL server has ended: {log.read_text(errors='replace')[-2000:]}")
    return found


@functools.cache
def _running() -> tuple[Server, Path]:
    """The server, and its log."""
    # PR_SET_PDEATHSIG: the system ends the server with the thread that has started it.
    assert threading.current_thread() is threading.main_thread()
    stack = ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perco-pg-")))
    try:
        return stack.enter_context(server(folder)), folder / "postgres" / "log"
    except NoPostgresError as error:
        pytest.skip(str(error))


def fresh() -> str:
    """The address of a store that does not exist yet."""
    return f"postgresql://bench@/postgres?host={running().socket}&prefix=t{os.getpid()}_{next(_numbers)}"


def address_of(folder: str) -> str:
    """The address of a store in place of a folder; the same for the same folder."""
    return _of_folders.setdefault(os.path.abspath(folder), fresh())


@functools.cache
def _link() -> Any:
    """A connection that blocks, for looks into the tables."""
    return libpq().PGconn.connect(f"host={running().socket} user=bench dbname=postgres".encode())


def execute(sql: str) -> list[tuple[bytes, ...]]:
    """Run a command; returns the rows of its result, in PostgreSQL's text format."""
    result = _link().exec_(sql.encode())
    assert not result.error_message, result.error_message
    columns = range(result.nfields)
    return [tuple(result.get_value(i, column) for column in columns) for i in range(result.ntuples)]


# ------------------------------------------------------------------ virtual time


@contextmanager
def real_time() -> Iterator[None]:
    """While the block lasts, virtual time does not jump while a call to PostgreSQL is in flight."""
    before = Connection.open, Connection.run, Connection.execute
    Connection.open = classmethod(held(Connection.open.__func__))  # type: ignore
    Connection.run = held(Connection.run)  # type: ignore
    Connection.execute = held(Connection.execute)  # type: ignore
    try:
        with waited_for():
            yield
    finally:
        Connection.open, Connection.run, Connection.execute = before  # type: ignore


# ------------------------------------------------------------------ looks into the tables


class DividedRows(Divided, PostgresqlRows):
    """Rows that are in tablets as the catalogue says, so that transactions have secondaries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = True

    def stored(self, table: str) -> Iterator[Stored]:
        names = {space: group for (of, group), space in self._spaces.items() if of == table}
        cells = execute(
            f"SELECT space, encode(row, 'hex'), col, ts, encode(value, 'hex') "
            f"FROM {self.statements.prefix}_cells WHERE space IN ({','.join(map(str, names))})"
        )
        for space, row, column, ts, value in cells:
            yield bytes.fromhex(row.decode()), names[int(space)], int(column), int(ts), bytes.fromhex(value.decode())


class DividedStore(PostgresqlStore):
    """As the product's, over `DividedRows`."""

    _rows = DividedRows

    async def adapt(self, catalogue: Any) -> None:
        await super().adapt(catalogue)
        self.rows.divide(catalogue)  # type: ignore[attr-defined]


_made: weakref.WeakSet[LocalRows] = weakref.WeakSet()


class LocalRows:
    """In the place of a `LocalStore`: tables on the server, which are made at once and have no lease."""

    path = None
    forked = False
    local = None

    def __init__(self) -> None:
        for other in _made:
            other.store.close()  # its idle connections: a test may make hundreds of stores
        _made.add(self)
        place = Place(fresh())
        self.store = DividedRows(place, PostgresqlOptions(), durable=False, fence=Fence(place.prefix, "test", 1))
        execute(self.store.statements.tables())
        execute(f"UPDATE {place.prefix}_owner SET term = 1, token = 'test'")
        self._add([(SYSTEM_TABLE, group) for group in PROTOCOL_GROUPS])

    def _add(self, wanted: Sequence[tuple[str, str]]) -> None:
        prefix = self.store.statements.prefix
        new = [key for key in wanted if not self.store.has(*key)]
        values = ", ".join(f"('{table}', '{group}')" for table, group in new)
        if new:
            found = execute(f"INSERT INTO {prefix}_groups (tbl, grp) VALUES {values} RETURNING space, tbl, grp")
            self.store.add({(table.decode(), group.decode()): int(space) for space, table, group in found})

    def check(self) -> None:
        """It is usable."""

    async def adapt(self, catalogue: Any) -> None:
        await trio.lowlevel.checkpoint()
        self._add([(t, group) for t in catalogue.tables for group in (*PROTOCOL_GROUPS, *catalogue.groups(t))])
        self.store.divide(catalogue)

    def clear_dead_readers(self) -> None:
        """There are none."""

    async def aclose(self) -> None:
        self.store.close()


class DirectBackend(BareStore):
    """Of an owner of `LocalRows` that lets clients read and write by themselves."""

    def __init__(self, local: LocalRows) -> None:
        super().__init__(local, local.store)  # type: ignore[arg-type]
        self.store = Counted(local.store, local.store.tables, 0.0)
        self.store.tablets = local.store.tablets  # type: ignore[attr-defined]
        self.place = getattr(local, "place", None)

    async def let_clients_in(self) -> Tickets:
        """As a store that has just been claimed."""
        rows: Any = self.rows
        tickets = self.store.tickets = Tickets(rows)  # type: ignore[attr-defined]
        async with rows.pool.connection() as connection:
            await tickets.clear(connection)
        return tickets


def client_rows(owner: Any, ticket: Callable[[], Awaitable[str]]) -> ClientRows:
    """The rows of a client of that owner's."""
    place: Any = inside(owner).engine.place
    return ClientRows(place.rows.pool.place, PostgresqlOptions(), durable=False, ticket=ticket)


# ------------------------------------------------------------------ servers of a test's own


class Standing:
    """A server that a test stops and starts again; its data stay. Skips the test if PostgreSQL is not installed.

    Args:
        settings: beyond those of the benchmarks.
        copied: its data are those of this server, which it follows as a standby.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, object] | None = None, copied: Standing | None = None
    ) -> None:
        self._settings = dict(settings or {})
        try:
            self._bin, self._user = postgres.binaries(), postgres._user()
        except NoPostgresError as error:
            pytest.skip(str(error))
        self._data, self._sockets = folder / "data", Path(tempfile.mkdtemp(prefix="perco-pg-"))
        self._data.mkdir(mode=0o700)
        self._let_reach()
        for path in (self._data, self._sockets):
            os.chown(path, self._user.pw_uid, self._user.pw_gid)
        make: list[object] = ["initdb", "-D", self._data, "-U", "bench", "--auth=trust", "--no-sync"]
        if copied is not None:
            source = ["-h", copied.server.socket, "-U", "bench"]
            make = [
                "pg_basebackup",
                "-D",
                self._data,
                *source,
                "--write-recovery-conf",
                "--checkpoint=fast",
                "--no-sync",
            ]
        postgres._run([self._bin / str(make[0]), *make[1:]], self._user)
        self.server: Server
        self.start()

    def url(self, prefix: str = "perco", *others: Standing) -> str:
        """`others`: servers that are tried after this one."""
        hosts = ",".join(str(each._sockets) for each in (self, *others))
        return f"postgresql://bench@/postgres?host={hosts}&prefix={prefix}"

    def _let_reach(self) -> None:
        """Let the server's user reach its data; another pytest that begins takes the right away again."""
        for above in self._data.parents:
            if above.owner() == Path.home().owner() and above.stat().st_mode & 0o111 != 0o111:
                above.chmod(above.stat().st_mode | 0o111)

    def start(self) -> None:
        self._let_reach()
        self._process = postgres._start(self._bin, self._user, self._data, self._sockets, self._settings)
        self.server = postgres._connectable(self._process, self._bin, self._sockets, self._data / "log")

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT: at once, as `pg_ctl stop -m immediate` does; SIGINT: ends connections, and shuts down."""
        self._process.send_signal(how)
        self._process.wait()

    def end(self) -> None:
        if self._process.poll() is None:
            self.stop()
        shutil.rmtree(self._sockets, ignore_errors=True)
