"""The dirty rows for the comparisons of scanners: in hot ranges, or anywhere, in a table of several tablets."""

from __future__ import annotations

import random
from typing import Final

import perco

TABLETS: Final = 16
KEYS: Final = 1 << 32
HOT_RANGES: Final = 3
HOT_SHARE: Final = 1 / 64  # of the key space, each
RUN_S, SLOW_RUN_S, ONE_SLOW_IN = 0.005, 0.050, 10  # an observer's own work


def table() -> perco.Table[bytes]:
    """A table of documents, with `TABLETS` tablets."""
    return perco.Table("docs", splits=[key(i * KEYS // TABLETS) for i in range(1, TABLETS)])


def dirty(rows: int, rng: random.Random, *, hot: bool = True) -> list[int]:
    """Numbers of dirty rows, in order."""
    if not hot:
        return sorted(rng.sample(range(KEYS), rows))
    size, tablet = int(KEYS * HOT_SHARE), KEYS // TABLETS
    starts = [t * tablet + rng.randrange(tablet - size) for t in rng.sample(range(TABLETS), HOT_RANGES)]
    return sorted(starts[i % HOT_RANGES] + j for i, j in enumerate(rng.sample(range(size), rows)))


def slow(rows: list[int], rng: random.Random) -> set[int]:
    """The rows for which an observer takes longer."""
    return set(rng.sample(rows, len(rows) // ONE_SLOW_IN))


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def number(key: bytes) -> int:
    return int.from_bytes(key, "big")
