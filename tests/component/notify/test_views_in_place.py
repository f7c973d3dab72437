"""Views that read their source rows in place, and runs that tell such views of their changes themselves (V12)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import perco
from perco import views
from perco.check.check import CheckOptions, check as check_store
from perco.errors import TooLarge
from perco.views import running
from perco.views.compiled import Each, Joined, Teller
from tests.component.notify.kit import OPTIONS, client, get, memory, put, settle
from tests.component.notify.test_views import Library, change, in_transaction, overlapped, rows
from tests.support.places import local_of


@pytest.fixture
def library() -> Library:
    return Library()


def whole(version: int = 1) -> Library:
    """Words, and their totals over all members in place."""
    made = Library()
    made.index()
    made.totals(keep=False, version=version)
    return made


def by_function(version: int) -> Library:
    """Totals by the words' first letter."""
    made = Library()
    made.index()

    @made.views.group(made.n, id="totals", by=lambda row: row.key[0][:1], into=made.words, version=version)
    def totals(letter: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
        yield views.Put(made.words, letter, {made.total: rows.sum(made.n)})

    return made


async def check(db: perco.Database, library: Library) -> None:
    async with db.snapshot() as snap:
        found = await views.check(library.views, snap)
    assert found.equal, found.differences


async def index(db: perco.Database, library: Library, key: str) -> None:
    """One run of the view `index`, and no other."""
    view = library.views.declared["index"]
    assert isinstance(view, Each)
    await in_transaction(db, lambda txn: running.run_each(view, txn, change(key)))


# ------------------------------------------------------------ telling


async def test_a_run_tells_the_readers_itself() -> None:  # V12
    library = whole()
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, library.body, "a", "x y x")
        await put(db, library.body, "b", "x")
        await settle(db)
        assert await get(db, library.total, "x") == 3
        await put(db, library.body, "a", "y")
        await settle(db)
        assert (await get(db, library.total, "x"), await get(db, library.total, "y")) == (1, 1)
        await put(db, library.body, "b", None)
        await settle(db)
        assert await get(db, library.total, "x") is None
        assert worker.statistics()["totals.members: n"].commits == 0
        await put(db, library.n, ("z", "by hand"), 5)  # of other writers, the observer learns
        await settle(db)
        assert await get(db, library.total, "z") == 5
        assert worker.statistics()["totals.members: n"].commits == 1
        result = await check_store(local_of(db).store, options=CheckOptions(pause_s=0.0))
        assert result.clean, result.findings  # nothing is missing where a run has told the reader itself


async def test_other_observers_of_the_same_column_are_notified(library: Library) -> None:  # V12
    library.index()
    seen: list[Any] = []

    @library.schema.observe(library.n, id="mine")
    async def mine(txn: perco.Transaction, found: perco.Change[Any, Any]) -> None:
        seen.append(found.key)

    library.totals(keep=False)
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, library.body, "a", "x")
        await settle(db)
        assert (seen, worker.statistics()["totals.members: n"].commits) == ([("x", "a")], 0)


async def test_many_rows_are_left_to_the_observer(monkeypatch: pytest.MonkeyPatch) -> None:  # V12
    monkeypatch.setattr(running, "_TOLD_MAX", 2)
    library = whole()
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, library.body, "a", "x y")
        await settle(db)
        assert worker.statistics()["totals.members: n"].commits == 0
        await put(db, library.body, "b", "x y z")
        await settle(db)
        assert worker.statistics()["totals.members: n"].commits == 3
        await check(db, library)


async def test_a_paused_reader_is_not_told() -> None:  # V12
    library = whole()
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        await put(db, library.body, "a", "x")
        await settle(db)
        await db.pause("totals.members: n")
        await put(db, library.body, "b", "x")
        with pytest.raises(perco.UsageError, match="paused"):
            await db.wait_idle()
        assert await get(db, library.total, "x") == 1
        await db.resume("totals.members: n")
        await settle(db)
        assert await get(db, library.total, "x") == 2


async def test_a_reader_of_another_version_is_notified() -> None:  # V12, N10
    old, new = whole(), by_function(2)
    async with client(memory(), old.schema) as first:
        async with first.worker():
            await put(first, old.body, "a", "xa xb")
            await settle(first)
        local = local_of(first)
        async with client(local, new.schema) as second, second.worker():
            await settle(second)
            await check(second, new)
        async with client(local, old.schema) as third:
            await put(third, old.body, "b", "xa ya")
            await index(third, old, "b")  # a program of the old version: it must not tell in the new one's place
        async with client(local, new.schema) as fourth, fourth.worker():
            await settle(fourth)
            assert await get(fourth, new.total, "x") == 3
            await check(fourth, new)


async def test_a_reader_that_is_declared_later_gets_what_is_there(library: Library) -> None:  # N10
    library.index()
    async with client(memory(), library.schema) as first:
        await put(first, library.body, "a", "x y")
        await index(first, library, "a")
        after = whole()
        async with client(local_of(first), after.schema, beside=first) as second:
            await put(first, library.body, "b", "x")
            await index(first, library, "b")  # by a program that does not know the reader
            async with second.worker():
                await settle(second)
                assert await get(second, after.total, "x") == 2
                await check(second, after)


# ------------------------------------------------------------ versions


@pytest.mark.parametrize("seen", [False, True])
async def test_a_prefix_becomes_a_function(seen: bool) -> None:  # V3, N10
    old, new = whole(), by_function(2)
    async with client(memory(), old.schema) as first:
        async with first.worker():
            await put(first, old.body, "a", "xa xb")
            await put(first, old.body, "b", "xb")
            await settle(first)
            assert await get(first, old.total, "xb") == 2
        async with client(local_of(first), new.schema, backfilled=False) as db:
            if not seen:  # a row that is gone before the new version has looked at it
                await put(db, new.body, "b", None)
                await index(db, new, "b")
            async with db.worker():
                await db.backfill()
                await settle(db)
                assert await get(db, new.total, "x") == (3 if seen else 2)
                assert await get(db, new.total, "xb") is None
                await check(db, new)


async def test_a_function_becomes_a_prefix() -> None:  # V3, N10
    old, new = by_function(1), whole(2)
    async with client(memory(), old.schema) as first:
        async with first.worker():
            await put(first, old.body, "a", "xa xb")
            await settle(first)
            assert len(await rows(first, old.schema.tables["totals.members"])) == 2
        async with client(local_of(first), new.schema) as db, db.worker():
            await settle(db)
            assert await get(db, new.total, "x") is None
            await check(db, new)
            assert await rows(db, new.schema.tables["totals.members"]) == {}


async def test_a_row_with_copies_to_remove_is_left_to_the_observer() -> None:  # V12
    old, new = by_function(1), whole(2)
    async with client(memory(), old.schema) as first:
        async with first.worker():
            await put(first, old.body, "a", "xa")
            await put(first, old.body, "b", "ya")
            await settle(first)
        async with client(local_of(first), new.schema, backfilled=False) as db:
            await put(db, new.body, "a", None)
            await index(db, new, "a")  # the row is gone before anything else of the new version has run
            assert (await db.waiting())["totals.members: n"] == 1  # the backfill may come too late to see it
            async with db.worker():
                await db.backfill()
                await settle(db)
                assert await get(db, new.total, "x") is None
                await check(db, new)
                assert await rows(db, new.schema.tables["totals.members"]) == {}


# ------------------------------------------------------------ the first members of a group


async def test_a_group_of_which_only_the_first_members_are_read(library: Library) -> None:
    @library.views.group(library.n, id="firsts", by=views.prefix(1), into=library.words, first=2)
    def firsts(word: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
        yield views.Put(library.words, word, {library.total: rows.sum(library.n)})

    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        for key, n in {"b": 1, "c": 10, "d": 100}.items():
            await put(db, library.n, ("x", key), n)
        await settle(db)
        assert await get(db, library.total, "x") == 11
        await put(db, library.n, ("x", "a"), 1000)
        await settle(db)
        assert await get(db, library.total, "x") == 1001
        await put(db, library.n, ("x", "b"), None)
        await settle(db)
        assert await get(db, library.total, "x") == 1010
        await check(db, library)


def test_first_is_a_number_of_rows(library: Library) -> None:
    for wrong in ({"first": 0}, {"first": 2, "keep": [views.count()]}):
        with pytest.raises(perco.UsageError, match="first"):
            library.views.group(library.n, id="v", by=views.prefix(1), into=library.words, **wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------ joins by the keys of both sides


def lives(library: Library, **how: Any) -> Joined:
    """Each word with what is known of the author of this name."""

    @library.views.join(library.total, library.wrote, id="lives", into=library.postings, **how)
    def life(word: perco.Row[str], author: perco.Row[str] | None) -> Iterator[views.Put[Any]]:
        library.calls["lives"] += 1
        known = -1 if author is None else author[library.wrote]
        yield views.Put(library.postings, ("life", word.key), {library.n: (word[library.total] or 0) + (known or 0)})

    found = library.views.declared["lives"]
    assert isinstance(found, Joined)
    return found


@pytest.mark.parametrize("how", ["inner", "left"])
async def test_a_join_by_the_keys_of_both_sides(library: Library, how: Any) -> None:  # V8
    lives(library, how=how)
    assert set(library.schema.tables) == {"docs", "postings", "words", "authors"}  # none of its own
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        await put(db, library.wrote, "ann", 5)  # nobody has run for its left row, which is not there
        await settle(db)
        assert library.calls["lives"] == 0
        for column, value, expected in (
            (library.total, 1, 6),
            (library.wrote, 7, 8),
            (library.total, 2, 9),
            (library.wrote, None, None if how == "inner" else 1),
            (library.wrote, 3, 5),
            (library.total, None, None),
        ):
            await put(db, column, "ann", value)
            await settle(db)
            assert await get(db, library.n, ("life", "ann")) == expected
            await check(db, library)


async def test_left_and_right_rows_may_come_at_once(library: Library) -> None:  # V8
    view = lives(library)
    rights = view.copier
    assert isinstance(rights, Teller)
    async with client(memory(), library.schema) as db:
        await put(db, library.total, "ann", 1)

        async def left(txn: perco.Transaction) -> None:
            await running.run_each(view, txn, change("ann"))

        async def right(txn: perco.Transaction) -> None:
            txn.set(library.wrote, "ann", 5)
            await running.run_teller(rights, txn, change("ann"))

        with pytest.raises(perco.TransientError):
            await overlapped(db, left, lambda: in_transaction(db, right))
        async with db.worker():
            await settle(db)
        assert await get(db, library.n, ("life", "ann")) == 6


async def test_a_join_gets_another_key(library: Library) -> None:  # N10
    def joined(version: int, **how: Any) -> Library:
        made = Library()
        lives(made, version=version, how="left", **how)
        return made

    by_first = {"on": lambda row: row.key[:1]}
    local = memory()
    for version, how in enumerate(
        ({}, by_first, {}, {**by_first, "to": lambda row: row.key[-1:], "key": perco.TEXT}), 1
    ):
        made = joined(version, **how)
        async with client(local, made.schema) as db, db.worker():
            await put(db, made.total, "ann", version)
            await put(db, made.wrote, "a", 10 * version)
            await settle(db)
            await check(db, made)
            local = local_of(db)


def test_keys_of_both_sides_must_be_of_one_kind(library: Library) -> None:
    with pytest.raises(perco.UsageError, match="which key a left row has"):
        library.views.join(library.n, library.wrote, id="v", into=library.words)


# ------------------------------------------------------------ columns that have not changed


async def test_only_columns_that_have_changed_are_written(library: Library) -> None:  # V6
    library.index()
    library.totals(keep=False)
    runs = 0

    @library.schema.observe(library.top, id="top")
    async def top(txn: perco.Transaction, found: perco.Change[Any, Any]) -> None:
        nonlocal runs
        runs += 1

    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        for key, body in {"a": "x x x", "b": "x x", "c": "x"}.items():
            await put(db, library.body, key, body)
        await settle(db)
        before = runs
        await put(db, library.body, "d", "x")  # the total changes, and the two largest stay
        await settle(db)
        assert (await get(db, library.total, "x"), runs) == (7, before)
        await put(db, library.body, "d", "x x x x")
        await settle(db)
        assert (await get(db, library.total, "x"), runs) == (10, before + 1)


def test_views_in_place_need_no_tables_of_their_own() -> None:
    assert set(whole().schema.tables) == {"docs", "postings", "words", "authors"}


# ------------------------------------------------------------ what a run must not do


async def test_a_run_that_has_conflicted_leaves_the_telling_to_the_observer() -> None:  # V12
    library = whole()
    view = library.views.declared["index"]
    assert isinstance(view, Each)
    async with client(memory(), library.schema) as db:
        for key, attempt in (("a", 1), ("b", 2)):
            await put(db, library.body, key, key)
            again = replace(change(key), attempt=attempt)
            await in_transaction(db, lambda txn, again=again: running.run_each(view, txn, again))  # type: ignore[misc]
            async with db.worker() as worker:
                await settle(db)
                assert worker.statistics()["totals.members: n"].commits == attempt - 1


async def test_a_long_run_and_many_runs_of_its_readers_both_commit(library: Library) -> None:  # V12, V8
    """Each run of a left row would make the run that has told the left rows of its key run again."""

    @library.views.each(library.body, id="slow", into=library.authors)
    def slow(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        yield views.Put(library.authors, "all", {library.wrote: doc[library.body]})

    @library.views.join(library.total, library.wrote, id="lives", on=lambda word: "all", into=library.postings)
    def life(word: perco.Row[str], author: perco.Row[str] | None) -> Iterator[views.Put[Any]]:
        assert author is not None
        yield views.Put(library.postings, ("life", word.key), {library.n: len(author[library.wrote])})

    writer, reader = library.views.declared["slow"], library.views.declared["lives"]
    assert isinstance(writer, Each)
    assert isinstance(reader, Joined)
    async with client(memory(), library.schema) as db:
        await put(db, library.total, "x", 1)
        await put(db, library.body, "a", "abc")

        async def left() -> None:
            await in_transaction(db, lambda txn: running.run_each(reader, txn, change("x")))

        first, second = (replace(change("a"), attempt=attempt) for attempt in (1, 2))
        with pytest.raises(perco.TransientError):
            await overlapped(db, lambda txn: running.run_each(writer, txn, first), left)
        await overlapped(db, lambda txn: running.run_each(writer, txn, second), left)
        async with db.worker():
            await settle(db)
        assert await get(db, library.n, ("life", "x")) == 3


async def test_a_run_near_the_limit_of_cells_leaves_the_telling_to_the_observer() -> None:  # V12
    library = whole()
    limits = replace(OPTIONS, transaction=perco.options.TransactionOptions(cells_max=100))
    async with client(memory(), library.schema, options=limits) as db:
        await put(db, library.body, "a", "x y")
        await index(db, library, "a")
        assert (await db.waiting()).get("totals.members: n", 0) == 0
        await put(db, library.body, "b", " ".join(f"w{number}" for number in range(45)))
        await index(db, library, "b")
        async with db.worker() as worker:
            await settle(db)
            assert worker.statistics()["totals.members: n"].commits == 45


async def test_members_that_were_read_in_place_are_copied_under_a_lock() -> None:  # V2, V4
    old, new = whole(), Library()
    new.index()
    view = new.totals(version=2)
    async with client(memory(), old.schema) as first:
        async with first.worker():
            for key, n in {"a": 2, "b": 10}.items():
                await put(first, old.n, ("x", key), n)
            await settle(first)
        async with client(local_of(first), new.schema, backfilled=False) as db:
            copier = view.copier
            assert isinstance(copier, Each)

            async def gone() -> None:
                await put(db, new.n, ("x", "b"), None)
                await in_transaction(db, lambda txn: running.run_each(copier, txn, change(("x", "b"))))

            with pytest.raises(perco.TransientError):
                await overlapped(db, lambda txn: running.run_group(view, txn, change("x")), gone)
            async with db.worker():
                await db.backfill()
                await settle(db)
                assert await get(db, new.total, "x") == 2


# ------------------------------------------------------------ declarations and comparisons


def test_keys_of_many_parts_get_another_version() -> None:
    for version in (1, 2):
        key = perco.Tuple(*[perco.TEXT] * 5)
        left, right, out = (perco.Table(name, key=key) for name in ("left", "right", "out"))
        a, b, c = (table.column("v", perco.INT64) for table in (left, right, out))
        made = views.Views(perco.Schema(left, right, out))

        @made.join(a, b, id="v", into=out, version=version)
        def give(one: perco.Row[Any], other: perco.Row[Any] | None, out: Any = out, c: Any = c) -> Any:
            return [views.Put(out, one.key, {c: 1})]

        assert set(made.declared) == {"v"}


async def test_a_diff_looks_at_the_first_members_only(library: Library) -> None:
    @library.views.group(library.n, id="firsts", by=views.prefix(1), into=library.words, first=2, members_max=3)
    def firsts(word: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
        yield views.Put(library.words, word, {library.total: rows.sum(library.n)})

    async with client(memory(), library.schema) as db, db.worker():
        for number in range(6):
            await put(db, library.n, ("x", str(number)), number)
        await settle(db)
        async with db.snapshot() as snap:
            [found] = await views.diff(library.views, snap)
    assert (found.same, found.failed) == (1, 0)


async def test_a_join_key_that_is_too_long_is_found_before_it_is_deployed(library: Library) -> None:
    @library.views.join(library.author, library.wrote, id="v", on=lambda doc: doc[library.author], into=library.words)
    def give(doc: perco.Row[str], author: perco.Row[str] | None) -> Iterator[views.Put[Any]]:
        yield views.Put(library.words, doc.key, {library.total: 1})

    with pytest.raises(TooLarge):
        library.views.build({library.docs: {"a": {library.author: "x" * 401}}})
    async with client(memory(), library.schema) as db:
        await put(db, library.author, "a", "x" * 399)  # it would fit alone, but not with the left row's key
        async with db.snapshot() as snap:
            [found] = await views.diff(library.views, snap)
    assert (found.added, found.failed) == (0, 1)


@pytest.mark.parametrize("values", [("1", "2", None), ("1", None, "3"), (None, "2", "4"), ("1", "2", "3")])
async def test_neither_unchanged_nor_absent_columns_are_written(values: Any) -> None:  # V6
    docs, out = perco.Table("docs", key=perco.TEXT), perco.Table("out", key=perco.TEXT)
    body = docs.column("body", perco.JSON)
    columns = [out.column(name, perco.TEXT) for name in "pqr"]
    made = views.Views(perco.Schema(docs, out))
    written: list[str] = []

    @made.each(body, id="v", into=out)
    def give(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        yield views.Put(out, doc.key, dict(zip(columns, doc[body] or (), strict=True)))

    for column in columns:

        @made.schema.observe(column, id=column.name)
        async def seen(txn: perco.Transaction, change: perco.Change[Any, Any], name: str = column.name) -> None:
            written.append(name)

    async with perco.open("memory:", made.schema, options=OPTIONS) as db, db.worker():
        await put(db, body, "a", ["1", "2", None])
        await settle(db)
        written.clear()
        await put(db, body, "a", values)
        await settle(db)
        differ = [name for name, old, new in zip("pqr", ("1", "2", None), values, strict=True) if old != new]
        assert sorted(written) == differ
