"""Who lives, and what became of the others."""

from __future__ import annotations

import pytest

from perco.txn.fates import _REMEMBERED, Fates


def test_it_lives_from_its_beginning_until_it_is_settled() -> None:  # L1
    fates = Fates()
    assert not fates.alive(5)
    fates.begin(5)
    assert fates.alive(5)
    assert fates.live() == 1
    fates.settle(5, 9)
    assert not fates.alive(5)
    assert fates.known(5) == 9


def test_aborted_is_zero_and_unknown_is_none() -> None:  # T4
    fates = Fates()
    for start_ts, fate in ((5, 0), (6, None)):
        fates.begin(start_ts)
        fates.settle(start_ts, fate)
        assert fates.known(start_ts) == fate
        assert not fates.alive(start_ts)


def test_a_fate_never_changes() -> None:  # T1
    fates = Fates()
    fates.learn(5, 9)
    fates.learn(5, 9)
    for other in (0, 10):
        with pytest.raises(AssertionError, match="T1"):
            fates.learn(5, other)


def test_the_oldest_fates_are_forgotten() -> None:
    fates = Fates()
    many = 4 * _REMEMBERED
    for start_ts in range(1, many + 1):
        fates.learn(start_ts, 0)
    assert fates.known(1) is None
    assert fates.known(many) == 0
    assert sum(fates.known(start_ts) is not None for start_ts in range(1, many + 1)) <= 2 * _REMEMBERED + 1
    fates.learn(1, 7)  # a forgotten fate may be learned again
    assert fates.known(1) == 7
