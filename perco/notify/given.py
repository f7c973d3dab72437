"""The change that the function of an observer is given, and its time limit."""

from __future__ import annotations

from typing import Any

import trio

from perco.protocol.claim import Run
from perco.protocol.snapshot import Missing, Value
from perco.schema.codecs import decoded, decoded_key
from perco.schema.schema import Change, Column, Observer
from perco.txn.transaction import Transaction


def change_of(observer: Observer, row: bytes, seen: Value | Missing, attempt: int, run: Run) -> Change[Any, Any]:
    """The change that a run is given. Raises: what the codecs raise."""
    column = observer.column
    table = column.table
    key = decoded_key(table.key, row, table.name)
    value = None
    if isinstance(column, Column) and isinstance(seen, Value):
        value = decoded(column.codec, seen.value, column, key)
    return Change(key, value, seen.commit_ts, attempt, run.root, run.depth)


async def in_time(observer: Observer, txn: Transaction, change: Change[Any, Any]) -> None:
    """Call the function of an observer with a timeout. A thread cannot be stopped, so it may return later than that.

    Raises: TimeoutError, unless the function has committed by then; the errors of the function.
    """
    with trio.move_on_after(observer.limits.timeout_s) as scope:
        await observer.function(txn, change)
    if scope.cancel_called and txn.outcome != "committed":
        raise TimeoutError(f"observer {observer.id!r} was cancelled after timeout_s={observer.limits.timeout_s:g}")
