"""The runs of views: read the owner's inputs, call the function, write the difference from what it gave before.

V1  A run writes its rows and its owner's memory in one transaction.
V2  Of two runs for one owner that overlap, one fails and runs again: both write the owner's memory. (If a single
    observer of a column runs for the owner, its acknowledgement does the same: N3.)
V5  A row has one owner: a run that gives a new row reads whether another owner has given it.
V6  A row that is given again unchanged is not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perco.errors import UsageError
from perco.schema.schema import Change, Table
from perco.txn.row import Row
from perco.txn.transaction import Transaction
from perco.views.compiled import Each, Grouped, Joined, Owners, parts_of
from perco.views.folding import kept, told_of
from perco.views.joining import pairs
from perco.views.memory import Given, Memory, Where, given
from perco.views.rows import Group, Put


async def run_each(view: Each | Joined, txn: Transaction, change: Change[Any, Any]) -> None:
    """Run a view for the source row (of a join: the left row) that has changed."""
    key, columns = change.key, view.columns
    row = await txn.row(view.table, key, [*columns, view.memory])
    stored = row[view.memory]
    before = Memory.unpack(stored)
    if view.several and before.version == view.version and before.seen_ts >= change.commit_ts:
        return  # the run for another column of the row has seen this change
    there = any(row[column] is not None for column in columns)
    inputs = Row(key, {column: (row[column], row.commit_ts(column)) for column in columns})
    puts: Iterable[Put[Any]] = ()
    if there:
        puts = view.function(inputs) if isinstance(view, Each) else await pairs(view, txn, inputs)
    after = given(view.id, puts, {**view.outputs, **view.inner})
    await _write(view, txn, view.table.row(key), before, after, change.attempt)
    _remember(view, txn, key, stored, after, txn.start_ts if there and view.several else 0, always=view.several)


async def run_group(view: Grouped, txn: Transaction, change: Change[Any, Any]) -> None:
    """Run a view for a group whose members have changed."""
    group = change.key
    row = await txn.row(view.table, group, [view.memory, view.kept])
    if view.deltas is not None:
        rows = await kept(view, txn, group, row[view.kept])
    else:
        rows = await _all(view, txn, group)
    after = given(view.id, () if rows is None else view.function(group, rows), view.outputs)
    stored = row[view.memory]
    await _write(view, txn, view.table.row(group), Memory.unpack(stored), after, change.attempt)
    _remember(view, txn, group, stored, after, always=True)


async def _all(view: Grouped, txn: Transaction, group: Any) -> Group[Any] | None:
    """The group with all its members; None if it has none."""
    columns = list(view.copied.values())
    prefix = parts_of(view.table.key, group)
    scan = txn.scan(view.members, prefix=prefix, columns=columns, limit=view.members_max + 1)
    rows = []
    async for member in scan:
        _, rest = view.split(member.key)
        cells = {column: (member[copy], member.commit_ts(copy)) for column, copy in view.copied.items()}
        rows.append(Row(view.source_key(group, rest), cells))
    if len(rows) > view.members_max:
        raise UsageError(
            f"view {view.id!r}: group {group!r} has more than {view.members_max} members, and a run reads them all: "
            "keep aggregates of it (keep=), or raise members_max"
        )
    return Group(rows) if rows else None


def _remember(
    view: Owners,
    txn: Transaction,
    key: Any,
    stored: bytes | None,
    after: Mapping[Where, Given],
    seen_ts: int = 0,
    *,
    always: bool,
) -> None:
    """Write the owner's memory (V1), if it has changed or `always` (V2). An owner without any needs none."""
    if after or seen_ts:
        written = {**view.outputs, **view.inner}
        columns = {table.name: tuple(sorted(c.name for c in columns)) for table, columns in written.items()}
        packed = Memory(view.version, seen_ts, columns, {where: each.digest for where, each in after.items()}).pack()
        if always or packed != stored:
            txn.set(view.memory, key, packed)
    elif always or stored is not None:
        txn.delete(view.memory, key)


async def _write(
    view: Owners, txn: Transaction, owner: bytes, before: Memory, after: Mapping[Where, Given], attempt: int
) -> None:
    """Write the difference, and tell the groups whose members it changes."""
    written = {**view.outputs, **view.inner}
    tables = {table.name: table for table in written}
    gone = [where for where in before.rows if where not in after]
    new = [where for where in after if where not in before.rows]
    changed = [where for where, each in after.items() if where in before.rows and before.rows[where] != each.digest]
    if not (gone or new or changed):
        return
    keys = {(name, row): tables[name].key.decode(row) for name, row in gone}
    keys.update({where: after[where].key for where in (*new, *changed)})
    told = told_of(view.told)
    await _must_own(view, txn, owner, [(tables[where[0]], keys[where]) for where in new])
    for table, each in told.items():
        await each.read(txn, [key for (name, _), key in keys.items() if name == table.name])
    for where in gone:
        table, key = tables[where[0]], keys[where]
        for name in before.columns[table.name]:
            txn.delete(table.columns[name], key)
        if table in view.owned:
            txn.delete(view.owned[table], key)
        if table in told:
            told[table].change(key, None)
    for where in (*new, *changed):
        table, key, values, _ = after[where]
        for column in written[table]:
            if column in values:
                txn.set(column, key, values[column])
            elif where in before.rows:
                txn.delete(column, key)
        if where not in before.rows and table in view.owned:
            txn.set(view.owned[table], key, owner)
        if table in told:
            told[table].change(key, values)
    for each in told.values():
        await each.write(txn, attempt)


async def _must_own(view: Owners, txn: Transaction, owner: bytes, new: Iterable[tuple[Table[Any], Any]]) -> None:
    """V5. Raises: UsageError if another owner of the view has given one of these rows."""
    by_table: dict[Table[Any], list[Any]] = {}
    for table, key in new:
        if table in view.owned:
            by_table.setdefault(table, []).append(key)
    for table, keys in by_table.items():
        for key, other in (await txn.get_many(view.owned[table], keys)).items():
            if other is not None and other != owner:
                first, second = view.table.key.decode(other), view.table.key.decode(owner)
                raise UsageError(
                    f"view {view.id!r} gives {table.name}[{key!r}] for {view.table.name}[{first!r}] and for "
                    f"{view.table.name}[{second!r}]: a row has one owner. Make the owner's key a part of the row's, "
                    "or group by that key"
                )
