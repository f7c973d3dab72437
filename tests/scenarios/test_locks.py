"""Readers and writers that meet locks: of the living they wait for the end, of the dead they settle."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside, local_owner
from perco.storage import Mutation
from tests.support import bank
from tests.support.faults import TWO_PHASES, FaultyRowStore, gated, kind_of, use
from tests.support.machines import CrashedError, Machine

docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
n = docs.column("n", perco.INT64)
long = docs.column("long", perco.TEXT)
SCHEMA = perco.Schema(docs)
KEYS = ["a", "b", "i", "q"]  # in three tablets
LONG = "x" * 300


async def write(db: perco.Database, value: int, keys: list[str] = KEYS) -> perco.Transaction:
    async with db.transaction() as txn:
        for key in keys:
            txn.set(n, key, value)
            txn.set(long, key, f"{value}{LONG}")
    return txn


async def by_get(snap: perco.Snapshot) -> list[int | None]:
    return [await snap.get(n, key) for key in KEYS]


async def by_get_long(snap: perco.Snapshot) -> list[int | None]:
    return [int((await snap.get(long, key) or "-1").rstrip("x")) for key in KEYS]


async def by_get_many(snap: perco.Snapshot) -> list[int | None]:
    return list((await snap.get_many(n, KEYS)).values())


async def by_get_many_long(snap: perco.Snapshot) -> list[int | None]:
    return [int((value or "-1").rstrip("x")) for value in (await snap.get_many(long, KEYS)).values()]


async def by_row(snap: perco.Snapshot) -> list[int | None]:
    return [(await snap.row(docs, key))[n] for key in KEYS]


async def by_scan(snap: perco.Snapshot) -> list[int | None]:
    return [row[n] async for row in snap.scan(docs)]


async def by_scan_backwards(snap: perco.Snapshot) -> list[int | None]:
    return [row[n] async for row in snap.scan(docs, columns=[n], reverse=True)][::-1]


READS = [by_get, by_get_long, by_get_many, by_get_many_long, by_row, by_scan, by_scan_backwards]
Read = Callable[[perco.Snapshot], Awaitable[list[int | None]]]


class Reader:
    """A read in a task of its own; `result` when it has ended."""

    def __init__(self, nursery: trio.Nursery, snap: perco.Snapshot, read: Read) -> None:
        self.result: list[int | None] | None = None
        nursery.start_soon(self._run, snap, read)

    async def _run(self, snap: perco.Snapshot, read: Read) -> None:
        self.result = await read(snap)


# ------------------------------------------------------------ T9: readers


@pytest.mark.parametrize("read", READS)
async def test_a_reader_waits_for_a_live_lock_and_sees_what_was_committed_before_it(read: Read) -> None:  # T9
    """commit_ts is drawn and below the reader's timestamp: the old value would be wrong."""
    async with perco.open("memory:", SCHEMA) as db:
        await write(db, 1)
        gate = await gated(db, "commit")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, db, 2)
            await gate.reached()
            async with db.snapshot() as snap:
                reader = Reader(nursery, snap, read)
                await trio.testing.wait_all_tasks_blocked()
                assert reader.result is None
                gate.open()
                await trio.testing.wait_all_tasks_blocked()
                assert reader.result == [2, 2, 2, 2]
        assert db.statistics().counters.lock_waits >= 1


@pytest.mark.parametrize("read", READS)
async def test_a_reader_below_the_commit_waits_and_sees_the_old(read: Read) -> None:  # T9
    """The lock is at or below the reader's timestamp, the commit above it."""
    async with perco.open("memory:", SCHEMA) as db:
        await write(db, 1)
        txn = await db.begin()
        for key in KEYS:
            txn.set(n, key, 2)
            txn.set(long, key, f"2{LONG}")
        async with db.snapshot() as snap, trio.open_nursery() as nursery:
            gate = await gated(db, "commit")
            nursery.start_soon(txn.commit)
            await gate.reached()
            reader = Reader(nursery, snap, read)
            await trio.testing.wait_all_tasks_blocked()
            assert reader.result is None
            gate.open()
            await trio.testing.wait_all_tasks_blocked()
            assert reader.result == [1, 1, 1, 1]
            assert txn.commit_ts > snap.start_ts > txn.start_ts


@pytest.mark.parametrize("read", READS)
async def test_a_reader_that_is_older_than_the_lock_does_not_wait(read: Read) -> None:  # T9
    async with perco.open("memory:", SCHEMA) as db:
        await write(db, 1)
        async with db.snapshot() as snap:
            gate = await gated(db, "commit")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write, db, 2)
                await gate.reached()
                assert await read(snap) == [1, 1, 1, 1]
                gate.open()


@pytest.mark.parametrize("read", READS)
async def test_a_reader_does_not_wait_for_phase_two(read: Read) -> None:  # T3 S2
    """The primary has committed; the secondaries' locks stand, and say all that a reader needs."""
    async with perco.open("memory:", SCHEMA) as db:
        await write(db, 1)
        gate = await gated(db, "commit", skip=1)
        txn = await write(db, 2)
        async with db.snapshot() as snap:
            assert await read(snap) == [2, 2, 2, 2]
        async with db.snapshot(ts=txn.commit_ts - 1) as snap:
            assert await read(snap) == [1, 1, 1, 1]
        await gate.reached()
        gate.open()
        await trio.testing.wait_all_tasks_blocked()
        async with db.snapshot() as snap:
            assert await read(snap) == [2, 2, 2, 2]


@pytest.mark.parametrize("read", READS)
async def test_a_reader_waits_until_a_conflicting_writer_has_let_go(read: Read) -> None:  # T9
    async with perco.open("memory:", SCHEMA, options=TWO_PHASES) as db:
        await write(db, 1)
        loser = await db.begin()
        await write(db, 2, ["q"])
        loser.set(n, "a", 3)
        loser.set(n, "b", 3)
        loser.set(n, "q", 3)
        gate = await gated(db, "rollback")
        with pytest.raises(perco.WriteConflict):
            await loser.commit()
        await gate.reached()  # its locks go in the background
        async with db.snapshot() as snap, trio.open_nursery() as nursery:
            reader = Reader(nursery, snap, by_get)
            await trio.testing.wait_all_tasks_blocked()
            assert reader.result is None
            gate.open()
        assert reader.result == [1, 1, 1, 2]


async def test_a_waiting_reader_can_be_cancelled() -> None:  # T9
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "commit")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, db, 2)
            await gate.reached()
            async with db.snapshot() as snap:
                with trio.move_on_after(0) as scope:
                    await by_scan(snap)
                assert scope.cancelled_caught
            gate.open()


# ------------------------------------------------------------ the dead


async def dead(machine: Machine, number: int, keys: list[str], value: int) -> None:
    """A transaction whose process died when so many of its mutations were made."""
    async with machine.crashing(number, made=False) as (db, _):
        with pytest.raises(CrashedError):
            await write(db, value, keys)


@pytest.mark.parametrize("read", READS)
async def test_a_reader_rolls_back_what_died_before_its_commit(read: Read) -> None:  # T5 T9
    """Fluo's testRollbackMany: rows and columns of a dead client; the first reader settles them."""
    machine = Machine(SCHEMA, one_step=False)
    async with machine.opened() as db:
        await write(db, 1)
    await dead(machine, 3, KEYS, 2)
    assert machine.locks() == 2 * len(KEYS)
    async with machine.opened() as db:
        async with db.snapshot() as snap:
            assert await read(snap) == [1, 1, 1, 1]
        assert db.statistics().counters.rolled_back >= 1
        assert db.statistics().counters.rolled_forward == 0


@pytest.mark.parametrize("read", READS)
async def test_a_reader_rolls_forward_what_died_after_its_commit(read: Read) -> None:  # T1 T9
    """Fluo's testRollforwardMany."""
    machine = Machine(SCHEMA, one_step=False)
    async with machine.opened() as db:
        await write(db, 1)
    async with machine.crashing(4, made=False) as (db, _):
        await write(db, 2)
        await trio.testing.wait_all_tasks_blocked()
    assert machine.locks() == 4
    async with machine.opened() as db:
        async with db.snapshot() as snap:
            assert await read(snap) == [2, 2, 2, 2]
        assert db.statistics().counters.rolled_forward >= 1
        assert db.statistics().counters.rolled_back == 0


@pytest.mark.parametrize("read", [by_get_many, by_scan, by_scan_backwards])
async def test_one_read_meets_locks_to_roll_back_and_locks_to_roll_forward(read: Read) -> None:  # T9
    """Fluo's ParallelScannerIT: several dead transactions, mixed, in a single multi-get or scan."""
    machine = Machine(SCHEMA, one_step=False)
    async with machine.opened() as db:
        await write(db, 1)
    await dead(machine, 1, ["a"], 2)  # died before its commit
    async with machine.crashing(3, made=False) as (db, _):
        async with db.transaction() as txn:  # died after it
            txn.set(n, "b", 3)
            txn.set(n, "q", 3)
            txn.set(long, "q", "3")
        await trio.testing.wait_all_tasks_blocked()
    await dead(machine, 1, ["i"], 4)
    assert machine.locks() == 5
    async with machine.opened() as db:
        async with db.snapshot() as snap:
            assert await read(snap) == [1, 3, 1, 3]
        counters = db.statistics().counters
        assert counters.rolled_back >= 2
        assert counters.rolled_forward == 1


async def test_exactly_one_marker_is_left_by_a_rollback() -> None:  # T5
    """Fluo's testRollbackSelf and friends: on the primary, and nowhere else."""
    machine = Machine(SCHEMA, one_step=False)
    await dead(machine, 3, KEYS, 2)
    await machine.swept()
    [(cell, _, value)] = machine.rows.cells("rollback")
    assert (cell.table, cell.row, value) == ("docs", b"a", b"")
    assert not list(machine.rows.cells("write"))
    assert not [cell for cell, _, _ in machine.rows.cells("data") if cell.table == "docs"]


async def test_a_transaction_that_rolls_itself_back_marks_its_primary() -> None:  # T5
    machine = Machine(SCHEMA, one_step=False)
    async with machine.opened() as db:
        loser = await db.begin()
        await write(db, 2, ["q"])
        for key in KEYS:
            loser.set(n, key, 3)
        with pytest.raises(perco.WriteConflict):
            await loser.commit()
        await trio.testing.wait_all_tasks_blocked()
        assert not machine.locks()
        [(cell, start_ts, _)] = machine.rows.cells("rollback")
        assert (cell.row, start_ts) == (b"a", loser.start_ts)
        assert await db.outcome(loser.token) == 0


async def test_locks_in_empty_rows_recover() -> None:  # T5
    """Fluo's testRecoverEmptyColumn: the empty key, the empty value."""
    machine = Machine(SCHEMA, one_step=False)
    async with machine.crashing(1, made=False) as (db, _):
        with pytest.raises(CrashedError):
            async with db.transaction() as txn:
                txn.set(long, "", "")
    async with machine.opened() as db, db.snapshot() as snap:
        assert await snap.get(long, "") is None
    assert not machine.locks()


async def test_a_transaction_that_only_writes_settles_the_dead() -> None:  # T7 T9
    """Fluo's testCommitBug1: it never reads, and must get past locks of the dead all the same."""
    machine = Machine(SCHEMA, one_step=False)
    await dead(machine, 3, KEYS, 2)
    async with machine.opened() as db:
        txn = await write(db, 3)
        assert txn.outcome == "committed"
        assert db.statistics().counters.rolled_back >= 1
        async with db.snapshot() as snap:
            assert await by_get(snap) == [3, 3, 3, 3]


async def test_many_rows_of_the_dead_are_settled_by_one_writer() -> None:  # T5 T7
    machine = Machine(bank.SCHEMA, one_step=False)
    async with machine.opened() as db:
        await db.run(bank.opening)
    async with machine.crashing(6, made=False) as (db, _):
        with pytest.raises(CrashedError):
            await db.run(bank.scatter, bank.ACCOUNTS[3], 66)
    async with machine.opened() as db:
        await db.run(bank.scatter, bank.ACCOUNTS[5], 66)
        async with db.snapshot() as snap:
            assert await bank.total_by_scan(snap) == bank.TOTAL
            assert await snap.get(*bank.ACCOUNTS[5]) == bank.OPENING - 66
            assert await snap.get(*bank.ACCOUNTS[3]) == bank.OPENING + 6


async def test_a_store_that_is_opened_sweeps_what_the_dead_left() -> None:  # L1
    machine = Machine(SCHEMA, one_step=False)
    await dead(machine, 3, KEYS, 2)
    assert await machine.swept() == 2 * len(KEYS)
    assert not machine.locks()
    assert await machine.swept() == 0


async def test_a_recovery_that_crashed_is_finished_by_the_next() -> None:  # T5
    machine = Machine(SCHEMA, one_step=False)
    await dead(machine, 3, KEYS, 2)
    for number in range(5):
        async with machine.crashing(1, made=False) as (db, store), db.snapshot() as snap:
            with pytest.raises(CrashedError):
                await local_owner(db).sweeper._sweep()
            assert len(store.log) == 1, number
            del snap
    async with machine.opened() as db, db.snapshot() as snap:
        assert await by_get(snap) == [None] * 4


# ------------------------------------------------------------ T7: writers


@pytest.mark.parametrize("early", [True, False])
async def test_a_writer_without_locks_waits_for_the_other(early: bool) -> None:  # T7
    """Having begun before the other's commit timestamp, it then conflicts; after it, it gets through."""
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "commit")
        second = await db.begin()
        async with trio.open_nursery() as nursery:
            first = await db.begin()
            first.set(n, "a", 1)
            nursery.start_soon(first.commit)
            await gate.reached()
            if not early:
                second = await db.begin()
            second.set(n, "a", 2)
            nursery.start_soon(expect_conflict if early else perco.Transaction.commit, second)
            await trio.testing.wait_all_tasks_blocked()
            assert second.outcome == "unknown"
            gate.open()
        assert second.outcome == ("aborted" if early else "committed")
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") == (1 if early else 2)


async def test_a_writer_that_waited_gets_through_if_the_other_aborts() -> None:  # T7
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "commit")
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def first() -> None:
                with scope:
                    await write(db, 1, ["a"])

            nursery.start_soon(first)
            await gate.reached()
            async with trio.open_nursery() as inner:
                inner.start_soon(write, db, 2, ["a"])
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
                await trio.testing.wait_all_tasks_blocked()
                gate.open()
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") == 2


async def test_who_holds_locks_lets_go_of_all_before_it_waits() -> None:  # T7
    async with perco.open("memory:", SCHEMA) as db:
        await write(db, 0)
        gate = await gated(db, "commit")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, db, 1, ["q"])
            await gate.reached()
            second = await db.begin()
            for key in KEYS:  # all but the last are free
                second.set(n, key, 2)
            nursery.start_soon(expect_conflict, second)
            await trio.testing.wait_all_tasks_blocked()
            assert second.outcome == "unknown"  # it waits
            async with db.snapshot() as snap:  # and nobody waits for it
                assert await snap.get_many(n, KEYS[:3]) == {"a": 0, "b": 0, "i": 0}
            await write(db, 3, ["a", "i"])
            gate.open()
        assert second.outcome == "aborted"


async def expect_conflict(txn: perco.Transaction) -> None:
    with pytest.raises(perco.WriteConflict):
        await txn.commit()


def in_step(db: perco.Database) -> FaultyRowStore:
    """Mutations of one transaction go one after the other, in step with those of the others."""

    async def before(mutation: Mutation) -> None:
        if kind_of(mutation) in ("prewrite", "rollback"):
            await trio.sleep(0.01)  # well below the longest backoff, or they would cross again and again

    return use(db, FaultyRowStore(inside(db).driver.store, before=before))


@pytest.mark.parametrize("many", [2, 3, 4])
async def test_writers_that_cross_do_not_wait_for_each_other_for_ever(
    autojump_clock: trio.testing.MockClock, many: int
) -> None:  # T7
    """Each locks its own row first, then wants the next one's: a ring. Two tablets see them in opposite order."""
    table = perco.Table("ring", key=perco.INT64, splits=list(range(1, many)))
    value, extra = table.column("value", perco.INT64), table.column("extra", perco.INT64)
    async with perco.open("memory:", perco.Schema(table), options=perco.Options(seed=5)) as db:
        store = in_step(db)

        async def cross(txn: perco.Transaction, i: int) -> None:
            for key in (i, (i + 1) % many):
                txn.set(value, key, i)
            txn.set(extra, i, i)  # the primary is where most cells are

        with trio.fail_after(3600):
            async with trio.open_nursery() as nursery:
                for i in range(many):
                    nursery.start_soon(db.run, cross, i)
        counters = db.statistics().counters
        assert counters.lock_waits >= many, "they did not cross"
        assert counters.commits == many
        assert store.log.count("prewrite") > 2 * many
        async with db.snapshot() as snap:
            rows = [row async for row in snap.scan(table)]
            assert [row[extra] for row in rows] == list(range(many))


async def test_crossing_transfers_keep_the_total(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # T7
    monkeypatch.setattr(trio._core._run, "_r", random.Random(3))  # in some orders of the tasks, none has to wait
    async with perco.open("memory:", bank.SCHEMA, options=perco.Options(seed=3)) as db:
        await db.run(bank.opening)
        in_step(db)
        with trio.fail_after(36_000):
            async with trio.open_nursery() as nursery:
                for i, source in enumerate(bank.ACCOUNTS):
                    nursery.start_soon(move_some, db, source, bank.ACCOUNTS[i - 1])
        assert db.statistics().counters.lock_waits > 0
        async with db.snapshot() as snap:
            assert await bank.total_by_get(snap) == bank.TOTAL


async def move_some(db: perco.Database, source: Any, target: Any) -> None:
    for _ in range(3):
        await db.options(attempts=1000).run(bank.move, source, target, 7)
