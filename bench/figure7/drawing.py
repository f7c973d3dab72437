"""The pictures of figure 7: delays over rates, and CPU time over how much is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.figure7 import Found
    from bench.harness import Run

_PERCO, _BATCH, _STREAMING, _QUIET = "#2563eb", "#b45309", "#047857", "#94a3b8"
_SHARES = [10 ** (exponent / 20) for exponent in range(-80, 11)]  # of the repository, from 0.01 % to 300 %


def delays(run: Run, every: Sequence[Found]) -> None:
    """The median delay over the rate, with the 5th and the 95th percentile, as in the paper."""
    figure, axes = _panels(len(every))
    for axis, found in zip(axes, every, strict=True):
        kept = [rate for rate, loads in found.perco.items() if all(load.sustained for load in loads)]
        for rates, of, colour, style, label in (
            (list(found.batch), found.batch_s, _BATCH, "-", "Spark batch, back to back"),
            (
                list(found.streaming),
                lambda rate, share, found=found: found.streaming[rate].delay_s(share),
                _STREAMING,
                "-.",
                "Structured Streaming",
            ),
            (kept, found.perco_s, _PERCO, "--", "perco"),
        ):
            _line(axis, rates, of, colour, style, label)
        axis.axvline(found.saturation_rate, color=_PERCO, linewidth=1, linestyle=":")
        axis.annotate(
            f"perco is saturated\nat {found.saturation_rate:,.0f} % ({found.saturation:,.0f}/s)",
            (found.saturation_rate, 0.36),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=_PERCO,
        )
        axis.set_title(f"{found.size:,} documents", loc="left", fontsize=10)
        axis.set_xlabel("documents that arrive, % of the repository an hour")
        axis.xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("s from the intended arrival until clustered")
    axes[0].legend(frameon=False, fontsize=8)
    _save(run, figure, "figure7")


def cpu(run: Run, every: Sequence[Found]) -> None:
    """CPU time for a new document over the share of the repository that is new when the batch runs."""
    figure, axes = _panels(len(every))
    for axis, found in zip(axes, every, strict=True):
        percent = [100 * share for share in _SHARES]
        axis.plot(
            percent,
            [found.run_cpu_us * (1 + share) / share for share in _SHARES],
            color=_BATCH,
            label="Spark batch: a run over all, for what is new",
        )
        runs = [run for each in found.batch.values() for cycles in each for run in cycles.runs if run.new]
        axis.plot(
            [100 * run.new / found.size for run in runs],
            [1e6 * run.cpu_s / run.new for run in runs],
            "o",
            color=_BATCH,
            markersize=3,
            label="the same, measured runs",
        )
        axis.axhline(found.streaming_cpu_us, color=_STREAMING, linestyle="-.", label="Structured Streaming, backlog")
        axis.axhline(found.perco_cpu_us, color=_PERCO, linestyle="--", label="perco")
        if found.crossover <= _SHARES[-1]:
            axis.axvline(100 * found.crossover, color=_QUIET, linewidth=1, linestyle=":")
            axis.annotate(
                f"{found.crossover:.1%} new",
                (100 * found.crossover, found.perco_cpu_us),
                xytext=(5, 6),
                textcoords="offset points",
                fontsize=8,
            )
        axis.set_title(f"{found.size:,} documents", loc="left", fontsize=10)
        axis.set_xlabel("% of the repository that is new in a run")
        axis.xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("us of CPU time for a new document")
    axes[0].legend(frameon=False, fontsize=8)
    _save(run, figure, "figure7-cpu")


def _panels(count: int) -> tuple[Any, Sequence[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(max(6.5, 4.2 * count), 4), sharey=True, squeeze=False)
    for axis in axes[0]:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def _line(
    axis: Any, rates: Sequence[int], of: Callable[[int, float], float], colour: str, style: str, label: str
) -> None:
    middle = [of(rate, 0.5) for rate in rates]
    below = [max(mid - of(rate, 0.05), 0.0) for rate, mid in zip(rates, middle, strict=True)]
    above = [max(of(rate, 0.95) - mid, 0.0) for rate, mid in zip(rates, middle, strict=True)]
    axis.errorbar(
        rates, middle, yerr=(below, above), color=colour, linestyle=style, marker="o", markersize=3.5,
        capsize=2, linewidth=1.6, elinewidth=0.8, label=label,
    )  # fmt: skip


def _save(run: Run, figure: Any, name: str) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    run.figure(figure, name)
    pyplot.close(figure)
