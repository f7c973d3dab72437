"""Old versions go, and nobody notices but the disk."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.check.check import check
from perco.clock.oracle import published
from perco.database.inside import inside, local_owner
from perco.protocol import mutations
from perco.protocol.mutations import Header, Intent
from perco.protocol.records import PUT, Cellref
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import APPLIED, LOCK, NOTIFY, ROLLBACK, TS_MAX, WRITE, Mutation, Refused, ScanQuery, ScanRequest
from perco.txn.resolver import make_token
from tests.support.everywhere import owning
from tests.support.faults import Fault, FaultyRowStore, kind_of, use
from tests.support.machines import CrashedError, Machine
from tests.support.places import local_of

AT_ONCE = perco.Keep(seconds=0)
docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
n = docs.column("n", perco.INT64)
long = docs.column("long", perco.TEXT)
SCHEMA = perco.Schema(docs, keep=AT_ONCE)
KEYS = ["a", "b", "i", "q"]  # in three tablets
LONG = "x" * 300
TWO_PHASES = perco.Options(commit=perco.options.CommitOptions(one_step=False))


def cells(db: perco.Database, group: str, table: str = "docs") -> Iterator[tuple[bytes, int, int]]:
    """(row, column, ts) of every cell of a group."""
    for tablet in local_of(db).store.tablets():
        if tablet.table == table:
            query = ScanQuery(group, None, 0, TS_MAX, 1 << 20)
            request = ScanRequest(table, tablet.start, None, (query,), False, 1 << 20, 1 << 30, 1 << 30)
            for row, [found] in tablet.scan(request).rows:
                for column, ts, _ in found:
                    yield row, column, ts


def count(db: perco.Database, group: str, table: str = "docs") -> int:
    return sum(1 for _ in cells(db, group, table))


async def put(db: perco.Database, value: int | None, *keys: str) -> int:
    async with db.transaction() as txn:
        for key in keys:
            if value is None:
                txn.delete(n, key)
            else:
                txn.set(n, key, value)
    return txn.commit_ts


async def got(db: perco.Database, key: str, ts: int | None = None) -> int | None:
    async with db.snapshot(ts=ts) as snap:
        return await snap.get(n, key)


async def clean(db: perco.Database) -> None:
    result = await check(local_of(db).store)
    assert result.clean, result.findings


@pytest.fixture(params=["two phases", "one step"])
async def db(request: pytest.FixtureRequest) -> AsyncIterator[perco.Database]:
    options = None if request.param == "one step" else TWO_PHASES
    async with perco.open("memory:", SCHEMA, options=options) as db:
        yield db
        await clean(db)


# ------------------------------------------------------------------ what goes and what stays


async def test_of_each_cell_the_newest_version_stays(db: perco.Database) -> None:  # G3
    for i in range(5):
        await put(db, i, *KEYS)
    await put(db, 7, "a")
    result = await db.vacuum()
    assert result.removed.versions == 17
    assert count(db, WRITE) == 4
    assert [await got(db, key) for key in KEYS] == [7, 4, 4, 4]
    assert (await db.vacuum()).removed.cells == 0  # a second one finds nothing


async def test_long_values_go_with_their_records(db: perco.Database) -> None:  # G3, T2
    for i in range(3):
        async with db.transaction() as txn:
            txn.set(long, "a", f"{i}{LONG}")
    result = await db.vacuum()
    assert (result.removed.versions, result.removed.data) == (2, 2)
    assert count(db, "data") == 1
    async with db.snapshot() as snap:
        assert await snap.get(long, "a") == f"2{LONG}"


async def test_what_was_deleted_goes_wholly(db: perco.Database) -> None:  # G3; Fluo's testDeletedDataIsDropped
    await put(db, 1, *KEYS)
    await put(db, None, *KEYS)
    await put(db, 2, "i")
    await db.vacuum()
    assert [(row, ts) for row, _, ts in cells(db, WRITE)] == [(b"i", inside(db).oracle.last)]
    assert [await got(db, key) for key in KEYS] == [None, None, 2, None]


async def test_a_delete_marker_does_not_go_before_what_it_hides() -> None:  # G3, trap 20
    options = perco.Options(vacuum=perco.options.VacuumOptions(row_cells=4))
    async with perco.open("memory:", SCHEMA, options=options) as db:
        for i in range(30):
            await put(db, i, "a")
        await put(db, None, "a")
        store = use(db, FaultyRowStore(inside(db).driver.store))

        async def look(_: Mutation) -> None:
            assert await got(db, "a") is None

        store.after = look
        await db.vacuum()
        assert len(store.log) > 3, "it went in parts"
        assert not count(db, WRITE)


async def test_versions_that_are_kept_by_number_stay() -> None:
    table = perco.Table("kept", key=perco.TEXT, keep=perco.Keep(seconds=0, versions=3))
    value = table.column("value", perco.INT64)
    async with perco.open("memory:", perco.Schema(table, keep=AT_ONCE)) as db:
        for key, versions in {"few": 2, "many": 6, "gone": 6}.items():
            for i in range(versions):
                async with db.transaction() as txn:
                    txn.set(value, key, i)
        async with db.transaction() as txn:
            txn.delete(value, "gone")
        await db.vacuum()
        rows = [row for row, _, _ in cells(db, WRITE, "kept")]
        assert {row: rows.count(row) for row in rows} == {b"few": 2, b"many": 3}
        await clean(db)


# ------------------------------------------------------------------ who holds the watermark


async def test_an_open_transaction_keeps_what_it_may_read(db: perco.Database) -> None:  # G1
    await put(db, 1, *KEYS)
    async with db.transaction() as txn:
        for i in range(3):
            await put(db, 10 + i, *KEYS)
        result = await db.vacuum()
        assert (result.holder.kind, result.holder.ts, result.watermark) == ("transaction", txn.start_ts, txn.start_ts)
        assert [await txn.get(n, key) for key in KEYS] == [1] * 4
        assert (await txn.get_many(n, KEYS)) == dict.fromkeys(KEYS, 1)
    await db.vacuum()
    assert count(db, WRITE) == 4


async def test_a_transaction_that_began_at_the_watermark_commits(db: perco.Database) -> None:  # T13, G2, trap 17
    async with db.transaction() as txn:
        txn.set(n, "a", 1)
        result = await db.vacuum()
        assert result.watermark == txn.start_ts
    assert await got(db, "a") == 1


async def test_a_lock_at_the_watermark_is_let_be(db: perco.Database) -> None:  # G2, trap 17
    kinds = ("commit", "one step")
    store = FaultyRowStore(inside(db).driver.store)
    watermarks = []

    async def vacuum(mutation: Mutation) -> None:
        if kind_of(mutation) in kinds and not watermarks:
            use(db, store._store)  # type: ignore[arg-type]
            watermarks.append((await db.vacuum()).watermark)
            use(db, store)

    store.before = vacuum
    use(db, store)
    async with db.transaction() as txn:
        txn.set(n, "a", 1)
        txn.set(n, "q", 1)
    assert watermarks == [txn.start_ts]
    assert txn.outcome == "committed"


async def test_whoever_began_and_was_dropped_does_not_hold_it(db: perco.Database) -> None:  # G1
    txn, snap = await db.begin(), await db.snapshot_at()
    await put(db, 1, "a")
    assert (await db.vacuum()).holder == ("transaction", txn.start_ts, "")
    del txn, snap
    gc.collect()
    assert (await db.vacuum()).holder.kind == "retention"


async def test_a_commit_whose_answer_did_not_come_holds_it_until_it_is_known(autojump_clock: Any) -> None:  # G1, C6
    options = perco.Options(commit=perco.options.CommitOptions(commit_timeout_s=5))
    machine = Machine(SCHEMA)
    async with machine.opened(options) as db:
        await put(db, 1, "a")
        lost = Fault.LOSE_REPLY
        store = use(
            db,
            FaultyRowStore(
                inside(db).driver.store, lambda mutation, _: lost if kind_of(mutation) == "one step" else None
            ),
        )
        txn = await db.begin()
        txn.set(n, "a", 2)
        store.deaf = True
        with pytest.raises(perco.CommitUnknown):
            await txn.commit()
        assert store.fired[lost] == 1
        store.deaf = False
        assert (await db.vacuum()).holder == ("transaction", txn.start_ts, "")
        assert await db.outcome(txn.token) > txn.start_ts
        result = await db.vacuum()
        assert result.holder.kind == "retention"
        assert result.removed.versions == 1
        assert await got(db, "a") == 2


@pytest.mark.parametrize("how", ["commit", "discard", "empty", "conflict", "run", "snapshot", "attempts", "past"])
async def test_whoever_has_ended_does_not_hold_it(db: perco.Database, how: str) -> None:  # G1
    await put(db, 1, "a")

    async def nothing(txn: perco.Transaction) -> None:
        await txn.get(n, "a")

    match how:
        case "commit":
            await put(db, 2, *KEYS)
        case "discard":
            txn = await db.begin()
            txn.discard()
        case "empty":
            txn = await db.begin()
            await txn.commit()
        case "conflict":
            txn = await db.begin()
            txn.set(n, "a", 3)
            await put(db, 2, "a")
            with pytest.raises(perco.WriteConflict):
                await txn.commit()
        case "run":
            await db.run(nothing)
        case "snapshot":
            snap = await db.snapshot_at()
            snap.end()
        case "attempts":
            async for attempt in db.attempts():
                async with attempt as txn:
                    await nothing(txn)
        case "past":
            snap = await db.snapshot_at(ts=1)
            snap.end()
    await trio.testing.wait_all_tasks_blocked()
    assert not inside(db).oracle.holds.open
    assert (await db.vacuum()).holder == ("retention", inside(db).oracle.last, "")


# ------------------------------------------------------------------ reading the past


async def test_below_the_cut_nothing_can_be_read(db: perco.Database) -> None:  # G5, T15
    first = await put(db, 1, "a")
    second = await put(db, 2, "a")
    assert await got(db, "a", first) == 1
    result = await db.vacuum()
    assert result.watermark >= second
    with pytest.raises(perco.errors.SnapshotTooOld) as caught:
        await got(db, "a", first)
    assert (caught.value.asked, caught.value.oldest) == (first, result.watermark)
    assert await got(db, "a", result.watermark) == 2  # at it, one can


async def test_a_snapshot_of_the_past_holds_what_it_reads(db: perco.Database) -> None:  # T15
    first = await put(db, 1, *KEYS)
    await put(db, 2, *KEYS)
    async with db.snapshot(ts=first) as snap:
        assert (await db.vacuum()).holder == ("snapshot", first, "")
        assert [row[n] async for row in snap.scan(docs)] == [1] * 4
    assert (await db.vacuum()).removed.versions == 4


async def test_a_table_that_keeps_less_is_not_read_below_its_own_cut() -> None:  # G5
    short = perco.Table("short", key=perco.TEXT, keep=AT_ONCE)
    s = short.column("s", perco.INT64)
    kept = perco.Table("kept", key=perco.TEXT)  # a day
    k = kept.column("k", perco.INT64)
    async with perco.open("memory:", perco.Schema(short, kept)) as db:
        for i in range(3):
            async with db.transaction() as txn:
                txn.set(s, "a", i)
                txn.set(k, "a", i)
            if not i:
                first = txn.commit_ts
        result = await db.vacuum()
        assert result.cuts == {"short": result.watermark, "kept": 0}
        assert (count(db, WRITE, "short"), count(db, WRITE, "kept")) == (1, 3)
        async with db.snapshot(ts=first) as snap:
            assert await snap.get(k, "a") == 0
            for read in (snap.get(s, "a"), snap.get_many(s, ["a"]), snap.row(short, "a"), snap.scan(short).all()):
                with pytest.raises(perco.errors.SnapshotTooOld, match="'short'"):
                    await read


# ------------------------------------------------------------------ what comes late


def _header(start_ts: int) -> Header:
    return Header(start_ts, Cellref("docs", b"a", 1 << 16), 0, 0, "token")


async def test_a_late_copy_of_a_collected_secondary_does_not_come_back(db: perco.Database) -> None:  # T13
    store = use(db, FaultyRowStore(inside(db).driver.store))
    sent: list[Mutation] = []

    async def note(mutation: Mutation) -> None:
        if kind_of(mutation) == "prewrite":
            sent.append(mutation)

    store.after = note
    await put(db, 1, "a", "q")
    secondary = next(mutation for mutation in sent if mutation.rows[0][0] == b"q")
    await put(db, None, "q")
    await db.vacuum()
    assert await got(db, "q") is None
    assert not [ts for row, _, ts in cells(db, WRITE) if row == b"q"], "the delete itself was collected"
    [verdict] = await local_of(db).store.apply([secondary])
    assert verdict == Refused(0, -1)
    assert await got(db, "q") is None  # without the floor: rolled forward, for the primary's record still says so


async def test_the_floor_is_there_again_after_a_restart() -> None:  # T13
    machine = Machine(SCHEMA, one_step=False)
    async with machine.opened() as db:
        await put(db, 1, "a")
        watermark = (await db.vacuum()).watermark
    for tablet in machine.store.tablets():
        tablet.floor = 0  # type: ignore[attr-defined]
    async with machine.opened() as db:
        assert inside(owning(db)).oracle.holds.watermark == watermark
        late = mutations.prewrite(_header(watermark - 1), [Intent("docs", b"a", 1 << 16, PUT, b"")], again=False)
        assert await local_of(db).store.apply([late]) == [Refused(0, -1)]
        with pytest.raises(perco.errors.SnapshotTooOld):
            await db.snapshot_at(ts=watermark - 1)
        at = mutations.prewrite(_header(watermark), [Intent("docs", b"z", 1 << 16, PUT, b"")], again=False)
        assert await local_of(db).store.apply([at]) == [APPLIED]


async def test_the_watermark_is_durable_before_anything_else_happens(db: perco.Database) -> None:  # G2
    await put(db, 1, "a")
    await put(db, 2, "a")
    steps: list[tuple[str, int, int, int]] = []

    def note(step: str) -> None:
        floor = min(tablet.floor for tablet in local_of(db).store.tablets())  # type: ignore[attr-defined]
        steps.append((step, inside(db).oracle.holds.watermark, floor, count(db, WRITE)))

    local_owner(db).vacuuming._event = note
    await db.vacuum()
    _, watermark, _ = await published(local_of(db).store)
    assert steps == [
        ("watermark", watermark, 0, 2),
        ("floor", watermark, watermark, 2),
        ("locks", watermark, watermark, 2),
        ("vacuum", watermark, watermark, 1),
    ]


async def test_an_outcome_below_the_watermark_is_unknown_for_good(db: perco.Database) -> None:  # T4
    committed = await db.begin()
    committed.set(n, "a", 1)
    await committed.commit()
    assert await db.outcome(committed.token) == committed.commit_ts
    await put(db, 2, "a")
    await db.vacuum()
    inside(db).fates._known.clear()  # it was long ago
    with pytest.raises(perco.CommitUnknown, match="collected") as caught:
        await db.outcome(committed.token)
    assert caught.value.for_good
    never = make_token(committed.start_ts, Cellref("docs", b"never", 1 << 16))
    with pytest.raises(perco.CommitUnknown, match="collected"):
        await db.outcome(never)


async def test_what_still_stands_below_the_watermark_is_known(db: perco.Database) -> None:  # T4
    committed = await db.begin()
    committed.set(n, "a", 1)
    await committed.commit()
    await put(db, 2, "q")
    await db.vacuum()
    inside(db).fates._known.clear()
    assert await db.outcome(committed.token) == committed.commit_ts


# ------------------------------------------------------------------ locks


async def left_behind(machine: Machine, kinds: int) -> None:
    """A transaction over three tablets whose client dies after so many mutations."""
    async with machine.crashing(kinds, made=True) as (db, store):
        with contextlib.suppress(CrashedError):  # or it dies in phase two
            await put(db, 5, *KEYS)
        await trio.testing.wait_all_tasks_blocked()
        assert store.dead is not None


@pytest.mark.parametrize("made", range(5))
async def test_locks_below_the_watermark_are_settled_before_anything_goes(made: int) -> None:  # G2, trap 17
    machine = Machine(SCHEMA, one_step=False)
    async with machine.opened() as db:
        for i in range(3):
            await put(db, i, *KEYS)
    await left_behind(machine, made)
    async with machine.opened() as db:
        before = machine.locks()
        result = await db.vacuum()
        assert result.locks >= before
        assert not machine.locks()
        values = {await got(db, key) for key in KEYS}
        assert values in ({2}, {5})
        assert count(db, WRITE) == 4
        await clean(db)


@pytest.mark.parametrize("first", ["docs", "later"])
@pytest.mark.parametrize("made", range(3))
async def test_locks_of_all_tables_are_settled_before_anything_of_one_goes(made: int, first: str) -> None:  # G2 T4
    later = perco.Table("later", key=perco.TEXT)
    there = later.column("n", perco.INT64)
    machine = Machine(perco.Schema(docs, later, keep=AT_ONCE), one_step=False)
    primary, secondary = (n, there) if first == "docs" else (there, n)

    async def set_both(db: perco.Database, value: int) -> None:
        async with db.transaction() as txn:
            txn.set(primary, "a", value)  # the first to be written is the primary (T12)
            txn.set(secondary, "a", value)

    async with machine.opened() as db:
        await set_both(db, 1)
    async with machine.crashing(made, made=True) as (db, store):
        with contextlib.suppress(CrashedError):
            await set_both(db, 2)
        await trio.testing.wait_all_tasks_blocked()
        assert store.dead is not None
    async with machine.opened() as db:
        async with db.snapshot() as snap:
            value = await snap.get(primary, "a")
        assert value == (2 if made >= 2 else 1)
        async with db.transaction() as txn:
            txn.set(primary, "a", 3)  # so the vacuum removes the record that decides over the other lock
        await db.vacuum()
        async with db.snapshot() as snap:
            assert await snap.get(secondary, "a") == value
        await clean(db)


async def test_rollback_markers_below_the_watermark_go() -> None:  # G4, trap 19; Fluo's testRolledBackDataIsDropped
    machine = Machine(SCHEMA, one_step=False)
    await left_behind(machine, 1)
    await machine.swept()
    async with machine.opened() as db:
        assert count(db, ROLLBACK) == 1
        await put(db, 1, "a")
        result = await db.vacuum()
        assert result.removed.rollbacks == 1
        assert not count(db, ROLLBACK)
        assert not count(db, LOCK)
        assert not count(db, NOTIFY)
        await clean(db)


# ------------------------------------------------------------------ the store's own rows


async def test_notes_of_the_clock_go_but_the_newest_at_or_below_the_watermark(autojump_clock: Any) -> None:  # O3
    async with perco.open("memory:", SCHEMA, options=perco.Options(wall=lambda: 1e9 + trio.current_time())) as db:
        for i in range(20):
            await put(db, i, "a")
            await trio.sleep(1.0)
        await inside(owning(db)).oracle.note()
        notes = [ts for row, _, ts in cells(db, "data", SYSTEM_TABLE) if row == b"clock"]
        assert len(notes) > 10
        result = await db.vacuum()
        left = [ts for row, _, ts in cells(db, "data", SYSTEM_TABLE) if row == b"clock"]
        assert left == [max(ts for ts in notes if ts <= result.watermark)]
        assert result.removed.notes == len(notes) - 1


async def test_the_past_can_be_read_as_far_back_as_it_is_kept(autojump_clock: Any) -> None:  # O3, T15
    begun = trio.current_time()
    options = perco.Options(
        wall=lambda: 1e9 + trio.current_time() - begun, vacuum=perco.options.VacuumOptions(on=False)
    )

    def moment(second: float) -> datetime:
        return datetime.fromtimestamp(1e9 + second, UTC)

    async with perco.open("memory:", perco.Schema(docs, keep=perco.Keep(seconds=10)), options=options) as db:
        for i in range(30):
            await put(db, i, "a")
            await inside(owning(db)).oracle.note()
            await trio.sleep(1.0)
        result = await db.vacuum()
        assert result.holder.kind == "retention"
        assert result.removed.versions in (18, 19, 20)
        for second in range(20, 30):
            async with db.snapshot(at=moment(second + 0.5)) as snap:
                assert await snap.get(n, "a") == second
        with pytest.raises(perco.errors.SnapshotTooOld):
            await db.snapshot_at(at=moment(15))


async def test_old_versions_of_the_catalogue_go() -> None:
    machine = Machine(SCHEMA, one_step=False)
    async with machine.opened():
        pass
    for i in range(4):
        machine.schema = perco.Schema(docs, keep=perco.Keep(seconds=i))
        async with machine.opened() as db:
            assert inside(db).catalogue.keep.seconds == i
    async with machine.opened() as db:
        await db.vacuum()
        versions = [ts for row, _, ts in cells(db, "data", SYSTEM_TABLE) if row == b"catalogue"]
        assert versions == [inside(db).catalogue.version]
    async with machine.opened() as db:
        assert inside(db).catalogue.keep_of("docs").seconds == 3


# ------------------------------------------------------------------ what cannot be read


async def test_a_lock_that_cannot_be_read_holds_up_what_it_may_need() -> None:  # G2
    async with perco.open("memory:", SCHEMA) as db:
        for i in range(3):
            await put(db, i, *KEYS)
        damaged = await inside(owning(db)).oracle.draw()
        for i in range(3):
            await put(db, 10 + i, *KEYS)
        column = inside(db).known.bind(n).column
        await local_of(db).store.apply([Mutation("docs", ((b"b", (), ((LOCK, column, damaged, b"junk"),)),))])
        result = await db.vacuum()
        assert result.held_up == ("docs['b'].n, lock group",)
        assert owning(db).statistics().damaged == result.held_up
        assert result.watermark > damaged
        # As if the watermark stood at the lock: the newest of before it, and all since.
        assert result.removed.versions == 2 * len(KEYS)
        assert min(ts for _, _, ts in cells(db, WRITE)) < damaged
        assert count(db, WRITE) == 4 * len(KEYS)
        assert await got(db, "a") == 12
        await put(db, 20, "a", "i")
        assert (await db.vacuum()).removed.versions == 0

        await local_of(db).store.apply([Mutation("docs", ((b"b", (), ((LOCK, column, damaged, None),)),))])
        result = await db.vacuum()
        assert result.held_up == ()
        assert count(db, WRITE) == len(KEYS)
        await clean(db)


async def test_the_vacuum_in_the_background_goes_on_past_damage(autojump_clock: trio.testing.MockClock) -> None:  # G2
    options = perco.Options(vacuum=perco.options.VacuumOptions(period_s=10))
    async with perco.open("memory:", SCHEMA, options=options) as db:
        await put(db, 1, *KEYS)
        await put(db, 2, *KEYS)
        column = inside(db).known.bind(n).column
        for row, group, ts, value in (
            (b"b", LOCK, inside(db).oracle.last, b"junk"),
            (b"i", WRITE, 1, b"junk"),
            (b"q", WRITE, 1, b"\x02" + bytes(8) + b"data:gone"),
        ):
            await local_of(db).store.apply([Mutation("docs", ((row, (), ((group, column, ts, value),)),))])
        await trio.sleep(100)
        assert owning(db).statistics().vacuum.runs
        assert owning(db).statistics().vacuum.failure is None
        assert len(list(cells(db, WRITE))) < 2 * len(KEYS) + 2
        await put(db, 3, "a")
        assert await got(db, "a") == 3
