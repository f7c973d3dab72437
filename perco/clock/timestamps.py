"""Hands out increasing timestamps below a durable bound, and keeps a clock that never goes back. No I/O.

O1  Unique and strictly increasing, across restarts too: the bound of a range is durable before the first of its
    timestamps is handed out; after a restart, timestamps continue above the last durable bound.
O2  A timestamp is drawn when a caller requests it, never in advance.
O3  Integers from 1, below 2^53; a restart may skip some. A note is a pair (last timestamp issued, wall time); the
    notes map wall times to timestamps. Their wall times never go back, whatever the machine's clock does.
"""

from __future__ import annotations

from perco.errors import StoreError
from perco.storage import TS_MAX


class Timestamps:
    """The counter. `bound`: the durable bound; `last`: the last timestamp handed out."""

    last: int
    bound: int

    __slots__ = ("bound", "last")

    def __init__(self, bound: int) -> None:
        self.last = self.bound = bound  # O1: above every timestamp that was ever handed out

    def draw(self) -> int:
        """The next timestamp, or 0 if the range is used up and must be extended first (O1)."""
        ts = self.last + 1
        if ts > self.bound:
            return 0
        self.last = ts
        return ts

    def next_bound(self, size: int) -> int:
        """The bound to make durable before `extend` is called with it."""
        bound = min(self.bound + size, TS_MAX)
        if bound <= self.bound:
            raise StoreError("the store has used up its 2^53 timestamps")
        return bound

    def extend(self, bound: int) -> None:
        assert bound > self.bound, "O1: a bound only moves up"
        self.bound = bound

    def jump(self, bound: int) -> None:
        """Go on above a durable bound, as after a restart (O1)."""
        assert bound > self.bound, "O1: a bound only moves up"
        self.last = self.bound = bound


class WallClock:
    """Wall times, made non-decreasing (O3). If the machine's clock is set back, this clock stands still until the
    machine's clock has caught up."""

    __slots__ = ("_last_ms",)

    def __init__(self, last_ms: int) -> None:
        self._last_ms = last_ms

    def tell_ms(self, wall_s: float) -> int:
        """The oracle's wall time in milliseconds, given the machine's wall time."""
        self._last_ms = max(self._last_ms, int(wall_s * 1000))
        return self._last_ms
