"""Snapshots of now and of the past, and pins.

T15 A snapshot at a past timestamp is checked against the timestamps issued and the versions kept.
O3  Beside the owner, a snapshot is as of the newest note of the clock.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Final

import trio

from perco.blocks import AsyncOnly
from perco.clock.holds import Pin
from perco.clock.oracle import oldest_wall
from perco.clock.pins import must_be_name, pins_in
from perco.errors import PercoError, SnapshotTooOld, Unavailable, UsageError, WriteUnknown, must_be_number
from perco.history.past import PastSnapshot, PinnedSnapshot
from perco.txn.beginning import begin_snapshot
from perco.txn.engine import Engine
from perco.txn.snapshot import Snapshot

_GIVE_BACK_S: Final = 10.0  # how long to try to give back a pin after a failed takeover
_GIVE_BACK_AGAIN_S: Final = 1.0


class Snapshots:
    """Takes snapshots and pins. Loop thread only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pinned: set[str] = set()  # names of pins whose block has not ended

    async def at(self, *, ts: int | None = None, at: datetime | None = None) -> Snapshot:
        """A snapshot as of now, a timestamp or a time: see `Database.snapshot`. The caller ends it by calling `end`."""
        self._engine.usable(writing=False)
        if ts is not None and at is not None:
            raise UsageError("give either ts= or at=, not both")
        if ts is not None and (isinstance(ts, bool) or not isinstance(ts, int)):
            raise UsageError(f"ts= takes a timestamp, an int as in txn.commit_ts, not {ts!r}; for a time use at=")
        if at is not None:
            if not isinstance(at, datetime):
                raise UsageError(
                    f"at= takes an aware datetime, not {at!r}: datetime.now(timezone.utc) - timedelta(hours=1), or "
                    "datetime.fromtimestamp(seconds, timezone.utc)"
                )
            if at.tzinfo is None:
                raise UsageError("at= needs an aware datetime: datetime.now(timezone.utc), or .astimezone()")
            found, wall = await self._engine.oracle.at(at.timestamp())
            try:
                snap = await self._held(found)
            except SnapshotTooOld:  # the error names times, as the request did
                oldest = await oldest_wall(self._engine.driver.store, await self._engine.oracle.oldest())
                raise SnapshotTooOld(at.timestamp(), oldest) from None
            snap.wall = wall
            return snap
        if self._engine.place.readonly:
            term = self._engine.place.term  # before the draw: if the timestamp is of a later term, the first read fails
            newest = await self._engine.oracle.draw()
            if ts is None:
                return PastSnapshot(self._engine, newest, 0, term)
        if ts is not None:
            if ts > self._engine.oracle.last:
                await self._engine.oracle.newest()  # another process may have drawn later ones
            if not 1 <= ts <= self._engine.oracle.last:
                raise UsageError(f"there is no snapshot at {ts}: timestamps so far are 1 to {self._engine.oracle.last}")
            return await self._held(ts)
        return await begin_snapshot(self._engine)

    async def _held(self, ts: int) -> Snapshot:
        """A snapshot at a past timestamp, checked and held in one step (T15); beside the owner it is only checked."""
        if self._engine.place.readonly:
            return PastSnapshot(self._engine, ts, 0, self._engine.place.term)
        return PastSnapshot(self._engine, ts, await self._engine.oracle.hold(ts))

    @contextlib.asynccontextmanager
    async def pinned(
        self, name: str, lease_s: float, ts: int | None, at: datetime | None, owner: str | None, keep: bool
    ) -> AsyncIterator[PinnedSnapshot]:
        """See `Database.pin`."""
        self._engine.usable(writing=True)
        must_be_number("a pin's lease_s", lease_s)
        must_be_name(name)
        if owner is not None and not isinstance(owner, str):
            raise UsageError(f"a pin's owner must be a str, for people to read, not {owner!r}")
        owner = owner or f"{os.getpid()} {' '.join(sys.argv)}"
        owner = owner.encode(errors="backslashreplace").decode()  # a command may have file names that are not UTF-8
        if name in self._pinned:
            raise UsageError(f"pin {name!r} is in use in this process; choose another name")
        self._pinned.add(name)
        try:
            pin, wall = await self._take_pin(name, lease_s, ts, at, owner)
            snap = PinnedSnapshot(self._engine, pin, lease_s)
            snap.wall = wall
            try:
                yield snap
            finally:
                snap.end()
                if not keep:
                    with trio.CancelScope(shield=True):
                        await self._engine.oracle.pins.drop(name, pin.id)
        finally:
            self._pinned.discard(name)

    async def _take_pin(
        self, name: str, lease_s: float, ts: int | None, at: datetime | None, owner: str
    ) -> tuple[Pin, float | None]:
        standing = await self._engine.oracle.pins.find(name)
        if standing is not None:
            if at is not None or ts not in (None, standing.ts):
                raise UsageError(
                    f"pin {name!r} is at timestamp {standing.ts}; drop it first (await db.drop_pin({name!r})), or "
                    "take it over as it is, without ts= or at="
                )
            id = secrets.token_hex(8)
            try:
                return await self._engine.oracle.pins.put(name, owner, standing.ts, lease_s, id, standing.id), None
            except BaseException:
                self._engine.background.spawn(lambda: self._give_back(standing, id))
                raise
        snap = await self.at(ts=ts, at=at)  # this holds the timestamp until the pin does
        try:
            pin = await self._engine.oracle.pins.put(name, owner, snap.start_ts, lease_s, secrets.token_hex(8))
            return pin, snap.wall
        finally:
            snap.end()

    async def _give_back(self, former: Pin, id: str) -> None:
        """Return a pin to its former holder, for the rest of that holder's lease. It is unknown whether the takeover
        under this id took effect. If returning the pin does not succeed soon, the pin remains until the new
        lease expires."""
        pins = self._engine.oracle.pins
        with trio.move_on_after(_GIVE_BACK_S), contextlib.suppress(PercoError):
            while True:
                left_s = (former.expires_ms - self._engine.oracle.wall_ms()) / 1000
                try:
                    if left_s <= 0:
                        await pins.drop(former.name, id)
                    else:
                        await pins.put(former.name, former.owner, former.ts, left_s, former.id, id)
                    return
                except (Unavailable, WriteUnknown):
                    await trio.sleep(_GIVE_BACK_AGAIN_S)

    async def pins(self) -> list[Pin]:
        """All pins of the store, by name; expired ones until the next vacuum drops them."""
        self._engine.usable(writing=False)
        return await pins_in(self._engine.driver.store)

    async def drop_pin(self, name: str) -> bool:
        """Drop a pin. Returns whether there was a pin of that name. After that, reads at its timestamp raise
        SnapshotTooOld as soon as the vacuum has removed versions."""
        self._engine.usable(writing=True)
        return await self._engine.oracle.pins.drop_named(name)


class SnapshotBlock(AsyncOnly):
    """`async with db.snapshot() as snap:`: a snapshot while the block lasts."""

    _write = "async with db.snapshot() as snap:"

    def __init__(
        self,
        snapshots: Snapshots,
        ts: int | None,
        at: datetime | None,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            before: awaited before the snapshot is taken.
        """
        self._snapshots, self._ts, self._at, self._before = snapshots, ts, at, before
        self._snap: Snapshot | None = None

    async def __aenter__(self) -> Snapshot:
        if self._snap is not None:
            raise UsageError("a snapshot's block can be entered only once; call db.snapshot() again")
        if self._before is not None:
            await self._before()
        snap = self._snap = await self._snapshots.at(ts=self._ts, at=self._at)
        return snap

    async def __aexit__(self, *_: object) -> None:
        assert self._snap is not None
        self._snap.end()
