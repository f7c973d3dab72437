"""Each front does the work that is timed."""

from __future__ import annotations

import pytest

from bench import fronts


@pytest.mark.parametrize("work", ["reading", "writing"])
def test_each_front_does_the_same_work(work: str) -> None:
    blocking = getattr(fronts, f"{work}_blocking")
    assert fronts.on_trio("memory:", getattr(fronts, work), 3, 2) > 0
    assert fronts.on_asyncio("memory:", getattr(fronts, work), 3, 2) > 0
    assert fronts.in_threads("memory:", blocking, 3, 2) > 0
