"""A feature table: totals for each user and each item, updated with every purchase, and readable as of any moment.

    python examples/features.py [FOLDER] [--day SECONDS]

Kill it at any moment and start it again: it continues with the day that was not closed. Each start sells for three
days.

What to look at:

- `fold` adds a purchase to the features of its user and of its item. The same transaction acknowledges the run, so each
  purchase counts once, whatever dies. If two purchases of a user conflict, `fold` runs again for one of them.
- A purchase may be corrected or taken back: `folded` holds what the features contain of it, so `fold` adds the
  difference.
- `db.snapshot(at=...)` reads all features as they were at that time. To train a model, read the features that it would
  have been given then: no later purchase or correction leaks in. `perco.Keep` says how long the past can be read.
- `at=` is only as exact as the notes of the clock: a second by default, here a tenth of a second. `ts=`, with the
  timestamp of a commit or a snapshot, is exact.
"""

import argparse
import random
import time
from datetime import UTC, datetime
from pathlib import Path

import trio

import perco

USERS, ITEMS, PER_DAY, DAYS, SELLERS = 30, 10, 150, 3, 8
Features = dict[tuple[str, int], tuple[int, int]]  # how many, for how much

purchases = perco.Table("purchases", key=perco.INT64)
bought = purchases.column("bought", perco.JSON)  # [user, item, cents]
folded = purchases.column("folded", perco.JSON)  # the same, as contained in the features

features = perco.Table("features", key=perco.Tuple(perco.TEXT, perco.INT64))  # ("user" or "item", number)
count = features.column("count", perco.INT64)
spent = features.column("spent", perco.INT64)

days = perco.Table("days", key=perco.INT64)
closed = days.column("closed", perco.FLOAT64)  # when, in seconds since 1970

schema = perco.Schema(purchases, features, days, keep=perco.Keep(seconds=7 * 86400))


@schema.observe(bought, id="fold")
async def fold(txn: perco.Transaction, change: perco.Change[int, list[int]]) -> None:
    before, now = await txn.get(folded, change.key), change.value
    for purchase, sign in (before, -1), (now, 1):
        if purchase is not None:
            user, item, cents = purchase
            for key in ("user", user), ("item", item):
                row = await txn.row(features, key)
                txn.set(count, key, row.get(count, 0) + sign)
                txn.set(spent, key, row.get(spent, 0) + sign * cents)
    if now is None:
        txn.delete(folded, change.key)
    else:
        txn.set(folded, change.key, now)


async def sell(txn: perco.Transaction, number: int) -> None:
    rng = random.Random(number)
    txn.set(bought, number, [rng.randrange(USERS), rng.randrange(ITEMS), rng.randrange(100, 10_000)])


async def correct(txn: perco.Transaction, number: int) -> None:
    user, item, cents = await txn.get(bought, number) or (0, 0, 0)
    if cents % 2:
        txn.delete(bought, number)  # sent back
    else:
        txn.set(bought, number, [user, item, cents // 2])  # a rebate


async def sell_for_a_day(db: perco.Database, day: int) -> None:
    """Sell for a day. Doing it again has the same result: `fold` adds only the difference from what it added before."""
    numbers = iter(range(day * PER_DAY, (day + 1) * PER_DAY))

    async def seller() -> None:
        for number in numbers:  # all sellers take from the same pile
            await db.run(sell, number)
            if number % 10 == 0:
                await db.run(correct, number)

    async with trio.open_nursery() as nursery:
        for _ in range(SELLERS):
            nursery.start_soon(seller)
    await db.wait_idle()  # the features are complete


async def read(snap: perco.Snapshot) -> Features:
    rows = {row.key: (row.get(count, 0), row.get(spent, 0)) async for row in snap.scan(features)}
    return {key: row for key, row in rows.items() if row[0]}


async def batch(snap: perco.Snapshot) -> Features:
    """The features, computed from scratch."""
    out: Features = {}
    async for row in snap.scan(purchases, columns=[bought]):
        user, item, cents = row.get(bought, [])
        for key in ("user", user), ("item", item):
            known = out.get(key, (0, 0))
            out[key] = known[0] + 1, known[1] + cents
    return out


async def main(folder: Path, seconds: float) -> None:
    options = perco.Options(oracle=perco.options.OracleOptions(note_period_s=0.1))
    async with perco.open(folder, schema, options=options) as db, db.worker(concurrency=SELLERS) as worker:
        async with db.snapshot() as snap:
            first = len(await snap.scan(days).all())
        for day in range(first, first + DAYS):
            await sell_for_a_day(db, day)
            await trio.sleep(max(0.0, seconds))  # the night
            async with db.transaction() as txn:
                txn.set(closed, day, time.time())
        async with db.snapshot() as snap:
            last = (await snap.scan(days, reverse=True, limit=DAYS).all())[::-1]
            now, again = await read(snap), await batch(snap)
        then, times = [], []
        for row in last:
            times.append(datetime.fromtimestamp(row.get(closed, 0.0), UTC))
            async with db.snapshot(at=times[-1]) as past:
                then.append(await read(past))
        print("purchases, cents ", *(f"{f'at {when:%X}':>18}" for when in times))
        for key in sorted(now, key=now.__getitem__, reverse=True)[:8]:
            print(f"{key[0]:4} {key[1]:10}  ", *("{:8},{:9}".format(*known.get(key, (0, 0))) for known in then))
        wrong, retries = now.items() ^ again.items(), worker.statistics()["fold"].conflicts
        print(f"{len(now)} rows of features, {len(wrong)} differ from a batch over all purchases; {retries} reruns")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("example-features"), metavar="FOLDER")
    parser.add_argument("--day", type=float, default=0.5, metavar="SECONDS", help="pause after each day: %(default)s")
    arguments = parser.parse_args()
    try:
        trio.run(main, arguments.folder, arguments.day)
    except* KeyboardInterrupt:
        print("stopped; start it again to continue")
