"""A closed loop of callers, and its results."""

from __future__ import annotations

import itertools
import os
import random
import time
from bisect import bisect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import trio

from bench.harness import Cell, percentile


@dataclass(slots=True)
class Load:
    """The result of a closed loop that ran for some seconds: each caller calls again when it has its answer.

    `cpu_s`: of this process, all threads, and of the server if there is one; `retries`: attempts beyond the first of
    each call; `times`: seconds that each call took; `unfinished`: seconds that the other calls had waited at the end.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    retries: int = 0
    times: list[float] = field(default_factory=list)
    unfinished: list[float] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return len(self.times)

    @property
    def per_s(self) -> float:
        return self.calls / self.seconds

    @property
    def cpu_us(self) -> float:
        """Per call."""
        return 1e6 * self.cpu_s / max(self.calls, 1)

    @property
    def retries_per_call(self) -> float:
        return self.retries / max(self.calls, 1)

    def ms(self, share: float) -> float:
        return 1000 * percentile([*self.times, *self.unfinished], share)


def rates(loads: Iterable[Load]) -> Cell:
    return Cell(tuple(load.per_s for load in loads))


def medians(loads: Sequence[Load]) -> tuple[float, float, float]:
    """p50 and p99 in milliseconds, and microseconds of CPU time per call: of each the median of the rounds."""
    return (
        median(load.ms(0.5) for load in loads),
        median(load.ms(0.99) for load in loads),
        median(load.cpu_us for load in loads),
    )


def row_of(name: str, loads: Sequence[Load], *more: object) -> list[object]:
    """A line of a table: the name, the rate, p50, p99, CPU time."""
    p50, p99, cpu = medians(loads)
    return [name, rates(loads), f"{p50:.1f}", f"{p99:.1f}", f"{cpu:.0f}", *more]


def cpu_of(pid: int) -> float:
    """Processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Measured:
    """`with Measured(load):` notes wall and processor time; `cpu`: seconds so far of others that do the work."""

    def __init__(self, load: Load, cpu: Callable[[], float] = lambda: 0.0) -> None:
        self.load, self._cpu = load, cpu

    def _now(self) -> float:
        return time.process_time() + self._cpu()

    def __enter__(self) -> Load:
        self._used, self._began = self._now(), time.perf_counter()
        return self.load

    def __exit__(self, *_: object) -> None:
        self.load.seconds = time.perf_counter() - self._began
        self.load.cpu_s = self._now() - self._used


async def closed_loop(
    call: Callable[[random.Random], Awaitable[None]],
    in_flight: int,
    seconds: float,
    others_cpu_s: Callable[[], float] = lambda: 0.0,
) -> Load:
    """Run on trio. `call` makes one call, with its caller's random numbers; `others_cpu_s`: see `Measured`."""
    load = Load()

    async def caller(number: int) -> None:
        rng = random.Random(number)
        now = time.perf_counter()
        while True:  # at least once
            began = now
            await call(rng)
            now = time.perf_counter()
            load.times.append(now - began)
            if now >= until:
                return

    with Measured(load, others_cpu_s):
        until = time.perf_counter() + seconds
        async with trio.open_nursery() as nursery:
            for number in range(in_flight):
                nursery.start_soon(caller, number)
    return load


class Zipf:
    """Ranks from 0 below `n`, the k-th with a probability in proportion to 1 / k ** skew; 0: all equally likely."""

    def __init__(self, n: int, skew: float) -> None:
        self._sums = list(itertools.accumulate(1 / (k + 1) ** skew for k in range(n)))

    def draw(self, rng: random.Random) -> int:
        return bisect(self._sums, rng.random() * self._sums[-1])

    def distinct(self, rng: random.Random, count: int) -> list[int]:
        """`count` different ranks."""
        assert count <= len(self._sums)
        found: dict[int, None] = {}
        while len(found) < count:
            found[self.draw(rng)] = None
        return list(found)
