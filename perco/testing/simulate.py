"""`python -m perco.testing.simulate --seeds 2000`: many runs, and a table of which fault hit which step."""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import trio

from perco.testing.embedded import CRASHES, FAULTS, STEPS, faults_of
from perco.testing.network import FAULTS as WIRE_FAULTS, LOCAL_FAULTS
from perco.testing.served import DISK_FAULTS, ORDERED, SENT, WRITTEN
from perco.testing.shrink import ShrinkOptions, shrink
from perco.testing.simulation import BIGTABLE, LOCAL, Outcome, SimulationOptions, simulate

_SEEDS = 200  # with fewer, many pairs of step and fault do not come up
_SEEDS_WHOLE = 2000  # with this many, each pair must come up
_PART = 4  # seeds that a process takes at a time
_PARTS_AHEAD = 8  # for each process
_SAVED_EACH = 100  # seeds

COMMAND = "python -m perco.testing.simulate --seed"

_COUNTED = {  # fields of an outcome, and what they are called
    "committed": "committed",
    "failed": "failed",
    "unknown": "unknown",
    "runs": "observer runs",
    "lives": "lives",
    "terms": "terms of owners",
    "servers": "tablet servers",
    "splits": "splits",
    "pins": "pins",
    "fresh": "waits for views",
    "compared": "comparisons of views meanwhile",
    "jumps": "jumps of the clock",
    "mistaken": "live transactions presumed dead",
    "late": "messages late",
    "removed": "cells removed by vacuums",
}


def _counts(outcome: Outcome) -> dict[str, int]:
    return {name: getattr(outcome, name) for name in _COUNTED}


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[name]} {what}" for name, what in _COUNTED.items())


def _one(seed: int, options: SimulationOptions) -> Outcome:
    try:
        return simulate(seed, options)
    except Exception as error:  # a run that cannot go on is a finding like any other
        return Outcome(seed, problems=["".join(traceback.format_exception(error)).strip()])


def _some(seeds: range, options: SimulationOptions) -> list[Outcome]:
    return [_one(seed, options) for seed in seeds]


_Part: TypeAlias = tuple[str, Sequence[str], Sequence[str], Callable[[str], Sequence[str]]]


def _parts(store: str) -> Sequence[_Part]:
    """The parts of the table. Each has a title, steps, faults, and a function for the faults that can hit a step."""
    if store == BIGTABLE:
        from perco.testing.direct import CALL_FAULTS, CALLED, SENT_BY_DIRECT, call_faults_of

        return (
            ("called", CALLED, CALL_FAULTS, call_faults_of),
            ("sent", SENT_BY_DIRECT, WIRE_FAULTS, lambda step: WIRE_FAULTS),
        )
    return (
        ("embedded", STEPS, (*FAULTS, *CRASHES), faults_of),
        ("sent", SENT, WIRE_FAULTS, lambda step: WIRE_FAULTS),
        ("ordered", ORDERED, LOCAL_FAULTS, lambda step: LOCAL_FAULTS),
        ("written", WRITTEN, DISK_FAULTS, lambda step: DISK_FAULTS),
    )


def table(fired: Counter[tuple[str, str]], store: str = LOCAL) -> tuple[str, list[str]]:
    """The table of how often each fault hit each step, and its empty cells. If the stores are on Bigtable,
    it covers the calls of Bigtable, and the wire of the owner; otherwise, it covers embedded stores, and the wire, the
    orders and the disk of served stores."""
    lines, empty = [], []
    for title, steps, columns, faults in _parts(store):
        lines.append(f"{title:18}" + "".join(f"{name:>14}" for name in columns))
        for step in steps:
            possible = faults(step)
            counts = [fired[step, name] if name in possible else "-" for name in columns]
            lines.append(f"{step:18}" + "".join(f"{count:>14}" for count in counts))
            empty += [f"{step} x {name}" for name in columns if name in possible and not fired[step, name]]
    return "\n".join(lines), empty


class StateError(Exception):
    """A state file that does not belong to this run."""


def _code() -> str:
    """A digest of all code that decides what a seed does. It covers all perco modules that the simulation imports."""
    whole = hashlib.sha256(f"{platform.python_version()} {trio.__version__}".encode())
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "perco" and (path := module.__file__) != __file__ and path is not None:
            text = Path(path).read_bytes()
            whole.update(f"{name} {len(text)}\n".encode() + text)
    return whole.hexdigest()


@dataclass
class _Sum:
    """The sums over the runs so far. They are saved to a file, so that a long series can be interrupted."""

    first: int
    seeds: int
    code: str
    store: str = LOCAL
    views: bool = False
    done: int = 0
    seconds: float = 0.0
    sittings: int = 1
    counts: Counter[str] = field(default_factory=Counter)  # by the field of an outcome
    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad: list[int] = field(default_factory=list)

    @property
    def options(self) -> SimulationOptions:
        return SimulationOptions(store=self.store, views=self.views)

    @property
    def given(self) -> str:
        """The options, besides the seed, of the command that repeats a run."""
        return ("" if self.store == LOCAL else f" --store {self.store}") + (" --views" if self.views else "")

    def add(self, outcome: Outcome) -> None:
        self.done += 1
        self.counts.update(_counts(outcome))
        self.fired += outcome.fired
        if outcome.problems:
            self.bad.append(outcome.seed)

    def save(self, path: Path) -> None:
        fired = [[*pair, count] for pair, count in sorted(self.fired.items())]
        whole = json.dumps({**vars(self), "fired": fired}, indent=1)
        new = path.with_name(path.name + ".new")
        new.write_text(whole)
        new.replace(path)

    def go_on(self, path: Path) -> _Sum:
        """The sums in the file, or these if there is no file. Raises: StateError if the file is of other seeds, stores
        or code; OSError."""
        try:
            before: dict[str, Any] = json.loads(path.read_text())
            fired = Counter({(step, fault): count for step, fault, count in before.pop("fired")})
            found = _Sum(counts=Counter(before.pop("counts")), fired=fired, **before)
        except FileNotFoundError:
            return self
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateError(f"{path} is not a state of this command: {error!r}") from error
        mine = self.first, self.seeds, self.store, self.views
        if (found.first, found.seeds, found.store, found.views) != mine:
            raise StateError(
                f"{path} is of {found.seeds} seeds from {found.first} on, over {found.store} stores"
                f"{', with views' if found.views else ''}: give the same --seeds, --first, --store and --views, or "
                "another file"
            )
        if found.code != self.code:
            raise StateError(
                f"{path} was written by another version of perco, Python or trio: its runs say nothing about this one. "
                "Remove it, or give another file"
            )
        found.sittings += 1
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing was wrong, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m perco.testing.simulate",
        description="Run clients, observers and processes that die, over a network that loses, delays, repeats and "
        "reorders, each run from one seed, in virtual time; verify what is left.",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help=f"number of runs (default: {_SEEDS})")
    parser.add_argument("--first", type=int, metavar="SEED", help="the first seed (default: 0)")
    parser.add_argument("--seed", type=int, help="run only this seed, with full details")
    parser.add_argument(
        "--store",
        choices=(LOCAL, BIGTABLE),
        default=LOCAL,
        help=f"{LOCAL}: an embedded or a served store, as the seed decides; {BIGTABLE}: a model of Bigtable, with two "
        "processes that may own the store, and direct clients (needs perco[bigtable])",
    )
    parser.add_argument(
        "--views",
        action="store_true",
        help="the program also declares a random graph of views, and clients write its sources; the derived tables "
        "must equal the batch build",
    )
    parser.add_argument(
        "--processes", type=int, default=None, help="how many at a time (default: as many as there are cores)"
    )
    parser.add_argument("--shrink", action="store_true", help="with --seed: the short script of a run that fails")
    parser.add_argument("--seconds", type=float, default=120.0, help="the time limit for --shrink (default: 120)")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="save the progress in FILE; the same command then continues from there",
    )
    given = parser.parse_args(arguments)
    seeds, first = _SEEDS if given.seeds is None else given.seeds, given.first or 0
    if seeds < 1 or (given.processes is not None and given.processes < 1):
        parser.error("--seeds and --processes are at least 1")
    if first < 0 or (given.seed is not None and given.seed < 0):
        parser.error("a seed is a number from 0 on")
    if given.seed is not None and (given.seeds, given.first, given.state) != (None, None, None):
        parser.error("--seed is one run: give either it, or --seeds, --first and --state")
    if given.shrink:
        if given.seed is None:
            parser.error("--shrink takes the seed of a run that fails: --seed S --shrink")
        return _shrink(given.seed, given.seconds, SimulationOptions(store=given.store, views=given.views))
    if given.seed is not None:
        outcome = _one(given.seed, SimulationOptions(store=given.store, views=given.views))
        print(
            f"seed {outcome.seed}: {outcome.processes} processes, {_told(_counts(outcome))}, "
            f"{outcome.fired.total()} faults, digest {outcome.digest[:16]}"
        )
        print(table(outcome.fired, given.store)[0])
        for problem in outcome.problems:
            print(f"\n{problem}")
        print(f"seed {given.seed} went wrong" if outcome.problems else "nothing went wrong")
        return 1 if outcome.problems else 0
    if given.store == BIGTABLE:
        importlib.import_module("perco.testing.direct")  # so that the digest of the code covers it
    if given.views:
        importlib.import_module("perco.testing.viewed")
    whole = _Sum(first, seeds, _code(), given.store, given.views)
    try:
        if given.state is not None:
            whole = whole.go_on(given.state)
            whole.save(given.state)  # fails now rather than after an hour
    except (StateError, OSError) as error:
        parser.error(str(error))
    return _many(whole, given.processes, given.state)


def _shrink(seed: int, seconds: float, options: SimulationOptions) -> int:
    found = shrink(seed, ShrinkOptions(seconds=seconds), options)
    if found is None:
        if _one(seed, options).problems:
            print(f"seed {seed} fails, but not when its choices are replayed: it cannot be shrunk")
            return 1
        print(f"seed {seed} does not fail; nothing to shrink")
        return 0
    print(f"seed {seed}, {len(found.choices)} events after {found.attempts} runs:\n\n{found.script()}")
    return 1


def _begin() -> None:
    """Ignore Ctrl-C: the parent kills its children. Freeze what was imported, so that no collection scans it again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()


def _end_interrupted(signum: int, frame: object) -> None:
    """Kill the children and exit. A KeyboardInterrupt might hit the pool's locks, and become another failure."""
    for child in multiprocessing.active_children():
        child.kill()
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(130)


def _outcomes(pool: ProcessPoolExecutor, seeds: range, processes: int, options: SimulationOptions) -> Iterator[Outcome]:
    """Yields the outcomes in the order of the seeds. A few parts of the seeds are submitted ahead."""
    parts = (seeds[start : start + _PART] for start in range(0, len(seeds), _PART))
    ahead: deque[Future[list[Outcome]]] = deque()
    for part in parts:
        ahead.append(pool.submit(_some, part, options))
        if len(ahead) > _PARTS_AHEAD * processes:
            yield from ahead.popleft().result()
    while ahead:
        yield from ahead.popleft().result()


def _many(whole: _Sum, processes: int | None, state: Path | None) -> int:
    processes = processes or os.cpu_count() or 1
    left = range(whole.first + whole.done, whole.first + whole.seeds)
    for seed in whole.bad:  # from earlier sittings
        print(f"seed {seed} went wrong\n    again: {COMMAND} {seed}{whole.given}", flush=True)
    before_s, began = whole.seconds, time.perf_counter()
    with ProcessPoolExecutor(processes, initializer=_begin) as pool:
        for outcome in _outcomes(pool, left, processes, whole.options):
            whole.add(outcome)
            if outcome.problems:
                again = f"{COMMAND} {outcome.seed}{whole.given}"
                text = outcome.problems[0]
                print(f"seed {outcome.seed}: {text}\n    again: {again}\n    short: {again} --shrink", flush=True)
            if whole.done % _PART == 0 and sys.stderr.isatty():
                print(f"\r{whole.done} of {whole.seeds}", end="", file=sys.stderr, flush=True)
            whole.seconds = before_s + time.perf_counter() - began
            if state is not None and (whole.done % _SAVED_EACH == 0 or whole.done == whole.seeds):
                whole.save(state)
    sittings = f" in {whole.sittings} sittings" if whole.sittings > 1 else ""
    print(
        f"{whole.seeds} runs in {whole.seconds:.0f} s{sittings} ({3600 * whole.seeds / max(whole.seconds, 1e-9):.0f} "
        f"an hour): {_told(whole.counts)}, {whole.fired.total()} faults"
    )
    text, empty = table(whole.fired, whole.store)
    print(text)
    if empty and whole.seeds < _SEEDS:
        print(f"{len(empty)} pairs untested (few seeds)")
    elif empty:
        print(f"never occurred: {', '.join(empty)}")
    untested = bool(empty) and whole.seeds >= _SEEDS_WHOLE
    if whole.bad or not untested:
        print(f"{len(whole.bad)} of {whole.seeds} runs went wrong" if whole.bad else "nothing went wrong")
    else:
        print(f"no run went wrong, but {len(empty)} pairs of step and fault never occurred: the table must be full")
    return 1 if whole.bad or untested else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _end_interrupted)
    sys.exit(main())
