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
    ],
)
async def test_files_that_cannot_be_imported(
    store: Path, tmp_path: Path, line: dict[str, Any], flags: list[str], why: str
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(line) + "\n")
    done = await run("import", store, "docs", file, *flags)
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
    done = json.loads((await run("import", store, "docs", file, "--versions", "--json")).out)
    assert (done["versions"], done["observers"]) == (2, ["measure"])
    async with perco.open(store, stores.schema) as db:
        async with db.worker():
            await db.wait_idle()
        async with db.snapshot() as snap:
            assert await snap.get(stores.size, "new") == 3, "the version of 9 is newer than that of 4"
