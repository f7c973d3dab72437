"""Decides which versions of a row no reader needs. Values; no I/O.

    waste_of(cells of a row, cut, watermark, ...) -> Waste -> Mutation

The whole store has one *watermark* (G1): no open transaction began below it. A table's *cut* is the oldest timestamp at
which the table can still be read. It is at most the watermark, and lower for a table that keeps more history. Versions
at or below the cut never change, except that they are removed here (T13 refuses late writes). So they are removed
without checks. It does no harm to remove them twice, because mutations name exact timestamps, which are never used
again.

G3  Of each cell, the newest version at or below the cut stays. If this version is a delete marker, one mutation of the
    row removes it together with everything that it hides, and with the column's acknowledgements at or below the cut.
    The mutation checks that the column has no notify cell and no failed change, because an observer with one of these
    must still see the delete. Long values are removed together with their records (T2).
G4  Rollback markers and traces are removed once they are below the watermark. (Committed read locks, T14, and bare
    primaries, N5, leave traces.) Of an acknowledgement, the newest version at or below the cut stays, because an
    observer would otherwise run twice; it is removed together with the cell that it acknowledges. A run for a signal
    acknowledges no cell (N5), so its record is removed once it is below the cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Final, NamedTuple

from perco.errors import UsageError, must_be_number
from perco.protocol.records import DELETE, PUT_DATA, data_group, observed_column, unpack_record
from perco.settings import check_options
from perco.storage import ABSENT, FAILED_LIST, NOTIFY, ROLLBACK, TRACE, TS_MAX, WRITE, Check, Mutation, ScanCell, Write

DAY_S: Final = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """How long old versions are kept.

    Attributes:
        seconds: every snapshot of the last `seconds` can be read.
        versions: of the versions of each cell that are older than `seconds`, how many stay (the newest ones). Snapshots
            need one; only `perco get --versions` shows more. A cell that was deleted before that time keeps none.
    """

    seconds: float = DAY_S
    versions: int = 1

    def __post_init__(self) -> None:
        must_be_number("Keep: seconds", self.seconds)
        check_options(self)
        if not math.isfinite(self.seconds):
            raise UsageError(f"Keep: seconds is {self.seconds}; it must be a number of at least 0")


@dataclass(slots=True)
class Removed:
    """How many cells a vacuum removed.

    Attributes: `versions`: write records, including delete markers; `acks`: acknowledgements; `rollbacks`: rollback
    markers; `traces`: of read locks and of bare primaries; `data`: long values; `notes`: of the clock; `system`: old
    versions of the catalogue and of other system rows; `log`: entries of logs of changes; `dropped`: cells of dropped
    columns and tables (N17).
    """

    versions: int = 0
    acks: int = 0
    rollbacks: int = 0
    traces: int = 0
    data: int = 0
    notes: int = 0
    system: int = 0
    log: int = 0
    dropped: int = 0

    def add(self, other: Removed) -> None:
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    def add_of(self, mutation: Mutation) -> None:
        """Count the cells that an applied mutation of a vacuum has removed, by group."""
        for _, _, writes in mutation.rows:
            for group, column, _, _ in writes:
                if group == WRITE:
                    if column == observed_column(column):
                        self.versions += 1
                    else:
                        self.acks += 1
                elif group == ROLLBACK:
                    self.rollbacks += 1
                elif group == TRACE:
                    self.traces += 1
                else:
                    self.data += 1

    @property
    def cells(self) -> int:
        """The total of all kinds."""
        return sum(getattr(self, part.name) for part in fields(self))


_Unit = tuple[Write, ...]  # removed together: a record and its long value


class Waste(NamedTuple):
    """The cells of one row that can be removed.

    `units`: can be removed at any time, in any order, each unit in one mutation. `ends`: delete markers with the cells
    that they hide and their acknowledgements, to be removed in one mutation and only if `checks` hold; `instead`: to be
    removed if the checks fail. `blocked`: a delete marker must stay because of a notify cell or a failed change.
    """

    table: str
    row: bytes
    units: list[_Unit]
    checks: list[Check]
    ends: list[Write]
    instead: list[_Unit]
    blocked: bool

    def mutations(self, writes_max: int) -> list[Mutation]:
        """The mutations that remove this waste: one with the ends and as many units as fit, then the other units."""
        out, writes = [], list(self.ends)
        checks = self.checks
        for unit in self.units:
            if writes and len(writes) + len(unit) > writes_max:
                out.append(self._mutation(checks, writes))
                writes, checks = [], []
            writes += unit
        if writes:
            out.append(self._mutation(checks, writes))
        return out

    def _mutation(self, checks: list[Check], writes: list[Write]) -> Mutation:
        return Mutation(self.table, ((self.row, checks, writes),), None, True)

    def without_ends(self) -> Waste:
        """The waste to remove if the checks have failed, because a notify cell was put meanwhile.

        The units are left out: other mutations have removed them, or the next vacuum will.
        """
        return Waste(self.table, self.row, self.instead, [], [], [], True)


def is_lean(records: Sequence[ScanCell]) -> bool:
    """A quick test of whether all of a row's records at or below the cut stay: one for each column, no delete marker,
    no acknowledgement of a cell that is gone."""
    main = before = -1
    for column, _, value in records:
        if column == before or not value or value[0] == DELETE:
            return False
        before = column
        if column == observed_column(column):
            main = column
        elif observed_column(column) != main:
            return False
    return True


def waste_of(
    table: str,
    row: bytes,
    records: Sequence[ScanCell],
    markers: Sequence[ScanCell],
    traces: Sequence[ScanCell],
    notified: Collection[int],
    *,
    cut: int,
    watermark: int,
    versions: int,
    acks_of: Callable[[int], Sequence[int]],
    more: bool = False,
) -> Waste:
    """The cells of a row that can be removed.

    Args:
        records: the records of all columns of the row at or below the cut, sorted by column, newest first.
        markers, traces: the row's rollback markers and traces below the watermark.
        notified: the acknowledgement columns that have a notify cell, or a failed change, in the row.
        acks_of: returns the acknowledgement columns of all observers of a column.
        more: `records` is not complete: older cells of its last column, and further columns, may be missing.
    """
    assert cut <= watermark, "G1"
    waste = Waste(table, row, [], [], [], [], False)
    for group, old in ((ROLLBACK, markers), (TRACE, traces)):
        for column, ts, _ in old:
            assert ts < watermark, "G4: a reader that began at the watermark may still need it"
            waste.units.append(((group, column, ts, None),))
    last = observed_column(records[-1][0]) if records and more else -1
    for column, cells in groupby(records, lambda cell: observed_column(cell[0])):
        waste = _of_cell(waste, column, list(cells), notified, cut, versions, acks_of(column), complete=column != last)
    return waste


def _of_cell(
    waste: Waste,
    column: int,
    records: list[ScanCell],
    notified: Collection[int],
    cut: int,
    versions: int,
    acks: Sequence[int],
    *,
    complete: bool,
) -> Waste:
    """Add the waste of a cell and its acknowledgements; `complete`: `records` has all of their versions."""
    own = [_unit(cell) for cell in records if cell[0] == column]
    assert all(cell[1] <= cut for cell in records), "G3: above the cut everything is needed"
    stays = 0
    while stays < min(len(own), versions) and own[stays][0] != DELETE:
        stays += 1
    gone = not stays  # the cell does not exist at the cut
    seen = {cell[0] for cell in records if cell[0] != column}
    waiting = any(ack in notified for ack in (*acks, *seen))
    superseded = [unit for _, unit in own[max(stays, 1) :]]
    newest = -1
    for ack, ts, _ in records:
        if ack != column:
            if ack == newest:  # G4
                superseded.append(((WRITE, ack, ts, None),))
            newest = ack
    if not (gone and complete):
        waste.units.extend(superseded)
    elif waiting:  # G3
        waste.units.extend(superseded)
        return waste._replace(blocked=True)
    else:
        waste.instead.extend(superseded)
        for _, unit in own:
            waste.ends.extend(unit)
        waste.ends.extend((WRITE, ack, ts, None) for ack, ts, _ in records if ack != column)
        for ack in sorted({*acks, *seen}):
            waste.checks.extend(((ABSENT, NOTIFY, ack, 0, TS_MAX), (ABSENT, FAILED_LIST, ack, 0, TS_MAX)))
    return waste


def _unit(cell: ScanCell) -> tuple[int, _Unit]:
    """A record's kind, and the writes that remove the record and its long value."""
    column, ts, value = cell
    kind, start_ts, body = unpack_record(value)
    gone: Write = (WRITE, column, ts, None)
    if kind == PUT_DATA:
        return kind, (gone, (data_group(body), column, start_ts, None))
    return kind, (gone,)
