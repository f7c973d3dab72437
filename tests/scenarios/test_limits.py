"""Limits, wrong types, closed and foreign things: said at once, in one sentence, and nothing half done."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import perco
from perco.database.inside import inside
from perco.storage import VALUE_BYTES_MAX

docs = perco.Table("docs", key=perco.TEXT)
text = docs.column("text", perco.TEXT)
n = docs.column("n", perco.INT64)
raw = docs.column("raw", perco.BYTES)
blobs = perco.Table("blobs")
size = blobs.column("size", perco.INT64)
SCHEMA = perco.Schema(docs, blobs)


def limits(**kwargs: int) -> perco.Options:
    return perco.Options(transaction=perco.options.TransactionOptions(**kwargs))


@pytest.mark.parametrize("fill", [b"k", b"\0", b"\xff"])
async def test_keys_end_at_400_bytes(fill: bytes) -> None:
    async with perco.open("memory:", SCHEMA) as db:
        longest, over = fill * 400, fill * 401
        async with db.transaction() as txn:
            txn.set(size, longest, 400)
            for use in (lambda: txn.set(size, over, 401), lambda: txn.delete(size, over)):
                with pytest.raises(perco.errors.TooLarge, match="401 bytes is over the limit of 400 bytes") as caught:
                    use()
                assert (caught.value.size, caught.value.limit) == (401, 400)
        async with db.snapshot() as snap:
            assert await snap.get(size, longest) == 400
            assert [row.key async for row in snap.scan(blobs)] == [longest]
            assert [row.key async for row in snap.scan(blobs, reverse=True)] == [longest]
            with pytest.raises(perco.errors.TooLarge):
                await snap.get(size, over)
            with pytest.raises(perco.errors.TooLarge):
                await snap.get_many(size, [b"a", over])
            with pytest.raises(perco.errors.TooLarge):
                await snap.row(blobs, over)


async def test_a_keys_limit_is_in_bytes() -> None:
    async with perco.open("memory:", SCHEMA) as db, db.transaction() as txn:
        txn.set(n, "\u00e4" * 200, 1)
        with pytest.raises(perco.errors.TooLarge, match="401"):
            txn.set(n, "\u00e4" * 200 + "a", 1)


async def test_values_end_at_8_mebibytes() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        largest = b"v" * VALUE_BYTES_MAX
        async with db.transaction() as txn:
            txn.set(raw, "k", largest)
            with pytest.raises(perco.errors.TooLarge, match="8388609 bytes is over the limit of 8388608 bytes"):
                txn.set(raw, "k", largest + b"v")
        async with db.snapshot() as snap:
            assert await snap.get(raw, "k") == largest


@pytest.mark.parametrize("length", [0, 255, 256, 257, 4096, 70_000])
async def test_values_short_and_long_come_back(length: int) -> None:
    """Up to 256 bytes they ride in the record, then in the data group."""
    async with perco.open("memory:", SCHEMA) as db:
        value = bytes(i % 251 for i in range(length))
        async with db.transaction() as txn:
            txn.set(raw, "k", value)
        async with db.snapshot() as snap:
            assert await snap.get(raw, "k") == value
            assert await snap.get_many(raw, ["k"]) == {"k": value}
            assert [row[raw] async for row in snap.scan(docs)] == [value]


async def test_cells_max_is_noticed_at_set() -> None:
    async with perco.open("memory:", SCHEMA, options=limits(cells_max=3)) as db:
        async with db.transaction() as txn:
            txn.set(n, "a", 1)
            txn.set(n, "b", 1)
            txn.delete(n, "c")
            for use in (lambda: txn.set(n, "d", 1), lambda: txn.delete(n, "d"), lambda: txn.set(text, "a", "")):
                with pytest.raises(perco.errors.TooLarge, match="4 is over the limit of 3"):
                    use()
            txn.set(n, "a", 2)  # a cell that is in it already is no new one
        async with db.snapshot() as snap:
            assert await snap.get_many(n, list("abd")) == {"a": 2, "b": 1, "d": None}


async def test_bytes_max_is_noticed_at_set() -> None:
    async with perco.open("memory:", SCHEMA, options=limits(bytes_max=100)) as db:
        async with db.transaction() as txn:
            txn.set(raw, "a", b"x" * 60)
            with pytest.raises(perco.errors.TooLarge, match="110 is over the limit of 100"):
                txn.set(raw, "b", b"x" * 50)
            txn.set(raw, "a", b"x" * 50)  # the value it replaces does not count
            txn.set(raw, "b", b"x" * 50)
            txn.delete(raw, "a")
            txn.set(raw, "c", b"x" * 50)
        async with db.snapshot() as snap:
            assert await snap.get_many(raw, list("abc")) == {"a": None, "b": b"x" * 50, "c": b"x" * 50}


async def test_none_means_absent_and_cannot_be_set() -> None:
    async with perco.open("memory:", SCHEMA) as db, db.transaction() as txn:
        for column in (text, n, raw):
            with pytest.raises(TypeError, match="None means absent"):
                txn.set(column, "k", None)  # type: ignore[arg-type]


WRONG: dict[str, Callable[[perco.Transaction], Any]] = {
    "value of another type": lambda txn: txn.set(n, "k", "1"),  # type: ignore[arg-type]
    "bool for an int": lambda txn: txn.set(n, "k", True),
    "bytes for a text": lambda txn: txn.set(text, "k", b"1"),  # type: ignore[arg-type]
    "int over 64 bits": lambda txn: txn.set(n, "k", 1 << 64),
    "lone surrogate": lambda txn: txn.set(text, "k", "\ud800"),
    "key of another type": lambda txn: txn.set(n, b"k", 1),  # type: ignore[arg-type]
    "key is None": lambda txn: txn.set(n, None, 1),  # type: ignore[arg-type]
    "key of another type, deleted": lambda txn: txn.delete(n, 5),  # type: ignore[arg-type]
    "key that is no text": lambda txn: txn.set(n, "\udc80", 1),
}


@pytest.mark.parametrize("what", list(WRONG))
async def test_wrong_types_are_noticed_at_set(what: str) -> None:
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            with pytest.raises((TypeError, ValueError)):
                WRONG[what](txn)
            txn.set(n, "ok", 1)
        async with db.snapshot() as snap:
            assert [row.key async for row in snap.scan(docs)] == ["ok"]


async def test_wrong_keys_are_noticed_at_every_read() -> None:
    async with perco.open("memory:", SCHEMA) as db, db.snapshot() as snap:
        wrong: Any = b"bytes"
        with pytest.raises(TypeError):
            await snap.get(n, wrong)
        with pytest.raises(TypeError):
            await snap.get_many(n, [wrong])
        with pytest.raises(TypeError):
            await snap.row(docs, wrong)
        for argument in ("start", "stop", "prefix"):
            with pytest.raises(TypeError):
                snap.scan(docs, **{argument: wrong})


async def test_a_value_is_what_it_was_when_it_was_set() -> None:
    """Encoded at once: changing the object later changes nothing."""
    table = perco.Table("t", key=perco.TEXT)
    data = table.column("data", perco.JSON)
    async with perco.open("memory:", perco.Schema(table)) as db:
        value = {"a": [1]}
        async with db.transaction() as txn:
            txn.set(data, "k", value)
            value["a"].append(2)
            assert await txn.get(data, "k") == {"a": [1]}
        async with db.snapshot() as snap:
            assert await snap.get(data, "k") == {"a": [1]}


# ------------------------------------------------------------ closed


async def test_an_ended_transaction_says_so_in_every_way() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        for end in ("commit", "discard", "leave"):
            async with db.transaction() as txn:
                txn.set(n, "k", 1)
                scan = txn.scan(docs)
                if end == "commit":
                    await txn.commit()
                elif end == "discard":
                    txn.discard()
                if end != "leave":
                    await all_closed(txn, scan)
            await all_closed(txn, scan)
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") == 1
            scan = snap.scan(docs)
        with pytest.raises(perco.errors.TransactionClosed, match="this snapshot has ended"):
            await snap.get(n, "k")
        with pytest.raises(perco.errors.TransactionClosed):
            await anext(scan)


async def all_closed(txn: perco.Transaction, scan: perco.Scan[str]) -> None:
    for use in (lambda: txn.set(n, "k", 1), lambda: txn.delete(n, "k"), lambda: txn.scan(docs)):
        with pytest.raises(perco.errors.TransactionClosed, match="this transaction has ended"):
            use()
    for ask in (
        lambda: txn.get(n, "k"),
        lambda: txn.get_many(n, ["k"]),
        lambda: txn.row(docs, "k"),
        lambda: anext(scan),
        txn.commit,
    ):
        with pytest.raises(perco.errors.TransactionClosed):
            await ask()


async def test_a_commit_in_the_middle_of_the_block_ends_it() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            txn.set(n, "k", 1)
            commit_ts = await txn.commit()
        assert txn.commit_ts == commit_ts
        assert txn.outcome == "committed"
        async with db.transaction() as txn:
            txn.set(n, "k", 2)
            txn.discard()
        assert txn.outcome == "aborted"
        async with db.snapshot() as snap:
            assert await snap.get(n, "k") == 1


async def test_a_closed_store_begins_nothing() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        pass
    for use in (db.begin, db.snapshot_at, lambda: db.outcome("1/1/docs/61"), lambda: db.run(nothing)):
        with pytest.raises(perco.errors.TransactionClosed, match="closed"):
            await use()


async def nothing(txn: perco.Transaction) -> None: ...


# ------------------------------------------------------------ foreign things


async def test_columns_that_are_not_in_the_schema() -> None:
    twin = perco.Table("docs", key=perco.TEXT)  # of the same name, but another declaration
    twin_n = twin.column("n", perco.INT64)
    foreign = perco.Table("foreign", key=perco.TEXT)
    foreign_n = foreign.column("n", perco.INT64)
    async with perco.open("memory:", SCHEMA) as db, db.transaction() as txn:
        for column in (twin_n, foreign_n):
            for use in (lambda c=column: txn.set(c, "k", 1), lambda c=column: txn.delete(c, "k")):
                with pytest.raises(perco.errors.SchemaMismatch, match="not in the schema"):
                    use()
            with pytest.raises(perco.errors.SchemaMismatch):
                await txn.get(column, "k")
            with pytest.raises(perco.errors.SchemaMismatch):
                await txn.get_many(column, ["k"])
            with pytest.raises(perco.errors.SchemaMismatch):
                txn.scan(column.table)
        with pytest.raises(perco.UsageError, match="not a column of table"):
            await txn.row(docs, "k", [size])  # type: ignore[list-item]
        with pytest.raises(perco.UsageError, match="not a column of table"):
            txn.scan(docs, columns=[size])  # type: ignore[list-item]


async def test_a_column_declared_after_opening() -> None:
    table = perco.Table("t", key=perco.TEXT)
    table.column("first", perco.INT64)
    async with perco.open("memory:", perco.Schema(table)) as db, db.transaction() as txn:
        late = table.column("late", perco.INT64)
        with pytest.raises(perco.errors.SchemaMismatch, match="after the store was opened"):
            txn.set(late, "k", 1)


def test_names_are_checked_where_they_are_declared() -> None:
    table = perco.Table("t")
    for name in ("", "_t", "x" * 65, 5):
        with pytest.raises(perco.UsageError, match="name"):
            perco.Table(name)  # type: ignore[call-overload]
        with pytest.raises(perco.UsageError, match="name"):
            table.column(name, perco.INT64)  # type: ignore[arg-type]
    table.column("n", perco.INT64)
    with pytest.raises(perco.UsageError, match="two columns"):
        table.column("n", perco.TEXT)
    with pytest.raises(perco.UsageError, match="two tables"):
        perco.Schema(perco.Table("t"), perco.Table("t"))


async def test_a_schema_is_needed_and_memory_is_not_for_reading() -> None:
    with pytest.raises(perco.UsageError, match="needs a schema"):
        perco.open("memory:")
    with pytest.raises(perco.UsageError, match="begins empty"):
        async with perco.open("memory:", SCHEMA, readonly=True):
            pass


@pytest.mark.parametrize(
    "url", ["tcp://host", "tcp://:1", "tcp://host:99999", "foundationdb://p/i", "s3://b/x", "unix:", ""]
)
async def test_urls_that_this_version_does_not_open(url: str) -> None:
    with pytest.raises(perco.UsageError):
        async with perco.open(url, SCHEMA):
            pass


async def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(perco.errors.UnsuitableFolder, match="it is a file, and a store is a folder"):
        async with perco.open(tmp_path / "notes", SCHEMA):
            pass
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_token_is_text() -> None:
    token: Any = 5
    with pytest.raises(perco.UsageError, match="takes the token of a server as text, not int"):
        perco.open("tcp://127.0.0.1:1", SCHEMA, token=token)


async def test_one_key_is_not_taken_for_a_list_of_keys() -> None:
    with pytest.raises(perco.UsageError, match=r"splits= takes a list of keys, such as \['mno'\]"):
        perco.Table("t", key=perco.TEXT, splits="mno")
    async with perco.open("memory:", SCHEMA) as db, db.snapshot() as snap:
        for column, key in ((n, "abc"), (size, b"abc")):
            with pytest.raises(perco.UsageError, match=re.escape(f"takes a list of keys, such as [{key!r}]")):
                await snap.get_many(column, key)  # type: ignore[misc]


def test_durability_has_two_spellings() -> None:
    with pytest.raises(perco.UsageError, match="durability"):
        perco.Options(durability="none")


async def test_what_the_codec_cannot_take_is_named_with_its_place() -> None:
    async with perco.open("memory:", SCHEMA) as db, db.transaction() as txn:
        with pytest.raises(TypeError, match=r"value of docs\.n: expected int, got str"):
            txn.set(n, "k", "1")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"key of Table\('docs'\): expected str, got int"):
            txn.set(n, 1, 1)  # type: ignore[arg-type]


async def one(txn: perco.Transaction) -> None: ...
async def three(txn: perco.Transaction, change: object, more: int) -> None: ...
async def two_of_three(txn: perco.Transaction, change: object, more: int = 3) -> None: ...


class Observing:
    async def __call__(self, txn: perco.Transaction, change: object) -> None: ...


def test_wrong_declarations_are_told_where_they_are_made() -> None:
    table = perco.Table("x")
    column = table.column("c", perco.BYTES)
    schema = perco.Schema(table)
    with pytest.raises(perco.UsageError, match=r"perco\.TEXT"):
        table.column("y", str)  # type: ignore[arg-type]
    with pytest.raises(perco.UsageError, match=r"perco\.INT64"):
        perco.Table("z", key=int)  # type: ignore[call-overload]
    for wrong in (column, [table], "x"):
        with pytest.raises(perco.UsageError, match="takes tables"):
            perco.Schema(wrong)  # type: ignore[arg-type]
    for plain in (lambda txn, change: None), print, 3:
        with pytest.raises(perco.UsageError, match="async def"):
            schema.observe(column, id="plain")(plain)  # type: ignore[arg-type]
    for number in one, three:
        with pytest.raises(perco.UsageError, match=r"called with \(txn, change\)"):
            schema.observe(column, id="number")(number)  # type: ignore[arg-type]
    assert not schema.observers
    schema.observe(column, id="default")(two_of_three)  # type: ignore[arg-type]
    schema.observe(column, id="object")(Observing())
    with pytest.raises(perco.UsageError, match="an observer's name"):
        schema.observe(column, id=None)  # type: ignore[call-overload]
    with pytest.raises(perco.UsageError, match=r"codecs as parts.*'str'"):
        perco.Tuple(str, perco.INT64)  # type: ignore[call-overload]
    with pytest.raises(perco.UsageError, match=r"perco\.Schema"):
        perco.open("memory:", table)  # type: ignore[arg-type]
    with pytest.raises(perco.UsageError, match=r"perco\.Options"):
        perco.open("memory:", schema, options={"seed": 1})  # type: ignore[arg-type]


def test_under_asyncio_it_says_that_it_runs_on_trio() -> None:
    async def main() -> None:
        async with perco.open("memory:", perco.Schema(perco.Table("x"))):
            pass

    with pytest.raises(perco.UsageError, match=r"trio\.run\(main\)"):
        asyncio.run(main())


@pytest.mark.parametrize("part", ["key", "value"])
async def test_a_codec_that_gives_no_bytes_is_told_at_set(part: str) -> None:
    broken = perco.Codec("broken", lambda value: value, lambda data: data, ordered=True)
    table = perco.Table("t", key=broken) if part == "key" else perco.Table("t")
    column = table.column("c", perco.BYTES if part == "key" else broken)
    async with perco.open("memory:", perco.Schema(table)) as db:
        async with db.transaction() as txn:
            with pytest.raises(TypeError, match="returned str"):
                txn.set(column, *(("k", b"v") if part == "key" else (b"k", "v")))
            txn.set(column, b"k", b"v")
        async with db.snapshot() as snap:
            assert await snap.get(column, b"k") == b"v"


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (lambda db, snap: perco.Keep(seconds=timedelta(hours=1)), "total_seconds"),
        (lambda db, snap: perco.Keep(seconds="60"), "number of seconds, not '60'"),
        (lambda db, snap: db.pin("p", lease_s="3h").__aenter__(), "number of seconds, not '3h'"),
        (lambda db, snap: db.pin("p", lease_s=timedelta(hours=3)).__aenter__(), "total_seconds"),
        (lambda db, snap: db.snapshot(at=timedelta(hours=1)).__aenter__(), "aware datetime, not datetime.timedelta"),
        (lambda db, snap: db.snapshot(at=1.5e9).__aenter__(), "datetime.fromtimestamp"),
        (lambda db, snap: db.pin("p", lease_s=1, at=1.5e9).__aenter__(), "datetime.fromtimestamp"),
        (lambda db, snap: db.snapshot(ts="1").__aenter__(), "ts= takes a timestamp"),
        (lambda db, snap: db.snapshot(ts=True).__aenter__(), "ts= takes a timestamp"),
        (lambda db, snap: snap.scan(docs, limit="3"), "a number of rows"),
        (lambda db, snap: snap.scan("docs"), "expected a perco.Table, not 'docs'"),
        (lambda db, snap: snap.scan("docs", columns=[n]), "expected a perco.Table, not 'docs'"),
        (lambda db, snap: snap.scan("docs", columns=[]), "expected a perco.Table, not 'docs'"),
        (lambda db, snap: snap.row("docs", "k"), "expected a perco.Table, not 'docs'"),
        (lambda db, snap: db.schema.tables["dosc"], "there is no table 'dosc'; there are: 'docs', 'blobs'"),
        (lambda db, snap: docs.columns["m"], "no column of table 'docs' named 'm'; there are: 'text', 'n', 'raw'"),
        (lambda db, snap: db.snapshot().__await__(), "async with db.snapshot() as snap:"),
        (lambda db, snap: db.snapshot().__enter__(), "async with db.snapshot() as snap:"),
        (lambda db, snap: db.transaction().__await__(), "async with db.transaction() as txn:"),
        (lambda db, snap: db.transaction().__enter__(), "async with db.transaction() as txn:"),
        (lambda db, snap: db.options(attempts="3"), "attempts is '3'; it must be an int"),
        (lambda db, snap: db.options(timeout=timedelta(seconds=3)), "total_seconds"),
        (lambda db, snap: db.wait_idle(timeout="3"), "timeout is a number of seconds, not '3'"),
        (lambda db, snap: iter(snap.scan(docs)), "async for row in snap.scan(...):"),
        (lambda db, snap: snap.scan(docs).__await__(), ".all()"),
    ],
)
async def test_what_is_of_the_wrong_kind_is_answered_with_a_remedy(wrong: Callable[..., Any], remedy: str) -> None:
    async with perco.open("memory:", SCHEMA) as db, db.snapshot() as snap:
        with pytest.raises(perco.UsageError, match=re.escape(remedy)):  # noqa: PT012
            got = wrong(db, snap)
            if inspect.isawaitable(got):
                await got
        assert await db.pins() == []
    assert not inside(db).oracle.holds.open, "a refused snapshot holds nothing"


async def test_a_row_is_asked_by_column_and_says_so() -> None:
    async with perco.open("memory:", SCHEMA) as db, db.snapshot() as snap:
        row = await snap.row(docs, "k")
        with pytest.raises(perco.UsageError, match=r"not by the name 'text'; row\.values\(\)"):
            row["text"]  # type: ignore[index]
        with pytest.raises(perco.UsageError, match="number of seconds"):
            async with db.pin("p", lease_s=1) as pin:
                await pin.renew("3h")  # type: ignore[arg-type]


async def test_what_wants_async_with_says_so_however_else_it_is_used(tmp_path: Path) -> None:
    opening = perco.open(tmp_path / "store", SCHEMA)
    remedy = r"write `async with perco.open\(...\) as db:`, or in blocking code `with perco.sync.open"
    with pytest.raises(perco.UsageError, match=remedy):
        opening.__enter__()
    with pytest.raises(AttributeError, match=remedy):
        opening.transaction()  # type: ignore[attr-defined]
    async with perco.open("memory:", SCHEMA) as db:
        with pytest.raises(AttributeError, match=r"has no 'set': write `async with db.transaction") as caught:
            db.transaction().set(n, "a", 1)  # type: ignore[attr-defined]
        assert caught.value.name == "set"
        blocks = {
            "async with db.transaction() as txn:": db.transaction(),
            "async with db.snapshot() as snap:": db.snapshot(),
            "async with db.pin(...) as pin:": db.pin("p", lease_s=1),
            "async with db.worker():": db.worker(),
            "async for attempt in db.attempts():": db.attempts(),
        }
        for write, block in blocks.items():
            for use in (lambda block: block.__enter__(), iter, lambda block: block.__await__()):
                with pytest.raises(perco.UsageError, match=f"write `{re.escape(write)}`"):
                    use(block)


async def test_a_transactions_block_is_entered_once() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        block = db.transaction()
        async with block as txn:
            txn.set(n, "k", 1)
        with pytest.raises(perco.UsageError, match="entered only once"):
            await block.__aenter__()
        assert txn.outcome == "committed"
        assert not inside(db).oracle.holds.open


async def test_a_snapshots_block_is_entered_once() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        block = db.snapshot()
        async with block as snap:
            assert await snap.get(n, "k") is None
        with pytest.raises(perco.UsageError, match="entered only once"):
            await block.__aenter__()
        with pytest.raises(perco.errors.TransactionClosed):
            await snap.get(n, "k")
        assert not inside(db).oracle.holds.open


async def test_who_only_reads_waits_for_no_observers(tmp_path: Path) -> None:
    async with perco.open(tmp_path, SCHEMA):
        pass
    async with perco.open(tmp_path, readonly=True) as db:
        for wait in (db.wait_idle(timeout=1), db.wait_for(1, timeout=1)):
            with pytest.raises(perco.errors.ReadOnly, match="observers do not run here"):
                await wait


async def test_a_run_without_a_function_is_told() -> None:
    async def nothing(txn: perco.Transaction) -> None: ...

    async def mistaken(txn: perco.Transaction) -> None:
        txn.nothing()  # type: ignore[attr-defined]
        raise AssertionError

    async with perco.open("memory:", SCHEMA) as db:
        for run in db.run, db.options(timeout=60).run:
            for wrong in None, nothing(None), "nothing":  # type: ignore[arg-type]
                with pytest.raises(perco.UsageError, match=r"db\.run\(function, \.\.\.\)"):
                    await run(wrong)  # type: ignore[arg-type]
            for plain in (lambda txn: 5), print:
                with pytest.raises(perco.UsageError, match="async def"):
                    await run(plain)  # type: ignore[arg-type, call-arg]
            with pytest.raises(TypeError, match="positional"):  # the caller's own mistakes come out as they are
                await run(nothing, 1)  # type: ignore[call-arg]
            with pytest.raises(AttributeError, match="nothing"):
                await run(mistaken)
        assert db.statistics().live_transactions == 0


async def test_a_column_where_a_list_of_them_belongs_is_told() -> None:
    async with perco.open("memory:", SCHEMA) as db, db.snapshot() as snap:
        with pytest.raises(perco.UsageError, match="as a list"):
            await snap.row(docs, "abc", n)  # type: ignore[arg-type]
        with pytest.raises(perco.UsageError, match="as a list"):
            snap.scan(docs, columns=n)  # type: ignore[arg-type]


async def test_a_timestamp_that_is_none_or_still_to_come_is_not_waited_for() -> None:
    async with perco.open("memory:", SCHEMA) as db, db.worker():
        async with db.transaction() as txn:
            txn.set(n, "a", 1)
        await db.wait_for(txn.commit_ts)
        for wrong in "a", None, 1.5, True:
            with pytest.raises(perco.UsageError, match="takes a timestamp"):
                await db.wait_for(wrong)  # type: ignore[arg-type]
        with pytest.raises(perco.UsageError, match=f"at {10**9} yet"):
            await db.wait_for(10**9)


async def test_options_that_are_none_do_not_make_a_worker() -> None:
    async with perco.open("memory:", SCHEMA) as db:
        with pytest.raises(perco.UsageError, match=r"perco\.WorkerOptions"):
            async with db.worker(options=5):  # type: ignore[arg-type]
                pass
