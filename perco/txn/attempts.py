"""Runs a transaction, attempt after attempt, until an attempt commits.

T11 A retry runs the function, or the block, again, with a new start_ts; writes of a failed attempt are not replayed.
W3  A transaction that has conflicted takes its turn when an attempt begins, and gives it up when the attempt ends,
    whatever the outcome.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import trio

from perco.blocks import AsyncOnly
from perco.errors import NOTHING_WRITTEN, CommitUnknown, PercoWarning, TransientError, Unavailable, UsageError
from perco.protocol.reads import Isolation
from perco.txn.beginning import BLOCK, begin, starting
from perco.txn.engine import Engine
from perco.txn.retry import RetryOptions
from perco.txn.transaction import Transaction
from perco.txn.turns import Turn


def late(retry: RetryOptions, met: list[TransientError], txn: Transaction | None) -> Unavailable | CommitUnknown:
    """The error to raise when the time for all attempts is up; the last failure is its cause. `txn`: the last attempt's
    transaction, if any."""
    what = f"the transaction did not finish within {retry.timeout_s} s"
    if txn is not None and txn.outcome == "unknown":  # T4: the function caught CommitUnknown and went on
        return CommitUnknown(txn.token, what)
    commit_ts = txn.commit_ts if txn is not None else 0
    if met and not commit_ts:
        what += f", in {met[-1].attempts} attempts that failed (the last: {type(met[-1]).__name__})"
    late = Unavailable(what, commit_ts, NOTHING_WRITTEN)
    late.__cause__ = met[-1] if met else None
    return late


class Attempts(AsyncOnly):
    """The attempts of one transaction, until an attempt commits.

    async for attempt in db.attempts():
        async with attempt as txn:
            txn.set(...)

    The loop ends by itself. An attempt cannot see whether `break` or `return` has ended its block. So after
    `break`, the code behind the loop runs, and after `return`, the caller goes on, even if the commit conflicted; a
    PercoWarning then says that nothing was written.
    """

    _write = "async for attempt in db.attempts():"
    _scoped = True  # each attempt begins and ends in one task, so a cancel scope can enforce the deadline

    def __init__(
        self,
        engine: Engine,
        retry: RetryOptions,
        serializable: bool,
        function: str = BLOCK,
    ) -> None:
        self._function = function  # the function's past runs decide what is read ahead
        self._owed = False  # the last attempt failed, and the loop has not gone on to the next one
        self._engine, self._retry = engine, retry
        self._isolation: Isolation = "serializable" if serializable else "snapshot"
        self._failed = 0
        self._met: list[TransientError] = []  # the error of the last failed attempt, if any
        self._done = False
        self._used = True  # whether the last attempt has been entered
        self._turn: Turn | None = None  # set once an attempt has failed
        self._pause = False
        self._deadline = trio.current_time() + retry.timeout_s if retry.timeout_s is not None else None

    def __aiter__(self) -> Attempts:
        return self

    async def __anext__(self) -> Attempt:
        if self._done:
            raise StopAsyncIteration
        if not self._used:
            raise UsageError("the attempt was not used: write `async with attempt as txn:` inside the loop")
        self._used = self._owed = False
        if self._pause:
            assert self._turn is not None
            delay_s = self._retry.delay_s(self._turn.lost, self._engine.random)
            await trio.sleep(max(min(delay_s, self._left_s()), 0))
        self._check_time()
        return Attempt(self)

    def __del__(self) -> None:
        if self._owed:
            warnings.warn(
                "a loop over db.attempts() was left with `break` or `return` although its attempt conflicted with "
                "another transaction: nothing was written. Let the loop end by itself, or use db.run",
                PercoWarning,
                stacklevel=2,
            )

    def _left_s(self) -> float:
        return math.inf if self._deadline is None else self._deadline - trio.current_time()

    def _check_time(self) -> None:
        if self._deadline is not None and trio.current_time() >= self._deadline:
            raise late(self._retry, self._met, None)

    async def _begin(self) -> Transaction:
        """Wait for the turn, and begin the transaction. No turn is taken between attempts, where the program may leave
        the loop (W3)."""
        turn = self._turn
        if turn is None:
            return await self._begun(first=self._retry.attempts > 1)
        await turn.take(self._left_s())
        try:
            self._check_time()
            return await self._begun(first=False)
        except BaseException:
            turn.leave()
            raise

    async def _begun(self, *, first: bool) -> Transaction:
        return await begin(self._engine, self._isolation, self._function, first=first)

    def _has_met(self, error: TransientError) -> None:
        """Note the cells on which an attempt conflicted: the next attempt takes a turn there."""
        if self._turn is None:
            self._turn = Turn(self._engine.lines, self._retry.turn_s)
        self._pause = self._turn.met(error.met_on)


class Attempt:
    """One attempt: a context manager that returns the transaction, commits it at the end of the block, and swallows a
    TransientError if another attempt will follow."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._txn: Transaction | None = None
        self._scope: trio.CancelScope | None = None
        if attempts._scoped and attempts._deadline is not None:
            self._scope = trio.CancelScope(deadline=attempts._deadline)

    async def __aenter__(self) -> Transaction:
        self._attempts._used = True
        if self._scope is not None:
            self._scope.__enter__()
        try:
            self._txn = txn = await self._attempts._begin()
        except BaseException as error:
            self._leave_scope(error)
            raise
        return txn

    def _leave_scope(self, error: BaseException | None) -> None:
        """Raises: Unavailable in place of a cancellation by the deadline."""
        scope, attempts = self._scope, self._attempts
        if scope is None:
            return
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        if scope.__exit__(kind, error, trace) and error is not None:
            raise late(attempts._retry, attempts._met, self._txn)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"an attempt has no {name!r}: write `async with attempt as txn:` and use txn")

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        try:
            swallowed = await self._end(error)
        except BaseException as raised:
            self._leave_scope(raised)
            raise
        self._leave_scope(None)
        return swallowed

    async def _end(self, error: BaseException | None) -> bool:
        txn, attempts = self._txn, self._attempts
        assert txn is not None
        txn._fails(error)
        try:
            if error is None:
                if txn.outcome == "open":
                    await txn.commit()
                attempts._done = True
                return False
            raise error
        except TransientError as met:
            attempts._failed += 1
            if txn.outcome == "committed":
                raise
            met.attempts = attempts._failed
            if attempts._failed >= attempts._retry.attempts:
                raise
            attempts._met = [_without_frames(met)]  # tracebacks would keep an abandoned loop alive
            attempts._owed = True
            attempts._has_met(met)
            return True
        finally:
            txn.discard()
            if attempts._turn is not None:
                attempts._turn.leave()


class AttemptsOutside(Attempts):
    """Attempts whose function runs outside the store's event loop: no cancel scope enforces their deadline; the caller
    does.

    Args:
        late_s: how many seconds of the time for all attempts have already passed.
        at_once: each attempt begins with its first call. So its first read may draw the timestamp, and the function is
            never hasty.
    """

    _scoped = False

    def __init__(
        self,
        engine: Engine,
        retry: RetryOptions,
        serializable: bool,
        function: str,
        late_s: float = 0.0,
        *,
        at_once: bool = False,
    ) -> None:
        super().__init__(engine, retry, serializable, function)
        self._at_once = at_once
        if self._deadline is not None:
            self._deadline -= late_s

    async def _begun(self, *, first: bool) -> Transaction:
        self._engine.usable(writing=True)
        late = None
        if self._at_once:
            serializable = self._isolation == "serializable"
            late = starting(self._engine, serializable, self._function, watched=False, first=first)
        return late or await super()._begun(first=first)

    @property
    def done(self) -> bool:
        """Whether an attempt has committed."""
        return self._done

    def begun(self, txn: Transaction) -> Attempt:
        """The first attempt, with a transaction that has already begun."""
        attempt = Attempt(self)
        attempt._txn = txn
        txn._first = self._retry.attempts > 1
        return attempt

    def leave(self) -> None:
        """End without another attempt: the caller gets the error."""
        self._owed = False

    def late(self, txn: Transaction | None) -> Unavailable | CommitUnknown:
        """The error to raise when the time is up. `txn`: the last attempt's transaction, if any."""
        return late(self._retry, self._met, txn)


def _without_frames(error: TransientError) -> TransientError:
    """The error, after removing its traceback and those of the errors that caused it."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error
