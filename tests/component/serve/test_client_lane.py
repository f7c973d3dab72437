"""The lanes of a client and of its server (perco/serve/remote.py, perco/serve/one_step.py) do what a `Commit` does: the
same inputs and faults, given to both; time is virtual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings, strategies as st

import perco
from perco.database.inside import inside
from perco.errors import SessionEnded, StoreFull, TabletSplit
from perco.serve.client import remote_owner
from perco.serve.messages import MET, STALE, Method
from perco.serve.one_step import OneStep
from perco.storage import PROTOCOL_GROUPS, Failed, NoReply, Refused, ScanQuery, ScanRequest, Verdict
from perco.txn.driver import Driver
from tests.component.serve.kit import Place
from tests.component.serve.test_together import SCHEMA, body, committing, n
from tests.core.storage.model import unhurried
from tests.support.lanes import CELLS, PHASES, fill, run_comparable

_LANE = OneStep.lane
ANSWERS = [
    *(None, "lost before", "lost after", "ends the session", "met", "stale", "unavailable"),
    *("full", "split", "refused", "no reply"),  # what the store says to the server
]
steps = st.one_of(
    st.tuples(st.just("alone"), CELLS, st.sampled_from(ANSWERS)),
    st.tuples(st.just("locked"), CELLS, st.sampled_from(ANSWERS)),  # it locks a cell that it has read (T14)
    st.tuples(st.just("late"), CELLS, CELLS),  # the second one commits while the first is open
    st.tuples(st.just("at once"), CELLS, CELLS),
    st.tuples(st.just("behind"), CELLS, st.none()),  # another commit of a cell is under way
    st.tuples(st.just("cancelled"), CELLS, st.booleans()),  # before the call, or during it
    st.tuples(st.just("without timestamps"), CELLS, st.none()),
)


class Run:
    """One served store with one client, and what happened to them. `fired`: how many commits met their faults."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.fired = 0
        self.lanes = 0

    async def play(self, history: list[Any], *, laned: bool) -> None:
        place = Place(SCHEMA)
        place.retry = perco.options.RetryOptions(attempts=1)
        async with place.served(sweeper=False) as owner, place.client(seed=1) as db:
            await db.put(n, "z", 0)
            await trio.sleep(5)
            for what, written, more in history:
                await getattr(self, what.replace(" ", "_"))(place, owner, db, written, more)
                await trio.sleep(60)
                mine, theirs = inside(db).driver, inside(owner).driver
                assert place.server is not None
                self.told.append(
                    (
                        what,
                        mine.counters.commits,
                        mine.counters.aborts,
                        mine.counters.unknown,
                        mine.counters.conflicts,
                        mine.fates.live(),
                        mine.fates.observed,
                        sorted(mine.oracle.holds.open),
                        mine.oracle.last,
                        sorted(theirs.entered.cells),
                        sorted(theirs.entered.left),
                        sorted(theirs.writing),
                        theirs.fates.live(),
                        theirs.fates.observed,
                        sorted(theirs.oracle.holds.open),
                        theirs.oracle.last,
                        [sorted(session.open) for session in place.server.sessions.all.values()],
                    )
                )
            queries = tuple(ScanQuery(group, None, n=1 << 20) for group in PROTOCOL_GROUPS)
            store = inside(owner).driver.store
            self.told.append((await store.scan(ScanRequest("docs", b"", None, queries, rows_max=1 << 20))).rows)

    async def _commit(self, txn: perco.Transaction, told: list[Any] | None = None) -> None:
        told = self.told if told is None else told
        try:
            told.append(await txn.commit())
        except (perco.PercoError, trio.Cancelled) as error:
            said = str(error) if isinstance(error, perco.PercoError) else ""  # a task's address
            told.append((type(error).__name__, said, txn.outcome, txn.token.partition("/")[0]))
            if isinstance(error, trio.Cancelled):
                raise
        else:
            told.append((txn.outcome, txn.commit_ts))

    async def alone(self, place: Place, owner: Any, db: perco.Database, written: Any, fault: str | None) -> None:
        await self._meeting(place, owner, await db.begin(), written, fault)

    async def locked(self, place: Place, owner: Any, db: perco.Database, written: Any, fault: str | None) -> None:
        txn = await db.begin()
        await txn.get(n, "c", lock=True)
        await self._meeting(place, owner, txn, written, fault)

    async def _meeting(self, place: Place, owner: Any, txn: perco.Transaction, written: Any, fault: str | None) -> None:
        fill(txn, written, n, body)
        server = place.server
        assert server is not None
        handlers, right = server._handlers, server._handlers[int(Method.COMMIT)]
        submit = server.rows.submit

        def meet(session: Any, peer: Any, id: int, asked: Any) -> None:
            handlers[int(Method.COMMIT)] = right
            self.fired += 1
            match fault:
                case "lost before" | "lost after" | "ends the session":
                    peer.ended = True
                    if fault != "lost before":
                        right(session, peer, id, asked)
                    if fault == "ends the session":
                        server.sessions.end(session)
                    peer.channel.close_soon()
                case "met":
                    peer.reply(id, (MET, ("docs", b"a", 1 << 16), inside(owner).oracle.draw_nowait()))
                case "stale":
                    peer.reply(id, (STALE, inside(owner).oracle.catalogue_version))
                case "unavailable":
                    peer.fail(id, SessionEnded("the server wants it so"))
                case _:
                    server.rows.submit = answered  # type: ignore[method-assign]
                    right(session, peer, id, asked)

        def answered(session: Any, mutations: Sequence[Any], answer: Any) -> None:
            server.rows.submit = submit  # type: ignore[method-assign]
            verdicts: dict[str | None, Verdict] = {
                "full": Failed(StoreFull("the tests", "full")),
                "split": Failed(TabletSplit("docs")),
                "refused": Refused(0, 0),
                "no reply": NoReply("so it is"),
            }
            answer([verdicts[fault]])

        if fault is not None:
            handlers[int(Method.COMMIT)] = meet
        await self._commit(txn)

    async def late(self, place: Place, owner: Any, db: perco.Database, written: Any, other: Any) -> None:
        txn = await db.begin()
        fill(txn, written, n, body)
        async with db.transaction() as first:
            fill(first, other, n, body)
        await self._commit(txn)

    async def at_once(self, place: Place, owner: Any, db: perco.Database, written: Any, other: Any) -> None:
        one, two = await db.begin(), await db.begin()
        fill(one, written, n, body)
        fill(two, other, n, body)
        assert place.server is not None
        rows, submit, queued = place.server.rows, place.server.rows.submit, list[Any]()

        def hold(session: Any, mutations: Sequence[Any], answer: Any) -> None:
            rows.submit = submit  # type: ignore[method-assign]
            queued.append((session, mutations, answer))

        rows.submit = hold  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            first, second = list[Any](), list[Any]()
            nursery.start_soon(self._commit, one, first)
            await trio.sleep(0.01)
            nursery.start_soon(self._commit, two, second)
            await trio.sleep(0.01)
            [asked] = queued
            submit(*asked)
        self.told += [first, second]

    async def behind(self, place: Place, owner: Any, db: perco.Database, written: Any, _: Any) -> None:
        if inside(owner).driver.entered.cells:
            return  # a commit without an answer has left the cell behind
        txn = await db.begin()
        fill(txn, written, n, body)
        async with trio.open_nursery() as nursery:
            with committing(owner, "a"):
                nursery.start_soon(self._commit, txn)
                await trio.sleep(1)
                self.told.append(len(self.told))

    async def cancelled(self, place: Place, owner: Any, db: perco.Database, written: Any, during: bool) -> None:
        txn = await db.begin()
        fill(txn, written, n, body)
        with trio.CancelScope() as scope:
            if during:
                assert place.server is not None
                handlers, right = place.server._handlers, place.server._handlers[int(Method.COMMIT)]

                def cancel(session: Any, peer: Any, id: int, asked: Any) -> None:
                    handlers[int(Method.COMMIT)] = right
                    scope.cancel()
                    right(session, peer, id, asked)

                handlers[int(Method.COMMIT)] = cancel
            else:
                await remote_owner(db).link.call(Method.LAST, None, again=True)
                scope.cancel()
            await self._commit(txn)

    async def without_timestamps(self, place: Place, owner: Any, db: perco.Database, written: Any, _: Any) -> None:
        txn = await db.begin()
        fill(txn, written, n, body)
        while inside(owner).oracle.draw_nowait():
            pass
        await self._commit(txn)


def played(history: list[Any], *, laned: bool) -> Run:
    run = Run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "laned", laned)

        def noted(self: OneStep, *args: Any) -> bool:
            took = laned and _LANE(self, *args)
            run.lanes += took
            return took

        patch.setattr(OneStep, "lane", noted)

        async def in_time() -> None:
            with trio.fail_after(2000):
                await run.play(history, laned=laned)

        run_comparable(patch, in_time)
    return run


poked = perco.Table("pokes", key=perco.TEXT)
poke = poked.signal("poke")
POKES = perco.Schema(poked)


@POKES.observe(poke, id="hear")
async def hear(txn: perco.Transaction, key: str) -> None:
    """Nothing comes of it."""


def test_a_commit_that_writes_no_cell_is_entered_by_its_bare_primary() -> None:  # N5 C2
    async def main() -> None:
        place = Place(POKES)
        async with place.served() as owner, place.client() as db:
            assert place.server is not None
            rows, submit = place.server.rows, place.server.rows.submit
            seen = list[Any]()

            def look(session: Any, mutations: Any, answer: Any) -> None:
                seen.append(set(inside(owner).driver.entered.cells))
                submit(session, mutations, answer)

            rows.submit = look  # type: ignore[method-assign]
            async with db.transaction() as txn:
                txn.signal(poke, "a")
            assert seen == [{("pokes", b"a", -txn.start_ts)}]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@settings(unhurried, max_examples=80, phases=PHASES)
@given(st.lists(steps, min_size=1, max_size=4))
def test_the_lanes_and_the_machines_do_the_same(history: list[Any]) -> None:  # C1 C2 C3 C5 C6 T4 T10 N1 N10 R5
    one, other = played(history, laned=True), played(history, laned=False)
    assert one.told == other.told
    faults = sum(what in ("alone", "locked") and fault is not None for what, _, fault in history)
    assert one.fired == other.fired == faults


@pytest.mark.parametrize("fault", ANSWERS)
def test_each_fault_is_met_in_the_lanes(fault: str | None) -> None:  # C1 C3 C6 T4
    """Otherwise the comparison compares nothing."""
    history = [("alone", {("n", "a"): 1, ("body", "a"): 300}, fault), ("alone", {("n", "a"): 2}, None)]
    one, other = played(history, laned=True), played(history, laned=False)
    assert one.told == other.told
    assert one.fired == other.fired == (fault is not None)
    assert one.lanes > (1 if fault in ("lost before", "met", "stale", "unavailable", "no reply") else 2)
    assert other.lanes == 0


@pytest.mark.parametrize(
    "step",
    [
        ("behind", {("n", "a"): 1}, None),
        ("late", {("n", "a"): 1}, {("n", "a"): 2}),
        ("alone", {("n", "a"): 1}, "no reply"),
        ("alone", {("n", "a"): 1}, "lost after"),
    ],
    ids=["behind", "late", "no reply", "lost"],
)
def test_one_step_is_the_same_in_the_lanes(step: Any) -> None:  # C2 C3 C5 T4
    assert played([step], laned=True).told == played([step], laned=False).told
