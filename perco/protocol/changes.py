"""Merges the logs of several tablets into transactions, in the order of their commit timestamps. Values; no I/O.

    Merge.hungry() -> sources to fill    Merge.take() -> a transaction | None: fill the sources first, or it is `over`

E3  A transaction is taken as a whole, once no source can have another entry of it; and transactions are taken in the
    order of their commit timestamps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from perco.errors import Corruption
from perco.protocol.records import ACK, DELETE, PUT, PUT_DATA, RECORD_HEAD, data_group, unpack_record
from perco.storage import TS_MAX, ScanRow
from perco.storage.keys import escape, log_key


class Entry(NamedTuple):
    """A cell that a transaction wrote: its write record, and the cell's newest older one (b"": none)."""

    commit_ts: int
    row: bytes
    column: int
    record: bytes
    before: bytes


class Taken(NamedTuple):
    """A transaction: its entries, each with the number of its table, sorted."""

    commit_ts: int
    entries: list[tuple[int, Entry]]


class Source:
    """The log of one tablet, from `position` on, as far as it has been read; only the rows in [`low`, `high`) count.

    Attributes:
        table: the number of the table.
        entries: those that have not been taken, as the log has them: by time, then by row and column.
        ended: True if the log has no further entries up to the frontier.
    """

    table: int
    low: bytes
    high: bytes | None
    position: bytes
    entries: list[Entry]
    ended: bool

    def __init__(self, table: int, low: bytes, high: bytes | None, position: bytes = b"") -> None:
        self.table, self.low, self.high, self.position = table, low, high, position
        self.ended = False
        self.entries = []

    def divide(self, row: bytes) -> Source:
        """Leave the rows from `row` on to another source, which is returned: they lie in another tablet (P4)."""
        other = Source(self.table, row, self.high, self.position)
        self.high = row
        return other

    def fill(self, rows: Sequence[ScanRow], *, full: bool) -> None:
        """Add a page of the log. `full`: there may be more entries. Raises: Corruption if they are out of order."""
        low, high = self.low, self.high
        times = [cells[0][1] for _, [cells] in rows]
        if times != sorted(times):
            raise Corruption(f"log of {rows[0][0]!r:.100}", "its entries are out of order")
        self.entries += [
            Entry(cells[0][1], row, cells[0][0], cells[0][2], cells[1][2] if len(cells) > 1 else b"")
            for row, [cells] in rows
            if row >= low and (high is None or row < high)
        ]
        if rows:
            row, [cells] = rows[-1]
            position = log_key(escape(row), cells[0][0], cells[0][1])
            if position <= self.position:
                raise Corruption(f"log of {row!r:.100}", "its entries are out of order")
            self.position = position
        self.ended = not full


class Merge:
    """Merges sources into transactions with commit_ts in (`after`, `frontier`]."""

    sources: list[Source]
    frontier: int

    def __init__(self, sources: list[Source], after: int, frontier: int) -> None:
        self.sources, self.frontier = sources, frontier
        self._last = after
        self._whole: deque[Taken] = deque()

    def hungry(self) -> list[Source]:
        """The sources to fill before the next transaction can be taken."""
        if self._whole:
            return []
        open = self._open()
        return [source for source in self.sources if not source.ended and _last_of(source) == open]

    @property
    def over(self) -> bool:
        """Whether everything has been taken."""
        return not self._whole and all(source.ended and not source.entries for source in self.sources)

    def take(self) -> Taken | None:
        """The next transaction; None if a source must be filled first, or if it is over."""
        if not self._whole:
            self._gather()
        return self._whole.popleft() if self._whole else None

    def _open(self) -> int:
        """E3: the earliest timestamp at which a source may have further entries."""
        return min((_last_of(source) for source in self.sources if not source.ended), default=TS_MAX + 1)

    def _gather(self) -> None:
        """Put together the transactions before `_open`."""
        open = self._open()
        found: list[tuple[int, Entry]] = []
        for source in self.sources:
            table, entries = source.table, source.entries
            cut = bisect_left(entries, open, key=_time_of)
            found += [(table, entry) for entry in entries[:cut]]
            del entries[:cut]
        if not found:
            return
        if len(self.sources) > 1:
            found.sort(key=lambda each: each[1].commit_ts)
        last = self._last
        taken: list[tuple[int, Entry]] = []
        assert last < found[0][1].commit_ts, "E3: in the order of time"
        assert found[-1][1].commit_ts <= self.frontier, "E3: no further than the frontier"
        for each in found:
            ts = each[1].commit_ts
            if ts == last:
                taken.append(each)
            else:
                last, taken = ts, [each]
                self._whole.append(Taken(ts, taken))
        self._last = last
        if len(self.sources) > 1:
            for transaction in self._whole:
                transaction.entries.sort()


_time_of: Final = attrgetter("commit_ts")


def _last_of(source: Source) -> int:
    """The timestamp up to which a source has been read; 0: not at all."""
    return source.entries[-1].commit_ts if source.entries else 0


class Long(NamedTuple):
    """A long value, which is in a data group, at start_ts."""

    group: str
    start_ts: int


def value_of(record: bytes) -> bytes | Long | None:
    """What a write record says of its cell: the value, where it is, or None for no value. Raises: Corruption."""
    if not record:
        return None
    if record[0] == PUT and len(record) >= RECORD_HEAD:  # the hot path
        return record[RECORD_HEAD:]
    kind, start_ts, body = unpack_record(record)
    if kind == PUT_DATA:
        return Long(data_group(body), start_ts)
    if kind in (DELETE, ACK):
        return None
    return body
