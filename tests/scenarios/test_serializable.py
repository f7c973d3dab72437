"""The serializable mode reads again at commit_ts what was read: cells, and ranges as far as they were taken (T14)."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.storage import LOCK
from tests.support.faults import Fault, FaultyRowStore, Gate, faulty, gated, on, use
from tests.support.machines import CrashedError, Machine
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
n = docs.column("n", perco.INT64)
text = docs.column("text", perco.TEXT)
pairs = perco.Table("pairs", key=perco.Tuple(perco.TEXT, perco.INT64))
size = pairs.column("size", perco.INT64)
SCHEMA = perco.Schema(docs, pairs)
KEYS = ["b", "f", "i", "m", "q", "u"]  # two in each of three tablets
LONG = "x" * 300


async def fill(db: perco.Database) -> None:
    async with db.transaction() as txn:
        for i, key in enumerate(KEYS):
            txn.set(n, key, i)
            txn.set(text, key, f"{key}{LONG}")
        for i in range(4):
            txn.set(size, ("a", i), i)
    await trio.testing.wait_all_tasks_blocked()


async def by_get(txn: perco.Transaction) -> object:
    return [await txn.get(n, key) for key in KEYS]


async def by_get_long(txn: perco.Transaction) -> object:
    return [await txn.get(text, key) for key in KEYS]


async def by_get_many(txn: perco.Transaction) -> object:
    return await txn.get_many(n, KEYS)


async def by_row(txn: perco.Transaction) -> object:
    return [(await txn.row(docs, key))[n] for key in KEYS]


async def by_scan(txn: perco.Transaction) -> object:
    return [row[n] async for row in txn.scan(docs)]


async def by_scan_backwards(txn: perco.Transaction) -> object:
    return [row[n] async for row in txn.scan(docs, columns=[n], reverse=True)]


async def by_scan_of_a_range(txn: perco.Transaction) -> object:
    return [row[n] async for row in txn.scan(docs, start="b", stop="v")]


Read = Callable[[perco.Transaction], Awaitable[object]]
READS: list[Read] = [by_get, by_get_long, by_get_many, by_row, by_scan, by_scan_backwards, by_scan_of_a_range]
SCANS: list[Read] = [by_scan, by_scan_backwards, by_scan_of_a_range]


async def meanwhile(
    read: Read, change: Callable[[perco.Transaction], None], *, isolation: perco.Isolation = "serializable"
) -> perco.errors.ReadConflict | None:
    """A transaction reads; then another one changes something and commits; then the first one writes and commits."""
    async with perco.open("memory:", SCHEMA) as db:
        await fill(db)
        txn = await db.begin(isolation=isolation)
        await read(txn)
        async with db.transaction() as other:
            change(other)
        txn.set(n, "zz", 1)
        refused: perco.errors.ReadConflict | None = None
        try:
            await txn.commit()
        except perco.errors.ReadConflict as error:
            refused = error
        await trio.testing.wait_all_tasks_blocked()
        assert not sum(tablet.entries(LOCK) for tablet in local_of(db).store.tablets()), "T7: its locks are gone"
        if refused is not None:
            assert (txn.outcome, txn.commit_ts, refused.start_ts) == ("aborted", 0, txn.start_ts)
            assert refused.commit_ts > other.commit_ts
        else:
            assert txn.outcome == "committed"
        return refused


# ------------------------------------------------------------ reads are repeated


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("read", READS)
async def test_a_change_of_what_was_read_refuses(read: Read, key: str) -> None:  # T14
    def change(txn: perco.Transaction) -> None:
        txn.set(n, key, 77)
        txn.set(text, key, LONG)

    error = await meanwhile(read, change)
    assert error is not None
    assert bool(error.ranges) == (read in SCANS)
    assert await meanwhile(read, change, isolation="snapshot") is None


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("read", READS)
async def test_a_delete_of_what_was_read_refuses(read: Read, key: str) -> None:  # T14
    def change(txn: perco.Transaction) -> None:
        txn.delete(n, key)
        txn.delete(text, key)

    assert await meanwhile(read, change) is not None


@pytest.mark.parametrize("key", ["c", "h", "ia", "p", "r"])
@pytest.mark.parametrize("read", SCANS)
async def test_a_row_that_comes_into_a_gap_refuses(read: Read, key: str) -> None:  # T14
    assert await meanwhile(read, lambda txn: txn.set(n, key, 77)) is not None


@pytest.mark.parametrize(("key", "outside"), [("a", [by_scan_of_a_range]), ("w", [by_scan_of_a_range])])
@pytest.mark.parametrize("read", SCANS)
async def test_a_row_at_either_end_refuses_a_scan_that_has_none(read: Read, key: str, outside: list[Read]) -> None:
    found = await meanwhile(read, lambda txn: txn.set(n, key, 77))
    assert (found is None) == (read in outside)


async def test_a_value_that_is_written_again_is_another_version() -> None:  # T14
    """A reader of versions (`Row.commit_ts`) could tell."""
    assert await meanwhile(by_get, lambda txn: txn.set(n, "b", 0)) is not None


@pytest.mark.parametrize("read", [by_get, by_get_many, by_scan])
async def test_a_change_of_what_was_not_read_does_not_matter(read: Read) -> None:  # T14
    async def only_the_first(txn: perco.Transaction) -> None:
        if read is by_get:
            await txn.get(n, "b")
        elif read is by_get_many:
            await txn.get_many(n, ["b"])
        else:
            assert [row.key async for row in txn.scan(docs, columns=[n], stop="c")] == ["b"]

    assert await meanwhile(only_the_first, lambda txn: txn.set(n, "f", 77)) is None
    assert await meanwhile(only_the_first, lambda txn: txn.set(text, "b", "another column")) is None


async def test_a_cell_that_is_not_there_is_read_too() -> None:  # T14
    async def read(txn: perco.Transaction) -> None:
        assert await txn.get(n, "nobody") is None

    error = await meanwhile(read, lambda txn: txn.set(n, "nobody", 1))
    assert error is not None
    assert error.cells == (("docs", "nobody", "n"),)
    assert "docs['nobody'].n: written by another transaction between" in str(error)
    assert await meanwhile(read, lambda txn: txn.delete(n, "nobody")) is not None


async def test_a_range_that_is_empty_is_read_too() -> None:  # T14
    async def read(txn: perco.Transaction) -> None:
        assert [row async for row in txn.scan(docs, prefix="nobody")] == []

    error = await meanwhile(read, lambda txn: txn.set(n, "nobody at all", 1))
    assert error is not None
    assert (error.cells, error.ranges) == ((), (("docs", "nobody", "nobodz"),))
    assert "the rows of docs from 'nobody' to 'nobodz'" in str(error)


async def test_the_end_of_a_range_may_be_no_key() -> None:  # T14
    async def read(txn: perco.Transaction) -> None:
        assert len([row async for row in txn.scan(pairs, prefix=("a",))]) == 4

    error = await meanwhile(read, lambda txn: txn.delete(size, ("a", 2)))
    assert error is not None
    assert error.ranges[0][0] == "pairs"


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("taken", range(len(KEYS) + 1))
@pytest.mark.parametrize("how", ["left", "limit"])
async def test_of_a_scan_only_what_was_taken_counts(reverse: bool, taken: int, how: str) -> None:  # T14
    """Left half-way or ended by its limit: rows and gaps up to the last row that was taken, and no further."""
    keys = KEYS[::-1] if reverse else KEYS

    async def read(txn: perco.Transaction) -> None:
        scan = txn.scan(docs, columns=[n], reverse=reverse, limit=taken if how == "limit" else None)
        if how == "limit":
            assert [row.key for row in await scan.all()] == keys[:taken]
        else:
            for key in keys[:taken]:
                assert (await anext(scan)).key == key

    for i, key in enumerate(keys):
        refused = await meanwhile(read, lambda txn, key=key: txn.set(n, key, 77)) is not None  # type: ignore[misc]
        assert refused == (i < taken), key
        # a gap just before the row, seen from where the scan began
        gap = key + "0" if reverse else chr(ord(key) - 1) + "9"
        refused = await meanwhile(read, lambda txn, gap=gap: txn.set(n, gap, 1)) is not None  # type: ignore[misc]
        assert refused == (i < taken), gap


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_of_many_pages_is_read_again_as_a_whole(reverse: bool) -> None:  # T14
    many = [f"k{i:04}" for i in range(700)]

    async def run(key: str | None, taken: int) -> bool:
        async with perco.open("memory:", SCHEMA) as db:
            async with db.transaction() as txn:
                for k in many:
                    txn.set(n, k, 0)
            txn = await db.begin(isolation="serializable")
            scan = txn.scan(docs, prefix="k", reverse=reverse)
            for _ in range(taken):
                await anext(scan)
            if taken == len(many):
                with pytest.raises(StopAsyncIteration):
                    await anext(scan)
            if key is not None:
                async with db.transaction() as other:
                    other.set(n, key, 1)
            txn.set(n, "zz", 1)
            try:
                await txn.commit()
            except perco.errors.ReadConflict:
                return False
            return True

    assert await run(None, len(many))
    assert await run(None, 300)
    for at in (0, 255, 256, 257, 511, 512, 513, 699):
        key = many[::-1][at] if reverse else many[at]
        assert not await run(key, len(many))
        assert not await run(key + "x", len(many))
        assert await run(key, at)
        assert not await run(key, at + 1)


async def test_own_writes_are_no_conflict() -> None:  # T14
    """Neither on cells that were read, nor in ranges: before, while and after they are scanned."""
    async with perco.open("memory:", SCHEMA) as db:
        await fill(db)
        async with db.transaction(isolation="serializable") as txn:
            txn.set(n, "a", 1)
            await by_get(txn)
            async for row in txn.scan(docs, columns=[n]):
                txn.set(n, row.key, (row[n] or 0) + 1)
                if len(row.key) == 1:
                    txn.set(n, row.key + "1", 1)
            txn.delete(n, "m")
            await by_scan_backwards(txn)
        assert txn.outcome == "committed"
        assert txn.isolation == "serializable"


async def test_its_own_write_may_be_read_without_being_validated() -> None:  # T14
    async with perco.open("memory:", SCHEMA) as db, db.transaction(isolation="serializable") as txn:
        txn.set(n, "a", 1)
        assert await txn.get(n, "a") == 1
        assert txn._reads is not None
        assert not txn._reads.cells


async def test_it_validates_after_the_draw() -> None:  # T14
    """Another one commits when the first holds its locks and is about to draw. Had the first validated by then, it
    would commit above the other one, which it has not seen; and a snapshot between the two would tell.
    """
    async with perco.open("memory:", SCHEMA) as db:
        await fill(db)
        t1 = await db.begin(isolation="serializable")
        assert await t1.get(n, "q") == 4
        t1.set(n, "b", 10)
        draw = inside(db).oracle.draw
        drawn: list[int] = []

        async def other_first() -> int:
            if not drawn:
                drawn.append(0)
                async with db.transaction(isolation="serializable") as t2:
                    t2.set(n, "q", 40)
                drawn[0] = t2.commit_ts
            return await draw()

        inside(db).oracle.draw = other_first  # type: ignore[method-assign]
        with pytest.raises(perco.errors.ReadConflict) as caught:
            await t1.commit()
        assert t1.start_ts < drawn[0] < caught.value.commit_ts


@pytest.mark.parametrize("read", READS)
async def test_an_undecided_lock_refuses_at_once(read: Read) -> None:  # T7 T14
    """A transaction that waited while holding locks could wait for ever."""
    async with perco.open("memory:", SCHEMA) as db:
        await fill(db)
        t1, t2 = await db.begin(isolation="serializable"), await db.begin()
        await read(t1)
        t1.set(n, "zz", 1)
        t2.set(n, "m", 1)
        t2.set(text, "m", LONG)
        gate = await gated(db, "commit")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(t2.commit)
            await gate.reached()
            with pytest.raises(perco.errors.ReadConflict):
                await t1.commit()  # the gate is still closed: it would wait for ever
            gate.open()
        assert db.statistics().counters.lock_waits == 0


async def test_what_is_committing_in_one_step_refuses_at_once() -> None:  # C4 T7 T14
    """It may be about to meet the lock of whoever validates, and to wait for that: neither may wait for the other."""
    async with perco.open("memory:", SCHEMA) as db:
        await fill(db)
        for read in (by_get, by_scan, by_scan_backwards):
            t1, t2 = await db.begin(isolation="serializable"), await db.begin()
            await read(t1)
            t1.set(n, "b", 1)
            t2.set(n, "b", 2)
            gate = Gate("one step")
            use(db, FaultyRowStore(local_of(db).store, before=gate))
            refused: list[perco.TransientError] = []

            async def commit(txn: perco.Transaction, refused: list[perco.TransientError] = refused) -> None:
                try:
                    await txn.commit()
                except perco.TransientError as error:
                    refused.append(error)

            draw = inside(db).oracle.draw

            async def then_validate(draw=draw, t2=t2, commit=commit, gate=gate) -> int:  # type: ignore[no-untyped-def]
                nursery.start_soon(commit, t2)  # "b" is locked; t2 has drawn, and has not arrived
                await gate.reached()
                return await draw()  # type: ignore[no-any-return]

            inside(db).oracle.draw = then_validate  # type: ignore[method-assign]
            async with trio.open_nursery() as nursery:
                await commit(t1)
                inside(db).oracle.draw = draw  # type: ignore[method-assign]
                gate.open()
            await trio.testing.wait_all_tasks_blocked()
            assert isinstance(refused[0], perco.errors.ReadConflict)
            assert (t1.outcome, t2.outcome) == ("aborted", "committed")


async def test_a_lock_above_its_commit_does_not_matter() -> None:  # T14
    """A transaction that began after commit_ts was drawn commits after it."""
    async with perco.open("memory:", SCHEMA) as db:
        await fill(db)
        t1 = await db.begin(isolation="serializable")
        await by_scan(t1)
        await by_get(t1)
        t1.set(n, "b", 1)
        draw = inside(db).oracle.draw
        gates = []

        async def then_another() -> int:
            ts = await draw()
            if not gates:
                gates.append(await gated(db, "commit"))
                later = await db.begin()
                later.set(n, "m", 1)
                nursery.start_soon(later.commit)
                await gates[0].reached()
                inside(db).driver.store = inside(db).driver.reads = local_of(db).store
            return ts

        inside(db).oracle.draw = then_another  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            await t1.commit()
            gates[0].open()


@pytest.mark.parametrize("committed", [True, False])
async def test_a_lock_whose_fate_is_known_does_not_refuse_by_itself(committed: bool) -> None:  # T14 S4
    """Phase two is on its way, or a rollback: the lock's contents count as the cell's."""
    async with perco.open("memory:", SCHEMA) as db:
        await fill(db)
        other = await db.begin()
        other.set(n, "zzz", 1)
        other.set(n, "f", 1)
        other.set(n, "m", 1)
        gate = await gated(db, "commit", skip=1)  # its secondaries stay locked
        await other.commit()
        t1, t2 = await db.begin(isolation="serializable"), await db.begin(isolation="serializable")
        for txn in (t1, t2):
            await by_get(txn)
            await by_scan(txn)
        t1.set(n, "b", 1)
        if not committed:
            t1.discard()
        else:
            await t1.commit()
        t2.set(n, "q", 2)
        if committed:
            with pytest.raises(perco.errors.ReadConflict):
                await t2.commit()
        else:
            await t2.commit()
        gate.open()


async def test_a_lock_of_the_dead_refuses_and_the_next_attempt_settles_it() -> None:  # T9 T14
    machine = Machine(SCHEMA)
    async with machine.opened() as db:
        await fill(db)
        txn = await db.begin(isolation="serializable")
        await by_scan(txn)
    async with machine.crashing(1, made=False) as (dead, _):
        with contextlib.suppress(CrashedError):
            async with dead.transaction() as gone:
                gone.set(n, "b", 9)
                gone.set(n, "u", 9)
    assert machine.locks() == 1
    async with machine.opened() as db:
        t1 = perco.Transaction(inside(db).engine, txn.start_ts)
        t1._reads = txn._reads
        t1.set(n, "zz", 1)
        with pytest.raises(perco.errors.ReadConflict):
            await t1.commit()

        async def again(txn: perco.Transaction) -> object:
            read = await by_scan(txn)
            txn.set(n, "zz", 1)
            return read

        assert await db.options(attempts=1, isolation="serializable").run(again) == [0, 1, 2, 3, 4, 5]


async def test_without_writes_there_is_nothing_to_validate() -> None:  # T14
    """It is a snapshot: it comes right after all that committed up to its start."""
    async with perco.open("memory:", SCHEMA) as db:
        await fill(db)
        async with db.transaction(isolation="serializable") as txn:
            assert await txn.get(n, "b") == 0
            async with db.transaction() as other:
                other.set(n, "b", 9)
        assert (txn.outcome, txn.commit_ts) == ("committed", 0)


@pytest.mark.parametrize("fault", [Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.ECHO])
@pytest.mark.parametrize("kind", ["prewrite", "commit"])
async def test_a_lost_reply_does_not_change_what_it_was_validated_at(kind: str, fault: Fault) -> None:  # T4 T14
    async with perco.open("memory:", SCHEMA) as db:
        await fill(db)
        store = faulty(db, on(kind, fault))
        async with db.transaction(isolation="serializable") as txn:
            await by_scan(txn)
            txn.set(n, "b", 1)
            txn.set(n, "q", 1)
        assert store.fired[fault] == 1
        assert txn.outcome == "committed"


async def test_cancelled_while_it_validates_it_lets_go() -> None:  # T10 T14
    async with perco.open("memory:", SCHEMA) as db:
        await fill(db)
        txn = await db.begin(isolation="serializable")
        await by_scan(txn)
        txn.set(n, "b", 1)
        store = faulty(db)
        stopped = trio.Event()

        async def looking() -> None:
            if "prewrite" in store.log:
                stopped.set()
                await trio.sleep_forever()

        store.looking = looking
        async with trio.open_nursery() as nursery:
            nursery.start_soon(txn.commit)
            await stopped.wait()
            nursery.cancel_scope.cancel()
        store.looking = None
        await trio.testing.wait_all_tasks_blocked()
        assert txn.outcome == "aborted"
        assert not sum(tablet.entries(LOCK) for tablet in local_of(db).store.tablets())


# ------------------------------------------------------------ how it is asked for


async def test_what_is_refused_runs_again(autojump_clock: trio.testing.MockClock) -> None:  # T11 T14
    """Two doctors on call, who go home at once: one of them sees, at its second attempt, that the other has gone."""
    async with perco.open("memory:", SCHEMA) as db:
        await fill(db)
        async with db.transaction() as txn:
            txn.set(n, "b", 1)
            txn.set(n, "q", 1)
        runs = 0

        async def go_home(txn: perco.Transaction, who: str) -> None:
            nonlocal runs
            runs += 1
            on_call = await txn.get_many(n, ["b", "q"])
            await trio.sleep(0.01)
            if sum(value or 0 for value in on_call.values()) > 1:
                txn.set(n, who, 0)

        async with trio.open_nursery() as nursery:
            serializable = db.options(isolation="serializable")
            nursery.start_soon(serializable.run, go_home, "b")
            nursery.start_soon(serializable.run, go_home, "q")
        assert runs >= 3
        async with db.snapshot() as snap:
            assert sorted((await snap.get_many(n, ["b", "q"])).values()) == [0, 1]  # type: ignore[type-var]


async def test_each_way_to_begin_takes_it() -> None:  # T14
    serializable = perco.Options(transaction=perco.options.TransactionOptions(isolation="serializable"))

    async def isolation(txn: perco.Transaction) -> str:
        return txn.isolation

    for options, usual in ((perco.Options(), "snapshot"), (serializable, "serializable")):
        async with perco.open("memory:", SCHEMA, options=options) as db:
            assert await db.run(isolation) == usual
            assert await db.options().run(isolation) == usual
            async for attempt in db.attempts():
                async with attempt as txn:
                    assert txn.isolation == usual
            async with db.transaction() as txn:
                assert txn.isolation == usual
            for wanted in ("snapshot", "serializable"):
                assert await db.options(isolation=wanted).run(isolation) == wanted  # type: ignore[arg-type]
                assert await db.options(isolation=wanted, timeout=60.0).run(isolation) == wanted  # type: ignore[arg-type]
                async for attempt in db.options(isolation=wanted).attempts():  # type: ignore[arg-type]
                    async with attempt as txn:
                        assert txn.isolation == wanted
                async with db.transaction(isolation=wanted) as txn:  # type: ignore[arg-type]
                    assert txn.isolation == wanted


async def test_an_isolation_that_there_is_not_is_a_mistake() -> None:
    wrong = 'isolation is "snapshot" or "serializable", not "repeatable'
    with pytest.raises(perco.UsageError, match=wrong.replace('"repeatable', "'repeatable")):
        perco.options.TransactionOptions(isolation="repeatable")  # type: ignore[arg-type]
    with pytest.raises(perco.UsageError, match="isolation is"):
        perco.Schema(docs).observe(n, id="x", isolation="rc")  # type: ignore[arg-type]
    async with perco.open("memory:", SCHEMA) as db:
        with pytest.raises(perco.UsageError, match="isolation is"):
            db.options(isolation="rc")  # type: ignore[arg-type]
        with pytest.raises(perco.UsageError, match="isolation is"):
            await db.begin(isolation="rc")  # type: ignore[arg-type]


async def test_more_than_may_be_remembered_is_too_much() -> None:  # T14
    options = perco.Options(transaction=perco.options.TransactionOptions(reads_max=4))
    async with perco.open("memory:", SCHEMA, options=options) as db:
        await fill(db)
        async with db.transaction(isolation="serializable") as txn:
            for _ in range(3):
                await txn.get_many(n, KEYS[:3])  # the same cells
            assert len(await txn.scan(docs).all()) == len(KEYS)  # a scan counts as one
            with pytest.raises(
                perco.errors.TooLarge, match="cells and ranges read by one serializable transaction: 5 is over"
            ):
                await txn.get(n, "u")
        async with db.transaction() as txn:
            await by_get(txn)


async def test_an_observer_may_be_serializable() -> None:  # T14
    """The cells that a run read, the observed one too, are unchanged when its ack commits; else it runs again."""
    schema = perco.Schema(docs)
    seen: list[tuple[object, object]] = []
    runs = 0

    @schema.observe(text, id="copy", isolation="serializable")
    async def copy(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        nonlocal runs
        runs += 1
        assert txn.isolation == "serializable"
        other = await txn.get(n, "other")
        if runs == 1:
            async with db.transaction() as meanwhile:
                meanwhile.set(n, "other", 2)
        elif runs == 2:  # the observed cell itself, which the function has not asked for
            async with db.transaction() as meanwhile:
                meanwhile.set(text, "a", "second")
        seen.append((change.value, other))
        txn.set(n, change.key, other or 0)

    async with perco.open("memory:", schema) as db, db.worker():
        async with db.transaction() as txn:
            txn.set(text, "a", "first")
            txn.set(n, "other", 1)
        await db.wait_idle()
        assert seen == [("first", 1), ("first", 2), ("second", 2)]
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") == 2
