"""Pins: named, durable holds on the past, each with an owner and a lease.

Each pin is a row of the system table. The row's key is `pin/` and the pin's name; only the newest cell of the row is
valid. The owner has all pins in memory (`Holds.pins`); other processes read the rows.

T15 A pin is in memory from the step in which its timestamp was chosen, and is durable before its maker gets an answer.
    While it is unknown whether a pin is durable, it holds back the watermark as if it were, because the next owner may
    find it. Once its lease has run out, a pin holds nothing back, and reads at its timestamp may fail (G5). A pin is
    identified by the id that its maker chose, not by its name alone. It can be renewed and dropped only under its id,
    and a dropped pin is not made again, so a call that arrives twice takes effect once. Each write of a pin has a
    higher version than all earlier ones, and is refused if the pin already has that version or a higher one, so a late
    copy changes nothing. A store that may apply a write twice keeps a tombstone of a dropped pin until no earlier write
    of the pin can still arrive.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final

import msgpack
import trio

from perco.clock.holds import Holds, Pin
from perco.errors import Corruption, SnapshotTooOld, StoreError, Unavailable, UsageError, WriteUnknown
from perco.schema.catalogue import SYSTEM_TABLE, raise_for
from perco.storage import (
    ABSENT,
    APPLIED,
    DATA,
    TS_MAX,
    Mutation,
    NoReply,
    Refused,
    RowStore,
    ScanQuery,
    ScanRequest,
    Verdict,
    Write,
)

PINS_MAX: Final = 1000  # pins whose lease has not run out
_PREFIX: Final = b"pin/"
_AFTER: Final = b"pin0"
_NAME_MAX: Final = 64
_TEXT_MAX: Final = 200
_DROPPED_MAX: Final = 1000
_DROPS_MAX: Final = 3  # attempts, if late messages keep changing a pin
_VERSIONS_MAX: Final = 1000  # of one pin; more than one only if replies were lost


class Pins:
    """The pins of an opened store; in the owner only."""

    def __init__(
        self, store: RowStore, holds: Holds, now_ms: Callable[[], int], last: Callable[[], int] = lambda: 0
    ) -> None:
        """`last`: returns the last timestamp that was issued."""
        self._store, self._holds, self._now_ms, self._last = store, holds, now_ms, last
        self._versions: dict[str, list[int]] = {}  # by name, the versions that may be in the row; the newest last
        self._tombstones: dict[str, int] = {}  # by name, the last timestamp issued when the pin was dropped
        self._alone = trio.Lock()
        self._dropped: dict[str, None] = {}  # ids, the newest last; calls for ids too old to be here are not repeated

    async def load(self) -> None:
        """Load the pins that are there when the store is opened."""
        async for name, versions, found in _rows(self._store, _PREFIX, _AFTER):
            self._found(name, versions, found)

    def _found(self, name: str, versions: list[int], found: Pin | int) -> None:
        self._versions[name] = versions
        if isinstance(found, Pin):
            self._holds.pins[name] = found
        else:
            self._tombstones[name] = found
            self._holds.pins.pop(name, None)

    def standing(self, name: str) -> Pin | None:
        """The pin of that name, if its lease has not run out."""
        pin = self._holds.pins.get(name)
        return pin if pin is not None and pin.expires_ms > self._now_ms() else None

    async def find(self, name: str) -> Pin | None:
        """Like `standing`."""
        return self.standing(name)

    async def put(self, name: str, owner: str, ts: int, lease_s: float, id: str, over: str | None = None) -> Pin:
        """Pin a timestamp that is held already, or has just been drawn; or renew a pin (T15).

        Args:
            id: of the pin; the same in each renewal.
            over: the id of the current pin, to renew or take over; None: the caller knows of no such pin.

        Raises: SnapshotTooOld if the pin's lease had run out and the versions are gone; UsageError if another pin has
        the name; StoreFull; StoreError if the pin was dropped; WriteUnknown.
        """
        must_be_name(name)
        lease_ms = _lease_ms(lease_s)
        held = self._holds.hold(ts)  # until the pin itself holds it
        if not held:
            raise SnapshotTooOld(ts, self._holds.oldest())
        try:
            async with self._alone:
                return await self._put(name, owner[:_TEXT_MAX], ts, lease_ms, id, over)
        finally:
            self._holds.release(held)

    async def _put(self, name: str, owner: str, ts: int, lease_ms: int, id: str, over: str | None) -> Pin:
        if id in self._dropped:
            raise StoreError(f"pin {name!r} has been dropped, so it is neither made nor renewed")
        now_ms = self._now_ms()
        pin = Pin(name, owner, ts, now_ms, now_ms + lease_ms, id)
        before = self._holds.pins.get(name)
        if before is not None and before.expires_ms > now_ms and before.id not in (id, over):
            raise UsageError(
                f"another program ({before.owner}) has pinned {before.ts} under the name {name!r} meanwhile; choose "
                "another name, or take that pin over as it is"
            )
        if before is not None and before.ts == ts:
            pin = pin._replace(made_ms=before.made_ms)
        elif sum(other.expires_ms > now_ms for other in self._holds.pins.values()) >= PINS_MAX:
            raise UsageError(f"there are {PINS_MAX} pins already; drop one of them first: await db.drop_pin(name)")
        both = pin
        if before is not None and before.expires_ms > now_ms:  # the old one holds until the new one is durable
            both = pin._replace(ts=min(ts, before.ts), expires_ms=max(pin.expires_ms, before.expires_ms))
        self._holds.pins[name] = both
        holds = before
        self._tombstones.pop(name, None)
        try:
            verdict = await self._write(name, msgpack.packb([pin.owner, pin.ts, pin.made_ms, pin.expires_ms, id]))
            holds = pin if verdict is APPLIED else both if isinstance(verdict, NoReply) else before
        finally:
            if holds is None:
                del self._holds.pins[name]
            else:
                self._holds.pins[name] = holds
        await self._must_be_applied(name, verdict)
        return pin

    async def drop(self, name: str, id: str) -> bool:
        """Drop the pin with that name and id, expired or not, so that a late call cannot make it again. Returns
        whether the pin was there; a repeated call returns the same. Raises: StoreFull; WriteUnknown."""
        async with self._alone:
            pin = self._holds.pins.get(name)
            if pin is None or pin.id != id:
                known = id in self._dropped
                self._forget(id)
                return known
            done = await self._drop(name, lambda pin: pin.id == id)
            self._forget(id)
            return done

    async def drop_named(self, name: str) -> bool:
        """Drop the pin of that name, whatever its id. Returns whether there was such a pin."""
        pin = self._holds.pins.get(name)
        return pin is not None and await self.drop(name, pin.id)

    def _forget(self, id: str) -> None:
        if id:
            self._dropped.pop(id, None)
            self._dropped[id] = None
            if len(self._dropped) > _DROPPED_MAX:
                del self._dropped[next(iter(self._dropped))]

    async def drop_expired(self) -> int:
        """Drop the pins whose lease has run out; returns how many."""
        dropped = 0
        for name in [name for name in self._holds.pins if self.standing(name) is None]:
            async with self._alone:
                dropped += await self._drop(name, lambda pin: pin.expires_ms <= self._now_ms())
        return dropped

    async def _drop(self, name: str, meant: Callable[[Pin], bool]) -> bool:
        """Drop the pin of that name, if it is one that is meant."""
        for _ in range(_DROPS_MAX):
            pin = self._holds.pins.get(name)
            if pin is None or not meant(pin):
                return False  # also if a late message of the store's former owner has just renewed or dropped it
            last = self._last()
            verdict = await self._write(name, None if self._store.once else msgpack.packb(last))
            if self._store.once or not isinstance(verdict, Refused):
                break
            await self._read_again(name)
        await self._must_be_applied(name, verdict)
        self._holds.pins.pop(name, None)
        if not self._store.once:
            self._tombstones[name] = last
        return True

    async def erase(self, watermark: int) -> int:
        """Remove the tombstones of pins that were dropped at timestamps below the floor, which has been raised to the
        watermark: no earlier write of these pins can still arrive (T13). Returns how many."""
        erased = 0
        for name in [name for name, last in self._tombstones.items() if last < watermark]:
            async with self._alone:
                if name in self._tombstones and await self._write(name, None) is APPLIED:
                    del self._tombstones[name]
                    erased += 1
        return erased

    async def _write(self, name: str, value: bytes | None) -> Verdict:
        """Replace the contents of a pin's row; None: delete them."""
        there = self._versions.get(name, [])
        version = there[-1] + 1 if there else 1
        writes: list[Write] = [(DATA, 0, old, None) for old in there]
        if value is not None:
            writes.append((DATA, 0, version, value))
        row = (_PREFIX + name.encode(), ((ABSENT, DATA, 0, version, TS_MAX),), writes)
        [verdict] = await self._store.apply([Mutation(SYSTEM_TABLE, (row,), self._last(), True)])
        if verdict is APPLIED and value is None:
            self._versions.pop(name, None)
        elif verdict is APPLIED:
            self._versions[name] = [version]
        elif isinstance(verdict, NoReply):
            self._versions[name] = [*there, version]
        return verdict

    async def _read_again(self, name: str) -> None:
        """Read a pin's row again, because a late message of the store's former owner has changed it."""
        row = _PREFIX + name.encode()
        # Only this pin's row: the outcome of another pin's last write may still be unknown.
        async for _, versions, found in _rows(self._store, row, row + b"\0"):
            self._found(name, versions, found)

    async def _must_be_applied(self, name: str, verdict: Verdict) -> None:
        """Raises: WriteUnknown; Unavailable if a late message of the store's former owner has changed the pin, which is
        then read again; otherwise as `raise_for`."""
        if isinstance(verdict, NoReply):
            remedy = f"Take it over by its name alone, drop it (await db.drop_pin({name!r})), or let its lease run out."
            raise WriteUnknown(f"pin {name!r}", verdict.reason, remedy)
        if isinstance(verdict, Refused) and not self._store.once:
            await self._read_again(name)
            raise Unavailable(f"pin {name!r} has been changed meanwhile, by a message of the store's former owner")
        if verdict is not APPLIED:
            raise_for(verdict, f"pin {name!r}")


async def pins_in(store: RowStore) -> list[Pin]:
    """All pins of a store, by name, expired ones included."""
    return [found async for _, _, found in _rows(store, _PREFIX, _AFTER) if isinstance(found, Pin)]


async def _rows(store: RowStore, first: bytes, stop: bytes) -> AsyncIterator[tuple[str, list[int], Pin | int]]:
    """For each pin's row in this range: the name, the versions in it, and the pin; or, for a tombstone, its
    timestamp."""
    start: bytes | None = first
    query = ScanQuery(DATA, (0,), 0, TS_MAX, _VERSIONS_MAX)
    while start is not None:
        page = await store.scan(ScanRequest(SYSTEM_TABLE, start, stop, (query,)))
        for row, [cells] in page.rows:
            try:
                name, value = row[len(_PREFIX) :].decode(), msgpack.unpackb(cells[0][2])
                versions = [ts for _, ts, _ in reversed(cells)]
                if isinstance(value, int):
                    yield name, versions, value
                else:
                    owner, ts, made_ms, expires_ms, *id = value
                    yield name, versions, Pin(name, str(owner), int(ts), int(made_ms), int(expires_ms), *map(str, id))
            except (ValueError, TypeError, msgpack.UnpackException) as error:
                raise Corruption(f"pin {row!r}", f"cannot be decoded: {error}") from error
        start = page.next


def must_be_name(name: str) -> None:
    """Raises UsageError for anything that is not a valid name for a pin."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _NAME_MAX:
        raise UsageError(f"a pin's name is a str of 1 to {_NAME_MAX} printable characters, not {name!r}")


def _lease_ms(lease_s: float) -> int:
    if not 0 < lease_s < 1e9:
        raise UsageError(f"a pin's lease is a number of seconds above 0, not {lease_s!r}")
    return int(lease_s * 1000)
