"""A tablet is split at any step of a transaction: it commits, or runs again; nothing is done in part (P1 P3)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
import trio.testing

import perco
from perco.check.check import check
from perco.database.inside import inside
from perco.storage import LOCK, MemoryTablet, Mutation, Verdict
from tests.support.everywhere import owning
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
seen = docs.column("seen", perco.INT64)
SCHEMA = perco.Schema(docs)
LEFT, RIGHT = ("a", "b", "c", "d"), ("w", "x", "y", "z")


@SCHEMA.observe(n, id="see")
async def see(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    txn.set(seen, change.key, (await txn.get(seen, change.key) or 0) + 1)


def split_now(db: perco.Database, row: bytes) -> None:
    """In one step, as the store does in the end."""
    store = local_of(db).store
    tablet = store.tablet("docs", row)
    assert isinstance(tablet, MemoryTablet)
    other = MemoryTablet("docs", row, tablet.engine.copy_from(row), tablet.floor)
    tablet.engine.remove_from(row)
    store.add_split(tablet, other)


class SplitBefore:
    """Splits at a row before the mutation that comes in this place."""

    def __init__(self, db: perco.Database, at: int, row: bytes) -> None:
        self._apply, self._db, self._left, self._row = local_of(db).store.apply_then, db, at, row
        self.split_failed = 0
        local_of(db).store.apply_then = self.apply_then  # type: ignore[method-assign]

    @property
    def happened(self) -> bool:
        return self._left < 0

    async def apply_then(self, mutations: Sequence[Mutation], then: object) -> list[Verdict]:
        if self._left == 0:
            split_now(self._db, self._row)
        self._left -= 1
        verdicts = await self._apply(mutations, then)  # type: ignore[arg-type]
        self.split_failed += sum(
            isinstance(getattr(verdict, "error", None), perco.errors.TabletSplit) for verdict in verdicts
        )
        return verdicts


async def _whole(db: perco.Database, keys: Sequence[str], value: int) -> None:
    async with db.worker():
        await db.wait_idle(timeout=60)
    async with db.snapshot() as snap:
        rows = await snap.scan(docs).all()
    assert {row.key: (row[n], row[seen]) for row in rows} == dict.fromkeys(keys, (value, 1))
    assert not sum(tablet.entries(LOCK) for tablet in local_of(db).store.tablets())
    assert not (await check(inside(db).driver.store, ts=await inside(db).oracle.draw())).findings


async def _write(txn: perco.Transaction, keys: Sequence[str]) -> None:
    for key in keys:
        txn.set(n, key, 7)


@pytest.mark.parametrize("keys", [LEFT, LEFT + RIGHT, RIGHT + LEFT, ("d", "a", *RIGHT)], ids=len)
@pytest.mark.parametrize("row", [b"c", b"y"])
@pytest.mark.parametrize("one_step", [False, True], ids=["two phases", "one step"])
async def test_a_split_at_any_step(
    keys: Sequence[str], row: bytes, one_step: bool, autojump_clock: trio.testing.MockClock
) -> None:  # P3 T1 T3 T5 N1
    failed = steps = 0
    while True:
        options = perco.Options(commit=perco.options.CommitOptions(one_step=one_step))
        async with perco.open("memory:", SCHEMA, options=options) as db:
            splitting = SplitBefore(db, steps, row)
            await db.run(_write, keys)
            await _whole(db, keys, 7)
            failed += splitting.split_failed
            if not splitting.happened:
                break
            assert local_of(db).store.bounds("docs") == sorted([b"", b"m", row])
        steps += 1
    assert steps >= 1 + (len(keys) > 4)
    assert failed or (row == b"y" and keys == LEFT)


async def test_what_is_let_go_of_after_a_split_is_let_go_of_by_cell(
    autojump_clock: trio.testing.MockClock,
) -> None:  # P3 T5 T7
    options = perco.Options(commit=perco.options.CommitOptions(one_step=False))
    async with perco.open("memory:", SCHEMA, options=options) as db:
        split_at_release: list[bytes] = [b"y"]

        async def conflicts(txn: perco.Transaction) -> None:
            await _write(txn, LEFT + RIGHT)
            await db.run(_write, ("a",))  # it comes first
            released = local_of(db).store.apply_then

            async def split_then(mutations: Sequence[Mutation], then: object) -> list[Verdict]:
                releases = all(write[3] is None for write in mutations[0].rows[0][2])
                if releases and len(mutations[0].rows) == len(RIGHT) and split_at_release:
                    split_now(db, split_at_release.pop())
                return await released(mutations, then)  # type: ignore[arg-type]

            local_of(db).store.apply_then = split_then  # type: ignore[method-assign]

        with pytest.raises(perco.WriteConflict):
            await db.options(attempts=1).run(conflicts)
        await _whole(db, ("a",), 7)
        assert not split_at_release, "it was split when the locks were let go of"


async def test_split_where_one_asks(autojump_clock: trio.testing.MockClock) -> None:
    async with perco.open("memory:", SCHEMA) as db:
        await db.run(_write, LEFT + RIGHT)
        done = await db.split(docs, "c")
        assert (done.table, done.row, done.tablet) == ("docs", b"c", 2)
        assert done.cells
        assert (await db.split("docs")).row == b"y"
        assert (await db.split("docs", b"z")).tablet == 4
        with pytest.raises(perco.UsageError, match="begins at that key already"):
            await db.split(docs, "c")
        with pytest.raises(perco.UsageError, match="begins at that key already"):
            await db.split(docs, "")
        with pytest.raises(perco.UsageError, match="no table 'dogs' in this store; there are: docs"):
            await db.split("dogs")
        with pytest.raises(perco.UsageError, match="takes a table"):
            await db.split("docs", "c")
        with pytest.raises(perco.UsageError, match="at most 400 bytes"):
            await db.split("docs", b"c" * 401)
        with pytest.raises(perco.UsageError, match="is not a key of 'docs', whose keys are text"):
            await db.split("docs", b"\xff")
        with pytest.raises(perco.UsageError, match="takes a table"):
            await db.split(7)  # type: ignore[arg-type]
        assert [number for number, _, _ in inside(owning(db)).catalogue.tables["docs"].tablets()] == [0, 2, 1, 3, 4]
        await _whole(db, LEFT + RIGHT, 7)


async def test_one_row_cannot_be_split(autojump_clock: trio.testing.MockClock) -> None:
    alone = perco.Table("alone", key=perco.TEXT)
    value = alone.column("value", perco.INT64)
    async with perco.open("memory:", perco.Schema(alone)) as db:
        with pytest.raises(perco.UsageError, match="one row, or none"):
            await db.split(alone)
        async with db.transaction() as txn:
            txn.set(value, "k", 1)
        with pytest.raises(perco.UsageError, match="one row, or none"):
            await db.split(alone)


async def test_a_floor_that_is_raised_meanwhile_is_raised_in_both(autojump_clock: trio.testing.MockClock) -> None:
    async with perco.open("memory:", SCHEMA) as db:  # T13
        store = local_of(db).store
        raised = MemoryTablet.raise_floor

        async def split_first(self: MemoryTablet, ts: int) -> None:
            if self.start == b"m" and len(store.bounds("docs")) == 2:
                split_now(db, b"y")
            await raised(self, ts)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(MemoryTablet, "raise_floor", split_first)
            await store.raise_floor(1_000, wait=True)
        assert len(store.bounds("docs")) == 3
        await db.split(docs, "c")
        assert {tablet.floor for tablet in store.tablets()} == {1_000}  # type: ignore[attr-defined]
