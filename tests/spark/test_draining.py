"""Observers on Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from pyspark.sql import SparkSession

import perco
import perco.spark
from perco.check.check import check
from perco.database.inside import inside
from perco.errors import UsageError
from tests.spark import app


def test_a_table_that_was_loaded_is_observed_by_tasks(spark: SparkSession, tmp_path: Path) -> None:
    store = tmp_path / "s"
    pages = spark.createDataFrame([(f"k{n:04}", "x" * (n % 50)) for n in range(600)], "url string, body string")
    perco.spark.load(pages, store, app.load, schema=app.schema, key="url")
    drained = perco.spark.drain(spark, store, "tests.spark.app:schema", options=perco.WorkerOptions(concurrency=32))
    assert drained.workers == 2
    assert drained.commits == {"size": 600}
    assert drained.failed == 0
    assert str(drained) == "2 workers: size 600; 0 on the failed list"

    async def main() -> int:
        async with perco.open(store, app.schema) as db, db.snapshot() as snap:
            assert not await db.pending()
            assert (await check(inside(db).driver.store, ts=inside(db).oracle.last)).clean
            return sum([row.get(app.size, 0) async for row in snap.scan(app.pages)])

    assert trio.run(main) == sum(n % 50 for n in range(600))
    again = perco.spark.drain(spark, store, app.schema, workers=1)
    assert (again.workers, again.commits) == (1, {"size": 0})


def test_a_schema_that_is_sent_runs_too(spark: SparkSession, tmp_path: Path) -> None:
    pages = spark.createDataFrame([(f"k{n:04}", "x") for n in range(20)], "url string, body string")
    perco.spark.load(pages, tmp_path / "s", app.load, schema=app.schema, key="url")
    assert perco.spark.drain(spark, tmp_path / "s", app.schema).commits == {"size": 20}


def test_what_cannot_be_drained_is_told(spark: SparkSession, tmp_path: Path) -> None:
    for schema, said in (
        (perco.Schema(app.pages), "declares no observers"),
        ("tests.spark.app:load", "is function, not a perco.Schema"),
        ("tests.spark.app", "write MODULE:NAME"),
        (5, "takes a perco.Schema"),
    ):
        with pytest.raises(UsageError, match=said):
            perco.spark.drain(spark, tmp_path / "s", schema)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="workers=0"):
        perco.spark.drain(spark, tmp_path / "s", app.schema, workers=0)
