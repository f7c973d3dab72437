"""A process that opens a store, as its owner or as a client: `python -m tests.integration.serve.member WHERE WHAT`.

It says on stdout how far it is, a word a line, and goes on when a line comes on stdin.
"""

from __future__ import annotations

import random
import sys
import warnings

import trio

import perco
from perco.serve.client import is_client

warnings.simplefilter("ignore")
accounts = perco.Table("accounts", key=perco.TEXT, splits=["a5"])
balance = accounts.column("balance", perco.INT64)
moves = accounts.column("moves", perco.INT64)
SCHEMA = perco.Schema(accounts)
NAMES = [f"a{i}" for i in range(10)]
TOTAL = 1000
OPTIONS = perco.Options(
    durability="process", wire=perco.options.WireOptions(silence_s=2.0, heartbeat_s=0.5, lease_s=1.0, patience_s=30.0)
)


@SCHEMA.observe(balance, id="count")
async def count(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    txn.set(moves, change.key, (await txn.get(moves, change.key) or 0) + 1)


def say(word: object) -> None:
    print(word, flush=True)


async def told() -> None:
    """Until a line comes."""
    if not await trio.to_thread.run_sync(sys.stdin.readline):
        sys.exit(3)


async def found(txn: perco.Transaction) -> None:
    for name in NAMES:
        txn.set(balance, name, TOTAL // len(NAMES))


async def move(txn: perco.Transaction, rng: random.Random) -> None:
    source, target = rng.sample(NAMES, 2)
    amount = rng.randrange(5)
    txn.set(balance, source, (await txn.get(balance, source) or 0) - amount)
    txn.set(balance, target, (await txn.get(balance, target) or 0) + amount)


async def total(db: perco.Database) -> int:
    async with db.snapshot() as snap:
        return sum([row[balance] or 0 async for row in snap.scan(accounts, columns=[balance])])


async def main(where: str, what: str) -> None:
    async with perco.open(where, SCHEMA, options=OPTIONS) as db:
        if what == "found":
            await db.run(found)
        say("client" if is_client(db) else "owner")
        if what == "moves":
            rng = random.Random(1)
            while True:
                try:
                    await db.run(move, rng)
                except perco.CommitUnknown as error:
                    say(f"unknown {await db.outcome(error.token) > 0}")
                else:
                    say("moved")
        elif what == "works":
            async with db.worker(concurrency=8):
                await told()
        else:
            await told()
        say(await total(db))


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:3])
