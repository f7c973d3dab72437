"""Shrinks a failing run to a short script: leaves out choices for as long as the run still fails in the same way.

This is delta debugging (ddmin) over the names of a plan's choices: first whole lives, then transactions, then
everything else. It tries to leave out halves, then quarters, and so on, down to single choices. When a choice is left
out, everything after it shifts. So each attempt is made with a few salts: the same choices, but other delays and
another order of tasks. The number of attempts and the time are limited.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from perco.testing.plan import Plan, lives_first
from perco.testing.simulation import SimulationOptions, run_plan

Choices = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrinkOptions:
    """The limits of shrinking.

    Attributes:
        seconds, attempts: after how many to stop, with the smallest plan found so far.
        salts: with how many orders of tasks each attempt is made.
    """

    seconds: float = 120.0
    attempts: int = 4000
    salts: int = 2


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A plan that fails: its choices, the salt with which they fail, the problem, everything that happened (when, what,
    which fault), and how many runs it took to find the plan."""

    seed: int
    choices: dict[str, str]
    salt: int
    problem: str
    steps: tuple[tuple[float, str, str], ...]
    attempts: int

    def script(self) -> str:
        """The steps in order of time: each with its actor, its cell, and the fault that hits it."""
        lines = []
        for when, name, choice in self.steps:
            kind, _, rest = name.partition(" ")
            if kind == "life":
                lines.append(f"{when:9.4f}  {rest} comes up" + (", with the late schema" if choice == "late" else ""))
            elif kind == "txn":
                lines.append(f"{when:9.4f}  {rest} begins")
            elif choice:
                lines.append(f"{when:9.4f}  {name}: {choice}")
            elif " #" in name and " of " in name and ": " in name:  # a step in the store without a fault
                lines.append(f"{when:9.4f}    {name}")
        return "\n".join([*lines, f"           {self.problem}"])


def kind_of_problem(problem: str) -> str:
    """The part of a problem that stays the same while the run shrinks."""
    if "Traceback" in problem or "Error" in problem:
        return problem.strip().splitlines()[-1].split(":")[0].strip(" |")
    head = problem.split(":")[0]
    return re.sub(r"\d+", "", head)


def fails(plan: Plan, options: SimulationOptions | None = None) -> str:
    """The first problem of a run; "" if there is none."""
    try:
        outcome = run_plan(plan, options)
    except Exception as error:
        return f"{type(root := root_of(error)).__name__}: {root}"
    return outcome.problems[0] if outcome.problems else ""


def root_of(error: BaseException) -> BaseException:
    """The innermost error of an exception: the first one of each group, the cause of each error."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


class Shrinker:
    """Looks for the smallest part of a failing plan that still fails in the same way."""

    attempts: int
    problem: str

    def __init__(
        self,
        seed: int,
        options: ShrinkOptions,
        run: Callable[[Plan], str] = fails,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seed, self._options, self._run, self._clock = seed, options, run, clock
        self._began = clock()
        self.attempts = 0
        self.best: Plan | None = None
        self.problem = ""

    def shrink(self) -> Shrunk | None:
        """Shrink the seed's plan. None: the run does not fail, or no longer fails when its choices are replayed."""
        whole = Plan(self._seed)
        problem = self._run(whole)
        if not problem:
            return None
        wanted = kind_of_problem(problem)
        kept = lives_first(whole.noted)
        if not self._fails({name: whole.noted[name] for name in kept}, wanted):
            return None
        done = False
        while not done and not self._spent():
            before = len(kept)
            kept = self._pass(kept, whole.noted, wanted)
            done = len(kept) == before
        assert self.best is not None
        choices = {name: whole.noted[name] for name in kept}
        steps = tuple(self.best.done)
        return Shrunk(self._seed, choices, self.best.salt, self.problem, steps, self.attempts)

    def _spent(self) -> bool:
        spent = self._clock() - self._began > self._options.seconds
        return spent or self.attempts >= self._options.attempts

    def _fails(self, choices: Choices, wanted: str) -> bool:
        for salt in range(self._options.salts):
            self.attempts += 1
            plan = Plan(self._seed, choices, salt)
            problem = self._run(plan)
            if problem and kind_of_problem(problem) == wanted:
                self.best, self.problem = plan, problem
                return True
        return False

    def _pass(self, kept: list[str], noted: Choices, wanted: str) -> list[str]:
        """Try to leave out each chunk of choices once, then each smaller chunk, and so on."""
        size = max(len(kept) // 2, 1)
        while size and not self._spent():
            at = 0
            while at < len(kept) and not self._spent():
                rest = kept[:at] + kept[at + size :]
                if rest and self._fails({name: noted[name] for name in rest}, wanted):
                    # Choices that no longer come up are left out without an attempt.
                    assert self.best is not None
                    happened = {name for _, name, choice in self.best.done if choice}
                    kept = [name for name in rest if name in happened]
                else:
                    at += size
            size //= 2
        return kept


def shrink(
    seed: int, options: ShrinkOptions | None = None, simulation: SimulationOptions | None = None
) -> Shrunk | None:
    """Shrink a failing seed to a short script. None: see `Shrinker.shrink`."""
    return Shrinker(seed, options or ShrinkOptions(), partial(fails, options=simulation)).shrink()
