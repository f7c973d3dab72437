"""A backup is restored as of an earlier timestamp (B6)."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import perco
from perco.backup import trimming
from perco.backup.restoring import RestoreOptions, restore
from perco.check.repair import RepairResult, repair
from perco.errors import SnapshotTooOld, UsageError
from tests.integration.backup.stores import accounts, begin, contents, move, must_be_sound, opened

# Rows with a signal: `seen` counts what observers of the signal have read.
rows = perco.Table("rows", key=perco.INT64)
value = rows.column("value", perco.INT64)
raised = rows.signal("raised")
seen = perco.Table("seen", key=perco.INT64)
last = seen.column("last", perco.INT64)
SIGNALLING = perco.Schema(rows, seen)


@SIGNALLING.observe(value, id="raise")
async def raise_it(txn: perco.Transaction, change: perco.Change[int, int]) -> None:
    txn.signal(raised, change.key)


@SIGNALLING.observe(raised, id="look")
async def look(txn: perco.Transaction, change: perco.Change[int, int]) -> None:
    now = await txn.get(value, change.key)
    if now is not None:
        txn.set(last, change.key, now)


@pytest.fixture(autouse=True)
def nothing_to_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is sound before it is repaired: the number of repairs in one check is limited."""

    async def noted(*arguments: Any, **options: Any) -> RepairResult:
        done = await repair(*arguments, **options)
        assert not [finding.what for finding in done.repaired]
        return done

    monkeypatch.setattr(trimming, "repair", noted)


@pytest.mark.parametrize("seed", range(4))
async def test_it_is_what_it_was_and_its_observers_go_on(tmp_path: Path, seed: int) -> None:
    """Some of the observers' runs came later than the timestamp: they are made again."""
    rng, stamps = random.Random(seed), []
    async with opened(tmp_path / "store") as db:
        await begin(db)
        for _ in range(3):
            async with db.worker():
                stamps += [await move(db, rng) for _ in range(15)]
                await db.wait_idle(timeout=60)
            stamps += [await move(db, rng) for _ in range(15)]  # nothing observes these for a while
        async with db.worker():
            await db.wait_idle(timeout=60)
        backup = await db.backup(tmp_path / "backups")
        wanted = {ts: await contents(db, ts=ts) for ts in [*rng.sample(stamps, 3), backup.ts]}
    for ts, there in wanted.items():
        folder = tmp_path / f"as-of-{ts}"
        await restore(str(tmp_path / "backups"), str(folder), RestoreOptions(at=ts))
        async with opened(folder) as db:
            assert await contents(db) == there
            with pytest.raises(perco.errors.TimelineLost):
                await anext(aiter(db.changes(accounts, since=ts + 1)))
            newer = await move(db, rng)
            assert [each.commit_ts async for each in db.changes(accounts, since=ts)] == [newer]
            await must_be_sound(db)


async def test_a_signal_that_was_raised_before_and_handled_after_is_handled_again(tmp_path: Path) -> None:  # N5
    async with perco.open(tmp_path / "store", SIGNALLING) as db:
        written = []
        for number in range(10):
            async with db.transaction() as txn:
                txn.set(value, number % 4, number)
            written.append(txn.commit_ts)
            async with db.worker():
                await db.wait_idle(timeout=60)
        await db.backup(tmp_path / "backups")
        async with db.snapshot() as snap:
            assert await snap.get_many(last, range(4)) == {0: 8, 1: 9, 2: 6, 3: 7}
        runs = [(await db.failed()), await db.waiting()]
        assert not any(runs[1].values())
    for number, commit_ts in enumerate(written):
        for ts in range(commit_ts, commit_ts + 4):  # the change, the run that raises, the run that looks, and between
            folder = tmp_path / f"as-of-{ts}"
            await restore(str(tmp_path / "backups"), str(folder), RestoreOptions(at=ts))
            async with perco.open(folder, SIGNALLING) as db, db.worker():
                await db.wait_idle(timeout=60)
                wanted = {key: max(n for n in range(number + 1) if n % 4 == key) for key in range(min(number + 1, 4))}
                async with db.snapshot() as snap:
                    found = await snap.get_many(last, range(4))
                assert {key: n for key, n in found.items() if n is not None} == wanted, (number, ts - commit_ts)


async def test_as_of_a_time(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as db:
        await begin(db)
        before = await contents(db)
        await db.backup(tmp_path / "backups")
    now = datetime.now(UTC)
    await restore(str(tmp_path / "backups"), str(tmp_path / "again"), RestoreOptions(at=now))
    async with opened(tmp_path / "again") as db:
        assert await contents(db) == before
    with pytest.raises(SnapshotTooOld):
        await restore(str(tmp_path / "backups"), str(tmp_path / "other"), RestoreOptions(at=now - timedelta(days=9)))
    assert not (tmp_path / "other").exists()


async def test_what_the_backup_does_not_have_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as db:
        await begin(db)
        early = await move(db, random.Random(1))
        backup = await db.backup(tmp_path / "backups")
        await move(db, random.Random(1))
    for at, said in ((backup.ts + 1, "take a later backup"), (0, "take a later backup")):
        with pytest.raises(UsageError, match=said):
            await restore(str(tmp_path / "backups"), str(tmp_path / "again"), RestoreOptions(at=at))
    with pytest.raises(UsageError, match="an aware datetime"):
        RestoreOptions(at=datetime(2026, 3, 1))
    assert early <= backup.ts


async def test_what_the_vacuum_has_removed_is_refused(tmp_path: Path) -> None:
    table = perco.Table("rows", key=perco.INT64, keep=perco.Keep(seconds=0))
    column = table.column("value", perco.INT64)
    async with perco.open(tmp_path / "store", perco.Schema(table)) as db:
        for number in range(3):
            async with db.transaction() as txn:
                txn.set(column, 1, number)
            if not number:
                early = txn.commit_ts
        await db.vacuum()
        await db.backup(tmp_path / "backups")
    with pytest.raises(SnapshotTooOld):
        await restore(str(tmp_path / "backups"), str(tmp_path / "again"), RestoreOptions(at=early))
    assert not (tmp_path / "again").exists()
