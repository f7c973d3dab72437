"""Groups that keep aggregates: what a changed member adds, and how a group's run folds it.

V3  The transaction that changes a member raises the signal of the group that the member was in, and of the group that
    it is in now.
V4  What a transaction adds to a group's count and sums is folded once: the transaction that adds it to the tally
    deletes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from perco.schema.schema import Column, Table
from perco.txn.transaction import Transaction
from perco.views.aggregates import Ordered, Tally, order_codec, order_key
from perco.views.compiled import Grouped, Joined, parts_of
from perco.views.joining import turn
from perco.views.rows import Group
from perco.views.tops import Delta, Entry, Kept, Top

# A transaction adds to one of a few slots. A fold deletes the slots that it has read, and until their history is
# removed, later folds pass them: so they are few. Transactions that have met in a slot use one of many at their next
# attempt; their start timestamps are close together, so these slots differ.
_SLOTS: Final = 4
_MORE_SLOTS: Final = 256

Values = Mapping[Column[Any, Any], Any]


@dataclass(slots=True)
class Told:
    """The changes that one run makes to the members of groups, and to the right rows of joins."""

    views: Sequence[Grouped | Joined]
    _before: dict[Any, dict[Column[Any, Any], Any]] = field(default_factory=dict)
    _changes: list[tuple[Any, Values | None]] = field(default_factory=list)
    _again: list[Any] = field(default_factory=list)

    async def read(self, txn: Transaction, keys: Sequence[Any]) -> None:
        """Read what the members are before the run's writes, if a group keeps aggregates of them."""
        keeping = [each for each in self.views if isinstance(each, Grouped) and each.deltas is not None]
        columns = {each.copied[column] for each in keeping for column in each.columns}
        for column in columns:
            for key, value in (await txn.get_many(column, keys)).items():
                self._before.setdefault(key, {})[column] = value

    def change(self, key: Any, values: Values | None) -> None:
        """Note that a row of the table gets these values; None: it is deleted."""
        self._changes.append((key, values))

    def again(self, key: Any) -> None:
        """Note that the views must run again though the row is the same, because they are of another version."""
        self._again.append(key)

    async def write(self, txn: Transaction, attempt: int) -> None:
        """Write what the changes add to the groups, and signal these. `attempt`: of the run."""
        for view in self.views:
            if isinstance(view, Joined):
                for key in [*self._again, *(key for key, _ in self._changes)]:
                    turn(view, txn, key)
                continue
            signalled = {view.split(key)[0] for key in self._again}
            deltas: dict[Any, Delta] = {}
            for key, values in self._changes:
                group, rest = view.split(key)
                signalled.add(group)
                if view.deltas is not None:
                    before, after = _member(view, self._before.get(key)), _member(view, values)
                    delta = deltas.setdefault(group, Delta(view.shape, Tally.empty(view.sums)))
                    delta.tally.change(view.sums, _summed(view, before), -1)
                    delta.tally.change(view.sums, _summed(view, after), 1)
                    if _move(view, txn, group, rest, before, after) and delta.changed is not None:
                        delta.changed.add(view.members.row(key))
            for group, delta in deltas.items():
                await _add(view, txn, group, delta, attempt)
            for group in signalled:
                txn.signal(view.changed, group)  # V3


def _member(view: Grouped, values: Values | None) -> Values | None:
    """A member's values, by the source's columns; None: the row is no member."""
    found = {column: (values or {}).get(copy) for column, copy in view.copied.items()}
    return found if any(value is not None for value in found.values()) else None


def _summed(view: Grouped, member: Values | None) -> list[Any] | None:
    return None if member is None else [member[each.column] for each in view.sums]


def _move(
    view: Grouped, txn: Transaction, group: Any, rest: tuple[Any, ...], before: Values | None, after: Values | None
) -> bool:
    """Move a member in the orders that the view keeps. Returns whether this changes anything."""
    head, moved = parts_of(view.table.key, group), False
    for order, column in view.orders.items():
        codec = order.column.codec
        old, new = ((each or {}).get(order.column) for each in (before, after))
        places = [None if value is None else (*head, order_key(codec, value), *rest) for value in (old, new)]
        before_at, after_at = (None if place is None else column.table.row(place) for place in places)
        if before_at is not None and before_at != after_at:
            txn.delete(column, places[0])
            moved = True
        if after_at is not None and (before_at != after_at or codec.encode(old) != codec.encode(new)):
            txn.set(column, places[1], new)
            moved = True
    return moved


async def _add(view: Grouped, txn: Transaction, group: Any, delta: Delta, attempt: int) -> None:
    """Add to what the group's next run folds (V4)."""
    assert view.deltas is not None
    if delta.tally.is_nothing() and not delta.changed:
        return
    slot = txn.start_ts % _SLOTS if attempt == 1 else _SLOTS + txn.start_ts % _MORE_SLOTS
    key = (*parts_of(view.table.key, group), slot)
    stored = await txn.get(view.deltas, key)
    if stored is not None:
        there = Delta.unpack(stored)
        if there.shape == view.shape:
            delta.merge(there)
    # Even if it all adds up to nothing now, write it: a run that folds the slot at the same time must notice.
    txn.set(view.deltas, key, delta.pack())


async def kept(view: Grouped, txn: Transaction, group: Any, stored: bytes | None) -> Group[Any] | None:
    """Fold the deltas of a group; returns the group with its aggregates, or None if it has no members.

    Args:
        stored: the group's `Kept`, packed.
    """
    assert view.deltas is not None
    prefix = parts_of(view.table.key, group)
    found = Kept.of(stored, view.shape, view.sums, view.orders)
    news, known = Delta(view.shape, found.tally), found.known
    for slot in await txn.scan(view.deltas.table, prefix=prefix, columns=[view.deltas]).all():
        delta = Delta.unpack(slot[view.deltas] or b"")
        known = known and delta.shape == view.shape
        if known:
            news.merge(delta)
        txn.delete(view.deltas, slot.key)
    if known:
        assert found.tally.members >= 0, f"V4: group {group!r} of view {view.id!r} has {found.tally.members} members"
        for order, column in view.orders.items():
            await _follow(view, txn, prefix, order, column, found, news.changed)
    else:
        await _recount(view, txn, prefix, found)
    packed = found.pack()
    if packed is not None:
        txn.set(view.kept, group, packed)
    elif stored is not None:
        txn.delete(view.kept, group)
    if not found.tally.members:
        return None
    ends: dict[Ordered, Sequence[tuple[Any, Any]]] = {}
    for order in view.orders:
        for last, size in (False, order.first), (True, order.last):
            if size:
                end = Ordered(order.column, 0 if last else size, size if last else 0)
                best = found.tops[order.column.name, last].best()
                ends[end] = [(_source_key(view, each.member), order.column.codec.decode(each.value)) for each in best]
    return Group(None, found.tally, view.sums, ends)


async def _recount(view: Grouped, txn: Transaction, prefix: tuple[Any, ...], found: Kept) -> None:
    """Count all members of a group again, and make its orders complete, because other aggregates were kept before."""
    found.tally = Tally.empty(view.sums)
    places: dict[Ordered, dict[Any, Any]] = {order: {} for order in view.orders}
    async for row in txn.scan(view.members, prefix=prefix, columns=list(view.copied.values())):
        member = {column: row[copy] for column, copy in view.copied.items()}
        found.tally.change(view.sums, _summed(view, member), 1)
        rest = view.split(row.key)[1]
        for order in view.orders:
            value = member[order.column]
            if value is not None:
                places[order][(*prefix, order_key(order.column.codec, value), *rest)] = value
    for order, column in view.orders.items():
        async for row in txn.scan(column.table, prefix=prefix, columns=[column]):
            if row.key not in places[order]:
                txn.delete(column, row.key)
            elif row[column] == places[order][row.key]:
                del places[order][row.key]
        for place, value in places[order].items():
            txn.set(column, place, value)
        for (name, _), top in found.tops.items():
            if name == order.column.name:
                await _fill(view, txn, prefix, order, column, top)


async def _follow(
    view: Grouped,
    txn: Transaction,
    prefix: tuple[Any, ...],
    order: Ordered,
    column: Column[Any, Any],
    found: Kept,
    changed: set[bytes] | None,
) -> None:
    """Bring both ends of an order up to date with the members that have changed (None: too many to be listed)."""
    tops = [top for (name, _), top in found.tops.items() if name == order.column.name]
    if changed:
        keys = {view.members.key.decode(member): member for member in sorted(changed)}
        now = await txn.get_many(view.copied[order.column], list(keys))
        for key, member in keys.items():
            entry = None if now[key] is None else _entry(view, order, member, now[key])
            for top in tops:
                top.change(member, entry)
    for top in tops:
        if changed is None or top.is_short:
            await _fill(view, txn, prefix, order, column, top)


async def _fill(
    view: Grouped, txn: Transaction, prefix: tuple[Any, ...], order: Ordered, column: Column[Any, Any], top: Top
) -> None:
    entries = []
    async for row in txn.scan(column.table, prefix=prefix, columns=[column], limit=top.room, reverse=top.last):
        member = view.members.row((*prefix, *row.key[len(prefix) + 1 :]))
        entries.append(_entry(view, order, member, row[column]))
    top.fill(entries)


def _entry(view: Grouped, order: Ordered, member: bytes, value: Any) -> Entry:
    codec = order.column.codec
    return Entry(order_codec(codec).encode(order_key(codec, value)), member, codec.encode(value))


def _source_key(view: Grouped, member: bytes) -> Any:
    return view.source_key(view.split(view.members.key.decode(member))[1])


def told_of(views: Mapping[Table[Any], Sequence[Grouped | Joined]]) -> dict[Table[Any], Told]:
    """For each table, what to tell the views that read its rows."""
    return {table: Told(found) for table, found in views.items()}
