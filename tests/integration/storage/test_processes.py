"""One process writes, others read beside it or die at the wrong moment."""

from __future__ import annotations

import zlib

import pytest

from perco.storage import Mutation
from tests.component.storage.stores import GROUPS, TABLE, lmdb_engine, newest, open_lmdb, put, put_all, value_of
from tests.integration.storage.children import SMALL_MAP, child


def told(value: bytes) -> str:
    return f"{len(value)} {zlib.crc32(value)}"


@pytest.mark.parametrize("sync", ["sync", "no sync"])
async def test_what_was_acknowledged_survives_the_death_of_the_process(tmp_path, sync):  # S1 S2
    with child("write_forever", tmp_path, sync) as writer:
        acknowledged = [int(writer.line()) for _ in range(100)]
        writer.process.kill()
        acknowledged += [int(line) for line in writer.lines() if line.endswith("0")]  # the last line may be cut
    async with open_lmdb(tmp_path) as (store, tablet):
        for n in acknowledged:
            for row in (b"x-%d" % n, b"y-%d" % n):
                assert await value_of(store, row) == b"%d" % n * 100
        found = tablet.entries("data")
        assert found % 2 == 0  # groups whole, acknowledged or not
        assert found >= 2 * len(acknowledged)
        await put_all(store, put(b"and on"))


async def test_a_reader_beside_the_writer_sees_what_is_committed(tmp_path):  # S3
    async with open_lmdb(tmp_path, SMALL_MAP) as (store, _):
        await put_all(store, put(b"a", b"first"))
        with child("read_beside", tmp_path) as reader:
            assert reader.line() == "open"
            assert reader.ask("data a") == told(b"first")
            assert reader.ask("data b") == "none"
            await put_all(store, put(b"a", b"second", ts=2), put(b"b", b"b"))
            assert reader.ask("data a") == told(b"second")
            assert reader.ask("data b") == told(b"b")


async def test_a_reader_beside_the_writer_goes_on_after_its_map_grew(tmp_path):  # S6
    large = b"large" * 1_600_000
    async with open_lmdb(tmp_path, SMALL_MAP) as (store, tablet):
        await put_all(store, put(b"a", b"small"))
        before = tablet.statistics().map_bytes
        with child("read_beside", tmp_path) as reader:
            assert reader.line() == "open"
            assert reader.ask("data a") == told(b"small")
            assert int(reader.ask("map")) < len(large)
            await put_all(store, put(b"b", large))
            assert tablet.statistics().map_bytes > before
            assert reader.ask("data b") == told(large)
            assert reader.ask("data a") == told(b"small")
            assert int(reader.ask("map")) == tablet.statistics().map_bytes


async def test_a_reader_finds_a_group_that_was_made_after_it_opened(tmp_path):
    async with open_lmdb(tmp_path, SMALL_MAP) as (store, tablet):
        with child("read_beside", tmp_path) as reader:
            assert reader.line() == "open"
            assert reader.ask("data:late a") == "none"
            await tablet.add_groups(["data:late"])
            await put_all(store, put(b"fill", b"x" * 8_000_000))  # so that its map is too small to look for the group
            await put_all(store, Mutation(TABLE, [(b"a", [], [("data:late", 1, 1, b"late")])]))
            assert reader.ask("data:late a") == told(b"late")


def test_a_reader_of_several_groups_answers_for_those_that_are_there(tmp_path):
    writer = lmdb_engine(tmp_path, SMALL_MAP, groups=["data"])
    writer.commit([put(b"a", b"x")], 0)
    writer.close()
    reader = lmdb_engine(tmp_path, SMALL_MAP, groups=GROUPS, readonly=True)
    everything = [(group, 1, 0, 9, 1) for group in ("write", "data", "lock")]
    assert reader.read(b"a", everything) == [[], [(1, b"x")], []]
    assert reader.entries("lock") == 0
    reader.close()


def test_slots_of_dead_readers_are_cleared_and_those_of_living_ones_are_not(tmp_path):
    engine = lmdb_engine(tmp_path, SMALL_MAP)
    with child("hold_view", tmp_path) as dying, child("hold_view", tmp_path) as living:
        assert (dying.line(), living.line()) == ("reading", "reading")
        assert engine.clear_dead_readers() == 0
        dying.kill()
        assert engine.clear_dead_readers() == 1
        assert engine.clear_dead_readers() == 0
    engine.close()


async def test_a_reader_that_died_pins_no_pages_once_its_slot_is_cleared(tmp_path):
    async with open_lmdb(tmp_path, SMALL_MAP) as (store, tablet):

        async def churn():
            """How far the file grows when the same cells are written again and again."""
            before = tablet.statistics().used_bytes
            for n in range(50):
                await put_all(store, put(b"a", b"%d" % n * 5000))
            return tablet.statistics().used_bytes - before

        await churn()
        with child("hold_view", tmp_path) as reader:
            assert reader.line() == "reading"
            assert await churn() > 200_000
            reader.kill()
        tablet.engine.clear_dead_readers()
        assert await churn() == 0
        assert await store.read([newest(b"a")]) == [[[(1, b"49" * 5000)]]]
