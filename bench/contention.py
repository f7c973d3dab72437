"""The cost of conflicts: many transactions that want the same few cells.

Each transaction adds one to some of 10 000 rows, with a fixed number of transactions in flight. Zipf's law chooses the
rows: with 0 all are equally likely, with 1.2 every fifth draw is the same row. Transactions that conflict on a cell
queue for it (`perco/txn/turns.py`); for the highest contention, the same load also runs with random pauses alone. No
update may be lost: the rows must add up to what was committed. Calls that are unfinished when the round ends count in
the percentiles with the time that they have waited.

Then one counter: callers in a closed loop add one to the same cell, by a transaction that reads and writes it, or by
`db.add`, of which those that wait share a commit.

Then one hot cell that counts every change. *Strong*: one observer adds one to it. *Weak*: the observer is split in two,
as in the paper. The first writes a separate row for each change and raises a signal, which never conflicts. The second
runs on the signal, once for many changes, and counts the rows.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import trio

import perco
from bench.against.load import Load, Measured, Zipf, medians, rates
from bench.harness import Report, Run, interleaved

ROWS = 10_000
SECONDS = 1.0  # of a round; twice that with a thousand or more in flight, because many calls take longer
SKEWS, COUNTS, IN_FLIGHT = (0.0, 0.6, 0.9, 1.2), (1, 2, 10), (1, 16, 128, 1024)
CHANGES_STRONG, CHANGES_WEAK = 1000, 6000  # rates are compared
CALLERS = 128  # of one counter
OBSERVERS = 256  # runs of observers in flight
WEAK_LEAST = 5.0
ATTEMPTS = 1_000_000  # so no call gives up: the benchmark measures how long each takes


@dataclass(frozen=True, slots=True)
class Scene:
    """How many transactions are in flight, how many rows each changes, and how unevenly the rows are chosen."""

    skew: float
    rows: int
    in_flight: int
    turns: bool = True

    @property
    def seconds(self) -> float:
        return SECONDS if self.in_flight < 1000 else 2 * SECONDS

    @property
    def key(self) -> str:
        return f"zipf{self.skew:g}_rows{self.rows}_in_flight{self.in_flight}{'' if self.turns else '_no_turns'}"


WORST = Scene(1.2, 10, 1024)
QUICK = (Scene(0.0, 1, 128), Scene(0.9, 2, 128), Scene(1.2, 1, 128), WORST, Scene(1.2, 10, 1024, turns=False))


def scenes() -> list[Scene]:
    """All scenes, and some without turns for comparison."""
    grid = [Scene(skew, rows, n) for rows in COUNTS for skew in SKEWS for n in IN_FLIGHT]
    return [*grid, *(Scene(1.2, rows, 1024, turns=False) for rows in COUNTS)]


# ------------------------------------------------------------------ transactions

table = perco.Table("t", key=perco.INT64)
count = table.column("count", perco.INT64)
schema = perco.Schema(table)


def load(scene: Scene, folder: Path) -> Load:
    """One round, on a new store."""
    path = folder / f"contention-{random.getrandbits(32):x}"
    try:
        return trio.run(under, scene, path, scene.seconds)
    finally:
        shutil.rmtree(path, ignore_errors=True)


async def under(scene: Scene, path: Path | str, seconds: float) -> Load:
    """Run the callers for some seconds, then check that no update is lost."""
    zipf, found, committed = Zipf(ROWS, scene.skew), Load(), 0
    retry = perco.options.RetryOptions(attempts=ATTEMPTS)
    options = perco.Options(retry=retry if scene.turns else replace(retry, turn_s=0.0))

    async def add(txn: perco.Transaction, keys: Sequence[int], last: list[perco.Transaction]) -> None:
        found.retries += bool(last)
        last[:] = [txn]
        for key, value in (await txn.get_many(count, keys)).items():
            txn.set(count, key, (value or 0) + 1)

    async def caller(db: perco.Database, number: int) -> None:
        nonlocal committed
        rng = random.Random(number)
        while True:
            last: list[perco.Transaction] = []
            began = time.perf_counter()
            try:
                await db.run(add, zipf.distinct(rng, scene.rows), last)
                found.times.append(time.perf_counter() - began)
            except trio.Cancelled:
                found.unfinished.append(time.perf_counter() - began)
                raise
            finally:
                committed += bool(last) and last[0].outcome == "committed"

    async with perco.open(path, schema, options=options) as db:
        with Measured(found), trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for number in range(scene.in_flight):
                    nursery.start_soon(caller, db, number)
        async with db.snapshot() as snap:
            total = sum([row[count] or 0 async for row in snap.scan(table)])
    must_add_up(total, committed, scene.rows)
    return found


def must_add_up(total: int, committed: int, rows: int) -> None:
    """Raises: AssertionError if updates were lost, or made twice."""
    if total != rows * committed:
        raise AssertionError(f"{committed} transactions on {rows} rows each have added {total}")


# ------------------------------------------------------------------ one counter


def counter(adds: bool, folder: Path) -> Load:
    """One round, on a new store."""
    path = folder / f"counter-{random.getrandbits(32):x}"
    try:
        return trio.run(counting, adds, path, SECONDS)
    finally:
        shutil.rmtree(path, ignore_errors=True)


async def counting(adds: bool, path: Path | str, seconds: float) -> Load:
    """Let the callers add one to the same cell for some seconds, then check that each call counts once. `adds`: by
    `db.add`; otherwise by a transaction."""
    found = Load()
    options = perco.Options(retry=perco.options.RetryOptions(attempts=ATTEMPTS))

    async def bump(txn: perco.Transaction, last: list[perco.Transaction]) -> None:
        found.retries += bool(last)
        last[:] = [txn]
        txn.set(count, 0, (await txn.get(count, 0) or 0) + 1)

    async def caller(db: perco.Database) -> None:
        while not over:
            began = time.perf_counter()
            await (db.add(count, 0, 1) if adds else db.run(bump, []))
            found.times.append(time.perf_counter() - began)

    over = False
    async with perco.open(path, schema, options=options) as db:
        with Measured(found):
            async with trio.open_nursery() as nursery:
                for _ in range(CALLERS):
                    nursery.start_soon(caller, db)
                await trio.sleep(seconds)
                over = True
        async with db.snapshot() as snap:
            must_add_up(await snap.get(count, 0) or 0, found.calls, 1)
    return found


# ------------------------------------------------------------------ strong and weak


@dataclass(frozen=True, slots=True)
class Counted:
    """A schema whose observers count, in one cell, the documents that point at a target."""

    schema: perco.Schema
    target_of: perco.Column[int, str]
    total: perco.Column[str, int]


def strong() -> Counted:
    """One observer, which adds one to the cell."""
    docs, targets = perco.Table("docs", key=perco.INT64), perco.Table("targets", key=perco.TEXT)
    target_of, total = docs.column("target", perco.TEXT), targets.column("total", perco.INT64)
    schema = perco.Schema(docs, targets)

    @schema.observe(target_of, id="count")
    async def add(txn: perco.Transaction, change: perco.Change[int, str]) -> None:
        assert change.value is not None
        txn.set(total, change.value, (await txn.get(total, change.value) or 0) + 1)

    return Counted(schema, target_of, total)


def weak() -> Counted:
    """Two observers: one writes a row for each such document and raises a signal; the other then counts the rows."""
    docs, targets = perco.Table("docs", key=perco.INT64), perco.Table("targets", key=perco.TEXT)
    links = perco.Table("links", key=perco.Tuple(perco.TEXT, perco.INT64))
    target_of, total = docs.column("target", perco.TEXT), targets.column("total", perco.INT64)
    link, grown = links.column("link", perco.INT64), targets.signal("grown")
    schema = perco.Schema(docs, targets, links)

    @schema.observe(target_of, id="note")
    async def note(txn: perco.Transaction, change: perco.Change[int, str]) -> None:
        assert change.value is not None
        txn.set(link, (change.value, change.key), 1)
        txn.signal(grown, change.value)

    @schema.observe(grown, id="count")
    async def add(txn: perco.Transaction, change: perco.Change[str, None]) -> None:
        rows = await txn.scan(links, prefix=(change.key,), columns=[link]).all()
        txn.set(total, change.key, len(rows))

    return Counted(schema, target_of, total)


def changes(make: Callable[[], Counted], many: int, folder: Path, concurrency: int = OBSERVERS) -> Load:
    """One round: `many` changes to one target wait, and all are counted. A `call` is a change."""
    path = folder / f"hot-{random.getrandbits(32):x}"
    try:
        return trio.run(counted, make(), many, path, concurrency)
    finally:
        shutil.rmtree(path, ignore_errors=True)


async def counted(parts: Counted, many: int, path: Path | str, concurrency: int) -> Load:
    """The same, at the path of a new store."""
    found = Load()
    async with perco.open(path, parts.schema) as db:
        async with db.transaction() as txn:
            for key in range(many):
                txn.set(parts.target_of, key, "hot")
        with Measured(found):
            async with db.worker(concurrency=concurrency) as worker:
                await db.wait_idle()
                counts = worker.statistics().values()
        async with db.snapshot() as snap:
            total = await snap.get(parts.total, "hot")
    if total != many:
        raise AssertionError(f"{total} of {many} changes were counted")
    found.retries = sum(each.conflicts for each in counts)
    found.times = [found.seconds] * many
    return found


# ------------------------------------------------------------------ the benchmark


def main(run: Run) -> None:
    report = Report("contention", "power")
    facts = run.machine("power (fsync before every answer)")
    chosen = QUICK if run.quick else scenes()
    with run.scratch() as folder:
        found = interleaved(run.rounds if run.quick else 3, {scene: partial(load, scene, folder) for scene in chosen})
        counters = interleaved(
            run.rounds, {"run": partial(counter, False, folder), "add": partial(counter, True, folder)}
        )
        hot = interleaved(
            run.rounds,
            {
                "strong": partial(changes, strong, CHANGES_STRONG, folder),
                "weak": partial(changes, weak, CHANGES_WEAK, folder),
                "one at a time": partial(changes, strong, CHANGES_STRONG, folder, 1),
            },
        )
    _tell_scenes(run, report, found)
    _tell_counters(run, report, counters)
    _tell_hot(run, report, hot)
    if not run.quick:
        _draw(run, found)
    run.finish(report, facts)


def _tell_scenes(run: Run, report: Report, found: dict[Scene, list[Load]]) -> None:
    rows: list[Sequence[object]] = []
    for scene, loads in found.items():
        retries = median(load.retries_per_call for load in loads)
        p50, p99 = (median(load.ms(share) for load in loads) for share in (0.5, 0.99))
        what = (f"{scene.skew:g}", scene.rows, f"{scene.in_flight}{'' if scene.turns else ', without turns'}")
        rows.append((*what, rates(loads), f"{retries:.2f}", f"{p50:.1f}", f"{p99:.0f}"))
        figures = {"commits_per_s": rates(loads).median, "retries": retries, "p50_ms": p50, "p99_ms": p99}
        report.figures |= {f"{scene.key}_{name}": value for name, value in figures.items()}
    run.table(
        f"read-modify-write of rows out of {ROWS}, durable, retried until it commits",
        ("Zipf", "rows", "in flight", "commits a second (least - most)", "retries each", "p50 ms", "p99 ms"),
        rows,
    )
    alone = next(scene for scene in found if not scene.turns and scene.rows == WORST.rows)
    report.ratio("turns_vs_pauses_zipf1.2_rows10_in_flight1024", rates(found[WORST]).of(rates(found[alone])))


def _tell_counters(run: Run, report: Report, counters: dict[str, list[Load]]) -> None:
    names = {"run": "db.run: read and write it", "add": "db.add"}
    rows: list[Sequence[object]] = []
    for name, loads in counters.items():
        retries = median(load.retries_per_call for load in loads)
        p50, p99, cpu = medians(loads)
        rows.append((names[name], rates(loads), f"{retries:.2f}", f"{p50:.1f}", f"{p99:.1f}", f"{cpu:.0f}"))
        report.figures |= {f"counter_{name}_per_s": rates(loads).median, f"counter_{name}_p99_ms": p99}
    run.table(
        f"one counter, {CALLERS} callers, durable",
        ("", "additions a second (least - most)", "retries each", "p50 ms", "p99 ms", "CPU us each"),
        rows,
    )
    report.ratio("counter_add_vs_run", rates(counters["add"]).of(rates(counters["run"])))


def _tell_hot(run: Run, report: Report, hot: dict[str, list[Load]]) -> None:
    names = {
        "strong": "strong: one observer adds to the cell",
        "weak": "weak: a row of its own and a signal, then a count",
        "one at a time": "strong, with a worker that runs one observer at a time",
    }
    rows = []
    for name, loads in hot.items():
        retries = median(load.retries_per_call for load in loads)
        rows.append((names[name], rates(loads), f"{retries:.2f}"))
        report.figures[f"hot_{name.replace(' ', '_')}_changes_per_s"] = rates(loads).median
        report.figures[f"hot_{name.replace(' ', '_')}_conflicts"] = retries
    run.table(
        f"one hot cell: changes that it is to count, up to {OBSERVERS} observers at a time",
        ("", "changes a second (least - most)", "conflicts each"),
        rows,
    )
    report.ratio("weak_vs_strong", rates(hot["weak"]).of(rates(hot["strong"])), at_least=WEAK_LEAST)


# ------------------------------------------------------------------ the figure

_BLUES = ("#93c5fd", "#60a5fa", "#2563eb", "#1e3a8a")


def _draw(run: Run, found: dict[Scene, list[Load]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(COUNTS), figsize=(11, 6.2), sharex=True, sharey="row")
    for column, rows in enumerate(COUNTS):
        for skew, colour in zip(SKEWS, _BLUES, strict=True):
            mine = [scene for scene in found if scene.turns and (scene.skew, scene.rows) == (skew, rows)]
            x = [scene.in_flight for scene in mine]
            label = f"Zipf {skew:g}"
            commits = [rates(found[scene]).median for scene in mine]
            axes[0][column].plot(x, commits, "o-", color=colour, label=label, markersize=4)
            late = [median(load.ms(0.99) for load in found[scene]) for scene in mine]
            axes[1][column].plot(x, late, "o-", color=colour, label=label, markersize=4)
        alone = next(scene for scene in found if not scene.turns and scene.rows == rows)
        label = f"Zipf {alone.skew:g}, pauses instead of turns"
        late = [median(load.ms(0.99) for load in found[alone])]
        axes[0][column].plot([alone.in_flight], [rates(found[alone]).median], "x", color="#dc2626", label=label)
        axes[1][column].plot([alone.in_flight], late, "x", color="#dc2626", label=label)
        axes[0][column].set_title(f"{rows} row{'s' if rows > 1 else ''} each", loc="left", fontsize=10)
        axes[1][column].set_xlabel("transactions in flight")
    for row, label in enumerate(("commits a second", "p99, ms")):
        axes[row][0].set_ylabel(label)
        for axis in axes[row]:
            axis.set_xscale("log", base=2)
            axis.set_xticks(IN_FLIGHT, [str(n) for n in IN_FLIGHT])
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.grid(color="#e5e7eb", linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Durable read-modify-writes of popular rows out of {ROWS}", x=0.07, ha="left", fontsize=11)
    shown = axes[0][0].get_legend_handles_labels()
    figure.legend(*shown, frameon=False, fontsize=8, loc="lower center", ncols=len(SKEWS) + 1)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    run.figure(figure, "contention")
    pyplot.close(figure)
