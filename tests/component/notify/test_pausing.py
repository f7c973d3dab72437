"""A paused observer does not run, no run of it commits, and a task that waits for it is told."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.schema.catalogue import load
from tests.component.notify.kit import OPTIONS, Web, client, get, memory, notified, put, settle, until
from tests.support.places import local_of

Change = perco.Change[Any, Any]


async def test_paused_it_does_not_run_and_resumed_it_runs_for_all_that_waited(web: Web) -> None:  # N10
    seen, others = web.counting(web.body, id="one"), web.counting(web.body, id="two")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await db.pause("one")
        await put(db, web.body, "a", "hello")
        await until(lambda: others)
        await trio.sleep(1000.0)
        assert seen == []
        assert len(notified(db, "one")) == 1
        assert [(state.id, state.paused) for state in await db.observers()] == [("one", True), ("two", False)]
        await db.resume("one")
        await settle(db)
        assert [change.key for change in seen] == ["a"]
        assert await get(db, web.count, "one/a") == 1


async def test_it_is_paused_in_the_store_for_every_program(web: Web) -> None:
    seen = web.counting(web.body, id="one")
    async with client(memory(), web.schema) as db:
        await db.pause("one")
        version = inside(db).catalogue.version
        await db.pause("one")
        assert inside(db).catalogue.version == version, "nothing is new"
        await put(db, web.body, "a", "hello")
        async with client(local_of(db), web.schema) as later, later.worker():
            with pytest.raises(perco.UsageError, match=r"paused: 'one'. Resume them"):
                await later.wait_idle(timeout=1000)
            with pytest.raises(perco.UsageError, match="paused"):
                await later.wait_for(inside(later).oracle.last, timeout=1000)
            assert seen == []
            await later.resume("one")
            await settle(later)
        assert len(seen) == 1
        assert not (await load(inside(db).driver.store)).observers["one"].paused


async def test_who_waits_already_is_told_when_it_is_paused(web: Web) -> None:  # N7
    gate = trio.Event()

    @web.observe(web.body, id="slow")
    async def slow(txn: perco.Transaction, change: Change) -> None:
        await gate.wait()

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, web.body, "a", "hello")
        await until(lambda: worker.statistics()["slow"].running)
        told: list[str] = []

        async def wait() -> None:
            try:
                await db.wait_idle(timeout=1000)
            except perco.UsageError as error:
                told.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(1.0)
            await db.pause("slow")
            gate.set()
        assert len(told) == 1
        assert "'slow'" in told[0]


@pytest.mark.parametrize("one_step", [True, False])
async def test_a_run_that_was_under_way_commits_nothing_after_it_was_paused(web: Web, one_step: bool) -> None:  # N10
    """Not even one that writes nothing but its ack."""
    gate = trio.Event()
    runs = 0

    @web.observe(web.body, id="slow")
    async def slow(txn: perco.Transaction, change: Change) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            await gate.wait()
        if change.key == "b":
            await web.add(txn, "runs")

    async with client(memory(), web.schema, one_step=one_step) as db, db.worker() as worker:
        for key in "ab":
            runs = 0
            gate = trio.Event()
            await put(db, web.body, key, "hello")
            await until(lambda: runs == 1)  # noqa: B023
            commits = worker.statistics()["slow"].commits
            await db.pause("slow")
            gate.set()
            await trio.sleep(1000.0)
            counted = worker.statistics()["slow"]
            assert (counted.commits, counted.running, runs) == (commits, 0, 1)
            assert len(notified(db)) == 1
            await db.resume("slow")
            await settle(db)
            assert runs == 2
        assert await get(db, web.count, "runs") == 1


async def test_another_process_learns_that_it_is_paused_and_that_it_is_not_any_more(web: Web) -> None:  # N10
    seen = web.counting(web.body, id="one")
    async with (
        client(memory(), web.schema) as one,
        client(local_of(one), web.schema, beside=one) as two,
        two.worker(),
    ):
        await one.pause("one")
        await put(two, web.body, "a", "hello")
        await trio.sleep(100.0)
        assert seen == []
        await one.resume("one")
        inside(two).driver.notified()
        await until(lambda: seen)
        await settle(two)


@pytest.mark.parametrize("id", ["nobody", "", 7, None, []])
async def test_what_cannot_be_paused_is_told(web: Web, id: Any) -> None:
    web.counting(web.body, id="one")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for act in (db.pause, db.resume):
            with pytest.raises(perco.UsageError, match=r"there are: 'one'|named by its id"):
                await act(id)
        assert await db.paused() == set()


# ---------------------------------------------------------------- what observers write, and how deep they go


async def test_what_observers_write_is_noted_once_and_stays(web: Web) -> None:
    @web.observe(web.body, id="measure")
    async def measure(txn: perco.Transaction, change: Change) -> None:
        txn.set(web.size, change.key, len(change.value))
        await web.add(txn, "measured")

    @web.observe(web.size, id="tell")
    async def tell(txn: perco.Transaction, change: Change) -> None:
        txn.set(web.note, change.key, str(change.value))

    async with client(memory(), web.schema) as db:
        for _ in range(2):
            async with db.worker() as worker:
                for key in "abcz":
                    await put(db, web.body, key, "hello" * (worker.statistics()["measure"].commits + 1))
                    await settle(db)
        found = {state.id: state.outputs for state in await db.observers()}
        assert found == {"measure": (("counts", "count"), ("docs", "size")), "tell": (("docs", "note"),)}


async def test_a_change_knows_how_deep_in_the_chain_it_is(web: Web) -> None:  # N9
    depths: list[tuple[str, int, int]] = []

    @web.observe(web.body, id="first")
    async def first(txn: perco.Transaction, change: Change) -> None:
        depths.append(("first", change.depth, change.cause))
        txn.set(web.size, "z" + change.key, 1)

    @web.observe(web.size, id="second")
    async def second(txn: perco.Transaction, change: Change) -> None:
        depths.append(("second", change.depth, change.cause))

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        commit_ts = await put(db, web.body, "a", "hello")
        await settle(db)
    assert depths == [("first", 1, commit_ts), ("second", 2, commit_ts)]


@pytest.mark.parametrize("one_step", [True, False])
async def test_a_circle_of_observers_is_stopped_and_named(web: Web, one_step: bool) -> None:  # N9
    @web.observe(web.body, id="there")
    async def there(txn: perco.Transaction, change: Change) -> None:
        txn.set(web.size, change.key, (await txn.get(web.size, change.key) or 0) + 1)

    @web.observe(web.size, id="back")
    async def back(txn: perco.Transaction, change: Change) -> None:
        txn.set(web.body, change.key, str(change.value))

    options = perco.WorkerOptions(chain_max=21)
    async with client(memory(), web.schema, one_step=one_step) as db:
        async with db.worker(options=options) as worker:
            commit_ts = await put(db, web.body, "a", "hello")
            assert await db.wait_idle(timeout=1000) == 1
            _, _, error = worker._worker.last_failures["back"]
            assert isinstance(error, perco.errors.ChainTooLong)
            assert set(error.cycle) == {"there", "back"}
            assert (error.depth, error.limit, error.cause) == (22, 21, commit_ts)
            assert "in a cycle" in str(error)
        assert await get(db, web.size, "a") == 11
        [failed] = await db.failed()
        assert (failed.observer, failed.attempts, failed.cause) == ("back", 0, commit_ts)
        assert failed.chain == ("there", "back") * 10 + ("there",)
        assert "ChainTooLong: docs['a']: a chain that began at" in failed.error
        # With a higher limit it goes on from there.
        await db.replay_failed()
        async with db.worker(options=perco.WorkerOptions(chain_max=30)):
            assert await db.wait_idle(timeout=1000) == 1
        assert await get(db, web.size, "a") == 15


async def test_a_long_chain_that_comes_to_an_end_is_let_be(web: Web) -> None:  # N9
    @web.observe(web.size, id="down")
    async def down(txn: perco.Transaction, change: Change) -> None:
        if change.value:
            txn.set(web.size, change.key, change.value - 1)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        async with db.worker(options=perco.WorkerOptions(chain_max=0)):
            await put(db, web.size, "a", 150)
            assert await db.wait_idle(timeout=1000) == 0
        assert await get(db, web.size, "a") == 0


async def test_a_chain_without_a_circle_is_told_by_its_last_observers() -> None:
    error = perco.errors.ChainTooLong("docs['a']", ["a", "b", "c"], 4, 3, 7)
    assert error.cycle == ()
    assert "a > b > c" in str(error)


@pytest.mark.parametrize("options", [{"attempts": -1}, {"attempts": "a"}, {"chain_max": -1}, {"chain_max": 2.5}])
def test_limits_are_whole_numbers(options: dict[str, Any]) -> None:
    with pytest.raises(perco.UsageError, match=next(iter(options))):
        perco.WorkerOptions(**options)


async def test_all_are_paused_while_a_scanner_waits_for_a_run_to_end(web: Web) -> None:  # N8, N10
    gate = trio.Event()
    runs = 0

    async def slow(txn: perco.Transaction, change: Change) -> None:
        nonlocal runs
        runs += 1
        await gate.wait()

    for id, priority in (("first", 5), ("then", 0)):
        web.observe(web.body, id=id, priority=priority)(slow)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(concurrency=1):
        for key in "abcdef":
            await put(db, web.body, key, "hello")
        await until(lambda: runs)
        for id in ("then", "first"):
            await db.pause(id)
        gate.set()
        await trio.sleep(10.0)
        assert runs == 1
        for id in ("then", "first"):
            await db.resume(id)
        await settle(db)


class Slow:
    """A row store whose caller is cancelled when a mutation has been made, and before it is told."""

    groups = True
    chaining = deferring = None

    def tablets_here(self) -> list[Any]:
        return []

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.scope: trio.CancelScope | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def apply(self, mutations: Any) -> Any:
        verdicts = await self._inner.apply(mutations)
        if self.scope is not None:
            self.scope.cancel()
            self.scope = None
            await trio.lowlevel.checkpoint()
        return verdicts


async def test_who_is_cancelled_while_it_pauses_has_paused_it_in_the_store_and_here(web: Web) -> None:  # N10
    seen = web.counting(web.body, id="one")
    local = memory()
    store = Slow(local.store)
    async with client(local, web.schema, store=store) as db, db.worker():
        with trio.CancelScope() as store.scope:
            await db.pause("one")
        assert store.scope is None
        assert [state.paused for state in await db.observers()] == [True]
        assert await db.paused() == {"one"}
        await put(db, web.body, "a", "hello")
        await trio.sleep(100.0)
        assert seen == []
        await db.resume("one")
        await settle(db)
        assert len(seen) == 1
