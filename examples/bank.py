"""A tiny bank: many transfers between accounts at once. Each happens as a whole or not at all, and only once.

    python examples/bank.py [FOLDER]

Kill it at any moment and start it again: it continues with the transfers that are not in the ledger yet.

What to look at:

- `transfer` reads and writes three rows in two tables. If another transfer changes one of the accounts first, `db.run`
  runs it again. While the function runs, its transaction holds no lock.
- Every transfer has a number, chosen by the client that asks for it. The ledger's row is written together with the
  balances. So a client that does not know whether a transfer went through may ask for it again.
- The auditor adds up all balances while the money moves. A snapshot shows a single moment, so the sum is always the
  same.
"""

import argparse
import random
from pathlib import Path

import trio

import perco

ACCOUNTS, OPENING, TRANSFERS, AT_ONCE = 50, 100, 1000, 32

accounts = perco.Table("accounts", key=perco.INT64)
balance = accounts.column("balance", perco.INT64)

ledger = perco.Table("ledger", key=perco.INT64)  # the transfers, by number
entry = ledger.column("entry", perco.JSON)  # [from, to, amount, whether it was paid]

schema = perco.Schema(accounts, ledger)


async def open_accounts(txn: perco.Transaction) -> None:
    if await txn.get(balance, 0) is None:
        for account in range(ACCOUNTS):
            txn.set(balance, account, OPENING)


async def transfer(txn: perco.Transaction, number: int, source: int, target: int, amount: int) -> bool:
    """Make a transfer; returns whether it was paid, now or when it was asked for before."""
    known = await txn.get(entry, number)
    if known is not None:
        return bool(known[-1])
    row = await txn.row(accounts, source)
    paid = row.get(balance, 0) >= amount
    if paid:
        txn.set(balance, source, row.get(balance, 0) - amount)
        txn.set(balance, target, (await txn.get(balance, target) or 0) + amount)
    txn.set(entry, number, [source, target, amount, paid])
    return paid


def order(number: int) -> tuple[int, int, int]:
    """The two different accounts, and the amount, of transfer `number`."""
    rng = random.Random(number)
    source, target = rng.sample(range(ACCOUNTS), 2)
    return source, target, rng.randrange(1, 60)


async def total(db: perco.Database) -> int:
    async with db.snapshot() as snap:
        return sum([row.get(balance, 0) async for row in snap.scan(accounts)])


async def main(folder: Path) -> None:
    async with perco.open(folder, schema) as db:
        await db.run(open_accounts)
        async with db.snapshot() as snap:
            done = {row.key async for row in snap.scan(ledger)}
        print(f"{len(done)} of {TRANSFERS} transfers are in the ledger; {ACCOUNTS} accounts hold {await total(db)}")

        waiting = iter([number for number in range(TRANSFERS) if number not in done])
        audits: set[int] = set()

        async def clerk() -> None:
            for number in waiting:  # all clerks take from the same pile
                await db.run(transfer, number, *order(number))

        async def auditor() -> None:
            while True:
                audits.add(await total(db))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(auditor)
            async with trio.open_nursery() as clerks:
                for _ in range(AT_ONCE):
                    clerks.start_soon(clerk)
            nursery.cancel_scope.cancel()

        async with db.snapshot() as snap:
            paid = [row.get(entry, [False])[-1] async for row in snap.scan(ledger)]
            richest = max([(row.get(balance, 0), row.key) async for row in snap.scan(accounts)])
        retries = db.statistics().counters.conflicts
        print(f"{sum(paid)} paid, {len(paid) - sum(paid)} refused; {retries} attempts conflicted and were run again")
        print(f"account {richest[1]} has {richest[0]}; together they hold {await total(db)}")
        print(f"sums that the auditor saw meanwhile: {sorted(audits) or 'none'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("example-bank"), metavar="FOLDER")
    try:
        trio.run(main, parser.parse_args().folder)
    except* KeyboardInterrupt:
        print("stopped; start it again to continue")
