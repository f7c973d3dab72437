"""Space: cells that are overwritten again and again, with a short history, in the space of the newest versions alone.

10^7 overwrites of 10^5 cells, ten seconds of history, the vacuum in the background. Then the pages that its cells take,
and the file, beside those of a fresh store that holds the same newest cells.

The store is measured as it is right after the last write, when ten seconds of history stand, and once more when that
history has gone. What LMDB has freed and not used again yet counts as used in the file, and not in the pages.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import trio

import perco
from bench.harness import Report, Run
from perco.storage import WRITE, LmdbTablet

CELLS = 100_000
OVERWRITES = 10_000_000
QUICK = 300_000
PER_TRANSACTION = 100
IN_FLIGHT = 16
HISTORY_S = 10.0
VALUE_BYTES = 64
SAMPLES = 30

docs = perco.Table("docs", key=perco.INT64, keep=perco.Keep(seconds=HISTORY_S))
value = docs.column("value", perco.BYTES)
SCHEMA = perco.Schema(docs)
VACUUM = perco.VacuumOptions(period_s=2.0, share=0.5)


class Space:
    """What a store takes: pages of cells, pages ever written, the file; and how many records there are."""

    def __init__(self, db: perco.Database) -> None:
        tablet = db.local.store.tablet("docs", b"")
        assert isinstance(tablet, LmdbTablet)
        self.live = tablet.engine.live_bytes()
        self.used = tablet.engine.used_bytes()
        self.file = (tablet.engine.path / "data.mdb").stat().st_size
        self.records = tablet.entries(WRITE)

    def row(self, name: str) -> tuple[str, ...]:
        return (name, f"{self.records:,}", *(f"{size / (1 << 20):.1f}" for size in (self.live, self.used, self.file)))


async def write(txn: perco.Transaction, keys: list[int], payload: bytes) -> None:
    for key in keys:
        txn.set(value, key, payload)


async def overwrite(db: perco.Database, overwrites: int, seed: int, run: Run) -> list[tuple[float, int]]:
    """Every key is as likely as any; returns (seconds, bytes used) over time."""
    rng = random.Random(seed)
    left = overwrites // PER_TRANSACTION
    over_time: list[tuple[float, int]] = []
    began = time.perf_counter()

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await db.run(write, rng.sample(range(CELLS), PER_TRANSACTION), rng.randbytes(VALUE_BYTES))

    async def watch() -> None:
        told = 0
        while True:
            seconds = time.perf_counter() - began
            over_time.append((seconds, Space(db).used))
            if (tenths := 10 * (overwrites - left * PER_TRANSACTION) // overwrites) > told:
                told = tenths
                run.say(f"{10 * tenths} % after {seconds:.0f} s, {over_time[-1][1] / (1 << 20):.0f} MiB used")
            await trio.sleep(1.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        async with trio.open_nursery() as clients:
            for _ in range(IN_FLIGHT):
                clients.start_soon(client)
        nursery.cancel_scope.cancel()
    return over_time


async def load(db: perco.Database, cells: dict[int, bytes]) -> None:
    keys = list(cells)
    for at in range(0, len(keys), 1000):
        async with db.transaction() as txn:
            for key in keys[at : at + 1000]:
                txn.set(value, key, cells[key])


async def measure(folder: Path, overwrites: int, run: Run) -> tuple[dict[str, Space], perco.VacuumStatistics, float]:
    options = perco.Options(durability="process", vacuum=VACUUM)
    async with perco.open(folder / "worn", SCHEMA, options=options) as db:
        rng = random.Random(1)
        await load(db, {key: rng.randbytes(VALUE_BYTES) for key in range(CELLS)})
        run.say(f"{CELLS:,} cells are there; {overwrites:,} overwrites begin")
        began = time.perf_counter()
        over_time = await overwrite(db, overwrites, 2, run)
        seconds = time.perf_counter() - began
        every = max(len(over_time) // SAMPLES, 1)
        run.say("MiB used over time: " + " ".join(f"{used / (1 << 20):.0f}" for _, used in over_time[::every]))
        spaces = {"worn": Space(db)}
        await trio.sleep(HISTORY_S + 2 * db.config.oracle.note_period_s)
        async with db.transaction() as txn:  # a timestamp that is noted, and the history is older
            txn.delete(value, CELLS)
        await db.oracle.note()
        await db.vacuum()
        spaces["worn, history gone"] = Space(db)
        async with db.snapshot() as snap:
            newest = {row.key: row[value] async for row in snap.scan(docs)}
        vacuum = db.statistics().vacuum
    async with perco.open(folder / "fresh", SCHEMA, options=options) as db:
        await load(db, {key: data for key, data in newest.items() if data is not None})
        spaces["fresh"] = Space(db)
    return spaces, vacuum, seconds


def main(run: Run) -> None:
    """Prints the tables and the RESULT line."""
    perco.tune_gc()
    facts = run.machine("process")
    overwrites = QUICK if run.quick else OVERWRITES
    report = Report("space", "process")
    with run.scratch() as folder:
        spaces, vacuum, seconds = trio.run(measure, folder, overwrites, run)
    run.table(
        f"{overwrites:,} overwrites of {CELLS:,} cells, {HISTORY_S:g} s of history",
        ("store", "records", "MiB of cells", "MiB used", "MiB of file"),
        [space.row(name) for name, space in spaces.items()],
    )
    rate = overwrites / seconds
    run.say(
        f"{rate:,.0f} overwrites/s; the vacuum went through {vacuum.runs} times and removed "
        f"{vacuum.removed.versions:,} versions"
    )
    fresh = spaces["fresh"]
    for name in ("worn", "worn, history gone"):
        key = name.replace(", ", " ").replace(" ", "_")
        report.figures[f"{key}_live_bytes"] = spaces[name].live
        report.figures[f"{key}_used_bytes"] = spaces[name].used
        report.figures[f"{key}_file_bytes"] = spaces[name].file
        report.ratios[f"{key}_live_of_fresh"] = round(spaces[name].live / fresh.live, 3)
        report.ratios[f"{key}_file_of_fresh"] = round(spaces[name].file / fresh.file, 3)
    report.figures |= {"fresh_live_bytes": fresh.live, "fresh_file_bytes": fresh.file, "overwrites_per_s": rate}
    report.bars.append(
        (
            "pages of cells, history gone, beside a fresh store",
            spaces["worn, history gone"].live / fresh.live,
            "at most",
            2,
        )
    )
    run.finish(report, facts)
