"""`wait_idle` and `wait_for` are right at the moment they return, and refuse to wait for what can never come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from hypothesis import given, settings, strategies as st

import perco
from perco.database.inside import inside, local_owner
from perco.protocol.claim import COVERS_MAX
from perco.storage import WRITE, Failed, Mutation, ScanPage, ScanRequest
from perco.storage.cells import Verdict
from tests.component.notify.kit import (
    LONG_S,
    OPTIONS,
    HoldingStore,
    Web,
    client,
    get,
    memory,
    nothing_is_left,
    notified,
    observed_locks,
    put,
    run_seeded,
    settle,
    until,
    writes_to,
)
from tests.support import everywhere
from tests.support.everywhere import owning
from tests.support.places import local_of

Txn = perco.Transaction
Change = perco.Change[Any, Any]


async def test_an_empty_store_is_idle_without_a_worker(web: Web) -> None:  # N7
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        assert await db.wait_idle() == 0
        assert await db.is_idle()
        await put(db, web.size, "a", 1)  # nobody observes it
        assert await db.wait_idle() == 0


async def test_it_is_not_idle_while_a_change_waits(web: Web) -> None:  # N7
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await settle(db)
        await put(db, web.body, "a", "hello")
        assert not await db.is_idle()
        assert await db.pending() == 1
        assert await db.waiting() == {"count": 1}
        async with db.worker():
            assert await db.wait_idle() == 0
        assert await db.is_idle()
        assert (await db.pending(), await db.waiting()) == (0, {"count": 0})


async def test_waiting_without_a_worker_is_refused(web: Web) -> None:  # N7
    web.counting(web.body, id="count")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        commit_ts = await put(db, web.body, "a", "hello")
        with pytest.raises(perco.UsageError, match=r"changes wait .*db\.worker"):
            await settle(db)
        with pytest.raises(perco.UsageError, match=r"db\.worker"):
            await db.wait_for(commit_ts, timeout=LONG_S)


async def test_waiting_for_observers_that_nobody_has_is_refused(web: Web) -> None:  # N7, N10
    seen = web.counting(web.body, id="count")
    async with client(memory(), web.schema) as first:
        await put(first, web.body, "a", "hello")
        bare = Web()
        async with client(local_of(first), bare.schema) as db, db.worker():
            assert await db.unserved() == {"count"}
            with pytest.raises(perco.UsageError, match="count"):
                await settle(db)
            with pytest.raises(perco.UsageError, match="count"):
                await db.wait_for(inside(db).oracle.last, timeout=LONG_S)
            assert len(notified(db)) == 1
        async with client(local_of(first), web.schema) as db, db.worker():
            await settle(db)
    assert len(seen) == 1


async def test_a_timeout_ends_the_wait(web: Web) -> None:  # N7
    go_on = trio.Event()

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        await go_on.wait()

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        commit_ts = await put(db, web.body, "a", "hello")
        with pytest.raises(perco.Unavailable, match="idle"):
            await db.wait_idle(timeout=5.0)
        with pytest.raises(perco.Unavailable, match=str(commit_ts)):
            await db.wait_for(commit_ts, timeout=5.0)
        go_on.set()
        await settle(db)


async def test_several_may_wait(web: Web) -> None:  # N7
    go_on = trio.Event()

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        await go_on.wait()

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        commit_ts = await put(db, web.body, "a", "hello")
        waited = 0

        async def wait(for_it: Callable[[], Awaitable[object]]) -> None:
            nonlocal waited
            await for_it()
            waited += 1

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait, lambda: settle(db))
                await trio.sleep(1.0)
            nursery.start_soon(wait, lambda: db.wait_for(commit_ts, timeout=LONG_S))
            await trio.sleep(1.0)
            assert waited == 0
            go_on.set()
        assert waited == 4


async def test_it_waits_for_the_whole_chain(web: Web) -> None:  # N7, N9
    @web.observe(web.size, id="down")
    async def down(txn: Txn, change: Change) -> None:
        await trio.sleep(10.0)
        if change.value:
            txn.set(web.size, "az"[change.value % 2], change.value - 1)  # to and fro between two tablets

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        root = await put(db, web.size, "a", 20)
        await db.wait_for(root, timeout=LONG_S)
        assert await get(db, web.size, "z") == 0
        assert nothing_is_left(db)
        await put(db, web.size, "a", 20)
        await settle(db)
        assert await get(db, web.size, "z") == 0
        assert nothing_is_left(db)


# ---------------------------------------------------------------- at the moment it returns


def phase_two_of(row: str) -> Callable[[Mutation], bool]:
    return lambda mutation: writes_to(mutation, WRITE, row)


async def ends_only_after(wait: Callable[[], Any], go_on: Callable[[], None]) -> None:
    """Whether a wait lasts until something is done, and no longer."""
    ended = trio.Event()

    async def waiting() -> None:
        await wait()
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiting)
        await trio.sleep(60.0)
        early = ended.is_set()
        go_on()
        assert not early
        with trio.fail_after(LONG_S):
            await ended.wait()


@pytest.mark.parametrize("kind", ["wait_idle", "wait_for"])
async def test_a_second_phase_under_way_is_waited_for(web: Web, kind: str) -> None:  # N7
    """Committed, and nowhere a notify cell yet: the lock of the observed cell is the notification (N1)."""
    seen = web.counting(web.body, id="count")
    async with client(memory(), web.schema, sweeping=False) as first:
        store = HoldingStore(local_of(first).store, phase_two_of("z"))
        async with client(local_of(first), web.schema, store=store) as db, db.worker():
            await settle(db)
            async with db.transaction() as txn:
                txn.set(web.size, "a", 1)
                txn.set(web.note, "a", "in the primary's tablet")
                txn.set(web.body, "z", "hello")
            await store.held.wait()
            assert notified(db) == []
            wait = db.wait_idle if kind == "wait_idle" else lambda: db.wait_for(txn.commit_ts)
            await ends_only_after(wait, store.let_go)
            assert len(seen) == 1


@pytest.mark.parametrize("kind", ["wait_idle", "wait_for"])
async def test_the_second_phase_of_a_link_of_the_chain_is_waited_for(web: Web, kind: str) -> None:  # N7, N9
    @web.observe(web.body, id="measure")
    async def measure(txn: Txn, change: Change) -> None:
        txn.set(web.size, "z", len(change.value))

    seen = web.counting(web.size, id="count")
    async with client(memory(), web.schema, sweeping=False) as first:
        store = HoldingStore(local_of(first).store, phase_two_of("z"))
        async with client(local_of(first), web.schema, store=store) as db, db.worker():
            await settle(db)
            commit_ts = await put(db, web.body, "a", "hello")
            wait = db.wait_idle if kind == "wait_idle" else lambda: db.wait_for(commit_ts)
            await ends_only_after(wait, store.let_go)
            assert store.held.is_set()
            assert len(seen) == 1


class LooksSlowlyStore(HoldingStore):
    """The look over notify cells stops after its first page that names a table, until it is let go."""

    looking = False

    async def scan(self, request: ScanRequest) -> ScanPage:
        page = await self._inner.scan(request)
        if self.looking and request.rows_max != 1 and not self._gate.is_set():
            self.looking = False
            self.held.set()
            await self._gate.wait()
        return page


async def test_a_change_that_moves_behind_the_look_is_waited_for(web: Web) -> None:  # N7: one look lies
    """The chain goes from the last tablet, not yet looked at, to the first, which has been."""
    go_on, last = trio.Event(), trio.Event()

    @web.observe(web.body, id="backwards")
    async def backwards(txn: Txn, change: Change) -> None:
        await go_on.wait()
        txn.set(web.size, "a", len(change.value))

    @web.observe(web.size, id="end")
    async def end(txn: Txn, change: Change) -> None:
        await last.wait()
        await web.add(txn, "runs")

    async with client(memory(), web.schema, sweeping=False) as first:
        store = LooksSlowlyStore(local_of(first).store, lambda _: False)
        async with client(local_of(first), web.schema, store=store) as db, db.worker():
            await settle(db)
            commit_ts = await put(db, web.body, "z", "hello")
            await trio.sleep(1.0)
            ended = trio.Event()

            async def wait() -> None:
                await db.wait_for(commit_ts)
                assert await get(db, web.count, "runs") == 1
                ended.set()

            async with trio.open_nursery() as nursery:
                store.looking = True
                nursery.start_soon(wait)
                await store.held.wait()
                go_on.set()
                await until(lambda: [row for row, _ in notified(db)] == [b"a"])
                store.let_go()
                await trio.sleep(60.0)
                assert not ended.is_set()
                last.set()


async def test_later_changes_are_not_waited_for(web: Web) -> None:  # N7, N9
    """On a store that is never idle, the observers finish with all commits at or before a timestamp at some time."""
    finish = trio.Event()

    @web.observe(web.body, id="measure")
    async def measure(txn: Txn, change: Change) -> None:
        if change.key == "late":
            await finish.wait()
        txn.set(web.size, change.key, len(change.value))

    @web.observe(web.size, id="count")
    async def count(txn: Txn, change: Change) -> None:
        await trio.sleep(1.0)
        await web.add(txn, change.key)

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        early = await put(db, web.body, "early", "hello")
        late = await put(db, web.body, "late", "hello")

        async def busy() -> None:
            for n in range(10_000):
                await put(db, web.body, f"busy{n % 10}", "hello")
                await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(busy)
            await db.wait_for(early, timeout=LONG_S)
            assert await get(db, web.count, "early") == 1
            assert await get(db, web.count, "late") is None
            finish.set()
            await db.wait_for(late, timeout=LONG_S)
            assert await get(db, web.count, "late") == 1
            assert not await db.is_idle()
            nursery.cancel_scope.cancel()


class FailingStore(HoldingStore):
    """The second phase fails so often, as on a full disk."""

    failures = 0

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        if self.failures and any(map(self._holds, mutations)):
            self.failures -= 1
            return [Failed(perco.errors.StoreFull("here", "for a while"))] * len(mutations)
        return await self._inner.apply(mutations)


async def test_it_is_not_idle_from_the_very_moment_that_a_lock_is_left_behind(web: Web) -> None:  # N7, S4
    seen = web.counting(web.body, id="count")
    async with client(memory(), web.schema, sweeping=False) as first:
        store = FailingStore(local_of(first).store, phase_two_of("z"))
        moments: list[bool] = []

        async with client(local_of(first), web.schema, store=store) as db, db.worker():
            await settle(db)
            store.failures = 1
            idle = local_owner(owning(db)).idle.now
            inside(db).driver._event = lambda name: moments.append(idle()) if name == "secondaries" else None
            quiet = inside(db).driver.quiet
            inside(db).driver.quiet = lambda: (
                moments.append(idle() and bool(observed_locks(db))),
                quiet(),
            )[1]
            async with db.transaction() as txn:
                txn.set(web.size, "a", 1)
                txn.set(web.note, "a", "in the primary's tablet")
                txn.set(web.body, "z", "hello")
            await settle(db)
            assert store.failures == 0
            assert not any(moments), "idle, with a lock of an observed cell"
            assert len(seen) == 1
            assert nothing_is_left(db)


# ---------------------------------------------------------------- whatever is loaded, and however it is observed


@dataclass(frozen=True)
class Edge:
    """An observer of one column that writes another; `far`: into another tablet; `patience`: it waits so long."""

    source: int
    target: int
    far: bool
    patience: float


def edges() -> st.SearchStrategy[list[Edge]]:
    """Chains, forks and joins over five columns, without circles; the first one is loaded."""
    pair = st.tuples(st.integers(0, 3), st.integers(1, 4)).filter(lambda pair: pair[0] < pair[1])
    times = st.sampled_from([0.0, 0.0, 0.5, 3.0])
    edge = st.builds(lambda pair, far, patience: Edge(*pair, far, patience), pair, st.booleans(), times)
    return st.lists(edge, min_size=1, max_size=6)


@dataclass(frozen=True)
class Load:
    keys: str
    after_s: float


LOADS = st.lists(
    st.builds(
        Load,
        st.text("ahiopz", min_size=1, max_size=4),
        st.sampled_from([0.0, 0.0, 0.3, 2.0]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=120, deadline=None)
@given(edges(), LOADS, st.integers(0, 2**32))
def test_when_it_returns_every_change_has_been_handled(edges: list[Edge], loads: list[Load], seed: int) -> None:  # N7
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_seeded(monkeypatch, seed, lambda: _load_and_wait(edges, loads, seed))


async def _load_and_wait(edges: list[Edge], loads: list[Load], seed: int) -> None:
    docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
    columns = [docs.column(f"c{n}", perco.INT64) for n in range(5)]
    schema = perco.Schema(docs)
    ahead: dict[str, str] = dict(zip("ahiopz", "oizpah", strict=True))  # into another tablet, one to one

    def observe(number: int, edge: Edge) -> None:
        # Each observer copies "this has been seen" into a column of its own as well: so that all can be checked.
        mark = docs.column(f"m{number}", perco.INT64)

        @schema.observe(columns[edge.source], id=f"o{number}")
        async def copy(txn: Txn, change: Change) -> None:
            await trio.sleep(edge.patience)
            txn.set(mark, change.key, change.value)
            target = ahead[change.key] if edge.far else change.key
            before = await txn.get(columns[edge.target], target) or 0
            if change.value > before:
                txn.set(columns[edge.target], target, change.value)

    for number, edge in enumerate(edges):
        observe(number, edge)

    async with perco.open("memory:", schema, options=perco.Options(seed=seed)) as db, db.worker(scanners=2):
        loaded: list[int] = []

        async def load(number: int, load: Load) -> None:
            await trio.sleep(load.after_s)

            async def write(txn: Txn) -> Txn:
                for key in load.keys:
                    txn.set(columns[0], key, number + 1)
                return txn

            loaded.append((await db.run(write)).commit_ts)

        async def check_now_and_then() -> None:
            while True:
                await db.wait_idle(timeout=LONG_S)
                if everywhere.over != everywhere.BIGTABLE_DIRECT:  # there, it was so at some moment of the wait
                    assert nothing_is_left(db)  # no await in between: at this very moment
                await trio.sleep(0.1)

        async with trio.open_nursery() as checking:
            checking.start_soon(check_now_and_then)
            async with trio.open_nursery() as nursery:
                for number, each in enumerate(loads):
                    nursery.start_soon(load, number, each)
            for commit_ts in loaded[::3]:
                await db.wait_for(commit_ts, timeout=LONG_S)
                await _check_observed(db, docs, columns, edges, ahead, commit_ts)
            await db.wait_idle(timeout=LONG_S)
            assert nothing_is_left(db)
            await _check_observed(db, docs, columns, edges, ahead, inside(db).oracle.last)
            checking.cancel_scope.cancel()


async def _check_observed(
    db: perco.Database,
    docs: perco.Table[str],
    columns: Sequence[perco.Column[str, int]],
    edges: list[Edge],
    ahead: dict[str, str],
    loaded_ts: int,
) -> None:
    """All rows loaded up to a timestamp have gone along every edge."""
    async with db.snapshot() as snap:
        rows = {row.key: row async for row in snap.scan(docs)}
    for number, edge in enumerate(edges):
        for key, row in rows.items():
            value = row[columns[edge.source]]
            if value is None or row.commit_ts(columns[edge.source]) > loaded_ts:
                continue
            assert row[docs.columns[f"m{number}"]] is not None, f"{key}: {edge} has not seen {value}"
            target = rows[ahead[key] if edge.far else key]
            assert (target[columns[edge.target]] or 0) >= value


async def test_a_run_carries_the_oldest_cause_however_many_changes_it_takes_with_it(web: Web) -> None:  # N4, N7, N9
    """More wait than one run may remove: a wait for the first of them is a wait for the whole chain."""
    causes: list[int] = []

    @web.observe(web.body, id="first")
    async def first(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        assert change.value is not None
        txn.set(web.note, change.key, change.value)

    @web.observe(web.note, id="second")
    async def second(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        await trio.sleep(5)
        causes.append(change.cause)

    async with client(memory(), web.schema) as db:
        oldest = 0
        for i in range(2 * COVERS_MAX + 100):
            commit_ts = await put(db, web.body, "a", str(i))
            oldest = oldest or commit_ts
        async with db.worker():
            await db.wait_for(oldest)
            assert causes == [oldest]
