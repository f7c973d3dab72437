"""A transaction's own rows, in order, against a sorted set."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from perco.txn import own_rows as module
from perco.txn.own_rows import OwnRows, SortedRows


@pytest.mark.parametrize("seed", range(20))
def test_sorted_rows_are_a_sorted_set(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 3)
    rng = random.Random(seed)
    rows, model = SortedRows(), set()
    for _ in range(200):
        row = rng.randbytes(rng.choice([0, 1, 1, 2]))
        rows.add(row)
        model.add(row)
        low, high = rng.randbytes(rng.choice([0, 1])), rng.choice([None, rng.randbytes(1)])
        assert list(rows.between(low, high)) == sorted(r for r in model if low <= r and (high is None or r < high))
    assert max(map(len, rows._chunks)) < 6, "so adding a row moves few"
    assert len(rows._chunks) > 10
    assert all(first < second for first, second in pairwise(rows._firsts))


def test_rows_of_other_tables_and_columns_are_left_out() -> None:
    writes: dict[tuple[str, bytes, int], Any] = {("t", b"a", 1): 0, ("t", b"b", 2): 0, ("u", b"a", 2): 0}
    own = OwnRows()
    assert own.within(writes, "t", {2}, b"", None) == [b"b"]
    writes["t", b"a", 2] = 0  # the row is known by then
    assert own.within(writes, "t", {2}, b"", None) == [b"a", b"b"]
    assert own.within(writes, "t", {1, 2}, b"", b"b") == [b"a"]
    assert own.within(writes, "v", {1, 2}, b"", None) == []
