"""Scanners are told where there is work while their tours pass many rows (N8); time is virtual."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.errors import Corruption, SessionEnded, Unavailable
from perco.notify.hints import MOST, Hints
from perco.notify.scanner import Scanner
from perco.notify.worker import Worker
from perco.serve.client import remote_owner
from perco.serve.hinting import Hinting
from perco.serve.messages import Method
from perco.serve.sessions import Session
from perco.storage import ScanRequest
from perco.txn.resolver import Hint
from tests.component.notify.kit import OPTIONS, Web, put, settle, until
from tests.component.notify.test_limits import SLOW_S, Fast, Slow, load
from tests.component.serve.kit import Place

ROWS = 1000


def worker_of(db: perco.Database) -> Worker:
    worker = inside(db).workers.worker
    assert worker is not None
    return worker


async def test_a_change_beside_many_of_a_slow_observer_is_run_at_once(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, pages = Slow(web), 0
    ran: dict[str, int] = {}  # how many pages of notify cells had been read

    @web.observe(web.size, id="fast")
    async def fast(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        ran[change.key] = pages

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        store = inside(db).driver.store
        scan = store.scan

        async def counted(request: ScanRequest) -> Any:
            nonlocal pages
            pages += request.rows_max > 1  # else it is a page of one row
            return await scan(request)

        monkeypatch.setattr(store, "scan", counted)
        await load(db, 4 * ROWS, slow)
        await until(lambda: slow.running > 40 and worker_of(db).hints.on)
        most = 0
        for n in range(50):
            before = pages
            await put(db, web.size, key := f"{'amz'[n % 3]} fast {n}", n)
            await until(lambda key=key: key in ran)  # type: ignore[misc]
            most = max(most, ran[key] - before)
            await trio.sleep(0.1)
        assert most <= 5 * 4, "each scanner may be reading a few pages; a tour has 63"


async def test_a_client_is_told_by_the_owner(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = Slow(web), Fast(web)
    place = Place(web.schema)
    async with place.served() as owner, place.client() as other, place.client() as db, db.worker():
        await load(db, ROWS, slow)
        await until(lambda: slow.running > 40 and worker_of(db).hints.on)
        await until(lambda: len(inside(owner).driver.hints) == 1)
        heard: list[Hint] = []
        hear = worker_of(db).hints.hear

        def noted(rows: Iterable[Hint]) -> None:
            heard.extend(told := list(rows))
            hear(told)

        inside(db).driver.hints[:] = [noted]
        for n, writer in enumerate((owner, other)):
            await put(writer, web.size, f"fast {n}", n)
            await until(lambda n=n: f"fast {n}" in fast.at)  # type: ignore[misc]
        async with other.transaction() as txn:  # in two phases: each row becomes visible when it is settled
            for n in range(2, 5):
                txn.set(web.size, f"{'amz'[n % 3]} fast {n}", n)
        await until(lambda: len(fast.at) == 5)
        assert {row for _, row, _ in heard} >= {b"fast 0", b"fast 1", b"z fast 2", b"a fast 3", b"m fast 4"}
        inside(db).driver.hints[:] = [hear]
        await settle(db)
        await until(lambda: not worker_of(db).hints.on)
        await put(owner, web.size, "after", 1)  # to whom nobody listens
        await until(lambda: not inside(owner).driver.hints)


async def test_a_hint_that_cannot_be_followed_is_lost(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast, lost = Slow(web), Fast(web), 0
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await load(db, ROWS, slow)
        await until(lambda: slow.running > 40 and worker_of(db).hints.on)
        store = inside(db).driver.store
        scan = store.scan

        async def broken(request: ScanRequest) -> Any:
            nonlocal lost
            if request.rows_max == 1 and request.stop == request.start + b"\x00":
                lost += 1
                raise (Unavailable("cut off"), SessionEnded(), Corruption("notify group", "damaged"))[lost % 3]
            return await scan(request)

        monkeypatch.setattr(store, "scan", broken)
        for n in range(6):
            await put(db, web.size, f"fast {n}", n)
            await trio.sleep(1)
        await until(lambda: len(fast.at) == 6)
        assert lost >= 3, "errors of each kind"
        await settle(db)


async def test_hints_do_not_hold_up_tours(web: Web) -> None:
    """One scanner, and changes of a quick observer without a pause."""
    slow, fast = Slow(web), Fast(web)
    few = perco.WorkerOptions(scanners=1)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=few) as handle:
        await load(db, ROWS, slow)
        await until(lambda: slow.running > 40 and worker_of(db).hints.on)
        tours, running = handle.scanner_statistics()[0].tours, slow.running

        async def press(who: int) -> None:
            for n in range(1000):
                await put(db, web.size, f"{'amz'[n % 3]} quick {who} {n}", n)
                if n % 5 == 0:
                    await trio.sleep(0.001)  # the clock stands still otherwise, and tours make pauses

        async with trio.open_nursery() as nursery:
            for who in range(4):
                nursery.start_soon(press, who)
        assert slow.running == running, "little time has passed, so no slow run has ended"
        assert handle.scanner_statistics()[0].tours > tours
        await settle(db)
    assert len(fast.at) == 4000


class Still(Scanner):
    """A scanner that only does what a test says."""

    async def run(self) -> None:
        self.ended.set()
        await trio.sleep_forever()


async def test_a_scanner_follows_few_hints_at_a_time(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        inside(db).workers.scanner = Still
        async with db.worker() as handle, trio.open_nursery() as nursery:
            scanner, followed = handle.scanners[0], 0
            hints = worker_of(db).hints
            number = next(iter(worker_of(db).observers))

            async def follow(nursery: trio.Nursery, table: str, row: bytes) -> None:
                nonlocal followed
                followed += 1
                hints.hear([(table, b"another", (number,))])

            monkeypatch.setattr(scanner, "_follow_hint", follow)
            hints.hear([("docs", b"a", (number,))])
            await scanner._follow_hints(nursery)
            assert 0 < followed < 64


async def test_hints_of_lower_priorities_are_not_followed(web: Web) -> None:
    low, high = Fast(web), Slow(web, priority=1)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        inside(db).workers.scanner = Still
        async with db.worker() as handle, trio.open_nursery() as nursery:
            worker, scanner = worker_of(db), handle.scanners[0]
            numbers = {observer.id: number for number, observer in worker.observers.items()}
            for column, key, id in (web.size, "low", "fast"), (web.body, "high", "slow"):
                await put(db, column, key, 1 if column is web.size else "x")
                worker.hints.hear([("docs", key.encode(), (numbers[id],))])
            await scanner._follow_hints(nursery)
            await until(lambda: high.done == 1)
            assert not low.at
            nursery.cancel_scope.cancel()


async def test_a_session_that_has_ended_is_told_nothing(web: Web) -> None:
    Slow(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        driver = inside(db).driver
        hinting, sessions = Hinting(driver), [Session("one", 0.0), Session("other", 0.0)]
        for session in sessions:
            hinting.wants(session, True)
        assert len(driver.hints) == 1
        for session in sessions:
            session.ended = True
        driver.hint([("docs", b"a", (1,))])
        assert not driver.hints
        hinting.wants(sessions[0], "yes")  # of a client that is not ours
        assert not driver.hints


async def test_the_owner_is_told_again_after_a_lost_connection(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, _ = Slow(web), Fast(web)
    place = Place(web.schema)
    async with place.served(), place.client() as db, db.worker():
        await load(db, ROWS, slow)
        await until(lambda: worker_of(db).hints.on)
        link, told = remote_owner(db).link, list[Any]()
        tell = link.tell

        def noted(method: int, arguments: Any) -> None:
            told.append((method, arguments))
            tell(method, arguments)

        monkeypatch.setattr(link, "tell", noted)
        await place.break_connections()
        await until(lambda: any(method == Method.HOLDING for method, _ in told))
        assert (Method.HINTS, True) in told
        await settle(db)


async def test_hints_end_with_the_worker(web: Web) -> None:
    slow, _ = Slow(web), Fast(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        async with db.worker():
            await load(db, ROWS, slow)
            await until(lambda: worker_of(db).hints.on)
            assert inside(db).driver.hints
        assert not inside(db).driver.hints
        async with db.worker():
            await settle(db)
    assert slow.done == ROWS


async def test_hints_do_not_let_lower_priorities_pass_higher_ones(web: Web) -> None:
    slow, low = Slow(web, priority=1), Fast(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await load(db, ROWS, slow)
        worker = worker_of(db)
        await until(lambda: slow.running == worker.options.concurrency)
        worker.hints.toured(worker.hints.begin_tour(), long=True)
        async with db.transaction() as txn:
            for n in range(20):
                txn.set(web.size, f"low {n}", n)
        await trio.sleep(SLOW_S)
        assert len(low.at) < 20, "the high ones have most of the places that became free"
        await settle(db)
    assert len(low.at) == 20


async def test_hints_are_bounded_and_wanted_only_while_tours_are_long(web: Web) -> None:
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        listening = inside(db).driver.hints
        hints = Hints(inside(db).engine, lambda: None, lambda number: number == 1)
        hints.toured(hints.begin_tour(), long=False)
        assert not listening
        hints.toured(hints.begin_tour(), long=True)
        hints.hear([("docs", b"%d" % n, (1,)) for n in range(MOST)])
        hints.hear([("docs", b"of another", (2,))])
        assert [hints.take() for _ in range(MOST)] == [("docs", b"%d" % n) for n in range(MOST)]
        hints.hear([("docs", b"%d" % n, (1,)) for n in range(MOST)])
        hints.hear([("docs", b"one too many", (1,))])
        assert not hints, "a tour finds them all"
        await trio.sleep(0.9)
        hints.toured(hints.begin_tour(), long=False)
        assert listening == [hints.hear]
        await trio.sleep(0.2)
        hints.hear([("docs", b"late", (1, 2))])
        hints.toured(hints.begin_tour(), long=False)
        assert not listening
        assert not hints


async def test_tours_hurry_until_one_ends_that_began_when_hints_were_wanted(web: Web) -> None:  # N8
    """Of a change that committed before that, there is no hint: only a tour finds it, perhaps on its last page."""
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        hints = Hints(inside(db).engine, lambda: None, lambda number: number == 1)
        first, other = hints.begin_tour(), hints.begin_tour()
        hints.toured(first, long=True)
        assert hints.on
        hints.toured(other, long=True)
        assert not hints.of_all, "both began too early"
        second, early = hints.begin_tour(), hints.begin_tour()
        hints.toured(second, long=False)
        assert hints.of_all
        await trio.sleep(1.1)
        hints.toured(hints.begin_tour(), long=False)
        assert not hints.on
        hints.toured(hints.begin_tour(), long=True)
        hints.toured(early, long=True)
        assert hints.on
        assert not hints.of_all, "it began when hints were wanted, but not since"
        hints.toured(-1, long=True)
        assert not hints.of_all, "it was broken off"
        hints.toured(hints.begin_tour(), long=True)
        assert hints.of_all
        early = hints.begin_tour()
        hints.hear([("docs", b"%d" % n, (1,)) for n in range(MOST + 1)])
        assert not hints.of_all, "these hints were dropped"
        hints.toured(early, long=True)
        assert not hints.of_all
        hints.toured(hints.begin_tour(), long=True)
        assert hints.of_all
        hints.end()


async def test_a_hint_ends_the_pauses_of_scanners(web: Web) -> None:
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        hints = Hints(inside(db).engine, lambda: None, lambda number: number == 1)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(hints.pause, 10.0)
            await trio.testing.wait_all_tasks_blocked()
            hints.hear([("docs", b"of another", (2,))])
            await trio.testing.wait_all_tasks_blocked()
            assert not hints
            hints.hear([("docs", b"a", (1,))])
        assert trio.current_time() == began
        await hints.pause(10.0)  # one waits already
        assert trio.current_time() == began
