"""get, get_many, row and scan, with the transaction's own writes on top, against a dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import trio
from hypothesis import given, settings, strategies as st

import perco
from perco.txn import reader as module, scan as scan_module

docs = perco.Table("docs", key=perco.TEXT, splits=["b", "ca", "q"])
a = docs.column("a", perco.TEXT)
b = docs.column("b", perco.TEXT)  # long values: they lie in the data group
c = docs.column("c", perco.TEXT, group="raw")
COLUMNS: list[perco.Column[str, str]] = [a, b, c]
pairs = perco.Table("pairs", key=perco.Tuple(perco.TEXT, perco.INT64))
weight = pairs.column("weight", perco.INT64)
blobs = perco.Table("blobs")
size = blobs.column("size", perco.INT64)
numbers = perco.Table("numbers", key=perco.INT64, splits=[0])
square = numbers.column("square", perco.INT64)
SCHEMA = perco.Schema(docs, pairs, blobs, numbers)

keys = st.text(alphabet="abcq\0\x7f\u00ff", max_size=3)
Write = tuple[int, str, "str | None"]
writes: st.SearchStrategy[Write] = st.tuples(
    st.integers(0, 2), keys, st.none() | st.sampled_from(["", "short", "long" * 80])
)
Model = dict[str, dict[int, str]]


def put(model: Model, write: Write) -> None:
    column, key, value = write
    if value is None:
        model.get(key, {}).pop(column, None)
    else:
        model.setdefault(key, {})[column] = value


def send(txn: perco.Transaction, write: Write) -> None:
    column, key, value = write
    if value is None:
        txn.delete(COLUMNS[column], key)
    else:
        txn.set(COLUMNS[column], key, value)


scans = st.fixed_dictionaries(
    {},
    optional={
        "start": keys,
        "stop": keys,
        "prefix": keys,
        "reverse": st.booleans(),
        "limit": st.integers(0, 6),
        "columns": st.sets(st.integers(0, 2), min_size=1).map(sorted),
    },
)


def scanned(model: Model, options: dict[str, Any]) -> list[tuple[str, dict[int, str]]]:
    columns = options.get("columns", [0, 1, 2])
    start, stop, prefix = options.get("start", ""), options.get("stop"), options.get("prefix", "")
    found = []
    for key in sorted(model, reverse=options.get("reverse", False)):
        row = {column: value for column, value in model[key].items() if column in columns}
        if row and key >= start and (stop is None or key < stop) and key.startswith(prefix):
            found.append((key, row))
    return found[: options.get("limit")]


@given(
    st.lists(st.lists(writes, max_size=12), max_size=3),
    st.lists(writes, max_size=12),
    st.lists(scans, min_size=3, max_size=3),
    st.integers(1, 4),
    st.sampled_from([1, 100, 1000, 4 << 20]),
)
@settings(max_examples=60, deadline=None)
async def test_reads_agree_with_a_dict(
    committed: list[list[Write]], own: list[Write], wanted: list[dict[str, Any]], page: int, size: int
) -> None:  # T9
    """Own writes, deletes, ranges, prefixes, limits, both directions, over tablets and pages of a few rows or bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROWS_PER_READ", page)
        patch.setattr(scan_module, "_ROWS_PER_READ", page)
        patch.setattr(scan_module, "_BYTES_PER_PAGE", size)
        async with perco.open("memory:", SCHEMA) as db:
            model: Model = {}
            for batch in committed:
                async with db.transaction() as txn:
                    for write in batch:
                        send(txn, write)
                        put(model, write)
            async with db.snapshot() as snap, db.transaction() as txn:
                await compare(snap, model, wanted)
                for write in own:
                    send(txn, write)
                    put(model, write)
                await compare(txn, model, wanted)
            async with db.snapshot() as snap:
                await compare(snap, model, wanted)


async def compare(snap: perco.Snapshot, model: Model, wanted: list[dict[str, Any]]) -> None:
    for options in [{}, {"reverse": True}, *wanted]:
        chosen = options.get("columns", [0, 1, 2])
        arguments = {**options, "columns": [COLUMNS[i] for i in chosen]}
        rows = await snap.scan(docs, **arguments).all()
        got = [(row.key, {i: row[COLUMNS[i]] for i in chosen if COLUMNS[i] in row}) for row in rows]
        assert got == scanned(model, options), options
    asked = ["absent", *model, "", "zz"]
    for i, column in enumerate(COLUMNS):
        expected = {key: model.get(key, {}).get(i) for key in asked}
        found = await snap.get_many(column, asked)
        assert found == expected
        assert list(found) == list(expected)
        assert {key: await snap.get(column, key) for key in asked} == expected
    for key in asked:
        row = await snap.row(docs, key)
        assert {i: row[column] for i, column in enumerate(COLUMNS) if column in row} == model.get(key, {})
        assert row.values() == {COLUMNS[i].name: value for i, value in model.get(key, {}).items()}


@given(st.lists(st.tuples(st.text(alphabet="a\0b", max_size=2), st.integers(-2, 2)), unique=True, max_size=20))
@settings(max_examples=30, deadline=None)
async def test_tuple_keys_scan_in_the_order_of_tuples(wanted: list[tuple[str, int]]) -> None:
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            for i, key in enumerate(wanted):
                txn.set(weight, key, i)
        async with db.snapshot() as snap:
            assert [row.key for row in await snap.scan(pairs).all()] == sorted(wanted)
            for first in {first for first, _ in wanted}:
                rows = await snap.scan(pairs, prefix=(first,)).all()
                assert [row.key for row in rows] == sorted(key for key in wanted if key[0] == first)


async def test_prefixes_of_bytes_end_where_they_should() -> None:
    """A prefix of 0xff has nothing after it; one that ends in 0xff has."""
    present = [b"\xfe\xff", b"\xfe\xff\x00", b"\xff", b"\xff\xff", b"\xff\xff\x01", b"\x00", b""]
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            for key in present:
                txn.set(size, key, len(key))
        async with db.snapshot() as snap:
            for prefix in [b"", b"\x00", b"\xfe", b"\xfe\xff", b"\xff", b"\xff\xff", b"\xff\xff\xff"]:
                for reverse in (False, True):
                    rows = await snap.scan(blobs, prefix=prefix, reverse=reverse).all()
                    expected = sorted((key for key in present if key.startswith(prefix)), reverse=reverse)
                    assert [row.key for row in rows] == expected


async def test_numbers_scan_in_order_and_have_no_prefix() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            for i in range(-5, 6):
                txn.set(square, i, i * i)
        async with db.snapshot() as snap:
            assert [row.key for row in await snap.scan(numbers, start=-2, stop=4).all()] == [-2, -1, 0, 1, 2, 3]
            with pytest.raises(perco.UsageError, match="no prefix"):
                snap.scan(numbers, prefix=1)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 600])
async def test_scans_and_multigets_over_many_pages(count: int) -> None:
    async with perco.open("memory:", SCHEMA) as db:
        wanted = [f"{i:04}" for i in range(count)]
        async with db.transaction() as txn:
            for key in wanted:
                txn.set(a, key, key)
        async with db.transaction() as txn:
            for key in wanted[::3]:
                txn.delete(a, key)
            kept = [key for key in wanted if key not in set(wanted[::3])]
            assert [row.key for row in await txn.scan(docs).all()] == kept
            assert [row.key for row in await txn.scan(docs, reverse=True).all()] == kept[::-1]
            assert [row.key for row in await txn.scan(docs, limit=17).all()] == kept[:17]
            assert len(await txn.get_many(a, wanted)) == count


class Counting(dict[Any, Any]):
    """A transaction's writes; counts how many of them its scans look at."""

    looked_at = 0

    def _count(self, keys: Iterable[Any]) -> Iterator[Any]:
        for key in keys:
            self.looked_at += 1
            yield key

    def __iter__(self) -> Iterator[Any]:
        return self._count(super().__iter__())

    def __reversed__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._count(super().__reversed__())

    def __contains__(self, key: object) -> bool:
        self.looked_at += 1
        return super().__contains__(key)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("step", [0, 1, 5000])  # what is written: the row itself, the next one, one that is far ahead
async def test_writing_while_scanning_looks_at_each_write_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch, step: int, reverse: bool
) -> None:
    monkeypatch.setattr(scan_module, "_ROWS_PER_READ", 16)
    counts = []
    async with perco.open("memory:", SCHEMA) as db:
        for count in (200, 400, 800):
            ahead = -step if reverse else step
            async with db.transaction() as txn:
                for i in range(count):
                    txn.set(square, i, i)
            async with db.transaction() as txn:
                txn._writes = writes = Counting()
                seen = []
                async for row in txn.scan(
                    numbers, columns=[square], stop=count if not reverse else None, reverse=reverse
                ):
                    seen.append(row.key)
                    if 0 <= row.key < count:
                        txn.set(square, row.key + ahead, 1)
                assert set(range(count)) <= set(seen)
                assert len(writes) == count
                counts.append(writes.looked_at)
                txn.discard()
    assert counts[0] >= 200, "it counts"
    assert counts[1] <= 2.2 * counts[0]
    assert counts[2] <= 2.2 * counts[1], "else it grows faster than what is written"


async def test_long_values_are_read_as_many_at_a_time_as_fit() -> None:
    """Together they are more than a message of a served store may be, and a page holds but a few of them."""
    keys, long = [f"{i:02}" for i in range(40)], 1 << 20
    async with perco.open("memory:", SCHEMA) as db:
        for i in range(0, len(keys), 10):
            async with db.transaction() as txn:
                for key in keys[i : i + 10]:
                    txn.set(b, key, key * (long // 2))
                    txn.set(a, key, key)
        async with db.transaction() as txn:
            txn.delete(b, "07")
            for reverse in (False, True):
                txn.set(b, "075", f"written meanwhile, {reverse}")
                scan = txn.scan(docs, columns=[a, b], reverse=reverse)
                seen, most = [], 0
                while not scan.ended:
                    await scan.fetch()
                    here = []
                    while (row := scan.take()) is not None:
                        here.append(row)
                    most = max(most, sum(len(row[b] or "") for row in here))
                    seen += here
                assert [row.key for row in seen] == sorted([*keys, "075"], reverse=reverse)
                for row in seen:
                    own = f"written meanwhile, {reverse}" if row.key == "075" else None
                    assert row[b] == own or row[b] == row.key * (long // 2)
                    assert (row[b] is None) == (row.key == "07")
                assert 4 * long <= most <= 9 * long
            found = await txn.get_many(b, keys)
            assert {key: value[:2] for key, value in found.items() if value} == {
                key: key for key in keys if key != "07"
            }
            assert [row.key for row in await txn.scan(docs, limit=30).all()] == sorted([*keys, "075"])[:30]


async def test_a_page_is_bounded_though_its_first_rows_are_short() -> None:  # T9
    long = 1 << 20
    async with perco.open("memory:", SCHEMA) as db:
        for i in range(0, 30, 10):
            async with db.transaction() as txn:
                for n in range(i, i + 10):
                    txn.set(b, f"{n:02}", "s" * 300 if n < 16 else "l" * long)
        for reverse in (False, True):
            async with db.snapshot() as snap:
                scan, keys = snap.scan(docs, columns=[b], reverse=reverse), []
                while not scan.ended:
                    await scan.fetch()
                    size = 0
                    while (row := scan.take()) is not None:
                        keys.append(row.key)
                        size += len(row[b] or "")
                    assert size < 10 * long
                assert keys == sorted((f"{n:02}" for n in range(30)), reverse=reverse)


async def test_a_long_run_of_deleted_rows_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages may come back empty and yet not be the last."""
    monkeypatch.setattr(scan_module, "_ROWS_PER_READ", 2)
    async with perco.open("memory:", SCHEMA) as db:
        wanted = [f"{i:03}" for i in range(50)]
        async with db.transaction() as txn:
            for key in wanted:
                txn.set(a, key, key)
        async with db.transaction() as txn:
            for key in wanted[:-1]:
                txn.delete(a, key)
        async with db.snapshot() as snap:
            assert [row.key for row in await snap.scan(docs, limit=1).all()] == ["049"]
            assert [row.key for row in await snap.scan(docs, reverse=True).all()] == ["049"]


async def test_missing_rows_and_empty_inputs() -> None:
    """Fluo's ApiBehaviorIT."""
    async with perco.open("memory:", SCHEMA) as db, db.snapshot() as snap:
        assert await snap.get(a, "nowhere") is None
        assert await snap.get_many(a, []) == {}
        assert await snap.get_many(a, ["x", "x"]) == {"x": None}
        row = await snap.row(docs, "nowhere")
        assert (row[a], row[b], row.values(), a in row, row.commit_ts(a)) == (None, None, {}, False, 0)
        assert (row.get(a), row.get(a, "none")) == (None, "none")
        with pytest.raises(perco.UsageError, match="not asked for"):
            (await snap.row(docs, "nowhere", [a])).get(b, "")  # a default is for what is absent, not for a mistake
        assert await snap.scan(docs).all() == []
        assert await snap.scan(docs, limit=0).all() == []
        assert await snap.scan(docs, start="b", stop="a").all() == []
        assert await snap.scan(docs, start="b", stop="b").all() == []
        assert await snap.scan(docs, start="b", prefix="a").all() == []
        with pytest.raises(perco.UsageError, match="no columns"):
            await snap.row(docs, "x", [])
        with pytest.raises(perco.UsageError, match="negative"):
            snap.scan(docs, limit=-1)


async def test_the_empty_key_and_the_empty_value_are_ordinary() -> None:
    """Fluo's testRecoverEmptyColumn and friends: nothing is special about empty."""
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            txn.set(a, "", "")
            assert await txn.get(a, "") == ""
        async with db.snapshot() as snap:
            assert await snap.get(a, "") == ""
            assert a in await snap.row(docs, "")
            assert (await snap.row(docs, "")).get(a, "none") == ""
            assert [row.key async for row in snap.scan(docs)] == [""]


async def test_own_writes_are_seen_in_the_last_form_they_had() -> None:
    """Set twice, deleted, set again: the last wins, at every moment."""
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            for value in ["one", "two", None, "three"]:
                send(txn, (0, "k", value))
                assert await txn.get(a, "k") == value
                assert await txn.get_many(a, ["k"]) == {"k": value}
                assert (await txn.row(docs, "k"))[a] == value
                assert [row[a] async for row in txn.scan(docs)] == ([] if value is None else [value])
        async with db.snapshot() as snap:
            assert await snap.get(a, "k") == "three"


async def test_a_row_says_when_each_value_was_committed() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as first:
            first.set(a, "k", "1")
            first.set(b, "k", "1")
        async with db.transaction() as second:
            second.delete(b, "k")
        async with db.transaction() as txn:
            row = await txn.row(docs, "k")
            assert [row.commit_ts(column) for column in COLUMNS] == [first.commit_ts, second.commit_ts, 0]
            txn.set(a, "k", "own")
            assert (await txn.row(docs, "k")).commit_ts(a) == 0
        with pytest.raises(perco.UsageError, match="was not asked for"):
            row[perco.Table("docs", key=perco.TEXT).column("a", perco.TEXT)]


async def test_a_scan_may_be_left_and_others_run_beside_it() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            for key in "abcdef":
                txn.set(a, key, key)
        async with db.snapshot() as snap:
            one, two = snap.scan(docs), snap.scan(docs, reverse=True)
            seen = []
            async for row in one:
                seen.append(row.key + (await anext(two)).key)
                if len(seen) == 3:
                    break
            assert seen == ["af", "be", "cd"]
            assert [row.key for row in await one.all()] == ["d", "e", "f"]


@pytest.mark.parametrize("page", [1, 2, 256])
async def test_what_is_set_during_a_scan_is_seen_wherever_it_is_ahead(
    monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """A scan that writes behind itself does not meet its own writes again; ahead of itself it does, in its page too."""
    monkeypatch.setattr(scan_module, "_ROWS_PER_READ", page)
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            for key in "bdf":
                txn.set(a, key, "old")
        async with db.transaction() as txn:
            seen = []
            async for row in txn.scan(docs):
                seen.append((row.key, row[a]))
                if row.key == "b":
                    txn.set(a, "a", "behind")
                    txn.set(a, "bb", "next to it")
                    txn.set(a, "e", "ahead")
                    txn.delete(a, "f")
            assert seen == [("b", "old"), ("bb", "next to it"), ("d", "old"), ("e", "ahead")]
        async with db.transaction() as txn:
            seen = []
            async for row in txn.scan(docs, reverse=True):
                seen.append((row.key, row[a]))
                if row.key == "d":
                    txn.set(a, "z", "behind")
                    txn.set(a, "c", "ahead")
                    txn.set(a, "c", "ahead, again")
                    txn.set(a, "cz", "next to it")
                    txn.set(a, "b", "new")
                    txn.delete(a, "a")
            assert seen == [
                ("e", "ahead"),
                ("d", "old"),
                ("cz", "next to it"),
                ("c", "ahead, again"),
                ("bb", "next to it"),
                ("b", "new"),
            ]


class Looked(dict[Any, Any]):
    """The writes of a transaction, and how many of them have been looked at."""

    count = 0

    def __reversed__(self) -> Iterator[Any]:
        return self._counted(super().__reversed__())

    def __iter__(self) -> Iterator[Any]:
        return self._counted(super().__iter__())

    def _counted(self, writes: Iterator[Any]) -> Iterator[Any]:
        for write in writes:
            self.count += 1
            yield write

    def __contains__(self, write: object) -> bool:
        self.count += 1
        return super().__contains__(write)


@pytest.mark.parametrize("many", [False, True], ids=["one scan", "a scan for each"])
async def test_scans_look_at_each_own_write_a_few_times(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    """Whether one scan deletes as it goes, or each write is followed by a scan of other rows."""
    monkeypatch.setattr(scan_module, "_ROWS_PER_READ", 10)
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            for number in range(500):
                txn.set(square, number, number)
        async with db.transaction() as txn:
            txn._writes = looked = Looked()
            if many:
                for number in range(500):
                    txn.delete(square, number)
                    assert [row.key async for row in txn.scan(numbers, start=number, stop=number + 2)] == (
                        [number + 1] if number < 499 else []
                    )
            else:
                async for row in txn.scan(numbers):
                    txn.delete(square, row.key)
            assert len(looked) == 500
            assert looked.count < 5 * len(looked), "not all of them for each row"
            assert await txn.scan(numbers).all() == []


async def test_reads_of_one_transaction_may_run_at_once() -> None:  # T9 (TransactionImplIT)
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            for number in range(50):
                txn.set(a, f"{number:02}", "v")
        found: dict[int, object] = {}
        async with db.transaction() as txn, trio.open_nursery() as nursery:
            txn.set(a, "07", "own")

            async def read(number: int) -> None:
                found[number] = await txn.get(a, f"{number:02}")

            for number in range(60):
                nursery.start_soon(read, number)
        assert found == {n: "own" if n == 7 else "v" if n < 50 else None for n in range(60)}
