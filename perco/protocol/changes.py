"""Merges the logs of several tablets into transactions, in the order of their commit timestamps. Values; no I/O.

    Merge.hungry() -> sources to fill    Merge.take() -> a transaction | None: fill the sources first, or it is `over`

E3  A transaction is taken as a whole, once no source can have another entry of it; and transactions are taken in the
    order of their commit timestamps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from perco.errors import Corruption
from perco.protocol.records import ACK, DELETE, PUT, PUT_DATA, RECORD_HEAD, data_group, unpack_record
from perco.storage import ScanRow
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
        ended: True if the log has no further entries up to the frontier.
    """

    table: int
    low: bytes
    high: bytes | None
    position: bytes
    ended: bool

    def __init__(self, table: int, low: bytes, high: bytes | None, position: bytes = b"") -> None:
        self.table, self.low, self.high, self.position = table, low, high, position
        self.ended = False
        self.entries: deque[Entry] = deque()

    def divide(self, row: bytes) -> Source:
        """Leave the rows from `row` on to another source, which is returned: they lie in another tablet (P4)."""
        other = Source(self.table, row, self.high, self.position)
        self.high = row
        return other

    def fill(self, rows: Sequence[ScanRow], *, full: bool) -> None:
        """Add a page of the log. `full`: there may be more entries."""
        low, high = self.low, self.high
        for row, [cells] in rows:
            column, ts, record = cells[0]
            if row >= low and (high is None or row < high):
                self.entries.append(Entry(ts, row, column, record, cells[1][2] if len(cells) > 1 else b""))
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
        self._open: Taken | None = None

    def hungry(self) -> list[Source]:
        """The sources to fill before the next transaction can be taken."""
        return [source for source in self.sources if not source.entries and not source.ended]

    @property
    def over(self) -> bool:
        """Whether everything has been taken."""
        return self._open is None and all(source.ended and not source.entries for source in self.sources)

    def take(self) -> Taken | None:
        """The next transaction; None if a source must be filled first, or if it is over."""
        while True:
            lowest = 0
            for source in self.sources:
                if source.entries:
                    ts = source.entries[0].commit_ts
                    if not lowest or ts < lowest:
                        lowest = ts
                elif not source.ended:
                    return None
            found = self._open
            if found is not None and found.commit_ts != lowest:  # E3: no source has another entry of it
                self._open = None
                self._last = found.commit_ts
                if len(found.entries) > 1:
                    found.entries.sort()
                return found
            if not lowest:
                return None
            assert self._last < lowest <= self.frontier, "E3: in the order of time, and no further than the frontier"
            if found is None:
                found = self._open = Taken(lowest, [])
            for source in self.sources:
                entries = source.entries
                while entries and entries[0].commit_ts == lowest:
                    found.entries.append((source.table, entries.popleft()))


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
