"""The runs of views: read the owner's inputs, call the function, write the difference from what it gave before.

V1  A run writes its rows and its owner's memory in one transaction.
V2  Of two runs for one owner that overlap, one fails and runs again: both write the owner's memory. (If a single
    observer of a column runs for the owner, its acknowledgement does the same: N3.)
V5  A row has one owner: a run that gives a new row reads whether another owner has given it. If that owner gives it no
    more, the run takes the row over.
V6  A row that is given again unchanged is not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perco.errors import UsageError
from perco.schema.schema import Change, Column, Table
from perco.txn.inside import engine_of
from perco.txn.row import Row
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction
from perco.views.cached import find
from perco.views.compiled import Each, Grouped, Joined, Owners, parts_of
from perco.views.folding import NOTHING_KEPT, Told, fold, keep
from perco.views.joining import pairs
from perco.views.memory import Given, Memory, Where, fill, given, laters
from perco.views.rows import Group, Put


async def run_each(view: Each | Joined, txn: Transaction, change: Change[Any, Any]) -> None:
    """Run a view for the source row (of a join: the left row) that has changed."""
    key = change.key
    row = await txn.row(view.table, key, [*view.columns, view.memory])
    stored = row[view.memory]
    before = Memory.unpack(stored)
    if view.several and before.version == view.version and before.seen_ts >= change.commit_ts:
        return  # the run for another column of the row has seen this change
    after = given(view.id, await puts(view, txn, key, row), view.writes)
    await write(view, txn, view.table.row(key), before, after, change.attempt)
    seen_ts = txn.start_ts if view.several and is_there(view, row) else 0
    remember(view, txn, key, stored, after, seen_ts)


def is_there(view: Owners, row: Row[Any]) -> bool:
    """Whether a source row has any of the columns that the view reads: if not, it gives nothing."""
    return any(row[column] is not None for column in view.columns)


async def puts(view: Each | Joined, txn: Transaction, key: Any, row: Row[Any]) -> Iterable[Put[Any]]:
    """The rows that a source row gives."""
    if not is_there(view, row):
        return ()
    inputs = Row(key, {column: (row[column], row.commit_ts(column)) for column in view.columns})
    return view.function(inputs) if isinstance(view, Each) else await pairs(view, txn, inputs)


async def run_group(view: Grouped, txn: Transaction, change: Change[Any, Any]) -> None:
    """Run a view for a group whose members have changed."""
    group = change.key
    row = await txn.row(view.table, group, [view.memory, view.kept])
    found = await group_now(view, txn, group, row[view.kept])
    after = given(view.id, () if found is None else view.function(group, found), view.writes)
    stored = row[view.memory]
    await write(view, txn, view.table.row(group), Memory.unpack(stored), after, change.attempt)
    remember(view, txn, group, stored, after)


async def group_now(
    view: Grouped, txn: Transaction, group: Any, stored: bytes | None, *, recount: bool = False
) -> Group[Any] | None:
    """The group as its function reads it, brought up to date; None if it has no members.

    Args:
        stored: its `Kept`, packed.
        recount: count the aggregates again.
    """
    if view.deltas is not None:
        return await fold(view, txn, group, stored, recount=recount)
    rows = await members(view, txn, group, view.members_max)
    keep(view, txn, group, stored, NOTHING_KEPT if rows else None)
    return Group(rows) if rows else None


async def has_members(view: Grouped, snap: Snapshot, group: Any) -> bool:
    """Whether a group has any members."""
    copies = view.members
    columns = list(copies.columns.values())
    return bool(await snap.scan(copies.table, prefix=parts_of(copies.key, group), columns=columns, limit=1).all())


async def members(view: Grouped, snap: Snapshot, group: Any, most: int) -> list[Row[Any]]:
    """The members of a group. Raises: UsageError if there are more than `most`."""
    copies = view.members
    scan = snap.scan(
        copies.table, prefix=parts_of(copies.key, group), columns=list(copies.columns.values()), limit=most + 1
    )
    rows = [copies.original(copy) async for copy in scan]
    if len(rows) > most:
        raise UsageError(
            f"view {view.id!r}: group {group!r} has more than {most} members, and a run reads them all: "
            "keep aggregates of it (keep=), or raise members_max"
        )
    return rows


def remember(
    view: Owners, txn: Transaction, key: Any, stored: bytes | None, after: Mapping[Where, Given], seen_ts: int = 0
) -> None:
    """Write the owner's memory (V1): if it has changed, or if runs of the owner could overlap (V2). An owner that gives
    nothing needs none, unless it notes how far its runs have seen (`seen_ts`)."""
    if after or seen_ts:
        columns = {table.name: tuple(sorted(c.name for c in columns)) for table, columns in view.writes.items()}
        packed = Memory(view.version, seen_ts, columns, {where: each.digest for where, each in after.items()}).pack()
        if view.several or packed != stored:
            txn.set(view.memory, key, packed)
    elif view.several or stored is not None:
        txn.delete(view.memory, key)


async def write(
    view: Owners, txn: Transaction, owner: bytes, before: Memory, after: Mapping[Where, Given], attempt: int
) -> None:
    """Write the difference (V6), and tell the group view or join for which the rows are copies."""
    gone = [where for where in before.rows if where not in after]
    new = [where for where in after if where not in before.rows]
    changed = [where for where, each in after.items() if where in before.rows and before.rows[where] != each.digest]
    # An earlier version may have written other columns; groups and joins of another version run again.
    same = [] if before.version == view.version else [where for where in after if where not in {*new, *changed}]
    if not (gone or new or changed or same):
        return
    tables = {each.table.name: each.table for each in after.values()}
    tables.update({name: table_of(view, txn, name) for name, _ in gone})
    keys = {
        where: after[where].key if where in after else tables[where[0]].key.decode(where[1])
        for where in (*gone, *new, *changed, *same)
    }
    taken = await _claim(view, txn, owner, [(tables[where[0]], where, keys[where]) for where in new])
    late = [after[where] for where in (*new, *changed) if after[where].later]
    if late:
        fill(late, await find(txn, laters(late), compute=True))  # V9, V10
    told = Told(view.tells) if isinstance(view, Each) and view.tells is not None else None
    if told is not None:
        await told.read(txn, [keys[where] for where in (*gone, *new, *changed)])
    for where in gone:
        table, key = tables[where[0]], keys[where]
        for column in earlier(view, before, table):
            txn.delete(column, key)
        if table in view.owned:
            txn.delete(view.owned[table], key)
        if told is not None:
            told.change(key, None)
    for where in (*new, *changed):
        table, key, values = after[where][:3]
        for column, value in values.items():
            txn.set(column, key, value)
        if where in before.rows or where in taken:
            for column in {*earlier(view, before, table), *view.writes[table]} - values.keys():
                txn.delete(column, key)
        if where not in before.rows and table in view.owned:
            txn.set(view.owned[table], key, owner)
        if told is not None:
            told.change(key, values)
    for where in same:
        table, key, values = after[where][:3]
        for column in set(earlier(view, before, table)) - values.keys():
            txn.delete(column, key)
        if told is not None:
            told.again(key)
    if told is not None:
        await told.write(txn, attempt)


def earlier(view: Owners, before: Memory, table: Table[Any]) -> list[Column[Any, Any]]:
    """The columns of a table that the owner's last run could write, without those that another view writes now."""
    names = before.columns.get(table.name, ())
    columns = [table.columns[name] for name in names if name in table.columns]
    return [column for column in columns if view.writers.get(column, view) is view]


def table_of(view: Owners, txn: Transaction, name: str) -> Table[Any]:
    """The table in which an earlier version of the view gave rows. Raises: UsageError if it is not declared."""
    for table in view.writes:
        if table.name == name:
            return table
    tables = engine_of(txn).known.schema.tables
    if name not in tables:
        raise UsageError(
            f"an earlier version of view {view.id!r} gave rows of table {name!r}, which is not in the schema any more: "
            "keep it declared until they have been removed"
        )
    return tables[name]


async def _claim(
    view: Owners, txn: Transaction, owner: bytes, new: Iterable[tuple[Table[Any], Where, Any]]
) -> set[Where]:
    """V5: take over the rows that another owner has given but gives no more; returns which these are.

    Raises: UsageError if another owner of the view gives one of the rows.
    """
    by_table: dict[Table[Any], dict[Any, Where]] = {}
    for table, where, key in new:
        if table in view.owned:
            by_table.setdefault(table, {})[key] = where
    contested: dict[bytes, list[tuple[Where, Any]]] = {}
    for table, wheres in by_table.items():
        for key, other in (await txn.get_many(view.owned[table], wheres)).items():
            if other is not None and other != owner:
                contested.setdefault(other, []).append((wheres[key], key))
    for other, found in contested.items():
        await _release(view, txn, owner, other, found)
    return {where for found in contested.values() for where, _ in found}


async def _release(
    view: Owners, txn: Transaction, owner: bytes, other: bytes, rows: Iterable[tuple[Where, Any]]
) -> None:
    """Take rows out of the memory of their owner, if it does not give them any more.

    Its own run, which would do this, may come later. It could even need a row of this run's owner: then neither of them
    could go first. The other owner's inputs are read under a lock, so they do not change meanwhile.
    """
    first, second = view.table.key.decode(other), view.table.key.decode(owner)
    gives: Mapping[Where, Given] | None = None
    memory = Memory()
    if isinstance(view, Each | Joined):
        row = await txn.row(view.table, first, [*view.columns, view.memory], lock=True)
        memory = Memory.unpack(row[view.memory])
        gives = given(view.id, await puts(view, txn, first, row), view.writes)
    for where, key in rows:
        if gives is None or where in gives:
            raise UsageError(
                f"view {view.id!r} gives {where[0]}[{key!r}] for {view.table.name}[{first!r}] and for "
                f"{view.table.name}[{second!r}]: a row has one owner. Make the owner's key a part of the row's, "
                "or group by that key"
            )
        memory.rows.pop(where, None)
    txn.set(view.memory, first, memory.pack())
