"""Runs of an observer that share a transaction (N20); time is virtual."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.notify import batches
from perco.notify.runners import Ready, Runners
from perco.notify.worker import Worker
from perco.notify.workers import WorkerHandle
from perco.protocol.claim import COVERS_MAX
from perco.storage import WRITE
from tests.component.notify.kit import (
    OPTIONS,
    Web,
    get,
    local_of,
    nothing_is_left,
    put,
    run_seeded,
    settle,
    tablets_cells,
    until,
)
from tests.support import everywhere

Txn = perco.Transaction
Change = perco.Change[Any, Any]

KEYS = [f"{first}{n}" for first in "akz" for n in range(12)]  # in three tablets


def shares() -> bool:
    """Whether runs share transactions here: only where the rows are read in the process."""
    return everywhere.over == everywhere.OWNER


async def fill(db: perco.Database, web: Web, keys: list[str]) -> int:
    """All keys in one transaction; returns its commit_ts."""

    async def write(txn: Txn) -> Txn:
        for key in keys:
            txn.set(web.body, key, f"text of {key}")
        return txn

    return (await db.run(write)).commit_ts


def have_shared(worker: WorkerHandle, *ids: str) -> bool:
    """Whether runs of these observers have shared transactions as far as they can here."""
    return all((worker.statistics()[id].batched > 0) == shares() for id in ids)


def claims(worker: WorkerHandle) -> int:
    return sum(scanner.claims for scanner in worker.scanner_statistics())


async def counts(db: perco.Database, web: Web, id: str) -> dict[str, int]:
    """How often each key's run has committed, as `Web.counting` counts in the store."""
    async with db.snapshot() as snap:
        rows = [row async for row in snap.scan(web.counts, prefix=f"{id}/")]
    return {row.key.removeprefix(f"{id}/"): row[web.count] or 0 for row in rows}


@pytest.mark.parametrize("one_step", [True, False])
async def test_changes_that_wait_share_transactions_and_each_is_handled_once(web: Web, one_step: bool) -> None:
    seen = web.counting(web.body, id="count", batch=8)
    options = perco.Options(seed=1, backfill=OPTIONS.backfill, commit=perco.options.CommitOptions(one_step=one_step))
    async with perco.open("memory:", web.schema, options=options) as db:
        ts = await fill(db, web, KEYS)
        async with db.worker() as worker:
            await settle(db)
            found = worker.statistics()["count"]
        assert await counts(db, web, "count") == dict.fromkeys(KEYS, 1)
        assert sorted((change.key, change.value, change.commit_ts, change.cause) for change in seen) == [
            (key, f"text of {key}", ts, ts) for key in sorted(KEYS)
        ]
        assert found.commits == found.runs == len(KEYS)
        assert (found.batched >= len(KEYS) // 2) == shares()
        assert nothing_is_left(db)
        transactions = {row.commit_ts(web.count) for row in [await _row(db, web, key) for key in KEYS]}
        assert (len(transactions) <= len(KEYS) // 2) == shares()
        assert len(KEYS) // 8 <= len(transactions)


async def _row(db: perco.Database, web: Web, key: str) -> perco.Row[str]:
    async with db.snapshot() as snap:
        return await snap.row(web.counts, f"count/{key}")


async def test_without_a_batch_each_run_has_a_transaction_of_its_own(web: Web) -> None:
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, KEYS)
        async with db.worker() as worker:
            await settle(db)
            assert worker.statistics()["count"].batched == 0


async def test_a_task_begins_for_each_batch_and_not_for_each_row(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that finds no row costs as much as a part of a run."""
    began = 0
    serve = Runners._serve

    async def counted(runners: Runners, nursery: trio.Nursery) -> None:
        nonlocal began
        began += 1
        await serve(runners, nursery)

    monkeypatch.setattr(Runners, "_serve", counted)
    web.counting(web.body, id="count", batch=16)
    keys = [f"a{n:02}" for n in range(32)]
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, keys)
        async with db.worker(scanners=1):
            await settle(db)
        assert await counts(db, web, "count") == dict.fromkeys(keys, 1)
    assert (began <= 4) == shares(), f"{began} tasks"


async def test_a_row_that_cannot_share_a_batch_does_not_wait_for_its_end() -> None:
    """The task that could have taken the row with others has left it, and lets another one begin."""
    table = perco.Table("both", key=perco.TEXT)
    first, second = table.column("first", perco.INT64), table.column("second", perco.INT64)
    schema, ran = perco.Schema(table), trio.Event()

    @schema.observe(first, id="waits", batch=16)
    async def waits(txn: Txn, change: Change) -> None:
        await ran.wait()

    @schema.observe(second, id="quick", batch=16)
    async def quick(txn: Txn, change: Change) -> None:
        ran.set()

    async with perco.open("memory:", schema, options=OPTIONS) as db:
        async with db.transaction() as txn:
            txn.set(first, "a", 1)
            txn.set(second, "b", 1)
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert {id: each.commits for id, each in worker.statistics().items()} == {"waits": 1, "quick": 1}


@pytest.mark.parametrize("fails", ["raises", "retries", "gives up", "writes too much", "discards"])
async def test_a_change_that_fails_leaves_the_others_alone(web: Web, fails: str) -> None:
    tries = Counter[str]()

    @web.observe(web.body, id="sizes", batch=16, attempts=2, writes=[web.size])
    async def sizes(txn: Txn, change: Change) -> None:
        tries[change.key] += 1
        txn.set(web.size, change.key, len(change.value or ""))
        if change.key != "a5":
            return
        if fails == "raises":
            raise ValueError("no good")
        if fails == "retries" and tries["a5"] < 4:
            raise perco.Retry(after_s=5.0)
        if fails == "gives up":
            raise perco.GiveUp("no good")
        if fails == "writes too much":
            txn.set(web.note, change.key, "not declared")
        if fails == "discards":
            txn.discard()

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, KEYS)
        async with db.worker() as worker:
            await settle(db)
            assert have_shared(worker, "sizes")
        for key in KEYS:
            size = await get(db, web.size, key)
            assert size == (None if key == "a5" and fails != "retries" else len(f"text of {key}")), key
        failed = [each.key for each in await db.failed()]
        assert failed == ([] if fails == "retries" else ["a5"])
        assert await get(db, web.note, "a5") is None


async def test_a_conflict_is_left_to_runs_of_their_own(web: Web) -> None:
    began, go_on = trio.Event(), trio.Event()
    tries = Counter[str]()

    @web.observe(web.body, id="sizes", batch=16)
    async def sizes(txn: Txn, change: Change) -> None:
        tries[change.key] += 1
        total = await txn.get(web.count, "total") or 0
        txn.set(web.size, change.key, len(change.value or ""))
        if change.key == "a0":
            txn.set(web.count, "total", total + 1)
            began.set()
            await go_on.wait()

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, KEYS[:12])
        async with db.worker() as worker:
            await began.wait()
            await put(db, web.count, "total", 41)
            go_on.set()
            await settle(db)
            assert claims(worker) == 12 or not shares(), "no row was looked for again"
        assert await get(db, web.count, "total") == 42
        assert [await get(db, web.size, key) for key in KEYS[:12]] == [len(f"text of {key}") for key in KEYS[:12]]
        assert tries["a0"] == 2
        assert nothing_is_left(db)


async def test_consequences_have_the_causes_that_they_would_have_had_alone(web: Web) -> None:
    seen: dict[str, Change] = {}

    @web.observe(web.body, id="sizes", batch=16)
    async def sizes(txn: Txn, change: Change) -> None:
        txn.set(web.size, change.key, len(change.value or ""))
        txn.set(web.note, f"shared {change.key[0]}", change.key)

    @web.observe(web.size, id="next", batch=16)
    async def follow(txn: Txn, change: Change) -> None:
        seen[change.key] = change

    shared: dict[str, Change] = {}

    @web.observe(web.note, id="shared")
    async def one_of_many(txn: Txn, change: Change) -> None:
        shared[change.key] = change

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        roots = {key: await put(db, web.body, key, "some text") for key in KEYS}
        async with db.worker() as worker:
            await settle(db)
            assert have_shared(worker, "sizes", "next")
        assert {key: (change.cause, change.depth) for key, change in seen.items()} == {
            key: (root, 2) for key, root in roots.items()
        }
        for key, change in shared.items():  # N4: it has several causes, and carries the oldest of the last commit's
            assert change.cause in [root for each, root in roots.items() if each[0] == key[-1]]
            assert change.cause <= roots[change.value], "N7: no wait for the cause of any of them ends too soon"


async def test_what_is_read_ahead_or_cached_is_right_in_each_call(web: Web) -> None:
    @web.observe(web.body, id="sizes", batch=16)
    async def sizes(txn: Txn, change: Change) -> None:
        assert await txn.get(web.body, change.key) == change.value
        total = await txn.get(web.count, "total") or 0
        txn.set(web.count, "total", total + len(change.value or ""))
        txn.set(web.size, change.key, total)

    ahead = perco.options.PrefetchOptions(cache=True, predict=True)
    options = perco.Options(seed=1, backfill=OPTIONS.backfill, prefetch=ahead)
    async with perco.open("memory:", web.schema, options=options) as db, db.worker(scanners=1) as worker:
        for _ in range(3):
            await fill(db, web, KEYS)
            await settle(db)
        assert have_shared(worker, "sizes")
        assert await get(db, web.count, "total") == 3 * sum(len(f"text of {key}") for key in KEYS)
        assert worker.statistics()["sizes"].failures == 0


async def test_a_cell_that_two_calls_write_carries_the_earlier_cause(web: Web) -> None:  # N7
    causes: dict[str, list[int]] = {}

    @web.observe(web.body, id="join", batch=16)
    async def join(txn: Txn, change: Change) -> None:
        letter = change.key[0]
        txn.set(web.note, letter, f"{await txn.get(web.note, letter) or ''} {change.key}")

    @web.observe(web.note, id="hear")
    async def hear(txn: Txn, change: Change) -> None:
        causes.setdefault(change.key, []).append(change.cause)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        roots = {key: await put(db, web.body, key, "some text") for key in KEYS}
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert have_shared(worker, "join")
        for letter, found in causes.items():
            keys = (await get(db, web.note, letter)).split()
            assert sorted(keys) == sorted(key for key in KEYS if key[0] == letter)
            assert min(found) == min(roots[key] for key in keys)


async def test_signals_of_a_batch_carry_their_causes() -> None:
    docs = perco.Table("docs", key=perco.TEXT)
    body, group = docs.column("body", perco.TEXT), perco.Table("groups", key=perco.TEXT)
    changed = group.signal("changed")
    schema = perco.Schema(docs, group)
    causes: dict[str, set[int]] = {}

    @schema.observe(body, id="raise", batch=16)
    async def raises(txn: Txn, change: Change) -> None:
        txn.signal(changed, change.key[-1])

    @schema.observe(changed, id="hear")
    async def hear(txn: Txn, change: Change) -> None:
        causes.setdefault(change.key, set()).add(change.cause)

    async with perco.open("memory:", schema, options=OPTIONS) as db:
        roots = [await put(db, body, f"a{n}", "text") for n in range(4)]
        async with db.worker() as worker:
            await settle(db)
            assert have_shared(worker, "raise")
    assert causes == {str(n): {root} for n, root in enumerate(roots)}


async def test_a_change_whose_cell_another_call_has_written_runs_by_itself(web: Web) -> None:
    seen: list[tuple[str, str, str | None]] = []

    @web.observe(web.body, id="push", batch=16)
    async def push(txn: Txn, change: Change) -> None:
        seen.append((change.key, change.value, await txn.get(web.body, change.key)))
        if change.value == "push":
            txn.set(web.body, f"a{int(change.key[1:]) + 1}", "pushed")

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:

        async def write(txn: Txn) -> None:
            for n in range(8):
                txn.set(web.body, f"a{n}", "own" if n % 2 else "push")

        await db.run(write)
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert have_shared(worker, "push")
        assert [await get(db, web.body, f"a{n}") for n in range(8)] == ["push", "pushed"] * 4
        assert {key for key, value, _ in seen if value == "pushed"} == {"a1", "a3", "a5", "a7"}
        assert [each for each in seen if each[1] != each[2]] == []
        assert nothing_is_left(db)


async def test_a_function_that_commits_ends_its_batch(web: Web) -> None:
    @web.observe(web.body, id="count", batch=16)
    async def count(txn: Txn, change: Change) -> None:
        await web.add(txn, f"count/{change.key}")
        if change.key in ("a2", "a7"):
            await txn.commit()

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, KEYS)
        async with db.worker() as worker:
            await settle(db)
            assert claims(worker) == len(KEYS) or not shares(), "no row was looked for again"
        assert await counts(db, web, "count") == dict.fromkeys(KEYS, 1)
        assert nothing_is_left(db)


async def test_a_batch_that_fails_makes_the_next_ones_smaller_for_a_while(web: Web) -> None:
    fails = True

    @web.observe(web.body, id="sizes", batch=16, backoff_s=(1.0, 1.0))
    async def length(txn: Txn, change: Change) -> None:
        if fails:
            raise perco.Retry(after_s=1.0)
        txn.set(web.size, change.key, len(change.value or ""))

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(scanners=1) as worker:
        [scanner] = worker.scanners
        size = partial(scanner._runners._batches.size, inside(db).catalogue.observers["sizes"].number)
        sizes = [size()]
        for letter in "akz":
            await fill(db, web, [key for key in KEYS if key[0] == letter])
            await trio.sleep(0.2)
            sizes.append(size())
        if shares():
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] == 16
            assert sizes[-1] <= 4
        fails = False
        await settle(db)
        for _ in range(40):
            await fill(db, web, KEYS)
            await settle(db)
        assert size() == 16 or not shares()


async def test_a_run_that_asks_for_another_try_is_no_success(web: Web) -> None:
    """As long as all runs ask for it, none is tried again in a batch."""

    @web.observe(web.body, id="later", batch=2)
    async def later(txn: Txn, change: Change) -> None:
        raise perco.Retry(after_s=100.0)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, KEYS)
        async with db.worker(scanners=1) as worker:
            await until(lambda: worker.statistics()["later"].later == len(KEYS))
            [scanner] = worker.scanners
            assert scanner._runners._batches.size(inside(db).catalogue.observers["later"].number) == 1, "N20"


async def test_each_run_of_a_batch_is_told_with_its_share_of_the_time(web: Web) -> None:
    told: dict[Any, float] = {}

    @web.observe(web.body, id="slow", batch=4)
    async def slow(txn: Txn, change: Change) -> None:
        await trio.sleep(2.0)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, KEYS[:4])
        async with db.worker(scanners=1) as worker:
            worker.on_run(lambda id, key, seconds: told.update({key: seconds}))
            await settle(db)
            assert have_shared(worker, "slow")
            assert worker.statistics()["slow"].seconds == pytest.approx(8.0, abs=0.5)
    assert told == dict.fromkeys(KEYS[:4], pytest.approx(2.0, abs=0.1))


async def test_a_batch_does_not_grow_over_what_a_transaction_may_write(web: Web) -> None:
    """Its calls stop early enough, so no call is made in vain."""
    tries = Counter[str]()

    @web.observe(web.body, id="many", batch=16)
    async def many(txn: Txn, change: Change) -> None:
        tries[change.key] += 1
        for n in range(9):
            txn.set(web.count, f"{change.key}/{n}", n)

    options = replace(OPTIONS, transaction=perco.options.TransactionOptions(cells_max=60))
    async with perco.open("memory:", web.schema, options=options) as db:
        await fill(db, web, KEYS)
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert have_shared(worker, "many")
        assert tries == dict.fromkeys(KEYS, 1)


@pytest.mark.parametrize("batch", [0, 257, True, 2.0, "8"])
def test_a_batch_that_is_no_number_of_runs_is_refused(web: Web, batch: Any) -> None:
    with pytest.raises(perco.UsageError, match="batch is"):
        web.counting(web.body, id="count", batch=batch)


class Groups:
    """Rows in two tables: a run for each row's body raises a signal of its group, whose run notes how many rows there
    are; a group "idle..." has no note."""

    def __init__(self, batch: int) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.body = self.docs.column("body", perco.TEXT)
        self.groups = perco.Table("groups", key=perco.TEXT, splits=["m"])
        self.changed, self.size = self.groups.signal("changed"), self.groups.column("size", perco.INT64)
        self.schema = perco.Schema(self.docs, self.groups)
        self.heard = Counter[str]()
        self.fails: Callable[[Txn, Change], None] = lambda txn, change: None

        @self.schema.observe(self.body, id="raise")
        async def raises(txn: Txn, change: Change) -> None:
            txn.signal(self.changed, change.key.partition("/")[0])

        @self.schema.observe(self.changed, id="hear", batch=batch)
        async def hear(txn: Txn, change: Change) -> None:
            self.heard[change.key] += 1
            self.fails(txn, change)
            if not change.key.startswith("idle"):
                rows = [row async for row in txn.scan(self.docs, prefix=f"{change.key}/")]
                txn.set(self.size, change.key, len(rows))

    async def fill(self, db: perco.Database, groups: list[str], rows: int = 3) -> None:
        async def write(txn: Txn) -> None:
            for group in groups:
                for n in range(rows):
                    txn.set(self.body, f"{group}/{n}", "text")

        await db.run(write)

    async def sizes(self, db: perco.Database) -> dict[str, int]:
        async with db.snapshot() as snap:
            return {row.key: row[self.size] or 0 async for row in snap.scan(self.groups)}


@pytest.mark.parametrize("one_step", [True, False])
async def test_signals_share_transactions(one_step: bool) -> None:  # N5
    groups = Groups(16)
    options = perco.Options(seed=1, backfill=OPTIONS.backfill, commit=perco.options.CommitOptions(one_step=one_step))
    async with perco.open("memory:", groups.schema, options=options) as db:
        await groups.fill(db, KEYS)
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert have_shared(worker, "hear")
        assert await groups.sizes(db) == dict.fromkeys(KEYS, 3)
        async with db.snapshot() as snap:
            commits = {row.commit_ts(groups.size) async for row in snap.scan(groups.groups)}
        assert (len(commits) < len(KEYS)) == shares()
        assert nothing_is_left(db)


@pytest.mark.parametrize("writes", [True, False])
async def test_each_signal_of_a_batch_is_handled_by_its_call(writes: bool) -> None:  # N2, N5
    groups = Groups(16)
    keys = KEYS if writes else [f"idle {key}" for key in KEYS]
    async with perco.open("memory:", groups.schema, options=OPTIONS) as db:
        async with db.transaction() as txn:
            for key in keys:
                txn.signal(groups.changed, key)
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert have_shared(worker, "hear")
        assert groups.heard == dict.fromkeys(keys, 1)
        assert await groups.sizes(db) == (dict.fromkeys(keys, 0) if writes else {})
        assert nothing_is_left(db)


async def test_signals_whose_runs_write_nothing_leave_no_records() -> None:  # N5
    groups = Groups(16)
    keys = [f"idle{n:02}" for n in range(16)]
    async with perco.open("memory:", groups.schema, options=OPTIONS) as db:
        await groups.fill(db, keys)
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert have_shared(worker, "hear")
            assert worker.statistics()["hear"].commits == worker.statistics()["hear"].runs
        assert set(groups.heard) == set(keys)
        assert [cell for cell in tablets_cells(local_of(db).store, WRITE) if cell[0] == "groups"] == []
        assert nothing_is_left(db)


@pytest.mark.parametrize("writes", [True, False])
async def test_a_signal_raised_by_another_call_of_its_batch_is_heard_once_more(writes: bool) -> None:  # N5
    """Whether its own call comes before or after that: the raise is of the commit, which its call did not see."""
    groups = Groups(16)
    keys = [f"{'' if writes else 'idle '}a{n}" for n in range(8)]
    raised, called = dict[str, int](), dict[str, int]()  # start_ts of the newest transaction

    def raise_the_next(txn: Txn, change: Change) -> None:
        called[change.key] = txn.start_ts
        following = keys[(keys.index(change.key) + 1) % len(keys)]
        if following not in raised:
            raised[following] = txn.start_ts
            txn.signal(groups.changed, following)

    groups.fails = raise_the_next
    async with perco.open("memory:", groups.schema, options=OPTIONS) as db:
        await groups.fill(db, keys)
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert have_shared(worker, "hear")
        assert set(raised) == set(called) == set(keys)
        assert all(called[key] > raised[key] for key in keys)
        assert nothing_is_left(db)


async def test_a_signal_that_fails_leaves_the_others_alone() -> None:  # N6
    groups = Groups(16)

    def fail(txn: Txn, change: Change) -> None:
        if change.key == "a5":
            raise perco.GiveUp("no good")

    groups.fails = fail
    async with perco.open("memory:", groups.schema, options=OPTIONS) as db:
        await groups.fill(db, KEYS)
        async with db.worker() as worker:
            await settle(db)
            assert have_shared(worker, "hear")
        assert await groups.sizes(db) == {key: 3 for key in KEYS if key != "a5"}
        assert [each.key for each in await db.failed()] == ["a5"]


@pytest.mark.parametrize("seed", range(6))
def test_random_signals_and_conflicts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:  # N5, N7
    """When nothing waits, the size of each group is right."""
    run_seeded(monkeypatch, seed, partial(_signals_and_conflicts, seed))


async def _signals_and_conflicts(seed: int) -> None:
    rng, groups = random.Random(seed), Groups(random.Random(seed).choice([2, 7, 64]))

    def fail(txn: Txn, change: Change) -> None:
        if rng.random() < 0.05:
            raise ValueError("now and then")
        if rng.random() < 0.1:
            txn.signal(groups.changed, rng.choice(KEYS))

    groups.fails = fail
    expected = Counter[str]()
    options = perco.WorkerOptions(breaker=perco.options.BreakerOptions(failures=0))
    async with (
        perco.open("memory:", groups.schema, options=OPTIONS) as db,
        db.worker(scanners=rng.choice([1, 4]), options=options) as worker,
    ):

        async def write(number: int) -> None:
            for n in range(12):
                await trio.sleep(rng.random() / 5)
                some = rng.sample(KEYS, rng.randint(1, 20))
                async with db.transaction() as txn:
                    for key in some:
                        txn.set(groups.body, f"{key}/{number} {n}", "text")
                expected.update(some)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(write, number)
        await settle(db)
        assert have_shared(worker, "hear")
        assert await groups.sizes(db) == expected
        assert nothing_is_left(db)


async def test_a_trace_shows_the_runs_that_shared_a_transaction(web: Web) -> None:
    @web.observe(web.body, id="sizes", batch=16)
    async def sizes(txn: Txn, change: Change) -> None:
        txn.set(web.size, change.key, len(change.value or ""))

    @web.observe(web.size, id="notes")
    async def notes(txn: Txn, change: Change) -> None:
        txn.set(web.note, change.key, str(change.value))

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        one = await put(db, web.body, "a0", "text")
        two = await fill(db, web, ["a1", "a2"])
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert have_shared(worker, "sizes")
        [tree] = (
            await db.trace(web.docs, "a0")[-1:]
            if False
            else [tree for tree in await db.trace(web.docs, "a0") if tree.commit_ts == one]
        )
        [run] = tree.runs
        assert (run.observer, run.on, run.also) == ("sizes", ("docs", "a0", "body"), [])
        [after] = run.runs
        assert (after.observer, after.on) == ("notes", ("docs", "a0", "size"))
        [tree] = [tree for tree in await db.trace(web.docs, "a1") if tree.commit_ts == two]
        runs = sorted(tree.runs, key=lambda run: run.on)
        assert [run.on for run in runs] == [("docs", "a1", "body"), ("docs", "a2", "body")]
        followed = [after.on for run in runs for after in run.runs]
        assert sorted(followed) == [("docs", "a1", "size"), ("docs", "a2", "size")]
        if shares():
            assert sorted(also for run in runs for also in run.also) in (
                [("docs", key, "body")] for key in ("a1", "a2")
            )


async def test_a_change_that_was_put_off_is_forgotten_once_a_batch_has_handled_it(web: Web) -> None:
    tries = Counter[str]()

    @web.observe(web.body, id="sizes", batch=16)
    async def sizes(txn: Txn, change: Change) -> None:
        tries[change.key] += 1
        if tries.total() <= 30:
            raise perco.Retry(after_s=5.0)
        txn.set(web.size, change.key, len(change.value or ""))

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await fill(db, web, KEYS)
        await settle(db)
        assert have_shared(worker, "sizes")
        assert len(worker._worker.backoff.rows) == 0


async def test_a_change_that_has_failed_in_another_worker_runs_by_itself(web: Web) -> None:  # N6
    fails = True
    seen: dict[str, int] = {}

    @web.observe(web.body, id="sizes", batch=16)
    async def sizes(txn: Txn, change: Change) -> None:
        if fails and change.key == "a5":
            raise ValueError("no good")
        seen[change.key] = change.attempt
        txn.set(web.size, change.key, len(change.value or ""))

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await put(db, web.body, "a5", "text")
        async with db.worker() as worker:
            await until(lambda: worker.statistics()["sizes"].failures)
        fails = False
        await fill(db, web, [key for key in KEYS[:12] if key != "a5"])
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert have_shared(worker, "sizes")
        assert seen.pop("a5") == 2
        assert set(seen.values()) == {1}


async def test_a_chain_that_is_too_long_ends_in_a_batch_too(web: Web) -> None:  # N9
    web.counting(web.size, id="count", batch=16)

    @web.observe(web.body, id="sizes", batch=16)
    async def sizes(txn: Txn, change: Change) -> None:
        txn.set(web.size, change.key, len(change.value or ""))

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, KEYS)
        async with db.worker(options=perco.WorkerOptions(chain_max=1)):
            await settle(db)
        assert sorted(each.key for each in await db.failed()) == sorted(KEYS)
        assert await counts(db, web, "count") == {}


async def test_no_batch_runs_before_its_changes_are_due(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    began: dict[str, float] = {}
    asked, due = 0, Worker.due

    @web.observe(web.body, id="sizes", batch=16, delay_s=5.0)
    async def sizes(txn: Txn, change: Change) -> None:
        began[change.key] = trio.current_time()

    async def mistaken(self: Worker, table: str, row: bytes, ack: int, cells: Any, now: float) -> float:
        """At first, the scanner takes each row to be due: a change may come after it has looked."""
        nonlocal asked
        asked += 1
        return now if asked <= len(KEYS) else await due(self, table, row, ack, cells, now)

    monkeypatch.setattr(Worker, "due", mistaken)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(scanners=1):
        at = trio.current_time()
        await fill(db, web, KEYS)
        await settle(db)
        assert asked > len(KEYS)
        assert sorted(began) == sorted(KEYS)
        assert min(began.values()) >= at + 5.0


async def test_a_row_with_more_notify_cells_than_a_run_covers_runs_by_itself(web: Web) -> None:  # N2
    web.counting(web.body, id="count", batch=16)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for n in range(COVERS_MAX + 3):
            await put(db, web.body, "a5", f"{n}")
        await fill(db, web, [key for key in KEYS[:12] if key != "a5"])
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert have_shared(worker, "count")
            assert worker.statistics()["count"].batched <= 11
        assert nothing_is_left(db)
        assert set(await counts(db, web, "count")) == set(KEYS[:12])


async def test_an_observer_that_is_paused_before_its_batch_has_begun_does_not_run(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:  # N10
    seen = web.counting(web.body, id="count", batch=16)
    right, paused = batches.begin, 0
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:

        async def late(*args: Any, **more: Any) -> Any:
            nonlocal paused
            paused += 1
            await db.pause("count")
            return await right(*args, **more)

        monkeypatch.setattr(batches, "begin", late)
        await fill(db, web, KEYS)
        async with db.worker(scanners=1):
            await trio.sleep(10.0)
            assert (seen == [] and paused > 0) or not shares()
            await db.resume("count")
            monkeypatch.setattr(batches, "begin", right)
            await settle(db)
        assert await counts(db, web, "count") == dict.fromkeys(KEYS, 1)


async def test_a_write_in_flight_is_waited_for_before_a_batch_claims_its_row(web: Web) -> None:  # C4, T9
    """Without that, the run would see the value before it, and acknowledge the write."""
    if everywhere.over != everywhere.OWNER:
        pytest.skip("the test holds up the tablet of the owner")
    values: dict[str, str] = {}

    @web.observe(web.body, id="see", batch=16)
    async def see(txn: Txn, change: Change) -> None:
        values[change.key] = change.value or ""

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, KEYS[:12])
        store, entered = local_of(db).store, inside(db).driver.entered.cells
        held, submit = trio.Event(), store.apply_then

        async def apply_then(*args: Any, **more: Any) -> Any:
            if not held.is_set():
                await held.wait()
            return await submit(*args, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "apply_then", apply_then)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(put, db, web.body, "a3", "newer")
                await until(lambda: entered)
                async with db.worker(scanners=1):
                    await trio.sleep(1.0)
                    assert "a3" not in values
                    held.set()
                    await settle(db)
        assert values["a3"] == "newer"


async def test_a_batch_carries_the_oldest_of_its_causes(web: Web) -> None:  # N7
    carried: list[int] = []
    async with AsyncExitStack() as stack:

        @web.observe(web.body, id="sizes", batch=16)
        async def sizes(txn: Txn, change: Change) -> None:
            carried.append(worker._worker._roots[txn.start_ts][0])

        db = await stack.enter_async_context(perco.open("memory:", web.schema, options=OPTIONS))
        roots = [await put(db, web.body, key, "text") for key in KEYS[:12]]
        worker = await stack.enter_async_context(db.worker(scanners=1))
        await settle(db)
        assert have_shared(worker, "sizes")
    if shares():
        assert min(carried) == roots[0]
        assert max(Counter(carried).values()) > 1
        assert all(root <= roots[-1] for root in carried)


async def test_rows_that_have_failed_are_left_out_of_a_batch(web: Web) -> None:
    web.counting(web.body, id="count", batch=16)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(scanners=1) as worker:
        [scanner] = worker.scanners
        number = inside(db).catalogue.observers["count"].number
        rows = [(b"a0", False), (b"a1", True), (b"a2", False), (b"a3", True)]
        runners = scanner._runners
        runners._ready.extend(Ready("docs", row, [number], failing) for row, failing in rows)
        found = [[ready.row for ready in runners._next()] for _ in range(3 if shares() else 4)]
        assert found == ([[b"a0", b"a2"], [b"a1"], [b"a3"]] if shares() else [[row] for row, _ in rows])


async def test_without_row_locks_no_runs_share_a_transaction(web: Web) -> None:
    web.counting(web.body, id="count", batch=16)
    options = perco.WorkerOptions(row_locks=False)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, KEYS)
        async with db.worker(options=options) as worker:
            await settle(db)
            assert worker.statistics()["count"].batched == 0
        assert await counts(db, web, "count") == dict.fromkeys(KEYS, 1)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("ends", ["drain", "pause"])
async def test_no_call_of_a_batch_begins_once_the_worker_drains_or_the_observer_is_paused(
    web: Web, ends: str, fails: bool
) -> None:
    began, go_on = trio.Event(), trio.Event()
    calls: list[str] = []

    @web.observe(web.body, id="sizes", batch=16)
    async def sizes(txn: Txn, change: Change) -> None:
        calls.append(change.key)
        if len(calls) == 3:
            began.set()
            await go_on.wait()
            if fails:
                raise perco.Retry(after_s=5.0)
        txn.set(web.size, change.key, len(change.value or ""))

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, KEYS[:12])
        async with db.worker(scanners=1, concurrency=16) as worker, trio.open_nursery() as nursery:
            await began.wait()
            if ends == "drain":
                nursery.start_soon(worker.drain)
            else:
                nursery.start_soon(db.pause, "sizes")
            await trio.testing.wait_all_tasks_blocked()
            before = len(calls)
            go_on.set()
            await trio.sleep(60.0)
            assert len(calls) == before or not shares()
        if ends == "pause":
            await db.resume("sizes")
        async with db.worker():
            await settle(db)
        assert [await get(db, web.size, key) for key in KEYS[:12]] == [len(f"text of {key}") for key in KEYS[:12]]


@pytest.mark.parametrize("what", ["raises", "writes too much"])
async def test_an_error_after_a_commit_of_the_function_is_reported(
    web: Web, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    @web.observe(web.body, id="sizes", batch=16, writes=[web.size])
    async def sizes(txn: Txn, change: Change) -> None:
        txn.set(web.size, change.key, len(change.value or ""))
        if change.key == "a3":
            if what == "writes too much":
                txn.set(web.note, change.key, "not declared")
            await txn.commit()
            if what == "raises":
                raise ValueError("after the commit")

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await fill(db, web, KEYS[:12])
        async with db.worker(scanners=1) as worker:
            await settle(db)
            assert have_shared(worker, "sizes")
            found = worker.statistics()["sizes"]
        assert found.failures == 1
        assert found.runs == found.commits + (0 if shares() else 1)
        assert "observer sizes failed on docs['a3']" in caplog.text
        assert [await get(db, web.size, key) for key in KEYS[:12]] == [len(f"text of {key}") for key in KEYS[:12]]


def test_a_rate_excludes_batches(web: Web) -> None:
    with pytest.raises(perco.UsageError, match="rate= and batch="):
        web.counting(web.body, id="count", batch=2, rate=10)


@pytest.mark.parametrize("seed", range(8))
async def test_random_changes_failures_and_conflicts(web: Web, seed: int) -> None:
    """Each row's note follows its body, whatever fails; a count of runs that committed equals that of the store."""
    rng = random.Random(seed)

    @web.observe(web.body, id="follow", batch=rng.choice([2, 5, 64]))
    async def follow(txn: Txn, change: Change) -> None:
        if rng.random() < 0.05:
            raise ValueError("now and then")
        await web.add(txn, f"runs/{change.key}")
        if rng.random() < 0.1:
            await web.add(txn, "hot")
        if rng.random() < 0.2:
            await trio.sleep(rng.random() / 10)
        assert await txn.get(web.body, change.key) == change.value
        txn.set(web.note, change.key, change.value)

    ran = Counter[str]()
    async with (
        perco.open("memory:", web.schema, options=OPTIONS) as db,
        db.worker(scanners=rng.choice([1, 4]), concurrency=32) as worker,
    ):
        worker.on_run(lambda id, key, seconds: ran.update([f"runs/{key}"]))

        async def write(number: int) -> None:
            for n in range(15):
                await trio.sleep(rng.random() / 5)

                async def some(txn: Txn, n: int = n) -> None:
                    for key in rng.sample(KEYS, rng.randint(1, 12)):
                        txn.set(web.body, key, f"{number} {n}")
                    if rng.random() < 0.3:
                        await web.add(txn, "hot")

                await db.run(some)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(write, number)
        await settle(db)
        assert have_shared(worker, "follow")
        async with db.snapshot() as snap:
            async for row in snap.scan(web.docs):
                assert row[web.note] == row[web.body]
        assert await counts(db, web, "runs") == {key.removeprefix("runs/"): count for key, count in ran.items()}
        assert nothing_is_left(db)
