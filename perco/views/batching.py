"""Calls a slow function in threads, with the items of many runs at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import trio

from perco.errors import StoreError, TransactionClosed, TransientError
from perco.txn.background import Background

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")


class Item(Generic[I, R]):
    """An item that waits for its result. Attributes: `done`: once there is a `result` or an `error`."""

    value: I
    done: trio.Event
    error: BaseException | None
    result: R

    __slots__ = ("done", "error", "result", "value")

    def __init__(self, value: I) -> None:
        self.value = value
        self.done = trio.Event()
        self.error = None


class Batcher(Generic[I, R]):
    """Settles items, some at a time. Loop thread only.

    Args:
        settle: returns a result, or an exception, for each item.
        batch: the largest number of items that it gets; `tasks`: how many times it runs at once.
    """

    def __init__(
        self,
        background: Background,
        name: str,
        settle: Callable[[list[I]], Awaitable[Sequence[R | BaseException]]],
        *,
        batch: int,
        tasks: int,
    ) -> None:
        self._background, self._name, self._settle, self._batch, self._tasks = background, name, settle, batch, tasks
        self._waiting: deque[Item[I, R]] = deque()
        self._running = 0

    def add(self, value: I) -> Item[I, R]:
        """Let a value be settled soon."""
        item = Item[I, R](value)
        self._waiting.append(item)
        if self._running < self._tasks:
            self._running += 1
            self._background.start(self._work, self._name)
        return item

    async def _work(self) -> None:
        try:
            while self._waiting:
                await trio.lowlevel.checkpoint()  # runs that are ready can add to the batch
                items = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
                try:
                    results = await self._settle([item.value for item in items])
                    for item, result in zip(items, results, strict=True):
                        if isinstance(result, BaseException):
                            item.error = result
                        else:
                            item.result = result
                except Exception as error:
                    for item in items:
                        item.error = error
                finally:
                    for item in items:
                        if item.error is None and not hasattr(item, "result"):
                            item.error = _closed(self._name)
                        item.done.set()
        finally:
            self._running -= 1
            if not self._running:  # cancelled: the store is closing
                for item in self._waiting:
                    item.error = _closed(self._name)
                    item.done.set()
                self._waiting.clear()


def _closed(name: str) -> TransactionClosed:
    return TransactionClosed(f"the store was closed during {name}")


async def in_halves(
    call: Callable[[list[I]], Sequence[R | Exception]], items: list[I], limiter: trio.CapacityLimiter | None
) -> list[R | BaseException]:
    """Call a function, in a thread; None: here. If it fails, call it with halves of the items, so that an item fails
    alone. Returns a result, or the exception, for each item. (SystemExit and the like fail all items, and so stop the
    runs that wait for them, as if these had raised it.)"""

    def guarded() -> Sequence[R | Exception] | BaseException:
        try:
            return call(list(items))
        except BaseException as error:
            return error

    if limiter is None:
        await trio.lowlevel.checkpoint()
        found = guarded()
    else:
        found = await trio.to_thread.run_sync(guarded, limiter=limiter, abandon_on_cancel=True)
    if not isinstance(found, BaseException):
        return list(found)
    if isinstance(found, TransientError):  # of another store: it must not steer the transaction that waits
        failed = StoreError(f"{type(found).__name__}: {found}")
        failed.__cause__ = found
        found = failed
    if len(items) == 1 or not isinstance(found, Exception):
        return [found] * len(items)
    half = len(items) // 2
    return [*await in_halves(call, items[:half], limiter), *await in_halves(call, items[half:], limiter)]
