"""The cost of knowing how far observers lag behind, while a million changes wait.

A million changes wait for an observer, and a few for another one. `db.lag()` is asked again and again, as a scrape of
metrics or a status page would. Few changes are counted at each call; many are counted by a task in the background, and
calls get what it has found last. A program that writes in transactions meanwhile is compared with one that does not
ask; they take turns. Beside: `db.waiting()`, which counts all changes at each call.
"""

from __future__ import annotations

import time
from pathlib import Path

import trio

import perco
from bench.harness import Cell, Report, Run, percentile

MANY, QUICK_MANY = 1_000_000, 100_000
FEW = 10
PER_TRANSACTION = 2_000
EVERY_S = 0.01
SECONDS = 5.0  # of transactions, of a round
MOST_MS, LEAST = 1.0, 0.9


class Program:
    def __init__(self) -> None:
        self.docs = perco.Table("docs", key=perco.INT64)
        self.body, self.rare = self.docs.column("body", perco.INT64), self.docs.column("rare", perco.INT64)
        self.note = self.docs.column("note", perco.INT64)
        self.schema = perco.Schema(self.docs)

        @self.schema.observe(self.body, id="many")
        async def many(txn: perco.Transaction, change: perco.Change[int, int]) -> None: ...

        @self.schema.observe(self.rare, id="few")
        async def few(txn: perco.Transaction, change: perco.Change[int, int]) -> None: ...


def main(run: Run) -> None:
    """Prints the table and the RESULT line."""
    report = Report("lag", "process")
    facts = run.machine("process (no fsync)")
    with run.scratch() as folder:
        trio.run(_measured, run, report, folder / "store", QUICK_MANY if run.quick else MANY)
    run.finish(report, facts)


async def _measured(run: Run, report: Report, path: Path, many: int) -> None:
    program = Program()
    options = perco.Options(durability="process")
    async with perco.open(path, program.schema, options=options) as db:
        await _fill(db, program, many)
    per_s: dict[str, list[float]] = {"asking": [], "not asking": []}
    lag_ms: list[float] = []
    worst_ms: list[float] = []
    first_s: list[float] = []
    waiting_s: list[float] = []
    for turn in range(run.rounds):
        for name in per_s if turn % 2 == 0 else reversed(per_s):
            called: list[float] | None = [] if name == "asking" else None
            async with perco.open(path, program.schema, options=options) as db:
                began = time.perf_counter()
                if called is None:
                    assert (await db.waiting())["many"] == many
                    waiting_s.append(time.perf_counter() - began)
                else:
                    found = await db.lag()
                    first_s.append(time.perf_counter() - began)
                    assert (found["many"].waiting, found["few"].waiting) == (many, FEW)
                per_s[name].append(await _transactions(db, program, called))
            if called is not None:
                lag_ms.append(percentile(called, 0.5))
                worst_ms.append(percentile(called, 0.99))
    cells = {name: Cell(tuple(each)) for name, each in per_s.items()}
    run.table(
        f"while {many:,} changes wait",
        ("", "ms (least - most)"),
        [
            ("db.lag(), p50", Cell(tuple(lag_ms))),
            ("db.lag(), p99", Cell(tuple(worst_ms))),
            ("the first db.lag()", Cell(tuple(1000 * each for each in first_s))),
            ("db.waiting(), which counts each time", Cell(tuple(1000 * each for each in waiting_s))),
        ],
    )
    run.table(
        "transactions a second of one task",
        ("", "per second (least - most)"),
        list(cells.items()),
    )
    report.figures |= {"lag_ms_1e6": Cell(tuple(lag_ms)).median, "first_ms": 1000 * Cell(tuple(first_s)).median}
    report.bars.append(("lag_ms_1e6", Cell(tuple(lag_ms)).median, "at most", MOST_MS))
    ratio = cells["asking"].of(cells["not asking"])
    report.ratio("transactions_while_asking", ratio, at_least=LEAST)


async def _fill(db: perco.Database, program: Program, many: int) -> None:
    for low in range(0, many, PER_TRANSACTION):
        async with db.transaction() as txn:
            for key in range(low, min(low + PER_TRANSACTION, many)):
                txn.set(program.body, key, key)
    async with db.transaction() as txn:
        for key in range(FEW):
            txn.set(program.rare, key * 1000, key)


async def _transactions(db: perco.Database, program: Program, called: list[float] | None) -> float:
    """Transactions a second, of one task. With `called`, another task asks for the lag, and notes how long, in ms."""
    until, done = time.perf_counter() + SECONDS, 0
    async with trio.open_nursery() as nursery:
        if called is not None:
            nursery.start_soon(_ask, db, called, until)
        while time.perf_counter() < until:
            async with db.transaction() as txn:
                txn.set(program.note, -1 - done % 1000, done)
            done += 1
    return done / SECONDS


async def _ask(db: perco.Database, called: list[float], until: float) -> None:
    while time.perf_counter() < until:
        began = time.perf_counter()
        await db.lag()
        called.append(1000 * (time.perf_counter() - began))
        await trio.sleep(EVERY_S)
