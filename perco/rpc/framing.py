"""Frames: how messages are laid out in a stream of bytes. No I/O.

    frame = length (4 bytes, big-endian) | an array of messages, in msgpack; a message is an array

A frame carries all waiting messages, so messages that one side sends while the other is busy cost one read, not many.

R1  Frames and messages have a size limit. If a frame is longer, holds more elements than `ELEMENTS_MAX`, is not
    msgpack, is nested too deeply, or is not an array, the connection ends before any part of the frame is acted on. The
    same holds for a map, if the receiver accepts none: an array of small maps takes eighty times its size in memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgpack

Message = tuple[Any, ...]

_LENGTH: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">IBH")
HEAD_BYTES: Final = _HEAD.size
MESSAGES_MAX: Final = (1 << 16) - 1  # in a frame
GREETING_BYTES_MAX: Final = 1 << 16  # of a peer that is not known yet
ELEMENTS_MAX: Final = 1 << 23  # of all arrays and maps in a frame; a client's elements have about four bytes each
_CHECKED_BYTES: Final = 1 << 14


class WireError(Exception):
    """The other side sent something that this version of perco never sends, so the connection ends."""


def packed(message: Message) -> bytes:
    """A message as it is encoded in a frame. Raises: TypeError, ValueError, OverflowError for a message that cannot be
    sent."""
    data: bytes = msgpack.packb(message)
    return data


def packer() -> Callable[[Message], bytes]:
    """A function like `packed`, for many messages; only one thread may use it."""
    pack: Callable[[Message], bytes] = msgpack.Packer().pack
    return pack


def frame(messages: list[bytes]) -> bytes:
    """One frame of packed messages."""
    assert len(messages) <= MESSAGES_MAX
    body = b"".join(messages)
    return _HEAD.pack(len(body) + 3, 0xDC, len(messages)) + body  # 0xDC: an array with a length of 16 bits


class FrameDecoder:
    """Turns received bytes into the messages of each whole frame: see `feed`."""

    def __init__(self, frame_bytes_max: int, *, maps: bool = True) -> None:
        self.max = frame_bytes_max
        self.maps = maps  # whether maps are accepted
        self._received = bytearray()
        self._wanted = -1  # the length of the frame that has begun; -1: none has

    def feed(self, data: bytes | bytearray) -> Iterator[list[Message]]:
        """The messages of each frame that `data` completes. Raises: WireError, before any part of a bad frame is
        yielded."""
        received = self._received
        received += data
        at = 0
        try:
            while True:
                if self._wanted < 0:
                    if len(received) - at < _LENGTH.size:
                        return
                    (self._wanted,) = _LENGTH.unpack_from(received, at)
                    if self._wanted > self.max:
                        raise WireError(f"a frame of {self._wanted} bytes; at most {self.max} are accepted")
                    at += _LENGTH.size
                if len(received) - at < self._wanted:
                    return
                body = bytes(memoryview(received)[at : at + self._wanted])
                at += self._wanted
                self._wanted = -1
                yield _messages(body, self.maps)
        finally:
            del received[:at]

    @property
    def inside(self) -> bool:
        """Whether a frame has begun and is not complete yet."""
        return self._wanted >= 0 or bool(self._received)


def _messages(body: bytes, maps: bool) -> list[Message]:
    try:
        if len(body) > _CHECKED_BYTES:
            _must_be_whole(body)
        if len(body) > ELEMENTS_MAX:  # otherwise it cannot hold that many
            found = _counted(body, maps)
        elif maps:
            found = msgpack.unpackb(body, use_list=False, strict_map_key=False)
        else:
            found = msgpack.unpackb(body, use_list=False, object_hook=_no_map, max_map_len=0)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a frame that cannot be decoded: {type(error).__name__} {error}") from error
    if type(found) is not tuple:
        raise WireError(f"a frame that holds no messages: {str(found)[:40]!r}")
    for message in found:
        if type(message) is not tuple or not message:
            raise WireError(f"a message that is not an array: {str(message)[:40]!r}")
    return list(found)


def _must_be_whole(body: bytes) -> None:
    """Check that a frame is complete, without making objects. Before msgpack 1.2.4, unpacking allocated memory for the
    length that an array declares: a few thousand unfinished arrays, nested in one another, would take gigabytes."""
    walk = msgpack.Unpacker(max_buffer_size=len(body), read_size=len(body))
    walk.feed(body)
    walk.skip()


def _no_map(_: object) -> None:
    raise ValueError("a map")


def _counted(body: bytes, maps: bool) -> Any:
    left = ELEMENTS_MAX

    def count(found: Any) -> Any:
        nonlocal left
        left -= len(found)
        if left < 0:
            raise ValueError(f"more than {ELEMENTS_MAX} elements")
        return found

    return msgpack.unpackb(
        body,
        use_list=False,
        strict_map_key=False,
        list_hook=count,
        object_hook=count if maps else _no_map,
        max_array_len=ELEMENTS_MAX,
        max_map_len=ELEMENTS_MAX if maps else 0,
    )
