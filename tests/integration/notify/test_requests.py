"""Observers on every front that ask for a later run, give up, or take too long; run by the owner and by a client."""

from __future__ import annotations

import asyncio
import contextlib
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


class Held:
    """A program with a rate and a schedule, whose first runs fail."""

    def __init__(self, front: Any) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.body, self.note = self.docs.column("body", perco.TEXT), self.docs.column("note", perco.TEXT)
        self.schema = perco.Schema(self.docs)
        self.called, self.due = list[float](), list[perco.Due]()
        self._on(front, self.schema.observe(self.body, id="calls", rate=50), self.call)
        self._on(front, self.schema.every(seconds=1, id="often"), self.tick)

    def _on(self, front: Any, observe: Callable[[Any], Any], function: Callable[[Any, Any], None]) -> None:
        if front is perco.sync:
            observe(perco.sync.observer(function))
            return

        async def run(txn: Any, change: Any) -> None:
            if front is perco.aio:
                await asyncio.sleep(0)
            function(txn, change)

        observe(perco.aio.observer(run) if front is perco.aio else run)

    def call(self, txn: Any, change: Any) -> None:
        self.called.append(time.monotonic())
        if len(self.called) <= 3:
            raise ConnectionError("the service is down")
        txn.set(self.note, change.key, "written")

    def tick(self, txn: Any, due: perco.Due) -> None:
        self.due.append(due)
        txn.set(self.note, f"due {len(self.due)}", str(due.at))

    def write(self, txn: Any) -> None:
        for n in range(30):
            txn.set(self.body, f"{n}", "hello")

    def check(self, states: list[perco.ObserverState], counted: dict[str, perco.ObserverCounters]) -> None:
        assert {state.id: state.tripped for state in states} == {"calls": "", "often": ""}
        assert counted["calls"].failures == 3
        for first, began in enumerate(self.called):  # N15; one second's worth
            for count, at in enumerate(self.called[first:], 1):
                assert count <= 50 * (at - began) + 52
        assert len({due.at for due in self.due}) == len(self.due), "N16: once for each moment"


TRIPS = perco.WorkerOptions(
    only=["calls", "often"],
    breaker=perco.options.BreakerOptions(failures=2, trial_s=0.1),
    backoff=perco.options.BackoffOptions(first_s=0.01),
)


async def held(program: Held, db: Any) -> None:
    async with db.worker(options=TRIPS) as worker:
        async with db.transaction() as txn:
            program.write(txn)
        while len(program.due) < 2 or worker.statistics()["calls"].commits < 30:
            await db.wait_idle()
        program.check(await db.observers(), worker.statistics())


@pytest.mark.parametrize("place", ["owner", "client"])
@pytest.mark.parametrize("front", [perco, perco.aio, perco.sync], ids=["trio", "asyncio", "blocking"])
def test_breakers_rates_and_schedules_are_the_same_on_every_front(tmp_path: Path, front: Any, place: str) -> None:
    program = Held(front)
    owns = perco.Schema(program.docs, program.schema.tables["SCHEDULES"])
    where = tmp_path if place == "owner" else f"unix:{tmp_path / SOCKET}"
    if front is perco.sync:
        with contextlib.ExitStack() as stack:
            if place == "client":
                stack.enter_context(perco.sync.open(tmp_path, owns))
            db = stack.enter_context(perco.sync.open(where, program.schema))
            with db.worker(options=TRIPS) as worker:
                with db.transaction() as txn:
                    program.write(txn)
                while len(program.due) < 2 or worker.statistics()["calls"].commits < 30:
                    db.wait_idle()
                program.check(db.observers(), worker.statistics())
        return

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            if place == "client":
                await stack.enter_async_context(front.open(tmp_path, owns))
            await held(program, await stack.enter_async_context(front.open(where, program.schema)))

    trio.run(main) if front is perco else asyncio.run(main())
