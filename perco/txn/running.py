"""`db.run`: runs a function in a transaction, attempt after attempt, until one commits; also single transaction blocks.

T10 If a deadline or a cancellation comes before the commit is sent, the transaction has not committed.
T11 A retry runs the function again, with a new start_ts; the writes of a failed attempt are never replayed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

import trio

from perco.blocks import AsyncOnly
from perco.errors import TransientError, UsageError
from perco.protocol.reads import Isolation
from perco.txn.attempts import Attempts, late
from perco.txn.beginning import begin, begun, is_hasty, starting
from perco.txn.engine import Engine
from perco.txn.prefetch import name_of
from perco.txn.retry import RetryOptions
from perco.txn.starting import NotStarted, was_hasty
from perco.txn.transaction import Transaction
from perco.txn.turns import Turn

P = ParamSpec("P")
T = TypeVar("T")


def run(
    engine: Engine,
    retry: RetryOptions,
    serializable: bool,
    function: Callable[..., Awaitable[T]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Coroutine[Any, Any, T]:
    """The coroutine that `db.run` returns."""
    how = attempts if retry.timeout_s is None else _until
    running = how(engine, retry, serializable, function, args, kwargs)
    running.__qualname__ = "Database.run"  # type: ignore[attr-defined]  # for Python's "never awaited" warning
    return running


async def _until(
    engine: Engine,
    retry: RetryOptions,
    serializable: bool,
    function: Callable[..., Awaitable[T]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> T:
    assert retry.timeout_s is not None
    _must_be_async(function, None)
    last: list[Transaction] = []
    met: list[TransientError] = []

    @functools.wraps(function)
    def noted(txn: Transaction, *args: Any, **kwargs: Any) -> Awaitable[T]:
        last[:] = [txn]
        return function(txn, *args, **kwargs)

    with trio.move_on_after(retry.timeout_s):
        return await attempts(engine, retry, serializable, noted, args, kwargs, met)
    raise late(retry, met, last[0] if last else None)


async def attempts(
    engine: Engine,
    retry: RetryOptions,
    serializable: bool,
    function: Callable[..., Awaitable[T]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    met: list[TransientError] | None = None,
) -> T:
    """Run attempts until one commits. `met`: filled with the last failure."""
    failed = 0
    turn: Turn | None = None  # set once an attempt has failed
    background, place = engine.background, engine.place
    while True:
        if background.ended or place.forked or engine.readonly:
            engine.usable(writing=True)
        start_ts = engine.oracle.draw_nowait()
        named = not start_ts or engine.prefetch.on or engine.spans is not None
        name = name_of(function) if named else ""
        first = turn is None and retry.attempts > 1
        txn = None if start_ts else starting(engine, serializable, name, first=first)
        if txn is None:
            txn = begun(engine, start_ts or await engine.oracle.draw(), serializable, name, first=first)
        running: Awaitable[T] | None = None
        try:
            running = function(txn, *args, **kwargs)
            if running is None:
                raise UsageError("db.run takes an `async def` function")
            result = await running
            if txn.outcome == "open":
                await txn.commit()
            elif was_hasty(txn):
                raise NotStarted
            return result
        except BaseException as error:
            txn._fails(error)
            if was_hasty(txn) and isinstance(error, Exception):
                is_hasty(engine, name)
                met_on = None
            elif isinstance(error, TransientError):
                failed += 1
                if met is not None:
                    met.append(error)
                    del met[:-1]
                if txn.outcome == "committed":  # by the function itself: do not run it again
                    raise
                error.attempts = failed
                if failed >= retry.attempts:
                    raise
                met_on = error.met_on
            else:
                if isinstance(error, TypeError):
                    _must_be_async(function, running)
                raise
        finally:
            txn.discard()
            if turn is not None:
                turn.leave()
        if met_on is not None:
            if turn is None:
                turn = Turn(engine.lines, retry.turn_s)
            if turn.met(met_on):
                await trio.sleep(retry.delay_s(turn.lost, engine.random))
        if turn is not None:
            await turn.take()


def _must_be_async(function: object, running: object) -> None:
    """Raise UsageError if `function` is not callable, or if what it returned (`running`) is not awaitable."""
    if not callable(function):
        if inspect.iscoroutine(function):
            function.close()
        raise UsageError(
            f"db.run takes an `async def` function, and then its arguments: db.run(function, ...), not {function!r}"
        ) from None
    if running is not None and not inspect.isawaitable(running):
        raise UsageError(f"db.run takes an `async def` function; {function!r} returned {running!r}") from None


class Retrying:
    """`run` and `attempts` with limits and isolation of their own; made by `db.options(...)`."""

    def __init__(self, engine: Engine, retry: RetryOptions, serializable: bool) -> None:
        self._engine, self._retry, self._serializable = engine, retry, serializable

    def run(
        self, function: Callable[Concatenate[Transaction, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Like `Database.run`."""
        return run(self._engine, self._retry, self._serializable, function, args, kwargs)

    def attempts(self) -> Attempts:
        """Like `Database.attempts`."""
        return Attempts(self._engine, self._retry, self._serializable)


class TransactionBlock(AsyncOnly):
    """`async with db.transaction() as txn:`: one attempt, which commits at the end of the block."""

    _write = "async with db.transaction() as txn:"

    def __init__(self, engine: Engine, isolation: Isolation | None) -> None:
        self._engine, self._isolation = engine, isolation
        self._txn: Transaction | None = None

    async def __aenter__(self) -> Transaction:
        if self._txn is not None:
            raise UsageError("a transaction's block can be entered only once; call db.transaction() again")
        txn = self._txn = await begin(self._engine, self._isolation)
        return txn

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        txn = self._txn
        assert txn is not None
        try:
            txn._fails(error)
            if error is None and txn.outcome == "open":
                await txn.commit()
        finally:
            txn.discard()
