"""Since when a change is there, and when it is due."""

from __future__ import annotations

import random
from typing import Any

import pytest

from perco.notify.delays import Delays
from perco.schema.manner import Manner

MANNER = Manner(delay_s=10.0, max_delay_s=40.0)
STEP_S = 40.0 / 4096


def delays(notes: dict[int, int] | None = None, *, wall_ms: int = 0, last: int = 100, now: float = 1000.0) -> Delays:
    async def noted(ts: int) -> int | None:
        asked.append(ts)
        return next((wall for at, wall in sorted((notes or {}).items()) if at >= ts), None)

    asked: list[int] = []
    made = Delays(MANNER, last, now, wall_ms, noted)
    made.asked = asked  # type: ignore[attr-defined]
    return made


async def test_a_change_is_due_after_its_delay_and_never_before() -> None:
    found = await delays().due(101, 101, 1000.0)
    assert 1010.0 <= found <= 1010.0 + STEP_S


async def test_a_newer_change_begins_the_wait_anew_up_to_the_longest() -> None:
    each = delays()
    for second in range(100):
        now = 1000.0 + second
        found = await each.due(101 + second, 101, now)
        assert min(now + 10.0, 1040.0) <= found <= min(now + 10.0, 1040.0) + STEP_S


async def test_it_says_the_same_whenever_it_is_asked() -> None:
    each = delays()
    first = await each.due(101, 101, 1000.0)
    for second in range(1, 200):
        await each.due(101 + second, 101 + second, 1000.0 + second)
        assert await each.due(101, 101, 1000.0 + second) == first or 1000.0 + second > first


async def test_what_was_there_before_is_told_by_the_notes_of_the_clock() -> None:  # O3
    each = delays({50: 4_000, 80: 9_000}, wall_ms=12_000)
    assert await each.due(50, 50, 1000.0) == 1000.0 - 8 + 10
    assert await each.due(51, 51, 1000.0) == 1000.0 - 3 + 10
    assert await each.due(81, 81, 1000.0) == 1000.0 + 10, "after the last note: as if it had come now"
    assert await each.due(81, 20, 1005.0) == 1000.0 + 10
    assert await each.due(81, 20, 1005.0) == 1000.0 + 10
    assert each.asked == [50, 51, 81, 20]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("wall_ms", "due"), [(10**12, 1000.0), (0, 1010.0)])
async def test_a_wall_clock_that_was_set_neither_holds_for_ever_nor_for_longer(wall_ms: int, due: float) -> None:
    """Forward: it is due at once. Back: it waits for one delay, from when the worker began."""
    assert await delays({50: 1_000_000}, wall_ms=wall_ms).due(50, 50, 1000.0) <= due


async def test_it_remembers_no_more_than_the_longest_wait_needs() -> None:
    each, rng, now = delays(), random.Random(7), 1000.0
    born: dict[int, float] = {}
    for ts in range(101, 60_000):
        now += rng.expovariate(500.0)
        born[ts] = now
        await each.due(ts, ts, now)
        old = rng.randint(max(101, ts - 15_000), ts)
        found = await each.due(old, old, now)
        assert found >= born[old] + 10.0
        assert found <= born[old] + 10.0 + 2 * STEP_S or found <= now
    assert len(each._upto) == len(each._by) <= 2 * 4096


async def test_a_row_that_is_held_is_so_until_then() -> None:
    each = delays()
    key: Any = ("docs", b"a", 1)
    assert each.held(key, 0.0) == 0.0
    each.hold(key, 5.0)
    assert each.held(key, 4.9) == 5.0
    assert each.held(key, 5.0) == 0.0
    assert each.held(key, 4.9) == 0.0, "and is forgotten"
