"""A tablet looks for nothing in groups that are empty, and knows when they are not."""

from __future__ import annotations

import random

from perco.storage import ABSENT, APPLIED, LOCK, PRESENT, ROLLBACK, TS_MAX, Mutation, Refused
from tests.component.storage.stores import TABLE, open_lmdb
from tests.integration.storage.gate import held_writer, open_gated

UNLOCKED = (ABSENT, LOCK, 1, 0, TS_MAX)


def mutation(row, *writes, checks=()):
    return Mutation(TABLE, ((row, checks, writes),))


def put(row=b"a"):
    return mutation(row, (LOCK, 1, 5, b"x"))


def cut(row=b"a"):
    return mutation(row, (LOCK, 1, 5, None))


async def held(store, row):
    [[found]] = await store.read([(TABLE, row, [(LOCK, 1, 0, TS_MAX, 1)])])
    return [ts for ts, _ in found]


async def test_a_lock_is_seen_by_who_comes_behind_it_in_the_same_batch(tmp_path):  # T7
    async with open_gated(tmp_path) as (store, tablet, engine):
        found = []

        async def apply():
            found.extend(await store.apply([put(), mutation(b"a", checks=[UNLOCKED])]))

        async with held_writer(store, engine, mutation(b"z", ("data", 1, 1, b""))) as nursery:
            assert LOCK in tablet._empty
            nursery.start_soon(apply)
        assert found == [APPLIED, Refused(0, 0)]
        assert [len(batch) for batch in engine.batches] == [1, 2]
        assert await held(store, b"a") == [5]


async def test_a_lock_on_its_way_keeps_its_group_from_being_taken_for_empty(tmp_path):  # T9
    async with open_gated(tmp_path) as (store, tablet, engine):
        await store.apply([put()])
        assert LOCK not in tablet._empty
        async with held_writer(store, engine, cut()) as nursery:
            nursery.start_soon(store.apply, [put(b"b")])
        assert LOCK not in tablet._empty
        assert await held(store, b"a") == []
        assert await held(store, b"b") == [5]
        assert await store.apply([mutation(b"b", checks=[UNLOCKED])]) == [Refused(0, 0)]


async def test_a_group_whose_last_cell_has_gone_is_empty_again(tmp_path):
    async with open_lmdb(tmp_path) as (store, tablet):
        await store.apply([put(), put(b"b")])
        await store.apply([cut()])
        assert LOCK not in tablet._empty
        await store.apply([cut(b"b")])
        assert LOCK in tablet._empty
        assert await store.apply([mutation(b"b", checks=[(PRESENT, LOCK, 1, 5, 5)])]) == [Refused(0, 0)]


async def test_what_a_folder_holds_is_known_when_it_is_opened(tmp_path):
    async with open_lmdb(tmp_path) as (store, _):
        await store.apply([put()])
    async with open_lmdb(tmp_path) as (store, tablet):
        assert LOCK not in tablet._empty
        assert ROLLBACK in tablet._empty
        assert await held(store, b"a") == [5]


async def test_what_is_taken_for_empty_is_empty_at_every_moment(tmp_path):
    rng = random.Random(1)
    skipped = 0
    async with open_lmdb(tmp_path) as (store, tablet):
        for _ in range(300):
            kind = rng.choice((put, cut, cut, cut))
            await store.apply([kind(rng.choice((b"a", b"b"))) for _ in range(rng.randint(1, 3))])
            for group in tablet._empty:
                assert not tablet.entries(group)
            skipped += LOCK in tablet._empty
    assert 50 < skipped < 280
