"""The choices of a run: drawn from a seed and noted, or replayed from a list.

Every choice that can be left out of a run has a name: a client's transaction, a fault that hits a mutation, a
death, a pause, a jump of a clock. The name says what the choice hits ("LOSE_REPLY" at "p0.1: commit of c2#5 in lists
k3"), not when. So when `shrink.py` leaves out a choice, the other choices keep their meaning.

Noise (delays, which row a scanner looks at first) is drawn from generators that are seeded by name, so that the number
of draws from one generator does not change what the others draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random


class Plan:
    """The choices of one run. `given`: the choices to replay; None: choices are drawn, and noted in `noted`."""

    seed: int
    given: Mapping[str, str] | None
    salt: int

    def __init__(self, seed: int, given: Mapping[str, str] | None = None, salt: int = 0) -> None:
        self.seed, self.given, self.salt = seed, given, salt
        self.noted: dict[str, str] = {}
        # (when, name, choice), in order; in a replay, also names for which nothing was chosen
        self.done: list[tuple[float, str, str]] = []

    @property
    def replays(self) -> bool:
        return self.given is not None

    def random(self, *names: object) -> Random:
        """A generator for these names, which no other names share."""
        return Random(f"{self.seed} {' '.join(map(str, names))}")

    def noise(self, *names: object) -> Random:
        """Like `random`. Its numbers also depend on the salt. Use it for noise: delays, and the order of events."""
        return self.random(*names, "salt", self.salt) if self.salt else self.random(*names, "noise")

    def choose(self, name: str, chance: Callable[[], str], now: float) -> str:
        """The choice with this name; "": nothing happens."""
        if self.given is not None:
            choice = self.given.get(name, "")
        else:
            choice = chance()
            if choice:
                self.noted[name] = choice
        if choice or self.given is not None:
            self.done.append((now, name, choice))
        return choice

    def numbers(self, prefix: str) -> list[int]:
        """The numbers n for which `prefix` + n is in the given plan, in order."""
        assert self.given is not None
        return sorted(int(name[len(prefix) :]) for name in self.given if name.startswith(prefix))


def lives_first(names: Iterable[str]) -> list[str]:
    """Names in the order in which to leave them out: whole lives of processes, then transactions, then all others."""
    rank = {"life": 0, "txn": 1}
    return sorted(names, key=lambda name: rank.get(name.split(" ", 1)[0], 2))
