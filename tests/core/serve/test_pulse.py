"""A client's pulse while its loop is held, without a socket or a clock."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

import perco
from perco.clock.loopwatch import Held
from perco.errors import Unavailable, WrongToken
from perco.rpc.channel import WireOptions
from perco.rpc.framing import FrameDecoder, WireError, frame, packed
from perco.serve.messages import PULSE, read_hello, turned_away, welcome, wrong_token
from perco.serve.pulse import Pulse

WIRE = WireOptions(heartbeat_s=1.0, silence_s=4.0)
HELD = Held(2.5, "app.py:7 in compute")
WELCOME = frame([packed(welcome(False, True, {}))])


def pulse() -> Pulse:
    return Pulse(lambda: b"token", "me", WIRE, random.Random(1))


def messages(data: bytes) -> list[Any]:
    return [message for frame in FrameDecoder(1 << 16).feed(data) for message in frame]


def greeted(now: float = 0.0) -> Pulse:
    made = pulse()
    made.begin(now)
    made.received(WELCOME, now)
    return made


def test_a_connection_is_made_only_while_the_loop_is_held() -> None:  # R10
    made = pulse()
    assert not made.wants(None, 0.0)
    assert made.wants(HELD, 0.0)
    [hello] = messages(made.begin(0.0))
    said = read_hello(hello)
    assert (said.token, said.session, said.held, said.pulse) == (b"token", "me", (), True)


def test_nothing_is_said_before_the_server_has_greeted_and_then_every_heartbeat() -> None:  # R10
    made = pulse()
    made.begin(0.0)
    assert made.say(HELD, 0.1) == b""
    made.received(WELCOME[:5], 0.2)
    assert made.say(HELD, 0.2) == b""
    made.received(WELCOME[5:], 0.3)
    said = [now for now in (0.3, 0.5, 1.0, 1.29, 1.31, 2.0, 2.32) if made.say(HELD, now)]
    assert said == [0.3, 1.31, 2.32]
    made.received(frame([]), 2.4)  # the server's heartbeat
    assert messages(made.say(HELD, 3.4)) == [(0, PULSE, (os.getpid(), 2.5, "app.py:7 in compute"))]


def test_the_server_is_told_once_that_the_loop_turns_again() -> None:  # R10
    made = greeted()
    assert made.over(None), "it has been told nothing yet"
    made.say(HELD, 0.0)
    assert not made.over(HELD)
    assert not made.over(None)
    assert messages(made.say(None, 0.1)) == [(0, PULSE, (os.getpid(), 0.0, ""))], "at once"
    assert made.over(None)


def test_a_server_that_is_silent_is_given_up() -> None:  # R2
    made = greeted()
    for now in (1.5, 3.0, 4.0):
        made.say(HELD, now)
    with pytest.raises(Unavailable, match="nothing heard for 4 s"):
        made.say(HELD, 4.1)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", WireError),
        (b"\xff" * 40, WireError),
        (frame([packed(("HTTP", 1, 2))]), perco.StoreError),
        (frame([packed(turned_away(wrong_token(given=True)))]), WrongToken),
        (frame([packed(turned_away(Unavailable("no such session")))]), Unavailable),
    ],
)
def test_what_the_server_refuses_with_is_raised(data: bytes, error: type[Exception]) -> None:  # R1 R6
    made = pulse()
    made.begin(0.0)
    with pytest.raises(error):
        made.received(data, 0.1)


def test_a_server_that_is_away_is_tried_again_at_growing_intervals() -> None:  # R6
    made, now, pauses = pulse(), 0.0, []
    for _ in range(8):
        made.failed(now)
        since = now
        while not made.wants(HELD, now):
            now += 0.01
        pauses.append(now - since)
    assert 0.1 < pauses[0] < 0.3
    assert pauses[3] > pauses[1] > pauses[0]
    assert max(pauses) <= WIRE.silence_s / 2 + 0.02, "soon enough for the lease"
    made.begin(now)
    made.received(WELCOME, now)
    made.failed(now)
    assert made.wants(HELD, now + 0.26), "it was reached, so it begins anew"
