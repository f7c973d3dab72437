"""Places for runs: how many rows a worker takes at a time, and for which observers.

N13 A slow observer with many changes leaves room for others of its priority, and of higher ones: it takes another place
    only if at least a third as many places as it has would still be free. (The places of quick observers are soon
    free.) So with one slow observer, a quarter of the places is free, and with n of them, one in 3n + 1.
    Unless it is alone, its runs begin a little apart. Otherwise those that begin together would also end together, and
    all of them would commit and take new rows before other observers' runs go on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from perco.protocol.records import observer_of
from perco.schema.manner import Limits

_SHARE: Final = 3  # places that a slow observer may have for each one that is free
_SLOW_S: Final = 0.2  # an observer whose runs take longer is slow, and so is one of which none has ended yet
_INERTIA: Final = 0.8
_APART_S: Final = 0.004  # between the beginnings of two runs of a slow observer: several times what its commit takes
_SPREAD: Final = 0.25  # the longest that the last of a full worker's runs waits for that, as a part of a run's time


class Room:
    """The places of a worker.

    Attributes: `crowded`: an observer got no place since a place was released; its rows have been passed.
    """

    crowded: bool

    def __init__(self, places: int) -> None:
        self.crowded = False
        self._places = places
        self._taken = 0
        self._held: dict[int, int] = {}  # by observer
        # By observer: when the runs in flight began, the oldest first. A plain dict finds the first of many slowly if
        # those before it are gone.
        self._began: dict[int, OrderedDict[int, float]] = {}
        self._pace: dict[int, float] = {}  # by observer: how long a run takes, of late
        self._next: dict[int, float] = {}  # by slow observer: when its next run may begin

    def has(self, number: int, limits: Limits, now: float, *, alone: bool) -> bool:
        """Whether an observer may take another place. `alone`: no other observer has its priority, or a higher one."""
        held = self._held.get(number, 0)
        left = self._places - self._taken - 1
        room = alone or not held or held < _SHARE * left or not self._is_slow(number, now)
        if limits.concurrency and held >= limits.concurrency:
            room = False
        self.crowded = self.crowded or not room
        return room

    def _is_slow(self, number: int, now: float) -> bool:
        if self._pace.get(number, _SLOW_S) >= _SLOW_S:
            return True
        began = self._began.get(number)
        return began is not None and now - next(iter(began.values()), now) >= _SLOW_S

    @property
    def is_empty(self) -> bool:
        """Whether no place is taken."""
        return not self._taken

    def take(self, acks: Iterable[int]) -> None:
        """Take a place for a row on which these observers will run."""
        self._taken += 1
        for ack in acks:
            number = observer_of(ack)
            self._held[number] = self._held.get(number, 0) + 1

    def release(self, acks: Iterable[int]) -> bool:
        """Returns whether an observer had got no place: its rows can be looked at again."""
        self._taken -= 1
        for ack in acks:
            self._held[observer_of(ack)] -= 1
        crowded, self.crowded = self.crowded, False
        return crowded

    def wait_s(self, number: int, now: float, *, alone: bool) -> float:
        """How long to wait before an observer's next run, in seconds: 0 unless the observer is slow. `alone`: as for
        `has`."""
        pace = self._pace.get(number, 0.0)
        if alone or pace < _SLOW_S:
            return 0.0
        at = max(now, self._next.get(number, now))
        self._next[number] = at + min(_APART_S, _SPREAD * pace / self._places)
        return at - now

    def runs(self, number: int, run: int, now: float) -> None:
        """Note the beginning of a run."""
        began = self._began.get(number)
        if began is None:
            began = self._began[number] = OrderedDict()
        began[run] = now

    def ran(self, number: int, run: int, now: float, calls: int = 1) -> None:
        """Note the end of a run, or of so many that shared a transaction."""
        seconds = (now - self._began[number].pop(run)) / calls
        self._pace[number] = seconds + _INERTIA * (self._pace.get(number, seconds) - seconds)
