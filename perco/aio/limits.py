"""The time that `db.options(timeout=...)` gives a function, on asyncio.

T10 A call of the transaction's own is never cancelled for it: the call has the same deadline on the store's loop, and
    what was sent there is waited for, so that its outcome is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from perco.fronts.tries import Tries
from perco.txn.transaction import Transaction

T = TypeVar("T")


class Limit:
    """Cancels the task that runs a function, or a block, once the time for its transaction is up."""

    def __init__(self, tries: Tries, txn: Transaction) -> None:
        self._tries, self._txn = tries, txn
        self._asking = 0  # calls of the transaction's that are under way
        self._due = self._fired = False
        self._task: asyncio.Task[object] | None = None
        self._handle: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """In the task that runs it."""
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
        """A call of the transaction's."""
        self._asking += 1
        try:
            return await call
        finally:
            self._asking -= 1
            if self._due and not self._asking:
                # Not at once: a task that cancels itself is only told at its next wait, which may come after the end.
                asyncio.get_running_loop().call_soon(self._expire)

    def end(self, error: BaseException | None) -> BaseException | None:
        """After it; returns what is to be raised in place of an error."""
        assert self._handle is not None
        self._handle.cancel()
        task, self._task = self._task, None
        if not self._fired or task is None:
            return error
        others = task.uncancel() > self._cancelling  # somebody else has cancelled it as well
        return error if others or not isinstance(error, asyncio.CancelledError) else self._tries.late(self._txn)

    async def over(self, running: Awaitable[T]) -> T:
        """Wait for a function. Raises: Unavailable past the deadline."""
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
