"""Faults in how observers grow, switched on one at a time: the simulation has to find each of them (N2, N3, N10)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perco.notify import claim, worker
from perco.storage import ScanRow
from perco.txn import backfill, catalogue, records
from perco.txn.schema import Observer
from tests.testing.mutants import Mutant

GROWING: dict[str, Mutant] = {}


def mutant(name: str) -> Any:
    return lambda function: GROWING.setdefault(name, function)


@mutant("N10 what is there is read below the registration")
def reads_below(patch: pytest.MonkeyPatch) -> None:
    """Who committed shortly before it did not know of the observer, and nobody looks what that was."""
    right = backfill.Backfill._queries

    def queries(self: backfill.Backfill, entry: catalogue.ObserverEntry) -> Any:
        return right(self, replace(entry, at=max(entry.at - 40, 1)))

    patch.setattr(backfill.Backfill, "_queries", queries)


@mutant("N10 how far a backfill is, is noted before its notify cells are put")
def notes_early(patch: pytest.MonkeyPatch) -> None:
    right = backfill.Backfill._notify

    async def notify(self: backfill.Backfill, id: str, entry: catalogue.ObserverEntry, rows: list[ScanRow]) -> int:
        if rows:
            await self._note(entry, backfill.Noted(entry.at, rows[-1][0] + b"\x00", 0, 0))
        return await right(self, id, entry, rows)

    patch.setattr(backfill.Backfill, "_notify", notify)


@mutant("N10 a backfill is done when nobody has answered")
def takes_no_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backfill, "raise_for", lambda verdict, what: None)


@mutant("N10 how far a backfill was is believed of another registration")
def believes_others(patch: pytest.MonkeyPatch) -> None:
    async def noted(store: Any, entry: catalogue.ObserverEntry) -> backfill.Noted:
        right = backfill.unpack_noted
        row = (catalogue.SYSTEM_TABLE, backfill.BACKFILL_ROW, [("data", entry.number, 1, 1, 1)])
        [[cells]] = await store.read([row])
        return right(cells[0][1]) if cells else backfill.Noted(entry.at, b"", 0, 0)

    patch.setattr(backfill, "noted", noted)


@mutant("N3 acks of a lower version count")
def counts_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(claim, "ack_version", lambda body: 1 << 32)


@mutant("N3 a run does not say of which version it is")
def silent_acks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "ack_head", lambda version: records.ack_head(1))


@mutant("N10 the catalogue goes back")
def goes_back(patch: pytest.MonkeyPatch) -> None:
    right = catalogue.ObserverEntry.declared

    def declared(self: catalogue.ObserverEntry, observer: Observer, since: int) -> catalogue.ObserverEntry:
        if observer.version < self.version:
            return replace(self, version=observer.version, since=since)
        return right(self, observer, since)

    patch.setattr(catalogue.ObserverEntry, "declared", declared)


@mutant("N10 who runs a lower version goes on with it")
def goes_on(patch: pytest.MonkeyPatch) -> None:
    right = worker.Worker.renew

    def renew(self: worker.Worker) -> None:
        mine = dict(self.observers)
        right(self)
        self.observers = mine
        self.superseded = {}

    patch.setattr(worker.Worker, "renew", renew)


@mutant("N10 a higher version is not announced")
def unannounced(patch: pytest.MonkeyPatch) -> None:
    right = catalogue.Catalogue.declare

    def declare(self: catalogue.Catalogue, schema: Any) -> catalogue.Catalogue:
        made = right(self, schema)
        raised = any(made.observers[id].version > entry.version for id, entry in self.observers.items())
        return replace(made, binds=self.binds) if raised else made

    patch.setattr(catalogue.Catalogue, "declare", declare)
