"""When a run that failed may be tried again."""

from __future__ import annotations

import random

from hypothesis import given, strategies as st

from perco.notify.backoff import Backoff, BackoffOptions

KEY = ("docs", b"row", 1 << 16 | 1)
OTHER = ("docs", b"other", 1 << 16 | 1)


def backoff(seed: int = 0, *, first_s: float = 1.0, max_s: float = 60.0, remembered_max: int = 100) -> Backoff:
    options = BackoffOptions(first_s=first_s, max_s=max_s, remembered_max=remembered_max)
    return Backoff(options, random.Random(seed))


def test_what_never_failed_does_not_wait() -> None:  # N6
    fresh = backoff()
    assert not fresh.waits(KEY, now=0.0)
    assert fresh.attempts(KEY) == 0
    assert fresh.next_due(0.0) is None
    assert len(fresh) == 0


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_each_pause_is_between_half_and_all_of_twice_the_last(seed: int, failures: int) -> None:  # N6
    failing = backoff(seed)
    now = 0.0
    for n in range(failures):
        until = failing.failed(KEY, now)
        longest = min(2.0**n, 60.0)
        assert longest / 2 <= until - now <= longest + 1e-9
        assert failing.attempts(KEY) == n + 1
        now = until


def test_pauses_differ_so_that_what_failed_together_is_not_tried_together() -> None:  # N6
    failing = backoff()
    due = {failing.failed(("docs", str(n).encode(), 1), 0.0) for n in range(50)}
    assert len(due) == 50


def test_it_waits_until_then_and_no_longer() -> None:  # N6
    failing = backoff()
    until = failing.failed(KEY, 10.0)
    assert failing.waits(KEY, 10.0)
    assert failing.waits(KEY, until - 0.001)
    assert not failing.waits(KEY, until)
    assert not failing.waits(OTHER, 10.0)


def test_success_forgets_the_failures() -> None:  # N6
    failing = backoff()
    failing.failed(KEY, 0.0)
    failing.failed(KEY, 1.0)
    failing.succeeded(KEY)
    assert failing.attempts(KEY) == 0
    assert not failing.waits(KEY, 1.0)
    assert failing.failed(KEY, 100.0) <= 101.0
    failing.succeeded(OTHER)  # never failed: nothing to forget


def test_the_next_moment_to_look_is_the_earliest() -> None:  # N6, N8
    failing = backoff()
    late = failing.failed(KEY, 100.0)
    early = failing.failed(OTHER, 50.0)
    assert failing.next_due(50.0) == early
    assert failing.next_due(early) == late  # a change that is due now is looked at now
    assert failing.next_due(late) is None


def test_a_failure_after_a_longer_one_is_still_found_first() -> None:  # N6, N8
    failing = backoff()
    for _ in range(6):
        last = failing.failed(KEY, 0.0)
    soon = failing.failed(OTHER, 0.0)
    assert soon < last
    assert failing.next_due(0.0) is not None
    assert failing.next_due(0.0) <= soon  # type: ignore[operator]


def test_memory_is_bounded_and_forgets_the_oldest() -> None:  # N6
    failing = backoff(remembered_max=3)
    rows = [("docs", str(n).encode(), 1) for n in range(10)]
    for row in rows:
        failing.failed(row, 0.0)
    assert len(failing) == 3
    assert [failing.attempts(row) for row in rows] == [0] * 7 + [1] * 3
