"""One caller that waits for the verdicts of its mutations.

A task is woken directly (`trio.lowlevel`): an Event per request would cost more than the request.

A call may go on: what to send next is decided on the loop as soon as the verdicts are in, without waking the task in
between. A transaction in one tablet needs its task only once.

T10  A cancelled task first takes its mutations out of the queue: then they were never sent. Once any of them is in a
     closed batch, the task waits for the verdicts, whatever its scope says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from perco.storage.cells import Mutation, Verdict

Then = Callable[[Sequence[Verdict]], "Sequence[Mutation] | None"]


class Call:
    """The verdicts of one `apply`, some of them still to come."""

    __slots__ = ("cancelled", "dropped", "error", "taken", "task", "then", "verdicts", "waiting")

    def __init__(self, task: trio.lowlevel.Task | None, mutations: int, then: Then | None = None) -> None:
        self.task = task  # None: nobody waits, `then` is all that is told
        self.then = then
        self.cancelled = False  # asked to stop while it could not
        self.verdicts: list[Verdict | None] = [None] * mutations
        self.waiting = mutations
        self.taken = False  # some mutation is in a closed batch
        self.dropped = False  # cancelled before any was
        self.error: Exception | None = None  # raised by `then`

    def answer(self, index: int, verdict: Verdict) -> None:
        """A mutation's verdict, for a task that does not wait yet. Loop thread only."""
        self.verdicts[index] = verdict
        self.waiting -= 1

    def arrived(self, index: int, verdict: Verdict, resubmit: Callable[[Sequence[Mutation], Call], None]) -> None:
        """A mutation's verdict, for a task that waits: when all are in, the call goes on, or its task is woken. Loop
        thread only."""
        self.answer(index, verdict)
        if self.waiting:
            return
        if self.then is not None and self.resubmitted(resubmit):
            return
        if self.task is not None:
            trio.lowlevel.reschedule(self.task, self)  # type: ignore[arg-type]

    def resubmitted(self, resubmit: Callable[[Sequence[Mutation], Call], None]) -> bool:
        """All verdicts are in: whether the call waits for what it has sent next."""
        try:
            while (more := self.goes_on()) is not None:
                resubmit(more, self)
                if self.waiting:
                    return True
        except Exception as error:  # in a continuation: its task's, not the loop's
            self.error = error
        return False

    def goes_on(self) -> Sequence[Mutation] | None:
        """All verdicts are in: what to send next for the same task, or None: wake it."""
        if self.then is None or self.cancelled:  # T10
            return None
        mutations = self.then(self.verdicts)  # type: ignore[arg-type]
        if mutations is not None:
            self.verdicts = [None] * len(mutations)
            self.waiting = len(mutations)
            self.taken = False
        return mutations

    def unwrap(self) -> None:
        """Makes the call its own `outcome.Outcome`: one object less for every wake-up."""
        if self.error is not None:
            raise self.error

    def abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        if self.taken:
            self.cancelled = True
            return trio.lowlevel.Abort.FAILED
        self.dropped = True
        return trio.lowlevel.Abort.SUCCEEDED
