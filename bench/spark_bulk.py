"""Filling a whole table at once through Spark (`perco.spark.bulk_load`), and its cost without Spark (`db.bulk_load`).

The rows are the narrow ones (`bench/spark_narrow.py`), from Parquet, in no order; each also has a notification. All of
`bulk_load` is timed: Spark's sort, the files with their fsync, and the publication; and then the time until a query
has read the first row. Without Spark, one process has its rows in memory, sorted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

import perco
from bench.harness import Report, Run, alternate
from bench.spark_narrow import TASKS, count, good, made, name, schema, score, things

ROWS, QUICK_ROWS = 1_000_000, 300_000
RATE: Final = 200_000
SPARK, ALONE = "Spark, bulk_load", "one process, db.bulk_load"


def main(run: Run, report: Report) -> None:
    """Prints its table, and adds to the report."""
    from bench.spark_load import session

    rows = QUICK_ROWS if run.quick else ROWS
    with session(f"local[{TASKS}]") as spark, run.scratch() as folder:
        parquet = str(folder / "rows.parquet")
        types = "key string, count long, name string, score double, good boolean"
        spark.createDataFrame(spark.sparkContext.parallelize(made(rows), 2 * TASKS), types).write.parquet(parquet)
        pauses: list[float] = []
        in_order = sorted(made(rows))
        sides = {
            SPARK: partial(with_spark, spark, parquet, folder / "spark", rows, pauses),
            ALONE: partial(trio.run, alone, folder / "alone", in_order),
        }
        for side in sides.values():
            side()  # warm
        cells = alternate(run.rounds, sides)
    head = (f"{rows} narrow rows, published and readable", "rows/s (least - most)")
    run.table("filling a table at once", head, list(cells.items()))
    run.say(f"writes to the table waited for at most {1000 * max(pauses):.0f} ms")
    report.figure("bulk_rows_per_s", cells[SPARK].median, at_least=RATE)
    report.figures["bulk_rows_per_s_without_spark"] = cells[ALONE].median
    report.figures["bulk_paused_ms"] = 1000 * max(pauses)


def with_spark(spark: Any, parquet: str, folder: Path, rows: int, pauses: list[float]) -> float:
    """Rows a second."""
    import perco.spark
    from perco.spark.store import Store

    shutil.rmtree(folder, ignore_errors=True)
    with perco.spark.serve(folder, spark) as store:
        frame = spark.read.parquet(parquet)
        began = time.perf_counter()
        done = perco.spark.bulk_load({things: frame}, store, schema=schema)
        seconds = time.perf_counter() - began

        async def look(store: Store) -> int:
            async with store.joining() as db, db.snapshot() as snap:
                table = db.schema.tables[things.name]
                first = await snap.scan(table, limit=1).all()
                assert first[0].key == "thing-00000000"
                return await snap.get(table.columns["count"], f"thing-{rows - 1:08}") or 0

        assert done.rows == {things.name: rows}
        assert trio.run(look, store) == rows - 1
        pauses.append(done.paused_s)
        return rows / seconds


async def alone(folder: Path, rows: list[tuple[Any, ...]]) -> float:
    """Rows a second."""
    shutil.rmtree(folder, ignore_errors=True)

    def cells() -> Iterator[Any]:
        for key, *values in rows:
            yield key, dict(zip((count, name, score, good), values, strict=True))

    async with perco.open(folder, schema) as db:
        began = time.perf_counter()
        await db.bulk_load({things: cells()})
        async with db.snapshot() as snap:
            assert await snap.get(count, rows[-1][0]) == len(rows) - 1
        return len(rows) / (time.perf_counter() - began)
