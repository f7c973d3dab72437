"""Processes that declare one observer under several ids tell each other of it (N18)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import perco
from perco.serve.opening import SOCKET


class Program:
    """An observer, by an id."""

    def __init__(self, id: str, *was: str) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.body, self.size = self.docs.column("body", perco.TEXT), self.docs.column("size", perco.INT64)
        self.schema = perco.Schema(self.docs)

        @self.schema.observe(self.body, id=id, was=was)
        async def measure(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
            txn.set(self.size, change.key, len(change.value or ""))


IDS = {"old": "count", "new": "letters"}


def program(which: str) -> Program:
    return Program("count") if which == "old" else Program("letters", "count")


@pytest.mark.parametrize("works", ["old", "new"])
@pytest.mark.parametrize("owns", ["old", "new"])
async def test_a_worker_is_known_by_its_observers_whatever_it_calls_them(
    tmp_path: Path, owns: str, works: str
) -> None:  # N7, N18
    asks = "new" if works == "old" else "old"
    address = f"unix:{tmp_path / SOCKET}"
    program_that_asks = program(asks)
    async with (
        perco.open(tmp_path, program(owns).schema),
        perco.open(address, program("new").schema),  # by now, the store knows of the rename
        perco.open(address, program(works).schema) as worker,
        perco.open(address, program_that_asks.schema) as db,
        worker.worker(),
    ):
        async with db.transaction() as txn:
            txn.set(program_that_asks.body, "a", "text")
        assert await db.wait_idle(timeout=30) == 0
        async with db.snapshot() as snap:
            assert await snap.get(program_that_asks.size, "a") == 4
        for asked, id in ((db, IDS[asks]), (worker, IDS[works])):
            lag: dict[str, Any] = await asked.lag()
            assert list(lag) == [id]
            assert lag[id].workers == 1
        with pytest.raises(perco.UsageError, match=f"a process runs observer '{IDS[asks]}': stop the worker"):
            await db.drop_observer(IDS[asks])
        await worker.wait_for(txn.commit_ts, timeout=30)
        await db.wait_for(txn.commit_ts, timeout=30)


async def test_the_worker_of_the_owner_runs_what_a_client_resumes(tmp_path: Path) -> None:  # N10
    app = program("old")
    async with (
        perco.open(tmp_path, app.schema) as db,
        perco.open(f"unix:{tmp_path / SOCKET}", program("old").schema) as client,
        db.worker(),
    ):
        await client.pause("count")
        async with db.transaction() as txn:
            txn.set(app.body, "a", "text")
        await client.resume("count")
        assert await db.wait_idle(timeout=30) == 0
        async with db.snapshot() as snap:
            assert await snap.get(app.size, "a") == 4
