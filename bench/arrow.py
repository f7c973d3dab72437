"""How fast rows become Arrow columns: `scan.to_arrow()`, beside rows by hand, SQLite and Parquet.

A table has a million rows (--quick: 200 000) with a text key and three small columns: two numbers and a short text.
They were written in transactions of 100 rows in no order, as observers would write them, so the pages of the files are
in no order either. Each side reads all rows into a `pyarrow.Table`, whose sum is checked:

    perco, embedded      the owner of the folder, from a thread
    perco, a client      over a Unix socket; it runs in the owner's process, too
    by hand              `async for row in scan`, and lists of values
    SQLite               `fetchmany` and lists of values: the same rows, in the order of the key
    Parquet              `pyarrow.parquet.read_table`, for comparison with a column store
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import trio

import perco
import perco.sync
from bench.harness import Report, Run, alternate

ROWS, QUICK_ROWS = 1_000_000, 200_000
GROUP = 100  # rows in a transaction
IN_FLIGHT = 16
LEAST = 400_000
EMBEDDED, CLIENT, BY_HAND, SQLITE, PARQUET = "perco, embedded", "perco, a client", "by hand", "SQLite", "Parquet"

things = perco.Table("things", key=perco.TEXT)
count = things.column("count", perco.INT64)
score = things.column("score", perco.FLOAT64)
name = things.column("name", perco.TEXT)
COLUMNS: list[perco.Column[str, Any]] = [count, score, name]
SCHEMA = perco.Schema(things)

Row = tuple[str, int, float, str]


def made(rows: int) -> list[Row]:
    """All rows, in no order."""
    numbers = list(range(rows))
    random.Random(7).shuffle(numbers)
    return [(f"thing-{n:08}", n, n / 7, f"name {n % 977}") for n in numbers]


def main(run: Run) -> None:
    """Prints the table and the RESULT line."""
    report = Report("arrow", "power")
    facts = run.machine("power (fsync before every answer)", {"pyarrow": pa.__version__})
    rows = made(QUICK_ROWS if run.quick else ROWS)
    with run.scratch() as folder:
        trio.run(_load, folder / "store", rows)
        _sqlite(folder / "rows.sqlite", rows)
        _parquet(folder / "rows.parquet", rows)
        wanted = sum(row[1] for row in rows)

        def timed(read: Callable[[], pa.Table]) -> float:
            began = time.perf_counter()
            table = read()
            rate: float = len(rows) / (time.perf_counter() - began)
            assert (table.num_rows, sum(table["count"].to_pylist())) == (len(rows), wanted)
            return rate

        with (
            perco.sync.open(folder / "store", SCHEMA) as db,
            db.snapshot() as snap,
            perco.sync.open(f"unix:{folder}/store/socket", SCHEMA) as client,
            client.snapshot() as there,
        ):
            sides: dict[str, Callable[[], float]] = {
                EMBEDDED: partial(timed, partial(_by_perco, snap)),
                CLIENT: partial(timed, partial(_by_perco, there)),
                BY_HAND: partial(timed, partial(_by_hand, snap)),
                SQLITE: partial(timed, partial(_by_sqlite, folder / "rows.sqlite")),
                PARQUET: partial(timed, partial(parquet.read_table, folder / "rows.parquet")),
            }
            sides[EMBEDDED](), sides[CLIENT](), sides[PARQUET]()  # warm
            cells = alternate(run.rounds, sides)
    lines = [(side, cell, f"{cell.of(cells[EMBEDDED]):.2f}") for side, cell in cells.items()]
    head = (f"{len(rows):,} rows of a key and three columns, as an Arrow table", "rows/s (least - most)", "of perco's")
    run.table("reading as Arrow", head, lines)
    report.figure("rows_per_s", cells[EMBEDDED].median, at_least=LEAST)
    report.figures |= {f"rows_per_s_{side}": cell.median for side, cell in cells.items()}
    report.ratio("arrow_vs_by_hand", cells[EMBEDDED].of(cells[BY_HAND]))
    report.ratio("arrow_vs_sqlite", cells[EMBEDDED].of(cells[SQLITE]))
    report.ratio("arrow_vs_parquet", cells[EMBEDDED].of(cells[PARQUET]))
    run.finish(report, facts)


# ------------------------------------------------------------------ the same rows, everywhere


async def _load(path: Path, rows: list[Row]) -> None:
    async with perco.open(path, SCHEMA, options=perco.Options(durability="process")) as db:
        groups: Iterator[list[Row]] = (rows[low : low + GROUP] for low in range(0, len(rows), GROUP))

        async def write(txn: perco.Transaction, some: list[Row]) -> None:
            for key, *values in some:
                for column, value in zip(COLUMNS, values, strict=True):
                    txn.set(column, key, value)

        async def work() -> None:
            for some in groups:
                await db.run(write, some)

        async with trio.open_nursery() as nursery:
            for _ in range(IN_FLIGHT):
                nursery.start_soon(work)


def _sqlite(path: Path, rows: list[Row]) -> None:
    with sqlite3.connect(path) as connection:
        columns = "key text primary key, count integer, score real, name text"
        connection.execute(f"create table things ({columns}) without rowid")
        connection.executemany("insert into things values (?, ?, ?, ?)", rows)


def _parquet(path: Path, rows: list[Row]) -> None:
    names = ["key", *(column.name for column in COLUMNS)]
    parquet.write_table(pa.table(dict(zip(names, zip(*sorted(rows), strict=True), strict=True))), path)


def _by_perco(snap: perco.sync.Snapshot) -> pa.Table:
    return snap.scan(things, columns=COLUMNS).to_arrow().read_all()


def _by_hand(snap: perco.sync.Snapshot) -> pa.Table:
    keys: list[str] = []
    values: list[list[Any]] = [[] for _ in COLUMNS]
    for row in snap.scan(things, columns=COLUMNS):
        keys.append(row.key)
        for column, into in zip(COLUMNS, values, strict=True):
            into.append(row[column])
    return pa.table({"key": keys} | {c.name: each for c, each in zip(COLUMNS, values, strict=True)})


def _by_sqlite(path: Path) -> pa.Table:
    with sqlite3.connect(path) as connection:
        cursor = connection.execute("select key, count, score, name from things order by key")
        batches = []
        while some := cursor.fetchmany(20_000):
            columns = [pa.array(column) for column in zip(*some, strict=True)]
            batches.append(pa.record_batch(columns, names=["key", "count", "score", "name"]))
    return pa.Table.from_batches(batches)
