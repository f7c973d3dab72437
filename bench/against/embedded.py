"""One call, one durable read-modify-write of a row: perco, SQLite, ZODB, in one process, on trio.

Each has the same rows before it begins, and in the end must have counted every call: no update is lost.

The peers are set up to be as fast as they can. SQLite: WAL; synchronous=FULL (an fsync per commit); an exclusive lock,
so that it asks for none later; a cache that holds everything; rare checkpoints; a table without rowid; one writer, on a
thread of its own, so that the loop goes on. *Batching*: the writer puts all waiting calls into one transaction, reads
their rows at once and writes them at once. ZODB: an object per row, so that a commit writes that object alone;
everything in its cache; one thread, because its commits run one after another anyway.
"""

from __future__ import annotations

import queue
import random
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import trio

import perco
from bench.against.load import Load, closed_loop

ROWS = 10_000
_PADDING = b"x" * 92  # values have 100 bytes

KEYS = [random.Random(i).randbytes(16) for i in range(ROWS)]
ZERO = bytes(8) + _PADDING

table = perco.Table("t")
value = table.column("value", perco.BYTES)
count = table.column("count", perco.INT64)  # for operations, which add to it
schema = perco.Schema(table)

Change = Callable[[bytes], bytes]


def one_more(old: bytes) -> bytes:
    """The change that every call makes to its row."""
    return (int.from_bytes(old[:8], "big") + 1).to_bytes(8, "big") + old[8:]


def count_in(value: bytes | None) -> int:
    assert value is not None
    return int.from_bytes(value[:8], "big")


class Counting(Protocol):
    """A store that is compared."""

    async def modify(self, key: bytes, change: Change) -> None:
        """Returns when it is durable."""

    async def total(self) -> int:
        """The sum of the counters of all rows."""


# ------------------------------------------------------------------ perco


class Perco:
    def __init__(self, db: perco.Database) -> None:
        self._db = db

    async def modify(self, key: bytes, change: Change) -> None:
        await self._db.run(self._modify, key, change)

    @staticmethod
    async def _modify(txn: perco.Transaction, key: bytes, change: Change) -> None:
        old = await txn.get(value, key)
        assert old is not None
        txn.set(value, key, change(old))

    async def total(self) -> int:
        async with self._db.snapshot() as snap:
            return sum(count_in(found) for found in (await snap.get_many(value, KEYS)).values())


@asynccontextmanager
async def perco_store(folder: Path) -> AsyncIterator[Counting]:
    async with perco.open(folder / "perco", schema) as db:
        async with db.transaction() as txn:
            if await txn.get(value, KEYS[0]) is None:
                for key in KEYS:
                    txn.set(value, key, ZERO)
        yield Perco(db)


# ------------------------------------------------------------------ a thread that writes


class _Call:
    __slots__ = ("change", "error", "key", "task")

    def __init__(self, key: bytes, change: Change) -> None:
        self.key, self.change = key, change
        self.error: BaseException | None = None
        self.task = trio.lowlevel.current_task()


class WriterThread:
    """Runs `write` for the calls that wait, `at_most` of them together; the rest queue behind."""

    def __init__(self, write: Callable[[list[_Call]], None], at_most: int) -> None:
        self._write, self._at_most = write, at_most
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def call(self, key: bytes, change: Change) -> None:
        call = _Call(key, change)
        self._calls.put(call)
        await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        if call.error is not None:
            raise call.error

    def _run(self) -> None:
        more = True
        while more:
            calls: list[_Call] = []
            while more and len(calls) < self._at_most:
                try:
                    call = self._calls.get(block=not calls)
                except queue.Empty:
                    break
                more = call is not None
                if call is not None:
                    calls.append(call)
            if calls:
                try:
                    self._write(calls)
                except BaseException as error:
                    for call in calls:
                        call.error = error
                self._token.run_sync_soon(_wake, calls)

    async def aclose(self) -> None:
        self._calls.put(None)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._thread.join)


def _wake(calls: list[_Call]) -> None:
    for call in calls:
        trio.lowlevel.reschedule(call.task)


# ------------------------------------------------------------------ SQLite

_SELECT = "SELECT value FROM t WHERE key = ?"
_UPSERT = "INSERT INTO t VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
_AT_A_TIME = 500  # parameters of one statement


def open_sqlite(path: Path) -> sqlite3.Connection:
    """A database with all rows in it."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=1024)
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "locking_mode=EXCLUSIVE",
        "cache_size=-262144",
        "wal_autocheckpoint=20000",
        "temp_store=MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    connection.execute("CREATE TABLE IF NOT EXISTS t (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO t VALUES (?, ?) ON CONFLICT DO NOTHING", [(key, ZERO) for key in KEYS])
    connection.execute("COMMIT")
    [mode] = connection.execute("PRAGMA journal_mode").fetchone()
    [level] = connection.execute("PRAGMA synchronous").fetchone()
    assert (mode, level) == ("wal", 2), "as durable as the others"
    return connection


def modify_one(connection: sqlite3.Connection, key: bytes, change: Change) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        [old] = connection.execute(_SELECT, (key,)).fetchone()
        connection.execute(_UPSERT, (key, change(old)))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def modify_all(connection: sqlite3.Connection, calls: list[_Call]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        keys = list({call.key for call in calls})
        values: dict[bytes, bytes] = {}
        for at in range(0, len(keys), _AT_A_TIME):
            some = keys[at : at + _AT_A_TIME]
            marks = ",".join("?" * len(some))
            values.update(connection.execute(f"SELECT key, value FROM t WHERE key IN ({marks})", some))
        for call in calls:
            values[call.key] = call.change(values[call.key])
        connection.executemany(_UPSERT, values.items())
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


class Sqlite:
    def __init__(self, connection: sqlite3.Connection, *, batching: bool) -> None:
        self._connection = connection
        self.thread = WriterThread(self._many if batching else self._one, 4096 if batching else 1)

    def _one(self, calls: list[_Call]) -> None:
        [call] = calls
        modify_one(self._connection, call.key, call.change)

    def _many(self, calls: list[_Call]) -> None:
        modify_all(self._connection, calls)

    async def modify(self, key: bytes, change: Change) -> None:
        await self.thread.call(key, change)

    async def total(self) -> int:
        return sum(count_in(found) for (found,) in self._connection.execute("SELECT value FROM t"))


@asynccontextmanager
async def sqlite_store(folder: Path, *, batching: bool) -> AsyncIterator[Counting]:
    connection = open_sqlite(folder / ("batching.sqlite" if batching else "one.sqlite"))
    store = Sqlite(connection, batching=batching)
    try:
        yield store
    finally:
        await store.thread.aclose()
        connection.close()


# ------------------------------------------------------------------ ZODB


def open_zodb(path: Path) -> tuple[Any, Any, Any]:
    """(database, connection, rows by key), with all rows in it."""
    import transaction
    import ZODB
    import ZODB.FileStorage
    from BTrees.OOBTree import OOBTree
    from persistent.mapping import PersistentMapping

    storage = ZODB.FileStorage.FileStorage(str(path))  # which syncs at the end of every commit
    database = ZODB.DB(storage, cache_size=4 * ROWS, cache_size_bytes=0)
    connection = database.open(transaction.TransactionManager(explicit=True))
    manager = connection.transaction_manager
    manager.begin()
    root = connection.root()
    if "rows" not in root:
        root["rows"] = OOBTree({key: PersistentMapping(value=ZERO) for key in KEYS})
    for row in root["rows"].values():  # into the cache
        len(row)
    manager.commit()
    return database, connection, root["rows"]


def modify_object(manager: Any, rows: Any, key: bytes, change: Change) -> None:
    manager.begin()
    try:
        row = rows[key]
        row["value"] = change(row["value"])
        manager.commit()
    except BaseException:
        manager.abort()
        raise


class Zodb:
    def __init__(self, connection: Any, rows: Any) -> None:
        self._manager, self._rows = connection.transaction_manager, rows
        self.thread = WriterThread(self._one, 1)

    def _one(self, calls: list[_Call]) -> None:
        [call] = calls
        modify_object(self._manager, self._rows, call.key, call.change)

    async def modify(self, key: bytes, change: Change) -> None:
        await self.thread.call(key, change)

    async def total(self) -> int:
        self._manager.begin()
        try:
            return sum(count_in(row["value"]) for row in self._rows.values())
        finally:
            self._manager.abort()


@asynccontextmanager
async def zodb_store(folder: Path) -> AsyncIterator[Counting]:
    database, connection, rows = open_zodb(folder / "zodb.fs")
    store = Zodb(connection, rows)
    try:
        yield store
    finally:
        await store.thread.aclose()
        connection.close()
        database.close()


# ------------------------------------------------------------------ the load

STORES: dict[str, Callable[[Path], Any]] = {
    "perco": perco_store,
    "SQLite, one writer": partial(sqlite_store, batching=False),
    "SQLite, batching writer": partial(sqlite_store, batching=True),
    "ZODB": zodb_store,
}


def has_zodb() -> bool:
    try:
        import ZODB  # noqa: F401
    except ImportError:
        return False
    return True


_counted: dict[tuple[Path, str], int] = {}  # what the stores held when they were last looked at


def load(name: str, folder: Path, in_flight: int, seconds: float) -> Load:
    """Run a load on one of the stores, which is made if it does not exist."""
    return trio.run(_load, name, folder, in_flight, seconds)


async def _load(name: str, folder: Path, in_flight: int, seconds: float) -> Load:
    async with STORES[name](folder) as store:

        async def call(rng: random.Random) -> None:
            await store.modify(rng.choice(KEYS), one_more)

        before = _counted[folder, name] if (folder, name) in _counted else await store.total()
        found = await closed_loop(call, in_flight, seconds)
        after = _counted[folder, name] = await store.total()
        if after - before != found.calls:
            raise AssertionError(f"{name} has counted {after - before} of {found.calls} calls")
    return found


def plain_loop(name: str, folder: Path, seconds: float) -> float:
    """Commits per second of a peer that commits one by one, without event loop or queue: its upper limit."""
    connection: Any
    modify: Callable[[bytes, Change], None]
    if name == "ZODB":
        database, connection, rows = open_zodb(folder / "zodb-plain.fs")
        modify = partial(modify_object, connection.transaction_manager, rows)
        ends = [connection.close, database.close]
    else:
        connection = open_sqlite(folder / "plain.sqlite")
        modify = partial(modify_one, connection)
        ends = [connection.close]
    rng, done, began = random.Random(1), 0, time.perf_counter()
    while not done or time.perf_counter() - began < seconds:
        modify(rng.choice(KEYS), one_more)
        done += 1
    rate = done / (time.perf_counter() - began)
    for end in ends:
        end()
    return rate
