"""`python -m tests.compatibility.make`: makes a store with what stores may have, for later versions to open.

It is run once for a release, and its file is kept: `store-VERSION.tar.xz`.
"""

from __future__ import annotations

import tarfile
import tempfile
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import trio

import perco
from perco import views

HERE: Final = Path(__file__).parent

docs = perco.Table("docs", key=perco.TEXT, splits=["m"], changes=True)
body = docs.column("body", perco.TEXT)
image = docs.column("image", perco.BYTES, group="images")
size = docs.column("size", perco.INT64)
rank = docs.column("rank", perco.FLOAT64)
tags = docs.column("tags", perco.JSON)
seen = docs.column("seen", perco.BOOL)
grown = docs.signal("grown")
orders = perco.Table("orders", key=perco.Tuple(perco.DATE, perco.INT64))
at = orders.column("at", perco.TIMESTAMP)
price = orders.column("price", perco.DECIMAL(12, 2))
more = orders.column("more", perco.MSGPACK)
lengths = perco.Table("lengths", key=perco.INT64)
total = lengths.column("total", perco.INT64)
schema = perco.Schema(docs, orders, lengths)
declared = views.Views(schema)


@schema.observe(body, id="measure", version=3, delay_s=0.001)
async def measure(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
    if change.value == "bad":
        raise ValueError("as it should")
    txn.set(size, change.key, len(change.value or ""))


@schema.observe(grown, id="hear")
async def hear(txn: perco.Transaction, change: perco.Change[str, None]) -> None:
    txn.set(seen, change.key, True)


@declared.group(size, id="by length", by=lambda row: row[size], key=perco.INT64, into=[total], keep=[views.count()])
def by_length(length: int, rows: Any) -> Any:
    yield views.Put(lengths, length, {total: rows.count()})


async def fill(db: perco.Database) -> None:
    for i in range(40):
        async with db.transaction() as txn:
            key = f"{'az'[i % 2]}{i:02}"
            txn.set(body, key, "text" * (i % 5))
            txn.set(image, key, bytes([i]) * 700)
            txn.set(rank, key, i / 8)
            txn.set(tags, key, {"number": i, "none": None})
            order = date(2026, 1, 1 + i % 28), i
            txn.set(at, order, datetime(2026, 1, 1, 12, i % 60, tzinfo=UTC))
            txn.set(price, order, Decimal(i) / 4)
            txn.set(more, order, {1: [b"\xff", None]})
    async with db.transaction() as txn:
        txn.set(body, "bad", "bad")
        txn.delete(body, "a00")
    async with db.worker(options=perco.WorkerOptions(attempts=1)):
        await db.wait_idle(timeout=60)
    async with db.transaction() as txn:  # these wait for their observers
        txn.set(body, "waits", "later")
        txn.signal(grown, "waits")


async def make(file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        async with perco.open(store, schema) as db:
            await fill(db)
            await db.split(docs, "z20")
            await db.pause("hear")
        with tarfile.open(file, "w:xz") as tar:
            tar.add(store, "store")


if __name__ == "__main__":
    trio.run(make, HERE / f"store-{perco.__version__}.tar.xz")
