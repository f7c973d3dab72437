"""Clients that read and write a database by themselves, while the servers that give them timestamps die, stop and
follow each other: no acknowledged commit is lost or doubled, and observers go on."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.serve.direct import DirectRowStore
from tests.integration.databases.observed import SCHEMA as OBSERVED, copied, source
from tests.integration.postgresql.test_lost import SCHEMA, TASKS, Appending, _more, _readable
from tests.support import bigtable, postgresql
from tests.support.coordinated import ENDED, KILLED, STOPPED, Coordinators, Workers

_NO_OWNER = perco.Options(
    postgresql=perco.options.PostgresqlOptions(own=False), bigtable=perco.options.BigtableOptions(own=False)
)


@pytest.fixture(params=["postgresql", "bigtable"])
def url(request: pytest.FixtureRequest) -> str:
    return {"postgresql": postgresql.fresh, "bigtable": bigtable.fresh}[request.param]()


@pytest.fixture
def coordinators(url: str, tmp_path: Path) -> Iterator[Coordinators]:
    with ExitStack() as stack:
        made = Coordinators(url, tmp_path)
        stack.callback(made.end)
        yield made


@asynccontextmanager
async def _client(url: str, schema: perco.Schema = SCHEMA) -> AsyncIterator[perco.Database]:
    async with perco.open(url, schema, options=_NO_OWNER) as db:
        assert isinstance(inside(db).owner.store, DirectRowStore)  # type: ignore[attr-defined]
        yield db


@pytest.mark.parametrize("how", [KILLED, ENDED, STOPPED], ids=["killed", "ended", "stopped"])
async def test_clients_follow_to_the_next_server(coordinators: Coordinators, url: str, how: signal.Signals) -> None:
    """O1 T4 R8: one that was stopped finds out that it is deposed, and ends with an error."""
    async with _client(url) as one, _client(url) as two:
        appending = [Appending(one), Appending(two)]
        done = False
        async with trio.open_nursery() as nursery:
            for task in range(TASKS):
                nursery.start_soon(appending[task % 2].run, task, lambda: done)
            for _ in range(2):
                for each in appending:
                    await _more(each, 20)
                await trio.to_thread.run_sync(coordinators.follow, how)
            for each in appending:
                await _more(each, 20)
            done = True
        await _readable(one)
        appending[0].told |= appending[1].told
        appending[0].aborted |= appending[1].aborted
        await appending[0].check()
        assert not inside(one).driver.damaged


async def test_workers_that_are_killed_leave_nothing_undone(coordinators: Coordinators, url: str) -> None:
    """N3 N8 R7: two worker processes and the server that leads are killed on the way; each change is copied once."""
    workers = Workers(url, "tests.integration.databases.observed:SCHEMA")
    try:
        async with _client(url, OBSERVED) as db:
            for number in range(6):
                async with db.transaction() as txn:
                    for each in range(20):
                        txn.set(source, f"{number}-{each:02}", number + 1)
                if number in (1, 3):
                    workers.replace(number // 2)
                if number == 4:
                    await trio.to_thread.run_sync(coordinators.follow, KILLED)
            with trio.fail_after(120):
                await db.wait_idle()
            wanted = {f"{number}-{each:02}": number + 1 for number in range(6) for each in range(20)}
            async with db.snapshot() as snap:
                assert await snap.get_many(copied, wanted) == wanted
    finally:
        workers.end()


async def test_without_a_server_a_client_says_what_to_start(url: str) -> None:
    options = replace(_NO_OWNER, wire=perco.options.WireOptions(connect_s=0.1))
    async with perco.open(url, SCHEMA):  # it makes the tables, and serves nobody
        with pytest.raises(perco.Unavailable, match=r"no process lets clients.*perco serve URL --direct"):
            async with perco.open(url, SCHEMA, options=options):
                pass
