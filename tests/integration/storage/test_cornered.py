"""Failures around a batch: no slot for a reader, no address space, a full disk at the meta page; scans of damaged rows.
No caller waits for ever, and both paths say the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.errors import Corruption, Unavailable
from perco.storage import (
    APPLIED,
    LOG,
    TS_MAX,
    LmdbEngine,
    LmdbOptions,
    Mutation,
    NoReply,
    ScanQuery,
    ScanRequest,
    lmdb_native,
)
from perco.storage.keys import cell_key
from perco.storage.lmdb_tablet import _LONE_MIN
from tests.component.storage.stores import TABLE, lmdb_engine, newest, open_lmdb, put

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)


@pytest.fixture(params=["native", "slow"])
def path_taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "slow":
        monkeypatch.setenv("PERCO_NATIVE", "0")  # for child processes
        monkeypatch.setattr(lmdb_native, "_module", lambda: "PERCO_NATIVE=0")
    elif why_not := lmdb_native.native_why_not():
        pytest.skip(f"no extension here: {why_not}")
    return str(request.param)


def cell(group: str, value: bytes | None) -> Mutation:
    return Mutation(TABLE, [(b"a", [], [(group, 1 << 16, 1, value)])])


def fill_disk(data: Path) -> None:
    """From now on, what this process writes to the file finds no room."""
    full = os.open("/dev/full", os.O_WRONLY)
    for fd in os.listdir("/proc/self/fd"):
        if Path(f"/proc/self/fd/{fd}").resolve() == data.resolve():
            os.dup2(full, int(fd))
    os.close(full)


async def both(db: perco.Database, value: int) -> int:
    """A commit in two phases: the second one removes locks."""
    async with db.transaction() as txn:
        txn.set(n, "a", value)
        txn.set(n, "z", value)
    return txn.commit_ts


async def test_a_batch_is_answered_even_if_no_slot_for_readers_is_free(
    path_taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with perco.open(tmp_path / "store", SCHEMA) as db:
        await both(db, 1)
        assert all(
            (tablet.engine.native is None) == (path_taken == "slow")  # type: ignore[attr-defined]
            for tablet in inside(db).driver.store.tablets_here()
        )
        entries, failed = LmdbEngine.entries, []

        def full(self: LmdbEngine, group: str) -> int:
            failed.append(group)
            raise Unavailable("all reader slots are taken")

        monkeypatch.setattr(LmdbEngine, "entries", full)
        with trio.fail_after(30):
            await both(db, 2)
            await both(db, 3)
        assert "lock" in failed
        monkeypatch.setattr(LmdbEngine, "entries", entries)
        tablets: list[Any] = [each for each in inside(db).driver.store.tablets_here() if each.table == "docs"]
        with trio.fail_after(30):
            await both(db, 4)
            while not all("lock" in tablet._empty for tablet in tablets):  # phase two goes on in the background
                await trio.lowlevel.checkpoint()
        async with db.snapshot() as snap:
            assert (await snap.get(n, "a"), await snap.get(n, "z")) == (4, 4)


async def test_a_meta_page_that_cannot_be_written_leaves_no_caller_waiting(path_taken: str, tmp_path: Path) -> None:
    """LMDB then refuses everything."""
    async with open_lmdb(tmp_path, LmdbOptions(sync=False)) as (store, tablet):
        assert await store.apply([cell("lock", b"x")]) == [APPLIED]
        fill_disk(tablet.engine.path / "data.mdb")
        with trio.fail_after(30):
            for _ in range(2):
                [verdict] = await store.apply([cell("lock", None)])
                assert isinstance(verdict, NoReply) or "Failed" in repr(verdict)


_GROWN = """
import resource, sys, trio
from pathlib import Path
from perco.storage import LmdbOptions
from tests.component.storage.stores import newest, open_lmdb, put

async def main():
    async with open_lmdb(Path(sys.argv[1]), LmdbOptions(sync=False, map_bytes=64 << 20)) as (store, tablet):
        print(await store.apply([put(b"a", b"x")]))
        now = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (now + (30 << 20), -1))
        verdicts = [(await store.apply([put(b"%d" % i, b"v" * (4 << 20))]))[0] for i in range(24)]
        print(verdicts[0], "cannot grow" in repr(verdicts[-1]))
        [[cells]] = await store.read([newest(b"a")])
        print(cells[0][1])

trio.run(main)
"""


def test_a_map_for_which_there_is_no_address_space_is_a_full_store(path_taken: str, tmp_path: Path) -> None:  # S4 S6
    done = subprocess.run(
        [sys.executable, "-c", _GROWN, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split("\n")[:3] == ["[APPLIED]", "APPLIED True", "b'x'"], done.stderr


async def test_a_map_that_is_lost_is_not_touched_again(path_taken: str, tmp_path: Path) -> None:  # S6
    async with open_lmdb(tmp_path, LmdbOptions(sync=False)) as (store, tablet):
        assert await store.apply([put(b"a", b"x")]) == [APPLIED]
        engine = tablet.engine
        held = engine.native
        if held is not None:
            held.lose()
            assert held.read(b"a", [("data", 1, 0, TS_MAX, 1)], frozenset(), False) is None
            assert held.apply([put(b"b", b"y")], 0, 0, frozenset()) is None
            held.end_shared()
            engine.native = None
        assert await store.apply([put(b"b", b"y")]) == [APPLIED]
        assert (await store.read([newest(b"b")]))[0][0][0][1] == b"y"


@pytest.mark.parametrize("query", [ScanQuery("data", None, n=10), ScanQuery("data", (1,))], ids=["group", "column"])
@pytest.mark.parametrize("page", [256, 1])
def test_a_scan_of_a_row_that_does_not_decode_names_it(
    query: ScanQuery, page: int, path_taken: str, tmp_path: Path
) -> None:
    engine = lmdb_engine(tmp_path)
    with engine._env.begin(write=True) as txn:
        for row in (b"a\0\1", b"b\0\5xx"):
            txn.put(cell_key(row, 1, 5), b"v", db=engine._dbs["data"])
    with pytest.raises(Corruption, match="an unknown escape in the row"):
        engine.scan(ScanRequest(TABLE, b"", None, (query,), rows_max=page))
    engine.close()


def test_a_group_that_the_extension_does_not_know_is_added_again(tmp_path: Path) -> None:  # E1
    engine = lmdb_engine(tmp_path)
    if engine.native is None:
        pytest.skip("no extension here")
    native = engine.native

    class Refusing:
        def add(self, group: str) -> None:
            raise RuntimeError(group)

    engine.native = Refusing()
    with pytest.raises(RuntimeError):
        engine.add_groups([LOG])
    assert not engine.logs
    engine.native = native
    engine.add_groups([LOG])
    assert engine.logs
    assert native.apply([cell("write", b"x")], -(1 << 40), 0, frozenset()) == [APPLIED]
    assert engine.entries(LOG) == 1
    engine.close()


async def test_a_commit_that_is_cancelled_before_it_is_sent_has_not_happened(
    path_taken: str, tmp_path: Path
) -> None:  # T10
    async with perco.open(tmp_path / "store", SCHEMA) as db:
        for i in range(_LONE_MIN + 2):  # from now on, a mutation that comes alone is sent at once
            await db.put(n, "a", i)
        with trio.CancelScope() as scope:
            async with db.transaction() as txn:
                txn.set(n, "a", 100)
                scope.cancel()
        assert (scope.cancelled_caught, txn.outcome) == (True, "aborted")
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") == _LONE_MIN + 1
        assert await db.put(n, "a", 7)


async def test_mutations_that_come_alone_do_not_wait_for_others(tmp_path: Path) -> None:
    async with perco.open(tmp_path / "store", SCHEMA) as db:
        for i in range(_LONE_MIN + 2):
            await db.put(n, "a", i)
        [tablet] = [each for each in inside(db).driver.store.tablets_here() if each.table == "docs" and not each.start]
        before: Any = tablet.statistics()
        async with trio.open_nursery() as nursery:  # the first is sent at once, the others together
            for i in range(5):
                nursery.start_soon(db.put, n, f"b{i}", i)
        after: Any = tablet.statistics()
        assert (after.mutations - before.mutations, after.batches - before.batches) == (5, 2)
        async with trio.open_nursery() as nursery:  # several came at once: they wait for each other again
            for i in range(5):
                nursery.start_soon(db.put, n, f"b{i}", i)
        assert tablet.statistics().batches - after.batches == 1
