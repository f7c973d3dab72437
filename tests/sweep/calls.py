"""`python -m tests.sweep.calls`: a short run over a store on Bigtable, with every fault at every call of every process.

The run is one of `perco.testing.direct` without faults of its own: two processes want to own the store, two others are
direct clients with observers. Each call that any of them makes to Bigtable, the owner's claim and renewals included, is
lost; or carried out without an answer; or carried out after an error was told, when it may have been repeated; or hangs
until its deadline; or its process dies before or after it, or is stopped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from perco.testing.calls import DELAY, FAIL, LATER, LOSE, LOSE_ANSWER, PART, STOPS_BEFORE
from perco.testing.direct import CALLED, call_faults_of
from perco.testing.plan import Plan
from perco.testing.shrink import fails
from perco.testing.simulation import BIGTABLE, SimulationOptions, run_plan

_CALLS: Final = " calls: "
_OPTIONS: Final = SimulationOptions(processes=2, store=BIGTABLE)
_TRANSACTIONS: Final = 1  # of each client
_CLIENTS: Final = 3  # of each process
_VARIANTS: Final = {
    **dict.fromkeys((LOSE, LOSE_ANSWER, LATER, FAIL), ("soon", "hangs")),
    DELAY: ("0.7",),
    PART: ("1",),
    STOPS_BEFORE: ("0.6", "3.0"),
}
SEEDS: Final = range(8)


class Case(NamedTuple):
    """A fault at one call of the run of a seed."""

    seed: int
    call: str
    fault: str

    def __str__(self) -> str:
        return f"--again {self.seed} {self.call!r} {self.fault!r}"


def _whole() -> dict[str, str]:
    """The choices of a run without faults."""
    given = {}
    for process in ("p0.0", "p1.0"):
        given[f"life {process}"] = "begins"
        for client in range(_CLIENTS):
            given.update({f"txn {process} c{client} #{number}": "begins" for number in range(_TRANSACTIONS)})
    return given


def step_of(call: str) -> str:
    """The step of the protocol that a call is, by its name: "o.0 calls: prewrite of c1 in lists k3 #1"."""
    rest = call.partition(_CALLS)[2]
    told = [step for step in CALLED if rest.startswith(f"{step} ")]
    return max(told, key=len)


def cases(seed: int) -> list[Case]:
    """All faults at all calls of a seed's run. Raises: AssertionError, if the run goes wrong without any."""
    plan = Plan(seed, _whole())
    outcome = run_plan(plan, _OPTIONS)
    assert not outcome.problems, outcome.problems
    out = []
    for name in dict.fromkeys(name for _, name, _ in plan.done if _CALLS in name):
        for fault in call_faults_of(step_of(name)):
            out += [Case(seed, name, f"{fault} {more}".strip()) for more in _VARIANTS.get(fault, ("",))]
    return out


def run(case: Case) -> str:
    """The problem that a fault causes; "" for none. The fault must occur."""
    plan = Plan(case.seed, {**_whole(), case.call: case.fault})
    problem = fails(plan, _OPTIONS)
    if not problem and not any(name == case.call and choice for _, name, choice in plan.done):
        return "the fault did not occur"
    return problem


def _some(seed: int, every: int) -> list[Case]:
    """Every n-th case of a seed."""
    return cases(seed)[seed % every :: every]


def swept(seeds: Sequence[int], every: int, processes: int | None = None) -> Iterator[tuple[Case, str]]:
    """Every n-th case of these seeds, and the problem that it causes."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for seed in seeds:
            found = _some(seed, every)
            yield from zip(found, pool.imap(run, found, chunksize=4), strict=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing was wrong, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep.calls", description=__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help=f"different runs (default: {len(SEEDS)})")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th case (default: all)")
    parser.add_argument("--again", nargs=3, metavar=("SEED", "CALL", "FAULT"), help="one case, as it was printed")
    given = parser.parse_args(arguments)
    if given.again:
        seed, call, fault = given.again
        problem = run(Case(int(seed), call, fault))
        print(problem or "nothing went wrong")
        return bool(problem)
    began, met, wrong = time.perf_counter(), Counter[tuple[str, str]](), 0
    for number, (case, problem) in enumerate(swept(range(given.seeds), given.every), start=1):
        met[step_of(case.call), case.fault.partition(" ")[0]] += 1
        if problem:
            wrong += 1
            print(f"{problem}\n    again: python -m tests.sweep.calls {case}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{number} runs, {wrong} wrong", end="", file=sys.stderr, flush=True)
    for step in sorted({step for step, _ in met}):
        print(f"{step:18}" + ", ".join(f"{met[step, fault]} {fault}" for fault in call_faults_of(step)))
    print(f"{met.total()} runs in {time.perf_counter() - began:.0f} s, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
