"""Two clients with a worker each on one store: at most one committed run for a change, whoever is faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.notify.options import ObserverCounters
from perco.protocol.records import pack_cause
from perco.storage import NOTIFY, WRITE, Mutation
from tests.component.notify.kit import (
    LONG_S,
    OPTIONS,
    ByHand,
    Web,
    client,
    get,
    nothing_is_left,
    notified,
    put,
    run_seeded,
    settle,
    tablets_cells,
)
from tests.support import everywhere
from tests.support.places import local_of

Txn = perco.Transaction
Change = perco.Change[Any, Any]


class Meeting:
    """Lets the first two who come go on only when both are there."""

    def __init__(self) -> None:
        self.came = 0
        self._both = trio.Event()

    async def wait(self) -> None:
        self.came += 1
        if self.came == 2:
            self._both.set()
        if self.came <= 2:
            await self._both.wait()


def acks(db: perco.Database) -> int:
    """How many acks were ever committed."""
    return sum(1 for _, _, column, _, _ in tablets_cells(local_of(db).store, WRITE) if column & 0xFFFF)


def meeting_observer(web: Web, meeting: Meeting, writes: Callable[[Txn, Change], Awaitable[None]]) -> list[int]:
    runs: list[int] = []

    @web.observe(web.body, id="twin")
    async def twin(txn: Txn, change: Change) -> None:
        runs.append(txn.start_ts)
        await meeting.wait()
        await writes(txn, change)

    return runs


async def both_run(web: Web, one: perco.Database, two: perco.Database) -> list[ObserverCounters]:
    """Row locks would keep one of the two out (N8): so both are told to run."""
    twins = [ByHand(one), ByHand(two)]
    async with trio.open_nursery() as nursery:
        for twin in twins:
            nursery.start_soon(twin.run, web.body, "a")
    await settle(one)
    return [twin.counted("twin") for twin in twins]


async def test_of_two_clients_that_run_one_notification_one_acknowledges_it(web: Web) -> None:  # N3
    async def count(txn: Txn, change: Change) -> None:
        await web.add(txn, "runs")

    runs = meeting_observer(web, Meeting(), count)
    async with (
        perco.open("memory:", web.schema, options=OPTIONS) as one,
        client(local_of(one), web.schema, beside=one) as two,
    ):
        await put(one, web.body, "a", "hello")
        counted = await both_run(web, one, two)
        assert len(runs) >= 2
        assert sum(each.commits for each in counted) == 1
        assert sum(each.conflicts for each in counted) >= 1, "the other lost"
        assert acks(one) == 1
        assert await get(one, web.count, "runs") == 1
        assert nothing_is_left(one)


async def test_twins_that_write_nothing_but_the_ack(web: Web) -> None:  # N3: the ack alone decides
    async def nothing(txn: Txn, change: Change) -> None: ...

    meeting_observer(web, Meeting(), nothing)
    async with (
        perco.open("memory:", web.schema, options=OPTIONS) as one,
        client(local_of(one), web.schema, beside=one) as two,
    ):
        await put(one, web.body, "a", "hello")
        counted = await both_run(web, one, two)
        assert sum(each.commits for each in counted) == 1
        assert acks(one) == 1
        assert nothing_is_left(one)


async def test_twins_in_one_worker_without_row_locks(web: Web) -> None:  # N3, N8: row locks save work, nothing else
    async def count(txn: Txn, change: Change) -> None:
        await web.add(txn, "runs")

    runs = meeting_observer(web, Meeting(), count)
    bare = perco.WorkerOptions(concurrency=4, scanners=2, row_locks=False)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await put(db, web.body, "a", "hello")
        async with db.worker(options=bare) as worker:
            await settle(db)
            assert worker.statistics()["twin"].commits == 1
        assert len(runs) >= 2
        assert await get(db, web.count, "runs") == 1


async def test_with_row_locks_one_worker_has_no_twins(web: Web) -> None:  # N8
    running: Counter[str] = Counter()

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        running[change.key] += 1
        assert running[change.key] == 1
        await trio.sleep(1.0)
        running[change.key] -= 1

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for key in "abcdefghijklmnopqrstuvwxyz":
            await put(db, web.body, key, key)
        async with db.worker(concurrency=16, scanners=8) as worker:
            await settle(db)
            counted = worker.statistics()["slow"]
            assert (counted.runs, counted.conflicts, counted.failures) == (26, 0, 0)


async def test_the_one_who_comes_late_finds_the_ack_and_does_not_run(web: Web) -> None:  # N3 (FailureIT.testAcks)
    """A notify cell that comes back after its change was handled is removed, not run."""
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        commit_ts = await put(db, web.body, "a", "hello")
        await settle(db)
        entry = inside(db).catalogue.observers["count"]
        column = next(column for _, _, column, _, _ in tablets_cells(local_of(db).store, WRITE) if column & 0xFFFF)
        assert column & 0xFFFF == entry.number
        again = (NOTIFY, column, commit_ts, pack_cause(commit_ts, 0))
        await local_of(db).store.apply([Mutation("docs", ((b"a", (), (again,)),))])
        assert len(notified(db)) == 1
        inside(db).driver.notified()
        await settle(db)
        assert len(seen) == 1
        assert nothing_is_left(db)
        assert worker.statistics()["count"].commits == 1


async def test_a_change_that_only_one_of_the_twins_saw_is_run_again(web: Web) -> None:  # N2, N3
    values = []
    waiting, go_on = trio.Event(), trio.Event()

    @web.observe(web.body, id="twin")
    async def twin(txn: Txn, change: Change) -> None:
        values.append(change.value)
        if change.value == "old" and not waiting.is_set():
            waiting.set()
            await go_on.wait()
        await web.add(txn, f"runs/{change.value}")

    async with (
        perco.open("memory:", web.schema, options=OPTIONS) as one,
        client(local_of(one), web.schema, beside=one) as two,
    ):
        async with trio.open_nursery() as nursery:
            await put(one, web.body, "a", "old")
            nursery.start_soon(ByHand(one).run, web.body, "a")
            await waiting.wait()
            await put(one, web.body, "a", "new")
            await ByHand(two).run(web.body, "a")  # both changes, while the first client's run sleeps
            assert values == ["old", "new"]
            go_on.set()
        await settle(one)
        assert values == ["old", "new"], "the sleeper's commit was refused, and there was nothing left to run"
        assert await get(one, web.count, "runs/old") is None
        assert await get(one, web.count, "runs/new") == 1


@pytest.mark.parametrize("seed", range(12))
def test_each_change_is_counted_once_by_two_workers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """N3. Without an owner the two share no memory, so each takes the other's locks for dead and breaks them (L2)."""

    async def main() -> None:
        web = Web()

        @web.observe(web.body, id="count")
        async def count(txn: Txn, change: Change) -> None:
            await web.add(txn, change.key)
            txn.set(web.size, "z" + change.key, len(change.value))

        @web.observe(web.size, id="sum")
        async def add(txn: Txn, change: Change) -> None:
            await web.add(txn, "sizes")

        async with (
            perco.open("memory:", web.schema, options=perco.Options(seed=seed)) as one,
            client(local_of(one), web.schema, beside=one, options=perco.Options(seed=seed + 1)) as two,
            one.worker() as first,
            two.worker() as second,
        ):

            async def load(db: perco.Database, keys: str) -> None:
                for key in keys:
                    await put(db, web.body, key, key)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(load, one, "abhipq")
                nursery.start_soon(load, two, "cdjkrs")
            with trio.fail_after(LONG_S):
                while not nothing_is_left(one):
                    # Each client is woken by its own commits only: as if a wake from elsewhere had come.
                    inside(one).driver.notified()
                    inside(two).driver.notified()
                    await trio.sleep(1.0)
            assert [await get(one, web.count, key) for key in "abcdhijkpqrs"] == [1] * 12
            assert await get(one, web.count, "sizes") == 12
            commits = [worker.statistics()[id].commits for worker in (first, second) for id in ("count", "sum")]
            assert sum(commits) == 24
            broken = sum(db.statistics().counters.rolled_back for db in (one, two))
            # Clients ask the owner who lives (L1). A run's first read may find a lock that a failed attempt of the same
            # process is just releasing, and roll it back, too.
            assert broken > 0 or everywhere.over in everywhere.CLIENTS
            assert acks(one) == 24

    run_seeded(monkeypatch, seed, main)
