"""Observers whose functions await asyncio."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import trio

from perco.aio.guest import portal_of
from perco.aio.held import Transaction
from perco.errors import UsageError
from perco.fronts.tries import must_give
from perco.schema.schema import Change, ObserverFunction
from perco.txn.inside import engine_of
from perco.txn.transaction import Transaction as _Transaction

K = TypeVar("K")
V = TypeVar("V")


def observer(
    function: Callable[[Transaction, Change[K, V]], Coroutine[Any, Any, None]],
) -> ObserverFunction[K, V]:
    """Make a function that awaits asyncio an observer: it runs as a task of the loop that opened the store.

        @schema.observe(url, id="fetch")
        @perco.aio.observer
        async def fetch(txn, change):
            answer = await client.get(change.value)           # httpx under asyncio
            txn.set(body, change.key, answer.text)

    Only for stores opened with `perco.aio.open`: for other stores, `db.worker()` and `perco worker` refuse to start.
    """
    must_give(function, "an `async def` function", "perco.aio.observer")
    inner = inspect.unwrap(function)
    if inspect.isroutine(inner) and not inspect.iscoroutinefunction(inner):
        raise UsageError(
            f"perco.aio.observer takes an `async def` function; {function!r} is a plain one: "
            "decorate it with @perco.sync.observer"
        )

    @functools.wraps(function)
    async def on_asyncio(txn: _Transaction, change: Change[K, V]) -> None:
        engine = engine_of(txn)
        portal = portal_of(engine)
        running = function(Transaction(portal, engine, txn), change)
        if not asyncio.iscoroutine(running):
            raise UsageError(f"perco.aio.observer takes an `async def` function; {function!r} returned {running!r}")
        me = trio.lowlevel.current_task()
        task = portal.loop.create_task(running)
        task.add_done_callback(lambda _: trio.lowlevel.reschedule(me))
        cancelled: list[trio.lowlevel.RaiseCancelT] = []

        def abort(raise_cancel: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            cancelled.append(raise_cancel)
            task.cancel("the worker ends")
            return trio.lowlevel.Abort.FAILED  # the run goes on when the task has ended

        await trio.lowlevel.wait_task_rescheduled(abort)
        if task.cancelled():
            if cancelled:
                cancelled[0]()
            raise UsageError("another task cancelled the task of this observer")
        error = task.exception()
        if error is not None:
            raise error

    on_asyncio.perco_needs = portal_of  # type: ignore[attr-defined]  # called before a worker starts
    del on_asyncio.__dict__["__wrapped__"]  # introspection of the observer must find this wrapper
    return on_asyncio
