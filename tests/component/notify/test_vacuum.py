"""Observers run once for each change, and for every change, while old versions go all the time (G3, G4)."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

import perco
from perco.check.check import CheckOptions, check
from perco.storage import NOTIFY, WRITE
from tests.component.notify.kit import client, memory, settle, tablets_cells
from tests.support.everywhere import owning

KEYS = [f"k{i}" for i in range(6)]


class Watched:
    """Cells that are written and deleted; the changes that committed runs of their observer were for lie beside
    them."""

    def __init__(self) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT, splits=["k2", "k4"])
        self.body = self.docs.column("body", perco.INT64)
        self.handled = perco.Table("handled", key=perco.TEXT)
        self.changes = self.handled.column("changes", perco.JSON)
        self.schema = perco.Schema(self.docs, self.handled, keep=perco.Keep(seconds=0))
        self.schema.observe(self.body, id="note")(self._note)
        self.written: dict[str, int] = {}  # the newest change of each

    async def _note(self, txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        before = await txn.get(self.changes, change.key) or []
        await trio.sleep(0.001)
        txn.set(self.changes, change.key, [*before, change.commit_ts])

    async def write(self, db: perco.Database, rng: random.Random, times: int) -> None:
        for i in range(times):
            key = rng.choice(KEYS)
            async for attempt in db.attempts():
                async with attempt as txn:
                    if rng.random() < 0.5:
                        txn.delete(self.body, key)
                    else:
                        txn.set(self.body, key, i)
            self.written[key] = max(self.written.get(key, 0), txn.commit_ts)
            await trio.sleep(rng.uniform(0, 0.003))


@pytest.mark.parametrize("seed", range(6))
async def test_observers_neither_run_twice_nor_miss_a_change(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    rng = random.Random(seed)
    world = Watched()
    local = memory()
    options = perco.Options(seed=seed, commit=perco.options.CommitOptions(one_step=seed % 2 == 0))
    eager = perco.WorkerOptions(concurrency=8, scanners=4, row_locks=False)  # so that twins run
    async with client(local, world.schema, options=options) as db:

        async def vacuum() -> None:
            while True:
                await db.vacuum()
                await trio.sleep(rng.uniform(0, 0.004))

        async with db.worker(options=eager), trio.open_nursery() as nursery:
            nursery.start_soon(vacuum)
            async with trio.open_nursery() as writers:
                for _ in range(4):
                    writers.start_soon(world.write, db, rng, 25)
            await settle(db)
            nursery.cancel_scope.cancel()
        await db.vacuum()
        removed = owning(db).statistics().vacuum.removed
        assert removed.acks > 20
        assert removed.versions > 50
        async with db.snapshot() as snap:
            for key, newest in world.written.items():
                handled = await snap.get(world.changes, key) or []
                assert len(set(handled)) == len(handled), f"N3: {key}: {handled}"
                assert handled[-1] == newest, f"N1: {key} was last changed at {newest}, and seen at {handled}"
            alive = [row.key async for row in snap.scan(world.docs)]
        # Of what was deleted nothing is left, its acks included; else a record and an ack.
        rows = [row.decode() for table, row, _, _, _ in tablets_cells(local.store, WRITE) if table == "docs"]
        assert sorted(rows) == sorted(alive * 2)
        assert not list(tablets_cells(local.store, NOTIFY))
        result = await check(local.store, options=CheckOptions(pause_s=0.0))
        assert result.clean, result.findings
