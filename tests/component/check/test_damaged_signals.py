"""Each kind of damage to signals gives its finding, and no other; it is repaired if no data is lost by that (N5)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import perco
from perco.database.inside import inside
from perco.protocol.records import (
    BARE,
    PUT,
    READ,
    SIGNAL,
    ack_of,
    bare_column,
    pack_cause,
    pack_lock,
    pack_proof,
    pack_record,
    pack_trace,
)
from perco.storage import DATA, LOCK, NOTIFY, PENDING, ROLLBACK, SHARED, TRACE, WRITE
from tests.component.check.stores import Docs, Store, opened
from tests.component.check.test_damaged_stores import found


class Signalled(Docs):
    """The same with a signal and an observer of it."""

    def __init__(self, keep_s: float = 3600.0) -> None:
        super().__init__(observe=False, keep_s=keep_s)
        self.grown = self.docs.signal("grown")
        self.seen: list[Any] = []
        self.schema.observe(self.grown, id="count")(self.count_it)

    async def count_it(self, txn: perco.Transaction, change: perco.Change[str, None]) -> None:
        self.seen.append(change)
        txn.set(self.rank, change.key, len(self.seen))


class Raised(Store):
    """A store in which that signal has been raised; `column` and `ack`: of the signal in the store."""

    docs: Signalled

    @property
    def column(self) -> int:
        return inside(self.db).known.bind_signal(self.docs.grown).column

    @property
    def count(self) -> int:
        [number] = inside(self.db).known.bind_signal(self.docs.grown).observers
        return number

    @property
    def waits(self) -> int:
        return ack_of(self.column, self.count)


@asynccontextmanager
async def raised(*, run: bool = True) -> AsyncIterator[Raised]:
    docs = Signalled()
    async with opened("memory:", docs) as store:
        db = store.db
        for key in ("a", "k"):
            async with db.transaction() as txn:
                txn.signal(docs.grown, key)
        if run:
            async with db.worker():
                await db.wait_idle()
        yield Raised(db, docs)


def entry(primary: tuple[bytes, int], kind: int = SIGNAL, **other: object) -> bytes:
    parts = {"observers": (), "covers": (), "root": 0, "depth": 0, "token": "t", **other}
    return pack_lock((kind, ("docs", *primary), b"", *parts.values()))


async def test_a_store_with_signals_is_clean() -> None:  # N5
    for run in (False, True):
        async with raised(run=run) as store:
            result = await store.check()
            assert (result.findings, result.clean) == ((), True)


async def test_a_pending_signal_that_does_not_decode_notifies() -> None:  # N5: once too often rather than never
    async with raised() as store:
        mended = await store.cells()
        ts = await store.draw()
        mended["docs", NOTIFY, b"a", store.waits, ts] = b""
        await store.plant(b"a", (PENDING, store.column, ts, b"nothing"))
        await found(store, "error", "N5", "does not decode", "notify its observers", mended=mended)


async def test_a_pending_removal_that_does_not_decode_removes_nothing() -> None:  # N5
    async with raised(run=False) as store:
        mended = await store.cells()
        await store.plant(b"a", (PENDING, store.waits, await store.draw(), b"nothing"))
        await found(store, "error", "N5", "does not decode", "delete the pending entry", mended=mended)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"kind": PUT}, "is of kind 1"),
        ({"kind": READ}, "is of kind 5"),
        ({"observers": (77,)}, "notifies unknown observers #77"),
        ({}, "notifies no observer"),
    ],
)
async def test_a_pending_signal_that_makes_no_sense(how: dict[str, Any], what: str) -> None:  # N5
    async with raised() as store:
        ts = await store.draw()
        await store.plant(b"a", (PENDING, store.column, ts, entry((b"a", bare_column(store.column)), **how)))
        await found(store, "error", "N5", what)


async def test_a_removal_of_what_its_run_cannot_have_seen() -> None:  # N2
    async with raised() as store:
        ts = await store.draw()
        for covers in ((), (ts + 1,)):
            await store.plant(b"a", (PENDING, store.waits, ts, entry((b"a", bare_column(store.column)), covers=covers)))
            await found(store, "error", "N5", "removes what its run cannot have seen")


async def test_a_bare_primary_that_is_not_its_transactions() -> None:  # T12
    async with raised() as store:
        bare, ts = bare_column(store.column), await store.draw()
        for value in (entry((b"k", bare), BARE), entry((b"a", bare), SIGNAL)):
            await store.plant(b"a", (PENDING, bare, ts, value))
            await found(store, "error", "N5", "is not its transaction's primary")


@pytest.mark.parametrize(("group", "what"), [(TRACE, "stands beside its trace"), (ROLLBACK, "its rollback marker")])
async def test_a_bare_primary_that_is_decided_and_pending(group: str, what: str) -> None:  # T5, T8
    async with raised() as store:
        bare, ts = bare_column(store.column), await store.draw()
        done = pack_proof(await store.draw()) if group == TRACE else b""
        await store.plant(b"a", (PENDING, bare, ts, entry((b"a", bare), BARE)), (group, bare, ts, done))
        await found(store, "error", "N5", what)


async def test_a_transaction_that_committed_and_was_rolled_back() -> None:  # T5
    async with raised() as store:
        bare, ts = bare_column(store.column), await store.draw()
        await store.plant(b"a", (TRACE, bare, ts, pack_proof(await store.draw())), (ROLLBACK, bare, ts, b""))
        await found(store, "error", "T5", "committed here and was rolled back")


@pytest.mark.parametrize(
    ("value", "invariant", "what"),
    [
        (b"junk", "T1", "does not decode"),
        (pack_trace(3), "T1", "does not decode"),
        (pack_proof(1), "T2", "began no earlier"),
        (pack_proof(10**9), "O1", "above the oracle's bound"),
    ],
)
async def test_a_bare_primarys_trace_that_makes_no_sense(value: bytes, invariant: str, what: str) -> None:
    async with raised() as store:
        await store.plant(b"a", (TRACE, bare_column(store.column), await store.draw(), value))
        await found(store, "error", invariant, what)


@pytest.mark.parametrize(
    ("group", "value", "what"),
    [
        (WRITE, pack_record(PUT, 10, b"v"), "a write record"),
        (WRITE, b"junk", "a write record"),
        (LOCK, entry((b"a", 1 << 16), PUT), "a lock"),
        (SHARED, entry((b"a", 1 << 16), READ), "a shared lock"),
        (TRACE, pack_trace(10), "a trace"),
        (DATA, b"v", "data"),
    ],
)
async def test_a_signal_that_was_written(group: str, value: bytes, what: str) -> None:  # N5
    async with raised() as store:
        while await store.draw() < 12:  # began at 10, and committed later
            pass
        await store.plant(b"a", (group, store.column, await store.draw(), value))
        await found(store, "error", "N5", f"{what} in the column of a signal")


async def test_a_pending_entry_above_the_oracles_bound() -> None:  # O1
    async with raised() as store:
        value = entry((b"a", bare_column(store.column)), observers=(store.count,))
        await store.plant(b"a", (PENDING, store.column, 10**9, value))
        await found(store, "error", "O1", "above the oracle's bound")


async def test_pending_entries_that_were_left_are_notes_and_settled_by_a_repair() -> None:  # N5, L1
    async with raised() as store:
        bare, dead, done = bare_column(store.column), await store.draw(), await store.draw()
        commit_ts = await store.draw()
        told = (store.count,)
        await store.plant(b"a", (PENDING, store.column, dead, entry((b"z", bare), observers=told)))
        await store.plant(b"b", (PENDING, store.column, done, entry((b"c", bare), observers=told)))
        await store.plant(b"c", (TRACE, bare, done, pack_proof(commit_ts)))
        result = await store.check()
        assert (result.clean, result.orphans, result.unsettled) == (True, 1, 1)
        assert sorted(finding.what.split(":")[0] for finding in result.findings) == ["orphan", "unsettled"]
        repaired = await store.repair()
        assert (repaired.settled, repaired.after.findings) == (2, ())
        cells = await store.cells()
        assert [key for key in cells if key[1] == PENDING] == []
        assert [key[2:] for key in cells if key[1] == NOTIFY] == [(b"b", store.waits, commit_ts)]
        assert ("docs", ROLLBACK, b"z", bare, dead) in cells


async def test_notify_cells_of_a_signal_need_no_change() -> None:  # N5
    async with raised() as store:
        ts = await store.draw()
        await store.plant(b"new", (NOTIFY, store.waits, ts, pack_cause(ts, 0)))
        assert (await store.check()).findings == ()
