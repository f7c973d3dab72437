"""How messages leave: in frames of a few, after a window, by a socket that takes what it can. Time is virtual."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from perco.errors import UsageError
from perco.rpc.channel import Channel, Flusher, Silent, WireOptions
from perco.rpc.framing import FrameDecoder, Message, frame, packed
from tests.component.rpc.test_link import ECHO, HOLD, OPTIONS, Service, quiet

NEVER: Callable[[], None] = lambda: None  # noqa: E731


class Other:
    """The other side, which reads frames and says when each came."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.frames: list[tuple[float, list[Message]]] = []

    async def run(self) -> None:
        decoder = FrameDecoder(1 << 24)
        while data := await self.stream.receive_some(1 << 16):
            self.frames += [(trio.current_time(), messages) for messages in decoder.feed(data) if messages]

    @property
    def messages(self) -> list[Message]:
        return [message for _, messages in self.frames for message in messages]


@asynccontextmanager
async def between(
    options: WireOptions, received: Callable[[list[Message]], None] = lambda messages: None
) -> AsyncIterator[tuple[Channel, Other]]:
    """A channel, and what it says."""
    ours, theirs = trio.testing.memory_stream_pair()
    channel, other = Channel(ours, options), Other(theirs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.run, received, NEVER)
        nursery.start_soon(other.run)
        await quiet()
        yield channel, other
        nursery.cancel_scope.cancel()


def message(number: int) -> Message:
    return (number, "x")


# ------------------------------------------------------------------ frames


async def test_a_frame_holds_a_few_messages(autojump_clock: trio.testing.MockClock) -> None:
    async with between(WireOptions(frame_messages=3)) as (channel, other):
        for number in range(8):
            channel.send(message(number))
        await quiet()
        assert [len(messages) for _, messages in other.frames] == [3, 3, 2]
        assert other.messages == [message(number) for number in range(8)]
        assert channel.waiting_bytes == 0


async def test_while_frames_are_worked_at_what_was_answered_leaves(autojump_clock: trio.testing.MockClock) -> None:
    answered: list[int] = []

    def received(messages: list[Message]) -> None:
        answered.append(len(other.frames))
        channel.send(messages[0])

    async with between(WireOptions(), received) as (channel, other):
        await other.stream.send_all(b"".join(frame([packed(message(number))]) for number in range(20)))
        await quiet()
        assert len(other.frames) > 5
        assert answered[-1] > 0  # some had left, when the last was worked at


# ------------------------------------------------------------------ tells go before calls


async def test_what_is_told_of_many_goes_in_one_message_before_later_calls(
    autojump_clock: trio.testing.MockClock,
) -> None:  # R4
    service = Service()
    async with service.linked() as link:
        await link.call(ECHO, 0, again=True)
        service.asked.clear()
        for number in range(5):
            link.tell_merged(HOLD, number)
        assert link._channel is not None
        link._channel.send((99, ECHO, "later"))
        await quiet()
        assert service.asked == [(0, 1, 2, 3, 4), "later"]


async def test_what_is_told_alone_is_sent(autojump_clock: trio.testing.MockClock) -> None:
    service = Service()
    async with service.linked() as link:
        await link.call(ECHO, 0, again=True)
        await quiet()
        service.asked.clear()
        began = trio.current_time()
        link.tell_merged(HOLD, 7)
        await quiet()
        assert service.asked == [(7,)]
        assert trio.current_time() == began  # and not with the next heartbeat


async def test_what_was_told_of_a_broken_connection_is_not_said_on_the_next(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # R4
    service = Service()
    async with service.linked() as link:
        await link.call(ECHO, 0, again=True)
        service.asked.clear()
        assert link._channel is not None
        monkeypatch.setattr(link._channel, "_send", _stuck)
        link.tell(HOLD, "does not arrive")
        await quiet()
        link.tell_merged(HOLD, 7)
        await service.break_it()
        await quiet()
        await link.connected.wait()
        assert link.connections == 2
        await quiet()
        assert service.asked == []  # the greeting has said what is so
        link.tell_merged(HOLD, 8)
        await quiet()
        assert service.asked == [(8,)]


async def _stuck(data: bytes) -> None:
    await trio.sleep_forever()


# ------------------------------------------------------------------ silence


async def test_who_did_not_run_for_a_while_does_not_take_the_other_for_silent(
    mock_clock: trio.testing.MockClock,
) -> None:
    """R2: messages that had come meanwhile are read first."""
    heard: list[Any] = []
    async with between(OPTIONS, heard.extend) as (channel, other):
        for _ in range(5):
            mock_clock.jump(OPTIONS.silence_s * 2)  # this process was stopped
            await other.stream.send_all(frame([packed(message(1))]))
            await quiet()
            assert not channel.closed.is_set()
        assert len(heard) == 5


async def test_who_is_not_listened_to_is_not_silent(autojump_clock: trio.testing.MockClock) -> None:  # R2 R3
    wait = trio.Event()
    ours, theirs = trio.testing.memory_stream_pair()
    channel, other = Channel(ours, OPTIONS), Other(theirs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.run, lambda messages: None, lambda: None if wait.is_set() else wait)
        nursery.start_soon(other.run)
        await trio.sleep(3 * OPTIONS.silence_s)
        wait.set()
        await trio.sleep(OPTIONS.silence_s - 1)
        assert not channel.closed.is_set()
        nursery.cancel_scope.cancel()


async def test_who_has_much_to_work_at_does_not_take_the_other_for_silent(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # R2
    """Each turn takes its time, for others have theirs."""
    worked: list[Message] = []
    async with between(OPTIONS, worked.extend) as (channel, other):
        await other.stream.send_all(b"".join(frame([packed(message(number))]) for number in range(30)))
        monkeypatch.setattr(trio.lowlevel, "checkpoint", _slow_turn)
        await trio.sleep(30.5)
        monkeypatch.undo()
        assert len(worked) == 30
        assert not channel.closed.is_set()


async def _slow_turn() -> None:
    await trio.sleep(1)


async def test_a_heartbeat_comes_before_one_is_taken_for_silent() -> None:  # R2
    with pytest.raises(UsageError, match="heartbeat_s is 10; it must be above 0, and less than silence_s"):
        WireOptions(heartbeat_s=10, silence_s=10)


async def test_no_frame_is_longer_than_a_message_may_be() -> None:  # R1
    with pytest.raises(UsageError, match="frame_bytes is 1048576; it must be at most"):
        WireOptions(message_bytes_max=1000)


# ------------------------------------------------------------------ sockets


@asynccontextmanager
async def sockets(
    options: WireOptions, *, flushed: bool = True
) -> AsyncIterator[tuple[Channel, trio.SocketStream, Flusher]]:
    """A channel over a socket that takes little at a time, and the other end of it."""
    ours, theirs = trio.socket.socketpair()
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    flusher = Flusher()
    stream = trio.SocketStream(ours)
    async with stream, trio.SocketStream(theirs) as other, trio.open_nursery() as nursery:
        nursery.start_soon(flusher.run)
        yield Channel(stream, options, flusher.soon if flushed else None), other, flusher
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("flushed", [True, False])
async def test_what_a_socket_does_not_take_at_once_follows_in_order(flushed: bool) -> None:
    """And a heartbeat does not come in between."""
    sizes = [10, 300_000, 20, 5, 1_000_000, 7, 0] * 3
    options = replace(OPTIONS, message_bytes_max=1 << 21, frame_bytes=1 << 20)
    async with sockets(options, flushed=flushed) as (channel, theirs, _):
        other = Other(theirs)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(channel.run, lambda messages: channel.send(("answer",)), NEVER)
            await quiet()
            for i, size in enumerate(sizes):
                channel.send((i, b"x" * size))
                if i % 3 == 0:
                    await quiet()  # the first of it has left; nobody takes the rest
                    channel.flush()
                if i == 10:
                    await theirs.send_all(frame([packed(("ask",))]))  # answered from the task that reads
            assert channel.waiting_bytes > 1_000_000
            nursery.start_soon(other.run)
            with trio.fail_after(30):
                while channel.waiting_bytes:
                    await trio.lowlevel.checkpoint()
            await quiet()
            nursery.cancel_scope.cancel()
        assert [message for message in other.messages if message != ("answer",)] == [
            (i, b"x" * size) for i, size in enumerate(sizes)
        ]
        assert other.messages.count(("answer",)) == 1


async def test_what_is_told_goes_before_what_is_said_meanwhile() -> None:  # R4
    async with sockets(WireOptions(), flushed=False) as (channel, theirs, _), trio.open_nursery() as nursery:
        other, told = Other(theirs), [("told",)]
        channel.leaving = lambda: channel.send_first(told.pop()) if told else None
        nursery.start_soon(channel.run, lambda messages: channel.send(("answer",)), NEVER)
        nursery.start_soon(other.run)
        await theirs.send_all(frame([packed(("ask",))]))
        with trio.fail_after(30):
            while len(other.messages) < 2:
                await trio.lowlevel.checkpoint()
        assert other.messages == [("told",), ("answer",)]
        nursery.cancel_scope.cancel()


async def test_the_rest_of_an_answer_follows() -> None:
    options = WireOptions(heartbeat_s=1e7, silence_s=1e8)
    async with sockets(options) as (channel, theirs, _), trio.open_nursery() as nursery:
        other = Other(theirs)
        nursery.start_soon(channel.run, lambda messages: None, NEVER)
        await quiet()
        for _ in range(3):
            channel.send((b"x" * 900_000,))
        await quiet()  # some of it has left
        nursery.start_soon(other.run)
        with trio.fail_after(30):
            while len(other.messages) < 3:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_what_comes_right_behind_a_greeting_is_kept(autojump_clock: trio.testing.MockClock) -> None:  # R4
    ours, theirs = trio.testing.memory_stream_pair()
    heard: list[Message] = []
    news = frame([packed(message(1))]) + frame([packed(message(2))])
    await theirs.send_all(frame([packed(("welcome",))]) + news[:-3])
    channel = Channel(ours, OPTIONS)
    assert await channel.greeting(alone=False) == ("welcome",)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.run, heard.extend, NEVER)
        await quiet()
        assert heard == [message(1)]
        await theirs.send_all(news[-3:])
        await quiet()
        assert heard == [message(1), message(2)]
        nursery.cancel_scope.cancel()


async def test_what_a_large_message_took_is_given_back(autojump_clock: trio.testing.MockClock) -> None:  # R3
    async with between(WireOptions()) as (channel, _):
        pack = channel._pack
        channel.send(message(1))
        assert channel._pack is pack
        channel.send((1, b"x" * (1 << 20)))
        assert channel._pack is not pack


async def test_a_socket_of_which_nothing_is_taken_is_given_up(autojump_clock: trio.testing.MockClock) -> None:  # R3
    async with sockets(OPTIONS) as (channel, theirs, _), trio.open_nursery() as nursery:
        nursery.start_soon(_chatter, theirs)
        channel.send((b"x" * 1_000_000,))
        began = trio.current_time()
        with trio.fail_after(10 * OPTIONS.silence_s), pytest.raises(Silent, match="accepted no data"):
            await channel.run(lambda messages: None, NEVER)
        assert OPTIONS.silence_s <= trio.current_time() - began <= 2 * OPTIONS.silence_s
        nursery.cancel_scope.cancel()


async def test_who_stood_still_looks_once_more(mock_clock: trio.testing.MockClock) -> None:  # R2 R3
    """The other side has taken all of it meanwhile."""
    async with sockets(OPTIONS) as (channel, theirs, _), trio.open_nursery() as nursery:
        nursery.start_soon(channel.run, lambda messages: None, NEVER)
        await quiet()
        channel.send((b"x" * 100_000,))
        await quiet()
        taken = 0
        while taken < 100_000:
            mock_clock.jump(2 * OPTIONS.silence_s)
            taken += len(os.read(theirs.socket.fileno(), 1 << 20))  # at the same time
            os.write(theirs.socket.fileno(), frame([]))
            await quiet()
        assert not channel.closed.is_set()
        nursery.cancel_scope.cancel()


async def test_what_is_taken_at_the_last_moment_is_taken(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # R3
    async with sockets(OPTIONS) as (channel, theirs, _), trio.open_nursery() as nursery:
        taken = 0

        async def late(fd: int) -> None:
            nonlocal taken
            try:
                await trio.sleep_forever()
            finally:
                taken += len(os.read(theirs.socket.fileno(), 1 << 20))

        monkeypatch.setattr(trio.lowlevel, "wait_writable", late)
        nursery.start_soon(_chatter, theirs)
        nursery.start_soon(channel.run, lambda messages: None, NEVER)
        channel.send((b"x" * 30_000,))
        await channel.drain().wait()
        assert taken
        nursery.cancel_scope.cancel()


async def test_what_is_said_at_the_same_time_leaves_in_one_frame() -> None:
    async with sockets(WireOptions()) as (channel, theirs, _), trio.open_nursery() as nursery:
        other = Other(theirs)
        nursery.start_soon(channel.run, lambda messages: None, NEVER)
        nursery.start_soon(other.run)
        await quiet()
        for number in range(5):
            channel.send(message(number))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert [len(messages) for _, messages in other.frames] == [5]
        nursery.cancel_scope.cancel()


async def test_a_socket_that_takes_nothing_any_more_breaks() -> None:
    """Though there is nothing to be read that would say so."""
    async with sockets(WireOptions()) as (channel, theirs, _), trio.open_nursery() as nursery:
        theirs.socket.shutdown(socket.SHUT_RD)

        async def run() -> None:
            with pytest.raises(trio.BrokenResourceError, match="the connection broke"):
                await channel.run(lambda messages: None, NEVER)

        nursery.start_soon(run)
        await quiet()
        channel.send(message(1))
        with trio.fail_after(30):
            await channel.closed.wait()


async def test_a_socket_that_is_not_read_is_given_up(autojump_clock: trio.testing.MockClock) -> None:  # R3
    """Its task waits for what never comes; the socket takes nothing more."""
    ours, theirs = trio.testing.memory_stream_pair()
    channel = Channel(trio.StapledStream(_Stuck(), ours.receive_stream), OPTIONS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_chatter, theirs)
        channel.send(message(1))
        with pytest.raises(Silent, match="accepted no data"):
            await channel.run(lambda messages: None, NEVER)
        nursery.cancel_scope.cancel()


class _Stuck(trio.abc.SendStream):
    async def send_all(self, data: Any) -> None:
        await trio.sleep_forever()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.sleep_forever()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def _chatter(stream: trio.abc.Stream) -> None:
    while True:
        await trio.sleep(1)
        await stream.send_all(frame([]))
