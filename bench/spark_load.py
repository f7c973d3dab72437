"""Loading through Spark against the same loader without it, and reading back against Parquet.

First, narrow rows (`bench/spark_narrow.py`), also in bulk (`bench/spark_bulk.py`). Then pages:

One served store, durable. The loader is the web index's: it reads a page's cells, writes its contents (some 3 KB) and
its rank, and notifies observers, which do not run. Each page has its own transaction; each of two processes has 64 in
flight:

    without Spark                two processes that have their rows in memory
    without Spark, ledger        ... and load each input once, as `perco.spark.load` always does: with a mark in the row
    without Spark, ledger apart  ... with the marks in a table of their own, as if the rows' table were not known
    Spark                        two executors, which read the rows from Parquet; all of `load` is timed, with the start
                                 of its jobs, but without the ledger's removal, which has a line of its own
    Spark, 100 pages in a ...    the same, with the default of `load`

Reading back counts all rows and sums up the lengths of their contents: as `format("perco")`, with one snapshot, two
tasks at a time, and as Parquet files of the same rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

import perco
from bench.harness import Cell, Report, Run, interleaved
from perco.webindex.index import WebIndex
from perco.webindex.pages import Page
from perco.webindex.synthetic import SyntheticWeb

EXECUTORS = 2
IN_FLIGHT = 64
ROWS, QUICK_ROWS = 20_000, 6_000
LEAST, LEDGER_LEAST = 0.7, 0.9

INDEX = WebIndex()
table, schema = INDEX.pages, INDEX.schema

PLAIN, LEDGER, ELSEWHERE, SPARK = "without Spark", "without Spark, ledger", "without Spark, ledger apart", "Spark"
GROUPED = "Spark, 100 pages in a transaction"


async def loader(txn: perco.Transaction, row: Any) -> None:
    """Load a row."""
    await INDEX.load(txn, Page(url=row["url"], content_type="text/html", body=bytes(row["body"])))


def made(rows: int, part: int = 0, parts: int = 1) -> list[dict[str, Any]]:
    """Part `part` of `parts` of all rows."""
    web = SyntheticWeb(rows)
    pages = map(web.page, range(part, rows, parts))
    return [{"url": page.url, "body": page.body} for page in pages]


# ------------------------------------------------------------------ without Spark: a process of its own


async def alone(url: str, part: int, rows: int, ledger: bool, beside: bool) -> None:
    """Load its share when a line comes on stdin; say when it is ready and when it is done."""
    from perco.spark import ledger as ledgers
    from perco.spark.keys import chosen, valued
    from perco.spark.partition import LoadOptions, PartitionResult, load_partition
    from perco.spark.store import Store

    mine = made(rows, part, EXECUTORS)
    async with Store(url=url).joining() as db:
        if ledger:
            open_job = await ledgers.begin(db, "bench", table.name if beside else "")
            print("ready", flush=True)
            sys.stdin.readline()
            result = PartitionResult(part)
            options = LoadOptions(concurrency=IN_FLIGHT, group=1)
            key = valued("url") if beside else chosen("url")
            await load_partition(db, iter(mine), key, loader, open_job, options, result)
            assert result.committed == len(mine), result.failures[:1]
        else:
            print("ready", flush=True)
            sys.stdin.readline()
            left = iter(mine)

            async def work() -> None:
                for row in left:
                    await db.run(loader, row)

            async with trio.open_nursery() as nursery:
                for _ in range(IN_FLIGHT):
                    nursery.start_soon(work)
    print("done", flush=True)


def together(url: str, rows: int, *, ledger: bool, beside: bool = False) -> float:
    """Rows a second of the processes together."""
    orders = [[url, part, rows, ledger, beside] for part in range(EXECUTORS)]
    with told("bench.spark_load", orders) as go:
        began = time.perf_counter()
        go()
        return rows / (time.perf_counter() - began)


@contextmanager
def told(module: str, orders: list[list[Any]]) -> Iterator[Callable[[], None]]:
    """Start a process of a module for each order; the block gets a function that lets them work, and waits for them."""
    processes = []
    for order in orders:
        command = [sys.executable, "-m", module, json.dumps(order)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    _all_say(processes, "ready")

    def go() -> None:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        _all_say(processes, "done")

    yield go
    for process in processes:
        process.communicate()


def _all_say(processes: list[subprocess.Popen[str]], word: str) -> None:
    for process in processes:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said != word:
            raise RuntimeError(f"a loading process said {said!r}, not {word!r}")


# ------------------------------------------------------------------ with it


def main(run: Run) -> None:
    """Prints the tables and the RESULT line."""
    import pyspark

    from bench import spark_bulk, spark_narrow

    report = Report("spark_load", "power")
    facts = run.machine("power (fsync before every answer)", {"pyspark": pyspark.__version__})
    spark_narrow.main(run, report)
    spark_bulk.main(run, report)
    pages(run, report)
    run.finish(report, facts)


@contextmanager
def session(master: str) -> Iterator[Any]:
    """A Spark session of the benchmark."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("bench")
    for name, value in (
        ("spark.ui.enabled", "false"),
        ("spark.ui.showConsoleProgress", "false"),
        ("spark.executor.memory", "800m"),
        ("spark.log.level", "OFF"),
    ):
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def pages(run: Run, report: Report) -> None:
    """The web index's pages: loaded and read back."""
    rows = QUICK_ROWS if run.quick else ROWS
    with session(f"local-cluster[{EXECUTORS},1,1000]") as spark, run.scratch() as folder:
        parquet = str(folder / "rows.parquet")
        data = [(row["url"], row["body"]) for row in made(rows)]
        spark.createDataFrame(data, "url string, body binary").repartition(EXECUTORS).write.parquet(parquet)
        removal: list[float] = []
        sides: dict[str, Callable[[], float]] = {
            PLAIN: partial(_fresh, run, folder, spark, lambda url, store: together(url, rows, ledger=False)),
            LEDGER: partial(
                _fresh, run, folder, spark, lambda url, store: together(url, rows, ledger=True, beside=True)
            ),
            ELSEWHERE: partial(_fresh, run, folder, spark, lambda url, store: together(url, rows, ledger=True)),
            SPARK: partial(_fresh, run, folder, spark, lambda url, store: _spark(spark, store, parquet, rows, removal)),
            GROUPED: partial(
                _fresh, run, folder, spark, lambda url, store: _spark(spark, store, parquet, rows, [], 100)
            ),
        }
        _fresh(run, folder, spark, lambda url, store: _spark(spark, store, parquet, rows, []))  # to warm up
        found = {side: Cell(tuple(each)) for side, each in interleaved(run.rounds, sides).items()}
        read = _read(run, folder, spark, parquet, rows)
    head = ("", "rows/s (least - most)", "of without Spark")
    lines = [(side, cell, f"{cell.of(found[PLAIN]):.2f}") for side, cell in found.items()]
    run.table(f"{rows} pages, a transaction each, {EXECUTORS} x {IN_FLIGHT} in flight", head, lines)
    run.say(f"the ledger's removal, when a job is acknowledged: {Cell(tuple(removal))} rows/s")
    report.ratio("spark_vs_without", found[SPARK].of(found[PLAIN]), at_least=LEAST)
    report.ratio("pages_grouped_vs_each", found[GROUPED].of(found[SPARK]))
    report.ratio("ledger_vs_without", found[LEDGER].of(found[PLAIN]), at_least=LEDGER_LEAST)
    report.ratio("ledger_apart_vs_without", found[ELSEWHERE].of(found[PLAIN]))
    head = ("read back", "rows/s (least - most)", "of Parquet")
    run.table(
        f"{rows} rows as a data frame, summed up",
        head,
        [(side, cell, f"{cell.of(read['Parquet']):.2f}") for side, cell in read.items()],
    )
    report.ratio("pages_read_vs_parquet", read["perco"].of(read["Parquet"]))
    report.figures |= {f"rows_per_s_{side}": cell.median for side, cell in {**found, **read}.items()}


def _fresh(run: Run, folder: Path, spark: Any, load: Callable[[str, Any], float]) -> float:
    import perco.spark

    path = folder / f"store-{time.monotonic_ns()}"
    with perco.spark.serve(path, spark, host="127.0.0.1") as store:
        trio.run(_declare, store)
        return load(f"unix:{path}/socket", store)


async def _declare(store: Any) -> None:
    from perco.spark.ledger import LEDGER as ledger, taken_in

    taken_in(table)
    async with store.open(schema), store.open(perco.Schema(table, ledger)):
        pass


def _spark(spark: Any, store: Any, parquet: str, rows: int, removal: list[float], group: int = 1) -> float:
    import perco.spark
    from bench import spark_load

    began = time.perf_counter()
    done = perco.spark.load(
        spark.read.parquet(parquet),
        store,
        spark_load.loader,
        key="url",
        beside=spark_load.table,
        job="bench",
        options=perco.spark.LoadOptions(group=group, concurrency=IN_FLIGHT if group == 1 else None),
    )
    rate = rows / (time.perf_counter() - began)
    assert done.committed == rows
    began = time.perf_counter()
    perco.spark.acknowledge(store, "bench", spark)
    removal.append(rows / (time.perf_counter() - began))
    return rate


def _read(run: Run, folder: Path, spark: Any, parquet: str, rows: int) -> dict[str, Cell]:
    from pyspark.sql import functions as F

    import perco.spark

    path = folder / "read"
    with perco.spark.serve(path, spark, host="127.0.0.1") as store:
        trio.run(_declare, store)
        _spark(spark, store, parquet, rows, [])
        perco.spark.register(spark, store)

        def summed(frame: Any, column: str) -> float:
            began = time.perf_counter()
            [found] = frame.agg(F.count("*"), F.sum(F.length(column))).collect()
            assert found[0] == rows
            return rows / (time.perf_counter() - began)

        def perco_rows() -> float:
            return summed(
                spark.read.format("perco").options(table="pages", columns="contents", partitions=4).load(), "contents"
            )

        def parquet_rows() -> float:
            return summed(spark.read.parquet(parquet), "body")

        perco_rows(), parquet_rows()  # warm
        return {
            side: Cell(tuple(each))
            for side, each in interleaved(run.rounds, {"perco": perco_rows, "Parquet": parquet_rows}).items()
        }


if __name__ == "__main__":
    perco.tune_gc()
    trio.run(alone, *json.loads(sys.argv[1]))
