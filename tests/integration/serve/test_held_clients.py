"""A client in another process whose observer computes for longer than a silent client is kept."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trustme

import perco
from perco.clock.loopwatch import HeartbeatOptions, Held
from perco.database.inside import local_owner
from perco.errors import Unavailable
from perco.rpc import addresses
from perco.rpc.channel import WireOptions
from perco.rpc.framing import FrameDecoder, frame, packed
from perco.serve import opening, tokens
from perco.serve.beating import PulseThread
from perco.serve.messages import PULSE, turned_away, welcome
from perco.serve.pulse import Pulse
from tests.integration.serve.holder import SCHEMA, body, options, size

WIRE = options().wire
BEATS = round(1.25 * (WIRE.silence_s + WIRE.lease_s) / WIRE.heartbeat_s)  # a client that is silent for so long is gone


class Holder:
    """The other process."""

    def __init__(self, front: str, where: str, flag: Path, *more: str) -> None:
        command = [sys.executable, "-m", "tests.integration.serve.holder", front, where, str(flag), *more]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def says(self) -> str:
        assert self.process.stdout is not None
        return str(await trio.to_thread.run_sync(self.process.stdout.readline)).strip()

    async def ends(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return await self.says()


@pytest.fixture
def holders() -> Iterator[list[Holder]]:
    started: list[Holder] = []
    yield started
    for holder in started:
        holder.process.kill()
        holder.process.communicate()


class Owner:
    """The process that owns the store, and hears pulses."""

    def __init__(self, db: perco.Database, opened: opening.open) -> None:
        assert opened.server is not None
        self.db, self.server = db, opened.server
        self.beats = 0
        self.ended = trio.Event()
        self._beaten = trio.Event()
        sessions = self.server.sessions
        sessions.on_held, sessions.on_end = self._beat, self._end

    def _beat(self, ticket: str) -> None:
        self.beats += 1
        self._beaten.set()
        self._beaten = trio.Event()

    def _end(self, ticket: str) -> None:
        self.ended.set()
        self._beaten.set()

    async def hears(self, beats: int) -> None:
        """So many more."""
        wanted = self.beats + beats
        with trio.fail_after(120):
            while self.beats < wanted:
                assert not self.ended.is_set(), "the session has ended"
                await self._beaten.wait()

    async def put(self, key: str, value: str) -> None:
        async with self.db.transaction() as txn:
            txn.set(body, key, value)

    async def sizes(self) -> dict[str, int | None]:
        async with self.db.snapshot() as snap:
            return {row.key: row[size] async for row in snap.scan(size.table, columns=[size])}


@asynccontextmanager
async def owned(folder: Path) -> AsyncIterator[Owner]:
    opened = opening.open(folder, SCHEMA, options=options())
    async with opened as db:
        yield Owner(db, opened)


@asynccontextmanager
async def reached(owner: Owner, how: str, folder: Path) -> AsyncIterator[tuple[str, list[str]]]:
    """Where a client finds the store, and whose certificates it trusts."""
    if how == "folder":
        yield str(folder), []
        return
    authority = trustme.CA()
    pem, ca = folder.with_name("cert.pem"), folder.with_name("ca.pem")
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(pem))
    authority.cert_pem.write_to_path(str(ca))
    address = addresses.parse(f"{how}://localhost:0")
    async with owner.server.listening(address, tokens.token_of(folder), (str(pem), "") if how == "tls" else None) as at:
        yield str(at), [str(ca)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PERCO_TOKEN", raising=False)


@pytest.mark.parametrize(("front", "how"), [("trio", "folder"), ("aio", "tcp"), ("sync", "tls")])
async def test_a_client_whose_loop_is_held_keeps_what_it_holds_and_commits(
    tmp_path: Path, holders: list[Holder], monkeypatch: pytest.MonkeyPatch, front: str, how: str
) -> None:  # R10
    flag, folder = tmp_path / "flag", tmp_path / "store"
    async with owned(folder) as owner, reached(owner, how, folder) as (where, more):
        monkeypatch.setenv("PERCO_TOKEN", tokens.token_of(folder).decode())
        holder = Holder(front, where, flag, *more)
        holders.append(holder)
        assert await holder.says() == "client"
        await owner.put("a", "hello")
        assert await holder.says() == "computes"
        [session] = owner.server.sessions.all.values()
        peer = session.peer
        assert peer is not None
        await owner.hears(BEATS)
        assert not session.ended
        assert session.stuck is not None
        assert session.stuck.pid == holder.process.pid
        assert "holder.py" in session.stuck.where
        assert " compute" in session.stuck.where
        assert session.claims
        flag.touch()
        await owner.db.wait_idle(timeout=60)
        assert await owner.sizes() == {"a": 5}
        assert session.peer is peer, "R2: neither took the other for silent"
        assert await holder.ends() == "1 runs, 0 conflicts"


async def test_a_client_that_stands_still_altogether_loses_what_it_held(
    tmp_path: Path, holders: list[Holder]
) -> None:  # R10 R7
    async with owned(tmp_path / "store") as owner:
        holder = Holder("trio", str(tmp_path / "store"), tmp_path / "flag")
        holders.append(holder)
        assert await holder.says() == "client"
        await owner.put("a", "hello")
        assert await holder.says() == "computes"
        await owner.hears(3)
        os.kill(holder.process.pid, signal.SIGSTOP)
        with trio.fail_after(60):
            await owner.ended.wait()
        assert not owner.server.sessions.all
        assert not owner.server.sessions.claims


async def test_another_owner_hears_the_pulses_of_a_client_that_has_come_back(
    tmp_path: Path, holders: list[Holder]
) -> None:  # R10 R8
    flag = tmp_path / "flag"
    async with owned(tmp_path / "store") as owner:
        holder = Holder("trio", str(tmp_path / "store"), flag)
        holders.append(holder)
        assert await holder.says() == "client"
        await owner.put("a", "hello")
        assert await holder.says() == "computes"
        await owner.hears(2)
    async with owned(tmp_path / "store") as owner:
        assert owner.beats == 0
        flag.touch()
        await owner_has(owner, {"a": 5})
        flag.unlink()
        await owner.put("b", "hello again")
        with trio.fail_after(60):
            while await holder.says() != "computes":  # it may have run more than once for the first
                pass
        await owner.hears(3)
        flag.touch()
        await owner_has(owner, {"a": 5, "b": 11})


async def owner_has(owner: Owner, sizes: dict[str, int]) -> None:
    with trio.fail_after(60):
        while await owner.sizes() != sizes:
            await local_owner(owner.db).idle.changed()


# ------------------------------------------------------------------ the thread


class Thread(PulseThread):
    """Its steps, one by one; the other end of each connection is in `servers`."""

    def __init__(self) -> None:
        self.servers: list[socket.socket] = []
        self.refuses = False
        self.tried = 0
        wire = WireOptions(heartbeat_s=0.5, silence_s=2.0)
        self.pulse = Pulse(lambda: b"token", "me", wire, random.Random(1))
        super().__init__(HeartbeatOptions(), wire, self.pulse, self._connect)

    def _connect(self, timeout_s: float) -> socket.socket:
        self.tried += 1
        if self.refuses:
            raise ConnectionRefusedError("nobody listens")
        ours, theirs = socket.socketpair()
        theirs.settimeout(60)
        self.servers.append(theirs)
        return ours

    def step(self, now: float, *, held: bool = True) -> None:
        self._meanwhile(now, Held(1.0, "here") if held else None)

    def heard(self) -> list[object]:
        return [m[1] for frame in FrameDecoder(1 << 16).feed(self.servers[-1].recv(1 << 16)) for m in frame]


WELCOME = frame([packed(welcome(False, True, {}))])


def test_the_thread_connects_speaks_and_closes() -> None:  # R10
    thread, now = Thread(), time.monotonic()
    thread.step(now, held=False)
    assert not thread.servers
    thread.step(now)
    [server] = thread.servers
    server.recv(1 << 16)  # the greeting
    server.sendall(WELCOME)
    thread.step(now + 0.1)
    assert thread.heard() == [PULSE]
    thread.step(now + 0.2, held=False)
    assert thread.heard() == [PULSE]
    assert server.recv(1) == b"", "closed"
    assert thread._socket is None
    server.close()


@pytest.mark.parametrize("end", ["closed", "refused", "rubbish", "silent"])
def test_the_thread_makes_a_new_connection_when_one_has_ended(end: str, caplog: pytest.LogCaptureFixture) -> None:
    thread, now = Thread(), time.monotonic()
    thread.step(now)
    [server] = thread.servers
    if end == "refused":
        server.sendall(frame([packed(turned_away(Unavailable("no such session")))]))
    elif end == "rubbish":
        server.sendall(b"\xff" * 100)
    elif end == "closed":
        server.close()
    with caplog.at_level("INFO", "perco.serve"):
        thread.step(now + (3.0 if end == "silent" else 0.1))
    assert "no pulse, while the event loop is blocked" in caplog.text
    assert thread._socket is None
    thread.step(now + 10.0)
    assert thread._socket is not None
    assert len(thread.servers) == 2
    thread._close()
    for server in thread.servers:
        server.close()


def test_the_thread_goes_on_trying_where_nobody_listens() -> None:  # R6
    thread, now = Thread(), time.monotonic()
    thread.refuses = True
    for i in range(10):
        thread.step(now + i)
    assert thread.tried > 1
    assert not thread.servers
    thread.refuses = False
    thread.step(now + 20)
    thread._close()
    [server] = thread.servers
    server.close()
