"""Faults in one-step commits, switched on one at a time: the simulation must find each of them (C1-C7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio

from perco.notify import working
from perco.protocol import commit, mutations
from perco.storage import LOCK, NOTIFY, ROLLBACK, WRITE, Mutation, NoReply
from perco.txn import driver, entered, snapshot as txn_snapshot
from tests.testing.mutants import Mutant, changed, without_checks, without_writes

ONE_STEP: dict[str, Mutant] = {}
ONE_STEP_HARMLESS: dict[str, Mutant] = {}


def mutant(name: str) -> Any:
    return lambda function: ONE_STEP.setdefault(name, function)


def harmless(name: str) -> Any:
    return lambda function: ONE_STEP_HARMLESS.setdefault(name, function)


@mutant("C1 each cell of the primary's part is committed by itself")
def apart(patch: pytest.MonkeyPatch) -> None:
    async def apply(self: driver.Driver, commit: commit.Commit, version: int, asked: Any = None) -> None:
        part = commit._parts[0]
        for intent in part[1:]:
            commit._parts = [[intent], *commit._parts[1:]]
            ts = self.oracle.draw_nowait() or await self.oracle.draw()
            await self.store.apply([mutations.one_step(commit.header, [intent], ts)])
        commit._parts = [part[:1], *commit._parts[1:]]
        await right(self, commit, version, asked)

    right = driver.Driver._in_one_step
    patch.setattr(driver.Driver, "_in_one_step", apply)


@mutant("C2 no cell is entered")
def not_entered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(entered.Entered, "enter", lambda self, commit: None)
    patch.setattr(entered.Entered, "leave", lambda self, commit: None)
    patch.setattr(entered.Entered, "leave_behind", lambda self, commit: None)


@mutant("C2 only the primary is entered")
def primary_entered(patch: pytest.MonkeyPatch) -> None:
    right = entered.Entered.enter

    def enter(self: entered.Entered, commit: commit.Commit) -> None:
        right(self, commit)
        for where in commit.cells[1:]:
            del self.cells[where]

    def leave(self: entered.Entered, commit: commit.Commit) -> None:
        self.cells.pop(commit.cells[0], None)

    patch.setattr(entered.Entered, "enter", enter)
    patch.setattr(entered.Entered, "leave", leave)
    patch.setattr(entered.Entered, "leave_behind", leave)


@mutant("C3 an entry leaves as soon as the reply is lost")
def leaves_early(patch: pytest.MonkeyPatch) -> None:
    right = driver.Driver._ask_primary

    async def ask(self: driver.Driver, commit: commit.Commit) -> None:
        if commit.one_step:
            self.entered.leave(commit)
            await trio.sleep(0.05)  # so that readers come in between
        await right(self, commit)

    def leave(self: entered.Entered, commit: commit.Commit) -> None:
        for where in commit.cells:
            entry = self.cells.get(where)
            if entry is not None and entry.commit_ts == commit.commit_ts:
                del self.cells[where]

    patch.setattr(driver.Driver, "_ask_primary", ask)
    patch.setattr(entered.Entered, "leave", leave)
    patch.setattr(entered.Entered, "leave_behind", leave)


@mutant("C4 get ignores entered cells")
def get_looks_past(patch: pytest.MonkeyPatch) -> None:
    async def past(self: driver.Driver, entry: entered.Entry) -> int:
        return 0

    async def get(self: txn_snapshot.Snapshot, column: Any, key: Any, *, lock: bool = False) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(driver.Driver, "past", past)
            running = right(self, column, key, lock=lock)
            try:
                awaited = running.send(None)
            except StopIteration as ended:
                return ended.value
        return await _rest(running, awaited)

    right = txn_snapshot.Snapshot.get
    patch.setattr(txn_snapshot.Snapshot, "get", get)


class _Rest:
    """The rest of a coroutine that has been started."""

    def __init__(self, running: Any, awaited: Any) -> None:
        self._running, self._awaited = running, awaited

    def __await__(self) -> Any:
        awaited = self._awaited
        while True:
            try:
                sent = yield awaited
            except BaseException as error:
                try:
                    awaited = self._running.throw(error)
                except StopIteration as ended:
                    return ended.value
            else:
                try:
                    awaited = self._running.send(sent)
                except StopIteration as ended:
                    return ended.value


async def _rest(running: Any, awaited: Any) -> Any:
    return await _Rest(running, awaited)


@mutant("C4 get_many ignores entered cells")
def get_many_looks_past(patch: pytest.MonkeyPatch) -> None:
    async def past_cells(self: driver.Driver, cells: Any, ts: int) -> None:
        if not isinstance(cells, tuple):  # the worker's claim passes a tuple
            return
        await right(self, cells, ts)

    right = driver.Driver.past_cells
    patch.setattr(driver.Driver, "past_cells", past_cells)


@mutant("C4 scan ignores entered cells")
def scan_looks_past(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(entered.Entered, "within", lambda self, *where: [])


@mutant("C4 an observer's claim ignores entered cells")
def claim_looks_past(patch: pytest.MonkeyPatch) -> None:
    right = working.Claims._read

    async def read(self: working.Claims, *args: Any) -> Any:
        return await right(self, *args[:-1], ())

    patch.setattr(working.Claims, "_read", read)


@mutant("C5 a one-step commit ignores newer records")
def record(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "one_step", lambda mutation: without_checks(mutation, WRITE))


@mutant("C5 a one-step commit ignores locks")
def lock(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "one_step", lambda mutation: without_checks(mutation, LOCK))


@mutant("C5 a one-step commit ignores rollback markers")
def marker(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "one_step", lambda mutation: without_checks(mutation, ROLLBACK))


@mutant("C6 a lost reply is taken for an abort")
def lost(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.primary_told

    def told(self: commit.Commit, verdict: Any) -> None:
        if self.one_step and isinstance(verdict, NoReply):
            self.state = commit.State.RELEASE
            return
        right(self, verdict)

    patch.setattr(commit.Commit, "primary_told", told)


@mutant("C6 a one-step commit is sent twice")
def twice(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.primary_told

    def told(self: commit.Commit, verdict: Any) -> None:
        if self.one_step and isinstance(verdict, NoReply):
            self.state = commit.State.DRAW
            return
        right(self, verdict)

    patch.setattr(commit.Commit, "primary_told", told)


@mutant("C7 the primary's tablet commits before the other tablets are prewritten")
def first_agent(patch: pytest.MonkeyPatch) -> None:
    right = driver.Driver._prewritten

    async def prewritten(self: driver.Driver, commit: commit.Commit, version: int) -> None:
        if not commit.one_step:
            await right(self, commit, version)
            return
        ts = self.oracle.draw_nowait() or await self.oracle.draw()
        [verdict] = await self.store.apply([mutations.one_step(commit.header, commit._parts[0], ts)])
        for part in commit._parts[1:]:
            await self.store.apply([mutations.prewrite(commit.header, part, again=False)])
        commit.state = commit.state.__class__.DRAW
        commit._standing = [0] + [1] * (len(commit._parts) - 1)
        commit.drawn(ts)
        commit.primary_told(verdict)
        if commit.state is commit.state.__class__.ASK:
            self.entered.enter(commit)

    patch.setattr(driver.Driver, "_prewritten", prewritten)


@mutant("N1 a one-step commit leaves no notify cell")
def no_notify(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "one_step", lambda mutation: without_writes(mutation, NOTIFY))


@mutant("N3 a one-step commit leaves no ack")
def no_ack(patch: pytest.MonkeyPatch) -> None:
    def without(mutation: Mutation) -> Mutation:
        rows = [
            (row, checks, [write for write in writes if not (write[0] == WRITE and write[1] & 0xFFFF)])
            for row, checks, writes in mutation.rows
        ]
        return mutation._replace(rows=rows)

    changed(patch, "one_step", without)


# ------------------------------------------------------------ harmless changes


@harmless("every read waits for all one-step commits in flight")
def all_wait(patch: pytest.MonkeyPatch) -> None:
    def among(self: entered.Entered, cells: Any, ts: int) -> list[entered.Entry]:
        return self.up_to(ts)

    def within(self: entered.Entered, *where: Any) -> Sequence[entered.Entry]:
        return self.up_to(where[-1])

    patch.setattr(entered.Entered, "among", among)
    patch.setattr(entered.Entered, "within", within)


@harmless("every commit uses two phases")
def two_phases(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.__init__

    def init(self: commit.Commit, header: Any, parts: Any, reads: Any = None, *, one_step: bool = False) -> None:
        right(self, header, parts, reads)

    patch.setattr(commit.Commit, "__init__", init)
    patch.setattr(driver.Driver, "laned", False)  # the lane knows one step alone
