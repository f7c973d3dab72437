"""Killed at each step, a backup, a restore and a removal are as if they had never begun, or done (B2, B4)."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perco.backup.keeping import verify
from perco.backup.places import Folder, chain_of, open_place
from perco.backup.restoring import RestoreOptions, restore
from perco.backup.taking import BackupOptions, take
from tests.integration.backup.stores import begin, contents, move, must_be_sound, opened

_SOME = 8


def dying(step: int, *arguments: str | Path, may_end: bool = False) -> str:
    """Run it in a process that dies at a step; at -1, at none. Returns what it printed."""
    command = [sys.executable, "-m", "tests.integration.backup.dying", str(step), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (9 if step >= 0 else 0) or (may_end and not done.returncode), done.stderr
    return done.stdout


def steps(*arguments: str | Path) -> list[int]:
    """Some of the steps at which to die, in order, the first and the last two included. With EVERY_STEP: all of them.
    It is done once."""
    count = int(dying(-1, *arguments))
    assert count > 6
    if "EVERY_STEP" in os.environ:
        return list(range(count))
    some = random.Random(count).sample(range(count), min(count, _SOME))
    return sorted({0, count - 2, count - 1, *some})


async def filled(folder: Path, *, more: int = 0) -> dict[str, Any]:
    async with opened(folder) as db:
        if not more:
            await begin(db)
        for _ in range(more):
            await move(db, random.Random(more))
        return await contents(db)


@pytest.mark.parametrize("to", ["backups", "one.tar"])
async def test_taking(tmp_path: Path, to: str) -> None:
    store, backups = tmp_path / "store", tmp_path / to
    rows = await filled(store)
    for step in steps("take", store, tmp_path / f"first-{to}"):
        dying(step, "take", store, backups, may_end=backups.exists())  # then there are fewer steps
        there = open_place(str(backups)).names() if to == "one.tar" and backups.exists() else []
        if to == "backups" and (backups / "perco-backups").exists():
            there = Folder(backups).names()
        for name in there:
            verify(open_place(str(backups)), name)
        if there and to == "one.tar":
            backups.unlink()
    if not backups.exists() or to == "backups":
        await take(str(store), str(backups), BackupOptions())
    await restore(str(backups), str(tmp_path / "again"), RestoreOptions())
    async with opened(tmp_path / "again") as db:
        assert await contents(db) == rows
        await must_be_sound(db)
    assert not [name for name in os.listdir(backups if to == "backups" else tmp_path) if name.endswith(".new")]


async def test_restoring(tmp_path: Path) -> None:
    store, backups, again = tmp_path / "store", tmp_path / "backups", tmp_path / "again"
    await filled(store)
    await take(str(store), str(backups), BackupOptions())
    rows = await filled(store, more=3)
    await take(str(store), str(backups), BackupOptions())
    found = 0
    for step in steps("restore", backups, tmp_path / "first"):
        dying(step, "restore", backups, again)
        if again.exists():
            found += 1
            async with opened(again) as db:
                assert await contents(db) == rows
                await must_be_sound(db)
            shutil.rmtree(again)
    assert found, "it died after its last step but one"
    await restore(str(backups), str(again), RestoreOptions())
    async with opened(again) as db:
        assert await contents(db) == rows
    assert sorted(os.listdir(tmp_path)) == ["again", "backups", "first", "store"]


async def test_removing(tmp_path: Path) -> None:
    store, backups = tmp_path / "store", tmp_path / "backups"
    await filled(store)
    for full in (True, False, True):
        await take(str(store), str(backups), BackupOptions(full=full))
    place = Folder(backups)
    names = place.names()
    shutil.copytree(backups, tmp_path / "whole")
    shutil.copytree(backups, tmp_path / "first")
    for step in steps("prune", tmp_path / "first", "1"):
        dying(step, "prune", backups, "1")
        left = place.names()
        assert left in (names, names[:1] + names[2:], names[2:])
        for name in left:
            verify(place, chain_of(place, name)[-1].name)
        shutil.rmtree(backups)
        shutil.copytree(tmp_path / "whole", backups)
    assert Folder(tmp_path / "first").names() == names[2:]
