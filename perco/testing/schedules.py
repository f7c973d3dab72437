"""Faults at steps of a scenario, and how they are written down."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

END: Final = -1  # a late mutation arrives after everything


class Kind(Enum):
    CRASH_BEFORE = "dies before"
    CRASH_AFTER = "dies after"
    LOSE_REQUEST = "its request is lost"
    LOSE_REPLY = "its reply is lost"
    PAUSE_BEFORE = "stands still before"
    PAUSE_AFTER = "stands still after"
    REPEAT = "is repeated"
    DELAY = "is late"


LATE: Final = (Kind.REPEAT, Kind.DELAY)


PAUSES: Final = (Kind.PAUSE_BEFORE, Kind.PAUSE_AFTER)


ONE_STEP: Final = "one step"


class Fault(NamedTuple):
    """A fault at the step with this number. `arrives`: the later step before which a late mutation arrives, or
    `END`."""

    step: int
    kind: Kind
    arrives: int = END

    def __str__(self) -> str:
        when = ""
        if self.kind in LATE:
            when = " until the end" if self.arrives == END else f" until {self.arrives}"
        return f"{self.step} {self.kind.name}{when}"


Schedule = tuple[Fault, ...]


class Step(NamedTuple):
    """A mutation: the number, from 0, of the process that sent it, and its kind (`kind_of`)."""

    process: int
    kind: str

    def kinds(self, *, alone: bool) -> list[Kind]:
        """The faults that can hit this step. `alone`: its process has the store to itself."""
        never = (*PAUSES, Kind.REPEAT) if self.kind == ONE_STEP else PAUSES if alone else ()
        return [kind for kind in Kind if kind not in never]

    @property
    def name(self) -> str:
        return f"{'first' if self.process == 0 else 'later'} {self.kind}"


def again(schedule: Schedule) -> str:
    """A schedule in the form in which the command takes it."""
    return ",".join(f"{fault.step}:{fault.kind.name}:{fault.arrives}" for fault in schedule)


def parse(text: str) -> Schedule:
    """Parse a schedule that `again` wrote."""
    out = []
    for part in text.split(","):
        step, kind, arrives = part.split(":")
        out.append(Fault(int(step), Kind[kind], int(arrives)))
    return tuple(out)
