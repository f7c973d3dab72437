"""Whole tables from data frames, in one step (P7)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio
from pyspark.sql import SparkSession

import perco
import perco.spark
from perco.check.check import check
from perco.database.inside import inside
from perco.errors import SchemaMismatch, UsageError
from tests.spark.conftest import failed_tasks

docs = perco.Table("docs", key=perco.TEXT)
text = docs.column("text", perco.TEXT)
number = docs.column("number", perco.INT64)
real = docs.column("real", perco.FLOAT64)
flag = docs.column("flag", perco.BOOL)
blob = docs.column("blob", perco.BYTES, group="blobs")
tree = docs.column("tree", perco.JSON)
pairs = perco.Table("pairs", key=perco.Tuple(perco.TEXT, perco.INT64))
value = pairs.column("value", perco.INT64)
# Spark passes keys of such a table on as they are stored.
four: perco.Codec[int] = perco.Codec(
    "test four", lambda n: n.to_bytes(4, "big"), lambda b: int.from_bytes(b, "big"), ordered=True
)
fours = perco.Table("fours", key=four)
name = fours.column("name", perco.TEXT)
seen = perco.Table("seen", key=perco.TEXT)
times = seen.column("times", perco.INT64)
SCHEMA = perco.Schema(docs, pairs, fours, seen)
FIELDS = "key string, text string, number bigint, real double, flag boolean, blob binary, tree string"
Found = dict[Any, dict[str, Any]]


@SCHEMA.observe(number, id="see")
async def see(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    txn.set(times, change.key, (await txn.get(times, change.key) or 0) + 1)


def documents(count: int) -> list[tuple[Any, ...]]:
    """Rows with many nulls, short and long values, and keys that are not in order."""
    rng = random.Random(5)
    out = []
    for i in rng.sample(range(count), count):
        row = [f"text {i} " * rng.randrange(80), rng.randrange(-9, 9), rng.random(), rng.random() < 0.5]
        row += [rng.randbytes(rng.randrange(900)), f'{{"a": [{i}, null]}}']
        out.append((f"é{i}\0", *(None if rng.random() < 0.3 else each for each in row)))
    return out


async def tables(db: perco.Database) -> dict[str, Found]:
    out: dict[str, Found] = {}
    async with db.snapshot() as snap:
        for table in (docs, pairs, fours, seen):
            out[table.name] = {row.key: row.values() async for row in snap.scan(table)}
    found = (await check(inside(db).driver.store, ts=await inside(db).oracle.draw())).findings
    assert not [each for each in found if each.severity != "note"]
    return out


def read(folder: Path, *, work: bool = False) -> dict[str, Found]:
    async def main() -> dict[str, Found]:
        async with perco.open(folder, SCHEMA) as db:
            if work:
                async with db.worker():
                    await db.wait_idle(timeout=60)
            return await tables(db)

    return trio.run(main)


def test_all_tables_appear_at_once(spark: SparkSession, tmp_path: Path) -> None:  # P7 N1
    made = documents(500)
    keys = [(f"k{i % 7}", i - 50, i) for i in range(100)]
    numbers = [7, 0, 1 << 31, 255, 256, 65536]
    loaded = perco.spark.bulk_load(
        {
            docs: spark.createDataFrame(made, FIELDS).repartition(5),
            "pairs": spark.createDataFrame(keys, "a string, b bigint, value bigint").selectExpr(
                "struct(a as _1, b as _2) as key", "value"
            ),
            fours: spark.createDataFrame([(four.encode(n), str(n)) for n in numbers], "key binary, name string"),
        },
        tmp_path / "s",
        schema=SCHEMA,
        partitions=3,
    )
    expected: Found = {}
    for key, *values in made:
        row = dict(zip(("text", "number", "real", "flag", "blob", "tree"), values, strict=True))
        if row["tree"] is not None:
            row["tree"] = {"a": [int(key[1:-1]), None]}
        expected[key] = {column: each for column, each in row.items() if each is not None}
    expected = {key: row for key, row in expected.items() if row}
    assert loaded.rows == {"docs": len(expected), "pairs": 100, "fours": 6}
    assert 3 <= loaded.tablets <= 9
    assert str(loaded).startswith(f"{len(expected)} rows of docs, 100 rows of pairs")
    found = read(tmp_path / "s", work=True)
    assert found["docs"] == expected
    assert found["pairs"] == {(a, b): {"value": i} for a, b, i in keys}
    assert found["fours"] == {n: {"name": str(n)} for n in numbers}
    assert found["seen"] == {key: {"times": 1} for key, row in expected.items() if "number" in row}


def test_what_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """And nothing of it is there afterwards."""
    folder = tmp_path / "s"
    with perco.spark.serve(folder, spark) as store:
        refused(spark, store)
    assert not list((folder / "loads").glob("*"))
    assert read(folder)["docs"] == {"a": {"number": 1}, "b": {"number": 2}}


def refused(spark: SparkSession, store: perco.spark.Store) -> None:
    before = failed_tasks(spark, None)
    one = spark.createDataFrame([("a", 1), ("b", 2)], "key string, number bigint")

    def load(frames: Any, **more: Any) -> Any:
        return perco.spark.bulk_load(frames, store, schema=SCHEMA, partitions=1, **more)

    with pytest.raises(UsageError, match="data frames by tables"):
        load(one)
    with pytest.raises(UsageError, match="at least one"):
        load({})
    with pytest.raises(UsageError, match="no table 'dogs'"):
        load({"dogs": one})
    with pytest.raises(SchemaMismatch, match="no column 'other'"):
        load({docs: one.withColumnRenamed("number", "other")})
    with pytest.raises(SchemaMismatch, match="takes string"):
        load({docs: one.selectExpr("number as key")})
    with pytest.raises(UsageError, match="no column 'id' for"):
        load({docs: one}, key="id")
    with pytest.raises(perco.spark.KeyNotUnique, match=r"^several rows .* have the key 'a'"):
        load({docs: one.union(one)})
    with pytest.raises(UsageError, match=r"^a row of table 'docs' cannot be loaded: its key is null$"):
        load({docs: one.selectExpr("nullif(key, 'a') as key", "number")})
    with pytest.raises(UsageError, match=r"^a value of column 'tree' .* is wrong"):
        load({docs: one.selectExpr("key", "'no json' as tree")})
    with pytest.raises(UsageError, match=r"^a key of table 'docs' is wrong: .*UTF"):
        load({docs: one.selectExpr("cast(X'61FF' as string) as key", "number")})
    with pytest.raises(UsageError, match=r"^a value of column 'text' .*UTF"):
        load({docs: one.selectExpr("key", "cast(X'61FF' as string) as text")})
    assert failed_tasks(spark, None) == before  # Spark would run such a task again
    load({docs: one})  # it is still empty
    with pytest.raises(UsageError, match="'docs' has some"):
        load({docs: one})


def test_a_task_that_dies_is_run_again(spark: SparkSession, tmp_path: Path) -> None:  # P7
    """The file of its first attempt stays out."""
    from pyspark.sql import functions

    marker = tmp_path / "died"

    @functions.udf("bigint")
    def dies_once(n: int) -> int:
        import os

        if n == 99 and not marker.exists():
            marker.touch()
            os._exit(1)
        return n

    rows = spark.range(200).selectExpr("lpad(id, 4, '0') as key", "id as number")
    frame = rows.select("key", dies_once("number").alias("number"))
    try:
        perco.spark.bulk_load({docs: frame}, tmp_path / "s", schema=SCHEMA, partitions=2)
    except Exception:  # a local Spark does not run tasks again; then nothing has been loaded
        assert read(tmp_path / "s")["docs"] == {}
        perco.spark.bulk_load({docs: frame}, tmp_path / "s", schema=SCHEMA, partitions=2)
    assert marker.exists()
    assert read(tmp_path / "s")["docs"] == {f"{n:04}": {"number": n} for n in range(200)}
