"""Faults in the logs of changes and in following them, switched on one at a time: the simulation must find each of
them (E1 - E4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from perco.history.changes import ChangeStream
from perco.protocol import changes as merging
from perco.protocol.changes import Merge, Taken
from perco.storage import TS_MAX, row, splitting
from tests.testing.mutants import Mutant

CHANGES: dict[str, Mutant] = {}


def mutant(name: str) -> Any:
    return lambda function: CHANGES.setdefault(name, function)


@mutant("E1 a write record gets no entry in the log")
def no_entry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(row, "_log", lambda *_: None)


@mutant("E1 a split does not copy the log")
def split_without_log(patch: pytest.MonkeyPatch) -> None:
    def none(self: splitting.Copying, stop: bytes | None) -> Iterator[Sequence[Any]]:
        yield from ()

    patch.setattr(splitting.Copying, "_log_pages", none)


@mutant("E2 the frontier does not wait for one-step commits")
def not_visible(patch: pytest.MonkeyPatch) -> None:
    right = ChangeStream._step

    async def nothing(ts: int) -> None:
        """Wait for nothing."""

    async def step(self: ChangeStream) -> Merge:
        driver = self._engine.driver
        driver.visible = nothing  # type: ignore[method-assign]
        try:
            return await right(self)
        finally:
            if "visible" in vars(driver):
                del driver.visible

    patch.setattr(ChangeStream, "_step", step)


@mutant("E2 locks below the frontier are not settled")
def not_settled(patch: pytest.MonkeyPatch) -> None:
    async def settle(self: ChangeStream, table: str, frontier: int) -> None:
        """Settle nothing."""

    patch.setattr(ChangeStream, "_settle", settle)


@mutant("E2 locks below the frontier are settled in one pass, and not looked for again")
def settled_once(patch: pytest.MonkeyPatch) -> None:
    async def settle(self: ChangeStream, table: str, frontier: int) -> None:
        await self._locks_found(table, frontier)

    patch.setattr(ChangeStream, "_settle", settle)


@mutant("E2 locks are settled before the frontier is drawn")
def settled_first(patch: pytest.MonkeyPatch) -> None:
    right, settle = ChangeStream._step, ChangeStream._settle

    async def step(self: ChangeStream) -> Merge:
        for table in self._tables:
            await settle(self, table.name, TS_MAX)
        return await right(self)

    not_settled(patch)
    patch.setattr(ChangeStream, "_step", step)


@mutant("E2 the logs are read before the locks are settled")
def read_first(patch: pytest.MonkeyPatch) -> None:
    right, settle, fill = ChangeStream._step, ChangeStream._settle, ChangeStream._fill

    async def step(self: ChangeStream) -> Merge:
        merge = await right(self)
        while hungry := merge.hungry():
            for source in hungry:
                await fill(self, merge, source)
        for table in self._tables:
            await settle(self, table.name, merge.frontier)
        return merge

    not_settled(patch)
    patch.setattr(ChangeStream, "_step", step)


@mutant("E3 a transaction is taken before the other tablets' logs have been read")
def taken_early(patch: pytest.MonkeyPatch) -> None:
    def take(self: Merge) -> Taken | None:
        heads = [source for source in self.sources if source.entries]
        if not heads:
            return None
        first = min(heads, key=lambda source: source.entries[0].commit_ts)
        found = Taken(first.entries[0].commit_ts, [])
        while first.entries and first.entries[0].commit_ts == found.commit_ts:
            found.entries.append((first.table, first.entries.pop(0)))
        return found

    patch.setattr(Merge, "take", take)


@mutant("E3 a page of a log begins after the timestamp at which the last page ended")
def whole_timestamps(patch: pytest.MonkeyPatch) -> None:
    right = merging.log_key
    patch.setattr(merging, "log_key", lambda prefix, column, ts: right(prefix, column, ts + 1))


@mutant("E4 changes that the vacuum has removed are not missed")
def not_missed(patch: pytest.MonkeyPatch) -> None:
    async def must_be_kept(self: ChangeStream) -> None:
        """Check nothing."""

    patch.setattr(ChangeStream, "_must_be_kept", must_be_kept)
