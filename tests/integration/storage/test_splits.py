"""Tablets in LMDB are split while they are written to, while the process dies, while the disk is full (P1 - P5)."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing

import perco
from perco.check.check import check
from perco.database.inside import inside, local_owner
from perco.errors import StoreFull
from perco.schema import catalogue as catalogues
from perco.storage import (
    APPLIED,
    LOCK,
    WRITE,
    Failed,
    Folder,
    LmdbEngine,
    LmdbTablet,
    Mutation,
    Verdict,
    splitting as copying,
)
from perco.tablets import splitter as splitters
from tests.support.copies import copy_as_itself
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.INT64)
n = docs.column("n", perco.INT64)
seen = docs.column("seen", perco.INT64)
SCHEMA = perco.Schema(docs)
KEYS = range(400)
TOTAL = 10 * len(KEYS)


@SCHEMA.observe(n, id="see")
async def see(txn: perco.Transaction, change: perco.Change[int, int]) -> None:
    txn.set(seen, change.key, change.value)


def options(**more: Any) -> perco.Options:
    return perco.Options(durability="process", **more)


@asynccontextmanager
async def opened(folder: Path, schema: perco.Schema = SCHEMA, **more: Any) -> AsyncIterator[perco.Database]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", perco.errors.PercoWarning)
        async with perco.open(folder, schema, options=options(**more)) as db:
            yield db


async def fill(txn: perco.Transaction) -> None:
    for key in KEYS:
        txn.set(n, key, 10)


async def move(txn: perco.Transaction, rng: random.Random) -> None:
    keys = rng.sample(KEYS, 6)
    values = [await txn.get(n, key) or 0 for key in keys]
    for key, value, by in zip(keys, values, (1, -1, 2, -2, 3, -3), strict=True):
        txn.set(n, key, value + by)


async def whole(db: perco.Database) -> list[bytes]:
    """All of it; returns where its tablets begin."""
    async with db.worker():
        await db.wait_idle(timeout=60)
    async with db.snapshot() as snap:
        rows = await snap.scan(docs).all()
        back = await snap.scan(docs, reverse=True).all()
    assert [row.key for row in rows] == list(KEYS) == [row.key for row in back][::-1]
    assert sum(row[n] for row in rows) == TOTAL
    assert all(row[n] == row[seen] for row in rows)
    assert not (await check(inside(db).driver.store, ts=await inside(db).oracle.draw())).findings
    await local_owner(db).splitting.clear()
    store = local_of(db).store
    assert not any(tablet.has_from(stop) for tablet in store.tablets() if (stop := store.stop_of(tablet)) is not None)
    return store.bounds("docs")


def tablet_of(db: perco.Database) -> LmdbTablet:
    tablet = local_of(db).store.tablet("docs", docs.row(0))
    assert isinstance(tablet, LmdbTablet)
    return tablet


async def test_while_it_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # P1 P2 P3
    monkeypatch.setattr(copying, "_CELLS", 50)
    split_apart = 0
    made = perco.errors.TabletSplit.__init__

    def counted(self: perco.errors.TabletSplit, table: str) -> None:
        nonlocal split_apart
        split_apart += 1
        made(self, table)

    monkeypatch.setattr(perco.errors.TabletSplit, "__init__", counted)
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        moved = 0

        async def mover(seed: int, stop: trio.Event) -> None:
            nonlocal moved
            rng = random.Random(seed)
            while not stop.is_set():
                await db.options(attempts=1000).run(move, rng)
                moved += 1

        for round in range(4):
            stop = trio.Event()
            async with db.worker(), trio.open_nursery() as nursery:
                for seed in range(12):
                    nursery.start_soon(mover, 100 * round + seed, stop)
                before = moved
                while moved < before + 50:
                    await trio.lowlevel.checkpoint()
                await db.split(docs)
                before = moved
                while moved < before + 50:
                    await trio.lowlevel.checkpoint()
                stop.set()
        bounds = await whole(db)
        assert len(bounds) == 5
        assert split_apart, "nothing that was to be written together was split"
    async with opened(tmp_path / "s") as db:
        assert await whole(db) == bounds


async def _split_and_note_states(folder: Path, states: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Split, and copy the folder at each step as if the machine had stopped there; their names."""
    names: list[str] = []

    def note(name: str) -> None:
        names.append(f"{len(names)} {name}")
        copy_as_itself(folder, states / names[-1], ignore=shutil.ignore_patterns("socket*"))

    def after(owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        async def noted(self: Any, *args: Any) -> Any:
            result = await function(self, *args)
            note(what)
            return result

        monkeypatch.setattr(owner, name, noted)

    after(LmdbTablet, "copy_from", "copied")
    after(LmdbTablet, "cut", "cut")
    after(splitters.Splitter, "_recorded", "recorded")
    after(LmdbTablet, "remove_from", "removing")
    place = Folder.place_tablet

    def placed(self: Folder, table: str, number: int) -> Path:
        path = place(self, table, number)
        note("placed")
        return path

    monkeypatch.setattr(Folder, "place_tablet", placed)
    monkeypatch.setattr("perco.storage.lmdb_tablet._REMOVED", 500)
    async with opened(folder, split=perco.options.SplitOptions(on=False)) as db:
        await db.split(docs, 250)
        note("split")
        for seed in range(20):
            await db.run(move, random.Random(seed))
        note("written to")
        await local_owner(db).splitting.clear()
        note("cleared")
    monkeypatch.undo()
    return names


async def test_whenever_the_machine_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # P4
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        await whole(db)
    names = await _split_and_note_states(tmp_path / "s", tmp_path / "states", monkeypatch)
    told = [name.partition(" ")[2] for name in names]
    assert told[:4] == ["copied", "cut", "placed", "recorded"]
    assert {"split", "written to", "removing", "cleared"} <= set(told)
    for name in names:
        async with opened(tmp_path / "states" / name) as db:
            split = docs.row(250) in await whole(db)
            assert split == (told[names.index(name)] not in ("copied", "cut", "placed"))
            for seed in range(20):
                await db.run(move, random.Random(seed))
            if not split:
                await db.split(docs, 250)  # its leftovers are in no split's way
        async with opened(tmp_path / "states" / name) as db:
            assert await whole(db) == [b"", docs.row(250)]


async def _unchanged(db: perco.Database) -> None:
    """And it can be split."""
    assert await whole(db) == [b""]
    assert local_of(db).path is not None
    assert {path.name for path in (local_of(db).path / "tablets").iterdir()} == {"_perco-0", "docs-0"}
    await db.run(move, random.Random(1))
    await db.split(docs, 250)
    assert await whole(db) == [b"", docs.row(250)]


def _fails(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def _fails_later(error: Exception) -> Callable[..., Awaitable[Any]]:
    async def fail(*_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        raise error

    return fail


FULL = StoreFull("somewhere", "no space")


@pytest.mark.parametrize(
    ("owner", "name", "failing"),
    [
        (copying.Copying, "__init__", _fails(FULL)),
        (copying.Copying, "step", _fails(FULL)),
        (copying.Copying, "finish", _fails(FULL)),
        (Folder, "place_tablet", _fails(FULL)),
        (splitters, "change", _fails_later(FULL)),
    ],
    ids=["begin", "copy", "cut", "place", "record"],
)
async def test_what_fails_has_changed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, failing: Any
) -> None:  # P4 S4
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing)
            with pytest.raises(StoreFull):
                await db.split(docs, 250)
        await _unchanged(db)


async def test_what_is_held_when_it_fails_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # P1
    async with opened(tmp_path / "s") as db, trio.open_nursery() as nursery:
        await db.run(fill)
        held: list[int] = []
        change = splitters.change

        async def fail(*_: Any) -> Any:
            nursery.start_soon(db.run, move, random.Random(1))
            while not tablet_of(db)._held:
                await trio.lowlevel.checkpoint()
            held.append(len(tablet_of(db)._held or ()))
            raise FULL

        monkeypatch.setattr(splitters, "change", fail)
        with pytest.raises(StoreFull):
            await db.split(docs, 1)
        monkeypatch.setattr(splitters, "change", change)
        assert held
        await _unchanged(db)


async def test_a_record_that_may_have_been_written_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # P4
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        tries = 0

        async def unsure(store: Any, step: Any) -> Any:
            nonlocal tries
            tries += 1
            made = await catalogues.change(store, step) if tries > 1 else None
            if tries < 4:
                raise perco.Unavailable("the disk did not answer")
            return made

        monkeypatch.setattr(splitters, "change", unsure)
        await db.split(docs, 250)
        assert tries == 4
        assert await whole(db) == [b"", docs.row(250)]


async def test_cancelled_it_has_changed_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        with trio.CancelScope() as scope:
            cut = LmdbTablet.cut

            async def cancelled(self: LmdbTablet, row: bytes) -> None:
                scope.cancel()
                await cut(self, row)

            monkeypatch.setattr(LmdbTablet, "cut", cancelled)
            await db.split(docs, 250)
        assert scope.cancelled_caught
        monkeypatch.undo()
        await _unchanged(db)


async def test_a_group_that_is_made_meanwhile_is_in_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = perco.Table("docs", key=perco.INT64)
    grown_n = grown.column("n", perco.INT64)
    grown.column("seen", perco.INT64)
    text = grown.column("text", perco.TEXT, group="long")
    long = "x" * 5000
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        copy_from = LmdbTablet.copy_from

        async def copying_on(self: LmdbTablet, *args: Any) -> int:
            cells = await copy_from(self, *args)
            address = f"unix:{tmp_path / 's' / 'socket'}"
            async with perco.open(address, perco.Schema(grown)) as other, other.transaction() as txn:
                for key in KEYS:
                    txn.set(text, key, long)
                    txn.set(grown_n, key, 10)
            return cells

        monkeypatch.setattr(LmdbTablet, "copy_from", copying_on)
        await db.split(docs, 250)
        address = f"unix:{tmp_path / 's' / 'socket'}"
        async with perco.open(address, perco.Schema(grown)) as other, other.transaction() as txn:
            txn.set(text, 399, long)
    async with opened(tmp_path / "s", perco.Schema(grown)) as db:
        assert len(local_of(db).store.bounds("docs")) == 2
        async with db.snapshot() as snap:
            assert [row[text] async for row in snap.scan(grown)] == [long] * len(KEYS)


async def test_in_the_background_what_is_large_is_split(tmp_path: Path) -> None:
    alone = perco.options.SplitOptions(bytes_max=150_000, period_s=0.01)
    async with opened(tmp_path / "s", split=alone) as db:
        split = trio.Event()
        local_owner(db).splitting.on_split.append(split.set)
        rng = random.Random(1)
        await db.run(fill)
        while not split.is_set():
            await db.run(move, rng)
        await whole(db)
    async with opened(tmp_path / "s") as db:
        assert len(await whole(db)) >= 2
    async with opened(tmp_path / "off", split=perco.options.SplitOptions(on=False, bytes_max=1, period_s=0.001)) as db:
        await db.run(fill)
        for _ in range(20):
            await db.run(move, rng)
        assert await whole(db) == [b""]


async def test_what_is_one_row_is_not_looked_at_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = trio.Event()
    looks = 0
    middle = LmdbTablet.middle

    async def counted(self: LmdbTablet, stop: bytes | None) -> bytes | None:
        nonlocal looks
        looks += 1
        looked.set()
        return await middle(self, stop)

    monkeypatch.setattr(LmdbTablet, "middle", counted)
    async with opened(tmp_path / "s", split=perco.options.SplitOptions(bytes_max=1, period_s=0.001)) as db:
        await looked.wait()
        for _ in range(30):
            await local_owner(db).note_now()
            await trio.sleep(0.001)
        assert looks == 1
        assert local_of(db).store.bounds("docs") == [b""]


async def _cut(db: perco.Database, folder: Path) -> LmdbTablet:
    tablet = tablet_of(db)
    await tablet.copy_from(docs.row(250), None, folder, [])
    await tablet.cut(docs.row(250))
    return tablet


def _mark(key: int, value: bytes | None = b"") -> Mutation:
    return Mutation("docs", ((docs.row(key), (), ((LOCK, 9 << 16, 1, value),)),))


async def test_what_is_queued_at_the_cut_is_held(tmp_path: Path) -> None:  # P1
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        tablet = tablet_of(db)
        await tablet.copy_from(docs.row(250), None, tmp_path / "aside", [])
        told: list[Verdict] = []
        local_of(db).store.apply_behind([_mark(399)], told.extend)
        local_of(db).store.apply_behind([_mark(0)], told.extend)
        await tablet.cut(docs.row(250))
        await local_of(db).store.apply([_mark(1)])
        assert told == [APPLIED]
        assert [mutation for mutation, _, _ in tablet.let_go()] == [_mark(399)]
        await tablet.uncut()
        await local_of(db).store.apply([_mark(0, None), _mark(1, None)])


async def test_what_is_held_does_not_wait_for_a_disk_for_ever(tmp_path: Path) -> None:  # P1 T10
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        tablet = await _cut(db, tmp_path / "aside")
        told: list[Verdict] = []
        local_of(db).store.apply_behind([_mark(399)], told.extend)
        tablet.expire(1000)
        assert not told
        tablet.expire(0)
        [verdict] = told
        assert isinstance(verdict, Failed)
        assert isinstance(verdict.error, perco.Unavailable)
        await tablet.uncut()
        await whole(db)


async def test_a_tablet_is_not_drained_before_what_it_holds_is_made(tmp_path: Path) -> None:  # P1
    async with opened(tmp_path / "s") as db, trio.open_nursery() as nursery:
        await db.run(fill)
        tablet = await _cut(db, tmp_path / "aside")
        order: list[str] = []
        local_of(db).store.apply_behind([_mark(399)], lambda _: order.append("made"))

        async def drain() -> None:
            await tablet.drain()
            order.append("drained")

        nursery.start_soon(drain)
        await local_of(db).store.apply([_mark(0)])
        await trio.testing.wait_all_tasks_blocked()
        assert not order
        await tablet.uncut()
        await local_of(db).store.apply([_mark(0, None), _mark(399, None)])
        await tablet.drain()
        assert order[0] == "made"


async def test_a_copy_that_was_given_up_does_not_begin_late(tmp_path: Path) -> None:  # P2 T10
    async with opened(tmp_path / "s") as db, trio.open_nursery() as nursery:
        await db.run(fill)
        tablet, gate = tablet_of(db), threading.Event()
        tablet._hand_over([], 0, lambda _: gate.wait())  # type: ignore[arg-type, return-value]
        given_up = trio.Event()

        async def begin() -> None:
            with pytest.raises(perco.Unavailable):
                await tablet.copy_from(docs.row(250), None, tmp_path / "aside", [])
            given_up.set()

        nursery.start_soon(begin)
        await trio.testing.wait_all_tasks_blocked()
        tablet.expire(0)
        await given_up.wait()
        nursery.start_soon(tablet.uncut)
        await trio.testing.wait_all_tasks_blocked()
        tablet.expire(0)
        gate.set()
        await local_of(db).store.apply([_mark(0)])
        await local_of(db).store.apply([_mark(0, None)])
        assert tablet._copying is None
        await _unchanged(db)


async def test_what_is_still_being_cleared_is_split_when_it_has_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # P2 P4
    may_clear, halves = trio.Event(), []
    remove_from = LmdbTablet.remove_from

    async def later(self: LmdbTablet, row: bytes) -> bool:
        await may_clear.wait()
        return await remove_from(self, row)

    monkeypatch.setattr(LmdbTablet, "remove_from", later)
    async with opened(tmp_path / "s") as db, trio.open_nursery() as nursery:
        await db.run(fill)
        await db.split(docs, 300)
        await db.split(docs, 200)  # the rows from 300 on are not copied once more
        assert [tablet.entries(WRITE) for tablet in local_of(db).store.tablets() if tablet.table == "docs"] == [
            400,
            100,
            100,
        ]

        async def in_the_middle() -> None:
            halves.append((await db.split(docs)).row)

        nursery.start_soon(in_the_middle)
        await trio.testing.wait_all_tasks_blocked()
        assert not halves
        may_clear.set()
    assert halves == [docs.row(100)]
    async with opened(tmp_path / "s") as db:
        assert await whole(db) == [b"", *map(docs.row, (100, 200, 300))]


async def test_whoever_is_cancelled_while_it_is_recorded_leaves_it_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # P4
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        with trio.CancelScope() as scope:

            async def cancelled(*args: Any) -> Any:
                scope.cancel()
                await trio.lowlevel.checkpoint()
                return await catalogues.change(*args)

            monkeypatch.setattr(splitters, "change", cancelled)
            await db.split(docs, 250)
        monkeypatch.undo()
        assert scope.cancelled_caught
        assert (await db.split(docs, 100)).tablet == 2
        assert await whole(db) == [b"", docs.row(100), docs.row(250)]


async def test_a_number_is_not_used_again_by_whom_the_catalogue_has_not_reached(tmp_path: Path) -> None:  # P4
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        before = inside(db).catalogue
        await db.split(docs, 250)
        inside(db).known.catalogue = before
        assert (await db.split(docs, 100)).tablet == 2
        assert await whole(db) == [b"", docs.row(100), docs.row(250)]


async def test_a_tablet_that_is_recorded_and_missing_is_told(tmp_path: Path) -> None:  # P4
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        await db.split(docs, 250)
    shutil.rmtree(tmp_path / "s" / "tablets" / "docs-1")
    with pytest.raises(perco.errors.Corruption, match="docs-1: it is missing"):
        async with opened(tmp_path / "s"):
            pass


async def test_a_store_that_closes_ends_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = trio.Event()
    ended: list[Exception] = []
    async with trio.open_nursery() as nursery, opened(tmp_path / "s") as db:
        await db.run(fill)
        token = trio.lowlevel.current_trio_token()

        def for_ever(self: copying.Copying) -> bool:
            token.run_sync_soon(begun.set)
            return False

        monkeypatch.setattr(copying.Copying, "step", for_ever)

        async def split() -> None:
            try:
                await db.split(docs, 250)
            except perco.errors.TransactionClosed as error:
                ended.append(error)

        nursery.start_soon(split)
        await begun.wait()
    assert ended
    monkeypatch.undo()
    async with opened(tmp_path / "s") as db:
        await _unchanged(db)


async def test_what_nobody_waits_for_is_told_that_it_lies_in_two(tmp_path: Path) -> None:  # P3
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        await db.split(docs, 250)
        told: list[Verdict] = []
        rows = tuple((docs.row(key), (), ()) for key in (0, 399))
        local_of(db).store.apply_behind([Mutation("docs", rows)], told.extend)
        [verdict] = told
        assert isinstance(verdict, Failed)
        assert isinstance(verdict.error, perco.errors.TabletSplit)


async def test_a_tablet_that_cannot_be_looked_at_does_no_harm_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = trio.Event()

    def damaged(self: LmdbTablet, row: bytes) -> bool:
        looked.set()
        raise perco.errors.Corruption("somewhere", "does not read")

    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        await db.split(docs, 250)
    monkeypatch.setattr(LmdbTablet, "has_from", damaged)
    async with opened(tmp_path / "s", split=perco.options.SplitOptions(period_s=0.001)) as db:
        await looked.wait()
        while local_owner(db).splitting.failure is None:
            await trio.lowlevel.checkpoint()
        await db.run(move, random.Random(1))
        monkeypatch.undo()
        assert await whole(db) == [b"", docs.row(250)]


@pytest.mark.parametrize("row", [0, 399])
async def test_a_thread_that_comes_late_writes_only_what_is_still_there(tmp_path: Path, row: int) -> None:  # P1 L1
    async with opened(tmp_path / "s") as db:
        await db.run(fill)
        tablet = tablet_of(db)
        engine = tablet.engine
        assert isinstance(engine, LmdbEngine)
        folder = tmp_path / "aside"
        await tablet.copy_from(docs.row(250), None, folder, [])
        await tablet.cut(docs.row(250))
        done = trio.Event()
        told: list[Verdict] = []
        token = trio.lowlevel.current_trio_token()

        def tell(verdicts: Any) -> None:
            told.extend(verdicts)
            token.run_sync_soon(done.set)

        tablet.submit_from_thread([Mutation("docs", ((docs.row(row), (), ((LOCK, 9 << 16, 1, b""),)),))], tell)
        await done.wait()
        [verdict] = told
        if row == 0:
            assert verdict is APPLIED
        else:
            assert isinstance(verdict, Failed)
            assert isinstance(verdict.error, perco.errors.TabletSplit)
        tablet.submit_from_thread([Mutation("docs", ((docs.row(0), (), ((LOCK, 9 << 16, 1, None),)),))], lambda _: None)
        await tablet.uncut()
        await whole(db)


class Process:
    """One that owns a folder: `tests/integration/storage/splitting.py`."""

    def __init__(self, folder: Path, what: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.integration.storage.splitting", str(folder), what]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def says(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline().strip()):
            raise AssertionError(self._process.communicate()[1])
        return line

    def go_on(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.says()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


async def test_who_reads_beside_finds_all_of_it_or_is_told(tmp_path: Path) -> None:  # P5 T9
    process = Process(tmp_path / "s", "steps")
    try:
        assert process.says() == "filled"
        async with perco.open(tmp_path / "s", SCHEMA, readonly=True) as db:
            snap = await db.snapshot_at()
            assert len(await snap.scan(docs).all()) == len(KEYS)
            assert process.go_on() == "split"
            assert len(await snap.scan(docs).all()) == len(KEYS)
            assert process.go_on() == "cleared"
            assert await snap.get(n, 249) == 10
            for read in (snap.get(n, 250), snap.scan(docs).all(), snap.scan(docs, reverse=True).all()):
                with pytest.raises(perco.errors.TabletSplit):
                    await read
            async with db.snapshot() as later:
                assert len(await later.scan(docs).all()) == len(KEYS)
                assert [row.key for row in await later.scan(docs, reverse=True).all()] == list(KEYS)[::-1]
            snap.end()
        async with perco.open(tmp_path / "s", SCHEMA, readonly=True) as db, db.snapshot() as snap:
            assert len(await snap.scan(docs).all()) == len(KEYS)
    finally:
        process.kill()


async def test_killed_while_it_splits(tmp_path: Path) -> None:  # P1 P2 P4
    rng = random.Random(4)
    tablets = 1
    for _ in range(6):
        process = Process(tmp_path / "s", "goes on")
        while process.says() != "split":
            pass
        for _ in range(rng.randrange(60)):
            process.says()
        process.kill()
        async with opened(tmp_path / "s") as db:
            bounds = await whole(db)
            assert len(bounds) > tablets
            tablets = len(bounds)
