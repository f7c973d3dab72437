"""Columns made of a tablet's files, beside the owner: the same rows as a snapshot's scan, over random data."""

from __future__ import annotations

import pickle
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest
import trio
from hypothesis import given, settings, strategies as st

import perco
from perco.arrow.columns import Columns, _firsts
from perco.arrow.leaves import Cells
from perco.database.beside import BesideOracle
from perco.database.inside import inside
from perco.errors import Unavailable, UsageError
from perco.protocol.records import PUT
from perco.serve import rows
from perco.serve.opening import SOCKET, open
from perco.spark import cutting, direct, source, types
from perco.spark.asked import OF_FRAMES, Asked
from perco.spark.direct import Beside, Elsewhere, Host, Walk
from perco.spark.ranges import Range
from perco.spark.source import Batch, PercoReader, PercoSource
from perco.spark.store import Store, serve
from perco.storage import WRITE, LmdbTablet, Mutation, lmdb_native
from perco.storage.keys import TAIL_BYTES, escape
from perco.txn import columnar
from perco.txn.columnar import Pages
from perco.txn.snapshot import scan_between
from tests.support.cells import KEYS, SCHEMA, filled, key_of, locked
from tests.support.held import held
from tests.support.places import local_of

T = TypeVar("T")
OPTIONS = perco.Options(durability="process")
PREFIXES = [b"a long key of some rows, " + end + b" and more" * more for end in (b"1", b"2", b"") for more in (0, 1, 2)]


async def by_rows(db: perco.Database, name: str, columns: list[str], range: Range, ts: int) -> pa.Table:
    table = db.schema.tables[name]
    chosen = [table.columns[each] for each in columns]
    schema = types.schema_of(table, "key", chosen)
    batch = Batch(table, chosen, "key", schema)
    async with db.snapshot(ts=ts) as snap:
        async for row in scan_between(snap, table, *range, columns=chosen):
            batch.add(row)
    return pa.Table.from_batches([batch.taken()])


async def by_files(
    db: perco.Database, name: str, columns: list[str], range: Range, ts: int, cells: int = 2000
) -> tuple[pa.Table, int]:
    """The table, and how many pages had to be read row by row."""
    table = db.schema.tables[name]
    chosen = [table.columns[each] for each in columns]
    schema = types.schema_of(table, "key", chosen)
    batches: list[pa.RecordBatch] = []
    pages = 0

    async def rows(snap: perco.Snapshot, here: Range, send: Any) -> None:
        nonlocal pages
        pages += 1
        batch = Batch(table, chosen, "key", schema)
        async for row in scan_between(snap, table, *here, columns=chosen):
            batch.add(row)
        await send(batch.taken())

    async def send(batch: pa.RecordBatch) -> None:
        batches.append(batch)

    walk = Walk(db, table, chosen, "key", schema, range, ts, rows)
    walk._cells = cells
    await walk.run(send)
    assert walk.left is None
    return pa.Table.from_batches(batches, schema=walk._columns.schema), pages


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.one_of(st.binary(max_size=3), st.binary(min_size=7, max_size=10), st.sampled_from(PREFIXES)),
        st.dictionaries(st.integers(1, 5), st.integers(1, 3), min_size=1),
        min_size=1,
        max_size=12,
    )
)
def test_the_first_cell_of_each_row_is_found(rows: dict[bytes, dict[int, int]]) -> None:
    """Rows with some of the columns, in some versions; keys that share their first or their last bytes."""
    keys = sorted(
        escape(row) + column.to_bytes(4, "big") + version.to_bytes(8, "big")
        for row, columns in rows.items()
        for column, versions in columns.items()
        for version in range(versions)
    )
    stops = np.cumsum([len(key) for key in keys])
    buffer, begins = np.frombuffer(b"".join(keys), np.uint8), np.append(0, stops[:-1])
    lengths, columns = stops - TAIL_BYTES - begins, np.array([int.from_bytes(key[-12:-8], "big") for key in keys])
    found = _firsts(Cells(buffer, begins, stops, stops), begins, lengths, columns.astype(np.uint32))
    prefixes = [key[:-TAIL_BYTES] for key in keys]
    assert found.tolist() == [n == 0 or prefixes[n - 1] != prefix for n, prefix in enumerate(prefixes)]


@asynccontextmanager
async def reading(
    folder: Path, fill: Callable[[perco.Database], Awaitable[T]], how: str
) -> AsyncIterator[tuple[perco.Database, T]]:
    """Fill a store, and open it once more: beside the files, or as a client of their owner."""
    async with AsyncExitStack() as stack:
        owner = await stack.enter_async_context(perco.open(folder, SCHEMA, options=OPTIONS))
        done = await fill(owner)
        await inside(owner).owner.note_now()
        if how == "files":
            await stack.aclose()
            yield await stack.enter_async_context(open(folder, readonly=True)), done
        else:
            yield await stack.enter_async_context(perco.open(f"unix:{folder / SOCKET}", SCHEMA)), done


@pytest.mark.parametrize("by", ["native", "numpy"])
@pytest.mark.parametrize("how", ["files", "pages"])
@pytest.mark.parametrize("seed", range(3))
async def test_columns_have_the_rows_of_a_scan(
    tmp_path: Path, seed: int, how: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nulls, deleted cells, old and new versions, long values, every codec and key, ranges of keys."""
    if by == "numpy":
        monkeypatch.setattr(lmdb_native, "leaves", lambda: None)
    rng = random.Random(seed)
    compared = 0
    async with reading(tmp_path, partial(filled, seed=seed), how) as (db, moments):
        for name in KEYS:
            for _ in range(8):
                table = db.schema.tables[name]
                columns = rng.sample(list(table.columns), rng.randrange(1, len(table.columns) + 1))
                ends = sorted(table.row(key_of(rng, name)) for _ in range(2))
                range_ = rng.choice([Range(), Range(ends[0], ends[1] + b"\0"), Range(ends[0], None)])
                ts = rng.choice(moments)
                wanted = await by_rows(db, name, columns, range_, ts)
                found, _ = await by_files(db, name, columns, range_, ts, rng.choice([1, 7, 60, 2000]))
                assert found.schema == wanted.schema
                assert found.to_pylist() == wanted.to_pylist()
                compared += wanted.num_rows
    assert compared > 200


async def locks(db: perco.Database) -> tuple[list[int], int]:
    """Returns timestamps between transactions, and that of one that died between its prewrite and its commit."""
    moments = await filled(db, 7)
    start_ts = await locked(db, "text", ["k1", "k35"])
    moments.append(await inside(db).oracle.draw())
    return moments, start_ts


@pytest.mark.parametrize("how", ["files", "pages"])
async def test_rows_with_locks_are_read_as_a_snapshot_reads_them(tmp_path: Path, how: str) -> None:
    """Only locks that began before the timestamp are in the way, and only in the columns that are read. A client of the
    owner may settle those that it meets."""
    settled = False
    async with reading(tmp_path, locks, how) as (db, (moments, start_ts)):
        for columns, ts, blocked in (
            (["int64"], moments[-1], False),
            (["text", "int64"], start_ts - 1, False),
            (["text", "int64"], start_ts, True),
            (["text", "int64"], moments[-1], True),
        ):
            for cells in (20, 2000):
                found, pages = await by_files(db, "text", columns, Range(), ts, cells)
                wanted = await by_rows(db, "text", columns, Range(), ts)
                assert found.to_pylist() == wanted.to_pylist()
                assert bool(pages) == blocked or (settled and not pages)
                settled = blocked and how == "pages"
    assert wanted.num_rows >= 5


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk that views the files without end fails."""
    take, count = Columns.take, 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        assert count < 200, "the walk does not go on"
        return take(*args)

    monkeypatch.setattr(Columns, "take", counted)


@pytest.mark.usefixtures("views")
@pytest.mark.parametrize("versions", [1, 2, 3, 5, 11])
async def test_rows_with_long_values_that_do_not_fit_into_a_batch_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: int
) -> None:
    """A page of fewer cells than the first row has, and one of two rows, which are too much: the walk goes on."""
    monkeypatch.setattr(columnar, "_BATCH_BYTES", 1000)
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as owner:
        for _ in range(versions):
            async with owner.transaction() as txn:
                for n in range(9):
                    txn.set(KEYS["text"].columns["text"], f"k{n}", f"{n}" * 600)
        await inside(owner).owner.note_now()
    async with open(tmp_path, readonly=True) as db:
        wanted = await by_rows(db, "text", ["text"], Range(), txn.commit_ts)
        found, _ = await by_files(db, "text", ["text"], Range(), txn.commit_ts)
        assert found.to_pylist() == wanted.to_pylist()
        assert found.num_rows == 9


@pytest.mark.usefixtures("views")
async def test_a_row_with_many_versions_and_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "_CELLS_BY_ROW", 10)
    column = KEYS["text"].columns["text"]
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as owner:
        for n in range(60):
            async with owner.transaction() as txn:
                txn.set(column, "k1", f"{n}")
        await locked(owner, "text", ["k1"])
        ts = await inside(owner).oracle.draw()
        await inside(owner).owner.note_now()
    async with open(tmp_path, readonly=True) as db:
        found, pages = await by_files(db, "text", ["text"], Range(), ts)
        assert found.to_pylist() == [{"key": "k1", "text": "59"}]
        assert pages == 1


@pytest.mark.parametrize("rest", [b"", b"x", b"abcdefgh", b"abcdefghABCDEFGH", b"\0abcdefg", b"abcdefg\0"])
async def test_keys_about_the_number_of_zeros_at_which_their_encoding_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    """One batch for each number of zeros: how a batch's keys are decoded depends on the key that has the most."""
    monkeypatch.setattr(direct, "_CELLS_MAX", 1)
    column = KEYS["bytes"].columns["int64"]
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as owner:
        for zeros in range(29, 36):
            async with owner.transaction() as txn:
                txn.set(column, b"k" + b"\0" * zeros + rest, zeros)
        await inside(owner).owner.note_now()
    async with open(tmp_path, readonly=True) as db:
        found, _ = await by_files(db, "bytes", ["int64"], Range(), txn.commit_ts, 1)
        wanted = [{"key": b"k" + b"\0" * zeros + rest, "int64": zeros} for zeros in range(29, 36)]
        assert sorted(found.to_pylist(), key=lambda row: int(row["int64"])) == wanted


async def versions(db: perco.Database) -> int:
    """A row with more versions than a page may have, between two others."""
    column = KEYS["text"].columns["text"]
    for n in range(90):
        async with db.transaction() as txn:
            for key in ("k0", "k1", "k2") if n == 0 else ("k1",):
                txn.set(column, key, f"{n}")
    return txn.commit_ts


@pytest.mark.usefixtures("views")
@pytest.mark.parametrize("how", ["files", "pages"])
@pytest.mark.parametrize("most", [3, 40])
async def test_a_row_with_more_cells_than_a_page_may_have_is_read_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, most: int
) -> None:
    monkeypatch.setattr(direct, "_CELLS_MAX", most)
    monkeypatch.setattr(rows, "_LEAF_CELLS", most)
    async with reading(tmp_path, versions, how) as (db, ts):
        for range_ in (Range(), Range(b"k1", b"k1\0"), Range(b"k1", None)):
            wanted = await by_rows(db, "text", ["text"], range_, ts)
            found, pages = await by_files(db, "text", ["text"], range_, ts, 2)
            assert found.to_pylist() == wanted.to_pylist()
            assert pages == 1


async def test_pages_for_a_client_have_the_commits_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C4: the owner answers once the commits up to the timestamp that it has begun are in its files."""
    column, told = KEYS["text"].columns["text"], trio.Event()

    async def write(db: perco.Database) -> None:
        async with db.transaction() as txn:
            txn.set(column, "k1", "new")

    async def read(db: perco.Database, ts: int) -> None:
        found, _ = await by_files(db, "text", ["text"], Range(), ts)
        rows.extend(found.to_pylist())
        told.set()

    rows: list[Any] = []
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as owner:
        driver = inside(owner).driver
        past = driver.past

        async def waited(entry: Any) -> None:
            told.set()
            await past(entry)

        tablet = local_of(owner).store.tablet("text", b"k1")
        assert isinstance(tablet, LmdbTablet)
        async with perco.open(f"unix:{tmp_path / SOCKET}", SCHEMA) as db, trio.open_nursery() as nursery:
            monkeypatch.setattr(driver, "past", waited)
            with held(tablet.engine):
                nursery.start_soon(write, owner)
                while not driver.entered.cells:
                    await trio.lowlevel.checkpoint()
                nursery.start_soon(read, db, await inside(owner).oracle.draw())
                await told.wait()
    assert rows == [{"key": "k1", "text": "new"}]


async def test_damaged_cells_are_left_to_a_scan(tmp_path: Path) -> None:
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as owner:
        async with owner.transaction() as txn:
            for n in range(5):
                txn.set(KEYS["int64"].columns["int64"], n, n)
        bound = inside(owner).known.bind(KEYS["int64"].columns["int64"])
        record = bytes([PUT]) + bytes(8) + b"short"
        row = (KEYS["int64"].row(3), (), ((WRITE, bound.column, txn.commit_ts, record),))
        await inside(owner).store.apply([Mutation("int64", (row,))])
        await inside(owner).owner.note_now()
    async with open(tmp_path, readonly=True) as db:
        with pytest.raises(ValueError, match="expected 8 bytes"):
            await by_files(db, "int64", ["int64"], Range(), txn.commit_ts)


class NoSpark:
    """All that `serve` asks of a session."""

    class sparkContext:
        master = "local[2]"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Store]:
    """A store that another process owns."""
    with serve(tmp_path / "s", NoSpark, durability="process") as store:  # type: ignore[arg-type]
        yield store


def reader(store: Store, cores: int = 1, **options: str) -> PercoReader:
    asked = Asked({"table": "text", **options}, store, OF_FRAMES)
    columns = list(KEYS["text"].columns.values())
    return PercoReader(asked, types.schema_of(KEYS["text"], "key", columns), 60.0, None, cores)


def rows_of(read: PercoReader) -> list[dict[str, Any]]:
    return [row for span in read.partitions() for batch in read.read(span) for row in batch.to_pylist()]


async def some(store: Store) -> None:
    async with store.open(SCHEMA) as db:
        await filled(db, 3)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The beginnings and ends of walks over files."""
    met: list[str] = []
    run = Walk.run

    async def noted(self: Walk, send: Any) -> None:
        met.append("begun")
        await run(self, send)
        met.append("ended")

    monkeypatch.setattr(Walk, "run", noted)
    return met


def test_a_table_is_read_from_its_files_while_another_process_owns_them(served: Store, walks: list[str]) -> None:
    """Rows that have just been committed are there: the owner notes the clock when it makes the pin."""
    trio.run(some, served)
    wanted = rows_of(reader(served, read="rows"))
    assert walks == []
    assert len(wanted) > 20
    for read in ("files", "pages"):
        walks.clear()
        assert rows_of(reader(served, read=read)) == wanted
        assert walks == ["begun", "ended"] * 3  # a tablet each


def no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, no task or plan may connect to the store's owner."""

    def connect(self: Store) -> Any:
        raise AssertionError("it connects to the owner")

    monkeypatch.setattr(Store, "reading", connect)
    monkeypatch.setattr(Store, "joining", connect)


def test_files_are_read_without_the_owner(served: Store, walks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is planned when it is loaded; its pin is held for long enough."""
    trio.run(some, served)
    wanted = rows_of(reader(served, read="rows"))

    class Source(PercoSource):
        _store = served

    frame = Source({"table": "text"})
    schema = frame.schema()
    no_owner(monkeypatch)
    read = frame.reader(schema)
    assert isinstance(read, PercoReader)
    assert rows_of(read) == wanted
    assert walks == ["begun", "ended"] * 3
    in_task = pickle.loads(pickle.dumps(read))
    assert in_task._planned is None, "a task does not get the partitions of the others"
    assert frame._planned is None
    assert [row for span in read.partitions() for batch in in_task.read(span) for row in batch.to_pylist()] == wanted


async def pins_of(store: Store) -> list[perco.Pin]:
    async with store.joining() as db:
        return await db.pins()


def test_a_pin_that_was_made_a_while_ago_is_renewed_before_files_are_read(
    served: Store, walks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trio.run(some, served)
    read = reader(served)
    spans = read.partitions()
    [before] = trio.run(pins_of, served)
    read._lease_s = 10 * read._lease_s  # of which less than nine tenths are left
    renewed, pin = [], perco.Database.pin

    def noted(self: perco.Database, *args: Any, **how: Any) -> Any:
        renewed.append(len(walks))
        return pin(self, *args, **how)

    monkeypatch.setattr(perco.Database, "pin", noted)
    rows = [row for span in spans for batch in read.read(span) for row in batch.to_pylist()]
    assert len(rows) > 20
    assert renewed == [0], "the first task renews the pin for all of them, before it reads"
    [after] = trio.run(pins_of, served)
    assert (after.name, after.ts) == (before.name, before.ts)
    assert after.expires_ms - before.expires_ms > 8 * 60_000


def test_a_pin_is_renewed_while_files_are_read(served: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    trio.run(some, served)
    read = reader(served)
    [span, *_] = read.partitions()
    wanted = [batch.to_pylist() for batch in read.read(span)]
    left_s, run, pin = iter([54.01, 54.01, 29.9]), Walk.run, perco.Database.pin
    looked, renewed = [], trio.Event()

    async def left(db: perco.Database, name: str, ts: int) -> float:
        assert (name, ts) == (span.pin, span.ts)
        looked.append(next(left_s, 60.0))
        return looked[-1]

    def noted(self: perco.Database, *args: Any, **how: Any) -> Any:
        renewed.set()
        return pin(self, *args, **how)

    async def waiting(self: Walk, send: Any) -> None:
        assert looked, "it is known how long the pin holds"
        with trio.fail_after(60):
            await renewed.wait()
        await run(self, send)

    monkeypatch.setattr(source, "_STALE", source._FRESH)
    monkeypatch.setattr(direct, "left_s", left)
    monkeypatch.setattr(perco.Database, "pin", noted)
    monkeypatch.setattr(Walk, "run", waiting)
    assert [batch.to_pylist() for batch in read.read(span)] == wanted
    assert looked[:3] == [54.01, 54.01, 29.9], "it looks again whether another task has renewed the pin"


def test_many_tasks_renew_a_pin_at_the_same_time(served: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them find that another one has been faster, which is as good."""
    trio.run(some, served)
    read = reader(served, read="pages")
    [span, *_] = read.partitions()
    wanted = [batch.to_pylist() for batch in read.read(span)]
    lost, pins = [], perco.Database.pins

    async def counted(self: perco.Database) -> list[perco.Pin]:
        lost.append(self)
        return await pins(self)

    monkeypatch.setattr(perco.Database, "pins", counted)
    with ThreadPoolExecutor(40) as threads:
        found = list(threads.map(lambda _: [batch.to_pylist() for batch in read.read(span)], range(40)))
    assert found == [wanted] * 40
    assert lost, "none was in the way of another"


def test_a_pin_that_another_program_has_moved_is_not_taken_over(served: Store, walks: list[str]) -> None:
    trio.run(some, served)
    read = reader(served, read="pages")
    [span, *_] = read.partitions()

    async def move() -> None:
        async with served.open(SCHEMA) as db:
            await db.drop_pin(span.pin)
            async with db.pin(span.pin, lease_s=60, keep=True) as pin:
                assert pin.start_ts > span.ts

    trio.run(move)
    with pytest.raises(UsageError, match="is at timestamp"):
        list(read.read(span))
    assert walks == []


def test_a_task_fails_if_the_pin_can_no_longer_be_held(served: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows may have been sent, so it must not begin again with another way to read."""
    trio.run(some, served)
    read = reader(served)
    [span, *_] = read.partitions()
    left_s, run = iter([54.001, 29.9]), Walk.run

    async def left(db: perco.Database, name: str, ts: int) -> float:
        return next(left_s)

    async def and_then_wait(self: Walk, send: Any) -> None:
        await run(self, send)
        await trio.sleep_forever()

    def unreachable(self: Store) -> Any:
        raise Unavailable("the owner does not answer")

    monkeypatch.setattr(source, "_STALE", source._FRESH)
    monkeypatch.setattr(direct, "left_s", left)
    monkeypatch.setattr(Walk, "run", and_then_wait)
    monkeypatch.setattr(Store, "reading", unreachable)
    with pytest.raises(Unavailable, match="the owner does not answer"):
        list(read.read(span))


@pytest.mark.parametrize("wrong", ["host", "pin", "folder"])
def test_files_of_another_machine_or_store_are_not_read(
    served: Store, walks: list[str], wrong: str, tmp_path: Path
) -> None:
    trio.run(some, served)
    read = reader(served)
    with serve(tmp_path / "other", NoSpark, durability="process") as other:  # type: ignore[arg-type]
        trio.run(some, other)
        [span, *_] = read.partitions()
        assert span.beside is not None
        if wrong == "host":
            span.beside = span.beside._replace(host=Host("another", span.beside.host.processes))
        elif wrong == "folder":
            span.beside = Beside(str(tmp_path / "other"), span.beside.host)
        else:
            span.pin = "another"

        async def main() -> None:
            assert span.beside is not None
            async with direct.opened(span.beside, span.pin, span.ts):
                raise AssertionError("it is opened")

        with pytest.raises(
            Elsewhere, match="another machine" if wrong == "host" else "not have the snapshot's pin|not noted"
        ):
            trio.run(main)
    assert walks == []


def test_a_table_is_cut_for_all_cores(served: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts have about equally many cells, whatever the keys are; no row is read twice, and none is missed."""

    async def fill() -> None:
        async with served.open(SCHEMA) as db:
            for first in range(0, 4000, 1000):
                async with db.transaction() as txn:
                    for n in range(first, first + 1000):
                        txn.set(KEYS["text"].columns["int64"], f"k1/{n:04}" if n < 3990 else f"k4{n}", n)

    trio.run(fill)
    monkeypatch.setattr(cutting, "CELLS_MIN", 300)
    wanted = rows_of(reader(served))
    assert [len(reader(served, cores).partitions()) for cores in (1, 2, 6, 50)] == [3, 2 + 2, 2 + 6, 2 + 13]
    read = reader(served, 6)
    counts = [sum(batch.num_rows for batch in read.read(span)) for span in read.partitions()]
    assert (sum(counts), counts[-2:]) == (4000, [10, 0])
    assert all(500 <= count <= 830 for count in counts[:-2]), counts
    assert rows_of(read) == wanted
    assert len(reader(served, 6, start="k1/1000", stop="k1/2000").partitions()) == 3
    assert len(reader(served, 6, partitions="2").partitions()) == 3
    monkeypatch.setattr(cutting, "CELLS_MIN", 50_000)
    assert len(reader(served, 6).partitions()) == 3  # too small


def test_where_a_walk_ends_early_the_rest_is_read_through_the_owner(
    served: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is read twice, and none is missed."""
    trio.run(some, served)
    wanted = rows_of(reader(served, read="rows"))
    check, pages = Walk._check, 0

    async def splits(self: Walk, pages_: Pages) -> None:
        nonlocal pages
        pages += 1
        if pages == 3:
            raise perco.errors.TabletSplit("text")
        await check(self, pages_)

    monkeypatch.setattr(Walk, "_check", splits)
    monkeypatch.setattr(direct, "_CELLS_FIRST", 10)
    monkeypatch.setattr(direct, "_CELLS_MAX", 10)
    with pytest.warns(perco.errors.PercoWarning, match="reads through the store's owner: a tablet"):
        assert rows_of(reader(served)) == wanted
    assert pages > 3


def test_versions_that_are_gone_end_a_walk(served: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """G5: a version that the vacuum may have removed is not taken for missing; the owner says what is wrong."""
    trio.run(some, served)

    async def cut(self: Any, table: str) -> int:
        return 1 << 40

    monkeypatch.setattr(BesideOracle, "cut", cut)
    wanted = rows_of(reader(served, read="rows"))
    with pytest.warns(perco.errors.PercoWarning, match="no snapshot of table"):
        assert rows_of(reader(served)) == wanted


def test_a_compaction_or_a_split_under_a_read(served: Store, walks: list[str]) -> None:
    trio.run(some, served)
    read = reader(served)
    spans = read.partitions()
    wanted = rows_of(reader(served, read="rows"))

    async def change() -> None:
        async with served.open(SCHEMA) as db:
            await db.split(KEYS["text"], "k15")
            await db.compact(KEYS["text"])
            async with db.transaction() as txn:
                for n in range(40):
                    txn.delete(KEYS["text"].columns["text"], f"k{n}")

    trio.run(change)
    assert [row for span in spans for batch in read.read(span) for row in batch.to_pylist()] == wanted
    assert walks.count("ended") == len(spans)
