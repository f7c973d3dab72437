"""A sink in a SQLite file: a table that other programs can read while it is kept up to date."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, Final

from perco.errors import StoreError, UsageError
from perco.schema.codecs import Codec
from perco.views.sinking import Delivered
from perco.views.sqltable import GONE, VERSION, SqlTable, quoted

_TYPES: Final = {"text": "TEXT", "int64": "INTEGER", "float64": "REAL", "bytes": "BLOB", "bool": "INTEGER"}
_BUSY_S: Final = 30.0  # how long to wait for another process that writes to the file


class SqliteTable(SqlTable):
    """A table in a SQLite file, for `Views.sink`. Give each sink a table of its own.

    Other programs read the view NAME. Texts, numbers, bytes and booleans are stored as SQLite's own types, JSON as
    text, and everything else in perco's stored form. SQLite stores no NaN, so that becomes NULL. A row that is gone
    stays in the table NAME_rows, which the view leaves out, until `forget` is called.

    Args:
        path: of the file, which is made if it does not exist.
        name: of the view; by default, that of the perco table.
        key: the name of the key's column, or for a tuple key those of its parts; by default "key", or "key1", "key2".
        synchronous: "FULL": a delivery that has returned survives a power failure. "NORMAL": a power failure may undo
            it, so rebuild the sink afterwards.
    """

    path: str
    _more: tuple[str, ...] = ()  # columns besides

    def __init__(
        self,
        path: str | PathLike[str],
        name: str | None = None,
        *,
        key: str | Sequence[str] | None = None,
        synchronous: str = "FULL",
    ) -> None:
        if synchronous not in ("FULL", "NORMAL"):
            raise UsageError(f'synchronous is "FULL" or "NORMAL", not {synchronous!r}')
        super().__init__(name, key)
        self.path, self._synchronous = os.fspath(path), synchronous
        self._lock = threading.Lock()
        self._open: tuple[int, sqlite3.Connection] | None = None

    # ------------------------------------------------------------ the file

    def _connection(self) -> sqlite3.Connection:
        """The connection of this process. With the lock held."""
        if self._open is not None and self._open[0] == os.getpid():
            return self._open[1]
        db = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {self._synchronous}")
        keys = [f"{quoted(name)} {_type(codec)} NOT NULL" for name, codec in self._parts()]
        values = [f"{quoted(column.name)} {_type(column.codec)}" for column in self._columns]
        primary = ", ".join(map(quoted, self._keys))
        rows, shown = quoted(f"{self.name}_rows"), ", ".join(map(quoted, [*self._keys, *self._names()]))
        own = [f"{name} INTEGER NOT NULL" for name in (VERSION, GONE, *self._more)]
        head = ", ".join([*keys, *values, *own])
        db.execute("BEGIN IMMEDIATE")
        db.execute(f"CREATE TABLE IF NOT EXISTS {rows} ({head}, PRIMARY KEY ({primary})) WITHOUT ROWID")
        db.execute(f"CREATE VIEW IF NOT EXISTS {quoted(self.name)} AS SELECT {shown} FROM {rows} WHERE NOT {GONE}")
        there = {name for _, name, *_ in db.execute(f"PRAGMA table_info({rows})")}
        missing = [name for name in (*self._keys, *self._names(), *self._more) if name not in there]
        if not missing:
            self._prepare(db)
        db.execute("COMMIT")
        if missing:
            db.close()
            raise StoreError(
                f"{self.path}: table {self.name}_rows has no column {missing[0]!r}. Use another name or file for the "
                "new columns, or remove the table and the view, and rebuild the sink"
            )
        self._open = os.getpid(), db
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Called in the transaction that has made the table."""

    def _more_of(self, db: sqlite3.Connection, count: int) -> Iterator[list[Any]]:
        """The values of `_more` for so many rows, in the transaction that takes them."""
        return iter([[]] * count)

    # ------------------------------------------------------------ a sink

    def deliver(self, rows: list[Delivered]) -> None:
        """Take rows, each if it is newer than the one that is there (V11), in one transaction.

        Raises: StoreError if SQLite cannot store them.
        """
        names = [*self._keys, *self._names(), VERSION, GONE]
        names += self._more
        replaced = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in names[len(self._keys) :])
        statement = (
            f"INSERT INTO {quoted(self.name + '_rows')} ({', '.join(map(quoted, names))}) "
            f"VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({', '.join(map(quoted, self._keys))}) DO UPDATE SET {replaced} "
            f"WHERE excluded.{VERSION} > {VERSION}"
        )
        given = [self._stored(row) for row in rows]
        with self._lock, told(self.path):
            db = self._connection()
            db.execute("BEGIN IMMEDIATE")
            try:
                more = self._more_of(db, len(given))
                db.executemany(statement, [[*row, *next(more)] for row in given])
                db.execute("COMMIT")
            except BaseException:
                db.execute("ROLLBACK")
                raise

    def rows(self) -> Iterator[Delivered]:
        """All rows, in the order of their keys."""
        names = ", ".join(map(quoted, [*self._keys, *self._names(), VERSION]))
        order = ", ".join(map(quoted, self._keys))
        with self._lock, told(self.path):
            db = self._connection()
            cursor = db.execute(f"SELECT {names} FROM {quoted(self.name + '_rows')} WHERE NOT {GONE} ORDER BY {order}")
            found = cursor.fetchall()
        yield from map(self._delivered, found)

    def count(self) -> int:
        """The number of rows."""
        with self._lock, told(self.path):
            found: int = self._connection().execute(f"SELECT count(*) FROM {quoted(self.name)}").fetchone()[0]
            return found

    def forget(self, before: int) -> int:
        """Remove what is kept of rows that were gone before a timestamp: `await db.watermark()`, before which no run
        can deliver any more. Returns how many."""
        with self._lock, told(self.path):
            db = self._connection()
            return db.execute(
                f"DELETE FROM {quoted(self.name + '_rows')} WHERE {GONE} AND {VERSION} < ?", [before]
            ).rowcount

    def close(self) -> None:
        """Close the file. The next delivery opens it again."""
        with self._lock:
            if self._open is not None and self._open[0] == os.getpid():
                self._open[1].close()
            self._open = None


class told:
    """Raises errors of SQLite as StoreError, with the file's path."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.Error):
            raise StoreError(f"the sink {self._path}: {error}") from error


def _type(codec: Codec[Any]) -> str:
    return _TYPES.get(codec.name, "TEXT" if codec.name == "json" else "BLOB")
