"""Faults in new observers and new versions of them, one at a time: the simulation must find each (N2, N3, N10)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perco.notify import backfill, worker
from perco.protocol import claim, records
from perco.schema import catalogue
from perco.schema.schema import Observer
from perco.storage import ScanRow
from tests.testing.mutants import Mutant

GROWING: dict[str, Mutant] = {}


def mutant(name: str) -> Any:
    return lambda function: GROWING.setdefault(name, function)


@mutant("N10 a backfill notes a page's progress before it puts the page's notify cells")
def notes_early(patch: pytest.MonkeyPatch) -> None:
    right = backfill.Backfill._notify

    async def notify(self: backfill.Backfill, id: str, entry: catalogue.ObserverEntry, rows: list[ScanRow]) -> int:
        if rows:
            await self._note(entry, backfill.Noted(entry.at, rows[-1][0] + b"\x00", 0, 0))
        return await right(self, id, entry, rows)

    patch.setattr(backfill.Backfill, "_notify", notify)


@mutant("N10 a backfill counts as done although a write got no reply")
def takes_no_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backfill, "raise_for", lambda verdict, what: None)


@mutant("N10 a backfill resumes from another registration's progress")
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


@mutant("N3 an ack does not say which version of the observer made it")
def silent_acks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "ack_head", lambda version: records.ack_head(1))


@mutant("N10 an observer's version goes back in the catalogue")
def goes_back(patch: pytest.MonkeyPatch) -> None:
    right = catalogue.ObserverEntry.declared

    def declared(self: catalogue.ObserverEntry, observer: Observer, since: int) -> catalogue.ObserverEntry:
        if observer.version < self.version:
            return replace(self, version=observer.version, since=since)
        return right(self, observer, since)

    patch.setattr(catalogue.ObserverEntry, "declared", declared)
