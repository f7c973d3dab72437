"""Makes Arrow columns of write records, many cells at a time, with numpy or the C extension. Pure.

It sees what a snapshot's scan sees (`perco/protocol/snapshot.py`): for each row and column, the newest record at or
below the timestamp. It neither settles locks nor explains damaged cells: a row that has either is left to a scan.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
from numpy.typing import NDArray
from pyarrow.lib import ArrowInvalid

from perco.arrow.fields import Field, schema_of
from perco.arrow.leaves import Bytes, Cells, Places, end_of, walk, windows
from perco.arrow.types import TREES, Make
from perco.errors import Corruption
from perco.protocol.records import PUT, PUT_DATA, RECORD_HEAD, data_group, unpack_record
from perco.schema.codecs import (
    BOOL,
    DATE,
    FLOAT64,
    INT64,
    SHORT_DECIMAL,
    TEXT,
    TIMESTAMP,
    Codec,
    DecimalCodec,
    TupleCodec,
)
from perco.storage import lmdb_native
from perco.storage.keys import TAIL_BYTES, escape, unescape
from perco.storage.walking import Leaves

_INVERT: Final = (1 << 64) - 1
_PLAIN_ZEROS: Final = 32  # a prefix with fewer zero bytes has each of the row's escaped by itself (`keys.py`)
_KINDS: Final = 4  # kinds of records are 1 to 4
_TAIL: Final = struct.Struct(">IQ")
_TAILS: Final = np.dtype([("column", ">u4"), ("inverted", ">u8")])
_WORD: Final = 8
_SAME_MAX: Final = 64  # bytes of a string that is copied at once, if all have as many
_DAYS: Final = [pa.scalar(each, pa.date32()).value for each in (date.min, date.max)]
_MICROS: Final = [
    pa.scalar(each.replace(tzinfo=UTC), pa.timestamp("us", "UTC")).value for each in (datetime.min, datetime.max)
]


class Long(NamedTuple):
    """A value that a data group has: where it is."""

    group: str
    row: bytes
    column: int
    start_ts: int


class Bodies(NamedTuple):
    """The records of a column that have a value.

    Attributes:
        rows: the number of each one's row.
        bodies: their bodies.
        long: the records whose value is in a data group: pairs of their index here, and the index in `Found.long`.
    """

    rows: Places
    bodies: pa.Array
    long: list[tuple[int, int]]


class Found(NamedTuple):
    """Rows of cells, as a snapshot sees them.

    Attributes:
        prefixes: of the rows.
        columns: by their numbers.
        long: the values that data groups have.
    """

    prefixes: pa.Array
    columns: dict[int, Bodies]
    long: list[Long]


class Taken(NamedTuple):
    """All cells of some rows, made into columns.

    Attributes:
        cells: how many there were.
        found: None: no row has a value in any of the columns.
        next: the row at which to continue; None: there are no more rows in the range.
    """

    cells: int
    found: Found | None
    next: bytes | None


class Columns:
    """Makes batches of columns from walked cells.

    Args:
        key: the codec of the table's key.
        fields: the columns of a batch.
        ts: the timestamp to read at.

    Attributes: `schema`: of the batches; `numbers`: of the columns in the store.
    """

    schema: pa.Schema
    numbers: frozenset[int]

    def __init__(self, key: Codec[Any], fields: Sequence[Field], ts: int) -> None:
        self._key, self._fields = key, fields
        self.schema = schema_of(fields)
        self.numbers = frozenset(each.number for each in fields if each.number)
        self._numbers = np.array(sorted(self.numbers), dtype=np.uint32)
        self._inverted = np.uint64(_INVERT - ts)
        self._parts = any(each.part is not None for each in fields)

    def blocked(self, locks: list[bytes]) -> bool:
        """Whether one of these locks is in the way: a transaction that began at or before the timestamp may commit."""
        return any(
            inverted >= self._inverted and column in self.numbers
            for column, inverted in (_TAIL.unpack_from(key, len(key) - TAIL_BYTES) for key in locks)
        )

    def take(self, leaves: Leaves, start: bytes, stop: bytes | None, count: int) -> Taken | None:
        """The rows from `start` up to but excluding `stop`, or the end of the tablet, as many as fit into `count`
        cells, or fewer. None: `count` has to be greater.

        Raises: PageDamaged; Corruption for a key that no row has, and for a value that is not a record.
        """
        native = lmdb_native.leaves()
        if native is not None and leaves.numbers and self.numbers:
            taken: Taken | None = self._take_natively(native, leaves, start, stop, count)
            if taken is not NotImplemented:
                return taken
        walked = walk(leaves, start, stop, count)
        return None if walked is None else Taken(len(walked.cells.begins), self.find(walked.cells), walked.next)

    def _take_natively(self, native: Any, leaves: Leaves, start: bytes, stop: bytes | None, count: int) -> Any:
        """The same with the C extension; NotImplemented: `walk` has to look at these leaves."""
        further, end = end_of(leaves, stop)
        numbers = array("Q", leaves.numbers)
        range = escape(start), end, count, leaves.more
        made = native.columns(leaves.data, numbers, leaves.page, *range, self._numbers, int(self._inverted))
        if made is None:
            return NotImplemented
        if made is False:
            return None
        after, cells, count, prefixes, each = made
        next = unescape(after) if after else further
        if not count:
            return Taken(cells, None, next)
        columns: dict[int, Bodies] = {}
        long: list[Long] = []
        for number, (rows, bounds, data, long_here) in zip(self._numbers.tolist(), each, strict=True):
            places = [(n, len(long) + i) for i, (n, _, _) in enumerate(long_here)]
            long += [_long(number, prefix, record) for _, prefix, record in long_here]
            columns[number] = Bodies(np.frombuffer(rows, np.int64), _binary(len(rows) // _WORD, bounds, data), places)
        return Taken(cells, Found(_binary(count, *prefixes), columns, long), next)

    def find(self, cells: Cells) -> Found | None:
        """The rows that have a value in any of the columns; None: there are none. Raises: Corruption."""
        tails = cells.ends - TAIL_BYTES
        ends = _same(cells.buffer, tails, TAIL_BYTES).view(_TAILS)
        columns, inverted = ends["column"].astype(np.uint32), ends["inverted"].astype(np.uint64)
        seen = np.flatnonzero((inverted >= self._inverted) & np.isin(columns, self._numbers))
        if not len(seen):
            return None
        columns, begins, tails = columns[seen], cells.begins[seen], tails[seen]
        first = _firsts(cells, begins, tails - begins, columns)
        newest = first.copy()
        newest[1:] |= columns[1:] != columns[:-1]
        at = seen[newest]
        kinds = _kinds(cells, at)
        live = (kinds == PUT) | (kinds == PUT_DATA)
        rows = (np.cumsum(first) - 1)[newest][live]
        has = np.zeros(int(np.count_nonzero(first)), dtype=bool)
        has[rows] = True
        if not len(rows):
            return None
        at, columns, is_long = at[live], columns[newest][live], kinds[live] == PUT_DATA
        rows = (np.cumsum(has) - 1)[rows]
        found: dict[int, Bodies] = {}
        long: list[Long] = []
        for number in self._numbers.tolist():
            mine = np.flatnonzero(columns == number)
            records = at[mine]
            places = [(n, len(long) + i) for i, n in enumerate(np.flatnonzero(is_long[mine]).tolist())]
            long += [_long(number, cells.prefix(int(n)), cells.value(int(n))) for n in records[is_long[mine]]]
            bodies = _gathered(cells.buffer, cells.ends[records] + RECORD_HEAD, cells.stops[records])
            found[number] = Bodies(rows[mine], bodies, places)
        return Found(_gathered(cells.buffer, begins[first][has], tails[first][has]), found, long)

    def batch(self, found: Found | None, long: Sequence[bytes]) -> pa.RecordBatch:
        """`long`: the values of `found.long`. Raises: Corruption, ValueError for a cell that cannot be read."""
        if found is None:
            return pa.RecordBatch.from_arrays([pa.array([], each.type) for each in self.schema], schema=self.schema)
        count, made = len(found.prefixes), []
        keys = _unescaped(found.prefixes)
        parts = [self._key.decode(each) for each in keys.to_pylist()] if self._parts else []
        for field in self._fields:
            if field.part is not None:
                values = [key[field.part] for key in parts]
                made.append(pa.array(values if field.make is None else map(field.make, values), field.type))
                continue
            if not field.number:
                made.append(_decoded(self._key, field.make, keys, field.type))
                continue
            rows, bodies, at = found.columns[field.number]
            if at:
                some = bodies.to_pylist()
                for n, which in at:
                    some[n] = long[which]
                bodies = pa.array(some, pa.binary())
            values = _decoded(field.codec, field.make, bodies, field.type)
            if len(rows) != count:
                places = np.full(count, -1)
                places[rows] = np.arange(len(rows))
                values = values.take(pa.array(places, mask=places < 0))
            made.append(values)
        return pa.RecordBatch.from_arrays(made, schema=self.schema)


def _long(column: int, prefix: bytes, record: bytes) -> Long:
    """Raises: Corruption."""
    _, start_ts, body = unpack_record(record)
    return Long(data_group(body), unescape(prefix), column, start_ts)


def _binary(count: int, bounds: bytes, data: bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(bounds), pa.py_buffer(data)])


def _parts(array: pa.Array) -> tuple[NDArray[np.int32], Bytes]:
    """The offsets and the bytes of an array of byte strings."""
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return bounds, np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)


def _cut(array: pa.Array, tail: int) -> pa.Array:
    """Byte strings without their last `tail` bytes; each has at least as many."""
    offsets, data = _parts(array)
    data = data[offsets[0] : offsets[-1]]
    size = len(data) // max(1, len(array))
    if bool((np.diff(offsets) == size).all()):
        left = data.reshape(len(array), size)[:, : size - tail].ravel()
    else:
        kept = np.ones(len(data), dtype=bool)
        ends = offsets[1:] - offsets[0]
        for n in range(1, tail + 1):
            kept[ends - n] = False
        left = data[kept]
    bounds = (offsets - offsets[0] - tail * np.arange(len(offsets))).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(array), [None, pa.py_buffer(bounds), pa.py_buffer(left)])


def _firsts(cells: Cells, begins: Places, lengths: Places, columns: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Whether each of some cells is the first one of its row. They are in key order, so the columns of a row ascend:
    where they descend, another row begins. If the first and the last cell of what is between two such places are of
    the same row, all of it is."""
    first = np.ones(len(begins), dtype=bool)
    first[1:] = columns[1:] < columns[:-1]
    starts = np.flatnonzero(first)
    lasts = np.append(starts[1:], len(first)) - 1
    several = _differ(cells.buffer, begins, lengths, starts, lasts)
    if several.any():  # look at each of their cells
        left = np.flatnonzero(np.repeat(several, lasts - starts + 1) & ~first)
        first[left] = _differ(cells.buffer, begins, lengths, left, left - 1)
    return first


def _differ(buffer: Bytes, begins: Places, lengths: Places, a: Places, b: Places) -> NDArray[np.bool_]:
    """Whether the prefixes of two cells differ, for pairs of cells: compared eight bytes at a time."""
    differ: NDArray[np.bool_] = lengths[a] != lengths[b]
    left, words, at = np.flatnonzero(~differ), windows(buffer, np.uint64), 0
    while len(left):  # the pairs that may be equal
        rest = lengths[a[left]] - at
        found = words[begins[a[left]] + at] ^ words[begins[b[left]] + at]
        found <<= (8 * np.maximum(_WORD - rest, 0)).astype(np.uint64)  # little-endian: the bytes after the prefixes
        differ[left] = found != 0
        left, at = left[(found == 0) & (rest > _WORD)], at + _WORD
    return differ


def _same(buffer: Bytes, begins: Places, size: int) -> Bytes:
    """The `size` bytes from each of these places, one after the other."""
    return np.ndarray((max(0, len(buffer) - size + 1),), f"V{size}", buffer, strides=(1,))[begins].view(np.uint8)


def _gathered(buffer: Bytes, begins: Places, ends: Places) -> pa.Array:
    """The byte strings between these places."""
    lengths = ends - begins
    bounds = np.zeros(len(begins) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    size = int(lengths[0]) if len(lengths) else 0
    if 0 < size <= _SAME_MAX and bool((lengths == size).all()):
        data = _same(buffer, begins, size)
    else:
        data = buffer.take(np.arange(int(bounds[-1])) + np.repeat(begins - bounds[:-1], lengths))
    parts = [None, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(begins), parts)


def _kinds(cells: Cells, at: Places) -> Bytes:
    """The kinds of records. Raises: Corruption."""
    ends = cells.ends.take(at)
    if bool((cells.stops.take(at) - ends < RECORD_HEAD).any()):
        raise Corruption("write group", "not a write record")
    kinds = cells.buffer.take(ends)
    if len(kinds) and (int(kinds.min()) < 1 or int(kinds.max()) > _KINDS):
        raise Corruption("write group", "not a write record")
    return kinds


def _unescaped(prefixes: pa.Array) -> pa.Array:
    """The rows of prefixes."""
    offsets, data = _parts(prefixes)
    if int(np.count_nonzero(data[offsets[0] : offsets[-1]] == 0)) == len(prefixes):  # each ends with one
        return _cut(prefixes, 2)
    zeros = compute.max(compute.count_substring(prefixes, "\0")).as_py()
    if zeros >= _PLAIN_ZEROS:
        return pa.array([unescape(prefix) for prefix in prefixes.to_pylist()], pa.binary())
    return compute.replace_substring(_cut(prefixes, 2), b"\x00\xff", b"\x00")


def _decoded(codec: Codec[Any], make: Make | None, data: pa.Array, type: pa.DataType) -> pa.Array:
    """Values of a column or key, from their bytes. Raises: ValueError."""
    name = codec.name
    if isinstance(codec, TupleCodec) or name in TREES:
        assert make is not None
        return pa.array([make(codec.decode(each)) for each in data.to_pylist()], type)
    try:
        if name == TEXT.name:
            return data.cast(pa.string())
    except ArrowInvalid as error:
        raise ValueError(str(error)) from error
    if name in (INT64.name, FLOAT64.name):
        words = _fixed(data, 8)
        if name == FLOAT64.name:
            return pa.array(words.view(">f8").ravel().astype(np.float64))
        return pa.array((words.view(">u8").ravel().astype(np.uint64) ^ np.uint64(1 << 63)).view(np.int64))
    if name == DATE.name:
        days = (_fixed(data, 4).view(">u4").ravel().astype(np.uint32) ^ np.uint32(1 << 31)).view(np.int32)
        return _within(days, _DAYS, type)
    if name == TIMESTAMP.name:
        micros = (_fixed(data, 8).view(">u8").ravel().astype(np.uint64) ^ np.uint64(1 << 63)).view(np.int64)
        return _within(micros, _MICROS, type)
    if isinstance(codec, DecimalCodec):
        return _decimals(data, type)
    if name == BOOL.name:
        bits = _fixed(data, 1).ravel()
        if len(bits) and int(bits.max()) > 1:
            raise ValueError("expected one byte, 0 or 1")
        return pa.array(bits == 1)
    return data


def _within(numbers: NDArray[Any], bounds: list[int], type: pa.DataType) -> pa.Array:
    """Days or microseconds as an array of `type`. Raises: ValueError if Python cannot express one."""
    if len(numbers) and not bounds[0] <= int(numbers.min()) <= int(numbers.max()) <= bounds[1]:
        raise ValueError("outside the years 1 to 9999")
    return pa.array(numbers).view(type)


def _decimals(data: pa.Array, type: pa.DataType) -> pa.Array:
    """Raises: ValueError."""
    size = 8 if type.precision <= SHORT_DECIMAL else 16
    digits = _fixed(data, size)[:, ::-1].copy()
    digits[:, -1] ^= 0x80
    words = np.repeat(np.where(digits[:, -1:] & 0x80, 0xFF, 0).astype(np.uint8), 16, axis=1)  # the sign
    words[:, :size] = digits
    array = pa.Array.from_buffers(type, len(data), [None, pa.py_buffer(np.ascontiguousarray(words))])
    array.validate(full=True)
    return array


def _fixed(data: pa.Array, size: int) -> Bytes:
    """The bytes of values that all have the same length, a row for each."""
    offsets, buffer = _parts(data)
    if len(data) and not bool(np.all(np.diff(offsets) == size)):
        raise ValueError(f"expected {size} bytes")
    return np.ascontiguousarray(buffer[offsets[0] : offsets[-1]]).reshape(len(data), size)
