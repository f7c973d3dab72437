"""One caller that waits for the verdicts on its mutations.

A call may continue: as soon as the verdicts are in, `then` is called on the loop and decides what to send next, without
waking the task in between. So a transaction in one tablet wakes its task only once.

T10  If a task is cancelled while all of its mutations are still in the queue, they are withdrawn, and never sent. Once
     any of them is in a closed batch, the task waits for the verdicts, even if it is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio

from perco.outcome import Awaited
from perco.storage.cells import Mutation, Verdict

Then = Callable[[Sequence[Verdict]], "Sequence[Mutation] | None"]


class Call(Awaited):
    """The verdicts of one `apply`, some of them still to come."""

    then: Then | None
    waiting: int
    taken: bool
    cancelled: bool
    dropped: bool
    since: float

    error: BaseException | None

    __slots__ = ("cancelled", "dropped", "since", "taken", "then", "verdicts", "waiting")

    def __init__(self, task: trio.lowlevel.Task | None, mutations: int, then: Then | None = None) -> None:
        # All fields at once, without calls of `super()`: every commit makes such an object.
        self.value: Any = None
        self.error: BaseException | None = None
        self.task = task  # None: `then` alone gets the verdicts
        self.then = then
        self.cancelled = False  # cancelled too late: its mutations could no longer be withdrawn
        self.verdicts: list[Verdict | None] = [None] * mutations
        self.waiting = mutations
        self.taken = False  # some mutation is in a closed batch
        self.dropped = False  # cancelled before any mutation was in a closed batch
        self.since = 0.0  # when its mutations were queued, if that is measured

    def answer(self, index: int, verdict: Verdict) -> None:
        """Record a mutation's verdict, for a task that does not wait yet. Loop thread only."""
        self.verdicts[index] = verdict
        self.waiting -= 1

    def arrived(self, index: int, verdict: Verdict, resubmit: Callable[[Sequence[Mutation], Call], None]) -> None:
        """Record a mutation's verdict, for a task that waits: when all are in, continue the call or wake its task.
        Loop thread only."""
        self.answer(index, verdict)
        if self.waiting:
            return
        if self.then is not None and self.resubmitted(resubmit):
            return
        self.wake()

    def resubmitted(self, resubmit: Callable[[Sequence[Mutation], Call], None]) -> bool:
        """Continue the call, whose verdicts are all in. Returns whether it waits again, for further mutations."""
        try:
            while (more := self.goes_on()) is not None:
                resubmit(more, self)
                if self.waiting:
                    return True
        except Exception as error:  # raised by `then`: the task gets it, not the loop
            self.error = error
        return False

    def goes_on(self) -> Sequence[Mutation] | None:
        """The mutations to send next for the same task, now that all verdicts are in; None: wake the task."""
        if self.then is None or self.cancelled:  # T10
            return None
        mutations = self.then(self.verdicts)  # type: ignore[arg-type]
        if mutations is not None:
            self.verdicts = [None] * len(mutations)
            self.waiting = len(mutations)
            self.taken = False
            self.since = 0.0
        return mutations

    def abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        if self.taken:
            self.cancelled = True
            return trio.lowlevel.Abort.FAILED
        self.dropped = True
        return trio.lowlevel.Abort.SUCCEEDED
