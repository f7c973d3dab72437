"""Cells that are read under a lock: against everybody who writes them, also in the default mode (T14)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.storage import LOCK, SHARED, TRACE, LocalRowStore
from tests.support.faults import Fault, faulty, gated, on
from tests.support.machines import CrashedError, Machine
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
n = docs.column("n", perco.INT64)
alias = docs.column("alias", perco.TEXT)
SCHEMA = perco.Schema(docs)
FAR = ["b", "i", "q"]  # in three tablets; "a" lies with the first


async def set_all(db: perco.Database, value: int, keys: list[str]) -> int:
    async with db.transaction() as txn:
        for key in keys:
            txn.set(n, key, value)
    return txn.commit_ts


async def by_get(txn: perco.Transaction, keys: list[str]) -> None:
    for key in keys:
        await txn.get(n, key, lock=True)


async def by_get_many(txn: perco.Transaction, keys: list[str]) -> None:
    await txn.get_many(n, keys, lock=True)


async def by_row(txn: perco.Transaction, keys: list[str]) -> None:
    for key in keys:
        await txn.row(docs, key, [n], lock=True)


Read = Callable[[perco.Transaction, list[str]], Awaitable[None]]
READS: list[Read] = [by_get, by_get_many, by_row]


def cells(store: LocalRowStore, group: str) -> int:
    return sum(tablet.entries(group) for tablet in store.tablets())


async def rest(db: perco.Database) -> None:
    """Until phase two is done: no lock of either kind is left."""
    await trio.testing.wait_all_tasks_blocked()
    assert cells(local_of(db).store, LOCK) == cells(local_of(db).store, SHARED) == 0


# ------------------------------------------------------------ the living


async def test_two_may_lock_what_both_only_read() -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, 0, ["b"])
        t1, t2 = await db.begin(), await db.begin()
        for txn, key in ((t1, "x"), (t2, "y")):
            await txn.get(n, "b", lock=True)
            txn.set(n, key, 1)
        gate = await gated(db, "commit")  # both locks stand at once
        async with trio.open_nursery() as nursery:
            nursery.start_soon(t1.commit)
            await gate.reached()
            assert cells(local_of(db).store, SHARED) == 1
            await t2.commit()
            gate.open()
        await rest(db)
        assert cells(local_of(db).store, TRACE) == 2


async def test_two_that_commit_in_one_step_may_lock_what_both_only_read() -> None:  # C2 T14
    """Locked cells are not written: no transaction that reads them, or locks them too, has to wait."""
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, 0, ["b"])
        t1, t2 = await db.begin(), await db.begin()
        for txn, key in ((t1, "a"), (t2, "c")):
            await txn.get(n, "b", lock=True)
            txn.set(n, key, 1)
        gate = await gated(db, "one step")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(t1.commit)
            await gate.reached()
            await t2.commit()
            async with db.snapshot() as snap:
                assert await snap.get(n, "b") == 0
            assert t1.outcome == "unknown"
            gate.open()
        assert cells(local_of(db).store, TRACE) == 2
        assert cells(local_of(db).store, SHARED) == 0


@pytest.mark.parametrize("read", READS)
async def test_who_locked_what_another_has_written_meanwhile_conflicts(read: Read) -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, 0, FAR)
        txn = await db.begin()
        await read(txn, FAR)
        txn.set(n, "a", 1)
        commit_ts = await set_all(db, 2, ["i"])
        with pytest.raises(perco.WriteConflict) as caught:
            await txn.commit()
        assert (caught.value.cells, caught.value.other_ts) == ((("docs", "i", "n"),), commit_ts)
        assert not caught.value.read
        await rest(db)
        assert cells(local_of(db).store, TRACE) == 0


@pytest.mark.parametrize("read", READS)
async def test_who_writes_what_another_has_locked_meanwhile_conflicts(read: Read) -> None:  # T14
    """It has not seen what the other wrote, and the other has not seen its write: write skew, were it let through."""
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, 0, FAR)
        writer = await db.begin()
        async with db.transaction() as txn:
            await read(txn, FAR)
            txn.set(n, "a", 1)
        writer.set(n, "q", 2)
        with pytest.raises(perco.WriteConflict, match="read under a lock by another") as caught:
            await writer.commit()
        assert (caught.value.cells, caught.value.other_ts) == ((("docs", "q", "n"),), txn.commit_ts)
        assert caught.value.read
        await rest(db)


async def test_who_began_after_a_locked_read_was_committed_may_write() -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, 0, FAR)
        async with db.transaction() as txn:
            await by_get_many(txn, FAR)
            txn.set(n, "a", 1)
        await set_all(db, 2, [*FAR, "a"])
        await rest(db)


@pytest.mark.parametrize("changes", [True, False])
async def test_a_cell_that_is_read_and_written_is_locked_by_its_write(changes: bool) -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, 0, FAR)
        async with db.transaction() as txn:
            for key in FAR:
                if changes:
                    txn.set(n, key, (await txn.get(n, key, lock=True) or 0) + 1)
                else:
                    txn.delete(n, key)
                    assert await txn.get(n, key, lock=True) is None
        await rest(db)
        assert cells(local_of(db).store, TRACE) == 0
        async with db.snapshot() as snap:
            assert set((await snap.get_many(n, FAR)).values()) == {1 if changes else None}


async def test_a_cell_that_is_not_there_can_be_locked() -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db:
        late, txn = await db.begin(), await db.begin()
        assert await txn.get(n, "i", lock=True) is None
        txn.set(n, "a", 1)
        await txn.commit()
        late.set(n, "i", 1)
        with pytest.raises(perco.WriteConflict):
            await late.commit()


async def test_another_column_of_a_locked_row_can_be_written() -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db:
        writer = await db.begin()
        async with db.transaction() as txn:
            await by_get(txn, ["b"])
            txn.set(n, "a", 1)
        writer.set(alias, "b", "x")
        await writer.commit()


async def test_a_scan_takes_no_locks() -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db, db.transaction() as txn:
        with pytest.raises(perco.UsageError, match="a scan takes no read locks"):
            txn.scan(docs, lock=True)


async def test_a_snapshot_locks_nothing() -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db, db.snapshot() as snap:
        for read in READS:
            with pytest.raises(perco.UsageError, match="commits nothing"):
                await read(snap, FAR)  # type: ignore[arg-type]


async def test_read_locks_alone_commit_nothing() -> None:  # T14
    """All that was read is of one moment; nobody needs to be kept from anything."""
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, 0, FAR)
        writer = await db.begin()
        async with db.transaction() as txn:
            await by_get_many(txn, FAR)
            await set_all(db, 1, ["i"])
        assert (txn.outcome, txn.commit_ts, txn.token) == ("committed", 0, "")
        writer.set(n, "b", 1)
        await writer.commit()
        assert cells(local_of(db).store, TRACE) == 0


async def test_more_cells_than_a_transaction_may_lock_are_too_many() -> None:  # T14
    options = perco.Options(transaction=perco.options.TransactionOptions(cells_max=2))
    async with perco.open("memory:", SCHEMA, options=options) as db, db.transaction() as txn:
        await by_get_many(txn, ["b", "i"])
        with pytest.raises(perco.errors.TooLarge, match="cells locked by one transaction: 3 is over the limit of 2"):
            await txn.get(n, "q", lock=True)
        await txn.get(n, "q")


async def test_a_locked_reader_waits_for_a_writer_and_conflicts_if_it_commits() -> None:  # T7 T14
    """The writer holds its lock: a transaction that locks that cell to read lets go of all, waits, and begins again."""
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, 0, FAR)
        writer, reader = await db.begin(), await db.begin()
        writer.set(n, "i", 1)
        await by_get(reader, FAR)
        reader.set(n, "a", 1)
        caught: list[perco.WriteConflict] = []

        async def commit() -> None:
            with pytest.raises(perco.WriteConflict) as raised:
                await reader.commit()
            caught.append(raised.value)

        gate = await gated(db, "commit")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.commit)
            await gate.reached()
            nursery.start_soon(commit)
            await trio.testing.wait_all_tasks_blocked()
            assert not caught
            assert cells(local_of(db).store, SHARED) == 0, "T7: nobody waits while it holds"
            gate.open()
        assert caught[0].cells == (("docs", "i", "n"),)
        await rest(db)


@pytest.mark.parametrize("alone", [True, False])
async def test_a_writer_waits_for_readers_that_hold_the_cell(alone: bool) -> None:  # T7 T14
    """It has begun before they commit: their traces refuse it, whether it held other locks or not."""
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, 0, FAR)
        writer, *readers = [await db.begin() for _ in range(3)]
        for reader, key in zip(readers, ("c", "d"), strict=True):
            await by_get(reader, FAR)
            reader.set(n, key, 1)
        for key in ["i"] if alone else ["a", "i"]:
            writer.set(n, key, 2)
        ended: list[perco.WriteConflict] = []

        async def commit() -> None:
            with pytest.raises(perco.WriteConflict) as raised:
                await writer.commit()
            ended.append(raised.value)

        gates = [await gated(db, "commit"), await gated(db, "commit")]
        async with trio.open_nursery() as nursery:
            for reader, gate in zip(readers, reversed(gates), strict=True):
                nursery.start_soon(reader.commit)
                await gate.reached()
            assert cells(local_of(db).store, SHARED) == 6
            nursery.start_soon(commit)
            await trio.testing.wait_all_tasks_blocked()
            assert not ended
            assert cells(local_of(db).store, LOCK) == 2, "T7: the writer holds nothing while it waits"
            for gate in gates:
                gate.open()
        assert ended[0].read
        await rest(db)


async def test_readers_do_not_see_shared_locks() -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, 0, FAR)
        reader = await db.begin()
        await by_get(reader, FAR)
        reader.set(n, "a", 1)
        gate = await gated(db, "commit")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.commit)
            await gate.reached()
            async with db.snapshot() as snap:
                assert await snap.get_many(n, FAR) == dict.fromkeys(FAR, 0)
                assert [row[n] async for row in snap.scan(docs, start="b", columns=[n])] == [0, 0, 0]
            gate.open()
        assert db.statistics().counters.lock_waits == 0


async def test_a_cancelled_transaction_lets_go_of_its_read_locks() -> None:  # T10 T14
    async with perco.open("memory:", SCHEMA) as db:
        await set_all(db, 0, FAR)
        txn = await db.begin()
        await by_get(txn, FAR)
        txn.set(n, "a", 1)
        gate = await gated(db, "commit")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(txn.commit)
            await gate.reached()
            assert cells(local_of(db).store, SHARED) == 3
            nursery.cancel_scope.cancel()
        gate.open()
        await rest(db)
        assert txn.outcome == "aborted"
        await set_all(db, 1, FAR)


@pytest.mark.parametrize("groups", [True, False])
async def test_a_failed_transaction_takes_its_read_locks_away(groups: bool) -> None:  # S4 T5 T14
    machine = Machine(SCHEMA, groups=groups, one_step=False)
    async with machine.opened() as db:
        writer = await db.begin()
        txn = await db.begin()
        await by_get(txn, FAR)
        txn.set(n, "a", 1)
        store = faulty(db, on("commit", Fault.FAIL))
        with pytest.raises(perco.errors.StoreFull):
            await txn.commit()
        assert store.fired[Fault.FAIL] == 1
        assert store.log.count("rollback") == (3 if groups else 4)
        assert machine.locks() == cells(machine.store, TRACE) == 0
        writer.set(n, "b", 1)
        await writer.commit()


# ------------------------------------------------------------ the dead

STEPS = {True: 6, False: 8}  # "a" and "b" lie in one tablet; without groups every row goes by itself
PREWRITES = {True: 3, False: 4}
CRASHES = [(groups, at, made) for groups in (True, False) for at in range(STEPS[groups]) for made in (False, True)]


async def crashed(groups: bool, at: int, made: bool) -> tuple[Machine, int, bool]:
    """A transaction that locked FAR, wrote "a" and died; the start_ts of a writer before it; whether it committed."""
    machine = Machine(SCHEMA, groups=groups, one_step=False)
    async with machine.opened() as db:
        await set_all(db, 0, ["a", *FAR])
        await trio.testing.wait_all_tasks_blocked()
    async with machine.crashing(at, made=made) as (db, store):
        with contextlib.suppress(CrashedError, perco.CommitUnknown):
            async with db.transaction() as txn:
                await by_get_many(txn, FAR)
                txn.set(n, "a", 1)
        await trio.testing.wait_all_tasks_blocked()
        assert store.dead or (at, made) == (STEPS[groups] - 1, True), "it never came so far"
    return machine, txn.start_ts, (at, made) >= (PREWRITES[groups], True)


async def whole(machine: Machine, start_ts: int, committed: bool) -> None:
    """The writes of the dead are there or not; the cells that they locked are free, and say so if they committed."""
    async with machine.opened() as db:
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") == int(committed)
        assert machine.locks() == 0
        assert cells(machine.store, TRACE) == (len(FAR) if committed else 0)
        for key in FAR:  # began before the dead committed, and has not seen their writes
            old = perco.Transaction(inside(db).engine, start_ts - 1)
            old.set(n, key, 9)
            if committed:
                with pytest.raises(perco.WriteConflict):
                    await old.commit()
        await set_all(db, 7, FAR)


@pytest.mark.parametrize(("groups", "at", "made"), CRASHES)
async def test_a_sweeper_settles_read_locks(groups: bool, at: int, made: bool) -> None:  # T5 T14 L1
    machine, start_ts, committed = await crashed(groups, at, made)
    await machine.swept()
    await whole(machine, start_ts, committed)


@pytest.mark.parametrize(("groups", "at", "made"), CRASHES)
async def test_a_writer_that_reads_nothing_settles_the_read_locks_it_meets(
    groups: bool, at: int, made: bool
) -> None:  # T7 T9 T14
    machine, _, committed = await crashed(groups, at, made)
    async with machine.opened() as db:
        await set_all(db, 5, FAR)
        await trio.testing.wait_all_tasks_blocked()
        assert cells(machine.store, SHARED) == 0
        async with db.snapshot() as snap:
            assert await snap.get_many(n, ["a", *FAR]) == {"a": int(committed), **dict.fromkeys(FAR, 5)}
    await machine.swept()
    assert machine.locks() == 0


@pytest.mark.parametrize(("groups", "at", "made"), CRASHES)
async def test_an_old_writer_that_settles_a_committed_read_lock_meets_its_trace(
    groups: bool, at: int, made: bool
) -> None:  # T14
    """Rolled forward, not only taken away: or write skew would come through the back door."""
    machine, start_ts, committed = await crashed(groups, at, made)
    async with machine.opened() as db:
        old = perco.Transaction(inside(db).engine, start_ts - 1)
        old.set(n, "q", 5)
        with pytest.raises(perco.WriteConflict) if committed else contextlib.nullcontext():
            await old.commit()


@pytest.mark.parametrize(("groups", "at", "made"), CRASHES)
async def test_a_reader_settles_the_write_and_leaves_the_read_locks_to_others(
    groups: bool, at: int, made: bool
) -> None:  # T9 T14
    """By scan and by multi-get over all the cells at once."""
    machine, start_ts, committed = await crashed(groups, at, made)
    async with machine.opened() as db, db.snapshot() as snap:
        assert [row[n] async for row in snap.scan(docs, columns=[n])] == [int(committed), 0, 0, 0]
        assert list((await snap.get_many(n, ["a", *FAR])).values()) == [int(committed), 0, 0, 0]
    await machine.swept()
    await whole(machine, start_ts, committed)


@pytest.mark.parametrize(("groups", "at", "made"), CRASHES)
async def test_all_that_the_dead_sent_may_come_again(groups: bool, at: int, made: bool) -> None:  # T6 T14
    machine = Machine(SCHEMA, groups=groups, one_step=False)
    async with machine.opened() as db:
        await set_all(db, 0, ["a", *FAR])
        await trio.testing.wait_all_tasks_blocked()
        store = faulty(db, lambda mutation, number: Fault.REPEAT)
        txn = await db.begin()
        await by_get_many(txn, FAR)
        txn.set(n, "a", 1)
        await txn.commit()
        await trio.testing.wait_all_tasks_blocked()
        assert len(store.late) == STEPS[groups]
    await machine.store.apply([store.late[at]])
    for mutation in store.late[::-1] if made else store.late:
        await machine.store.apply([mutation])
    await machine.swept()
    await whole(machine, txn.start_ts, True)


@pytest.mark.parametrize("fault", [Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.ECHO])
@pytest.mark.parametrize(("groups", "at"), [(groups, at) for groups in (True, False) for at in range(STEPS[groups])])
async def test_a_lost_reply_at_any_step_is_not_an_abort(groups: bool, at: int, fault: Fault) -> None:  # T4 T6 T14
    machine = Machine(SCHEMA, groups=groups, one_step=False)
    async with machine.opened() as db:
        await set_all(db, 0, ["a", *FAR])
        await trio.testing.wait_all_tasks_blocked()
        store = faulty(db, lambda mutation, number: fault if number == at else None)
        async with db.transaction() as txn:
            await by_get_many(txn, FAR)
            txn.set(n, "a", 1)
        await trio.testing.wait_all_tasks_blocked()
        assert store.fired[fault] == 1
    await machine.swept()
    await whole(machine, txn.start_ts, True)


# ------------------------------------------------------------ over LMDB


async def test_a_store_of_before_has_read_locks_once_it_is_opened(tmp_path) -> None:  # T14
    """Its tablets lack the groups; readers beside an owner that has not made them find nothing there."""
    import lmdb

    from perco.storage import PROTOCOL_GROUPS

    folder = tmp_path / "store"
    async with perco.open(folder, SCHEMA) as db:
        await set_all(db, 0, FAR)
        paths = [tablet.engine.path for tablet in local_of(db).store.tablets()]  # type: ignore[attr-defined]
    for path in paths:
        with lmdb.open(str(path), max_dbs=200) as env:
            for group in (SHARED, TRACE):
                handle = env.open_db(group.encode(), create=False)
                with env.begin(write=True) as txn:
                    txn.drop(handle)
    async with perco.open(folder, SCHEMA, readonly=True) as db, db.snapshot() as snap:
        assert await snap.get_many(n, FAR) == dict.fromkeys(FAR, 0)
        assert cells(local_of(db).store, TRACE) == 0
    async with perco.open(folder, SCHEMA) as db:
        assert {group for tablet in local_of(db).store.tablets() for group in tablet.engine._dbs} >= set(
            PROTOCOL_GROUPS
        )  # type: ignore[attr-defined]
        old = await db.begin()
        async with db.transaction() as txn:
            await by_get_many(txn, FAR)
            txn.set(n, "a", 1)
        old.set(n, "i", 5)
        with pytest.raises(perco.WriteConflict):
            await old.commit()
    async with perco.open(folder, SCHEMA) as db:
        assert cells(local_of(db).store, TRACE) == len(FAR)
        assert cells(local_of(db).store, SHARED) == 0


# ------------------------------------------------------------ a graph whose nodes change their names


async def test_edges_always_go_by_the_names_of_their_nodes(autojump_clock: trio.testing.MockClock) -> None:  # T14
    """Edges are added under the names that their nodes have at the time, while nodes change names and rename their
    edges. Without the locks an edge is added under a name that is just being given up (Fluo's alias test)."""
    graph = perco.Table("graph", key=perco.TEXT, splits=["m"])
    name, edge = graph.column("name", perco.TEXT), graph.column("edge", perco.BOOL)
    rng = random.Random(5)
    nodes = [f"node{i:02}" for i in range(12)]

    async def link(txn: perco.Transaction, one: str, other: str, *, lock: bool) -> None:
        names = [await txn.get(name, node, lock=lock) or "" for node in (one, other)]
        await trio.sleep(rng.random() / 100)
        txn.set(edge, f"from {names[0]} {names[1]}", True)
        txn.set(edge, f"into {names[1]} {names[0]}", True)

    async def rename(txn: perco.Transaction, node: str, new: str) -> None:
        old = await txn.get(name, node) or ""
        there, back = f"from {old} ", f"into {old} "
        for prefix, mirrored in ((there, "into"), (back, "from")):
            async for row in txn.scan(graph, prefix=prefix, columns=[edge]):
                other = row.key[len(prefix) :]
                self_too = new if other == old else other
                txn.delete(edge, row.key)
                txn.delete(edge, f"{mirrored} {other} {old}")
                txn.set(edge, f"{prefix[:4]} {new} {self_too}", True)
                txn.set(edge, f"{mirrored} {self_too} {new}", True)
        await trio.sleep(rng.random() / 100)
        txn.set(name, node, new)

    async def broken(*, lock: bool) -> int:
        async with perco.open("memory:", perco.Schema(graph), options=perco.Options(seed=1)) as db:
            async with db.transaction() as txn:
                for node in nodes:
                    txn.set(name, node, f"{node}.0")

            async def links() -> None:
                for _ in range(15):
                    await db.options(attempts=1000).run(link, rng.choice(nodes), rng.choice(nodes), lock=lock)

            async def renames(node: str) -> None:
                for i in range(1, 6):
                    await db.options(attempts=1000).run(rename, node, f"{node}.{i}")

            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(links)
                for node in nodes[:5]:
                    nursery.start_soon(renames, node)
            async with db.snapshot() as snap:
                known = {row[name] async for row in snap.scan(graph, prefix="node", columns=[name])}
                edges = [row.key.split() async for row in snap.scan(graph, columns=[edge])]
            assert len(edges) > 50
            return sum(not known.issuperset(ends) for _, *ends in edges)

    assert await broken(lock=True) == 0
    assert await broken(lock=False) > 0
