"""The map grows (S6), the map ends, the disk ends (S4)."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import replace

import lmdb
import pytest
import trio

from perco.errors import Corruption, StoreFull, Unavailable, UsageError
from perco.storage import (
    APPLIED,
    GROUPS_MAX,
    PROTOCOL_GROUPS,
    TS_MAX,
    Failed,
    LmdbEngine,
    LmdbOptions,
    Mutation,
    NoReply,
    ScanQuery,
    ScanRequest,
)
from tests.component.storage.stores import (
    TABLE,
    delete,
    lmdb_engine,
    newest,
    open_lmdb,
    put,
    put_all,
    value_of,
)
from tests.integration.storage.children import child

TINY = LmdbOptions(sync=False, map_bytes=4096)
ROOM = len(PROTOCOL_GROUPS) + GROUPS_MAX + 1  # and the log (E1)
BOUNDED = replace(TINY, map_bytes_max=3 << 20)


async def test_the_map_grows_while_others_read(tmp_path):  # S6
    async with open_lmdb(tmp_path, TINY) as (store, tablet):
        before = tablet.statistics().map_bytes
        await put_all(store, put(b"0", b"0" * 1000))
        done = trio.Event()
        reads = 0

        async def write(first):
            for n in range(first, 200, 4):
                await put_all(store, put(b"%d" % n, b"%d" % n * 10_000))

        async def read():
            nonlocal reads
            while not done.is_set():
                assert (await value_of(store, b"0"))[:1] == b"0"
                await store.scan(ScanRequest(TABLE, b"", None, (ScanQuery("data", (1,)),), rows_max=4))
                reads += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            async with trio.open_nursery() as writers:
                for first in range(4):
                    writers.start_soon(write, first)
            done.set()
        assert reads
        assert tablet.statistics().map_bytes >= 16 * before
        for n in range(200):
            assert await value_of(store, b"%d" % n) == b"%d" % n * 10_000


async def test_many_small_cells_are_not_given_a_page_each(tmp_path):  # S4
    async with open_lmdb(tmp_path) as (store, tablet):
        writes = [("data", 1, ts, b"small") for ts in range(1, 20_001)]
        await put_all(store, Mutation(TABLE, [(b"row", [], writes)]))
        assert tablet.entries("data") == 20_000
        assert os.stat(tablet.engine.path / "data.mdb").st_size < 20_000 * 4096 / 5


async def test_one_mutation_larger_than_the_map_grows_it_in_one_step(tmp_path):  # S6
    async with open_lmdb(tmp_path, TINY) as (store, _):
        await put_all(store, put(b"a", b"a" * (8 << 20)))
        assert await value_of(store, b"a") == b"a" * (8 << 20)


async def test_a_batch_that_needs_more_of_the_map_than_foreseen_is_written_after_all(tmp_path):  # S6
    class Optimist(LmdbEngine):
        surprises = 0

        def has_map_for(self, need_bytes, *, reserve):
            return True

        def grow(self, need_bytes, *, reserve):
            self.surprises += 1
            return super().grow(need_bytes, reserve=reserve)

    async with open_lmdb(tmp_path, BOUNDED, engine=Optimist) as (store, tablet):
        await put_all(store, *[put(b"%d" % n, b"x" * 10_000) for n in range(100)])
        assert tablet.engine.surprises
        assert tablet.entries("data") == 100
        verdicts = await store.apply([put(b"large", b"x" * (8 << 20))])
        assert isinstance(verdicts[0].error, StoreFull)
        assert tablet.entries("data") == 100


async def test_where_the_map_ends_writes_fail_and_reads_go_on(tmp_path):  # S4
    made = []
    async with open_lmdb(tmp_path, BOUNDED) as (store, tablet):
        for n in range(1000):
            [verdict] = await store.apply([put(b"%d" % n, b"x" * 10_000)])
            if verdict is not APPLIED:
                break
            made.append(b"%d" % n)
        assert isinstance(verdict, Failed)
        assert isinstance(verdict.error, StoreFull)
        assert "map_bytes_max" in str(verdict.error)
        # It grew up to the bound, though that is no power of two of what it was.
        assert tablet.statistics().map_bytes == BOUNDED.map_bytes_max
        assert len(made) * 10_000 > BOUNDED.map_bytes_max // 2
        assert await store.read([newest(row) for row in made]) == [[[(1, b"x" * 10_000)]]] * len(made)
        assert await value_of(store, b"%d" % n) is None
        verdicts = await store.apply(
            [put(b"ordinary", b"x" * 10_000), delete(made[0], reserve=True), put(b"b", b"x" * 10_000, reserve=True)]
        )
        assert isinstance(verdicts[0], Failed)
        assert verdicts[1:] == [APPLIED, APPLIED]
    async with open_lmdb(tmp_path, BOUNDED) as (store, _):  # the bound is the bound after reopening, too
        assert isinstance((await store.apply([put(b"ordinary", b"x" * 10_000)]))[0], Failed)
    async with open_lmdb(tmp_path, replace(BOUNDED, map_bytes_max=64 << 20)) as (store, _):
        await put_all(store, *[put(b"more-%d" % n, b"x" * 10_000) for n in range(100)])
        assert await value_of(store, made[1]) == b"x" * 10_000
        assert await value_of(store, made[0]) is None


@pytest.mark.parametrize("ahead", ["ahead", "not ahead"])
async def test_a_full_disk_fails_its_callers_loses_nothing_and_passes(tmp_path, ahead):  # S4
    with child("fill_disk", tmp_path, ahead) as writer:
        [said] = writer.lines()
    assert writer.process.returncode == 0
    acknowledged = json.loads(said)
    async with open_lmdb(tmp_path) as (store, _):
        for row, size in acknowledged.items():
            assert await value_of(store, row.encode()) == row.encode()[:1] * size
        page = await store.scan(ScanRequest(TABLE, b"", None, (ScanQuery("data", (1,), n=9),), bytes_max=1 << 30))
        assert {row.decode() for row, _ in page.rows} == set(acknowledged)
        await put_all(store, put(b"more", b"x" * 100_000))


def test_a_file_that_is_not_lmdbs_is_corruption(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"not a database, whatever it says" * 1000)
    with pytest.raises(Corruption, match=r"data\.mdb"):
        lmdb_engine(tmp_path)


def test_more_locality_groups_than_lmdb_has_room_for_are_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=f"{GROUPS_MAX} locality groups"):
        lmdb_engine(tmp_path, groups=[f"data:{n}" for n in range(ROOM + 1)])


def test_every_group_that_is_allowed_fits_the_smallest_map(tmp_path):
    engine = lmdb_engine(tmp_path, TINY, groups=[f"data:{'g' * 60}{n}" for n in range(ROOM)])
    assert engine.read(b"a", [(f"data:{'g' * 60}{ROOM - 1}", 1, 0, TS_MAX, 1)]) == [[]]
    engine.close()


class FailingCommits:
    """An environment whose write transactions fail when they commit, before or after it has been made."""

    def __init__(self, env, *, made):
        self._env, self._made = env, made

    def __getattr__(self, name):
        return getattr(self._env, name)

    @contextmanager
    def begin(self, write=False):
        with self._env.begin(write=write) as txn:
            yield txn
            if write and not self._made:
                txn.abort()
        if write:
            raise lmdb.Error("mdb_txn_commit: Input/output error")


@pytest.mark.parametrize("made", [False, True])
async def test_a_commit_that_failed_is_told_as_such_if_nothing_of_it_can_be_seen(tmp_path, made):  # S4 T4
    async with open_lmdb(tmp_path) as (store, tablet):
        await store.apply([put(b"a")])
        tablet.engine.stay_slow()  # for the extension, see test_native.py
        env = tablet.engine._env
        tablet.engine._env = FailingCommits(env, made=made)
        [verdict] = await store.apply([put(b"b")])
        tablet.engine._env = env
        if made:
            assert isinstance(verdict, NoReply)
        else:
            assert isinstance(verdict, Failed)
            assert isinstance(verdict.error, Unavailable)
            assert "the disk failed" in str(verdict.error)
        assert (await value_of(store, b"b") is not None) == made
