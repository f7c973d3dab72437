"""Observers that are dropped: `db.drop_observer` (N12)."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.notify import dropping
from perco.notify.backfill import Backfill
from perco.notify.waiting import Waiting
from perco.protocol.records import observer_of
from perco.storage import FAILED_LIST, NOTIFY
from tests.component.notify.kit import (
    LONG_S,
    StoppedError,
    StoppingStore,
    Web,
    client,
    get,
    memory,
    notified,
    put,
    settle,
    tablets_cells,
)
from tests.support.places import local_of


def counting(version: int = 1) -> Web:
    web = Web()
    web.counting(web.body, id="first", version=version)
    web.counting(web.body, id="second")
    return web


def plain(*ids: str) -> Web:
    """The schema of a program that declares only these observers."""
    web = Web()
    for id in ids:
        web.counting(web.body, id=id)
    return web


def left(db: perco.Database, number: int) -> list[str]:
    """The groups of the cells that wait for an observer."""
    store = local_of(db).store
    return [
        group
        for group in (NOTIFY, FAILED_LIST)
        for _, _, column, _, _ in tablets_cells(store, group)
        if observer_of(column) == number
    ]


async def test_what_waits_for_a_dropped_observer_goes_and_nothing_waits_for_it_any_more() -> None:  # N12, N7
    local = memory()
    async with client(local, counting().schema) as db:
        number = inside(db).catalogue.observers["first"].number
        for key in ("a", "m", "z"):
            await put(db, web_body(db), key, "text")
    async with client(local, plain("second").schema) as db:
        async with db.worker():
            with pytest.raises((perco.UsageError, perco.NotIdle), match=r"no running program has: first|3 for 'first'"):
                await db.wait_idle(timeout=30)
            assert await db.drop_observer("first") == {"first": 3}
            await settle(db)
            assert left(db, number) == []
            assert "first" not in {state.id for state in await db.observers()}
            assert "first" not in await db.waiting()
            await put(db, web_body(db), "b", "text")
            await settle(db)
        assert left(db, number) == []
        assert await db.drop_observer(["first"]) == {"first": 0}, "again: nothing is left"
        counts = [await get(db, db.schema.tables["counts"].columns["count"], f"second/{key}") for key in "abmz"]
        assert counts == [1, 1, 1, 1]


def web_body(db: perco.Database) -> perco.Column[Any, Any]:
    return db.schema.tables["docs"].columns["body"]


async def test_an_observer_that_is_registered_again_begins_as_a_new_one() -> None:  # N12, N3, N10
    local = memory()
    async with client(local, counting(version=7).schema) as db:
        old = inside(db).catalogue.observers["second"].number
        async with db.worker():
            await put(db, web_body(db), "a", "text")
            await settle(db)
        await db.drop_observer(["first", "second"])
    again = counting()
    async with client(local, again.schema) as db:
        entries = inside(db).catalogue.observers
        assert entries["first"].version == 1
        assert old < min(entries["first"].number, entries["second"].number)
        async with db.worker():
            await settle(db)
            await put(db, again.body, "b", "text")
            await settle(db)
        assert await get(db, again.count, "first/a") == 2, "by the old one and, from the backfill, by the new one"
        assert await get(db, again.count, "first/b") == 1


async def test_an_observer_that_a_worker_has_is_not_dropped() -> None:  # N12
    web = counting()
    async with client(memory(), web.schema) as db, db.worker():
        with pytest.raises(perco.UsageError, match="a process runs observer 'first': stop the worker"):
            await db.drop_observer(["first"])
        await put(db, web.body, "a", "text")
        await settle(db)
        assert await get(db, web.count, "first/a") == 1
        with pytest.raises(perco.UsageError, match="no observer 'third' in this store; there are: 'first', 'second'"):
            await db.drop_observer("third")


async def test_failed_changes_go_too(caplog: pytest.LogCaptureFixture) -> None:  # N12, N6
    caplog.set_level(logging.CRITICAL, "perco.observer")
    local, web = memory(), Web()

    @web.observe(web.body, id="first")
    async def first(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        raise RuntimeError("always")

    async with client(local, web.schema) as db:
        async with db.worker(options=perco.WorkerOptions(attempts=1)):
            await put(db, web.body, "a", "text")
            assert await db.wait_idle(timeout=LONG_S) == 1
        assert await db.drop_observer("first") == {"first": 1}
        assert await db.failed() == []
        assert await db.failed_count() == 0


async def test_a_signal_that_waits_goes_too() -> None:  # N12, N5
    local, web = memory(), Web()
    grown = web.docs.signal("grown")

    @web.schema.observe(grown, id="first")
    async def first(txn: perco.Transaction, change: perco.Change[str, None]) -> None:
        raise AssertionError

    async with client(local, web.schema) as db:
        async with db.transaction() as txn:
            txn.signal(grown, "a")
        await db.drop_observer("first")
        assert notified(db) == []
        async with db.transaction() as txn:
            txn.signal(grown, "a")
        assert await db.wait_idle(timeout=LONG_S) == 0


async def test_what_a_dead_client_left_locked_notifies_no_dropped_observer() -> None:  # N12, N1
    """It had committed under the earlier catalogue, and nobody has settled its lock."""
    for left_of in range(1, 8):
        local, web = memory(), counting()
        store = StoppingStore(local.store)
        async with client(local, web.schema, sweeping=False) as db:
            number = inside(db).catalogue.observers["first"].number
        with contextlib.suppress(StoppedError, BaseExceptionGroup):
            async with client(local, web.schema, store=store, sweeping=False) as doomed:
                store.left = left_of
                async with doomed.transaction() as txn:
                    txn.set(web.body, "a", "text")
                    txn.set(web.body, "z", "text")
        async with client(local, plain("second").schema, sweeping=False) as db:
            await db.drop_observer("first")
        async with client(local, plain("second").schema) as db, db.worker():
            await settle(db)
            assert left(db, number) == []


async def test_a_transaction_that_began_before_a_drop_does_not_commit_after_it() -> None:  # N12, N10
    local = memory()
    async with client(local, counting().schema) as db:
        number = inside(db).catalogue.observers["first"].number
        txn = await db.begin()
        txn.set(web_body(db), "a", "text")
        await db.drop_observer("first")
        with pytest.raises(perco.errors.CatalogueChanged):
            await txn.commit()
        assert left(db, number) == []


async def test_a_drop_that_was_interrupted_is_completed_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:  # N12
    local, web = memory(), counting()
    async with client(local, web.schema) as db:
        number = inside(db).catalogue.observers["first"].number
        for i in range(400):
            await put(db, web.body, f"{i:03}", "text")
    right, calls = dropping._clean_row, 0

    async def clean_row(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 200:
            raise perco.Unavailable("interrupted")
        return await right(*arguments)

    monkeypatch.setattr(dropping, "_clean_row", clean_row)
    async with client(local, plain("second").schema) as db:
        with pytest.raises(perco.Unavailable, match="interrupted"):
            await db.drop_observer("first")
        assert 0 < len(left(db, number)) < 400
    async with client(local, plain("second").schema) as db, db.worker():
        assert (await db.drop_observer("first"))["first"] > 0
        await settle(db)
        assert left(db, number) == []


@pytest.mark.parametrize("page", [1, 2, 4])
async def test_an_observer_is_dropped_while_it_is_notified_of_existing_data(  # N12, N10
    monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """The backfill puts the notify cells of a page that it read before the drop; and it ends."""
    local, old, web = memory(), plain(), counting()
    async with client(local, old.schema) as db:
        for i in range(900):
            await put(db, old.body, f"{i:04}", "text")
    reached, may_go_on, right, pages = trio.Event(), trio.Event(), Backfill._notify, 0

    async def notify(self: Backfill, id: str, *arguments: Any) -> int:
        nonlocal pages
        pages += id == "first"
        if id == "first" and pages == page:
            reached.set()
            await may_go_on.wait()
        return await right(self, id, *arguments)

    monkeypatch.setattr(Backfill, "_notify", notify)
    async with client(local, web.schema, backfilled=False) as db:
        number = inside(db).catalogue.observers["first"].number
        async with trio.open_nursery() as nursery:
            nursery.start_soon(db.backfill)
            await reached.wait()
            await db.drop_observer("first")
            may_go_on.set()
        assert left(db, number) == []
        assert inside(db).catalogue.observers["second"].ready


async def test_a_wait_beside_what_an_interrupted_drop_has_left(monkeypatch: pytest.MonkeyPatch) -> None:  # N12, N7
    """No observer handles it, so no wait goes on for ever: a wait for a change leaves it out, and one for an idle store
    says what to do."""
    local, web = memory(), counting()
    async with client(local, web.schema) as db:
        await put(db, web.body, "left", "text")

    async def interrupted(*arguments: Any) -> int:
        raise perco.Unavailable("interrupted")

    later = plain("second")
    async with client(local, later.schema) as db, db.worker():
        with monkeypatch.context() as patch:
            patch.setattr(dropping, "_clean_row", interrupted)
            with pytest.raises(perco.Unavailable, match="interrupted"):
                await db.drop_observer("first")
        await put(db, later.body, "later", "text")
        await db.wait_for(await inside(db).oracle.newest(), timeout=LONG_S)
        with pytest.raises(perco.UsageError, match=r"being dropped: first\. .* repeat the drop"):
            await db.wait_idle(timeout=LONG_S)
        assert (await db.drop_observer("first"))["first"] == 1
        await db.wait_idle(timeout=LONG_S)


@pytest.mark.parametrize("rest", ["dropped", "paused"])
async def test_a_wait_for_a_change_is_not_refused_for_what_it_does_not_wait_for(
    monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:  # N7, N12
    """Between the look that finds a change and the check that some program runs its observer, the observer runs. The
    change that is left then waits for a dropped observer, or was committed later."""
    local, web, later = memory(), counting(), Web()
    counts, may_run = Waiting.counts, trio.Event()
    async with client(local, web.schema) as db:
        await put(db, web.body, "left", "text")

    async def interrupted(*arguments: Any) -> int:
        raise perco.Unavailable("interrupted")

    @later.observe(later.body, id="second")
    async def second(txn: perco.Transaction, change: perco.Change[Any, Any]) -> None:
        await may_run.wait()
        await later.add(txn, change.key)

    if rest == "paused":
        later.counting(later.body, id="first")
        later.counting(later.note, id="third")

    async with client(local, later.schema) as db, db.worker():
        if rest == "paused":
            await db.pause("third")
        else:
            with monkeypatch.context() as patch:
                patch.setattr(dropping, "_clean_row", interrupted)
                with pytest.raises(perco.Unavailable, match="interrupted"):
                    await db.drop_observer("first")
        ts = await put(db, later.body, "a", "text")
        await put(db, later.note, "a", "text")
        checks: list[bool] = []

        async def runs_first(self: Waiting, **arguments: Any) -> dict[str, int]:
            checks.append(may_run.is_set())
            may_run.set()
            with trio.fail_after(LONG_S):
                while (await counts(self))["second"]:  # noqa: ASYNC110
                    await trio.sleep(0.05)  # virtual time
            return await counts(self, **arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Waiting, "counts", runs_first)
            await db.wait_for(ts)
        assert checks[:1] == [False], "the check came while the observer was about to run"
        assert await get(db, later.count, "a") == 1
        with pytest.raises(perco.UsageError, match=r"that are being dropped: first|that are paused: 'third'"):
            await db.wait_idle()


async def test_beside_writers_no_transaction_notifies_a_dropped_observer_later() -> None:  # N12, N10
    local, web = memory(), plain("second")
    async with client(local, counting().schema) as db:
        number = inside(db).catalogue.observers["first"].number
    async with client(local, web.schema) as db, db.worker():
        done = False

        async def writes(key: str) -> None:
            while not done:
                await put(db, web.body, key, "text")
                await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            for key in ("a", "k", "z"):
                nursery.start_soon(writes, key)
            await trio.sleep(0.5)
            await db.drop_observer("first")
            await trio.sleep(0.5)
            assert left(db, number) == []
            done = True
        await settle(db)
        assert left(db, number) == []
