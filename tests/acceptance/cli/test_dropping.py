"""`perco drop`, and what the other commands show of what was dropped or renamed."""

from __future__ import annotations

import json
from pathlib import Path

import perco
from tests.acceptance.cli import renaming_app
from tests.acceptance.cli.stores import contents, docs, make, run, schema, size

APP = f"{renaming_app.__name__}:schema"


async def test_a_column_is_shown_then_dropped_then_removed(tmp_path: Path) -> None:  # N17
    store = tmp_path / "store"
    await make(store)
    shown = await run("drop", store, "docs.title")
    assert (shown.code, shown.err) == (1, "")
    assert shown.out == "column docs.title: title 2\nnothing was dropped: add --yes to drop it\n"
    done = await run("drop", store, "docs.title", "--yes")
    assert (done.code, done.out) == (0, "column docs.title: title 2\ndropped: the next vacuum removes the values\n")
    again = await run("drop", store, "docs.title", "--yes")
    assert (again.code, again.err) == (2, "perco: 'docs.title' was dropped already\n")
    assert "dropped     docs.title: still to be removed (perco vacuum)" in (await run("status", store)).out
    assert (await run("check", store)).code == 0
    assert json.loads((await run("vacuum", store, "--json")).out)["removed"]["dropped"] >= 4
    status = await run("status", store)
    assert "dropped" not in status.out
    assert "docs.title" not in status.out
    assert "rank" in (await run("get", store, "docs", "a")).out
    assert (await run("check", store)).code == 0


async def test_a_table_and_a_group(tmp_path: Path) -> None:  # N17
    store = tmp_path / "store"
    await make(store)
    assert (await run("drop", store, "links", "--yes")).out.startswith("table links: seen 3\ndropped")
    assert "links" not in (await run("schema", store)).out
    assert "links" not in json.loads((await run("schema", store, "--json")).out)["tables"]
    refused = await run("drop", store, "docs", "--group", "raw", "--yes")
    assert (refused.code, refused.out) == (2, "")
    assert "observer 'measure' observes docs.contents: drop it first (perco observers STORE --drop ID" in refused.err
    written = await run("drop", store, "docs.size")
    assert written.out.startswith("observer measure has been seen to write it\ncolumn docs.size: size 2\n")
    await run("observers", store, "--drop", "measure")
    done = await run("drop", store, "docs", "--group", "raw", "--yes", "--json")
    assert json.loads(done.out) == {
        "table": "docs",
        "columns": ["contents"],
        "values": {"contents": 2},
        "written_by": [],
        "dropped": True,
    }
    assert (await run("vacuum", store)).code == 0
    assert (await run("check", store)).code == 0
    assert (await run("compact", store)).code == 0, "also of a table that was dropped"
    async with perco.open(store, readonly=True) as db:
        assert "contents" not in db.schema.tables["docs"].columns
        assert "links" not in db.schema.tables


async def test_what_is_not_there_is_an_error_that_says_what_is(tmp_path: Path) -> None:
    store = tmp_path / "store"
    await make(store)
    for what in "docs.colour", "nothing":
        done = await run("drop", store, what, "--yes")
        assert done.code == 2
        assert (
            f"there is no table or column '{what}' (TABLE or TABLE.COLUMN); there are tables: docs, links" in done.err
        )
    done = await run("drop", store, "docs", "--group", "small", "--yes")
    assert (done.code, "table 'docs' has no group 'small'" in done.err) == (2, True)


async def test_what_a_program_renames_is_told_before_and_shown_afterwards(tmp_path: Path) -> None:  # N18
    store = tmp_path / "store"
    await make(store)
    told = await run("schema", store, APP, "--check")
    assert told.code == 1
    assert [line.strip() for line in told.out.splitlines() if "renamed" in line] == [
        "~ table docs: is renamed to documents",
        "~ column documents.contents: is renamed to body",
        "~ observer measure: is renamed to length",
    ]
    async with perco.open(store, renaming_app.schema) as db, db.worker():
        await db.wait_idle(timeout=60)
    assert (await run("schema", store, APP, "--check")).code == 0
    assert ["documents.body", "bytes", "data:raw", "length"] in [
        line.split() for line in (await run("status", store)).out.splitlines()
    ]
    for table in "documents", "docs":
        assert "body" in (await run("get", store, table, "a")).out
    found = await run("sql", store, "select count(*) as n from documents where body is not null", "--json")
    assert json.loads(found.out.splitlines()[0])["n"] == 2
    exported = await run("export", store, "documents", tmp_path / "documents.jsonl")
    assert exported.code == 0
    assert b'"body"' in (tmp_path / "documents.jsonl").read_bytes()
    shown = json.loads((await run("observers", store, "--json")).out)
    assert [(each["id"], each["table"], each["column"]) for each in shown] == [("length", "documents", "body")]
    async with perco.open(store, schema) as db:  # the older program, which is still deployed
        async with db.transaction() as txn:
            txn.set(contents, "later", b"12345")
        async with db.worker():
            await db.wait_idle(timeout=60)
        async with db.snapshot() as snap:
            assert await snap.get(size, "later") == 5
            assert len([row async for row in snap.scan(docs, columns=[size])]) == 3
    assert (await run("check", store)).code == 0
