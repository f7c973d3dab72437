"""Views, one rule at a time (V1 to V7). `test_views_equal.py` has random graphs of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import perco
from perco import views
from perco.schema.schema import Change
from perco.views import folding, joining, running
from perco.views.compiled import Each, Grouped, Joined, Teller
from tests.component.notify.kit import OPTIONS, client, get, memory, put, settle
from tests.support.places import local_of

BY_PREFIX = views.prefix(1)


def by_word(row: perco.Row[Any]) -> str:
    """The same groups, made by a function: copies of the members are kept."""
    return str(row.key[0])


class Library:
    """Documents, their words, and totals of the words."""

    def __init__(self) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
        self.body = self.docs.column("body", perco.TEXT)
        self.author = self.docs.column("author", perco.TEXT)
        self.postings = perco.Table("postings", key=perco.Tuple(perco.TEXT, perco.TEXT))
        self.n = self.postings.column("n", perco.INT64)
        self.words = perco.Table("words", key=perco.TEXT)
        self.total = self.words.column("total", perco.INT64)
        self.top = self.words.column("top", perco.JSON)
        self.authors = perco.Table("authors", key=perco.TEXT)
        self.wrote = self.authors.column("wrote", perco.JSON)
        self.views = views.Views(perco.Schema(self.docs, self.postings, self.words, self.authors))
        self.schema = self.views.schema
        self.calls: Counter[str] = Counter()

    def index(self, *, version: int = 1, grow: int = 0) -> None:
        @self.views.each(self.body, id="index", into=self.postings, version=version)
        def index(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
            self.calls["index"] += 1
            for word, n in Counter((doc[self.body] or "").split()).items():
                yield views.Put(self.postings, (word, doc.key), {self.n: n + grow})

    def totals(self, *, keep: bool = True, version: int = 1, by: Any = BY_PREFIX) -> Grouped:
        kept = [views.sum(self.n), views.largest(self.n, 2)] if keep else []

        @self.views.group(self.n, id="totals", by=by, into=self.words, keep=kept, version=version)
        def totals(word: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            self.calls["totals"] += 1
            top = [[key[1], n] for key, n in rows.largest(self.n, 2)]
            yield views.Put(self.words, word, {self.total: rows.sum(self.n), self.top: top})

        found = self.views.declared["totals"]
        assert isinstance(found, Grouped)
        return found

    def by_author(self, **how: Any) -> Grouped:
        @self.views.group(
            self.author, self.body, id="by author", by=lambda row: row[self.author], into=self.authors, **how
        )
        def by_author(author: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            self.calls["by author"] += 1
            yield views.Put(self.authors, author, {self.wrote: [row.key for row in rows]})

        found = self.views.declared["by author"]
        assert isinstance(found, Grouped)
        return found


def changed(grow: int, *, by: int = 1) -> Library:
    """The views with other functions, in the same version."""
    made = Library()
    made.index(grow=grow)

    @made.views.group(
        made.author, made.body, id="by author", by=lambda row: (row[made.author] or "")[:by], into=made.authors
    )
    def by_author(author: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
        if author == "!":
            raise ValueError("no author")
        yield views.Put(made.authors, author, {made.wrote: [row.key for row in rows]})

    @made.views.join(made.author, made.wrote, id="credit", on=lambda row: (row[made.author] or "")[:1], into=made.words)
    def credit(one: perco.Row[str], other: perco.Row[str]) -> Iterator[views.Put[Any]]:
        yield views.Put(made.words, one.key, {made.total: len(other[made.wrote]) * grow})

    return made


@pytest.fixture
def library() -> Library:
    return Library()


async def rows(db: perco.Database, table: perco.Table[Any]) -> dict[Any, dict[str, Any]]:
    """All rows of a table, with the columns that perco hides."""
    columns = [*table.columns.values(), *table.hidden.values()]
    async with db.snapshot() as snap:
        return {row.key: row.values() async for row in snap.scan(table, columns=columns)}


async def test_rows_follow_their_source(library: Library) -> None:  # V1
    library.index()
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        await put(db, library.body, "a", "to be or not to be")
        await settle(db)
        async with db.snapshot() as snap:
            found = {row.key: row[library.n] async for row in snap.scan(library.postings)}
        assert found == {("be", "a"): 2, ("not", "a"): 1, ("or", "a"): 1, ("to", "a"): 2}
        await put(db, library.body, "a", "to be")
        await settle(db)
        async with db.snapshot() as snap:
            found = {row.key: row[library.n] async for row in snap.scan(library.postings)}
        assert found == {("be", "a"): 1, ("to", "a"): 1}
        await put(db, library.body, "a", None)
        await settle(db)
        assert await rows(db, library.postings) == await rows(db, library.docs) == {}


async def test_what_has_not_changed_is_not_written_and_nobody_is_told(library: Library) -> None:  # V6
    library.index()
    library.totals()
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker() as worker:
        await put(db, library.body, "a", "one two two")
        await settle(db)
        async with db.snapshot() as snap:
            before = {row.key: row.commit_ts(library.n) async for row in snap.scan(library.postings)}
        calls = dict(library.calls)
        await put(db, library.body, "a", "two one two")  # the same words
        await settle(db)
        assert library.calls == Counter(calls) + Counter(index=1)
        await put(db, library.body, "a", "two one three two")
        await settle(db)
        assert library.calls == Counter(calls) + Counter(index=2, totals=1)
        async with db.snapshot() as snap:
            after = {row.key: row.commit_ts(library.n) async for row in snap.scan(library.postings)}
        assert after.items() > before.items()
        assert worker.statistics()["index: body"].commits == 3


@pytest.mark.parametrize("keep", [True, False])
async def test_a_group_follows_its_members(library: Library, keep: bool) -> None:  # V3, V4
    library.index()
    group = library.totals(keep=keep)
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        for key, body in {"a": "x x y", "b": "x", "c": "x x x", "d": "y"}.items():
            await put(db, library.body, key, body)
        await settle(db)
        assert await get(db, library.total, "x") == 6
        assert await get(db, library.top, "x") == [["c", 3], ["a", 2]]
        await put(db, library.body, "c", "y")
        await put(db, library.body, "a", None)
        await settle(db)
        assert (await get(db, library.total, "x"), await get(db, library.total, "y")) == (1, 2)
        assert await get(db, library.top, "y") == [["d", 1], ["c", 1]]  # equal values: by key, descending
        for key in "bcd":
            await put(db, library.body, key, None)
        await settle(db)
        own = [group.table, *(column.table for column in group.orders.values())]
        for table in [*own, *([group.deltas.table] if group.deltas else []), library.words, library.postings]:
            assert await rows(db, table) == {}, table


async def test_a_member_moves_from_group_to_group(library: Library) -> None:  # V3
    group = library.by_author()
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        for key, author in {"a": "ann", "b": "ann", "c": "bob"}.items():
            await put(db, library.author, key, author)
        await settle(db)
        assert await get(db, library.wrote, "ann") == ["a", "b"]
        await put(db, library.author, "a", "bob")
        await put(db, library.author, "b", None)  # still a row, but in no group
        await put(db, library.body, "b", "words")
        await settle(db)
        assert await get(db, library.wrote, "ann") is None
        assert await get(db, library.wrote, "bob") == ["a", "c"]
        assert set(await rows(db, group.members.table)) == {("bob", "a"), ("bob", "c")}


async def test_existing_rows_are_taken_up(library: Library) -> None:  # N10
    async with client(memory(), perco.Schema(library.docs)) as first:
        await put(first, library.body, "a", "x y")
        await put(first, library.author, "a", "ann")
        library.index()
        library.totals()
        library.by_author()
        local = local_of(first)
    async with client(local, library.schema) as db, db.worker():
        await settle(db)
        assert await get(db, library.total, "x") == 1
        assert await get(db, library.wrote, "ann") == ["a"]


async def test_a_new_version_replaces_what_the_old_one_gave(library: Library) -> None:  # N10, V1
    library.index()
    library.totals()
    async with client(memory(), library.schema) as first, first.worker():
        await put(first, library.body, "a", "x y")
        await settle(first)
        local = local_of(first)
    changed = Library()
    changed.index(version=2, grow=10)
    changed.totals()
    async with client(local, changed.schema) as db, db.worker():
        await settle(db)
        assert await get(db, changed.total, "x") == 11
        assert await get(db, changed.top, "y") == [["a", 11]]


async def test_a_group_that_is_declared_later_takes_up_what_another_view_has_given(library: Library) -> None:  # N10
    library.index()
    async with client(memory(), library.schema) as first, first.worker():
        await put(first, library.body, "a", "x y")
        await put(first, library.body, "b", "x")
        await settle(first)
        local = local_of(first)
    more = Library()
    more.index()
    more.totals()
    async with client(local, more.schema) as db, db.worker():
        await settle(db)
        assert await get(db, more.total, "x") == 2
        await put(db, more.body, "b", None)
        await settle(db)
        assert await get(db, more.total, "x") == 1


def shaped(version: int, *, tops: bool) -> Library:
    """Totals that keep the largest members, too, or do not."""
    made = Library()
    made.index()
    keep = [views.sum(made.n), *([views.largest(made.n, 2)] if tops else [])]

    @made.views.group(made.n, id="totals", by=views.prefix(1), into=made.words, keep=keep, version=version)
    def totals(word: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
        top = [[key[1], n] for key, n in rows.largest(made.n, 2)] if tops else None
        yield views.Put(made.words, word, {made.total: rows.sum(made.n), made.top: top})

    return made


@pytest.mark.parametrize("tops", [True, False])
async def test_a_group_that_keeps_other_aggregates_is_counted_again(tops: bool) -> None:  # V4, N10
    before = shaped(1, tops=not tops)
    async with client(memory(), before.schema) as first, first.worker():
        for key, body in {"a": "x x", "b": "x y", "c": "y"}.items():
            await put(first, before.body, key, body)
        await settle(first)
        await put(first, before.body, "b", "x x x")
        await settle(first)
        local = local_of(first)
    same = shaped(1, tops=tops)  # the version is the same: groups that change are counted again
    async with client(local, same.schema) as second, second.worker():
        await put(second, same.body, "c", "y x")
        await settle(second)
        assert await get(second, same.total, "x") == 6
        assert await get(second, same.top, "x") == ([["b", 3], ["a", 2]] if tops else None)
    new = shaped(2, tops=tops)  # with a new version, all are
    async with client(local, new.schema) as db, db.worker():
        await settle(db)
        async with db.snapshot() as snap:
            assert (await views.check(new.views, snap)).equal
        await put(db, new.body, "b", None)
        await settle(db)
        assert await get(db, new.total, "x") == 3
        assert await get(db, new.top, "x") == ([["a", 2], ["c", 1]] if tops else None)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("by", [BY_PREFIX, by_word])
async def test_a_group_that_begins_to_keep_aggregates_is_counted(version: int, by: Any) -> None:  # V4
    before, after = Library(), Library()
    before.totals(keep=False, by=by)
    after.totals(version=version, by=by)
    async with client(memory(), before.schema) as first, first.worker():
        for key, n in {"a": 1, "b": 2, "c": 3}.items():
            await put(first, before.n, ("x", key), n)
        await settle(first)
        local = local_of(first)
    async with client(local, after.schema) as db, db.worker():
        await put(db, after.n, ("x", "d"), 4)
        await settle(db)
        assert await get(db, after.total, "x") == 10
        async with db.snapshot() as snap:
            assert (await views.check(after.views, snap)).equal


async def test_a_group_that_was_not_counted_under_an_earlier_version_is_counted(library: Library) -> None:  # V4
    copies = library.totals(keep=False, by=by_word)
    assert isinstance(copies.copier, Each)
    async with client(memory(), library.schema) as first:  # its members were copied, but the group has never run
        for key in "ab":
            await put(first, library.n, ("x", key), 1)
            async with first.transaction() as txn:
                await running.run_each(copies.copier, txn, change(("x", key)))
        local = local_of(first)
    after = Library()
    after.totals(version=2, by=by_word)
    async with client(local, after.schema) as db, db.worker():
        await put(db, after.n, ("x", "c"), 1)
        await settle(db)
        assert await get(db, after.total, "x") == 3


async def test_a_view_that_gives_other_tables_and_columns_takes_back_the_rest(library: Library) -> None:  # V1
    def giving(version: int, into: str) -> Library:
        made = Library()

        @made.views.each(made.body, id="v", into=getattr(made, into), version=version)
        def give(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
            if into == "authors":
                yield views.Put(made.authors, doc.key, {made.wrote: 1})
            else:
                values = {column: 1 for column in (made.total, made.top) if into in ("words", column.name)}
                yield views.Put(made.words, doc.key, values)

        return made

    async with client(memory(), library.schema) as first:
        await put(first, library.body, "a", "x")
        local = local_of(first)
    found = []
    for version, into in enumerate(["words", "total", "authors", "words"], start=1):
        made = giving(version, into)
        async with client(local, made.schema) as db, db.worker():
            await settle(db)
            found.append([await get(db, column, "a") for column in (made.total, made.top, made.wrote)])
    assert found == [[1, 1, None], [1, None, None], [None, None, 1], [1, 1, None]]


# ------------------------------------------------------------ runs that overlap


def change(key: Any, commit_ts: int = 1 << 50) -> Change[Any, Any]:
    return Change(key, None, commit_ts, 1, commit_ts)


Body = Callable[[perco.Transaction], Awaitable[None]]


async def overlapped(db: perco.Database, slow: Body, meanwhile: Callable[[], Awaitable[None]]) -> None:
    """A transaction commits after others that began later have committed."""
    async with db.transaction() as txn:
        await slow(txn)
        await meanwhile()


async def in_transaction(db: perco.Database, body: Body) -> None:
    async with db.transaction() as txn:
        await body(txn)


async def test_runs_of_one_row_for_two_columns_cannot_overlap(library: Library) -> None:  # V2
    @library.views.each(library.body, library.author, id="both", into=library.postings)
    def both(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        if doc[library.body] == doc[library.author]:
            yield views.Put(library.postings, ("same", doc.key), {library.n: 1})

    view: Any = library.views.declared["both"]
    async with perco.open("memory:", library.schema, options=OPTIONS) as db:
        await put(db, library.body, "a", "x")
        await put(db, library.author, "a", "x")  # both agree, but the run that comes to write it is slow

        async def run(txn: perco.Transaction) -> None:
            await running.run_each(view, txn, change("a"))

        async def meanwhile() -> None:
            await put(db, library.author, "a", "y")
            await in_transaction(db, run)  # it has nothing to write, for it sees nothing to retract

        with pytest.raises(perco.WriteConflict):
            await overlapped(db, run, meanwhile)
        assert await rows(db, library.postings) == {}


async def test_a_run_for_a_column_that_an_earlier_run_has_seen_is_spared(library: Library) -> None:
    calls: list[str] = []

    @library.views.each(library.body, library.author, id="both", into=library.postings)
    def both(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        calls.append(doc.key)
        yield views.Put(library.postings, ("", doc.key), {library.n: 1})

    async with perco.open("memory:", library.schema, options=OPTIONS) as db:
        async with db.transaction() as txn:
            txn.set(library.body, "a", "x")
            txn.set(library.author, "a", "y")
        async with db.worker() as worker:
            await settle(db)
            assert calls == ["a"]
            assert sum(each.commits for each in worker.statistics().values()) == 2
            for column in (library.body, library.author):
                await put(db, column, "a", None)
            await settle(db)
            assert await rows(db, library.docs) == {}  # a row that is gone is not remembered


async def test_runs_of_one_group_cannot_overlap(library: Library) -> None:  # V2
    library.index()
    view = library.totals(keep=False)
    async with client(memory(), library.schema) as db:
        async with db.worker():
            await put(db, library.body, "a", "x")
            await settle(db)

        async def run(txn: perco.Transaction) -> None:
            await running.run_group(view, txn, change("x"))

        with pytest.raises(perco.WriteConflict):
            await overlapped(db, run, lambda: in_transaction(db, run))


async def test_a_delta_that_comes_while_another_is_folded_is_not_lost(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:  # V4
    monkeypatch.setattr(folding, "_SLOTS", 1)
    view = library.totals()
    index = view.copier
    assert isinstance(index, Each)
    async with client(memory(), library.schema) as db:
        for key in "ab":
            await put(db, library.n, ("x", key), 1)

        async def fold(txn: perco.Transaction) -> None:
            await running.run_group(view, txn, change("x"))

        async def first(txn: perco.Transaction) -> None:
            await running.run_each(index, txn, change(("x", "a")))

        async def second(txn: perco.Transaction) -> None:
            await running.run_each(index, txn, change(("x", "b")))

        await in_transaction(db, first)
        with pytest.raises(perco.WriteConflict):
            await overlapped(db, fold, lambda: in_transaction(db, second))
        await in_transaction(db, fold)
        assert await get(db, library.total, "x") == 2


# ------------------------------------------------------------ joins


def credits(library: Library, **how: Any) -> Joined:
    """Each document with what is known of its author."""

    @library.views.join(
        library.author, library.wrote, id="credits", on=lambda doc: doc[library.author], into=library.postings, **how
    )
    def credit(doc: perco.Row[str], author: perco.Row[str] | None) -> Iterator[views.Put[Any]]:
        library.calls["credits"] += 1
        known = -1 if author is None else author[library.wrote]
        yield views.Put(library.postings, (doc[library.author] or "", doc.key), {library.n: known})

    found = library.views.declared["credits"]
    assert isinstance(found, Joined)
    return found


async def credited(db: perco.Database, library: Library) -> dict[Any, int | None]:
    async with db.snapshot() as snap:
        return {row.key: row[library.n] async for row in snap.scan(library.postings)}


@pytest.mark.parametrize("how", ["inner", "left"])
async def test_a_join_follows_both_sides(library: Library, how: Any) -> None:
    view = credits(library, how=how)
    alone = {} if how == "inner" else {("cem", "c"): -1}
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        for key, author in {"a": "ann", "b": "ann", "c": "cem"}.items():
            await put(db, library.author, key, author)
        await put(db, library.wrote, "ann", 1)
        await settle(db)
        assert await credited(db, library) == {("ann", "a"): 1, ("ann", "b"): 1} | alone
        await put(db, library.wrote, "ann", 2)
        await put(db, library.author, "b", "cem")
        await put(db, library.author, "c", None)
        await settle(db)
        assert await credited(db, library) == {("ann", "a"): 2} | ({("cem", "b"): -1} if alone else {})
        await put(db, library.wrote, "cem", 7)
        await put(db, library.wrote, "ann", None)
        await settle(db)
        assert await credited(db, library) == {("cem", "b"): 7} | ({("ann", "a"): -1} if alone else {})
        for column, key in (library.author, "a"), (library.author, "b"), (library.wrote, "cem"):
            await put(db, column, key, None)
        await settle(db)
        assert view.lefts is not None
        for table in (library.docs, library.authors, view.lefts.left.table, library.postings):
            assert await rows(db, table) == {}, table


async def test_a_change_of_a_left_row_runs_for_this_row_only(library: Library) -> None:
    credits(library)
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        await put(db, library.wrote, "ann", 1)
        await settle(db)
        for key in "abcd":
            await put(db, library.author, key, "ann")
        await settle(db)
        assert library.calls["credits"] == 4
        await put(db, library.author, "a", "ann")
        await settle(db)
        assert library.calls["credits"] == 5


async def test_a_run_and_a_change_of_the_other_side_do_not_miss_each_other(library: Library) -> None:  # V8
    view = credits(library)
    rights = view.copier
    assert isinstance(rights, Teller)
    async with client(memory(), library.schema) as db:
        await put(db, library.author, "a", "ann")
        await put(db, library.wrote, "ann", 1)

        async def left(txn: perco.Transaction) -> None:
            await running.run_each(view, txn, change("a"))

        async def right(txn: perco.Transaction) -> None:
            await running.run_teller(rights, txn, change("ann"))

        with pytest.raises(perco.TransientError):
            await overlapped(db, left, lambda: in_transaction(db, right))
        async with db.worker():
            await settle(db)
        assert await credited(db, library) == {("ann", "a"): 1}


async def test_many_left_rows_of_a_key_are_signalled_some_at_a_time(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_AT_ONCE", 3)
    monkeypatch.setattr(joining, "_FEW", 2)
    credits(library)
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker() as worker:
        keys = [f"{number:02}" for number in range(10)]
        for key in keys:
            await put(db, library.author, key, "ann")
        await settle(db)
        before = worker.statistics()["credits: keys"].commits
        await put(db, library.wrote, "ann", 1)
        await settle(db)
        assert await credited(db, library) == {("ann", key): 1 for key in keys}
        assert worker.statistics()["credits: keys"].commits - before == 4
        assert await rows(db, library.schema.tables["credits.keys"]) == {}
        for key in keys[2:]:
            await put(db, library.author, key, None)
        await settle(db)
        before = worker.statistics()["credits: keys"].commits
        await put(db, library.wrote, "ann", 2)
        await settle(db)
        assert await credited(db, library) == {("ann", key): 2 for key in keys[:2]}
        assert worker.statistics()["credits: keys"].commits == before  # few left rows need no run of their key


async def test_a_change_on_the_way_begins_with_the_first_left_row_again(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_AT_ONCE", 1)
    monkeypatch.setattr(joining, "_FEW", 1)
    view = credits(library)
    rights = view.copier
    assert isinstance(rights, Teller)
    assert view.lefts is not None
    keys = view.lefts.keys
    async with client(memory(), library.schema) as db:
        async with db.worker():
            for key in "abc":
                await put(db, library.author, key, "ann")
            await settle(db)
        for known in (1, 2):
            await put(db, library.wrote, "ann", known)
            async with db.transaction() as txn:
                await running.run_teller(rights, txn, change("ann"))
            if known == 1:
                async with db.transaction() as txn:
                    await joining.run_key(view, txn, change("ann"))
                async with db.transaction() as txn:
                    await running.run_each(view, txn, change("a"))
                assert "_reached credits" in (await rows(db, keys))["ann"]
        async with db.worker():
            await settle(db)
        assert await credited(db, library) == {("ann", key): 2 for key in "abc"}


async def test_a_left_row_with_too_many_matches_says_what_to_do(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    @library.views.join(
        library.author,
        library.body,
        id="same",
        on=lambda row: row[library.author],
        to=lambda row: row[library.body],
        key=perco.TEXT,
        into=library.authors,
        matches_max=1,
    )
    def same(left: perco.Row[str], right: perco.Row[str] | None) -> Iterator[views.Put[Any]]:
        assert right is not None
        yield views.Put(library.authors, f"{left.key}{right.key}", {library.wrote: 1})

    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        await put(db, library.author, "a", "x")
        for key in "bc":
            await put(db, library.body, key, "x")
        with pytest.raises(perco.NotIdle):
            await db.wait_idle(timeout=1.0)
        assert "left row 'a' matches more than 1 right row" in caplog.text


# ------------------------------------------------------------ rows with two owners


async def test_a_row_has_one_owner_and_may_change_it(library: Library, caplog: pytest.LogCaptureFixture) -> None:  # V5
    @library.views.each(library.body, id="by body", into=library.authors)
    def by_body(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        yield views.Put(library.authors, doc[library.body] or "", {library.wrote: doc.key})

    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        await put(db, library.body, "a", "same")
        await settle(db)
        await put(db, library.body, "b", "same")
        with pytest.raises(perco.NotIdle):
            await db.wait_idle(timeout=1.0)
        assert "docs['a'] and for docs['b']: a row has one owner" in caplog.text
        assert await get(db, library.wrote, "same") == "a"
        await put(db, library.body, "a", "other")
        await settle(db)
        assert await get(db, library.wrote, "same") == "b"
        assert await get(db, library.wrote, "other") == "a"


def slugs(library: Library, *, version: int = 1, turn: int = 0) -> None:
    """Documents by a name that each of them has for itself."""

    @library.views.each(library.body, library.author, id="slugs", into=library.words, version=version)
    def slug(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        name = doc[library.body] or ""
        yield views.Put(
            library.words, f"{(int(name) + turn) % 10}", {library.top: doc.key, library.total: turn or None}
        )


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_owners_may_exchange_rows(library: Library, concurrency: int) -> None:  # V5
    slugs(library)
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker(concurrency=concurrency):
        for round in range(4):
            async with db.transaction() as txn:
                for number in range(10):
                    txn.set(library.body, f"d{number}", str((number * (3, 7, 1, 9)[round] + round) % 10))
            await settle(db)
            async with db.snapshot() as snap:
                assert (await views.check(library.views, snap)).equal
                assert len({row[library.top] async for row in snap.scan(library.words)}) == 10


async def test_an_owner_that_gives_a_row_again_meanwhile_keeps_it(library: Library) -> None:  # V5
    @library.views.each(library.body, id="by body", into=library.authors)
    def by_body(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        yield views.Put(library.authors, doc[library.body] or "", {library.wrote: doc.key})

    view: Any = library.views.declared["by body"]
    async with client(memory(), library.schema) as db:
        async with db.worker():
            await put(db, library.body, "b", "same")
            await settle(db)
        await put(db, library.body, "b", "other")
        await put(db, library.body, "a", "same")

        async def takes_over(txn: perco.Transaction) -> None:
            await running.run_each(view, txn, change("a"))

        async def gives_again(txn: perco.Transaction) -> None:
            await running.run_each(view, txn, change("b"))

        async def meanwhile() -> None:
            await put(db, library.body, "b", "same")
            await in_transaction(db, gives_again)  # it sees its own row, so it has nothing to write

        with pytest.raises(perco.TransientError):
            await overlapped(db, takes_over, meanwhile)
        assert await get(db, library.wrote, "same") == "b"


async def test_owners_may_exchange_rows_in_a_new_version(library: Library) -> None:  # V5, N10
    slugs(library)
    async with client(memory(), library.schema) as first, first.worker():
        for number in range(10):
            await put(first, library.body, f"d{number}", str(number))
        await settle(first)
        local = local_of(first)
    changed = Library()
    slugs(changed, version=2, turn=3)
    async with client(local, changed.schema) as db, db.worker():
        await settle(db)
        async with db.snapshot() as snap:
            assert (await views.check(changed.views, snap)).equal
        assert await get(db, changed.top, "3") == "d0"


def test_the_build_refuses_two_owners(library: Library) -> None:  # V5
    @library.views.each(library.body, id="by body", into=library.authors)
    def by_body(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        yield views.Put(library.authors, doc[library.body] or "", {library.wrote: doc.key})

    with pytest.raises(perco.UsageError, match="for 'a' and for 'b': a row has one owner"):
        library.views.build({library.docs: {"a": {library.body: "same"}, "b": {library.body: "same"}}})


async def test_a_group_too_large_to_be_read_says_what_to_do(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    library.by_author(members_max=2)
    async with perco.open("memory:", library.schema, options=OPTIONS) as db, db.worker():
        for key in "abc":
            await put(db, library.author, key, "ann")
        with pytest.raises(perco.NotIdle):
            await db.wait_idle(timeout=1.0)
        assert "more than 2 members" in caplog.text
        await put(db, library.author, "a", "bob")
        await settle(db)
        assert await get(db, library.wrote, "ann") == ["b", "c"]


# ------------------------------------------------------------ the definition and the store


def test_the_build_says_whose_function_has_failed(library: Library) -> None:
    @library.views.each(library.body, id="lengths", into=library.authors)
    def lengths(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        yield views.Put(library.authors, doc.key, {library.wrote: 1 // len(doc[library.body] or "")})

    with pytest.raises(ZeroDivisionError) as failed:
        library.views.build({library.docs: {"a": {library.body: ""}}})
    assert failed.value.__notes__ == ["view 'lengths', for docs['a']"]


def test_the_build_takes_sources_only(library: Library) -> None:
    library.index()
    with pytest.raises(perco.UsageError, match="what view 'index' gives"):
        library.views.build({library.postings: {("a", "b"): {library.n: 1}}})
    with pytest.raises(perco.UsageError, match="not in the schema"):
        library.views.build({perco.Table("elsewhere"): {}})


async def test_a_check_finds_each_kind_of_difference(library: Library) -> None:  # V7
    library.index()
    library.totals()
    async with client(memory(), library.schema) as db:
        async with db.worker():
            await put(db, library.body, "a", "x y z")
            await settle(db)
        async with db.snapshot() as snap:
            found = await views.check(library.views, snap)
        assert found.equal
        assert found.rows == {"index": 3, "totals": 3}
        async with db.transaction() as txn:  # nobody is to write what views own
            txn.set(library.n, ("x", "a"), 7)
            txn.set(library.n, ("x", "nobody"), 1)
            txn.delete(library.n, ("y", "a"))
        async with db.snapshot() as snap:
            again = await views.check(library.views, snap, differences_max=2)
        assert (again.count, again.digests, again.equal) == (3, found.digests, False)
        assert again.differences == [
            views.Difference("index", "postings", ("x", "a"), {"n": 1}, {"n": 7}, "a"),
            views.Difference("index", "postings", ("x", "nobody"), {}, {"n": 1}, None),
        ]
        async with db.snapshot() as snap:
            last = (await views.check(library.views, snap)).differences[-1]
        assert last == views.Difference("index", "postings", ("y", "a"), {"n": 1}, {}, "a")


# ------------------------------------------------------------ declarations


def _cases() -> dict[str, tuple[Callable[[Library], object], str]]:
    def each(*columns: str, **how: Any) -> Callable[[Library], object]:
        def declare(library: Library) -> object:
            given: dict[str, Any] = {"id": "v", "into": library.words} | how
            given |= {name: value(library) for name, value in how.items() if callable(value)}
            found: list[Any] = [getattr(library, column) for column in columns]
            return library.views.each(*found, **given)(lambda row: [])

        return declare

    def group(*columns: str, **how: Any) -> Callable[[Library], object]:
        def declare(library: Library) -> object:
            given: dict[str, Any] = {"id": "v", "into": library.words, "by": views.prefix(1)}
            given |= {name: value(library) if callable(value) else value for name, value in how.items()}
            found: list[Any] = [getattr(library, column) for column in columns]
            return library.views.group(*found, **given)(lambda key, rows: [])

        return declare

    def join(**how: Any) -> Callable[[Library], object]:
        def declare(library: Library) -> object:
            given: dict[str, Any] = {"id": "v", "into": library.words, "on": lambda row: row.key} | how
            return library.views.join(library.body, library.wrote, **given)(lambda left, right: [])

        return declare

    def cycle(library: Library) -> object:
        library.index()
        return library.views.each(library.n, id="back", into=library.docs)(lambda row: [])

    def twice(library: Library) -> object:
        library.index()
        return library.views.each(library.author, id="again", into=library.postings)(lambda row: [])

    return {
        "no columns": (each(), "names no columns"),
        "columns of two tables": (each("body", "n"), "columns of one table, not of docs, postings"),
        "a table for a column": (each("docs"), "reads columns"),
        "no id": (each("body", id=""), "1 to 40 characters"),
        "a long id": (each("body", id="v" * 41), "1 to 40 characters"),
        "into nothing": (each("body", into=[]), "names no column"),
        "into a name": (each("body", into="words"), "into= takes tables and columns"),
        "into a table elsewhere": (each("body", into=perco.Table("elsewhere")), "not in this schema"),
        "into nothing known": (each("body", into=7), "into= takes tables and columns"),
        "reads and writes": (each("body", into=lambda at: at.docs), "and writes it"),
        "a cycle": (cycle, "views cannot form a cycle"),
        "two writers": (twice, "'index' and 'again' both write"),
        "a prefix of a plain key": (group("body"), "no tuple of 1 or more parts"),
        "a long prefix": (group("n", by=views.prefix(3)), "no tuple of 3 or more parts"),
        "by a name": (group("n", by="word"), "by= takes"),
        "a key without order": (group("n", key=perco.JSON), "ordered codec"),
        "an aggregate of another column": (group("n", keep=lambda at: [views.smallest(at.body)]), "does not read"),
        "an aggregate that is none": (group("n", keep=["sum"]), "keep= takes"),
        "a join on a name": (join(on="author"), "on= and to= take functions"),
        "a join to something without a codec": (join(to=lambda row: 1), "name the codec"),
        "a join of another kind": (join(how="outer"), "'inner' or 'left'"),
        "a join without matches": (join(matches_max=0), "matches_max"),
        "a join by a key without order": (join(key=perco.JSON), "ordered codec"),
        "no members": (group("n", members_max=0), "members_max"),
    }


@pytest.mark.parametrize("case", _cases())
def test_a_wrong_declaration_says_what_is_wrong(library: Library, case: str) -> None:
    declare, match = _cases()[case]
    with pytest.raises(perco.UsageError, match=match):
        declare(library)


def test_a_prefix_is_a_number_of_parts() -> None:
    for parts in (0, 8, True, "1"):
        with pytest.raises(perco.UsageError, match="number of parts"):
            views.prefix(parts)  # type: ignore[arg-type]
