"""A row store of memory tablets, and what tests do with one without an event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from perco.protocol.mutations import Intent
from perco.protocol.records import PUT_DATA, Cellref, Lock, unpack_lock, unpack_record
from perco.protocol.snapshot import Blocked, InData, Missing, Value, data_query, look, queries_for
from perco.storage import (
    DATA,
    LOCK,
    ROLLBACK,
    SHARED,
    TS_MAX,
    WRITE,
    LocalRowStore,
    MemoryTablet,
    Mutation,
    NoReply,
    Query,
    RowCells,
    ScanQuery,
    ScanRequest,
    Verdict,
)

TABLES = ("north", "south")
SPLITS = (b"h", b"p")  # three tablets for each table


def memory_store(*, groups: bool = True) -> LocalRowStore:
    """Two tables of three tablets each."""
    store = LocalRowStore()
    store.groups = groups  # type: ignore[misc]
    for table in TABLES:
        store.add_table(table, [MemoryTablet(table, start) for start in (b"", *SPLITS)])
    return store


class _Answer:
    """What a memory tablet answers to: it does so at once."""

    verdict: Verdict = NoReply("never answered")

    def answer(self, index: int, verdict: Verdict) -> None:
        self.verdict = verdict


class Rows:
    """A row store of memory tablets, without waiting. `applied` counts what was made."""

    def __init__(self, store: LocalRowStore) -> None:
        self.store = store
        self.applied = 0
        self.primaries: dict[int, Cellref] = {}  # start_ts -> primary, of every transaction that ever locked

    def read(self, table: str, row: bytes, queries: Sequence[Query]) -> RowCells:
        return self.store.tablet(table, row).read(row, queries)

    def apply(self, mutation: Mutation) -> Verdict:
        """Make one mutation; the invariants are checked after it."""
        answer: Any = _Answer()
        self.store.tablet(mutation.table, mutation.rows[0][0]).submit(mutation, answer, 0)
        self.applied += 1
        check(self)
        return answer.verdict  # type: ignore[no-any-return]

    def cells(self, group: str) -> Iterator[tuple[Cellref, int, bytes]]:
        """Every cell of a group: (where, timestamp, value)."""
        for tablet in self.store.tablets():
            page = tablet.scan(
                ScanRequest(
                    tablet.table,
                    tablet.start,
                    None,
                    (ScanQuery(group, None, 0, TS_MAX, 1 << 20),),
                    rows_max=1 << 20,
                    bytes_max=1 << 30,
                    seeks_max=1 << 30,
                )
            )
            assert page.next is None
            for row, [found] in page.rows:
                for column, ts, value in found:
                    yield Cellref(tablet.table, row, column), ts, value

    def locks(self) -> list[tuple[Cellref, int, Lock]]:
        return [(cell, ts, unpack_lock(value)) for cell, ts, value in self.cells(LOCK)]

    def shared(self) -> list[tuple[Cellref, int, Lock]]:
        return [(cell, ts, unpack_lock(value)) for cell, ts, value in self.cells(SHARED)]

    def value(self, cell: Cellref, ts: int = TS_MAX - 1) -> bytes | None:
        """What a snapshot sees; nothing may be in the way."""
        locks, writes = self.read(cell.table, cell.row, queries_for(cell.column, ts))
        seen = look(locks, writes)
        assert not isinstance(seen, Blocked), f"{cell} is locked"
        if isinstance(seen, InData):
            [[(_, value)]] = self.read(cell.table, cell.row, [data_query(seen, cell.column)])
            return value
        return None if isinstance(seen, Missing) else seen.value if isinstance(seen, Value) else None

    def parts(self, intents: Sequence[Intent]) -> list[list[Intent]]:
        """By tablet where the store has groups, else by row; in the order of the first cell of each."""
        store, parts = self.store, {}  # type: ignore[var-annotated]
        for intent in intents:
            at = store.locate(intent.table, intent.row) if store.groups else (intent.table, intent.row)
            parts.setdefault(at, []).append(intent)
        return list(parts.values())


def check(rows: Rows) -> None:
    """The conditions that hold between any two steps of any client."""
    records: dict[int, set[int]] = {}  # start_ts -> commit timestamps
    committed: dict[Cellref, set[int]] = {}
    newest: dict[Cellref, int] = {}
    for cell, ts, value in rows.cells(WRITE):
        record = unpack_record(value)
        assert ts > record.start_ts
        records.setdefault(record.start_ts, set()).add(ts)
        committed.setdefault(cell, set()).add(record.start_ts)
        newest[cell] = max(ts, newest.get(cell, 0))
        if record.kind == PUT_DATA:
            found = rows.read(
                cell.table, cell.row, [(record.body.decode(), cell.column, record.start_ts, record.start_ts, 1)]
            )
            assert found[0], f"{cell}: the record at {ts} points at missing data"
    held: set[Cellref] = set()
    for cell, start_ts, lock in rows.locks():
        assert cell not in held, f"T7: two locks on {cell}"
        held.add(cell)
        rows.primaries.setdefault(start_ts, lock.primary)
        assert lock.primary == rows.primaries[start_ts], f"T12: {start_ts} changed its primary"
        assert newest.get(cell, 0) < start_ts, f"T7: {cell} was written at {newest[cell]} past the lock of {start_ts}"
    for start_ts, at in records.items():
        assert len(at) == 1, f"T1: {start_ts} committed at {sorted(at)}"
        primary = rows.primaries.get(start_ts)
        if primary is not None:
            assert start_ts in committed.get(primary, ()), f"T3: a secondary of {start_ts} went before its primary"
    for cell, start_ts, _ in rows.cells(ROLLBACK):
        assert start_ts not in records, f"T5: {start_ts} has a marker on {cell} and a record"


def leftovers(rows: Rows) -> list[tuple[Cellref, int]]:
    """Long values that no record and no lock points at."""
    wanted = {(cell, unpack_record(value).start_ts) for cell, _, value in rows.cells(WRITE)}
    wanted |= {(cell, start_ts) for cell, start_ts, _ in rows.locks()}
    return [(cell, ts) for cell, ts, _ in rows.cells(DATA) if (cell, ts) not in wanted]
