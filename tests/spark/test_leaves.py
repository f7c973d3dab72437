"""Cells found in the pages of a tablet's file without LMDB: the same ones that its cursor finds, whatever the tree."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import perco
from perco.arrow import leaves
from perco.arrow.columns import Columns, Taken
from perco.arrow.fields import Field
from perco.database.inside import inside, local_owner
from perco.errors import Corruption, Unavailable
from perco.serve.opening import open
from perco.storage import WRITE, lmdb_native
from perco.storage.keys import escape
from perco.storage.pages import PageDamaged
from perco.storage.rowstore import LocalRowStore
from perco.storage.walking import Leaves

TABLE = perco.Table("rows", key=perco.BYTES)
VALUE = TABLE.column("value", perco.BYTES)
OTHER = TABLE.column("other", perco.BYTES)
SCHEMA = perco.Schema(TABLE)
OPTIONS = perco.Options(durability="process")
_NO_DIGITS = {ord(digit): None for digit in "0123456789"}


async def fill(folder: Path, rows: int, seed: int) -> None:
    """Rows with keys of every length, in no order, some with many versions."""
    rng = random.Random(seed)
    async with perco.open(folder, SCHEMA, options=OPTIONS) as db:
        for _ in range(rows // 100):
            async with db.transaction() as txn:
                for _ in range(100):
                    key = bytes(rng.choices(b"\0ab", k=rng.randrange(1, 9))) + rng.randbytes(rng.randrange(0, 60))
                    txn.set(
                        rng.choice([VALUE, OTHER]), key, rng.randbytes(rng.randrange(0, rng.choice([200, 200, 2000])))
                    )
        for n in range(50):
            async with db.transaction() as txn:
                txn.set(VALUE, b"often", b"%d" % n)


@asynccontextmanager
async def beside(folder: Path) -> AsyncIterator[LocalRowStore]:
    """The store of a reader beside the owner."""
    async with open(folder, readonly=True) as db:
        local = local_owner(db).backend.local
        assert local is not None
        yield local.store


def engine_of(store: LocalRowStore) -> Any:
    return store.tablet("rows", b"").engine  # type: ignore[attr-defined]


def by_cursor(store: LocalRowStore, start: bytes, stop: bytes | None) -> list[tuple[bytes, bytes]]:
    engine = engine_of(store)
    engine._open_groups([WRITE])
    with engine._begin() as txn, txn.cursor(engine._dbs[WRITE]) as cursor:
        found = list(cursor.iternext(True, True)) if cursor.set_range(escape(start)) else []
    return [(key, value) for key, value in found if stop is None or key < escape(stop)]


def by_pages(
    store: LocalRowStore, start: bytes, stop: bytes | None, count: int
) -> tuple[list[tuple[bytes, bytes]], list[int]]:
    """All cells, and how many were found in each view."""
    found: list[tuple[bytes, bytes]] = []
    sizes: list[int] = []
    low: bytes | None = start
    while low is not None:
        found_here = store.find_leaves("rows", low, stop, count)
        assert found_here is not None
        walked = leaves.walk(found_here, low, stop, count)
        if walked is None:
            count *= 2
            continue
        cells = walked.cells
        sizes.append(len(cells.begins))
        found += [(cells.key(n), cells.value(n)) for n in range(sizes[-1])]
        assert walked.next is None or walked.next > low
        low = walked.next
    return found, sizes


@pytest.mark.parametrize("rows", [100, 4000])
async def test_all_cells_of_a_range_in_order(tmp_path: Path, rows: int) -> None:
    """Trees of one page and of three levels; ranges that begin and end anywhere; a row with more cells than a view."""
    await fill(tmp_path, rows, 1)
    rng = random.Random(2)
    async with beside(tmp_path) as here:
        with engine_of(here)._begin() as txn:
            assert txn.stat(engine_of(here)._dbs[WRITE])["depth"] == (2 if rows == 100 else 3)
        keys = [b"", b"often", b"\xff", *(rng.randbytes(3) for _ in range(6)), b"a\0", b"\0" * 40]
        for _ in range(25):
            start, stop = sorted(rng.sample(keys, 2))
            for end in (stop, None):
                wanted = by_cursor(here, start, end)
                count = rng.choice([1, 20, 333, 100_000])
                found, sizes = by_pages(here, start, end, count)
                assert found == wanted
                assert max(sizes) <= max(count, 64)  # "often" needs 50; counts are doubled


async def test_an_empty_group(tmp_path: Path) -> None:
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS):
        pass
    async with beside(tmp_path) as here:
        assert by_pages(here, b"", None, 10) == ([], [0])


async def test_a_damaged_page_is_noticed_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bits of pages: either the walk says so, or every cell lies within the pages."""
    await fill(tmp_path, 1000, 3)
    rng, noticed, read = random.Random(4), set[str](), os.pread

    def damaged_into(file: int, buffers: list[memoryview], offset: int) -> int:
        [memory] = buffers
        data = damaged(file, len(memory), offset)
        memory[: len(data)] = data
        return len(data)

    def damaged(file: int, count: int, offset: int) -> bytes:
        data = bytearray(read(file, count, offset))
        if data and rng.random() < 0.8:
            data[rng.randrange(rng.choice([32, len(data)]))] ^= 1 << rng.randrange(8)
        return bytes(data)

    async with beside(tmp_path) as here:
        monkeypatch.setattr(os, "pread", damaged)
        monkeypatch.setattr(os, "preadv", damaged_into)
        monkeypatch.setattr(lmdb_native, "leaves", lambda: None)
        for _ in range(500):
            try:
                found = here.find_leaves("rows", b"", None, 50)
                assert found is not None
                walked = leaves.walk(found, b"", None, 50)
            except (PageDamaged, Corruption) as error:
                noticed.add(str(error).replace(str(here), "").translate(_NO_DIGITS))
                continue
            if walked is not None and len(walked.cells.begins):
                assert int(walked.cells.stops.max()) <= len(walked.cells.buffer)
    assert len(noticed) >= 8, noticed


def changed(leaves: Leaves, rng: random.Random) -> Leaves:
    """Flip some bits, in a page's head or anywhere in it: often in the last one, after which nothing may be read."""
    data = bytearray(leaves.data)
    for _ in range(rng.choice([1, 1, 5])):
        page = rng.choice([rng.randrange(len(leaves.numbers)), len(leaves.numbers) - 1]) * leaves.page
        data[page + rng.randrange(rng.choice([16, 32, leaves.page]))] ^= 1 << rng.randrange(8)
    return leaves._replace(data=bytes(data))


def must_be_equal(here: Taken, there: Taken) -> None:
    assert (here.cells, here.next, here.found is None) == (there.cells, there.next, there.found is None)
    if here.found is None or there.found is None:
        return
    assert here.found.prefixes.equals(there.found.prefixes)
    assert here.found.long == there.found.long
    assert here.found.columns.keys() == there.found.columns.keys()
    for number, column in here.found.columns.items():
        its = there.found.columns[number]
        assert (column.rows.tolist(), column.long) == (its.rows.tolist(), its.long)
        assert column.bodies.equals(its.bodies)


@pytest.mark.skipif(lmdb_native.leaves() is None, reason="needs the C extension")
async def test_the_extension_makes_the_same_columns(tmp_path: Path) -> None:
    """Random ranges, timestamps and columns: it makes what numpy makes, and leaves the pages to numpy that numpy calls
    impossible."""
    await fill(tmp_path, 3000, 8)
    rng, native, counts = random.Random(9), lmdb_native.leaves(), Counter[str]()
    ends = [b"", b"often", b"\xff", *(rng.randbytes(3) for _ in range(6)), b"a\0", b"\0" * 40]
    async with open(tmp_path, readonly=True) as db:
        local = local_owner(db).backend.local
        assert local is not None
        numbers = [inside(db).known.bind(column).column for column in (VALUE, OTHER)]
        async with db.snapshot() as snap:
            last = snap.start_ts
        fields = [Field(f"{n}", pa.binary(), VALUE.codec, None, number=n) for n in numbers]
        for _ in range(2000):
            start, end = sorted(rng.sample(ends, 2))
            stop, count = rng.choice([end, None]), rng.choice([1, 20, 333, 100_000])
            found = local.store.find_leaves("rows", start, stop, count)
            assert found is not None
            ts = rng.choice([last, rng.randrange(last)])
            columns = Columns(TABLE.key, rng.sample(fields, rng.randrange(1, 3)), ts)
            made = columns._take_natively(native, found, start, stop, count)
            assert made is not NotImplemented
            walked = leaves.walk(found, start, stop, count)
            assert (made is None) == (walked is None)
            if made is not None and walked is not None:
                must_be_equal(made, Taken(len(walked.cells.begins), columns.find(walked.cells), walked.next))
                counts["rows"] += 0 if made.found is None else len(made.found.prefixes)
                counts["long"] += 0 if made.found is None else len(made.found.long)
            with suppress(Corruption):  # of a key that no row has
                flipped, impossible = changed(found, rng), False
                of_damaged = columns._take_natively(native, flipped, start, stop, count)
                try:
                    leaves.walk(flipped, start, stop, count)
                except PageDamaged:
                    impossible = True
                assert of_damaged is NotImplemented or not impossible
                counts["damaged, left" if of_damaged is NotImplemented else "damaged, made"] += 1
    assert min(counts[each] for each in ("rows", "long", "damaged, left", "damaged, made")) > 100, counts


def _lower(page: bytearray, slot: int, value: int) -> None:
    page[12] ^= 1  # the places of the cells end within one


def _place(page: bytearray, slot: int, value: int) -> None:
    page[16] ^= 1  # a node begins at an odd place


def _kind(page: bytearray, slot: int, value: int) -> None:
    page[value] = 9


def _short(page: bytearray, slot: int, value: int) -> None:
    page[slot : slot + 2] = bytes([3, 0])  # bytes of the value


@pytest.mark.parametrize("how", ["native", "numpy"])
@pytest.mark.parametrize("damage", [_lower, _place, _kind, _short])
async def test_each_kind_of_damage_is_noticed(
    tmp_path: Path, how: str, damage: Callable[[bytearray, int, int], None]
) -> None:
    if how == "native" and lmdb_native.leaves() is None:
        pytest.skip("needs the C extension")
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as db, db.transaction() as txn:
        for n in range(9):
            txn.set(VALUE, b"%d" % n, b"value")
        number = inside(db).known.bind(VALUE).column
    async with beside(tmp_path) as here:
        found = here.find_leaves("rows", b"", None, 100)
    assert found is not None
    columns = Columns(TABLE.key, [Field("a", pa.binary(), VALUE.codec, None, number=number)], txn.commit_ts)
    page = bytearray(found.data)
    slot = int.from_bytes(page[16:18], "little")
    damage(page, slot, slot + 8 + int.from_bytes(page[slot + 6 : slot + 8], "little"))
    damaged = found._replace(data=bytes(page))
    if how == "native":
        assert isinstance(columns._take_natively(lmdb_native.leaves(), found, b"", None, 100), Taken)
        assert columns._take_natively(lmdb_native.leaves(), damaged, b"", None, 100) is NotImplemented
    else:
        with pytest.raises((PageDamaged, Corruption)):
            columns.find(leaves.walk(damaged, b"", None, 100).cells)  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["native", "numpy"])
def test_cells_that_overlap_are_noticed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of one page that have the same bytes could together be longer than the leaves by any factor."""
    if how == "native" and lmdb_native.leaves() is None:
        pytest.skip("needs the C extension")
    size, slots = 4096, 1000
    key = escape(b"k") + (1 << 16).to_bytes(4, "big") + bytes(8)
    record = b"\1" + bytes(1500)
    node = len(record).to_bytes(2, "little") + bytes(4) + len(key).to_bytes(2, "little") + key + record
    upper = size - len(node) - (len(node) & 1)
    page = (7).to_bytes(8, "little") + bytes(2) + (2).to_bytes(2, "little")
    page += (16 + 2 * slots).to_bytes(2, "little") + upper.to_bytes(2, "little") + upper.to_bytes(2, "little") * slots
    page = page.ljust(upper, b"\0") + node
    found = Leaves(size, [7], page.ljust(size, b"\0"), False, [], None)
    if how == "numpy":
        monkeypatch.setattr(lmdb_native, "leaves", lambda: None)
    columns = Columns(TABLE.key, [Field("a", pa.binary(), VALUE.codec, None, number=1 << 16)], 1)
    with pytest.raises(PageDamaged, match="overlap"):
        columns.take(found, b"", None, 10_000)
    if how == "native":
        native = lmdb_native.leaves()
        assert columns._take_natively(native, found, b"", None, 10_000) is NotImplemented


async def test_more_columns_than_the_extension_takes(tmp_path: Path) -> None:
    table = perco.Table("wide", key=perco.TEXT)
    many = [table.column(f"c{n}", perco.INT64) for n in range(70)]
    async with perco.open(tmp_path, perco.Schema(table), options=OPTIONS) as db:
        async with db.transaction() as txn:
            for n, column in enumerate(many):
                txn.set(column, f"k{n % 3}", n)
        async with db.snapshot() as snap:
            found = pa.Table.from_batches([batch async for batch in snap.scan(table).to_batches()])
    assert found.num_columns == 71
    assert [found[f"c{n}"].to_pylist()[n % 3] for n in range(70)] == list(range(70))


@pytest.mark.parametrize("part", ["data", "numbers", "order"])
async def test_an_answer_that_was_cut_or_mixed_up_is_noticed(tmp_path: Path, part: str) -> None:
    await fill(tmp_path, 1000, 5)
    async with beside(tmp_path) as here:
        found = here.find_leaves("rows", b"", None, 10_000)
        assert found is not None
        assert len(found.numbers) > 3
    if part == "data":
        found = found._replace(data=found.data[:-1])
    elif part == "numbers":
        found = found._replace(numbers=found.numbers[1:])
    else:
        found = found._replace(numbers=found.numbers[::-1])
    with pytest.raises(PageDamaged):
        leaves.walk(found, b"", None, 10_000)
    columns = Columns(TABLE.key, [Field("a", pa.binary(), VALUE.codec, None, number=1 << 16)], 1)
    with pytest.raises(PageDamaged):
        columns.take(found, b"", None, 10_000)


async def test_a_file_that_has_replaced_another_is_not_read(tmp_path: Path) -> None:
    """P6: a compaction puts a new file in the place of the old one, which the reader still has open."""
    await fill(tmp_path, 100, 6)
    async with beside(tmp_path) as here:
        data = engine_of(here).path / "data.mdb"
        copy = data.with_suffix(".copy")
        copy.write_bytes(data.read_bytes())
        copy.rename(data)
        with pytest.raises(Unavailable, match="replaced"):
            here.find_leaves("rows", b"", None, 10)


async def test_files_that_are_not_there_while_others_take_their_place(tmp_path: Path) -> None:
    """P6: a compaction removes the old files, and then gives their name to the new ones."""
    await fill(tmp_path, 100, 7)
    async with beside(tmp_path) as here:
        path = engine_of(here).path
        path.rename(path.with_suffix(".old"))
        with pytest.raises(Unavailable):
            here.find_leaves("rows", b"", None, 10)
