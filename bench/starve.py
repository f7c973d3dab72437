"""Whether a slow observer holds up a fast one.

A fast observer has 50 changes a second, which arrive whether or not earlier ones have been handled. A delay is that
from the intended arrival of a change until its run has committed. The fast observer runs alone, and beside an observer
that waits two seconds for a service, for each of 1 000 changes; new ones come as fast as it handles them. Both are in
one worker with 64 places, on a durable store. The two sides take turns.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import trio

import perco
from bench.harness import Cell, Report, Run, interleaved, percentile

RATE = 50  # changes of the fast observer a second
SECONDS, QUICK_SECONDS = 20.0, 6.0
SLOW_S = 2.0
WAITING = 1_000  # changes of the slow observer
MOST = 2.0


class Program:
    """The observers, and when the fast one's runs have committed."""

    def __init__(self, slow: bool) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
        self.body, self.size = self.docs.column("body", perco.TEXT), self.docs.column("size", perco.INT64)
        self.count = self.docs.column("count", perco.INT64)
        self.schema = perco.Schema(self.docs)
        self.done: dict[str, float] = {}
        self.served = 0

        @self.schema.observe(self.size, id="fast")
        async def fast(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
            txn.set(self.count, change.key, change.value or 0)

        if slow:

            @self.schema.observe(self.body, id="slow")
            async def slow_service(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
                await trio.sleep(SLOW_S)
                self.served += 1

    def ran(self, id: str, key: Any, seconds: float) -> None:
        """Note the time of a commit."""
        if id == "fast":
            self.done[key] = time.perf_counter()


def main(run: Run) -> None:
    """Prints the table and the RESULT line."""
    report = Report("starve", "power")
    facts = run.machine("power (fsync before every answer)")
    seconds = QUICK_SECONDS if run.quick else SECONDS
    with run.scratch() as folder:
        sides = {name: partial(_side, folder, name == "beside", seconds) for name in ("alone", "beside")}
        found = interleaved(run.rounds, sides)
    p50, p99 = (
        {name: Cell(tuple(percentile(each, share) for each, _ in rounds)) for name, rounds in found.items()}
        for share in (0.5, 0.99)
    )
    served = Cell(tuple(each for _, each in found["beside"]))
    names = {"alone": "alone", "beside": f"beside {WAITING:,} changes of a slow one"}
    run.table(
        f"delays of a fast observer, {RATE} changes a second, ms",
        ("the fast observer", "p50 (least - most)", "p99 (least - most)"),
        [(names[name], p50[name], p99[name]) for name in sides],
    )
    run.say(f"meanwhile, the slow one handled {served} changes a second; it may have three quarters of 64 places")
    ratio = p99["beside"].of(p99["alone"])
    report.ratio("fast_p99_beside_slow", ratio)
    report.bars.append(("fast_p99_beside_slow", ratio, "at most", MOST))
    report.figures |= {f"{name}_p99_ms": cell.median for name, cell in p99.items()}
    report.figures["slow_per_s"] = served.median
    run.finish(report, facts)


def _side(folder: Path, slow: bool, seconds: float) -> tuple[list[float], float]:
    """The delays in ms, and the changes a second of the slow observer."""
    return trio.run(_measured, folder / f"store-{time.monotonic_ns()}", slow, seconds)


async def _measured(path: Path, slow: bool, seconds: float) -> tuple[list[float], float]:
    program = Program(slow)
    intended: dict[str, float] = {}
    async with perco.open(path, program.schema) as db, db.worker() as worker, trio.open_nursery() as nursery:
        worker.on_run(program.ran)
        if slow:
            nursery.start_soon(_refill, db, program)
            await trio.sleep(2 * SLOW_S)
        served, began = program.served, time.perf_counter()
        for n in range(int(RATE * seconds)):
            await trio.sleep(max(0.0, began + n / RATE - time.perf_counter()))
            intended[key := f"{'az'[n % 2]} fast {n}"] = began + n / RATE
            nursery.start_soon(_put, db, program.size, {key: n})
        while len(program.done) < len(intended):  # noqa: ASYNC110 - the worker tells of runs by a call
            await trio.sleep(0.01)
        rate = (program.served - served) / (time.perf_counter() - began)
        nursery.cancel_scope.cancel()
    return [1000 * (program.done[key] - at) for key, at in intended.items()], rate


async def _put(db: perco.Database, column: perco.Column[str, Any], values: dict[str, Any]) -> None:
    async def write(txn: perco.Transaction) -> None:
        for key, value in values.items():
            txn.set(column, key, value)

    await db.run(write)


async def _refill(db: perco.Database, program: Program) -> None:
    """Keep the slow observer's changes at their number."""
    written = 0
    while True:
        some = min(100, WAITING + program.served - written)
        if some > 0:
            keys = range(written, written + some)
            await _put(db, program.body, {f"{'aZz'[n % 3]} slow {n}": "text" for n in keys})
            written += some
        else:
            await trio.sleep(0.1)
