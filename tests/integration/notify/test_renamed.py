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


@pytest.mark.parametrize("owner", ["old", "new"])
async def test_a_worker_of_an_older_program_is_known_by_its_observers(tmp_path: Path, owner: str) -> None:  # N7, N18
    def program(which: str) -> Program:
        return Program("count") if which == "old" else Program("letters", "count")

    old, new = program("old"), program("new")
    address = f"unix:{tmp_path / SOCKET}"
    async with (
        perco.open(tmp_path, program(owner).schema),
        perco.open(address, old.schema) as worker,
        perco.open(address, new.schema) as db,
        worker.worker(),
    ):
        async with db.transaction() as txn:
            txn.set(new.body, "a", "text")
        assert await db.wait_idle(timeout=30) == 0
        async with db.snapshot() as snap:
            assert await snap.get(new.size, "a") == 4
        for asked, id in ((db, "letters"), (worker, "count")):
            lag: dict[str, Any] = await asked.lag()
            assert list(lag) == [id]
            assert lag[id].workers == 1
        with pytest.raises(perco.UsageError, match="a process runs observer 'letters': stop the worker"):
            await db.drop_observer("letters")
        ts = txn.commit_ts
        await worker.wait_for(ts, timeout=30)
        await db.wait_for(ts, timeout=30)
