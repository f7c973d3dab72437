"""A task's rows, without Spark: what is counted, what is left out, how far it reads ahead, what ends it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing

import perco
from perco.database.inside import local_owner
from perco.errors import CommitUnknown, UsageError
from perco.spark import ledger as ledgers, partition
from perco.spark.keys import chosen, valued
from perco.spark.ledger import LEDGER, RUN, TAKEN, JobClosed, Ledger, take, taken_in
from perco.spark.partition import LoadOptions, PartitionResult, load_partition
from perco.storage import WRITE
from perco.txn import runs
from tests.spark import app

SCHEMA = perco.Schema(*app.schema.tables.values(), LEDGER)
taken_in(app.counts)


@asynccontextmanager
async def opened(beside: str = "", **limits: int) -> AsyncIterator[tuple[perco.Database, Ledger]]:
    options = perco.Options(transaction=perco.options.TransactionOptions(**limits))
    async with perco.open("memory:", SCHEMA, options=options) as db:
        yield db, await ledgers.begin(db, "job", beside)


async def loaded(
    db: perco.Database, ledger: Ledger, rows: Iterator[Any] | list[Any], loader: Any = app.bump, **options: Any
) -> PartitionResult:
    result = PartitionResult(0)
    key = valued("name") if ledger.beside else chosen("id")
    await load_partition(db, iter(rows), key, loader, ledger, LoadOptions(**options), result)
    return result


def inputs(count: int, names: int = 7) -> list[dict[str, Any]]:
    return [{"id": n, "name": f"n{n % names}"} for n in range(count)]


async def total(db: perco.Database) -> int:
    async with db.snapshot() as snap:
        return sum([row.get(app.count, 0) async for row in snap.scan(app.counts)])


async def test_each_input_takes_effect_once_though_it_comes_again() -> None:
    async with opened() as (db, ledger):
        first = await loaded(db, ledger, inputs(100))
        again = await loaded(db, ledger, [*inputs(130), *inputs(130)])
        assert (first.committed, first.skipped, first.failed) == (100, 0, 0)
        assert (again.committed, again.skipped) == (30, 230)
        assert await total(db) == 130


async def test_two_attempts_at_once() -> None:
    async with opened() as (db, ledger):
        results: list[PartitionResult] = []

        async def attempt() -> None:
            results.append(await loaded(db, ledger, inputs(200), concurrency=16))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt)
            nursery.start_soon(attempt)
        assert await total(db) == 200
        assert [each.committed + each.skipped for each in results] == [200, 200]
        assert sum(each.committed for each in results) == 200


async def test_a_row_that_fails_is_told_and_leaves_nothing() -> None:
    async with opened() as (db, ledger):
        result = await loaded(db, ledger, inputs(100), app.refuse, failures_max=1000)
        assert (result.committed, result.failed, result.stopped) == (90, 10, False)
        assert result.failures[0].reason.startswith("ValueError: ")
        assert "'id': " in result.failures[0].row
        async with db.snapshot() as snap:
            taken = [row.key async for row in snap.scan(LEDGER, columns=[RUN])]
        assert len(taken) == 91  # and the job
        assert (await loaded(db, ledger, inputs(100))).committed == 10


@pytest.mark.parametrize("group", [1, 30])
async def test_too_many_failures_end_it_and_no_more_is_read(group: int) -> None:
    read = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal read
        for row in inputs(10_000):
            read += 1
            yield row

    async with opened() as (db, ledger):
        result = await loaded(db, ledger, rows(), app.refuse, failures_max=2, concurrency=4, group=group)
        assert result.stopped
        assert result.failed >= 3
        assert read < 500


async def test_a_task_that_has_failed_waits_for_one_row_at_the_most() -> None:
    reading, cancelled = trio.Event(), threading.Event()
    read_after = 0

    def slowly() -> Iterator[Any]:
        nonlocal read_after
        for row in inputs(300):
            if row["id"] >= 100:  # while the first are loaded
                if row["id"] == 100:
                    trio.from_thread.run_sync(reading.set)
                cancelled.wait()
                read_after += 1
            yield row

    async def loader(txn: perco.Transaction, row: Any) -> None:
        if row["id"] == 3:
            await reading.wait()
            raise ValueError("no such page")
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled.set()
            raise

    async with opened() as (db, ledger):
        result = await loaded(db, ledger, slowly(), loader, group=1)
        assert result.stopped
        assert read_after == 1


@pytest.mark.parametrize(("group", "most"), [(1, 128), (20, 280)])
async def test_no_more_is_read_than_is_taken(group: int, most: int) -> None:
    read = 0
    gate = trio.Event()

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal read
        for row in inputs(1000):
            read += 1
            yield row

    async def wait(txn: perco.Transaction, row: Any) -> None:
        await gate.wait()
        await app.bump(txn, row)

    async with opened() as (db, ledger), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: loaded(db, ledger, rows(), wait, concurrency=8, group=group))
        while not read:  # a thread reads
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert read <= most
        gate.set()
    assert read == 1000


@pytest.mark.parametrize("slow", [False, True])
async def test_large_rows_and_slow_ones_are_read_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, *, slow: bool
) -> None:
    monkeypatch.setattr(partition, "_AT_ONCE_S" if slow else "_AT_ONCE_BYTES", 0.0 if slow else 10_000)
    read, gate = 0, trio.Event()

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal read
        for row in inputs(100):
            read += 1
            yield row | {"numbers": [0.5] * 1000, "texts": [["x"] * 100]}

    async def wait(txn: perco.Transaction, row: Any) -> None:
        await gate.wait()
        await app.bump(txn, row)

    async with opened() as (db, ledger), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: loaded(db, ledger, rows(), wait, concurrency=2, group=1))
        while not read:  # a thread reads
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert read <= 2 + 3 * (1 if slow else 2)
        gate.set()
    assert read == 100


async def test_a_job_that_is_over_takes_nothing_any_more() -> None:
    async with opened() as (db, ledger):
        await loaded(db, ledger, inputs(50))
        assert await ledgers.jobs(db) == {"job": True}
        assert await ledgers.acknowledge(db, "job") == 50
        assert await ledgers.jobs(db) == {}
        assert await ledgers.acknowledge(db, "job") == 0
        with pytest.raises(JobClosed):
            await loaded(db, ledger, inputs(60))
        again = await ledgers.begin(db, "job")
        with pytest.raises(JobClosed):
            await loaded(db, ledger, inputs(60))
        assert (await loaded(db, again, inputs(60))).committed == 60
        assert await total(db) == 110


@pytest.mark.parametrize("beside", ["", "counts"])
async def test_a_task_that_began_before_its_job_was_over_changes_nothing(beside: str) -> None:
    """Of an attempt that was slow: it had looked before its input was taken, and before the end."""
    async with opened(beside) as (db, ledger):
        key = valued("name") if beside else chosen("id")
        mark = ledger.mark(db, key(inputs(1)[0]))
        late = await db.begin()
        assert await take(late, ledger, mark, app.bump, inputs(1)[0])
        await loaded(db, ledger, inputs(1))
        await ledgers.acknowledge(db, "job")
        with pytest.raises(perco.WriteConflict):
            await late.commit()
        assert await total(db) == 1
        with pytest.raises(JobClosed):
            await take(await db.begin(), ledger, mark, app.bump, inputs(1)[0])


async def test_an_attempt_that_is_overtaken_before_it_looks_conflicts() -> None:  # T7
    async with opened() as (db, ledger):
        late = await db.begin()
        await loaded(db, ledger, inputs(1))
        mark = ledger.mark(db, chosen("id")(inputs(1)[0]))
        assert await take(late, ledger, mark, app.bump, inputs(1)[0])
        with pytest.raises(perco.WriteConflict):
            await late.commit()


@pytest.mark.parametrize("beside", ["", "counts"])
async def test_an_acknowledgement_that_was_interrupted_is_ended_by_who_opens_the_job_again(
    beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(beside) as (db, ledger):
        await loaded(db, ledger, inputs(40, 1000))

        async def dies(*_: Any) -> int:
            raise OSError("so")

        with monkeypatch.context() as patched:
            patched.setattr(ledgers, "_forget", dies)
            with pytest.raises(OSError, match="so"):
                await ledgers.acknowledge(db, "job")
        assert await ledgers.jobs(db) == {"job": False}
        again = await ledgers.begin(db, "job", beside)
        assert await _marks(db) == 0
        assert (await loaded(db, again, inputs(10))).committed == (7 if beside else 10)
        assert await ledgers.acknowledge(db, "job") == (7 if beside else 10)


async def _marks(db: perco.Database) -> int:
    """Of inputs, wherever they lie."""
    async with db.snapshot() as snap:
        rows = [row.key async for row in snap.scan(LEDGER, columns=[RUN])]
        beside = [row async for row in snap.scan(app.counts, columns=[app.counts.hidden[TAKEN]])]
    return len([key for key in rows if len(key) > 8]) + len(beside)


@pytest.mark.parametrize(("beside", "keep", "left"), [("", 3600, 0), ("counts", 0, 0), ("counts", 3600, 2)])
async def test_a_vacuum_leaves_no_mark_of_a_job_that_is_over(
    tmp_path: Path, beside: str, keep: float, left: int
) -> None:
    """Beside rows, the versions of a mark are kept as long as those of the table's other cells."""
    counts = perco.Table("counts", key=perco.TEXT, keep=perco.Keep(seconds=keep))
    count = counts.column("count", perco.INT64)
    taken_in(counts)

    async def once(txn: perco.Transaction, row: Any) -> None:
        txn.set(count, row["name"], 1)

    options = perco.Options(durability="process")
    async with perco.open(tmp_path / "s", perco.Schema(counts, LEDGER), options=options) as db:

        def cells(table: str) -> int:
            local = local_owner(db).backend.local
            assert local is not None
            entries: int = local.store.tablet(table, b"").engine.entries(WRITE)  # type: ignore[attr-defined]
            return entries

        ledger = await ledgers.begin(db, "job", beside)
        assert (await loaded(db, ledger, inputs(150, 150), once)).committed == 150
        assert await ledgers.acknowledge(db, "job") == 150
        assert cells("counts") + cells(LEDGER.name) > 450  # values, marks, and deletions of marks
        await db.vacuum()
        assert (cells("counts"), cells(LEDGER.name)) == (150 + left * 150, 0)


async def test_marks_beside_the_rows_of_two_jobs() -> None:
    async with opened("counts") as (db, one):
        other = await ledgers.begin(db, "other", "counts")
        for ledger in (one, other, one, other):
            result = await loaded(db, ledger, inputs(20, 20))
            assert result.committed + result.skipped == 20
        assert await total(db) == 40
        assert await _marks(db) == 20
        assert await ledgers.acknowledge(db, "job") == 20
        assert await _marks(db) == 20
        assert (await loaded(db, other, inputs(20, 20))).skipped == 20
        assert await ledgers.acknowledge(db, "other") == 20
        assert await _marks(db) == 0
        async with db.snapshot() as snap:
            assert [row.values() async for row in snap.scan(app.counts, limit=1)] == [{"count": 2}]


async def test_a_job_keeps_its_marks_where_it_began_to() -> None:
    async with opened("counts") as (db, _):
        with pytest.raises(UsageError, match="begun with beside='counts'"):
            await ledgers.begin(db, "job")


async def test_no_more_marks_than_there_is_room_for() -> None:
    async with opened("counts") as (db, ledger):
        for n in range(64):
            assert (await loaded(db, await ledgers.begin(db, f"job {n}", "counts"), inputs(1))).committed == 1
        with pytest.raises(perco.PercoError, match="64 jobs have taken this key"):
            async with db.transaction() as txn:
                await take(txn, ledger, ledger.mark(db, "n0"), app.bump, inputs(1)[0])


async def test_marks_of_jobs_that_are_over_make_room() -> None:
    async with opened("counts") as (db, ledger):
        for n in range(64):  # each had a transaction under way when it was acknowledged
            one = await ledgers.begin(db, f"job {n}", "counts")
            late = await db.begin()
            assert await take(late, one, one.mark(db, "n0"), app.bump, inputs(1)[0])
            await ledgers.acknowledge(db, f"job {n}")
            await late.commit()
        assert (await loaded(db, ledger, inputs(1))).committed == 1
        async with db.snapshot() as snap:
            assert await snap.get(app.counts.hidden[TAKEN], "n0") == ledger.run


async def test_a_key_that_is_none_fails_its_own_row_alone() -> None:
    async with opened("counts") as (db, ledger):
        rows = inputs(100, 100)
        rows[50]["name"] = "x" * 500
        rows[60]["name"] = 5
        result = await loaded(db, ledger, rows, failures_max=5)
        assert (result.committed, result.failed) == (98, 2)
        assert {failure.reason.split(":")[0] for failure in result.failures} == {"TooLarge", "TypeError"}


async def test_a_loader_that_discards_has_failed() -> None:
    async def discards(txn: perco.Transaction, row: Any) -> None:
        txn.discard()

    async with opened() as (db, ledger):
        result = await loaded(db, ledger, inputs(1), discards, failures_max=1)
        assert (result.committed, result.failed) == (0, 1)
        assert "discarded its transaction" in result.failures[0].reason


async def test_a_loader_with_tasks_of_its_own_meets_a_store_that_is_away() -> None:
    async def away(txn: perco.Transaction, row: Any) -> None:
        async with trio.open_nursery():
            raise perco.Unavailable("away")

    async with opened() as (db, ledger):
        with pytest.raises(perco.Unavailable):
            await loaded(db, ledger, inputs(5), away, failures_max=100)


@pytest.mark.parametrize(("group", "committed"), [(1, 1), (100, 6)])
async def test_a_commit_of_which_nobody_knows_is_tried_again_and_counted_once(group: int, committed: int) -> None:
    async with opened() as (db, ledger):
        told = 0

        async def lost(txn: perco.Transaction, row: Any) -> None:
            nonlocal told
            await app.bump(txn, row)
            if row["id"] == 5 and not told:
                told += 1
                await txn.commit()
                raise CommitUnknown("token", "told so")

        result = await loaded(db, ledger, inputs(20), lost, group=group)
        assert told == 1
        assert (result.committed, result.skipped) == (20 - committed, committed)
        assert await total(db) == 20


async def test_a_row_that_fails_costs_no_other_row_of_its_group() -> None:
    """Rows 3, 13, ... fail; each of the others takes effect once, and few transactions are needed for that."""
    async with opened() as (db, ledger):
        runs = 0

        async def counted(txn: perco.Transaction, row: Any) -> None:
            nonlocal runs
            runs += 1
            await app.bump(txn, row)
            if row["id"] % 50 == 3:
                raise ValueError(f"{row['id']} is not to be had")

        result = await loaded(db, ledger, inputs(200), counted, failures_max=10, group=100, concurrency=1)
        assert (result.committed, result.failed) == (196, 4)
        assert sorted(failure.reason for failure in result.failures) == [
            f"ValueError: {n} is not to be had" for n in (103, 153, 3, 53)
        ]
        assert await total(db) == 196
        assert runs <= 3 * 200  # each row at most: before the failure, and after it


async def test_rows_of_one_key_in_one_group() -> None:
    async with opened("counts") as (db, ledger):
        result = await loaded(db, ledger, inputs(30, 10), concurrency=1)
        assert (result.committed, result.skipped) == (10, 20)
        assert await total(db) == 10


async def test_a_loader_sees_what_rows_before_it_in_the_group_have_written() -> None:
    seen = []

    async def chained(txn: perco.Transaction, row: Any) -> None:
        seen.append(await txn.get(app.count, "last"))
        txn.set(app.count, "last", row["id"])

    async with opened() as (db, ledger):
        assert (await loaded(db, ledger, inputs(20), chained)).committed == 20
        assert seen == [None, *range(19)]


async def test_a_group_ends_when_it_has_written_much() -> None:
    """No transaction has more than a mebibyte, and a row."""
    most = 0

    async def long(txn: perco.Transaction, row: Any) -> None:
        nonlocal most
        txn.set(app.raw, f"k{row['id']:06}", b"x" * 300_000)
        most = max(most, runs.bytes_of(txn))

    async with opened() as (db, ledger):
        result = await loaded(db, ledger, inputs(20), long)
        assert result.committed == 20
        assert 1_000_000 < most < (1 << 20) + 400_000


async def test_a_row_that_is_too_large_fails_alone() -> None:
    """A transaction may write 20 cells here: some groups are too large, one row is too large by itself."""

    async def wide(txn: perco.Transaction, row: Any) -> None:
        for n in range(30 if row["id"] == 5 else 3):
            txn.set(app.count, f"{row['id']} {n}", 1)

    async with opened(cells_max=20) as (db, ledger):
        result = await loaded(db, ledger, inputs(16), wide, failures_max=1)
        assert (result.committed, result.failed) == (15, 1)
        assert result.failures[0].reason.startswith("TooLarge: ")
        assert await total(db) == 45


async def test_a_group_that_conflicts_again_and_again_is_halved() -> None:
    """Another writer gets in the way of all but single rows."""
    sizes = []

    async with opened() as (db, ledger):

        async def hindered(txn: perco.Transaction, row: Any) -> None:
            await app.bump(txn, row)
            size = len([each for each in runs.written(txn) if each[0] == LEDGER.name])
            sizes.append(size)
            if size > 1:
                async with db.transaction() as other:
                    other.set(app.count, row["name"], 0)

        result = await loaded(db, ledger, inputs(8, 1000), hindered, concurrency=1)
        assert (result.committed, result.failed) == (8, 0)
        assert max(sizes) == 8
        assert sizes.count(8) == 4  # it was tried as a whole
        assert await total(db) == 8


async def test_a_loader_that_commits_by_itself_ends_its_group() -> None:
    async def commits(txn: perco.Transaction, row: Any) -> None:
        await app.bump(txn, row)
        if row["id"] % 3 == 1:
            await txn.commit()

    async with opened() as (db, ledger):
        assert (await loaded(db, ledger, inputs(20), commits)).committed == 20
        assert (await loaded(db, ledger, inputs(20), commits)).skipped == 20
        assert await total(db) == 20


async def test_a_store_that_goes_away_ends_the_task() -> None:
    async def away(txn: perco.Transaction, row: Any) -> None:
        raise perco.Unavailable("away")

    async with opened() as (db, ledger):
        with pytest.raises(perco.Unavailable):
            await loaded(db, ledger, inputs(20), away)


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"group": 0}, {"failures_max": -1}, {"attempts": 1.5}])
def test_options_of_a_wrong_kind(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"LoadOptions: .*{next(iter(wrong))}"):
        LoadOptions(**wrong)


@pytest.mark.parametrize("name", ["", "x" * 201, 5])
def test_a_job_has_a_name(name: Any) -> None:
    with pytest.raises(UsageError, match="job= is a name"):
        ledgers.row_of(name)


async def test_tasks_that_begin_a_batch_at_once_share_its_run() -> None:
    """The one before it was given up half-way; none of them closes what another has opened."""
    async with opened() as (db, _):
        given_up = await ledgers.begin_batch(db, "stream", 3, "t")
        assert given_up is not None
        runs: list[bytes] = []

        async def begin() -> None:
            ledger = await ledgers.begin_batch(db, "stream", 4, "t")
            assert ledger is not None
            runs.append(ledger.run)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(begin)
        assert len(runs) == 8
        assert {*runs} & {given_up.run} == set()
        assert len({*runs}) == 1
        with pytest.raises(JobClosed):
            await loaded(db, given_up, inputs(1))
        await ledgers.end_batch(db, "stream", 3)  # late: it is not this one's
        assert await ledgers.begin_batch(db, "stream", 4, "t") is not None
        await ledgers.end_batch(db, "stream", 4)
        assert await ledgers.begin_batch(db, "stream", 4, "t") is None
        with pytest.raises(UsageError, match="is at batch 4 and was given batch 3"):
            await ledgers.begin_batch(db, "stream", 3, "t")


async def test_an_end_of_a_batch_that_was_interrupted_is_made_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (db, _):
        ledger = await ledgers.begin_batch(db, "stream", 0, "t")
        assert ledger is not None
        await loaded(db, ledger, inputs(10))

        async def dies(*_: Any) -> int:
            raise OSError("so")

        with monkeypatch.context() as patched:
            patched.setattr(ledgers, "_forget", dies)
            with pytest.raises(OSError, match="so"):
                await ledgers.end_batch(db, "stream", 0)
        assert await _marks(db) == 10
        assert await ledgers.begin_batch(db, "stream", 0, "t") is None  # it had taken effect
        assert await _marks(db) == 0
        again = await ledgers.begin_batch(db, "stream", 1, "t")
        assert again is not None
        assert (await loaded(db, again, inputs(10))).committed == 10


async def test_a_name_is_that_of_a_load_or_of_a_stream() -> None:
    async with opened() as (db, _):
        with pytest.raises(UsageError, match="'job' is open and has no batches"):
            await ledgers.begin_batch(db, "job", 0, "t")
        await ledgers.begin_batch(db, "stream", 0, "t")
        with pytest.raises(UsageError, match="'stream' belongs to a stream's batches"):
            await ledgers.begin(db, "stream")


async def test_batches_of_a_job_go_to_one_table() -> None:
    async with opened() as (db, _):
        ledger = await ledgers.begin_batch(db, "stream", 3, "t")
        assert ledger is not None
        for batch in (2, 3, 4):
            with pytest.raises(
                UsageError, match=r"'stream' writes its batches to table 't'.* table 'u' a job of its own"
            ):
                await ledgers.begin_batch(db, "stream", batch, "u")
        assert (await loaded(db, ledger, inputs(1))).committed == 1  # nobody has ended it
        await ledgers.end_batch(db, "stream", 3)
        with pytest.raises(UsageError, match="writes its batches to table 't'"):
            await ledgers.begin_batch(db, "stream", 3, "u")
        await ledgers.acknowledge(db, "stream")
        assert await ledgers.begin_batch(db, "stream", 3, "u") is not None


async def test_two_streams_of_one_name_do_not_share_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has begun a batch since this one looked: its marks are not this one's."""
    async with opened() as (db, _):
        await ledgers.begin_batch(db, "stream", 0, "t")

        async def looked_before(*_: Any, **__: Any) -> int:
            return 0

        monkeypatch.setattr(ledgers, "_end", looked_before)
        with pytest.raises(UsageError, match="two streams write under job 'stream'"):
            await ledgers.begin_batch(db, "stream", 1, "t")
