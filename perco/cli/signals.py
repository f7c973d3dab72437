"""SIGTERM and Ctrl-C of commands that run until they are told to end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

# A signal that comes so soon after the first one is the same request: a terminal sends SIGINT to all its processes, and
# a supervisor among them sends SIGTERM to its children.
_SAME_S: Final = 1.0


@contextmanager
def asked_to_end(
    call_soon: Callable[[Callable[[], object]], object], ask: Callable[[], object], *, kept: bool = False
) -> Iterator[None]:
    """Call `ask` on a loop at the first SIGTERM or SIGINT. A later one kills the process, which does no harm.

    Args:
        call_soon: has the loop call a function, as `TrioToken.run_sync_soon` and `loop.call_soon_threadsafe` do.
        kept: a supervisor kills the process if need be, so later signals are ignored.
    """
    first_at: list[float] = []

    def act(number: int, _: object) -> None:
        now = time.monotonic()
        if not first_at:
            first_at.append(now)
            call_soon(ask)
        elif not kept and now - first_at[0] >= _SAME_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, act) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if kept else handler)


@contextmanager
def asked_on_trio(*, kept: bool = False) -> Iterator[trio.Event]:
    """`asked_to_end` for the running trio loop: the event is set."""
    asked = trio.Event()
    with asked_to_end(trio.lowlevel.current_trio_token().run_sync_soon, asked.set, kept=kept):
        yield asked
