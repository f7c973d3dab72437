"""How often a task gives way to others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio


async def turns_of_others(function: Callable[..., Awaitable[object]], *args: Any) -> int:
    """How many turns another task gets while a function runs."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await function(*args)
        nursery.cancel_scope.cancel()
    return turns
