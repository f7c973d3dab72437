"""Enforces the timeout of `db.options(timeout=...)` for a function or a block on asyncio.

T10 The deadline never cancels one of the transaction's own calls. The call has the same deadline on the store's loop,
    and there a commit that was sent is still waited for, so that its outcome is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from perco.fronts.tries import Tries
from perco.txn.transaction import Transaction

T = TypeVar("T")


class Limit:
    """Cancels the task that runs a function, or a block, when the time for its transaction is up."""

    def __init__(self, tries: Tries, txn: Transaction) -> None:
        self._tries, self._txn = tries, txn
        self._asking = 0  # how many calls of the transaction are under way
        self._due = self._fired = False
        self._task: asyncio.Task[object] | None = None
        self._handle: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start the timer. Called in the task that runs the function or the block."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._handle = loop.call_later(max(self._tries.left_s(), 0), self._expire)

    def _expire(self) -> None:
        if self._task is None or self._fired:
            return
        self._due = True
        if not self._asking:
            self._fired = True
            self._task.cancel()

    async def asking(self, call: Awaitable[T]) -> T:
        """Make a call of the transaction."""
        self._asking += 1
        try:
            return await call
        finally:
            self._asking -= 1
            if self._due and not self._asking:
                # Not at once: a task that cancels itself notices this only at its next wait, perhaps only after `end`.
                asyncio.get_running_loop().call_soon(self._expire)

    def end(self, error: BaseException | None) -> BaseException | None:
        """Stop the timer; returns the error to raise in place of `error`."""
        assert self._handle is not None
        self._handle.cancel()
        task, self._task = self._task, None
        if not self._fired or task is None:
            return error
        others = task.uncancel() > self._cancelling  # other code has cancelled the task as well
        return error if others or not isinstance(error, asyncio.CancelledError) else self._tries.late(self._txn)

    async def over(self, running: Awaitable[T]) -> T:
        """Await a function under the deadline. Raises: Unavailable, or CommitUnknown, past the deadline."""
        self.begin()
        try:
            result = await running
        except BaseException as error:
            raised = self.end(error)
            if raised is error or raised is None:
                raise
            raise raised from raised.__cause__
        self.end(None)
        return result
