"""`perco doctor`: what it finds on machines that do not suit a store."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

import perco
import perco.sync
from perco.cli import doctoring
from perco.cli.doctoring import OK, WARNING, WRONG


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perco", "doctor", *arguments], capture_output=True, text=True, check=False
    )


def test_a_store_that_is_well(tmp_path: Path) -> None:
    with perco.sync.open(tmp_path / "store", perco.Schema(perco.Table("docs"))):
        done = run(str(tmp_path / "store"))
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    whats = ["Python", "file system", "permissions", "space", "fsync", "open files", "store"]
    assert [what for what in whats if not any(f"  {what}: " in line for line in lines)] == []
    assert "its owner is alive" in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["store"], "it leaves nothing behind"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    done = run(str(tmp_path / "not" / "there"))
    assert done.returncode == 0, done.stdout
    assert "store:" not in done.stdout
    assert os.listdir(tmp_path) == []


def test_a_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    done = run(str(tmp_path), "--json")
    assert done.returncode == 1
    assert '"level": "wrong", "what": "store"' in done.stdout


@pytest.mark.parametrize("store", ["memory:", "tcp://localhost:7420", "postgresql://localhost/x"])
def test_what_is_no_folder(store: str) -> None:
    done = run(store)
    assert done.returncode == 2
    assert "run it there, on the store's folder" in done.stderr


def only(found: Any, what: str) -> tuple[str, str]:
    [(level, _, told)] = [each for each in found if each.what == what]
    return level, told


@pytest.mark.parametrize(
    ("kind", "level", "told"),
    [
        ("nfs4", WRONG, "put the store on a local disk"),
        ("tmpfs", WARNING, "a restart of the machine loses it"),
        ("overlay", WARNING, "mount a volume"),
        ("ext4", OK, "ext4 at"),
        ("", OK, "unknown at"),
    ],
)
def test_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, level: str, told: str) -> None:
    monkeypatch.setattr(doctoring, "file_system", lambda path: kind)
    found = only(doctoring._folder(tmp_path, tmp_path), "file system")
    assert found[0] == level
    assert told in found[1]


@pytest.mark.parametrize(
    ("seconds", "level", "told"),
    [(1e-6, WARNING, "no disk writes as fast"), (0.001, OK, "1.000 ms"), (0.05, WARNING, "commits wait for it")],
)
def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, level: str, told: str) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += seconds
        return now

    monkeypatch.setattr(doctoring.time, "perf_counter", clock)
    found = only(doctoring._folder(tmp_path, tmp_path), "fsync")
    assert found[0] == level
    assert told in found[1]


def test_a_disk_that_is_full_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctoring.shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 1 << 20))
    level, told = only(doctoring._folder(tmp_path, tmp_path), "space")
    assert (level, told.startswith("1.0 MiB are free of 1.0 TiB")) == (WARNING, True)

    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctoring.os, "pwrite", fails)
    assert only(doctoring._folder(tmp_path, tmp_path), "fsync")[0] == WRONG


def test_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chmod(tmp_path, 0o777)
    assert only(doctoring._folder(tmp_path, tmp_path), "permissions")[0] == WARNING
    os.chmod(tmp_path, 0o700)
    assert only(doctoring._folder(tmp_path, tmp_path), "permissions")[0] == OK
    uid = os.getuid()
    monkeypatch.setattr(doctoring.os, "getuid", lambda: uid + 1)
    assert only(doctoring._folder(tmp_path, tmp_path), "permissions")[0] == WARNING
    monkeypatch.setattr(doctoring.os, "access", lambda path, mode: False)
    assert only(doctoring._folder(tmp_path, tmp_path), "permissions")[0] == WRONG


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_AS: (1 << 30, 1 << 30)}
    monkeypatch.setattr(doctoring.resource, "getrlimit", given.__getitem__)
    found = list(doctoring._limits())
    assert [(each.level, each.what) for each in found] == [(WARNING, "open files"), (WARNING, "address space")]


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:

    ahead = perco.Options(wall=lambda: time.time() + 1000)
    with perco.sync.open(tmp_path / "store", perco.Schema(perco.Table("docs")), options=ahead) as db, db.transaction():
        pass
    done = run(str(tmp_path / "store"))
    assert done.returncode == 0
    assert "was the clock set back?" in done.stdout
