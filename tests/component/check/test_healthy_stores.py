"""What is as it should be gives no findings."""

from __future__ import annotations

import pathlib

import pytest
import trio

import perco
from perco.txn.check import CheckOptions, check
from tests.component.check.stores import LONG, PARTS, Docs, Store, fill, opened


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
        await store.lock(start_ts, (b"a", rank), (b"a", rank), (b"z", rank))
        result = await store.check()
    assert result.findings == ()
    assert (result.locks, result.unsettled) == (2, 0)


async def test_a_secondary_may_be_locked_before_its_primary() -> None:
    async with opened() as store:
        rank = store.number(store.docs.rank)
        start_ts = await store.draw()
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
        self._driver = store.db.driver

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
        await store.db.declare()
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
        docs.schema.observe(docs.contents, id="parse", existing=False)(docs.parse)
        await store.db.declare()
        assert (await store.check()).findings == ()
        async with store.db.transaction() as txn:
            txn.set(docs.contents, "b", b"1")
        result = await store.check()
        assert result.findings == ()
        assert result.notifications == 1


async def test_progress_is_told_by_the_page() -> None:
    async with opened() as store:
        await fill(store)
        told: list[tuple[str, int]] = []
        await check(store.db.driver.store, progress=lambda seen: told.append((seen.table, seen.rows)))
    assert told[0][0] == "docs"
    assert told[-1] == ("words", 8)
    assert len(told) > 2


@pytest.mark.parametrize("kind", ["memory", "folder"])
async def test_nothing_is_reported_beside_busy_writers(kind: str, tmp_path: pathlib.Path) -> None:
    docs = Docs()
    url = "memory:" if kind == "memory" else tmp_path / "s"
    async with opened(url, docs) as store:
        db = store.db
        stop = trio.Event()

        async def write(number: int) -> None:
            round = 0
            while not stop.is_set():
                round += 1
                await db.run(_touch, docs, number, round)

        checks = 0
        async with trio.open_nursery() as nursery, db.worker(concurrency=8, scanners=2):
            for number in range(4):
                nursery.start_soon(write, number)
            while checks < 6 or db.statistics().counters.commits < 60:
                for options in (CheckOptions(), PARTS):
                    result = await store.check(options)
                    assert [f for f in result.findings if f.severity != "note"] == []
                    checks += 1
            stop.set()
        assert result.records > 60
        assert db.statistics().counters.lock_waits, "they did get into each other's way"


async def _touch(txn: perco.Transaction, docs: Docs, number: int, round: int) -> None:
    for key in ("a", "k", "z"):
        before = await txn.get(docs.note, f"{key}{number}")
        txn.set(docs.note, f"{key}{number}", (before or b"")[-3:] + LONG * (round % 2))
    if round % 5 == 0:
        txn.delete(docs.contents, f"k{number}")
    else:
        txn.set(docs.contents, f"k{number}", LONG + bytes([round % 256]))
    txn.set(docs.rank, "shared", round)
