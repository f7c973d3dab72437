"""Computes from what rate of changes on a batch costs less CPU time than observers. No I/O.

A run of the batch over n rows takes a + b n, of time and of CPU time. If it begins every `every_s` seconds, it uses
its CPU time divided by that: some number of cores. A change that comes at any moment waits for half of `every_s` in the
median until the next run begins, and for `every_s` at most; then the run has to end.

Observers use a number of cores that depends on the rate: that of an idle worker, and more for each change. At higher
rates, changes share transactions and fsyncs, so a change costs less. Between the rates that were measured, the number
of cores is on a straight line.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from perco.errors import UsageError


@dataclass(frozen=True, slots=True)
class Line:
    """The cost of a run over n rows, in seconds: `fixed` + `per_row` n. `doubt`: the standard error of `per_row`."""

    fixed: float
    per_row: float
    doubt: float = 0.0

    def at(self, rows: float) -> float:
        """Of a run over so many rows."""
        return self.fixed + self.per_row * rows

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Line:
        """The line of least squares through (rows, seconds). If that would take less than nothing for no rows, or
        become shorter with more rows, it is the nearest line that does not. Raises: UsageError for a single size."""
        found = list(points)
        if len({rows for rows, _ in found}) < 2:
            raise UsageError("a line needs runs over at least two numbers of rows")
        slope, fixed = statistics.linear_regression(*zip(*found, strict=True))
        if fixed < 0:
            fixed, slope = 0.0, sum(x * y for x, y in found) / sum(x * x for x, _ in found)
        elif slope < 0:
            fixed, slope = statistics.fmean(y for _, y in found), 0.0
        missed = sum((fixed + slope * x - y) ** 2 for x, y in found) / max(len(found) - 2, 1)
        middle = statistics.fmean(x for x, _ in found)
        return cls(fixed, slope, math.sqrt(missed / sum((x - middle) ** 2 for x, _ in found)))


@dataclass(frozen=True, slots=True)
class Curve:
    """How many cores observers use at each rate, in changes a second: points with ascending rates, the first at rate 0,
    the last at the saturation. A higher rate never uses less."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def through(cls, idle: float, points: Iterable[tuple[float, float]]) -> Curve:
        """From the cores of an idle worker, and (rate, cores). Of several measurements of a rate, the median counts."""
        by: dict[float, list[float]] = {}
        for rate, cores in points:
            by.setdefault(rate, []).append(cores)
        rates = sorted(by)
        cores_of = accumulate([idle, *(statistics.median(by[rate]) for rate in rates)], max)
        return cls(tuple(zip([0.0, *rates], cores_of, strict=True)))

    @property
    def saturation(self) -> float:
        """The highest rate that was sustained."""
        return self.points[-1][0]

    def cores_at(self, per_s: float) -> float | None:
        """None: the rate is not sustained."""
        if per_s > self.saturation:
            return None
        at = bisect_left(self.points, per_s, key=lambda point: point[0])
        if at == 0:
            return self.points[0][1]
        (x0, y0), (x1, y1) = self.points[at - 1 : at + 1]
        return y0 + (y1 - y0) * (per_s - x0) / (x1 - x0)

    def rate_at(self, cores: float) -> float | None:
        """The rate from which on observers use more than so many cores; None: at no rate that they sustain."""
        if cores < self.points[0][1]:
            return 0.0
        for (x0, y0), (x1, y1) in pairwise(self.points):
            if y1 > cores:
                return x0 + (x1 - x0) * (cores - y0) / (y1 - y0)
        return None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Observers, and a batch that begins every `every_s` seconds. Times in seconds.

    Attributes:
        batch_cores: that the batch uses on average.
        batch_median_s, batch_worst_s: how long a change waits until the batch shows it.
        crossover_per_s: the rate from which on the batch costs less CPU time; None: at no rate that observers sustain.
        crossover_low, crossover_high: the same for the rounds that favor the batch most, and least.
    """

    every_s: float
    back_to_back: bool
    batch_cores: float
    batch_median_s: float
    batch_worst_s: float
    crossover_per_s: float | None
    crossover_low: float | None
    crossover_high: float | None


@dataclass(frozen=True, slots=True)
class Costs:
    """The measured costs, for a data set of some size.

    Attributes:
        rows: of the data set; `measured`: of the largest run that was measured.
        curve, low, high: the cores of observers: by the median of the rounds, the least, and the most.
        run_s, run_cpu_s: time and CPU time of a run of the batch over all rows.
        run_cpu_low, run_cpu_high: what the CPU time may also be, as the runs differ from each other.
    """

    rows: int
    measured: int
    curve: Curve
    low: Curve
    high: Curve
    run_s: float
    run_cpu_s: float
    run_cpu_low: float
    run_cpu_high: float

    def same_cost_s(self, per_s: float) -> float | None:
        """How often a batch begins that costs as much CPU time as observers at this rate, in seconds; None: they do not
        sustain it, or even a batch that runs back to back costs less."""
        cores = self.curve.cores_at(per_s)
        if not cores:
            return None
        every = self.run_cpu_s / cores
        return every if every >= self.run_s else None

    def share_of(self, comparison: Comparison) -> float | None:
        """The part of the rows that a run of this batch finds changed, at the rate from which on it costs less."""
        rate = comparison.crossover_per_s
        return None if rate is None else rate * comparison.every_s / self.rows

    def share_per_h(self, per_s: float) -> float:
        """The part of the rows that changes within an hour."""
        return per_s * 3600 / self.rows

    def within(self, delay_s: float) -> float:
        """How often the batch has to begin so that it shows each change after `delay_s` at most, in seconds.

        Raises: UsageError if it cannot.
        """
        if delay_s < 2 * self.run_s:
            raise UsageError(
                f"a batch cannot show every change within {delay_s:g} s: a run takes {self.run_s:.3g} s, and a change "
                "that comes just after its beginning waits for two runs"
            )
        return delay_s - self.run_s

    def against(self, every_s: float | None = None) -> Comparison:
        """Compare with a batch that begins every so many seconds; None: as soon as the run before it has ended.

        Raises: UsageError if a run takes longer than that.
        """
        every = self.run_s if every_s is None else every_s
        if every < self.run_s:
            raise UsageError(f"a batch cannot begin every {every:g} s: a run takes {self.run_s:.3g} s")
        return Comparison(
            every_s=every,
            back_to_back=every_s is None,
            batch_cores=self.run_cpu_s / every,
            batch_median_s=every / 2 + self.run_s,
            batch_worst_s=every + self.run_s,
            crossover_per_s=self.curve.rate_at(self.run_cpu_s / every),
            crossover_low=self.high.rate_at(self.run_cpu_low / every),
            crossover_high=self.low.rate_at(self.run_cpu_high / every),
        )
