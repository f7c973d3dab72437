"""Snapshots of the past: by timestamp, and by wall time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
import trio
import trio.testing

import perco
from perco.clock.oracle import newest_note
from perco.database.database import Database
from perco.database.inside import inside
from perco.database.local import LocalOwner
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)
EPOCH = 1_700_000_000.0


class Wall:
    """The machine's clock: trio's, and what somebody set it by."""

    def __init__(self) -> None:
        self.set_by_s = 0.0

    def __call__(self) -> float:
        return EPOCH + trio.current_time() + self.set_by_s


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(EPOCH + seconds, UTC)


async def put(db: perco.Database, value: int) -> int:
    async with db.transaction() as txn:
        txn.set(n, "k", value)
    return txn.commit_ts


@pytest.fixture
def wall() -> Wall:
    return Wall()


def options(wall: Wall) -> perco.Options:
    return perco.Options(wall=wall)


async def test_a_snapshot_at_a_timestamp_sees_what_was_committed_by_then() -> None:  # T15
    async with perco.open("memory:", SCHEMA) as db:
        commits = [await put(db, i) for i in range(5)]
        async with db.transaction() as txn:
            txn.delete(n, "k")
        for i, commit_ts in enumerate(commits):
            async with db.snapshot(ts=commit_ts) as snap:
                assert snap.start_ts == commit_ts
                assert await snap.get(n, "k") == i
            async with db.snapshot(ts=commit_ts - 1) as snap:
                assert await snap.get(n, "k") == (i - 1 if i else None)
        async with db.snapshot(ts=txn.commit_ts) as snap:
            assert await snap.get(n, "k") is None


async def test_a_timestamp_that_was_not_issued_is_an_error() -> None:  # T15
    async with perco.open("memory:", SCHEMA) as db:
        last = await put(db, 1)
        async with db.snapshot(ts=last):
            pass
        for ts in (0, -1, last + 1, 1 << 60):
            with pytest.raises(perco.UsageError, match="timestamps so far"):
                await db.snapshot_at(ts=ts)


async def test_a_snapshot_at_a_timestamp_waits_for_what_may_still_commit_below_it() -> None:  # T9 T15
    from tests.support.faults import gated

    async with perco.open("memory:", SCHEMA) as db:
        await put(db, 1)
        gate = await gated(db, "commit")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, db, 2)
            await gate.reached()
            found = []

            async def read() -> None:
                async with db.snapshot(ts=inside(db).oracle.last) as snap:
                    found.append(await snap.get(n, "k"))

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            assert not found
            gate.open()
        assert found == [2]


async def test_at_a_wall_time_sees_what_was_acknowledged_up_to_a_second_before(
    autojump_clock: trio.testing.MockClock, wall: Wall
) -> None:  # O3 T15
    async with perco.open("memory:", SCHEMA, options=options(wall)) as db:
        for second in range(1, 20):
            await trio.sleep_until(second + 0.25)
            await put(db, second)
        await trio.sleep_until(30)
        for second in range(2, 20):
            async with db.snapshot(at=moment(second + 0.2)) as snap:
                assert await snap.get(n, "k") == second - 1
                assert snap.wall is not None
                assert second + 0.2 - 1 <= snap.wall - EPOCH <= second + 0.2
        async with db.snapshot(at=moment(29)) as snap:
            assert await snap.get(n, "k") == 19


async def test_a_wall_time_may_come_from_any_zone(autojump_clock: trio.testing.MockClock, wall: Wall) -> None:  # T15
    async with perco.open("memory:", SCHEMA, options=options(wall)) as db:
        await put(db, 1)
        await trio.sleep(5)
        await put(db, 2)
        await trio.sleep(5)
        there = moment(3).astimezone(timezone(timedelta(hours=-9)))
        async with db.snapshot(at=there) as snap:
            assert await snap.get(n, "k") == 1


async def test_naive_future_and_forgotten_moments_are_errors(
    autojump_clock: trio.testing.MockClock, wall: Wall
) -> None:  # T15
    async with perco.open("memory:", SCHEMA, options=options(wall)) as db:
        await trio.sleep(10)
        await put(db, 1)
        await trio.sleep(10)
        with pytest.raises(perco.UsageError, match="aware datetime"):
            await db.snapshot_at(at=datetime(2023, 11, 14, 22, 13, 25))
        with pytest.raises(perco.UsageError, match="future"):
            await db.snapshot_at(at=moment(trio.current_time() + 0.5))
        with pytest.raises(
            perco.errors.SnapshotTooOld, match=r"the store is newer than that .* first noted at 2023-11-14"
        ):
            await db.snapshot_at(at=moment(-3600))
        with pytest.raises(perco.UsageError, match="not both"):
            await db.snapshot_at(at=moment(1), ts=1)
        async with db.snapshot(at=moment(trio.current_time())) as snap:
            assert await snap.get(n, "k") == 1


async def test_without_any_note_every_past_moment_is_too_old(
    autojump_clock: trio.testing.MockClock, wall: Wall
) -> None:  # T15
    async with perco.open("memory:", SCHEMA, options=options(wall)) as db:
        with pytest.raises(
            perco.errors.SnapshotTooOld, match=r"the store is newer than that \(its clock was not noted yet\)"
        ):
            await db.snapshot_at(at=moment(0))


async def test_too_old_is_told_in_what_was_asked_for(autojump_clock: trio.testing.MockClock, wall: Wall) -> None:  # G5
    schema = perco.Schema(docs, keep=perco.Keep(seconds=60))
    async with perco.open("memory:", schema, options=options(wall)) as db:
        first = await put(db, 1)
        for i in range(20):
            await trio.sleep(10)
            await put(db, i)
        await db.vacuum()
        with pytest.raises(
            perco.errors.SnapshotTooOld, match=f"no snapshot at timestamp {first}: .* is timestamp"
        ) as caught:
            await db.snapshot_at(ts=first)
        assert type(caught.value.oldest) is int
        with pytest.raises(perco.errors.SnapshotTooOld, match=r"perco\.Keep") as caught:
            await db.snapshot_at(at=moment(60))
        assert caught.value.asked == moment(60).timestamp()
        assert type(caught.value.oldest) is float
        async with db.snapshot(at=datetime.fromtimestamp(caught.value.oldest, UTC)) as snap:  # the error is right
            assert snap.wall == caught.value.oldest
            assert await snap.get(n, "k") is not None


async def test_a_table_kept_for_less_is_told_in_what_was_asked_for(
    autojump_clock: trio.testing.MockClock, wall: Wall
) -> None:  # G5
    short = perco.Table("short", key=perco.TEXT, keep=perco.Keep(seconds=60))
    m = short.column("m", perco.INT64)
    async with perco.open("memory:", perco.Schema(docs, short), options=options(wall)) as db:
        for i in range(20):
            await put(db, i)
            async with db.transaction() as txn:
                txn.set(m, "k", i)
            await trio.sleep(10)
        await db.vacuum()
        async with db.snapshot(at=moment(60)) as snap:
            assert await snap.get(n, "k") is not None
            with pytest.raises(perco.errors.SnapshotTooOld, match=r"of table 'short' at 20\d\d-") as caught:
                await snap.get(m, "k")
        assert isinstance(caught.value.oldest, float)
        async with db.snapshot(at=datetime.fromtimestamp(caught.value.oldest, UTC)) as snap:
            assert await snap.get(m, "k") is not None


async def test_a_clock_set_back_an_hour(autojump_clock: trio.testing.MockClock, wall: Wall) -> None:  # O3 T15
    """It stands still for that hour: moments before it keep their meaning, and locks their order."""
    async with perco.open("memory:", SCHEMA, options=options(wall)) as db:
        await put(db, 1)
        await trio.sleep(10)
        await put(db, 2)
        await trio.sleep(10)
        await put(db, 2)  # so that the store has been told how late it is
        wall.set_by_s = -3600.0
        await put(db, 3)
        await trio.sleep(10)
        async with db.snapshot(at=moment(5)) as snap:
            assert await snap.get(n, "k") == 1
        async with db.snapshot(at=moment(15)) as snap:
            assert await snap.get(n, "k") == 2
        with pytest.raises(perco.errors.SnapshotTooOld):
            await db.snapshot_at(at=moment(20 - 3600))
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") == 3
        await trio.sleep(3600)
        await put(db, 4)
        await trio.sleep(10)
        async with db.snapshot(at=datetime.fromtimestamp(wall() - 5, UTC)) as snap:
            assert await snap.get(n, "k") == 4
        async with db.snapshot(at=moment(15)) as snap:
            assert await snap.get(n, "k") == 2


async def test_a_machine_suspended_for_an_hour(autojump_clock: trio.testing.MockClock, wall: Wall) -> None:  # L1 T15
    """The wall clock is an hour later and nothing else has moved: a lock that looks an hour old is not a dead one's,
    and moments of that hour mean what stood when the machine went to sleep."""
    from perco.storage import WRITE
    from tests.component.notify.kit import HoldingStore, writes_to

    async with perco.open("memory:", SCHEMA, options=options(wall)) as db:
        await put(db, 1)
        await trio.sleep(10)
        store = HoldingStore(local_of(db).store, lambda mutation: writes_to(mutation, WRITE, "k"))
        inside(db).driver.store = inside(db).driver.reads = store
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, db, 2)
            await store.held.wait()  # its lock stands, its commit is on the way
            wall.set_by_s = 3600.0

            @nursery.start_soon
            async def read() -> None:
                async with db.snapshot() as snap:
                    assert await snap.get(n, "k") == 2  # it waited for the lock's owner

            await trio.testing.wait_all_tasks_blocked()
            assert db.statistics().counters.lock_waits == 1
            store.let_go()
        assert db.statistics().counters.rolled_back == 0
        await trio.sleep(10)
        async with db.snapshot(at=moment(5)) as snap:
            assert await snap.get(n, "k") == 1
        async with db.snapshot(at=moment(1800)) as snap:
            assert await snap.get(n, "k") == 1
            assert snap.wall is not None
            assert snap.wall <= EPOCH + 10
        async with db.snapshot(at=datetime.fromtimestamp(wall() - 5, UTC)) as snap:
            assert await snap.get(n, "k") == 2


async def test_a_clock_set_back_does_not_keep_the_locks_of_the_dead(
    autojump_clock: trio.testing.MockClock, wall: Wall
) -> None:  # L1 O3
    """No wall time decides whether a transaction lives: after a restart every lock is dead."""
    from tests.support.machines import CrashedError, Machine

    machine = Machine(SCHEMA, one_step=False)
    async with machine.crashing(1, made=False, options=options(wall)) as (db, _):
        with pytest.raises(CrashedError):
            await put(db, 1)
    assert len(machine.rows.locks()) == 1
    wall.set_by_s = -3600.0
    async with machine.opened(options(wall)) as db, db.snapshot() as snap:
        assert await snap.get(n, "k") is None
    assert not machine.locks()


async def test_a_snapshot_of_the_past_cannot_be_written_to() -> None:
    async with perco.open("memory:", SCHEMA) as db, db.snapshot() as snap:
        assert not hasattr(snap, "set")


async def test_who_opens_a_store_notes_at_once_what_was_committed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # O3
    async def dies(_: Database) -> None:
        """Before it notes the clock."""

    with monkeypatch.context() as patched:
        patched.setattr(LocalOwner, "note_now", dies)
        async with perco.open(tmp_path / "s", SCHEMA) as db:
            commit_ts = await put(db, 1)
            assert await newest_note(local_of(db).store) is None
    async with perco.open(tmp_path / "s", SCHEMA) as db:
        note = await newest_note(local_of(db).store)
        assert note is not None
        assert commit_ts <= note[0] < await put(db, 2)
        async with db.snapshot(ts=note[0]) as snap:
            assert await snap.get(n, "k") == 1
