"""Split: a tablet of 1 GiB is split in the middle while clients write to it and read it, durably.

Writers add one to random rows (a read and a write of one row); each reader gets a random row every millisecond. It
prints rates and longest times before the split, during it, while the moved rows are removed from the old tablet, and
after. The store is embedded: one process does it all. The bars are on how long a write waits.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import trio

import perco
from bench.harness import Report, Run, percentile
from perco.database.inside import local_owner

BYTES, QUICK_BYTES = 1 << 30, 48 << 20
VALUE_BYTES = 1000
WRITERS, READERS = 64, 8
READ_EVERY_S = 0.001
PER_LOAD = 2_000
BEFORE_S, AFTER_S = 5.0, 5.0
PAUSE_MOST_S = 0.5
BIN_S = 0.1

docs = perco.Table("docs", key=perco.INT64)
value = docs.column("value", perco.BYTES)
count = docs.column("count", perco.INT64)
SCHEMA = perco.Schema(docs)


@dataclass(slots=True)
class Timeline:
    """When operations ended, and how long they took."""

    ends: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def within(self, begin: float, end: float) -> list[float]:
        """The durations of the operations that ended between `begin` and `end`."""
        return [took for at, took in zip(self.ends, self.seconds, strict=True) if begin <= at < end]

    def longest(self, begin: float, end: float) -> float:
        """The longest duration of an operation that was under way between `begin` and `end`."""
        both = zip(self.ends, self.seconds, strict=True)
        return max((took for at, took in both if at >= begin and at - took < end), default=0.0)


async def load(txn: perco.Transaction, first: int, keys: int, payload: bytes) -> None:
    for key in range(first, first + keys):
        txn.set(value, key, payload)


async def add(txn: perco.Transaction, key: int) -> None:
    txn.set(count, key, (await txn.get(count, key) or 0) + 1)


async def measure(
    folder: Path, size: int, run: Run
) -> tuple[dict[str, Timeline], dict[str, float], perco.Split, list[int]]:
    rng = random.Random(1)
    keys = size // VALUE_BYTES
    lines = {"writes": Timeline(), "reads": Timeline()}
    moments: dict[str, float] = {}
    options = perco.Options(split=perco.options.SplitOptions(on=False))
    async with perco.open(folder / "store", SCHEMA, options=options) as db:
        for first in range(0, keys, PER_LOAD):
            await db.run(load, first, min(PER_LOAD, keys - first), rng.randbytes(VALUE_BYTES))
        [tablet] = [tablet for tablet in local_owner(db).local.store.tablets() if tablet.table == "docs"]
        run.say(f"{keys:,} rows are there, {tablet.live_bytes() / (1 << 20):,.0f} MiB")
        began = time.perf_counter()

        async def act(name: str) -> None:
            line = lines[name]
            while True:
                key = rng.randrange(keys)
                at = time.perf_counter()
                if name == "writes":
                    await db.run(add, key)
                else:
                    async with db.snapshot() as snap:
                        await snap.get(value, key)
                now = time.perf_counter()
                line.ends.append(now - began)
                line.seconds.append(now - at)
                if name == "reads":
                    await trio.sleep(READ_EVERY_S)

        async with trio.open_nursery() as nursery:
            for _ in range(WRITERS):
                nursery.start_soon(act, "writes")
            for _ in range(READERS):
                nursery.start_soon(act, "reads")
            await trio.sleep(BEFORE_S)
            moments["begin"] = time.perf_counter() - began
            done = await db.split(docs)
            moments["split"] = time.perf_counter() - began
            await local_owner(db).splitting.clear(share=db.config.split.share)
            moments["cleared"] = time.perf_counter() - began
            await trio.sleep(AFTER_S)
            moments["end"] = time.perf_counter() - began
            nursery.cancel_scope.cancel()
        sizes = [tablet.live_bytes() for tablet in local_owner(db).local.store.tablets() if tablet.table == "docs"]
    return lines, moments, done, sizes


def draw(lines: dict[str, Timeline], moments: dict[str, float], run: Run) -> None:
    """Throughput, and the longest wait, over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6))
    rates, waits = figure.subplots(2, 1, sharex=True)
    bins = [i * BIN_S for i in range(int(moments["end"] / BIN_S))]
    for name, line in lines.items():
        found: list[list[float]] = [[] for _ in bins]
        for at, took in zip(line.ends, line.seconds, strict=True):
            if int(at / BIN_S) < len(found):
                found[int(at / BIN_S)].append(took)
        rates.plot(bins, [len(each) / BIN_S for each in found], label=name, lw=1)
        waits.plot(bins, [1000 * max(each, default=0.0) for each in found], label=name, lw=1)
    for axis in (rates, waits):
        axis.axvspan(moments["begin"], moments["split"], color="0.9", label="it is split")
        axis.axvspan(moments["split"], moments["cleared"], color="0.96", label="moved rows are removed")
    rates.set_ylabel("a second")
    waits.set_ylabel("longest wait, ms")
    waits.set_yscale("log")
    waits.set_xlabel("s")
    rates.legend(loc="upper right", fontsize=8)
    rates.set_title("A tablet is split while it is written to, durably")
    run.figure(figure, "split")


def main(run: Run) -> None:
    """Print the table and the RESULT line; draw."""
    facts = run.machine("power")
    report = Report("split", "power")
    with run.scratch() as folder:
        lines, moments, done, sizes = trio.run(measure, folder, QUICK_BYTES if run.quick else BYTES, run)
    phases = {
        "before": (0.0, moments["begin"]),
        "while it is split": (moments["begin"], moments["split"]),
        "while moved rows are removed": (moments["split"], moments["cleared"]),
        "after": (moments["cleared"], moments["end"]),
    }
    rows = []
    for phase, (begin, end) in phases.items():
        told = []
        for name, line in lines.items():
            found, longest = line.within(begin, end) or [0.0], line.longest(begin, end)
            told += [f"{len(found) / (end - begin):,.0f}", f"{1000 * percentile(found, 0.99):.1f}"]
            told += [f"{1000 * longest:.0f}"]
            key = f"{name}_{phase.replace(' ', '_')}"
            report.figures |= {f"{key}_per_s": len(found) / (end - begin), f"{key}_longest_s": longest}
        rows.append((phase, f"{end - begin:.1f}", *told))
    head = ("", "s", "writes/s", "p99 ms", "longest ms", "reads/s", "p99 ms", "longest ms")
    run.table(f"{WRITERS} writers, {READERS} readers", head, rows)
    halves = " and ".join(f"{size / (1 << 20):,.0f} MiB" for size in sizes)
    waited = f"writes to the new tablet waited for {1000 * done.paused_s:.0f} ms"
    run.say(f"{done.cells:,} cells copied in {done.seconds:.1f} s; {waited}; now {halves}")
    report.figures |= {"cells": done.cells, "seconds": done.seconds, "paused_s": done.paused_s}
    report.bars.append(("writes pause, s", done.paused_s, "at most", PAUSE_MOST_S))
    longest = report.figures["writes_while_it_is_split_longest_s"]
    report.bars.append(("longest write while it is split, s", longest, "at most", PAUSE_MOST_S))
    draw(lines, moments, run)
    run.finish(report, facts)
