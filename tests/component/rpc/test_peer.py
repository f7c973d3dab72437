"""How much waits for a client that asks for more than it takes (R3), and what a call may not hold (R1)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import trio
import trio.testing

from perco.rpc.channel import Channel
from perco.rpc.framing import FrameDecoder, Message, WireError, frame, packed
from perco.rpc.link import OK
from perco.rpc.peer import Peer
from tests.component.rpc.test_link import BIG, BREAK, ECHO, HOLD, OPTIONS, Service, quiet

SIZE = 3000
ANSWER = len(packed((1 << 16, OK, b"x" * SIZE)))
MANY = replace(OPTIONS, calls_max=1000)


class Client:
    """Sends frames, and takes what comes when it is told to."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.answers: list[Message] = []
        self._stream = stream
        self._decoder = FrameDecoder(1 << 20)

    async def ask(self, *calls: Message) -> None:
        await self._stream.send_all(frame([packed(call) for call in calls]))
        await quiet()

    async def take(self, count: int) -> list[int]:
        """The ids of all answers, once so many have come, or the connection has ended."""
        while len(self.answers) < count and (data := await self._stream.receive_some(1 << 16)):
            for messages in self._decoder.feed(data):
                self.answers += messages
        return [message[0] for message in self.answers]


@asynccontextmanager
async def served(service: Service) -> AsyncIterator[tuple[Peer, Client]]:
    """A server's peer, and a client of which nothing is taken before it reads."""
    ours, theirs = trio.testing.lockstep_stream_pair()
    peer = Peer(Channel(theirs, service.options, maps=False), service.options, service.handle, "a client")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.run)
        yield peer, Client(ours)
        nursery.cancel_scope.cancel()


def most(service: Service, more: int = 1) -> int:
    return service.options.waiting_bytes_max + more * ANSWER + 100


async def test_no_more_is_answered_than_may_wait_though_it_came_in_one_frame() -> None:  # R3
    service = Service(MANY)
    async with served(service) as (peer, client):
        await client.ask(*[(id, BIG, SIZE) for id in range(1, 101)])
        assert peer.channel.waiting_bytes <= most(service)
        assert len(service.asked) <= 8
        for count in range(1, 101):
            assert await client.take(count) == list(range(1, len(client.answers) + 1))
            await quiet()
            assert peer.channel.waiting_bytes <= most(service)
        assert not peer.calls


async def test_what_is_small_is_not_held_up() -> None:  # R3
    service = Service(MANY)
    async with served(service) as (_, client):
        await client.ask(*[(id, ECHO, None) for id in range(1, 101)])
        assert len(service.asked) == 100


async def test_what_came_later_is_not_begun_before_what_waits() -> None:  # R3
    service = Service(MANY)
    async with served(service) as (_, client), trio.open_nursery() as nursery:
        await client.ask(*[(id, BIG, SIZE) for id in range(1, 21)])
        nursery.start_soon(client.ask, (21, ECHO, None))
        await quiet()
        assert await client.take(21) == list(range(1, 22))


async def test_calls_that_waited_for_others_go_on_when_the_client_has_taken_their_answers() -> None:  # R3
    """First too many are under way, and then too much waits."""
    service = Service()
    async with served(service) as (peer, client):
        calls = [(id, HOLD, id) for id in range(1, 5)] + [(id, BIG, SIZE) for id in range(5, 25)]
        await client.ask(*calls)
        assert peer.calls == OPTIONS.calls_max
        for held, id, _ in service.held:
            held.reply(id, b"x" * OPTIONS.waiting_bytes_max)
        await quiet()
        assert len(service.asked) == OPTIONS.calls_max  # nothing more is begun
        assert await client.take(24) == list(range(1, 25))
        await quiet()
        assert not peer.calls


async def test_long_answers_of_tasks_are_made_in_turn_as_the_client_takes_them() -> None:  # R3
    service = Service(MANY)
    async with served(service) as (peer, client), trio.open_nursery() as nursery:
        await client.ask(*[(id, HOLD, id) for id in range(1, 51)])
        made: list[int] = []

        async def answer(id: int) -> None:
            await peer.room()
            made.append(id)
            peer.reply(id, b"x" * SIZE)

        for _, id, _ in service.held:
            nursery.start_soon(answer, id)
            await trio.testing.wait_all_tasks_blocked()
        assert peer.channel.waiting_bytes <= most(service)
        assert len(made) <= 8
        await client.ask(*[(id, BIG, SIZE) for id in range(51, 101)])
        for count in range(1, 101):
            await client.take(count)
            await quiet()
            assert peer.channel.waiting_bytes <= most(service, 2)
        assert made == list(range(1, 51))
        ids = await client.take(100)
        assert sorted(ids) == list(range(1, 101))
        theirs = [at for at, id in enumerate(ids) if id <= 50]
        assert all(after - before <= 9 for before, after in pairwise(theirs))  # later calls do not keep them back


async def test_a_task_that_waits_for_room_goes_on_when_the_connection_has_ended() -> None:  # R3
    service = Service(MANY)
    ended = trio.Event()
    async with trio.open_nursery() as nursery:
        async with served(service) as (peer, client):
            await client.ask((1, HOLD, 1), *[(id, BIG, SIZE) for id in range(2, 20)])

            async def answer() -> None:
                await peer.room()
                peer.reply(1, b"x" * SIZE)
                ended.set()

            nursery.start_soon(answer)
            await quiet()
            assert not ended.is_set()
        with trio.fail_after(5):
            await ended.wait()
            await peer.room()


async def test_what_was_asked_for_and_not_begun_is_answered_before_the_server_ends() -> None:  # R3
    service = Service(MANY)
    answered = trio.Event()
    async with served(service) as (peer, client), trio.open_nursery() as nursery:
        await client.ask(*[(id, BIG, SIZE) for id in range(1, 51)])
        assert not peer.calls

        async def drain() -> None:
            await peer.answered()
            answered.set()

        nursery.start_soon(drain)
        await quiet()
        assert not answered.is_set()
        await client.take(50)
        await answered.wait()


async def test_what_was_not_begun_when_a_connection_ended_is_waited_for_by_nobody() -> None:  # R3
    service = Service(MANY)
    async with trio.open_nursery() as nursery:
        async with served(service) as (peer, client):
            await client.ask(*[(id, BIG, SIZE) for id in range(1, 51)])
            nursery.start_soon(peer.answered)
            await quiet()
        with trio.fail_after(5):
            await peer.answered()
    assert len(service.asked) < 50


async def test_what_breaks_the_wire_once_there_is_room_ends_the_connection() -> None:  # R1 R3
    service = Service(MANY)
    ours, theirs = trio.testing.lockstep_stream_pair()
    peer, client = Peer(Channel(theirs, MANY), MANY, service.handle, "a client"), Client(ours)

    async def run() -> None:
        with pytest.raises(WireError, match="it is not taken"):
            await peer.run()
        await theirs.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await client.ask(*[(id, BIG, SIZE) for id in range(1, 11)], (11, BREAK, None), (12, BIG, SIZE))
        assert not peer.ended
        assert 12 not in await client.take(12)
    assert peer.ended


@pytest.mark.parametrize("map", [{}, {0: 0}, ({1: ()},)], ids=["empty", "one", "inside"])
async def test_a_map_in_a_call_ends_the_connection(map: object) -> None:  # R1
    service = Service()
    ours, theirs = trio.testing.memory_stream_pair()
    peer = Peer(Channel(theirs, OPTIONS, maps=False), OPTIONS, service.handle, "a client")
    await ours.send_all(
        frame([packed((1, ECHO, "before"))]) + frame([packed((2, ECHO, "with it")), packed((3, 1, map))])
    )
    with pytest.raises(WireError, match="map"):
        await peer.run()
    assert service.asked == ["before"]
