"""Connections and sessions that break at the wrong moment, and servers that are away for long; time is virtual."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.database import Database
from perco.database.inside import inside
from perco.notify.rowlocks import CLAIMED, FREE, HELD, Dirty
from perco.rpc.channel import Channel
from perco.rpc.framing import Message
from perco.rpc.link import LostError
from perco.serve.client import remote_owner
from perco.serve.elsewhere import Elsewhere
from perco.serve.messages import CLAIMS_MAX, WIRE_VERSION, Method, hello
from perco.serve.sessions import Session
from perco.storage import Mutation
from perco.storage.call import Call
from tests.component.serve.kit import WIRE, Place, quick, vanish
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
twice = docs.column("twice", perco.INT64)
SCHEMA = perco.Schema(docs)


@SCHEMA.observe(n, id="double")
async def double(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    txn.set(twice, change.key, 2 * (change.value or 0))


@pytest.fixture
def place() -> Place:
    return Place(SCHEMA)


async def put(txn: perco.Transaction, key: str, value: int) -> None:
    txn.set(n, key, value)


def session_of(place: Place) -> Session:
    assert place.server is not None
    [session] = place.server.sessions.all.values()
    return session


@asynccontextmanager
async def away(place: Place) -> AsyncIterator[None]:
    """While the block lasts nobody serves; the same owner does before and afterwards."""
    server, place.server = place.server, None
    await place.break_connections()
    await trio.testing.wait_all_tasks_blocked()
    try:
        yield
    finally:
        place.server = server


async def back(db: Database) -> None:
    """Wait until the client has a connection, and the owner has heard all that it told before."""
    await remote_owner(db).link.connected.wait()
    await inside(db).oracle.newest()


def cancel_once_sent(db: Database, scope: trio.CancelScope) -> None:
    """The next call is cancelled when the server has it and its reply has not come."""
    channel = remote_owner(db).link._channel
    assert channel is not None
    send = channel.send

    def sends(message: Any, **more: Any) -> None:
        channel.send = send  # type: ignore[method-assign]
        send(message, **more)
        scope.cancel()

    channel.send = sends  # type: ignore[method-assign]


async def test_what_ends_while_there_is_no_connection_is_let_go_of(place: Place) -> None:  # R7 G1
    async with place.served() as owner, place.client() as db:
        await db.run(put, "a", 1)
        begun = await db.snapshot_at()
        past = await db.snapshot_at(ts=begun.start_ts)
        async with away(place):
            begun.end()
            past.end()
        await back(db)
        assert not inside(owner).oracle.holds.open
        assert not session_of(place).held
        assert inside(owner).oracle.holds.lowest(inside(owner).oracle.last, 0).kind == "retention"


async def test_a_claim_whose_release_was_lost_is_free_again(place: Place) -> None:  # R7 N7 N8
    async with place.served(), place.client() as db, db.worker():
        worker = inside(db).workers.worker
        assert worker is not None
        assert worker.elsewhere is not None
        where = ("docs", b"a")
        assert await worker.elsewhere.take("docs", [Dirty(b"a", [], 1, 1)], 1, halts=True) == bytes([CLAIMED])
        async with away(place):
            worker.elsewhere.release(where)
        await back(db)
        assert not session_of(place).claims
        await db.wait_idle(timeout=5)


async def test_a_claim_that_is_given_up_while_it_is_asked_for_is_free(place: Place) -> None:  # R7 N8
    async with place.served(), place.client() as db, db.worker():
        worker = inside(db).workers.worker
        assert worker is not None
        assert worker.elsewhere is not None
        with trio.CancelScope() as scope:
            cancel_once_sent(db, scope)
            await worker.elsewhere.take("docs", [Dirty(b"a", [], 1, 1)], 1, halts=True)
            raise AssertionError
        await inside(db).oracle.newest()
        assert not session_of(place).claims


async def test_a_past_snapshot_that_is_given_up_while_it_is_asked_for_is_not_held(place: Place) -> None:  # G1 T15
    async with place.served(), place.client() as db:
        await db.run(put, "a", 1)
        with trio.CancelScope() as scope:
            cancel_once_sent(db, scope)
            await inside(db).oracle.hold(1)
            raise AssertionError
        await inside(db).oracle.newest()
        assert not session_of(place).held


async def test_what_ends_between_the_two_greetings_is_let_go_of(place: Place) -> None:  # R7 G1
    async with place.served() as owner, place.client() as db:
        await db.run(put, "a", 1)
        snap = await db.snapshot_at()
        welcomed = remote_owner(db).link._welcomed

        def ends(message: Any) -> bool:
            snap.end()
            return welcomed(message)

        remote_owner(db).link._welcomed = ends
        await place.break_connections()
        await trio.testing.wait_all_tasks_blocked()
        await back(db)
        assert not snap._open
        assert not inside(owner).oracle.holds.open


async def test_timestamps_whose_reply_was_lost_are_nobodys(place: Place, monkeypatch: Any) -> None:  # G1
    async with place.served() as owner, place.client() as db:
        await db.run(put, "a", 1)
        extended = trio.Event()
        draw = inside(owner).oracle.draw

        async def slow() -> int:
            await extended.wait()
            return await draw()

        monkeypatch.setattr(inside(owner).oracle, "draw_nowait", lambda: 0)
        monkeypatch.setattr(inside(owner).oracle, "draw", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(db.begin)
            await trio.testing.wait_all_tasks_blocked()
            await place.break_connections()
            monkeypatch.undo()
            await trio.testing.wait_all_tasks_blocked()
            await back(db)
            extended.set()
            await trio.testing.wait_all_tasks_blocked()
            assert inside(owner).oracle.holds.open == set(inside(db).oracle.holds.open)
            nursery.cancel_scope.cancel()


async def test_two_clients_with_one_seed_have_a_session_each(place: Place) -> None:  # R7
    async with place.served() as owner, place.client(seed=7) as one:
        txn = await one.begin()
        async with place.client(seed=7) as two:
            await two.run(put, "a", 1)
            assert place.server is not None
            assert len(place.server.sessions) == 2
            assert txn.start_ts in inside(owner).oracle.holds.open
            assert remote_owner(one).link.connections == remote_owner(two).link.connections == 1
            assert inside(one).engine.lease_token != inside(two).engine.lease_token


async def test_more_snapshots_than_fit_in_a_greeting(place: Place) -> None:  # R1 R5
    place.prefetch = perco.options.PrefetchOptions(cache=False, predict=False)  # every read is to ask
    async with place.served() as owner, place.client() as db:
        await db.run(put, "a", 1)
        snaps = [await db.snapshot_at() for _ in range(2000)]
        await place.break_connections()
        assert await snaps[0].get(n, "a") == 1
        inside(db).oracle.holds.open.update(range(1 << 40, (1 << 40) + 10_000))  # ever so many more
        await place.break_connections()
        assert await db.run(read, "a") == 1
        with pytest.raises(perco.errors.SessionEnded):
            await snaps[0].get(n, "a")
        await inside(db).oracle.newest()
        assert not inside(owner).oracle.holds.open


async def test_more_holds_than_fit_in_a_message() -> None:  # R1 R5
    place = Place(SCHEMA, wire=quick(WIRE, message_bytes_max=20_000, frame_bytes=1000))
    place.prefetch = perco.options.PrefetchOptions(cache=False, predict=False)  # every read is to ask
    async with place.served() as owner, place.client() as db:
        await db.run(put, "a", 1)
        snap = await db.snapshot_at()
        inside(db).oracle.holds.numbers.update(range(1 << 40, (1 << 40) + 5000))  # type: ignore[attr-defined]
        await place.break_connections()
        assert await db.run(read, "a") == 1
        with pytest.raises(perco.errors.SessionEnded):
            await snap.get(n, "a")
        await inside(db).oracle.newest()
        assert not inside(owner).oracle.holds.open


async def test_a_commit_that_is_too_large_while_the_server_is_away_is_refused_alone() -> None:  # R1 R4
    place = Place(SCHEMA, wire=quick(WIRE, message_bytes_max=20_000, frame_bytes=1000))
    async with place.served(), place.client() as db:
        await db.run(put, "a", 1)

        async def commits() -> None:
            txn = await db.begin()
            for i in range(1000):
                txn.set(n, f"a{i}", i)
            async with away(place):
                nursery.start_soon(fails, txn)
                await trio.testing.wait_all_tasks_blocked()

        async def fails(txn: perco.Transaction) -> None:
            with pytest.raises(perco.errors.TooLarge):
                await txn.commit()

        async with trio.open_nursery() as nursery:
            await commits()
        for value in range(2, 5):
            await place.break_connections()
            await db.run(put, "a", value)
            assert await db.run(read, "a") == value


# ------------------------------------------------------------------ more than a server takes in one call


async def test_more_tasks_may_begin_at_once_than_one_call_draws_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:  # O2 R1
    for module in ("remote", "draws"):
        monkeypatch.setattr(f"perco.serve.{module}.DRAWS_MAX", 100)
    count = 250
    drawn: list[int] = []

    async def draw(db: Database) -> None:
        drawn.append(await inside(db).oracle.draw())

    async with place.served() as owner, place.client() as db:
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(draw, db)
        assert len(set(drawn)) == count
        assert remote_owner(db).link.connections == 1
        assert inside(owner).oracle.holds.open == set(drawn)


async def test_those_who_wait_for_timestamps_are_served_as_they_came(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:  # O2
    monkeypatch.setattr("perco.serve.remote.DRAWS_MAX", 3)
    drawn: dict[int, int] = {}
    asked: list[Any] = []
    all_wait = trio.Event()

    async with place.served(), place.client() as db:
        call = remote_owner(db).link.call

        async def noted(method: int, arguments: Any, **more: bool) -> Any:
            if method == Method.DRAW:
                asked.append(arguments)
                await all_wait.wait()
            return await call(method, arguments, **more)

        async def draw(number: int, *, starts: bool) -> None:
            drawn[number] = await (inside(db).oracle.draw() if starts else inside(db).oracle.draw_commit())

        monkeypatch.setattr(remote_owner(db).link, "call", noted)
        async with trio.open_nursery() as nursery:
            for number, starts in enumerate([False, False, True, False, True, True, False]):
                nursery.start_soon(partial(draw, number, starts=starts))
                await trio.testing.wait_all_tasks_blocked()
            all_wait.set()
    assert asked == [(0, 1), (1, 2), (2, 1)]
    assert sorted(drawn, key=drawn.__getitem__) == [0, 2, 1, 3, 4, 5, 6]  # in each call those who begin come first


@asynccontextmanager
async def elsewhere_of(db: Database) -> AsyncIterator[Elsewhere]:
    async with db.worker():
        assert inside(db).workers.worker is not None
        assert isinstance(inside(db).workers.worker.elsewhere, Elsewhere)
        yield inside(db).workers.worker.elsewhere


def dirty(count: int) -> list[Dirty]:
    return [Dirty(b"%06d" % i, [], 1, 1) for i in range(count)]


async def test_a_worker_may_want_more_rows_than_one_call_claims(place: Place) -> None:  # N8 R1
    rows = dirty(CLAIMS_MAX + 100)
    async with place.served(), place.client() as db, elsewhere_of(db) as elsewhere:
        states = await elsewhere.take("docs", rows, len(rows) - 10, halts=True)
        assert states == bytes([CLAIMED]) * (len(rows) - 10) + bytes([FREE]) * 10
        assert len(session_of(place).claims) == len(elsewhere.claims) == len(rows) - 10
        await place.break_connections()
        await back(db)
        assert len(session_of(place).claims) == len(rows) - 10
        for row in rows:
            elsewhere.release(("docs", row.row))
        await inside(db).oracle.newest()
        assert not session_of(place).claims
        assert remote_owner(db).link.connections == 2


@pytest.mark.parametrize("at", [2, CLAIMS_MAX + 2])
async def test_who_meets_another_in_any_call_claims_no_more(place: Place, at: int) -> None:  # N8
    rows = dirty(CLAIMS_MAX + 10)
    async with (
        place.served(),
        place.client() as db,
        place.client() as other,
        elsewhere_of(db) as elsewhere,
        elsewhere_of(other) as others,
    ):
        assert await others.take("docs", [rows[at]], 1, halts=True) == bytes([CLAIMED])
        states = await elsewhere.take("docs", rows, len(rows), halts=True)
        assert states == bytes([CLAIMED]) * at + bytes([HELD]) + bytes([FREE]) * (len(rows) - at - 1)
        assert len(elsewhere.claims) == at


async def test_claims_in_several_calls_that_are_given_up_are_free(place: Place) -> None:  # R7 N8
    rows = dirty(CLAIMS_MAX + 10)
    async with place.served(), place.client() as db, elsewhere_of(db) as elsewhere:
        claim = elsewhere._claim
        with trio.CancelScope() as scope:

            async def claims(table: str, wanted: Sequence[Dirty], most: int, *, halts: bool) -> Any:
                if len(wanted) < CLAIMS_MAX:
                    cancel_once_sent(db, scope)
                return await claim(table, wanted, most, halts=halts)

            elsewhere._claim = claims  # type: ignore[method-assign]
            await elsewhere.take("docs", rows, len(rows), halts=True)
            raise AssertionError
        await inside(db).oracle.newest()
        assert not elsewhere.claims
        assert not session_of(place).claims


async def read(txn: perco.Transaction, key: str) -> int | None:
    return await txn.get(n, key)


async def test_a_snapshot_that_is_dropped_in_another_thread_is_let_go_of(place: Place) -> None:  # G1
    async with place.served() as owner, place.client() as db:
        snaps = [await db.snapshot_at()]
        assert inside(owner).oracle.holds.open
        await trio.to_thread.run_sync(snaps.clear)
        await trio.testing.wait_all_tasks_blocked()
        await inside(db).oracle.newest()
        assert not inside(owner).oracle.holds.open


async def test_a_worker_outlives_a_server_that_is_away_for_long(place: Place) -> None:  # R6 N1
    async with place.served(), place.client() as db, place.client() as loader:
        async with db.worker():
            await loader.run(put, "a", 1)
            await loader.wait_idle(timeout=5)
            async with away(place):
                await trio.sleep(3 * WIRE.patience_s + 3)
            inside(db).background.check()
            await remote_owner(loader).link.connected.wait()
            await loader.run(put, "b", 2)
            await loader.wait_idle(timeout=60)
        async with loader.snapshot() as snap:
            assert await snap.get(twice, "b") == 4


async def test_who_waits_is_not_told_that_nobody_works_before_the_workers_can_be_back(
    place: Place, monkeypatch: Any
) -> None:  # R6 N7
    async with place.served(), place.client() as db, place.client() as loader:
        async with db.worker():
            await loader.wait_idle(timeout=5)
            async with away(place):
                await trio.sleep(WIRE.lease_s + WIRE.silence_s)  # the server does not know the worker any more
                connect, remote_owner(db).link._connect = remote_owner(db).link._connect, _nobody
                monkeypatch.setattr(remote_owner(db).link._rng, "uniform", lambda least, most: least)
            await remote_owner(loader).link.connected.wait()
            await loader.run(put, "a", 1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(loader.wait_idle, timeout=60))
                await trio.sleep(1.2)  # it has looked once
                remote_owner(db).link._connect = connect
        async with loader.snapshot() as snap:
            assert await snap.get(twice, "a") == 2


async def _nobody() -> trio.abc.Stream:
    await trio.lowlevel.checkpoint()
    raise ConnectionRefusedError("nobody serves")


@asynccontextmanager
async def stuck_commit(place: Place, db: Database) -> AsyncIterator[trio.CancelScope]:
    """A transaction has left a lock, and waits for the answer to its COMMIT until it is cancelled."""
    txn = await db.begin()
    txn.set(n, "a", 2)
    txn.set(n, "z", 2)  # in another tablet: it is prewritten first (C7)
    call = remote_owner(db).link.call

    async def stuck(method: int, *args: Any, **more: bool) -> Any:
        if method == Method.COMMIT:
            await trio.sleep_forever()
        return await call(method, *args, **more)

    remote_owner(db).link.call = stuck  # type: ignore[method-assign, assignment]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(txn.commit)
        await trio.testing.wait_all_tasks_blocked()
        assert place.machine.locks() == 1
        yield nursery.cancel_scope
    remote_owner(db).link.call = call  # type: ignore[method-assign]


async def test_locks_that_could_not_be_let_go_of_are_swept(place: Place) -> None:  # T5 N7 R6
    async with place.served() as owner, place.client() as db:
        async with stuck_commit(place, db) as scope, away(place):
            scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.sleep(3 * WIRE.patience_s)
            inside(db).background.check()
        await trio.sleep(5)
        assert place.machine.locks() == 0
        assert not inside(owner).oracle.holds.open
        await db.run(put, "z", 3)


async def test_a_worker_that_cannot_begin_can_begin_later(place: Place) -> None:  # R6
    async with place.served(), place.client() as db:
        async with away(place):
            with pytest.raises(perco.Unavailable):
                await db.worker().__aenter__()
        await remote_owner(db).link.connected.wait()
        async with db.worker():
            await db.run(put, "a", 1)
            await db.wait_idle(timeout=30)


async def test_changes_of_while_it_was_away_are_observed(place: Place) -> None:  # N8 R7
    async with place.served() as owner, place.client() as db, db.worker():
        await db.wait_idle(timeout=5)
        await trio.testing.wait_all_tasks_blocked()
        async with away(place):
            await owner.run(put, "a", 3)
        await remote_owner(db).link.connected.wait()
        await trio.sleep(1)
        assert await owner.pending() == 0


@asynccontextmanager
async def slow_disk(owner: Database, monkeypatch: Any) -> AsyncIterator[trio.Event]:
    """The owner makes no client's writes before the event is set."""
    written = trio.Event()
    store = local_of(owner).store
    submit = store.submit

    def later(mutations: Sequence[Mutation], call: Call) -> None:
        async def make() -> None:
            await written.wait()
            submit(mutations, call)
            call.goes_on()

        if call.task is None and not written.is_set():
            inside(owner).background.spawn(make)
        else:
            submit(mutations, call)

    monkeypatch.setattr(store, "submit", later)
    try:
        yield written
        assert written.is_set()
    finally:
        written.set()  # a test that fails is not to keep the owner waiting


async def test_a_commit_whose_reply_is_lost_while_it_is_being_written(place: Place, monkeypatch: Any) -> None:  # C6 T4
    async with place.served() as owner, place.client() as db:
        began = trio.current_time()
        async with trio.open_nursery() as nursery, slow_disk(owner, monkeypatch) as written:
            nursery.start_soon(db.run, put, "a", 1)
            await trio.testing.wait_all_tasks_blocked()
            assert inside(owner).driver.entered.cells
            await place.break_connections()
            await trio.sleep(1)  # it is back, and asks
            assert remote_owner(db).link.connections == 2
            written.set()
        assert trio.current_time() < began + 5
        assert not inside(owner).driver.entered.cells
        async with owner.snapshot() as snap:
            assert await snap.get(n, "a") == 1


async def test_a_commit_whose_server_has_gone_does_not_say_that_nothing_was_written(
    place: Place, monkeypatch: Any
) -> None:  # T4
    async with place.served() as owner, place.client() as db:
        txn = await db.begin()
        txn.set(n, "a", 1)
        told: list[str] = []

        async def commits() -> None:
            with pytest.raises(perco.CommitUnknown) as caught:
                await txn.commit()
            told.append(str(caught.value))

        async with trio.open_nursery() as nursery, slow_disk(owner, monkeypatch) as written:
            nursery.start_soon(commits)
            await trio.testing.wait_all_tasks_blocked()
            assert inside(owner).driver.entered.cells
            async with away(place):
                written.set()
                await trio.sleep(2 * WIRE.patience_s)
                [said] = told
        assert "may or may not have committed (the server at the place was not reached for 20 s" in said
        assert "othing was written" not in said
        assert "ry again" not in said
        await back(db)
        assert await db.run(read, "a") == 1


@pytest.mark.parametrize("what", ["wait_for", "wait_idle", "pause"])
async def test_a_deadline_holds_while_the_server_is_away(place: Place, what: str) -> None:  # R6
    async with place.served(), place.client() as db, place.client() as other:
        await db.run(put, "a", 1)
        newest = await inside(other).oracle.draw()
        assert newest > inside(db).oracle.last
        async with away(place):
            began = trio.current_time()
            if what == "pause":
                with trio.move_on_after(0.3) as scope:
                    await db.pause("double")
                assert scope.cancelled_caught
            else:
                with pytest.raises(perco.NotIdle, match="the server does not answer"):
                    await (db.wait_for(newest, timeout=0.3) if what == "wait_for" else db.wait_idle(timeout=0.3))
            assert trio.current_time() - began <= 0.3 + inside(db).waiting.tells_s
        await back(db)
        assert await db.paused() == set()


@pytest.mark.parametrize("refused", [False, True])
async def test_who_has_committed_and_falls_silent_holds_nobody_up(
    place: Place, monkeypatch: Any, refused: bool
) -> None:  # C3 C4
    async with place.served() as owner, place.client() as db, place.client() as other:
        txn = await db.begin()
        if refused:
            await other.run(put, "a", 7)
        txn.set(n, "a", 1)
        read: list[int | None] = []
        done = trio.Event()

        async def commits() -> None:
            with pytest.raises(perco.CommitUnknown):
                await txn.commit()

        async def reads(reader: Database) -> None:
            async with reader.snapshot() as snap:
                read.append(await snap.get(n, "a"))
                read.extend([row[n] async for row in snap.scan(docs)])
            if len(read) == 4:
                done.set()

        async with trio.open_nursery() as nursery, slow_disk(owner, monkeypatch) as written:
            nursery.start_soon(commits)
            await trio.testing.wait_all_tasks_blocked()
            assert inside(owner).driver.entered.cells
            nursery.start_soon(reads, other)
            nursery.start_soon(reads, owner)
            nursery.start_soon(other.run, put, "a", 9)
            await trio.testing.wait_all_tasks_blocked()
            assert not read
            await vanish(db)
            written.set()
            with trio.move_on_after(1):  # less than it takes to be taken for gone
                await done.wait()
            assert read == [7 if refused else 1] * 4
            nursery.cancel_scope.cancel()


async def test_a_commit_that_waited_past_its_sessions_end_is_not_made(place: Place, monkeypatch: Any) -> None:  # R7
    async with place.served() as owner, place.client() as db:
        async with place.client() as other, trio.open_nursery() as nursery, slow_disk(owner, monkeypatch) as written:
            assert place.server is not None
            sessions = list(place.server.sessions.all.values())
            nursery.start_soon(db.run, put, "a", 1)
            await trio.testing.wait_all_tasks_blocked()
            [entry] = inside(owner).driver.entered.cells.values()
            txn = await other.begin()
            assert txn.start_ts > entry.commit_ts
            txn.set(n, "a", 2)

            async def commits() -> None:
                with pytest.raises(perco.errors.SessionEnded):
                    await txn.commit()

            nursery.start_soon(commits)
            await trio.testing.wait_all_tasks_blocked()
            place.server.sessions.end(sessions[1])
            written.set()
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") == 1
        assert not inside(owner).driver.entered.cells


async def test_a_commit_of_a_cell_twice_is_not_taken(place: Place) -> None:  # R1 C3
    async with place.served() as owner, place.client() as db, place.client() as other:
        txn = await db.begin()
        intent = "docs", b"a", 1 << 16, 0, b"x", ()
        header = txn.start_ts, intent[:3], 0, 0, "t", b""
        with pytest.raises(LostError):
            await remote_owner(db).link.call(Method.COMMIT, (header, (intent, intent), 99), again=False)
        assert not inside(owner).driver.entered.cells
        assert not inside(owner).driver.writing
        await other.run(put, "a", 1)
        txn.discard()


# ------------------------------------------------------------------ what one client can do to the owner


@asynccontextmanager
async def raw(place: Place, greeting: Message) -> AsyncIterator[Channel]:
    """A connection that says what it likes."""
    stream = await place._connect(0, 0)
    channel = Channel(stream, WIRE)
    await channel.greet(greeting)
    await channel.greeting(alone=False)
    async with stream, trio.open_nursery() as nursery:
        nursery.start_soon(channel.run, lambda messages: None, lambda: None)
        yield channel
        nursery.cancel_scope.cancel()


async def test_a_session_may_have_another_connection_before_its_old_one_has_ended(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:  # R4
    async with place.served() as owner:
        async with raw(place, hello(b"", "abc", ())) as old, raw(place, hello(b"", "abc", ())) as new:
            await old.closed.wait()
            assert not new.closed.is_set()
        await trio.testing.wait_all_tasks_blocked()
        inside(owner).background.check()
        assert not place.server._serving  # type: ignore[union-attr]
    assert "a bug in perco" not in caplog.text


async def test_a_greeting_that_arrives_after_a_later_one_changes_nothing(place: Place) -> None:  # R7
    """The client has given its connection up, and may have ended transactions, and begun others, since."""
    async with place.served() as owner, place.client() as db, db.snapshot() as snap:
        client = remote_owner(db)
        late = Channel(await place._connect(0, 0), WIRE)
        await late.greet(hello(b"", client._session, (snap.start_ts, snap.start_ts + 1), number=client._greetings - 1))
        with pytest.raises(trio.BrokenResourceError):
            await late.greeting(alone=False)
        assert snap.start_ts in inside(owner).oracle.holds.open, "G1"
        assert client.link.connected.is_set()
        await db.run(put, "a", 1)
        assert client.link.connections == 1


async def test_a_greeting_that_is_answered_after_a_later_one_does_not_begin(place: Place) -> None:  # R7
    async with place.served():
        server = place.server
        assert server is not None
        let_in = server._let_in("abc", (), 1)
        assert let_in is not None
        session, _ = let_in
        assert server._let_in("abc", (), 2) is not None
        peer: Any = object()
        assert not server._begun(peer, session, 1)
        assert session.peer is None
        assert server._begun(peer, session, 2)
        assert session.peer is peer
        session.peer = None


@pytest.mark.parametrize("held", [None, {"a": 1}, "xy", (None,)])
async def test_a_greeting_that_does_not_read_ends_its_connection_alone(
    place: Place, held: Any, caplog: pytest.LogCaptureFixture
) -> None:  # R1
    async with place.served() as owner, place.client() as db:
        channel = Channel(await place._connect(0, 0), WIRE)
        await channel.greet(("perco", WIRE_VERSION, b"", "abc", held))
        with pytest.raises(trio.BrokenResourceError):
            await channel.greeting(alone=False)
        await trio.testing.wait_all_tasks_blocked()
        inside(owner).background.check()
        await db.run(put, "a", 1)
    assert "a bug in perco" not in caplog.text


async def test_a_mistake_in_the_server_ends_one_connection(place: Place, monkeypatch: Any) -> None:  # R3
    async with place.served() as owner, place.client() as db:
        with monkeypatch.context() as patched:
            patched.setattr(place.server, "_info", lambda: 1 / 0)
            channel = Channel(await place._connect(0, 0), WIRE)
            await channel.greet(hello(b"", "abc", ()))
            with pytest.raises(trio.BrokenResourceError):
                await channel.greeting(alone=False)
        await trio.testing.wait_all_tasks_blocked()
        inside(owner).background.check()
        await db.run(put, "a", 1)


SILENT = [Method.DONE, Method.RELEASE, Method.UNCLAIM, Method.HOLDING, Method.ORPHANED, Method.TASKS_ARE]
TOLD = [(), 7, ("docs", b"a"), ((), ()), None, (0, None)]


@pytest.mark.parametrize(("method", "told"), list(zip(SILENT, TOLD, strict=True)))
async def test_who_asks_for_an_answer_where_there_is_none_holds_nobody_up(
    place: Place, method: Method, told: Any
) -> None:  # R3
    async with place.served(), place.client() as db:
        with trio.fail_after(5):
            await remote_owner(db).link.call(method, told, again=True)
        [peer] = place.server._serving  # type: ignore[union-attr]
        assert not peer.calls


async def test_an_answer_that_cannot_be_sent_is_told_and_counted_once(place: Place, monkeypatch: Any) -> None:  # R3
    async with place.served(), place.client() as db:
        handlers = place.server._handlers  # type: ignore[union-attr]
        monkeypatch.setitem(handlers, int(Method.LAST), lambda session, peer, id, _: peer.reply(id, object()))
        with trio.fail_after(5), pytest.raises(perco.errors.BackgroundFailure, match="a bug in perco: TypeError"):
            await remote_owner(db).link.call(Method.LAST, None, again=True)
        [peer] = place.server._serving  # type: ignore[union-attr]
        assert not peer.calls
