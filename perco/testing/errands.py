"""What programs do on a served store besides transactions, and the conditions that the answers must meet.

pins     reads at a pin return the same values until the pin's lease ends, even if versions are collected (T15)
splits   a tablet is split under traffic (P1 - P5)
meters   rows that count up are written, and read by all programs, while their tablets may be split (`meters.py`)
past     a read as of a past moment: the total of the balances must be what it always is
waits    a wait, with a time limit, until everything has been observed (N7)
looks    queries: what tasks wait for, which server has which tablets, which changes wait, pins, the oldest timestamp
upkeep   a vacuum, a backfill
away     the owner is unreachable for a while, but tablet servers are reachable: each read of a snapshot that was
         opened before must return the same values as before, or fail (R5, F3, D7)

In each of its lives, a program prefers one of these errands to the others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any, Final

import trio

from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import CommitUnknown, NotIdle, SnapshotTooOld, StoreError, TransientError, UsageError
from perco.schema.schema import Table
from perco.serve.client import remote_owner
from perco.testing.meters import ROWS, Meters
from perco.testing.workloads import Clients
from perco.testing.world import World, twin
from perco.txn.snapshot import Snapshot

_EACH_LIFE: Final = 8  # errands
_PAUSES_S: Final = (0.02, 0.1, 0.3)
_SPLITS_MAX: Final = 12  # in a run
_PINS: Final = ("hourly", "nightly")  # shared by all processes
_LEASES_S: Final = (0.3, 3.0)
_AWAY_S: Final = (0.5, 2.5, 3.0)
_BACK_S: Final = 0.5
_TRANSFERS: Final = 3  # at a time
_FAILS: Final = (StoreError, TransientError, CommitUnknown, SnapshotTooOld, NotIdle, UsageError)
_SHORT_S: Final = 0.01  # shorter than the long delay windows
_SCANNED_S: Final = 0.4
_METERED_S: Final = (0.1, 0.3, 0.6)
_LOOKS_S: Final = (0.1, 0.6, 2.0)


@dataclass(slots=True)
class Errand:
    """The program that an errand is for. `cut_off`: makes the owner unreachable for the given number of seconds;
    `alive`: whether the program is alive."""

    db: Database
    world: World
    rng: Random
    cut_off: Callable[[float], None]
    alive: Callable[[], bool]

    @property
    def waits_in_windows(self) -> bool:
        """Whether the program's reads wait in a delay window, and its snapshots do not cache what they have read."""
        return self.db.config.batch.window_s >= _SHORT_S and not self.db.config.prefetch.cache


class Errands:
    """The errands of all programs of a run. `pins`, `splits`: how many were completed."""

    pins: int
    splits: int

    def __init__(self, clients: Clients, meters: Meters) -> None:
        self._clients, self._meters = clients, meters
        self.pins = self.splits = self._asked_splits = 0

    async def run(self, of: Errand) -> None:
        """Run a few errands of one program."""
        acts: list[Callable[[Errand], Awaitable[None]]] = [
            *(self._pin, self._split, self._past, self._wait, self._look, self._upkeep, self._away, self._meter),
        ]
        rather = of.rng.choice((*acts, self._split, self._meter, self._meter, self._away))
        if of.waits_in_windows and of.rng.random() < 0.5:
            rather = self._away
        for _ in range(_EACH_LIFE):
            await trio.sleep(of.rng.choice(_PAUSES_S))
            act = rather if of.rng.random() < 0.4 else of.rng.choice(acts)
            # For example, there is a UsageError if another program has a pin of the name that `_pin` draws.
            with suppress(*_FAILS):
                await act(of)

    async def _pin(self, of: Errand) -> None:
        db, world, rng = of.db, of.world, of.rng
        name, lease_s = rng.choice(_PINS), rng.choice(_LEASES_S)
        if rng.random() < 0.2:
            await db.drop_pin(name)
            return
        async with db.pin(name, lease_s=lease_s, owner="a program", keep=rng.random() < 0.3) as pin:
            first = await self._clients.balances(pin, world)
            await trio.sleep(rng.choice((0.0, 0.05, 0.5)))
            again = await self._clients.balances(pin, world)
            if first != again:
                self._clients.problem(f"T15: at {pin.start_ts}, which is pinned, it was {first}, and then {again}")
            self.pins += 1

    async def _split(self, of: Errand) -> None:
        if self._asked_splits >= _SPLITS_MAX:
            return
        self._asked_splits += 1
        world, rng = of.world, of.rng
        if world.viewed is not None and rng.random() < 0.6:
            with suppress(*_FAILS):
                await of.db.split(rng.choice(world.viewed.tables))
                self.splits += 1
            return
        table: Table[Any] = rng.choice(
            [world.values.table, world.length.table, world.balance.table, world.balance.table]
        )
        rows = ["a1", "a2", "a4", "a5"] if table is world.balance.table else [*world.keys[1::2], *map(twin, world.keys)]
        key: Any = rng.choice(rows) if rng.random() < 0.8 else None  # None: in the middle
        async with trio.open_nursery() as nursery:
            if table is world.balance.table:  # writes during the copy and the cut must not be lost
                for _ in range(_TRANSFERS):
                    nursery.start_soon(self._transfer, of)
            with suppress(*_FAILS):
                await of.db.split(table, key)  # the table may be split there already, or have nothing to split
                self.splits += 1
            nursery.cancel_scope.cancel()

    async def _meter(self, of: Errand) -> None:
        rng = of.rng
        assert of.world.meter is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._meters.run, of.db, of.world, rng, of.alive)
            await trio.sleep(rng.choice(_METERED_S))
            if rng.random() < 0.8 and self._asked_splits < _SPLITS_MAX:
                self._asked_splits += 1
                with suppress(*_FAILS):
                    await of.db.split(of.world.meter.table, rng.choice(ROWS[1:]))
                    self.splits += 1
            nursery.cancel_scope.cancel()

    async def _transfer(self, of: Errand) -> None:
        while True:
            with suppress(*_FAILS):
                await of.db.run(lambda txn: self._clients.transfer(txn, of.world, of.rng))
            await trio.sleep(0.001)

    async def _past(self, of: Errand) -> None:
        db, rng = of.db, of.rng
        if rng.random() < 0.2:  # this timestamp may not have been issued yet
            async with db.snapshot(ts=inside(db).oracle.last + rng.choice((0, 1, 5))) as snap:
                await self._clients.balances(snap, of.world)
            return
        wall_s = inside(db).oracle.wall_ms() / 1000 - rng.choice((0.0, 0.5, 2.0))  # the clock may have been set back
        async with db.snapshot(at=datetime.fromtimestamp(wall_s, UTC)) as snap:
            await self._clients.balances(snap, of.world)

    async def _wait(self, of: Errand) -> None:
        await of.db.wait_idle(timeout=0.3)  # times out if an observer runs in no process

    async def _look(self, of: Errand) -> None:
        db = of.db
        await of.rng.choice(
            (
                remote_owner(db).tasks,
                remote_owner(db).servers,
                db.waiting,
                db.pins,
                inside(db).oracle.oldest,
                inside(db).owner.now,
            )
        )()

    async def _upkeep(self, of: Errand) -> None:
        await of.rng.choice((of.db.vacuum, of.db.backfill))()

    async def _away(self, of: Errand) -> None:
        away_s = of.rng.choice(_AWAY_S)
        async with of.db.snapshot() as snap:
            before = await snap.get_many(of.world.values, of.world.keys)
            of.cut_off(away_s)
            async with trio.open_nursery() as nursery:
                # The aim: whenever the session ends, a read waits in a window, or a scan waits for a reply.
                if away_s > min(_AWAY_S) and of.waits_in_windows:
                    nursery.start_soon(self._read_on, of, snap, before, nursery)
                elif away_s > min(_AWAY_S) and of.rng.random() < 0.3:
                    nursery.start_soon(self._scan_on, of, snap, before, nursery)
                with suppress(*_FAILS):
                    until = trio.current_time() + away_s + _BACK_S
                    while trio.current_time() < until:
                        await trio.sleep(of.rng.choice(_LOOKS_S))
                        self._same(snap, before, await snap.get_many(of.world.values, of.world.keys))
                await trio.sleep(10 * _SHORT_S)
                nursery.cancel_scope.cancel()

    async def _read_on(self, of: Errand, snap: Snapshot, before: dict[str, Any], nursery: trio.Nursery) -> None:
        """Read repeatedly, without waiting for replies."""

        async def read() -> None:
            with trio.move_on_after(4 * _SHORT_S), suppress(*_FAILS):
                self._same(snap, before, await snap.get_many(of.world.values, of.world.keys))

        while True:
            nursery.start_soon(read)
            await trio.sleep(_SHORT_S)

    async def _scan_on(self, of: Errand, snap: Snapshot, before: dict[str, Any], nursery: trio.Nursery) -> None:
        """Scan the table repeatedly; the next scan may begin while the previous one still waits."""
        values = of.world.values

        async def scan() -> None:
            with trio.move_on_after(_SCANNED_S), suppress(*_FAILS):
                found = {row.key: row[values] async for row in snap.scan(values.table, columns=[values])}
                self._same(snap, before, {key: found.get(key) for key in before})

        while True:
            nursery.start_soon(scan)
            await trio.sleep(_SCANNED_S / 8)

    def _same(self, snap: Snapshot, before: dict[str, Any], after: dict[str, Any]) -> None:
        if after != before:
            self._clients.problem(f"R5, F3, D7: at {snap.start_ts} there was {before}, and later {after}")
