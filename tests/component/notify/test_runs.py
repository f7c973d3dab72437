"""An observer runs once for each change, sees the newest value, and its run is a transaction like any other."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import perco
from perco.protocol import claim
from perco.storage import NOTIFY, WRITE, Mutation
from tests.component.notify.kit import (
    OPTIONS,
    HoldingStore,
    Web,
    client,
    get,
    memory,
    nothing_is_left,
    notified,
    put,
    run_seeded,
    settle,
    tablets_cells,
)
from tests.support.places import local_of

Txn = perco.Transaction
Change = perco.Change[Any, Any]


async def test_an_observer_runs_once_for_a_change(web: Web) -> None:  # N1, N3
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        commit_ts = await put(db, web.body, "a", "hello")
        await settle(db)
        assert seen == [perco.Change("a", "hello", commit_ts, 1, commit_ts)]
        assert await get(db, web.count, "count/a") == 1
        assert worker.statistics()["count"].commits == 1
        assert nothing_is_left(db)


async def test_it_runs_for_what_was_written_before_the_worker_began(web: Web) -> None:  # N1
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for key in ("a", "k", "z"):
            await put(db, web.body, key, key)
        assert len(notified(db)) == 3
        async with db.worker():
            await settle(db)
    assert sorted(change.key for change in seen) == ["a", "k", "z"]


async def test_each_change_of_a_cell_is_a_change(web: Web) -> None:  # N3
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        for n in range(5):
            await put(db, web.body, "a", str(n))
            await settle(db)
        assert [change.value for change in seen] == ["0", "1", "2", "3", "4"]
        assert await get(db, web.count, "count/a") == 5


async def test_writing_the_same_value_again_is_a_change(web: Web) -> None:  # N1
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        for _ in range(3):
            await put(db, web.body, "a", "same")
            await settle(db)
    assert len(seen) == 3


async def test_a_delete_is_a_change_without_a_value(web: Web) -> None:  # N1
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "hello")
        await settle(db)
        deleted = await put(db, web.body, "a", None)
        await settle(db)
        assert seen[1:] == [perco.Change("a", None, deleted, 1, deleted)]
        await put(db, web.body, "never", None)
        await settle(db)
        assert (seen[2].key, seen[2].value) == ("never", None)


async def test_long_values_arrive_whole(web: Web) -> None:  # N1: they do not ride in the record
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "long " * 10_000)
        await settle(db)
    assert [change.value for change in seen] == ["long " * 10_000]


async def test_columns_without_observers_wake_nobody(web: Web) -> None:  # N1
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.size, "a", 3)
        assert notified(db) == []
        await settle(db)
    assert seen == []


async def test_a_transaction_that_is_discarded_or_conflicts_notifies_nobody(web: Web) -> None:  # N1
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        gone = await db.begin()
        gone.set(web.body, "a", "hello")
        gone.discard()
        one, two = await db.begin(), await db.begin()
        one.set(web.body, "b", "one")
        two.set(web.body, "b", "two")
        two.set(web.body, "z", "two")
        await one.commit()
        with pytest.raises(perco.WriteConflict):
            await two.commit()
        await settle(db)
    assert [(change.key, change.value) for change in seen] == [("b", "one")]


# ---------------------------------------------------------------- several observers


async def test_several_observers_of_a_column_run_once_each(web: Web) -> None:  # N11
    seen = {id: web.counting(web.body, id=id) for id in ("one", "two", "three")}
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "hello")
        await put(db, web.body, "z", "hello")
        await settle(db)
    for changes in seen.values():
        assert sorted(change.key for change in changes) == ["a", "z"]


async def test_the_first_to_finish_leaves_the_others_their_work(web: Web) -> None:  # N11
    quick = web.counting(web.body, id="quick")
    slow = web.counting(web.body, id="slow")
    fails = True

    @web.observe(web.body, id="failing")
    async def failing(txn: Txn, change: Change) -> None:
        if fails:
            raise ZeroDivisionError

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "hello")
        await trio.sleep(1.0)
        assert (len(quick), len(slow)) == (1, 1)
        assert [len(notified(db, id)) for id in ("quick", "slow", "failing")] == [0, 0, 1]
        fails = False
        await settle(db)
        assert (len(quick), len(slow)) == (1, 1), "the one that failed took nobody with it"


async def test_observers_of_one_row_see_each_others_work_or_conflict(web: Web) -> None:  # N3, T7
    """Ten observers of one cell all write one counter: they conflict with each other until all are through."""
    for n in range(10):

        @web.observe(web.body, id=f"o{n}")
        async def add(txn: Txn, change: Change) -> None:
            await web.add(txn, "all")

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        for key in ("a", "k", "z"):
            await put(db, web.body, key, key)
        await settle(db)
        assert await get(db, web.count, "all") == 30


# ---------------------------------------------------------------- collapsing


async def test_many_writes_collapse_into_one_run_that_sees_the_newest(web: Web) -> None:  # N4
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for n in range(10):
            newest = await put(db, web.body, "a", str(n))
        assert len(notified(db)) == 10
        async with db.worker() as worker:
            await settle(db)
            assert [(change.value, change.commit_ts) for change in seen] == [("9", newest)]
            counted = worker.statistics()["count"]
            assert (counted.runs, counted.commits, counted.collapsed) == (1, 1, 9)


async def test_the_run_knows_the_earliest_cause(web: Web) -> None:  # N9
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        first = await put(db, web.body, "a", "0")
        await put(db, web.body, "a", "1")
        async with db.worker():
            await settle(db)
    assert [change.cause for change in seen] == [first]


async def test_more_cells_than_one_run_takes_are_taken_by_the_next(  # N2, N4
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "COVERS_MAX", 3)
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for n in range(10):
            await put(db, web.body, "a", str(n))
        async with db.worker():
            await settle(db)
            assert [change.value for change in seen] == ["9"], "the rest was handled, not run"
            assert nothing_is_left(db)


# ---------------------------------------------------------------- changes during a run


class Paused:
    """An observer that stops in its first run until it is told to go on."""

    def __init__(self, web: Web, column: perco.Column[Any, Any]) -> None:
        self.values: list[Any] = []
        self.running, self.go_on = trio.Event(), trio.Event()

        @web.observe(column, id="paused")
        async def observe(txn: Txn, change: Change) -> None:
            self.values.append(change.value)
            if not self.running.is_set():
                self.running.set()
                await self.go_on.wait()
            txn.set(web.note, change.key, f"saw {change.value}")


async def test_a_change_made_during_a_run_is_run_again(web: Web) -> None:  # N2, N3
    paused = Paused(web, web.body)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "old")
        await paused.running.wait()
        newer = await put(db, web.body, "a", "new")
        assert len(notified(db)) == 2
        paused.go_on.set()
        await settle(db)
        assert paused.values == ["old", "new"]
        assert await get(db, web.note, "a") == "saw new"
        acks = [ts for _, _, column, ts, _ in tablets_cells(local_of(db).store, WRITE) if column & 0xFFFF]
        assert len(acks) == 2
        assert min(acks) > newer, "the first run committed although the cell had changed: it read a snapshot"


async def test_the_first_runs_ack_leaves_the_newer_notify_cell(web: Web) -> None:  # N2
    paused = Paused(web, web.body)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        async with db.worker():
            await put(db, web.body, "a", "old")
            await paused.running.wait()
        assert paused.values == ["old"], "ended with the worker, without an ack"
        newer = await put(db, web.body, "a", "new")
        txn = await db.begin()
        old = [ts for _, ts in notified(db) if ts < newer]
        assert len(old) == 1
        txn.discard()
        paused.go_on.set()
        async with db.worker():
            await settle(db)
        assert paused.values == ["old", "new"]


async def test_a_change_while_the_run_commits_is_run_again(web: Web) -> None:  # N2: exactly the cells that it saw
    seen = web.counting(web.body, id="count")

    def commits_the_ack(mutation: Mutation) -> bool:
        return any(write[0] == NOTIFY and write[3] is None for _, _, writes in mutation.rows for write in writes)

    async with client(memory(), web.schema, sweeping=False) as first:
        store = HoldingStore(local_of(first).store, commits_the_ack)
        async with client(local_of(first), web.schema, store=store) as db, db.worker():
            await put(db, web.body, "a", "before")
            await store.held.wait()  # its commit timestamp has been drawn
            await put(db, web.body, "a", "during")
            store.let_go()
            await settle(db)
            assert [change.value for change in seen] == ["before", "during"]
            assert await get(db, web.count, "count/a") == 2


# ---------------------------------------------------------------- Fluo's scenarios


async def test_ack_of_overlapping_loads(web: Web) -> None:  # N3 (FluoIT.testAck)
    """A load that began before the run committed, and commits after it, is a change of its own."""
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "1")
        late = await db.begin()
        late.set(web.note, "a", "n")
        await settle(db)
        await late.commit()  # of another column: nothing to do
        await settle(db)
        assert len(seen) == 1
        late = await db.begin()
        late.set(web.body, "a", "2")
        await settle(db)
        await late.commit()
        await settle(db)
        assert [change.value for change in seen] == ["1", "2"]


async def test_a_load_that_began_before_the_run_and_commits_during_it(web: Web) -> None:  # N3 (FluoIT.testAck2)
    paused = Paused(web, web.body)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "1")
        early = await db.begin()
        early.set(web.body, "a", "2")
        await paused.running.wait()
        await early.commit()
        paused.go_on.set()
        await settle(db)
        assert paused.values == ["1", "2"]


async def test_two_loads_before_the_run_are_one_change(web: Web) -> None:  # N4 (FluoIT.testAck3)
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await put(db, web.body, "a", "1")
        await put(db, web.body, "a", "2")
        async with db.worker() as worker:
            await settle(db)
            assert [change.value for change in seen] == ["2"]
            await put(db, web.body, "a", "3")
            await settle(db)
            assert worker.statistics()["count"].commits == 2


async def test_an_observer_may_write_the_column_it_observes(web: Web) -> None:  # N3 (FluoIT.testWriteObserved)
    values = []

    @web.observe(web.body, id="strip")
    async def strip(txn: Txn, change: Change) -> None:
        values.append(change.value)
        if change.value != change.value.strip():
            txn.set(web.body, change.key, change.value.strip())

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "  hello ")
        await settle(db)
        assert values == ["  hello ", "hello"]
        assert await get(db, web.body, "a") == "hello"
        await put(db, web.body, "a", " again")
        await settle(db)
        assert values[2:] == [" again", "again"]
        assert nothing_is_left(db)


async def test_an_observer_notifies_itself_until_it_is_done(web: Web) -> None:  # N9 (SelfNotificationIT)
    changes: list[Change] = []

    @web.observe(web.size, id="down")
    async def down(txn: Txn, change: Change) -> None:
        changes.append(change)
        await web.add(txn, "exported")
        if change.value > 1:
            txn.set(web.size, change.key, change.value - 1)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        root = await put(db, web.size, "a", 7)
        await settle(db)
        assert [change.value for change in changes] == [7, 6, 5, 4, 3, 2, 1]
        assert {change.cause for change in changes} == {root}
        assert await get(db, web.count, "exported") == 7


async def test_an_observer_that_writes_nothing_is_acknowledged(web: Web) -> None:  # N2 (WeakNotificationIT.testNOOP)
    runs = 0

    @web.observe(web.body, id="noop")
    async def noop(txn: Txn, change: Change) -> None:
        nonlocal runs
        runs += 1

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "hello")
        await settle(db)
        assert nothing_is_left(db)
        assert worker.statistics()["noop"].commits == 1
    assert runs == 1


async def test_a_chain_of_three(web: Web) -> None:  # N9 (ObserverConfigIT)
    """body -> size -> count -> note, over tablets and tables."""
    causes: list[tuple[str, int]] = []

    @web.observe(web.body, id="measure")
    async def measure(txn: Txn, change: Change) -> None:
        causes.append(("measure", change.cause))
        txn.set(web.size, "z" + change.key, len(change.value))

    @web.observe(web.size, id="sum")
    async def add(txn: Txn, change: Change) -> None:
        causes.append(("sum", change.cause))
        txn.set(web.count, change.key[1:], change.value * 2)

    @web.observe(web.count, id="tell")
    async def tell(txn: Txn, change: Change) -> None:
        causes.append(("tell", change.cause))
        txn.set(web.note, change.key, f"twice the size is {change.value}")

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        root = await put(db, web.body, "a", "hello")
        await settle(db)
        assert await get(db, web.note, "a") == "twice the size is 10"
        assert causes == [("measure", root), ("sum", root), ("tell", root)]
        assert nothing_is_left(db)


async def test_all_cells_of_a_transaction_over_tablets_are_observed(web: Web) -> None:  # N1 (StrongNotificationIT)
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        async with db.transaction() as txn:
            for key in ("a", "i", "q"):
                txn.set(web.body, key, key)
        await settle(db)
        assert sorted(change.key for change in seen) == ["a", "i", "q"]
        assert {change.commit_ts for change in seen} == {txn.commit_ts}


async def test_loaders_and_observers_that_write_the_same_cells(web: Web) -> None:  # N3, T7
    """Both count in one cell: every one of them counts exactly once."""

    @web.observe(web.body, id="add")
    async def add(txn: Txn, change: Change) -> None:
        await web.add(txn, "all")

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():

        async def load(n: int) -> None:
            async def write(txn: Txn) -> None:
                txn.set(web.body, f"{n:03}", "hello")
                await web.add(txn, "all")

            await db.run(write)

        async with trio.open_nursery() as nursery:
            for n in range(40):
                nursery.start_soon(load, n)
        await settle(db)
        assert await get(db, web.count, "all") == 80


# ---------------------------------------------------------------- many at once


async def test_hundreds_of_runs_may_wait_at_once(web: Web) -> None:  # architecture: a run is a task, not a thread
    running = most = 0

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(100.0)
        running -= 1
        txn.set(web.size, change.key, len(change.value))

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        async with db.transaction() as txn:
            for n in range(400):
                txn.set(web.body, f"{n:03}", "hello")
        async with db.worker(concurrency=400, scanners=4) as worker:
            await settle(db)
            assert most == 400
            assert worker.statistics()["slow"].commits == 400
        async with db.snapshot() as snap:
            assert len(await snap.scan(web.docs, columns=[web.size]).all()) == 400


async def test_no_more_run_than_were_asked_for(web: Web) -> None:
    running = most = 0

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(1.0)
        running -= 1

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        async with db.transaction() as txn:
            for n in range(50):
                txn.set(web.body, f"{n:03}", "hello")
        async with db.worker(concurrency=7, scanners=3):
            await settle(db)
    assert most == 7


@pytest.mark.parametrize("seed", range(4))
def test_collisions_end_with_exact_counts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:  # N3, N4 (CollisionIT)
    """20 loaders write 5 rows 15 times each; an observer totals the differences to what it has counted before."""

    async def main() -> None:
        web = Web()

        @web.observe(web.size, id="total")
        async def total(txn: Txn, change: Change) -> None:
            counted = await txn.get(web.count, change.key) or 0
            txn.set(web.count, change.key, change.value)
            await web.add(txn, "total", change.value - counted)

        async with perco.open("memory:", web.schema, options=perco.Options(seed=seed)) as db, db.worker() as worker:

            async def loader(number: int) -> None:
                async def write(txn: Txn, key: str) -> None:
                    txn.set(web.size, key, (await txn.get(web.size, key) or 0) + 1)

                for n in range(15):
                    await db.run(write, "adhpz"[(number + n) % 5])

            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(loader, number)
            await settle(db)
            assert [await get(db, web.size, key) for key in "adhpz"] == [60] * 5
            assert await get(db, web.count, "total") == 300
            counted = worker.statistics()["total"]
            assert counted.commits + counted.collapsed == 300
            assert db.statistics().counters.conflicts > 0, "they did collide"
            assert nothing_is_left(db)

    run_seeded(monkeypatch, seed, main)
