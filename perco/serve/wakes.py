"""Decides which worker process to wake when there may be work (N8); the server sends the message.

Like the scanners within a process, the processes are woken one at a time. If all of them were woken for one change, all
would look for it, and all but one would fail to claim it. Processes that may run the same observers form a *group*. For
a change, one process of each group looks for work:

- the process whose own run or transaction made the change, if it has room. It is not woken, because it looks for work
  by itself;
- otherwise, the process whose turn it is, which is woken. Turns are short, so that the processes share the work, but
  long enough for one process to find changes that arrive together.

A process that has found more work than it may run reports that it is *full*. The next process is then woken, and the
full one gets no turn until one of its scanners sleeps again. If all processes of a group are full when a change
arrives, the first one that has room again is woken. A process that was woken may hang. If it neither claims a row nor
goes to sleep within a short time, the next process is woken, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Generic, Protocol, TypeVar

TURN_S: Final = 0.02
ANSWER_S: Final = 0.05  # how long to wait for a woken process before another one is woken


class Process(Protocol):
    """A worker process. `runs`: the ids of the observers that it may run; `full`: it has no room; `asked_at`: when it
    was woken, if it has not answered since; otherwise inf."""

    runs: frozenset[str]
    full: bool
    asked_at: float


P = TypeVar("P", bound=Process)


class _Group(Generic[P]):
    """Processes that may run the same observers. `again`: a change arrived when all of them were full."""

    __slots__ = ("again", "members", "since")

    def __init__(self) -> None:
        self.members: list[P] = []  # the process whose turn it is comes first
        self.since = 0.0
        self.again = False


class Wakes(Generic[P]):
    """All worker processes of a store. Every method returns the processes to wake now."""

    def __init__(self) -> None:
        self._groups: dict[frozenset[str], _Group[P]] = {}

    def works(self, process: P, runs: Iterable[str], now: float) -> list[P]:
        """Note which observers a process may run from now on; none: it has ended."""
        runs = frozenset(runs)
        if runs == process.runs:
            return []
        woken: list[P] = []
        if process.runs:
            group = self._groups[process.runs]
            group.members.remove(process)
            if group.members:
                woken = self._wake(group, now)  # the process may have left work behind
            else:
                del self._groups[process.runs]
        process.runs, process.full, process.asked_at = runs, False, math.inf
        if runs:
            self._groups.setdefault(runs, _Group()).members.append(process)
        return woken

    def notified(self, now: float, by: P | None = None) -> list[P]:
        """Record that there may be work. `by`: the client whose commit made the work; that client looks for it without
        being woken."""
        woken: list[P] = []
        for runs, group in self._groups.items():
            if by is not None and by.runs == runs and not by.full:
                by.asked_at = min(by.asked_at, now)
            else:
                woken += self._wake(group, now)
        return woken

    def heard(self, process: P) -> None:
        """Record that a process looks for work."""
        process.asked_at = math.inf

    def looked(self, process: P, now: float, *, full: bool) -> list[P]:
        """Record that a process has found more than it may run (`full`), or that one of its scanners has found nothing
        and sleeps."""
        process.asked_at, process.full = math.inf, full
        group = self._groups.get(process.runs)
        if group is None or not (full or group.again):
            return []
        return self._wake(group, now)

    def overdue(self, now: float) -> list[P]:
        """Wake others in place of processes that did not answer in time."""
        woken: list[P] = []
        for group in self._groups.values():
            for process in [process for process in group.members if process.asked_at + ANSWER_S <= now]:
                process.asked_at = math.inf
                woken += self._wake(group, now, but=process)
        return woken

    @property
    def deadline(self) -> float:
        """When to call `overdue`; inf: there is no process whose answer is awaited."""
        asked = [process.asked_at for group in self._groups.values() for process in group.members]
        return min(asked, default=math.inf) + ANSWER_S

    def _wake(self, group: _Group[P], now: float, but: P | None = None) -> list[P]:
        members = group.members
        if now >= group.since + TURN_S or members[0].full or members[0] is but:
            members.append(members.pop(0))
            group.since = now
        for at, process in enumerate(members):
            if not process.full and process is not but:
                group.members = members[at:] + members[:at]
                group.again = False
                process.asked_at = min(process.asked_at, now)
                return [process]
        group.again = True
        return []
