"""Hands values from a trio loop to blocking code, one by one."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, NamedTuple

import trio

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
