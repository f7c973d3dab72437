"""Whole tables appear in one step, or not at all (P7)."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest
import trio
import trio.lowlevel
import trio.testing

import perco
from perco.check.check import check
from perco.database.inside import inside, local_owner
from perco.errors import Corruption, StoreError, StoreFull, Unavailable, UsageError
from perco.protocol.records import column_of
from perco.schema import catalogue as catalogues
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import APPLIED, LOG, PROTOCOL_GROUPS, Failed, Folder, LocalRowStore, Mutation, NoReply, Verdict
from perco.tablets import loading
from perco.tablets.sorting import Layout, SameRow, SortedFile
from tests.integration.storage.bulk import (
    DOCS,
    SCHEMA,
    WORDS,
    body,
    count,
    docs,
    length,
    lengths,
    size,
    words,
)
from tests.support.copies import copy_as_itself


@asynccontextmanager
async def opened(folder: Path, **more: Any) -> AsyncIterator[perco.Database]:
    async with perco.open(folder, SCHEMA, options=perco.Options(**more)) as db:
        yield db


async def contents(snap: perco.Snapshot) -> tuple[Any, Any]:
    found: list[dict[Any, Any]] = []
    for table in (docs, words):
        found.append({row.key: dict(row.values()) async for row in snap.scan(table)})
    return found[0], found[1]


def everything() -> tuple[Any, Any]:
    return named(DOCS), named(WORDS)


def named(rows: Mapping[Any, Mapping[perco.Column[Any, Any], Any]]) -> Mapping[Any, Any]:
    return {key: {column.name: value for column, value in values.items()} for key, values in rows.items()}


async def load(db: perco.Database) -> Any:
    return await db.bulk_load({docs: DOCS.items(), words: WORDS.items()})


async def must_be_clean(db: perco.Database) -> None:
    found = (await check(inside(db).driver.store, ts=await inside(db).oracle.draw())).findings
    assert not [each for each in found if each.severity != "note"]  # such as a phase two that is under way


async def must_be_one_or_the_other(db: perco.Database) -> bool:
    """All has been loaded, or nothing; and in either case the store can be used. Returns which."""
    async with db.snapshot() as snap:
        found = await contents(snap)
    assert found in (everything(), ({}, {}))
    await must_be_clean(db)
    if found == ({}, {}):
        await load(db)
    async with db.worker():
        await db.wait_idle(timeout=60)
    async with db.snapshot() as snap:
        assert await contents(snap) == everything()
        runs = [row[length] async for row in snap.scan(lengths)]
    assert runs == [1] * len(DOCS)
    return found == everything()


async def test_rows_values_history_and_observers(tmp_path: Path) -> None:  # P7 N1
    async with opened(tmp_path / "s") as db:
        async with db.snapshot() as before:
            done = await load(db)
            assert await contents(before) == ({}, {})
        assert done.tablets == 2
        async with db.snapshot() as snap:
            assert snap.start_ts > done.ts
            assert await contents(snap) == everything()
            row = await snap.row(docs, "doc 007\0x")
            assert row.commit_ts(size) == done.ts
        await must_be_one_or_the_other(db)
    async with opened(tmp_path / "s") as db:
        async with db.snapshot() as snap:
            assert await contents(snap) == everything()
        assert await inside(db).oracle.draw() > done.ts
    assert not list((tmp_path / "s" / "loads").glob("*"))


async def test_what_readers_see_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # P7
    """A reader that draws at any moment of a publication sees both tables, or neither."""
    recording = trio.Event()
    apply = LocalRowStore.apply

    async def slowly(self: LocalRowStore, mutations: Any) -> list[Verdict]:
        made = await apply(self, mutations)
        if any(len(mutation.rows) == 2 and mutation.table == SYSTEM_TABLE for mutation in mutations):
            recording.set()
            for _ in range(200):  # the readers below draw meanwhile, and the range is used up
                await trio.lowlevel.checkpoint()
        return made

    monkeypatch.setattr(LocalRowStore, "apply", slowly)
    async with opened(tmp_path / "s", oracle=perco.options.OracleOptions(range_size=5)) as db:
        seen: list[bool] = []
        ended = trio.Event()

        async def read() -> None:
            while not ended.is_set():
                async with db.snapshot() as snap:
                    found = await contents(snap)
                    await trio.lowlevel.checkpoint()
                    assert await contents(snap) == found
                assert found in (everything(), ({}, {}))
                seen.append(found == everything())

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(read)
            await load(db)
            assert recording.is_set()
            ended.set()
        assert seen.index(True) > 0


@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
async def test_a_transaction_that_began_before_conflicts(tmp_path: Path, isolation: Any) -> None:  # P7 T7 T14
    async with opened(tmp_path / "s") as db:
        attempts = 0

        async def late(txn: perco.Transaction) -> None:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                found = await txn.scan(docs).all() if isolation == "serializable" else []
                assert not found
                await load(db)
            if isolation == "serializable":
                txn.set(length, "rows", len(await txn.scan(docs).all()))
            else:
                txn.set(size, "doc 003\0x", (await txn.get(size, "doc 003\0x") or 0) + 1000)

        await db.options(isolation=isolation).run(late)
        assert attempts == 2
        async with db.snapshot() as snap:
            assert await snap.get(size, "doc 003\0x") == (3 if isolation == "serializable" else 1003)
            assert await snap.get(length, "rows") == (len(DOCS) if isolation == "serializable" else None)


async def test_writes_meanwhile_wait_and_go_to_the_new_tablets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # P1 P7
    async with opened(tmp_path / "s") as db:
        held = trio.Event()
        recorded = loading.BulkLoads._recorded

        async def slowly(self: Any, *args: Any) -> Any:
            held.set()
            await trio.testing.wait_all_tasks_blocked()  # the writer below has submitted its write
            return await recorded(self, *args)

        monkeypatch.setattr(loading.BulkLoads, "_recorded", slowly)

        async def write() -> None:
            await held.wait()

            async def blindly(txn: perco.Transaction) -> None:
                txn.set(size, "doc 111\0x", -1)
                txn.set(size, "a key before all others", -2)

            await db.run(blindly)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await load(db)
        async with db.snapshot() as snap:
            assert await snap.get(size, "doc 111\0x") == -1
            assert await snap.get(body, "doc 111\0x") == DOCS["doc 111\0x"][body]
            assert await snap.get(size, "a key before all others") == -2
        await must_be_clean(db)


async def test_a_table_that_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # P7
    async with opened(tmp_path / "s") as db:

        async def one(txn: perco.Transaction) -> None:
            txn.set(count, ("x", 1), 1)

        open_loaded = loading.BulkLoads.publish

        async def after_a_write(self: Any, *args: Any) -> Any:
            await db.run(one)
            return await open_loaded(self, *args)

        monkeypatch.setattr(loading.BulkLoads, "publish", after_a_write)
        with pytest.raises(UsageError, match="'words' has some"):  # it was empty when the load began
            await load(db)
        monkeypatch.undo()
        with pytest.raises(UsageError, match="'words' has some"):
            await load(db)
        async with db.snapshot() as snap:
            assert await contents(snap) == ({}, {("x", 1): {"count": 1}})
        await db.bulk_load({docs: DOCS.items()})
        async with db.snapshot() as snap:
            assert (await contents(snap))[0] == everything()[0]
        await must_be_clean(db)
        assert not list((tmp_path / "s" / "loads").glob("*"))


@pytest.mark.parametrize("moment", ["publish", "_cut"])
async def test_an_observer_that_is_registered_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:  # P7 N1
    """It would not be notified of the rows, whose files were made before."""
    async with opened(tmp_path / "s") as db:
        right = getattr(loading.BulkLoads, moment)
        more = perco.Schema(docs, words, lengths)

        @more.observe(count, id="new")
        async def new(txn: perco.Transaction, change: perco.Change[Any, int]) -> None:
            pass

        async def after_a_registration(self: Any, *args: Any) -> Any:
            await catalogues.declare(inside(db).store, more)
            return await right(self, *args)

        monkeypatch.setattr(loading.BulkLoads, moment, after_a_registration)
        with pytest.raises(UsageError, match="begin again"):
            await load(db)
        monkeypatch.undo()
        async with db.snapshot() as snap:
            assert await contents(snap) == ({}, {})
        await inside(db).keeper.renew()
        await db.pause("measure")  # that changes nothing of what the files have
        await load(db)
        assert (await db.waiting())["new"] == len(WORDS)


async def test_of_two_loads_at_once_the_later_may_be_published_first(tmp_path: Path) -> None:  # P7
    """Then the oracle is beyond the timestamp of the other, which some reader may have passed."""
    async with opened(tmp_path / "s") as db:
        loads = local_owner(db).loads
        first, second = await loads.begin(["docs"]), await loads.begin(["words"])
        assert second.ts > first.ts > inside(db).oracle.last
        with pytest.raises(UsageError, match="did not begin with"):
            await loads.publish(second.id, {"docs": one_file(db, first, "docs")})
        await loads.publish(second.id, {"words": one_file(db, second, "words")})
        with pytest.raises(UsageError, match="another bulk load was published"):
            await loads.publish(first.id, {"docs": [(b"a", "file")]})
        with pytest.raises(UsageError, match="has ended"):
            await loads.publish(first.id, {"docs": [(b"a", "file")]})
        async with db.snapshot() as snap:
            assert [row.key async for row in snap.scan(words)] == [("w", 1)]
            assert not [row.key async for row in snap.scan(docs)]
        for _ in range(loading.UNFINISHED_MAX):
            await loads.begin(["docs"])
        with pytest.raises(UsageError, match="have begun and not ended"):
            await loads.begin(["docs"])


def one_file(db: perco.Database, load: loading.BulkLoad, table: str) -> list[tuple[bytes, str]]:
    layout = Layout.of(inside(db).catalogue, table)
    file = SortedFile(Path(load.path) / "file", layout, load.ts)
    row, column = (words.row(("w", 1)), "count") if table == "words" else (b"a", "size")
    file.put(row, [(column, count.codec.encode(1))])
    file.finish()
    return [(row, "file")]


async def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:  # P7
    async with opened(tmp_path / "s") as db:
        loads = local_owner(db).loads
        row = words.row(("w", 1))
        for files, message in [
            ([(row, "../../tablets/docs-0")], "order of their rows"),
            ([(row, "file"), (row, "file")], "order of their rows"),
            ([(b"", "file")], "order of their rows"),
            ([(row, "other")], "missing"),
            ([(row[:1], "file"), (row[:2], "second")], "does not have the rows"),
        ]:
            load = await loads.begin(["words"])
            one_file(db, load, "words")
            with pytest.raises(UsageError, match=message):
                await loads.publish(load.id, {"words": files})
            await loads.end(load.id)
        assert not await must_be_one_or_the_other(db)


async def test_the_stores_that_have_no_files() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        with pytest.raises(UsageError, match="load in transactions"):
            await load(db)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("b", {size: 1}), ("a", {size: 1})], "in order"),
        ([("a", {size: 1}), ("a", {size: 2})], "in order"),
        ([("", {size: 1})], "key is empty"),
        ([("k" * 401, {size: 1})], "limit of 400"),
        ([("a", {count: 1})], "not a column of"),
        ([("a", {body: "x" * ((8 << 20) + 1)})], "value of column 'body'"),
    ],
)
async def test_wrong_rows(tmp_path: Path, rows: Any, message: str) -> None:
    async with opened(tmp_path / "s") as db:
        with pytest.raises(UsageError, match=message):
            await db.bulk_load({docs: rows})
        assert not list((tmp_path / "s" / "loads").glob("*"))
        assert not await must_be_one_or_the_other(db)


# ---------------------------------------------------------------- files

LAYOUT = Layout(
    "docs",
    (*PROTOCOL_GROUPS, "data", LOG),
    {"late": (column_of(3), "data", ()), "early": (column_of(1), "data", (7, 9)), "long": (column_of(2), "data", ())},
)


def cells_of(file: SortedFile, path: Path) -> dict[bytes, list[tuple[bytes, bytes]]]:
    """All cells, by group, of a file that is finished here."""
    file.finish()
    with (
        lmdb.open(str(path / "data.mdb"), subdir=False, max_dbs=32, readonly=True, lock=False) as env,
        env.begin() as txn,
    ):
        groups = [name for name, _ in txn.cursor() if name in {group.encode() for group in LAYOUT.groups}]
        return {name: list(txn.cursor(env.open_db(name, txn=txn))) for name in groups}


def test_rows_that_are_put_at_once_give_the_cells_of_rows_put_one_by_one(tmp_path: Path) -> None:
    rng = random.Random(5)
    rows = sorted({rng.randbytes(rng.randrange(1, 9)) for _ in range(400)})
    value = {"late": 3, "early": 8, "long": 5000}
    values = {
        name: [None if rng.random() < 0.3 else rng.randbytes(rng.randrange(size)) for _ in rows]
        for name, size in value.items()
    }
    one, many = SortedFile(tmp_path / "one", LAYOUT, 50), SortedFile(tmp_path / "many", LAYOUT, 50)
    for row, *found in zip(rows, *values.values(), strict=True):
        one.put(row, [(name, each) for name, each in zip(values, found, strict=True) if each is not None])
    for at in range(0, len(rows), 64):
        some = slice(at, at + 64)
        many.put_all(rows[some], {name: values[name][some] for name in ("long", "early", "late")})
    assert (one.rows, one.cells, one.first) == (many.rows, many.cells, many.first)
    assert one.rows < len(rows), "some rows have no cells"
    found = cells_of(one, tmp_path / "one")
    assert found == cells_of(many, tmp_path / "many")
    assert len(found[b"notify"]) == 2 * sum(each is not None for each in values["early"])
    assert len(found[LOG.encode()]) == one.cells


def test_a_row_that_is_put_twice_is_named(tmp_path: Path) -> None:
    file = SortedFile(tmp_path / "file", LAYOUT, 50)
    file.put_all([b"a", b"b"], {"late": [b"1", None]})
    for rows, error in (([b"b"], SameRow), ([b"c", b"c"], SameRow), ([b"a"], UsageError)):
        with pytest.raises(error) as told:
            file.put_all(rows, {"late": [b"2"] * len(rows)})
        assert getattr(told.value, "row", rows[-1]) == rows[-1]
    file.abandon()


def test_a_row_without_cells_is_checked_too(tmp_path: Path) -> None:
    file = SortedFile(tmp_path / "file", LAYOUT, 50)
    file.put(b"b", [])
    for row in (b"", b"a", b"b", b"c" * 401):
        with pytest.raises(UsageError):
            file.put(row, [])
        with pytest.raises(UsageError):
            file.put_all([row], {})
    assert (file.rows, file.cells, file.first) == (0, 0, b"")
    file.abandon()


def test_of_many_sets_of_columns_a_file_remembers_some(tmp_path: Path) -> None:
    names = [f"c{n}" for n in range(10)]
    columns = {name: (column_of(n), "data", ()) for n, name in enumerate(names, 1)}
    file = SortedFile(tmp_path / "file", Layout("docs", (*PROTOCOL_GROUPS, "data"), columns), 50)
    for n in range(1, 1 << len(names)):
        some = [name for bit, name in enumerate(names) if n >> bit & 1]
        file.put(n.to_bytes(2, "big"), [(name, b"x") for name in reversed(some)])
    assert len(file._orders) == 256
    file.finish()
    assert file.cells == len(names) << (len(names) - 1)


async def test_an_error_or_a_cancellation_in_the_rows(tmp_path: Path) -> None:
    def broken() -> Iterator[Any]:
        yield "a", {size: 1}
        raise ZeroDivisionError

    async with opened(tmp_path / "s") as db:
        with pytest.raises(ZeroDivisionError):
            await db.bulk_load({docs: broken()})
        with trio.CancelScope() as scope:

            def endless() -> Iterator[Any]:
                for i in range(1 << 30):
                    if i == 1000:
                        trio.from_thread.run_sync(scope.cancel)
                    yield f"{i:012}", {size: i}

            await db.bulk_load({docs: endless()})
        assert scope.cancelled_caught
        assert not list((tmp_path / "s" / "loads").glob("*"))
        assert not await must_be_one_or_the_other(db)


@pytest.mark.parametrize("fault", ["place", "open", "refused", "failed", "lost", "lost, but written", "too late"])
async def test_a_fault_while_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:  # P7
    """Nothing is published, writes go on, and the next load succeeds; or, if only the answer is lost, it is."""
    fired = 0
    apply, place = LocalRowStore.apply, Folder.place_loaded

    async def faulty(self: LocalRowStore, mutations: list[Mutation]) -> list[Verdict]:
        nonlocal fired
        record = any(len(mutation.rows) == 2 and mutation.table == SYSTEM_TABLE for mutation in mutations)
        if not record or fired or fault in ("place", "open", "too late"):
            return await apply(self, mutations)
        fired += 1
        if fault == "refused":  # somebody else was faster
            monkeypatch.setattr(LocalRowStore, "apply", apply)
            await inside(db).keeper.change(lambda catalogue: catalogue.with_paused("measure", True))
            return await apply(self, mutations)
        if fault == "failed":
            return [Failed(StoreFull("s", "test"))]
        if fault == "lost, but written":
            assert await apply(self, mutations) == [APPLIED]
        return [NoReply("test")]

    def fails(self: Folder, *args: Any) -> Path:
        nonlocal fired
        if args[1] != "words":
            return place(self, *args)
        fired += 1
        if fault == "place":
            raise Unavailable("test")
        made = place(self, *args)
        (made / "data.mdb").write_bytes(b"no LMDB file" * 1000)
        return made

    async with opened(tmp_path / "s") as db:
        monkeypatch.setattr(LocalRowStore, "apply", faulty)
        if fault in ("place", "open"):
            monkeypatch.setattr(Folder, "place_loaded", fails)
        if fault == "too late":
            monkeypatch.setattr(loading, "AHEAD", 1)
            fired = 1
        if fault in ("refused", "lost", "lost, but written"):
            await load(db)
        else:
            with pytest.raises((StoreError, Corruption, UsageError)):
                await load(db)
        assert fired == 1
        monkeypatch.undo()
        if fault == "refused":
            await inside(db).keeper.change(lambda catalogue: catalogue.with_paused("measure", False))
        published = await must_be_one_or_the_other(db)
        assert published == (fault in ("refused", "lost", "lost, but written"))
    async with opened(tmp_path / "s") as db:
        assert await must_be_one_or_the_other(db)


def test_killed_at_every_step(tmp_path: Path) -> None:  # P7 S2 O1
    async def prepare() -> None:
        async with opened(tmp_path / "empty"):
            pass

    async def verify() -> bool:
        async with opened(tmp_path / "s") as db:
            return await must_be_one_or_the_other(db)

    trio.run(prepare)
    outcomes = []
    for step in range(100):
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        copy_as_itself(tmp_path / "empty", tmp_path / "s")
        command = [sys.executable, "-m", "tests.integration.storage.bulk", str(tmp_path / "s"), str(step)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode == 0:
            break
        assert ended.returncode == 9, ended.stderr
        outcomes.append(trio.run(verify))
    else:
        pytest.fail("it never ends")
    assert outcomes == sorted(outcomes)  # from some step on, all is there
    assert outcomes.count(False) >= 15
    assert outcomes.count(True) >= 5
