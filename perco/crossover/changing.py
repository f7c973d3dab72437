"""The changes that are replayed: one source row each, drawn by a seed. No I/O.

An update gives a row the values that the row which was updated before it had. So, apart from the values that are
between two rows, the table always has the values that it began with, each once: groups by a value keep their sizes.
Deletes and inserts take turns in each table. An insert brings back the row that has been gone for the longest. If rows
are held out at the beginning, at least half of `Changes.apart`, there is always such a row.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from perco.crossover.rows import SourceRow, Values
from perco.schema.schema import Column, Table

APART_MAX: Final = 256
_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class SourceChange:
    """A change of one row. `before`, `after`: its values; without any, the row is not there."""

    table: Table[Any]
    key: Any
    before: Values
    after: Values

    @property
    def writes(self) -> list[tuple[Column[Any, Any], Any]]:
        """The columns to write, with their values; None: to delete."""
        gone = [(column, None) for column in self.before if column not in self.after]
        new = [(c, value) for c, value in self.after.items() if c not in self.before or self.before[c] != value]
        return [*gone, *new]


@dataclass(slots=True)
class _Of:
    """The rows of one table. `keys`: of those that are there, in any order; `gone`: those that are not."""

    keys: list[Any] = field(default_factory=list)
    values: dict[bytes, Values] = field(default_factory=dict)
    gone: deque[tuple[Any, Values]] = field(default_factory=deque)
    out: int = 0  # how many rows are gone at rest
    hand: Values | None = None  # what the next update gives


class Changes:
    """Draws changes of a set of rows, and keeps what the rows are after them.

    Args:
        rows: those that are there.
        seed: the same seed, rows and calls give the same changes.
        turnover: the share of changes that are deletes or inserts.
    """

    def __init__(self, rows: Iterable[SourceRow], *, seed: int = 0, turnover: float = 0.2) -> None:
        self._random, self._turnover = random.Random(seed), turnover
        self._recent: deque[tuple[str, bytes]] = deque()
        self._tables: dict[Table[Any], _Of] = {}
        self.add(rows)

    def add(self, rows: Iterable[SourceRow]) -> None:
        """Take up rows that are there from now on."""
        for row in rows:
            of = self._tables.setdefault(row.table, _Of())
            of.keys.append(row.key)
            of.values[row.table.row(row.key)] = row.values

    def __len__(self) -> int:
        return sum(len(of.keys) for of in self._tables.values())

    @property
    def apart(self) -> int:
        """A row is not drawn again in so many changes after its own: these may commit in any order."""
        return min(APART_MAX, len(self) // 8)

    @property
    def rows(self) -> dict[Table[Any], dict[bytes, Values]]:
        """The rows that are there after all changes so far, by their keys in stored form."""
        return {table: of.values for table, of in self._tables.items()}

    def hold_out(self, share: float) -> list[SourceChange]:
        """Delete this share of each table's rows: inserts bring them back, in turn, as others go."""
        found = []
        for table, of in self._tables.items():
            for _ in range(int(share * len(of.keys))):
                change = self._delete(table, of)
                if change is not None:
                    found.append(change)
                    of.out += 1
        return found

    def draw(self, count: int) -> list[SourceChange]:
        """The next changes."""
        return [self._draw() for _ in range(count)]

    def _draw(self) -> SourceChange:
        tables = list(self._tables)
        while True:  # another row, if those that were looked at have changed just now
            [table] = self._random.choices(tables, [len(self._tables[each].keys) for each in tables])
            of = self._tables[table]
            if self._random.random() >= self._turnover:
                change = self._update(table, of) or self._insert(table, of) or self._delete(table, of)
            elif len(of.gone) > of.out:
                change = self._insert(table, of) or self._update(table, of) or self._delete(table, of)
            else:
                change = self._delete(table, of)
            if change is not None:
                return change

    def _pick(self, table: Table[Any], of: _Of) -> int | None:
        """The index of a row that has not changed just now."""
        for _ in range(_TRIES if len(of.keys) > 1 else 0):
            at = self._random.randrange(len(of.keys))
            if (table.name, table.row(of.keys[at])) not in self._recent:
                return at
        return None

    def _note(self, table: Table[Any], key: Any) -> None:
        self._recent.append((table.name, table.row(key)))
        while len(self._recent) > self.apart:
            self._recent.popleft()

    def _update(self, table: Table[Any], of: _Of) -> SourceChange | None:
        if of.hand is None:  # the first one takes a row's values out, for the second
            first = self._delete(table, of)
            if first is not None:
                _, of.hand = of.gone.pop()
            return first
        for _ in range(_TRIES):
            at = self._pick(table, of)
            if at is None:
                return None
            key = of.keys[at]
            before = of.values[table.row(key)]
            if before != of.hand:
                change = SourceChange(table, key, before, of.hand)
                of.values[table.row(key)], of.hand = of.hand, before
                self._note(table, key)
                return change
        return None  # the rows of this table seem to have the same values

    def _delete(self, table: Table[Any], of: _Of) -> SourceChange | None:
        at = self._pick(table, of)
        if at is None:
            return None
        key = of.keys[at]
        of.keys[at] = of.keys[-1]
        of.keys.pop()
        before = of.values.pop(table.row(key))
        of.gone.append((key, before))
        self._note(table, key)
        return SourceChange(table, key, before, {})

    def _insert(self, table: Table[Any], of: _Of) -> SourceChange | None:
        if len(of.gone) <= of.out:
            return None
        key, values = of.gone[0]
        if (table.name, table.row(key)) in self._recent:
            return None
        of.gone.popleft()
        of.keys.append(key)
        of.values[table.row(key)] = values
        self._note(table, key)
        return SourceChange(table, key, {}, values)
