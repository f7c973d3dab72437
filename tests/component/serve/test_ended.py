"""The outcome that commits in flight report when a client's session ends, or a server refuses it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import RolledBack, TabletSplit, WrongToken
from perco.serve.client import remote_owner
from perco.serve.messages import Method, pack_verdict
from perco.serve.remote_rows import RemoteRowStore
from perco.storage import APPLIED, Batching, BatchOptions, Failed, Mutation, Verdict
from perco.txn.background import Background
from tests.component.serve.kit import Place

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)


async def put(txn: perco.Transaction, key: str, value: int) -> None:
    txn.set(n, key, value)


async def put_both(txn: perco.Transaction, value: int) -> None:
    txn.set(n, "a", value)
    txn.set(n, "z", value)


@asynccontextmanager
async def looks_back(db: Database) -> AsyncIterator[None]:
    """Read as of a past timestamp meanwhile: no other session of this client can go on with that (R7)."""
    await db.run(put, "m", 0)
    snap = await db.snapshot_at(ts=inside(db).oracle.last)
    try:
        yield
    finally:
        snap.end()


async def ends_session(place: Place) -> None:
    assert place.server is not None
    [session] = place.server.sessions.all.values()
    place.server.sessions.end(session)
    await place.break_connections()
    await trio.sleep(1)


async def test_a_commit_that_is_asked_for_too_late_is_unknown_not_aborted() -> None:  # T4 R5
    """Nobody holds the start of a transaction of an ended session, so the record of its commit may be collected before
    its client, which has lost the answer, asks for it."""
    place = Place(perco.Schema(docs, keep=perco.Keep(seconds=0)))
    away = False
    async with place.served(sweeper=False) as owner, place.client() as db:
        server, link = place.server, remote_owner(db).link
        assert server is not None
        connect = link._connect

        async def connecting() -> trio.abc.Stream:
            if away:
                raise ConnectionRefusedError("away")
            return await connect()

        link._connect = connecting
        commits, lost = server._handlers[Method.COMMIT], trio.Event()

        class Deaf:
            def reply(self, *_: Any) -> None:
                lost.set()

        ran = 0

        async def transfer(txn: perco.Transaction) -> None:
            nonlocal ran
            ran += 1
            await txn.get(n, "b")  # draws the timestamp
            await put(txn, "a", 11)
            await ends_session(place)
            assert txn.start_ts not in inside(owner).oracle.holds.open

        async def outage() -> None:
            nonlocal away
            await lost.wait()
            away = True
            await place.break_connections()
            await owner.run(put, "a", 12)
            assert (await owner.vacuum()).removed
            away = False

        async with looks_back(db), trio.open_nursery() as nursery:
            server._handlers[Method.COMMIT] = lambda session, peer, id, asked: commits(session, Deaf(), id, asked)
            nursery.start_soon(outage)
            with pytest.raises(perco.CommitUnknown, match="may have been collected"):
                await db.run(transfer)
        assert ran == 1
        async with owner.snapshot() as snap:
            assert await snap.get(n, "a") == 12


async def test_the_next_session_answers_for_a_commit_in_flight() -> None:  # T4 R5
    """Its owner has died, and the new one holds nothing of the client."""
    place = Place(SCHEMA)
    async with AsyncExitStack() as later, AsyncExitStack() as former:
        await former.enter_async_context(place.served(sweeper=False))
        async with place.client() as db, looks_back(db), trio.open_nursery() as nursery:
            assert place.server is not None
            place.server._handlers[Method.COMMIT] = lambda *_: None
            txn = await db.begin()
            txn.set(n, "a", 1)

            async def commit() -> None:
                with pytest.raises(RolledBack):
                    await txn.commit()

            nursery.start_soon(commit)
            await trio.testing.wait_all_tasks_blocked()
            await former.aclose()
            await later.enter_async_context(place.served(sweeper=False))


@pytest.mark.parametrize("when", [3, 4])
async def test_a_client_that_its_server_refuses_goes_on_when_it_is_let_in_again(when: int) -> None:  # R6
    place = Place(SCHEMA)
    async with place.served(sweeper=False) as owner, place.client() as db:
        await db.run(put_both, 1)
        link, driver = remote_owner(db).link, inside(db).driver
        driver.options = replace(driver.options, one_step=False)
        apply, welcomed, calls = driver.store.apply, link._welcomed, 0

        def refuses(message: Any) -> bool:
            raise WrongToken("another store's token")

        async def applies(mutations: Sequence[Mutation]) -> list[Verdict]:
            nonlocal calls
            calls += 1
            if calls == when:
                link._welcomed = refuses
                await place.break_connections()
                await trio.sleep(1)
            return await apply(mutations)

        driver.store.apply = applies  # type: ignore[method-assign]
        if when == 3:  # before its commit is sent
            with pytest.raises(WrongToken):
                await db.options(attempts=1).run(put_both, 2)
        else:
            await db.run(put_both, 2)
        await trio.sleep(5)
        assert inside(db).background.failure() is None
        assert inside(db).fates.live() == 0
        link._welcomed = welcomed
        await db.run(put_both, 3)
        async with owner.snapshot() as snap:
            assert [await snap.get(n, key) for key in "az"] == [3, 3]


async def test_locks_left_behind_while_it_is_away_are_told_in_the_next_session() -> None:  # T5 R5
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db, looks_back(db):
        former = inside(db).driver
        await ends_session(place)
        assert inside(db).driver is not former
        await place.break_connections()
        swept = inside(owner).driver.orphaned
        assert not swept.is_set()
        former.orphaned.set()
        await swept.wait()


class Splitting:
    """A link to a server in which tablets are split, and which then refuses the client."""

    refused = None

    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.refuses = False

    async def call(self, method: int, arguments: Any, **how: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if method == Method.TABLETS:
            if self.refuses:
                raise WrongToken("another store's token")
            return {"t": [(b"", 0)]}, {}
        told: list[Any] = []
        for mutation in arguments:
            if len(mutation.rows) > 1:
                self.refuses = True
                told.append(pack_verdict(Failed(TabletSplit("t"))))
            else:
                self.applied.append(mutation.rows[0][0])
                told.append(pack_verdict(APPLIED))
        return told


class Tablets:
    """Links to two tablet servers; the second one refuses the client."""

    def __init__(self, number: int) -> None:
        self.connected, self.closed = trio.Event(), False
        self.refused = WrongToken("another store's token") if number == 2 else None
        if self.refused is None:
            self.connected.set()

    async def call(self, method: int, arguments: Any, **how: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return [pack_verdict(APPLIED)] * len(arguments)


async def test_a_tablet_server_that_refuses_takes_nothing_of_anothers_answer_back() -> None:  # T4 F3
    class Owner:
        async def call(self, method: int, arguments: Any, **how: Any) -> Any:
            await trio.lowlevel.checkpoint()
            return {"t": [(b"", 1), (b"m", 2)]}, {1: 1, 2: 2}

    link: Any = Owner()
    reach: Callable[[int, int], Any] = lambda number, port: Tablets(number)  # noqa: E731
    store = RemoteRowStore(link, reach, 10.0, random.Random(1))
    store.spread = True
    await store.refresh()
    told = await store.apply([Mutation("t", ((row, (), ()),)) for row in (b"a", b"z")])
    assert told[0] is APPLIED
    assert isinstance(told[1], Failed)
    assert isinstance(told[1].error, WrongToken)


async def test_a_server_that_refuses_after_its_answer_takes_nothing_of_that_back() -> None:  # T4 D1
    link: Any = Splitting()
    reach: Callable[[int, int], Any] = lambda number, port: None  # noqa: E731
    store = RemoteRowStore(link, reach, 10.0, random.Random(1))
    await store.refresh()
    background = Background()
    together = Batching(store, BatchOptions(window_s=0.02, adaptive=False), background.spawn)
    told: dict[str, Verdict] = {}

    async def apply(name: str, *rows: bytes) -> None:
        [told[name]] = await together.apply([Mutation("t", tuple((row, (), ()) for row in rows))])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(apply, "one", b"a")
        nursery.start_soon(apply, "two", b"b", b"c")
    assert told["one"] is APPLIED
    assert isinstance(told["two"], Failed)
    assert (link.applied, link.refuses) == ([b"a"], True)
