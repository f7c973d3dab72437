"""One client asks for more than it takes, or sends what takes more room than its bytes; others do not notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.protocol.records import column_of
from perco.rpc.channel import Channel
from perco.rpc.framing import FrameDecoder, frame, packed
from perco.rpc.link import OK
from perco.serve.messages import Method, hello
from perco.storage import DATA, TS_MAX, ScanQuery, ScanRequest
from tests.component.serve.kit import WIRE, Place

docs = perco.Table("docs", key=perco.TEXT)
text = docs.column("text", perco.BYTES)
SCHEMA = perco.Schema(docs)
SIZE = 5000


@pytest.fixture
def place() -> Place:
    return Place(SCHEMA, wire=replace(WIRE, waiting_bytes_max=30_000, frame_bytes=10_000))


async def put(txn: perco.Transaction, key: str, value: bytes) -> None:
    txn.set(text, key, value)


async def greeted(place: Place) -> trio.abc.Stream:
    """A connection of which nothing is taken before it is read from."""
    assert place.server is not None
    assert place.owner is not None
    server = place.server
    ours, theirs = trio.testing.lockstep_stream_pair()

    async def serve() -> None:
        await server.connection(theirs, None)

    inside(place.owner).background.start(serve, "connection")
    channel = Channel(ours, WIRE)
    await channel.greet(hello(b"", "abc", ()))
    await channel.greeting(alone=True)
    return ours


SCAN = ScanRequest("docs", b"", None, (ScanQuery(DATA, None, 0, TS_MAX, 1),))
READ = (("docs", b"a", ((DATA, column_of(1), 0, TS_MAX, 1),)),)


@pytest.mark.parametrize(("method", "asked"), [(Method.SCAN, SCAN), (Method.READ, READ), (Method.READS, (READ,))])
async def test_answers_wait_for_a_client_as_far_as_they_may(place: Place, method: Method, asked: Any) -> None:  # R3
    async with place.served(), place.client() as db:
        await db.run(put, "a", b"x" * SIZE)
        async with await greeted(place) as stream:
            await stream.send_all(frame([packed((id, int(method), asked)) for id in range(1, 51)]))
            await trio.testing.wait_all_tasks_blocked()
            assert place.server is not None
            [peer] = [peer for peer in place.server._serving if peer.name == "abc"]
            most = place.wire.waiting_bytes_max + SIZE + 200
            assert place.wire.waiting_bytes_max < peer.channel.waiting_bytes <= most
            await db.run(put, "b", b"")  # others do not notice
            decoder, answers = FrameDecoder(1 << 20), []
            while len(answers) < 50:
                for messages in decoder.feed(await stream.receive_some(1 << 16)):
                    answers += messages
                assert peer.channel.waiting_bytes <= most + SIZE
            assert {(id, status) for id, status, _ in answers} == {(id, OK) for id in range(1, 51)}
            assert all(b"x" * SIZE in packed((answer,)) for answer in answers)
            assert not peer.calls


async def test_a_call_with_maps_ends_its_connection(place: Place, caplog: pytest.LogCaptureFixture) -> None:  # R1
    async with place.served() as owner, place.client() as db:
        async with await greeted(place) as stream:
            with trio.fail_after(5):
                await stream.send_all(frame([packed((1, int(Method.PIN), [{0: 0}] * 100))]))
                while await stream.receive_some(1 << 16):
                    pass  # the end has not come
        assert "a connection ended: a frame that cannot be decoded" in caplog.text
        inside(owner).background.check()
        await db.run(put, "a", b"")
