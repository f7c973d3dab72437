"""Whether a view is up to date: `wait_for(views=)`, `snapshot(fresh=)`, `freshness` (V14)."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

import perco
from perco import views
from perco.database.inside import inside
from perco.notify.concerned import Concerned
from perco.schema import building
from perco.storage import ScanPage, ScanRequest
from tests.component.notify.kit import LONG_S, client, get, memory, put, settle
from tests.support.graphs import Graph, State, stored, write

BROKEN = "this text cannot be indexed"


class Site:
    """Raw pages; an observer that is written by hand cleans them. Views: the words of clean pages, their totals, and
    the authors' pages."""

    def __init__(self, *, version: int = 1, by_hand: bool = True) -> None:
        self.pages = perco.Table("pages", key=perco.TEXT)
        self.raw = self.pages.column("raw", perco.TEXT)
        self.text = self.pages.column("text", perco.TEXT)
        self.author = self.pages.column("author", perco.TEXT)
        self.mailed = self.pages.column("mailed", perco.INT64)
        self.postings = perco.Table("postings", key=perco.Tuple(perco.TEXT, perco.TEXT))
        self.n = self.postings.column("n", perco.INT64)
        self.words = perco.Table("words", key=perco.TEXT)
        self.total = self.words.column("total", perco.INT64)
        self.authors = perco.Table("authors", key=perco.TEXT)
        self.wrote = self.authors.column("wrote", perco.JSON)
        self.shelf = views.Views(perco.Schema(self.pages, self.postings, self.words, self.authors))
        self.schema = self.shelf.schema
        self.held: dict[str, trio.Event] = {}  # runs of the observers that are written by hand wait for these
        self.running: dict[str, trio.Event] = {}
        if by_hand:
            self.cleaner()

        @self.shelf.each(self.text, id="index", into=self.postings, version=version)
        def index(page: perco.Row[str]) -> Iterator[views.Put[Any]]:
            if page[self.text] == BROKEN:
                raise ValueError(BROKEN)
            for word, n in Counter((page[self.text] or "").split()).items():
                yield views.Put(self.postings, (word, page.key), {self.n: n * version})

        @self.shelf.group(
            self.n, id="totals", by=views.prefix(1), into=self.words, keep=[views.sum(self.n)], version=version
        )
        def totals(word: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            yield views.Put(self.words, word, {self.total: rows.sum(self.n)})

        @self.shelf.group(self.author, id="authors", by=lambda page: page[self.author], into=self.authors)
        def authors(name: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            yield views.Put(self.authors, name, {self.wrote: [page.key for page in rows]})

    def cleaner(self) -> None:
        @self.schema.observe(self.raw, id="clean")
        async def clean(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
            await self._hold("clean")
            txn.set(self.text, change.key, (change.value or "").lower())

    def mailer(self, writes: Any = None) -> None:
        @self.schema.observe(self.text, id="mail", writes=writes)
        async def mail(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
            await self._hold("mail")
            txn.set(self.mailed, change.key, 1)

    def hold(self, id: str) -> None:
        self.held[id], self.running[id] = trio.Event(), trio.Event()

    async def _hold(self, id: str) -> None:
        if id in self.held:
            self.running[id].set()
            await self.held[id].wait()


@asynccontextmanager
async def opened(site: Site) -> AsyncIterator[perco.Database]:
    async with client(memory(), site.schema) as db:
        yield db


async def total(db: perco.Database, site: Site, word: str) -> int | None:
    found: int | None = await get(db, site.total, word)
    return found


async def test_a_wait_for_a_view_ends_when_it_reflects_the_change() -> None:  # V14
    site = Site()
    async with opened(site) as db, db.worker():
        ts = await put(db, site.raw, "a", "Sun SUN")
        await db.wait_for(ts, views="totals", timeout=LONG_S)
        assert await total(db, site, "sun") == 2, "by the observer written by hand, and two views"


async def test_a_wait_for_a_view_leaves_out_views_that_it_does_not_depend_on() -> None:  # V14
    site = Site()
    async with opened(site) as db, db.worker():
        await db.pause("authors.members: author")
        await put(db, site.author, "a", "Ann")
        ts = await put(db, site.text, "a", "sun")
        await db.wait_for(ts, views=["totals", "index"], timeout=LONG_S)
        assert await total(db, site, "sun") == 1
        with pytest.raises(perco.UsageError, match=r"paused: 'authors\.members: author'"):
            await db.wait_for(ts, timeout=LONG_S)
        with pytest.raises(perco.UsageError, match=r"paused: 'authors\.members: author'"):
            await db.wait_for(ts, views=["totals", "authors"], timeout=LONG_S)
        await db.resume("authors.members: author")
        await settle(db)


@pytest.mark.parametrize("id", ["clean", "index: text", "totals.members: n", "totals"])
async def test_a_wait_for_a_view_includes_all_that_it_depends_on(id: str) -> None:  # V14
    site = Site()
    async with opened(site) as db, db.worker():
        await db.pause(id)
        ts = await put(db, site.raw, "a", "sun")
        with pytest.raises(perco.UsageError, match=f"paused: '{id}'"):
            await db.wait_for(ts, views="totals", timeout=LONG_S)
        assert (await db.freshness("totals"))["totals"].ts < ts
        await db.resume(id)
        await db.wait_for(ts, views="totals", timeout=LONG_S)
        assert await total(db, site, "sun") == 1


async def test_an_observer_of_which_nothing_is_known_counts_and_one_that_says_what_it_writes_does_not() -> None:  # V14
    for known in (False, True):
        site = Site(by_hand=False)
        site.mailer([site.mailed] if known else None)
        async with opened(site) as db, db.worker():
            await db.pause("mail")
            ts = await put(db, site.text, "a", "sun")
            if known:
                await db.wait_for(ts, views="totals", timeout=LONG_S)
            else:
                with pytest.raises(perco.UsageError, match="paused: 'mail'"):
                    await db.wait_for(ts, views="totals", timeout=LONG_S)
            await db.resume("mail")
            await settle(db)


async def test_an_observer_that_may_write_a_source_counts() -> None:  # V14
    site = Site(by_hand=False)

    @site.schema.observe(site.raw, id="clean", writes=[site.text])
    async def clean(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        txn.set(site.text, change.key, change.value or "")

    async with opened(site) as db, db.worker():
        await db.pause("clean")
        ts = await put(db, site.raw, "a", "sun")
        with pytest.raises(perco.UsageError, match="paused: 'clean'"):
            await db.wait_for(ts, views="totals", timeout=LONG_S)
        await db.wait_for(ts, views="authors", timeout=LONG_S)
        await db.resume("clean")
        await settle(db)


async def test_a_run_that_writes_what_its_observer_does_not_name_fails(  # V14
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "perco.observer")
    site = Site(by_hand=False)
    site.mailer([site.author])
    async with opened(site) as db, db.worker(options=perco.WorkerOptions(attempts=1)):
        ts = await put(db, site.text, "a", "sun")
        await db.wait_for(ts, timeout=LONG_S)
        failed = await db.failed("mail")
        assert ["pages.mailed, which its writes= does not name" in each.error for each in failed] == [True]
        assert await get(db, site.mailed, "a") is None


async def test_a_run_in_flight_is_waited_for_if_it_is_concerned() -> None:  # V14
    site = Site(by_hand=False)
    site.hold("mail")
    site.mailer([site.author, site.mailed])
    async with opened(site) as db, db.worker():
        ts = await put(db, site.text, "a", "sun")
        await site.running["mail"].wait()
        await db.wait_for(ts, views="totals", timeout=LONG_S)
        assert await total(db, site, "sun") == 1
        with pytest.raises(perco.NotIdle, match="'authors': not every change committed up to"):
            await db.wait_for(ts, views="authors", timeout=30)
        assert (await db.freshness("authors"))["authors"].ts < ts
        site.held["mail"].set()
        await db.wait_for(ts, views="authors", timeout=LONG_S)
        await settle(db)


class _Between:
    """A row store with which something happens after the first page of a look."""

    def __init__(self, inner: Any, table: str, happens: Callable[[], Awaitable[None]]) -> None:
        self._inner, self._table, self._happens = inner, table, happens
        self.on = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def scan(self, request: ScanRequest) -> ScanPage:
        page: ScanPage = await self._inner.scan(request)
        if self.on and request.table == self._table and len(request.queries) > 1:
            self.on = False
            await self._happens()
        return page


@pytest.mark.parametrize("concerned", [True, False])
async def test_a_look_that_a_run_passed_does_not_count(concerned: bool) -> None:  # V14, N7
    """A run carries its cause from a table that is looked at later to one that was looked at before."""
    site, began, goes_on, done = Site(by_hand=False), trio.Event(), trio.Event(), trio.Event()
    late = perco.Table("zoo", key=perco.TEXT)
    animal = late.column("animal", perco.TEXT)
    site.schema.tables["zoo"] = late
    into = site.author if concerned else site.mailed

    @site.schema.observe(animal, id="keeper", writes=[into])
    async def keeper(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        began.set()
        await goes_on.wait()
        if concerned:
            txn.set(site.author, "a", change.value or "")
        else:
            txn.set(site.mailed, "a", 1)
        await txn.commit()
        done.set()

    async def passes() -> None:
        goes_on.set()
        await done.wait()

    local = memory()
    store = _Between(local.store, "pages", passes)
    async with client(local, site.schema, store=store) as db, db.worker():
        await db.pause("authors.members: author")
        ts = await put(db, animal, "lion", "Leo")
        await began.wait()
        store.on = True
        look = await inside(db).waiting.none_up_to(ts, sorted((await _of(db, "authors")).without))
        assert done.is_set()
        assert (look is None) is concerned
        if concerned:
            assert (await db.freshness("authors"))["authors"].ts < ts
        await db.resume("authors.members: author")
        await settle(db)


async def _of(db: perco.Database, view: str) -> Concerned:
    return await inside(db).waiting.concerned_with(view)


async def test_a_wait_says_which_changes_have_failed_for_good_and_waits_for_all_others(  # V14, N6
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "perco.observer")
    site = Site()
    async with opened(site) as db, db.worker(options=perco.WorkerOptions(attempts=2)):
        before = await put(db, site.text, "a", "sun")
        await db.wait_for(before, views="totals", timeout=LONG_S)
        bad = await put(db, site.text, "b", BROKEN)
        after = await put(db, site.text, "c", "sun")
        with pytest.raises(perco.NotFresh, match=r"'totals': .* up to \d+ .* given up: 1 for 'index: text'") as failed:
            await db.wait_for(after, views="totals", timeout=LONG_S)
        assert (failed.value.views, failed.value.ts) == (("totals",), after)
        assert failed.value.failed == {"index: text": 1}
        assert await total(db, site, "sun") == 2, "all that did not fail is reflected"
        with pytest.raises(perco.NotFresh):
            await db.snapshot_at(fresh="totals", timeout=LONG_S)
        await db.wait_for(before, views="totals", timeout=LONG_S)
        await db.wait_for(after, views="authors", timeout=LONG_S)
        await db.wait_for(after, timeout=LONG_S)
        fresh = await db.freshness()
        assert fresh["totals"].ts == bad - 1
        assert (fresh["totals"].failed, fresh["totals"].waiting) == (1, 0)
        assert (fresh["authors"].failed, fresh["authors"].waiting) == (0, 0)
        assert fresh["authors"].ts >= after
        await put(db, site.text, "b", "moon")
        async with db.snapshot(fresh=["totals"], timeout=LONG_S) as snap:
            assert await snap.get(site.total, "moon") == 1
        assert (await db.freshness("totals"))["totals"].failed == 0


async def test_a_fresh_snapshot_has_all_that_was_committed_before() -> None:  # V14
    site = Site()
    async with opened(site) as db, db.worker():
        for i in range(5):
            await put(db, site.raw, f"page {i}", "Sun")
            async with db.snapshot(fresh="totals", timeout=LONG_S) as snap:
                assert await snap.get(site.total, "sun") == i + 1
        snap = await db.snapshot_at(fresh=["totals", "authors"], timeout=LONG_S)
        try:
            assert await snap.get(site.total, "sun") == 5
        finally:
            snap.end()


async def test_without_a_worker_a_wait_says_so_and_with_a_timeout_it_ends() -> None:  # V14
    site = Site()
    async with opened(site) as db:
        ts = await put(db, site.text, "a", "sun")
        with pytest.raises((perco.UsageError, perco.NotIdle), match=r"no worker runs them|is reflected within 30 s"):
            await db.wait_for(ts, views="totals", timeout=30)
        await db.wait_for(ts, views="authors", timeout=30)


async def test_a_view_that_is_new_reflects_no_change_before_it_has_seen_all_older_data() -> None:  # V14, N10
    """A derived row is older than the registration of the view that reads it, but younger than what it came from."""
    local, first = memory(), Site(by_hand=False)
    async with client(local, first.schema) as db, db.worker():
        ts = await put(db, first.text, "a", "sun")
        await db.wait_for(ts, views="totals", timeout=LONG_S)
    second = Site(version=2, by_hand=False)
    async with client(local, second.schema, backfilled=False) as db:
        assert (await db.freshness("totals"))["totals"].ts == 0
        with trio.move_on_after(30), pytest.raises((perco.UsageError, perco.NotIdle)):
            await db.wait_for(ts, views="totals", timeout=10)
        await db.backfill()
        assert (await db.freshness("totals"))["totals"].ts == 0
        async with db.worker():
            await db.wait_for(ts, views="totals", timeout=LONG_S)
            assert await total(db, second, "sun") == 2
            assert (await db.freshness("totals"))["totals"].ts >= ts


async def test_the_backfill_of_a_view_of_a_view_is_waited_for_though_its_causes_are_later() -> None:  # V14, N9, N10
    local, site = memory(), Site(by_hand=False)
    pages, postings = site.pages, site.postings
    plain = perco.Schema(pages, postings)

    @plain.observe(site.text, id="index: text")
    async def index(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        txn.set(site.n, ("sun", change.key), 1)

    async with client(local, plain) as db, db.worker():
        ts = await put(db, site.text, "a", "sun")
        await settle(db)
    late = views.Views(perco.Schema(pages, postings, site.words))

    @late.group(site.n, id="totals", by=views.prefix(1), into=site.words)
    def totals(word: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
        yield views.Put(site.words, word, {site.total: sum(row[site.n] for row in rows)})

    async with client(local, late.schema) as db:
        with pytest.raises((perco.UsageError, perco.NotIdle)):
            await db.wait_for(ts, views="totals", timeout=10)
        async with db.worker():
            await db.wait_for(ts, views="totals", timeout=LONG_S)
            assert await total(db, site, "sun") == 1


async def test_a_view_that_a_job_builds_is_not_fresh() -> None:  # V14, N10
    site = Site(by_hand=False)
    ids = site.shelf.observers("totals")
    async with opened(site) as db:
        async with db.worker():
            ts = await put(db, site.text, "a", "sun")
            await settle(db)
        await inside(db).keeper.change(lambda catalogue: building.begin(catalogue, site.schema, ids, "b"))
        assert (await db.freshness("totals"))["totals"].ts == 0
        with pytest.raises(perco.UsageError, match="a job is building what these observers derive: 'totals', "):
            await db.wait_for(ts, views="totals", timeout=30)
        with pytest.raises(perco.UsageError, match="a job is building what observer 'totals' derives"):
            await db.drop_observer("totals")
        await db.wait_for(ts, views="index", timeout=30)
        now = await inside(db).oracle.draw()
        await inside(db).keeper.change(lambda catalogue: building.end(catalogue, ids, "b", (now, now)))
        assert (await db.freshness("totals"))["totals"].ts >= ts
        await db.wait_for(ts, views="totals", timeout=30)


async def test_freshness_says_what_waits_and_for_how_long() -> None:  # V14
    site = Site()
    async with opened(site) as db:
        async with db.worker():
            ts = await put(db, site.text, "a", "sun moon")
            await put(db, site.author, "a", "Ann")
            await settle(db)
        idle = await db.freshness()
        assert set(idle) == {"index", "totals", "authors"}
        assert all((each.waiting, each.failed, each.lag_s) == (0, 0, 0.0) for each in idle.values())
        assert all(each.ts > ts for each in idle.values())
        first = await put(db, site.author, "b", "Ann")
        await put(db, site.author, "c", "Ann")
        fresh = await db.freshness()
        assert fresh["authors"].ts == first - 1
        assert (fresh["authors"].waiting, fresh["totals"].waiting) == (2, 0)
        assert fresh["totals"].ts > first
        if inside(db).owner.is_here:
            await inside(db).oracle.note(inside(db).driver.visible)
            await trio.sleep(60)
            lag_s = (await db.freshness("authors"))["authors"].lag_s
            assert lag_s >= 0.0
        async with db.worker():
            await settle(db)


async def test_what_is_no_view_is_refused() -> None:
    site = Site()
    site.mailer()
    async with opened(site) as db:
        ts = await put(db, site.author, "a", "Ann")
        with pytest.raises(perco.UsageError, match="no view or sink 'mail'; it has: 'index', 'totals', 'authors'"):
            await db.wait_for(ts, views=["totals", "mail"], timeout=10)
        with pytest.raises(perco.UsageError, match="named by their ids"):
            await db.wait_for(ts, views=[], timeout=10)
        with pytest.raises(perco.UsageError, match="either fresh=, ts= or at="):
            db.snapshot(fresh="totals", ts=ts)
        with pytest.raises(perco.UsageError, match="bounds the wait for fresh="):
            db.snapshot(timeout=1.0)
        with pytest.raises(perco.UsageError, match="nothing has been committed at"):
            await db.wait_for(1 << 50, views="totals", timeout=10)


@pytest.mark.parametrize("seed", range(24))
async def test_after_a_wait_a_view_is_what_its_definition_says(seed: int) -> None:  # V14
    """Views that one does not depend on may stand still; and so may those that have still to come."""
    graph, rng, state = Graph(seed), random.Random(f"{seed} fresh"), State()
    async with client(memory(), graph.views.schema) as db, db.worker(concurrency=rng.choice([1, 4, 16])):
        for _ in range(6):
            view = rng.choice(list(graph.views.declared))
            concerned = await _of(db, view)
            others = sorted(inside(db).catalogue.observers.keys() - concerned.ids)
            asleep = [id for id in others if rng.random() < 0.5]
            for id in asleep:
                await db.pause(id)
            for _ in range(rng.randrange(1, 8)):
                await write(db, graph.changes(rng, state))
            if rng.random() < 0.5:
                async with db.snapshot(fresh=view, timeout=LONG_S):
                    pass
            else:
                await db.wait_for(await inside(db).oracle.newest(), views=view, timeout=LONG_S)
            expected, found = graph.views.build(state), await stored(db, graph.views)
            for table in graph.views.declared[view].outputs:
                plain = [
                    {key: {c.name: repr(v) for c, v in row.items()} for key, row in rows[table].items()}
                    for rows in (found, expected)
                ]
                assert plain[0] == plain[1], (view, table)
            for id in asleep:
                await db.resume(id)
        await settle(db)


async def test_while_others_write_a_view_reflects_at_least_what_was_waited_for() -> None:  # V14
    site, rng = Site(), random.Random(7)
    async with opened(site) as db, db.worker(concurrency=4):
        done = False

        async def others() -> None:
            number = 0
            while not done:
                number += 1
                await put(db, site.raw, f"other {number % 5}", rng.choice(["Sun", "Moon", "Sun moon"]))
                await trio.sleep(0.01)  # of virtual time, which would stand still otherwise

        async with trio.open_nursery() as nursery:
            nursery.start_soon(others)
            for i in range(20):
                ts = await put(db, site.raw, "mine", f"w{i}")
                await db.wait_for(ts, views="totals", timeout=LONG_S)
                async with db.snapshot() as snap:
                    assert await snap.get(site.total, f"w{i}") == 1
                    assert await snap.get(site.total, f"w{i - 1}") is None
            done = True
        await settle(db)
