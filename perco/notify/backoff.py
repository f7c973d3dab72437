"""Decides when a failed run may be tried again.

N6  A failing observer neither loses its notification (the notify cell stays in the store) nor starves others: each
    (row, observer) waits longer after each failure, and retries of failed runs have a bounded share of the worker.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from itertools import islice

from perco.protocol.records import observer_of
from perco.settings import check_options

_Key = tuple[str, bytes, int]  # table, row, acknowledgement column


@dataclass(frozen=True, kw_only=True, slots=True)
class BackoffOptions:
    """Attributes:
    first_s, max_s: the pause doubles from the first to the longest, with up to half of it random.
    remembered_max: how many failed runs to remember. Beyond that, the oldest is forgotten, and is tried again sooner.
    """

    first_s: float = 0.1
    max_s: float = 60.0
    remembered_max: int = 100_000

    def __post_init__(self) -> None:
        check_options(self)


class Backoff:
    """Remembers which runs failed, how often, and when each of them may be tried again. Times are the caller's
    monotonic clock.

    Attribute `rows`: for each failed run, how often it failed and when it may be tried again; empty if there is none.
    """

    rows: dict[_Key, tuple[int, float]]

    def __init__(self, options: BackoffOptions, rng: random.Random) -> None:
        self._options, self._rng = options, rng
        self._failed: dict[_Key, tuple[int, float]] = {}
        self.rows = self._failed
        self._asked: set[_Key] = set()  # those that wait because they asked for it
        self._due: list[float] = []

    def attempts(self, key: _Key) -> int:
        """How often the run has failed."""
        entry = self._failed.get(key)
        return entry[0] if entry else 0

    def waits(self, key: _Key, now: float) -> bool:
        entry = self._failed.get(key)
        return entry is not None and entry[1] > now

    def failed(
        self,
        key: _Key,
        now: float,
        attempts: int = 0,
        least_s: float = 0.0,
        pauses_s: tuple[float, float] | None = None,
    ) -> float:
        """Count a failure; returns when to try again.

        Args:
            attempts: the caller's own count, used if it is higher.
            least_s: the shortest pause.
            pauses_s: the first and the longest pause, instead of those of the options.
        """
        first_s, max_s = pauses_s or (self._options.first_s, self._options.max_s)
        self._asked.discard(key)
        attempts = max(attempts, self.attempts(key) + 1)
        pause = min(first_s * 2.0 ** min(attempts - 1, 30), max_s)
        until = now + max(pause * self._rng.uniform(0.5, 1.0), least_s)
        self._note(key, attempts, until)
        return until

    def _note(self, key: _Key, attempts: int, until: float) -> None:
        self._failed[key] = (attempts, until)
        if len(self._failed) > self._options.remembered_max:
            oldest = next(iter(self._failed))
            del self._failed[oldest]
            self._asked.discard(oldest)
        heapq.heappush(self._due, until)

    def later(self, key: _Key, now: float, after_s: float) -> None:
        """Let a run wait, without counting a failure; for as long as after a first failure at least."""
        self._asked.add(key)
        self._note(key, self.attempts(key), now + max(after_s, self._options.first_s))

    def succeeded(self, key: _Key) -> None:
        self._failed.pop(key, None)
        self._asked.discard(key)

    def end_pauses(self, number: int, now: float) -> None:
        """Let the failed runs of an observer be tried again at once, but for those that asked for a pause."""
        for key, (attempts, until) in self._failed.items():
            if observer_of(key[2]) == number and until > now and key not in self._asked:
                self._failed[key] = attempts, now

    def count(self, number: int, most: int) -> int:
        """How many rows an observer has failed on and not succeeded on since, up to `most`."""
        return sum(1 for _ in islice((key for key in self._failed if observer_of(key[2]) == number), most))

    def next_due(self, now: float) -> float | None:
        """The next moment at which a failed run may be tried again."""
        while self._due and self._due[0] <= now:
            heapq.heappop(self._due)
        return self._due[0] if self._due else None

    def __len__(self) -> int:
        return len(self._failed)
