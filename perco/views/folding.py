"""Groups that keep aggregates: a changed member adds a delta, and the group's run folds the deltas.

V3  The transaction that changes a member raises the signal of the group that the member was in, and of the group that
    it is in now.
V4  Each delta to a group's count and sums is folded once: the transaction that adds it to the tally deletes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from perco.schema.schema import Column
from perco.txn.row import Row
from perco.txn.transaction import Transaction
from perco.views.aggregates import Ordered, Tally, order_codec, order_key
from perco.views.compiled import Copies, Grouped, Joined, parts_of
from perco.views.joining import turn
from perco.views.rows import Group
from perco.views.tops import Delta, Entry, Kept, pack_kept

# A transaction adds to one of a few slots. A fold deletes the slots that it has read, and until their history is
# removed, later folds pass them: so they are few. Transactions that have met in a slot use one of many at their next
# attempt; their start timestamps are close together, so these slots differ.
_SLOTS: Final = 4
_MORE_SLOTS: Final = 256

Values = Mapping[Column[Any, Any], Any]


NOTHING_KEPT: Final = pack_kept("", b"", [])
"""Stored for a group with members if its view keeps no aggregates: if it ever does, the group is counted."""


@dataclass(slots=True)
class Told:
    """The changes that one run makes to the members of groups, or to the right rows of a join.

    Attributes:
        copies: those that the run changes. (Now and then, they are of an earlier version of the view.)
    """

    view: Grouped | Joined
    copies: Copies
    _before: dict[Any, Values] = field(default_factory=dict)
    _changes: list[tuple[Any, Values | None]] = field(default_factory=list)
    _again: list[Any] = field(default_factory=list)

    async def read(self, txn: Transaction, keys: Iterable[Any]) -> None:
        """Read the members before the run's writes, if the groups keep aggregates of them."""
        if isinstance(self.view, Grouped) and self.view.deltas is not None:
            copies = self.copies
            for key in keys:  # a source row is in at most two groups
                row = await txn.row(copies.table, key, list(copies.columns.values()))
                self._before[key] = {mine: row[mine] for mine in copies.columns.values()}

    def change(self, key: Any, values: Values | None) -> None:
        """Note that a copy gets these values; None: it is deleted."""
        self._changes.append((key, values))

    def again(self, key: Any) -> None:
        """Note that the view must run again though the copy is the same, because it is of another version."""
        self._again.append(key)

    async def write(self, txn: Transaction, attempt: int) -> None:
        """Write what the changes add to the groups, and signal these. `attempt`: of the run."""
        view, split = self.view, self.copies.split
        if isinstance(view, Joined):
            for key in {split(key)[0]: None for key in [*self._again, *(key for key, _ in self._changes)]}:
                await turn(view, txn, key)
            return
        signalled: dict[Any, None] = {split(key)[0]: None for key in self._again}
        deltas: dict[Any, Delta] = {}
        for key, values in self._changes:
            group, _ = split(key)
            signalled[group] = None
            if view.deltas is not None:
                before, after = _member(view, self._before.get(key)), _member(view, values)
                delta = deltas.setdefault(group, Delta(view.shape, Tally.empty(view.sums)))
                delta.tally.change(view.sums, _summed(view, before), -1)
                delta.tally.change(view.sums, _summed(view, after), 1)
                if _move(view, txn, key, before, after) and delta.changed is not None:
                    delta.changed.add(view.members.table.row(key))
        for group, delta in deltas.items():
            await _add(view, txn, group, delta, attempt)
        for group in signalled:
            txn.signal(view.changed, group)  # V3


def _member(view: Grouped, values: Values | None) -> Values | None:
    """A member's values, by the source's columns; None: the row is no member."""
    found = {column: (values or {}).get(mine) for column, mine in view.members.columns.items()}
    return found if any(value is not None for value in found.values()) else None


def _summed(view: Grouped, member: Values | None) -> list[Any] | None:
    return None if member is None else [member[each.column] for each in view.sums]


def place_in(view: Grouped, order: Ordered, member: Any, value: Any) -> Any:
    """The key of a member in an order. `member`: the key of its copy."""
    group, rest = view.members.split(member)
    return *parts_of(view.table.key, group), order_key(order.column.codec, value), *rest


def _move(view: Grouped, txn: Transaction, member: Any, before: Values | None, after: Values | None) -> bool:
    """Move a member in the orders that the view keeps. Returns whether this changes anything."""
    moved = False
    for order, column in view.orders.items():
        encode, row = order.column.codec.encode, column.table.row
        old, new = ((each or {}).get(order.column) for each in (before, after))
        left, entered = (None if value is None else place_in(view, order, member, value) for value in (old, new))
        # Stored forms are compared: values that are equal may differ there.
        stays = left is not None and entered is not None and row(left) == row(entered)
        if left is not None and not stays:
            txn.delete(column, left)
            moved = True
        if entered is not None and not (stays and encode(old) == encode(new)):
            txn.set(column, entered, new)
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
        # A delta of another shape is left as it is: the fold that finds it counts the group's members.
        delta = there if there.shape != view.shape else delta
        if delta is not there:
            delta.merge(there)
    # Even if it all adds up to nothing now, write it: a run that folds the slot at the same time must notice.
    txn.set(view.deltas, key, delta.pack())


async def fold(
    view: Grouped, txn: Transaction, group: Any, stored: bytes | None, *, recount: bool = False
) -> Group[Any] | None:
    """Fold the deltas of a group (V4); returns the group with its aggregates, or None if it has no members.

    Args:
        stored: the group's `Kept`, packed.
        recount: count the members again, whatever is stored.
    """
    assert view.deltas is not None
    prefix = parts_of(view.table.key, group)
    found = Kept.of(stored, view.shape, view.sums, view.orders)
    # If nothing is stored, a group of the first version had no members. A group of a later version may not have been
    # counted.
    known = found.known and (stored is not None or view.version == 1) and not recount
    news = Delta(view.shape, found.tally)
    for slot in await txn.scan(view.deltas.table, prefix=prefix, columns=[view.deltas]).all():
        delta = Delta.unpack(slot[view.deltas] or b"")
        known = known and delta.shape == view.shape
        if known:
            news.merge(delta)
        txn.delete(view.deltas, slot.key)
    if known:
        assert found.tally.members >= 0, f"V4: group {group!r} of view {view.id!r} has {found.tally.members} members"
        await _follow(view, txn, prefix, found, news.changed)
    else:
        await _recount(view, txn, prefix, found)
    keep(view, txn, group, stored, found.pack())
    if not found.tally.members:
        return None
    ends: dict[Ordered, Sequence[tuple[Any, Any]]] = {}
    for order in view.orders:
        for last, size in (False, order.first), (True, order.last):
            if size:
                best = found.tops[order.column.first_name, last].best()
                members = [(_source_key(view, each.member), order.column.codec.decode(each.value)) for each in best]
                ends[Ordered(order.column, 0 if last else size, size if last else 0)] = members
    return Group(None, found.tally, view.sums, ends)


def keep(view: Grouped, txn: Transaction, group: Any, stored: bytes | None, packed: bytes | None) -> None:
    """Store the group's `Kept`, packed; None: the group has no members."""
    if packed is not None and packed != stored:
        txn.set(view.kept, group, packed)
    elif packed is None and stored is not None:
        txn.delete(view.kept, group)


def counted(view: Grouped, rows: Iterable[Row[Any]]) -> tuple[bytes, list[tuple[Column[Any, Any], Any, Any]]]:
    """What a group keeps of these members, the rows of its source, packed; and the cells of its orders: column, key and
    value."""
    if view.deltas is None:
        return NOTHING_KEPT, []
    found = Kept.of(None, view.shape, view.sums, view.orders)
    entries: dict[str, list[Entry]] = {order.column.first_name: [] for order in view.orders}
    cells: list[tuple[Column[Any, Any], Any, Any]] = []
    for row in rows:
        found.tally.change(view.sums, [row[each.column] for each in view.sums], 1)
        place = view.members.place(view.members.key_of(row), row.key)
        for order, column in view.orders.items():
            value = row[order.column]
            if value is not None:
                cells.append((column, place_in(view, order, place, value), value))
                entries[order.column.first_name].append(_entry(order, view.members.table.row(place), value))
    for (name, last), top in found.tops.items():
        some = sorted(entries[name])
        top.fill(some[-top.room :] if last else some[: top.room])
    packed = found.pack()
    assert packed is not None, "a group has members"
    return packed, cells


async def _recount(view: Grouped, txn: Transaction, prefix: tuple[Any, ...], found: Kept) -> None:
    """Count all members of a group again, and make its orders complete, because other aggregates were kept before."""
    found.tally = Tally.empty(view.sums)
    members = view.members
    places: dict[Ordered, dict[bytes, tuple[Any, Any]]] = {order: {} for order in view.orders}
    async for copy in txn.scan(members.table, prefix=prefix, columns=list(members.columns.values())):
        member = {column: copy[mine] for column, mine in members.columns.items()}
        found.tally.change(view.sums, _summed(view, member), 1)
        for order, column in view.orders.items():
            value = member[order.column]
            if value is not None:
                place = place_in(view, order, copy.key, value)
                places[order][column.table.row(place)] = place, value
    for order, column in view.orders.items():
        encode, wanted = order.column.codec.encode, places[order]
        async for row in txn.scan(column.table, prefix=prefix, columns=[column]):
            stored = column.table.row(row.key)
            if stored not in wanted:
                txn.delete(column, row.key)
            elif encode(row[column]) == encode(wanted[stored][1]):
                del wanted[stored]
        for place, value in wanted.values():
            txn.set(column, place, value)
    for name, last in found.tops:
        await _fill(view, txn, prefix, found, name, last)


async def _follow(
    view: Grouped, txn: Transaction, prefix: tuple[Any, ...], found: Kept, changed: set[bytes] | None
) -> None:
    """Bring the ends of the orders up to date with the members that have changed (None: too many to be listed)."""
    rows = {}
    if changed and view.orders:
        columns = [view.members.columns[order.column] for order in view.orders]
        for member in sorted(changed):
            rows[member] = await txn.row(view.members.table, view.members.table.key.decode(member), columns)
    for order in view.orders:
        tops = {last: top for (name, last), top in found.tops.items() if name == order.column.first_name}
        for member, row in rows.items():
            value = row[view.members.columns[order.column]]
            entry = None if value is None else _entry(order, member, value)
            for top in tops.values():
                top.change(member, entry)
        for last, top in tops.items():
            if changed is None or top.is_short:
                await _fill(view, txn, prefix, found, order.column.first_name, last)


async def _fill(view: Grouped, txn: Transaction, prefix: tuple[Any, ...], found: Kept, name: str, last: bool) -> None:
    """Fill the list of an end of an order from the index."""
    top = found.tops[name, last]
    ((order, column),) = [each for each in view.orders.items() if each[0].column.first_name == name]
    entries = []
    async for row in txn.scan(column.table, prefix=prefix, columns=[column], limit=top.room, reverse=last):
        member = view.members.table.row((*prefix, *row.key[len(prefix) + 1 :]))
        entries.append(_entry(order, member, row[column]))
    top.fill(entries)


def _entry(order: Ordered, member: bytes, value: Any) -> Entry:
    codec = order.column.codec
    return Entry(order_codec(codec).encode(order_key(codec, value)), member, codec.encode(value))


def _source_key(view: Grouped, member: bytes) -> Any:
    members = view.members
    return members.source_key(members.table.key.decode(member))
