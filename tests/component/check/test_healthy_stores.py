"""A healthy store gives no findings."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio._core import _run as scheduler
from trio.testing import wait_all_tasks_blocked

import perco
from perco.check.check import CheckOptions, check
from perco.check.repair import repair
from perco.clock.oracle import published
from perco.database.inside import inside, local_owner
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import LOCK, NOTIFY, ROLLBACK, LocalRowStore, ReadRequest, RowCells, ScanPage, ScanRequest
from tests.component.check.stores import LONG, PARTS, Docs, Store, fill, opened
from tests.support.places import local_of


@pytest.mark.parametrize("options", [CheckOptions(), PARTS], ids=["at once", "in parts"])
async def test_a_store_with_a_bit_of_everything_is_clean(options: CheckOptions) -> None:
    async with opened() as store:
        await fill(store)
        result = await store.check(options)
    assert result.findings == ()
    assert result.clean
    assert result.tables == 2
    assert result.rows == 4 + 4  # docs, words
    assert result.notifications == 1
    assert not result.locks
    assert not result.again, "nothing looked wrong at first sight"
    assert result.sampled == 1
    assert result.ts


async def test_both_ways_of_reading_a_row_see_the_same_cells() -> None:
    async with opened() as store:
        await fill(store)
        whole, parts = await store.check(), await store.check(PARTS)
    assert (whole.cells, whole.records, whole.rows) == (parts.cells, parts.records, parts.rows)


async def test_an_empty_store_is_clean() -> None:
    async with opened() as store:
        result = await store.check()
    assert result.clean
    assert not result.cells


async def test_an_undecided_transaction_is_nothing_to_report() -> None:
    async with opened() as store:
        rank = store.number(store.docs.rank)
        start_ts = await store.draw()
        inside(store.db).fates.begin(start_ts)
        await store.lock(start_ts, (b"a", rank), (b"a", rank), (b"z", rank))
        result = await store.check()
    assert result.findings == ()
    assert (result.locks, result.unsettled) == (2, 0)


async def test_the_locks_of_a_client_that_is_gone_are_orphans_and_a_repair_rolls_them_back() -> None:  # L1 T5
    async with opened() as store:
        start_ts = await store.draw()
        rank, was = store.number(store.docs.rank), await store.cells()
        await store.lock(start_ts, (b"a", rank), (b"a", rank), (b"z", rank))
        result = await store.check()
        assert [(finding.severity, finding.invariant) for finding in result.findings] == [("note", "L1")] * 2
        assert f"orphan: transaction {start_ts} is undecided" in result.findings[0].what
        assert result.clean
        assert (result.orphans, result.unsettled) == (2, 0)
        done = await store.repair()
        assert (done.settled, done.after.findings) == (2, ())
        assert await store.cells() == {**was, ("docs", "rollback", b"a", rank, start_ts): b""}


async def test_a_repair_rolls_forward_what_had_committed() -> None:  # T8 N1
    docs = Docs()
    async with opened(docs=docs) as store:
        async with _without_phase_two(store), store.db.transaction() as txn:
            txn.set(docs.note, "a", b"1")
            txn.set(docs.contents, "z", LONG)
        assert (await store.check()).unsettled == 1
        done = await store.repair()
        assert (done.settled, done.after.findings) == (1, ())
        assert done.after.notifications == 1
        async with store.db.snapshot() as snap:
            assert await snap.get(docs.contents, "z") == LONG


async def test_a_secondary_may_be_locked_before_its_primary() -> None:
    async with opened() as store:
        rank = store.number(store.docs.rank)
        start_ts = await store.draw()
        inside(store.db).fates.begin(start_ts)
        await store.lock(start_ts, (b"a", rank), (b"z", rank))
        result = await store.check()
    assert result.findings == ()


async def test_the_lock_of_a_rolled_back_transaction_is_unsettled() -> None:  # T5: the primary first
    async with opened() as store:
        rank = store.number(store.docs.rank)
        start_ts = await store.draw()
        await store.lock(start_ts, (b"a", rank), (b"z", rank))
        await store.plant(b"a", ("rollback", rank, start_ts, b""))
        result = await store.check()
    assert [(finding.severity, finding.invariant) for finding in result.findings] == [("note", "T3")]
    assert f"unsettled: transaction {start_ts} was rolled back" in result.findings[0].what
    assert result.clean
    assert result.unsettled == 1


async def test_what_a_process_left_that_died_after_the_commit_point_is_unsettled(tmp_path: pathlib.Path) -> None:
    docs = Docs(observe=False)
    async with opened(tmp_path / "s", docs) as store, _without_phase_two(store):
        async with store.db.transaction() as txn:
            txn.set(docs.contents, "a", LONG)
            txn.set(docs.contents, "z", LONG)
        result = await store.check()
        assert [finding.severity for finding in result.findings] == ["note"]
        assert f"committed at {txn.commit_ts}" in result.findings[0].what
        assert result.clean


class _without_phase_two:
    """Phase two is dropped, as by a process that dies."""

    def __init__(self, store: Store) -> None:
        self._driver = inside(store.db).driver

    async def __aenter__(self) -> None:
        self._driver._begin_phase_two = lambda commit, *, observed: None

    async def __aexit__(self, *error: object) -> None:
        del self._driver._begin_phase_two


async def test_a_failing_observer_keeps_its_notification() -> None:
    docs = Docs()
    docs.fails = True
    async with opened(docs=docs) as store:
        async with store.db.worker(concurrency=1, scanners=1) as worker:
            async with store.db.transaction() as txn:
                txn.set(docs.contents, "a", b"1")
            while not worker.statistics()["parse"].failures:
                await trio.lowlevel.checkpoint()
        result = await store.check()
    assert result.findings == ()
    assert result.notifications == 1


async def test_an_observer_that_was_registered_later_has_been_told_of_all() -> None:
    async with opened(docs=Docs(observe=False)) as store:
        docs = store.docs
        async with store.db.transaction() as txn:
            txn.set(docs.contents, "a", b"1")
            txn.delete(docs.contents, "b")
        docs.schema.observe(docs.contents, id="parse")(docs.parse)
        await local_owner(store.db).declare()
        await store.db.backfill()
        result = await store.check()
        assert result.findings == ()
        assert result.notifications >= 1
        async with store.db.worker(concurrency=1, scanners=1):
            await store.db.wait_idle()
        assert (await store.check()).findings == ()


async def test_an_observer_registered_without_the_past_misses_nothing_of_it() -> None:
    async with opened(docs=Docs(observe=False)) as store:
        docs = store.docs
        async with store.db.transaction() as txn:
            txn.set(docs.contents, "a", b"1")
        docs.schema.observe(docs.contents, id="parse", backfill=False)(docs.parse)
        await local_owner(store.db).declare()
        await store.db.backfill()
        assert (await store.check()).findings == ()
        async with store.db.transaction() as txn:
            txn.set(docs.contents, "b", b"1")
        result = await store.check()
        assert result.findings == ()
        assert result.notifications == 1


async def test_a_lock_that_is_gone_when_its_primary_is_asked_is_no_orphan() -> None:  # L1
    """Its client gave up and left nothing, between the look at the row and the question."""
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.lock(start_ts, (b"a", rank), (b"z", rank))
        assert (await store.check()).orphans == 1

        class Giving(_Slow):
            async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
                if requests[0][1] == b"a":  # the primary
                    await store.plant(b"z", (LOCK, rank, start_ts, None))
                return await super().read(requests)

        result = await check(Giving(local_of(store.db).store), alive=inside(store.db).fates.alive)
        assert (result.locks, result.orphans, result.findings) == (1, 0, ())


async def test_a_group_that_is_declared_meanwhile_is_not_strange(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # N10
    async with opened(tmp_path / "s") as store:

        async def later(given: LocalRowStore) -> Any:
            store.docs.docs.column("late", perco.BYTES, group="late")
            await local_owner(store.db).declare()
            await store.db.backfill()
            return await published(given)

        monkeypatch.setattr(perco.check.check, "published", later)
        assert (await store.check()).findings == ()
        assert "data:late" in local_of(store.db).store.tablet("docs", b"").groups()


async def test_a_repair_wakes_the_worker_that_it_has_work_for() -> None:  # N1 N7 N8
    docs = Docs()
    async with opened(docs=docs) as store:
        async with store.db.transaction() as txn:
            txn.set(docs.contents, "a", b"1")
        await store.plant(b"a", (NOTIFY, store.ack, txn.commit_ts, None))
        async with store.db.worker(concurrency=1, scanners=1) as worker:
            await wait_all_tasks_blocked()
            assert worker.statistics()["parse"].runs == 0
            assert len((await store.repair()).repaired) == 1
            await wait_all_tasks_blocked()
            assert worker.statistics()["parse"].commits == 1


async def test_what_a_vacuum_should_have_removed_is_counted() -> None:  # G3 G4
    docs = Docs(keep_s=0.0)
    async with opened(docs=docs) as store:
        await fill(store)
        rank = store.number(docs.rank)
        dead = await store.draw()
        await store.plant(b"a", (ROLLBACK, rank, dead, b""))
        whole = await store.cells()
        assert (await store.check()).waste == 0, "nobody has said that it is not needed"
        async with store.db.transaction() as txn:
            txn.set(docs.note, "new", b"1")
        await wait_all_tasks_blocked()
        done = await store.db.vacuum()
        assert (await store.check()).waste == 0
        gone = whole.keys() - (await store.cells()).keys()
        removed = {key: whole[key] for key in gone if key[0] != SYSTEM_TABLE}
        assert len(removed) == done.removed.cells - done.removed.notes - done.removed.system > 20
        for (table, group, row, column, ts), value in removed.items():
            await store.plant(row, (group, column, ts, value), table=table)
        result = await store.check()
        assert (result.findings, result.waste) == ((), len(removed))
        await store.db.vacuum()
        assert (await store.check()).waste == 0


async def test_progress_is_told_by_the_page() -> None:
    async with opened() as store:
        await fill(store)
        told: list[tuple[str, int]] = []
        await check(inside(store.db).driver.store, progress=lambda seen: told.append((seen.table, seen.rows)))
    assert told[0][0] == "docs"
    assert told[-1] == ("words", 8)
    assert len(told) > 2


@pytest.mark.parametrize("kind", ["memory-1", "memory-2", "memory-3", "folder"])
@pytest.mark.parametrize("repairing", [False, True], ids=["checked", "repaired"])
async def test_beside_busy_writers_nothing_is_reported_and_nothing_repaired(
    kind: str, repairing: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, seed = kind.partition("-")
    if seed:  # tasks are scheduled by it
        monkeypatch.setattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        scheduler._r.seed(int(seed))
    docs = Docs(keep_s=0.0)
    async with opened("memory:" if name == "memory" else tmp_path / "s", docs, range_size=8) as store:
        db = store.db
        slow = _Slow(local_of(db).store)
        stop = trio.Event()

        async def write(number: int) -> None:
            round = 0
            while not stop.is_set():
                round += 1
                await db.run(_touch, docs, number, round)

        async def vacuum() -> None:
            while not stop.is_set():
                await db.vacuum()

        checks = again = 0
        async with trio.open_nursery() as nursery, db.worker(concurrency=8, scanners=2):
            for number in range(4):
                nursery.start_soon(write, number)
            nursery.start_soon(vacuum)
            while checks < 4 or db.statistics().counters.commits < 100 or (not again and checks < 400):
                for options in (CheckOptions(pause_s=0.001), CheckOptions(row_cells=16, data_cells=4, pause_s=0.0)):
                    if repairing:
                        done = await repair(inside(db).driver, slow, options=options)  # type: ignore[arg-type]
                        assert done.repaired == ()
                        result = done.after
                    else:
                        result = await check(slow, alive=inside(db).fates.alive, options=options)
                    assert [f for f in result.findings if f.severity != "note"] == []
                    again += result.again
                    checks += 1
            stop.set()
        assert local_owner(db).vacuuming.removed.versions > 50
        assert again, "some things did look wrong at first sight"
        assert db.statistics().counters.lock_waits, "they did get into each other's way"
        await db.vacuum()
        result = await store.check()
        assert (result.clean, result.orphans, result.waste) == (True, 0, 0)


class _Slow:
    """A store that is read a row at a time, others being let through in between."""

    def __init__(self, store: LocalRowStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        await trio.lowlevel.checkpoint()
        return await self._store.read(requests)

    async def scan(self, request: ScanRequest) -> ScanPage:
        await trio.lowlevel.checkpoint()
        return await self._store.scan(request._replace(rows_max=1))


async def _touch(txn: perco.Transaction, docs: Docs, number: int, round: int) -> None:
    for key in ("a", "k", "z"):
        before = await txn.get(docs.note, f"{key}{number}")
        txn.set(docs.note, f"{key}{number}", (before or b"")[-3:] + LONG * (round % 2))
    if round % 5 == 0:
        txn.delete(docs.contents, f"k{number}")
    else:
        txn.set(docs.contents, f"k{number}", LONG + bytes([round % 256]))
    txn.set(docs.rank, "shared", round)
