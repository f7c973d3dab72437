"""Attempts of this process that conflicted on a cell take turns at it.

If many transactions want one cell, all but one of the concurrent attempts fail. A random pause only spreads them out:
each commit then costs ever more attempts. So a transaction that has conflicted on a cell joins that cell's queue (a
*line*) before its next attempt, and begins the attempt when it is first in all its queues. A first attempt joins no
queue, and begins at once.

    first attempt --conflict on a cell--> in queues --first in all of them--> attempt --commit--> leaves
                                             ^                                   |
                                             '-----conflict, on one more cell----'

W1  Nothing is locked. The attempt that has the turn commits under the same checks as any other (T7). It may lose to an
    attempt that is in no queue: a first attempt, or one of another process. After the second such loss, and each later
    one, it pauses for a random time, as it would without queues.
W2  Older first: a queue is in the order of the first conflicts, except that the attempt that has the turn stays at its
    head. So an attempt waits only for older attempts, or for running ones, which do not wait: no two attempts wait for
    each other.
W3  An attempt enters its queues before it begins (after the pause of W1, if there is one), and stays in them until it
    ends, however it ends.
W4  No attempt waits longer than `turn_s` at a time; then it leaves its queues and tries out of turn.
W5  An attempt that has the turn, and has lost in an earlier turn, is *favoured*: at its cells, first attempts of this
    process that `db.run`, `db.attempts` or a worker would repeat give way to it, and queue behind it. So tasks that
    commit to a hot cell again and again do not keep the others from it. (Not in the same task: the favoured attempt
    waits for a transaction that its own function makes.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import trio

Where = tuple[str, bytes, int]  # table, row, column; for a scanned range its first row, and -1

_CELLS_MAX = 64  # a transaction is in the queues of its latest conflicts only: at most this many cells


class Ticket:
    """The places of a transaction in queues; a lower number is older. Made by `Lines.ticket`."""

    number: int
    stands: bool
    has_turn: bool

    __slots__ = ("called", "cells", "has_turn", "number", "stands", "task")

    def __init__(self, number: int) -> None:
        self.number = number
        self.cells: dict[Where, None] = {}  # the oldest first
        self.stands = False  # whether it is in the queues of all these cells
        self.has_turn = False
        self.called: trio.Event | None = None  # set when it gets the turn
        self.task: trio.lowlevel.Task | None = None  # that makes the attempt, if it is favoured


def _number(ticket: Ticket) -> int:
    return ticket.number


@dataclass(slots=True)
class TurnCounters:
    """`turns`: turns given; `waits`: attempts that had to wait for one; `overdue`: waits that `turn_s` ended (W4);
    `gave_way`: first attempts that gave way (W5)."""

    turns: int = 0
    waits: int = 0
    overdue: int = 0
    gave_way: int = 0


class Lines:
    """The queues: one for each cell at which an attempt waits, or has the turn. Plain values: no I/O, no clock.

    Attributes: `favoured`, the tickets that first attempts give way to, by cell (W5).
    """

    counters: TurnCounters
    favoured: dict[Where, Ticket]

    def __init__(self) -> None:
        self._lines: dict[Where, list[Ticket]] = {}
        self.favoured = {}
        self._given = 0
        self.counters = TurnCounters()

    def __len__(self) -> int:
        return len(self._lines)

    def statistics(self) -> TurnCounters:
        return replace(self.counters)

    def ticket(self) -> Ticket:
        """A new ticket, younger than all others."""
        self._given += 1
        return Ticket(self._given)

    def met(self, ticket: Ticket, cells: Iterable[Where]) -> None:
        """Note the cells of a conflict: the ticket will join their queues, too."""
        assert not ticket.stands
        for cell in cells:
            ticket.cells.pop(cell, None)
            ticket.cells[cell] = None
        while len(ticket.cells) > _CELLS_MAX:
            del ticket.cells[next(iter(ticket.cells))]

    def join(self, ticket: Ticket) -> bool:
        """Join the queues of all the ticket's cells; returns whether the ticket has the turn."""
        assert not ticket.stands
        ticket.stands = True
        first = True
        for cell in ticket.cells:
            line = self._lines.setdefault(cell, [])
            insort(line, ticket, lo=1 if line and line[0].has_turn else 0, key=_number)  # W2
            first = first and line[0] is ticket
        ticket.has_turn = first
        self.counters.turns += first
        return first

    def favour(self, ticket: Ticket) -> None:
        """W5: let first attempts give way to a ticket, as long as it has the turn."""
        assert ticket.has_turn
        for cell in ticket.cells:
            self.favoured[cell] = ticket

    def leave(self, ticket: Ticket) -> list[Ticket]:
        """Leave all queues; returns the tickets that get the turn because of that. Idempotent."""
        if not ticket.stands:
            return []
        ticket.stands = False
        for cell in ticket.cells:
            if self.favoured.get(cell) is ticket:
                del self.favoured[cell]
            line = self._lines[cell]
            at = 0 if line[0] is ticket else bisect_left(line, ticket.number, lo=int(line[0].has_turn), key=_number)
            assert line[at] is ticket
            del line[at]
            if not line:
                del self._lines[cell]
        ticket.has_turn = False
        called = []
        for cell in ticket.cells:
            line = self._lines.get(cell, [])
            if line and not line[0].has_turn and self._is_first(line[0]):
                line[0].has_turn = True
                called.append(line[0])
        self.counters.turns += len(called)
        return called

    def _is_first(self, ticket: Ticket) -> bool:
        return all(self._lines[cell][0] is ticket for cell in ticket.cells)


class Turn:
    """The turns of a transaction that has conflicted: call `met` after a failed attempt, `take` before the next
    attempt, and `leave` after that attempt, however it has ended (W3)."""

    lost: int

    __slots__ = ("_lines", "_ticket", "_turn_s", "lost")

    def __init__(self, lines: Lines, turn_s: float) -> None:
        """`turn_s`: see W4, in seconds; 0: the transaction joins no queue."""
        self._lines, self._turn_s = lines, turn_s
        self._ticket = lines.ticket()
        self.lost = 0  # attempts that failed although they had queued, or for which there is no queue (W1)

    def __del__(self) -> None:
        if self._ticket.stands and trio.lowlevel.in_trio_run():
            self.leave()  # a Ctrl-C came between the end of the attempt and `leave`

    def met(self, cells: Sequence[Where]) -> bool:
        """Record that an attempt has failed on these cells. Returns whether to pause before `take`: the attempt
        was in their queues already, and favoured, or there are no cells, so no queue helps (W1)."""
        self.leave()
        known = self._ticket.cells
        if self._turn_s > 0 and not all(cell in known for cell in cells):
            self._lines.met(self._ticket, cells)
            return False
        self.lost += 1
        return self.lost > 1 or not known

    @trio.lowlevel.enable_ki_protection
    async def take(self, at_most_s: float = inf) -> None:
        """Wait for the turn, but no longer than `turn_s` and `at_most_s`. After a cancellation, the transaction is in
        no queue."""
        ticket, lines = self._ticket, self._lines
        if not ticket.cells:
            await trio.lowlevel.checkpoint()
            return
        try:
            if lines.join(ticket):
                await trio.lowlevel.checkpoint()
            else:
                lines.counters.waits += 1
                ticket.called = trio.Event()
                with trio.move_on_after(max(0.0, min(self._turn_s, at_most_s))):
                    await ticket.called.wait()
            if not ticket.has_turn:
                lines.counters.overdue += 1
                self.leave()
            elif self.lost:
                ticket.task = trio.lowlevel.current_task()
                lines.favour(ticket)
        except BaseException:
            self.leave()
            raise

    @trio.lowlevel.enable_ki_protection
    def leave(self) -> None:
        """End the turn, and wake the attempts that get it next. (If the loop itself has ended, there are none.)"""
        called = self._lines.leave(self._ticket)
        for ticket in called if trio.lowlevel.in_trio_run() else ():
            assert ticket.called is not None, "a transaction that gets the turn later has waited for it"
            ticket.called.set()
