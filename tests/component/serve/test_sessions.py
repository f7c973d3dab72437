"""What a client holds on a served store, until it has ended or is taken for gone; time is virtual."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

import perco
from perco.clock.durations import Timings
from perco.clock.loopwatch import Held
from perco.database.inside import inside
from perco.errors import SessionEnded
from perco.notify.rowlocks import CLAIMED, FREE, HELD
from perco.notify.working import Claims
from perco.protocol.records import ack_of
from perco.serve.client import remote_owner
from perco.serve.messages import RELEASED, Method
from perco.storage import Failed, Mutation
from perco.txn.background import Background
from perco.txn.beginning import begin
from tests.component.serve.kit import WIRE, Place, vanish
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


async def read_twice(txn: perco.Transaction, key: str) -> int | None:
    return await txn.get(twice, key)


async def add(txn: perco.Transaction, key: str) -> int:
    value = (await txn.get(n, key) or 0) + 1
    txn.set(n, key, value)
    return value


async def test_two_clients_and_the_owner_count_together(place: Place) -> None:  # T1 T7 C4
    async with place.served() as owner, place.clients(2) as (one, two):
        async with trio.open_nursery() as nursery:

            async def count(db: perco.Database) -> None:
                for _ in range(20):
                    await db.run(add, "a")

            for db in (one, two, owner, one, two):
                nursery.start_soon(count, db)
        for db in (owner, one, two):
            async with db.snapshot() as snap:
                assert await snap.get(n, "a") == 100


async def test_what_a_client_reads_at_is_held_by_the_server(place: Place) -> None:  # G1 R7
    async with place.served() as owner, place.client() as db:
        await db.run(put, "a", 1)
        snap = await db.snapshot_at()
        assert snap.start_ts in inside(owner).oracle.holds.open
        await db.run(put, "a", 2)
        assert (await owner.vacuum()).watermark <= snap.start_ts
        assert await snap.get(n, "a") == 1
        snap.end()
        await inside(db).oracle.newest()  # the server has heard all earlier messages
        assert not inside(owner).oracle.holds.open
        assert inside(owner).fates.live() == 0


async def test_to_a_client_an_owner_that_closes_its_store_ends_the_session(place: Place) -> None:  # R5
    async with place.served() as owner, place.client() as db:
        await db.run(put, "a", 1)
        snap = await db.snapshot_at()
        await local_of(owner).aclose()  # its server is about to end, and still answers
        with pytest.raises(perco.errors.SessionEnded, match="has closed it"):
            await snap.get(n, "b")
        with pytest.raises(perco.errors.SessionEnded, match="has closed it"):
            await db.options(attempts=2).run(put, "a", 2)
        snap.end()


async def test_a_client_that_is_cancelled_while_it_draws_holds_nothing(place: Place) -> None:  # G1
    async with place.served() as owner, place.client() as db:
        for _ in range(20):
            with trio.CancelScope() as scope:
                scope.cancel()
                await db.begin()
            with trio.move_on_after(0):
                await db.begin()
        await trio.sleep(0.1)
        await inside(db).oracle.newest()
        assert not inside(owner).oracle.holds.open


async def test_a_broken_connection_ends_nothing(place: Place) -> None:  # R4 R7
    place.prefetch = perco.options.PrefetchOptions(cache=False, predict=False)  # every read is to ask
    async with place.served() as owner, place.client() as db:
        await db.run(put, "a", 1)
        txn = await db.begin()
        assert await txn.get(n, "a") == 1
        for _ in range(3):
            await place.break_connections()
            assert await txn.get(n, "a") == 1
        assert txn.start_ts in inside(owner).oracle.holds.open
        txn.set(n, "a", 2)
        await txn.commit()
        assert remote_owner(db).link.connections == 4
        assert len(place.server.sessions) == 1  # type: ignore[union-attr, arg-type]


async def test_who_is_not_heard_of_loses_what_it_held(place: Place) -> None:  # R7 L1
    async with place.served() as owner, place.client() as db:
        await db.run(put, "a", 1)
        txn = await db.begin()
        txn.set(n, "a", 2)
        txn.set(n, "z", 2)
        held = txn.start_ts
        await vanish(db)
        assert held in inside(owner).oracle.holds.open
        await trio.sleep(WIRE.lease_s / 2)
        assert held in inside(owner).oracle.holds.open
        await trio.sleep(WIRE.silence_s + 2 * WIRE.lease_s)
        assert held not in inside(owner).oracle.holds.open
        assert not inside(owner).fates.alive(held)
        assert len(place.server.sessions) == 0  # type: ignore[union-attr, arg-type]


async def test_locks_of_a_client_that_died_are_settled_by_the_server(place: Place) -> None:  # R7 T5
    async with place.served() as owner, place.client(seed=1) as db:
        await db.run(put, "a", 1)
        txn = await db.begin()
        txn.set(n, "a", 2)
        txn.set(n, "z", 2)  # in another tablet: it is prewritten first (C7)
        answered = remote_owner(db).link.call

        async def dies(method: int, *args: object, **more: bool) -> object:
            if method == Method.COMMIT:
                await vanish(db)
                await trio.sleep_forever()
            return await answered(method, *args, **more)  # type: ignore[arg-type]

        remote_owner(db).link.call = dies  # type: ignore[method-assign, assignment]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(txn.commit)
            await trio.testing.wait_all_tasks_blocked()
            assert place.machine.locks() == 1
            nursery.cancel_scope.cancel()
        async with owner.snapshot() as snap:
            assert await snap.get(n, "z") is None  # it waits for the session's end
        await trio.sleep(1)
        assert place.machine.locks() == 0


async def test_what_a_session_that_has_ended_asks_for_is_not_done(place: Place) -> None:  # R7
    async with place.served() as owner, place.client() as db:
        await db.run(put, "a", 1)
        server = place.server
        assert server is not None
        [session] = server.sessions.all.values()
        txn = await db.begin()
        server.sessions.end(session)
        mutation = Mutation("docs", ((b"a", (), ((("data"), 1 << 16, 5, b"x"),)),))
        [verdict] = await inside(db).driver.store.apply([mutation])
        assert isinstance(verdict, Failed)
        assert isinstance(verdict.error, perco.errors.SessionEnded)
        with pytest.raises(perco.errors.SessionEnded):
            await txn.get(n, "a")
        assert local_of(owner).store.tablets()[1].entries("data") == 0


@pytest.mark.parametrize("held_s", [0.0, 1.0, 25.0])
async def test_a_client_says_that_its_session_has_ended_and_what_held_its_loop(
    place: Place, held_s: float, caplog: pytest.LogCaptureFixture
) -> None:  # R7
    async with place.served(), place.client() as db:
        caplog.set_level("INFO", "perco")
        caplog.clear()
        server = place.server
        assert server is not None
        if held_s:
            remote_owner(db).heartbeat._longer(Held(held_s, "app.py:7 count"))
        [session] = server.sessions.all.values()
        server.sessions.end(session)
        await place.break_connections()
        await db.run(put, "a", 1)
    [told] = [said for said in caplog.records if "session" in said.getMessage()]
    assert told.levelname == ("WARNING" if held_s > WIRE.silence_s else "INFO")
    assert ("The event loop was blocked for 25.0 s (app.py:7 count)" in told.getMessage()) == (held_s > WIRE.silence_s)


async def test_after_its_session_has_ended_a_client_goes_on_in_another(place: Place) -> None:  # R5
    place.prefetch = perco.options.PrefetchOptions(cache=False, predict=False)  # every read is to ask
    async with place.served() as owner, place.client() as db:
        await db.run(put, "a", 1)
        old = await db.begin()
        server = place.server
        assert server is not None

        async def let_go() -> None:
            """The versions that the client held have been collected before it comes back."""
            [session] = server.sessions.all.values()
            server.sessions.end(session)
            inside(owner).oracle.holds.watermark = inside(owner).oracle.last + 1
            await place.break_connections()

        await let_go()
        assert await db.run(add, "a") == 2
        with pytest.raises(perco.errors.SessionEnded):
            await old.get(n, "a")
        old.discard()
        tries = 0

        async def loses_it(txn: perco.Transaction) -> int:
            nonlocal tries
            tries += 1
            await txn.get(n, "a")
            if tries == 1:
                await let_go()
            return await add(txn, "a")

        assert await db.run(loses_it) == 3  # run again by itself (T11)
        assert tries == 2


async def test_another_owner_takes_over_and_nobody_notices(place: Place) -> None:  # R8 O1
    place.prefetch = perco.options.PrefetchOptions(cache=False, predict=False)  # every read is to ask
    async with trio.open_nursery() as nursery:
        async with place.served():
            db = await nursery.start(_opened, place)
            await db.run(put, "a", 1)
            old = await db.begin()
            assert await old.get(n, "a") == 1
        got: list[int] = []
        answered = trio.Event()

        async def ask() -> None:
            got.append(await db.run(add, "a"))
            answered.set()

        nursery.start_soon(ask)
        await trio.sleep(1)
        assert not got
        async with place.served() as owner:
            assert await old.get(n, "a") == 1
            assert old.start_ts in inside(owner).oracle.holds.open
            old.discard()
            await answered.wait()
            assert got == [2]
            assert await db.run(add, "a") == 3
            nursery.cancel_scope.cancel()


async def test_a_new_session_goes_on_to_measure(place: Place) -> None:
    async with trio.open_nursery() as nursery:
        async with place.served():
            db = await nursery.start(_opened, place)
            inside(db).driver.measure(timings := Timings())
            await db.run(put, "a", 1)
            old = await db.begin()
        async with place.served() as owner:
            inside(owner).oracle.holds.watermark = old.start_ts + 1
            with pytest.raises(perco.errors.SessionEnded):
                await old.get(n, "a")
            old.discard()
            counted = sum(timings.commits.counts), sum(timings.reads.counts)
            assert await db.run(add, "a") == 2
            assert (sum(timings.commits.counts), sum(timings.reads.counts)) == (counted[0] + 1, counted[1] + 1)
            nursery.cancel_scope.cancel()


async def test_what_the_next_owner_has_collected_is_not_read(place: Place) -> None:  # R5 R8 G5
    async with trio.open_nursery() as nursery:
        async with place.served():
            db = await nursery.start(_opened, place)
            await db.run(put, "a", 1)
            old = await db.begin()
            await db.run(put, "a", 2)
        async with place.machine.opened() as between:  # who knows nothing of it
            await between.run(put, "a", 3)
        async with place.served() as owner:
            inside(owner).oracle.holds.watermark = old.start_ts + 1
            with pytest.raises(perco.errors.SessionEnded):
                await old.get(n, "a")
            old.discard()
            assert await db.run(add, "a") == 4
            nursery.cancel_scope.cancel()


async def _opened(place: Place, task_status: trio.TaskStatus[perco.Database]) -> None:
    async with place.client(seed=3) as db:
        task_status.started(db)
        await trio.sleep_forever()


async def test_observers_of_two_processes_share_the_work(place: Place) -> None:  # N3 N8 N7
    async with place.served() as owner, place.clients(3) as (one, two, loader):
        async with one.worker(concurrency=4) as first, two.worker(concurrency=4) as second:
            async with trio.open_nursery() as nursery:
                for i in range(60):
                    nursery.start_soon(loader.run, put, f"k{i}", i)
            await loader.wait_idle(timeout=60)
            async with loader.snapshot() as snap:
                assert [row[twice] async for row in snap.scan(docs)] == [
                    2 * int(row.key[1:]) async for row in snap.scan(docs)
                ]
            commits = [handle.statistics()["double"].commits for handle in (first, second)]
            assert sum(commits) == 60
            assert min(commits) > 0
        assert await owner.pending() == 0
        assert not place.server.sessions.claims  # type: ignore[union-attr]


async def test_waiting_for_one_commit_is_over_before_all_is_idle(place: Place) -> None:  # N7 N9
    async with place.served(), place.clients(2) as (one, loader):
        held = trio.Event()

        async def slow(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
            if change.key == "slow":
                await held.wait()
            txn.set(twice, change.key, 0)

        async with one.worker(concurrency=4):
            ts = await loader.run(_committed, "quick")
            await loader.wait_for(ts, timeout=60)
            async with loader.snapshot() as snap:
                assert await snap.get(twice, "quick") == 14
            with pytest.raises(perco.UsageError, match="nothing has been committed"):
                await loader.wait_for(ts + 1000)


async def _committed(txn: perco.Transaction, key: str) -> int:
    txn.set(n, key, 7)
    return await txn.commit()


async def test_who_waits_where_nobody_works_is_told(place: Place) -> None:
    async with place.served(), place.client() as db:
        await db.wait_idle(timeout=5)
        await db.run(put, "a", 1)
        with pytest.raises(perco.UsageError, match="no worker runs them"):
            await db.wait_idle(timeout=5)


async def test_an_owner_waits_for_what_others_work_at(place: Place) -> None:  # N7
    async with place.served() as owner, place.client() as client:
        await owner.run(put, "a", 1)
        async with client.worker():
            await owner.wait_idle(timeout=5)
            await owner.wait_for(await owner.run(_committed, "quick"), timeout=5)
            async with owner.snapshot() as snap:
                assert (await snap.get(twice, "a"), await snap.get(twice, "quick")) == (2, 14)
        await owner.run(put, "a", 2)
        await trio.sleep(5)
        with pytest.raises(perco.UsageError, match="no worker runs them"):
            await owner.wait_idle(timeout=5)


@pytest.mark.parametrize("dies", [False, True], ids=["leaves", "dies"])
async def test_an_owner_is_told_when_the_last_who_worked_is_gone(place: Place, dies: bool) -> None:  # N7 R7
    failing = perco.Schema(docs)

    @failing.observe(n, id="double")
    async def fails(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        raise ValueError

    async with place.served() as owner, place.client(failing) as client:
        await owner.run(put, "a", 1)
        await trio.sleep(5)

        async def works() -> None:
            async with client.worker():
                working.set()
                await trio.sleep(10)
                if dies:
                    await vanish(client)
                    await trio.sleep_forever()

        working = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(works)
            await working.wait()
            with pytest.raises(perco.UsageError, match="no worker runs them"):
                await owner.wait_idle(timeout=600)
            assert trio.current_time() >= 15
            nursery.cancel_scope.cancel()


async def test_an_owner_waits_a_while_for_those_who_worked_for_the_last_one(place: Place) -> None:  # N7
    async with place.served() as owner:
        await owner.run(put, "a", 1)
    async with place.served() as owner:
        came = trio.current_time()

        async def comes() -> None:
            await trio.sleep(1.5)
            async with place.client() as client, client.worker():
                await trio.sleep(5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(comes)
            await owner.wait_idle(timeout=5)
            assert 1.5 <= trio.current_time() - came < 3
        await owner.run(put, "a", 2)
        with pytest.raises(perco.UsageError, match="no worker runs them"):
            await owner.wait_idle(timeout=5)
    async with place.served() as owner:
        began = trio.current_time()
        with pytest.raises(perco.UsageError, match="no worker runs them"):
            await owner.wait_idle(timeout=5)
        assert 2 <= trio.current_time() - began < 3


async def test_an_owner_is_told_of_observers_that_nobody_runs(place: Place) -> None:  # N7
    other = perco.Schema(docs)

    @other.observe(n, id="nobody's")
    async def never(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        raise AssertionError

    async with place.served() as owner:
        async with place.client(other):
            pass
        await owner.run(put, "a", 1)
        async with place.client() as client, client.worker():
            with pytest.raises(perco.UsageError, match="nobody's"):
                await owner.wait_idle(timeout=5)


async def test_a_worker_that_dies_gives_its_rows_to_others(place: Place) -> None:  # R7 N8
    async with place.served(), place.clients(3) as (dies, lives, loader):
        stuck = trio.Event()
        tried: list[str] = []

        schema = perco.Schema(docs)

        @schema.observe(n, id="double")
        async def hangs(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
            tried.append(change.key)
            stuck.set()
            await trio.sleep_forever()

        async with place.client(schema) as hung, trio.open_nursery() as nursery:

            async def works() -> None:
                async with hung.worker(concurrency=2):
                    await trio.sleep_forever()

            nursery.start_soon(works)
            await loader.run(put, "a", 4)
            await stuck.wait()
            async with lives.worker(concurrency=2):
                await trio.sleep(1)
                async with loader.snapshot() as snap:
                    assert await snap.get(twice, "a") is None  # it is another's row
                await vanish(hung)
                await loader.wait_idle(timeout=60)
                async with loader.snapshot() as snap:
                    assert await snap.get(twice, "a") == 8
            nursery.cancel_scope.cancel()
        assert tried == ["a"]
        del dies


async def test_an_observer_that_a_client_declares_is_known_to_all_at_once(place: Place) -> None:  # N10
    async with place.served() as owner, place.clients(2) as (one, two):
        txn = await two.begin()
        txn.set(n, "a", 1)
        schema = perco.Schema(docs)
        seen: list[str] = []

        @schema.observe(n, id="new", backfill=False)
        async def new(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
            seen.append(change.key)

        async with place.client(schema) as third:
            with pytest.raises(perco.errors.CatalogueChanged):
                await txn.commit()
            await two.run(put, "a", 1)
            await inside(owner).keeper.renew()
            assert await owner.pending() == 2
            async with third.worker(), one.worker():
                await two.wait_idle(timeout=60)
        assert seen == ["a"]


async def test_a_worker_may_begin_while_its_session_ends(place: Place) -> None:  # R5
    async with place.served() as owner, place.client() as db:
        server = place.server
        assert server is not None
        for session in list(server.sessions.all.values()):
            server.sessions.end(session)
        async with db.worker():
            await owner.run(put, "a", 1)
            await owner.wait_idle(timeout=60)
            assert await db.run(read_twice, "a") == 2


async def test_what_is_started_while_a_store_closes_does_not_keep_it_open() -> None:
    background = Background()
    started = []

    async def short() -> None:
        await trio.sleep(1)
        background.start(trio.sleep_forever, "long")
        started.append(True)

    background.spawn(short)
    await background.aclose()
    assert started


async def test_an_owner_closes_although_a_woken_process_does_not_answer(place: Place) -> None:  # N8
    async with place.served() as owner, place.client() as db:
        server = place.server
        assert server is not None
        async with db.worker():
            await owner.wait_idle(timeout=60)
            await vanish(db)
            await owner.run(put, "a", 1)
            assert server.sessions.wakes.deadline < math.inf, "it was woken"
            assert inside(owner).background.crowd == 0, "closing would wait for it"
            assert await owner.is_idle() is False


async def test_an_owner_that_ends_keeps_nobody_waiting(place: Place) -> None:
    async with trio.open_nursery() as nursery:
        async with place.served():
            db = await nursery.start(_opened, place)
            await db.run(put, "a", 1)  # which nobody observes
            nursery.start_soon(lambda: remote_owner(db).link.call(Method.IDLE, None, again=True))
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
        assert trio.current_time() == began
        nursery.cancel_scope.cancel()


async def test_a_scanner_is_given_no_more_rows_than_it_has_room_for(place: Place) -> None:  # N8
    """Another one of the same process has one of those that it would take instead."""
    async with place.served(), place.client():
        assert place.server is not None
        [session] = place.server.sessions.all.values()
        claim = place.server.sessions.claim
        assert claim(session, "docs", [(b"b", 1, 1)], 1, halts=True)[0] == bytes([CLAIMED])
        assert claim(session, "docs", [(b"a", 1, 1), (b"b", 1, 1)], 1, halts=True)[0] == bytes([CLAIMED, FREE])
        assert claim(session, "docs", [(b"a", 1, 1), (b"b", 1, 1)], 2, halts=True)[0] == bytes([CLAIMED, CLAIMED])


async def test_whoever_is_refused_a_row_for_other_observers_is_told_of_its_end_however_many_others_have(  # N8
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer tells of a bounded number of rows that others have."""
    rows = [b"%04d" % i for i in range(1000)]
    async with place.served(), place.clients(2) as clients:
        holder, refused = clients
        heard = trio.Event()
        monkeypatch.setattr(
            remote_owner(refused).link, "_pushed", lambda what, value: heard.set() if what == RELEASED else None
        )
        for client, works in ((holder, "measure"), (refused, "double")):
            await remote_owner(client).link.call(Method.WORKS, ((works,), (works,)), again=True)
        wanted = tuple((row, 1, 1) for row in rows)
        await remote_owner(holder).link.call(Method.CLAIM, ("docs", wanted, len(rows), False), again=True)
        asked = ((rows[0], 1, 1), (rows[-1], 1, 1))
        states, told = await remote_owner(refused).link.call(Method.CLAIM, ("docs", asked, 2, False), again=True)
        assert list(states) == [HELD, HELD]
        assert len(told) < len(rows)
        remote_owner(holder).link.tell(Method.UNCLAIM, ("docs", rows[-1]))
        with trio.fail_after(1.0):
            await heard.wait()


@pytest.mark.parametrize("ahead", [True, False])
async def test_a_run_whose_session_has_ended_claims_nothing(place: Place, ahead: bool) -> None:  # R5
    """Nothing holds its timestamp any more, so history that it needs may be gone."""
    place.prefetch = perco.options.PrefetchOptions(cache=ahead, predict=ahead)
    async with place.served() as owner, place.client() as db:
        assert place.server is not None
        await db.run(put, "a", 1)
        engine = inside(db).engine
        txn = await begin(engine, None)
        [session] = place.server.sessions.all.values()
        place.server.sessions.end(session)
        inside(owner).oracle.holds.watermark = inside(owner).oracle.last + 1
        await place.break_connections()
        await db.run(put, "b", 1)  # in the next session
        number = engine.known.catalogue.observers["double"].number
        claims = Claims(engine, {number: (b"", b"")})
        with pytest.raises(SessionEnded):
            await claims.claim(
                txn, SCHEMA.observers["double"], "docs", b"a", ack_of(engine.known.bind(n).column, number)
            )
        txn.discard()


async def test_a_server_that_has_greeted_once_is_not_taken_for_one_with_tls(place: Place) -> None:
    async with place.served(), place.client() as db:
        link = remote_owner(db).link
        link._unmet = "try another address"

        async def ended() -> trio.abc.Stream:
            ours, theirs = trio.testing.memory_stream_pair()
            await theirs.send_eof()
            return ours

        link._connect = ended
        await place.break_connections()
        with pytest.raises(perco.Unavailable, match="ended before a greeting") as caught:
            await db.run(put, "a", 1)
        assert "try another address" not in str(caught.value)
