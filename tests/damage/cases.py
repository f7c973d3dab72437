"""Cases of damage to the files of a store. A case is a seed: the same seed damages the same file in the same way."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PAGE: Final = 4096
_RANGE_MAX: Final = 64
_OPENERS: Final = ("check", "check --json", "status", "scan", "open")


@dataclass(frozen=True, slots=True)
class Case:
    """One damaged file.

    Attributes:
        seed: makes the same case again.
        file: which file, relative to the store.
        what: the damage, for people.
        data: what the file holds then; None: it is gone.
        reader: what else is run over the store, besides `perco check`.
    """

    seed: int
    file: str
    what: str
    data: bytes | None
    reader: str


def case_of(seed: int, files: Mapping[str, bytes]) -> Case:
    """Damage one of these files. Files of cells are chosen most often, their used pages above all."""
    rng = random.Random(seed)
    names = sorted(files)
    weights = [8 if name.endswith("data.mdb") else 1 for name in names]
    name = rng.choices(names, weights)[0]
    before = files[name]
    act = rng.choices(
        (_bit, _byte, _range, _zeroed, _filled, _swapped, _copied, _truncated, _appended, _emptied, _removed),
        (6, 6, 4, 2, 1, 2, 2, 3, 1, 0.5, 0.5),
    )[0]
    what, after = act(rng, before)
    return Case(seed, name, what, after, rng.choice(_OPENERS))


def _used(data: bytes) -> int:
    """Bytes of a file up to its last page that holds anything: files are allocated ahead."""
    used = len(data.rstrip(b"\0"))
    return max(min(-(-used // PAGE) * PAGE, len(data)), 1)


def _at(rng: random.Random, data: bytes) -> int:
    """Half of the time in the first bytes of a page, where headers and pointers lie."""
    used = _used(data)
    if rng.random() < 0.5 and used > PAGE:
        return min(rng.randrange(used // PAGE) * PAGE + rng.randrange(128), used - 1)
    return rng.randrange(used)


def _bit(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    if not data:
        return _appended(rng, data)
    at, bit = _at(rng, data), rng.randrange(8)
    return f"bit {bit} of byte {at} flipped", _with(data, at, bytes([data[at] ^ 1 << bit]))


def _byte(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    if not data:
        return _appended(rng, data)
    at, byte = _at(rng, data), rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return f"byte {at} is {byte:#x}", _with(data, at, bytes([byte]))


def _range(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    if not data:
        return _appended(rng, data)
    at = _at(rng, data)
    count = min(rng.randint(2, _RANGE_MAX), len(data) - at)
    return f"{count} bytes from {at} on are noise", _with(data, at, rng.randbytes(count))


def _page(rng: random.Random, data: bytes) -> int:
    return rng.randrange(max(_used(data) // PAGE, 1)) * PAGE


def _zeroed(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    at = _page(rng, data)
    return f"page {at // PAGE} is zeroed", _with(data, at, bytes(len(data[at : at + PAGE])))


def _filled(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    at = _page(rng, data)
    return f"page {at // PAGE} is noise", _with(data, at, rng.randbytes(len(data[at : at + PAGE])))


def _swapped(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    one, other = _page(rng, data), _page(rng, data)
    first, second = data[one : one + PAGE], data[other : other + PAGE]
    if len(first) != len(second):
        return _zeroed(rng, data)
    return f"pages {one // PAGE} and {other // PAGE} are swapped", _with(_with(data, one, second), other, first)


def _copied(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """A page in the place of another, under that one's number, as a lost or misdirected write leaves it."""
    one, other = _page(rng, data), _page(rng, data)
    page = data[one : one + PAGE]
    if len(page) != len(data[other : other + PAGE]):
        return _zeroed(rng, data)
    numbered = data[other : other + 8] + page[8:]
    return f"page {other // PAGE} holds what is in page {one // PAGE}", _with(data, other, numbered)


def _truncated(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    size = rng.randrange(_used(data))
    if rng.random() < 0.5:
        size -= size % PAGE
    return f"truncated to {size} of {len(data)} bytes", data[:size]


def _appended(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    count = rng.choice((1, 100, PAGE, 5 * PAGE))
    return f"{count} bytes appended", data + rng.randbytes(count)


def _emptied(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    return "emptied", b""


def _removed(rng: random.Random, data: bytes) -> tuple[str, None]:
    return "removed", None


def _with(data: bytes, at: int, piece: bytes) -> bytes:
    return data[:at] + piece + data[at + len(piece) :]
