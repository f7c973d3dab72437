"""Rows as Arrow batches: the same rows as those of a scan, whichever way they are read."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import trio

import perco
import perco.sync
from perco.arrow.columns import Columns
from perco.arrow.types import reading
from perco.database.inside import inside
from perco.errors import Corruption, ReadConflict, SnapshotTooOld, TransactionClosed, UsageError
from perco.protocol.records import PUT
from perco.serve.opening import SOCKET
from perco.storage import WRITE, LmdbTablet, Mutation
from perco.storage.pages import PageDamaged
from perco.txn import columnar
from perco.txn.columnar import Page, Pages
from tests.support.cells import KEYS, SCHEMA, filled, key_of, locked
from tests.support.held import held
from tests.support.places import local_of

OPTIONS = perco.Options(durability="process")
PLACES = ["memory", "owner", "client", "beside"]
TEXTS = KEYS["text"].columns["text"]
NUMBERS = KEYS["text"].columns["int64"]


@asynccontextmanager
async def opened(
    place: str, folder: Path, fill: Callable[[perco.Database], Awaitable[Any]]
) -> AsyncIterator[tuple[perco.Database, Any]]:
    """A filled store, as its owner, a client of it, or a reader beside it sees it; and what `fill` has returned."""
    if place == "beside":
        async with perco.open(folder, SCHEMA, options=OPTIONS) as owner:
            done = await fill(owner)
        async with perco.open(folder, SCHEMA, readonly=True) as db:
            yield db, done
        return
    async with perco.open("memory:" if place == "memory" else folder, SCHEMA, options=OPTIONS) as owner:
        done = await fill(owner)
        if place != "client":
            yield owner, done
            return
        async with perco.open(f"unix:{folder / SOCKET}", SCHEMA) as db:
            yield db, done


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[Page]:
    """The pages that are read."""
    read: list[Page] = []
    page = Pages.page

    async def noted(self: Pages, low: bytes, high: bytes | None) -> Page:
        read.append(await page(self, low, high))
        return read[-1]

    monkeypatch.setattr(Pages, "page", noted)
    return read


def small(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    """At most so many cells in a page."""
    monkeypatch.setattr(columnar, "_CELLS_FIRST", cells)
    monkeypatch.setattr(columnar, "_CELLS_MAX", cells)


async def rows_of(scan: perco.Scan[Any], columns: list[perco.Column[Any, Any]]) -> list[dict[str, Any]]:
    """The rows of a scan, as Arrow gives them."""
    found = []
    async for row in scan:
        parts = row.key if isinstance(row.key, tuple) else [row.key]
        names = [f"key_{n}" for n in range(1, len(parts) + 1)] if isinstance(row.key, tuple) else ["key"]
        values: dict[str, Any] = dict(zip(names, parts, strict=True))
        for column in columns:
            make = reading(column.codec)
            values[column.name] = row[column] if make is None or row[column] is None else make(row[column])
        found.append(values)
    return found


async def batches_of(scan: perco.Scan[Any]) -> list[dict[str, Any]]:
    return [row async for batch in scan.to_batches() for row in batch.to_pylist()]


@pytest.mark.parametrize("place", PLACES)
async def test_batches_have_the_rows_of_a_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: list[Page], place: str
) -> None:
    """Every key and codec, nulls, deleted cells, old versions, long values, locks; whole scans, parts, scans that have
    begun, reverse and limited ones."""
    rng = random.Random(place)
    compared = 0

    async def fill(db: perco.Database) -> list[int]:
        moments = await filled(db, 5)
        moments.append(await inside(db).oracle.draw())
        await locked(db, "text", ["k1", "k35"])
        return [*moments, await inside(db).oracle.draw()]

    async with opened(place, tmp_path, fill) as (db, moments):
        for name, table in KEYS.items():
            for _ in range(10):
                small(monkeypatch, rng.choice([20, 300, 2000]))
                columns = rng.sample(list(table.columns.values()), rng.randrange(1, len(table.columns) + 1))
                how: dict[str, Any] = {"columns": columns}
                if rng.random() < 0.5:
                    how["start"], how["stop"] = sorted((key_of(rng, name) for _ in range(2)), key=table.row)
                if rng.random() < 0.3:
                    how |= rng.choice([{"reverse": True}, {"limit": rng.randrange(5)}, {"limit": 99, "reverse": True}])
                skip = rng.choice([0, 0, 1, 5])
                async with db.snapshot(ts=rng.choice(moments)) as snap:
                    wanted = await rows_of(snap.scan(table, **how), columns)
                    scan = snap.scan(table, **how)
                    for _ in range(skip):
                        with_rows = await anext(scan, None)
                        assert (with_rows is None) == (not wanted)
                        wanted = wanted[1:]
                    assert await batches_of(scan) == wanted
                compared += len(wanted)
    assert compared > 300
    by_pages = sum(page.batch is not None and page.batch.num_rows > 0 for page in pages)
    assert by_pages == 0 if place == "memory" else by_pages > 30
    assert place == "memory" or any(page.batch is None for page in pages), "no lock was in the way"


@pytest.mark.parametrize("place", ["owner", "client", "beside"])
async def test_the_commit_of_a_dead_transaction_is_there(tmp_path: Path, place: str) -> None:  # T9
    """Its primary has committed, and another cell still has the lock."""

    async def fill(db: perco.Database) -> None:
        async with db.transaction() as txn:
            for key in "abc":
                txn.set(TEXTS, key, "before")
        await locked(db, "text", ["a", "b"], committed=True)

    async with opened(place, tmp_path, fill) as (db, _), db.snapshot() as snap:
        found = await batches_of(snap.scan(KEYS["text"], columns=[TEXTS]))
    assert [row["text"] for row in found] == ["undecided", "undecided", "before"]


@pytest.mark.parametrize("place", ["memory", "owner", "client"])
async def test_own_writes_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Those that were made before, and those that are made between two batches."""
    small(monkeypatch, 10)

    async def fill(db: perco.Database) -> None:
        async with db.transaction() as txn:
            for n in range(100):
                txn.set(NUMBERS, f"k{n:03}", n)

    async with opened(place, tmp_path, fill) as (db, _), db.transaction() as txn:
        found: dict[str, int | None] = {}
        async for batch in txn.scan(KEYS["text"], columns=[NUMBERS]).to_batches():
            if not found and place != "memory":
                assert batch.num_rows < 100
                txn.set(NUMBERS, "k0505", 7)
                txn.delete(NUMBERS, "k060")
            found |= {row["key"]: row["int64"] for row in batch.to_pylist()}
        if place != "memory":
            assert found == {f"k{n:03}": n for n in range(100) if n != 60} | {"k0505": 7}
        again = await batches_of(txn.scan(KEYS["text"], columns=[NUMBERS]))
        assert {row["key"]: row["int64"] for row in again} == found
        txn.discard()


async def test_a_serializable_transaction_is_refused_if_its_batches_have_changed(tmp_path: Path) -> None:  # T14
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as db:
        txn = await db.begin(isolation="serializable")
        assert await batches_of(txn.scan(KEYS["text"], columns=[NUMBERS])) == []
        async with db.transaction() as other:
            other.set(NUMBERS, "k1", 1)
        txn.set(TEXTS, "elsewhere", "there were none")
        with pytest.raises(ReadConflict):
            await txn.commit()


def test_blocking_transactions_that_met_no_rows_are_refused_if_there_are_some(tmp_path: Path) -> None:  # T14
    """A blocking scan has fetched its first page before it becomes batches."""
    with perco.sync.open(tmp_path, SCHEMA, options=OPTIONS) as db:
        one, other = (db.begin(isolation="serializable") for _ in range(2))
        for txn, key in (one, "k1"), (other, "k2"):
            assert list(txn.scan(KEYS["text"], columns=[NUMBERS]).to_batches()) == []
            txn.set(NUMBERS, key, 1)
        one.commit()
        with pytest.raises(ReadConflict):
            other.commit()


@pytest.mark.parametrize("before", [False, True])
async def test_own_writes_about_the_rows_that_a_scan_has_taken(tmp_path: Path, before: bool) -> None:
    """Writes before and after those rows, before and after the scan becomes batches."""
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as db:
        async with db.transaction() as txn:
            for key in "dhm":
                txn.set(NUMBERS, key, 1)
        async with db.transaction() as txn:
            scan = txn.scan(KEYS["text"], columns=[NUMBERS])
            assert (await anext(scan)).key == "d"
            if before:
                txn.set(NUMBERS, "a", 1)
                txn.set(NUMBERS, "e", 1)
            batches = scan.to_batches()
            txn.set(NUMBERS, "f", 1)
            txn.set(NUMBERS, "z", 1)
            found = [row["key"] async for batch in batches for row in batch.to_pylist()]
            assert found == ["e"] * before + ["f", "h", "m", "z"]
            txn.discard()


def test_several_threads_share_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 100)
    with perco.sync.open(tmp_path, SCHEMA, options=OPTIONS) as db:
        with db.transaction() as txn:
            for n in range(3000):
                txn.set(NUMBERS, f"k{n:04}", n)
        with db.snapshot() as snap:
            batches = snap.scan(KEYS["text"], columns=[NUMBERS]).to_batches()
            found: list[int] = []
            entered: list[threading.Thread] = []

            class Noted:
                """The lock, and which threads have had it: without it, two of them may take one batch."""

                def __init__(self, of: threading.Lock) -> None:
                    self._of = of

                def __enter__(self) -> None:
                    self._of.acquire()
                    entered.append(threading.current_thread())

                def __exit__(self, *_: object) -> None:
                    self._of.release()

            monkeypatch.setattr(batches, "_lock", Noted(batches._lock))

            def read() -> None:
                found.extend(row["int64"] for batch in batches for row in batch.to_pylist())

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert sorted(found) == list(range(3000))
    assert len(set(entered)) == 4


async def test_commits_in_progress_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # C4
    """A snapshot above the timestamp of a commit that the disk has not taken yet."""
    told = trio.Event()

    async def write(db: perco.Database) -> None:
        async with db.transaction() as txn:
            txn.set(NUMBERS, "k1", 2)

    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as db:
        async with db.transaction() as txn:
            txn.set(NUMBERS, "k1", 1)
        driver, found = inside(db).driver, []
        past = driver.past

        async def waited(entry: Any) -> None:
            told.set()
            await past(entry)

        async def read() -> None:
            async with db.snapshot() as snap:
                found.extend(await batches_of(snap.scan(KEYS["text"], columns=[NUMBERS])))

        monkeypatch.setattr(driver, "past", waited)
        tablet = local_of(db).store.tablet(KEYS["text"].name, b"k1")
        assert isinstance(tablet, LmdbTablet)
        async with trio.open_nursery() as nursery:
            with held(tablet.engine):
                nursery.start_soon(write, db)
                while not driver.entered.cells:
                    await trio.lowlevel.checkpoint()
                nursery.start_soon(read)
                with trio.fail_after(60):
                    await told.wait()
    assert found == [{"key": "k1", "int64": 2}]


@pytest.mark.parametrize("times", [1, 1000])
async def test_rows_are_read_one_by_one_where_pages_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """... and pages again after them."""
    monkeypatch.setattr(columnar, "_ROWS_AFTER_FAILURE", 30)
    small(monkeypatch, 20)
    failed, take, fine = 0, Columns.take, 0

    def fails(*args: Any) -> Any:
        nonlocal failed, fine
        if fine == 1 and failed < times:
            failed += 1
            raise PageDamaged("injected")
        fine += 1
        return take(*args)

    monkeypatch.setattr(Columns, "take", fails)

    async def fill(db: perco.Database) -> None:
        async with db.transaction() as txn:
            for n in range(200):
                txn.set(NUMBERS, f"k{n:03}", n)

    async with opened("owner", tmp_path, fill) as (db, _), db.snapshot() as snap:
        found = await batches_of(snap.scan(KEYS["text"], columns=[NUMBERS]))
    assert [row["int64"] for row in found] == list(range(200))
    assert (failed, fine > 2) == ((1, True) if times == 1 else (200 // 30 + 1, False))


async def test_a_cell_that_cannot_be_decoded_is_told_with_its_place(tmp_path: Path) -> None:
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as db:
        async with db.transaction() as txn:
            for n in range(5):
                txn.set(NUMBERS, f"k{n}", n)
        bound = inside(db).known.bind(NUMBERS)
        row = (KEYS["text"].row("k3"), (), ((WRITE, bound.column, txn.commit_ts, bytes([PUT]) + bytes(8) + b"short"),))
        await inside(db).store.apply([Mutation("text", (row,))])
        async with db.snapshot() as snap:
            with pytest.raises(Corruption, match="k3"):
                await batches_of(snap.scan(KEYS["text"], columns=[NUMBERS]))


async def test_versions_that_are_gone_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # G5
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as db:
        async with db.transaction() as txn:
            txn.set(NUMBERS, "k1", 1)

        async def cut(table: str) -> int:
            return 1 << 40

        async with db.snapshot(ts=txn.commit_ts) as snap:
            monkeypatch.setattr(inside(db).oracle, "cut", cut)
            with pytest.raises(SnapshotTooOld):
                await batches_of(snap.scan(KEYS["text"], columns=[NUMBERS]))


async def test_a_reader_is_for_other_threads(tmp_path: Path) -> None:
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as db:
        async with db.transaction() as txn:
            txn.set(KEYS["tuple"].columns["int64"], ("a", 1), 7)
        async with db.snapshot() as snap:
            scan = snap.scan(KEYS["tuple"], columns=[KEYS["tuple"].columns["int64"]])
            reader = scan.to_arrow(key=["letter", "n"])
            assert reader.schema.names == ["letter", "n", "int64"]
            with pytest.raises(UsageError, match="waits for the loop"):
                reader.read_all()
            scan = snap.scan(KEYS["tuple"], columns=[KEYS["tuple"].columns["int64"]])
            table = await trio.to_thread.run_sync(scan.to_arrow(key=["letter", "n"]).read_all)
            assert table.to_pylist() == [{"letter": "a", "n": 1, "int64": 7}]
            late = snap.scan(KEYS["tuple"]).to_arrow()
        with pytest.raises(TransactionClosed):
            await trio.to_thread.run_sync(late.read_all)


def test_threads_read_while_others_write(tmp_path: Path) -> None:
    with perco.sync.open(tmp_path, SCHEMA, options=OPTIONS) as db:
        with db.transaction() as txn:
            for n in range(100):
                txn.set(NUMBERS, f"k{n:03}", n)
        with db.snapshot() as snap:
            with db.transaction() as txn:
                txn.set(NUMBERS, "k000", 1000)
            table: pa.Table = snap.scan(KEYS["text"], columns=[NUMBERS]).to_arrow().read_all()
        assert table["int64"].to_pylist() == list(range(100))
        with db.transaction() as txn:
            txn.set(NUMBERS, "k001", 1001)
            rows = [row for batch in txn.scan(KEYS["text"], limit=2).to_batches() for row in batch.to_pylist()]
        assert [row["int64"] for row in rows] == [1000, 1001]


async def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow" or name.startswith("perco.arrow")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "perco.txn.columnar")
    monkeypatch.delattr("perco.txn.columnar")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as db, db.snapshot() as snap:
        with pytest.raises(UsageError, match=r"Arrow needs pyarrow: pip install 'perco\[arrow\]'"):
            snap.scan(KEYS["text"]).to_batches()
