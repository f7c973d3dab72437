"""One row's cells as values, and what they are checked against: the catalogue and the oracle's timestamp bound. Pure.

Nothing is judged here; see `examine.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from perco.errors import Corruption
from perco.protocol.records import (
    ACK,
    BARE,
    PUT,
    PUT_DATA,
    Lock,
    ack_of,
    ack_version,
    column_of,
    is_bare,
    observed_column,
    observer_of,
    signal_of,
    unpack_lock,
    unpack_proof,
    unpack_record,
    unpack_trace,
)
from perco.schema.catalogue import Catalogue
from perco.schema.codecs import codec_named
from perco.schema.entries import ColumnEntry, ObserverEntry
from perco.storage import (
    FAILED_LIST,
    LOCK,
    NOTIFY,
    PENDING,
    ROLLBACK,
    ROW_BYTES_MAX,
    SHARED,
    TRACE,
    TS_MAX,
    WRITE,
    ScanCell,
)
from perco.storage.cells import COLUMN_MAX

GROUPS: Final = (LOCK, WRITE, ROLLBACK, NOTIFY, PENDING, SHARED, TRACE, FAILED_LIST)  # all but those with data


class Rec(NamedTuple):
    """A write record without its value. `group`: the group with the data of a long value, else ""; `version`: for an
    acknowledgement, the version of its observer."""

    ts: int
    kind: int
    start_ts: int
    group: str
    version: int = 1


class Image:
    """The cells of one row, decoded, without users' values. All lists are sorted newest first."""

    table: str
    row: bytes

    __slots__ = (
        "broken",
        "data",
        "failed",
        "locks",
        "markers",
        "notify",
        "pending",
        "proofs",
        "records",
        "row",
        "shared",
        "table",
        "traces",
    )

    def __init__(self, table: str, row: bytes, cells: Mapping[str, Iterable[ScanCell]]) -> None:
        self.table, self.row = table, row
        self.locks: dict[int, list[tuple[int, Lock | None]]] = {}
        self.records: dict[int, list[Rec]] = {}
        self.markers: dict[int, set[int]] = {}
        self.notify: dict[int, list[tuple[int, bytes]]] = {}
        self.data: dict[str, dict[int, set[int]]] = {}
        self.broken: dict[int, int] = {}  # column -> timestamp of a record that does not decode
        for column, ts, value in cells[LOCK]:
            self.locks.setdefault(column, []).append((ts, lock_of(value)))
        for column, ts, value in cells[WRITE]:
            record = _record(ts, value)
            if record is None:
                self.broken[column] = ts
            else:
                self.records.setdefault(column, []).append(record)
        for column, ts, _ in cells[ROLLBACK]:
            self.markers.setdefault(column, set()).add(ts)
        for column, ts, value in cells[NOTIFY]:
            self.notify.setdefault(column, []).append((ts, value))
        self.failed: dict[int, list[tuple[int, bytes]]] = {}
        for column, ts, value in cells[FAILED_LIST]:
            self.failed.setdefault(column, []).append((ts, value))
        self.pending: dict[int, list[tuple[int, Lock | None]]] = {}
        for column, ts, value in cells[PENDING]:
            self.pending.setdefault(column, []).append((ts, lock_of(value)))
        self.shared: dict[int, list[tuple[int, Lock | None]]] = {}
        self.traces: dict[int, list[tuple[int, int]]] = {}  # (commit_ts, start_ts); start_ts 0: it does not decode
        self.proofs: dict[int, list[tuple[int, int]]] = {}  # of bare primaries: (start_ts, commit_ts); 0: as above
        for column, ts, value in cells[SHARED]:
            self.shared.setdefault(column, []).append((ts, lock_of(value)))
        for column, ts, value in cells[TRACE]:
            if is_bare(column):
                self.proofs.setdefault(column, []).append((ts, _proof(value)))
            else:
                self.traces.setdefault(column, []).append((ts, _trace(value)))
        for group in cells.keys() - set(GROUPS):
            found = self.data[group] = {}
            for column, ts, _ in cells[group]:
                found.setdefault(column, set()).add(ts)

    def columns(self) -> list[int]:
        columns = {*self.locks, *self.records, *self.markers, *self.notify, *self.pending, *self.broken}
        columns |= {*self.shared, *self.traces, *self.proofs, *self.failed}
        return sorted(columns.union(*self.data.values()))


def _record(ts: int, value: bytes) -> Rec | None:
    try:
        kind, start_ts, body = unpack_record(value)
        if kind == ACK:
            return Rec(ts, kind, start_ts, "", ack_version(body))
        return Rec(ts, kind, start_ts, body.decode() if kind == PUT_DATA else "")
    except (Corruption, ValueError):
        return None


def _trace(value: bytes) -> int:
    try:
        return unpack_trace(value)
    except Corruption:
        return 0


def _proof(value: bytes) -> int:
    try:
        return unpack_proof(value)
    except Corruption:
        return 0


def lock_of(value: bytes) -> Lock | None:
    """A lock whose fields all have the right types, or None."""
    try:
        lock = unpack_lock(value)
    except (Corruption, ValueError):
        return None
    kind, primary, body, observers, covers, root, depth, token, _ = lock
    numbers = (kind, primary.column, root, depth, *_tuple(observers))
    if not all(type(number) is int and 0 <= number <= TS_MAX for number in numbers):
        return None
    typed = (
        type(observers) is tuple
        and type(covers) is tuple
        and type(body) is bytes
        and type(token) is str
        and type(primary.table) is str
        and type(primary.row) is bytes
    )
    sized = typed and len(primary.row) <= ROW_BYTES_MAX and primary.column <= COLUMN_MAX and PUT <= kind <= BARE
    if sized and kind == PUT_DATA and not body.isascii():
        return None
    return lock if sized else None


def _tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


class Book:
    """The context in which a row is examined: the catalogue and the oracle's bound."""

    catalogue: Catalogue
    bound: int
    observers: dict[int, tuple[str, ObserverEntry]]

    def __init__(self, catalogue: Catalogue, bound: int) -> None:
        self.catalogue, self.bound = catalogue, bound
        self.observers = {entry.number: (id, entry) for id, entry in catalogue.observers.items()}
        self._columns = {
            name: {column_of(column.number): (label, column) for label, column in table.columns.items()}
            for name, table in catalogue.tables.items()
        }
        for name, table in catalogue.tables.items():  # N17: the vacuum has not removed their cells yet
            for number, gone in table.gone.items():
                if not gone.clean:
                    self._columns[name][column_of(number)] = gone.name, ColumnEntry(number, gone.codec, gone.group)
        self._keys = {name: codec_named(table.key) for name, table in catalogue.tables.items()}
        self._observed: dict[str, list[tuple[int, int]]] = {name: [] for name in catalogue.tables}
        for observer in catalogue.observers.values():
            column = catalogue.tables[observer.table].columns[observer.column]
            self._observed[observer.table].append((column_of(column.number), observer.number))

    def entry(self, table: str, column: int) -> ColumnEntry:
        return self._columns[table][observed_column(signal_of(column))][1]

    def is_signal(self, table: str, column: int) -> bool:
        """Whether a column is a signal, or belongs to a signal's observer (N5)."""
        return self.entry(table, column).is_signal

    def columns(self, table: str) -> list[int]:
        """Every column that a row of the table may have, including acknowledgements."""
        acks = [ack_of(column, number) for column, number in self.observed(table)]
        return [*self._columns[table], *acks]

    def whole(self, number: int) -> bool:
        """Whether an observer is notified of all data, including data that is older than the observer."""
        found = self.observers.get(number)
        return found is not None and found[1].whole

    def observers_of(self, table: str, column: int) -> tuple[int, ...]:
        """Numbers of a column's observers."""
        return tuple(sorted(number for at, number in self._observed[table] if at == column))

    def observed(self, table: str) -> list[tuple[int, int]]:
        """(column, observer's number) of all observers of a table."""
        return self._observed[table]

    def strange(self, table: str, column: int) -> str:
        """Why there cannot be a cell in that column; "": there can be."""
        if is_bare(column):
            column = signal_of(column)
        found = self._columns[table].get(observed_column(column))
        if found is None:
            return f"a cell of column #{column >> 16}, which the catalogue does not have"
        number = observer_of(column)
        if not number:
            return ""
        grave = self.catalogue.dropped.get(number)
        if grave is not None and (grave.table, grave.column) == (table, found[0]):
            return ""  # N12: the acknowledgements of a dropped observer stay
        if number not in self.observers:
            return f"a cell for observer #{number}, which the catalogue does not have"
        id, entry = self.observers[number]
        if (entry.table, entry.column) != (table, found[0]):
            return f"a cell for observer {id!r}, which observes {entry.table}.{entry.column}"
        return ""

    def where(self, table: str, row: bytes, column: int) -> str:
        """table[key].column, in readable form."""
        try:
            key = repr(self._keys[table].decode(row)) if table in self._keys else repr(row)
        except ValueError:
            key = repr(row)
        return f"{table}[{key}].{self.catalogue.column_name(table, column)}"
