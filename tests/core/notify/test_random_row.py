"""Where a scanner begins: at a random key between the first dirty row and the last."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import example, given, strategies as st

from perco.notify.walk import random_row


@given(st.binary(max_size=20), st.binary(max_size=20), st.integers(0, 2**32))
@example(b"a" * 12 + b"1", b"b", 0)
@example(b"ab", b"ac", 0)
@example(b"", b"\x00", 0)
def test_it_lies_between_the_two(one: bytes, other: bytes, seed: int) -> None:  # N8
    first, last = sorted((one, other))
    assert first <= random_row(first, last, random.Random(seed)) <= last


class Edge(random.Random):
    """Always draws the smallest, or always the greatest."""

    def __init__(self, *, lowest: bool) -> None:
        super().__init__(0)
        self._lowest = lowest

    def randint(self, a: int, b: int) -> int:
        return a if self._lowest else b


@given(st.binary(max_size=12), st.binary(max_size=12), st.booleans())
def test_it_lies_between_the_two_at_the_edges_too(one: bytes, other: bytes, lowest: bool) -> None:  # N8
    first, last = sorted((one, other))
    assert first <= random_row(first, last, Edge(lowest=lowest)) <= last


def test_one_dirty_row_is_where_it_begins() -> None:  # N8
    assert random_row(b"only", b"only", random.Random(1)) == b"only"


RANGES = [
    pytest.param(b"\x00", b"\xff" * 8, 0, id="all keys"),
    pytest.param(b"https://example.org/a", b"https://example.org/z", 20, id="a long prefix in common"),
    pytest.param((5).to_bytes(8, "big"), (1 << 40).to_bytes(8, "big"), 2, id="numbers"),
]


@pytest.mark.parametrize(("first", "last", "at"), RANGES)
def test_it_is_about_even(first: bytes, last: bytes, at: int) -> None:  # N8: scanners must not clump
    rng = random.Random(4711)
    low, high = (int.from_bytes(key[at : at + 6].ljust(6, b"\x00"), "big") for key in (first, last))
    drawn: Counter[int] = Counter()
    for _ in range(4000):
        place = int.from_bytes(random_row(first, last, rng)[at : at + 6].ljust(6, b"\x00"), "big")
        drawn[min(8 * (place - low) // (high - low), 7)] += 1
    assert set(drawn) == set(range(8))
    assert all(400 < count < 600 for count in drawn.values()), drawn
