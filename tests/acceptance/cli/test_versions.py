"""`perco export --versions` and `perco import --versions`: the history of a table."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import trio

import perco
from perco.cli import versions
from perco.cli.exporting import export
from perco.cli.reading import Range, When, versions_of
from tests.acceptance.cli import stores
from tests.acceptance.cli.stores import ROOT, make, owned, run
from tests.acceptance.cli.test_exchanging import FORMATS, KEYS, KINDS, schema
from tests.support import bank

KEEP = perco.Options(vacuum=perco.options.VacuumOptions(on=False))
History = dict[tuple[str, Any, str], list[str]]  # (table, key, column) -> each version's value, the oldest first


async def filled(path: Path, seed: int) -> History:
    """A store with a random history; returns this history."""
    rng = random.Random(seed)
    told: History = {}
    async with perco.open(path, schema(), options=KEEP) as db:
        for _ in range(40):
            async with db.transaction() as txn:
                for name, (_, keys) in KEYS.items():
                    for key in rng.sample(keys, rng.randint(0, len(keys))):
                        for kind in rng.sample(sorted(KINDS), 3):
                            column, value = db.schema.tables[name].columns[kind], rng.choice([None, *KINDS[kind][1]])
                            if value is None:
                                txn.delete(column, key)
                            else:
                                txn.set(column, key, value)
                            told.setdefault((name, key, kind), []).append(repr(value))
    return told


async def found_in(path: Path) -> History:
    """The history of such a store, cell by cell."""
    out: History = {}
    async with perco.open(path, schema(), options=KEEP) as db, db.snapshot() as snap:
        for name, (_, keys) in KEYS.items():
            for key in keys:
                for kind in KINDS:
                    found = await versions_of(db, snap, db.schema.tables[name].columns[kind], key)
                    if found:
                        out[name, key, kind] = [repr(value) for _, _, value in reversed(found)]
    return out


@pytest.mark.parametrize("kind", FORMATS)
async def test_a_history_comes_back_as_it_was(tmp_path: Path, kind: str) -> None:
    wanted = await filled(tmp_path / "s", seed=7)
    assert max(map(len, wanted.values())) > 5
    assert await found_in(tmp_path / "s") == wanted
    async with perco.open(tmp_path / "t", schema()):
        pass
    for name in KEYS:
        file = tmp_path / f"{name}.{kind}"
        out = await run("export", tmp_path / "s", name, file, "--versions")
        assert out.code == 0, out.err
        count = int(out.out.removeprefix(f"{file}: ").split()[0])
        assert count > 30
        done = await run("import", tmp_path / "t", name, file, "--versions")
        assert (done.code, done.out) == (0, f"{count} versions of {file} written to {name}\n"), done.err
    assert await found_in(tmp_path / "t") == wanted


async def test_long_histories_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await filled(tmp_path / "s", seed=8)
    files = [tmp_path / f"{n}.jsonl" for n in range(2)]
    for file in files:
        more: dict[str, Any] = {"versions": True, "replace": False, "json": False}
        await export(str(tmp_path / "s"), "tuple", str(file), Range(), When(), None, **more)
        for name in "_PER_COLUMN", "_ROWS", "_LONG_AT_ONCE", "_LONG_BYTES":
            monkeypatch.setattr(versions, name, 2)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(files[0].read_bytes()) > 10_000


async def test_lines_and_columns_say_what_a_transaction_wrote_and_deleted(tmp_path: Path) -> None:
    path, lines, table = tmp_path / "s", tmp_path / "docs.jsonl", tmp_path / "docs.parquet"
    first_ts = await make(path)
    async with owned(path):
        assert (await run("export", path, "docs", lines, "--columns", "title,rank", "--versions")).code == 0
        client, more = f"unix:{path / 'socket'}", ["--columns", "title,rank,contents", "--prefix", "a", "--versions"]
        assert (await run("export", client, "docs", table, *more)).code == 0
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert found[0] == {"key": "a", "commit_ts": first_ts, "values": {"title": "first", "rank": 0.25}}
    assert [each["commit_ts"] for each in found if each["key"] == "a"] == sorted(
        each["commit_ts"] for each in found if each["key"] == "a"
    )
    of_b = [each for each in found if each["key"] == "b"]
    assert [(each["values"], each.get("deleted")) for each in of_b] == [
        ({"title": "two\nlines"}, None),
        ({}, ["title"]),
    ]
    rows = parquet.read_table(table).to_pylist()
    assert [(row["title"], row["contents"], row["deleted"]) for row in rows] == [
        ("first", None, []),
        ("second", b"\x00\xff", []),
    ]
    assert rows[0]["commit_ts"] == first_ts < rows[1]["commit_ts"]
    old = await run("export", path, "docs", lines, "--columns", "title", "--versions", "--ts", first_ts, "--replace")
    assert old.out.startswith(f"{lines}: 1 version of docs")


@pytest.mark.parametrize("at", ["commit", "prewrite"])
async def test_locks_of_a_dead_process_are_in_no_way(tmp_path: Path, at: str) -> None:  # T9
    path, file = tmp_path / "s", tmp_path / "x.jsonl"
    async with trio.open_nursery() as nursery:
        argv = [sys.executable, "-m", "tests.support.owner", str(path), f"killed@{at}"]
        await nursery.start(partial(trio.run_process, argv, stdout=subprocess.DEVNULL, check=False, cwd=ROOT))
    assert json.loads((await run("check", path, "--json")).out)["locks"] > 0
    written: dict[str, int] = {}
    for table in bank.north, bank.south:
        out = await run("export", path, table.name, file, "--versions", "--replace")
        assert out.code == 0, out.err
        for line in file.read_text().splitlines():
            written[line] = written.get(line, 0) + 1
    stamps = [json.loads(line)["commit_ts"] for line in written]
    moved = [ts for ts in stamps if ts != min(stamps)]
    assert (len(moved) > 1, len(set(moved))) == ((True, 1) if at == "commit" else (False, 0)), stamps


@pytest.mark.parametrize(
    ("line", "flags", "why"),
    [
        ({"key": "a", "commit_ts": 7, "values": {}}, [], "has the versions of rows (commit_ts): import it with"),
        ({"key": "a", "values": {}}, ["--versions"], "line 1: a version has its timestamp in"),
        ({"key": "a", "commit_ts": "7", "values": {}}, ["--versions"], "line 1: a version has its timestamp in"),
        ({"key": "a", "commit_ts": 7, "values": {}, "deleted": "x"}, ["--versions"], '"deleted" is a list of columns'),
        ({"key": "a", "commit_ts": 7, "values": {}, "deleted": ["x"]}, ["--versions"], "has no column 'x'"),
        ({"key": "a", "commit_ts": 7, "values": {}}, ["--versions", "--bulk"], "leave out --bulk"),
        ({"key": "a", "commit_ts": 1 << 63, "values": {}}, ["--versions"], "line 1: a version has its timestamp in"),
        (
            {"key": "a", "commit_ts": 7, "values": {"size": 1}, "deleted": ["size"]},
            ["--versions"],
            "column 'size' has a value, and is one of those that were deleted",
        ),
    ],
)
async def test_files_that_cannot_be_imported(
    store: Path, tmp_path: Path, line: dict[str, Any], flags: list[str], why: str
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(line) + "\n")
    done = await run("import", store, "docs", file, *flags, *(["--append"] if "--bulk" not in flags else []))
    assert done.code == 2
    assert why in done.err


async def test_a_table_with_a_column_of_that_name(tmp_path: Path) -> None:
    table = perco.Table("logs", key=perco.TEXT)
    column = table.column("deleted", perco.BOOL)
    async with perco.open(tmp_path / "s", perco.Schema(table)) as db, db.transaction() as txn:
        txn.set(column, "a", True)
    file = tmp_path / "x.parquet"
    refused = await run("export", tmp_path / "s", "logs", file, "--versions")
    assert (refused.code, "a column 'deleted' of its own" in refused.err) == (2, True)
    assert (await run("export", tmp_path / "s", "logs", file)).code == 0
    assert (await run("import", tmp_path / "s", "logs", file)).code == 0


async def test_observers_are_notified_of_imported_versions(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    cells = [{"contents": {"hex": "00" * n}} for n in (3, 5)]
    file.write_text(
        "".join(
            json.dumps({"key": "new", "commit_ts": ts, "values": values}) + "\n"
            for ts, values in zip((9, 4), cells, strict=True)
        )
    )
    done = json.loads((await run("import", store, "docs", file, "--versions", "--append", "--json")).out)
    assert (done["versions"], done["observers"]) == (2, ["measure"])
    async with perco.open(store, stores.schema) as db:
        async with db.worker():
            await db.wait_idle()
        async with db.snapshot() as snap:
            assert await snap.get(stores.size, "new") == 3, "the version of 9 is newer than that of 4"


FORGETFUL = """
import sys, perco, trio
from perco.database.inside import inside
t = perco.Table("t", key=perco.INT64)
n = t.column("n", perco.INT64)

async def write(db, value):
    async with db.transaction() as txn:
        for key in range(20):
            txn.set(n, key, value)

async def main():
    async with perco.open(sys.argv[1], perco.Schema(t, keep=perco.Keep(seconds=0))) as db:
        await write(db, 1)
        await inside(db).oracle.note()
        print("written", flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        for value in range(2, 5):
            await write(db, value)
        await db.vacuum()
        print("removed", flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)

trio.run(main)
"""


@pytest.mark.parametrize("where", ["beside", "client"])
async def test_what_the_vacuum_removes_meanwhile_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:  # G5, T9
    """A reader beside the owner holds nothing: it fails. A client's snapshot holds its versions."""
    monkeypatch.setattr(versions, "_ROWS", 2)
    store = tmp_path / "s"
    async with stores.started([sys.executable, "-c", FORGETFUL, str(store)]) as process:
        assert process.stdin is not None
        lines = stores.Lines(process.stdout)
        assert await lines.next() == "written"
        address = str(store) if where == "beside" else f"unix:{store / 'socket'}"
        async with perco.open(address, readonly=True) as db, db.snapshot() as snap:
            table = db.schema.tables["t"]
            found = versions.versions_between(db, snap, table, list(table.columns.values()), b"", None)
            first = await anext(found)
            await process.stdin.send_all(b"go\n")
            assert await lines.next() == "removed"
            if where == "beside":
                with pytest.raises(perco.errors.SnapshotTooOld):
                    [_ async for _ in found]
                with pytest.raises(perco.errors.SnapshotTooOld):
                    await versions_of(db, snap, table.columns["n"], 7)
            else:
                rest = [version.key async for version in found]
                assert [first.key, *rest] == list(range(20))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ["commit_ts", "deleted"])
async def test_a_table_whose_other_columns_have_such_names(tmp_path: Path, kind: str, name: str) -> None:
    table = perco.Table("logs", key=perco.TEXT)
    text, own = table.column("text", perco.TEXT), table.column(name, perco.INT64)
    for store in "s", "t":
        async with perco.open(tmp_path / store, perco.Schema(table)) as db:
            if store == "s":
                for value in "one", "two":
                    async with db.transaction() as txn:
                        txn.set(text, "a", value)
                        txn.set(own, "a", 5)
    file = tmp_path / f"x.{kind}"
    assert (await run("export", tmp_path / "s", "logs", file, "--versions", "--columns", "text")).code == 0
    done = await run("import", tmp_path / "t", "logs", file, "--versions")
    assert done.code == 0, done.err
    async with perco.open(tmp_path / "t", perco.Schema(table)) as db, db.snapshot() as snap:
        assert [value for _, _, value in await versions_of(db, snap, text, "a")] == ["two", "one"]
        assert await snap.get(own, "a") is None


async def test_a_large_transaction_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_CELLS_MAX", 6)
    monkeypatch.setattr(versions, "_BYTES_MAX", 3000)
    table = perco.Table("t", key=perco.INT64)
    n, text = table.column("n", perco.INT64), table.column("text", perco.BYTES)
    rows = [versions.Version(i, 1 + (i >= 20), {n: i, text: bytes(1000 * (i == 3))}) for i in range(22)]
    found = versions.Sorted(table, ((f"row {i}", row) for i, row in enumerate(rows)))
    parts = list(found.commits())
    found.close()
    assert [version for part in parts for version in part] == rows
    assert [{version.commit_ts for version in part} for part in parts[-2:]] == [{1}, {2}]
    assert all(sum(len(version.values) for version in part) <= 6 for part in parts)
    assert len(parts) == 8
    with pytest.raises(perco.UsageError, match="row 0: "):
        versions.Sorted(table, [("row 0", versions.Version("wrong", 1, {}))])
    wrong = type("Folder", (), {"name": str(tmp_path / "none"), "cleanup": lambda self: None})()
    monkeypatch.setattr(versions, "TemporaryDirectory", lambda prefix: wrong)
    with pytest.raises(perco.UsageError, match="set TMPDIR"):
        versions.Sorted(table, [])


async def test_a_history_is_imported_into_an_empty_table(tmp_path: Path, store: Path) -> None:
    file = tmp_path / "x.jsonl"
    assert (await run("export", store, "numbers", file, "--versions")).code == 0
    refused = await run("import", store, "numbers", file, "--versions")
    assert (refused.code, "numbers has rows: a history is imported into an empty table" in refused.err) == (2, True)
    assert (await run("import", store, "numbers", file, "--versions", "--append")).code == 0
    again = json.loads((await run("get", store, "numbers", "7", "--versions", "--json")).out)
    assert len(again["versions"]["square"]) == 2


async def test_a_table_without_columns(tmp_path: Path) -> None:
    async with perco.open(tmp_path / "s", perco.Schema(perco.Table("bare", key=perco.TEXT))):
        pass
    for more in ([], ["--versions"]):
        done = await run("export", tmp_path / "s", "bare", tmp_path / "x.jsonl", *more)
        assert (done.code, "table 'bare': no columns to read" in done.err) == (2, True), done.err
    assert not (tmp_path / "x.jsonl").exists()
