"""Accounts whose total never changes: over two tables of three tablets each, some balances in long values."""

from __future__ import annotations

import random

import perco

north = perco.Table("north", key=perco.TEXT, splits=["h", "p"])
south = perco.Table("south", key=perco.TEXT, splits=["h", "p"])


def _money(name: str, length: int) -> perco.Codec[int]:
    return perco.Codec(name, lambda amount: b"%d" % amount + b" " * length, int)


MONEY: perco.Codec[int] = _money("money", 0)
LONG_MONEY: perco.Codec[int] = _money("long-money", 300)  # lies in the data group

balance = north.column("balance", MONEY)
savings = south.column("savings", LONG_MONEY)
notes = south.column("notes", perco.TEXT)
SCHEMA = perco.Schema(north, south)

NAMES = ["alice", "bob", "harry", "mallory", "quentin", "zoe"]
OPENING = 100
Account = tuple[perco.Column[str, int], str]
ACCOUNTS: list[Account] = [(column, name) for column in (balance, savings) for name in NAMES]
TOTAL = OPENING * len(ACCOUNTS)


async def opening(txn: perco.Transaction) -> None:
    for column, name in ACCOUNTS:
        txn.set(column, name, OPENING)


async def move(txn: perco.Transaction, source: Account, target: Account, amount: int) -> int:
    """Moves at most `amount`; an account that comes to nothing is closed. Returns what was moved."""
    have = await txn.get(*source) or 0
    amount = min(amount, have)
    if source == target or not amount:
        return 0
    if have == amount:
        txn.delete(*source)
    else:
        txn.set(*source, have - amount)
    txn.set(*target, (await txn.get(*target) or 0) + amount)
    return amount


async def scatter(txn: perco.Transaction, source: Account, amount: int) -> None:
    """Takes from one account and gives to all others."""
    have = await txn.get(*source) or 0
    others = [account for account in ACCOUNTS if account != source]
    share = min(amount, have) // len(others)
    txn.set(*source, have - share * len(others))
    for account in others:
        txn.set(*account, (await txn.get(*account) or 0) + share)


async def at_random(db: perco.Database, rng: random.Random) -> None:
    """One transfer between two accounts, or sometimes from one to all."""
    source, target, amount = rng.choice(ACCOUNTS), rng.choice(ACCOUNTS), rng.randint(1, 60)
    if rng.random() < 0.2:
        await db.run(scatter, source, amount)
    else:
        await db.run(move, source, target, amount)


async def total_by_scan(snap: perco.Snapshot, *, reverse: bool = False) -> int:
    rows = [row[balance] or 0 async for row in snap.scan(north, reverse=reverse)]
    rows += [row[savings] or 0 async for row in snap.scan(south, columns=[savings], reverse=reverse)]
    return sum(rows)


async def total_by_get(snap: perco.Snapshot) -> int:
    found = [await snap.get_many(column, NAMES) for column in (balance, savings)]
    return sum(value or 0 for values in found for value in values.values())
