"""When schedules are due: a moment in every period, or the moments of a cron expression.

Moments are datetimes in UTC. Intervals begin at multiples of the period since 1970, so that all processes agree on them
without asking. The package cronsim reads cron expressions (extra `schedule`). When clocks
change, a moment that the day lacks is due right after the gap, and one that the day has twice is due once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final, Literal, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from perco.errors import UsageError, must_be_number

TABLE: Final = "SCHEDULES"
HANDLED: Final = "_handled"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND, _YEAR = timedelta(seconds=1), timedelta(days=366)

Missed = Literal["last", "all"]


@dataclass(frozen=True, slots=True)
class Due:
    """The moment that a scheduled function runs for.

    Attributes:
        id: of the schedule.
        at: the moment at which it was due, in the schedule's time zone.
        attempt: 1 for the first run for this moment, then 2 ... after conflicts and failures.
    """

    id: str
    at: datetime
    attempt: int


class Times(Protocol):
    """The moments at which a schedule is due."""

    zone: tzinfo

    def after(self, moment: datetime) -> datetime:
        """The first one after a moment."""
        ...

    def last(self, moment: datetime) -> datetime:
        """The last one up to a moment, this included."""
        ...


class Every:
    """One moment in every period."""

    zone: tzinfo = UTC
    period: timedelta

    def __init__(self, period: timedelta) -> None:
        self.period = period

    def after(self, moment: datetime) -> datetime:
        return self.last(moment) + self.period

    def last(self, moment: datetime) -> datetime:
        return _EPOCH + (moment - _EPOCH) // self.period * self.period


class Cron:
    """The moments of a cron expression in a time zone. `simulate`: `cronsim.CronSim`."""

    expression: str
    zone: tzinfo

    def __init__(self, expression: str, zone: tzinfo, simulate: Callable[..., Any]) -> None:
        self.expression, self.zone = expression, zone
        self._simulate = simulate

    def after(self, moment: datetime) -> datetime:
        # In the hour that the clock repeats, cronsim also gives moments of the first pass.
        moments: Iterator[datetime] = self._simulate(self.expression, moment.astimezone(self.zone))
        return next(at for at in (each.astimezone(UTC) for each in moments) if at > moment)

    def last(self, moment: datetime) -> datetime:
        before: Iterator[datetime] = self._simulate(self.expression, moment.astimezone(self.zone), reverse=True)
        found = next(at for at in (each.astimezone(UTC) for each in before) if at <= moment)
        while (later := self.after(found)) <= moment:
            found = later
        return found


def every(id: str, *, seconds: float, minutes: float, hours: float, days: float) -> Every:
    """Raises: UsageError."""
    given = {"seconds": seconds, "minutes": minutes, "hours": hours, "days": days}
    for name, value in given.items():
        must_be_number(f"schedule {id!r}: {name}", value)
    try:
        period = timedelta(**given)
    except (OverflowError, ValueError):
        period = timedelta(0)
    if not _SECOND <= period <= _YEAR:
        raise UsageError(f"schedule {id!r}: its period must be from one second to 366 days, for example hours=1")
    return Every(period)


def cron(id: str, expression: str, zone: str) -> Cron:
    """Raises: UsageError."""
    try:
        from cronsim import CronSim, CronSimError
    except ImportError as error:
        raise UsageError("schema.cron needs the package cronsim: pip install 'perco[schedule]'") from error
    try:
        times = Cron(expression, ZoneInfo(zone), CronSim)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError) as error:
        raise UsageError(f"schedule {id!r}: {zone!r} is no time zone, such as 'Europe/Berlin'") from error
    try:
        times.after(datetime.now(UTC))
        times.last(datetime.now(UTC))
    except StopIteration as error:
        raise UsageError(f"schedule {id!r}: {expression!r} is never due") from error
    except (CronSimError, TypeError, AttributeError) as error:
        raise UsageError(
            f"schedule {id!r}: {expression!r} is no cron expression, such as '30 3 * * MON-FRI': {error}"
        ) from error
    return times


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of a program.

    Attributes:
        id: of its observer, and the key of its row.
        due: the column of the newest moment that the observer has been notified of.
        handled: the column of the newest moment for which a run has committed; before the first one, of the moment at
            which a worker saw the schedule first.
        missed: after a pause, the observer runs for the last moment, or for each of them in turn.
    """

    id: str
    due: Any
    handled: Any
    times: Times
    missed: Missed
