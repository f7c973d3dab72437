"""Rebuilds and comparisons of views: a rebuild makes tables equal to the definition, from any contents."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import trio

import perco
from perco import views
from perco.errors import RolledBack
from perco.views import rebuilding
from perco.views.compiled import Components, Each, Grouped, Joined, View
from tests.component.notify.kit import OPTIONS, client, get, memory, put, settle
from tests.component.notify.test_views import Library, changed, rows
from tests.support.graphs import Graph, State, check_equal, write


@pytest.fixture
def library() -> Library:
    return Library()


def hidden_columns(view: View) -> list[perco.Column[Any, Any]]:
    """All columns in which a view keeps what is its own."""
    found: list[perco.Column[Any, Any]] = [view.memory, *view.owned.values()]
    if isinstance(view, Grouped):
        found += [view.kept, *view.orders.values()]
        found += [] if view.deltas is None else [view.deltas]
    elif isinstance(view, Joined) and view.lefts is not None:
        found.append(view.lefts.left)
    if isinstance(view, Components):
        found += [view.sides, view.copier.memory]
    if isinstance(view, Grouped | Joined) and isinstance(view.copier, Each):
        copies = view.copier.copies
        assert copies is not None
        found += [*copies.columns.values(), view.copier.memory]
    return found


async def damage(db: perco.Database, rng: random.Random, column: perco.Column[Any, Any], foreign: bool) -> bool:
    """Delete a cell, or put another cell's value there, or a value into a row that has none."""
    async with db.snapshot() as snap:
        cells = {row.key: row[column] async for row in snap.scan(column.table, columns=[column])}
    if not cells:
        return False
    key = rng.choice(sorted(cells))
    value = rng.choice([None, *([rng.choice(list(cells.values()))] if foreign else [])])
    if foreign and isinstance(key, tuple) and rng.random() < 0.3:
        key = (*key[:-1], "stray") if isinstance(key[-1], str) else key
    await put(db, column, key, value)
    return True


@pytest.mark.parametrize("seed", range(24))
async def test_a_rebuild_mends_whatever_was_broken(seed: int) -> None:  # V1, V7
    graph, rng, state = Graph(seed), random.Random(seed), State()
    async with client(memory(), graph.views.schema) as db:
        async with db.worker():
            for _ in range(20):
                await write(db, graph.changes(rng, state))
            await settle(db)
        broken = 0
        for view in graph.views.declared.values():
            written = [column for columns in view.outputs.values() for column in columns]
            for column in rng.choices(written, k=6):
                broken += await damage(db, rng, column, foreign=True)
            for column in rng.choices(hidden_columns(view), k=6):
                # A memory, a mark or kept aggregates of another owner would not be damage, but a lie.
                broken += await damage(
                    db, rng, column, foreign=column.table not in view.outputs and column.codec != perco.BYTES
                )
        assert broken or not any(state.values())
        await views.rebuild(graph.views, db)
        async with db.worker():
            await settle(db)
            await check_equal(db, graph.views, state)
            async with db.snapshot() as snap:
                assert all(each.equal for each in await views.diff(graph.views, snap))
            assert [(each.mended, each.strays) for each in await views.rebuild(graph.views, db)] == [
                (0, 0) for _ in graph.views.declared
            ]
            for _ in range(15):  # and the data kept for later changes is right, too
                await write(db, graph.changes(rng, state))
            await settle(db)
            await check_equal(db, graph.views, state)
            for table in state.values():
                for key, values in table.items():
                    await write(db, [(column, key, None) for column in values])
                table.clear()
            await settle(db)
            await check_equal(db, graph.views, state)


@pytest.mark.parametrize("seed", range(12))
async def test_a_rebuild_beside_writers_and_workers_loses_nothing(seed: int) -> None:  # V2
    graph, rng, state = Graph(seed), random.Random(seed), State()
    async with client(memory(), graph.views.schema) as db, db.worker():
        for _ in range(10):
            await write(db, graph.changes(rng, state))

        async def change() -> None:
            for _ in range(20):
                await write(db, graph.changes(rng, state))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            for _ in range(4):
                await views.rebuild(graph.views, db)
        await settle(db)
        await check_equal(db, graph.views, state)


async def test_a_rebuild_conflicts_with_a_change_of_what_it_has_read(library: Library) -> None:  # V2
    library.index()
    view = library.views.declared["index"]
    async with perco.open("memory:", library.schema, options=OPTIONS) as db:
        await put(db, library.body, "a", "one")
        txn = await db.begin()
        assert await rebuilding._mend(txn, view, "a")
        await put(db, library.body, "a", "two")
        with pytest.raises(perco.WriteConflict):
            await txn.commit()


async def test_a_rebuild_writes_only_what_differs_and_tells_who_reads_it(library: Library) -> None:
    library.index()
    library.totals()
    async with client(memory(), library.schema) as db, db.worker():
        for key, text in {"a": "x y", "b": "y z"}.items():
            await put(db, library.body, key, text)
        await settle(db)
        before = await rows(db, library.words)
        await put(db, library.n, ("y", "a"), 5)
        await settle(db)
        assert await get(db, library.total, "y") == 6
        told: list[views.Rebuilt] = []
        [done] = await views.rebuild(library.views, db, "index", progress=told.append)
        assert (done.view, done.owners, done.mended, done.strays) == ("index", 2, 1, 0)
        assert told == [done]
        await settle(db)
        assert await rows(db, library.words) == before
        with pytest.raises(perco.UsageError, match="view 'no' is not declared; there are: 'index', 'totals'"):
            await views.rebuild(library.views, db, "no")


async def test_a_rebuild_counts_each_owner_once(library: Library) -> None:
    library.index()
    library.totals()
    async with client(memory(), library.schema) as db, db.worker():
        for number in range(40):
            await put(db, library.body, f"d{number}", f"w{number} all")
        await settle(db)
        for number in range(40):
            await put(db, library.total, f"w{number}", 7)
        await put(db, library.total, "stray", 7)
        index, totals = await views.rebuild(library.views, db)
        assert (index.owners, index.mended, index.strays) == (40, 0, 0)
        assert (totals.owners, totals.mended, totals.strays) == (41, 40, 1)


async def test_a_rebuild_of_rows_that_two_owners_give_says_so(library: Library) -> None:  # V5
    @library.views.each(library.body, id="v", into=library.words)
    def give(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        yield views.Put(library.words, "same", {library.total: 1})

    async with client(memory(), library.schema) as db:
        for key in "ab":
            await put(db, library.body, key, "x")
        with pytest.raises(perco.UsageError, match="a row has one owner"):
            await views.rebuild(library.views, db)


# ------------------------------------------------------------ diff


async def filled(db: perco.Database, library: Library) -> None:
    for key, (author, text) in {"a": ("ann", "x y"), "b": ("bob", "y"), "c": ("bea", "z")}.items():
        await write(db, [(library.author, key, author), (library.body, key, text)])
    await settle(db)


async def test_a_diff_finds_runs_that_would_fail(library: Library) -> None:
    made = Library()

    @made.views.each(made.body, id="same", into=made.words)
    def same(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        yield views.Put(made.words, "same", {made.total: 1})

    @made.views.group(made.author, id="few", by=lambda row: row[made.author], into=made.authors, members_max=1)
    def few(author: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
        yield views.Put(made.authors, author, {made.wrote: 1})

    note = made.docs.column("note", perco.TEXT)

    @made.views.group(
        made.body, id="long", by=lambda row: "all", into=note, key=perco.TEXT, keep=[views.largest(made.body)]
    )
    def long(group: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
        yield views.Put(made.docs, group, {note: "x"})

    async with client(memory(), made.schema) as db:
        for key in "ab":
            await write(db, [(made.body, key, "x" * 500), (made.author, key, "ann")])
        async with db.snapshot() as snap:
            found = {each.view: each for each in await views.diff(made.views, snap)}
    assert (found["same"].added, found["same"].failed) == (1, 1)
    assert "words['same'] is given for another owner, too" in str(found["same"].failures[0].error)
    assert "it has 2 members (members_max)" in str(found["few"].failures[0].error)
    assert found["long"].failed == 2
    assert "over the limit of 400 bytes" in str(found["long"].failures[0].error)


async def test_a_diff_does_not_take_what_a_new_view_gives_for_strays(library: Library) -> None:
    library.index()
    async with client(memory(), library.schema) as db:
        await put(db, library.body, "a", "x y")
        await put(db, library.n, ("x", "a"), 1)  # as the view will give it
        await put(db, library.n, ("y", "a"), 5)
        await put(db, library.n, ("z", "a"), 5)
        async with db.snapshot() as snap:
            [found] = await views.diff(library.views, snap)
    assert (found.same, found.added, found.changed, found.removed, found.strays) == (1, 0, 1, 0, 1)


async def test_a_rebuild_tells_which_call_has_failed(library: Library) -> None:
    @library.views.each(library.body, id="v", into=library.words)
    def give(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        raise ValueError("no")

    async with client(memory(), library.schema) as db:
        await put(db, library.body, "a", "x")
        with pytest.raises(ValueError, match="no") as raised:
            await views.rebuild(library.views, db)
    assert raised.value.__notes__ == ["view 'v', for docs['a']"]


async def test_a_rebuild_comes_back_to_what_conflicts_all_the_time(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.index()
    right, left = rebuilding._mend, 3

    async def mend(txn: Any, view: Any, owner: Any) -> bool:
        nonlocal left
        if owner == "a" and left:
            left -= 1
            raise RolledBack("busy")
        return await right(txn, view, owner)

    monkeypatch.setattr(rebuilding, "_mend", mend)
    options = replace(OPTIONS, retry=perco.options.RetryOptions(attempts=1))
    async with perco.open("memory:", library.schema, options=options) as db:
        for key in "abc":
            await put(db, library.body, key, key)
        [done] = await views.rebuild(library.views, db)
        assert (done.owners, left) == (3, 0)
        assert len(await rows(db, library.postings)) == 3


async def test_a_diff_counts_failures_and_goes_on() -> None:
    old = changed(1)
    async with client(memory(), old.schema) as db, db.worker():
        await filled(db, old)
        await write(db, [(old.author, "d", "!x")])
        async with db.snapshot() as snap:
            _, authors, _ = await views.diff(old.views, snap)
    assert (authors.owners, authors.failed, authors.equal) == (2, 1, False)
    [failure] = authors.failures
    assert (failure.owner, str(failure.error)) == ("!", "no author")


async def test_a_diff_finds_strays_and_what_is_another_owners(library: Library) -> None:
    library.index()
    async with client(memory(), library.schema) as db, db.worker():
        await put(db, library.body, "a", "x y")
        await put(db, library.body, "b", "y")
        await settle(db)
        await put(db, library.n, ("q", "a"), 1)
        async with db.snapshot() as snap:
            [index] = await views.diff(library.views, snap)
            assert (index.removed, index.strays, index.same, index.equal) == (0, 1, 3, False)
            assert index.differences[0] == views.Difference("index", "postings", ("q", "a"), {}, {"n": 1}, None)
        [done] = await views.rebuild(library.views, db)
        assert (done.mended, done.strays) == (0, 1)
        assert await get(db, library.n, ("q", "a")) is None


async def test_a_sample_is_a_part_of_the_owners_the_same_each_time() -> None:
    old = changed(1)
    async with client(memory(), old.schema) as db, db.worker():
        for number in range(60):
            await write(db, [(old.body, f"d{number}", "x y"), (old.author, f"d{number}", chr(65 + number))])
        await settle(db)
        async with db.snapshot() as snap:
            first = await views.diff(old.views, snap, sample=0.3)
            assert first == await views.diff(old.views, snap, sample=0.3)
            assert all(5 <= each.owners <= 35 and each.equal for each in first)
            assert [each.same for each in first] == [2 * first[0].owners, first[1].owners, first[2].owners]
            for wrong in (0, 1.5, True, "a"):
                with pytest.raises(perco.UsageError, match="sample is a part"):
                    await views.diff(old.views, snap, sample=wrong)  # type: ignore[arg-type]
