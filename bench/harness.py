"""The parts that all benchmarks share: where it runs, rounds, tables, figures, the RESULT line.

Sides that are compared run in the same call, alternating, because the speed of a machine drifts within seconds. A ratio
is the median of the rounds' ratios; a cell's figure is the median of its rounds, with the least and the most. A
baseline has a floor, checked in the same run: if the baseline misses it, ratios with it are void.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.table import Table

import perco
from perco.storage import file_system

K = TypeVar("K")
T = TypeVar("T")

OUT = Path(__file__).parent / "out"


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure over its rounds."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def of(self, other: Cell) -> float:
        """The median of the rounds' ratios: each compares what ran side by side, so drift does not count."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True))

    def __str__(self) -> str:
        return f"{_short(self.median)}  ({_short(min(self.rounds))} - {_short(max(self.rounds))})"


def _short(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


@dataclass(slots=True)
class Report:
    """The findings of a benchmark."""

    name: str
    durability: str
    ratios: dict[str, float | str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    floors: dict[str, dict[str, Any]] = field(default_factory=dict)
    bars: list[tuple[str, float, str, float]] = field(default_factory=list)  # what, value, "at least"/"at most", bar

    def floor(self, what: str, value: float, least: float) -> bool:
        """Whether a baseline is as good as it should be; if not, ratios with it are void."""
        kept = value >= least
        self.floors[what] = {"value": round(value, 3), "least": least, "kept": kept}
        return kept

    def ratio(self, what: str, value: float, *, valid: bool = True, at_least: float | None = None) -> None:
        self.ratios[what] = round(value, 3) if valid else "void"
        if at_least is not None and valid:
            self.bars.append((what, value, "at least", at_least))

    def figure(self, what: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Note a figure that has a bar."""
        self.figures[what] = value
        if at_least is not None:
            self.bars.append((what, value, "at least", at_least))
        if at_most is not None:
            self.bars.append((what, value, "at most", at_most))

    @property
    def missed(self) -> list[str]:
        """The bars that its figures miss."""
        return [what for what, value, how, bar in self.bars if not _kept(value, how, bar)]

    @property
    def summary(self) -> str:
        """Summarize the bars in one line."""
        missed, void = self.missed, [what for what, floor in self.floors.items() if not floor["kept"]]
        said = f"bars: {len(self.bars) - len(missed)} of {len(self.bars)} kept"
        if missed:
            said += f"; MISSED: {', '.join(missed)}"
        if void:
            said += f"; VOID, since a baseline is below its floor: {', '.join(void)}"
        return said


def _kept(value: float, how: str, bar: float) -> bool:
    return value >= bar if how == "at least" else value <= bar


class Run:
    """One call of a benchmark: its arguments, and where its output goes."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        self.quick: bool = arguments.quick
        self.json: Path | None = arguments.json
        self.rounds = 3 if self.quick else 5
        self.folder = Path(arguments.folder).absolute()
        gc.collect()
        perco.tune_gc()
        self.console = Console(highlight=False, width=110 if not sys.stdout.isatty() else None)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)  # [bench] is text, not markup

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder on the disk that is measured."""
        with tempfile.TemporaryDirectory(prefix=".perco-bench-", dir=self.folder) as path:
            yield Path(path)

    def table(self, title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self.console.print(title, style="italic")
        table = Table(show_edge=False, pad_edge=False)
        for i, name in enumerate(head):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*(str(item) for item in row))
        self.console.print(table)
        self.console.print()

    def machine(self, durability: str, peers: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        """Prints and returns what the figures depend on; `peers`: versions of what perco is compared with."""
        with self.scratch() as path:
            syncs = fsyncs_per_second(path)
        facts = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "kernel": platform.release(),
            "file system": file_system(self.folder) or "unknown",
            "fsync/s": round(syncs),
            "durability": durability,
            "collector": f"as perco.tune_gc() sets it, {gc.get_threshold()}",
        }
        versions = {name: version_of(name) for name in ("perco", "lmdb", "trio", "msgpack")} | dict(peers)
        for line in (facts, versions):
            self.say(", ".join(f"{name} {value}" for name, value in line.items()))
        self.say("")
        return {**facts, "versions": versions}

    def finish(self, report: Report, facts: Mapping[str, Any]) -> None:
        """Print the bars, a line that sums them up, then the RESULT line."""
        for what, value, how, bar in report.bars:
            self.say(f"{'kept  ' if _kept(value, how, bar) else 'MISSED'}  {what}: {value:.3g} ({how} {bar:g})")
        for what, floor in report.floors.items():
            self.say(f"{'kept  ' if floor['kept'] else 'VOID  '}  floor of the baseline: {what}")
        self.console.print(report.summary, markup=False, soft_wrap=True)  # in one line, however long
        result = {
            "bench": report.name,
            "ratios": report.ratios,
            "figures": {name: round(value, 3) for name, value in report.figures.items()},
            "floors": report.floors,
            "missed": report.missed,
            "durability": report.durability,
            "cores": facts["cores"],
            "fsync_per_s": facts["fsync/s"],
            "file_system": facts["file system"],
            "versions": {**facts["versions"], "python": facts["python"]},
        }
        if self.json is not None:
            self.json.write_text(json.dumps(result, indent=2) + "\n")
        print("RESULT " + json.dumps(result))

    def figure(self, figure: Any, name: str) -> None:
        """Save a matplotlib figure as PNG and SVG."""
        OUT.mkdir(exist_ok=True)
        for kind in ("png", "svg"):
            figure.savefig(OUT / f"{name}.{kind}", dpi=130, bbox_inches="tight")
        self.say(f"figure: bench/out/{name}.png and .svg")


def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def fsyncs_per_second(folder: Path, seconds: float = 0.5) -> float:
    """How many times a second this disk can make 4 KiB durable."""
    path = folder / "sync"
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            os.pwrite(handle, b"x" * 4096, 4096 * (done % 64))
            os.fdatasync(handle)
            done += 1
        return done / (time.perf_counter() - began)
    finally:
        os.close(handle)
        path.unlink()


class Pace:
    """How fast this machine computes during a benchmark whose sides cannot run side by side.

    Cores that are shared with other virtual machines lose half of their speed for seconds, and nothing shows it, not
    even steal time. So a child process does the same small work some times a second and measures the CPU time that it
    takes, which does not depend on what else runs on this machine.
    """

    _CHILD: Final = """
import time
def work():
    began, x = time.thread_time(), 0
    for i in range(20_000):
        x += i
    return time.thread_time() - began
while True:
    print(time.monotonic(), work(), flush=True)
    time.sleep(0.2)
"""

    def __enter__(self) -> Pace:
        self._noted = tempfile.TemporaryFile()
        self._child = subprocess.Popen([sys.executable, "-c", self._CHILD], stdout=self._noted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._child.kill()
        self._child.wait()
        self._noted.close()

    def samples(self, begin: float, end: float) -> list[tuple[float, float]]:
        """(when, by `time.monotonic`; CPU seconds that the work took), from `begin` to `end`."""
        if self._child.poll() is not None:
            raise RuntimeError("the process that takes the pace of the cores has died")
        handle = self._noted.fileno()
        *lines, _ = os.pread(handle, os.fstat(handle).st_size, 0).split(b"\n")  # the last may be half written
        pairs = [(float(at), float(took)) for at, took in (line.split() for line in lines)]
        return [(at, took) for at, took in pairs if begin <= at < end]


def interleaved(rounds: int, sides: Mapping[K, Callable[[], T]]) -> dict[K, list[T]]:
    """Run every side once a round, every other round in reverse order. Returns what they return, by name."""
    found: dict[K, list[T]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides) if i % 2 == 0 else list(reversed(list(sides))):
            found[name].append(sides[name]())
    return found


def alternate(rounds: int, sides: Mapping[str, Callable[[], float]]) -> dict[str, Cell]:
    """The same for sides that return one figure."""
    return {name: Cell(tuple(values)) for name, values in interleaved(rounds, sides).items()}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
