"""Runs a transaction, attempt after attempt, in the calling thread (T11)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Concatenate, ParamSpec, TypeVar

from perco.blocks import BlockingOnly
from perco.errors import PercoError, UsageError
from perco.fronts.tries import Tries, must_give, tell
from perco.sync.held import Transaction
from perco.sync.threads import Port, Threads
from perco.txn.engine import Engine
from perco.txn.retry import RetryOptions

P = ParamSpec("P")
T = TypeVar("T")


class Attempt(BlockingOnly):
    """One attempt: a context manager that returns the transaction, commits it at the end of the block, and swallows a
    TransientError if another attempt will follow."""

    _write = "with attempt as txn:"

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._txn: Transaction | None = None

    def __enter__(self) -> Transaction:
        attempts = self._attempts
        attempts._used = True
        txn = self._txn = Transaction(attempts._port, attempts._tries.engine, None, attempts._tries)
        txn._there()
        return txn

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        assert self._txn is not None
        return finish(self._txn, error)


def finish(txn: Transaction, error: BaseException | None) -> bool:
    """End an attempt. Returns True if the block or its commit raised an error after which another attempt follows."""
    tries = txn._tries
    assert tries is not None
    if txn._ended and txn._begun is None:
        return False  # discarded before it began

    async def at_end() -> bool:
        begun = await txn._begin() if txn._of is None else txn._begun
        assert begun is not None
        if txn._noted:
            if error is None and begun.outcome == "open":
                txn._write(begun)
            txn._noted.clear()
        return await tries.finish(error)

    async def in_time() -> bool:
        again: bool = await tries.in_time(lambda: txn._begun, at_end)
        return again

    try:
        return txn._port.ask(at_end if error is not None else in_time, (), {}, error is None)
    except BaseException as raised:
        if error is None:
            if tries.began:  # interrupted before the loop took the call
                finish(txn, raised)
            if isinstance(raised, KeyboardInterrupt):
                tell(raised, txn._begun)
        elif isinstance(raised, PercoError) and isinstance(txn._port, Threads) and txn._port.closed is not None:
            txn.discard()
            return False  # there is only `error` to report
        raise
    finally:
        txn._ended = True


class Attempts(BlockingOnly):
    """The attempts of one transaction, until an attempt commits.

    for attempt in db.attempts():
        with attempt as txn:
            txn.set(...)

    The loop ends by itself: do not leave it with `break` or `return`.
    """

    _write = "for attempt in db.attempts():"

    def __init__(self, port: Port, tries: Tries) -> None:
        self._port, self._tries = port, tries
        self._used = True

    def __iter__(self) -> Attempts:
        return self

    def __next__(self) -> Attempt:
        if self._tries.done:
            raise StopIteration
        if not self._used:
            raise UsageError("the attempt was not used: write `with attempt as txn:` inside the loop")
        self._used = False
        return Attempt(self)


class Retrying:
    """`run` and `attempts` with limits and isolation of their own; made by `db.options(...)`."""

    def __init__(self, port: Port, engine: Engine, retry: RetryOptions, serializable: bool) -> None:
        self._port, self._engine, self._retry, self._serializable = port, engine, retry, serializable

    def run(self, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Like `Database.run`."""
        must_give(function, "a function")
        tries = Tries(self._engine, self._retry, self._serializable, function, at_once=True)
        while True:
            txn = Transaction(self._port, self._engine, None, tries)
            ending = False
            try:
                result = function(txn, *args, **kwargs)
                if isinstance(result, Coroutine):
                    result.close()
                    raise UsageError(f"perco.sync's db.run takes a plain function; {function!r} is an `async def`")
                ending = True
                if not finish(txn, None):
                    return result
            except BaseException as error:
                if (ending and not tries.began) or not finish_failed(txn, error) or ending:
                    tries.leave()
                    if isinstance(error, KeyboardInterrupt):
                        tell(error, txn._begun)
                    raise

    def attempts(self) -> Attempts:
        """Like `Database.attempts`."""
        return Attempts(self._port, Tries(self._engine, self._retry, self._serializable))


def finish_failed(txn: Transaction, error: BaseException) -> bool:
    """End an attempt after an error in the function. Returns whether to run the function again."""
    tries = txn._tries
    assert tries is not None
    if not tries.began:
        txn._ended = True
        return False  # nothing has happened yet
    return finish(txn, error)
