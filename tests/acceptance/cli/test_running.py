"""Workers and servers as they are operated: parts of the observers, drains, logs, metrics, systemd, `perco ping`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

import perco

APP = """
import asyncio
import os
import pathlib
import trio
import perco
import perco.aio

docs = perco.Table("docs", key=perco.TEXT)
body, note = docs.column("body", perco.TEXT), docs.column("note", perco.TEXT)
size = docs.column("size", perco.INT64)
schema, on_asyncio = perco.Schema(docs), perco.Schema(docs)
gate = pathlib.Path("gate")


@schema.observe(body, id="slow")
async def slow(txn, change):
    if change.value == "wait":
        print("begun", flush=True)
        while not gate.exists():
            await trio.sleep(0.01)
    txn.set(note, change.key, "done")


@schema.observe(body, id="measure")
async def measure(txn, change):
    if change.value == "bad":
        raise ValueError("no good")
    txn.set(size, change.key, len(change.value))


@on_asyncio.observe(body, id="fetch")
@perco.aio.observer
async def fetch(txn, change):
    if change.value == "wait":
        print("begun", flush=True)
        while not gate.exists():
            await asyncio.sleep(0.01)
    txn.set(note, change.key, "fetched")
"""
docs = perco.Table("docs", key=perco.TEXT)
body, note = docs.column("body", perco.TEXT), docs.column("note", perco.TEXT)
size = docs.column("size", perco.INT64)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(perco.__file__).parent.parent), **more}


def run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perco", *arguments]
    return subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, check=False)


@contextmanager
def running(place: Path, *arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "perco", *arguments],
        cwd=place,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def put(place: Path, **values: str) -> None:
    async def load() -> None:
        async with perco.open(place / "store", perco.Schema(docs)) as db, db.transaction() as txn:
            for key, value in values.items():
                txn.set(body, key, value)

    trio.run(load)


def rows(place: Path) -> dict[str, tuple[str | None, int | None]]:
    async def read() -> dict[str, tuple[str | None, int | None]]:
        async with perco.open(place / "store", perco.Schema(docs), readonly=True) as db, db.snapshot() as snap:
            return {row.key: (row[note], row[size]) async for row in snap.scan(docs)}

    return trio.run(read)


def registered(place: Path, schema: str = "app:schema") -> None:
    done = run(place, "worker", schema, "--store", "store", "--until-idle")
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ parts, drains


def test_a_part_of_the_observers(place: Path) -> None:
    registered(place)
    put(place, a="hello")
    done = run(place, "worker", "app:schema", "--store", "store", "--except", "slow", "--until-idle")
    assert done.returncode == 2, "the other part waits, and nobody runs it"
    assert "no running program has: slow" in done.stderr
    assert rows(place) == {"a": (None, 5)}
    assert run(place, "worker", "app:schema", "--store", "store", "--only", "slow", "--until-idle").returncode == 0
    assert rows(place) == {"a": ("done", 5)}
    done = run(place, "worker", "app:schema", "--store", "store", "--only", "typo")
    assert done.returncode == 2
    assert "there is no" not in done.stderr
    assert "the schema has no observer 'typo'; there are: 'slow', 'measure'" in done.stderr


@pytest.mark.parametrize("schema", ["app:schema", "app:on_asyncio"])
@pytest.mark.parametrize("signals", [1, 2])
def test_a_worker_that_is_told_to_end_lets_runs_end(place: Path, schema: str, signals: int) -> None:
    registered(place, schema) if schema == "app:schema" else None
    loop = ["--asyncio"] if schema == "app:on_asyncio" else []
    if loop:
        assert run(place, "worker", schema, "--store", "store", "--until-idle", *loop).returncode == 0
    put(place, a="wait")
    with running(place, "worker", schema, "--store", "store", "--drain", "60", *loop) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        put(place, b="later")
        if signals == 2:
            while process.poll() is None:  # a signal that comes at once is taken for the same one
                process.send_signal(signal.SIGINT)
                threading.Event().wait(0.1)
        else:
            (place / "gate").touch()
        process.wait(60)
        assert process.returncode == (0 if signals == 1 else -signal.SIGINT)
    found = rows(place)
    text = "fetched" if loop else "done"
    assert found["a"][0] == (text if signals == 1 else None), "a run that was broken off has changed nothing"
    assert found["b"][0] is None, "no run has begun since"


def test_a_worker_that_is_told_to_end_waits_only_so_long(place: Path) -> None:
    registered(place)
    put(place, a="wait")
    with running(place, "worker", "app:schema", "--store", "store", "--drain", "0.1") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert rows(place)["a"][0] is None


# ------------------------------------------------------------------ logs


def test_logs_as_json(place: Path) -> None:
    registered(place)
    put(place, a="bad", b="good")
    with running(place, "worker", "app:schema", "--store", "store", "--log-json", "--log-level", "error") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("{"):
                break
        told = json.loads(line)
    assert (told["level"], told["logger"], told["observer"], told["row"]) == (
        *("error", "perco.observer", "measure"),
        "docs['a']",
    )
    assert (told["attempt"], told["error"]) == (1, "ValueError")
    assert "raise ValueError" in told["traceback"]
    assert re.match(r"20\d\d-\d\d-\d\dT", told["time"])


def test_logs_as_text(place: Path) -> None:
    registered(place)
    put(place, a="bad")
    with running(place, "worker", "app:schema", "--store", "store") as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        assert any(
            re.match(r"20\S+ ERROR perco.observer: observer measure failed on docs\['a'\]", line) for line in lines
        )


# ------------------------------------------------------------------ metrics


@pytest.mark.parametrize("loop", [[], ["--asyncio"]])
def test_a_worker_serves_metrics(place: Path, loop: list[str]) -> None:
    schema = "app:on_asyncio" if loop else "app:schema"
    with running(place, "worker", schema, "--store", "store", "--metrics", "localhost:0", *loop) as process:
        assert process.stderr is not None
        url = next(line.split()[-1] for line in process.stderr if line.startswith("metrics at "))
        until(url, 'perco_observer_tripped{observer="' + ("fetch" if loop else "measure") + '"} 0.0')
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_server_serves_metrics(place: Path) -> None:
    registered(place)
    put(place, a="hello")
    with running(place, "serve", "store", "--metrics", "localhost:0") as process:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if line.startswith("metrics at "))
        until(url, 'perco_observer_waiting{observer="slow"} 1.0')
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def until(url: str, text: str) -> None:
    """Ask for the metrics until they have this line: the first sample may not have been taken yet."""
    for _ in range(1000):
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = answer.read().decode()
        if text in found:
            return
    raise AssertionError(found)


def test_several_processes_cannot_share_an_address(place: Path) -> None:
    done = run(place, "worker", "app:schema", "--store", "store", "--processes", "2", "--metrics", "localhost:9")
    assert done.returncode == 2
    assert "several processes cannot serve metrics at one address" in done.stderr


# ------------------------------------------------------------------ systemd


@contextmanager
def systemd(place: Path, *, abstract: bool = False) -> Iterator[tuple[str, Callable[[], str]]]:
    """A socket as systemd gives one to services; and the next message there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        path = f"@perco-{os.getpid()}" if abstract else str(place / "notify")
        channel.bind(path.replace("@", "\0", 1) if abstract else path)
        channel.settimeout(60)
        yield path, lambda: channel.recv(4096).decode()


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_that_a_server_is_ready_works_and_ends(place: Path, abstract: bool) -> None:
    with (
        systemd(place, abstract=abstract) as (path, told),
        running(place, "serve", "store", NOTIFY_SOCKET=path, WATCHDOG_USEC="300000") as process,
    ):
        assert told() == "READY=1\nSTATUS=works"
        assert [told(), told()] == ["WATCHDOG=1"] * 2
        process.send_signal(signal.SIGTERM)
        while (message := told()) == "WATCHDOG=1":
            pass
        assert message == "STOPPING=1"
        assert process.wait(60) == 0


@pytest.mark.parametrize("loop", [[], ["--asyncio"]])
def test_systemd_is_told_of_a_worker(place: Path, loop: list[str]) -> None:
    schema = "app:on_asyncio" if loop else "app:schema"
    with (
        systemd(place) as (path, told),
        running(place, "worker", schema, "--store", "store", *loop, NOTIFY_SOCKET=path) as process,
    ):
        assert told() == "READY=1\nSTATUS=works"
        process.send_signal(signal.SIGTERM)
        assert told() == "STOPPING=1"
        assert process.wait(60) == 0


def test_a_socket_that_is_gone_does_no_harm(place: Path) -> None:
    with running(place, "serve", "store", NOTIFY_SOCKET=str(place / "gone"), WATCHDOG_USEC="1") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving store")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


# ------------------------------------------------------------------ ping


def test_ping(place: Path) -> None:
    nobody = run(place, "ping", "store")
    assert nobody.returncode == 2
    registered(place)
    closed = run(place, "ping", "store")
    assert closed.returncode == 2
    with running(place, "serve", "store") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving store")
        done = run(place, "ping", "store")
        assert done.returncode == 0, done.stderr
        assert re.match(rf"process {process.pid} answered in [\d.]+ ms", done.stdout)
        shown = json.loads(run(place, "ping", "store", "--json").stdout)
        assert shown["process"] == process.pid
        process.send_signal(signal.SIGSTOP)
        hung = run(place, "ping", "store", "--timeout", "0.5")
        process.send_signal(signal.SIGCONT)
        assert hung.returncode == 1
        assert "has not answered within 0.5 s" in hung.stderr


# ------------------------------------------------------------------ schemas


def test_what_a_program_would_change(place: Path) -> None:
    registered(place)
    same = run(place, "schema", "store", "app:schema", "--check")
    assert (same.returncode, same.stdout) == (0, "opening the store with this program changes nothing\n")
    newer = APP.replace('id="slow"', 'id="slow", version=2').replace('"size", perco.INT64', '"length", perco.INT64')
    (place / "newer.py").write_text(newer)
    told = run(place, "schema", "store", "newer:schema")
    assert told.returncode == 0
    assert told.stdout.splitlines() == [
        "opening the store with this program would add:",
        "  + column docs.length: int64",
        "it would change:",
        "  ~ observer slow: version 1 becomes 2; runs for all existing data",
        "it would leave as they are:",
        "    column docs.size: this program does not declare it",
    ]
    assert run(place, "schema", "store", "newer:schema", "--check").returncode == 1
    (place / "other.py").write_text(APP.replace('"docs", key=perco.TEXT', '"docs", key=perco.INT64'))
    refused = run(place, "schema", "store", "other:schema", "--json")
    assert refused.returncode == 2
    assert [each["kind"] for each in json.loads(refused.stdout)] == ["refuses"]
    shown = run(place, "schema", "store")
    assert ["docs", "text"] in [line.split() for line in shown.stdout.splitlines()]
    assert ["measure", "docs.body", "1"] in [line.split() for line in shown.stdout.splitlines()]
    assert json.loads(run(place, "schema", "store", "--json").stdout)["observers"]["slow"]["version"] == 1
    assert run(place, "schema", "store", "--check").returncode == 2


# ------------------------------------------------------------------ top


def test_top(place: Path) -> None:
    registered(place)
    put(place, a="hello", b="hello")
    closed = run(place, "top", "store", "--count", "1")
    assert closed.returncode == 0, closed.stderr
    assert [line.split()[:2] for line in closed.stdout.splitlines()] == [
        ["observer", "waiting"],
        ["slow", "2"],
        ["measure", "2"],
    ]
    with running(place, "worker", "app:schema", "--store", "store", "--only", "slow") as process:
        assert process.stderr is not None
        assert "running slow" in process.stderr.readline()
        assert run(place, "wait", "store", "--timeout", "5").returncode == 1, "nobody runs the other one"
        told = run(place, "top", "store", "--count", "2", "--every", "0.1", "--json")
        documents = [json.loads(line) for line in told.stdout.splitlines()]
        assert len(documents) == 2
        lags = documents[-1]
        assert (lags["slow"]["waiting"], lags["slow"]["workers"]) == (0, 1)
        assert (lags["measure"]["waiting"], lags["measure"]["workers"]) == (2, 0)
