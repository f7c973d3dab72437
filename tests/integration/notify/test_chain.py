"""Observers over LMDB: the chain, a second opening, and processes that are killed while they run observers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import trio

import perco
import perco.aio
import perco.sync
from tests.integration.notify import chain

ROOT = Path(__file__).parents[3]


async def test_a_chain_runs_and_is_there_after_opening_again(tmp_path: Path) -> None:  # N1, N3
    async with perco.open(tmp_path / "store", chain.schema, options=chain.OPTIONS) as db, db.worker() as worker:
        for number in range(5):
            await chain.load(db, number)
        await db.wait_idle()
        assert await chain.check_all_handled_once(db) == 15
        assert {id: counted.commits for id, counted in worker.statistics().items()} == {"measure": 15, "sum": 15}
    async with perco.open(tmp_path / "store", chain.schema, options=chain.OPTIONS) as db, db.worker() as worker:
        await db.wait_idle()
        assert {id: counted.runs for id, counted in worker.statistics().items()} == {"measure": 0, "sum": 0}
        await chain.load(db, 5)
        await db.wait_for(db.statistics().last_ts)
        assert await chain.check_all_handled_once(db) == 18


async def test_what_was_loaded_without_a_worker_waits_on_the_disk(tmp_path: Path) -> None:  # N1
    async with perco.open(tmp_path / "store", chain.schema, options=chain.OPTIONS) as db:
        for number in range(5):
            await chain.load(db, number)
    async with perco.open(tmp_path / "store", chain.schema, options=chain.OPTIONS) as db:
        assert await db.pending() == 15
        async with db.worker():
            await db.wait_idle()
        assert await chain.check_all_handled_once(db) == 15


async def test_an_observer_registered_later_runs_for_what_is_on_the_disk(tmp_path: Path) -> None:  # N10
    bare = perco.Schema(chain.docs, chain.counts)
    async with perco.open(tmp_path / "store", bare, options=chain.OPTIONS) as db:
        for number in range(5):
            await chain.load(db, number)
    async with perco.open(tmp_path / "store", chain.schema, options=chain.OPTIONS) as db, db.worker():
        await db.wait_idle()
        assert await chain.check_all_handled_once(db) == 15


@pytest.mark.parametrize("batch", [1, 8])
async def test_many_loaders_and_runs_at_once(tmp_path: Path, batch: int) -> None:  # N3, N20
    async with perco.open(tmp_path / "store", chain.declared(batch), options=chain.OPTIONS) as db:
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(chain.load, db, number)
        async with db.worker() as worker:
            async with trio.open_nursery() as nursery:
                for number in range(40, 60):
                    nursery.start_soon(chain.load, db, number)
            await db.wait_idle()
            assert (worker.statistics()["measure"].batched > 0) == (batch > 1)
        assert await chain.check_all_handled_once(db) == 180


@pytest.mark.parametrize("front", ["asyncio", "threads"])
def test_runs_for_asyncio_and_in_threads_share_transactions(tmp_path: Path, front: str) -> None:  # N20
    schema = perco.Schema(chain.docs, chain.counts)
    keys = [f"a{number}" for number in range(30)]

    def fill(db: perco.sync.Database) -> None:
        with db.transaction() as txn:
            for key in keys:
                txn.set(chain.body, key, b"some bytes")

    async def of_asyncio() -> int:
        @schema.observe(chain.body, id="measure", batch=8)
        @perco.aio.observer
        async def measure(txn: perco.aio.Transaction, change: perco.Change[str, bytes]) -> None:
            await asyncio.sleep(0)
            txn.set(chain.size, change.key, len(await txn.get(chain.body, change.key) or b""))

        async with perco.aio.open(tmp_path / "store", schema, options=chain.OPTIONS) as db:
            async with db.transaction() as txn:
                for key in keys:
                    txn.set(chain.body, key, b"some bytes")
            async with db.worker() as worker:
                await db.wait_idle(timeout=60)
                async with db.snapshot() as snap:
                    assert list((await snap.get_many(chain.size, keys)).values()) == [10] * 30
                return worker.statistics()["measure"].batched

    def in_threads() -> int:
        @schema.observe(chain.body, id="measure", batch=8)
        @perco.sync.observer
        def measure(txn: perco.sync.Transaction, change: perco.Change[str, bytes]) -> None:
            txn.set(chain.size, change.key, len(txn.get(chain.body, change.key) or b""))

        with perco.sync.open(tmp_path / "store", schema, options=chain.OPTIONS) as db:
            fill(db)
            with db.worker() as worker:
                db.wait_idle(timeout=60)
                with db.snapshot() as snap:
                    assert list(snap.get_many(chain.size, keys).values()) == [10] * 30
                return worker.statistics()["measure"].batched

    assert (asyncio.run(of_asyncio()) if front == "asyncio" else in_threads()) > 0


def kill_at(folder: Path, event: int, batch: int) -> Counter[str]:
    """Run the program in a process and kill it at its n-th event; returns what it had told by then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.notify.chain", str(folder), str(event), str(batch)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process:
        told = [process.stdout.readline().decode().strip() for _ in range(event)]
        process.kill()
    assert process.returncode == -signal.SIGKILL, "it was killed, it did not fail"
    return Counter(told)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("events", [(1, 2, 3), (5, 30, 11), (60, 17, 90), (200, 44, 45)])
async def test_killed_at_any_event_every_change_is_handled_once(
    tmp_path: Path, events: tuple[int, ...], batch: int
) -> None:
    """N1, N2, N3. Each process finds what the one before it left, and is killed in its turn."""
    told: Counter[str] = Counter()
    for event in events:
        told += kill_at(tmp_path / "store", event, batch)
    assert sum(told.values()) == sum(events)
    async with perco.open(tmp_path / "store", chain.schema, options=chain.OPTIONS) as db, db.worker():
        await db.wait_idle()
        documents = await chain.check_all_handled_once(db)
        assert 3 * told["commit"] >= documents > 0 or not told["commit"]
        await chain.load(db, 99_999)
        await db.wait_idle()
        assert await chain.check_all_handled_once(db) == documents + 3
