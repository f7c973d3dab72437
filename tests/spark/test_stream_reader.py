"""The reader of a stream of changes, called as Spark calls it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import trio
from trio.testing import MockClock

import perco
from perco.database.inside import inside
from perco.errors import HistoryGone, SchemaMismatch, UsageError
from perco.history.changes import RowChange
from perco.spark import following
from perco.spark.changed import Net
from perco.spark.following import Following, Hold, Part, parts_of
from perco.spark.ranges import Range
from perco.spark.source import PercoSource
from perco.spark.store import Store
from perco.spark.streaming import Loop

docs = perco.Table("docs", key=perco.TEXT, changes=True, splits=["k5"])
body = docs.column("body", perco.TEXT)
size = docs.column("size", perco.INT64)
tree = docs.column("tree", perco.JSON)
pairs = perco.Table("pairs", key=perco.Tuple(perco.TEXT, perco.INT64), changes=True)
weight = pairs.column("weight", perco.FLOAT64)
plain = perco.Table("plain", key=perco.TEXT)
n = plain.column("n", perco.INT64)
SCHEMA = perco.Schema(docs, pairs, plain)
LONG = "long " * 1000

Row = tuple[Any, ...]
Rows = list[Row]


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[perco.Database]:
    async with perco.open(tmp_path / "store", SCHEMA) as db:
        yield db


async def put(db: perco.Database, *writes: tuple[perco.Column[Any, Any], Any, Any]) -> int:
    async with db.transaction() as txn:
        for column, key, value in writes:
            if value is None:
                txn.delete(column, key)
            else:
                txn.set(column, key, value)
    return txn.commit_ts


class Query:
    """Reads a stream as Spark does, in a thread of its own; the offsets are those of a checkpoint."""

    def __init__(
        self, folder: Path, offset: dict[str, Any] | None = None, *, rows: int | None = 1000, **options: Any
    ) -> None:
        self._limit = SimpleNamespace(max_rows=rows)
        self._source = PercoSource(
            {"table": "docs", "path": str(folder / "store"), "readchangefeed": "true"}
            | {name: str(value) for name, value in options.items()}
        )
        self.offset = offset
        self.reader: Any = None

    async def __aenter__(self) -> Query:
        schema = await self.call(self._source.schema)
        self.reader = await self.call(self._source.streamReader, schema)
        if self.offset is None:
            self.offset = await self.call(self.reader.initialOffset)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.call(self.reader.stop)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await trio.to_thread.run_sync(function, *args)

    async def latest(self) -> dict[str, Any]:
        found: dict[str, Any] = await self.call(self.reader.latestOffset, self.offset, self._limit)
        return found

    async def batch(self) -> list[Row]:
        """The next batch."""
        end = await self.latest()
        rows = await self.read(self.offset, end)
        await self.commit(end)
        return rows

    async def commit(self, end: dict[str, Any]) -> None:
        await self.call(self.reader.commit, end)
        self.offset = end

    async def read(self, start: Any, end: Any) -> list[Row]:
        def all_of() -> list[Row]:
            batches = [batch for part in self.reader.partitions(start, end) for batch in self.reader.read(part)]
            return rows_of(batches)

        rows: list[Row] = await self.call(all_of)
        return rows


def rows_of(batches: list[pa.RecordBatch]) -> list[Row]:
    rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: (row[-1], str(row[0])))


async def test_it_begins_with_the_table_and_goes_on_with_its_changes(tmp_path: Path, db: perco.Database) -> None:
    await put(db, (body, "k1", "one"), (size, "k1", 1), (body, "k7", LONG), (tree, "k7", {"a": [1]}))
    async with Query(tmp_path) as query:
        assert await query.batch() == []  # it notes where the stream begins
        at = query.offset["ts"]
        second = await put(db, (body, "k1", "two"), (body, "k7", None), (tree, "k7", None), (size, "k8", 8))
        assert await query.batch() == [
            ("k1", "one", 1, None, "insert", at),
            ("k7", LONG, None, '{"a": [1]}', "insert", at),
        ]
        third = await put(db, (size, "k1", None), (body, "k8", LONG))
        assert await query.batch() == [
            ("k1", "two", 1, None, "update_postimage", second),
            ("k7", None, None, None, "delete", second),
            ("k8", None, 8, None, "insert", second),
            ("k1", "two", None, None, "update_postimage", third),
            ("k8", LONG, 8, None, "update_postimage", third),
        ]


async def test_preimages_come_as_in_deltas_change_data_feed(tmp_path: Path, db: perco.Database) -> None:
    first = await put(db, (body, "k1", "one"), (size, "k1", 1), (body, "k2", "x"))
    async with Query(tmp_path, since=first, preimages=True, columns="body,size") as query:
        second = await put(db, (body, "k1", LONG), (body, "k2", None))
        assert await query.batch() == [
            ("k1", "one", 1, "update_preimage", second),
            ("k1", LONG, 1, "update_postimage", second),
            ("k2", "x", None, "delete", second),
        ]


async def test_of_net_changes_a_row_has_one_in_a_batch(tmp_path: Path, db: perco.Database) -> None:
    first = await put(db, *((body, f"k{at}", "old") for at in range(1, 5)))
    async with Query(tmp_path, since=first, net=True, preimages=True, columns="body") as query:
        await put(db, (body, "k1", "a"), (body, "k2", None), (body, "k3", "c"), (body, "k5", "e"), (body, "k6", "f"))
        second = await put(db, (body, "k2", "b"), (body, "k4", "d"), (body, "k6", None))
        last = await put(db, (body, "k1", "aa"), (body, "k3", "old"), (body, "k4", None), (body, "k5", "ee"))
        assert await query.batch() == [
            ("k2", "old", "update_preimage", second),
            ("k2", "b", "update_postimage", second),
            ("k1", "old", "update_preimage", last),
            ("k1", "aa", "update_postimage", last),
            ("k4", "old", "delete", last),
            ("k5", "ee", "insert", last),
        ]


def test_net_changes_are_in_the_order_of_their_last_commits() -> None:
    net = Net(docs)
    for commit_ts, key in ((1, "a"), (2, "b"), (3, "a")):
        net.add(commit_ts, RowChange("docs", key, {"size": commit_ts - 1}, {"size": commit_ts}))
    assert list(net.taken()) == [
        (2, RowChange("docs", "b", {"size": 1}, {"size": 2})),
        (3, RowChange("docs", "a", {"size": 0}, {"size": 3})),
    ]


async def test_a_batch_has_whole_transactions_and_is_the_same_when_it_is_read_again(
    tmp_path: Path, db: perco.Database
) -> None:
    first = await put(db, (body, "k1", "old"))
    commits = [await put(db, (size, "k1", at), (size, "k6", -at), (size, f"k{at}", at)) for at in range(2, 5)]
    large = await put(db, *((size, f"k{at}", 0) for at in range(10)))
    async with Query(tmp_path, rows=7, since=first, columns="size", partitions=3) as query:
        ends, batches = [query.offset], []
        while (end := await query.latest()) != ends[-1]:
            batches.append(await query.read(ends[-1], end))
            await query.commit(end)
            ends.append(end)
        commits_of = [sorted({row[-1] for row in batch}) for batch in batches]
        assert commits_of == [commits[:2], commits[2:], [large]]
        assert [len(batch) for batch in batches] == [6, 3, 10]
    await put(db, (size, "k1", None), (size, "k6", 100))
    async with Query(tmp_path, ends[0], since="now", columns="size") as again:
        assert [await again.read(*pair) for pair in itertools.pairwise(ends)] == batches
        await db.split(docs, "k3")
        assert [await again.read(*pair) for pair in itertools.pairwise(ends)] == batches


async def test_a_snapshot_is_divided_into_batches(tmp_path: Path, db: perco.Database) -> None:
    await put(db, *((size, f"k{at}", at) for at in range(10)))
    async with Query(tmp_path, rows=4, columns="size") as query:
        assert await query.batch() == []
        later = await put(db, (size, "k0", None), (size, "k9", 99))
        batches = [await query.batch() for _ in range(4)]
        assert [[row[:3] for row in batch] for batch in batches[:3]] == [
            [(f"k{at}", at, "insert") for at in part] for part in (range(4), range(4, 8), range(8, 10))
        ]
        assert batches[3] == [("k0", None, "delete", later), ("k9", 99, "update_postimage", later)]


async def test_a_batch_without_bound_has_the_whole_snapshot(tmp_path: Path, db: perco.Database) -> None:
    await put(db, *((size, f"k{at}", at) for at in range(10)))
    async with Query(tmp_path, rows=None, columns="size") as query:
        assert len(await query.batch()) == 10


async def test_from_now_on_is_from_the_first_batch_on_wherever_the_query_goes_on(
    tmp_path: Path, db: perco.Database
) -> None:
    await put(db, (size, "k1", 1))
    async with Query(tmp_path, startingVersion="latest", columns="size") as query:
        start, end = query.offset, await query.latest()
    second = await put(db, (size, "k1", 2))
    async with Query(tmp_path, end, startingVersion="latest", columns="size") as query:  # the batch had failed
        assert await query.read(start, end) == []
        assert await query.batch() == [("k1", 2, "update_postimage", second)]
    async with Query(tmp_path, startingVersion=second, columns="size") as query:
        assert await query.batch() == [("k1", 2, "update_postimage", second)]


async def test_an_offset_advances_without_changes_only_now_and_then(
    tmp_path: Path, db: perco.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await put(db, (size, "k1", 1))
    async with Query(tmp_path, since=first) as query:
        assert await query.latest() == query.offset | {"ts": first}
        monkeypatch.setattr(following, "_HEARTBEAT_S", 0.0)
        end = await query.latest()
        assert end["ts"] > first
        assert await query.call(query.reader.partitions, query.offset, end) == []


async def test_until_now_goes_no_further_than_its_beginning_and_gets_there(tmp_path: Path, db: perco.Database) -> None:
    first = await put(db, (size, "k1", 1))
    second = await put(db, (size, "k1", 2))
    async with Query(tmp_path, since=first, columns="size") as query:
        await query.call(query.reader.prepareForTriggerAvailableNow)
        await put(db, (size, "k1", 3))
        assert await query.batch() == [("k1", 2, "update_postimage", second)]
        assert query.offset["ts"] > second  # so that a quiet table's changes need not be kept since its last one
        assert await query.latest() == query.offset
    async with Query(tmp_path, columns="size") as query:
        await query.call(query.reader.prepareForTriggerAvailableNow)
        await put(db, (size, "k1", 4))
        assert [row[1] for _ in range(3) for row in await query.batch()] == [3]


async def test_a_spark_that_does_not_say_where_a_batch_starts(
    tmp_path: Path, db: perco.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(db, (size, "k1", 1), (size, "k7", 7))
    async with Query(tmp_path, columns="size") as query:
        start, end = query.offset, await query.call(query.reader.latestOffset)
        assert [row[:3] for row in await query.read(start, end)] == [("k1", 1, "insert"), ("k7", 7, "insert")]
        assert await query.call(query.reader.latestOffset) == end
        second = await put(db, (size, "k1", 2))
        further = await query.call(query.reader.latestOffset)
        assert await query.read(end, further) == [("k1", 2, "update_postimage", second)]
    third = await put(db, (size, "k1", 3))
    async with Query(tmp_path, further, columns="size") as query:
        last = await query.call(query.reader.latestOffset)
        assert await query.read(further, last) == [("k1", 3, "update_postimage", third)]
    monkeypatch.setattr("perco.spark.source.BOUNDED", False)
    with pytest.raises(UsageError, match=r"maxRows needs PySpark 4\.2"):
        async with Query(tmp_path, maxRows=5):
            pass


async def test_a_pin_holds_what_the_query_would_read_again(tmp_path: Path, db: perco.Database) -> None:
    first = await put(db, (size, "k1", 1))

    async def pinned() -> dict[str, int]:
        return {pin.name: pin.ts for pin in await db.pins()}

    async with Query(tmp_path, since=first, columns="size") as query:
        second = await put(db, (size, "k1", 2))
        end = await query.latest()
        [(name, ts)] = (await pinned()).items()
        assert (name, ts) == (f"spark stream {end['stream']}", first)
        assert await query.read(query.offset, end) == [("k1", 2, "update_postimage", second)]
        await query.commit(end)
        assert await pinned() == {name: end["ts"]}
    async with Query(tmp_path, end) as query:
        await put(db, (size, "k1", 3))
        further = await query.latest()
        assert further["stream"] == end["stream"]
        assert await pinned() == {name: end["ts"]}
    await db.drop_pin(name)
    async with Query(tmp_path, end) as query:  # the lease had ended
        await query.call(query.reader.partitions, end, further)
        assert await pinned() == {name: end["ts"]}
    async with Query(tmp_path) as query:
        begun = await query.latest()
        assert await pinned() == {name: end["ts"], f"spark stream {begun['stream']}": begun["ts"]}


async def test_a_stream_whose_changes_are_gone_says_how_to_begin_again(tmp_path: Path) -> None:
    keep = perco.Schema(perco.Table("docs", key=perco.TEXT, changes=True, keep=perco.Keep(seconds=0)))
    of = keep.tables["docs"].column("size", perco.INT64)
    async with perco.open(tmp_path / "store", keep) as db:
        first = await put(db, (of, "k1", 1))
        await put(db, (of, "k1", 2))
        async with Query(tmp_path, since=first) as query:
            end = await query.latest()
            await db.vacuum()
            assert [row[1] for row in await query.read(query.offset, end)] == [2]  # the pin held it
            await db.drop_pin(f"spark stream {end['stream']}")
            await put(db, (of, "k1", 3))
            await db.vacuum()
            parts = [Part(Range(), first, end["ts"])]
            with pytest.raises(HistoryGone, match="changes of table 'docs' since timestamp") as failed:
                await query.call(lambda: [*query.reader.read(parts[0])])
            assert "new checkpointLocation" in failed.value.__notes__[0]
        async with Query(tmp_path, query.offset) as query:
            with pytest.raises(HistoryGone, match="are gone") as failed:
                await query.latest()
            assert "new checkpointLocation" in failed.value.__notes__[0]


async def test_keys_of_several_parts_and_schemas_of_ones_own(tmp_path: Path, db: perco.Database) -> None:
    at = await put(db, (weight, ("a", 1), 0.5), (weight, ("a", 2), 1.5))
    async with Query(tmp_path, table="pairs", since=at - 1) as query:
        assert await query.batch() == [({"_1": "a", "_2": n}, n - 0.5, "insert", at) for n in (1, 2)]
    source = PercoSource({"table": "docs", "path": str(tmp_path / "store"), "readchangefeed": "true"})
    known = await trio.to_thread.run_sync(source.schema)
    with pytest.raises(SchemaMismatch, match="needs the column '_change_type'"):
        source.streamReader(type(known)(known.fields[:2]))
    reader: Any = source.streamReader(type(known)([known["_change_type"], known["key"], known["size"]]))
    await put(db, (size, "k1", 1))
    start = {"table": "docs", "ts": at}
    end = await trio.to_thread.run_sync(reader.latestOffset, start)
    parts = await trio.to_thread.run_sync(reader.partitions, start, end)
    rows = await trio.to_thread.run_sync(lambda: [row for part in parts for row in reader.read(part)])
    assert [row.to_pylist() for row in rows] == [[{"_change_type": "insert", "key": "k1", "size": 1}]]
    await trio.to_thread.run_sync(reader.stop)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"table": "plain"}, "'plain' keeps no log of its changes; it must be declared with changes=True"),
        ({"since": "1", "startingVersion": "2"}, "only one of since, startingVersion and startingTimestamp"),
        ({"since": "yesterday"}, "since='yesterday': write a time as in"),
        ({"net": "perhaps"}, "net='perhaps': it is false or true"),
        ({"maxRows": "0"}, "maxRows='0': it must be a whole number of at least 1"),
        ({"key": "_commit_ts"}, "a stream of changes has a column '_commit_ts': choose another name"),
        ({"ts": "5"}, "no option 'ts'; it has table, url"),
    ],
)
async def test_wrong_options_are_told_when_the_stream_is_loaded(
    tmp_path: Path, db: perco.Database, options: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        async with Query(tmp_path, **options):
            pass


async def test_offsets_of_another_table_or_of_the_future_are_refused(tmp_path: Path, db: perco.Database) -> None:
    async with Query(tmp_path, {"table": "pairs", "ts": 1}) as query:
        with pytest.raises(UsageError, match="belongs to a stream of table 'pairs', not of 'docs'"):
            await query.latest()
    async with Query(tmp_path, since=10**9) as query:
        with pytest.raises(UsageError, match=r"is at timestamp 1000000000, .* an older copy"):
            await query.latest()
        with pytest.raises(UsageError, match="there are no changes up to"):
            await query.call(lambda: [*query.reader.read(Part(Range(), 0, 10**9))])


# ------------------------------------------------------------------ the pin, and the loop


async def test_the_pin_is_renewed_and_moved_although_tasks_take_it_over(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with perco.open("memory:", SCHEMA) as db, trio.open_nursery() as nursery:
        commits = [await put(db, (size, "k1", at)) for at in range(3)]
        hold = Hold(db, "docs", 9.0)
        nursery.start_soon(hold.keep)
        await trio.sleep(5)
        assert await db.pins() == []
        await hold.move("s", commits[0])
        [first] = await db.pins()
        await trio.sleep(20)  # longer than the lease
        [renewed] = await db.pins()
        assert renewed[:4] == first[:4]
        assert renewed.id != first.id

        oracle, right = inside(db).oracle, inside(db).oracle.pins.find
        lies = [1, 1]

        async def find(name: str) -> perco.Pin | None:
            pin = await right(name)
            return pin._replace(id="before it was taken over") if pin is not None and lies and lies.pop() else pin

        monkeypatch.setattr(oracle.pins, "find", find)
        await hold.move("s", commits[1])
        assert [(pin.name, pin.ts) for pin in await db.pins()] == [("spark stream s", commits[1])]
        lies = [1] * 50
        with pytest.raises(UsageError, match="meanwhile"):
            await hold.move("s", commits[2])
        assert len(lies) == 30
        nursery.cancel_scope.cancel()


async def test_a_pin_that_comes_too_late_is_an_error_of_the_next_batch(autojump_clock: MockClock) -> None:
    keep = perco.Schema(perco.Table("docs", key=perco.TEXT, changes=True, keep=perco.Keep(seconds=0)), plain)
    of = keep.tables["docs"].column("size", perco.INT64)
    async with perco.open("memory:", keep) as db, trio.open_nursery() as nursery:
        first = await put(db, (of, "k1", 1))
        hold = Hold(db, "docs", 9.0)
        nursery.start_soon(hold.keep)
        await hold.move("s", first)
        await db.drop_pin("spark stream s")
        await put(db, (of, "k1", 2))
        await db.vacuum()
        await trio.sleep(5)  # it could not be renewed
        with pytest.raises(HistoryGone, match=f"since timestamp {first} are gone"):
            await hold.move("s", first)
        nursery.cancel_scope.cancel()


def test_a_loop_takes_calls_until_it_ends() -> None:
    async def works(ready: Callable[[], None]) -> None:
        ready()
        await trio.sleep_forever()

    async def add(one: int, other: int) -> int:
        await trio.lowlevel.checkpoint()
        return one + other

    async def fail() -> None:
        raise ValueError("of the call")

    loop = Loop(works)
    assert loop.call(add, 1, 2) == 3
    with pytest.raises(ValueError, match="of the call"):
        loop.call(fail)
    assert loop.call(add, 1, 2) == 3
    loop.close()
    loop.close()
    with pytest.raises(UsageError, match="closed"):
        loop.call(add, 1, 2)


def test_what_ends_a_loop_is_the_error_of_its_calls() -> None:
    async def refuses(ready: Callable[[], None]) -> None:
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        Loop(refuses)
    ends = trio.Event()

    async def breaks(ready: Callable[[], None]) -> None:
        ready()
        await ends.wait()
        raise ValueError("later")

    async def end() -> None:
        ends.set()
        await trio.sleep_forever()

    loop = Loop(breaks)
    for _ in range(2):
        with pytest.raises(ValueError, match="later"):
            loop.call(end)


# ------------------------------------------------------------------ parts


def test_changes_are_divided_by_tablets_and_by_time() -> None:
    tablets = [Range(b"", b"b"), Range(b"b", b"c"), Range(b"c", None)]
    of = Following(Store(url=""), "t", "key", 1, 100, 1, False, False, 1.0)

    def parts(wanted: int, of: Following = of, since: int = 10, upto: int = 20) -> list[tuple[Range, int, int]]:
        return [(part.range, part.since, part.upto) for part in parts_of(tablets, since, upto, wanted, of)]

    assert parts(0) == []
    assert parts(1) == [(Range(b"", None), 10, 20)]
    assert parts(2) == [(Range(b"", b"b"), 10, 20), (Range(b"b", None), 10, 20)]
    assert parts(6) == [(tablet, *time) for tablet in tablets for time in ((10, 15), (15, 20))]
    assert parts(6, since=10, upto=11) == [(tablet, 10, 11) for tablet in tablets]
    assert parts(1, of._replace(partitions=3)) == parts(3)
    assert parts(6, of._replace(net=True)) == parts(3)
