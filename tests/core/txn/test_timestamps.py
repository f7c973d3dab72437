"""The counter below a durable bound, and the clock that never goes back."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from perco.clock.timestamps import Timestamps, WallClock
from perco.errors import StoreError
from perco.storage import TS_MAX


def test_nothing_is_handed_out_above_the_durable_bound() -> None:  # O1
    timestamps = Timestamps(0)
    assert timestamps.draw() == 0
    timestamps.extend(3)
    assert [timestamps.draw() for _ in range(5)] == [1, 2, 3, 0, 0]
    assert timestamps.last == 3


def test_a_restart_goes_on_above_the_bound() -> None:  # O1
    before = Timestamps(0)
    before.extend(100)
    used = [before.draw() for _ in range(5)]
    after = Timestamps(100)
    assert after.draw() == 0
    after.extend(200)
    assert after.draw() == 101 > max(used)


def test_a_bound_only_moves_up() -> None:  # O1
    timestamps = Timestamps(10)
    with pytest.raises(AssertionError):
        timestamps.extend(10)


def test_asking_for_a_bound_promises_nothing() -> None:  # O1
    """The bound counts from `extend` on, which is called when it is durable."""
    timestamps = Timestamps(10)
    assert timestamps.next_bound(5) == 15
    assert timestamps.draw() == 0


def test_timestamps_are_dense_from_one() -> None:  # O3
    timestamps = Timestamps(0)
    timestamps.extend(2)
    timestamps.draw()
    timestamps.draw()
    timestamps.extend(4)
    assert timestamps.draw() == 3


def test_they_end_at_two_to_the_53rd() -> None:  # O3
    timestamps = Timestamps(TS_MAX - 2)
    assert timestamps.next_bound(100) == TS_MAX
    timestamps.extend(TS_MAX)
    assert [timestamps.draw() for _ in range(3)] == [TS_MAX - 1, TS_MAX, 0]
    with pytest.raises(StoreError):
        timestamps.next_bound(1)


@given(st.lists(st.one_of(st.just("draw"), st.integers(1, 5), st.just("restart")), max_size=60))
def test_unique_and_increasing_over_any_restarts(actions: list[str | int]) -> None:  # O1
    timestamps, bound, drawn = Timestamps(0), 0, [0]
    for action in actions:
        if action == "draw":
            ts = timestamps.draw()
            if ts:
                assert ts > drawn[-1]
                assert ts <= bound
                drawn.append(ts)
        elif action == "restart":
            timestamps = Timestamps(bound)
        else:
            assert isinstance(action, int)
            bound = timestamps.next_bound(action)  # durable from here on
            timestamps.extend(bound)


@given(st.integers(0, 10**13), st.lists(st.floats(0, 10**10), max_size=30))
def test_wall_times_never_go_back(last_ms: int, walls: list[float]) -> None:  # O3
    clock, before = WallClock(last_ms), last_ms
    for wall in walls:
        now = clock.tell_ms(wall)
        assert now == max(before, int(wall * 1000))
        before = now
