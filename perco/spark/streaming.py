"""Trio loops beside blocking code: one hands over values, one by one; another takes calls."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import trio

from perco.errors import UsageError

T = TypeVar("T")

_AHEAD: Final = 2  # how many values may be made before they are taken


class _End(NamedTuple):
    error: BaseException | None


def streamed(make: Callable[[Callable[[Any], Awaitable[None]]], Awaitable[None]]) -> Iterator[Any]:
    """The values that `make(send)` sends. `make` runs on a trio loop in a thread of its own, at most two values ahead.
    Closing the iterator cancels `make` and waits for its end."""
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()  # `room` limits its length
    room, scope = trio.Semaphore(_AHEAD), trio.CancelScope()
    loop: list[trio.lowlevel.TrioToken] = []

    async def send(item: Any) -> None:
        await room.acquire()
        made.put(item)

    async def main() -> None:
        loop.append(trio.lowlevel.current_trio_token())
        with scope:
            await make(send)

    def run() -> None:
        error: BaseException | None = None
        try:
            trio.run(main)
        except BaseException as met:
            error = met
        made.put(_End(error))

    def tell(function: Callable[[], object]) -> None:
        for token in loop:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(function)

    thread = threading.Thread(target=run, name="perco-loop", daemon=True)
    thread.start()
    try:
        while not isinstance(item := made.get(), _End):
            tell(room.release)
            yield item
        if item.error is not None:
            raise item.error
    finally:
        tell(scope.cancel)
        thread.join()


class Loop:
    """A trio loop in a thread of its own, to which blocking code makes calls.

    Args: `main`: runs on the loop until it is cancelled; it calls its argument once calls can be made.

    Raises: what `main` raises before that.
    """

    def __init__(self, main: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self._main, self._scope = main, trio.CancelScope()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._run, name="perco-loop", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def _run(self) -> None:
        try:
            trio.run(self._in_loop)
        except BaseException as error:
            self._error = error
        self._ready.set()

    async def _in_loop(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            await self._main(self._ready.set)

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Raises: what the function raises; what `main` has raised meanwhile; UsageError after `close`."""
        try:
            return trio.from_thread.run(function, *args, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            self._thread.join()
            raise self._error or UsageError("this loop is closed") from None

    def close(self) -> None:
        """Cancel `main`, and wait for its end."""
        assert self._token is not None
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._scope.cancel)
        self._thread.join()
