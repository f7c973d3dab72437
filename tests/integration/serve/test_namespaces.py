"""Processes in containers: each has PID 1 in its own PID namespace, and LMDB identifies processes by their PIDs."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import perco
import perco.sync

NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
SECONDS_MAX = 60

numbers = perco.Table("numbers", key=perco.INT64)
square = numbers.column("square", perco.INT64)
SCHEMA = perco.Schema(numbers)
READER = """
import sys
import perco, perco.sync
with perco.sync.open(sys.argv[1], readonly=True) as db:
    with db.snapshot() as snap:
        print("has", len(list(snap.scan(db.schema.tables["numbers"]))), flush=True)
    sys.stdin.readline()
"""


@functools.cache
def can_unshare() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not can_unshare(), reason="it needs root, and unshare")


@contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    words = [*NAMESPACE, sys.executable, *argv]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    told = []
    for line in process.stdout:
        told.append(line)
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError("".join(told))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [*NAMESPACE, sys.executable, "-m", "perco", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=SECONDS_MAX)


def filled(store: Path) -> None:
    with perco.sync.open(store, SCHEMA) as db, db.transaction() as txn:
        txn.set(square, 3, 9)


def test_a_reader_in_another_container_reads_through_the_owner(tmp_path: Path) -> None:
    store = tmp_path / "store"
    filled(store)
    with started("-m", "perco", "serve", str(store)) as owner:
        assert until(owner, r"serving .* \(process (\d+)\)") == "1"
        for command in "status", "scan", "get", "export", "failed":
            more = {"scan": ["numbers"], "get": ["numbers", "3"], "export": ["numbers", "-"]}.get(command, [])
            words = ["failed", "list", store] if command == "failed" else [command, store, *more]
            done = run(*words)
            assert done.returncode == 0, done.stderr
            assert "9" in done.stdout or command in ("status", "failed")
        with started("-c", READER, str(store)) as one, started("-c", READER, str(store)) as other:
            assert [until(reader, r"has (\d+)") for reader in (one, other)] == ["1", "1"]
        refused = run("backup", store, tmp_path / "backups")
        assert refused.returncode == 2
        assert "in another container (PID namespace) has it open and has the same PID, 1" in refused.stderr
    assert run("backup", store, tmp_path / "backups").returncode == 0


def test_an_owner_says_that_a_reader_in_another_container_has_its_pid(tmp_path: Path) -> None:
    store = tmp_path / "store"
    filled(store)
    with started("-c", READER, str(store)) as reader:
        assert until(reader, r"has (\d+)") == "1"
        with started("-m", "perco", "serve", str(store)) as owner:
            until(owner, r"(a process in another container \(PID namespace\) has it open and has the same PID)")
            assert owner.wait(SECONDS_MAX) == 2
        refused = run("status", store)  # there is no owner to read through
        assert (refused.returncode, "has the same PID, 1" in refused.stderr) == (2, True)
        with perco.sync.open(store, SCHEMA) as db, db.snapshot() as snap:  # with another PID
            assert snap.get(square, 3) == 9
    with started("-m", "perco", "serve", str(store)) as owner:
        assert until(owner, r"serving .* \(process (\d+)\)") == "1"
