"""A sink that finds the rows whose vectors are nearest: a SQLite table, and all its vectors in memory.

The search is exact: it compares the vector with all others, which numpy does at some 10 GB/s. Each process that
searches holds the vectors as one array, 4 bytes a number. Before each search, it takes what was delivered since its
last one, by whatever process, from the table.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from os import PathLike
from secrets import token_hex
from typing import Any, Final, Literal, NamedTuple, get_args

from perco.errors import StoreError, UsageError
from perco.schema.codecs import BYTES
from perco.schema.schema import Column, Table
from perco.views.sinking import Delivered
from perco.views.sqlite import SqliteTable, told
from perco.views.sqltable import GONE, quoted

Metric = Literal["cosine", "dot"]

_SEQUENCE: Final = "perco_sequence"  # grows with each row that is delivered


class Hit(NamedTuple):
    """A row that was found.

    Attributes:
        key: of the row.
        likeness: of the two vectors: their cosine, from -1 to 1 but for rounding, or their dot product.
        values: of the row, by column name.
    """

    key: Any
    likeness: float
    values: dict[str, Any]


class VectorTable(SqliteTable):
    """A table in a SQLite file, for `Views.sink`, and the search for its nearest vectors.

    Needs numpy (`pip install 'perco[vectors]'`). A process that only searches declares the sink, too.

    Args:
        path, name, key, synchronous: see `SqliteTable`.
        vector: the name of the column with the vectors: BYTES, numbers of 32 bits (`array("f", numbers).tobytes()`).
            Rows without a vector are not found. A row whose vector is not a list of finite numbers is not stored, and
            so ends on the failed list.
        metric: "cosine", or "dot" for the dot product; the largest comes first.
    """

    _more = (_SEQUENCE,)

    def __init__(
        self,
        path: str | PathLike[str],
        name: str | None = None,
        *,
        vector: str,
        metric: Metric = "cosine",
        key: str | Sequence[str] | None = None,
        synchronous: str = "FULL",
    ) -> None:
        super().__init__(path, name, key=key, synchronous=synchronous)
        if metric not in get_args(Metric):
            raise UsageError(f'metric is "cosine" or "dot", not {metric!r}')
        self._vector, self._metric = vector, metric
        self._vectors: tuple[int, _Vectors] | None = None

    def bind(self, table: Table[Any], columns: Sequence[Column[Any, Any]]) -> None:
        """See `SqliteTable.bind`. Raises: UsageError."""
        super().bind(table, columns)
        if [column.codec.name for column in columns if column.name == self._vector] != [BYTES.name]:
            raise UsageError(f"VectorTable {self.name!r}: vector= names a column of BYTES, not {self._vector!r}")

    # ------------------------------------------------------------ a sink

    def _prepare(self, db: sqlite3.Connection) -> None:
        rows, state = quoted(f"{self.name}_rows"), quoted(f"{self.name}_state")
        db.execute(f"CREATE INDEX IF NOT EXISTS {quoted(f'{self.name}_{_SEQUENCE}')} ON {rows} ({_SEQUENCE})")
        db.execute(f"CREATE TABLE IF NOT EXISTS {state} (made TEXT NOT NULL, sequence INTEGER NOT NULL)")
        if db.execute(f"SELECT 1 FROM {state}").fetchone() is None:
            db.execute(f"INSERT INTO {state} VALUES (?, 0)", [token_hex(8)])

    def _more_of(self, db: sqlite3.Connection, count: int) -> Iterator[list[Any]]:
        state = quoted(f"{self.name}_state")
        (last,) = db.execute(f"SELECT sequence FROM {state}").fetchone()
        db.execute(f"UPDATE {state} SET sequence = ?", [last + count])
        return iter([[last + 1 + number] for number in range(count)])

    def deliver(self, rows: list[Delivered]) -> None:
        """See `SqliteTable.deliver`. Raises: StoreError, also for what is no vector."""
        for row in rows:
            data = (row.values or {}).get(self._vector)
            if data is not None:
                try:
                    _numbers(data)
                except ValueError as error:
                    raise StoreError(f"the sink {self.path}: the vector of row {row.key!r} {error}") from error
        super().deliver(rows)

    # ------------------------------------------------------------ the search

    def search(self, vector: bytes | Sequence[float], k: int = 10) -> list[Hit]:
        """The k rows whose vectors are most like this one, the most like first; rows whose vectors have another length
        are left out. Call it in a thread.

        Raises: UsageError if this is no vector, or if all rows have vectors of other lengths; StoreError.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise UsageError(f"search: k is a number of rows, at least 1, not {k!r}")
        if not hasattr(self, "_keys"):
            raise UsageError("declare the sink before you search: views.sink(..., to=table)")
        try:
            wanted = _numbers(vector)
        except (ValueError, TypeError) as error:
            raise UsageError(f"search: a vector that {error}") from error
        with self._lock, told(self.path):
            db = self._connection()
            db.execute("BEGIN")  # all reads are of one moment
            try:
                vectors = self._followed(db)
                found = vectors.nearest(wanted, k)
                where = " AND ".join(f"{quoted(name)} = ?" for name in self._keys)
                names = ", ".join(map(quoted, self._names()))
                select = f"SELECT {names} FROM {quoted(self.name)} WHERE {where}"
                while True:
                    stored = [db.execute(select, key).fetchone() for key, _ in found]
                    gone = [key for (key, _), row in zip(found, stored, strict=True) if row is None]
                    if not gone:
                        break
                    for key in gone:  # `forget` removed it before this process saw that it is gone
                        vectors.put(key, None)
                    found = vectors.nearest(wanted, k)
            finally:
                db.execute("COMMIT")
        return [
            Hit(self._key_of(key), likeness, self._values(row))
            for (key, likeness), row in zip(found, stored, strict=True)
        ]

    def _followed(self, db: sqlite3.Connection) -> _Vectors:
        """The vectors, with all that was delivered until now."""
        made, _ = db.execute(f"SELECT * FROM {quoted(f'{self.name}_state')}").fetchone()
        if self._vectors is None or self._vectors[0] != os.getpid() or self._vectors[1].made != made:
            self._vectors = os.getpid(), _Vectors(made, normal=self._metric == "cosine")
        vectors = self._vectors[1]
        keys = ", ".join(map(quoted, self._keys))
        taken = db.execute(
            f"SELECT {_SEQUENCE}, {GONE}, {quoted(self._vector)}, {keys} FROM {quoted(self.name + '_rows')} "
            f"WHERE {_SEQUENCE} > ? ORDER BY {_SEQUENCE}",
            [vectors.sequence],
        )
        for sequence, gone, data, *key in taken:
            vectors.put(tuple(key), None if gone or data is None else _numbers(data))
            vectors.sequence = sequence
        return vectors


def _numbers(data: bytes | Sequence[float]) -> Any:
    """A vector as an array. Raises: UsageError without numpy; ValueError or TypeError, which say what is wrong."""
    try:
        import numpy
    except ImportError as error:
        raise UsageError("VectorTable needs numpy: pip install 'perco[vectors]'") from error
    if isinstance(data, bytes | bytearray | memoryview):
        if len(data) % 4:
            raise ValueError(f"has {len(data)} bytes, which are no 32-bit numbers")
        vector = numpy.frombuffer(data, dtype="<f4")
    else:
        try:
            vector = numpy.asarray(data, dtype=numpy.float32)
        except (ValueError, TypeError) as error:
            raise ValueError(f"is no list of numbers: {error}") from error
    if vector.ndim != 1 or not vector.size:
        raise ValueError("has no numbers, or is no list of them")
    if not numpy.isfinite(vector).all():
        raise ValueError("has a number that is not finite")
    return vector


class _Vectors:
    """Vectors by key, in one array for each length.

    Attributes:
        made: of which table these are.
        sequence: of the last row that was taken.
    """

    def __init__(self, made: str, *, normal: bool) -> None:
        self.made, self.sequence, self._normal = made, 0, normal
        self._sizes: dict[tuple[Any, ...], int] = {}
        self._arrays: dict[int, _Array] = {}

    def put(self, key: tuple[Any, ...], vector: Any) -> None:
        """Set a vector; None: there is none."""
        size = self._sizes.pop(key, None)
        if size is not None and (vector is None or len(vector) != size):
            self._arrays[size].drop(key)
            if not self._arrays[size].keys:
                del self._arrays[size]
        if vector is not None:
            self._sizes[key] = len(vector)
            array = self._arrays.setdefault(len(vector), _Array(len(vector)))
            array.put(key, _normal(vector) if self._normal else vector)

    def nearest(self, vector: Any, k: int) -> list[tuple[tuple[Any, ...], float]]:
        """The keys of the k vectors that are most like this one, with their likeness. Raises: UsageError."""
        if not self._arrays:
            return []
        array = self._arrays.get(len(vector))
        if array is None:
            sizes = ", ".join(map(str, sorted(self._arrays)))
            raise UsageError(f"search: a vector of {len(vector)} numbers, and those of the rows have {sizes}")
        return array.nearest(_normal(vector) if self._normal else vector, k)


def _normal(vector: Any) -> Any:
    wide = vector.astype("f8")
    length = float((wide @ wide) ** 0.5)
    return (wide / length).astype("f4") if length else vector


class _Array:
    """Vectors of one length."""

    def __init__(self, size: int) -> None:
        import numpy

        self._numpy = numpy
        self.keys: list[tuple[Any, ...]] = []
        self._places: dict[tuple[Any, ...], int] = {}
        self._table = numpy.zeros((64, size), dtype=numpy.float32)  # with room for more

    def put(self, key: tuple[Any, ...], vector: Any) -> None:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.keys)
            self.keys.append(key)
            if place == len(self._table):
                self._table = self._numpy.concatenate([self._table, self._numpy.zeros_like(self._table)])
        self._table[place] = vector

    def drop(self, key: tuple[Any, ...]) -> None:
        place, last = self._places.pop(key), self.keys.pop()
        if last != key:  # the last one takes its place
            self._table[place] = self._table[len(self.keys)]
            self.keys[place] = last
            self._places[last] = place

    def nearest(self, vector: Any, k: int) -> list[tuple[tuple[Any, ...], float]]:
        count = len(self.keys)
        likeness = self._table[:count] @ vector
        some = self._numpy.argpartition(-likeness, k - 1)[:k] if k < count else range(count)
        found = [(self.keys[at], float(likeness[at])) for at in some]
        return sorted(found, key=lambda hit: (-hit[1], hit[0]))
