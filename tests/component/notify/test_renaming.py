"""Tables, columns and observers that a program has renamed: `was=` (N18)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco import views
from perco.check.check import CheckOptions, check
from perco.database.inside import inside
from perco.errors import SchemaMismatch
from perco.schema.catalogue import Catalogue, load, schema_of
from tests.component.notify.kit import LONG_S, client, get, memory, notified, put, settle
from tests.support.places import local_of

pytestmark = pytest.mark.usefixtures("autojump_clock")
KEYS = ["a", "b", "m", "z"]


class Old:
    """A program, before the rename."""

    def __init__(self, *, id: str = "", fails: bool = False) -> None:
        self.docs = perco.Table("pages", key=perco.TEXT, splits=["h"])
        self.body = self.docs.column("contents", perco.TEXT, group="large")
        self.grown = self.docs.signal("grown")
        self.counts = perco.Table("counts", key=perco.TEXT)
        self.count = self.counts.column("count", perco.INT64)
        self.schema = perco.Schema(self.docs, self.counts)
        self.runs: list[str] = []
        self.fails = fails
        if id:
            self.observe(id)

    def observe(self, id: str, **how: Any) -> None:
        @self.schema.observe(self.body, id=id, **how)
        async def measure(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
            self.runs.append(change.key)
            if self.fails:
                raise ValueError("as it should")
            txn.set(self.count, change.key, len(change.value or ""))


class New(Old):
    """The same program, after it."""

    def __init__(self, *, id: str = "", was: str = "", fails: bool = False) -> None:
        super().__init__()
        self.docs = perco.Table("documents", key=perco.TEXT, splits=["h"], was="pages")
        self.body = self.docs.column("body", perco.TEXT, group="large", was="contents")
        self.grown = self.docs.signal("longer", was="grown")
        self.schema = perco.Schema(self.docs, self.counts)
        self.fails = fails
        if id:
            self.observe(id, was=was)


async def stored(local: Any, schema: perco.Schema) -> Catalogue:
    """The catalogue as it is stored."""
    async with client(local, schema) as db:
        return await load(inside(db).driver.store)


async def well(db: perco.Database) -> None:
    found = await check(local_of(db).store, options=CheckOptions(pause_s=0.0))
    assert not found.findings


async def test_what_was_written_under_the_old_names_is_found_under_the_new_ones() -> None:  # N18
    local, old, new = memory(), Old(), New()
    async with client(local, old.schema) as db:
        for key in KEYS:
            await put(db, old.body, key, f"text of {key} " * 500)
    async with client(local, new.schema) as db:
        async with db.snapshot() as snap:
            found = {row.key: row[new.body] async for row in snap.scan(new.docs)}
        assert found == {key: f"text of {key} " * 500 for key in KEYS}
        async with db.transaction() as txn:
            txn.set(new.body, "a", "new")
            txn.signal(new.grown, "a")
        assert await get(db, new.body, "a") == "new"
        await well(db)
    catalogue = await stored(local, new.schema)
    assert catalogue.title("pages") == "documents"
    assert sorted(catalogue.tables["pages"].columns) == ["body", "longer"]
    assert list(schema_of(catalogue).tables) == ["documents", "counts"]
    assert len(catalogue.tables) == 2


async def test_old_and_new_programs_use_the_same_rows_at_the_same_time() -> None:  # N18
    local, old, new = memory(), Old(id="measure"), New(id="length", was="measure")
    async with client(local, old.schema) as db, client(local, new.schema, beside=db) as beside:
        await put(db, old.body, "a", "by the old one")
        await put(beside, new.body, "b", "by the new one")
        for key, text in (("a", "by the old one"), ("b", "by the new one")):
            assert await get(db, old.body, key) == await get(beside, new.body, key) == text
        async with beside.worker(), trio.open_nursery():
            await settle(beside)
        assert sorted(new.runs) == ["a", "b"]
        await put(db, old.body, "a", "once more")
        async with db.worker():
            await settle(db)
        assert old.runs == ["a"], "its changes, under its id"
        assert await get(beside, new.count, "a") == len("once more")
        await well(db)


async def test_an_old_program_that_starts_again_changes_nothing() -> None:  # N18
    local, old, new = memory(), Old(id="measure"), New(id="length", was="measure")
    before = await stored(local, old.schema)
    after = await stored(local, new.schema)
    assert after.version == before.version + 1
    for program in old, new, old:
        assert await stored(local, program.schema) == after
    assert list(after.observers) == ["length"]
    assert (after.observers["length"].table, after.observers["length"].column) == ("pages", "body")
    assert after.observers["length"].number == before.observers["measure"].number


async def test_a_renamed_observer_keeps_what_it_has_done_and_what_waits_for_it() -> None:  # N18, N3
    local, old, new = memory(), Old(id="measure"), New(id="length", was="measure")
    async with client(local, old.schema) as db:
        await put(db, old.body, "a", "seen")
        async with db.worker():
            await settle(db)
        await put(db, old.body, "b", "waits")
    async with client(local, new.schema) as db:
        assert [row for row, _ in notified(db, "length")] == [b"b"]
        assert await db.waiting() == {"length": 1}
        async with db.worker():
            await settle(db)
        assert new.runs == ["b"]
        [state] = await db.observers()
        assert (state.id, state.table, state.column) == ("length", "documents", "body")


async def test_an_old_program_pauses_and_drops_what_has_another_name_by_now() -> None:  # N18, N12
    local, old, new = memory(), Old(id="measure"), New(id="length", was="measure")
    await stored(local, old.schema)
    await stored(local, new.schema)
    async with client(local, old.schema) as db:
        await db.pause("measure")
        assert await db.paused() == {"measure"}
        assert [state.id for state in await db.observers()] == ["measure"]
        assert await db.unserved() == set()
    async with client(local, new.schema) as db:
        assert await db.paused() == {"length"}
        await db.resume("length")
    async with client(local, old.schema) as db:
        assert await db.paused() == set()
        assert await db.drop_observer("measure") == {"measure": 0}
    catalogue = await stored(local, Old().schema)
    assert not catalogue.observers
    assert [grave.column for grave in catalogue.dropped.values()] == ["body"]


async def test_failed_changes_stay_on_the_list(caplog: pytest.LogCaptureFixture) -> None:  # N18, N6
    local, old, new = memory(), Old(id="measure", fails=True), New(id="length", was="measure")
    async with client(local, old.schema) as db:
        await put(db, old.body, "a", "text")
        async with db.worker(options=perco.WorkerOptions(attempts=1)):
            assert await db.wait_idle(timeout=LONG_S) == 1
    async with client(local, new.schema) as db:
        [failed] = await db.failed("length", key="a")
        assert (failed.observer, failed.table, failed.column) == ("length", "documents", "body")
        assert await db.replay_failed("length") == 1
        async with db.worker():
            await settle(db)
        assert new.runs == ["a"]


async def test_a_store_that_the_new_program_made_serves_the_old_one() -> None:  # N18
    local, old, new = memory(), Old(id="measure"), New(id="length", was="measure")
    async with client(local, new.schema) as db:
        await put(db, new.body, "a", "text")
    async with client(local, old.schema) as db:
        assert await get(db, old.body, "a") == "text"
        async with db.worker():
            await settle(db)
        assert old.runs == ["a"]
    assert list((await stored(local, old.schema)).observers) == ["length"]


async def test_a_rename_and_another_one_and_back() -> None:  # N18
    local = memory()

    def program(name: str, *was: str) -> tuple[perco.Schema, perco.Column[Any, Any]]:
        table = perco.Table(name, key=perco.TEXT, was=was)
        column = table.column(name, perco.TEXT, was=was)
        return perco.Schema(table), column

    for number, names in enumerate([("a",), ("b", "a"), ("c", "a", "b"), ("a", "a", "b", "c"), ("b", "a", "b", "c")]):
        schema, column = program(*names)
        async with client(local, schema) as db:
            assert await get(db, column, "key") == (f"text {number - 1}" if number else None)
            await put(db, column, "key", f"text {number}")
        catalogue = await stored(local, schema)
        assert (catalogue.title("a"), list(catalogue.tables["a"].columns)) == (names[0], [names[0]])
        assert list(catalogue.tables) == ["a"]
        await stored(local, program("a")[0])
        assert (await stored(local, schema)).version == catalogue.version, "the oldest program renames nothing"
    for names, text in (
        (("c",), "'c' was made as 'a' in this store: declare it with was="),
        (("c", "b"), "'c' was made as 'a' in this store: declare it with was="),
        (("d", "c"), "'d' was made as 'a' in this store: declare it with was="),
    ):
        with pytest.raises(SchemaMismatch, match=text):
            await stored(local, program(*names)[0])


async def test_columns_are_told_apart_by_their_oldest_names() -> None:  # N18
    local = memory()

    def program(name: str, *was: str) -> perco.Schema:
        table = perco.Table("t", key=perco.TEXT)
        table.column(name, perco.TEXT, was=was)
        return perco.Schema(table)

    await stored(local, program("a"))
    await stored(local, program("b", "a"))
    await stored(local, program("d"))
    for names, where, how in (
        (["b"], "b was made as 'a'", r"with was=\['a'\]"),
        (["c", "b"], "c was made as 'a'", r"with was=\['a', 'b'\]"),
        (["d", "e"], "d was made as 'd'", "without was="),
    ):
        with pytest.raises(SchemaMismatch, match=rf"column t\.{where} in this store: declare it {how}"):
            await stored(local, program(*names))


def table_of(*columns: tuple[str, str]) -> perco.Schema:
    """A table with these columns; each with its name, and an earlier one or ""."""
    table = perco.Table("t", key=perco.TEXT)
    for name, was in columns:
        table.column(name, perco.TEXT, was=was or ())
    return perco.Schema(table)


async def test_two_columns_do_not_become_one() -> None:  # N18
    local = memory()
    await stored(local, table_of(("a", ""), ("b", "")))
    with pytest.raises(SchemaMismatch, match=r"t\.b is declared with was='a', but the store has both.*perco drop"):
        await stored(local, table_of(("b", "a")))
    for other in ("a", ""), ("d", "a"):
        with pytest.raises(perco.UsageError, match=f"'a' is a name of column 'c' and, .* of column '{other[0]}'"):
            table_of(("c", "a"), other)
    with pytest.raises(perco.UsageError, match="was= names 'c' itself"):
        table_of(("c", "c"))
    await stored(local, table_of(("c", "a")))
    with pytest.raises(SchemaMismatch, match=r"t\.c was once named 'a', and programs may still use that name for it"):
        await stored(local, table_of(("a", ""), ("c", "")))


async def test_two_observers_do_not_become_one() -> None:  # N18
    local, both = memory(), Old(id="measure")
    both.observe("length")
    await stored(local, both.schema)
    with pytest.raises(SchemaMismatch, match=r"was=\['measure'\], but the store also has observer 'measure'"):
        await stored(local, New(id="length", was="measure").schema)
    with pytest.raises(perco.UsageError, match="'measure' is an id of observer 'measure' and, earlier or now, of 'x'"):
        both.observe("x", was="measure")
    async with client(local, both.schema) as db:
        await db.drop_observer("length")
    renamed = New(id="length", was="measure")
    await stored(local, renamed.schema)
    renamed.observe("other")
    reused = New()
    reused.observe("length")
    reused.observe("measure")
    with pytest.raises(SchemaMismatch, match="observer 'length' once had the id 'measure'"):
        await stored(local, reused.schema)


async def test_a_table_that_was_made_by_mistake_can_be_dropped_and_the_good_one_stays() -> None:  # N18, N17
    """A deploy forgot `was=`, so the store has both tables."""
    local, old, new = memory(), Old(), New()
    mistaken = perco.Table("documents", key=perco.TEXT)
    body = mistaken.column("body", perco.TEXT)
    async with client(local, old.schema) as db:
        await put(db, old.body, "a", "good")
    async with client(local, perco.Schema(mistaken)) as db:
        await put(db, body, "b", "by mistake")
    with pytest.raises(SchemaMismatch, match=r"has tables 'pages' and 'documents'.* \(perco drop STORE documents"):
        await stored(local, new.schema)
    async with client(local, perco.Schema(mistaken)) as db:
        await db.drop_table("documents")
    async with client(local, new.schema) as db:
        assert await get(db, new.body, "a") == "good"
        await db.vacuum()
        async with db.snapshot() as snap:
            assert [row.key async for row in snap.scan(new.docs)] == ["a"]
        await db.drop_table("documents")  # now it is the good one
        assert inside(db).catalogue.tables["pages"].dropped
    again = perco.Table("documents", key=perco.INT64)
    async with client(local, perco.Schema(again)) as db:  # its name is free
        assert "documents" in inside(db).catalogue.tables


async def test_an_id_that_another_observer_once_had_is_no_earlier_id() -> None:  # N18
    local, first = memory(), New(id="letters", was="count")
    first.observe("tally")
    await stored(local, first.schema)
    second = New(id="tally", was="count")
    with pytest.raises(SchemaMismatch, match=r"was=\['count'\], but the store also has observer 'letters'"):
        await stored(local, second.schema)


async def test_two_tables_do_not_become_one() -> None:  # N18
    first, second = perco.Table("b", key=perco.TEXT, was="a"), perco.Table("a", key=perco.TEXT)
    with pytest.raises(perco.UsageError, match="tables 'b' and 'a', both of which are, or were, named 'a'"):
        perco.Schema(first, second)


async def test_a_program_that_renames_does_not_open_a_store_for_reading_only_before() -> None:  # N18
    assert perco.Table("b", was="a").name == "a"
    catalogue = Catalogue().declare(Old().schema)
    assert catalogue.declare(New().schema) is not catalogue
    renamed = catalogue.declare(New().schema)
    assert renamed.declare(New().schema) is renamed
    unpacked = Catalogue.unpack(renamed.pack())
    assert unpacked == renamed
    seen = unpacked.seen_by(Old().schema)
    assert list(seen.tables["pages"].columns) == ["contents", "grown"]
    assert Catalogue.unpack(seen.pack()) == renamed
    assert seen.seen_by(Old().schema) is seen


class Indexed:
    """Views over columns that are renamed: of single rows, and of groups, with an order and a sum."""

    def __init__(self, *, renamed: bool) -> None:
        self.docs = (
            perco.Table("documents", key=perco.TEXT, was="pages") if renamed else perco.Table("pages", key=perco.TEXT)
        )

        def column(table: perco.Table[Any], old: str, new: str, codec: Any) -> perco.Column[Any, Any]:
            return table.column(new, codec, was=old) if renamed else table.column(old, codec)

        self.site = column(self.docs, "site", "host", perco.TEXT)
        self.size = column(self.docs, "size", "bytes", perco.INT64)
        self.lengths = perco.Table("lengths", key=perco.TEXT)
        self.length = column(self.lengths, "length", "amount", perco.INT64)
        self.hosts = perco.Table("hosts", key=perco.TEXT)
        self.total = column(self.hosts, "total", "sum", perco.INT64)
        self.top = column(self.hosts, "top", "largest", perco.JSON)
        self.schema = perco.Schema(self.docs, self.lengths, self.hosts)
        self.views = views.Views(self.schema)

        site, size, length, total, top = self.site, self.size, self.length, self.total, self.top

        @self.views.each(size, id="length", into=[length])
        def measure(row: views.Row[str]) -> Any:
            if row[size] is not None:
                yield views.Put(length.table, row.key, {length: row[size]})

        @self.views.group(
            site,
            size,
            by=lambda row: row[site],
            key=perco.TEXT,
            id="host",
            keep=[views.sum(size), views.largest(size, 2)],
            into=[total, top],
        )
        def host(key: str, rows: Any) -> Any:
            largest = [value for _, value in rows.largest(size, 2)]
            yield views.Put(total.table, key, {total: rows.sum(size), top: largest})


async def equal(db: perco.Database, of: views.Views) -> None:
    """All rows are what the views' definitions give."""
    async with db.snapshot() as snap:
        found = await views.check(of, snap)
    assert not found.differences


async def test_views_go_on_over_columns_that_were_renamed(caplog: pytest.LogCaptureFixture) -> None:  # N18, V1, V6
    local, old = memory(), Indexed(renamed=False)
    caplog.set_level("WARNING", "perco.code")

    async def write(db: perco.Database, of: Indexed, sizes: dict[str, int | None]) -> None:
        for key, size in sizes.items():
            async with db.transaction() as txn:
                if size is None:
                    txn.delete(of.size, key)
                    txn.delete(of.site, key)
                else:
                    txn.set(of.size, key, size)
                    txn.set(of.site, key, key[0])
        async with db.worker():
            await settle(db)

    async def rows(db: perco.Database, of: Indexed) -> tuple[dict[str, int], dict[str, Any]]:
        async with db.snapshot() as snap:
            lengths = {row.key: row[of.length] async for row in snap.scan(of.lengths)}
            return lengths, {row.key: (row[of.total], row[of.top]) async for row in snap.scan(of.hosts)}

    async with client(local, old.schema) as db:
        await write(db, old, {"a1": 1, "a2": 2, "a3": 3, "b1": 5})
        assert await rows(db, old) == ({"a1": 1, "a2": 2, "a3": 3, "b1": 5}, {"a": (6, [3, 2]), "b": (5, [5])})
    new = Indexed(renamed=True)
    async with client(local, new.schema) as db:
        assert not any((await db.waiting()).values())
        await equal(db, new.views)
        await write(db, new, {"a3": None, "b2": 7, "a4": 1})
        expected = {"a1": 1, "a2": 2, "a4": 1, "b1": 5, "b2": 7}, {"a": (4, [2, 1]), "b": (12, [7, 5])}
        assert await rows(db, new) == expected
        await equal(db, new.views)
    async with client(local, old.schema) as db:  # an old program, during the deploy
        await write(db, old, {"a4": None, "b2": 1})
        assert await rows(db, old) == ({"a1": 1, "a2": 2, "b1": 5, "b2": 1}, {"a": (3, [2, 1]), "b": (6, [5, 1])})
        await equal(db, old.views)
    async with client(local, schema_of(await stored(local, new.schema))) as db:
        dropped = await views.drop(new.views, db, "length")
        assert dropped.rows == {"lengths": 4}
        async with db.snapshot() as snap:
            assert [row.key async for row in snap.scan(db.schema.tables["lengths"])] == []
    assert not caplog.records, "a rename is no change of the code"
