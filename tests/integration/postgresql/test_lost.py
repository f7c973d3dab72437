"""A server that dies, or ends connections, while transactions commit: no acknowledged commit is lost or doubled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.errors import CommitUnknown, StoreError
from tests.support.postgresql import Standing

lists = perco.Table("lists", key=perco.TEXT)
items = lists.column("items", perco.JSON)
SCHEMA = perco.Schema(lists)
NAMES = ("a", "b", "c", "d")
TASKS = 8


class Appending:
    """Tasks that append numbers to lists. `told`: the numbers whose commit was acknowledged; `aborted`: those that
    perco says were not written; `unknown`: how often a commit's outcome had to be asked for."""

    def __init__(self, db: perco.Database) -> None:
        self._db = db
        self.told: set[int] = set()
        self.aborted: set[int] = set()
        self.unknown = 0
        self.failed = 0
        self.more = trio.Event()

    async def run(self, task: int, until: Callable[[], bool]) -> None:
        number = task
        while not until():
            number += TASKS
            try:
                await self._db.run(self._append, number)
            except CommitUnknown as error:
                self.unknown += 1
                await self._ask(number, error.token)
            except StoreError:  # it was not written, says perco
                self.failed += 1
                self.aborted.add(number)
                await trio.sleep(0.05)
            else:
                self._committed(number)

    def _committed(self, number: int) -> None:
        self.told.add(number)
        self.more.set()
        self.more = trio.Event()

    async def _append(self, txn: perco.Transaction, number: int) -> None:
        name, other = NAMES[number % 4], NAMES[(number // 4) % 4]
        for each in {name, other}:  # often in two rows
            txn.set(items, each, [*(await txn.get(items, each) or []), number])

    async def _ask(self, number: int, token: str) -> None:
        while True:
            try:
                outcome = await self._db.outcome(token)
            except StoreError:
                await trio.sleep(0.05)
                continue
            if outcome:
                self._committed(number)
            else:
                self.aborted.add(number)
            return

    async def check(self) -> None:
        async with self._db.snapshot() as snap:
            found = await snap.get_many(items, NAMES)
        for name in NAMES:
            counts = Counter(found.get(name) or [])
            wanted = {n for n in self.told if name in (NAMES[n % 4], NAMES[(n // 4) % 4])}
            assert max(counts.values(), default=1) == 1, "no commit is doubled"
            assert not wanted - set(counts), "no acknowledged commit is lost"
            assert not set(counts) & self.aborted, "no transaction that was told as aborted is there"
            assert set(counts) == wanted


async def _under(standing: Standing, harm: Callable[[], None], *, times: int, lost: int) -> None:
    """Append, and do harm so many times, or more often until so many terms have ended: each ends with a connection that
    is lost while mutations are in flight."""
    async with perco.open(standing.url(), SCHEMA) as db:
        appending = Appending(db)
        done = False
        async with trio.open_nursery() as nursery:
            for task in range(TASKS):
                nursery.start_soon(appending.run, task, lambda: done)
            done_harm = 0
            while done_harm < times or inside(db).place.rows.fence.term <= lost:  # type: ignore[attr-defined]
                await _more(appending, 20)
                await trio.to_thread.run_sync(harm)
                done_harm += 1
            await _more(appending, 20)
            done = True
        await _readable(db)
        await appending.check()
        assert not inside(db).driver.damaged


async def _readable(db: perco.Database) -> None:
    """Until the owner has renewed its lease since the server was away."""
    with trio.fail_after(60):
        while True:
            try:
                async with db.snapshot():
                    return
            except StoreError:
                await trio.sleep(0.05)


async def _more(appending: Appending, commits: int) -> None:
    """Until so many more have been acknowledged."""
    wanted = len(appending.told) + commits
    with trio.fail_after(60):
        while len(appending.told) < wanted:
            await appending.more.wait()


async def test_a_server_that_is_killed_loses_no_acknowledged_commit(standing: Standing) -> None:  # T4
    def kill() -> None:
        standing.stop()
        standing.start()

    await _under(standing, kill, times=2, lost=2)


async def test_connections_that_the_server_ends(standing: Standing) -> None:  # T4
    def end() -> None:
        standing.server.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'perco'")

    await _under(standing, end, times=20, lost=5)


async def test_statements_that_time_out(standing: Standing) -> None:  # S4
    def lock() -> None:
        standing.server.psql("SET statement_timeout = 0; BEGIN; LOCK TABLE perco_cells; SELECT pg_sleep(0.3); COMMIT")

    standing.server.psql("ALTER ROLE bench SET statement_timeout = '100ms'")
    await _under(standing, lock, times=2, lost=0)


async def test_a_server_that_stays_away_is_named(standing: Standing) -> None:
    options = perco.Options(postgresql=perco.options.PostgresqlOptions(call_s=0.5))
    async with perco.open(standing.url(), SCHEMA, options=options) as db:
        await db.run(Appending(db)._append, 1)
        standing.stop()
        for _ in range(2):
            with pytest.raises(StoreError, match="postgresql://"):
                await db.run(Appending(db)._append, 2)
        standing.start()
        appending = Appending(db)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(appending.run, 3, lambda: bool(appending.told))
        async with db.snapshot() as snap:
            assert await snap.get(items, NAMES[min(appending.told) % 4])
