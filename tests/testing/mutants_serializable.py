"""Faults in serializable transactions and read locks, switched on one at a time; see `mutants.py`.

`SERIALIZABLE` has the faults of the serializable mode, `LOCKS` those of read locks. A workload in the mode concerned
must find each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perco.protocol import commit, reads
from perco.protocol.records import unpack_trace
from perco.storage import LOCK, SHARED, TRACE, WRITE, Mutation, Write
from perco.txn import driver, validation
from tests.testing.mutants import Mutant, changed, without_writes

SERIALIZABLE: dict[str, Mutant] = {}
LOCKS: dict[str, Mutant] = {}


def mutant(of: dict[str, Mutant], name: str) -> Callable[[Mutant], Mutant]:
    def note(function: Mutant) -> Mutant:
        of[name] = function
        return function

    return note


def without_checks_of_writes(mutation: Mutation, group: str) -> Mutation:
    """A transaction that locks a cell to write it does not check a group."""
    rows = []
    for row, checks, writes in mutation.rows:
        written = {column for in_group, column, _, _ in writes if in_group in (LOCK, WRITE)}
        rows.append((row, [check for check in checks if check[1] != group or check[2] not in written], writes))
    return mutation._replace(rows=rows)


def without_checks_of_reads(mutation: Mutation, group: str) -> Mutation:
    """A transaction that locks a cell that it has read does not check a group."""
    rows = []
    for row, checks, writes in mutation.rows:
        shared = {column for in_group, column, _, _ in writes if in_group in (SHARED, TRACE)}
        rows.append((row, [check for check in checks if check[1] != group or check[2] not in shared], writes))
    return mutation._replace(rows=rows)


def checked(patch: pytest.MonkeyPatch, change: Callable[[Mutation], Mutation]) -> None:
    """Change both steps that check a cell: before they lock it, or before they write it without a lock."""
    for step in ("prewrite", "one_step"):
        changed(patch, step, change)


# ------------------------------------------------------------ validation


@mutant(SERIALIZABLE, "T14 nothing is validated")
def nothing(patch: pytest.MonkeyPatch) -> None:
    async def validate(self: driver.Driver, commit: commit.Commit) -> None:
        commit.validated()

    patch.setattr(driver.Driver, "_validate", validate)


@mutant(SERIALIZABLE, "T14 reads are validated before commit_ts is drawn")
def before_the_draw(patch: pytest.MonkeyPatch) -> None:
    right = driver.Driver._validate
    until_decided = driver.Driver._until_decided

    async def validate(self: driver.Driver, commit: commit.Commit) -> None:
        commit.validated()

    async def first(self: driver.Driver, one: commit.Commit, version: int) -> None:
        if one.state is commit.State.DRAW and one.reads is not None:
            one.state, one.commit_ts = commit.State.VALIDATE, self.oracle.last
            await right(self, one)
            one.state, one.commit_ts = commit.State.DRAW, 0
        await until_decided(self, one, version)

    patch.setattr(driver.Driver, "_validate", validate)
    patch.setattr(driver.Driver, "_until_decided", first)


@mutant(SERIALIZABLE, "T14 validation ignores another transaction's lock")
def foreign_lock(patch: pytest.MonkeyPatch) -> None:
    def version_at(ts: int, own: int, locks: Any, writes: Any, known: Any) -> int:
        return writes[0][0] if writes else 0

    patch.setattr(validation, "version_at", version_at)


@mutant(SERIALIZABLE, "T14 an empty range is not read again")
def empty_range(patch: pytest.MonkeyPatch) -> None:
    right = validation.Validation._is_as_read

    async def is_as_read(self: validation.Validation, scanned: reads.Range) -> bool:
        return not scanned.rows or await right(self, scanned)

    patch.setattr(validation.Validation, "_is_as_read", is_as_read)


@mutant(SERIALIZABLE, "T14 gaps between rows are not read again")
def gaps(patch: pytest.MonkeyPatch) -> None:
    took = reads.Range.took
    rows: dict[int, tuple[reads.Range, set[bytes]]] = {}  # the range too: otherwise another one may get its id

    def noted(self: reads.Range, row: bytes, versions: Any) -> None:
        rows.setdefault(id(self), (self, set()))[1].add(row)
        took(self, row, versions)

    again = reads.Range.again
    add = reads.Range.add

    def only_these(self: reads.Range) -> reads.Range:
        now = again(self)
        rows[id(now)] = now, rows.get(id(self), (self, set()))[1]
        return now

    def added(self: reads.Range, row: bytes, versions: Any) -> None:
        if row in rows.get(id(self), (self, {row}))[1]:
            add(self, row, versions)

    patch.setattr(reads.Range, "took", noted)
    patch.setattr(reads.Range, "again", only_these)
    patch.setattr(reads.Range, "add", added)


@mutant(SERIALIZABLE, "T14 a scan that reached its end is validated only up to its last row")
def end(patch: pytest.MonkeyPatch) -> None:
    passed = reads.Range.passed
    patch.setattr(reads.Range, "passed", lambda self, row: None if row is None else passed(self, row))


@mutant(SERIALIZABLE, "T14 a cell that was absent is not read again")
def absent(patch: pytest.MonkeyPatch) -> None:
    note = reads.Reads.note

    def only_found(self: reads.Reads, table: str, row: bytes, column: int, commit_ts: int) -> None:
        if commit_ts:
            note(self, table, row, column, commit_ts)

    patch.setattr(reads.Reads, "note", only_found)


# ------------------------------------------------------------ read locks


@mutant(LOCKS, "T14 a shared lock is granted despite a newer record")
def newer_record(patch: pytest.MonkeyPatch) -> None:
    checked(patch, lambda mutation: without_checks_of_reads(mutation, WRITE))


@mutant(LOCKS, "T14 a shared lock is granted despite a write lock")
def held_by_a_writer(patch: pytest.MonkeyPatch) -> None:
    checked(patch, lambda mutation: without_checks_of_reads(mutation, LOCK))


@mutant(LOCKS, "T14 a writer ignores traces")
def traces(patch: pytest.MonkeyPatch) -> None:
    checked(patch, lambda mutation: without_checks_of_writes(mutation, TRACE))


@mutant(LOCKS, "T14 a writer ignores shared locks")
def shared_locks(patch: pytest.MonkeyPatch) -> None:
    checked(patch, lambda mutation: without_checks_of_writes(mutation, SHARED))


@mutant(LOCKS, "T14 a shared lock leaves no trace")
def no_trace(patch: pytest.MonkeyPatch) -> None:
    for step in ("commit", "one_step"):
        changed(patch, step, lambda mutation: without_writes(mutation, TRACE))


@mutant(LOCKS, "T14 the trace is left at start_ts")
def trace_at_start(patch: pytest.MonkeyPatch) -> None:
    def at_start(write: Write) -> Write:
        group, column, _, value = write
        return (group, column, unpack_trace(value), value) if group == TRACE and value is not None else write

    for step in ("commit", "one_step"):
        changed(
            patch,
            step,
            lambda mutation: mutation._replace(
                rows=[(row, checks, [at_start(write) for write in writes]) for row, checks, writes in mutation.rows]
            ),
        )
