"""`perco export` and `perco import`, as a user meets them."""

from __future__ import annotations

import json
import os
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import perco
from tests.acceptance.cli import stores
from tests.acceptance.cli.stores import make, owned, run

FORMATS = ["jsonl", "arrow", "parquet"]
KINDS: dict[str, tuple[perco.Codec[Any], list[Any]]] = {
    "text": (perco.TEXT, ["", "\u00e4\0b\n", "x" * 5000]),
    "bytes": (perco.BYTES, [b"", b"\0\xff"]),
    "int64": (perco.INT64, [0, -(1 << 63), (1 << 63) - 1]),
    "float64": (perco.FLOAT64, [-0.0, 0.1, float("inf")]),
    "bool": (perco.BOOL, [True, False]),
    "json": (perco.JSON, [{"hex": "00"}, {"pairs": [1]}, [None, 1.5], "text"]),
    "msgpack": (perco.MSGPACK, [{"hex": "00"}, {1: b"\0", (2, "b"): None}, b"\xff", {"pairs": {"float": "nan"}}]),
    "date": (perco.DATE, [date.min, date.max]),
    "timestamp": (perco.TIMESTAMP, [datetime(1, 1, 1, tzinfo=UTC), datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC)]),
    "decimal": (perco.DECIMAL(20, 3), [Decimal("-0.005"), Decimal("12345678901234567.125")]),
    "own": (perco.Codec("own", lambda text: text.encode(), lambda data: data.decode()), ["own"]),
}
KEYS: dict[str, tuple[perco.Codec[Any], list[Any]]] = {
    "text": (perco.TEXT, ["a", "\u00e4", "b\0"]),
    "bytes": (perco.BYTES, [b"\0", b"\0\0", b"\xff"]),
    "tuple": (perco.Tuple(perco.TEXT, perco.INT64, perco.DATE), [("a", -1, date.min), ("a", 7, date.max)]),
    "decimal": (perco.DECIMAL(5, 2), [Decimal("-1.50"), Decimal("2.25")]),
}


def schema() -> perco.Schema:
    tables = []
    for name, (codec, _) in KEYS.items():
        table = perco.Table(name, key=codec)
        for column, (of, _) in KINDS.items():
            table.column(column, of)
        tables.append(table)
    return perco.Schema(*tables)


async def filled(path: Path) -> None:
    """Each value in some row, and nulls."""
    async with perco.open(path, schema()) as db, db.transaction() as txn:
        for name, (_, keys) in KEYS.items():
            table = db.schema.tables[name]
            for n in range(4):
                for column, (_, values) in KINDS.items():
                    if n < len(values):
                        txn.set(table.columns[column], keys[n % len(keys)], values[n])


async def content(path: Path) -> dict[str, list[Any]]:
    async with perco.open(path, schema()) as db, db.snapshot() as snap:
        return {
            name: [(row.key, repr(row.values())) for row in await snap.scan(db.schema.tables[name]).all()]
            for name in KEYS
        }


@pytest.mark.parametrize("how", [[], ["--bulk"], ["--group", "1"]])
@pytest.mark.parametrize("kind", FORMATS)
async def test_tables_come_back_as_they_were(tmp_path: Path, kind: str, how: list[str]) -> None:
    await filled(tmp_path / "s")
    async with perco.open(tmp_path / "t", schema()):
        pass
    for name, (_, keys) in KEYS.items():
        file = tmp_path / f"{name}.{kind}"
        out = await run("export", tmp_path / "s", name, file)
        assert out.code == 0, out.err
        assert f"{file}: {len(keys)} rows of {name}, " in out.out
        done = await run("import", tmp_path / "t", name, file, *how)
        assert (done.code, done.out) == (0, f"{len(keys)} rows of {file} written to {name}\n"), done.err
    wanted = await content(tmp_path / "s")
    assert await content(tmp_path / "t") == wanted
    assert sum(map(len, wanted.values())) == 10
    assert sorted(os.listdir(tmp_path)) == sorted([f"{n}.{kind}" for n in KEYS] + ["s", "t"])


async def test_a_store_in_use_is_exported_and_imported_into_and_observers_are_notified(tmp_path: Path) -> None:
    path, file = tmp_path / "s", tmp_path / "docs.jsonl"
    await make(path)
    async with owned(path) as owner:
        await owner.tell("put new")
        assert (await run("export", path, "docs", file, "--columns", "contents,title")).code == 0
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert {line["key"] for line in lines} >= {"a", "new"}
        file.write_text(json.dumps({"key": "imported", "values": {"contents": {"hex": "6e65772e"}}}) + "\n")
        done = json.loads((await run("import", path, "docs", file, "--json")).out)
        assert (done["rows"], done["observers"]) == (1, ["measure"])
    assert (await run("get", path, "docs", "imported", "contents")).out == "new.\n"
    async with perco.open(path, stores.schema) as db:
        async with db.worker():
            await db.wait_idle()
        async with db.snapshot() as snap:
            assert await snap.get(stores.size, "imported") == 4


async def test_parts_of_a_table_and_moments(store: Path, tmp_path: Path) -> None:
    first = json.loads((await run("get", store, "docs", "a", "title", "--versions", "--json")).out)
    ts = str(first["versions"]["title"][-1]["commit_ts"])
    file = tmp_path / "old.parquet"
    await run("export", store, "docs", file, "--ts", ts, "--columns", "title")
    assert parquet.read_table(file).to_pylist() == [{"key": "a", "title": "first"}]
    refused = await run("export", store, "docs", file)
    assert refused.code == 2
    assert "exists; --replace replaces it" in refused.err
    assert (await run("export", store, "docs", file, "--replace", "--start", "b", "--stop", "y")).code == 0
    assert parquet.read_table(file)["key"].to_pylist() == ["x"]
    piped = await run("export", store, "numbers", "-")
    assert [json.loads(line)["values"] for line in piped.out.splitlines()] == [
        {"square": 9},
        {"square": 0},
        {"square": 49},
    ]


async def test_columns_of_other_types_and_names(store: Path, tmp_path: Path) -> None:
    """Narrower numbers, keys under another name, nested values for JSON, nulls."""
    file = tmp_path / "x.parquet"
    rows = {
        "url": ["n1", "n2"],
        "size": pa.array([1, None], pa.int16()),
        "rank": pa.array([0.5, 1.5], pa.float32()),
        "tags": [{"k": [1]}, None],
    }
    parquet.write_table(pa.table(rows), file)
    refused = await run("import", store, "docs", file)
    assert (refused.code, "no column 'key' for the key; it has url, size, rank, tags" in refused.err) == (2, True)
    done = await run("import", store, "docs", file, "--key", "url")
    assert done.code == 0, done.err
    found = [
        json.loads(line) for line in (await run("scan", store, "docs", "--prefix", "n", "--json")).out.splitlines()
    ]
    assert found == [
        {"key": "n1", "values": {"size": 1, "rank": 0.5, "tags": {"k": [1]}}},
        {"key": "n2", "values": {"rank": 1.5}},
    ]
    rows["rank"] = pa.array([None, 2.5], pa.float32())
    parquet.write_table(pa.table(rows), file)
    assert (await run("import", store, "docs", file, "--key", "url", "--delete-nulls")).code == 0
    assert (await run("get", store, "docs", "n1", "rank")).code == 1
    assert (await run("get", store, "docs", "n2", "rank")).out == "2.5\n"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 3: this is not JSON"),
        ('{"key": "c"}', 'line 3: write {"key": KEY, "values": {COLUMN: VALUE, ...}}'),
        ('{"key": 7, "values": {}}', "line 3: 7 is not text"),
        ('{"key": "c", "values": {"size": "7"}}', 'line 3: "7" is not int64'),
        ('{"key": "c", "values": {"sise": 7}}', "line 3: table 'docs' has no column 'sise'"),
    ],
)
async def test_a_line_that_cannot_be_read_is_told_and_the_others_stay(
    store: Path, tmp_path: Path, line: str, why: str
) -> None:
    file = tmp_path / "x.jsonl"
    good = json.dumps({"key": "good", "values": {"size": 1}})
    file.write_text(f"{good}\n\n{line}\n")
    done = await run("import", store, "docs", file, "--group", "1")
    assert done.code == 2
    assert why in done.err
    written = (await run("get", store, "docs", "good", "size")).code == 0
    assert ("What was written before (1 row) stays; mend the file, and import it again" in done.err) == written
    file.write_text(f"{good}\n")
    assert (await run("import", store, "docs", file)).code == 0
    assert (await run("get", store, "docs", "good", "size")).out == "1\n"


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ({"key": ["c"], "size": ["seven"]}, "column 'size' of string does not fit int64"),
        ({"key": ["c"], "bytes_": [b""]}, "has no column 'bytes_'"),
        ({"key": [None], "size": [1]}, "row 1: a key cannot be null"),
        ({"key": ["c"], "size": [1.0]}, "column 'size' of double does not fit int64: perco converts only what cannot"),
        ({"key": ["c"], "title": [7]}, "column 'title' of int64 does not fit text"),
        ({"key": ["c"], "rank": pa.array([Decimal("0.1")])}, "does not fit float64"),
    ],
)
async def test_a_column_that_does_not_fit_is_told(store: Path, tmp_path: Path, column: Any, why: str) -> None:
    file = tmp_path / "x.parquet"
    parquet.write_table(pa.table(column), file)
    done = await run("import", store, "docs", file)
    assert done.code == 2
    assert why in done.err


async def test_the_last_row_of_a_key_wins(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    lines = [{"key": f"n{n % 3}", "values": {"size": n}} for n in range(100)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for group in ("1", "7", "100"):
        assert (await run("import", store, "docs", file, "--group", group)).code == 0
        scanned = await run("scan", store, "docs", "--prefix", "n", "--columns", "size", "--json")
        found = {line["key"]: line["values"]["size"] for line in map(json.loads, scanned.out.splitlines())}
        assert found == {"n0": 99, "n1": 97, "n2": 98}


async def test_a_file_that_cannot_be_written(store: Path, tmp_path: Path) -> None:
    done = await run("export", store, "docs", tmp_path / "none" / "x.parquet")
    assert (done.code, "x.parquet cannot be written: No such file" in done.err) == (2, True), done.err


async def test_files_that_are_none(store: Path, tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    (tmp_path / "x.jsonl").write_bytes(b"\xff\n")
    for name, why in (
        ("x.parquet", "cannot be read as parquet"),
        ("x.jsonl", "is not UTF-8"),
        ("none.jsonl", "No such file"),
        ("x.csv", "its name ends with none of .jsonl"),
    ):
        done = await run("import", store, "docs", tmp_path / name)
        assert (done.code, why in done.err) == (2, True), done.err
    assert (await run("export", store, "docs", "-", "--format", "parquet")).code == 2
