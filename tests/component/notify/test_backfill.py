"""Telling observers of what is there: in the background, in pages, with progress; `wait_idle` waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
import trio

import perco
from perco.check.check import CheckOptions, check
from perco.database.inside import inside, local_owner
from perco.notify.backfill import BACKFILL_ROW, Noted, noted, unpack_noted
from perco.protocol.records import ack_of, column_of
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import DATA, NOTIFY, Failed, Mutation, Verdict
from tests.component.notify.kit import (
    LONG_S,
    HoldingStore,
    StoppedError,
    StoppingStore,
    Web,
    client,
    get,
    memory,
    notified,
    put,
    settle,
    until,
)
from tests.support.everywhere import owning
from tests.support.faults import Fault, FaultyRowStore
from tests.support.places import local_of

Change = perco.Change[Any, Any]
KEYS = [f"{letter}{n:02}" for letter in "aiq" for n in range(20)]
PAGED = perco.Options(seed=1, backfill=perco.options.BackfillOptions(on=False, page_rows=8))
ALWAYS = perco.Options(seed=1, backfill=perco.options.BackfillOptions(share=1.0, page_rows=8))


async def filled(keys: list[str] = KEYS) -> Any:
    """A store with values that nobody observes."""
    local, web = memory(), Web()
    async with client(local, web.schema) as db, db.transaction() as txn:
        for key in keys:
            txn.set(web.body, key, f"of {key}")
    return local


async def findings(db: perco.Database) -> list[Any]:
    result = await check(local_of(db).store, options=CheckOptions(pause_s=0.0))
    return [finding for finding in result.findings if finding.severity != "note"]


async def test_it_goes_on_in_the_background_while_others_write(web: Web) -> None:  # N10
    local = await filled()
    seen = web.counting(web.body, id="count")
    async with client(local, web.schema, options=ALWAYS, backfilled=False) as db, db.worker():
        assert local_owner(db).backfilling.left
        assert not await db.is_idle()
        await put(db, web.body, "a00", "new")
        await settle(db)
        assert inside(owning(db)).catalogue.observers["count"].ready
        assert await findings(db) == []
    assert sorted(change.key for change in seen) == KEYS
    assert {change.value for change in seen if change.key == "a00"} == {"new"}


async def test_waiting_waits_for_it(web: Web) -> None:  # N7
    local = await filled()
    seen = web.counting(web.body, id="count")
    store = HoldingStore(local.store, lambda mutation: mutation.rows[0][0] == b"q05")
    async with client(local, web.schema, options=ALWAYS, backfilled=False, store=store) as db, db.worker():
        await store.held.wait()
        await until(lambda: len(seen) == 40 and not local_owner(db).idle.pending())
        with pytest.raises(perco.NotIdle):
            await db.wait_idle(timeout=5.0)
        with pytest.raises(perco.NotIdle):
            await db.wait_for(1, timeout=5.0)
        store.let_go()
        await db.wait_for(1, timeout=LONG_S)
        assert len(seen) == len(KEYS)
        await settle(db)


async def test_nobody_waits_for_what_is_turned_off(web: Web) -> None:  # N7
    local = await filled()
    web.counting(web.body, id="count")
    async with client(local, web.schema, options=PAGED, backfilled=False) as db, db.worker():
        with pytest.raises(
            perco.UsageError, match=r"observers have not been notified .*: count\. .* `await db\.backfill\(\)`"
        ):
            await db.wait_idle()
        await db.backfill()
        await settle(db)


async def test_it_tells_how_far_it_is(web: Web) -> None:
    local = await filled()
    web.counting(web.body, id="count")
    told: list[perco.BackfillProgress] = []
    async with client(local, web.schema, options=PAGED, backfilled=False) as db:
        [done] = await db.backfill(progress=told.append)
        assert (done.id, done.version, done.table, done.rows, done.notified, done.done) == (
            *("count", 1, "docs"),
            *(60, 60, True),
        )
        assert [each.rows for each in told] == [8, 16, 20, 28, 36, 40, 48, 56, 60], "pages end where tablets do"
        assert await db.backfill() == []


async def test_it_goes_on_where_it_was_cut_short(web: Web) -> None:  # N10
    local = await filled()
    web.counting(web.body, id="count")
    store = StoppingStore(local.store)
    told: list[perco.BackfillProgress] = []
    async with client(local, web.schema, options=PAGED, backfilled=False, store=store) as db:
        store.left = 1 + 1 + 8 + 1 + 8 + 1 + 2  # a range, from when on, two pages, and a part of the third
        with pytest.raises(StoppedError):
            await db.backfill()
    async with client(local, web.schema, options=PAGED, backfilled=False) as db:
        entry = inside(db).catalogue.observers["count"]
        assert await noted(local.store, entry) == Noted(entry.at, b"a16", 16, 16)
        assert len(notified(db)) == 18
        [done] = await db.backfill(progress=told.append)
        assert told[0].rows == 20
        assert (done.rows, done.notified) == (60, 60)
        assert sorted(notified(db)) == [(key.encode(), entry.at) for key in KEYS]


async def test_what_a_backfill_has_noted_of_another_registration_is_not_believed(web: Web) -> None:  # N10
    local = await filled(["a", "b", "z"])
    web.counting(web.body, id="count")
    async with client(local, web.schema, backfilled=False) as db:
        number = inside(db).catalogue.observers["count"].number
        late = (DATA, number, 1, msgpack.packb([1, b"c", 2, 2]))
        await local.store.apply([Mutation(SYSTEM_TABLE, ((BACKFILL_ROW, (), (late,)),))])
        [done] = await db.backfill()
        assert done.notified == 3


async def test_what_does_not_read_is_begun_anew(web: Web) -> None:  # N10
    local = await filled(["a", "z"])
    web.counting(web.body, id="count")
    async with client(local, web.schema, backfilled=False) as db:
        cell = (DATA, inside(db).catalogue.observers["count"].number, 1, b"?")
        await local.store.apply([Mutation(SYSTEM_TABLE, ((BACKFILL_ROW, (), (cell,)),))])
        assert len(await findings(db)) == 1
        [done] = await db.backfill()
        assert done.notified == 2
        assert len(db.statistics().damaged) == 1


@pytest.mark.parametrize(
    "value", [b"", b"\x01", b"\x93\x01\x02\x03", b"\x94\xff\xc4\x00\x00\x00", b"\x94\x01\xa0\x00\x00"]
)
def test_notes_that_are_none(value: bytes) -> None:
    with pytest.raises(perco.errors.Corruption, match="cannot be decoded"):
        unpack_noted(value)


async def test_what_fails_in_the_background_is_tried_again(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    local = await filled(["a", "b", "z"])
    seen = web.counting(web.body, id="count")
    failing = [True]
    store = FaultyRowStore(local.store, lambda m, n: Fault.FAIL if failing and _is_told(m) else None)
    async with client(local, web.schema, options=ALWAYS, backfilled=False) as db, db.worker():
        inside(db).driver.store = inside(db).driver.reads = store  # type: ignore[assignment]
        await trio.sleep(100.0)
        assert store.fired[Fault.FAIL] > 3
        assert not await db.is_idle()
        assert isinstance(local_owner(db).backfilling.failure, perco.StoreError)
        failing.clear()
        await settle(db)
        assert local_owner(db).backfilling.failure is None
    assert len(seen) == 3
    assert [record.levelname for record in caplog.records if record.name == "perco.backfill"] == ["WARNING"]


async def test_a_split_in_its_way_does_not_end_it(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:  # N10, P1
    local = await filled(["a", "b", "z"])
    seen = web.counting(web.body, id="count")
    split = perco.errors.TabletSplit(web.body.table.name)
    splits = [Failed(split), Failed(split)]
    store = FaultyRowStore(local.store, lambda m, n: None)
    right = store.apply

    async def apply(mutations: Sequence[Mutation]) -> list[Verdict]:
        return [splits.pop()] * len(mutations) if splits and _is_told(mutations[0]) else await right(mutations)

    monkeypatch.setattr(store, "apply", apply)
    async with client(local, web.schema, options=ALWAYS, backfilled=False) as db, db.worker():
        inside(db).driver.store = inside(db).driver.reads = store  # type: ignore[assignment]
        await trio.sleep(100.0)
        await settle(db)
    assert splits == []
    assert len(seen) == 3


def _is_told(mutation: Mutation) -> bool:
    return any(write[0] == NOTIFY for _, _, writes in mutation.rows for write in writes)


@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.LOSE_REQUEST])
async def test_a_note_whose_reply_is_lost_is_not_taken_for_made(web: Web, fault: Fault) -> None:
    local = await filled()
    web.counting(web.body, id="count")
    async with client(local, web.schema, options=PAGED, backfilled=False) as db:
        left = [fault]
        store = FaultyRowStore(local.store, lambda m, n: left.pop() if left and m.rows[0][0] == BACKFILL_ROW else None)
        inside(db).driver.store = inside(db).driver.reads = store  # type: ignore[assignment]
        with pytest.raises(perco.errors.WriteUnknown):
            await db.backfill()
        assert store.fired[fault] == 1
    async with client(local, web.schema, options=PAGED) as db:
        assert len(notified(db)) == len(KEYS)


async def test_new_columns_have_nothing_to_tell(web: Web) -> None:  # N10
    """An observer that comes with its column or table is told of everything from the beginning."""
    web.counting(web.body, id="count")
    async with client(memory(), web.schema, backfilled=False) as db:
        entry = inside(db).catalogue.observers["count"]
        assert (entry.ready, entry.whole, entry.at) == (True, True, 0)
        assert inside(db).catalogue.version == 1


async def test_no_transaction_runs_again_for_its_progress(web: Web) -> None:  # N10
    """From when on it tells, and that it is done, need not be known to who writes."""
    local = await filled()
    web.counting(web.body, id="count")
    async with client(local, web.schema, options=PAGED, backfilled=False) as db:
        txn = await db.begin()
        txn.set(web.body, "new", "value")
        await db.backfill()
        assert inside(db).catalogue.version > inside(db).catalogue.binds
        await txn.commit()
        assert len(notified(db)) == len(KEYS) + 1


async def test_a_lost_notification_of_a_backfill_is_found_and_put_right() -> None:  # N1 N10
    local, old, new = memory(), Web(), Web()
    old.counting(old.body, id="count")
    seen = new.counting(new.body, id="count", version=2)
    async with client(local, old.schema) as db, db.worker():
        await put(db, old.body, "a", "one")
        await put(db, old.body, "b", "two")
        await settle(db)
        assert await findings(db) == []
    async with client(local, new.schema) as db:
        assert await findings(db) == [], "cells of a backfill are for what was there"
        entry = inside(db).catalogue.observers["count"]
        column = column_of(inside(db).catalogue.tables["docs"].columns["body"].number)
        gone = (NOTIFY, ack_of(column, entry.number), entry.at, None)
        await local.store.apply([Mutation("docs", ((b"a", (), (gone,)),))])
        [finding] = await findings(db)
        assert (finding.severity, finding.invariant) == ("error", "N1")
        assert "has not seen the change" in finding.what
        assert finding.repair is not None
        await local.store.apply([finding.repair.mutation])
        assert await findings(db) == []
        async with db.worker():
            await settle(db)
        assert await findings(db) == []
        assert await get(db, new.count, "count/a") == 2
    assert sorted(change.key for change in seen) == ["a", "b"]


async def test_what_a_higher_version_leaves_alone_is_no_loss() -> None:  # N10
    local, old, new = memory(), Web(), Web()
    old.counting(old.body, id="count")
    new.counting(new.body, id="count", version=2, backfill=False)
    async with client(local, old.schema) as db, db.worker():
        await put(db, old.body, "a", "one")
        await settle(db)
    async with client(local, new.schema) as db, db.worker():
        assert await findings(db) == []
        await put(db, new.body, "b", "two")
        await settle(db)
        assert await findings(db) == []


async def test_a_vacuum_while_it_goes_on_takes_nothing_away(web: Web) -> None:  # G3 N10
    local = memory()
    bare = Web()
    async with client(local, bare.schema) as db:
        for key in ("a", "b", "z"):
            await put(db, bare.body, key, "old")
        await put(db, bare.body, "b", None)
    seen = web.counting(web.body, id="count")
    web.schema.keep = perco.Keep(seconds=0)
    async with client(local, web.schema, backfilled=False) as db:
        await put(db, web.body, "a", "new")
        await db.vacuum()
        await db.backfill()
        await db.vacuum()
        async with db.worker():
            await settle(db)
    assert sorted((change.key, change.value) for change in seen) == [("a", "new"), ("z", "old")]


@pytest.mark.parametrize("share", [0, -1, 1.5, "a", None, float("nan")])
def test_a_share_that_is_none(share: Any) -> None:
    with pytest.raises(perco.UsageError, match="share"):
        perco.options.BackfillOptions(share=share)


@pytest.mark.parametrize("rows", [0, -1, 1.5, "a", None])
def test_pages_that_are_none(rows: Any) -> None:
    with pytest.raises(perco.UsageError, match="page_rows"):
        perco.options.BackfillOptions(page_rows=rows)


async def test_it_needs_a_store_that_can_be_written() -> None:
    async with perco.open("memory:", Web().schema) as db:
        assert await db.backfill() == []
    with pytest.raises(perco.errors.TransactionClosed):
        await db.backfill()
