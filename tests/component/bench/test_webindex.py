"""The benchmark of the web index, on a few pages: it builds what it says; no figure of it is judged here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.webindex import Step, TwoKeys, WebIndex, build, yardstick
from perco.webindex import batch
from perco.webindex.exporter import Exporter
from perco.webindex.synthetic import SyntheticWeb


@pytest.mark.parametrize("make", [WebIndex, TwoKeys])
async def test_a_web_is_built_step_by_step(tmp_path: Path, make: Callable[[Exporter], WebIndex]) -> None:
    told: list[int] = []
    built = await build(
        "memory:", tmp_path / "search", 30, make=make, step=20, seed=1, rank=True, told=lambda b: told.append(b.pages)
    )
    assert told == [20, 30]
    assert built.documents == len(batch.build(SyntheticWeb(30, 1)))
    assert built.observers["parse"].commits == 30
    assert built.ranked > 0
    assert ("elect by title" in built.observers) is (make is TwoKeys)
    assert built.last(10) == built.steps[-1]


def test_steps_are_told_at_one_speed() -> None:
    assert Step(10, 2.0, 4.0, yard_s=0.5).scaled(0.25) == Step(10, 2.0, 2.0, 0.25)
    assert yardstick() > 0
