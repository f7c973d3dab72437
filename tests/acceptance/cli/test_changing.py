"""`perco changes` and `perco diff`, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

import perco
from tests.acceptance.cli.stores import ROOT, command, run

docs = perco.Table("docs", key=perco.TEXT, changes=True)
title = docs.column("title", perco.TEXT)
raw = docs.column("raw", perco.BYTES)
links = perco.Table("links", key=perco.TEXT, changes=True)
url = links.column("url", perco.TEXT)
plain = perco.Table("plain", key=perco.TEXT)
n = plain.column("n", perco.INT64)
SCHEMA = perco.Schema(docs, links, plain)


@pytest.fixture
async def commits(tmp_path: Path) -> list[int]:
    """A store `tmp_path / "s"`; the timestamps of the commits."""
    found = []
    async with perco.open(tmp_path / "s", SCHEMA) as db:
        for step in (
            ((title, "a", "first"), (url, "x", "to a")),
            ((title, "a", "second"), (raw, "a", b"\x00\xff")),
            ((title, "b", "other"), (n, "k", 1)),
        ):
            async with db.transaction() as txn:
                for column, key, value in step:
                    txn.set(column, key, value)
            found.append(txn.commit_ts)
        async with db.transaction() as txn:
            txn.delete(title, "a")
        found.append(txn.commit_ts)
    return found


async def test_changes_prints_a_line_for_each_cell(tmp_path: Path, commits: list[int]) -> None:
    done = await run("changes", tmp_path / "s", "docs")
    assert done.code == 0
    first, second, third, last = commits
    assert done.out.splitlines() == [
        "commit_ts\tkey\tcolumn\tbefore\tafter",
        f"{first}\ta\ttitle\t\tfirst",
        f"{second}\ta\ttitle\tfirst\tsecond",
        f"{second}\ta\traw\t\thex:00ff",
        f"{third}\tb\ttitle\t\tother",
        f"{last}\ta\ttitle\tsecond\t",
    ]


async def test_changes_as_json_is_a_line_for_each_transaction(tmp_path: Path, commits: list[int]) -> None:
    done = await run("changes", tmp_path / "s", "docs", "links", "--json")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["commit_ts"] for line in lines] == commits
    assert lines[0]["rows"] == [
        {"table": "docs", "key": "a", "before": {"title": None}, "after": {"title": "first"}},
        {"table": "links", "key": "x", "before": {"url": None}, "after": {"url": "to a"}},
    ]
    assert lines[1]["rows"][0]["after"] == {"title": "second", "raw": {"hex": "00ff"}}


async def test_changes_resume_after_a_timestamp(tmp_path: Path, commits: list[int]) -> None:
    done = await run("changes", tmp_path / "s", "docs", "--json", "--since", commits[1])
    assert [json.loads(line)["commit_ts"] for line in done.out.splitlines()] == commits[2:]
    assert (await run("changes", tmp_path / "s", "docs", "--json", "--since", commits[-1])).out == ""


async def test_a_table_without_a_log_is_refused(tmp_path: Path, commits: list[int]) -> None:
    done = await run("changes", tmp_path / "s", "plain")
    assert done.code == 2
    assert "keeps no log of its changes" in done.err


async def test_follow_prints_what_other_processes_commit(tmp_path: Path, commits: list[int]) -> None:
    async with perco.open(tmp_path / "s", SCHEMA) as db, trio.open_nursery() as nursery:
        line = command("changes", tmp_path / "s", "docs", "--follow", "--json", "--since", commits[-1])
        process = await trio.lowlevel.open_process(line, stdout=-1, cwd=ROOT)
        assert process.stdout is not None
        nursery.start_soon(process.wait)
        async with db.transaction() as txn:
            txn.set(title, "c", "new")
        found = b""
        while not found.endswith(b"\n"):
            found += await process.stdout.receive_some()
        process.terminate()
    assert json.loads(found)["commit_ts"] == txn.commit_ts


async def test_diff_compares_two_moments(tmp_path: Path, commits: list[int]) -> None:
    done = await run("diff", tmp_path / "s", "docs", "--from", commits[0], "--to", commits[2])
    assert done.code == 1
    assert done.out.splitlines() == [
        "key\tcolumn\tbefore\tafter",
        "a\ttitle\tfirst\tsecond",
        "a\traw\t\thex:00ff",
        "b\ttitle\t\tother",
    ]
    done = await run("diff", tmp_path / "s", "docs", "--from", commits[2], "--json")
    assert [json.loads(line) for line in done.out.splitlines()] == [
        {"key": "a", "before": {"title": "second"}, "after": {"title": None}}
    ]


async def test_diff_needs_no_log_and_finds_nothing_where_there_is_nothing(tmp_path: Path, commits: list[int]) -> None:
    done = await run("diff", tmp_path / "s", "plain", "--from", commits[2], "--json")
    assert (done.code, done.out) == (0, "")
