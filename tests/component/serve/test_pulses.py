"""Clients whose loops are held, from the server's side; time is virtual.

A client whose loop is held neither reads nor writes: here it is a connection that has been greeted and is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.rpc.channel import Channel, Silent
from perco.rpc.framing import Message
from perco.rpc.link import OK
from perco.serve.client import remote_owner
from perco.serve.messages import NOTIFIED, PULSE, Method, hello, read_welcome
from perco.serve.sessions import Session
from tests.component.serve.kit import WIRE, Place, quick
from tests.component.serve.spread import spread

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)
LONG_S = 20 * (WIRE.silence_s + WIRE.lease_s)
WHERE = "app.py:7 in compute"


@pytest.fixture
def place() -> Place:
    return Place(SCHEMA)


async def greeted(stream: trio.abc.Stream, greeting: Message) -> Channel:
    channel = Channel(stream, WIRE)
    await channel.greet(greeting)
    read_welcome(await channel.greeting(alone=False))
    return channel


class Client:
    """One whose loop can be held: `wake` has it read and write again."""

    def __init__(self, place: Any, name: str = "abc") -> None:
        self._place, self.name = place, name
        self.told: list[Message] = []
        self.heard = trio.Event()

    @property
    def session(self) -> Session:
        return self._place.server.sessions.all[self.name]  # type: ignore[no-any-return]

    async def begin(self) -> None:
        self.channel = await greeted(await self._place._connect(0, 0), hello(b"", self.name, ()))

    async def wake(self) -> None:
        """Until cancelled."""
        await self.channel.run(self._hear, lambda: None)

    def _hear(self, messages: list[Message]) -> None:
        self.told += messages
        self.heard.set()

    async def pulse(self, beats: Callable[[], bool] = lambda: True) -> None:
        """Say that the loop is held, as long as `beats` says so; then that it turns."""
        channel = await greeted(await self._place._connect(0, 0), hello(b"", self.name, (), pulse=True))
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(channel.run, lambda messages: None, lambda: None)
            while beats():
                channel.send((0, PULSE, (7, trio.current_time() - began + 0.1, WHERE)))
                await trio.sleep(WIRE.heartbeat_s)
            channel.send((0, PULSE, (7, 0.0, "")))
            channel.close_soon()
            await channel.closed.wait()
            nursery.cancel_scope.cancel()

    async def draws(self) -> int:
        """A start timestamp; from then on its loop is held."""
        self.told, self.heard = [], trio.Event()
        self.channel.send((1, Method.DRAW, (1, 0)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.wake)
            await self.heard.wait()
            nursery.cancel_scope.cancel()
        [(_, status, (drawn, *_))] = self.told
        assert status == OK
        return int(drawn[0])


async def test_a_client_whose_loop_is_held_keeps_its_session_and_its_connection(place: Place) -> None:  # R10 R7 R2
    async with place.served() as owner:
        client = Client(place)
        await client.begin()
        held = await client.draws()
        session, peer = client.session, client.session.peer
        until = trio.current_time() + LONG_S
        await client.pulse(lambda: trio.current_time() < until)
        assert client.session is session
        assert session.peer is peer
        assert peer is not None
        assert not peer.ended
        assert held in inside(owner).oracle.holds.open
        assert inside(owner).fates.alive(held)
        assert await client.draws() > held, "over the connection that it had"


async def test_when_the_loop_turns_again_only_the_main_connection_counts(place: Place) -> None:  # R10 R2 R7
    async with place.served() as owner:
        client = Client(place)
        await client.begin()
        held = await client.draws()
        session = client.session
        until = trio.current_time() + LONG_S
        await client.pulse(lambda: trio.current_time() < until)
        await trio.sleep(WIRE.silence_s - 0.5)
        assert session.peer is not None, "it has the time to speak"
        await trio.sleep(WIRE.silence_s)
        assert session.peer is None, "half-open"
        assert not session.ended
        await trio.sleep(2 * WIRE.lease_s)
        assert session.ended
        assert held not in inside(owner).oracle.holds.open


async def test_where_loop_and_thread_stand_still_the_session_ends(place: Place) -> None:  # R10 R7
    async with place.served() as owner, trio.open_nursery() as nursery:
        client = Client(place)
        await client.begin()
        held = await client.draws()
        stands = trio.Event()

        async def stopped() -> None:  # the connections stay open, as those of a process that was stopped
            channel = await greeted(await place._connect(0, 0), hello(b"", client.name, (), pulse=True))
            channel.send((0, PULSE, (7, 1.0, WHERE)))
            channel.flush()
            with trio.move_on_after(WIRE.heartbeat_s):
                await channel.run(lambda messages: None, lambda: None)
            stands.set()
            await trio.sleep_forever()

        nursery.start_soon(stopped)
        await stands.wait()
        assert client.session.stuck is not None
        await trio.sleep(WIRE.silence_s + 2 * WIRE.lease_s)
        assert len(place.server.sessions) == 0  # type: ignore[union-attr, arg-type]
        assert held not in inside(owner).oracle.holds.open
        nursery.cancel_scope.cancel()


async def test_a_pulse_keeps_a_session_whose_connection_has_broken(place: Place) -> None:  # R10 R7
    async with place.served() as owner:
        client = Client(place)
        await client.begin()
        held = await client.draws()
        session = client.session
        await place.break_connections()
        until = trio.current_time() + LONG_S
        await client.pulse(lambda: trio.current_time() < until)
        assert client.session is session
        assert session.peer is None
        assert held in inside(owner).oracle.holds.open


async def test_a_pulse_begins_no_session(place: Place) -> None:  # R10
    async with place.served():
        with pytest.raises(perco.Unavailable, match="has not begun here"):
            await greeted(await place._connect(0, 0), hello(b"", "stranger", (), pulse=True))
        assert not place.server.sessions.all  # type: ignore[union-attr]


async def test_a_pulse_has_to_know_the_token(place: Place) -> None:  # R10
    async with place.served() as owner:
        client = Client(place)
        await client.begin()
        server = place.server
        assert server is not None
        for token in (b"", b"another's"):
            ours, theirs = trio.testing.memory_stream_pair()

            async def serve(stream: trio.abc.Stream = theirs) -> None:
                await server.connection(stream, b"the store's")

            inside(owner).background.start(serve, "connection")
            with pytest.raises(perco.errors.WrongToken):
                await greeted(ours, hello(token, client.name, (), pulse=True))
        assert client.session.stuck is None


async def test_a_session_has_one_pulse_and_its_end_is_its_pulses(place: Place) -> None:  # R10
    async with place.served(), trio.open_nursery() as nursery:
        client = Client(place)
        await client.begin()
        channels = []
        for _ in range(3):
            channels.append(await greeted(await place._connect(0, 0), hello(b"", client.name, (), pulse=True)))
            nursery.start_soon(channels[-1].run, lambda messages: None, lambda: None)
        for channel in channels[:2]:
            await channel.closed.wait()
        server = place.server
        assert server is not None
        assert server._pulses == 1
        server.sessions.end(client.session)
        channels[2].send((0, PULSE, (7, 1.0, WHERE)))
        await channels[2].closed.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert server._pulses == 0
        assert not server._pulses_of
        nursery.cancel_scope.cancel()


async def test_pulses_take_no_place_from_other_clients() -> None:  # R10 R6
    place = Place(SCHEMA, wire=quick(WIRE, connections_max=2))
    async with place.served():
        one, two = Client(place, "one"), Client(place, "two")
        await one.begin()
        for client in (one, two):
            if client is two:
                await two.begin()
            await greeted(await place._connect(0, 0), hello(b"", client.name, (), pulse=True))
        with pytest.raises(perco.Unavailable, match="2 connections already; close some, or allow more"):
            await Client(place, "three").begin()


@pytest.mark.parametrize(
    "message",
    [
        (0, 99, (7, 1.0, "")),
        (0, PULSE, (7, 1.0)),
        (0, PULSE, 7),
        (0, PULSE, ("7", 1.0, "")),
        (0, PULSE, (7, -1.0, "")),
        (0, PULSE, (7, float("inf"), "")),
        (0, PULSE, (7, float("nan"), "")),
        (0, PULSE, (7, 1.0, b"x")),
        (0,),
    ],
)
async def test_a_pulse_that_does_not_read_ends_its_connection_alone(  # R1
    place: Place, message: Message, caplog: pytest.LogCaptureFixture
) -> None:
    async with place.served() as owner:
        client = Client(place)
        await client.begin()
        channel = await greeted(await place._connect(0, 0), hello(b"", client.name, (), pulse=True))
        channel.send(message)
        await channel.run(lambda messages: None, lambda: None)
        assert client.session.stuck is None
        await client.draws()
        inside(owner).background.check()
    assert "a pulse that cannot be decoded" in caplog.text
    assert "a bug in perco" not in caplog.text


async def test_who_holds_a_clients_loop_is_told(place: Place, caplog: pytest.LogCaptureFixture) -> None:  # R10
    async with place.served(), place.client() as asking, trio.open_nursery() as nursery:
        client = Client(place)
        await client.begin()
        over = trio.Event()

        async def hold() -> None:
            await client.pulse(lambda: not over.is_set())

        nursery.start_soon(hold)
        await trio.sleep(2 * WIRE.silence_s)
        began = trio.current_time()
        _, told = await remote_owner(asking).tasks()
        assert trio.current_time() == began, "the owner does not wait for a client that cannot answer"
        assert (told.role, told.pid) == ("client", 7)
        [task] = told.tasks
        assert task.at == WHERE
        assert task.wants.startswith("has not turned for ")
        over.set()
        await trio.sleep(2 * WIRE.heartbeat_s)
        assert len(await remote_owner(asking).tasks()) == 1
    warned = [record for record in caplog.records if "has been blocked for" in record.message]
    assert [record.levelno for record in warned] == [logging.WARNING], "once, however long it lasts"
    assert WHERE in warned[0].message


async def test_what_is_said_to_a_client_that_does_not_read_is_bounded(place: Place) -> None:  # R3
    async with place.served(), trio.open_nursery() as nursery:
        ours, theirs = trio.testing.lockstep_stream_pair()  # takes what is read, and not more
        server = place.server
        assert server is not None
        nursery.start_soon(server.connection, theirs, None)
        client = Client(place)
        client.channel = await greeted(ours, hello(b"", client.name, ()))
        await trio.testing.wait_all_tasks_blocked()
        peer = client.session.peer
        assert peer is not None
        for version in range(10_000):
            peer.push(NOTIFIED, None)
            server._announced(version)
            await trio.lowlevel.checkpoint()
        assert peer.channel.waiting_bytes < 200
        nursery.start_soon(client.wake)
        await trio.sleep(0.1)
        pushed = [message for message in client.told if message[0] != NOTIFIED]
        assert pushed[-1][2] == 9_999, "the newest of a kind arrives"
        assert len(client.told) <= 6
        nursery.cancel_scope.cancel()


async def test_a_channel_whose_other_side_takes_nothing_is_excused_as_long_as_somebody_says_so() -> None:  # R10 R3
    ours, _theirs = trio.testing.lockstep_stream_pair()
    channel = Channel(ours, WIRE)
    channel.send((b"x",))
    async with trio.open_nursery() as nursery:

        async def excuse() -> None:
            for _ in range(10):
                await trio.sleep(WIRE.silence_s - 0.5)
                assert not channel.closed.is_set()
                channel.excuse()
            excused.append(trio.current_time())

        excused: list[float] = []
        nursery.start_soon(excuse)
        with pytest.raises(Silent):
            await channel.run(lambda messages: None, lambda: None)
        assert WIRE.silence_s <= trio.current_time() - excused[0] <= 2 * WIRE.silence_s


async def test_tablet_servers_keep_the_connection_of_a_client_whose_loop_is_held() -> None:  # R10 F3
    async with spread(1) as place:
        client = Client(place)
        await client.begin()
        ticket = client.session.ticket
        [server] = place.servers.here.values()
        beside = await greeted(await place.servers.connect(1), hello(b"", ticket, ()))
        [peer] = server._serving
        until = trio.current_time() + LONG_S
        await client.pulse(lambda: trio.current_time() < until)
        assert list(server._serving) == [peer]
        with pytest.raises(perco.UsageError, match="takes no pulses"):
            await greeted(await place.servers.connect(1), hello(b"", ticket, (), pulse=True))
        await trio.sleep(2 * WIRE.silence_s)
        assert not server._serving, "R2: the loop turns, and nothing comes"
        del beside
