"""The changes of tables that keep a log: in order, whole, once, and up to a frontier."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.errors import HistoryGone, SchemaMismatch
from perco.storage import DATA, LOG, TS_MAX, Mutation
from tests.support import everywhere
from tests.support.faults import TWO_PHASES, Fault, Gate, Plan, faulty, gated, kind_of
from tests.support.left_out import NO_LOGS
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT, changes=True)
body = docs.column("body", perco.TEXT)
rank = docs.column("rank", perco.INT64)
links = perco.Table("links", key=perco.TEXT, changes=True)
url = links.column("url", perco.TEXT)
plain = perco.Table("plain", key=perco.TEXT)
n = plain.column("n", perco.INT64)
SCHEMA = perco.Schema(docs, links, plain)
LONG = "x" * 1000

Write = tuple[perco.Column[str, Any], str, Any]


async def put(db: perco.Database, *writes: Write) -> int:
    async with db.transaction() as txn:
        for column, key, value in writes:
            if value is None:
                txn.delete(column, key)
            else:
                txn.set(column, key, value)
    return txn.commit_ts


def after_first(kind: str, fault: Fault, *, times: int) -> Plan:
    """After the first mutation of this kind, some further ones meet the fault."""
    seen = 0

    def plan(mutation: Mutation, number: int) -> Fault | None:
        nonlocal seen
        seen += kind_of(mutation) == kind
        return fault if kind_of(mutation) == kind and 1 < seen <= 1 + times else None

    return plan


def at_look(number: int, act: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
    """A function called before each read and scan: acts once, before the one with this number."""
    left = number

    async def look() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            await act()

    return look


def cancelling(scope: trio.CancelScope, at: int) -> Callable[[], Awaitable[None]]:
    """A function called at each read and scan: cancels at one of them."""
    left = at

    async def look() -> None:
        nonlocal left
        if not left:
            scope.cancel()
        left -= 1
        await trio.lowlevel.checkpoint()

    return look


async def all_of(db: perco.Database, *tables: perco.Table[Any], since: int = 0) -> list[perco.Changes]:
    return [changes async for changes in db.changes(*tables, since=since)]


def told(found: list[perco.Changes]) -> list[tuple[int, list[tuple[str, str, dict[str, Any], dict[str, Any]]]]]:
    return [(each.commit_ts, [(r.table, r.key, r.before, r.after) for r in each.rows]) for each in found]


async def test_transactions_come_whole_and_in_order_with_values_before_and_after() -> None:  # E1 E3
    async with perco.open("memory:", SCHEMA) as db:
        first = await put(db, (body, "a", "one"), (rank, "a", 1), (url, "u", "to a"), (n, "a", 1))
        second = await put(db, (body, "a", LONG), (body, "b", "two"))
        await put(db, (n, "a", 2))
        third = await put(db, (body, "a", None), (url, "u", LONG))
        assert told(await all_of(db, docs, links)) == [
            (
                first,
                [
                    ("docs", "a", {"body": None, "rank": None}, {"body": "one", "rank": 1}),
                    ("links", "u", {"url": None}, {"url": "to a"}),
                ],
            ),
            (second, [("docs", "a", {"body": "one"}, {"body": LONG}), ("docs", "b", {"body": None}, {"body": "two"})]),
            (third, [("docs", "a", {"body": LONG}, {"body": None}), ("links", "u", {"url": "to a"}, {"url": LONG})]),
        ]
        assert [commit_ts for commit_ts, _ in told(await all_of(db, links))] == [first, third]


async def test_each_transaction_is_a_place_to_resume_at() -> None:  # E3
    async with perco.open("memory:", SCHEMA) as db:
        commits = [await put(db, (rank, f"k{i % 3}", i)) for i in range(8)]
        for i, commit_ts in enumerate(commits):
            stream = db.changes(docs, since=commit_ts)
            assert [changes.commit_ts async for changes in stream] == commits[i + 1 :]
            assert stream.frontier > commits[-1]
        seen, since = [], 0
        for _ in commits:
            stream = db.changes(docs, since=since)
            changes = await anext(stream)
            seen.append(changes.commit_ts)
            since = stream.frontier
            assert since >= changes.commit_ts
        assert seen == commits
        assert await all_of(db, docs, since=since) == []


async def test_by_default_only_what_commits_from_now_on_is_returned() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        await put(db, (rank, "a", 1))
        assert [changes async for changes in db.changes(docs)] == []


async def test_what_is_not_known_or_not_logged_is_refused() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        last = await put(db, (rank, "a", 1))
        with pytest.raises(perco.UsageError, match="no log"):
            db.changes(plain)
        with pytest.raises(perco.UsageError, match="takes the tables"):
            db.changes()
        with pytest.raises(perco.UsageError, match="takes a timestamp"):
            db.changes(docs, since=-1)
        with pytest.raises(perco.UsageError, match="no table"):
            db.changes("nowhere")
        with pytest.raises(perco.UsageError, match="timestamps so far"):
            await all_of(db, docs, since=last + 1000)
        assert [changes.commit_ts async for changes in db.changes("docs", since=0)] == [last]


async def test_a_log_cannot_be_added_later(tmp_path: Any) -> None:
    async with perco.open(tmp_path / "store", SCHEMA) as db:
        await put(db, (n, "a", 1))
    with pytest.raises(SchemaMismatch, match="cannot get a log later"):
        async with perco.open(tmp_path / "store", perco.Schema(perco.Table("plain", key=perco.TEXT, changes=True))):
            pass


async def test_a_program_that_does_not_declare_the_log_keeps_it_too(tmp_path: Any) -> None:  # E1
    async with perco.open(tmp_path / "store", SCHEMA) as db:
        first = await put(db, (rank, "a", 1))
    other = perco.Table("docs", key=perco.TEXT)
    of_other = other.column("rank", perco.INT64)
    async with perco.open(tmp_path / "store", perco.Schema(other)) as db:
        second = await put(db, (of_other, "a", 2))
    async with perco.open(tmp_path / "store", SCHEMA) as db:
        assert [changes.commit_ts for changes in await all_of(db, docs)] == [first, second]


# ------------------------------------------------------------------ the frontier


async def test_a_transaction_is_not_passed_while_its_second_phase_is_under_way() -> None:  # E2
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "commit", skip=1)  # the primary has committed, a secondary has not
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, db, (body, "a", "both"), (url, "u", "both"))
            await gate.reached()
            [only] = await all_of(db, docs, links)
            assert [(row.table, row.after) for row in only.rows] == [
                ("docs", {"body": "both"}),
                ("links", {"url": "both"}),
            ]
            gate.open()


async def test_a_lock_below_the_frontier_is_settled_even_if_that_is_lost_at_first() -> None:  # E2
    async with perco.open("memory:", SCHEMA) as db:
        faulty(db, after_first("commit", Fault.LOSE_REQUEST, times=3))
        inside(db).driver.options = TWO_PHASES.commit
        await put(db, (body, "a", "both"), (url, "u", "both"))
        [only] = await all_of(db, docs, links)
        assert len(only.rows) == 2


async def test_a_commit_that_is_still_to_be_sent_holds_the_frontier_back() -> None:  # E2
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "commit")
        found: list[perco.Changes] = []

        async def read() -> None:
            found.extend(await all_of(db, docs))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, db, (body, "a", "one"))
            await gate.reached()  # its commit_ts has been drawn
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            assert not found
            gate.open()
        assert [row.after for changes in found for row in changes.rows] == [{"body": "one"}]


async def test_a_one_step_commit_below_the_frontier_is_waited_for() -> None:  # E2 C4
    async with perco.open("memory:", SCHEMA) as db:
        gate: Gate = await gated(db, "one step")
        found: list[perco.Changes] = []

        async def read() -> None:
            found.extend(await all_of(db, docs))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, db, (body, "a", "one"))
            await gate.reached()
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            assert not found
            gate.open()
        assert [row.after for changes in found for row in changes.rows] == [{"body": "one"}]


async def test_a_transaction_that_is_rolled_back_leaves_nothing() -> None:  # E1
    async with perco.open("memory:", SCHEMA) as db:
        txn = await db.begin()
        txn.set(rank, "a", 1)
        await put(db, (rank, "a", 2))
        with pytest.raises(perco.WriteConflict):
            await txn.commit()
        assert [row.after for changes in await all_of(db, docs) for row in changes.rows] == [{"rank": 2}]


# ------------------------------------------------------------------ follow


async def test_follow_waits_for_further_changes() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        first = await put(db, (rank, "a", 1))
        stream = db.changes(docs, since=0, follow=True)
        assert (await anext(stream)).commit_ts == first
        seen: list[int] = []

        async def read() -> None:
            async for changes in stream:
                seen.append(changes.commit_ts)
                if len(seen) == 3:
                    return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            commits = []
            for i in range(3):
                await trio.sleep(5)
                assert stream.frontier >= max([first, *seen])
                commits.append(await put(db, (rank, "a", i)))
        assert seen == commits


async def test_a_call_that_is_cancelled_loses_nothing() -> None:  # E3
    async with perco.open("memory:", SCHEMA) as db:
        commits = [await put(db, (body, "a", LONG)) for _ in range(4)]
        for stopped_at in range(12):
            stream, seen = db.changes(docs, since=0), []
            store = faulty(db)
            with trio.CancelScope() as scope:
                store.looking = cancelling(scope, stopped_at)
                async for changes in stream:
                    seen.append(changes.commit_ts)
            seen += [changes.commit_ts async for changes in stream]
            assert seen == commits
            inside(db).driver.store = inside(db).driver.reads = store._store


# ------------------------------------------------------------------ splits, and the end of history


async def test_a_value_that_cannot_be_read_makes_no_transaction_come_twice() -> None:  # E3
    table = perco.Table("odd", key=perco.TEXT, changes=True)
    readable = True

    def decode(data: bytes) -> str:
        if data == b"bad" and not readable:
            raise ValueError("it cannot be read")
        return data.decode()

    value = table.column("value", perco.Codec("odd", str.encode, decode))
    async with perco.open("memory:", perco.Schema(table)) as db:
        wanted = [await put(db, (value, "a", each)) for each in ("one", "two", "bad", "four")]
        readable = False
        stream, found = db.changes(table, since=0), list[int]()
        for attempt in range(6):
            readable = attempt == 5
            try:
                async for changes in stream:
                    found.append(changes.commit_ts)
                    assert stream.frontier >= changes.commit_ts
            except perco.PercoError:
                assert stream.frontier == (found[-1] if found else 0)
        assert found == wanted


async def test_tasks_that_share_a_stream_get_each_transaction_once() -> None:  # E3
    async with perco.open("memory:", SCHEMA) as db:
        wanted = [await put(db, (body, f"{i % 5}", LONG + str(i) if i < 40 else str(i))) for i in range(600)]
        stream, found = db.changes(docs, since=0), list[int]()

        async def take() -> None:
            async for changes in stream:
                found.append(changes.commit_ts)
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            nursery.start_soon(take)
        assert found == wanted
        assert stream.frontier >= wanted[-1]


async def test_a_long_value_that_is_missing_is_not_taken_for_an_empty_one() -> None:  # E3
    async with perco.open("memory:", SCHEMA) as db:
        await put(db, (body, "a", LONG))
        column = inside(db).known.bind(body).column
        [[cells]] = await inside(db).store.read([("docs", docs.row("a"), ((DATA, column, 0, TS_MAX, 1),))])
        gone = (docs.row("a"), (), ((DATA, column, cells[0][0], None),))
        await inside(db).store.apply([Mutation("docs", (gone,))])
        with pytest.raises(perco.errors.Corruption, match="missing"):
            await all_of(db, docs)


async def test_only_some_long_values_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that a stream takes depends on single transactions, not on how much there is to read."""
    stream_of = perco.ChangeStream
    read, sizes = stream_of._long_values, list[int]()

    async def counted(self: Any, taken: Any) -> Any:
        found = await read(self, taken)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(stream_of, "_long_values", counted)
    async with perco.open("memory:", SCHEMA) as db:
        wanted = [await put(db, (body, f"{i % 7}", LONG + str(i))) for i in range(300)]
        assert [each.commit_ts for each in await all_of(db, docs)] == wanted
    assert sum(sizes) >= 300
    assert max(sizes) <= 65


async def test_splits_lose_nothing_and_return_nothing_twice() -> None:  # E3 P4
    async with perco.open("memory:", SCHEMA) as db:
        rng = random.Random(7)
        commits = []
        stream = db.changes(docs, since=0)
        seen: list[int] = []
        for i in range(60):
            commits.append(await put(db, (rank, f"k{rng.randrange(20):02}", i), (rank, f"k{rng.randrange(20):02}", -i)))
            if i % 20 == 10:
                await db.split(docs, f"k{i // 4:02}")
            if i == 35:
                seen.append((await anext(stream)).commit_ts)
        seen += [changes.commit_ts async for changes in db.changes(docs, since=stream.frontier)]
        assert seen == commits
        rows = [row.key for changes in await all_of(db, docs) for row in changes.rows]
        assert len(rows) >= 60


@pytest.mark.parametrize("look", range(8))
async def test_a_split_at_any_moment_of_a_step_loses_nothing(look: int) -> None:  # E3 P4
    async with perco.open("memory:", SCHEMA) as db:
        commits = [await put(db, (rank, "a", i), (rank, "m", i), (rank, "z", i)) for i in range(3)]
        store = faulty(db)
        store.looking = at_look(look, lambda: db.split(docs, "m"))
        found = await all_of(db, docs)
        assert [changes.commit_ts for changes in found] == commits
        assert all([row.key for row in changes.rows] == ["a", "m", "z"] for changes in found)


@pytest.mark.parametrize("look", range(8))
async def test_a_vacuum_at_any_moment_of_a_step_is_noticed(look: int) -> None:  # E4
    table = perco.Table("docs", key=perco.TEXT, changes=True, keep=perco.Keep(seconds=0), splits=["m"])
    column = table.column("rank", perco.INT64)
    async with perco.open("memory:", perco.Schema(table)) as db:
        commits = [await put(db, (column, "a", i), (column, "z", i)) for i in range(3)]
        store = faulty(db)
        store.looking = at_look(look, db.vacuum)
        try:
            found = await all_of(db, table)
        except HistoryGone:
            return
        assert [(changes.commit_ts, len(changes.rows)) for changes in found] == [(ts, 2) for ts in commits]


async def test_a_large_transaction_comes_whole() -> None:  # E3: it takes several pages of the log
    async with perco.open("memory:", SCHEMA) as db:
        many = 1700
        first = await put(db, *((rank, f"k{i:05}", i) for i in range(many)))
        second = await put(db, (rank, "k00001", -1))
        found = await all_of(db, docs)
        assert [each.commit_ts for each in found] == [first, second]
        assert [row.after["rank"] for row in found[0].rows] == list(range(many))


async def test_changes_that_the_vacuum_has_removed_are_an_error() -> None:  # E4
    table = perco.Table("docs", key=perco.TEXT, changes=True, keep=perco.Keep(seconds=0))
    column = table.column("rank", perco.INT64)
    async with perco.open("memory:", perco.Schema(table)) as db:
        commits = [await put(db, (column, "a", i)) for i in range(4)]
        assert len(await all_of(db, table)) == 4
        await db.vacuum()
        with pytest.raises(HistoryGone, match="Begin again: read the table in a snapshot") as gone:
            await all_of(db, table, since=commits[0])
        assert gone.value.table == "docs"
        assert gone.value.asked == commits[0]
        assert isinstance(gone.value.oldest, int)
        last = await put(db, (column, "a", 9))
        assert told(await all_of(db, table, since=gone.value.oldest)) == [
            (last, [("docs", "a", {"rank": 3}, {"rank": 9})])
        ]
        tablets = [tablet for tablet in local_of(db).store.tablets() if tablet.table == "docs"]
        assert sum(tablet.entries(LOG) for tablet in tablets) == 1


async def test_a_vacuum_while_a_reader_is_half_way_is_noticed() -> None:  # E4
    table = perco.Table("docs", key=perco.TEXT, changes=True, keep=perco.Keep(seconds=0))
    column = table.column("rank", perco.INT64)
    async with perco.open("memory:", perco.Schema(table)) as db:
        for i in range(1200):
            await put(db, (column, f"k{i % 7}", i))
        stream = db.changes(table, since=0)
        seen = [(await anext(stream)).rows[0].after["rank"]]
        await db.vacuum()
        gone = False
        while not gone:
            try:
                seen += [row.after["rank"] for row in (await anext(stream)).rows]
            except HistoryGone:
                gone = True
        assert seen == list(range(len(seen)))


async def test_a_pin_keeps_changes() -> None:  # E4 T15
    table = perco.Table("docs", key=perco.TEXT, changes=True, keep=perco.Keep(seconds=0))
    column = table.column("rank", perco.INT64)
    async with perco.open("memory:", perco.Schema(table)) as db:
        first = await put(db, (column, "a", 1))
        async with db.pin("consumer", lease_s=3600, ts=first):
            second = await put(db, (column, "a", 2))
            await db.vacuum()
            assert told(await all_of(db, table, since=first)) == [(second, [("docs", "a", {"rank": 1}, {"rank": 2})])]


async def test_a_store_that_keeps_no_logs_refuses_the_table() -> None:
    opening = perco.open("memory:", SCHEMA)
    if everywhere.over in NO_LOGS:
        with pytest.raises(perco.UsageError, match="keeps no logs of changes"):
            async with opening:
                pass
        return
    async with opening as db:
        assert await all_of(db, docs) == []
