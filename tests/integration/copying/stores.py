"""A store with a bit of everything, to copy. Run as a program it owns one and changes it, a word of stdin at a time."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import trio

import perco
from perco.check.check import check
from perco.database.inside import inside
from perco.protocol.mutations import Header, Intent, prewrite
from perco.protocol.records import PUT, Cellref
from perco.storage import APPLIED
from tests.acceptance.cli.stores import Lines, Owner, started
from tests.support import bigtable, postgresql

KINDS: Final = ("folder", "postgresql", "bigtable")
LONG: Final = b"x" * 5000
_BIGTABLE: Final = replace(bigtable.QUICK, call_s=5.0)  # before a copy is verified, it waits for that long
OPTIONS: Final = perco.Options(durability="process", bigtable=_BIGTABLE)

docs = perco.Table("docs", key=perco.TEXT, splits=["m"], keep=perco.Keep(seconds=86400))
body = docs.column("body", perco.BYTES, group="raw")
rank = docs.column("rank", perco.INT64)
size = docs.column("size", perco.INT64)
touched = docs.signal("touched")
words = perco.Table("words", key=perco.Tuple(perco.TEXT, perco.INT64))
count = words.column("count", perco.INT64)
schema = perco.Schema(docs, words)


@schema.observe(body, id="measure")
async def measure(txn: perco.Transaction, change: perco.Change[str, bytes]) -> None:
    if change.key == "bad":
        raise ValueError("asked to fail")
    txn.set(size, change.key, len(change.value or b""))
    key = (change.key, 1)
    txn.set(count, key, (await txn.get(count, key) or 0) + 1)


@schema.observe(touched, id="touch")
async def touch(txn: perco.Transaction, change: perco.Change[str, Any]) -> None:
    key = (change.key, 2)
    txn.set(count, key, (await txn.get(count, key) or 0) + 1)


def place(kind: str, path: Path) -> str:
    """A place of a kind where no store is yet."""
    if kind == "folder":
        return str(path)
    return postgresql.fresh() if kind == "postgresql" else bigtable.fresh()


def opened(url: str) -> Any:
    return perco.open(url, schema, options=OPTIONS)


async def fill(db: perco.Database) -> int:
    """History, deletes, long values, a change that was given up, and changes that wait. Returns a timestamp of the
    past."""
    async with db.transaction() as txn:
        for number, key in enumerate(["a", "b", "bad", "k", "n", "z"]):
            txn.set(body, key, b"first " + key.encode())
            txn.set(rank, key, number)
    async with db.worker(options=perco.WorkerOptions(attempts=1)):
        await db.wait_idle()
    assert await db.failed_count() == 1
    past = await db.run(_second)
    async with db.transaction() as txn:
        txn.set(body, "a", LONG)
        txn.set(body, "new", b"waits")
        txn.delete(rank, "b")
        txn.signal(touched, "z")
    return past


async def _second(txn: perco.Transaction) -> int:
    txn.set(rank, "k", 100)
    return txn.start_ts


async def leave_a_lock(db: perco.Database) -> None:
    """Prewrite a cell as a client that dies then."""
    column = inside(db).known.bind(rank).column
    start_ts = await inside(db).oracle.draw()
    header = Header(start_ts, Cellref("docs", b"dead", column), 0, 0, "token")
    mutation = prewrite(header, [Intent("docs", b"dead", column, PUT, b"v")], again=False)
    assert await inside(db).driver.store.apply([mutation]) == [APPLIED]


State = dict[str, Any]


async def state_of(db: perco.Database, ts: int | None = None) -> State:
    """All values, with the timestamps of their commits."""
    out: State = {}
    async with db.snapshot(ts=ts) as snap:
        for table in (docs, words):
            async for row in snap.scan(table):
                for column in table.columns.values():
                    if (value := row.get(column)) is not None:
                        out[f"{column!r} {row.key}"] = value
    return out


async def must_be_clean(db: perco.Database) -> None:
    result = await check(inside(db).driver.store, ts=inside(db).oracle.last, alive=inside(db).fates.alive)
    assert result.clean, result.findings


# ------------------------------------------------------------------ an owner


@asynccontextmanager
async def owned(url: str) -> AsyncIterator[Owner]:
    """A process that owns a store while the block lasts."""
    async with started([sys.executable, "-m", __name__, url]) as process:
        owner = Owner(process)
        assert await owner.tell("hello") == "done"
        yield owner
        assert await owner.tell("quit") == "bye"
        await process.wait()


async def _own(url: str) -> None:
    lines = Lines(trio.lowlevel.FdStream(os.dup(0)))
    async with opened(url) as db:
        while (word := await lines.next()) != "quit":
            match word.split():
                case ["put", key, text]:
                    async with db.transaction() as txn:
                        txn.set(body, key, text.encode() * 100)
                case ["delete", key]:
                    async with db.transaction() as txn:
                        for column in (body, rank, size):
                            txn.delete(column, key)
                case ["split", key]:
                    await db.split(docs, key)
                case ["work"]:
                    async with db.worker(options=perco.WorkerOptions(attempts=1)):
                        await db.wait_idle()
                case ["vacuum"]:
                    await db.vacuum()
                case _:
                    assert word == "hello", word
            print("done", flush=True)
    print("bye", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore", perco.errors.PercoWarning)
    trio.run(_own, sys.argv[1])
