"""Views that are dropped: their rows are retracted, and nothing of them is left (V15, N12)."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import trio

import perco
from perco import views
from perco.database.inside import inside
from perco.schema.catalogue import schema_of
from perco.tablets.local import LocalStore
from perco.views import dropping
from tests.component.notify.kit import LONG_S, StoppedError, StoppingStore, client, get, memory, put, settle
from tests.support.graphs import Graph, State, check_equal, write


class Site:
    """Pages, the words of them, and the totals of words; perhaps without one of the views."""

    def __init__(self, *, index: bool = True, totals: bool = True) -> None:
        self.pages = perco.Table("pages", key=perco.TEXT)
        self.text = self.pages.column("text", perco.TEXT)
        self.postings = perco.Table("postings", key=perco.Tuple(perco.TEXT, perco.TEXT))
        self.n = self.postings.column("n", perco.INT64)
        self.note = self.postings.column("note", perco.TEXT)  # of the program's own
        self.words = perco.Table("words", key=perco.TEXT)
        self.total = self.words.column("total", perco.INT64)
        self.shelf = views.Views(perco.Schema(self.pages, self.postings, self.words))
        self.schema = self.shelf.schema
        if index:

            @self.shelf.each(self.text, id="index", into=self.n)
            def of_page(page: perco.Row[str]) -> Iterator[views.Put[Any]]:
                for word, n in Counter((page[self.text] or "").split()).items():
                    yield views.Put(self.postings, (word, page.key), {self.n: n})

        if totals:

            @self.shelf.group(self.n, id="totals", by=views.prefix(1), into=self.words, keep=[views.sum(self.n)])
            def of_word(word: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
                yield views.Put(self.words, word, {self.total: rows.sum(self.n)})


async def schema_in(local: LocalStore) -> perco.Schema:
    """The schema that a store has recorded."""
    async with client(local, perco.Schema(), backfilled=False) as db:
        return schema_of(inside(db).catalogue)


async def visible(local: LocalStore) -> dict[str, dict[Any, dict[str, Any]]]:
    """All that a store has, hidden columns included, by table."""
    schema, found = await schema_in(local), {}
    async with client(local, schema) as db, db.snapshot() as snap:
        for name, table in schema.tables.items():
            columns = [*table.columns.values(), *table.hidden.values()]
            if columns:
                found[name] = {row.key: row.values() async for row in snap.scan(table, columns=columns)}
    return {name: rows for name, rows in found.items() if rows}


async def test_a_view_that_is_not_declared_any_more_is_dropped_beside_its_readers() -> None:  # V15, N12
    local, both, one = memory(), Site(), Site(index=False)
    async with client(local, both.schema) as db, db.worker():
        await put(db, both.text, "a", "sun sun moon")
        await put(db, both.text, "b", "sun")
        await settle(db)
        await put(db, both.note, ("sun", "a"), "mine")
        await put(db, both.n, ("stray", "a"), 5)  # no owner gave it
        await settle(db)
    async with client(local, one.schema) as db, db.worker():
        await put(db, one.text, "c", "sun")
        plan = await views.would_drop(one.shelf, db, "index")
        assert (plan.observers, plan.owners, plan.rows, plan.changes) == (("index: text",), 2, {"postings": 3}, 1)
        assert await get(db, one.total, "sun") == 3, "nothing is dropped yet"
        dropped = await views.drop(one.shelf, db, "index")
        assert (dropped.owners, dropped.rows, dropped.changes) == (2, {"postings": 3}, 1)
        await db.wait_for(await inside(db).oracle.newest(), views="totals", timeout=LONG_S)
        assert await get(db, one.total, "sun") is None
        await settle(db)
        again = await views.drop(one.shelf, db, "index")
        assert (again.observers, again.owners, again.rows, again.changes) == ((), 0, {}, 0)
        with pytest.raises(perco.UsageError, match="does not have view 'none'; the program declares 'totals'"):
            await views.drop(one.shelf, db, "none")
    left = await visible(local)
    assert left["words"].keys() == {"stray"}, "that row is still a source of the other view"
    assert left["pages"].keys() == {"a", "b", "c"}
    assert all(values.keys() == {"text"} for values in left["pages"].values())
    rows = {key: {name: values[name] for name in values if name[:1] != "_"} for key, values in left["postings"].items()}
    assert rows == {("sun", "a"): {"note": "mine"}, ("stray", "a"): {"n": 5}}
    assert "_owner index" not in str(left)


@pytest.mark.parametrize("part", ["members", "rights", "sides"])
async def test_a_table_of_another_program_that_has_the_name_of_a_views_part_is_left(part: str) -> None:  # V15
    local, site = memory(), Site(totals=False)
    table = perco.Table(f"index.{part}", key=perco.TEXT)
    name = table.column("name", perco.TEXT)
    async with client(local, perco.Schema(table)) as db:
        await put(db, name, "a", "mine")
    async with client(local, site.schema) as db, db.worker():
        await put(db, site.text, "a", "sun")
        await settle(db)
    async with client(local, await schema_in(local)) as db:
        assert (await views.would_drop(site.shelf, db, "index")).kept == 1  # the owner's mark of its row
        await views.drop(site.shelf, db, "index")
    assert await visible(local) == {f"index.{part}": {"a": {"name": "mine"}}, "pages": {"a": {"text": "sun"}}}


async def test_a_dropped_view_that_is_declared_again_is_built_again() -> None:  # V15, N10
    local, both = memory(), Site()
    async with client(local, both.schema) as db:
        async with db.worker():
            await put(db, both.text, "a", "sun sun")
            await settle(db)
            with pytest.raises(perco.UsageError, match=r"a process runs observer 'totals.members: n'"):
                await views.drop(both.shelf, db, "totals")
        await views.drop(both.shelf, db, "totals")
        with pytest.raises(perco.UsageError, match="does not have view 'totals': it has been dropped"):
            await db.freshness("totals")
        with pytest.raises(perco.errors.SchemaMismatch, match="If they were dropped since"):
            async with db.worker():
                pass
    assert set(await visible(local)) == {"pages", "postings"}
    again = Site()
    async with client(local, again.schema) as db, db.worker():
        await settle(db)
        assert await get(db, again.total, "sun") == 2
        await put(db, again.text, "b", "sun")
        await settle(db)
        assert await get(db, again.total, "sun") == 3


async def test_a_column_that_another_view_writes_now_is_left() -> None:  # V15
    local, old = memory(), Site(totals=False)
    async with client(local, old.schema) as db, db.worker():
        await put(db, old.text, "a", "sun")
        await settle(db)
    new = Site(index=False, totals=False)

    @new.shelf.each(new.text, id="other", into=new.n)
    def other(page: perco.Row[str]) -> Iterator[views.Put[Any]]:
        yield views.Put(new.postings, ("sun", page.key), {new.n: 7})

    async with client(local, new.schema) as db, db.worker():
        await db.wait_for(await inside(db).oracle.newest(), views="other", timeout=LONG_S)
        await views.drop(new.shelf, db, "index")
        assert await get(db, new.n, ("sun", "a")) == 7
        await settle(db)


async def test_an_owner_of_many_rows_is_retracted_in_transactions_of_a_bounded_size(  # V15
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dropping, "_CELLS_MAX", 20)
    local, site = memory(), Site(totals=False)
    async with client(local, site.schema) as db:
        async with db.worker():
            await put(db, site.text, "a", " ".join(f"w{i}" for i in range(100)))
            await settle(db)
        before = inside(db).oracle.last
        assert (await views.drop(site.shelf, db, "index")).rows == {"postings": 100}
        async with db.snapshot() as snap:
            assert [row async for row in snap.scan(site.postings)] == []
        assert inside(db).oracle.last - before > 10, "several transactions"


async def test_a_name_like_that_of_a_view_protects_no_less() -> None:  # V15
    """A table and an observer of the program have names that begin like the view's."""
    local, site = memory(), Site()
    table = perco.Table("totals.members of mine", key=perco.TEXT)
    mine = table.column("mine", perco.INT64)
    site.schema.tables[table.name] = table
    calls = []

    @site.schema.observe(mine, id="totals: of mine")
    async def observe(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
        calls.append(change.key)

    async with client(local, site.schema) as db:
        await put(db, mine, "a", 1)
        await views.drop(views.Views(perco.Schema()), db, "totals")
        assert {state.id for state in await db.observers()} == {"index: text", "totals: of mine"}
        assert await get(db, mine, "a") == 1


@pytest.mark.parametrize("seed", range(12))
async def test_whoever_dies_nothing_is_left_of_views_that_are_dropped(seed: int) -> None:  # V15
    graph, rng, state = Graph(seed), random.Random(f"{seed} dropped"), State()
    local = memory()
    async with client(local, graph.views.schema) as db:
        async with db.worker():
            for _ in range(20):
                await write(db, graph.changes(rng, state))
            await settle(db)
        for _ in range(3):  # these wait
            await write(db, graph.changes(rng, state))
    names = list(graph.views.declared)
    rng.shuffle(names)
    nothing = views.Views(perco.Schema())
    for name in names:
        for _ in range(3):
            store = StoppingStore(local.store, backwards=rng.random() < 0.5)
            store.left = rng.randrange(1, 40)
            schema = await schema_in(local)
            with contextlib.suppress(StoppedError, BaseExceptionGroup, perco.errors.BackgroundFailure):
                async with client(local, schema, store=store, backfilled=False) as db:
                    await views.drop(nothing, db, name)
        async with client(local, await schema_in(local)) as db:
            await views.drop(nothing, db, name)
    left = await visible(local)
    assert set(left) <= {"left", "right", "shout.results"}
    assert {name for rows in left.values() for values in rows.values() for name in values} <= {"n", "x", "s", "value"}
    async with client(local, await schema_in(local)) as db:
        assert await db.wait_idle(timeout=LONG_S) == 0
        assert await db.observers() == []
    async with client(local, graph.views.schema) as db, db.worker():
        await settle(db)
        await check_equal(db, graph.views, state)


async def test_beside_writers_a_view_that_reads_a_dropped_one_ends_as_its_definition_says() -> None:  # V15, V7
    local, both, one = memory(), Site(), Site(index=False)
    async with client(local, both.schema) as db, db.worker():
        for i in range(60):
            await put(db, both.text, f"page {i}", f"sun w{i % 7}")
        await settle(db)
    async with client(local, one.schema) as db, db.worker():
        done = False

        async def writes() -> None:
            number = 0
            while not done:
                number += 1
                await put(db, one.n, ("moon", str(number % 10)), number)
                await put(db, one.text, f"page {number % 60}", "sun")
                await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(writes)
            await views.drop(one.shelf, db, "index")
            done = True
        await settle(db)
        async with db.snapshot() as snap:
            assert {row.key: row[one.total] async for row in snap.scan(one.words)}.keys() <= {"moon"}
            assert (await views.check(one.shelf, snap)).equal
