"""Space: cells that are overwritten again and again, with a short history, compared with the newest versions alone.

10^7 overwrites of 10^5 cells, ten seconds of history, the vacuum in the background. It prints the size of the pages in
use, of the reusable pages and of the file. It compares them with a fresh store of the same newest cells, and with the
least that the present versions need: for each, the bytes that a version takes in the fresh store, whose pages are full.
`due`: the versions that are young enough to be kept at that moment; the vacuum has yet to remove the rest.

The store is measured right after the last write, with ten seconds of history; again when that history has been removed;
and again after compacting.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import trio

import perco
from bench.harness import Report, Run
from perco.database.inside import inside, local_owner
from perco.storage import WRITE, LmdbEngine, LmdbTablet

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
OPTIONS = perco.Options(durability="process", vacuum=perco.options.VacuumOptions(period_s=2.0, share=0.5))


class Space:
    """The space of a store: pages in use, free pages, the file; and the number of versions."""

    def __init__(self, db: perco.Database, due: int = CELLS) -> None:
        engine = engine_of(db)
        *_, pages = engine.survey()
        assert pages.lost == 0, "a page belongs to a tree, or is free"
        self.used = pages.used * pages.size
        self.free = pages.free * pages.size
        self.list = pages.free_list * pages.size
        self.file = engine.file_bytes()
        self.records = engine.entries(WRITE)
        self.due = due

    def minimum(self, fresh: Space) -> float:
        """Bytes that its versions need, in full pages."""
        return fresh.used * self.records / fresh.records

    def row(self, name: str, fresh: Space) -> tuple[str, ...]:
        least = self.minimum(fresh)
        sizes = (f"{size / (1 << 20):.1f}" for size in (least, self.used, self.free, self.list, self.file))
        ratios = (f"{self.used / least:.2f}", f"{self.used / fresh.used:.2f}")
        return (name, f"{self.records:,}", f"{self.due:,}", *sizes, *ratios)


def engine_of(db: perco.Database) -> LmdbEngine:
    tablet = local_owner(db).local.store.tablet("docs", b"")
    assert isinstance(tablet, LmdbTablet)
    return tablet.engine


async def write(txn: perco.Transaction, keys: list[int], payload: bytes) -> None:
    for key in keys:
        txn.set(value, key, payload)


async def overwrite(
    db: perco.Database, overwrites: int, seed: int, run: Run
) -> tuple[list[tuple[float, int, int]], int]:
    """Overwrite random keys, all equally likely. Returns (seconds, bytes of all pages ever used, versions) over time,
    and how many overwrites there were in the last `HISTORY_S`."""
    rng = random.Random(seed)
    left = overwrites // PER_TRANSACTION
    over_time: list[tuple[float, int, int]] = []
    done: list[tuple[float, int]] = []
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
            engine = engine_of(db)
            over_time.append((seconds, engine.used_bytes(), engine.entries(WRITE)))
            done.append((seconds, overwrites - left * PER_TRANSACTION))
            if (tenths := 10 * (overwrites - left * PER_TRANSACTION) // overwrites) > told:
                told = tenths
                _, used, versions = over_time[-1]
                run.say(f"{10 * tenths} % after {seconds:.0f} s, {used / (1 << 20):.0f} MiB, {versions:,} versions")
            await trio.sleep(1.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        async with trio.open_nursery() as clients:
            for _ in range(IN_FLIGHT):
                clients.start_soon(client)
        nursery.cancel_scope.cancel()
    ended = time.perf_counter() - began
    before = max((count for seconds, count in done if seconds <= ended - HISTORY_S), default=0)
    return over_time, overwrites - before


async def load(db: perco.Database, cells: dict[int, bytes]) -> None:
    keys = list(cells)
    for at in range(0, len(keys), 1000):
        async with db.transaction() as txn:
            for key in keys[at : at + 1000]:
                txn.set(value, key, cells[key])


async def measure(folder: Path, overwrites: int, run: Run) -> tuple[dict[str, Space], perco.VacuumStatistics, float]:
    async with perco.open(folder / "worn", SCHEMA, options=OPTIONS) as db:
        rng = random.Random(1)
        await load(db, {key: rng.randbytes(VALUE_BYTES) for key in range(CELLS)})
        run.say(f"{CELLS:,} cells are there; {overwrites:,} overwrites begin")
        began = time.perf_counter()
        over_time, young = await overwrite(db, overwrites, 2, run)
        seconds = time.perf_counter() - began
        every = max(len(over_time) // SAMPLES, 1)
        told = (f"{used / (1 << 20):.0f}, {versions // 1000}" for _, used, versions in over_time[::every])
        run.say("MiB ever used, thousands of versions, over time: " + "; ".join(told))
        spaces = {"worn": Space(db, CELLS + young)}
        await trio.sleep(HISTORY_S + 2 * db.config.oracle.note_period_s)
        async with db.transaction() as txn:  # draws a timestamp to be noted: the history is older
            txn.delete(value, CELLS)
        await inside(db).oracle.note()
        await db.vacuum()
        spaces["worn, history gone"] = Space(db)
        await db.compact()
        spaces["worn, compacted"] = Space(db)
        async with db.snapshot() as snap:
            newest = {row.key: row[value] async for row in snap.scan(docs)}
        vacuum = db.statistics().vacuum
    async with perco.open(folder / "fresh", SCHEMA, options=OPTIONS) as db:
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
    fresh = spaces["fresh"]
    head = ("store", "versions", "due", "MiB at least", "in use", "free", "free list", "file", "of least", "of fresh")
    run.table(
        f"{overwrites:,} overwrites of {CELLS:,} cells, {HISTORY_S:g} s of history",
        head,
        [space.row(name, fresh) for name, space in spaces.items()],
    )
    run.say(f"a version takes {fresh.used / fresh.records:.0f} bytes in full pages")
    rate = overwrites / seconds
    run.say(
        f"{rate:,.0f} overwrites/s; the vacuum went through {vacuum.runs} times and removed "
        f"{vacuum.removed.versions:,} versions"
    )
    for name, space in spaces.items():
        key = name.replace(", ", " ").replace(" ", "_")
        report.figures[f"{key}_used_bytes"] = space.used
        report.figures[f"{key}_free_bytes"] = space.free
        report.figures[f"{key}_free_list_bytes"] = space.list
        report.figures[f"{key}_file_bytes"] = space.file
        report.figures[f"{key}_versions"] = space.records
        report.figures[f"{key}_versions_due"] = space.due
        report.ratios[f"{key}_used_of_minimum"] = round(space.used / space.minimum(fresh), 3)
        report.ratios[f"{key}_used_of_fresh"] = round(space.used / fresh.used, 3)
        report.ratios[f"{key}_file_of_fresh"] = round(space.file / fresh.file, 3)
    report.figures |= {"bytes_per_version": fresh.used / fresh.records, "overwrites_per_s": rate}
    worn, gone, compacted = (spaces[name] for name in ("worn", "worn, history gone", "worn, compacted"))
    report.bars += [
        ("pages in use, history gone, beside a fresh store", gone.used / fresh.used, "at most", 2),
        (
            "pages in use, history standing, beside what its versions need",
            worn.used / worn.minimum(fresh),
            "at most",
            2,
        ),
        ("versions that stand, of those that are due", worn.records / worn.due, "at most", 3),
        ("the file, compacted, beside a fresh one", compacted.file / fresh.file, "at most", 1.25),
    ]
    run.finish(report, facts)
