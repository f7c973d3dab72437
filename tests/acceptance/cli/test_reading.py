"""`perco get`, `perco scan` and `perco status`, as a user meets them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
from perco.cli import reading
from perco.database.inside import inside
from perco.storage import APPLIED, Mutation, ReadRequest, RowCells
from tests.acceptance.cli.stores import ROOT, command, make, owned, run, schema, started, title

BOXES = set("│─┌┐└┘━┃╭╮╰╯")


# ------------------------------------------------------------------ get


async def test_get_prints_a_value_alone(store: Path) -> None:
    assert (await run("get", store, "docs", "a", "title")).out == "second\n"
    assert (await run("get", store, "docs", "a", "rank")).out == "0.25\n"
    assert (await run("get", store, "docs", "a", "contents")).out == "hex:00ff\n"
    assert (await run("get", store, "docs", "a", "tags")).out == '{"k": [1, null]}\n'


async def test_get_prints_a_row_by_column(store: Path) -> None:
    done = await run("get", store, "docs", "a")
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0] == ["column", "commit_ts", "value"]
    assert [line[0] for line in lines[1:]] == ["contents", "rank", "size", "title", "tags"]
    assert done.code == 0


async def test_get_raw_gives_the_stored_bytes(store: Path) -> None:
    done = await trio.run_process(
        command("get", store, "docs", "a", "contents", "--raw"), capture_stdout=True, cwd=ROOT
    )
    assert done.stdout == b"\x00\xff"


async def test_get_as_json_says_when_it_was_committed(store: Path) -> None:
    found = json.loads((await run("get", store, "docs", "a", "--json")).out)
    assert found["key"] == "a"
    assert found["columns"]["contents"]["value"] == {"hex": "00ff"}
    assert found["columns"]["size"]["value"] == 2
    assert 0 < found["columns"]["rank"]["commit_ts"] < found["columns"]["title"]["commit_ts"] < found["ts"]


@pytest.mark.parametrize("args", [("nobody",), ("b", "title"), ("a", "contents", "--ts", "1")])
async def test_what_is_absent_is_exit_code_1(store: Path, args: tuple[str, ...]) -> None:
    done = await run("get", store, "docs", *args)
    assert (done.code, done.out) == (1, "")
    assert "has no value" in done.err


async def test_get_at_a_timestamp_sees_what_was_then(tmp_path: Path) -> None:
    ts = await make(tmp_path / "s")
    assert (await run("get", tmp_path / "s", "docs", "a", "title", "--ts", ts)).out == "first\n"
    assert (await run("get", tmp_path / "s", "docs", "a", "title", "--ts", ts - 1)).code == 1


async def test_get_at_a_wall_time(store: Path) -> None:
    note = json.loads((await run("status", store, "--json")).out)["clock"]["wall"]
    done = await run("get", store, "docs", "a", "title", "--at", note)
    assert done.out == "second\n"


async def test_versions_are_listed_newest_first(store: Path) -> None:
    found = json.loads((await run("get", store, "docs", "a", "title", "--versions", "--json")).out)["versions"]["title"]
    assert [version["value"] for version in found] == ["second", "first"]
    assert found[0]["commit_ts"] > found[1]["commit_ts"]


async def test_versions_tell_of_deletes_and_long_values(store: Path) -> None:
    deleted = json.loads((await run("get", store, "docs", "b", "title", "--versions", "--json")).out)["versions"]
    assert [version.get("deleted", False) for version in deleted["title"]] == [True, False]
    long = (await run("get", store, "docs", "x", "title", "--versions")).out
    assert "long long" in long
    assert "(500 characters)" in long
    assert "(deleted)" in (await run("get", store, "docs", "b", "--versions")).out


async def test_versions_end_at_the_moment_asked_for(tmp_path: Path) -> None:
    ts = await make(tmp_path / "s")
    done = await run("get", tmp_path / "s", "docs", "a", "title", "--versions", "--json", "--ts", ts)
    assert [version["value"] for version in json.loads(done.out)["versions"]["title"]] == ["first"]


class Between:
    """A row store where something happens once, between the list of a cell's versions and the look at their values."""

    def __init__(self, store: Any, act: Callable[[], Awaitable[object]]) -> None:
        self._store, self._act = store, act
        self.acted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        found: list[RowCells] = await self._store.read(requests)
        if not self.acted and requests[0][2][0][4] == reading._VERSIONS_PER_READ:
            self.acted += 1
            await self._act()
        return found


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_version_that_a_vacuum_removes_during_the_look_is_no_damage(damaged: bool) -> None:  # G5
    long = perco.Table("long", key=perco.TEXT)
    body = long.column("body", perco.TEXT)
    schema = perco.Schema(long, keep=perco.Keep(seconds=0))
    async with perco.open("memory:", schema, options=perco.Options(vacuum=perco.options.VacuumOptions(on=False))) as db:
        commits = []
        for letter in "abc":
            async with db.transaction() as txn:
                txn.set(body, "k", 1000 * letter)
            commits.append(txn)
        store, old = inside(db).driver.store, commits[1].start_ts

        async def act() -> None:
            if damaged:
                gone = (("data", inside(db).known.bind(body).column, old, None),)
                assert await store.apply([Mutation("long", ((b"k", (), gone),))]) == [APPLIED]
            else:
                assert (await db.vacuum()).removed.versions == 2

        async with db.snapshot() as snap:
            inside(db).driver.store = inside(db).driver.reads = between = Between(store, act)
            if damaged:
                with pytest.raises(perco.errors.Corruption, match="points at missing data"):
                    await reading.versions_of(db, snap, body, "k")
            else:
                found = await reading.versions_of(db, snap, body, "k")
                assert found == [(commits[2].commit_ts, False, 1000 * "c")]
            inside(db).driver.store = inside(db).driver.reads = store
        assert between.acted == 1


# ------------------------------------------------------------------ keys


async def test_keys_of_every_kind(store: Path) -> None:
    assert (await run("get", store, "numbers", "square", "7")).code == 2
    assert (await run("get", store, "numbers", "7", "square")).out == "49\n"
    assert (await run("get", store, "numbers", "--", "-3", "square")).out == "9\n"
    assert (await run("get", store, "links", '["http://a/", 2]', "seen")).out == "false\n"
    done = await run("get", store, "blobs", "hex:006b", "blob", "--json")
    assert json.loads(done.out)["key"] == {"hex": "006b"}
    assert json.loads(done.out)["columns"]["blob"]["value"] == {"pairs": [[1, {"hex": "ff"}]]}


# ------------------------------------------------------------------ scan


async def test_scan_in_a_pipe_is_a_line_for_each_row_with_tabs_between_its_cells(store: Path) -> None:
    done = await run("scan", store, "docs", "--columns", "rank,title")
    head, *rows = (line.split("\t") for line in done.out.splitlines())
    assert head == ["key", "rank", "title"]
    assert rows[0] == ["a", "0.25", "second"]
    assert rows[1][:2] == ["x", ""]
    assert rows[1][2].endswith("... (500 characters)")
    await run("set", store, "docs", "odd\tkey\n", "title", "a\tb")
    odd = (await run("scan", store, "docs", "--columns", "title", "--prefix", "odd")).out
    assert odd == "key\ttitle\nodd\\tkey\\n\ta\\tb\n"


async def test_scan_as_json_is_a_line_for_each_row_with_whole_values(store: Path) -> None:
    rows = [json.loads(line) for line in (await run("scan", store, "docs", "--json")).out.splitlines()]
    assert [row["key"] for row in rows] == ["a", "x"]
    assert rows[0]["values"]["contents"] == {"hex": "00ff"}
    assert bytes.fromhex(rows[1]["values"]["contents"]["hex"]) == b"page " * 1000
    assert rows[1]["values"]["size"] == 5000


@pytest.mark.parametrize(
    ("table", "args", "keys"),
    [
        ("numbers", (), [-3, 0, 7]),
        ("numbers", ("--reverse", "--limit", 1), [7]),
        ("numbers", ("--start", 0, "--stop", 7), [0]),
        ("links", ("--prefix", '["http://a/"]'), [["http://a/", 1], ["http://a/", 2]]),
        ("links", ("--start", '["http://a/", 2]'), [["http://a/", 2], ["http://b/", 1]]),
        ("docs", ("--prefix", "a"), ["a"]),
        ("blobs", ("--prefix", "hex:00"), [{"hex": "006b"}]),
    ],
)
async def test_scan_ranges(store: Path, table: str, args: tuple[object, ...], keys: list[object]) -> None:
    done = await run("scan", store, table, *args, "--json")
    assert [json.loads(line)["key"] for line in done.out.splitlines()] == keys
    assert done.code == 0


async def test_scan_as_of_a_timestamp(tmp_path: Path) -> None:
    ts = await make(tmp_path / "s")
    done = await run("scan", tmp_path / "s", "docs", "--columns", "title", "--ts", ts, "--json")
    assert [json.loads(line) for line in done.out.splitlines()] == [{"key": "a", "values": {"title": "first"}}]


async def test_a_reader_that_goes_away_is_no_error(store: Path) -> None:
    async with started(command("scan", store, "docs", "--json")) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        await process.stdout.aclose()
        assert b"Traceback" not in b"".join([part async for part in process.stderr])


# ------------------------------------------------------------------ status


async def test_status_says_what_is_there(store: Path) -> None:
    done = await run("status", store)
    assert "perco 1" in done.out
    assert "no process; last: process" in done.out
    assert ["docs.contents", "bytes", "data:raw", "measure"] in [line.split() for line in done.out.splitlines()]
    assert not BOXES & set(done.out), "no boxes in a pipe"
    assert (done.code, done.err) == (0, "")


async def test_status_as_json(store: Path) -> None:
    found = json.loads((await run("status", store, "--json")).out)
    assert found["owner"]["alive"] is False
    assert found["durability"]["mark"] == ""
    assert (found["locks"], found["waiting"]) == (0, 0)
    measure = {"id": "measure", "table": "docs", "column": "contents", "ready": True, "paused": False}
    assert found["observers"] == [measure | {"tripped": None, "waiting": 0, "lag_s": None, "failing": 0, "attempts": 0}]
    tables = {table["name"]: table for table in found["tables"]}
    assert list(tables) == ["docs", "links", "blobs", "numbers"]
    assert tables["links"]["key"] == "tuple(text,int64)"
    assert [tablet["start"] for tablet in tables["docs"]["tablets"]] == [None, "m"]
    assert [tablet["entries"]["data:raw"] for tablet in tables["docs"]["tablets"]] == [0, 1]
    assert tables["numbers"]["tablets"][0]["entries"]["write"] == 3
    assert found["clock"]["ts"] <= found["clock"]["bound"]
    assert found["clock"]["age_s"] >= 0


async def test_status_beside_the_owner(store: Path) -> None:
    async with owned(store) as owner:
        await owner.tell("put new")
        found = json.loads((await run("status", store, "--json")).out)
        assert found["owner"]["alive"] is True
        assert found["owner"]["pid"] == owner.pid
        assert found["owner"]["heartbeat_age_s"] is not None
        assert found["waiting"] == 1
        assert found["observers"][0]["waiting"] == 1
        shown = (await run("status", store)).out
        assert f"process {owner.pid} (" in shown
        assert "heartbeat" in shown


async def test_reading_beside_the_owner_sees_what_it_noted(store: Path) -> None:
    async with owned(store) as owner:
        await owner.tell("put new")
        assert (await run("get", store, "docs", "new", "contents")).out == "new\n"


# ------------------------------------------------------------------ a terminal


async def on_terminal(*args: object, columns: int = 80) -> list[str]:
    """The lines that the command writes on a terminal, without what makes them bold."""
    terminal, side = pty.openpty()
    process = await trio.lowlevel.open_process(
        command(*args), stdout=side, cwd=ROOT, env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    )
    os.close(side)

    def read() -> bytes:
        shown = b""
        with contextlib.suppress(OSError):  # the end: nobody has it open any more
            while part := os.read(terminal, 1 << 16):
                shown += part
        return shown

    shown = await trio.to_thread.run_sync(read)
    os.close(terminal)
    assert await process.wait() == 0
    assert b"\x1b[1m" in shown or b"no rows" in shown, "heads are bold"
    return [line.rstrip() for line in re.sub(r"\x1b\[\d+m", "", shown.decode()).replace("\r", "").splitlines()]


async def test_on_a_terminal_rows_are_aligned_under_one_head(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with perco.open(path, schema) as db, db.transaction() as txn:
        for number in range(250):
            txn.set(title, f"{number:03}", "x" * (number // 10))
    lines = await on_terminal("scan", path, "docs", "--columns", "title")
    assert lines[0].split() == ["key", "title"]
    assert [line.split()[0] for line in lines].count("key") == 1
    assert len([line for line in lines if line[:3].isdigit()]) == 250
    assert {line.index("x") for line in lines[11:] if "x" in line} == {5}
    assert not BOXES & set("".join(lines))


async def test_a_scan_of_nothing_says_so_on_a_terminal_only(store: Path) -> None:
    assert await on_terminal("scan", store, "docs", "--prefix", "q") == ["no rows"]
    assert (await run("scan", store, "docs", "--prefix", "q", "--columns", "title")).out == "key\ttitle\n"


@pytest.mark.parametrize("columns", [80, 60])
async def test_status_breaks_no_head_and_no_number(store: Path, columns: int) -> None:
    lines = await on_terminal("status", store, "--groups", columns=columns)
    [head] = [line for line in lines if line.startswith("table ") and "readable since" in line]
    assert head.split()[-3:] == ["tablet", "records", "size"] if columns == 60 else "from" in head
    assert ("key" in head.split()) == (columns == 80)
    rows = [line for line in lines[lines.index(head) + 1 :] if line.startswith("docs ")]
    assert [row.split()[-3] for row in rows[:2]] == ["9", "4"]
    assert all(row.endswith("KiB") for row in rows[:2])
    assert "waiting" not in head, "none waits"
    assert all(len(line) <= columns for line in lines[lines.index(head) :] if not line.startswith("cells by group"))
    [groups] = [line.split() for line in lines if line.startswith("table ") and "write" in line]
    assert groups == ["table", "tablet", "data", "write", "data:raw"]
    assert "lock" not in groups, "none is there"


async def test_status_tells_what_every_task_of_the_stores_processes_waits_for(tmp_path: Path) -> None:
    await make(tmp_path / "s")
    async with owned(tmp_path / "s"):
        done = await run("status", tmp_path / "s", "--tasks")
        assert done.code == 0
        head, *rest = done.out.splitlines()
        assert re.fullmatch(r"owner, process \d+: \d+ tasks", head)
        assert rest[0].split() == ["task", "at", "waits", "for"]
        [sweeper] = [line for line in rest if "perco-sweeper" in line]
        assert "perco.notify.sweeper:" in sweeper
        [found] = json.loads((await run("status", tmp_path / "s", "--tasks", "--json")).out)
        assert found["role"] == "owner"
        assert "perco-sweeper" in {task["name"] for task in found["tasks"]}


async def test_status_tells_that_there_are_no_processes(tmp_path: Path, store: Path) -> None:
    done = await run("status", store, "--tasks")
    assert (done.code, done.out) == (2, "")
    assert "no process has" in done.err
    done = await run("status", tmp_path / "nothing", "--tasks")
    assert (done.code, done.out) == (2, "")
    assert "there is no store at" in done.err
