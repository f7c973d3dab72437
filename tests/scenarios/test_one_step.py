"""The cells in the primary's tablet commit in one write transaction, without locks (C1-C7)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside, local_owner
from perco.storage import LOCK, NOTIFY, ROLLBACK, WRITE
from tests.support.faults import TWO_PHASES, Fault, faulty, gated, on
from tests.support.machines import CrashedError, Machine
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
text = docs.column("text", perco.TEXT)
observed = docs.column("observed", perco.INT64)
seen_by = docs.column("seen", perco.INT64)
SCHEMA = perco.Schema(docs)


@SCHEMA.observe(observed, id="see")
async def see(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    txn.set(seen_by, change.key, (await txn.get(seen_by, change.key) or 0) + 1)


def held(db: perco.Database, group: str) -> int:
    return sum(tablet.entries(group) for tablet in local_of(db).store.tablets() if tablet.table == "docs")


async def put(db: perco.Database, value: int, *keys: str) -> int:
    async with db.transaction() as txn:
        for key in keys:
            txn.set(n, key, value)
    return txn.commit_ts


# ------------------------------------------------------------ what is sent


@pytest.mark.parametrize("groups", [True, False])
async def test_a_transaction_in_one_tablet_is_one_mutation(groups: bool) -> None:  # C1
    machine = Machine(SCHEMA, groups=groups)
    async with machine.opened() as db:
        store = faulty(db)
        async with db.transaction() as txn:
            txn.set(n, "a", 1)
            txn.set(text, "a", "x" * 1000)
            txn.delete(seen_by, "a")
            txn.set(observed, "a", 2)
        assert store.log == ["one step"]
        assert held(db, LOCK) == held(db, ROLLBACK) == 0
        assert held(db, WRITE) == 4
        assert held(db, NOTIFY) == 1, "N1: with the record"
        assert not inside(db).driver.entered.cells
        async with db.snapshot() as snap:
            row = await snap.row(docs, "a")
            assert (row[n], row[text], row[seen_by], row[observed]) == (1, "x" * 1000, None, 2)
            assert row.commit_ts(n) == row.commit_ts(text) == txn.commit_ts


async def test_rows_of_one_tablet_are_a_group() -> None:  # C1 S1
    async with perco.open("memory:", SCHEMA) as db:
        txn = await db.begin()
        txn.set(n, "a", 1)
        txn.set(n, "b", 1)
        await put(db, 2, "b")
        with pytest.raises(perco.WriteConflict) as caught:
            await txn.commit()
        assert caught.value.cells == (("docs", "b", "n"),)
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") is None
        assert held(db, ROLLBACK) == 0, "nothing was written: nothing has to be rolled back"


async def test_the_other_tablets_are_prewritten_first() -> None:  # C7 T3
    async with perco.open("memory:", SCHEMA) as db:
        store = faulty(db)
        await put(db, 1, "a", "b", "z")
        await trio.testing.wait_all_tasks_blocked()
        assert store.log[:3] == ["prewrite", "one step", "commit"]
        assert set(store.log[3:]) <= {"commit"}, "over a real database, the sweeper may roll the same lock forward"
        assert held(db, LOCK) == 0


async def test_the_last_agent_says_no(autojump_clock: trio.testing.MockClock) -> None:  # C7 T7
    async with perco.open("memory:", SCHEMA) as db:
        txn = await db.begin()
        for key in ("a", "b", "z"):
            txn.set(n, key, 1)
        await put(db, 2, "b")
        with pytest.raises(perco.WriteConflict):
            await txn.commit()
        assert await db.outcome(txn.token) == 0
        await trio.sleep(1)
        assert held(db, LOCK) == 0
        async with db.snapshot() as snap:
            assert await snap.get_many(n, ["a", "b", "z"]) == {"a": None, "b": 2, "z": None}


async def test_an_observers_run_with_its_effects_is_one_mutation() -> None:  # C1 N2 N3
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            txn.set(observed, "a", 1)
        store = faulty(db)
        async with db.worker(options=perco.WorkerOptions(outputs=False)):  # else what it writes is noted, once
            await db.wait_idle()
        assert store.log == ["one step"]
        assert held(db, NOTIFY) == 0


async def test_an_option_turns_it_off() -> None:
    async with perco.open("memory:", SCHEMA, options=TWO_PHASES) as db:
        store = faulty(db)
        await put(db, 1, "a")
        assert store.log == ["prewrite", "commit"]


# ------------------------------------------------------------ readers


async def by_get(snap: perco.Snapshot) -> object:
    return await snap.get(n, "a")


async def by_get_many(snap: perco.Snapshot) -> object:
    return (await snap.get_many(n, ["0", "a"]))["a"]


async def by_row(snap: perco.Snapshot) -> object:
    return (await snap.row(docs, "a"))[n]


async def by_scan(snap: perco.Snapshot) -> object:
    rows = await snap.scan(docs, columns=[n]).all()
    return rows[0][n] if rows else None


async def by_scan_backwards(snap: perco.Snapshot) -> object:
    rows = await snap.scan(docs, columns=[n], reverse=True).all()
    return rows[-1][n] if rows else None


Read = Callable[[perco.Snapshot], Awaitable[object]]
READS = [by_get, by_get_many, by_row, by_scan, by_scan_backwards]


@pytest.mark.parametrize("made", [False, True], ids=["before it is made", "before it is answered"])
@pytest.mark.parametrize("read", READS)
async def test_a_reader_that_began_later_waits(read: Read, made: bool) -> None:  # C4 T9
    async with perco.open("memory:", SCHEMA) as db:
        await put(db, 1, "a", "b")
        async with db.snapshot() as before:
            gate = await gated(db, "one step", made=made)
            found: list[object] = []

            async def look() -> None:
                async with db.snapshot() as snap:
                    found.append(await read(snap))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(put, db, 2, "a", "b")
                await gate.reached()
                nursery.start_soon(look)
                await trio.testing.wait_all_tasks_blocked()
                assert found == []
                assert await read(before) == 1, "a reader that began before its commit_ts was drawn does not wait"
                gate.open()
            assert found == [2]


@pytest.mark.parametrize("read", READS)
async def test_what_others_do_elsewhere_is_not_waited_for(read: Read) -> None:  # C4
    async with perco.open("memory:", SCHEMA) as db:
        await put(db, 1, "a")
        gate = await gated(db, "one step")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put_text, db)
            await gate.reached()
            async with db.snapshot() as snap:
                if read is not by_row:  # it asks for all columns
                    assert await read(snap) == 1
            gate.open()


async def put_text(db: perco.Database) -> None:
    async with db.transaction() as txn:
        txn.set(text, "a", "new")


async def test_a_claim_waits_for_the_ack_of_a_twin() -> None:  # C4 N3
    """Else it would take the change for new, and its own ack would be no conflict: it began after the twin's commit."""
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            txn.set(observed, "a", 1)
        options = perco.WorkerOptions(row_locks=False, concurrency=4, scanners=4)
        gate = await gated(db, "one step")
        async with db.worker(options=options) as worker:
            await gate.reached()
            await trio.testing.wait_all_tasks_blocked()
            gate.open()
            await db.wait_idle()
            counters = worker.statistics()["see"]
        assert counters.commits == 1
        async with db.snapshot() as snap:
            assert await snap.get(seen_by, "a") == 1


async def test_who_validates_waits_for_what_commits_before_it() -> None:  # C4 T14
    async with perco.open("memory:", SCHEMA) as db:
        await put(db, 1, "a", "z")
        gate = await gated(db, "one step")
        stale: list[BaseException] = []

        async def serial() -> None:
            try:
                async with db.transaction(isolation="serializable") as txn:
                    await txn.get(n, "a")
                    begun.set()
                    await gate.reached()
                    txn.set(n, "z", 2)
            except perco.TransientError as error:
                stale.append(error)

        begun = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serial)
            await begun.wait()
            nursery.start_soon(put, db, 2, "a")
            await trio.testing.wait_all_tasks_blocked()
            gate.open()
        assert len(stale) == 1


async def test_the_clock_is_noted_when_all_below_it_can_be_seen() -> None:  # C4 O3
    """A reader in another process knows the present by the notes, and nothing of this process's memory."""
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "one step")
        noted = False

        async def note() -> None:
            nonlocal noted
            await local_owner(db).note_now()
            noted = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, db, 2, "a")
            await gate.reached()
            nursery.start_soon(note)
            await trio.testing.wait_all_tasks_blocked()
            assert not noted
            gate.open()
        assert noted


async def test_waiting_for_a_timestamp_waits_for_what_commits_below_it() -> None:  # C4 N7
    async with perco.open("memory:", SCHEMA) as db, db.worker():
        gate = await gated(db, "one step")
        waited = False

        async def put_observed() -> None:
            async with db.transaction() as txn:
                txn.set(observed, "a", 1)

        async def wait() -> None:
            nonlocal waited
            await db.wait_for(inside(db).oracle.last)
            waited = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put_observed)
            await gate.reached()
            nursery.start_soon(wait)
            for _ in range(3):
                await trio.testing.wait_all_tasks_blocked()
            assert not waited
            gate.open()
        async with db.snapshot() as snap:
            assert await snap.get(seen_by, "a") == 1


# ------------------------------------------------------------ writers


async def test_a_second_writer_of_a_cell_waits_for_the_first() -> None:  # C2 T7
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "one step")
        late = await db.begin()
        late.set(n, "a", 3)
        results: list[str] = []

        async def commit() -> None:
            try:
                await late.commit()
            except perco.WriteConflict as error:
                results.append(f"conflict at {error.other_ts > late.start_ts}")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, db, 2, "a")
            await gate.reached()
            nursery.start_soon(commit)
            await trio.testing.wait_all_tasks_blocked()
            assert results == []
            gate.open()
        assert results == ["conflict at True"]


async def test_a_blind_write_that_began_after_the_first_follows_it() -> None:  # C2
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "one step")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, db, 2, "a")
            await gate.reached()
            nursery.start_soon(put, db, 3, "a")
            await trio.testing.wait_all_tasks_blocked()
            gate.open()
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") == 3


async def test_who_holds_locks_does_not_wait_for_an_entry() -> None:  # C7 T7
    async with perco.open("memory:", SCHEMA) as db:
        later = await db.begin()
        for key in ("a", "b", "z"):
            later.set(n, key, 3)
        gate = await gated(db, "one step")
        results: list[BaseException] = []

        async def commit() -> None:
            try:
                await later.commit()
            except perco.WriteConflict as error:
                results.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, db, 2, "a")
            await gate.reached()
            nursery.start_soon(commit)
            await trio.testing.wait_all_tasks_blocked()
            assert held(db, LOCK) == 0, "it has let go before it waits"
            gate.open()
        assert len(results) == 1


async def test_a_lock_in_the_way_is_settled_and_it_goes_again() -> None:  # C5 T7
    """With a new commit_ts: nothing of the first attempt was written."""
    machine = Machine(SCHEMA, one_step=False)
    async with machine.crashing(0, made=True) as (db, _):
        txn = await db.begin()
        txn.set(n, "a", 1)
        with pytest.raises(CrashedError):
            await txn.commit()
    assert machine.locks() == 1
    machine = with_one_step(machine)
    async with machine.opened() as db:
        store = faulty(db)
        await put(db, 2, "a")
        assert store.log == ["one step", "rollback", "one step"]
        assert machine.locks() == 0
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") == 2


def with_one_step(machine: Machine) -> Machine:
    machine._one_step = True
    return machine


# ------------------------------------------------------------ replies that do not come


@pytest.mark.parametrize("fault", [Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.DELAY])
async def test_a_reply_that_is_lost_is_asked_for(fault: Fault) -> None:  # C6 T4 T5
    async with perco.open("memory:", SCHEMA) as db:
        store = faulty(db, on("one step", fault))
        txn = await db.begin()
        txn.set(n, "a", 1)
        if fault is Fault.LOSE_REPLY:
            await txn.commit()
            assert store.log == ["one step"]
        else:
            with pytest.raises(perco.errors.RolledBack):
                await txn.commit()
            assert store.log == ["one step", "marker"]
            assert await store.deliver_late() == (fault is Fault.DELAY)
        assert store.fired[fault] == 1
        assert not inside(db).driver.entered.cells
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") == (1 if fault is Fault.LOSE_REPLY else None)
        assert await db.outcome(txn.token) == txn.commit_ts


@pytest.mark.parametrize("by", [*READS, "write", "outcome", "sweeper"])
@pytest.mark.parametrize("made", [True, False])
async def test_what_nobody_knows_stays_entered_until_somebody_asks(
    autojump_clock: trio.testing.MockClock, by: Any, made: bool
) -> None:  # C3 C6
    options = perco.Options(commit=perco.options.CommitOptions(commit_timeout_s=5))
    async with perco.open("memory:", SCHEMA, options=options) as db:
        store = faulty(db, on("one step", Fault.LOSE_REPLY if made else Fault.DELAY))
        if by != "sweeper":
            inside(db).driver.orphaned = trio.Event()  # one that the sweeper does not watch
        txn = await db.begin()
        txn.set(n, "a", 1)
        txn.set(n, "b", 1)
        store.read_error = perco.Unavailable("reads fail")
        with pytest.raises(perco.CommitUnknown):
            await txn.commit()
        store.read_error = None
        if by == "sweeper":
            await trio.sleep(60)
        else:
            assert len(inside(db).driver.entered.cells) == 2
        if by == "write":
            assert await put(db, 7, "a") > 0
        elif by == "outcome":
            assert (await db.outcome(txn.token) > 0) == made
        elif by != "sweeper":
            async with db.snapshot() as snap:
                assert await by(snap) == (1 if made else None)
        assert not inside(db).driver.entered.cells
        await store.deliver_late()
        async with db.snapshot() as snap:
            assert await snap.get(n, "b") == (1 if made else None), "C6: a late one is refused"


@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.DELAY])
async def test_what_nobody_knows_is_settled_before_the_store_is_idle(fault: Fault) -> None:  # C6 N7 N8
    async with perco.open("memory:", SCHEMA) as db, db.worker():
        await db.wait_idle()
        store = faulty(db, on("one step", fault))
        store.read_error = perco.Unavailable("reads fail")
        with pytest.raises(perco.CommitUnknown):
            async with db.transaction() as txn:
                txn.set(observed, "a", 1)
        store.read_error = None
        await db.wait_idle()
        assert store.fired[fault] == 1
        await store.deliver_late()
        assert await db.is_idle(), "a late one is refused"
        async with db.snapshot() as snap:
            assert await snap.get(seen_by, "a") == (1 if fault is Fault.LOSE_REPLY else None)


async def test_cancelled_before_it_is_sent_it_leaves() -> None:  # C3 T10
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "one step")
        txn = await db.begin()
        txn.set(n, "a", 1)
        async with trio.open_nursery() as nursery:
            scope = nursery.cancel_scope
            nursery.start_soon(txn.commit)
            await gate.reached()
            assert len(inside(db).driver.entered.cells) == 1
            scope.cancel()
        assert txn.outcome == "aborted"
        assert not inside(db).driver.entered.cells
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") is None


async def test_cancelled_when_it_was_sent_it_stays_until_it_is_written() -> None:  # C3 T10
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "one step", made=True)
        txn, scope = await db.begin(), trio.CancelScope()
        txn.set(n, "a", 1)

        async def commit() -> None:
            with scope:
                await txn.commit()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit)
            await gate.reached()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert len(inside(db).driver.entered.cells) == 1
            gate.open()
        assert txn.outcome == "committed"
        assert not inside(db).driver.entered.cells


async def test_a_store_that_cannot_write_says_so() -> None:  # S4
    async with perco.open("memory:", SCHEMA) as db:
        store = faulty(db, on("one step", Fault.FAIL))
        txn = await db.begin()
        txn.set(n, "a", 1)
        with pytest.raises(perco.errors.StoreFull):
            await txn.commit()
        assert store.fired[Fault.FAIL] == 1
        assert txn.outcome == "aborted"
        assert not inside(db).driver.entered.cells


# ------------------------------------------------------------ over LMDB


@pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")
async def test_many_at_once_over_lmdb(tmp_path: Path) -> None:  # C2 C4 C7
    """Counters in both tablets, incremented one by one and together; readers that look all the time."""
    keys = ["a", "b", "y", "z"]
    options = perco.Options(durability="process", retry=perco.options.RetryOptions(attempts=1000))

    async def add(txn: perco.Transaction, *keys: str) -> None:
        for key in keys:
            txn.set(n, key, (await txn.get(n, key) or 0) + 1)

    async with perco.open(tmp_path / "store", SCHEMA, options=options) as db:
        looks = 0

        async def look() -> None:
            nonlocal looks
            while True:
                async with db.snapshot() as snap:
                    found = await snap.get_many(n, keys)
                    assert found == {row.key: row[n] async for row in snap.scan(docs, columns=[n])} or None in set(
                        found.values()
                    )
                    looks += 1
                await trio.lowlevel.checkpoint()

        async def client(i: int) -> None:
            for j in range(25):
                some = [keys[i % 4]] if j % 3 else [keys[i % 4], keys[(i + j) % 4]]
                await db.run(add, *sorted(set(some)))

        async with trio.open_nursery() as looking:
            looking.start_soon(look)
            async with trio.open_nursery() as nursery:
                for i in range(8):
                    nursery.start_soon(client, i)
            looking.cancel_scope.cancel()
        async with db.snapshot() as snap:
            total = sum((await snap.get_many(n, keys)).values())  # type: ignore[arg-type]
        wanted = sum(
            len({keys[i % 4]} if j % 3 else {keys[i % 4], keys[(i + j) % 4]}) for i in range(8) for j in range(25)
        )
        assert total == wanted
        assert looks > 10
        assert not inside(db).driver.entered.cells
