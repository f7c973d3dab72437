"""Faults in reading ahead, switched on one at a time: the simulation must find each of them (T9)."""

from __future__ import annotations

from typing import Any

import pytest

from perco.protocol.snapshot import InData, Value
from perco.txn import prefetch
from tests.testing.mutants import Mutant

AHEAD: dict[str, Mutant] = {}


def mutant(name: str) -> Any:
    return lambda function: AHEAD.setdefault(name, function)


@mutant("T9 a cell that was read ahead is used although it was locked")
def past_its_lock(patch: pytest.MonkeyPatch) -> None:
    right = prefetch.Ahead.took

    def took(self: prefetch.Ahead, table: str, plan: prefetch.Plan, cells: list[list[Any]]) -> Any:
        asked = right(self, table, plan, cells)
        here = self._rows.get((table, plan.row))
        if here is not None:
            for column, known in here.cells.items():
                if type(known) is prefetch.Raw:
                    here.cells[column] = known._replace(locks=())
        return asked

    patch.setattr(prefetch.Ahead, "took", took)


@mutant("T9 the newest data read ahead is used for a record that points elsewhere")
def other_data(patch: pytest.MonkeyPatch) -> None:
    def with_data(seen: Any, raw: prefetch.Raw) -> Any:
        return Value(seen.commit_ts, raw.data[1]) if type(seen) is InData and raw.data is not None else seen

    patch.setattr(prefetch, "with_data", with_data)
