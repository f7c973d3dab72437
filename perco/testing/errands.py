"""What programs ask of a served store beside their transactions, now and then, and what must be true of the answers.

pins     a pin reads the same as long as its lease lasts, whatever is collected meanwhile (T15)
splits   a tablet is split while all goes on (P1 - P5)
past     the store as of a moment ago: the total is what it always is
waits    until all has been observed, or for a while (N7)
looks    what tasks wait for, who has which tablets, what waits
upkeep   a vacuum, a back-fill
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from random import Random
from typing import Final

import trio

from perco.errors import NotIdle, SnapshotTooOld, StoreError, TransientError, UsageError
from perco.serve.database import RemoteDatabase
from perco.testing.workloads import Clients, World

_EACH_LIFE: Final = 8  # errands
_PAUSES_S: Final = (0.02, 0.1, 0.3)
_SPLITS_MAX: Final = 4  # in a run
_PINS: Final = ("hourly", "nightly")  # that all processes share
_LEASES_S: Final = (0.3, 3.0)


class Errands:
    """Of all programs of a run. `pins`, `splits`: how many there were, to their end."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self.pins = self.splits = self._asked_splits = 0

    async def run(self, db: RemoteDatabase, world: World, rng: Random) -> None:
        """Of one program; until cancelled."""
        acts = [self._pin, self._split, self._past, self._wait, self._look, self._upkeep]
        for _ in range(_EACH_LIFE):
            await trio.sleep(rng.choice(_PAUSES_S))
            act = rng.choice(acts)
            # UsageError: another program has a pin of that name, and the like.
            with suppress(StoreError, TransientError, SnapshotTooOld, NotIdle, UsageError):
                await act(db, world, rng)

    async def _pin(self, db: RemoteDatabase, world: World, rng: Random) -> None:
        name, lease_s = rng.choice(_PINS), rng.choice(_LEASES_S)
        if rng.random() < 0.2:
            await db.drop_pin(name)
            return
        async with db.pin(name, lease_s=lease_s, keep=rng.random() < 0.3) as pin:
            first = await self._clients.balances(pin, world)
            await trio.sleep(rng.choice((0.0, 0.05, 0.5)))
            again = await self._clients.balances(pin, world)
            if first != again:
                self._clients.problem(f"T15: at {pin.start_ts}, which is pinned, it was {first}, and then {again}")
            self.pins += 1

    async def _split(self, db: RemoteDatabase, world: World, rng: Random) -> None:
        if self._asked_splits >= _SPLITS_MAX:
            return
        self._asked_splits += 1
        table = rng.choice([world.values.table, world.length.table, world.balance.table])
        key = rng.choice([None, f"a{rng.randrange(6)}" if table is world.balance.table else rng.choice(world.keys)])
        await db.split(table, key)  # there may be one already, or nothing to split
        self.splits += 1

    async def _past(self, db: RemoteDatabase, world: World, rng: Random) -> None:
        if rng.random() < 0.2:  # it may not have come
            async with db.snapshot(ts=db.oracle.last + rng.choice((0, 1, 5))) as snap:
                await self._clients.balances(snap, world)
            return
        wall_s = db.oracle.wall_ms() / 1000 - rng.choice((0.0, 0.5, 2.0))  # that clock may have been set back
        async with db.snapshot(at=datetime.fromtimestamp(wall_s, UTC)) as snap:
            await self._clients.balances(snap, world)

    async def _wait(self, db: RemoteDatabase, world: World, rng: Random) -> None:
        await db.wait_idle(timeout=0.3)  # or nobody here has one of the observers

    async def _look(self, db: RemoteDatabase, world: World, rng: Random) -> None:
        await rng.choice((db.tasks, db.servers, db.waiting, db.pins, db.oracle.oldest, db._now))()

    async def _upkeep(self, db: RemoteDatabase, world: World, rng: Random) -> None:
        await rng.choice((db.vacuum, db.backfill))()
