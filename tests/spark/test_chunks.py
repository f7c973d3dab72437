"""Marks of chunks, without Spark: rows take effect once, and a partition that has changed is refused."""

from __future__ import annotations

import datetime
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

import perco
from perco.errors import UsageError
from perco.spark import ledger as ledgers, partition as partitions
from perco.spark.chunks import ChunkMark, FrameChanged, cut
from perco.spark.ledger import BYTES, CHUNK, CUT, LEDGER, RUN, Group, JobClosed, Ledger, take_of_chunk
from perco.spark.partition import Chunked, Loader, LoadOptions, PartitionResult, load_partition
from perco.txn import runs
from tests.spark import app

SCHEMA = perco.Schema(*app.schema.tables.values(), LEDGER)
CUT_SO = "2 partitions (files 0), 100 rows a chunk"


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[perco.Database, Ledger]]:
    async with perco.open("memory:", SCHEMA) as db:
        yield db, await ledgers.begin(db, "job", "", CUT_SO)


async def loaded(
    db: perco.Database,
    ledger: Ledger,
    rows: Iterator[Any] | list[Any],
    loader: Loader = app.bump,
    partition: int = 0,
    result: PartitionResult | None = None,
    **options: Any,
) -> PartitionResult:
    result, chosen = result or PartitionResult(partition), LoadOptions(**options)
    chunked = Chunked(cut(partition, iter(rows), chosen.group, BYTES))
    await load_partition(db, chunked, None, loader, ledger, chosen, result)
    return result


def inputs(count: int, names: int = 1000) -> list[dict[str, Any]]:
    return [{"id": n, "name": f"n{n % names}"} for n in range(count)]


async def total(db: perco.Database) -> int:
    async with db.snapshot() as snap:
        return sum([row.get(app.count, 0) async for row in snap.scan(app.counts)])


async def marks(db: perco.Database) -> list[list[tuple[int, int]]]:
    """The spans of all marks."""
    async with db.snapshot() as snap:
        found = [row[CHUNK] async for row in snap.scan(LEDGER, columns=[CHUNK])]
    return [ChunkMark.decode(mark).spans for mark in found if mark is not None]


async def nothing(txn: perco.Transaction, row: Any) -> None:
    raise AssertionError("this row has been loaded")


# ------------------------------------------------------------------ exactly once


async def test_one_mark_for_a_chunk_and_none_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def needless(*_: Any) -> None:
        raise AssertionError("a transaction for rows that have all been taken")

    async with opened() as (db, ledger):
        for partition in (0, 1):
            result = await loaded(db, ledger, inputs(250), partition=partition)
            assert (result.committed, result.skipped, result.failed) == (250, 0, 0)
        assert await marks(db) == [[(0, 100)], [(0, 100)], [(0, 50)]] * 2
        monkeypatch.setattr(partitions, "take_of_chunk", needless)
        for partition in (0, 1):
            result = await loaded(db, ledger, inputs(250), nothing, partition)
            assert (result.committed, result.skipped, result.failed) == (0, 250, 0)
        assert await total(db) == 500


async def test_an_attempt_that_dies_in_the_middle_is_continued() -> None:
    def dying() -> Iterator[Any]:
        yield from inputs(450)
        raise OSError("the end of the input was bad")

    async def away(txn: perco.Transaction, row: Any) -> None:
        if row["id"] == 620:
            raise perco.Unavailable("away")
        await app.bump(txn, row)

    async with opened() as (db, ledger):
        with pytest.raises(OSError, match="the end of the input"):
            await loaded(db, ledger, dying(), concurrency=1)
        committed = await total(db)
        assert 100 <= committed <= 400
        with pytest.raises(perco.Unavailable):
            await loaded(db, ledger, inputs(1000), away, concurrency=2)
        result = await loaded(db, ledger, inputs(1000))
        assert result.committed + result.skipped == 1000
        assert result.skipped >= committed
        assert await total(db) == 1000


async def test_two_attempts_at_once() -> None:
    async with opened() as (db, ledger):
        results: list[PartitionResult] = []

        async def attempt() -> None:
            results.append(await loaded(db, ledger, inputs(1000, 7)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt)
            nursery.start_soon(attempt)
        assert await total(db) == 1000
        assert [each.committed + each.skipped for each in results] == [1000, 1000]
        assert sum(each.committed for each in results) == 1000


async def test_of_two_attempts_that_take_other_rows_of_a_chunk_one_conflicts() -> None:
    """One takes the chunk as a whole; the other has halved it, and takes a row."""
    async with opened() as (db, ledger):
        [chunk] = cut(0, iter(inputs(100)), 100, BYTES)
        whole, one = Group([*enumerate(chunk.rows)], chunk), Group([(53, chunk.rows[53])], chunk)
        late = await db.begin()
        await take_of_chunk(late, ledger, whole, app.bump)
        assert whole.taken == 100
        await db.run(take_of_chunk, ledger, one, app.bump)
        with pytest.raises(perco.WriteConflict):
            await late.commit()
        result = await loaded(db, ledger, inputs(100))
        assert (result.committed, result.skipped) == (99, 1)
        assert await total(db) == 100


async def test_a_row_that_fails_in_the_middle_of_a_chunk_costs_no_other_row() -> None:
    async def refuse(txn: perco.Transaction, row: Any) -> None:
        await app.bump(txn, row)
        if row["id"] == 153:
            raise ValueError("not to be had")

    async with opened() as (db, ledger):
        result = await loaded(db, ledger, inputs(300), refuse, failures_max=1)
        assert (result.committed, result.failed, result.stopped) == (299, 1, False)
        assert result.failures[0].row.startswith("{'id': 153")
        assert await marks(db) == [[(0, 100)], [(0, 53), (54, 100)], [(0, 100)]]
        result = await loaded(db, ledger, inputs(300), refuse, failures_max=1)
        assert (result.committed, result.skipped, result.failed) == (0, 299, 1)
        result = await loaded(db, ledger, inputs(300))
        assert (result.committed, result.skipped, result.failed) == (1, 299, 0)
        assert await marks(db) == [[(0, 100)]] * 3
        assert await total(db) == 300


async def test_too_many_failures_end_it() -> None:
    async with opened() as (db, ledger):
        result = await loaded(db, ledger, inputs(5000), app.refuse, failures_max=2, concurrency=2)
        assert result.stopped
        assert result.failed >= 3
        assert result.committed < 1000
        result = await loaded(db, ledger, inputs(5000))
        assert result.committed + result.skipped == 5000


async def test_a_loader_that_commits_by_itself() -> None:
    async def commits(txn: perco.Transaction, row: Any) -> None:
        await app.bump(txn, row)
        if row["id"] % 30 == 7:
            await txn.commit()

    async with opened() as (db, ledger):
        assert (await loaded(db, ledger, inputs(250), commits)).committed == 250
        assert (await loaded(db, ledger, inputs(250), nothing)).skipped == 250
        assert await total(db) == 250


async def test_a_transaction_ends_when_it_has_written_much() -> None:
    most = 0

    async def long(txn: perco.Transaction, row: Any) -> None:
        nonlocal most
        txn.set(app.raw, f"k{row['id']:06}", b"x" * 300_000)
        await app.bump(txn, row)
        most = max(most, runs.bytes_of(txn))

    async with opened() as (db, ledger):
        assert (await loaded(db, ledger, inputs(20), long)).committed == 20
        assert 1_000_000 < most < (1 << 20) + 400_000
        assert await marks(db) == [[(0, 20)]]
        assert await total(db) == 20


# ------------------------------------------------------------------ partitions that change


async def test_a_partition_that_has_changed_is_refused_and_nothing_of_it_is_loaded() -> None:
    """Chunks 0 and 2 have marks. In chunk 1, a row is gone: so rows of chunk 2 are now in chunk 1, and it must not be
    loaded."""
    async with opened() as (db, ledger):
        for chunk in list(cut(0, iter(inputs(300)), 100, BYTES))[::2]:
            group = Group([*enumerate(chunk.rows)], chunk)
            await db.run(take_of_chunk, ledger, group, app.bump)
        rows = inputs(300)
        del rows[150]
        result = PartitionResult(0)
        with pytest.raises(FrameChanged, match=r"in its first 299 rows, so perco cannot tell .* job 'job' .* key="):
            await loaded(db, ledger, rows, nothing, result=result, failures_max=1000)
        assert (result.committed, result.failed) == (0, 0)
        assert (await loaded(db, ledger, inputs(300))).committed == 100


async def test_a_row_that_has_changed_is_found_though_its_attempts_are_at_once() -> None:
    """Another attempt has marked the chunk since this one read the marks."""
    async with opened() as (db, ledger):
        [chunk] = cut(0, iter(inputs(1)), 100, BYTES)
        [other] = cut(0, iter([{"id": 5, "name": "n5"}]), 100, BYTES)
        await db.run(take_of_chunk, ledger, Group([(0, chunk.rows[0])], chunk), app.bump)
        with pytest.raises(FrameChanged, match="in its first 1 rows"):
            await db.run(take_of_chunk, ledger, Group([(0, other.rows[0])], other), nothing)


async def test_such_an_attempt_ends_and_fails_no_row() -> None:
    """The other attempt marks the second chunk while this one loads the first."""
    async with opened() as (db, ledger):
        [_, second] = cut(0, iter(inputs(2)), 1, BYTES)

        async def overtaken(txn: perco.Transaction, row: Any) -> None:
            await db.run(take_of_chunk, ledger, Group([(0, second.rows[0])], second), app.bump)

        rows = inputs(2)
        rows[1]["name"] = "another"
        result = PartitionResult(0)
        with pytest.raises(FrameChanged):
            await loaded(db, ledger, rows, overtaken, result=result, group=1, concurrency=1, failures_max=10)
        assert (result.committed, result.failed) == (1, 0)


@pytest.mark.parametrize(("rows", "said"), [(200, "and ends before row 200"), (250, "in its first 250 rows")])
async def test_a_partition_that_has_become_shorter(rows: int, said: str) -> None:
    async with opened() as (db, ledger):
        await loaded(db, ledger, inputs(300))
        with pytest.raises(FrameChanged, match=said):
            await loaded(db, ledger, inputs(rows))


async def test_chunks_of_other_rows_are_refused() -> None:
    """Their marks are between those of the frame as it was."""
    async with opened() as (db, ledger):
        [_, second, *_] = cut(0, iter(inputs(300)), 100, BYTES)
        await db.run(take_of_chunk, ledger, Group([*enumerate(second.rows)], second), app.bump)
        with pytest.raises(FrameChanged, match="before row 180"):
            await loaded(db, ledger, inputs(300), nothing, group=90)


async def test_a_partition_that_goes_on_is_loaded_further() -> None:
    async with opened() as (db, ledger):
        await loaded(db, ledger, inputs(200))
        result = await loaded(db, ledger, inputs(300))
        assert (result.committed, result.skipped) == (100, 200)


async def test_a_chunk_of_which_all_rows_fail_has_a_mark_too() -> None:
    async def refuse(txn: perco.Transaction, row: Any) -> None:
        if row["id"] < 100:
            raise ValueError("not to be had")
        await app.bump(txn, row)

    async with opened() as (db, ledger):
        result = await loaded(db, ledger, inputs(200), refuse, failures_max=1000)
        assert (result.committed, result.failed) == (100, 100)
        assert await marks(db) == [[], [(0, 100)]]
        result = await loaded(db, ledger, inputs(200))
        assert (result.committed, result.skipped) == (100, 100)


async def test_a_frame_that_is_cut_in_another_way() -> None:
    async with opened() as (db, ledger):
        assert (await ledgers.begin(db, "job", "", CUT_SO)).run == ledger.run
        for other, said in (("3 partitions", "chunks=True and 3 partitions"), ("", "no chunks=True")):
            with pytest.raises(UsageError, match=rf"begun with chunks=True and 2 partitions.*; this call has {said}"):
                await ledgers.begin(db, "job", "", other)
        await ledgers.begin(db, "keyed")
        with pytest.raises(UsageError, match=r"'keyed' was begun with no chunks=True"):
            await ledgers.begin(db, "keyed", "", CUT_SO)
        await ledgers.acknowledge(db, "job")
        assert (await ledgers.begin(db, "job")).cut == ""


# ------------------------------------------------------------------ the end of a job, and many marks


async def test_an_acknowledgement_removes_the_marks_and_counts_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (db, ledger):
        monkeypatch.setattr(ledgers, "_REMOVED", 2)
        await loaded(db, ledger, inputs(550))
        assert await ledgers.acknowledge(db, "job") == 550
        async with db.snapshot() as snap:
            assert [row.key async for row in snap.scan(LEDGER)] == []
        with pytest.raises(JobClosed):
            await loaded(db, ledger, inputs(550))
        again = await ledgers.begin(db, "job", "", CUT_SO)
        assert (await loaded(db, again, inputs(550))).committed == 550


async def test_a_transaction_that_began_before_its_job_was_over_changes_nothing() -> None:
    async with opened() as (db, ledger):
        [chunk] = cut(0, iter(inputs(10)), 100, BYTES)
        group = Group([*enumerate(chunk.rows)], chunk)
        late = await db.begin()
        await take_of_chunk(late, ledger, group, app.bump)
        await loaded(db, ledger, inputs(10))
        await ledgers.acknowledge(db, "job")
        with pytest.raises(perco.WriteConflict):
            await late.commit()
        assert await total(db) == 10


async def test_a_mark_of_an_earlier_run_does_not_count() -> None:
    """A transaction that was under way when its job was acknowledged has left it."""
    async with opened() as (db, ledger):
        [chunk] = cut(0, iter(inputs(10)), 100, BYTES)
        late = await db.begin()
        await take_of_chunk(late, ledger, Group([*enumerate(chunk.rows)], chunk), app.bump)
        await ledgers.acknowledge(db, "job")
        await late.commit()
        again = await ledgers.begin(db, "job", "", CUT_SO)
        assert (await loaded(db, again, inputs(20))).committed == 20
        assert await ledgers.acknowledge(db, "job") == 20


async def test_an_acknowledgement_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (db, ledger):
        await loaded(db, ledger, inputs(300))

        async def dies(*_: Any) -> int:
            raise OSError("so")

        with monkeypatch.context() as patched:
            patched.setattr(ledgers, "_forget", dies)
            with pytest.raises(OSError, match="so"):
                await ledgers.acknowledge(db, "job")
        await ledgers.begin(db, "job")  # with marks of another kind
        assert await marks(db) == []
        async with db.snapshot() as snap:
            [job] = [row async for row in snap.scan(LEDGER, columns=[RUN, CUT])]
        assert job[CUT] == ""


async def test_more_marks_than_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (db, ledger):
        monkeypatch.setattr(ledgers, "_READ", 2)
        for partition in (0, 1, 2):
            await loaded(db, ledger, inputs(700), partition=partition)
        assert (await loaded(db, ledger, inputs(700), nothing, 1)).skipped == 700


async def test_marks_that_do_not_count_among_those_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the marks of chunks 0 and 2 are marks of an earlier run, with other cuts. In chunk 1, a row is gone."""
    async with opened() as (db, ledger):
        monkeypatch.setattr(ledgers, "_READ", 2)
        late = await db.begin()
        for chunk in list(cut(0, iter(inputs(300)), 10, BYTES))[1:5]:
            await take_of_chunk(late, ledger, Group([], chunk), nothing)
        await ledgers.acknowledge(db, "job")
        await late.commit()
        again = await ledgers.begin(db, "job", "", CUT_SO)
        for chunk in list(cut(0, iter(inputs(300)), 100, BYTES))[::2]:
            group = Group([*enumerate(chunk.rows)], chunk)
            await db.run(take_of_chunk, again, group, app.bump)
        rows = inputs(300)
        del rows[150]
        result = PartitionResult(0)
        with pytest.raises(FrameChanged, match="partition 0 has other rows than before, in its first 299 rows"):
            await loaded(db, again, rows, nothing, result=result, failures_max=1000)
        assert (result.skipped, result.failed) == (100, 0)


# ------------------------------------------------------------------ cuts and marks as values


def test_cuts_depend_on_the_rows_alone() -> None:
    rows = [(n, "x" * n, n / 3, None, True, b"b", datetime.date(2026, 3, 1)) for n in range(250)]
    chunks = list(cut(3, iter(rows), 100, BYTES))
    assert [(each.partition, each.first, len(each.rows)) for each in chunks] == [
        (3, 0, 100),
        (3, 100, 100),
        (3, 200, 50),
    ]
    digests = [each.digest for each in chunks]
    assert [each.digest for each in cut(3, iter(rows), 50, BYTES)][1::2] == digests[:2]
    assert len({*digests}) == 3
    assert next(cut(3, iter([rows[1], rows[0], *rows[2:]]), 100, BYTES)).digest != chunks[0].digest
    long = list(cut(0, iter(["x" * 400] * 10), 100, 1000))
    assert [each.first for each in long] == [0, 3, 6, 9]


def test_a_row_without_a_digest_is_refused() -> None:
    with pytest.raises(UsageError, match="a value of type object does not identify its input: give key="):
        next(cut(0, iter([(object(),)]), 100, BYTES))


def test_a_mark_has_the_rows_that_were_added_in_any_order() -> None:
    rng = random.Random(5)
    for _ in range(50):
        rows = rng.sample(range(30), rng.randint(0, 30))
        mark = ChunkMark(b"r" * 12, b"d" * 16, [])
        for row in rows:
            mark.add(row)
        found = ChunkMark.decode(mark.encode())
        assert (found.run, found.digest, found.spans) == (mark.run, mark.digest, mark.spans)
        assert [row for row in range(30) if found.has(row)] == sorted(rows)
        assert found.rows == len(rows)
        assert all(one[1] < other[0] for one, other in zip(found.spans, found.spans[1:], strict=False))
