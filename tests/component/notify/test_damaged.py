"""One damaged cell does not take the store away: a run that meets it is told its place, and all others go on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.protocol.records import PUT, PUT_DATA, READ, Cellref, Lock, ack_of, pack_cause, pack_lock, pack_record
from perco.storage import APPLIED, LOCK, NOTIFY, SHARED, WRITE, Mutation
from perco.tablets.local import LocalStore
from tests.component.notify.kit import (
    LONG_S,
    OPTIONS,
    Web,
    client,
    get,
    memory,
    notified,
    put,
    settle,
    tablets_cells,
    until,
)
from tests.support.everywhere import owning
from tests.support.places import local_of

Txn = perco.Transaction
JUNK = b"junk"


async def plant(
    db: Database, group: str, key: str, column: int, ts: int, value: bytes | None, table: str = "docs"
) -> None:
    """Put a cell, as nobody but a broken disk would."""
    [verdict] = await local_of(db).store.apply([Mutation(table, ((key.encode(), (), ((group, column, ts, value),)),))])
    assert verdict is APPLIED


def number(db: Database, column: perco.Column[Any, Any]) -> int:
    return inside(db).known.bind(column).column


def lock_of(primary: Cellref, kind: int = PUT, body: bytes = b"1", covers: tuple[int, ...] = ()) -> bytes:
    return pack_lock(Lock(kind, primary, body, (), covers, 0, 0, ""))


async def swept(db: Database) -> None:
    await until(lambda: local_owner(owning(db)).sweeper.clean)


# Values of a lock on docs["a"].body that cannot be decoded; and the cell that is named for it.
async def not_a_lock(db: Database, web: Web) -> None:
    await plant(db, LOCK, "a", number(db, web.body), 1, JUNK)


async def not_a_shared_lock(db: Database, web: Web) -> None:
    await plant(db, SHARED, "a", number(db, web.body), 1, JUNK)


async def of_no_table(db: Database, web: Web) -> None:
    await plant(db, LOCK, "a", number(db, web.body), 1, lock_of(Cellref("nowhere", b"a", 1)))


async def of_a_primary_without_sense(db: Database, web: Web) -> None:
    column = number(db, web.body)
    await plant(db, LOCK, "a", column, 1, lock_of(Cellref("docs", b"p", column)))
    await plant(db, WRITE, "p", column, 2, JUNK)


async def of_a_primary_with_two_fates(db: Database, web: Web) -> None:
    column = number(db, web.body)
    await plant(db, LOCK, "a", column, 1, lock_of(Cellref("docs", b"p", column)))
    await plant(db, WRITE, "p", column, 2, pack_record(PUT, 1, b"1"))
    await plant(db, "rollback", "p", column, 1, b"")


async def of_a_primary_that_committed_before_it_began(db: Database, web: Web) -> None:
    column = number(db, web.body)
    await plant(db, LOCK, "a", column, 1, lock_of(Cellref("docs", b"p", column)))
    await plant(db, WRITE, "p", column, 1, pack_record(PUT, 1, b"1"))


async def that_covers_what_came_later(db: Database, web: Web) -> None:
    column = number(db, web.body)
    await plant(db, LOCK, "a", column, 1, lock_of(Cellref("docs", b"p", column), covers=(2,)))
    await plant(db, WRITE, "p", column, 2, pack_record(PUT, 1, b"1"))


async def of_no_data_group(db: Database, web: Web) -> None:
    await plant(db, LOCK, "a", number(db, web.body), 1, lock_of(Cellref("docs", b"a", 1), PUT_DATA, b"elsewhere"))


async def of_an_impossible_primary(db: Database, web: Web) -> None:
    await plant(db, LOCK, "a", number(db, web.body), 1, lock_of(Cellref("docs", b"a" * 600, 1)))


Damage = Callable[[Database, Web], Awaitable[None]]
LOCKS: dict[Damage, str] = {
    not_a_lock: "docs['a'].body, lock group",
    of_no_table: "docs['a'].body, lock group",
    of_a_primary_without_sense: "docs['p'].body, write group",
    of_a_primary_with_two_fates: "docs['p'].body, write group",
    of_a_primary_that_committed_before_it_began: "docs['p'].body, write group",
    that_covers_what_came_later: "docs['a'].body, lock group",
    of_no_data_group: "docs['a'].body, lock group",
    of_an_impossible_primary: "docs['a'].body, lock group",
}


async def planted(local: LocalStore, web: Web, damage: Damage) -> None:
    """A store with some healthy locks of the dead besides."""
    async with client(local, web.schema, sweeping=False) as db:
        for _ in range(10):
            await inside(db).oracle.draw()  # timestamps of the dead are not those of the living
        await damage(db, web)
        column = number(db, web.size)
        for key in ("a", "b", "z"):
            await plant(db, LOCK, key, column, 3, lock_of(Cellref("docs", b"b", column)))


@pytest.mark.parametrize("damage", [*LOCKS, not_a_shared_lock])
async def test_the_sweeper_goes_on_with_all_other_locks(
    web: Web, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:  # L1, N1
    local = memory()
    await planted(local, web, damage)
    for _ in range(2):  # whenever it is opened
        caplog.clear()
        async with client(local, web.schema) as db:
            await swept(db)
            assert [row for row, *_ in _raw_locks(db)] == [b"a"]
            place = LOCKS.get(damage, "docs['a'].body, lock group")
            assert owning(db).statistics().damaged == (place,)
            assert [place in record.message for record in caplog.records] == [True]
            assert "perco check" in caplog.text
            for _ in range(2):  # again when something was left behind; it does not tell again, nor spin
                tries = inside(db).driver.counters.rolled_back
                inside(db).driver.orphaned.set()
                await trio.testing.wait_all_tasks_blocked()
                await swept(db)
                assert (len(caplog.records), inside(db).driver.counters.rolled_back) == (1, tries)
            await put(db, web.body, "b", "hello")  # the store works
            assert await get(db, web.body, "b") == "hello"
            assert inside(db).background.failure() is None
    await local.aclose()


def _raw_locks(db: Database) -> list[tuple[bytes, int, bytes]]:
    return [
        (row, ts, value)
        for group in (LOCK, SHARED)
        for _, row, _, ts, value in tablets_cells(local_of(db).store, group)
    ]


async def by_get(db: Database, web: Web) -> object:
    return await get(db, web.body, "a")


async def by_get_many(db: Database, web: Web) -> object:
    async with db.snapshot() as snap:
        return await snap.get_many(web.body, ["b", "a"])


async def by_row(db: Database, web: Web) -> object:
    async with db.snapshot() as snap:
        return await snap.row(web.docs, "a")


async def by_scan(db: Database, web: Web) -> object:
    async with db.snapshot() as snap:
        return await snap.scan(web.docs).all()


async def in_the_past(db: Database, web: Web) -> object:
    async with db.snapshot(ts=inside(db).oracle.last) as snap:
        return await snap.get_many(web.body, ["b", "a"])


async def by_set(db: Database, web: Web) -> object:
    return await put(db, web.body, "a", "new")


async def by_set_with_others(db: Database, web: Web) -> object:
    async with db.transaction() as txn:
        for key in ("z", "a", "b"):
            txn.set(web.body, key, "new")
    return None


READS = [by_get, by_get_many, by_row, by_scan, in_the_past]
Meeting = Callable[[Database, Web], Awaitable[object]]


@pytest.mark.parametrize("one_step", [True, False])
@pytest.mark.parametrize("meet", [*READS, by_set, by_set_with_others])
@pytest.mark.parametrize("damage", LOCKS)
async def test_who_meets_the_lock_is_told_its_place(
    web: Web, damage: Damage, meet: Meeting, one_step: bool
) -> None:  # T9
    local = memory()
    await planted(local, web, damage)
    async with client(local, web.schema, one_step=one_step) as db:
        await put(db, web.body, "b", "hello")
        with pytest.raises(perco.errors.Corruption, match="Run `perco check`") as caught:
            await meet(db, web)
        assert str(caught.value).startswith(LOCKS[damage])
        assert caught.value.cell == ("docs", LOCKS[damage][6], "body")
        await swept(db)
        assert await get(db, web.body, "b") == "hello"  # nothing of what failed has come in
        assert await put(db, web.body, "z", "there")
        assert inside(db).background.failure() is None
        assert [row for row, *_ in _raw_locks(db)] == [b"a"]
    await local.aclose()


async def not_a_record(db: Database, web: Web) -> None:
    await plant(db, WRITE, "a", number(db, web.body), inside(db).oracle.last, JUNK)


async def of_an_unknown_kind(db: Database, web: Web) -> None:
    await plant(db, WRITE, "a", number(db, web.body), inside(db).oracle.last, pack_record(READ, 1, b""))


async def that_names_no_group(db: Database, web: Web) -> None:
    await plant(db, WRITE, "a", number(db, web.body), inside(db).oracle.last, pack_record(PUT_DATA, 1, b"\xff"))


async def that_points_at_nothing(db: Database, web: Web) -> None:
    await plant(db, WRITE, "a", number(db, web.body), inside(db).oracle.last, pack_record(PUT_DATA, 1, b"data"))


async def not_a_text(db: Database, web: Web) -> None:
    await plant(db, WRITE, "a", number(db, web.body), inside(db).oracle.last, pack_record(PUT, 1, b"\xff"))


RECORDS: list[Damage] = [not_a_record, of_an_unknown_kind, that_names_no_group, that_points_at_nothing, not_a_text]


@pytest.mark.parametrize("meet", READS)
@pytest.mark.parametrize("damage", RECORDS)
async def test_who_reads_the_record_is_told_its_place(web: Web, damage: Damage, meet: Meeting) -> None:  # T9
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await put(db, web.body, "b", "hello")
        await damage(db, web)
        with pytest.raises(perco.errors.Corruption, match=r"^docs\['a'\]\.body.* Run `perco check`") as caught:
            await meet(db, web)
        assert caught.value.cell == ("docs", "a", "body")
        assert await get(db, web.body, "b") == "hello"


# ------------------------------------------------------------ idle


@pytest.mark.parametrize("damage", LOCKS)
async def test_a_lock_that_may_be_a_notification_is_not_idle_and_not_waited_for(web: Web, damage: Damage) -> None:  # N7
    changes = web.counting(web.body, id="count")
    local = memory()
    await planted(local, web, damage)
    async with client(local, web.schema) as db:
        await swept(db)
        async with db.worker():
            for key in "bcdxyz":
                await put(db, web.body, key, "hello")
            with (
                pytest.raises(perco.errors.Corruption, match=r"docs\['.'\]\.body.* Run `perco check`"),
                trio.fail_after(LONG_S),
            ):
                await db.wait_idle()
            assert {"b", "c", "d", "x", "y", "z"} <= {change.key for change in changes}, "first all that can be done"
            with pytest.raises(perco.errors.Corruption, match=r"docs\['.'\]\.body"), trio.fail_after(LONG_S):
                await db.wait_for(inside(db).oracle.last)
        assert not await db.is_idle()
        if damage is not of_a_primary_without_sense:  # for then changes wait, too, and no worker runs them
            with pytest.raises(perco.errors.Corruption, match=r"docs\['.'\]\.body"), trio.fail_after(LONG_S):
                await db.wait_idle()
    await local.aclose()


async def test_a_lock_of_what_nobody_observes_is_no_notification(web: Web) -> None:  # N7
    changes = web.counting(web.body, id="count")
    local = memory()
    async with client(local, web.schema, sweeping=False) as db:
        assert await inside(db).oracle.draw() == 1, "or the one who puts below would own these locks"
        await plant(db, LOCK, "a", number(db, web.note), 1, JUNK)
        await plant(db, SHARED, "a", number(db, web.size), 1, JUNK)
    async with client(local, web.schema) as db, db.worker():
        await put(db, web.body, "a", "hello")
        await settle(db)
        await db.wait_for(inside(db).oracle.last, timeout=LONG_S)
        assert await db.is_idle()
        assert [change.key for change in changes] == ["a"]
        assert len(owning(db).statistics().damaged) == 1 + 1
    await local.aclose()


# ------------------------------------------------------------ observers


async def a_notification(db: Database, web: Web) -> None:
    ack = ack_of(number(db, web.body), inside(db).catalogue.observers["count"].number)
    await plant(db, NOTIFY, "a", ack, inside(db).oracle.last, JUNK)


async def an_ack(db: Database, web: Web) -> None:
    ack = ack_of(number(db, web.body), inside(db).catalogue.observers["count"].number)
    await plant(db, WRITE, "a", ack, 1, JUNK)


async def an_ack_of_another_kind(db: Database, web: Web) -> None:
    ack = ack_of(number(db, web.body), inside(db).catalogue.observers["count"].number)
    await plant(db, WRITE, "a", ack, 1, pack_record(PUT, 1, b""))


async def the_lock_of_an_ack(db: Database, web: Web) -> None:
    ack = ack_of(number(db, web.body), inside(db).catalogue.observers["count"].number)
    await plant(db, LOCK, "a", ack, 1, JUNK)


async def the_record(db: Database, web: Web) -> None:
    await plant(db, WRITE, "a", number(db, web.body), inside(db).oracle.last, JUNK)


async def the_value(db: Database, web: Web) -> None:
    await plant(db, WRITE, "a", number(db, web.body), inside(db).oracle.last, pack_record(PUT, 1, b"\xff"))


@pytest.mark.parametrize(
    "damage", [a_notification, an_ack, an_ack_of_another_kind, the_lock_of_an_ack, the_record, the_value]
)
async def test_what_cannot_be_read_does_not_starve_others(web: Web, damage: Damage) -> None:  # N6, N7
    changes = web.counting(web.body, id="count")
    others = web.counting(web.size, id="other")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        async with db.transaction() as txn:
            txn.set(web.size, "a", 5)
            txn.set(web.body, "a", "hello")
        await damage(db, web)
        async with db.worker(concurrency=1, scanners=1) as worker:
            for key in "bcxyz":
                await put(db, web.body, key, "hello")
            with pytest.raises(perco.errors.Corruption, match=r"docs\['a'\]\.body"), trio.fail_after(LONG_S):
                await db.wait_idle()
            assert sorted(change.key for change in changes) == list("bcxyz")
            assert [change.key for change in others] == ["a"]
            with pytest.raises(perco.errors.Corruption, match=r"docs\['a'\]\.body"), trio.fail_after(LONG_S):
                await db.wait_for(inside(db).oracle.last)
            failed = worker.statistics()["count"].failures
            await trio.sleep(30)
            assert 0 < worker.statistics()["count"].failures - failed < 20, "tried again, with growing pauses"
            await put(db, web.body, "d", "later")
            await until(lambda: changes[-1].key == "d")
            assert {row for row, _ in notified(db)} == {b"a"}
            assert inside(db).background.failure() is None


async def test_it_is_idle_again_when_the_cell_has_been_put_right(web: Web) -> None:  # N7
    changes = web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "hello")
        await settle(db)
        start_ts, commit_ts = await inside(db).oracle.draw(), await inside(db).oracle.draw()
        await plant(db, WRITE, "a", number(db, web.body), commit_ts, pack_record(PUT, start_ts, b"\xff"))
        await a_notification_of(db, web, commit_ts)
        with (
            pytest.raises(perco.errors.Corruption, match=r"docs\['a'\]\.body, value: not text"),
            trio.fail_after(LONG_S),
        ):
            await db.wait_idle()
        await put(db, web.body, "a", "mended")
        await settle(db)
        assert changes[-1].value == "mended"
        assert await db.is_idle()


async def a_notification_of(db: Database, web: Web, ts: int) -> None:
    ack = ack_of(number(db, web.body), inside(db).catalogue.observers["count"].number)
    await plant(db, NOTIFY, "a", ack, ts, pack_cause(ts, 0))
    assert inside(db).workers.worker is not None
    inside(db).workers.worker.wake_up()


@pytest.mark.parametrize("damage", [not_a_lock, of_no_table, the_record])
async def test_an_observer_can_be_registered_for_a_column_with_a_damaged_cell(web: Web, damage: Damage) -> None:  # N10
    local = memory()
    async with client(local, web.schema, sweeping=False) as db:
        for key in "abz":
            await put(db, web.body, key, "hello")
        await damage(db, web)
    changes = web.counting(web.body, id="count")
    async with client(local, web.schema) as db, db.worker():
        with pytest.raises(perco.errors.Corruption, match=r"docs\['a'\]\.body"), trio.fail_after(LONG_S):
            await db.wait_idle()
        assert sorted(change.key for change in changes) == ["b", "z"]
        assert len(db.statistics().damaged) >= 1
        assert [row for row, _ in notified(db)] == [b"a"], "its change still waits"
    await local.aclose()


async def test_whoever_waits_is_told_where_some_is_damaged_and_the_rest_is_paused(web: Web) -> None:  # N7
    """Neither is all that waits, and none of it will ever run."""
    web.counting(web.body, id="count")
    web.counting(web.note, id="paused")
    async with client(memory(), web.schema) as db, db.worker() as worker:
        await db.pause("paused")
        await put(db, web.note, "a", "hello")
        ts = await put(db, web.note, "b", "hello")
        await db.pause("count")
        await plant(db, WRITE, "a", number(db, web.body), await put(db, web.body, "a", "hello"), JUNK)
        await db.resume("count")
        await until(lambda: worker.statistics()["count"].failures)
        with pytest.raises(perco.UsageError, match="paused: 'paused'"):
            await db.wait_idle(timeout=LONG_S)
        with pytest.raises(perco.UsageError, match="paused: 'paused'"):
            await db.wait_for(ts, timeout=LONG_S)
        await db.resume("paused")
        with pytest.raises(perco.errors.Corruption, match=r"docs\['a'\]\.body"):
            await settle(db)
