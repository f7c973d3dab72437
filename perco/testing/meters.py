"""Rows that count up. One program at a time writes a row, and all programs read it: every read has one right answer.

T9, C4  A read at a timestamp returns the newest value that was committed at or below this timestamp.
O2      If a transaction begins after a commit was answered, in any process, it has a higher timestamp than the commit.
T1, P1  A value whose commit was answered is never lost, even if tablets are split, versions are collected, or a process
        dies.

A writer reads its row and writes the next number. So a row's values grow with their timestamps, even if the reply to a
commit was lost. Programs share their knowledge of the rows directly, not over the simulated network.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Final

import trio

from perco.database.database import Database
from perco.errors import CommitUnknown, SnapshotTooOld, StoreError, TransientError
from perco.testing.workloads import Clients
from perco.testing.world import World
from perco.txn.snapshot import Snapshot

ROWS: Final = [f"m{i}" for i in range(8)]
_WRITERS: Final = 3
_READERS: Final = 3
_SCANS: Final = 0.2  # the share of reads that are scans
_READS_MAX: Final = 64  # reads of a row that are checked again when another value becomes known
_PAUSES_S: Final = (0.0, 0.0, 0.002)
_FAILS: Final = (StoreError, TransientError, CommitUnknown, SnapshotTooOld)


class Meters:
    """The meters of all programs of a run. `values`: how many commits were answered; `reads`: how many reads were
    checked."""

    reads: int
    values: int

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._known: dict[str, list[tuple[int, int]]] = {row: [] for row in ROWS}  # (commit_ts, value)
        self._reads: dict[str, deque[tuple[int, int]]] = {row: deque(maxlen=_READS_MAX) for row in ROWS}
        self._writers: dict[str, Callable[[], bool]] = {}  # by row: whether its program is alive
        self.values = self.reads = 0

    async def run(self, db: Database, world: World, rng: Random, alive: Callable[[], bool]) -> None:
        """Write some rows that no other program writes, and read any, until cancelled."""
        free = [row for row in ROWS if row not in self._writers or not self._writers[row]()]
        mine = rng.sample(free, min(_WRITERS, len(free)))
        self._writers.update(dict.fromkeys(mine, alive))
        try:
            async with trio.open_nursery() as nursery:
                for row in mine:
                    nursery.start_soon(self._write, db, world, Random(rng.random()), row)
                for _ in range(_READERS):
                    nursery.start_soon(self._read, db, world, Random(rng.random()))
        finally:
            for row in mine:
                del self._writers[row]

    async def _write(self, db: Database, world: World, rng: Random, row: str) -> None:
        assert world.meter is not None
        while True:
            with suppress(*_FAILS):
                async with db.transaction() as txn:
                    value = (await txn.get(world.meter, row) or 0) + 1
                    txn.set(world.meter, row, value)
                self._committed(row, txn.commit_ts, value)
            await trio.sleep(rng.choice(_PAUSES_S))

    async def _read(self, db: Database, world: World, rng: Random) -> None:
        while True:
            with suppress(*_FAILS):
                before = self._clients.answered
                async with db.snapshot() as snap:
                    self._clients.begun(before, snap.start_ts)
                    if rng.random() < _SCANS:
                        await self._look_at_all(snap, world)
                    else:
                        await self._look(snap, world, rng.choice(ROWS))
            await trio.sleep(rng.choice(_PAUSES_S))

    async def _look(self, snap: Snapshot, world: World, row: str) -> None:
        assert world.meter is not None
        self._seen(snap, row, await snap.get(world.meter, row) or 0)

    async def _look_at_all(self, snap: Snapshot, world: World) -> None:
        assert world.meter is not None
        found = {row.key: row[world.meter] async for row in snap.scan(world.meter.table)}
        for row in ROWS:
            self._seen(snap, row, found.get(row) or 0)

    def _seen(self, snap: Snapshot, row: str, value: int) -> None:
        self._compare(row, snap.start_ts, value, self._known[row])
        self._reads[row].append((snap.start_ts, value))
        self.reads += 1

    def _committed(self, row: str, ts: int, value: int) -> None:
        self.values += 1
        self._clients.answered = max(self._clients.answered, ts)
        insort(self._known[row], (ts, value))
        for start_ts, seen in self._reads[row]:
            self._compare(row, start_ts, seen, [(ts, value)])

    def _compare(self, row: str, start_ts: int, seen: int, known: list[tuple[int, int]]) -> None:
        at = bisect_right(known, (start_ts, 1 << 62))
        if at and seen < known[at - 1][1]:
            self._clients.problem(f"T9, P1: at {start_ts} meter {row} was {seen}; {known[at - 1]} had been committed")
        if at < len(known) and seen >= known[at][1]:
            self._clients.problem(f"T9: at {start_ts} meter {row} was {seen}; that was committed at {known[at][0]}")

    async def verify(self, snap: Snapshot, world: World) -> None:
        """Check, once the run has come to rest, that all answered commits are there."""
        await self._look_at_all(snap, world)
