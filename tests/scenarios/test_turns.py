"""Attempts that met on a cell take turns: this saves attempts, and none keeps a turn that it does not use."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from itertools import pairwise

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.testing.faults import FaultyRowStore, use
from perco.testing.simulation import seeded
from perco.txn.turns import Lines, Turn

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
seen = docs.column("seen", perco.INT64)
SCHEMA = perco.Schema(docs)
MANY = 12

Body = Callable[[perco.Transaction], Awaitable[None]]


def options(turn_s: float = 1000.0, seed: int | None = None) -> perco.Options:
    return perco.Options(retry=perco.options.RetryOptions(turn_s=turn_s, attempts=1000), seed=seed)


async def overtaken(db: perco.Database, txn: perco.Transaction, *keys: str) -> None:
    """Reads what another transaction writes before this one does."""
    for key in keys:
        await txn.get(n, key)
        async with db.transaction() as other:
            other.set(n, key, -1)
        txn.set(n, key, 1)


async def by_run(db: perco.Database, body: Body) -> None:
    await db.run(body)


async def by_attempts(db: perco.Database, body: Body) -> None:
    async for attempt in db.attempts():
        async with attempt as txn:
            await body(txn)


BOTH = pytest.mark.parametrize("way", [by_run, by_attempts])


class Counter:
    """Adds one to a cell, taking its time: all that run at a time conflict."""

    def __init__(self, key: str = "k", seconds: float = 1.0) -> None:
        self.tried, self.key, self.seconds = 0, key, seconds

    async def __call__(self, txn: perco.Transaction) -> None:
        self.tried += 1
        value = await txn.get(n, self.key) or 0
        await trio.sleep(self.seconds)
        txn.set(n, self.key, value + 1)


class HasTurn:
    """Is overtaken at its first attempt; at the next one it has the turn, and waits at the gate."""

    def __init__(self, db: perco.Database) -> None:
        self.db, self.gate, self.tried = db, trio.Event(), 0

    async def __call__(self, txn: perco.Transaction) -> None:
        self.tried += 1
        if self.tried == 1:
            await overtaken(self.db, txn, "k")
        else:
            await self.gate.wait()


async def value_of(db: perco.Database, key: str = "k") -> int:
    async with db.snapshot() as snap:
        return await snap.get(n, key) or 0


@BOTH
async def test_each_fails_once_and_then_they_go_one_after_the_other(
    autojump_clock: trio.testing.MockClock, way: Callable[[perco.Database, Body], Awaitable[None]]
) -> None:
    async with perco.open("memory:", SCHEMA, options=options()) as db:
        add = Counter()
        async with trio.open_nursery() as nursery:
            for _ in range(MANY):
                nursery.start_soon(way, db, add)
        assert await value_of(db) == MANY
        assert add.tried == 2 * MANY - 1
        assert trio.current_time() == pytest.approx(MANY), "nobody pauses, nobody waits for more than his turn"
        assert len(inside(db).engine.lines) == 0
        assert db.statistics().turns == perco.TurnCounters(turns=MANY - 1, waits=MANY - 2, overdue=0)


@BOTH
async def test_without_turns_they_try_again_and_again(
    autojump_clock: trio.testing.MockClock, way: Callable[[perco.Database, Body], Awaitable[None]]
) -> None:
    async with perco.open("memory:", SCHEMA, options=options(turn_s=0, seed=1)) as db:
        add = Counter()
        async with trio.open_nursery() as nursery:
            for _ in range(MANY):
                nursery.start_soon(way, db, add)
        assert await value_of(db) == MANY
        assert add.tried > 3 * MANY
        assert db.statistics().turns == perco.TurnCounters()


async def test_observers_take_turns_too(autojump_clock: trio.testing.MockClock) -> None:
    schema, tried = perco.Schema(docs), []

    @schema.observe(n, id="count")
    async def count(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        if change.key != "total":
            tried.append(change.key)
            total = await txn.get(n, "total") or 0
            await trio.sleep(1.0)
            txn.set(n, "total", total + 1)

    async with perco.open("memory:", schema, options=options()) as db:
        async with db.transaction() as txn:
            for i in range(MANY):
                txn.set(n, f"row {i}", i)
        async with db.worker(concurrency=MANY, scanners=1):
            await db.wait_idle()
        assert await value_of(db, "total") == MANY
        assert len(tried) == 2 * MANY - 1
        assert len(inside(db).engine.lines) == 0


async def test_serializable_ones_that_read_the_same_range_take_turns(autojump_clock: trio.testing.MockClock) -> None:
    async with perco.open("memory:", SCHEMA, options=options()) as db:
        tried = 0

        async def count(txn: perco.Transaction, key: str) -> None:
            nonlocal tried
            tried += 1
            rows = await txn.scan(docs).all()
            await trio.sleep(1.0)
            txn.set(n, key, len(rows))

        async with trio.open_nursery() as nursery:
            for i in range(MANY):
                nursery.start_soon(db.options(isolation="serializable").run, count, f"row {i}")
        async with db.snapshot() as snap:
            assert sorted([row[n] async for row in snap.scan(docs)]) == list(range(MANY))
        assert tried <= 2 * MANY
        assert db.statistics().turns.waits >= MANY - 2


async def test_who_never_conflicts_stands_in_no_line(autojump_clock: trio.testing.MockClock) -> None:
    async with perco.open("memory:", SCHEMA, options=options()) as db:
        async with trio.open_nursery() as nursery:
            for i in range(MANY):
                nursery.start_soon(by_run, db, Counter(f"row {i}"))
                nursery.start_soon(by_attempts, db, Counter(f"other row {i}"))
        assert inside(db).engine.lines.ticket().number == 1, "nobody was given a place"


async def test_two_that_want_two_cells_in_different_order_do_not_wait_for_each_other(
    autojump_clock: trio.testing.MockClock,
) -> None:  # W2
    async with perco.open("memory:", SCHEMA, options=options()) as db:

        async def both(first: str, second: str) -> None:
            async def body(txn: perco.Transaction) -> None:
                for key in (first, second):
                    value = await txn.get(n, key) or 0
                    await trio.sleep(1.0)
                    txn.set(n, key, value + 1)

            await db.run(body)

        async with trio.open_nursery() as nursery:
            for i in range(MANY):
                nursery.start_soon(both, *("ab" if i % 2 else "ba"))
                nursery.start_soon(by_run, db, Counter("ab"[i % 2]))
        assert await value_of(db, "a") == await value_of(db, "b") == MANY + MANY // 2
        assert trio.current_time() < 6 * MANY


async def test_who_lost_though_it_had_the_turn_pauses(autojump_clock: trio.testing.MockClock) -> None:  # W1
    """Somebody who stands in no line writes the cell each time: another process would, too."""
    retry = perco.options.RetryOptions(backoff_s=1.0, backoff_max_s=64.0, attempts=8)
    for way in (by_run, by_attempts):
        async with perco.open("memory:", SCHEMA, options=perco.Options(retry=retry, seed=3)) as db:
            at: list[float] = []

            async def body(txn: perco.Transaction, db: perco.Database = db, at: list[float] = at) -> None:
                at.append(trio.current_time())
                await overtaken(db, txn, "k")

            with pytest.raises(perco.WriteConflict, match="8 attempts"):
                await way(db, body)
            pauses = [later - sooner for sooner, later in pairwise(at)]
            assert pauses[:2] == [0.0, 0.0], "first it goes to the cell's line, where nobody is; then it is favoured"
            assert all(0 < pause <= 2.0 ** (i + 2) for i, pause in enumerate(pauses[2:]))
            assert max(pauses) > 4.0
            assert len(inside(db).engine.lines) == 0


class Favoured:
    """Is overtaken at its first two attempts; in the third, it waits at the gate, and then writes the cell."""

    def __init__(self, db: perco.Database) -> None:
        self.db, self.gate, self.tried = db, trio.Event(), 0
        self.third, self.done = trio.Event(), trio.Event()

    async def __call__(self, txn: perco.Transaction) -> None:
        self.tried += 1
        if self.tried <= 2:
            await overtaken(self.db, txn, "k")
        else:
            value = await txn.get(n, "k") or 0
            self.third.set()
            await self.gate.wait()
            txn.set(n, "k", value + 1)

    async def _go(self) -> None:
        await self.db.run(self)
        self.done.set()

    async def begin(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._go)
        await self.third.wait()
        await trio.testing.wait_all_tasks_blocked()


@BOTH
async def test_a_first_attempt_gives_way_to_one_that_lost_in_its_turn(
    autojump_clock: trio.testing.MockClock, way: Callable[[perco.Database, Body], Awaitable[None]]
) -> None:  # W5
    async with perco.open("memory:", SCHEMA, options=options()) as db, trio.open_nursery() as nursery:
        waits, add, elsewhere = Favoured(db), Counter(seconds=0.0), Counter("other", seconds=0.0)
        await waits.begin(nursery)
        await way(db, elsewhere)
        nursery.start_soon(way, db, add)
        await trio.testing.wait_all_tasks_blocked()
        assert add.tried == 1
        assert await value_of(db) == -1, "it has written nothing"
        assert db.statistics().turns.gave_way == 1
        waits.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert waits.tried == 3
        assert add.tried == 2
        assert await value_of(db) == 1  # -1 by whom the favoured one met, and two added
        assert not inside(db).engine.lines.favoured


async def test_what_nobody_would_repeat_gives_way_to_nobody(autojump_clock: trio.testing.MockClock) -> None:  # W5
    async with perco.open("memory:", SCHEMA, options=options()) as db, trio.open_nursery() as nursery:
        waits = Favoured(db)
        await waits.begin(nursery)
        async with db.transaction() as txn:
            txn.set(n, "k", 10)
        await db.options(attempts=1).run(Counter(seconds=0.0))
        assert await value_of(db) == 11
        assert db.statistics().turns.gave_way == 0
        waits.gate.set()
        await waits.done.wait()
        assert waits.tried == 4
        assert await value_of(db) == 12


async def test_a_transaction_within_the_favoured_one_does_not_wait_for_it(
    autojump_clock: trio.testing.MockClock,
) -> None:  # W5
    async with perco.open("memory:", SCHEMA, options=options()) as db:
        tried = 0

        async def body(txn: perco.Transaction) -> None:
            nonlocal tried
            tried += 1
            await txn.get(n, "k")
            if tried <= 3:
                await db.run(Counter(seconds=0.0))
            txn.set(n, "k", 100)

        await db.run(body)
        assert (tried, await value_of(db)) == (4, 100)
        assert trio.current_time() < 10.0, "it did not wait for turn_s"
        assert db.statistics().turns.gave_way == 0


async def test_the_run_of_an_observer_gives_way(autojump_clock: trio.testing.MockClock) -> None:  # W5
    schema = perco.Schema(docs)
    ran: list[int] = []

    @schema.observe(seen, id="adds")
    async def adds(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        ran.append(change.attempt)
        txn.set(n, "k", (await txn.get(n, "k") or 0) + 1)

    async with perco.open("memory:", schema, options=options()) as db, db.worker(), trio.open_nursery() as nursery:
        waits = Favoured(db)
        await waits.begin(nursery)
        await db.put(seen, "k", 1)
        await trio.testing.wait_all_tasks_blocked()
        assert (ran, db.statistics().turns.gave_way) == ([1], 1)
        waits.gate.set()
        await db.wait_idle()
        assert ran == [1, 2]
        assert await value_of(db) == 1


async def test_nobody_waits_for_longer_than_turn_s(autojump_clock: trio.testing.MockClock) -> None:  # W4
    async with perco.open("memory:", SCHEMA, options=options(turn_s=5.0)) as db:
        hangs, add = HasTurn(db), Counter(seconds=100.0)

        async def overtaken_once(txn: perco.Transaction) -> None:
            if not add.tried:
                add.tried += 1
                await overtaken(db, txn, "k")
            else:
                began.append(trio.current_time())
                await add(txn)

        began: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(by_run, db, hangs)
            await trio.testing.wait_all_tasks_blocked()
            assert hangs.tried == 2, "it has the turn now"
            nursery.start_soon(by_run, db, overtaken_once)
            await trio.sleep(6.0)
            assert began == [pytest.approx(5.0)]
            assert db.statistics().turns.overdue == 1
            last = Held(db)
            await last.begin(nursery)
            hangs.gate.set()
            await last.check()  # an attempt out of turn stands before no other
        assert await value_of(db) == 1  # -1 by whom the last one met, and two added


class Held:
    """Somebody has the turn at a cell, and somebody else waits for it: what becomes of him when the first one goes?"""

    def __init__(self, db: perco.Database) -> None:
        self.db, self.waited = db, 0

    async def waits(self) -> None:
        """Meets others on the cell, stands in its line, and commits when it has the turn."""
        body = Counter(seconds=0.0)

        async def once(txn: perco.Transaction) -> None:
            if not body.tried:
                body.tried += 1
                await overtaken(self.db, txn, "k")
            else:
                await body(txn)

        await self.db.run(once)
        self.waited += 1

    async def begin(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self.waits)
        await trio.testing.wait_all_tasks_blocked()
        assert not self.waited, "it is somebody else's turn"

    async def check(self) -> None:
        """He has had his turn at once, and no line is left."""
        began = trio.current_time()
        await trio.testing.wait_all_tasks_blocked()
        assert self.waited == 1
        assert trio.current_time() == began
        assert len(inside(self.db).engine.lines) == 0


@BOTH
@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_turn_ends_with_the_attempt_however_that_ends(
    autojump_clock: trio.testing.MockClock, way: Callable[[perco.Database, Body], Awaitable[None]], how: str
) -> None:  # W3
    async with perco.open("memory:", SCHEMA, options=options()) as db, trio.open_nursery() as nursery:
        held, gate, scope, tried = Held(db), trio.Event(), trio.CancelScope(), 0

        async def body(txn: perco.Transaction) -> None:
            nonlocal tried
            tried += 1
            if tried == 1:
                await overtaken(db, txn, "k")
            else:
                await gate.wait()
                raise KeyError("the program's own")

        async def first() -> None:
            with scope, pytest.raises(KeyError):
                await way(db, body)

        nursery.start_soon(first)
        await trio.testing.wait_all_tasks_blocked()
        await held.begin(nursery)
        if how == "cancelled":
            scope.cancel()
        else:
            gate.set()
        await held.check()
        assert scope.cancelled_caught == (how == "cancelled")


@BOTH
async def test_who_is_cancelled_in_line_leaves_it(
    autojump_clock: trio.testing.MockClock, way: Callable[[perco.Database, Body], Awaitable[None]]
) -> None:  # W3
    async with perco.open("memory:", SCHEMA, options=options()) as db, trio.open_nursery() as nursery:
        first, last, scope, tried = HasTurn(db), Held(db), trio.CancelScope(), 0

        async def body(txn: perco.Transaction) -> None:
            nonlocal tried
            tried += 1
            await overtaken(db, txn, "k")

        async def cancelled() -> None:
            with scope:
                await way(db, body)

        nursery.start_soon(by_run, db, first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(cancelled)
        await trio.testing.wait_all_tasks_blocked()
        await last.begin(nursery)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert (tried, last.waited) == (1, 0), "the one with the turn still has it"
        first.gate.set()
        await last.check()


async def test_a_deadline_ends_the_wait_for_a_turn(autojump_clock: trio.testing.MockClock) -> None:  # W3 T10
    async with perco.open("memory:", SCHEMA, options=options()) as db, trio.open_nursery() as nursery:
        held, first = Held(db), HasTurn(db)

        async def body(txn: perco.Transaction) -> None:
            await overtaken(db, txn, "k")

        async def loop() -> None:
            async for attempt in db.options(timeout=3.0).attempts():
                async with attempt as txn:
                    await body(txn)

        nursery.start_soon(by_run, db, first)
        await trio.testing.wait_all_tasks_blocked()
        for late in (lambda: db.options(timeout=3.0).run(body), loop):
            began = trio.current_time()
            with pytest.raises(perco.Unavailable, match=r"in 1 attempts .* WriteConflict"):
                await late()
            assert trio.current_time() - began == pytest.approx(3.0)
        await held.begin(nursery)
        first.gate.set()
        await held.check()


@pytest.mark.parametrize("where", ["before the attempt", "in the attempt", "after it"])
async def test_a_loop_that_is_left_keeps_no_turn(autojump_clock: trio.testing.MockClock, where: str) -> None:  # W3
    async with perco.open("memory:", SCHEMA, options=options()) as db, trio.open_nursery() as nursery:
        held, gate, tried = Held(db), trio.Event(), 0

        async def first() -> None:
            nonlocal tried
            attempts = db.attempts()
            async for attempt in attempts:
                if tried == 2 and where == "before the attempt":
                    break
                async with attempt as txn:
                    tried += 1
                    await overtaken(db, txn, "k")
                    if tried == 2:
                        await gate.wait()
                        if where == "in the attempt":
                            break
                if tried == 2 and where == "after it":
                    break
            kept.append(attempts)

        kept: list[perco.Attempts] = []
        nursery.start_soon(first)
        await trio.testing.wait_all_tasks_blocked()
        await held.begin(nursery)
        gate.set()
        await held.check()
        await trio.sleep(1.0)  # past the pause, which comes before the loop's body
        assert kept, "the loop is left, and the object not yet forgotten"
        owed = where != "before the attempt"
        with pytest.warns(perco.errors.PercoWarning, match="nothing was written") if owed else nullcontext():
            kept.clear()


async def test_an_attempt_that_is_begun_too_late_keeps_no_turn(autojump_clock: trio.testing.MockClock) -> None:  # W3
    async with perco.open("memory:", SCHEMA, options=options()) as db:
        tried = 0
        with pytest.raises(perco.Unavailable, match="in 1 attempts"):  # noqa: PT012
            async for attempt in db.options(timeout=3.0).attempts():
                if tried:
                    await trio.sleep(10.0)  # between the look at the time and the turn
                tried += 1
                async with attempt as txn:
                    await overtaken(db, txn, "k")
        assert tried == 2
        assert db.statistics().turns.turns == 1
        assert len(inside(db).engine.lines) == 0


async def test_a_turn_that_is_dropped_ends() -> None:  # W3: a Ctrl-C may come before the line that ends it
    lines, waited = Lines(), []
    dropped = Turn(lines, 1000.0)

    async def second() -> None:
        turn = Turn(lines, 1000.0)
        turn.met([("t", b"k", 1)])
        await turn.take()
        waited.append(len(lines))
        turn.leave()

    dropped.met([("t", b"k", 1)])
    await dropped.take()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(second)
        await trio.testing.wait_all_tasks_blocked()
        assert waited == []
        del dropped
        await trio.testing.wait_all_tasks_blocked()
        assert waited == [1]
    assert len(lines) == 0


def test_turns_of_a_loop_that_has_ended_wake_nobody() -> None:
    lines = Lines()
    first = Turn(lines, 1000.0)

    async def main() -> None:
        first.met([("t", b"k", 1)])
        await first.take()
        second = lines.ticket()
        lines.met(second, [("t", b"k", 1)])
        assert not lines.join(second)
        second.called = trio.Event()

    trio.run(main)
    first.leave()  # by a coroutine that nobody has ended, say
    assert [ticket.number for line in lines._lines.values() for ticket in line] == [2]


@pytest.mark.parametrize("seed", range(20))
def test_on_hot_cells_over_a_slow_store_every_commit_counts_once(seed: int) -> None:  # W1 - W4
    """A task that says it committed did so once, even if others are cancelled: in line, with the turn, or in the middle
    of a commit; and in the end no line is left. (With seeds, in virtual time.)"""
    counted = {"a": 0, "b": 0}
    rng = random.Random(seed)
    seen = perco.TurnCounters()

    async def client(db: perco.Database, number: int) -> None:
        mine = random.Random(f"{seed} {number}")
        for _ in range(8):
            keys = mine.sample("ab", mine.randint(1, 2))
            naps = [mine.choice((0.0, 0.01, 0.3)) for _ in keys]
            way = mine.choice((by_run, by_attempts))
            scope = trio.CancelScope(deadline=trio.current_time() + mine.choice((0.2, 2.0, 1000.0)))
            last: list[perco.Transaction] = []

            async def body(txn: perco.Transaction, keys=keys, naps=naps, last=last) -> None:  # type: ignore[no-untyped-def]
                last[:] = [txn]
                for key, nap in zip(keys, naps, strict=True):
                    value = await txn.get(n, key) or 0
                    await trio.sleep(nap)
                    txn.set(n, key, value + 1)

            with scope:
                await way(db, body)
            if last[0].outcome == "committed":
                for key in keys:
                    counted[key] += 1

    async def slowly(_: object) -> None:
        await trio.sleep(rng.choice((0.0, 0.001, 0.05)))

    async def main() -> None:
        chosen = perco.Options(
            retry=perco.options.RetryOptions(turn_s=rng.choice((0.5, 1000.0)), attempts=1000),
            commit=perco.options.CommitOptions(one_step=rng.random() < 0.5),
            seed=seed,
        )
        async with perco.open("memory:", SCHEMA, options=chosen) as db:
            slow = FaultyRowStore(inside(db).driver.store)
            slow.before = slowly
            use(db, slow)
            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(client, db, number)
            assert {key: await value_of(db, key) for key in counted} == counted
            assert len(inside(db).engine.lines) == 0
            counts = db.statistics().turns
            seen.turns, seen.waits, seen.overdue = counts.turns, counts.waits, counts.overdue

    with seeded(seed):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert min(counted.values()) > 10
    assert seen.turns > 20
    assert seen.waits > 20


@pytest.mark.parametrize("turn_s", [-1, "5", None, True, float("nan")])
def test_turn_s_is_a_number_of_seconds(turn_s: object) -> None:
    with pytest.raises(perco.UsageError, match="turn_s"):
        perco.options.RetryOptions(turn_s=turn_s)  # type: ignore[arg-type]
