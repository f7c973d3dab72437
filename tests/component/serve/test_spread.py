"""Clients whose rows are with tablet servers, which die and lose tablets to each other; time is virtual."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.check.check import check
from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.rpc.channel import WireOptions
from perco.rpc.peer import Peer
from perco.serve import remote_rows
from perco.serve.client import remote_owner
from perco.serve.messages import NOT_HERE, Method, Order
from perco.serve.processes import TabletServers
from perco.serve.remote_rows import _Search
from perco.storage import APPLIED, NOTIFY, TS_MAX, WRITE, Failed, Mutation, Refused, Verdict
from perco.storage.call import Call
from perco.storage.engine import MemoryBatch
from perco.storage.fencing import Fenced
from perco.testing import isolation
from perco.testing.history import record
from tests.component.serve.kit import WIRE
from tests.component.serve.spread import Chaos, Spread, spread
from tests.support.places import local_of
from tests.support.spread import MemoryServers

lists = perco.Table("lists", key=perco.INT64, splits=[2, 4, 6])
items = lists.column("items", perco.BYTES)
sums = lists.column("sums", perco.INT64)
SCHEMA = perco.Schema(lists, keep=perco.Keep(seconds=0))
KEYS = range(8)


@SCHEMA.observe(items, id="sum")
async def add_up(txn: perco.Transaction, change: perco.Change[int, bytes]) -> None:
    txn.set(sums, change.key, sum(change.value or b""))


counts = perco.Table("counts", key=perco.INT64, splits=[2, 4, 6])
put = counts.column("put", perco.INT64)
counted = counts.column("counted", perco.INT64)
COUNTED = perco.Schema(counts)


@COUNTED.observe(put, id="count")
async def count(txn: perco.Transaction, change: perco.Change[int, int]) -> None:
    txn.set(counted, change.key, (await txn.get(counted, change.key) or 0) + 1)


async def _put(txn: perco.Transaction, key: int) -> None:
    txn.set(put, key, key)


async def _append(txn: perco.Transaction, key: int, item: int) -> None:
    txn.set(items, key, (await txn.get(items, key) or b"") + bytes([item]))


class Barrier:
    """Nobody passes before so many have come."""

    def __init__(self, parties: int) -> None:
        self._missing, self._all = parties, trio.Event()

    async def wait(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._all.set()
        await self._all.wait()


async def test_what_comes_in_parts_is_all_there_and_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:  # F2
    """A tablet server answers for as many rows as fit; the others are asked for at once, of the same."""
    searches = 0
    search = _Search.next

    async def counted(self: _Search) -> None:
        nonlocal searches
        searches += self._version >= 0  # not the first look, which is none
        await search(self)

    parts, checked = 0, remote_rows._checked

    def parted(answer: Any, asked: Any) -> Any:
        nonlocal parts
        parts += len(answer) < len(asked)
        return checked(answer, asked)

    async with spread(2) as place, place.clients(COUNTED, 1) as [db]:
        async with db.transaction() as txn:
            for key in KEYS:
                txn.set(put, key, key)
        monkeypatch.setattr(WireOptions, "part_bytes", 1)
        monkeypatch.setattr(remote_rows, "_checked", parted)
        monkeypatch.setattr(_Search, "next", counted)
        async with db.snapshot() as snap:
            assert await snap.get_many(put, KEYS) == {key: key for key in KEYS}
        assert searches == 0
        assert parts >= len(KEYS) - 2


@pytest.mark.parametrize("seed", range(12))
async def test_histories_through_deaths_moves_and_broken_connections(
    seed: int, autojump_clock: trio.testing.MockClock
) -> None:  # F1 F2 F3 T1-T9 G1 G2 R4 R5
    rng = random.Random(seed)
    numbers: dict[int, int] = dict.fromkeys(KEYS, 0)
    async with spread(3) as place, place.clients(SCHEMA, 4) as dbs:
        chaos = Chaos(place, rng)
        with record() as recorder:

            async def client(name: str, db: perco.Database) -> None:
                for _ in range(60):
                    await trio.sleep(rng.uniform(0.0, 0.1))
                    keys = rng.sample(KEYS, rng.randint(1, 3))
                    with suppress(perco.TransientError, perco.CommitUnknown, perco.Unavailable):
                        async with recorder.transaction(db, name) as (txn, ops):
                            for key in keys:
                                value = await txn.get(items, key) or b""
                                ops.read(key, list(value))
                                if rng.random() < 0.6:
                                    numbers[key] += 1
                                    txn.set(items, key, value + bytes([numbers[key] % 256]))
                                    ops.append(key, numbers[key] % 256)

            async with trio.open_nursery() as nursery:
                stopped = trio.CancelScope()

                async def befall() -> None:
                    with stopped:
                        await chaos.run()

                nursery.start_soon(befall)
                async with trio.open_nursery() as clients:
                    for i, db in enumerate(dbs):
                        clients.start_soon(client, f"c{i}", db)
                with trio.fail_after(60):
                    while not all(chaos.done.values()):  # noqa: ASYNC110  # a death may void every split so far
                        await trio.sleep(0.1)
                stopped.cancel()
        assert max(numbers.values()) < 256
        report = isolation.check(recorder.transactions)
        assert report.ok, report.anomalies[0]
        assert sum(one.status == "ok" for one in recorder.transactions) > 40
        assert all(chaos.done.values()), chaos.done
        assert place.servers.deaths >= chaos.done["kill"] - 3
        async with dbs[0].worker(concurrency=4):
            await dbs[1].wait_idle(timeout=600)
        async with dbs[2].snapshot() as snap:
            rows = await snap.scan(lists).all()
        assert all(row[sums] == sum(row[items] or b"") for row in rows)
        found = await check(inside(place.owner).driver.store, ts=await inside(place.owner).oracle.draw())
        assert not found.findings


@pytest.mark.parametrize("seed", range(4))
async def test_observers_run_once_for_each_change_whoever_dies(
    seed: int, autojump_clock: trio.testing.MockClock
) -> None:  # N1 N2 N7 N8
    rng = random.Random(seed)
    unknown = 0
    async with spread(3) as place, place.clients(COUNTED, 3) as dbs:
        chaos = Chaos(place, rng)
        async with trio.open_nursery() as nursery, dbs[0].worker(concurrency=4), dbs[1].worker(concurrency=4):
            stopped = trio.CancelScope()

            async def befall() -> None:
                with stopped:
                    await chaos.run()

            nursery.start_soon(befall)
            for i in range(30):
                await trio.sleep(rng.uniform(0.0, 0.3))
                ts = 0
                while not ts:
                    try:
                        async for attempt in dbs[2].attempts():
                            async with attempt as txn:
                                txn.set(put, i % 8, i)
                        ts = txn.commit_ts
                    except (perco.CommitUnknown, perco.Unavailable):
                        unknown += 1
                await dbs[2].wait_for(ts, timeout=600)
            stopped.cancel()
            await dbs[2].wait_idle(timeout=600)
        assert place.servers.deaths
        async with dbs[2].snapshot() as snap:
            rows = await snap.scan(counts).all()
        assert [row[put] for row in rows] == [24, 25, 26, 27, 28, 29, 22, 23]
        # Each change was waited for: none collapsed with the next.
        assert 30 <= sum(row[counted] or 0 for row in rows) <= 30 + unknown


@pytest.mark.parametrize("former", ["lock", "pending"])
async def test_what_becomes_a_notify_cell_during_a_look_is_seen(
    former: str, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # N7
    async with spread(1) as place, place.client(COUNTED, 1) as db:
        await db.run(_put, 1)
        async with db.worker():
            await db.wait_idle(timeout=60)
        assert local_owner(place.owner).idle.now()
        engine = place.servers.engines["counts", 0]
        key, entries = b"a key of the engine", local_owner(place.owner).idle.entries

        def put(group: str, *, value: bytes | None) -> None:
            batch = MemoryBatch(engine)
            if value is None:
                batch.delete(group, key)
            else:
                batch.put(group, key, value)
            batch.commit()

        def counted_while_it_goes_on(group: str) -> int:
            count = entries(group)
            put(former, value=None)
            put(NOTIFY, value=b"")
            return count

        put(former, value=b"")
        assert not local_owner(place.owner).idle.now()
        monkeypatch.setattr(local_owner(place.owner).idle, "entries", counted_while_it_goes_on)
        assert not local_owner(place.owner).idle.now()


async def test_a_busy_machine_takes_its_time_to_start_servers(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # F1
    monkeypatch.setattr(MemoryServers, "starts_s", 10 * WIRE.connect_s)
    async with spread(2) as place, place.client(COUNTED) as db:
        assert trio.current_time() >= 10 * WIRE.connect_s
        await db.run(_put, 1)
        assert not place.servers.deaths


async def test_an_ended_session_reads_nothing_at_tablet_servers(autojump_clock: trio.testing.MockClock) -> None:  # F3
    async with spread(1) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 1, 1)
        snap = await db.snapshot_at()
        assert await snap.get(items, 1) == b"\1"
        place.reachable = False
        await place.break_connections()
        await trio.sleep(place.wire.lease_s * 2)
        # It has not come to know yet that it is over; its tablet server has.
        with pytest.raises((perco.errors.SessionEnded, perco.Unavailable)):
            await snap.get(items, 2)
        assert not place.servers.here[1]._sessions
        assert not place.servers.here[1]._serving
        place.reachable = True
        async with place.client(SCHEMA, 2) as other:
            await other.run(_append, 1, 2)
        await place.owner.vacuum()
        await remote_owner(db).link.connected.wait()
        with pytest.raises(perco.errors.SessionEnded):
            await snap.get(items, 2)
        await db.run(_append, 1, 3)


async def test_a_session_that_has_begun_anew_reads_nothing_of_the_former_one(
    autojump_clock: trio.testing.MockClock,
) -> None:  # F3: the greeting arrived, its answer did not
    async with spread(1) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 2, 1)
        snap = await db.snapshot_at()
        place.reachable = False
        await place.break_connections()
        await trio.sleep(place.wire.lease_s * 2)
        async with _reached(place), place.client(SCHEMA, 2) as other:
            await other.run(_append, 2, 2)
        await place.owner.vacuum()
        place.server._let_in(remote_owner(db)._session, [snap.start_ts], remote_owner(db)._greetings)
        await trio.testing.wait_all_tasks_blocked()
        assert len(place.servers.here[1]._sessions) == 1
        with pytest.raises((perco.errors.SessionEnded, perco.Unavailable)):
            await snap.get(items, 2)


@asynccontextmanager
async def _reached(place: Spread) -> AsyncIterator[None]:
    place.reachable = True
    yield
    place.reachable = False


@pytest.mark.parametrize("held", [True, False], ids=["of the greeting", "none"])
async def test_what_is_let_go_of_in_a_greeting_takes_another_ticket(
    held: bool, autojump_clock: trio.testing.MockClock
) -> None:  # F3
    async with spread(1) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 1, 1)
        snap = await db.snapshot_at()
        before = remote_owner(db)._ticket
        if not held:
            set.clear(inside(db).oracle.holds.open)  # as one that holds too much to say it
        await place.break_connections()
        await db.run(_append, 1, 2)
        assert (remote_owner(db)._ticket == before) == held
        assert place.servers.here[1]._sessions == {remote_owner(db)._ticket}
        snap.end()


async def test_who_sees_no_tablet_server_commits_in_two_phases_all_the_same(
    autojump_clock: trio.testing.MockClock,
) -> None:  # C4
    async with spread(2) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 1, 1)
        for number in list(place.servers.here):
            await place.servers.kill(number)
        async with place.client(SCHEMA, 2) as other:
            assert remote_owner(other).store.spread
            assert not inside(other).fates.alone
            await other.run(_append, 1, 2)
            await db.run(_append, 1, 3)
            async with other.snapshot() as snap:
                assert await snap.get(items, 1) == b"\1\2\3"
        assert not inside(place.owner).fates.alone


async def test_what_asks_to_commit_in_one_step_is_refused(autojump_clock: trio.testing.MockClock) -> None:  # C4
    async with spread(1) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 1, 1)
        store = remote_owner(db).store
        store.spread, store.alone = False, True  # as one that has not heard of it yet
        txn = await db.begin()
        txn.set(items, 1, b"\7")
        with pytest.raises(perco.errors.SessionEnded):
            await txn.commit()
        store.spread, store.alone = True, False
        async with db.snapshot() as snap:
            assert await snap.get(items, 1) == b"\1"


@pytest.mark.parametrize("seed", range(6))
async def test_all_tablets_come_back_whenever_all_servers_die(
    seed: int, autojump_clock: trio.testing.MockClock
) -> None:  # F1
    rng = random.Random(seed)
    async with spread(3) as place, place.client(SCHEMA, 1) as db:
        for _ in range(12):
            await trio.sleep(rng.uniform(0.0, 0.5))
            for number in rng.sample(sorted(place.servers.here), rng.randint(0, len(place.servers.here))):
                await place.servers.kill(number)
        for key in KEYS:
            await db.run(_append, key, 1)
        with trio.fail_after(600):
            for tablet in place.servers.tablets:
                await tablet.placed.wait()
        assert place.servers.deaths


async def test_a_change_whose_server_died_before_it_told_is_observed(
    autojump_clock: trio.testing.MockClock,
) -> None:  # N8
    async with spread(1) as place, place.clients(COUNTED, 2) as (db, other), db.worker():
        await other.run(_put, 1)
        await db.wait_idle(timeout=60)
        await trio.sleep(60)  # its scanners sleep
        place.servers.here[1]._tell = lambda what: None  # type: ignore[method-assign]
        await other.run(_put, 2)
        await place.servers.kill(1)
        await db.wait_idle(timeout=60)
        async with db.snapshot() as snap:
            assert await snap.get(counted, 2) == 1


async def test_two_clients_that_meet_each_others_locks_do_not_wait_for_each_other(
    autojump_clock: trio.testing.MockClock,
) -> None:  # T7
    async with spread(2) as place, place.clients(SCHEMA, 2) as dbs:
        both = [Barrier(2), Barrier(2)]  # hold what is not their primary; let go of it

        def step_by_step(db: Database) -> None:
            apply, barriers = remote_owner(db).store.apply, iter(both)

            async def stepping(mutations: Sequence[Mutation]) -> list[Verdict]:
                if (barrier := next(barriers, None)) is None:
                    return await apply(mutations)
                if barrier is both[1]:
                    await barrier.wait()
                    return await apply(mutations)
                verdicts = await apply(mutations[1:])
                await barrier.wait()
                return await apply(mutations[:1]) + verdicts

            remote_owner(db).store.apply = stepping  # type: ignore[method-assign]

        async def write(txn: perco.Transaction, *keys: int) -> None:
            for key in keys:
                txn.set(items, key, b"x")

        for db in dbs:
            step_by_step(db)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(dbs[0].run, write, 1, 7)
                nursery.start_soon(dbs[1].run, write, 7, 1)
        assert all(inside(db).driver.counters.lock_waits for db in dbs)


async def test_a_read_that_looks_for_its_tablet_ends_with_its_session(
    autojump_clock: trio.testing.MockClock,
) -> None:  # F3 R5
    async with spread(1) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 2, 1)
        snap = await db.snapshot_at()
        place.servers.unopenable.add(("lists", 1))
        await place.servers.kill(1)
        ended: list[Exception] = []

        async def read() -> None:
            try:
                await snap.get(items, 2)
            except perco.errors.SessionEnded as error:
                ended.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.sleep(1)
            remote_owner(db).store.losses += 1  # as when a greeting says that nothing was kept
            place.servers.unopenable.clear()
        assert ended
        snap.end()


async def test_a_tablet_whose_server_dies_as_it_closes_it_is_opened_when_that_has_ended(
    autojump_clock: trio.testing.MockClock,
) -> None:  # F1
    async with spread(2) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 1, 1)
        [tablet] = [t for t in place.servers.tablets if t.number == 0]
        former = tablet.server
        assert former is not None
        [to] = [server for server in place.servers.all.values() if server is not former]
        held = place.servers.here[former.number].tablets.numbered("lists", 0)
        assert held is not None
        held.tablet.drain_s = 5.0  # type: ignore[attr-defined]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(place.servers.move, tablet, to)
            await trio.sleep(1)
            await place.servers.kill(former.number)
        assert former.ended.is_set()
        await tablet.placed.wait()
        await db.run(_append, 1, 2)


async def test_a_tablet_that_cannot_be_opened_holds_up_no_other(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with spread(1) as place, place.client(SCHEMA, 1) as db:
        for key in (1, 3):
            await db.run(_append, key, 1)
        place.servers.unopenable.add(("lists", 0))
        await place.servers.kill(1)
        await db.run(_append, 3, 2)
        assert place.servers.deaths == 1
        with pytest.raises(perco.Unavailable):
            await db.run(_append, 1, 2)
        async with place.client(SCHEMA, 2) as other:  # can be opened meanwhile
            await other.run(_append, 3, 3)
        late = Mutation("lists", ((perco.INT64.encode(1), (), ()),))
        [verdict] = await local_of(place.owner).store.apply([late])
        assert isinstance(verdict, Failed)
        assert "it is a brick" in str(verdict.error)
        place.servers.unopenable.clear()
        await trio.sleep(60)
        await db.run(_append, 1, 2)
        assert place.servers.deaths == 1


async def test_what_comes_behind_the_end_of_a_session_is_not_answered(
    autojump_clock: trio.testing.MockClock,
) -> None:  # F3
    async with spread(1) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 1, 1)
        server = place.servers.here[1]
        [peer] = server._serving
        server._told_sessions((), (remote_owner(db)._ticket,))
        with pytest.raises(perco.errors.SessionEnded):
            server._handle(peer, 1, Method.READ, [])
        place.servers.session_began(remote_owner(db)._ticket)


async def test_a_tablet_that_was_lost_is_opened_again(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # F1 F2
    async with spread(2) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 1, 1)
        [tablet] = [t for t in place.servers.tablets if t.number == 0]
        assert tablet.server is not None
        epoch = tablet.epoch
        held = place.servers.here[tablet.server.number].tablets.numbered("lists", 0)
        assert held is not None

        def taken_over(mutation: Mutation, call: Call, index: int) -> None:
            call.answer(index, Failed(Fenced("somebody has it")))

        monkeypatch.setattr(held.tablet, "submit", taken_over)
        await db.run(_append, 1, 2)  # by a client
        assert tablet.epoch > epoch
        held = place.servers.here[tablet.server.number].tablets.numbered("lists", 0)
        assert held is not None
        monkeypatch.setattr(held.tablet, "submit", taken_over)
        [verdict] = await local_of(place.owner).store.apply([Mutation("lists", ((perco.INT64.encode(1), (), ()),))])
        assert verdict is APPLIED  # by the owner
        async with db.snapshot() as snap:
            assert await snap.get(items, 1) == b"\1\2"


async def test_a_tablet_server_is_told_of_an_end_before_the_floor_rises(
    autojump_clock: trio.testing.MockClock,
) -> None:  # F3 G2
    told: list[str] = []
    async with spread(1) as place:
        async with place.client(SCHEMA, 1) as db:
            await db.run(_append, 1, 1)
            server = place.servers.here[1]
            sessions, floor = server._told_sessions, server._ordered

            def note_sessions(began: Sequence[str], ended: Sequence[str]) -> None:
                told.extend("ended" for _ in ended)
                sessions(began, ended)

            async def note_floor(order: object) -> object:
                told.append("floor")
                return await raised(order)

            raised = floor[Order.FLOOR]
            server._told_sessions = note_sessions  # type: ignore[method-assign]
            floor[Order.FLOOR] = note_floor
        await place.owner.vacuum()
        assert told[0] == "ended"
        assert "floor" in told


async def test_what_is_not_here_is_not_done(autojump_clock: trio.testing.MockClock) -> None:  # F2
    async with spread(2) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 1, 1)
        await db.run(_append, 3, 1)
        [here] = [t for t in place.servers.tablets if t.table == "lists" and t.number == 0]
        [there] = [t for t in place.servers.tablets if t.table == "lists" and t.number == 1]
        assert here.server is not None
        assert here.server is not there.server
        row_here, row_there = perco.INT64.encode(1), perco.INT64.encode(3)
        link = remote_owner(db).store._links[here.server.number]
        query = (WRITE, 0, 0, TS_MAX, 1)
        asked = [("lists", row_here, [query]), ("lists", row_there, [query])]
        assert await link.call(Method.READ, asked, again=True) is NOT_HERE
        before = here.entries("data"), there.entries("data")
        both = [("lists", ((row, (), (("data", 0, 1, b"x"),)),), None, False) for row in (row_here, row_there)]
        assert await link.call(Method.APPLY, both, again=False) is NOT_HERE
        assert (here.entries("data"), there.entries("data")) == before


async def test_whoever_takes_a_tablet_over_has_its_floor(autojump_clock: trio.testing.MockClock) -> None:  # T13
    async with spread(2) as place, place.client(SCHEMA, 1) as db:
        for _ in range(3):
            await db.run(_append, 1, 1)
        await place.owner.vacuum()
        floor = inside(place.owner).oracle.holds.watermark
        [tablet] = [t for t in place.servers.tablets if t.number == 0]
        late = Mutation("lists", ((perco.INT64.encode(1), (), (("data", 99, 1, b"x"),)),), floor - 1)
        [refused] = await remote_owner(db).store.apply([late])
        assert isinstance(refused, Refused)
        for _ in range(2):  # by its death, and by a move
            assert tablet.server is not None
            before, placed = tablet.server, trio.Event()
            place.servers.on_moved = placed.set
            if before.number == 1:
                await place.servers.kill(1)
            else:
                [to] = [server for server in place.servers.all.values() if server is not before]
                await place.servers.move(tablet, to)
            await tablet.placed.wait()
            while tablet.server is before:
                await placed.wait()
            assert [refused] == await remote_owner(db).store.apply([late])


async def test_who_is_cancelled_when_a_part_was_sent_waits_for_all(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # T10
    async with spread(2) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 1, 1)
        [here, there] = [t for t in place.servers.tablets if t.number in (0, 1)]
        assert there.server is not None
        server = place.servers.here[there.server.number]
        apply, scope, asked = server._asked[Method.APPLY], trio.CancelScope(), []

        def away_at_first(peer: Peer, id: int, packed: object) -> None:
            asked.append(id)
            if len(asked) < 4:
                scope.cancel()
                peer.reply(id, NOT_HERE)
            else:
                apply(peer, id, packed)

        monkeypatch.setitem(server._asked, Method.APPLY, away_at_first)
        both = [Mutation("lists", ((perco.INT64.encode(key), (), (("data", 99, 1, b"x"),)),)) for key in (1, 3)]
        with scope:
            assert await remote_owner(db).store.apply(both) == [APPLIED, APPLIED]
        assert scope.cancel_called
        assert len(asked) == 4
        for tablet, key in ((here, 1), (there, 3)):
            assert tablet.read(perco.INT64.encode(key), [("data", 99, 0, TS_MAX, 1)]) == [[(1, b"x")]]


async def test_who_is_cancelled_before_anything_was_sent_has_sent_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:  # T10
    async with spread(1) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 1, 1)
        place.servers.ending = True
        await place.servers.kill(1)
        with trio.move_on_after(1) as scope:
            await db.run(_append, 1, 2)
        assert scope.cancelled_caught


async def test_a_client_with_an_old_map_finds_what_has_moved(autojump_clock: trio.testing.MockClock) -> None:  # F2
    async with spread(2) as place, place.client(SCHEMA, 1) as db:
        for key in KEYS:
            await db.run(_append, key, 1)
        version = remote_owner(db).store._version
        for tablet in list(place.servers.tablets):
            [to] = [server for server in place.servers.all.values() if server is not tablet.server]
            await place.servers.move(tablet, to)
        assert remote_owner(db).store._version == version
        for key in KEYS:
            await db.run(_append, key, 2)
        async with db.snapshot() as snap:
            assert [row[items] async for row in snap.scan(lists)] == [b"\1\2"] * 8
        assert remote_owner(db).store._version > version


async def test_without_any_tablet_server_patience_ends(autojump_clock: trio.testing.MockClock) -> None:
    async with spread(1) as place, place.client(SCHEMA, 1) as db:
        await db.run(_append, 1, 1)
        place.servers.ending = True  # nobody follows
        await place.servers.kill(1)
        txn = await db.begin()
        txn.set(items, 1, b"")
        with pytest.raises(perco.Unavailable, match="no tablet server has had"):
            await txn.commit()
        with pytest.raises(perco.Unavailable, match="no tablet server has had"):
            await db.run(_append, 1, 2)


async def test_tablets_are_spread_evenly_again(autojump_clock: trio.testing.MockClock) -> None:
    async with spread(2) as place, place.client(SCHEMA, 1) as db:
        for key in KEYS:
            await db.run(_append, key, 1)
        for number in (2, 1):
            assert _tablets_each(place.servers) == [2, 2]
            await place.servers.kill(number)
            with trio.fail_after(60):
                while place.servers.deaths < 1 + (number == 1) or _tablets_each(place.servers) != [2, 2]:
                    moved = trio.Event()
                    place.servers.on_moved = moved.set
                    await moved.wait()
        for key in KEYS:
            await db.run(_append, key, 2)
        async with db.snapshot() as snap:
            assert [row[items] async for row in snap.scan(lists)] == [b"\1\2"] * 8


def _tablets_each(servers: TabletServers) -> list[int]:
    return sorted(sum(tablet.placed.is_set() for tablet in server.tablets) for server in servers.all.values())


async def test_another_tablet_server_knows_no_ended_session(autojump_clock: trio.testing.MockClock) -> None:  # F3
    async with spread(1) as place, place.client(SCHEMA, 1) as db:
        async with place.client(SCHEMA, 2):
            pass
        moved = trio.Event()
        place.servers.on_moved = moved.set
        await place.servers.kill(1)
        await moved.wait()
        assert place.servers.here[1]._sessions == {remote_owner(db)._ticket}
