"""Clients of a store whose tablets are split: their maps are old for a moment (P1 P3); time is virtual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.check.check import check
from perco.database.inside import inside, local_owner
from perco.serve.client import remote_owner
from perco.serve.messages import LOST, MOVED, Order, pack_verdict
from perco.serve.served_tablet import ServedTablet
from perco.storage import APPLIED, LOCK, WRITE, Failed, Mutation, Verdict
from perco.storage.call import Call
from tests.component.serve.kit import Place
from tests.component.serve.spread import spread
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)
KEYS = ("a", "b", "c", "d", "w", "x", "y", "z")


async def write(txn: perco.Transaction, keys: Sequence[str], value: int) -> None:
    for key in keys:
        txn.set(n, key, value)


async def add(txn: perco.Transaction, keys: Sequence[str]) -> None:
    for key in keys:
        txn.set(n, key, (await txn.get(n, key) or 0) + 1)


async def whole(db: perco.Database, owner: perco.Database, value: int) -> None:
    async with db.snapshot() as snap:
        assert {row.key: row[n] async for row in snap.scan(docs)} == dict.fromkeys(KEYS, value)
        assert [row.key async for row in snap.scan(docs, reverse=True)] == list(KEYS)[::-1]
    assert not (await check(inside(owner).driver.store, ts=await inside(owner).oracle.draw())).findings


async def test_a_tablet_that_moves_while_a_client_closes_is_no_failure() -> None:  # P3
    place = Place(SCHEMA)
    async with place.served():
        async with place.client() as db:
            close = remote_owner(db)._connections.aclose

            async def told_meanwhile() -> None:
                for _ in range(8):
                    remote_owner(db)._pushed(MOVED, None)
                    await trio.lowlevel.checkpoint()
                remote_owner(db)._pushed(MOVED, None)
                await close()
                remote_owner(db)._pushed(MOVED, None)  # as what was told just before, and is looked at now

            remote_owner(db)._connections.aclose = told_meanwhile  # type: ignore[method-assign]
        await trio.testing.wait_all_tasks_blocked()
        assert inside(db).background.failure() is None


@pytest.mark.parametrize("change", [write, add])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("keys", [KEYS, KEYS[::-1]], ids=["primary", "secondary"])
async def test_a_client_with_an_old_map_goes_on(change: Any, told: bool, keys: Sequence[str]) -> None:  # P3
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db:
        await db.run(write, KEYS, 0)
        if not told:  # before it hears of it
            remote_owner(db).store.moved = lambda: None  # type: ignore[method-assign]
            remote_owner(db).store.catch_up, catch_up = trio.lowlevel.checkpoint, remote_owner(db).store.catch_up  # type: ignore[method-assign]
        done = await db.split(docs, "c")
        assert (done.table, done.row, done.tablet) == ("docs", b"c", 2)
        await trio.testing.wait_all_tasks_blocked()
        if not told:
            remote_owner(db).store.catch_up = catch_up  # type: ignore[method-assign]
        before = inside(db).driver.counters.aborts
        await db.options(attempts=3).run(change, keys, *([1] if change is write else []))
        assert inside(db).driver.counters.aborts - before == (not told)
        assert remote_owner(db).store.bounds("docs") == [b"", b"c", b"m"]
        await whole(db, owner, 1)


async def test_what_a_client_asks_for_in_vain(autojump_clock: trio.testing.MockClock) -> None:
    place = Place(SCHEMA)
    async with place.served(), place.client() as db:
        with pytest.raises(perco.UsageError, match="begins at that key already"):
            await db.split(docs, "m")
        with pytest.raises(perco.UsageError, match="no table 'dogs'"):
            await db.split("dogs")


async def test_tablet_servers_have_the_halves(autojump_clock: trio.testing.MockClock) -> None:  # P1 P4
    async with spread(2) as place, place.clients(SCHEMA, 2) as (one, two):
        await one.run(write, KEYS, 0)
        await two.run(add, KEYS)
        done = await one.split(docs, "c")
        assert done.tablet == 2
        for _ in range(3):
            await two.run(add, KEYS)
        await whole(two, place.owner, 4)
        for _ in range(3):
            await one.split(docs)
        await two.run(add, KEYS)
        await whole(one, place.owner, 5)
        await local_owner(place.owner).splitting.clear()
        assert sorted(place.servers.engines) == [("docs", number) for number in range(6)]
        assert sum(engine.entries(WRITE) for engine in place.servers.engines.values()) == len(KEYS) * 6
        servers = await remote_owner(one).servers()
        assert sorted(len(server.tablets) for server in servers) == [3, 3]
        starts = sorted(tablet.start for server in servers for tablet in server.tablets)
        assert starts == remote_owner(one).store.bounds("docs") == local_of(place.owner).store.bounds("docs")


async def test_what_was_about_to_be_sent_as_one_is_not_looked_for_in_vain(
    autojump_clock: trio.testing.MockClock,
) -> None:  # P3
    async with spread(2) as place, place.clients(SCHEMA, 2) as (db, other):
        await db.run(write, KEYS, 0)
        apply, calls = remote_owner(db).store.apply, 0

        async def split_first(mutations: Sequence[Mutation]) -> list[Verdict]:
            nonlocal calls
            calls += 1
            if calls == 1:
                await other.split(docs, "c")
            return await apply(mutations)

        remote_owner(db).store.apply = split_first  # type: ignore[method-assign]
        with trio.fail_after(5):
            await db.options(attempts=2).run(add, KEYS)
        assert calls > 1  # it was split in between
        await whole(db, place.owner, 1)


async def test_what_a_tablet_server_has_held_is_asked_for_elsewhere(
    autojump_clock: trio.testing.MockClock,
) -> None:  # P1 F2
    async with spread(1) as place, place.client(SCHEMA, 1) as db:
        await db.run(write, KEYS, 0)
        held = place.servers.here[1].tablets.numbered("docs", 0)
        assert held is not None
        told: list[Verdict] = []
        call = Call(None, 1, told.extend)
        one = Mutation("docs", [(b"d", (), ())])
        held.tablet.let_go = lambda: [(one, call, 0)]  # type: ignore[method-assign]
        await db.split(docs, "c")
        await db.run(add, KEYS)
        assert [pack_verdict(verdict) for verdict in told] == [LOST]


@pytest.mark.parametrize("order", [Order.COPY, Order.CUT])
async def test_a_server_that_dies_while_it_splits_has_split_nothing(
    order: Order, autojump_clock: trio.testing.MockClock
) -> None:  # P4 F1
    async with spread(2) as place, place.client(SCHEMA, 1) as db:
        await db.run(write, KEYS, 0)
        [tablet] = [tablet for tablet in place.servers.tablets if tablet.number == 0]
        server = tablet.server
        assert server is not None
        place.servers.here[server.number].tablets.numbered("docs", 0).tablet.drain_s = 1.0  # type: ignore
        call = server.link.call

        async def dies(what: int, *args: Any, **kwargs: Any) -> Any:
            if what == order:
                inside(place.owner).background.spawn(lambda: place.servers.kill(server.number))
            return await call(what, *args, **kwargs)

        server.link.call = dies  # type: ignore[method-assign]
        with pytest.raises(perco.Unavailable, match="has died"):
            await db.split(docs, "c")
        await db.run(add, KEYS)
        await whole(db, place.owner, 1)
        assert remote_owner(db).store.bounds("docs") == [b"", b"m"]
        await db.split(docs, "c")
        await db.run(add, KEYS)
        await whole(db, place.owner, 2)


async def test_a_server_that_dies_between_the_cut_and_the_record_takes_nothing_along(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # P1 P4: the server that takes the tablet over has it up to the cut only
    async with spread(2) as place, place.clients(SCHEMA, 2) as (db, other), trio.open_nursery() as nursery:
        await db.run(write, KEYS, 0)
        recorded = local_owner(place.owner).splitting._recorded
        added = trio.Event()

        async def add_some() -> None:
            await other.run(add, KEYS)
            added.set()

        async def record(table: str, row: bytes, number: int) -> Any:
            [tablet] = [tablet for tablet in place.servers.tablets if tablet.number == 0]
            assert tablet.server is not None
            former = tablet.server
            await place.servers.kill(former.number)
            await former.ended.wait()
            await tablet.placed.wait()
            nursery.start_soon(add_some)
            await trio.sleep(1)
            assert not added.is_set()
            return await recorded(table, row, number)

        monkeypatch.setattr(local_owner(place.owner).splitting, "_recorded", record)
        await db.split(docs, "c")
        await added.wait()
        await whole(db, place.owner, 1)


async def test_what_the_owner_wants_written_goes_to_the_half_that_has_it(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # P1 P3
    async with spread(2) as place, place.client(SCHEMA, 1) as db:
        await db.run(write, KEYS, 0)
        store, recorded = local_of(place.owner).store, local_owner(place.owner).splitting._recorded
        [tablet] = [tablet for tablet in place.servers.tablets if tablet.number == 0]
        verdicts: dict[str, Verdict] = {}
        mark = (LOCK, 9 << 16, 1, b"")

        async def put(name: str, *rows: bytes) -> None:
            [verdicts[name]] = await store.apply([Mutation("docs", [(row, (), (mark,)) for row in rows])])

        async with trio.open_nursery() as nursery:

            async def record(table: str, row: bytes, number: int) -> Any:
                tablet.placed = trio.Event()  # as while it moves
                for name, rows in {"left": (b"a",), "right": (b"d",), "both": (b"a", b"d")}.items():
                    nursery.start_soon(put, name, *rows)
                await trio.testing.wait_all_tasks_blocked()
                return await recorded(table, row, number)

            monkeypatch.setattr(local_owner(place.owner).splitting, "_recorded", record)
            await db.split(docs, "c")
            assert not verdicts
            tablet.placed.set()
        assert verdicts["left"] is verdicts["right"] is APPLIED
        assert isinstance(verdicts["both"], Failed)
        assert isinstance(verdicts["both"].error, perco.errors.TabletSplit)
        engines = place.servers.engines
        assert [engines["docs", number].entries(LOCK) for number in (0, 2)] == [1, 1]


async def test_who_reads_and_writes_while_a_tablet_is_cut(autojump_clock: trio.testing.MockClock) -> None:  # P1
    async with spread(1) as place, place.clients(SCHEMA, 2) as (db, other):
        await db.run(write, KEYS, 0)
        held = place.servers.here[1].tablets.numbered("docs", 0)
        assert held is not None
        held.tablet.drain_s = 1.0  # type: ignore[attr-defined]
        is_cut, cut_it = trio.Event(), held.tablet.cut

        async def cutting(row: bytes) -> None:
            is_cut.set()
            await cut_it(row)

        held.tablet.cut = cutting  # type: ignore[method-assign]
        done: dict[str, float] = {}

        async def act(name: str, function: Any, *args: Any) -> None:
            await function(*args)
            done[name] = trio.current_time()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(act, "split", db.split, docs, "c")
            await is_cut.wait()
            cut = trio.current_time()
            async with other.snapshot() as snap:
                assert await snap.get(n, "d") == 0
                assert len(await snap.scan(docs).all()) == len(KEYS)
            await other.run(add, "ab")
            assert trio.current_time() - cut < 0.5, "neither reads nor other rows wait"
            nursery.start_soon(act, "write", other.run, add, "d")
        assert done["split"] <= done["write"] < done["split"] + 2
        async with db.snapshot() as snap:
            assert [await snap.get(n, key) for key in "abcd"] == [1, 1, 0, 1]


async def test_the_new_half_is_not_written_to_while_the_old_server_answers_for_it(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # P1
    async with spread(2) as place, place.clients(SCHEMA, 2) as (old, new), trio.open_nursery() as nursery:
        await old.run(write, KEYS, 0)
        may_tell, ordered = trio.Event(), ServedTablet._ordered

        async def later(self: ServedTablet, order: Order, *more: Any) -> Any:
            if order == Order.LET_GO:
                await may_tell.wait()
            return await ordered(self, order, *more)

        monkeypatch.setattr(ServedTablet, "_ordered", later)
        await new.split(docs, "c")
        added = trio.Event()

        async def add_one() -> None:
            await new.run(add, "d")
            added.set()

        nursery.start_soon(add_one)
        await trio.sleep(1)
        async with old.snapshot() as snap:
            assert await snap.get(n, "d") == 0
        assert not added.is_set()
        may_tell.set()
        await added.wait()
        async with old.snapshot() as snap:
            assert await snap.get(n, "d") == 1
        await old.run(add, "d")
        async with new.snapshot() as snap:
            assert await snap.get(n, "d") == 2


async def test_a_split_that_is_not_to_be_does_nothing_late(autojump_clock: trio.testing.MockClock) -> None:
    async with spread(1) as place, place.client(SCHEMA, 1) as db:  # P1: orders take tasks of their own
        await db.run(write, KEYS, 0)
        server = place.servers.here[1]
        held = server.tablets.numbered("docs", 0)
        assert held is not None
        await server._ordered[Order.UNCUT](("docs", 0, 1, b"m"))
        for order in (("docs", 0, 1, b"c", b"m", "docs-2", []), ("docs", 0, 1, b"c")):
            with pytest.raises(perco.Unavailable, match="was called off"):
                await server._ordered[Order.COPY if len(order) > 4 else Order.CUT](order)
        assert held.cut is None
        held.tablet.drain_s = 5.0  # type: ignore[attr-defined]
        async with trio.open_nursery() as nursery:

            async def cut() -> None:
                with pytest.raises(perco.Unavailable, match="was called off"):
                    await server._ordered[Order.CUT](("docs", 0, 2, b"c"))

            nursery.start_soon(cut)
            await trio.sleep(1)
            assert held.cut == b"c"
            await server._ordered[Order.UNCUT](("docs", 0, 2, b"m"))
            assert held.cut is None
        await db.run(add, KEYS)
        await whole(db, place.owner, 1)


async def test_a_newer_map_that_does_not_come_keeps_nobody_from_committing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    place = Place(SCHEMA)
    async with place.served(), place.client() as db:
        await db.run(write, KEYS, 0)

        async def away() -> None:
            raise perco.Unavailable("the owner is away")

        remote_owner(db).store.refresh = away  # type: ignore[method-assign]
        remote_owner(db).store._stale = True
        [verdict] = await remote_owner(db).store.apply([Mutation("docs", [(b"a", (), ((LOCK, 9 << 16, 1, b""),))])])
        assert verdict is APPLIED
