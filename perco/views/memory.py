"""The memory of an owner: the rows that its last run gave; and the rows that a new run gives. No I/O.

V1  The memory lists exactly the rows that the owner's last committed run gave: the table and key of each, and a digest
    of its values. It changes in the transaction that changes the rows.
V6  A row whose digest is the same is not written, so nothing that reads it is told of it (early cut-off). The digest is
    taken of the values in stored form, with the columns' names, and has 128 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import msgpack

from perco.errors import TooLarge, UsageError
from perco.schema.codecs import encoded
from perco.schema.schema import Column, Table
from perco.storage import VALUE_BYTES_MAX
from perco.views.cached import Later, must_fit
from perco.views.rows import Put

_DIGEST_BYTES: Final = 16

Where = tuple[str, bytes]  # a table, and a row of it in stored form


@dataclass(slots=True, eq=False)
class Given:
    """A row that a run gave.

    Attributes:
        row: its key, in stored form.
        values: those that are present. A value of a cached function is a `Later`, until it is found.
        data: the values in stored form, but for those that are a `Later`.
        digest: of them; of a `Later`, by its argument (V9).
        later: the columns with such values.
    """

    table: Table[Any]
    row: bytes
    values: dict[Column[Any, Any], Any]
    data: dict[Column[Any, Any], bytes]
    digest: bytes
    later: tuple[Column[Any, Any], ...] = ()

    @property
    def key(self) -> Any:
        """The row's key, as a read returns it."""
        return self.table.key.decode(self.row)


@dataclass(slots=True)
class Memory:
    """The memory of an owner.

    Attributes:
        version: the version of the view whose run this was; 0: none has run.
        seen_ts: the run has seen all changes of the owner up to this timestamp; 0 if the view does not ask.
        columns: for each table, the first names (N18) of the columns that the view could write.
        rows: a digest for each row.
    """

    version: int = 0
    seen_ts: int = 0
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rows: dict[Where, bytes] = field(default_factory=dict)

    def pack(self) -> bytes:
        """As stored."""
        tables: dict[str, list[bytes]] = {table: [] for table in self.columns}
        for (table, row), digest in self.rows.items():
            tables[table] += (row, digest)
        parts = [(table, self.columns[table], rows) for table, rows in tables.items() if rows]
        packed: bytes = msgpack.packb([self.version, self.seen_ts, parts])
        return packed

    @classmethod
    def unpack(cls, stored: bytes | None) -> Memory:
        """As it was stored; an empty one for None."""
        if stored is None:
            return cls()
        version, seen_ts, parts = msgpack.unpackb(stored, use_list=False)
        columns = {table: names for table, names, _ in parts}
        rows = {}
        for table, _, flat in parts:
            for at in range(0, len(flat), 2):
                rows[table, flat[at]] = flat[at + 1]
        return cls(version, seen_ts, columns, rows)


def given(view: str, puts: object, outputs: Mapping[Table[Any], frozenset[Column[Any, Any]]]) -> dict[Where, Given]:
    """The rows that a run gave, checked and in stored form.

    Raises: UsageError for anything but a `Put` to a table and columns that the view writes, and for two of one row;
    TooLarge, TypeError, ValueError for a key or a value that cannot be stored.
    """
    out: dict[Where, Given] = {}
    if isinstance(puts, Put) or not isinstance(puts, Iterable):
        raise UsageError(
            f"view {view!r} gave {puts!r}; a view's function gives rows: yield views.Put(...), or return a list"
        )
    for each in puts:
        if not isinstance(each, Put):
            raise UsageError(
                f"view {view!r} gave {each!r}; a view's function gives views.Put(table, key, {{column: value}})"
            )
        columns = outputs.get(each.table)
        if columns is None:
            raise UsageError(f"view {view!r} gave a row of {each.table!r}, which its into= does not name")
        where = each.table.name, each.table.row(each.key)
        if where in out:
            raise UsageError(f"view {view!r} gave {each.table.name}[{each.key!r}] twice in one run")
        for column in each.values:
            if column not in columns:
                raise UsageError(f"view {view!r} gave a value of {column!r}, which its into= does not name")
        values = {column: value for column, value in each.values.items() if value is not None}
        if values:
            out[where] = _given(each.table, where[1], values)
    return out


def digest_of(values: Mapping[Column[Any, Any], Any]) -> bytes:
    """Of a row's values. Raises: TooLarge, TypeError, ValueError for a value that cannot be stored; UsageError for one
    of a cached function with another codec."""
    return _given(None, b"", values).digest  # type: ignore[arg-type]


def _given(table: Table[Any], row: bytes, values: dict[Column[Any, Any], Any]) -> Given:
    """Raises: as `digest_of`."""
    stored: dict[Column[Any, Any], bytes] = {}
    parts: list[bytes] = []
    later: list[Column[Any, Any]] = []
    for column in values if len(values) == 1 else sorted(values, key=_name_of):
        value, name = values[column], column.first_name.encode()
        if type(value) is Later:
            must_fit(column, value)
            later.append(column)
            parts += (b"%d later " % len(name), name, value.cached.id.encode(), b" ", value.key)
            continue
        data = stored[column] = _stored(column, value)
        parts += (b"%d %d " % (len(name), len(data)), name, data)
    digest = blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).digest()
    return Given(table, row, values, stored, digest, tuple(later))


def _name_of(column: Column[Any, Any]) -> str:
    return column.first_name


def _stored(column: Column[Any, Any], value: Any) -> bytes:
    data = encoded(column.codec, value, column, "value of ")
    if len(data) > VALUE_BYTES_MAX:
        remedy = "Give it in pieces."
        raise TooLarge(f"value of {column!r}", len(data), VALUE_BYTES_MAX, remedy, "bytes")
    return data


def laters(rows: Iterable[Given]) -> list[Later]:
    """The values of rows that are still to be found."""
    return [value for row in rows for column in row.later if type(value := row.values[column]) is Later]


def fill(rows: Iterable[Given], found: Mapping[Later, Any]) -> None:
    """Put the values that were found into the rows."""
    for row in rows:
        for column in row.later:
            later = row.values[column]
            if type(later) is Later and later in found:
                row.values[column] = found[later]
                row.data[column] = _stored(column, found[later])
