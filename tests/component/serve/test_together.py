"""The delay window of a client: what waits in it over a served store, and what becomes of it; time is virtual."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import SessionEnded
from perco.notify.rowlocks import CLAIMED, Dirty
from perco.protocol.records import Cellref
from perco.rpc.link import Link, LostError
from perco.serve.client import remote_owner
from perco.serve.messages import Method
from perco.storage import BatchOptions
from perco.txn.entered import Entry
from tests.component.serve.kit import WIRE, Place
from tests.component.serve.spread import spread

FIXED = BatchOptions(window_s=0.2, adaptive=False)
ADAPTIVE = BatchOptions(window_s=0.2)
MANY = 128
_NAMES = {int(method): method.name for method in Method}

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
body = docs.column("body", perco.BYTES)
seen = docs.column("seen", perco.INT64)
SCHEMA = perco.Schema(docs)


@SCHEMA.observe(n, id="see")
async def see(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    txn.set(seen, change.key, change.value or 0)


PLAIN = perco.Schema(docs)


async def add(txn: perco.Transaction, key: str) -> None:
    txn.set(n, key, (await txn.get(n, key) or 0) + 1)


async def add_both(txn: perco.Transaction, a: str, b: str) -> None:
    await add(txn, a)
    await add(txn, b)


@contextmanager
def committing(owner: perco.Database, key: str) -> Iterator[None]:
    """While the block lasts, a commit in one step is under way in a cell of column n."""
    driver = inside(owner).driver
    ts = inside(owner).oracle.draw_nowait()
    where = ("docs", perco.TEXT.encode(key), inside(owner).known.bind(n).column)
    entry = driver.entered.cells[where] = Entry(ts, ts, Cellref(*where))
    driver.writing[ts] = None
    yield
    assert driver.entered.cells == {where: entry}
    del driver.entered.cells[where]
    driver.written(entry.commit_ts)


async def put(txn: perco.Transaction, key: str, value: bytes) -> None:
    txn.set(body, key, value)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls that were made, by method."""
    made: Counter[str] = Counter()
    call = Link.call

    async def counted(self: Link, method: int, arguments: Any, **more: Any) -> Any:
        made[_NAMES.get(method, "an order")] += 1
        return await call(self, method, arguments, **more)

    monkeypatch.setattr(Link, "call", counted)
    return made


@asynccontextmanager
async def client(batch: BatchOptions, schema: perco.Schema = PLAIN) -> AsyncIterator[tuple[Place, Database]]:
    place = Place(schema, batch=batch)
    async with place.served(), place.client() as db:
        yield place, db


async def all_of(*actions: Callable[[], Awaitable[Any]]) -> float:
    """Run them at the same time; how long that takes."""
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for action in actions:
            nursery.start_soon(action)
    return trio.current_time() - began


async def value(db: perco.Database, key: str) -> int | None:
    async with db.snapshot() as snap:
        return await snap.get(n, key)


async def test_every_transaction_passes_two_windows_however_many_are_in_flight(calls: Counter[str]) -> None:  # D1-D3
    """And a timestamp none."""
    async with client(FIXED) as (_, db):
        calls.clear()
        took = await all_of(*(lambda i=i: db.run(add, f"{'az'[i % 2]}{i}") for i in range(MANY)))  # type: ignore[misc]
        assert took == pytest.approx(2 * FIXED.window_s)
        assert {name: calls[name] for name in ("READ", "READS", "COMMIT", "COMMITS")} == {
            "READ": 0,
            "READS": 2,  # one for each tablet
            "COMMIT": 0,
            "COMMITS": 2,
        }
        assert calls["DRAW"] <= 2
        assert [await value(db, f"{'az'[i % 2]}{i}") for i in range(MANY)] == [1] * MANY


async def test_prewrites_and_what_follows_them_wait_too() -> None:  # D1
    async with client(FIXED) as (_, db):
        assert await all_of(lambda: db.run(add_both, "a", "z")) == pytest.approx(4 * FIXED.window_s)
        assert (await value(db, "a"), await value(db, "z")) == (1, 1)


async def test_an_adaptive_window_holds_nobody_who_is_alone(calls: Counter[str]) -> None:  # D2
    async with client(ADAPTIVE) as (_, db):
        calls.clear()
        for _ in range(3):
            assert await all_of(lambda: db.run(add, "a")) == 0
        assert (calls["READ"], calls["COMMIT"], calls["READS"], calls["COMMITS"]) == (3, 3, 0, 0)


async def test_an_adaptive_window_gathers_those_who_are_many(calls: Counter[str]) -> None:  # D1
    async with client(ADAPTIVE) as (_, db):
        calls.clear()
        assert await all_of(*(lambda i=i: db.run(add, f"a{i}") for i in range(MANY))) == 0  # type: ignore[misc]
        assert calls["READ"] + calls["READS"] + calls["COMMIT"] + calls["COMMITS"] <= 6


@pytest.mark.parametrize("batch", [FIXED, ADAPTIVE])
async def test_those_who_change_one_cell_at_a_time_all_succeed(batch: BatchOptions) -> None:  # D8, C2, C4, T7
    async with client(batch) as (_, db):
        await all_of(*(lambda: db.run(add, "a") for _ in range(20)))
        assert await value(db, "a") == 20


async def test_what_a_commit_is_under_way_in_is_read_alone(calls: Counter[str]) -> None:  # D8, C4
    async with client(FIXED) as (place, db):
        await db.run(add, "b")
        assert place.owner is not None
        calls_before = Counter(calls)
        found: dict[str, float] = {}
        began = trio.current_time()

        async def read(key: str) -> None:
            await value(db, key)
            found[key] = round(trio.current_time() - began, 6)

        async with trio.open_nursery() as nursery:
            with committing(place.owner, "a"):
                nursery.start_soon(read, "a")
                nursery.start_soon(read, "b")
                await trio.sleep(5)
                assert found == {"b": FIXED.window_s}
        assert found["a"] == 5
        assert (calls - calls_before)["READ"] == 1


@pytest.mark.parametrize("batch", [BatchOptions(), FIXED])
async def test_scans_wait_for_a_commit_that_is_under_way_in_what_they_cover(batch: BatchOptions) -> None:  # C4
    async with client(batch) as (place, db):
        await db.run(add, "b")
        assert place.owner is not None
        found: dict[str, list[str]] = {}

        async def scan(start: str) -> None:
            async with db.snapshot() as snap:
                found[start] = [row.key async for row in snap.scan(n.table, start=start)]

        async with trio.open_nursery() as nursery:
            with committing(place.owner, "a"):
                nursery.start_soon(scan, "a")
                nursery.start_soon(scan, "b")
                await trio.sleep(5)
                assert found == {"b": ["b"]}
        assert found["a"] == ["b"]


async def test_a_commit_that_another_is_in_the_way_of_waits_and_holds_up_no_other(
    calls: Counter[str],
) -> None:  # D8, C2
    async with client(FIXED) as (place, db):
        assert place.owner is not None
        calls_before = Counter(calls)
        found: dict[str, float] = {}
        began = trio.current_time()

        async def write(key: str) -> None:
            async with db.transaction() as txn:
                txn.set(n, key, 1)
            found[key] = round(trio.current_time() - began, 6)

        async with trio.open_nursery() as nursery:
            with committing(place.owner, "a"):
                nursery.start_soon(write, "a")
                nursery.start_soon(write, "b")
                await trio.sleep(5)
                assert found == {"b": FIXED.window_s}
        assert found["a"] == 5
        assert {name: (calls - calls_before)[name] for name in ("COMMITS", "COMMIT")} == {"COMMITS": 1, "COMMIT": 1}


@pytest.mark.parametrize("batch", [FIXED, ADAPTIVE])
async def test_reads_too_long_for_one_message_are_asked_for_alone(
    batch: BatchOptions, calls: Counter[str]
) -> None:  # D8
    wire = replace(WIRE, message_bytes_max=2 << 20)
    place = Place(PLAIN, wire=wire, batch=batch)
    async with place.served(), place.client() as db:
        for i in range(6):
            await db.run(put, f"a{i}", bytes([i]) * 300_000)
        found: dict[int, bytes | None] = {}

        async def read(i: int) -> None:
            async with db.snapshot() as snap:
                found[i] = await snap.get(body, f"a{i}")

        calls.clear()
        await all_of(*(lambda i=i: read(i) for i in range(6)))  # type: ignore[misc]
        assert found == {i: bytes([i]) * 300_000 for i in range(6)}
        assert calls["READS"] >= 1
        assert calls["READ"] >= 2


async def test_commits_whose_reply_is_lost_are_asked_for_one_by_one(calls: Counter[str]) -> None:  # D6, T4, C6
    async with client(FIXED) as (place, db):
        assert place.server is not None
        for key in "abc":
            await db.run(add, key)
        commits, lost = place.server._handlers[Method.COMMITS], []

        def losing(session: Any, peer: Any, id: int, asked: Any) -> None:
            lost.append(len(asked))
            place.server._handlers[int(Method.COMMITS)] = commits  # type: ignore[union-attr]
            peer.ended = True  # made, and never answered
            commits(session, peer, id, asked)
            peer.channel.close_soon()

        place.server._handlers[int(Method.COMMITS)] = losing
        before = inside(db).driver.counters.commits
        await all_of(*(lambda key=key: db.run(add, key) for key in "abc"))  # type: ignore[misc]
        assert lost == [3]
        assert [await value(db, key) for key in "abc"] == [2, 2, 2]
        assert inside(db).driver.counters.commits - before == 3
        assert inside(db).driver.counters.aborts == 0


def miscounting(place: Place, method: Method, more: int) -> list[int]:
    """From now on the server answers that call with so many answers more than it was asked for, or fewer, once; returns
    how many it was asked for."""
    assert place.server is not None
    handlers, asked_for = place.server._handlers, list[int]()
    right = handlers[int(method)]

    class Miscounting:
        def __init__(self, peer: Any) -> None:
            self._peer = peer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._peer, name)

        def reply(self, id: int, answers: Any) -> None:
            self._peer.reply(id, [*answers, answers[0]] if more > 0 else answers[:-1])

    def wrong(session: Any, peer: Any, id: int, asked: Any) -> None:
        asked_for.append(len(asked))
        handlers[int(method)] = right
        right(session, Miscounting(peer), id, asked)

    handlers[int(method)] = wrong
    return asked_for


@pytest.mark.parametrize("more", [-1, 1])
async def test_commits_of_which_not_each_is_answered_are_asked_for_one_by_one(more: int) -> None:  # R1, T4
    async with client(FIXED) as (place, db):
        for key in "abc":
            await db.run(add, key)
        asked_for, before = miscounting(place, Method.COMMITS, more), inside(db).driver.counters.commits
        await all_of(*(lambda key=key: db.run(add, key) for key in "abc"))  # type: ignore[misc]
        assert asked_for == [3]
        assert [await value(db, key) for key in "abc"] == [2, 2, 2]
        assert (inside(db).driver.counters.commits - before, inside(db).driver.counters.aborts) == (3, 0)


@pytest.mark.parametrize("more", [-1, 1])
async def test_mutations_of_which_not_each_is_answered_are_asked_for(more: int) -> None:  # R1, T4
    async with client(FIXED) as (place, db):
        asked_for = miscounting(place, Method.APPLY, more)
        await all_of(lambda: db.run(add_both, "a", "z"), lambda: db.run(add_both, "b", "y"))
        assert asked_for[0] >= 1
        assert [await value(db, key) for key in "abyz"] == [1] * 4


@pytest.mark.parametrize("more", [-1, 1])
async def test_reads_and_claims_of_which_not_each_is_answered_are_asked_for_alone(
    more: int, calls: Counter[str]
) -> None:  # R1, D8
    async with client(FIXED, SCHEMA) as (place, db):
        for key in "ab":
            await db.run(add, key)
        together = remote_owner(db)._together
        assert together is not None
        found: list[Any] = []

        async def read(key: str) -> None:
            found.append(await value(db, key))

        async def claim(row: bytes) -> None:
            states, _ = await together.claim("docs", [(row, 1, 1)], 1, halts=False)
            found.append(states)

        calls.clear()
        asked_for = miscounting(place, Method.READS, more), miscounting(place, Method.CLAIMS, more)
        await all_of(lambda: read("a"), lambda: read("b"), lambda: claim(b"a"), lambda: claim(b"b"))
        assert asked_for == ([2], [2])
        assert sorted(found, key=str) == [1, 1, bytes([CLAIMED]), bytes([CLAIMED])]
        assert {name: calls[name] for name in ("READS", "READ", "CLAIMS", "CLAIM")} == {
            "READS": 1,
            "READ": 2,
            "CLAIMS": 1,
            "CLAIM": 2,
        }


async def test_a_session_that_ends_takes_reads_that_wait_with_it() -> None:  # D7, R5
    slow = replace(FIXED, window_s=30.0)
    async with client(slow) as (place, db), trio.open_nursery() as nursery:
        errors: list[BaseException] = []

        async def read() -> None:
            try:
                await value(db, "a")
            except SessionEnded as error:
                errors.append(error)

        nursery.start_soon(read)
        await trio.sleep(1)
        assert place.server is not None
        assert place.owner is not None
        for session in list(place.server.sessions.all.values()):
            place.server.sessions.end(session)
        inside(place.owner).oracle.holds.watermark = inside(place.owner).oracle.last + 1  # as if it had been collected
        await place.break_connections()
        await trio.sleep(2)
        assert len(errors) == 1


async def test_a_commit_that_is_cancelled_in_its_window_did_not_happen() -> None:  # D4, T10
    async with client(FIXED) as (_, db):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(db.run, add, "b")
            with trio.move_on_after(0.3):
                await db.run(add, "a")
                raise AssertionError("it was not cancelled")
        assert (await value(db, "a"), await value(db, "b")) == (None, 1)


async def test_claims_of_a_worker_go_together(calls: Counter[str]) -> None:  # D1, N8
    async with client(FIXED, SCHEMA) as (_, db):
        await all_of(*(lambda i=i: db.run(add, f"a{i}") for i in range(40)))  # type: ignore[misc]
        calls.clear()
        async with db.worker():
            await db.wait_idle()
        assert calls["CLAIMS"] >= 1
        assert calls["CLAIM"] + calls["CLAIMS"] < 40
        async with db.snapshot() as snap:
            assert [await snap.get(seen, f"a{i}") for i in range(40)] == [1] * 40


async def test_an_adaptive_window_gathers_claims_behind_the_first(calls: Counter[str]) -> None:  # D1, D2, N8
    async with client(ADAPTIVE, SCHEMA) as (_, db):
        await all_of(*(lambda i=i: db.run(add, f"a{i}") for i in range(40)))  # type: ignore[misc]
        together = remote_owner(db)._together
        assert together is not None
        granted: list[Any] = []

        async def claim(i: int) -> None:
            states, _ = await together.claim("docs", [(f"a{i}".encode(), 1, 1)], 1, halts=False)
            granted.append(states)

        calls.clear()
        await all_of(*(lambda i=i: claim(i) for i in range(40)))  # type: ignore[misc]
        assert granted == [bytes([CLAIMED])] * 40
        assert (calls["CLAIM"], calls["CLAIMS"]) == (1, 1)


async def test_a_claim_granted_to_somebody_who_has_gone_is_let_go_of() -> None:  # N8
    async with client(FIXED, SCHEMA) as (place, db):
        assert place.server is not None
        async with db.worker():
            assert inside(db).workers.worker is not None
            elsewhere: Any = inside(db).workers.worker.elsewhere
            claims, held = place.server._handlers[Method.CLAIMS], trio.Event()
            granted: list[int] = []

            def late(session: Any, peer: Any, id: int, asked: Any) -> None:
                async def run() -> None:
                    await held.wait()
                    claims(session, peer, id, asked)
                    granted.append(len(session.claims))

                assert place.owner is not None
                inside(place.owner).background.spawn(run)

            place.server._handlers[int(Method.CLAIMS)] = late
            with trio.move_on_after(1.0):
                await elsewhere.take("docs", [Dirty(b"a", [1], 1, 1)], 1, halts=False)
            await trio.testing.wait_all_tasks_blocked()  # its giving up has arrived, before the claim is made
            assert not granted
            held.set()
            await trio.testing.wait_all_tasks_blocked()
            assert granted == [1]
            assert not place.server.sessions.claims


@pytest.mark.parametrize("batch", [FIXED, ADAPTIVE])
async def test_prewrites_to_tablet_servers_wait_as_well(batch: BatchOptions, calls: Counter[str]) -> None:  # D1
    async with spread(2) as place, place.client(PLAIN, batch=batch) as db:
        await db.run(add, "a")
        calls.clear()
        took = await all_of(*(lambda i=i: db.run(add, f"a{i}") for i in range(20)))  # type: ignore[misc]
        if not batch.adaptive:
            assert took == pytest.approx(3 * batch.window_s)
            assert calls["READ"] == 1
            assert calls["APPLY"] == 2  # prewrites, then primaries: one of each
        assert [await value(db, f"a{i}") for i in range(20)] == [1] * 20


@pytest.mark.parametrize("asked", [5, [5], [(1, 2)], [[(1,)]], None])
@pytest.mark.parametrize("method", [Method.READS, Method.COMMITS, Method.CLAIMS])
async def test_what_does_not_read_ends_the_connection(method: Method, asked: Any) -> None:  # R1
    async with client(FIXED) as (place, db):
        assert place.server is not None
        connections = remote_owner(db).link.connections
        with pytest.raises(LostError):
            await remote_owner(db).link.call(method, asked, again=False)
        await trio.sleep(1)
        assert remote_owner(db).link.connections == connections + 1
        await db.run(add, "a")
