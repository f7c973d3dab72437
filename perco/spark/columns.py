"""Makes Arrow columns of write records, many cells at a time. Pure.

It sees what a snapshot's scan sees (`perco/protocol/snapshot.py`): for each row and column, the newest record at or
below the timestamp. It neither settles locks nor explains damaged cells: a row that has either is left to a scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
from numpy.typing import NDArray
from pyarrow.lib import ArrowInvalid
from pyspark.sql.types import StructType

import perco
from perco.errors import Corruption
from perco.protocol.records import PUT, PUT_DATA, RECORD_HEAD, data_group, unpack_record
from perco.schema.codecs import TupleCodec
from perco.spark import types
from perco.storage.keys import TAIL_BYTES, unescape
from perco.storage.walking import Walked

_INVERT: Final = (1 << 64) - 1
_PLAIN_ZEROS: Final = 32  # a row with fewer zero bytes has each of them escaped by itself (`keys.py`)
_KINDS: Final = 4  # kinds of records are 1 to 4

Bytes = NDArray[np.uint8]


class TooMuch(Exception):
    """The rows' long values have more bytes than a batch should have."""


class Columns:
    """Makes batches of a frame's columns from walked cells.

    Args:
        columns: the frame's columns, each with its number in the store; None stands for the table's key.
        ts: the timestamp to read at.
    """

    schema: pa.Schema

    def __init__(
        self,
        table: perco.Table[Any],
        columns: list[tuple[perco.Column[Any, Any], int] | None],
        schema: StructType,
        ts: int,
    ) -> None:
        self._key, self._columns = table.key, columns
        self._numbers = np.array(sorted(each[1] for each in columns if each is not None), dtype=np.uint32)
        self._inverted = np.uint64(_INVERT - ts)
        codecs = [table.key if each is None else each[0].codec for each in columns]
        fields = zip(schema.names, codecs, schema, strict=True)
        self.schema = pa.schema([pa.field(name, types.arrow_type(c), field.nullable) for name, c, field in fields])

    def blocked(self, locks: list[bytes]) -> bool:
        """Whether one of these locks is in the way: a transaction that began at or before the timestamp may commit."""
        columns, inverted = _tails(pa.array(locks, pa.binary()))
        return bool(np.any((inverted >= self._inverted) & np.isin(columns, self._numbers)))

    def batch(self, walked: Walked, bytes_max: int) -> pa.RecordBatch:
        """The rows that have a value in any of the columns.

        Raises: TooMuch, if there are several rows; Corruption, ValueError for a cell that cannot be read.
        """
        if not walked.cells:
            return self._empty()
        keys = pa.array([key for key, _ in walked.cells], pa.binary())
        records = pa.array([record for _, record in walked.cells], pa.binary())
        columns, inverted = _tails(keys)
        rows, firsts, prefixes = _rows(keys)
        seen = np.flatnonzero((inverted >= self._inverted) & np.isin(columns, self._numbers))
        newest = np.ones(len(seen), dtype=bool)
        newest[1:] = (rows[seen][1:] != rows[seen][:-1]) | (columns[seen][1:] != columns[seen][:-1])
        at = seen[newest]
        found = records.take(pa.array(at))
        kinds = _kinds(found)
        live = (kinds == PUT) | (kinds == PUT_DATA)
        there = np.unique(rows[at][live])
        if not len(there):
            return self._empty()
        bodies = _bodies(found, kinds, keys, at, walked.value, bytes_max if len(there) > 1 else None)
        made = []
        for each, field in zip(self._columns, self.schema, strict=True):
            if each is None:
                made.append(_decoded(self._key, _unescaped(prefixes.take(pa.array(firsts[there]))), field.type))
                continue
            column, number = each
            mine = np.flatnonzero(live & (columns[at] == number))
            values = _decoded(column.codec, bodies.take(pa.array(mine)), field.type)
            if len(mine) != len(there):
                places = np.full(len(there), -1)
                places[np.searchsorted(there, rows[at][mine])] = np.arange(len(mine))
                values = values.take(pa.array(places, mask=places < 0))
            made.append(values)
        return pa.RecordBatch.from_arrays(made, schema=self.schema)

    def _empty(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in self.schema], schema=self.schema)


def _parts(array: pa.Array) -> tuple[NDArray[np.int32], Bytes]:
    """The offsets and the bytes of an array of byte strings."""
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return bounds, np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)


def _cut(array: pa.Array, head: int, tail: int) -> pa.Array:
    """Byte strings without their first `head` and their last `tail` bytes; each has at least as many."""
    offsets, data = _parts(array)
    kept = np.ones(int(offsets[-1] - offsets[0]), dtype=bool)
    begins, ends = offsets[:-1] - offsets[0], offsets[1:] - offsets[0]
    for n in range(head):
        kept[begins + n] = False
    for n in range(1, tail + 1):
        kept[ends - n] = False
    bounds = (offsets - offsets[0] - (head + tail) * np.arange(len(offsets))).astype(np.int32)
    left = np.ascontiguousarray(data[offsets[0] : offsets[-1]][kept])
    return pa.Array.from_buffers(pa.binary(), len(array), [None, pa.py_buffer(bounds), pa.py_buffer(left)])


def _tails(keys: pa.Array) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """The columns of keys, and their inverted timestamps."""
    offsets, data = _parts(keys)
    if len(keys) and int(np.diff(offsets).min()) < TAIL_BYTES + 2:
        raise Corruption("key", "too short for a cell")
    tails = data[(offsets[1:] - TAIL_BYTES)[:, None] + np.arange(TAIL_BYTES)]
    columns = np.ascontiguousarray(tails[:, :4]).view(">u4").ravel().astype(np.uint32)
    inverted = np.ascontiguousarray(tails[:, 4:]).view(">u8").ravel().astype(np.uint64)
    return columns, inverted


def _rows(keys: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64], pa.Array]:
    """The number of each key's row, the first key of each row, and the prefixes of the keys."""
    prefixes = _cut(keys, 0, TAIL_BYTES)
    begins = np.ones(len(keys), dtype=bool)
    if len(keys) > 1:
        begins[1:] = compute.not_equal(prefixes[1:], prefixes[:-1]).to_numpy(zero_copy_only=False)
    return np.cumsum(begins) - 1, np.flatnonzero(begins), prefixes


def _kinds(records: pa.Array) -> Bytes:
    offsets, data = _parts(records)
    if len(records) and int(np.diff(offsets).min()) < RECORD_HEAD:
        raise Corruption("write group", "not a write record")
    kinds = data[offsets[:-1]]
    if len(kinds) and (int(kinds.min()) < 1 or int(kinds.max()) > _KINDS):
        raise Corruption("write group", "not a write record")
    return kinds


def _bodies(
    records: pa.Array,
    kinds: Bytes,
    keys: pa.Array,
    at: NDArray[np.int64],
    value: Callable[[str, bytes, int], bytes | None],
    bytes_max: int | None,
) -> pa.Array:
    """The values of records: what is in them, or in a data group."""
    bodies = _cut(records, RECORD_HEAD, 0)
    long = np.flatnonzero(kinds == PUT_DATA)
    if not len(long):
        return bodies
    out = bodies.to_pylist()
    size = 0
    for n in long:
        _, start_ts, body = unpack_record(records[int(n)].as_py())
        found = value(data_group(body), keys[int(at[n])].as_py()[:-8], start_ts)
        if found is None:
            raise Corruption("data group", "a value is missing")
        size += len(found)
        if bytes_max is not None and size > bytes_max:
            raise TooMuch
        out[n] = found
    return pa.array(out, pa.binary())


def _unescaped(prefixes: pa.Array) -> pa.Array:
    """The rows of prefixes."""
    zeros = compute.max(compute.count_substring(prefixes, "\0")).as_py()
    if zeros == 1:
        return _cut(prefixes, 0, 2)
    if zeros > _PLAIN_ZEROS:
        return pa.array([unescape(prefix) for prefix in prefixes.to_pylist()], pa.binary())
    return compute.replace_substring(_cut(prefixes, 0, 2), b"\x00\xff", b"\x00")


def _decoded(codec: perco.Codec[Any], data: pa.Array, type: pa.DataType) -> pa.Array:
    """Values of a column or key, from their bytes. Raises: ValueError."""
    name = codec.name
    if isinstance(codec, TupleCodec) or name in (perco.JSON.name, perco.MSGPACK.name):
        make = types.reading(codec)
        assert make is not None
        return pa.array([make(codec.decode(each)) for each in data.to_pylist()], type)
    try:
        if name == perco.TEXT.name:
            return data.cast(pa.string())
    except ArrowInvalid as error:
        raise ValueError(str(error)) from error
    if name in (perco.INT64.name, perco.FLOAT64.name):
        words = _fixed(data, 8)
        if name == perco.FLOAT64.name:
            return pa.array(words.view(">f8").ravel().astype(np.float64))
        return pa.array((words.view(">u8").ravel().astype(np.uint64) ^ np.uint64(1 << 63)).view(np.int64))
    if name == perco.BOOL.name:
        bits = _fixed(data, 1).ravel()
        if len(bits) and int(bits.max()) > 1:
            raise ValueError("expected one byte, 0 or 1")
        return pa.array(bits == 1)
    return data


def _fixed(data: pa.Array, size: int) -> Bytes:
    """The bytes of values that all have the same length, a row for each."""
    offsets, buffer = _parts(data)
    if len(data) and not bool(np.all(np.diff(offsets) == size)):
        raise ValueError(f"expected {size} bytes")
    return np.ascontiguousarray(buffer[offsets[0] : offsets[-1]]).reshape(len(data), size)
