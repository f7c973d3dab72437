"""Backups are taken while a store is in use, and restored (B1 to B5)."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
from perco.backup.keeping import kept_in, prune, verify
from perco.backup.layout import MANIFEST
from perco.backup.places import Folder, chain_of, manifest_of, open_place
from perco.backup.restoring import RestoreOptions, restore
from perco.backup.taking import BackupOptions, take
from perco.errors import (
    BackupDamaged,
    CopiedWhileOpen,
    Corruption,
    FormatUnknown,
    PercoWarning,
    StoreLocked,
    TimelineLost,
    UnsuitableFolder,
    UsageError,
)
from perco.options import VacuumOptions
from tests.integration.backup.stores import (
    ACCOUNTS,
    accounts,
    balance,
    begin,
    contents,
    copied,
    mirror,
    move,
    must_be_sound,
    opened,
)


async def restored(backups: Path, to: Path, name: str = "") -> Path:
    await restore(str(backups), str(to), RestoreOptions(name=name))
    return to


async def test_backups_under_load_have_one_state_of_all_tablets(tmp_path: Path) -> None:  # B1
    """Each is restored, and is sound: no transaction is there in part, and no change that waits is lost. At the
    backup's timestamp, both stores have the same rows."""
    rng, made = random.Random(1), []
    async with opened(tmp_path / "store") as db, db.worker():
        await begin(db)
        done, count = False, 0

        async def moves(seed: int) -> None:
            nonlocal count
            mine = random.Random(seed)
            while not done:
                await move(db, mine)
                count += 1

        async with trio.open_nursery() as nursery:
            for seed in range(8):
                nursery.start_soon(moves, seed)
            for number in range(5):
                before = count
                backup = await db.backup(tmp_path / "backups", bytes_per_s=0)
                assert count > before, "writes went on"
                made.append((backup, await contents(db, ts=backup.ts)))
                if number == 2:
                    await db.split(accounts, rng.choice((5, 30, 50)))
                if number == 3:
                    await db.compact(accounts)
            done = True
    assert [each.base is None for each, _ in made] == [True, False, False, False, False]
    for number, (backup, rows) in enumerate(made):
        folder = await restored(tmp_path / "backups", tmp_path / f"again-{number}", backup.name)
        async with opened(folder) as db:
            assert await contents(db, ts=backup.ts) == rows
            await must_be_sound(db)


async def test_an_incremental_backup_has_what_has_changed(tmp_path: Path) -> None:  # B2
    backups = tmp_path / "backups"
    async with opened(tmp_path / "store") as db:
        await begin(db)
        full = await db.backup(backups)
        nothing = await db.backup(backups)
        await move(db, random.Random(2))
        some = await db.backup(backups)
        again = await db.backup(backups, full=True)
    assert full.stored == full.pages
    assert nothing.base == full.name
    assert nothing.stored <= 4, "only the owner's lease"
    assert 0 < some.stored < some.pages / 3
    assert again.base is None
    assert again.stored == again.pages
    assert some.bytes < full.bytes / 2


@pytest.mark.parametrize("seed", range(3))
async def test_each_of_many_backups_is_the_store_of_its_time(tmp_path: Path, seed: int) -> None:  # B2, B3
    """Pages are freed and used again; files are made anew by compactions, and are added by splits."""
    rng, at = random.Random(seed), []
    backups = tmp_path / "backups"
    async with opened(tmp_path / "store") as db:
        await begin(db)
        for _ in range(8):
            for _ in range(rng.choice((0, 3, 40))):
                await move(db, rng)
            if rng.random() < 0.3:
                await db.compact(rng.choice((accounts, mirror)))
            if rng.random() < 0.3 and (row := rng.randrange(1, ACCOUNTS)) not in (20, 40):
                with suppress(UsageError):  # there is a boundary already
                    await db.split(accounts, row)
            if rng.random() < 0.3:
                await db.vacuum()
            backup = await db.backup(backups, full=rng.random() < 0.15)
            at.append((backup.name, await contents(db)))
    place = Folder(backups)
    assert len(place.names()) == 8
    for number, (name, rows) in enumerate(at):
        verify(place, name)
        async with opened(await restored(backups, tmp_path / f"again-{number}", name)) as db:
            assert await contents(db) == rows
            await must_be_sound(db)


async def test_backups_of_a_closed_store(tmp_path: Path) -> None:  # B2, B3
    """They are taken by this process, which owns the store meanwhile."""
    rng, place, rows = random.Random(10), tmp_path / "backups", []
    for number in range(6):
        async with opened(tmp_path / "store", vacuum=VacuumOptions(on=False)) as db:
            if not number:
                await begin(db)
            for _ in range(rng.choice((1, 30))):
                await move(db, rng)
            if number in (2, 4):  # its pages become free, and others take their places
                await db.vacuum()
            if number == 3:
                await db.compact(accounts)
            rows.append(await contents(db))
        made = await take(str(tmp_path / "store"), str(place), BackupOptions())
        assert bool(made.base) == bool(number)
    for number, (name, there) in enumerate(zip(Folder(place).names(), rows, strict=True)):
        async with opened(await restored(place, tmp_path / f"again-{number}", name)) as db:
            assert await contents(db) == there
            await must_be_sound(db)


async def test_a_closed_store_and_a_backup_in_a_file(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as db:
        await begin(db)
        rows = await contents(db)
    told: list[int] = []
    made = await take(
        str(tmp_path / "store"), str(tmp_path / "one.tar"), BackupOptions(), lambda each: told.append(each.done)
    )
    assert made.base == ""
    async with opened(await restored(tmp_path / "one.tar", tmp_path / "again")) as db:
        assert await contents(db) == rows
        await must_be_sound(db)
    verify(open_place(str(tmp_path / "one.tar")), made.name)
    with pytest.raises(UsageError, match="exists, and a file holds one backup"):
        await take(str(tmp_path / "store"), str(tmp_path / "one.tar"), BackupOptions())
    assert "one.tar.new" not in os.listdir(tmp_path)


# ------------------------------------------------------------ damage


@pytest.mark.parametrize("which", ["pages", "index", "manifest"])
async def test_every_damage_to_a_backup_is_found(tmp_path: Path, which: str) -> None:  # B4
    backups = tmp_path / "backups"
    async with opened(tmp_path / "store") as db:
        await begin(db)
        await db.backup(backups)
        await move(db, random.Random(3))
        await db.backup(backups)
    rng, place = random.Random(4), Folder(backups)
    first, last = place.names()
    files = {"pages": "*.pages", "index": "*.index", "manifest": MANIFEST}
    paths = [path for path in sorted(backups.glob(f"*/{files[which]}")) if path.stat().st_size]
    assert len(paths) > 1
    for number in range(24):
        path = rng.choice(paths)
        whole = path.read_bytes()
        at = rng.randrange(len(whole))
        if number % 3:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        else:
            path.write_bytes(whole[:at])
        with pytest.raises(Corruption):
            verify(place, last)
        with pytest.raises(Corruption):
            await restored(backups, tmp_path / "again")
        assert sorted(os.listdir(tmp_path)) == ["backups", "store"]
        path.write_bytes(whole)
    path.unlink()
    with pytest.raises(Corruption):
        verify(place, last)
    manifest = which == "manifest" and path.parent.name == first  # a list reads no other files
    assert [bool(each.error) for each in kept_in(place)] == [manifest, True]


# ------------------------------------------------------------ what is removed


async def test_old_backups_go_but_for_those_that_are_needed(tmp_path: Path) -> None:  # B2
    backups = tmp_path / "backups"
    async with opened(tmp_path / "store") as db:
        await begin(db)
        names = []
        for full in (True, False, False, True, False):
            await move(db, random.Random(5))
            names.append((await db.backup(backups, full=full)).name)
        rows = await contents(db)
    place = Folder(backups)
    assert prune(place, 3) == []
    assert prune(place, 2) == names[:3]
    assert place.names() == names[3:]
    assert [each.name for each in chain_of(place, names[4])] == names[3:]
    async with opened(await restored(backups, tmp_path / "again")) as db:
        assert await contents(db) == rows
    with pytest.raises(UsageError, match="at least one backup is kept"):
        prune(place, 0)
    with place.locked(), pytest.raises(StoreLocked, match="takes or removes a backup"):
        await take(str(tmp_path / "store"), str(backups), BackupOptions())


# ------------------------------------------------------------ timelines and identities


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes((old[0] ^ 1,)))


async def test_after_a_damaged_backup_comes_a_full_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # B4
    store, to = str(tmp_path / "store"), tmp_path / "backups"
    async with opened(tmp_path / "store") as db:
        await begin(db)
    first = await take(store, str(to), BackupOptions())
    second = await take(store, str(to), BackupOptions())
    assert second.base == first.name
    place = Folder(to)
    damaged = max((to / first.name).glob("*.pages"), key=lambda path: path.stat().st_size)
    flip(damaged, 5000)
    assert (await take(store, str(to), BackupOptions())).base == second.name, "no page is read for it"
    with pytest.raises(BackupDamaged, match=r"digest differs\. The store itself is not affected"):
        verify(place, second.name)
    assert [bool(each.error) for each in kept_in(place)] == [False, True, True]
    third = await take(store, str(to), BackupOptions())
    assert third.base == ""
    assert "the last backup is damaged, so this one is full" in caplog.text
    fourth = await take(store, str(to), BackupOptions())
    assert fourth.base == third.name
    verify(place, fourth.name)
    async with opened(await restored(to, tmp_path / "restored")) as db:
        await must_be_sound(db)
    flip(damaged, 5000)  # it is as it was
    verify(place, second.name)
    assert not any(each.error for each in kept_in(place))


@pytest.mark.parametrize("what", ["manifest.json", "*.index", "*.pages", "folder", "short"])
async def test_after_a_backup_of_which_something_is_gone_comes_a_full_one(tmp_path: Path, what: str) -> None:  # B4
    store, to = str(tmp_path / "store"), tmp_path / "backups"
    async with opened(tmp_path / "store") as db:
        await begin(db)
    first = await take(store, str(to), BackupOptions())
    second = await take(store, str(to), BackupOptions())
    if what == "folder":
        shutil.rmtree(to / first.name)
    elif what == "short":
        largest = max((to / first.name).glob("*.pages"), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size - 4096)
    else:
        next((to / first.name).glob(what)).unlink()
    with pytest.raises(BackupDamaged, match="perco backup --full"):
        verify(Folder(to), second.name)
    third = await take(store, str(to), BackupOptions())
    assert third.base == ""
    verify(Folder(to), third.name)


async def test_damaged_backups_do_not_count_as_kept(tmp_path: Path) -> None:  # B2
    store, to = str(tmp_path / "store"), tmp_path / "backups"
    async with opened(tmp_path / "store") as db:
        await begin(db)
    made = [(await take(store, str(to), BackupOptions(full=True))).name for _ in range(4)]
    place = Folder(to)
    for name in (made[0], made[3]):
        shutil.rmtree(to / name)
        (to / name).mkdir()
    assert prune(place, 1) == made[:2]
    assert place.names() == made[2:], "what is newer than the ones that are kept stays, to be looked at"


async def test_a_restored_store_goes_on_above_all_timestamps_of_the_lost_one(tmp_path: Path) -> None:  # B5, O1
    backups = tmp_path / "backups"
    async with opened(tmp_path / "store") as db:
        await begin(db)
        early = await move(db, random.Random(6))
        backup = await db.backup(backups)
        late = await move(db, random.Random(7))
    async with opened(await restored(backups, tmp_path / "again")) as db:
        newer = await move(db, random.Random(8))
        assert newer > late + (1 << 42)
        with pytest.raises(TimelineLost, match=f"handed out timestamp {late}") as caught:
            await anext(aiter(db.changes(accounts, since=late)))
        assert (caught.value.after, caught.value.asked) == (backup.ts, late)
        seen = [each.commit_ts async for each in db.changes(accounts, since=early)]
        assert seen == [newer]
        assert [each.commit_ts async for each in db.changes(accounts, since=newer)] == []
        await must_be_sound(db)
        second = await db.backup(tmp_path / "others")
    async with opened(await restored(tmp_path / "others", tmp_path / "third")) as db:
        with pytest.raises(TimelineLost):
            await anext(aiter(db.changes(accounts, since=late)))
        assert [each.commit_ts async for each in db.changes(accounts, since=newer)] == []
        assert second.ts >= newer


async def test_a_plain_copy_of_an_open_store_is_refused(tmp_path: Path) -> None:  # I1
    async with opened(tmp_path / "store") as db:
        await begin(db)
        shutil.copytree(tmp_path / "store", tmp_path / "copy", ignore=lambda _, names: {"socket"} & set(names))
        with pytest.raises(CopiedWhileOpen, match="perco backup"):
            async with opened(tmp_path / "copy"):
                raise AssertionError
        with pytest.raises(CopiedWhileOpen):
            async with perco.open(tmp_path / "copy", readonly=True):
                raise AssertionError

    async def accept() -> None:
        async with perco.open(tmp_path / "copy", perco.Schema(accounts), accept_loss=True):
            pass

    with pytest.warns(PercoWarning, match="is a copy of store"):
        await accept()
    async with opened(tmp_path / "copy") as db:
        await must_be_sound(db)


async def test_a_copy_of_a_closed_store_is_a_store_of_its_own(tmp_path: Path) -> None:  # I1
    async with opened(tmp_path / "store") as db:
        await begin(db)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")

    async def use_copy() -> None:
        async with opened(tmp_path / "copy") as db:
            await db.backup(tmp_path / "of-copy")
            await must_be_sound(db)

    with pytest.warns(PercoWarning, match="from now on, it is a store of its own"):
        await use_copy()
    await use_copy()  # without a warning, which would be an error
    (tmp_path / "store").rename(tmp_path / "moved")
    async with opened(tmp_path / "moved") as db:  # the same store
        await db.backup(tmp_path / "of-store")
    one, other = (
        manifest_of(place, place.names()[0]) for place in map(Folder, (tmp_path / "of-copy", tmp_path / "of-store"))
    )
    assert one.store != other.store
    with pytest.raises(UsageError, match="has backups of another store"):
        await take(str(tmp_path / "copy"), str(tmp_path / "of-store"), BackupOptions())


async def test_a_copy_that_was_begun_while_the_store_was_closed_is_refused_if_it_was_opened_meanwhile(
    tmp_path: Path,
) -> None:  # I1
    async with opened(tmp_path / "store") as db:
        await begin(db)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    async with opened(tmp_path / "store") as db:
        await move(db, random.Random(9))
    for changed in (tmp_path / "store").glob("tablets/accounts-1/data.mdb"):
        shutil.copy(changed, tmp_path / "copy/tablets/accounts-1/data.mdb")
    with pytest.raises(CopiedWhileOpen):
        async with opened(tmp_path / "copy"):
            raise AssertionError


# ------------------------------------------------------------ refusals


async def test_stores_without_files_are_refused(tmp_path: Path) -> None:
    async with perco.open("memory:", perco.Schema(accounts)) as db:
        with pytest.raises(UsageError, match="a memory: store has no files"):
            await db.backup(tmp_path / "backups")


async def test_a_store_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "store", shared=False) as db:
        with pytest.raises(UsageError, match="open it there with shared=True"):
            await db.backup(tmp_path / "backups")


async def test_wrong_places_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as db:
        await begin(db)
        with pytest.raises(UsageError, match="lies in the store"):
            await db.backup(tmp_path / "store/backups")
        (tmp_path / "full").mkdir()
        (tmp_path / "full/file").touch()
        with pytest.raises(UsageError, match="is not a folder of backups"):
            await db.backup(tmp_path / "full")
        wrong: Any = 7
        with pytest.raises(UsageError, match="named by its path"):
            await db.backup(wrong)
        await db.backup(tmp_path / "backups")
    with pytest.raises(UsageError, match="exists: a backup is restored into a new folder"):
        await restored(tmp_path / "backups", tmp_path / "full")
    with pytest.raises(UsageError, match="there is no backup 'other'"):
        await restored(tmp_path / "backups", tmp_path / "again", "other")
    for wrong in ("nowhere", "full"):
        with pytest.raises((UnsuitableFolder, FormatUnknown)):
            await take(str(tmp_path / wrong), str(tmp_path / "more"), BackupOptions())
    assert sorted(os.listdir(tmp_path)) == ["backups", "full", "store"]
    assert copied.table is mirror
    assert balance.table is accounts
