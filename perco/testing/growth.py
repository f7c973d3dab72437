"""How the program of a simulation grows: which version of an observer a new process has (N3, N10).

At some point, the program gets one more observer, and later a higher version of this observer. Processes that start
later have the new version; processes that are running keep theirs. Now and then, an older program is started
again, and must leave the observer alone.
"""

from __future__ import annotations

from typing import Final

from perco.schema.catalogue import Catalogue
from perco.testing.plan import Plan

GROWN: Final = "copy"  # the observer's id
_OFTEN: Final = 0.4  # the share of seeds whose program grows
_AGAIN: Final = 0.2  # of the processes that could start with the newest program, the share that get the one before it
_LATEST: Final = 2


class Growth:
    """The growth in one run, which ends after `commits` commits. `latest`: the highest version that any process has
    started with; 0: none."""

    active: bool
    latest: int

    def __init__(self, plan: Plan, commits: int = 200) -> None:
        self._plan = plan
        rng = plan.random("growth")
        self.active = rng.random() < _OFTEN
        first = rng.randint(15, 80)
        self._from = (first * commits // 200, (first + rng.randint(20, 80)) * commits // 200)
        self.latest = 0
        self.registered = 0  # the highest version that is certainly in the catalogue
        self.refused = 0  # how many older programs have left the observer alone

    def wanted(self, commits: int) -> bool:
        """Whether it is time for a newer program."""
        return self.active and sum(commits >= each for each in self._from) > self.latest

    def of(self, life: str, commits: int, now: float) -> int:
        """The version that a process has if it starts now; 0: it does not have the observer."""
        rng = self._plan.random(life, "growth")

        def chance() -> str:
            version = max(self.latest, sum(commits >= each for each in self._from)) if self.active else 0
            older = self.registered == version == _LATEST and rng.random() < _AGAIN
            return str(version - older) if version else ""

        version = int(self._plan.choose(f"grown {life}", chance, now) or 0)
        self.latest = max(self.latest, version)
        return version

    def has_gone_back(self, registered: int, catalogue: Catalogue) -> bool:
        """Whether a catalogue has a lower version than the one registered before the catalogue was read."""
        entry = catalogue.observers.get(GROWN)
        return registered > (entry.version if entry is not None else 0)

    def is_older(self, version: int, catalogue: Catalogue) -> bool:
        """Whether a process with this version must not run observers, because the catalogue has a higher version."""
        entry = catalogue.observers.get(GROWN)
        return entry is not None and 0 < version < entry.version
