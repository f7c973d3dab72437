"""A primary that is killed, and a synchronous standby that is promoted: no acknowledged commit is lost or doubled."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio

import perco
from bench.against.coordinator import Coordinator
from perco.database.inside import inside
from tests.integration.postgresql.test_lost import SCHEMA, TASKS, Appending, _more, _readable
from tests.support.postgresql import Standing

REPLICATED = {"wal_level": "replica", "max_wal_senders": 4, "hot_standby": "on"}


class Pair:
    """A primary whose commits wait for its standby."""

    def __init__(self, folder: Path) -> None:
        for name in ("first", "second"):
            (folder / name).mkdir()
        self.primary = Standing(folder / "first", REPLICATED)
        self.standby = Standing(folder / "second", REPLICATED, self.primary)
        self.primary.server.psql(
            "ALTER SYSTEM SET synchronous_standby_names = '*'",
            "SELECT pg_reload_conf()",
        )
        self.url = self.primary.url("perco", self.standby)

    def fail_over(self) -> None:
        self.primary.stop()
        self.standby.server.psql("SELECT pg_promote()")

    def end(self) -> None:
        for each in (self.primary, self.standby):
            each.end()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.end()


@asynccontextmanager
async def _opened(url: str, how: str, folder: Path) -> AsyncIterator[perco.Database]:
    if how == "owner":
        async with perco.open(url, SCHEMA) as db:
            yield db
        return
    coordinator = Coordinator(url, folder / "socket")
    try:
        coordinator.says("serving postgresql://")
        async with perco.open(
            url, SCHEMA, options=perco.Options(postgresql=perco.options.PostgresqlOptions(own=False))
        ) as db:
            yield db
    finally:
        coordinator.end()


async def test_a_server_stands_by_while_postgresql_is_away(tmp_path: Path) -> None:
    """O1"""
    with ExitStack() as stack:
        standing = Standing(tmp_path)
        stack.callback(standing.end)
        leader = Coordinator(standing.url(), tmp_path / "a")
        stack.callback(leader.end)
        leader.says("serving")
        standby = Coordinator(standing.url(), tmp_path / "b")
        stack.callback(standby.end)
        standby.says("standing by: postgresql://")
        standing.stop()
        while "cannot be reached" not in (said := await trio.to_thread.run_sync(standby.line)):
            assert said.startswith("standing by")
        leader.send(signal.SIGKILL)
        standing.start()
        while not (said := await trio.to_thread.run_sync(standby.line)).startswith("serving"):
            assert said.startswith("standing by")


@pytest.mark.parametrize("how", ["owner", "direct"])
async def test_a_standby_that_is_promoted_has_all_acknowledged_commits(pair: Pair, how: str, tmp_path: Path) -> None:
    """T4 O1"""
    async with _opened(pair.url, how, tmp_path) as db:
        appending = Appending(db)
        done = False
        async with trio.open_nursery() as nursery:
            for task in range(TASKS):
                nursery.start_soon(appending.run, task, lambda: done)
            await _more(appending, 40)
            await trio.to_thread.run_sync(pair.fail_over)
            await _more(appending, 40)
            done = True
        await _readable(db)
        await appending.check()
        assert not inside(db).driver.damaged
