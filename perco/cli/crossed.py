"""The output of `perco crossover`: a table of both ways, a verdict, and the assumptions of the figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from perco.cli.screen import counted, show_fields, show_table
from perco.crossover import Comparison, Costs, Found
from perco.crossover.keeping import Load, percentile
from perco.errors import UsageError
from perco.views import Views

FAR: Final = 100.0  # times the rows that were measured: beyond, the figures of the batch are a guess
_GROWN: Final = 1.5  # times the CPU time of a change, with four times the rows
_DOUBT: Final = 0.3  # of a run's CPU time
_BUSY: Final = 0.8  # of a core: with less, other programs use the machine
_SPANS: Final = (60.0, 600.0, 3600.0, 86400.0)


@dataclass(frozen=True, slots=True)
class Told:
    """The result.

    Args:
        total: the rows of the data set; `per_s`: the rate that was asked for, in changes a second.
        every_s, delay_s: how often the batch would run; within what time each change has to show.
    """

    views: Views
    program: str
    found: Found
    total: int
    per_s: float
    every_s: float | None
    delay_s: float | None

    @property
    def costs(self) -> Costs:
        return self.found.costs(self.total)

    def shows_after_s(self, share: float) -> float:
        """A percentile of perco's delay: at the rate that was asked for; that of changes which come alone, if this rate
        is too low to be measured; at 60 % of the saturation, if it is not sustained."""
        loads = self.found.asked or (self.found.judged if self.per_s > self.found.saturation else [])
        if not loads:
            return percentile(self.found.alone, share)
        return statistics.median(load.delay_s(share) for load in loads)

    def chosen(self) -> Comparison:
        """With the batch that was asked for. Raises: UsageError if no batch can do it."""
        if self.delay_s is not None:
            return self.costs.against(self.costs.within(self.delay_s))
        return self.costs.against(self.every_s)

    def show(self) -> None:
        """Print it."""
        show_fields(self._measured())
        print()
        self._table()
        print()
        for sentence in self.verdict():
            print(sentence)
        print()
        for note in self.notes():
            print(f"- {note}")

    def _measured(self) -> list[tuple[str, str]]:
        found, costs = self.found, self.costs
        changes = [load.cpu_of_change for load in found.judged]
        change = f"{_micro(statistics.median(changes))} ({_micro(min(changes))} - {_micro(max(changes))})"
        largest = max(run.rows for round in found.runs for run in round)
        runs = [run.seconds for round in found.runs for run in round if run.rows == largest]
        run = f"{span(statistics.median(runs))} ({span(min(runs))} - {span(max(runs))})"
        grown = f"; of {self.total} rows, {span(costs.run_s)}" if self.total != largest else ""
        return [
            ("source rows", f"{found.rows} of {self.total}"),
            ("a change with perco", f"{change} of CPU time"),
            ("perco sustains", f"{number(found.saturation)} changes a second, with one worker"),
            ("a run of the batch", f"{run} for {largest} rows{grown}"),
        ]

    def _table(self) -> None:
        rows = [self._perco()]
        for comparison in self.comparisons():
            name = "batch, back to back" if comparison.back_to_back else f"batch, every {span(comparison.every_s)}"
            cost = _cores(comparison.batch_cores)
            shows, worst = span(comparison.batch_median_s), span(comparison.batch_worst_s)
            rows.append((name, shows, worst, cost, self._from(comparison)))
        show_table(("", "shows a change after", "at most", "CPU an hour", "the batch costs less from"), rows)

    def _perco(self) -> Sequence[str]:
        cores = self.costs.curve.cores_at(self.per_s)
        name = f"perco, {self._rate(self.per_s)}"
        if cores is None:
            return name, "not sustained", "", "", ""
        return name, span(self.shows_after_s(0.5)), f"{span(self.shows_after_s(0.99))} (99 %)", _cores(cores), ""

    def comparisons(self) -> list[Comparison]:
        """With batches that run back to back, at usual intervals, and as was asked for."""
        costs = self.costs
        found = [costs.against()] + [costs.against(each) for each in _SPANS if each > costs.run_s]
        with suppress(UsageError):  # the verdict tells of it
            found.append(self.chosen())
        by_span = {each.every_s: each for each in sorted(found, key=lambda each: each.every_s)}
        return list(by_span.values())

    def delays(self) -> list[tuple[float, float]]:
        """The median delay at each rate that was measured, in ascending order."""
        found = self.found
        loads = [found.quiet, found.asked, found.judged, [] if found.saturated is None else [found.saturated]]
        return sorted(
            (statistics.median(load.done_per_s for load in some), statistics.median(load.delay_s(0.5) for load in some))
            for some in loads
            if some
        )

    def _from(self, comparison: Comparison) -> str:
        if comparison.crossover_per_s is None:
            return "no rate that perco sustains"
        if not comparison.crossover_per_s:
            return "any rate"
        low, high = comparison.crossover_low or 0.0, comparison.crossover_high
        most = "more" if high is None else self._percent(high)
        return f"{self._rate(comparison.crossover_per_s)}  ({self._percent(low)} - {most})"

    def _percent(self, per_s: float) -> str:
        return number(100 * self.costs.share_per_h(per_s))

    def _rate(self, per_s: float) -> str:
        return f"{self._percent(per_s)} % an hour ({number(per_s)}/s)"

    def verdict(self) -> list[str]:
        """The result, in a few sentences."""
        costs, found = self.costs, self.found
        rate, cores = self._rate(self.per_s), costs.curve.cores_at(self.per_s)
        most, shows = self._rate(found.saturation), span(self.shows_after_s(0.5))
        try:
            chosen = self.chosen()
        except UsageError:
            every, within = self.every_s, span(self.delay_s or 0.0)
            wanted = f"run every {span(every)}" if every else f"show each change within {within}"
            said = [f"A batch cannot {wanted}: over {self.total} rows, a run takes {span(costs.run_s)}."]
            sustained = f"At {rate}, perco shows a change after {shows} (median)."
            return [*said, sustained if cores is not None else f"One worker does not sustain {rate}, but {most}."]
        batch = "that runs back to back" if chosen.back_to_back else f"that runs every {span(chosen.every_s)}"
        if cores is None:
            after = f"A batch {batch} shows a change after {span(chosen.batch_median_s)} (median)."
            return [f"One worker does not sustain {rate} on this machine, but {most}.", after]
        said = [
            f"At {rate}, perco takes {number(cores / chosen.batch_cores)} times the CPU time of a batch {batch}, and "
            f"shows a change after {shows} instead of {span(chosen.batch_median_s)} (medians)."
        ]
        if chosen.crossover_per_s is None:
            said.append(f"Up to the highest rate that perco sustains, {most}, this batch costs more.")
        elif not chosen.crossover_per_s:
            said.append("This batch costs less at any rate: even a worker that waits takes more.")
        else:
            share, least = number(100 * (costs.share_of(chosen) or 0.0)), self._rate(chosen.crossover_per_s)
            said.append(f"This batch costs less from {least} on: then a run finds {share} % of the rows changed.")
        same = costs.same_cost_s(self.per_s)
        if same is not None:
            waits = span(costs.against(same).batch_median_s)
            said.append(
                f"At {rate}, both cost the same if the batch runs every {span(same)}; it then shows a change after "
                f"{waits}. A batch that runs less often costs less, and shows changes later."
            )
        return said

    def notes(self) -> list[str]:
        """The assumptions of the figures, and the parts of the program that were left out."""
        found, costs = self.found, self.costs
        notes = [
            f"the batch is {found.batch}; perco's CPU time includes the transactions that make the changes",
            f"for {number(self.total / costs.measured)} times the rows that were measured, it is assumed that a change "
            "costs the same, and that each row costs the batch the same",
        ]
        if not found.asked and self.per_s < found.saturation:
            count = len(found.alone)
            notes.append(
                f"at this rate, changes come one at a time: the delay is that of {count} changes that came alone"
            )
        if self.total > FAR * costs.measured:
            notes.append(f"more than {FAR:g} times is too far for good figures: raise --sample and --seconds")
        if costs.run_cpu_high > (1 + _DOUBT) * costs.run_cpu_s:
            low, high = span(costs.run_cpu_low), span(costs.run_cpu_high)
            notes.append(
                f"the batch's runs differ by chance, too: for {self.total} rows, one may as well take {low} or {high} "
                "of CPU time. Raise --sample and --seconds"
            )
        got = sum(run.cpu_s for round in found.runs for run in round) / sum(
            r.seconds for each in found.runs for r in each
        )
        if got < _BUSY:
            notes.append(f"the machine was busy: the batch got {got:.0%} of a core. On a quiet one, delays are shorter")
        if found.early and found.late > _GROWN * found.early:
            notes.append(
                f"a change costs more if there are more rows: {_micro(found.early)} with a quarter of them, "
                f"{_micro(found.late)} with all; perhaps a view reads whole groups. So with {self.total} rows, perco "
                "costs more than is said here"
            )
        if found.rows < found.sampled:
            notes.append(f"{found.rows} of {found.sampled} rows could be loaded in time: for more, raise --seconds")
        if not found.steady:
            notes.append("no rate was sustained steadily, perhaps because of other programs: try again later")
        if self.views.sinks:
            notes.append(f"sinks did not run, and are not in the figures: {', '.join(self.views.sinks)}")
        hand = [id for id, each in self.views.schema.observers.items() if not each.view]
        if hand:
            notes.append(f"observers that do not belong to views did not run: {', '.join(hand)}")
        for id, count in found.called.items():
            notes.append(
                f"{id} was called for {counted(count, 'argument')}, before both ways were measured: both take its "
                "values from where they are stored. A new argument is one call either way, which is not in the figures"
            )
        return notes

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        found, costs = self.found, self.costs
        try:
            comparison = self.chosen()
            chosen: dict[str, Any] | None = {**asdict(comparison), "share": costs.share_of(comparison)}
        except UsageError:
            chosen = None
        cores = costs.curve.cores_at(self.per_s)
        return {
            "program": self.program,
            "equal": found.equal,
            "rows": self.total,
            "measured_rows": found.rows,
            "per_s": self.per_s,
            "sustained": cores is not None,
            "perco": {
                "cores": cores,
                "idle_cores": found.idle,
                "saturation_per_s": found.saturation,
                "cpu_s_of_change": statistics.median(each.cpu_of_change for each in found.judged),
                "delay_p50_s": self.shows_after_s(0.5),
                "delay_p99_s": self.shows_after_s(0.99),
                "alone_s": found.alone,
                "loads": {
                    name: [_plain_load(each) for each in getattr(found, name)] for name in ("quiet", "asked", "judged")
                },
                "points": costs.curve.points,
            },
            "batch": {
                "what": found.batch,
                "run_s": costs.run_s,
                "run_cpu_s": costs.run_cpu_s,
                "run_cpu_low_s": costs.run_cpu_low,
                "run_cpu_high_s": costs.run_cpu_high,
                "runs": [[asdict(run) for run in round] for round in found.runs],
            },
            "chosen": chosen,
            "comparisons": [asdict(each) for each in self.comparisons()],
            "same_cost_every_s": costs.same_cost_s(self.per_s),
            "verdict": " ".join(self.verdict()),
            "notes": self.notes(),
            "seconds": found.seconds,
        }


def _plain_load(load: Load) -> dict[str, float]:
    return {
        "per_s": load.per_s,
        "changes": len(load.delays_s),
        "cores": load.cores,
        "delay_p50_s": load.delay_s(0.5),
        "delay_p99_s": load.delay_s(0.99),
    }


def _micro(seconds: float) -> str:
    return f"{number(1e6 * seconds)} us" if seconds < 0.01 else f"{number(1e3 * seconds)} ms"


def _cores(cores: float) -> str:
    """CPU time of an hour."""
    return f"{number(3600 * cores)} s"


def number(value: float) -> str:
    """With two or three digits that count."""
    if value >= 1000:
        return f"{round(value, -len(str(int(value))) + 3):.0f}"
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def span(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= (2 * size if unit == "days" else size):
            return f"{number(seconds / size)} {unit}"
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(1000 * seconds)} ms"
