"""`format("perco")`: tables as data frames, and data frames as cells."""

from __future__ import annotations

import contextlib
import gc
import json
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import trio
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession, functions as F

import perco
import perco.spark
from perco.clock.pins import pins_in
from perco.errors import UsageError
from perco.spark.ledger import LEDGER, RUN, TAKEN, JobClosed
from perco.spark.sink import PercoStreamWriter, PercoWriter, Sink, _pieces
from perco.spark.source import Asked, PercoSource
from perco.spark.streaming import streamed
from tests.spark import app
from tests.spark.conftest import failed_tasks


@pytest.fixture(scope="module")
def store(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[perco.spark.Store]:
    """Three hundred pages in two tablets; ten pairs; some counts."""
    folder = tmp_path_factory.mktemp("frames") / "store"

    async def fill() -> None:
        async with perco.open(folder, app.schema) as db, db.transaction() as txn:
            for n in range(300):
                txn.set(app.body, f"k{n:06}", f"body {n}")
                if n % 3:
                    txn.set(app.size, f"k{n:06}", n)
            txn.set(app.raw, "k000001", b"\x00\xff")
            txn.set(app.rank, "k000001", 0.5)
            txn.set(app.fine, "k000001", True)
            txn.set(app.tree, "k000001", {"a": [1, None]})
            txn.set(app.pack, "k000001", [b"\xff", "x"])
            for n in range(10):
                txn.set(app.weight, ("p", n), n / 2)

    trio.run(fill)
    with perco.spark.serve(folder, spark) as served:
        perco.spark.register(spark, served)
        yield served


def read(spark: SparkSession, **options: Any) -> DataFrame:
    return spark.read.format("perco").options(**options).load()


def write(frame: DataFrame, table: str, mode: str = "append", **options: Any) -> None:
    frame.write.format("perco").options(table=table, **options).mode(mode).save()


def transact(store: perco.spark.Store, function: Any) -> Any:
    async def main() -> Any:
        async with store.joining() as db:
            return await db.run(function)

    return trio.run(main)


def test_a_table_is_read_whole_with_the_types_of_the_catalogue(spark: SparkSession, store: perco.spark.Store) -> None:
    frame = read(spark, table="pages")
    assert frame.schema.simpleString() == (
        "struct<key:string,body:string,size:bigint,raw:binary,rank:double,fine:boolean,tree:string,pack:string>"
    )
    assert frame.rdd.getNumPartitions() == 2
    rows = sorted(frame.collect())
    assert len(rows) == 300
    assert rows[0] == Row("k000000", "body 0", None, None, None, None, None, None)
    assert tuple(rows[1]) == (
        "k000001",
        "body 1",
        1,
        bytearray(b"\x00\xff"),
        0.5,
        True,
        '{"a": [1, null]}',
        '["/w==", "x"]',
    )


def test_keys_of_several_parts(spark: SparkSession, store: perco.spark.Store) -> None:
    frame = read(spark, table="pairs")
    assert frame.schema.simpleString() == "struct<key:struct<_1:string,_2:bigint>,weight:double>"
    assert frame.filter("key._2 >= 4").agg(F.sum("weight")).collect() == [Row(19.5)]


def test_columns_that_are_not_named_are_not_read(spark: SparkSession, store: perco.spark.Store) -> None:
    assert read(spark, table="pages", columns="size, fine").columns == ["key", "size", "fine"]
    now = str(transact(store, _now))
    own = spark.read.format("perco").schema("size long, key string")
    chosen = own.options(table="pages", ts=now).load()
    assert chosen.filter("size < 5").orderBy("size").collect() == [Row(n, f"k{n:06}") for n in (1, 2, 4)]


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        ("key >= 'k000100' and key < 'k000200'", 100),
        ("'k000007' = key", 1),
        ("key > 'z'", 0),
    ],
)
def test_a_count_after_a_filter_counts_the_whole_frame(
    spark: SparkSession, store: perco.spark.Store, condition: str, count: int
) -> None:
    """The session lets filters be pushed down, which Spark keeps with the frame."""
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    frame, other = (read(spark, table="pages", columns="body,size", prefix="k") for _ in range(2))
    assert frame.filter(condition).count() == count
    assert frame.count() == other.count() == 300
    cached = frame.filter(condition).cache()
    assert (cached.count(), frame.count(), cached.count()) == (count, 300, count)
    assert frame.filter(condition).union(frame).count() == frame.union(other.filter(condition)).count() == 300 + count
    cached.unpersist()


def test_a_moment_is_checked_although_the_range_is_empty(spark: SparkSession, store: perco.spark.Store) -> None:
    with pytest.raises(PySparkException, match="there is no snapshot at"):
        read(spark, table="pages", start="b", stop="a", ts="999999999999")


def test_a_range_without_rows(spark: SparkSession, store: perco.spark.Store) -> None:
    assert read(spark, table="pages", start="z").count() == 0
    assert read(spark, table="pages", start="b").filter("key < 'a'").count() == 0


def test_queries_of_one_frame_do_not_see_each_others_filters(spark: SparkSession, store: perco.spark.Store) -> None:
    frame = read(spark, table="pages", columns="body").filter("key like 'k%'")
    some = frame.filter("key < 'k000003'")
    assert (some.count(), frame.count()) == (3, 300)
    assert some.union(frame.filter("key >= 'k000295'")).count() == 8
    assert frame.join(some, "key", "left_anti").count() == 297


async def _now(txn: perco.Transaction) -> int:
    return txn.start_ts


def test_a_frame_with_a_schema_of_its_own_is_told_its_moment(spark: SparkSession, store: perco.spark.Store) -> None:
    with pytest.raises(PySparkException, match="needs ts or at"):
        spark.read.format("perco").option("table", "pages").schema("key string").load().count()
    own = spark.read.format("perco").schema("key string, size string")
    frame = own.options(table="pages", ts=str(transact(store, _now))).load()
    with pytest.raises(PySparkException, match=r"pages.size is bigint, and the frame's schema says string; cast it"):
        frame.count()


def test_a_token_is_not_said_to_another_store(store: perco.spark.Store) -> None:
    secret = perco.spark.Store(url="tls://one.example:1", token="secret", ca="ca")
    for url, token in ((None, "secret"), ("tls://one.example:1", "secret"), ("tcp://other.example:1", "")):
        asked = Asked({"table": "t", **({"url": url} if url else {})}, secret, ("table", "url"))
        assert asked.store.token == token
    assert "secret" not in repr(secret)


def test_ranges_and_parts_are_options(spark: SparkSession, store: perco.spark.Store) -> None:
    frame = read(spark, table="pages", start="k000050", stop="k000250", partitions=6)
    assert frame.rdd.getNumPartitions() >= 6
    assert sorted(row.key for row in frame.collect()) == [f"k{n:06}" for n in range(50, 250)]
    assert read(spark, table="pages", prefix="k00000").count() == 10


def test_a_job_reads_one_snapshot_which_is_pinned(spark: SparkSession, store: perco.spark.Store) -> None:
    frame = read(spark, table="counts")
    before = transact(store, _bump_all)
    assert frame.count() == 0  # as it was when it was loaded
    assert frame.filter("key >= 'a'").count() == 0
    assert read(spark, table="counts").count() == 3
    transact(store, _bump_all)
    assert {row.count_ for row in read(spark, table="counts", ts=before).toDF("key", "count_").collect()} == {1}
    pins = transact(store, _pins)
    assert pins
    assert all(pin.name.startswith("spark ") and pin.owner.startswith("spark: ") for pin in pins)


def test_spark_does_not_collect_what_workers_have_imported(spark: SparkSession, store: perco.spark.Store) -> None:
    def exempt(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.record_batch({"objects": [gc.get_freeze_count()]})

    assert read(spark, table="pages").count() == 300
    found = spark.range(4, numPartitions=4).mapInArrow(exempt, "objects long").collect()
    assert max(row.objects for row in found) > 10_000


async def _bump_all(txn: perco.Transaction) -> int:
    for name in ("a", "m", "z"):
        await app.bump(txn, {"name": name})
    return await txn.commit()


async def _pins(txn: perco.Transaction) -> list[perco.Pin]:
    return await pins_in(txn._engine.driver.store)


def test_a_write_sets_cells_and_leaves_the_rest(spark: SparkSession, store: perco.spark.Store) -> None:
    rows = [("w1", "one", 1), ("w2", None, 2), ("w3", "three", None)]
    write(spark.createDataFrame(rows, "key string, body string, size int"), "pages")
    written = read(spark, table="pages", columns="body,size", prefix="w")
    assert sorted(map(tuple, written.collect()), key=str) == sorted(rows, key=str)
    write(spark.createDataFrame([(None, "w1"), (22, "w2")], "size long, key string"), "pages", "overwrite")
    written = read(spark, table="pages", columns="body,size", prefix="w")
    assert [tuple(row) for row in written.orderBy("key").collect()] == [
        ("w1", "one", None),
        ("w2", None, 22),
        ("w3", "three", None),
    ]


def test_what_was_written_is_read_back_as_it_was(spark: SparkSession, store: perco.spark.Store) -> None:
    pairs = [(("q", n), n / 4) for n in range(500)]
    schema = "key struct<_1: string, _2: bigint>, weight double"
    frame = spark.createDataFrame(pairs, schema).repartition(3)
    write(frame, "pairs")
    back = read(spark, table="pairs").filter("key._1 = 'q'")
    assert back.exceptAll(frame).count() == frame.exceptAll(back).count() == 0
    tree = spark.createDataFrame([("t", '{"a": 1}', "[1, 2.5]")], "key string, tree string, pack string")
    write(tree, "pages")
    assert transact(store, _tree) == ({"a": 1}, (1, 2.5))


async def _tree(txn: perco.Transaction) -> Any:
    return await txn.get(app.tree, "t"), await txn.get(app.pack, "t")


def test_a_row_that_came_again_does_not_put_back_what_has_changed_since(
    spark: SparkSession, store: perco.spark.Store
) -> None:
    """As the task of a write that Spark runs again, its batches in another order."""
    frame = spark.createDataFrame([("x", "y")], "key string, body string")
    writer = PercoWriter(Sink(store, "pages", "key", frame.schema, overwrite=False), frame.schema)
    batches = [pa.RecordBatch.from_pydict({"key": [f"x{n:04}"], "body": ["first"]}) for n in range(300)]

    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches
        raise OSError("once")

    with pytest.raises(OSError, match="once"):
        writer.write(failing())
    transact(store, _change)
    written = writer.write(reversed(batches))
    assert written.rows + written.skipped == 300
    assert written.skipped > 200
    assert transact(store, _marks) == 300
    writer.commit([written])
    found = read(spark, table="pages", columns="body", prefix="x").groupBy("body").count().collect()
    assert sorted(found) == [Row("changed", 1), Row("first", 299)]
    assert transact(store, _ledger) == transact(store, _marks) == 0
    with pytest.raises(JobClosed):
        writer.write(iter(batches))  # an attempt that has outlived its job


def batch_of(spark: SparkSession, *bodies: str) -> DataFrame:
    return spark.createDataFrame([(f"y{n}", body) for n, body in enumerate(bodies)], "key string, body string")


def bodies(spark: SparkSession, prefix: str = "y") -> list[str]:
    found = read(spark, table="pages", columns="body", prefix=prefix).orderBy("key").collect()
    return [row.body for row in found]


def test_a_batch_that_is_written_again_has_no_effect(spark: SparkSession, store: perco.spark.Store) -> None:
    first, second = batch_of(spark, "a", "b"), batch_of(spark, "c", "d")
    write(first, "pages", job="of y", batch=0)
    write(second, "pages", job="of y", batch=1)
    write(second.sparkSession.createDataFrame([("y0", "newer")], "key string, body string"), "pages")
    write(second, "pages", job="of y", batch=1)
    assert bodies(spark) == ["newer", "d"]
    with pytest.raises(
        PySparkException, match=r"'of y' is at batch 1 and was given batch 0: batch numbers go up.*acknowledge"
    ):
        write(first, "pages", job="of y", batch=0)
    with pytest.raises(PySparkException, match="give job and batch together"):
        write(first, "pages", job="of y")
    counts = spark.createDataFrame([("y0", 1)], "key string, count long")
    with pytest.raises(
        PySparkException, match=r"'of y' writes its batches to table 'pages'.*'counts' a job of its own"
    ):
        write(counts, "counts", job="of y", batch=1)  # else none of its rows would be written
    assert perco.spark.acknowledge(store, "of y", spark) == 0
    write(first, "pages", job="of y", batch=0)
    assert bodies(spark) == ["a", "b"]
    assert perco.spark.jobs(store, spark) == {}
    perco.spark.acknowledge(store, "of y", spark)


def test_a_batch_that_was_written_in_part_goes_on_where_it_ended(spark: SparkSession, store: perco.spark.Store) -> None:
    def begin() -> PercoWriter:
        sink = Sink(store, "pages", "key", frame.schema, overwrite=False)
        return PercoWriter(sink, frame.schema, "in part", 7)

    frame = batch_of(spark, "p", "q")
    batches = [pa.RecordBatch.from_pylist([row.asDict()]) for row in frame.collect()]
    writer = begin()
    late = writer.write(iter(batches[:1]))
    assert late.rows == 1
    writer.abort([None, late])
    transact(store, _newer)
    again = begin()
    written = again.write(iter(batches))
    assert (written.rows, written.skipped) == (1, 1)
    again.commit([written])
    assert begin().write(iter(batches)).skipped == 2
    assert bodies(spark) == ["newer", "q"]
    with pytest.raises(JobClosed):
        writer.write(iter(batches))
    perco.spark.acknowledge(store, "in part", spark)


async def _newer(txn: perco.Transaction) -> None:
    txn.set(app.body, "y0", "newer")


def pairs_of(spark: SparkSession, *bodies: str) -> DataFrame:
    """Two rows of each key, the second half of them in another partition than the first."""
    rows = [(f"y{n}", body) for n, body in enumerate(bodies)]
    frame = spark.createDataFrame(spark.sparkContext.parallelize(rows, 1), "key string, body string")
    return frame.union(frame)


@pytest.mark.parametrize("partitions", [1, 2])
def test_rows_of_one_key_are_an_error_that_names_it(
    spark: SparkSession, store: perco.spark.Store, partitions: int
) -> None:
    frame = pairs_of(spark, "a").coalesce(partitions)
    assert frame.rdd.getNumPartitions() == partitions
    with pytest.raises(
        PySparkException,
        match=r"KeyNotUnique: .*: 2 rows have the key 'y0', and only one .*\(1 of 2 rows .*dropDuplicates\(\['key'\]\)",
    ):
        write(frame, "pages")
    assert bodies(spark)[0] == "a"
    assert transact(store, _ledger) == transact(store, _marks) == 0
    write(frame.dropDuplicates(["key"]), "pages")


def test_a_batch_with_rows_of_one_key_has_not_ended(spark: SparkSession, store: perco.spark.Store) -> None:
    frame = pairs_of(spark, "a", "b")
    for _ in range(2):  # the second time, every row has been written before, or is another row of such a key
        with pytest.raises(PySparkException, match=r"KeyNotUnique: .*2 rows have the key 'y[01]'.*batch is written"):
            write(frame, "pages", job="of pairs", batch=3)
    transact(store, _newer)
    write(frame.dropDuplicates(["key"]), "pages", job="of pairs", batch=3)
    assert bodies(spark)[:2] == ["newer", "b"]
    write(frame, "pages", job="of pairs", batch=3)  # it has ended
    perco.spark.acknowledge(store, "of pairs", spark)


class Attempts:
    """A write's driver and its tasks, each attempt of which is run when a test says so."""

    def __init__(self, spark: SparkSession, store: perco.spark.Store) -> None:
        self.schema = batch_of(spark, "a").schema
        self.writer = PercoWriter(Sink(store, "pages", "key", self.schema, overwrite=False), self.schema)

    def run(self, *keys: str, fails: bool = False) -> Any:
        def batches() -> Iterator[pa.RecordBatch]:
            for key in keys:
                yield pa.RecordBatch.from_pydict({"key": [key], "body": ["first"]})
            if fails:
                raise OSError("lost")

        with contextlib.nullcontext() if not fails else pytest.raises(OSError, match="lost"):
            return self.writer.write(batches())

    def commit(self, *written: Any) -> None:
        """As Spark does."""
        try:
            self.writer.commit([*written])
        except BaseException:
            self.writer.abort([*written])
            raise


ROWS = [f"z{n:03}" for n in range(40)]


def test_rows_that_an_attempt_before_has_written_share_no_key(spark: SparkSession, store: perco.spark.Store) -> None:
    attempts = Attempts(spark, store)
    attempts.run(*ROWS[:20], fails=True)
    first, copy = attempts.run(*ROWS[:20]), attempts.run(*ROWS[:20])  # a copy of a task that is still running
    second = attempts.run(*ROWS[20:])
    assert (copy.rows, copy.skipped, first.rows + first.skipped) == (0, 20, 20)
    assert transact(store, _marks) == 40
    attempts.commit(copy, second)
    assert transact(store, _marks) == 0


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ([], [[*ROWS[:20], "z000"], ROWS[20:]]),  # in one task, of which this is the first attempt
        ([], [ROWS[:20], [*ROWS[20:], "z000"]]),  # in two
        (ROWS[:20], [[*ROWS[:20], "z000"], ROWS[20:]]),  # in one that runs again: both rows are skipped
        (ROWS[10:20], [[*ROWS[:20], "z000"], ROWS[20:]]),  # the attempt that runs again writes one of them
        (ROWS[:20], [ROWS[:20], [*ROWS[20:], "z000"]]),  # in a task that runs again, and in another
    ],
)
def test_a_key_that_rows_share_is_found_among_those_that_were_written_before(
    spark: SparkSession, store: perco.spark.Store, before: list[str], kept: list[list[str]]
) -> None:
    attempts = Attempts(spark, store)
    attempts.run(*before, fails=True)
    written = [attempts.run(*keys) for keys in kept]
    with pytest.raises(perco.spark.KeyNotUnique, match=r"2 rows have the key 'z000'.*\(1 of 41 rows") as told:
        attempts.commit(*written)
    assert told.value.keys == {"'z000'": 2}
    assert transact(store, _marks) == 0


def test_a_key_that_cannot_be_told_from_those_of_another_attempt_is_not_named(
    spark: SparkSession, store: perco.spark.Store
) -> None:
    """One of its rows was written by the attempt that failed in the first task, and skipped by the second task; the
    first has skipped more rows since than are remembered."""
    many = [f"z{n:05}" for n in range(1100)]
    attempts = Attempts(spark, store)
    attempts.run(*many, fails=True)
    written = [attempts.run(*many[1:], many[0]), attempts.run("z", many[0])]
    with pytest.raises(perco.spark.KeyNotUnique, match=r"1 of 1102 rows .*groupBy\('key'\)\.count\(\)") as told:
        attempts.commit(*written)
    assert told.value.keys == {}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path


def drop(folder: Path, name: str, **bodies: str) -> None:
    """A file for the stream, there at once."""
    text = "".join(json.dumps({"key": key, "body": body}) + "\n" for key, body in bodies.items())
    (folder / name).write_text(text)
    (folder / name).rename(folder / "in" / name)


def streamed_from(spark: SparkSession, folder: Path) -> Any:
    stream = spark.readStream.schema("key string, body string").json(str(folder / "in"))
    return stream.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)


def run(query: Any) -> None:
    assert query.start().awaitTermination(120)


def forget_the_end(folder: Path) -> None:
    """Of the last batch, as if the driver had died before it could note it."""
    last = max((folder / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (folder / "checkpoint" / "commits" / f".{last.name}.crc").unlink(missing_ok=True)


def test_a_stream_that_writes_a_batch_again_changes_nothing(
    spark: SparkSession, store: perco.spark.Store, lines: Path
) -> None:
    sink = streamed_from(spark, lines).format("perco").options(table="pages", failures_max=1)
    drop(lines, "1", y0="one", y1="two")
    run(sink)
    assert bodies(spark) == ["one", "two"]
    transact(store, _newer)
    forget_the_end(lines)
    run(sink)
    assert bodies(spark) == ["newer", "two"]
    drop(lines, "2", y1="three", **{"k" * 401: "this key is too long"})
    run(sink)
    assert bodies(spark) == ["newer", "three"]
    assert perco.spark.jobs(store, spark) == {}


def test_a_stream_whose_micro_batch_has_rows_of_one_key_fails_until_it_has_one(
    spark: SparkSession, store: perco.spark.Store, lines: Path
) -> None:
    drop(lines, "1", u0="one", u1="two")
    drop(lines, "2", u0="one", u2="three")
    sink = streamed_from(spark, lines).format("perco").options(table="pages")
    for _ in range(2):  # Spark writes the batch again
        with pytest.raises(PySparkException, match=r"KeyNotUnique: .*2 rows have the key 'u0'.*in foreachBatch"):
            run(sink)
    assert bodies(spark, "u") == ["one", "two", "three"]
    for job in perco.spark.jobs(store, spark):
        perco.spark.acknowledge(store, job, spark)


def test_a_micro_batch_that_would_be_written_twice_is_refused(
    spark: SparkSession, store: perco.spark.Store, lines: Path
) -> None:
    drop(lines, "1", y0="one", y1="two")
    with pytest.raises(PySparkException, match=r"this frame is a micro-batch of a stream.*'batch', batch_id"):
        run(streamed_from(spark, lines).foreachBatch(lambda batch, _: write(batch, "pages")))
    with pytest.raises(PySparkException, match=r"these rows are a micro-batch of a stream.*batch_id"):
        run(streamed_from(spark, lines).foreachBatch(lambda batch, _: perco.spark.load(batch, store, app.load)))
    schema = batch_of(spark, "a").schema
    outside = PercoStreamWriter(Sink(store, "pages", "key", schema, overwrite=False), schema)
    with pytest.raises(UsageError, match="does not tell tasks which micro-batch"):
        outside.write(iter([]))
    named = streamed_from(spark, lines).foreachBatch(lambda batch, id: write(batch, "pages", job="named", batch=id))
    run(named)
    assert bodies(spark) == ["one", "two"]
    transact(store, _newer)
    forget_the_end(lines)
    run(named)
    assert bodies(spark) == ["newer", "two"]
    perco.spark.acknowledge(store, "named", spark)


def test_a_stream_is_told_from_a_frame_and_other_sources_are_read_as_before(
    spark: SparkSession, store: perco.spark.Store, lines: Path
) -> None:
    perco.spark.register(spark, store)  # again is harmless
    with pytest.raises(PySparkException, match="'pages' keeps no log of its changes"):
        spark.readStream.format("Perco").option("table", "pages").load()
    with pytest.raises(UsageError, match=r"needs .option\('readChangeFeed', 'true'\)"):
        PercoSource({"table": "pages"}).streamReader(spark.range(1).schema)
    drop(lines, "1", z="other sources are read")
    run(streamed_from(spark, lines).format("noop"))


async def _change(txn: perco.Transaction) -> None:
    assert await txn.get(app.body, "x0000") == "first"
    txn.set(app.body, "x0000", "changed")


async def _marks(txn: perco.Transaction) -> int:
    pages = txn._engine.known.schema.tables["pages"]
    return len([row async for row in txn.scan(pages, columns=[pages.hidden[TAKEN]])])


async def _ledger(txn: perco.Transaction) -> int:
    return len([row async for row in txn.scan(LEDGER, columns=[RUN])])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs .option"),
        ({"table": "nope"}, "there is no table 'nope'; there are: counts, pages"),
        ({"table": "pages", "columns": "nope"}, "no column of table 'pages' named 'nope'"),
        ({"table": "pages", "columns": "body, size,body"}, "columns='body, size,body' names 'body' more than once"),
        ({"table": "pages", "partitions": "10001"}, "partitions='10001': it must be 10000 at most"),
        ({"table": "pages", "tabel": "x"}, "has no option 'tabel'"),
        ({"table": "pages", "ts": "x"}, "ts='x': it must be a whole number"),
        ({"table": "pages", "ts": "1", "at": "2026-01-01"}, "either ts or at"),
        ({"table": "pages", "at": "x"}, "write a time as in"),
        ({"table": "pages", "timestampAsOf": "x"}, "write a time as in"),
        ({"table": "pages", "at": "2026-01-01", "timestampAsOf": "2026-01-01"}, "another name for at"),
        ({"table": "pages", "read": "no"}, "read='no': it is files or pages or rows"),
        ({"table": "pages", "failures_max": "1"}, "has no option 'failures_max'"),
        ({"table": "pages", "ts": "99999999"}, "there is no snapshot at 99999999"),
        ({"table": "pages", "key": "body"}, "has a column 'body'"),
        ({"table": "pairs", "start": "x"}, "keys have one part"),
        ({"table": "pages", "url": "unix:/nowhere"}, "Unavailable"),
    ],
)
def test_bad_options_are_told(spark: SparkSession, store: perco.spark.Store, options: Any, said: str) -> None:
    with pytest.raises(PySparkException, match=said):
        read(spark, **options).collect()


def test_other_formats_names_of_a_moment(spark: SparkSession, store: perco.spark.Store) -> None:
    now = str(transact(store, _now))
    there = read(spark, table="pages", ts=now).count()  # other tests add some
    assert read(spark, table="pages", versionAsOf=now).count() == there >= 300
    with pytest.raises(PySparkException, match="no snapshot in the future"):
        read(spark, table="pages", timestampAsOf="2999-01-01")


def test_a_time_without_an_offset_is_in_the_zone_of_the_session(spark: SparkSession, store: perco.spark.Store) -> None:
    def at(text: str, zone: str) -> Any:
        return Asked({"table": "t", "at": text}, perco.spark.Store(url="unix:s"), ("table", "at"), zone).at.isoformat()

    assert at("2026-07-01T12:00", "Europe/Berlin") == "2026-07-01T12:00:00+02:00"
    assert at("2026-07-01T12:00+00:00", "Europe/Berlin") == "2026-07-01T12:00:00+00:00"
    with pytest.raises(UsageError, match="give its offset, as in 2026-07-01"):
        at("2026-07-01", "Nowhere/Land")
    soon = (datetime.now(UTC) + timedelta(hours=1)).replace(tzinfo=None).isoformat()
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        for zone, said in (("UTC", "no snapshot in the future"), ("Pacific/Kiritimati", "SnapshotTooOld")):  # UTC+14
            spark.conf.set("spark.sql.session.timeZone", zone)
            perco.spark.register(spark, store)
            with pytest.raises(PySparkException, match=said):
                read(spark, table="pages", at=soon)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
        perco.spark.register(spark, store)


@pytest.mark.parametrize("mode", ["errorifexists", "ignore"])
def test_modes_that_ask_whether_a_table_exists_are_refused_by_name(
    spark: SparkSession, store: perco.spark.Store, mode: str
) -> None:
    frame = spark.createDataFrame([("new", 1)], "key string, count long")
    with pytest.raises(PySparkException, match='"Append" or "Overwrite"'):
        frame.write.format("perco").option("table", "counts").mode(mode).save()
    assert read(spark, table="counts").filter("key = 'new'").count() == 0


def test_columns_that_are_named_twice_are_refused_before_any_task(
    spark: SparkSession, store: perco.spark.Store
) -> None:
    with pytest.raises(PySparkException, match="UsageError: columns='size,size'"):
        read(spark, table="pages", columns="size,size")


@pytest.mark.parametrize(
    "statement",
    [
        "create table t using perco options (table 'pages')",
        "create table t using perco options (table 'pages') as select 'a' key, 'b' body",
    ],
)
def test_a_table_of_spark_s_catalogue_is_refused_and_a_view_is_read(
    spark: SparkSession, store: perco.spark.Store, statement: str
) -> None:
    with pytest.raises(PySparkException, match=r"UsageError: .*create temporary view NAME using perco options"):
        spark.sql(statement)
    spark.sql("create or replace temporary view v using perco options (table 'pages', columns 'body', prefix 'k00000')")
    assert spark.sql("select count(*) from v").collect() == [Row(10)]
    spark.catalog.dropTempView("v")


@pytest.mark.parametrize(
    ("schema", "row", "said"),
    [
        ("key string, body int", ("a", 1), "takes string, and the frame has int; cast it"),
        ("key string, nope string", ("a", "b"), "has no column 'nope'"),
        ("body string", ("a",), "no column 'key'"),
        ("key int, body string", (1, "a"), "pages.key takes string"),
        ("key string, body array<string>", ("a", ["b"]), "takes string, and the frame has array<string>"),
        ("key string, body string", (None, "b"), "cannot be written, its key is null: "),
        ("key string, body string", ("k" * 500, "b"), "cannot be written, .*k{40}"),
        ("key string, tree string", ("a", "{"), "cannot be written, Expecting"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused(
    spark: SparkSession, store: perco.spark.Store, schema: str, row: Any, said: str
) -> None:
    before = transact(store, _ledger)
    frame = spark.createDataFrame([row], schema)
    with pytest.raises(PySparkException, match=said):
        write(frame, "pages")
    assert transact(store, _ledger) == before == 0


def test_some_rows_may_fail_and_are_reported(spark: SparkSession, store: perco.spark.Store, tmp_path: Path) -> None:
    rows = [("f1", "{}"), ("f2", "{"), (None, "{}"), ("f3" * 300, "{}"), ("f4", "[]")]
    frame = spark.createDataFrame(rows, "key string, tree string").coalesce(1)
    told = tmp_path / "told"
    spark.sparkContext.setJobGroup("failing", "")
    try:
        write(frame, "pages", failures_max=3, failures_to=str(told))
        there = read(spark, table="pages", columns="tree", prefix="f").collect()
        assert sorted(row.key for row in there) == ["f1", "f4"]
        found = [json.loads(line) for line in told.read_text().splitlines()]
        reasons = {each["key"]: each["reason"] for each in found}
        assert set(reasons) == {"f2", "None", ("f3" * 300)[:500]}
        assert "Expecting property name" in reasons["f2"]
        assert found[0] == {
            "key": "None",
            "reason": "a row of table 'pages' cannot be written, its key is null: {'key': None, 'tree': '{}'}",
            "row": "{'key': None, 'tree': '{}'}",
        }
        assert transact(store, _marks) == transact(store, _ledger) == 0
        with pytest.raises(
            PySparkException, match=r"cannot be written.*\(at least 3 rows failed, and failures_max is 2"
        ):
            write(frame, "pages", failures_max=2, failures_to=str(told), job="failing", batch=1)
        assert len(told.read_text().splitlines()) == 3
        write(frame, "pages", failures_max=3, failures_to=str(told), job="failing", batch=1)
        perco.spark.acknowledge(store, "failing", spark)
        assert spark.sparkContext.statusTracker().getJobIdsForGroup("failing")
        assert failed_tasks(spark, "failing") == 0  # Spark would run such a task again
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            spark.sparkContext.setLocalProperty(name, None)  # type: ignore[arg-type]


def test_a_folder_that_nobody_has_open_is_read_where_executors_are_here(spark: SparkSession, tmp_path: Path) -> None:
    async def fill() -> None:
        async with perco.open(tmp_path / "s", app.schema) as db:
            await db.run(_bump_all)

    trio.run(fill)
    assert read(spark, table="counts", url=str(tmp_path / "s")).count() == 3
    with pytest.raises(PySparkException, match=r"no process has .* open"):
        write(spark.createDataFrame([("a", 1)], "key string, count long"), "counts", url=str(tmp_path / "s"))


def test_a_snapshot_that_is_not_kept_any_more_is_told(spark: SparkSession, tmp_path: Path) -> None:
    async def fill() -> int:
        schema = perco.Schema(app.counts, keep=perco.Keep(seconds=0))
        async with perco.open(tmp_path / "s", schema) as db:
            ts = await db.run(_bump_all)
            await db.run(_bump_all)
            await db.vacuum()
            return ts

    ts = trio.run(fill)
    with pytest.raises(PySparkException, match="SnapshotTooOld"):
        read(spark, table="counts", url=str(tmp_path / "s"), ts=ts).collect()


def test_a_table_of_any_size_goes_through_piece_by_piece(spark: SparkSession, tmp_path: Path) -> None:
    """A task holds an amount of it that depends on the size of a batch, not on that of the table."""
    rows, each = 96, 1 << 20

    async def fill(store: perco.spark.Store) -> None:
        async with store.open(app.schema) as db:
            for n in range(rows):
                async with db.transaction() as txn:
                    txn.set(app.raw, f"k{n:06}", bytes([n]) * each)

    def task(store: perco.spark.Store) -> tuple[int, int]:
        """What an executor does, in this process: the bytes that came, and the most that there were at a time."""
        source = PercoSource({"table": "pages", "columns": "raw", "url": store.url})
        reader = source.reader(source.schema())
        span = reader.partitions()[0]  # they all lie in the first tablet
        came = arrow = 0
        tracemalloc.start()
        try:
            for batch in reader.read(span):
                arrow = max(arrow, pa.total_allocated_bytes())
                came += sum(len(value.as_py()) for value in batch.column(1))
            return came, arrow + tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    with perco.spark.serve(tmp_path / "store", spark) as store:
        trio.run(fill, store)
        came, most = task(store)
    assert came == rows * each
    assert most < came / 2


def test_rows_much_larger_than_most_get_transactions_of_their_own() -> None:
    large, small = b"x" * (700 << 10), b"y"
    bodies = [small] * 300 + [large] * 4 + [small] * 300
    batch = pa.record_batch({"key": list(range(len(bodies))), "raw": bodies})
    pieces = list(_pieces(batch))
    assert [row["key"] for rows in pieces for row in rows] == list(range(len(bodies)))
    assert all(1 <= len(rows) <= 100 and sum(row["raw"] == large for row in rows) <= 1 for rows in pieces)
    assert max(len(rows) for rows in pieces) > 50


def test_what_is_streamed_is_made_two_ahead_and_no_more_when_nobody_takes_it() -> None:
    made: list[int] = []
    ended: list[bool] = []

    async def make(send: Any) -> None:
        try:
            for n in range(100):
                made.append(n)
                await send(n)
        finally:
            ended.append(True)

    with contextlib.closing(streamed(make)) as stream:
        assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
        assert len(made) <= 8
    assert ended == [True]
    assert len(made) <= 8
    assert list(streamed(make)) == list(range(100))


def test_what_fails_while_it_is_streamed_comes_out() -> None:
    async def make(send: Any) -> None:
        await send(1)
        raise UsageError("so")

    stream = streamed(make)
    assert next(stream) == 1
    with pytest.raises(UsageError, match="so"):
        next(stream)
