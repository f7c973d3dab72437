"""Faults in the code of a store on Bigtable and of its direct clients, switched on one at a time: `perco/bigtable`.
`mutants_bigtable.py` has those that component tests find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import trio

from perco.bigtable import lease, owner_row, rows, store, tickets
from perco.bigtable.wire import types
from perco.testing import direct as simulated
from tests.testing.mutants import Mutant

DIRECT: Final[dict[str, Mutant]] = {}


def direct(name: str) -> Callable[[Mutant], Mutant]:
    def note(function: Mutant) -> Mutant:
        DIRECT[name] = function
        return function

    return note


# ------------------------------------------------------------ the owner


@direct("O1 the next owner does not wait for the lease to end")
def claims_at_once(patch: pytest.MonkeyPatch) -> None:
    right, plain = store.BigtableStore._claim, simulated._Lease.__init__

    async def claim(self: Any, *, direct: bool) -> None:
        options, self._options = self._options, replace(self._options, lease_s=0.05)
        try:
            await right(self, direct=direct)
        finally:
            self._options = options

    def lasts(self: Any, place: Any, holder: Any, lease_s: float, claimed_at: float) -> None:
        plain(self, place, holder, simulated.LEASE_S, claimed_at)

    patch.setattr(store.BigtableStore, "_claim", claim)
    patch.setattr(simulated._Lease, "__init__", lasts)


def _whatever(place: Any, holder: Any) -> Any:
    """A change of the owner's row that is made in any case."""
    made = owner_row.change(place, holder)
    made.predicate_filter.CopyFrom(types().RowFilter(block_all_filter=True))
    return made


@direct("O1 a process becomes the owner unconditionally")
def claims_blindly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "change", _whatever)


@direct("O1 a former owner renews its lease after it was taken over")
def renews_blindly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "change", _whatever)


# ------------------------------------------------------------ tickets and permits


@direct("T13 clients are not told the floor")
def untold_floor(patch: pytest.MonkeyPatch) -> None:
    async def raise_floor(self: Any, ts: int, *, wait: bool) -> None:
        await trio.lowlevel.checkpoint()

    patch.setattr(tickets.Tickets, "raise_floor", raise_floor)


# ------------------------------------------------------------ hints


@direct("N7 no hint is written")
def hintless(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows, "wants_hint", lambda mutation: False)
