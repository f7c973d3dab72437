"""Spark on a store in a database: executors read and write the rows by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from pyspark.sql import SparkSession

import perco
import perco.spark
from bench.against.coordinator import Coordinator
from perco.check.check import check
from perco.database.inside import inside
from tests.spark import app
from tests.support import bigtable, postgresql


@pytest.fixture(params=["postgresql", "bigtable"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that `perco serve --direct` serves."""
    store = {"postgresql": postgresql.fresh, "bigtable": bigtable.fresh}[request.param]()
    coordinator = Coordinator(store, tmp_path / "socket")
    coordinator.says("serving ")
    yield store
    coordinator.end()


def test_it_is_loaded_drained_and_read_by_executors(spark: SparkSession, url: str) -> None:
    pages = spark.createDataFrame([(f"k{n:04}", "x" * (n % 50)) for n in range(600)], "url string, body string")
    loaded = perco.spark.load(pages, url, app.load, schema=app.schema, key="url")
    assert (loaded.committed, loaded.skipped, loaded.failed) == (600, 0, 0)
    drained = perco.spark.drain(spark, url, "tests.spark.app:schema")
    assert drained.commits == {"size": 600}
    perco.spark.register(spark)
    frame = spark.read.format("perco").options(url=url, table="pages", partitions=4).load()
    parts = frame.rdd.getNumPartitions()
    assert parts == 4 or (parts > 4 and url.startswith("bigtable"))  # where the emulator samples keys at random
    assert sum(row["size"] for row in frame.select("size").collect()) == sum(n % 50 for n in range(600))

    async def main() -> None:
        async with perco.open(url, app.schema) as db, db.snapshot():
            assert not await db.pending()
            assert (await check(inside(db).driver.store, ts=inside(db).oracle.last)).clean

    trio.run(main)
    again = perco.spark.load(pages, url, app.load, schema=app.schema, key="url")
    assert again.committed == 600, "a job without a name begins anew"
