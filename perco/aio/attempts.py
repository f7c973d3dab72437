"""Runs a transaction, attempt after attempt, in the calling task (T11)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from perco.aio.guest import Guests, must_be_on
from perco.aio.held import Transaction
from perco.blocks import AsyncOnly
from perco.errors import PercoError, UsageError
from perco.fronts.tries import Tries, must_give, tell
from perco.txn.engine import Engine
from perco.txn.retry import RetryOptions

P = ParamSpec("P")
T = TypeVar("T")


async def _begin(port: Guests, tries: Tries) -> Transaction:
    """Begin the next attempt's transaction. For the first attempt, do this without `Guests.ask` if possible."""
    must_be_on(port.loop)
    begun = tries.begin_nowait() if port.closed is None else None
    if begun is not None:
        return Transaction(port, tries.engine, begun, tries)
    return Transaction(port, tries.engine, await port.ask(tries.in_time, (lambda: None, tries.begin), {}, True), tries)


async def _finish(txn: Transaction, error: BaseException | None) -> bool:
    """End an attempt. Returns whether another attempt follows, because the block or its commit raised an error."""
    tries = txn._tries
    assert tries is not None

    async def at_end() -> bool:
        return await tries.finish(error)

    try:
        if error is not None:
            return await txn._port.ask(at_end, (), {})
        again: bool = await txn._port.ask(tries.in_time, (lambda: txn._of, at_end), {}, True)
        return again
    except BaseException as raised:
        if error is None:
            if tries.began:  # cancelled before the loop took the call
                await _finish(txn, raised)
            if isinstance(raised, asyncio.CancelledError):
                tell(raised, txn._of)
        elif isinstance(raised, PercoError) and txn._port.closed is not None:
            txn._of.discard()
            return False  # there is only `error` to report
        raise


class Attempt:
    """One attempt: a context manager that returns the transaction, commits it at the end of the block, and swallows a
    TransientError if another attempt will follow."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._txn: Transaction | None = None

    async def __aenter__(self) -> Transaction:
        attempts = self._attempts
        attempts._used = True
        txn = self._txn = await _begin(attempts._port, attempts._tries)
        if txn._limit is not None:
            txn._limit.begin()
        return txn

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        assert self._txn is not None
        raised = error if self._txn._limit is None else self._txn._limit.end(error)
        swallowed = await _finish(self._txn, raised)
        if raised is not error and raised is not None:
            raise raised from raised.__cause__
        return swallowed


class Attempts(AsyncOnly):
    """The attempts of one transaction, until an attempt commits.

    async for attempt in db.attempts():
        async with attempt as txn:
            txn.set(...)

    The loop ends by itself: do not leave it with `break` or `return`.
    """

    _write = "async for attempt in db.attempts():"

    def __init__(self, port: Guests, tries: Tries) -> None:
        self._port, self._tries = port, tries
        self._used = True

    def __aiter__(self) -> Attempts:
        return self

    async def __anext__(self) -> Attempt:
        if self._tries.done:
            raise StopAsyncIteration
        if not self._used:
            raise UsageError("the attempt was not used: write `async with attempt as txn:` inside the loop")
        self._used = False
        return Attempt(self)


class Retrying:
    """`run` and `attempts` with limits and isolation of their own; made by `db.options(...)`."""

    def __init__(self, port: Guests, engine: Engine, retry: RetryOptions, serializable: bool) -> None:
        self._port, self._engine, self._retry, self._serializable = port, engine, retry, serializable

    async def run(
        self, function: Callable[Concatenate[Transaction, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Like `Database.run`."""
        must_give(function, "an `async def` function")
        tries = Tries(self._engine, self._retry, self._serializable, function)
        try:
            return await self._run(tries, function, args, kwargs)
        except BaseException:
            tries.leave()
            raise

    async def _run(
        self, tries: Tries, function: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> T:
        while True:
            txn = await _begin(self._port, tries)
            ending = False
            try:
                running = function(txn, *args, **kwargs)
                if not inspect.isawaitable(running):
                    raise UsageError(f"db.run takes an `async def` function; {function!r} returned {running!r}")
                result = await (running if txn._limit is None else txn._limit.over(running))
                ending = True
                if not await _finish(txn, None):
                    return result
            except BaseException as error:
                if ending or not await _finish(txn, error):
                    raise

    def attempts(self) -> Attempts:
        """Like `Database.attempts`."""
        return Attempts(self._port, Tries(self._engine, self._retry, self._serializable))
