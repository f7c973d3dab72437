"""Frames, however they are cut, and whatever else comes (R1)."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given, strategies as st

from perco.rpc import framing
from perco.rpc.framing import FrameDecoder, Message, WireError, frame, packed

ATOMS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.binary(max_size=40) | st.text(max_size=20)
VALUES = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=12)
MESSAGES = st.lists(VALUES, min_size=1, max_size=4).map(tuple)
MAX = 1 << 16


def decoded(data: bytes, cuts: list[int]) -> list[list[Message]]:
    decoder = FrameDecoder(MAX)
    found = []
    ends = sorted(cut % (len(data) + 1) for cut in cuts)
    for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
        found += list(decoder.feed(data[start:end]))
    assert not decoder.inside
    return found


@given(st.lists(st.lists(MESSAGES, max_size=5), max_size=5), st.lists(st.integers(0, 1 << 20), max_size=8))
def test_frames_come_out_as_they_went_in_wherever_they_are_cut(frames: list[list[Message]], cuts: list[int]) -> None:
    data = b"".join(frame([packed(message) for message in messages]) for messages in frames)
    assert decoded(data, cuts) == frames


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5))
def test_garbage_is_told_or_waits_for_more(data: bytes, cuts: list[int]) -> None:  # R1
    decoder = FrameDecoder(1 << 10)
    with contextlib.suppress(WireError):
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
            for messages in decoder.feed(data[start:end]):
                assert all(type(message) is tuple and message for message in messages)


@given(st.binary(max_size=200))
def test_a_frame_of_any_bytes_reads_or_is_told(body: bytes) -> None:  # R1
    with contextlib.suppress(WireError):
        [messages] = FrameDecoder(MAX).feed(framed(body))
        assert all(type(message) is tuple and message for message in messages)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def test_a_longer_frame_is_told_before_it_has_come() -> None:  # R1
    with pytest.raises(WireError, match="at most 65536"):
        list(FrameDecoder(MAX).feed((MAX + 1).to_bytes(4, "big")))


def test_a_frame_of_the_limit_is_taken() -> None:
    message = (b"x" * (MAX - 9),)
    data = frame([packed(message)])
    assert len(data) > MAX - 4
    assert list(FrameDecoder(MAX).feed(data)) == [[message]]


ONE = packed((1,))


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000 + b"\x00",  # nested
        b"\x91\x90",  # a message of nothing
        b"\x91\x05",
        b"\x05",
        b"\x91\x92\x01",  # cut
        b"\x92" + ONE,
        b"\x91" + ONE + ONE,  # and more
        b"\x91\xc1",  # what msgpack never writes
        b"\x91\x91\xa1\xff",  # no UTF-8
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
        msgpack.packb({1: 2}),
        b"",
    ],
    ids=[
        *("deep", "empty", "number", "no array", "cut", "fewer", "more", "reserved", "text", "huge", "map", "nothing"),
    ],
)
def test_what_is_no_array_of_plain_things_is_told(body: bytes) -> None:  # R1
    decoder = FrameDecoder(1 << 20)
    good = frame([packed((1, 2))])
    found = decoder.feed(good + framed(body) + good)
    assert next(found) == [(1, 2)]
    with pytest.raises(WireError):
        next(found)


def test_nothing_of_a_frame_that_breaks_is_delivered() -> None:  # R1
    with pytest.raises(WireError):
        list(FrameDecoder(MAX).feed(framed(b"\x92" + packed((1, 2)) + b"\xc1")))


# ------------------------------------------------------------------ how much a frame may hold


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize(
    "found",
    [
        ((0,) * 101,),
        ((1, (0,) * 50), (2, (0,) * 50)),
        (((),) * 101,),
        tuple((number,) for number in range(51)),
        (1, [[(0,) * 9] * 10] * 2),
    ],
    ids=["flat", "messages", "nothing", "messages of one", "nested"],
)
def test_a_frame_of_too_many_elements_is_told(found: object, maps: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # R1
    monkeypatch.setattr(framing, "ELEMENTS_MAX", 100)
    body = msgpack.packb((found, (1, b"x" * 100)))
    with pytest.raises(WireError, match="100"):
        list(FrameDecoder(MAX, maps=maps).feed(framed(body)))


def test_a_frame_of_so_many_elements_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:  # R1
    monkeypatch.setattr(framing, "ELEMENTS_MAX", 100)
    messages = [(1, b"x" * 500), ((0,) * 95,)]
    assert list(FrameDecoder(MAX, maps=False).feed(frame([packed(message) for message in messages]))) == [messages]


def test_the_elements_of_maps_count(monkeypatch: pytest.MonkeyPatch) -> None:  # R1
    monkeypatch.setattr(framing, "ELEMENTS_MAX", 100)
    few, many = (({1: 2},) * 30, b"x" * 100), (({1: 2},) * 60, b"x" * 100)
    assert list(FrameDecoder(MAX).feed(frame([packed(few)]))) == [[few]]
    with pytest.raises(WireError, match="more than 100 elements"):
        list(FrameDecoder(MAX).feed(frame([packed(many)])))


@pytest.mark.parametrize("map", [{}, {0: 0}, {1: {}}])
@pytest.mark.parametrize("size", [0, 200])
def test_maps_are_told_where_none_are_sent(map: object, size: int, monkeypatch: pytest.MonkeyPatch) -> None:  # R1
    monkeypatch.setattr(framing, "ELEMENTS_MAX", 100)
    data = frame([packed((1, (map,), b"x" * size))])
    with pytest.raises(WireError, match="map"):
        list(FrameDecoder(MAX, maps=False).feed(data))
    assert list(FrameDecoder(MAX).feed(data)) == [[(1, (map,), b"x" * size)]]


def test_arrays_that_begin_and_do_not_end_are_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:  # R1
    """Some releases of msgpack make room for all of them."""
    monkeypatch.setattr(msgpack, "unpackb", None)
    with pytest.raises(WireError, match="OutOfData"):
        list(FrameDecoder(MAX).feed(framed(b"\xdc\xea\x60" * 500 + b"\x00" * 60_000)))
