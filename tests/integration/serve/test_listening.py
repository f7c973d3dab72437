"""Where a store is served, who is let in, and what others may send."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

import perco
from perco.database.inside import inside
from perco.rpc import addresses
from perco.rpc.framing import frame, packed
from perco.serve import tokens
from perco.serve.messages import WIRE_VERSION, Method, hello
from perco.serve.opening import visiting

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)
WIRE = perco.options.WireOptions(heartbeat_s=0.5, silence_s=2.0, connect_s=10.0, lease_s=1.0, patience_s=10.0)
OPTIONS = perco.Options(durability="process", wire=WIRE)
# For servers that somebody keeps waiting.
HASTY = replace(OPTIONS, wire=replace(WIRE, connect_s=1.0))

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")


async def put(txn: perco.Transaction, key: str, value: int) -> None:
    txn.set(n, key, value)


async def on(url: object, act: Callable[[perco.Database], Awaitable[None]], **more: object) -> None:
    async with perco.open(url, SCHEMA, options=OPTIONS, **more) as db:  # type: ignore[arg-type]
        await act(db)


async def writes(db: perco.Database) -> None:
    await db.run(put, "a", 1)
    async with db.snapshot() as snap:
        assert await snap.get(n, "a") == 1


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PERCO_TOKEN", raising=False)


class Owner:
    """A store that is served while the block lasts."""

    def __init__(self, folder: Path, options: perco.Options = OPTIONS) -> None:
        self.opening = perco.open(folder, SCHEMA, options=options)

    async def __aenter__(self) -> Owner:
        self.db = await self.opening.__aenter__()
        assert self.opening.server is not None
        self.server = self.opening.server
        return self

    async def __aexit__(self, *what: object) -> None:
        await self.opening.__aexit__(None, None, None)


async def test_on_tcp_the_token_is_asked_for(tmp_path: Path) -> None:
    async with Owner(tmp_path / "store") as owner:
        token = tokens.token_of(tmp_path / "store")
        async with owner.server.listening(addresses.parse("tcp://127.0.0.1:0"), token) as at:
            url = str(at)
            for wrong in (None, "", "x" * 48):
                with pytest.raises(perco.errors.WrongToken, match="PERCO_TOKEN"):
                    await on(url, writes, token=wrong)
            assert not owner.server.sessions.all
            await on(url, writes, token=token.decode())
            with tokens.told(at, token):  # of the same user: it is found
                await on(url, writes)
            with pytest.raises(perco.errors.WrongToken):
                await on(url, writes)


async def test_the_token_is_for_its_owner_alone(tmp_path: Path) -> None:
    token = tokens.token_of(tmp_path)
    assert tokens.token_of(tmp_path) == token
    assert len(token) >= 32
    path = tmp_path / tokens.TOKEN_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(perco.errors.UnsuitableFolder, match="chmod 600"):
        tokens.token_of(tmp_path)


async def test_what_others_can_reach_takes_tls_and_a_port_takes_a_token(tmp_path: Path) -> None:
    async with Owner(tmp_path / "store") as owner:
        for text in ("tcp://0.0.0.0:0", "tls://127.0.0.1:0"):
            with pytest.raises(perco.UsageError, match="certificate"):
                async with owner.server.listening(addresses.parse(text), b"t"):
                    pass
        with pytest.raises(perco.UsageError, match="token"):
            async with owner.server.listening(addresses.parse("tcp://127.0.0.1:0")):
                pass


async def test_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    pem = tmp_path / "cert.pem"  # with its key
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(pem))
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    async with Owner(tmp_path / "store") as owner:
        token = tokens.token_of(tmp_path / "store")
        async with owner.server.listening(addresses.parse("tls://localhost:0"), token, (str(pem), "")) as at:
            options = replace(OPTIONS, wire=replace(WIRE, ca_file=str(ca)))
            async with perco.open(str(at), SCHEMA, options=options, token=token.decode()) as db:
                await writes(db)
            with pytest.raises(perco.Unavailable, match=r"(?i)certificate"):
                await on(str(at), writes, token=token.decode())
            with pytest.raises(perco.Unavailable, match=f"if this server uses TLS, open {at}"):
                async with perco.open(
                    str(at).replace("tls:", "tcp:"),
                    SCHEMA,
                    options=replace(OPTIONS, wire=replace(WIRE, patience_s=0.5)),
                    token=token.decode(),
                ):
                    pass
            with pytest.raises(perco.UsageError, match="ca_file"):
                async with perco.open(
                    str(at), SCHEMA, options=replace(OPTIONS, wire=replace(WIRE, ca_file=str(tmp_path / "none")))
                ):
                    pass
            async with perco.open(str(at), SCHEMA, options=options, token=token.decode()) as db:
                await writes(db)


_OPENS = """
import sys, perco, trio

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)

async def put(txn):
    txn.set(n, "b", 2)

async def main():
    async with perco.open(sys.argv[1], perco.Schema(docs)) as db:
        await db.run(put)

trio.run(main)
"""


async def test_an_owner_may_end_while_its_store_is_opened(tmp_path: Path) -> None:  # R5
    async with Owner(tmp_path / "store") as owner:
        left, handlers = 0, owner.server._handlers

        def ending(handler: Callable[..., None]) -> Callable[..., None]:
            def handle(*call: Any) -> None:
                nonlocal left
                if left:
                    left -= 1
                    raise perco.errors.SessionEnded("the process that serves this store has closed it")
                handler(*call)

            return handle

        for method in (Method.READ, Method.READS, Method.SCAN):
            handlers[method] = ending(handlers[method])
        left = 1
        with pytest.raises(perco.Unavailable, match="the store's owner ended while the store was opened"):
            await on(f"unix:{tmp_path / 'store' / 'socket'}", writes)
        assert left == 0
        left = 1
        with pytest.raises(perco.Unavailable, match="no process has"):
            async with visiting(tmp_path / "store"):
                pass
        assert left == 0
        left = 1  # a folder is tried again
        await trio.run_process([sys.executable, "-c", _OPENS, str(tmp_path / "store")])
        assert left == 0
        async with owner.db.snapshot() as snap:
            assert await snap.get(n, "b") == 2


_OPENS_SOON = """
import sys, perco, trio

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
options = perco.Options(durability="process", wire=perco.options.WireOptions(patience_s=1.0))

async def main():
    try:
        async with perco.open(sys.argv[1], perco.Schema(docs), options=options):
            print("opened")
    except perco.PercoError as error:
        print(type(error).__name__, error)

trio.run(main)
"""


@pytest.mark.parametrize("ends", [True, False])
async def test_a_process_that_waits_in_vain_for_the_owner_of_its_folder_takes_over_or_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: bool
) -> None:  # R6
    asked, told = trio.Event(), b""

    def full(*greeting: Any) -> None:
        asked.set()
        raise perco.Unavailable("the server has no room for another connection")

    async with trio.open_nursery() as nursery:

        async def child() -> None:
            nonlocal told
            command = [sys.executable, "-c", _OPENS_SOON, str(tmp_path / "store")]
            told = (await trio.run_process(command, capture_stdout=True)).stdout
            done.set()

        done = trio.Event()
        async with Owner(tmp_path / "store") as owner:
            monkeypatch.setattr(owner.server, "_check", full)
            nursery.start_soon(child)
            await (asked if ends else done).wait()
    if ends:
        assert told == b"opened\n"
    else:
        assert told.startswith(b"Unavailable")
        assert b"no room" in told


async def test_an_address_in_use_and_a_socket_that_a_dead_server_left(tmp_path: Path) -> None:
    async with Owner(tmp_path / "store") as owner:
        async with owner.server.listening(addresses.parse("tcp://127.0.0.1:0"), b"t") as at:
            with pytest.raises(perco.StoreError, match=r"listens at tcp://127\.0\.0\.1:[0-9]+ already"):
                async with owner.server.listening(at, b"t"):
                    pass
        living = addresses.Address(tmp_path / "living")
        async with owner.server.listening(living):
            with pytest.raises(perco.StoreError, match="already"):
                async with owner.server.listening(living):
                    pass
            await on(str(living), writes)
        left = tmp_path / "left"
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(left))
        dead.close()
        async with owner.server.listening(addresses.Address(left)):
            assert left.stat().st_mode & 0o777 == 0o600
            await on(f"unix:{left}", writes)
        assert not left.exists()
        left.write_text("mine")
        with pytest.raises(perco.UsageError, match="not a socket"):
            async with owner.server.listening(addresses.Address(left)):
                pass
        assert left.read_text() == "mine"


async def test_a_folder_with_a_path_longer_than_a_socket_may_have(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / "store"
    async with Owner(folder):
        assert len(os.fsencode(folder)) > 108
        await on(f"unix:{folder / 'socket'}", writes)


async def test_where_no_socket_can_be_made_the_store_works_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: object, *_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(socket.socket, "listen", fails)
    with pytest.warns(perco.errors.PercoWarning, match="Operation not supported"):
        await on(tmp_path / "store", writes)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (
            "tcp://127.0.0.1:1",
            r"nothing listens at tcp://127\.0\.0\.1:1 \(connection refused\)\. Is `perco serve` running",
        ),
        (
            "tcp://localhost:1",
            r"nothing listens at tcp://localhost:1 \(connection refused\)\. Is `perco serve` running",
        ),
        (
            "unix:/nowhere/at/all",
            r"nothing listens at unix:/nowhere/at/all \(there is no such socket\)\. Is `perco serve`",
        ),
        ("tcp://name.invalid:1", r"the host of tcp://name\.invalid:1 is not known \(.+\)\. Is the address right\?"),
    ],
)
async def test_where_nobody_listens_is_told_at_once(url: str, told: str) -> None:
    for opening in (on(url, writes), _visits(url)):
        with pytest.raises(perco.Unavailable, match=f"^{told}"):
            await opening


async def _visits(url: str) -> None:
    async with visiting(url):
        raise AssertionError


async def test_something_else_that_listens_is_told(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def web(stream: trio.abc.Stream) -> None:
            async with stream:
                await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        nursery.start_soon(trio.serve_listeners, web, listeners)
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(perco.StoreError, match="not a perco server"):
            await on(f"tcp://127.0.0.1:{port}", writes)
        nursery.cancel_scope.cancel()


def hellos() -> bytes:
    return frame([packed(hello(b"", "me", ()))])


ATTACKS: dict[str, bytes] = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge": b"\xff\xff\xff\xff" + b"x" * 1000,
    "garbage": random.Random(1).randbytes(3000),
    "deep": (2000).to_bytes(4, "big") + b"\x91" * 2000,
    "greeting of nothing": frame([packed((1,))]),
    "greeting too long": frame([packed(hello(b"", "me", tuple(range(10_000))))]),
    "another version": frame([packed(("perco", WIRE_VERSION + 1, b"", "me", ()))]),
    "no method": hellos() + frame([packed((1, 999, None))]),
    "rubbish": hellos() + b"\x00\x00\x00\x05\xc1\xc1\xc1\xc1\xc1",
    "half a frame": hellos() + b"\x00\x00\x10\x00abc",
    "half a greeting": hellos()[:-3],
    **{
        f"bad {method.name}": hellos() + frame([packed((1, int(method), bad))])
        for method in Method
        for bad in (((b"x",),),)
        if method not in (Method.IDLE, Method.VACUUM, Method.BACKFILL, Method.ADOPT)
    },
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
async def test_who_sends_rubbish_or_falls_silent_is_alone_with_it(tmp_path: Path, attack: bytes) -> None:  # R1 R2
    async with (
        Owner(tmp_path / "store", HASTY) as owner,
        perco.open(f"unix:{tmp_path / 'store' / 'socket'}", SCHEMA, options=OPTIONS) as other,
    ):
        stream = await trio.open_unix_socket(str(tmp_path / "store" / "socket"))
        with suppress(trio.BrokenResourceError):
            await stream.send_all(attack)
        await other.run(put, "a", 1)
        # The connection ends, by itself or because nothing more comes.
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some(10_000):
                await other.run(put, "a", 2)
        await stream.aclose()
        assert inside(owner.db).background.failure() is None
        await owner.db.run(put, "b", 1)
        assert len(owner.server._serving) == 1


async def test_who_drips_is_sent_away(tmp_path: Path) -> None:  # R2
    async with Owner(tmp_path / "store", HASTY) as owner:
        stream = await trio.open_unix_socket(str(tmp_path / "store" / "socket"))
        sent = 0
        with suppress(trio.BrokenResourceError):
            for byte in hellos():
                await stream.send_all(bytes([byte]))
                sent += 1
                await trio.sleep(0.1)
        assert sent < len(hellos())
        await stream.aclose()
        assert not owner.server.sessions.all


async def test_a_client_of_a_full_server_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(OPTIONS, wire=replace(WIRE, connections_max=2))
    opening = perco.open(tmp_path / "store", SCHEMA, options=options)
    async with opening:
        turned_away = trio.Event()
        said: list[str] = []
        check = opening.server._check

        def noticed(*greeting: Any) -> None:
            try:
                check(*greeting)
            except perco.Unavailable as error:
                said.append(str(error))
                turned_away.set()
                raise

        monkeypatch.setattr(opening.server, "_check", noticed)
        url = f"unix:{tmp_path / 'store' / 'socket'}"
        async with perco.open(url, SCHEMA, options=OPTIONS) as one:
            idle = await trio.open_unix_socket(str(tmp_path / "store" / "socket"))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(on, url, writes)
                await turned_away.wait()
                await writes(one)
                await idle.aclose()
        assert "2 connections already" in said[0]


async def test_a_client_that_comes_back_finds_room_though_its_former_connection_still_counts(tmp_path: Path) -> None:
    options = replace(OPTIONS, wire=replace(WIRE, connections_max=1))
    async with perco.open(tmp_path / "store", SCHEMA, options=options):
        former = await trio.open_unix_socket(str(tmp_path / "store" / "socket"))
        await former.send_all(hellos())
        assert await former.receive_some()
        again = await trio.open_unix_socket(str(tmp_path / "store" / "socket"))
        await again.send_all(hellos())
        assert b"Unavailable" not in await again.receive_some()
        await former.aclose()
        await again.aclose()


@contextmanager
def killed_at_last(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


def test_serve_says_where_and_ends_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perco", "serve", str(tmp_path / "store"), "--durability", "process"]
    more = ("--listen", "tcp://localhost:0", "--connections", "1")
    with (
        subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        killed_at_last(process),
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        ready = process.stdout.readline()
        assert f"unix:{tmp_path / 'store' / 'socket'}, tcp://localhost:" in ready
        assert "a new, empty one was made" in process.stderr.readline()
        port = ready.split("tcp://localhost:")[1].split()[0]
        trio.run(on, f"tcp://localhost:{port}", writes)
        with socket.socket(socket.AF_UNIX) as idle:
            idle.connect(str(tmp_path / "store" / "socket"))
            idle.sendall(frame([packed(hello(b"", "idle", ()))]))
            assert idle.recv(1 << 16)
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(trio.run, on, f"tcp://localhost:{port}", writes)
                assert "this server has 1 connections already" in process.stderr.readline()
                idle.close()
                waiting.result()
        process.send_signal(signal.SIGTERM)
        told = process.stdout.read()
        assert process.wait() == 0
        assert "token" in told
        assert tokens.token_of(tmp_path / "store").decode() not in ready + told
    trio.run(on, tmp_path / "store", writes)
