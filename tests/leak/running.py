"""Transactions of every kind, again and again, over the same keys: the process must not grow with them.

A sample has the anonymous memory, without the mapped pages of a store's files, and the number of objects that Python's
garbage collector knows. It is taken when no transaction is in flight.
"""

from __future__ import annotations

import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import trio

import perco

KEYS = 500
IN_FLIGHT = 64
# Bytes by which memory may differ from one time to another. A burst of conflicts, or a thread more, has cost up to
# 11 MiB, once; after it, memory stays where it is, as longer runs show.
_FOUND_MAX = 16 << 20
_OBJECTS_MAX = 5_000

table: perco.Table[bytes] = perco.Table("t", keep=perco.Keep(seconds=0.0))
other: perco.Table[bytes] = perco.Table("other", keep=perco.Keep(seconds=0.0))
count = table.column("count", perco.INT64)
text = table.column("text", perco.BYTES)
watched = table.column("watched", perco.INT64)
seen = other.column("seen", perco.INT64)


def schema() -> perco.Schema:
    """The tables, with an observer that copies what it sees into the other table."""
    made = perco.Schema(table, other)

    @made.observe(watched, id="copy")
    async def copy(txn: perco.Transaction, change: perco.Change[bytes, int]) -> None:
        txn.set(seen, change.key, change.value or 0)

    return made


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes of anonymous memory, and objects, after so many transactions."""

    transactions: int
    bytes: int
    objects: int


def sample(transactions: int) -> Sample:
    for _ in range(3):  # what a finaliser lets go of
        gc.collect()
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return Sample(transactions, int(line.split()[1]) * 1024, len(gc.get_objects()))


def leaked(samples: list[Sample]) -> str:
    """Say by how much the process has grown from the first sample to the last; "": it has not.

    A store may keep one byte of each transaction: the allocator needs some slack, and a bounded cache fills up.
    """
    first, last = samples[0], samples[-1]
    transactions = last.transactions - first.transactions
    grown, more = last.bytes - first.bytes, last.objects - first.objects
    if grown > max(_FOUND_MAX, transactions):
        return f"{grown:,} bytes more after {transactions:,} transactions"
    if more > max(_OBJECTS_MAX, transactions // 1000):
        return f"{more:,} objects more after {transactions:,} transactions"
    return ""


Act = Callable[[perco.Database, bytes, random.Random], Awaitable[None]]


async def _add(db: perco.Database, key: bytes, rng: random.Random) -> None:
    async def add(txn: perco.Transaction) -> None:
        txn.set(count, key, (await txn.get(count, key) or 0) + 1)

    await db.run(add)


async def _add_to_one(db: perco.Database, key: bytes, rng: random.Random) -> None:
    """All conflict here."""
    await _add(db, b"hot", rng)


async def _two_phases(db: perco.Database, key: bytes, rng: random.Random) -> None:
    async def write(txn: perco.Transaction) -> None:
        txn.set(count, key, rng.randrange(100))
        txn.set(seen, key, rng.randrange(100))

    await db.run(write)


async def _long(db: perco.Database, key: bytes, rng: random.Random) -> None:
    async def write(txn: perco.Transaction) -> None:
        txn.set(text, key, rng.randbytes(rng.choice((1, 200, 300, 5000))))

    await db.run(write)


async def _delete(db: perco.Database, key: bytes, rng: random.Random) -> None:
    async def delete(txn: perco.Transaction) -> None:
        txn.delete(text, key)
        txn.delete(count, key)

    await db.run(delete)


async def _read(db: perco.Database, key: bytes, rng: random.Random) -> None:
    async with db.snapshot() as snap:
        await snap.get(text, key)
        await snap.get_many(count, [key, b"hot", b"nothing"])
        async for _ in snap.scan(table, start=key, limit=3):
            pass


async def _fail(db: perco.Database, key: bytes, rng: random.Random) -> None:
    async def fail(txn: perco.Transaction) -> None:
        txn.set(count, key, 1)
        raise ZeroDivisionError

    try:
        await db.run(fail)
    except ZeroDivisionError:
        return
    raise AssertionError("an error was lost")


async def _cancel(db: perco.Database, key: bytes, rng: random.Random) -> None:
    with trio.move_on_after(0.0002 * rng.random()):
        await _two_phases(db, key, rng)


async def _observed(db: perco.Database, key: bytes, rng: random.Random) -> None:
    async def write(txn: perco.Transaction) -> None:
        txn.set(watched, key, rng.randrange(100))

    await db.run(write)


async def _serializable(db: perco.Database, key: bytes, rng: random.Random) -> None:
    async def copy(txn: perco.Transaction) -> None:
        txn.set(count, key, await txn.get(count, b"hot") or 0)

    await db.options(isolation="serializable", attempts=1000).run(copy)


ACTS: dict[Act, int] = {
    _add: 60,
    _add_to_one: 2,
    _two_phases: 8,
    _long: 6,
    _delete: 4,
    _read: 8,
    _fail: 2,
    _cancel: 3,
    _observed: 4,
    _serializable: 3,
}


async def run(path: Path, transactions: int, samples: int, seed: int) -> AsyncIterator[Sample]:
    """Make so many transactions, and yield a sample after each part of them. The first tenth comes before all parts:
    then caches have filled up, and memory is where it stays."""
    rng = random.Random(seed)
    acts, weights = list(ACTS), list(ACTS.values())
    options = perco.Options(durability="process")

    async def some(db: perco.Database, how_many: int) -> None:
        left = how_many

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                [act] = rng.choices(acts, weights)
                await act(db, b"%d" % rng.randrange(KEYS), rng)

        async with trio.open_nursery() as nursery:
            for _ in range(IN_FLIGHT):
                nursery.start_soon(client)
        await db.wait_idle()

    async with perco.open(path, schema(), options=options) as db, db.worker():
        done, part = transactions // 10, (transactions - transactions // 10) // samples
        await some(db, done)
        yield sample(done)
        for _ in range(samples):
            await some(db, part)
            done += part
            yield sample(done)


def told(taken: Sample) -> str:
    return f"{taken.transactions:>12,} transactions  {taken.bytes / (1 << 20):8.1f} MiB  {taken.objects:>9,} objects"


def main(path: Path, transactions: int, samples: int, seed: int) -> str:
    """Run, and print each sample; returns what `leaked` says."""
    taken: list[Sample] = []

    async def watch() -> None:
        async for each in run(path, transactions, samples, seed):
            taken.append(each)
            print(told(each), flush=True)

    perco.tune_gc()
    trio.run(watch)
    return leaked(taken)
