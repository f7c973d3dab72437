"""While the writers are parked, nothing is written, and reads of the past go on (B1)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

import perco
from perco.database.inside import local_owner
from perco.storage.pages import last_transaction
from perco.tablets import parking
from perco.tablets.parking import parked
from tests.integration.backup.stores import accounts, balance, begin, contents, move, opened


def states(folder: Path) -> dict[str, int]:
    """The last transaction of each tablet's file."""
    return {path.parent.name: last_transaction(path) for path in folder.glob("tablets/*/data.mdb")}


async def test_no_tablet_is_written_to_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "PARKED_MAX_S", 60.0)
    async with opened(tmp_path / "store") as db:
        await begin(db)
        ts, done = await move(db, random.Random(99)), list[int]()

        async def moves(seed: int) -> None:
            done.append(await move(db, random.Random(seed)))

        async with trio.open_nursery() as nursery, parked(local_owner(db).local) as go_on:
            before = states(tmp_path / "store")
            assert len(before) == 5
            for seed in range(16):
                nursery.start_soon(moves, seed)
            for _ in range(20):  # turns of the loop, in which the transactions reach their commits
                rows = await contents(db, ts=ts)
                assert sum(row["balance"] for row in rows["accounts"].values()) == 6000
            assert not go_on.is_set(), "the machine is too slow for this test"
            assert states(tmp_path / "store") == before
            assert not done
        assert len(done) == 16
        assert states(tmp_path / "store") != before


async def test_writers_do_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "PARKED_MAX_S", 0.05)
    async with opened(tmp_path / "store") as db:
        await begin(db)
        async with parked(local_owner(db).local) as go_on:
            async with db.transaction() as txn:  # it commits once they go on
                txn.set(balance, 1, 7)
            assert go_on.is_set()


async def test_a_store_in_memory_is_refused() -> None:
    async with perco.open("memory:", perco.Schema(accounts)) as db:
        with pytest.raises(perco.UsageError, match="has no files"):
            async with parked(local_owner(db).local):
                raise AssertionError
