"""Operations of this process on one cell take turns, and those that only add to the cell share a commit.

    first operation ----------------leads------------> commits, also for those it took --> the next one leads
                                      |
    others      ----wait, in their order of arrival----> taken, or leads

C10 One operation at a time *leads* on a cell: it reads, decides and commits. A leader that adds to the cell (`add`,
    `append`) takes, after its read, the operations that wait and add, too, up to the first that does not. It carries
    them out one after the other, as if each had been alone, and its one commit is theirs. If the commit fails, they
    wait again.
T10 An operation that waits can be cancelled; one that was taken waits for the outcome.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import trio

from perco.outcome import Awaited

Where = tuple[str, bytes, int]  # table, row, column


class Asked(Awaited):
    """An operation that waits. It gets a value, or an error, from the operation that took it; None: it leads."""

    operation: Any
    adds_to: object
    taken: bool
    cancelled: trio.lowlevel.RaiseCancelT | None

    __slots__ = ("adds_to", "cancelled", "operation", "taken")

    def __init__(self, operation: Any, adds_to: object) -> None:
        """`adds_to`: the column, if it adds to the cell; else None."""
        super().__init__(None)
        self.operation, self.adds_to = operation, adds_to
        self.taken = False
        self.cancelled = None  # while it was taken


class Combining:
    """Loop thread only.

    Attributes: `combined`: how many operations another one's commit has carried out.
    """

    combined: int

    def __init__(self) -> None:
        # For each cell at which an operation leads: those that wait; None: so far, none has waited.
        self._waiting: dict[Where, deque[Asked] | None] = {}
        self.combined = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def leads(self, where: Where) -> bool:
        """Begin to lead on a cell, until `pass_on`. Returns False if another operation leads there: then `wait`."""
        if where in self._waiting:
            return False
        self._waiting[where] = None
        return True

    async def wait(self, where: Where, asked: Asked) -> Any:
        """Wait until another operation has carried this one out, and return the result; None: this one leads now.
        Raises: the error that this one has met."""
        waiting = self._at(where)

        def abort(raise_cancel: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            if asked.taken:
                asked.cancelled = raise_cancel
                return trio.lowlevel.Abort.FAILED
            waiting.remove(asked)
            return trio.lowlevel.Abort.SUCCEEDED

        asked.task = trio.lowlevel.current_task()
        waiting.append(asked)
        return await trio.lowlevel.wait_task_rescheduled(abort)

    def _at(self, where: Where) -> deque[Asked]:
        waiting = self._waiting[where]
        if waiting is None:
            waiting = self._waiting[where] = deque()
        return waiting

    def are_adding(self, where: Where, column: object) -> bool:
        """Whether a leader that adds to the cell could take an operation."""
        waiting = self._waiting[where]
        return waiting is not None and len(waiting) > 0 and waiting[0].adds_to is column

    def take(self, where: Where, column: object) -> Asked | None:
        """The operation that waits next, if it adds to the cell, too."""
        if not self.are_adding(where, column):
            return None
        asked = self._at(where).popleft()
        asked.taken = True
        return asked

    def give_back(self, where: Where, taken: list[Asked]) -> None:
        """Let operations wait again, before all others: the commit has failed. Those that were cancelled meanwhile
        end."""
        for asked in reversed(taken):
            asked.taken, asked.value, asked.error = False, None, None
            if asked.cancelled is None:
                self._at(where).appendleft(asked)
                continue
            try:
                asked.cancelled()
            except BaseException as error:
                asked.error = error
            asked.wake()

    def done(self, asked: Asked) -> None:
        """Give an operation that was taken its value or error."""
        self.combined += 1
        asked.wake()

    def pass_on(self, where: Where) -> None:
        """End leading on a cell: the operation that waits next leads."""
        waiting = self._waiting[where]
        if not waiting or not trio.lowlevel.in_trio_run():  # after the end of the loop, no task waits
            del self._waiting[where]
        else:
            waiting.popleft().wake()
