"""How the programs of a simulation grow: which version of an observer a process has that comes up (N3, N10).

At some time a program has an observer more, and later a higher version of it. Those that come up then have it; those
that live go on with what they have; and now and then an older program is started again, and has to be refused.
"""

from __future__ import annotations

from typing import Final

from perco.testing.plan import Plan
from perco.txn.catalogue import Catalogue

GROWN: Final = "copy"  # the observer
_OFTEN: Final = 0.4  # of the seeds
_AGAIN: Final = 0.2  # of the lives that could be of a newer program: of the one before
_LATEST: Final = 2


class Growth:
    """Of one run, which ends after so many `commits`. `latest`: the highest version that any process has come up with;
    0: none."""

    def __init__(self, plan: Plan, commits: int = 200) -> None:
        self._plan = plan
        rng = plan.random("growth")
        self.active = rng.random() < _OFTEN
        first = rng.randint(15, 80)
        self._from = (first * commits // 200, (first + rng.randint(20, 80)) * commits // 200)
        self.latest = 0
        self.registered = 0  # the highest that surely is in the catalogue
        self.refused = 0  # older programs

    def wanted(self, commits: int) -> bool:
        """Whether it is time for a newer program."""
        return self.active and sum(commits >= each for each in self._from) > self.latest

    def of(self, life: str, commits: int, now: float) -> int:
        """The version that a process has which comes up now; 0: it does not have the observer."""
        rng = self._plan.random(life, "growth")

        def chance() -> str:
            version = max(self.latest, sum(commits >= each for each in self._from)) if self.active else 0
            older = self.registered == version == _LATEST and rng.random() < _AGAIN
            return str(version - older) if version else ""

        version = int(self._plan.choose(f"grown {life}", chance, now) or 0)
        self.latest = max(self.latest, version)
        return version

    def has_gone_back(self, registered: int, catalogue: Catalogue) -> bool:
        """Whether a catalogue has less than what had been registered before it was read."""
        entry = catalogue.observers.get(GROWN)
        return registered > (entry.version if entry is not None else 0)

    def is_older(self, version: int, catalogue: Catalogue) -> bool:
        """Whether a process that has it, and has read that catalogue, must not run observers any more."""
        entry = catalogue.observers.get(GROWN)
        return entry is not None and 0 < version < entry.version
