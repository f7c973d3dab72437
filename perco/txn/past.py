"""Snapshots at a timestamp that was not drawn for them.

G5  Such a snapshot is answered only above its table's cut, looked at after the cells: the cut is raised before anything
    goes, so one at or below the timestamp proves that nothing was missing.
T9  Beside the owner it ends with the owner's term, looked at after the cells too (`beside.py` says why).
T15 Whoever asks for a past timestamp is told when it is not kept any more, in the terms in which it was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from perco.errors import Corruption, OwnerChanged, SnapshotTooOld, must_be_number
from perco.txn.holds import Pin
from perco.txn.oracle import oldest_wall
from perco.txn.schema import Column
from perco.txn.snapshot import Missing, Seen, Value
from perco.txn.transaction import Snapshot

if TYPE_CHECKING:
    from perco.txn.client import Client

K = TypeVar("K")
V = TypeVar("V")


class PastSnapshot(Snapshot):
    """The store as of a timestamp that was not drawn for it: every read asks whether it is still kept (G5).

    `held`: its hold on the watermark; 0: a pin has one, or nobody. `term`: beside the owner, that of the owner.
    """

    __slots__ = ("_held", "_term")

    def __init__(self, client: Client, ts: int, held: int, term: bytes = b"") -> None:
        super().__init__(client, ts)
        self._held, self._term = held, term

    def _let_go(self) -> None:
        self._client.oracle.holds.release(self._held)

    async def get(self, column: Column[K, V], key: K, *, lock: bool = False) -> V | None:
        """As `Snapshot.get`.

        Raises: SnapshotTooOld too; of a store read beside its owner OwnerChanged.
        """
        value: V | None = None
        failure: Corruption | None = None
        try:
            value = await super().get(column, key, lock=lock)
        except Corruption as error:
            failure = error  # a record may have been read, and have gone before its long value was
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
        if self._term and self._client.local.term != self._term:
            raise OwnerChanged(self.start_ts)
        cut = await self._client.oracle.cut(table)
        if self.start_ts < cut:
            raise await self._too_old(cut, table)
        if failure is not None:
            raise failure

    async def _too_old(self, cut: int, table: str) -> SnapshotTooOld:
        """In the terms in which it was asked for: a time, or a timestamp."""
        if self.wall is None:
            return SnapshotTooOld(self.start_ts, cut, table)
        return SnapshotTooOld(self.wall, await oldest_wall(self._client.local.store, cut), table)


class PinnedSnapshot(PastSnapshot):
    """The store as of a pin's timestamp: `async with db.pin(...)`. When the lease has run out, reads raise
    SnapshotTooOld as soon as the versions have gone.

    Attributes: `pin`, its name, owner, timestamp and lease; `wall`, as of a snapshot, if the block asked for a time.
    """

    __slots__ = ("_lease_s", "pin")

    def __init__(self, client: Client, pin: Pin, lease_s: float) -> None:
        super().__init__(client, pin.ts, 0)
        self.pin, self._lease_s = pin, lease_s

    async def _too_old(self, cut: int, table: str) -> SnapshotTooOld:
        late_s = (self._client.oracle.wall_ms() - self.pin.expires_ms) / 1000
        name = self.pin.name
        standing = await self._client.oracle.pins.find(name) if late_s < 0 else None
        if standing is not None and standing.ts <= self.start_ts:  # this table's had gone before it was made
            return await super()._too_old(cut, table)
        gone = f"the lease of pin {name!r} ran out {late_s:.0f} s ago" if late_s >= 0 else f"pin {name!r} was dropped"
        why = f"Its versions are gone: {gone}. Give pins a longer lease_s=, or renew them in time (pin.renew())."
        return SnapshotTooOld(self.start_ts, cut, table, why=why)

    async def renew(self, lease_s: float | None = None) -> None:
        """Restart the lease, of `lease_s` seconds or as long as it was.

        Raises: SnapshotTooOld if it had run out and the versions have gone; StoreError if it was dropped; UsageError if
        another program has taken it over.
        """
        if not self._open:
            raise self._closed()
        pin = self.pin
        if lease_s is not None:
            must_be_number("a pin's lease_s", lease_s)
        self._lease_s = lease_s or self._lease_s
        try:
            self.pin = await self._client.oracle.pins.put(pin.name, pin.owner, pin.ts, self._lease_s, pin.id, pin.id)
        except SnapshotTooOld:
            raise await self._too_old(await self._client.oracle.oldest(), "") from None
