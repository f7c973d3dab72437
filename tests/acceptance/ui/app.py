"""A program whose store the page shows: a chain of observers, one of which fails for some rows.

Run as a program, it opens the store that its argument names, loads a few rows, and runs the observers until it is told
to end. It prints a line when all have run.
"""

from __future__ import annotations

import sys

import trio

import perco
from perco.database.inside import inside

docs = perco.Table("docs", key=perco.TEXT, keep=perco.Keep(seconds=3600, versions=5))
text = docs.column("text", perco.TEXT)
lang = docs.column("lang", perco.TEXT)
words = perco.Table("words", key=perco.Tuple(perco.TEXT, perco.TEXT))
seen = words.column("seen", perco.BOOL)
summaries = perco.Table("summaries", key=perco.TEXT)
summary = summaries.column("summary", perco.TEXT)

schema = perco.Schema(docs, words, summaries)


@schema.observe(text, id="index")
async def index(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
    for word in (change.value or "").split():
        txn.set(seen, (word, change.key), True)


@schema.observe(text, id="detect")
async def detect(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
    txn.set(lang, change.key, "en")


@schema.observe(lang, id="summarize", attempts=2)
async def summarize(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
    if change.key == "doc/bad":
        raise RuntimeError("the service answered <503>")
    txn.set(summary, change.key, "short")


async def load(db: perco.Database) -> None:
    for number in range(8):
        async with db.transaction() as txn:
            txn.set(text, f"doc/{number}", "an apple a day")
    async with db.transaction() as txn:
        txn.set(text, "doc/bad", "<b>not markup</b>")
    async with db.transaction() as txn:
        txn.set(text, "doc/0", "two apples")


async def main(store: str) -> None:
    async with perco.open(store, schema) as db, db.worker(concurrency=4, scanners=1):
        await load(db)
        await db.wait_idle()
        await inside(db).oracle.note()  # those who read the folder see all of it from now on
        print("idle", flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
