"""A store does not survive a fork, and a fork does not hold on to the store."""

from __future__ import annotations

import os
from pathlib import Path

import trio

import perco

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
