"""`perco.sync` does what `perco` does, from threads; and says so where it cannot."""

from __future__ import annotations

import gc
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio

import perco
import perco.sync
from perco.database.inside import inside
from perco.sync import threads

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
title = docs.column("title", perco.TEXT)
grown = docs.signal("grown")
SCHEMA = perco.Schema(docs)
ALIEN = perco.Table("alien").column("x", perco.TEXT)


@pytest.fixture
def db() -> Iterator[perco.sync.Database]:
    with perco.sync.open("memory:", SCHEMA) as db:
        yield db


def bump(txn: perco.sync.Transaction, key: str, by: int = 1) -> int:
    value = (txn.get(n, key) or 0) + by
    txn.set(n, key, value)
    return value


def read(db: perco.sync.Database, key: str) -> int | None:
    with db.snapshot() as snap:
        return snap.get(n, key)


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


# ------------------------------------------------------------------ transactions


def test_a_function_runs_in_a_transaction_and_its_value_comes_back(db: perco.sync.Database) -> None:
    assert db.run(bump, "a", by=2) == 2
    assert db.run(bump, "a") == 3
    assert read(db, "a") == 3


def test_a_timestamp_is_known_after_the_end(db: perco.sync.Database) -> None:
    held: list[perco.sync.Transaction] = []

    def fails(txn: perco.sync.Transaction) -> None:
        held.append(txn)
        txn.get(n, "a")
        txn.set(n, "a", 1)
        raise LookupError("mine")

    with pytest.raises(LookupError):
        db.run(fails)
    assert held[0].start_ts > 0
    with perco.sync.open("memory:", SCHEMA) as other, other.transaction() as txn:
        txn.set(n, "a", 1)
    assert txn.start_ts > 0


def test_what_was_set_first_is_seen_by_what_is_read_later_in_the_same_transaction(db: perco.sync.Database) -> None:
    def figure(txn: perco.sync.Transaction) -> tuple[int | None, dict[str, int | None], list[str]]:
        txn.set(n, "b", 1)
        txn.set(n, "a", 2)
        txn.delete(n, "b")
        return txn.get(n, "a"), txn.get_many(n, ["a", "b"]), [row.key for row in txn.scan(docs)]

    assert db.run(figure) == (2, {"a": 2, "b": None}, ["a"])
    assert read(db, "b") is None


def test_a_transaction_that_only_writes_needs_the_loop_once(db: perco.sync.Database) -> None:
    made = db._port.made

    def put(txn: perco.sync.Transaction) -> None:
        for i in range(100):
            txn.set(n, f"{i}", i)

    db.run(put)
    assert db._port.made - made == 1
    made = db._port.made
    db.run(bump, "1")  # begins with its read
    assert db._port.made - made == 2


def test_a_conflict_runs_the_function_again_with_fresh_reads(db: perco.sync.Database) -> None:  # T11
    seen: list[int | None] = []

    def slow(txn: perco.sync.Transaction) -> int:
        seen.append(txn.get(n, "a"))
        txn.set(title, "a", "of an attempt")
        if len(seen) < 3:
            in_thread(lambda: db.run(bump, "a"))
        return bump(txn, "a", by=10)

    assert db.run(slow) == 12
    assert seen == [None, 1, 2]
    assert read(db, "a") == 12


def test_after_the_last_attempt_the_conflict_comes_out_with_the_callers_line(db: perco.sync.Database) -> None:
    def always(txn: perco.sync.Transaction) -> None:
        bump(txn, "a")
        in_thread(lambda: db.run(bump, "a"))

    with pytest.raises(perco.WriteConflict, match="Gave up after 2 attempts") as caught:
        db.options(attempts=2).run(always)
    assert caught.value.cells == (("docs", "a", "n"),)
    told = "".join(traceback.format_tb(caught.value.__traceback__))
    assert "db.options(attempts=2).run(always)" in told


def test_what_a_function_raises_comes_out_as_it_is_and_nothing_is_written(db: perco.sync.Database) -> None:
    mistake = ZeroDivisionError("mine")

    def fails(txn: perco.sync.Transaction, begin: bool) -> None:
        txn.set(n, "a", 1)
        if begin:
            txn.get(n, "b")
        raise mistake

    for begin in False, True:
        with pytest.raises(ZeroDivisionError) as caught:
            db.run(fails, begin)
        assert caught.value is mistake
        assert "raise mistake" in "".join(traceback.format_tb(mistake.__traceback__))
    assert read(db, "a") is None
    assert db.statistics().live_transactions == 0


def test_attempts_end_by_themselves_once_one_has_committed(db: perco.sync.Database) -> None:
    tried = 0
    for attempt in db.attempts():
        with attempt as txn:
            tried += 1
            value = txn.get(n, "a") or 0
            if tried == 1:
                in_thread(lambda: db.run(bump, "a"))
            txn.set(n, "a", value + 1)
    assert tried == 2
    assert read(db, "a") == 2
    assert txn.outcome == "committed"
    assert txn.commit_ts > txn.start_ts


def test_an_error_before_the_second_attempt_began_leaves_no_warning_of_a_loop_that_was_left(
    db: perco.sync.Database,
) -> None:
    tried = 0

    def fails_later(txn: perco.sync.Transaction) -> None:
        nonlocal tried
        tried += 1
        if tried == 2:
            raise ZeroDivisionError
        bump(txn, "a")
        in_thread(lambda: db.run(bump, "a"))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError):
            db.run(fails_later)
        gc.collect()
    assert not found
    assert read(db, "a") == 1


def test_an_attempt_that_is_not_used_is_a_mistake(db: perco.sync.Database) -> None:
    with pytest.raises(perco.UsageError, match="with attempt as txn"):
        for _ in db.attempts():
            pass


def test_a_block_commits_once_and_tells_what_came_of_it(db: perco.sync.Database) -> None:
    with db.transaction() as txn:
        txn.set(n, "a", 1)
        assert txn.outcome == "open"
    assert txn.outcome == "committed"
    assert db.outcome(txn.token) == txn.commit_ts > 0
    txns = []

    def fails() -> None:
        with db.transaction() as txn:
            txns.append(txn)
            txn.set(n, "a", 2)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert txns[0].outcome == "aborted"
    with db.transaction() as mine:
        bump(mine, "a")
        with db.transaction() as other:
            bump(other, "a")
        with pytest.raises(perco.WriteConflict):
            mine.commit()
    assert read(db, "a") == 2
    assert in_thread(db.pending) == 0


def test_a_transaction_of_ones_own_is_committed_or_discarded(db: perco.sync.Database) -> None:
    txn = db.begin(isolation="serializable")
    assert txn.isolation == "serializable"
    txn.set(n, "a", 1)
    assert txn.commit() == txn.commit_ts
    txn = db.begin()
    txn.set(n, "a", 2)
    txn.discard()
    assert (read(db, "a"), txn.outcome) == (1, "aborted")


def test_a_transaction_that_was_discarded_in_its_function_writes_nothing(db: perco.sync.Database) -> None:
    def gives_up(txn: perco.sync.Transaction) -> None:
        txn.set(n, "a", 1)
        txn.discard()

    db.run(gives_up)
    assert read(db, "a") is None


def test_used_after_its_end_it_says_so(db: perco.sync.Database) -> None:
    kept: list[perco.sync.Transaction] = []
    db.run(kept.append)
    db.run(lambda txn: kept.append(txn) or txn.get(n, "a"))
    with db.snapshot() as snap:
        pass
    uses: list[Callable[[], Any]] = [lambda: snap.get(n, "a"), lambda: snap.scan(docs)]
    for txn in kept:
        uses += [lambda txn=txn: txn.get(n, "a"), lambda txn=txn: txn.set(n, "a", 1), lambda txn=txn: txn.commit()]
    for use in uses:
        with pytest.raises(perco.errors.TransactionClosed):
            use()


def test_mistakes_are_told_where_they_are_made_and_as_the_engine_tells_them(db: perco.sync.Database) -> None:
    async def told() -> list[str]:
        async with perco.open("memory:", SCHEMA) as other, other.transaction() as txn:
            return [kind_of(use, txn) for use in uses]

    def kind_of(use: Callable[[Any], Any], txn: Any) -> str:
        try:
            use(txn)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    uses: list[Callable[[Any], Any]] = [
        lambda txn: txn.set(n, "a", None),
        lambda txn: txn.set(n, "a", "one"),
        lambda txn: txn.set(n, 5, 1),
        lambda txn: txn.set(title, "a", "x" * (8 << 20) + "x"),
        lambda txn: txn.set(n, "k" * 500, 1),
        lambda txn: txn.set(grown, "a", 1),
        lambda txn: txn.set("n", "a", 1),
        lambda txn: txn.set(None, "a", 1),
        lambda txn: txn.signal(None, "a"),
        lambda txn: txn.delete(None, "a"),
        lambda txn: txn.set(ALIEN, b"a", "x"),
        lambda txn: txn.delete(ALIEN, b"a"),
        lambda txn: txn.delete(n, 7),
        lambda txn: txn.signal(n, "a"),
        lambda txn: txn.signal(grown, 3),
        lambda txn: txn.scan(docs, limit=-1),
        lambda txn: txn.scan("docs"),
    ]
    with db.transaction() as txn:
        here = [kind_of(use, txn) for use in uses]
    assert here == trio.run(told)
    assert all(here)


def test_limits_are_raised_at_the_write_that_goes_over_them(tmp_path: Any) -> None:
    options = perco.Options(transaction=perco.options.TransactionOptions(cells_max=10, bytes_max=100))
    with perco.sync.open("memory:", SCHEMA, options=options) as db:
        with db.transaction() as txn:
            for i in range(10):
                txn.set(n, f"{i}", i)
            txn.set(n, "9", 1)  # one of them again
            with pytest.raises(perco.errors.TooLarge, match="cells of one transaction"):
                txn.set(n, "10", 1)
        with db.transaction() as txn:
            txn.set(title, "a", "x" * 60)
            txn.set(title, "a", "x" * 50)
            with pytest.raises(perco.errors.TooLarge, match="bytes written"):
                txn.set(title, "b", "x" * 51)
        with db.transaction() as txn:
            for i in range(10):
                txn.signal(grown, f"{i}")


def test_run_takes_a_plain_function(db: perco.sync.Database) -> None:
    async def wrong(txn: perco.sync.Transaction) -> None:
        raise AssertionError

    with pytest.raises(perco.UsageError, match="plain function"):
        db.run(wrong)
    with pytest.raises(perco.UsageError, match="takes a function"):
        db.run(5)
    with pytest.raises(TypeError, match="required positional argument"):
        db.run(bump)


def test_past_the_timeout_the_next_read_says_so_and_so_does_the_commit() -> None:
    with perco.sync.open("memory:", SCHEMA) as db:
        for touch in False, True:

            def late(txn: perco.sync.Transaction, touch: bool) -> None:
                txn.set(n, "a", 1)
                if touch:
                    txn.get(n, "a")

            with pytest.raises(perco.Unavailable, match="did not finish within"):
                db.options(timeout=0.0).run(late, touch)
        for attempt in db.options(timeout=0.0).attempts():
            with pytest.raises(perco.Unavailable):
                attempt.__enter__()
            break
        with pytest.raises(perco.Unavailable):  # noqa: PT012
            for attempt in db.options(timeout=600).attempts():
                with attempt as txn:
                    assert txn._tries is not None
                    txn._tries._made_at -= 600  # it takes its time, and then neither reads nor writes
        assert read(db, "a") is None
        assert db.options(timeout=60.0).run(bump, "a") == 1


# ------------------------------------------------------------------ reading


def test_a_scan_sees_what_the_transaction_writes_ahead_of_it_and_not_what_it_removes(db: perco.sync.Database) -> None:
    with db.transaction() as txn:
        for i in range(600):  # three pages
            txn.set(n, f"{i:03}", i)
    with db.transaction() as txn:
        seen = []
        for row in txn.scan(docs, columns=[n]):
            seen.append(row.key)
            if row.key == "100":
                txn.set(n, "1005", 1)
                txn.delete(n, "101")
            if row.key == "102":
                txn.set(n, "000x", 1)  # behind
        assert "1005" in seen
        assert "101" not in seen
        assert "000x" not in seen
        assert len(seen) == 600
    with db.snapshot() as snap:
        assert [row.key for row in snap.scan(docs, reverse=True, limit=2)] == ["599", "598"]
        assert len(snap.scan(docs, prefix="1").all()) == 100
        assert snap.scan(docs, limit=0).all() == []
        assert snap.scan(docs, start="b", stop="a").all() == []
        row = snap.row(docs, "100", [n])
        assert row[n] == 100


def test_snapshots_are_of_one_moment_and_of_past_ones(db: perco.sync.Database) -> None:
    with db.transaction() as txn:
        txn.set(n, "a", 1)
    with db.snapshot() as snap:
        db.run(bump, "a")
        assert snap.get(n, "a") == 1
    assert read(db, "a") == 2
    with db.snapshot(ts=txn.commit_ts) as snap:
        assert snap.start_ts == txn.commit_ts
        assert snap.get(n, "a") == 1
    past = db.snapshot_at(ts=txn.commit_ts)
    assert past.get(n, "a") == 1
    past.end()
    with pytest.raises(perco.errors.SnapshotTooOld), db.snapshot(at=datetime.now(UTC) - timedelta(days=9)):
        pass
    with pytest.raises(perco.UsageError, match="aware datetime"):
        db.snapshot_at(at=datetime.now())
    assert db.statistics().live_transactions == 0


def test_a_pin_is_taken_renewed_and_dropped(db: perco.sync.Database) -> None:
    db.run(bump, "a")
    with db.pin("export", lease_s=60) as pin:
        db.run(bump, "a")
        assert pin.get(n, "a") == 1
        pin.renew(90)
        assert [(p.name, p.ts) for p in db.pins()] == [("export", pin.pin.ts)]
        with pytest.raises(perco.UsageError, match="in use in this process"), db.pin("export", lease_s=5):
            pass
    assert db.pins() == []
    with pytest.raises(KeyError), db.pin("kept", lease_s=60, keep=True):
        raise KeyError
    assert db.drop_pin("kept") is True
    assert isinstance(db.vacuum(), perco.VacuumResult)


# ------------------------------------------------------------------ threads


def test_many_threads_lose_no_update(db: perco.sync.Database) -> None:
    def work(_: int) -> None:
        for _ in range(10):
            db.run(bump, "a")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert read(db, "a") == 160
    assert db.statistics().live_transactions == 0


def test_many_threads_read_one_snapshot(db: perco.sync.Database) -> None:
    with db.transaction() as txn:
        for i in range(300):
            txn.set(n, f"{i:03}", i)
    with db.snapshot() as snap, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: [row[n] for row in snap.scan(docs)], range(8)))
    assert found == [list(range(300))] * 8


async def forever(_: perco.Database, begun: threading.Event) -> None:
    begun.set()
    await trio.sleep_forever()


def test_no_call_waits_for_one_that_waits(db: perco.sync.Database) -> None:
    with ThreadPoolExecutor(3) as pool:
        waiting = []
        for _ in range(3):
            begun = threading.Event()
            waiting.append(pool.submit(db._port.ask, forever, (db._of, begun), {}))
            assert begun.wait(60)
        assert db.run(bump, "a") == 1
        db._port.token.run_sync_soon(lambda: [server.scope.cancel() for server in db._port._servers])
        for one in waiting:
            assert isinstance(one.exception(timeout=60), AssertionError)  # nobody but its caller cancels a call


def test_closing_ends_what_waits_in_other_threads() -> None:
    with ThreadPoolExecutor(2) as pool:
        with perco.sync.open("memory:", SCHEMA) as db:
            begun = threading.Event()
            waits = pool.submit(db._port.ask, forever, (db._of, begun), {})
            assert begun.wait(60)
        assert isinstance(waits.exception(timeout=60), perco.errors.TransactionClosed)


def test_a_closed_store_says_so(db: perco.sync.Database) -> None:
    with perco.sync.open("memory:", SCHEMA) as db:
        txn, snap = db.begin(), db.snapshot_at()
    uses: list[Callable[[], Any]] = [
        lambda: db.run(bump, "a"),
        lambda: db.wait_idle(),
        lambda: db.statistics(),
        lambda: db.transaction().__enter__(),
        lambda: db.snapshot().__enter__(),
        lambda: txn.get(n, "a"),
        lambda: snap.get(n, "a"),
        lambda: txn.commit(),
    ]
    for use in uses:
        with pytest.raises(perco.errors.TransactionClosed, match=r"perco\.sync\.open"):
            use()
    txn.discard()
    snap.end()


def test_a_block_is_entered_once() -> None:
    block = perco.sync.open("memory:", SCHEMA)
    with block, pytest.raises(perco.UsageError, match="entered only once"):
        block.__enter__()


def test_async_before_with_or_for_says_what_to_write(db: perco.sync.Database) -> None:
    async def entering(block: Any) -> None:
        async with block:
            pass

    async def going_through(rows: Any) -> None:
        async for _ in rows:
            pass

    attempts = db.attempts()
    wrong = {
        "with perco.sync.open(...) as db:": entering(perco.sync.open("memory:", SCHEMA)),
        "with db.worker():": entering(db.worker()),
        "with db.pin(...) as pin:": entering(db.pin("export", lease_s=60)),
        "with db.snapshot() as snap:": entering(db.snapshot()),
        "with db.transaction() as txn:": entering(db.transaction()),
        "with attempt as txn:": entering(next(attempts)),
        "for attempt in db.attempts():": going_through(attempts),
    }
    with db.snapshot() as snap:
        wrong["for row in snap.scan(...):"] = going_through(snap.scan(docs))
        for write, use in wrong.items():
            with pytest.raises(perco.UsageError) as caught:
                use.send(None)
            assert str(caught.value).startswith(f"perco.sync is for blocking code: write `{write}`")
    assert db.pins() == []


def test_what_was_not_entered_says_what_to_write(db: perco.sync.Database) -> None:
    with pytest.raises(AttributeError, match=r"has no 'transaction': write `with perco\.sync\.open\(\.\.\.\) as db:`"):
        perco.sync.open("memory:", SCHEMA).transaction()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no 'set': write `with db\.transaction\(\) as txn:`"):
        db.transaction().set(n, "a", 1)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no 'get': write `with db\.snapshot\(\) as snap:`"):
        db.snapshot().get(n, "a")  # type: ignore[attr-defined]


def test_an_opening_that_fails_raises_what_it_met() -> None:
    with pytest.raises(perco.UsageError, match="needs a schema"):
        perco.sync.open("memory:")
    for url in (b"memory:", None, 5):
        with pytest.raises(perco.UsageError, match="takes a folder or an address as text"):
            perco.sync.open(url, SCHEMA)  # type: ignore[arg-type]
    with pytest.raises(perco.UsageError, match="begins empty"), perco.sync.open("memory:", readonly=True):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "perco-loop"]


def test_what_the_block_raises_comes_out_as_it_is() -> None:
    mistake = KeyError("mine")
    with pytest.raises(KeyError) as caught, perco.sync.open("memory:", SCHEMA):
        raise mistake
    assert caught.value is mistake


def test_a_background_failure_reaches_every_caller_and_the_block() -> None:
    async def die() -> None:
        raise ZeroDivisionError

    def dies(pool: ThreadPoolExecutor) -> None:
        with perco.sync.open("memory:", SCHEMA) as db:
            begun = threading.Event()
            waits = pool.submit(db._port.ask, forever, (db._of, begun), {})
            assert begun.wait(60)
            db._port.token.run_sync_soon(inside(db._of).background.spawn, die)
            assert isinstance(waits.exception(timeout=60), perco.errors.BackgroundFailure)
            with pytest.raises(perco.errors.BackgroundFailure):
                db.run(bump, "a")

    with ThreadPoolExecutor(1) as pool, pytest.raises(perco.errors.BackgroundFailure) as caught:
        dies(pool)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_when_the_loop_itself_dies_nobody_waits_for_it_any_longer() -> None:
    def dies(pool: ThreadPoolExecutor) -> None:
        with perco.sync.open("memory:", SCHEMA) as db:
            begun = threading.Event()
            waits = pool.submit(db._port.ask, forever, (db._of, begun), {})
            assert begun.wait(60)
            db._port.token.run_sync_soon(lambda: 1 / 0)
            assert isinstance(waits.exception(timeout=60), perco.PercoError)
            with pytest.raises(perco.PercoError):
                db.run(bump, "a")

    with ThreadPoolExecutor(1) as pool, pytest.raises(trio.TrioInternalError) as caught:
        dies(pool)
    assert "division by zero" in "".join(traceback.format_exception(caught.value))


def test_whoever_is_answered_as_the_loop_ends_is_woken() -> None:
    async def main() -> None:
        waking = threads._Waking()
        call = threads._Call(waking, forever, (), {}, False)
        call.answer()
        assert not call.lock.acquire(blocking=False)  # not before the loop has nothing to do
        waking.end()
        assert call.lock.acquire(blocking=False)
        late = threads._Call(waking, forever, (), {}, False)
        late.answer()
        assert late.lock.acquire(blocking=False)

    trio.run(main)


# ------------------------------------------------------------------ observers


def test_a_plain_function_is_an_observer_in_a_thread() -> None:
    schema = perco.Schema(docs)
    names: set[str] = set()

    @schema.observe(n, id="title")
    @perco.sync.observer
    def entitle(txn: perco.sync.Transaction, change: perco.Change[str, int]) -> None:
        names.add(threading.current_thread().name)
        before = txn.get(title, change.key) or ""
        txn.set(title, change.key, f"{before}{change.value}")
        assert txn.scan(docs).all()[0].key == "a"

    with perco.sync.open("memory:", schema) as db, db.worker(concurrency=4) as worker:
        ts = db.run(lambda txn: txn.set(n, "a", 1) or txn.commit())
        db.wait_for(ts, timeout=60)
        assert db.wait_idle(timeout=60) == 0
        assert worker.statistics()["title"].commits == 1
        assert db.is_idle() is True
        with db.snapshot() as snap:
            assert snap.get(title, "a") == "1"
        assert [state.outputs for state in db.observers()] == [(("docs", "title"),)]
    assert names
    assert "perco-loop" not in names


async def test_a_plain_function_is_an_observer_of_a_trio_program_too() -> None:
    schema = perco.Schema(docs)

    @schema.observe(n, id="title")
    @perco.sync.observer
    def entitle(txn: perco.sync.Transaction, change: perco.Change[str, int]) -> None:
        txn.set(title, change.key, str(change.value))

    async with perco.open("memory:", schema) as db, db.worker():
        async with db.transaction() as txn:
            txn.set(n, "a", 1)
        await db.wait_idle(timeout=60)
        async with db.snapshot() as snap:
            assert await snap.get(title, "a") == "1"


def test_a_plain_function_without_the_decorator_is_told_of_it() -> None:
    schema = perco.Schema(docs)
    with pytest.raises(perco.UsageError, match=r"perco\.sync\.observer takes a function, not 5"):
        perco.sync.observer(5)
    with pytest.raises(perco.UsageError, match=r"perco\.sync\.observer"):

        @schema.observe(n, id="title")
        def entitle(txn: perco.sync.Transaction, change: perco.Change[str, int]) -> None:
            raise AssertionError


def test_an_async_function_under_the_decorator_for_plain_ones_is_told_at_once() -> None:
    with pytest.raises(perco.UsageError, match=r"is an `async def`: decorate it with @perco\.aio\.observer if it"):

        @perco.sync.observer
        async def entitle(txn: perco.sync.Transaction, change: perco.Change[str, int]) -> None:
            raise AssertionError


def test_an_observer_in_a_thread_that_fails_is_given_up_like_any_other() -> None:
    schema = perco.Schema(docs)

    @schema.observe(n, id="fails")
    @perco.sync.observer
    def fails(txn: perco.sync.Transaction, change: perco.Change[str, int]) -> None:
        raise ZeroDivisionError("by nothing")

    with perco.sync.open("memory:", schema) as db, db.worker(options=perco.WorkerOptions(attempts=1)):
        db.run(bump, "a")
        assert db.wait_idle(timeout=60) == 1
        [failed] = db.failed()
        assert failed.error == "ZeroDivisionError: by nothing"
        assert "raise ZeroDivisionError" in failed.traceback
        assert db.failed_count() == 1
        db.pause("fails")
        assert db.paused() == {"fails"}
        assert db.replay_failed() == 1
        assert db.waiting() == {"fails": 1}
        db.resume("fails")
        assert db.wait_idle(timeout=60) == 1
        assert db.drop_failed("fails") == 1


def test_a_blocking_call_on_the_loop_is_an_error_and_not_a_deadlock() -> None:
    schema = perco.Schema(docs)
    stores: list[perco.sync.Database] = []

    @schema.observe(n, id="blocks")
    async def blocks(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        stores[0].run(bump, "b")

    with perco.sync.open("memory:", schema) as db, db.worker(options=perco.WorkerOptions(attempts=1)):
        stores.append(db)
        db.run(bump, "a")
        assert db.wait_idle(timeout=60) == 1
        assert "would wait for itself" in db.failed()[0].error


def test_progress_is_told_and_may_not_block(db: perco.sync.Database) -> None:
    db.run(bump, "a")
    told: list[Any] = []
    db.vacuum(progress=told.append)
    assert told
    with pytest.raises(perco.UsageError, match="would wait for itself"):
        db.vacuum(progress=lambda _: db.pins())
