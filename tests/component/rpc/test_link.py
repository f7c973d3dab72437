"""Calls over a connection that breaks, falls silent, and comes back; time is virtual."""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from perco.errors import SessionEnded, StoreError, TooLarge, Unavailable, UsageError, WriteUnknown, WrongToken
from perco.rpc import link as link_module
from perco.rpc.channel import Channel, Silent, WireOptions
from perco.rpc.framing import WireError, frame, packed
from perco.rpc.link import Link, LostError
from perco.rpc.peer import Peer

OPTIONS = WireOptions(
    heartbeat_s=1.0,
    silence_s=4.0,
    patience_s=8.0,
    connect_s=2.0,
    calls_max=4,
    waiting_bytes_max=20_000,
    frame_bytes=1000,
)
SMALL = replace(OPTIONS, message_bytes_max=1000)
ECHO, FAIL, HOLD, BIG, BREAK, ENDED = 1, 2, 3, 4, 5, 6


class Service:
    """A server of a few methods, and what befalls its connections."""

    def __init__(self, options: WireOptions = OPTIONS) -> None:
        self.options = options
        self.kept = True
        self.away = False
        self.ended = 0  # so many calls are answered that the session has ended
        self.refuses: StoreError | None = None
        self.held: list[tuple[Peer, int, Any]] = []  # calls that are not answered yet
        self.asked: list[Any] = []
        self.tried = 0
        self.peers: list[Peer] = []
        self.streams: list[trio.abc.Stream] = []
        self.pushed: list[tuple[int, Any]] = []
        self._background: list[trio.Nursery] = []

    def handle(self, peer: Peer, id: int, method: int, arguments: Any) -> None:
        self.asked.append(arguments)
        if method == ECHO:
            peer.reply(id, arguments)
        elif method == FAIL:
            raise UsageError("write it so")
        elif method == BIG:
            peer.reply(id, b"x" * arguments)
        elif method == BREAK:
            raise WireError("it is not taken")
        elif method == ENDED and self.ended:
            self.ended -= 1
            raise SessionEnded("it has ended")
        elif method == ENDED:
            peer.reply(id, arguments)
        else:
            self.held.append((peer, id, arguments))

    async def connect(self) -> trio.abc.Stream:
        self.tried += 1
        await trio.lowlevel.checkpoint()
        if self.away:
            raise ConnectionRefusedError("nobody is there")
        ours, theirs = trio.testing.memory_stream_pair()
        self.streams.append(theirs)
        self._background[0].start_soon(self._serve, theirs)
        return ours

    async def _serve(self, stream: trio.abc.Stream) -> None:
        channel = Channel(stream, self.options)
        peer = Peer(channel, self.options, self.handle, "a client")
        self.peers.append(peer)
        try:
            await channel.greeting(alone=True)
            await channel.greet(("hello", self.kept))
            await peer.run()
        except (trio.BrokenResourceError, trio.ClosedResourceError, Silent, WireError):
            pass
        finally:
            await trio.aclose_forcefully(stream)

    def welcomed(self, message: Any) -> bool:
        if self.refuses is not None:
            raise self.refuses
        return bool(message[1])

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[Link]:
        async with trio.open_nursery() as nursery:
            self._background.append(nursery)
            link = Link(
                "the server",
                self.connect,
                lambda: ("hi",),
                self.welcomed,
                lambda what, value: self.pushed.append((what, value)),
                self.options,
                random.Random(1),
            )
            nursery.start_soon(link.run)
            yield link
            nursery.cancel_scope.cancel()

    async def break_it(self) -> None:
        for stream in self.streams:
            await trio.aclose_forcefully(stream)
        self.streams.clear()


async def quiet() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_answers_find_their_calls_in_any_order(autojump_clock: trio.testing.MockClock) -> None:  # R4
    service = Service()
    got: dict[int, Any] = {}

    async def ask(link: Link, number: int) -> None:
        got[number] = await link.call(HOLD, number, again=True)

    async with service.linked() as link:
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(ask, link, number)
            await quiet()
            for peer, id, number in random.Random(0).sample(service.held, 3):
                peer.reply(id, number * 10)
        assert got == {0: 0, 1: 10, 2: 20}
        assert await link.call(ECHO, ("a", b"b", None, 1 << 60), again=False) == ("a", b"b", None, 1 << 60)
        with pytest.raises(UsageError, match="write it so"):
            await link.call(FAIL, None, again=True)


async def test_what_waits_goes_in_one_frame(autojump_clock: trio.testing.MockClock) -> None:
    service = Service()
    async with service.linked() as link:
        await link.call(ECHO, 0, again=True)
        [stream] = service.streams
        assert isinstance(stream, trio.StapledStream)
        sent: list[int] = []
        send = stream.send_stream.send_all

        async def counted(data: bytes) -> None:
            sent.append(len(data))
            await send(data)

        stream.send_stream.send_all = counted  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(lambda number=number: link.call(ECHO, number, again=True))
    assert len(service.asked) == 21
    assert len(sent) <= 2


async def test_what_was_sent_and_not_answered_is_lost_or_asked_again(autojump_clock: trio.testing.MockClock) -> None:
    service = Service()  # R4
    ended: list[Any] = []

    async def ask(link: Link, *, again: bool) -> None:
        try:
            ended.append(await link.call(HOLD, again, again=again))
        except LostError:
            ended.append("lost")

    async with service.linked() as link, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: ask(link, again=False))
        nursery.start_soon(lambda: ask(link, again=True))
        await quiet()
        await service.break_it()
        await quiet()
        await link.connected.wait()
        await quiet()
        assert ended == ["lost"]
        assert sorted(service.asked) == [False, True, True]  # the one only once
        peer, id, _ = service.held[-1]
        peer.reply(id, "answered")
    assert ended == ["lost", "answered"]


async def test_when_nothing_is_held_any_more_what_needs_it_ends(autojump_clock: trio.testing.MockClock) -> None:  # R5
    service = Service()
    ended: list[Any] = []

    async def ask(link: Link, *, held: bool) -> None:
        try:
            ended.append(await link.call(HOLD, held, again=True, held=held))
        except SessionEnded:
            ended.append("ended")

    async with service.linked() as link, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: ask(link, held=True))
        nursery.start_soon(lambda: ask(link, held=False))
        await quiet()
        service.kept = False
        await service.break_it()
        await quiet()
        await link.connected.wait()
        await quiet()
        assert ended == ["ended"]
        peer, id, held = service.held[-1]
        assert held is False
        peer.reply(id, "answered")
    assert ended == ["ended", "answered"]


async def test_a_call_of_a_session_that_has_ended_is_asked_again_in_the_next(
    autojump_clock: trio.testing.MockClock,
) -> None:  # R5
    service = Service()
    async with service.linked() as link:
        service.ended = 3
        assert await link.call(ENDED, "a question", again=True) == "a question"
        assert (link.connections, service.ended) == (4, 0)
        service.ended = 1
        with pytest.raises(SessionEnded, match="it has ended"):
            await link.call(ENDED, "a read", again=True, held=True)
        assert await link.call(ECHO, 1, again=True) == 1
        assert link.connections == 5, "the next session has begun"


async def test_a_server_may_end_a_commit_or_leave_a_read_to_another_and_keep_the_session(
    autojump_clock: trio.testing.MockClock,
) -> None:  # R5 F3
    service = Service()
    async with service.linked() as link:
        service.ended = 2
        with pytest.raises(SessionEnded, match="it has ended"):
            await link.call(ENDED, "a commit", again=False)
        with pytest.raises(SessionEnded, match="it has ended"):
            await link.call(ENDED, "a read", again=True, here=True)
        assert (link.connections, service.ended) == (1, 0)


async def test_a_server_that_ends_every_session_is_not_asked_for_ever(
    autojump_clock: trio.testing.MockClock,
) -> None:  # R5
    """Others that wait meanwhile do not suffer for it."""
    service = Service()
    async with service.linked() as link, trio.open_nursery() as nursery:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await link.call(HOLD, "a question", again=True))

        nursery.start_soon(ask)
        await quiet()
        service.ended = 1000
        with pytest.raises(SessionEnded, match="it has ended"):
            await link.call(ENDED, "another", again=True)
        assert service.ended == 1000 - 8
        await trio.sleep(OPTIONS.silence_s)
        assert len(service.held) == 9
        peer, id, _ = service.held[-1]
        peer.reply(id, "answered")
        await quiet()
        assert answers == ["answered"]


@pytest.mark.parametrize("answered", [True, False])
async def test_a_connection_of_an_ended_session_lasts_until_no_commit_is_in_flight(
    answered: bool, autojump_clock: trio.testing.MockClock
) -> None:  # R4 R5
    service = Service()
    async with service.linked() as link, trio.open_nursery() as nursery:
        found: list[Any] = []

        async def commit() -> None:
            try:
                found.append(await link.call(HOLD, "a commit", again=False))
            except SessionEnded as error:
                found.append(error.args[0])

        async def ask() -> None:
            found.append(await link.call(ENDED, "a question", again=True))

        nursery.start_soon(commit)
        await quiet()
        service.ended = 1
        nursery.start_soon(ask)
        await trio.sleep(OPTIONS.silence_s / 2)
        assert (found, link.connections) == ([], 1)
        [(peer, id, _)] = service.held
        if answered:
            peer.reply(id, "committed")
        else:
            peer.fail(id, SessionEnded("it has ended"))
        await trio.sleep(1)
        assert found == ["committed" if answered else "it has ended", "a question"]
        assert link.connections == 2


async def test_a_call_whose_answer_does_not_read_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:  # R4
    service = Service()
    unpack, times = link_module.unpack_error, 1

    def once_malformed(value: Any) -> Exception:
        nonlocal times
        if times:
            times -= 1
            raise ValueError("it does not read")
        return unpack(value)

    monkeypatch.setattr(link_module, "unpack_error", once_malformed)
    async with service.linked() as link:
        with pytest.raises(UsageError, match="write it so"):
            await link.call(FAIL, None, again=True)
        assert (link.connections, times) == (2, 0)
        times = 1
        with pytest.raises(LostError):
            await link.call(FAIL, None, again=False)
        times = 1000
        with pytest.raises(Unavailable, match="8 connections in a row"):
            await link.call(FAIL, None, again=True)
        assert times == 1000 - 8


async def test_a_server_that_is_away_is_waited_for_and_then_told(autojump_clock: trio.testing.MockClock) -> None:  # R6
    service = Service()
    async with service.linked() as link:
        assert await link.call(ECHO, 1, again=True) == 1
        service.away = True
        await service.break_it()
        await quiet()
        began = trio.current_time()
        with pytest.raises(Unavailable, match="nobody is there"):
            await link.call(ECHO, 2, again=True)
        assert trio.current_time() - began <= OPTIONS.patience_s + 1
        # One task tries, at growing intervals, however many wait.
        tried = service.tried
        await trio.sleep(100)
        assert 60 <= service.tried - tried <= 220
        with pytest.raises(Unavailable):  # at once: it has been away for long
            await link.call(ECHO, 3, again=True)
        service.away = False
        await trio.sleep(3)
        assert await link.call(ECHO, 4, again=True) == 4


async def test_calls_made_while_it_is_away_are_sent_when_it_is_back(autojump_clock: trio.testing.MockClock) -> None:
    service = Service()
    service.away = True
    async with service.linked() as link, trio.open_nursery() as nursery:
        got: list[Any] = []

        async def ask(number: int) -> None:
            got.append(await link.call(ECHO, number, again=False))

        for number in range(5):
            nursery.start_soon(ask, number)
        await trio.sleep(2)
        service.away = False
    assert sorted(got) == list(range(5))


async def test_who_is_refused_is_told_and_makes_no_storm(autojump_clock: trio.testing.MockClock) -> None:  # R6
    service = Service()
    service.refuses = WrongToken("it lies in the folder")
    async with service.linked() as link:
        for _ in range(3):
            with pytest.raises(WrongToken, match="in the folder"):
                await link.call(ECHO, 1, again=True)
        tried = service.tried
        assert tried <= 4
        await trio.sleep(1000)
        assert service.tried == tried
        service.refuses = None
        assert await link.call(ECHO, 2, again=True) == 2


async def test_cancelled_it_is_forgotten_or_waited_for(autojump_clock: trio.testing.MockClock) -> None:  # R4 T10
    service = Service()
    async with service.linked() as link:
        await link.call(ECHO, 0, again=True)
        with trio.move_on_after(1) as scope:
            await link.call(HOLD, 1, again=True)
        assert scope.cancelled_caught
        peer, id, _ = service.held.pop()
        peer.reply(id, "late")  # nobody minds
        answers: list[Any] = []

        async def shielded() -> None:
            with trio.move_on_after(1):
                answers.append(await link.call(HOLD, 2, again=False))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(shielded)
            await trio.sleep(3)
            assert not answers
            peer, id, _ = service.held.pop()
            peer.reply(id, "told")
        assert answers == ["told"]
        assert not link._calls


async def test_a_silent_side_is_taken_for_gone(autojump_clock: trio.testing.MockClock) -> None:  # R2
    service = Service()
    async with service.linked() as link:
        await link.call(ECHO, 0, again=True)
        await trio.sleep(100)
        assert link.connections == 1  # heartbeats
        service.peers[0].channel._write = trio.sleep_forever  # type: ignore[method-assign]
        stream = service.streams[0]
        assert isinstance(stream, trio.StapledStream)
        held = trio.Event()
        stream.send_stream.send_all_hook = held.wait  # type: ignore[attr-defined]
        with pytest.raises(LostError):
            await link.call(HOLD, 1, again=False)
        assert link.connections >= 1


async def test_a_server_stops_reading_before_it_drowns(autojump_clock: trio.testing.MockClock) -> None:  # R3
    service = Service()
    async with service.linked() as link, trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(lambda number=number: link.call(HOLD, number, again=True))
            await quiet()
        assert len(service.held) <= OPTIONS.calls_max
        answered = 0
        while answered < 50:
            peer, id, _ = service.held.pop()
            peer.reply(id, None)
            answered += 1
            await quiet()
            assert peer.calls <= OPTIONS.calls_max


async def test_a_client_that_does_not_take_its_answers_holds_up_itself_alone() -> None:  # R3
    service = Service()
    ours, theirs = trio.testing.lockstep_stream_pair()
    channel = Channel(theirs, service.options)
    peer = Peer(channel, service.options, service.handle, "a client")
    asked = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.run)

        async def ask() -> None:
            nonlocal asked
            while True:
                await ours.send_all(frame([packed((asked + 1, BIG, 3000))]))
                asked += 1

        nursery.start_soon(ask)
        await quiet()
        # One answer is on its way, and so many wait as fill what may; then nothing more is read.
        assert channel.waiting_bytes <= OPTIONS.waiting_bytes_max + 2 * 3100
        assert asked <= 12
        nursery.cancel_scope.cancel()


async def test_an_answer_that_is_too_long_is_told(autojump_clock: trio.testing.MockClock) -> None:  # R1
    service = Service(WireOptions(message_bytes_max=1000, frame_bytes=1000))
    async with service.linked() as link:
        with pytest.raises(TooLarge, match="reply"):
            await link.call(BIG, 2000, again=True)
        with pytest.raises(TooLarge):
            await link.call(ECHO, b"x" * 2000, again=True)
        assert await link.call(ECHO, 1, again=True) == 1
        assert link.connections == 1


UNSENDABLE: list[tuple[Any, type[Exception]]] = [
    (b"x" * 2000, TooLarge),
    (object(), TypeError),
    ("\ud800", ValueError),
    (1 << 80, OverflowError),
]


@pytest.mark.parametrize(("arguments", "error"), UNSENDABLE)
async def test_a_call_that_cannot_be_sent_ends_alone_though_the_server_was_away(
    autojump_clock: trio.testing.MockClock, arguments: Any, error: type[Exception]
) -> None:  # R1 R6
    service = Service(SMALL)
    service.away = True
    raised: list[Exception] = []
    got: list[Any] = []

    async def too_much(link: Link) -> None:
        with pytest.raises(error) as caught:
            await link.call(ECHO, arguments, again=True)
        raised.append(caught.value)

    async def ask(link: Link) -> None:
        got.append(await link.call(HOLD, 1, again=True))

    async with service.linked() as link, trio.open_nursery() as nursery:
        nursery.start_soon(too_much, link)
        nursery.start_soon(ask, link)
        await quiet()
        service.away = False
        await trio.sleep(1)
        assert len(raised) == 1
        await service.break_it()
        await trio.sleep(1)
        assert link.refused is None
        assert await link.call(ECHO, 2, again=True) == 2
        peer, id, _ = service.held[-1]
        peer.reply(id, "answered")
    assert got == ["answered"]


@pytest.mark.parametrize(("grown", "error"), UNSENDABLE)
async def test_a_call_that_cannot_be_sent_again_ends_alone(
    autojump_clock: trio.testing.MockClock, grown: Any, error: type[Exception]
) -> None:  # R1 R4
    service = Service(SMALL)
    got: list[Any] = []

    async def ask(link: Link, arguments: list[Any]) -> None:
        try:
            got.append(await link.call(HOLD, arguments, again=True))
        except error as raised:
            got.append(type(raised))

    async with service.linked() as link, trio.open_nursery() as nursery:
        several: list[list[Any]] = [[1], [2], [3]]
        for arguments in several:
            nursery.start_soon(ask, link, arguments)
        await quiet()
        assert len(service.held) == 3
        several[1][0] = grown
        await service.break_it()
        await trio.sleep(1)
        assert link.refused is None
        assert len(got) == 1
        assert issubclass(got[0], error)
        for peer, id, arguments in service.held[3:]:
            peer.reply(id, arguments)
    assert sorted(got[1:]) == [(1,), (3,)]


def test_a_call_that_is_interrupted_before_it_waits_is_forgotten() -> None:  # T10
    service = Service()

    class Calls(dict[int, Any]):
        def __setitem__(self, id: int, call: Any) -> None:
            super().__setitem__(id, call)
            signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        async with service.linked() as link:
            await link.call(ECHO, 0, again=True)
            link._calls = Calls()
            with pytest.raises(KeyboardInterrupt):
                await link.call(HOLD, 1, again=True)
            assert not link._calls
            link._calls = {}
            await quiet()
            peer, id, _ = service.held.pop()
            peer.reply(id, "late")  # nobody minds
            assert await link.call(ECHO, 2, again=True) == 2
            assert link.connections == 1

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("writes", [False, True])
async def test_a_call_that_ends_every_connection_is_given_up(
    autojump_clock: trio.testing.MockClock, writes: bool
) -> None:  # R4
    service = Service()
    async with service.linked() as link:
        began = trio.current_time()
        with pytest.raises(WriteUnknown if writes else Unavailable, match="8 connections in a row"):
            await link.call(BREAK, None, again=True, writes=writes)
        assert service.asked == [None] * 8
        assert trio.current_time() < began + OPTIONS.patience_s
        assert await link.call(ECHO, 1, again=True) == 1


@pytest.mark.parametrize("last", [False, True], ids=["that answer others", "that last"])
async def test_a_call_that_waits_for_long_outlives_connections(
    last: bool, autojump_clock: trio.testing.MockClock
) -> None:  # R4
    service = Service()
    got: list[Any] = []

    async def ask(link: Link) -> None:
        got.append(await link.call(HOLD, 1, again=True))

    async with service.linked() as link, trio.open_nursery() as nursery:
        nursery.start_soon(ask, link)
        for number in range(20):
            if last:
                await trio.sleep(OPTIONS.silence_s + 2)
            else:
                assert await link.call(ECHO, number, again=True) == number
            await service.break_it()
            await quiet()
        assert not got
        await link.connected.wait()
        await quiet()
        peer, id, _ = service.held[-1]
        peer.reply(id, "answered")
    assert got == ["answered"]


async def test_many_things_that_are_told_go_in_several_messages(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # R1
    monkeypatch.setattr("perco.rpc.link._MERGED_MAX", 3)
    service = Service()
    async with service.linked() as link:
        await link.call(ECHO, 0, again=True)
        for item in range(8):
            link.tell_merged(HOLD, item)
        await link.call(ECHO, 1, again=True)
    assert sorted(service.asked[1:-1]) == [(0, 1, 2), (3, 4, 5), (6, 7)]


async def test_what_is_pushed_arrives(autojump_clock: trio.testing.MockClock) -> None:
    service = Service()
    async with service.linked() as link:
        await link.call(ECHO, 0, again=True)
        service.peers[0].push(1, "news")
        await quiet()
        assert service.pushed == [(1, "news")]


BAD: list[Callable[[], bytes]] = [
    lambda: frame([packed(("x",))]),
    lambda: frame([packed(("x", 1, 2))]),
    lambda: frame([packed((1, "x", 2))]),
    lambda: b"\xff\xff\xff\xff",
    lambda: b"\x00\x00\x00\x01\xc1",
]


@pytest.mark.parametrize("bad", BAD)
async def test_a_server_ends_the_connection_of_who_sends_rubbish(bad: Callable[[], bytes]) -> None:  # R1
    service = Service()
    ours, theirs = trio.testing.memory_stream_pair()
    peer = Peer(Channel(theirs, service.options), service.options, service.handle, "a client")
    await ours.send_all(bad())
    with pytest.raises(WireError):
        await peer.run()
    assert not service.asked
