"""What happens in a run: by chance from a seed, noted; or exactly what a list says.

Every choice that a run could do without has a name: a client's transaction, a fault that befalls a mutation, a death, a
pause, a jump of a clock. The name says what it befalls ("LOSE_REPLY" to "p0.1: commit of c2#5 in lists k3"), not when,
so the others keep their meaning when one is left out: that is what `shrink.py` does.

What is only noise (delays, which row a scanner looks at first) is drawn from generators that are seeded by name, so
that one who draws less does not change what others draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random


class Plan:
    """The choices of one run. `given` None: made by chance, and noted in `noted`."""

    def __init__(self, seed: int, given: Mapping[str, str] | None = None, salt: int = 0) -> None:
        self.seed, self.given, self.salt = seed, given, salt
        self.noted: dict[str, str] = {}
        # (when, name, choice), in the order in which they came about; of a replay, what nothing befell too
        self.done: list[tuple[float, str, str]] = []

    @property
    def replays(self) -> bool:
        return self.given is not None

    def random(self, *names: object) -> Random:
        """A generator of its own for whoever is called that."""
        return Random(f"{self.seed} {' '.join(map(str, names))}")

    def noise(self, *names: object) -> Random:
        """The same for what the salt changes: delays, orders."""
        return self.random(*names, "salt", self.salt) if self.salt else self.random(*names, "noise")

    def choose(self, name: str, chance: Callable[[], str], now: float) -> str:
        """What befalls what is called that; "": nothing."""
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
        """Of a given plan: the numbers n for which `prefix` + n is in it, in order."""
        assert self.given is not None
        return sorted(int(name[len(prefix) :]) for name in self.given if name.startswith(prefix))


def lives_first(names: Iterable[str]) -> list[str]:
    """Names in the order in which they are best left out: whole lives, then transactions, then what befell them."""
    rank = {"life": 0, "txn": 1}
    return sorted(names, key=lambda name: rank.get(name.split(" ", 1)[0], 2))
