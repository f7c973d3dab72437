"""Several processes on one folder, killed as it happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

import perco
from perco.check.check import check
from perco.database.inside import inside
from perco.serve.client import is_client, remote_owner
from tests.integration.serve.member import OPTIONS, SCHEMA, TOTAL, found, total


class Member:
    """One of them."""

    def __init__(self, where: object, what: str) -> None:
        command = [sys.executable, "-m", "tests.integration.serve.member", str(where), what]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def ends(self) -> int:
        self.tell()
        last = int(self.says())
        assert self.process.wait() == 0
        return last


@pytest.fixture
def members() -> Iterator[list[Member]]:
    started: list[Member] = []
    yield started
    for member in started:
        member.process.kill()
        member.process.communicate()


async def _clean(folder: Path) -> None:
    async with perco.open(folder, SCHEMA, options=OPTIONS) as db:
        assert await total(db) == TOTAL
        async with db.worker():
            await db.wait_idle(timeout=60)
        result = await check(inside(db).driver.store, ts=await inside(db).oracle.draw())
        assert not result.findings


def test_a_second_process_becomes_a_client_of_the_first(tmp_path: Path, members: list[Member]) -> None:
    members.append(Member(tmp_path / "store", "found"))
    assert members[0].says() == "owner"
    members.append(Member(tmp_path / "store", "looks"))
    assert members[1].says() == "client"
    assert oct((tmp_path / "store" / "socket").stat().st_mode)[-3:] == "600"
    assert members[1].ends() == TOTAL
    assert members[0].ends() == TOTAL
    assert not (tmp_path / "store" / "socket").exists()
    trio.run(_clean, tmp_path / "store")


def test_a_killed_owner_is_followed_by_the_next_and_clients_go_on(tmp_path: Path, members: list[Member]) -> None:
    folder = tmp_path / "store"  # O1 R8 T4
    members.append(Member(folder, "found"))
    assert members[0].says() == "owner"
    mover = Member(folder, "moves")
    members.append(mover)
    assert mover.says() == "client"
    unknown = 0
    for _ in range(3):
        for _ in range(30):
            unknown += mover.says().startswith("unknown")
        members[0].kill()
        members[0] = Member(folder, "looks")
        assert members[0].says() == "owner"
    for _ in range(30):
        unknown += mover.says().startswith("unknown")
    mover.kill()
    assert members[0].ends() == TOTAL
    trio.run(_clean, folder)


def test_a_client_whose_owner_has_ended_fails_until_there_is_another(tmp_path: Path, members: list[Member]) -> None:
    folder = tmp_path / "store"
    members.append(Member(folder, "found"))
    assert members[0].says() == "owner"

    async def client() -> None:
        async with perco.open(folder, SCHEMA, options=OPTIONS) as db:
            assert is_client(db)
            assert await total(db) == TOTAL
            remote_owner(db).link._options = replace(remote_owner(db).link._options, patience_s=0.0)
            members[0].kill()
            with pytest.raises(perco.Unavailable) as caught:
                await total(db)
            told = f"Start `perco serve {folder}`, or open the folder in a process that stays."
            assert str(caught.value).endswith(told)
            async with perco.open(
                folder, SCHEMA, options=OPTIONS
            ) as owner:  # the client is no owner, its process may be
                assert not is_client(owner)
                await remote_owner(db).link.connected.wait()
                assert await total(db) == TOTAL

    trio.run(client)


def test_killed_clients_leave_nothing_behind(tmp_path: Path, members: list[Member]) -> None:  # R7 L1 T5
    folder = tmp_path / "store"
    members.append(Member(folder, "found"))
    assert members[0].says() == "owner"
    for _ in range(4):
        mover = Member(folder, "moves")
        members.append(mover)
        assert mover.says() == "client"
        for _ in range(20):
            assert mover.says() == "moved"
        mover.kill()
    assert members[0].ends() == TOTAL
    trio.run(_clean, folder)


def test_a_client_that_stood_still_goes_on(tmp_path: Path, members: list[Member]) -> None:  # R5 R7
    folder = tmp_path / "store"
    members.append(Member(folder, "found"))
    assert members[0].says() == "owner"
    still, other = Member(folder, "moves"), Member(folder, "moves")
    members += [still, other]
    for mover in (still, other):
        assert mover.says() == "client"
        assert mover.says() == "moved"
    os.kill(still.process.pid, signal.SIGSTOP)
    # The other one is not held up, for longer than a session lasts that is not heard of.
    began = time.monotonic()
    while time.monotonic() - began < OPTIONS.wire.silence_s + 2 * OPTIONS.wire.lease_s:
        assert other.says() == "moved"
    other.kill()
    os.kill(still.process.pid, signal.SIGCONT)
    trio.run(_until_it_commits, folder)
    still.kill()
    assert members[0].ends() == TOTAL
    trio.run(_clean, folder)


async def _until_it_commits(folder: Path) -> None:
    """Nobody else does by now."""
    async with perco.open(folder, SCHEMA, options=OPTIONS) as db:
        before = await inside(db).oracle.newest()
        while await inside(db).oracle.newest() < before + 10:
            await trio.lowlevel.checkpoint()


def test_observers_run_in_any_of_them(tmp_path: Path, members: list[Member]) -> None:  # N3 N8
    folder = tmp_path / "store"

    async def owner() -> None:
        async with perco.open(folder, SCHEMA, options=OPTIONS) as db:
            workers = [Member(folder, "works") for _ in range(2)]
            members.extend(workers)
            for worker in workers:
                assert await trio.to_thread.run_sync(worker.says) == "client"
            for _ in range(20):
                await db.run(found)
            async with perco.open(f"unix:{folder / 'socket'}", SCHEMA, options=OPTIONS) as client:
                await client.wait_idle(timeout=60)
            for worker in workers:
                assert await trio.to_thread.run_sync(worker.ends) == TOTAL

    trio.run(owner)
    trio.run(_clean, folder)
