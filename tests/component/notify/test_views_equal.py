"""Random graphs of views, random changes, clients that die: when nothing waits, the store has what the build makes."""

from __future__ import annotations

import contextlib
import random

import pytest
import trio

from tests.component.notify.kit import LONG_S, StoppedError, StoppingStore, client, memory, settle
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
            store = StoppingStore(local_of(first).store, backwards=rng.random() < 0.5)
            with contextlib.suppress(StoppedError, BaseExceptionGroup):
                async with client(local_of(first), graph.views.schema, store=store, one_step=life % 2 == 0) as doomed:
                    store.left = rng.randrange(10)
                    with trio.move_on_after(LONG_S):
                        async with doomed.worker(concurrency=4), trio.open_nursery() as nursery:
                            nursery.start_soon(doomed.wait_idle)
                            await store.stopped.wait()
                            nursery.cancel_scope.cancel()
            died += store.stopped.is_set()
        local = local_of(first)
    assert died >= 2
    async with client(local, graph.views.schema) as db, db.worker():
        await settle(db)
        await check_equal(db, graph.views, state)
