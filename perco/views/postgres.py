"""A sink in a PostgreSQL table."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from perco.errors import StoreError, UsageError
from perco.schema.codecs import Codec
from perco.views.sinking import Delivered
from perco.views.sqltable import GONE, VERSION, SqlTable, quoted

_TYPES: Final = {"text": "text", "int64": "bigint", "float64": "double precision", "bool": "boolean", "json": "json"}
_CONNECT_S: Final = 10


class PostgresTable(SqlTable):
    """A table in a PostgreSQL database, for `Views.sink`. Give each sink a table of its own.

    Other programs read the view NAME. Texts, numbers, bytes and booleans are stored as PostgreSQL's own types, JSON as
    `json`, and everything else as `bytea` in perco's stored form. A row that is gone stays in the table NAME_rows,
    which the view leaves out, until `forget` is called. PostgreSQL stores no text with a NUL character: such a row
    fails, and ends on the failed list.

    Needs psycopg (`pip install 'perco[postgresql]'`). Both are made in the first schema of the search path, and the
    user must be allowed to make them.

    Args:
        conninfo: of libpq: "postgresql://app@db/shop", or "host=db dbname=shop".
        name: of the view; by default, that of the perco table.
        key: the name of the key's column, or for a tuple key those of its parts; by default "key", or "key1", "key2".
    """

    def __init__(self, conninfo: str, name: str | None = None, *, key: str | Sequence[str] | None = None) -> None:
        super().__init__(name, key)
        if not isinstance(conninfo, str) or not conninfo:
            raise UsageError(f'PostgresTable takes a connection string ("postgresql://db/shop"), not {conninfo!r}')
        self._conninfo = conninfo
        self._lock = threading.Lock()
        self._open: tuple[int, Any] | None = None

    # ------------------------------------------------------------ the connection

    def _connection(self) -> Any:
        """The connection of this process, with the table. With the lock held."""
        psycopg = _psycopg()
        if self._open is not None and self._open[0] == os.getpid() and not self._open[1].closed:
            return self._open[1]
        db = psycopg.connect(self._conninfo, connect_timeout=_CONNECT_S)
        db.adapters.register_loader("json", importlib.import_module("psycopg.types.string").TextLoader)
        try:
            with db.transaction():
                self._make(db)
        except BaseException:
            db.close()
            raise
        self._open = os.getpid(), db
        return db

    def _make(self, db: Any) -> None:
        rows = f"{self.name}_rows"
        keys = [f"{quoted(name)} {_type(codec)} NOT NULL" for name, codec in self._parts()]
        values = [f"{quoted(column.name)} {_type(column.codec)}" for column in self._columns]
        head = ", ".join([*keys, *values, f"{VERSION} bigint NOT NULL", f"{GONE} boolean NOT NULL"])
        primary, shown = (", ".join(map(quoted, names)) for names in (self._keys, [*self._keys, *self._names()]))
        db.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [f"perco sink {self.name}"])
        db.execute(f"CREATE TABLE IF NOT EXISTS {quoted(rows)} ({head}, PRIMARY KEY ({primary}))")
        found = db.execute("SELECT * FROM " + quoted(rows) + " LIMIT 0").description
        there = {column.name for column in found}
        missing = [name for name in (*self._keys, *self._names()) if name not in there]
        if missing:
            raise StoreError(
                f"the sink {self.name}: table {rows} has no column {missing[0]!r}. Use another name for the new "
                "columns, or drop the table and the view, and rebuild the sink"
            )
        if db.execute("SELECT to_regclass(%s)", [quoted(self.name)]).fetchone()[0] is None:
            db.execute(f"CREATE VIEW {quoted(self.name)} AS SELECT {shown} FROM {quoted(rows)} WHERE NOT {GONE}")

    # ------------------------------------------------------------ a sink

    def deliver(self, rows: list[Delivered]) -> None:
        """Take rows, each if it is newer than the one that is there (V11), in one transaction.

        Raises: StoreError if PostgreSQL does not store them.
        """
        names, table = [*self._keys, *self._names(), VERSION, GONE], quoted(f"{self.name}_rows")
        replaced = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in names[len(self._keys) :])
        statement = (
            f"INSERT INTO {table} AS r ({', '.join(map(quoted, names))}) VALUES ({', '.join(['%s'] * len(names))}) "
            f"ON CONFLICT ({', '.join(map(quoted, self._keys))}) DO UPDATE SET {replaced} "
            f"WHERE excluded.{VERSION} > r.{VERSION}"
        )
        # In the order of their keys, so that two processes wait for each other only one way round.
        given = [self._stored(row) for row in sorted(rows, key=lambda row: self._of.encode(row.key))]
        with self._lock, _Told(self.name):
            db = self._connection()
            with db.transaction(), db.cursor() as cursor:
                cursor.executemany(statement, given)

    def rows(self) -> Iterator[Delivered]:
        """All rows, in the order of their keys."""
        names = ", ".join(map(quoted, [*self._keys, *self._names(), VERSION]))
        found = self._ask(f"SELECT {names} FROM {quoted(self.name + '_rows')} WHERE NOT {GONE}")
        yield from sorted(map(self._delivered, found), key=lambda row: self._of.encode(row.key))

    def count(self) -> int:
        """The number of rows."""
        found: int = self._ask(f"SELECT count(*) FROM {quoted(self.name)}")[0][0]
        return found

    def forget(self, before: int) -> int:
        """Remove what is kept of rows that were gone before a timestamp: see `SqliteTable.forget`."""
        gone = f"DELETE FROM {quoted(self.name + '_rows')} WHERE {GONE} AND {VERSION} < %s RETURNING 1"
        return len(self._ask(gone, [before]))

    def _ask(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._lock, _Told(self.name):
            db = self._connection()
            with db.transaction():
                found: list[Any] = db.execute(statement, parameters).fetchall()
                return found

    def close(self) -> None:
        """Close the connection. The next delivery opens another one."""
        with self._lock:
            if self._open is not None and self._open[0] == os.getpid():
                self._open[1].close()
            self._open = None


class _Told:
    """Raises errors of psycopg as StoreError, with the sink's name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, _psycopg().Error):
            raise StoreError(f"the sink {self._name}: {' '.join(str(error).split())}") from error


def _psycopg() -> Any:
    try:
        return importlib.import_module("psycopg")
    except ImportError as error:
        raise UsageError("PostgresTable needs psycopg: pip install 'perco[postgresql]'") from error


def _type(codec: Codec[Any]) -> str:
    return _TYPES.get(codec.name, "bytea")
