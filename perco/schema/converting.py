"""Fills a column with the converted values of another one: the function of an observer.

N19 The target gets the converted value of the source's newest change, unless a program has written the target with that
    change, or since. A hidden column beside the target has the version of the conversion, and the commit timestamp of
    the change that it has converted. It is written with the target, so the two have the same commit timestamp, unless a
    program has written the target since. It is dropped with the target, and all conversions into the target share it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


def mark_of(target: str) -> str:
    """The name of the hidden column beside a target. `target`: its oldest name."""
    return f"_converted {target}"


def observer(
    target: Any, mark: Any, version: int, convert: Callable[[Any], Any]
) -> Callable[[Any, Any], Awaitable[None]]:
    """The function of the observer of the source.

    Args:
        target: a `Column`.
        mark: the hidden column.
        convert: of a value of the source.
    """

    async def run(txn: Any, change: Any) -> None:
        found = await txn.row(target.table, change.key, [target, mark])
        written, marked = found.commit_ts(target), found.commit_ts(mark)
        _, seen, absent = found[mark] or (0, 0, False)
        newer = written >= change.commit_ts or seen == change.commit_ts
        removed = absent and not written  # the vacuum has removed the trace of the conversion's own delete
        if written != marked and newer and not removed:
            return  # a program has written the target since the change
        value = None if change.value is None else convert(change.value)
        if value is None and found[target] is None and not marked:
            return
        if value is None:
            txn.delete(target, change.key)
        else:
            txn.set(target, change.key, value)
        txn.set(mark, change.key, [version, change.commit_ts, value is None])

    return run
