"""A store to back up: accounts whose sum is constant, and an observer that copies every balance."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import perco
from perco.check.check import check
from perco.database.inside import inside

ACCOUNTS, EACH = 60, 100

accounts = perco.Table("accounts", key=perco.INT64, splits=[20, 40], changes=True)
balance = accounts.column("balance", perco.INT64)
note = accounts.column("note", perco.BYTES)
mirror = perco.Table("mirror", key=perco.INT64)
copied = mirror.column("copied", perco.INT64)
SCHEMA = perco.Schema(accounts, mirror)


@SCHEMA.observe(balance, id="mirror")
async def copy(txn: perco.Transaction, change: perco.Change[int, int]) -> None:
    value = await txn.get(balance, change.key)
    if value is None:
        txn.delete(copied, change.key)
    else:
        txn.set(copied, change.key, value)


@asynccontextmanager
async def opened(folder: Path, **more: Any) -> AsyncIterator[perco.Database]:
    async with perco.open(folder, SCHEMA, options=perco.Options(**more)) as db:
        yield db


async def begin(db: perco.Database) -> None:
    async with db.transaction() as txn:
        for key in range(ACCOUNTS):
            txn.set(balance, key, EACH)
            txn.set(note, key, bytes(500))


async def move(db: perco.Database, rng: random.Random) -> int:
    """Move money between accounts. Returns the commit timestamp."""

    async def transfer(txn: perco.Transaction) -> perco.Transaction:
        source, target = rng.sample(range(ACCOUNTS), 2)
        amount = rng.randint(1, 20)
        txn.set(balance, source, (await txn.get(balance, source) or 0) - amount)
        txn.set(balance, target, (await txn.get(balance, target) or 0) + amount)
        if rng.random() < 0.2:  # some values take pages of their own
            txn.set(note, source, rng.randbytes(rng.choice((10, 3_000, 20_000))))
        return txn

    return (await db.run(transfer)).commit_ts


async def contents(db: perco.Database, ts: int | None = None) -> dict[str, dict[int, dict[str, Any]]]:
    """All rows of both tables."""
    async with db.snapshot(ts=ts) as snap:
        return {
            table.name: {row.key: dict(row.values()) async for row in snap.scan(table)} for table in (accounts, mirror)
        }


async def must_be_sound(db: perco.Database) -> None:
    """The sum is what it was; no fault is found; and once all observers have run, the mirror is one."""
    found = (await check(inside(db).driver.store, ts=await inside(db).oracle.draw())).findings
    assert not [each for each in found if each.severity == "error"]
    async with db.worker():
        await db.wait_idle(timeout=60)
    rows = await contents(db)
    assert sum(row["balance"] for row in rows["accounts"].values()) == ACCOUNTS * EACH
    assert {key: row["balance"] for key, row in rows["accounts"].items()} == {
        key: row["copied"] for key, row in rows["mirror"].items()
    }
