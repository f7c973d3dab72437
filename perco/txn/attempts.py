"""One transaction, attempt after attempt, until one commits.

T11 A retry runs the function, or the block, again, with a new start_ts; writes of a failed attempt are not replayed.
W3  A transaction that has conflicted takes its turn when an attempt begins, and leaves it when that ends, however it
    ends.
"""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from perco.errors import (
    NOTHING_WRITTEN,
    AsyncOnly,
    CommitUnknown,
    PercoWarning,
    TransientError,
    Unavailable,
    UsageError,
)
from perco.options import check_options
from perco.txn.reads import Isolation
from perco.txn.transaction import Transaction
from perco.txn.turns import Turn

if TYPE_CHECKING:
    from perco.txn.client import Client


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryOptions:
    """How a transaction that met a TransientError is run again.

    Attributes:
        attempts: how often at most, the first one included.
        timeout_s: for all attempts together; None: no limit.
        backoff_s, backoff_max_s: the wait before attempt n is random within backoff_s * 2^n, capped.
        turn_s: how long an attempt that met others of this process on a cell waits at most until it is its turn there
            (`turns.py`); then it tries out of turn. The first time that it stands in a cell's line there is no other
            wait: n counts the attempts that failed all the same. 0: no turns, every attempt waits as above.
    """

    attempts: int = 64
    timeout_s: float | None = None
    backoff_s: float = 0.001
    backoff_max_s: float = 0.5
    turn_s: float = 5.0

    def __post_init__(self) -> None:
        check_options(self)

    def delay_s(self, failed: int, rng: random.Random) -> float:
        """How long to wait after so many failed attempts."""
        return rng.uniform(0, min(self.backoff_s * 2.0 ** min(failed, 64), self.backoff_max_s))


def late(retry: RetryOptions, met: list[TransientError], txn: Transaction | None) -> Unavailable | CommitUnknown:
    """The error when the time for all attempts is up, caused by the last conflict. `txn`: of the last attempt."""
    what = f"the transaction did not get through within {retry.timeout_s} s"
    if txn is not None and txn.outcome == "unknown":  # T4: its function continued all the same
        return CommitUnknown(txn.token, what)
    commit_ts = txn.commit_ts if txn is not None else 0
    if met and not commit_ts:
        what += f", in {met[-1].attempts} attempts that met others (the last: {type(met[-1]).__name__})"
    late = Unavailable(what, commit_ts, NOTHING_WRITTEN)
    late.__cause__ = met[-1] if met else None
    return late


class Attempts(AsyncOnly):
    """Attempts of one transaction, until one commits.

    async for attempt in db.attempts():
        async with attempt as txn:
            txn.set(...)

    The loop ends by itself. Python does not tell an attempt whether `break` or `return` has ended its block, so who
    leaves the loop with one of these goes on even if the commit met another one; PercoWarning then says that nothing
    was written.
    """

    _write = "async for attempt in db.attempts():"

    def __init__(
        self,
        client: Client,
        retry: RetryOptions,
        serializable: bool,
        function: str = "transaction",
        *,
        scoped: bool = True,
    ) -> None:
        self._function = function  # by whose past it is read ahead
        self._scoped = scoped  # each attempt begins and ends in one task, so a cancel scope can hold its deadline
        self._owed = False  # the last attempt met another transaction, and nobody has asked for the next one
        self._client, self._retry = client, retry
        self._isolation: Isolation = "serializable" if serializable else "snapshot"
        self._failed = 0
        self._met: list[TransientError] = []  # the last
        self._done = False
        self._used = True  # the attempt that was given last
        self._turn: Turn | None = None  # once it has met others
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
            delay_s = self._retry.delay_s(self._turn.lost, self._client.random)
            await trio.sleep(max(min(delay_s, self._left_s()), 0))
        self._check_time()
        return Attempt(self)

    def __del__(self) -> None:
        if self._owed:
            warnings.warn(
                "a loop over db.attempts() was left with `break` or `return` although its attempt met another "
                "transaction: nothing was written. Let the loop end by itself, or use db.run",
                PercoWarning,
                stacklevel=2,
            )

    def _left_s(self) -> float:
        return math.inf if self._deadline is None else self._deadline - trio.current_time()

    def _check_time(self) -> None:
        if self._deadline is not None and trio.current_time() >= self._deadline:
            raise late(self._retry, self._met, None)

    async def _begin(self) -> Transaction:
        """Takes the turn here, not between two attempts, where the loop may be left: so it always ends (W3)."""
        turn = self._turn
        if turn is None:
            return await self._client._begin_as(self._function, self._isolation)
        await turn.take(self._left_s())
        try:
            self._check_time()
            return await self._client._begin_as(self._function, self._isolation)
        except BaseException:
            turn.leave()
            raise

    def _has_met(self, error: TransientError) -> None:
        """An attempt has failed, and there may be another one."""
        if self._turn is None:
            self._turn = Turn(self._client.lines, self._retry.turn_s)
        self._pause = self._turn.met(error.met_on)


class Attempt:
    """One attempt: a context manager that gives the transaction, commits it, and swallows a TransientError if there
    will be another attempt."""

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
            attempts._met = [met.with_traceback(None)]  # its frames would keep the loop alive when it has been left
            attempts._owed = True
            attempts._has_met(met)
            return True
        finally:
            txn.discard()
            if attempts._turn is not None:
                attempts._turn.leave()
