"""A store does not survive a fork, and a fork does not hold on to the store."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.errors import UsedAfterFork
from perco.storage import LmdbTablet
from perco.storage.lmdb_native import native_why_not
from tests.support.held import held
from tests.support.places import local_of

table = perco.Table("t")
value = table.column("v", perco.INT64)
schema = perco.Schema(table)


def test_a_child_that_outlives_its_parent_does_not_keep_the_folder_locked(tmp_path: Path) -> None:  # S5, O1
    hold_read, hold_write = os.pipe()
    owner = os.fork()
    if owner == 0:  # the owner: opens the store, forks a child that lingers, and dies

        async def own() -> None:
            async with perco.open(tmp_path / "store", schema) as db:
                async with db.transaction() as txn:
                    txn.set(value, b"k", 1)
                if os.fork() == 0:
                    os.close(hold_write)
                    os.read(hold_read, 1)  # lingers until the test is done
                    os._exit(0)
                os._exit(0)

        trio.run(own)
        os._exit(1)
    os.waitpid(owner, 0)

    async def again() -> int | None:
        async with perco.open(tmp_path / "store", schema) as db, db.snapshot() as snap:
            return await snap.get(value, b"k")

    try:
        assert trio.run(again) == 1
    finally:
        os.close(hold_write)
        os.close(hold_read)


def test_a_child_may_open_the_folder_anew(tmp_path: Path) -> None:  # S5
    """Beside its parent, which goes on writing; also where the folder is reached through a link."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    async def read(path: Path) -> int | None:
        async with perco.open(path, schema, readonly=True) as db, db.snapshot() as snap:
            return await snap.get(value, b"k")

    def child(path: Path) -> None:  # on a thread, for this one is in the parent's loop
        status = 2
        try:
            status = 0 if trio.run(read, path) == 1 else 1
        finally:
            os._exit(status)

    async def own(path: Path) -> None:
        async with perco.open(path, schema) as db:
            async with db.transaction() as txn:
                txn.set(value, b"k", 1)
            await inside(db).oracle.note()
            forked = os.fork()
            if forked == 0:
                thread = threading.Thread(target=child, args=(path,))
                thread.start()
                thread.join()
            _, status = await trio.to_thread.run_sync(os.waitpid, forked, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            async with db.transaction() as txn:
                txn.set(value, b"k", 2)
            async with db.snapshot() as snap:
                assert await snap.get(value, b"k") == 2

    trio.run(own, tmp_path / "store")
    trio.run(own, tmp_path / "link")


def test_a_child_of_a_client_is_told(tmp_path: Path) -> None:
    """The connection is its parent's, who goes on with it."""

    async def main() -> None:
        async with (
            perco.open(tmp_path / "store", schema),
            perco.open(f"unix:{tmp_path / 'store' / 'socket'}", schema) as client,
        ):
            await put(client, b"k", 1)
            forked = os.fork()
            if forked == 0:
                status = 2
                try:
                    put(client, b"k", 2).send(None)
                except UsedAfterFork:
                    status = 0
                finally:
                    os._exit(status)
            _, status = await trio.to_thread.run_sync(os.waitpid, forked, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            await put(client, b"k", 3)

    trio.run(main)


@pytest.mark.parametrize("thread", [False, True], ids=["from the loop's thread", "from another"])
@pytest.mark.parametrize("slow", [False, True], ids=["native", "slow"])
async def test_a_fork_while_reads_share_a_view_leaves_the_parents_view_alone(
    tmp_path: Path, thread: bool, slow: bool
) -> None:  # S3 S5
    """The child lets go of all that it has; the pages that the parent reads must stay."""
    async with perco.open(tmp_path / "store", schema) as db:
        await put(db, b"k", 1)
        [tablet] = [tablet for tablet in local_of(db).store.tablets() if tablet.table == table.name]
        assert isinstance(tablet, LmdbTablet)
        engine = tablet.engine
        if slow:
            engine.stay_slow()
        elif engine.native is None:
            pytest.skip(f"no extension here: {native_why_not()}")

        def shares() -> bool:
            return engine._shared is not None or (engine.native is not None and engine.native.open)

        def pins() -> list[bool]:
            slots = [line.split() for line in engine._env.readers().splitlines()[1:]]
            return [slot[-1].isdigit() for slot in slots]

        async with trio.open_nursery() as nursery:
            with held(engine):
                nursery.start_soon(put, db, b"other", 2)
                while not writes(tablet):
                    await trio.lowlevel.checkpoint()
                async with db.snapshot() as snap:
                    assert await snap.get(value, b"k") == 1
                    assert shares()
                    if thread:
                        await trio.to_thread.run_sync(fork_and_end)
                        assert shares()
                        assert True in pins(), "it still says what is read"
                    else:
                        fork_and_end()
                        assert not shares()
                    assert await snap.get(value, b"k") == 1
        async with db.snapshot() as snap:
            assert await snap.get(value, b"other") == 2


def writes(tablet: LmdbTablet) -> bool:
    """Whether a batch is being written, by the extension or without it."""
    return tablet.engine.busy or (tablet.engine.native is not None and tablet._work.busy)


def fork_and_end() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


async def put(db: perco.Database, key: bytes, number: int) -> None:
    async with db.transaction() as txn:
        txn.set(value, key, number)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("slow", [False, True], ids=["native", "slow"])
async def test_a_child_lets_go_of_what_its_parent_is_writing(tmp_path: Path, slow: bool) -> None:
    """S5. A lock that LMDB takes for a batch stays locked in the child: closing its environment might wait for ever."""
    async with perco.open(tmp_path / "store", schema, options=perco.Options(durability="process")) as db:
        await put(db, b"a", 1)
        [tablet] = [tablet for tablet in local_of(db).store.tablets() if tablet.table == "t"]
        assert isinstance(tablet, LmdbTablet)
        engine = tablet.engine
        if slow:
            engine.stay_slow()
        elif engine.native is None:
            pytest.skip(f"no extension here: {native_why_not()}")
        async with trio.open_nursery() as nursery:
            with held(engine):
                nursery.start_soon(put, db, b"a", 2)
                while not writes(tablet):
                    await trio.lowlevel.checkpoint()
                pid = os.fork()
                if pid == 0:
                    signal.alarm(20)
                    try:
                        engine._env.info()  # it is still open: nobody closed it
                        os._exit(7)
                    except BaseException:
                        os._exit(1)
                _, status = os.waitpid(pid, 0)  # noqa: ASYNC222
        assert os.waitstatus_to_exitcode(status) == 7
        async with db.snapshot() as snap:
            assert await snap.get(value, b"a") == 2
        assert not engine.busy
