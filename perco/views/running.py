"""The runs of views: read the owner's inputs, call the function, write the difference from what it gave before.

V1  A run writes its rows and its owner's memory in one transaction.
V2  Of two runs for one owner that overlap, one fails and runs again: both write the owner's memory. (If a single
    observer of a column runs for the owner, its acknowledgement does the same: N3.)
V3  The transaction that changes a member raises the signal of the group that the member was in, and of the group that
    it is in now.
V4  What a transaction adds to a group's count and sums is folded once: the transaction that adds it to the tally
    deletes it.
V5  A row has one owner: a run that gives a new row reads whether another owner has given it.
V6  A row that is given again unchanged is not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from perco.errors import UsageError
from perco.schema.schema import Change, Column, Table
from perco.txn.row import Row
from perco.txn.transaction import Transaction
from perco.views.aggregates import Ordered, Tally, order_key
from perco.views.compiled import Each, Grouped, Owners, parts_of
from perco.views.memory import Given, Memory, Where, given
from perco.views.rows import Group

# Transactions that run at the same time have start timestamps that are close together, so they use different slots.
_SLOTS: Final = 256


async def run_each(view: Each, txn: Transaction, change: Change[Any, Any]) -> None:
    """Run a view for the source row that has changed."""
    key, columns = change.key, view.columns
    row = await txn.row(view.table, key, [*columns, view.memory])
    stored = row[view.memory]
    before = Memory.unpack(stored)
    if view.several and before.version == view.version and before.seen_ts >= change.commit_ts:
        return  # the run for another column of the row has seen this change
    there = any(row[column] is not None for column in columns)
    inputs = Row(key, {column: (row[column], row.commit_ts(column)) for column in columns})
    after = given(view.id, view.function(inputs) if there else (), view.outputs)
    await _write(view, txn, view.table.row(key), before, after)
    _remember(view, txn, key, stored, after, always=view.several)


async def run_group(view: Grouped, txn: Transaction, group: Any) -> None:
    """Run a view for a group whose members have changed."""
    row = await txn.row(view.table, group, [view.memory, view.tally])
    rows = await _kept(view, txn, group, row[view.tally]) if view.deltas is not None else await _all(view, txn, group)
    after = given(view.id, () if rows is None else view.function(group, rows), view.outputs)
    stored = row[view.memory]
    await _write(view, txn, view.table.row(group), Memory.unpack(stored), after)
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


async def _kept(view: Grouped, txn: Transaction, group: Any, stored: bytes | None) -> Group[Any] | None:
    """The group with its aggregates, after the deltas have been folded (V4); None if it has no members."""
    assert view.deltas is not None
    column = view.deltas
    prefix = parts_of(view.table.key, group)
    tally = Tally.unpack(stored) if stored is not None else Tally.empty(view.sums)
    for delta in await txn.scan(column.table, prefix=prefix, columns=[column]).all():
        tally.merge(Tally.unpack(delta[column] or b""))
        txn.delete(column, delta.key)
    if not tally.is_nothing():
        txn.set(view.tally, group, tally.pack())
    elif stored is not None:
        txn.delete(view.tally, group)
    assert tally.members >= 0, f"V4: group {group!r} of view {view.id!r} has {tally.members} members"
    if not tally.members:
        return None
    found: dict[Ordered, Sequence[tuple[Any, Any]]] = {}
    for order, value in view.orders.items():
        for first, limit in (True, order.first), (False, order.last):
            if limit:
                scan = txn.scan(value.table, prefix=prefix, columns=[value], limit=limit, reverse=not first)
                members = [(view.source_key(group, each.key[len(prefix) + 1 :]), each[value]) async for each in scan]
                found[Ordered(order.column, limit if first else 0, 0 if first else limit)] = members
    return Group(None, tally, view.sums, found)


def _remember(
    view: Owners, txn: Transaction, key: Any, stored: bytes | None, after: Mapping[Where, Given], *, always: bool
) -> None:
    """Write the owner's memory (V1), if it has changed or `always` (V2)."""
    if after or (isinstance(view, Each) and view.several):
        seen_ts = txn.start_ts if isinstance(view, Each) and view.several else 0
        columns = {table.name: tuple(sorted(c.name for c in columns)) for table, columns in view.outputs.items()}
        packed = Memory(view.version, seen_ts, columns, {where: each.digest for where, each in after.items()}).pack()
        if always or packed != stored:
            txn.set(view.memory, key, packed)
    elif always or stored is not None:
        txn.delete(view.memory, key)


async def _write(view: Owners, txn: Transaction, owner: bytes, before: Memory, after: Mapping[Where, Given]) -> None:
    """Write the difference, and tell the groups whose members it changes."""
    tables = {table.name: table for table in view.outputs}
    gone = [where for where in before.rows if where not in after]
    new = [where for where in after if where not in before.rows]
    changed = [where for where, each in after.items() if where in before.rows and before.rows[where] != each.digest]
    if not (gone or new or changed):
        return
    keys = {(name, row): tables[name].key.decode(row) for name, row in gone}
    keys.update({where: after[where].key for where in (*new, *changed)})
    told = {table: _Told(groups) for table, groups in view.told.items()}
    await _must_own(view, txn, owner, [(tables[where[0]], keys[where]) for where in new])
    for table, each in told.items():
        await each.read(txn, table, [key for (name, _), key in keys.items() if name == table.name])
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
        for column in view.outputs[table]:
            if column in values:
                txn.set(column, key, values[column])
            elif where in before.rows:
                txn.delete(column, key)
        if where not in before.rows and table in view.owned:
            txn.set(view.owned[table], key, owner)
        if table in told:
            told[table].change(key, values)
    for each in told.values():
        await each.write(txn)


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


@dataclass(slots=True)
class _Told:
    """The changes that one run makes to the members of groups."""

    groups: Sequence[Grouped]
    _before: dict[Any, dict[Column[Any, Any], Any]] = field(default_factory=dict)
    _changes: list[tuple[Any, Mapping[Column[Any, Any], Any] | None]] = field(default_factory=list)

    async def read(self, txn: Transaction, table: Table[Any], keys: Sequence[Any]) -> None:
        """Read what the members are before the run's writes, if a group keeps aggregates of them."""
        columns = {each.copied[column] for each in self.groups if each.deltas is not None for column in each.columns}
        for column in columns:
            for key, value in (await txn.get_many(column, keys)).items():
                self._before.setdefault(key, {})[column] = value

    def change(self, key: Any, values: Mapping[Column[Any, Any], Any] | None) -> None:
        """Note that a row of the table gets these values; None: it is deleted."""
        self._changes.append((key, values))

    async def write(self, txn: Transaction) -> None:
        for view in self.groups:
            signalled: set[Any] = set()
            tallies: dict[Any, Tally] = {}
            for key, values in self._changes:
                group, rest = view.split(key)
                signalled.add(group)
                if view.deltas is not None:
                    before = _member(view, self._before.get(key))
                    after = _member(view, values)
                    tally = tallies.setdefault(group, Tally.empty(view.sums))
                    tally.change(view.sums, _summed(view, before), -1)
                    tally.change(view.sums, _summed(view, after), 1)
                    _move(view, txn, group, rest, before, after)
            for group, tally in tallies.items():
                await _add(view, txn, group, tally)
            for group in signalled:
                txn.signal(view.changed, group)  # V3


def _member(view: Grouped, values: Mapping[Column[Any, Any], Any] | None) -> dict[Column[Any, Any], Any] | None:
    """A member's values, by the source's columns; None: the row is no member."""
    found = {column: (values or {}).get(copy) for column, copy in view.copied.items()}
    return found if any(value is not None for value in found.values()) else None


def _summed(view: Grouped, member: Mapping[Column[Any, Any], Any] | None) -> list[Any] | None:
    return None if member is None else [member[each.column] for each in view.sums]


def _move(
    view: Grouped,
    txn: Transaction,
    group: Any,
    rest: tuple[Any, ...],
    before: Mapping[Column[Any, Any], Any] | None,
    after: Mapping[Column[Any, Any], Any] | None,
) -> None:
    """Move a member in the orders that the view keeps."""
    head = parts_of(view.table.key, group)
    for order, column in view.orders.items():
        codec = order.column.codec
        old, new = ((each or {}).get(order.column) for each in (before, after))
        at = [None if value is None else (*head, order_key(codec, value), *rest) for value in (old, new)]
        if at[0] is not None and at[0] != at[1]:
            txn.delete(column, at[0])
        if at[1] is not None and (at[0] != at[1] or codec.encode(old) != codec.encode(new)):
            txn.set(column, at[1], new)


async def _add(view: Grouped, txn: Transaction, group: Any, tally: Tally) -> None:
    """Add to what the group's next run folds (V4)."""
    if tally.is_nothing() or view.deltas is None:
        return
    slot = (*parts_of(view.table.key, group), txn.start_ts % _SLOTS)
    stored = await txn.get(view.deltas, slot)
    if stored is not None:
        tally.merge(Tally.unpack(stored))
    # Even if they now add up to nothing, write them: the run that folds them at the same time must notice.
    txn.set(view.deltas, slot, tally.pack())
