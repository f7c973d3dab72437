"""Observers over LMDB: the chain, a second opening, and processes that are killed while they run observers."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import perco
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


async def test_many_loaders_and_runs_at_once(tmp_path: Path) -> None:  # N3
    import trio

    async with perco.open(tmp_path / "store", chain.schema, options=chain.OPTIONS) as db, db.worker():
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(chain.load, db, number)
        await db.wait_idle()
        assert await chain.check_all_handled_once(db) == 120


def kill_at(folder: Path, event: int) -> Counter[str]:
    """Run the program in a process and kill it at its n-th event; returns what it had told by then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.notify.chain", str(folder), str(event)],
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


@pytest.mark.parametrize("events", [(1, 2, 3), (5, 30, 11), (60, 17, 90), (200, 44, 45)])
async def test_killed_at_any_event_every_change_is_handled_once(tmp_path: Path, events: tuple[int, ...]) -> None:
    """N1, N2, N3. Each process finds what the one before it left, and is killed in its turn."""
    told: Counter[str] = Counter()
    for event in events:
        told += kill_at(tmp_path / "store", event)
    assert sum(told.values()) == sum(events)
    async with perco.open(tmp_path / "store", chain.schema, options=chain.OPTIONS) as db, db.worker():
        await db.wait_idle()
        documents = await chain.check_all_handled_once(db)
        assert 3 * told["commit"] >= documents > 0 or not told["commit"]
        await chain.load(db, 99_999)
        await db.wait_idle()
        assert await chain.check_all_handled_once(db) == documents + 3
