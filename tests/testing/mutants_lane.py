"""Faults in the lane; a test that drives it beside the driver must find each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from perco.storage import LOCK, NOTIFY, WRITE, Mutation
from perco.txn import lane
from tests.testing.mutants import without_checks, without_writes
from tests.testing.mutants_components import by

_TEST: Final = "tests/component/txn/test_lane.py::test_the_lane_and_the_machine_do_the_same"


def _sends(patch: pytest.MonkeyPatch, change: Callable[[Mutation], Mutation]) -> None:
    right = lane.one_step
    patch.setattr(lane, "one_step", lambda *args: change(right(*args)))


@by(_TEST, "C2 the lane does not look at the cells that are entered")
def blind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lane, "_in_the_way", lambda *_: False)


@by(_TEST, "C5 the lane does not check for locks")
def over_locks(patch: pytest.MonkeyPatch) -> None:
    _sends(patch, lambda mutation: without_checks(mutation, LOCK))


@by(_TEST, "C5 the lane does not check for newer records")
def over_records(patch: pytest.MonkeyPatch) -> None:
    _sends(patch, lambda mutation: without_checks(mutation, WRITE))


@by(_TEST, "N1 the lane puts no notify cells")
def silent(patch: pytest.MonkeyPatch) -> None:
    _sends(patch, lambda mutation: without_writes(mutation, NOTIFY))
