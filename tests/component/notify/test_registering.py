"""Observers are data of the store: registering one, lacking one, moving one."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.storage import LOCK, WRITE
from tests.component.notify.kit import (
    OPTIONS,
    HoldingStore,
    StoppedError,
    StoppingStore,
    Web,
    client,
    get,
    locks,
    memory,
    nothing_is_left,
    notified,
    put,
    settle,
    tablets_cells,
    until,
    writes_to,
)
from tests.support.faults import Fault, FaultyRowStore, on
from tests.support.places import local_of

Txn = perco.Transaction
Change = perco.Change[Any, Any]

KEYS = [f"{letter}{n:03}" for letter in "aiq" for n in range(200)]  # pages of 256 rows, in three tablets


async def fill(db: perco.Database, web: Web, keys: list[str]) -> int:
    async with db.transaction() as txn:
        for key in keys:
            txn.set(web.body, key, f"of {key}")
    return txn.commit_ts


async def test_a_new_observer_runs_for_what_is_there(web: Web) -> None:  # N10
    async with client(memory(), Web().schema, sweeping=False) as first:
        await fill(first, web_of(first), KEYS)
        seen = web.counting(web.body, id="count")
        async with client(local_of(first), web.schema) as db:
            assert len(notified(db, "count")) == len(KEYS)
            assert inside(db).catalogue.observers["count"].ready
            async with db.worker():
                await settle(db)
        assert sorted(change.key for change in seen) == KEYS
        async with client(local_of(first), web.schema) as db, db.worker():
            await settle(db)
        assert len(seen) == len(KEYS), "once registered, it is not new any more"


def web_of(db: perco.Database) -> Web:
    """The declarations that a client was opened with."""
    web = Web.__new__(Web)
    web.docs, web.counts = db.schema.tables["docs"], db.schema.tables["counts"]
    web.body, web.size, web.note = (web.docs.columns[name] for name in ("body", "size", "note"))
    web.count = web.counts.columns["count"]
    web.schema = db.schema
    return web


async def test_a_back_filled_value_and_a_later_change_are_both_seen(web: Web) -> None:  # N3, N10
    async with client(memory(), Web().schema, sweeping=False) as first:
        old = await fill(first, web_of(first), ["a", "z"])
        seen = web.counting(web.body, id="count")
        async with client(local_of(first), web.schema) as db:
            new = await put(db, web.body, "a", "new")
            async with db.worker():
                await settle(db)
                assert sorted((change.key, change.commit_ts) for change in seen) == [("a", new), ("z", old)]
                assert await get(db, web.count, "count/a") == 1


async def test_what_was_deleted_is_not_there(web: Web) -> None:  # N10
    async with client(memory(), Web().schema, sweeping=False) as first:
        await fill(first, web_of(first), ["a", "b"])
        await put(first, web_of(first).body, "a", None)
        seen = web.counting(web.body, id="count")
        async with client(local_of(first), web.schema) as db, db.worker():
            await settle(db)
    assert [change.key for change in seen] == ["b"]


async def test_an_observer_that_does_not_want_what_is_there(web: Web) -> None:  # N10
    async with client(memory(), Web().schema, sweeping=False) as first:
        await fill(first, web_of(first), KEYS)
        seen = []

        @web.observe(web.body, id="later", backfill=False)
        async def later(txn: Txn, change: Change) -> None:
            seen.append(change.key)

        async with client(local_of(first), web.schema) as db, db.worker():
            assert notified(db) == []
            await put(db, web.body, "a000", "new")
            await settle(db)
        assert seen == ["a000"]


async def test_what_a_dead_writer_had_committed_is_there(web: Web) -> None:  # N1, N10, T9
    """Its locks do not list the new observer: they must be settled before one looks what is there."""
    async with client(memory(), Web().schema, sweeping=False) as first:
        store = StoppingStore(local_of(first).store)
        async with client(local_of(first), first.schema, store=store) as doomed:
            inside(doomed).driver._event = lambda name: store.stop() if name == "commit" else None
            await fill(doomed, web_of(first), ["a", "i", "q"])
        assert len(locks(first)) == 2
        seen = web.counting(web.body, id="count")
        async with client(local_of(first), web.schema) as db, db.worker():
            await settle(db)
        assert sorted(change.key for change in seen) == ["a", "i", "q"]


async def test_what_a_dead_writer_had_not_committed_is_not_there(web: Web) -> None:  # N10, T5
    async with client(memory(), Web().schema, sweeping=False) as first:
        await fill(first, web_of(first), ["i"])
        store = StoppingStore(local_of(first).store)
        async with client(local_of(first), first.schema, store=store) as doomed:
            inside(doomed).driver._event = lambda name: store.stop() if name == "prewrite" else None
            txn = await doomed.begin()
            for key in ("a", "i", "q"):
                txn.set(web_of(first).body, key, "undecided")
            with pytest.raises(StoppedError):
                await txn.commit()
        assert len(locks(first)) == 3
        seen = web.counting(web.body, id="count")
        async with client(local_of(first), web.schema) as db, db.worker():
            await settle(db)
        assert [(change.key, change.value) for change in seen] == [("i", "of i")]


@pytest.mark.parametrize("steps", [0, 1, 2, 100, 202, 203, 300, 500, 602, 603, 604])
async def test_a_back_fill_that_dies_half_way_is_resumed(steps: int) -> None:  # N10
    async with client(memory(), Web().schema, sweeping=False) as first:
        await fill(first, web_of(first), KEYS)
        web = Web()
        seen = web.counting(web.body, id="count")
        store = StoppingStore(local_of(first).store)
        store.left = 2 + steps  # the catalogue, the oracle's range; then
        stopped = await opens(first, web, store)
        made = 1 + len(KEYS) + 2 + 1  # from when on, a notify cell each, how far it is after two of three pages, done
        assert stopped == (steps < made)
        async with client(local_of(first), web.schema) as db:
            assert len(notified(db, "count")) == len(KEYS)
            async with db.worker():
                await settle(db)
        assert sorted(change.key for change in seen) == KEYS
        async with client(local_of(first), web.schema) as db:
            assert nothing_is_left(db)


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_back_fill_whose_reply_is_lost_is_not_done(arrives: bool) -> None:  # N10, T4
    async with client(memory(), Web().schema, sweeping=False) as first:
        await fill(first, web_of(first), KEYS)
        web = Web()
        web.counting(web.body, id="count")
        fault = Fault.LOSE_REPLY if arrives else Fault.LOSE_REQUEST
        store = FaultyRowStore(local_of(first).store, on("notify", fault))
        with pytest.raises(perco.errors.WriteUnknown):
            async with client(local_of(first), web.schema, store=store):
                pass
        assert store.fired[fault] == 1
        async with client(local_of(first), web.schema) as db:
            assert len(notified(db, "count")) == len(KEYS)


async def opens(first: perco.Database, web: Web, store: StoppingStore) -> bool:
    """Whether the client died while it was opened."""
    try:
        async with client(local_of(first), web.schema, store=store):
            pass
    except StoppedError:
        return True
    return False


async def test_another_program_resumes_a_back_fill(web: Web) -> None:  # N10
    """... that need not have the observer itself."""
    async with client(memory(), Web().schema, sweeping=False) as first:
        await fill(first, web_of(first), KEYS)
        seen = web.counting(web.body, id="count")
        store = StoppingStore(local_of(first).store)
        store.left = 200
        assert await opens(first, web, store)
        async with client(local_of(first), Web().schema) as other:
            assert await other.unserved() == {"count"}
            assert len(notified(other, "count")) == len(KEYS)
        async with client(local_of(first), web.schema) as db, db.worker():
            await settle(db)
        assert sorted(change.key for change in seen) == KEYS


# ---------------------------------------------------------------- lacking one


async def test_a_worker_leaves_the_cells_of_observers_that_it_lacks(web: Web) -> None:  # N10, N11
    both, one = web, Web()
    mine = both.counting(both.body, id="mine")
    theirs = both.counting(both.body, id="theirs")
    alone = one.counting(one.body, id="mine")
    async with client(memory(), both.schema) as first:
        await put(first, both.body, "a", "hello")
        async with client(local_of(first), one.schema) as db, db.worker() as worker:
            await until(lambda: alone)
            await put(db, one.body, "z", "hello")
            await until(lambda: len(alone) == 2)
            await trio.sleep(10.0)
            assert set(worker.statistics()) == {"mine"}
            assert (len(notified(db, "mine")), len(notified(db, "theirs"))) == (0, 2)
        async with client(local_of(first), both.schema) as db, db.worker():
            await settle(db)
    assert (len(mine), len(theirs)) == (0, 2)


async def test_a_loader_under_an_older_catalogue_must_run_again(web: Web) -> None:  # N10
    """An observer is registered between a loader's prewrite and its commit timestamp."""
    web.counting(web.body, id="count")
    bare = Web()
    async with client(memory(), bare.schema, sweeping=False) as first:
        txn = await first.begin()
        for key in ("a", "z"):
            txn.set(bare.body, key, "hello")
        store = HoldingStore(local_of(first).store, lambda mutation: writes_to(mutation, LOCK, "a"))
        inside(first).driver.store = inside(first).driver.reads = store
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def commit() -> None:
                with pytest.raises(perco.errors.CatalogueChanged):
                    await txn.commit()

            await store.held.wait()
            async with client(local_of(first), web.schema, beside=first, sweeping=False) as other:
                assert set(inside(other).catalogue.observers) == {"count"}
            store.let_go()
        assert list(tablets_cells(local_of(first).store, WRITE)) == []
        await until(lambda: not locks(first))  # let go of in the background


# ---------------------------------------------------------------- contradictions


def one_column(codec: perco.Codec[Any], *, group: str | None = None, key: perco.Codec[Any] = perco.TEXT) -> Any:
    table = perco.Table("docs", key=key)
    column = table.column("body", codec, group=group)
    other = table.column("other", perco.TEXT)
    return perco.Schema(table), column, other


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        pytest.param({"codec": perco.BYTES}, "docs.body is text .* bytes", id="codec"),
        pytest.param({"codec": perco.TEXT, "group": "raw"}, "docs.body .*'data:raw'", id="group"),
        pytest.param({"codec": perco.TEXT, "key": perco.BYTES}, "'docs' has keys of text .* bytes", id="key"),
    ],
)
async def test_a_column_declared_otherwise_is_refused(changed: dict[str, Any], words: str) -> None:  # N10
    schema, body, _ = one_column(perco.TEXT)
    async with client(memory(), schema) as first:
        await put(first, body, "a", "hello")
        before = inside(first).catalogue
        with pytest.raises(perco.errors.SchemaMismatch, match=words):
            async with client(local_of(first), one_column(**changed)[0]):
                pass
        async with client(local_of(first), schema) as db:
            assert inside(db).catalogue == before, "nothing was changed"
            assert await get(db, body, "a") == "hello"


async def test_an_observer_on_another_column_needs_another_id() -> None:  # N10
    async def nothing(txn: Txn, change: Change) -> None: ...

    schema, body, _ = one_column(perco.TEXT)
    schema.observe(body, id="mine")(nothing)
    moved, _, other = one_column(perco.TEXT)
    moved.observe(other, id="mine")(nothing)
    async with client(memory(), schema) as first:
        with pytest.raises(perco.errors.SchemaMismatch, match=r"'mine' is registered for docs\.body, .* docs\.other"):
            async with client(local_of(first), moved):
                pass


async def test_an_observer_declared_after_the_store_was_opened_is_named(web: Web) -> None:  # N10
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        web.counting(web.body, id="late")
        with pytest.raises(perco.errors.SchemaMismatch, match="late"):
            async with db.worker():
                pass


def test_two_observers_need_two_ids(web: Web) -> None:  # N10
    web.counting(web.body, id="count")
    with pytest.raises(perco.UsageError, match="two observers"):
        web.counting(web.size, id="count")


def test_a_column_of_another_schema_cannot_be_observed(web: Web) -> None:  # N10
    with pytest.raises(perco.errors.SchemaMismatch, match="not in this schema"):
        web.schema.observe(Web().body, id="count")
