"""What a transaction keeps of what it has read, and what is read ahead for it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.protocol import records
from perco.protocol.records import Cellref
from perco.protocol.snapshot import InData, Missing, Value
from perco.storage import LOCK, WRITE, LocalRowStore, ReadRequest, RowCells
from perco.txn.entered import Entry
from perco.txn.prefetch import Ahead, Predictor, name_of
from tests.support.faults import gated
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT)
COLUMNS = [docs.column(f"c{i}", perco.INT64) for i in range(12)]
a, b, c, d = COLUMNS[:4]
text = docs.column("text", perco.TEXT)
done = docs.column("done", perco.INT64)
poked = docs.signal("poked")
SCHEMA = perco.Schema(docs)
ON = perco.options.PrefetchOptions(cache=True, predict=True)
CACHE = perco.options.PrefetchOptions(cache=True, predict=False)
LONG = "x" * 1000


def opened(prefetch: perco.options.PrefetchOptions, schema: perco.Schema = SCHEMA) -> perco.open:  # type: ignore[valid-type]
    return perco.open("memory:", schema, options=perco.Options(prefetch=prefetch, seed=1))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each row was read of the store."""
    counted: Counter[str] = Counter()
    right = LocalRowStore.read

    async def noted(self: LocalRowStore, requests: Sequence[ReadRequest]) -> list[RowCells]:
        counted.update(row.decode() for table, row, _ in requests if table == "docs")
        return await right(self, requests)

    monkeypatch.setattr(LocalRowStore, "read", noted)
    return counted


async def fill(db: perco.Database, *keys: str) -> None:
    async with db.transaction() as txn:
        for key in keys:
            for i, column in enumerate(COLUMNS):
                txn.set(column, key, i)
            txn.set(text, key, LONG)


def reading(*columns: perco.Column[str, int]) -> Callable[[perco.Transaction, str], Awaitable[list[int | None]]]:
    async def function(txn: perco.Transaction, key: str) -> list[int | None]:
        return [await txn.get(column, key) for column in columns]

    return function


def counters(db: perco.Database) -> perco.PrefetchCounters:
    total = perco.PrefetchCounters()
    for each in db.statistics().prefetch.values():
        total.add(each)
    return total


async def run_all(
    db: perco.Database, function: Callable[[perco.Transaction, str], Awaitable[object]], keys: Iterable[str]
) -> None:
    for key in keys:
        await db.run(function, key)


async def test_no_cell_is_read_twice_by_one_transaction(read: Counter[str]) -> None:
    async with opened(CACHE) as db:
        await fill(db, "x")
        async with db.transaction() as txn:
            for _ in range(3):
                assert await txn.get(a, "x") == 0
                assert await txn.get(b, "gone") is None
                assert (await txn.row(docs, "x", [a, b]))[b] == 1
                assert await txn.get_many(a, ["x", "gone"]) == {"x": 0, "gone": None}
        assert read == {"x": 2, "gone": 2}  # b of the one and a of the other came later
        assert counters(db).predicted == 0


async def test_what_was_read_later_in_the_past_is_read_with_the_first(read: Counter[str]) -> None:
    function = reading(a, b, c, d)
    async with opened(ON) as db:
        await fill(db, "1", "2", "3")
        for key in ("1", "2", "3"):
            assert await db.run(function, key) == [0, 1, 2, 3]
        assert read == {"1": 4, "2": 4, "3": 1}  # two of them say enough
        told = db.statistics().prefetch[name_of(function)]
        assert (told.reads, told.sent) == (9, 12)
        assert (told.predicted, told.used, told.wasted, told.kept) == (3, 3, 0, 3)


async def test_each_function_has_a_memory_of_its_own(read: Counter[str]) -> None:
    async def one(txn: perco.Transaction, key: str) -> None:
        await txn.get(a, key), await txn.get(b, key)

    async def other(txn: perco.Transaction, key: str) -> None:
        await txn.get(a, key), await txn.get(c, key)

    async with opened(ON) as db:
        await fill(db, "x")
        for _ in range(10):
            await db.run(one, "x")
            await db.run(partial(other), "x")
        told = counters(db)
        assert (told.predicted, told.wasted) == (16, 0)
        assert set(db.statistics().prefetch) == {name_of(one), name_of(other), "transaction"}


async def test_what_is_not_read_any_more_is_forgotten(read: Counter[str]) -> None:
    columns = [b]

    async def function(txn: perco.Transaction, key: str) -> None:
        await txn.get(a, key)
        for column in columns:
            await txn.get(column, key)

    async with opened(ON) as db:
        await fill(db, "x")
        await run_all(db, function, ["x"] * 50)
        columns[:] = [c]
        before = counters(db)
        await run_all(db, function, ["x"] * 100)
        after = counters(db)
        assert 0 < after.wasted - before.wasted < 16
        assert after.used - before.used > 60


async def test_what_is_seldom_read_is_not_read_ahead() -> None:
    async def function(txn: perco.Transaction, turn: int) -> None:
        await txn.get(a, "x")
        if turn % 3 == 0:
            await txn.get(b, "x")

    async with opened(ON) as db:
        await fill(db, "x")
        for turn in range(100):
            await db.run(function, turn)
        told = counters(db)
        assert told.predicted <= 3


async def test_it_is_off_where_the_store_is_in_this_process_and_on_where_it_is_served(tmp_path: Path) -> None:
    async with perco.open(tmp_path / "store", SCHEMA, options=perco.Options(durability="process")) as owner:
        await fill(owner, "x")
        await run_all(owner, reading(a, b), ["x"] * 5)
        assert owner.statistics().prefetch == {}
        for options, expected in ((perco.options.PrefetchOptions(), 3), (CACHE, 0)):
            url = f"unix:{tmp_path / 'store' / 'socket'}"
            async with perco.open(url, SCHEMA, options=perco.Options(prefetch=options)) as client:
                await run_all(client, reading(a, b), ["x"] * 5)
                assert counters(client).used == expected


async def test_bounds(read: Counter[str]) -> None:
    few = perco.options.PrefetchOptions(cache=True, predict=True, columns_max=3, cells_max=6, bytes_max=1 << 20)
    async with opened(few) as db:
        await fill(db, "x", "y")
        await run_all(db, reading(*COLUMNS), ["x"] * 2)
        read.clear()
        assert await db.run(reading(*COLUMNS), "x") == list(range(12))
        # Six cells are kept: with c0 come three, which leaves room for two; the others are read one by one.
        assert read["x"] < 12
        assert await db.run(reading(*COLUMNS, *COLUMNS), "y") == [*range(12), *range(12)]
        assert counters(db).wasted == counters(db).predicted - counters(db).used
    small = perco.options.PrefetchOptions(cache=True, predict=False, bytes_max=1100)
    async with opened(small) as db:
        await fill(db, "x", "y", "z")
        read.clear()
        async with db.transaction() as txn:
            for key in ("x", "y", "z", "x", "y", "z"):
                assert await txn.get(text, key) == LONG
        assert read == {"x": 2, "y": 4, "z": 4}  # a long value takes two reads, and only the first is kept
    forgetful = perco.options.PrefetchOptions(cache=True, predict=True, functions_max=2)
    predictor = Predictor(forgetful, served=False)
    for name in ("one", "two", "one", "three"):
        ahead = predictor.begin(name)
        ahead.took("docs", ahead.plan("docs", b"x", (1,)), [[], []])
        ahead.end()
    told = predictor.statistics()
    assert {name: each.reads for name, each in told.items()} == {"one": 2, "three": 1, "": 1}


async def test_a_value_too_long_for_its_record_comes_with_it(read: Counter[str]) -> None:
    async def function(txn: perco.Transaction, key: str) -> str | None:
        await txn.get(a, key)
        return await txn.get(text, key)

    async with opened(ON) as db:
        await fill(db, "x")
        await run_all(db, function, ["x"] * 2)
        assert read["x"] == 6
        assert await db.run(function, "x") == LONG
        assert read["x"] == 7


@pytest.mark.parametrize("first", [True, False], ids=["asked for", "read ahead"])
async def test_of_long_values_only_that_of_the_record_counts(first: bool) -> None:  # T9
    """Another transaction has begun before the snapshot, and commits after it: its data is newer than what is seen."""

    async def function(txn: perco.Transaction, key: str) -> str | None:
        if not first:
            await txn.get(a, key)
        return await txn.get(text, key)

    async with opened(ON) as db:
        await fill(db, "x")
        await run_all(db, function, ["x"] * 3)
        writer = await db.begin()
        writer.set(text, "x", "y" * 1000)
        reader = await db.begin()
        reader._ahead = inside(db).engine.prefetch.begin(name_of(function))
        await writer.commit()
        assert await function(reader, "x") == LONG
        reader.discard()


async def test_what_a_lock_is_in_the_way_of_is_met_when_it_is_really_read() -> None:  # T9
    function = reading(a, b)
    async with opened(ON) as db:
        await fill(db, "x")
        await run_all(db, function, ["x"] * 3)
        gate = await gated(db, "commit")
        writer = await db.begin()
        writer.set(b, "x", 100)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.commit)
            await gate.reached()
            reader = await db.begin()
            reader._ahead = inside(db).engine.prefetch.begin(name_of(function))
            assert await reader.get(a, "x") == 0  # and b is read ahead, with its lock
            assert counters(db).predicted == 2
            gate.open()
        assert await reader.get(b, "x") == (100 if writer.commit_ts < reader.start_ts else 1)
        reader.discard()
        assert counters(db).wasted == 1
        assert counters(db).predicted == counters(db).used + counters(db).wasted


async def test_nobody_waits_for_what_is_only_read_ahead() -> None:  # C4
    function = reading(a, b)
    async with opened(ON) as db:
        await fill(db, "x")
        await run_all(db, function, ["x"] * 3)
        ahead = inside(db).engine.prefetch.begin(name_of(function))
        reader = await db.begin()
        reader._ahead = ahead
        bound = inside(db).known.bounds[b]
        where = ("docs", b"x", bound.column)
        inside(db).driver.entered.cells[where] = Entry(reader.start_ts, reader.start_ts, Cellref(*where))
        assert await reader.get(a, "x") == 0
        assert ahead._rows["docs", b"x"].unused == set(), "writes entered below the snapshot may not be there yet"
        del inside(db).driver.entered.cells[where]
        reader.discard()


async def test_damage_is_told_when_it_is_really_read() -> None:
    function = reading(a, b)
    async with opened(ON) as db:
        await fill(db, "x", "y")
        await run_all(db, function, ["x"] * 3)
        [tablet] = [tablet for tablet in local_of(db).store.tablets() if tablet.table == "docs"]
        column = inside(db).known.bounds[b].column
        [[[ts, _]]] = tablet.read(b"y", [(WRITE, column, 0, inside(db).oracle.last, 1)])
        await local_of(db).store.apply(
            [perco.storage.Mutation("docs", ((b"y", (), ((WRITE, column, ts, b"?"),)),), None)]
        )
        txn = await db.begin()
        txn._ahead = inside(db).engine.prefetch.begin(name_of(function))
        assert await txn.get(a, "y") == 0
        assert column in txn._ahead._rows["docs", b"y"].unused
        with pytest.raises(perco.errors.Corruption, match="c1"):
            await txn.get(b, "y")
        txn.discard()


async def test_what_is_only_read_ahead_is_no_read_of_a_serializable_transaction() -> None:  # T14
    function = reading(a, b)
    async with opened(ON) as db:
        await fill(db, "x")
        for really in (False, True):
            await run_all(db, function, ["x"] * 10)
            txn = await db.begin(isolation="serializable")
            txn._ahead = inside(db).engine.prefetch.begin(name_of(function))
            await txn.get(a, "x")
            assert inside(db).known.bounds[b].column in txn._ahead._rows["docs", b"x"].unused
            if really:
                await txn.get(b, "x")
            async with db.transaction() as other:
                other.set(b, "x", 7)
            txn.set(c, "x", 1)
            if really:
                with pytest.raises(perco.errors.ReadConflict):
                    await txn.commit()
            else:
                await txn.commit()


async def test_what_is_kept_is_what_was_written_before_and_not_what_is_written_now() -> None:
    async with opened(ON) as db:
        await fill(db, "x")
        async with db.transaction() as txn:
            assert await txn.get(a, "x") == 0
            txn.set(a, "x", 5)
            assert await txn.get(a, "x") == 5
            async with db.transaction() as other:
                other.set(b, "x", 9)
            assert await txn.get(b, "x") == 1


@pytest.mark.parametrize("signal", [False, True], ids=["column", "signal"])
async def test_an_observer_reads_ahead_with_its_claim(signal: bool, read: Counter[str]) -> None:
    schema = perco.Schema(docs)

    @schema.observe(poked if signal else a, id="sum")
    async def total(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        values = [await txn.get(column, change.key) for column in (a, b, c)]
        assert (await txn.row(docs, change.key, [c, a]))[a] == values[0]
        long = await txn.get(text, change.key)
        txn.set(done, change.key, sum(value or 0 for value in values) + len(long or ""))

    async with opened(ON, schema) as db, db.worker():
        for key in "123456":
            await fill(db, key)
            async with db.transaction() as txn:
                txn.signal(poked, key)
            await db.wait_idle()
        before = db.statistics().prefetch["sum"].reads
        async with db.transaction() as txn:
            for column in (a, b, c):
                txn.set(column, "1", 10)
            txn.signal(poked, "1")
        await db.wait_idle()
        async with db.snapshot() as snap:
            assert await snap.get(done, "1") == 30 + len(LONG)
        told = db.statistics().prefetch["sum"]
        assert told.wasted == 0
        assert told.predicted == told.used
        assert told.used >= 10
        assert told.reads - before == 1  # the claim


async def takes_turns(turns: Counter[str]) -> None:
    """Another task of the loop."""
    while True:
        turns["other"] += 1
        await trio.lowlevel.checkpoint()


async def test_who_only_meets_what_is_kept_gives_way_and_can_be_cancelled() -> None:
    async with opened(CACHE) as db:
        await fill(db, "x")
        turns: Counter[str] = Counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(takes_turns, turns)
            async with db.transaction() as txn:
                for _ in range(1000):
                    await txn.get(a, "x")
                assert turns["other"] > 10
                with trio.move_on_after(0) as scope:
                    await txn.get(a, "x")
                assert scope.cancelled_caught
                with trio.move_on_after(0) as scope:
                    await txn.row(docs, "x", [a])
                assert scope.cancelled_caught
            nursery.cancel_scope.cancel()


async def test_what_is_kept_or_asked_for_waits_for_what_was_entered_before_it() -> None:  # C4
    async with opened(CACHE) as db:
        await fill(db, "x")
        gate = await gated(db, "one step")
        writer = await db.begin()
        writer.set(a, "x", 100)
        found = []

        async def reads() -> None:
            async with db.transaction() as txn:
                assert txn.start_ts > writer.start_ts
                found.append(await txn.get(a, "x"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.commit)
            await gate.reached()
            nursery.start_soon(reads)
            await trio.testing.wait_all_tasks_blocked()
            assert not found
            gate.open()
        assert found == [100]


async def test_a_value_that_is_long_no_more_is_not_asked_for_twice() -> None:
    function = reading(a, text)  # type: ignore[arg-type]
    async with opened(ON) as db:
        await fill(db, "x")
        await run_all(db, function, ["x"] * 5)
        number = inside(db).known.bounds[text].column
        memory = inside(db).engine.prefetch.begin(name_of(function))
        assert memory.plan("docs", b"x", (number,)).groups == (inside(db).known.bounds[text].group,)
        async with db.transaction() as txn:
            txn.set(text, "x", "short")
        await run_all(db, function, ["x"] * 40)
        memory = inside(db).engine.prefetch.begin(name_of(function))
        assert memory.plan("docs", b"x", (number,)).groups == ("",)


def learnt(predictor: Predictor, *transactions: Sequence[int]) -> None:
    """Transactions that read these columns of a row, one by one."""
    for columns in transactions:
        ahead = predictor.begin("f")
        for column in columns:
            if ahead.find("t", b"r", column) is None:
                plan = ahead.plan("t", b"r", (column,))
                ahead.took("t", plan, [[] for _ in plan.queries(9)])
        ahead.end()


async def test_what_is_too_long_for_one_reply_is_read_without_what_was_to_be_read_ahead(tmp_path: Path) -> None:
    wide = perco.Table("wide", key=perco.TEXT)
    title = wide.column("title", perco.INT64)
    bodies = [wide.column(f"body{i}", perco.BYTES) for i in range(4)]
    schema = perco.Schema(wide)
    seen = wide.column("seen", perco.INT64)

    @schema.observe(title, id="reads all")
    async def reads_all(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        txn.set(seen, change.key, sum([len(await txn.get(body, change.key) or b"") for body in bodies]))

    wire = perco.options.WireOptions(message_bytes_max=1 << 20, frame_bytes=1 << 16)
    options = perco.Options(
        durability="process", wire=wire, prefetch=perco.options.PrefetchOptions(ahead_bytes_max=1 << 30)
    )
    async with perco.open(tmp_path / "store", perco.Schema(wide), options=options):
        url = f"unix:{tmp_path / 'store' / 'socket'}"
        async with perco.open(url, schema, options=options) as db, db.worker():
            for turn in range(4):
                for i, body in enumerate(bodies):
                    async with db.transaction() as txn:
                        txn.set(body, "x", b"x" * (300_000 + i))
                async with db.transaction() as txn:
                    txn.set(title, "x", turn)
                await db.wait_idle(timeout=60)
                async with db.snapshot() as snap:
                    assert await snap.get(seen, "x") == 1_200_006
            assert db.statistics().prefetch["reads all"].used > 0, "at first its size was not known"


def test_long_values_are_read_ahead_as_far_as_they_fit() -> None:
    options = perco.options.PrefetchOptions(cache=True, predict=True, ahead_bytes_max=2500)
    predictor = Predictor(options, served=False)
    for _ in range(2):
        ahead = predictor.begin("f")
        for column in (1, 2, 3):
            plan = ahead.plan("t", b"r", (column,))
            record = (5, records.pack_record(records.PUT_DATA, 4, b"data"))
            [(_, raw)] = ahead.took("t", plan, [[], [record]])
            assert type(ahead.look("t", column, raw)) is InData
            ahead.keep("t", b"r", column, Value(5, b"x" * 1000))
        ahead.end()
    ahead = predictor.begin("f")
    ahead.begin_read()
    assert ahead.plan("t", b"r", (1,)).groups == ("data", "data", "")
    ahead.begin_read()
    assert ahead.plan("t", b"s", (1,)).groups == ("data", "data", "")


async def test_a_damaged_record_is_told_of_its_cell_and_of_no_other(tmp_path: Path) -> None:
    async def function(txn: perco.Transaction, key: str) -> str | None:
        return await txn.get(text, key)

    async with perco.open(tmp_path / "store", SCHEMA, options=perco.Options(durability="process", prefetch=ON)) as db:
        await fill(db, *"12345")
        await run_all(db, function, "12345")
        [tablet] = [tablet for tablet in local_of(db).store.tablets() if tablet.table == "docs"]
        column = inside(db).known.bounds[text].column
        [[[ts, record]]] = tablet.read(b"1", [(WRITE, column, 0, inside(db).oracle.last, 1)])
        damaged = record.replace(b"data", b"data:zz")
        assert damaged != record
        writes = ((WRITE, column, ts, damaged),)
        await local_of(db).store.apply([perco.storage.Mutation("docs", ((b"1", (), writes),), None)])
        for _ in range(3):
            with pytest.raises(perco.errors.Corruption, match="'1'"):
                await db.run(function, "1")
            assert await db.run(function, "2") == LONG


async def test_who_reads_many_that_are_kept_gives_way() -> None:
    async with opened(CACHE) as db:
        keys = [str(i) for i in range(64)]
        await fill(db, *keys)
        turns: Counter[str] = Counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(takes_turns, turns)
            async with db.transaction() as txn:
                await txn.get(a, "0")
                await txn.get(a, "0")
                for _ in range(100):
                    await txn.get_many(a, keys)
            assert turns["other"] > 50
            nursery.cancel_scope.cancel()


async def test_all_that_was_read_ahead_is_used_or_wasted_in_the_end() -> None:
    function = reading(a, b, c)
    async with opened(ON) as db:
        await fill(db, "x")
        await run_all(db, function, ["x"] * 5)
        dropped = await db.begin()
        dropped._ahead = inside(db).engine.prefetch.begin(name_of(function))
        await dropped.get(a, "x")
        del dropped
        gc.collect()
        told = counters(db)
        assert told.wasted == 2
        assert told.predicted == told.used + told.wasted


async def test_who_begins_a_transaction_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: Counter[str] = Counter()
    right = Predictor.begin

    def begin(self: Predictor, function: str) -> Ahead | None:
        begun[function] += 1
        return right(self, function)

    monkeypatch.setattr(Predictor, "begin", begin)
    schema = perco.Schema(docs)

    @schema.observe(a, id="copy")
    async def copy(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        txn.set(done, change.key, change.value or 0)

    async def one(txn: perco.Transaction) -> None:
        txn.set(a, "x", 1)

    async with opened(ON, schema) as db, db.worker():
        await db.run(one)
        await db.options(timeout=5).run(partial(one))
        async for attempt in db.attempts():
            async with attempt as txn:
                txn.set(a, "x", 2)
        await db.wait_idle()
        assert begun[name_of(one)] == 2
        assert begun["transaction"] == 1
        assert set(begun) == {name_of(one), "transaction", "copy"}


def test_what_had_a_lock_in_its_way_may_be_read_ahead_again_and_counts_twice() -> None:
    predictor = Predictor(ON, served=False)
    learnt(predictor, (7, 4, 2), (7, 4, 2))
    ahead = predictor.begin("f")
    lock = [(3, b"a lock")]
    ahead.took("t", ahead.plan("t", b"r", (7,)), [[], [], lock, [], lock, []])
    assert ahead.find("t", b"r", 2) is None
    assert ahead.find("t", b"r", 4) is None
    plan = ahead.plan("t", b"r", (4,))
    assert plan.columns == (4, 2)
    ahead.took("t", plan, [[], [], [], []])
    ahead.end()
    told = predictor.statistics()["f"]
    assert (told.predicted - told.used, told.wasted) == (3, 3)


def test_nothing_is_read_ahead_that_there_is_no_room_for() -> None:
    predictor = Predictor(perco.options.PrefetchOptions(cache=True, predict=True, bytes_max=10), served=False)
    learnt(predictor, (1, 2), (1, 2))
    ahead = predictor.begin("f")
    ahead.begin_read()
    assert ahead.plan("t", b"r", (1,)).columns == (1, 2)
    ahead.keep("t", b"r", 1, Value(5, b"x" * 10))
    ahead.begin_read()
    assert ahead.plan("t", b"s", (1,)).columns == (1,)


def test_an_object_with_every_attribute_has_a_name_too() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Proxy:
            return Proxy()

    assert name_of(Proxy())


def test_what_is_learnt_has_bounds() -> None:
    predictor = Predictor(ON, served=False)
    for start in range(0, 3000, 60):
        learnt(predictor, range(start, start + 60))
    assert len(predictor._memories["f"].later) == 1024
    tiny = Predictor(perco.options.PrefetchOptions(cache=True, predict=True, bytes_max=10, cells_max=1), served=False)
    ahead = tiny.begin("f")
    for _ in range(1000):
        ahead.took("t", ahead.plan("t", b"r", (1,)), [[], []])
    assert len(ahead._rows["t", b"r"].triggers) == 1


def test_who_gains_nothing_is_looked_at_now_and_then() -> None:
    predictor = Predictor(ON, served=False)
    learnt(predictor, *[(1,)] * 32)
    begun = [predictor.begin("f") for _ in range(64)]
    assert sum(ahead is not None for ahead in begun) == 4
    [ahead, *_] = [ahead for ahead in begun if ahead is not None]
    ahead.took("t", ahead.plan("t", b"r", (1,)), [[], []])
    ahead.plan("t", b"r", (2,))
    ahead.end()
    assert all(predictor.begin("f") is not None for _ in range(10))


def test_no_more_columns_are_read_ahead_than_the_option_says() -> None:
    predictor = Predictor(perco.options.PrefetchOptions(cache=True, predict=True, columns_max=3), served=False)
    learnt(predictor, range(1, 10), range(1, 10))
    assert predictor.begin("f").plan("t", b"r", (1,)).columns == (1, 2, 3, 4)


def test_who_reads_a_column_often_says_it_once() -> None:
    predictor = Predictor(perco.options.PrefetchOptions(cache=True, predict=True, cells_max=1), served=False)
    learnt(predictor, (1,), (1,), (1,), (1, *[2] * 20))
    assert predictor.begin("f").plan("t", b"r", (1,)).columns == (1,)


def test_what_is_known_is_not_read_ahead() -> None:
    predictor = Predictor(ON, served=False)
    learnt(predictor, (4, 1, 2), (4, 1, 2))
    assert predictor.begin("f").plan("t", b"r", (4,)).columns == (4, 1, 2)
    ahead = predictor.begin("f")
    ahead.took("t", ahead.plan("t", b"r", (2,)), [[], []])
    ahead.keep("t", b"r", 2, Missing())
    assert ahead.plan("t", b"r", (1,)).columns == (1,)


def test_no_more_rows_are_remembered_than_cells() -> None:
    ahead = Predictor(perco.options.PrefetchOptions(cache=True, predict=True, cells_max=5), served=False).begin("f")
    for i in range(20):
        ahead.plan("t", b"%d" % i, (1,))
    assert len(ahead._rows) == 5


def test_options_are_looked_at() -> None:
    with pytest.raises(perco.UsageError, match="likely_share is 2"):
        perco.options.PrefetchOptions(likely_share=2)
    with pytest.raises(perco.UsageError, match="columns_max"):
        perco.options.PrefetchOptions(columns_max=0)
    with pytest.raises(perco.UsageError, match="cache"):
        perco.options.PrefetchOptions(cache="yes")  # type: ignore[arg-type]


def test_it_asks_for_locks_and_records_of_what_it_reads_ahead() -> None:
    predictor = Predictor(ON, served=False)
    for _ in range(3):
        ahead = predictor.begin("f")
        plan = ahead.plan("t", b"r", (1, 2))
        ahead.took("t", plan, [[] for _ in plan.queries(9)])
        if ahead.find("t", b"r", 3) is None:
            ahead.took("t", ahead.plan("t", b"r", (3,)), [[], []])
        ahead.end()
    plan = predictor.begin("f").plan("t", b"r", (1, 2))
    assert plan.columns == (1, 2, 3)
    assert plan.queries(9) == [query for col in (1, 2, 3) for query in ((LOCK, col, 0, 9, 1), (WRITE, col, 0, 9, 1))]
