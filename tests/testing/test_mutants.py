"""Each mutant dies, and changes that break no rule raise nothing: `make test-mutants`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.testing import seeds
from tests.testing.mutants import HARMLESS, MUTANTS, PROTECTED, SLOW
from tests.testing.mutants_ahead import AHEAD
from tests.testing.mutants_batches import BATCHES
from tests.testing.mutants_changes import CHANGES
from tests.testing.mutants_direct import DIRECT
from tests.testing.mutants_failing import FAILING
from tests.testing.mutants_growing import GROWING
from tests.testing.mutants_one_step import ONE_STEP, ONE_STEP_HARMLESS
from tests.testing.mutants_serializable import LOCKS, SERIALIZABLE
from tests.testing.mutants_served import SERVED
from tests.testing.mutants_signals import SIGNALS, SIGNALS_HARMLESS, SIGNALS_SLOW
from tests.testing.seeds import SEEDS_MAX, died

DOCS = Path(__file__).parents[2] / "docs" / "testing.md"

ALL_HARMLESS = {**HARMLESS, **ONE_STEP_HARMLESS, **SIGNALS_HARMLESS}


@cache
def told_seeds() -> dict[str, int]:
    """For each mutant the median number of seeds to its death, as docs/testing.md states it."""
    rows = re.findall(r"^\| ([A-Z]\d+ .*?) \| (\d+)(?:; not within .*)? \|$", DOCS.read_text(), re.MULTILINE)
    return {name: int(seeds) for name, seeds in rows}


@pytest.mark.parametrize("name", seeds.ALL)
def test_a_mutant_dies(name: str) -> None:
    """The seed that is kept for it comes first, to save time. `pytest -rP` prints how it was found."""
    found = seeds.search(name, (seeds.kept().get(name, 0), *range(SEEDS_MAX)))
    if found is None:
        pytest.fail(f"{name}: not found in {SEEDS_MAX} seeds")
    seed, how, _ = found
    broken = re.search(r"(Attribute|Name|Type|Value)Error[:(]|IndexError:|^error:", how)
    assert not broken, f"the mutant itself is broken: {how}"
    print(f"{name}: found by seed {seed}; {how[:200]}")


def test_the_table_of_mutants_is_whole() -> None:
    every = {
        *MUTANTS,
        *SLOW,
        *ONE_STEP,
        *SIGNALS,
        *SIGNALS_SLOW,
        *FAILING,
        *BATCHES,
        *GROWING,
        *AHEAD,
        *CHANGES,
        *SERVED,
        *DIRECT,
        *SERIALIZABLE,
        *LOCKS,
    }
    assert set(told_seeds()) == every
    assert max(told_seeds().values()) <= SEEDS_MAX
    assert set(seeds.kept()) <= set(seeds.ALL)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ALL_HARMLESS)
def test_what_breaks_no_rule_raises_nothing(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ALL_HARMLESS[name](monkeypatch)
    assert died(seed) == ""


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", PROTECTED)
def test_what_another_rule_makes_good_raises_nothing(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    PROTECTED[name](monkeypatch)
    assert died(seed) == ""
