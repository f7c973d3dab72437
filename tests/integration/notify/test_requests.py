"""Observers on every front that ask for a later run, give up, or take too long; run by the owner and by a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
import perco.aio
import perco.sync
from perco.serve.opening import SOCKET

TIMEOUT_S = 0.05


def test_a_thread_that_takes_too_long_has_failed_when_it_returns(tmp_path: Path) -> None:
    """It cannot be stopped. Its writes are not there."""
    docs = perco.Table("docs", key=perco.TEXT)
    body, note = docs.column("body", perco.TEXT), docs.column("note", perco.TEXT)
    schema = perco.Schema(docs)

    @schema.observe(body, id="blocks", timeout_s=TIMEOUT_S, attempts=1)
    @perco.sync.observer
    def blocks(txn: perco.sync.Transaction, change: perco.Change[str, str]) -> None:
        until = time.monotonic() + (2 * TIMEOUT_S if change.value == "long" else 0)
        while time.monotonic() < until:
            pass
        txn.set(note, change.key, "written")

    with perco.sync.open(tmp_path / "s", schema) as db, db.worker():
        with db.transaction() as txn:
            txn.set(body, "a", "long")
            txn.set(body, "b", "short")
        db.wait_idle()
        with db.snapshot() as snap:
            assert snap.get(note, "a") is None
        [failed, *_] = [change for change in db.failed() if change.key == "a"]
        assert "'blocks' was cancelled after timeout_s=0.05" in failed.error


class Program:
    """An observer that asks once for a later run, and gives some changes up."""

    def __init__(self, front: Any) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.body, self.note = self.docs.column("body", perco.TEXT), self.docs.column("note", perco.TEXT)
        self.schema, self.runs = perco.Schema(self.docs), list[str]()
        observe: Callable[[Any], Any] = self.schema.observe(self.body, id="asks", timeout_s=60, concurrency=2)
        if front is perco.sync:
            observe(perco.sync.observer(self.ask))
        elif front is perco.aio:

            async def on_asyncio(txn: Any, change: Any) -> None:
                await asyncio.sleep(0)
                self.ask(txn, change)

            observe(perco.aio.observer(on_asyncio))
        else:

            async def on_trio(txn: Any, change: Any) -> None:
                self.ask(txn, change)

            observe(on_trio)

    def ask(self, txn: Any, change: Any) -> None:
        self.runs.append(change.key)
        txn.set(self.note, change.key, "written")
        if change.value == "never":
            raise perco.GiveUp("it is damaged")
        if self.runs.count(change.key) == 1:
            raise perco.Retry(0.01, "busy")

    def write(self, txn: Any) -> None:
        txn.set(self.body, "a", "later")
        txn.set(self.body, "b", "never")

    def check(self, failed: list[perco.FailedChange], note: dict[str, str | None]) -> None:
        assert sorted(self.runs) == ["a", "a", "b"]
        assert [(each.key, each.attempts, each.error) for each in failed] == [("b", 1, "GiveUp: it is damaged")]
        assert note == {"a": "written", "b": None}


async def steps(program: Program, db: Any) -> None:
    async with db.worker():
        async with db.transaction() as txn:
            program.write(txn)
        await db.wait_idle()
    async with db.snapshot() as snap:
        program.check(await db.failed(), await snap.get_many(program.note, ["a", "b"]))


@pytest.mark.parametrize("place", ["owner", "client"])
@pytest.mark.parametrize("front", [perco, perco.aio, perco.sync], ids=["trio", "asyncio", "blocking"])
def test_requests_are_the_same_on_every_front(tmp_path: Path, front: Any, place: str) -> None:
    program = Program(front)
    if front is perco.sync:

        def run(db: Any) -> None:
            with db.worker():
                with db.transaction() as txn:
                    program.write(txn)
                db.wait_idle()
            with db.snapshot() as snap:
                program.check(db.failed(), snap.get_many(program.note, ["a", "b"]))

        if place == "owner":
            with perco.sync.open(tmp_path, program.schema) as db:
                run(db)
        else:
            with (
                perco.sync.open(tmp_path, perco.Schema(program.docs)),
                perco.sync.open(f"unix:{tmp_path / SOCKET}", program.schema) as db,
            ):
                run(db)
        return

    async def main() -> None:
        if place == "owner":
            async with front.open(tmp_path, program.schema) as db:
                await steps(program, db)
        else:
            async with (
                front.open(tmp_path, perco.Schema(program.docs)),
                front.open(f"unix:{tmp_path / SOCKET}", program.schema) as db,
            ):
                await steps(program, db)

    trio.run(main) if front is perco else asyncio.run(main())
