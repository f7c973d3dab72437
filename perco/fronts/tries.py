"""`run` and `attempts` from outside the loop: how a thread, or a task of another loop, uses `perco.txn.attempts`.

The function itself runs outside. Only the transaction's beginning, its reads and its end run on the loop, each as a
call; turns, pauses and deadlines are those of `Attempts` (T11, W3). A thread's `db.run` begins the transaction together
with the function's first call, which saves a thread switch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import trio

from perco.database.database import Database
from perco.errors import CommitUnknown, Unavailable, UsageError
from perco.txn.attempts import Attempt, AttemptsOutside, late
from perco.txn.beginning import BLOCK, begin_nowait
from perco.txn.engine import Engine
from perco.txn.inside import limits_of
from perco.txn.prefetch import name_of
from perco.txn.retry import RetryOptions
from perco.txn.transaction import Transaction


class Tries:
    """The attempts of one transaction. `began`: whether the current attempt has a transaction; `done`: whether no
    further attempt follows."""

    engine: Engine
    retry: RetryOptions
    serializable: bool

    def __init__(
        self,
        engine: Engine,
        retry: RetryOptions,
        serializable: bool,
        function: Callable[..., Any] | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """`at_once`: see `AttemptsOutside`."""
        self.engine, self.retry, self.serializable, self._at_once = engine, retry, serializable, at_once
        self._function = BLOCK if function is None else name_of(function)
        self._made_at = perf_counter()
        self._attempts: AttemptsOutside | None = None
        self._attempt: Attempt | None = None

    @property
    def began(self) -> bool:
        return self._attempt is not None

    @property
    def done(self) -> bool:
        return self._attempts is not None and self._attempts.done

    def _new(self, late_s: float = 0.0) -> AttemptsOutside:
        how = self.engine, self.retry, self.serializable, self._function, late_s
        return AttemptsOutside(*how, at_once=self._at_once)

    def begin_nowait(self) -> Transaction | None:
        """On the loop's thread: the transaction of the first attempt; None if it would have to wait."""
        if self._attempts is not None or self.retry.timeout_s is not None:
            return None
        txn = begin_nowait(self.engine, "serializable" if self.serializable else "snapshot", self._function)
        if txn is not None:
            self._attempts = self._new()
            self._attempt = self._attempts.begun(txn)
        return txn

    async def begin(self) -> Transaction:
        """On the loop: begin the next attempt's transaction, once the attempt has its turn."""
        if self._attempts is None:
            self._attempts = self._new(perf_counter() - self._made_at)  # their time began when this object was made
        attempt = await anext(self._attempts)
        txn = await attempt.__aenter__()
        self._attempt = attempt
        return txn

    async def finish(self, error: BaseException | None) -> bool:
        """On the loop: commit, or discard after an error; returns whether another attempt follows.

        Raises: what the commit raises; never `error` itself.
        """
        assert self._attempt is not None
        attempt, self._attempt = self._attempt, None
        try:
            swallowed = await attempt.__aexit__(None if error is None else type(error), error, None)
        except BaseException as raised:
            if raised is error:
                return False
            raise
        return swallowed and not self.done

    def leave(self) -> None:
        """End without another attempt, even after a conflict: the caller gets the error."""
        if self._attempts is not None:
            self._attempts.leave()

    async def in_time(self, txn: Callable[[], Transaction | None], do: Callable[[], Awaitable[Any]]) -> Any:
        """Run `do` on the loop. Raises: Unavailable, or CommitUnknown, when the time for all attempts is up."""
        if self.retry.timeout_s is None:
            return await do()
        left_s = self.left_s()
        if left_s > 0:  # otherwise, even a call that does not have to wait is too late
            with trio.move_on_after(left_s):
                return await do()
        raise self.late(txn())

    def left_s(self) -> float:
        """Seconds until the time for all attempts is up."""
        assert self.retry.timeout_s is not None
        return self.retry.timeout_s - (perf_counter() - self._made_at)

    def late(self, txn: Transaction | None) -> Unavailable | CommitUnknown:
        """The error to raise when the time is up. `txn`: the last attempt's transaction, if any."""
        return late(self.retry, [], txn) if self._attempts is None else self._attempts.late(txn)


def tell(interrupt: BaseException, txn: Transaction | None) -> None:
    """T10: add a note with the commit's outcome to the exception that interrupted the commit."""
    if any(note.startswith("perco: ") for note in getattr(interrupt, "__notes__", ())):
        return
    if txn is not None and txn.outcome == "committed" and txn.commit_ts:
        interrupt.add_note(f"perco: the transaction under way has committed, at {txn.commit_ts}")
    elif txn is not None and txn.outcome == "unknown":
        interrupt.add_note(f"perco: the transaction under way may have committed: ask db.outcome({txn.token!r})")


async def operated(of: Database, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], told: list[str]) -> Any:
    """On the loop: carry out an operation on one cell. `told` gets what an interrupted caller has to know (T10)."""
    try:
        value = await getattr(of, name)(*args, **kwargs)
    except CommitUnknown as error:
        told.append(f"perco: the operation under way may have been carried out: ask db.outcome({error.token!r})")
        raise
    told.append(f"perco: the operation under way has been carried out, and gave {value!r:.100}")
    return value


def tell_of(interrupt: BaseException, told: list[str]) -> None:
    """T10: add these notes to the exception that interrupted an operation; an error of its own needs none."""
    if not isinstance(interrupt, CommitUnknown):
        for note in told:
            interrupt.add_note(note)


def limited(db: Database, attempts: int | None, timeout: float | None, isolation: Any) -> tuple[RetryOptions, bool]:
    """The retry options of `db.options(...)`, and whether its transactions are serializable. Raises: UsageError."""
    made = db.options(attempts=attempts, timeout=timeout, isolation=isolation)
    retry, serializable = limits_of(made)
    return replace(retry), serializable


def must_give(function: object, what: str, by: str = "db.run") -> None:
    """Raises: UsageError if `function` is not callable."""
    if not callable(function):
        close = getattr(function, "close", None)
        if close is not None and hasattr(function, "cr_code"):
            close()
        then = ", and then its arguments: db.run(function, ...)" if by == "db.run" else ""
        raise UsageError(f"{by} takes {what}{then}, not {function!r}")
