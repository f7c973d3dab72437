"""Power fails while a store is made, written to, opened, enlarged, split: what was acknowledged is there (S2, O1)."""

from __future__ import annotations

import pytest

from tests.powerloss.__main__ import FIXTURE
from tests.powerloss.running import counts, replay

KINDS = {"none", "all", "all but one", "one", "some", "torn"}


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("durability", ["power", "process"])
def test_after_a_power_loss_nothing_acknowledged_is_missing_or_it_is_refused(durability: str) -> None:  # S2 O1
    code, printed = replay("--durability", durability, "--cases", "160" if durability == "power" else "60")
    kinds, cases, wrong = counts(printed)
    assert not wrong, printed
    assert code == 0
    assert set(kinds) == KINDS
    assert cases >= 30


def test_of_a_trace_that_was_kept() -> None:  # S2 O1
    code, printed = replay("--trace", str(FIXTURE), "--cases", "80", "--seed", "1")
    assert code == 0, printed
    assert counts(printed)[1] >= 40
