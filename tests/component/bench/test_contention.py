"""The contention benchmark, on a few transactions in memory: nothing is lost; no figure of it is judged here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bench import contention
from bench.contention import Counted, Scene

HOT = Scene(skew=1.2, rows=2, in_flight=20)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "ROWS", 10)


@pytest.mark.parametrize("scene", [HOT, replace(HOT, turns=False), replace(HOT, skew=0.0, in_flight=1)], ids=str)
async def test_every_transaction_counts_once(scene: Scene) -> None:
    found = await contention.under(scene, "memory:", 0.05)
    assert found.seconds >= 0.05
    assert len(found.unfinished) <= scene.in_flight
    assert found.calls + len(found.unfinished) >= scene.in_flight
    assert (found.retries == 0) or scene.in_flight > 1


def test_a_lost_update_is_found_out() -> None:
    contention.must_add_up(total=20, committed=2, rows=10)
    for total in (19, 21):
        with pytest.raises(AssertionError, match="2 transactions on 10 rows each"):
            contention.must_add_up(total, committed=2, rows=10)


@pytest.mark.parametrize("adds", [False, True])
async def test_every_addition_to_the_counter_is_counted(adds: bool) -> None:
    found = await contention.counting(adds, "memory:", 0.05)  # it checks the sum
    assert found.calls >= contention.CALLERS
    assert not found.unfinished
    assert (found.retries > 0) == (not adds)


@pytest.mark.parametrize("make", [contention.strong, contention.weak])
@pytest.mark.parametrize("concurrency", [1, 16])
async def test_every_change_is_counted(make: Callable[[], Counted], concurrency: int) -> None:
    found = await contention.counted(make(), 40, "memory:", concurrency)
    assert found.calls == 40


def test_the_grid_has_what_is_told_of_it() -> None:
    scenes = contention.scenes()
    assert len(scenes) == len(set(scenes)) == len({scene.key for scene in scenes})
    assert set(contention.QUICK) - set(scenes) == set()
    for scene in scenes:
        assert scene.turns or replace(scene, turns=True) in scenes
