"""A sync that perco leaves out is noticed. (`make test-mutants`)"""

from __future__ import annotations

import pytest

from tests.powerloss.running import counts, replay
from tests.powerloss.work import BREAKS


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("broken", sorted(BREAKS))
def test_a_sync_that_is_left_out_is_noticed(broken: str) -> None:  # S2 O1
    durability = "process" if broken == "no mark" else "power"
    cases = "600" if broken == "unsynced copy" else "80"  # what comes next to the copy makes it durable
    code, printed = replay("--durability", durability, "--break", broken, "--cases", cases, "--wrong-max", "3")
    assert code == 1, printed
    assert counts(printed)[2] >= 3
    assert ("O1" if broken == "unsynced bound" else "S2") in BREAKS[broken]
