"""`perco failed`, `perco pause`, `perco resume`, `perco observers`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import trio
from rich.console import Console

import perco
from perco.cli import failing as failing_commands, graph, observing
from perco.serve.opening import visiting
from tests.acceptance.cli.stores import ROOT, command, contents, docs, make, measure, run, schema, size


def failing() -> perco.Schema:
    """The store's schema with an observer that fails."""
    made = perco.Schema(docs)

    @made.observe(contents, id="measure")
    async def fail(txn: perco.Transaction, change: perco.Change[str, bytes]) -> None:
        raise ZeroDivisionError(f"no length for {change.key}")

    return made


async def give_up(store: Path, *keys: str) -> None:
    async with perco.open(store, failing()) as db:
        async with db.transaction() as txn:
            for key in keys:
                txn.set(contents, key, b"bad")
        async with db.worker(options=perco.WorkerOptions(attempts=1)):
            assert await db.wait_idle(timeout=60) == len(keys)


async def test_the_failed_list_from_end_to_end(tmp_path: Path) -> None:  # N6
    store = tmp_path / "store"
    await make(store)
    assert (await run("failed", "list", store)).out == "the failed list is empty\n"
    await give_up(store, "a", "b", "x")
    listed = (await run("failed", "list", store)).out.splitlines()
    assert listed[0].split() == ["observer", "row", "attempts", "given", "up", "error"]
    assert [line.split()[1] for line in listed[1:]] == ["docs[a]", "docs[b]", "docs[x]"]
    assert listed[1].endswith("ZeroDivisionError: no length for a")
    shown = (await run("failed", "show", store, "measure", "b")).out
    assert "no length for b" in shown
    assert "in fail\n" in shown
    found = json.loads((await run("failed", "list", store, "measure", "--limit", 1, "--json")).out)
    assert (found["count"], [change["key"] for change in found["changes"]]) == (3, ["a"])
    status = json.loads((await run("status", store, "--json")).out)
    assert (status["failed"], status["waiting"]) == (3, 0)
    assert "failed      3 changes: perco failed list" in (await run("status", store)).out
    assert (await run("check", store)).code == 0

    assert (await run("failed", "drop", store, "measure", "b")).out == "dropped 1 change; 2 left on the list\n"
    replayed = (await run("failed", "replay", store, "measure", "a")).out
    assert replayed == "replayed 1 change; they run as soon as a worker does; 1 left on the list\n"
    assert json.loads((await run("failed", "replay", store, "--all", "--json")).out) == {"replayed": 1, "left": 0}
    done = await run("failed", "replay", store, "--all")
    assert (done.code, done.err) == (1, "perco: no such change is on the failed list\n")
    async with perco.open(store, schema) as db, db.worker():
        assert await db.wait_idle(timeout=60) == 0
        async with db.snapshot() as snap:
            assert await snap.get_many(size, ["a", "b", "x"]) == {"a": 3, "b": None, "x": 3}
    assert (await run("check", store)).code == 0


async def test_a_change_that_is_retried_is_told_wherever_one_asks(tmp_path: Path) -> None:  # N6
    store = tmp_path / "store"
    await make(store)
    made, second = perco.Schema(docs), trio.Event()

    @made.observe(contents, id="measure")
    async def fail(txn: perco.Transaction, change: perco.Change[str, bytes]) -> None:
        if change.attempt == 1:
            raise ZeroDivisionError
        second.set()
        await trio.sleep_forever()

    async with perco.open(store, made) as db, db.worker():
        async with db.transaction() as txn:
            txn.set(contents, "a", b"bad")
        await second.wait()
        listed = (await run("failed", "list", store)).out
        assert listed == (
            "the failed list is empty\n"
            "failing, and retried until they move to the failed list: 1 change for measure (1 attempt so far)\n"
        )
        found = json.loads((await run("failed", "list", store, "--json")).out)
        assert found == {"count": 0, "changes": [], "failing": {"measure": {"changes": 1, "attempts": 1}}}
        told = (await run("status", store)).out
        assert "\nfailing     1 for measure (attempt 1), being retried\n" in told
        assert "\nused by     0 clients of the owner; 1 process with a worker\n" in told
        status = json.loads((await run("status", store, "--json")).out)
        assert (status["failing"], status["clients"], status["workers"]) == (1, 0, 1)
        assert (status["observers"][0]["failing"], status["observers"][0]["attempts"]) == (1, 1)
        async with visiting(store), visiting(store):
            assert json.loads((await run("status", store, "--json")).out)["clients"] == 2
            assert json.loads((await run("status", f"unix:{store / 'socket'}", "--json")).out)["clients"] == 2
        waited = await run("wait", store, "--timeout", 0)
        assert waited.code == 1
        assert "failing: 1 change for measure (1 attempt so far); the log of their worker" in waited.err
        assert "a worker is running, and retries them: allow more time" in waited.err
        assert "perco worker MODULE" not in waited.err
    status = json.loads((await run("status", store, "--json")).out)
    assert (status["failing"], status["clients"], status["workers"]) == (1, None, None)


async def test_what_is_asked_wrongly_is_told(store: Path) -> None:
    done = await run("failed", "replay", store)
    assert (done.code, "or give --all" in done.err) == (2, True)
    at = str(store)
    for asked, said in (
        (failing_commands.show_list(at, "nobody", 5, json=False), "no observer 'nobody'"),
        (failing_commands.show_one(at, "nobody", "a", json=False), "no observer 'nobody'"),
        (failing_commands.replay(at, "measure", None, everything=True, json=False), "or give --all"),
        (failing_commands.drop(at, "measure", None, everything=False, json=False), "no observer runs"),
        (failing_commands.drop(at, "nobody", None, everything=True, json=False), "no observer 'nobody'"),
        (observing.pause(at, "nobody", paused=True, json=False), "no observer 'nobody'"),
        (observing.observers(at, draw=True, mermaid=True, json=False), "choose one of"),
    ):
        with pytest.raises(perco.UsageError, match=said):
            await asked


async def test_paused_and_resumed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    await make(store)
    assert (await run("pause", store, "measure")).out == "paused measure; 0 changes wait for it\n"
    assert (await run("pause", store, "measure")).out == "measure was paused already\n"
    told = await run("set", store, "docs", "a", "contents", "12345")
    assert "paused: measure; their changes wait until perco resume" in told.out
    assert "paused" in (await run("status", store)).out
    done = await run("wait", store)
    assert (done.code, "while measure is paused" in done.err) == (1, True)
    async with perco.open(store, schema) as db, db.worker():
        with pytest.raises(perco.UsageError, match="paused: 'measure'"):
            await db.wait_idle(timeout=60)
    assert json.loads((await run("resume", store, "measure", "--json")).out)["waiting"] == 1
    assert "paused" not in (await run("set", store, "docs", "a", "contents", "123456")).out
    async with perco.open(store, schema) as db, db.worker():
        assert await db.wait_idle(timeout=60) == 0


async def test_observers_are_listed_and_drawn(store: Path) -> None:
    line = (await run("observers", store)).out.splitlines()[1].split()
    assert line[:3] == ["measure", "docs.contents", "docs.size"]
    assert (await run("observers", store, "--graph")).out.splitlines() == [
        "docs.contents",
        "└── > measure",
        "    └── docs.size",
    ]
    assert "c0 --> o0" in (await run("observers", store, "--mermaid")).out


@pytest.mark.parametrize("args", [("trace", "docs", "a"), ("observers", "--graph"), ("scan", "docs"), ("status",)])
async def test_a_reader_that_goes_away_ends_the_command_quietly(store: Path, args: tuple[str, ...]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    name, *rest = args
    try:
        done = await trio.run_process(
            command(name, store, *rest), stdout=writes, capture_stderr=True, check=False, cwd=ROOT
        )
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (1, b"")


def test_the_lines_of_help_are_whole_at_eighty_columns() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "perco", "failed", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},
        check=True,
        timeout=60,
    )
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "..." not in done.stdout.partition("Commands:")[2]
    assert measure is not None


# ---------------------------------------------------------------- drawings


def state(id: str, column: str, *outputs: str, paused: bool = False) -> perco.ObserverState:
    return perco.ObserverState(id, "t", column, 1, paused, True, tuple(("t", output) for output in outputs))


def drawn(*states: perco.ObserverState) -> list[str]:
    console = Console(file=StringIO(), width=80)
    for tree in graph.trees(states):
        console.print(tree)
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_what_was_drawn_is_named_and_not_drawn_again() -> None:
    assert drawn(state("one", "a", "b", "c"), state("two", "b", "c"), state("three", "c", "d")) == [
        "t.a",
        "└── > one",
        "    ├── t.b",
        "    │   └── > two",
        "    │       └── t.c",
        "    │           └── > three",
        "    │               └── t.d",
        "    └── t.c  (above)",
    ]


def test_a_circle_is_drawn_once_round() -> None:
    states = state("there", "a", "b"), state("back", "b", "a", paused=True)
    assert drawn(*states) == [
        "t.a",
        "└── > there",
        "    └── t.b",
        "        └── > back  (paused)",
        "            └── t.a  (a cycle)",
    ]
    assert graph.mermaid(states).count(" --> ") == 4


def test_names_do_not_break_a_drawing() -> None:
    odd = perco.ObserverState('say "x" <b>#', "t&t", "a", 1, False, True, ())
    assert "#quot;x#quot;" in graph.mermaid([odd])
    assert "#35;" in graph.mermaid([odd])


async def test_an_observer_that_no_program_declares_is_dropped(tmp_path: Path) -> None:  # N12
    store = tmp_path / "store"
    await give_up(store, "a")
    async with perco.open(store, failing()) as db, db.transaction() as txn:
        txn.set(contents, "b", b"waits")
    async with perco.open(store, failing()) as db, db.worker(options=perco.WorkerOptions(attempts=1)):
        await db.wait_idle(timeout=60)
        refused = await run("observers", store, "--drop", "measure", "--yes")
        assert (refused.code, "a process runs observer 'measure'" in refused.err) == (2, True)
    async with perco.open(store, failing()) as db, db.transaction() as txn:
        txn.set(contents, "c", b"waits")
    shown = await run("observers", store, "--drop", "measure")
    assert (shown.code, shown.out.splitlines()) == (
        1,
        [
            "1 change waits for observer measure, and 2 are on its failed list",
            "nothing was dropped: add --yes to drop it, with these",
        ],
    )
    assert "2 changes on the failed list: perco failed list" not in (await run("wait", store, "--timeout", "0")).out
    done = await run("observers", store, "--drop", "measure", "--yes")
    assert (done.code, done.out) == (0, "dropped observer measure, and 3 changes that waited for it or had failed\n")
    assert (await run("observers", store)).out == "no observers are registered\n"
    assert json.loads((await run("failed", "list", store, "--json")).out)["count"] == 0
    assert (await run("wait", store)).code == 0
    assert (await run("check", store)).code == 0
    wrong = await run("observers", store, "--drop", "none")
    assert (wrong.code, "there is no observer 'none'" in wrong.err) == (2, True)


async def test_limits_are_shown_as_they_were_declared_last(tmp_path: Path) -> None:
    store = tmp_path / "store"
    limited = perco.Schema(docs)

    @limited.observe(contents, id="measure", delay_s=2.0, rate=5, concurrency=4)
    async def measure(txn: perco.Transaction, change: perco.Change[str, bytes]) -> None: ...

    async with perco.open(store, limited):
        pass
    shown = (await run("observers", store)).out.splitlines()
    assert shown[0].split() == ["observer", "observes", "writes", "version", "waiting", "state", "limits"]
    assert shown[1].endswith("delay_s=2.0, max_delay_s=20.0, concurrency=4, rate=5.0")
    [found] = json.loads((await run("observers", store, "--json")).out)
    assert found["limits"] == {"delay_s": 2.0, "max_delay_s": 20.0, "concurrency": 4, "rate": 5.0}
    async with perco.open(store, schema):  # a program that states none
        pass
    assert "limits" not in (await run("observers", store)).out
