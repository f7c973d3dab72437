"""Random graphs of views, random changes, clients that die: when nothing waits, the store has what the build makes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import perco
from perco import views
from tests.component.notify.kit import client, memory, settle, work_and_die
from tests.support import everywhere
from tests.support.graphs import Graph, State, check_equal, write
from tests.support.places import local_of

SEEDS = (*range(31), 37, 47, 49, 60, 63)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_store_equals_the_build(seed: int) -> None:  # V1 to V7
    graph, rng, state = Graph(seed), random.Random(seed), State()
    async with client(memory(), graph.views.schema) as db:
        if seed % 3 == 0:  # some rows are older than the worker
            for _ in range(10):
                await write(db, graph.changes(rng, state))
        async with db.worker(concurrency=rng.choice([1, 4, 16])):
            for _ in range(3):
                for _ in range(rng.randrange(1, 15)):
                    await write(db, graph.changes(rng, state))
                await settle(db)
                await check_equal(db, graph.views, state)
            for rows in state.values():  # and all that was ever given is retracted
                for key, values in rows.items():
                    await write(db, [(column, key, None) for column in values])
                rows.clear()
                await settle(db)
            await check_equal(db, graph.views, state)


async def test_runs_of_views_share_transactions() -> None:  # N20
    docs, sizes = perco.Table("docs", key=perco.TEXT), perco.Table("sizes", key=perco.TEXT)
    body, size = docs.column("body", perco.TEXT), sizes.column("size", perco.INT64)
    declared = views.Views(perco.Schema(docs, sizes), batch=8)

    @declared.each(body, id="sizes", into=[size])
    def measure(row: perco.Row[str]) -> Iterator[views.Put[str]]:
        yield views.Put(sizes, row.key, {size: len(row[body] or "")})

    async with client(memory(), declared.schema) as db:
        await write(db, [(body, f"d{n}", "x" * n) for n in range(24)])
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert (worker.statistics()["sizes: body"].batched > 0) == (everywhere.over == everywhere.OWNER)
        async with db.snapshot() as snap:
            assert {row.key: row[size] async for row in snap.scan(sizes)} == {f"d{n}": n for n in range(24)}


@pytest.mark.parametrize("batch", [0, 257, True, "8"])
def test_a_batch_of_views_is_a_number_of_runs(batch: Any) -> None:
    with pytest.raises(perco.UsageError, match="Views: batch is"):
        views.Views(perco.Schema(), batch=batch)


def test_the_graphs_cover_what_views_can_be() -> None:
    kinds = set().union(*(Graph(seed).kinds for seed in SEEDS))
    groups = {f"{what} by {by}" for what in ("kept", "whole", "first") for by in ("prefix", "value")}
    joins = {f"join by {by}{how}" for by in ("key", "value", "both keys") for how in ("", ", left")}
    expected = {"each", "fan out", "components", "cogroup of many", "cogroup of single rows"} | groups | joins
    assert kinds == {f"{kind} of a {source}" for source in ("source", "view") for kind in expected}


@pytest.mark.parametrize("seed", range(12))
async def test_whoever_dies_the_store_equals_the_build(seed: int) -> None:  # V1, V3, V4
    graph, rng, state = Graph(seed), random.Random(seed), State()
    died = 0
    async with client(memory(), graph.views.schema, sweeping=False) as first:
        for life in range(8):
            async with client(local_of(first), graph.views.schema, one_step=life % 2 == 1) as writer:
                for _ in range(6):
                    await write(writer, graph.changes(rng, state))
            died += await work_and_die(first, graph.views.schema, rng, 10, one_step=life % 2 == 0)
        local = local_of(first)
    assert died >= 2
    async with client(local, graph.views.schema) as db, db.worker():
        await settle(db)
        await check_equal(db, graph.views, state)
