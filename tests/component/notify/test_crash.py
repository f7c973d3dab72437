"""A client dies at any step, of a load or of an observer's run: every change is handled, and exactly once."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside, local_owner
from perco.storage import WRITE
from perco.tablets.local import LocalStore
from tests.component.notify.kit import (
    LONG_S,
    HoldingStore,
    StoppedError,
    StoppingStore,
    Web,
    client,
    get,
    locks,
    memory,
    nothing_is_left,
    notified,
    observed_locks,
    put,
    settle,
    until,
    writes_to,
)
from tests.support.places import local_of

Txn = perco.Transaction
Change = perco.Change[Any, Any]

BODIES = {"a": "one", "i": "three", "q": "fifteen"}  # a key in each of the three tablets


def measuring(web: Web) -> None:
    """body -> size, over tablets: counts its runs and adds up the sizes; a second observer counts these sizes."""

    @web.observe(web.body, id="measure")
    async def measure(txn: Txn, change: Change) -> None:
        await web.add(txn, f"runs/{change.key}")
        await web.add(txn, "sizes", len(change.value))
        txn.set(web.size, "z" + change.key, len(change.value))
        txn.set(web.note, "b" + change.key, "x" * 1000)  # a long value: it has data of its own

    @web.observe(web.size, id="sum")
    async def add(txn: Txn, change: Change) -> None:
        await web.add(txn, "sum", change.value)


async def check_handled(db: perco.Database, web: Web, keys: str) -> None:
    """Each of these changes was handled once by both observers, and no other was."""
    sizes = sum(len(BODIES[key]) for key in keys)
    async with db.snapshot() as snap:
        counts = {row.key: row[web.count] async for row in snap.scan(web.counts)}
        expected = {f"runs/{key}": 1 for key in keys} | ({"sizes": sizes, "sum": sizes} if keys else {})
        assert counts == expected
        assert [await snap.get(web.size, "z" + key) for key in keys] == [len(BODIES[key]) for key in keys]
    assert nothing_is_left(db)


async def recover(local: LocalStore, web: Web, keys: str) -> None:
    """A fresh client handles all that is there; then it still works."""
    async with client(local, web.schema) as db, db.worker():
        await settle(db)
        await check_handled(db, web, keys)
        before = await get(db, web.count, "sizes") or 0
        await put(db, web.body, "m", "abc")
        await settle(db)
        assert await get(db, web.count, "sizes") == before + 3


# ---------------------------------------------------------------- the writer dies


async def dies_while_loading(web: Web, steps: int, *, backwards: bool, one_step: bool) -> bool:
    """Whether it died; afterwards all of the load is there and handled, or nothing of it."""
    async with client(memory(), web.schema, sweeping=False) as first:
        store = StoppingStore(local_of(first).store, backwards=backwards)
        committed = False
        async with client(local_of(first), web.schema, store=store, one_step=one_step) as doomed:
            store.left = steps
            try:
                async with doomed.transaction() as txn:
                    for key, body in BODIES.items():
                        txn.set(web.body, key, body)
                committed = True
            except StoppedError:
                pass
            # Phase two is under way, or has been cut off.
            await until(lambda: not inside(doomed).background.crowd)
            died = store.stopped.is_set()
            store.stop()
        async with client(local_of(first), web.schema) as db:
            handled = "".join(BODIES) if await get(db, web.body, "i") is not None else ""
            assert committed <= bool(handled)
        await recover(local_of(first), web, handled)
    return died


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("one_step", [False, True])
async def test_a_load_that_dies_at_any_step_is_handled_or_never_was(
    backwards: bool, one_step: bool
) -> None:  # N1, T3, C7
    steps = 0
    while True:
        web = Web()
        measuring(web)
        if not await dies_while_loading(web, steps, backwards=backwards, one_step=one_step):
            break
        steps += 1
    assert steps >= 6, "three prewrites, the primary, two secondaries"


async def test_a_writer_that_dies_right_after_the_commit_point(web: Web) -> None:  # N1
    """Nobody ever reads the cells: their locks are the notifications, and the sweeper finds them."""
    measuring(web)
    async with client(memory(), web.schema, sweeping=False) as first:
        store = StoppingStore(local_of(first).store)
        async with client(local_of(first), web.schema, store=store) as doomed:
            inside(doomed).driver._event = lambda name: store.stop() if name == "commit" else None
            async with doomed.transaction() as txn:
                for key, body in BODIES.items():
                    txn.set(web.body, key, body)
            assert txn.outcome == "committed"
        assert sorted(row for row, _ in locks(first)) == [b"i", b"q"]
        assert [row for row, _ in notified(first, "measure")] == [b"a"]
        async with client(local_of(first), web.schema) as db:
            await until(lambda: not locks(db))
            assert sorted(row for row, _ in notified(db, "measure")) == [b"a", b"i", b"q"], "by the sweeper alone"
            async with db.worker():
                await settle(db)
                await check_handled(db, web, "aiq")


@pytest.mark.parametrize("kind", ["get", "get_many", "row", "scan", "write"])
async def test_whoever_rolls_a_lock_forward_puts_the_notify_cells(web: Web, kind: str) -> None:  # N1
    for id in ("one", "two"):
        web.counting(web.body, id=id)
    async with client(memory(), web.schema, sweeping=False) as first:
        store = StoppingStore(local_of(first).store)
        async with client(local_of(first), web.schema, store=store) as doomed:
            inside(doomed).driver._event = lambda name: store.stop() if name == "commit" else None
            async with doomed.transaction() as txn:
                txn.set(web.body, "a", "primary")
                txn.set(web.body, "q", "secondary")
        async with client(local_of(first), web.schema, sweeping=False) as stranger:
            async with stranger.snapshot() as snap:
                match kind:
                    case "get":
                        assert await snap.get(web.body, "q") == "secondary"
                    case "get_many":
                        assert await snap.get_many(web.body, ["q"]) == {"q": "secondary"}
                    case "row":
                        assert (await snap.row(web.docs, "q"))[web.body] == "secondary"
                    case "scan":
                        assert len(await snap.scan(web.docs, columns=[web.body]).all()) == 2
                    case "write":
                        late = await stranger.begin()
                        late.start_ts = txn.start_ts - 1
                        late.set(web.body, "q", "mine")
                        with pytest.raises(perco.WriteConflict):
                            await late.commit()
            cells = [(row, ts) for row, ts in notified(stranger) if row == b"q"]
            assert cells == [(b"q", txn.commit_ts)] * 2, "one for each observer, at commit_ts"
            assert locks(stranger) == []


async def test_a_loader_that_knows_no_observers_notifies_them(web: Web) -> None:  # N10
    """The observers of a column are read from the catalogue and not from the program."""
    bare = Web()
    seen = web.counting(web.body, id="count")
    async with client(memory(), web.schema, sweeping=False) as first:
        async with client(local_of(first), bare.schema) as loader:
            await put(loader, bare.body, "a", "hello")
        store = StoppingStore(local_of(first).store)
        async with client(local_of(first), bare.schema, store=store) as doomed:
            inside(doomed).driver._event = lambda name: store.stop() if name == "commit" else None
            async with doomed.transaction() as txn:
                txn.set(bare.body, "b", "primary")
                txn.set(bare.body, "z", "secondary")
        async with client(local_of(first), web.schema) as db, db.worker():
            await settle(db)
        assert sorted(change.key for change in seen) == ["a", "b", "z"]


# ---------------------------------------------------------------- the observer dies


async def until_it_ends(store: StoppingStore, db: perco.Database) -> None:
    """Until it has died, or nothing is left to do."""
    with trio.fail_after(LONG_S):
        while not store.stopped.is_set():
            with contextlib.suppress(StoppedError):
                if await local_owner(db).idle.look():
                    return
            await trio.sleep(0.05)


async def dies_while_observing(web: Web, steps: int, *, backwards: bool, one_step: bool) -> bool:
    """Whether it died within so many steps; afterwards all is handled exactly once."""
    async with client(memory(), web.schema, sweeping=False) as first:
        for key, body in BODIES.items():
            await put(first, web.body, key, body)
        store = StoppingStore(local_of(first).store, backwards=backwards)
        async with client(local_of(first), web.schema, store=store, one_step=one_step) as doomed:
            store.left = steps
            async with doomed.worker(concurrency=1, scanners=1):
                await until_it_ends(store, doomed)
            died = store.stopped.is_set()
            store.stop()
        await recover(local_of(first), web, "aiq")
    return died


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("one_step", [False, True])
async def test_an_observer_that_dies_at_any_step_has_run_exactly_once(
    backwards: bool, one_step: bool
) -> None:  # N1, N2, N3, C7
    steps = 0
    while True:
        web = Web()
        measuring(web)
        if not await dies_while_observing(web, steps, backwards=backwards, one_step=one_step):
            break
        steps += 1
    assert steps > (20 if one_step else 30), "three runs of some nine steps (or six), and what they caused"


@pytest.mark.parametrize("between", [1, 4, 5, 9])
@pytest.mark.parametrize("one_step", [False, True])
async def test_one_client_after_the_other_dies(between: int, one_step: bool) -> None:  # N1, N2, N3, C7
    """Each gets only so many steps; each recovers the leftovers of the one before."""
    web = Web()
    measuring(web)
    async with client(memory(), web.schema, sweeping=False) as first:
        for key, body in BODIES.items():
            await put(first, web.body, key, body)
        clients = 0
        while True:
            store = StoppingStore(local_of(first).store)
            async with client(local_of(first), web.schema, store=store, one_step=one_step) as doomed:
                await inside(doomed).oracle.draw()  # its range costs a step of its own
                store.left = between + clients // 4  # so that some day one of them gets a whole run done
                async with doomed.worker(concurrency=2, scanners=1):
                    await until_it_ends(store, doomed)
                died = store.stopped.is_set()
                store.stop()
            clients += 1
            assert clients < 200
            if not died:
                break
        assert clients > 2
        await recover(local_of(first), web, "aiq")


async def test_an_observer_that_dies_after_its_commit_point(web: Web) -> None:  # N2, N3 (FailureIT.testAcks)
    """The ack went with the commit point: it is not run again, and what it wrote is rolled forward and observed."""
    measuring(web)
    async with client(memory(), web.schema, sweeping=False) as first:
        await put(first, web.body, "a", "hello")
        store = StoppingStore(local_of(first).store)
        async with client(local_of(first), web.schema, store=store) as doomed:
            inside(doomed).driver._event = lambda name: store.stop() if name == "commit" else None
            async with doomed.worker():
                await store.stopped.wait()
        assert notified(first) == [], "the mutation that committed the ack removed the notify cell"
        assert {row for row, _ in locks(first)} >= {b"za"}
        lock = next(lock for row, lock in locks(first) if row == b"za")
        assert lock.primary.row == b"a", "N2, T12: the ack is the primary"
        assert lock.primary.column & 0xFFFF
        async with client(local_of(first), web.schema) as db, db.worker() as worker:
            await settle(db)
            assert worker.statistics()["measure"].runs == 0
            assert worker.statistics()["sum"].runs == 1
            assert await get(db, web.count, "runs/a") == 1


async def test_an_ack_that_a_stranger_must_roll_forward_removes_the_cells(web: Web) -> None:  # N1, N2
    """A lock of an ack holds the timestamps of the notify cells that its commit removes."""
    web.counting(web.body, id="count")
    async with client(memory(), web.schema, sweeping=False) as first:
        stamps = [await put(first, web.body, "a", str(n)) for n in range(3)]
        store = StoppingStore(local_of(first).store)
        async with client(local_of(first), web.schema, store=store) as doomed:
            inside(doomed).driver._event = lambda name: store.stop() if name == "prewrite" else None
            async with doomed.worker():
                await store.stopped.wait()
        held = [lock for _, lock in locks(first) if lock.covers]
        assert [sorted(lock.covers) for lock in held] == [stamps]
        assert len(notified(first)) == 3, "undecided: they stand"
        async with client(local_of(first), web.schema) as db, db.worker() as worker:
            await settle(db)
            assert worker.statistics()["count"].commits == 1
            assert nothing_is_left(db)


# ---------------------------------------------------------------- phase two


def rolls_forward(row: str) -> Any:
    """Whether a mutation is the second phase's group with this row."""
    return lambda mutation: len(mutation.rows) > 1 and writes_to(mutation, WRITE, row)


async def test_a_group_is_rolled_forward_although_one_cell_of_it_was(web: Web) -> None:  # N1, T3, T6
    """A writer meets a decided lock and settles it, before the group that it belongs to is rolled forward."""
    seen = web.counting(web.body, id="count")
    async with client(memory(), web.schema, sweeping=False) as first:
        store = HoldingStore(local_of(first).store, rolls_forward("y"))
        async with client(local_of(first), web.schema, store=store) as db, db.worker():
            await settle(db)  # the leftovers of before have been swept
            async with db.transaction() as txn:
                for key in ("a", "b", "c", "y", "z"):  # the tablet with "a" has most of them: its part is the primary's
                    txn.set(web.body, key, "1")
            await store.held.wait()
            await put(db, web.body, "z", "2")
            store.let_go()
            await settle(db)
            assert observed_locks(db) == [], "N7: idle"
            once = [change.key for change in seen if change.value == "1" and change.key != "z"]
            assert sorted(once) == ["a", "b", "c", "y"]
            assert [change.value for change in seen if change.key == "z"] in (["2"], ["1", "2"])
