"""The holds on old versions, and the watermark that follows from them. No I/O.

G1  The watermark is the smallest of: start timestamps not yet reported done, snapshots at past timestamps, pins whose
    lease has not run out, and the retention limit. It is computed here, in one step: no timestamp is drawn meanwhile.
    It never goes down. A reader's timestamp is in `open` from the moment when it is drawn until the reader ends.
T15 One step checks a snapshot at a past timestamp, and makes it hold back the watermark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

from perco.storage import TS_MAX


class Pin(NamedTuple):
    """A named, durable hold on all versions that a snapshot at `ts` needs, until `expires_ms` of the oracle's clock."""

    name: str
    owner: str
    ts: int
    made_ms: int
    expires_ms: int
    id: str = ""  # random, chosen by its maker; "": an earlier version of perco made the pin


class Holder(NamedTuple):
    """The hold that stops the watermark: kind "transaction", "snapshot", "pin" (with its name) or "retention"."""

    kind: str
    ts: int
    name: str = ""


class Holds:
    """All holds of a store. Loop thread only, except that an object that was abandoned without `end` may, on any
    thread, release its hold.

    Attributes:
        open: start timestamps not yet reported done.
        pins: by name, including expired ones until they are dropped.
        watermark: no open transaction began below it. Cells are removed only after it has been published.
        cuts: for each table, the oldest timestamp at which it can be read.
    """

    watermark: int

    __slots__ = ("_numbers", "_past", "cuts", "open", "pins", "watermark")

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.pins: dict[str, Pin] = {}
        self.watermark = 0
        self.cuts: dict[str, int] = {}
        self._past: dict[int, int] = {}  # snapshots at past timestamps, by a number
        self._numbers = count(1)

    def oldest(self) -> int:
        """The oldest timestamp at which any table can be read."""
        return min(self.cuts.values(), default=0)

    def hold(self, ts: int) -> int:
        """T15: hold a past timestamp. Returns the number to pass to `release`, or 0 if the timestamp is too old."""
        if ts < self.oldest():
            return 0
        held = next(self._numbers)
        self._past[held] = ts
        return held

    def past(self, held: int) -> int:
        """The timestamp of a hold; 0: it has been released."""
        return self._past.get(held, 0)

    @property
    def pasts(self) -> Sequence[int]:
        """The numbers of all holds on past timestamps."""
        return list(self._past)

    def release(self, held: int) -> None:
        self._past.pop(held, None)

    def lowest(self, last: int, now_ms: int) -> Holder:
        """The hold on the oldest versions; `last`: the last timestamp issued, for which a snapshot may always ask."""
        found = [
            Holder("transaction", min(self.open, default=TS_MAX)),
            Holder("snapshot", min(self._past.values(), default=TS_MAX)),
            *(Holder("pin", pin.ts, pin.name) for pin in self.pins.values() if pin.expires_ms > now_ms),
            Holder("retention", last),
        ]
        return min(found, key=lambda holder: holder.ts)

    def advance(self, last: int, now_ms: int, aged: Mapping[str, int], *, least: int = 0) -> Holder:
        """Move the watermark and the cuts up (G1). Returns the hold that keeps the watermark from advancing further.

        Args:
            aged: for each table, the timestamp up to which its retention allows versions to be removed.
            least: the watermark may move up to here, even if no table's retention allows it (N17). The cuts stay.
        """
        lowest = self.lowest(last, now_ms)
        oldest = max([*aged.values(), least])
        self.watermark = max(self.watermark, min(lowest.ts, oldest))
        for table, ts in aged.items():
            self.cuts[table] = max(self.cuts.get(table, 0), min(lowest.ts, ts))
        return lowest if lowest.ts < oldest else Holder("retention", oldest)

    def take_over(self, watermark: int, cuts: Mapping[str, int]) -> None:
        """Adopt the watermark and the cuts that another process has published, as far as they are higher."""
        self.watermark = max(self.watermark, watermark)
        for table, ts in cuts.items():
            self.cuts[table] = max(self.cuts.get(table, 0), ts)
