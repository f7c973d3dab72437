"""Observers that are plain functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Final, TypeVar

import trio

from perco.errors import UsageError
from perco.fronts.tries import must_give
from perco.schema.schema import Change, ObserverFunction
from perco.sync.held import Transaction
from perco.sync.threads import FromThread
from perco.txn.inside import engine_of
from perco.txn.transaction import Transaction as _Transaction

K = TypeVar("K")
V = TypeVar("V")

OBSERVER_THREADS: Final = 32
"""The largest number of threads in which `perco.sync.observer` runs functions, for all stores of a loop together."""


_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("perco.sync.observer")


def observer(function: Callable[[Transaction, Change[K, V]], None]) -> ObserverFunction[K, V]:
    """Make a plain function an observer: it runs in a thread, and may block.

        @schema.observe(body, id="count words")
        @perco.sync.observer
        def count(txn, change):
            txn.set(words, change.key, len((change.value or "").split()))

    It works with every worker, those of `perco` and `perco.aio` included. There are at most `OBSERVER_THREADS` such
    threads; further runs wait for a thread, even if the worker's concurrency is higher. When the worker ends, it waits
    for the functions that are running; their next read raises an error.
    """
    must_give(function, "a function", "perco.sync.observer")
    if inspect.iscoroutinefunction(function):
        raise _is_async(function)

    @functools.wraps(function)
    async def in_thread(txn: _Transaction, change: Change[K, V]) -> None:
        try:
            limiter = _limiter.get()
        except LookupError:
            limiter = trio.CapacityLimiter(OBSERVER_THREADS)
            _limiter.set(limiter)
        outside = Transaction(FromThread(), engine_of(txn), txn)
        result: object = await trio.to_thread.run_sync(function, outside, change, limiter=limiter)
        if isinstance(result, Coroutine):
            result.close()
            raise _is_async(function)
        if txn.outcome == "open":
            outside._write(txn)

    del in_thread.__dict__["__wrapped__"]  # a check for `async def` must find this wrapper
    return in_thread


def _is_async(function: object) -> UsageError:
    return UsageError(
        f"perco.sync.observer takes a plain function; {function!r} is an `async def`: decorate it with "
        "@perco.aio.observer if it awaits asyncio, and with neither of them if it awaits trio"
    )
