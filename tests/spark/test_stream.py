"""`readStream.format("perco")`, exactly once to its sink, and `writeStream` to a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import perco
import perco.spark
from perco.spark.following import BOUNDED
from tests.spark.test_frames import forget_the_end, run, transact

docs = perco.Table("docs", key=perco.TEXT, changes=True, splits=["k5"])
body = docs.column("body", perco.TEXT)
size = docs.column("size", perco.INT64)
copy = perco.Table("copy", key=perco.TEXT)
copied = copy.column("body", perco.TEXT)
copied_size = copy.column("size", perco.INT64)
accounts = perco.Table("accounts", key=perco.TEXT, changes=True, splits=["m"])
balance = accounts.column("balance", perco.INT64)
SCHEMA = perco.Schema(docs, copy, accounts)


@pytest.fixture(scope="module")
def store(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[perco.spark.Store]:
    folder = tmp_path_factory.mktemp("streams") / "store"

    async def fill() -> None:
        async with perco.open(folder, SCHEMA) as db:
            await db.run(change, {f"k{at}": (f"body {at}", at) for at in range(8)})

    trio.run(fill)
    with perco.spark.serve(folder, spark) as served:
        perco.spark.register(spark, served)
        yield served


async def change(txn: perco.Transaction, rows: dict[str, tuple[str | None, int | None]]) -> None:
    tables = txn._engine.known.schema.tables
    for key, values in rows.items():
        for name, value in zip(("body", "size"), values, strict=True):
            column = tables["docs"].columns[name]
            if value is None:
                txn.delete(column, key)
            else:
                txn.set(column, key, value)


def changed(store: perco.spark.Store, **rows: tuple[str | None, int | None]) -> None:
    transact(store, lambda txn: change(txn, rows))


def stream_of(spark: SparkSession, table: str = "docs", **options: Any) -> DataFrame:
    if not BOUNDED:
        options.pop("maxRows", None)
    return spark.readStream.format("perco").options(table=table, **options).load()


def writing(frame: DataFrame, folder: Path) -> Any:
    return frame.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)


def go_on(query: Any) -> None:
    """Read all that there is. Before PySpark 4.2, a query that reads a batch again ends with it."""
    for _ in range(1 if BOUNDED else 2):
        run(query)


def table(spark: SparkSession, name: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in spark.read.format("perco").option("table", name).load().collect())


def test_a_copy_that_is_interrupted_at_any_place_equals_its_source(
    spark: SparkSession, store: perco.spark.Store, tmp_path: Path
) -> None:
    perco.spark.register(spark, store)  # again is harmless
    changes = stream_of(spark, net=True, maxRows=5).select("key", "body", "size")
    sink = writing(changes, tmp_path).format("perco").options(table="copy", nulls="delete")
    run(sink)  # the snapshot, in two batches
    assert table(spark, "copy") == table(spark, "docs")
    changed(store, k1=("newer", None), k2=(None, None), k9=("nine", 9))
    changed(store, k1=("newest", None), k3=(None, 33), k9=(None, None))
    forget_the_end(tmp_path)  # the driver was killed before it noted the end of the snapshot's last batch
    go_on(sink)
    assert table(spark, "copy") == table(spark, "docs")

    async def correct(txn: perco.Transaction) -> None:
        txn.set(txn._engine.known.schema.tables["copy"].columns["body"], "k1", "corrected by hand")

    transact(store, correct)
    forget_the_end(tmp_path)
    go_on(sink)  # what the batch has written before does not come again over newer values
    assert dict(row[:2] for row in table(spark, "copy"))["k1"] == "corrected by hand"
    changed(store, k1=("last", 1))
    run(sink)
    assert table(spark, "copy") == table(spark, "docs")
    assert perco.spark.jobs(store, spark) == {}


def test_a_batch_that_failed_comes_again_as_it_was_and_none_is_torn(
    spark: SparkSession, store: perco.spark.Store, tmp_path: Path
) -> None:
    """Transfers between accounts; the sink fails once after it has written, and Spark is killed once before it notes
    that."""

    def transfer(*amounts: int) -> None:
        async def body_of(txn: perco.Transaction, amount: int) -> None:
            column = txn._engine.known.schema.tables["accounts"].columns["balance"]
            for key, more in (("a", -amount), ("z", amount)):
                txn.set(column, key, (await txn.get(column, key) or 0) + more)

        for amount in amounts:
            transact(store, lambda txn, amount=amount: body_of(txn, amount))

    got: dict[int, list[list[tuple[Any, ...]]]] = {}
    failed = 2 if BOUNDED else 0  # a batch that is the first one of a query, and not the last
    failing = [failed]

    def each(batch: DataFrame, number: int) -> None:
        rows = sorted((tuple(row) for row in batch.collect()), key=lambda row: (row[3], row[0]))
        got.setdefault(number, []).append(rows)
        if number in failing:
            failing.remove(number)
            raise RuntimeError("the sink fails after it has written")

    query = writing(stream_of(spark, "accounts", since=0, maxRows=4), tmp_path).foreachBatch(each)
    transfer(1, 2, 3, 4, 5)
    with pytest.raises(PySparkException, match="fails after it has written"):
        run(query)
    transfer(6, 7)
    go_on(query)
    assert len(got[failed]) == 2
    forget_the_end(tmp_path)
    go_on(query)
    for attempts in got.values():
        assert all(attempt == attempts[0] for attempt in attempts)
    rows = [row for _, [first, *_] in sorted(got.items()) for row in first]
    assert [row[1] for row in rows if row[0] == "z"] == [1, 3, 6, 10, 15, 21, 28]
    for [first, *_] in got.values():
        newest = {row[0]: row[1] for row in first}
        assert sum(newest.values()) == 0


def test_files_have_each_change_once_and_the_table_can_be_made_of_them(
    spark: SparkSession, store: perco.spark.Store, tmp_path: Path
) -> None:
    """A query that runs on until it is stopped, while the table changes."""
    files = str(tmp_path / "files")
    frame = stream_of(spark, columns="size")
    sink = frame.writeStream.format("parquet").option("path", files)
    sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = sink.start()
    query.processAllAvailable()
    for at in range(4):
        changed(store, k6=("x", 100 + at))
        query.processAllAvailable()
    query.stop()
    changed(store, k6=("x", 200), k7=(None, None), k0=("only the body", 0))
    forget_the_end(tmp_path)
    go_on(sink.trigger(availableNow=True))
    rows = [tuple(row) for row in spark.read.parquet(files).orderBy("_commit_ts", "key").collect()]
    assert len({(row[0], row[3]) for row in rows}) == len(rows)
    assert [row[1] for row in rows if row[0] == "k6"][1:] == [100, 101, 102, 103, 200]
    state: dict[str, int | None] = {}
    for key, value, kind, _ in rows:
        assert (key in state) == (kind != "insert")
        state[key] = value
        if kind == "delete":
            del state[key]
    assert sorted(state.items()) == [(key, value) for key, _, value in table(spark, "docs") if value is not None]


def test_errors_are_told_at_once_and_in_words(spark: SparkSession, store: perco.spark.Store, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match=r"'copy' keeps no log of its changes; it must be declared with changes"):
        stream_of(spark, "copy")
    with pytest.raises(PySparkException, match="readChangeFeed is for"):
        spark.read.format("perco").options(table="docs", readChangeFeed="true").load().count()
    with pytest.raises(PySparkException, match=r"is at timestamp 999999999, .* start the stream with a new checkpoint"):
        run(writing(stream_of(spark, since=999999999), tmp_path).format("noop"))
