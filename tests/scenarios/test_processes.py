"""Other processes: an owner that is killed, a reader beside one, a child after a fork."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.storage import ReadRequest, RowCells
from tests.support import bank
from tests.support.faults import FaultyRowStore, use
from tests.support.owner import MOVED
from tests.support.places import local_of

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")
FIRST = bank.ACCOUNTS[0]
ROOT = Path(__file__).parents[2]


class Owner:
    """A process that owns the folder."""

    def __init__(self, folder: Path, *what: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.support.owner", str(folder), *what]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def said(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            _, errors = self.process.communicate()
            raise AssertionError(f"the process said nothing, and ended with {self.process.returncode}: {errors}")
        return line

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def owner(folder: Path, *what: str) -> Iterator[Owner]:
    process = Owner(folder, *what)
    try:
        yield process
    finally:
        process.kill()
        process.process.communicate()


async def read(db: perco.Database) -> int | None:
    """What the first account holds; and the total must be right, in every way of reading."""
    async with db.snapshot() as snap:
        assert await bank.total_by_get(snap) == await bank.total_by_scan(snap) == bank.TOTAL
        assert await bank.total_by_scan(snap, reverse=True) == bank.TOTAL
        return await snap.get(*FIRST)


BEFORE, AFTER = bank.OPENING, bank.OPENING - MOVED


@pytest.mark.parametrize(("at", "expected"), [("prewrite", BEFORE), ("commit", AFTER)])
async def test_an_owner_that_is_killed_in_a_commit(tmp_path: Path, at: str, expected: int) -> None:  # T1 T5 L1
    """Read beside what it left, ask for its outcome, open it and read again: always the same."""
    folder = tmp_path / "store"
    with owner(folder, f"killed@{at}") as process:
        token = process.said()
        assert process.process.wait() == -9
    async with perco.open(folder, bank.SCHEMA, readonly=True) as db:
        assert sum(tablet.entries("lock") for tablet in local_of(db).store.tablets()) > 0
        assert await read(db) == expected
    async with perco.open(folder, bank.SCHEMA, options=perco.Options(durability="process")) as db:
        assert (await db.outcome(token) > 0) == (expected == AFTER)
        assert await read(db) == expected
        await db.run(bank.scatter, bank.ACCOUNTS[1], 11)
        assert await read(db) == expected + 1
    async with perco.open(folder, bank.SCHEMA, readonly=True) as db:
        assert sum(tablet.entries("lock") for tablet in local_of(db).store.tablets()) == 0
        assert await read(db) == expected + 1


class Counting(FaultyRowStore):
    """Tells when some row has been read again and again: somebody waits for a lock there."""

    def __init__(self, store: object) -> None:
        super().__init__(store)  # type: ignore[arg-type]
        self.reads = 0
        self.waiting = trio.Event()

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        self.reads += 1
        if self.reads > 100:
            self.waiting.set()
        return await super().read(requests)


@pytest.mark.parametrize(("at", "waits"), [("prewrite", True), ("commit", False)])
async def test_a_reader_beside_waits_while_the_owner_lives(tmp_path: Path, at: str, waits: bool) -> None:  # T9
    """The owner stands still in the middle of a commit. Undecided: the reader waits until the owner is gone. Decided:
    it knows that the commit is above the note that it reads at."""
    folder = tmp_path / "store"
    with owner(folder, f"stopped@{at}") as process:
        process.said()
        async with perco.open(folder, bank.SCHEMA, readonly=True) as db:
            store = Counting(inside(db).driver.store)
            use(db, store)
            found = []

            async def look() -> None:
                found.append(await read(db))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(look)
                if waits:
                    await store.waiting.wait()
                    assert not found
                    process.kill()
            assert found == [BEFORE]


async def test_a_reader_beside_is_told_when_what_it_reads_has_gone(tmp_path: Path) -> None:  # G5
    """The owner does not know of it, so its snapshot holds nothing; it never sees a part of it."""
    folder = tmp_path / "store"
    with owner(folder, "vacuum") as process:
        assert process.said() == "open"
        async with perco.open(folder, bank.SCHEMA, readonly=True) as db:
            async with db.snapshot() as old:
                assert await old.get(*FIRST) == BEFORE
                scan = old.scan(bank.north)
                assert await anext(scan)
                process.go_on()
                watermark = int(process.said())
                gone = (
                    lambda: old.get(*FIRST),
                    lambda: old.get_many(bank.savings, bank.NAMES),
                    lambda: old.row(bank.north, "alice"),
                    lambda: old.scan(bank.south).all(),
                )
                for look in gone:
                    with pytest.raises(perco.errors.SnapshotTooOld) as caught:
                        await look()
                    assert (caught.value.asked, caught.value.oldest) == (old.start_ts, watermark)
            with pytest.raises(perco.errors.SnapshotTooOld):
                async with db.snapshot(ts=old.start_ts) as snap:
                    await snap.get(*FIRST)
            assert await read(db) == AFTER


async def test_a_snapshot_beside_ends_when_another_owner_comes(tmp_path: Path) -> None:  # T9
    """A killed owner's last batch may be on disk and not yet visible: it becomes visible in the past of a snapshot."""
    folder = tmp_path / "store"
    with owner(folder, "hold") as process:
        assert process.said() == "open"
        async with perco.open(folder, bank.SCHEMA, readonly=True) as db, db.snapshot() as beside:
            assert await bank.total_by_scan(beside) == bank.TOTAL
            process.kill()
            assert await bank.total_by_get(beside) == bank.TOTAL  # nobody has changed anything since
            async with db.snapshot() as orphaned:
                assert await bank.total_by_scan(orphaned) == bank.TOTAL
                with owner(folder, "hold") as successor:
                    assert successor.said() == "open"
                    for snap in (beside, orphaned):
                        with pytest.raises(perco.errors.OwnerChanged, match="Take a new one"):
                            await snap.get(*FIRST)
                        with pytest.raises(perco.errors.OwnerChanged):
                            await bank.total_by_get(snap)
                        with pytest.raises(perco.errors.OwnerChanged):
                            await bank.total_by_scan(snap)
                    assert await read(db) == BEFORE
                    async with db.snapshot(ts=orphaned.start_ts) as again:
                        assert await bank.total_by_scan(again) == bank.TOTAL


async def test_a_reader_beside_a_living_owner(tmp_path: Path) -> None:  # T9
    folder = tmp_path / "store"
    with owner(folder, "hold") as process:
        assert process.said() == "open"
        async with perco.open(folder, bank.SCHEMA, readonly=True) as db:
            assert await read(db) == BEFORE
            async with db.snapshot() as old:
                process.go_on()
                assert process.said() == "moved"
                assert await read(db) == AFTER
                assert await old.get(*FIRST) == BEFORE
                async with db.snapshot(ts=old.start_ts) as snap:
                    assert await snap.get(*FIRST) == BEFORE
            for write in (db.begin, lambda: db.run(bank.opening), lambda: db.outcome("1/1/north/61")):
                with pytest.raises(perco.errors.ReadOnly):
                    await write()
            with pytest.raises(perco.UsageError):
                await db.snapshot_at(ts=1 << 50)
        with pytest.raises(perco.errors.StoreLocked) as caught:
            async with perco.open(folder, bank.SCHEMA, options=perco.Options(shared=False)):
                pass
        assert caught.value.pid == process.process.pid
        async with perco.open(folder, readonly=True) as db, db.snapshot() as snap:  # with the store's own schema
            column = db.schema.tables["north"].columns["balance"]
            assert await snap.get(column, "alice") == b"%d" % AFTER  # a codec that it does not know reads as bytes


@pytest.mark.parametrize("what", ["begin", "snapshot", "run", "outcome"])
async def test_a_child_after_a_fork_is_told(tmp_path: Path, what: str) -> None:  # S5
    with owner(tmp_path / "store", "fork", what) as process:
        assert process.said() == "UsedAfterFork"
        assert process.said() == "whole"


@pytest.mark.parametrize("what", ["get", "scan", "commit"])
async def test_what_was_open_before_a_fork_is_refused_in_the_child(tmp_path: Path, what: str) -> None:  # S5
    with owner(tmp_path / "store", "fork", what) as process:
        assert process.said() == "UsedAfterFork"
        assert process.said() == "whole"
