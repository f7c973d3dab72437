from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import trio
import trio.testing

import perco
from examples import features
from tests.examples.running import run

EPOCH = 1_700_000_000.0


async def test_killed_again_and_again_each_purchase_counts_once(tmp_path: Path) -> None:
    rng = random.Random(5)
    for event in "ack", "commit":
        run("features", tmp_path / "store", "--day", 0, killed_at=(event, rng.randrange(20, 120)))
    assert "rows of features, 0 differ from a batch" in run("features", tmp_path / "store", "--day", 0)
    async with perco.open(tmp_path / "store", features.schema) as db, db.snapshot() as snap:
        known = await features.read(snap)
        assert known == await features.batch(snap)
        sold = features.DAYS * features.PER_DAY
        assert (
            0.9 * sold < sum(n for (kind, _), (n, _) in known.items() if kind == "user") < sold
        )  # some were sent back


async def test_features_are_read_as_they_were(autojump_clock: trio.testing.MockClock) -> None:
    def wall() -> float:
        return EPOCH + trio.current_time()

    options = perco.Options(wall=wall)
    seen = []
    async with perco.open("memory:", features.schema, options=options) as db, db.worker(concurrency=8):
        for day in range(3):
            await features.sell_for_a_day(db, day)
            await trio.sleep(10)
            async with db.snapshot() as snap:
                seen.append((wall(), await features.read(snap)))
            await trio.sleep(10)
        for when, then in seen:
            async with db.snapshot(at=datetime.fromtimestamp(when, UTC)) as past:
                assert await features.read(past) == then
    assert len({str(then) for _, then in seen}) == 3
