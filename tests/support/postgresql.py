"""A PostgreSQL server for the tests of a process, started when the first of them needs it; each test has tables of its
own. Time may be virtual: it stands still while a call to the server is in flight."""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest
import trio
import trio.testing

from bench.against import postgres
from bench.against.postgres import NoPostgresError, Server, server
from perco.postgresql.address import Place
from perco.postgresql.connection import Connection, libpq
from perco.postgresql.options import PostgresqlOptions
from perco.postgresql.rows import Fence, PostgresqlRows
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import PROTOCOL_GROUPS, LocalRowStore, MemoryTablet, Mutation

P = ParamSpec("P")
T = TypeVar("T")

_numbers = itertools.count()
_of_folders: dict[str, str] = {}


@functools.cache
def running() -> Server:
    """The server of this process. Skips the test if PostgreSQL is not installed."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perco-pg-")))
    try:
        return stack.enter_context(server(folder))
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
    Connection.open = classmethod(_held(Connection.open.__func__))  # type: ignore
    Connection.run = _held(Connection.run)  # type: ignore
    Connection.execute = _held(Connection.execute)  # type: ignore
    try:
        yield
    finally:
        Connection.open, Connection.run, Connection.execute = before  # type: ignore


_calls = 0


def _held(call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    async def held(*args: P.args, **kwargs: P.kwargs) -> T:
        global _calls
        clock = trio.lowlevel.current_clock()
        if not isinstance(clock, trio.testing.MockClock):
            return await call(*args, **kwargs)
        clock.autojump_threshold = math.inf
        _calls += 1
        try:
            return await call(*args, **kwargs)
        finally:
            _calls -= 1
            if not _calls:
                clock.autojump_threshold = 0

    return held


# ------------------------------------------------------------------ looks into the tables


class _Look:
    """A table as a tablet: each call looks at what is stored at that moment."""

    def __init__(self, rows: PostgresqlRows, table: str) -> None:
        self.table, self.start, self._rows = table, b"", rows
        self.queues = False

    def _now(self) -> MemoryTablet:
        tablet = MemoryTablet(self.table, b"")
        names = {space: group for (table, group), space in self._rows._spaces.items() if table == self.table}
        spaces = ",".join(map(str, names))
        cells = execute(
            f"SELECT space, encode(row, 'hex'), col, ts, encode(value, 'hex') "
            f"FROM {self._rows.statements.prefix}_cells WHERE space IN ({spaces})"
        )
        rows = [
            (
                bytes.fromhex(row.decode()),
                (),
                ((names[int(space)], int(column), int(ts), bytes.fromhex(value.decode())),),
            )
            for space, row, column, ts, value in cells
        ]
        store = LocalRowStore()
        store.add_table(self.table, [tablet])
        for row in rows:
            tablet.submit(Mutation(self.table, (row,)), _Ignored(), 0)  # type: ignore[arg-type]
        return tablet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)


class _Ignored:
    def answer(self, index: int, verdict: object) -> None:
        """The verdict of a write into a copy."""


def looks(rows: PostgresqlRows) -> Callable[[], list[Any]]:
    """In the place of a store's `tablets`."""
    return lambda: [_Look(rows, table) for table in rows.tables()]


class LocalRows:
    """In the place of a `LocalStore`: tables on the server, which are made at once and have no lease."""

    path = None
    forked = False
    local = None

    def __init__(self) -> None:
        place = Place(fresh())
        self.store: Any = PostgresqlRows(place, PostgresqlOptions(), durable=False, fence=Fence(1))
        execute(self.store.statements.tables())
        execute(f"UPDATE {place.prefix}_owner SET term = 1")
        self.store.tablets = looks(self.store)
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

    def clear_dead_readers(self) -> None:
        """There are none."""

    async def aclose(self) -> None:
        self.store.pool.close()


# ------------------------------------------------------------------ servers of a test's own


class Standing:
    """A server that a test stops and starts again; its data stay. Skips the test if PostgreSQL is not installed."""

    def __init__(self, folder: Path) -> None:
        try:
            self._bin, self._user = postgres.binaries(), postgres._user()
        except NoPostgresError as error:
            pytest.skip(str(error))
        self._data, self._sockets = folder / "data", Path(tempfile.mkdtemp(prefix="perco-pg-"))
        self._data.mkdir(mode=0o700)
        for above in (folder, *folder.parents):  # so that the server's user can reach its data
            if above.owner() == Path.home().owner() and above.stat().st_mode & 0o111 != 0o111:
                above.chmod(above.stat().st_mode | 0o111)
        for path in (self._data, self._sockets):
            os.chown(path, self._user.pw_uid, self._user.pw_gid)
        postgres._run([self._bin / "initdb", "-D", self._data, "-U", "bench", "--auth=trust", "--no-sync"], self._user)
        self.server: Server
        self.start()

    def url(self, prefix: str = "perco") -> str:
        return f"postgresql://bench@/postgres?host={self._sockets}&prefix={prefix}"

    def start(self) -> None:
        self._process = postgres._start(self._bin, self._user, self._data, self._sockets)
        self.server = postgres._connectable(self._process, self._bin, self._sockets, self._data / "log")

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT: at once, as `pg_ctl stop -m immediate` does; SIGINT: ends connections, and shuts down."""
        self._process.send_signal(how)
        self._process.wait()

    def end(self) -> None:
        if self._process.poll() is None:
            self.stop()
        shutil.rmtree(self._sockets, ignore_errors=True)
