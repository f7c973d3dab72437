"""The gain of the delay window of the paper's section 2.5: a client delays its calls a little, to batch them.

Reads, mutations and commits of one client wait for others to the same tablet (`BatchOptions.window_s`), and leave with
them in one call. A *fixed* window holds each of them for its whole length, so every transaction takes longer by at
least two windows, and blocks others for longer; an *adaptive* one holds them only while an earlier call to that tablet
is out. A window saves calls. Durable; each transaction reads a row and writes it. Rows are chosen uniformly (Zipf 0) or
some are popular (Zipf 1), with few and with many transactions in flight, over

    embedded         the store is in the client's process; only a fixed window has an effect there
    served           one `perco serve`, reached directly, and through a proxy that delays each direction (`delay.py`)
    tablet servers   `perco serve --processes 2`: every commit takes two phases

Each row of the figure is one of these; each field shows the throughput as a multiple of that without a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.against.load import Load, rates
from bench.against.served import TASKS, Server, load_of, server, unserved
from bench.delay import delayed, measured_s
from bench.harness import Report, Run, interleaved

NONE, LONGEST = "0", "0.2"
FIXED = ("0.001", "0.005", "0.02", LONGEST)
ADAPTIVE = ("0.001a", "0.005a")
WINDOWS = (NONE, *ADAPTIVE, *FIXED)
EMBEDDED, SERVED, SPREAD = "embedded", "served", "tablet servers"
SECONDS = 1.0
ROUNDS = 3  # some 650 loads of a second in all; with the start of a process for each they take 40 minutes
SERVERS = 2


class Scene(NamedTuple):
    """`delay_ms`: of each direction of the network."""

    store: str
    delay_ms: float
    in_flight: int
    skew: float

    @property
    def key(self) -> str:
        return f"{self.store.replace(' ', '_')}_delay{self.delay_ms:g}ms_in_flight{self.in_flight}_zipf{self.skew:g}"


JUDGED = Scene(SERVED, 0, 128, 0)
QUICK = (JUDGED, JUDGED._replace(skew=1), JUDGED._replace(delay_ms=5))


def scenes() -> list[Scene]:
    """All scenes of a run without --quick."""
    out = [Scene(EMBEDDED, 0, count, skew) for count in (8, 128, 512) for skew in (0, 1)]
    out += [Scene(SERVED, ms, count, skew) for ms in (0, 0.1, 5, 20) for count in (8, 128, 512) for skew in (0, 1)]
    return out + [Scene(SPREAD, ms, 128, skew) for ms in (0, 5) for skew in (0, 1)]


def windows(scene: Scene, *, quick: bool = False) -> Sequence[str]:
    """The windows that are tried in a scene; an adaptive one does nothing in an embedded store."""
    if quick:
        tried: Sequence[str] = (NONE, ADAPTIVE[0], FIXED[0], LONGEST)
    else:
        tried = (NONE, *FIXED) if scene.store == EMBEDDED else WINDOWS
    if scene.skew and (quick or scene.delay_ms or scene.in_flight != JUDGED.in_flight):
        return tried[:-1]  # with the longest, transactions that conflict on a popular row take some ten seconds
    return tried


def title(window: str) -> str:
    """A window's name in tables and figures."""
    if window == NONE:
        return "none"
    ms = 1000 * float(window.removesuffix("a"))
    return f"{'adaptive' if window.endswith('a') else 'fixed'} {ms:g} ms"


def mean_ms(loads: Sequence[Load]) -> float:
    """Mean time of a transaction, from its beginning to the answer to its commit; the median of the rounds."""
    return median(1000 * sum(load.times) / len(load.times) for load in loads)


Found = dict[tuple[Scene, str], list[Load]]


def main(run: Run) -> None:
    """Print the tables and the RESULT line; draw."""
    report = Report(run.name, "power")
    facts = run.machine("power (fsync before every answer)")
    found: Found = {}
    with run.scratch() as folder, ExitStack() as stack:
        own = stack.enter_context(unserved(folder))
        one = stack.enter_context(server(folder, durable=True))
        many = None if run.quick else stack.enter_context(server(folder, durable=True, processes=SERVERS))
        chosen = QUICK if run.quick else scenes()
        for delay_ms in sorted({scene.delay_ms for scene in chosen if scene.delay_ms}):
            real_ms = report.figures[f"delay_{delay_ms:g}_ms_measured"] = 1000 * measured_s(folder, delay_ms / 1000)
            run.say(f"network delay of {delay_ms:g} ms each way: {real_ms:.2f} ms as measured")
        for scene in chosen:
            found |= _measured(run, scene, folder, own, one, many)
        for served in (one, many):
            if served is not None:
                served.check()
    _tell(run, report, found)
    _draw(run, found)
    run.finish(report, facts)


def _measured(run: Run, scene: Scene, folder: Path, own: Path, one: Server, many: Server | None) -> Found:
    served = {SERVED: one, SPREAD: many}.get(scene.store)
    with ExitStack() as stack:
        load: Callable[..., Load] = partial(load_of, url=str(own))
        if served is not None:
            servers = SERVERS if served is many else 0
            url = stack.enter_context(delayed(folder, served.folder, scene.delay_ms / 1000, servers))
            load = partial(served.load, url=url)
        sides = {
            (scene, window): partial(
                load, TASKS, in_flight=scene.in_flight, seconds=SECONDS, window=window, skew=scene.skew
            )
            for window in windows(scene, quick=run.quick)
        }
        return interleaved(ROUNDS, sides)


def _tell(run: Run, report: Report, found: Found) -> None:
    rows: list[Sequence[object]] = []
    for scene in dict.fromkeys(scene for scene, _ in found):
        none = found[scene, NONE]
        for window in [window for each, window in found if each == scene]:
            loads = found[scene, window]
            ratio = rates(loads).of(rates(none))
            figures = {
                "per_s": rates(loads).median,
                "mean_ms": mean_ms(loads),
                "p99_ms": median(load.ms(0.99) for load in loads),
                "retries": median(load.retries_per_call for load in loads),
                "cpu_us": median(load.cpu_us for load in loads),
            }
            shown = title(window).removesuffix(" ms")
            where = scene.store, f"{scene.delay_ms:g}", scene.in_flight, f"{scene.skew:g}", shown
            cpu = "" if scene.store == SPREAD else f"{figures['cpu_us']:.0f}"  # the tablet servers' CPU is not counted
            times = f"{figures['mean_ms']:.1f}", f"{figures['p99_ms']:.0f}", f"{figures['retries']:.2f}"
            rows.append((*where, f"{figures['per_s']:.0f}", f"{ratio:.2f}", *times, cpu))
            key = f"{scene.key}_window_{title(window).replace(' ', '_')}"
            report.figures |= {f"{key}_{name}": value for name, value in figures.items() if name != "cpu_us" or cpu}
            if window != NONE:
                report.ratio(f"{key}_vs_none", ratio)
    head = ("store", "delay", "in flight", "Zipf", "window", "per s", "ratio", "mean", "p99", "retries", "CPU us")
    run.table("durable read-modify-writes of one row; delay each way, window, mean and p99 in ms", head, rows)
    report.figures["mean_ms_window_0"] = mean_ms(found[JUDGED, NONE])
    report.figures["mean_ms_window_200"] = mean_ms(found[JUDGED, LONGEST])
    # Each transaction waits for a fixed window twice: with its read and with its commit.
    report.bars.append(("mean_ms_window_200", report.figures["mean_ms_window_200"], "at least", 2000 * float(LONGEST)))


# ------------------------------------------------------------------ the figure


def _draw(run: Run, found: Found) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    shown = [window for window in WINDOWS if window != NONE and any(each == window for _, each in found)]
    skews = sorted({scene.skew for scene, _ in found})
    places = list(dict.fromkeys(scene._replace(skew=0) for scene, _ in found))
    figure, axes = pyplot.subplots(
        1, len(skews), figsize=(2.6 + 0.85 * len(shown) * len(skews), 2.2 + 0.32 * len(places)), squeeze=False
    )
    for axis, skew in zip(axes[0], skews, strict=True):
        fields = [[_ratio(found, place._replace(skew=skew), window) for window in shown] for place in places]
        axis.imshow(fields, aspect="auto", cmap="RdBu", norm=LogNorm(0.4, 2.5))
        for y, line in enumerate(fields):
            for x, ratio in enumerate(line):
                text = "" if ratio != ratio else f"{ratio:.2f}"
                axis.text(x, y, text, ha="center", va="center", fontsize=8, color=_ink(ratio))
        axis.set_title(f"Zipf {skew:g}: rows {'all alike' if not skew else 'of which some are popular'}", fontsize=9)
        axis.set_xticks(range(len(shown)), [title(window).replace(" ", "\n", 1) for window in shown], fontsize=8)
        names = [f"{place.store}, {place.delay_ms:g} ms, {place.in_flight} in flight" for place in places]
        axis.set_yticks(range(len(places)), names if axis is axes[0][0] else [""] * len(names), fontsize=8)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.suptitle(
        "Transactions a second with a delay window, as a multiple of those without (blue: faster, red: slower)\n"
        "by store, network delay each way, transactions in flight; durable read-modify-writes of one row",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    run.figure(figure, "window")
    pyplot.close(figure)


def _ratio(found: Found, scene: Scene, window: str) -> float:
    if (scene, window) not in found:
        return float("nan")
    return rates(found[scene, window]).of(rates(found[scene, NONE]))


def _ink(ratio: float) -> str:
    return "white" if ratio > 1.8 or ratio < 0.55 else "black"
