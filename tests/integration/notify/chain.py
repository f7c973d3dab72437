"""A small chain of observers over tablets and tables, and a program that runs it until it is killed.

body -> size (in another tablet) -> sum; every run is counted in the store, in the run's own transaction.

    python -m tests.integration.notify.chain FOLDER EVENT BATCH

The program loads and observes without end, writes a line for each of the store's events, and at EVENT it stands still
for the parent to kill it.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import trio

import perco

docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
body = docs.column("body", perco.BYTES)
size = docs.column("size", perco.INT64)
counts = perco.Table("counts", key=perco.TEXT)
count = counts.column("count", perco.INT64)

OPTIONS = perco.Options(seed=4711)


async def add(txn: perco.Transaction, key: str, by: int) -> None:
    txn.set(count, key, (await txn.get(count, key) or 0) + by)


async def measure(txn: perco.Transaction, change: perco.Change[str, bytes]) -> None:
    assert change.value is not None
    await add(txn, f"measured/{change.key}", 1)
    txn.set(size, "z" + change.key, len(change.value))


async def total(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    assert change.value is not None
    await add(txn, f"summed/{change.key}", 1)
    await add(txn, "sum", change.value)


def declared(batch: int = 1) -> perco.Schema:
    """The schema. `batch`: how many runs of an observer may share a transaction (N20)."""
    made = perco.Schema(docs, counts)
    made.observe(body, id="measure", batch=batch)(measure)
    made.observe(size, id="sum", batch=batch)(total)
    return made


schema = declared()


async def load(db: perco.Database, number: int) -> None:
    """Three documents in three tablets, one of them long; a number is loaded once."""
    async with db.transaction() as txn:
        txn.set(body, f"a{number:05}", b"short")
        txn.set(body, f"i{number:05}", b"long" * 200)
        txn.set(body, f"q{number:05}", b"")


async def loaded(db: perco.Database) -> dict[str, int]:
    """The length of each document."""
    async with db.snapshot() as snap:
        return {row.key: len(row[body] or b"") async for row in snap.scan(docs, columns=[body])}


async def check_all_handled_once(db: perco.Database) -> int:
    """Every document was measured once and summed once; returns how many there are."""
    lengths = await loaded(db)
    assert len(lengths) % 3 == 0, "all three of a transaction or none"
    async with db.snapshot() as snap:
        counted = {row.key: row[count] async for row in snap.scan(counts)}
    expected = {f"measured/{key}": 1 for key in lengths} | {f"summed/z{key}": 1 for key in lengths}
    if lengths:
        expected["sum"] = sum(lengths.values())
    assert counted == expected
    return len(lengths)


async def run_until(folder: Path, event: int, batch: int) -> None:
    numbers = itertools.count(1)

    def on_event(name: str) -> None:
        os.write(1, name.encode() + b"\n")
        if next(numbers) == event:
            os.read(0, 1)  # for ever, on the loop's thread

    async with perco.open(folder, declared(batch), options=perco.Options(on_event=on_event)) as db:
        first = len(await loaded(db)) // 3
        async with db.worker(concurrency=8, scanners=2):
            for number in itertools.count(first):
                await load(db, number)


def main(*args: Any) -> None:
    folder, event, batch = args
    trio.run(run_until, Path(folder), int(event), int(batch))


if __name__ == "__main__":
    main(*sys.argv[1:])
