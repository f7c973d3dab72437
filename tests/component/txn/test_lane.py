"""The lane (perco/txn/lane.py) does what a `Commit` in one step does: the same inputs and faults, given to both."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings, strategies as st

import perco
from perco.database.inside import inside
from perco.protocol.mutations import Intent
from perco.protocol.records import ACK, ack_head, ack_of
from perco.storage import PROTOCOL_GROUPS, Mutation, ScanQuery, ScanRequest
from perco.txn import lane, runs
from perco.txn.driver import Driver
from tests.core.storage.model import unhurried
from tests.support.faults import Fault, FaultyRowStore, kind_of, use
from tests.support.lanes import CELLS, PHASES, fill, run_comparable

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
body = docs.column("body", perco.TEXT)
seen = docs.column("seen", perco.INT64)
SCHEMA = perco.Schema(docs)


@SCHEMA.observe(body, id="look", writes=[seen])
async def look(txn: perco.Transaction, key: str) -> None:
    txn.set(seen, key, 1)


FAULTS = [None, Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.FAIL]
steps = st.one_of(
    st.tuples(st.just("alone"), CELLS, st.sampled_from(FAULTS)),
    st.tuples(st.just("late"), CELLS, CELLS),  # the second one commits while the first is open
    st.tuples(st.just("at once"), CELLS, CELLS),
    st.tuples(st.just("cancelled"), CELLS, st.none()),
    st.tuples(st.just("acknowledged"), CELLS, st.sampled_from(FAULTS)),  # as an observer's run (N2)
    st.tuples(st.just("locked"), CELLS, CELLS),  # the second one leaves its locks behind
    st.tuples(st.just("behind"), CELLS, st.none()),  # the catalogue has changed meanwhile (N10)
)


class Run:
    """One store, with what happened to it. `fired`: how many single commits met their faults."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.fired = 0

    async def play(self, history: list[Any]) -> None:
        options = perco.Options(
            commit=perco.options.CommitOptions(commit_timeout_s=1.0), retry=perco.options.RetryOptions(attempts=1)
        )
        async with perco.open("memory:", SCHEMA, options=options) as db:
            store = use(db, FaultyRowStore(inside(db).driver.store))
            for what, written, more in history:
                await getattr(self, what.replace(" ", "_"))(db, store, written, more)
                store.plan, store.before = lambda mutation, number: None, None
                await trio.sleep(60)
                driver = inside(db).driver
                self.told.append(
                    (
                        what,
                        driver.counters.commits,
                        driver.counters.aborts,
                        driver.counters.unknown,
                        driver.counters.conflicts,
                        sorted(driver.entered.cells),
                        sorted(driver.entered.left),
                        driver.fates.live(),
                        driver.fates.observed,
                        sorted(driver.oracle.holds.open),
                    )
                )
                if what == "behind":
                    break  # from now on, no transaction knows the newest catalogue
            queries = tuple(ScanQuery(group, None, n=1 << 20) for group in PROTOCOL_GROUPS)
            page = await inside(db).driver.store.scan(ScanRequest("docs", b"", None, queries, rows_max=1 << 20))
            self.told.append(page.rows)

    async def _commit(self, txn: perco.Transaction) -> None:
        try:
            self.told.append(await txn.commit())
        except (perco.PercoError, trio.Cancelled) as error:
            said = str(error) if isinstance(error, perco.PercoError) else ""  # a task's address
            self.told.append((type(error).__name__, said, txn.outcome, txn.token))
            if isinstance(error, trio.Cancelled):
                raise
        else:
            self.told.append((txn.outcome, txn.commit_ts, txn.token))

    async def alone(self, db: perco.Database, store: FaultyRowStore, written: Any, fault: Fault | None) -> None:
        await self._meeting(await db.begin(), store, written, fault)

    async def _meeting(self, txn: perco.Transaction, store: FaultyRowStore, written: Any, fault: Fault | None) -> None:
        hit = [fault]

        def plan(mutation: Mutation, number: int) -> Fault | None:
            if not hit or kind_of(mutation) != "one step":
                return None
            self.fired += hit[0] is not None
            return hit.pop()

        fill(txn, written, n, body)
        store.plan = plan
        await self._commit(txn)

    async def acknowledged(self, db: perco.Database, store: FaultyRowStore, written: Any, fault: Fault | None) -> None:
        async with db.transaction() as txn:
            txn.set(body, "a", "changed")
        bound = inside(db).known.bind(body)
        [observer] = bound.observers
        run = await db.begin()
        ack = ack_of(bound.column, observer)
        change = Intent("docs", docs.row("a"), ack, ACK, ack_head(1), (), (txn.commit_ts,))
        runs.acknowledge(run, change)
        await self._meeting(run, store, written, fault)

    async def late(self, db: perco.Database, store: FaultyRowStore, written: Any, other: Any) -> None:
        txn = await db.begin()
        fill(txn, written, n, body)
        async with db.transaction() as first:
            fill(first, other, n, body)
        await self._commit(txn)

    async def at_once(self, db: perco.Database, store: FaultyRowStore, written: Any, other: Any) -> None:
        arrived, go_on = trio.Event(), trio.Event()

        async def before(mutation: Mutation) -> None:
            if kind_of(mutation) == "one step" and not arrived.is_set():
                arrived.set()
                await go_on.wait()

        one, two = await db.begin(), await db.begin()
        fill(one, written, n, body)
        fill(two, other, n, body)
        store.before = before
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._commit, one)
            await arrived.wait()
            nursery.start_soon(self._commit, two)
            await trio.testing.wait_all_tasks_blocked()
            go_on.set()

    async def cancelled(self, db: perco.Database, store: FaultyRowStore, written: Any, _: Any) -> None:
        txn = await db.begin()
        fill(txn, written, n, body)
        with trio.CancelScope() as scope:
            scope.cancel()
            await self._commit(txn)

    async def locked(self, db: perco.Database, store: FaultyRowStore, written: Any, other: Any) -> None:
        driver = inside(db).driver
        two_phases = driver.options
        driver.options = perco.options.CommitOptions(commit_timeout_s=1.0, one_step=False)
        left = await db.begin()
        fill(left, other, n, body)
        store.plan = lambda mutation, number: Fault.LOSE_REQUEST if kind_of(mutation) == "commit" else None
        with contextlib.suppress(perco.CommitUnknown):
            await left.commit()
        store.plan, driver.options = lambda mutation, number: None, two_phases
        txn = await db.begin()
        fill(txn, written, n, body)
        await self._commit(txn)

    async def behind(self, db: perco.Database, store: FaultyRowStore, written: Any, _: Any) -> None:
        txn = await db.begin()
        fill(txn, written, n, body)
        oracle = inside(db).oracle
        await oracle.announce(oracle.catalogue_version + 1)
        await self._commit(txn)


def played(history: list[Any], *, laned: bool) -> Run:
    run = Run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "laned", laned)
        run_comparable(patch, lambda: run.play(history))
    return run


@settings(unhurried, max_examples=120, phases=PHASES)
@given(st.lists(steps, min_size=1, max_size=4))
def test_the_lane_and_the_machine_do_the_same(history: list[Any]) -> None:  # C1 C2 C3 C5 C6 T4 T10 N1 N10
    one, other = played(history, laned=True), played(history, laned=False)
    assert one.told == other.told
    names = [what for what, _, _ in history]
    ended = names.index("behind") if "behind" in names else len(history)
    wanted = sum(what in ("alone", "acknowledged") and fault is not None for what, _, fault in history[:ended])
    assert one.fired == other.fired == wanted, "each fault was met"


def test_the_lane_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparison compares nothing."""
    came: list[int] = []
    taken = lane.commit_in_lane

    async def noted(*arguments: Any, **named: Any) -> int:
        came.append(await taken(*arguments, **named))
        return came[-1]

    monkeypatch.setattr("perco.txn.transaction.commit_in_lane", noted)
    written = {("n", "a"): 1, ("body", "b"): 300}
    played([("alone", written, None), ("alone", written, Fault.LOSE_REPLY)], laned=True)
    assert [bool(commit_ts) for commit_ts in came] == [True, True], "the second one's outcome was read (T4)"
    came.clear()
    played([("at once", written, written)], laned=True)
    assert 0 in came, "one was in the other's way"
