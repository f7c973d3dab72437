"""A higher version of an observer runs again for what a lower one has run for, once, and the lower one never again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.protocol.records import ACK, ack_version, pack_cause, unpack_record
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
    settle,
    tablets_cells,
    until,
    writes_to,
)
from tests.support.places import declare, local_of

Change = perco.Change[Any, Any]
KEYS = ["a", "b", "i", "z"]


def counting(version: int, **how: Any) -> tuple[Web, list[Change]]:
    web = Web()
    return web, web.counting(web.body, id="count", version=version, **how)


async def observed(local: Any, web: Web, *keys: str, value: str | None = "hello") -> None:
    """Write these, and observe until nothing is left."""
    async with client(local, web.schema) as db:
        for key in keys:
            await put(db, web.body, key, value)
        async with db.worker():
            await settle(db)


def acks(db: perco.Database) -> dict[bytes, list[int]]:
    """The versions that have acknowledged each row, newest first."""
    out: dict[bytes, list[int]] = {}
    for _, row, _, _, value in tablets_cells(local_of(db).store, WRITE):
        record = unpack_record(value)
        if record.kind == ACK:
            out.setdefault(row, []).append(ack_version(record.body))
    return out


async def test_a_higher_version_runs_again_for_what_has_been_acknowledged() -> None:  # N3
    local = memory()
    (old, before), (new, after) = counting(1), counting(2)
    await observed(local, old, *KEYS)
    assert sorted(change.key for change in before) == KEYS
    async with client(local, new.schema) as db:
        entry = inside(db).catalogue.observers["count"]
        assert (entry.version, entry.ready) == (2, True)
        assert notified(db) == [(key.encode(), entry.at) for key in KEYS]
        async with db.worker():
            await settle(db)
        assert nothing_is_left(db)
        assert acks(db) == {key.encode(): [2, 1] for key in KEYS}
        for key in KEYS:
            assert await get(db, new.count, f"count/{key}") == 2
    assert sorted(change.key for change in after) == KEYS
    assert {change.cause for change in after} == {change.commit_ts for change in after}
    async with client(local, new.schema) as db, db.worker():
        await settle(db)
    assert len(after) == len(KEYS), "and once: at most one run commits per change and version"


async def test_what_a_lower_version_had_not_run_for_runs_once() -> None:  # N3 N4
    local = memory()
    (old, before), (new, after) = counting(1), counting(2)
    async with client(local, old.schema) as db:
        for key in KEYS:
            await put(db, old.body, key, "hello")
    async with client(local, new.schema) as db, db.worker():
        await settle(db)
    assert before == []
    assert sorted(change.key for change in after) == KEYS


async def test_a_deleted_cell_is_run_again_if_that_was_acknowledged() -> None:  # N10
    local = memory()
    (old, before), (new, after) = counting(1), counting(2)
    web = Web()
    async with client(local, web.schema) as db:  # nobody has seen this one
        await put(db, web.body, "q", "hello")
        await put(db, web.body, "q", None)
    await observed(local, old, "a")
    await observed(local, old, "a", value=None)
    assert [change.value for change in before] == ["hello", None]
    async with client(local, new.schema) as db, db.worker():
        await settle(db)
    assert [(change.key, change.value) for change in after] == [("a", None)]


async def test_a_higher_version_without_a_backfill_runs_for_what_comes() -> None:  # N10
    local = memory()
    (old, _), (new, after) = counting(1), counting(2, backfill=False)
    await observed(local, old, *KEYS)
    await observed(local, new, "b")
    assert [change.key for change in after] == ["b"]
    again, once_more = counting(3)
    await observed(local, again)
    assert sorted(change.key for change in once_more) == KEYS


async def test_a_version_that_follows_an_unfinished_backfill_is_backfilled() -> None:  # N10
    local = memory()
    bare, (first, _), (second, after) = Web(), counting(1), counting(2, backfill=False)
    async with client(local, bare.schema) as db:
        for key in KEYS:
            await put(db, bare.body, key, "hello")
    async with client(local, first.schema, backfilled=False) as db:
        assert not inside(db).catalogue.observers["count"].ready
    await observed(local, second)
    assert sorted(change.key for change in after) == KEYS


async def test_the_catalogue_never_goes_back() -> None:  # N10
    local = memory()
    (old, _), (new, after) = counting(1), counting(2)
    await observed(local, new, "a")
    async with client(local, old.schema) as db:
        version = inside(db).catalogue.version
        assert inside(db).catalogue.observers["count"].version == 2
        await put(db, old.body, "b", "hello")  # a loader may be older
        async with db.worker() as worker:  # it leaves the observer alone
            with pytest.raises(
                perco.errors.SchemaMismatch, match=r"'count' is version 2 in this store, but version 1 in this"
            ):
                await settle(db)
            assert worker.statistics()["count"].runs == 0
        assert inside(db).catalogue.version == version
    async with client(local, new.schema) as db, db.worker():
        await settle(db)
    assert [change.key for change in after] == ["a", "b"]


async def test_an_older_program_that_starts_again_runs_the_observers_that_it_may(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """N10: during a deploy, processes of the older program may be restarted beside those of the newer one.

    Either client may presume a run of the other one dead (L1), and the function is then called again for that change.
    """
    local = memory()
    (old, before), (new, after) = counting(1), counting(2)
    same_before, same_after = old.counting(old.size, id="same"), new.counting(new.size, id="same")
    async with client(local, new.schema) as db, client(local, old.schema, beside=db) as older, older.worker():
        await put(older, old.body, "a", "hello")
        await put(older, old.size, "a", 1)
        await until(lambda: same_before)
        await trio.sleep(10.0)
        assert before == []
        async with db.worker():
            await settle(db)
            await settle(older)
        assert [change.key for change in after] == ["a"]
        assert same_after == []
        assert {(change.key, change.commit_ts) for change in same_before} == {("a", same_before[0].commit_ts)}
    assert [record.levelname for record in caplog.records if "is version 2" in record.message] == ["ERROR"]


async def test_an_older_process_that_still_serves_stops_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """N10: it is told of the higher version with the next timestamp that it draws."""
    local = memory()
    (old, before), (new, after) = counting(1), counting(2)
    async with client(local, old.schema) as serves, serves.worker():
        await put(serves, old.body, "a", "hello")
        await settle(serves)
        async with client(local, new.schema, beside=serves) as db:
            await put(serves, old.body, "b", "hello")
            await trio.sleep(10.0)
            assert [change.key for change in before] == ["a"]
            with pytest.raises(perco.errors.SchemaMismatch, match="declare it as version 3"):
                await settle(serves)
            async with db.worker():
                await settle(db)
        assert sorted(change.key for change in after) == ["a", "b"]
    assert [record.levelname for record in caplog.records if "is version 2" in record.message] == ["ERROR"]


@pytest.mark.parametrize("one_step", [False, True])
async def test_a_run_that_is_under_way_is_of_the_lower_version_or_none(one_step: bool) -> None:  # N3 N10
    """It began before the registration and ends after it: it must not pass for a run of the higher version."""
    local = memory()
    old, (new, after) = Web(), counting(2)
    begun, go_on = trio.Event(), trio.Event()

    @old.observe(old.body, id="count")
    async def slow(txn: perco.Transaction, change: Change) -> None:
        begun.set()
        await go_on.wait()
        txn.set(old.note, change.key, "of the old one")

    async with client(local, old.schema, one_step=one_step) as serves, serves.worker() as worker:
        await put(serves, old.body, "a", "hello")
        await begun.wait()
        if one_step:  # the same process declares it anew
            serves.schema.observers["count"] = replace(serves.schema.observers["count"], version=2)
            await declare(serves)
            await serves.backfill()
        else:
            async with client(local, new.schema, beside=serves):
                pass
        go_on.set()
        await until(lambda: worker.statistics()["count"].conflicts)
        await trio.sleep(10.0)
        assert worker.statistics()["count"].commits == 0
        assert len(notified(serves)) == 2, "the change's own, and that of the higher version"
    async with client(local, new.schema) as db, db.worker():
        await settle(db)
        assert await get(db, new.note, "a") is None
    assert [change.key for change in after] == ["a"]


async def test_a_run_that_has_drawn_its_commit_timestamp_takes_nothing_away() -> None:  # N2
    """It removes the notify cell of its change when the higher version has put its own already."""
    local = memory()
    (old, before), (new, after) = counting(1), counting(2)
    async with client(local, old.schema) as serves:
        await put(serves, old.body, "a", "hello")
        store = HoldingStore(local.store, lambda mutation: writes_to(mutation, WRITE, "a"))
        inside(serves).driver.store = inside(serves).driver.reads = store  # type: ignore[assignment]
        async with serves.worker() as worker:
            await store.held.wait()  # locked, and its commit timestamp is drawn
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def registers() -> None:
                    async with client(local, new.schema, beside=serves, sweeping=False) as db:
                        assert len(notified(db)) == 2

                await trio.sleep(1.0)
                store.let_go()
            await until(lambda: worker.statistics()["count"].commits)
            assert len(notified(serves)) == 1
    async with client(local, new.schema) as db, db.worker():
        await settle(db)
    assert ([change.key for change in before], [change.key for change in after]) == (["a"], ["a"])


async def test_what_an_older_process_tidies_up_is_not_what_a_higher_version_waits_for() -> None:  # N2
    """It has seen, by its own version, that there is nothing to do, and removes notify cells later."""
    local = memory()
    (old, before), (new, after) = counting(1), counting(2)
    await observed(local, old, "a")
    async with client(local, old.schema) as serves:
        ack = next(column for _, _, column, _, value in tablets_cells(local.store, WRITE) if _kind(value) == ACK)
        commit_ts = before[0].commit_ts
        cell = (NOTIFY, ack, commit_ts, pack_cause(commit_ts, 0))
        await local.store.apply([Mutation("docs", ((b"a", (), (cell,)),))])  # left over: it was put twice
        store = HoldingStore(local.store, lambda mutation: _removes(mutation, NOTIFY))
        inside(serves).driver.store = inside(serves).driver.reads = store  # type: ignore[assignment]
        async with serves.worker():
            await store.held.wait()
            async with client(local, new.schema, beside=serves):
                pass
            store.let_go()
            await trio.sleep(1.0)
        assert len(notified(serves)) == 1
    await observed(local, new)
    assert [change.key for change in after] == ["a"]


def _kind(value: bytes) -> int:
    return unpack_record(value).kind


def _removes(mutation: Any, group: str) -> bool:
    return any(write[0] == group and write[3] is None for _, _, writes in mutation.rows for write in writes)


@pytest.mark.parametrize("version", [0, -1, 1.0, "2", None, True, [], 1 << 32])
def test_a_version_that_is_none(version: Any) -> None:
    web = Web()
    with pytest.raises(perco.UsageError, match="version is"):
        web.counting(web.body, id="count", version=version)


@pytest.mark.parametrize("backfill", ["a", 1, None, []])
def test_a_backfill_that_is_neither(backfill: Any) -> None:
    web = Web()
    with pytest.raises(perco.UsageError, match="backfill is True or False"):
        web.counting(web.body, id="count", backfill=backfill)


async def test_it_works_through_open(autojump_clock: trio.testing.MockClock) -> None:
    web, seen = counting(3)
    options = perco.Options(seed=OPTIONS.seed)
    async with perco.open("memory:", web.schema, options=options) as db, db.worker():
        await put(db, web.body, "a", "hello")
        assert await db.wait_idle() == 0
        assert acks(db) == {b"a": [3]}
    assert [change.key for change in seen] == ["a"]


@pytest.mark.parametrize("backfilled", [True, False])
async def test_what_a_lower_version_failed_for_may_be_dropped_and_the_higher_one_runs_all_the_same(
    backfilled: bool,
) -> None:  # N3, N10
    """Whether it has been told of that already or not."""
    local, old = memory(), Web()

    @old.observe(old.body, id="count")
    async def failing(txn: perco.Transaction, change: Change) -> None:
        raise ZeroDivisionError

    async with client(local, old.schema) as db:
        await put(db, old.body, "a", "hello")
        async with db.worker(options=perco.WorkerOptions(attempts=1)):
            assert await db.wait_idle(timeout=1000.0) == 1
    new, after = counting(2)
    async with client(local, new.schema, backfilled=backfilled) as db:
        assert bool(notified(db)) == backfilled
        assert await db.drop_failed("count") == 1
        await db.backfill()
        async with db.worker():
            assert await db.wait_idle(timeout=1000.0) == 0
        assert [change.key for change in after] == ["a"]
        assert nothing_is_left(db)
