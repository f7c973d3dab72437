"""Calls to a real server under virtual time: the clock stands still while one is in flight."""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import trio
import trio.testing

P = ParamSpec("P")
T = TypeVar("T")

_calls = 0
_ended = trio.Event()


@contextmanager
def waited_for() -> Iterator[None]:
    """While the block lasts, `wait_all_tasks_blocked` waits for `held` calls, too."""
    blocked = trio.testing.wait_all_tasks_blocked
    trio.testing.wait_all_tasks_blocked = functools.partial(_blocked, blocked)  # type: ignore
    try:
        yield
    finally:
        trio.testing.wait_all_tasks_blocked = blocked


async def _blocked(blocked: Callable[[float], Awaitable[None]], cushion: float = 0.0) -> None:
    """Until all tasks are blocked, and none of them by such a call."""
    while True:
        await blocked(cushion)
        if not _calls:
            return
        await _ended.wait()


def held(call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """The call; virtual time does not jump while it is in flight."""

    async def made(*args: P.args, **kwargs: P.kwargs) -> T:
        global _calls, _ended
        clock = trio.lowlevel.current_clock()
        jumps = isinstance(clock, trio.testing.MockClock)
        if jumps:
            clock.autojump_threshold = math.inf  # type: ignore
        _calls += 1
        try:
            return await call(*args, **kwargs)
        finally:
            _calls -= 1
            _ended.set()
            _ended = trio.Event()
            if jumps and not _calls:
                clock.autojump_threshold = 0  # type: ignore

    return made
