"""The rows of a stream of changes: their columns, and Arrow batches of them. No I/O.

As in Delta's change data feed, `_change_type` says what happened to a row: `insert`, `update_postimage`, `delete` and,
with `preimages`, `update_preimage`. A row exists as long as it has a value in any of the stream's columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructField, StructType

import perco
from perco.errors import SchemaMismatch, UsageError
from perco.history.changes import RowChange
from perco.spark import types

TYPE: Final = "_change_type"
COMMIT_TS: Final = "_commit_ts"
INSERT: Final = "insert"
DELETE: Final = "delete"
BEFORE: Final = "update_preimage"
AFTER: Final = "update_postimage"
_FIELDS: Final = (StructField(TYPE, StringType(), nullable=False), StructField(COMMIT_TS, LongType(), nullable=False))
_ARROW: Final = {TYPE: pa.string(), COMMIT_TS: pa.int64()}
_ROWS: Final = 4096  # in a batch, at most
_BYTES: Final = 4 << 20  # in a batch, except for a larger row

Image = dict[str, Any]  # the values of a row's columns at one moment; None, or no entry: no value


def schema_of(frame: StructType) -> StructType:
    """The schema of a stream, from that of a frame with the same columns. Raises: UsageError."""
    for field in _FIELDS:
        if field.name in frame.names:
            raise UsageError(f"a stream of changes has a column {field.name!r}: choose another name for the key's")
    return StructType([*frame, *_FIELDS])


def frame_of(schema: StructType, key: str) -> StructType:
    """The part of a stream's schema that a frame has too. Raises: SchemaMismatch."""
    for name in (key, TYPE):
        if name not in schema.names:
            raise SchemaMismatch(f"a stream of changes needs the column {name!r}; its schema has {schema.names}")
    for field in _FIELDS:
        if field.name in schema.names and schema[field.name].dataType != field.dataType:
            raise SchemaMismatch(f"{field.name} is {field.dataType.simpleString()}")
    return StructType([field for field in schema if field.name not in _ARROW])


class Event(NamedTuple):
    """A row of the stream. `kind`: its `_change_type`."""

    kind: str
    commit_ts: int
    key: Any
    values: Image


def events(commit_ts: int, change: RowChange, *, preimages: bool) -> Iterator[Event]:
    """The rows of the stream for a change of a row: none if the row had no value, and has none.

    Args: `preimages`: also the values before an update; and a delete has the values that were deleted.
    """
    had, has = _any(change.before), _any(change.after)
    if had and has:
        if preimages:
            yield Event(BEFORE, commit_ts, change.key, change.before)
        yield Event(AFTER, commit_ts, change.key, change.after)
    elif has:
        yield Event(INSERT, commit_ts, change.key, change.after)
    elif had:
        yield Event(DELETE, commit_ts, change.key, change.before if preimages else {})


def _any(image: Image) -> bool:
    return any(value is not None for value in image.values())


class Net:
    """Reduces the changes of each row to a single one: from the first value before to the last value after."""

    def __init__(self, table: perco.Table[Any]) -> None:
        self._table = table
        self._rows: dict[bytes, tuple[int, RowChange]] = {}

    def add(self, commit_ts: int, change: RowChange) -> None:
        row = self._table.row(change.key)
        standing = self._rows.pop(row, None)  # put back as the newest
        if standing is not None:
            change = change._replace(before=standing[1].before)
        self._rows[row] = commit_ts, change

    def taken(self) -> Iterator[tuple[int, RowChange]]:
        """The changes, in the order of the rows' last commits. A row that is as it was before is left out."""
        for commit_ts, change in self._rows.values():
            if _values(change.before) != _values(change.after):
                yield commit_ts, change


def _values(image: Image) -> Image:
    return {name: value for name, value in image.items() if value is not None}


class Batches:
    """Collects rows of the stream, and converts them to Arrow."""

    def __init__(self, table: perco.Table[Any], key: str, schema: StructType) -> None:
        self._names, self._key = schema.names, key
        codecs = {
            name: table.key if name == key else table.columns[name].codec for name in self._names if name not in _ARROW
        }
        self._makes = {name: types.reading(codec) for name, codec in codecs.items()}
        arrow = {name: types.arrow_type(codec) for name, codec in codecs.items()} | _ARROW
        self._schema = pa.schema([pa.field(field.name, arrow[field.name], field.nullable) for field in schema])
        self._values: dict[str, list[Any]] = {name: [] for name in self._names}
        self._rows = self._bytes = 0

    def add(self, commit_ts: int, change: RowChange, *, preimages: bool) -> list[pa.RecordBatch]:
        """Add a change of a row (see `events`). Returns the batch, if it is full."""
        for event in events(commit_ts, change, preimages=preimages):
            self._add(event)
        return self.taken() if self._rows >= _ROWS or self._bytes >= _BYTES else []

    def _add(self, event: Event) -> None:
        self._rows += 1
        for name, values in self._values.items():
            if name in _ARROW:
                values.append(event.kind if name == TYPE else event.commit_ts)
                continue
            value = event.key if name == self._key else event.values.get(name)
            make = self._makes[name]
            if value is not None and make is not None:
                value = make(value)
            if isinstance(value, str | bytes):
                self._bytes += len(value)
            values.append(value)

    def taken(self) -> list[pa.RecordBatch]:
        """The collected rows: one batch, or none."""
        if not self._rows:
            return []
        arrays = [pa.array(self._values[field.name], field.type) for field in self._schema]
        self._values = {name: [] for name in self._names}
        self._rows = self._bytes = 0
        return [pa.RecordBatch.from_arrays(arrays, schema=self._schema)]


def inserted(rows: pa.RecordBatch, ts: int, schema: StructType) -> pa.RecordBatch:
    """A batch of a frame's rows, as inserts at a timestamp."""
    arrays, fields = [], []
    for name in schema.names:
        if name in _ARROW:
            value = pa.scalar(INSERT if name == TYPE else ts, _ARROW[name])
            arrays.append(pa.repeat(value, rows.num_rows))
            fields.append(pa.field(name, _ARROW[name], schema[name].nullable))
        else:
            arrays.append(rows.column(name))
            fields.append(rows.schema.field(name))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
