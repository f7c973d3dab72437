"""A data pipeline on Spark: Parquet in, observers, and a snapshot out, which is joined with other data and plotted.

    python examples/spark_pipeline.py [FOLDER] [--day N] [--draw FILE]    # pip install '.[spark]'; Java 17; matplotlib

Orders arrive as Parquet files, one for each day. Each order is loaded in a transaction of its own, exactly once, even
if tasks die. An observer keeps a running total for each customer; it runs only for orders that change. Then a snapshot
is read back as a data frame, joined with the customers' countries, and plotted.

Kill it at any moment and start it again: no order is loaded twice, and the totals stay right. With `--day 1`, only the
orders of that day are loaded and processed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import perco

DAYS, ORDERS, CUSTOMERS = 3, 2_000, 200

orders = perco.Table("orders", key=perco.Tuple(perco.INT64, perco.INT64))  # (day, number)
customer = orders.column("customer", perco.TEXT)
cents = orders.column("cents", perco.INT64)
counted = orders.column("counted", perco.MSGPACK)  # (customer, cents), as contained in the totals
totals = perco.Table("totals", key=perco.TEXT)  # by customer
spent = totals.column("spent", perco.INT64)
count = totals.column("count", perco.INT64)
schema = perco.Schema(orders, totals)


@schema.observe(cents, id="total")
async def total(txn: perco.Transaction, change: perco.Change[tuple[int, int], int]) -> None:
    """Subtract what this order was counted as, and add what it is now: so corrections and deletions count too."""
    before = await txn.get(counted, change.key)
    now = (await txn.get(customer, change.key) or "", change.value) if change.value is not None else None
    entry: tuple[str, int] | None
    for entry, sign in ((before, -1), (now, 1)):
        if entry is not None:
            whose, amount = entry
            txn.set(spent, whose, (await txn.get(spent, whose) or 0) + sign * amount)
            txn.set(count, whose, (await txn.get(count, whose) or 0) + sign)
    if now is None:
        txn.delete(counted, change.key)
    else:
        txn.set(counted, change.key, now)


async def load_order(txn: perco.Transaction, row: Any) -> None:
    """The loader: runs in the executors, for every row."""
    key = (row.day, row.number)
    txn.set(customer, key, row.customer)
    txn.set(cents, key, row.cents)


def key_of(row: Any) -> tuple[int, int]:
    """The key of the row into which an order is loaded."""
    return row.day, row.number


def made(day: int) -> list[tuple[int, int, str, int]]:
    """The orders of a day, the same every time."""
    return [(day, n, f"c{n * n * (day + 1) % CUSTOMERS:03}", 100 + (n * 37 + day) % 9_000) for n in range(ORDERS)]


def main(folder: Path, days: list[int], draw: Path | None) -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # executors run this Python
    # ... and find this file; install your own program on the executors, or send it with spark.addArtifacts
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    from pyspark.sql import SparkSession, functions as F

    import perco.spark
    from examples import spark_pipeline as app

    spark = SparkSession.builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    with perco.spark.serve(folder / "store", spark) as store:
        for day in days:
            file = str(folder / f"orders-{day}.parquet")
            frame = spark.createDataFrame(made(day), "day long, number long, customer string, cents long")
            frame.write.mode("overwrite").parquet(file)
            rows = spark.read.parquet(file)
            options: dict[str, Any] = {"schema": app.schema, "key": key_of, "beside": app.orders, "job": f"day {day}"}
            print(perco.spark.load(rows, store, app.load_order, **options))
        print(perco.spark.drain(spark, store, "examples.spark_pipeline:schema"))

        perco.spark.register(spark, store)
        frame = spark.read.format("perco").option("table", "totals").load()
        countries = [(f"c{n:03}", "abc"[n % 3]) for n in range(CUSTOMERS)]
        joined = frame.join(spark.createDataFrame(countries, "key string, country string"), "key")
        by_country = joined.groupBy("country").agg(F.sum("spent").alias("spent"), F.sum("count").alias("orders"))
        found = sorted(by_country.collect())
        for row in found:
            print(f"country {row.country}: {row.orders} orders, {row.spent / 100:.2f}")
    spark.stop()
    if draw is not None:
        plot(found, draw)


def plot(found: list[Any], to: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.bar([row.country for row in found], [row.spent / 100 for row in found], color="tab:blue")
    axes.set(xlabel="country", ylabel="spent", title="Totals by country, kept by observers")
    figure.savefig(to)
    print(f"chart: {to}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("example-spark"), help="made if it does not exist")
    parser.add_argument("--day", type=int, action="append", help="load this day's orders (default: the first)")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw a bar chart; needs matplotlib")
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(given.folder.absolute(), given.day or [0], given.draw)
