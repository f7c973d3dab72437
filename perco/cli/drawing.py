"""The picture of `perco crossover`: the delay and the CPU time of both ways, over the rate of changes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

from perco.cli.crossed import Told, span
from perco.errors import UsageError

_PERCO, _BATCH, _QUIET = "#2563eb", "#b45309", "#94a3b8"
_KINDS: Final = (".png", ".svg", ".pdf")


def must_draw(file: Path) -> None:
    """Check, before anything is measured, that a picture can be drawn. Raises: UsageError."""
    if file.suffix not in _KINDS:
        raise UsageError(f"--plot {file}: the name of a picture ends with {', '.join(_KINDS)}")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--plot {file}: there is no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")


def draw(told: Told, file: Path) -> None:
    """Write the picture. Raises: UsageError if it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (delays, cpu) = pyplot.subplots(1, 2, figsize=(10, 4))
    percent = 100 * told.costs.share_per_h(1.0)
    for axis, title in ((delays, "s until a change shows, median"), (cpu, "s of CPU time an hour")):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel(f"changes, % of {told.total} rows an hour")
        axis.spines[["top", "right"]].set_visible(False)
        axis.axvline(percent * told.per_s, color=_QUIET, linewidth=1, linestyle=":")
    asked = told.costs.curve.cores_at(told.per_s)
    points = sorted([*told.costs.curve.points[1:], *([] if asked is None else [(told.per_s, asked)])])
    shown = told.delays()
    delays.plot([percent * rate for rate, _ in shown], [each for _, each in shown], "o-", color=_PERCO, label="perco")
    cpu.plot([percent * rate for rate, _ in points], [3600 * cores for _, cores in points], "o-", color=_PERCO)
    drawn = 0.0
    for comparison in told.comparisons():
        if comparison.every_s < 2 * drawn:
            continue  # the lines, and their names, would lie on each other
        drawn = comparison.every_s
        name = "back to back" if comparison.back_to_back else f"every {span(comparison.every_s)}"
        for axis, value in ((delays, comparison.batch_median_s), (cpu, 3600 * comparison.batch_cores)):
            axis.axhline(value, color=_BATCH, linewidth=1, linestyle="--")
            axis.annotate(f"batch, {name}", (1, value), xycoords=("axes fraction", "data"), **_small())
    delays.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=130)
    except OSError as error:
        raise UsageError(f"--plot {file} cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _small() -> dict[str, Any]:
    return {"ha": "right", "va": "bottom", "fontsize": 7, "color": _BATCH}
