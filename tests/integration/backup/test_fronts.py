"""`db.backup` in all fronts, for the owner and for clients."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
import perco.aio
import perco.sync
from perco.backup.places import Folder
from perco.backup.restoring import RestoreOptions, restore
from perco.errors import UsageError
from tests.integration.backup.stores import SCHEMA, accounts, begin, contents, opened

FRONTS = ["trio", "asyncio", "blocking"]


async def by_trio(store: Path, to: Path, **more: Any) -> perco.Backup:
    async with perco.open(store, SCHEMA) as db:
        return await db.backup(to, **more)


def by_asyncio(store: Path, to: Path, **more: Any) -> perco.Backup:
    async def main() -> perco.Backup:
        async with perco.aio.open(store, SCHEMA) as db:
            return await db.backup(to, **more)

    return asyncio.run(main())


def by_thread(store: Path, to: Path, **more: Any) -> perco.Backup:
    with perco.sync.open(store, SCHEMA) as db:
        return db.backup(to, **more)


async def backup(front: str, store: Path, to: Path, **more: Any) -> perco.Backup:
    if front == "trio":
        return await by_trio(store, to, **more)
    of = by_asyncio if front == "asyncio" else by_thread
    return await trio.to_thread.run_sync(lambda: of(store, to, **more))


@pytest.mark.parametrize("front", FRONTS)
async def test_by_the_owner(tmp_path: Path, front: str) -> None:
    async with opened(tmp_path / "store") as db:
        await begin(db)
        rows = await contents(db)
    told: list[tuple[int, int]] = []
    made = await backup(front, tmp_path / "store", tmp_path / "backups", progress=lambda *each: told.append(each))
    assert Folder(tmp_path / "backups").names() == [made.name]
    await restore(str(tmp_path / "backups"), str(tmp_path / "again"), RestoreOptions())
    async with opened(tmp_path / "again") as db:
        assert await contents(db) == rows


@pytest.mark.parametrize("front", FRONTS)
async def test_by_a_client(tmp_path: Path, front: str) -> None:
    """In another process: this one has the store open."""
    code = f"""
import trio
from pathlib import Path
from tests.integration.backup.test_fronts import backup
made = trio.run(lambda: backup({front!r}, Path({str(tmp_path / "store")!r}), Path({str(tmp_path / "backups")!r})))
print(made.name)
"""
    async with opened(tmp_path / "store") as db:
        await begin(db)
        rows = await contents(db)
        command = [sys.executable, "-c", code]
        done = await trio.run_process(command, capture_stdout=True)
    assert Folder(tmp_path / "backups").names() == [done.stdout.decode().strip()]
    await restore(str(tmp_path / "backups"), str(tmp_path / "again"), RestoreOptions())
    async with opened(tmp_path / "again") as db:
        assert await contents(db) == rows


@pytest.mark.parametrize("front", FRONTS)
async def test_errors_are_those_of_the_command(tmp_path: Path, front: str) -> None:
    with pytest.raises(UsageError, match="lies in the store"):
        await backup(front, tmp_path / "store", tmp_path / "store/backups")


async def test_a_backup_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as db:
        await begin(db)
        with trio.CancelScope() as scope:

            def stop(done: int, total: int) -> None:
                scope.cancel()

            with trio.move_on_after(1.0):  # the store is too small for progress
                await db.backup(tmp_path / "backups", bytes_per_s=1000, progress=stop)
        left = os.listdir(tmp_path / "backups") if (tmp_path / "backups").exists() else []
        assert not [name for name in left if name[0].isdigit() and not name.endswith(".new")]
        made = await db.backup(tmp_path / "backups")
        assert sorted(os.listdir(tmp_path / "backups")) == sorted([made.name, "perco-backups"])
        assert (await contents(db))[accounts.name]
