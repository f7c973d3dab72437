"""Processes of this version and of others greet each other: they work together, or say why they do not.

The greetings are recorded ones of each version of the wire protocol that a release had.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
from perco.errors import VersionMismatch
from perco.rpc.crossing import unpack_error
from perco.rpc.framing import GREETING_BYTES_MAX, FrameDecoder, frame, packed
from perco.serve.messages import WIRE_VERSION
from tests.compatibility.greetings import answer

FILES = {int(path.stem.partition("-")[2]): path for path in Path(__file__).parent.glob("greetings-*.json")}
OTHERS = sorted(FILES.keys() - {WIRE_VERSION})

docs = perco.Table("docs", key=perco.TEXT)
body = docs.column("body", perco.TEXT)
SCHEMA = perco.Schema(docs)


def greeting(version: int, side: str) -> bytes:
    return bytes.fromhex(json.loads(FILES[version].read_text())[side])


def read(data: bytes) -> Any:
    [[message]] = FrameDecoder(GREETING_BYTES_MAX).feed(data)
    return message


async def answered(folder: Path, hello: bytes) -> Any:
    """The answer of a server of this version."""
    async with perco.open(folder, SCHEMA) as db:
        async with db.transaction() as txn:
            txn.set(body, "a", "stays")
        found = read(await trio.to_thread.run_sync(answer, f"{folder}/socket", hello))
        async with db.snapshot() as snap:
            assert await snap.get(body, "a") == "stays"
    return found


def test_the_greetings_of_this_version_and_of_earlier_ones_are_recorded() -> None:
    assert WIRE_VERSION in FILES, "run `python -m tests.compatibility.greetings`"
    assert OTHERS


async def test_a_client_of_this_version_as_it_was_recorded_is_welcome(tmp_path: Path) -> None:
    """If this fails, a greeting has changed, and so the version of the wire protocol has to."""
    said = await answered(tmp_path / "s", greeting(WIRE_VERSION, "hello"))
    recorded = read(greeting(WIRE_VERSION, "welcome"))
    assert said[:2] == recorded[:2] == ("perco", WIRE_VERSION)
    assert [type(part) for part in said] == [type(part) for part in recorded]
    assert {key: type(value) for key, value in said[4].items()} == {
        key: type(value) for key, value in recorded[4].items()
    }


@pytest.mark.parametrize("version", [*OTHERS, WIRE_VERSION + 1])
async def test_a_client_of_another_version_is_told_so(tmp_path: Path, version: int) -> None:
    if version in FILES:
        hello = greeting(version, "hello")
    else:  # as the next version may greet
        magic, _, *rest = read(greeting(WIRE_VERSION, "hello"))
        hello = frame([packed((magic, version, *rest, "and more"))])
    magic, mine, error, *_ = await answered(tmp_path / "s", hello)
    assert (magic, mine) == ("perco", WIRE_VERSION)
    told = unpack_error(error)
    assert isinstance(told, VersionMismatch)
    older = "older" if version < WIRE_VERSION else "newer"
    assert f"speaks version {version} of the wire protocol and is {older} than the server" in str(told)


@pytest.mark.parametrize("version", OTHERS)
async def test_a_server_of_another_version_is_told_of(tmp_path: Path, version: int) -> None:
    path = tmp_path / "socket"

    async def serve(stream: trio.SocketStream) -> None:
        if await stream.receive_some(1):  # the first connection only looks whether anybody listens
            await stream.send_all(greeting(version, "welcome"))
        await stream.aclose()

    listening = trio.socket.socket(trio.socket.AF_UNIX)
    await listening.bind(str(path))
    listening.listen()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(listening)])
        with pytest.raises(VersionMismatch, match=f"the server speaks version {version} .* {WIRE_VERSION}; install"):
            async with perco.open(f"unix:{path}", SCHEMA):
                raise AssertionError
        nursery.cancel_scope.cancel()
