"""A tablet's operations on cells, as pure functions over a view: check-then-write, read, scan.

The same code runs over LMDB and over memory; it does no I/O of its own, and has no notion of transactions.

S1  A mutation's checks all come before its first write, so a refused one has written nothing.
E1  If the tablet keeps a log, the write that puts a record also puts its entry in the log, and the write that removes
    the record removes the entry.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Sequence
from typing import Final

from perco.errors import Corruption
from perco.storage.cells import (
    ABSENT,
    APPLIED,
    LOG,
    TS_MAX,
    WRITE,
    Applied,
    Cell,
    Mutation,
    Query,
    Refused,
    RowCells,
    ScanCell,
    ScanPage,
    ScanQuery,
    ScanRequest,
    ScanRow,
    is_logged,
)
from perco.storage.engine import Batch, Cursor, View
from perco.storage.keys import TAIL_BYTES, cell_key, escape, log_key, past_row, split_key, unescape

_pack: Final = struct.Struct(">IQ").pack
_unpack: Final = struct.Struct(">IQ").unpack_from
_INVERT: Final = (1 << 64) - 1
NOWHERE: Final[frozenset[str]] = frozenset()


def check_and_write(batch: Batch, mutation: Mutation, floor: int, empty: Container[str] = NOWHERE) -> Applied | Refused:
    """Check every row of the mutation, then write every row of it (S1). A mutation below the floor is refused (T13).

    `empty`: groups that are known to hold no cell, and are not searched.
    """
    _, rows, floor_ts, _ = mutation
    if floor_ts is not None and floor_ts < floor:
        return Refused(0, -1)
    prefixes = []
    for i, (row, checks, _) in enumerate(rows):
        prefix = escape(row)
        prefixes.append(prefix)
        for check in checks:
            if check[1] in empty:
                if check[0] == ABSENT:
                    continue
                return Refused(i, checks.index(check))
            kind, group, column, low, high = check
            first = prefix + _pack(column, _INVERT - high)
            if low == high:
                found = batch.get(group, first) is not None
            else:
                cursor = batch.cursor(group)
                found = cursor.set_range(first) and cursor.key() <= prefix + _pack(column, _INVERT - low)
            if found == (kind == ABSENT):
                return Refused(i, checks.index(check))
    logs = batch.logs
    for prefix, (_, _, writes) in zip(prefixes, rows, strict=True):
        for group, column, ts, value in writes:
            if logs and group in (WRITE, LOG):
                _log(batch, group, prefix, column, ts, value)
                if group == LOG:
                    continue
            if value is None:
                batch.delete(group, prefix + _pack(column, _INVERT - ts))
            else:
                batch.put(group, prefix + _pack(column, _INVERT - ts), value)
    return APPLIED


def _log(batch: Batch, group: str, prefix: bytes, column: int, ts: int, value: bytes | None) -> None:
    """Keep the log in step with a write (E1). A write to the log itself can only remove entries."""
    if not is_logged(column):
        return
    if value is None:
        batch.delete(LOG, log_key(prefix, column, ts))
    else:
        assert group == WRITE, "E1: only a record puts an entry into the log"
        batch.put(LOG, log_key(prefix, column, ts), b"")


def read_row(view: View, row: bytes, queries: Sequence[Query], empty: Container[str] = NOWHERE) -> RowCells:
    """The cells of one row that each query asks for; `empty` as in `check_and_write`."""
    prefix = escape(row)
    out: RowCells = []
    for group, column, low, high, n in queries:
        if group in empty:
            out.append([])
            continue
        cursor = view.cursor(group)
        if n == 1:  # the hot path: the newest version at or below a timestamp is one seek
            if cursor.set_range(prefix + _pack(column, _INVERT - high)):
                key, value = cursor.item()
                if key <= prefix + _pack(column, _INVERT - low):
                    out.append([(_INVERT - int.from_bytes(key[-8:], "big"), value)])
                    continue
            out.append([])
        else:
            out.append(_versions(cursor, prefix, column, low, high, n))
    return out


def _versions(
    cursor: Cursor, prefix: bytes, column: int, low: int, high: int, n: int, values: bool = True
) -> list[Cell]:
    newest = prefix + _pack(column, _INVERT - high)
    oldest = prefix + _pack(column, _INVERT - low)
    cells: list[Cell] = []
    if n >= 0:
        more = cursor.set_range(newest)
        while more and len(cells) < n:
            key, value = cursor.item() if values else (cursor.key(), b"")
            if key > oldest:
                break
            cells.append((_INVERT - int.from_bytes(key[-8:], "big"), value))
            more = cursor.next()
        return cells
    # Oldest first: from the last key at or below `oldest`, backwards.
    more = cursor.set_range(oldest)
    if not more:
        more = cursor.last()
    elif cursor.key() != oldest:
        more = cursor.prev()
    while more and len(cells) < -n:
        key, value = cursor.item() if values else (cursor.key(), b"")
        if key < newest or key > oldest:
            break
        cells.append((_INVERT - int.from_bytes(key[-8:], "big"), value))
        more = cursor.prev()
    return cells


def scan_rows(view: View, request: ScanRequest) -> ScanPage:
    """One page of a scan; see `ScanRequest`."""
    if request.log is not None:
        return _scan_log(view, request, request.log)
    if len(request.queries) == 1 and request.queries[0][1:4] == (None, 0, TS_MAX) and not request.reverse:
        return _scan_group(view, request, request.queries[0])
    walk = _Backward(view, request) if request.reverse else _Forward(view, request)
    rows: list[ScanRow] = []
    seeks = size = 0
    while (prefix := walk.row()) is not None:
        full = len(rows) >= request.rows_max or size >= request.bytes_max or seeks >= request.seeks_max
        if full:
            row = unescape(prefix)
            return ScanPage(rows, row + b"\x00" if request.reverse else row)
        here = walk.groups_at(prefix)
        cells = [_query(view, prefix, query) if query.group in here else [] for query in request.queries]
        if any(cells):
            rows.append((unescape(prefix), cells))
            size += sum(len(value) for found in cells for _, _, value in found)
        seeks += 1 + sum(1 if query.columns is None else len(query.columns) for query in request.queries)
        walk.leave(prefix)
    return ScanPage(rows, None)


def _scan_group(view: View, request: ScanRequest, query: ScanQuery) -> ScanPage:
    """A page of all cells of one group, as scanners request it: one pass, without a seek for every row."""
    cursor = view.cursor(query.group)
    stop = None if request.stop is None else escape(request.stop)
    rows: list[ScanRow] = []
    seen = size = 0
    more = cursor.set_range(escape(request.start))
    while more:
        prefix = cursor.key()[:-TAIL_BYTES]
        if stop is not None and prefix >= stop:
            break
        if len(rows) >= request.rows_max or size >= request.bytes_max or seen >= request.seeks_max:
            return ScanPage(rows, unescape(prefix))
        cells: list[ScanCell] = []
        while more:
            key, value = cursor.item() if query.values else (cursor.key(), b"")
            if key[:-TAIL_BYTES] != prefix:
                break
            if len(cells) == query.n:
                more = cursor.set_range(past_row(prefix))
                break
            seen += 1
            column, inverted = _unpack(key, len(prefix))
            cells.append((column, _INVERT - inverted, value))
            size += len(value)
            more = cursor.next()
        rows.append((unescape(prefix), [cells]))
    return ScanPage(rows, None)


def _scan_log(view: View, request: ScanRequest, after: bytes) -> ScanPage:
    """A page of a log (E1)."""
    [(_, _, from_ts, to_ts, n, _)] = request.queries
    log, records = view.cursor(LOG), view.cursor(WRITE)
    end = log_key(b"", 0, to_ts + 1)[:8]
    rows: list[ScanRow] = []
    size = 0
    more = log.set_range(max(after + b"\x00", log_key(b"", 0, from_ts)[:8]))
    while more and len(rows) < request.rows_max and size < request.bytes_max:
        key = log.key()
        if key >= end:
            break
        where, column, ts = key[8:], int.from_bytes(key[-4:], "big"), int.from_bytes(key[:8], "big")
        cells = [(column, ts, b"")]
        if n:
            at = where + (_INVERT - ts).to_bytes(8, "big")
            if records.set_range(at) and records.key() == at:
                value = records.value()
                cells = [(column, ts, value)]
                size += len(value)
                if n > 1 and records.next():  # versions of a cell are next to each other, newest first
                    older = records.key()
                    if older[:-8] == where:
                        value = records.value()
                        cells.append((column, _INVERT - int.from_bytes(older[-8:], "big"), value))
                        size += len(value)
        rows.append((unescape(where[:-4]), [cells]))
        more = log.next()
    return ScanPage(rows, None)


def _query(view: View, prefix: bytes, query: ScanQuery) -> list[ScanCell]:
    cursor = view.cursor(query.group)
    out: list[ScanCell] = []
    if query.columns is not None:
        for column in query.columns:
            for ts, value in _versions(cursor, prefix, column, query.from_ts, query.to_ts, query.n, query.values):
                out.append((column, ts, value))
        return out
    more = cursor.set_range(prefix)
    while more and len(out) < query.n:
        key = cursor.key()
        if not key.startswith(prefix):
            break
        _, column, ts = split_key(key)
        if ts > query.to_ts:  # one seek past all newer versions, however many there are
            more = _seek(cursor, cell_key(prefix, column, query.to_ts))
        elif ts < query.from_ts:
            more = _seek(cursor, cell_key(prefix, column, 0) + b"\xff")
        else:
            out.append((column, ts, cursor.value() if query.values else b""))
            more = cursor.next()
    return out


def _seek(cursor: Cursor, key: bytes) -> bool:
    """Move the cursor forward to a key. Raises: Corruption, if the search stops at a smaller key, which happens on
    damaged pages; without this error, the scan would never end."""
    more = cursor.set_range(key)
    if more and cursor.key() < key:
        raise Corruption(f"key {key.hex()}", "a search for it ends before it")
    return more


class _Forward:
    """Walks the rows of several groups in key order: the next row is the smallest at which any cursor is."""

    def __init__(self, view: View, request: ScanRequest) -> None:
        start = escape(request.start)
        self._stop = None if request.stop is None else escape(request.stop)
        groups = dict.fromkeys(query.group for query in request.queries)
        self._at = {group: _key_at(view.cursor(group), start) for group in groups}
        self._view = view

    def row(self) -> bytes | None:
        keys = [key for key in self._at.values() if key is not None]
        if not keys:
            return None
        prefix = min(keys)[:-TAIL_BYTES]
        return None if self._stop is not None and prefix >= self._stop else prefix

    def groups_at(self, prefix: bytes) -> list[str]:
        """The groups that have cells in a row."""
        return [group for group, key in self._at.items() if key is not None and key[:-TAIL_BYTES] == prefix]

    def leave(self, prefix: bytes) -> None:
        for group, key in self._at.items():
            if key is not None and key[:-TAIL_BYTES] == prefix:
                self._at[group] = _key_at(self._view.cursor(group), past_row(prefix))


class _Backward:
    """Walks the rows of several groups in reverse key order: the next row is the largest at which any cursor is."""

    def __init__(self, view: View, request: ScanRequest) -> None:
        self._start = escape(request.start)
        stop = None if request.stop is None else escape(request.stop)
        groups = dict.fromkeys(query.group for query in request.queries)
        self._at = {group: _key_before(view.cursor(group), stop) for group in groups}
        self._view = view

    def row(self) -> bytes | None:
        keys = [key for key in self._at.values() if key is not None]
        if not keys:
            return None
        prefix = max(keys)[:-TAIL_BYTES]
        return None if prefix < self._start else prefix

    def groups_at(self, prefix: bytes) -> list[str]:
        return [group for group, key in self._at.items() if key is not None and key[:-TAIL_BYTES] == prefix]

    def leave(self, prefix: bytes) -> None:
        for group, key in self._at.items():
            if key is not None and key[:-TAIL_BYTES] == prefix:
                self._at[group] = _key_before(self._view.cursor(group), prefix)


def _key_at(cursor: Cursor, key: bytes) -> bytes | None:
    return cursor.key() if cursor.set_range(key) else None


def _key_before(cursor: Cursor, key: bytes | None) -> bytes | None:
    if key is None or not cursor.set_range(key):
        return cursor.key() if cursor.last() else None
    return cursor.key() if cursor.prev() else None
