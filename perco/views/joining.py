"""Joins: each left row with the right rows that have the same key.

The left row is the owner of what its pairs give, so a change of a left row costs one run, however many left rows share
its key. A change of a right row reaches the left rows in two steps: it signals the key, and the key's run signals the
left rows, some at a time.

V8  A left row's run and a change of a right row with the same key do not miss each other: the run reads the key's cell
    `turned` under a read lock (T14), and the change writes this cell. So either the run has seen the right row, or the
    run committed first: then the key's run, which the change has signalled, finds the left row among those of its key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from perco.errors import UsageError
from perco.schema.schema import Change
from perco.txn.row import Row
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction
from perco.views.compiled import Joined, key_of, parts_of
from perco.views.rows import Put

_AT_ONCE: Final = 1000  # left rows that a key's run signals; a chain may have a hundred such runs (N9)


async def pairs(view: Joined, txn: Transaction, row: Row[Any]) -> Iterable[Put[Any]]:
    """The rows that a left row gives, its place among the left rows of its key included."""
    key = view.on(row)
    if key is None:
        return view.gives(row, ())
    await txn.get(view.turned, key, lock=True)  # V8
    found = await matches(view, txn, row.key, key)
    place = (*parts_of(view.keys.key, key), *parts_of(view.table.key, row.key))
    return [Put(view.lefts, place, {view.left: True}), *view.gives(row, found)]


async def matches(view: Joined, snap: Snapshot, left: Any, key: Any) -> list[Row[Any]]:
    """The right rows with a key. Raises: UsageError, which names the left row `left`, if there are too many."""
    copies, most = view.rights, view.matches_max
    head, columns = parts_of(view.keys.key, key), list(copies.columns.values())
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
    key, head = change.key, parts_of(view.keys.key, change.key)
    reached = await txn.get(view.reached, key)
    start = None if reached is None else view.lefts.key.decode(reached)
    scan = txn.scan(view.lefts, prefix=head, start=start, columns=[view.left], limit=_AT_ONCE + 1)
    places = [row.key async for row in scan]
    for place in places[:_AT_ONCE]:
        txn.signal(view.again, key_of(view.table.key, place[len(head) :]))
    if len(places) > _AT_ONCE:
        txn.set(view.reached, key, view.lefts.row(places[_AT_ONCE]))
        txn.signal(view.changed, key)
    elif reached is not None:
        txn.delete(view.reached, key)


def turn(view: Joined, txn: Transaction, right: Any) -> None:
    """Note, in the transaction that changes a right row, that the left rows of its key must run again (V8).

    Args:
        right: the key of the right row's copy.
    """
    key, _ = view.rights.split(right)
    txn.delete(view.turned, key)
    txn.delete(view.reached, key)  # begin with the first left row again
    txn.signal(view.changed, key)
