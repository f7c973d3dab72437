"""While a batch is under way what is read shares one view; it ends with the batch."""

from __future__ import annotations

import trio

from perco.storage import BatchOptions
from tests.component.storage.stores import TABLE, put, value_of
from tests.integration.storage.gate import held_writer, open_gated


async def test_what_a_batch_wrote_is_seen_when_it_has_been_answered(tmp_path):  # T2 S3
    async with open_gated(tmp_path) as (store, _, engine):
        await store.apply([put(b"a", b"old")])
        assert engine._shared is None
        async with held_writer(store, engine, put(b"a", b"new")):
            assert await value_of(store, b"a") == b"old"
            shared = engine._shared
            assert shared is not None
            assert await value_of(store, b"a") == b"old"
            assert engine._shared is shared, "the second look opens nothing"
        assert engine._shared is None
        assert await value_of(store, b"a") == b"new"
        assert engine._shared is None, "nothing is left open while nobody writes"


async def test_one_batch_after_the_other(tmp_path):  # T2
    """Batches follow each other without a pause: each ends the view of the one before."""
    async with open_gated(tmp_path, BatchOptions(mutations_max=1)) as (store, _, engine):

        async def write_and_look(i):
            await store.apply([put(b"%d" % i, b"new")])
            assert await value_of(store, b"%d" % i) == b"new"
            seen.append(engine._shared is not None)

        seen = []
        async with held_writer(store, engine, put(b"z")) as nursery:
            for i in range(20):
                nursery.start_soon(write_and_look, i)
            await trio.testing.wait_all_tasks_blocked()
        assert len(seen) == 20
        assert any(seen), "some looked while the next batch was under way"


async def test_a_group_that_is_made_meanwhile_can_be_read(tmp_path):
    async with open_gated(tmp_path) as (store, tablet, engine):
        async with held_writer(store, engine, put(b"a")) as nursery:
            await value_of(store, b"a")
            assert engine._shared is not None
            nursery.start_soon(tablet.add_groups, ["data:new"])
        await store.apply([put(b"b")])
        [[found]] = await store.read([(TABLE, b"a", [("data:new", 1, 0, 9, 1)])])
        assert found == []


async def test_a_disk_that_hangs_pins_nothing(tmp_path):  # S3 T10
    async with open_gated(tmp_path) as (store, tablet, engine), trio.open_nursery() as nursery:
        with engine.held():
            nursery.start_soon(store.apply, [put(b"a")])
            await engine.wait_for(begun=1)
            await value_of(store, b"a")
            assert engine._shared is not None
            tablet.expire(0.0)
            assert engine._shared is None
            await value_of(store, b"a")
            assert engine._shared is None
