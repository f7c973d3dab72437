"""A sink in a SQLite file: a table that other programs can read while it is kept up to date."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, Final

from perco.errors import StoreError, UsageError
from perco.schema.codecs import Codec
from perco.schema.schema import Column, Table
from perco.views.compiled import codecs_of, key_of, parts_of
from perco.views.sinking import Delivered

_NATIVE: Final = {"text": "TEXT", "int64": "INTEGER", "float64": "REAL", "bytes": "BLOB", "bool": "INTEGER"}
_BUSY_S: Final = 30.0  # how long to wait for another process that writes to the file
_VERSION, _GONE = "perco_version", "perco_gone"


class SqliteTable:
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
    name: str

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
        self.path, self._name, self._key, self._synchronous = os.fspath(path), name, key, synchronous
        self._lock = threading.Lock()
        self._open: tuple[int, sqlite3.Connection] | None = None

    def bind(self, table: Table[Any], columns: Sequence[Column[Any, Any]]) -> None:
        """Called by `Views.sink`, with what the rows have. Raises: UsageError for names that do not fit."""
        self._of: Codec[Any] = table.key
        self._columns = list(columns)
        self.name = self._name or table.name
        parts = codecs_of(table.key)
        names = [self._key] if isinstance(self._key, str) else list(self._key or ())
        if not names:
            names = ["key"] if len(parts) == 1 else [f"key{number + 1}" for number in range(len(parts))]
        if len(names) != len(parts):
            raise UsageError(f"SqliteTable {self.name!r}: the key of {table!r} has {len(parts)} parts; name each")
        self._keys = names
        taken = [*names, *(column.name for column in columns), _VERSION, _GONE]
        same = {one.lower() for one in taken if [each.lower() for each in taken].count(one.lower()) > 1}
        if same:
            raise UsageError(f"SqliteTable {self.name!r} would have two columns named {sorted(same)[0]!r}: name key=")

    # ------------------------------------------------------------ the file

    def _connection(self) -> sqlite3.Connection:
        """The connection of this process. With the lock held."""
        if self._open is not None and self._open[0] == os.getpid():
            return self._open[1]
        db = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {self._synchronous}")
        keys = [f"{_quoted(name)} {_type(codec)} NOT NULL" for name, codec in self._parts()]
        values = [f"{_quoted(column.name)} {_type(column.codec)}" for column in self._columns]
        primary = ", ".join(map(_quoted, self._keys))
        rows, shown = _quoted(f"{self.name}_rows"), ", ".join(map(_quoted, [*self._keys, *self._names()]))
        head = ", ".join([*keys, *values, f"{_VERSION} INTEGER NOT NULL", f"{_GONE} INTEGER NOT NULL"])
        db.execute("BEGIN IMMEDIATE")
        db.execute(f"CREATE TABLE IF NOT EXISTS {rows} ({head}, PRIMARY KEY ({primary})) WITHOUT ROWID")
        db.execute(f"CREATE VIEW IF NOT EXISTS {_quoted(self.name)} AS SELECT {shown} FROM {rows} WHERE NOT {_GONE}")
        there = {name for _, name, *_ in db.execute(f"PRAGMA table_info({rows})")}
        db.execute("COMMIT")
        missing = [name for name in (*self._keys, *self._names()) if name not in there]
        if missing:
            db.close()
            raise StoreError(
                f"{self.path}: table {self.name}_rows has no column {missing[0]!r}. Use another name or file for the "
                "new columns, or remove the table and the view, and rebuild the sink"
            )
        self._open = os.getpid(), db
        return db

    def _parts(self) -> list[tuple[str, Codec[Any]]]:
        return list(zip(self._keys, codecs_of(self._of), strict=True))

    def _names(self) -> list[str]:
        return [column.name for column in self._columns]

    # ------------------------------------------------------------ a sink

    def deliver(self, rows: list[Delivered]) -> None:
        """Take rows, each if it is newer than the one that is there (V11), in one transaction.

        Raises: StoreError if SQLite cannot store them.
        """
        names = [*self._keys, *self._names(), _VERSION, _GONE]
        replaced = ", ".join(f"{_quoted(name)} = excluded.{_quoted(name)}" for name in names[len(self._keys) :])
        statement = (
            f"INSERT INTO {_quoted(self.name + '_rows')} ({', '.join(map(_quoted, names))}) "
            f"VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({', '.join(map(_quoted, self._keys))}) DO UPDATE SET {replaced} "
            f"WHERE excluded.{_VERSION} > {_VERSION}"
        )
        given = [self._stored(row) for row in rows]
        with self._lock, _told(self.path):
            db = self._connection()
            db.execute("BEGIN IMMEDIATE")
            try:
                db.executemany(statement, given)
                db.execute("COMMIT")
            except BaseException:
                db.execute("ROLLBACK")
                raise

    def _stored(self, row: Delivered) -> list[Any]:
        values = row.values or {}
        parts = [_to(codec, part) for (_, codec), part in zip(self._parts(), parts_of(self._of, row.key), strict=True)]
        return [
            *parts,
            *(_to(c.codec, values[c.name]) if c.name in values else None for c in self._columns),
            row.version,
            row.values is None,
        ]

    def rows(self) -> Iterator[Delivered]:
        """All rows, in the order of their keys."""
        names = ", ".join(map(_quoted, [*self._keys, *self._names(), _VERSION]))
        order = ", ".join(map(_quoted, self._keys))
        with self._lock, _told(self.path):
            db = self._connection()
            cursor = db.execute(
                f"SELECT {names} FROM {_quoted(self.name + '_rows')} WHERE NOT {_GONE} ORDER BY {order}"
            )
            found = cursor.fetchall()
        count = len(self._keys)
        for *stored, version in found:
            parts = [_from(codec, part) for (_, codec), part in zip(self._parts(), stored[:count], strict=True)]
            values = {
                column.name: _from(column.codec, value)
                for column, value in zip(self._columns, stored[count:], strict=True)
                if value is not None
            }
            yield Delivered(key_of(self._of, tuple(parts)), values, version)

    def forget(self, before: int) -> int:
        """Remove what is kept of rows that were gone before a timestamp: `await db.watermark()`, before which no run
        can deliver any more. Returns how many."""
        with self._lock, _told(self.path):
            db = self._connection()
            return db.execute(
                f"DELETE FROM {_quoted(self.name + '_rows')} WHERE {_GONE} AND {_VERSION} < ?", [before]
            ).rowcount

    def close(self) -> None:
        """Close the file. The next delivery opens it again."""
        with self._lock:
            if self._open is not None and self._open[0] == os.getpid():
                self._open[1].close()
            self._open = None


class _told:
    """Raises errors of SQLite as StoreError, with the file's path."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.Error):
            raise StoreError(f"the sink {self._path}: {error}") from error


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _type(codec: Codec[Any]) -> str:
    return _NATIVE.get(codec.name, "TEXT" if codec.name == "json" else "BLOB")


def _to(codec: Codec[Any], value: Any) -> Any:
    if codec.name in _NATIVE:
        return value
    return json.dumps(value, ensure_ascii=False) if codec.name == "json" else codec.encode(value)


def _from(codec: Codec[Any], stored: Any) -> Any:
    if codec.name == "bool":
        return bool(stored)
    if codec.name in _NATIVE:
        return stored
    return json.loads(stored) if codec.name == "json" else codec.decode(stored)
