"""The cells whose one-step commit is in progress, kept in memory: readers check here before they read.

A one-step commit leaves no lock that a reader could encounter: its records become visible when its write transaction
ends, some time after its commit_ts was drawn. Until then its cells are entered here.

C2  Enter: in the step that draws commit_ts, with no await in between.
C3  Leave: when the write transaction has ended, even if the caller is gone. If a commit got no answer, its entries
    stay until it has been settled (`left`).
C4  Read: a reader at S checks here first, waits for any entry with commit_ts <= S, and then opens its view. A commit
    never waits for readers.

A cell has at most one entry: a second transaction waits for the first, and holds no locks meanwhile (T7).

Why this is correct: a reader with S >= commit_ts drew S after the entry was made, and checks here before it reads; an
entry leaves only once its records are visible. So the reader finds the entry or the records.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from perco.protocol.commit import Commit
from perco.protocol.records import Cellref

Where = tuple[str, bytes, int]  # (table, row, column)


class Entry(NamedTuple):
    """A transaction whose one-step commit is under way."""

    commit_ts: int
    start_ts: int
    primary: Cellref


class Entered:
    """Loop thread only. `cells`: entries by cell; `left`: the commits whose answer was lost, with their cells, by
    start_ts."""

    __slots__ = ("cells", "left")

    def __init__(self) -> None:
        self.cells: dict[Where, Entry] = {}
        self.left: dict[int, tuple[Entry, list[Where]]] = {}

    def in_the_way(self, commit: Commit) -> tuple[Where, Entry] | None:
        """Another transaction's entry for a cell that this commit would enter, with the cell; None: there is none."""
        cells = self.cells
        if cells:
            for where in commit.cells:
                entry = cells.get(where)
                if entry is not None:
                    return where, entry
        return None

    def enter(self, commit: Commit) -> None:
        """C2: enter the cells of a commit whose commit_ts has just been drawn."""
        header = commit.header
        entry = Entry(commit.commit_ts, header.start_ts, header.primary)
        cells = self.cells
        for where in commit.cells:
            cells[where] = entry

    def leave(self, commit: Commit) -> None:
        """C3: remove a commit's entries: its write transaction has ended, or was never begun."""
        cells = self.cells
        for where in commit.cells:
            entry = cells.pop(where)
            assert entry.commit_ts == commit.commit_ts, "C3: an entry is its own transaction's"

    def stands(self, entry: Entry) -> bool:
        """Whether an entry is still here."""
        table, row, column = entry.primary
        cells = self.cells
        return cells.get((table, row, column)) is entry or cells.get((table, row, -entry.start_ts)) is entry

    def leave_behind(self, commit: Commit) -> None:
        """Keep the entries until `settled`: it is not known whether the write transaction has ended."""
        where = commit.cells
        self.left[commit.header.start_ts] = self.cells[where[0]], where

    def settled(self, start_ts: int) -> bool:
        """Remove the entries that a transaction left behind: its outcome is known. Returns whether there were any."""
        if start_ts not in self.left:
            return False
        for where in self.left.pop(start_ts)[1]:
            del self.cells[where]
        return True

    def among(self, cells: Iterable[Where], ts: int) -> list[Entry]:
        """C4: entries for any of these cells with commit_ts <= ts."""
        mine = self.cells
        found: dict[Entry, None] = {}
        for where in cells:
            entry = mine.get(where)
            if entry is not None and entry.commit_ts <= ts:
                found[entry] = None
        return list(found)

    def within(self, table: str, low: bytes, high: bytes | None, columns: Container[int], ts: int) -> list[Entry]:
        """C4: entries for these columns in rows [low, high) with commit_ts <= ts."""
        if not self.cells:
            return []
        found = (
            entry
            for (in_table, row, column), entry in self.cells.items()
            if entry.commit_ts <= ts
            and in_table == table
            and low <= row
            and (high is None or row < high)
            and column in columns
        )
        return list(dict.fromkeys(found))

    def up_to(self, ts: int) -> list[Entry]:
        """Entries anywhere with commit_ts <= ts."""
        return list(dict.fromkeys(entry for entry in self.cells.values() if entry.commit_ts <= ts))
