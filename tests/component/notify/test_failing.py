"""An observer that fails keeps its notification, waits longer each time, and takes nothing from the others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.notify import scanner as scanners
from perco.notify.failing import KINDS_MAX, FailureLog, ObserverFailedError
from perco.notify.rowlocks import Dirty
from perco.protocol.claim import Run
from perco.storage import NOTIFY, LocalRowStore, RowCells, ScanPage, ScanRequest
from perco.storage.cells import ReadRequest
from tests.component.notify.kit import (
    LONG_S,
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
    until,
)
from tests.support.places import local_of

Txn = perco.Transaction
Change = perco.Change[Any, Any]


class Failing:
    """An observer that fails so often for each key, and then counts."""

    def __init__(self, web: Web, times: int, *, id: str = "failing") -> None:
        self.began: list[float] = []
        self.attempts: list[int] = []
        self.values: list[Any] = []
        failed: Counter[str] = Counter()

        @web.observe(web.body, id=id)
        async def observe(txn: Txn, change: Change) -> None:
            self.began.append(trio.current_time())
            self.attempts.append(change.attempt)
            self.values.append(change.value)
            txn.set(web.note, change.key, "by a failed run" if failed[change.key] < times else "at last")
            if failed[change.key] < times:
                failed[change.key] += 1
                raise ZeroDivisionError(f"failure {failed[change.key]}")
            await web.add(txn, f"runs/{change.key}")


async def test_it_is_run_again_later_and_later_until_it_succeeds(web: Web) -> None:  # N6
    failing = Failing(web, 6)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        backoff = perco.options.BackoffOptions(first_s=1.0, max_s=10.0)
        async with db.worker(options=perco.WorkerOptions(backoff=backoff)) as worker:
            commit_ts = await put(db, web.body, "a", "hello")
            await until(lambda: len(failing.began) == 3)
            assert notified(db) == [(b"a", commit_ts)], "the notification stays"
            assert await get(db, web.note, "a") is None, "the writes of a failed run are not there"
            assert not await db.is_idle()
            await settle(db)
            pauses = [later - earlier for earlier, later in zip(failing.began, failing.began[1:], strict=False)]
            for pause, longest in zip(pauses, [1, 2, 4, 8, 10, 10], strict=True):
                assert longest / 2 <= pause <= longest + 0.01
            assert failing.attempts == [1, 2, 3, 4, 5, 6, 7]
            assert await get(db, web.note, "a") == "at last"
            assert await get(db, web.count, "runs/a") == 1
            counted = worker.statistics()["failing"]
            assert (counted.runs, counted.failures, counted.commits, counted.running) == (7, 6, 1, 0)
            assert nothing_is_left(db)


class UnreadableStore:
    """A row store that fails the first look at a change before its observer runs."""

    groups = True
    chaining = deferring = None

    def tablets_here(self) -> list[Any]:
        return []

    def __init__(self, inner: LocalRowStore) -> None:
        self._inner = inner
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        if not self.failed and any(query[0] == NOTIFY for _, _, queries in requests for query in queries):
            self.failed += 1
            raise perco.Unavailable("all reader slots are taken")
        return await self._inner.read(requests)


async def test_a_run_that_fails_before_its_function_begins_keeps_no_versions(web: Web) -> None:  # G1
    seen = web.counting(web.body, id="count")
    local = memory()
    store = UnreadableStore(local.store)
    async with client(local, web.schema, store=store) as db:
        async with db.worker() as worker:
            await put(db, web.body, "a", "hello")
            await settle(db)
            assert worker.statistics()["count"].failures == store.failed == 1
        assert [change.value for change in seen] == ["hello"]
        assert inside(db).oracle.holds.open == set()


async def test_a_wait_that_ends_too_early_says_who_failed_and_why(web: Web) -> None:  # N6
    @web.schema.observe(web.body, id="boom")
    async def boom(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        raise ValueError("no such thing")

    async with client(memory(), web.schema) as db, db.worker():
        await put(db, web.body, "a", "hello")
        with pytest.raises(perco.NotIdle, match=r"1 for 'boom', .* last on docs\['a'\]: ValueError: no such") as caught:
            await db.wait_idle(timeout=2)
        assert caught.value.waiting == {"boom": 1}
        times, _, error = caught.value.failures["boom"]
        assert times > 1
        assert isinstance(error, ValueError)


async def test_after_a_success_its_failures_are_forgotten(web: Web) -> None:  # N6
    failing = Failing(web, 4)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "hello")
        await settle(db)
        await put(db, web.body, "a", "again")
        await settle(db)
        assert failing.attempts == [1, 2, 3, 4, 5, 1]


async def test_what_failed_is_told_with_its_traceback(web: Web, caplog: pytest.LogCaptureFixture) -> None:  # N6
    Failing(web, 1)
    with caplog.at_level(logging.WARNING, logger="perco.observer"):
        async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
            await put(db, web.body, "a", "hello")
            await settle(db)
    [record] = caplog.records
    assert "failing" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_a_traceback_is_told_once_for_each_kind_of_failure(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    """A service that is down fails for all that waits: one traceback, then a line each; another error has its own."""

    @web.observe(web.body, id="ask")
    async def ask(txn: Txn, change: Change) -> None:
        if change.attempt <= 3:
            raise ConnectionError(f"down for {change.key}")
        if change.attempt == 4:
            async with trio.open_nursery(strict_exception_groups=True):
                raise KeyError("another")

    with caplog.at_level(logging.WARNING, logger="perco.observer"):
        async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
            for key in "abc":
                await put(db, web.body, key, "hello")
            await settle(db)
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        ConnectionError,
        ExceptionGroup,
    ]
    lines = [record.getMessage() for record in caplog.records if not record.exc_info]
    assert len(lines) == 3 * 4 - 2
    assert not any("\n" in line for line in lines)
    for key in "abc":
        assert f"observer ask failed on docs['{key}'] (attempt 3): ConnectionError: down for {key}" in lines


async def test_kinds_of_failures_that_are_remembered_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    told, run = FailureLog(), Run((1,), (), 0, 0)
    for n in range(KINDS_MAX + 1):
        for _ in range(2):
            told.failed(f"observer {n}", "docs['a']", ObserverFailedError(ValueError("x"), 1, run))
    assert sum(record.exc_info is not None for record in caplog.records) == KINDS_MAX + 1
    told.failed("observer 1", "docs['a']", ObserverFailedError(ValueError("x"), 1, run))
    assert caplog.records[-1].exc_info is None
    told.failed("observer 0", "docs['a']", ObserverFailedError(ValueError("x"), 1, run))
    assert caplog.records[-1].exc_info is not None


async def test_one_that_fails_for_ever_holds_nobody_up(web: Web) -> None:  # N6, N11
    """Every row fails in one observer; the other one handles them all, old and new."""
    Failing(web, 10**9)
    seen = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for n in range(50):
            await put(db, web.body, f"{n:02}", "hello")
        async with db.worker(concurrency=4, scanners=2):
            await until(lambda: len(seen) == 50)
            for n in range(50):
                await put(db, web.body, f"{n:02}", "again")
            await until(lambda: len(seen) == 100)
            assert notified(db, "count") == []
            assert len(notified(db, "failing")) == 100
            with pytest.raises(perco.Unavailable):
                await db.wait_idle(timeout=10.0)


async def test_a_newer_change_does_not_shorten_the_wait_and_is_seen(web: Web) -> None:  # N4, N6
    failing = Failing(web, 1)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        backoff = perco.options.BackoffOptions(first_s=100.0)
        async with db.worker(options=perco.WorkerOptions(backoff=backoff)) as worker:
            await put(db, web.body, "a", "old")
            await until(lambda: worker.statistics()["failing"].failures)
            await put(db, web.body, "a", "new")
            await settle(db)
            assert failing.values == ["old", "new"]
            assert failing.began[1] - failing.began[0] >= 50.0
            assert worker.statistics()["failing"].collapsed == 1


@pytest.mark.parametrize("seed", range(10))
def test_those_that_failed_have_a_bounded_share(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """N6. Twenty rows fail once, and then hang: never more than the share of the worker hangs with them."""

    async def main() -> None:
        web = Web()
        running: Counter[str] = Counter()
        most: Counter[str] = Counter()
        failed: set[str] = set()
        go_on = {"bad": trio.Event(), "long": trio.Event()}

        @web.observe(web.body, id="some")
        async def some(txn: Txn, change: Change) -> None:
            kind = change.key.rstrip("0123456789")
            if kind == "bad" and change.key not in failed:
                failed.add(change.key)
                raise ZeroDivisionError
            running[kind] += 1
            most[kind] = max(most[kind], running[kind])
            if kind in go_on:
                await go_on[kind].wait()
            running[kind] -= 1
            await web.add(txn, kind)

        async def load(kind: str) -> None:
            async with db.transaction() as txn:
                for n in range(20):
                    txn.set(web.body, f"{kind}{n:02}", "hello")

        few = perco.WorkerOptions(
            concurrency=8, scanners=2, failing_share=0.25, backoff=perco.options.BackoffOptions(first_s=100.0)
        )
        async with perco.open("memory:", web.schema, options=perco.Options(seed=seed)) as db, db.worker(options=few):
            await load("bad")
            await until(lambda: len(failed) == 20)
            await load("long")
            await until(lambda: running["long"] == 8)
            await trio.sleep(LONG_S)  # the worker is full, and all that failed are due
            go_on["long"].set()
            await until(lambda: running["bad"] >= 2)
            await load("good")
            await until(lambda: not any(row.startswith(b"good") for row, _ in notified(db)))
            assert most["bad"] == 2
            go_on["bad"].set()
            await settle(db)
            assert [await get(db, web.count, kind) for kind in ("bad", "long", "good")] == [20] * 3

    run_seeded(monkeypatch, seed, main)


async def test_of_a_page_of_those_that_failed_only_their_share_is_claimed(web: Web) -> None:  # N6
    """Twelve rows failed once and are due together, and the worker has nothing else to do."""
    failed: set[str] = set()
    running = most = 0
    go_on = trio.Event()

    @web.observe(web.body, id="some")
    async def some(txn: Txn, change: Change) -> None:
        nonlocal running, most
        if change.key not in failed:
            failed.add(change.key)
            raise ZeroDivisionError
        running += 1
        most = max(most, running)
        await go_on.wait()
        running -= 1

    few = perco.WorkerOptions(
        concurrency=8, scanners=2, failing_share=0.25, backoff=perco.options.BackoffOptions(first_s=1.0, max_s=1.0)
    )
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=few):
        async with db.transaction() as txn:
            for n in range(12):
                txn.set(web.body, f"{n:02}", "hello")
        await until(lambda: running >= 2)
        await trio.sleep(10.0)  # all have been due for long
        assert most == 2
        go_on.set()
        await settle(db)
        assert most == 2


@pytest.mark.parametrize("share", [1, 2])
async def test_a_row_that_failed_and_is_let_go_makes_room_for_another(web: Web, share: int) -> None:  # N6, N8
    """A scanner has taken a row that failed, and another process has it. A scanner that skipped others meanwhile looks
    again; if there was room for others, none has skipped any."""

    @web.observe(web.body, id="some")
    async def some(txn: Txn, change: Change) -> None:
        raise ZeroDivisionError

    backoff = perco.options.BackoffOptions(first_s=50.0, max_s=50.0)
    few = perco.WorkerOptions(concurrency=4, scanners=1, failing_share=share / 4, backoff=backoff)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=few) as handle:
        worker, [scanner] = handle._worker, handle.scanners
        async with db.transaction() as txn:
            txn.set(web.body, "a", "hello")
            txn.set(web.body, "b", "hello")
        await until(lambda: len(worker.backoff) == 2)
        await trio.sleep(5.0)  # it sleeps until the first is due
        [(table, first, ack), (_, other, _)] = worker.backoff.rows
        due = trio.current_time() + 60.0
        assert worker.claimable(table, other, ack, due)
        scanner._slots.acquire_nowait()
        assert scanner._takes(table, first)
        taken = Dirty(first, [ack], 0, 0, worker.begin_row(table, first, [ack]))
        assert worker.claimable(table, other, ack, due) == (share > 1)
        before = scanner.counters.tours
        scanner._let_go(table, taken)
        assert worker.claimable(table, other, ack, due)
        await trio.sleep(5.0)
        assert scanner.counters.tours == before + (share == 1)


async def test_without_row_locks_each_run_of_a_row_counts(web: Web) -> None:  # N6
    Failing(web, 1000)  # without locks, a second run may begin before the first has failed: it must not succeed
    backoff = perco.options.BackoffOptions(first_s=50.0, max_s=50.0)
    few = perco.WorkerOptions(concurrency=4, scanners=1, failing_share=0.5, row_locks=False, backoff=backoff)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=few) as handle:
        worker = handle._worker
        await put(db, web.body, "a", "hello")
        await until(lambda: len(worker.backoff) == 1)
        [(table, row, ack)] = worker.backoff.rows
        due = trio.current_time() + 60.0
        for may in (True, True, False):
            assert worker.claimable(table, row, ack, due) == may
            assert worker.begin_row(table, row, [ack])
        assert [worker.end_row([ack], failing=True) for _ in range(3)] == [True, True, False]
        assert not worker.end_row([ack], failing=False)
        assert worker.claimable(table, row, ack, due)


async def test_too_many_conflicts_wait_their_turn_and_get_through(web: Web) -> None:  # N6, T7
    """A run that meets conflict after conflict gives its place away, and is not forgotten."""
    fights = 5

    @web.observe(web.body, id="loser")
    async def loser(txn: Txn, change: Change) -> None:
        nonlocal fights
        mine = await txn.get(web.count, "hot") or 0
        if fights:
            fights -= 1
            await put(db, web.count, "hot", 1000 + fights)
        txn.set(web.count, "hot", mine + 1)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        impatient = perco.WorkerOptions(conflicts_max=2, backoff=perco.options.BackoffOptions(first_s=10.0))
        async with db.worker(options=impatient) as worker:
            began = trio.current_time()
            await put(db, web.body, "a", "hello")
            await settle(db)
            counted = worker.statistics()["loser"]
            assert (counted.conflicts, counted.commits, counted.failures) == (5, 1, 0)
            assert await get(db, web.count, "hot") == 1001
            assert trio.current_time() - began > 5.0, "twice it gave its place away"


# ---------------------------------------------------------------- not to be forgotten


class ClockJumpsStore(HoldingStore):
    """A tour over this store takes its time: the clock jumps at its last scan."""

    jump_s = 0.0

    async def scan(self, request: ScanRequest) -> ScanPage:
        page = await self._inner.scan(request)
        if self.jump_s and request.table == "docs" and request.stop is None and request.rows_max != 1:
            await trio.sleep(self.jump_s)
            self.jump_s = 0.0
        return page


@pytest.mark.parametrize("seed", range(5))
def test_what_becomes_due_while_the_scanner_looks_elsewhere_is_run(  # N6, N8
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        web = Web()
        failing = Failing(web, 1)
        options = perco.Options(seed=seed)
        async with client(memory(), web.schema, sweeping=False) as first:
            store = ClockJumpsStore(local_of(first).store, lambda _: False)
            async with client(local_of(first), web.schema, store=store, options=options) as db:
                await settle(db)
                backoff = perco.options.BackoffOptions(first_s=10.0)
                one = perco.WorkerOptions(scanners=1, backoff=backoff)
                async with db.worker(options=one) as worker:
                    await put(db, web.body, "a", "hello")
                    await until(lambda: worker.statistics()["failing"].failures)
                    await trio.sleep(1.0)
                    store.jump_s = 100.0
                    inside(db).driver.notified()  # a tour that passes the row by, for it waits; and ends when it is due
                    await settle(db)
                    assert store.jump_s == 0.0
                    assert failing.attempts == [1, 2]

    run_seeded(monkeypatch, seed, main)


async def test_many_cells_of_one_observer_do_not_hide_anothers(  # N6, N10, N11
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row may hold more notify cells of an observer that fails than a scanner looks at."""
    monkeypatch.setattr(scanners, "CELLS_PER_ROW", 4)
    Failing(web, 10**9, id="first")
    seen = web.counting(web.body, id="second")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for n in range(10):
            await put(db, web.body, "a", str(n))
        async with db.worker():
            await until(lambda: seen)
            assert seen[0].value == "9"
            await until(lambda: not notified(db, "second"))
            assert len(notified(db, "first")) == 10


async def test_many_cells_of_an_observer_without_room_do_not_hide_anothers(  # N11, N13
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanners, "CELLS_PER_ROW", 4)
    go_on, ran, seen = trio.Event(), [], []

    @web.observe(web.body, id="first", concurrency=1)
    async def first(txn: Txn, change: Change) -> None:
        ran.append(change.key)
        await go_on.wait()

    @web.observe(web.body, id="second")
    async def second(txn: Txn, change: Change) -> None:
        seen.append(change.key)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "b", "runs")
        await until(lambda: ran)
        await db.pause("second")
        for n in range(10):
            await put(db, web.body, "a", str(n))
        await db.resume("second")  # which makes a tour due
        await until(lambda: seen)
        assert (ran, seen) == (["b"], ["a"])
        go_on.set()
        await settle(db)
        assert set(ran) == {"a", "b"}
        assert seen == ["a", "b"]


# ---------------------------------------------------------------- strange observers


def picky(data: bytes) -> str:
    if data == b"bad":
        raise KeyError("a codec's own mistake")
    if data == b"worse":
        raise ValueError("not what it wrote")
    return data.decode()


PICKY = perco.Codec("picky", str.encode, picky)


@pytest.mark.parametrize("value", ["bad", "worse"])
async def test_a_value_that_cannot_be_decoded_is_a_failure_of_its_observer(value: str) -> None:  # N6
    docs = perco.Table("docs", key=perco.TEXT)
    body = docs.column("body", PICKY)
    schema = perco.Schema(docs)
    seen = []

    @schema.observe(body, id="read")
    async def read(txn: Txn, change: Change) -> None:
        seen.append(change.key)

    async with perco.open("memory:", schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, body, "a", value)
        await until(lambda: worker.statistics()["read"].failures)
        await put(db, body, "b", "good")
        await until(lambda: seen == ["b"])
        assert [row for row, _ in notified(db)] == [b"a"]
        await put(db, body, "a", "mended")
        await settle(db)
        assert seen == ["b", "a"]


async def test_an_observer_may_commit_by_itself(web: Web) -> None:  # N2: its ack is in that commit
    @web.observe(web.body, id="eager")
    async def eager(txn: Txn, change: Change) -> None:
        txn.set(web.size, change.key, len(change.value))
        await txn.commit()

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "hello")
        await settle(db)
        assert await get(db, web.size, "a") == 5
        assert worker.statistics()["eager"].commits == 1


async def test_an_observer_that_discards_its_transaction_has_failed(web: Web) -> None:  # N6
    """There is no ack: it must not be taken for done, nor run in a circle."""
    runs = 0

    @web.observe(web.body, id="shy")
    async def shy(txn: Txn, change: Change) -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            txn.discard()

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "hello")
        await settle(db)
        counted = worker.statistics()["shy"]
        assert (counted.failures, counted.commits, runs) == (2, 1, 3)


async def test_an_observer_that_meets_a_transient_error_of_its_own_runs_again(web: Web) -> None:  # N6
    runs = 0

    @web.observe(web.body, id="nested")
    async def nested(txn: Txn, change: Change) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise perco.errors.RolledBack(1)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "hello")
        await settle(db)
        counted = worker.statistics()["nested"]
        assert (counted.conflicts, counted.failures, counted.commits) == (1, 0, 1)


async def test_an_observer_that_awaits_asyncio_uses_up_no_attempt_and_who_waits_is_told(
    web: Web, caplog: pytest.LogCaptureFixture
) -> None:  # N6 N7
    @web.observe(web.body, id="napping")
    async def napping(txn: Txn, change: Change) -> None:
        if change.value == "hello":
            await asyncio.sleep(0.1)
        txn.set(web.note, change.key, "at last")

    once = perco.WorkerOptions(attempts=1)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=once) as worker:
        ts = await put(db, web.body, "a", "hello")
        told = r"observer 'napping' awaits asyncio, but runs on trio\. Decorate it with @perco\.aio\.observer, and run"
        with pytest.raises(perco.UsageError, match=told):
            await db.wait_idle()
        with pytest.raises(perco.UsageError, match=told):
            await db.wait_for(ts)
        assert (await db.waiting(), await db.failed_count()) == ({"napping": 1}, 0)
        assert "no running event loop" in caplog.text, "the log has what asyncio said, too"
        await put(db, web.body, "a", "bye")
        assert await db.wait_idle() == 0
        assert worker.statistics()["napping"].given_up == 0
        assert await get(db, web.note, "a") == "at last"


async def test_a_full_store_is_waited_out(web: Web) -> None:  # N6, S4
    runs = 0

    @web.observe(web.body, id="full")
    async def full(txn: Txn, change: Change) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise perco.errors.StoreFull("somewhere", "no pages")

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "hello")
        await settle(db)
        counted = worker.statistics()["full"]
        assert (counted.failures, counted.commits, runs) == (1, 1, 2)


async def test_notify_cells_stay_where_the_worker_never_gets_through(web: Web) -> None:  # N6
    Failing(web, 10**9)
    for_ever = perco.WorkerOptions(attempts=0)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await put(db, web.body, "a", "hello")
        for _ in range(2):
            async with db.worker(options=for_ever) as worker:
                await until(lambda: worker.statistics()["failing"].failures > 20)
        tablets = [tablet for tablet in local_of(db).store.tablets() if tablet.table == "docs"]
        assert sum(tablet.entries(NOTIFY) for tablet in tablets) == 1
