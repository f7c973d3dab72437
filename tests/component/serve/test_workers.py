"""Several worker processes on one served store: their scanners stay out of each other's way, and nothing is left."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.database import Database
from perco.database.inside import inside
from perco.notify.rowlocks import CLAIMED, DONE, FREE, HELD
from perco.notify.scanner import ScannerCounters
from perco.notify.workers import WorkerHandle
from perco.serve.client import remote_owner
from perco.serve.elsewhere import Elsewhere
from perco.serve.messages import NOTIFIED, Method
from perco.serve.wakes import ANSWER_S
from perco.txn.engine import Engine
from tests.component.serve.kit import Place, vanish

Txn = perco.Transaction
Change = perco.Change[Any, Any]
ROWS = 400


class Docs:
    """A table in four tablets, and an observer of its bodies that takes its time and notes each run."""

    def __init__(self, run_s: tuple[float, float] = (0.01, 0.03)) -> None:
        self.docs = perco.Table("docs", key=perco.INT64, splits=[100, 200, 300])
        self.body = self.docs.column("body", perco.INT64)
        self.size = self.docs.column("size", perco.INT64)
        self.note = self.docs.column("note", perco.INT64)
        self.schema = perco.Schema(self.docs)
        self.begun: list[int] = []
        rng = random.Random(4711)

        @self.schema.observe(self.body, id="measure")
        async def measure(txn: Txn, change: Change) -> None:
            self.begun.append(change.key)
            await trio.sleep(rng.uniform(*run_s))
            txn.set(self.size, change.key, change.value)

    async def dirty(self, db: perco.Database, keys: range) -> None:
        async with db.transaction() as txn:
            for key in keys:
                txn.set(self.body, key, key)


@asynccontextmanager
async def workers(
    place: Place, count: int, options: perco.WorkerOptions
) -> AsyncIterator[tuple[list[Database], list[WorkerHandle]]]:
    async with place.clients(count) as clients, AsyncExitStack() as stack:
        yield clients, [await stack.enter_async_context(client.worker(options=options)) for client in clients]


def counted(handles: list[WorkerHandle]) -> ScannerCounters:
    """Of all scanners of all workers."""
    total = ScannerCounters()
    for handle in handles:
        for counters in handle.scanner_statistics():
            for name in ("tours", "teleports", "claims", "met", "asked", "refused"):
                setattr(total, name, getattr(total, name) + getattr(counters, name))
    return total


@pytest.mark.parametrize("before", [True, False])
async def test_scanners_of_several_processes_teleport_away_from_each_other(before: bool) -> None:  # N8
    docs = Docs()
    place = Place(docs.schema)
    async with place.served() as owner:
        if before:
            await docs.dirty(owner, range(ROWS))
        async with workers(place, 4, perco.WorkerOptions(concurrency=16)) as (clients, handles):
            if not before:
                await trio.sleep(1.0)
                await docs.dirty(owner, range(ROWS))
            await clients[0].wait_idle(timeout=100.0)
            told = counted(handles)
            assert set(docs.begun) == set(range(ROWS))
            assert told.met > 0
            assert told.teleports > 0
            assert 0 < told.asked < told.claims, "a call asks for several rows"
            assert told.refused < 0.1 * told.asked
            assert told.claims < 1.1 * ROWS, "few rows are claimed that another process has done already"
            assert all(handle.statistics()["measure"].runs > ROWS / 8 for handle in handles), "the work is shared"


async def test_without_teleport_they_pass_each_other_by() -> None:  # N8
    docs = Docs()
    place = Place(docs.schema)
    async with place.served() as owner:
        await docs.dirty(owner, range(ROWS))
        async with workers(place, 4, perco.WorkerOptions(concurrency=16, teleport=False)) as (clients, handles):
            await clients[0].wait_idle(timeout=100.0)
            told = counted(handles)
            assert set(docs.begun) == set(range(ROWS))
            assert told.teleports == 0
            assert told.met > 0


async def test_a_change_wakes_one_process_and_is_asked_for_once() -> None:  # N8
    """All that wake for a change ask for it, and all but one in vain. Nor does one that follows from it wake others."""
    docs, chain = Docs(), 30

    @docs.schema.observe(docs.size, id="tell")
    async def tell(txn: Txn, change: Change) -> None:
        txn.set(docs.note, change.key, 1)

    place = Place(docs.schema)
    async with place.served() as owner, workers(place, 4, perco.WorkerOptions()) as (clients, handles):
        await trio.sleep(1.0)
        assert place.server is not None
        sessions, claim = place.server.sessions, place.server.sessions.claim
        given: dict[tuple[bytes, int], list[str]] = {}  # by row and newest change: to which processes

        def noted(session: Any, table: str, wanted: Any, most: int, *, halts: bool) -> Any:
            states, held = claim(session, table, wanted, most, halts=halts)
            for (row, newest, _), state in zip(wanted, states, strict=True):
                if state == CLAIMED:
                    given.setdefault((row, newest), []).append(session.name)
            return states, held

        sessions.claim = noted  # type: ignore[method-assign]
        tours = counted(handles).tours
        for key in range(chain):
            await docs.dirty(owner, range(key, key + 1))
            await clients[0].wait_idle(timeout=100.0)
            await trio.sleep(0.5)
        told = counted(handles)
        assert sum(handle.statistics()["tell"].commits for handle in handles) == chain
        assert told.refused == 0
        assert len(given) == 2 * chain
        assert all(len(set(names)) == 1 for names in given.values()), "a second process claimed what had just been done"
        # Another scanner of the same process may have read the notify cell before the run took it away.
        assert all(len(names) <= perco.WorkerOptions().scanners for names in given.values())
        assert told.tours - tours <= 7 * chain
        assert all(handle.statistics()["measure"].runs > 0 for handle in handles), "they take turns"


async def test_what_a_process_left_when_it_died_is_done_by_another() -> None:  # N8, R7
    docs = Docs()
    stuck = trio.Event()
    hanging: set[Engine] = set()

    @docs.schema.observe(docs.size, id="tell")
    async def tell(txn: Txn, change: Change) -> None:
        if txn._engine in hanging:
            stuck.set()
            await trio.sleep_forever()
        txn.set(docs.note, change.key, 1)

    place = Place(docs.schema)
    async with AsyncExitStack() as stack:
        owner = await stack.enter_async_context(place.served())
        survivor, dying = await stack.enter_async_context(place.clients(2))
        async with survivor.worker() as handle, dying.worker():
            hanging.add(inside(dying).engine)
            await trio.sleep(1.0)
            for key in range(8):  # each process has some of them
                await docs.dirty(owner, range(key, key + 1))
                await trio.sleep(0.1)
            await stuck.wait()
            assert handle.statistics()["tell"].commits < 8
            await vanish(dying)
            await survivor.wait_idle(timeout=60.0)
            assert handle.statistics()["tell"].commits == 8


async def test_a_process_that_does_not_answer_delays_a_change_only_for_a_moment() -> None:  # N8
    docs = Docs()
    place = Place(docs.schema)
    async with place.served() as owner, workers(place, 2, perco.WorkerOptions()) as (clients, handles):
        await trio.sleep(1.0)
        # Its wake-ups do not arrive, as if a function of its own held its loop.
        unheard: list[int] = []
        remote_owner(clients[0]).link._pushed = lambda what, value: unheard.append(what)
        for key in range(10):
            began = trio.current_time()
            await docs.dirty(owner, range(key, key + 1))
            await clients[1].wait_idle(timeout=100.0)
            assert trio.current_time() - began < ANSWER_S + 0.1
            await trio.sleep(0.1)
        assert unheard
        assert handles[1].statistics()["measure"].commits == 10


async def test_who_is_woken_when_a_process_ends_and_does_not_answer_delays_it_only_for_a_moment() -> None:  # N8
    docs, stuck = Docs(), trio.Event()
    hanging: list[Engine] = []

    @docs.schema.observe(docs.body, id="tell")
    async def tell(txn: Txn, change: Change) -> None:
        if txn._engine in hanging:
            stuck.set()
            await trio.sleep_forever()
        txn.set(docs.note, change.key, 1)

    place = Place(docs.schema)
    async with place.served(), place.clients(1) as [ending], workers(place, 2, perco.WorkerOptions()) as (clients, _):
        hanging.append(inside(ending).engine)
        unheard: list[int] = []
        remote_owner(clients[0]).link._pushed = lambda what, value: unheard.append(what)
        woken = False
        for key in range(10):
            stuck = trio.Event()
            async with ending.worker():
                await docs.dirty(ending, range(key, key + 1))
                with trio.move_on_after(1.0):  # a scanner of another process may find the change first
                    await stuck.wait()
                await trio.sleep(1.0)
                unheard.clear()
            with trio.fail_after(ANSWER_S + 0.2):
                await clients[1].wait_idle()
            woken |= stuck.is_set() and NOTIFIED in unheard
            if woken:
                break
        assert woken, "the client that does not answer was never woken"


async def test_a_row_that_was_held_is_told_free_to_who_runs_other_observers_there() -> None:  # N8
    docs, one, two = Docs(), Docs(run_s=(0.3, 0.3)), Docs()
    ran: list[float] = []

    async def tell(txn: Txn, change: Change) -> None:
        ran.append(trio.current_time())
        txn.set(two.note, change.key, 1)

    del two.schema.observers["measure"]
    for each in (docs, two):
        each.schema.observe(each.body, id="tell")(tell)
    place = Place(docs.schema)
    async with place.served() as owner, AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(place.client(each.schema)) for each in (one, two)]
        async with first.worker() as measuring, second.worker() as telling:
            await trio.sleep(1.0)
            began = trio.current_time()
            for key in range(8):
                await docs.dirty(owner, range(key, key + 1))
            await first.wait_idle(timeout=100.0)
            assert measuring.statistics()["measure"].commits == len(ran) == 8
            assert counted([telling]).met > 0
            assert max(ran) - began < 0.5, "as soon as the other one has let go, not when it is tried again by itself"


async def test_a_worker_that_is_draining_is_not_woken_in_vain() -> None:  # N8
    """It has a long run to end, and changes come meanwhile: another worker runs for each of them at once."""
    docs, gate = Docs((0.0, 0.0)), trio.Event()

    @docs.schema.observe(docs.note, id="hangs")
    async def hangs(txn: Txn, change: Change) -> None:
        await gate.wait()

    place = Place(docs.schema)
    async with place.served() as owner, workers(place, 2, perco.WorkerOptions(concurrency=4)) as (_, handles):
        async with owner.transaction() as txn:
            txn.set(docs.note, 1000, 1)
        await trio.sleep(1.0)
        [ends] = [handle for handle in handles if handle.statistics()["hangs"].running]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.drain)
            await trio.sleep(1.0)
            for key in range(10):
                at = trio.current_time()
                await docs.dirty(owner, range(key, key + 1))
                while key not in docs.begun:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                assert trio.current_time() - at < 0.3
                await trio.sleep(1.5)
            assert ends.statistics()["measure"].runs == 0
            gate.set()


async def test_a_worker_that_is_draining_begins_no_run_of_another_observer_of_the_row() -> None:
    docs, gate = Docs((0.0, 0.0)), trio.Event()
    order: list[str] = []
    for id in "ab":

        @docs.schema.observe(docs.note, id=id)
        async def waits(txn: Txn, change: Change, id: str = id) -> None:
            order.append(id)
            await gate.wait()

    place = Place(docs.schema)
    async with place.served() as owner, workers(place, 1, perco.WorkerOptions(concurrency=4)) as (_, [handle]):
        async with owner.transaction() as txn:
            txn.set(docs.note, 1000, 1)
        await trio.sleep(1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handle.drain)
            await trio.sleep(1.0)
            gate.set()
        assert order == ["a"]
        assert (await owner.waiting())["b"] == 1


async def test_a_process_with_an_older_version_of_an_observer_is_not_woken_in_vain() -> None:
    """N10: it leaves the changes alone, and the process with the newer version is told of them at once."""
    old, new = Docs(), Docs()
    del new.schema.observers["measure"]

    async def measure(txn: Txn, change: Change) -> None:
        txn.set(new.size, change.key, 2)

    place = Place(old.schema)
    async with place.served() as owner, place.client(old.schema) as first, first.worker() as older:
        new.schema.observe(new.body, id="measure", version=2)(measure)
        async with place.client(new.schema) as second, second.worker() as newer:
            await second.wait_idle(timeout=100.0)
            for key in range(8):
                await old.dirty(owner, range(key, key + 1))
                with trio.fail_after(ANSWER_S / 2):
                    await second.wait_idle(timeout=100.0)
                await trio.sleep(0.1)
            assert newer.statistics()["measure"].commits == 8
            assert older.statistics()["measure"].commits == 0


class First(random.Random):
    """Begins at the first row of the first tablet."""

    def randrange(self, *_: Any) -> int:
        return 0

    def choice(self, items: Any) -> Any:
        return items[0]


class Told:
    """In place of the link to a server, whose answers the test gives."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []  # rows, and how many of them
        self.told: list[tuple[int, Any]] = []
        self._answers: list[Any] = []
        self._answered: list[trio.Event] = []

    async def call(self, method: int, arguments: Any, *, again: bool) -> Any:
        _, wanted, most, _ = arguments
        at = len(self.asked)
        self.asked.append(([perco.INT64.decode(row) for row, _, _ in wanted], most))
        self._answers.append(None)
        self._answered.append(trio.Event())
        await self._answered[at].wait()
        return self._answers[at]

    def tell(self, method: int, arguments: Any) -> None:
        self.told.append((method, arguments))

    async def answer(self, at: int, *states: int) -> None:
        self._answers[at] = bytes(states), []
        self._answered[at].set()
        await trio.testing.wait_all_tasks_blocked()


async def test_a_row_that_was_claimed_in_place_of_others_and_is_run_by_nobody_is_released() -> None:  # N7, N8
    """Else the store would never be idle again, and other processes would be refused the row whenever it changes."""
    docs, link = Docs(), Told()
    async with perco.open("memory:", docs.schema) as db:
        await docs.dirty(db, range(6))
        async with db.worker(options=perco.WorkerOptions(concurrency=6, scanners=2)) as handle:
            elsewhere = Elsewhere(link, None)  # type: ignore[arg-type]
            handle._worker.elsewhere = elsewhere
            for scanner in handle.scanners:
                scanner._rng = First()
            await trio.testing.wait_all_tasks_blocked()
            assert link.asked == [([0, 1, 2, 3, 4, 5], 3), ([3, 4, 5], 3)], "one takes three rows, the other the next"
            row = "docs", perco.INT64.encode(5)
            await link.answer(0, HELD, HELD, HELD, DONE, HELD, CLAIMED)
            assert row in elsewhere.claims
            assert (Method.UNCLAIM, row) not in link.told, "the other scanner may be given it"
            await link.answer(1, CLAIMED, HELD, FREE)
            assert (Method.UNCLAIM, row) in link.told, "it jumps"
            assert row not in elsewhere.claims
            assert docs.begun == [3]


@pytest.mark.parametrize(
    ("failed", "asked"),
    [([2, 3], ([0, 1, 4, 5], 2)), ([0, 1, 2], ([0, 3, 4, 5], 2))],
    ids=["later on the page", "first on the page"],
)
async def test_of_rows_that_failed_no_more_are_asked_for_than_may_run(
    failed: list[int], asked: tuple[list[int], int]
) -> None:  # N6
    """A scanner asks for many rows at once; of those that failed, this worker may run one."""
    docs, link = Docs(), Told()
    async with perco.open("memory:", docs.schema) as db:
        await docs.dirty(db, range(6))
        few = perco.WorkerOptions(concurrency=2, scanners=1, failing_share=0.5)
        async with db.worker(options=few) as handle:
            worker = handle._worker
            worker.elsewhere = Elsewhere(link, None)  # type: ignore[arg-type]
            handle.scanners[0]._rng = First()
            for n in failed:
                worker.backoff.failed(("docs", perco.INT64.encode(n), worker.acks("docs")[0]), -1000.0)
            await trio.testing.wait_all_tasks_blocked()
            assert link.asked == [asked]


async def test_a_row_that_is_claimed_in_place_of_others_and_has_failed_meanwhile_waits() -> None:  # N6, N7
    """Another scanner of the process has run the row while this one waited for the answer, and the run has failed."""
    docs, link = Docs(), Told()
    async with perco.open("memory:", docs.schema) as db:
        await docs.dirty(db, range(4))
        async with db.worker(options=perco.WorkerOptions(concurrency=2, scanners=1)) as handle:
            worker = handle._worker
            worker.elsewhere = elsewhere = Elsewhere(link, None)  # type: ignore[arg-type]
            handle.scanners[0]._rng = First()
            await trio.testing.wait_all_tasks_blocked()
            assert link.asked == [([0, 1, 2, 3], 2)]
            row = perco.INT64.encode(3)
            worker.backoff.failed(("docs", row, worker.acks("docs")[0]), trio.current_time())
            await link.answer(0, HELD, HELD, CLAIMED, CLAIMED)
            assert docs.begun == [2]
            assert (Method.UNCLAIM, ("docs", row)) in link.told, "otherwise the store would never be idle"
            assert ("docs", row) not in elsewhere.claims
