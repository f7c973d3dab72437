"""Transactions of a client whose first read draws the timestamp (perco/txn/starting.py); time is virtual."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
import trio.testing
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import perco
import perco.otel
from perco.database.inside import inside
from perco.protocol.records import Cellref
from perco.rpc.link import LostError
from perco.serve.client import remote_owner
from perco.serve.messages import Method
from perco.txn.beginning import _HASTY_MAX, BLOCK, is_hasty, starting
from perco.txn.entered import Entry
from perco.txn.inside import get_with
from tests.component.serve.kit import WIRE, Place, quick
from tests.component.serve.spread import Spread, spread
from tests.component.serve.test_together import FIXED, PLAIN, SCHEMA as OBSERVED, add, body, committing, docs, n, seen

_NAMES = {int(method): method.name for method in Method}


class Calls:
    """The calls that the server has got from its clients, by name; `before` runs before the server handles one."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self.before: Callable[[str, Any], None] = lambda name, peer: None

    def watch(self, place: Place | Spread) -> None:
        assert place.server is not None
        right = place.server._handlers

        def noted(method: int, handler: Any) -> Any:
            def handle(session: Any, peer: Any, id: int, asked: Any) -> None:
                self.made[_NAMES[method]] += 1
                self.before(_NAMES[method], peer)
                handler(session, peer, id, asked)

            return handle

        place.server._handlers = {method: noted(method, handler) for method, handler in right.items()}

    def new(self) -> dict[str, int]:
        """Those since the last call, without those that need no answer."""
        made, self.made = self.made, Counter()
        return {name: made[name] for name in made if name not in ("DONE", "HOLDING", "WORKS", "LOOKED", "UNCLAIM")}


@pytest.fixture(params=["cached", "plain"])
def place(request: pytest.FixtureRequest) -> Place:
    place = Place(PLAIN)
    if request.param == "plain":
        place.prefetch = perco.options.PrefetchOptions(cache=False, predict=False)
    return place


@pytest.fixture
def calls() -> Calls:
    return Calls()


def held(place: Place) -> set[int]:
    """The timestamps that the server holds for its clients (G1)."""
    assert place.server is not None
    assert place.owner is not None
    by_session: set[int] = set()
    for session in place.server.sessions.all.values():
        by_session |= session.open
    assert by_session == inside(place.owner).oracle.holds.open
    return by_session


async def value_of(db: perco.Database, key: str) -> int | None:
    async with db.snapshot() as snap:
        return await snap.get(n, key)


# ------------------------------------------------------------ trips


async def test_a_function_that_reads_one_cell_takes_two_trips(place: Place, calls: Calls) -> None:
    async with place.served(), place.client() as db:
        await db.run(add, "a")
        calls.watch(place)
        await db.run(add, "a")
        assert calls.new() == {"START": 1, "COMMIT": 1}
        assert await value_of(db, "a") == 2
        await trio.sleep(1)
        assert not held(place)


async def test_every_kind_of_first_read_draws_the_timestamp(place: Place, calls: Calls) -> None:
    keys = [f"k{i:03}" for i in range(300)]
    reads: dict[str, tuple[Callable[[perco.Transaction], Awaitable[Any]], Any, dict[str, int]]] = {
        "get": (lambda txn: txn.get(n, "k001"), 1, {"START": 1}),
        "absent": (lambda txn: txn.get(n, "none"), None, {"START": 1}),
        "long": (lambda txn: txn.get(body, "k000"), b"x" * 5000, {"START": 1, "READ": 1}),
        "few": (lambda txn: txn.get_many(n, ["k001", "none"]), {"k001": 1, "none": None}, {"START": 1}),
        "many": (lambda txn: txn.get_many(n, keys), {key: i for i, key in enumerate(keys)}, {"DRAW": 1, "READ": 2}),
        "none": (lambda txn: txn.get_many(n, []), {}, {"DRAW": 1}),
        "row": (lambda txn: values(txn, "k000"), {"n": 0, "body": b"x" * 5000}, {"START": 1, "READ": 1}),
        "scan": (lambda txn: txn.scan(docs, columns=[n], limit=1).all(), None, {"DRAW": 1, "SCAN": 1}),
    }

    async def values(txn: perco.Transaction, key: str) -> dict[str, Any]:
        return (await txn.row(docs, key)).values()

    async with place.served() as owner, place.client() as db:
        async with owner.transaction() as txn:
            for i, key in enumerate(keys):
                txn.set(n, key, i)
            txn.set(body, "k000", b"x" * 5000)
        calls.watch(place)
        for name, (read, expected, made) in reads.items():

            async def once(txn: perco.Transaction, read: Any = read) -> Any:
                with pytest.raises(AttributeError):
                    _ = txn.nothing  # type: ignore[attr-defined]
                found = await read(txn)
                assert txn.start_ts in held(place)
                return found

            found = await db.options(attempts=1).run(once)
            assert expected is None or found == expected, name
            assert calls.new() == made, name
            await trio.sleep(1)
            assert not held(place)


async def test_a_function_that_only_writes_draws_before_it_commits(place: Place, calls: Calls) -> None:
    async def blind(txn: perco.Transaction) -> None:
        txn.set(n, "a", 5)
        assert await txn.get(n, "a") == 5
        txn.delete(n, "b")
        assert await txn.get(n, "b") is None

    async def nothing(txn: perco.Transaction) -> str:
        assert txn.token == ""
        return txn.isolation

    async with place.served(), place.client() as db:
        calls.watch(place)
        await db.run(blind)
        assert calls.new() == {"DRAW": 1, "COMMIT": 1}
        assert await db.run(nothing) == "snapshot"
        assert calls.new() == {"DRAW": 1}
        assert await value_of(db, "a") == 5


async def test_a_function_that_does_nothing_has_a_timestamp_and_runs_once(place: Place, calls: Calls) -> None:
    ran: list[perco.Transaction] = []

    async def nothing(txn: perco.Transaction) -> None:
        ran.append(txn)
        await trio.sleep(1)

    async with place.served(), place.client() as db:
        calls.watch(place)
        await db.run(nothing)
        assert calls.new() == {"DRAW": 1}
        [txn] = ran
        assert txn.start_ts
        await trio.sleep(1)
        assert not held(place)


async def test_a_function_that_begins_with_batches_runs_once(place: Place) -> None:  # T11
    ran = 0

    async def in_batches(txn: perco.Transaction) -> int:
        nonlocal ran
        ran += 1
        return sum([batch.num_rows async for batch in txn.scan(docs, columns=[n]).to_batches()])

    async with place.served(), place.client() as db:
        await db.run(add, "a")
        assert await db.run(in_batches) == 1
        assert ran == 1


async def test_a_function_that_fails_before_it_reads_draws_nothing(place: Place, calls: Calls) -> None:
    async def fails(txn: perco.Transaction) -> None:
        txn.set(n, "a", 5)
        raise LookupError("mine")

    async with place.served(), place.client() as db:
        calls.watch(place)
        with pytest.raises(LookupError, match="mine"):
            await db.run(fails)
        assert calls.new() == {}


async def test_a_run_of_an_observer_takes_three_trips(calls: Calls) -> None:  # N8
    place = Place(OBSERVED)
    async with place.served(), place.client() as db, place.client() as other, other.worker():
        await db.run(add, "a")
        await db.wait_idle(timeout=60)
        calls.watch(place)
        await db.run(add, "a")
        await db.wait_idle(timeout=60)
        made = calls.new()
        assert (made["START"], made["CLAIM"], made["COMMIT"]) == (2, 1, 2)
        assert "DRAW" not in made
        async with db.snapshot() as snap:
            assert await snap.get(seen, "a") == 2
        await trio.sleep(1)
        assert not held(place)


async def test_what_is_read_ahead_comes_with_the_first_read(calls: Calls) -> None:
    place = Place(PLAIN)

    async def both(txn: perco.Transaction, key: str) -> tuple[int | None, bytes | None]:
        return await txn.get(n, key), await txn.get(body, key)

    async with place.served() as owner, place.client() as db:
        async with owner.transaction() as txn:
            txn.set(n, "a", 7)
            txn.set(body, "a", b"x" * 1000)
        for _ in range(4):
            await db.run(both, "a")
        calls.watch(place)
        assert await db.run(both, "a") == (7, b"x" * 1000)
        assert calls.new() == {"START": 1}
        [counters] = [each for name, each in db.statistics().prefetch.items() if "both" in name]
        assert counters.used


async def test_a_delay_window_gathers_draws_and_reads_as_before(calls: Calls) -> None:  # D1
    place = Place(PLAIN, batch=FIXED)
    async with place.served(), place.client() as db:
        calls.watch(place)
        await db.run(add, "a")
        made = calls.new()
        assert made["DRAW"] == 1
        assert "START" not in made


# ------------------------------------------------------------ a function that wants the timestamp


async def test_a_function_that_wants_the_timestamp_first_runs_again_once(place: Place, calls: Calls) -> None:  # T11
    ran: list[int] = []

    async def hasty(txn: perco.Transaction, key: str) -> int:
        ran.append(0)
        ran[-1] = txn.start_ts
        await add(txn, key)
        return txn.start_ts

    async with place.served(), place.client() as db:
        calls.watch(place)
        assert await db.options(attempts=1).run(hasty, "a") == ran[1]
        assert ran[0] == 0
        assert calls.new() == {"DRAW": 1, "READ": 1, "COMMIT": 1}
        await db.run(hasty, "a")
        assert len(ran) == 3, "it is known by now"
        assert await value_of(db, "a") == 2


@pytest.mark.parametrize("how", ["swallows", "changes", "changes later", "reads on"])
async def test_whatever_the_function_makes_of_the_error_it_runs_again(how: str, place: Place) -> None:  # T11
    ran = 0

    async def hasty(txn: perco.Transaction) -> None:
        nonlocal ran
        ran += 1
        txn.set(n, "a", ran)
        ts = 0
        try:
            ts = txn.start_ts
        except Exception as error:
            if how == "changes":
                raise LookupError("mine") from error
        if how == "reads on":
            await txn.get(n, "b")
        if how == "changes later" and not ts:
            raise LookupError("mine")

    async with place.served(), place.client() as db:
        await db.options(attempts=1).run(hasty)
        assert ran == 2
        assert await value_of(db, "a") == 2


async def test_an_error_of_a_function_that_has_not_asked_is_raised(place: Place) -> None:
    ran = 0

    async def fails(txn: perco.Transaction) -> None:
        nonlocal ran
        ran += 1
        await txn.get(n, "a")
        assert txn.start_ts
        raise LookupError("mine")

    async with place.served(), place.client() as db:
        with pytest.raises(LookupError):
            await db.run(fails)
        assert ran == 1


@pytest.mark.parametrize("how", ["looks", "looks, and reads", "lets a task look"])
async def test_what_a_function_has_looked_at_before_its_first_read_conflicts(
    how: str, place: Place, calls: Calls
) -> None:  # T7 T11
    """As in the owner's process, where the timestamp is drawn first."""
    ran = 0

    async def count(txn: perco.Transaction) -> None:
        """Add one to what another client's snapshot has."""
        nonlocal ran
        ran += 1
        seen: list[int] = []

        async def look() -> None:
            seen.append(await value_of(other, "a") or 0)

        if how == "lets a task look":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look)
        else:
            await look()
        if ran == 2:
            await other.run(add, "a")
        txn.set(n, "a", seen[0] + 1)
        if how == "looks, and reads":
            await txn.get(n, "b")

    async with place.served(), place.client() as db, place.client() as other:
        await db.run(add, "a")
        with pytest.raises(perco.errors.WriteConflict):
            await db.options(attempts=1).run(count)
        assert ran == 2, "the first time, it was found to be hasty"
        assert await value_of(db, "a") == 2
        calls.watch(place)
        await db.run(count)
        assert calls.new()["DRAW"], "its timestamps are drawn first from now on"
        assert await value_of(db, "a") == 3
        await db.run(add, "a")
        assert calls.new() == {"DRAW": 1, "READ": 1, "START": 1, "COMMIT": 1}, "other functions are not hasty"


async def test_the_names_of_hasty_functions_are_bounded(place: Place) -> None:
    async with place.served(), place.client() as db:
        engine = inside(db).engine
        for i in range(_HASTY_MAX + 1):
            is_hasty(engine, f"f{i}")
            assert f"f{i}" in engine.hasty
            assert len(engine.hasty) <= _HASTY_MAX


async def test_blocks_have_their_timestamp_from_the_beginning(place: Place) -> None:
    """A block cannot run again by itself."""
    async with place.served(), place.client() as db:
        async with db.transaction() as txn:
            assert txn.start_ts
        async for attempt in db.attempts():
            async with attempt as txn:
                assert txn.start_ts
        txn = await db.begin()
        assert txn.start_ts
        txn.discard()
        assert BLOCK not in inside(db).engine.hasty


# ------------------------------------------------------------ what must hold


async def test_a_first_read_waits_for_a_commit_that_came_before_its_timestamp(place: Place) -> None:  # C4
    read: list[int | None] = []

    async def look(txn: perco.Transaction) -> None:
        read.append(await txn.get(n, "a"))

    async with place.served() as owner, place.client() as db, trio.open_nursery() as nursery:
        await db.run(add, "a")
        with committing(owner, "a"):
            nursery.start_soon(db.run, look)
            await trio.sleep(1)
            assert read == []
        await trio.sleep(1)
        assert read == [1]
        await trio.sleep(1)
        assert not held(place)


@contextmanager
def paused(owner: perco.Database) -> Iterator[trio.Event]:
    """Meanwhile, the owner's transactions commit in two phases, and wait for an event when their locks are written."""
    driver, pause = inside(owner).driver, trio.Event()
    draw = driver._draw_commit

    async def slow() -> int:
        await pause.wait()
        return await draw()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_draw_commit", slow)
        patch.setattr(driver, "options", perco.options.CommitOptions(one_step=False))
        yield pause


async def test_a_lock_in_the_way_of_the_first_read_is_settled(place: Place) -> None:  # T9
    found: list[int | None] = []

    async def look(txn: perco.Transaction) -> None:
        found.append(await txn.get(n, "a"))

    async with place.served() as owner, place.client() as db:
        await db.run(add, "a")
        with paused(owner) as pause:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(owner.run, add, "a")
                await trio.sleep(1)
                nursery.start_soon(db.run, look)
                await trio.sleep(1)
                assert not found
                pause.set()
        assert found in ([1], [2])
        assert await value_of(db, "a") == 2


async def test_a_transaction_sees_all_that_was_committed_before_it_began(place: Place) -> None:  # O2 T2
    async with place.served(), place.client() as db, place.client() as other:
        for i in range(1, 20):
            await other.run(add, "a")

            async def look(txn: perco.Transaction) -> int | None:
                return await txn.get(n, "a")

            assert await db.run(look) == i


async def test_serializable_transactions_note_their_first_read(place: Place) -> None:  # T14
    async def skew(txn: perco.Transaction, mine: str, theirs: str, arrived: trio.Event, go_on: trio.Event) -> None:
        found = await txn.get(n, theirs)
        arrived.set()
        await go_on.wait()
        txn.set(n, mine, (found or 0) + 1)

    async with place.served(), place.client() as db:
        limits = db.options(isolation="serializable", attempts=1)
        first, second, go_on = trio.Event(), trio.Event(), trio.Event()
        failed: list[perco.PercoError] = []

        async def run(mine: str, theirs: str, arrived: trio.Event) -> None:
            try:
                await limits.run(skew, mine, theirs, arrived, go_on)
            except perco.PercoError as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "a", "b", first)
            nursery.start_soon(run, "b", "a", second)
            await first.wait()
            await second.wait()
            go_on.set()
        assert failed
        assert all(isinstance(error, perco.errors.ReadConflict | perco.errors.WriteConflict) for error in failed)


async def test_tasks_of_one_transaction_share_the_draw(place: Place, calls: Calls) -> None:
    ran = 0

    async def three(txn: perco.Transaction, *, first: bool) -> set[int]:
        nonlocal ran
        ran += 1
        found: set[int] = set()

        async def one(key: str) -> None:
            await txn.get(n, key)
            found.add(txn.start_ts)

        async with trio.open_nursery() as nursery:
            for key in "bc":
                nursery.start_soon(one, key)
            if first:
                await one("a")
        return found

    async with place.served(), place.client() as db:
        calls.watch(place)
        assert len(await db.run(three, first=True)) == 1
        assert calls.new() == {"START": 1, "READ": 2}
        assert ran == 1
        assert len(await db.run(three, first=False)) == 1
        assert calls.new() == {"DRAW": 1, "READ": 2}
        assert ran == 3, "the function waits for its tasks before it reads"
        await trio.sleep(1)
        assert not held(place)


@pytest.fixture
def stalled(place: Place) -> Iterator[Callable[[], Any]]:
    """From the call on, answers to START wait until the function that it returns is called."""
    waiting: list[Callable[[], bool]] = []

    def stall() -> Any:
        assert place.server is not None
        handlers = place.server._handlers
        right = handlers[int(Method.START)]

        def late(session: Any, peer: Any, id: int, asked: Any) -> None:
            class Late:
                def __getattr__(self, name: str) -> Any:
                    return getattr(peer, name)

                def reply(self, id: int, value: Any) -> bool:
                    waiting.append(lambda: peer.reply(id, value))
                    return True

            right(session, Late(), id, asked)  # type: ignore[arg-type]

        handlers[int(Method.START)] = late

        def go_on() -> None:
            handlers[int(Method.START)] = right
            for answer in waiting:
                answer()
            waiting.clear()

        return go_on

    yield stall
    assert not waiting


async def test_a_first_read_that_is_cancelled_lets_go_of_its_timestamp(
    place: Place, stalled: Callable[[], Any]
) -> None:  # G1
    async def slow(txn: perco.Transaction) -> None:
        await txn.get(n, "a")

    async with place.served(), place.client() as db:
        await db.run(add, "a")
        go_on = stalled()
        with trio.move_on_after(1) as scope:
            await db.run(slow)
        assert scope.cancelled_caught
        assert len(held(place)) == 1, "the server cannot know"
        go_on()
        await trio.sleep(1)
        assert not held(place)
        assert not inside(db).oracle.holds.open
        assert not remote_owner(db).link._calls


async def test_a_first_read_that_is_made_again_after_a_cancellation_keeps_one_timestamp(
    place: Place, stalled: Callable[[], Any]
) -> None:  # G1
    """As perco.sync does after a Ctrl-C in a call."""
    async with place.served(), place.client() as db:
        await db.run(add, "a")
        txn = starting(db._engine, False, "again", watched=False, first=True)
        assert txn is not None
        go_on = stalled()
        with trio.move_on_after(1):
            await txn.get(n, "a")
        found: list[int | None] = []

        async def again() -> None:
            found.append(await txn.get(n, "a"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(again)
            await trio.sleep(1)
            assert len(held(place)) == 2
            go_on()
        assert found == [1]
        await trio.sleep(1)
        assert held(place) == {txn.start_ts}
        txn.discard()
        await trio.sleep(1)
        assert not held(place)


async def test_a_function_whose_first_read_was_cancelled_runs_again(
    place: Place, stalled: Callable[[], Any]
) -> None:  # T11 G1
    ran = 0

    async def patient(txn: perco.Transaction) -> int | None:
        nonlocal ran
        ran += 1
        with trio.move_on_after(1):
            await txn.get(n, "a")
        go_on()  # its answer comes after all
        await trio.sleep(1)
        return await txn.get(n, "a")

    async with place.served(), place.client() as db:
        await db.run(add, "a")
        go_on = stalled()
        assert await db.options(attempts=1).run(patient) == 1
        assert ran == 1, "the timestamp had arrived by then"
        go_on = stalled()

        async def hasty(txn: perco.Transaction) -> int | None:
            nonlocal ran
            ran += 1
            with trio.move_on_after(1):
                await txn.get(n, "a")
            return await txn.get(n, "a")

        assert await db.options(attempts=1).run(hasty) == 1
        assert ran == 3
        go_on()
        await trio.sleep(1)
        assert not held(place)


async def test_a_transaction_that_ends_during_its_first_read_lets_go_of_the_timestamp(
    place: Place, stalled: Callable[[], Any]
) -> None:  # G1
    async def ends(txn: perco.Transaction) -> None:
        async def discards() -> None:
            await trio.sleep(1)
            txn.discard()
            go_on()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(discards)
            with pytest.raises(perco.errors.TransactionClosed):
                await txn.get(n, "a")

    async with place.served(), place.client() as db:
        await db.run(add, "a")
        go_on = stalled()
        await db.run(ends)
        await trio.sleep(1)
        assert not held(place)
        assert not inside(db).oracle.holds.open


async def test_a_first_read_whose_answer_is_lost_is_asked_again(place: Place, calls: Calls) -> None:  # R4 G1
    async with place.served(), place.client() as db:
        await db.run(add, "a")
        calls.watch(place)

        def lose(name: str, peer: Any) -> None:
            if name == "START":
                calls.before = lambda name, peer: None
                peer.ended = True
                peer.channel.close_soon()

        calls.before = lose
        await db.run(add, "a")
        assert calls.new() == {"START": 2, "COMMIT": 1}
        assert await value_of(db, "a") == 2
        await trio.sleep(1)
        assert not held(place)


async def test_a_cancelled_first_read_is_not_asked_again(place: Place, calls: Calls) -> None:  # R4 G1
    async def slow(txn: perco.Transaction) -> None:
        await txn.get(n, "a")

    async with place.served(), place.client() as db:
        calls.watch(place)
        assert place.server is not None
        handlers = place.server._handlers
        handlers[int(Method.START)] = lambda session, peer, id, asked: None
        with trio.move_on_after(1):
            await db.run(slow)
        assert len(remote_owner(db).link._calls) == 1
        calls.watch(place)
        await place.break_connections()
        await trio.sleep(2)
        assert calls.new() == {}
        assert not remote_owner(db).link._calls


async def test_a_transaction_belongs_to_the_session_in_which_its_first_read_is_answered(
    place: Place, calls: Calls
) -> None:  # R5
    async def across(txn: perco.Transaction) -> None:
        await add(txn, "a")
        assert txn.start_ts in held(place)
        assert await txn.get(n, "c") is None

    def end_session(name: str, peer: Any) -> None:
        if name == "START":
            calls.before = lambda name, peer: None
            assert place.server is not None
            for session in list(place.server.sessions.all.values()):
                place.server.sessions.end(session)
            peer.ended = True
            peer.channel.close_soon()

    async with place.served(), place.client() as db:
        ts = await db.put(n, "z", 1)
        async with db.snapshot(ts=ts):  # which the new session does not hold: so the client gets another driver
            before = inside(db).engine.driver
            calls.watch(place)
            calls.before = end_session
            await db.options(attempts=1).run(across)
            assert inside(db).engine.driver is not before
        assert await value_of(db, "a") == 1
        assert calls.made["START"] == 2


@pytest.mark.parametrize("waits_for", ["a commit", "timestamps"])
async def test_a_session_that_ends_while_its_first_read_waits_gets_no_timestamp(
    waits_for: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:  # R7 G1
    async def look(txn: perco.Transaction) -> None:
        await txn.get(n, "a")
        assert txn.start_ts in held(place)
        ran.append(txn.start_ts)

    ran: list[int] = []
    async with place.served() as owner, place.client() as db, trio.open_nursery() as nursery:
        await db.run(add, "a")
        assert place.server is not None
        go_on = trio.Event()
        if waits_for == "timestamps":
            right = inside(owner).oracle.draw

            async def slow() -> int:
                await go_on.wait()
                return await right()

            monkeypatch.setattr(inside(owner).oracle, "draw_nowait", lambda: 0)
            monkeypatch.setattr(inside(owner).oracle, "draw", slow)
            await _ended_meanwhile(place, nursery, db, look)
            monkeypatch.undo()
            go_on.set()
        else:
            with committing(owner, "a"):
                await _ended_meanwhile(place, nursery, db, look)
        await trio.sleep(5)
        assert len(ran) == 1
        assert not held(place)


async def test_an_answer_to_a_connection_that_has_ended_leaves_no_timestamp(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:  # R4 R7 G1
    """The timestamp is drawn after the client has connected again, and said what it holds."""
    async with place.served() as owner, place.client() as db, trio.open_nursery() as nursery:
        await db.run(add, "a")
        go_on, right = trio.Event(), inside(owner).oracle.draw

        async def slow() -> int:
            await go_on.wait()
            return await right()

        monkeypatch.setattr(inside(owner).oracle, "draw_nowait", lambda: 0)
        monkeypatch.setattr(inside(owner).oracle, "draw", slow)
        nursery.start_soon(db.run, look_at, "a")
        await trio.sleep(1)
        await place.break_connections()
        await trio.sleep(2)
        assert remote_owner(db).link.connections == 2
        monkeypatch.undo()
        go_on.set()
        await trio.sleep(1)
        assert not held(place)


async def test_clients_of_tablet_servers_read_there(calls: Calls) -> None:  # F1
    async with spread(2) as place, place.client(PLAIN) as db:
        calls.watch(place)
        await db.run(add, "a")
        made = calls.new()
        assert made["DRAW"]
        assert "START" not in made


async def _ended_meanwhile(place: Place, nursery: trio.Nursery, db: perco.Database, look: Any) -> None:
    nursery.start_soon(db.options(attempts=1).run, look)
    await trio.sleep(1)
    assert place.server is not None
    [session] = place.server.sessions.all.values()
    place.server.sessions.end(session)


async def test_an_owner_without_timestamps_makes_the_first_read_wait(
    place: Place,
) -> None:  # O1 C4
    read: list[int | None] = []

    async def look(txn: perco.Transaction) -> None:
        read.append(await txn.get(n, "a"))

    async with place.served() as owner, place.client() as db:
        await db.run(add, "a")
        oracle = inside(owner).oracle
        for busy in (False, True):
            while oracle.draw_nowait():  # the rest of the range
                pass
            if not busy:
                await db.run(add, "a")
                continue
            ts = oracle.last  # C4: a commit that has its timestamp, and is not visible yet
            where = ("docs", docs.row("a"), inside(owner).known.bind(n).column)
            entry = inside(owner).driver.entered.cells[where] = Entry(ts, ts, Cellref(*where))
            inside(owner).driver.writing[ts] = None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(db.run, look)
                await trio.sleep(1)
                assert not read
                assert inside(owner).driver.entered.cells.pop(where) is entry
                inside(owner).driver.written(ts)
        assert read == [2]
        await trio.sleep(1)
        assert not held(place)


async def test_what_comes_with_the_timestamp_is_noted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:  # O4 N10
    async with place.served() as owner, place.client() as db:
        await db.run(add, "a")
        theirs, ours = inside(owner).oracle, inside(db).oracle
        theirs.catalogue_version += 1
        await db.run(look_at, "a")
        assert ours.catalogue_version == theirs.catalogue_version
        last = theirs.last
        assert await db.run(look_at, "a") > last
        assert ours.last == theirs.last
        for jump_ms in (3_600_000, -3_600_000):
            jumped = theirs.wall_ms() + jump_ms
            monkeypatch.setattr(theirs, "wall_ms", lambda jumped=jumped: jumped)
            await db.run(look_at, "a")
            assert ours.wall_ms() == theirs.wall_ms()


async def look_at(txn: perco.Transaction, key: str) -> int:
    await txn.get(n, key)
    return txn.start_ts


async def test_rows_that_fill_a_message_are_read_in_parts(calls: Calls) -> None:
    place = Place(PLAIN)
    keys = [f"k{i}" for i in range(8)]

    async def all_of_them(txn: perco.Transaction) -> dict[str, bytes | None]:
        return await txn.get_many(body, keys)

    async with place.served() as owner, place.client() as db:
        for key in keys:
            async with owner.transaction() as txn:
                txn.set(body, key, b"x" * 200)
                txn.set(n, key, 1)
        assert place.server is not None
        place.server.rows._options = quick(WIRE, frame_bytes=1 << 10, message_bytes_max=1 << 10)
        calls.watch(place)
        assert await db.run(all_of_them) == dict.fromkeys(keys, b"x" * 200)
        made = calls.new()
        assert made["START"] == 1
        assert made["READ"] > 0
        await trio.sleep(1)
        assert not held(place)


@pytest.mark.parametrize("cached", [True, False])
async def test_a_cell_of_another_table_is_read_with_the_first_read(calls: Calls, *, cached: bool) -> None:  # T9 T14
    other = perco.Table("other")
    size = other.column("size", perco.INT64)
    place = Place(perco.Schema(docs, other))
    place.prefetch = perco.options.PrefetchOptions(cache=cached, predict=cached)
    keys = [f"k{i}" for i in range(8)]

    async def both(txn: perco.Transaction, keys: list[str]) -> Any:
        return await get_with(txn, n, keys, size, b"o")

    async with place.served() as owner, place.client() as db:
        async with owner.transaction() as txn:
            for i, key in enumerate(keys):
                txn.set(n, key, i)
        expected = {key: i for i, key in enumerate(keys)}
        await db.run(both, keys)
        calls.watch(place)
        assert await db.run(both, keys) == (expected, None)
        assert calls.new() == {"START": 1}
        async with owner.transaction() as txn:
            txn.set(size, b"o", 7)
        assert await db.run(both, keys) == (expected, 7)
        assert await db.run(both, keys[:1]) == ({"k0": 0}, 7)
        assert await db.options(isolation="serializable").run(both, keys[:2]) == ({"k0": 0, "k1": 1}, 7)
        calls.new()
        async with db.transaction() as txn:
            assert await both(txn, keys) == (expected, 7)
        async with owner.snapshot() as snap:
            assert await get_with(snap, n, ["k1", "none", "k1"], size, b"none") == ({"k1": 1, "none": None}, None)

        async def late(txn: perco.Transaction) -> Any:
            txn.set(n, "z", 1)
            found = await both(txn, keys[:1])
            async with owner.transaction() as other_txn:
                other_txn.set(size, b"o", 8)
            return found

        with pytest.raises(perco.errors.ReadConflict):
            await db.options(isolation="serializable", attempts=1).run(late)
        assert place.server is not None
        place.server.rows._options = quick(WIRE, frame_bytes=1 << 8, message_bytes_max=1 << 8)
        assert await db.run(both, keys) == (expected, 8)
        await trio.sleep(1)
        assert not held(place)


async def test_a_lock_on_a_cell_that_is_read_with_the_first_read_is_settled(place: Place) -> None:  # T9
    async def both(txn: perco.Transaction) -> None:
        found.append(await get_with(txn, n, ["b"], n, "a"))

    found: list[Any] = []
    async with place.served() as owner, place.client() as db:
        await db.run(add, "a")
        await db.run(add, "b")
        with paused(owner) as pause:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(owner.run, add, "a")
                await trio.sleep(1)
                nursery.start_soon(db.run, both)
                await trio.sleep(1)
                assert not found
                pause.set()
        assert found in ([({"b": 1}, 1)], [({"b": 1}, 2)])


async def test_a_first_read_that_the_owner_cannot_make_is_read_in_another_way(place: Place, calls: Calls) -> None:  # G1
    async with place.served(), place.client() as db:
        await db.run(add, "a")
        calls.watch(place)
        assert place.server is not None
        rows, right = place.server.rows, place.server.rows.find_now

        def damaged(requests: Any) -> Any:
            rows.find_now = right  # type: ignore[method-assign]
            raise perco.errors.Corruption("docs", "a cell that was read ahead")

        rows.find_now = damaged  # type: ignore[method-assign]
        await db.run(add, "a")
        assert calls.new() == {"START": 1, "DRAW": 1, "READ": 1, "COMMIT": 1}
        assert await value_of(db, "a") == 2
        await trio.sleep(1)
        assert not held(place)


async def test_a_first_read_that_fails_leaves_no_timestamp(place: Place) -> None:  # G1
    async with place.served(), place.client() as db:
        assert place.server is not None

        def full(requests: Any) -> Any:
            raise perco.errors.StoreError("the disk is gone")

        place.server.rows.find_now = full  # type: ignore[method-assign]
        with pytest.raises(perco.errors.StoreError, match="the disk is gone"):
            await db.run(add, "a")
        assert not held(place)


async def test_a_conflict_is_retried_with_a_turn_and_a_new_timestamp(place: Place, calls: Calls) -> None:  # T11 W3
    async with place.served(), place.client() as db:
        calls.watch(place)
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(db.run, add, "a")
        assert await value_of(db, "a") == 10
        made = calls.new()
        assert "DRAW" not in made or made["DRAW"] == 1  # of the snapshot
        await trio.sleep(1)
        assert not held(place)


async def test_a_pause_is_noticed_with_the_timestamp_of_a_run() -> None:  # N10
    """Nothing was known of it when the run began."""
    place = Place(OBSERVED)
    async with place.served() as owner, place.client() as db, place.client() as other, other.worker() as handle:
        await db.run(add, "a")
        await db.wait_idle(timeout=60)
        runs = handle.statistics()["see"].runs
        assert place.server is not None
        handlers = place.server._handlers
        right = handlers[int(Method.START)]
        paused = trio.Event()

        def pause_first(session: Any, peer: Any, id: int, asked: Any) -> None:
            async def pause() -> None:
                await owner.pause("see")
                paused.set()
                right(session, peer, id, asked)

            handlers[int(Method.START)] = right
            inside(owner).background.spawn(pause)

        async with db.transaction() as txn:
            txn.set(n, "a", 2)
            handlers[int(Method.START)] = pause_first
        await paused.wait()
        await trio.sleep(5)
        assert handle.statistics()["see"].runs == runs
        await owner.resume("see")
        await db.wait_idle(timeout=60)
        async with db.snapshot() as snap:
            assert await snap.get(seen, "a") == 2


async def test_a_first_read_whose_answer_is_too_large_leaves_no_timestamp(calls: Calls) -> None:  # G1
    """The values that are read ahead have grown since."""
    table = perco.Table("large", key=perco.TEXT)
    columns = [table.column(f"c{i}", perco.BYTES) for i in range(4)]
    place = Place(perco.Schema(table), wire=quick(WIRE, frame_bytes=1 << 14, message_bytes_max=1 << 14))

    async def look(txn: perco.Transaction) -> list[int]:
        row = await txn.row(table, "a")
        return [len(row[column] or b"") for column in columns]

    async with place.served() as owner, place.client() as db:
        for size in (2000, 9000):
            for column in columns:
                async with owner.transaction() as txn:
                    txn.set(column, "a", b"x" * size)
            calls.watch(place)
            for _ in range(1 if size > 2000 else 5):
                assert await db.run(look) == [size] * 4
        assert calls.made["DRAW"], "the first read was too large"
        await trio.sleep(1)
        assert not held(place)
        assert not inside(db).oracle.holds.open


@pytest.mark.parametrize("how", ["swallows", "raises"])
async def test_a_hasty_task_beside_a_first_read_has_the_function_run_again(
    how: str, place: Place, stalled: Callable[[], Any]
) -> None:  # T11 G1
    ran: list[list[Any]] = []

    async def two_tasks(txn: perco.Transaction) -> list[Any]:
        got = list[Any]()
        ran.append(got)

        async def asks() -> None:
            await trio.sleep(1)
            try:
                got.append(txn.start_ts)
            except Exception:
                got.append(None)
                go_on()
                await trio.sleep(1)
                if how == "raises":
                    raise

        async with trio.open_nursery() as nursery:
            nursery.start_soon(asks)
            with trio.CancelScope(shield=True):
                got.append(await txn.get(n, "a"))
        return got

    async with place.served(), place.client() as db:
        await db.run(add, "a")
        go_on = stalled()
        found, ts = await db.options(attempts=1).run(two_tasks)
        assert found == 1
        assert ts > 0
        assert len(ran) == 2
        await trio.sleep(1)
        assert not held(place)


async def test_a_hasty_function_that_discards_its_transaction_runs_again(place: Place) -> None:  # T11
    async def gives_up(txn: perco.Transaction) -> int:
        try:
            return txn.start_ts
        except Exception:
            txn.discard()
            return 0

    async with place.served(), place.client() as db:
        assert await db.run(gives_up)


async def test_a_first_read_waits_for_a_commit_of_its_own_client_whose_answer_was_lost(place: Place) -> None:  # C4 T4
    """Only the read that asks for the outcome must not wait for it."""
    found: list[int | None] = []

    async def look(txn: perco.Transaction) -> None:
        found.append(await txn.get(n, "a"))

    async with place.served() as owner, place.client() as db, trio.open_nursery() as nursery:
        await db.run(add, "a")
        txn = await db.begin()
        entered, where = inside(owner).driver.entered, ("docs", docs.row("a"), inside(owner).known.bind(n).column)
        ts = inside(owner).oracle.draw_nowait()
        entry = entered.cells[where] = Entry(ts, txn.start_ts, Cellref(*where))
        entered.left[txn.start_ts] = (entry, [where])
        inside(owner).driver.writing[ts] = None
        nursery.start_soon(db.run, look)
        await trio.sleep(1)
        assert not found
        assert entered.settled(txn.start_ts)
        inside(owner).driver.written(ts)
        txn.discard()
        await trio.sleep(1)
        assert found == [1]


@pytest.mark.parametrize("asked", [(("docs", b"a", (("write", "n", 0, 0, 1),)),), (("docs", 5, ()),)])
async def test_a_first_read_that_cannot_be_decoded_ends_its_connection_even_if_it_waits(
    asked: Any, place: Place, caplog: pytest.LogCaptureFixture
) -> None:  # R1 G1
    async with place.served() as owner, place.client() as db, place.client() as evil:
        await db.run(add, "a")
        while inside(owner).oracle.draw_nowait():  # so that it waits for a timestamp
            pass
        with pytest.raises(LostError):
            await remote_owner(evil).link.call(Method.START, asked, again=False)
        assert "a bug in perco" not in caplog.text
        await db.run(add, "a")
        await trio.sleep(1)
        assert not held(place)


async def test_a_commit_that_gets_no_proper_answer_is_not_sent_again(place: Place, calls: Calls) -> None:  # C6
    async with place.served(), place.client() as db:
        await db.run(add, "a")
        assert place.server is not None
        place.server._handlers[int(Method.COMMIT)] = lambda session, peer, id, asked: peer.reply(id, None)
        calls.watch(place)
        with pytest.raises(TypeError):
            await db.run(add, "a")
        assert calls.made["COMMIT"] == 1


@pytest.mark.parametrize("what", ["run", "hasty", "add", "block", "nothing"])
async def test_transactions_of_a_client_are_traced(what: str) -> None:
    exported = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    place = Place(PLAIN)

    async def hasty(txn: perco.Transaction) -> int:
        return txn.start_ts

    async def nothing(txn: perco.Transaction) -> None:
        """Nothing."""

    async with place.served(), place.client() as db:
        perco.otel.instrument(db, tracer_provider=provider)
        match what:
            case "run":
                await db.run(add, "a")
            case "hasty":
                await db.run(hasty)
            case "add":
                await db.add(n, "a", 1)
            case "block":
                async with db.transaction() as txn:
                    txn.set(n, "a", 1)
            case _:
                await db.run(nothing)
    *given_up, span = exported.get_finished_spans()
    attributes = span.attributes or {}
    assert attributes["perco.outcome"] == "committed"
    assert "perco.start_ts" in attributes
    assert [(each.attributes or {})["error.type"] for each in given_up] == ["NotStarted"] * (what == "hasty")
