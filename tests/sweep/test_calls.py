"""A sample of `python -m tests.sweep.calls`: every fault at every call of a short run over a store on Bigtable."""

from __future__ import annotations

import pytest

from perco.testing.calls import LATER, LOSE
from perco.testing.direct import CALLED
from tests.sweep import calls

_SEED = 3
_RUNS = 24


@pytest.fixture(scope="module")
def cases() -> list[calls.Case]:
    return calls.cases(_SEED)


def test_all_kinds_of_calls_are_swept(cases: list[calls.Case]) -> None:
    met = {calls.step_of(case.call) for case in cases}
    assert met <= set(CALLED)
    assert {"read", "scan", "prewrite", "commit", "hint", "remove hints", "claim", "renew the lease"} <= met
    assert {"give a ticket", "tell the address", "bound", "catalogue", "look at the owner"} <= met
    assert {f"{LOSE} soon", f"{LOSE} hangs", f"{LATER} soon"} <= {case.fault for case in cases}


@pytest.mark.parametrize("part", range(_RUNS))
def test_nothing_goes_wrong(part: int, cases: list[calls.Case]) -> None:
    case = cases[part * len(cases) // _RUNS]
    assert calls.run(case) == "", case


def test_a_fault_that_does_not_occur_is_told(cases: list[calls.Case]) -> None:
    assert calls.run(cases[0]._replace(call="o.0 calls: claim  #999")) == "the fault did not occur"
