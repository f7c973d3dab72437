"""The paper's figure 7: how long a document waits until it is clustered, at 1 to 150 % of the repository an hour.

    python -m bench figure7              repositories of 10^5, 10^6 and 10^7 documents: about an hour
    python -m bench figure7 --quick      10^5 documents, fewer rates

Three sides keep the smallest document of each cluster, for three clusterings (`documents.py`):

    perco       an observer clusters each document when it arrives (`by_perco.py`)
    batch       Spark runs over all documents, again and again (`by_batch.py`)
    streaming   Structured Streaming with its state in RocksDB (`by_streaming.py`)

They use all cores, one after the other; at 1 % an hour, perco and the batch take turns. Each draws its own arrivals,
and all delays count from the intended arrival. At the end, each side clusters the documents that only another one had,
and all three results have to equal that of numpy, down to the last cluster.

The second picture compares CPU time for a document. The batch's CPU time depends on how much of the repository is new
in a run; where the lines cross, both cost the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio

from bench.figure7 import by_batch, by_perco, by_streaming, drawing
from bench.figure7.by_batch import Batch, Cycles
from bench.figure7.by_perco import Clustering, Load
from bench.figure7.by_streaming import Backlog, Streamed
from bench.figure7.documents import Documents, same
from bench.harness import Report, Run

T = TypeVar("T")

SIZES, QUICK_SIZES = (100_000, 1_000_000, 10_000_000), (100_000,)
RATES, QUICK_RATES = (1, 2, 5, 10, 20, 50, 100, 150), (1, 10, 50, 150)  # per cent an hour
BASELINE_RATES, QUICK_BASELINE_RATES = (1, 20, 150), (1, 150)  # of batch and streaming
SECONDS, QUICK_SECONDS = 20.0, 8.0  # of arrivals at a rate; longer if too few arrive
LEAST, QUICK_LEAST = 10, 5  # documents at a rate
ROUNDS = 3
RUNS = 3  # of the batch at a rate
WARM, WARM_LATER = 12, 2  # runs of the batch before those that count: over the first repository, over the others
WARM_TRIGGERS = 3  # of backlogs, before those that count
PIECE = 1_000_000  # documents that one trigger takes at most while the repository is loaded
BACKLOG = 20_000  # documents that wait for a trigger
SHARE = 0.6  # of the saturation, at which delays are judged

RATIO_LEAST = {100_000: 40, 1_000_000: 100, 10_000_000: 1000}  # as the batch's time grows
P50_MS_MOST, SATURATION_LEAST = 10.0, 4000.0
BATCH_LEAST = {100_000: 25_000, 1_000_000: 100_000, 10_000_000: 120_000}  # documents a second of a run
STREAMING_LEAST = 8_000  # documents a second of a backlog's triggers


@dataclass(slots=True)
class Found:
    """The measurements with one repository. Rates are in per cent of it an hour."""

    size: int
    perco: dict[int, list[Load]] = field(default_factory=dict)
    saturated: list[Load] = field(default_factory=list)
    judged: list[Load] = field(default_factory=list)  # at 60 % of each saturation
    batch: dict[int, list[Cycles]] = field(default_factory=dict)
    streaming: dict[int, Streamed] = field(default_factory=dict)
    backlogs: list[Backlog] = field(default_factory=list)

    def per_s(self, rate: int) -> float:
        return rate / 100 * self.size / 3600

    @property
    def saturation(self) -> float:
        """Documents a second."""
        return statistics.median(load.per_s for load in self.saturated)

    @property
    def saturation_rate(self) -> float:
        """Per cent an hour."""
        return self.saturation * 3600 / self.size * 100

    @property
    def perco_cpu_us(self) -> float:
        """Of a document, at 60 % of the saturation."""
        return statistics.median(load.cpu_us for load in self.judged)

    @property
    def run_s(self) -> float:
        """Of the batch over the repository and little more."""
        return statistics.median(run.seconds for cycles in self.batch[1] for run in cycles.runs)

    @property
    def run_cpu_us(self) -> float:
        """Of the same, for each document of the repository."""
        cpu = (run.cpu_s / run.documents for cycles in self.batch[1] for run in cycles.runs)
        return 1e6 * statistics.median(cpu)

    @property
    def streaming_per_s(self) -> float:
        """Documents of a backlog."""
        return statistics.median(each.documents / each.seconds for each in self.backlogs)

    @property
    def streaming_cpu_us(self) -> float:
        """Of a document of a backlog."""
        return statistics.median(1e6 * each.cpu_s / each.documents for each in self.backlogs)

    @property
    def crossover(self) -> float:
        """The share of the repository that has to be new in a run of the batch, so that both cost the same; infinite
        if perco always costs less. A run's cost grows with what is new."""
        more = self.perco_cpu_us - self.run_cpu_us
        return self.run_cpu_us / more if more > 0 else float("inf")

    def perco_s(self, rate: int, share: float) -> float:
        """A percentile of the delay: the median of the rounds."""
        return statistics.median(load.ms(share) for load in self.perco[rate]) / 1000

    def batch_s(self, rate: int, share: float) -> float:
        return statistics.median(cycles.delay_s(share) for cycles in self.batch[rate])

    @property
    def ratio(self) -> float:
        """The median delay of the batch over that of perco, at 1 % an hour: the median of the rounds."""
        pairs = zip(self.batch[1], self.perco[1], strict=True)
        return statistics.median(cycles.delay_s(0.5) / (load.ms(0.5) / 1000) for cycles, load in pairs)


class Perco:
    """The store, which is opened for each measurement: Spark's turns are not to find its threads at work."""

    def __init__(self, store: Path, documents: Documents) -> None:
        self._store, self._documents = store, documents
        self.next = documents.size

    def measure(self, function: Callable[[Clustering], Awaitable[T]]) -> T:
        async def opened() -> T:
            async with by_perco.clustering(self._store, self._documents, self.next) as clustering:
                found = await function(clustering)
                self.next = clustering.next
                return found

        return trio.run(opened)


def main(run: Run) -> None:
    """Prints the tables and the RESULT line, draws the pictures."""
    import pyspark

    report = Report("figure7", "power")
    facts = run.machine("power (perco: fsync before every answer; Spark: none)", {"pyspark": pyspark.__version__})
    every: list[Found] = []
    with run.scratch() as folder, by_batch.session(folder / "spark") as spark:
        for size in QUICK_SIZES if run.quick else SIZES:
            every.append(_measure(run, spark, folder / str(size), size, WARM_LATER if every else WARM))
            _tell(run, every[-1])
    for found in every:
        _note(report, found, f"_1e{len(str(found.size)) - 1}")
    _judge(report, every[-1], f"_1e{len(str(every[-1].size)) - 1}")
    drawing.delays(run, every)
    drawing.cpu(run, every)
    run.finish(report, facts)


# ------------------------------------------------------------------ measuring


def _measure(run: Run, spark: Any, folder: Path, size: int, warm: int) -> Found:
    found, documents, began = Found(size), Documents(size), time.perf_counter()
    perco = Perco(folder / "store", documents)
    folder.mkdir()
    took = trio.run(by_perco.load, folder / "store", documents)
    run.say(f"{size:,} documents: bulk-loaded into perco in {took:.1f} s")
    batch = Batch(spark, folder / "batch", documents)
    for _ in range(warm):
        batch.run()
    seconds, least = (QUICK_SECONDS, QUICK_LEAST) if run.quick else (SECONDS, LEAST)
    for turn in range(ROUNDS):
        sides: list[Callable[[], None]] = [
            lambda: found.perco.setdefault(1, []).append(perco.measure(_arriving(found.per_s(1), seconds, least))),
            lambda: found.batch.setdefault(1, []).append(batch.cycles(found.per_s(1), RUNS)),
        ]
        for side in sides if turn % 2 == 0 else reversed(sides):
            side()
    for rate in (QUICK_RATES if run.quick else RATES)[1:]:
        found.perco[rate] = [perco.measure(_arriving(found.per_s(rate), seconds, least))]
    baseline = QUICK_BASELINE_RATES if run.quick else BASELINE_RATES
    for rate in baseline[1:]:
        found.batch[rate] = [batch.cycles(found.per_s(rate), RUNS)]
    for _ in range(ROUNDS):
        saturated, judged = perco.measure(partial(_saturate, seconds))
        found.saturated.append(saturated)
        found.judged.append(judged)
    with by_streaming.streaming(spark, folder / "streaming", documents) as streaming:
        while streaming.next < size:
            streaming.backlog(min(streaming.next + PIECE, size))
        backlogs = [streaming.backlog(streaming.next + BACKLOG) for _ in range(WARM_TRIGGERS + ROUNDS)]
        found.backlogs = backlogs[WARM_TRIGGERS:]
        for rate in baseline:
            found.streaming[rate] = streaming.arrive(found.per_s(rate), 2 * seconds, least)
        _equal(perco, batch, streaming, documents)
    run.say(f"{size:,} documents: all three results are equal, after {time.perf_counter() - began:.0f} s\n")
    return found


def _arriving(per_s: float, seconds: float, least: int) -> Callable[[Clustering], Awaitable[Load]]:
    async def arriving(clustering: Clustering) -> Load:
        await clustering.warm_up()
        return await clustering.arrive(per_s, seconds, least)

    return arriving


async def _saturate(seconds: float, clustering: Clustering) -> tuple[Load, Load]:
    saturated = await clustering.saturation(seconds)
    return saturated, await clustering.arrive(SHARE * saturated.per_s, seconds)


def _equal(perco: Perco, batch: Batch, streaming: by_streaming.Streaming, documents: Documents) -> None:
    """Give each side what it lacks, and compare the results."""
    end = max(perco.next, batch.next, streaming.next)

    async def rest(clustering: Clustering) -> Any:
        if perco.next < end:
            await clustering.capacity(end - perco.next)
        return await clustering.canonicals()

    wanted = documents.canonicals(end)
    batch.take(end)
    batch.run()
    if streaming.next < end:
        streaming.backlog(end)
    for name, result in (
        ("perco", perco.measure(rest)),
        ("the batch", batch.canonicals()),
        ("Structured Streaming", streaming.canonicals()),
    ):
        if not same(result, wanted):
            raise AssertionError(f"the result of {name} over {end} documents is wrong")


# ------------------------------------------------------------------ telling


def _tell(run: Run, found: Found) -> None:
    run.table(
        f"{found.size:,} documents: seconds from the intended arrival, median (5 % - 95 %)",
        ("an hour", "documents/s", "perco", "batch", "streaming"),
        [
            (
                f"{rate} %",
                f"{found.per_s(rate):.3g}",
                _spread(partial(found.perco_s, rate)) if all(x.sustained for x in loads) else "not sustained",
                _spread(partial(found.batch_s, rate)) if rate in found.batch else "",
                _spread(found.streaming[rate].delay_s) if rate in found.streaming else "",
            )
            for rate, loads in found.perco.items()
        ],
    )
    judged = [f"{statistics.median(load.ms(share) for load in found.judged):.1f}" for share in (0.5, 0.99)]
    run.table(
        f"{found.size:,} documents: how many, and what they cost",
        ("", "documents/s", "% an hour", "CPU of a document, us", ""),
        [
            ("perco, saturated", *_rated(found, found.saturation), f"{found.perco_cpu_us:.0f}", ""),
            (f"perco, at {SHARE:.0%} of that", *_rated(found, SHARE * found.saturation), "", f"p50 {judged[0]} ms"),
            ("", "", "", "", f"p99 {judged[1]} ms"),
            *(
                (f"perco, at {rate} %", *_rated(found, found.per_s(rate)), f"{found.perco[rate][-1].cpu_us:.0f}", "")
                for rate in found.streaming
            ),
            ("batch, a run", "", "", f"{found.run_cpu_us:.1f} of the repository", f"{found.run_s:.2f} s"),
            ("streaming, backlog", *_rated(found, found.streaming_per_s), f"{found.streaming_cpu_us:.0f}", ""),
            *(
                (f"streaming, at {rate} %", *_rated(found, found.per_s(rate)), f"{streamed.cpu_us:.0f}", "")
                for rate, streamed in found.streaming.items()
            ),
        ],
    )
    run.say(f"Batch and perco take the same CPU time where a run finds {found.crossover:.1%} of the repository new.\n")


def _spread(delay_s: Callable[[float], float]) -> str:
    return f"{delay_s(0.5):.3g}  ({delay_s(0.05):.3g} - {delay_s(0.95):.3g})"


def _rated(found: Found, per_s: float) -> Sequence[str]:
    return f"{per_s:.3g}" if per_s < 100 else f"{per_s:.0f}", f"{per_s * 360_000 / found.size:.0f}"


def _note(report: Report, found: Found, suffix: str) -> None:
    fast = report.floor(f"batch_docs_per_s{suffix}", found.size / found.run_s, BATCH_LEAST[found.size])
    flows = report.floor(f"streaming_docs_per_s{suffix}", found.streaming_per_s, STREAMING_LEAST)
    report.ratio(f"batch_vs_perco_median_1pct{suffix}", found.ratio, valid=fast)
    streamed = found.streaming[1].delay_s(0.5) / found.perco_s(1, 0.5)
    report.ratio(f"streaming_vs_perco_median_1pct{suffix}", streamed, valid=flows)
    figures = {
        "p50_ms_1pct": 1000 * found.perco_s(1, 0.5),
        "p50_ms_60pct": statistics.median(load.ms(0.5) for load in found.judged),
        "p99_ms_60pct": statistics.median(load.ms(0.99) for load in found.judged),
        "saturation_docs_per_s": found.saturation,
        "saturation_pct_per_hour": found.saturation_rate,
        "perco_cpu_us": found.perco_cpu_us,
        "batch_run_s": found.run_s,
        "batch_median_s_1pct": found.batch_s(1, 0.5),
        "batch_cpu_us": found.run_cpu_us,
        "streaming_median_s_1pct": found.streaming[1].delay_s(0.5),
        "streaming_docs_per_s": found.streaming_per_s,
        "streaming_cpu_us": found.streaming_cpu_us,
        "crossover_pct": 100 * found.crossover,
    }
    report.figures |= {f"{name}{suffix}": value for name, value in figures.items()}


def _judge(report: Report, found: Found, suffix: str) -> None:
    """Compare the figures of the largest repository, which are also reported without a suffix, with the bars."""
    ratios, figures = report.ratios, report.figures
    for named in (ratios, figures):
        named |= {name.removesuffix(suffix): value for name, value in named.items() if name.endswith(suffix)}
    if ratios["batch_vs_perco_median_1pct"] != "void":
        report.bars.append(("batch_vs_perco_median_1pct", found.ratio, "at least", RATIO_LEAST[found.size]))
    report.bars.append(("p50_ms_60pct", figures["p50_ms_60pct"], "at most", P50_MS_MOST))
    report.bars.append(("saturation_docs_per_s", found.saturation, "at least", SATURATION_LEAST))
