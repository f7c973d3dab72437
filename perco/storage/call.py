"""One caller that waits for the verdicts of its mutations.

A task is woken directly (`trio.lowlevel`): an Event per request would cost more than the request.

T10  A cancelled task first takes its mutations out of the queue: then they were never sent. Once any of them is in a
     closed batch, the task waits for the verdicts, whatever its scope says.
"""

from __future__ import annotations

import trio

from perco.storage.cells import Verdict


class Call:
    """The verdicts of one `apply`, some of them still to come."""

    __slots__ = ("dropped", "taken", "task", "verdicts", "waiting")

    def __init__(self, task: trio.lowlevel.Task, mutations: int) -> None:
        self.task = task
        self.verdicts: list[Verdict | None] = [None] * mutations
        self.waiting = mutations
        self.taken = False  # some mutation is in a closed batch
        self.dropped = False  # cancelled before any was

    def answer(self, index: int, verdict: Verdict) -> None:
        """A mutation's verdict; the last one wakes the task. Loop thread only."""
        self.verdicts[index] = verdict
        self.waiting -= 1

    def wake(self) -> None:
        trio.lowlevel.reschedule(self.task)

    def abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        if self.taken:
            return trio.lowlevel.Abort.FAILED
        self.dropped = True
        return trio.lowlevel.Abort.SUCCEEDED
