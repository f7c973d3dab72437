"""The runs of views: read the owner's inputs, call the function, write the difference from what it gave before.

V1  A run writes its rows and its owner's memory in one transaction.
V2  Of two runs for one owner that overlap, one fails and runs again: both write the owner's memory. (If a single
    observer of a column runs for the owner, its acknowledgement does the same: N3.)
V5  A row has one owner: a run that gives a new row reads whether another owner has given it. If that owner gives it no
    more, the run takes the row over.
V6  A row that is given again unchanged is not written. Of one that has changed, only the columns that have.
V12 If a run changes rows that another view reads in place, its first attempt tells that view itself, in its own
    transaction, and that view's teller is not notified. The version of the teller in the store must be the one that the
    program declares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from perco.errors import UsageError
from perco.schema.catalogue import Catalogue
from perco.schema.schema import Change, Column, Table
from perco.storage import TS_MAX
from perco.txn.inside import engine_of, lock, read_encoded, size_of, without, write_encoded
from perco.txn.row import Row
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction
from perco.views.cached import find
from perco.views.compiled import (
    CoGrouped,
    Components,
    Copies,
    Each,
    Found,
    Grouped,
    Joined,
    Owners,
    Teller,
    key_of,
    parts_of,
)
from perco.views.components import Linked
from perco.views.folding import NOTHING_KEPT, Told, fold, keep
from perco.views.joining import pairs
from perco.views.memory import Given, Memory, Where, fill, given, laters
from perco.views.rows import Group, Put

_CELLS_PER_ROW: Final = 12  # that telling writes, and signals that it raises, at most
_TOLD_MAX: Final = 1000  # rows of one table: a run that changes more of them leaves the telling to the observers


async def run_each(view: Each | Joined, txn: Transaction, change: Change[Any, Any]) -> None:
    """Run a view for the source row (of a join: the left row) that has changed."""
    await _run(view, txn, change.key, change.attempt, change.commit_ts)


async def _run(view: Each | Joined, txn: Transaction, key: Any, attempt: int, commit_ts: int = TS_MAX) -> None:
    """Run a view for a source row. `commit_ts`: of the change."""
    row = await txn.row(view.table, key, [*view.columns, view.memory])
    stored = row[view.memory]
    before = Memory.unpack(stored)
    if view.several and before.version == view.version and before.seen_ts >= commit_ts:
        return  # the run for another column of the row has seen this change
    after = given(view.id, await puts(view, txn, key, row), view.writes)
    await write(view, txn, view.table.row(key), before, after, attempt)
    if isinstance(view, Each) and before.version != view.version:
        _tell_earlier_group(view, txn, key)
    seen_ts = txn.start_ts if view.several and is_there(view, row) else 0
    remember(view, txn, key, stored, after, seen_ts)


def _tell_earlier_group(view: Each, txn: Transaction, key: Any) -> None:
    """Signal the group that a source row was in if an earlier version of the group view read the rows in place."""
    group_view = view.tells
    if isinstance(group_view, Grouped) and group_view.like_prefix:
        parts = parts_of(view.table.key, key)[: group_view.like_prefix]
        txn.signal(group_view.changed, key_of(group_view.table.key, parts))


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


async def run_cogroup(view: CoGrouped, txn: Transaction, change: Change[Any, Any]) -> None:
    """Run a view for a key whose rows have changed."""
    key = change.key
    stored = await txn.get(view.memory, key)
    after = given(view.id, view.gives(key, await found_of(view, txn, key)), view.writes)
    await write(view, txn, view.table.row(key), Memory.unpack(stored), after, change.attempt)
    remember(view, txn, key, stored, after)


async def found_of(view: CoGrouped, snap: Snapshot, key: Any) -> list[Found]:
    """The rows of each side that have a key. Raises: UsageError if one has too many."""
    out: list[Found] = []
    for side in view.sides:
        columns = list(side.rows.columns)
        if not side.many:
            row = await snap.row(side.rows.source, key, columns)
            out.append(row if any(row[column] is not None for column in columns) else None)
            continue
        most = view.rows_max
        limit = most + 1 if side.first is None else side.first
        scan = snap.scan(side.rows.source, prefix=parts_of(side.rows.key, key), columns=columns, limit=limit)
        rows = await scan.all()
        if side.first is None and len(rows) > most:
            raise UsageError(
                f"view {view.id!r}: {side.rows.source.name} has more than {most} rows for {key!r}, and a run reads "
                "them all: raise rows_max, or read the first ones (views.first)"
            )
        out.append(rows)
    return out


async def group_now(
    view: Grouped, txn: Transaction, group: Any, stored: bytes | None, *, recount: bool = False
) -> Group[Any] | None:
    """The group as its function reads it, brought up to date; None if it has no members.

    Args:
        stored: its `Kept`, packed.
        recount: count the aggregates again.
    """
    if view.deltas is not None:
        if view.by_prefix and stored == NOTHING_KEPT:
            await _copy_all(view, txn, group)
        return await fold(view, txn, group, stored, recount=recount)
    rows = await members(view, txn, group, view.members_max)
    keep(view, txn, group, stored, NOTHING_KEPT if rows else None)
    return Group(rows) if rows else None


async def _copy_all(view: Grouped, txn: Transaction, group: Any) -> None:
    """Copy the members of a group that were read in place so far, because the view kept no aggregates of them. They are
    read under a lock (V2): the copier's run for a row that is gone may write nothing with which this would conflict."""
    assert isinstance(view.copier, Each)
    prefix = parts_of(view.members.key, group)
    scan = txn.scan(view.members.source, prefix=prefix, columns=view.columns)
    for row in [row async for row in scan]:
        for column in view.columns:
            lock(txn, column, row.key)
        await _run(view.copier, txn, row.key, 1)


async def has_members(view: Grouped, snap: Snapshot, group: Any) -> bool:
    """Whether a group has any members."""
    copies = view.members
    columns = list(copies.columns.values())
    return bool(await snap.scan(copies.table, prefix=parts_of(copies.key, group), columns=columns, limit=1).all())


async def members(view: Grouped, snap: Snapshot, group: Any, most: int) -> list[Row[Any]]:
    """The members of a group that its function gets. Raises: UsageError if these are more than `most`."""
    copies = view.members
    limit = most + 1 if view.first is None else min(most + 1, view.first)
    scan = snap.scan(
        copies.table, prefix=parts_of(copies.key, group), columns=list(copies.columns.values()), limit=limit
    )
    rows = [copies.original(copy) async for copy in scan]
    if len(rows) > most:
        raise UsageError(
            f"view {view.id!r}: group {group!r} has more than {most} members, and a run reads them all: "
            "keep aggregates of it (keep=), or raise members_max"
        )
    return rows


def packed_memory(view: Owners, after: Mapping[Where, Given], seen_ts: int) -> bytes:
    """The memory of an owner that has given these rows, as stored."""
    columns = {table.name: tuple(sorted(c.first_name for c in columns)) for table, columns in view.writes.items()}
    return Memory(view.version, seen_ts, columns, {where: each.digest for where, each in after.items()}).pack()


def remember(
    view: Owners, txn: Transaction, key: Any, stored: bytes | None, after: Mapping[Where, Given], seen_ts: int = 0
) -> None:
    """Write the owner's memory (V1): if it has changed, or if runs of the owner could overlap (V2). An owner that gives
    nothing needs none, unless it notes how far its runs have seen (`seen_ts`)."""
    if after or seen_ts:
        packed = packed_memory(view, after, seen_ts)
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
    written = {*new, *changed}
    same = [] if before.version == view.version else [where for where in after if where not in written]
    if not (gone or new or changed or same):
        return
    tables = {each.table.name: each.table for each in after.values()}
    tables.update({name: table_of(view, txn, name) for name, _ in gone})
    before_of = {name: earlier(view, before, table) for name, table in tables.items()}
    taken = await _claim(view, txn, owner, [after[where] for where in new])
    late = [after[where] for where in (*new, *changed) if after[where].later]
    if late:
        fill(late, await find(txn, laters(late), compute=True))  # V9, V10
    told = telling(view)
    if told is not None:
        await told.read(txn, [tables[name].key.decode(row) for name, row in (*gone, *new, *changed)])
    for name, row in gone:
        for column in before_of[name]:
            write_encoded(txn, column, row, None)
        if (mark := view.owned.get(tables[name])) is not None:
            write_encoded(txn, mark, row, None)
        if told is not None:
            told.change(tables[name].key.decode(row), None)
    for where in (*new, *changed):
        given, (name, row) = after[where], where
        table, data = given.table, given.data
        known = where in before.rows
        if known or where in taken:
            columns = in_order({*before_of[name], *view.writes[table]})
            there: Sequence[bytes | None] | None = None
            if len(columns) > 1:  # V6
                (there,) = await read_encoded(txn, table, [row], columns)
            for i, column in enumerate(columns):
                if there is None or there[i] != data.get(column):
                    write_encoded(txn, column, row, data.get(column))
        else:
            for column, now in data.items():
                write_encoded(txn, column, row, now)
        if not known and (mark := view.owned.get(table)) is not None:
            write_encoded(txn, mark, row, owner)
        if told is not None:
            told.change(given.key, given.values)
    for where in same:
        name, row = where
        for column in in_order(set(before_of[name]) - after[where].values.keys()):
            write_encoded(txn, column, row, None)
        if told is not None:
            told.again(after[where].key)
    if told is not None:
        await told.write(txn, attempt)
    if view.tellers and attempt == 1:
        await _tell_readers(view, txn, (*gone, *new, *changed, *same))


def telling(view: Owners) -> Told | Linked | None:
    """Return the notes of changes for the reader, if the view keeps copies or sides for one; else None."""
    if not isinstance(view, Each):
        return None
    if isinstance(view.tells, Components):
        return Linked(view.tells, give_label)
    if view.tells is None or view.copies is None:
        return None
    return Told(view.tells, view.copies)


async def give_label(view: Components, txn: Transaction, node: Any, label: Any, attempt: int) -> None:
    """Write the label of a node; None: it has no links."""
    stored = await txn.get(view.memory, node)
    after = given(view.id, view.gives(node, label), view.outputs)
    await write(view, txn, view.table.row(node), Memory.unpack(stored), after, attempt)
    remember(view, txn, node, stored, after)


async def run_teller(teller: Teller, txn: Transaction, change: Change[Any, Any]) -> None:
    """Tell a view of a change of a row that it reads in place."""
    if teller.earlier is not None and await txn.get(teller.earlier.memory, change.key) is not None:
        await run_each(teller.earlier, txn, change)
    await _tell(teller.tells, teller.rows, txn, [change.key])


async def _tell(view: Grouped | Joined | CoGrouped, rows: Copies, txn: Transaction, keys: Iterable[Any]) -> None:
    if isinstance(view, CoGrouped):
        for key in {rows.split(key)[0]: None for key in keys}:
            txn.signal(view.changed, key)  # V3
        return
    told = Told(view, rows)
    for key in keys:
        told.again(key)
    await told.write(txn, 1)


async def _tell_readers(view: Owners, txn: Transaction, wheres: Iterable[Where]) -> None:
    """V12: tell the views that read these rows in place, of those that the transaction has changed. Only the first
    attempt of a run tells: conflicts with the readers' runs could otherwise keep a long run from ever committing."""
    engine = engine_of(txn)
    rows: dict[str, list[bytes]] = {}
    for name, row in wheres:
        rows.setdefault(name, []).append(row)
    for table, tellers in view.tellers.items():
        there = rows.get(table.name)
        if there is None or len(there) > _TOLD_MAX:
            continue
        for teller in tellers:
            numbers = _numbers(teller, engine.known.catalogue)
            if numbers is None or size_of(txn)[0] + _CELLS_PER_ROW * len(there) > engine.limits.cells_max:
                continue
            some = there
            if teller.earlier is not None:  # the observer has to run for rows with copies to remove
                copied = await read_encoded(txn, table, there, [teller.earlier.memory])
                some = [row for row, (stored,) in zip(there, copied, strict=True) if stored is None]
            changed: dict[bytes, None] = {}
            for column, number in zip(teller.columns, numbers, strict=True):
                changed.update(dict.fromkeys(without(txn, column, some, number)))
            if changed:
                await _tell(teller.tells, teller.rows, txn, [table.key.decode(row) for row in changed])


def _numbers(teller: Teller, catalogue: Catalogue) -> list[int] | None:
    """The numbers of a teller's observers; None if the observers have to run."""
    found = []
    for column in teller.columns:
        entry = catalogue.observers.get(teller.observer(column))
        if entry is None or entry.version != teller.version or entry.paused:
            return None
        found.append(entry.number)
    return found


def earlier(view: Owners, before: Memory, table: Table[Any]) -> list[Column[Any, Any]]:
    """The columns of a table that the owner's last run could write, without those that another view writes now."""
    names = before.columns.get(table.name, ())
    declared = {column.first_name: column for column in table.columns.values()}
    columns = [declared[name] for name in names if name in declared]
    return [column for column in columns if view.writers.get(column, view) is view]


def in_order(columns: Iterable[Column[Any, Any]]) -> list[Column[Any, Any]]:
    """Columns of one table by their names. A set's own order differs from process to process, and the first write of a
    transaction is its primary: so the same transaction would take other steps."""
    return sorted(columns, key=lambda column: column.first_name)


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


async def _claim(view: Owners, txn: Transaction, owner: bytes, new: Iterable[Given]) -> set[Where]:
    """V5: take over the rows that another owner has given but gives no more; returns which these are.

    Raises: UsageError if another owner of the view gives one of the rows.
    """
    by_table: dict[Table[Any], list[bytes]] = {}
    for each in new:
        if each.table in view.owned:
            by_table.setdefault(each.table, []).append(each.row)
    contested: dict[bytes, list[Where]] = {}
    for table, rows in by_table.items():
        for row, (stored,) in zip(rows, await read_encoded(txn, table, rows, [view.owned[table]]), strict=True):
            if stored is not None and stored != owner:
                contested.setdefault(stored, []).append((table.name, row))
    for other, found in contested.items():
        await _release(view, txn, owner, other, found)
    return {where for found in contested.values() for where in found}


def _key(view: Owners, where: Where) -> Any:
    (key,) = [table.key.decode(where[1]) for table in view.outputs if table.name == where[0]]
    return key


async def _release(view: Owners, txn: Transaction, owner: bytes, other: bytes, rows: Iterable[Where]) -> None:
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
    for where in rows:
        if gives is None or where in gives:
            raise UsageError(
                f"view {view.id!r} gives {where[0]}[{_key(view, where)!r}] for {view.table.name}[{first!r}] and for "
                f"{view.table.name}[{second!r}]: a row has one owner. Make the owner's key a part of the row's, "
                "or group by that key"
            )
        memory.rows.pop(where, None)
    txn.set(view.memory, first, memory.pack())
