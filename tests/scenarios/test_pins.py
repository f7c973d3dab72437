"""Pins: named, durable snapshots with a lease (T15)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
import trio.testing

import perco
from perco.clock import pins
from perco.database.inside import inside
from perco.storage import Mutation
from tests.support.everywhere import owning
from tests.support.faults import Fault, FaultyRowStore, Gate
from tests.support.machines import Machine
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs, keep=perco.Keep(seconds=0))
EPOCH = 1e9


class Wall:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now_s = EPOCH

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
async def db(wall: Wall) -> AsyncIterator[perco.Database]:
    async with perco.open("memory:", SCHEMA, options=perco.Options(wall=wall)) as db:
        yield db


async def put(db: perco.Database, value: int) -> int:
    async with db.transaction() as txn:
        txn.set(n, "a", value)
    return txn.commit_ts


async def test_a_pin_keeps_what_it_reads(db: perco.Database) -> None:
    await put(db, 1)
    async with db.pin("export", lease_s=60, owner="me") as pin:
        await put(db, 2)
        assert (await db.vacuum()).holder == ("pin", pin.start_ts, "export")
        assert await pin.get(n, "a") == 1
        assert [row[n] async for row in pin.scan(docs)] == [1]
        assert await db.pins() == [pin.pin]
        assert pin.pin[:5] == ("export", "me", pin.start_ts, EPOCH * 1000, (EPOCH + 60) * 1000)
    assert await db.pins() == []
    assert (await db.vacuum()).removed.versions == 1
    with pytest.raises(perco.errors.TransactionClosed):
        await pin.get(n, "a")


async def test_when_the_lease_has_run_out_it_holds_nothing(db: perco.Database, wall: Wall) -> None:  # G5
    await put(db, 1)
    async with db.pin("export", lease_s=60) as pin:
        await put(db, 2)
        wall.now_s += 59
        await db.vacuum()
        assert await pin.get(n, "a") == 1
        await pin.renew()
        wall.now_s += 59.9
        await db.vacuum()
        assert await pin.get(n, "a") == 1
        wall.now_s += 0.2
        assert await pin.get(n, "a") == 1, "nothing has been removed yet"
        result = await db.vacuum()
        assert result.holder.kind == "retention"
        await put(db, 3)  # with a timestamp a client is told what the owner's clock says by now
        for look in (lambda: pin.get(n, "a"), lambda: pin.get_many(n, ["a"]), lambda: pin.scan(docs).all(), pin.renew):
            with pytest.raises(
                perco.errors.SnapshotTooOld, match="the lease of pin 'export' expired 0 s ago"
            ) as caught:
                await look()
            assert "db.pin" not in str(caught.value), "it was held with one"
            assert (caught.value.asked, caught.value.oldest) == (pin.start_ts, result.watermark)
        assert await db.pins() == [], "it was forgotten"


async def test_one_whose_lease_ran_out_is_renewed_while_nothing_has_gone(db: perco.Database, wall: Wall) -> None:
    await put(db, 1)
    async with db.pin("export", lease_s=60) as pin:
        await put(db, 2)
        wall.now_s += 100
        await pin.renew(1000)
        assert (await db.vacuum()).holder.name == "export"
        assert await pin.get(n, "a") == 1
        wall.now_s += 999
        await pin.renew()
        assert pin.pin.expires_ms == (wall.now_s + 1000) * 1000


async def test_a_pin_of_the_past(db: perco.Database) -> None:
    first = await put(db, 1)
    await put(db, 2)
    async with db.pin("past", lease_s=60, ts=first) as pin:
        await db.vacuum()
        assert await pin.get(n, "a") == 1
    await db.vacuum()
    with pytest.raises(perco.errors.SnapshotTooOld):
        async with db.pin("past", lease_s=60, ts=first):
            pass
    with pytest.raises(perco.UsageError, match="timestamps so far"):
        async with db.pin("future", lease_s=60, ts=1 << 40):
            pass
    assert not inside(db).oracle.holds._past, "a refused pin holds nothing"
    assert await db.pins() == []


async def test_a_program_that_died_goes_on_under_the_same_name() -> None:
    machine = Machine(SCHEMA)
    async with machine.opened() as db:
        await put(db, 1)
        async with db.pin("export", lease_s=3600, keep=True) as pin:
            begun = pin.start_ts
        await put(db, 2)
    async with machine.opened() as db:
        assert (await db.vacuum()).holder == ("pin", begun, "export")
        with pytest.raises(perco.UsageError, match=r"db\.drop_pin\('export'\)"):
            async with db.pin("export", lease_s=1, ts=begun + 1):
                pass
        async with db.pin("export", lease_s=1) as pin:
            assert pin.start_ts == begun
            assert await pin.get(n, "a") == 1
            with pytest.raises(perco.UsageError, match="in use in this process"):
                async with db.pin("export", lease_s=1):
                    pass
        assert not await db.pins()
    async with machine.opened() as db:
        assert not inside(db).oracle.holds.pins


async def test_the_block_may_end_in_any_way(db: perco.Database) -> None:
    for error in (RuntimeError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            async with db.pin("export", lease_s=60):
                raise error
        assert not inside(db).oracle.holds.pins
    with trio.CancelScope() as scope:
        async with db.pin("export", lease_s=60):
            scope.cancel()
            await trio.sleep(1)
    assert scope.cancelled_caught
    assert await db.pins() == []


async def test_a_pin_that_is_not_durable_holds_nothing(db: perco.Database) -> None:  # T15
    store = FaultyRowStore(local_of(db).store, lambda mutation, number: Fault.FAIL)
    inside(db).oracle.pins._store = store
    with pytest.raises(perco.StoreError):
        async with db.pin("export", lease_s=60):
            pass
    assert store.fired[Fault.FAIL] == 1
    assert not inside(db).oracle.holds.pins


@pytest.mark.parametrize("fault", [Fault.LOSE_REQUEST, Fault.LOSE_REPLY])
async def test_a_pin_that_may_be_durable_holds(db: perco.Database, wall: Wall, fault: Fault) -> None:  # T15
    await put(db, 1)
    right = inside(db).oracle.pins._store
    store = FaultyRowStore(local_of(db).store, lambda mutation, number: fault)
    inside(db).oracle.pins._store = store
    with pytest.raises(perco.errors.WriteUnknown, match="it may or may not have been done"):
        async with db.pin("export", lease_s=60):
            pass
    assert store.fired[fault] == 1
    await put(db, 2)
    assert (await db.vacuum()).holder.name == "export"
    found = await db.pins()
    assert len(found) == (fault is Fault.LOSE_REPLY)
    for pin in found:
        async with db.snapshot(ts=pin.ts) as snap:
            assert await snap.get(n, "a") == 1
    wall.now_s += 61
    inside(db).oracle.pins._store = right
    assert (await db.vacuum()).holder.name != "export"
    assert not inside(db).oracle.holds.pins
    assert await db.pins() == []


@pytest.mark.parametrize("newer_ts", [False, True], ids=["renewed", "at another timestamp"])
@pytest.mark.parametrize("lease_s", [1, 3600])
async def test_a_pin_that_may_not_have_been_replaced_holds_as_well(
    db: perco.Database, wall: Wall, lease_s: int, newer_ts: bool
) -> None:  # T15
    await put(db, 1)
    async with db.pin("export", lease_s=60, keep=True) as old:
        before = old.pin
    await put(db, 2)
    ts = (await put(db, 3)) if newer_ts else before.ts
    right = inside(db).oracle.pins._store
    while_written: list[int] = []

    def lost(mutation: Mutation, number: int) -> Fault:
        while_written.append(inside(db).oracle.holds.pins["export"].ts)
        return Fault.LOSE_REQUEST

    inside(db).oracle.pins._store = FaultyRowStore(local_of(db).store, lost)
    with pytest.raises(perco.StoreError):
        await inside(db).oracle.pins.put("export", "another", ts, lease_s, "another", before.id)
    inside(db).oracle.pins._store = right
    assert while_written == [before.ts]
    wall.now_s += max(lease_s, 60) - 1
    await db.vacuum()
    assert inside(db).oracle.holds.pins["export"].ts == before.ts
    async with db.snapshot(ts=before.ts) as snap:
        assert await snap.get(n, "a") == 1
    assert await db.drop_pin("export")


async def forgetting(db: perco.Database, wall: Wall, nursery: trio.Nursery, *others: str) -> Gate:
    """A pin has stood, its lease has run out, and a vacuum stands at the gate while it forgets it, before others."""
    await put(db, 1)
    for name in ("export", *others):
        async with db.pin(name, lease_s=60, keep=True):
            pass
    await put(db, 2)
    wall.now_s += 61
    gate = Gate("other")
    inside(db).oracle.pins._store = FaultyRowStore(local_of(db).store, before=gate)
    nursery.start_soon(inside(db).oracle.pins.drop_expired)
    await gate.reached()
    return gate


async def test_a_pin_taken_while_its_predecessor_is_forgotten_holds(db: perco.Database, wall: Wall) -> None:  # T15
    async with trio.open_nursery() as nursery:
        gate = await forgetting(db, wall, nursery)
        taken = trio.Event()
        done = trio.Event()

        async def take() -> None:
            async with db.pin("export", lease_s=60) as pin:
                assert await db.pins() == [pin.pin] == list(inside(db).oracle.holds.pins.values())
                taken.set()
                await put(db, 3)
                await done.wait()
                assert await pin.get(n, "a") == 2

        nursery.start_soon(take)
        await trio.testing.wait_all_tasks_blocked()
        assert not taken.is_set()
        gate.open()
        await taken.wait()
        assert (await db.vacuum()).holder.name == "export"
        done.set()


async def test_a_pin_renewed_while_it_is_forgotten_holds_all_the_time(db: perco.Database, wall: Wall) -> None:  # T15
    async with trio.open_nursery() as nursery:
        gate = await forgetting(db, wall, nursery)
        [old] = inside(db).oracle.holds.pins.values()
        renewed: list[Any] = []

        async def renew() -> None:
            renewed.append(await inside(db).oracle.pins.put(old.name, old.owner, old.ts, 60, old.id, old.id))

        nursery.start_soon(renew)
        await trio.testing.wait_all_tasks_blocked()
        assert inside(db).oracle.holds.lowest(inside(db).oracle.last, inside(db).oracle.wall_ms()) == (
            "snapshot",
            old.ts,
            "",
        )
        gate.open()
    assert await db.pins() == renewed == list(inside(db).oracle.holds.pins.values())
    assert not inside(db).oracle.holds._past
    assert (await db.vacuum()).holder == ("pin", old.ts, "export")


async def test_what_was_renewed_before_its_turn_is_not_forgotten(db: perco.Database, wall: Wall) -> None:  # T15
    async with trio.open_nursery() as nursery:
        gate = await forgetting(db, wall, nursery, "later")
        later = inside(db).oracle.holds.pins["later"]
        nursery.start_soon(inside(db).oracle.pins.put, later.name, later.owner, later.ts, 60, later.id, later.id)
        await trio.testing.wait_all_tasks_blocked()
        assert inside(db).oracle.pins.standing("later") is None
        gate.open()
    assert await db.pins() == [inside(db).oracle.pins.standing("later")]


async def test_pins_are_bounded(db: perco.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PINS_MAX", 2)
    async with db.pin("a", lease_s=60), db.pin("b", lease_s=60):
        with pytest.raises(perco.UsageError, match="2 pins already"):
            async with db.pin("c", lease_s=60):
                pass
    async with db.pin("c", lease_s=60):
        pass


@pytest.mark.parametrize(("name", "lease_s"), [("", 1), ("x" * 65, 1), ("a\n", 1), ("a", 0), ("a", -1), ("a", 1e12)])
async def test_names_and_leases_that_make_no_sense(db: perco.Database, name: str, lease_s: float) -> None:
    with pytest.raises(perco.UsageError):
        async with db.pin(name, lease_s=lease_s):
            pass
    assert not inside(db).oracle.holds.pins


async def test_dropped_by_name(db: perco.Database) -> None:
    await put(db, 1)
    async with db.pin("export", lease_s=60) as pin:
        await put(db, 2)
        assert await db.drop_pin("export")
        assert not await db.drop_pin("export")
        await db.vacuum()
        with pytest.raises(perco.errors.SnapshotTooOld):
            await pin.get(n, "a")


async def test_pins_are_seen_from_beside_and_not_made_there(tmp_path: Path) -> None:
    async with perco.open(tmp_path / "s", SCHEMA) as db:
        await put(db, 1)
        async with db.pin("export", lease_s=60, keep=True) as pin:
            made: Any = pin.pin
    async with perco.open(tmp_path / "s", readonly=True) as db:
        assert await db.pins() == [made]
        with pytest.raises(perco.errors.ReadOnly):
            async with db.pin("another", lease_s=60):
                pass
        with pytest.raises(perco.errors.ReadOnly):
            await db.drop_pin("export")


async def test_a_pin_of_what_one_table_has_lost_already_does_not_say_that_it_was_dropped(wall: Wall) -> None:  # G5
    brief, longer = perco.Table("brief", keep=perco.Keep(seconds=0)), perco.Table("longer")
    here, there = brief.column("n", perco.INT64), longer.column("n", perco.INT64)
    async with perco.open("memory:", perco.Schema(brief, longer), options=perco.Options(wall=wall)) as db:
        for value in (1, 2):
            async with db.transaction() as txn:
                txn.set(here, b"a", value)
                txn.set(there, b"a", value)
            if value == 1:
                first = txn.commit_ts
        wall.now_s += 10
        await db.vacuum()
        async with db.pin("export", lease_s=60, ts=first) as pin:
            assert await pin.get(there, b"a") == 1
            with pytest.raises(perco.errors.SnapshotTooOld, match="'brief'") as caught:
                await pin.get(here, b"a")
            assert "dropped" not in str(caught.value)
            assert "lease" not in str(caught.value)


async def test_a_pin_of_a_time_says_which_and_one_that_was_dropped_says_so(db: perco.Database, wall: Wall) -> None:
    await inside(owning(db)).oracle.note()
    await put(db, 1)
    await inside(owning(db)).oracle.note()
    noted = wall.now_s
    wall.now_s += 10
    async with db.pin("export", lease_s=60, at=datetime.fromtimestamp(wall.now_s - 5, UTC)) as pin:
        assert pin.wall == noted
        assert await pin.get(n, "a") == 1
        await put(db, 2)
        await db.drop_pin("export")
        await db.vacuum()
        with pytest.raises(perco.errors.SnapshotTooOld, match="pin 'export' was dropped"):
            await pin.get(n, "a")


async def test_a_pin_of_an_earlier_version_is_read_taken_up_and_dropped() -> None:  # T15
    machine = Machine(SCHEMA)
    async with machine.opened() as db:
        await put(db, 1)
        async with db.pin("export", lease_s=3600, keep=True) as pin:
            old = pin.pin
        packed = msgpack.packb([old.owner, old.ts, old.made_ms, old.expires_ms])
        await inside(db).oracle.pins._write("export", packed)
        await inside(db).oracle.pins._write("another", packed)
    async with machine.opened() as db:
        assert await db.pins() == [old._replace(name="another", id=""), old._replace(id="")]
        async with db.pin("export", lease_s=60) as pin:
            assert pin.start_ts == old.ts
            assert pin.pin.id
        assert await db.drop_pin("another")
        assert await db.pins() == []


async def test_ids_of_pins_that_were_dropped_are_bounded(
    db: perco.Database, monkeypatch: pytest.MonkeyPatch
) -> None:  # T15
    monkeypatch.setattr(pins, "_DROPPED_MAX", 2)
    for id in ("one", "two", "three"):
        await inside(db).oracle.pins.put("export", "tests", await inside(db).oracle.draw(), 60, id)
        assert await inside(db).oracle.pins.drop("export", id)
        assert await inside(db).oracle.pins.drop("export", id), "asked twice, the same"
    assert not await inside(db).oracle.pins.drop("export", "one"), "nobody asks twice so late"
    assert len(inside(db).oracle.pins._dropped) == 2
