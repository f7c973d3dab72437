"""A job with a driver of its own: `python -m tests.spark.driver MASTER STORE WHAT FOLDER`. Says what it did in JSON."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import perco
import perco.spark
from perco.spark.loading import Loaded
from tests.spark import app
from tests.spark.conftest import quiet, reach

ROWS = 800


def main(master: str, store: str, what: str, folder: Path) -> None:
    reach()
    builder = SparkSession.builder.master(master).appName(what)
    more = {
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.executor.memory": "600m",
        "spark.driver.memory": "600m",
        "spark.task.maxFailures": "4",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": str(folder),
        "spark.eventLog.compress": "false",
        "spark.speculation": str(what == "speculate").lower(),
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.minTaskRuntime": "1s",
    }
    for name, value in {**quiet(), **more}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("INFO")
    with perco.spark.serve(store, spark, durability="process") as served:
        (folder / "secrets").write_text(f"{served.token}\n{served.ca.splitlines()[2]}\n")
        if what == "kill":  # the executors do not know that they are on the driver's machine
            served = replace(served, mounts="")
        say(url=served.url, at=served.at())
        match what:
            case "kill" | "speculate" | "plain":
                said = loaded(spark, served, what, folder)
                say(committed=said.committed, skipped=said.skipped)
                if what == "kill":
                    frames(spark, served)
                    drained(spark, served, folder)
                    pages = [page(spark, name) for name in ("environment", "jobs", "stages", "SQL", "executors")]
                    (folder / "pages").write_text("\n".join(pages))
            case "wait":
                loaded(spark, served, "plain", folder)
                say(loaded=True)
                time.sleep(3600)
    spark.stop()


def loaded(spark: SparkSession, served: perco.spark.Store, what: str, folder: Path) -> Loaded:
    loader = {"kill": app.kill_executor_once, "speculate": app.slow_first, "plain": app.bump}[what]
    at = {"kill": 300, "speculate": ROWS - 20}.get(what)
    rows = [(n, f"n{n % 5}", str(folder / "once") if n == at else "") for n in range(ROWS)]
    data = spark.createDataFrame(spark.sparkContext.parallelize(rows, 4), "id long, name string, die string")
    options = perco.spark.LoadOptions(concurrency=16, group=10)
    return perco.spark.load(data, served, loader, schema=app.schema, key="id", job="the job", options=options)


def frames(spark: SparkSession, served: perco.spark.Store) -> None:
    """What a table says, read and written through the executors."""
    perco.spark.register(spark, served)
    counts = spark.read.format("perco").option("table", "counts").load()
    say(counts=dict(sorted(tuple(row) for row in counts.collect())))
    counts.selectExpr("concat('copy ', key) as key", "count").write.format("perco").option("table", "counts").mode(
        "append"
    ).save()
    say(rows=spark.read.format("perco").option("table", "counts").load().count())


def drained(spark: SparkSession, served: perco.spark.Store, folder: Path) -> None:
    """An executor dies while it runs an observer."""
    rows = [(f"k{n:06}", f"kill the executor: {folder / 'twice'}" if n == 150 else "x" * (n % 7)) for n in range(300)]
    pages = spark.createDataFrame(spark.sparkContext.parallelize(rows, 2), "url string, body string")
    perco.spark.load(pages, served, app.load, key="url", beside=app.pages)
    done = perco.spark.drain(spark, served, "tests.spark.app:schema", options=perco.WorkerOptions(concurrency=8))
    sizes = spark.read.format("perco").options(table="pages", columns="body,size").load()
    say(drained=done.workers, wrong=sizes.filter("size is null or size != length(body)").count(), sized=sizes.count())


def page(spark: SparkSession, name: str) -> str:
    url = f"{spark.sparkContext.uiWebUrl}/{name}/"
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
