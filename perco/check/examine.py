"""Checks the cells of one row. Pure.

`examine` and `unnotified` take the cells of a row and the context in which to examine them (`Book`), and return
findings, each with a repair if there is a safe one. `check.py` lists the invariants that they verify; `across.py`
compares the row with the rows to which it refers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from perco.check import repairs
from perco.check.image import Book, Image, Rec
from perco.check.repairs import REMEDIES, Repair
from perco.errors import Corruption
from perco.protocol.failed import unpack_failed
from perco.protocol.records import (
    ACK,
    BARE,
    DELETE,
    PUT_DATA,
    READ,
    SIGNAL,
    Cellref,
    Lock,
    ack_of,
    is_bare,
    observed_column,
    observer_of,
    unpack_cause,
)
from perco.schema.entries import ObserverEntry
from perco.storage import FAILED_LIST, NOTIFY, ROLLBACK, SHARED, TRACE, WRITE

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, or a lock left behind, that a check has found.

    Attributes:
        severity: "error": the protocol is broken; "warning": it does not affect reads, but should not be there; "note":
            a lock that its client has left behind, and that any other client can settle.
        invariant: the number of the invariant, as in the list of `check.py`.
        where: the cell, as table[key].column.
        what: what is wrong, in one sentence.
        cell, start_ts: the cell and the transaction that the finding is about, if any (start_ts 0: none).
        repair: the mutation that repairs the fault; None: no safe repair is known.
        advice: what a user can do if there is no repair; "": the entry of `REMEDIES` for the invariant.
    """

    severity: Severity
    invariant: str
    where: str
    what: str
    cell: Cellref | None = None
    start_ts: int = 0
    repair: Repair | None = field(default=None, compare=False)
    advice: str = field(default="", compare=False)

    @property
    def remedy(self) -> str:
        """The advice to the user."""
        return f"--repair: {self.repair.what}" if self.repair else self.advice or REMEDIES[self.invariant]


class _Complaint(NamedTuple):
    invariant: str
    what: str
    start_ts: int = 0
    repair: Repair | None = None


# ------------------------------------------------------------------ one row


def examine(image: Image, book: Book) -> Iterator[Finding]:
    """The faults within one row: the first fault of each lock, each record and each other cell."""
    for column in image.columns():
        cell = Cellref(image.table, image.row, column)
        where = book.where(*cell)
        for severity, (invariant, what, start_ts, repair) in _of_column(image, cell, book):
            yield Finding(severity, invariant, where, what, cell, start_ts, repair)


def _of_column(image: Image, cell: Cellref, book: Book) -> Iterator[tuple[Severity, _Complaint]]:
    column = cell.column
    strange = book.strange(image.table, column)
    if strange:
        yield "error", _Complaint("N10", strange, 0, _of_strays(image, column, book))
        return
    if book.is_signal(image.table, column) and (what := _of_written(image, column)):
        yield "error", _Complaint("N5", what)
        return
    for complaint in (
        *_of_pending(image, cell, book),
        *_of_proofs(image, column, book),
        *_of_locks(image, cell, book),
        *_of_records(image, cell, book),
        *_of_shared(image, cell, book),
        *_of_traces(image, column, book),
        *_of_markers(image, column, book),
        *_of_notify(image, column, book),
        *_of_failed(image, cell, book),
    ):
        yield "error", complaint
    for complaint in (*_of_data(image, cell), *_of_spurious(image, cell, book)):
        yield "warning", complaint


def _of_strays(image: Image, column: int, book: Book) -> Repair | None:
    """The repair of a column that has only notify cells, for an observer that does not observe the column.

    There is no repair if the catalogue does not have the observer: the catalogue never loses an observer, so it may be
    older than these cells, for example restored from an earlier copy.
    """
    notified = image.notify.get(column)
    others = {*image.locks, *image.records, *image.markers, *image.broken, *image.pending}
    others = others.union(image.shared, image.traces, image.failed, *image.data.values())
    if not notified or column in others or observer_of(column) not in book.observers:
        return None
    return repairs.drop_stray_notifications(image.table, image.row, column, [ts for ts, _ in notified])


# ------------------------------------------------------------------ locks


def _of_locks(image: Image, cell: Cellref, book: Book) -> Iterator[_Complaint]:
    locks = image.locks.get(cell.column, ())
    if len(locks) > 1:
        yield _Complaint("T7", f"locked more than once, by transactions {_list(ts for ts, _ in locks)}")
    for start_ts, lock in locks:
        found = _of_lock(image, cell, start_ts, lock, book)
        if found is not None:
            invariant, what, repair = found
            yield _Complaint(invariant, what, start_ts, repair)


def _of_lock(
    image: Image, cell: Cellref, start_ts: int, lock: Lock | None, book: Book
) -> tuple[str, str, Repair | None] | None:
    column = cell.column
    who = f"the lock of transaction {start_ts}"
    marked = start_ts in image.markers.get(column, ())
    past = [record for record in image.records.get(column, ()) if record.ts >= start_ts]
    own = next((record.ts for record in past if record.start_ts == start_ts), 0)
    if lock is None:
        proof = (WRITE, own) if own else (ROLLBACK, start_ts)
        repair = repairs.drop_lock(cell, start_ts, beside=proof[0], at=proof[1]) if own or marked else None
        return "N1", f"{who} does not decode", repair
    if start_ts > book.bound:
        return "O1", f"{who} is above the oracle's bound", None
    if marked:
        repair = None if own else repairs.roll_back_beside_marker(cell, start_ts, lock)
        return "T5", f"{who} stands beside its rollback marker", repair
    if own:
        repair = repairs.drop_lock(cell, start_ts, beside=WRITE, at=own)
        return "T8", f"transaction {start_ts} committed at {own} and its lock is still there", repair
    if past:
        return "T7", f"the record at {past[0].ts} was written despite {who}", None
    is_ack = bool(observer_of(column))
    if (lock.kind == ACK) != is_ack or lock.kind == READ:
        return "N3", f"{who} is of kind {lock.kind}, not one for this column", None
    if is_ack and (lock.primary.table, lock.primary.column) != (cell.table, column):  # N20: another row's, perhaps
        return "N2", f"the ack's lock of transaction {start_ts} has a primary that is no ack of its observer", None
    if any(ts > start_ts for ts in lock.covers):
        what = f"the ack's lock of transaction {start_ts} covers notify cells that its run cannot have seen"
        return "N2", what, None
    unknown = [number for number in lock.observers if book.strange(image.table, ack_of(column, number))]
    if unknown:
        return "N10", f"{who} notifies unknown observers #{_list(unknown)}", None
    if lock.kind == PUT_DATA and (what := _of_group(image, column, start_ts, lock.body.decode(), who, book)):
        return "T2", what, None
    return None


def _of_group(image: Image, column: int, start_ts: int, group: str, who: str, book: Book) -> str:
    expected = book.entry(image.table, column).group
    if group != expected:
        return f"{who} names group {group!r}, and the column lies in {expected!r}"
    if group in image.data and start_ts not in image.data[group].get(column, ()):
        return f"{who} points at missing data, at {start_ts} in group {group!r}"
    return ""


def _of_shared(image: Image, cell: Cellref, book: Book) -> Iterator[_Complaint]:
    for start_ts, lock in image.shared.get(cell.column, ()):
        found = _of_one_shared(image, cell, start_ts, lock, book)
        if found is not None:
            invariant, what, repair = found
            yield _Complaint(invariant, what, start_ts, repair)


def _of_one_shared(
    image: Image, cell: Cellref, start_ts: int, lock: Lock | None, book: Book
) -> tuple[str, str, Repair | None] | None:
    column = cell.column
    who = f"the shared lock of transaction {start_ts}"
    own = next((ts for ts, begun in image.traces.get(column, ()) if begun == start_ts), 0)
    repair = repairs.drop_lock(cell, start_ts, beside=TRACE, at=own, group=SHARED) if own else None
    if lock is None:
        return "N1", f"{who} does not decode", repair
    if lock.kind != READ:
        return "T14", f"{who} is of kind {lock.kind}, and not for reading", None
    if start_ts > book.bound:
        return "O1", f"{who} is above the oracle's bound", None
    if own:
        return "T8", f"transaction {start_ts} committed at {own} and its shared lock is still there", repair
    if image.locks.get(column):
        return "T14", f"{who} stands beside the lock of transaction {image.locks[column][0][0]}", None
    past = image.records.get(column)
    if past and past[0].ts >= start_ts:
        return "T14", f"the record at {past[0].ts} was written despite {who}", None
    return None


def _of_traces(image: Image, column: int, book: Book) -> Iterator[_Complaint]:
    """A cell read under a lock must not be written between the reader's start and its commit."""
    oldest_first = image.records.get(column, [])[::-1]
    commits = [record.ts for record in oldest_first]
    for ts, start_ts in image.traces.get(column, ()):
        if not start_ts:
            yield _Complaint("T14", f"the trace at {ts} does not decode")
            continue
        at = bisect_left(commits, start_ts)  # the first record that is not older than the reader's start
        if start_ts >= ts:
            yield _Complaint(
                "T2", f"the trace at {ts} points at transaction {start_ts}, which began no earlier", start_ts
            )
        elif ts > book.bound:
            yield _Complaint("O1", f"the trace at {ts} is above the oracle's bound", start_ts)
        elif at < len(commits) and oldest_first[at].start_ts <= ts and oldest_first[at].start_ts != start_ts:
            what = f"the read of transaction {start_ts}, committed at {ts}, overlaps the write that committed at"
            yield _Complaint("T14", f"{what} {commits[at]}", start_ts)


# ------------------------------------------------------------------ signals (N5)


def _of_written(image: Image, column: int) -> str:
    """A kind of cell that is in the column of a signal, or of its observer, and must not be; "": there is none. In the
    observer's column, runs leave records."""
    for what, there in (
        ("a write record", () if observer_of(column) else {*image.records, *image.broken}),
        ("a lock", image.locks),
        ("a shared lock", image.shared),
        ("a trace", image.traces),
        ("data", {at for columns in image.data.values() for at in columns}),
    ):
        if column in there:
            return f"{what} in the column of a signal, which cannot be written"
    return ""


def _of_pending(image: Image, cell: Cellref, book: Book) -> Iterator[_Complaint]:
    column = cell.column
    for start_ts, lock in image.pending.get(column, ()):
        who = f"the pending entry of transaction {start_ts}"
        if start_ts > book.bound:
            yield _Complaint("O1", f"{who} is above the oracle's bound", start_ts)
        elif not book.is_signal(cell.table, column):
            yield _Complaint("N5", f"{who} is in a column that is not a signal", start_ts)
        elif lock is None:
            repair = None
            if not is_bare(column):
                observers = () if observer_of(column) else book.observers_of(cell.table, column)
                repair = repairs.settle_pending(cell, start_ts, observers)
            yield _Complaint("N5", f"{who} does not decode", start_ts, repair)
        elif what := _of_one_pending(image, cell, start_ts, lock, book):
            yield _Complaint("N5", f"{who} {what}", start_ts)


def _of_one_pending(image: Image, cell: Cellref, start_ts: int, lock: Lock, book: Book) -> str:
    column = cell.column
    if is_bare(column):
        own = next((ts for begun, ts in image.proofs.get(column, ()) if begun == start_ts), 0)
        if own:
            return f"stands beside its trace: it committed at {own}"
        if start_ts in image.markers.get(column, ()):
            return "stands beside its rollback marker"
        return "" if lock.kind == BARE and lock.primary == cell else "is not its transaction's primary"
    if lock.kind != SIGNAL:
        return f"is of kind {lock.kind}, not a signal's"
    if observer_of(column):
        seen = lock.covers and not lock.observers and all(ts <= start_ts for ts in lock.covers)
        return "" if seen else "removes what its run cannot have seen"
    told = [number for number in lock.observers if number not in book.observers_of(cell.table, column)]
    if lock.covers or not lock.observers or told:
        return f"notifies unknown observers #{_list(told)}" if told else "notifies no observer"
    return ""


def _of_proofs(image: Image, column: int, book: Book) -> Iterator[_Complaint]:
    """Faults of the traces that bare primaries leave."""
    for start_ts, ts in image.proofs.get(column, ()):
        if not ts:
            yield _Complaint("T1", f"the trace of transaction {start_ts} does not decode", start_ts)
        elif ts <= start_ts:
            yield _Complaint("T2", f"transaction {start_ts} committed at {ts}, and began no earlier", start_ts)
        elif ts > book.bound:
            yield _Complaint(
                "O1", f"the commit at {ts} of transaction {start_ts} is above the oracle's bound", start_ts
            )


# ------------------------------------------------------------------ records, markers, data


def _of_records(image: Image, cell: Cellref, book: Book) -> Iterator[_Complaint]:
    column = cell.column
    if column in image.broken:
        yield _Complaint("T1", f"the record at {image.broken[column]} does not decode")
    records = image.records.get(column, [])
    for at, record in enumerate(records):
        older = records[at + 1] if at + 1 < len(records) else None
        found = _of_record(image, cell, record, older, book)
        if found is not None:
            invariant, what, repair = found
            yield _Complaint(invariant, what, record.start_ts, repair)


def _of_record(
    image: Image, cell: Cellref, record: Rec, older: Rec | None, book: Book
) -> tuple[str, str, Repair | None] | None:
    ts, kind, start_ts, group, version = record
    column = cell.column
    is_ack = bool(observer_of(column))
    if (kind == ACK) != is_ack:
        return "N3", f"the record at {ts} is of kind {kind}, not one for this column", None
    if is_ack and (start_ts > book.bound or start_ts >= ts):
        return "N3", f"the ack at {ts} points at {start_ts}, in the future", None
    number = observer_of(column)
    if is_ack and number in book.observers and version > book.observers[number][1].version:
        return "N10", f"the ack at {ts} is of version {version}, which the catalogue does not have", None
    if start_ts >= ts:
        return "T2", f"the record at {ts} points at transaction {start_ts}, which began no earlier", None
    if ts > book.bound:
        return "O1", f"the record at {ts} is above the oracle's bound", None
    if start_ts in image.markers.get(column, ()):
        repair = repairs.drop_marker(cell, start_ts, ts)
        return "T5", f"transaction {start_ts} committed at {ts} and was rolled back", repair
    runs_beside = is_ack and book.is_signal(image.table, column)  # N5: runs for a signal do not exclude each other
    if older is not None and older.ts >= start_ts and older.start_ts != start_ts and not runs_beside:
        return "T7", f"transaction {start_ts}, committed at {ts}, overlaps the one that committed at {older.ts}", None
    if kind == PUT_DATA and (what := _of_group(image, column, start_ts, group, f"the record at {ts}", book)):
        return "T2", what, None
    return None


def _of_markers(image: Image, column: int, book: Book) -> Iterator[_Complaint]:
    for ts in sorted(image.markers.get(column, ())):
        if ts in (proof[0] for proof in image.proofs.get(column, ())):
            yield _Complaint("T5", f"transaction {ts} committed here and was rolled back", ts)
        elif ts > book.bound:
            yield _Complaint("O1", f"the rollback marker at {ts} is above the oracle's bound", ts)


def _of_data(image: Image, cell: Cellref) -> Iterator[_Complaint]:
    """Long values that nothing points at."""
    column = cell.column
    locks = image.locks.get(column, ())
    if column in image.broken or any(lock is None for _, lock in locks):
        return  # an unreadable record or lock may point at the data
    records = image.records.get(column, ())
    wanted = {(record.group, record.start_ts) for record in records if record.kind == PUT_DATA}
    wanted |= {(lock.body.decode(), ts) for ts, lock in locks if lock is not None and lock.kind == PUT_DATA}
    for group, columns in sorted(image.data.items()):
        for ts in sorted(columns.get(column, ())):
            if (group, ts) not in wanted:
                superseded = any(record.ts >= ts for record in records)
                repair = repairs.drop_data(cell, group, ts, superseded=superseded)
                yield _Complaint(
                    "T5", f"data of transaction {ts} in group {group!r}, without a lock or record", ts, repair
                )


# ------------------------------------------------------------------ notify cells


def _of_notify(image: Image, column: int, book: Book) -> Iterator[_Complaint]:
    cells = image.notify.get(column, ())
    if cells and not observer_of(column):
        timestamps = [ts for ts, _ in cells]
        repair = repairs.drop_stray_notifications(image.table, image.row, column, timestamps)
        yield _Complaint("N10", f"the notify cell at {cells[0][0]} is for no observer", 0, repair)
        return
    for ts, value in cells:
        if ts > book.bound:
            yield _Complaint("O1", f"the notify cell at {ts} is above the oracle's bound")
        elif not 0 < _root(value) <= ts:
            repair = repairs.give_cause(image.table, image.row, column, ts)
            yield _Complaint("N9", f"the notify cell at {ts} does not say what caused it", 0, repair)


def _of_spurious(image: Image, cell: Cellref, book: Book) -> Iterator[_Complaint]:
    """Notify cells whose change is not there. An older version may have been collected, but the newest never is."""
    ack = cell.column
    observed = observed_column(ack)
    records = image.records.get(observed)
    newest = records[0].ts if records else 0
    if not observer_of(ack) or observed in image.broken or ack in image.broken:
        return
    if book.is_signal(image.table, ack):
        return  # N5: the store does not record whether the signal was raised
    locked = [start_ts for start_ts, _ in image.locks.get(observed, ())]  # their transactions may yet commit the change
    entry = book.observers[observer_of(ack)][1] if observer_of(ack) in book.observers else None
    unseen = newest > _pointer(image, ack, entry)
    for ts, value in image.notify.get(ack, ()):
        if entry is not None and ts == entry.at:
            continue  # N10: a backfill put it at that timestamp, for data that may have been collected since
        if newest < ts <= book.bound and 0 < _root(value) <= ts and not any(start_ts < ts for start_ts in locked):
            what = f"the notify cell at {ts} is for a change that is not there"
            observed_cell = cell._replace(column=observed)
            repair = repairs.drop_notification(observed_cell, ack, ts, newest if unseen else 0)
            yield _Complaint("N1", what, 0, repair)


def _pointer(image: Image, ack: int, entry: ObserverEntry | None) -> int:
    """The timestamp up to which the observer has seen the cell (N3). An acknowledgement by a lower version does not
    count if the current version is notified of all data again."""
    acks = image.records.get(ack)
    if not acks or (entry is not None and entry.at and acks[0].version < entry.version):
        return 0
    return acks[0].start_ts


def _of_failed(image: Image, cell: Cellref, book: Book) -> Iterator[_Complaint]:
    """Failed changes: at most one per row and observer. Such a change exists, and neither waits nor has been
    acknowledged."""
    ack = cell.column
    found = image.failed.get(ack, [])
    if found and not observer_of(ack):
        yield _Complaint("N10", f"the failed change at {found[0][0]} is for no observer")
        return
    observed = observed_column(ack)
    records, acks = image.records.get(observed, []), image.records.get(ack, [])
    newest = records[0].ts if records else 0
    pointer = _pointer(image, ack, book.observers.get(observer_of(ack), ("", None))[1])
    unsettled = any(start_ts < ts for start_ts, _ in image.locks.get(observed, ()) for ts, _ in found)
    unclear = observed in image.broken or ack in image.broken or unsettled or book.is_signal(image.table, ack)
    for at, (ts, value) in enumerate(found):
        waits = ts in [other for other, _ in image.notify.get(ack, [])]
        who = f"the failed change at {ts}"
        if ts > book.bound:
            yield _Complaint("O1", f"{who} is above the oracle's bound")
        elif at:
            repair = repairs.drop_failed(cell, ts, beside=(FAILED_LIST, found[0][0]))
            yield _Complaint("N6", f"{who} stands beside a newer one", 0, repair)
        elif waits:
            repair = repairs.drop_failed(cell, ts, beside=(NOTIFY, ts))
            yield _Complaint("N6", f"{who} still waits for its observer", 0, repair)
        elif not _is_failed(value):
            repair = repairs.put_back(cell, ts)
            yield _Complaint("N6", f"{who} does not decode", 0, repair)
        elif not unclear and acks and newest <= pointer:
            repair = repairs.drop_failed(cell, ts, beside=(WRITE, acks[0].ts))
            yield _Complaint("N6", f"{who} has been acknowledged", 0, repair)
        elif not unclear and not records:
            repair = repairs.drop_failed(cell, ts, beside=None)
            yield _Complaint("N6", f"{who} is of a change that is not there", 0, repair)


def _is_failed(value: bytes) -> bool:
    try:
        return unpack_failed(value).root > 0
    except Corruption:
        return False


def _root(value: bytes) -> int:
    try:
        return unpack_cause(value)[0]
    except Corruption:
        return -1


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in numbers)


class Unnotified(NamedTuple):
    """A change that observer `number` seems to have missed; `sure`: it has, no matter when it was registered."""

    number: int
    ts: int
    sure: bool
    finding: Finding


def unnotified(image: Image, book: Book) -> Iterator[Unnotified]:
    """N1: changes of observed columns that are newer than the acknowledgement's pointer, and have no notify cell.

    An observer is not notified of deletes from before its registration. If it was registered without a backfill, it is
    not notified of any changes from before its registration. The store does not record when an observer was registered,
    but the observer's first run came later. For the work of some observers, there may be neither (V12).
    """
    for column, number in book.observed(image.table):
        records = image.records.get(column)
        ack = ack_of(column, number)
        id, entry = book.observers[number]
        if (
            not records
            or book.is_signal(image.table, column)
            or not entry.ready
            or entry.told
            or column in image.broken
            or ack in image.broken
        ):
            continue
        newest = records[0].ts
        if newest <= entry.built[0] or newest == entry.built[1]:
            continue  # N10: the job that built the view has seen it
        acks = image.records.get(ack)
        pointer = _pointer(image, ack, entry)
        running = any(start_ts >= newest for start_ts, _ in image.locks.get(ack, ()))
        told = image.notify.get(ack) or any(ts >= newest for ts, _ in image.failed.get(ack, ()))
        if newest > pointer and not running and not told and newest <= book.bound:
            what = f"lost notification: observer {id!r} has not seen the change at {newest} and has no notification"
            cell = Cellref(image.table, image.row, column)
            repair = repairs.notify(cell, ack, newest, acks[0].ts if acks else 0)
            finding = Finding("error", "N1", book.where(*cell), what, cell, records[0].start_ts, repair)
            told_of_old = entry.whole and records[0].kind != DELETE
            yield Unnotified(number, newest, pointer > 0 or told_of_old, finding)
