"""The difference between two snapshots of a table, row by row, in the order of the keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from perco.history.changes import RowChange
from perco.schema.schema import Table
from perco.txn.row import Row
from perco.txn.scan import Scan
from perco.txn.snapshot import Snapshot


async def differences(before: Snapshot, after: Snapshot, table: Table[Any]) -> AsyncIterator[RowChange]:
    """The rows that differ, each with the columns that differ. Both snapshots are read once, page by page; no log is
    needed. A value that was changed and changed back is no difference.

    Raises: SnapshotTooOld.
    """
    older, newer = before.scan(table), after.scan(table)
    left, right = await _next(older), await _next(newer)
    while left is not None or right is not None:
        rows = [(table.row(row.key), row.key) for row in (left, right) if row is not None]
        here, key = min(rows, key=lambda row: row[0])
        old = left if left is not None and table.row(left.key) == here else None
        new = right if right is not None and table.row(right.key) == here else None
        change = _compared(table, key, old, new)
        if change.before:
            yield change
        if old is not None:
            left = await _next(older)
        if new is not None:
            right = await _next(newer)


async def _next(scan: Scan[Any]) -> Row[Any] | None:
    async for row in scan:
        return row
    return None


def _compared(table: Table[Any], key: Any, old: Row[Any] | None, new: Row[Any] | None) -> RowChange:
    change = RowChange(table.title, key, {}, {})
    for name, column in table.columns.items():
        values = [row[column] if row is not None and column in row else None for row in (old, new)]
        stored = [None if value is None else column.codec.encode(value) for value in values]
        if stored[0] != stored[1]:
            change.before[name], change.after[name] = values
    return change
