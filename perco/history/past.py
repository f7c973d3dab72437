"""Snapshots at a timestamp that was not drawn for them.

G5  A read of such a snapshot reads its table's cut (the oldest timestamp at which the table can be read) after the
    cells, and fails if the cut is above the snapshot's timestamp. The cut is raised before any version is removed, so a
    cut at or below the timestamp proves that no version was missing.
T9  For a reader beside the owner, the snapshot ends when another owner takes over. So the term of the current or last
    owner is also read after the cells (see `beside.py`).
T15 The error for a moment that is no longer kept names a time or a timestamp, as the request did.
"""

from __future__ import annotations

from typing import TypeVar

from perco.clock.holds import Pin
from perco.clock.oracle import oldest_wall
from perco.errors import Corruption, OwnerChanged, SnapshotTooOld, must_be_number
from perco.protocol.snapshot import Missing, Seen, Value
from perco.schema.schema import Column
from perco.txn.engine import Engine
from perco.txn.snapshot import Snapshot

K = TypeVar("K")
V = TypeVar("V")


class PastSnapshot(Snapshot):
    """A snapshot at a timestamp that was not drawn for it: every read checks that the versions are still kept (G5).

    `held`: the number of its hold on the watermark; 0: it has none, or its pin is the hold. `term`: for a reader
    beside the owner, the owner's term.
    """

    __slots__ = ("_held", "_term")

    def __init__(self, engine: Engine, ts: int, held: int, term: bytes = b"") -> None:
        super().__init__(engine, ts)
        self._held, self._term = held, term

    def _let_go(self) -> None:
        self._engine.oracle.holds.release(self._held)

    async def get(self, column: Column[K, V], key: K, *, lock: bool = False) -> V | None:
        """Like `Snapshot.get`.

        Raises: also SnapshotTooOld; OwnerChanged for a store that is read beside its owner.
        """
        value: V | None = None
        failure: Corruption | None = None
        try:
            value = await super().get(column, key, lock=lock)
        except Corruption as error:
            failure = error  # the long value may have been removed after its record was read
        await self._still_kept(column.table.name, failure)
        return value

    async def _finish(
        self, table: str, seen: dict[tuple[bytes, int], Seen]
    ) -> dict[tuple[bytes, int], Value | Missing]:
        out: dict[tuple[bytes, int], Value | Missing] = {}
        failure: Corruption | None = None
        try:
            out = await super()._finish(table, seen)
        except Corruption as error:
            failure = error
        await self._still_kept(table, failure)
        return out

    async def _still_kept(self, table: str, failure: Corruption | None) -> None:
        if self._term and self._engine.place.term != self._term:
            raise OwnerChanged(self.start_ts)
        cut = await self._engine.oracle.cut(table)
        if self.start_ts < cut:
            raise await self._too_old(cut, table)
        if failure is not None:
            raise failure

    async def _too_old(self, cut: int, table: str) -> SnapshotTooOld:
        """The error, which names a time or a timestamp, as the request did."""
        if self.wall is None:
            return SnapshotTooOld(self.start_ts, cut, table)
        return SnapshotTooOld(self.wall, await oldest_wall(self._driver.store, cut), table)


class PinnedSnapshot(PastSnapshot):
    """The store as of a pin's timestamp: `async with db.pin(...)`. Once the lease has expired, reads raise
    SnapshotTooOld as soon as versions have been removed.

    Attributes: `pin`: its name, owner, timestamp and lease; `wall`: as in `Snapshot`, if the block asked for a time.
    """

    pin: Pin

    __slots__ = ("_lease_s", "pin")

    def __init__(self, engine: Engine, pin: Pin, lease_s: float) -> None:
        super().__init__(engine, pin.ts, 0)
        self.pin, self._lease_s = pin, lease_s

    async def _too_old(self, cut: int, table: str) -> SnapshotTooOld:
        late_s = (self._engine.oracle.wall_ms() - self.pin.expires_ms) / 1000
        name = self.pin.name
        standing = await self._engine.oracle.pins.find(name) if late_s < 0 else None
        if standing is not None and standing.ts <= self.start_ts:  # the versions were gone before the pin was made
            return await super()._too_old(cut, table)
        gone = f"the lease of pin {name!r} expired {late_s:.0f} s ago" if late_s >= 0 else f"pin {name!r} was dropped"
        why = f"The versions are gone: {gone}. Give pins a longer lease_s=, or renew them in time (pin.renew())."
        return SnapshotTooOld(self.start_ts, cut, table, why=why)

    async def renew(self, lease_s: float | None = None) -> None:
        """Restart the lease, for `lease_s` seconds or for as long as before.

        Raises: SnapshotTooOld if the lease had expired and the versions are gone; StoreError if the pin was dropped;
        UsageError if another program has taken the pin over.
        """
        if not self._open:
            raise self._closed()
        pin = self.pin
        if lease_s is not None:
            must_be_number("a pin's lease_s", lease_s)
        self._lease_s = lease_s or self._lease_s
        try:
            self.pin = await self._engine.oracle.pins.put(pin.name, pin.owner, pin.ts, self._lease_s, pin.id, pin.id)
        except SnapshotTooOld:
            raise await self._too_old(await self._engine.oracle.oldest(), "") from None
