"""Runs an example as its users do, and dies by SIGKILL at a given event.

    python -m tests.examples.child EVENT COUNT examples/NAME.py ARGUMENTS

EVENT: of the store, as `perco.Options.on_event` has them ("commit", "ack"); or the name of a function that the example
gave to a thread: when it has returned, and nobody has been told. COUNT: at which of them; 0: never.

The store is written with durability="process": acknowledged commits survive a SIGKILL, and no test waits for a disk.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import trio

import perco


class Death:
    def __init__(self, event: str, count: int) -> None:
        self.event, self.count = event, count

    def __call__(self, event: str) -> None:
        if event == self.event:
            self.count -= 1
            if self.count == 0:
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)


def bring_about(death: Death) -> None:
    """All stores that the example opens, and all functions that it gives to threads, tell their events."""
    opened, run_sync = perco.open, trio.to_thread.run_sync

    def open_and_tell(*arguments: Any, **options: Any) -> perco.open:
        chosen = options.pop("options", None) or perco.Options()
        return opened(*arguments, options=replace(chosen, durability="process", on_event=death), **options)

    async def run_and_tell(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result = await run_sync(function, *arguments, **options)
        death(getattr(function, "__name__", ""))
        return result

    perco.open = open_and_tell  # type: ignore[misc, assignment]
    trio.to_thread.run_sync = run_and_tell


if __name__ == "__main__":
    bring_about(Death(sys.argv[1], int(sys.argv[2])))
    sys.argv[:] = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
