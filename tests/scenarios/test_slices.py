"""The changes of a table in parts: whole rows, the same wherever and whenever a part is read."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.errors import HistoryGone
from perco.history.slices import Reached, Slice, has_news, reached
from tests.scenarios.test_changes import LONG, SCHEMA, after_first, at_look, body, docs, put, rank, url
from tests.support.faults import TWO_PHASES, Fault, faulty, gated

Told = list[tuple[int, str, dict[str, Any], dict[str, Any]]]


async def sliced(
    db: perco.Database,
    since: int,
    upto: int,
    columns: Sequence[perco.Column[Any, Any]] = (body, rank),
    low: bytes = b"",
    high: bytes | None = None,
    table: perco.Table[Any] = docs,
) -> Told:
    stream = Slice(inside(db).engine, table, columns, since, upto, low, high)
    return [(each.commit_ts, row.key, row.before, row.after) async for each in stream for row in each.rows]


async def reach(db: perco.Database, since: int, rows_max: int | None = None, upto: int | None = None) -> Reached:
    return await reached(inside(db).engine, docs, since, rows_max, upto)


async def test_a_change_has_the_values_of_the_whole_row() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        first = await put(db, (body, "a", LONG), (rank, "a", 1), (rank, "b", 2))
        second = await put(db, (rank, "a", None), (body, "b", "x"))
        third = await put(db, (rank, "b", 3), (url, "u", "of another table"))
        end = (await reach(db, 0)).ts
        assert await sliced(db, 0, end) == [
            (first, "a", {"body": None, "rank": None}, {"body": LONG, "rank": 1}),
            (first, "b", {"rank": None}, {"rank": 2}),
            (second, "a", {"body": LONG, "rank": 1}, {"body": LONG, "rank": None}),
            (second, "b", {"body": None, "rank": 2}, {"body": "x", "rank": 2}),
            (third, "b", {"body": "x", "rank": 2}, {"body": "x", "rank": 3}),
        ]
        assert await sliced(db, first, second, [body]) == [
            (second, "b", {"body": None}, {"body": "x"}),  # of "a", the body was not written
        ]


async def _write(txn: perco.Transaction, gone: list[Any], ranks: list[Any], of_body: Any) -> None:
    for column, key in gone:
        txn.delete(column, key)
    for column, key, value in (*ranks[len(gone) :], of_body):
        txn.set(column, key, value)


@pytest.mark.parametrize("seed", range(4))
async def test_parts_by_rows_and_by_time_are_all_and_stay_the_same(seed: int) -> None:  # E5
    rng = random.Random(seed)
    async with perco.open("memory:", SCHEMA, options=perco.Options(commit=TWO_PHASES.commit)) as db:
        for at in range(40):
            keys = rng.sample(range(12), rng.randint(1, 3))
            gone = [(rng.choice((body, rank)), f"k{key:02}") for key in keys if rng.random() < 0.2]
            await db.run(_write, gone, [(rank, f"k{key:02}", at) for key in keys], (body, f"k{keys[0]:02}", LONG[:at]))
            if at == 20:
                await db.split(docs, "k05")
        end = (await reach(db, 0)).ts
        whole = await sliced(db, 0, end)
        for commit_ts, key, before, after in whole:
            for ts, image in ((commit_ts - 1, before), (commit_ts, after)):
                async with db.snapshot(ts=ts) as snap:
                    row = await snap.row(docs, key)
                    known = {} if row is None else row.values()
                assert {name: value for name, value in image.items() if value is not None} == {
                    name: value for name, value in known.items() if value is not None
                }
        for key in range(12):  # later than all parts
            await db.run(_write, [], [(rank, f"k{key:02}", -1)], (body, "k00", "later"))
        await db.split(docs, "k08")
        cuts = sorted({b"", *(b"k%02d" % rng.randrange(12) for _ in range(3))})
        times = sorted({0, end, *(rng.randrange(end) for _ in range(3))})
        parts = []
        for low, high in zip(cuts, [*cuts[1:], None], strict=True):
            for since, upto in itertools.pairwise(times):
                parts += await sliced(db, since, upto, low=low, high=high)
        assert sorted(parts, key=lambda part: part[:2]) == whole


async def test_a_batch_ends_between_transactions_and_has_at_least_one() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        assert not await has_news(inside(db).engine, docs, 0)
        commits = [await put(db, (rank, "a", at), (body, "a", "x"), (rank, "z", at)) for at in range(3)]
        large = await put(db, *((rank, f"k{at}", 0) for at in range(9)))
        assert await has_news(inside(db).engine, docs, commits[-1])
        assert not await has_news(inside(db).engine, docs, large)
        assert await reach(db, 0, 5) == (commits[1], 4)
        assert await reach(db, commits[1], 5) == (commits[2], 2)
        assert (await reach(db, commits[2], 5)).rows == 9
        assert (await reach(db, large, 5)).rows == 0
        ts, rows = await reach(db, 0, 15)
        assert ts > large
        assert rows == 15
        assert await reach(db, 0, None, commits[1] + 1) == (commits[1] + 1, 4)


async def test_what_commits_at_the_moment_is_settled_before_it_is_reached() -> None:  # E2
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "commit", skip=1)  # the primary has committed, a secondary has not
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, db, (url, "u", "both"), (body, "a", "both"))
            await gate.reached()
            end, rows = await reach(db, 0)
            assert rows == len(await sliced(db, 0, end)) == 1
            gate.open()


async def test_what_is_reached_has_no_half_of_a_transaction() -> None:  # E2 E5
    async with perco.open("memory:", SCHEMA) as db:
        faulty(db, after_first("commit", Fault.LOSE_REQUEST, times=3))
        inside(db).driver.options = TWO_PHASES.commit
        await put(db, (url, "u", "both"), (url, "v", "both"), (body, "a", "both"))
        end, rows = await reach(db, 0)
        assert rows == len(await sliced(db, 0, end)) == 1


@pytest.mark.parametrize("look", range(6))
async def test_a_split_at_any_moment_of_a_part_loses_nothing(look: int) -> None:  # E5 P4
    async with perco.open("memory:", SCHEMA) as db:
        commits = [await put(db, (rank, "a", at), (rank, "m", at), (body, "z", LONG)) for at in range(3)]
        end = (await reach(db, 0)).ts
        store = faulty(db)
        store.looking = at_look(look, lambda: db.split(docs, "m"))
        assert [part[:2] for part in await sliced(db, 0, end)] == [(ts, key) for ts in commits for key in "amz"]
        store.looking = at_look(look, lambda: db.split(docs, "b"))
        assert (await reach(db, 0)).rows == 9


@pytest.mark.parametrize("look", range(8))
async def test_a_vacuum_at_any_moment_of_a_part_is_noticed(look: int) -> None:  # E4
    table = perco.Table("docs", key=perco.TEXT, changes=True, keep=perco.Keep(seconds=0), splits=["m"])
    column, other = table.column("rank", perco.INT64), table.column("body", perco.TEXT)
    async with perco.open("memory:", perco.Schema(table)) as db:
        await put(db, (other, "a", LONG), (other, "z", "old"))
        commits = [await put(db, (column, "a", at), (column, "z", at)) for at in range(3)]
        await put(db, (other, "a", "new"), (other, "z", "new"))
        store = faulty(db)
        store.looking = at_look(look, db.vacuum)
        try:
            end = (await reached(inside(db).engine, table, 0)).ts
            found = await sliced(db, 0, commits[-1], [column, other], table=table)
        except HistoryGone:
            return
        assert end > commits[-1]
        assert [part[3].get("body") for part in found] == [LONG, "old"] * 4


@pytest.mark.parametrize("rows_max", [None, 2])
@pytest.mark.parametrize("look", range(6))
async def test_a_vacuum_at_any_moment_of_a_count_is_noticed(look: int, rows_max: int | None) -> None:  # E4
    table = perco.Table("docs", key=perco.TEXT, changes=True, keep=perco.Keep(seconds=0), splits=["m"])
    column = table.column("rank", perco.INT64)
    async with perco.open("memory:", perco.Schema(table)) as db:
        commits = [await put(db, (column, "a", at), (column, "z", at)) for at in range(3)]
        store = faulty(db)
        store.looking = at_look(look, db.vacuum)
        try:
            end = await reached(inside(db).engine, table, 0, rows_max)
        except HistoryGone:
            return
        assert end.rows == (6 if rows_max is None else 2)
        assert end.ts == commits[0] if rows_max else end.ts > commits[2]
