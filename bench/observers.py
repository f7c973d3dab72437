"""How fast a chain of observers follows its writes, and how many runs it commits.

Three observers: each reads the cell that was written and writes one cell of another row. If that row is in the same
tablet, a run takes one write transaction of LMDB: it commits in one step. If the row is in another table, and so in
another tablet with a writer of its own, a run takes three, one after another: the prewrite there, the commit of the
ack, and the commit of the cell that the next observer waits for. Latency is measured with tables apart, saturation both
ways, and in one tablet also with up to 16 runs in a transaction (`batch=`).

Latency is the time from the first write's acknowledgement to the last observer's commit, with ten first writes a
second, at random times, whether or not the chain keeps up. Saturation is the rate of commits while more changes wait
than the worker can run; changes that collapse into one run count once.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

import perco
from bench.harness import Cell, Report, Run, percentile
from bench.overhead import bare_puts
from perco.database.inside import local_owner

VALUE = b"x" * 100
CHAIN = 3
PER_SECOND = 10.0
OPEN_LOOP_S, QUICK_OPEN_LOOP_S = 60.0, 25.0  # the quick run must end within a minute
P50_MS_MOST, COMMITS_PER_S_LEAST = 10.0, 20_000.0
WARM_S = 0.5
ROUND_S = 2.0
BACKLOG = 15_000  # changes that wait when a round begins
BACKLOG_MIN = 1000  # with fewer, the round ends, before the worker runs dry
ROWS = 1 << 17  # that the backlog is spread over; some are written again before their run, and collapse
IN_FLIGHT = 512
BATCH = 16  # runs that share a transaction, in the rounds with batches

Txn = perco.Transaction
Change = perco.Change[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Chain:
    """The tables' columns, first to last, and the schema with the observers on all but the last."""

    columns: tuple[perco.Column[bytes, bytes], ...]
    schema: perco.Schema

    @property
    def last(self) -> str:
        """The id of the last observer."""
        return f"o{CHAIN - 1}"


def chain(*, apart: bool = True, batch: int = 1) -> Chain:
    """The chain's columns in one table, or `apart`, each in a table of its own. `batch`: of the observers."""
    tables = [perco.Table(f"t{i}") for i in range(CHAIN + 1 if apart else 1)]
    columns = tuple(tables[i if apart else 0].column(f"value{i}", perco.BYTES) for i in range(CHAIN + 1))
    schema = perco.Schema(*tables)
    for i in range(CHAIN):
        schema.observe(columns[i], id=f"o{i}", batch=batch)(_observer(columns[i], columns[i + 1]))
    return Chain(columns, schema)


def _observer(here: perco.Column[bytes, bytes], there: perco.Column[bytes, bytes]) -> Callable[[Txn, Change], Any]:
    async def observe(txn: Txn, change: Change) -> None:
        value = await txn.get(here, change.key)
        assert value is not None
        txn.set(there, onward(change.key), value)

    return observe


def onward(key: bytes) -> bytes:
    """The row that the next observer finds: elsewhere in its table."""
    return key[1:] + key[:1]


def end_of(key: bytes) -> bytes:
    """The row of the last observed cell of a chain that began at `key`."""
    for _ in range(CHAIN - 1):
        key = onward(key)
    return key


# ------------------------------------------------------------------ latency


async def latencies(
    path: Path | str, seconds: float, seed: int, per_second: float = PER_SECOND, warm: int = 20, *, apart: bool = True
) -> list[float]:
    """Seconds from the first commit's acknowledgement to the last observer's commit, one for each first write."""
    parts, rng = chain(apart=apart), random.Random(seed)
    acknowledged: dict[bytes, float] = {}
    ended: dict[bytes, float] = {}

    def on_run(id: str, key: bytes, _: float) -> None:
        if id == parts.last:
            ended[key] = trio.current_time()

    async def first(key: bytes) -> None:
        async with db.transaction() as txn:
            txn.set(parts.columns[0], key, VALUE)
        acknowledged[end_of(key)] = trio.current_time()

    async with perco.open(path, parts.schema) as db, db.worker() as worker:
        for _ in range(warm):
            await first(rng.randbytes(16))
        await db.wait_idle(timeout=60)
        acknowledged.clear()
        worker.on_run(on_run)
        async with trio.open_nursery() as nursery:
            at = trio.current_time()
            until = at + seconds
            while (at := at + rng.expovariate(per_second)) < until:
                await trio.sleep_until(at)
                nursery.start_soon(first, rng.randbytes(16))
        await db.wait_idle(timeout=60)
    return [ended[key] - began for key, began in acknowledged.items()]


# ------------------------------------------------------------------ saturation


@dataclass(frozen=True, slots=True)
class Rate:
    """One round: observer commits per second, how many more changes collapsed into them, and the CPU time of each."""

    commits_per_s: float
    collapsed: int
    cpu_us: float


class Saturated:
    """A store whose observers always have a backlog."""

    def __init__(self, db: perco.Database, parts: Chain, seed: int, backlog: int, in_flight: int) -> None:
        self._db, self._parts, self._rng = db, parts, random.Random(seed)
        self._rows = [self._rng.randbytes(16) for _ in range(ROWS)]
        self._backlog, self._in_flight = backlog, in_flight

    async def fill(self) -> None:
        """Write until the backlog is full."""
        while (missing := self._backlog - local_owner(self._db).idle.pending()) > 0:
            async with self._db.transaction() as txn:
                for _ in range(min(missing, 500)):
                    txn.set(self._parts.columns[0], self._rng.choice(self._rows), VALUE)

    async def round(self, warm_s: float, seconds: float, least: int) -> Rate:
        """Commits per second while more than `least` changes wait."""
        await self.fill()
        async with self._db.worker(concurrency=self._in_flight) as worker:
            await self._busy(warm_s, least)
            before, began, cpu = _counts(worker), time.perf_counter(), time.process_time()
            await self._busy(seconds, least)
            after, ended, cpu = _counts(worker), time.perf_counter(), time.process_time() - cpu
        commits = after[0] - before[0]
        return Rate(commits / (ended - began), after[1] - before[1], 1e6 * cpu / max(commits, 1))

    async def _busy(self, seconds: float, least: int) -> None:
        """Wait for some seconds, or until no more than `least` changes wait."""
        until = trio.current_time() + seconds
        while (left := until - trio.current_time()) > 0:
            if local_owner(self._db).idle.pending() <= least:
                return
            await trio.sleep(min(left, 0.01))


def _counts(worker: perco.WorkerHandle) -> tuple[int, int]:
    counts = worker.statistics().values()
    return sum(each.commits for each in counts), sum(each.collapsed for each in counts)


async def saturation(
    folder: Path | str,
    rounds: int,
    between: Callable[[], None],
    *,
    warm_s: float = WARM_S,
    seconds: float = ROUND_S,
    backlog: int = BACKLOG,
    least: int = BACKLOG_MIN,
    in_flight: int = IN_FLIGHT,
    apart: bool = False,
    batch: int = 1,
) -> list[Rate]:
    """Rounds on one store; `between` is called before each."""
    parts, found = chain(apart=apart, batch=batch), []
    async with perco.open(folder, parts.schema) as db:
        saturated = Saturated(db, parts, 1, backlog, in_flight)
        for _ in range(rounds):
            between()
            found.append(await saturated.round(warm_s, seconds, least))
    return found


# ------------------------------------------------------------------ the benchmark


@dataclass(frozen=True, slots=True)
class Side:
    """Rounds of one kind, each after one of bare LMDB. `suffix`: of its figures' names."""

    name: str
    suffix: str
    rates: Sequence[Rate]
    bare: Cell

    @classmethod
    def of(cls, folder: Path, rounds: int, name: str, suffix: str, **how: Any) -> Side:
        bare: list[float] = []
        between = lambda: bare.append(bare_puts(folder, 128))  # noqa: E731
        rates = trio.run(partial(saturation, folder / f"store{suffix}", rounds, between, **how))
        return cls(name, suffix, rates, Cell(tuple(bare)))

    @property
    def commits(self) -> Cell:
        return Cell(tuple(rate.commits_per_s for rate in self.rates))

    @property
    def cpu_us(self) -> float:
        return statistics.median(rate.cpu_us for rate in self.rates)


def main(run: Run) -> None:
    report = Report("observers", "power")
    facts = run.machine("power (fsync before every answer)")
    seconds = QUICK_OPEN_LOOP_S if run.quick else OPEN_LOOP_S
    with run.scratch() as folder:
        times = sorted(trio.run(partial(latencies, folder / "latency", seconds, 1)))
        sides = [
            Side.of(folder, run.rounds, "the other row in the same tablet", ""),
            Side.of(folder, run.rounds, "the other row in another table", "_two_tablets", apart=True),
            Side.of(folder, run.rounds, f"the same tablet, batches of {BATCH}", "_batched", batch=BATCH),
        ]
    _tell_latency(run, report, times, seconds)
    _tell_saturation(run, report, sides)
    if not run.quick:
        _draw(run, times)
    run.finish(report, facts)


def _tell_latency(run: Run, report: Report, times: Sequence[float], seconds: float) -> None:
    milliseconds = {f"p{share:g}": 1000 * percentile(times, share / 100) for share in (10, 50, 90, 99)}
    run.say(
        f"A chain of {CHAIN} observers, {PER_SECOND:g} first writes a second for {seconds:g} s"
        f"{f' (--quick; else {OPEN_LOOP_S:g} s)' if run.quick else ''}: {len(times)} chains."
    )
    run.table(
        "from the first commit to the last, ms",
        ["durable", *milliseconds],
        [["", *(f"{value:.2f}" for value in milliseconds.values())]],
    )
    report.figures["chain_p50_ms"] = milliseconds["p50"]
    report.figures["chain_p99_ms"] = milliseconds["p99"]
    report.bars.append(("chain_p50_ms", milliseconds["p50"], "at most", P50_MS_MOST))


def _tell_saturation(run: Run, report: Report, sides: Sequence[Side]) -> None:
    bare = Cell(tuple(rate for side in sides for rate in side.bare.rounds))
    run.table(
        f"saturation, durable, {IN_FLIGHT} runs in flight, per second",
        ("", "median (least - most)", "of bare", "CPU, us"),
        [
            ("bare LMDB, 128 puts per write transaction", bare, "", ""),
            *(
                (
                    f"observer commits: {side.name}",
                    side.commits,
                    f"{side.commits.of(side.bare):.3f}",
                    f"{side.cpu_us:.0f}",
                )
                for side in sides
            ),
        ],
    )
    for side in sides:
        report.figures[f"observer_commits_per_s{side.suffix}"] = side.commits.median
        report.figures[f"observer_cpu_us{side.suffix}"] = side.cpu_us
    report.figures["bare_puts_per_s_128"] = bare.median
    report.figures["collapsed"] = sum(rate.collapsed for side in sides for rate in side.rates)
    for side in (sides[0], sides[-1]):
        name = f"observer_commits_per_s{side.suffix}"
        report.bars.append((name, side.commits.median, "at least", COMMITS_PER_S_LEAST))


def _draw(run: Run, times: Sequence[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.6))
    milliseconds = [1000 * value for value in times]
    axis.plot(milliseconds, [(i + 1) / len(times) for i in range(len(times))], color="#2563eb", linewidth=1.8)
    for share, height in ((0.5, 0.04), (0.99, 0.14)):
        value = percentile(milliseconds, share)
        axis.axvline(value, color="#b0b7c3", linewidth=1, linestyle="--", zorder=0)
        axis.annotate(
            f"p{100 * share:g}  {value:.1f} ms",
            (value, height),
            xytext=(4, 0),
            textcoords="offset points",
            backgroundcolor="white",
            color="#475569",
        )
    axis.set_xscale("log")
    axis.set_xticks([n * 10**e for e in range(5) for n in (1, 2, 5)])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_xlim(milliseconds[0] / 1.2, milliseconds[-1] * 1.2)
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("ms from the acknowledged first write to the last commit")
    axis.set_ylabel("share of chains")
    axis.set_title(f"A chain of {CHAIN} observers, durable, {PER_SECOND:g} first writes a second", loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    run.figure(figure, "observers")
    pyplot.close(figure)
