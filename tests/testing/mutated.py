"""A pytest plugin: with `-p tests.testing.mutated`, tests run under the fault that $PERCO_MUTANT names."""

from __future__ import annotations

import os

import pytest

from tests.support.unlaned import without_lanes
from tests.testing import (  # noqa: F401 - they add to COMPONENTS
    mutants_backups,
    mutants_batches,
    mutants_bigtable,
    mutants_evolving,
    mutants_fresh,
    mutants_holding,
    mutants_lane,
    mutants_loading,
    mutants_views,
)
from tests.testing.mutants_components import COMPONENTS

VARIABLE = "PERCO_MUTANT"


@pytest.fixture(autouse=True)
def _fault(monkeypatch: pytest.MonkeyPatch) -> None:
    without_lanes(monkeypatch)  # tests of their own hold the lanes against the machine
    COMPONENTS[os.environ[VARIABLE]].mutant(monkeypatch)
