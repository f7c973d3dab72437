"""What is wrong with the cells of one row. Pure.

`examine` and `unnotified`: the cells of a row, and what the catalogue says of it, in; findings out. The invariants that
they verify are listed in `check.py`, which asks the other rows that these point at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from perco.errors import Corruption
from perco.storage import (
    LOCK,
    NOTIFY,
    ROLLBACK,
    ROW_BYTES_MAX,
    TS_MAX,
    WRITE,
    ScanCell,
)
from perco.storage.cells import COLUMN_MAX
from perco.txn.catalogue import Catalogue, ColumnEntry
from perco.txn.codecs import codec_named
from perco.txn.records import (
    ACK,
    DELETE,
    PUT,
    PUT_DATA,
    Lock,
    ack_of,
    column_of,
    observed_column,
    observer_of,
    unpack_cause,
    unpack_lock,
    unpack_record,
)

Severity = Literal["error", "warning", "note"]

GROUPS: Final = (LOCK, WRITE, ROLLBACK, NOTIFY)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that should not be so.

    Attributes:
        severity: "error": the protocol is broken; "warning": of no consequence for what is read, but nobody should
            have left it; "note": a lock that is decided and not yet settled.
        invariant: its number, as in the module's list.
        where: the cell, as table[key].column.
        what: one sentence.
    """

    severity: Severity
    invariant: str
    where: str
    what: str


# ------------------------------------------------------------------ one row, as values


class Rec(NamedTuple):
    """A write record without its value; `group`: of a long value's data, else ""."""

    ts: int
    kind: int
    start_ts: int
    group: str


class Image:
    """The cells of one row, decoded; values themselves are left out. All lists newest first."""

    __slots__ = ("broken", "data", "locks", "markers", "notify", "records", "row", "table")

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
        for group in cells.keys() - set(GROUPS):
            found = self.data[group] = {}
            for column, ts, _ in cells[group]:
                found.setdefault(column, set()).add(ts)

    def columns(self) -> list[int]:
        columns = {*self.locks, *self.records, *self.markers, *self.notify, *self.broken}
        return sorted(columns.union(*self.data.values()))


def _record(ts: int, value: bytes) -> Rec | None:
    try:
        kind, start_ts, body = unpack_record(value)
        return Rec(ts, kind, start_ts, body.decode() if kind == PUT_DATA else "")
    except (Corruption, ValueError):
        return None


def lock_of(value: bytes) -> Lock | None:
    """A lock with all its parts of the right kind, or None."""
    try:
        lock = unpack_lock(value)
    except (Corruption, ValueError):
        return None
    kind, primary, body, observers, covers, root, depth, token, wall_ms = lock
    numbers = (kind, primary.column, root, depth, wall_ms, *_tuple(observers), *_tuple(covers))
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
    sized = typed and len(primary.row) <= ROW_BYTES_MAX and primary.column <= COLUMN_MAX and PUT <= kind <= ACK
    if sized and kind == PUT_DATA and not body.isascii():
        return None
    return lock if sized else None


def _tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


class Book:
    """What the catalogue and the oracle say: the context in which a row is examined."""

    def __init__(self, catalogue: Catalogue, bound: int, replayed: frozenset[int]) -> None:
        self.catalogue, self.bound = catalogue, bound
        self.replayed = replayed  # observers that were registered with all that was there before
        self.observers = {entry.number: (id, entry) for id, entry in catalogue.observers.items()}
        self._columns = {
            name: {column_of(column.number): (label, column) for label, column in table.columns.items()}
            for name, table in catalogue.tables.items()
        }
        self._keys = {name: codec_named(table.key) for name, table in catalogue.tables.items()}
        self._observed: dict[str, list[tuple[int, int]]] = {name: [] for name in catalogue.tables}
        for observer in catalogue.observers.values():
            column = catalogue.tables[observer.table].columns[observer.column]
            self._observed[observer.table].append((column_of(column.number), observer.number))

    def entry(self, table: str, column: int) -> ColumnEntry:
        return self._columns[table][observed_column(column)][1]

    def columns(self, table: str) -> list[int]:
        """Every column that a row of the table may have, acks included."""
        acks = [ack_of(column, number) for column, number in self.observed(table)]
        return [*self._columns[table], *acks]

    def observed(self, table: str) -> list[tuple[int, int]]:
        """(column, observer's number) of all observers of a table."""
        return self._observed[table]

    def strange(self, table: str, column: int) -> str:
        """Why there cannot be a cell of that column, or ""."""
        found = self._columns[table].get(observed_column(column))
        if found is None:
            return f"a cell of column #{column >> 16}, which the catalogue does not have"
        number = observer_of(column)
        if not number:
            return ""
        if number not in self.observers:
            return f"a cell for observer #{number}, which the catalogue does not have"
        id, entry = self.observers[number]
        if (entry.table, entry.column) != (table, found[0]):
            return f"a cell for observer {id!r}, which observes {entry.table}.{entry.column}"
        return ""

    def where(self, table: str, row: bytes, column: int) -> str:
        """table[key].column, for people."""
        try:
            key = repr(self._keys[table].decode(row)) if table in self._keys else repr(row)
        except ValueError:
            key = repr(row)
        return f"{table}[{key}].{self.catalogue.column_name(table, column)}"


# ------------------------------------------------------------------ one row, examined

_Complaint = tuple[str, str]  # (invariant, what)


def examine(image: Image, book: Book) -> Iterator[Finding]:
    """What is wrong with a row by itself; of each cell the first thing."""
    for column in image.columns():
        for severity, (invariant, what) in _of_column(image, column, book):
            yield Finding(severity, invariant, book.where(image.table, image.row, column), what)


def _of_column(image: Image, column: int, book: Book) -> Iterator[tuple[Severity, _Complaint]]:
    strange = book.strange(image.table, column)
    if strange:
        yield "error", ("N10", strange)
        return
    for complaint in (
        *_of_locks(image, column, book),
        *_of_records(image, column, book),
        *_of_markers(image, column, book),
        *_of_notify(image, column, book),
    ):
        yield "error", complaint
    for complaint in (*_of_data(image, column), *_of_spurious(image, column, book)):
        yield "warning", complaint


def _of_locks(image: Image, column: int, book: Book) -> Iterator[_Complaint]:
    locks = image.locks.get(column, ())
    if len(locks) > 1:
        yield "T7", f"locked more than once, by transactions {_list(ts for ts, _ in locks)}"
    for start_ts, lock in locks:
        complaint = _of_lock(image, column, start_ts, lock, book)
        if complaint is not None:
            yield complaint


def _of_lock(image: Image, column: int, start_ts: int, lock: Lock | None, book: Book) -> _Complaint | None:
    if lock is None:
        return "N1", f"the lock of transaction {start_ts} does not decode"
    if start_ts > book.bound:
        return "O1", f"the lock of transaction {start_ts} is above the oracle's bound"
    if start_ts in image.markers.get(column, ()):
        return "T5", f"the lock of transaction {start_ts} stands beside its rollback marker"
    past = [record for record in image.records.get(column, ()) if record.ts >= start_ts]
    for record in past:
        if record.start_ts == start_ts:
            return "T8", f"transaction {start_ts} committed at {record.ts} and its lock is still there"
    if past:
        return "T7", f"the record at {past[0].ts} was let in past the lock of transaction {start_ts}"
    is_ack = bool(observer_of(column))
    if (lock.kind == ACK) != is_ack:
        return "N3", f"the lock of transaction {start_ts} is of kind {lock.kind}, not one for this column"
    if is_ack and lock.primary != (image.table, image.row, column):
        return "N2", f"the ack's lock of transaction {start_ts} is not its transaction's primary"
    if any(ts > start_ts for ts in lock.covers):
        return "N2", f"the ack's lock of transaction {start_ts} covers notifications that its run cannot have seen"
    unknown = [number for number in lock.observers if book.strange(image.table, ack_of(column, number))]
    if unknown:
        return "N10", f"the lock of transaction {start_ts} notifies unknown observers #{_list(unknown)}"
    if lock.kind == PUT_DATA:
        return _of_group(image, column, start_ts, lock.body.decode(), f"the lock of transaction {start_ts}", book)
    return None


def _of_group(image: Image, column: int, start_ts: int, group: str, who: str, book: Book) -> _Complaint | None:
    expected = book.entry(image.table, column).group
    if group != expected:
        return "T2", f"{who} names group {group!r}, and the column lies in {expected!r}"
    if group in image.data and start_ts not in image.data[group].get(column, ()):
        return "T2", f"{who} points at missing data, at {start_ts} in group {group!r}"
    return None


def _of_records(image: Image, column: int, book: Book) -> Iterator[_Complaint]:
    if column in image.broken:
        yield "T1", f"the record at {image.broken[column]} does not decode"
    records = image.records.get(column, [])
    for at, record in enumerate(records):
        older = records[at + 1] if at + 1 < len(records) else None
        complaint = _of_record(image, column, record, older, book)
        if complaint is not None:
            yield complaint


def _of_record(image: Image, column: int, record: Rec, older: Rec | None, book: Book) -> _Complaint | None:
    ts, kind, start_ts, group = record
    is_ack = bool(observer_of(column))
    if (kind == ACK) != is_ack:
        return "N3", f"the record at {ts} is of kind {kind}, not one for this column"
    if is_ack and start_ts > book.bound:
        return "N3", f"the ack at {ts} points at {start_ts}, in the future"
    if start_ts >= ts:
        return "T2", f"the record at {ts} points at transaction {start_ts}, which began no earlier"
    if ts > book.bound:
        return "O1", f"the record at {ts} is above the oracle's bound"
    if start_ts in image.markers.get(column, ()):
        return "T5", f"transaction {start_ts} committed at {ts} and was rolled back"
    if older is not None and older.ts >= start_ts and older.start_ts != start_ts:
        return "T7", f"transaction {start_ts}, committed at {ts}, overlaps the one that committed at {older.ts}"
    if kind == PUT_DATA:
        return _of_group(image, column, start_ts, group, f"the record at {ts}", book)
    return None


def _of_markers(image: Image, column: int, book: Book) -> Iterator[_Complaint]:
    for ts in sorted(image.markers.get(column, ())):
        if ts > book.bound:
            yield "O1", f"the rollback marker at {ts} is above the oracle's bound"


def _of_data(image: Image, column: int) -> Iterator[_Complaint]:
    """Long values that nothing points at."""
    if column in image.broken:
        return
    wanted = {ts for ts, _ in image.locks.get(column, ())}
    wanted |= {record.start_ts for record in image.records.get(column, ()) if record.kind == PUT_DATA}
    for group, columns in sorted(image.data.items()):
        for ts in sorted(columns.get(column, set()) - wanted):
            yield "T5", f"data of transaction {ts} in group {group!r}, without a lock or record"


def _of_notify(image: Image, column: int, book: Book) -> Iterator[_Complaint]:
    cells = image.notify.get(column, ())
    if cells and not observer_of(column):
        yield "N10", f"the notify cell at {cells[0][0]} is for no observer"
        return
    for ts, value in cells:
        if ts > book.bound:
            yield "O1", f"the notify cell at {ts} is above the oracle's bound"
        elif not 0 < _root(value) <= ts:
            yield "N9", f"the notify cell at {ts} does not say what caused it"


def _of_spurious(image: Image, column: int, book: Book) -> Iterator[_Complaint]:
    """Notify cells whose change is not there. An older version may once be collected, the newest never."""
    observed = observed_column(column)
    records = image.records.get(observed)
    newest = records[0].ts if records else 0
    if not observer_of(column) or observed in image.broken:
        return
    locked = [start_ts for start_ts, _ in image.locks.get(observed, ())]  # it may yet be settled there
    for ts, value in image.notify.get(column, ()):
        if newest < ts <= book.bound and 0 < _root(value) <= ts and not any(start_ts < ts for start_ts in locked):
            yield "N1", f"the notify cell at {ts} is for a change that is not there"


def _root(value: bytes) -> int:
    try:
        return unpack_cause(value)[0]
    except Corruption:
        return -1


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in numbers)


class Unnotified(NamedTuple):
    """A change that observer `number` has not seen and is not told of; `sure`: it should be, whenever it was made."""

    number: int
    ts: int
    sure: bool
    finding: Finding


def unnotified(image: Image, book: Book) -> Iterator[Unnotified]:
    """N1: changes of observed columns that are newer than the ack's pointer, and have no notify cell.

    An observer is not told of what was there before it was registered, if it was registered without that, nor of what
    had been deleted by then. Nobody noted when that was; but after its first run it was.
    """
    for column, number in book.observed(image.table):
        records = image.records.get(column)
        ack = ack_of(column, number)
        id, entry = book.observers[number]
        if not records or not entry.ready or column in image.broken or ack in image.broken:
            continue
        newest = records[0].ts
        acks = image.records.get(ack)
        pointer = acks[0].start_ts if acks else 0
        running = any(start_ts >= newest for start_ts, _ in image.locks.get(ack, ()))
        if newest > pointer and not running and not image.notify.get(ack) and newest <= book.bound:
            what = f"lost notification: observer {id!r} has not seen the change at {newest} and is not told of it"
            finding = Finding("error", "N1", book.where(image.table, image.row, column), what)
            told_of_old = number in book.replayed and records[0].kind != DELETE
            yield Unnotified(number, newest, pointer > 0 or told_of_old, finding)
