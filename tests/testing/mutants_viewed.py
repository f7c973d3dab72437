"""Faults in the runs of views that the simulation must find, too: in an embedded store, with a random graph of views.

Each is one of the faults that a component test finds (`mutants_views.py`, `mutants_fresh.py`).
"""

from __future__ import annotations

from typing import Final

from tests.testing import mutants_fresh, mutants_views  # noqa: F401 - they add to COMPONENTS
from tests.testing.mutants import Mutant
from tests.testing.mutants_components import COMPONENTS

_NAMES: Final = (
    "V1 a run does not retract what it no longer gives",
    "V1 an owner's memory is written only once",
    "V1 an owner's memory is written in a transaction of its own",
    "V3 a group that a member leaves is not signalled",
    "V4 a delta is folded twice",
    "V4 an order keeps members that have left",
    "V6 the cut-off cuts a change",
    "V8 a change of a right row does not signal its key",
    "V12 a run keeps the observers from running, and does not tell",
    "V13 a part that a link has left keeps its label",
    "V14 a wait for a view does not include the views that it reads",
)
VIEWED: Final[dict[str, Mutant]] = {name: COMPONENTS[name].mutant for name in _NAMES}
