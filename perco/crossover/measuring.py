"""Measures both ways in turn, on the same rows, and checks that they give the same views.

load         rows of the sample, in transactions, for a share of the time; the first quarter is followed by a backlog
             of changes, which shows whether changes cost more when there are more rows
idle         the store and its worker, while nothing arrives
saturation   from above the rate of a backlog downwards, until the views follow
rounds       changes at a tenth and at 60 % of the saturation, and at the rate that was asked for; the batch over a
             quarter, a half, and all of the rows
check        the views, against their definition; the sources, against the changes that were made
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from perco.crossover.batching import Batch, Batches, Making, Ran
from perco.crossover.changing import Changes, SourceChange
from perco.crossover.costs import Costs, Curve, Line
from perco.crossover.keeping import Keeper, Load, keeping
from perco.crossover.rows import ROWS_LEAST, SourceRow
from perco.settings import check_options
from perco.views.batch import Results
from perco.views.checking import Checked, check, stored_values
from perco.views.declaring import Views

T = TypeVar("T")

OUT: Final = 0.07  # of the rows, which are not there at the beginning: inserts bring them
WITHIN_S: Final = 0.25  # after the last arrival, the views reflect all changes of a load that is sustained,
ALONE: Final = 3.0  # or after so many times the delay of a change that comes alone
ABOVE: Final = 1.1  # times the rate of a backlog: the first rate that is tried
STEP_DOWN: Final = 0.85
STEPS_MAX: Final = 8
JUDGED: Final = 0.6  # of the saturation
QUIET: Final = 0.1
SHARES: Final = (0.25, 0.5, 1.0)  # of the rows, over which the batch runs
_LOAD, _AT_RATE, _IDLE, _BATCH = 0.3, 0.035, 0.02, 0.25  # of all seconds
_FIRST_ROWS: Final = 64
_LEAST: Final = 5  # changes at a rate

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    seconds: for all measurements, about.
    rounds: how many times each rate is measured, and each size of the batch if there is time.
    seed: of the changes, and of when they arrive.
    """

    seconds: float = 60.0
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self, zero=("seed",))


@dataclass(slots=True)
class Found:
    """All measurements of a comparison.

    Attributes:
        rows: loaded, of `sampled`.
        idle: cores.
        early, late: CPU seconds of a change in a backlog, with a quarter of the rows, and with all.
        alone: the delays of changes each of which came when the views were up to date, in seconds.
        saturated, judged, quiet, asked: loads at the saturation, at 60 % and at a tenth of it, and at the rate that was
            asked for; `asked` is empty if this rate is above the saturation, or too low to be measured.
        steady: False: no load that was tried was sustained; the saturation is what the views did in the last of them.
        runs: of the batch, a list for each round.
        checked: the views, compared with their definition; `rebuilt`: those of the batch, if it is not the definition.
        batch: what the batch is.
        strays: how many source rows differ from what the changes make of them.
        called: for how many arguments each cached function was called, because there was no value.
        seconds: that the measurements took.
    """

    sampled: int
    rows: int = 0
    idle: float = 0.0
    early: float = 0.0
    late: float = 0.0
    alone: list[float] = field(default_factory=list)
    saturated: Load | None = None
    steady: bool = True
    judged: list[Load] = field(default_factory=list)
    quiet: list[Load] = field(default_factory=list)
    asked: list[Load] = field(default_factory=list)
    runs: list[list[Ran]] = field(default_factory=list)
    checked: Checked | None = None
    rebuilt: Checked | None = None
    batch: str = ""
    strays: int = 0
    called: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether the observers have made what the batch makes."""
        return self.checked is not None and not self.differences

    @property
    def differences(self) -> list[str]:
        """A sentence for each part that is not as it should be."""
        found = []
        for made, checked in ("observers'", self.checked), ("batch's", self.rebuilt):
            if checked is not None and not checked.equal:
                [first, *_] = checked.differences
                found.append(
                    f"of the {made} rows, {checked.count} differ from what the views' definition makes of the sources, "
                    f"such as {first.table}[{first.key!r}]: {first.found} instead of {first.expected}"
                )
        if self.strays:
            found.append(f"{self.strays} of the source rows differ from what the changes make of them")
        return found

    @property
    def saturation(self) -> float:
        """Changes a second."""
        assert self.saturated is not None
        return self.saturated.done_per_s

    def costs(self, rows: int) -> Costs:
        """For a data set of so many rows."""
        loads = [self.quiet, self.asked, self.judged, [] if self.saturated is None else [self.saturated]]
        by_rate = [(statistics.median(each.done_per_s for each in some), some) for some in loads if some]
        curves = [
            Curve.through(self.idle, [(rate, of(each.cores for each in some)) for rate, some in by_rate])
            for of in (statistics.median, min, max)
        ]
        every = [run for round in self.runs for run in round]
        cpu = Line.through((run.rows, run.cpu_s) for run in every)
        return Costs(
            rows=rows,
            measured=max(run.rows for run in every),
            curve=curves[0],
            low=curves[1],
            high=curves[2],
            run_s=Line.through((run.rows, run.seconds) for run in every).at(rows),
            run_cpu_s=cpu.at(rows),
            run_cpu_low=max(cpu.at(rows) - cpu.doubt * rows, cpu.fixed),
            run_cpu_high=cpu.at(rows) + cpu.doubt * rows,
        )


async def measure(
    views: Views,
    rows: Sequence[SourceRow],
    per_s: float,
    folder: Path,
    plan: Plan,
    *,
    known: Results | None = None,
    batch: Making = Batch,
    progress: Progress,
) -> Found:
    """Measure both ways in an empty folder, which the caller removes.

    Args:
        rows: a sample, at least `ROWS_LEAST` of them; its beginning has to be a sample, too.
        per_s: a rate of changes that is measured, if it is below the saturation.
        known: values of cached functions. These are called for what is missing here.
        batch: makes the batch.
        progress: called with what is done next.

    Raises: UsageError if a view's function fails for good; NotIdle.
    """
    async with keeping(views, folder / "store", plan.seed) as keeper:
        return await _Measuring(keeper, rows, per_s, folder, plan, known or {}, batch, progress).all()


class _Measuring:
    """One measurement."""

    def __init__(
        self,
        keeper: Keeper,
        rows: Sequence[SourceRow],
        per_s: float,
        folder: Path,
        plan: Plan,
        known: Results,
        making: Making,
        progress: Progress,
    ) -> None:
        self._keeper, self._rows, self._per_s, self._folder = keeper, rows, per_s, folder
        self._plan, self._tell, self._at_rate_s = plan, progress, plan.seconds * _AT_RATE
        self._known, self._making = known, making
        self._changes = Changes((), seed=plan.seed)
        self._found = Found(len(rows))
        self._rate = 0.0  # of the last backlog
        self._batch_s = 0.0  # of all runs of the batch
        self._counts: list[int] = []  # of rows, over which the batch runs

    async def all(self) -> Found:
        found, began = self._found, trio.current_time()
        await self._keeper.know(self._known)
        await self._load()
        found.idle = await self._keeper.idle_cores(self._plan.seconds * _IDLE)
        await self._saturate()
        batch, slowest = await self._batch(), _LEAST / self._at_rate_s
        quiet = min(max(QUIET * found.saturation, slowest), JUDGED * found.saturation / 2)
        for number in range(self._plan.rounds):
            self._tell(f"round {number + 1} of {self._plan.rounds}")
            found.quiet.append(await self._at(quiet))
            found.judged.append(await self._at(JUDGED * found.saturation))
            if slowest <= self._per_s <= found.saturation:
                found.asked.append(await self._at(self._per_s))
            if number == 0 or self._batch_s < self._plan.seconds * _BATCH:
                found.runs.append([await self._run(batch, count) for count in self._counts])
        self._tell("comparing")
        await self._check()
        found.rebuilt, found.batch = await batch.check(), batch.name
        found.seconds = trio.current_time() - began
        return found

    # -------------------------------------------------------------- loading

    async def _load(self) -> None:
        """Load rows for a share of the time."""
        budget, rows = self._plan.seconds * _LOAD, self._rows
        began, goal, at = trio.current_time(), len(rows), 0
        while at < goal:
            end = min(max(2 * at, _FIRST_ROWS), goal)
            self._tell(f"loading: {at} of {goal} rows")
            await self._keeper.arrive([SourceChange(row.table, row.key, {}, row.values) for row in rows[at:end]])
            self._changes.add(rows[at:end])
            at, took = end, trio.current_time() - began
            goal = min(len(rows), max(at, int(at * budget / took), ROWS_LEAST))
            if not self._found.early and at >= max(goal // 4, ROWS_LEAST):
                before = trio.current_time()
                self._found.early = (await self._backlog()).cpu_of_change
                began += trio.current_time() - before
        self._found.rows = at
        await self._keeper.arrive(self._changes.hold_out(OUT))

    async def _backlog(self) -> Load:
        """Changes that arrive all at once."""
        load = await self._arrive(max(_FIRST_ROWS, int(self._rate * self._at_rate_s)))
        self._rate = load.done_per_s
        return load

    # -------------------------------------------------------------- rates

    async def _saturate(self) -> None:
        """Find the highest rate that is sustained: from above the rate of a backlog downwards, in steps."""
        self._tell("looking for the highest rate")
        self._found.alone = self._plan.rounds * _LEAST * [0.0]
        for at in range(len(self._found.alone)):
            [self._found.alone[at]] = (await self._arrive(1)).delays_s
        within = max(WITHIN_S, ALONE * statistics.median(self._found.alone))
        await self._backlog()
        backlog = await self._backlog()
        self._found.late = backlog.cpu_of_change
        rate = ABOVE * backlog.done_per_s
        for _ in range(STEPS_MAX):
            self._found.saturated = load = await self._at(rate)
            if load.late_s <= within:
                return
            rate = min(STEP_DOWN * rate, load.done_per_s)
        self._found.steady = False

    async def _at(self, per_s: float) -> Load:
        return await self._arrive(max(int(per_s * self._at_rate_s), _LEAST), per_s)

    async def _arrive(self, count: int, per_s: float | None = None) -> Load:
        changes = self._changes.draw(count)
        return await self._keeper.arrive(changes, per_s, apart=self._changes.apart)

    # -------------------------------------------------------------- the batch

    async def _batch(self) -> Batches:
        """Prepare the batch, over as many rows as it can compute in its share of the time."""
        self._tell("preparing the batch")
        results = await self._keeper.known()
        self._found.called = {
            cached.id: len(found) - len(self._known.get(cached, ())) for cached, found in results.items()
        }
        batch = self._making(self._keeper.views, self._folder / "batch", results)
        loaded = self._rows[: self._found.rows]
        quarter, half, all = (int(share * len(loaded)) for share in SHARES)
        for count in (quarter, half, all):
            await _in_thread(batch.write, loaded[:count], count)
        await self._run(batch, quarter)  # warm
        one = (await self._run(batch, quarter)).seconds
        two = (await self._run(batch, half)).seconds
        self._counts = [quarter, half, all]
        if 3 * two - 2 * one > self._plan.seconds * _BATCH:  # what a run over all would take
            self._counts = [quarter // 2, quarter, half]
            await _in_thread(batch.write, loaded[: quarter // 2], quarter // 2)
        self._batch_s = 0.0
        return batch

    async def _run(self, batch: Batches, count: int) -> Ran:
        self._tell(f"the batch over {count} rows")
        ran = await _in_thread(batch.run, count)
        self._batch_s += ran.seconds
        return ran

    # -------------------------------------------------------------- checking

    async def _check(self) -> None:
        """Compare the views with their definition, and the sources with what the changes make of them."""
        keeper, expected = self._keeper, self._changes.rows
        async with keeper.db.snapshot() as snap:
            self._found.checked = await check(keeper.views, snap)
            for table, columns in keeper.views.sources.items():
                left = dict(expected.get(table, {}))
                async for row in snap.scan(table, columns=list(columns)):
                    values = {column: row[column] for column in columns if row[column] is not None}
                    if stored_values(values) != stored_values(left.pop(table.row(row.key), {})):
                        self._found.strays += 1
                self._found.strays += len(left)


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    """Ctrl-C does not wait for it."""
    return await trio.to_thread.run_sync(partial(function, *args), abandon_on_cancel=True)
