"""What a process does while its writes are recorded, and what must hold of the folder that a power loss leaves.

    python -m tests.powerloss.work FOLDER REPORTS [DURABILITY] [BREAK]

Writers count up, each in all of its cells at once: in three tablets of two tables, some of them long values; an
observer doubles what the first cell says. In the middle the store is closed, and opened again with one more table and a
column in a group of its own; then a tablet is split while it is written to. It reports: `ts N` for each timestamp that
was drawn, `ack WRITER N` for each commit, `split TABLET`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

import perco
from perco.check.check import CheckOptions, check
from perco.clock import timestamps
from perco.database.inside import inside
from perco.notify.options import WorkerOptions
from perco.storage import LmdbOptions, folder as folders
from perco.storage.splitting import Copying
from perco.tablets.local import LocalStore
from perco.testing.sweep import observe
from tests.support.copies import as_itself

WRITERS = ("ann", "bob", "zoe")
ROUNDS = 4
RANGE = 16  # timestamps: so that the oracle's bound moves often
BREAKS = {
    "unsynced data": "acknowledged and visible before it is durable (S2)",
    "unsynced bound": "timestamps are handed out before their bound is durable (O1)",
    "unsynced copy": "a tablet's half is recorded before it is durable (S2, P2)",
    "unsynced folders": "files are durable, and not that they are there (S2)",
    "no mark": 'with durability="process", nothing says that data may be lost (S2)',
}


class World:
    """The schema, as it is at first, or with what is added later."""

    def __init__(self, *, grown: bool) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
        self.count = self.docs.column("count", perco.INT64)
        self.page = self.docs.column("page", perco.TEXT)
        self.sums = perco.Table("sums", key=perco.TEXT)
        self.double = self.sums.column("double", perco.INT64)
        self.also = self.sums.column("also", perco.INT64)
        tables = [self.docs, self.sums]
        self.cells: list[tuple[perco.Column[str, Any], str]] = [
            (self.count, "a-{}"),
            (self.page, "b-{}"),
            (self.page, "x-{}"),
            (self.also, "c-{}"),
        ]
        self.later: list[tuple[perco.Column[str, Any], str]] = []
        if grown:
            more = perco.Table("more", key=perco.TEXT, splits=["m"])
            self.raw = self.docs.column("raw", perco.TEXT, group="raw")
            self.extra = more.column("extra", perco.INT64)
            self.later = [(self.raw, "y-{}"), (self.extra, "a-{}"), (self.extra, "z-{}")]
            tables.append(more)
        self.schema = perco.Schema(*tables)

        @self.schema.observe(self.count, id="double")
        async def double(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
            txn.set(self.double, change.key, 2 * (change.value or 0))

    def value(self, column: perco.Column[str, Any], n: int) -> Any:
        return f"{n} " + "long " * 100 * (1 + n % 3) if column in (self.page, getattr(self, "raw", None)) else n

    async def write(self, txn: perco.Transaction, writer: str, n: int) -> None:
        for column, key in (*self.cells, *self.later):
            txn.set(column, key.format(writer), self.value(column, n))


# ------------------------------------------------------------ the process that is recorded


def main(folder: Path, reports: Path, durability: str, broken: str) -> None:
    out = os.open(reports, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def report(text: str) -> None:
        os.write(out, f"{text}\n".encode())

    _report_draws(report)
    _break(broken)
    options = perco.Options(
        durability=durability,
        oracle=perco.options.OracleOptions(range_size=RANGE, note_period_s=0.02),
        lmdb=LmdbOptions(ahead_bytes=64 << 10, reserve_bytes=64 << 10),
        seed=1,
    )
    trio.run(_work, folder, options, report)


async def _work(folder: Path, options: perco.Options, report: Any) -> None:
    for life, grown in enumerate((False, True)):
        world = World(grown=grown)

        async def writer(db: perco.Database, name: str, world: World = world, life: int = life) -> None:
            for n in range(life * ROUNDS + 1, (life + 1) * ROUNDS + 1):
                await db.run(world.write, name, n)
                report(f"ack {name} {n}")

        workers = WorkerOptions(concurrency=4, scanners=1)
        async with perco.open(folder, world.schema, options=options) as db, db.worker(options=workers):
            async with trio.open_nursery() as nursery:
                for name in WRITERS:
                    nursery.start_soon(writer, db, name)
                if grown:
                    split = await db.split(world.docs, "b")
                    report(f"split {split.tablet}")
            await db.wait_idle()


def _report_draws(report: Any) -> None:
    draw = timestamps.Timestamps.draw

    def reported(self: timestamps.Timestamps) -> int:
        ts = draw(self)
        if ts:
            report(f"ts {ts}")
        return ts

    timestamps.Timestamps.draw = reported  # type: ignore[method-assign]


def _break(what: str) -> None:
    """Leave out a sync that the product makes, to see that a replay notices."""
    if not what:
        return
    match what:
        case "unsynced data" | "unsynced bound":
            add = LocalStore._add

            def added(self: LocalStore, table: str, *args: Any, sync: bool | None = None, **named: Any) -> None:
                chosen = (sync is True) == (what == "unsynced bound")  # the system table's tablet is always synced
                add(self, table, *args, sync=False if chosen else sync, **named)

            LocalStore._add = added  # type: ignore[method-assign]
        case "unsynced copy":
            Copying._sync = lambda self: None  # type: ignore[method-assign]
            finish = Copying.finish

            def finished(self: Copying) -> None:
                self._copy.sync = lambda: None  # type: ignore[method-assign]
                finish(self)

            Copying.finish = finished  # type: ignore[method-assign]
        case "unsynced folders":
            folders._sync_folder = lambda path: None
        case "no mark":
            write = folders._write_durably

            def written(path: Path, text: str) -> None:
                if path.name != "unsynced":
                    write(path, text)

            folders._write_durably = written
        case _:
            raise ValueError(what)


# ------------------------------------------------------------ what must hold afterwards


def verify(folder: Path, known: Sequence[str]) -> None:
    """Open what a power loss left, recover, and assert that all is there that had been reported by then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", perco.errors.PercoWarning)
        trio.run(_verify, folder, known)


def verify_or_refused(folder: Path, known: Sequence[str]) -> None:
    """With durability="process": after a power loss it is refused; or nothing is missing, if it had been closed."""
    boot_id = folders._boot_id
    folders._boot_id = lambda: "another boot"
    try:
        with contextlib.suppress(perco.errors.NeedsCheck):
            verify(folder, known)
    finally:
        folders._boot_id = boot_id


async def _verify(folder: Path, known: Sequence[str]) -> None:
    drawn = max((int(text.split()[1]) for text in known if text.startswith("ts ")), default=0)
    acknowledged = dict.fromkeys(WRITERS, 0)
    for text in known:
        if text.startswith("ack "):
            _, writer, n = text.split()
            acknowledged[writer] = int(n)
    world = World(grown=True)
    as_itself(folder)
    async with perco.open(folder, world.schema, options=perco.Options(seed=1)) as db:
        first = await inside(db).oracle.draw()
        assert first > drawn, f"O1: {first} is handed out, and {drawn} had been"
        with trio.fail_after(60):
            await observe(db)
        for writer in WRITERS:
            await _verify_writer(db, world, writer, acknowledged[writer])
        result = await check(inside(db).driver.store, ts=inside(db).oracle.last, options=CheckOptions(pause_s=0.0))
        assert result.clean, "\n".join(map(str, result.findings))
        assert not result.locks


async def _verify_writer(db: perco.Database, world: World, writer: str, acknowledged: int) -> None:
    async with db.snapshot() as snap:
        column, key = world.cells[0]
        n = await snap.get(column, key.format(writer)) or 0
        assert n >= acknowledged, f"S2: {acknowledged} of {writer} was acknowledged, and found is {n}"
        for column, key in world.cells + (world.later if n > ROUNDS else []):
            found = await snap.get(column, key.format(writer))
            assert found == (world.value(column, n) if n else None), f"T1: {column} of {writer} is not that of {n}"
        doubled = await snap.get(world.double, f"a-{writer}")
        assert doubled == (2 * n if n else None), f"N1: {doubled} is not the double of {n}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *(sys.argv[3:5] + ["power", ""][len(sys.argv) - 3 :]))
