"""`perco serve --processes N`: its processes killed, stopped and continued as it happens."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
import trio

import perco
from perco.check.check import check
from perco.database.inside import inside
from perco.serve.client import remote_owner
from perco.serve.messages import TabletsOf
from perco.serve.opening import visiting
from tests.integration.serve.member import OPTIONS, SCHEMA, TOTAL, accounts, balance, found, move, total
from tests.integration.serve.test_members import Member, members as members

_READY = re.compile(r"serving .* \(process (\d+), \d+ tablet servers\)")


class Served:
    """A supervisor, the owner that it keeps, and tablet servers."""

    def __init__(self, folder: Path, processes: int = 2, *more: str) -> None:
        command = [sys.executable, "-m", "perco", "serve", str(folder), "--processes", str(processes)]
        self.folder = folder
        self.process = subprocess.Popen(
            [*command, "--durability", "process", *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.owner = self.ready()

    def ready(self) -> int:
        """Until there is an owner; its process."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (said := _READY.search(line)) is not None:
                return int(said[1])
        raise AssertionError(self.process.communicate()[1])

    def ends(self) -> None:
        self.process.terminate()
        assert self.process.wait() == 0, self.process.communicate()[1]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def begin(processes: int = 2, *more: str) -> Served:
        started.append(Served(tmp_path / "store", processes, *more))
        return started[-1]

    yield begin
    for served in started:
        served.process.kill()
        served.process.communicate()


async def _until(folder: Path, wanted: Callable[[list[TabletsOf]], bool]) -> list[TabletsOf]:
    """Who has which tablets, as soon as it is as wanted."""
    with trio.fail_after(60):
        async with visiting(folder) as db:
            while True:
                moved = remote_owner(db).store._moved
                if wanted(servers := await remote_owner(db).servers()):
                    return servers
                await moved.wait()


def _even(count: int, without: Collection[int] = ()) -> Callable[[list[TabletsOf]], bool]:
    """So many servers have a tablet each, and none of these processes is one of them."""

    def wanted(servers: list[TabletsOf]) -> bool:
        gone = not {server.process for server in servers} & set(without)
        return gone and len(servers) == count and all(len(server.tablets) == 1 for server in servers)

    return wanted


async def _clean(folder: Path) -> None:
    async with perco.open(folder, SCHEMA, options=OPTIONS) as db:
        assert await total(db) == TOTAL
        async with db.worker():
            await db.wait_idle(timeout=60)
        result = await check(inside(db).driver.store, ts=await inside(db).oracle.draw())
        assert not result.findings


def test_killed_tablet_servers_are_replaced_and_clients_go_on(
    serve: Callable[..., Served], members: list[Member]
) -> None:  # F1 F2 T4
    served = serve()
    members += [Member(served.folder, "found")]
    assert members[0].says() == "client"
    mover, worker = Member(served.folder, "moves"), Member(served.folder, "works")
    members += [mover, worker]
    assert (mover.says(), worker.says()) == ("client", "client")
    killed: set[int] = set()
    for round in range(4):
        for _ in range(30):
            mover.says()
        servers = trio.run(_until, served.folder, _even(2, killed))
        victim = servers[round % 2]
        killed.add(victim.process)
        os.kill(victim.process, signal.SIGKILL)
    for _ in range(30):
        mover.says()
    servers = trio.run(_until, served.folder, _even(2, killed))
    assert len(killed) == 4
    assert sum(tablet.epoch for server in servers for tablet in server.tablets) >= 2 + 4
    mover.kill()
    assert worker.ends() == members[0].ends() == TOTAL
    served.ends()
    assert served.process.stderr is not None
    told = served.process.stderr.read()
    assert {int(pid) for pid in re.findall(r"tablet server \d+ \(process (\d+)\) is lost", told)} == killed
    trio.run(_clean, served.folder)


def test_a_tablet_server_that_stands_still_is_given_up(serve: Callable[..., Served], members: list[Member]) -> None:
    served = serve()  # F1
    members += [Member(served.folder, "found"), Member(served.folder, "moves")]
    assert {member.says() for member in members} == {"client"}
    victim = trio.run(_until, served.folder, _even(2))[0].process
    os.kill(victim, signal.SIGSTOP)
    for _ in range(30):
        members[1].says()
    trio.run(_until, served.folder, _even(2, [victim]))
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGCONT)
    for _ in range(30):
        members[1].says()
    members[1].kill()
    assert members[0].ends() == TOTAL
    served.ends()
    trio.run(_clean, served.folder)


async def _split(folder: Path, *keys: str) -> None:
    async with perco.open(folder, SCHEMA, options=OPTIONS) as db:
        for key in keys:
            assert (await db.split(accounts, key)).row == key.encode()


def test_tablets_are_split_while_clients_go_on(serve: Callable[..., Served], members: list[Member]) -> None:  # P1 P4
    served = serve()
    members += [Member(served.folder, "found")]
    assert members[0].says() == "client"
    mover, worker = Member(served.folder, "moves"), Member(served.folder, "works")
    members += [mover, worker]
    assert (mover.says(), worker.says()) == ("client", "client")
    for keys in (("a3",), ("a7", "a1")):
        trio.run(_split, served.folder, *keys)
        for _ in range(60):
            mover.says()
    servers = trio.run(_until, served.folder, lambda found: len(found) == 2)
    assert sorted(len(server.tablets) for server in servers) == [2, 3]
    assert {(tablet.number, tablet.start) for server in servers for tablet in server.tablets} == {
        *((0, b""), (1, b"a5"), (2, b"a3"), (3, b"a7"), (4, b"a1"))
    }
    os.kill(servers[0].process, signal.SIGKILL)
    for _ in range(60):
        mover.says()
    mover.kill()
    assert worker.ends() == members[0].ends() == TOTAL
    served.ends()
    trio.run(_clean, served.folder)


def test_a_killed_owner_is_started_again(serve: Callable[..., Served], members: list[Member]) -> None:  # F4 O1 R8
    served = serve()
    members += [Member(served.folder, "found"), Member(served.folder, "moves")]
    assert {member.says() for member in members} == {"client"}
    for _ in range(2):
        for _ in range(30):
            members[1].says()
        os.kill(served.owner, signal.SIGKILL)
        before, served.owner = served.owner, served.ready()
        assert served.owner != before
    for _ in range(30):
        members[1].says()
    members[1].kill()
    assert members[0].ends() == TOTAL
    served.ends()
    trio.run(_clean, served.folder)


@pytest.mark.parametrize("stopped", [False, True], ids=["", "with a tablet server that stands still"])
def test_who_loses_its_supervisor_ends(
    serve: Callable[..., Served], members: list[Member], stopped: bool
) -> None:  # F4
    served = serve()
    members += [Member(served.folder, "found")]
    assert members[0].says() == "client"
    servers = trio.run(_until, served.folder, _even(2))
    if stopped:
        os.kill(servers[0].process, signal.SIGSTOP)
    served.process.kill()
    served.process.wait()
    began = time.monotonic()
    for process in (served.owner, *(server.process for server in servers)):
        while Path(f"/proc/{process}").exists() and "Z" not in _state(process):
            assert time.monotonic() < began + 30
            time.sleep(0.01)
    again = serve()  # the folder is free
    assert members[0].ends() == TOTAL
    again.ends()
    trio.run(_clean, served.folder)


def test_without_what_copies_them_tablet_servers_are_made_anew(
    serve: Callable[..., Served], members: list[Member]
) -> None:  # F4
    served = serve()
    members += [Member(served.folder, "found"), Member(served.folder, "moves")]
    assert {member.says() for member in members} == {"client"}
    servers = trio.run(_until, served.folder, _even(2))
    [mould] = {_parent(server.process) for server in servers}
    assert _parent(mould) == served.owner
    os.kill(mould, signal.SIGKILL)  # they end with it
    for _ in range(60):
        members[1].says()
    again = trio.run(_until, served.folder, _even(2, [server.process for server in servers]))
    assert {_parent(server.process) for server in again} == {served.owner}
    members[1].kill()
    assert members[0].ends() == TOTAL
    served.ends()
    trio.run(_clean, served.folder)


def test_everybody_may_be_told_to_end(serve: Callable[..., Served], members: list[Member]) -> None:
    served = serve()
    members += [Member(served.folder, "found")]
    assert members[0].says() == "client"
    servers = trio.run(_until, served.folder, _even(2))
    for process in (*(server.process for server in servers), served.owner, served.process.pid):
        os.kill(process, signal.SIGTERM)
    assert served.process.wait() == 0, served.process.communicate()[1]
    assert not [name for name in os.listdir(served.folder) if name.startswith("socket")]
    members[0].kill()
    trio.run(_clean, served.folder)


def test_a_supervisor_does_not_try_again_what_is_refused(tmp_path: Path, members: list[Member]) -> None:
    members += [Member(tmp_path / "store", "found")]
    assert members[0].says() == "owner"
    command = [sys.executable, "-m", "perco", "serve", str(tmp_path / "store"), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("is in use by process") == 1
    assert members[0].ends() == TOTAL


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


async def test_over_tcp_a_tablet_server_wants_the_token(serve: Callable[..., Served]) -> None:
    served = serve(2, "--listen", "tcp://localhost:0")
    assert served.process.stdout is not None
    async with visiting(served.folder) as db:
        [server, _] = await remote_owner(db).servers()
        [port] = [int(address.rpartition(":")[2]) for address in server.addresses if address.startswith("tcp")]
        with pytest.raises(perco.errors.WrongToken, match="another store"):
            async with perco.open(f"tcp://127.0.0.1:{port}", SCHEMA, options=OPTIONS, token="00"):
                pass


async def test_what_clients_see(serve: Callable[..., Served]) -> None:
    served = serve()
    async with (
        perco.open(served.folder, SCHEMA, options=OPTIONS) as db,
        perco.open(f"unix:{served.folder / 'socket'}", SCHEMA, options=OPTIONS) as other,
    ):
        await db.run(found)
        for seed in range(20):
            await other.run(move, random.Random(seed))
        assert await total(db) == TOTAL
        async with db.snapshot() as snap:
            forth = [row.key async for row in snap.scan(accounts, columns=[balance])]
            back = [row.key async for row in snap.scan(accounts, columns=[balance], reverse=True)]
        assert forth == back[::-1] == [f"a{i}" for i in range(10)]
        async with other.worker(concurrency=4):
            await db.wait_idle(timeout=60)
        assert (await db.vacuum()).cuts


def test_tablets_of_tablet_servers_are_not_compacted(serve: Callable[..., Served], members: list[Member]) -> None:  # P6
    served = serve()
    members += [Member(served.folder, "found")]
    assert members[0].says() == "client"
    done = subprocess.run(
        [sys.executable, "-m", "perco", "compact", str(served.folder)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "open in tablet servers" in done.stderr
    assert "serve the store without --processes" in done.stderr
    served.ends()
