"""Joins: each left row with the right rows that have the same key.

The left row is the owner of what its pairs give, so a change of a left row costs one run, however many left rows share
its key. A change of a right row is noted by a transaction, which signals the left rows with its key if these are few.
If they are many, it signals the key, and the key's run signals the left rows, some at a time.

V8  A left row's run and the transaction that notes a change of a right row with the same key do not miss each other:
    the run locks the key's cell `turned` like a read (T14), and the transaction writes this cell. So either the
    run has seen the right row, or the run committed before the transaction began: then the left row is among those of
    the key that are signalled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from perco.errors import UsageError
from perco.schema.schema import Change
from perco.txn.inside import lock
from perco.txn.row import Row
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction
from perco.views.compiled import Joined, codecs_of, key_of, parts_of
from perco.views.rows import Put

_AT_ONCE: Final = 1000  # left rows that a key's run signals; a chain may have a hundred such runs (N9)
_FEW: Final = 8  # so many left rows are signalled without a run of their key


async def pairs(view: Joined, txn: Transaction, row: Row[Any]) -> Iterable[Put[Any]]:
    """The rows that a left row gives, its place among the left rows of its key included."""
    key = view.on(row)
    if key is None:
        return view.gives(row, ())
    lock(txn, view.turned, key)  # V8
    found = await matches(view, txn, row.key, key)
    if view.lefts is None:
        return view.gives(row, found)
    place, left = (*parts_of(view.key, key), *parts_of(view.table.key, row.key)), view.lefts.left
    return [Put(left.table, place, {left: True}), *view.gives(row, found)]


async def matches(view: Joined, snap: Snapshot, left: Any, key: Any) -> list[Row[Any]]:
    """The right rows with a key. Raises: UsageError, which names the left row `left`, if there are too many."""
    copies, most = view.rights, view.matches_max
    if copies.in_place:
        right = await snap.row(copies.source, key, list(copies.columns))
        return [right] if any(right[column] is not None for column in copies.columns) else []
    head, columns = parts_of(view.key, key), list(copies.columns.values())
    found = [
        copies.original(copy) async for copy in snap.scan(copies.table, prefix=head, columns=columns, limit=most + 1)
    ]
    if len(found) > most:
        raise UsageError(
            f"view {view.id!r}: left row {left!r} matches more than {most} right row(s), and a run "
            "reads them all: raise matches_max, or join the other way round"
        )
    return found


async def run_key(view: Joined, txn: Transaction, change: Change[Any, Any]) -> None:
    """Signal the left rows of a key whose right rows have changed, from where an earlier run has stopped."""
    lefts = view.lefts
    if lefts is None:
        return  # the signal is of an earlier version
    key, head, left = change.key, parts_of(view.key, change.key), lefts.left
    reached = await txn.get(lefts.reached, key)
    start = None if reached is None else left.table.key.decode(reached)
    scan = txn.scan(left.table, prefix=head, start=start, columns=[left], limit=_AT_ONCE + 1)
    places = [row.key async for row in scan]
    for place in places[:_AT_ONCE]:
        txn.signal(view.again, _left_of(view, place))
    if len(places) > _AT_ONCE:
        txn.set(lefts.reached, key, left.table.row(places[_AT_ONCE]))
        txn.signal(lefts.changed, key)
    elif reached is not None:
        txn.delete(lefts.reached, key)


async def turn(view: Joined, txn: Transaction, key: Any) -> None:
    """Note, in a transaction that has seen a change of a right row, that the left rows of its key run again (V8)."""
    txn.delete(view.turned, key)
    lefts = view.lefts
    if lefts is None:
        if await txn.get(view.memory, key) is not None:
            txn.signal(view.again, key)
        return
    scan = txn.scan(lefts.left.table, prefix=parts_of(view.key, key), columns=[lefts.left], limit=_FEW + 1)
    places = [row.key async for row in scan]
    if len(places) <= _FEW:
        for place in places:
            txn.signal(view.again, _left_of(view, place))
        return
    txn.delete(lefts.reached, key)  # begin with the first left row again
    txn.signal(lefts.changed, key)


def _left_of(view: Joined, place: tuple[Any, ...]) -> Any:
    return key_of(view.table.key, place[len(codecs_of(view.key)) :])
