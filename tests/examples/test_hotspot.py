from __future__ import annotations

import random
from pathlib import Path

import perco
from examples import hotspot
from tests.examples.running import run


async def test_killed_again_and_again_each_document_counts_once(tmp_path: Path) -> None:
    rng = random.Random(3)
    for event in "ack", "commit":
        run("hotspot", tmp_path / "store", "--documents", 60, killed_at=(event, rng.randrange(20, 150)))
        async with perco.open(tmp_path / "store", hotspot.schema) as db:
            async with db.worker():
                await db.wait_idle()
            async with db.snapshot() as snap:
                assert await hotspot.wrong(snap) == 0
    assert run("hotspot", tmp_path / "store", "--documents", 20).endswith("0 cluster sizes are wrong\n")


async def test_who_is_connected_by_a_signal_does_not_conflict() -> None:
    async with perco.open("memory:", hotspot.schema) as db, db.worker(concurrency=hotspot.RUNS) as worker:
        await hotspot.load(db, hotspot.one, range(100))
        await hotspot.load(db, hotspot.two, range(100))
        found = worker.statistics()
        async with db.snapshot() as snap:
            assert await hotspot.wrong(snap) == 0
            assert sum([row.get(hotspot.size_two, 0) async for row in snap.scan(hotspot.clusters)]) == 100
            assert not await snap.scan(hotspot.news).all()
    assert found["count at once"].conflicts > 0
    assert found["look"].conflicts == 0
    assert found["look"].commits == 100
    assert found["gather"].commits + found["gather"].collapsed >= 100


async def test_more_news_than_one_run_takes(tmp_path: Path) -> None:
    async with perco.open("memory:", hotspot.schema) as db:
        async with db.transaction() as txn:
            for number in range(2500):
                txn.set(hotspot.added, ("c0", number), 1)
            txn.signal(hotspot.grown, "c0")
        async with db.worker() as worker:
            await db.wait_idle()
            assert worker.statistics()["gather"].commits == 3
        async with db.snapshot() as snap:
            assert await snap.get(hotspot.size_two, "c0") == 2500
