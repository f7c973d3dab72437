"""perco.testing's machine, with a look into its rows."""

from __future__ import annotations

from perco.testing.machine import CrashedError as CrashedError, Machine as _Machine
from tests.support.rows import Rows


class Machine(_Machine):
    @property
    def rows(self) -> Rows:
        return Rows(self.store)
