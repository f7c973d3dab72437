"""Compares the records, locks and markers of a transaction across its cells (T1, T3).

They are remembered while the rows are read; if there are too many transactions, only for a sample of them. If a lock
names a primary, the primary is read.
"""

from __future__ import annotations

from collections.abc import Iterable

from perco.check.examine import Finding
from perco.check.image import Book, Rec
from perco.check.repairs import TWICE
from perco.errors import Corruption
from perco.protocol.records import Cellref, Lock
from perco.protocol.recovery import Aborted, Committed, Judgement, Locked, Nothing, judge, primary_queries
from perco.storage import ROLLBACK, Query, RowStore


class Sample(dict[int, tuple[int, Cellref]]):
    """Facts to remember about transactions: about all of them or, beyond a limit, about those whose timestamp is a
    multiple of `every`."""

    every: int

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.every, self._limit = 1, limit

    def note(self, number: int, other: int, cell: Cellref) -> int:
        """Remember `other` for a number, unless the number has an entry already. Returns the entry that then counts."""
        if number % self.every:
            return other
        found = self.setdefault(number, (other, cell))
        if len(self) > self._limit:
            self.every *= 2
            for key in [key for key in self if key % self.every]:
                del self[key]
        return found[0]


class Across:
    """The findings of one check about transactions so far. `tables`: the tables that exist."""

    def __init__(self, store: RowStore, tables: Iterable[str], tracked_max: int) -> None:
        self._store, self._tables, self._tracked_max = store, frozenset(tables), tracked_max
        self._primaries: dict[
            int, tuple[Cellref, str, Cellref]
        ] = {}  # start_ts -> its primary, and a lock that names it
        self._rolled_back = Sample(tracked_max)
        self._starts = Sample(tracked_max)
        self._commits = Sample(tracked_max)
        self._fates: dict[tuple[int, Cellref], Judgement | None] = {}

    @property
    def sampled(self) -> int:
        return max(self._starts.every, self._commits.every, self._rolled_back.every)

    def locked(self, group: str, cell: Cellref, start_ts: int, lock: Lock) -> None:
        """Note the primary that a lock, shared or not, names; called before any record is examined."""
        if len(self._primaries) < self._tracked_max:
            self._primaries.setdefault(start_ts, (lock.primary, group, cell))

    def marked(self, cell: Cellref, start_ts: int) -> None:
        """Note the transaction that a marker rolls back; called before any record is examined."""
        self._rolled_back.note(start_ts, 0, cell)

    def forget_fates(self) -> None:
        """Forget the outcomes that were read from primaries: rows that are read from now on are newer."""
        self._fates.clear()

    async def judge(self, start_ts: int, primary: Cellref) -> Judgement | None:
        """The outcome of a transaction, as read from its primary; None: the primary cannot be read."""
        key = (start_ts, primary)
        if key not in self._fates:
            self._fates[key] = await self._ask(start_ts, primary)
        return self._fates[key]

    async def _ask(self, start_ts: int, primary: Cellref) -> Judgement | None:
        if primary.table not in self._tables:
            return None
        try:
            [cells] = await self._store.read([(primary.table, primary.row, primary_queries(primary, start_ts))])
            return judge(primary, start_ts, cells)
        except Corruption:  # reported where the damage is
            return None

    async def stands(self, group: str, cell: Cellref, ts: int) -> bool:
        query: Query = (group, cell.column, ts, ts, 1)
        try:
            [[cells]] = await self._store.read([(cell.table, cell.row, [query])])
        except Corruption:  # unknown; the check of its tablet reports the damage
            return False
        return bool(cells)

    async def of_lock(self, book: Book, cell: Cellref, start_ts: int, lock: Lock) -> list[Finding]:
        """Compare a lock with the primary that it names (T12)."""
        primary = lock.primary
        who = f"the lock of transaction {start_ts} names"
        if primary.table not in book.catalogue.tables:
            what = f"{who} a primary in table {primary.table!r}, which is not there"
            return _error(book, "N1", cell, what, start_ts)
        fate = await self.judge(start_ts, primary)
        if isinstance(fate, Locked) and fate.lock.primary != primary:
            what = f"{who} {book.where(*primary)} as primary, but the lock there names another"
            return _error(book, "T12", cell, what, start_ts)
        return []

    async def of_record(self, book: Book, cell: Cellref, record: Rec) -> list[Finding]:
        """Compare a record with everything else that is known about its transaction (T1, T3)."""
        ts, start_ts = record.ts, record.start_ts
        known = self._starts.note(start_ts, ts, cell)
        if known != ts:
            what = f"transaction {start_ts} committed at {known} and at {ts}"
            return _error(book, "T1", cell, what, start_ts, TWICE)
        other = self._commits.note(ts, start_ts, cell)
        if other != start_ts:
            what = f"transactions {other} and {start_ts} both committed at {ts}"
            return _error(book, "O1", cell, what, start_ts)
        if start_ts in self._primaries and (what := await self._against_primary(book, cell, record)):
            return _error(book, "T3", cell, what, start_ts)
        if start_ts in self._rolled_back:
            marked = self._rolled_back[start_ts][1]
            if marked != cell and await self.stands(ROLLBACK, marked, start_ts):
                what = f"transaction {start_ts} committed at {ts}, and was rolled back: {book.where(*marked)}"
                return _error(book, "T3", cell, what, start_ts)
        return []

    async def _against_primary(self, book: Book, cell: Cellref, record: Rec) -> str:
        """Why a record contradicts its transaction's primary; "": it does not."""
        start_ts, ts = record.start_ts, record.ts
        primary, group, said_by = self._primaries[start_ts]
        if primary == cell:
            return ""
        if not await self.stands(group, said_by, start_ts):
            del self._primaries[start_ts]  # settled meanwhile; the primary's record may have been collected since
            return ""
        fate = await self.judge(start_ts, primary)
        name = book.where(*primary)
        match fate:
            case Locked():
                return f"transaction {start_ts} committed here at {ts}, and its primary {name} is still locked"
            case Aborted():
                return f"transaction {start_ts} committed here at {ts}, and its primary {name} was rolled back"
            case Nothing():
                return f"transaction {start_ts} committed here at {ts}, and its primary {name} has no record"
            case Committed(commit_ts) if commit_ts != ts:
                return f"transaction {start_ts} committed here at {ts}, and its primary {name} at {commit_ts}"
            case _:
                return ""


def _error(book: Book, invariant: str, cell: Cellref, what: str, start_ts: int, advice: str = "") -> list[Finding]:
    return [Finding("error", invariant, book.where(*cell), what, cell, start_ts, None, advice)]
