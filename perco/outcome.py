"""A value or an error that a caller waits for, and that the loop supplies later.

The loop wakes a waiting task directly (`trio.lowlevel`), and the `Awaited` itself serves as the `outcome.Outcome`: an
Event, and a separate Outcome for every wake-up, would cost more than most calls do.
"""

from __future__ import annotations

from typing import Any

import trio


class Pending:
    """A value or an error that comes later."""

    __slots__ = ("error", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None

    def unwrap(self) -> Any:
        """The value. Raises: the error."""
        if self.error is not None:
            raise self.error
        return self.value


class Awaited(Pending):
    """A result that a task waits for; `task` is None if no task waits."""

    task: trio.lowlevel.Task | None

    __slots__ = ("task",)

    def __init__(self, task: trio.lowlevel.Task | None) -> None:
        super().__init__()
        self.task = task

    def wake(self) -> None:
        """Let the task go on, with the value or the error. Loop thread only."""
        if self.task is not None:
            trio.lowlevel.reschedule(self.task, self)  # type: ignore[arg-type]
