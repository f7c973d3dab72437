"""Cells found in the pages of a tablet's file without LMDB: the same ones that its cursor finds, whatever the tree."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import perco
from perco.database.inside import local_owner
from perco.errors import Corruption, Unavailable
from perco.serve.opening import open
from perco.spark import leaves
from perco.storage import WRITE, LmdbEngine
from perco.storage.keys import escape
from perco.storage.pages import PageDamaged
from perco.storage.walking import engine_of, viewed

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
                    txn.set(rng.choice([VALUE, OTHER]), key, rng.randbytes(rng.randrange(0, 200)))
        for n in range(50):
            async with db.transaction() as txn:
                txn.set(VALUE, b"often", b"%d" % n)


@asynccontextmanager
async def engine(folder: Path) -> AsyncIterator[LmdbEngine]:
    """A reader beside the owner."""
    async with open(folder, readonly=True) as db:
        local = local_owner(db).backend.local
        assert local is not None
        found = engine_of(local.store.tablet("rows", b""))
        assert found is not None
        yield found


def by_cursor(engine: LmdbEngine, start: bytes, stop: bytes | None) -> list[tuple[bytes, bytes]]:
    engine._open_groups([WRITE])
    with engine._begin() as txn, txn.cursor(engine._dbs[WRITE]) as cursor:
        found = list(cursor.iternext(True, True)) if cursor.set_range(escape(start)) else []
    return [(key, value) for key, value in found if stop is None or key < escape(stop)]


def by_pages(
    engine: LmdbEngine, start: bytes, stop: bytes | None, count: int
) -> tuple[list[tuple[bytes, bytes]], list[int]]:
    """All cells, and how many were found in each view."""
    found: list[tuple[bytes, bytes]] = []
    sizes: list[int] = []
    low: bytes | None = start
    while low is not None:
        with viewed(engine, low, stop) as view:
            walked = leaves.walk(view, low, stop, count)
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
    async with engine(tmp_path) as here:
        with viewed(here, b"", None) as view:
            assert view.tree.depth == (2 if rows == 100 else 3)
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
    async with engine(tmp_path) as here:
        assert by_pages(here, b"", None, 10) == ([], [0])


async def test_a_damaged_page_is_noticed_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes anywhere: either the walk says so, or every cell lies within its page."""
    await fill(tmp_path, 1000, 3)
    rng, noticed, read = random.Random(4), set[str](), leaves.os.pread

    def damaged(file: int, count: int, offset: int) -> bytes:
        data = bytearray(read(file, count, offset))
        if data and rng.random() < 0.8:
            data[rng.randrange(rng.choice([32, len(data)]))] ^= 1 << rng.randrange(8)
        return bytes(data)

    async with engine(tmp_path) as here:
        for _ in range(300):
            with viewed(here, b"", None) as view:
                monkeypatch.setattr(leaves.os, "pread", damaged)
                try:
                    walked = leaves.walk(view, b"", None, 50)
                except (PageDamaged, Corruption) as error:
                    noticed.add(str(error).translate(_NO_DIGITS))
                    continue
                finally:
                    monkeypatch.setattr(leaves.os, "pread", read)
            if walked is not None:
                cells = walked.cells
                assert len(cells.begins) == 0 or int(cells.stops.max()) <= len(cells.buffer)
    assert len(noticed) >= 8, noticed


async def test_a_file_that_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(tmp_path, 1000, 5)
    async with engine(tmp_path) as here:
        monkeypatch.setattr(leaves, "_AT_ONCE", 4)
        read = leaves.os.pread
        monkeypatch.setattr(leaves.os, "pread", lambda file, count, offset: read(file, count, offset)[: count - 1])
        with viewed(here, b"", None) as view, pytest.raises(PageDamaged):
            leaves.walk(view, b"", None, 10_000)


async def test_a_file_that_has_replaced_another_is_not_read(tmp_path: Path) -> None:
    """P6: a compaction puts a new file in the place of the old one, which the reader still has open."""
    await fill(tmp_path, 100, 6)
    async with engine(tmp_path) as here:
        data = here.path / "data.mdb"
        copy = data.with_suffix(".copy")
        copy.write_bytes(data.read_bytes())
        copy.rename(data)
        with pytest.raises(Unavailable, match="replaced"), viewed(here, b"", None):
            raise AssertionError("it is viewed")
