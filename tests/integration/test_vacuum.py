"""Old versions in a folder: the space that they took is used again, even on a full disk."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
import trio
import trio.testing

import perco
from perco.check.check import check
from perco.database.inside import inside, local_owner
from perco.history.vacuum import slice_s
from perco.storage import ROLLBACK, WRITE, LmdbTablet
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
body = docs.column("body", perco.BYTES)
SCHEMA = perco.Schema(docs, keep=perco.Keep(seconds=0))
BY_HAND = perco.options.VacuumOptions(on=False)
SMALL = perco.Options(durability="process", vacuum=BY_HAND)


def tablet(db: perco.Database) -> LmdbTablet:
    found = local_of(db).store.tablet("docs", b"")
    assert isinstance(found, LmdbTablet)
    return found


async def overwrite(db: perco.Database, round: int, keys: int, value: bytes) -> None:
    async with db.transaction() as txn:
        for key in range(keys):
            txn.set(n, f"{key:06}", round)
            txn.set(body, f"{key:06}", value)


async def fill(db: perco.Database, value: bytes) -> int:
    """Overwrite the same cells until there is no space; returns how often it went."""
    done = 0
    with contextlib.suppress(perco.errors.StoreFull):
        while done < 10_000:
            await overwrite(db, done, 50, value)
            done += 1
    assert done < 10_000
    return done


@pytest.mark.parametrize(("size", "map_mib"), [(100, 2), (1500, 6), (20_000, 6)], ids=["short", "long", "pages"])
async def test_a_full_store_has_space_again_after_a_vacuum(tmp_path: Path, size: int, map_mib: int) -> None:  # S4, G3
    value = b"x" * size
    options = replace(SMALL, lmdb=perco.options.LmdbOptions(map_bytes_max=map_mib << 20))
    async with perco.open(tmp_path / "s", SCHEMA, options=options) as db:
        done = await fill(db, value)
        assert done > 1
        for _ in range(3):
            result = await db.vacuum()
            assert result.removed.versions
            async with db.snapshot() as snap:
                assert {row[n] async for row in snap.scan(docs, columns=[n])} == {done - 1}
                assert await snap.get(body, "000000") == value
            again = await fill(db, value)
            assert again > done // 3, "the space of what was removed is used again"
            done = again
        await db.vacuum()
        assert tablet(db).entries(WRITE) == 100
        assert not tablet(db).entries(ROLLBACK)
        assert (await check(local_of(db).store)).clean


async def test_the_file_stops_growing_where_a_vacuum_keeps_up(tmp_path: Path) -> None:
    options = perco.Options(durability="process", vacuum=BY_HAND)
    async with perco.open(tmp_path / "s", SCHEMA, options=options) as db:
        sizes = []
        for round in range(40):
            await overwrite(db, round, 200, b"x" * 500)
            await db.vacuum()
            sizes.append(tablet(db).engine.used_bytes())
        assert max(sizes[20:]) <= 1.25 * max(sizes[:10])
        live = tablet(db).engine.live_bytes()
        assert live < sizes[-1]


async def test_half_empty_pages_are_filled_again(tmp_path: Path) -> None:
    """The remaining cells lie in about as few pages as in a store that never held more."""
    options = perco.Options(durability="process", vacuum=BY_HAND)
    async with perco.open(tmp_path / "worn", SCHEMA, options=options) as db:
        for round in range(4):
            await overwrite(db, round, 3000, b"x" * 300)
        full = tablet(db).engine.live_bytes()
        result = await db.vacuum()
        assert result.repacked
        worn = tablet(db).engine.live_bytes()
        async with db.snapshot() as snap:
            rows = [(row.key, row[n], row[body]) async for row in snap.scan(docs)]
        assert rows == [(f"{key:06}", 3, b"x" * 300) for key in range(3000)]
        assert (await check(local_of(db).store)).clean
        assert not (await db.vacuum()).repacked, "there is nothing to gain"
    async with perco.open(tmp_path / "fresh", SCHEMA, options=options) as db:
        await overwrite(db, 3, 3000, b"x" * 300)
        fresh = tablet(db).engine.live_bytes()
    assert worn < 1.6 * fresh < full


@pytest.mark.parametrize("error", [lmdb.DiskError("No space left on device"), lmdb.Error("Input/output error")])
async def test_pages_that_cannot_be_filled_again_stay_as_they_are(tmp_path: Path, error: lmdb.Error) -> None:  # S4
    async with perco.open(tmp_path / "s", SCHEMA, options=SMALL) as db:
        for round in range(4):
            await overwrite(db, round, 600, b"")
        engine, fired = tablet(db).engine, 0
        repack = engine._repack

        def fails(*args: Any) -> Any:
            nonlocal fired
            repack(*args)
            fired += 1
            raise error

        engine._repack = fails  # type: ignore[method-assign]
        if isinstance(error, lmdb.DiskError):
            assert not (await db.vacuum()).repacked, "there is no space for it: nothing is lost by that"
        else:
            with pytest.raises(perco.Unavailable, match="Input/output error"):
                await db.vacuum()
        assert fired
        async with db.snapshot() as snap:
            assert [row[n] async for row in snap.scan(docs)] == [3] * 600
        assert (await check(local_of(db).store)).clean
        engine._repack = repack  # type: ignore[method-assign]
        await overwrite(db, 4, 600, b"")
        await db.vacuum()
        assert tablet(db).entries(WRITE) == 1200


async def test_it_works_in_the_background(tmp_path: Path) -> None:
    often = perco.options.VacuumOptions(period_s=0.01, share=1.0)
    gone = trio.Event()

    def event(step: str) -> None:
        if step == "vacuum" and local_owner(db).vacuuming.removed.versions >= 198:
            gone.set()

    options = perco.Options(durability="process", vacuum=often, on_event=event)
    async with perco.open(tmp_path / "s", SCHEMA, options=options) as db:
        for round in range(100):
            await overwrite(db, round, 1, b"")
        with trio.fail_after(60):
            await gone.wait()
        found = db.statistics().vacuum
        assert found.watermark == inside(db).oracle.holds.watermark
        assert found.removed.versions == 198
        assert found.failure is None


async def test_a_reopened_store_has_the_watermark_and_the_floor(tmp_path: Path) -> None:  # T13
    async with perco.open(tmp_path / "s", SCHEMA, options=SMALL) as db:
        await overwrite(db, 1, 2, b"")
        watermark = (await db.vacuum()).watermark
    async with perco.open(tmp_path / "s", SCHEMA, options=SMALL) as db:
        assert inside(db).oracle.holds.watermark == watermark
        assert all(t.floor == watermark for t in local_of(db).store.tablets() if isinstance(t, LmdbTablet))


# ------------------------------------------------------------------ manners, and who reads beside


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_a_page_takes_its_share_beside_two_turns_of_others(share: float) -> None:
    turn_s = 0.01
    work_s = slice_s(turn_s, share)
    if 0.002 < work_s < 0.02:  # else the bounds of a slice count
        assert work_s / (work_s + 2 * turn_s) == pytest.approx(share)
    assert slice_s(0.0, share) == 0.002
    assert slice_s(1.0, share) == 0.02
    assert slice_s(1.0, 1.0) == 0.02


async def test_who_has_given_way_already_goes_on_at_once(tmp_path: Path) -> None:
    """One more turn of a busy loop may take as long as a page, and the vacuum lagged far behind its share by that."""
    async with perco.open(tmp_path / "s", SCHEMA, options=SMALL) as db:
        vacuum = local_owner(db).vacuuming
        vacuum._share, vacuum._worked, vacuum._waited = 0.5, 0.01, 0.05
        with trio.testing.assert_no_checkpoints():
            await vacuum._give_way()
        assert vacuum._waited == pytest.approx(0.04), "the rest is made up for later"
        vacuum._worked, vacuum._waited = 0.01, 0.0
        with trio.testing.assert_checkpoints():
            await vacuum._give_way()


async def test_a_reader_beside_that_was_killed_keeps_no_pages(tmp_path: Path) -> None:
    async with perco.open(tmp_path / "s", SCHEMA, options=SMALL) as db:
        await overwrite(db, 1, 10, b"")
        path = tablet(db).engine.path
        program = f"import lmdb, os; t = lmdb.open({str(path)!r}, readonly=True).begin(); os.kill(os.getpid(), 9)"
        done = await trio.run_process([sys.executable, "-c", program], check=False)
        assert done.returncode == -9
        env = tablet(db).engine._env
        assert "no active readers" not in env.readers(), "it holds a place"
        await overwrite(db, 2, 10, b"")
        await db.vacuum()
        assert env.reader_check() == 0, "there is nobody dead left"
