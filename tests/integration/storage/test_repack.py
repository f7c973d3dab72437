"""Half empty pages are filled again, and nothing else changes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from perco.storage import LmdbOptions, Mutation, ScanQuery, ScanRequest
from tests.component.storage.stores import TABLE, open_lmdb, put_all

FAST = LmdbOptions(sync=False)


def content(tablet):
    query = ScanQuery("data", None, n=1 << 20)
    request = ScanRequest(TABLE, b"", None, (query,), rows_max=1 << 20, bytes_max=1 << 30, seeks_max=1 << 30)
    return tablet.scan(request).rows


async def fill(store, rows, size):
    for at in range(0, rows, 500):
        writes = [Mutation(TABLE, [(b"%06d" % row, [], [("data", 1, 1, b"x" * size)])]) for row in range(at, at + 500)]
        await put_all(store, *writes)


async def thin_out(store, rows, keep):
    rng = random.Random(4711)
    gone = [row for row in range(rows) if rng.random() > keep]
    await put_all(store, *[Mutation(TABLE, [(b"%06d" % row, [], [("data", 1, 1, None)])]) for row in gone])


async def repack_all(tablet, skip):
    start, rounds, worth = b"", 0, 0
    while start is not None:
        start, packed = await tablet.repack("data", start, 0 if rounds == 0 else skip)
        rounds, worth = rounds + 1, worth + packed
        assert rounds < 100, "it goes round in circles"
    return worth


@pytest.mark.parametrize("skip", [0, 500, 100_000])
async def test_half_empty_pages_are_filled(tmp_path: Path, skip: int):
    async with open_lmdb(tmp_path, FAST) as (store, tablet):
        await fill(store, 10_000, 100)
        full = tablet.engine.live_bytes()
        await thin_out(store, 10_000, 0.3)
        before, sparse = content(tablet), tablet.engine.live_bytes()
        assert await repack_all(tablet, skip)
        packed = tablet.engine.live_bytes()
        assert content(tablet) == before
        assert packed < sparse
        if not skip:
            assert packed < 0.55 * full
            assert await repack_all(tablet, 0) == 0, "a second time there is nothing to gain"


async def test_full_pages_and_long_values_are_left_alone(tmp_path: Path):
    async with open_lmdb(tmp_path, FAST) as (store, tablet):
        await fill(store, 3_000, 100)
        before = tablet.engine.used_bytes()
        assert await repack_all(tablet, 0) == 0
        await fill(store, 500, 5_000)
        assert await repack_all(tablet, 0) == 0
        assert tablet.engine.used_bytes() >= before
    async with open_lmdb(tmp_path / "empty", FAST) as (_, tablet):
        assert await tablet.repack("data", b"", 0) == (None, False)
