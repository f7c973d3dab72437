"""A sink in a LanceDB table.

LanceDB has no unique keys: two merges at the same time, or one by a process that has not seen the newest version of
the table, may both insert a row. So each delivery locks the table, and merges into its newest version. LanceDB does not
sync its files, either, so a delivery syncs the new ones.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from os import PathLike
from typing import Any, Final

from perco.errors import StoreError, UsageError
from perco.schema.codecs import BYTES, Codec
from perco.schema.schema import Column, Table
from perco.views.sinking import Delivered
from perco.views.sqltable import GONE, VERSION, SqlTable
from perco.views.vectors import _numbers

_TYPES: Final = {"text": "string", "json": "string", "int64": "int64", "float64": "float64", "bool": "bool_"}
_COMPACTED_AFTER: Final = 50  # deliveries of a process
_KEPT: Final = timedelta(hours=1)  # how long a reader may use an old version of the table


class LanceTable(SqlTable):
    """A table in a LanceDB folder, for `Views.sink`. Give each sink a table of its own, to which nothing else writes.

    Other programs open it with `lancedb`, and leave out rows that are gone: `.where("NOT perco_gone")`; `forget`
    removes what is kept of them. Texts, numbers, bytes and booleans are stored as Arrow's types, JSON as text, and
    everything else as bytes in perco's stored form.

    Needs lancedb (`pip install 'perco[lancedb]'`). Do not fork a process that has used it. A power failure during a
    delivery may leave a table that LanceDB cannot open: then remove it, and rebuild the sink.

    Args:
        path: of the folder, on a disk of this machine. It is made if it does not exist.
        name: of the table; by default, that of the perco table.
        vector: the name of a column with vectors, if any: BYTES, numbers of 32 bits (`array("f", numbers).tobytes()`).
            A row whose vector is not `size` finite numbers is not stored, and so ends on the failed list.
        size: how many numbers a vector has.
        key: the name of the key's column, or for a tuple key those of its parts; by default "key", or "key1", "key2".

    Raises: UsageError.
    """

    path: str

    def __init__(
        self,
        path: str | PathLike[str],
        name: str | None = None,
        *,
        vector: str | None = None,
        size: int | None = None,
        key: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(name, key)
        self.path = os.fspath(path)
        if "://" in self.path:
            raise UsageError(f"LanceTable takes a folder on a disk of this machine, not {self.path!r}")
        if (vector is None) != (size is None) or (size is not None and size < 1):
            raise UsageError(f"LanceTable takes vector= and size= together, with at least 1 number, not {size!r}")
        self._vector, self._size = vector, size
        self._lock = threading.Lock()
        self._open: Any = None
        self._synced: set[str] = set()
        self._deliveries = 0

    def bind(self, table: Table[Any], columns: Sequence[Column[Any, Any]]) -> None:
        """See `SqlTable.bind`. Raises: UsageError."""
        super().bind(table, columns)
        vectors = [column.codec.name for column in columns if column.name == self._vector]
        if self._vector is not None and vectors != [BYTES.name]:
            raise UsageError(f"LanceTable {self.name!r}: vector= names a column of BYTES, not {self._vector!r}")
        if "/" in self.name:
            raise UsageError(f"LanceTable: {self.name!r} cannot be the name of a folder: give another name=")

    # ------------------------------------------------------------ the table

    @contextmanager
    def _locked(self) -> Iterator[Any]:
        """The newest version of the table, for this thread of this process alone. Raises: StoreError."""
        lancedb, _ = _modules()
        with self._lock:
            try:
                os.makedirs(self.path, exist_ok=True)
                lock = os.open(os.path.join(self.path, f".{self.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    if self._open is None:
                        self._open = self._made(lancedb.connect(self.path))
                    self._open.checkout_latest()
                    yield self._open
                finally:
                    os.close(lock)
            except (OSError, RuntimeError, ValueError) as error:  # which LanceDB and Arrow raise
                raise StoreError(f"the sink {self.path}, table {self.name}: {' '.join(str(error).split())}") from error

    def _made(self, db: Any) -> Any:
        schema = self._schema()
        try:
            table = db.open_table(self.name)
        except ValueError:  # it is not there; if it cannot be read, this says so
            table = db.create_table(self.name, schema=schema)
        there = {field.name: field.type for field in table.schema}
        for field in schema:
            if there.get(field.name) != field.type:
                raise StoreError(
                    f"the sink {self.path}: table {self.name} has no column {field.name!r} of type {field.type}. Use "
                    "another name for the new columns, or remove the table, and rebuild the sink"
                )
        return table

    def _schema(self) -> Any:
        _, arrow = _modules()
        fields = [arrow.field(name, _type(arrow, codec), nullable=False) for name, codec in self._parts()]
        for column in self._columns:
            kind = _type(arrow, column.codec)
            if column.name == self._vector:
                kind = arrow.list_(arrow.float32(), self._size)
            fields.append(arrow.field(column.name, kind))
        return arrow.schema([*fields, arrow.field(VERSION, arrow.int64()), arrow.field(GONE, arrow.bool_())])

    def _sync(self) -> None:
        """Make the files of the table durable that are new since the last call."""
        found = set()
        for folder, _, names in os.walk(os.path.join(self.path, f"{self.name}.lance")):
            paths = {os.path.join(folder, name) for name in names}
            found |= paths
            for path in [*sorted(paths - self._synced), *([folder] if paths - self._synced else [])]:
                _fsync(path)
        if not self._synced:
            for path in (self.path, os.path.dirname(os.path.abspath(self.path))):
                _fsync(path)
        self._synced = found

    # ------------------------------------------------------------ a sink

    def deliver(self, rows: list[Delivered]) -> None:
        """Take rows, each if it is newer than the one that is there (V11), in one version of the table.

        Raises: StoreError if LanceDB does not store them, or if a value is no vector.
        """
        newest: dict[bytes, Delivered] = {}
        for row in rows:
            key = self._of.encode(row.key)
            if key not in newest or newest[key].version < row.version:
                newest[key] = row
        _, arrow = _modules()
        schema = self._schema()
        names = schema.names
        given = [dict(zip(names, self._stored(row), strict=True)) for row in newest.values()]
        if self._vector is not None:
            for row, values in zip(newest.values(), given, strict=True):
                values[self._vector] = self._numbers_of(row, values[self._vector])
        with self._locked() as table:
            merge = table.merge_insert(self._keys)
            merge = merge.when_matched_update_all(where=f"source.{VERSION} > target.{VERSION}")
            # "null": a row without a vector is no error beside rows that have one; others do not come here
            merge.when_not_matched_insert_all().execute(arrow.Table.from_pylist(given, schema), on_bad_vectors="null")
            self._deliveries += 1
            if self._deliveries % _COMPACTED_AFTER == 0:
                table.optimize(cleanup_older_than=_KEPT)
            self._sync()

    def _numbers_of(self, row: Delivered, data: bytes | None) -> list[float] | None:
        if data is None:
            return None
        try:
            numbers: list[float] = _numbers(data).tolist()
            if len(numbers) != self._size:
                raise ValueError(f"has {len(numbers)} numbers, and should have {self._size}")
        except ValueError as error:
            raise StoreError(f"the sink {self.path}: the vector of row {row.key!r} {error}") from error
        return numbers

    def rows(self) -> Iterator[Delivered]:
        """All rows, in the order of their keys."""
        with self._locked() as table:
            found = table.search().where(f"NOT {GONE}").to_arrow().to_pylist()
        for values in found:
            if self._vector is not None and values[self._vector] is not None:
                values[self._vector] = array("f", values[self._vector]).tobytes()
        names = [*self._keys, *self._names(), VERSION]
        rows = [self._delivered([values[name] for name in names]) for values in found]
        yield from sorted(rows, key=lambda row: self._of.encode(row.key))

    def count(self) -> int:
        """The number of rows."""
        with self._locked() as table:
            found: int = table.count_rows(f"NOT {GONE}")
            return found

    def forget(self, before: int) -> int:
        """Remove what is kept of rows that were gone before a timestamp: see `SqliteTable.forget`."""
        with self._locked() as table:
            gone = f"{GONE} AND {VERSION} < {int(before)}"
            count: int = table.count_rows(gone)
            if count:
                table.delete(gone)
                self._sync()
            return count

    def close(self) -> None:
        """Close the table. The next delivery opens it again."""
        with self._lock:
            self._open, self._synced = None, set()


def _fsync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _modules() -> tuple[Any, Any]:
    """LanceDB and Arrow. Raises: UsageError."""
    try:
        return importlib.import_module("lancedb"), importlib.import_module("pyarrow")
    except ImportError as error:
        raise UsageError("LanceTable needs lancedb: pip install 'perco[lancedb]'") from error


def _type(arrow: Any, codec: Codec[Any]) -> Any:
    return getattr(arrow, _TYPES.get(codec.name, "binary"))()
