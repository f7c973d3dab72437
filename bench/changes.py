"""The cost of a log of changes, and what following it gives.

writes      the same transactions, each of one cell, by 64 tasks at once, durable, into a table with a log and into one
            without, in turns of a fraction of a second
reading     db.changes(since=...) over what was written: a change is a row with one column, decoded, with its value
            before and after; each is a transaction of its own, and the frontier is settled first. Also the same from
            many tablets, and by a client in another process
lag         the time from the moment when a commit is acknowledged until a follower in the same process has the
            transaction, while others are written, a few hundred a second; polled, so that idle stores cost little
owners      a client follows two tables between which money is moved, while the owner, which moves it, is killed with
            SIGKILL again and again, and another takes over: the total must be right after every transaction, and the
            copy equal to the tables at the end
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import trio

import perco
from bench.harness import Cell, Report, Run

TASKS = 64
SLICES = 8  # of each kind, in a round
SLICE = 3_000  # transactions
READ, QUICK_READ = 200_000, 60_000
LAG_S, QUICK_LAG_S = 20.0, 8.0
WRITERS, PAUSE_S = 8, 0.02
KILLS, QUICK_KILLS = 8, 4
ACCOUNTS = 20
FUNDS = 1_000
RATIO_LEAST, PER_S_LEAST, LAG_MS_MOST = 0.95, 100_000, 250.0

_LIFE_S: Final = 1.5  # of an owner


class Cells:
    """A table of numbers, with a log or without."""

    def __init__(self, *, changes: bool, tablets: int = 1) -> None:
        splits = [f"k{i * 100 // tablets:02}" for i in range(1, tablets)]
        self.table = perco.Table("cells", key=perco.TEXT, changes=changes, splits=splits)
        self.n = self.table.column("n", perco.INT64)
        self.schema = perco.Schema(self.table)


class Bank:
    """Two tables with balances; a transfer takes from one and gives to the other."""

    def __init__(self) -> None:
        self.left = perco.Table("left", key=perco.INT64, changes=True)
        self.right = perco.Table("right", key=perco.INT64, changes=True)
        self.balances = [table.column("balance", perco.INT64) for table in (self.left, self.right)]
        self.schema = perco.Schema(self.left, self.right)


async def _write(db: perco.Database, column: perco.Column[str, int], count: int, seed: int) -> float:
    """Write so many cells, each in a transaction of its own; returns the rate per second."""
    left = iter(range(count))
    rng = random.Random(seed)

    async def one(txn: perco.Transaction, key: str, value: int) -> None:
        txn.set(column, key, value)

    async def task() -> None:
        for i in left:
            await db.run(one, f"k{rng.randrange(100):02}/{rng.randrange(1000):03}", i)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(TASKS):
            nursery.start_soon(task)
    return count / (time.perf_counter() - began)


async def _writes(run: Run, report: Report, folder: Path) -> None:
    rates: dict[bool, list[float]] = {True: [], False: []}
    ratios = []
    sides = {changes: Cells(changes=changes) for changes in (False, True)}
    async with (
        perco.open(folder / "without", sides[False].schema) as without,
        perco.open(folder / "with", sides[True].schema) as with_log,
    ):
        stores = {False: without, True: with_log}
        for changes in (False, True):
            await _write(stores[changes], sides[changes].n, SLICE, 0)  # warm up
        for turn in range(run.rounds):
            found: dict[bool, list[float]] = {True: [], False: []}
            for i in range(SLICES):
                for changes in (False, True) if (turn + i) % 2 == 0 else (True, False):
                    found[changes].append(await _write(stores[changes], sides[changes].n, SLICE, turn * SLICES + i))
            for changes, values in found.items():
                rates[changes].append(statistics.median(values))
            ratios.append(statistics.median(a / b for a, b in zip(found[True], found[False], strict=True)))
    with_cell, without_cell = Cell(tuple(rates[True])), Cell(tuple(rates[False]))
    run.table(
        f"transactions of one cell, {TASKS} at once, durable",
        ("", "per second (least - most)"),
        [("without a log", without_cell), ("with a log", with_cell)],
    )
    report.ratio("writes_with_log", statistics.median(ratios), at_least=RATIO_LEAST)
    report.figures.update({"writes_per_s_without_log": without_cell.median, "writes_per_s_with_log": with_cell.median})


async def _take_all(db: perco.Database, table: perco.Table[str], wanted: int) -> tuple[float, float]:
    """Read all changes; returns the rate per second, and per second of this process's CPU time."""
    began, began_cpu = time.perf_counter(), time.process_time()
    found = 0
    async for changes in db.changes(table, since=0):
        found += len(changes.rows)
    assert found == wanted, f"{found} changes were read, and {wanted} were written"
    return found / (time.perf_counter() - began), found / (time.process_time() - began_cpu)


async def _reads(run: Run, report: Report, folder: Path) -> None:
    wanted = QUICK_READ if run.quick else READ
    options = perco.Options(durability="process", vacuum=perco.options.VacuumOptions(on=False))
    rates: dict[str, list[tuple[float, float]]] = {}
    for name, tablets in (("one tablet", 1), ("eight tablets", 8)):
        cells, path = Cells(changes=True, tablets=tablets), folder / f"read-{tablets}"
        async with perco.open(path, cells.schema, options=options) as db:
            await _write(db, cells.n, wanted, 0)
            rates[name] = [await _take_all(db, cells.table, wanted) for _ in range(run.rounds)]
    cells = Cells(changes=True)
    with _serving(folder / "read-1"):
        async with perco.open(folder / "read-1", cells.schema) as db:
            rates["one tablet, by a client"] = [await _take_all(db, cells.table, wanted) for _ in range(run.rounds)]
    rows = [
        (name, Cell(tuple(a for a, _ in each)), Cell(tuple(cpu for _, cpu in each))) for name, each in rates.items()
    ]
    run.table(
        "changes read from the log, with the values before and after: rows of one column, a transaction each",
        ("", "per second (least - most)", "per CPU second of the reader"),
        rows,
    )
    best = rows[0][1].median
    report.figures.update({"changes_per_s": best, "changes_per_cpu_s": rows[0][2].median})
    report.figures["changes_per_s_of_8_tablets"] = rows[1][1].median
    report.figures["changes_per_s_by_client"] = rows[2][1].median
    report.bars.append(("changes_per_s", best, "at least", PER_S_LEAST))


async def _lag(run: Run, report: Report, folder: Path) -> None:
    cells = Cells(changes=True)
    acknowledged: dict[int, float] = {}
    lags: list[float] = []
    seconds = QUICK_LAG_S if run.quick else LAG_S
    async with perco.open(folder / "lag", cells.schema) as db:
        stream = db.changes(cells.table, follow=True)
        began = trio.current_time()

        async def writer(number: int) -> None:
            rng = random.Random(number)
            while trio.current_time() < began + seconds:
                async with db.transaction() as txn:
                    txn.set(cells.n, f"k{number:02}", rng.randrange(1000))
                acknowledged[txn.commit_ts] = time.perf_counter()
                await trio.sleep(rng.uniform(0, 2 * PAUSE_S))

        async def follow() -> None:
            async for changes in stream:
                now = time.perf_counter()
                # A follower may have a transaction before the task that wrote it runs again.
                lags.append(max(0.0, now - acknowledged.get(changes.commit_ts, now)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            async with trio.open_nursery() as writers:
                for number in range(WRITERS):
                    writers.start_soon(writer, number)
            await trio.sleep(1.0)
            nursery.cancel_scope.cancel()
        assert len(lags) >= len(acknowledged) - WRITERS, "the follower has missed transactions"
    ms = sorted(1000 * lag for lag in lags)
    p50, p99 = ms[len(ms) // 2], ms[len(ms) * 99 // 100]
    run.table(
        f"from the acknowledgement of a commit to a follower, {len(acknowledged) / seconds:.0f} commits a second",
        ("p50 ms", "p99 ms", "most"),
        [(f"{p50:.1f}", f"{p99:.1f}", f"{ms[-1]:.1f}")],
    )
    report.figures.update({"frontier_lag_p50_ms": p50, "frontier_lag_p99_ms": p99})
    report.bars.append(("frontier_lag_p99_ms", p99, "at most", LAG_MS_MOST))


# ------------------------------------------------------------------ owners that are killed


@contextmanager
def _serving(folder: Path) -> Iterator[None]:
    """`perco serve` of a folder, in a process of its own."""
    command = [sys.executable, "-m", "perco", "serve", str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert child.stdout is not None
        child.stdout.readline()  # it is open
        yield
    finally:
        child.terminate()
        child.wait()


async def move_money(folder: Path) -> None:
    """The owner's process: moves money from table to table until it is killed."""
    bank, rng = Bank(), random.Random()

    async def transfer(txn: perco.Transaction) -> None:
        from_, to = rng.sample(bank.balances, 2)
        source, target, amount = rng.randrange(ACCOUNTS), rng.randrange(ACCOUNTS), rng.randrange(1, 50)
        for column, key, change in ((from_, source, -amount), (to, target, amount)):
            txn.set(column, key, (await txn.get(column, key) or 0) + change)

    async def task() -> None:
        while True:
            await db.run(transfer)

    async with perco.open(folder, bank.schema) as db, trio.open_nursery() as nursery:
        print("open", flush=True)
        for _ in range(8):
            nursery.start_soon(task)


def _owner(folder: Path) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-m", "bench.changes", str(folder)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"open\n"
    return child


async def _killed(run: Run, report: Report, folder: Path) -> None:
    bank, path = Bank(), folder / "killed"
    kills = QUICK_KILLS if run.quick else KILLS
    copy: dict[tuple[str, int], int] = {}
    followed = violations = 0
    async with perco.open(path, bank.schema) as db, db.transaction() as txn:
        for key in range(ACCOUNTS):
            txn.set(bank.balances[0], key, FUNDS)
    child = await trio.to_thread.run_sync(_owner, path)
    try:
        async with perco.open(path, bank.schema) as db:  # a client of the owner

            async def follow(since: int, *, until_s: float) -> int:
                nonlocal followed, violations
                stream = db.changes(bank.left, bank.right, since=since, follow=until_s > 0)
                with trio.move_on_after(until_s or 3600):
                    while True:
                        try:
                            async for changes in stream:
                                for row in changes.rows:
                                    old = copy.get((row.table, row.key))
                                    violations += row.before["balance"] != old
                                    copy[row.table, row.key] = row.after["balance"]
                                violations += sum(copy.values()) != ACCOUNTS * FUNDS
                                followed += 1
                            break
                        except (perco.Unavailable, perco.TransientError):
                            await trio.sleep(0.05)
                return stream.frontier

            since = 0
            for _ in range(kills):
                since = await follow(since, until_s=_LIFE_S)
                child.kill()
                child.wait()
                child = await trio.to_thread.run_sync(_owner, path)
            since = await follow(since, until_s=_LIFE_S)
    finally:
        child.kill()
        child.wait()
    async with perco.open(path, bank.schema) as db:
        async for changes in db.changes(bank.left, bank.right, since=since):
            copy.update({(row.table, row.key): row.after["balance"] for row in changes.rows})
            followed += 1
            violations += sum(copy.values()) != ACCOUNTS * FUNDS
        async with db.snapshot() as snap:
            there: dict[tuple[str, Any], Any] = {}
            for column in bank.balances:
                there.update({(column.table.name, row.key): row[column] async for row in snap.scan(column.table)})
    violations += there != copy
    run.table(
        "money moved between two tables, while their owner is killed; followed by a client",
        ("transactions followed", "kills", "times that the total, a value before, or the copy at the end was wrong"),
        [(followed, kills, violations)],
    )
    report.figures.update({"transactions_followed": followed, "kills": kills, "violations": violations})
    report.bars.append(("violations", violations, "at most", 0))


def main(run: Run) -> None:
    report = Report("changes", "power; reading: process")
    facts = run.machine("power")
    with run.scratch() as folder:
        trio.run(_writes, run, report, folder)
        trio.run(_reads, run, report, folder)
        trio.run(_lag, run, report, folder)
        trio.run(_killed, run, report, folder)
    run.finish(report, facts)


if __name__ == "__main__":
    trio.run(move_money, Path(sys.argv[1]))
