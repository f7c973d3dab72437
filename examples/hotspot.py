"""A hot cell: if one observer writes it, its runs conflict; if two share the work through a signal, no runs conflict.

    python examples/hotspot.py [FOLDER] [--documents N]

Kill it at any moment and start it again: each document counts once. Each start adds N documents.

Each document belongs to a cluster, half of them to the same one. The observers keep the number of documents of each
cluster. What to look at:

- `count_at_once` does this in one observer. All its runs for a cluster write the same cell. Of the runs in flight at
  the same time, only one commits; the others have looked at their documents in vain, and run again.
- `look` and `gather` do the same in two observers. No two runs of `look` write the same cell: each puts its document
  into a row of its own, and raises a *signal* at the cluster. A signal has no value and cannot be written, so raising
  it never conflicts. `gather` runs for the signal: it takes the documents that are new by then, and writes the hot
  cell. One run may serve a thousand signals.
- After a signal has been raised, its observer runs at least once. So `gather` sometimes finds no new document, and that
  must do no harm. The rows, not the signal, tell it which documents are new.
"""

import argparse
import math
import random
import time
from collections import Counter
from pathlib import Path

import trio

import perco

CLUSTERS, LOADERS, RUNS = 4, 32, 32

documents = perco.Table("documents", key=perco.INT64)
one = documents.column("one", perco.TEXT)  # the cluster of a document, for `count_at_once`
two = documents.column("two", perco.TEXT)  # ... for `look`
counted = documents.column("counted", perco.BOOL)  # whether `count_at_once` has counted it
looked = documents.column("looked", perco.BOOL)

clusters = perco.Table("clusters", key=perco.TEXT)
size_one = clusters.column("size-one", perco.INT64)
size_two = clusters.column("size-two", perco.INT64)
grown = clusters.signal("grown")

news = perco.Table("news", key=perco.Tuple(perco.TEXT, perco.INT64))  # (cluster, document): not gathered yet
added = news.column("added", perco.INT64)

schema = perco.Schema(documents, clusters, news)


async def work() -> None:
    """The time that it takes to look at a document."""
    await trio.sleep(0.002)


@schema.observe(one, id="count at once")
async def count_at_once(txn: perco.Transaction, change: perco.Change[int, str]) -> None:
    if change.value is None or await txn.get(counted, change.key):
        return
    await work()
    txn.set(counted, change.key, True)
    txn.set(size_one, change.value, (await txn.get(size_one, change.value) or 0) + 1)


@schema.observe(two, id="look")
async def look(txn: perco.Transaction, change: perco.Change[int, str]) -> None:
    if change.value is None or await txn.get(looked, change.key):
        return
    await work()
    txn.set(looked, change.key, True)
    txn.set(added, (change.value, change.key), 1)
    txn.signal(grown, change.value)


@schema.observe(grown, id="gather")
async def gather(txn: perco.Transaction, change: perco.Change[str, None]) -> None:
    size = await txn.get(size_two, change.key) or 0
    async for row in txn.scan(news, prefix=(change.key,), limit=1000):
        size += row[added] or 0
        txn.delete(added, row.key)
    if await txn.scan(news, prefix=(change.key,), limit=1).all():
        txn.signal(grown, change.key)  # the rest is left for another run
    txn.set(size_two, change.key, size)


def cluster_of(number: int) -> str:
    """Half of the documents belong to the first cluster, half of the others to the second, and so on."""
    return f"c{min(int(-math.log2(1 - random.Random(number).random())), CLUSTERS - 1)}"


async def load(db: perco.Database, column: perco.Column[int, str], numbers: range) -> None:
    left = iter(numbers)

    async def loader() -> None:
        for number in left:  # all loaders take from the same pile
            async with db.transaction() as txn:
                txn.set(column, number, cluster_of(number))

    async with trio.open_nursery() as nursery:
        for _ in range(LOADERS):
            nursery.start_soon(loader)
    await db.wait_idle()


async def wrong(snap: perco.Snapshot) -> int:
    """How many differences there are between the stored sizes and a count of the documents."""
    differ = 0
    for column, size in (one, size_one), (two, size_two):
        right: Counter[str] = Counter()
        async for row in snap.scan(documents, columns=[column]):
            right[row.get(column, "")] += 1
        kept = {row.key: row.get(size, 0) async for row in snap.scan(clusters, columns=[size])}
        differ += len(kept.items() ^ right.items())
    return differ


async def main(folder: Path, count: int) -> None:
    async with perco.open(folder, schema) as db:
        async with db.snapshot() as snap:
            before = [row.key async for row in snap.scan(documents, reverse=True, limit=1)]
        first = before[0] + 1 if before else 0
        for column, name in (one, "one observer"), (two, "two, by a signal"):
            async with db.worker(concurrency=RUNS) as worker:
                await db.wait_idle()  # for the changes left by an earlier run of this program that was killed
                done = worker.statistics()
                began = time.perf_counter()
                await load(db, column, range(first, first + count))
                took = time.perf_counter() - began
                now = worker.statistics()
            runs = sum(now[id].runs - done[id].runs for id in now)
            again = sum(now[id].conflicts - done[id].conflicts for id in now)
            print(f"{name:18} {count} documents in {took:6.2f} s, {runs} runs, {again} of them conflicts")
        async with db.snapshot() as snap:
            print(f"{await wrong(snap)} cluster sizes are wrong")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("example-hotspot"), metavar="FOLDER")
    parser.add_argument("--documents", type=int, default=500, metavar="N", help="how many to add: %(default)s")
    arguments = parser.parse_args()
    try:
        trio.run(main, arguments.folder, arguments.documents)
    except* KeyboardInterrupt:
        print("stopped; start it again to continue")
