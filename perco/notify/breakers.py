"""Stops an observer whose runs all fail, as if its service were down.

N14 If the last runs of an observer have all failed, whatever the rows, the observer is *tripped* in this worker: it
    then runs on one row at a time, waits between two such trials, and tries other rows before it tries one again. A run
    that succeeds resets it, and ends all pauses of its rows. So an outage of a service costs each waiting change few
    attempts, or none, and does not send them to the failed list.

The system table has a row for each observer that is tripped in some worker, `tripped/` and its number, so that all
processes can tell. A worker puts it when it trips the observer and after each failed trial, and removes it when a run
has succeeded. If the worker dies, the note expires.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack

from perco.notify.backoff import Backoff
from perco.protocol.records import observer_of
from perco.schema.catalogue import SYSTEM_TABLE
from perco.settings import check_options
from perco.storage import DATA, Mutation, RowStore, ScanQuery, ScanRequest

_PREFIX: Final = b"tripped/"
_AFTER: Final = b"tripped0"
_ROWS: Final = 16  # trials before the same row is tried again, at most
_TRIALS: Final = 3  # a note that is older than so many trials, and a minute, is of a worker that has died
_MINUTE_MS: Final = 60_000


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerOptions:
    """Attributes:
    failures: how many runs of an observer have to fail in succession, whatever the rows, to trip it; 0: any number.
    trial_s: seconds between two trials of a tripped observer.
    """

    failures: int = 100
    trial_s: float = 60.0

    def __post_init__(self) -> None:
        check_options(self, zero=("failures",))


class Breakers:
    """The breakers of a worker's observers, by their numbers. Times are the caller's monotonic clock.

    Attributes:
        failures: how many runs have failed in succession, of each observer whose last run has failed.
        tripped: when each tripped observer has its next trial.
    """

    failures: dict[int, int]
    tripped: dict[int, float]

    def __init__(self, options: BreakerOptions) -> None:
        self.failures, self.tripped = {}, {}
        self._most = options.failures or math.inf
        self._trial_s = options.trial_s
        self._trials: Counter[int] = Counter()  # of tripped observers: trials that have begun and not ended

    def may_run(self, number: int, now: float) -> bool:
        """Whether an observer is not tripped, or a trial is due."""
        return now >= self.tripped.get(number, -math.inf) and not self._trials[number]

    def take(self, acks: Iterable[int]) -> None:
        """Note that these observers will run on a row: if one of them is tripped, as its trial."""
        self._trials.update(number for number in map(observer_of, acks) if number in self.tripped)

    def release(self, acks: Iterable[int]) -> None:
        """Note that the row has been released. If its run has not failed, the next trial is due at once."""
        if self._trials:
            self._trials -= Counter(map(observer_of, acks))  # none falls below 0, and none is kept at 0

    def failed(self, number: int, now: float) -> bool:
        """Count a failed run. Returns whether it has tripped the observer."""
        failures = self.failures[number] = self.failures.get(number, 0) + 1
        if failures < self._most:
            return False
        trips = number not in self.tripped
        self.tripped[number] = now + self._trial_s
        return trips

    def succeeded(self, number: int) -> bool:
        """Note a run that has succeeded. Returns whether it has reset the observer."""
        self.failures.pop(number, None)
        self._trials.pop(number, None)
        return self.tripped.pop(number, None) is not None

    def pause_s(self, number: int, backoff: Backoff) -> float:
        """How long a row at least waits after a failed run of an observer: as many trials as other rows have failed."""
        return self._trial_s * backoff.count(number, _ROWS) if number in self.tripped else 0.0

    def next_due(self, now: float) -> float:
        """When the next trial is due that was not due at a given moment."""
        return min((due for due in self.tripped.values() if due > now), default=math.inf)


class Trip(NamedTuple):
    """Why an observer is tripped.

    Attributes:
        wall_ms: when a run failed last, by the clock of the store's owner, in milliseconds since 1970.
        trial_s: the worker's seconds between two trials.
        error: with which the run failed.
    """

    wall_ms: int
    trial_s: float
    error: str


async def note_trip(store: RowStore, number: int, trip: Trip | None) -> None:
    """Put, or remove, the note that an observer is tripped. It is advisory: if this fails, the next trial repeats
    it."""
    value = None if trip is None else msgpack.packb(trip)
    await store.apply([Mutation(SYSTEM_TABLE, ((_PREFIX + b"%d" % number, (), ((DATA, 0, 1, value),)),), None, True)])


async def trips_in(store: RowStore, wall_ms: int) -> dict[int, Trip]:
    """The observers that are tripped in some worker, by number. `wall_ms`: the time now."""
    found: dict[int, Trip] = {}
    start: bytes | None = _PREFIX
    while start is not None:
        page = await store.scan(ScanRequest(SYSTEM_TABLE, start, _AFTER, (ScanQuery(DATA, (0,), 1, 1),)))
        for row, [cells] in page.rows:
            try:
                packed: list[Any] = msgpack.unpackb(cells[0][2])
                number, trip = int(row[len(_PREFIX) :]), Trip(*packed[:3])
                expires_ms = trip.wall_ms + 1000 * _TRIALS * trip.trial_s + _MINUTE_MS
            except (ValueError, TypeError):
                continue  # damaged: it is advisory, and the next trial puts it again
            if wall_ms <= expires_ms:
                found[number] = trip
        start = page.next
    return found
