"""Export to an outside system, so that it takes effect once (here a SQLite file; think of a warehouse, a mail service).

    python examples/export.py [FOLDER]

Kill it at any moment and start it again: in the end, the outside system agrees with the store.

An observer's writes to perco and its acknowledgement are committed together, but a delivery cannot be part of that
commit. If the process dies between the two, the observer runs again. So each delivery carries something by which the
outside system recognizes a duplicate:

- Newest wins (`prices`): a delivery carries the change's commit timestamp as a version; the outside system takes a row
  only if its version is newer. So a delivery by a dead process does no harm if it arrives after a later one.
- Each once (`receipts`): a delivery carries the row's key and the commit timestamp as an idempotency key; the outside
  system ignores a key that it has seen.

Guaranteed: the newest committed value of each cell reaches the outside system, provided that this system answers again
some day; a duplicate changes nothing; nothing arrives that was not committed. Not guaranteed: intermediate values
(several changes of a cell may collapse into the newest; so give each event a row of its own, as each order has here);
any particular order between rows (the outside system may show a later commit, but not yet an earlier one). And nothing
is guaranteed if the outside system forgets the keys that it has seen, or if the store is removed and made again,
because its timestamps then begin at 1 again.
"""

import argparse
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import trio

import perco

PRODUCTS, STEPS, AT_ONCE = 40, 320, 16

products = perco.Table("products", key=perco.TEXT)
price = products.column("price", perco.INT64)

orders = perco.Table("orders", key=perco.INT64)  # each row is written once
order = orders.column("order", perco.TEXT)


class Outside:
    """A system outside perco. A delivery is durable there before the system answers."""

    def __init__(self, path: Path) -> None:
        self.one = trio.CapacityLimiter(1)  # one delivery at a time
        path.parent.mkdir(parents=True, exist_ok=True)
        self.sqlite = sqlite3.connect(path, check_same_thread=False)
        self.sqlite.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
            "CREATE TABLE IF NOT EXISTS prices (product PRIMARY KEY, price, version);"
            "CREATE TABLE IF NOT EXISTS receipts (key PRIMARY KEY, text);"
        )

    def put_price(self, product: str, price: int | None, version: int) -> bool:
        """Store a price; returns whether it was new. A deleted price leaves a row, so no old delivery revives it."""
        return self.changed(
            "INSERT INTO prices VALUES (?1, ?2, ?3)"
            " ON CONFLICT DO UPDATE SET price = ?2, version = ?3 WHERE version < ?3",
            (product, price, version),
        )

    def send_receipt(self, key: str, text: str) -> bool:
        """Store a receipt; returns whether it was new."""
        return self.changed("INSERT INTO receipts VALUES (?, ?) ON CONFLICT DO NOTHING", (key, text))

    def changed(self, statement: str, values: tuple[object, ...]) -> bool:
        with self.sqlite:
            return self.sqlite.execute(statement, values).rowcount > 0


def schema_with(outside: Outside, told: Counter[bool]) -> perco.Schema:
    schema = perco.Schema(products, orders)

    async def deliver(function: Callable[..., bool], *arguments: object) -> None:
        told[await trio.to_thread.run_sync(function, *arguments, limiter=outside.one)] += 1

    @schema.observe(price, id="export price")
    async def export_price(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        await deliver(outside.put_price, change.key, change.value, change.commit_ts)

    @schema.observe(order, id="send receipt")
    async def send_receipt(txn: perco.Transaction, change: perco.Change[int, str]) -> None:
        if change.value is not None:
            await deliver(outside.send_receipt, f"{change.key}@{change.commit_ts}", f"you ordered {change.value}")

    return schema


async def buy_or_mark(txn: perco.Transaction, product: str) -> None:
    """A customer buys a product that has a price, or a clerk changes the price, or a clerk deletes it."""
    if await txn.get(price, product) is not None and random.random() < 0.3:
        txn.set(order, random.getrandbits(60), product)
    elif random.random() < 0.9:
        txn.set(price, product, random.randrange(100))
    else:
        txn.delete(price, product)


async def main(folder: Path) -> None:
    told: Counter[bool] = Counter()
    outside = Outside(folder / "outside.sqlite")
    for_ever = perco.WorkerOptions(attempts=0)  # the system may be away for long; the default is 16 attempts
    async with perco.open(folder / "store", schema_with(outside, told)) as db, db.worker(options=for_ever):

        async def trade() -> None:
            for _ in range(STEPS // AT_ONCE):
                await db.run(buy_or_mark, f"product {random.randrange(PRODUCTS)}")

        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(trade)
        await db.wait_idle()
        print(
            f"{told.total()} deliveries: {told[True]} were new to the other system, which ignored {told[False]} repeats"
        )
        async with db.snapshot() as snap:
            prices = {row.key: row[price] async for row in snap.scan(products)}
            ordered = [f"{row.key}@{row.commit_ts(order)}" async for row in snap.scan(orders)]
    shown = dict(outside.sqlite.execute("SELECT product, price FROM prices WHERE price IS NOT NULL"))
    sent = [key for (key,) in outside.sqlite.execute("SELECT key FROM receipts")]
    outside.sqlite.close()
    print(f"{len(prices)} prices in the store, {len(prices.items() ^ shown.items())} differ outside")
    print(f"{len(ordered)} orders in the store, {len(set(ordered) ^ set(sent))} receipts missing or extra")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("example-export"), metavar="FOLDER")
    try:
        trio.run(main, parser.parse_args().folder)
    except* KeyboardInterrupt:
        print("stopped; start it again to continue")
