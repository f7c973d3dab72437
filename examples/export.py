"""Export to a system outside (here a SQLite file; think of a warehouse, a mail service) so that it takes effect once.

    python examples/export.py [FOLDER]

Kill it whenever you like and start it again: in the end the outside is equal to the store.

An observer's writes to perco and the note that it has run are committed together; what it does outside cannot be. It
may die between the two, and then it runs again. So each delivery carries what lets the outside tell a repetition:

- Newest wins (`prices`): the change's commit timestamp as a version; the outside takes a row only if it is newer. That
  also stops a delivery of a process that died, should it arrive after a later one.
- Each once (`receipts`): row and commit timestamp as an idempotency key; the outside ignores a key that it has seen.

Promised: what was committed reaches the outside, if only it answers again some day; a repetition changes nothing;
nothing arrives that was not committed. Not promised: every value on the way (changes of one cell may collapse into the
newest: give each event a row of its own, as orders have here); any order between rows, so the outside may show a later
commit and not yet an earlier one; anything, if the outside forgets the keys that it has seen, or if the store is
removed and made again, and so counts its timestamps from 1 again.
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

orders = perco.Table("orders", key=perco.INT64)  # written once each
order = orders.column("order", perco.TEXT)


class Outside:
    """Somebody else's system. It knows nothing of perco; each delivery is durable there before it answers."""

    def __init__(self, path: Path) -> None:
        self.one = trio.CapacityLimiter(1)  # at a time
        path.parent.mkdir(parents=True, exist_ok=True)
        self.sqlite = sqlite3.connect(path, check_same_thread=False)
        self.sqlite.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
            "CREATE TABLE IF NOT EXISTS prices (product PRIMARY KEY, price, version);"
            "CREATE TABLE IF NOT EXISTS receipts (key PRIMARY KEY, text);"
        )

    def put_price(self, product: str, price: int | None, version: int) -> bool:
        """Whether it was news. What was deleted stays as a row without a price, or an old delivery would revive it."""
        return self.changed(
            "INSERT INTO prices VALUES (?1, ?2, ?3)"
            " ON CONFLICT DO UPDATE SET price = ?2, version = ?3 WHERE version < ?3",
            (product, price, version),
        )

    def send_receipt(self, key: str, text: str) -> bool:
        """Whether it was news."""
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
    """A customer buys what has a price; a clerk changes it, or takes it from the list."""
    if await txn.get(price, product) is not None and random.random() < 0.3:
        txn.set(order, random.getrandbits(60), product)
    elif random.random() < 0.9:
        txn.set(price, product, random.randrange(100))
    else:
        txn.delete(price, product)


async def main(folder: Path) -> None:
    told: Counter[bool] = Counter()
    outside = Outside(folder / "outside.sqlite")
    for_ever = perco.WorkerOptions(attempts=0)  # the outside may be away for long; by default 16 failures are enough
    async with perco.open(folder / "store", schema_with(outside, told)) as db, db.worker(options=for_ever):

        async def trade() -> None:
            for _ in range(STEPS // AT_ONCE):
                await db.run(buy_or_mark, f"product {random.randrange(PRODUCTS)}")

        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(trade)
        await db.wait_idle()
        print(
            f"{told.total()} deliveries: {told[True]} were news outside, {told[False]} repetitions were ignored there"
        )
        async with db.snapshot() as snap:
            prices = {row.key: row[price] async for row in snap.scan(products)}
            ordered = [f"{row.key}@{row.commit_ts(order)}" async for row in snap.scan(orders)]
    shown = dict(outside.sqlite.execute("SELECT product, price FROM prices WHERE price IS NOT NULL"))
    sent = [key for (key,) in outside.sqlite.execute("SELECT key FROM receipts")]
    outside.sqlite.close()
    print(f"{len(prices)} prices in the store, {len(prices.items() ^ shown.items())} differ outside")
    print(f"{len(ordered)} orders in the store, {len(set(ordered) ^ set(sent))} receipts too many or too few")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("example-export"), metavar="FOLDER")
    try:
        trio.run(main, parser.parse_args().folder)
    except* KeyboardInterrupt:
        print("stopped; start it again and it goes on")
