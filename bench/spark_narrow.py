"""Loading narrow rows through Spark, a group of them in each transaction, against the same loader without Spark; and
reading them back against Parquet.

A row has a key and four small cells, one of which has an observer, so each row also writes a notification; the observer
does not run. The rows come in no order. Marks are in the rows; with marks per chunk, they are in the ledger, and Spark
sorts each partition by the key, as perco sorts batches otherwise. All of `load` is timed, with the start of its jobs,
in a session that is warm; CPU time is that of all processes: JVM, Python workers, server and driver.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import trio

import perco
from bench.harness import Cell, Report, Run, interleaved

TASKS: Final = 2
ROWS: Final = 50_000
BATCH: Final = 10_000  # rows that Spark puts into an Arrow batch
READ_ROWS: Final = 300_000
READ_RATE, READ_SHARE = 100_000, 0.5
FILES, SERVED, ROWWISE, PARQUET = "perco, files", "perco, served", "perco, row by row", "Parquet"
RATE, CPU_US, SHARE = 15_000, 80, 0.75
GROUPED, ALONE, EACH = "Spark, grouped", "without Spark, grouped", "Spark, a transaction each"
CHUNKS: Final = "Spark, grouped, marks per chunk"
NAMES: Final = ("key", "count", "name", "score", "good")
_KINDS: Final = {
    "perco.serve.lending": "server",
    "bench.spark_narrow": "loaders",
    "pyspark.daemon": "Python workers",
}
KINDS: Final = ("JVM", "Python workers", "loaders", "server", "driver")
_TICKS: Final = os.sysconf("SC_CLK_TCK")

things = perco.Table("things", key=perco.TEXT)
count = things.column("count", perco.INT64)
name = things.column("name", perco.TEXT)
score = things.column("score", perco.FLOAT64)
good = things.column("good", perco.BOOL)
schema = perco.Schema(things)


@schema.observe(name, id="named")
async def named(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
    """Does not run in this benchmark."""


async def loader(txn: perco.Transaction, row: Any) -> None:
    """Load a row."""
    key, *values = row
    txn.set(count, key, values[0])
    txn.set(name, key, values[1])
    txn.set(score, key, values[2])
    txn.set(good, key, values[3])


def made(rows: int) -> list[tuple[str, int, str, float, bool]]:
    """All rows, in no order."""
    numbers = list(range(rows))
    random.Random(7).shuffle(numbers)
    return [(f"thing-{n:08}", n, f"name {n % 977}", n / 7, n % 3 == 0) for n in numbers]


# ------------------------------------------------------------------ CPU time of all processes


def cpu_s() -> dict[str, float]:
    """CPU seconds of this process and of all that descend from it, by kind."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        used[pid] = sum(map(int, fields[11:15])) / _TICKS  # its own, and that of children that have ended
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    total: dict[str, float] = defaultdict(float)
    for pid in sorted(mine):
        total[_kind(pid)] += used.get(pid, 0)
    return total


@cache
def _kind(pid: int) -> str:
    try:
        program, *arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return "other"
    if program.endswith("java"):
        return "JVM"
    for argument in arguments:
        if argument in _KINDS:
            return _KINDS[argument]
    return "driver"


# ------------------------------------------------------------------ without Spark: a process of its own


async def alone(url: str, part: int, rows: int) -> None:
    """Load its share when a line comes on stdin; say when it is ready and when it is done."""
    from pyspark.sql.types import Row

    from perco.spark import ledger as ledgers
    from perco.spark.keys import valued
    from perco.spark.partition import Grouped, LoadOptions, PartitionResult, load_partition
    from perco.spark.store import Store

    shape = Row(*NAMES)
    mine = [shape(*row) for row in made(rows)[part::TASKS]]
    async with Store(url=url).joining() as db:
        job = await ledgers.begin(db, "bench", things.name)
        print("ready", flush=True)
        sys.stdin.readline()
        result, options = PartitionResult(part), LoadOptions()
        await load_partition(db, Grouped(ordered(mine, options.group)), valued("key"), loader, job, options, result)
        assert result.committed == len(mine)
    print("done", flush=True)


def ordered(rows: list[Any], group: int) -> Iterator[list[Any]]:
    """Groups of rows, sorted as `load` sorts the rows of an Arrow batch."""
    for low in range(0, len(rows), BATCH):
        some = sorted(rows[low : low + BATCH])
        yield from (some[at : at + group] for at in range(0, len(some), group))


def without_spark(url: str, rows: int) -> Taken:
    from bench.spark_load import told

    with told("bench.spark_narrow", [[url, part, rows] for part in range(TASKS)]) as go, measured() as taken:
        go()
    return taken


# ------------------------------------------------------------------ with it


@dataclass
class Taken:
    """The seconds that something took, and its CPU seconds by kind of process."""

    seconds: float = 0.0
    cpu: dict[str, float] = field(default_factory=dict)


@contextmanager
def measured() -> Iterator[Taken]:
    taken, before, began = Taken(), cpu_s(), time.perf_counter()
    yield taken
    taken.seconds = time.perf_counter() - began
    after = cpu_s()
    taken.cpu = {kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in KINDS}


def main(run: Run, report: Report) -> None:
    """Prints its tables, and adds to the report."""
    from bench.spark_load import session

    with session(f"local[{TASKS}]") as spark, run.scratch() as folder:
        parquet = _parquet(spark, folder, ROWS)
        sides: dict[str, Callable[[], Taken]] = {
            GROUPED: partial(_fresh, folder, spark, partial(with_spark, spark, parquet, 100)),
            ALONE: partial(_fresh, folder, spark, lambda store: without_spark(store.url, ROWS)),
            EACH: partial(_fresh, folder, spark, partial(with_spark, spark, parquet, 1)),
            CHUNKS: partial(_fresh, folder, spark, partial(in_chunks, spark, parquet)),
        }
        for _ in range(2):
            sides[GROUPED]()  # to warm up
        found = interleaved(run.rounds, sides)
        read(run, report, spark, folder)
    rates = {side: Cell(tuple(ROWS / each.seconds for each in taken)) for side, taken in found.items()}
    cpu = {side: Cell(tuple(sum(each.cpu.values()) / ROWS * 1e6 for each in taken)) for side, taken in found.items()}
    lines = []
    for side, taken in found.items():
        kinds = [Cell(tuple(each.cpu[kind] / ROWS * 1e6 for each in taken)).median for kind in KINDS]
        lines.append((side, rates[side], cpu[side], *(f"{each:.0f}" for each in kinds)))
    head = ("", "rows/s (least - most)", "CPU us a row", *KINDS)
    run.table(f"{ROWS} narrow rows, each once, {TASKS} tasks or processes", head, lines)
    report.figure("grouped_rows_per_s", rates[GROUPED].median, at_least=RATE)
    report.figure("grouped_cpu_us_per_row", cpu[GROUPED].median, at_most=CPU_US)
    report.ratio("grouped_spark_vs_without", rates[GROUPED].of(rates[ALONE]), at_least=SHARE)
    report.figures |= {f"narrow_rows_per_s_{side}": cell.median for side, cell in rates.items()}
    report.figures |= {f"narrow_cpu_us_{side}": cell.median for side, cell in cpu.items()}


def read(run: Run, report: Report, spark: Any, folder: Path) -> None:
    """Read a table back: from its files, through its server by pages and by rows, and from Parquet."""
    from pyspark.sql import functions as F

    import perco.spark

    parquet = _parquet(spark, folder, READ_ROWS)
    with perco.spark.serve(folder / "read", spark) as store:
        trio.run(declare, store)
        with_spark(spark, parquet, 100, store)
        perco.spark.register(spark, store)

        def summed(load: Callable[[], Any]) -> tuple[float, float]:
            """The rows a second of a query, without and with the time in which its frame is loaded."""
            began = time.perf_counter()
            frame = load()
            loaded = time.perf_counter()
            sums = [F.count("*"), F.sum("count"), F.sum("score"), F.sum(F.length("name")), F.sum(F.length("key"))]
            [row] = frame.agg(*sums, F.sum(F.col("good").cast("int"))).collect()
            ended = time.perf_counter()
            assert tuple(row)[:2] == (READ_ROWS, READ_ROWS * (READ_ROWS - 1) // 2)
            return READ_ROWS / (ended - loaded), READ_ROWS / (ended - began)

        def from_perco(read: str) -> Any:
            options = {"table": things.name, "partitions": str(TASKS), "read": read}
            return spark.read.format("perco").options(**options).load()

        sides: dict[str, Callable[[], tuple[float, float]]] = {
            FILES: partial(summed, partial(from_perco, "files")),
            SERVED: partial(summed, partial(from_perco, "pages")),
            ROWWISE: partial(summed, partial(from_perco, "rows")),
            PARQUET: partial(summed, lambda: spark.read.parquet(parquet)),
        }
        for side in sides.values():
            side(), side()  # warm
        found = interleaved(run.rounds, sides)
    cells = {side: Cell(tuple(query for query, _ in rates)) for side, rates in found.items()}
    whole = {side: Cell(tuple(both for _, both in rates)) for side, rates in found.items()}
    head = (f"{READ_ROWS} narrow rows, all columns summed up", "rows/s (least - most)", "of Parquet", "with its load")
    shares = {
        side: (f"{cells[side].of(cells[PARQUET]):.2f}", f"{whole[side].of(whole[PARQUET]):.2f}") for side in cells
    }
    run.table("reading back", head, [(side, cell, *shares[side]) for side, cell in cells.items()])
    report.figure("read_direct_rows_per_s", cells[FILES].median, at_least=READ_RATE)
    report.figures |= {f"read_rows_per_s_{side}": cell.median for side, cell in cells.items()}
    report.ratio("read_vs_parquet", cells[FILES].of(cells[PARQUET]), at_least=READ_SHARE)
    report.ratio("read_and_load_vs_parquet", whole[FILES].of(whole[PARQUET]), at_least=READ_SHARE)


def _parquet(spark: Any, folder: Path, rows: int) -> str:
    path = str(folder / f"rows-{rows}.parquet")
    types = "key string, count long, name string, score double, good boolean"
    spark.createDataFrame(spark.sparkContext.parallelize(made(rows), TASKS), types).write.parquet(path)
    return path


def with_spark(spark: Any, parquet: str, group: int, store: Any) -> Taken:
    import perco.spark
    from bench import spark_narrow

    options = perco.spark.LoadOptions(group=group)
    with measured() as taken:
        done = perco.spark.load(
            spark.read.parquet(parquet),
            store,
            spark_narrow.loader,
            key="key",
            beside=things,
            job="bench",
            options=options,
        )
    assert not done.skipped
    return taken


def in_chunks(spark: Any, parquet: str, store: Any) -> Taken:
    import perco.spark
    from bench import spark_narrow

    with measured() as taken:
        rows = spark.read.parquet(parquet).sortWithinPartitions("key")
        done = perco.spark.load(rows, store, spark_narrow.loader, chunks=True, job="bench")
    assert done.committed == ROWS
    return taken


def _fresh(folder: Path, spark: Any, load: Callable[[Any], Taken]) -> Taken:
    import perco.spark

    with perco.spark.serve(folder / f"store-{time.monotonic_ns()}", spark) as store:
        trio.run(declare, store)
        return load(store)


async def declare(store: Any) -> None:
    """Declare the table, with its column of marks, and the observer."""
    from perco.spark.ledger import LEDGER, taken_in

    taken_in(things)
    async with store.open(schema), store.open(perco.Schema(things, LEDGER)):
        pass


if __name__ == "__main__":
    perco.tune_gc()
    trio.run(alone, *json.loads(sys.argv[1]))
