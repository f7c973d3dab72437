"""Backup: a store of 2 GiB is backed up while clients write to it, durably.

Transactions add one to random rows. First as many as the store takes are under way, for the saturation; then they come
at 60 % of it, at random moments (an open loop: none waits for another), and their delays count from the moment at which
they were due. Full backups are taken meanwhile, in rounds, and then an incremental one. Each round compares the
transactions during the backup with those of the half minute before it. The last full backup and the incremental one are
restored: at the timestamp of the backup, the restored store must have the rows that the store itself has.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

import perco
from bench.harness import Report, Run, percentile
from perco.backup.restoring import RestoreOptions, restore

BYTES, QUICK_BYTES = 2 << 30, 128 << 20
VALUE_BYTES = 1000
AT_ONCE = 64
SHARE = 0.6
SATURATED_S, BEFORE_S, QUICK_BEFORE_S = 5.0, 30.0, 5.0
ROUNDS = 3  # of full backups
LEFT_LEAST, P99_MOST = 0.8, 2.0

docs = perco.Table("docs", key=perco.INT64)
value = docs.column("value", perco.BYTES)
count = docs.column("count", perco.INT64)
SCHEMA = perco.Schema(docs)


@dataclass(slots=True)
class Load:
    """Transactions that come at random moments. `due`, `delays`: when they were due, and how long after that they had
    committed, in seconds."""

    due: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)

    def within(self, begin: float, end: float) -> list[float]:
        return [delay for due, delay in zip(self.due, self.delays, strict=True) if begin <= due < end]


async def add(txn: perco.Transaction, key: int) -> None:
    txn.set(count, key, (await txn.get(count, key) or 0) + 1)


def rows(keys: int) -> Iterator[tuple[int, dict[perco.Column[Any, Any], Any]]]:
    rng = random.Random(1)
    for key in range(keys):
        yield key, {value: rng.randbytes(VALUE_BYTES)}


async def saturation(db: perco.Database, keys: int) -> float:
    """Transactions a second, with so many under way."""
    done, rng = 0, random.Random(2)

    async def again() -> None:
        nonlocal done
        while True:
            await db.run(add, rng.randrange(keys))
            done += 1

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(again)
        await trio.sleep(1.0)
        first, began = done, time.perf_counter()
        await trio.sleep(SATURATED_S)
        rate = (done - first) / (time.perf_counter() - began)
        nursery.cancel_scope.cancel()
    return rate


async def arrive(db: perco.Database, keys: int, per_s: float, load: Load) -> None:
    """Transactions, until cancelled."""
    rng = random.Random(3)

    async def one(due: float, key: int) -> None:
        await db.run(add, key)
        load.due.append(due)
        load.delays.append(time.perf_counter() - due)

    async with trio.open_nursery() as nursery:
        due = time.perf_counter()
        while True:
            due += rng.expovariate(per_s)
            if (ahead := due - time.perf_counter()) > 0:
                await trio.sleep(ahead)
            nursery.start_soon(one, due, rng.randrange(keys))


async def digest(db: perco.Database, ts: int) -> str:
    found = hashlib.blake2b()
    async with db.snapshot(ts=ts) as snap:
        async for row in snap.scan(docs):
            found.update(repr((row.key, row.get(count), row.get(value))).encode())
    return found.hexdigest()


async def again(folder: Path, backup: perco.Backup) -> str:
    """Restore a backup, and digest its rows."""
    target = folder / f"again-{backup.name}"
    await restore(str(folder / "backups"), str(target), RestoreOptions(name=backup.name))
    async with perco.open(target, SCHEMA) as db:
        return await digest(db, backup.ts)


async def measure(folder: Path, size: int, before_s: float, run: Run, report: Report) -> None:
    keys = size // VALUE_BYTES
    load = Load()
    options = perco.Options(split=perco.options.SplitOptions(on=False))
    async with perco.open(folder / "store", SCHEMA, options=options) as db:
        await db.bulk_load({docs: rows(keys)})
        async with db.pin("bench", lease_s=3600):  # both backups are compared with the past
            per_s = SHARE * await saturation(db, keys)
            run.say(f"{keys:,} rows are there; {per_s / SHARE:,.0f} transactions a second saturate the store")
            backups = list[perco.Backup]()
            spans = list[tuple[str, float, float]]()  # name, begin, end
            async with trio.open_nursery() as nursery:
                nursery.start_soon(arrive, db, keys, per_s, load)
                await trio.sleep(1.0)
                for name in (*["full"] * ROUNDS, "incremental"):
                    times = [time.perf_counter()]
                    await trio.sleep(before_s)
                    times.append(time.perf_counter())
                    backups.append(await db.backup(folder / "backups", full=name == "full"))
                    times.append(time.perf_counter())
                    spans += [(f"before {name}", times[0], times[1]), (name, times[1], times[2])]
                nursery.cancel_scope.cancel()
            full, more = backups[-2:]
            now = [await digest(db, backup.ts) for backup in (full, more)]
    told: list[tuple[str, ...]] = []
    found: dict[str, list[tuple[float, float]]] = {}  # name -> (a second, p99)
    for name, begin, end in spans:
        delays = load.within(begin, end)
        rate, p99 = len(delays) / (end - begin), percentile(delays, 0.99)
        found.setdefault(name, []).append((rate, p99))
        waits = (f"{1000 * percentile(delays, 0.5):.1f}", f"{1000 * p99:.1f}", f"{1000 * max(delays):.0f}")
        told.append((name, f"{end - begin:.1f}", f"{rate:,.0f}", *waits))
    run.table(f"{per_s:,.0f} transactions a second come", ("", "s", "a second", "p50 ms", "p99 ms", "longest ms"), told)
    figures = report.figures
    for name, each in found.items():
        rate, p99 = (statistics.median(column) for column in zip(*each, strict=True))
        figures |= {f"{name.replace(' ', '_')}_per_s": rate, f"{name.replace(' ', '_')}_p99_ms": 1000 * p99}
    run.say(f"full: {full.bytes / (1 << 20):,.0f} MiB; incremental: {more.stored:,} of {more.pages:,} pages")
    rounds = list(zip(found["full"], found["before full"], strict=True))
    left = statistics.median(during[0] / before[0] for during, before in rounds)
    slower = statistics.median(during[1] / before[1] for during, before in rounds)
    report.ratio("throughput_during", left)
    report.ratio("p99_during", slower)
    report.ratio("incremental_vs_full_bytes", more.bytes / full.bytes)
    figures |= {"full_bytes": full.bytes, "incremental_bytes": more.bytes}
    for backup, wanted in zip((full, more), now, strict=True):
        assert await again(folder, backup) == wanted, f"{backup.name} differs from the store"
    run.say("both restored stores have the rows that the store had at the backups' timestamps")
    report.bars.append(("transactions during a backup", left, "at least", LEFT_LEAST))
    report.bars.append(("p99 during a backup", slower, "at most", P99_MOST))


def main(run: Run) -> None:
    """Print the table and the RESULT line."""
    facts = run.machine("power")
    report = Report("backup", "power")
    with run.scratch() as folder:
        size, before_s = (QUICK_BYTES, QUICK_BEFORE_S) if run.quick else (BYTES, BEFORE_S)
        trio.run(measure, folder, size, before_s, run, report)
    run.finish(report, facts)
