"""Logs of changes in LMDB: while tablets are split and compacted, and when an owner is killed (E1, E3)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
from perco.check.check import CheckResult, check
from perco.database.inside import inside
from perco.storage import LOG, LmdbTablet, Mutation
from perco.storage.keys import escape, log_key
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT, changes=True)
n = docs.column("n", perco.INT64)
text = docs.column("text", perco.TEXT)
SCHEMA = perco.Schema(docs)
OPTIONS = perco.Options(durability="process", vacuum=perco.options.VacuumOptions(on=False))


async def checked(db: perco.Database) -> CheckResult:
    return await check(local_of(db).store, ts=inside(db).oracle.last)


async def write(db: perco.Database, rng: random.Random, commits: list[int], at: dict[int, trio.Event]) -> None:
    """`at`: set once so many transactions have committed."""
    for i in range(300):
        if i in at:
            at[i].set()
        cells = [(rng.randrange(60), rng.randrange(60), rng.choice((1, 100))) for _ in range(rng.randint(1, 3))]

        async def once(txn: perco.Transaction, i: int, cells: list[tuple[int, int, int]]) -> int:
            for one, other, size in cells:
                txn.set(n, f"k{one:02}", i)
                txn.set(text, f"k{other:02}", "long " * size)
            return await txn.commit()

        commits.append(await db.run(once, i, cells))


async def test_splits_and_compactions_while_a_reader_follows(tmp_path: Path) -> None:  # E1 E3 P1 P6
    rng, commits = random.Random(3), []
    copy: dict[str, dict[str, Any]] = {}
    seen: list[int] = []
    async with perco.open(tmp_path / "store", SCHEMA, options=OPTIONS) as db:
        stream, ended = db.changes(docs, since=0, follow=True), trio.Event()

        async def follow() -> None:
            async for changes in stream:
                seen.append(changes.commit_ts)
                for row in changes.rows:
                    here = copy.setdefault(row.key, {})
                    assert row.before == {column: here.get(column) for column in row.before}
                    here.update(row.after)
                    if row.key == "the end":
                        ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            async with trio.open_nursery() as writers:
                begun = {50: trio.Event(), 120: trio.Event(), 200: trio.Event()}
                writers.start_soon(write, db, rng, commits, begun)
                for event, at in zip(begun.values(), ("k30", "k10", "k45"), strict=True):
                    await event.wait()
                    await db.split(docs, at)
                    await db.compact(docs)
            async with db.transaction() as txn:
                txn.set(n, "the end", 1)
            commits.append(txn.commit_ts)
            await ended.wait()
            nursery.cancel_scope.cancel()
        assert seen == commits
        async with db.snapshot() as snap:
            assert copy == {row.key: row.values() async for row in snap.scan(docs)}
        assert (await checked(db)).clean
        await db.compact(docs)
        tablets = [tablet for tablet in local_of(db).store.tablets() if tablet.table == "docs"]
        records = sum(tablet.entries("write") for tablet in tablets)
        assert sum(tablet.entries(LOG) for tablet in tablets) == records, "entries of rows that have moved are gone"
    async with perco.open(tmp_path / "store", SCHEMA, options=OPTIONS) as db:
        assert [changes.commit_ts async for changes in db.changes(docs, since=0)] == commits


async def test_what_is_written_while_a_tablet_is_copied_is_in_the_new_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # E1 P2
    right, commits = LmdbTablet.copy_from, []

    async def copy_from(self: LmdbTablet, row: bytes, stop: bytes | None, path: Path, groups: Sequence[str]) -> int:
        cells = await right(self, row, stop, path, groups)
        async with db.transaction() as txn:
            txn.set(n, "z", 2)
        commits.append(txn.commit_ts)
        return cells

    async with perco.open(tmp_path / "store", SCHEMA, options=OPTIONS) as db:
        for key in ("a", "z"):
            async with db.transaction() as txn:
                txn.set(n, key, 1)
            commits.append(txn.commit_ts)
        monkeypatch.setattr(LmdbTablet, "copy_from", copy_from)
        await db.split(docs, "m")
        assert len(commits) == 3
        assert [changes.commit_ts async for changes in db.changes(docs, since=0)] == commits
        assert (await checked(db)).clean


async def test_a_bulk_load_is_one_transaction_in_the_log(tmp_path: Path) -> None:  # E1 P7
    async with perco.open(tmp_path / "store", SCHEMA, options=OPTIONS) as db:
        rows = [(f"k{i:04}", {n: i, text: "long " * (i % 100)}) for i in range(1500)]
        published = await db.bulk_load({docs: rows})
        async with db.transaction() as txn:
            txn.set(n, "k0000", -1)
        first, second = [changes async for changes in db.changes(docs, since=0)]
        assert (first.commit_ts, second.commit_ts) == (published.ts, txn.commit_ts)
        assert [(row.key, row.after["n"]) for row in first.rows] == [(key, values[n]) for key, values in rows]
        assert second.rows == (perco.RowChange("docs", "k0000", {"n": 0}, {"n": -1}),)
        assert (await checked(db)).clean


async def test_check_finds_an_entry_that_is_missing(tmp_path: Path) -> None:  # E1
    async with perco.open(tmp_path / "store", SCHEMA, options=OPTIONS) as db:
        async with db.transaction() as txn:
            txn.set(n, "a", 1)
        assert (await checked(db)).clean
        row = (b"a", (), ((LOG, 1 << 16, txn.commit_ts, None),))
        await local_of(db).store.apply([Mutation("docs", (row,))])
        [finding] = (await checked(db)).findings
        assert finding.invariant == "E1"
        assert "0 entries, and there are 1 write records" in finding.what


async def test_check_finds_an_entry_without_a_record(tmp_path: Path) -> None:  # E1
    async with perco.open(tmp_path / "store", SCHEMA, options=OPTIONS) as db:
        async with db.transaction() as txn:
            txn.set(n, "a", 1)
        [tablet] = [tablet for tablet in local_of(db).store.tablets() if tablet.table == "docs"]
        tablet.engine.put_cells([(LOG, log_key(escape(b"b"), 1 << 16, txn.commit_ts), b"")])  # type: ignore[attr-defined]
        [finding] = (await checked(db)).findings
        assert finding.invariant == "E1"
        assert "without a write record" in finding.what
        with pytest.raises(perco.errors.Corruption, match="no write record"):
            [_ async for _ in db.changes(docs, since=0)]
